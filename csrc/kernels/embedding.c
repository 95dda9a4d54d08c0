/* Embedding: rows of the weight by token, and the gradient's way back.
 *
 * Every token is checked before anything is written. The backward pass cuts columns,
 * not rows: a task adds its columns of all rows in row order, so that two rows of one
 * token never race and the sum's order is fixed.
 */
#include "bf16.h"
#include "dcp/kernels.h"

#include <string.h>

enum { MIN_COLUMNS = 64, MAX_TASKS = 16 };

static void
copy_rows(const void *untyped, int64_t first, int64_t last)
{
    const dcp_embedding_args_t *args = untyped;
    const bf16_ops_t *ops = ROWWISE_OPS(bf16_ops);
    int64_t width = args->width;
    for (int64_t row = first; row < last; row++) {
        int64_t from = args->tokens[row] * width;
        float *to = args->out + row * width;
        if (args->weight_bf16 != NULL) {
            ops->widen(width, args->weight_bf16 + from, to);
        } else if (args->round) {
            ops->round(width, args->weight + from, to);
        } else {
            memcpy(to, args->weight + from, (size_t)width * sizeof(float));
        }
    }
}

dcp_status_t
dcp_cpu_embedding(dcp_pool_t *pool, const dcp_embedding_args_t *args)
{
    CHECK_SIZE("embedding", rows);
    CHECK_SIZE("embedding", width);
    CHECK_SIZE("embedding", vocab);
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("embedding", tokens);
    DCP_TRY(rowwise_check_indices("embedding", "tokens", args->tokens, args->rows,
                                  args->vocab, "vocab", 0));
    if (args->width == 0) {
        return DCP_OK;
    }
    if (args->weight_bf16 == NULL) {
        CHECK_POINTER("embedding", weight);
    }
    CHECK_POINTER("embedding", out);
    return rowwise_run(pool, args->rows, args->width, copy_rows, args);
}

typedef struct backward_job {
    const dcp_embedding_backward_args_t *args;
    rowwise_func_t func;
    int64_t columns_per_task;
} backward_job_t;

static dcp_status_t
backward_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const backward_job_t *job = context;
    int64_t first = task * job->columns_per_task;
    int64_t last = first + job->columns_per_task;
    job->func(job->args, first, last < job->args->width ? last : job->args->width);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_embedding_backward(dcp_pool_t *pool, const dcp_embedding_backward_args_t *args)
{
    CHECK_SIZE("embedding_backward", rows);
    CHECK_SIZE("embedding_backward", width);
    CHECK_SIZE("embedding_backward", vocab);
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("embedding_backward", tokens);
    DCP_TRY(rowwise_check_indices("embedding_backward", "tokens", args->tokens,
                                  args->rows, args->vocab, "vocab", 0));
    if (args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("embedding_backward", dout);
    CHECK_POINTER("embedding_backward", dweight);
    int64_t columns = (args->width / MAX_TASKS + 15) / 16 * 16;
    backward_job_t job = {args, ROWWISE_OPS(elementwise_ops)->embedding_backward,
                          columns > MIN_COLUMNS ? columns : MIN_COLUMNS};
    int64_t task_count = (args->width - 1) / job.columns_per_task + 1;
    return dcp_pool_run(pool, task_count, backward_task, &job);
}
