"""Start ranks on this machine: a function (also one of a notebook cell) or a script."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, TextIO

from dcp import _env
from dcp._dcp import AbortedError, ArgumentError, RankError

if TYPE_CHECKING:
    from dcp.link import Link

__all__ = ["launch", "launch_command"]

RANKS_PER_CORE = 64
_GRACE_S = 2.0  # for ranks to notice that another one failed
_TERM_S = 2.0  # from SIGTERM (or SIGINT) to SIGKILL
_POLL_S = 0.1

# Imports dcp from where this process has it, then takes that folder off the path again, so that
# the child finds everything else where it would without us.
_BOOT = (
    "import sys; sys.path.insert(0, {folder!r}); import dcp; del sys.path[0]; "
    "from dcp._rank import main; main({parent}, {task}, {report})"
)


@dataclass
class _Child:
    """One rank's process, and what it reported."""

    rank: int
    process: subprocess.Popen[bytes]
    code: int | None = None  # exit code, negative: signal
    killed_by_us: bool = False
    result: tuple[Any] | None = None
    error: dict[str, Any] | None = None
    failed_at: float = float("inf")  # when the parent saw the failure
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal_all(self, number: int) -> None:
        """Signal the rank and whatever it started (it leads a process group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def poll(self) -> bool:
        """Has it ended? Ends what it leaves behind, before its process id is free again."""
        if self.code is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, flags) is None:
                return False
            self.signal_all(signal.SIGKILL)
            self.code = self.process.wait()
        return True


def _check_ranks(ranks: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks={ranks!r} must be an integer >= 1")
    if ranks > RANKS_PER_CORE * cores:
        raise ArgumentError(
            f"ranks={ranks} is more than {RANKS_PER_CORE} a core: "
            f"at most {RANKS_PER_CORE * cores} on {cores} cores"
        )
    return ranks


def _rank_environment(rank: int, ranks: int, run_id: str) -> dict[str, str]:
    env = dict(os.environ)
    env["DCP_RANK"] = env["DCP_LOCAL_RANK"] = str(rank)
    env["DCP_WORLD_SIZE"] = env["DCP_LOCAL_WORLD_SIZE"] = str(ranks)
    env["DCP_RUN_ID"] = run_id
    threads = str(_env.thread_count(ranks))
    env["DCP_NUM_THREADS"] = threads
    # the thread pools of NumPy's BLAS and of PyTorch: else every rank takes every core
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        env.setdefault(name, threads)
    return env


def _is_standard(stream: TextIO | Any, fd: int) -> bool:
    """Does the stream write to descriptor `fd`? Not in notebooks and under pytest's capture."""
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


