"""Pictures of the controller: what policies cost over congestion, and decisions over a run.

Needs matplotlib (the extra ``viz``), imported when a picture is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dcp._dcp import ArgumentError
from dcp._pyplot import pyplot

if TYPE_CHECKING:
    from dcp.controller import DecisionLog
    from dcp.time_to_loss import Sweep

__all__ = ["draw_decisions", "draw_sweep"]

_POLICIES = {  # colour, marker
    "static": ("#8a8a8a", "s"),
    "accumulation": ("#e4763c", "^"),
    "decoupled": ("#b279a2", "D"),
    "precision": ("#f2a541", "v"),
    "best_fixed": ("#4c78a8", "P"),
    "joint": ("#1a7f5a", "o"),
    "oracle": ("#000000", "x"),
}
_PRECISIONS = {
    "fp32": "#6b6b6b",
    "bf16": "#4c78a8",
    "fp8_e4m3": "#b279a2",
    "fp8_e5m2": "#e49ac1",
    "int8": "#f2a541",
    "int4": "#1a7f5a",
}


def draw_sweep(sweep: Sweep) -> Any:
    """Draw the time to the target of every policy over congestion, relative to the oracle.

    A panel for each base (rows) and dwell time (columns); points are means over seeds, thin lines
    reach from the least to the greatest seed. The band is what ML-for-ML reports of `decoupled`
    over `joint`; the joint controller here is close to 1, so `decoupled` can be held against it.

    Parameters
    ----------
    sweep : dcp.time_to_loss.Sweep
        With the policy "oracle".

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    dcp.ArgumentError
        The sweep has no oracle, or nothing beside it.
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> from dcp.control_plot import draw_sweep
    >>> from dcp.time_to_loss import sweep
    >>> done = sweep(["static", "oracle"], congestion=[0, 1], base=["bf16"], dwell_s=[100],
    ...              seeds=1, target=8)
    >>> [axes.get_title(loc="left") for axes in draw_sweep(done).axes]
    ['base bf16, jobs come and go every 100 s']
    """
    ratios = _ratios(sweep)
    policies = [p for p in _POLICIES if p != "oracle" and any(key[3] == p for key in ratios)]
    if not policies:
        raise ArgumentError("a picture needs the oracle and another policy beside it")
    plt = pyplot()
    bases = list(dict.fromkeys(r.base for r in sweep.results))
    dwells = sorted({r.dwell_s for r in sweep.results})
    jobs = sorted({r.congestion for r in sweep.results})
    figure, grid = plt.subplots(
        len(bases),
        len(dwells),
        figsize=(1.6 + 3.4 * len(dwells), 1.3 + 2.9 * len(bases)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    most = max(max(values) for values in ratios.values())
    for row, base in zip(grid, bases, strict=True):
        for axes, dwell in zip(row, dwells, strict=True):
            _draw_cell(axes, ratios, policies, base, dwell, jobs)
            often = f"jobs come and go every {dwell:g} s" if dwell > 0 else "jobs stay"
            axes.set_title(f"base {base}, {often}", loc="left", fontsize=9)
    _dress_sweep(figure, grid, jobs, most)
    return figure


def _ratios(sweep: Sweep) -> dict[tuple[str, int, float, str], list[float]]:
    """Time over the oracle's of the same seed, by base, congestion, dwell and policy."""
    oracle = {
        (r.base, r.congestion, r.dwell_s, r.seed): r.time_to_target_s
        for r in sweep.results
        if r.policy == "oracle"
    }
    found: dict[tuple[str, int, float, str], list[float]] = {}
    for r in sweep.results:
        best = oracle.get((r.base, r.congestion, r.dwell_s, r.seed))
        if best:
            key = (r.base, r.congestion, r.dwell_s, r.policy)
            found.setdefault(key, []).append(r.time_to_target_s / best)
    return found


