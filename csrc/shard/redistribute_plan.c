/* Who gives what to whom, and in which order a rank may move it.
 *
 * The idea: what rank s has and rank t will have is one set in closed form
 * (placement.c), in the same order on both sides, so both know every message without
 * a word. Copies of an element come from the rank that shares t's coordinates on the
 * axes where the source is replicated: a rank keeps what it has, and copies of a group
 * never leave it.
 *
 * In place: three sets of bytes matter, those that leave, those that stay and those
 * that arrive. What stays moves first if it lands on nothing that leaves, else last if
 * nothing arrives on it; else, or where something arrives on what leaves, arriving
 * bytes pass scratch. Sets are judged by their hulls. In a window a new part may also
 * lie on another rank's old one: then all ranks read everything before anyone writes.
 *
 * Cost: O(ranks) sets; in a window O(ranks^2) comparisons. */
#include "redistribute_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <string.h>

/* Rank in the mesh of a member. */
int32_t
redistribute_member_rank(const redistribute_exchange_t *x, int32_t member)
{
    const dcp_redistribute_args_t *args = x->args;
    if (args->group == NULL) {
        return member;
    }
    int32_t step = 1;
    for (int32_t a = args->mesh.axis_count - 1; a > args->group_axis; a--) {
        step *= args->mesh.sizes[a];
    }
    return dcp_comm_rank(args->comm) + (member - x->self) * step;
}

/* Does `rank` give to this rank, and take from it? */
static bool
exchanges(const redistribute_exchange_t *x, int32_t rank)
{
    const dcp_redistribute_args_t *args = x->args;
    int32_t own = dcp_comm_rank(args->comm);
    for (int32_t a = 0; a < args->mesh.axis_count; a++) {
        if (args->source[a].kind == DCP_REPLICATE
            && dcp_mesh_coordinate(&args->mesh, rank, a)
                   != dcp_mesh_coordinate(&args->mesh, own, a)) {
            return false;
        }
    }
    return true;
}

static void
local_of(const redistribute_exchange_t *x, const dcp_placement_t *placements,
         int32_t rank, dcp_placed_t *placed_p)
{
    dcp_placement_local(x->args->shape, x->args->dim_count, &x->args->mesh, placements,
                        rank, placed_p);
}

/* Fills the tables; finds out whether an allgather does it: all members' new parts are
 * the whole, and their old ones follow each other. The same answer on all of them. */
static void
plan_exchange(redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    int64_t next = 0, whole = 1, together;
    for (int32_t d = 0; d < args->dim_count; d++) {
        whole *= args->shape[d];
    }
    x->gathers = args->window == NULL;
    for (int32_t m = 0; m < x->member_count; m++) {
        int32_t rank = redistribute_member_rank(x, m);
        dcp_placed_t source, target;
        local_of(x, args->source, rank, &source);
        local_of(x, args->target, rank, &target);
        bool follows = source.count == 0
                       || (dcp_placed_run(&source, 0, &together) == next
                           && together == source.count);
        x->gathers =
            x->gathers && follows && target.count == whole && exchanges(x, rank);
        next += source.count;
        x->leaving[m] = x->arriving[m] = (dcp_placed_t){.dim_count = args->dim_count};
        if (exchanges(x, rank)) {
            x->leaving[m] = dcp_placed_overlap(&x->source, &target);
            x->arriving[m] = dcp_placed_overlap(&x->target, &source);
        }
        x->send_counts[m] = m == x->self ? 0 : x->leaving[m].count;
        x->recv_counts[m] = m == x->self ? 0 : x->arriving[m].count;
        x->sent_count += x->send_counts[m];
        x->received_count += x->recv_counts[m];
    }
    x->gathers = x->gathers && next == whole;
}

typedef struct range {
    const char *low, *high; /* bytes [low, high) */
} range_t;

static range_t
range_of(const void *base, int64_t bytes)
{
    return (range_t){base, (const char *)base + (bytes > 0 ? bytes : 0)};
}

static bool
touches(range_t a, range_t b)
{
    return a.low < b.high && b.low < a.high && a.low < a.high && b.low < b.high;
}

/* From the first to the last byte of a part of what is held at base. */
static range_t
hull_of(const redistribute_exchange_t *x, const dcp_placed_t *held,
        const dcp_placed_t *part, const void *base)
{
    if (part->count == 0) {
        return range_of(base, 0);
    }
    int64_t together;
    int64_t first = dcp_placed_position(held, dcp_placed_run(part, 0, &together));
    int64_t last =
        dcp_placed_position(held, dcp_placed_run(part, part->count - 1, &together));
    return range_of((const char *)base + first * x->item, (last + 1 - first) * x->item);
}

