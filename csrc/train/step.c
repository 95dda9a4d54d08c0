/* One optimizer step (see train.h for its seven parts).
 *
 * Why ranks may run different numbers of micro-batches: between part 1 and part 3 no
 * rank waits for another; weights are read where they lie (window), gradients stay
 * local. So no plan can deadlock, and a rank without work simply waits in part 3. Who
 * may touch what: weights are written only between 3 and 7, when nobody computes. A
 * rank's gradients are read by peers only in 4; the collective inside 5 comes after
 * every rank's 4, so part 2 of the next step may overwrite them. Where nothing is read
 * one-sidedly, or gradients are summed layer by layer, ranks do wait for each other
 * inside part 2, and rounds.c has made sure that all come. Cost beside computing, P
 * parameters, W ranks: zeroing 4P bytes, reading 4P and writing 4P/W bytes in 4, what
 * the optimizer says in 6 (AdamW: 28P/W bytes); three small collectives.
 */
#include "train_private.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"

#include <inttypes.h>
#include <math.h>

/* Part 1. */
static dcp_status_t
agree(dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    step_record_t own = {
        .step = args->step,
        .plan_hash = (int64_t)args->plan_hash,
        .batch_count = args->batch_count,
        .settings_hash = train_settings_hash(sharded, args),
    };
    DCP_TRY(train_gather_records(sharded, &own));
    const step_record_t *first = &sharded->records[0];
    for (int32_t rank = 1; rank < dcp_comm_size(sharded->comm); rank++) {
        const step_record_t *other = &sharded->records[rank];
        if (other->step != first->step || other->plan_hash != first->plan_hash) {
            return DCP_FAIL(DCP_ERR_MISMATCH,
                            "ranks disagree before step %" PRId64
                            ": rank 0 has step %" PRId64 " and plan %016" PRIx64
                            ", rank %d has step %" PRId64 " and plan %016" PRIx64,
                            args->step, first->step, (uint64_t)first->plan_hash,
                            (int)rank, other->step, (uint64_t)other->plan_hash);
        }
        if (other->settings_hash != first->settings_hash) {
            return DCP_FAIL(DCP_ERR_MISMATCH,
                            "ranks disagree before step %" PRId64
                            " on lr, clip, update_count, trainable, nonfinite, "
                            "precision and how it "
                            "is used, or the rules of the optimizer: rank 0 has those "
                            "of hash %016" PRIx64 ", rank %d of %016" PRIx64,
                            args->step, (uint64_t)first->settings_hash, (int)rank,
                            (uint64_t)other->settings_hash);
        }
    }
    if (sharded->no_windows || sharded->reduce_layer) {
        DCP_TRY(train_check_counts(sharded, args->step));
        DCP_TRY(train_check_rounds(sharded, args));
    }
    return DCP_OK;
}

/* In fp32, as they lie. */
static dcp_status_t
reduce_exactly(dcp_sharded_t *sharded)
{
    dcp_dbuffer_t *gradients = sharded->buffers[DCP_SHARDED_GRADIENTS];
    int32_t group_count = dcp_dbuffer_layout_group_count(sharded->layout);
    int32_t trained_count = 0;
    for (int32_t g = 0; g < group_count; g++) {
        bool is_trained = train_group_is_trained(sharded, g);
        trained_count += is_trained;
        sharded->reduced_bytes += is_trained ? train_received_bytes(sharded, g) : 0;
    }
    dcp_comm_traffic_t before = dcp_comm_traffic(sharded->comm);
    int64_t start = dcp_clock_ns();
    if (trained_count == group_count) { /* in one go */
        DCP_TRY(dcp_dbuffer_reduce(gradients, sharded->pool));
    }
    for (int32_t g = 0; g < group_count && trained_count < group_count; g++) {
        if (train_group_is_trained(sharded, g)) {
            DCP_TRY(dcp_dbuffer_reduce_one(gradients, sharded->pool, g));
        }
    }
    sharded->reduce_count++;
    dcp_comm_traffic_t after = dcp_comm_traffic(sharded->comm);
    sharded->moved.reduce_ns = after.call_count > before.call_count
                                   ? after.move_ns - before.move_ns
                                   : dcp_clock_ns() - start; /* read in windows */
    return DCP_OK;
}

/* Part 4. */
static dcp_status_t
reduce(dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    sharded->moved = (train_moved_t){0};
    if (sharded->reduce_layer) {
        return DCP_OK; /* done in part 2 */
    }
    if (args->statistics) {
        DCP_TRY(train_statistics_errors(sharded, args));
    }
    if (!train_reduces_codes(sharded, args)) {
        return reduce_exactly(sharded);
    }
    if (sharded->not_finite) {
        return DCP_OK;
    }
    if (args->statistics && train_sends_residual(sharded, args)) {
        DCP_TRY(train_statistics_residual(sharded));
    }
    return train_reduce_codes(sharded, args);
}

/* Parts 1 to 3. */
static dcp_status_t
accumulate(dcp_sharded_t *sharded, const dcp_step_args_t *args, int64_t *busy_ns,
           double *loss_p)
{
    if (sharded->buffers[DCP_SHARDED_GRADIENTS] == NULL) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "this model was made forward only: it has no gradients");
    }
    DCP_TRY(train_check_precision(sharded, args));
    DCP_TRY(agree(sharded, args));
    sharded->training = 1;
    sharded->hook_ns = sharded->gathered_bytes = sharded->reduced_bytes = 0;
    sharded->gather_ns = sharded->gather_calls = 0;
    sharded->reduce_count = sharded->accumulated ? sharded->reduce_count : 0;
    sharded->hadamard = args->hadamard;
    sharded->nearest = args->nearest;
    dcp_status_t status = train_compute(sharded, args, busy_ns, loss_p);
    sharded->training = 0;
    return status;
}