class _Run:
    """The processes of one run, from start to end."""

    def __init__(self, ranks: int, task: dict[str, Any], with_reports: bool) -> None:
        self.children: list[_Child] = []
        self.on_event: Callable[[Any], None] | None = None
        self.selector = selectors.DefaultSelector()
        self.run_id = f"dcp-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        try:
            with tempfile.TemporaryFile() as file:
                pickle.dump(task, file)
                file.flush()
                for rank in range(ranks):
                    self._start(rank, ranks, file, with_reports)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def _start(self, rank: int, ranks: int, task: IO[bytes], with_reports: bool) -> None:
        import dcp

        folder = os.path.dirname(os.path.dirname(os.path.abspath(dcp.__file__ or "")))
        read_fd, write_fd = os.pipe() if with_reports else (-1, -1)
        boot = _BOOT.format(folder=folder, parent=os.getpid(), task=task.fileno(), report=write_fd)
        passed = [task.fileno()] + ([write_fd] if with_reports else [])
        out = None if _is_standard(sys.stdout, 1) else subprocess.PIPE
        err = None if _is_standard(sys.stderr, 2) else subprocess.PIPE
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", boot, f"dcp-rank-{rank}-of-{ranks}"],
                env=_rank_environment(rank, ranks, self.run_id),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        finally:
            if with_reports:
                os.close(write_fd)
        child = _Child(rank, process)
        self.children.append(child)
        if with_reports:
            os.set_blocking(read_fd, False)
            self.selector.register(read_fd, selectors.EVENT_READ, (child, None))
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self.selector.register(pipe, selectors.EVENT_READ, (bytearray(), stream))

    def pump(self, timeout: float) -> None:
        """Take in what the ranks send for at most `timeout` seconds."""
        if not self.selector.get_map():
            time.sleep(timeout)
            return
        for key, _ in self.selector.select(timeout):
            owner, stream = key.data
            buffer: bytearray = owner.buffer if stream is None else owner
            try:
                data = os.read(key.fd, 1 << 20)
            except BlockingIOError:
                continue
            buffer += data
            if stream is None:
                self._take_frames(owner)
            else:
                _forward(buffer, stream, at_end=not data)
            if not data:
                self.selector.unregister(key.fileobj)
                if stream is None:
                    os.close(key.fd)

    def _take_frames(self, child: _Child) -> None:
        while len(child.buffer) >= 8:
            (length,) = struct.unpack_from("<q", child.buffer)
            if len(child.buffer) < 8 + length:
                return
            frame = bytes(child.buffer[8 : 8 + length])
            del child.buffer[: 8 + length]
            kind, value = pickle.loads(frame)
            if kind == "event":
                if self.on_event is not None:
                    self.on_event(value)
            elif kind == "result":
                child.result = (value,)
            else:
                child.error = value
                child.failed_at = time.monotonic()

    def _take_rest(self) -> None:
        """Take in all that ended ranks have reported: they may have ended since the last look."""
        for key in list(self.selector.get_map().values()):
            child, stream = key.data
            if stream is not None or child.code is None:
                continue
            data = b"more"
            with contextlib.suppress(BlockingIOError):  # a stray process has it open too
                while data:
                    data = os.read(key.fd, 1 << 20)
                    child.buffer += data
            self._take_frames(child)
            if not data:
                self.selector.unregister(key.fileobj)
                os.close(key.fd)

    def wait(self, is_failure: Callable[[_Child], bool]) -> bool:
        """Wait until all have ended. After a failure the others get a short while. True: all well.

        A rank has failed when it reported an error or `is_failure` says so once it ended.
        """
        deadline = float("inf")
        while True:
            ended = [child.poll() for child in self.children]
            self._take_rest()
            failed = False
            for child, is_over in zip(self.children, ended, strict=True):
                if child.error is not None or (is_over and is_failure(child)):
                    failed = True
                    child.failed_at = min(child.failed_at, time.monotonic())
            if all(ended):
                self.drain()
                return not failed
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                self.end(signal.SIGTERM)
                return False
            self.pump(_POLL_S)

    def drain(self) -> None:
        """Take in what ended ranks have left in their pipes."""
        deadline = time.monotonic() + 1.0  # a pipe that a stray process keeps open
        while self.selector.get_map() and time.monotonic() < deadline:
            self.pump(0.05)

    def end(self, first: int) -> None:
        """End all that still run: signal `first`, then SIGKILL."""
        for number, patience in ((first, _TERM_S), (signal.SIGKILL, 5.0)):
            running = [child for child in self.children if not child.poll()]
            for child in running:
                child.killed_by_us = True
                child.signal_all(number)
            deadline = time.monotonic() + patience
            while running and time.monotonic() < deadline:
                self.pump(0.02)
                running = [child for child in running if not child.poll()]
        self.drain()

    def close(self) -> None:
        """Let go of the pipes; kills what is left (an error or Ctrl-C came in between)."""
        for child in self.children:
            if not child.poll():
                child.signal_all(signal.SIGKILL)
                child.code = child.process.wait()
        for key in list(self.selector.get_map().values()):
            if key.data[1] is None:
                os.close(key.fd)
        self.selector.close()
        for child in self.children:
            for pipe in (child.process.stdout, child.process.stderr):
                if pipe is not None:
                    pipe.close()


def _forward(buffer: bytearray, stream: TextIO, at_end: bool) -> None:
    """Write whole lines, so that lines of different ranks do not mix."""
    end = len(buffer) if at_end else buffer.rfind(b"\n") + 1
    if end:
        stream.write(bytes(buffer[:end]).decode("utf-8", "replace"))
        stream.flush()
        del buffer[:end]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _death_text(child: _Child) -> str:
    """How a rank ended that gave no result."""
    code = child.code or 0
    who = f"rank {child.rank} (process {child.pid})"
    if code < 0:
        hint = " (by someone, or for want of memory)" if -code == signal.SIGKILL else ""
        return f"{who} was killed by {_signal_name(-code)}{hint}; the other ranks were ended"
    return f"{who} exited with code {code} before it returned; the other ranks were ended"


