/* Owners of units, and the rounds in which units travel.
 *
 * Owners: units are dealt dearest first, each to the rank with the least cost so far
 * (longest processing time first: the busiest rank has at most 4/3 of the best
 * possible); among equals the rank that holds most of the unit, so that less moves,
 * then the lowest.
 *
 * Rounds bound memory. With C = the largest unit, or ROUND_ELEMENTS where that is more,
 * no rank owns more than C elements of a round's units, nor, without windows, holds
 * more than C elements of those that it does not own. A round takes from each owner in
 * turn what fits of the next units it was dealt, looking past those whose holder has no
 * room: neighbours are often held by one rank, and a round should use all.
 *
 * Cost: sorting, and one walk over pieces, at most units + runs many; each rank keeps
 * the tables of all, about 100 bytes a unit.
 */
#include "owners.h"

#include "dcp/alloc.h"

#include <stdlib.h>
#include <string.h>

enum {
    ROUND_ELEMENTS = 1 << 20, /* 4 MiB: some rounds, not hundreds, for small matrices */
    PLACE_ELEMENTS = 16,      /* units start on a cache line */
    LOOK_AHEAD = 64,          /* units of an owner that a round looks at */
};

typedef struct dealt {
    double cost;
    int64_t unit;
} dealt_t;

optim_matrices_t
optim_matrices_of(const dcp_optimizer_tensor_t *tensor)
{
    optim_matrices_t matrices = {1, tensor->shape[tensor->dim_count - 2],
                                 tensor->shape[tensor->dim_count - 1]};
    for (int32_t d = 0; d < tensor->dim_count - 2; d++) {
        matrices.count *= tensor->shape[d];
    }
    return matrices;
}

static int
compare_dealt(const void *a, const void *b)
{
    const dealt_t *x = a, *y = b;
    if (x->cost != y->cost) {
        return x->cost > y->cost ? -1 : 1;
    }
    return x->unit < y->unit ? -1 : x->unit > y->unit;
}

/* Counts units; fills them where there is room. */
static int64_t
list_units(const dcp_optimizer_tensor_t *tensors, const int64_t *members,
           int64_t member_count, optim_cut_t cut, optim_unit_t *units)
{
    int64_t count = 0;
    for (int64_t i = 0; i < member_count; i++) {
        optim_unit_t unit = {.tensor = members[i]};
        for (int64_t k = 0; cut(&tensors[members[i]], k, &unit); k++) {
            if (units != NULL) {
                units[count] = unit;
            }
            count++;
        }
    }
    return count;
}

/* The first unit that ends after element `first` of `tensor`, or a later tensor's. */
static int64_t
find_unit(const optim_owners_t *owners, int64_t tensor, int64_t first)
{
    int64_t low = 0, high = owners->unit_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        const optim_unit_t *unit = &owners->units[middle];
        bool before = unit->tensor < tensor
                      || (unit->tensor == tensor && unit->first + unit->count <= first);
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    return low;
}

/* Calls for every (run, unit) that overlap: counts[unit] grows by one, and where there
 * are pieces, the piece goes to pieces[counts[unit]] first. */
static void
walk_pieces(const optim_owners_t *owners, const dcp_dbuffer_layout_t *layout,
            int64_t *counts, optim_piece_t *pieces)
{
    for (int32_t rank = 0; rank < owners->rank_count; rank++) {
        const dcp_dbuffer_run_t *runs;
        int64_t run_count;
        dcp_dbuffer_layout_runs(layout, rank, &runs, &run_count);
        for (int64_t i = 0; i < run_count; i++) {
            int64_t end = runs[i].first + runs[i].count;
            int64_t u = find_unit(owners, runs[i].tensor, runs[i].first);
            for (; u < owners->unit_count && owners->units[u].tensor == runs[i].tensor
                   && owners->units[u].first < end;
                 u++) {
                const optim_unit_t *unit = &owners->units[u];
                int64_t from =
                    runs[i].first > unit->first ? runs[i].first : unit->first;
                int64_t to =
                    end < unit->first + unit->count ? end : unit->first + unit->count;
                if (pieces != NULL) {
                    pieces[counts[u]] = (optim_piece_t){.unit = u,
                                                        .first = from,
                                                        .count = to - from,
                                                        .run = i,
                                                        .rank = rank};
                }
                counts[u]++;
            }
        }
    }
}

static dcp_status_t
list_pieces(optim_owners_t *owners, const dcp_dbuffer_layout_t *layout)
{
    int64_t *firsts = owners->piece_firsts;
    walk_pieces(owners, layout, firsts, NULL);
    int64_t sum = 0;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        int64_t count = firsts[u];
        firsts[u] = sum;
        sum += count;
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(sum, (int64_t)sizeof(optim_piece_t), "pieces of matrices",
                            &memory));
    owners->pieces = memory;
    owners->piece_count = sum;
    walk_pieces(owners, layout, firsts, owners->pieces);
    /* each count has moved to where its successor begins */
    for (int64_t u = owners->unit_count; u > 0; u--) {
        firsts[u] = firsts[u - 1];
    }
    firsts[0] = 0;
    return DCP_OK;
}

