"""Sharded tensors against PyTorch FSDP2 + Gloo: what a step costs around computing, 2 ranks.

    pytest benchmarks/bench_fsdp.py        # the peer needs torch: pip install '.[bench]'

Both sides shard the tensors of the same Llama by layer and do the same steps: every group is
gathered forward and again backward, gets a gradient (one element is not 0), is reduced; then the
true norm, clipping, AdamW. The weights must agree before a figure counts. Recorded in extra_info:
seconds of a step and peak memory (all processes, shared pages once) of both, bytes that a rank
copies in a step between buffers of its own (ours counted, FSDP2's from its copy-in and copy-out).
Whole training steps, computing included, are bench_train.py's.

Group operations are held against a plain copy by one core in the same run: bytes read and written
a second, over those of the copy.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import process_tree
import pytest
from machine import copy_bytes_per_s

import dcp
from dcp import _dcp

RANKS, STEPS, WARM_UP, ROUNDS = 2, 8, 3, 2
PEER = Path(__file__).parent / "peers" / "fsdp2_tensors.py"
SHAPES = {  # hidden, layers, intermediate, vocabulary
    "20M": (512, 6, 1408, 257),
    "110M": (768, 12, 2048, 16384),
}


def groups_of(shape: str) -> list[list[list[int]]]:
    """Shapes of the tensors of a Llama: embedding, layers, norm and head."""
    h, layers, f, vocabulary = SHAPES[shape]
    layer = [[h, h]] * 4 + [[f, h], [f, h], [h, f], [h], [h]]
    return [[[vocabulary, h]], *[layer] * layers, [[h], [vocabulary, h]]]


def steps_of(world: dcp.World, settings: dict[str, Any]) -> dict[str, Any]:
    """One rank of ours."""
    tensors = {
        f"g.{i}.{j}": tuple(shape)
        for i, group in enumerate(settings["groups"])
        for j, shape in enumerate(group)
    }
    model = dcp.fully_shard(
        tensors,
        world,
        windows=settings["windows"],
        compute_dtype=settings["dtype"],
        reduce=settings["reduce"],
    )
    order = list(model.groups)
    decay = dcp.optim.Group(match="*", weight_decay=0.1)  # torch decays vectors too
    adamw = dcp.optim.AdamW(lr=1e-3, betas=(0.9, 0.999), warmup_steps=0, groups=[decay])
    model.prefetch(order + order[-2::-1])
    seconds, copied, moved = [], 0, 0
    for step in range(settings["steps"]):
        if step == 1:
            copied, moved = (model.traffic()[k] for k in ("copied_bytes", "moved_bytes"))
        world.barrier()
        start = time.perf_counter()
        for group in order:
            model.gather(group)
            if group != order[-1]:
                model.release(group)
        for group in reversed(order):
            if group != order[-1]:
                model.gather(group)
            for name in model.groups[group]:
                model.gradients(name).reshape(-1)[:1] += 1.0
            model.release(group)
            if settings["reduce"] == "layer":
                model.reduce(group)
        model.step(adamw)
        world.barrier()
        seconds.append(time.perf_counter() - start)
    steps = settings["steps"] - 1
    traffic = model.traffic()
    first = [float(model.full_tensor(f"{g}.0").reshape(-1)[0]) for g in order]
    return {
        "seconds": seconds,
        "first": first,
        "copied": (traffic["copied_bytes"] - copied) // steps,
        "moved": (traffic["moved_bytes"] - moved) // steps,
    }


def fsdp2_copied_bytes(shape: str, item: int) -> int:
    """A rank's copies in a step of FSDP2: copy-in of its shard and copy-out of the whole of every
    all-gather, copy-in of the whole of every reduce-scatter (fp32). The last group's weights stay
    from forward to backward in ours; FSDP2 keeps only the root's, which has none here."""
    total = 0
    for group in groups_of(shape):
        rows = [[math.ceil(s[0] / RANKS), *s[1:]] for s in group]
        shard = sum(math.prod(s) for s in rows)
        total += 2 * item * (shard + RANKS * shard) + 4 * RANKS * shard
    return total


def run_ours(path: Path) -> tuple[dict[str, Any], int]:
    weighed = process_tree.run([sys.executable, __file__, str(path)])
    return json.loads(weighed.output.splitlines()[-1]), weighed.peak_bytes


