/* Blocks of 128 elements to codes and back.
 *
 * A block is read into an array of 128 floats, padded with zeros; every stage is a loop
 * of 128 independent steps over such arrays, which the compiler turns into vectors of
 * the set it is compiled for. Each step is one IEEE operation (no fused ones, no sums
 * across lanes but by fixed lanes of 16), so bits are the same in every set. The
 * largest value is taken over the bits of absolute values as integers: that order is
 * exact, and whatever is not finite lies above all others.
 *
 * Memory of an element: 4 B read (8 with residual), 0.5 to 4 B written (and 4). Random
 * bits: one Philox block for 16 elements, about 0.7 instructions each with 16 lanes.
 */
#include "../quantise_ops.h"
#include "dcp/rng.h"
#include "simd.h"

#include <math.h>

enum {
    BLOCK = DCP_PRECISION_BLOCK,
    LANES = 16,
    GROUPS = BLOCK / LANES, /* Philox blocks of a block */
    INFINITE = 0x7f800000
};

/* What a block is worked on with. */
typedef struct scratch {
    _Alignas(64) float value[BLOCK];   /* to be sent */
    _Alignas(64) float rotated[BLOCK]; /* the same, turned; then what codes say */
    _Alignas(64) int32_t code[BLOCK];
    _Alignas(64) int32_t random[BLOCK]; /* 0 .. 255 */
} scratch_t;

/* 8 random bits for each of the elements first .. first + 127. */
static void
draw(const uint32_t key[2], uint64_t stream, int64_t first, int32_t *random)
{
    _Alignas(64) uint64_t c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];
    const uint64_t low = 0xffffffffu;
    for (int g = 0; g < GROUPS; g++) {
        uint64_t number = (uint64_t)first + (uint64_t)(g * LANES);
        c0[g] = number & low;
        c1[g] = number >> 32;
        c2[g] = stream & low;
        c3[g] = stream >> 32;
    }
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        for (int g = 0; g < GROUPS; g++) {
            uint64_t p0 = c0[g] * 0xD2511F53u, p1 = c2[g] * 0xCD9E8D57u;
            c0[g] = ((p1 >> 32) ^ c1[g] ^ k0) & low;
            c2[g] = ((p0 >> 32) ^ c3[g] ^ k1) & low;
            c1[g] = p1 & low;
            c3[g] = p0 & low;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    /* byte b of word w of group g: element 16 g + 4 w + b */
    uint32_t words[BLOCK / 4];
    for (int g = 0; g < GROUPS; g++) {
        words[4 * g] = (uint32_t)c0[g];
        words[4 * g + 1] = (uint32_t)c1[g];
        words[4 * g + 2] = (uint32_t)c2[g];
        words[4 * g + 3] = (uint32_t)c3[g];
    }
    uint8_t bytes[BLOCK];
    memcpy(bytes, words, sizeof bytes);
    for (int i = 0; i < BLOCK; i++) {
        random[i] = bytes[i];
    }
}

/* Bits of the largest absolute value. */
static int32_t
largest_bits(const float *x)
{
    int32_t lanes[LANES] = {0}, largest = 0;
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            int32_t bits;
            memcpy(&bits, &x[i + l], sizeof bits);
            bits &= INT32_MAX;
            lanes[l] = bits > lanes[l] ? bits : lanes[l];
        }
    }
    for (int l = 0; l < LANES; l++) {
        largest = lanes[l] > largest ? lanes[l] : largest;
    }
    return largest;
}

static float
float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rotation of x[0 .. n), n a power of two: Walsh-Hadamard, orthonormal. */
static void
walsh(float *x, int n)
{
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < n; i += 2 * h) {
            for (int j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
        }
    }
    float factor = 1.0f / sqrtf((float)n);
    for (int i = 0; i < n; i++) {
        x[i] *= factor;
    }
}

static void
walsh_pieces(float *x, int count)
{
    for (int n = BLOCK, at = 0; n > 0; n /= 2) {
        if (count & n) {
            walsh(x + at, n);
            at += n;
        }
    }
}

/* Signs of a rotation by the seed. */
static void
flip(uint64_t seed, float *x)
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {0x48616461u, 0, 0, 0};
    uint32_t words[4];
    dcp_philox(key, counter, words);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t minus = words[i / 32] >> (i % 32) & 1u;
        x[i] = minus ? -x[i] : x[i];
    }
}

