/* Codes of gradients: checks, tasks, random keys; the blocks are in
 * isa/quantise_kernel.c.
 *
 * Blocks do not depend on each other, so any cut into tasks gives the same bits;
 * squares are added task by task in order, and tasks are cut by size alone, at most
 * MOST_TASKS, whose squares stand on the stack: nothing is allocated, so a call whose
 * arguments are right cannot fail. Three uses of a seed have Philox keys or counters of
 * their own: random bits the key that block "quan" gives, at counter (element,
 * stream); signs of the rotation are block "hada".
 */
#include "quantise_ops.h"
#include "rowwise.h"

#include "dcp/kernels.h"
#include "dcp/rng.h"

enum {
    TASK_BLOCKS = 128, /* 64 KiB of fp32 */
    MOST_TASKS = 256
};

static int64_t
block_count(int64_t count)
{
    return count / DCP_PRECISION_BLOCK + (count % DCP_PRECISION_BLOCK > 0);
}

static void
key_init(quantise_key_t *key, uint64_t seed)
{
    const uint32_t parts[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t random[4] = {0x7175616eu, 0, 0, 0};
    const uint32_t rotation[4] = {0x68616461u, 0, 0, 0};
    uint32_t words[4];
    dcp_philox(parts, random, words);
    key->random[0] = words[0];
    key->random[1] = words[1];
    dcp_philox(parts, rotation, words);
    for (int i = 0; i < DCP_PRECISION_BLOCK; i++) {
        key->signs[i] = words[i / 32] >> (i % 32) & 1 ? INT32_MIN : 0;
    }
}

static dcp_status_t
check_precision(const char *op, dcp_precision_t precision)
{
    if (dcp_precision_name(precision) == NULL) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "%s: precision %d must be a dcp_precision_t, 0..%d", op,
                        (int)precision, DCP_PRECISION_COUNT - 1);
    }
    return DCP_OK;
}

typedef struct quantise_job {
    const dcp_quantise_args_t *args;
    quantise_key_t key;
    int64_t blocks, task_blocks;
    double squares[MOST_TASKS][2];
} quantise_job_t;

static dcp_status_t
quantise_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    quantise_job_t *job = context;
    int64_t first = task * job->task_blocks, last = first + job->task_blocks;
    double *squares = job->args->squares != NULL ? job->squares[task] : NULL;
    if (squares != NULL) {
        squares[0] = squares[1] = 0;
    }
    ROWWISE_OPS(quantise_ops)
        ->quantise(job->args, &job->key, first, last < job->blocks ? last : job->blocks,
                   squares);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_quantise(dcp_pool_t *pool, const dcp_quantise_args_t *args)
{
    CHECK_SIZE("quantise", count);
    DCP_TRY(check_precision("quantise", args->precision));
    if (args->count == 0 || (args->codes == NULL && args->squares == NULL)) {
        return DCP_OK;
    }
    CHECK_POINTER("quantise", x);
    quantise_job_t job;
    job.args = args;
    job.blocks = block_count(args->count);
    job.task_blocks = TASK_BLOCKS;
    key_init(&job.key, args->seed);
    while ((job.blocks - 1) / job.task_blocks >= MOST_TASKS) {
        job.task_blocks *= 2;
    }
    int64_t tasks = (job.blocks - 1) / job.task_blocks + 1;
    DCP_TRY(dcp_pool_run(pool, tasks, quantise_task, &job));
    for (int64_t i = 0; args->squares != NULL && i < tasks; i++) {
        args->squares[0] += job.squares[i][0];
        args->squares[1] += job.squares[i][1];
    }
    return DCP_OK;
}

typedef struct dequantise_job {
    const dcp_dequantise_args_t *args;
    quantise_key_t key;
} dequantise_job_t;

static void
dequantise_rows(const void *untyped, int64_t first, int64_t last)
{
    const dequantise_job_t *job = untyped;
    ROWWISE_OPS(quantise_ops)->dequantise(job->args, &job->key, first, last);
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
    dequantise_job_t job = {.args = args};
    key_init(&job.key, args->seed);
    return rowwise_run(pool, block_count(args->count), DCP_PRECISION_BLOCK,
                       dequantise_rows, &job);
}
