"""The step planner: its time, and how far its plans end from the bound.

    pytest benchmarks/bench_plan.py

Time: a step of 4,096 long-tailed sequences on 32, 128 and 1,024 ranks, `dcp` with all other
strategies priced, as `dcp.plan` is called. Gap: makespan over the least that any plan could take,
over length distributions, worlds and sequences a rank; the distribution of it is in extra_info,
together with the winners and the gaps of `packed` on the same steps. Costs are those of llama-3-8b
on H200s with 141 GB (`CostModel.analytic`): analytic, not measured.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import dcp

MEMORY_BYTES, LONGEST = 141 * 10**9, 131072
KINDS = {"short": (5.5, 0.8), "balanced": (7.0, 1.0), "long": (7.5, 1.6), "equal": None}
TO_REACH_MS = {32: 5.0, 128: None, 1024: 20.0}
STEPS = 4


def lengths_of(kind: str, count: int, seed: int) -> np.ndarray:
    """Log-normal lengths cut at LONGEST, or all 4,096."""
    shape = KINDS[kind]
    if shape is None:
        return np.full(count, 4096)
    drawn = np.random.default_rng(seed).lognormal(*shape, count)
    return drawn.clip(1, LONGEST).astype(np.int64)


def cost() -> dcp.CostModel:
    return dcp.CostModel.analytic("llama-3-8b", device="h200")


@pytest.mark.parametrize("world", [32, 128, 1024])
def test_time_of_4096_sequences(benchmark: Any, world: int) -> None:
    lengths, prices = lengths_of("long", 4096, 1), cost()

    def make() -> dcp.Plan:
        return dcp.plan(lengths, prices, world_size=world, memory_bytes=MEMORY_BYTES)

    plan = make().verify()
    cpu_s = []

    def timed() -> None:
        start = time.process_time()
        make()
        cpu_s.append(time.process_time() - start)

    benchmark.pedantic(timed, rounds=15, warmup_rounds=2)
    benchmark.extra_info.update(
        world=world,
        sequences=len(lengths),
        micro_batches=len(plan.micro_batches),
        gap=plan.gap,
        winner=plan.winner,
        cpu_ms=min(cpu_s) * 1e3,  # on a shared machine the better figure
        to_reach_ms=TO_REACH_MS[world],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a_rank", [1, 4, 8, 16, 32])
def test_gap(benchmark: Any, kind: str, a_rank: int) -> None:
    prices = cost()
    gaps: list[float] = []
    packed: list[float] = []
    winners: Counter[str] = Counter()

    def plan_all() -> None:
        for world in (8, 32, 128):
            for seed in range(STEPS):
                # also counts that do not divide; all are equal in "equal"
                count = a_rank * world + (seed * world // STEPS if kind == "equal" else 0)
                lengths = lengths_of(kind, count, 1000 * world + seed)
                options: dict[str, Any] = {"world_size": world, "memory_bytes": MEMORY_BYTES}
                plan = dcp.plan(lengths, prices, **options).verify()
                assert plan.makespan >= plan.bound
                gaps.append(plan.gap)
                winners[plan.winner] += 1
                packed.append(dcp.plan(lengths, prices, strategy="packed", **options).gap)

    benchmark.pedantic(plan_all, rounds=1)
    p50, p90 = np.percentile(gaps, [50, 90])
    benchmark.extra_info.update(
        kind=kind,
        sequences_a_rank=a_rank,
        plans=len(gaps),
        gap={"mean": np.mean(gaps), "p50": p50, "p90": p90, "max": max(gaps)},
        packed_gap={"mean": np.mean(packed), "max": max(packed)},
        winners=dict(winners),
    )
