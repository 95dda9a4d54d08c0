/* What attention's forward and backward passes share on the way from arguments to
 * tasks: checks, one sequence as kernels see it, units of work.
 */
#include "attention_work.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Multiply-adds of the score product below which sequences share a unit. */
static const double unit_cost = 1 << 20;

static dcp_status_t
check_offsets(const dcp_attention_args_t *args, const void *offsets, const char *what,
              int64_t row_count, const char *rows_of)
{
    int64_t before = attention_offset(args, offsets, 0);
    if (before != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "%s[0] is %" PRId64 ", must be 0", what, before);
    }
    for (int64_t i = 1; i <= args->sequence_count; i++) {
        int64_t x = attention_offset(args, offsets, i);
        if (x < before) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "%s[%" PRId64 "] is %" PRId64 ", below %s[%" PRId64
                            "] = %" PRId64 ": offsets must not decrease",
                            what, i, x, what, i - 1, before);
        }
        before = x;
    }
    if (row_count >= 0 && before > row_count) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "%s[%" PRId64 "] is %" PRId64 ", beyond the %" PRId64
                        " rows of %s",
                        what, args->sequence_count, before, row_count, rows_of);
    }
    return DCP_OK;
}

dcp_status_t
attention_check_stride(const char *what, int64_t stride, int64_t heads, int64_t dim)
{
    if (stride < heads * dim) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "%s %" PRId64 " is below the %" PRId64 " x %" PRId64
                        " elements of a row",
                        what, stride, heads, dim);
    }
    return DCP_OK;
}

static dcp_status_t
check_key_ranges(const dcp_attention_args_t *args, int64_t key_rows)
{
    if (args->key_offsets == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "key_ends needs key_offsets");
    }
    for (int64_t i = 0; i < args->sequence_count; i++) {
        int64_t begin = attention_offset(args, args->key_offsets, i);
        int64_t end = attention_offset(args, args->key_ends, i);
        if (begin < 0 || end < begin || (key_rows >= 0 && end > key_rows)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "sequence %" PRId64 " owns key rows %" PRId64 "..%" PRId64
                            ": the range must lie within k",
                            i, begin, end);
        }
    }
    return DCP_OK;
}

dcp_status_t
attention_check(const dcp_attention_args_t *args, int64_t key_rows)
{
    if (args->head_dim < 1 || args->head_dim > ATTENTION_MAX_DIM) {
        return DCP_FAIL(DCP_ERR_ARG, "head_dim %" PRId64 " must lie in 1..%d",
                        args->head_dim, (int)ATTENTION_MAX_DIM);
    }
    if (args->heads < 1 || args->kv_heads < 1 || args->heads % args->kv_heads != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "heads %" PRId64 " must be a positive multiple of kv_heads "
                        "%" PRId64,
                        args->heads, args->kv_heads);
    }
    if (args->sequence_count < 0 || args->query_rows < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "sequence_count %" PRId64 " and query_rows %" PRId64
                        " must not be negative",
                        args->sequence_count, args->query_rows);
    }
    if (args->compute != DCP_F32 && args->compute != DCP_BF16) {
        return DCP_FAIL(DCP_ERR_TYPE, "compute %s must be float32 or bfloat16",
                        dcp_dtype_name(args->compute));
    }
    if (!isfinite(args->scale)) {
        return DCP_FAIL(DCP_ERR_ARG, "scale %g must be finite", (double)args->scale);
    }
    DCP_TRY(attention_check_stride("q_stride", args->q_stride, args->heads,
                                   args->head_dim));
    DCP_TRY(attention_check_stride("k_stride", args->k_stride, args->kv_heads,
                                   args->head_dim));
    DCP_TRY(attention_check_stride("v_stride", args->v_stride, args->kv_heads,
                                   args->head_dim));
    DCP_TRY(attention_check_stride("out_stride", args->out_stride, args->heads,
                                   args->head_dim));
    DCP_TRY(check_offsets(args, args->offsets, "offsets", args->query_rows, "q"));
    if (args->key_ends != NULL) {
        return check_key_ranges(args, key_rows);
    }
    if (args->key_offsets != NULL) {
        return check_offsets(args, args->key_offsets, "key_offsets", key_rows, "k");
    }
    int64_t end = attention_offset(args, args->offsets, args->sequence_count);
    if (key_rows >= 0 && end > key_rows) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "offsets[%" PRId64 "] is %" PRId64 ", beyond the %" PRId64
                        " rows of k",
                        args->sequence_count, end, key_rows);
    }
    return DCP_OK;
}

