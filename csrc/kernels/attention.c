/* Variable-length attention on the CPU: checks, cuts the work into tasks, runs them.
 *
 * A task is a unit of work and one key-value head with the query heads that read it.
 * Forward, a unit is a run of short sequences, or a range of query rows of a long one;
 * backward, a run of short sequences, a whole sequence, or one segment of keys of a
 * sequence so long that it would keep one core busy while the others wait. Segments are
 * cut by the sequence's length alone; the first one writes dq, the others write partial
 * results, which are then added in the order of the segments: the same sums, bit for
 * bit, as when one task takes segment after segment. Longest units first, so that cores
 * finish together.
 *
 * Memory: worker scratch only. Worker 0's begins with what all tasks share: the units
 * and the partial results.
 */
#include "attention.h"

#include "dcp/isa.h"
#include "dcp/kernels.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_ROWS = 504,  /* query rows of a unit, times heads of a group; multiples of */
    LEAST_ROWS = 126, /* ATTENTION_ROWS */
    UNITS_PER_WORKER = 4,
    SUM_ROWS = 128, /* rows of a task that adds partial results */
};

/* Multiply-adds of the two score products below which sequences share a unit. */
static const double unit_cost = 1 << 20;

extern const attention_forward_ops_t attention_forward_ops_portable;
extern const attention_backward_ops_t attention_backward_ops_portable;
#if defined(__x86_64__)
extern const attention_forward_ops_t attention_forward_ops_avx2;
extern const attention_forward_ops_t attention_forward_ops_avx512;
extern const attention_backward_ops_t attention_backward_ops_avx2;
extern const attention_backward_ops_t attention_backward_ops_avx512;
#endif

static const attention_forward_ops_t *
forward_ops(void)
{
    switch (dcp_isa_current()) {
#if defined(__x86_64__)
    case DCP_ISA_AVX512:
        return &attention_forward_ops_avx512;
    case DCP_ISA_AVX2:
        return &attention_forward_ops_avx2;
#endif
    default:
        return &attention_forward_ops_portable;
    }
}

static const attention_backward_ops_t *
backward_ops(void)
{
    switch (dcp_isa_current()) {
#if defined(__x86_64__)
    case DCP_ISA_AVX512:
        return &attention_backward_ops_avx512;
    case DCP_ISA_AVX2:
        return &attention_backward_ops_avx2;
#endif
    default:
        return &attention_backward_ops_portable;
    }
}

/* Sequences first_sequence .. end_sequence-1; of a single one, maybe only rows (or
 * keys) first .. end-1. */
typedef struct unit {
    int64_t first_sequence, end_sequence;
    int64_t first, end; /* end 0: all */
    float *partial;     /* backward: dq of this segment, NULL: write dq itself */
    double cost;
} unit_t;

typedef struct job {
    dcp_pool_t *pool;
    const dcp_attention_args_t *args;
    const dcp_attention_backward_args_t *gradient_args; /* NULL in the forward pass */
    unit_t *units;
    int64_t unit_count;
    int64_t shared_bytes, task_bytes; /* of worker 0's scratch; of everyone's */
    int64_t row_limit;                /* forward: most query rows of a unit */
} job_t;

static int64_t
offset_at(const dcp_attention_args_t *args, const void *offsets, int64_t i)
{
    return args->offsets_64 ? ((const int64_t *)offsets)[i]
                            : ((const int32_t *)offsets)[i];
}

static const void *
key_offsets(const dcp_attention_args_t *args)
{
    return args->key_offsets != NULL ? args->key_offsets : args->offsets;
}

/* ---- checks ---- */

