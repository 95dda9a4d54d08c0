"""Least squares with coefficients that cannot be negative, and bounds that lie nowhere below.

Sums are rounded once (`math.fsum`), everything else is plain arithmetic: the same numbers on every
machine and with every number of threads, which coefficients that enter a plan must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp._dcp import ArgumentError

__all__ = ["fit_memory", "memory_probes", "nnls"]

# Pivots of the scaled normal equations, whose diagonal is 1: below, a column says nothing new.
_LEAST_PIVOT = 1e-10
_BETWEEN = 1.0005  # what bytes between two probes may lie above a line through both
_SLACK = 1e-12  # of a gradient that is taken for positive


def nnls(rows: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """The x >= 0 for which ``|rows x - values|`` is least (Lawson and Hanson, 1974).

    Where columns say the same, the first that is taken stands for them and the others stay 0.

    Parameters
    ----------
    rows : float [m, n]
    values : float [m]

    Returns
    -------
    float64 [n]

    Raises
    ------
    dcp.ArgumentError
        Shapes do not agree, or a number is not finite.

    Examples
    --------
    >>> from dcp.fitting import nnls
    >>> nnls([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], [1.0, 3.0, 5.0]).round(9).tolist()
    [1.0, 2.0]
    >>> nnls([[1.0, 0.0], [1.0, 1.0]], [1.0, 0.0]).round(9).tolist()
    [0.5, 0.0]
    """
    a, b = np.array(rows, np.float64), np.array(values, np.float64)
    if a.ndim != 2 or b.shape != a.shape[:1]:
        raise ArgumentError(f"rows {list(a.shape)} and values {list(b.shape)} must be [m, n], [m]")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ArgumentError("rows and values must be finite")
    count = a.shape[1]
    scale = [math.sqrt(math.fsum((a[:, j] ** 2).tolist())) or 1.0 for j in range(count)]
    a = a / np.array(scale)
    gram = [[math.fsum((a[:, i] * a[:, j]).tolist()) for j in range(count)] for i in range(count)]
    right = [math.fsum((a[:, i] * b).tolist()) for i in range(count)]
    tolerance = _SLACK * max([abs(v) for v in right], default=0.0)
    x = [0.0] * count
    used: list[int] = []
    refused: set[int] = set()
    while True:
        slope = [
            right[j] - math.fsum(gram[j][k] * x[k] for k in used) if j not in used else 0.0
            for j in range(count)
        ]
        best = max(
            (j for j in range(count) if j not in used and j not in refused),
            key=lambda j: (slope[j], -j),
            default=-1,
        )
        if best < 0 or slope[best] <= tolerance:
            return np.array([v / s for v, s in zip(x, scale, strict=True)])
        found = _inside(gram, right, x, sorted([*used, best]))
        if found is None or found[best] <= 0:
            refused.add(best)  # says nothing that others do not, up to rounding
            continue
        x, used = found, [j for j in range(count) if found[j] > 0]
        refused.clear()


def _inside(
    gram: list[list[float]], right: list[float], start: list[float], used: list[int]
) -> list[float] | None:
    """From `start`, the least squares over the columns `used`, those that would turn < 0 left out.

    None where the columns are dependent.
    """
    x = list(start)
    while used:
        solved = _solve([[gram[i][j] for j in used] for i in used], [right[i] for i in used])
        if solved is None:
            return None
        if min(solved) > 0:
            x = [0.0] * len(x)
            for j, value in zip(used, solved, strict=True):
                x[j] = value
            return x
        # walk towards it, to the first coefficient that reaches 0
        step = min(
            (x[j] / (x[j] - v) for j, v in zip(used, solved, strict=True) if v <= 0 and x[j] > v),
            default=0.0,
        )
        for j, value in zip(used, solved, strict=True):
            x[j] += step * (value - x[j])
        blocked = [j for j, v in zip(used, solved, strict=True) if v <= 0 and x[j] <= 1e-300]
        if not blocked:  # rounding left the first one just above 0
            blocked = [min((x[j], j) for j, v in zip(used, solved, strict=True) if v <= 0)[1]]
        for j in blocked:
            x[j] = 0.0
        used = [j for j in used if j not in blocked]
    return x


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a symmetric positive definite system by Cholesky; None where it is singular."""
    n = len(right)
    low = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j] - math.fsum(low[i][k] * low[j][k] for k in range(j))
            if i == j:
                if rest <= _LEAST_PIVOT:
                    return None
                low[i][i] = math.sqrt(rest)
            else:
                low[i][j] = rest / low[j][j]
    y = [0.0] * n
    for i in range(n):
        y[i] = (right[i] - math.fsum(low[i][k] * y[k] for k in range(i))) / low[i][i]
    for i in reversed(range(n)):
        y[i] = (y[i] - math.fsum(low[k][i] * y[k] for k in range(i + 1, n))) / low[i][i]
    return y