MODES = {
    "windows": {"windows": True, "reduce": "step"},
    "messages": {"windows": False, "reduce": "step"},
    "layer": {"windows": False, "reduce": "layer"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_step(shape: str, dtype: str, benchmark: Any, tmp_path: Path) -> None:
    settings = {"groups": groups_of(shape), "dtype": dtype, "steps": STEPS}
    paths = {}
    for name, mode in MODES.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(settings | mode))
    has_torch = importlib.util.find_spec("torch") is not None
    runs: dict[str, list[tuple[dict[str, Any], int]]] = {name: [] for name in (*MODES, "fsdp2")}

    def one_round() -> None:
        for name, path in paths.items():
            runs[name].append(run_ours(path))
        if has_torch:
            runs["fsdp2"].append(process_tree.torchrun(RANKS, str(PEER), str(paths["messages"])))

    benchmark.pedantic(one_round, rounds=ROUNDS, iterations=1)
    first = runs["windows"][0][0]["first"]
    info = benchmark.extra_info
    info["parameters"] = sum(math.prod(s) for group in settings["groups"] for s in group)
    for name, found in runs.items():
        if not found:
            continue
        for document, _ in found:
            assert np.allclose(document["first"], first, rtol=1e-4), "not the same updates"
        # steps alternate with other work of the machine: the best of each side
        info[f"{name}_step_ms"] = round(1e3 * min(min(d["seconds"][WARM_UP:]) for d, _ in found), 1)
        info[f"{name}_peak_memory_mib"] = round(min(peak for _, peak in found) / 2**20)
    for name in MODES:
        info[f"{name}_copied_mib"] = round(runs[name][0][0]["copied"] / 2**20, 1)
        info[f"{name}_moved_mib"] = round(runs[name][0][0]["moved"] / 2**20, 1)
        if has_torch:
            info[f"{name}_times_fsdp2"] = round(info["fsdp2_step_ms"] / info[f"{name}_step_ms"], 2)
    info["fsdp2_copied_mib"] = round(
        fsdp2_copied_bytes(shape, 2 if dtype == "bfloat16" else 4) / 2**20, 1
    )


COUNT, REPEATS = 16 << 20, 7


def test_group_operations(benchmark: Any) -> None:
    """A buffer of 64 MB in 1,000 tensors, one core."""
    _dcp.set_num_threads(1)
    table = np.array([[COUNT // 1000 // 512, 512, 0, 0]] * 1000, np.int64)
    with dcp.init("self") as world:
        _dcp.set_num_threads(1)
        layout = _dcp.DBufferLayout(table, 1, 1, 0)
        a, b = (_dcp.DBuffer(world, layout, 3) for _ in range(2))
        half = _dcp.DBuffer(world, layout, 3, dtype=1)
        elements = layout.shards()[0]
        operations = {  # bytes read and written an element
            "zero": (lambda: a.fill(-1, 0.0), 4),
            "fill": (lambda: a.fill(-1, 1.5), 4),
            "scale": (lambda: a.scale(-1, 1.0), 8),
            "add": (lambda: a.add(-1, 0.5, b), 12),
            "copy": (lambda: a.copy(-1, b), 8),
            "to_bf16": (lambda: half.copy(-1, a), 6),
            "from_bf16": (lambda: a.copy(-1, half), 6),
            "nonfinite": (lambda: a.nonfinite(-1), 4),
            "norm": (lambda: a.norm(None, False, []), 4),
            "largest": (lambda: a.norm(None, True, []), 4),
        }
        rates: dict[str, float] = dict.fromkeys(operations, 0.0)
        copies = [copy_bytes_per_s()]

        def one_round() -> None:
            for name, (call, size) in operations.items():
                for _ in range(REPEATS):
                    start = time.perf_counter()
                    call()
                    took = time.perf_counter() - start
                    rates[name] = max(rates[name], elements * size / took)
            copies.append(copy_bytes_per_s())

        a.fill(-1, 0.0)
        b.fill(-1, 1.0)
        benchmark.pedantic(one_round, rounds=3, iterations=1)
        a.fill(-1, 3.0)
        assert a.norm(None, False, []) == math.sqrt(9.0 * table[:, :2].prod(1).sum())
        copy = 2 * max(copies)  # a copy reads and writes
        benchmark.extra_info["copy_gb_per_s"] = round(copy * 1e-9, 1)
        for name, rate in rates.items():
            benchmark.extra_info[f"{name}_of_copy"] = round(rate / copy, 2)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(dcp.launch(steps_of, RANKS, (given,))[0]))
