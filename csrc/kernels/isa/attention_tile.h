/* Register tiles of attention: what the forward and the backward kernels share.
 *
 * A tile is MR rows by up to NV vectors of accumulators that stay in registers while a
 * product runs over its inner dimension: C[r][:] += sum_k a(r, k) * B[k][:], one vector
 * load of B per column and one broadcast of A per row and k. MR * NV = 24 accumulators
 * of 32 registers with AVX-512, 12 of 16 else: enough to hide the latency of a fused
 * multiply-add (8 in flight), at less than half a load per multiply-add. B is read from
 * panels: [k][PANEL], contiguous, zero-padded. Loops over rows and vectors have
 * constant bounds and are unrolled, so that accumulator arrays live in registers.
 *
 * Factors are read as words (words.h): with AVX512_BF16 two bf16 numbers that follow
 * each other in k, so that a product's k counts pairs. There the accumulators are fed
 * twice as fast; the softmax between the products stays fp32.
 */
#ifndef DCP_ATTENTION_TILE_H
#define DCP_ATTENTION_TILE_H

#include "../attention.h"
#include "words.h"

#include <math.h>

#define NOINLINE static __attribute__((noinline))
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DCP_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DCP_SANITIZED 1
#endif
#endif
#ifdef DCP_SANITIZED
#define UNROLL /* checks on every access of unrolled tiles would take minutes to \
                  compile */
#define UNROLL_PRODUCT
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_PRODUCT _Pragma("GCC unroll 4")
#endif

#define MR ATTENTION_ROWS
#if defined(__AVX512F__)
#define NV 4
#else
#define NV 2
#endif
#define PANEL (NV * VF) /* columns of a panel: 64, 16, 8 */

#define LOG2_E 1.44269504f

/* Words that hold `count` factors. */
static inline int64_t
words_of(int64_t count)
{
    return (count + FACTORS - 1) / FACTORS;
}

static inline int64_t
round_up(int64_t x, int64_t unit)
{
    return (x + unit - 1) / unit * unit;
}

static inline int64_t
min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t
max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- masks: one bit or lane for each element ---- */

#if defined(__AVX512F__)
typedef __mmask16 vf_mask_t;

INLINE vf_mask_t
mask_below(int64_t count) /* lanes < count; any count */
{
    count = count < 0 ? 0 : count > VF ? VF : count;
    return (vf_mask_t)((1u << count) - 1u);
}

INLINE vf
mask_select(vf_mask_t mask, vf yes, vf no)
{
    return (vf)_mm512_mask_mov_ps((__m512)no, mask, (__m512)yes);
}

INLINE int
any_greater(vf a, vf b)
{
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
}
#else
typedef vi vf_mask_t;

INLINE vf_mask_t
mask_below(int64_t count)
{
    vi lane;
    for (int i = 0; i < VF; i++) {
        lane[i] = i;
    }
    count = count < 0 ? 0 : count > VF ? VF : count;
    return lane < (int32_t)count;
}

INLINE vf
mask_select(vf_mask_t mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

INLINE int
any_greater(vf a, vf b)
{
    vi greater = a > b;
#if defined(__AVX2__)
    return _mm256_movemask_ps((__m256)(vf)greater) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < VF; i++) {
        any |= greater[i];
    }
    return any != 0;
#endif
}
#endif

/* ---- exponential ---- */

/* 2^y, relative error below 2e-7: y = n + f, |f| <= 1/2, 2^f by a minimax polynomial of
 * degree 5 whose constant is exactly 1. y <= -127 (-inf too) gives 0; a NaN stays one;
 * y > 127 is not for this function. Additions and the scaling by 2^n use other pipes
 * than the multiply-adds that bound the kernels. */
