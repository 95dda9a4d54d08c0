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
 */
#include "simd.h"

#include "../gemm_ops.h"

#if defined(__AVX512F__)
#define ROWS 12
#elif defined(__AVX2__)
#define ROWS 6
#else
#define ROWS 6
#endif
#define PANEL (2 * VF)

#define INLINE static inline __attribute__((always_inline))

typedef struct tile {
    int64_t kc;
    const float *a;
    int64_t a_stride;
    const float *b;
    float *c;
    int64_t ldc;
    const float *base;
    int64_t ld_base;
    const float *bias;
    int64_t columns; /* of the tile, 1..PANEL */
} tile_t;

INLINE vf
load_columns(const float *p, int64_t count)
{
    return count >= VF ? vf_load(p) : vf_load_part(p, count);
}

INLINE void
tile_finish(const int rows, const int vectors, vf acc[ROWS][2], const tile_t *t)
{
    for (int v = 0; v < vectors; v++) {
        int64_t count = t->columns - v * VF;
        count = count < VF ? count : VF;
        vf bias = {0};
        if (t->bias != NULL) {
            bias = load_columns(t->bias + v * VF, count);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vf x = acc[i][v];
            if (t->base != NULL) {
                x += load_columns(t->base + i * t->ld_base + v * VF, count);
            }
            if (t->bias != NULL) {
                x += bias;
            }
            float *to = t->c + i * t->ldc + v * VF;
            if (count == VF) {
                vf_store(to, x);
            } else {
                vf_store_part(to, x, count);
            }
        }
    }
}

INLINE void
tile_run(const int rows, const int vectors, const int packed, const tile_t *t)
{
    vf acc[ROWS][2] = {{{0}}};
    const float *a = t->a, *b = t->b;
    const int64_t stride = t->a_stride;
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(t->c + i * t->ldc, 1);
        __builtin_prefetch(t->c + i * t->ldc + (t->columns - 1), 1);
    }
    for (int64_t k = 0; k < t->kc; k++) {
        vf b0 = vf_load(b), b1 = vectors == 2 ? vf_load(b + VF) : b0;
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vf x = vf_set(packed ? a[i] : a[i * stride]);
            acc[i][0] = vf_fma(x, b0, acc[i][0]);
            if (vectors == 2) {
                acc[i][1] = vf_fma(x, b1, acc[i][1]);
            }
        }
        a += packed ? rows : 1;
        b += vectors * VF;
    }
    tile_finish(rows, vectors, acc, t);
}

typedef void (*tile_func_t)(const tile_t *tile);

#define TILE(rows, vectors, packed)                                 \
    static void tile_##rows##_##vectors##_##packed(const tile_t *t) \
    {                                                               \
        tile_run(rows, vectors, packed, t);                         \
    }
#define TILES(rows) TILE(rows, 1, 0) TILE(rows, 1, 1) TILE(rows, 2, 0) TILE(rows, 2, 1)
#define ENTRY(rows)                              \
    {                                            \
        {tile_##rows##_1_0, tile_##rows##_1_1},  \
        {                                        \
            tile_##rows##_2_0, tile_##rows##_2_1 \
        }                                        \
    }

TILES(1)
TILES(2)
TILES(3)
TILES(4)
TILES(5)
TILES(6)
#if ROWS > 6
TILES(7)
TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#endif

    /* [rows - 1][vectors - 1][packed] */
    static const tile_func_t tiles[ROWS][2][2] = {
        ENTRY(1), ENTRY(2), ENTRY(3), ENTRY(4),  ENTRY(5),  ENTRY(6),
#if ROWS > 6
        ENTRY(7), ENTRY(8), ENTRY(9), ENTRY(10), ENTRY(11), ENTRY(12),
#endif
};

static void
block_run(const gemm_block_t *block)
{
    int64_t strip_count = (block->m + ROWS - 1) / ROWS;
    for (int64_t s = 0; s < strip_count; s++) {
        int64_t row = gemm_strip_begin(block->m, strip_count, s);
        int64_t rows = gemm_strip_begin(block->m, strip_count, s + 1) - row;
        tile_t t = {
            .kc = block->kc,
            .a = block->a + row * (block->a_packed ? block->kc : block->a_stride),
            .a_stride = block->a_stride,
            .ldc = block->ldc,
            .ld_base = block->ld_base,
        };
        const float *b = block->b;
        for (int64_t column = 0; column < block->n; column += PANEL) {
            t.c = block->c + row * block->ldc + column;
            t.base = block->base == NULL ? NULL
                                         : block->base + row * block->ld_base + column;
            t.bias = block->bias == NULL ? NULL : block->bias + column;
            t.columns = block->n - column < PANEL ? block->n - column : PANEL;
            t.b = b + block->b_skip * (t.columns > VF ? PANEL : VF);
            tiles[rows - 1][t.columns > VF][block->a_packed != 0](&t);
            b += block->panel_stride;
        }
    }
}

static void
pack_a(int64_t m, int64_t k, const float *a, int64_t lda, float *packed)
{
    int64_t strip_count = (m + ROWS - 1) / ROWS;
    for (int64_t j = 0; j < k; j++) {
        const float *from = a + j * lda;
        for (int64_t s = 0; s < strip_count; s++) {
            int64_t row = gemm_strip_begin(m, strip_count, s);
            int64_t rows = gemm_strip_begin(m, strip_count, s + 1) - row;
            float *to = packed + row * k + j * rows;
            for (int64_t i = 0; i < rows; i++) {
                to[i] = from[row + i];
            }
        }
    }
}

static void
pack_b(int64_t n, int64_t k, const float *b, int64_t ldb, int32_t trans_b,
       int64_t panel_stride, float *packed)
{
    for (int64_t column = 0; column < n; column += PANEL, packed += panel_stride) {
        int64_t columns = n - column < PANEL ? n - column : PANEL;
        int64_t width = columns > VF ? PANEL : VF;
        for (int64_t j = 0; j < k; j++) {
            for (int64_t i = 0; i < width; i++) {
                packed[j * width + i] = i >= columns ? 0.0f
                                        : trans_b    ? b[(column + i) * ldb + j]
                                                     : b[j * ldb + column + i];
            }
        }
    }
}

extern const gemm_ops_t ISA_NAME(gemm_ops);
const gemm_ops_t ISA_NAME(gemm_ops) = {
    .rows = ROWS,
    .vector = VF,
    .pack_b = pack_b,
    .pack_a = pack_a,
    .block = block_run,
};
