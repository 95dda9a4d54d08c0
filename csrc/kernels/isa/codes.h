/* Codes of the scaled formats, in vectors: a value over its block's scale to a code,
 * and back. How values are rounded is said in quantise_kernel.c.
 */
#ifndef DCP_CODES_H
#define DCP_CODES_H

#include "dcp/precision.h"
#include "simd.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum { BLOCK = DCP_PRECISION_BLOCK, INFINITE = 0x7f800000 };

#define ROUND                                                               \
    12582912.0f /* 1.5 * 2^23: x + ROUND rounds x, low bits are the integer \
                 */

/* ---- formats ---- */

typedef struct format {
    float largest;    /* code's value */
    float most_scale; /* below FLT_MAX / largest */
    int32_t mantissa; /* bits; fp8 only, as what follows */
    int32_t bias;     /* of the exponent */
} format_t;

VF_INLINE format_t
format_of(const dcp_precision_t precision)
{
    const float below = 1.0f - 0x1p-22f, most = 0x1.fffffep+127f;
    switch (precision) {
    case DCP_PRECISION_FP8_E4M3:
        return (format_t){448.0f, most / 448.0f * below, 3, 7};
    case DCP_PRECISION_FP8_E5M2:
        return (format_t){57344.0f, most / 57344.0f * below, 2, 15};
    case DCP_PRECISION_INT8:
        return (format_t){127.0f, most / 127.0f * below, 0, 0};
    default:
        return (format_t){7.0f, most / 7.0f * below, 0, 0};
    }
}

VF_INLINE int
is_scaled(const dcp_precision_t precision)
{
    return precision != DCP_PRECISION_FP32 && precision != DCP_PRECISION_BF16;
}

VF_INLINE int
is_fp8(const dcp_precision_t precision)
{
    return precision == DCP_PRECISION_FP8_E4M3 || precision == DCP_PRECISION_FP8_E5M2;
}

VF_INLINE int64_t
bytes_of(const dcp_precision_t precision, int64_t count)
{
    return precision == DCP_PRECISION_FP32   ? count * 4
           : precision == DCP_PRECISION_BF16 ? count * 2
           : precision == DCP_PRECISION_INT4 ? (count + 1) / 2
                                             : count;
}

/* ---- bytes and lanes ---- */

typedef uint8_t bytes_t __attribute__((vector_size(VF)));
typedef uint16_t halves_t __attribute__((vector_size(VF * 2)));
typedef uint32_t words_t __attribute__((vector_size(VF * 4)));

/* VF bytes, each in a lane. */
VF_INLINE vi
widen(const uint8_t *p)
{
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#else
    bytes_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vi) __builtin_convertvector(bytes, words_t);
#endif
}

enum { FOUR = 4 };

/* The low byte of each lane of four vectors. */
VF_INLINE void
narrow(uint8_t *p, const vi x[FOUR])
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i low[2];
    for (int i = 0; i < 2; i++) {
        low[i] = _mm256_packus_epi32((__m256i)(x[2 * i] & 255),
                                     (__m256i)(x[2 * i + 1] & 255));
    }
    /* packing goes by halves of 128 bits: words of 4 bytes lie 0 4 1 5 2 6 3 7 */
    __m256i bytes = _mm256_packus_epi16(low[0], low[1]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)(void *)p,
                        _mm256_permutevar8x32_epi32(bytes, order));
#else
    for (int i = 0; i < FOUR; i++) {
#if defined(__AVX512F__)
        __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x[i]);
#else
        bytes_t bytes = __builtin_convertvector((words_t)x[i], bytes_t);
#endif
        memcpy(p + i * VF, &bytes, sizeof bytes);
    }
#endif
}

static inline int32_t
vi_max_across(vi x) /* of lanes >= 0 */
{
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256i y = _mm256_max_epi32(_mm512_castsi512_si256((__m512i)x),
                                 _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
    __m256i y = (__m256i)x;
#endif
    __m128i z =
        _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
#else
    int32_t largest = 0;
    for (int l = 0; l < VF; l++) {
        largest = x[l] > largest ? x[l] : largest;
    }
    return largest;
#endif
}

static float
float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- codes ---- */

VF_INLINE vi
encode_integers(vf y, vi random, const int nearest)
{
    if (nearest) {
        return (vi)(y + ROUND);
    }
    return ((vi)(y * 256.0f + ROUND) + random) >> 8;
}

VF_INLINE vi
encode_fp8(const format_t format, vf y, vi random, const int nearest)
{
    const int32_t least_normal = (128 - format.bias) << 23;
    const int drop = 23 - format.mantissa, fraction_bits = nearest ? 0 : 8;
    vf size = vf_abs(y);
    vi exponent = (vi)y & INFINITE;
    exponent = vi_max(exponent, (vi){0} + least_normal);
    /* 2^23 last bits, or 256ths of them: the sum's low bits count those in y */
    vi shift = exponent + ((drop - fraction_bits) << 23);
    vi bits = (vi)(size + (vf)shift) - shift;
    vi count = nearest ? bits : (bits + random) >> 8;
    /* 2^mantissa of count are the exponent's own, but for the smallest */
    vi code = count + ((exponent - least_normal) >> drop);
    return (code & 0x7f) | (((vi)y >> 24) & 0x80);
}

/* Values of VF codes, over the scale. */
VF_INLINE vf
decode(const dcp_precision_t precision, const uint8_t *code)
{
    const format_t format = format_of(precision);
    vi x = widen(code);
    if (!is_fp8(precision)) {
        return __builtin_convertvector((x << 24) >> 24, vf);
    }
    const int32_t bias = (127 - format.bias) << 23;
    vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    vf normal = (vf)((magnitude << (23 - format.mantissa)) + bias);
    /* below the normal numbers the exponent stands for one more */
    vf small = (normal + normal) - float_of((128 - format.bias) << 23);
    vf value = vf_select(magnitude < (int32_t)(1 << format.mantissa), small, normal);
    return (vf)((vi)value | sign);
}

/* Two codes of 4 bits a byte, the first one low; `count` codes. */
VF_INLINE void
pack(const uint8_t *code, uint8_t *to, int count)
{
    uint8_t bytes[BLOCK / 2];
    uint16_t pairs[BLOCK / 2];
    memcpy(pairs, code, sizeof pairs);
    for (int i = 0; i < BLOCK / 2; i++) {
        bytes[i] = (uint8_t)((pairs[i] & 15) | ((pairs[i] >> 4) & 0xf0));
    }
    memcpy(to, bytes, (size_t)(count + 1) / 2);
}

VF_INLINE void
unpack(uint8_t *code, const uint8_t *from, int count)
{
    uint8_t bytes[BLOCK / 2] = {0};
    uint16_t pairs[BLOCK / 2];
    memcpy(bytes, from, count == BLOCK ? BLOCK / 2 : (size_t)(count + 1) / 2);
    for (int i = 0; i < BLOCK / 2; i++) {
        uint16_t both = (uint16_t)((bytes[i] & 15) | (bytes[i] & 0xf0) << 4);
        /* 4-bit two's complement to 8 bits, without borrowing from the neighbour */
        pairs[i] = (uint16_t)((((both ^ 0x0808) | 0x8080) - 0x0808) ^ 0x8080);
    }
    memcpy(code, pairs, sizeof pairs);
}

#endif
