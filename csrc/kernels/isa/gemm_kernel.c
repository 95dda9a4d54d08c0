/* The register tile of the matrix product, and packing, once per instruction set.
 *
 * A tile of ROWS x 2 vectors of C lives in registers while k runs: per k two vectors of
 * a B panel are loaded, one element of A per row is broadcast from memory. 12 x 32
 * (AVX-512) makes 24 fused multiply-adds of 14 loads, so that neither the load ports
 * nor the front end bind, and 24 independent sums hide the latency of 2 x 4. Tiles of
 * fewer rows are the same code with a smaller constant.
 *
 * Every element of C is base + bias + one chain of fused multiply-adds in increasing k,
 * from zero, whatever the tile: its bits do not depend on where in a tile it lies.
 *
 * With AVX512_BF16 the same tile runs over words of two bf16 numbers, at two
 * multiply-adds a lane: c + a1 b1 + a0 b0 as the instruction defines it (two roundings
 * to nearest even, subnormal numbers count as zero), again one chain an element.
 */
#include "words.h"

#include "../gemm_ops.h"

#if defined(__AVX512F__)
#define ROWS 12
#define EACH_ROWS(X) \
    X(1)             \
    X(2)             \
    X(3)             \
    X(4)             \
    X(5)             \
    X(6)             \
    X(7)             \
    X(8)             \
    X(9)             \
    X(10)            \
    X(11)            \
    X(12)
#else
#define ROWS 6
#define EACH_ROWS(X) \
    X(1)             \
    X(2)             \
    X(3)             \
    X(4)             \
    X(5)             \
    X(6)
#endif
#define PANEL (2 * VF)

/* ---- the tile ---- */

typedef struct tile {
    int64_t kc; /* words */
    const word_t *a;
    int64_t a_stride;
    const word_t *b;
    float *c;
    int64_t ldc;
    const float *base;
    int64_t ld_base;
    const float *bias;
    int64_t columns; /* of the tile, 1..PANEL */
} tile_t;

/* acc + base + bias -> C; `partial`: fewer columns than the tile has. */
INLINE void
tile_store(const int rows, const int vectors, const int partial, const int has_base,
           vf acc[ROWS][2], const tile_t *t)
{
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        const int64_t left = t->columns - v * VF;
        const int64_t count = left < VF ? left : VF;
        vf bias = {0};
        if (t->bias != NULL) {
            bias = partial ? vf_load_part(t->bias + v * VF, count)
                           : vf_load(t->bias + v * VF);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            float *to = t->c + i * t->ldc + v * VF;
            vf x = acc[i][v];
            if (has_base) {
                const float *base = t->base + i * t->ld_base + v * VF;
                x += partial ? vf_load_part(base, count) : vf_load(base);
            }
            if (t->bias != NULL) {
                x += bias;
            }
            if (partial) {
                vf_store_part(to, x, count);
            } else {
                vf_store(to, x);
            }
        }
    }
}

INLINE void
tile_run(const int rows, const int vectors, const int strips, const tile_t *t)
{
    vf acc[ROWS][2] = {{{0}}};
    const word_t *a = t->a, *b = t->b;
    const int64_t stride = t->a_stride;
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(t->c + i * t->ldc, 1);
        __builtin_prefetch(t->c + i * t->ldc + (t->columns - 1), 1);
    }
    for (int64_t k = 0; k < t->kc; k++) {
        word_vector_t b0 = words_load(b), b1 = vectors == 2 ? words_load(b + VF) : b0;
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            word_t x = strips ? a[i] : a[i * stride];
            acc[i][0] = multiply_add(x, b0, acc[i][0]);
            if (vectors == 2) {
                acc[i][1] = multiply_add(x, b1, acc[i][1]);
            }
        }
        a += strips ? rows : 1;
        b += vectors * VF;
    }
    if (t->columns < vectors * VF) {
        if (t->base != NULL) {
            tile_store(rows, vectors, 1, 1, acc, t);
        } else {
            tile_store(rows, vectors, 1, 0, acc, t);
        }
    } else if (t->base != NULL) {
        tile_store(rows, vectors, 0, 1, acc, t);
    } else {
        tile_store(rows, vectors, 0, 0, acc, t);
    }
}

typedef void (*tile_func_t)(const tile_t *tile);

