"""Tensors that share a layout, and the buffers behind them: what `ShardedTensors` is made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp
from dcp.layout import ORDERS
from dcp.layout_groups import SPLIT_ABOVE, split_group
from dcp.tensor_list import Tensor

if TYPE_CHECKING:
    from dcp.sharded_tensors import ShardedTensors

__all__ = ["DEMAND", "SHARD", "SHARED", "Part", "rows_of"]

SHARED, PRIVATE, LOCAL, SHARD, DEMAND = range(5)  # dcp_dbuffer_kind_t
BF16 = 1  # dcp_dtype_t
SPLIT_LEAST = 1 << 16  # elements of padding that a further collective must be worth


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and their width; tensors of one dimension have rows of one element."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def _buffers_of(tensors: list[Tensor], ranks: int, order: str) -> dict[str, int]:
    """Number of the buffer of each tensor, by first use.

    A group is one buffer, but where rows of different lengths would pad it much: then it has one a
    length, so a collective more saves memory and traffic of at least `SPLIT_LEAST` elements.
    """
    found: dict[str, tuple[int, int]] = {}
    known: dict[tuple[Any, ...], list[list[int]]] = {}
    for group in dict.fromkeys(tensor.group for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.group == group]
        shapes = {tensor.name: tensor.shape for tensor in members}
        blocks = {tensor.name: tensor.block or rows_of(tensor.shape)[1] for tensor in members}
        key = tuple((shapes[name], blocks[name]) for name in shapes)
        if key not in known:  # equal groups are planned once
            names = list(shapes)
            parts = [names]
            if SPLIT_ABOVE * sum(math.prod(shape) for shape in shapes.values()) >= SPLIT_LEAST:
                parts = split_group(shapes, blocks, ranks=ranks, order=order)
            known[key] = [[names.index(name) for name in part] for part in parts]
        for i, part in enumerate(known[key]):
            found |= {members[m].name: (group, i) for m in part}
    numbers = {key: n for n, key in enumerate(dict.fromkeys(found[t.name] for t in tensors))}
    return {name: numbers[key] for name, key in found.items()}


class Part:
    """Tensors that share a layout: the trained ones, or the frozen ones."""

    def __init__(self, owner: ShardedTensors, tensors: list[Tensor], trained: bool) -> None:
        self.tensors = tensors
        self.index = {tensor.name: i for i, tensor in enumerate(tensors)}
        self.buffer_of = _buffers_of(tensors, owner._shards.size, owner.order)
        self.groups: dict[int, list[int]] = {}  # number of a group -> of its buffers
        for tensor in tensors:
            buffers = self.groups.setdefault(tensor.group, [])
            if self.buffer_of[tensor.name] not in buffers:
                buffers.append(self.buffer_of[tensor.name])
        rows = [
            (*rows_of(tensor.shape), self.buffer_of[tensor.name], tensor.block)
            for tensor in tensors
        ]
        self.layout = _dcp.DBufferLayout(
            np.array(rows, np.int64).reshape(-1, 4),
            owner._shards.size,
            1,
            ORDERS.index(owner.order),
        )
        self.runs = {
            tensors[i].name: (first, count)
            for i, first, count in self.layout.runs(owner._shards.rank)
        }
        self.gradients: Any = None
        self.sums: Any = None
        self.copies: Any = None
        self.weights = self._make(owner, *owner._weight_kind())
        if owner.compute_dtype == "bfloat16":
            kind = SHARED if owner.windows else DEMAND
            self.copies = self._make(owner, kind, dtype=BF16)
        if trained:
            kind = PRIVATE if owner.windows else LOCAL
            by_layer = owner.reduce_mode == "layer"
            replicas = owner._replicas if owner.replicas > 1 else None
            self.gradients = self._make(owner, DEMAND if by_layer else kind, replicas=replicas)
            self.sums = self._make(owner, SHARD) if by_layer else self.gradients

    def _make(
        self, owner: ShardedTensors, kind: int, keep_own: bool = False, **options: Any
    ) -> Any:
        return _dcp.DBuffer(owner._shards, self.layout, kind, keep_own=keep_own, **options)

    @property
    def whole(self) -> Any:
        """The buffer whose whole tensors are computed with."""
        return self.copies if self.copies is not None else self.weights

    @property
    def source(self) -> Any:
        """Where a gather's slices come from; None: they are in place."""
        return self.weights if self.copies is not None else None

    def buffers(self) -> list[Any]:
        found = [self.weights, self.copies, self.gradients]
        if self.sums is not self.gradients:
            found.append(self.sums)
        return [buffer for buffer in found if buffer is not None]

    def view(self, buffer: Any, name: str, writable: bool) -> NDArray[Any]:
        tensor = self.tensors[self.index[name]]
        flat: NDArray[Any] = buffer.tensor(self.index[name], math.prod(tensor.shape), writable)
        return flat.reshape(tensor.shape)
