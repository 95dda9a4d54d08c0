"""Training, 2 ranks, against PyTorch FSDP2 + Gloo + SDPA on the same model, weights and documents.

    pytest benchmarks/bench_train.py        # the peer needs torch: pip install '.[bench]'

Both sides start from the same weights and read the same documents, step by step; the loss of the
first step must agree before a figure counts. Each trains in fp32 and with bf16 factors: ours with
`model.compute_dtype=bfloat16`, whose losses must stay within 1e-3 of ours in fp32 on average,
FSDP2 in its mixed precision. Rounds alternate, the best of each side is compared. Recorded in
extra_info, those of bf16 with the prefix bf16_: tokens/s of both, their ratio, useful flops against
the fp32 FMA peak of the ranks' cores measured in the same run, peak memory of both (all processes,
shared pages once).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import process_tree
import pytest
from machine import fma_peak_gflops

import dcp

RANKS, TOKENS_PER_STEP, MAX_LENGTH, WARM_UP = 2, 16384, 4096, 2
PEER = Path(__file__).parent / "peers" / "fsdp2_llama.py"
SHAPES = {
    "3M": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 688,
    },
    "20M": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1408,
    },
}
DTYPES, LR = ("float32", "bfloat16"), 1e-3
STEPS = {"3M": 4, "20M": 2}
ROUNDS = {"3M": 2, "20M": 1}


def config_of(shape: str) -> dcp.Transformer1D:
    rest = {"tie_word_embeddings": False, "max_position_embeddings": MAX_LENGTH}
    return dcp.Transformer1D.preset("tiny", vocab_size=257, **rest, **SHAPES[shape])


def documents_of(config: dcp.Transformer1D, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and offsets of each step, in the order that `dcp train` takes them."""
    loader = dcp.Loader(
        dcp.data.TextFiles("stdlib", max_length=MAX_LENGTH),
        types.SimpleNamespace(rank=0, size=1),
        dcp.CostModel.for_model(config),
        tokens_per_step=TOKENS_PER_STEP,
    )
    out = []
    for step in loader:
        tokens = np.concatenate([batch.tokens for batch in step.micro_batches]).astype(np.uint8)
        sizes = np.concatenate([np.diff(batch.offsets) for batch in step.micro_batches])
        out.append((tokens, np.concatenate([[0], np.cumsum(sizes)])))
        if len(out) == steps:
            return out
    raise AssertionError("a loader has no end")


