"""Pictures of layouts: who holds what in a buffer, and what sharding over more ranks pads.

Needs matplotlib (the extra ``viz``), imported when a picture is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dcp._pyplot import pyplot

if TYPE_CHECKING:
    from dcp.layout import Layout
    from dcp.layout_groups import Buffer

__all__ = ["draw_curves", "draw_layout", "draw_model", "kind_of"]

_COLOURS = {
    "embedding": "#4c78a8",
    "attention": "#72b7b2",
    "MLP": "#f2a541",
    "experts": "#e4763c",
    "router": "#b279a2",
    "norm": "#6b6b6b",
    "bias": "#9d9da1",
    "other": "#88b06a",
}
_KINDS = (  # the first that a name holds
    ("experts", ("expert",)),
    ("router", ("router", "mlp.gate.", "block_sparse_moe.gate")),
    ("bias", (".bias",)),
    ("norm", ("norm", "ln_")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("MLP", ("mlp", "ffn", "feed_forward", "gate_proj", "up_proj", "down_proj")),
    ("embedding", ("embed", "lm_head", "wte", "wpe")),
)
_PADDING = {"facecolor": "white", "edgecolor": "0.55", "hatch": "////", "linewidth": 0.0}
_MOST_ROWS = 48  # of ranks that are drawn one by one
_MOST_NAMES = 14  # tensors that have a colour each, where kinds say too little
_ROW_COLOURS = ("#17496b", "#2b8cbe", "#5fb7c5", "#9bd3a5", "#d3e58f")


def kind_of(name: str) -> str:
    """What a tensor is for, from its name.

    Examples
    --------
    >>> kind_of("model.layers.0.mlp.experts.7.up_proj.weight"), kind_of("model.norm.weight")
    ('experts', 'norm')
    """
    for kind, words in _KINDS:
        if any(word in name for word in words):
            return kind
    return "other"


def draw_layout(layout: Layout, *, ax: Any = None, title: str | None = None) -> Any:
    """Draw a buffer: a row a rank, tensors coloured by kind, padding hatched.

    Parameters
    ----------
    layout : dcp.Layout
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure otherwise.
    title : str, optional
        Default: tensors, ranks and padding.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> import dcp
    >>> layout = dcp.plan_layout([("w", (96, 64)), ("b", (64,))], ranks=5, block_rows=16)
    >>> draw_layout(layout).get_ylabel()
    'rank'
    """
    plt = pyplot()
    rows = _drawn_ranks(layout.ranks)
    if ax is None:
        height = 1.6 + 0.3 * min(len(rows), 12) + 0.12 * max(0, len(rows) - 12)
        ax = plt.subplots(figsize=(9, height), layout="constrained")[1]
    colour = _colours(layout)
    widest: dict[str, tuple[int, float, int]] = {}  # name: width, middle, y
    for y, rank in enumerate(rows):
        if rank is not None:
            _draw_rank(ax, layout, rank, y, colour, widest)
    _label(ax, layout, widest, colour)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, max(1, layout.shard_elements))
    _rank_axis(ax, rows)
    ax.set_xlabel("element of the rank's shard")
    ax.xaxis.set_major_formatter(plt.FuncFormatter(lambda x, _: _short(x)))
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    text = f"{len(layout.shapes):,} tensors over {layout.ranks:,} ranks, padding {_share(layout)}"
    ax.set_title(text if title is None else title, loc="left", fontsize=10)
    labels = dict(sorted(((label, c) for label, c, _ in colour.values()), key=_legend_place))
    handles = [plt.Rectangle((0, 0), 1, 1, color=c, label=label) for label, c in labels.items()]
    handles.append(plt.Rectangle((0, 0), 1, 1, label="padding", **_PADDING))
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
    )
    return ax


def _share(layout: Layout) -> str:
    return f"{layout.padding:.2%}"


def _short(count: float) -> str:
    """1500000 -> 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def _drawn_ranks(ranks: int) -> list[int | None]:
    """All ranks, or the first and the last of them with a gap (None) between."""
    if ranks <= _MOST_ROWS:
        return list(range(ranks))
    half = _MOST_ROWS // 2
    return [*range(half), None, *range(ranks - half, ranks)]


