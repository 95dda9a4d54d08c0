"""How numbers, and the work behind them, are shown to a person."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dcp.cli import InputError

__all__ = ["counting", "duration", "save_picture", "size"]


def size(count: int | None) -> str:
    """Return bytes as text: 1536 -> '1.5 KiB'; None -> 'unknown'."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Return seconds as text: 75.2 -> '1 min 15 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def save_picture(figure: Any, path: str) -> None:
    """Write what `--plot` asked for, and forget it."""
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # matplotlib does not know the format
        raise InputError(f"--plot {path}: {str(error).splitlines()[0]}") from error
    finally:
        plt.close(figure)


@contextlib.contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
