"""How `dcp train` looks: a bar on a terminal, a line now and then elsewhere, a closing table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from dcp.cli.arm_panel import ControlView, arm_text
from dcp.cli.show import duration, size

__all__ = ["closing_table", "progress"]

LINE_EVERY_S = 5.0
_NO_FIGURES = {"loss": "-", "speed": "", "idle": "", "memory": ""}

Show = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def progress(
    settings: Any, parameter_count: int, documents: Any, label: str = ""
) -> Iterator[Show]:
    """Yield the function that is called with every event of rank 0.

    `label` stands before every line where this run is one of several.
    """
    title = (
        f"{settings.preset}: {parameter_count:,} parameters, {settings.ranks} "
        f"rank{'s' if settings.ranks > 1 else ''}, {settings.tokens_per_step:,} tokens a step, "
        f"strategy {settings.strategy}"
    )
    if label:
        title = f"{label}: {title}"
    if not label or label.startswith("1/"):
        title += f"\n{_about(documents)}"
        if about := _about_link(settings):
            title += f"\n{about}"
    print(title, file=sys.stderr, flush=True)
    policy = settings.control.policy
    view = ControlView(policy, settings.tokens_per_step) if policy is not None else None
    if sys.stderr.isatty():
        with _bar(settings.steps, label, view) as show:
            yield show
    else:
        yield _lines(settings.steps, label, view)


def _about(documents: Any) -> str:
    stats = documents.stats
    text = (
        f"{documents.name}: {stats.documents:,} documents, {stats.tokens:,} tokens in "
        f"{stats.pieces:,} sequences, longest {int(documents.lengths.max()):,}"
    )
    if stats.longer_than_max:
        fate = "left out" if stats.dropped else "split"
        text += f"; {stats.longer_than_max:,} longer than {documents.max_length:,} {fate}"
    return text


def _about_link(settings: Any) -> str:
    """What moves how, where that is not the usual."""
    parts = []
    if settings.link is not None:
        parts.append(f"emulated link {settings.link}")
    if settings.control.policy is not None:
        grid = ", ".join(settings.control.precisions)
        multiples = ", ".join(str(m) for m in settings.control.batch_multiples)
        parts.append(f"controller {settings.control.policy} over ({grid}) x ({multiples})")
    elif settings.train.precision != "fp32":
        parts.append(f"gradients in {settings.train.precision}")
    return "; ".join(parts)


def _figures(event: dict[str, Any]) -> dict[str, Any]:
    loss, idle = event["loss"], event["idle_share"]
    return {
        "loss": f"{loss:.4f}" if loss is not None else "not finite",
        "speed": f"{event['tokens'] / event['seconds']:,.0f} tokens/s",
        "idle": f"idle {idle:.1%}" if idle is not None else "idle -",
        "memory": f"{size(event['memory']['held'])} a rank",
    }


def _lines(steps: int, label: str, view: ControlView | None) -> Show:
    """The first step, then a line every few seconds, the last step, and every change of arm."""
    last = float("-inf")
    before = f"{label}  " if label else ""

    def show(event: dict[str, Any]) -> None:
        nonlocal last
        if event["kind"] == "step":
            now = time.monotonic()
            if now - last < LINE_EVERY_S and event["step"] + 1 != steps:
                return
            last = now
            text = "  ".join(f"{value}" for value in _figures(event).values())
            line = f"{before}step {event['step'] + 1}/{steps}  loss {text}"
            if event["arm"] is not None:
                line += f"  {arm_text(event['arm'])}"
            print(line, file=sys.stderr, flush=True)
        elif event["kind"] == "eval" and event["eval_loss"] is not None:
            text = f"{before}held-out loss {event['eval_loss']:.4f}"
            print(text, file=sys.stderr, flush=True)
        elif event["kind"] == "control" and view is not None:
            view.take(event)
            if view.changed:
                print(f"{before}controller: {view.change_line()}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def _bar(steps: int, label: str, view: ControlView | None) -> Iterator[Show]:
    """A progress bar, and below it the controller's panel."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn(f"{label}  step".strip()),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("[bold]loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}  {task.fields[idle]}  {task.fields[memory]}"),
        TextColumn("{task.fields[held_out]}"),
        TimeRemainingColumn(),
    ]
    console = Console(stderr=True)
    bar = Progress(*columns, console=console)

    def picture() -> Any:
        return Group(bar, view.panel()) if view is not None else bar

    with Live(picture(), console=console, refresh_per_second=8) as live:
        empty: dict[str, Any] = _NO_FIGURES | {"held_out": ""}
        task = bar.add_task("train", total=steps, **empty)

        def show(event: dict[str, Any]) -> None:
            if event["kind"] == "step":
                bar.update(task, completed=event["step"] + 1, **_figures(event))
            elif event["kind"] == "eval" and event["eval_loss"] is not None:
                bar.update(task, held_out=f"held-out {event['eval_loss']:.4f}")
            elif event["kind"] == "control" and view is not None:
                view.take(event)
                live.update(picture())

        yield show


def closing_table(document: dict[str, Any], settings: Any, *, to: IO[str]) -> None:
    """Print what the run came to."""
    from rich.console import Console
    from rich.table import Table

    steps = document["steps"]
    losses = [s["loss"] for s in steps if s["loss"] is not None]
    idle = [s["idle_share"] for s in steps if s["idle_share"] is not None]
    speed = document["tokens_per_s"]
    rows = [("steps", f"{len(steps)} in {duration(sum(s['seconds'] for s in steps))}")]
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    if document["eval_loss"] is not None:
        rows.append(("held-out loss", f"{document['eval_loss']:.4f}"))
    if document["seconds_to_target"] is not None:
        rows.append(("time to target", duration(document["seconds_to_target"])))
    elif (target := settings.train.target_loss) is not None:
        lacking = document["eval_loss"]
        by = f"; held-out loss ends {lacking - target:.4f} above" if lacking is not None else ""
        rows.append(("time to target", f"not reached in {len(steps)} steps{by} {target:g}"))
    if speed is not None:
        rows.append(("speed", f"{speed:,.0f} tokens/s"))
    if idle:
        rows.append(("idle", f"{sum(idle) / len(idle):.1%} of the ranks' time"))
    if settings.link is not None:
        rows.append(("link", settings.link))
    if settings.control.policy is not None:
        rows.append(("controller", f"{settings.control.policy}: {_shares(steps)}"))
    elif settings.train.precision != "fp32":
        rows.append(("gradients", f"in {settings.train.precision}"))
    if document["skipped_steps"]:
        rows.append(("skipped", f"{document['skipped_steps']} steps were not finite"))
    memory = document["peak_memory_bytes"]
    rows.append(("memory", f"{size(max(memory['ranks']))} a rank, {size(memory['node'])} in all"))
    rows.append(("parameters", f"sha256 {document['parameters_sha256'][:16]}"))
    if settings.checkpoint.folder is not None:
        rows.append(("checkpoint", settings.checkpoint.folder))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    Console(file=to).print(table)


def _shares(steps: list[dict[str, Any]]) -> str:
    """Share of the steps that each arm ran, the largest first."""
    counts: dict[str, int] = {}
    for step in steps:
        counts[arm_text(step["arm"])] = counts.get(arm_text(step["arm"]), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / len(steps):.0%}" for name, count in ordered) or "no step"
