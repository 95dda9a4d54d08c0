"""What `dcp.fully_shard` is given when it is given tensors: values, ties, groups, blocks."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp
from dcp.layout_blocks import Tile, block_of
from dcp.optim_base import EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST

__all__ = ["Init", "Tensor", "group_tensors", "match", "read_tensors", "resolve_ties"]

FloatArray = NDArray[np.float32]
Init = Callable[[str, int, int], Any]


@dataclass
class Tensor:
    """A tensor to shard: its shape, and where its values come from.

    Attributes
    ----------
    name, shape
        As given.
    array : float32 array or None
        Its values, C-contiguous; None where only the shape was given.
    init : callable or None
        Its own function of values.
    block : int
        Elements that stay on one rank; 0 for a row.
    group : int
        Number of its group.
    """

    name: str
    shape: tuple[int, ...]
    array: FloatArray | None = None
    init: Init | None = None
    block: int = 0
    group: int = 0

    @staticmethod
    def array_of(value: Any, what: str) -> FloatArray:
        """A float32 array over the memory of `value`, without a copy."""
        if hasattr(value, "detach"):
            value = value.detach()  # a torch tensor that requires a gradient refuses DLPack
        if not isinstance(value, np.ndarray):
            try:
                value = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise _dcp.DTypeError(f"{what} cannot be read as an array: {error}") from error
        if value.dtype != np.float32:
            raise _dcp.DTypeError(f"{what} has dtype {value.dtype}, must be float32")
        found: FloatArray = value
        return found

    def values(self, first: int, count: int, init: Init | None) -> FloatArray | None:
        """Elements [first, first + count), or None for zeros."""
        if self.array is not None:
            return self.array.reshape(-1)[first : first + count]
        call = self.init or init
        if call is None:
            return None
        found = self.array_of(call(self.name, first, count), f"init of {self.name!r}")
        if found.size != count:
            raise _dcp.ArgumentError(
                f"init of {self.name!r} gave {found.size} elements, {count} were asked for"
            )
        return found.reshape(-1)

    def write(self, first: int, out: FloatArray, init: Init | None) -> None:
        """Fill `out`, the run that starts at element `first`."""
        values = self.values(first, out.size, init)
        out[:] = 0.0 if values is None else values

    def whole(self, init: Init | None) -> FloatArray:
        """All of it: the array that was given, or a new one."""
        if self.array is not None:
            return self.array
        out = np.zeros(math.prod(self.shape), np.float32)
        self.write(0, out, init)
        return out.reshape(self.shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) for size in value
    )


def _read(name: Any, value: Any, largest: int) -> Tensor:
    if not isinstance(name, str) or not name:
        raise _dcp.ArgumentError(
            f"tensors: a name must be a string that is not empty, got {name!r}"
        )
    init = None
    if isinstance(value, tuple) and len(value) == 2 and callable(value[1]):
        value, init = value
    if _is_shape(value):
        shape = tuple(int(size) for size in value)
        array = None
    else:
        array = Tensor.array_of(value, f"tensor {name!r}")
        shape = array.shape
        if not array.flags.c_contiguous:
            raise _dcp.ArgumentError(f"tensor {name!r} must be C-contiguous")
    if any(size < 0 for size in shape):
        raise _dcp.ArgumentError(f"tensor {name!r}: shape {shape} must not be negative")
    if math.prod(size for size in shape if size) > largest:
        raise _dcp.ArgumentError(
            f"tensor {name!r}: the bytes of shape {shape} cannot be counted in 64 bits"
        )
    return Tensor(name, shape, array, init)


def _block(tensor: Tensor, rows: Any) -> int:
    """Elements of a block of this many rows; 0: the default, one row."""
    if rows == "whole":
        return max(1, math.prod(tensor.shape))
    if isinstance(rows, Tile):
        if rows.order == "block":
            raise _dcp.UnsupportedError(
                f"block_rows of {tensor.name!r}: {rows!r} stores a tensor tile by tile, whose rows "
                'optimizers could not find; use order="row"'
            )
        return block_of(tensor.name, tensor.shape, rows)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise _dcp.ArgumentError(
            f'block_rows = {rows!r} of {tensor.name!r} must be an integer >= 1 or "whole"'
        )
    if rows == 1 or len(tensor.shape) < 2:
        # elements one by one could be cut anywhere, but 8-bit state has blocks of them
        single = len(tensor.shape) < 2 or tensor.shape[-1] == 1
        large = math.prod(tensor.shape) >= EIGHT_BIT_LEAST
        return EIGHT_BIT_BLOCK if single and large else 0
    height = math.prod(tensor.shape[:-1])
    return max(1, min(rows, height) * tensor.shape[-1])


def read_tensors(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    block_rows: int | str | Mapping[str, int | str],
    largest: int,
) -> list[Tensor]:
    """The tensors in their order, of at most `largest` elements each, with their blocks.

    Raises
    ------
    dcp.ArgumentError
        A name twice, a shape or block that breaks a rule, a pattern that names nothing.
    dcp.DTypeError
        Values that are not float32.
    """
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    found: list[Tensor] = []
    seen: set[str] = set()
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise _dcp.ArgumentError(f"tensors: {item!r} must be (name, value)")
        tensor = _read(item[0], item[1], largest)
        if tensor.name in seen:
            raise _dcp.ArgumentError(f"tensors: the name {tensor.name!r} stands twice")
        seen.add(tensor.name)
        found.append(tensor)
    if not found:
        raise _dcp.ArgumentError("tensors: there are none to shard")
    rules = block_rows if isinstance(block_rows, Mapping) else {"*": block_rows}
    for pattern in rules:
        match([tensor.name for tensor in found], [pattern], "block_rows")
    for tensor in found:
        hit = next((p for p in rules if fnmatch.fnmatchcase(tensor.name, p)), None)
        tensor.block = _block(tensor, rules[hit]) if hit is not None else 0
    return found


def match(names: Sequence[str], patterns: Sequence[str], what: str) -> set[str]:
    """Names that a pattern fits; a pattern that fits none is an error.

    Examples
    --------
    >>> sorted(match(["a.weight", "a.bias"], ["*.bias"], "frozen"))
    ['a.bias']
    """
    if isinstance(patterns, str):
        raise _dcp.ArgumentError(f"{what} = {patterns!r} must be a list of names or patterns")
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise _dcp.ArgumentError(f"{what}: {pattern!r} names no tensor")
        found.update(hits)
    return found


def resolve_ties(
    tensors: Sequence[Tensor], tied: Mapping[str, str], ignored: set[str]
) -> dict[str, str]:
    """Alias -> name of the tensor that holds the storage.

    Raises
    ------
    dcp.ArgumentError
        A name that is no tensor or ignored, a circle, shapes or values that differ.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    found = {}
    for alias, target in tied.items():
        for name in (alias, target):
            if name not in by_name:
                raise _dcp.ArgumentError(f"tied: {name!r} names no tensor")
            if name in ignored:
                raise _dcp.ArgumentError(f"tied: {name!r} is ignored, so it cannot be tied")
        seen = [alias]
        while target in tied:
            seen.append(target)
            target = tied[target]
            if target in seen:
                raise _dcp.ArgumentError(f"tied: {' -> '.join([*seen, target])} is a circle")
        if target == alias:
            raise _dcp.ArgumentError(f"tied: {alias!r} is tied to itself")
        one, other = by_name[alias], by_name[target]
        if one.shape != other.shape:
            raise _dcp.ArgumentError(
                f"tied: {alias!r} has shape {one.shape}, {target!r} {other.shape}: they must agree"
            )
        if one.array is not None and other.array is not None and one.array is not other.array:
            same = np.array_equal(one.array, other.array, equal_nan=True)
            if not same:
                raise _dcp.ArgumentError(f"tied: the values of {alias!r} and {target!r} differ")
        if other.array is None and one.array is not None:
            other.array = one.array
        found[alias] = target
    return found


