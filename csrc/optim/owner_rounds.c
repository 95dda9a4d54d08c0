/* Rounds of units between the ranks that hold them and the ranks that own them.
 *
 * With windows every rank brings two slabs; a slab takes the units that it owns of one
 * round. Holders put straight into the owner's slab, the owner computes there in place,
 * holders read the result from there: nothing is copied in between. Barriers lie
 * between put and compute, and between compute and apply; since rounds take turns with
 * the slabs, also from one run to the next, none is needed between apply and the next
 * put.
 *
 *   round 0   put a |  compute a  | apply a                            (slabs a and b)
 *   round 1                         put b |  compute b  | apply b
 *
 * Without windows, overlapping ranges travel as messages from a stage of the holder
 * straight into the owner's slab, and back into a second stage. A courier thread with a
 * communicator of its own carries them while this thread computes:
 *
 *   this thread  put 0    put 1 compute 0    put 2 compute 1 apply 0  ...
 *   courier         to 0       to 1            back 0, to 2  ...
 *
 * What a rank holds of its own units is put just before and applied just after their
 * computation: around that, messages of the rounds before and after use the slab. All
 * ranks post the same jobs in the same order, so none can deadlock. With C as in
 * owners.c a rank holds 2 C elements with windows and 4 C without.
 *
 * Both ways an owner computes the same numbers in the same order: the bits are the
 * same.
 */
#include "owner_rounds.h"

#include "courier.h"

#include "dcp/alloc.h"

#include <stdio.h>
#include <string.h>

enum { CHUNK_ELEMENTS = 32768 }; /* of one task of put and apply */

typedef struct chunk {
    int64_t piece;
    int64_t first, count; /* elements of the tensor */
} chunk_t;

/* Numbers of things by round: those of round r at items[firsts[r]] .. firsts[r + 1]. */
typedef struct list {
    int64_t *items;
    int64_t *firsts; /* [round_count + 1] */
} list_t;

struct optim_rounds {
    const optim_context_t *context; /* borrowed, as owners */
    const optim_owners_t *owners;
    int32_t rank;
    bool messages;
    list_t units;    /* that this rank owns, as dealt */
    list_t exchange; /* pieces of which this rank is holder or owner, not both */
    list_t local;    /* parts of pieces of which this rank is both */
    list_t remote;   /* parts of pieces that it holds of others' units */
    chunk_t *chunks; /* [chunk_count] local, then remote */
    int64_t chunk_count;
    dcp_window_t *window; /* two slabs a rank; NULL with messages */
    float *memory;        /* with messages: two slabs, two stages */
    int64_t turn;         /* rounds done so far: round k uses slab (turn + k) % 2 */
    dcp_comm_t *comm;     /* the courier's */
    optim_courier_t *courier;
    const optim_work_t *work; /* of the run */
    /* of the tasks under way: */
    const int64_t *tasks; /* their chunks */
    bool applying;        /* or putting */
};

static int64_t
bytes_of(int64_t elements)
{
    return (elements > 0 ? elements : 1) * (int64_t)sizeof(float);
}

static float *
slab_of(const optim_rounds_t *rounds, int32_t owner, int32_t round)
{
    float *slabs =
        rounds->messages ? rounds->memory : dcp_window_base(rounds->window, owner);
    return slabs + (rounds->turn + round) % 2 * rounds->owners->slabs[owner];
}

static float *
stage_of(const optim_rounds_t *rounds, bool back)
{
    int64_t slab = rounds->owners->slabs[rounds->rank];
    int64_t stage = rounds->owners->stages[rounds->rank];
    return rounds->memory + 2 * slab + (back ? stage : 0);
}

/* Where elements of an own piece are put, or come back to. */
static float *
place_of(const optim_rounds_t *rounds, const chunk_t *chunk, bool back)
{
    const optim_piece_t *piece = &rounds->owners->pieces[chunk->piece];
    const optim_unit_t *unit = &rounds->owners->units[piece->unit];
    if (rounds->messages && piece->place >= 0) {
        return stage_of(rounds, back) + piece->place + chunk->first - piece->first;
    }
    return slab_of(rounds, unit->owner, unit->round) + unit->place + chunk->first
           - unit->first;
}

static dcp_status_t
chunk_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const optim_rounds_t *rounds = context;
    const chunk_t *chunk = &rounds->chunks[rounds->tasks[task]];
    const optim_piece_t *piece = &rounds->owners->pieces[chunk->piece];
    float *place = place_of(rounds, chunk, rounds->applying);
    const optim_work_t *work = rounds->work;
    if (rounds->applying) {
        work->apply(work->object, piece, chunk->first, chunk->count, place);
    } else {
        work->put(work->object, piece, chunk->first, chunk->count, place);
    }
    return DCP_OK;
}

