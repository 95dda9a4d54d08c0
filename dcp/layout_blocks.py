"""Which elements of a tensor must stay on one rank: rows, tiles, or the whole tensor.

A rule is an integer (so many rows), ``"whole"``, or a `Tile`; one rule for all tensors, or a
mapping of name patterns to rules. A row is the last dimension, leading ones flattened. A tensor of
one dimension or none may be cut anywhere, unless its rule is ``"whole"``. The last block of a
tensor may be short; where a rule would leave short blocks in between, it is an error.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcp._dcp import ArgumentError, DTypeError

__all__ = ["BlockRule", "Tile", "block_of", "blocks_of", "tiles_of", "whole_number"]


@dataclass(frozen=True)
class Tile:
    """A two-dimensional block of a matrix, as block-wise quantisation and Shampoo need it.

    Parameters
    ----------
    rows, columns : int
        Of the tile; a matrix that is smaller has tiles of its own size.
    order : {"row", "block"}
        How the matrix lies in memory. "row": row by row as usual. Shards are contiguous, so whole
        rows stay together, ``rows`` of them; the bottom tiles may be short. "block": tile by tile,
        tiles row by row, each row by row inside. Then a tile is a block of ``rows * columns``
        elements, however wide the matrix is; tiles must divide it, as short ones would lie in
        between.

    Raises
    ------
    dcp.ArgumentError
        A size below 1, or another order.

    Notes
    -----
    Each matrix of a tensor of more dimensions has tiles of its own: its last but one dimension must
    be a multiple of ``rows``.

    Examples
    --------
    >>> import dcp
    >>> from dcp.layout import Tile
    >>> for order in ("row", "block"):
    ...     tile = Tile(128, 128, order=order)
    ...     dcp.plan_layout([("w", (7168, 2048))], ranks=3, block_rows=tile).block_elements["w"]
    262144
    16384
    """

    rows: int
    columns: int
    order: Literal["row", "block"] = "row"

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            size = whole_number(f"{name} of a tile:", getattr(self, name), 1)
            object.__setattr__(self, name, size)
        if self.order not in ("row", "block"):
            raise ArgumentError(f"order {self.order!r} of a tile must be row or block")

    def __str__(self) -> str:
        return f"Tile({self.rows}, {self.columns}, order={self.order!r})"

    def block_elements(self, name: str, shape: tuple[int, ...]) -> int:
        """Elements of a block of a tensor; 1 where it has fewer than two dimensions.

        Raises
        ------
        dcp.ArgumentError
            The tiles do not divide the tensor and cannot be short.

        Examples
        --------
        >>> Tile(16, 16, order="block").block_elements("w", (64, 48))
        256
        """
        if len(shape) < 2 or math.prod(shape) == 0:
            return 1
        height, width = shape[-2:]
        rows, columns = min(self.rows, height), min(self.columns, width)
        several = math.prod(shape[:-2]) > 1
        if height % rows and (several or (self.order == "block" and columns < width)):
            raise ArgumentError(
                f"tensor {name!r} of shape {shape}: {self} leaves {height % rows} of {height} "
                "rows, and a short tile can only be the last of the tensor: take rows that divide"
            )
        if self.order == "row":
            return rows * width
        if width % columns:
            raise ArgumentError(
                f"tensor {name!r} of shape {shape}: {self} leaves {width % columns} of {width} "
                "columns, and a short tile can only be the last of the tensor: take columns that "
                "divide"
            )
        return rows * columns

    def pack(self, array: NDArray[Any]) -> NDArray[Any]:
        """The elements of a tensor one after the other as they are stored: 1-D.

        Examples
        --------
        >>> import numpy as np
        >>> Tile(2, 2, order="block").pack(np.arange(8).reshape(2, 4)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
        """
        array = np.asarray(array)
        if not self._in_tiles(array.shape):
            return array.reshape(-1)
        rows, columns = min(self.rows, array.shape[-2]), min(self.columns, array.shape[-1])
        tiles = array.reshape(
            -1, array.shape[-2] // rows, rows, array.shape[-1] // columns, columns
        )
        return np.ascontiguousarray(tiles.transpose(0, 1, 3, 2, 4)).reshape(-1)

    def unpack(self, flat: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor whose `pack` is `flat`.

        Examples
        --------
        >>> import numpy as np
        >>> tile, array = Tile(2, 2, order="block"), np.arange(8).reshape(2, 4)
        >>> bool((tile.unpack(tile.pack(array), (2, 4)) == array).all())
        True
        """
        flat = np.asarray(flat).reshape(-1)
        if not self._in_tiles(shape):
            return flat.reshape(shape)
        rows, columns = min(self.rows, shape[-2]), min(self.columns, shape[-1])
        tiles = flat.reshape(-1, shape[-2] // rows, shape[-1] // columns, rows, columns)
        return np.ascontiguousarray(tiles.transpose(0, 1, 3, 2, 4)).reshape(shape)

    def _in_tiles(self, shape: tuple[int, ...]) -> bool:
        """Whether its elements are stored in another order than the tensor's own."""
        if self.order == "row" or len(shape) < 2 or math.prod(shape) == 0:
            return False
        self.block_elements("of pack", tuple(shape))
        return min(self.columns, shape[-1]) < shape[-1]


BlockRule = int | Literal["whole"] | Tile


def whole_number(name: str, value: object, least: int) -> int:
    """An integer of Python or NumPy that is not below `least`; `name` begins the error message."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DTypeError(f"{name} {value!r} must be an integer")
    number = int(value.__index__())
    if number < least:
        raise ArgumentError(f"{name} {number} must be at least {least}")
    return number


def block_of(name: str, shape: tuple[int, ...], rule: object) -> int:
    """Elements of a block under one rule, at least 1.

    Raises
    ------
    dcp.ArgumentError, dcp.DTypeError
        No rule, or one that this tensor cannot follow.

    Examples
    --------
    >>> block_of("w", (96, 64), 16), block_of("b", (64,), 16), block_of("w", (96, 64), "whole")
    (1024, 1, 6144)
    """
    if isinstance(rule, Tile):
        return rule.block_elements(name, shape)
    if isinstance(rule, str):
        if rule != "whole":
            raise ArgumentError(
                f"block_rows {rule!r} of tensor {name!r} must be an integer, 'whole' or a Tile"
            )
        return max(1, math.prod(shape))
    rows = whole_number("block_rows", rule, 1)
    if len(shape) < 2:
        return 1
    return max(1, min(rows, math.prod(shape[:-1])) * shape[-1])


def blocks_of(shapes: Mapping[str, tuple[int, ...]], block_rows: object) -> dict[str, int]:
    """Elements of a block of every tensor; of a mapping, the first pattern that matches counts.

    A tensor that no pattern matches has blocks of one row.

    Raises
    ------
    dcp.ArgumentError, dcp.DTypeError
        As `block_of`; or a pattern that matches no tensor.

    Examples
    --------
    >>> rules = {"*norm*": "whole", "*.w": 2}
    >>> blocks_of({"a.w": (4, 8), "norm": (8,), "c": (4, 8)}, rules)
    {'a.w': 16, 'norm': 8, 'c': 8}
    """
    blocks = {name: block_of(name, shapes[name], rule) for name, rule in _rules(shapes, block_rows)}
    for pattern in block_rows if isinstance(block_rows, Mapping) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            raise ArgumentError(f"block_rows: pattern {pattern!r} matches no tensor")
    return blocks


def tiles_of(shapes: Mapping[str, tuple[int, ...]], block_rows: object) -> dict[str, Tile]:
    """The tensors that are stored tile by tile.

    Examples
    --------
    >>> tiles_of({"w": (4, 8), "b": (8,)}, Tile(2, 2, order="block"))
    {'w': Tile(rows=2, columns=2, order='block')}
    """
    return {
        name: rule
        for name, rule in _rules(shapes, block_rows)
        if isinstance(rule, Tile) and rule.order == "block" and len(shapes[name]) > 1
    }


def _rules(
    shapes: Mapping[str, tuple[int, ...]], block_rows: object
) -> Iterator[tuple[str, object]]:
    for name in shapes:
        if isinstance(block_rows, Mapping):
            matching = (p for p in block_rows if fnmatch.fnmatchcase(name, p))
            pattern = next(matching, None)
            yield name, 1 if pattern is None else block_rows[pattern]
        else:
            yield name, block_rows
