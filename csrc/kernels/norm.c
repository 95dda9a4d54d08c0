/* RMSNorm and LayerNorm: checks and the cut into tasks; the arithmetic is in
 * isa/norm_kernel.c. Forward rows are independent. Backward rows are independent too
 * where no gradient of weight or bias is wanted; otherwise they go in fixed blocks
 * (rowwise.c). A row of zeros is legal: rstd is then 1 / sqrt(eps).
 */
#include "dcp/kernels.h"
#include "rowwise.h"

static dcp_status_t
check_shape(const char *op, dcp_norm_kind_t kind, int64_t rows, int64_t width)
{
    DCP_TRY(rowwise_check_size(op, "rows", rows));
    DCP_TRY(rowwise_check_size(op, "width", width));
    if (kind != DCP_NORM_RMS && kind != DCP_NORM_LAYER) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: kind %d must be 0 (RMS) or 1 (layer)", op,
                        (int)kind);
    }
    if (rows > 0 && width == 0) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: width 0 has no mean; it must be positive",
                        op);
    }
    return DCP_OK;
}

dcp_status_t
dcp_cpu_norm(dcp_pool_t *pool, const dcp_norm_args_t *args)
{
    DCP_TRY(check_shape("norm", args->kind, args->rows, args->width));
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("norm", x);
    CHECK_POINTER("norm", weight);
    CHECK_POINTER("norm", y);
    CHECK_POINTER("norm", rstd);
    if (args->kind == DCP_NORM_LAYER) {
        CHECK_POINTER("norm", mean);
    } else if (args->bias != NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "norm: bias must be NULL for RMSNorm");
    }
    if (!(args->eps >= 0.0f)) {
        return DCP_FAIL(DCP_ERR_ARG, "norm: eps %g must not be negative",
                        (double)args->eps);
    }
    return rowwise_run(pool, args->rows, args->width,
                       ROWWISE_OPS(norm_ops)->forward[args->kind], args);
}

static void
backward_without_parts(const void *untyped, int64_t first, int64_t last)
{
    const dcp_norm_backward_args_t *args = untyped;
    ROWWISE_OPS(norm_ops)->backward[args->kind](args, first, last, NULL);
}

dcp_status_t
dcp_cpu_norm_backward(dcp_pool_t *pool, const dcp_norm_backward_args_t *args)
{
    DCP_TRY(check_shape("norm_backward", args->kind, args->rows, args->width));
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("norm_backward", dy);
    CHECK_POINTER("norm_backward", x);
    CHECK_POINTER("norm_backward", weight);
    CHECK_POINTER("norm_backward", rstd);
    CHECK_POINTER("norm_backward", dx);
    if (args->kind == DCP_NORM_LAYER) {
        CHECK_POINTER("norm_backward", mean);
    } else if (args->dbias != NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "norm_backward: dbias must be NULL for RMSNorm");
    }
    if (args->dweight == NULL && args->dbias == NULL) {
        return rowwise_run(pool, args->rows, args->width, backward_without_parts, args);
    }
    float *outs[ROWWISE_MAX_PARTS] = {args->dweight, args->dbias};
    return rowwise_run_sums(pool, args->rows, args->width,
                            ROWWISE_OPS(norm_ops)->backward[args->kind], args,
                            ROWWISE_MAX_PARTS, outs);
}
