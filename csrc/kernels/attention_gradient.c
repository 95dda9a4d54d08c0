/* Variable-length attention on the CPU, backward: cuts the work into tasks, runs them.
 *
 * A task is a unit of work and one key-value head with the query heads that read it. A
 * unit is a run of short sequences, a whole sequence, or one segment of keys of a
 * sequence so long that it would keep one core busy while the others wait. Segments are
 * cut by the sequence's length alone; the first one writes dq, the others write partial
 * results, which are then added in the order of the segments: the same sums, bit for
 * bit, as when one task takes segment after segment.
 *
 * Memory: worker scratch only. Worker 0's begins with what all tasks share: the units
 * and the partial results (of split sequences, at most ATTENTION_SEGMENT_COUNT times
 * dq).
 */
#include "attention_work.h"

#include "dcp/isa.h"

#include <inttypes.h>
#include <stdlib.h>

enum { SUM_ROWS = 128 }; /* rows of a task that adds partial results */

extern const attention_backward_ops_t attention_backward_ops_portable;
#if defined(__x86_64__)
extern const attention_backward_ops_t attention_backward_ops_avx2;
extern const attention_backward_ops_t attention_backward_ops_avx512;
extern const attention_backward_ops_t attention_backward_ops_avx512bf16;
#endif

