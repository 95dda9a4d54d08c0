"""Pictures: a step as ranks over time, speed-ups of strategies, and the loss curve.

The text forms need no further library; the others need matplotlib (the extra ``viz``), which is
imported when a picture is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dcp._dcp import ArgumentError
from dcp._pyplot import pyplot

__all__ = ["loss_curve", "plan_html", "plan_lines", "plan_picture", "plan_text", "speedup_picture"]


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


def plan_lines(plan: Any, *, width: int = 96) -> Any:
    """Draw a plan for a terminal: one line a rank, time to the right, colour by length.

    Parameters
    ----------
    plan : dcp.Plan, dcp.simulate.TimeLine or mapping
        A plan, or what its `to_json` returns.
    width : int
        Characters for the makespan, at least 8.

    Returns
    -------
    rich.text.Text
        A brighter block is a longer sequence; a group's number of ranks stands where its block
        begins; dots are idle time. The last line says so.

    Examples
    --------
    >>> import dcp
    >>> from dcp import viz
    >>> plan = dcp.plan([4, 2], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
    >>> print(viz.plan_lines(plan, width=8).plain.splitlines()[1])
     1 ████····
    """
    from rich.text import Text

    if width < 8:
        raise ArgumentError(f"width = {width} must be >= 8")
    picture = _Picture.of(plan)
    text = Text()
    digits = len(str(picture.world - 1))
    for rank in range(picture.world):
        row: list[tuple[str, str]] = [("·", "bright_black")] * width
        for bar in picture.bars:
            if not bar.first <= rank < bar.first + bar.count or picture.end_s <= 0:
                continue
            begin = min(width - 1, round(bar.start_s / picture.end_s * width))
            stop = max(begin + 1, round(bar.end_s / picture.end_s * width))
            colour = _TERMINAL[round(picture.shade(bar.longest) * (len(_TERMINAL) - 1))]
            for i in range(begin, min(stop, width)):
                row[i] = ("█", colour)
            if begin > 0 and stop - begin > 1:  # a border to what ends here
                row[begin] = ("▐", colour)
            label = str(bar.count) if bar.count > 1 else ""
            if label and stop - begin > len(label) + 1:
                for i, letter in enumerate(label, begin + 1):
                    row[i] = (letter, f"bold {'white' if colour in _DARK else 'black'} on {colour}")
        text.append(f"{rank:>{digits + 1}} ", "bright_black")
        for glyph, style in row:
            text.append(glyph, style)
        text.append("\n")
    text.append(" " * (digits + 2))
    for i, length in enumerate(picture.ticks(len(_TERMINAL))):
        text.append("█ ", _TERMINAL[i])
        text.append(f"{length:,}  ", "bright_black")
    text.append("tokens of the longest sequence; a number is a group's ranks", "bright_black")
    return text


_TERMINAL = ("#35608d", "#2a788e", "#21918c", "#43bf71", "#a8db34", "#fde725")
_DARK = _TERMINAL[:3]


def plan_picture(plan: Any, *, ax: Any = None, title: str | None = None) -> Any:
    """Draw a plan or a simulated step: a row a rank, a block a micro-batch, time to the right.

    A block is as tall as its group. Colour is the longest sequence of the micro-batch, hatching
    that it recomputes (sparse: some layers or MLPs; dense: every layer), the number in it how many
    sequences it holds, and the grey rest of a row is idle time.

    Parameters
    ----------
    plan : dcp.Plan, dcp.simulate.TimeLine or mapping
        A plan, what its `to_json` returns, or a simulated step.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.
    title : str or None
        Title; None names strategy, world and sequences, makespan, bound and idle share.

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
    picture = _Picture.of(plan)
    height = 1.5 + min(7.5, max(0.9, 0.26 * picture.world))
    axes, plt = _axes(ax, size=(9.5, height))
    unit, scale = ("seconds", 1.0) if picture.end_s >= 2 else ("milliseconds", 1e3)
    end = picture.end_s * scale
    world = picture.world
    colours, norm = plt.get_cmap("viridis"), picture.norm()
    axes.add_patch(plt.Rectangle((0, -0.5), end, world, color="0.91", zorder=0, linewidth=0))
    edge = 0.6 if world <= 48 and len(picture.bars) <= 1500 else 0.15
    for bar in picture.bars:
        fill = colours(norm(bar.longest))
        dark = sum(fill[:3]) < 1.45
        box = (bar.start_s * scale, bar.first - 0.5), (bar.end_s - bar.start_s) * scale, bar.count
        axes.add_patch(plt.Rectangle(*box, facecolor=fill, edgecolor="white", lw=edge, zorder=2))
        if bar.recompute:
            axes.add_patch(_hatch(plt, box, bar.recompute, (1, 1, 1, 0.6) if dark else _GREY))
        label = str(bar.sequences) + (f" on {bar.count}" if bar.count > 1 else "")
        if box[1] > 0.011 * end * (1 + len(label)) and world <= 48:
            axes.text(
                box[0][0] + box[1] / 2,
                bar.first + (bar.count - 1) / 2,
                label,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if dark else "black",
                zorder=4,
                clip_on=True,
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.8}
                if bar.recompute
                else None,
            )
    if picture.node_ranks and picture.node_ranks < world:
        for border in range(picture.node_ranks, world, picture.node_ranks):
            axes.axhline(border - 0.5, color="black", alpha=0.45, lw=0.6, ls=(0, (4, 4)), zorder=3)
    if picture.bound_s:
        axes.axvline(picture.bound_s * scale, color="#c53030", lw=1.1, ls=":", zorder=6)
    _dress_plan(axes, plt, picture, end, unit, title)
    return axes


