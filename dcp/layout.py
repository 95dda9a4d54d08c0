"""Where tensors lie in a buffer that is cut evenly over ranks (DESIGN 6).

A layout lays the tensors of a group one after the other into a buffer of ``ranks`` x
``shard_elements`` elements. Rank ``r`` holds ``[r * shard_elements, (r + 1) * shard_elements)``.
Borders between ranks never cut a block: what of a tensor must stay together (`dcp.layout_blocks`
has the rules). What is left over lies between the tensors; a tensor itself is never padded.

`plan_layout` lays out one buffer. `plan_groups` lays out a model: its tensors in groups, a layer
each or so many bytes, and a group in several buffers where its rows do not go together.
"""

from __future__ import annotations

import bisect
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp import _dcp
from dcp.layout_blocks import BlockRule, Tile, blocks_of, tiles_of, whole_number

if TYPE_CHECKING:
    from dcp.layout_advice import Advice
    from dcp.layout_groups import Buffer, TensorGroup, group_tensors, plan_groups

__all__ = [
    "Buffer",
    "Layout",
    "TensorGroup",
    "Tile",
    "group_tensors",
    "plan_groups",
    "plan_layout",
]

_COUNTED = 2**62  # elements, ranks: the core counts in 64 bits, with room for a sum
ORDERS = ("model", "shape", "size", "search")
_OF_GROUPS = ("Buffer", "TensorGroup", "group_tensors", "plan_groups")


def __getattr__(name: str) -> Any:
    if name in _OF_GROUPS:  # they are made of what is here
        return getattr(importlib.import_module("dcp.layout_groups"), name)
    raise AttributeError(f"module 'dcp.layout' has no attribute {name!r}")


@dataclass(frozen=True, repr=False)
class Layout:
    """The layout of one group of tensors; made by :func:`plan_layout`.

    Attributes
    ----------
    ranks : int
        Ranks that share the buffer.
    shard_elements : int
        Elements of one rank's shard, padding included.
    offsets : dict of str to int
        First element of every tensor in the buffer.
    shapes : dict of str to tuple
        Shape of every tensor, in the order in which they were given.
    block_elements : dict of str to int
        Elements of every tensor that stay on one rank (the last block of a tensor may be short).
    unit : int
        Every offset and ``shard_elements`` are multiples of it, in elements.
    order : str
        How the order in the buffer was chosen.
    tiles : dict of str to Tile
        Tensors that are stored tile by tile: `Tile.pack` puts their elements in that order.
    """

    ranks: int
    shard_elements: int
    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    block_elements: dict[str, int]
    unit: int
    order: str = "model"
    tiles: dict[str, Tile] = field(default_factory=dict)
    _by_start: tuple[str, ...] = field(default=(), compare=False)

    @property
    def used_elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def padding(self) -> float:
        """``ranks * shard_elements / used_elements - 1``, 0 where nothing is used."""
        used = self.used_elements
        return self.ranks * self.shard_elements / used - 1 if used else 0.0

    @property
    def largest_gap(self) -> int:
        """Most elements of padding in one place: between two tensors, or at the end."""
        gap = end = 0
        for name in self._by_start:
            gap = max(gap, self.offsets[name] - end)
            end = max(end, self.offsets[name] + math.prod(self.shapes[name]))
        return max(gap, self.ranks * self.shard_elements - end)

    @property
    def advice(self) -> str | None:
        """What makes the padding large where it passes 5%, and what would help; else None.

        Every way is planned before it is named: see `ways_out`.

        Examples
        --------
        >>> import dcp
        >>> layout = dcp.plan_layout([("w", (384, 64))], ranks=32, block_rows=32)
        >>> layout.advice[:57]
        "a block of 'w' has 2,048 elements, an even share only 768"
        """
        from dcp.layout_advice import text_of

        return text_of(self)

    def ways_out(self) -> list[Advice]:
        """What would bring the padding down, each with the padding that it leads to; best first.

        Examples
        --------
        >>> import dcp
        >>> layout = dcp.plan_layout([("w", (384, 64))], ranks=32, block_rows=32)
        >>> layout.padding, [(way.kind, way.padding) for way in layout.ways_out()][0]
        (1.6666666666666665, ('hybrid', 0.0))
        """
        from dcp.layout_advice import ways_out

        return ways_out(self)

    def runs(self, rank: int) -> list[tuple[str, int, int]]:
        """Pieces of the tensors on one rank, in buffer order.

        Returns
        -------
        list of (name, first, count)
            ``count`` elements of tensor ``name``, from its flat element ``first``; the piece lies
            at ``offsets[name] + first`` of the buffer.

        Raises
        ------
        dcp.ArgumentError
            If there is no such rank.

        Examples
        --------
        >>> import dcp
        >>> layout = dcp.plan_layout([("w", (4, 8)), ("b", (8,))], ranks=2)
        >>> layout.runs(1)
        [('w', 24, 8), ('b', 0, 8)]
        """
        if not 0 <= rank < self.ranks:
            raise _dcp.ArgumentError(f"rank {rank} must lie in 0..{self.ranks - 1}")
        low, high = rank * self.shard_elements, (rank + 1) * self.shard_elements
        names, pieces = self._by_start, []
        at = bisect.bisect_right(names, low, key=lambda name: self.offsets[name]) - 1
        while at > 0 and math.prod(self.shapes[names[at]]) == 0:
            at -= 1  # behind an empty tensor one may reach into this shard
        for name in names[max(at, 0) :]:
            start = self.offsets[name]
            if start >= high:
                break
            first = max(low, start)
            last = min(high, start + math.prod(self.shapes[name]))
            if first < last:
                pieces.append((name, first - start, last - first))
        return pieces

    def plot(self, ax: Any = None) -> Any:
        """Draws the buffer, one line a rank, and returns the matplotlib axes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; a new figure otherwise.

        Raises
        ------
        dcp.UnsupportedError
            If matplotlib is not installed.
        """
        from dcp.layout_plot import draw_layout

        return draw_layout(self, ax=ax)

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.shapes)} tensors, ranks={self.ranks}, "
            f"shard_elements={self.shard_elements}, padding={self.padding:.2%})"
        )