/* Codes of y in [-limit, limit]: integers. */
VF_INLINE void
encode_integers(scratch_t *s, float limit, float inverse, int32_t nearest)
{
    for (int i = 0; i < BLOCK; i++) {
        float y = s->rotated[i] * inverse;
        y = y > limit ? limit : y;
        y = y < -limit ? -limit : y;
        float offset = ((float)s->random[i] + 0.5f) * (1.0f / 256.0f);
        /* shifted above 0, so that cutting off the fraction rounds down */
        int32_t random = (int32_t)(y + 256.0f + offset) - 256;
        float shifted = y + 12582912.0f; /* 1.5 * 2^23: to nearest, ties to even */
        int32_t even;
        memcpy(&even, &shifted, sizeof even);
        even = (even & 0x3fffff) - ((even & 0x400000) ? 0 : 0x400000);
        s->code[i] = nearest ? even : random;
    }
}

typedef struct fp8_format {
    int32_t mantissa, bias, largest_code; /* bits; code of the largest finite value */
    float largest, unit;                  /* 1 / unit: the smallest subnormal */
} fp8_format_t;

static const fp8_format_t e4m3 = {3, 7, 0x7e, 448.0f, 512.0f};
static const fp8_format_t e5m2 = {2, 15, 0x7b, 57344.0f, 65536.0f};

VF_INLINE void
encode_fp8(scratch_t *s, fp8_format_t format, float inverse, int32_t nearest)
{
    const int32_t drop = 23 - format.mantissa;
    for (int i = 0; i < BLOCK; i++) {
        float y = s->rotated[i] * inverse;
        int32_t bits, sign;
        memcpy(&bits, &y, sizeof bits);
        sign = bits & INT32_MIN;
        bits &= INT32_MAX;
        int32_t even = (1 << (drop - 1)) - 1 + (bits >> drop & 1);
        int32_t random = (s->random[i] << (drop - 8)) + (1 << (drop - 9));
        int32_t normal = ((bits + (nearest ? even : random)) >> drop)
                         - ((127 - format.bias) << format.mantissa);
        /* below the normal ones codes count units */
        float units = float_of(bits) * format.unit;
        units = units > 16.0f ? 16.0f : units;
        float offset = ((float)s->random[i] + 0.5f) * (1.0f / 256.0f);
        float rounded = units + 8388608.0f;
        int32_t low;
        memcpy(&low, &rounded, sizeof low);
        low = nearest ? low & 0xff : (int32_t)(units + offset);
        int32_t code = units < (float)(1 << format.mantissa) ? low : normal;
        code = code > format.largest_code ? format.largest_code : code;
        s->code[i] = code | (sign ? 0x80 : 0);
    }
}

VF_INLINE float
fp8_value(fp8_format_t format, int32_t code)
{
    int32_t magnitude = code & 0x7f;
    int32_t normal =
        (magnitude << (23 - format.mantissa)) + ((127 - format.bias) << 23);
    float units = (float)magnitude / format.unit;
    float x = magnitude < 1 << format.mantissa ? units : float_of(normal);
    return code & 0x80 ? -x : x;
}

VF_INLINE void
decode_values(scratch_t *s, dcp_precision_t precision, float scale)
{
    for (int i = 0; i < BLOCK; i++) {
        float value = precision == DCP_PRECISION_FP8_E4M3 ? fp8_value(e4m3, s->code[i])
                      : precision == DCP_PRECISION_FP8_E5M2
                          ? fp8_value(e5m2, s->code[i])
                          : (float)s->code[i];
        s->rotated[i] = value * scale;
    }
}

static float
largest_code_of(dcp_precision_t precision)
{
    switch (precision) {
    case DCP_PRECISION_FP8_E4M3:
        return e4m3.largest;
    case DCP_PRECISION_FP8_E5M2:
        return e5m2.largest;
    case DCP_PRECISION_INT8:
        return 127.0f;
    default:
        return 7.0f;
    }
}

VF_INLINE void
encode_codes(scratch_t *s, dcp_precision_t precision, float inverse, int32_t nearest)
{
    switch (precision) {
    case DCP_PRECISION_FP8_E4M3:
        encode_fp8(s, e4m3, inverse, nearest);
        break;
    case DCP_PRECISION_FP8_E5M2:
        encode_fp8(s, e5m2, inverse, nearest);
        break;
    case DCP_PRECISION_INT8:
        encode_integers(s, 127.0f, inverse, nearest);
        break;
    default:
        encode_integers(s, 7.0f, inverse, nearest);
        break;
    }
}