_GREY = (0.15, 0.15, 0.15, 0.45)


def _hatch(plt: Any, box: Any, kind: int, colour: Any) -> Any:
    """Thin lines over a block, denser where every layer is computed again."""
    patch = plt.Rectangle(*box, fill=False, edgecolor=colour, lw=0.0, zorder=2.5)
    patch.set_hatch(("", "//", "//////")[kind])
    if hasattr(patch, "set_hatch_linewidth"):  # matplotlib 3.10
        patch.set_hatch_linewidth(0.6)
    return patch


def _dress_plan(axes: Any, plt: Any, picture: _Picture, end: float, unit: str, title: Any) -> None:
    """Axes, title, and the bar of colours of a plan's picture."""
    world = picture.world
    others = axes.get_shared_x_axes().get_siblings(axes)
    axes.set_xlim(0, max(end * 1.004, 1e-12, *(a.dataLim.x1 for a in others if a is not axes)))
    axes.set_ylim(world - 0.5, -0.5)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20) if world / n <= 33)
    axes.set_yticks(range(0, world, every), [f"rank {rank}" for rank in range(0, world, every)])
    axes.tick_params(axis="y", length=0, labelsize=8 if world > 12 else 9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"{unit} ({picture.kind})", loc="left")
    axes.set_title(title if title is not None else picture.title(), loc="left", fontsize=10)
    kinds = sorted({bar.recompute for bar in picture.bars} - {0})
    if kinds:
        box = (0.0, 0.0), 1.0, 1.0
        axes.legend(
            [_hatch(plt, box, kind, "0.3") for kind in kinds],
            [("", "recomputes some layers", "recomputes every layer")[kind] for kind in kinds],
            loc="upper right",
            bbox_to_anchor=(1.0, -0.02),
            ncols=2,
            frameon=False,
            fontsize=8,
        )
    if len({bar.longest for bar in picture.bars}) > 1:
        bar = axes.figure.colorbar(
            plt.cm.ScalarMappable(norm=picture.norm(), cmap="viridis"),
            ax=axes,
            pad=0.012,
            fraction=0.03,
            aspect=30,
        )
        bar.set_label("longest sequence, tokens", fontsize=8)
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        bar.ax.tick_params(labelsize=8)
        bar.ax.minorticks_off()
        bar.set_ticks(picture.powers())
        bar.outline.set_visible(False)