def plan_layout(
    tensors: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
    *,
    ranks: int,
    block_rows: BlockRule | Mapping[str, BlockRule] = 1,
    order: str = "model",
    item_bytes: int = 4,
    align_bytes: int = 16,
) -> Layout:
    """Finds the least shard size for which no border between ranks cuts a block.

    Parameters
    ----------
    tensors : mapping or iterable of (name, shape)
        The tensors of one group. A row is the last dimension, leading ones are flattened. A tensor
        with no elements takes no place.
    ranks : int
        Ranks that share the buffer.
    block_rows : int, "whole", Tile or mapping of str to these, optional
        What stays together. So many rows: a tensor with fewer is one block, and one of a single
        dimension may be cut anywhere. "whole": the tensor, on one rank. A `Tile`: a part of a
        matrix. A mapping of name patterns: the first that matches counts, one row where none does.
    order : {"model", "shape", "size", "search"}, optional
        Order in the buffer: as given; by block, then size; by size; the best that is found (of all
        orders where few tensors differ).
    item_bytes : int, optional
        Bytes of the smallest item that shares the layout: 1 where 8-bit optimizer state lies in
        buffers of the same layout as fp32 weights.
    align_bytes : int, optional
        Every tensor and every shard start at a multiple of it; a multiple of ``item_bytes``.

    Returns
    -------
    Layout

    Raises
    ------
    dcp.ArgumentError
        If a name comes twice, a size is out of range, tiles do not divide a tensor, a pattern
        matches none, or the result cannot be counted in 64 bits.
    dcp.DTypeError
        If a number is not an integer.

    Notes
    -----
    The problem is that of RaggedShard in veScale-FSDP (arXiv 2602.22437). A block that is larger
    than an even share of the buffer sets the shard's size; ``Layout.advice`` says so.

    Examples
    --------
    >>> import dcp
    >>> layout = dcp.plan_layout([("w", (96, 64)), ("b", (64,))], ranks=5, block_rows=16)
    >>> layout
    Layout(2 tensors, ranks=5, shard_elements=2048, padding=64.95%)
    >>> layout.offsets["b"], layout.block_elements["w"]
    (6144, 1024)
    """
    shapes = shapes_of(tensors)
    blocks = blocks_of(shapes, block_rows)
    return layout_of(
        shapes,
        blocks,
        tiles_of(shapes, block_rows),
        ranks=whole_number("ranks", ranks, 1),
        order=order,
        unit=unit_of(item_bytes, align_bytes),
    )


def shapes_of(
    tensors: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
) -> dict[str, tuple[int, ...]]:
    """Shape by name, checked."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        if name in shapes:
            raise _dcp.ArgumentError(f"tensor {name!r} is given twice")
        shapes[name] = checked_shape(name, shape)
    return shapes


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape as a tuple of integers, none below 0."""
    if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
        raise _dcp.DTypeError(f"shape {shape!r} of {name!r} must be a sequence of integers")
    sizes = tuple(shape)
    if all(type(n) is int and n >= 0 for n in sizes):
        return sizes
    return tuple(whole_number(f"shape of {name!r}: size", n, 0) for n in sizes)


def unit_of(item_bytes: int, align_bytes: int) -> int:
    """Elements of which every start is a multiple."""
    item_bytes = whole_number("item_bytes", item_bytes, 1)
    align_bytes = whole_number("align_bytes", align_bytes, 1)
    if align_bytes % item_bytes:
        raise _dcp.ArgumentError(
            f"align_bytes {align_bytes} must be a multiple of item_bytes {item_bytes}"
        )
    return align_bytes // item_bytes


def layout_of(
    shapes: dict[str, tuple[int, ...]],
    blocks: dict[str, int],
    tiles: dict[str, Tile],
    *,
    ranks: int,
    order: str,
    unit: int,
) -> Layout:
    """The layout of tensors whose blocks are known."""
    if order not in ORDERS:
        raise _dcp.ArgumentError(f"order {order!r} must be one of {', '.join(ORDERS)}")
    sizes = [math.prod(shape) for shape in shapes.values()]
    if max([*sizes, *blocks.values()], default=0) >= _COUNTED:
        name = next(n for n, s in zip(shapes, sizes, strict=True) if max(s, blocks[n]) >= _COUNTED)
        raise _dcp.ArgumentError(
            f"tensor {name!r} of shape {shapes[name]} has more elements than can be counted in "
            "64 bits"
        )
    if ranks >= _COUNTED:
        raise _dcp.ArgumentError(f"ranks {ranks} cannot be counted in 64 bits")
    starts, shard = _dcp.layout_plan(sizes, list(blocks.values()), ranks, unit, ORDERS.index(order))
    offsets = dict(zip(shapes, starts.tolist(), strict=True))
    return Layout(
        ranks=ranks,
        shard_elements=shard,
        offsets=offsets,
        shapes=shapes,
        block_elements=blocks,
        unit=unit,
        order=order,
        tiles=tiles,
        _by_start=tuple(sorted(shapes, key=lambda name: (offsets[name], math.prod(shapes[name])))),
    )
