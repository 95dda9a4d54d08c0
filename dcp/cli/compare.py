"""`dcp train --compare`: the same run under several strategies, side by side.

Every strategy trains a fresh model on the same sequences from the same seed, in a launch of its
own, one after the other, so that none shares its cores with another. The losses must be equal:
a plan decides how a step is executed, never what it computes.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import IO, Any

from dcp.cli import InputError
from dcp.cli.show import size

__all__ = ["EQUAL", "compare_table", "loss_difference", "output_of", "settings_of", "strategies_of"]

EQUAL = 1e-5  # relative difference up to which two losses count as equal


def strategies_of(names: str) -> list[str]:
    """The names of a comma-separated list."""
    return [name.strip() for name in names.split(",")]


def settings_of(names: str, settings: Any) -> list[Any]:
    """The settings of every strategy of a comma-separated list, checked before anything runs."""
    from dcp import config

    known = config.strategy_names()
    chosen = strategies_of(names)
    for i, name in enumerate(chosen):
        if name not in known:
            raise InputError(
                f"--compare {names}: unknown strategy {name!r}{config.suggest(name, known)}"
            )
        if name in chosen[:i]:
            raise InputError(f"--compare {names}: {name!r} is named twice")
    out = []
    for name in chosen:
        plan = settings.plan
        if name != "fixed":  # its one setting is not for the others
            plan = dataclasses.replace(plan, sp=None, recompute=None)
        one = dataclasses.replace(settings, strategy=name, plan=plan)
        one.check()
        out.append(one)
    return out


def output_of(path: Path | None, strategy: str, *, folder: bool) -> Path | None:
    """Where one strategy writes: a folder below `path`, or a file beside it with its name."""
    if path is None:
        return None
    return path / strategy if folder else path.with_name(f"{path.stem}-{strategy}{path.suffix}")


def loss_difference(one: list[float | None], other: list[float | None]) -> float | None:
    """The largest relative difference of two runs' losses, step by step; None: not comparable.

    Examples
    --------
    >>> from dcp.cli.compare import loss_difference
    >>> loss_difference([2.0, 1.0], [2.0, 1.001]) < 0.0011
    True
    >>> loss_difference([2.0, None], [2.0, 1.0]) is None
    True
    """
    worst = 0.0
    for a, b in zip(one, other, strict=False):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return None
        worst = max(worst, abs(a - b) / max(abs(a), abs(b), 1e-300))
    return worst if math.isfinite(worst) else None


def compare_table(runs: list[dict[str, Any]], *, to: IO[str]) -> None:
    """Print speed, idle share, memory and loss of every strategy, and whether losses are equal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", style="bold")
    for title in ("tokens/s", "speed-up", "idle", "memory a rank", "last loss", "difference"):
        table.add_column(title, justify="right")
    base = runs[0]["tokens_per_s"]
    for run in runs:
        speed = run["tokens_per_s"]
        idle = [s["idle_share"] for s in run["steps"] if s["idle_share"] is not None]
        losses = [s["loss"] for s in run["steps"]]
        difference = run["loss_difference"]
        table.add_row(
            run["strategy"],
            f"{speed:,.0f}" if speed is not None else "-",
            f"{speed / base:.2f}x" if speed is not None and base else "-",
            f"{sum(idle) / len(idle):.1%}" if idle else "-",
            size(max(run["peak_memory_bytes"]["ranks"])),
            f"{losses[-1]:.6f}" if losses and losses[-1] is not None else "-",
            f"{difference:.1e}" if difference is not None else "not finite",
        )
    console = Console(file=to)
    console.print(table)
    known = [run["loss_difference"] for run in runs]
    worst = max((d for d in known if d is not None), default=0.0)
    equal = None not in known and worst <= EQUAL
    console.print(
        f"losses {'equal' if equal else 'DIFFER'}: worst relative difference {worst:.1e} over "
        f"{len(runs[0]['steps'])} steps of the same sequences",
        highlight=False,
        soft_wrap=True,
    )