@dataclass(frozen=True)
class _Bar:
    """A micro-batch as it is drawn: ranks first .. first + count - 1."""

    first: int
    count: int
    start_s: float
    end_s: float
    longest: int
    sequences: int
    tokens: int
    recompute: int  # 0: nothing, 1: something, 2: every layer
    again: str  # the same in words

    def describe(self) -> str:
        last = self.first + self.count - 1
        ranks = f"rank {self.first}" if self.count == 1 else f"ranks {self.first} to {last}"
        return (
            f"{ranks}\n{self.sequences:,} sequence{'s' if self.sequences != 1 else ''}, "
            f"{self.tokens:,} tokens, longest {self.longest:,}\n"
            f"{_seconds(self.start_s)} to {_seconds(self.end_s)}\nrecomputes {self.again}"
        )


@dataclass(frozen=True)
class _Picture:
    """What of a plan or a simulated step is drawn."""

    world: int
    bars: list[_Bar]
    end_s: float
    idle_share: float
    kind: str  # "estimate" or "simulated"
    lengths: int
    tokens: int
    span: tuple[int, int]  # a short length and the longest
    node_ranks: int = 0
    bound_s: float | None = None
    strategy: str = ""

    @classmethod
    def of(cls, source: Any) -> _Picture:
        plan, line = (source.plan, source) if hasattr(source, "busy_s") else (source, None)
        document = _document(plan)
        lengths, layers = document["lengths"], document.get("cost", {}).get("layer_count", 0)
        boxes = _waiting_out(line) if line is not None else None
        bars = []
        for m, batch in enumerate(document["micro_batches"]):
            if not batch["sequences"]:
                continue
            counts = batch.get("recompute") or {}
            dropped = counts.get("layer", 0)
            kind = 2 if layers and dropped >= layers else int(any(counts.values()))
            again = ", ".join(f"{n} {k}{'s' if n != 1 else ''}" for k, n in counts.items() if n)
            own = [(batch["ranks"][0], len(batch["ranks"]), batch["start_s"], batch["end_s"])]
            mine = [lengths[i] for i in batch["sequences"]]
            about = (max(mine), len(mine), sum(mine), kind, again or "nothing")
            for first, count, start, end in boxes[m] if boxes is not None else own:
                bars.append(_Bar(first, count, start, end, *about))
        world, end_s = document["world"], max((bar.end_s for bar in bars), default=0.0)
        busy = sum((bar.end_s - bar.start_s) * bar.count for bar in bars)
        bound = document.get("bound_s") if line is None else None
        return cls(
            world=world,
            bars=bars,
            end_s=end_s if line is None else line.makespan_s,
            idle_share=max(0.0, 1.0 - busy / (world * end_s)) if end_s > 0 else 0.0,
            kind="estimate" if line is None else "simulated",
            lengths=len(lengths),
            tokens=sum(lengths),
            span=(sorted(lengths)[len(lengths) // 10], max(lengths)) if lengths else (1, 2),
            node_ranks=document.get("cost", {}).get("node_ranks", 0),
            bound_s=bound if bound and bound < end_s else None,
            strategy=document.get("strategy", ""),
        )

    def _range(self) -> tuple[float, float]:
        """Lengths of the darkest and the brightest colour: of the step, so that all plans of one
        step share them, without its shortest tenth, which would take half of the colours."""
        low, high = self.span
        return float(max(1, low)), float(max(high, low + 1, 2))

    def shade(self, length: int) -> float:
        """Of a length, 0 to 1, by its logarithm."""
        low, high = self._range()
        return min(1.0, max(0.0, math.log(max(length, 1) / low) / math.log(high / low)))

    def norm(self) -> Any:
        from matplotlib.colors import LogNorm

        return LogNorm(*self._range(), clip=True)

    def ticks(self, count: int) -> list[int]:
        """Lengths from the least to the greatest, evenly by their logarithm."""
        low, high = self._range()
        return [round(low * (high / low) ** (i / (count - 1))) for i in range(count)]

    def powers(self) -> list[int]:
        """Powers of two between the least and the greatest length, at most eight."""
        low, high = self._range()
        found = [1 << i for i in range(math.ceil(math.log2(low)), int(math.log2(high)) + 1)]
        every = math.ceil(len(found) / 8)
        return found[::-1][:: every or 1] or self.ticks(2)

    def title(self) -> str:
        head = f"{self.strategy}: " if self.strategy else ""
        text = (
            f"{head}{self.lengths:,} sequences, {self.tokens:,} tokens on {self.world} "
            f"rank{'s' if self.world != 1 else ''}\n{_seconds(self.end_s)}"
        )
        if self.bound_s:
            gap = self.end_s / self.bound_s - 1
            text += f", {gap:.2%} above the least possible ({_seconds(self.bound_s)})"
        return f"{text}, {self.idle_share:.1%} idle"


def _waiting_out(line: Any) -> dict[int, list[tuple[int, int, float, float]]]:
    """(first rank, ranks, start, end of work) of each micro-batch of a simulated step; ranks of a
    group that end at different times are drawn apart, so that their waiting shows."""
    boxes: dict[int, list[tuple[int, int, float, float]]] = {}
    for rank in range(len(line.busy_s)):
        for span in line.rank(rank):
            end, parts = span.start_s + span.work_s, boxes.setdefault(span.micro_batch, [])
            if parts and parts[-1][0] + parts[-1][1] == rank and parts[-1][3] == end:
                first, count, start, _ = parts[-1]
                parts[-1] = (first, count + 1, start, end)
            else:
                parts.append((rank, 1, span.start_s, end))
    return boxes


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def plan_html(plan: Any, *, width: int = 760, max_ranks: int = 256) -> str:
    """Draw a plan as HTML with an inline SVG, for notebooks; needs no further library.

    A block is a micro-batch, as tall as its group; colour is its longest sequence, hatching what
    it recomputes, and pointing at it says all of it. The dotted line is the least possible time.

    Parameters
    ----------
    plan : dcp.Plan, dcp.simulate.TimeLine or mapping
    width : int
        Pixels of the longest rank.
    max_ranks : int
        Ranks beyond are left out, which is said.

    Returns
    -------
    str

    Examples
    --------
    >>> import dcp
    >>> from dcp import viz
    >>> plan = dcp.plan([4, 2], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
    >>> viz.plan_html(plan).count("<title>")
    2
    """
    picture = _Picture.of(plan)
    rows = min(picture.world, max_ranks)
    row = max(3.0, min(20.0, 560.0 / rows))
    scale = width / picture.end_s if picture.end_s > 0 else 0.0
    left, top = 58, 6
    out = [f'<rect x="{left}" y="{top}" width="{width}" height="{rows * row:.1f}" fill="#e8e8e8"/>']
    for bar in picture.bars:
        if bar.first >= rows:
            continue
        x, y = left + bar.start_s * scale, top + bar.first * row
        w = max(0.8, (bar.end_s - bar.start_s) * scale)
        h = min(bar.count, rows - bar.first) * row
        box = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
        out.append(
            f'<g><rect {box} fill="{_viridis(picture.shade(bar.longest))}" stroke="#fff" '
            f'stroke-width="{0.8 if row > 6 else 0.3}"/>'
        )
        if bar.recompute:
            out.append(f'<rect {box} fill="url(#dcp-again-{bar.recompute})"/>')
        out.append(f"<title>{escape(bar.describe())}</title></g>")
    every = max(1, math.ceil(14 / row))
    for rank in range(0, rows, every):
        y = top + (rank + 0.5) * row + 3.5
        out.append(f'<text x="0" y="{y:.1f}" font-size="10" fill="#555">rank {rank}</text>')
    bottom = top + rows * row
    if picture.bound_s:
        x = left + picture.bound_s * scale
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom:.1f}" stroke="#c53030" '
            f'stroke-dasharray="2 3"/>'
        )
    out.append(_html_axis(picture, left, width, bottom))
    title = escape(picture.title()).replace("\n", "<br>")
    if rows < picture.world:
        title += f" (the first {rows} ranks are drawn)"
    return (
        f'<div style="font:13px sans-serif">{title}<br>'
        f'<svg width="{left + width + 8}" height="{bottom + 46:.0f}" '
        f'style="background:#fff">{_HTML_DEFS}{"".join(out)}</svg></div>'
    )


