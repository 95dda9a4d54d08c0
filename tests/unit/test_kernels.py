"""Row-wise CPU operations against float64 NumPy, on every instruction set of this CPU.

Every call runs with 1, 2 and 3 threads and must give the same bits. Numbers: the error against
float64 is at most twice that of the textbook formula in float32, plus a few units in the last
place of the largest value.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcp import _dcp

quick = settings(max_examples=20, deadline=None)

ROWS = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 130, 300]))
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 257, 300]))
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from([0, 1])
RMS, LAYER = 0, 1
ERF, TANH = 0, 1


ISAS = [isa for isa in _dcp.cpu_info()["isas"] if isa != "avx512bf16"]  # see test_bf16.py


@pytest.fixture(params=ISAS, autouse=True, scope="module")
def isa(request):
    before = _dcp.cpu_info()["isa"]
    _dcp.set_isa(request.param)
    yield request.param
    _dcp.set_isa(before)
    _dcp.set_num_threads(1)


def run(op: str, written: tuple[str, ...], **fields: Any) -> list[np.ndarray]:
    """Runs op with 1, 2 and 3 threads on copies; returns what it wrote. Fields that are the same
    array stay one array; a (base, offset) pair is the base from that element on."""
    first = None
    for threads in (1, 2, 3):
        _dcp.set_num_threads(threads)
        copies: dict[int, np.ndarray] = {}
        given_fields = {}
        for name, value in fields.items():
            base, offset = value if isinstance(value, tuple) else (value, 0)
            if isinstance(base, np.ndarray):
                copy = copies.setdefault(id(base), base.copy())
                given_fields[name] = copy.reshape(-1)[offset:]
            else:
                given_fields[name] = value
        before = {name: copies[id(v)].copy() for name, v in fields.items() if id(v) in copies}
        _dcp.kernel_run(op, given_fields)
        result = [
            copies[id(fields[w][0] if isinstance(fields[w], tuple) else fields[w])] for w in written
        ]
        for name, old in before.items():
            now = copies[id(fields[name])]
            if not any(now is r for r in result):
                assert now.tobytes() == old.tobytes(), f"{name} is an input"
        if first is None:
            first = result
        for a, b in zip(first, result, strict=True):
            assert a.tobytes() == b.tobytes(), f"{threads} threads differ"
    return first


def assert_close(got, exact, plain, ulps: float = 4, scale: float | None = None) -> None:
    """scale: of what was added up, where that cancels; else that of the result."""
    assert got.shape == exact.shape
    if got.size == 0:
        return
    assert np.isfinite(got).all()
    scale = np.abs(exact).max() if scale is None else scale
    bound = 2 * np.abs(plain - exact).max() + ulps * 1.2e-7 * scale + 1e-37
    assert np.abs(got - exact).max() <= bound


def normal(rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def in_both(function, *arrays):
    """function on float64 copies and on the float32 arrays themselves."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        return function(*(a.astype(np.float64) for a in arrays)), function(*arrays)


# ---- normalisation --------------------------------------------------------------------------


def norm(kind, x, weight, bias, eps):
    mean = x.mean(-1, keepdims=True) if kind == LAYER else x[:, :1] * 0
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + x.dtype.type(eps))
    return (x - mean) * rstd * weight + bias, mean[:, 0], rstd[:, 0]


def norm_backward(kind, x, weight, dy, eps):
    _, mean, rstd = norm(kind, x, weight, weight * 0, eps)
    h = (x - mean[:, None]) * rstd[:, None]
    g = dy * weight
    dx = g - h * (g * h).mean(-1, keepdims=True)
    if kind == LAYER:
        dx = dx - g.mean(-1, keepdims=True)
    return dx * rstd[:, None], (dy * h).sum(0), dy.sum(0)


@quick
@given(KINDS, ROWS, WIDTHS, SEEDS, st.sampled_from([1e-3, 1.0, 100.0]))
def test_norm(kind, rows, width, seed, scale):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, width, scale=scale) + np.float32(scale * (kind == LAYER))
    weight = normal(rng, width)
    bias = normal(rng, width) if kind == LAYER else None
    empty = np.empty(rows, np.float32)
    written = ("y", "rstd", "mean") if kind == LAYER else ("y", "rstd")
    y, rstd, *mean = run(
        "norm", written, kind=kind, rows=rows, width=width, x=x, weight=weight, bias=bias,
        eps=1e-5, y=np.empty_like(x), mean=empty if kind == LAYER else None, rstd=empty.copy(),
    )  # fmt: skip
    if rows == 0:
        return
    shift = weight * 0 if bias is None else bias
    exact, plain = in_both(lambda *a: norm(kind, *a, 1e-5), x, weight, shift)
    # x - mean cancels where the elements of a row are close to each other
    scale = float(np.abs(x * exact[2][:, None] * weight).max() + np.abs(shift).max())
    assert_close(y, exact[0], plain[0], scale=scale)
    if kind == LAYER:
        assert_close(mean[0], exact[1], plain[1], scale=float(np.abs(x).max()))
    assert_close(rstd, exact[2], plain[2], scale=float((np.abs(x) * exact[2][:, None] ** 2).max()))


