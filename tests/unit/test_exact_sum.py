"""The sum behind the gradient norm: exact, rounded once, in any order."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp

doubles = st.floats(min_value=0, allow_infinity=False, allow_nan=False)


def nearest(values):
    """The double nearest to the exact sum, by rational arithmetic."""
    try:
        return float(sum((Fraction(x) for x in values), Fraction(0)))
    except OverflowError:
        return math.inf


@given(st.lists(doubles, max_size=30))
@settings(max_examples=200, deadline=None)
def test_nearest_double(values):
    assert _dcp.exact_sum(np.array(values, float)) == nearest(values)


@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.integers(-1074, 971)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_all_exponents(parts):
    values = [math.ldexp(m, e) for m, e in parts]
    assert _dcp.exact_sum(np.array(values, float)) == nearest(values)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0],
        [5e-324] * 3,
        [2.2250738585072014e-308, 5e-324],
        [1.0, 2.0**-53],  # a tie, to even
        [1.0, 2.0**-53, 5e-324],  # just above it
        [1.0 + 2.0**-52, 2.0**-53],  # a tie, up
        [2.0**53 - 1, 0.5],  # rounds up to a power of two
        [1.7976931348623157e308, 1.7976931348623157e308],
        [1.7976931348623157e308, 2.0**969],  # stays finite
        [1.7976931348623157e308, 2.0**970],  # a tie, up to infinity
    ],
)
def test_borders(values):
    assert _dcp.exact_sum(np.array(values, float)) == nearest(values)


def test_many_terms_of_one_size_in_any_order():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.full(300_000, 1.9999999), rng.random(1000) ** 40, [1e300]])
    wanted = math.fsum(values)
    for _ in range(3):
        rng.shuffle(values)
        assert _dcp.exact_sum(values) == wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_square_gives_nan(bad):
    assert math.isnan(_dcp.exact_sum(np.array([1.0, bad, 2.0])))


def test_wrong_type():
    with pytest.raises(dcp.DTypeError, match="float64"):
        _dcp.exact_sum(np.ones(3, np.float32))
