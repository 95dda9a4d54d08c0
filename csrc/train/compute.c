/* Parts 2 and 3 of a step: this rank's micro-batches, one after the other, then what
 * all ranks tell each other about them.
 */
#include "sequence.h"

#include "dcp/clock.h"
#include "dcp/kernels.h"

#include <math.h>

dcp_status_t
train_gather_records(dcp_sharded_t *sharded, const step_record_t *own)
{
    int64_t moved_ns = dcp_comm_traffic(sharded->comm).move_ns;
    DCP_TRY(dcp_comm_allgatherv(sharded->comm, own, sharded->record_counts,
                                sharded->records, DCP_I64));
    sharded->latency_ns = dcp_comm_traffic(sharded->comm).move_ns - moved_ns;
    return DCP_OK;
}

/* Is what this rank would send finite? A sum of squares in fp64 says so. */
static dcp_status_t
check_finite(const dcp_sharded_t *sharded, double loss, int64_t *not_finite_p)
{
    double squares[2] = {0, 0};
    DCP_TRY(dcp_cpu_quantise(
        sharded->pool,
        &(dcp_quantise_args_t){
            .count = dcp_dbuffer_layout_elements(sharded->layout),
            .x = dcp_dbuffer_data(sharded->buffers[DCP_SHARDED_GRADIENTS]),
            .precision = DCP_PRECISION_FP32,
            .squares = squares,
        }));
    *not_finite_p = !isfinite(squares[0]) || !isfinite(loss);
    return DCP_OK;
}

/* Parts 2 and 3. */
dcp_status_t
train_compute(dcp_sharded_t *sharded, const dcp_step_args_t *args, int64_t *busy_ns,
              double *loss_p)
{
    DCP_TRY(sequence_prepare(sharded, args, true));
    int64_t start = dcp_clock_ns(), waited_ns = 0;
    if (!sharded->accumulated) {
        dcp_dbuffer_zero(sharded->buffers[DCP_SHARDED_GRADIENTS]);
        sharded->own_loss = 0;
    }
    step_record_t own = {.step = args->step,
                         .batch_count = args->batch_count,
                         .loss = sharded->own_loss};
    sharded->measured =
        args->statistics && (!sharded->accumulated || sharded->measured);
    if (args->statistics) {
        DCP_TRY(train_statistics_begin(sharded));
    }
    for (int64_t i = 0; i < args->batch_count; i++) {
        DCP_TRY(sequence_run(sharded, &args->batches[i], true, &own.loss, &waited_ns));
        if (args->statistics) {
            DCP_TRY(train_statistics_batch(sharded, &args->batches[i]));
        }
    }
    sharded->own_loss = own.loss;
    if (train_reduces_codes(sharded, args)) {
        DCP_TRY(check_finite(sharded, own.loss, &own.not_finite));
    }
    own.busy_ns = dcp_clock_ns() - start - waited_ns - sharded->hook_ns;
    DCP_TRY(train_gather_records(sharded, &own));
    double loss = 0;
    sharded->not_finite = 0;
    for (int32_t rank = 0; rank < dcp_comm_size(sharded->comm); rank++) {
        loss += sharded->records[rank].loss;
        sharded->not_finite |= sharded->records[rank].not_finite != 0;
        busy_ns[rank] = sharded->records[rank].busy_ns;
    }
    *loss_p = loss;
    return DCP_OK;
}

dcp_status_t
train_evaluate(dcp_sharded_t *sharded, const dcp_step_args_t *args, double *loss_p)
{
    double own = 0;
    int64_t waited_ns = 0;
    DCP_TRY(sequence_prepare(sharded, args, false));
    for (int64_t i = 0; i < args->batch_count; i++) {
        DCP_TRY(sequence_run(sharded, &args->batches[i], false, &own, &waited_ns));
    }
    return dcp_comm_allreduce(sharded->comm, &own, loss_p, 1, DCP_F64, DCP_SUM);
}
