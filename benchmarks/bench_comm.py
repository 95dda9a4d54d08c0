"""Collectives on one machine against Gloo (PyTorch) and Open MPI (mpi4py).

    pytest benchmarks/bench_comm.py        # the peers need pip install '.[bench]'

64 MB of fp32, ragged; results are checked before a figure counts. Each round runs us and every
peer one after the other, on the same cores; the best of all rounds is compared. Recorded in
extra_info, per operation: milliseconds of each side, the ratio to each peer, and for the reduction
in windows its memory traffic against that of plain copies by the same ranks in the same run. A
reduction over n ranks reads n and writes 1, a copy reads 1 and writes 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp

COUNT, REPEATS, ROUNDS = 16 << 20, 9, 3
PEERS = Path(__file__).parent / "peers"
REACH = {"gloo": {"windows": 10, "reduce_scatter": 5}, "openmpi": {"windows": 8}}  # 2 ranks


def ragged(size: int) -> list[int]:
    """Counts that grow from rank to rank: 3, 5, 7, ... shares."""
    shares = [3 + 2 * i for i in range(size)]
    counts = [COUNT * s // sum(shares) for s in shares]
    counts[-1] += COUNT - sum(counts)
    return counts


def ours(world: dcp.World) -> dict[str, float]:
    """Seconds of each operation on this rank, best of a few, after a check of the result."""

    def best(call: Callable[[], Any], inner: int = 1) -> float:
        seconds = []
        for _ in range(REPEATS):
            world.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            world.barrier()
            seconds.append((time.perf_counter() - start) / inner)
        return min(seconds)

    counts = ragged(world.size)
    first = sum(counts[: world.rank])
    mine = slice(first, first + counts[world.rank])
    plain = np.arange(COUNT, dtype=np.float32)
    x, total = plain * (world.rank + 1), plain.copy()
    for rank in range(1, world.size):  # in rank order, as the sums are
        total += plain * (rank + 1)
    np.testing.assert_array_equal(world.reduce_scatterv(x, counts), total[mine])
    np.testing.assert_array_equal(world.allreduce(x), total)
    np.testing.assert_array_equal(world.allgatherv(x[mine] * 0 + 1), np.ones(COUNT))
    window = world._window(4 * COUNT)
    part = window.part(world.rank).view(np.float32)
    part[:] = x
    world.barrier()
    even = slice(COUNT * world.rank // world.size, COUNT * (world.rank + 1) // world.size)
    window.reduce(4 * even.start, part[even])
    np.testing.assert_array_equal(part[even], total[even])

    part_out, whole_out = np.empty_like(x[mine]), np.empty_like(x)
    tiny, tiny_out = np.ones(4, np.float32), np.empty(4, np.float32)
    copied = np.empty_like(x[even])
    return {
        "windows": best(lambda: window.reduce(4 * even.start, part[even])),
        "reduce_scatter": best(lambda: world.reduce_scatterv(x, counts)),
        "reduce_scatter_out": best(lambda: world.reduce_scatterv(x, counts, out=part_out)),
        "allgather": best(lambda: world.allgatherv(x[mine], out=whole_out)),
        "allreduce": best(lambda: world.allreduce(x, out=whole_out)),
        "tiny_allreduce": best(lambda: world.allreduce(tiny, out=tiny_out), 50),
        "barrier": best(world.barrier, 50),
        "copy": best(lambda: np.copyto(copied, x[even])),
    }


def run_ours(size: int) -> dict[str, float]:
    results = dcp.launch(ours, size)
    return {name: max(r[name] for r in results) for name in results[0]}


def run_peer(command: list[str]) -> dict[str, float]:
    for _ in range(3):  # torchrun sometimes fails after the run
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines:
            result: dict[str, float] = json.loads(lines[-1])
            return result
    raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")


def peer_commands(size: int) -> dict[str, list[str]]:
    """Peers that are installed; the reasons why others are not go to the report."""
    arguments = [str(COUNT), str(REPEATS)]
    found = {}
    if importlib.util.find_spec("torch") is not None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        found["gloo"] = [*torchrun, str(PEERS / "gloo_collectives.py"), *arguments]
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is not None and importlib.util.find_spec("mpi4py") is not None:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [mpirun, *as_root, "--oversubscribe", "-n", str(size), sys.executable]
        found["openmpi"] = [*command, str(PEERS / "mpi_collectives.py"), *arguments]
    return found


def least(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(r[name] for r in rounds) for name in rounds[0]}


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int, benchmark: Any) -> None:
    peers = peer_commands(size)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ("dcp", *peers)}

    def one_round() -> None:
        rounds["dcp"].append(run_ours(size))
        for name, command in peers.items():
            rounds[name].append(run_peer(command))

    benchmark.pedantic(one_round, rounds=ROUNDS, iterations=1)
    best = {name: least(results) for name, results in rounds.items()}
    mine = best["dcp"]
    # bytes that all ranks move, over the slowest rank's time
    traffic = {"windows": (size + 1) * 4 * COUNT, "copy": 2 * 4 * COUNT}
    rates = {name: moved / mine[name] / 1e9 for name, moved in traffic.items()}
    info = benchmark.extra_info
    info["milliseconds"] = {
        name: {op: round(seconds * 1e3, 4) for op, seconds in result.items()}
        for name, result in best.items()
    }
    info["ratio"] = {
        name: {
            op: round(theirs["reduce_scatter" if op.startswith(("win", "red")) else op] / s, 2)
            for op, s in mine.items()
            if op not in ("copy", "barrier")
        }
        for name, theirs in best.items()
        if name != "dcp"
    }
    info["gigabytes_per_s"] = {name: round(rate, 1) for name, rate in rates.items()}
    info["windows_of_copy_bandwidth"] = round(rates["windows"] / rates["copy"], 3)
    info["absent"] = {
        name: "not installed: pip install '.[bench]'"
        for name in ("gloo", "openmpi")
        if name not in peers
    }
    info["to_reach"] = {"windows_of_copy_bandwidth": 0.75, **REACH} if size == 2 else None
    for key in ("milliseconds", "ratio", "gigabytes_per_s", "windows_of_copy_bandwidth", "absent"):
        print(f"{size} ranks, {key}: {info[key]}")


PRECISIONS = ("fp32", "bf16", "fp8_e4m3", "int8", "int4")


def quantised(world: dcp.World) -> dict[str, dict[str, float]]:
    """Per precision, medians of this rank: milliseconds in all, of codecs, of moving; bytes sent.

    "messages": fp32 through the communicator's own reduce_scatterv.
    """
    counts = np.array(ragged(world.size))
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal(COUNT, dtype=np.float32)
    residual, out = np.zeros_like(x), np.empty(counts[world.rank], np.float32)
    exact = world.reduce_scatterv(x, counts)
    sent = 4 * (COUNT - int(counts[world.rank]))
    rows: dict[str, list[dict[str, float]]] = {"messages": []}
    for _ in range(REPEATS):
        world.barrier()
        start = time.perf_counter()
        world.reduce_scatterv(x, counts, out=out)
        world.barrier()
        rows["messages"].append({"all_ms": 1e3 * (time.perf_counter() - start), "sent": sent})
    for precision in PRECISIONS:
        rows[precision] = []
        for step in range(REPEATS):
            residual[:] = 0
            world.barrier()
            start = time.perf_counter()
            arguments = (precision, False, False, residual, 1, step, 1)
            _, figures = world._quantised_reduce(x, counts, *arguments, out)
            world.barrier()
            rows[precision].append(
                {
                    "all_ms": 1e3 * (time.perf_counter() - start),
                    "codec_ms": 1e3 * figures["codec_s"],
                    "move_ms": 1e3 * figures["move_s"],
                    "sent": figures["sent_bytes"],
                }
            )
        error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        assert error < {"int4": 0.2, "fp32": 1e-12}.get(precision, 0.03), (precision, error)
    return {
        name: {key: float(np.median([r[key] for r in found])) for key in found[0]}
        for name, found in rows.items()
    }


def test_quantised_reduction(benchmark: Any) -> None:
    """64 MB, ragged, 2 ranks, with error feedback: few bits against fp32 messages and Gloo."""
    size = 2
    results: list[dict[str, dict[str, float]]] = []
    benchmark.pedantic(lambda: results.extend(dcp.launch(quantised, size)), rounds=1, iterations=1)
    rows = {
        name: {key: round(max(r[name][key] for r in results), 2) for key in results[0][name]}
        for name in results[0]
    }
    command = peer_commands(size).get("gloo")
    if command is not None:
        rows["gloo_fp32"] = {"all_ms": round(1e3 * run_peer(command)["reduce_scatter"], 2)}
    benchmark.extra_info["quantised_reduce_scatter"] = rows
    for name, row in rows.items():
        print(f"{name:10} {row}")
