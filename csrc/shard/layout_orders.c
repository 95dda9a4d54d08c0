/* Layout planner, orders: a heuristic search where the orders are too many to walk.
 *
 * The three orders that can be asked for by name are searched as thoroughly as there,
 * so that the result is never worse. Then the sorted orders backwards, tensors that are
 * one block packed like parcels, all orders of whole kinds where at most six differ,
 * insertion moves and random orders from a fixed seed: each is first tried at the
 * largest S below the best of every step (almost monotone, so a success there is what
 * an improvement needs), and only then searched. Within a fixed number of placements,
 * so that the result depends on no clock; about 3 ms for 782 tensors. */
#include "layout_search.h"

#include "dcp/rng.h"

#include <string.h>

enum {
    PERMUTED_KINDS = 6,           /* at most 720 orders of whole kinds */
    MOVE_COUNT = 400,             /* insertion moves */
    RANDOM_COUNT = 200,           /* random orders */
    ORDERS_PLACEMENTS = 60000000, /* of all together */
};

static void
reverse(const int64_t *order, int64_t count, int64_t *reversed)
{
    for (int64_t i = 0; i < count; i++) {
        reversed[i] = order[count - 1 - i];
    }
}

/* Tries one order against the best S: at the next smaller multiple of each step. */
static void
try_order(layout_search_t *search, const int64_t *order, int64_t *best_order)
{
    search->order = order;
    for (int32_t i = 0; i < search->step_count; i++) {
        int64_t step = search->steps[i];
        int64_t shard = (search->best - 1) / step * step;
        if (shard >= search->lower && dcp_layout_search_fits(search, shard)) {
            search->best = shard;
            dcp_layout_search_steps(search);
            memcpy(best_order, order, (size_t)search->count * sizeof order[0]);
        }
    }
}

/* Searches one order as if it were the only one. */
static void
search_order(layout_search_t *search, const int64_t *order, int64_t *best_order)
{
    int64_t best = search->best;
    search->order = order;
    dcp_layout_search_steps(search);
    dcp_layout_search_values(search);
    if (search->best < best && order != best_order) {
        memcpy(best_order, order, (size_t)search->count * sizeof order[0]);
    }
}

/* Tries the order that takes the kinds one after the other, as `kinds` says. */
static void
try_kinds(layout_search_t *search, const int64_t *kinds, int64_t *order,
          int64_t *best_order)
{
    int64_t place = 0;
    for (int64_t k = 0; k < search->kind_count; k++) {
        const layout_kind_t *kind = &search->kinds[kinds[k]];
        memcpy(order + place, search->by_kind + kind->first,
               (size_t)kind->count * sizeof order[0]);
        place += kind->count;
    }
    try_order(search, order, best_order);
}

/* All orders of whole kinds, by Heap's algorithm. */
static void
try_kind_orders(layout_search_t *search, int64_t *order, int64_t *best_order)
{
    int64_t kinds[PERMUTED_KINDS] = {0, 1, 2, 3, 4, 5}, turn[PERMUTED_KINDS] = {0};
    try_kinds(search, kinds, order, best_order);
    for (int64_t i = 1; i < search->kind_count;) {
        if (turn[i] == i) {
            turn[i++] = 0;
            continue;
        }
        int64_t other = i % 2 == 0 ? 0 : turn[i];
        int64_t kept = kinds[other];
        kinds[other] = kinds[i];
        kinds[i] = kept;
        turn[i]++;
        i = 1;
        try_kinds(search, kinds, order, best_order);
    }
}

static void
try_moves(layout_search_t *search, dcp_rng_t *rng, int64_t *order, int64_t *best_order)
{
    uint64_t count = (uint64_t)search->count;
    for (int32_t i = 0; i < MOVE_COUNT && search->spent < ORDERS_PLACEMENTS; i++) {
        int64_t from = (int64_t)dcp_rng_below(rng, count);
        int64_t to = (int64_t)dcp_rng_below(rng, count);
        int64_t moved = best_order[from];
        int64_t place = 0;
        for (int64_t k = 0; k < search->count; k++) {
            if (k != from) {
                place += place == to;
                order[place++] = best_order[k];
            }
        }
        order[to] = moved;
        try_order(search, order, best_order);
    }
}

static void
try_random(layout_search_t *search, dcp_rng_t *rng, int64_t *order, int64_t *best_order)
{
    for (int64_t i = 0; i < search->count; i++) {
        order[i] = i;
    }
    for (int32_t n = 0; n < RANDOM_COUNT && search->spent < ORDERS_PLACEMENTS; n++) {
        for (int64_t i = search->count - 1; i > 0; i--) {
            int64_t other = (int64_t)dcp_rng_below(rng, (uint64_t)i + 1);
            int64_t kept = order[i];
            order[i] = order[other];
            order[other] = kept;
        }
        try_order(search, order, best_order);
    }
}

dcp_status_t
dcp_layout_search_orders(layout_search_t *search, int64_t shard_limit,
                         layout_key_t *keys, int64_t *order, int64_t *best_order)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 0, 0);
    for (int64_t i = 0; i < search->count; i++) {
        best_order[i] = i;
    }
    search->order = best_order;
    DCP_TRY(dcp_layout_search_first(search, shard_limit));
    search_order(search, best_order, best_order);
    search_order(search, search->by_size, best_order);
    reverse(search->by_size, search->count, order);
    try_order(search, order, best_order);
    dcp_layout_sort_items(search, 1, keys, search->by_kind);
    search_order(search, search->by_kind, best_order);
    reverse(search->by_kind, search->count, order);
    try_order(search, order, best_order);
    DCP_TRY(dcp_layout_search_pack(search, order, best_order));
    if (search->kind_count <= PERMUTED_KINDS) {
        dcp_layout_sort_items(search, 0, keys, search->by_kind);
        try_kind_orders(search, order, best_order);
    }
    try_moves(search, &rng, order, best_order);
    try_random(search, &rng, order, best_order);
    search->order = best_order;
    dcp_layout_search_values(search);
    return DCP_OK;
}