def memory_probes(longest: int) -> list[int]:
    """Numbers of tokens at which bytes are looked at: some 150, closer where they jump.

    Jumps come where another sequence of the greatest length, and another segment of a sequence,
    begins.

    Examples
    --------
    >>> from dcp.fitting import memory_probes
    >>> 4097 in memory_probes(4096), memory_probes(4096)[-1]
    (True, 1048576)
    """
    spread = {round(2 ** (i / 8)) for i in range(161)}
    jumps = {longest * k + 1 for k in range(1, 9)} | {480 * k + 1 for k in range(1, 17)}
    return sorted(spread | {j for j in jumps if j <= 1 << 20})


def fit_memory(
    held: Callable[[int, tuple[int, int]], float], layers: int, probes: Sequence[int]
) -> dict[str, Any]:
    """The cost model's bytes of activations, nowhere below `held` at the probes, and close.

    Parameters
    ----------
    held : callable
        (tokens, (layers, mlps) recomputed) -> bytes.
    layers : int
        Of the model.
    probes : sequence of int
        Numbers of tokens, ascending.

    Returns
    -------
    dict
        `scratch_bytes`, `token_bytes`, `layer_token_bytes`, `mlp_token_bytes`.

    Examples
    --------
    >>> from dcp.fitting import fit_memory
    >>> fit = fit_memory(lambda t, r: 500 + t * (100 - 8 * max(r[0] - 1, 0)), 4, [1, 1000, 2000])
    >>> [round(fit[key + "_bytes"]) for key in ("scratch", "token", "layer_token")]
    [500, 100, 8]
    """
    choices = [(0, 0)]
    if layers > 1:
        choices += [(0, layers), (layers, 0), (0, 2), (2, 0), (layers // 2, layers - layers // 2)]
    tokens = np.array(probes, np.float64)
    value = np.array([[float(held(p, c)) for p in probes] for c in choices])
    value *= _BETWEEN
    wide = tokens >= min(1024, tokens[-1])

    # what a dropped layer saves for certain, at any number of tokens that matters
    def saved(choice: tuple[int, int]) -> float:
        if layers <= 1:
            return 0.0
        least = ((value[0] - value[choices.index(choice)])[wide] / tokens[wide]).min()
        return max(float(least) / (layers - 1), 0.0)

    layer, mlp = saved((layers, 0)), saved((0, layers))
    dropped = np.array([max(n - 1, 0) * layer + max(m - 1, 0) * mlp for n, m in choices])
    whole = value + dropped[:, None] * tokens  # as if nothing were dropped

    # lines above all of it, by slope; the one that is least above in relation to what is held
    least = layers * max(layer, mlp)
    steepest = float((whole / tokens)[:, wide].max())
    slopes = np.linspace(least, max(steepest, least), 400)
    bases = np.array([max(float((whole - s * tokens).max()), 0.0) for s in slopes])
    over = [
        float(((base + s * tokens - dropped[:, None] * tokens) / value).max())
        for s, base in zip(slopes, bases, strict=True)
    ]
    best = int(np.argmin(over))
    return {
        "scratch_bytes": float(bases[best]),
        "token_bytes": float(slopes[best]),
        "layer_token_bytes": layer,
        "mlp_token_bytes": mlp,
    }