static dcp_status_t
check_offsets(const dcp_attention_args_t *args, const void *offsets, const char *what,
              int64_t row_count, const char *rows_of)
{
    int64_t before = offset_at(args, offsets, 0);
    if (before != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "%s[0] is %" PRId64 ", must be 0", what, before);
    }
    for (int64_t i = 1; i <= args->sequence_count; i++) {
        int64_t x = offset_at(args, offsets, i);
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

static dcp_status_t
check_stride(const char *what, int64_t stride, int64_t heads, int64_t dim)
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
check_forward(const dcp_attention_args_t *args, int64_t key_rows)
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
    if (!isfinite(args->scale)) {
        return DCP_FAIL(DCP_ERR_ARG, "scale %g must be finite", (double)args->scale);
    }
    DCP_TRY(check_stride("q_stride", args->q_stride, args->heads, args->head_dim));
    DCP_TRY(check_stride("k_stride", args->k_stride, args->kv_heads, args->head_dim));
    DCP_TRY(check_stride("v_stride", args->v_stride, args->kv_heads, args->head_dim));
    DCP_TRY(check_stride("out_stride", args->out_stride, args->heads, args->head_dim));
    DCP_TRY(check_offsets(args, args->offsets, "offsets", args->query_rows, "q"));
    if (args->key_offsets != NULL) {
        return check_offsets(args, args->key_offsets, "key_offsets", key_rows, "k");
    }
    int64_t end = offset_at(args, args->offsets, args->sequence_count);
    if (key_rows >= 0 && end > key_rows) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "offsets[%" PRId64 "] is %" PRId64 ", beyond the %" PRId64
                        " rows of k",
                        args->sequence_count, end, key_rows);
    }
    return DCP_OK;
}

/* ---- views and units ---- */

static attention_view_t
view_of(const dcp_attention_args_t *args, int64_t sequence, int64_t kv_head)
{
    int64_t group_size = args->heads / args->kv_heads;
    int64_t row = offset_at(args, args->offsets, sequence);
    int64_t key = offset_at(args, key_offsets(args), sequence);
    int64_t q_shift = kv_head * group_size * args->head_dim;
    int64_t kv_shift = kv_head * args->head_dim;
    return (attention_view_t){
        .q = args->q + row * args->q_stride + q_shift,
        .k = args->k + key * args->k_stride + kv_shift,
        .v = args->v + key * args->v_stride + kv_shift,
        .q_stride = args->q_stride,
        .k_stride = args->k_stride,
        .v_stride = args->v_stride,
        .query_count = offset_at(args, args->offsets, sequence + 1) - row,
        .key_count = offset_at(args, key_offsets(args), sequence + 1) - key,
        .group_size = group_size,
        .head_dim = args->head_dim,
        .scale = args->scale,
        .causal = args->causal,
        .out = args->out + row * args->out_stride + q_shift,
        .out_stride = args->out_stride,
        .lse = args->lse + kv_head * group_size * args->query_rows + row,
        .lse_stride = args->query_rows,
    };
}

/* Query-key pairs of rows first .. end-1. */
static double
row_pairs(const attention_view_t *view, int64_t first, int64_t end)
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

static int
compare_units(const void *a, const void *b)
{
    const unit_t *x = a, *y = b;
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
static void
add_unit(job_t *job, unit_t unit, unit_t *last)
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

static void
forward_units(job_t *job)
{
    const dcp_attention_args_t *args = job->args;
    double weight = (double)(args->heads / args->kv_heads) * (double)args->head_dim;
    unit_t last = {0};
    job->unit_count = 0;
    for (int64_t s = 0; s < args->sequence_count; s++) {
        attention_view_t view = view_of(args, s, 0);
        int64_t rows = view.query_count;
        /* the kernels count groups of rows from the sequence's end */
        int64_t end = rows % ATTENTION_ROWS;
        for (int64_t row = 0; row < rows; row = end) {
            end = end + job->row_limit < rows ? end + job->row_limit : rows;
            unit_t unit = {.first_sequence = s,
                           .end_sequence = s + 1,
                           .first = row,
                           .end = end,
                           .cost = row_pairs(&view, row, end) * weight};
            if (row == 0 && end == rows) {
                unit.end = 0;
            }
            add_unit(job, unit, &last);
        }
    }
}

/* Worker's scratch; worker 0's task part lies behind the shared part. */
static dcp_status_t
task_scratch(const job_t *job, int32_t worker, void **scratch_p)
{
    int64_t shared = worker == 0 ? job->shared_bytes : 0;
    void *base;
    DCP_TRY(dcp_pool_scratch(job->pool, worker, shared + job->task_bytes, &base));
    *scratch_p = (char *)base + shared;
    return DCP_OK;
}

/* ---- forward ---- */

static dcp_status_t
forward_task(void *context, int64_t task, int32_t worker)
{
    const job_t *job = context;
    const dcp_attention_args_t *args = job->args;
    const unit_t *unit = &job->units[task / args->kv_heads];
    void *scratch;
    DCP_TRY(task_scratch(job, worker, &scratch));
    for (int64_t s = unit->first_sequence; s < unit->end_sequence; s++) {
        attention_view_t view = view_of(args, s, task % args->kv_heads);
        int64_t end = unit->end > 0 ? unit->end : view.query_count;
        if (end > unit->first) {
            forward_ops()->run(&view, unit->first, end, scratch);
        }
    }
    return DCP_OK;
}

static void
clear_rows(float *x, int64_t stride, int64_t width, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++) {
        memset(x + row * stride, 0, (size_t)width * sizeof(float));
    }
}