static dcp_status_t
run_list(optim_rounds_t *rounds, const list_t *list, int32_t round, bool applying)
{
    int64_t first = list->firsts[round], end = list->firsts[round + 1];
    rounds->tasks = list->items + first;
    rounds->applying = applying;
    return dcp_pool_run(rounds->context->options.pool, end - first, chunk_task, rounds);
}

static dcp_status_t
put(optim_rounds_t *rounds, const list_t *list, int32_t round)
{
    return run_list(rounds, list, round, false);
}

static dcp_status_t
apply(optim_rounds_t *rounds, const list_t *list, int32_t round)
{
    return run_list(rounds, list, round, true);
}

static dcp_status_t
compute(optim_rounds_t *rounds, int32_t round)
{
    const list_t *units = &rounds->units;
    for (int64_t i = units->firsts[round]; i < units->firsts[round + 1]; i++) {
        int64_t u = units->items[i];
        float *data =
            slab_of(rounds, rounds->rank, round) + rounds->owners->units[u].place;
        DCP_TRY(rounds->work->compute(rounds->work->object, u, data));
    }
    return DCP_OK;
}

static dcp_status_t
run_windows(optim_rounds_t *rounds)
{
    dcp_comm_t *comm = rounds->context->options.comm;
    for (int32_t round = 0; round < rounds->owners->round_count; round++) {
        DCP_TRY(put(rounds, &rounds->remote, round));
        DCP_TRY(put(rounds, &rounds->local, round));
        DCP_TRY(dcp_comm_barrier(comm));
        DCP_TRY(compute(rounds, round));
        DCP_TRY(dcp_comm_barrier(comm));
        DCP_TRY(apply(rounds, &rounds->local, round));
        DCP_TRY(apply(rounds, &rounds->remote, round));
    }
    return DCP_OK;
}

static int64_t
job_number(int32_t round, bool back)
{
    return 2 * (int64_t)round + back;
}

/* One message: from the stage to the owner's slab, or, back, the other way. */
static dcp_status_t
post_message(const optim_rounds_t *rounds, const optim_piece_t *piece, bool back)
{
    const optim_unit_t *unit = &rounds->owners->units[piece->unit];
    bool holds = piece->rank == rounds->rank;
    int64_t bytes = piece->count * (int64_t)sizeof(float);
    float *data = holds ? stage_of(rounds, back) + piece->place
                        : slab_of(rounds, rounds->rank, unit->round) + unit->place
                              + piece->first - unit->first;
    int32_t peer = holds ? unit->owner : piece->rank;
    return holds != back ? dcp_comm_send(rounds->comm, data, bytes, peer)
                         : dcp_comm_recv(rounds->comm, data, bytes, peer);
}

/* On the courier's thread. */
static dcp_status_t
exchange(void *context, int64_t job)
{
    const optim_rounds_t *rounds = context;
    int32_t round = (int32_t)(job / 2);
    const list_t *list = &rounds->exchange;
    dcp_status_t status = dcp_comm_group_begin(rounds->comm);
    for (int64_t i = list->firsts[round];
         status == DCP_OK && i < list->firsts[round + 1]; i++) {
        status =
            post_message(rounds, &rounds->owners->pieces[list->items[i]], job % 2 != 0);
        if (status != DCP_OK) {
            dcp_comm_group_cancel(rounds->comm);
            dcp_comm_abort(rounds->comm, dcp_last_error());
        }
    }
    return status == DCP_OK ? dcp_comm_group_end(rounds->comm) : status;
}

/* The jobs of one round and what this thread does around them, in the order of the
 * picture above. */
static dcp_status_t
run_round(optim_rounds_t *rounds, int32_t round, int64_t *to_ticket,
          int64_t *back_ticket)
{
    int32_t round_count = rounds->owners->round_count;
    optim_courier_t *courier = rounds->courier;
    DCP_TRY(optim_courier_wait(courier, *to_ticket));
    if (round + 1 < round_count) {
        DCP_TRY(put(rounds, &rounds->remote, round + 1));
        *to_ticket = optim_courier_post(courier, job_number(round + 1, false));
    }
    DCP_TRY(put(rounds, &rounds->local, round));
    DCP_TRY(compute(rounds, round));
    DCP_TRY(apply(rounds, &rounds->local, round));
    if (round > 0) {
        DCP_TRY(optim_courier_wait(courier, *back_ticket));
        DCP_TRY(apply(rounds, &rounds->remote, round - 1));
    }
    *back_ticket = optim_courier_post(courier, job_number(round, true));
    if (round + 1 == round_count) {
        DCP_TRY(optim_courier_wait(courier, *back_ticket));
        DCP_TRY(apply(rounds, &rounds->remote, round));
    }
    return DCP_OK;
}

