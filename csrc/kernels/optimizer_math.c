/* AdamW and sums of squares: checks and the cut into tasks; the arithmetic, and why any
 * cut gives the same bits, is in isa/optimizer_kernel.c.
 */
#include "dcp/kernels.h"
#include "rowwise.h"

static dcp_status_t
check_in(const char *name, float value, float least, float most, const char *rule)
{
    if (!(value >= least && value <= most)) {
        return DCP_FAIL(DCP_ERR_ARG, "adamw: %s %g must %s", name, (double)value, rule);
    }
    return DCP_OK;
}

dcp_status_t
dcp_cpu_adamw(dcp_pool_t *pool, const dcp_adamw_args_t *args)
{
    const float below_one = 1.0f - 0x1p-24f, tiny = 0x1p-126f, huge = 3.0e38f;
    CHECK_SIZE("adamw", count);
    DCP_TRY(check_in("lr", args->lr, 0, huge, "be finite and not negative"));
    DCP_TRY(check_in("beta1", args->beta1, 0, below_one, "lie in [0, 1)"));
    DCP_TRY(check_in("beta2", args->beta2, 0, below_one, "lie in [0, 1)"));
    DCP_TRY(check_in("eps", args->eps, tiny, huge, "be positive and finite"));
    DCP_TRY(check_in("decay", args->decay, 0, huge, "be finite and not negative"));
    DCP_TRY(check_in("bias1", args->bias1, tiny, 1, "lie in (0, 1]: 1 - beta1^t"));
    DCP_TRY(check_in("bias2", args->bias2, tiny, 1, "lie in (0, 1]: 1 - beta2^t"));
    DCP_TRY(check_in("grad_scale", args->grad_scale, 0, huge,
                     "be finite and not negative"));
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("adamw", w);
    CHECK_POINTER("adamw", m);
    CHECK_POINTER("adamw", v);
    CHECK_POINTER("adamw", g);
    return rowwise_run(pool, args->count, 1, ROWWISE_OPS(optimizer_ops)->adamw, args);
}

dcp_status_t
dcp_cpu_row_squares(dcp_pool_t *pool, const dcp_row_squares_args_t *args)
{
    CHECK_SIZE("row_squares", rows);
    CHECK_SIZE("row_squares", width);
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("row_squares", out);
    if (args->width > 0) {
        CHECK_POINTER("row_squares", x);
    }
    return rowwise_run(pool, args->rows, args->width,
                       ROWWISE_OPS(optimizer_ops)->row_squares, args);
}
