/* Layout planner, search: the least shard size S, and with it the order where any order
 * will do. All in units; fits is exact (see [Note: Greedy placement is exact]).
 *
 * [Note: Which S to try]
 * A placement may exist for S and not for S + 1: a tensor that meets two borders needs
 * S to be whole blocks of it. So S is searched among the multiples of L, for L = 1 and
 * the lcm of the blocks of the 1, 2, ... largest tensors (those that span ranks), where
 * it is almost monotone: bisection. Then upward from the lower bound, value by value,
 * which proves the least S when it gets through, and else downward from the best; both
 * within a fixed number of placements, so that the result depends on no clock. A tensor
 * longer than 2 S meets two borders whatever its start: the scans step by the lcm of
 * those.
 *
 * [Note: Any order]
 * For a given S and a given set of tensors already placed, only the least end matters.
 * So all orders are covered by a walk over multisets of (size, block) pairs, states
 * times pairs placements for one S - few where few tensors differ. Beyond that see
 * layout_orders.c.
 *
 * Cost: 782 tensors on 1,024 ranks take 1 to 15 ms in a given order. */
#include "layout_search.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    STATE_LIMIT = 1 << 14,     /* multisets of the walk over all orders */
    WALK_LIMIT = 1 << 16,      /* states times kinds */
    SCAN_PLACEMENTS = 3000000, /* of each scan, upward and downward */
};

/* lcm(a, b), or cap + 1 where it is larger than cap. */
static int64_t
lcm_capped(int64_t a, int64_t b, int64_t cap)
{
    int64_t x = a, y = b;
    while (y != 0) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    int64_t factor = b / x;
    return a > cap / factor ? cap + 1 : a * factor;
}

static layout_cursor_t
cursor_at(int64_t shard, int64_t next)
{
    int64_t border = next <= shard ? shard : (next + shard - 1) / shard * shard;
    return (layout_cursor_t){shard, next, border};
}

/* Walks search->order; gives up when the gaps cannot be made up any more. */
static int32_t
fits_in_order(layout_search_t *search, int64_t shard)
{
    int64_t slack = search->rank_count * shard - search->total;
    layout_cursor_t cursor = {shard, 0, shard};
    for (int64_t i = 0; i < search->count; i++) {
        int64_t before = cursor.next;
        int64_t start = dcp_layout_place(&cursor, search->items[search->order[i]]);
        slack -= start - before;
        if (start < 0 || slack < 0) {
            search->spent += i + 1;
            return 0;
        }
    }
    search->spent += search->count;
    return 1;
}

/* See [Note: Any order]. States are numbered so that a subset comes before the whole.
 */
static int32_t
fits_in_any_order(layout_search_t *search, int64_t shard)
{
    int64_t slack = search->rank_count * shard - search->total;
    memset(search->ends, 0xff, (size_t)search->state_count * sizeof search->ends[0]);
    search->ends[0] = 0;
    for (int64_t state = 0; state < search->state_count - 1; state++) {
        if (search->ends[state] < 0) {
            continue;
        }
        for (int64_t k = 0; k < search->kind_count; k++) {
            const layout_kind_t *kind = &search->kinds[k];
            if (state / kind->stride % (kind->count + 1) == kind->count) {
                continue;
            }
            layout_cursor_t cursor = cursor_at(shard, search->ends[state]);
            int64_t next = state + kind->stride;
            search->spent++;
            if (dcp_layout_place(&cursor, kind->item) < 0
                || cursor.next - search->sums[next] > slack) {
                continue;
            }
            if (search->ends[next] < 0 || cursor.next < search->ends[next]) {
                search->ends[next] = cursor.next;
                search->last[next] = (uint8_t)k;
            }
        }
    }
    return search->ends[search->state_count - 1] >= 0;
}

int32_t
dcp_layout_search_fits(layout_search_t *search, int64_t shard)
{
    return search->order != NULL ? fits_in_order(search, shard)
                                 : fits_in_any_order(search, shard);
}

