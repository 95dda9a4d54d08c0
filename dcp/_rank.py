"""A rank that `dcp.launch` or ``dcp launch`` started: what runs in the child process.

The launcher passes a task (a pickled dictionary in an unnamed file) and, for functions, a pipe
for reports: frames of 8 bytes of length and a pickled ``(kind, value)``. Kinds: ``event`` (an
object of `World.emit`), ``result``, ``error``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import runpy
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["main"]


class _Pipe:
    """The write end of the reports; any thread may send."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        import cloudpickle

        frame = cloudpickle.dumps((kind, value))
        data = memoryview(struct.pack("<q", len(frame)) + frame)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def _read_task(fd: int) -> dict[str, Any]:
    # all ranks share one file, hence one file offset: read by position
    parts, offset = [], 0
    while part := os.pread(fd, 1 << 24, offset):
        parts.append(part)
        offset += len(part)
    os.close(fd)
    task: dict[str, Any] = pickle.loads(b"".join(parts))
    return task


def _error_report(error: BaseException) -> dict[str, Any]:
    import cloudpickle

    pickled = None
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    return {
        "error": pickled,
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "code": error.code if isinstance(error, SystemExit) else None,
    }


def _abort(error: BaseException) -> None:
    """Tell the other ranks, so that their calls fail at once and say why."""
    from dcp import world as world_module

    open_world = world_module._world
    if open_world is not None and not open_world.closed:
        open_world.abort(f"{type(error).__name__}: {error}"[:400])


def _run_function(task: dict[str, Any], report_fd: int) -> int:
    pipe = _Pipe(report_fd)
    try:
        sys.path[:] = task["path"]
        sys.argv[:] = task["argv"]
        from dcp import world as world_module

        call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(task["call"])
        fn, args = call
        world_module._emit = lambda obj: pipe.send("event", obj)
        world = world_module.init(link=task["link"])
        result = fn(world, *args)
        pipe.send("result", result)
        return 0
    except BaseException as error:
        _abort(error)
        pipe.send("error", _error_report(error))
        return 1


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _run_script(task: dict[str, Any]) -> int:
    argv: list[str] = task["argv"]
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
        return 0
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            _abort(error)
        return code
    except BaseException as error:
        traceback.print_exc()
        _abort(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def main(parent: int, task_fd: int, report_fd: int) -> NoReturn:
    """Run the task and end the process with its exit code.

    Parameters
    ----------
    parent : int
        Process id of the launcher: when it ends, this process is killed.
    task_fd, report_fd : int
        Descriptors of the task and of the reports (-1: a script, which reports nothing).
    """
    from dcp import _dcp

    faulthandler.enable()  # a crash in C shows where Python was
    if not _dcp.die_with_parent(parent):
        os._exit(1)
    task = _read_task(task_fd)
    code = _run_script(task) if report_fd < 0 else _run_function(task, report_fd)
    sys.exit(code)