@quick
@given(KINDS, ROWS, WIDTHS, SEEDS, st.booleans(), st.booleans())
def test_norm_backward(kind, rows, width, seed, with_add, with_dweight):
    rng = np.random.default_rng(seed)
    x, dy = normal(rng, rows, width), normal(rng, rows, width)
    weight, dweight, dbias = normal(rng, width), normal(rng, width), normal(rng, width)
    dx = normal(rng, rows, width)  # the residual's gradient, in place
    _, mean, rstd = norm(kind, x, weight, weight * 0, 1e-5)
    written = ["dx"] + ["dweight"] * with_dweight + ["dbias"] * (kind == LAYER)
    result = run(
        "norm_backward", tuple(written), kind=kind, rows=rows, width=width, dy=dy, x=x,
        weight=weight, mean=mean if kind == LAYER else None, rstd=rstd,
        add=dx if with_add else None, dx=dx, dweight=dweight if with_dweight else None,
        dbias=dbias if kind == LAYER else None,
    )  # fmt: skip
    got = dict(zip(written, result, strict=True))
    if rows == 0:
        return
    exact, plain = in_both(lambda *a: norm_backward(kind, *a, 1e-5), x, weight, dy)
    # a row with one or two elements is all cancellation: its scale is that of g rstd
    scale = float(np.abs(dy * weight * rstd[:, None]).max())
    base = dx if with_add else 0 * dx
    scale += float(np.abs(base).max())
    assert_close(got["dx"], exact[0] + base, plain[0] + base, ulps=8, scale=scale)
    if with_dweight:
        assert_close(got["dweight"], exact[1] + dweight, plain[1] + dweight, ulps=16)
    if kind == LAYER:
        assert_close(got["dbias"], exact[2] + dbias, plain[2] + dbias, ulps=16)


@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_norm_of_zeros(kind):
    x, weight = np.zeros((3, 7), np.float32), np.ones(7, np.float32)
    mean, rstd = np.empty(3, np.float32), np.empty(3, np.float32)
    y, rstd, _ = run(
        "norm", ("y", "rstd", "mean"), kind=kind, rows=3, width=7, x=x, weight=weight, eps=1e-6,
        y=np.empty_like(x), mean=mean, rstd=rstd,
    )  # fmt: skip
    assert (y == 0).all() and rstd == pytest.approx(1000, rel=1e-6)


# ---- rope, activations ----------------------------------------------------------------------


def rope_table(positions: int, dim: int) -> np.ndarray:
    angle = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim / 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


@quick
@given(ROWS, st.integers(0, 4), st.integers(1, 40), SEEDS, st.booleans(), st.integers(0, 5))
def test_rope(rows, heads, half, seed, inverse, gap):
    rng = np.random.default_rng(seed)
    dim = 2 * half
    stride = heads * dim + gap
    x = normal(rng, rows, stride)
    positions = rng.integers(0, 50, rows).astype(np.int32)
    table = rope_table(50, dim)
    (got,) = run(
        "rope", ("x",), rows=rows, heads=heads, head_dim=dim, x=x, x_stride=stride,
        positions=positions, table=table, inverse=int(inverse),
    )  # fmt: skip

    def rotate(x, table):
        a, b = np.split(x[:, : heads * dim].reshape(rows, heads, dim), 2, -1)
        c, s = (t[:, None] for t in np.split(table[positions], 2, -1))
        s = -s if inverse else s
        turned = np.concatenate([a * c - b * s, b * c + a * s], -1)
        return np.concatenate([turned.reshape(rows, heads * dim), x[:, heads * dim :]], 1)

    assert_close(got, *in_both(rotate, x, table))
    assert (got[:, heads * dim :] == x[:, heads * dim :]).all()


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, e.dtype.type(1)) / (1 + e)


