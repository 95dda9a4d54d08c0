/* Collectives over shared memory: rounds, and pieces that stay in cache.
 *
 * Data go through each rank's arena in pieces: a rank copies its piece k into the arena
 * copy of the coming round, all pass the round, everybody reads what it needs from the
 * others' arenas (and writes its next piece to the other copy before the next round).
 * So each step costs one round, memory is read and written once, and the copies between
 * ranks happen in cache. What a rank keeps for itself never passes an arena. Every rank
 * cuts each slice into the same number of pieces, so that ragged slices finish
 * together.
 *
 *   reduce_scatterv  arena of s, step k:  | piece k of slice 0 | of slice 1 | ...
 * without s allreduce        copies 0, 1 hold inputs, copies 2, 3 results: round k has
 * input piece k and the results of piece k - 1
 *
 * Sums are taken in rank order by one rank per element, so all get the same bits. */
#include "shm.h"

#include "dcp/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PIECE_ITEMS = 16, SMALL_BYTES = 64 * 1024 };

typedef struct round_context {
    shm_comm_t *comm;
    uint64_t target; /* arrivals that end the round */
} round_context_t;

static bool
round_ready(void *context)
{
    round_context_t *round = context;
    return atomic_load_explicit(&round->comm->head->arrived, memory_order_seq_cst)
           >= round->target;
}

static bool
round_awaits(void *context, int32_t rank)
{
    round_context_t *round = context;
    return atomic_load(&round->comm->head->members[rank].phase) < round->comm->phase;
}

/* All members' calls of this round agree? The first disagreement ends the run. */
static dcp_status_t
compare_calls(shm_comm_t *comm)
{
    int32_t size = comm->base.size;
    uint64_t copy = comm->phase & 1;
    for (int32_t r = 0; r < size; r++) {
        comm->sources[r] = &comm->head->members[r].calls[copy];
    }
    dcp_status_t status =
        comm_call_compare((const comm_call_t *const *)comm->sources, size);
    if (status != DCP_OK) {
        char text[COMM_TEXT_BYTES];
        snprintf(text, sizeof text, "%s", dcp_last_error());
        shm_fail(comm->root, status, text);
        dcp_set_last_error(text);
    }
    return status;
}

dcp_status_t
shm_round(shm_comm_t *comm, const comm_call_t *call, const shm_note_t *note)
{
    uint64_t phase = ++comm->phase;
    shm_head_t *head = comm->head;
    shm_member_t *own = &head->members[comm->base.rank];
    if (call != NULL) {
        comm->call = call;
        own->calls[phase & 1] = *call;
    }
    if (note != NULL) {
        own->notes[phase & 1] = *note;
    }
    atomic_store_explicit(&own->phase, phase, memory_order_release);
    round_context_t context = {comm, phase * (uint64_t)comm->base.size};
    if (atomic_fetch_add(&head->arrived, 1) + 1 == context.target) {
        for (int32_t r = 0; r < comm->base.size; r++) {
            if (r != comm->base.rank) {
                shm_ring(comm->root, comm->members[r]);
            }
        }
    } else {
        shm_waiting_t waiting = {round_ready, round_awaits, &context};
        int64_t start = call != NULL ? dcp_clock_ns() : 0;
        DCP_TRY(shm_wait(comm, &waiting, comm->root->timeout_ns));
        /* of a call's rounds, the opening one waits for ranks that have not come */
        comm->base.wait_ns += call != NULL ? dcp_clock_ns() - start : 0;
    }
    return call != NULL ? compare_calls(comm) : DCP_OK;
}

const shm_note_t *
shm_note_of(const shm_comm_t *comm, int32_t rank)
{
    return &comm->head->members[rank].notes[comm->phase & 1];
}

