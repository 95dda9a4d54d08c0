/* Lists and prices of strategy `dcp`'s search: one block of memory, taken once.
 *
 * Sizes: every integer up to 12, then steps of a sixth, and all that are worth a
 * second look: whole nodes and the largest group. What fits a size is found once.
 */
#include "strategy_dcp.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { EVERY_SIZE_TO = 12 };

/* Next size to try after `group`. */
static int32_t
next_size(const plan_problem_t *problem, int32_t group)
{
    int32_t most = problem->max_group;
    int32_t next = group < EVERY_SIZE_TO ? group + 1 : group + group / 6;
    int64_t node = problem->request->cost.node_ranks;
    if (node > 0 && group >= EVERY_SIZE_TO) { /* the whole nodes passed over */
        int64_t whole = (group / node + 1) * node;
        next = whole < next ? (int32_t)whole : next;
    }
    return group < most && next > most ? most : next;
}

static int32_t
count_sizes(const plan_problem_t *problem)
{
    int32_t count = 0;
    for (int32_t p = 1; p <= problem->max_group; p = next_size(problem, p)) {
        count++;
    }
    return count;
}

static void
fill_sizes(dcp_search_t *s)
{
    const plan_problem_t *problem = s->problem;
    int32_t p = 1;
    for (int32_t k = 0; k < s->size_count; k++, p = next_size(problem, p)) {
        dcp_size_t *size = &s->sizes[k];
        size->group = p;
        for (int tier = 0; tier < DCP_TIERS; tier++) {
            plan_price_init(&problem->request->cost, p, tier, &size->price[tier]);
        }
        size->cap_any = 0;
        for (int which = PLAN_NONE; which < PLAN_RECOMPUTES; which++) {
            plan_setting_t setting = {.group = p};
            plan_recompute(&problem->request->cost, which, setting.recompute);
            int64_t cap = plan_cap_tokens(problem, &setting);
            size->cap_none = which == PLAN_NONE ? cap : size->cap_none;
            size->cap_any = cap > size->cap_any ? cap : size->cap_any;
        }
    }
}

typedef struct arena {
    char *base; /* NULL: only measure */
    size_t used;
} arena_t;

/* The next list, in whole words. */
static void *
take(arena_t *arena, int64_t count, size_t item_bytes)
{
    size_t start = arena->used;
    arena->used += ((size_t)count * item_bytes + 7) / 8 * 8;
    return arena->base == NULL ? NULL : arena->base + start;
}

/* One walk lays out and measures. */
static size_t
lay_out(dcp_search_t *s, char *base)
{
    arena_t arena = {base, 0};
    int64_t n = s->count, w = s->world, k = s->size_count;
    s->sizes = take(&arena, k, sizeof s->sizes[0]);
    s->places = take(&arena, n, sizeof s->places[0]);
    s->best_places = take(&arena, n, sizeof s->places[0]);
    s->ranks = take(&arena, w, sizeof s->ranks[0]);
    s->load_s = take(&arena, w, sizeof s->load_s[0]);
    s->rest_s = take(&arena, w, sizeof s->rest_s[0]);
    s->heap = take(&arena, w, sizeof s->heap[0]);
    s->heap_at = take(&arena, w, sizeof s->heap_at[0]);
    s->failed_s = take(&arena, k * DCP_TIERS, sizeof s->failed_s[0]);
    s->room_s = take(&arena, k, sizeof s->room_s[0]);
    s->queue = take(&arena, w, sizeof s->queue[0]);
    s->hint = take(&arena, k, sizeof s->hint[0]);
    s->hint_s = take(&arena, k, sizeof s->hint_s[0]);
    s->alone_s = take(&arena, n, sizeof s->alone_s[0]);
    s->run_starts = take(&arena, w + 1, sizeof s->run_starts[0]);
    s->run_counts = take(&arena, w, sizeof s->run_counts[0]);
    s->items = take(&arena, n + DCP_SEARCH_SLACK * w, sizeof s->items[0]);
    s->trial = take(&arena, 2 * (n + 1), sizeof s->trial[0]);
    s->bins = take(&arena, n, sizeof s->bins[0]);
    s->keys = take(&arena, n, sizeof s->keys[0]);
    s->batches = take(&arena, n, sizeof s->batches[0]);
    s->batch_of = take(&arena, n, sizeof s->batch_of[0]);
    s->last_batch = take(&arena, w, sizeof s->last_batch[0]);
    return arena.used;
}

static void
fill_alone(dcp_search_t *s)
{
    const plan_problem_t *problem = s->problem;
    const int64_t *lengths = problem->request->lengths;
    int64_t last_length = 0;
    double last = 0;
    for (int64_t k = 0; k < s->count; k++) {
        int64_t i = problem->order[k];
        if (dcp_search_is_packed(s, i)) {
            s->alone_s[i] = problem->work_s[i];
            continue;
        }
        if (lengths[i] != last_length) {
            last_length = lengths[i];
            last = dcp_search_time(s, 0, DCP_TIER_NODE, lengths[i]);
        }
        s->alone_s[i] = last;
    }
}

dcp_status_t
dcp_search_init(dcp_search_t *search, const plan_problem_t *problem)
{
    *search = (dcp_search_t){
        .problem = problem,
        .count = problem->request->length_count,
        .world = problem->request->world,
        .start_s = problem->request->cost.latency_s,
        .size_count = count_sizes(problem),
    };
    size_t bytes = lay_out(search, NULL);
    DCP_TRY(dcp_alloc((int64_t)bytes, "the planner's search", &search->memory));
    lay_out(search, search->memory);
    dcp_status_t status = plan_packer_create(search->count, &search->packer);
    if (status != DCP_OK) {
        dcp_free(search->memory);
        return status;
    }
    fill_sizes(search);
    fill_alone(search);
    return DCP_OK;
}

void
dcp_search_fini(dcp_search_t *search)
{
    plan_packer_destroy(search->packer);
    dcp_free(search->memory);
}

double
dcp_search_time(const dcp_search_t *search, int32_t size, int tier, int64_t length)
{
    static const int32_t none[DCP_RECOMPUTE_KINDS] = {0};
    const dcp_size_t *of = &search->sizes[size];
    const plan_price_t *price = &of->price[tier];
    double squares = (double)length * (double)length;
    if (length <= of->cap_none) {
        return price->start_s + plan_price_work(price, (double)length, squares, none);
    }
    if (length > of->cap_any) {
        return INFINITY;
    }
    int32_t recompute[DCP_RECOMPUTE_KINDS];
    return price->start_s
           + plan_least_recompute(search->problem, price, length, squares, recompute);
}
