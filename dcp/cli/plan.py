"""`dcp plan`: what each strategy makes of your lengths, as a table, a time line and a picture."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import click

from dcp.cli import InputError, common, reading_input
from dcp.cli.clusters import cluster, cluster_options, show_on, strategies, writable
from dcp.cli.show import save_picture

MOST_RANKS_ON_TERMINAL = 32


@click.command("plan")
@click.option(
    "--lengths",
    "lengths_from",
    metavar="FILE|-",
    required=True,
    help="Sequence lengths in tokens: an integer a line (blank lines count for nothing), or .npy.",
)
@click.option("--world", type=click.IntRange(1, 1 << 20), metavar="N", required=True, help="Ranks.")
@cluster_options
@click.option(
    "--strategy", metavar="NAME,...|all", default="dcp", show_default=True, help="How to plan."
)
@click.option(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cut the lengths into steps of so many tokens.  [one step]",
)
@click.option("--rounds", is_flag=True, help="All ranks move together, micro-batch by micro-batch.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="[0]")
@click.option("--plans", is_flag=True, help="Put every plan into the JSON document.")
@click.option("--plot", metavar="FILE", help="Draw the first step of the best strategy (.png, ...)")
@common
def command(
    json_to: str | None,
    lengths_from: str,
    world: int,
    strategy: str,
    tokens_per_step: int | None,
    rounds: bool,
    seed: int,
    plans: bool,
    plot: str | None,
    **machine: Any,
) -> dict[str, Any]:
    """Plan steps of sequences of given lengths, by one strategy or all, and compare them."""
    names = strategies(strategy)
    writable(plot, "--plot")
    where = cluster(**machine)
    lengths = _read(lengths_from)
    options = {
        "world_size": world,
        "memory_bytes": where.memory_bytes,
        "rounds": rounds,
        "seed": seed,
        "longest": int(lengths.max()),
    }
    steps = _steps(lengths, tokens_per_step)
    results = [_Result(name) for name in names]
    for result in results:
        result.run(steps, where.cost, options)
    _refuse_if_none(results)
    best = min((r for r in results if not r.message), key=lambda r: r.makespan_s)
    if plot is not None:
        save_picture(best.plans[0].plot().figure, plot)
    _show(results, best, where, json_to)
    return {
        "world": world,
        "cost": where.cost.name,
        "memory_bytes": where.memory_bytes,
        "strategies": [result.to_json(plans=plans) for result in results],
    }


def _read(source: str) -> Any:
    from dcp import distributions

    if source == "-":
        return distributions.parse_lengths(sys.stdin.read(), "standard input")
    with reading_input():
        return distributions.read_lengths(source)


def _steps(lengths: Any, tokens_per_step: int | None) -> list[Any]:
    from dcp import planning

    if tokens_per_step is None:
        return [lengths]
    longest = int(lengths.max())
    if longest > tokens_per_step:
        raise InputError(
            f"--tokens-per-step {tokens_per_step}: the longest sequence has {longest} tokens"
        )
    return [lengths[cut] for cut in planning.split_steps(lengths, tokens_per_step)]


@dataclass
class _Result:
    """The plans of one strategy, or why there are none."""

    strategy: str
    plans: list[Any] = field(default_factory=list)
    plan_s: float = 0.0
    message: str = ""
    error: Exception | None = None

    def run(self, steps: list[Any], cost: Any, options: dict[str, Any]) -> None:
        import dcp

        start = time.perf_counter()
        try:
            self.plans = [dcp.plan(s, cost, strategy=self.strategy, **options) for s in steps]
        except dcp.InfeasibleError as error:
            self.plans, self.message, self.error = [], str(error), error
        self.plan_s = time.perf_counter() - start

    @property
    def makespan_s(self) -> float:
        return float(sum(plan.makespan for plan in self.plans))

    def to_json(self, *, plans: bool) -> dict[str, Any]:
        row: dict[str, Any] = {"strategy": self.strategy, "steps": len(self.plans) or None}
        if self.message:
            row |= dict.fromkeys(
                ("makespan_s", "bound_s", "gap", "idle_share", "tokens_per_s", "plan_s", "winners")
            )
        else:
            makespan = self.makespan_s
            bound = float(sum(plan.bound for plan in self.plans))
            idle = sum(plan.idle_share * plan.makespan for plan in self.plans)
            tokens = sum(int(plan.lengths.sum()) for plan in self.plans)
            row |= {
                "makespan_s": makespan,
                "bound_s": bound,
                "gap": makespan / bound - 1 if bound > 0 else 0.0,
                "idle_share": idle / makespan if makespan > 0 else 0.0,
                "tokens_per_s": tokens / makespan if makespan > 0 else None,
                "plan_s": self.plan_s,
                "winners": self.winners(),
            }
        row["message"] = self.message or None
        if plans:
            row["plans"] = [plan.to_json() for plan in self.plans]
        return row

    def winners(self) -> dict[str, int]:
        """Whose candidate was taken, and in how many steps."""
        found: dict[str, int] = {}
        for plan in self.plans:
            found[plan.winner] = found.get(plan.winner, 0) + 1
        return found


def _refuse_if_none(results: list[_Result]) -> None:
    """One strategy that cannot is reported, none that can is an error."""
    for result in results:
        if not result.message:
            return
    assert results[0].error is not None
    raise results[0].error


def _show(results: list[_Result], best: _Result, where: Any, json_to: str | None) -> None:
    from rich.table import Table

    from dcp import viz

    console = show_on(json_to)
    plan = best.plans[0]
    tokens = sum(int(p.lengths.sum()) for p in best.plans)
    count = sum(len(p.lengths) for p in best.plans)
    cap = f"{where.memory_bytes / 1e9:.4g} GB" if where.memory_bytes else "no cap"
    console.print(
        f"{where.cost.name or 'cost model'}: {count:,} sequences, {tokens:,} tokens in "
        f"{len(best.plans):,} step{'s' if len(best.plans) > 1 else ''} on {plan.world_size:,} "
        f"ranks, {cap} a rank",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy")
    for head in ("makespan", "bound", "gap", "idle", "tokens/s", "planned in"):
        table.add_column(head, justify="right")
    table.add_column("winner")
    for result in results:
        table.add_row(*_cells(result), style="bold" if result is best else None)
    console.print(table, highlight=False)
    if plan.world_size <= MOST_RANKS_ON_TERMINAL:
        console.print(f"\n{best.strategy}, step 0: {plan!r}", highlight=False, soft_wrap=True)
        console.print(
            viz.plan_lines(plan, width=max(24, min(console.width - 6, 110))), soft_wrap=True
        )


def _cells(result: _Result) -> list[str]:
    if result.message:
        return [result.strategy, "-", "-", "-", "-", "-", "-", f"cannot: {result.message}"]
    row = result.to_json(plans=False)
    return [
        result.strategy,
        f"{row['makespan_s']:.4g} s",
        f"{row['bound_s']:.4g} s",
        f"{row['gap']:.2%}",
        f"{row['idle_share']:.1%}",
        f"{row['tokens_per_s'] or 0:,.0f}",
        f"{1e3 * row['plan_s']:.1f} ms",
        ", ".join(
            name if n == row["steps"] else f"{name} ({n})" for name, n in row["winners"].items()
        ),
    ]
