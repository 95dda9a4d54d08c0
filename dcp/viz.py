"""Pictures: the plan of a step as ranks over time, and the loss curve.

The plan's picture needs no library in its text form; the others need matplotlib (the extra
``viz``), which is imported when a picture is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dcp._dcp import ArgumentError, UnsupportedError

__all__ = ["loss_curve", "plan_picture", "plan_text"]


def plan_text(plan: Any, *, width: int = 64) -> str:
    """Draw a plan as text: one line a rank, time to the right.

    Each micro-batch is a box with the number of its sequences; dots are idle time.

    Parameters
    ----------
    plan : dcp.Plan or mapping
        A plan, or what its `to_json` returns.
    width : int
        Characters for the longest rank, at least 8.

    Returns
    -------
    str

    Examples
    --------
    >>> from dcp import viz
    >>> plan = {"world": 2, "lengths": [400, 300, 90], "micro_batches": [
    ...     {"ranks": [0], "sequences": [0], "start_s": 0.0, "end_s": 0.4},
    ...     {"ranks": [1], "sequences": [1, 2], "start_s": 0.0, "end_s": 0.3}]}
    >>> print(viz.plan_text(plan, width=20))
    rank 0 [1                 ]
    rank 1 [2            ].....
    """
    if width < 8:
        raise ArgumentError(f"width = {width} must be >= 8")
    document = _document(plan)
    batches = document["micro_batches"]
    end = max((b["end_s"] for b in batches), default=0.0)
    lines = []
    for rank in range(document["world"]):
        row = ["."] * width
        for batch in batches:
            if rank not in batch["ranks"] or end <= 0.0:
                continue
            first = round(batch["start_s"] / end * width)
            last = max(first + 1, round(batch["end_s"] / end * width))
            label = str(len(batch["sequences"]))[: max(0, last - first - 2)]
            box = "[" + label.ljust(last - first - 2) + "]" if last - first >= 2 else "|"
            row[first:last] = list(box)
        lines.append(f"rank {rank} {''.join(row[:width])}")
    return "\n".join(lines)


def plan_picture(plan: Any, *, ax: Any = None, title: str | None = None) -> Any:
    """Draw a plan with matplotlib: a row a rank, a bar a micro-batch, time to the right.

    Colour is the longest sequence of the micro-batch, the number in it how many sequences it
    holds, and the grey rest of a row is idle time.

    Parameters
    ----------
    plan : dcp.Plan or mapping
        A plan, or what its `to_json` returns.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.
    title : str or None
        Title; None names world, sequences and idle share.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> from dcp import viz
    >>> plan = {"world": 1, "lengths": [400], "micro_batches": [
    ...     {"ranks": [0], "sequences": [0], "start_s": 0.0, "end_s": 0.4}]}
    >>> viz.plan_picture(plan).get_xlabel()
    'milliseconds (estimate)'
    """
    axes, plt = _axes(ax, height=0.0)
    document = _document(plan)
    lengths, world = document["lengths"], document["world"]
    batches = [b for b in document["micro_batches"] if b["sequences"]]
    end_ms = 1e3 * max((b["end_s"] for b in batches), default=0.0)
    longest = [max(lengths[i] for i in b["sequences"]) for b in batches]
    norm = plt.Normalize(0, max(longest, default=1))
    colours = plt.get_cmap("YlGnBu")
    axes.barh(range(world), [end_ms] * world, height=0.8, color="0.93", zorder=0)
    for batch, length in zip(batches, longest, strict=True):
        start, span = 1e3 * batch["start_s"], 1e3 * (batch["end_s"] - batch["start_s"])
        share = norm(length)
        for rank in batch["ranks"]:
            axes.barh(
                rank, span, left=start, height=0.8, color=colours(0.15 + 0.7 * share), edgecolor="w"
            )
            if end_ms > 0 and span > 0.03 * end_ms:
                axes.text(
                    start + span / 2,
                    rank,
                    str(len(batch["sequences"])),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if share > 0.55 else "black",
                )
    axes.set_yticks(range(world), [f"rank {rank}" for rank in range(world)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (estimate)")
    busy = sum((b["end_s"] - b["start_s"]) * len(b["ranks"]) for b in batches) * 1e3
    idle = 1.0 - busy / (world * end_ms) if end_ms > 0 else 0.0
    axes.set_title(
        title or f"{len(lengths)} sequences on {world} ranks, {idle:.1%} idle", loc="left"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return axes


def loss_curve(steps: str | Path | Iterable[Any], *, ax: Any = None) -> Any:
    """Draw the loss of each step and, where there are any, the held-out losses.

    Parameters
    ----------
    steps : path or iterable
        A `metrics.jsonl`, or its folder, or records with `step` and `loss` (dicts, or the
        `steps` of a :class:`dcp.trainer.Report`).
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> from dcp import viz
    >>> viz.loss_curve([{"step": 0, "loss": 5.5}, {"step": 1, "loss": 5.0}]).get_ylabel()
    'loss'
    """
    axes, _ = _axes(ax, height=3.2)
    records = _read_metrics(Path(steps)) if isinstance(steps, str | Path) else list(steps)
    losses, held_out = [], []
    for record in records:
        values = record if isinstance(record, Mapping) else vars(record)
        if values.get("loss") is not None:
            losses.append((values["step"], values["loss"]))
        elif values.get("eval_loss") is not None:
            held_out.append((values["step"], values["eval_loss"]))
    axes.plot([s for s, _ in losses], [x for _, x in losses], color="#2b6cb0", label="training")
    if held_out:
        axes.plot(
            [s for s, _ in held_out],
            [x for _, x in held_out],
            "o-",
            color="#c05621",
            markersize=4,
            label="held out",
        )
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _axes(ax: Any, *, height: float) -> tuple[Any, Any]:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError(
            "pictures need matplotlib: pip install 'dcp[viz]' (plan_text needs nothing)"
        ) from error
    if ax is None:
        _, ax = plt.subplots(figsize=(8, height or 2.4), layout="constrained")
    return ax, plt


def _document(plan: Any) -> Mapping[str, Any]:
    if isinstance(plan, Mapping):
        return plan
    document = plan.to_json()
    loaded: Mapping[str, Any] = json.loads(document) if isinstance(document, str) else document
    return loaded


def _read_metrics(path: Path) -> list[Any]:
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
