/* What csrc/kernels/attention.c and the attention kernels of an instruction set agree
 * on. Internal to kernels/.
 *
 * A kernel sees one sequence and one key-value head, with the query heads that read it
 * ("head group"), and does a range of query rows (forward) or of keys (backward). Every
 * number depends on the sequence alone: how the ranges are cut never changes a bit,
 * provided forward ranges begin at 0 or a multiple of ATTENTION_ROWS before the
 * sequence's end, and backward ranges are whole segments (attention_segment_keys).
 */
#ifndef DCP_ATTENTION_H
#define DCP_ATTENTION_H

#include <stdint.h>

enum {
    ATTENTION_ROWS = 6,           /* query rows that one register tile holds */
    ATTENTION_MAX_DIM = 256,      /* largest head dimension */
    ATTENTION_QUERY_BLOCK = 64,   /* query rows of one block of the backward pass */
    ATTENTION_KEY_BLOCK = 96,     /* keys between two updates of dq */
    ATTENTION_SEGMENT_KEYS = 480, /* least keys of a segment */
    ATTENTION_SEGMENT_COUNT = 16, /* most segments of a sequence */
};

/* One sequence and one key-value head. Pointers stand at the sequence's first row and
 * at the (first) head; strides are elements from row to row. */
typedef struct attention_view {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    int64_t query_count, key_count; /* rows of the sequence */
    int64_t group_size;             /* query heads, head_dim apart in q and out */
    int64_t head_dim;
    float scale;
    int32_t causal;
    int32_t round; /* factors of products are rounded to bf16 */
    float *out;
    int64_t out_stride;
    float *lse;
    int64_t lse_stride; /* from head to head */
} attention_view_t;

/* What the backward pass adds. dq: the rows of the sequence, or a partial result of one
 * segment. */
typedef struct attention_gradient_view {
    attention_view_t forward;
    const float *dout;
    int64_t dout_stride;
    float *dq, *dk, *dv;
    int64_t dq_stride, dk_stride, dv_stride;
    int64_t dq_head_stride; /* from head to head */
    int64_t dq_first;       /* row of the sequence at which dq stands */
    int32_t accumulate;     /* dk and dv are added to */
} attention_gradient_view_t;

typedef struct attention_forward_ops {
    /* Scratch of a call that does row_count rows of group_size heads. */
    int64_t (*scratch_bytes)(int64_t row_count, int64_t group_size, int64_t head_dim);
    /* Rows first .. end-1 of all heads of the group; rows that see no key too. */
    void (*run)(const attention_view_t *view, int64_t first, int64_t end,
                void *scratch);
} attention_forward_ops_t;

typedef struct attention_backward_ops {
    /* Scratch of a call over at most key_count keys. */
    int64_t (*scratch_bytes)(int64_t key_count, int64_t head_dim);
    /* Keys first .. end-1: one segment of a sequence with query rows. Writes dk and dv
     * of these keys, or adds to them; adds its part of dq, or, with `store`,
     * overwrites. Query rows that see no key of the segment are left alone. */
    void (*run)(const attention_gradient_view_t *view, int64_t first, int64_t end,
                int32_t store, void *scratch);
} attention_backward_ops_t;

/* Keys that query row `row` sees: 0 .. result-1. */
static inline int64_t
attention_visible(const attention_view_t *view, int64_t row)
{
    if (!view->causal) {
        return view->key_count;
    }
    int64_t count = row + 1 + view->key_count - view->query_count;
    return count > 0 ? count : 0;
}

/* First query row that sees key `key`; query_count if none. */
static inline int64_t
attention_first_row(const attention_view_t *view, int64_t key)
{
    if (!view->causal) {
        return 0;
    }
    int64_t row = key + view->query_count - view->key_count;
    return row > 0 ? row : 0;
}

/* Keys of a segment of a sequence: as even as possible, at most SEGMENT_KEYS unless
 * that would give more than SEGMENT_COUNT of them. */
static inline int64_t
attention_segment_keys(int64_t key_count)
{
    int64_t count = (key_count + ATTENTION_SEGMENT_KEYS - 1) / ATTENTION_SEGMENT_KEYS;
    count = count > ATTENTION_SEGMENT_COUNT ? ATTENTION_SEGMENT_COUNT : count;
    count = count > 0 ? count : 1;
    int64_t keys = (key_count + count - 1) / count;
    return (keys + ATTENTION_ROWS - 1) / ATTENTION_ROWS * ATTENTION_ROWS + (keys == 0);
}

#endif