INLINE vf
exp2_tile(vf y)
{
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23 */
#if !defined(__AVX512F__)
    y = vf_max(vf_set(-127.0f), y);
#endif
    vf shifted = y + magic;
    vf n = shifted - magic;
    vf f = y - n;
    vf p = vf_fma(vf_set(1.326472731307149e-3f), f, vf_set(9.671512991189957e-3f));
    p = vf_fma(p, f, vf_set(5.550733581185341e-2f));
    p = vf_fma(p, f, vf_set(2.4022242426872253e-1f));
    p = vf_fma(p, f, vf_set(6.931470036506653e-1f));
    p = vf_fma(p, f, vf_set(1.0f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (vf)((vi)p + ((vi)shifted << 23));
#endif
}

/* Sum of all elements, halves added until one is left. */
INLINE float
sum_across(vf x)
{
#if defined(__AVX512F__)
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                                _mm512_extractf32x8_ps((__m512)x, 1));
#elif defined(__AVX2__)
    __m256 half = (__m256)x;
#endif
#if defined(__AVX2__)
    __m128 quarter =
        _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
    return vf_sum(x);
#endif
}

/* ---- products ---- */

/* c[r][v] += sum over k < count of a[r * a_row + k * a_step] * b[k * b_step + v * VF],
 * r < MR, v < nv; all counts in words. */
INLINE void
product(vf c[MR][NV], int nv, const word_t *a, int64_t a_row, int64_t a_step,
        const word_t *b, int64_t b_step, int64_t count)
{
    UNROLL_PRODUCT for (int64_t k = 0; k < count; k++)
    {
        word_vector_t column[NV];
        UNROLL for (int v = 0; v < nv; v++)
        {
            column[v] = words_load(b + v * VF);
        }
        UNROLL for (int r = 0; r < MR; r++)
        {
            word_t x = a[r * a_row];
            UNROLL for (int v = 0; v < nv; v++)
            {
                c[r][v] = multiply_add(x, column[v], c[r][v]);
            }
        }
        a += a_step;
        b += b_step;
    }
}

INLINE void
tile_zero(vf c[MR][NV], int nv)
{
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            c[r][v] = (vf){0};
        }
    }
}

INLINE void
tile_load(vf c[MR][NV], int nv, const float *x, int64_t stride)
{
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            c[r][v] = vf_load(x + r * stride + v * VF);
        }
    }
}

INLINE void
tile_store(vf c[MR][NV], int nv, float *x, int64_t stride)
{
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            vf_store(x + r * stride + v * VF, c[r][v]);
        }
    }
}

/* A row of the tile as factors. */
INLINE void
rows_store(word_t *to, const vf x[NV], int nv)
{
#if FACTORS == 2
    UNROLL for (int v = 0; v + 1 < nv; v += 2)
    {
        words_store(to + v * VF / 2,
                    (vi)_mm512_cvtne2ps_pbh((__m512)x[v + 1], (__m512)x[v]));
    }
    if (nv % 2 != 0) {
        _mm256_storeu_si256((__m256i *)(void *)(to + (nv - 1) * VF / 2),
                            (__m256i)_mm512_cvtneps_pbh((__m512)x[nv - 1]));
    }
#else
    UNROLL for (int v = 0; v < nv; v++)
    {
        vf_store(to + v * VF, x[v]);
    }
#endif
}

/* Vectors a block of a row of `vectors` vectors has: as even blocks as possible, since
 * a narrow one has too few accumulators. */
INLINE int64_t
block_vectors(int64_t vectors)
{
    int64_t blocks = (vectors + NV - 1) / NV;
    return (vectors + blocks - 1) / blocks;
}

/* Calls CALL(nv) with nv as a constant of 1 .. NV. */
#if NV == 4
#define SWITCH_VECTORS(nv, CALL) \
    switch (nv) {                \
    case 1:                      \
        CALL(1);                 \
        break;                   \
    case 2:                      \
        CALL(2);                 \
        break;                   \
    case 3:                      \
        CALL(3);                 \
        break;                   \
    default:                     \
        CALL(4);                 \
        break;                   \
    }
#else
#define SWITCH_VECTORS(nv, CALL) \
    switch (nv) {                \
    case 1:                      \
        CALL(1);                 \
        break;                   \
    default:                     \
        CALL(2);                 \
        break;                   \
    }
#endif

#endif