static dcp_status_t
run_messages(optim_rounds_t *rounds)
{
    int64_t to_ticket = 0, back_ticket = 0;
    if (rounds->owners->round_count > 0) {
        DCP_TRY(put(rounds, &rounds->remote, 0));
        to_ticket = optim_courier_post(rounds->courier, job_number(0, false));
    }
    for (int32_t round = 0; round < rounds->owners->round_count; round++) {
        DCP_TRY(run_round(rounds, round, &to_ticket, &back_ticket));
    }
    return DCP_OK;
}

/* Nobody may wait for a rank that has failed, nor this one leave while its courier
 * still touches memory. */
static void
end_for_all(optim_rounds_t *rounds)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", dcp_last_error());
    dcp_comm_abort(rounds->context->options.comm, text);
    if (rounds->courier != NULL) {
        optim_courier_clear(rounds->courier);
    }
    dcp_set_last_error(text);
}

dcp_status_t
optim_rounds_run(optim_rounds_t *rounds, const optim_work_t *work)
{
    rounds->work = work;
    dcp_status_t status = rounds->messages ? run_messages(rounds) : run_windows(rounds);
    if (status != DCP_OK) {
        end_for_all(rounds);
        return status;
    }
    rounds->turn = (rounds->turn + rounds->owners->round_count) % 2;
    return DCP_OK;
}

/* Walks all units in the order of rounds; calls add for each thing of a list, then
 * closes rounds behind it. With items NULL it only counts. */
typedef int64_t (*visit_t)(optim_rounds_t *rounds, int64_t unit, int64_t *items,
                           int64_t count);

static int64_t
visit_units(optim_rounds_t *rounds, int64_t unit, int64_t *items, int64_t count)
{
    if (rounds->owners->units[unit].owner != rounds->rank) {
        return 0;
    }
    if (items != NULL) {
        items[count] = unit;
    }
    return 1;
}

static int64_t
visit_exchange(optim_rounds_t *rounds, int64_t unit, int64_t *items, int64_t count)
{
    const optim_owners_t *owners = rounds->owners;
    int64_t added = 0;
    for (int64_t p = owners->piece_firsts[unit]; p < owners->piece_firsts[unit + 1];
         p++) {
        bool holds = owners->pieces[p].rank == rounds->rank;
        bool owns = owners->units[unit].owner == rounds->rank;
        if (holds != owns) {
            if (items != NULL) {
                items[count + added] = p;
            }
            added++;
        }
    }
    return added;
}

/* Cuts pieces that this rank holds, of its own units or of others'. */
static int64_t
visit_parts(optim_rounds_t *rounds, int64_t unit, int64_t *items, int64_t count,
            bool local)
{
    const optim_owners_t *owners = rounds->owners;
    int64_t added = 0;
    if ((owners->units[unit].owner == rounds->rank) != local) {
        return 0;
    }
    for (int64_t p = owners->piece_firsts[unit]; p < owners->piece_firsts[unit + 1];
         p++) {
        const optim_piece_t *piece = &owners->pieces[p];
        for (int64_t at = 0; piece->rank == rounds->rank && at < piece->count;
             at += CHUNK_ELEMENTS) {
            if (items != NULL) {
                int64_t rest = piece->count - at;
                items[count + added] = rounds->chunk_count;
                rounds->chunks[rounds->chunk_count++] =
                    (chunk_t){p, piece->first + at,
                              rest < CHUNK_ELEMENTS ? rest : CHUNK_ELEMENTS};
            }
            added++;
        }
    }
    return added;
}

static int64_t
visit_local(optim_rounds_t *rounds, int64_t unit, int64_t *items, int64_t count)
{
    return visit_parts(rounds, unit, items, count, true);
}

static int64_t
visit_remote(optim_rounds_t *rounds, int64_t unit, int64_t *items, int64_t count)
{
    return visit_parts(rounds, unit, items, count, false);
}

static int64_t
walk(optim_rounds_t *rounds, visit_t visit, list_t *list)
{
    const optim_owners_t *owners = rounds->owners;
    int64_t count = 0;
    int32_t round = 0;
    for (int64_t i = 0; i < owners->unit_count; i++) {
        int64_t unit = owners->order[i];
        while (list->items != NULL && round < owners->units[unit].round) {
            list->firsts[++round] = count;
        }
        count += visit(rounds, unit, list->items, count);
    }
    while (list->items != NULL && round < owners->round_count) {
        list->firsts[++round] = count;
    }
    return count;
}

