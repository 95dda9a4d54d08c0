"""World over shared memory and alone, against NumPy sums in rank order, bit by bit.

Ranks are threads of this process here (the core releases the GIL); test_launch.py has processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.world import World

DTYPES = ("float32", "float64", "int32", "int64", "uint8")


@pytest.fixture(autouse=True, scope="module")
def quick_switches() -> Iterator[None]:
    """Ranks wait for each other all the time: the GIL must change hands quickly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def run(size: int, body: Callable[[World], Any], **options: Any) -> list[Any]:
    """What `body(world)` returns on each rank; exceptions are returned too."""
    results: list[Any] = [None] * size
    run_id = f"test-{uuid.uuid4().hex}"

    def rank_main(rank: int) -> None:
        try:
            world = World(rank=rank, size=size, run_id=run_id, **options)._placed(rank, size)
            try:
                results[rank] = body(world)
            finally:
                world.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def random_array(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def sum_in_order(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


counts_of = st.sampled_from([0, 0, 1, 2, 3, 17, 1000, 70_000])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
def test_collectives_are_numpy(data: st.DataObject, size: int, dtype: str) -> None:
    counts = data.draw(st.lists(counts_of, min_size=size, max_size=size), "counts")
    table = np.array(
        data.draw(
            st.lists(
                st.lists(counts_of, min_size=size, max_size=size), min_size=size, max_size=size
            ),
            "table",
        )
    )
    root = data.draw(st.integers(0, size - 1), "root")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    starts = np.cumsum([0, *counts])
    arrays = [random_array(rng, starts[-1], dtype) for _ in range(size)]
    sends = [random_array(rng, table[s].sum(), dtype) for s in range(size)]
    total = sum_in_order(arrays)
    parts = [np.split(sends[s], np.cumsum(table[s])[:-1]) for s in range(size)]

    def body(world: World) -> None:
        me = world.rank
        own = slice(starts[me], starts[me + 1])
        x = arrays[me]
        np.testing.assert_array_equal(world.reduce_scatterv(x, counts), total[own])
        np.testing.assert_array_equal(world.allreduce(x), total)
        np.testing.assert_array_equal(world.allreduce(x, "max"), np.max(arrays, axis=0))
        np.testing.assert_array_equal(world.allreduce(x, "min"), np.min(arrays, axis=0))
        gathered = world.allgatherv(x[own].copy())
        expected = [a[starts[r] : starts[r + 1]] for r, a in enumerate(arrays)]
        np.testing.assert_array_equal(gathered, np.concatenate(expected))
        came = np.concatenate([parts[s][me] for s in range(size)])
        np.testing.assert_array_equal(world.alltoallv(sends[me], table[me]), came)
        given = world.alltoallv(sends[me], table[me], recv_counts=table[:, me])
        np.testing.assert_array_equal(given, came)
        np.testing.assert_array_equal(world.broadcast(x.copy(), root), arrays[root])
        again = x.copy()
        assert world.allreduce(again, out=again).base is again
        np.testing.assert_array_equal(again, total)

    well(run(size, body))


@settings(max_examples=15, deadline=None)
@given(data=st.data(), size=st.integers(1, 5))
def test_groups(data: st.DataObject, size: int) -> None:
    """Any partition into groups, each in any order, in one call."""
    order = data.draw(st.permutations(range(size)), "order")
    group_of = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size), "groups")
    groups = [[r for r in order if group_of[r] == g] for g in range(3)]

    def body(world: World) -> None:
        mine = groups[group_of[world.rank]]
        group = world.group(mine)
        assert group is not None
        assert (group.rank, group.size) == (mine.index(world.rank), len(mine))
        np.testing.assert_array_equal(
            group.allgatherv(np.array([world.rank], np.int64)), np.array(mine)
        )
        group.close()
        assert world.allreduce(np.array([1], np.int64))[0] == size

    well(run(size, body))


def test_groups_in_opposite_orders() -> None:
    """Case X-02: {0} and {1, 2} created in opposite orders work, matched by content."""

    def body(world: World) -> list[Any]:
        calls = [[0], [1, 2]] if world.rank == 0 else [[1, 2], [0]]
        groups = [world.group(ranks) for ranks in calls]
        return [None if g is None else (g.rank, g.size) for g in groups]

    expected = [[(0, 1), None], [(0, 2), None], [(1, 2), None]]
    for _ in range(20):
        assert well(run(3, body)) == expected


