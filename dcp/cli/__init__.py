"""The command `dcp`: one file a command, loaded when it is called.

This file decides what is the same for all of them: exit codes (0 done, 1 the run failed, 2 bad
input, 130 interrupted), that a failure is one message on standard error (``--debug`` adds the
traceback), and that ``--json -`` leaves standard output to the document alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

import dcp

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "Exit", "InputError", "common", "main"]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
SCHEMA = 1
_COMMANDS = {
    "info": "dcp.cli.info",
    "train": "dcp.cli.train",
    "plan": "dcp.cli.plan",
    "layout": "dcp.cli.layout",
    "simulate": "dcp.cli.simulate",
    "control": "dcp.cli.control",
    "sample": "dcp.cli.sample",
    "checkpoint": "dcp.cli.checkpoint",
    "profile": "dcp.cli.profile",
    "launch": "dcp.cli.launch",
}


class InputError(click.ClickException):
    """What the user gave cannot be used: exit code 2 with this message."""

    exit_code = BAD_INPUT


@contextlib.contextmanager
def reading_input() -> Iterator[None]:
    """Within this, a file that cannot be read or does not hold what it should is bad input."""
    try:
        yield
    except OSError as error:  # dcp.FileError is one
        raise InputError(_one_line(error)) from error


def log_to_stderr() -> None:
    """Show warnings, and what else DCP_LOG asks for, on standard error."""
    level = os.environ.get("DCP_LOG", "warning").upper()
    if not isinstance(logging.getLevelName(level), int):
        raise InputError(f"DCP_LOG={level.lower()} must be debug, info, warning or error")
    logging.basicConfig(stream=sys.stderr, format="dcp: %(levelname)s: %(message)s")
    logging.getLogger("dcp").setLevel(level)


class Exit(Exception):
    """End with `code` and a message, or with none where the text is empty."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Lazy(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(_COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from dcp.config import suggest

            raise InputError(f"unknown command {args[0]!r}{suggest(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dcp.__version__, prog_name="dcp")
def group() -> None:
    """Train transformers on sequences of very different lengths."""


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and ``--debug``; a document that the command returns is written."""

    @click.option(
        "--json",
        "json_to",
        metavar="FILE|-",
        help="Write the result as JSON; '-': to standard output, which then holds nothing else.",
    )
    @click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
    @functools.wraps(function)
    def wrapped(*args: Any, json_to: str | None, debug: bool, **kwargs: Any) -> None:
        log_to_stderr()
        if json_to not in (None, "-"):
            folder = Path(json_to).resolve().parent
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise InputError(f"--json {json_to}: {folder} is not a folder that can be written")
        result = function(*args, json_to=json_to, **kwargs)
        if json_to is not None and result is not None:
            name = click.get_current_context().command_path.split()[1]
            write_json({"schema": SCHEMA, "command": name} | result, json_to)

    return wrapped


def finite(value: Any) -> Any:
    """Return `value` with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_json(document: dict[str, Any], to: str) -> None:
    """Write a document to a file (aside, then renamed) or, for '-', to standard output."""
    text = json.dumps(finite(document), allow_nan=False, ensure_ascii=False) + "\n"
    if to == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(to)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Exit(FAILED, f"--json {to}: {error.strerror}") from error


def _one_line(error: BaseException) -> str:
    """The message without what a rank's report adds below it (``--debug`` shows that)."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _code_of(error: BaseException) -> int:
    """What was wrong decides: the input (2), or the run (1)."""
    from dcp import _dcp

    bad_input = (
        _dcp.ArgumentError,
        _dcp.DTypeError,
        _dcp.UnsupportedError,
        _dcp.InfeasibleError,
    )
    return BAD_INPUT if isinstance(error, bad_input) else FAILED


def run(args: list[str]) -> int:
    """Run the command line `args`; return the exit code."""
    debug = "--debug" in args
    try:
        group.main(args=args, prog_name="dcp", standalone_mode=False)
        return 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("dcp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of standard output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, debug)
    except Exit as error:
        return _fail(str(error), error.code, debug)
    except ImportError as error:
        return _fail(f"this installation is incomplete: {_one_line(error)}", FAILED, debug)
    except Exception as error:
        known = isinstance(error, (dcp.Error, OSError))
        text = _one_line(error)
        code = _fail(text if known else f"{type(error).__name__}: {text}", _code_of(error), debug)
        if not known and not debug:
            print("dcp: this is a fault in dcp; --debug shows where", file=sys.stderr)
        return code


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if message:
        print(f"dcp: {message}", file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of the command `dcp`."""

    def terminate(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)  # unwinds, so that ranks and shared memory are let go

    signal.signal(signal.SIGTERM, terminate)
    sys.exit(run(sys.argv[1:]))