@quick
@given(ROWS, WIDTHS, SEEDS, st.sampled_from([1.0, 10.0, 60.0]))
def test_swiglu(rows, width, seed, scale):
    rng = np.random.default_rng(seed)
    fused = normal(rng, rows, 2 * width + 3, scale=scale)  # gate and up of one product
    gate, up = fused[:, :width], fused[:, width : 2 * width]
    fields = {"rows": rows, "width": width, "gate": fused, "up": (fused, width)}
    strides = {"gate_stride": 2 * width + 3, "up_stride": 2 * width + 3}
    (out,) = run("swiglu", ("out",), **fields, **strides, out=np.empty((rows, width), np.float32))
    assert_close(out, *in_both(lambda g, u: g * sigmoid(g) * u, gate, up))

    dout = normal(rng, rows, width)
    strides |= {"dgate_stride": 2 * width + 3, "dup_stride": 2 * width + 3}
    dfused, again = run(  # in place, everywhere
        "swiglu_backward", ("dgate", "out"), **fields, **strides, dout=dout, dgate=fused,
        dup=(fused, width), out=dout,
    )  # fmt: skip
    assert again.tobytes() == out.tobytes()

    def backward(g, u, d):
        s = sigmoid(g)
        return d * u * s * (1 + g * (1 - s)), d * g * s

    exact, plain = in_both(backward, gate, up, dout)
    assert_close(dfused[:, :width], exact[0], plain[0])
    assert_close(dfused[:, width : 2 * width], exact[1], plain[1])
    assert (dfused[:, 2 * width :] == fused[:, 2 * width :]).all()
    d1, d2 = run(  # into other arrays, without out
        "swiglu_backward", ("dgate", "dup"), **fields, **strides | {"dgate_stride": width},
        dout=dout, dgate=np.empty((rows, width), np.float32), dup=np.empty_like(fused),
    )  # fmt: skip
    assert (d1 == dfused[:, :width]).all()
    assert (d2[:, :width] == dfused[:, width : 2 * width]).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_swiglu_far_out():
    gate = np.array([-1e4, 1e4, -1e30, 1e30, -100, np.nan, 0], np.float32)
    up, dout = np.ones(7, np.float32), np.ones(7, np.float32)
    (out,) = run(
        "swiglu", ("out",), rows=1, width=7, gate=gate, up=up, gate_stride=7, up_stride=7,
        out=up * 2,
    )  # fmt: skip
    assert out[[0, 1, 2, 3, 6]].tolist() == [0, 1e4, 0, np.float32(1e30), 0]
    assert abs(out[4]) < 1e-36 and np.isnan(out[5])
    dgate, dup = run(
        "swiglu_backward", ("dgate", "dup"), rows=1, width=7, gate=gate, up=up, gate_stride=7,
        up_stride=7, dout=dout, dgate=gate * 0, dup=up * 0, dgate_stride=7, dup_stride=7,
    )  # fmt: skip
    assert dgate[[0, 1, 2, 3, 6]].tolist() == [0, 1, 0, 1, 0.5]
    assert np.isnan(dgate[5]) and np.isnan(dup[5])


ERFC = np.vectorize(math.erfc, otypes=[np.float64])


def gelu(kind, x):
    if kind == ERF:
        return (x * 0.5 * ERFC(-x.astype(np.float64) / math.sqrt(2))).astype(x.dtype)
    inner = np.sqrt(2 / np.pi).astype(x.dtype) * (x + x.dtype.type(0.044715) * x**3)
    return x * x.dtype.type(0.5) * (1 + np.tanh(inner))


def gelu_slope(kind, x):
    if kind == ERF:
        below = 0.5 * ERFC(-x.astype(np.float64) / math.sqrt(2))
        return (below + x * np.exp(-(x.astype(np.float64) ** 2) / 2) / np.sqrt(2 * np.pi)).astype(
            x.dtype
        )
    c = np.sqrt(2 / np.pi).astype(x.dtype)
    k = x.dtype.type(0.044715)
    t = np.tanh(c * (x + k * x**3))
    half = x.dtype.type(0.5)
    return half * (1 + t) + half * x * (1 - t * t) * c * (1 + 3 * k * x * x)


@quick
@given(KINDS, st.integers(0, 300), SEEDS, st.sampled_from([0.01, 1.0, 4.0]), st.booleans())
@example(TANH, 86, 4328, 4.0, False)
def test_gelu(kind, count, seed, scale, in_place):
    rng = np.random.default_rng(seed)
    x, dout = normal(rng, count, scale=scale), normal(rng, count)
    largest = np.abs(dout).max(initial=0)  # the slope's parts are of order 1 and cancel
    (out,) = run("gelu", ("out",), kind=kind, count=count, x=x, out=x if in_place else x * 0)
    assert_close(out, *in_both(lambda v: gelu(kind, v), x))
    for target in (x, dout) if in_place else (x * 0,):
        (dx,) = run("gelu_backward", ("dx",), kind=kind, count=count, x=x, dout=dout, dx=target)
        assert_close(dx, *in_both(lambda v, d: d * gelu_slope(kind, v), x, dout), scale=largest)


