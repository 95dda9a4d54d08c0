"""The ranks that work together, and what they exchange: NumPy in, NumPy out."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp import _dcp, _env
from dcp._dcp import ArgumentError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from dcp.link import Link

__all__ = ["Traffic", "World", "init"]

Array = npt.NDArray[Any]
_OPS = {"sum": 0, "max": 1, "min": 2}

# Worlds that are open: closed at exit, so that peers see a rank that left, not one that died.
_open: weakref.WeakSet[World] = weakref.WeakSet()
_world: World | None = None
_worlds_made = 0
# Set in a rank of dcp.launch: sends an object to the launcher.
_emit: Callable[[Any], None] | None = None


class Traffic(NamedTuple):
    """What has gone through a world on this rank since it was made.

    Collectives and groups of messages that succeeded; not windows.

    Attributes
    ----------
    call_count : int
    received_bytes : int
        Data of other ranks. Reductions count as if each rank summed its slice, `allreduce` an
        even one.
    wait_s : float
        Seconds until all ranks that take part had come. Messages: seconds asleep while a sender
        had shown nothing.
    move_s : float
        The rest of the calls' seconds. A world of one rank has no times.

    Examples
    --------
    >>> import dcp, numpy as np
    >>> with dcp.init() as world:
    ...     _ = world.allreduce(np.ones(3, np.float32))
    ...     world.traffic()
    Traffic(call_count=1, received_bytes=0, wait_s=0.0, move_s=0.0)
    """

    call_count: int
    received_bytes: int
    wait_s: float
    move_s: float


class _Wire(NamedTuple):
    """How a sum travels."""

    precision: str | None
    hadamard: bool
    nearest: bool
    residual: Array | None
    seed: int
    step: int
    machine_ranks: int

    @property
    def is_plain(self) -> bool:
        """Is this the collective of the communicator itself?"""
        is_exact = self.precision in (None, "fp32")
        return is_exact and self.residual is None and self.machine_ranks == 1

    def arguments(self) -> tuple[str, bool, bool, Array | None, int, int, int]:
        """For the C module; numbers are checked."""
        limits = {"seed": 1 << 64, "step": 1 << 47, "machine_ranks": 1 << 31}
        numbers = []
        for name, limit in limits.items():
            value = getattr(self, name)
            if not hasattr(value, "__index__") or not 0 <= value.__index__() < limit:
                raise ArgumentError(f"{name}={value!r} must be an integer in 0..{limit - 1}")
            numbers.append(value.__index__())
        precision = "fp32" if self.precision is None else self.precision
        if not isinstance(precision, str):
            raise ArgumentError(f"precision={precision!r} must be a name such as 'int8', or None")
        seed, step, ranks = numbers
        ways = bool(self.hadamard), bool(self.nearest)
        return precision, *ways, self.residual, seed, step, ranks


class World(_dcp.World):
    """Ranks that work together.

    Every method but `traffic`, `emit`, `abort` and `close` is collective: all ranks call it, in
    the same order, with arguments that agree. A rank that calls something else makes the call
    fail on all ranks (`dcp.MismatchError`, which shows both sides); a rank that died fails the
    others within a second (`dcp.RankError`), one that does not come within the timeout
    (`dcp.DeadlineError`) is named. After such an error every later call fails with it at once.

    Arrays are C-contiguous, of dtype float32, float64, int32, int64 or uint8. Sums are taken in
    rank order, in the dtype of the array, so all ranks get the same bits. Integers wrap.

    Made by `dcp.init`, or handed to the function that `dcp.launch` runs. A context manager.

    Attributes
    ----------
    rank, size : int
        Number of this rank, 0 <= rank < size.
    local_rank, local_size : int
        The same among the ranks of this machine.
    transport : str
        ``"self"``, ``"shm"`` or, on a link, ``"emulated"``.
    link : dcp.link.Link or None
        The emulated link between the ranks.

    Examples
    --------
    >>> import dcp, numpy as np
    >>> with dcp.init() as world:
    ...     float(world.allreduce(np.ones(3, np.float32)).sum())
    3.0
    """

    local_rank: int
    local_size: int
    link: Link | None = None

    def _placed(self, local_rank: int, local_size: int) -> World:
        self.local_rank, self.local_size = local_rank, local_size
        _open.add(self)
        return self

    @property
    def _core(self) -> _dcp.World:
        """What functions of the C module take."""
        return self

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Examples
        --------
        >>> dcp.init().barrier()
        """
        self._barrier()

    def allreduce(
        self,
        x: npt.ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        precision: str | None = None,
        hadamard: bool = False,
        nearest: bool = False,
        residual: Array | None = None,
        seed: int = 0,
        step: int = 0,
        machine_ranks: int = 1,
    ) -> Array:
        """Combine an array over all ranks, element by element.

        With a `precision` sums travel in few bits: each rank quantises its part once, for each
        owner of a slice; the owner sums in fp32, in rank order, its own part exactly, quantises
        the sum once more, and all decode that. One rank alone gets the exact sum.

        Parameters
        ----------
        x : array, any shape
            The same shape and dtype on all ranks.
        op : {"sum", "max", "min"}
            ``max`` and ``min`` keep a NaN.
        out : array, optional
            Where the result goes; may be `x` itself.
        precision : {None, "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"}
            In how many bits sums of float32 travel. None and ``"fp32"``: exactly.
        hadamard : bool
            Rotate each block of 128 elements before it is quantised, which evens out outliers.
        nearest : bool
            Round to nearest; else stochastically, without bias.
        residual : float32 array of the shape of `x`, optional
            Error feedback: added to `x`, then overwritten with what the codes left out. Over all
            calls and ranks, sums handed out plus residuals are the sum of all `x`. Zeros at first.
        seed, step : int
            Random bits follow the seed, the step, the rank and the element.
        machine_ranks : int
            Ranks in a row that share a machine: they sum exactly among themselves first, and only
            sums cross machines in few bits. 1: one level.

        Returns
        -------
        array of the shape of `x`
            The same bits on every rank.

        Raises
        ------
        dcp.DTypeError
            A dtype or memory layout that does not travel; other than float32 with a `precision`.
        dcp.ArgumentError
            An unknown `op` or `precision`; `machine_ranks` that do not divide the ranks.
        dcp.MismatchError
            Ranks gave other settings or shapes.

        Examples
        --------
        >>> dcp.init().allreduce(np.array([1, 2], np.int64), "max")
        array([1, 2])
        >>> dcp.init().allreduce(np.ones(3, np.float32), precision="int8", step=1)
        array([1., 1., 1.], dtype=float32)
        """
        if op not in _OPS:
            raise ArgumentError(f"op={op!r} must be one of {', '.join(_OPS)}")
        array = np.asarray(x)
        wire = _Wire(precision, hadamard, nearest, residual, seed, step, machine_ranks)
        if wire.is_plain:
            return self._allreduce(array, _OPS[op], out).reshape(array.shape)
        if op != "sum":
            raise ArgumentError(f"op={op!r} must be 'sum' with precision={precision!r}")
        result, _ = self._quantised_reduce(array, None, *wire.arguments(), out)
        return result.reshape(array.shape)

    def _rows(self, x: npt.ArrayLike) -> tuple[Array, int]:
        """The array, and the elements of one entry of its first axis."""
        array = np.asarray(x)
        if array.ndim == 0:
            array = array.reshape(1)
        return array, int(np.prod(array.shape[1:], dtype=np.int64))

    def _counts(self, counts: npt.ArrayLike, what: str, width: int) -> Array:
        array = np.asarray(counts)
        if array.shape != (self.size,) or array.dtype.kind not in "iu":
            raise ArgumentError(
                f"{what}={counts!r} must be {self.size} integers, one for each rank"
            )
        if array.size and int(array.min()) < 0:
            raise ArgumentError(f"{what}={counts!r} must not be negative")
        return array.astype(np.int64) * width

    def allgatherv(self, x: npt.ArrayLike, *, out: Array | None = None) -> Array:
        """Join the arrays of all ranks along the first axis, in rank order.

        Parameters
        ----------
        x : array [n, ...]
            n may differ between ranks, 0 included; the other axes and the dtype agree.
        out : array, optional
            Where the result goes.

        Returns
        -------
        array [sum of n, ...]

        Raises
        ------
        dcp.MismatchError
            The other axes differ between ranks.

        Examples
        --------
        >>> dcp.init().allgatherv(np.arange(3, dtype=np.int32))
        array([0, 1, 2], dtype=int32)
        """
        array, width = self._rows(x)
        mine = np.array([len(array), width], np.int64)
        shapes = self._allgatherv(mine, np.full(self.size, 2, np.int64), None).reshape(-1, 2)
        self._same_width(shapes[:, 1])
        result = self._allgatherv(array, shapes[:, 0] * width, out)
        return result.reshape(int(shapes[:, 0].sum()), *array.shape[1:])

    def _same_width(self, widths: Array) -> None:
        for rank, width in enumerate(widths):
            if width != widths[0]:
                raise MismatchError(
                    f"rows differ: {widths[0]} elements on rank 0, {width} on rank {rank}"
                )

    def reduce_scatterv(
        self,
        x: npt.ArrayLike,
        counts: npt.ArrayLike,
        *,
        out: Array | None = None,
        precision: str | None = None,
        hadamard: bool = False,
        nearest: bool = False,
        residual: Array | None = None,
        seed: int = 0,
        step: int = 0,
        machine_ranks: int = 1,
    ) -> Array:
        """Sum an array over all ranks; every rank gets its slice of the sum.

        With a `precision` each rank quantises what goes to every other rank, once; the receiver
        sums in fp32, in rank order, its own part exactly.

        Parameters
        ----------
        x : array [sum of counts, ...]
            The same shape and dtype on all ranks.
        counts : sequence of int, one for each rank
            Entries of the first axis that each rank gets, in rank order, 0 included; the same on
            all ranks.
        out : array, optional
            Where the result goes. A new array costs page faults: loops should pass `out`.
        precision, hadamard, nearest, residual, seed, step, machine_ranks
            As for `allreduce`.

        Returns
        -------
        array [counts[rank], ...]

        Raises
        ------
        dcp.ArgumentError
            `counts` do not sum up to the first axis of `x`; see `allreduce`.
        dcp.DTypeError
            Other than float32 with a `precision`.
        dcp.MismatchError
            `counts` or settings differ between ranks.

        Examples
        --------
        >>> dcp.init().reduce_scatterv(np.ones(3, np.float32), [3])
        array([1., 1., 1.], dtype=float32)
        >>> residual = np.zeros(3, np.float32)
        >>> x = np.array([0.1, 1, 3], np.float32)
        >>> dcp.init().reduce_scatterv(x, [3], precision="int4", residual=residual, step=1)
        array([0.1, 1. , 3. ], dtype=float32)
        """
        array, width = self._rows(x)
        sizes = self._counts(counts, "counts", width)
        wire = _Wire(precision, hadamard, nearest, residual, seed, step, machine_ranks)
        if wire.is_plain:
            result = self._reduce_scatterv(array, sizes, out)
        else:
            result, _ = self._quantised_reduce(array, sizes, *wire.arguments(), out)
        return result.reshape(-1, *array.shape[1:]) if width else result

    def alltoallv(
        self,
        x: npt.ArrayLike,
        counts: npt.ArrayLike,
        *,
        recv_counts: npt.ArrayLike | None = None,
        out: Array | None = None,
    ) -> Array:
        """Send a part of an array to each rank; get what each sends here, in rank order.

        Parameters
        ----------
        x : array [sum of counts, ...]
            Parts for rank 0, 1, ... one after the other.
        counts : sequence of int, one for each rank
            Entries of the first axis for each rank, 0 included.
        recv_counts : sequence of int, optional
            Entries that come from each rank. All ranks give them, or none; without them ranks
            tell each other first.
        out : array, optional
            Where the result goes.

        Returns
        -------
        array [sum of recv_counts, ...]

        Raises
        ------
        dcp.MismatchError
            `recv_counts` are not what the others send.

        Examples
        --------
        >>> dcp.init().alltoallv(np.arange(2, dtype=np.int64), [2])
        array([0, 1])
        """
        array, width = self._rows(x)
        sends = self._counts(counts, "counts", width)
        if recv_counts is None:
            mine = np.append(sends, width)
            table = self._allgatherv(mine, np.full(self.size, self.size + 1, np.int64), None)
            table = table.reshape(self.size, self.size + 1)
            self._same_width(table[:, -1])
            receives = np.ascontiguousarray(table[:, self.rank])
        else:
            receives = self._counts(recv_counts, "recv_counts", width)
        result = self._alltoallv(array, sends, receives, out)
        return result.reshape(-1, *array.shape[1:]) if width else result

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Copy an array of one rank to all.

        Parameters
        ----------
        x : array, any shape
            Read on rank `root`, overwritten on the others; same shape and dtype on all ranks.
        root : int
            Whose array it is.

        Returns
        -------
        array
            `x` itself.

        Examples
        --------
        >>> dcp.init().broadcast(np.arange(2, dtype=np.int32))
        array([0, 1], dtype=int32)
        """
        self._broadcast(x, root)
        return x

    def exchange(
        self,
        sends: Sequence[tuple[Array, int]],
        receives: Sequence[tuple[Array, int]],
    ) -> None:
        """Run messages between pairs of ranks side by side; no order can deadlock.

        Only ranks that exchange take part. Messages of one pair match in order.

        Parameters
        ----------
        sends : sequence of (array, rank)
            What goes where.
        receives : sequence of (array, rank)
            Arrays that are overwritten with what comes from that rank: as many bytes as it
            sends.

        Raises
        ------
        dcp.MismatchError
            A message has another size than its receiver expects.

        Examples
        --------
        >>> x, y = np.ones(2, np.float32), np.zeros(2, np.float32)
        >>> dcp.init().exchange([(x, 0)], [(y, 0)])
        >>> y
        array([1., 1.], dtype=float32)
        """
        self._exchange(list(sends), list(receives))

    def group(self, ranks: Sequence[int]) -> World | None:
        """A world of some of the ranks, in the order of the list.

        Collective over this world. Each rank gives the ranks of the group that it joins, so
        several groups can be made in one call; a rank that joins none gives any list without
        itself. Groups are matched by content.

        Parameters
        ----------
        ranks : sequence of int
            Distinct ranks of this world.

        Returns
        -------
        World or None
            None on a rank that is not in its list.

        Raises
        ------
        dcp.ArgumentError
            A rank that does not exist, or stands twice in the list.
        dcp.MismatchError
            Members of one group gave different lists; both are shown.

        Examples
        --------
        >>> dcp.init().group([0]).size
        1
        """
        wanted = [int(r) for r in ranks]
        if len(set(wanted)) != len(wanted) or not all(0 <= r < self.size for r in wanted):
            raise ArgumentError(f"ranks={wanted} must be distinct and lie in 0..{self.size - 1}")
        lists = self._all_lists(wanted)
        for rank, theirs in enumerate(lists):
            for member in theirs if rank in theirs else []:
                if lists[member] != theirs:
                    raise MismatchError(
                        f"groups differ: rank {rank} asked for group({theirs}), "
                        f"rank {member} for group({lists[member]})"
                    )
        member = self.rank in wanted
        part = self._split(min(wanted) if member else -1, wanted.index(self.rank) if member else 0)
        if part is None:
            return None

        return part._placed(part.rank, part.size)

    def _all_lists(self, mine: list[int]) -> list[list[int]]:
        lengths = self._allgatherv(
            np.array([len(mine)], np.int64), np.ones(self.size, np.int64), None
        )
        flat = self._allgatherv(np.array(mine, np.int64), lengths, None)
        ends = np.cumsum(lengths)
        return [flat[e - n : e].tolist() for n, e in zip(lengths, ends, strict=True)]

    def traffic(self) -> Traffic:
        """Count what has gone through this world so far. Not collective.

        Returns
        -------
        Traffic
            Calls, bytes that came, seconds of waiting for ranks and of moving data.

        Examples
        --------
        >>> world = dcp.init()
        >>> before = world.traffic()
        >>> world.barrier()
        >>> world.traffic().call_count - before.call_count
        1
        """
        return Traffic(*self._traffic())

    def emit(self, obj: Any) -> None:
        """Hand an object to `on_event` of the `dcp.launch` that started this run.

        Not collective. Only objects of rank 0 are sent; without a launcher, or on another rank,
        nothing happens.

        Parameters
        ----------
        obj : object
            Anything that can be pickled.

        Examples
        --------
        >>> dcp.init().emit({"step": 1})
        """
        if _emit is not None and self.rank == 0:
            _emit(obj)

    def abort(self, text: str) -> None:
        """End the run: every call on every rank fails with `dcp.AbortedError` and this text.

        Not collective; any thread may call it.

        Examples
        --------
        >>> world = dcp.init()
        >>> world.abort("the loss is NaN")
        >>> world.close()
        """
        self._abort(text)

    def close(self) -> None:
        """Leave. Not collective: who still waits for this rank gets `dcp.RankError`.

        Examples
        --------
        >>> dcp.init().close()
        """
        self._close()
        _open.discard(self)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self.closed:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<dcp.World closed>"
        return f"<dcp.World rank {self.rank} of {self.size}, transport {self.transport}>"


@atexit.register
def _close_all() -> None:
    for world in list(_open):
        with contextlib.suppress(_dcp.Error):
            world.close()


def init(
    backend: str | None = None,
    *,
    timeout: float | None = None,
    join_timeout: float | None = None,
    link: Link | None = None,
) -> World:
    """Meet the other ranks of this run.

    The launcher's environment tells the ranks: dcp's own (``dcp.launch``, ``dcp launch``),
    torchrun, Open MPI's or MPICH's mpirun, Slurm's srun, in this order; a process that none of
    them started is a world of one. Called again, it returns the same world as long as that is
    open. Threads of the rank are set to ``DCP_NUM_THREADS`` or cores / ranks.

    Parameters
    ----------
    backend : {None, "self", "shm"}
        None: ``shm`` for more than one rank, ``self`` for one.
    timeout : float, optional
        Seconds that a call waits for another rank; default ``DCP_TIMEOUT`` or 600.
    join_timeout : float, optional
        Seconds that ranks wait for each other here; default ``DCP_JOIN_TIMEOUT`` or 60.
    link : dcp.link.Link, optional
        Let data between ranks take as long as on this link, the same on all ranks. There are no
        windows then.

    Returns
    -------
    World

    Raises
    ------
    dcp.DeadlineError
        Ranks are missing; they are named.
    dcp.ArgumentError
        An unknown backend, or an environment that contradicts itself.
    dcp.UnsupportedError
        Ranks on several machines.

    Examples
    --------
    >>> dcp.init().size
    1
    """
    global _world, _worlds_made
    if _world is not None and not _world.closed:
        return _world
    if backend not in (None, "self", "shm"):
        if backend in ("mpi", "nccl"):
            raise UnsupportedError(f"backend={backend!r} is not in this version: use 'shm'")
        raise ArgumentError(f"backend={backend!r} must be None, 'self' or 'shm'")
    place = _env.find_place()
    if place.local_size != place.size and backend != "self":
        raise UnsupportedError(
            f"{place.size} ranks, but {place.local_size} on this machine ({place.launcher}): "
            "this version runs on one machine"
        )
    _dcp.set_num_threads(_env.thread_count(place.local_size))
    if backend == "self" or (backend is None and place.size == 1):
        if place.size > 1:
            raise ArgumentError(f"backend='self' is for one rank, but there are {place.size}")
        world = World()
    else:
        # The n-th world of every process belongs together. Ids that are too long for a file name
        # or hold other characters are replaced by their hash.
        run_id = f"{place.run_id or f'alone-{os.getpid()}'}.{_worlds_made}"
        world = World(
            rank=place.rank,
            size=place.size,
            run_id=_env.short_id(run_id),
            timeout_s=_env.seconds("DCP_TIMEOUT", 600.0) if timeout is None else timeout,
            join_timeout_s=(
                _env.seconds("DCP_JOIN_TIMEOUT", 60.0) if join_timeout is None else join_timeout
            ),
        )
    _worlds_made += 1
    _world = world._placed(place.local_rank, place.local_size)
    if link is not None:
        link.emulate(world)
    return world
