"""`dcp control`: policies of the controller in simulation, and the decisions of a run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dcp.cli import InputError, common, reading_input
from dcp.cli.arm_panel import bandwidth_text
from dcp.cli.clusters import show_on, writable
from dcp.cli.show import counting, save_picture


@click.group("control")
def command() -> None:
    """Precision of gradients and tokens of a step, chosen together."""


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"{option}: the list is empty: name at least one")
    if len(set(parts)) != len(parts):
        raise InputError(f"{option} {text}: must be distinct")
    return parts


def _names(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    from dcp.config import suggest

    parts = _parts(text, option)
    for part in parts:
        if part not in known:
            raise InputError(f"{option} {part}: no such name{suggest(part, known)}")
    return parts


def _numbers(text: str, option: str, least: int, example: str) -> list[int]:
    try:
        found = [int(part) for part in _parts(text, option)]
    except ValueError:
        found = []
    if not found or min(found) < least or len(set(found)) != len(found):
        raise InputError(
            f"{option} {text}: must be distinct whole numbers >= {least}, as in {example}"
        )
    return found


def _seconds(text: str) -> list[float]:
    try:
        found = [float(part) for part in _parts(text, "--dwell")]
    except ValueError:
        found = []
    if not found or not all(0 <= s < math.inf for s in found) or len(set(found)) != len(found):
        raise InputError(f"--dwell {text}: must be distinct seconds >= 0, as in 20,100,600")
    return found


def _setup(sets: tuple[str, ...]) -> Any:
    """The experiment with the constants of ``--set``."""
    from dcp.config import suggest
    from dcp.time_to_loss import Setup

    setup = Setup()
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.strip()
        known = [field.name for field in dataclasses.fields(Setup)]
        if not equals or name not in known:
            raise InputError(f"--set {text}: no such constant{suggest(name, known)}")
        try:
            kind = type(getattr(setup, name))
            setup = dataclasses.replace(setup, **{name: kind(value.strip())})
        except ValueError:
            raise InputError(f"--set {text}: {value!r} is not a number of its kind") from None
    return setup


@command.command("simulate")
@click.option(
    "--policies",
    metavar="LIST|all",
    default="all",
    show_default=True,
    help="static, precision, accumulation, decoupled, joint, oracle, best_fixed.",
)
@click.option(
    "--congestion",
    metavar="LIST",
    default="0,1,2,3,4",
    show_default=True,
    help="Jobs behind, on the same network.",
)
@click.option(
    "--base",
    metavar="LIST",
    default="fp32,bf16",
    show_default=True,
    help="Precision of gradients where nothing is tuned.",
)
@click.option(
    "--dwell",
    metavar="LIST",
    default="20,100,600",
    show_default=True,
    help="Mean seconds that a job is there, and away; 0: always there.",
)
@click.option(
    "--precisions",
    metavar="LIST",
    help="To choose from.  [the base and those with fewer bits of fp32,bf16,int8,int4]",
)
@click.option(
    "--batch-multiples",
    metavar="LIST",
    default="1,2,4,8,16,32",
    show_default=True,
    help="To choose from, ascending.",
)
@click.option("--target", type=float, metavar="LOSS", help="Loss to reach.  [3.3]")
@click.option(
    "--seeds",
    type=int,
    default=3,
    show_default=True,
    metavar="N",
    help="Runs of each; seeds 0 .. N-1.",
)
@click.option(
    "--set",
    "sets",
    metavar="CONSTANT=VALUE",
    multiple=True,
    help="A constant of the experiment (dcp.time_to_loss.Setup), for example rack_hosts=4, "
    "oversubscription=2. Repeatable.",
)
@click.option("--plot", metavar="FILE", help="Draw times over congestion (.png, ...).")
@common
def simulate(
    json_to: str | None,
    policies: str,
    congestion: str,
    base: str,
    dwell: str,
    precisions: str | None,
    batch_multiples: str,
    target: float | None,
    seeds: int,
    sets: tuple[str, ...],
    plot: str | None,
) -> dict[str, Any]:
    """Time to a target loss of every policy, on a simulated network that other jobs share."""
    from dcp import time_to_loss

    names = tuple(time_to_loss.ERRORS)
    chosen = list(time_to_loss.POLICIES)
    if policies != "all":
        chosen = _names(policies, "--policies", (*time_to_loss.POLICIES, "all"))
        chosen = list(time_to_loss.POLICIES) if "all" in chosen else chosen
    bases = _names(base, "--base", names)
    grid = _names(precisions, "--precisions", names) if precisions is not None else None
    for name in bases:
        if grid is not None and name not in grid:
            raise InputError(f"--base {name}: must be one of --precisions {precisions}")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: must be >= 1")
    multiples = _numbers(batch_multiples, "--batch-multiples", 1, "1,2,4,8")
    if multiples != sorted(multiples):
        raise InputError(f"--batch-multiples {batch_multiples}: must ascend, as in 1,2,4,8")
    if plot is not None and ("oracle" not in chosen or len(chosen) < 2):
        raise InputError("--plot draws times over the oracle's: --policies needs it and another")
    writable(plot, "--plot")
    setup = _setup(sets)
    if target is not None:
        setup = dataclasses.replace(setup, target_loss=target)
    with counting("simulating") as on_done:
        sweep = time_to_loss.sweep(
            chosen,
            congestion=_numbers(congestion, "--congestion", 0, "0,1,2,3,4"),
            base=bases,
            dwell_s=_seconds(dwell),
            precisions=grid,
            batch_multiples=multiples,
            seeds=seeds,
            setup=setup,
            on_done=on_done,
        )
    if plot is not None:
        from dcp.control_plot import draw_sweep

        save_picture(draw_sweep(sweep), plot)
    _show_sweep(sweep, setup, seeds, json_to)
    return {
        "results": sweep.to_json(),
        "setup": dataclasses.asdict(setup),
        "published": {"decoupled_over_joint": list(time_to_loss.PUBLISHED_BAND)},
    }


def _table(*heads: str) -> Any:
    """A plain table; the first column to the left, numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _show_sweep(sweep: Any, setup: Any, seeds: int, json_to: str | None) -> None:
    console = show_on(json_to)
    mean = sweep.mean()
    policies = list(dict.fromkeys(r.policy for r in sweep.results))
    others = [p for p in policies if p != "oracle"]
    table = _table(
        "base", "jobs", "dwell s", *(["oracle s"] if "oracle" in policies else []), *others
    )
    last = None
    for base, jobs, dwell in dict.fromkeys(key[:3] for key in mean):
        if last not in (None, base):
            table.add_row()
        last = base
        cells = [base, str(jobs), f"{dwell:g}"]
        unit = mean.get((base, jobs, dwell, "oracle"))
        if unit is not None:
            cells.append(f"{unit:,.0f}")
        times = [mean[base, jobs, dwell, policy] for policy in others]
        table.add_row(
            *cells, *(f"{t:,.0f} s" if unit is None else f"x {t / unit:.3f}" for t in times)
        )
    over = ", over the oracle's" if "oracle" in policies else ""
    console.print(
        f"time to loss {setup.target_loss:g}{over}: mean of {seeds} "
        f"seed{'s' if seeds != 1 else ''}",
        highlight=False,
    )
    console.print(table, highlight=False)
    for text in _summary(sweep, policies):
        console.print(text, highlight=False)
    console.print(_constants(setup), style="bright_black", highlight=False)