dcp_status_t
shm_agree(shm_comm_t *comm, const comm_call_t *call, shm_note_t *note,
          dcp_status_t status)
{
    note->status = (int32_t)status;
    if (status != DCP_OK) {
        snprintf(note->text, sizeof note->text, "%s", dcp_last_error());
    }
    DCP_TRY(shm_round(comm, call, note));
    for (int32_t r = 0; r < comm->base.size; r++) {
        const shm_note_t *other = shm_note_of(comm, r);
        if (other->status != DCP_OK) {
            return DCP_FAIL((dcp_status_t)other->status, "rank %d: %s",
                            (int)comm->members[r], other->text);
        }
    }
    return DCP_OK;
}

/* Copy `copy` (0, 1: inputs, 2, 3: results) of a rank's arena. */
static char *
arena(const shm_comm_t *comm, int32_t rank, uint64_t copy)
{
    return comm->arenas + (4 * rank + (int64_t)copy) * comm->arena_bytes;
}

typedef struct piece {
    int64_t first, count; /* elements */
} piece_t;

/* Piece `step` of `steps` of a slice: whole cache lines but for the last. */
static piece_t
piece_of(int64_t count, int64_t steps, int64_t step)
{
    int64_t each = (count + steps - 1) / steps;
    each = (each + PIECE_ITEMS - 1) / PIECE_ITEMS * PIECE_ITEMS;
    int64_t first = step * each < count ? step * each : count;
    return (piece_t){first, count - first < each ? count - first : each};
}

static int64_t
max_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Steps so that pieces of `parts` slices of `bytes` in all fit an arena copy. */
static int64_t
steps_for(const shm_comm_t *comm, int64_t bytes, int64_t item, int64_t parts)
{
    int64_t room = comm->arena_bytes - parts * PIECE_ITEMS * item;
    return max_of(1, (bytes + room - 1) / room);
}

static void
copy_bytes(void *to, const void *from, int64_t bytes)
{
    if (bytes > 0 && to != from) {
        memcpy(to, from, (size_t)bytes);
    }
}

static int64_t
item_of(const comm_call_t *call)
{
    return dcp_dtype_bytes((dcp_dtype_t)call->dtype);
}

dcp_status_t
shm_barrier(dcp_comm_t *base, const comm_call_t *call)
{
    return shm_round((shm_comm_t *)base, call, NULL);
}

dcp_status_t
shm_allgatherv(dcp_comm_t *base, const comm_call_t *call, const void *send,
               const int64_t *counts, void *recv)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    int64_t item = item_of(call), largest = 0, own_start = 0;
    for (int32_t r = 0; r < base->size; r++) {
        largest = max_of(largest, counts[r]);
        own_start += r < base->rank ? counts[r] * item : 0;
    }
    int64_t steps = steps_for(comm, largest * item, item, 1);
    for (int64_t step = 0; step < steps; step++) {
        piece_t own = piece_of(counts[base->rank], steps, step);
        const char *from = own.count > 0 ? (const char *)send + own.first * item : NULL;
        copy_bytes(arena(comm, base->rank, (comm->phase + 1) & 1), from,
                   own.count * item);
        if (own.count > 0) {
            copy_bytes((char *)recv + own_start + own.first * item, from,
                       own.count * item);
        }
        DCP_TRY(shm_round(comm, step == 0 ? call : NULL, NULL));
        char *to = recv;
        for (int32_t r = 0; r < base->size; r++) {
            piece_t piece = piece_of(counts[r], steps, step);
            if (r != base->rank && piece.count > 0) {
                copy_bytes(to + piece.first * item, arena(comm, r, comm->phase & 1),
                           piece.count * item);
            }
            to += counts[r] * item;
        }
    }
    return DCP_OK;
}

/* Pieces lie in an arena in rank order, each on a border of PIECE_ITEMS. */
static int64_t
room_of(piece_t piece, int64_t item)
{
    return (piece.count + PIECE_ITEMS - 1) / PIECE_ITEMS * PIECE_ITEMS * item;
}