def test_groups_that_contradict() -> None:
    """Case X-02: lists that do not fit together are an error on all ranks that shows both."""

    def body(world: World) -> None:
        world.group([[0, 1], [1, 2], [1, 2]][world.rank])

    for result in run(3, body):
        assert isinstance(result, dcp.MismatchError)
        assert "group([0, 1])" in str(result) and "group([1, 2])" in str(result)


def test_only_members_call() -> None:
    """Case X-02: a rank that leaves a group call out fails on all, with both sides named."""

    def body(world: World) -> None:
        if world.rank > 0:
            world.group([1, 2])
        world.barrier()

    for result in run(3, body):
        assert isinstance(result, dcp.MismatchError)
        assert "barrier" in str(result) and "allgatherv" in str(result)


def test_different_numbers_of_calls() -> None:
    """Case F-08: 3 micro-batches on one rank, 2 on the other: an error at once, not a hang."""

    def body(world: World) -> None:
        for _ in range(3 if world.rank == 0 else 2):
            world.allreduce(np.ones(4, np.float32))
        world.barrier()

    for result in run(2, body):
        assert isinstance(result, dcp.MismatchError)
        assert "rank 0 called allreduce of 4 float32 (sum) (call 3)" in str(result)
        assert "rank 1 called barrier (call 3)" in str(result)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (
            lambda w: w.allreduce(np.zeros(5 + w.rank, np.float32)),
            ("rank 0 called allreduce of 5 float32", "rank 1 called allreduce of 6 float32"),
        ),
        (
            lambda w: w.allreduce(np.zeros(5, ["f4", "f8"][w.rank])),
            ("allreduce of 5 float32", "allreduce of 5 float64"),
        ),
        (lambda w: w.allreduce(np.zeros(5), ["sum", "max"][w.rank]), ("(sum)", "(max)")),
        (
            lambda w: w.reduce_scatterv(np.zeros(5), [[2, 3], [3, 2]][w.rank]),
            ("(counts 2, 3)", "(counts 3, 2)"),
        ),
        (lambda w: w.broadcast(np.zeros(5), w.rank), ("from rank 0", "from rank 1")),
        (
            lambda w: w.alltoallv(np.zeros(2), [1, 1], recv_counts=[1, 1 + w.rank][::-1]),
            ("rank 0 sends 1 float64 to rank 1, which expects 2",),
        ),
        (
            lambda w: w.allgatherv(np.zeros((2, 3 + w.rank))),
            ("3 elements on rank 0, 4 on rank 1",),
        ),
    ],
)
def test_disagreements(call: Callable[[World], Any], texts: tuple[str, ...]) -> None:
    for result in run(2, call):
        assert isinstance(result, dcp.MismatchError), result
        for text in texts:
            assert text in str(result)


def test_errors_stick() -> None:
    def body(world: World) -> tuple[str, str]:
        with pytest.raises(dcp.MismatchError) as first:
            world.broadcast(np.zeros(1), world.rank)
        with pytest.raises(dcp.MismatchError) as second:
            world.barrier()
        return str(first.value), str(second.value)

    results = well(run(3, body))
    assert len({text for pair in results for text in pair}) == 1


def test_missing_rank() -> None:
    failed = threading.Semaphore(0)

    def body(world: World) -> None:
        if world.rank == 1:  # comes when it is too late
            for _ in range(2):
                failed.acquire()
            world.barrier()
        try:
            world.barrier()
        finally:
            failed.release()

    for result in run(3, body, timeout_s=0.2):
        assert isinstance(result, dcp.DeadlineError)
        assert "rank 1 (process " in str(result)
        assert "did not come to barrier (call 1) within 0.2 s" in str(result)


def test_abort() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            world.abort("the loss is NaN")
        world.barrier()

    for result in run(3, body):
        assert isinstance(result, dcp.AbortedError)
        assert str(result).startswith("rank 1 (process ")
        assert str(result).endswith("aborted: the loss is NaN")


