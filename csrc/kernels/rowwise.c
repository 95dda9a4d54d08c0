/* Cuts row-wise operations into tasks and checks their arguments.
 *
 * Rows that do not depend on each other are cut by size alone: any cut gives the same
 * bits. Sums over rows (gradients of weights and biases) go through parts: one per
 * fixed block of rows, added in the order of the blocks, so that the result depends on
 * the shape and not on the number of threads. Parts cost at most 64 x width floats of
 * the caller's scratch, 1/64 of the rows that they sum, or less.
 */
#include "rowwise.h"

enum {
    TASK_ELEMS = 32768, /* 128 KiB an array: some 10 us, ten times a task's overhead */
    BLOCK_ROWS = 64,
    MAX_BLOCKS = 64,
    SUM_COLUMNS = 256 /* columns of one task of the final sum, on its stack */
};

typedef struct run_job {
    rowwise_func_t func;
    const void *args;
    int64_t rows, rows_per_task;
} run_job_t;

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static dcp_status_t
run_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const run_job_t *job = context;
    int64_t first = task * job->rows_per_task;
    job->func(job->args, first, least(first + job->rows_per_task, job->rows));
    return DCP_OK;
}

dcp_status_t
rowwise_run(dcp_pool_t *pool, int64_t rows, int64_t row_elems, rowwise_func_t func,
            const void *args)
{
    int64_t per_task = row_elems > 0 ? TASK_ELEMS / row_elems : TASK_ELEMS;
    run_job_t job = {func, args, rows, per_task > 0 ? per_task : 1};
    int64_t task_count = rows / job.rows_per_task + (rows % job.rows_per_task > 0);
    return dcp_pool_run(pool, task_count, run_task, &job);
}

typedef struct sum_job {
    rowwise_sum_func_t func;
    const void *args;
    int64_t rows, width, block_rows, block_count;
    int32_t part_count;
    float *parts; /* [block][part][width] */
    float *const *outs;
} sum_job_t;

static dcp_status_t
sum_block_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const sum_job_t *job = context;
    int64_t first = task * job->block_rows;
    float *parts = job->parts + task * job->part_count * job->width;
    job->func(job->args, first, least(first + job->block_rows, job->rows), parts);
    return DCP_OK;
}

static dcp_status_t
sum_columns_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const sum_job_t *job = context;
    int64_t first = task * SUM_COLUMNS;
    int64_t count = least(SUM_COLUMNS, job->width - first);
    for (int32_t part = 0; part < job->part_count; part++) {
        if (job->outs[part] == NULL) {
            continue;
        }
        float sums[SUM_COLUMNS] = {0};
        for (int64_t block = 0; block < job->block_count; block++) {
            const float *from =
                job->parts + (block * job->part_count + part) * job->width + first;
            for (int64_t i = 0; i < count; i++) {
                sums[i] += from[i];
            }
        }
        float *to = job->outs[part] + first;
        for (int64_t i = 0; i < count; i++) {
            to[i] += sums[i];
        }
    }
    return DCP_OK;
}

dcp_status_t
rowwise_run_sums(dcp_pool_t *pool, int64_t rows, int64_t width, rowwise_sum_func_t func,
                 const void *args, int32_t part_count, float *const *outs)
{
    int64_t block_rows = (rows - 1) / MAX_BLOCKS + 1;
    sum_job_t job = {func, args, rows, width, block_rows, 0, part_count, NULL, outs};
    if (job.block_rows < BLOCK_ROWS) {
        job.block_rows = BLOCK_ROWS;
    }
    job.block_count = (rows - 1) / job.block_rows + 1;
    void *memory;
    int64_t bytes = job.block_count * part_count * width * (int64_t)sizeof(float);
    DCP_TRY(dcp_pool_scratch(pool, 0, bytes, &memory));
    job.parts = memory;
    DCP_TRY(dcp_pool_run(pool, job.block_count, sum_block_task, &job));
    int64_t task_count = (width + SUM_COLUMNS - 1) / SUM_COLUMNS;
    return dcp_pool_run(pool, task_count, sum_columns_task, &job);
}

dcp_status_t
rowwise_check_size(const char *op, const char *name, int64_t value)
{
    if (value < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: %s %lld must not be negative", op, name,
                        (long long)value);
    }
    return DCP_OK;
}

dcp_status_t
rowwise_check_pointer(const char *op, const char *name, const void *pointer)
{
    if (pointer == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: %s is NULL, and there is work", op, name);
    }
    return DCP_OK;
}

dcp_status_t
rowwise_check_stride(const char *op, const char *name, int64_t stride,
                     int64_t row_elems)
{
    if (stride < row_elems) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: %s %lld must be at least the row's %lld", op,
                        name, (long long)stride, (long long)row_elems);
    }
    return DCP_OK;
}

dcp_status_t
rowwise_check_indices(const char *op, const char *name, const int32_t *values,
                      int64_t count, int64_t bound, const char *bound_name,
                      int32_t ignored)
{
    int32_t least_value = bound > 0 ? 0 : 1;
    int32_t most = bound > INT32_MAX ? INT32_MAX : (int32_t)(bound - 1);
    if (bound <= 0) {
        most = 0; /* 1 .. 0: nothing passes */
    }
    int32_t bad = 0; /* without a branch, so that the scan is vectorised */
    for (int64_t i = 0; i < count; i++) {
        bad |=
            ((values[i] < least_value) | (values[i] > most)) & (values[i] != ignored);
    }
    for (int64_t i = 0; bad && i < count; i++) {
        int32_t value = values[i];
        if ((value < least_value || value > most) && value != ignored) {
            return DCP_FAIL(DCP_ERR_ARG, "%s: %s[%lld] = %d must lie in 0..%s-1 (%lld)",
                            op, name, (long long)i, (int)value, bound_name,
                            (long long)(bound - 1));
        }
    }
    return DCP_OK;
}
