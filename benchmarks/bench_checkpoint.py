"""Checkpoints against the disk: saving, resharding from 3 to 5 ranks, saving beside the work.

    pytest benchmarks/bench_checkpoint.py --benchmark-json=FILE

2 GB of weights and moments (1 GB where less than 12 GB are free), 40 equal tensors. The limit is
`cp` of the checkpoint's own files, in turn with what is measured, all of them in the page cache,
with an fsync of each copy where dcp's files are synced too. Every result is checked: dcp reads all
checksums, and what was resharded is compared with what was saved.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dcp
from dcp import checkpoint
from dcp.checkpoint import Run

KINDS = ("weights", "adamw.m", "adamw.v")
TENSORS, COLUMNS = 40, 1024
ROUNDS = 5


def size_of_it(folder: Path) -> int:
    return 2 * 10**9 if shutil.disk_usage(folder).free > 12 * 10**9 else 10**9


def shapes_of(size: int) -> dict[str, tuple[int, int]]:
    rows = size // (4 * len(KINDS) * TENSORS * COLUMNS)
    return {f"layer.{i}": (rows, COLUMNS) for i in range(TENSORS)}


def shards_of(shapes: dict[str, Any], rank: int, size: int, fill: Any) -> dict[str, list[Run]]:
    """This rank's runs of an even cut, over tensor borders."""
    count = next(iter(shapes.values()))[0] * COLUMNS
    total = count * len(shapes)
    low, high = total * rank // size, total * (rank + 1) // size
    cuts = []
    for place, name in enumerate(shapes):
        first, end = max(low - place * count, 0), min(high - place * count, count)
        if first < end:
            cuts.append((name, first, end - first))
    return {
        kind: [Run(n, first, fill(kind, n, first, k)) for n, first, k in cuts] for kind in KINDS
    }


def value_of(kind: str, name: str, first: int, count: int) -> Any:
    """Bits that say what they are."""
    seed = zlib.crc32(f"{kind}/{name}".encode()) & 0xFFFF
    return (np.arange(first, first + count, dtype=np.uint32) * 2654435761 + seed).view(np.float32)


def empty(kind: str, name: str, first: int, count: int) -> Any:
    return np.ones(count, np.float32)  # touched, so that loading meets no page faults


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of 3 ranks, in the page cache."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shapes = shapes_of(size_of_it(folder))

    def save(world: Any) -> None:
        shards = shards_of(shapes, world.rank, 3, value_of)
        checkpoint.save(
            folder, step=1, world=world, shards=shards, shapes=shapes, state={}, config={}
        )

    dcp.launch(save, 3)
    return SimpleNamespace(folder=folder, path=folder / "step-00000001", shapes=shapes)


def copy_files(source: Path, to: Path, *, sync: bool) -> float:
    """Seconds of `cp`."""
    shutil.rmtree(to, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    to.mkdir()
    for file in source.iterdir():
        subprocess.run(["cp", file, to], check=True)
        if sync:
            handle = os.open(to / file.name, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    return time.perf_counter() - start


def report(benchmark: Any, source: Any, dcp_s: list[float], copy_s: list[float]) -> None:
    ratios = sorted(ours / theirs for ours, theirs in zip(dcp_s, copy_s, strict=True))
    benchmark.extra_info.update(
        bytes=checkpoint.show(source.path)["bytes"],
        dcp_s=dcp_s,
        copy_s=copy_s,
        ratio_of_best=min(dcp_s) / min(copy_s),
        ratio_median=ratios[len(ratios) // 2],
        to_reach=1.5,
        crc32_bytes_per_s=crc_rate(),
    )


def crc_rate() -> float:
    block = np.random.default_rng(0).integers(0, 256, 1 << 26, dtype=np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        zlib.crc32(block.data)
        best = min(best, time.perf_counter() - start)
    return block.size / best


def test_files_of_5_from_files_of_3(benchmark: Any, source: Any) -> None:
    """Read, checked, cut anew, written with checksums, synced; against cp and fsync."""
    made, copied = source.folder / "made", source.folder / "copied"
    dcp_s: list[float] = []
    copy_s: list[float] = []

    def once() -> None:
        copy_s.append(copy_files(source.path, copied, sync=True))
        shutil.rmtree(made, ignore_errors=True)
        os.sync()
        start = time.perf_counter()
        checkpoint.convert(source.path, made, ranks=5)
        dcp_s.append(time.perf_counter() - start)

    benchmark.pedantic(once, rounds=ROUNDS)
    for kind in KINDS:
        got = checkpoint.read(made, "layer.7", kind=kind).ravel()
        assert np.array_equal(
            got.view(np.uint32), value_of(kind, "layer.7", 0, got.size).view(np.uint32)
        )
    checkpoint.verify(made)
    report(benchmark, source, dcp_s, copy_s)
    shutil.rmtree(made)
    shutil.rmtree(copied)


def test_5_ranks_load_what_3_saved(benchmark: Any, source: Any) -> None:
    """Five processes, each its part of the 3 files into its arrays, checked; against cp."""
    copied = source.folder / "copied"
    dcp_s: list[float] = []
    copy_s: list[float] = []
    shapes, path = source.shapes, source.path

    def load(world: Any) -> float:
        shards = shards_of(shapes, world.rank, 5, empty)
        world.barrier()
        start = time.perf_counter()
        checkpoint.load(path, shards=shards, shapes=shapes, world=world)
        seconds = time.perf_counter() - start
        for kind, runs in shards.items():
            run = runs[-1]
            wanted = value_of(kind, run.name, run.first, run.array.size)
            assert np.array_equal(run.array.view(np.uint32), wanted.view(np.uint32))
        return seconds

    def once() -> None:
        copy_s.append(copy_files(source.path, copied, sync=False))
        shutil.rmtree(copied)
        dcp_s.append(max(dcp.launch(load, 5)))

    benchmark.pedantic(once, rounds=ROUNDS)
    report(benchmark, source, dcp_s, copy_s)


def test_saving_beside_the_work(benchmark: Any, tmp_path: Path) -> None:
    """Seconds until save returns with a copy of all 256 MB, against saving at once."""
    shapes = shapes_of(256 * 10**6)
    shards = shards_of(shapes, 0, 1, value_of)
    alone: Any = SimpleNamespace(rank=0, size=1, barrier=lambda: None)
    content: dict[str, Any] = {"shards": shards, "shapes": shapes, "state": {}, "config": {}}
    blocked_s: list[float] = []
    hidden_s: list[float] = []
    at_once_s: list[float] = []
    step = iter(range(1, 1000))
    with checkpoint.AsyncSaver(tmp_path / "beside", alone, copy_bytes=1 << 30) as saver:
        saver.save(step=0, **content)  # makes the buffer

        def once() -> None:
            saver.wait()
            os.sync()
            saver.save(step=next(step), **content)
            times = saver.wait()
            assert times is not None
            blocked_s.append(times.blocked_s)
            hidden_s.append(times.hidden_s)
            start = time.perf_counter()
            checkpoint.save(tmp_path / "at once", step=next(step), world=alone, **content)
            at_once_s.append(time.perf_counter() - start)

        benchmark.pedantic(once, rounds=ROUNDS)
    checkpoint.verify(tmp_path / "beside")
    benchmark.extra_info.update(
        bytes=sum(run.array.nbytes for runs in shards.values() for run in runs),
        blocked_s=blocked_s,
        hidden_s=hidden_s,
        at_once_s=at_once_s,
        blocked_share_of_best=min(blocked_s) / min(at_once_s),
    )