/* Bisection over the multiples of each step. */
void
dcp_layout_search_steps(layout_search_t *search)
{
    for (int32_t i = 0; i < search->step_count; i++) {
        int64_t step = search->steps[i];
        int64_t low = (search->lower + step - 1) / step;
        int64_t high = (search->best - 1) / step;
        while (low <= high) {
            int64_t middle = low + (high - low) / 2;
            if (dcp_layout_search_fits(search, middle * step)) {
                search->best = middle * step;
                high = middle - 1;
            } else {
                low = middle + 1;
            }
        }
    }
}

/* lcm of the blocks of all items longer than 2 best: every smaller S is a multiple. */
static int64_t
forced_step(const layout_search_t *search)
{
    int64_t step = 1;
    for (int64_t i = 0; i < search->count && step <= search->best; i++) {
        layout_item_t item = search->items[search->by_size[i]];
        if (item.size / 2 < search->best) {
            break;
        }
        step = lcm_capped(step, item.block, search->best);
    }
    return step;
}

void
dcp_layout_search_values(layout_search_t *search)
{
    int64_t step = forced_step(search);
    int64_t shard = (search->lower + step - 1) / step * step;
    int64_t end = search->spent + SCAN_PLACEMENTS;
    for (; shard < search->best && search->spent < end; shard += step) {
        if (dcp_layout_search_fits(search, shard)) {
            search->best = shard;
            return;
        }
    }
    end = search->spent + SCAN_PLACEMENTS;
    int64_t below = (search->best - 1) / step * step;
    for (; below >= shard && search->spent < end; below -= step) {
        if (dcp_layout_search_fits(search, below)) {
            search->best = below;
        }
    }
}

/* Some S that fits, by doubling; all in one shard always does. */
dcp_status_t
dcp_layout_search_first(layout_search_t *search, int64_t shard_limit)
{
    int64_t shard = search->lower;
    search->best = shard_limit + 1;
    while (shard <= shard_limit) {
        if (dcp_layout_search_fits(search, shard)) {
            search->best = shard;
            return DCP_OK;
        }
        shard = shard > shard_limit / 2 ? shard_limit + 1 : shard * 2;
    }
    dcp_layout_search_steps(search);
    if (search->best > shard_limit) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "no layout over %" PRId64
                        " ranks can be counted in 64 bits: use fewer ranks or rows",
                        search->rank_count);
    }
    return DCP_OK;
}

static dcp_status_t
search_all(layout_search_t *search, int64_t shard_limit)
{
    DCP_TRY(dcp_layout_search_first(search, shard_limit));
    dcp_layout_search_steps(search);
    dcp_layout_search_values(search);
    return DCP_OK;
}

static int
compare_keys(const void *left, const void *right)
{
    const layout_key_t *a = left, *b = right;
    if (a->first != b->first) {
        return a->first > b->first ? -1 : 1;
    }
    if (a->second != b->second) {
        return a->second > b->second ? -1 : 1;
    }
    return a->item < b->item ? -1 : a->item > b->item;
}

/* Item numbers by size (and block) or by block (and size), descending. */
void
dcp_layout_sort_items(const layout_search_t *search, int32_t by_block,
                      layout_key_t *keys, int64_t *order)
{
    for (int64_t i = 0; i < search->count; i++) {
        layout_item_t item = search->items[i];
        keys[i] = by_block ? (layout_key_t){item.block, item.size, i}
                           : (layout_key_t){item.size, item.block, i};
    }
    qsort(keys, (size_t)search->count, sizeof keys[0], compare_keys);
    for (int64_t i = 0; i < search->count; i++) {
        order[i] = keys[i].item;
    }
}

/* Groups equal items (neighbours in by_kind) and sizes the walk over all orders. */
static void
find_kinds(layout_search_t *search)
{
    int64_t states = 1;
    search->kind_count = 0;
    for (int64_t i = 0; i < search->count;) {
        layout_item_t item = search->items[search->by_kind[i]];
        int64_t end = i + 1;
        while (end < search->count
               && search->items[search->by_kind[end]].size == item.size
               && search->items[search->by_kind[end]].block == item.block) {
            end++;
        }
        if (search->kind_count < LAYOUT_KIND_SLOTS) {
            search->kinds[search->kind_count] =
                (layout_kind_t){item, end - i, states, i};
        }
        search->kind_count++;
        states = states > STATE_LIMIT ? states : states * (end - i + 1);
        i = end;
    }
    int32_t few = search->kind_count <= LAYOUT_KIND_SLOTS && states <= STATE_LIMIT
                  && states * search->kind_count <= WALK_LIMIT;
    search->state_count = few ? states : 0;
}

