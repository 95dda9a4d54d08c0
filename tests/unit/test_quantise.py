"""Codes in which gradients travel, and the linear sketch, against plain NumPy.

Every test runs on every instruction set of this CPU; messages must be those of the reference byte
by byte, so that ranks of different machines agree.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import ref_quantise as ref
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp

quick = settings(max_examples=40, deadline=None)

SCALED = list(ref.LARGEST)
ISAS = [isa for isa in _dcp.cpu_info()["isas"] if isa != "avx512bf16"]  # which has none of its own
COUNTS = st.one_of(
    st.integers(0, 5), st.sampled_from([63, 127, 128, 129, 255, 300, 1000, 5000, 40000])
)
WORDS = st.integers(0, 2**64 - 1)
FIRSTS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 128, 255, 256, 2**36 - 64])
)


@pytest.fixture(params=ISAS, autouse=True, scope="module")
def isa(request):
    before = _dcp.cpu_info()["isa"]
    _dcp.set_isa(request.param)
    yield request.param
    _dcp.set_isa(before)
    _dcp.set_num_threads(1)


def numbers(kind: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count)
    if kind == "heavy":
        x = rng.standard_t(2, count)
    elif kind == "scales":
        x *= 10.0 ** rng.integers(-38, 38, count)
    elif kind == "denormal":
        x *= 1e-39
    elif kind == "tiny":
        x *= 1e-35
    elif kind == "huge":
        x = np.clip(x * 3e38, -ref.MOST, ref.MOST)
    elif kind == "sparse":
        x *= rng.random(count) < 0.01
    elif kind == "steps":  # multiples of half a step: ties
        x = rng.integers(-14, 15, count) / 2
    return x.astype(np.float32)


KINDS = st.sampled_from(
    ["normal", "heavy", "scales", "denormal", "tiny", "huge", "sparse", "steps"]
)


def run(x: np.ndarray, precision: str, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Message and squares [2] of the C operation; arguments as dcp_quantise_args_t has them."""
    codes = np.full(ref.message_bytes(precision, x.size), 0xAA, np.uint8)
    squares = np.zeros(2)
    given = {"count": x.size, "x": x, "codes": codes, "squares": squares}
    given |= {"precision": ref.PRECISIONS.index(precision)}
    _dcp.kernel_run("quantise", given | fields)
    return codes, squares


def squares_of(x: np.ndarray) -> float:
    return float(np.sum(x.astype(np.float64) ** 2))


def error_of(x: np.ndarray, precision: str, **options: Any) -> float:
    """E|Q(x) - x|^2 / |x|^2, from what decodes."""
    codes = dcp.ops.quantise(x, precision, **options)
    back = dcp.ops.dequantise(codes, x.size, precision, hadamard=options.get("hadamard", False))
    return squares_of(back.astype(np.float64) - x) / squares_of(x)


def gaps(x: np.ndarray, precision: str) -> np.ndarray:
    """The distance of the codes around each element, for unrotated blocks."""
    gap = np.zeros(x.size)
    for start in range(0, x.size, ref.BLOCK):
        block = x[start : start + ref.BLOCK]
        scale = float(ref.scale_of(block, precision))
        step = np.ones(block.size)
        if precision.startswith("fp8") and scale > 0:
            table = ref.fp8_table(precision)
            size = np.abs(block.astype(np.float64)) / scale * (1 - 1e-6)
            lower = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
            step = table[lower + 1] - table[lower]
        gap[start : start + ref.BLOCK] = step * scale
    return gap


# ---- messages ----


@quick
@given(st.sampled_from(ref.PRECISIONS), KINDS, COUNTS, WORDS, WORDS, FIRSTS, st.booleans(), WORDS)
def test_message_is_the_references(precision, kind, count, seed, stream, first, nearest, draw):
    x = numbers(kind, count, draw)
    expected = ref.quantise(x, precision, seed, stream, first, nearest)
    for threads in (1, 2):
        _dcp.set_num_threads(threads)
        got = dcp.ops.quantise(x, precision, seed=seed, stream=stream, first=first, nearest=nearest)
        assert got.dtype == np.uint8 and got.shape == (ref.message_bytes(precision, count),)
        assert np.array_equal(got, expected)
    back = dcp.ops.dequantise(got, count, precision)
    value = ref.dequantise(expected, count, precision)
    assert np.all(np.isfinite(back))
    assert np.allclose(back, value, rtol=2e-7, atol=1e-45)