static dcp_status_t
gradients(dcp_sharded_t *sharded, const dcp_step_args_t *args, int64_t *busy_ns,
          double *loss_p)
{
    DCP_TRY(accumulate(sharded, args, busy_ns, loss_p));
    sharded->accumulated = 0; /* the next pass begins anew */
    return reduce(sharded, args);
}

/* A rank that fails alone must not leave the others waiting. */
static dcp_status_t
end_for_all(dcp_sharded_t *sharded, dcp_status_t status)
{
    if (status != DCP_OK) {
        dcp_comm_abort(sharded->comm, dcp_last_error());
    }
    return status;
}

dcp_status_t
dcp_sharded_accumulate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                       int64_t *busy_ns, double *loss_p)
{
    dcp_status_t status =
        end_for_all(sharded, accumulate(sharded, args, busy_ns, loss_p));
    sharded->accumulated = status == DCP_OK;
    return status;
}

dcp_status_t
dcp_sharded_gradients(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                      int64_t *busy_ns, double *loss_p)
{
    dcp_status_t status = gradients(sharded, args, busy_ns, loss_p);
    if (status == DCP_OK) {
        status = dcp_comm_barrier(
            sharded->comm); /* every rank has read its peers' gradients */
    }
    return end_for_all(sharded, status);
}

/* Part 6. */
static dcp_status_t
update(dcp_sharded_t *sharded, const dcp_step_args_t *args, double norm)
{
    dcp_optimizer_step_args_t step_args = {
        .update_count = args->update_count,
        .lr = args->lr,
        .grad_scale = args->clip > 0 && norm > args->clip ? args->clip / norm : 1.0,
    };
    sharded->grad_scale = step_args.grad_scale;
    return dcp_optimizer_step(sharded->optimizer, &step_args);
}

static dcp_status_t
step(dcp_sharded_t *sharded, const dcp_step_args_t *args, int64_t *busy_ns,
     dcp_step_result_t *result)
{
    if (sharded->optimizer == NULL) {
        return DCP_FAIL(DCP_ERR_STATE, "step %" PRId64 ": no optimizer is set",
                        args->step);
    }
    DCP_TRY(gradients(sharded, args, busy_ns, &result->loss));
    result->grad_norm = NAN;
    if (!sharded->not_finite) { /* else nothing was summed */
        DCP_TRY(dcp_dbuffer_norm(sharded->buffers[DCP_SHARDED_GRADIENTS], sharded->pool,
                                 sharded->trained, &result->grad_norm));
    }
    int32_t finite = isfinite(result->loss) && isfinite(result->grad_norm);
    if (!finite && !args->skip_nonfinite) {
        return DCP_FAIL(DCP_ERR_NUMERIC,
                        "step %" PRId64
                        ": loss %g, gradient norm %g: not finite, stopped before "
                        "the update (train.nonfinite=skip goes on without such steps)",
                        args->step, result->loss, result->grad_norm);
    }
    result->skipped = !finite || args->trainable_count == 0;
    if (args->statistics) {
        DCP_TRY(train_statistics_end(sharded, args, busy_ns, result));
    }
    if (result->skipped) {
        return DCP_OK; /* decided from numbers that are the same on every rank */
    }
    DCP_TRY(update(sharded, args, result->grad_norm));
    if (args->statistics) {
        DCP_TRY(train_factors_refresh(sharded, args->update_count + 1));
    }
    return dcp_sharded_publish(sharded);
}

dcp_status_t
dcp_sharded_step(dcp_sharded_t *sharded, const dcp_step_args_t *args, int64_t *busy_ns,
                 dcp_step_result_t *result_p)
{
    int64_t start = dcp_clock_ns();
    dcp_step_result_t result = {0};
    sharded->has_observation = 0;
    DCP_TRY(end_for_all(sharded, step(sharded, args, busy_ns, &result)));
    result.wall_ns = dcp_clock_ns() - start;
    result.gathered_bytes = sharded->gathered_bytes;
    result.reduced_bytes = sharded->reduced_bytes;
    result.reduce_count = sharded->reduce_count;
    sharded->has_observation = args->statistics != 0;
    sharded->observation = result.observation;
    *result_p = result;
    return DCP_OK;
}

static dcp_status_t
evaluate_in_rounds(dcp_sharded_t *sharded, const dcp_step_args_t *args, double *loss_p)
{
    dcp_step_args_t padded;
    void *memory = NULL;
    dcp_status_t status = train_pad_rounds(sharded, args, &padded, &memory);
    if (status == DCP_OK) {
        status = train_check_rounds(sharded, &padded);
    }
    if (status == DCP_OK) {
        status = train_evaluate(sharded, &padded, loss_p);
    }
    dcp_free(memory);
    return status;
}

dcp_status_t
dcp_sharded_evaluate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                     double *loss_p)
{
    return end_for_all(sharded, sharded->no_windows
                                    ? evaluate_in_rounds(sharded, args, loss_p)
                                    : train_evaluate(sharded, args, loss_p));
}
