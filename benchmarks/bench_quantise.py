"""Bytes per second of the codecs of gradients and of the sketch, one core, beside a copy.

``pytest benchmarks/bench_quantise.py`` (pytest-benchmark; ``--benchmark-json=FILE`` keeps the
figures, ``-s`` prints them). Messages are compared with those of the portable kernels first, byte
by byte. ``GB_s`` counts every byte that an operation must read or write, once (encoding to int8: 4
and 1.03 an element; with a residual 12 and 1.03; decoding and adding: 8 and 1.03); ``copy_GB_s`` is
``memcpy`` of the same array by one thread right before and after; ``of_copy`` is the ratio. The
best of many rounds stands on both sides, for the machine may be shared. A sketch only reads, and is
also set against the fastest read there is here, a sum of squares (``read_GB_s``).

``torch``: what a PyTorch user would write for the same in eager mode, scales of 128 elements, one
thread; ``torch_ratio`` is its time over dcp's. Left out, and said so, where torch is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dcp import _dcp

torch: Any
try:
    import torch
except ImportError:
    torch = None

COUNT = 1 << 24  # 64 MiB of fp32: no cache holds it
ROUNDS = 12
PRECISIONS = ["fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
CODED = PRECISIONS[1:]
ISAS = [isa for isa in _dcp.cpu_info()["isas"] if isa in ("avx2", "avx512")] or ["portable"]


@pytest.fixture(params=ISAS, autouse=True, scope="module")
def isa(request):
    before = _dcp.cpu_info()["isa"]
    _dcp.set_isa(request.param)
    _dcp.set_num_threads(1)
    yield request.param
    _dcp.set_isa(before)


def normal(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(COUNT, dtype=np.float32)


def message_bytes(precision: str, count: int) -> int:
    blocks = -(-count // 128)
    return {"fp32": 4 * count, "bf16": 2 * count, "int4": 4 * blocks + (count + 1) // 2}.get(
        precision, 4 * blocks + count
    )


def encode_fields(precision: str, **options: Any) -> dict[str, Any]:
    fields = {"count": COUNT, "x": normal(), "precision": PRECISIONS.index(precision), "seed": 1}
    fields |= {"codes": np.ones(message_bytes(precision, COUNT), np.uint8)}
    return fields | options


def check(op: str, fields: dict[str, Any], isa: str) -> None:
    """Against the portable kernel, on 5,000 elements: the same bytes."""
    results = []
    for name in ("portable", isa):
        _dcp.set_isa(name)
        copy = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in fields.items()}
        copy["count"] = 5000
        _dcp.kernel_run(op, copy)
        results.append(copy)
    for name, value in results[0].items():
        assert not isinstance(value, np.ndarray) or np.array_equal(value, results[1][name]), name


def best_seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def copy_rate() -> float:
    """Bytes per second, read and written."""
    fields = {"count": COUNT, "a": np.ones(COUNT, np.float32), "out": np.zeros(COUNT, np.float32)}
    return 8 * COUNT / best_seconds(lambda: _dcp.kernel_run("add", fields))


def measure(benchmark: Any, isa: str, op: str, fields: dict[str, Any], moved: int) -> None:
    check(op, fields, isa)
    before = copy_rate()
    benchmark.group = op
    benchmark.pedantic(_dcp.kernel_run, (op, fields), rounds=ROUNDS, iterations=1, warmup_rounds=2)
    copy = max(before, copy_rate())
    seconds = benchmark.stats.stats.min
    rate = moved / seconds
    benchmark.extra_info |= {
        "isa": isa,
        "ns_element": round(seconds / COUNT * 1e9, 3),
        "GB_s": round(rate / 1e9, 2),
        "copy_GB_s": round(copy / 1e9, 2),
        "of_copy": round(rate / copy, 3),
    }
    print(
        f"{benchmark.name:60} {isa:7} {seconds / COUNT * 1e9:5.2f} ns, {rate / 1e9:5.1f} GB/s, "
        f"copy {copy / 1e9:5.1f}, {rate / copy:5.0%}"
    )


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["", "hadamard"])
@pytest.mark.parametrize("nearest", [False, True], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("precision", CODED)
def test_quantise(benchmark, isa, precision, nearest, hadamard, residual):
    if precision == "bf16" and (hadamard or not nearest):
        pytest.skip("bf16 is always to nearest, not rotated")
    fields = encode_fields(precision, nearest=int(nearest), hadamard=int(hadamard))
    moved = 4 * COUNT + fields["codes"].size
    if residual:
        fields["residual"] = 0.01 * normal(1)
        moved += 8 * COUNT
    measure(benchmark, isa, "quantise", fields, moved)


@pytest.mark.parametrize("hadamard", [False, True], ids=["", "hadamard"])
@pytest.mark.parametrize("precision", CODED)
def test_dequantise_add(benchmark, isa, precision, hadamard):
    if precision == "bf16" and hadamard:
        pytest.skip("bf16 is not rotated")
    encode = encode_fields(precision, hadamard=int(hadamard))
    _dcp.kernel_run("quantise", encode)
    fields = {"count": COUNT, "codes": encode["codes"], "precision": encode["precision"]}
    fields |= {"seed": 1, "hadamard": int(hadamard), "accumulate": 1}
    fields |= {"out": np.ones(COUNT, np.float32)}
    check_fields = dict(fields)
    small = encode_fields(precision, hadamard=int(hadamard)) | {"count": 5000}
    _dcp.kernel_run("quantise", small)
    check_fields["codes"] = small["codes"]
    check("dequantise", check_fields, isa)
    measure(benchmark, isa, "dequantise", fields, 8 * COUNT + encode["codes"].size)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_sketch(benchmark, isa, weighted):
    fields = {"count": COUNT, "x": normal(), "sums": np.zeros(1024)}
    if weighted:
        fields["weights"] = np.ones(COUNT // 128, np.float32)
    measure(benchmark, isa, "sketch", fields, 4 * COUNT)
    squares = {"rows": COUNT // 2048, "width": 2048, "x": fields["x"]}
    squares |= {"out": np.zeros(COUNT // 2048)}
    read = 4 * COUNT / best_seconds(lambda: _dcp.kernel_run("row_squares", squares))
    rate = 4 * COUNT / benchmark.stats.stats.min
    benchmark.extra_info |= {"read_GB_s": round(read / 1e9, 2), "of_read": round(rate / read, 3)}
    print(f"{'':60} {'':7} a read {read / 1e9:5.1f} GB/s, {rate / read:5.0%}")


# ---- what a PyTorch user would write ----


def torch_int8(x: Any, nearest: bool) -> tuple[Any, Any]:
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    y = blocks / scale
    y = y.round() if nearest else (y + torch.rand_like(y)).floor()
    return y.to(torch.int8), scale


def torch_e4m3(x: Any) -> tuple[Any, Any]:
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("case", ["int8_stochastic", "int8_nearest", "fp8_e4m3_nearest", "decode"])
def test_torch(benchmark, isa, case):
    if torch is None:
        pytest.skip("torch is not installed: no peer to measure")
    if isa != ISAS[-1]:
        pytest.skip("measured beside the best instruction set only")
    torch.set_num_threads(1)
    x = torch.from_numpy(normal())
    precision = "fp8_e4m3" if case.startswith("fp8") else "int8"
    fields = encode_fields(precision, nearest=int("nearest" in case))
    op, call = "quantise", lambda: torch_int8(x, "nearest" in case)
    if precision == "fp8_e4m3":
        call = lambda: torch_e4m3(x)  # noqa: E731
    if case == "decode":
        codes, scale = torch_int8(x, True)
        out = torch.zeros(COUNT // 128, 128)
        call = lambda: out.addcmul_(codes.float(), scale)  # noqa: E731
        _dcp.kernel_run("quantise", fields)
        fields = {"count": COUNT, "codes": fields["codes"], "precision": fields["precision"]}
        fields |= {"accumulate": 1, "out": np.zeros(COUNT, np.float32)}
        op = "dequantise"
    elif "nearest" in case:  # the same codes, but for y on the last bit
        _dcp.kernel_run("quantise", fields)
        codes, _ = call()
        ours = fields["codes"][COUNT // 32 :].reshape(-1, 128)
        assert np.mean(ours != codes.view(torch.uint8).numpy()) < 1e-4
    ours_s = best_seconds(lambda: _dcp.kernel_run(op, fields))
    benchmark.group = "torch"
    benchmark.pedantic(call, rounds=ROUNDS, iterations=1, warmup_rounds=1)
    ours_s = min(ours_s, best_seconds(lambda: _dcp.kernel_run(op, fields)))
    seconds = benchmark.stats.stats.min
    benchmark.extra_info |= {
        "isa": isa,
        "ns_element": round(seconds / COUNT * 1e9, 3),
        "dcp_ns_element": round(ours_s / COUNT * 1e9, 3),
        "torch_ratio": round(seconds / ours_s, 2),
    }
    print(
        f"torch {case:54} {isa:7} {seconds / COUNT * 1e9:5.2f} ns, dcp "
        f"{ours_s / COUNT * 1e9:5.2f}: {seconds / ours_s:.1f}x"
    )