def _summary(sweep: Any, policies: list[str]) -> Iterator[str]:
    """What the table says in a line or two."""
    from dcp.time_to_loss import PUBLISHED_BAND

    if {"joint", "oracle"} <= set(policies):
        yield f"joint / oracle at most {max(sweep.ratio('joint', 'oracle').values()):.3f}"
    if {"joint", "decoupled"} <= set(policies):
        ratios = sweep.ratio("decoupled", "joint")
        spans = []
        for base in dict.fromkeys(key[0] for key in ratios):
            mine = [value for key, value in ratios.items() if key[0] == base]
            spans.append(f"{base} {min(mine):.2f} to {max(mine):.2f}")
        low, high = PUBLISHED_BAND
        yield (
            f"decoupled / joint: {'; '.join(spans)}  (ML-for-ML reports {low} to {high}; its "
            "constants are not published, these are ours:)"
        )


def _constants(setup: Any) -> str:
    network = f"{setup.host_rate * 8e-9:g} Gbit/s a host"
    if setup.rack_hosts:
        network += f", racks of {setup.rack_hosts}, oversubscribed {setup.oversubscription:g}"
    return (
        f"{setup.parameter_count / 1e6:,.0f}M parameters on {setup.hosts} hosts ({network}), "
        f"{setup.tokens_per_step:,} tokens in {setup.compute_s:g} s at multiple 1, "
        f"{setup.bucket_count} buckets; behind: {setup.background_parameters / 1e6:,.0f}M "
        f"parameters in fp32, {setup.background_compute_s:g} s of computing; loss "
        f"{setup.loss_start:g} to {setup.target_loss:g} of floor {setup.loss_floor:g}, noise scale "
        f"{setup.noise_scale:g} / loss^(1/{setup.noise_power:g}) tokens"
    )