#define TILE(rows, vectors, strips)                                 \
    static void tile_##rows##_##vectors##_##strips(const tile_t *t) \
    {                                                               \
        tile_run(rows, vectors, strips, t);                         \
    }
#define TILES(rows)  \
    TILE(rows, 1, 0) \
    TILE(rows, 1, 1) \
    TILE(rows, 2, 0) \
    TILE(rows, 2, 1)
EACH_ROWS(TILES)

/* [rows - 1][vectors - 1][strips] */
#define TILE_ENTRY(rows) \
    {{tile_##rows##_1_0, tile_##rows##_1_1}, {tile_##rows##_2_0, tile_##rows##_2_1}},
static const tile_func_t tiles[ROWS][2][2] = {EACH_ROWS(TILE_ENTRY)};

/* Strips stay near (gemm.c sees to that), panels stream by. */
static void
block_run(const gemm_block_t *block)
{
    const gemm_strips_t strips = gemm_strips(block->m, ROWS);
    const int in_strips = block->a_strips != 0;
    tile_t t = {
        .kc = block->kc,
        .a_stride = block->a_stride,
        .ldc = block->ldc,
        .ld_base = block->ld_base,
    };
    for (int64_t column = 0; column < block->n; column += PANEL) {
        const int64_t left = block->n - column;
        const int wide = left > VF;
        t.columns = left < PANEL ? left : PANEL;
        t.a = block->a;
        t.b = (const word_t *)block->b + column / PANEL * block->panel_stride
              + block->b_skip * (wide ? PANEL : VF);
        t.c = block->c + column;
        t.base = block->base == NULL ? NULL : block->base + column;
        t.bias = block->bias == NULL ? NULL : block->bias + column;
        for (int64_t s = 0; s < strips.count; s++) {
            const int64_t rows = strips.least + (s < strips.longer);
            tiles[rows - 1][wide][in_strips](&t);
            t.a += rows * (in_strips ? block->kc : block->a_stride);
            t.c += rows * block->ldc;
            if (t.base != NULL) {
                t.base += rows * block->ld_base;
            }
        }
    }
}

/* ---- packing ---- */

/* It goes down PACK_ROWS words of k at a time, so that the lines of a row serve all
 * strips or panels that share them, and fetches the next rows meanwhile (past the end
 * too: harmless). */
enum { PACK_ROWS = 32, PACK_DEPTH = PACK_ROWS * FACTORS };

/* One strip of `rows` rows: k numbers of stride lda, each word `rows` wide. */
INLINE void
strip_pack(const int rows, const int source, int64_t k, const float *a, int64_t lda,
           word_t *to)
{
    for (int64_t j = 0; j < k; j += FACTORS) {
        for (int i = 0; i < FACTORS; i++) {
            __builtin_prefetch(a + (PACK_DEPTH + i) * lda);
        }
        if (FACTORS == 1 && source == SOURCE_FLOAT) {
            memcpy(to, a, (size_t)rows * sizeof(float));
        } else {
            for (int i = 0; i < rows; i += VF) {
                const int count = rows - i < VF ? rows - i : VF;
                words_store_part(
                    to + i, words_across(source, a + i, lda, k - j < 2 ? 1 : 2, count),
                    count);
            }
        }
        a += FACTORS * lda;
        to += rows;
    }
}

typedef void (*strip_func_t)(int64_t k, const float *a, int64_t lda, word_t *to);

#define STRIP(rows)                                                          \
    static void strip_##rows##_float(int64_t k, const float *a, int64_t lda, \
                                     word_t *to)                             \
    {                                                                        \
        strip_pack(rows, SOURCE_FLOAT, k, a, lda, to);                       \
    }                                                                        \
    static void strip_##rows##_round(int64_t k, const float *a, int64_t lda, \
                                     word_t *to)                             \
    {                                                                        \
        strip_pack(rows, SOURCE_ROUND, k, a, lda, to);                       \
    }

EACH_ROWS(STRIP)

/* [rows - 1][source] */
#define STRIP_ENTRY(rows) {strip_##rows##_float, strip_##rows##_round},
static const strip_func_t strip_packs[ROWS][2] = {EACH_ROWS(STRIP_ENTRY)};

