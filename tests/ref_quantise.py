"""Codes of gradients in plain NumPy: the judge of csrc/kernels/isa/quantise_kernel.c.

Scales and what is divided by them are float32, as the format has them; what a code stands for
comes from tables, and rounding is decided in float64. Random bytes come from a Philox of its own.
"""

from __future__ import annotations

import numpy as np

BLOCK = 128
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
PRECISIONS = ["fp32", "bf16", *LARGEST]
LEAST_SCALE = np.float32(2.0**-118)
MOST = np.finfo(np.float32).max


def message_bytes(precision, count):
    if precision in ("fp32", "bf16"):
        return count * (4 if precision == "fp32" else 2)
    codes = (count + 1) // 2 if precision == "int4" else count
    return -(-count // BLOCK) * 4 + codes


def philox(key, counter):
    """Philox4x32-10 of Salmon et al. 2011: words [..., 4] of counters [..., 4]."""
    c = [np.asarray(counter)[..., i].astype(np.uint64) for i in range(4)]
    k = [int(key[0]), int(key[1])]
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> half) ^ c[1] ^ np.uint64(k[0]),
            p1 & low,
            (p0 >> half) ^ c[3] ^ np.uint64(k[1]),
            p0 & low,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return np.stack(c, axis=-1).astype(np.uint32)


def halves(number):
    return [number % 2**32, number // 2**32 % 2**32]


def seed_words(seed, tag):
    return philox(halves(seed), np.array([tag, 0, 0, 0]))


def random_bytes(seed, stream, first, count):
    """8 random bits of each of the elements first .. first + count - 1."""
    number = (np.arange(count, dtype=np.uint64) + np.uint64(first % 2**64)).astype(np.uint64)
    place = number % np.uint64(256)
    block = number // np.uint64(256) * np.uint64(16) + place % np.uint64(64) // np.uint64(4)
    counter = np.stack(
        [block % 2**32, block // 2**32]
        + [np.full(count, half, np.uint64) for half in halves(stream)],
        axis=-1,
    )
    words = philox(seed_words(seed, 0x7175616E)[:2], counter)
    word = np.take_along_axis(words, (place // np.uint64(64)).astype(int)[:, None], 1)[:, 0]
    return word >> (place % np.uint64(4) * np.uint64(8)).astype(np.uint32) & 255


def signs(seed):
    """-1 and 1 of the places of a block."""
    bits = np.unpackbits(seed_words(seed, 0x68616461).view(np.uint8), bitorder="little")
    return 1.0 - 2.0 * bits


def fp8_table(precision):
    """Values of codes 0 .. the largest finite one's."""
    mantissa, bias = (3, 7) if precision == "fp8_e4m3" else (2, 15)
    code = np.arange(0x7F if precision == "fp8_e4m3" else 0x7C)
    exponent, fraction = code >> mantissa, code % (1 << mantissa)
    return np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias - mantissa),
        (1 + fraction * 2.0**-mantissa) * 2.0 ** (exponent - float(bias)),
    )


def hadamard_matrix(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def rotation(count, seed):
    """The orthonormal matrix by which a block of `count` elements is rotated."""
    matrix = np.zeros((count, count))
    at = 0
    for power in reversed(range(8)):
        n = 1 << power
        if count & n:
            matrix[at : at + n, at : at + n] = hadamard_matrix(n)
            at += n
    return matrix * signs(seed)[:count]


def scale_of(block, precision):
    """The scale of a finite block."""
    largest = np.abs(block).max(initial=np.float32(0))
    if largest == 0:
        return np.float32(0)
    top = np.float32(LARGEST[precision])
    return min(max(largest / top, LEAST_SCALE), MOST / top * np.float32(1 - 2.0**-22))


def round_codes(y, precision, random, nearest):
    """Codes (0..255; int4: 0..15) of y, a float32 block over its scale."""
    exact = y.astype(np.float64)
    if precision in ("int8", "int4"):
        code = np.rint(exact) if nearest else np.floor((np.rint(256 * exact) + random) / 256)
        return code.astype(int) & (255 if precision == "int8" else 15)
    table = fp8_table(precision)
    size = np.abs(exact)
    lower = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
    part = (size - table[lower]) / (table[lower + 1] - table[lower])
    if nearest:
        up = (part > 0.5) | ((part == 0.5) & (lower % 2 == 1))
    else:
        up = np.rint(256 * part) + random >= 256
    return (lower + up) | np.where(np.signbit(exact), 128, 0)


def quantise(x, precision, seed=0, stream=0, first=0, nearest=False):
    """The message, byte by byte; without rotation, of finite numbers."""
    if precision == "fp32":
        return x.view(np.uint8)
    if precision == "bf16":
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        most = np.where(bits >> 31, 0xFF7F, 0x7F7F)
        rounded = np.where(rounded & 0x7FFF > 0x7F7F, most, rounded)
        return rounded.astype(np.uint16).view(np.uint8)
    random = random_bytes(seed, stream, first, x.size)
    scales, codes = [], [np.zeros(0, int)]
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        scale = scale_of(block, precision)
        scales.append(scale)
        if scale == 0:
            codes.append(np.zeros(block.size, int))
            continue
        y = block * (np.float32(1) / scale)
        codes.append(round_codes(y, precision, random[start : start + BLOCK], nearest))
    code = np.concatenate(codes)
    if precision == "int4":
        code = np.append(code, 0) if code.size % 2 else code
        code = code[::2] | code[1::2] << 4
    return np.concatenate([np.float32(scales).view(np.uint8), code.astype(np.uint8)])


def decode_codes(code, precision):
    if precision in ("int8", "int4"):
        half = 128 if precision == "int8" else 8
        return ((code + half) % (2 * half) - half).astype(np.float64)
    table = fp8_table(precision)
    return table[code & 127] * np.where(code & 128, -1.0, 1.0)


def dequantise(message, count, precision, seed=0, hadamard=False):
    """What a message holds, in float64."""
    if precision == "fp32":
        return message.view(np.float32).astype(np.float64)
    if precision == "bf16":
        wide = message.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    blocks = -(-count // BLOCK)
    scales = message[: 4 * blocks].view(np.float32).astype(np.float64)
    code = message[4 * blocks :].astype(int)
    if precision == "int4":
        code = np.stack([code & 15, code >> 4], 1).ravel()[:count]
    value = decode_codes(code, precision) * np.repeat(scales, BLOCK)[:count]
    if hadamard:  # scales are of values over 16
        for start in range(0, count, BLOCK):
            block = value[start : start + BLOCK]
            block[:] = 16 * rotation(block.size, seed).T @ block
    return value


def sketch_signs(seed, first, count):
    number = np.arange(first, first + count)
    group, place = number // 2048, number % 2048
    block = group * 16 + place % 16
    counter = np.stack([block % 2**32, block // 2**32, 0 * block, 0 * block], axis=-1)
    words = philox(seed_words(seed, 0x736B6574)[:2], counter)
    vector = place // 16
    word = np.take_along_axis(words, (vector // 32)[:, None], 1)[:, 0]
    return 1.0 - 2.0 * (word >> (31 - vector % 32).astype(np.uint32) & 1)


def sketch(x, seed=0, first=0, weights=None):
    value = x.astype(np.float64)
    if weights is not None:
        value = value * np.repeat(weights, BLOCK)[: x.size]
    sums = np.zeros(1024)
    with np.errstate(invalid="ignore"):
        np.add.at(
            sums, (first + np.arange(x.size)) % 1024, sketch_signs(seed, first, x.size) * value
        )
    return sums