static const attention_backward_ops_t *
backward_ops(dcp_dtype_t compute)
{
#if defined(__x86_64__)
    if (compute == DCP_BF16 && dcp_isa_current() == DCP_ISA_AVX512BF16) {
        return &attention_backward_ops_avx512bf16;
    }
#else
    (void)compute;
#endif
    switch (dcp_isa_vectors()) {
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

static attention_gradient_view_t
gradient_view_of(const dcp_attention_backward_args_t *args, int64_t sequence,
                 int64_t kv_head)
{
    const dcp_attention_args_t *forward = &args->forward;
    int64_t row = attention_offset(forward, forward->offsets, sequence);
    int64_t key = attention_offset(forward, attention_key_offsets(forward), sequence);
    int64_t q_shift =
        kv_head * (forward->heads / forward->kv_heads) * forward->head_dim;
    int64_t kv_shift = kv_head * forward->head_dim;
    return (attention_gradient_view_t){
        .forward = attention_view(forward, sequence, kv_head),
        .dout = args->dout + row * args->dout_stride + q_shift,
        .dout_stride = args->dout_stride,
        .dq = args->dq + row * args->dq_stride + q_shift,
        .dk = args->dk + key * args->dk_stride + kv_shift,
        .dv = args->dv + key * args->dv_stride + kv_shift,
        .dq_stride = args->dq_stride,
        .dk_stride = args->dk_stride,
        .dv_stride = args->dv_stride,
        .dq_head_stride = forward->head_dim,
        .accumulate = args->accumulate,
    };
}

/* Units of the backward pass; returns the floats of partial results, which begin at
 * `partial` when units are written. */
static int64_t
backward_units(attention_job_t *job, double total_cost, float *partial)
{
    const dcp_attention_args_t *args = job->args;
    double weight = (double)(args->heads / args->kv_heads) * (double)args->head_dim;
    double share = total_cost / (2.0 * dcp_pool_size(job->pool));
    int64_t partial_count = 0;
    attention_unit_t last = {0};
    job->unit_count = 0;
    for (int64_t s = 0; s < args->sequence_count; s++) {
        attention_view_t view = attention_view(args, s, 0);
        double cost = attention_pairs(&view, 0, view.query_count) * weight;
        int64_t keys = attention_segment_keys(view.key_count);
        if (dcp_pool_size(job->pool) == 1 || view.key_count <= keys || cost <= share) {
            attention_unit_t whole = {
                .first_sequence = s, .end_sequence = s + 1, .cost = cost};
            attention_add_unit(job, whole, &last);
            continue;
        }
        for (int64_t key = 0; key < view.key_count; key += keys) {
            int64_t end = key + keys < view.key_count ? key + keys : view.key_count;
            int64_t rows = view.query_count - attention_first_row(&view, key);
            attention_unit_t unit = {.first_sequence = s,
                                     .end_sequence = s + 1,
                                     .first = key,
                                     .end = end,
                                     .cost =
                                         (double)rows * (double)(end - key) * weight};
            if (key > 0) {
                unit.partial = job->units != NULL ? partial + partial_count : NULL;
                partial_count += rows * args->heads * args->head_dim;
            }
            attention_add_unit(job, unit, &last);
        }
    }
    return partial_count;
}

static void
backward_sequence(const attention_job_t *job, const attention_unit_t *unit,
                  int64_t sequence, int64_t kv_head, void *scratch)
{
    const dcp_attention_args_t *args = job->args;
    attention_gradient_view_t view =
        gradient_view_of(job->gradient_args, sequence, kv_head);
    const attention_view_t *forward = &view.forward;
    int64_t width = forward->group_size * args->head_dim;
    int64_t idle = forward->key_count == 0 ? forward->query_count
                                           : attention_first_row(forward, 0);
    if (unit->first == 0 && !view.accumulate) {
        attention_clear_rows(view.dq, view.dq_stride, width, 0, idle);
    }
    if (forward->query_count == 0 && view.accumulate) {
        return;
    }
    if (forward->query_count == 0) {
        attention_clear_rows(view.dk, view.dk_stride, args->head_dim, 0,
                             forward->key_count);
        attention_clear_rows(view.dv, view.dv_stride, args->head_dim, 0,
                             forward->key_count);
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
        int32_t store = (key == 0 && !view.accumulate) || unit->partial != NULL;
        backward_ops(args->compute)->run(&view, key, segment_end, store, scratch);
    }
}

static dcp_status_t
backward_task(void *context, int64_t task, int32_t worker)
{
    const attention_job_t *job = context;
    const attention_unit_t *unit = &job->units[task / job->args->kv_heads];
    void *scratch;
    DCP_TRY(attention_scratch(job, worker, &scratch));
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
    const attention_job_t *job = context;
    const dcp_attention_args_t *args = job->args;
    for (int64_t i = 0; i < job->unit_count; i++) {
        const attention_unit_t *unit = &job->units[i];
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
    const attention_unit_t *x = a, *y = b;
    if (x->first_sequence != y->first_sequence) {
        return x->first_sequence < y->first_sequence ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static dcp_status_t
sum_partials(attention_job_t *job)
{
    int64_t most_rows = 0;
    for (int64_t i = 0; i < job->unit_count; i++) {
        if (job->units[i].partial != NULL) {
            int64_t s = job->units[i].first_sequence;
            int64_t rows = attention_offset(job->args, job->args->offsets, s + 1)
                           - attention_offset(job->args, job->args->offsets, s);
            most_rows = rows > most_rows ? rows : most_rows;
        }
    }
    if (most_rows == 0) {
        return DCP_OK;
    }
    qsort(job->units, (size_t)job->unit_count, sizeof(attention_unit_t),
          compare_places);
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
    if (forward->key_ends != NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "key_ends must be NULL in the backward pass");
    }
    DCP_TRY(attention_check(forward, args->key_rows));
    DCP_TRY(attention_check_stride("dout_stride", args->dout_stride, forward->heads,
                                   forward->head_dim));
    DCP_TRY(attention_check_stride("dq_stride", args->dq_stride, forward->heads,
                                   forward->head_dim));
    DCP_TRY(attention_check_stride("dk_stride", args->dk_stride, forward->kv_heads,
                                   forward->head_dim));
    return attention_check_stride("dv_stride", args->dv_stride, forward->kv_heads,
                                  forward->head_dim);
}

dcp_status_t
dcp_cpu_attention_backward(dcp_pool_t *pool, const dcp_attention_backward_args_t *args)
{
    DCP_TRY(check_backward(args));
    const dcp_attention_args_t *forward = &args->forward;
    int64_t row_end =
        attention_offset(forward, forward->offsets, forward->sequence_count);
    int64_t key_end = attention_offset(forward, attention_key_offsets(forward),
                                       forward->sequence_count);
    int64_t kv_width = forward->kv_heads * forward->head_dim;
    if (!args->accumulate) {
        attention_clear_rows(args->dq, args->dq_stride,
                             forward->heads * forward->head_dim, row_end,
                             forward->query_rows);
        attention_clear_rows(args->dk, args->dk_stride, kv_width, key_end,
                             args->key_rows);
        attention_clear_rows(args->dv, args->dv_stride, kv_width, key_end,
                             args->key_rows);
    }

    attention_job_t job = {.pool = pool, .args = forward, .gradient_args = args};
    double total_cost = 0.0;
    int64_t most_keys = 0;
    for (int64_t s = 0; s < forward->sequence_count; s++) {
        attention_view_t view = attention_view(forward, s, 0);
        total_cost += attention_pairs(&view, 0, view.query_count)
                      * (double)forward->heads * (double)forward->head_dim;
        int64_t keys = attention_segment_keys(view.key_count);
        keys = keys < view.key_count ? keys : view.key_count;
        most_keys = keys > most_keys ? keys : most_keys;
    }
    int64_t partial_count = backward_units(&job, total_cost, NULL);
    int64_t unit_bytes =
        (job.unit_count * (int64_t)sizeof(attention_unit_t) + 63) / 64 * 64;
    job.shared_bytes =
        (unit_bytes + partial_count * (int64_t)sizeof(float) + 63) / 64 * 64;
    job.task_bytes =
        backward_ops(forward->compute)->scratch_bytes(most_keys, forward->head_dim);
    void *shared;
    DCP_TRY(dcp_pool_scratch(pool, 0, job.shared_bytes + job.task_bytes, &shared));
    job.units = shared;
    backward_units(&job, total_cost, (float *)(void *)((char *)shared + unit_bytes));
    if (dcp_pool_size(pool) > 1) {
        qsort(job.units, (size_t)job.unit_count, sizeof(attention_unit_t),
              attention_compare_units);
    }
    DCP_TRY(
        dcp_pool_run(pool, job.unit_count * forward->kv_heads, backward_task, &job));
    return sum_partials(&job);
}
