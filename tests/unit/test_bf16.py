"""Products, attention and casts with factors in bfloat16 against float64 on rounded factors.

"Rounded factors": what is stored stays float32; every number that enters a product is first rounded
to bfloat16. Instruction sets that cannot multiply bfloat16 widen what was rounded, so the same
bounds hold for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ref_attention as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from ref_bf16 import bf16, bf16_bits

import dcp
from dcp import _dcp

ISAS = _dcp.cpu_info()["isas"]
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([47, 64, 65, 96, 97, 129, 257]))
DEPTHS = st.one_of(SIZES, st.sampled_from([703, 704, 705, 1407, 1409, 1500, 2817]))
ODD_NUMBERS = np.array(
    [
        *(0, -0.0, 1, -1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, -3.4e38),
        *(np.inf, -np.inf, np.nan, -np.nan, 1e-45, 1e-39, -1e-39, 2**-126, 9.2e-41),
    ],
    np.float32,
)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    before = _dcp.cpu_info()
    yield
    _dcp.set_isa(before["isa"])
    _dcp.set_num_threads(before["cores"])


@pytest.fixture(params=ISAS)
def isa(request):
    _dcp.set_isa(request.param)
    return request.param


def matrix(rng, rows: int, columns: int, padding: int = 0) -> np.ndarray:
    return rng.standard_normal((rows, columns + padding), np.float32)[:, :columns]


# ---- the matrix product ---------------------------------------------------------------------


@given(
    m=SIZES,
    n=SIZES,
    k=DEPTHS,
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    pack=st.sampled_from([None, "float32", "bits"]),
    epilogue=st.sampled_from(["none", "add", "bias", "accumulate"]),
    padding=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_product(m, n, k, isa, threads, trans_a, trans_b, pack, epilogue, padding, seed):
    rng = np.random.default_rng(seed)
    a = matrix(rng, *((k, m) if trans_a else (m, k)), padding)
    b = matrix(rng, *((n, k) if trans_b else (k, n)), padding)
    frame = matrix(rng, m, n + padding)
    beside = frame[:, n:].copy()
    c = frame[:, :n]
    add, bias = matrix(rng, m, n, 2), matrix(rng, 1, n)[0]
    options: dict[str, object] = {
        "none": {},
        "add": {"add": add},
        "bias": {"bias": bias},
        "accumulate": {"accumulate": True},
    }[epilogue]
    rest = {"none": 0.0, "add": add, "bias": bias, "accumulate": c.astype(float)}[epilogue]
    _dcp.set_isa(isa)
    _dcp.set_num_threads(threads)
    if pack is not None:
        given_b = b if pack == "float32" else bf16_bits(b)
        options["packed"] = _dcp.gemm_pack(given_b, trans_b=trans_b, compute="bfloat16")
    _dcp.gemm(a, b, c, trans_a=trans_a, trans_b=trans_b, compute="bfloat16", **options)
    left = bf16(a.T if trans_a else a).astype(float)
    right = bf16(b.T if trans_b else b).astype(float)
    exact = left @ right + rest
    added = np.abs(left) @ np.abs(right) + np.abs(rest)
    # k roundings of a sum of random signs, twice as many as one chain may have
    assert (np.abs(c - exact) <= 2.0**-23 * (2 + 2 * k**0.5) * added).all()
    assert np.array_equal(frame[:, n:], beside)


@given(
    m=SIZES,
    n=SIZES,
    k=DEPTHS,
    isa=st.sampled_from(ISAS),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_bits_of_a_product_depend_on_row_and_column_only(m, n, k, isa, trans_a, trans_b, data):
    """Thread count, packing, bf16 or float32 input, strides, other rows and columns: no bit."""
    rng = np.random.default_rng(m * n + k)
    a = matrix(rng, *((k, m) if trans_a else (m, k)))
    b = matrix(rng, *((n, k) if trans_b else (k, n)))
    flags = {"trans_a": trans_a, "trans_b": trans_b, "compute": "bfloat16"}
    _dcp.set_isa(isa)
    _dcp.set_num_threads(1)
    want = np.empty((m, n), np.float32)
    _dcp.gemm(a, b, want, **flags)
    rows = slice(*sorted((data.draw(st.integers(0, m)), data.draw(st.integers(0, m)))))
    columns = slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
    part_a = a[:, rows] if trans_a else a[rows]
    part_b = b[columns] if trans_b else b[:, columns]
    for threads in (1, 2, 3):
        _dcp.set_num_threads(threads)
        packs = [_dcp.gemm_pack(x, trans_b=trans_b, compute="bfloat16") for x in (b, bf16_bits(b))]
        for packed in (None, *packs):
            got = np.empty((m, n), np.float32)
            _dcp.gemm(a, b, got, packed=packed, **flags)
            assert got.tobytes() == want.tobytes()
        part = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        _dcp.gemm(part_a, part_b, part, **flags)
        assert part.tobytes() == want[rows, columns].tobytes()
        got = np.empty((m, n), np.float32)  # the transposed product has the same chains
        _dcp.gemm(np.ascontiguousarray(a.T), b, got, **{**flags, "trans_a": not trans_a})
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_tasks_give_the_bits_of_one(isa, threads):
    rng = np.random.default_rng(0)
    a, b = matrix(rng, 515, 2821), matrix(rng, 389, 2821)
    want, got = np.empty((2, 515, 389), np.float32)
    _dcp.set_num_threads(1)
    for row in range(0, 515, 103):
        part = want[row : row + 103]
        _dcp.gemm(a[row : row + 103], b, part, trans_b=True, compute="bfloat16")
    _dcp.set_num_threads(threads)
    _dcp.gemm(a, b, got, trans_b=True, compute="bfloat16")
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("k", [20, 21])
def test_not_finite_numbers_spread_as_ieee_says(isa, pack, k):
    """0 * NaN and 0 * inf are NaN; what fills an odd k up does not show."""
    a, b = np.zeros((13, k), np.float32), np.ones((k, 35), np.float32)
    a[12, k - 1] = np.inf
    b[k - 1, 34] = 0
    b[3, 1] = np.nan
    b[5, 2] = -np.inf
    c = np.empty((13, 35), np.float32)
    packed = _dcp.gemm_pack(b, compute="bfloat16") if pack else None
    _dcp.gemm(a, b, c, packed=packed, compute="bfloat16")
    want = np.zeros((13, 35), np.float32)
    want[12] = np.inf
    want[12, 34] = np.nan
    want[:, 1:3] = np.nan
    assert np.array_equal(c, want, equal_nan=True)


def test_factors_are_rounded_to_nearest_even(isa):
    """One factor a product, the other 1: what comes out is the rounded number itself."""
    rng = np.random.default_rng(3)
    numbers = np.concatenate([ODD_NUMBERS, rng.standard_normal(301).astype(np.float32)])
    numbers = numbers[(np.abs(numbers) >= 2.0**-126) | (numbers == 0)]  # see the next test
    one = np.ones((1, 1), np.float32)
    for trans in (False, True):
        column = numbers[None] if trans else numbers[:, None]
        for a, b in ((column, one), (one, column.T)):
            c = np.empty((a.shape[trans], b.shape[not trans]), np.float32)
            _dcp.gemm(a, b, c, trans_a=trans, trans_b=trans, compute="bfloat16")
            assert np.array_equal(c.reshape(-1), bf16(numbers), equal_nan=True)


def test_subnormal_factors_are_small_or_zero(isa):
    """Instructions that multiply bf16 count them as zero; widened ones multiply them."""
    tiny = np.full((3, 5), 1e-39, np.float32)
    c = np.empty((3, 3), np.float32)
    _dcp.gemm(tiny, np.ones((5, 3), np.float32), c, compute="bfloat16")
    assert ((c >= 0) & (c <= 5.1e-39)).all()


def test_compute_must_be_known():
    a = np.ones((2, 2), np.float32)
    with pytest.raises(dcp.ArgumentError, match='compute "float16" must be "float32" or "bfloat1'):
        _dcp.gemm(a, a, a.copy(), compute="float16")
    with pytest.raises(dcp.ArgumentError, match="b_bf16 must be NULL where compute is float32"):
        _dcp.gemm_pack(bf16_bits(a))
    q = np.ones((2, 1, 4), np.float32)
    with pytest.raises(dcp.ArgumentError, match='compute "half" must be'):
        dcp.ops.attention(q, q, q, [0, 2], compute="half")


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="this CPU does not multiply bf16")
def test_float32_has_the_bits_of_avx512():
    """The set that multiplies bf16 runs the float32 kernels of avx512."""
    rng = np.random.default_rng(4)
    a, b = matrix(rng, 50, 900), matrix(rng, 900, 70)
    q, k, v, dout = draw(21, 150, 150, 2, 1, 40)
    results = []
    for isa in ("avx512", "avx512bf16"):
        _dcp.set_isa(isa)
        c, y = np.empty((2, 50, 70), np.float32), np.empty(900, np.float32)
        _dcp.gemm(a, b, c[0])
        _dcp.gemm(a, b, c[1], packed=_dcp.gemm_pack(b))
        _dcp.kernel_run("gelu", {"kind": 0, "count": 900, "x": a[0].copy(), "out": y})
        out, lse = dcp.ops.attention(q, k, v, [0, 150])
        grads = dcp.ops.attention_backward(dout, q, k, v, out, lse, [0, 150])
        results.append([x.tobytes() for x in (c, y, out, lse, *grads)])
    assert results[0] == results[1]


# ---- attention ------------------------------------------------------------------------------


def offsets_of(lengths):
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def draw(seed, query_rows, key_rows, heads, kv_heads, dim):
    rng = np.random.default_rng(seed)
    shapes = ((query_rows, heads), (key_rows, kv_heads), (key_rows, kv_heads), (query_rows, heads))
    return [rng.standard_normal((*shape, dim), dtype=np.float32) for shape in shapes]


def run(arrays, offsets, **options):
    q, k, v, dout = arrays
    out, lse = dcp.ops.attention(q, k, v, offsets, compute="bfloat16", **options)
    grads = dcp.ops.attention_backward(
        dout, q, k, v, out, lse, offsets, compute="bfloat16", **options
    )
    return out, lse, *grads


def check(arrays, offsets, **options):
    """Against float64 on rounded q, k, v, dout. Left over is the rounding of weights and of score
    gradients: 2^-9 of each, with random signs, so the error is compared with what is added up."""
    results = run(arrays, offsets, **options)
    q, k, v, dout = (bf16(x) for x in arrays)
    exact = ref.attention(q, k, v, offsets, **options)
    exact += ref.attention_backward(dout, q, k, v, offsets, **options)
    for got, want, name in zip(results, exact, ("out", "lse", "dq", "dk", "dv"), strict=True):
        assert got.shape == want.shape
        masked = np.isneginf(want)
        assert np.array_equal(np.isneginf(got), masked), name
        size = max(1.0, float(np.abs(want[~masked]).max(initial=0)))
        limit = 2e-6 if name == "lse" else 2.0**-6
        assert np.abs(got[~masked] - want[~masked]).max(initial=0) <= limit * size, name
    return results


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33, 64, 80, 96, 127, 200, 256])
def test_every_head_dimension(isa, dim, causal):
    check(draw(0, 85, 85, 2, 2, dim), offsets_of([1, 0, 37, 2, 45]), causal=causal)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 15, 16, 63, 64, 65, 127, 129, 255, 500])
def test_lengths_around_tile_borders(isa, length):
    check(draw(1, length, length, 2, 1, 32), [0, length])


def test_segments_of_a_long_sequence(isa):
    check(draw(2, 1100, 1100, 1, 1, 16), [0, 1100])
    check(draw(2, 30, 1100, 2, 1, 16), [0, 30], key_offsets=[0, 1100])
    check(draw(2, 1100, 30, 1, 1, 16), [0, 1100], key_offsets=[0, 30])


@settings(max_examples=50, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.integers(1, 40),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, -0.5, 1.0]),
    spare=st.integers(0, 3),
    same=st.booleans(),
)
def test_any_shape(isa, lengths, kv_heads, group, dim, causal, scale, spare, same):
    _dcp.set_isa(isa)
    offsets = offsets_of([a for a, _ in lengths])
    key_offsets = None if same else offsets_of([b for _, b in lengths])
    rows = int(offsets[-1]) + spare
    key_rows = rows if same else int(key_offsets[-1]) + spare
    arrays = draw(3, rows, key_rows, kv_heads * group, kv_heads, dim)
    for x in arrays:
        x *= 0.5
    results = check(arrays, offsets, key_offsets=key_offsets, causal=causal, scale=scale)
    out, lse, dq, dk, dv = results
    end, key_end = int(offsets[-1]), int((offsets if same else key_offsets)[-1])
    assert not out[end:].any() and np.isneginf(lse[:, end:]).all() and not dq[end:].any()
    assert not dk[key_end:].any() and not dv[key_end:].any()


def test_one_key_gives_its_rounded_value(isa):
    q, k, v, _ = draw(5, 1, 1, 21, 7, 120)
    for scale in (None, 0.0, 17.0):
        out, _ = dcp.ops.attention(q, k, v, [0, 0, 0, 1], scale=scale, compute="bfloat16")
        assert np.array_equal(out, np.repeat(bf16(v), 3, axis=1))


def test_sequences_do_not_see_each_other(isa):
    """Case A-08 with an odd length in front: no pair of factors reaches over the border."""
    for lengths in ([3, 5], [4, 5], [67, 1], [1, 66]):
        offsets = offsets_of(lengths)
        first, rows = lengths[0], sum(lengths)
        arrays = draw(11, rows, rows, 2, 1, 23)
        before = run(arrays, offsets)
        for value in (np.nan, np.inf, 7.0):
            for part in (slice(None, first), slice(first, None)):
                changed = [x.copy() for x in arrays]
                for x in changed:
                    x[part] = value
                kept = slice(first, None) if part.start is None else slice(None, first)
                for a, b in zip(before, run(changed, offsets), strict=True):
                    assert np.array_equal(*(x[:, kept] if a.ndim == 2 else x[kept] for x in (a, b)))


def test_fully_masked_rows(isa):
    """Case A-09: no key at all, or causal with more queries than keys."""
    arrays = draw(12, 12, 5, 2, 2, 16)
    offsets, key_offsets = [0, 4, 12], [0, 0, 5]
    out, lse, dq, dk, dv = run(arrays, offsets, key_offsets=key_offsets)
    assert not out[:7].any() and np.isneginf(lse[:, :7]).all() and not dq[:7].any()
    assert out[7:].all() and np.isfinite(lse[:, 7:]).all()
    assert np.isfinite(dk).all() and np.isfinite(dv).all()
    arrays[1][:], arrays[2][:] = np.nan, np.nan  # a masked row does not even look
    out, lse, dq, *_ = run(arrays, offsets, key_offsets=key_offsets)
    assert not out[:7].any() and np.isneginf(lse[:, :7]).all() and not dq[:7].any()


def test_nan_stays_inside_a_row(isa):
    q, k, v, _ = draw(16, 20, 20, 1, 1, 16)
    want, _ = dcp.ops.attention(q, k, v, [0, 20], compute="bfloat16")
    q[7] = np.nan
    out, lse = dcp.ops.attention(q, k, v, [0, 20], compute="bfloat16")
    rest = np.arange(20) != 7
    assert np.isnan(out[7]).all() and np.isnan(lse[0, 7])
    assert np.array_equal(out[rest], want[rest])


@pytest.mark.parametrize("place", [0, 1, 40, 70, 150, 199])
def test_a_score_far_above_the_others(isa, place):
    """The reference is raised in any tile; weights before it fade to nothing."""
    q, k, v, dout = draw(13, 200, 200, 1, 1, 16)
    k *= 0.01
    k[place] = 300 * q[150] / np.linalg.norm(q[150])
    for x in (q, k, v, dout):
        x[:] = bf16(x)
    exact, lse = ref.attention(q, k, v, [0, 200], causal=False)
    out, got_lse = dcp.ops.attention(q, k, v, [0, 200], causal=False, compute="bfloat16")
    assert np.abs(out - exact).max() < 2.0**-7 * np.abs(v).max()
    assert np.abs(got_lse - lse).max() < 2e-6 * np.abs(lse).max()


@pytest.mark.parametrize("lengths", [[900], [700, 3, 0, 121, 40], [20] * 30], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_same_bits_for_any_number_of_threads(isa, lengths, causal):
    offsets = offsets_of(lengths)
    arrays = draw(18, offsets[-1], offsets[-1], 2, 1, 16)
    results = []
    for threads in (1, 2, 3, 8):
        _dcp.set_num_threads(threads)
        results.append(run(arrays, offsets, causal=causal))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_error_does_not_grow_with_length(isa):
    """Weights are rounded one by one: their errors average out as their number grows."""
    errors = []
    for n in (64, 512, 2048):
        arrays = draw(20, n, n, 1, 1, 64)
        q, k, v, _ = (bf16(x) for x in arrays)
        out, _ = dcp.ops.attention(q, k, v, [0, n], causal=False, compute="bfloat16")
        exact, _ = ref.attention(q, k, v, [0, n], causal=False)
        errors.append(np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)))
    assert max(errors) < 2.0**-8 and errors[2] < 1.25 * errors[0]


# ---- casts, embedding -----------------------------------------------------------------------

F32, BF16 = 0, 1


def cast(x, out, from_type, to_type):
    fields = {"count": x.size, "from": from_type, "to": to_type}
    _dcp.kernel_run("cast", fields | {"x": x.view(np.uint8), "out": out.view(np.uint8)})
    return out


@given(
    count=st.one_of(st.integers(0, 70), st.sampled_from([1000, 40000])),
    offset=st.integers(0, 3),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_cast(count, offset, isa, seed):
    _dcp.set_isa(isa)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, offset + count, dtype=np.uint32)  # every kind of number
    x = bits.view(np.float32)[offset:]
    x[: min(count, ODD_NUMBERS.size)] = ODD_NUMBERS[:count]
    narrow = cast(x, np.zeros(count, np.uint16), F32, BF16)
    assert np.array_equal(narrow, bf16_bits(x))
    wide = cast(narrow, np.zeros(count, np.float32), BF16, F32)
    assert wide.tobytes() == bf16(x).tobytes()
    assert cast(x, np.zeros_like(x), F32, F32).tobytes() == x.tobytes()
    assert cast(narrow, np.zeros_like(narrow), BF16, BF16).tobytes() == narrow.tobytes()


def test_cast_refuses_other_types():
    x = np.zeros(4, np.float32)
    with pytest.raises(dcp.DTypeError, match="from float64 to bfloat16 must be float32 or bfloa"):
        cast(x, x.copy(), 2, BF16)


@given(rows=st.integers(0, 9), width=st.integers(0, 70), isa=st.sampled_from(ISAS))
@settings(max_examples=30, deadline=None)
def test_embedding(rows, width, isa):
    _dcp.set_isa(isa)
    rng = np.random.default_rng(rows * 100 + width)
    tokens = rng.integers(0, 6, rows, dtype=np.int32)
    weight = rng.standard_normal((6, width), np.float32)
    shape = {"rows": rows, "width": width, "vocab": 6, "tokens": tokens}
    for more in ({"weight": weight, "round": 1}, {"weight_bf16": bf16_bits(weight)}):
        out = np.full((rows, width), 7, np.float32)
        _dcp.kernel_run("embedding", shape | more | {"out": out})
        assert np.array_equal(out, bf16(weight)[tokens])
