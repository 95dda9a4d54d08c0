"""Moves between placements against plain copies of the same bytes by the same ranks.

    pytest benchmarks/bench_redistribute.py

fp32 tensors of 64 and 256 MB on 2 ranks; results are checked before a figure counts. Each round
takes, one after the other: the move in windows (ranks copy from each other's memory), the move of
NumPy arrays by messages, and a copy (`numpy.copyto`) in which each rank writes as many bytes as
the move makes it write. The best of all rounds are compared; recorded in extra_info:
milliseconds, gigabytes per second that reach their place (all ranks), and the ratio to the copies,
by the clock and by processor time (which leaves out waits, for other ranks and for a busy machine).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dcp
from dcp import RaggedShard, Replicate, Shard

RANKS, ROUNDS = 2, 15
REACH = 0.8  # of the machine's copy bandwidth, in windows
CASES: dict[str, tuple[Any, Any]] = {
    "ragged to ragged": (RaggedShard((3, 1)), RaggedShard((1, 3))),
    "rows to columns": (Shard(0), Shard(1)),
    "even to whole": (Shard(0), Replicate()),
    "whole to ragged": (Replicate(), RaggedShard((1, 3))),
}


Times = dict[str, list[tuple[float, float]]]


def timed(world: dcp.World, call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds from when all ranks begin until all are through, and of this rank's processor."""
    world.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    call()
    busy = time.thread_time() - busy
    world.barrier()
    return time.perf_counter() - start, busy


def ours(world: dcp.World, name: str, megabytes: int) -> tuple[int, Times]:
    mesh = dcp.Mesh(world)
    shape = (megabytes * 256, 1024)
    source, target = ([placement] for placement in CASES[name])
    part, window = mesh.allocate(shape, source)
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    part[...] = dcp.redistribute(whole, shape, mesh, [Replicate()], source).array
    plain = part.copy()
    out = dcp.redistribute(whole, shape, mesh, [Replicate()], target).array
    expected = out.copy()
    written = out.reshape(-1)
    copied = np.ascontiguousarray(whole.reshape(-1)[: written.size])
    del whole

    def in_window() -> None:
        dcp.redistribute(part, shape, mesh, source, target, out=out, window=window)

    def by_messages() -> None:
        dcp.redistribute(plain, shape, mesh, source, target, out=out)

    results: Times = {"window": [], "messages": [], "copy": []}
    for call in (in_window, by_messages):
        out.fill(-1)
        call()
        np.testing.assert_array_equal(out, expected)
    for _ in range(ROUNDS):
        results["window"].append(timed(world, in_window))
        results["messages"].append(timed(world, by_messages))
        results["copy"].append(timed(world, lambda: np.copyto(written, copied)))
    return written.nbytes, results


@pytest.mark.parametrize("megabytes", [64, 256])
@pytest.mark.parametrize("name", CASES)
def test_redistribution(name: str, megabytes: int, benchmark: Any) -> None:
    runs: list[list[tuple[int, Times]]] = []
    benchmark.pedantic(
        lambda: runs.append(dcp.launch(ours, RANKS, args=(name, megabytes))), rounds=1, iterations=1
    )
    ranks = [times for _, times in runs[0]]
    kinds = ("window", "messages", "copy")
    # barriers make ranks agree on the clock to within microseconds; the slower one counts
    seconds, busy = (
        {kind: min(max(r[kind][i][clock] for r in ranks) for i in range(ROUNDS)) for kind in kinds}
        for clock in (0, 1)
    )
    moved = sum(count for count, _ in runs[0])
    info = benchmark.extra_info
    info["milliseconds"] = {kind: round(s * 1e3, 2) for kind, s in seconds.items()}
    info["gigabytes_per_s"] = {kind: round(moved / s / 1e9, 2) for kind, s in seconds.items()}
    for label, times in (("of_copy_bandwidth", seconds), ("of_copy_processor_time", busy)):
        info[label] = {kind: round(times["copy"] / times[kind], 3) for kind in kinds[:2]}
    info["to_reach"] = {"window": REACH}
    for key in ("milliseconds", "gigabytes_per_s", "of_copy_bandwidth", "of_copy_processor_time"):
        print(f"{name}, {megabytes} MB, {key}: {info[key]}")