/* 8 bits, or 4 with an offset of 8, the first element low. */
VF_INLINE void
pack(const scratch_t *s, dcp_precision_t precision, int count, uint8_t *to)
{
    uint8_t bytes[BLOCK];
    if (precision == DCP_PRECISION_INT4) {
        for (int i = 0; i < BLOCK / 2; i++) {
            bytes[i] = (uint8_t)((s->code[2 * i] + 8) | (s->code[2 * i + 1] + 8) << 4);
        }
        memcpy(to, bytes, (size_t)(count + 1) / 2);
        return;
    }
    for (int i = 0; i < BLOCK; i++) {
        bytes[i] = (uint8_t)s->code[i];
    }
    memcpy(to, bytes, (size_t)count);
}

VF_INLINE void
unpack(scratch_t *s, dcp_precision_t precision, int count, const uint8_t *from)
{
    uint8_t bytes[BLOCK] = {0};
    if (precision == DCP_PRECISION_INT4) {
        memcpy(bytes, from, (size_t)(count + 1) / 2);
        for (int i = 0; i < BLOCK / 2; i++) {
            s->code[2 * i] = (bytes[i] & 15) - 8;
            s->code[2 * i + 1] = (bytes[i] >> 4) - 8;
        }
        return;
    }
    memcpy(bytes, from, (size_t)count);
    for (int i = 0; i < BLOCK; i++) {
        s->code[i] = precision == DCP_PRECISION_INT8 ? (int8_t)bytes[i] : bytes[i];
    }
}

/* Sum of squares of a - b, or of a where b is NULL: lanes of 16 in fp32, then fp64. */
static double
squares_of(const float *a, const float *b)
{
    float lanes[LANES] = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            float d = b != NULL ? a[i + l] - b[i + l] : a[i + l];
            lanes[l] += d * d;
        }
    }
    double sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += (double)lanes[l];
    }
    return sum;
}

/* Scaled formats: codes in s->code, what they say in s->rotated; returns the scale. */
VF_INLINE float
quantise_scaled(const dcp_quantise_args_t *args, const uint32_t key[2], int64_t block,
                int count, dcp_precision_t precision, scratch_t *s)
{
    memcpy(s->rotated, s->value, sizeof s->rotated);
    if (args->hadamard) {
        flip(args->seed, s->rotated);
        walsh_pieces(s->rotated, count);
    }
    int32_t bits = largest_bits(s->rotated);
    float largest = float_of(bits), limit = largest_code_of(precision);
    float scale = largest / limit;
    /* the largest code times the scale must stay finite */
    scale = largest > 1e38f ? scale * (1.0f - 0x1p-22f) : scale;
    if (bits >= INFINITE || scale < 0x1p-126f) {
        /* not finite, or nothing that a normal scale can say */
        memset(s->code, 0, sizeof s->code);
        memset(s->rotated, 0, sizeof s->rotated);
        return bits >= INFINITE ? NAN : 0.0f;
    }
    if (!args->nearest) {
        draw(key, args->stream, args->first + block * BLOCK, s->random);
    }
    encode_codes(s, precision, limit / largest, args->nearest);
    decode_values(s, precision, scale);
    if (args->hadamard) {
        walsh_pieces(s->rotated, count);
        flip(args->seed, s->rotated);
    }
    return scale;
}

