/* Register tiles of attention: what the forward and the backward kernels share.
 *
 * A tile is MR rows by up to NV vectors of accumulators that stay in registers while a
 * product runs over its inner dimension: C[r][:] += sum_k a(r, k) * B[k][:], one vector
 * load of B per column and one broadcast of A per row and k. MR * NV = 24 accumulators
 * of 32 registers with AVX-512, 12 of 16 else: enough to hide the latency of a fused
 * multiply-add (8 in flight), at less than half a load per multiply-add. B is read from
 * panels: [k][PANEL], contiguous, zero-padded. Loops over rows and vectors have
 * constant bounds and are unrolled, so that accumulator arrays live in registers.
 */
#ifndef DCP_ATTENTION_TILE_H
#define DCP_ATTENTION_TILE_H

#include "../attention.h"
#include "simd.h"

#include <math.h>

#define NOINLINE static __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))
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

/* Larger of two, compared as integers: right for a limit test against a positive number
 * (negative scores order wrongly among themselves, and stay below it), on pipes that
 * the multiply-adds do not need. */
INLINE vi
vi_max(vi a, vi b)
{
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi take_a = a > b;
    return (a & take_a) | (b & ~take_a);
#endif
}

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
 * r < MR, v < nv. */
INLINE void
product(vf c[MR][NV], int nv, const float *a, int64_t a_row, int64_t a_step,
        const float *b, int64_t b_step, int64_t count)
{
    UNROLL_PRODUCT for (int64_t k = 0; k < count; k++)
    {
        vf column[NV];
        UNROLL for (int v = 0; v < nv; v++)
        {
            column[v] = vf_load(b + v * VF);
        }
        UNROLL for (int r = 0; r < MR; r++)
        {
            vf x = vf_set(a[r * a_row]);
            UNROLL for (int v = 0; v < nv; v++)
            {
                c[r][v] = vf_fma(x, column[v], c[r][v]);
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

/* ---- packing ---- */

#if defined(__AVX512F__)
/* 16 rows x 16 columns -> 16 columns x 16 rows. Two rounds of 32- and 64-bit
 * interleaving inside 128-bit lanes, two of moving lanes. */
INLINE void
transpose_square(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                 float factor)
{
    __m512 r[16], t[16];
    const __m512 f = _mm512_set1_ps(factor);
    UNROLL for (int i = 0; i < 16; i++)
    {
        r[i] = _mm512_mul_ps(_mm512_loadu_ps(from + i * from_stride), f);
    }
    UNROLL for (int i = 0; i < 8; i++)
    {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(t[4 * i + j]);
            __m512d high = _mm512_castps_pd(t[4 * i + 2 + j]);
            r[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            r[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    /* r[4 i + c] holds in its lane l the column 4 l + c of rows 4 i .. 4 i + 3 */
    UNROLL for (int c = 0; c < 4; c++)
    {
        __m512 low01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
        __m512 high01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        __m512 low23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        __m512 high23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        t[8 + c] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        t[12 + c] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++)
    {
        _mm512_storeu_ps(to + i * to_stride, t[i]);
    }
}
#elif defined(__AVX2__)
INLINE void
transpose_square(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                 float factor)
{
    __m256 r[8], t[8];
    const __m256 f = _mm256_set1_ps(factor);
    UNROLL for (int i = 0; i < 8; i++)
    {
        r[i] = _mm256_mul_ps(_mm256_loadu_ps(from + i * from_stride), f);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++)
    {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int c = 0; c < 4; c++)
    {
        t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++)
    {
        _mm256_storeu_ps(to + i * to_stride, t[i]);
    }
}
#else
INLINE void
transpose_square(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                 float factor)
{
    for (int c = 0; c < VF; c++) {
        for (int r = 0; r < VF; r++) {
            to[c * to_stride + r] = from[r * from_stride + c] * factor;
        }
    }
}
#endif

/* VF rows or fewer of [.][dim] -> VF columns of a panel [dim][PANEL]. */
static void
pack_columns(float *to, const float *from, int64_t row_stride, int64_t count,
             int64_t dim, float factor)
{
    float padded[VF * ATTENTION_MAX_DIM];
    if (count < VF) {
        for (int64_t r = 0; r < VF; r++) {
            if (r < count) {
                memcpy(padded + r * dim, from + r * row_stride,
                       (size_t)dim * sizeof(float));
            } else {
                memset(padded + r * dim, 0, (size_t)dim * sizeof(float));
            }
        }
        from = padded;
        row_stride = dim;
    }
    int64_t d = 0;
    for (; d + VF <= dim; d += VF) {
        transpose_square(to + d * PANEL, PANEL, from + d, row_stride, factor);
    }
    for (; d < dim; d++) {
        for (int64_t r = 0; r < VF; r++) {
            to[d * PANEL + r] = from[r * row_stride + d] * factor;
        }
    }
}

/* Rows [row_count][dim] -> panels [ceil(row_count / PANEL)][dim][PANEL], times factor,
 * columns beyond row_count zero. */
static void
pack_transposed(float *panels, const float *rows, int64_t row_stride, int64_t row_count,
                int64_t dim, float factor)
{
    int64_t columns = round_up(row_count, PANEL);
    for (int64_t first = 0; first < columns; first += VF) {
        float *to = panels + first / PANEL * PANEL * dim + first % PANEL;
        int64_t count = min_i64(VF, row_count - first);
        if (count > 0) {
            pack_columns(to, rows + first * row_stride, row_stride, count, dim, factor);
            continue;
        }
        for (int64_t d = 0; d < dim; d++) {
            vf_store(to + d * PANEL, (vf){0});
        }
    }
}

/* Rows [row_count][dim] -> [row_count][width], width = dim rounded up to whole vectors,
 * zero-padded. */
static void
pack_rows(float *to, int64_t width, const float *rows, int64_t row_stride,
          int64_t row_count, int64_t dim)
{
    for (int64_t r = 0; r < row_count; r++) {
        const float *from = rows + r * row_stride;
        int64_t d = 0;
        for (; d + VF <= dim; d += VF) {
            vf_store(to + d, vf_load(from + d));
        }
        if (d < dim) {
            vf_store(to + d, vf_load_part(from + d, dim - d));
        }
        to += width;
    }
}

/* Hands out pieces of scratch; with base NULL it only measures. */
typedef struct arena {
    char *base;
    int64_t used_bytes;
} arena_t;

static inline float *
arena_floats(arena_t *arena, int64_t count)
{
    int64_t start = arena->used_bytes;
    arena->used_bytes += round_up(count * (int64_t)sizeof(float), 64);
    return arena->base == NULL ? NULL : (float *)(void *)(arena->base + start);
}

#endif