dcp_status_t
dcp_cpu_attention(dcp_pool_t *pool, const dcp_attention_args_t *args)
{
    DCP_TRY(check_forward(args, -1));
    int64_t end = offset_at(args, args->offsets, args->sequence_count);
    clear_rows(args->out, args->out_stride, args->heads * args->head_dim, end,
               args->query_rows);
    for (int64_t head = 0; head < args->heads; head++) {
        for (int64_t row = end; row < args->query_rows; row++) {
            args->lse[head * args->query_rows + row] = -INFINITY;
        }
    }
    int64_t group_size = args->heads / args->kv_heads;
    job_t job = {.pool = pool, .args = args};
    int64_t wanted =
        dcp_pool_size(pool) > 1 ? (int64_t)dcp_pool_size(pool) * UNITS_PER_WORKER : 0;
    job.row_limit = MOST_ROWS / group_size / ATTENTION_ROWS * ATTENTION_ROWS;
    job.row_limit = job.row_limit > LEAST_ROWS ? job.row_limit : LEAST_ROWS;
    forward_units(&job);
    while (job.unit_count * args->kv_heads < wanted && job.row_limit > LEAST_ROWS) {
        job.row_limit = job.row_limit / 2 / ATTENTION_ROWS * ATTENTION_ROWS;
        forward_units(&job);
    }
    job.shared_bytes = (job.unit_count * (int64_t)sizeof(unit_t) + 63) / 64 * 64;
    job.task_bytes = forward_ops()->scratch_bytes(job.row_limit + ATTENTION_ROWS,
                                                  group_size, args->head_dim);
    void *shared;
    DCP_TRY(dcp_pool_scratch(pool, 0, job.shared_bytes + job.task_bytes, &shared));
    job.units = shared;
    forward_units(&job);
    if (dcp_pool_size(pool) > 1) {
        qsort(job.units, (size_t)job.unit_count, sizeof(unit_t), compare_units);
    }
    return dcp_pool_run(pool, job.unit_count * args->kv_heads, forward_task, &job);
}

/* ---- backward ---- */

static attention_gradient_view_t
gradient_view_of(const dcp_attention_backward_args_t *args, int64_t sequence,
                 int64_t kv_head)
{
    const dcp_attention_args_t *forward = &args->forward;
    int64_t row = offset_at(forward, forward->offsets, sequence);
    int64_t key = offset_at(forward, key_offsets(forward), sequence);
    int64_t q_shift =
        kv_head * (forward->heads / forward->kv_heads) * forward->head_dim;
    int64_t kv_shift = kv_head * forward->head_dim;
    return (attention_gradient_view_t){
        .forward = view_of(forward, sequence, kv_head),
        .dout = args->dout + row * args->dout_stride + q_shift,
        .dout_stride = args->dout_stride,
        .dq = args->dq + row * args->dq_stride + q_shift,
        .dk = args->dk + key * args->dk_stride + kv_shift,
        .dv = args->dv + key * args->dv_stride + kv_shift,
        .dq_stride = args->dq_stride,
        .dk_stride = args->dk_stride,
        .dv_stride = args->dv_stride,
        .dq_head_stride = forward->head_dim,
    };
}

/* Units of the backward pass; returns the floats of partial results, which begin at
 * `partial` when units are written. */
