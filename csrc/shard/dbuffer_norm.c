/* The norm of all ranks' shards, the same bits in every world.
 *
 * Squares are added in fp64 over what is never cut between ranks: a row, or, where a
 * tensor's blocks are not whole rows, a block (the last may be short). These sums are
 * added without rounding (exact_sum.c), so neither the ranks that hold them nor their
 * order matter. A largest value needs no such care.
 *
 * Replicated values are the same on every rank; rank 0 alone adds them. */
#include "dbuffer_private.h"

#include "dcp/kernels.h"

#include <math.h>

/* Elements whose squares are added in fp64. */
static int64_t
unit_of(const dcp_dbuffer_tensor_t *tensor)
{
    int64_t block = tensor->block_count, width = tensor->row_width;
    return block > 0 && block % width != 0 ? block : width;
}

/* Adds the squares of rows of `width`. */
static dcp_status_t
add_rows(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const float *x, int64_t row_count,
         int64_t width, dcp_exact_sum_t *sum)
{
    for (int64_t row = 0; row < row_count; row += DBUFFER_SQUARES) {
        int64_t rest = row_count - row;
        dcp_row_squares_args_t args = {
            .rows = rest < DBUFFER_SQUARES ? rest : DBUFFER_SQUARES,
            .width = width,
            .x = x + row * width,
            .out = buffer->squares,
        };
        DCP_TRY(dcp_cpu_row_squares(pool, &args));
        for (int64_t i = 0; i < args.rows; i++) {
            dcp_exact_sum_add(sum, buffer->squares[i]);
        }
    }
    return DCP_OK;
}

static void
add_elements(const float *x, int64_t count, dcp_exact_sum_t *sum)
{
    for (int64_t i = 0; i < count; i++) {
        dcp_exact_sum_add(sum, (double)x[i] * (double)x[i]);
    }
}

static dcp_status_t
add_run(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const dcp_dbuffer_run_t *run,
        dcp_exact_sum_t *sum)
{
    int64_t unit = unit_of(&buffer->layout->tensors[run->tensor]);
    const float *x = dcp_dbuffer_run_data(buffer, run);
    if (unit == 1) {
        add_elements(x, run->count, sum);
        return DCP_OK;
    }
    int64_t whole = run->count / unit, rest = run->count % unit;
    DCP_TRY(add_rows(buffer, pool, x, whole, unit, sum));
    return rest > 0 ? add_rows(buffer, pool, x + whole * unit, 1, rest, sum) : DCP_OK;
}

/* NaN stays. */
static float
largest_of(const float *x, int64_t count, float largest)
{
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        largest = size > largest || isnan(size) ? size : largest;
        if (isnan(largest)) {
            break;
        }
    }
    return largest;
}

static int32_t
is_in(const dcp_dbuffer_norm_args_t *args, int64_t tensor)
{
    return args->mask == NULL || args->mask[tensor] != 0;
}

static dcp_status_t
largest_value(dcp_dbuffer_t *buffer, const dcp_dbuffer_norm_args_t *args,
              const dcp_dbuffer_run_t *runs, int64_t run_count, double *norm_p)
{
    float largest = 0;
    for (int64_t i = 0; i < run_count; i++) {
        if (is_in(args, runs[i].tensor)) {
            largest = largest_of(dcp_dbuffer_run_data(buffer, &runs[i]), runs[i].count,
                                 largest);
        }
    }
    for (int64_t i = 0; i < args->extra_count; i++) {
        largest = largest_of(args->extras[i], args->extra_counts[i], largest);
    }
    DCP_TRY(dcp_comm_allreduce(buffer->comm, &largest, &largest, 1, DCP_F32, DCP_MAX));
    *norm_p = (double)largest;
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_norm_with(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                      const dcp_dbuffer_norm_args_t *args, double *norm_p)
{
    if (buffer->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_TYPE, "norm: a buffer of %s, must be float32",
                        dcp_dtype_name(buffer->dtype));
    }
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(buffer->layout, buffer->rank, &runs, &run_count);
    if (args->largest) {
        return largest_value(buffer, args, runs, run_count, norm_p);
    }
    dcp_exact_sum_t sum;
    dcp_exact_sum_init(&sum);
    for (int64_t i = 0; i < run_count; i++) {
        if (is_in(args, runs[i].tensor)) {
            DCP_TRY(add_run(buffer, pool, &runs[i], &sum));
        }
    }
    for (int64_t i = 0; buffer->rank == 0 && i < args->extra_count; i++) {
        add_elements(args->extras[i], args->extra_counts[i], &sum);
    }
    dcp_exact_sum_normalise(&sum);
    DCP_TRY(dcp_comm_allreduce(buffer->comm, sum.words, sum.words, DCP_EXACT_WORDS,
                               DCP_I64, DCP_SUM));
    *norm_p = sqrt(dcp_exact_sum_value(&sum));
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_norm(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const uint8_t *mask,
                 double *norm_p)
{
    dcp_dbuffer_norm_args_t args = {.mask = mask};
    return dcp_dbuffer_norm_with(buffer, pool, &args, norm_p);
}
