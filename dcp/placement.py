"""Which elements of a tensor each rank of a mesh holds, and moves from one way to another.

A *mesh* arranges ranks in a grid; a tensor has one *placement* for each axis of it:
`Replicate`, `Shard` (even chunks of a dimension) or `RaggedShard` (ranges of elements, of any
sizes). Placements are applied from the last axis to the first, each to what the one before has
left: with ``(RaggedShard((1, 2)), Shard(0))`` the last axis cuts rows, and the first one cuts each
of these pieces again. A `RaggedShard` therefore stands left of all others that shard.

What a rank holds is always a range of the row-major elements of a box of the tensor, in the order
of the tensor. A ragged part is a flat array; all others have a shape (`local_shape`). The shape of
the whole tensor is always given, never guessed from a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp import _dcp
from dcp._dcp import ArgumentError, DTypeError
from dcp.checkpoint import Run
from dcp.layout import Layout
from dcp.world import World

__all__ = [
    "Mesh",
    "Moved",
    "RaggedShard",
    "Replicate",
    "Shard",
    "local_boxes",
    "local_shape",
    "redistribute",
    "reduce",
    "runs",
]

Array = npt.NDArray[Any]


def _integers(values: Iterable[object], what: str) -> tuple[int, ...]:
    numbers = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise DTypeError(f"{what} {value!r} must be an integer")
        numbers.append(int(value.__index__()))
    return tuple(numbers)


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis holds the same.

    Examples
    --------
    >>> import dcp
    >>> dcp.Replicate()
    Replicate()
    """


@dataclass(frozen=True)
class Shard:
    """A dimension is cut into even chunks: ``n`` entries on ``p`` ranks in chunks of ``ceil(n/p)``.

    The last chunks are short or empty: 5 on 2 ranks are 3 and 2; 3 on 8 are 1, 1, 1 and nothing.

    Parameters
    ----------
    dim : int
        Dimension of the tensor; negative ones count from the end.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(5,))
    >>> [dcp.placement.local_shape((96, 2), mesh, [dcp.Shard(0)], r)[0] for r in range(5)]
    [20, 20, 20, 20, 16]
    """

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", _integers([self.dim], "dim")[0])


@dataclass(frozen=True)
class RaggedShard:
    """Ranks hold ranges of the row-major elements, of sizes in proportion to `units`.

    With ``u`` the units over their greatest common divisor, rank ``r`` holds
    ``count * u[r] / sum(u)`` elements, after those of the ranks before it. `count` are the elements
    that the axes to the right leave. Nothing is rounded: ``sum(u)`` must divide the number of
    blocks, see `dims`. Where cuts are given by a planner instead, see `at` and `of_layout`.

    Parameters
    ----------
    units : sequence of int
        One for each rank along the axis, 0 included, not all 0.
    dims : sequence of int, optional
        Leading dimensions ``(0, 1, ..., k - 1)`` whose entries stay whole: ``(0,)`` cuts between
        rows, ``()`` leaves the tensor on the one rank with a unit. None: between any elements. A
        `Shard` of a dimension ``d > 0`` on another axis limits cuts as ``(0, ..., d)`` does, to
        multiples of the stride of that dimension.

    Notes
    -----
    The placement of veScale-FSDP (arXiv 2602.22437): ``RaggedShard(dims, local_units)`` there.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(4,))
    >>> ragged = [dcp.RaggedShard((1, 2, 0, 1), dims=(0,))]
    >>> [dcp.placement.local_boxes((8, 5), mesh, ragged, rank) for rank in range(4)]
    [[(0, 10)], [(10, 20)], [], [(30, 10)]]
    """

    units: tuple[int, ...]
    dims: tuple[int, ...] | None = None
    borders: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", _integers(self.units, "units:"))
        if self.dims is not None:
            dims = _integers(self.dims, "dims:")
            if dims != tuple(range(len(dims))):
                raise ArgumentError(f"dims={dims} must be leading dimensions: (), (0,), (0, 1) ...")
            object.__setattr__(self, "dims", dims)
        if self.borders is not None:
            borders = _integers(self.borders, "borders:")
            sizes = tuple(high - low for low, high in pairwise(borders))
            if len(borders) < 2 or borders[0] != 0 or min(sizes) < 0 or sizes != self.units:
                raise ArgumentError(
                    f"borders={borders} must begin with 0 and ascend, units={self.units} be their "
                    "differences"
                )
            object.__setattr__(self, "borders", borders)

    @classmethod
    def at(cls, borders: Sequence[int]) -> RaggedShard:
        """Cuts at given elements: rank ``r`` holds ``[borders[r], borders[r + 1])``.

        Parameters
        ----------
        borders : sequence of int
            Ascending, from 0 to the number of elements; one more than ranks along the axis.

        Raises
        ------
        dcp.ArgumentError
            `borders` do not begin with 0, or descend.

        Examples
        --------
        >>> import dcp
        >>> dcp.RaggedShard.at((0, 7, 7, 12)).units
        (7, 0, 5)
        """
        exact = _integers(borders, "borders:")
        return cls(tuple(high - low for low, high in pairwise(exact)), None, exact)

    @classmethod
    def of_layout(cls, layout: Layout, name: str) -> RaggedShard:
        """Cuts a tensor where a layout cuts it.

        Parameters
        ----------
        layout : dcp.Layout
            Of as many ranks as the axis has.
        name : str
            The tensor.

        Raises
        ------
        dcp.ArgumentError
            The layout has no such tensor.

        Examples
        --------
        >>> import dcp
        >>> layout = dcp.plan_layout([("w", (4, 8)), ("b", (8,))], ranks=2)
        >>> dcp.RaggedShard.of_layout(layout, "w").borders
        (0, 24, 32)
        """
        if name not in layout.shapes:
            raise ArgumentError(f"name {name!r} is no tensor of the layout")
        borders = [0]
        for rank in range(layout.ranks):
            held = (count for other, _, count in layout.runs(rank) if other == name)
            borders.append(borders[-1] + sum(held))
        return cls.at(borders)