@quick
@given(st.sampled_from(SCALED), KINDS, COUNTS, st.booleans(), WORDS)
def test_error_is_below_one_step(precision, kind, count, nearest, draw):
    """Half a step to nearest. What is left is what squares count."""
    x = numbers(kind, count, draw)
    codes, squares = run(x, precision, nearest=int(nearest))
    left = x.astype(np.float64) - dcp.ops.dequantise(codes, count, precision)
    slack = 4e-7 * np.abs(x.astype(np.float64)) + 1e-45
    assert np.all(np.abs(left) <= gaps(x, precision) * (0.5 if nearest else 1.0) + slack)
    assert math.isclose(squares[0], squares_of(x), rel_tol=1e-5, abs_tol=1e-300)
    # differences of nearly equal numbers carry the rounding of the numbers
    floor = 1e-6 * math.sqrt(squares[1] * squares[0]) + 1e-12 * squares[0]
    assert abs(squares[1] - float(np.sum(left**2))) <= 1e-4 * squares[1] + floor + 1e-88


@quick
@given(st.sampled_from(SCALED), KINDS, COUNTS, st.booleans(), WORDS, WORDS)
def test_rotated_blocks(precision, kind, count, nearest, seed, draw):
    """Decoded by the float64 rotation; the error is at most a step in rotated coordinates."""
    x = numbers(kind, count, draw)
    codes, squares = run(x, precision, hadamard=1, nearest=int(nearest), seed=seed)
    back = dcp.ops.dequantise(codes, count, precision, hadamard=True, seed=seed)
    value = ref.dequantise(codes, count, precision, seed, hadamard=True)
    most_float = float(ref.MOST)
    assert np.all(np.isfinite(back))
    for start in range(0, count, ref.BLOCK):
        block = slice(start, start + ref.BLOCK)
        most = np.abs(value[block]).max() + float(np.abs(x[block]).max())
        expected = np.clip(value[block], -most_float, most_float)
        assert np.allclose(back[block], expected, rtol=0, atol=1e-6 * most + 1e-44)
        turn = ref.rotation(x[block].size, seed)
        turned = turn @ x[block].astype(np.float64) / 16
        left = turn @ (value[block] - x[block].astype(np.float64)) / 16
        gap = gaps(turned.astype(np.float32), precision)
        assert np.all(np.abs(left) <= gap * 1.01 * (0.5 if nearest else 1) + 1e-6 * most + 1e-44)
    assert math.isclose(squares[0], squares_of(x), rel_tol=1e-4, abs_tol=1e-74)
    error = float(np.sum((value - x) ** 2))
    floor = 1e-5 * math.sqrt(squares[1] * squares[0]) + 1e-12 * squares[0]
    assert abs(squares[1] - error) <= 1e-3 * error + floor + 1e-74


