/* Ranks of a group meet, and whole micro-batches: see sequence_pass.c for the window
 * and sequence_attention.c for what happens between two meetings. */
#include "sequence.h"

#include "dcp/clock.h"

#include <inttypes.h>
#include <string.h>

static char *
base_of(const sequence_pass_t *pass, int32_t rank)
{
    return dcp_window_base(pass->window, pass->first_rank + rank);
}

const sequence_notice_t *
sequence_pass_notice(const sequence_pass_t *pass, int32_t rank)
{
    return (const sequence_notice_t *)(const void *)(base_of(pass, rank)
                                                     + (pass->turn & 1)
                                                           * SEQUENCE_NOTICE_BYTES);
}

float *
sequence_pass_place(const sequence_pass_t *pass, int32_t rank, int64_t offset)
{
    return (float *)(void *)(base_of(pass, rank) + offset);
}

static dcp_status_t
barrier(sequence_pass_t *pass)
{
    int64_t start = dcp_clock_ns();
    dcp_status_t status = dcp_comm_barrier(pass->comm);
    pass->waited_ns += dcp_clock_ns() - start;
    return status;
}

dcp_status_t
sequence_pass_wait(sequence_pass_t *pass, dcp_queue_t *queue)
{
    DCP_TRY(pass->device->fence(queue));
    return barrier(pass);
}

dcp_status_t
sequence_pass_meet(sequence_pass_t *pass, dcp_queue_t *queue,
                   const sequence_notice_t *notice)
{
    _Static_assert(sizeof *notice <= SEQUENCE_NOTICE_BYTES, "a notice fits its place");
    DCP_TRY(pass->device->fence(queue));
    pass->turn++;
    sequence_notice_t own = *notice;
    own.identity = pass->identity + (int64_t)pass->turn;
    memcpy(base_of(pass, pass->rank) + (pass->turn & 1) * SEQUENCE_NOTICE_BYTES, &own,
           sizeof own);
    DCP_TRY(barrier(pass));
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        if (sequence_pass_notice(pass, rank)->identity != own.identity) {
            return DCP_FAIL(DCP_ERR_MISMATCH,
                            "ranks %d and %d share a micro-batch of ranks %d..%d, but "
                            "their tokens, sequences or settings differ",
                            (int)(pass->first_rank + pass->rank),
                            (int)(pass->first_rank + rank), (int)pass->first_rank,
                            (int)(pass->first_rank + pass->cut.rank_count - 1));
        }
    }
    return DCP_OK;
}

static dcp_status_t
run_model(dcp_sharded_t *sharded, const dcp_batch_t *batch, bool training,
          double *loss_p)
{
    return training ? dcp_model_forward_backward(sharded->model, batch, loss_p)
                    : dcp_model_loss(sharded->model, batch, loss_p);
}

static dcp_status_t
run_group(dcp_sharded_t *sharded, const dcp_micro_batch_t *micro, bool training,
          double *loss_p, int64_t *waited_p)
{
    sequence_pass_t pass;
    dcp_status_t status = sequence_pass_init(&pass, sharded, micro, training);
    if (status == DCP_OK) {
        status = run_model(sharded, &pass.own, training, loss_p);
    }
    if (status == DCP_OK) {
        status = barrier(&pass); /* all have read this rank's part */
    }
    *waited_p += pass.waited_ns;
    sequence_pass_fini(&pass);
    return status;
}

/* One micro-batch of this rank alone. */
static dcp_status_t
run_alone(dcp_sharded_t *sharded, const dcp_micro_batch_t *micro, bool training,
          double *loss_p)
{
    const dcp_window_t *window = sequence_window(sharded);
    int32_t rank = dcp_comm_rank(sharded->comm);
    if (micro->first_rank != rank) {
        return DCP_FAIL(DCP_ERR_ARG, "rank %d got a micro-batch of rank %d", (int)rank,
                        (int)micro->first_rank);
    }
    if (window != NULL) {
        char *base = dcp_window_base(window, rank);
        dcp_model_set_arena(sharded->model, base + SEQUENCE_HEAD_BYTES,
                            dcp_window_bytes(window, rank) - SEQUENCE_HEAD_BYTES);
    }
    return run_model(sharded, &micro->batch, training, loss_p);
}

dcp_status_t
sequence_run(dcp_sharded_t *sharded, const dcp_micro_batch_t *micro, bool training,
             double *loss_p, int64_t *waited_p)
{
    dcp_status_t status = micro->rank_count > 1
                              ? run_group(sharded, micro, training, loss_p, waited_p)
                              : run_alone(sharded, micro, training, loss_p);
    if (sequence_window(sharded) != NULL) {
        dcp_model_set_arena(sharded->model, NULL, 0);
    }
    return status;
}