def _draw_cell(
    axes: Any,
    ratios: dict[tuple[str, int, float, str], list[float]],
    policies: Sequence[str],
    base: str,
    dwell: float,
    jobs: Sequence[int],
) -> None:
    from dcp.time_to_loss import PUBLISHED_BAND

    axes.axhspan(*PUBLISHED_BAND, color="#b279a2", alpha=0.16, lw=0, label="_band")
    axes.axhline(1.0, color="black", lw=0.9)
    for policy in policies:
        colour, marker = _POLICIES[policy]
        points = [
            (c, ratios[base, c, dwell, policy]) for c in jobs if (base, c, dwell, policy) in ratios
        ]
        if not points:
            continue
        at = [c for c, _ in points]
        means = [statistics.fmean(values) for _, values in points]
        front = policy == "joint"
        axes.vlines(
            at, [min(v) for _, v in points], [max(v) for _, v in points], color=colour, lw=0.8
        )
        axes.plot(
            at,
            means,
            color=colour,
            marker=marker,
            ms=6 if front else 5,
            lw=2.2 if front else 1.4,
            zorder=5 if front else 3,
            label=policy.replace("_", " "),
        )


def _dress_sweep(figure: Any, grid: Any, jobs: Sequence[int], most: float) -> None:
    """Scales, labels and one legend."""
    for axes in grid.flat:
        axes.set_yscale("log")
        axes.set_ylim(0.97, max(1.6, 1.1 * most))
        ticks = [t for t in (1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 20) if t <= 1.1 * most or t <= 1.5]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", color="0.9", lw=0.6)
        axes.set_axisbelow(True)
        axes.set_xticks(jobs)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("jobs behind, on the same network")
    for row in grid:
        row[0].set_ylabel("time to target / oracle's")
    lines, names = grid[0][0].get_legend_handles_labels()
    import matplotlib.patches as patches

    lines.append(patches.Patch(color="#b279a2", alpha=0.16, lw=0))
    names.append("decoupled / joint, published")
    figure.legend(
        lines,
        names,
        loc="outside upper left",
        ncols=max(2, min(len(names), int(figure.get_figwidth() / 1.55))),
        frameon=False,
        fontsize=9,
    )


def draw_decisions(log: DecisionLog) -> Any:
    """Draw what a controller saw and decided over a run.

    Over seconds since the log began, from above: the arm (precision by colour, batch multiple by
    height), the bandwidth it reckons with, the noise scale, and how long steps took beside how
    long they were said to take. Grey shades, in logs of the simulator, count jobs behind.

    Parameters
    ----------
    log : dcp.controller.DecisionLog

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from dcp.control_plot import draw_decisions
    >>> from dcp.controller import DecisionLog
    >>> from dcp.time_to_loss import decision_log, time_to_loss
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "metrics.jsonl")
    ...     _ = file.write_text(decision_log(time_to_loss(target=8.0, trace=True)))
    ...     figure = draw_decisions(DecisionLog.read(file))
    >>> figure.axes[0].get_ylabel()
    'batch multiple'
    """
    plt = pyplot()
    rows = log.rows()
    ends = [row["seconds"] for row in rows]
    starts = [0.0, *ends[:-1]]
    figure, (arms, network, noise, steps) = plt.subplots(
        4,
        1,
        figsize=(9.5, 8.0),
        sharex=True,
        height_ratios=(1.3, 1, 1, 1.3),
        layout="constrained",
    )
    _draw_arms(arms, rows, starts, ends)
    _draw_jobs(network, log.lines, starts, ends)
    most = max((row["bandwidth"] or 0.0 for row in rows), default=0.0)
    unit, scale = ("Gbit/s", 8e-9) if most > 1e9 / 8 else ("Mbit/s", 8e-6)
    _draw_line(network, ends, [_scaled(row["bandwidth"], scale) for row in rows], "#4c78a8")
    network.set_ylabel(f"bandwidth, {unit}")
    _draw_line(noise, ends, [_scaled(row["noise_tokens"], 1.0) for row in rows], "#b279a2")
    noise.set_ylabel("noise scale, tokens")
    _draw_steps(steps, rows, ends)
    for axes in figure.axes:
        axes.grid(axis="y", color="0.92", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.005)
    return figure