/* Walks all orders for every S. */
static dcp_status_t
search_states(layout_search_t *search, int64_t shard_limit, int64_t *order)
{
    void *memory;
    int64_t state_bytes = 2 * (int64_t)sizeof(int64_t) + 1;
    DCP_TRY(
        dcp_alloc_array(search->state_count, state_bytes, "layout search", &memory));
    search->ends = memory;
    search->sums = search->ends + search->state_count;
    search->last = (uint8_t *)(search->sums + search->state_count);
    for (int64_t state = 0; state < search->state_count; state++) {
        search->sums[state] = 0;
        for (int64_t k = 0; k < search->kind_count; k++) {
            const layout_kind_t *kind = &search->kinds[k];
            search->sums[state] +=
                state / kind->stride % (kind->count + 1) * kind->item.size;
        }
    }
    search->order = NULL;
    dcp_status_t status = search_all(search, shard_limit);
    if (status == DCP_OK) {
        dcp_layout_search_fits(search,
                               search->best); /* leaves the way that led there */
        int64_t state = search->state_count - 1;
        for (int64_t place = search->count - 1; place >= 0; place--) {
            const layout_kind_t *kind = &search->kinds[search->last[state]];
            int64_t nth = state / kind->stride % (kind->count + 1) - 1;
            order[place] = search->by_kind[kind->first + nth];
            state -= kind->stride;
        }
    }
    dcp_free(memory);
    return status;
}

static void
bound_and_steps(layout_search_t *search, int64_t shard_limit)
{
    search->total = 0;
    search->lower = 1;
    for (int64_t i = 0; i < search->count; i++) {
        layout_item_t item = search->items[i];
        int64_t whole = item.block < item.size ? item.block : item.size;
        search->total += item.size;
        search->lower = whole > search->lower ? whole : search->lower;
    }
    int64_t even =
        search->total / search->rank_count + (search->total % search->rank_count != 0);
    search->lower = even > search->lower ? even : search->lower;
    int64_t step = 1;
    search->steps[0] = 1;
    search->step_count = 1;
    for (int64_t i = 0; i < search->count && search->step_count < LAYOUT_STEP_SLOTS;
         i++) {
        step = lcm_capped(step, search->items[search->by_size[i]].block, shard_limit);
        if (step > shard_limit) {
            break;
        }
        if (step != search->steps[search->step_count - 1]) {
            search->steps[search->step_count++] = step;
        }
    }
}

dcp_status_t
dcp_layout_search(const layout_item_t *items, int64_t count, int64_t rank_count,
                  int64_t shard_limit, int32_t any_order, int64_t *order,
                  int64_t *shard_p)
{
    void *memory;
    int64_t item_bytes = (int64_t)sizeof(layout_key_t) + 3 * (int64_t)sizeof(int64_t);
    DCP_TRY(dcp_alloc_array(count, item_bytes, "layout search", &memory));
    layout_key_t *keys = memory;
    layout_search_t search = {.items = items, .count = count, .rank_count = rank_count};
    search.by_size = (int64_t *)(keys + count);
    search.by_kind = search.by_size + count;
    int64_t *scratch = search.by_kind + count;
    dcp_layout_sort_items(&search, 0, keys, search.by_size);
    bound_and_steps(&search, shard_limit);
    dcp_status_t status;
    if (any_order) {
        memcpy(search.by_kind, search.by_size, (size_t)count * sizeof order[0]);
        find_kinds(&search);
        status =
            search.state_count > 0
                ? search_states(&search, shard_limit, order)
                : dcp_layout_search_orders(&search, shard_limit, keys, scratch, order);
    } else {
        for (int64_t i = 0; i < count; i++) {
            order[i] = i;
        }
        search.order = order;
        status = search_all(&search, shard_limit);
    }
    if (status == DCP_OK) {
        *shard_p = search.best;
    }
    dcp_free(memory);
    return status;
}
