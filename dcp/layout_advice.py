"""What helps where a buffer pads much: each way is planned before it is named.

Three ways leave the blocks as they are asked for. Hybrid sharding: fewer ranks share a buffer, and
several such groups of ranks hold replicas of it; gradients are then summed inside, and across.
Layers together: a buffer of several layers has larger shares, and as much more memory is gathered
at once. Tiles stored one after the other: a block of r rows shrinks to r x r elements; kernels must
know that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp import _dcp

if TYPE_CHECKING:
    from dcp.layout import Layout

__all__ = ["Advice", "text_of", "ways_out"]

ENOUGH = 0.05  # padding above it is worth advice; a way out ends below it if any does
_MOST_LAYERS = 16
_MOST_DIVISORS = 16
_MOST_REPLICAS = 4096


@dataclass(frozen=True)
class Advice:
    """One way to less padding.

    Attributes
    ----------
    kind : str
        "hybrid": `value` ranks share a buffer; "layers": `value` layers share one; "tiles": tiles
        of `value` x `value` elements are stored one after the other.
    value : int
    padding : float
        That it leads to.
    text : str
        The same in words.

    Examples
    --------
    >>> import dcp
    >>> dcp.plan_layout([("w", (384, 64))], ranks=32, block_rows=32).ways_out()[0].text
    'shard over 4 ranks in 8 replicas'
    """

    kind: Literal["hybrid", "layers", "tiles"]
    value: int
    padding: float
    text: str


def ways_out(layout: Layout) -> list[Advice]:
    """What would bring the padding of a layout down, least padding first; none where nothing does.

    Examples
    --------
    >>> import dcp
    >>> ways_out(dcp.plan_layout([("w", (384, 64))], ranks=2))
    []
    """
    if layout.padding <= 0:
        return []
    found = [_hybrid(layout), _layers(layout), _tiles(layout)]
    better = [way for way in found if way is not None and way.padding < 0.9 * layout.padding]
    return sorted(better, key=lambda way: way.padding)


def text_of(layout: Layout) -> str | None:
    """`Layout.advice`.

    Examples
    --------
    >>> import dcp
    >>> text_of(dcp.plan_layout([("w", (384, 64))], ranks=2))
    """
    if layout.padding <= ENOUGH:
        return None
    name, block = max(layout.block_elements.items(), key=lambda item: item[1])
    even = layout.used_elements / layout.ranks
    if block > even:
        text = f"a block of {name!r} has {block:,} elements, an even share only {even:,.0f}. "
    else:
        text = "the blocks do not divide well over so many ranks. "
    ways = ways_out(layout)
    if not ways:
        return text + "No way out but smaller blocks or fewer ranks"
    return text + "Ways out: " + "; ".join(f"{way.text} ({way.padding:.1%})" for way in ways)


def _padding(sizes: list[int], blocks: list[int], ranks: int, unit: int) -> float:
    try:
        _, shard = _dcp.layout_plan(sizes, blocks, ranks, unit, 0)
    except _dcp.ArgumentError:  # a larger buffer than can be counted
        return math.inf
    return float(ranks * shard / sum(sizes) - 1)


def _sizes(layout: Layout) -> tuple[list[int], list[int]]:
    """Elements and blocks of the tensors in the order of the buffer."""
    names = sorted(layout.shapes, key=lambda name: layout.offsets[name])
    sizes = [math.prod(layout.shapes[name]) for name in names]
    return sizes, [layout.block_elements[name] for name in names]


def _hybrid(layout: Layout) -> Advice | None:
    sizes, blocks = _sizes(layout)
    most = min(layout.ranks, _MOST_REPLICAS)
    divisors = [layout.ranks // k for k in range(2, most + 1) if layout.ranks % k == 0]
    best: Advice | None = None
    for ranks in divisors[:_MOST_DIVISORS]:
        if ranks == 1:  # replicas of everything are no sharding
            break
        padding = _padding(sizes, blocks, ranks, layout.unit)
        if best is None or padding < best.padding:
            replicas = layout.ranks // ranks
            text = f"shard over {ranks:,} ranks in {replicas:,} replicas"
            best = Advice("hybrid", ranks, padding, text)
        if padding <= ENOUGH:
            break
    return best


def _layers(layout: Layout) -> Advice | None:
    sizes, blocks = _sizes(layout)
    best: Advice | None = None
    layers = 2
    while layers <= _MOST_LAYERS:
        padding = _padding(sizes * layers, blocks * layers, layout.ranks, layout.unit)
        if best is None or padding < best.padding:
            best = Advice("layers", layers, padding, f"put {layers} such groups together")
        if padding <= ENOUGH:
            break
        layers *= 2
    return best


def _tiles(layout: Layout) -> Advice | None:
    sizes, _ = _sizes(layout)
    blocks, largest = [], 0
    for name in sorted(layout.shapes, key=lambda name: layout.offsets[name]):
        shape, block = layout.shapes[name], layout.block_elements[name]
        if len(shape) > 1 and name not in layout.tiles and 0 < block < math.prod(shape):
            rows = block // shape[-1]
            fits = rows > 0 and shape[-2] % rows == 0 and shape[-1] % rows == 0
            if fits and 1 < rows < shape[-1]:
                block, largest = rows * rows, max(largest, rows)
        blocks.append(block)
    if largest == 0:
        return None
    padding = _padding(sizes, blocks, layout.ranks, layout.unit)
    text = f"store tiles of {largest} x {largest} one after the other"
    return Advice("tiles", largest, padding, text)
