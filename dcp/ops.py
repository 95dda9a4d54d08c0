"""Operations on NumPy arrays that the training path uses, for direct use and for tests.

Sequences of different lengths lie one after the other along the first dimension, without
padding; ``offsets`` says where each begins: sequence ``s`` owns rows ``offsets[s]`` up to
``offsets[s + 1] - 1``. Shapes below use T for rows (tokens), H for query heads, Hkv for
key-value heads and D for the head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import dcp._dcp as _dcp

__all__ = ["attention", "attention_backward"]

Offsets: TypeAlias = Sequence[int] | NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]


def _scale(q: Floats, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    shape = np.shape(q)
    return float(shape[-1]) ** -0.5 if len(shape) and shape[-1] else 1.0


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    offsets: Offsets,
    *,
    key_offsets: Offsets | None = None,
    causal: bool = True,
    scale: float | None = None,
    compute: str = "float32",
) -> tuple[Floats, Floats]:
    """Softmax attention inside each sequence: ``softmax(scale * q k^T) v``.

    Parameters
    ----------
    q : float32 array [T, H, D]
        Queries, C-contiguous, read only. D is at most 256.
    k, v : float32 array [Tk, Hkv, D]
        Keys and values. H must be a multiple of Hkv; query head h reads head
        ``h // (H // Hkv)``.
    offsets : integers [sequences + 1]
        First row of each sequence, then the end: starts at 0, does not decrease, ends at T or
        before. Any integer type, a list too. Empty sequences are legal.
    key_offsets : integers [sequences + 1], optional
        The same for the rows of k and v. Default: ``offsets``.
    causal : bool
        A query sees the keys up to its own place, counted from the end of the sequence (the last
        query sees all keys).
    scale : float, optional
        Default: ``D ** -0.5``.
    compute : {"float32", "bfloat16"}
        With "bfloat16" every factor of a product (q, k, v, and the probabilities) is rounded to
        bfloat16; products are summed and the softmax is computed in float32. About twice as fast
        on a CPU with AVX512_BF16, no faster elsewhere.

    Returns
    -------
    out : float32 array [T, H, D]
        0 for a row that sees no key, and for rows beyond the last offset.
    lse : float32 array [H, T]
        Natural logarithm of the sum of exponentials of each row's scaled scores; -inf where a row
        sees no key. What :func:`attention_backward` needs.

    Raises
    ------
    dcp.DTypeError
        An array is not float32, not C-contiguous or on another device; offsets are no integers.
    dcp.ArgumentError
        Shapes do not fit, offsets break the rules above, or compute is none of the two.

    Notes
    -----
    No approximation of the softmax; the scores are never stored. Results do not depend
    on the number of threads. After Dao et al., FlashAttention (arXiv 2205.14135), with a softmax
    reference that is raised only when needed; see csrc/kernels/isa/attention_forward.c.

    Examples
    --------
    Two sequences of lengths 3 and 1; the second one's only row sees itself alone:

    >>> import numpy as np, dcp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((4, 2, 8), dtype=np.float32) for _ in range(3))
    >>> out, lse = dcp.ops.attention(q, k, v, [0, 3, 4])
    >>> out.shape, lse.shape
    ((4, 2, 8), (2, 4))
    >>> bool(np.allclose(out[3], v[3]))
    True
    """
    return _dcp.attention(q, k, v, offsets, key_offsets, causal, _scale(q, scale), compute)


def attention_backward(
    dout: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    out: Floats,
    lse: Floats,
    offsets: Offsets,
    *,
    key_offsets: Offsets | None = None,
    causal: bool = True,
    scale: float | None = None,
    compute: str = "float32",
) -> tuple[Floats, Floats, Floats]:
    """Gradients of :func:`attention`.

    Parameters
    ----------
    dout : float32 array [T, H, D]
        Gradient of the loss with respect to ``out``.
    q, k, v, offsets, key_offsets, causal, scale, compute
        As given to :func:`attention`.
    out, lse : float32 arrays [T, H, D] and [H, T]
        As :func:`attention` returned them.

    Returns
    -------
    dq, dk, dv : float32 arrays
        With the shapes of q, k and v. Rows that no sequence owns, and queries that see no key, get
        exactly 0.

    Raises
    ------
    dcp.DTypeError, dcp.ArgumentError
        As :func:`attention`.

    Notes
    -----
    Deterministic: the same bits for any number of threads. Weights are computed again from
    ``lse``, which is rounded to fp32: gradients carry a relative error of 1e-7 times its size.

    Examples
    --------
    >>> import numpy as np, dcp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((4, 2, 8), dtype=np.float32) for _ in range(3))
    >>> out, lse = dcp.ops.attention(q, k, v, [0, 3, 4])
    >>> dq, dk, dv = dcp.ops.attention_backward(np.ones_like(out), q, k, v, out, lse, [0, 3, 4])
    >>> dk.shape, bool(np.allclose(dv[3], 1))
    ((4, 2, 8), True)
    """
    return _dcp.attention_backward(
        dout, q, k, v, out, lse, offsets, key_offsets, causal, _scale(q, scale), compute
    )