static int64_t
backward_units(job_t *job, double total_cost, float *partial)
{
    const dcp_attention_args_t *args = job->args;
    double weight = (double)(args->heads / args->kv_heads) * (double)args->head_dim;
    double share = total_cost / (2.0 * dcp_pool_size(job->pool));
    int64_t partial_count = 0;
    unit_t last = {0};
    job->unit_count = 0;
    for (int64_t s = 0; s < args->sequence_count; s++) {
        attention_view_t view = view_of(args, s, 0);
        double cost = row_pairs(&view, 0, view.query_count) * weight;
        int64_t keys = attention_segment_keys(view.key_count);
        if (dcp_pool_size(job->pool) == 1 || view.key_count <= keys || cost <= share) {
            unit_t whole = {.first_sequence = s, .end_sequence = s + 1, .cost = cost};
            add_unit(job, whole, &last);
            continue;
        }
        for (int64_t key = 0; key < view.key_count; key += keys) {
            int64_t end = key + keys < view.key_count ? key + keys : view.key_count;
            int64_t rows = view.query_count - attention_first_row(&view, key);
            unit_t unit = {.first_sequence = s,
                           .end_sequence = s + 1,
                           .first = key,
                           .end = end,
                           .cost = (double)rows * (double)(end - key) * weight};
            if (key > 0) {
                unit.partial = job->units != NULL ? partial + partial_count : NULL;
                partial_count += rows * args->heads * args->head_dim;
            }
            add_unit(job, unit, &last);
        }
    }
    return partial_count;
}

static void
backward_sequence(const job_t *job, const unit_t *unit, int64_t sequence,
                  int64_t kv_head, void *scratch)
{
    const dcp_attention_args_t *args = job->args;
    attention_gradient_view_t view =
        gradient_view_of(job->gradient_args, sequence, kv_head);
    const attention_view_t *forward = &view.forward;
    int64_t width = forward->group_size * args->head_dim;
    int64_t idle = forward->key_count == 0 ? forward->query_count
                                           : attention_first_row(forward, 0);
    if (unit->first == 0) {
        clear_rows(view.dq, view.dq_stride, width, 0, idle);
    }
    if (forward->query_count == 0) {
        clear_rows(view.dk, view.dk_stride, args->head_dim, 0, forward->key_count);
        clear_rows(view.dv, view.dv_stride, args->head_dim, 0, forward->key_count);
        return;
    }
    if (unit->partial != NULL) {
        int64_t first_row = attention_first_row(forward, unit->first);
        int64_t rows = forward->query_count - first_row;
        view.dq = unit->partial + kv_head * width * rows;
        view.dq_stride = args->head_dim;
        view.dq_head_stride = rows * args->head_dim;
        view.dq_first = first_row;
    }
    int64_t end = unit->end > 0 ? unit->end : forward->key_count;
    int64_t keys = attention_segment_keys(forward->key_count);
    for (int64_t key = unit->first; key < end; key += keys) {
        int64_t segment_end = key + keys < end ? key + keys : end;
        backward_ops()->run(&view, key, segment_end, key == 0 || unit->partial != NULL,
                            scratch);
    }
}

static dcp_status_t
backward_task(void *context, int64_t task, int32_t worker)
{
    const job_t *job = context;
    const unit_t *unit = &job->units[task / job->args->kv_heads];
    void *scratch;
    DCP_TRY(task_scratch(job, worker, &scratch));
    for (int64_t s = unit->first_sequence; s < unit->end_sequence; s++) {
        backward_sequence(job, unit, s, task % job->args->kv_heads, scratch);
    }
    return DCP_OK;
}

/* Adds the partial results of one sequence to SUM_ROWS rows of dq, segment after
 * segment. `task` counts the blocks of rows of all split sequences. */
static dcp_status_t
sum_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const job_t *job = context;
    const dcp_attention_args_t *args = job->args;
    for (int64_t i = 0; i < job->unit_count; i++) {
        const unit_t *unit = &job->units[i];
        if (unit->partial == NULL) {
            continue;
        }
        attention_gradient_view_t view =
            gradient_view_of(job->gradient_args, unit->first_sequence, 0);
        int64_t query_count = view.forward.query_count;
        int64_t first_row = attention_first_row(&view.forward, unit->first);
        int64_t rows = query_count - first_row;
        int64_t end =
            (task + 1) * SUM_ROWS < query_count ? (task + 1) * SUM_ROWS : query_count;
        for (int64_t row = task * SUM_ROWS > first_row ? task * SUM_ROWS : first_row;
             row < end; row++) {
            for (int64_t head = 0; head < args->heads; head++) {
                float *to = view.dq + row * view.dq_stride + head * args->head_dim;
                const float *from =
                    unit->partial + (head * rows + row - first_row) * args->head_dim;
                for (int64_t d = 0; d < args->head_dim; d++) {
                    to[d] += from[d];
                }
            }
        }
    }
    return DCP_OK;
}

