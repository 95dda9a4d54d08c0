"""`dcp profile`: measure a model on this machine, show how well the fit predicts, keep it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from dcp.cli import FAILED, Exit, InputError, common
from dcp.cli.clusters import show_on, writable


@click.command("profile")
@click.option("--preset", metavar="NAME", help="Model.  [default: tiny]")
@click.option("--config", "config_file", metavar="FILE", help="Settings as TOML.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="One setting, dotted key.")
@click.option("--ranks", type=int, metavar="N", help="Processes.  [default: one a core, at most 8]")
@click.option("--max-tokens", type=int, metavar="N", help="Of the largest micro-batch.")
@click.option(
    "--seconds", type=float, default=20.0, show_default=True, metavar="S", help="About how long."
)
@click.option("--out", metavar="FILE", help="Write the cost model, for `dcp plan --cost FILE`.")
@common
def command(
    json_to: str | None,
    preset: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    ranks: int | None,
    max_tokens: int | None,
    seconds: float,
    out: str | None,
) -> dict[str, Any]:
    """Measure steps of a model on this machine and fit the cost model that plans are made with."""
    from dcp import config

    settings = config.load(preset=preset, config=config_file, sets=sets, options={"ranks": ranks})
    if not seconds > 0 or seconds == float("inf"):
        raise InputError(f"--seconds {seconds:g}: must be finite and > 0")
    writable(out, "--out")
    import dcp

    with _progress() as show:
        cost = dcp.profile(
            settings.transformer(),
            ranks=settings.ranks,
            max_tokens=max_tokens,
            seconds=seconds,
            seed=settings.seed,
            on_progress=show,
        )
    if out is not None:
        try:
            cost.save(out)
        except OSError as error:
            raise Exit(FAILED, f"--out {out}: {error.strerror}") from error
    _show(cost, show_on(json_to))
    document: dict[str, Any] = cost.to_json()
    return document


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), Remaining())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("profile", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _show(cost: Any, console: Any) -> None:
    """Every step that was timed, the terms found, and how far predictions are off."""
    from dcp.profiling import errors

    parts: list[Any] = [cost.name]
    found = errors(cost)
    for label, text in (("fitted", "fitted"), ("held_out", "held out of the fit")):
        rows = [row for row in cost.residuals if row.held_out == (label == "held_out")]
        if rows:
            median, worst = found[f"{label}_median"], found[f"{label}_worst"]
            parts += [f"\nSteps {text}, in milliseconds", _rows(rows)]
            parts.append(f"error {median:.1%} in the median, {worst:.1%} at most")
    console.print(*parts, "", *_terms(cost), sep="\n", highlight=False)


def _rows(rows: list[Any]) -> Any:
    """As a table of 80 columns, alike for any rows: two of them stand below each other."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head, width in (
        ("sequences", 9),
        ("tokens", 6),
        ("times", 5),  # micro-batches one after the other
        ("sp", 2),
        ("recompute", 13),
        ("layers", 6),
        ("measured", 8),
        ("predicted", 9),
        ("error", 6),
    ):
        table.add_column(head, justify="right", min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.sequences),
            f"{row.tokens:,}",
            str(row.micro_batches),
            str(row.ranks),
            _recompute(row),
            str(row.layers),
            f"{row.measured_s * 1e3:.2f}",
            f"{row.predicted_s * 1e3:.2f}",
            f"{row.error:+.1%}",
        )
    return table


def _recompute(row: Any) -> str:
    named = {(0, 0): "none", (0, row.layers): "selective", (row.layers, 0): "full"}
    return named.get(row.recompute, "{} layer {} mlp".format(*row.recompute))


def _terms(cost: Any) -> list[str]:
    """What the fit found, in units that can be compared: a lone sequence of 1,000 tokens."""
    ms = 1e3
    layers = max(cost.layer_count - 1, 0)
    lines = [
        f"a step {cost.step_s * ms:.2f} ms, a micro-batch {cost.latency_s * ms:.2f} ms, "
        f"1,000 tokens {cost.token_s * 1e3 * ms:.2f} ms + attention {cost.square_s * 1e6 * ms:.2f}",
    ]
    if layers:
        full = layers * (cost.layer_token_s * 1e3 + cost.layer_square_s * 1e6)
        lines.append(
            f"again: {full * ms:.2f} ms with full recompute, "
            f"{layers * cost.mlp_token_s * 1e3 * ms:.2f} ms with selective"
        )
    for ranks in cost.measured.ranks:
        if ranks > 1:
            meet = cost.group_s[0] + cost.hop_s[0] * (ranks - 1)
            moved = 1e3 * (ranks - 1) / ranks * (cost.gather_s[0] + cost.exchange_s[0] / ranks)
            lines.append(
                f"shared by {ranks} ranks: {meet * ms:.2f} ms to meet, {moved * ms:.2f} ms to move "
                "keys and values"
            )
    return lines