/* Does a go before b? `held` are elements of the unit on each rank. */
static bool
is_better(const double *loads, const int64_t *held, int32_t a, int32_t b)
{
    return loads[a] != loads[b] ? loads[a] < loads[b] : held[a] > held[b];
}

static void
set_owners(optim_owners_t *owners, double *loads, int64_t *held)
{
    memset(loads, 0, (size_t)owners->rank_count * sizeof *loads);
    memset(held, 0, (size_t)owners->rank_count * sizeof *held);
    double total = 0, most = 0;
    for (int64_t i = 0; i < owners->unit_count; i++) {
        int64_t u = owners->dealt[i];
        const optim_piece_t *pieces = owners->pieces + owners->piece_firsts[u];
        int64_t count = owners->piece_firsts[u + 1] - owners->piece_firsts[u];
        for (int64_t p = 0; p < count; p++) {
            held[pieces[p].rank] += pieces[p].count;
        }
        int32_t best = 0;
        for (int32_t rank = 1; rank < owners->rank_count; rank++) {
            best = is_better(loads, held, rank, best) ? rank : best;
        }
        for (int64_t p = 0; p < count; p++) {
            held[pieces[p].rank] = 0;
        }
        owners->units[u].owner = best;
        loads[best] += owners->units[u].cost;
        total += owners->units[u].cost;
        most = loads[best] > most ? loads[best] : most;
    }
    owners->imbalance = total > 0 ? most * owners->rank_count / total - 1 : 0;
}

static int64_t
padded(int64_t count)
{
    return (count + PLACE_ELEMENTS - 1) / PLACE_ELEMENTS * PLACE_ELEMENTS;
}

/* A round in the making. */
typedef struct packing {
    int64_t room;          /* elements of a slab */
    int64_t held_room;     /* elements of a stage */
    int64_t *slab, *stage; /* [rank_count] taken */
    int64_t *heads;        /* [rank_count] an owner's next unit, -1: none */
    int64_t *nexts;        /* [unit_count] */
} packing_t;

static bool
fits(const optim_owners_t *owners, const packing_t *x, int64_t u)
{
    const optim_unit_t *unit = &owners->units[u];
    if (x->slab[unit->owner] + padded(unit->count) > x->room) {
        return false;
    }
    for (int64_t p = owners->piece_firsts[u]; p < owners->piece_firsts[u + 1]; p++) {
        const optim_piece_t *piece = &owners->pieces[p];
        if (piece->rank != unit->owner
            && x->stage[piece->rank] + padded(piece->count) > x->held_room) {
            return false;
        }
    }
    return true;
}

static void
take(optim_owners_t *owners, packing_t *x, int64_t u)
{
    optim_unit_t *unit = &owners->units[u];
    unit->round = owners->round_count;
    unit->place = x->slab[unit->owner];
    x->slab[unit->owner] += padded(unit->count);
    if (x->slab[unit->owner] > owners->slabs[unit->owner]) {
        owners->slabs[unit->owner] = x->slab[unit->owner];
    }
    for (int64_t p = owners->piece_firsts[u]; p < owners->piece_firsts[u + 1]; p++) {
        optim_piece_t *piece = &owners->pieces[p];
        int32_t rank = piece->rank;
        piece->place = -1;
        if (rank != unit->owner) {
            piece->place = x->stage[rank];
            x->stage[rank] += padded(piece->count);
            if (x->stage[rank] > owners->stages[rank]) {
                owners->stages[rank] = x->stage[rank];
            }
        }
    }
}

/* Fills one round; an empty one has room for any unit, so none stays empty. */
static void
fill_round(optim_owners_t *owners, packing_t *x, int64_t *taken_count)
{
    size_t bytes = (size_t)owners->rank_count * sizeof(int64_t);
    memset(x->slab, 0, bytes);
    memset(x->stage, 0, bytes);
    for (int32_t i = 0; i < owners->rank_count; i++) {
        int64_t *link = &x->heads[(i + owners->round_count) % owners->rank_count];
        for (int32_t looked = 0; *link >= 0 && looked < LOOK_AHEAD; looked++) {
            int64_t u = *link;
            if (fits(owners, x, u)) {
                take(owners, x, u);
                *link = x->nexts[u];
                owners->order[(*taken_count)++] = u;
            } else {
                link = &x->nexts[u];
            }
        }
    }
    owners->round_count++;
}

