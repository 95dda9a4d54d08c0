"""Rounding to bfloat16 in NumPy, and attention whose factors are rounded: the judge of kernels
that compute in bfloat16."""

from __future__ import annotations

import numpy as np


def bf16(x):
    """x rounded to bfloat16 (nearest even), as float32; a NaN stays one."""
    wide = np.asarray(x, np.float32)
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded = np.where(np.isnan(wide), (bits | 0x400000) & 0xFFFF0000, rounded)
    return rounded.astype(np.uint32).view(np.float32)


def bf16_bits(x):
    """The same as uint16."""
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16)
