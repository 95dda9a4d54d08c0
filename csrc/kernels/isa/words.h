/* Factors of products in words of 32 bits: one fp32 number, or, with AVX512_BF16, two
 * bf16 numbers, the first in the lower half. A tile that walks over words is written
 * once for both. Packing makes words of fp32 numbers, or of bf16 numbers.
 */
#ifndef DCP_WORDS_H
#define DCP_WORDS_H

#include "../bf16.h"
#include "simd.h"

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t narrow_t __attribute__((vector_size(VF * 2)));
typedef uint32_t wide_t __attribute__((vector_size(VF * 4)));

#if defined(__AVX512BF16__)
#define FACTORS 2
typedef int32_t word_t;
typedef vi word_vector_t;
#else
#define FACTORS 1
typedef float word_t;
typedef vf word_vector_t;
#endif
typedef word_vector_t word_vector_u __attribute__((aligned(4)));

INLINE word_vector_t
words_load(const word_t *p)
{
    return *(const word_vector_u *)p;
}

INLINE void
words_store(word_t *p, word_vector_t x)
{
    *(word_vector_u *)p = x;
}

INLINE void
words_store_part(word_t *p, word_vector_t x, int64_t count)
{
    memcpy(p, &x, (size_t)count * sizeof(word_t));
}

/* c + a b, the word `a` in every lane. */
INLINE vf
multiply_add(word_t a, word_vector_t b, vf c)
{
#if FACTORS == 2
    __m512i x = _mm512_set1_epi32(a);
    return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)x, (__m512bh)b);
#else
    return vf_fma(vf_set(a), b, c);
#endif
}

/* First `count` (0..VF) numbers of p in fp32, as `source` says; the rest 0. */
INLINE vf
numbers_load(const int source, const void *p, int64_t count)
{
    if (source == SOURCE_BF16) {
        narrow_t x = {0};
        memcpy(&x, p, (size_t)count * sizeof(uint16_t));
        return (vf)(__builtin_convertvector(x, wide_t) << 16);
    }
    vf x = vf_get(p, count);
    return source == SOURCE_ROUND ? vf_round_bf16(x) : x;
}

INLINE const void *
numbers_at(const int source, const void *p, int64_t index)
{
    return (const char *)p + index * (source == SOURCE_BF16 ? 2 : 4);
}

#if FACTORS == 2
/* Numbers 0..15 of `low` and `high` in turns. */
INLINE word_vector_t
interleave(vf low, vf high)
{
    static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (vi)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)both);
}
#endif

/* VF words along a row: its first `count` (0..FACTORS * VF) numbers, the rest 0. */
INLINE word_vector_t
words_along(const int source, const void *p, int64_t count)
{
#if FACTORS == 2
    if (source == SOURCE_BF16) {
        uint32_t mask = (uint32_t)((UINT64_C(1) << count) - 1);
        return (vi)_mm512_maskz_loadu_epi16(mask, p);
    }
    int64_t more = count > VF ? count - VF : 0;
    vf low = numbers_load(SOURCE_FLOAT, p, count - more);
    vf high = numbers_load(SOURCE_FLOAT, numbers_at(SOURCE_FLOAT, p, VF), more);
    return (vi)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    return numbers_load(source, p, count);
#endif
}

/* VF words across `rows` (1..FACTORS) rows with stride ld: columns 0..count-1, the rest
 * 0. */
INLINE word_vector_t
words_across(const int source, const void *p, int64_t ld, int64_t rows, int64_t count)
{
#if FACTORS == 2
    const void *next = numbers_at(source, p, ld);
    vf low = numbers_load(source == SOURCE_BF16 ? SOURCE_BF16 : SOURCE_FLOAT, p, count);
    vf high = rows == 1               ? (vf){0}
              : source == SOURCE_BF16 ? numbers_load(SOURCE_BF16, next, count)
                                      : numbers_load(SOURCE_FLOAT, next, count);
    if (source == SOURCE_BF16) {
        return (vi)high | (vi)((wide_t)low >> 16);
    }
    return interleave(low, high);
#else
    (void)ld;
    (void)rows;
    return numbers_load(source, p, count);
#endif
}

#endif
