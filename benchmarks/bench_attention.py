"""Attention on one core: every instruction set and PyTorch's SDPA, lengths 64 to 4096, in float32
and with factors in bfloat16 (``bf16``: the set in use; ``torch-bf16``: tensors in bfloat16).

``pytest benchmarks/bench_attention.py`` (pytest-benchmark; ``--benchmark-json=FILE`` keeps the
figures). Causal, head dimension 64. Two kinds of work:

- ``nN``: sequences of N tokens, enough of them that a call takes about a millisecond
- ``documents``: 200 documents of 1 to 2048 tokens, log-normal, as they come; PyTorch has no packed
  CPU path for them, so it gets one call a document

Results are checked first, against float64 or against each other. ``gflops`` counts useful work:
4 D n (n + 1) / 2 a head forward, 2.5 times that backward, of the fastest round. ``share`` is that
over the FMA peak of one core with the same instruction set (of bfloat16 products for those),
probed before and after: what other jobs take away is not measured. ``torch_ratio`` (on dcp's
rows): PyTorch's time over dcp's in the same precision, and ``float32_ratio`` (on ``bf16``): dcp's
float32 time over this one, all fastest rounds, taken in turns.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import fma_peak_gflops

import dcp
from dcp import _dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import ref_attention as ref

torch: Any
try:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
except ImportError:
    torch = None

DIM = 64
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]
WORK = [f"n{n}" for n in LENGTHS] + ["documents"]
ISAS = [name for name in _dcp.cpu_info()["isas"] if name != "avx512bf16"]  # fp32 as avx512
ROUNDS = 30


def offsets_and_heads(work: str) -> tuple[np.ndarray, int]:
    if work == "documents":
        rng = np.random.default_rng(1)
        lengths = np.clip(np.exp(rng.normal(4.6, 1.0, 200)), 1, 2048).astype(np.int64)
        return np.concatenate(([0], np.cumsum(lengths))), 4
    n = int(work[1:])
    return np.arange(0, max(n, 512) + 1, n), 8 if n <= 256 else 2 if n <= 1024 else 1


class Problem:
    """Arrays of one piece of work, and the calls that are timed."""

    def __init__(self, work: str, compute: str = "float32") -> None:
        self.compute = compute
        self.offsets, heads = offsets_and_heads(work)
        rng = np.random.default_rng(0)
        shape = (int(self.offsets[-1]), heads, DIM)
        self.q, self.k, self.v, self.dout = (
            rng.standard_normal(shape, dtype=np.float32) for _ in range(4)
        )
        n = np.diff(self.offsets).astype(float)
        self.flops = float((2 * DIM * n * (n + 1)).sum()) * heads
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        return dcp.ops.attention(self.q, self.k, self.v, self.offsets, compute=self.compute)

    def backward(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse)
        return dcp.ops.attention_backward(*arrays, self.offsets, compute=self.compute)

    def check(self) -> None:
        """The first sequence of at most 512 tokens, one head, against float64."""
        end = int(min(self.offsets[1], 512))
        part = [x[:end, :1].copy() for x in (self.q, self.k, self.v, self.dout)]
        q, k, v, dout = part
        options = {"compute": self.compute}
        out, lse = dcp.ops.attention(q, k, v, [0, end], **options)
        grads = dcp.ops.attention_backward(dout, q, k, v, out, lse, [0, end], **options)
        want = (
            *ref.attention(q, k, v, [0, end])[:1],
            *ref.attention_backward(dout, *part[:3], [0, end]),
        )
        for a, b in zip((out, *grads), want, strict=True):
            limit = 2e-5 if self.compute == "float32" else 3e-2
            assert np.abs(a - b).max() < limit * max(1.0, float(np.abs(b).max()))


class TorchProblem:
    """The same in PyTorch: [1, heads, tokens, dim] a document."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        spans = list(zip(problem.offsets, problem.offsets[1:], strict=False))
        self.inputs = [
            [self.tensor(x[a:b]).requires_grad_() for x in (problem.q, problem.k, problem.v)]
            for a, b in spans
        ]
        self.plain = [[x.detach() for x in document] for document in self.inputs]
        self.douts = [self.tensor(problem.dout[a:b]) for a, b in spans]
        self.outs = [self.attend(document) for document in self.inputs]

    def tensor(self, x: np.ndarray) -> Any:
        dtype = getattr(torch, self.problem.compute)
        return torch.from_numpy(x.transpose(1, 0, 2).copy())[None].to(dtype)

    @staticmethod
    def attend(document: list[Any]) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*document, is_causal=True)

    def forward(self) -> None:
        for document in self.plain:
            self.attend(document)

    def backward(self) -> None:
        for out, document, dout in zip(self.outs, self.inputs, self.douts, strict=True):
            torch.autograd.grad(out, document, dout, retain_graph=True)

    def check(self) -> None:
        theirs = np.concatenate([x.detach()[0].float().numpy() for x in self.outs], axis=1)
        limit = 1e-4 if self.problem.compute == "float32" else 5e-2
        assert np.abs(theirs.transpose(1, 0, 2) - self.problem.out).max() < limit


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("peer", [*ISAS, "torch", "bf16", "torch-bf16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("work", WORK)
def test_attention(benchmark: Any, work: str, direction: str, peer: str) -> None:
    before = _dcp.cpu_info()["isa"]
    _dcp.set_num_threads(1)
    try:
        if peer in ISAS:
            _dcp.set_isa(peer)
        compute = "bfloat16" if peer.endswith("bf16") else "float32"
        problem = Problem(work, compute)
        problem.check()
        rival = None
        if torch is not None:
            torch.set_num_threads(1)
            rival = TorchProblem(problem)
            rival.check()
        elif peer.startswith("torch"):
            pytest.skip("torch is not installed")
        timed = rival if peer.startswith("torch") else problem
        isa = peer if peer in ISAS and peer != "portable" else before
        peak = fma_peak_gflops(isa, repeats=10, compute=compute)
        benchmark.group = f"attention {direction} {work}"
        benchmark.pedantic(getattr(timed, direction), rounds=ROUNDS, warmup_rounds=1)
        peak = max(peak, fma_peak_gflops(isa, repeats=10, compute=compute))
        flops = problem.flops * (1.0 if direction == "forward" else 2.5)
        gflops = flops / benchmark.stats.stats.min / 1e9
        benchmark.extra_info.update(
            gflops=round(gflops, 1), peak_gflops=round(peak, 1), share=round(gflops / peak, 3)
        )
        rivals = {}
        if rival is not None and not peer.startswith("torch"):
            rivals["torch_ratio"] = rival
        if peer == "bf16":
            rivals["float32_ratio"] = Problem(work)
        for name, other in rivals.items():
            turns = [
                (seconds(getattr(problem, direction)), seconds(getattr(other, direction)))
                for _ in range(ROUNDS // 3)
            ]
            ours, theirs = (min(times) for times in zip(*turns, strict=True))
            benchmark.extra_info[name] = round(theirs / ours, 2)
    finally:
        _dcp.set_isa(before)
        _dcp.set_num_threads(_dcp.cpu_info()["cores"])