@pytest.mark.parametrize("precision", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_decodes(precision):
    table = ref.fp8_table(precision)
    code = np.concatenate([np.arange(len(table)), 128 + np.arange(len(table))])
    for start in range(0, code.size, ref.BLOCK):
        part = code[start : start + ref.BLOCK].astype(np.uint8)
        message = np.concatenate([np.float32([1]).view(np.uint8), part])
        back = dcp.ops.dequantise(message, part.size, precision)
        value = ref.decode_codes(part.astype(int), precision)
        assert np.array_equal(back, value.astype(np.float32))
        assert np.array_equal(np.signbit(back), part >= 128)


@quick
@given(st.sampled_from(SCALED), st.booleans(), st.integers(1, 2000), WORDS)
def test_what_has_a_code_keeps_it(precision, nearest, count, draw):
    """Decoded numbers are coded again as they were, whatever the random bits (scales: 2^n)."""
    rng = np.random.default_rng(draw)
    grid = (
        ref.decode_codes(np.arange(16 if precision == "int4" else 256), precision)
        if precision.startswith("int")
        else np.concatenate([ref.fp8_table(precision), -ref.fp8_table(precision)])
    )
    grid = grid[np.abs(grid) <= ref.LARGEST[precision]]
    x = rng.choice(grid, count).astype(np.float32)
    x[:: ref.BLOCK] = ref.LARGEST[precision]
    codes = dcp.ops.quantise(x, precision, nearest=nearest, seed=draw)
    assert np.array_equal(dcp.ops.dequantise(codes, count, precision), x)


# ---- random bits ----


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("precision", SCALED)
def test_stochastic_rounding_is_unbiased(precision, hadamard):
    """The mean of N draws is within 5 standard errors (at most gap / 2 / sqrt(N)) and the 1/512
    of a gap that 8 bits leave."""
    x = numbers("heavy", 256, 7)
    draws = 4096
    total = np.zeros(x.size)
    for stream in range(draws):
        codes = dcp.ops.quantise(x, precision, seed=3, stream=stream, hadamard=hadamard)
        total += dcp.ops.dequantise(codes, x.size, precision, seed=3, hadamard=hadamard)
    gap = gaps(x, precision)
    if hadamard:
        gap = np.repeat(
            [
                np.linalg.norm(
                    16 * gaps((ref.rotation(128, 3) @ b / 16).astype(np.float32), precision)
                )
                / math.sqrt(128)
                for b in x.astype(np.float64).reshape(2, 128)
            ],
            128,
        )
        # a rotated bias adds up to sqrt(128) of one place's
        bound = gap * (5 / 2 / math.sqrt(draws) + math.sqrt(128) / 512)
    else:
        bound = gap * (5 / 2 / math.sqrt(draws) + 1 / 512)
    assert np.all(np.abs(total / draws - x) <= bound + 1e-6 * np.abs(x).max())


def errors(x: np.ndarray, **options: Any) -> np.ndarray:
    codes = dcp.ops.quantise(x, "int8", **options)
    return dcp.ops.dequantise(codes, x.size, "int8").astype(np.float64) - x


def test_streams_are_independent():
    """Errors of different seeds, streams and numbers do not go together; the same repeat."""
    x = numbers("normal", 1 << 15, 1)
    base = {"seed": 5, "stream": 9, "first": 0}
    error = errors(x, **base)
    assert np.array_equal(error, errors(x, **base))
    for other in (
        {"seed": 6},
        {"seed": 5 + 2**32},
        {"stream": 8},
        {"stream": 9 + 2**32},
        {"stream": 9 + 2**63},
        {"first": 128},
        {"first": 1},
        {"first": 2**36},
        {"first": -(2**63)},
    ):
        moved = errors(x, **(base | other))
        assert abs(np.corrcoef(error, moved)[0, 1]) < 5 / math.sqrt(x.size), other
    # neighbours, lanes and Philox words within one message
    for shift in (1, 2, 4, 16, 64, 128, 256):
        assert abs(np.corrcoef(error[:-shift], error[shift:])[0, 1]) < 5 / math.sqrt(x.size)


@quick
@given(st.sampled_from(SCALED), st.integers(1, 40), FIRSTS, st.booleans(), WORDS)
def test_parts_have_the_codes_of_the_whole(precision, blocks, first, hadamard, draw):
    """A buffer cut at multiples of 128, each part with its own `first`."""
    first = min(first, 2**63 - 1 - 128 * blocks)
    x = numbers("normal", 128 * blocks, draw)
    options = {"seed": draw, "hadamard": hadamard}
    whole = dcp.ops.quantise(x, precision, first=first, **options)
    cut = draw % (blocks + 1)
    scales, codes = [], []
    for begin, end in ((0, cut), (cut, blocks)):
        part = dcp.ops.quantise(
            x[128 * begin : 128 * end], precision, first=first + 128 * begin, **options
        )
        scales.append(part[: 4 * (end - begin)])
        codes.append(part[4 * (end - begin) :])
    assert np.array_equal(whole, np.concatenate(scales + codes))


# ---- relative errors ----

# E|Q(x) - x|^2 / |x|^2 of Gaussian numbers: nearest, stochastic
GAUSSIAN = {
    "bf16": (2.8e-6, 2.8e-6),
    "fp8_e4m3": (6.6e-4, 1.35e-3),
    "fp8_e5m2": (2.6e-3, 5.2e-3),
    "int8": (4.2e-5, 8.5e-5),
    "int4": (0.014, 0.027),
}


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("precision", GAUSSIAN)
def test_relative_error_of_gaussian_numbers(precision, hadamard):
    x = numbers("normal", 1 << 17, 2)
    for nearest, expected in zip((True, False), GAUSSIAN[precision], strict=True):
        w = error_of(x, precision, nearest=nearest, hadamard=hadamard)
        assert abs(w / expected - 1) < 0.1


@pytest.mark.parametrize("tail", ["student_t4", "lognormal"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rotation_takes_outliers_away(precision, tail):
    """Integer codes of heavy-tailed numbers lose 2 to 5 times as much as of Gaussian ones; rotated
    they lose at most a fifth more."""
    rng = np.random.default_rng(3)
    x = rng.standard_t(4, 1 << 17) if tail == "student_t4" else rng.standard_normal(1 << 17)
    if tail == "lognormal":
        x *= np.exp(rng.standard_normal(x.size))
    x = x.astype(np.float32)
    gaussian = GAUSSIAN[precision][1]
    plain, rotated = (error_of(x, precision, hadamard=h) for h in (False, True))
    assert plain > 2 * gaussian
    assert rotated < 1.2 * gaussian


# ---- residuals ----


@quick
@given(st.sampled_from(ref.PRECISIONS), COUNTS, st.booleans(), st.booleans(), WORDS)
def test_what_is_sent_and_the_residual_are_the_input(precision, count, nearest, hadamard, draw):
    """To fp32 rounding, element by element, also over several sends with feedback."""
    x = numbers("heavy", count, draw)
    residual = np.zeros_like(x)
    sent = np.zeros(count)
    for step in range(4):
        before = residual.copy()
        codes = dcp.ops.quantise(
            x,
            precision,
            seed=draw,
            stream=step,
            nearest=nearest,
            hadamard=hadamard,
            residual=residual,
        )
        back = dcp.ops.dequantise(codes, count, precision, seed=draw, hadamard=hadamard)
        assert np.array_equal(residual, (x + before) - back)
        sent += back
    total = sent + residual
    assert np.allclose(total, 4 * x.astype(np.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ref.PRECISIONS)
def test_measuring_alone_changes_nothing(precision):
    x, residual = numbers("normal", 1000, 1), numbers("normal", 1000, 2)
    before = residual.copy()
    _, expected = run(x, precision, residual=residual.copy(), stream=4)
    squares = np.zeros(2)
    fields = {"count": 1000, "x": x, "residual": residual, "squares": squares, "stream": 4}
    _dcp.kernel_run("quantise", fields | {"precision": ref.PRECISIONS.index(precision)})
    assert np.array_equal(squares, expected)
    assert np.array_equal(residual, before)
    assert math.isclose(squares[0], squares_of(x + before), rel_tol=1e-6)


@quick
@given(st.sampled_from(SCALED), st.integers(1, 3000), st.booleans(), WORDS)
def test_squares_have_weights_of_blocks(precision, count, hadamard, draw):
    x = numbers("normal", count, draw)
    blocks = -(-count // 128)
    weights = np.random.default_rng(draw).random(blocks).astype(np.float32)
    _, squares = run(x, precision, weights=weights, hadamard=int(hadamard))
    expected = np.zeros(2)
    for b in range(blocks):
        part = x[128 * b : 128 * (b + 1)]
        _, of_block = run(part, precision, first=128 * b, hadamard=int(hadamard))
        expected += float(weights[b]) * of_block
    assert np.allclose(squares, expected, rtol=1e-9)


@pytest.mark.parametrize("hadamard", [0, 1])
@pytest.mark.parametrize("precision", ref.PRECISIONS)
def test_decoding_adds(precision, hadamard):
    x, out = numbers("normal", 1100, 1), numbers("normal", 1100, 2)
    codes, _ = run(x, precision, hadamard=hadamard)
    expected = out + dcp.ops.dequantise(codes, x.size, precision, hadamard=bool(hadamard))
    fields = {"count": x.size, "codes": codes, "out": out, "accumulate": 1, "hadamard": hadamard}
    _dcp.kernel_run("dequantise", fields | {"precision": ref.PRECISIONS.index(precision)})
    assert np.array_equal(out, expected)


# ---- values at the edge ----


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("precision", ref.PRECISIONS)
def test_zero_and_denormal_blocks(precision, hadamard):
    """Case C-05: zeros next to a normal block decode to exact zeros, denormals to denormals or
    what rounds to 0, and neighbours do not notice."""
    normal = numbers("normal", 128, 1)
    x = np.concatenate([normal, np.zeros(128, np.float32), normal, normal * np.float32(1e-40)])
    x[128 + 5] = -0.0
    residual = np.zeros_like(x)
    codes = dcp.ops.quantise(x, precision, hadamard=hadamard, residual=residual)
    back = dcp.ops.dequantise(codes, x.size, precision, hadamard=hadamard)
    alone = dcp.ops.quantise(normal, precision, hadamard=hadamard)
    assert np.array_equal(back[:128], dcp.ops.dequantise(alone, 128, precision, hadamard=hadamard))
    assert np.all(back[128:256] == 0)
    assert np.all(np.isfinite(back))
    assert np.all(np.abs(back[384:]) <= 2.0**-110)
    assert np.array_equal(residual, x - back)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("precision", ref.PRECISIONS)
def test_not_finite(precision, value, hadamard):
    """A block with such a value decodes to NaN (or is passed on as it is), keeps its residual, and
    the rest does not notice (case C-06: the residual does not take in the NaN)."""
    x = numbers("normal", 400, 1)
    x[130] = value
    residual = numbers("normal", 400, 2)
    before = residual.copy()
    codes, squares = run(x, precision, hadamard=int(hadamard), residual=residual)
    back = dcp.ops.dequantise(codes, 400, precision, hadamard=hadamard)
    if precision in SCALED:
        assert np.all(np.isnan(back[128:256]))
    else:
        assert np.array_equal(back[130], x[130], equal_nan=True)
        assert np.all(np.isfinite(np.delete(back, 130)))
    assert np.array_equal(residual[128:256], before[128:256])
    rest = np.r_[0:128, 256:400]
    assert np.all(np.isfinite(back[rest]))
    assert np.allclose(back[rest] + residual[rest], (x + before)[rest], atol=1e-6)
    assert np.all(np.isnan(squares))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("precision", ref.PRECISIONS)
def test_the_largest_numbers_stay_finite(precision, nearest, hadamard):
    for x in (
        np.full(300, ref.MOST, np.float32),
        np.where(np.arange(300) % 2, ref.MOST, -ref.MOST).astype(np.float32),
        np.append(np.zeros(130, np.float32), ref.MOST),
    ):
        residual = np.zeros_like(x)
        codes, squares = run(
            x, precision, nearest=int(nearest), hadamard=int(hadamard), residual=residual
        )
        back = dcp.ops.dequantise(codes, x.size, precision, hadamard=hadamard)
        assert np.all(np.isfinite(back)) and np.all(np.isfinite(residual))
        assert np.all(np.isfinite(squares))
        left = back.astype(np.float64) - x
        assert np.linalg.norm(left) < 0.3 * np.linalg.norm(x.astype(np.float64))


def test_the_sum_with_the_residual_is_what_counts():
    """x and residual are finite, their sum is not: the block is as one that is not finite."""
    x = np.full(128, ref.MOST, np.float32)
    residual = x.copy()
    codes = dcp.ops.quantise(x, "int8", residual=residual)
    assert np.all(np.isnan(dcp.ops.dequantise(codes, 128, "int8")))
    assert np.array_equal(residual, x)


# ---- bad input ----


def test_bad_input_is_named():
    x = np.zeros(4, np.float32)
    with pytest.raises(dcp.ArgumentError, match="precision 'int3' must be one of fp32, bf16"):
        dcp.ops.quantise(x, "int3")
    with pytest.raises(dcp.ArgumentError, match="precision 'fp64' must be one of"):
        dcp.ops.dequantise(np.zeros(4, np.uint8), 1, "fp64")
    with pytest.raises(dcp.ArgumentError, match=r"seed -1 must lie in 0\.\.2\^64-1"):
        dcp.ops.quantise(x, "int8", seed=-1)
    with pytest.raises(dcp.ArgumentError, match=r"stream 18446744073709551616 must lie in"):
        dcp.ops.quantise(x, "int8", stream=2**64)
    with pytest.raises(dcp.ArgumentError, match=r"first 9223372036854775808 must lie in"):
        dcp.ops.quantise(x, "int8", first=2**63)
    with pytest.raises(dcp.ArgumentError, match="residual holds 3 elements, must hold 4"):
        dcp.ops.quantise(x, "int8", residual=np.zeros(3, np.float32))
    with pytest.raises(dcp.ArgumentError, match="residual must not share memory with x"):
        dcp.ops.quantise(x, "int8", residual=x)
    frozen = x.copy()
    frozen.flags.writeable = False
    dcp.ops.quantise(frozen, "int8")
    with pytest.raises(dcp.ArgumentError, match="residual"):
        dcp.ops.quantise(x, "int8", residual=frozen)
    with pytest.raises(dcp.DTypeError, match=r"x .*float64"):
        dcp.ops.quantise(np.zeros(4), "int8")
    with pytest.raises(dcp.DTypeError, match="x "):
        dcp.ops.quantise(np.zeros(8, np.float32)[::2], "int8")
    with pytest.raises(dcp.ArgumentError, match="codes holds 4 bytes, must hold 8 for 4 elements"):
        dcp.ops.dequantise(np.zeros(4, np.uint8), 4, "int8")
    with pytest.raises(dcp.ArgumentError, match="count -1 must not be negative"):
        dcp.ops.dequantise(np.zeros(4, np.uint8), -1, "int8")
    with pytest.raises(dcp.DTypeError, match="codes"):
        dcp.ops.dequantise(np.zeros(8, np.int8), 4, "int8")
    with pytest.raises(dcp.ArgumentError, match="first 8 must be a multiple of 16"):
        dcp.ops.sketch(x, first=8)
    with pytest.raises(dcp.ArgumentError, match="first -16 must be a multiple of 16, >= 0"):
        dcp.ops.sketch(x, first=-16)


# ---- sketch ----


def run_sketch(x: np.ndarray, weights: np.ndarray, **fields: Any) -> np.ndarray:
    sums = np.zeros(1024)
    given = {"count": x.size, "x": x, "weights": weights, "sums": sums}
    _dcp.kernel_run("sketch", given | fields)
    return sums


@quick
@given(COUNTS, st.integers(0, 2**58), WORDS, st.booleans(), WORDS)
def test_sketch_is_the_references(count, sixteens, seed, weighted, draw):
    first = 16 * sixteens
    x = numbers("normal", count, draw)
    weights = None
    if weighted:
        weights = np.random.default_rng(draw).random(-(-count // 128)).astype(np.float32)
    expected = ref.sketch(x, seed, first, weights)
    results = []
    for threads in (1, 2):
        _dcp.set_num_threads(threads)
        results.append(run_sketch(x, weights, seed=seed, first=first))
    assert np.array_equal(*results)
    assert np.allclose(results[0], expected, rtol=0, atol=3e-6 * math.sqrt(count / 1024 + 16))


def test_sketch_lengths_are_unbiased():
    """Over 512 seeds: the mean within 4 standard errors, the spread near sqrt(2 / 1024)."""
    x = numbers("heavy", 20000, 1)
    lengths = np.empty(512)
    for seed in range(lengths.size):
        sums = dcp.ops.sketch(x, seed=seed)
        lengths[seed] = sums @ sums
    lengths /= squares_of(x)
    # the largest values of heavy tails share no bucket: the spread is somewhat smaller
    spread = math.sqrt(2 / 1024 * (1 - float(np.sum(x.astype(float) ** 4)) / squares_of(x) ** 2))
    assert abs(lengths.mean() - 1) < 4 * spread / math.sqrt(lengths.size)
    assert 0.6 * spread < lengths.std() < 1.15 * spread


def test_sketch_spread_of_gaussian_numbers():
    x = numbers("normal", 1 << 16, 1)
    lengths = np.array([s @ s for s in (dcp.ops.sketch(x, seed=seed) for seed in range(512))])
    spread = lengths.std() / squares_of(x)
    assert abs(spread / math.sqrt(2 / 1024) - 1) < 0.12


@quick
@given(st.integers(0, 40000), WORDS, WORDS)
def test_sketch_is_linear_and_parts_make_the_whole(count, seed, draw):
    x, y = numbers("normal", count, draw), numbers("normal", count, draw ^ 1)
    difference = dcp.ops.sketch(x - y, seed=seed)
    of_x, of_y = dcp.ops.sketch(x, seed=seed), dcp.ops.sketch(y, seed=seed)
    assert np.allclose(difference, of_x - of_y, atol=1e-4)
    cut = draw % (count // 16 + 1) * 16
    parts = dcp.ops.sketch(x[:cut], seed=seed) + dcp.ops.sketch(x[cut:], seed=seed, first=cut)
    assert np.allclose(parts, of_x, atol=1e-4)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_sketch_passes_on_what_is_not_finite(value):
    x = numbers("normal", 5000, 1)
    x[3000] = value
    sums = dcp.ops.sketch(x)
    assert not np.isfinite(sums[3000 % 1024])
    assert np.all(np.isfinite(np.delete(sums, 3000 % 1024)))
