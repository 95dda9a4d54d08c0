"""`dcp simulate`: what each strategy would reach on a cluster that is not there."""

from __future__ import annotations

from typing import Any

import click

from dcp.cli import InputError, common, reading_input
from dcp.cli.clusters import cluster, cluster_options, show_on, strategies, writable
from dcp.cli.show import counting, save_picture


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    """A comma-separated list of numbers >= 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) != len(found):
        raise InputError(f"--devices {text}: must be distinct numbers >= 1, as in 8,32,128")
    return found


def _stragglers(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, float]:
    found = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise InputError(f"--straggler {text}: must be RANK:FACTOR, as in 3:1.2") from None
    return found


@click.command("simulate")
@click.option(
    "--distribution",
    "names",
    metavar="NAME|FILE|all",
    multiple=True,
    default=("all",),
    help="short, balanced, long (all: these three), another name, or a file: a histogram (.csv: "
    "upper bound, share) or lengths (an integer a line, .npy). Repeatable.  [all]",
)
@click.option(
    "--devices",
    metavar="LIST",
    default="32",
    show_default=True,
    callback=_numbers,
    help="Numbers of devices.",
)
@cluster_options
@click.option(
    "--strategy", metavar="NAME,...|all", default="all", show_default=True, help="How to plan."
)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, metavar="N")
@click.option(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Budget of a step of all devices.  [65536 a device]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of the lengths.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 4),
    default=0.0,
    metavar="X",
    help="Spread of the logarithm of a micro-batch's time.  [0]",
)
@click.option(
    "--straggler",
    "stragglers",
    metavar="RANK:FACTOR",
    multiple=True,
    callback=_stragglers,
    help="A rank that takes FACTOR times as long. Repeatable.",
)
@click.option(
    "--once",
    "once_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="What every step costs beside its micro-batches.  [0]",
)
@click.option("--rounds", is_flag=True, help="All ranks move together, micro-batch by micro-batch.")
@click.option(
    "--over",
    metavar="NAME",
    default="bucket",
    show_default=True,
    help="Strategy that counts 1 in table and plot.",
)
@click.option("--plot", metavar="FILE", help="Draw the speed-ups (.png, ...).")
@common
def command(
    json_to: str | None,
    names: tuple[str, ...],
    devices: list[int],
    strategy: str,
    steps: int,
    over: str,
    plot: str | None,
    stragglers: dict[int, float],
    tokens_per_step: int | None,
    seed: int,
    jitter: float,
    once_s: float,
    rounds: bool,
    **machine: Any,
) -> dict[str, Any]:
    """Compare strategies on a simulated cluster, at the same tokens a step."""
    from dcp import simulate

    chosen = strategies(strategy)
    writable(plot, "--plot")
    where = cluster(**machine)
    spec = [n for name in names for n in (simulate.PAPER if name == "all" else (name,))]
    with reading_input():
        lengths = [simulate.distribution(name) for name in spec]
    if stragglers and max(stragglers) >= min(devices):
        raise InputError(
            f"--straggler {max(stragglers)}: with {min(devices)} devices ranks end at "
            f"{min(devices) - 1}"
        )
    with counting("planning") as on_progress:
        result = simulate.training(
            where.cost,
            lengths,
            devices=devices,
            strategies=chosen,
            steps=steps,
            memory_bytes=where.memory_bytes,
            tokens_per_step=tokens_per_step,
            seed=seed,
            rounds=rounds,
            jitter=jitter,
            stragglers=stragglers or None,
            once_s=once_s,
            on_progress=on_progress,
        )
    base = over if over in chosen else chosen[0]
    if plot is not None:
        panels = result.plot(over=base)
        save_picture((panels[0] if isinstance(panels, list) else panels).figure, plot)
    _show(result, where, base, json_to)
    return result.to_json()


def _show(result: Any, where: Any, base: str, json_to: str | None) -> None:
    from rich.table import Table

    console = show_on(json_to)
    budget = result.rows[0]
    console.print(
        f"{where.cost.name or 'cost model'}, {result.settings['steps']} steps of "
        f"{budget['tokens_per_step'] // budget['devices']:,} tokens a device; the same sequences "
        "for every strategy",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for head, justify in (
        ("data", "left"),
        ("devices", "right"),
        ("strategy", "left"),
        ("step s", "right"),
        ("tokens/s", "right"),
        (f"x {base}", "right"),
        ("idle", "right"),
        ("again", "right"),
        ("sp", "right"),
        ("gap", "right"),
    ):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    last = None
    for row in result.rows:
        place = (row["distribution"], row["devices"])
        if last not in (None, place):
            table.add_section()
            table.add_row()
        table.add_row(
            *_cells(result, row, base), style="bold" if row["strategy"] == "dcp" else None
        )
        last = place
    console.print(table, highlight=False)
    console.print(
        "again: share of the work that computes dropped activations again; sp: ranks that share a "
        "token, on average; gap: of the plans, to the least possible",
        style="bright_black",
        highlight=False,
    )
    for row in result.rows:
        if row["message"]:
            console.print(
                f"{row['distribution']}, {row['devices']} devices, {row['strategy']}: "
                f"{row['message']}",
                highlight=False,
            )


def _cells(result: Any, row: dict[str, Any], base: str) -> list[str]:
    where = [row["distribution"], f"{row['devices']:,}", row["strategy"]]
    if row["message"]:
        return [*where, "-", "-", "-", "-", "-", "-", "-"]
    ratio = result.speedup(row["distribution"], row["devices"], row["strategy"], over=base)
    return [
        *where,
        f"{row['step_s']:.4g}",
        f"{row['tokens_per_s']:,.0f}",
        f"{ratio:.2f}" if ratio else "-",
        f"{row['idle_share']:.1%}",
        f"{row['recompute_share']:.1%}",
        f"{row['mean_group']:.2f}",
        f"{row['gap']:.2%}",
    ]