def test_gelu_erf_is_accurate_everywhere(isa):
    """Relative to the result itself, far into the negative tail."""
    x = np.concatenate(
        [np.linspace(-13, 13, 200_001), np.logspace(-30, 0, 10_001), -np.logspace(-30, 0, 10_001)]
    ).astype(np.float32)
    (out,) = run("gelu", ("out",), kind=ERF, count=x.size, x=x, out=x * 0)
    exact = x * 0.5 * ERFC(-x.astype(np.float64) / math.sqrt(2))
    there = np.abs(exact) > 1e-36
    error = np.abs(out - exact)[there] / np.abs(exact)[there]
    assert error.max() < (5e-7 if isa != "portable" else 6e-6)
    assert error[np.abs(x[there]) < 1].max() < 5e-7
    far = np.array([-1e4, 1e4, 0, -40, np.nan, 1e30], np.float32)
    (out,) = run("gelu", ("out",), kind=ERF, count=6, x=far, out=far * 0)
    assert out[[0, 1, 2, 3, 5]].tolist() == [0, 1e4, 0, 0, np.float32(1e30)]
    assert np.isnan(out[4])


@pytest.mark.parametrize("kind", [ERF, TANH])
def test_gelu_slope_far_out(kind):
    far = np.array([-1e30, -1e4, 0, 1e4, 1e30, np.nan], np.float32)
    (dx,) = run(
        "gelu_backward", ("dx",), kind=kind, count=6, x=far, dout=np.ones(6, np.float32), dx=far
    )
    assert dx[:5].tolist() == [0, 0, 0.5, 1, 1] and np.isnan(dx[5])


# ---- embedding, loss ------------------------------------------------------------------------


@quick
@given(ROWS, st.integers(0, 300), st.integers(1, 50), SEEDS)
def test_embedding(rows, width, vocab, seed):
    rng = np.random.default_rng(seed)
    weight = normal(rng, vocab, width)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    shape = {"rows": rows, "width": width, "vocab": vocab, "tokens": tokens}
    (out,) = run("embedding", ("out",), **shape, weight=weight, out=normal(rng, rows, width))
    assert (out == weight[tokens]).all()
    dout, before = normal(rng, rows, width), normal(rng, vocab, width)
    (dweight,) = run("embedding_backward", ("dweight",), **shape, dout=dout, dweight=before)
    in_row_order = before.copy()
    for token, row in zip(tokens, dout, strict=True):
        in_row_order[token] += row
    assert dweight.tobytes() == in_row_order.tobytes()


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("op", ["embedding", "embedding_backward"])
def test_embedding_refuses_tokens(op, bad):
    tokens = np.zeros(1000, np.int32)
    tokens[777] = bad
    written = np.full((1000, 4), 7, np.float32)
    fields = {"weight": np.ones((50, 4), np.float32), "out": written}
    if op == "embedding_backward":
        fields = {"dout": np.ones((1000, 4), np.float32), "dweight": written}
    message = rf"tokens\[777\] = {bad} must lie in 0..vocab-1 \(49\)"
    with pytest.raises(_dcp.ArgumentError, match=message):
        _dcp.kernel_run(op, {"rows": 1000, "width": 4, "vocab": 50, "tokens": tokens, **fields})
    assert (written == 7).all()


def cross_entropy(logits, labels, weights):
    top = logits.max(1, keepdims=True)
    e = np.exp(logits - top)
    total = e.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = np.log(total[:, 0]) + top[:, 0] - logits[rows, labels]
    gradient = e / total
    gradient[rows, labels] -= 1
    return (loss * weights).astype(np.float64).sum(), gradient * weights[:, None]