dcp_status_t
shm_reduce_scatterv(dcp_comm_t *base, const comm_call_t *call, const void *send,
                    const int64_t *counts, void *recv)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    int64_t item = item_of(call), least = counts[0];
    for (int32_t r = 1; r < base->size; r++) {
        least = counts[r] < least ? counts[r] : least;
    }
    int64_t steps = steps_for(comm, (call->total - least) * item, item, base->size);
    for (int64_t step = 0; step < steps; step++) {
        char *to = arena(comm, base->rank, (comm->phase + 1) & 1);
        const char *slice = send, *own_slice = NULL;
        /* where this rank's piece lies in arenas: of ranks before it, and after it */
        int64_t before = 0;
        for (int32_t r = 0; r < base->size; r++) {
            piece_t piece = piece_of(counts[r], steps, step);
            if (r == base->rank) {
                own_slice = slice;
            } else {
                copy_bytes(to, slice + piece.first * item, piece.count * item);
                to += room_of(piece, item);
            }
            before += r < base->rank ? room_of(piece, item) : 0;
            slice += counts[r] * item;
        }
        DCP_TRY(shm_round(comm, step == 0 ? call : NULL, NULL));
        piece_t own = piece_of(counts[base->rank], steps, step);
        for (int32_t r = 0; r < base->size && own.count > 0; r++) {
            /* an arena lacks the piece of its own rank */
            int64_t missing =
                r < base->rank ? room_of(piece_of(counts[r], steps, step), item) : 0;
            comm->sources[r] = r == base->rank
                                   ? own_slice + own.first * item
                                   : arena(comm, r, comm->phase & 1) + before - missing;
        }
        if (own.count > 0) {
            comm_reduce((char *)recv + own.first * item, comm->sources, base->size,
                        own.count, (dcp_dtype_t)call->dtype, DCP_SUM);
        }
    }
    return DCP_OK;
}

/* Few bytes: everybody reads everything and reduces it all, in one round. */
static dcp_status_t
allreduce_small(shm_comm_t *comm, const comm_call_t *call, const void *send, void *recv)
{
    int32_t rank = comm->base.rank, size = comm->base.size;
    copy_bytes(arena(comm, rank, (comm->phase + 1) & 1), send,
               call->total * item_of(call));
    DCP_TRY(shm_round(comm, call, NULL));
    for (int32_t r = 0; r < size; r++) {
        comm->sources[r] = r == rank ? send : arena(comm, r, comm->phase & 1);
    }
    comm_reduce(recv, comm->sources, size, call->total, (dcp_dtype_t)call->dtype,
                (dcp_reduce_op_t)call->detail);
    return DCP_OK;
}

/* Puts piece `step` but for this rank's part of it into the arena of the coming round.
 */
static void
stage_piece(shm_comm_t *comm, const comm_call_t *call, const char *send, int64_t steps,
            int64_t step)
{
    int64_t item = item_of(call);
    piece_t piece = piece_of(call->total, steps, step);
    piece_t own = piece_of(piece.count, comm->base.size, comm->base.rank);
    char *to = arena(comm, comm->base.rank, (comm->phase + 1) & 1);
    const char *from = send + piece.first * item;
    int64_t after = own.first + own.count;
    copy_bytes(to, from, own.first * item);
    copy_bytes(to + after * item, from + after * item, (piece.count - after) * item);
}

/* Copies the others' results of piece `step`, shown in the round just passed. */
static void
fetch_results(shm_comm_t *comm, const comm_call_t *call, char *recv, int64_t steps,
              int64_t step)
{
    int64_t item = item_of(call);
    piece_t piece = piece_of(call->total, steps, step);
    for (int32_t r = 0; r < comm->base.size; r++) {
        piece_t part = piece_of(piece.count, comm->base.size, r);
        if (r != comm->base.rank) {
            copy_bytes(recv + (piece.first + part.first) * item,
                       arena(comm, r, 2 + (comm->phase & 1)), part.count * item);
        }
    }
}

