/* add, row_add, cast, zero and column_sum: checks and the cut into tasks. */
#include "bf16.h"
#include "dcp/kernels.h"

#include <string.h>

static void
copy_elements(const void *untyped, int64_t first, int64_t last)
{
    const dcp_add_args_t *args = untyped;
    memcpy(args->out + first, args->a + first, (size_t)(last - first) * sizeof(float));
}

dcp_status_t
dcp_cpu_add(dcp_pool_t *pool, const dcp_add_args_t *args)
{
    CHECK_SIZE("add", count);
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("add", a);
    CHECK_POINTER("add", out);
    if (args->b != NULL) {
        return rowwise_run(pool, args->count, 1, ROWWISE_OPS(elementwise_ops)->add,
                           args);
    }
    if (args->out == args->a) {
        return DCP_OK;
    }
    return rowwise_run(pool, args->count, 1, copy_elements, args);
}

static void
cast_elements(const void *untyped, int64_t first, int64_t last)
{
    const dcp_cast_args_t *args = untyped;
    const bf16_ops_t *ops = ROWWISE_OPS(bf16_ops);
    if (args->from == args->to) {
        int64_t bytes = dcp_dtype_bytes(args->to);
        memcpy((char *)args->out + first * bytes, (const char *)args->x + first * bytes,
               (size_t)((last - first) * bytes));
    } else if (args->to == DCP_BF16) {
        ops->narrow(last - first, (const float *)args->x + first,
                    (uint16_t *)args->out + first);
    } else {
        ops->widen(last - first, (const uint16_t *)args->x + first,
                   (float *)args->out + first);
    }
}

dcp_status_t
dcp_cpu_cast(dcp_pool_t *pool, const dcp_cast_args_t *args)
{
    CHECK_SIZE("cast", count);
    dcp_dtype_t from = args->from, to = args->to;
    if ((from != DCP_F32 && from != DCP_BF16) || (to != DCP_F32 && to != DCP_BF16)) {
        return DCP_FAIL(DCP_ERR_TYPE, "cast: from %s to %s must be float32 or bfloat16",
                        dcp_dtype_name(from), dcp_dtype_name(to));
    }
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("cast", x);
    CHECK_POINTER("cast", out);
    return rowwise_run(pool, args->count, 1, cast_elements, args);
}

static void
add_rows(const void *untyped, int64_t first, int64_t last)
{
    const dcp_row_add_args_t *args = untyped;
    const elementwise_ops_t *ops = ROWWISE_OPS(elementwise_ops);
    for (int64_t row = first; row < last; row++) {
        dcp_add_args_t one = {.count = args->width,
                              .a = args->a + row * args->a_stride,
                              .b = args->b + row * args->b_stride,
                              .out = args->out + row * args->out_stride};
        ops->add(&one, 0, args->width);
    }
}

static void
copy_rows(const void *untyped, int64_t first, int64_t last)
{
    const dcp_row_add_args_t *args = untyped;
    for (int64_t row = first; row < last; row++) {
        memcpy(args->out + row * args->out_stride, args->a + row * args->a_stride,
               (size_t)args->width * sizeof(float));
    }
}

dcp_status_t
dcp_cpu_row_add(dcp_pool_t *pool, const dcp_row_add_args_t *args)
{
    CHECK_SIZE("row_add", rows);
    CHECK_SIZE("row_add", width);
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("row_add", a);
    CHECK_POINTER("row_add", out);
    CHECK_STRIDE("row_add", a_stride, args->width);
    CHECK_STRIDE("row_add", out_stride, args->width);
    if (args->b != NULL) {
        CHECK_STRIDE("row_add", b_stride, args->width);
        return rowwise_run(pool, args->rows, args->width, add_rows, args);
    }
    if (args->out == args->a && args->out_stride == args->a_stride) {
        return DCP_OK;
    }
    return rowwise_run(pool, args->rows, args->width, copy_rows, args);
}

enum { ZERO_UNIT_BYTES = 64 };

static void
zero_units(const void *untyped, int64_t first, int64_t last)
{
    const dcp_zero_args_t *args = untyped;
    int64_t begin = first * ZERO_UNIT_BYTES, end = last * ZERO_UNIT_BYTES;
    end = end < args->bytes ? end : args->bytes;
    memset((char *)args->x + begin, 0, (size_t)(end - begin));
}

dcp_status_t
dcp_cpu_zero(dcp_pool_t *pool, const dcp_zero_args_t *args)
{
    CHECK_SIZE("zero", bytes);
    if (args->bytes == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("zero", x);
    int64_t units = (args->bytes - 1) / ZERO_UNIT_BYTES + 1;
    return rowwise_run(pool, units, ZERO_UNIT_BYTES / (int64_t)sizeof(float),
                       zero_units, args);
}

dcp_status_t
dcp_cpu_column_sum(dcp_pool_t *pool, const dcp_column_sum_args_t *args)
{
    CHECK_SIZE("column_sum", rows);
    CHECK_SIZE("column_sum", width);
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("column_sum", x);
    CHECK_POINTER("column_sum", out);
    CHECK_STRIDE("column_sum", x_stride, args->width);
    float *outs[ROWWISE_MAX_PARTS] = {args->out, NULL};
    return rowwise_run_sums(pool, args->rows, args->width,
                            ROWWISE_OPS(elementwise_ops)->column_sum, args, 1, outs);
}