@quick
@given(ROWS, st.sampled_from([1, 2, 5, 16, 31, 32, 257, 1000]), SEEDS, st.booleans(), st.booleans())
def test_cross_entropy(rows, vocab, seed, weighted, gradient):
    rng = np.random.default_rng(seed)
    stride = vocab + 3
    logits = normal(rng, rows, stride, scale=5)
    labels = rng.integers(0, vocab, rows).astype(np.int32)
    labels[rng.random(rows) < 0.3] = -100
    weights = rng.random(rows).astype(np.float32)
    loss = np.array([3.0])
    got, got_loss = run(
        "cross_entropy", ("logits", "loss_p"), rows=rows, vocab=vocab, logits=logits,
        logits_stride=stride, labels=labels, weights=weights if weighted else None, scale=0.125,
        gradient=int(gradient), loss_p=loss,
    )  # fmt: skip
    w = np.float32(0.125) * (weights if weighted else np.ones_like(weights))
    w[labels < 0] = 0
    exact, plain = in_both(
        lambda x, w: cross_entropy(x, np.maximum(labels, 0), w), logits[:, :vocab], w
    ) if rows else ((0.0, logits[:, :vocab]),) * 2  # fmt: skip
    assert abs(got_loss[0] - 3.0 - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 3e-7 * (1 + exact[0])
    if gradient:
        # exp of differences of up to 40: their own rounding is worth 8 units
        assert_close(got[:, :vocab], exact[1], plain[1], ulps=8)
        assert (got[labels < 0, :vocab] == 0).all()
    else:
        assert (got == logits).all()
    assert (got[:, vocab:] == logits[:, vocab:]).all()


def loss_of(logits, labels, gradient=1, **more):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows, vocab = logits.shape
    fields = {"rows": rows, "vocab": vocab, "logits": logits, "logits_stride": vocab, "scale": 1.0}
    fields |= {"labels": np.asarray(labels, np.int32), "gradient": gradient}
    result, loss = run("cross_entropy", ("logits", "loss_p"), **fields | more, loss_p=np.zeros(1))
    return result, float(loss[0])


def test_cross_entropy_with_every_label_ignored():
    """Case L-06: no trained token adds exactly nothing, and no NaN, whatever the logits are."""
    gradient, loss = loss_of([[np.nan, np.inf], [1, 2]], [-100, -100])
    assert loss == 0 and (gradient == 0).all()


def test_cross_entropy_of_large_logits():
    """Case A-09: neither overflow nor a sentinel that swallows logits below -5e4."""
    gradient, loss = loss_of([[-6e4, -6e4 + 1]], [1])
    assert loss == pytest.approx(0.31326, abs=1e-5)
    assert gradient[0] == pytest.approx([0.26894, -0.26894], abs=1e-5)
    _, loss = loss_of([[6e4, -6e4, 0.0]], [1])
    assert loss == 1.2e5
    gradient, loss = loss_of([[-np.inf, 0.0]], [1])
    assert loss == 0 and (gradient == 0).all()


def test_cross_entropy_of_a_sure_label():
    """Loss and gradient stay precise where the label's probability rounds to 1."""
    tiny = np.exp(np.float64(-18))
    gradient, loss = loss_of([[0.0, -18.0]], [0])
    assert loss == pytest.approx(math.log1p(tiny), rel=1e-6)
    assert gradient[0] == pytest.approx([-tiny, tiny], rel=1e-6)
    unchanged, again = loss_of([[0.0, -18.0]], [0], gradient=0)
    assert again == loss and unchanged.tolist() == [[0.0, -18.0]]


@pytest.mark.parametrize("place", [0, 20, 40])
def test_cross_entropy_shows_nan(place):
    logits = np.zeros(41, np.float32)
    logits[place] = np.nan
    gradient, loss = loss_of(logits, [5])
    assert math.isnan(loss) and np.isnan(gradient).all()
    assert math.isnan(loss_of(np.full(41, -np.inf), [5], gradient=0)[1])


@pytest.mark.parametrize("bad", [-1, -99, 10, 2**31 - 1])
def test_cross_entropy_refuses_labels(bad):
    logits, loss = np.ones((5, 10), np.float32), np.zeros(1)
    labels = np.array([0, 9, -100, bad, 3], np.int32)
    fields = {"rows": 5, "vocab": 10, "logits": logits, "logits_stride": 10, "scale": 1.0}
    with pytest.raises(_dcp.ArgumentError, match=rf"labels\[3\] = {bad} must"):
        _dcp.kernel_run(
            "cross_entropy", {**fields, "labels": labels, "gradient": 1, "loss_p": loss}
        )
    assert (logits == 1).all() and loss[0] == 0


# ---- dropout --------------------------------------------------------------------------------


def drop(x, p, row_ids, seed=1, site=2, **more):
    rows, width = x.shape
    fields = {"rows": rows, "width": width, "row_ids": np.asarray(row_ids, np.int64), "p": p}
    fields |= {"x": x, "seed": seed, "site": site, "out": np.empty_like(x)}
    return run("dropout", ("out",), **fields | more)[0]


def philox(key, counter):
    k, c = list(key), list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_dropout_draws_the_documented_words():
    seed, site, row_id, p = 2**63 + 5, 2**40 + 3, -7, 0.3
    halves = lambda v: (v & 0xFFFFFFFF, (v >> 32) & 0xFFFFFFFF)  # noqa: E731
    key = philox(halves(seed), (*halves(site), 0x64726F70, 0))[:2]
    limit = round((1 - float(np.float32(p))) * 2**32)
    keep = []
    for column in range(150):
        block = column // 64 * 16 + column % 16
        keep.append(philox(key, (*halves(block), *halves(row_id)))[column % 64 // 16] < limit)
    got = drop(np.ones((1, 150), np.float32), p, [row_id], seed, site)
    assert (got[0] != 0).tolist() == keep


@quick
@given(ROWS, WIDTHS, SEEDS, st.sampled_from([0.0, 1e-10, 0.1, 0.5, 0.999]), st.booleans())
def test_dropout(rows, width, seed, p, in_place):
    rng = np.random.default_rng(seed)
    x, add = normal(rng, rows, width), normal(rng, rows, width)
    ids = rng.permutation(10**6)[:rows] + 2**33
    out = drop(x, p, ids, seed)
    scale = np.float32(1 / (1 - float(np.float32(p))))
    assert ((out == 0) | (out == x * scale)).all()
    if p < 1e-9:
        assert (out == x * scale).all()
    # in place, with the residual, backwards: the same elements
    assert (
        drop(x, p, ids, seed, add=add, **({"out": add} if in_place else {})).tobytes()
        == (out + add).tobytes()
    )
    assert drop(x, p, ids, seed, out=x).tobytes() == out.tobytes()
    # rows in any order, in any number of calls
    order = rng.permutation(rows)
    assert (drop(x[order], p, ids[order], seed) == out[order]).all()
    cut = rows // 3
    parts = [drop(x[:cut], p, ids[:cut], seed), drop(x[cut:], p, ids[cut:], seed)]
    assert (np.concatenate(parts) == out).all()
    # a narrower row is the beginning of a wider one
    assert (drop(np.ascontiguousarray(x[:, : width // 2 + 1]), p, ids, seed)
            == out[:, : width // 2 + 1]).all()  # fmt: skip


def test_dropout_statistics():
    """Share kept, per row and column; independence of neighbours, rows, sites and seeds."""
    ones = np.ones((400, 512), np.float32)
    p = 0.3
    kept = drop(ones, p, range(400)) > 0
    deviation = math.sqrt(p * (1 - p))
    assert abs(kept.mean() - 0.7) < 5 * deviation / math.sqrt(kept.size)
    assert np.abs(kept.mean(0) - 0.7).max() < 5 * deviation / math.sqrt(400)
    assert np.abs(kept.mean(1) - 0.7).max() < 5 * deviation / math.sqrt(512)
    others = [
        kept[:, 1:], kept[1:], kept[:, 16:], kept[:, 64:],
        drop(ones, p, range(400), seed=2) > 0, drop(ones, p, range(400), site=3) > 0,
        drop(ones, p, np.arange(400) + 2**32) > 0, drop(ones, p, range(400), seed=2**32 + 1) > 0,
        drop(ones, p, range(400), seed=2, site=1) > 0,
    ]  # fmt: skip
    for other in others:
        mine = kept[: len(other), : other.shape[1]]
        same = ((mine - 0.7) * (other - 0.7)).mean()
        assert abs(same) < 5 * deviation**2 / math.sqrt(mine.size)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_dropout_drops_nan_too():
    out = drop(np.full((64, 64), np.nan, np.float32), 0.5, range(64))
    assert (out == 0).any() and np.isnan(out).any()


# ---- sums, optimizer ------------------------------------------------------------------------


@quick
@given(ROWS, st.integers(0, 300), SEEDS, st.integers(0, 4))
def test_column_sum(rows, width, seed, gap):
    rng = np.random.default_rng(seed)
    x, out = normal(rng, rows, width + gap), normal(rng, width)
    (got,) = run("column_sum", ("out",), rows=rows, width=width, x=x, x_stride=width + gap, out=out)
    exact, plain = in_both(lambda x, out: x[:, :width].sum(0) + out, x, out)
    assert_close(got, exact, plain, ulps=8)


@quick
@given(st.one_of(st.integers(0, 100), st.integers(30_000, 100_000)), SEEDS)
def test_add(count, seed):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, count), normal(rng, count)
    for out in (a, b, a * 0):
        (got,) = run("add", ("out",), count=count, a=a, b=b, out=out)
        assert got.tobytes() == (a + b).tobytes()
    for out in (a, a * 0):
        (got,) = run("add", ("out",), count=count, a=a, out=out)
        assert got.tobytes() == a.tobytes()
    (got,) = run("add", ("out",), count=count, a=a, b=a, out=a)
    assert got.tobytes() == (a + a).tobytes()


@quick
@given(st.one_of(st.integers(0, 300), st.integers(100_000, 300_000)), st.integers(0, 70))
def test_zero(count, offset):
    (got,) = run("zero", ("x",), bytes=count, x=(np.full(count + offset + 9, 5, np.uint8), offset))
    assert (got[:offset] == 5).all() and (got[offset + count :] == 5).all()
    assert (got[offset : offset + count] == 0).all()


def adamw(w, m, v, g, lr, beta1, beta2, eps, decay, bias1, bias2, grad_scale):
    g = grad_scale * g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return w - lr * (m / bias1 / (np.sqrt(v / bias2) + eps) + decay * w), m, v


HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1}


def adam_fields(rng, count, step=3, **more):
    hyper = {k: float(np.float32(v)) for k, v in HYPER.items()}
    for beta, bias in (("beta1", "bias1"), ("beta2", "bias2")):
        hyper[bias] = float(np.float32(1 - hyper[beta] ** step))
    hyper["grad_scale"] = 0.5
    arrays = {"w": normal(rng, count), "m": normal(rng, count, scale=1e-2)}
    arrays |= {"v": normal(rng, count, scale=1e-2) ** 2, "g": normal(rng, count, scale=1e-2)}
    still = rng.random(count) < 0.2  # coordinates that never had a gradient
    for name in "mvg":
        arrays[name][still] = 0
    return arrays, hyper | more, still


@quick
@given(st.one_of(st.integers(0, 200), st.just(70_001)), SEEDS, st.integers(1, 10_000))
def test_adamw(count, seed, step):
    arrays, hyper, still = adam_fields(np.random.default_rng(seed), count, step)
    got = run("adamw", ("w", "m", "v"), count=count, **arrays, **hyper)
    exact = adamw(*(a.astype(np.float64) for a in arrays.values()), **hyper)
    plain = adamw(*arrays.values(), **{k: np.float32(v) for k, v in hyper.items()})
    for a, b, c in zip(got, exact, plain, strict=True):
        assert_close(a, b, c)
    # the change of w itself, which is far smaller than w
    if count:
        change = exact[0] - arrays["w"]
        rounding = 1.2e-7 * np.abs(arrays["w"]).max()
        assert np.abs(got[0] - arrays["w"] - change).max() <= 1e-6 * np.abs(change).max() + rounding
    w = arrays["w"][still]
    decayed = w.astype(np.float64) * (1 - hyper["lr"] * hyper["decay"])
    assert np.allclose(got[0][still], decayed, rtol=2e-7, atol=0)
    assert (got[1][still] == 0).all() and (got[2][still] == 0).all()


def test_adamw_leaves_a_still_coordinate():
    """Case O-03: without decay a coordinate whose gradient is 0 does not move at all."""
    arrays, hyper, still = adam_fields(np.random.default_rng(0), 100, decay=0.0)
    w, _, _ = run("adamw", ("w", "m", "v"), count=100, **arrays, **hyper)
    assert (w[still] == arrays["w"][still]).all()
    assert (w[~still] != arrays["w"][~still]).all()


@quick
@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=6), SEEDS)
def test_adamw_is_the_same_however_cut(count, cuts, seed):
    arrays, hyper, _ = adam_fields(np.random.default_rng(seed), count)
    whole = run("adamw", ("w", "m", "v"), count=count, **arrays, **hyper)
    parts = {name: a.copy() for name, a in arrays.items()}
    borders = sorted({0, count, *(c for c in cuts if c < count)})
    for begin, end in itertools.pairwise(borders):
        run_of = {name: a[begin:end] for name, a in parts.items()}
        _dcp.kernel_run("adamw", {"count": end - begin, **run_of, **hyper})
    for name, a in zip("wmv", whole, strict=True):
        assert parts[name].tobytes() == a.tobytes()


@quick
@given(st.one_of(st.integers(0, 70), st.just(3000)), st.integers(0, 130), SEEDS)
def test_row_squares(rows, width, seed):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, width, scale=1e20)
    (got,) = run("row_squares", ("out",), rows=rows, width=width, x=x, out=np.empty(rows))
    exact = np.array([math.fsum(float(v) * float(v) for v in row) for row in x])
    assert np.allclose(got, exact, rtol=1e-14, atol=0)
    # the documented order, on every instruction set: column j belongs to sum j % 16
    lanes = np.zeros((rows, 16))
    for j in range(width):
        lanes[:, j % 16] += x[:, j].astype(np.float64) ** 2
    for half in (8, 4, 2, 1):
        lanes[:, :half] += lanes[:, half : 2 * half]
    assert got.tobytes() == lanes[:, 0].tobytes()


# ---- bad input ------------------------------------------------------------------------------

F = np.ones(64, np.float32)
I32 = np.zeros(64, np.int32)
GOOD: dict[str, dict[str, Any]] = {
    "norm": {"kind": 1, "rows": 2, "width": 4, "x": F, "weight": F, "eps": 1e-5, "y": F * 1,
             "mean": F * 1, "rstd": F * 1},
    "norm_backward": {"kind": 1, "rows": 2, "width": 4, "dy": F, "x": F, "weight": F, "mean": F,
                      "rstd": F, "dx": F * 1},
    "rope": {"rows": 2, "heads": 2, "head_dim": 4, "x": F * 1, "x_stride": 8, "positions": I32,
             "table": F},
    "swiglu": {"rows": 2, "width": 4, "gate": F, "up": F, "gate_stride": 4, "up_stride": 4,
               "out": F * 1},
    "swiglu_backward": {"rows": 2, "width": 4, "dout": F, "gate": F, "up": F, "gate_stride": 4,
                        "up_stride": 4, "dgate": F * 1, "dup": F * 1, "dgate_stride": 4,
                        "dup_stride": 4},
    "gelu": {"kind": 0, "count": 9, "x": F, "out": F * 1},
    "gelu_backward": {"kind": 0, "count": 9, "dout": F, "x": F, "dx": F * 1},
    "embedding": {"rows": 2, "width": 4, "vocab": 5, "tokens": I32, "weight": F, "out": F * 1},
    "embedding_backward": {"rows": 2, "width": 4, "vocab": 5, "tokens": I32, "dout": F,
                           "dweight": F * 1},
    "cross_entropy": {"rows": 2, "vocab": 4, "logits": F * 1, "logits_stride": 4, "labels": I32,
                      "scale": 1.0, "gradient": 1, "loss_p": np.zeros(1)},
    "dropout": {"rows": 2, "width": 4, "x": F, "row_ids": np.zeros(64, np.int64), "seed": 1,
                "site": 1, "p": 0.5, "out": F * 1},
    "column_sum": {"rows": 2, "width": 4, "x": F, "x_stride": 4, "out": F * 1},
    "add": {"count": 9, "a": F, "b": F, "out": F * 1},
    "zero": {"bytes": 9, "x": np.ones(64, np.uint8)},
    "adamw": {"count": 9, "w": F * 1, "m": F * 1, "v": F * 1, "g": F, **HYPER, "bias1": 0.1,
              "bias2": 0.1, "grad_scale": 1.0},
    "row_squares": {"rows": 2, "width": 4, "x": F, "out": np.zeros(64)},
}  # fmt: skip
OPTIONAL = {("add", "b")}


def bad_fields():
    for op, fields in GOOD.items():
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                if (op, name) not in OPTIONAL:
                    yield op, name, None
            elif name in ("rows", "width", "count", "bytes", "vocab", "heads", "head_dim"):
                yield op, name, -1
                yield op, name, -(2**63)
            elif name.endswith("stride"):
                yield op, name, value - 1
                yield op, name, -8
            elif name == "kind":
                yield op, name, 2
                yield op, name, -1
    yield "rope", "head_dim", 3
    yield "rope", "positions", I32 - 1
    yield "norm", "eps", -1e-9
    yield "norm", "eps", math.nan
    yield "norm", "width", 0
    for p in (1.0, -0.1, 1.5, math.nan):
        yield "dropout", "p", p
    for beta in (-0.1, 1.0, math.nan):
        yield "adamw", "beta1", beta
        yield "adamw", "beta2", beta
    for name in ("lr", "decay", "grad_scale"):
        yield "adamw", name, -1.0
        yield "adamw", name, math.inf
        yield "adamw", name, math.nan
    for name in ("eps", "bias1", "bias2"):
        yield "adamw", name, 0.0
    yield "adamw", "bias1", 1.5


@pytest.mark.parametrize(("op", "name", "value"), list(bad_fields()))
def test_bad_input_is_named_before_anything_is_written(op, name, value):
    fields = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in GOOD[op].items()}
    before = {k: v.tobytes() for k, v in fields.items() if isinstance(v, np.ndarray)}
    word = "position" if name == "positions" and value is not None else name
    with pytest.raises(_dcp.ArgumentError, match=rf"^{op}: {word}"):
        _dcp.kernel_run(op, fields | {name: value})
    for key, old in before.items():
        assert fields[key].tobytes() == old


@pytest.mark.parametrize("op", GOOD)
def test_the_good_fields_are_good(op):
    _dcp.kernel_run(op, GOOD[op])


@pytest.mark.parametrize("op", GOOD)
def test_no_rows_do_nothing(op):
    """Without work no pointer is looked at."""
    sizes = {k: v for k, v in GOOD[op].items() if not isinstance(v, np.ndarray)}
    for name in ("rows", "count", "bytes"):
        if name in sizes:
            _dcp.kernel_run(op, sizes | {name: 0})


def test_rms_has_no_bias():
    fields = GOOD["norm"] | {"kind": RMS, "bias": F}
    with pytest.raises(_dcp.ArgumentError, match="bias must be NULL"):
        _dcp.kernel_run("norm", fields)
    with pytest.raises(_dcp.ArgumentError, match="dbias must be NULL"):
        _dcp.kernel_run("norm_backward", GOOD["norm_backward"] | {"kind": RMS, "dbias": F * 1})
