"""Where tensors lie in a buffer that is cut evenly over ranks (DESIGN 6).

A layout lays the tensors of a group one after the other into a buffer of ``ranks`` x
``shard_elements`` elements. Rank ``r`` holds ``[r * shard_elements, (r + 1) * shard_elements)``.
Borders between ranks never cut a block: ``block_rows`` rows of a tensor that must stay together.
What is left over lies between the tensors; a tensor itself is never padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp import _dcp

__all__ = ["Layout", "plan_layout"]

_ORDERS = ("model", "shape", "size", "search")


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
    """

    ranks: int
    shard_elements: int
    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    block_elements: dict[str, int]
    unit: int
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
    def advice(self) -> str | None:
        """What makes the padding large where it passes 5%, and what would help; else None."""
        if self.padding <= 0.05:
            return None
        name, block = max(self.block_elements.items(), key=lambda item: item[1])
        even = self.used_elements / self.ranks
        if block > even:
            return (
                f"a block of {name} has {block:,} elements, an even share only {even:,.0f}: "
                "use fewer ranks or fewer block rows"
            )
        return "the blocks do not divide well over so many ranks: use fewer ranks or block rows"

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
        pieces = []
        for name in self._by_start:
            start = self.offsets[name]
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
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise _dcp.UnsupportedError(
                "a plot needs matplotlib: pip install 'dcp[viz]'"
            ) from error
        if ax is None:
            ax = pyplot.subplots(figsize=(8, 0.4 * min(self.ranks, 40) + 1))[1]
        colors = {name: f"C{i % 10}" for i, name in enumerate(self.shapes)}
        for rank in range(self.ranks):
            ax.barh(rank, self.shard_elements, color="0.9", edgecolor="0.7")
            for name, first, count in self.runs(rank):
                left = self.offsets[name] + first - rank * self.shard_elements
                ax.barh(rank, count, left=left, color=colors[name], edgecolor="white")
        ax.invert_yaxis()
        ax.set_xlabel("element of the shard")
        ax.set_ylabel("rank")
        ax.set_title(f"{len(self.shapes)} tensors, padding {self.padding:.2%}")
        return ax

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.shapes)} tensors, ranks={self.ranks}, "
            f"shard_elements={self.shard_elements}, padding={self.padding:.2%})"
        )


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _dcp.DTypeError(f"{name} {value!r} must be an integer")
    number = int(value.__index__())
    if number < least:
        raise _dcp.ArgumentError(f"{name} {number} must be at least {least}")
    return number


def _block(shape: tuple[int, ...], block_rows: int) -> int:
    if len(shape) < 2:
        return 1
    return max(1, min(block_rows, math.prod(shape[:-1])) * shape[-1])


def plan_layout(
    tensors: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
    *,
    ranks: int,
    block_rows: int = 1,
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
    block_rows : int, optional
        Rows that stay together; a tensor with fewer rows is one block, and one of a single
        dimension may be cut anywhere.
    order : {"model", "shape", "size", "search"}, optional
        Order in the buffer: as given; by block, then size; by size; the best that is found (of all
        orders where few tensors differ).
    item_bytes : int, optional
        Bytes of the smallest item that shares the layout.
    align_bytes : int, optional
        Every tensor and every shard start at a multiple of it; a multiple of ``item_bytes``.

    Returns
    -------
    Layout

    Raises
    ------
    dcp.ArgumentError
        If a name comes twice, a size is out of range or the result cannot be counted in 64 bits.
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
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        if name in shapes:
            raise _dcp.ArgumentError(f"tensor {name!r} is given twice")
        shapes[name] = tuple(_whole(f"shape of {name!r}: size", n, 0) for n in shape)
    ranks = _whole("ranks", ranks, 1)
    block_rows = _whole("block_rows", block_rows, 1)
    item_bytes = _whole("item_bytes", item_bytes, 1)
    align_bytes = _whole("align_bytes", align_bytes, 1)
    if align_bytes % item_bytes:
        raise _dcp.ArgumentError(
            f"align_bytes {align_bytes} must be a multiple of item_bytes {item_bytes}"
        )
    if order not in _ORDERS:
        raise _dcp.ArgumentError(f"order {order!r} must be one of {', '.join(_ORDERS)}")
    blocks = {name: _block(shape, block_rows) for name, shape in shapes.items()}
    sizes = [math.prod(shape) for shape in shapes.values()]
    largest = max([*sizes, ranks, *blocks.values()])
    if largest >= 2**62:
        raise _dcp.ArgumentError(f"{largest} elements or ranks cannot be counted in 64 bits")
    starts, shard = _dcp.layout_plan(
        sizes, list(blocks.values()), ranks, align_bytes // item_bytes, _ORDERS.index(order)
    )
    offsets = dict(zip(shapes, starts.tolist(), strict=True))
    return Layout(
        ranks=ranks,
        shard_elements=shard,
        offsets=offsets,
        shapes=shapes,
        block_elements=blocks,
        unit=align_bytes // item_bytes,
        _by_start=tuple(sorted(shapes, key=lambda name: offsets[name])),
    )