static void
set_rounds(optim_owners_t *owners, packing_t *x, int32_t no_windows)
{
    size_t bytes = (size_t)owners->rank_count * sizeof(int64_t);
    x->room = ROUND_ELEMENTS;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        int64_t count = padded(owners->units[u].count);
        x->room = count > x->room ? count : x->room;
    }
    x->held_room = no_windows ? x->room : INT64_MAX;
    for (int32_t rank = 0; rank < owners->rank_count; rank++) {
        x->heads[rank] = -1;
    }
    for (int64_t i = owners->unit_count - 1; i >= 0; i--) {
        int64_t u = owners->dealt[i];
        x->nexts[u] = x->heads[owners->units[u].owner];
        x->heads[owners->units[u].owner] = u;
    }
    memset(owners->slabs, 0, bytes);
    memset(owners->stages, 0, bytes);
    for (int64_t taken_count = 0; taken_count < owners->unit_count;) {
        fill_round(owners, x, &taken_count);
    }
}

static dcp_status_t
sort_units(optim_owners_t *owners)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(owners->unit_count, (int64_t)sizeof(dealt_t),
                            "order of matrices", &memory));
    dealt_t *dealt = memory;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        dealt[u] = (dealt_t){owners->units[u].cost, u};
    }
    qsort(dealt, (size_t)owners->unit_count, sizeof *dealt, compare_dealt);
    for (int64_t i = 0; i < owners->unit_count; i++) {
        owners->dealt[i] = dealt[i].unit;
    }
    dcp_free(dealt);
    return DCP_OK;
}

/* Deals and packs. */
static dcp_status_t
deal(optim_owners_t *owners, int32_t no_windows)
{
    int64_t ranks = owners->rank_count;
    void *memory, *loads;
    DCP_TRY(dcp_alloc_array(3 * ranks + owners->unit_count, (int64_t)sizeof(int64_t),
                            "rounds of ranks", &memory));
    dcp_status_t status =
        dcp_alloc_array(ranks, (int64_t)sizeof(double), "loads of ranks", &loads);
    if (status == DCP_OK) {
        int64_t *rows = memory;
        packing_t packing = {.slab = rows,
                             .stage = rows + ranks,
                             .heads = rows + 2 * ranks,
                             .nexts = rows + 3 * ranks};
        set_owners(owners, loads, rows);
        set_rounds(owners, &packing, no_windows);
        dcp_free(loads);
    }
    dcp_free(memory);
    return status;
}

static dcp_status_t
alloc_tables(optim_owners_t *owners)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(owners->unit_count, (int64_t)sizeof(optim_unit_t),
                            "matrices", &memory));
    owners->units = memory;
    DCP_TRY(dcp_alloc_array(owners->unit_count, (int64_t)sizeof(int64_t),
                            "order of matrices", &memory));
    owners->order = memory;
    DCP_TRY(dcp_alloc_array(owners->unit_count, (int64_t)sizeof(int64_t),
                            "order of matrices", &memory));
    owners->dealt = memory;
    DCP_TRY(dcp_alloc_zeroed((owners->unit_count + 1) * (int64_t)sizeof(int64_t),
                             "pieces of matrices", &memory));
    owners->piece_firsts = memory;
    DCP_TRY(dcp_alloc_array(owners->rank_count, (int64_t)sizeof(int64_t),
                            "slabs of ranks", &memory));
    owners->slabs = memory;
    DCP_TRY(dcp_alloc_array(owners->rank_count, (int64_t)sizeof(int64_t),
                            "stages of ranks", &memory));
    owners->stages = memory;
    return DCP_OK;
}

dcp_status_t
optim_owners_init(optim_owners_t *owners, const dcp_dbuffer_layout_t *layout,
                  int32_t rank_count, const dcp_optimizer_tensor_t *tensors,
                  const int64_t *members, int64_t member_count, optim_cut_t cut,
                  int32_t no_windows)
{
    *owners = (optim_owners_t){.rank_count = rank_count};
    owners->unit_count = list_units(tensors, members, member_count, cut, NULL);
    DCP_TRY(alloc_tables(owners));
    list_units(tensors, members, member_count, cut, owners->units);
    DCP_TRY(sort_units(owners));
    DCP_TRY(list_pieces(owners, layout));
    return deal(owners, no_windows);
}

void
optim_owners_fini(optim_owners_t *owners)
{
    dcp_free(owners->units);
    dcp_free(owners->order);
    dcp_free(owners->dealt);
    dcp_free(owners->pieces);
    dcp_free(owners->piece_firsts);
    dcp_free(owners->slabs);
    dcp_free(owners->stages);
    *owners = (optim_owners_t){0};
}

int64_t
optim_owners_bytes(const optim_owners_t *owners)
{
    return owners->unit_count * (int64_t)(sizeof(optim_unit_t) + 3 * sizeof(int64_t))
           + owners->piece_count * (int64_t)sizeof(optim_piece_t)
           + (2 * (int64_t)owners->rank_count + 1) * (int64_t)sizeof(int64_t);
}
