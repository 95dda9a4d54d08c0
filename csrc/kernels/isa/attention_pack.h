/* Packing for the register tiles of attention: rows of a matrix whose rows may lie far
 * apart (heads of a token, columns of a fused projection) into contiguous, zero-padded
 * panels and rows; and the arena that the buffers come from.
 */
#ifndef DCP_ATTENTION_PACK_H
#define DCP_ATTENTION_PACK_H

#include "attention_tile.h"

#if defined(__AVX512F__)
/* 16 rows of 16 words, r, to 16 columns of 16 rows. Two rounds of 32- and 64-bit
 * interleaving inside 128-bit lanes, two of moving lanes. */
INLINE void
transpose_words(word_t *to, int64_t to_stride, __m512 r[16])
{
    __m512 t[16];
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
        words_store(to + i * to_stride, (word_vector_t)t[i]);
    }
}

#if FACTORS == 1
INLINE void
transpose_square(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                 float factor)
{
    __m512 r[16];
    const __m512 f = _mm512_set1_ps(factor);
    UNROLL for (int i = 0; i < 16; i++)
    {
        r[i] = _mm512_mul_ps(_mm512_loadu_ps(from + i * from_stride), f);
    }
    transpose_words(to, to_stride, r);
}
#endif
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

#if FACTORS == 1
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

#else
/* VF rows or fewer of [.][dim] -> VF columns of a panel [words of dim][PANEL]. */
static void
pack_columns(word_t *to, const float *from, int64_t row_stride, int64_t count,
             int64_t dim, float factor)
{
    const __m512 f = _mm512_set1_ps(factor);
    for (int64_t d = 0; d < dim; d += 2 * VF) {
        __m512 r[VF];
        int64_t depth = min_i64(2 * VF, dim - d);
        if (count == VF && depth == 2 * VF) {
            UNROLL for (int i = 0; i < VF; i++)
            {
                const float *x = from + i * row_stride + d;
                __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x), f);
                __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + VF), f);
                r[i] = (__m512)_mm512_cvtne2ps_pbh(high, low);
            }
            transpose_words(to + d / 2 * PANEL, PANEL, r);
            continue;
        }
        int64_t left = min_i64(VF, depth);
        for (int64_t i = 0; i < VF; i++) {
            const float *x = from + i * row_stride + d;
            vf low = {0}, high = {0};
            if (i < count) {
                low = vf_load_part(x, left);
                high = vf_load_part(x + VF, depth - left);
            }
            r[i] = (__m512)_mm512_cvtne2ps_pbh(_mm512_mul_ps((__m512)high, f),
                                               _mm512_mul_ps((__m512)low, f));
        }
        word_t square[VF * VF];
        transpose_words(square, VF, r);
        for (int64_t i = 0; i < words_of(depth); i++) {
            words_store(to + (d / 2 + i) * PANEL, words_load(square + i * VF));
        }
    }
}
#endif

/* Rows [row_count][dim] -> panels [ceil(row_count / PANEL)][words of dim][PANEL], times
 * factor, columns beyond row_count zero. */
static void
pack_transposed(word_t *panels, const float *rows, int64_t row_stride,
                int64_t row_count, int64_t dim, float factor)
{
    int64_t columns = round_up(row_count, PANEL);
    int64_t depth = words_of(dim);
    for (int64_t first = 0; first < columns; first += VF) {
        word_t *to = panels + first / PANEL * PANEL * depth + first % PANEL;
        int64_t count = min_i64(VF, row_count - first);
        if (count > 0) {
            pack_columns(to, rows + first * row_stride, row_stride, count, dim, factor);
            continue;
        }
        for (int64_t d = 0; d < depth; d++) {
            words_store(to + d * PANEL, (word_vector_t){0});
        }
    }
}

/* Rows [row_count][dim] -> [words of row_count][width], width = dim rounded up to whole
 * vectors, zero-padded: a word takes from as many rows as it holds factors. */
static void
pack_rows(word_t *to, int64_t width, const float *rows, int64_t row_stride,
          int64_t row_count, int64_t dim)
{
    for (int64_t r = 0; r < row_count; r += FACTORS) {
        const float *from = rows + r * row_stride;
        const int64_t together = r + FACTORS <= row_count ? FACTORS : 1;
        int64_t d = 0;
        for (; d + VF <= dim; d += VF) {
            words_store(to + d,
                        words_across(SOURCE_FLOAT, from + d, row_stride, together, VF));
        }
        if (d < dim) {
            words_store(to + d, words_across(SOURCE_FLOAT, from + d, row_stride,
                                             together, dim - d));
        }
        to += width;
    }
}

/* Words of one factor, whole vectors, in place: rounded to bf16; times factor. */
static void
round_vectors(word_t *x, int64_t count)
{
    for (int64_t i = 0; FACTORS == 1 && i < count; i += VF) {
        words_store(x + i, (word_vector_t)vf_round_bf16((vf)words_load(x + i)));
    }
}

static void
scale_vectors(word_t *x, int64_t count, float factor)
{
    for (int64_t i = 0; FACTORS == 1 && i < count; i += VF) {
        words_store(x + i, (word_vector_t)((vf)words_load(x + i) * vf_set(factor)));
    }
}

/* Rows [row_count][dim] -> [MR][words of dim], rows beyond row_count zero; rounded to
 * bf16 if `round` says so or words hold two. */
static void
pack_tile_rows(word_t *to, const float *rows, int64_t row_stride, int64_t row_count,
               int64_t dim, int32_t round)
{
    for (int64_t r = 0; r < MR; r++) {
        const float *from = rows + r * row_stride;
        int64_t d = 0;
        for (; r < row_count && d + FACTORS * VF <= dim; d += FACTORS * VF) {
            words_store(to, words_along(SOURCE_FLOAT, from + d, FACTORS * VF));
            to += VF;
        }
        for (; d < dim; d += FACTORS * VF) {
            int64_t count = min_i64(FACTORS * VF, dim - d);
            word_vector_t x = {0};
            if (r < row_count) {
                x = words_along(SOURCE_FLOAT, from + d, count);
            }
            words_store_part(to, x, words_of(count));
            to += words_of(count);
        }
    }
    if (FACTORS == 1 && round) {
        round_vectors(to - MR * dim, MR * dim);
    }
}

/* Hands out pieces of scratch; with base NULL it only measures. */
typedef struct arena {
    char *base;
    int64_t used_bytes;
} arena_t;

static inline void *
arena_take(arena_t *arena, int64_t count)
{
    int64_t start = arena->used_bytes;
    arena->used_bytes += round_up(count * (int64_t)sizeof(word_t), 64);
    return arena->base == NULL ? NULL : arena->base + start;
}

static inline float *
arena_floats(arena_t *arena, int64_t count)
{
    return arena_take(arena, count);
}

static inline word_t *
arena_words(arena_t *arena, int64_t count)
{
    return arena_take(arena, count);
}

#endif
