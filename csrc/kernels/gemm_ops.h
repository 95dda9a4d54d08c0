/* What gemm.c asks of an instruction set: packing, and the product of one block.
 * Private to the matrix product.
 *
 * Operands are read as words of 32 bits: one fp32 number, or two bf16 numbers that
 * follow each other in k, the first in the lower half (`factors` 1 or 2; an odd k is
 * filled up with zero). A table of one factor also serves bf16 where the set cannot
 * multiply it: packing rounds. Below, k counts words.
 *
 * op(B) [k, n] is read as panels of `panel` = 2 vectors of columns; a panel holds rows
 * 0..k-1 one after the other. The last panel is one vector wide if that is enough; its
 * missing columns are zero.
 *
 *   panel 0            panel 1            last panel
 *   k0: b b b b b b b  k0: b b b b b b b  k0: b b 0 0
 *   k1: b b b b b b b  k1: b b b b b b b  k1: b b 0 0
 *
 * op(A) [m, k] is read in place where its rows are contiguous fp32 numbers that need no
 * rounding, else as packed rows, or, if stored transposed, as strips of `rows` rows:
 * strip s holds, for each k, the words of its rows one after the other.
 */
#ifndef DCP_GEMM_OPS_H
#define DCP_GEMM_OPS_H

#include "bf16.h"

#include <stdint.h>

/* One block: C [m, n] = base + bias + A B over kc words. */
typedef struct gemm_block {
    int64_t m, n, kc;
    const void *a;    /* words [m, kc] with stride a_stride, or strips if a_strips */
    int64_t a_stride; /* in words; unused if a_strips */
    const void *b;    /* first panel */
    int64_t b_skip;   /* rows of every panel before the block's first k */
    int64_t panel_stride; /* words from one whole panel to the next */
    float *c;
    int64_t ldc;
    const float *base; /* [m, n] with stride ld_base, may be c; NULL: zero */
    int64_t ld_base;
    const float *bias; /* [n] or NULL */
    int32_t a_strips;
} gemm_block_t;

typedef struct gemm_ops {
    int32_t rows;    /* most rows of a register tile */
    int32_t vector;  /* columns of a vector; a panel has two */
    int32_t factors; /* in a word */
    /* Here k counts elements. Panels of columns 0..n-1. b: row stride ldb, [k, n], or
     * [n, k] with trans_b. */
    void (*pack_b)(source_t source, int64_t n, int64_t k, const void *b, int64_t ldb,
                   int32_t trans_b, int64_t panel_stride, void *packed);
    /* Strips of rows 0..m-1 from A stored [k, m] with row stride lda; not SOURCE_BF16.
     */
    void (*pack_strips)(source_t source, int64_t m, int64_t k, const float *a,
                        int64_t lda, void *packed);
    /* Packed rows from A stored [m, k], rounded. */
    void (*pack_rows)(int64_t m, int64_t k, const float *a, int64_t lda, void *packed);
    void (*block)(const gemm_block_t *block);
} gemm_ops_t;

/* m > 0 rows as the fewest strips of at most `rows`: the first `longer` have least + 1
 * rows, the others `least`. */
typedef struct gemm_strips {
    int64_t count, least, longer;
} gemm_strips_t;

static inline gemm_strips_t
gemm_strips(int64_t m, int64_t rows)
{
    int64_t count = (m + rows - 1) / rows;
    return (gemm_strips_t){count, m / count, m % count};
}

extern const gemm_ops_t gemm_ops_portable;
#if defined(__x86_64__)
extern const gemm_ops_t gemm_ops_avx2;
extern const gemm_ops_t gemm_ops_avx512;
extern const gemm_ops_t gemm_ops_avx512bf16;
#endif

#endif