def test_context_manager_aborts_on_an_error() -> None:
    def body(world: World) -> None:
        with world:
            if world.rank == 0:
                raise KeyError("weights")
            world.barrier()

    results = run(2, body)
    assert isinstance(results[0], KeyError)
    assert isinstance(results[1], dcp.AbortedError)
    assert "KeyError: 'weights'" in str(results[1])


def test_rows_keep_their_shape() -> None:
    def body(world: World) -> None:
        x = np.arange(24, dtype=np.int32).reshape(4, 3, 2) + world.rank
        total = 2 * (x - world.rank) + 1
        mine = total[:1] if world.rank == 0 else total[1:]
        np.testing.assert_array_equal(world.reduce_scatterv(x, [1, 3]), mine)
        assert world.allgatherv(x).shape == (8, 3, 2)
        assert world.alltoallv(x, [3, 1]).shape == ((6, 3, 2) if world.rank == 0 else (2, 3, 2))
        assert world.allreduce(x).shape == x.shape
        assert world.allreduce(2.0) == 4.0
        assert world.allgatherv(np.zeros((2, 0))).shape == (4, 0)

    well(run(2, body))


def test_exchange() -> None:
    """Every rank to every rank, two messages a pair, larger than a ring, any order."""

    def body(world: World) -> None:
        size, me = world.size, world.rank
        sends, receives = [], []
        for step in range(size):
            to = (me + step) % size
            sends += [(np.full(7, me * 10 + to, np.int64), to)]
            sends += [(np.full(200_000, me - to, np.float32), to)]
        for source in range(size):
            receives += [(np.zeros(7, np.int64), source), (np.zeros(200_000, np.float32), source)]
        world.exchange(sends, receives)
        for array, source in receives:
            wanted = source * 10 + me if array.dtype == np.int64 else source - me
            assert (array == wanted).all()

    for size in (1, 2, 4):
        well(run(size, body))


def test_exchange_of_different_sizes() -> None:
    def body(world: World) -> None:
        x = np.zeros(4 + world.rank, np.float32)
        world.exchange([(x, 1)], []) if world.rank == 0 else world.exchange([], [(x, 0)])
        world.barrier()

    for result in run(2, body):
        assert isinstance(result, dcp.MismatchError)
        assert "rank 0 sent 16 bytes to rank 1, which expected 20" in str(result)


