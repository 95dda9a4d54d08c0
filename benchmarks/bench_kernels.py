"""Bytes per second of the row-wise CPU operations, beside a copy in the same run.

``pytest benchmarks/bench_kernels.py`` (pytest-benchmark; ``--benchmark-json=FILE`` keeps the
figures, ``-s`` prints them). Each operation is checked first. ``GB_s`` counts every byte that the
operation must read or write, once; ``copy_GB_s`` is the copy of one array to another (``memcpy`` by
all threads of the pool) right before and after; ``of_copy`` is the ratio. The best of many rounds
stands on both sides, for the machine may be shared. Ordinary stores read a line before they write
it and ``memcpy`` does not: an operation that writes as much as it reads can reach some 80 percent.
Threads: the process's pool.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dcp import _dcp

# as many rows as a micro-batch of a small model has, and arrays that no cache holds
SHAPES = {"cached": (2048, 256), "large": (8192, 2048)}
VOCAB = 257


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def norm(rows: int, width: int, kind: int = 0) -> tuple[dict[str, Any], int]:
    x, weight, row = normal(rows, width), normal(width), np.ones(rows, np.float32)
    fields = {"kind": kind, "rows": rows, "width": width, "x": x, "weight": weight, "eps": 1e-5}
    fields |= {"y": np.ones_like(x), "rstd": row, "mean": row.copy() if kind else None}
    return fields, 8


def norm_backward(rows: int, width: int, kind: int = 0) -> tuple[dict[str, Any], int]:
    x, row = normal(rows, width), np.ones(rows, np.float32)
    fields = {"kind": kind, "rows": rows, "width": width, "dy": x.copy(), "x": x, "rstd": row}
    fields |= {"weight": normal(width), "add": x.copy(), "dx": np.ones_like(x)}
    fields |= {"mean": row * 0 if kind else None, "dweight": normal(width)}
    fields |= {"dbias": normal(width) if kind else None}
    return fields, 16


def rope(rows: int, width: int) -> tuple[dict[str, Any], int]:
    dim = 64
    angle = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim / 2))
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    fields = {"rows": rows, "heads": width // dim, "head_dim": dim, "x": normal(rows, width)}
    fields |= {"x_stride": width, "positions": np.arange(rows, dtype=np.int32), "table": table}
    return fields, 8


def swiglu(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    fields = {"rows": rows, "width": width, "gate": x, "up": x.copy(), "out": np.ones_like(x)}
    return fields | {"gate_stride": width, "up_stride": width}, 12


def swiglu_backward(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    fields = {"rows": rows, "width": width, "gate": x, "up": x.copy(), "dout": x.copy()}
    fields |= {"dgate": np.ones_like(x), "dup": np.ones_like(x), "out": np.ones_like(x)}
    return fields | dict.fromkeys(
        ("gate_stride", "up_stride", "dgate_stride", "dup_stride"), width
    ), 24


def gelu(rows: int, width: int, kind: int = 0) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    return {"kind": kind, "count": x.size, "x": x, "out": np.ones_like(x)}, 8


def gelu_backward(rows: int, width: int, kind: int = 0) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    fields = {"kind": kind, "count": x.size, "x": x, "dout": x.copy(), "dx": np.ones_like(x)}
    return fields, 12


def embedding(rows: int, width: int) -> tuple[dict[str, Any], int]:
    tokens = np.random.default_rng(0).integers(0, VOCAB, rows).astype(np.int32)
    fields = {"rows": rows, "width": width, "vocab": VOCAB, "tokens": tokens}
    return fields | {"weight": normal(VOCAB, width), "out": np.ones((rows, width), np.float32)}, 8


def embedding_backward(rows: int, width: int) -> tuple[dict[str, Any], int]:
    fields, _ = embedding(rows, width)
    dweight = fields.pop("weight")
    return fields | {"dout": fields.pop("out"), "dweight": dweight}, 12


def cross_entropy(rows: int, width: int) -> tuple[dict[str, Any], int]:
    labels = np.random.default_rng(0).integers(0, width, rows).astype(np.int32)
    fields = {"rows": rows, "vocab": width, "logits": normal(rows, width), "logits_stride": width}
    fields |= {"labels": labels, "scale": 1.0, "gradient": 1, "loss_p": np.zeros(1)}
    return fields, 8


def dropout(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    fields = {"rows": rows, "width": width, "x": x, "add": x.copy(), "out": np.ones_like(x)}
    return fields | {"row_ids": np.arange(rows), "seed": 1, "site": 1, "p": 0.1}, 12


def column_sum(rows: int, width: int) -> tuple[dict[str, Any], int]:
    fields = {"rows": rows, "width": width, "x": normal(rows, width), "x_stride": width}
    return fields | {"out": normal(width)}, 4


def add(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    return {"count": x.size, "a": x, "b": x.copy(), "out": np.ones_like(x)}, 12


def zero(rows: int, width: int) -> tuple[dict[str, Any], int]:
    return {"bytes": 4 * rows * width, "x": np.ones(4 * rows * width, np.uint8)}, 4


def adamw(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    fields = {"count": x.size, "w": x, "m": x * 0, "v": x * x, "g": x.copy(), "lr": 1e-6}
    fields |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1, "bias1": 0.1}
    return fields | {"bias2": 0.1, "grad_scale": 1.0}, 28


def adamw8bit(rows: int, width: int) -> tuple[dict[str, Any], int]:
    x = normal(rows, width)
    blocks = -(-width // 256)
    fields = {"rows": rows, "width": width, "w": x, "g": 0.1 * x, "lr": 1e-6}
    fields |= {name: np.zeros((rows, width), np.uint8) for name in ("m", "v")}
    fields |= {name: np.zeros((rows, blocks), np.float32) for name in ("m_scale", "v_scale")}
    fields |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "bias1": 0.1}
    return fields | {"bias2": 0.05, "grad_scale": 1.0}, 16


def row_squares(rows: int, width: int) -> tuple[dict[str, Any], int]:
    fields = {"rows": rows, "width": width, "x": normal(rows, width), "out": np.ones(rows)}
    return fields, 4


CASES = {
    "rmsnorm": ("norm", norm),
    "layernorm": ("norm", lambda r, w: norm(r, w, 1)),
    "rmsnorm_backward": ("norm_backward", norm_backward),
    "layernorm_backward": ("norm_backward", lambda r, w: norm_backward(r, w, 1)),
    "rope": ("rope", rope),
    "swiglu": ("swiglu", swiglu),
    "swiglu_backward": ("swiglu_backward", swiglu_backward),
    "gelu_erf": ("gelu", gelu),
    "gelu_tanh": ("gelu", lambda r, w: gelu(r, w, 1)),
    "gelu_erf_backward": ("gelu_backward", gelu_backward),
    "gelu_tanh_backward": ("gelu_backward", lambda r, w: gelu_backward(r, w, 1)),
    "embedding": ("embedding", embedding),
    "embedding_backward": ("embedding_backward", embedding_backward),
    "cross_entropy": ("cross_entropy", cross_entropy),
    "dropout": ("dropout", dropout),
    "column_sum": ("column_sum", column_sum),
    "add": ("add", add),
    "zero": ("zero", zero),
    "adamw": ("adamw", adamw),
    "adamw8bit": ("adamw8bit", adamw8bit),
    "row_squares": ("row_squares", row_squares),
}


def check(op: str, fields: dict[str, Any]) -> None:
    """The instruction set in use against the portable one, on a few rows' worth of work."""
    small = dict(fields)
    for name, most in (("rows", 37), ("count", 5000), ("bytes", 5000)):
        if name in small:
            small[name] = min(small[name], most)
    results = []
    used = _dcp.cpu_info()["isa"]
    for isa in ("portable", used):
        _dcp.set_isa(isa)
        copy = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in small.items()}
        _dcp.kernel_run(op, copy)
        results.append(copy)
    for name, value in results[0].items():
        if isinstance(value, np.ndarray):
            scale = float(np.abs(value.astype(np.float64)).max())
            # codes: a tie may go either way
            least = 1.0 if op == "adamw8bit" and value.dtype == np.uint8 else 1e-5 * scale
            got = results[1][name].astype(np.float64)
            assert np.allclose(got, value, rtol=1e-5, atol=least), name