static void
pack_strips(source_t source, int64_t m, int64_t k, const float *a, int64_t lda,
            void *packed)
{
    const gemm_strips_t strips = gemm_strips(m, ROWS);
    const int64_t words = (k + FACTORS - 1) / FACTORS;
    for (int64_t j = 0; j < k; j += PACK_DEPTH) {
        int64_t depth = k - j < PACK_DEPTH ? k - j : PACK_DEPTH;
        const float *from = a + j * lda;
        word_t *to = packed;
        for (int64_t s = 0; s < strips.count; s++) {
            int64_t rows = strips.least + (s < strips.longer);
            strip_packs[rows - 1][source](depth, from, lda, to + j / FACTORS * rows);
            from += rows;
            to += rows * words;
        }
    }
}

static void
pack_rows(int64_t m, int64_t k, const float *a, int64_t lda, void *packed)
{
    word_t *to = packed;
    for (int64_t row = 0; row < m; row++) {
        int64_t j = 0;
        for (; j + FACTORS * VF <= k; j += FACTORS * VF) {
            words_store(to, words_along(SOURCE_ROUND, a + j, FACTORS * VF));
            to += VF;
        }
        if (j < k) {
            int64_t words = (k - j + FACTORS - 1) / FACTORS;
            words_store_part(to, words_along(SOURCE_ROUND, a + j, k - j), words);
            to += words;
        }
        a += lda;
    }
}