dcp_status_t
shm_allreduce(dcp_comm_t *base, const comm_call_t *call, const void *send, void *recv)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    int64_t item = item_of(call), bytes = call->total * item;
    if (bytes <= SMALL_BYTES / base->size && bytes <= comm->arena_bytes) {
        return allreduce_small(comm, call, send, recv);
    }
    int64_t steps = steps_for(comm, bytes, item, 1);
    stage_piece(comm, call, send, steps, 0);
    DCP_TRY(shm_round(comm, call, NULL));
    for (int64_t step = 0; step < steps; step++) {
        uint64_t copy = comm->phase & 1;
        if (step > 0) {
            fetch_results(comm, call, recv, steps, step - 1);
        }
        piece_t piece = piece_of(call->total, steps, step);
        piece_t own = piece_of(piece.count, base->size, base->rank);
        int64_t start = (piece.first + own.first) * item;
        for (int32_t r = 0; r < base->size; r++) {
            comm->sources[r] = r == base->rank
                                   ? (const char *)send + start
                                   : arena(comm, r, copy) + own.first * item;
        }
        /* the results for round phase + 1; nobody reads that copy any more */
        char *results = arena(comm, base->rank, 2 + ((comm->phase + 1) & 1));
        comm_reduce(results, comm->sources, base->size, own.count,
                    (dcp_dtype_t)call->dtype, (dcp_reduce_op_t)call->detail);
        if (own.count > 0) {
            copy_bytes((char *)recv + start, results, own.count * item);
        }
        if (step + 1 < steps) {
            stage_piece(comm, call, send, steps, step + 1);
        }
        DCP_TRY(shm_round(comm, NULL, NULL));
    }
    fetch_results(comm, call, recv, steps, steps - 1);
    return DCP_OK;
}

dcp_status_t
shm_broadcast(dcp_comm_t *base, const comm_call_t *call, void *data)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    int64_t item = item_of(call);
    int64_t steps = steps_for(comm, call->total * item, item, 1);
    for (int64_t step = 0; step < steps; step++) {
        piece_t piece = piece_of(call->total, steps, step);
        bool any = piece.count > 0;
        char *own = any ? (char *)data + piece.first * item : NULL;
        if (call->detail == base->rank) {
            copy_bytes(arena(comm, base->rank, (comm->phase + 1) & 1), own,
                       piece.count * item);
        }
        DCP_TRY(shm_round(comm, step == 0 ? call : NULL, NULL));
        if (call->detail != base->rank) {
            copy_bytes(own, arena(comm, call->detail, comm->phase & 1),
                       piece.count * item);
        }
    }
    return DCP_OK;
}

/* Row of rank `rank` in the table of this alltoallv: what it sends, what it expects. */
static int64_t *
row_of(const shm_comm_t *comm, int32_t rank, int32_t side)
{
    int64_t size = comm->base.size;
    int64_t copy = (int64_t)(comm->alltoall_count & 1);
    return comm->rows + ((copy * size + rank) * 2 + side) * size;
}

/* What s sends to r, but for itself, must be what r expects from s; the largest total
 * that a rank sends to others. All ranks look at all pairs in the same order. */
static dcp_status_t
check_rows(shm_comm_t *comm, const comm_call_t *call, int64_t *largest_p)
{
    int64_t largest = 0;
    for (int32_t s = 0; s < comm->base.size; s++) {
        const int64_t *sends = row_of(comm, s, 0);
        int64_t total = 0;
        for (int32_t r = 0; r < comm->base.size; r++) {
            int64_t expected = row_of(comm, r, 1)[s];
            if (sends[r] != expected) {
                char text[COMM_TEXT_BYTES];
                const char *name = dcp_dtype_name((dcp_dtype_t)call->dtype);
                snprintf(text, sizeof text,
                         "alltoallv (call %" PRId64 "): rank %d sends %" PRId64
                         " %s to rank %d, which expects %" PRId64,
                         call->sequence, (int)comm->members[s], sends[r], name,
                         (int)comm->members[r], expected);
                shm_fail(comm->root, DCP_ERR_MISMATCH, text);
                return DCP_FAIL(DCP_ERR_MISMATCH, "%s", text);
            }
            total += r != s ? sends[r] : 0;
        }
        largest = max_of(largest, total);
    }
    *largest_p = largest;
    return DCP_OK;
}