def _scaled(value: float | None, scale: float) -> float:
    return float("nan") if value is None else value * scale


def _draw_arms(
    axes: Any, rows: list[dict[str, Any]], starts: list[float], ends: list[float]
) -> None:
    """A bar for every stretch of steps with one arm."""
    first = 0
    used: dict[str, None] = {}
    for i in range(1, len(rows) + 1):
        arm = (rows[first]["precision"], rows[first]["multiple"])
        if i < len(rows) and (rows[i]["precision"], rows[i]["multiple"]) == arm:
            continue
        colour = _PRECISIONS.get(arm[0], "black")
        axes.hlines(arm[1], starts[first], ends[i - 1], color=colour, lw=6)
        if i < len(rows):
            low, high = sorted((arm[1], rows[i]["multiple"]))
            axes.vlines(ends[i - 1], low, high, color="0.75", lw=0.7, zorder=0)
        used[arm[0]] = None
        first = i
    multiples = sorted({row["multiple"] for row in rows})
    axes.set_yscale("log", base=2)
    axes.set_ylim(multiples[0] / 1.6, multiples[-1] * 1.6)
    axes.set_yticks(multiples, [str(m) for m in multiples])
    axes.minorticks_off()
    axes.set_ylabel("batch multiple")
    import matplotlib.lines as lines

    handles = [lines.Line2D([], [], color=_PRECISIONS.get(q, "black"), lw=6) for q in used]
    changes = sum(row["changed"] for row in rows)
    axes.legend(handles, list(used), **_above(len(used)))
    times = "change" if changes == 1 else "changes"
    axes.set_title(f"{len(rows):,} steps, {changes:,} {times} of arm", loc="left", fontsize=10)


def _above(columns: int) -> dict[str, Any]:
    """A legend in one line over the right end of a panel."""
    return {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 1.0),
        "ncols": columns,
        "frameon": False,
        "fontsize": 9,
        "borderaxespad": 0.1,
        "handlelength": 1.4,
    }


def _draw_jobs(
    axes: Any, lines: Iterable[dict[str, Any]], starts: list[float], ends: list[float]
) -> None:
    """Shades for jobs behind, where the log counts them."""
    jobs = [line.get("jobs") for line in lines]
    if any(count is None for count in jobs) or not any(jobs):
        return
    most = max(count for count in jobs if count is not None)
    first = 0
    for i in range(1, len(jobs) + 1):
        if i < len(jobs) and jobs[i] == jobs[first]:
            continue
        shade = 0.28 * (jobs[first] or 0) / most
        axes.axvspan(starts[first], ends[i - 1], color="black", alpha=shade, lw=0, zorder=0)
        first = i
    import matplotlib.patches as patches

    levels = sorted({count for count in jobs if count is not None})
    handles = [patches.Patch(color="black", alpha=0.28 * n / most, lw=0) for n in levels]
    names = [f"{n} job{'s' if n != 1 else ''}" for n in levels]
    axes.legend(handles, names, **_above(len(levels)))


def _draw_line(axes: Any, at: list[float], values: list[float], colour: str) -> None:
    axes.plot(at, values, color=colour, lw=1.2)
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _draw_steps(axes: Any, rows: list[dict[str, Any]], ends: list[float]) -> None:
    measured = [_scaled(row["step_s"], 1.0) for row in rows]
    predicted = [_scaled(row["predicted_s"], 1.0) for row in rows]
    size = 14.0 if len(rows) < 300 else 3.0
    axes.scatter(ends, measured, s=size, color="#f2a541", lw=0, label="measured", rasterized=True)
    axes.plot(ends, predicted, color="0.15", lw=0.9, label="predicted")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step, s")
    axes.set_xlabel("seconds")
    axes.legend(**_above(2), markerscale=14.0 / size if size < 14 else 1.0)