def _layer_of(name: str) -> str | None:
    """The name up to its first number.

    Examples
    --------
    >>> _layer_of("model.layers.3.mlp.up.weight"), _layer_of("model.norm.weight")
    ('model.layers.3', None)
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1] if len(parts) > 1 else []):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _by_layer(tensors: Sequence[Tensor]) -> list[str]:
    keys: list[str] = []
    between: str | None = None  # first of the tensors since the last layer
    for tensor in tensors:
        layer = _layer_of(tensor.name)
        between = None if layer is not None else between or tensor.name
        keys.append(layer or between or tensor.name)
    return keys


def _by_bytes(tensors: Sequence[Tensor], limit: int) -> list[str]:
    keys: list[str] = []
    held = limit + 1
    for tensor in tensors:
        size = 4 * math.prod(tensor.shape)
        if held + size > limit:
            key, held = tensor.name, 0
        held += size
        keys.append(key)
    return keys


def _by_lists(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[str]], ties: Mapping[str, str]
) -> list[str]:
    names = [tensor.name for tensor in tensors]
    keys: dict[str, str] = {}
    for number, group in enumerate(groups):
        if isinstance(group, str):
            raise _dcp.ArgumentError(f"groups[{number}] = {group!r} must be a list of names")
        plain = [ties.get(name, name) for name in group]
        hits = match(names, plain, f"groups[{number}]")
        first = next(name for name in names if name in hits)
        for name in sorted(hits):
            if name in keys:
                raise _dcp.ArgumentError(f"groups: {name!r} stands in two groups")
            keys[name] = first
    missing = [name for name in names if name not in keys]
    if missing:
        raise _dcp.ArgumentError(f"groups: {missing[0]!r} is in none")
    return [keys[name] for name in names]


def group_tensors(
    tensors: Sequence[Tensor], groups: str | int | Sequence[Sequence[str]], ties: Mapping[str, str]
) -> list[str]:
    """Number the group of every tensor, in order of first use; the names of the groups.

    Examples
    --------
    >>> tensors = [Tensor(n, (2,)) for n in ("embed", "h.0.w", "h.0.b", "h.1.w", "norm", "head")]
    >>> group_tensors(tensors, "layer", {})
    ['embed', 'h.0', 'h.1', 'norm']
    """
    if groups == "layer":
        keys = _by_layer(tensors)
    elif isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise _dcp.ArgumentError(f"groups = {groups} bytes must be at least 1")
        keys = _by_bytes(tensors, groups)
    elif isinstance(groups, str) or not isinstance(groups, Sequence):
        raise _dcp.ArgumentError(
            f'groups = {groups!r} must be "layer", a number of bytes or lists of names'
        )
    else:
        keys = _by_lists(tensors, groups, ties)
    names = list(dict.fromkeys(keys))
    numbers = {name: i for i, name in enumerate(names)}
    for tensor, key in zip(tensors, keys, strict=True):
        tensor.group = numbers[key]
    return names