/* Puts step's pieces for the others into the arena of the coming round; copies this
 * rank's own piece. */
static void
stage_all(shm_comm_t *comm, int64_t item, const comm_exchange_t *exchange,
          int64_t steps, int64_t step)
{
    const dcp_comm_parts_t *parts = exchange->parts;
    const int64_t *counts = exchange->send_counts;
    const char *send = exchange->send;
    char *to = arena(comm, comm->base.rank, (comm->phase + 1) & 1);
    for (int32_t r = 0; r < comm->base.size; r++) {
        piece_t piece = piece_of(counts[r], steps, step);
        if (r != comm->base.rank && piece.count > 0) {
            if (parts != NULL) {
                parts->read(parts->context, r, piece.first, piece.count, to);
            } else {
                copy_bytes(to, send + piece.first * item, piece.count * item);
            }
            to += room_of(piece, item);
        }
        send = send != NULL ? send + counts[r] * item : NULL;
    }
}

/* Copies the pieces for this rank from the arenas of the round just passed. */
static void
fetch_all(shm_comm_t *comm, int64_t item, const comm_exchange_t *exchange,
          int64_t steps, int64_t step)
{
    const dcp_comm_parts_t *parts = exchange->parts;
    int32_t rank = comm->base.rank;
    char *recv = exchange->recv;
    for (int32_t s = 0; s < comm->base.size; s++) {
        const int64_t *sends = row_of(comm, s, 0);
        piece_t piece = piece_of(sends[rank], steps, step);
        if (s != rank && piece.count > 0) {
            const char *from = arena(comm, s, comm->phase & 1);
            for (int32_t r = 0; r < rank; r++) {
                from += r != s ? room_of(piece_of(sends[r], steps, step), item) : 0;
            }
            if (parts != NULL) {
                parts->write(parts->context, s, piece.first, piece.count, from);
            } else {
                copy_bytes(recv + piece.first * item, from, piece.count * item);
            }
        }
        recv = recv != NULL ? recv + sends[rank] * item : NULL;
    }
}

dcp_status_t
shm_alltoallv(dcp_comm_t *base, const comm_call_t *call,
              const comm_exchange_t *exchange)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    const int64_t *send_counts = exchange->send_counts;
    const int64_t *recv_counts = exchange->recv_counts;
    int64_t item = item_of(call), size = base->size, own_total = 0, largest;
    /* two tables in turn: before this one is written again, all pass another alltoallv
     */
    comm->alltoall_count++;
    memcpy(row_of(comm, base->rank, 0), send_counts, (size_t)size * sizeof(int64_t));
    memcpy(row_of(comm, base->rank, 1), recv_counts, (size_t)size * sizeof(int64_t));
    int64_t send_start = 0, recv_start = 0;
    for (int32_t r = 0; r < size; r++) {
        own_total += r != base->rank ? send_counts[r] : 0;
        send_start += r < base->rank ? send_counts[r] : 0;
        recv_start += r < base->rank ? recv_counts[r] : 0;
    }
    /* a rank with little to send shows it in the first round, in the hope that all have
     * little: then this round is the only one */
    if (steps_for(comm, own_total * item, item, size) == 1) {
        stage_all(comm, item, exchange, 1, 0);
    }
    DCP_TRY(shm_round(comm, call, NULL));
    DCP_TRY(check_rows(comm, call, &largest));
    int64_t own_bytes = send_counts[base->rank] * item;
    if (own_bytes > 0) {
        copy_bytes((char *)exchange->recv + recv_start * item,
                   (const char *)exchange->send + send_start * item, own_bytes);
    }
    int64_t steps = steps_for(comm, largest * item, item, size);
    if (steps == 1) {
        fetch_all(comm, item, exchange, 1, 0);
        return DCP_OK;
    }
    for (int64_t step = 0; step < steps; step++) {
        stage_all(comm, item, exchange, steps, step);
        DCP_TRY(shm_round(comm, NULL, NULL));
        fetch_all(comm, item, exchange, steps, step);
    }
    return DCP_OK;
}
