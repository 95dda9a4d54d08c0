"""Operations on NumPy arrays that the training path uses, for direct use and for tests.

Attention works on sequences of a micro-batch; :func:`quantise`, :func:`dequantise` and
:func:`sketch` on gradients, as arrays of any shape.

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

__all__ = ["attention", "attention_backward", "dequantise", "quantise", "sketch"]

Offsets: TypeAlias = Sequence[int] | NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]


def _scale(q: Floats, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    shape = np.shape(q)
    return float(shape[-1]) ** -0.5 if len(shape) and shape[-1] else 1.0


def _int64(name: str, value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise _dcp.ArgumentError(f"{name} {value} must lie in -2^63..2^63-1")
    return int(value)


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


def quantise(
    x: Floats,
    precision: str,
    *,
    seed: int = 0,
    stream: int = 0,
    first: int = 0,
    nearest: bool = False,
    hadamard: bool = False,
    residual: Floats | None = None,
) -> NDArray[np.uint8]:
    """Codes of x, as a message in which gradients travel between ranks.

    Blocks of 128 elements, the last one short, have a float32 scale each: their largest absolute
    value over the largest code. A message holds all scales, then all codes.

    Parameters
    ----------
    x : float32 array
        Any shape, C-contiguous, read only; elements count in C order.
    precision : {"fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"}
        "fp32" and "bf16" have no scales. Codes of "int4" stand two in a byte.
    seed, stream : int
        64 bits each, without sign. Random bits of an element depend on (seed, stream, its number)
        alone: the seed is the run's, the stream says who sends when (step and rank).
    first : int
        Number of ``x[0]``, so that a buffer may be coded in parts that start at multiples of 128.
    nearest : bool
        Round to the nearest code, ties to even. Default: stochastic rounding, with 8 random bits
        an element, unbiased: between two codes each is taken in proportion to nearness, to 1/512
        of the gap; what has a code keeps it. "bf16" is always rounded to nearest.
    hadamard : bool
        Rotate each block first (signs by the seed, then Walsh-Hadamard), which spreads outliers
        over the block. A short block is rotated in pieces of powers of two. Changes nothing for
        "fp32" and "bf16".
    residual : float32 array, optional
        As many elements as x, written: it is added to x first, and gets what the codes leave of the
        sum (error feedback).

    Returns
    -------
    codes : uint8 array [bytes]
        4 bytes a block and 1 (or 1/2) an element; 4 or 2 an element for "fp32" and "bf16".

    Raises
    ------
    dcp.DTypeError
        An array is not float32 or not C-contiguous.
    dcp.ArgumentError
        Unknown precision; residual is of another size, read-only or shares memory with x; numbers
        out of range.

    Notes
    -----
    A block with a value that is not finite decodes to NaN, all of it, and its residual stays
    as it was; "fp32" and "bf16" pass such a value on as it is. A block of zeros decodes to zeros.
    Scales are at least 2**-118: smaller values are rounded stochastically to 0 or that. Largest
    values near float32's limit stay finite. Expected relative squared error of normal numbers, to
    nearest and stochastic: int8 4.2e-5 and 8.4e-5, e4m3 6.6e-4 and 1.3e-3, e5m2 2.6e-3 and 5.3e-3,
    int4 0.014 and 0.028, bf16 2.8e-6. Results do not depend on threads or instruction set.

    Examples
    --------
    >>> import numpy as np, dcp
    >>> x = np.linspace(-1, 1, 300, dtype=np.float32)
    >>> codes = dcp.ops.quantise(x, "int8", seed=1)
    >>> codes.size  # 3 scales and 300 codes
    312
    >>> back = dcp.ops.dequantise(codes, 300, "int8")
    >>> bool(np.abs(back - x).max() <= 1 / 127)
    True

    With a residual nothing is lost:

    >>> residual = np.zeros_like(x)
    >>> codes = dcp.ops.quantise(x, "int4", hadamard=True, residual=residual)
    >>> sent = dcp.ops.dequantise(codes, 300, "int4", hadamard=True)
    >>> bool(np.allclose(sent + residual, x, atol=1e-6))
    True
    """
    first = _int64("first", first)
    return _dcp.quantise(x, precision, seed, stream, first, nearest, hadamard, residual)


def dequantise(
    codes: NDArray[np.uint8],
    count: int,
    precision: str,
    *,
    seed: int = 0,
    hadamard: bool = False,
) -> Floats:
    """The numbers that codes of :func:`quantise` stand for.

    Parameters
    ----------
    codes : uint8 array [bytes]
        From :func:`quantise`.
    count : int
        Elements of x.
    precision, hadamard
        As x was quantised with.
    seed : int
        The same; it matters with ``hadamard`` only.

    Returns
    -------
    x : float32 array [count]

    Raises
    ------
    dcp.DTypeError
        codes are not uint8.
    dcp.ArgumentError
        codes do not have the bytes of ``count`` elements; unknown precision.

    Examples
    --------
    >>> import numpy as np, dcp
    >>> codes = dcp.ops.quantise(np.float32([1, -2, 0.5]), "bf16")
    >>> dcp.ops.dequantise(codes, 3, "bf16")
    array([ 1. , -2. ,  0.5], dtype=float32)
    """
    return _dcp.dequantise(codes, _int64("count", count), precision, seed, hadamard)


def sketch(x: Floats, *, seed: int = 0, first: int = 0) -> NDArray[np.float64]:
    """1,024 signed sums of x, whose squared length estimates that of x.

    Linear: the sketch of a difference is the difference of sketches, so the length of what was
    added to a buffer follows from sketches before and after (Alon, Matias, Szegedy 1999). The
    estimate is unbiased over seeds, with a relative spread of sqrt(2 / 1024) = 4.4 percent.

    Parameters
    ----------
    x : float32 array
        Any shape, C-contiguous; elements count in C order.
    seed : int
        64 bits without sign. Sketches under one seed may be added and subtracted.
    first : int
        Number of ``x[0]``, a multiple of 16: sketches of parts of a buffer, each from its own
        ``first``, add up to that of the whole.

    Returns
    -------
    sums : float64 array [1024]
        A value of x that is not finite makes a sum so.

    Raises
    ------
    dcp.DTypeError
        x is not float32 or not C-contiguous.
    dcp.ArgumentError
        first is negative or no multiple of 16.

    Examples
    --------
    >>> import numpy as np, dcp
    >>> x = np.ones(100_000, np.float32)
    >>> sums = dcp.ops.sketch(x)
    >>> bool(abs(sums @ sums / 100_000 - 1) < 0.2)
    True
    >>> bool(np.allclose(dcp.ops.sketch(3 * x) - sums, 2 * sums))
    True
    """
    return _dcp.sketch(x, seed, _int64("first", first))
