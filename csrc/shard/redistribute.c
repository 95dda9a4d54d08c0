/* From one placement to another: the moves of a plan (redistribute_plan.c).
 *
 * Ranges go from `local` into the transport and from there into `out`:
 * dcp_comm_alltoall_parts asks for pieces, in a window peers copy from `local`. Nothing
 * is put together in between, but for what in place has no other way.
 *
 * Pieces that stay ascend on both sides; so where they move within one memory, those
 * that move down are moved in order, then those that move up in reverse: none lands on
 * one that is still to be moved. Cost: one copy of what moves, two through a transport.
 */
#include "redistribute_private.h"

#include "dcp/alloc.h"

#include <string.h>

static void
move_piece(const redistribute_exchange_t *x, const redistribute_piece_t *piece,
           char *out)
{
    const char *from = (const char *)x->args->local + piece->from * x->item;
    char *to = out + piece->to * x->item;
    if (to != from) {
        memmove(to, from, (size_t)(piece->count * x->item));
    }
}

/* Moves what stays to `out`. */
static void
keep(const redistribute_exchange_t *x, char *out)
{
    if (x->pieces == NULL) {
        redistribute_copy(&x->leaving[x->self], &x->source, x->args->local, &x->target,
                          out, x->item);
        return;
    }
    const char *local = x->args->local;
    for (int64_t i = 0; i < x->piece_count; i++) {
        const redistribute_piece_t *piece = &x->pieces[i];
        if (out + piece->to * x->item <= local + piece->from * x->item) {
            move_piece(x, piece, out);
        }
    }
    for (int64_t i = x->piece_count - 1; i >= 0; i--) {
        const redistribute_piece_t *piece = &x->pieces[i];
        if (out + piece->to * x->item > local + piece->from * x->item) {
            move_piece(x, piece, out);
        }
    }
}

static void
read_part(void *context, int32_t to, int64_t first, int64_t count, void *bytes)
{
    const redistribute_exchange_t *x = context;
    redistribute_read(&x->source, &x->leaving[to], x->args->local, x->item, first,
                      count, bytes);
}

/* Where what comes from a member begins in scratch: one part after the other. */
static char *
scratch_of(const redistribute_exchange_t *x, int32_t member)
{
    int64_t before = 0;
    for (int32_t m = 0; m < member; m++) {
        before += x->recv_counts[m];
    }
    return x->scratch + before * x->item;
}

static void
write_part(void *context, int32_t from, int64_t first, int64_t count, const void *bytes)
{
    const redistribute_exchange_t *x = context;
    if (x->order == STAGE_RECEIVED) {
        memcpy(scratch_of(x, from) + first * x->item, bytes, (size_t)(count * x->item));
    } else {
        redistribute_write(&x->target, &x->arriving[from], x->args->out, x->item, first,
                           count, bytes);
    }
}

/* Copies what a member has for this rank out of its part of the window. */
static void
fetch_part(const redistribute_exchange_t *x, int32_t member, char *out)
{
    const dcp_redistribute_args_t *args = x->args;
    int32_t rank = redistribute_member_rank(x, member);
    dcp_placed_t source;
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->source, rank,
                        &source);
    const redistribute_place_t *place = &x->places[2 * rank];
    const dcp_placed_t *part = &x->arriving[member];
    const char *base = NULL;
    if (part->count > 0) {
        base = dcp_window_base(args->window, (int32_t)place->owner);
        base += place->offset;
    }
    if (x->order == STAGE_RECEIVED) {
        redistribute_read(&source, part, base, x->item, 0, part->count,
                          scratch_of(x, member));
        return;
    }
    redistribute_copy(part, &source, base, &x->target, out, x->item);
}