_HTML_DEFS = (
    '<defs><pattern id="dcp-again-1" width="9" height="9" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line y2="9" stroke="#fff" stroke-opacity=".75"/></pattern>'
    '<pattern id="dcp-again-2" width="4" height="4" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line y2="4" stroke="#fff" stroke-opacity=".75"/></pattern>'
    "</defs>"
)


def _html_axis(picture: _Picture, left: int, width: int, y: float) -> str:
    """Ends of the time axis, and the colours of lengths."""
    text = 'font-size="10" fill="#555"'
    out = [
        f'<text x="{left}" y="{y + 13:.1f}" {text}>0</text>'
        f'<text x="{left + width}" y="{y + 13:.1f}" {text} text-anchor="end">'
        f"{_seconds(picture.end_s)} ({picture.kind})</text>"
    ]
    ticks, x = picture.ticks(6), float(left)
    for i, length in enumerate(ticks):
        colour = _viridis(i / (len(ticks) - 1))
        label = f"{length:,}" + (" tokens, longest sequence" if length == ticks[-1] else "")
        out.append(
            f'<rect x="{x:.0f}" y="{y + 26:.1f}" width="11" height="11" fill="{colour}"/>'
            f'<text x="{x + 15:.0f}" y="{y + 35:.1f}" {text}>{label}</text>'
        )
        x += 30 + 7 * len(f"{length:,}")
        if length == ticks[-1]:
            break
    return "".join(out)