/* Does any part of the new one, what stays included, land on what leaves? */
static bool
lands_on_leaving(const redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    for (int32_t m = 0; m < x->member_count; m++) {
        range_t to = hull_of(x, &x->target, &x->arriving[m], args->out);
        for (int32_t n = 0; n < x->member_count; n++) {
            if (n != x->self
                && touches(to, hull_of(x, &x->source, &x->leaving[n], args->local))) {
                return true;
            }
        }
    }
    return false;
}

/* Does a new part lie on another rank's old one? The same answer on all ranks. */
static bool
crosses(const redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    int32_t ranks = dcp_comm_size(args->comm);
    for (int32_t i = 0; i < ranks; i++) {
        dcp_placed_t target, source;
        local_of(x, args->target, i, &target);
        const redistribute_place_t *out = &x->places[2 * i + 1];
        for (int32_t j = 0; j < ranks; j++) {
            const redistribute_place_t *local = &x->places[2 * j];
            if (i == j || out->owner < 0 || out->owner != local->owner) {
                continue;
            }
            local_of(x, args->source, j, &source);
            if (out->offset < local->offset + source.count * x->item
                && local->offset < out->offset + target.count * x->item) {
                return true;
            }
        }
    }
    return false;
}

static redistribute_order_t
choose_order(const redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    if (!touches(range_of(args->out, args->out_count * x->item),
                 range_of(args->local, args->local_count * x->item))) {
        return KEEP_FIRST;
    }
    if (x->gathers) {
        return KEEP_FIRST; /* all that leaves is what stays, and leaves from out */
    }
    return lands_on_leaving(x) ? STAGE_RECEIVED : KEEP_FIRST;
}

/* The pieces that stay; with pieces NULL they are counted. */
static int64_t
list_pieces(const redistribute_exchange_t *x, redistribute_piece_t *pieces)
{
    const dcp_placed_t *kept = &x->leaving[x->self];
    int64_t count = 0, together;
    for (int64_t at = 0; at < kept->count; at += together) {
        int64_t element = dcp_placed_run(kept, at, &together);
        if (pieces != NULL) {
            pieces[count] = (redistribute_piece_t){
                dcp_placed_position(&x->source, element),
                dcp_placed_position(&x->target, element), together};
        }
        count++;
    }
    return count;
}

/* Where in the window something begins. */
static redistribute_place_t
find_place(const dcp_redistribute_args_t *args, const void *base, int64_t bytes)
{
    for (int32_t r = 0; r < dcp_comm_size(args->comm) && bytes > 0; r++) {
        const char *part = dcp_window_base(args->window, r);
        if (part != NULL && part <= (const char *)base
            && (const char *)base < part + dcp_window_bytes(args->window, r)) {
            return (redistribute_place_t){r, (const char *)base - part};
        }
    }
    return (redistribute_place_t){-1, 0};
}

static dcp_status_t
check_window(const dcp_redistribute_args_t *args)
{
    int64_t bytes = args->local_count * dcp_dtype_bytes(args->dtype);
    redistribute_place_t place = find_place(args, args->local, bytes);
    if (bytes == 0) {
        return DCP_OK;
    }
    if (place.owner < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "local lies in no part of the window: peers could not read it");
    }
    int64_t room = dcp_window_bytes(args->window, (int32_t)place.owner) - place.offset;
    if (bytes > room) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "local has %" PRId64 " bytes from byte %" PRId64
                        " of a part of the window on, which leaves %" PRId64,
                        bytes, place.offset, room);
    }
    return DCP_OK;
}

