"""Variable-length attention against float64 NumPy, for every instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import ref_attention as ref
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp

ISAS = [isa for isa in _dcp.cpu_info()["isas"] if isa != "avx512bf16"]  # see test_bf16.py


@pytest.fixture(autouse=True)
def restore():
    before = _dcp.cpu_info()
    yield
    _dcp.set_isa(before["isa"])
    _dcp.set_num_threads(before["cores"])


@pytest.fixture(params=ISAS)
def isa(request):
    _dcp.set_isa(request.param)
    return request.param


def offsets_of(lengths):
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def draw(seed, query_rows, key_rows, heads, kv_heads, dim):
    rng = np.random.default_rng(seed)
    shapes = ((query_rows, heads), (key_rows, kv_heads), (key_rows, kv_heads), (query_rows, heads))
    return [rng.standard_normal((*shape, dim), dtype=np.float32) for shape in shapes]


def close(got, plain, exact, floor, what):
    """As good as the textbook fp32 version, within a factor of two and a floor."""
    assert got.shape == exact.shape, what
    masked = np.isneginf(exact)
    assert np.array_equal(np.isneginf(got), masked), what
    scale = max(1.0, float(np.abs(exact[~masked]).max(initial=0)))
    error = np.abs(got[~masked] - exact[~masked]).max(initial=0)
    limit = np.abs(plain[~masked] - exact[~masked]).max(initial=0)
    assert error <= 2 * limit + floor * scale, f"{what}: error {error:.2e}, plain {limit:.2e}"


def check(arrays, offsets, **options):
    """Both passes against the reference; returns what they gave."""
    q, k, v, dout = arrays
    out, lse = dcp.ops.attention(q, k, v, offsets, **options)
    grads = dcp.ops.attention_backward(dout, q, k, v, out, lse, offsets, **options)
    exact = ref.attention(q, k, v, offsets, **options)
    plain = ref.attention(q, k, v, offsets, **options, dtype=np.float32)
    exact += ref.attention_backward(dout, q, k, v, offsets, **options)
    plain += ref.attention_backward(dout, q, k, v, offsets, **options, dtype=np.float32)
    # Scores are rounded to fp32, so weights carry their size as a relative error. Gradients start
    # from lse and delta = rowsum(dout * out), the plain version from its own weights: rounding
    # of lse is a relative error too, and delta cancels against products of dim terms.
    top = np.abs(exact[1][np.isfinite(exact[1])]).max(initial=0)
    floor = 1e-6 + 3e-8 * top
    factor = max(1.0, abs(options.get("scale") or 0.0))
    gradient_floor = factor * (1e-6 * q.shape[2] ** 0.5 + 1.2e-7 * top)
    floors = (floor, floor, *(gradient_floor,) * 3)
    names = ("out", "lse", "dq", "dk", "dv")
    for values in zip((out, lse, *grads), plain, exact, floors, names, strict=True):
        close(*values)
    return (out, lse, *grads)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [1, 7, 16, 33, 64, 80, 96, 128, 200, 256])
def test_every_head_dimension(isa, dim, causal):
    check(draw(0, 85, 85, 2, 2, dim), offsets_of([1, 0, 37, 2, 45]), causal=causal)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 15, 16, 63, 64, 65, 127, 129, 255, 500])
def test_lengths_around_tile_borders(isa, length):
    check(draw(1, length, length, 2, 1, 32), [0, length])


def test_segments_of_a_long_sequence(isa):
    """More keys than one segment of the backward pass, more rows than one unit."""
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
    scale=st.sampled_from([None, 0.0, -0.5, 1.0, 3.0]),
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
    results = check(arrays, offsets, key_offsets=key_offsets, causal=causal, scale=scale)
    out, lse, dq, dk, dv = results
    end, key_end = int(offsets[-1]), int((offsets if same else key_offsets)[-1])
    assert not out[end:].any() and np.isneginf(lse[:, end:]).all() and not dq[end:].any()
    assert not dk[key_end:].any() and not dv[key_end:].any()


def test_single_queries_and_an_empty_sequence(isa):
    """Case A-01: longest query 1, one sequence empty, 9 query heads on 3 key heads."""
    arrays = draw(4, 2, 8, 9, 3, 64)
    check(arrays, [0, 1, 1, 2], key_offsets=[0, 3, 3, 8])


def test_one_token_many_empty_sequences(isa):
    """Case A-02: with one key the result is the value, whatever the scale."""
    q, k, v, _ = draw(5, 1, 1, 21, 7, 120)
    for scale in (None, 0.0, 17.0):
        out, _ = dcp.ops.attention(q, k, v, [0, 0, 0, 0, 1], scale=scale)
        assert np.array_equal(out, np.repeat(v, 3, axis=1))


def test_rows_beyond_the_last_offset(isa):
    """Case A-04: they come back as zero, and so does their gradient."""
    q, k, v, dout = draw(6, 10, 10, 2, 2, 16)
    for x in (q, k, v, dout):
        x[7:] = np.nan
    out, lse = dcp.ops.attention(q, k, v, [0, 4, 7])
    grads = dcp.ops.attention_backward(dout, q, k, v, out, lse, [0, 4, 7])
    for x in (out, *grads):
        assert np.isfinite(x).all() and not x[7:].any()
    assert np.isneginf(lse[:, 7:]).all() and np.isfinite(lse[:, :7]).all()


@pytest.mark.parametrize(
    "convert",
    [
        *(np.dtype(c) for c in ("i1", "u1", "<i2", ">i2", "u4", "<i4", ">i4", "<i8", ">i8", "u8")),
        list,
        tuple,
    ],
    ids=str,
)
def test_every_integer_type_of_offsets(convert):
    """Cases A-05 and E-05: one result for every way to write the same integers."""
    q, k, v, _ = draw(7, 10, 10, 2, 2, 16)
    offsets = [0, 3, 3, 9]
    given = convert(offsets) if callable(convert) else np.array(offsets, convert)
    got = dcp.ops.attention(q, k, v, given, key_offsets=given)
    want = dcp.ops.attention(q, k, v, np.array(offsets, np.int64))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("offsets", "error", "text"),
    [
        ([0, 4, 3], dcp.ArgumentError, r"offsets\[2\] is 3, below offsets\[1\] = 4"),
        ([1, 4], dcp.ArgumentError, r"offsets\[0\] is 1, must be 0"),
        ([-1, 4], dcp.ArgumentError, r"offsets\[0\] is -1, must be 0"),
        ([0, 11], dcp.ArgumentError, r"offsets\[1\] is 11, beyond the 10 rows of"),
        ([], dcp.ArgumentError, "offsets is empty"),
        ([[0, 3]], dcp.ArgumentError, "offsets must be 1-D"),
        ([0.0, 4.0], dcp.DTypeError, "offsets must be integers"),
        ([False, True], dcp.DTypeError, "offsets must be integers"),
        (["0", "1"], dcp.DTypeError, "offsets must be integers"),
        ([0, 2**63], (dcp.ArgumentError, dcp.DTypeError), "offsets"),
    ],
)
def test_bad_offsets(offsets, error, text):
    """Case A-05: the message names the argument, the value and the rule."""
    q, k, v, _ = draw(8, 10, 10, 2, 2, 16)
    with pytest.raises(error, match=text):
        dcp.ops.attention(q, k, v, offsets)


def test_bad_key_offsets():
    q, k, v, dout = draw(9, 10, 6, 2, 2, 16)
    for offsets, text in (
        ([0, 7], r"key_offsets\[1\] is 7, beyond the 6 rows of k"),
        ([0, 3, 6], "key_offsets holds 3 values, must hold 2"),
        ([2, 6], r"key_offsets\[0\] is 2, must be 0"),
    ):
        with pytest.raises(dcp.ArgumentError, match=text):
            dcp.ops.attention(q, k, v, [0, 10], key_offsets=offsets)
    with pytest.raises(dcp.ArgumentError, match=r"offsets\[1\] is 10, beyond the 6 rows of k"):
        dcp.ops.attention(q, k, v, [0, 10])
    out, lse = np.zeros_like(q), np.zeros((2, 10), np.float32)
    with pytest.raises(dcp.ArgumentError, match=r"offsets\[1\] is 10, beyond the 6 rows of k"):
        dcp.ops.attention_backward(dout, q, k, v, out, lse, [0, 10])


def test_bad_arrays():
    q, k, v, dout = draw(10, 10, 10, 4, 2, 16)
    offsets = [0, 10]
    call = dcp.ops.attention
    with pytest.raises(dcp.DTypeError, match="q must be a C-contiguous 3-D"):
        call(q.astype(np.float64), k, v, offsets)
    with pytest.raises(dcp.DTypeError, match="k must be"):
        call(q, k.astype(np.float16), v, offsets)
    with pytest.raises(dcp.DTypeError, match="non-contiguous"):
        call(q, k, v[:, ::-1], offsets)
    with pytest.raises(dcp.DTypeError, match="q must be"):
        call(q.astype(">f4"), k, v, offsets)
    with pytest.raises(dcp.DTypeError, match="q must be"):
        call(q[0], k, v, offsets)
    with pytest.raises(dcp.ArgumentError, match=r"v has shape \(9, 2, 16\), must have \(10, 2, 16"):
        call(q, k, v[:9], offsets)
    with pytest.raises(dcp.ArgumentError, match="k has shape"):
        call(q, k[..., :8].copy(), v, offsets)
    with pytest.raises(dcp.ArgumentError, match="heads 4 must be a positive multiple"):
        call(q, *(np.zeros((10, 3, 16), np.float32),) * 2, offsets)
    with pytest.raises(dcp.ArgumentError, match=r"head_dim 257 must lie in 1\.\.256"):
        call(*(np.zeros((10, 1, 257), np.float32),) * 3, offsets)
    with pytest.raises(dcp.ArgumentError, match="scale nan must be finite"):
        call(q, k, v, offsets, scale=float("nan"))
    out, lse = call(q, k, v, offsets)
    with pytest.raises(dcp.ArgumentError, match=r"lse has shape \(10, 4\), must have \(4, 10\)"):
        dcp.ops.attention_backward(dout, q, k, v, out, lse.T.copy(), offsets)
    with pytest.raises(dcp.ArgumentError, match="out has shape"):
        dcp.ops.attention_backward(dout, q, k, v, out[:5], lse, offsets)
    with pytest.raises(dcp.ArgumentError, match="dout has shape"):
        dcp.ops.attention_backward(dout[:5], q, k, v, out, lse, offsets)


def test_sequences_do_not_see_each_other(isa):
    """Case A-08: another sequence changes, even to NaN, and this one moves by exactly 0."""
    arrays = draw(11, 10, 10, 2, 1, 24)
    offsets = [0, 3, 8]
    before = run(arrays, offsets)
    for value in (np.nan, np.inf, 7.0):
        changed = [x.copy() for x in arrays]
        for x in changed:
            x[:3] = value
        for a, b in zip(before, run(changed, offsets), strict=True):
            axis_last = a.ndim == 2  # lse [H, T]
            assert np.array_equal(*(x[:, 3:] if axis_last else x[3:] for x in (a, b)))
    alone = run([x[3:8].copy() for x in arrays], [0, 5])
    for a, b in zip(before, alone, strict=True):
        assert np.array_equal(a[:, 3:8] if a.ndim == 2 else a[3:8], b)


def run(arrays, offsets, **options):
    q, k, v, dout = arrays
    out, lse = dcp.ops.attention(q, k, v, offsets, **options)
    return out, lse, *dcp.ops.attention_backward(dout, q, k, v, out, lse, offsets, **options)


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


@pytest.mark.parametrize("sign", [1, -1])
def test_real_scores_below_any_sentinel(isa, sign):
    """Case A-09: scores of -60000 and -59999 have weights 0.2689 and 0.7311."""
    q = np.full((1, 1, 1), sign * 1.0, np.float32)
    k = np.array([-6e4, -6e4 + 1], np.float32).reshape(2, 1, 1)
    v = np.array([1, 0], np.float32).reshape(2, 1, 1)
    out, lse = dcp.ops.attention(q, k, v, [0, 1], key_offsets=[0, 2], scale=float(sign))
    assert abs(out[0, 0, 0] - 1 / (1 + np.e)) < 1e-6
    assert lse[0, 0] == np.float32(-6e4 + 1 + np.log1p(np.exp(-1.0)))


@pytest.mark.parametrize("place", [0, 1, 40, 70, 150, 199])
def test_a_score_far_above_the_others(isa, place):
    """The reference is raised in any tile; weights before it fade to nothing."""
    q, k, v, dout = draw(13, 200, 200, 1, 1, 16)
    k *= 0.01
    k[place] = 300 * q[150] / np.linalg.norm(q[150])
    check((q, k, v, dout), [0, 200], causal=False)
    check((q, k, v, dout), [0, 200], scale=-0.3)


def test_scores_that_rise_by_steps(isa):
    """Every panel is above the one before: the reference is raised again and again."""
    q, k, v, dout = draw(14, 300, 300, 1, 1, 8)
    q[:] = np.abs(q)
    k[:] = np.linspace(0, 1, 300, dtype=np.float32)[:, None, None]
    check((q, k, v, dout), [0, 300], scale=8.0, causal=False)
    out, _ = dcp.ops.attention(q, k, v, [0, 300], scale=800.0, causal=False)
    exact, _ = ref.attention(q, k, v, [0, 300], scale=800.0, causal=False)
    assert np.abs(out - exact).max() < 1e-3  # scores reach 10000, rounded to 1e-3


def test_log_sum_exp_of_grouped_heads(isa):
    """Case A-10: 64 query heads on 8 key heads, checked head by head."""
    q, k, v, _ = draw(15, 256, 256, 64, 8, 16)
    _, lse = dcp.ops.attention(q, k, v, [0, 256], causal=False)
    for h in range(64):
        scores = q[:, h].astype(np.float64) @ k[:, h // 8].T / 4
        exact = np.log(np.exp(scores).sum(axis=1))
        assert np.abs(lse[h] - exact).max() < 2e-6


def test_nan_stays_inside_a_row(isa):
    """A NaN query spoils its own row only."""
    q, k, v, _ = draw(16, 20, 20, 1, 1, 16)
    want, _ = dcp.ops.attention(q, k, v, [0, 20])
    q[7] = np.nan
    out, lse = dcp.ops.attention(q, k, v, [0, 20])
    rest = np.arange(20) != 7
    assert np.isnan(out[7]).all() and np.isnan(lse[0, 7])
    assert np.array_equal(out[rest], want[rest])


def test_read_only_memory_maps(tmp_path):
    """Case E-04: read-only maps serve wherever an argument is only read."""
    arrays = draw(17, 10, 10, 2, 2, 16)
    offsets = np.array([0, 6, 10], ">i4")
    maps = []
    for i, x in enumerate((*arrays, offsets)):
        x.tofile(tmp_path / f"{i}.bin")
        maps.append(np.memmap(tmp_path / f"{i}.bin", x.dtype, "r", shape=x.shape))
    got, want = run(maps[:4], maps[4]), run(arrays, [0, 6, 10])
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "lengths",
    [[900], [700, 3, 0, 120, 40], [20] * 30, [1000, 900]],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_same_bits_for_any_number_of_threads(isa, lengths, causal):
    """One long sequence with few heads is cut over all cores, and no bit changes."""
    offsets = offsets_of(lengths)
    arrays = draw(18, offsets[-1], offsets[-1], 2, 1, 16)
    results = []
    for threads in (1, 2, 3, 8):
        _dcp.set_num_threads(threads)
        results.append(run(arrays, offsets, causal=causal))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_positional_settings_are_refused():
    q, k, v, _ = draw(19, 4, 4, 1, 1, 8)
    with pytest.raises(TypeError):
        dcp.ops.attention(q, k, v, [0, 4], None)