def _log(path: str) -> Any:
    """The decisions in a file, or in the metrics.jsonl of a folder."""
    from dcp.controller import DecisionLog

    file = Path(path)
    with reading_input():
        return DecisionLog.read(file / "metrics.jsonl" if file.is_dir() else file)


@command.command("show")
@click.argument("log")
@click.option("--plot", metavar="FILE", help="Draw decisions over the run (.png, ...).")
@common
def show(json_to: str | None, log: str, plot: str | None) -> dict[str, Any]:
    """Decisions over a run, from its metrics.jsonl (or the folder that holds it)."""
    writable(plot, "--plot")
    read = _log(log)
    rows = read.rows()
    if plot is not None:
        from dcp.control_plot import draw_decisions

        save_picture(draw_decisions(read), plot)
    arms = _arms(rows)
    _show_log(read, rows, arms, json_to)
    return {"settings": read.settings, "arms": arms, "steps": rows}


def _arms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each arm was used for, most time first."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["precision"], row["multiple"]), []).append(row)
    total = sum(row["step_s"] or 0.0 for row in rows)
    arms = []
    for (precision, multiple), mine in found.items():
        seconds = sum(row["step_s"] or 0.0 for row in mine)
        off = [
            row["step_s"] / row["predicted_s"] - 1.0
            for row in mine
            if row["step_s"] and row["predicted_s"]
        ]
        arms.append(
            {
                "precision": precision,
                "multiple": multiple,
                "steps": len(mine),
                "seconds": seconds,
                "time_share": seconds / total if total > 0 else None,
                "step_s": seconds / len(mine),
                "measured_over_predicted": 1.0 + statistics.median(off) if off else None,
            }
        )
    return sorted(arms, key=lambda arm: -arm["seconds"])


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value * scale, form)


_MOST_CHANGES = 24  # listed; the plot and the JSON have them all


def _show_log(
    log: Any, rows: list[dict[str, Any]], arms: list[dict[str, Any]], json_to: Any
) -> None:
    console = show_on(json_to)
    console.print(
        f"{log.path}: policy {log.settings['policy']}, {len(rows):,} steps, "
        f"{rows[-1]['seconds']:,.1f} s",
        highlight=False,
    )
    table = _table("arm", "steps", "time", "step s", "measured / predicted")
    for arm in arms:
        table.add_row(
            f"{arm['precision']} x {arm['multiple']}",
            f"{arm['steps']:,}",
            _number(arm["time_share"], ".1%"),
            f"{arm['step_s']:.4g}",
            _number(arm["measured_over_predicted"], ".3f"),
        )
    console.print(table, highlight=False)
    changes = [(row, after) for row, after in itertools.pairwise(rows) if row["changed"]]
    if changes:
        console.print()
    table = _table("after step", "s", "arm", "bandwidth", "noise scale", "why")
    for row, after in changes[:_MOST_CHANGES]:
        table.add_row(
            str(row["step"]),
            f"{row['seconds']:,.1f}",
            f"{after['precision']} x {after['multiple']}",
            bandwidth_text(row["bandwidth"]),
            _number(row["noise_tokens"], ",.0f"),
            ", ".join(row["reasons"]),
        )
    if changes:
        console.print(table, highlight=False)
    if len(changes) > _MOST_CHANGES:
        console.print(
            f"and {len(changes) - _MOST_CHANGES:,} more: --plot FILE draws them, --json lists them",
            style="bright_black",
            highlight=False,
        )


@command.command("replay")
@click.argument("log")
@common
def replay(json_to: str | None, log: str) -> dict[str, Any]:
    """Decide again what a log says was seen: exit code 1 where a bit differs."""
    read = _log(log)
    decisions = read.replay()
    show_on(json_to).print(
        f"{read.path}: {len(decisions):,} decisions, all bit for bit the same", highlight=False
    )
    return {"decisions": len(decisions), "identical": True}