_VIRIDIS = (
    "440154",
    "472d7b",
    "3b528b",
    "2c728e",
    "21918c",
    "28ae80",
    "5ec962",
    "addc30",
    "fde725",
)


def _viridis(share: float) -> str:
    """Colour of 0 to 1, as matplotlib's map of that name has it at nine points."""
    place = min(max(share, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    i = min(int(place), len(_VIRIDIS) - 2)
    low, high = (tuple(bytes.fromhex(c)) for c in _VIRIDIS[i : i + 2])
    mixed = [round(a + (b - a) * (place - i)) for a, b in zip(low, high, strict=True)]
    return "#" + bytes(mixed).hex()


def speedup_picture(
    rows: Any,
    *,
    over: str = "bucket-published",
    strategies: Sequence[str] | None = None,
    published: bool = True,
    ax: Any = None,
) -> Any:
    """Draw speed-ups of strategies over one of them: a group of bars a distribution.

    Parameters
    ----------
    rows : list of dict or dcp.simulate.Simulation
        Rows of `dcp.simulate.training`.
    over : str
        The strategy that counts 1.
    strategies : sequence of str, optional
        Which are drawn; default: all others, slowest first.
    published : bool
        Whether to mark what the paper reports (32 H200), where `over` is its own baseline,
        "bucket-published": over anything else its figures mean nothing.
    ax : matplotlib.axes.Axes, optional
        Where to draw, for one number of devices; None makes a figure with one panel each.

    Returns
    -------
    matplotlib.axes.Axes or list of them

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> from dcp import viz
    >>> rows = [{"distribution": "mine", "devices": 8, "strategy": name, "step_s": seconds}
    ...         for name, seconds in (("bucket", 2.0), ("dcp", 1.0))]
    >>> viz.speedup_picture(rows, over="bucket").get_ylabel()
    'times bucket'
    """
    rows = [row for row in getattr(rows, "rows", rows) if row["step_s"] is not None]
    counts = list(dict.fromkeys(row["devices"] for row in rows))
    if not any(row["strategy"] == over for row in rows):
        raise ArgumentError(f"over = {over!r}: the rows hold no figures of it")
    if ax is not None and len(counts) != 1:
        raise ArgumentError(f"ax is one panel, the rows hold {counts} devices")
    panels, plt = [ax], None
    if ax is None:
        plt = _pyplot()
        _, grid = plt.subplots(
            1,
            len(counts),
            figsize=(2.0 + 4.2 * len(counts), 4.2),
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        panels = list(grid[0])
    table = {(r["distribution"], r["devices"], r["strategy"]): r["step_s"] for r in rows}
    names = list(strategies) if strategies is not None else _slowest_first(table, over)
    data = list(dict.fromkeys(row["distribution"] for row in rows))
    for panel, devices in zip(panels, counts, strict=True):
        _bars(panel, table, data, devices, names, over)
        panel.set_title(f"{devices:,} devices", loc="left", fontsize=10)
        if published and over == "bucket-published":
            _mark_published(panel, last=panel is panels[-1])
    panels[0].set_ylabel(f"times {over}")
    handles, labels = panels[0].get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 8.5}
    if ax is None:  # below all panels
        columns = min(len(labels), 4 * len(panels))
        where = "outside lower center"
        panels[0].figure.legend(handles, labels, loc=where, ncols=columns, **style)
    else:
        ax.legend(handles, labels, **style)
    return panels if len(panels) > 1 else panels[0]


def _slowest_first(table: Mapping[tuple[str, int, str], float], over: str) -> list[str]:
    """Strategies by their mean speed-up; dcp last where equal."""
    gains: dict[str, list[float]] = {}
    for (name, devices, strategy), seconds in table.items():
        if strategy != over and (base := table.get((name, devices, over))):
            gains.setdefault(strategy, []).append(base / seconds)
    return sorted(gains, key=lambda s: (sum(gains[s]) / len(gains[s]), s == "dcp"))


_OURS = "#17496b"
_OTHERS = (
    "#d9d9d9",
    "#e8b48f",
    "#f0d58c",
    "#b8d8a7",
    "#9fd0c9",
    "#a9c4e4",
    "#c3b3dc",
    "#e2b3c6",
    "#b5a995",
)


def _bars(
    panel: Any,
    table: Mapping[tuple[str, int, str], float],
    data: list[str],
    devices: int,
    names: list[str],
    over: str,
) -> None:
    width = 0.84 / max(1, len(names))
    for i, strategy in enumerate(names):
        places, heights = [], []
        for x, name in enumerate(data):
            seconds, base = table.get((name, devices, strategy)), table.get((name, devices, over))
            if seconds and base:
                places.append(x - 0.42 + (i + 0.5) * width)
                heights.append(base / seconds)
        mine = strategy == "dcp"
        drawn = panel.bar(
            places,
            heights,
            width=0.9 * width,
            color=_OURS if mine else _OTHERS[i % len(_OTHERS)],
            label=strategy,
            zorder=3,
        )
        if mine:
            panel.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2, color=_OURS)
    panel.axhline(1.0, color="0.4", lw=0.8, zorder=2)
    panel.set_xticks(range(len(data)), data)
    panel.tick_params(axis="x", length=0)
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="0.93", zorder=0)


def _mark_published(panel: Any, *, last: bool) -> None:
    from dcp.simulate import PUBLISHED_INTER, PUBLISHED_INTRA

    low, high = PUBLISHED_INTER
    panel.axhspan(low, high, color="#f6ad55", alpha=0.22, lw=0, zorder=1)
    panel.axhline(PUBLISHED_INTRA, color="#dd6b20", lw=1.0, ls="--", zorder=2)
    if last:
        style = {"transform": panel.get_yaxis_transform(), "fontsize": 7.5, "color": "#9c4221"}
        panel.text(1.01, PUBLISHED_INTRA, "published, up to", va="center", **style)
        panel.text(1.01, (low + high) / 2, "published, sp and\naccumulation", va="center", **style)


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
    axes, _ = _axes(ax, size=(8, 3.2))
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


def _pyplot() -> Any:
    return pyplot("pictures need matplotlib: pip install 'dcp[viz]' (plan_text needs nothing)")


def _axes(ax: Any, *, size: tuple[float, float]) -> tuple[Any, Any]:
    plt = _pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained")
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
