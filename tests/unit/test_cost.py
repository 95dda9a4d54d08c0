"""The cost model: formulas, analytic devices, bytes by recompute, fits, files."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.fitting import nnls


def best_by_subsets(rows: np.ndarray, values: np.ndarray) -> float:
    """Least square sum over all x >= 0: some subset of columns, solved without a sign."""
    best = float(values @ values)
    n = rows.shape[1]
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            x = np.linalg.lstsq(rows[:, chosen], values, rcond=None)[0]
            if (x >= 0).all():
                rest = rows[:, chosen] @ x - values
                best = min(best, float(rest @ rest))
    return best


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    positive=st.booleans(),
    copies=st.booleans(),
)
def test_nnls_against_all_subsets(
    rows: int, columns: int, seed: int, positive: bool, copies: bool
) -> None:
    """Also with fewer rows than columns, with equal columns, and with columns of zeros."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(0 if positive else -1, 1, (rows, columns)) * 10.0 ** rng.integers(
        -6, 6, columns
    )
    if copies and columns > 1:
        a[:, 1] = 3 * a[:, 0]
    if copies and columns > 2:
        a[:, 2] = 0
    b = rng.uniform(-1, 1, rows)
    x = nnls(a, b)
    rest = a @ x - b
    assert (x >= 0).all()
    assert float(rest @ rest) <= best_by_subsets(a, b) * (1 + 1e-6) + 1e-9