def _raise_failure(children: Sequence[_Child]) -> None:
    """Raise what failed first; a consequence on another rank only if there is nothing else."""
    for child in children:
        died = child.result is None and child.error is None and not child.killed_by_us
        if died:
            raise RankError(_death_text(child))
    reports = [
        (report["type"] == AbortedError.__name__, child.failed_at, child.rank, child.pid, report)
        for child in children
        if (report := child.error) is not None
    ]
    _, _, rank, pid, report = min(reports, key=lambda r: r[:3])
    where = f"rank {rank} of {len(children)} (process {pid})"
    if report["type"] == "SystemExit":
        raise RankError(f"{where} called sys.exit({report['code']!r})")
    error = None
    if report["error"] is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(report["error"])
    if not isinstance(error, Exception):
        raise RankError(f"{where} raised {report['type']}: {report['text']}\n{report['trace']}")
    error.add_note(f"\nRaised on {where}. Its traceback there:\n\n{report['trace']}")
    raise error


def launch(
    fn: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    on_event: Callable[[Any], None] | None = None,
    link: Link | None = None,
) -> list[Any]:
    """Run a function on several ranks of this machine and return what each returned.

    Every rank is a fresh Python process that calls ``fn(world, *args)``. Functions, closures and
    lambdas of a script or a notebook cell are sent by value; there is no need for
    ``if __name__ == "__main__"``. What ranks print appears here. Cores are shared out: each rank
    has cores / ranks threads, unless ``DCP_NUM_THREADS`` says otherwise.

    A rank that raises, dies or is killed ends all others, as does Ctrl-C here; ranks also end when
    this process does. Nothing is left behind.

    Parameters
    ----------
    fn : callable
        Called as ``fn(world, *args)`` with a `dcp.World`.
    ranks : int
        1 .. 64 a core.
    args : sequence
        Further arguments; the same for all ranks.
    on_event : callable, optional
        Called here with every object that rank 0 hands to `World.emit`, as they come.
    link : dcp.link.Link, optional
        Let data between the ranks take as long as on this link.

    Returns
    -------
    list
        Results in rank order.

    Raises
    ------
    dcp.ArgumentError
        Too many ranks, or something that cannot be sent to another process.
    dcp.RankError
        A rank died: its number, process id and signal or exit code are named.
    Exception
        What `fn` raised on a rank, with a note that names the rank and shows the traceback there.

    Examples
    --------
    >>> dcp.launch(lambda world, x: x + world.rank, 2, (10,))
    [10, 11]
    """
    import cloudpickle

    ranks = _check_ranks(ranks)
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r} must be callable")
    try:
        call = cloudpickle.dumps((fn, tuple(args)))
    except Exception as error:
        raise ArgumentError(
            f"fn and args must be picklable to reach the ranks: {type(error).__name__}: {error}"
        ) from error
    if link is not None and ranks % link.machine_ranks != 0:
        raise ArgumentError(
            f"link: machine_ranks = {link.machine_ranks} must divide the {ranks} ranks"
        )
    task = {"path": sys.path, "argv": sys.argv, "call": call, "link": link}
    run = _Run(ranks, task, with_reports=True)
    run.on_event = on_event
    try:
        if not run.wait(lambda child: child.result is None):
            _raise_failure(run.children)
    except BaseException as error:
        run.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        run.close()
    return [child.result[0] for child in run.children if child.result is not None]


def launch_command(argv: Sequence[str], ranks: int) -> int:
    """Run a Python script on several ranks: what ``dcp launch -n N SCRIPT ...`` does.

    Parameters
    ----------
    argv : sequence of str
        The script and its arguments, or ``-m``, a module and its arguments.
    ranks : int
        1 .. 64 a core.

    Returns
    -------
    int
        0 when all ranks ended well, else the worst exit code: 128 + the signal of a rank that was
        killed, 130 after Ctrl-C. A rank that fails ends the others.

    Raises
    ------
    dcp.ArgumentError
        No script, or too many ranks.

    Examples
    --------
    >>> from dcp.launcher import launch_command
    >>> launch_command(["-m", "platform"], 1)  # doctest: +SKIP
    0
    """
    ranks = _check_ranks(ranks)
    argv = [os.fspath(a) for a in argv]
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        raise ArgumentError("a script, or -m and a module, must be given")
    if argv[0] != "-m" and not os.path.exists(argv[0]):
        raise ArgumentError(f"script {argv[0]!r}: {os.strerror(errno.ENOENT)}")
    run = _Run(ranks, {"argv": argv}, with_reports=False)
    try:
        run.wait(lambda child: child.code != 0)
    except KeyboardInterrupt:
        run.end(signal.SIGINT)
        return 130
    finally:
        run.close()
    worst = 0
    for child in run.children:
        code = child.code or 0
        if child.killed_by_us or code == 0:
            continue
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        print(f"dcp: rank {child.rank} (process {child.pid}) {how}", file=sys.stderr)
        worst = max(worst, 128 - code if code < 0 else code)
    return worst
