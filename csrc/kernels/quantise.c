/* Codes of gradients: checks, tasks, random keys; the blocks are in
 * isa/quantise_kernel.c.
 *
 * Blocks do not depend on each other, so any cut into tasks gives the same bits;
 * squares are added task by task in order, and tasks are cut by size alone. Random bits
 * come from Philox under the key that (seed, "quan") gives, at counter (element,
 * stream).
 */
#include "quantise_ops.h"
#include "rowwise.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"
#include "dcp/rng.h"

enum { TASK_BLOCKS = 256, MOST_TASKS = 4096 };

static int64_t
block_count(int64_t count)
{
    return count / DCP_PRECISION_BLOCK + (count % DCP_PRECISION_BLOCK > 0);
}

typedef struct quantise_job {
    const dcp_quantise_args_t *args;
    uint32_t key[2];
    int64_t blocks, task_blocks;
    double *squares; /* [tasks][2]; NULL: not wanted */
} quantise_job_t;

static dcp_status_t
quantise_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const quantise_job_t *job = context;
    int64_t first = task * job->task_blocks, last = first + job->task_blocks;
    double squares[2] = {0, 0};
    ROWWISE_OPS(quantise_ops)
        ->quantise(job->args, job->key, first, last < job->blocks ? last : job->blocks,
                   job->squares != NULL ? squares : NULL);
    if (job->squares != NULL) {
        job->squares[2 * task] = squares[0];
        job->squares[2 * task + 1] = squares[1];
    }
    return DCP_OK;
}

static dcp_status_t
check_precision(const char *op, dcp_precision_t precision)
{
    if (dcp_precision_name(precision) == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: precision %d is none of dcp_precision_t", op,
                        (int)precision);
    }
    return DCP_OK;
}

dcp_status_t
dcp_cpu_quantise(dcp_pool_t *pool, const dcp_quantise_args_t *args)
{
    CHECK_SIZE("quantise", count);
    DCP_TRY(check_precision("quantise", args->precision));
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("quantise", x);
    uint32_t seed[2] = {(uint32_t)args->seed, (uint32_t)(args->seed >> 32)};
    uint32_t counter[4] = {0x7175616eu, 0, 0, 0}, words[4];
    dcp_philox(seed, counter, words);
    quantise_job_t job = {
        .args = args,
        .key = {words[0], words[1]},
        .blocks = block_count(args->count),
        .task_blocks = TASK_BLOCKS,
    };
    while (job.blocks / job.task_blocks >= MOST_TASKS) {
        job.task_blocks *= 2;
    }
    int64_t tasks = (job.blocks + job.task_blocks - 1) / job.task_blocks;
    double few[2 * 16];
    void *memory = NULL;
    if (args->squares != NULL && tasks > 16) {
        DCP_TRY(dcp_alloc_array(2 * tasks, (int64_t)sizeof(double), "squares of tasks",
                                &memory));
    }
    if (args->squares != NULL) {
        job.squares = memory != NULL ? memory : few;
    }
    dcp_status_t status = dcp_pool_run(pool, tasks, quantise_task, &job);
    for (int64_t i = 0; args->squares != NULL && status == DCP_OK && i < tasks; i++) {
        args->squares[0] += job.squares[2 * i];
        args->squares[1] += job.squares[2 * i + 1];
    }
    dcp_free(memory);
    return status;
}

static void
dequantise_rows(const void *args, int64_t first, int64_t last)
{
    ROWWISE_OPS(quantise_ops)->dequantise(args, first, last);
}

dcp_status_t
dcp_cpu_dequantise(dcp_pool_t *pool, const dcp_dequantise_args_t *args)
{
    CHECK_SIZE("dequantise", count);
    DCP_TRY(check_precision("dequantise", args->precision));
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("dequantise", codes);
    CHECK_POINTER("dequantise", out);
    return rowwise_run(pool, block_count(args->count), DCP_PRECISION_BLOCK,
                       dequantise_rows, args);
}
