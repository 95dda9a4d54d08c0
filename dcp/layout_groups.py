"""A whole model in buffers: tensors in groups, a group in one buffer or several.

A group is what is gathered and reduced together: a layer, or so many bytes. Tensors of different
dtype never share a buffer, since a buffer is summed, cast and updated as one array of one type;
what has the *elements* of a tensor in another type (its gradient, its optimizer state) has the same
layout.

Where a group pads much because its rows do not go together, one buffer a row length is tried: a
tensor with two borders inside forces the shard to be whole blocks of it, and rows of 7,168, 1,536
and 18,432 elements at once force their common multiple. Buffers that gain nothing alone are put
together again. Equal groups are planned once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp._dcp import ArgumentError, DTypeError
from dcp.layout import Layout, checked_shape, layout_of, unit_of
from dcp.layout_blocks import BlockRule, Tile, blocks_of, tiles_of, whole_number

__all__ = ["ITEM_BYTES", "Buffer", "TensorGroup", "group_tensors", "is_layer", "plan_groups"]

SPLIT_ABOVE = 0.01  # padding of a group above which one buffer a row length is tried ...
SPLIT_GAIN = 0.5  # ... and taken if it leaves at most so much of it,
MUCH, MUCH_GAIN = 0.03, 0.9  # or of much padding at most so much: more buffers, more collectives

ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}

Tensors = Mapping[str, Sequence[int]] | Iterable[tuple[Any, ...]]
By = str | int | Callable[[str], str] | Sequence[tuple[str, Sequence[str]]]

_LAYER = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.\d+(?=\.)")


def is_layer(group: str) -> bool:
    """Whether the name of a group is that of a layer.

    Examples
    --------
    >>> is_layer("model.layers.7"), is_layer("model.norm+lm_head")
    (True, False)
    """
    return _LAYER.search(group.partition(":")[0] + ".") is not None


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are gathered and reduced together.

    Attributes
    ----------
    name : str
        For example "model.layers.7".
    shapes : dict of str to tuple
        Of its tensors, in model order.
    dtype : str
        Of all of them.

    Examples
    --------
    >>> from dcp.layout import group_tensors
    >>> group_tensors([("model.layers.0.w", (4, 8)), ("model.layers.0.b", (8,))])[0].elements
    40
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, repr=False)
class Buffer:
    """One buffer, and how many groups of a model have one like it; made by `plan_groups`.

    Attributes
    ----------
    group : str
        The first of the groups.
    groups : tuple of str
        All of them.
    layout : dcp.Layout
        With the tensor names of the first.
    dtype : str
        Of its tensors.
    row_elements : tuple of int
        Lengths of the rows in it, where a group has several buffers; empty where it has one.
    seconds : float
        That planning the group took, once for all.

    Examples
    --------
    >>> from dcp.layout import plan_groups
    >>> layers = [(f"model.layers.{i}.w", (96, 64)) for i in range(3)]
    >>> plan_groups(layers, ranks=4)
    [Buffer('model.layers.0' and 2 more: 1 tensors, ranks=4, shard_elements=1536, padding=0.00%)]
    """

    group: str
    groups: tuple[str, ...]
    layout: Layout
    dtype: str = "float32"
    row_elements: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.groups)

    @property
    def name(self) -> str:
        """Group, and lengths of rows where the group has several buffers."""
        rows = "+".join(str(n) for n in self.row_elements)
        return f"{self.group}:{rows}" if rows else self.group

    def __repr__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"Buffer({self.name!r}{more}: {repr(self.layout)[len('Layout(') : -1]})"


def group_tensors(
    tensors: Tensors, *, by: By = "layer", tied: Mapping[str, str] | None = None
) -> list[TensorGroup]:
    """Put the tensors of a model in groups.

    Parameters
    ----------
    tensors : mapping or iterable
        Name to shape, or (name, shape) or (name, shape, dtype) each; float32 where none is given.
    by : "layer", "model", int, callable or sequence of (group, names)
        "layer": one group a layer, by names such as ``model.layers.7.``; what stands before the
        first layer, between layers and behind the last are groups of their own. "model": one group.
        An integer: as many tensors in turn as have so many bytes, at least one. A callable: name of
        the group from the name of the tensor. A sequence: as given.
    tied : mapping of str to str, optional
        Tensors that are another tensor under a second name, and that other one's name. They must
        have the same shape, and take no place.

    Returns
    -------
    list of TensorGroup
        In the order of their first tensors; one of each dtype where a group has several.

    Raises
    ------
    dcp.ArgumentError, dcp.DTypeError
        A name that comes twice, an unknown dtype, tied tensors of different shape or dtype, a
        negative size, or a sequence that does not name every tensor once.

    Examples
    --------
    >>> from dcp.layout import group_tensors
    >>> names = ["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "norm", "head"]
    >>> [group.name for group in group_tensors([(name, (4,)) for name in names])]
    ['embed', 'layers.0', 'layers.1', 'norm+head']
    """
    known = _checked(tensors)
    for name, other in (tied or {}).items():
        _drop_tied(known, name, other)
    found: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for group, name in _grouped(known, by):
        shape, dtype = known[name]
        found.setdefault((group, dtype), {})[name] = shape
    several = {group for group, _ in found}
    mixed = {g for g in several if sum(1 for other, _ in found if other == g) > 1}
    return [
        TensorGroup(f"{group}:{dtype}" if group in mixed else group, shapes, dtype)
        for (group, dtype), shapes in found.items()
    ]


def _checked(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    entries: Iterable[Any] = tensors.items() if isinstance(tensors, Mapping) else tensors
    for entry in entries:
        if isinstance(entry, str) or not 2 <= len(entry) <= 3 or not isinstance(entry[0], str):
            raise DTypeError(f"tensor {entry!r} must be (name, shape) or (name, shape, dtype)")
        name, shape = entry[0], entry[1]
        dtype = str(entry[2]) if len(entry) > 2 else "float32"
        if name in known:
            raise ArgumentError(f"tensor {name!r} is given twice")
        if dtype not in ITEM_BYTES:
            raise ArgumentError(
                f"dtype {dtype!r} of tensor {name!r} must be one of {', '.join(ITEM_BYTES)}"
            )
        known[name] = checked_shape(name, shape), dtype
    return known


def _drop_tied(known: dict[str, tuple[tuple[int, ...], str]], name: str, other: str) -> None:
    for one in (name, other):
        if one not in known:
            raise ArgumentError(f"tied: there is no tensor {one!r}")
    if name == other:
        raise ArgumentError(f"tied: {name!r} cannot be tied to itself")
    if known[name] != known[other]:
        (shape, dtype), (other_shape, other_dtype) = known[name], known[other]
        raise ArgumentError(
            f"tied: {name!r} is {dtype} of shape {shape}, {other!r} is {other_dtype} of shape "
            f"{other_shape}; they must be equal"
        )
    del known[name]


def _grouped(known: dict[str, tuple[tuple[int, ...], str]], by: By) -> list[tuple[str, str]]:
    """(group, tensor) of every tensor."""
    if callable(by):
        return [(str(by(name)), name) for name in known]
    if by == "layer":
        return _by_layer(list(known))
    if by == "model":
        return [("model", name) for name in known]
    if isinstance(by, str):
        raise ArgumentError(f"by {by!r} must be layer, model, bytes, a function or a list")
    if isinstance(by, int) or hasattr(by, "__index__"):
        return _by_bytes(known, whole_number("by", by, 1))
    pairs = [(str(group), name) for group, names in by for name in names]
    seen: set[str] = set()
    for _, name in pairs:
        if name not in known or name in seen:
            what = "comes twice" if name in known else "is no tensor"
            raise ArgumentError(f"by: {name!r} {what}")
        seen.add(name)
    if missing := known.keys() - seen:
        raise ArgumentError(f"by: tensor {min(missing)!r} is in no group")
    return pairs


def _by_layer(names: list[str]) -> list[tuple[str, str]]:
    """Layers by name; neighbours that are in none share a group, named after their modules."""
    pairs: list[tuple[str, str]] = []
    outside: list[str] = []

    def flush() -> None:
        modules = dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in outside)
        label = "+".join(modules) if len(modules) < 4 else f"{next(iter(modules))}+..."
        pairs.extend((label, name) for name in outside)
        outside.clear()

    for name in names:
        layer = _LAYER.search(name)
        if layer is None:
            outside.append(name)
            continue
        if outside:
            flush()
        pairs.append((name[: layer.end()], name))
    flush()
    return pairs


def _by_bytes(known: dict[str, tuple[tuple[int, ...], str]], most: int) -> list[tuple[str, str]]:
    pairs, number, held = [], 0, 0
    for name, (shape, dtype) in known.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if held and held + size > most:
            number, held = number + 1, 0
        held += size
        pairs.append((f"group.{number}", name))
    return pairs


def plan_groups(
    tensors: Tensors | Sequence[TensorGroup],
    *,
    ranks: int,
    block_rows: BlockRule | Mapping[str, BlockRule] = 1,
    by: By = "layer",
    order: str = "model",
    item_bytes: int = 1,
    align_bytes: int = 16,
    split_above: float = SPLIT_ABOVE,
    tied: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Buffer]:
    """Lay out a whole model.

    Parameters
    ----------
    tensors : mapping or iterable, or list of TensorGroup
        As `group_tensors` takes them, or what it returns.
    ranks : int
        Ranks that share each buffer.
    block_rows, order, align_bytes
        As in `dcp.plan_layout`; patterns must match a tensor of the model.
    by, tied
        As in `group_tensors`.
    item_bytes : int, optional
        Bytes of the smallest item that shares a layout; 1 by default, for 8-bit optimizer state.
    split_above : float, optional
        Padding of a group above which one buffer a row length is tried; taken if that leaves at
        most half, of more than 3% at most nine tenths. Infinite: never.
    on_progress : callable, optional
        Called with the groups planned and the groups to plan.

    Returns
    -------
    list of Buffer
        One entry for all groups that are equal, in model order.

    Raises
    ------
    dcp.ArgumentError, dcp.DTypeError
        As `group_tensors` and `dcp.plan_layout`.

    Examples
    --------
    >>> from dcp.layout import plan_groups
    >>> layer = [("a", (1920, 48)), ("b", (1920, 112)), ("norm", (112,))]
    >>> model = [(f"layers.{i}.{name}", shape) for i in range(9) for name, shape in layer]
    >>> for buffer in plan_groups(model, ranks=64):
    ...     print(buffer.name, buffer.count, f"{buffer.layout.padding:.1%}")
    layers.0:112 9 3.3%
    layers.0:48 9 0.0%
    >>> whole = plan_groups(model, ranks=64, split_above=float("inf"))
    >>> len(whole), f"{whole[0].layout.padding:.1%}"
    (1, '5.0%')
    """
    groups = _groups_of(tensors, by, tied)
    planner = _Planner(whole_number("ranks", ranks, 1), order, unit_of(item_bytes, align_bytes))
    equal = _equal_groups(groups, block_rows)
    buffers: list[Buffer] = []
    for done, (same, blocks, tiles) in enumerate(equal):
        if on_progress is not None:
            on_progress(done, len(equal))
        first = same[0]
        start = time.perf_counter()
        layouts = planner.plan(first.shapes, blocks, tiles, split_above)
        seconds = time.perf_counter() - start
        for layout, rows in layouts:
            names_of_all = tuple(group.name for group in same)
            buffers.append(Buffer(first.name, names_of_all, layout, first.dtype, rows, seconds))
    if on_progress is not None:
        on_progress(len(equal), len(equal))
    return buffers


Equal = tuple[list[TensorGroup], dict[str, int], dict[str, Tile]]  # blocks and tiles of the first


def _equal_groups(
    groups: list[TensorGroup], block_rows: BlockRule | Mapping[str, BlockRule]
) -> list[Equal]:
    """Groups of the same shapes, blocks and dtype, together; in model order."""
    found: dict[tuple[Any, ...], list[TensorGroup]] = {}
    if not isinstance(block_rows, Mapping):  # one rule: equal shapes have equal blocks
        for group in groups:
            found.setdefault((group.dtype, *group.shapes.values()), []).append(group)
        firsts = [same[0].shapes for same in found.values()]
        rules = [(blocks_of(s, block_rows), tiles_of(s, block_rows)) for s in firsts]
        return [(same, *r) for same, r in zip(found.values(), rules, strict=True)]
    shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
    blocks, tiles = blocks_of(shapes, block_rows), tiles_of(shapes, block_rows)
    for group in groups:
        names = group.shapes
        key = (group.dtype, *((names[n], blocks[n], tiles.get(n)) for n in names))
        found.setdefault(key, []).append(group)
    return [
        (
            same,
            {name: blocks[name] for name in same[0].shapes},
            {name: tiles[name] for name in same[0].shapes if name in tiles},
        )
        for same in found.values()
    ]


def _groups_of(
    tensors: Tensors | Sequence[TensorGroup], by: By, tied: Mapping[str, str] | None
) -> list[TensorGroup]:
    if isinstance(tensors, Mapping):
        return group_tensors(tensors, by=by, tied=tied)
    entries: list[Any] = list(tensors)
    if entries and all(isinstance(entry, TensorGroup) for entry in entries):
        return entries
    return group_tensors(entries, by=by, tied=tied)


def split_group(
    shapes: dict[str, tuple[int, ...]], blocks: dict[str, int], *, ranks: int, order: str
) -> list[list[str]]:
    """Names of the tensors of each buffer of one group, as `plan_groups` would split it.

    Examples
    --------
    >>> shapes = {"a": (1920, 48), "b": (1920, 112), "norm": (112,)}
    >>> split_group(shapes, {"a": 48, "b": 112, "norm": 1}, ranks=64, order="model")
    [['b', 'norm'], ['a']]
    >>> split_group(shapes, {"a": 48, "b": 112, "norm": 1}, ranks=2, order="model")
    [['a', 'b', 'norm']]
    """
    layouts = _Planner(ranks, order, unit_of(1, 16)).plan(shapes, blocks, {}, SPLIT_ABOVE)
    return [list(layout.shapes) for layout, _ in layouts]


Part = tuple[Layout, tuple[int, ...]]  # and lengths of its rows


@dataclass(frozen=True)
class _Planner:
    ranks: int
    order: str
    unit: int

    def plan(
        self,
        shapes: dict[str, tuple[int, ...]],
        blocks: dict[str, int],
        tiles: dict[str, Tile],
        split_above: float,
    ) -> list[Part]:
        """One buffer, or several that hold the same with much less padding."""

        def one(names: Iterable[str]) -> Layout:
            return layout_of(
                {name: shapes[name] for name in names},
                {name: blocks[name] for name in names},
                {name: tiles[name] for name in names if name in tiles},
                ranks=self.ranks,
                order=self.order,
                unit=self.unit,
            )

        whole = one(list(shapes))
        if whole.padding <= split_above:
            return [(whole, ())]
        parts = _by_row_length(shapes)
        if len(parts) < 2:
            return [(whole, ())]
        split = [(one(names), rows) for rows, names in parts.items()]
        used = whole.used_elements
        left = (_shards(split) * self.ranks - used) / (whole.shard_elements * self.ranks - used)
        if left > (MUCH_GAIN if whole.padding > MUCH else SPLIT_GAIN):
            return [(whole, ())]
        return _put_together(split, list(shapes), one)


def _by_row_length(shapes: dict[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
    """Names of the tensors by the length of their rows, longest first.

    Tensors of one dimension fill gaps: they go where most elements are.
    """
    parts: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        if len(shape) > 1 and math.prod(shape) > 0:
            parts.setdefault((shape[-1],), []).append(name)
    if not parts:
        return {}
    largest = max(parts, key=lambda rows: sum(math.prod(shapes[name]) for name in parts[rows]))
    taken = {name for names in parts.values() for name in names}
    members = {*parts[largest], *(name for name in shapes if name not in taken)}
    parts[largest] = [name for name in shapes if name in members]
    return dict(sorted(parts.items(), reverse=True))


def _shards(parts: list[Part]) -> int:
    return sum(layout.shard_elements for layout, _ in parts)


def _put_together(
    parts: list[Part], names: list[str], one: Callable[[Iterable[str]], Layout]
) -> list[Part]:
    """Join the pair of buffers whose union is smallest, as long as none grows by that."""
    while len(parts) > 2:
        best: tuple[int, int, int, Part] | None = None
        for i, (first, first_rows) in enumerate(parts):
            for j in range(i):
                second, second_rows = parts[j]
                union = [name for name in names if name in first.shapes or name in second.shapes]
                layout = one(union)
                growth = layout.shard_elements - first.shard_elements - second.shard_elements
                if best is None or growth < best[0]:
                    best = growth, i, j, (layout, second_rows + first_rows)
        assert best is not None
        growth, i, j, joined = best
        if growth > 0:
            break
        parts = [part for k, part in enumerate(parts) if k not in (i, j)]
        parts.append(joined)
        parts.sort(key=lambda part: part[1], reverse=True)
    return parts