static dcp_status_t
fill_list(optim_rounds_t *rounds, visit_t visit, list_t *list)
{
    int64_t count = walk(rounds, visit, list);
    void *memory;
    DCP_TRY(
        dcp_alloc_zeroed((rounds->owners->round_count + 1) * (int64_t)sizeof(int64_t),
                         "rounds of matrices", &memory));
    list->firsts = memory;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(int64_t), "matrices of rounds",
                            &memory));
    list->items = memory;
    walk(rounds, visit, list);
    return DCP_OK;
}

static dcp_status_t
fill(optim_rounds_t *rounds)
{
    const dcp_optimizer_options_t *options = &rounds->context->options;
    const optim_owners_t *owners = rounds->owners;
    DCP_TRY(fill_list(rounds, visit_units, &rounds->units));
    DCP_TRY(fill_list(rounds, visit_exchange, &rounds->exchange));
    int64_t chunk_count = walk(rounds, visit_local, &rounds->local)
                          + walk(rounds, visit_remote, &rounds->remote);
    void *memory;
    DCP_TRY(dcp_alloc_array(chunk_count, (int64_t)sizeof(chunk_t), "parts of matrices",
                            &memory));
    rounds->chunks = memory;
    DCP_TRY(fill_list(rounds, visit_local, &rounds->local));
    DCP_TRY(fill_list(rounds, visit_remote, &rounds->remote));
    int64_t slab = owners->slabs[rounds->rank];
    if (!rounds->messages) {
        return dcp_window_create(options->comm, bytes_of(2 * slab), &rounds->window);
    }
    DCP_TRY(dcp_alloc(bytes_of(2 * slab + 2 * owners->stages[rounds->rank]),
                      "matrices on their way to an owner", &memory));
    rounds->memory = memory;
    DCP_TRY(dcp_comm_split(options->comm, 0, rounds->rank, &rounds->comm));
    return optim_courier_create(exchange, rounds, &rounds->courier);
}

dcp_status_t
optim_rounds_create(const optim_context_t *context, const optim_owners_t *owners,
                    optim_rounds_t **rounds_p)
{
    void *memory;
    dcp_status_t status = dcp_alloc_zeroed((int64_t)sizeof(optim_rounds_t),
                                           "rounds of matrices", &memory);
    if (status != DCP_OK) {
        return status;
    }
    optim_rounds_t *rounds = memory;
    rounds->context = context;
    rounds->owners = owners;
    rounds->rank = dcp_comm_rank(context->options.comm);
    rounds->messages =
        context->options.no_windows != 0 && dcp_comm_size(context->options.comm) > 1;
    status = fill(rounds);
    if (status != DCP_OK) {
        optim_rounds_destroy(rounds);
        return status;
    }
    *rounds_p = rounds;
    return DCP_OK;
}

static void
list_fini(list_t *list)
{
    dcp_free(list->items);
    dcp_free(list->firsts);
}

void
optim_rounds_destroy(optim_rounds_t *rounds)
{
    if (rounds == NULL) {
        return;
    }
    optim_courier_destroy(rounds->courier);
    dcp_comm_destroy(rounds->comm);
    dcp_window_destroy(rounds->window);
    dcp_free(rounds->memory);
    dcp_free(rounds->chunks);
    list_fini(&rounds->units);
    list_fini(&rounds->exchange);
    list_fini(&rounds->local);
    list_fini(&rounds->remote);
    dcp_free(rounds);
}

int64_t
optim_rounds_bytes(const optim_owners_t *owners, int32_t no_windows)
{
    const int64_t page_bytes = 4096, list_bytes = (int64_t)sizeof(int64_t);
    int64_t most = 0, elements = 0;
    for (int32_t rank = 0; rank < owners->rank_count; rank++) {
        int64_t here =
            2 * owners->slabs[rank] + (no_windows ? 2 * owners->stages[rank] : 0);
        most = here > most ? here : most;
    }
    for (int64_t p = 0; p < owners->piece_count; p++) {
        elements += owners->pieces[p].count;
    }
    int64_t chunk_count = owners->piece_count + elements / CHUNK_ELEMENTS;
    return bytes_of(most) + page_bytes + (int64_t)sizeof(optim_rounds_t)
           + (owners->unit_count + owners->piece_count + chunk_count) * list_bytes
           + chunk_count * (int64_t)sizeof(chunk_t)
           + 4 * (owners->round_count + 1) * list_bytes + 2 * page_bytes;
}
