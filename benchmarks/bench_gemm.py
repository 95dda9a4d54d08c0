"""The three matrix products of training a linear layer, beside NumPy's OpenBLAS and PyTorch.

``pytest benchmarks/bench_gemm.py`` (pytest-benchmark; ``--benchmark-json=FILE`` keeps the figures).
Shapes are T tokens, n outputs, k inputs of a layer y = x W^T with W [n, k]:

- ``forward``: y [T, n] = x W^T, W packed in advance as a training step does
- ``dx``: dx [T, k] = dy W, W packed in advance
- ``dw``: dW [n, k] += dy^T x, nothing packed in advance

``dcp-bf16`` and ``torch-bf16`` compute in bfloat16 with float32 sums: dcp rounds x and dy, which
are stored in float32, in every call; PyTorch is given bfloat16 tensors and returns such (its
``dw`` accumulates in bfloat16).

Each product is checked against float64 first. ``gflops`` is of the fastest round, ``share`` that
over threads x the FMA peak of one core (of bfloat16 products for those), probed beside it: what
other jobs take away is not measured. ``float32_ratio`` (on ``dcp-bf16``): dcp's float32 time over
this one, both fastest rounds, taken in turns. Peers run with the same number of threads and have
no packed weights.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import fma_peak_gflops

from dcp import _dcp

torch: Any
try:
    import torch
except ImportError:
    torch = None

SHAPES = [
    (2048, 256, 256),
    (2048, 688, 256),
    (2048, 256, 688),
    (4096, 512, 512),
    (2048, 1408, 512),
    (2048, 512, 1408),
    (4096, 257, 256),
    (512, 688, 256),
    (200, 512, 512),
    (64, 512, 512),
]
PRODUCTS = ["forward", "dx", "dw"]
PEERS = ["dcp", "numpy", "torch", "dcp-bf16", "torch-bf16"]
ROUNDS = 20
THREADS = sorted({1, _dcp.cpu_info()["cores"]})

Arrays = dict[str, np.ndarray]


@functools.cache
def openblas_set_threads() -> Callable[[int], None]:
    """The setter of the OpenBLAS that NumPy has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "openblas" in path and "numpy" in path:
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
                if hasattr(library, name):
                    return getattr(library, name)
    pytest.skip("NumPy's BLAS is no OpenBLAS whose threads can be set")


def arrays(tokens: int, n: int, k: int) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"x": (tokens, k), "w": (n, k), "dy": (tokens, n)}
    made = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    made |= {"forward": np.zeros((tokens, n), np.float32), "dx": np.zeros((tokens, k), np.float32)}
    return made | {"dw": np.zeros((n, k), np.float32)}


def exact(product: str, made: Arrays) -> np.ndarray:
    x, w, dy = (made[name].astype(np.float64) for name in ("x", "w", "dy"))
    return {"forward": lambda: x @ w.T, "dx": lambda: dy @ w, "dw": lambda: dy.T @ x}[product]()


def dcp_call(product: str, made: Arrays, compute: str = "float32") -> Callable[[], None]:
    x, w, dy, out = made["x"], made["w"], made["dy"], made[product]
    if product == "forward":
        packed = _dcp.gemm_pack(w, trans_b=True, compute=compute)
        return lambda: _dcp.gemm(x, w, out, trans_b=True, packed=packed, compute=compute)
    if product == "dx":
        packed = _dcp.gemm_pack(w, compute=compute)
        return lambda: _dcp.gemm(dy, w, out, packed=packed, compute=compute)
    return lambda: _dcp.gemm(dy, x, out, trans_a=True, accumulate=True, compute=compute)


def numpy_call(product: str, made: Arrays) -> Callable[[], None]:
    x, w, dy, out = made["x"], made["w"], made["dy"], made[product]
    if product == "forward":
        return lambda: np.matmul(x, w.T, out=out)
    if product == "dx":
        return lambda: np.matmul(dy, w, out=out)
    buffer = np.empty_like(out)

    def dw() -> None:
        np.matmul(dy.T, x, out=buffer)
        np.add(out, buffer, out=out)

    return dw


def torch_call(product: str, made: Arrays, compute: str = "float32") -> Callable[[], None]:
    x, w, dy, out = (torch.from_numpy(made[name]) for name in ("x", "w", "dy", product))
    if compute == "bfloat16":
        x, w, dy, shared = (t.bfloat16() for t in (x, w, dy, out))
        inner = torch_product(product, x, w, dy, shared)
        inner()
        out.copy_(shared)  # for the check: made[product] now holds the first result
        return inner
    return torch_product(product, x, w, dy, out)


def torch_product(product: str, x: Any, w: Any, dy: Any, out: Any) -> Callable[[], Any]:
    if product == "forward":
        return lambda: torch.mm(x, w.T, out=out)
    if product == "dx":
        return lambda: torch.mm(dy, w, out=out)
    return lambda: out.addmm_(dy.T, x)


def seconds(call: Callable[[], None], iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return time.perf_counter() - start


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "T{}-n{}-k{}".format(*s))
@pytest.mark.parametrize("threads", THREADS)
def test_gemm(
    benchmark: Any, threads: int, shape: tuple[int, int, int], product: str, peer: str
) -> None:
    made = arrays(*shape)
    compute = "bfloat16" if peer.endswith("bf16") else "float32"
    if peer.startswith("dcp"):
        _dcp.set_num_threads(threads)
        call = dcp_call(product, made, compute)
    elif peer == "numpy":
        openblas_set_threads()(threads)
        call = numpy_call(product, made)
    else:
        if torch is None:
            pytest.skip("torch is not installed")
        torch.set_num_threads(threads)
        call = torch_call(product, made, compute)
    if peer != "torch-bf16":
        call()
    want = exact(product, made)
    tolerance = 1e-2 if compute == "bfloat16" else 1e-5
    assert np.abs(made[product] - want).max() <= tolerance * np.abs(want).max()
    flops = 2.0 * np.prod(shape, dtype=float)
    iterations = 1 + int(2e8 * threads / flops)
    plain = dcp_call(product, made)
    peak = threads * fma_peak_gflops(repeats=5, compute=compute)
    benchmark.group = f"{product} T{shape[0]} n{shape[1]} k{shape[2]}, {threads} threads"
    benchmark.pedantic(call, rounds=ROUNDS, iterations=iterations, warmup_rounds=1)
    peak = max(peak, threads * fma_peak_gflops(repeats=5, compute=compute))
    gflops = flops / benchmark.stats.stats.min / 1e9
    benchmark.extra_info.update(
        gflops=round(gflops, 1), peak_gflops=round(peak, 1), share=round(gflops / peak, 3)
    )
    if peer == "dcp-bf16":
        turns = [[seconds(c, iterations) for c in (plain, call)] for _ in range(ROUNDS // 2)]
        theirs, ours = (min(times) for times in zip(*turns, strict=True))
        benchmark.extra_info["float32_ratio"] = round(theirs / ours, 2)
