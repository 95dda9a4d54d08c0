"""Attention forward and backward in plain NumPy, slow and obvious: the judge of the kernels.

Computes in the dtype it is given: float64 for the exact answer, float32 for the plain version
whose error the kernels are measured against.
"""

from __future__ import annotations

import numpy as np


def _sequences(offsets, key_offsets):
    key_offsets = offsets if key_offsets is None else key_offsets
    spans = zip(offsets, offsets[1:], key_offsets, key_offsets[1:], strict=False)
    return [tuple(int(x) for x in span) for span in spans]


def _mask(query_count, key_count, causal):
    """True where query i sees key j; bottom-right aligned."""
    if not causal:
        return np.ones((query_count, key_count), bool)
    i = np.arange(query_count)[:, None]
    return np.arange(key_count)[None] <= i + key_count - query_count


def _weights(q, k, scale, mask):
    scores = np.where(mask, (q @ k.T) * scale, -np.inf)
    top = scores.max(axis=1, initial=-np.inf, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    return weights / np.where(total > 0, total, 1), lse


def attention(q, k, v, offsets, *, key_offsets=None, causal=True, scale=None, dtype=np.float64):
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scale = dtype(q.shape[2] ** -0.5 if scale is None else scale)
    out = np.zeros(q.shape, dtype)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, dtype)
    for a, b, c, d in _sequences(offsets, key_offsets):
        mask = _mask(b - a, d - c, causal)
        for h in range(q.shape[1]):
            weights, lse[h, a:b] = _weights(q[a:b, h], k[c:d, h // group], scale, mask)
            out[a:b, h] = weights @ v[c:d, h // group]
    return out, lse


def attention_backward(
    dout, q, k, v, offsets, *, key_offsets=None, causal=True, scale=None, dtype=np.float64
):
    dout, q, k, v = (x.astype(dtype) for x in (dout, q, k, v))
    group = q.shape[1] // k.shape[1]
    scale = dtype(q.shape[2] ** -0.5 if scale is None else scale)
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (q, k, v))
    for a, b, c, d in _sequences(offsets, key_offsets):
        mask = _mask(b - a, d - c, causal)
        for h in range(q.shape[1]):
            j = h // group
            weights, _ = _weights(q[a:b, h], k[c:d, j], scale, mask)
            dweights = dout[a:b, h] @ v[c:d, j].T
            delta = (weights * dweights).sum(axis=1, keepdims=True)
            dscores = weights * (dweights - delta) * scale
            dq[a:b, h] = dscores @ k[c:d, j]
            dk[c:d, j] += dscores.T @ q[a:b, h]
            dv[c:d, j] += weights.T @ dout[a:b, h]
    return dq, dk, dv
