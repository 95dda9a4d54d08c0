"""Seconds of an optimizer's step alone, 2 ranks, and bytes of state a parameter.

``pytest benchmarks/bench_optim.py`` (pytest-benchmark; ``--benchmark-json=FILE`` keeps the
figures, ``-s`` prints them). A step has one micro-batch of 64 tokens on one rank, so gradients are
real and computing costs little; the same step with all tensors frozen is taken off. Best of some
steps; Shampoo, whose steps differ, has the mean of a cycle and its first step apart. ``cpu_s`` is
the processor time of the busier rank: on a machine with other work the figure to compare.

``bound_s`` is what the machine allows. AdamW: 28 bytes a parameter at the speed of a copy (which
counts what is read and written). Muon: the products of Newton-Schulz, 4 n^2 m + 2 n^3 flops a step
of the iteration, on the busiest rank at the FMA peak of a core; symmetry lets it be undercut.

``test_final_loss`` trains the byte model `tiny` on Python's standard library for 60 steps of 4,096
tokens with each optimizer: the same weights, documents and order, rates by `lr_beside` 3e-3.
"""

from __future__ import annotations

import time
import types
from typing import Any

import numpy as np
import pytest
from bench_train import config_of
from machine import copy_bytes_per_s, fma_peak_gflops

import dcp

RANKS, STEPS = 2, 6
TOKENS = np.random.default_rng(0).integers(0, 256, 64).astype(np.int32)
NAMES = [name for name in ("adamw", "adamw8bit", "muon", "shampoo") if name in dcp.optim.OPTIMIZERS]


def micro_batches(model: Any, step: int) -> list[Any]:
    if model.world.rank > 0 and not model.in_rounds:
        return []
    tokens = np.roll(TOKENS, step)[: 0 if model.world.rank > 0 else len(TOKENS)]
    labels = np.append(tokens[1:], -100).astype(np.int32)[: len(tokens)]
    return [
        types.SimpleNamespace(
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            labels=labels,
            weights=None,
            row_ids=np.arange(len(tokens)),
        )
    ]


def run_steps(world: Any, shape: str, optimizer: Any, windows: bool, steps: int) -> dict[str, Any]:
    with dcp.fully_shard(config_of(shape), world, seed=0, windows=windows) as model:
        model.set_optimizer(optimizer)
        kinds = {kind: runs for kind, runs in model.shards().items() if kind != "weights"}
        state_bytes = sum(run.array.nbytes for runs in kinds.values() for run in runs)
        del kinds
        seconds, cpu = [], []
        for step in range(steps):
            batches = micro_batches(model, step)
            world.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            model.step(batches, scale=1 / 63, trainable=63, lr=1e-3, step=step, optimizer=optimizer)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        count = model.config.parameter_count()
    return {"seconds": seconds, "cpu": cpu, "state_bytes": state_bytes, "parameters": count}


def newton_schulz_flops(optimizer: Any, shape: str) -> float:
    total = 0.0
    tensors = config_of(shape).tensors()
    for (_, (*_, rows, columns)), rule in zip(
        [(name, (1, *of)) for name, of in tensors], optimizer.rules(tensors), strict=True
    ):
        n, m = sorted((rows, columns))
        total += rule.iterations * (4 * n * n * m + 2 * n**3)
    return total


@pytest.mark.parametrize("shape", ["3M", "20M"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("windows", [True, False], ids=["windows", "messages"])
def test_step_of_an_optimizer(benchmark: Any, shape: str, name: str, windows: bool) -> None:
    optimizer = dcp.optim.OPTIMIZERS[name]()
    cycle = getattr(optimizer, "every", 0)
    frozen = dcp.optim.AdamW(groups=[{"match": "*", "optimizer": "none"}])
    rest = dcp.launch(run_steps, RANKS, (shape, frozen, windows, STEPS))
    idle, idle_cpu = min(rest[0]["seconds"]), max(min(r["cpu"]) for r in rest)
    steps = cycle + 1 if cycle else STEPS
    ranks = benchmark.pedantic(
        lambda: dcp.launch(run_steps, RANKS, (shape, optimizer, windows, steps)), rounds=1
    )
    seconds = ranks[0]["seconds"]
    assert len(seconds) == steps
    typical = (lambda x: float(np.mean(x[1:]))) if cycle else min
    info: dict[str, Any] = {"step_s": typical(seconds) - idle, "rest_of_step_s": idle}
    info["cpu_s"] = max(typical(r["cpu"]) for r in ranks) - idle_cpu
    info["state_bytes_a_parameter"] = sum(r["state_bytes"] for r in ranks) / ranks[0]["parameters"]
    if cycle:
        cpu = max(ranks[0]["cpu"][0], ranks[1]["cpu"][0]) - idle_cpu
        info |= {
            "first_step_cpu_s": cpu,
            "first_step_s": seconds[0] - idle,
            "slowest_step_s": max(seconds[1:]) - idle,
        }
    if name == "adamw":
        info["bound_s"] = 28 * ranks[0]["parameters"] / RANKS / (2 * copy_bytes_per_s())
    if name == "muon":
        flops = newton_schulz_flops(optimizer, shape)
        info["bound_s"] = flops / RANKS / (fma_peak_gflops() * 1e9)
        info["flops"] = flops
    benchmark.extra_info.update(info)
    print("\n", name, shape, "windows" if windows else "messages", info)


def final_loss(world: Any, name: str) -> dict[str, float]:
    config = dcp.Transformer1D.preset("tiny")
    text, cost = dcp.data.TextFiles("stdlib"), dcp.CostModel.for_model(config)
    loader = dcp.Loader(text, world, cost, tokens_per_step=4096, eval_share=0.01)
    kind = dcp.optim.OPTIMIZERS[name]
    with dcp.fully_shard(config, world) as model:
        trainer = dcp.Trainer(model, kind(lr=kind.lr_beside(3e-3)), loader, eval_tokens=16384)
        report = trainer.fit(steps=60)
    losses = [record.loss for record in report.steps]
    return {
        "first_loss": losses[0],
        "last_10_losses": float(np.mean(losses[-10:])),
        "eval_loss": report.eval_loss,
    }


@pytest.mark.parametrize("name", NAMES)
def test_final_loss(benchmark: Any, name: str) -> None:
    ranks = benchmark.pedantic(lambda: dcp.launch(final_loss, RANKS, (name,)), rounds=1)
    assert ranks[0] == ranks[1] and ranks[0]["last_10_losses"] < ranks[0]["first_loss"]
    benchmark.extra_info.update(ranks[0])
    print("\n", name, ranks[0])
