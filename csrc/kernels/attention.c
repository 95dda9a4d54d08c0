/* Variable-length attention on the CPU, forward: cuts the work into tasks, runs them.
 *
 * A task is a unit of work and one key-value head with the query heads that read it. A
 * unit is a run of short sequences, or a range of query rows of a long one. Dearest
 * units first, so that cores finish together. How the rows are cut depends on the
 * number of workers; no result does, since kernels compute every group of rows alike
 * wherever a unit begins.
 *
 * Memory: worker scratch only. Worker 0's begins with the units, which all share.
 */
#include "attention_work.h"

#include "dcp/isa.h"

#include <math.h>
#include <stdlib.h>

enum {
    MOST_ROWS = 504, /* query rows of a unit, times heads of a group; both a multiple */
    LEAST_ROWS = 126, /* of ATTENTION_ROWS */
    UNITS_PER_WORKER = 4,
};

extern const attention_forward_ops_t attention_forward_ops_portable;
#if defined(__x86_64__)
extern const attention_forward_ops_t attention_forward_ops_avx2;
extern const attention_forward_ops_t attention_forward_ops_avx512;
extern const attention_forward_ops_t attention_forward_ops_avx512bf16;
#endif

static const attention_forward_ops_t *
forward_ops(dcp_dtype_t compute)
{
#if defined(__x86_64__)
    if (compute == DCP_BF16 && dcp_isa_current() == DCP_ISA_AVX512BF16) {
        return &attention_forward_ops_avx512bf16;
    }
#else
    (void)compute;
#endif
    switch (dcp_isa_vectors()) {
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

static void
forward_units(attention_job_t *job)
{
    const dcp_attention_args_t *args = job->args;
    double weight = (double)(args->heads / args->kv_heads) * (double)args->head_dim;
    attention_unit_t last = {0};
    job->unit_count = 0;
    for (int64_t s = 0; s < args->sequence_count; s++) {
        attention_view_t view = attention_view(args, s, 0);
        int64_t rows = view.query_count;
        /* the kernels count groups of rows from the sequence's end */
        int64_t end = rows % ATTENTION_ROWS;
        for (int64_t row = 0; row < rows; row = end) {
            end = end + job->row_limit < rows ? end + job->row_limit : rows;
            attention_unit_t unit = {.first_sequence = s,
                                     .end_sequence = s + 1,
                                     .first = row,
                                     .end = end,
                                     .cost = attention_pairs(&view, row, end) * weight};
            if (row == 0 && end == rows) {
                unit.end = 0;
            }
            attention_add_unit(job, unit, &last);
        }
    }
}

/* Query rows of a unit whose rows, times heads, are `rows`. */
static int64_t
whole_groups(int64_t rows, int64_t group_size)
{
    int64_t groups = rows / group_size / ATTENTION_ROWS;
    return (groups > 1 ? groups : 1) * ATTENTION_ROWS;
}

static dcp_status_t
forward_task(void *context, int64_t task, int32_t worker)
{
    const attention_job_t *job = context;
    const dcp_attention_args_t *args = job->args;
    const attention_unit_t *unit = &job->units[task / args->kv_heads];
    void *scratch;
    DCP_TRY(attention_scratch(job, worker, &scratch));
    for (int64_t s = unit->first_sequence; s < unit->end_sequence; s++) {
        attention_view_t view = attention_view(args, s, task % args->kv_heads);
        int64_t end = unit->end > 0 ? unit->end : view.query_count;
        if (end > unit->first) {
            forward_ops(args->compute)->run(&view, unit->first, end, scratch);
        }
    }
    return DCP_OK;
}

dcp_status_t
dcp_cpu_attention(dcp_pool_t *pool, const dcp_attention_args_t *args)
{
    DCP_TRY(attention_check(args, -1));
    int64_t end = attention_offset(args, args->offsets, args->sequence_count);
    attention_clear_rows(args->out, args->out_stride, args->heads * args->head_dim, end,
                         args->query_rows);
    for (int64_t head = 0; head < args->heads; head++) {
        for (int64_t row = end; row < args->query_rows; row++) {
            args->lse[head * args->query_rows + row] = -INFINITY;
        }
    }
    int64_t group_size = args->heads / args->kv_heads;
    attention_job_t job = {.pool = pool, .args = args};
    int64_t wanted =
        dcp_pool_size(pool) > 1 ? (int64_t)dcp_pool_size(pool) * UNITS_PER_WORKER : 0;
    int64_t rows = MOST_ROWS;
    job.row_limit = whole_groups(rows, group_size);
    forward_units(&job);
    while (job.unit_count * args->kv_heads < wanted && rows > LEAST_ROWS) {
        rows /= 2;
        job.row_limit = whole_groups(rows, group_size);
        forward_units(&job);
    }
    job.shared_bytes =
        (job.unit_count * (int64_t)sizeof(attention_unit_t) + 63) / 64 * 64;
    job.task_bytes =
        forward_ops(args->compute)
            ->scratch_bytes(job.row_limit + ATTENTION_ROWS, group_size, args->head_dim);
    void *shared;
    DCP_TRY(dcp_pool_scratch(pool, 0, job.shared_bytes + job.task_bytes, &shared));
    job.units = shared;
    forward_units(&job);
    if (dcp_pool_size(pool) > 1) {
        qsort(job.units, (size_t)job.unit_count, sizeof(attention_unit_t),
              attention_compare_units);
    }
    return dcp_pool_run(pool, job.unit_count * args->kv_heads, forward_task, &job);
}