def test_a_forked_child_is_not_the_rank() -> None:
    """A child that a rank forks may close its copies; the rank goes on."""

    def body(world: World) -> int:
        world.barrier()
        if world.rank == 0:
            pid = os.fork()
            if pid == 0:
                world.close()
                os._exit(0)
            os.waitpid(pid, 0)
        return int(world.allreduce(np.array([1], np.int64))[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads
        assert well(run(2, body)) == [2, 2]


def test_windows() -> None:
    """Views of all ranks' memory; a view outlives window, world and the other ranks."""

    def body(world: World) -> np.ndarray:
        window = world._window(4 * 1000 if world.rank < 2 else 0)
        assert window.part(2).size == 0 and not window.part(0).any()
        with pytest.raises(dcp.ArgumentError, match="rank 3"):
            window.part(3)
        with pytest.raises(dcp.ArgumentError, match="rank 2's part of 0 bytes"):
            window.reduce(0, np.zeros(1, np.float32))
        world.barrier()  # all have seen the zeros
        if world.rank < 2:
            window.part(world.rank).view(np.float32)[:] = world.rank + 1
        world.barrier()
        return window.part(1).view(np.float32)

    for view in well(run(3, body)):
        assert (view == 2).all()

    def sums(world: World) -> None:
        window = world._window(4 * 1000)
        mine = window.part(world.rank).view(np.float32)
        mine[:] = np.arange(1000) * (world.rank + 1)
        world.barrier()
        first, end = 500 * world.rank, 500 * (world.rank + 1)
        window.reduce(4 * first, mine[first:end])
        np.testing.assert_array_equal(mine[first:end], 3 * np.arange(first, end))
        with pytest.raises(dcp.DTypeError, match="out"):
            window.reduce(0, np.zeros(1))

    well(run(2, sums))


class TestArguments:
    """Wrong arguments are named, on the rank that gave them, before anyone waits."""

    @pytest.fixture
    def world(self) -> Iterator[World]:
        with World()._placed(0, 1) as world:
            yield world

    def test_dtypes(self, world: World) -> None:
        for dtype in ("float16", "complex64", "bool", "U3", "int16"):
            with pytest.raises(dcp.DTypeError, match="dtype"):
                world.allreduce(np.zeros(3, dtype))
        with pytest.raises(dcp.DTypeError):
            world.allreduce(np.zeros((4, 4), np.float32).T[::2])

    def test_values(self, world: World) -> None:
        x = np.zeros(3, np.float32)
        with pytest.raises(dcp.ArgumentError, match="op='mean'"):
            world.allreduce(x, "mean")
        with pytest.raises(dcp.ArgumentError, match="counts"):
            world.reduce_scatterv(x, [2])
        with pytest.raises(dcp.ArgumentError, match=r"counts=\[-1\]"):
            world.reduce_scatterv(x, [-1])
        with pytest.raises(dcp.ArgumentError, match="1 integers"):
            world.reduce_scatterv(x, [1, 2])
        with pytest.raises(dcp.ArgumentError, match="1 integers"):
            world.reduce_scatterv(x, [3.0])
        with pytest.raises(dcp.ArgumentError, match="root 1"):
            world.broadcast(x, 1)
        with pytest.raises(dcp.ArgumentError, match="out has 2 elements"):
            world.allreduce(x, out=np.zeros(2, np.float32))
        with pytest.raises(dcp.DTypeError, match="out"):
            world.allreduce(x, out=np.zeros(3))
        with pytest.raises(dcp.ArgumentError, match="distinct"):
            world.group([0, 0])
        frozen = np.zeros(3, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(dcp.ArgumentError, match="read-only"):
            world.broadcast(frozen)
        np.testing.assert_array_equal(world.allreduce(frozen), x)  # only read

    def test_closed(self) -> None:
        world = World()._placed(0, 1)
        assert repr(world) == "<dcp.World rank 0 of 1, transport self>"
        world.close()
        world.close()
        assert repr(world) == "<dcp.World closed>"
        with pytest.raises(dcp.StateError, match="closed"):
            world.barrier()
        with pytest.raises(dcp.StateError, match="closed"):
            _ = world.rank

    def test_one_thread_at_a_time(self) -> None:
        refused = threading.Event()

        def body(world: World) -> str:
            if world.rank == 1:
                refused.wait(60)
                world.barrier()
                return ""
            thread = threading.Thread(target=world.barrier)
            thread.start()
            while not refused.is_set():
                try:
                    world._split(-2, 0)  # a wrong argument: harmless before the barrier began
                except dcp.ArgumentError:
                    continue
                except dcp.StateError as error:
                    text = str(error)
                    refused.set()
            thread.join()
            return text

        assert "one thread at a time" in well(run(2, body))[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_traffic_counts_what_came(size: int) -> None:
    def body(world: World) -> None:
        x = np.ones(12, np.float32)
        start = time.perf_counter()
        world.barrier()
        world.allgatherv(x[: 1 + world.rank])  # tells lengths first: 16 bytes of each rank
        world.reduce_scatterv(x, [12] + [0] * (size - 1))
        world.broadcast(x, 0)
        world.alltoallv(x[:size], [1] * size, recv_counts=[1] * size)
        got = np.empty(3, np.float64)
        world.exchange([(np.ones(3), (world.rank + 1) % size)], [(got, (world.rank - 1) % size)])
        with pytest.raises(dcp.ArgumentError):
            world.reduce_scatterv(x, [1] * size)  # not counted
        traffic = world.traffic()
        others = [r for r in range(size) if r != world.rank]
        expected = (16 + 4) * (size - 1) + 4 * sum(1 + r for r in others)
        expected += 12 * 4 * (size - 1) if world.rank == 0 else 12 * 4
        expected += 24 if size > 1 else 0
        assert traffic.call_count == 7
        assert traffic.received_bytes == expected
        assert traffic.wait_s >= 0 and (traffic.move_s > 0) == (size > 1)
        assert traffic.wait_s + traffic.move_s <= time.perf_counter() - start

    well(run(size, body))