def _rank_axis(ax: Any, rows: Sequence[int | None]) -> None:
    every = max(1, -(-len(rows) // 12))
    ticks = [y for y, rank in enumerate(rows) if rank is None or rank % every == 0]
    if None in rows:  # no tick beside the gap
        gap = rows.index(None)
        ticks = [y for y in ticks if y == gap or abs(y - gap) > every / 2]
    ax.set_yticks(ticks, ["⋮" if rows[y] is None else f"{rows[y]:,}" for y in ticks])
    ax.set_ylabel("rank")


def _colours(layout: Layout) -> dict[str, tuple[str, str, Any]]:
    """Legend label, its colour, and the shade of every tensor.

    By kind, every other tensor of a kind a bit lighter; or a colour each where names say no kind.
    """
    kinds = {name: kind_of(name) for name in layout.shapes}
    if set(kinds.values()) <= {"other"} and len(kinds) <= _MOST_NAMES:
        cycle = [c for kind, c in _COLOURS.items() if kind != "bias"]
        own = [cycle[i % len(cycle)] for i in range(len(kinds))]
        return {name: (name, c, c) for name, c in zip(kinds, own, strict=True)}
    seen: dict[str, int] = {}
    found: dict[str, tuple[str, str, Any]] = {}
    for name, kind in kinds.items():
        seen[kind] = seen.get(kind, 0) + 1
        base = _COLOURS[kind]
        found[name] = kind, base, base if seen[kind] % 2 else _lighter(base)
    return found


def _dark(colour: str) -> bool:
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def _lighter(colour: str) -> str:
    parts = bytes.fromhex(colour[1:])
    return "#" + bytes(round(c + 0.28 * (255 - c)) for c in parts).hex()


def _legend_place(item: tuple[str, str]) -> int:
    kinds = list(_COLOURS)
    return kinds.index(item[0]) if item[0] in kinds else -1


def _draw_rank(
    ax: Any,
    layout: Layout,
    rank: int,
    y: int,
    colour: dict[str, tuple[str, str, Any]],
    widest: dict[str, tuple[int, float, int]],
) -> None:
    shard, at = layout.shard_elements, 0
    gaps, pieces, colours = [], [], []
    for name, first, count in layout.runs(rank):
        left = layout.offsets[name] + first - rank * shard
        if left > at:
            gaps.append((at, left - at))
        pieces.append((left, count))
        colours.append(colour[name][2])
        at = left + count
        if count > widest.get(name, (0, 0.0, 0))[0]:
            widest[name] = count, left + count / 2, y
    if shard > at:
        gaps.append((at, shard - at))
    if gaps:
        ax.broken_barh(gaps, (y - 0.4, 0.8), **_PADDING)
    if pieces:
        wide = sum(1 for _, count in pieces if count > 0.01 * shard) > 0.5 * len(pieces)
        style = {"edgecolor": "white", "linewidth": 0.6} if wide else {"linewidth": 0.0}
        ax.broken_barh(pieces, (y - 0.4, 0.8), facecolors=colours, **style)
    ax.broken_barh([(0, shard)], (y - 0.4, 0.8), facecolor="none", edgecolor="0.45", linewidth=0.5)


def _label(
    ax: Any,
    layout: Layout,
    widest: dict[str, tuple[int, float, int]],
    colour: dict[str, tuple[str, str, Any]],
) -> None:
    """The name of a tensor in its widest piece, where it fits."""
    if len(layout.shapes) > 3 * _MOST_NAMES:
        return
    for name, (count, middle, y) in widest.items():
        text = ".".join(name.removesuffix(".weight").split(".")[-2:])
        if count > 0.016 * len(text) * layout.shard_elements:
            _, base, shade = colour[name]
            ink = "white" if shade == base and _dark(base) else "0.15"
            ax.text(middle, y, text, ha="center", va="center", fontsize=7, color=ink)


def draw_model(
    plans: Iterable[tuple[int, int, Sequence[Buffer]]],
    curves: Iterable[tuple[str, Sequence[tuple[int, float]]]],
    *,
    title: str = "",
) -> Any:
    """Draw the largest buffer of a model, and padding over ranks beside what others pad.

    Parameters
    ----------
    plans : iterable of (ranks, rows, buffers)
        The buffer that is drawn is a layer's largest, over the fewest ranks, with most rows.
    curves : iterable of (label, points)
        Points are (ranks, padding). Labels of peers are not of the form "... row" or "... rows".
    title : str

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> from dcp.layout import plan_groups
    >>> buffers = plan_groups([("layers.0.w", (96, 64))], ranks=4)
    >>> figure = draw_model([(4, 1, buffers)], [("1 row", [(4, 0.01)])])
    >>> len(figure.axes)
    2
    """
    from dcp.layout_groups import is_layer

    plt = pyplot()
    ranks, rows, buffers = min(plans, key=lambda plan: (plan[0], -plan[1]))
    buffer = max(buffers, key=lambda b: (is_layer(b.group), b.layout.used_elements))
    drawn = len(_drawn_ranks(ranks))
    height = max(4.6, 1.4 + 0.13 * drawn)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, height), layout="constrained", width_ratios=(1.35, 1)
    )
    blocks = "1 row" if rows == 1 else f"{rows} rows"
    text = f"{buffer.name}, {ranks:,} ranks, blocks of {blocks}: padding {_share(buffer.layout)}"
    draw_layout(buffer.layout, ax=left, title=text)
    draw_curves(curves, ax=right)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def draw_curves(
    curves: Iterable[tuple[str, Sequence[tuple[int, float]]]], *, ax: Any = None
) -> Any:
    """Draw padding over ranks.

    Parameters
    ----------
    curves : iterable of (label, points)
        As `draw_model` takes them. What pads less than 0.01% is drawn there.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure otherwise.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    dcp.UnsupportedError
        matplotlib is not installed.

    Examples
    --------
    >>> ax = draw_curves([("1 row", [(8, 0.001), (64, 0.01)]), ("FSDP2", [(8, 0.0), (64, 0.5)])])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['dcp, 1 row', 'FSDP2']
    """
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if ax is None:
        ax = plt.subplots(figsize=(9, 4.4), layout="constrained")[1]
    curves, least = list(curves), 1e-4
    ours = [label for label, _ in curves if label.split()[-1] in ("row", "rows")]
    peers = {"FSDP2": ("#c0392b", "--"), "Megatron, at least": ("#7d6608", ":")}
    for label, points in curves:
        x = [ranks for ranks, _ in points]
        y = [max(padding, least) for _, padding in points]
        if label in ours:
            place = ours.index(label) / max(1, len(ours) - 1) * (len(_ROW_COLOURS) - 2)
            style: dict[str, Any] = {"color": _ROW_COLOURS[round(place)], "lw": 1.8, "zorder": 3}
            if len(points) < 30:
                style |= {"marker": "o", "ms": 3.5}
            text = f"dcp, {label}"
        else:
            colour, line = peers.get(label, ("0.4", "-."))
            style, text = {"color": colour, "ls": line, "lw": 1.4, "zorder": 2}, label
        ax.plot(x, y, label=text, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(10))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _percent(y, least)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(0.7 * least, 8 * max(ax.get_ylim()[1], 1.0))
    ax.set_xlabel("ranks")
    ax.set_ylabel("padding")
    ax.set_title("padding of the whole model", loc="left", fontsize=10)
    ax.grid(color="0.92", zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")
    return ax


def _percent(share: float, least: float) -> str:
    text = f"{100 * share:,.4g}%"
    return f"under {text}" if math.isclose(share, least) else text
