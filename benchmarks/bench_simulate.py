"""Simulated speed-ups beside the published ones, what they come from, and whether to believe them.

    pytest benchmarks/bench_simulate.py

`test_speedups`: the same sequences by every strategy on 8 to 1,024 H200. `test_chain`: from the
published baseline to `dcp`, one thing switched at a time. `test_assumptions`: the same with other
memory, tokens a step, links, jitter. `test_against_measured`: real steps on this machine against
what their plans said, judged by steps that nothing was fitted to. Recorded in extra_info.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import dcp

MODEL, MEMORY, STEPS = "llama-3-8b", 141 * 10**9, 10
DATA = dcp.simulate.PAPER
OTHERS = ("bucket-published", "inter-published", "bucket", "inter", "packed", "fixed-best")
RANKS, WARM_UP, MEASURED_STEPS, FIT_STEPS, REPEATS = 2, 1, 15, 5, 3


def h200(**constants: Any) -> dcp.CostModel:
    return dcp.CostModel.analytic(MODEL, device="h200", **constants)


def gains(result: dcp.simulate.Simulation, data: str, devices: int) -> dict[str, float]:
    """How many times faster `dcp` is than each other strategy that has a figure."""
    names = [row["strategy"] for row in result.rows if row["strategy"] != "dcp"]
    found = {name: result.speedup(data, devices, "dcp", over=name) for name in dict.fromkeys(names)}
    return {name: round(gain, 3) for name, gain in found.items() if gain is not None}


@pytest.mark.parametrize("devices", [8, 32, 128, 1024])
def test_speedups(devices: int, benchmark) -> None:
    steps = STEPS if devices <= 128 else 3
    result = benchmark.pedantic(
        lambda: dcp.simulate.training(
            h200(), DATA, devices=devices, steps=steps, memory_bytes=MEMORY
        ),
        rounds=1,
    )
    for name in DATA:
        row = result.row(name, devices, "dcp")
        over = gains(result, name, devices)
        assert set(OTHERS) <= set(over), "a strategy has no figure"
        assert min(over.values()) >= 1 - 1e-6, "behind another strategy"
        benchmark.extra_info[name] = {
            "dcp_over": over,
            "step_s": round(row["step_s"], 4),
            "gap": round(row["gap"], 5),
            "idle_share": {
                r["strategy"]: round(r["idle_share"], 3)
                for r in result.rows
                if r["distribution"] == name and r["idle_share"] is not None
            },
            "plan_ms": round(1e3 * row["plan_s"], 1),
        }
    benchmark.extra_info["published"] = {
        "inter over bucket, 32 H200": dcp.simulate.PUBLISHED_INTER,
        "with recompute, 32 H200": dcp.simulate.PUBLISHED_INTRA,
    }


def least_recompute(cost: dcp.CostModel, longest: int, ranks: int, world: int) -> str | None:
    """The least of none, selective, full at which the longest sequence fits."""
    for recompute in ("none", "selective", "full"):
        if cost.memory([longest], ranks, recompute, world_size=world) <= MEMORY:
            return recompute
    return None


@pytest.mark.parametrize("name", DATA)
def test_chain(name: str, benchmark) -> None:
    """Balance, then recompute, then sp of the whole step, then sp and recompute by sequence."""
    devices, cost = 32, h200()
    drawn = dcp.simulate.sequences(
        dcp.simulate.distribution(name), tokens_per_step=65_536 * devices, steps=STEPS
    )
    longest = max(int(lengths.max()) for lengths in drawn)
    group = next(g for g in (4, 8, 16) if least_recompute(cost, longest, g, devices))

    def one(strategy: str, recompute: str = "none") -> float:
        result = dcp.simulate.training(
            cost,
            name,
            devices=devices,
            strategies=strategy,
            steps=STEPS,
            memory_bytes=MEMORY,
            fixed_group=group,
            fixed_recompute=recompute,
        )
        return float(result.rows[0]["step_s"])

    def chain() -> list[tuple[str, float]]:
        least = least_recompute(cost, longest, group, devices)
        assert least is not None
        return [
            ("bucket-published", one("bucket-published")),
            ("balanced", one("fixed", "full")),
            ("least recompute", one("fixed", least)),
            ("best sp of a step", one("fixed-best")),
            ("dcp", one("dcp")),
        ]

    found = benchmark.pedantic(chain, rounds=1)
    info = benchmark.extra_info
    info["published_group"] = group
    for (_, before), (what, seconds) in itertools.pairwise(found):
        info[what] = round(before / seconds, 3)
    info["all"] = round(found[0][1] / found[-1][1], 3)


ASSUMPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as stated": ({}, {}),
    "80 GB a device": ({}, {"memory_bytes": 80 * 10**9}),
    "70 GB a device": ({}, {"memory_bytes": 70 * 10**9}),
    "16,384 tokens a device": ({}, {"tokens_per_step": 16_384 * 32}),
    "262,144 tokens a device": ({}, {"tokens_per_step": 262_144 * 32}),
    "100 Gb/s between nodes": (
        {"exchange_bytes_per_s": (200e9, 10e9), "ring_bytes_per_s": (300e9, 10e9)},
        {},
    ),
    "products at 800 TFLOP/s": ({"matmul_flops_per_s": 800e12}, {}),
    "a micro-batch costs 10 ms more": ({"micro_batch_s": 11e-3}, {}),
    "jitter of 10 %": ({}, {"jitter": 0.1}),
    "one rank 30 % slower": ({}, {"stragglers": {5: 1.3}}),
    "ranks move in rounds": ({}, {"rounds": True}),
}


@pytest.mark.parametrize("what", ASSUMPTIONS)
def test_assumptions(what: str, benchmark) -> None:
    constants, options = ASSUMPTIONS[what]
    settings = {"memory_bytes": MEMORY, "steps": STEPS, **options}
    names = ["bucket-published", "inter-published", "bucket", "fixed-best", "dcp"]
    result = benchmark.pedantic(
        lambda: dcp.simulate.training(
            h200(**constants), DATA, devices=32, strategies=names, **settings
        ),
        rounds=1,
    )
    for name in DATA:
        again = result.row(name, 32, "dcp")["recompute_share"]
        benchmark.extra_info[name] = {
            **gains(result, name, 32),
            "recompute_share": round(again, 4),
        }


def train_and_measure(
    world: Any, documents: Any, cost: dcp.CostModel, strategy: str
) -> list[tuple[dict[str, Any], list[float]]]:
    """Real steps: each plan, and what every rank computed at its quickest of several runs."""
    config = dcp.Transformer1D.preset("tiny", **SHAPE)
    plans, busy = [], np.full((REPEATS, WARM_UP + MEASURED_STEPS, world.size), np.inf)
    for repeat in range(REPEATS):
        loader = dcp.Loader(documents, world, cost, tokens_per_step=4096, strategy=strategy)
        with dcp.fully_shard(config, world, seed=1) as model:
            for data in itertools.islice(loader, WARM_UP + MEASURED_STEPS):
                result = model.step(
                    data.micro_batches,
                    scale=data.scale,
                    trainable=data.trainable,
                    lr=1e-3,
                    step=data.index,
                    optimizer=dcp.optim.AdamW(),
                    plan_hash=data.plan.hash,
                    groups=data.plan.groups,
                )
                busy[repeat, data.index] = result.busy_s
                if repeat == 0:
                    plans.append(data.plan.to_json())
            world.barrier()
    return list(zip(plans, busy.min(axis=0).tolist(), strict=True))[WARM_UP:]


SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 688}


@pytest.mark.parametrize("strategy", ["packed", "dcp"])
@pytest.mark.parametrize("source", ["reckoned", "profiled"])
def test_against_measured(source: str, strategy: str, benchmark) -> None:
    config = dcp.Transformer1D.preset("tiny", **SHAPE)
    if source == "profiled":
        cost = dcp.profile(config, ranks=RANKS, max_tokens=4096, seconds=10)
    else:
        cost = dcp.CostModel.for_model(config)
    documents = dcp.data.TextFiles("stdlib", max_length=4096)
    found = benchmark.pedantic(
        lambda: dcp.launch(train_and_measure, RANKS, (documents, cost, strategy))[0], rounds=1
    )
    plans = [dcp.Plan.from_json(document) for document, _ in found]
    busy = [times for _, times in found]
    whole = dcp.simulate.against_measured(plans, busy)
    scaled = dcp.simulate.against_measured(plans, busy, fit_steps=FIT_STEPS)
    info = benchmark.extra_info
    info["steps"], info["fit_steps"], info["repeats"] = len(plans), FIT_STEPS, REPEATS
    info["median_error_unscaled"] = round(whole.median_error, 4)
    info["median_error_after_scale"] = round(scaled.median_error, 4)
    info["worst_error_after_scale"] = round(max(abs(e) for e in scaled.errors), 4)
    info["scale"] = round(scaled.scale, 3)
    info["groups"] = sum(len(m.ranks) > 1 for plan in plans for m in plan.micro_batches)
    info["micro_batches"] = sum(len(plan.micro_batches) for plan in plans)
    info["cost"] = {k: v for k, v in dataclasses.asdict(cost).items() if k in _COEFFICIENTS}


_COEFFICIENTS = ("latency_s", "token_s", "square_s")