/* Brings what the others have: into out, or into scratch. */
static dcp_status_t
receive(redistribute_exchange_t *x, char *out)
{
    const dcp_redistribute_args_t *args = x->args;
    if (args->window == NULL) {
        dcp_comm_parts_t parts = {read_part, write_part, x};
        return dcp_comm_alltoall_parts(x->comm, &parts, x->send_counts, x->recv_counts,
                                       args->dtype);
    }
    for (int32_t i = 1; i < x->member_count; i++) {
        /* each begins with its neighbour, so that not all read one part at a time */
        fetch_part(x, (x->self + i) % x->member_count, out);
    }
    return dcp_comm_barrier(args->comm); /* all have read; the fence behind */
}

static dcp_status_t
run_exchange(redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    char *out = args->out;
    switch (x->order) {
    case STAGE_RECEIVED:
        DCP_TRY(receive(x, out));
        keep(x, out);
        for (int32_t m = 0; m < x->member_count; m++) {
            redistribute_write(&x->target, &x->arriving[m], out, x->item, 0,
                               x->recv_counts[m], scratch_of(x, m));
        }
        return DCP_OK;
    case STAGE_ALL:
        keep(x, x->scratch);
        DCP_TRY(receive(x, x->scratch));
        if (args->out_count > 0) {
            memcpy(out, x->scratch, (size_t)(args->out_count * x->item));
        }
        return DCP_OK;
    case KEEP_FIRST:
    default:
        keep(x, out);
        return receive(x, out);
    }
}

static dcp_status_t
run_gather(redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    int64_t *counts = x->recv_counts, before = 0;
    keep(x, args->out);
    counts[x->self] = x->source.count;
    for (int32_t m = 0; m < x->self; m++) {
        before += counts[m];
    }
    char *own = args->out != NULL ? (char *)args->out + before * x->item : NULL;
    return dcp_comm_allgatherv(x->comm, own, counts, args->out, args->dtype);
}

/* No rank has anything that another lacks: every source is the whole. */
static bool
stays_local(const dcp_redistribute_args_t *args)
{
    bool sharded = args->window != NULL;
    for (int32_t a = 0; a < args->mesh.axis_count; a++) {
        sharded = sharded || args->source[a].kind != DCP_REPLICATE;
    }
    return !sharded;
}

dcp_status_t
dcp_redistribute(const dcp_redistribute_args_t *args, dcp_moved_t *moved_p)
{
    dcp_status_t status = redistribute_check(args);
    if (status != DCP_OK) {
        return status;
    }
    redistribute_exchange_t x = {.args = args,
                                 .comm = args->group != NULL ? args->group : args->comm,
                                 .item = dcp_dtype_bytes(args->dtype)};
    x.member_count = dcp_comm_size(x.comm);
    x.self = dcp_comm_rank(x.comm);
    int32_t rank = dcp_comm_rank(args->comm);
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->source, rank,
                        &x.source);
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->target, rank,
                        &x.target);
    redistribute_call_t call = {.what = "redistribute",
                                .shape = args->shape,
                                .dim_count = args->dim_count,
                                .mesh = &args->mesh,
                                .source = args->source,
                                .target = args->target,
                                .dtype = args->dtype,
                                .window = args->window,
                                .rank_count = dcp_comm_size(args->comm)};
    status = redistribute_agree(args->comm, &call, redistribute_prepare(&x));
    if (status == DCP_OK && args->window != NULL) {
        status = redistribute_meet(&x, &call);
    }
    if (status != DCP_OK) {
        goto err_tables;
    }
    dcp_moved_t moved = {.sent_bytes = x.sent_count * x.item,
                         .received_bytes = x.received_count * x.item,
                         .kept_bytes = x.leaving[x.self].count * x.item};
    if (x.order == STAGE_RECEIVED) {
        moved.staged_bytes = x.received_count * x.item;
    } else if (x.order == STAGE_ALL) {
        moved.staged_bytes = args->out_count * x.item;
    }
    if (stays_local(args)) {
        keep(&x, args->out);
    } else {
        status = x.gathers ? run_gather(&x) : run_exchange(&x);
    }
    if (status == DCP_OK) {
        *moved_p = moved;
    }
err_tables:
    dcp_free(x.scratch);
    dcp_free(x.pieces);
    dcp_free(x.memory);
    return status;
}