def write_for_peer(folder: Path, config: dcp.Transformer1D, steps: int) -> None:
    dcp.Model(config, seed=0).save_pretrained(folder)
    arrays = {}
    for i, (tokens, offsets) in enumerate(documents_of(config, steps)):
        arrays[f"tokens_{i}"], arrays[f"offsets_{i}"] = tokens, offsets
    np.savez(folder / "documents.npz", **arrays)
    settings = {
        "model": dataclasses.asdict(config),
        "steps": steps,
        "lr": LR,
        "max_length": MAX_LENGTH,
        "tokens_per_step": TOKENS_PER_STEP,
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def run_peer(folder: Path, mode: str, dtype: str) -> tuple[dict, int]:
    arguments = (str(PEER), str(folder), "--mode", mode, "--dtype", dtype)
    return process_tree.torchrun(RANKS, *arguments)


def run_ours(config: dcp.Transformer1D, steps: int) -> tuple[dict, int]:
    sets = [
        f"--set=model.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in dataclasses.asdict(config).items()
    ]
    command = [sys.executable, "-m", "dcp", "train", "--data", "stdlib", "--json", "-"]
    command += ["--ranks", str(RANKS), "--steps", str(steps), *sets, "--set=train.eval_tokens=1"]
    command += [f"--set=optimizer.lr={LR}"]
    command += ["--tokens-per-step", str(TOKENS_PER_STEP), f"--set=data.max_length={MAX_LENGTH}"]
    weighed = process_tree.run(command)
    return json.loads(weighed.output), weighed.peak_bytes


def useful_flops(config: dcp.Transformer1D, steps: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Forward and backward: 6 a matrix weight and token, 12 a layer, channel and causal pair."""
    matrices = (
        sum(int(np.prod(shape)) for name, shape in config.tensors() if len(shape) == 2)
        - config.vocab_size * config.hidden_size
    )  # the embedding is looked up
    channels = config.num_attention_heads * config.head_dim
    total = 0.0
    for _, offsets in steps:
        lengths = np.diff(offsets).astype(float)
        pairs = float((lengths * (lengths + 1) / 2).sum())
        total += 6 * matrices * lengths.sum() + 12 * channels * config.num_hidden_layers * pairs
    return total


def speed(seconds: list[float], tokens: list[int]) -> float:
    return sum(tokens[WARM_UP:]) / sum(seconds[WARM_UP:])


Run = tuple[dict, int]  # its JSON, its peak memory


def check_losses(ours: dict[str, list[Run]], theirs: dict[tuple[str, str], list[Run]]) -> None:
    """The same model and data on both sides; bf16 near fp32; runs that repeat."""
    losses = {d: [step["loss"] for step in ours[d][0][0]["steps"]] for d in DTYPES}
    for dtype, runs in ours.items():
        for document, _ in runs:
            again = [step["loss"] for step in document["steps"]]
            assert again == losses[dtype], "runs must repeat bitwise"
    # where the loss falls by a quarter in one step, two runs part for that step
    differences = np.abs(np.divide(losses["bfloat16"], losses["float32"]) - 1)
    assert differences.mean() < 1e-3 and differences.max() < 3e-3, losses
    for (mode, dtype), runs in theirs.items():
        for document, _ in runs if mode == "pad" else ():
            assert document["tokens"][0] == ours[dtype][0][0]["steps"][0]["tokens"]
            limit = 1e-5 if dtype == "float32" else 5e-3
            assert abs(document["losses"][0] / losses[dtype][0] - 1) < limit, "not the same model"


@pytest.mark.parametrize("shape", SHAPES)
def test_train(shape: str, benchmark, tmp_path: Path) -> None:
    config, steps = config_of(shape), STEPS[shape] + WARM_UP
    configs = {dtype: dataclasses.replace(config, compute_dtype=dtype) for dtype in DTYPES}
    write_for_peer(tmp_path, config, steps)
    flops = useful_flops(config, documents_of(config, steps)[WARM_UP:])
    has_torch = importlib.util.find_spec("torch") is not None
    ours: dict[str, list[Run]] = {dtype: [] for dtype in DTYPES}
    theirs: dict[tuple[str, str], list[Run]] = {
        (m, d): [] for m in ("pad", "chunk") for d in DTYPES
    }
    peaks: list[float] = []

    def one_round() -> None:
        peaks.append(fma_peak_gflops())
        for dtype, runs in ours.items():
            runs.append(run_ours(configs[dtype], steps))
        for (mode, dtype), runs in theirs.items():
            if has_torch:
                runs.append(run_peer(tmp_path, mode, dtype))

    benchmark.pedantic(one_round, rounds=ROUNDS[shape], iterations=1)
    check_losses(ours, theirs)
    info = benchmark.extra_info
    info["fma_peak_gflops_a_core"] = round(max(peaks), 1)
    for dtype, runs in ours.items():
        prefix = "" if dtype == "float32" else "bf16_"
        all_steps = [document["steps"] for document, _ in runs]
        best = max(speed([s["seconds"] for s in r], [s["tokens"] for s in r]) for r in all_steps)
        gflops = flops / min(sum(s["seconds"] for s in r[WARM_UP:]) for r in all_steps) * 1e-9
        info[f"{prefix}tokens_per_s"] = round(best, 1)
        info[f"{prefix}useful_gflops"] = round(gflops, 1)
        info[f"{prefix}share_of_peak"] = round(gflops / (RANKS * max(peaks)), 3)
        info[f"{prefix}peak_memory_mib"] = round(min(peak for _, peak in runs) / 2**20)
    for (mode, dtype), runs in theirs.items():
        if not runs:
            continue
        name = f"fsdp2_{mode}" if dtype == "float32" else f"fsdp2_bf16_{mode}"
        peer = max(speed(d["seconds"], d["tokens"]) for d, _ in runs)
        info[f"{name}_tokens_per_s"] = round(peer, 1)
        info[f"{name}_peak_memory_mib"] = round(min(peak for _, peak in runs) / 2**20)
        info[f"times_{name}"] = round(info["tokens_per_s"] / peer, 2)
        info[f"bf16_times_{name}"] = round(info["bf16_tokens_per_s"] / peer, 2)
