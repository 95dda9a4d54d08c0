/* SwiGLU and GELU: checks and the cut into tasks; the arithmetic is in
 * isa/activation_kernel.c. Every element is independent: any cut gives the same bits.
 */
#include "dcp/kernels.h"
#include "rowwise.h"

dcp_status_t
dcp_cpu_swiglu(dcp_pool_t *pool, const dcp_swiglu_args_t *args)
{
    CHECK_SIZE("swiglu", rows);
    CHECK_SIZE("swiglu", width);
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("swiglu", gate);
    CHECK_POINTER("swiglu", up);
    CHECK_POINTER("swiglu", out);
    CHECK_STRIDE("swiglu", gate_stride, args->width);
    CHECK_STRIDE("swiglu", up_stride, args->width);
    return rowwise_run(pool, args->rows, args->width,
                       ROWWISE_OPS(activation_ops)->swiglu, args);
}

dcp_status_t
dcp_cpu_swiglu_backward(dcp_pool_t *pool, const dcp_swiglu_backward_args_t *args)
{
    CHECK_SIZE("swiglu_backward", rows);
    CHECK_SIZE("swiglu_backward", width);
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("swiglu_backward", dout);
    CHECK_POINTER("swiglu_backward", gate);
    CHECK_POINTER("swiglu_backward", up);
    CHECK_POINTER("swiglu_backward", dgate);
    CHECK_POINTER("swiglu_backward", dup);
    CHECK_STRIDE("swiglu_backward", gate_stride, args->width);
    CHECK_STRIDE("swiglu_backward", up_stride, args->width);
    CHECK_STRIDE("swiglu_backward", dgate_stride, args->width);
    CHECK_STRIDE("swiglu_backward", dup_stride, args->width);
    return rowwise_run(pool, args->rows, args->width,
                       ROWWISE_OPS(activation_ops)->swiglu_backward, args);
}

static dcp_status_t
check_gelu(const char *op, dcp_gelu_kind_t kind, int64_t count)
{
    DCP_TRY(rowwise_check_size(op, "count", count));
    if (kind != DCP_GELU_ERF && kind != DCP_GELU_TANH) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: kind %d must be 0 (erf) or 1 (tanh)", op,
                        (int)kind);
    }
    return DCP_OK;
}

dcp_status_t
dcp_cpu_gelu(dcp_pool_t *pool, const dcp_gelu_args_t *args)
{
    DCP_TRY(check_gelu("gelu", args->kind, args->count));
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("gelu", x);
    CHECK_POINTER("gelu", out);
    return rowwise_run(pool, args->count, 1,
                       ROWWISE_OPS(activation_ops)->gelu[args->kind], args);
}

dcp_status_t
dcp_cpu_gelu_backward(dcp_pool_t *pool, const dcp_gelu_backward_args_t *args)
{
    DCP_TRY(check_gelu("gelu_backward", args->kind, args->count));
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("gelu_backward", dout);
    CHECK_POINTER("gelu_backward", x);
    CHECK_POINTER("gelu_backward", dx);
    return rowwise_run(pool, args->count, 1,
                       ROWWISE_OPS(activation_ops)->gelu_backward[args->kind], args);
}