static int
compare_places(const void *a, const void *b)
{
    const unit_t *x = a, *y = b;
    if (x->first_sequence != y->first_sequence) {
        return x->first_sequence < y->first_sequence ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static dcp_status_t
sum_partials(job_t *job)
{
    int64_t most_rows = 0;
    for (int64_t i = 0; i < job->unit_count; i++) {
        if (job->units[i].partial != NULL) {
            int64_t s = job->units[i].first_sequence;
            int64_t rows = offset_at(job->args, job->args->offsets, s + 1)
                           - offset_at(job->args, job->args->offsets, s);
            most_rows = rows > most_rows ? rows : most_rows;
        }
    }
    if (most_rows == 0) {
        return DCP_OK;
    }
    qsort(job->units, (size_t)job->unit_count, sizeof(unit_t), compare_places);
    return dcp_pool_run(job->pool, (most_rows + SUM_ROWS - 1) / SUM_ROWS, sum_task,
                        job);
}

static dcp_status_t
check_backward(const dcp_attention_backward_args_t *args)
{
    const dcp_attention_args_t *forward = &args->forward;
    if (args->key_rows < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "key_rows %" PRId64 " must not be negative",
                        args->key_rows);
    }
    DCP_TRY(check_forward(forward, args->key_rows));
    DCP_TRY(check_stride("dout_stride", args->dout_stride, forward->heads,
                         forward->head_dim));
    DCP_TRY(
        check_stride("dq_stride", args->dq_stride, forward->heads, forward->head_dim));
    DCP_TRY(check_stride("dk_stride", args->dk_stride, forward->kv_heads,
                         forward->head_dim));
    return check_stride("dv_stride", args->dv_stride, forward->kv_heads,
                        forward->head_dim);
}

dcp_status_t
dcp_cpu_attention_backward(dcp_pool_t *pool, const dcp_attention_backward_args_t *args)
{
    DCP_TRY(check_backward(args));
    const dcp_attention_args_t *forward = &args->forward;
    int64_t row_end = offset_at(forward, forward->offsets, forward->sequence_count);
    int64_t key_end = offset_at(forward, key_offsets(forward), forward->sequence_count);
    int64_t kv_width = forward->kv_heads * forward->head_dim;
    clear_rows(args->dq, args->dq_stride, forward->heads * forward->head_dim, row_end,
               forward->query_rows);
    clear_rows(args->dk, args->dk_stride, kv_width, key_end, args->key_rows);
    clear_rows(args->dv, args->dv_stride, kv_width, key_end, args->key_rows);

    job_t job = {.pool = pool, .args = forward, .gradient_args = args};
    double total_cost = 0.0;
    int64_t most_keys = 0;
    for (int64_t s = 0; s < forward->sequence_count; s++) {
        attention_view_t view = view_of(forward, s, 0);
        total_cost += row_pairs(&view, 0, view.query_count) * (double)forward->heads
                      * (double)forward->head_dim;
        int64_t keys = attention_segment_keys(view.key_count);
        keys = keys < view.key_count ? keys : view.key_count;
        most_keys = keys > most_keys ? keys : most_keys;
    }
    int64_t partial_count = backward_units(&job, total_cost, NULL);
    int64_t unit_bytes = (job.unit_count * (int64_t)sizeof(unit_t) + 63) / 64 * 64;
    job.shared_bytes =
        (unit_bytes + partial_count * (int64_t)sizeof(float) + 63) / 64 * 64;
    job.task_bytes = backward_ops()->scratch_bytes(most_keys, forward->head_dim);
    void *shared;
    DCP_TRY(dcp_pool_scratch(pool, 0, job.shared_bytes + job.task_bytes, &shared));
    job.units = shared;
    backward_units(&job, total_cost, (float *)(void *)((char *)shared + unit_bytes));
    if (dcp_pool_size(pool) > 1) {
        qsort(job.units, (size_t)job.unit_count, sizeof(unit_t), compare_units);
    }
    DCP_TRY(
        dcp_pool_run(pool, job.unit_count * forward->kv_heads, backward_task, &job));
    return sum_partials(&job);
}