dcp_status_t
redistribute_check(const dcp_redistribute_args_t *args)
{
    int64_t item = dcp_dtype_bytes(args->dtype);
    if (item == 0) {
        return DCP_FAIL(DCP_ERR_ARG, "dtype %d is none of dcp_dtype_t",
                        (int)args->dtype);
    }
    DCP_TRY(
        dcp_placement_check(args->shape, args->dim_count, &args->mesh, args->source));
    DCP_TRY(
        dcp_placement_check(args->shape, args->dim_count, &args->mesh, args->target));
    DCP_TRY(redistribute_check_comm(args->comm, &args->mesh));
    dcp_placed_t source, target;
    int32_t rank = dcp_comm_rank(args->comm);
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->source, rank,
                        &source);
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->target, rank,
                        &target);
    char text[256];
    if (args->local_count != source.count
        || (args->local == NULL && source.count > 0)) {
        dcp_placement_text(args->shape, args->dim_count, &args->mesh, args->source,
                           text, sizeof text);
        return DCP_FAIL(DCP_ERR_ARG,
                        "local has %" PRId64 " elements: rank %d holds %" PRId64
                        " of %s",
                        args->local_count, (int)rank, source.count, text);
    }
    if (args->out_count != target.count || (args->out == NULL && target.count > 0)) {
        dcp_placement_text(args->shape, args->dim_count, &args->mesh, args->target,
                           text, sizeof text);
        return DCP_FAIL(DCP_ERR_ARG,
                        "out has %" PRId64 " elements: rank %d is to hold %" PRId64
                        " of %s",
                        args->out_count, (int)rank, target.count, text);
    }
    if (args->group != NULL) {
        if (args->group_axis < 0 || args->group_axis >= args->mesh.axis_count
            || dcp_comm_size(args->group) != args->mesh.sizes[args->group_axis]) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "group has %d ranks: they must be those of mesh axis %d",
                            (int)dcp_comm_size(args->group), (int)args->group_axis);
        }
        for (int32_t a = 0; a < args->mesh.axis_count; a++) {
            if (a != args->group_axis && args->source[a].kind != DCP_REPLICATE) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "group_axis %d: the source must be replicated on axis "
                                "%d to exchange within a group",
                                (int)args->group_axis, (int)a);
            }
        }
    }
    return args->window != NULL ? check_window(args) : DCP_OK;
}

/* Tables, the plan, and what it needs of memory. */
dcp_status_t
redistribute_prepare(redistribute_exchange_t *x)
{
    const dcp_redistribute_args_t *args = x->args;
    int64_t count = x->member_count, ranks = dcp_comm_size(args->comm);
    int64_t each = 2 * (int64_t)(sizeof(dcp_placed_t) + sizeof(int64_t));
    int64_t place_bytes = (int64_t)(sizeof(int64_t) + 2 * sizeof(redistribute_place_t));
    int64_t bytes = count * each + (args->window != NULL ? ranks * place_bytes : 0);
    DCP_TRY(dcp_alloc(bytes, "tables of a redistribution", &x->memory));
    x->leaving = x->memory;
    x->arriving = x->leaving + count;
    x->send_counts = (int64_t *)(x->arriving + count);
    x->recv_counts = x->send_counts + count;
    if (args->window != NULL) {
        x->place_counts = x->recv_counts + count;
        x->places = (redistribute_place_t *)(x->place_counts + ranks);
    }
    plan_exchange(x);
    x->order = choose_order(x);
    void *memory;
    if (touches(range_of(args->out, args->out_count * x->item),
                range_of(args->local, args->local_count * x->item))) {
        x->piece_count = list_pieces(x, NULL);
        DCP_TRY(dcp_alloc_array(x->piece_count, (int64_t)sizeof(redistribute_piece_t),
                                "pieces that move in place", &memory));
        x->pieces = memory;
        list_pieces(x, x->pieces);
    }
    if (x->order == STAGE_RECEIVED) {
        DCP_TRY(dcp_alloc_array(x->received_count, x->item,
                                "scratch of a redistribution", &memory));
        x->scratch = memory;
    }
    return DCP_OK;
}

/* Tells all where in the window everything lies. Where new parts lie on others' old
 * ones, nothing may be written before all is read. */
dcp_status_t
redistribute_meet(redistribute_exchange_t *x, const redistribute_call_t *call)
{
    const dcp_redistribute_args_t *args = x->args;
    int32_t ranks = dcp_comm_size(args->comm), rank = dcp_comm_rank(args->comm);
    for (int32_t r = 0; r < ranks; r++) {
        x->place_counts[r] =
            2 * (int64_t)(sizeof(redistribute_place_t) / sizeof(int64_t));
    }
    redistribute_place_t *own = &x->places[2 * rank];
    own[0] = find_place(args, args->local, args->local_count * x->item);
    own[1] = find_place(args, args->out, args->out_count * x->item);
    DCP_TRY(dcp_comm_allgatherv(args->comm, own, x->place_counts, x->places, DCP_I64));
    if (!crosses(x)) {
        return DCP_OK;
    }
    x->order = STAGE_ALL;
    dcp_free(x->scratch);
    x->scratch = NULL;
    void *memory = NULL;
    dcp_status_t status = dcp_alloc_array(args->out_count, x->item,
                                          "scratch of a redistribution", &memory);
    x->scratch = memory;
    return redistribute_agree(args->comm, call, status);
}