def best_seconds(op: str, fields: dict[str, Any], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        _dcp.kernel_run(op, fields)
        best = min(best, time.perf_counter() - begin)
    return best


def copy_rate(count: int, rounds: int) -> float:
    """Bytes per second, read and written."""
    fields = {"count": count, "a": np.ones(count, np.float32), "out": np.zeros(count, np.float32)}
    return 8 * count / best_seconds("add", fields, rounds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_kernel(benchmark, case, shape):
    rows, width = SHAPES[shape]
    rounds = 200 if shape == "cached" else 12
    op, make = CASES[case]
    fields, element_bytes = make(rows, width)
    check(op, fields)
    before = copy_rate(rows * width, rounds)
    benchmark.group = shape
    benchmark.pedantic(_dcp.kernel_run, (op, fields), rounds=rounds, iterations=1, warmup_rounds=2)
    copy = max(before, copy_rate(rows * width, rounds))
    rate = element_bytes * rows * width / benchmark.stats.stats.min
    benchmark.extra_info |= {
        "isa": _dcp.cpu_info()["isa"],
        "GB_s": round(rate / 1e9, 2),
        "copy_GB_s": round(copy / 1e9, 2),
        "of_copy": round(rate / copy, 3),
    }
    print(f"{case:20} {shape:7} {rate / 1e9:7.1f} GB/s, copy {copy / 1e9:6.1f}, {rate / copy:5.0%}")