attention_view_t
attention_view(const dcp_attention_args_t *args, int64_t sequence, int64_t kv_head)
{
    int64_t group_size = args->heads / args->kv_heads;
    int64_t row = attention_offset(args, args->offsets, sequence);
    int64_t key = attention_offset(args, attention_key_offsets(args), sequence);
    int64_t q_shift = kv_head * group_size * args->head_dim;
    int64_t kv_shift = kv_head * args->head_dim;
    return (attention_view_t){
        .q = args->q + row * args->q_stride + q_shift,
        .k = args->k + key * args->k_stride + kv_shift,
        .v = args->v + key * args->v_stride + kv_shift,
        .q_stride = args->q_stride,
        .k_stride = args->k_stride,
        .v_stride = args->v_stride,
        .query_count = attention_offset(args, args->offsets, sequence + 1) - row,
        .key_count =
            (args->key_ends != NULL
                 ? attention_offset(args, args->key_ends, sequence)
                 : attention_offset(args, attention_key_offsets(args), sequence + 1))
            - key,
        .group_size = group_size,
        .head_dim = args->head_dim,
        .scale = args->scale,
        .causal = args->causal,
        .round = args->compute == DCP_BF16,
        .out = args->out + row * args->out_stride + q_shift,
        .out_stride = args->out_stride,
        .lse = args->lse + kv_head * group_size * args->query_rows + row,
        .lse_stride = args->query_rows,
    };
}

/* Query-key pairs of rows first .. end-1. */
double
attention_pairs(const attention_view_t *view, int64_t first, int64_t end)
{
    if (!view->causal) {
        return (double)(end - first) * (double)view->key_count;
    }
    int64_t idle = attention_first_row(view, 0);
    first = first > idle ? first : idle;
    return end <= first ? 0.0
                        : (double)(end - first)
                              * (double)(attention_visible(view, first)
                                         + attention_visible(view, end - 1))
                              * 0.5;
}

int
attention_compare_units(const void *a, const void *b)
{
    const attention_unit_t *x = a, *y = b;
    if (x->cost != y->cost) {
        return x->cost > y->cost ? -1 : 1;
    }
    if (x->first_sequence != y->first_sequence) {
        return x->first_sequence < y->first_sequence ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Appends a unit, or, with units NULL, only counts it. A run of small sequences that
 * follows another one joins it. */
void
attention_add_unit(attention_job_t *job, attention_unit_t unit, attention_unit_t *last)
{
    int small = unit.end == 0 && unit.cost + last->cost < unit_cost;
    if (job->unit_count > 0 && small && last->end == 0
        && last->end_sequence == unit.first_sequence) {
        last->end_sequence = unit.end_sequence;
        last->cost += unit.cost;
    } else {
        *last = unit;
        job->unit_count++;
    }
    if (job->units != NULL) {
        job->units[job->unit_count - 1] = *last;
    }
}

/* Worker's scratch; worker 0's task part lies behind the shared part. */
dcp_status_t
attention_scratch(const attention_job_t *job, int32_t worker, void **scratch_p)
{
    int64_t shared = worker == 0 ? job->shared_bytes : 0;
    void *base;
    DCP_TRY(dcp_pool_scratch(job->pool, worker, shared + job->task_bytes, &base));
    *scratch_p = (char *)base + shared;
    return DCP_OK;
}

void
attention_clear_rows(float *x, int64_t stride, int64_t width, int64_t first,
                     int64_t end)
{
    for (int64_t row = first; row < end; row++) {
        memset(x + row * stride, 0, (size_t)width * sizeof(float));
    }
}
