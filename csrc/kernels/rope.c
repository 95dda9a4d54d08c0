/* Rotary positions: checks and the cut into tasks. Positions must not be negative; the
 * table's length is not known here, so that each position has a row in the table is the
 * caller's duty.
 */
#include "dcp/kernels.h"
#include "rowwise.h"

dcp_status_t
dcp_cpu_rope(dcp_pool_t *pool, const dcp_rope_args_t *args)
{
    CHECK_SIZE("rope", rows);
    CHECK_SIZE("rope", heads);
    CHECK_SIZE("rope", head_dim);
    if (args->head_dim % 2 != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "rope: head_dim %lld must be even",
                        (long long)args->head_dim);
    }
    int64_t width = args->heads * args->head_dim;
    if (args->rows == 0 || width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("rope", x);
    CHECK_POINTER("rope", positions);
    CHECK_POINTER("rope", table);
    CHECK_STRIDE("rope", x_stride, width);
    int32_t least = 0;
    for (int64_t i = 0; i < args->rows; i++) {
        least = args->positions[i] < least ? args->positions[i] : least;
    }
    if (least < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "rope: position %d must not be negative",
                        (int)least);
    }
    return rowwise_run(pool, args->rows, width, ROWWISE_OPS(rope_ops)->rotate, args);
}