/* bf16 and fp32: what is sent in s->rotated. */
VF_INLINE void
quantise_plain(int count, dcp_precision_t precision, scratch_t *s, uint8_t *to)
{
    uint16_t halves[BLOCK];
    if (precision == DCP_PRECISION_FP32) {
        memcpy(s->rotated, s->value, sizeof s->rotated);
        if (to != NULL) {
            memcpy(to, s->value, (size_t)count * sizeof(float));
        }
        return;
    }
    for (int i = 0; i < BLOCK; i += VF) {
        vf_store(s->rotated + i, vf_round_bf16(vf_load(s->value + i)));
    }
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, &s->rotated[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    if (to != NULL) {
        memcpy(to, halves, (size_t)count * sizeof(uint16_t));
    }
}

VF_INLINE void
quantise_blocks(const dcp_quantise_args_t *args, const uint32_t key[2], int64_t first,
                int64_t last, double *squares, dcp_precision_t precision)
{
    int32_t scaled = precision != DCP_PRECISION_FP32 && precision != DCP_PRECISION_BF16;
    int64_t block_count = (args->count + BLOCK - 1) / BLOCK;
    uint8_t *scales = args->codes;
    int64_t bits = precision == DCP_PRECISION_FP32   ? 32
                   : precision == DCP_PRECISION_BF16 ? 16
                   : precision == DCP_PRECISION_INT4 ? 4
                                                     : 8;
    scratch_t s;
    for (int64_t block = first; block < last; block++) {
        int64_t start = block * BLOCK, left = args->count - start;
        int count = left < BLOCK ? (int)left : BLOCK;
        uint8_t *to = NULL;
        if (args->codes != NULL) {
            to = scales + (scaled ? block_count * 4 : 0) + start * bits / 8;
        }
        const float *x = args->x + start;
        float *residual = args->residual != NULL ? args->residual + start : NULL;
        if (count < BLOCK) {
            memset(s.value, 0, sizeof s.value);
        }
        for (int i = 0; i < count; i++) {
            s.value[i] = residual != NULL ? x[i] + residual[i] : x[i];
        }
        int32_t finite = 1;
        if (scaled) {
            float scale = quantise_scaled(args, key, block, count, precision, &s);
            finite = scale == scale;
            if (to != NULL) {
                memcpy(scales + block * 4, &scale, sizeof scale);
                pack(&s, precision, count, to);
            }
        } else {
            quantise_plain(count, precision, &s, to);
            finite = largest_bits(s.rotated) < INFINITE;
        }
        if (residual != NULL && finite) {
            for (int i = 0; i < count; i++) {
                residual[i] = s.value[i] - s.rotated[i];
            }
        }
        if (squares != NULL) {
            double weight = args->weights != NULL ? (double)args->weights[block] : 1.0;
            squares[0] += weight * squares_of(s.value, NULL);
            squares[1] +=
                weight * (finite ? squares_of(s.value, s.rotated) : (double)NAN);
        }
    }
}

static void
quantise(const dcp_quantise_args_t *args, const uint32_t key[2], int64_t first,
         int64_t last, double *squares)
{
    switch (args->precision) {
#define CASE(name)                                                              \
    case DCP_PRECISION_##name:                                                  \
        quantise_blocks(args, key, first, last, squares, DCP_PRECISION_##name); \
        break;
        CASE(FP32)
        CASE(BF16)
        CASE(FP8_E4M3)
        CASE(FP8_E5M2)
        CASE(INT8)
        CASE(INT4)
#undef CASE
    }
}

VF_INLINE void
dequantise_blocks(const dcp_dequantise_args_t *args, int64_t first, int64_t last,
                  dcp_precision_t precision)
{
    int32_t scaled = precision != DCP_PRECISION_FP32 && precision != DCP_PRECISION_BF16;
    int64_t block_count = (args->count + BLOCK - 1) / BLOCK;
    const uint8_t *codes = args->codes;
    int64_t bits = precision == DCP_PRECISION_FP32   ? 32
                   : precision == DCP_PRECISION_BF16 ? 16
                   : precision == DCP_PRECISION_INT4 ? 4
                                                     : 8;
    scratch_t s;
    for (int64_t block = first; block < last; block++) {
        int64_t start = block * BLOCK, left = args->count - start;
        int count = left < BLOCK ? (int)left : BLOCK;
        const uint8_t *from = codes + (scaled ? block_count * 4 : 0) + start * bits / 8;
        if (scaled) {
            float scale;
            memcpy(&scale, codes + block * 4, sizeof scale);
            unpack(&s, precision, count, from);
            decode_values(&s, precision, scale);
            if (args->hadamard) {
                walsh_pieces(s.rotated, count);
                flip(args->seed, s.rotated);
            }
        } else if (precision == DCP_PRECISION_FP32) {
            memcpy(s.rotated, from, (size_t)count * sizeof(float));
        } else {
            uint16_t halves[BLOCK];
            memcpy(halves, from, (size_t)count * sizeof(uint16_t));
            for (int i = 0; i < count; i++) {
                s.rotated[i] = float_of((int32_t)((uint32_t)halves[i] << 16));
            }
        }
        float *out = args->out + start;
        for (int i = 0; i < count; i++) {
            out[i] = args->accumulate ? out[i] + s.rotated[i] : s.rotated[i];
        }
    }
}

static void
dequantise(const dcp_dequantise_args_t *args, int64_t first, int64_t last)
{
    switch (args->precision) {
#define CASE(name)                                                  \
    case DCP_PRECISION_##name:                                      \
        dequantise_blocks(args, first, last, DCP_PRECISION_##name); \
        break;
        CASE(FP32)
        CASE(BF16)
        CASE(FP8_E4M3)
        CASE(FP8_E5M2)
        CASE(INT8)
        CASE(INT4)
#undef CASE
    }
}

const quantise_ops_t ISA_NAME(quantise_ops) = {
    .quantise = quantise,
    .dequantise = dequantise,
};
