/* Cross entropy: checks, the cut into tasks, and the sum of the rows' losses in row
 * order and fp64, so that neither threads nor the cut show. Rows with label -100 add
 * exactly nothing, also where no other row is there. Scratch: 8 B a row.
 */
#include "dcp/kernels.h"
#include "rowwise.h"

enum { LABEL_IGNORED = -100 };

dcp_status_t
dcp_cpu_cross_entropy(dcp_pool_t *pool, const dcp_cross_entropy_args_t *args)
{
    CHECK_SIZE("cross_entropy", rows);
    CHECK_SIZE("cross_entropy", vocab);
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("cross_entropy", logits);
    CHECK_POINTER("cross_entropy", labels);
    CHECK_POINTER("cross_entropy", loss_p);
    CHECK_STRIDE("cross_entropy", logits_stride, args->vocab);
    DCP_TRY(rowwise_check_indices("cross_entropy", "labels", args->labels, args->rows,
                                  args->vocab, "vocab", LABEL_IGNORED));
    void *memory;
    DCP_TRY(dcp_pool_scratch(pool, 0, args->rows * (int64_t)sizeof(double), &memory));
    loss_job_t job = {args, memory};
    DCP_TRY(rowwise_run(pool, args->rows, args->vocab,
                        ROWWISE_OPS(loss_ops)->cross_entropy, &job));
    double loss = 0;
    for (int64_t row = 0; row < args->rows; row++) {
        loss += job.losses[row];
    }
    *args->loss_p += loss;
    return DCP_OK;
}