Placement: TypeAlias = Replicate | Shard | RaggedShard


class Mesh:
    """Ranks in a grid, numbered row by row, with a world for each axis.

    Collective over `world`: it makes one world of the ranks along each axis, once.

    Parameters
    ----------
    world : dcp.World or None
        The ranks. None: a mesh to compute with, which moves nothing.
    shape : sequence of int, optional
        Sizes of the axes, 4 at most; their product is the size of the world. Default: one axis.
    names : sequence of str, optional
        Names of the axes; default ``axis0``, ``axis1``, ...

    Raises
    ------
    dcp.ArgumentError
        Sizes that do not multiply to the size of the world, or names that do not fit.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(2, 3), names=("replica", "shard"))
    >>> mesh.coordinates(4)
    (1, 1)
    >>> dcp.Mesh(dcp.init())
    Mesh((1,), names=('axis0',))
    """

    def __init__(
        self,
        world: World | None,
        *,
        shape: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if shape is None:
            if world is None:
                raise ArgumentError("shape must be given where world is None")
            shape = (world.size,)
        self.world = world
        self.shape = _integers(shape, "shape:")
        if not 1 <= len(self.shape) <= 4 or min(self.shape) < 1:
            raise ArgumentError(f"shape={self.shape} must have 1 to 4 axes of at least 1 rank")
        if world is not None and math.prod(self.shape) != world.size:
            raise ArgumentError(
                f"shape={self.shape} has {math.prod(self.shape)} ranks, the world has {world.size}"
            )
        self.names = (
            tuple(f"axis{i}" for i in range(len(self.shape))) if names is None else tuple(names)
        )
        if len(set(self.names)) != len(self.names) or len(self.names) != len(self.shape):
            raise ArgumentError(
                f"names={self.names} must be {len(self.shape)} different names, one for each axis"
            )
        self._groups = tuple(self._split(axis) for axis in range(len(self.shape)))

    def _split(self, axis: int) -> World | None:
        """The ranks that differ from this one in `axis` alone, where there are others."""
        if self.world is None or self.shape[axis] == 1:
            return None
        if self.shape[axis] == self.world.size:
            return self.world
        place = list(self.coordinates(self.world.rank))
        key, place[axis] = place[axis], 0
        part = self.world._split(self.rank_at(place), key)
        return None if part is None else part._placed(part.rank, part.size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Place of a rank in the grid.

        Examples
        --------
        >>> import dcp
        >>> dcp.Mesh(None, shape=(2, 3)).coordinates(5)
        (1, 2)
        """
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank} must lie in 0..{self.size - 1}")
        return tuple(int(i) for i in np.unravel_index(rank, self.shape))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """The rank at a place of the grid.

        Examples
        --------
        >>> import dcp
        >>> dcp.Mesh(None, shape=(2, 3)).rank_at((1, 2))
        5
        """
        place = _integers(coordinates, "coordinates:")
        fits = len(place) == len(self.shape)
        if not fits or not all(0 <= i < n for i, n in zip(place, self.shape, strict=True)):
            raise ArgumentError(f"coordinates={place} lie outside of a mesh of {self.shape}")
        return int(np.ravel_multi_index(place, self.shape))

    def axis(self, name: str | int) -> int:
        """Number of an axis, by its name or number.

        Examples
        --------
        >>> import dcp
        >>> dcp.Mesh(None, shape=(2, 3), names=("replica", "shard")).axis("shard")
        1
        """
        if name in self.names:
            return self.names.index(str(name))
        if isinstance(name, int) and 0 <= name < len(self.shape):
            return name
        raise ArgumentError(f"axis {name!r} is none of {self.names}")

    def group(self, axis: str | int) -> World | None:
        """The world of the ranks along an axis through this rank; None where it is alone.

        Examples
        --------
        >>> import dcp
        >>> print(dcp.Mesh(dcp.init()).group(0))
        None
        """
        return self._groups[self.axis(axis)]

    def allocate(
        self,
        shape: Sequence[int],
        placements: Sequence[Placement],
        dtype: npt.DTypeLike = np.float32,
    ) -> tuple[Array, _dcp.Window]:
        """Zeros for this rank's part in memory that the others can read. Collective.

        Parameters
        ----------
        shape : sequence of int
            Of the whole tensor.
        placements : sequence of placements, one for each axis
            What this rank holds of it.
        dtype : dtype
            Of the elements.

        Returns
        -------
        local : array of `local_shape`
            This rank's part.
        window : window
            For `redistribute`.

        Examples
        --------
        >>> import dcp
        >>> local, window = dcp.Mesh(dcp.init()).allocate((2, 3), [dcp.Shard(0)])
        >>> local.shape
        (2, 3)
        """
        world = self._world()
        part = local_shape(shape, self, placements)
        item = np.dtype(dtype)
        window = world._window(math.prod(part) * item.itemsize)
        return window.part(world.rank).view(item).reshape(part), window

    def _world(self) -> World:
        if self.world is None:
            raise ArgumentError("the mesh has no world: it can compute, not move")
        return self.world

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, names={self.names})"


class Moved(NamedTuple):
    """A rank's new part, and what it took to make it, in bytes.

    ``sent_bytes`` and ``received_bytes`` are those that other ranks lack and this one does;
    ``kept_bytes`` were on this rank before; ``staged_bytes`` passed scratch memory.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(dcp.init())
    >>> moved = dcp.redistribute(
    ...     np.ones(4, np.float32), (4,), mesh, [dcp.Replicate()], [dcp.Shard(0)]
    ... )
    >>> moved.sent_bytes, moved.kept_bytes
    (0, 16)
    """

    array: Array
    sent_bytes: int
    received_bytes: int
    kept_bytes: int
    staged_bytes: int


def _codes(
    placements: Sequence[Placement], dim_count: int
) -> list[tuple[int, int, tuple[int, ...] | None]]:
    """The placements as the core takes them."""
    codes: list[tuple[int, int, tuple[int, ...] | None]] = []
    for placement in placements:
        match placement:
            case Replicate():
                codes.append((0, 0, None))
            case Shard(dim):
                if not -dim_count <= dim < max(dim_count, 1):
                    raise ArgumentError(f"{placement}: the tensor has {dim_count} dimensions")
                codes.append((1, dim + dim_count if dim < 0 else dim, None))
            case RaggedShard(units, dims, borders):
                if borders is not None:
                    codes.append((3, 0, borders))
                else:
                    codes.append((2, -1 if dims is None else len(dims), units))
            case _:
                raise DTypeError(
                    f"placement {placement!r} must be Replicate(), Shard(dim) or RaggedShard(...)"
                )
    return codes


def _rank(mesh: Mesh, rank: int | None) -> int:
    return mesh._world().rank if rank is None else _integers([rank], "rank")[0]


def local_shape(
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    rank: int | None = None,
) -> tuple[int, ...]:
    """Shape of what a rank holds: a box, or flat where a `RaggedShard` cuts.

    Parameters
    ----------
    shape : sequence of int
        Of the whole tensor, 8 dimensions at most.
    mesh : Mesh
        The ranks.
    placements : sequence of placements, one for each axis of the mesh
        Applied from the last to the first.
    rank : int, optional
        Which rank; default: this one.

    Returns
    -------
    tuple of int

    Raises
    ------
    dcp.ArgumentError
        A shard that does not fit; shape, axis and rule are named.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(2, 3))
    >>> dcp.placement.local_shape((4, 7), mesh, [dcp.Replicate(), dcp.Shard(1)], 2)
    (4, 1)
    >>> dcp.placement.local_shape((4, 6), mesh, [dcp.RaggedShard((3, 1)), dcp.Shard(1)], 0)
    (6,)
    """
    whole = _integers(shape, "shape:")
    codes = _codes(placements, len(whole))
    _, size, _, count = _dcp.placement_local(whole, mesh.shape, codes, _rank(mesh, rank))
    return (count,) if any(kind >= 2 for kind, _, _ in codes) else size


def local_boxes(
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    rank: int | None = None,
) -> list[tuple[int, int]]:
    """What a rank holds, as runs of the flat whole tensor, in local order.

    Parameters
    ----------
    shape, mesh, placements, rank
        As in `local_shape`.

    Returns
    -------
    list of (start, size)
        Elements ``[start, start + size)`` of the row-major tensor; ascending; maximal, so none
        follows another without a gap.

    Raises
    ------
    dcp.ArgumentError
        A shard that does not fit; shape, axis and rule are named.

    Examples
    --------
    The strided case: the last axis takes rows 0-1 and 2-3, the first cuts each of these again.

    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(2, 2))
    >>> strided = [dcp.RaggedShard((1, 3)), dcp.Shard(0)]
    >>> [dcp.placement.local_boxes((4, 4), mesh, strided, rank) for rank in range(4)]
    [[(0, 2)], [(8, 2)], [(2, 6)], [(10, 6)]]
    """
    whole = _integers(shape, "shape:")
    table = _dcp.placement_runs(
        whole, mesh.shape, _codes(placements, len(whole)), _rank(mesh, rank)
    )
    return [(int(start), int(size)) for start, _, size in table]


def redistribute(
    local: Array,
    shape: Sequence[int],
    mesh: Mesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    *,
    out: Array | None = None,
    window: _dcp.Window | None = None,
) -> Moved:
    """Move a tensor from one placement to another. Collective over the mesh's world.

    Each rank gets from every other exactly the elements that it lacks, straight from `local` to
    `out`: one all-to-all, or one all-gather where the target is the whole on every rank. Of equal
    copies it takes its own, else that of the rank with its coordinates on the axes where `source`
    is replicated; so copies of a hybrid sharding never leave their shard group.

    Parameters
    ----------
    local : array, C-contiguous
        What this rank holds now (`local_shape` of `source`, in any shape): float32, float64, uint16
        (also for bfloat16), int32, int64 or uint8.
    shape : sequence of int
        Of the whole tensor.
    mesh : Mesh
        The ranks.
    source, target : sequence of placements, one for each axis
        From where to where.
    out : array, optional
        Where the new part goes. It may overlap `local`: what arrives then passes scratch memory
        only where the new part lands on elements that must still leave. A rank that only gives or
        only takes never needs any.
    window : window, optional
        The window in which `local` lies on every rank (`Mesh.allocate`): ranks then copy straight
        from each other's memory. Given on all ranks or on none.

    Returns
    -------
    Moved
        The new part, and the bytes sent, received, kept and staged.

    Raises
    ------
    dcp.ArgumentError
        A placement that does not fit, or an array of another size; nothing has moved.
    dcp.DTypeError
        Another dtype or memory layout.
    dcp.MismatchError
        Ranks called with another shape, mesh, placement or dtype; on all ranks, nothing has moved.

    Examples
    --------
    >>> import dcp
    >>> def even_to_ragged(world):
    ...     mesh = dcp.Mesh(world)
    ...     local = np.arange(3, dtype=np.float32) + 3 * world.rank
    ...     moved = dcp.redistribute(
    ...         local, (6,), mesh, [dcp.Shard(0)], [dcp.RaggedShard((1, 5))]
    ...     )
    ...     return moved.array.tolist(), moved.sent_bytes, moved.received_bytes, moved.kept_bytes
    >>> dcp.launch(even_to_ragged, 2)
    [([0.0], 8, 0, 4), ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 8, 12)]
    """
    world = mesh._world()
    whole = _integers(shape, "shape:")
    codes = _codes(source, len(whole))
    cutting = [axis for axis, (kind, _, _) in enumerate(codes) if kind]
    axis = cutting[0] if len(mesh.shape) > 1 and len(cutting) == 1 else 0
    group = mesh._groups[axis] if len(mesh.shape) > 1 and len(cutting) == 1 else None
    array, moved = _dcp.placement_redistribute(
        world,
        group,
        axis,
        whole,
        mesh.shape,
        codes,
        _codes(target, len(whole)),
        local,
        out,
        window,
    )
    part = local_shape(whole, mesh, target)
    return Moved(array if out is not None else array.reshape(part), *moved)


def reduce(
    x: npt.NDArray[np.float32],
    shape: Sequence[int],
    mesh: Mesh,
    target: Sequence[Placement],
    *,
    out: npt.NDArray[np.float32] | None = None,
) -> Moved:
    """Sum a tensor over all ranks of a mesh; each rank gets its part of the sum. Collective.

    From the last axis to the first, each axis that shards reduce-scatters what is left; then, from
    the last to the first, each that replicates adds up the parts. Along an axis ranks are added in
    order: for ``(Replicate, RaggedShard)`` on a (2, 3) mesh the sum is ``(x0 + x1 + x2) + (x3 + x4
    + x5)``, in float32. All copies of an element are the same bits.

    Parameters
    ----------
    x : float32 array, C-contiguous
        This rank's summand: a whole tensor, in any shape.
    shape : sequence of int
        Of the tensor.
    mesh : Mesh
        The ranks.
    target : sequence of placements, one for each axis
        Of the sum.
    out : float32 array, optional
        Where the part goes; apart from `x`.

    Returns
    -------
    Moved
        The part, and bytes: of `x` sent to others, of theirs received, of the part, packed first
        (only where a `Shard` of a dimension above 0 makes it necessary).

    Raises
    ------
    dcp.ArgumentError
        A placement that does not fit, or an array of another size.
    dcp.MismatchError
        Ranks called with another shape, mesh or placement.

    Examples
    --------
    >>> import dcp
    >>> def gradients(world):
    ...     mesh = dcp.Mesh(world, shape=(2, 2), names=("replica", "shard"))
    ...     x = np.full((4, 2), world.rank, np.float32)
    ...     ragged = [dcp.Replicate(), dcp.RaggedShard((1, 3), dims=(0,))]
    ...     return dcp.placement.reduce(x, x.shape, mesh, ragged).array.tolist()
    >>> dcp.launch(gradients, 4)[::3]
    [[6.0, 6.0], [6.0, 6.0, 6.0, 6.0, 6.0, 6.0]]
    """
    world = mesh._world()
    whole = _integers(shape, "shape:")
    array, moved = _dcp.placement_reduce(
        world, mesh._groups, whole, mesh.shape, _codes(target, len(whole)), x, out
    )
    part = local_shape(whole, mesh, target)
    return Moved(array if out is not None else array.reshape(part), *moved)


def runs(
    name: str,
    local: Array,
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    *,
    rank: int | None = None,
    once: bool = True,
) -> list[Run]:
    """What a rank holds of a tensor, for a checkpoint.

    Parameters
    ----------
    name : str
        Of the tensor.
    local : array, C-contiguous
        The rank's part; the runs are views of it.
    shape, mesh, placements, rank
        As in `local_shape`.
    once : bool
        True, to save: of equal copies on several ranks only the first gives runs. False, to load.

    Returns
    -------
    list of dcp.checkpoint.Run

    Raises
    ------
    dcp.ArgumentError
        `local` has another size than the rank's part.

    Examples
    --------
    >>> import dcp
    >>> mesh = dcp.Mesh(None, shape=(2,))
    >>> local = np.array([[2, 3], [6, 7]], np.float32)
    >>> columns = dcp.placement.runs("w", local, (2, 4), mesh, [dcp.Shard(1)], rank=1)
    >>> [(run.first, run.array.tolist()) for run in columns]
    [(2, [2.0, 3.0]), (6, [6.0, 7.0])]
    """
    whole = _integers(shape, "shape:")
    codes = _codes(placements, len(whole))
    number = _rank(mesh, rank)
    table = _dcp.placement_runs(whole, mesh.shape, codes, number)
    count = int(table[:, 2].sum())
    if local.size != count or not local.flags.c_contiguous:
        raise ArgumentError(
            f"local has {local.size} elements: rank {number} holds {count}, in one C-contiguous "
            f"array, of {name!r} with shape {whole}"
        )
    copies = zip(mesh.coordinates(number), codes, strict=True)
    if once and any(place > 0 and kind == 0 for place, (kind, _, _) in copies):
        return []
    flat = local.reshape(-1)
    return [Run(name, int(first), flat[at : at + size]) for first, at, size in table]
