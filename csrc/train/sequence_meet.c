/* Ranks of a group meet in a window, and whole micro-batches run.
 *
 * A rank's part of the window is
 *
 *   notice 0 | notice 1 | exchange | arena
 *
 * Before others read a layer's arrays a rank writes where they lie in its part into a
 * notice and enters a barrier; two notices in turn, since a rank may be one meeting
 * ahead of another. A notice carries the identity of micro-batch and call, so that
 * ranks that do not compute the same thing fail, all of them, instead of mixing rows.
 * The last barrier of a micro-batch keeps a part as it is until all have read it. */
#include "sequence.h"

#include "dcp/clock.h"

#include <inttypes.h>
#include <string.h>

enum { PLACES = 7, NOTICE_BYTES = SEQUENCE_HEAD_BYTES / 2 };

/* Bytes from the base of a rank's part. */
typedef struct notice {
    int64_t identity;
    int64_t places[PLACES];
    int64_t exchange;
} notice_t;

static char *
base_of(const sequence_pass_t *pass, int32_t rank)
{
    return dcp_window_base(pass->window, pass->first_rank + rank);
}

static notice_t *
notice_of(const sequence_pass_t *pass, int32_t rank)
{
    _Static_assert(sizeof(notice_t) <= NOTICE_BYTES, "a notice fits its place");
    return (notice_t *)(void *)(base_of(pass, rank) + (pass->turn & 1) * NOTICE_BYTES);
}

int64_t
sequence_pass_rows(const sequence_pass_t *pass, int32_t rank)
{
    return pass->cut.first_row[rank + 1] - pass->cut.first_row[rank];
}

void
sequence_pass_heads(const sequence_pass_t *pass, int32_t rank,
                    sequence_heads_t *heads_p)
{
    sequence_heads_of(pass->config, pass->cut.ulysses, rank % pass->cut.ulysses,
                      heads_p);
}

bool
sequence_pass_partner(const sequence_pass_t *pass, int32_t rank)
{
    return rank != pass->rank
           && rank / pass->cut.ulysses == pass->rank / pass->cut.ulysses;
}

static dcp_status_t
barrier(sequence_pass_t *pass)
{
    int64_t start = dcp_clock_ns();
    dcp_status_t status = dcp_comm_barrier(pass->comm);
    pass->waited_ns += dcp_clock_ns() - start;
    return status;
}

static void
show_rank(const sequence_pass_t *pass, int32_t rank, const sequence_view_t *own)
{
    const notice_t *notice = notice_of(pass, rank);
    sequence_view_t *view = &pass->views[rank];
    sequence_heads_t heads;
    sequence_pass_heads(pass, rank, &heads);
    *view = *own; /* strides */
    float **const pointers[PLACES] = {&view->q,   &view->k,    &view->v, &view->out,
                                      &view->lse, &view->dout, &view->dq};
    for (int i = 0; i < PLACES; i++) {
        *pointers[i] = (float *)(void *)(base_of(pass, rank) + notice->places[i]);
    }
    view->partial =
        (float *)(void *)(base_of(pass, rank) + notice->exchange)
        + pass->cut.first_row[pass->rank] * 2 * heads.kv_count * pass->config->head_dim;
}

static dcp_status_t
window_meet(sequence_pass_t *pass, const sequence_view_t *own)
{
    const float *pointers[PLACES] = {own->q,   own->k,    own->v, own->out,
                                     own->lse, own->dout, own->dq};
    const char *base = base_of(pass, pass->rank);
    notice_t notice = {.exchange = (const char *)pass->exchange - base};
    pass->turn++;
    notice.identity = pass->identity + (int64_t)pass->turn;
    for (int i = 0; i < PLACES; i++) {
        notice.places[i] = pointers[i] != NULL ? (const char *)pointers[i] - base : 0;
    }
    *notice_of(pass, pass->rank) = notice;
    DCP_TRY(barrier(pass));
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        if (notice_of(pass, rank)->identity != notice.identity) {
            return sequence_fail_identity(pass, rank);
        }
        show_rank(pass, rank, own);
    }
    return DCP_OK;
}

dcp_status_t
sequence_fail_identity(const sequence_pass_t *pass, int32_t rank)
{
    return DCP_FAIL(DCP_ERR_MISMATCH,
                    "ranks %d and %d share a micro-batch of ranks %d..%d, but their "
                    "tokens, sequences or settings differ",
                    (int)(pass->first_rank + pass->rank),
                    (int)(pass->first_rank + rank), (int)pass->first_rank,
                    (int)(pass->first_rank + pass->cut.rank_count - 1));
}

dcp_status_t
sequence_pass_meet(sequence_pass_t *pass, dcp_queue_t *queue,
                   const sequence_view_t *own, bool backward)
{
    if (pass->window == NULL) {
        return sequence_mail_meet(pass, queue, own, backward);
    }
    DCP_TRY(pass->device->fence(queue));
    return window_meet(pass, own);
}

dcp_status_t
sequence_pass_part(sequence_pass_t *pass, dcp_queue_t *queue,
                   const sequence_view_t *own, bool backward)
{
    if (pass->window == NULL) {
        return sequence_mail_part(pass, queue, own, backward);
    }
    DCP_TRY(pass->device->fence(queue));
    return barrier(pass);
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
    if (status == DCP_OK && pass.window != NULL) {
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
    if (micro->first_rank != rank || micro->rank_count != 1) {
        return DCP_FAIL(DCP_ERR_ARG, "rank %d got a micro-batch of %d ranks from %d",
                        (int)rank, (int)micro->rank_count, (int)micro->first_rank);
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