/* x becomes its transpose. */
INLINE void
transpose(vf x[VF])
{
#if defined(__AVX512F__)
    __m512 y[16], *z = (__m512 *)x;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(z[i], z[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(z[i], z[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 within every quarter */
        __m512d p0 = (__m512d)y[i], p1 = (__m512d)y[i + 1];
        __m512d p2 = (__m512d)y[i + 2], p3 = (__m512d)y[i + 3];
        z[i] = (__m512)_mm512_unpacklo_pd(p0, p2);
        z[i + 1] = (__m512)_mm512_unpackhi_pd(p0, p2);
        z[i + 2] = (__m512)_mm512_unpacklo_pd(p1, p3);
        z[i + 3] = (__m512)_mm512_unpackhi_pd(p1, p3);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) { /* quarters of rows i, i+4, i+8, i+12 */
        __m512 even0 = _mm512_shuffle_f32x4(z[i], z[i + 4], 0x88);
        __m512 odd0 = _mm512_shuffle_f32x4(z[i], z[i + 4], 0xdd);
        __m512 even1 = _mm512_shuffle_f32x4(z[i + 8], z[i + 12], 0x88);
        __m512 odd1 = _mm512_shuffle_f32x4(z[i + 8], z[i + 12], 0xdd);
        z[i] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        z[i + 4] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        z[i + 8] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        z[i + 12] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
#elif defined(__AVX2__)
    __m256 y[8], *z = (__m256 *)x;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(z[i], z[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(z[i], z[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) { /* 4 x 4 within either half */
        __m256d p0 = (__m256d)y[i], p1 = (__m256d)y[i + 1];
        __m256d p2 = (__m256d)y[i + 2], p3 = (__m256d)y[i + 3];
        z[i] = (__m256)_mm256_unpacklo_pd(p0, p2);
        z[i + 1] = (__m256)_mm256_unpackhi_pd(p0, p2);
        z[i + 2] = (__m256)_mm256_unpacklo_pd(p1, p3);
        z[i + 3] = (__m256)_mm256_unpackhi_pd(p1, p3);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) { /* halves of rows i, i + 4 */
        __m256 low = _mm256_permute2f128_ps(z[i], z[i + 4], 0x20);
        z[i + 4] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x31);
        z[i] = low;
    }
#else
    for (int i = 0; i < VF; i++) {
        for (int j = 0; j < i; j++) {
            float lower = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = lower;
        }
    }
#endif
}

/* `columns` columns (1..VF), each k contiguous numbers with stride ldb, to the rows of
 * a panel `width` wide. */
INLINE void
columns_transpose(const int source, int64_t columns, int64_t k, const void *b,
                  int64_t ldb, int64_t width, word_t *to)
{
    for (int64_t j = 0; j < k; j += FACTORS * VF) {
        int64_t depth = k - j < FACTORS * VF ? k - j : FACTORS * VF;
        vf x[VF];
        if (columns == VF && depth == FACTORS * VF) {
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++) {
                const void *from = numbers_at(source, b, i * ldb + j);
                x[i] = (vf)words_along(source, from, FACTORS * VF);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++) {
                words_store(to + i * width, (word_vector_t)x[i]);
            }
        } else {
            for (int64_t i = 0; i < VF; i++) {
                const void *from = numbers_at(source, b, i * ldb + j);
                x[i] = i < columns ? (vf)words_along(source, from, depth) : (vf){0};
            }
            transpose(x);
            for (int64_t i = 0; i * FACTORS < depth; i++) {
                words_store(to + i * width, (word_vector_t)x[i]);
            }
        }
        to += VF * width;
    }
}

/* `columns` columns (1..PANEL) of k rows with stride ldb to a panel `width` wide. */
INLINE void
columns_copy(const int source, int64_t columns, int64_t k, const void *b, int64_t ldb,
             int64_t width, word_t *to)
{
    for (int64_t j = 0; j < k; j += FACTORS) {
        const int64_t rows = k - j < FACTORS ? 1 : FACTORS;
        for (int i = 0; i < FACTORS; i++) {
            const void *ahead = numbers_at(source, b, (PACK_DEPTH + i) * ldb);
            __builtin_prefetch(ahead);
            if (columns == PANEL) {
                __builtin_prefetch(numbers_at(source, ahead, PANEL - 1));
            }
        }
        if (columns == PANEL) {
            const void *second = numbers_at(source, b, VF);
            words_store(to, words_across(source, b, ldb, rows, VF));
            words_store(to + VF, words_across(source, second, ldb, rows, VF));
        } else {
            for (int64_t i = 0; i < width; i += VF) {
                int64_t left = columns - i < VF ? columns - i : VF;
                words_store(to + i, left > 0
                                        ? words_across(source, numbers_at(source, b, i),
                                                       ldb, rows, left)
                                        : (word_vector_t){0});
            }
        }
        b = numbers_at(source, b, FACTORS * ldb);
        to += width;
    }
}

INLINE void
panels_pack(const int source, int64_t n, int64_t k, const void *b, int64_t ldb,
            int32_t trans_b, int64_t panel_stride, word_t *packed)
{
    if (trans_b) {
        for (int64_t column = 0; column < n; column += VF) {
            int64_t columns = n - column < VF ? n - column : VF;
            int64_t first = column / PANEL * PANEL; /* of its panel */
            int64_t width = n - first > VF ? PANEL : VF;
            columns_transpose(
                source, columns, k, numbers_at(source, b, column * ldb), ldb, width,
                packed + column / PANEL * panel_stride + (column - first));
        }
        return;
    }
    for (int64_t j = 0; j < k; j += PACK_DEPTH) {
        int64_t depth = k - j < PACK_DEPTH ? k - j : PACK_DEPTH;
        word_t *panel = packed;
        for (int64_t column = 0; column < n; column += PANEL) {
            int64_t columns = n - column < PANEL ? n - column : PANEL;
            int64_t width = columns > VF ? PANEL : VF;
            columns_copy(source, columns, depth,
                         numbers_at(source, b, j * ldb + column), ldb, width,
                         panel + j / FACTORS * width);
            panel += panel_stride;
        }
    }
}

static void
pack_b(source_t source, int64_t n, int64_t k, const void *b, int64_t ldb,
       int32_t trans_b, int64_t panel_stride, void *packed)
{
    if (source == SOURCE_BF16) {
        panels_pack(SOURCE_BF16, n, k, b, ldb, trans_b, panel_stride, packed);
    } else if (source == SOURCE_ROUND && FACTORS == 1) {
        panels_pack(SOURCE_ROUND, n, k, b, ldb, trans_b, panel_stride, packed);
    } else {
        panels_pack(SOURCE_FLOAT, n, k, b, ldb, trans_b, panel_stride, packed);
    }
}

extern const gemm_ops_t ISA_NAME(gemm_ops);
const gemm_ops_t ISA_NAME(gemm_ops) = {
    .rows = ROWS,
    .vector = VF,
    .factors = FACTORS,
    .pack_b = pack_b,
    .pack_strips = pack_strips,
    .pack_rows = pack_rows,
    .block = block_run,
};
