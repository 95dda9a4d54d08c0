"""The CPU matrix product against float64, over shapes, strides, flags and instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp

ISAS = [isa for isa in _dcp.cpu_info()["isas"] if isa != "avx512bf16"]  # see test_bf16.py
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([47, 64, 65, 96, 97, 129, 257, 300]))
DEPTHS = st.one_of(SIZES, st.sampled_from([688, 704, 705, 1408, 1500]))


@pytest.fixture(autouse=True, scope="module")
def _restore() -> Iterator[None]:
    before = _dcp.cpu_info()
    yield
    _dcp.set_isa(before["isa"])
    _dcp.set_num_threads(before["cores"])


def padded(rng: np.random.Generator, rows: int, columns: int, padding: int) -> np.ndarray:
    """A [rows, columns] view of an array whose rows are `padding` longer."""
    return rng.standard_normal((rows, columns + padding), np.float32)[:, :columns]


def plain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The textbook product in float32: one sum per element, in increasing k."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        c += a[:, k, None] * b[None, k, :]
    return c


def check(got: np.ndarray, a: np.ndarray, b: np.ndarray, rest: np.ndarray | float) -> None:
    """At most twice the error of the plain float32 sum, and a floor."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(got - (exact + rest)).max(initial=0.0)
    bound = 2 * np.abs(plain(a, b) - exact).max(initial=0.0)
    size = np.abs(exact).max(initial=0.0) + np.abs(rest).max(initial=0.0)
    # where few elements leave `plain` to luck: half a unit in the last place of all that was added
    added = (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)).max(initial=0.0)
    assert error <= bound + 4e-7 * size + 2.0**-24 * added


@given(
    m=SIZES,
    n=SIZES,
    k=DEPTHS,
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    pack=st.booleans(),
    epilogue=st.sampled_from(["none", "add", "add is c", "bias", "both", "accumulate"]),
    padding=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_product(
    m: int,
    n: int,
    k: int,
    isa: str,
    threads: int,
    trans_a: bool,
    trans_b: bool,
    pack: bool,
    epilogue: str,
    padding: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    a = padded(rng, *((k, m) if trans_a else (m, k)), padding)
    b = padded(rng, *((n, k) if trans_b else (k, n)), padding)
    frame = rng.standard_normal((m, n + padding), np.float32)
    beside = frame[:, n:].copy()
    c = frame[:, :n]
    add = padded(rng, m, n, 2)
    bias = rng.standard_normal(n, np.float32)
    rest: np.ndarray | float = 0.0
    options: dict[str, object] = {}
    if epilogue in ("add", "both"):
        options["add"] = add
        rest = rest + add.astype(np.float64)
    if epilogue in ("bias", "both"):
        options["bias"] = bias
        rest = rest + bias.astype(np.float64)
    if epilogue in ("add is c", "accumulate"):
        options.update({"accumulate": True} if epilogue == "accumulate" else {"add": c})
        rest = c.astype(np.float64)
    _dcp.set_isa(isa)
    _dcp.set_num_threads(threads)
    if pack:
        options["packed"] = _dcp.gemm_pack(b, trans_b=trans_b)
    _dcp.gemm(a, b, c, trans_a=trans_a, trans_b=trans_b, **options)
    check(c, a.T if trans_a else a, b.T if trans_b else b, rest)
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
def test_bits_depend_on_row_and_column_only(
    m: int, n: int, k: int, isa: str, trans_a: bool, trans_b: bool, data: st.DataObject
) -> None:
    """Thread count, packing, strides and the other rows and columns change no bit."""
    rng = np.random.default_rng(m * n + k)
    a = rng.standard_normal((k, m) if trans_a else (m, k), np.float32)
    b = rng.standard_normal((n, k) if trans_b else (k, n), np.float32)
    flags = {"trans_a": trans_a, "trans_b": trans_b}
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
        for packed in (None, _dcp.gemm_pack(b, trans_b=trans_b)):
            got = np.empty((m, n), np.float32)
            _dcp.gemm(a, b, got, packed=packed, **flags)
            assert got.tobytes() == want.tobytes()
        part = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        _dcp.gemm(part_a, part_b, part, **flags)
        assert part.tobytes() == want[rows, columns].tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_tasks_give_the_bits_of_one(threads: int) -> None:
    """Large enough to be cut into tasks, with uneven edges everywhere."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((515, 1411), np.float32)
    b = rng.standard_normal((389, 1411), np.float32)
    want = np.empty((515, 389), np.float32)
    _dcp.set_num_threads(1)
    for row in range(0, 515, 103):
        _dcp.gemm(a[row : row + 103], b, want[row : row + 103], trans_b=True)
    check(want, a, b.T, 0.0)
    _dcp.set_num_threads(threads)
    got = np.empty_like(want)
    _dcp.gemm(a, b, got, trans_b=True)
    assert got.tobytes() == want.tobytes()
    got[:] = 0
    transposed = np.ascontiguousarray(a.T)
    _dcp.gemm(transposed, b, got, trans_a=True, trans_b=True, accumulate=True)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pack", [False, True])
def test_not_finite_numbers_spread_as_ieee_says(isa: str, pack: bool) -> None:
    """0 * NaN and 0 * inf are NaN, also from rows and columns at the edge of a tile."""
    _dcp.set_isa(isa)
    a = np.zeros((13, 20), np.float32)
    b = np.ones((20, 35), np.float32)
    a[12, 19] = np.inf
    b[19, 34] = 0
    b[3, 1] = np.nan
    b[5, 2] = -np.inf
    c = np.empty((13, 35), np.float32)
    _dcp.gemm(a, b, c, packed=_dcp.gemm_pack(b) if pack else None)
    want = np.zeros((13, 35), np.float32)
    want[12] = np.inf
    want[12, 34] = np.nan
    want[:, 1:3] = np.nan
    assert np.array_equal(c, want, equal_nan=True)


def test_vector_sets_agree() -> None:
    """AVX2 and AVX-512 do the same fused operations in the same order."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((29, 1000), np.float32)
    b = rng.standard_normal((1000, 51), np.float32)
    results = set()
    for isa in ISAS:
        _dcp.set_isa(isa)
        c = np.empty((29, 51), np.float32)
        _dcp.gemm(a, b, c)
        check(c, a, b, 0.0)
        if isa != "portable":
            results.add(c.tobytes())
    assert len(results) <= 1


def test_accumulate_excludes_add_and_bias() -> None:
    a = np.ones((2, 2), np.float32)
    with pytest.raises(dcp.ArgumentError, match="accumulate 1 must be 0 where add is given"):
        _dcp.gemm(a, a, a.copy(), accumulate=True, add=a)
    with pytest.raises(dcp.ArgumentError, match="accumulate 1 must be 0 where bias is given"):
        _dcp.gemm(a, a, a.copy(), accumulate=True, bias=a[0])
