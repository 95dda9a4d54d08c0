/* Places the sequences of a step so that every rank ends by a target time T.
 *
 * Longest first. A sequence goes to the least loaded rank if it ends there by T; else
 * to the smallest group (in rank-seconds, where memory forces recompute) that has a
 * block of consecutive ranks on which it ends by T: inside a node first, where its
 * ranks wait least for each other first. So near the end what is left over is cut
 * finer and finer, which also balances few or equal sequences. If nothing ends by T, T
 * rises to the least end there is, and the search goes on. Groups come first on every
 * rank, in the order of placing, so they need no waiting for single sequences and their
 * order is the same everywhere. Cost: O(n log W) for singles, O(W) for each group size
 * that is looked at; sizes that found no block are not tried again for longer ones.
 */
#include "strategy_dcp.h"

#include <math.h>

enum { BLOCKS_LOOKED_AT = 48 };

/* Less than this is not worth a group; a target rises by no less. */
static const double least_rise = 2e-4;

/* A time this much shorter than one that found no block is not tried. */
static const double near_enough = 0.001;

/* A heap of ranks by load; loads only grow, so ranks only sink. */
static void
sink(dcp_search_t *s, int32_t rank)
{
    int32_t at = s->heap_at[rank], count = s->world;
    double load = s->load_s[rank];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= count) {
            break;
        }
        if (child + 1 < count) {
            double left = s->load_s[s->heap[child]], right;
            right = s->load_s[s->heap[child + 1]];
            child +=
                right < left || (right == left && s->heap[child + 1] < s->heap[child]);
        }
        int32_t other = s->heap[child];
        if (load < s->load_s[other] || (load == s->load_s[other] && rank < other)) {
            break;
        }
        s->heap[at] = other;
        s->heap_at[other] = at;
        at = child;
    }
    s->heap[at] = rank;
    s->heap_at[rank] = at;
}

static double
rank_load(const dcp_search_t *s, const dcp_rank_t *rank)
{
    return rank->group_s + rank->single_s
           + s->start_s * dcp_search_batches(s, rank->tokens);
}

/* End of `rank` with sequence i as one more single. */
static double
single_end(const dcp_search_t *s, int32_t rank, int64_t i)
{
    dcp_rank_t with = s->ranks[rank];
    with.single_s += s->alone_s[i];
    if (dcp_search_is_packed(s, i)) {
        with.tokens += s->problem->request->lengths[i];
    }
    return rank_load(s, &with);
}

static void
add_single(dcp_search_t *s, int32_t rank, int64_t i)
{
    s->ranks[rank].single_s += s->alone_s[i];
    if (dcp_search_is_packed(s, i)) {
        s->ranks[rank].tokens += s->problem->request->lengths[i];
    }
    s->load_s[rank] = rank_load(s, &s->ranks[rank]);
    s->places[i] = (dcp_place_t){rank, 1};
    sink(s, rank);
}

/* A block and when its ranks could start and would end. */
typedef struct block {
    int32_t first;
    double end_s, waste_s; /* waste: rank-seconds of waiting for each other */
} block_t;

static block_t
look_at(const dcp_search_t *s, int32_t first, int32_t group, double time_s)
{
    double start = 0, singles = 0, sum = 0;
    for (int32_t r = first; r < first + group; r++) {
        double ready = s->ranks[r].group_s, rest = s->load_s[r] - ready;
        start = ready > start ? ready : start;
        singles = rest > singles ? rest : singles;
        sum += ready;
    }
    return (block_t){first, start + time_s + singles, group * start - sum};
}

/* The block of least waste, from rank `from` on, that ends by target_s; inside a node
 * of `node` ranks (0: anywhere). Returns whether there is one. */
static int
find_block(const dcp_search_t *s, int32_t from, int32_t group, int64_t node,
           double time_s, double target_s, block_t *best)
{
    int32_t run = 0, looked = 0, found = 0;
    for (int32_t r = from; r < s->world && looked < BLOCKS_LOOKED_AT; r++) {
        run = node > 0 && r % node == 0 ? 0 : run;
        if (s->load_s[r] + time_s > target_s) {
            run = 0;
            continue;
        }
        if (++run < group) {
            continue;
        }
        looked++;
        block_t block = look_at(s, r - group + 1, group, time_s);
        if (block.end_s > target_s || (found && block.waste_s >= best->waste_s)) {
            continue;
        }
        *best = block;
        found = 1;
        if (block.waste_s <= 1e-6 * time_s) {
            break;
        }
    }
    return found;
}

/* Most seconds that any block could still take until target_s: what the blocks' fullest
 * ranks leave. A sliding maximum; s->queue holds ranks with descending loads. */
static double
most_room(const dcp_search_t *s, int32_t group, double target_s)
{
    int32_t *queue = s->queue, head = 0, tail = 0;
    double least = INFINITY;
    for (int32_t r = 0; r < s->world; r++) {
        while (tail > head && s->load_s[queue[tail - 1]] <= s->load_s[r]) {
            tail--;
        }
        queue[tail++] = r;
        head += queue[head] <= r - group;
        if (r - group + 1 >= 0) {
            least = fmin(least, s->load_s[queue[head]]);
        }
    }
    return target_s - least;
}

/* Larger blocks leave no more than those of size k. */
static void
note_room(dcp_search_t *s, int32_t k, double room_s)
{
    room_s *= 1 + 1e-12;
    for (; k < s->size_count && s->room_s[k] > room_s; k++) {
        s->room_s[k] = room_s;
    }
}

static void
add_group(dcp_search_t *s, int32_t first, int32_t group, double time_s, int64_t i)
{
    double start = 0;
    for (int32_t r = first; r < first + group; r++) {
        start = s->ranks[r].group_s > start ? s->ranks[r].group_s : start;
    }
    for (int32_t r = first; r < first + group; r++) {
        s->ranks[r].group_s = start + time_s;
        s->load_s[r] = rank_load(s, &s->ranks[r]);
        sink(s, r);
    }
    s->places[i] = (dcp_place_t){first, group};
}

static int
tier_of(const dcp_search_t *s, int32_t first, int32_t group)
{
    return dcp_cost_tier(&s->problem->request->cost, first, group);
}

/* Places sequence i on a block of size k that ends by target_s, if there is one. */
static int
try_size(dcp_search_t *s, int32_t k, int64_t i, double target_s)
{
    int64_t length = s->problem->request->lengths[i];
    int64_t node = s->problem->request->cost.node_ranks;
    int32_t group = s->sizes[k].group;
    double least_load = s->load_s[s->heap[0]];
    for (int tier = DCP_TIER_NODE; tier < DCP_TIERS; tier++) {
        int whole = node == 0 || group <= node; /* may lie inside a node */
        if (tier == DCP_TIER_NODE ? !whole : node == 0) {
            continue;
        }
        double time = dcp_search_time(s, k, tier, length);
        double *failed_s = &s->failed_s[k * DCP_TIERS + tier];
        if (time >= *failed_s || time > s->room_s[k] || least_load + time > target_s) {
            continue;
        }
        block_t block;
        int32_t from = time >= 0.98 * s->hint_s[k] ? s->hint[k] : 0;
        int64_t inside = tier == DCP_TIER_NODE ? node : 0;
        if (find_block(s, from, group, inside, time, target_s, &block)
            || (from > 0 && find_block(s, 0, group, inside, time, target_s, &block))) {
            s->hint[k] = block.first;
            s->hint_s[k] = time;
            add_group(s, block.first, group,
                      dcp_search_time(s, k, tier_of(s, block.first, group), length), i);
            return 1;
        }
        *failed_s = time * (1 - near_enough);
        if (inside == 0) {
            note_room(s, k, most_room(s, group, target_s));
        }
    }
    return 0;
}

/* Sizes by rank-seconds where memory forces recompute; else they ascend anyway. */
static int
try_groups(dcp_search_t *s, int64_t i, double target_s, int with_single)
{
    int64_t length = s->problem->request->lengths[i];
    if (dcp_search_is_packed(s, i)) {
        for (int32_t k = 1; k < s->size_count; k++) {
            if (try_size(s, k, i, target_s)) {
                return 1;
            }
        }
        return 0;
    }
    double last = -1;
    for (;;) {
        double least = INFINITY;
        int32_t best = -1;
        for (int32_t k = with_single ? 0 : 1; k < s->size_count; k++) {
            int tier = plan_best_tier(&s->problem->request->cost, s->sizes[k].group);
            double rank_s = s->sizes[k].group * dcp_search_time(s, k, tier, length);
            if (rank_s > last && rank_s < least) {
                least = rank_s;
                best = k;
            }
        }
        if (best < 0) {
            return 0;
        }
        if (best == 0 && single_end(s, s->heap[0], i) <= target_s) {
            add_single(s, s->heap[0], i);
            return 1;
        }
        if (best > 0 && try_size(s, best, i, target_s)) {
            return 1;
        }
        last = least;
    }
}

/* Places sequence i where it ends first, over all sizes and blocks that follow each
 * other without overlap. Returns that end. */
static double
place_least(dcp_search_t *s, int64_t i)
{
    int64_t length = s->problem->request->lengths[i];
    double least = single_end(s, s->heap[0], i);
    int32_t best = 0, best_first = s->heap[0];
    for (int32_t k = 1; k < s->size_count; k++) {
        int32_t group = s->sizes[k].group;
        for (int32_t f = 0; f + group <= s->world; f += group) {
            double time = dcp_search_time(s, k, tier_of(s, f, group), length);
            if (s->load_s[f] + time >= least) {
                continue;
            }
            block_t block = look_at(s, f, group, time);
            if (block.end_s < least) {
                least = block.end_s;
                best = k;
                best_first = f;
            }
        }
    }
    if (best == 0) {
        add_single(s, best_first, i);
    } else {
        int32_t group = s->sizes[best].group;
        int tier = tier_of(s, best_first, group);
        add_group(s, best_first, group, dcp_search_time(s, best, tier, length), i);
    }
    return least;
}

static void
forget_failures(dcp_search_t *s)
{
    for (int32_t k = 0; k < s->size_count; k++) {
        s->failed_s[k * DCP_TIERS] = s->failed_s[k * DCP_TIERS + 1] = INFINITY;
        s->room_s[k] = INFINITY;
        s->hint[k] = 0;
        s->hint_s[k] = INFINITY;
    }
}

static double
least_group_start(const dcp_search_t *s)
{
    double least = INFINITY;
    for (int32_t k = 1; k < s->size_count; k++) {
        least = fmin(least, s->sizes[k].price[DCP_TIER_NODE].start_s);
    }
    return least;
}

double
dcp_search_place(dcp_search_t *search, double target_s, double limit_s)
{
    dcp_search_t *s = search;
    for (int32_t r = 0; r < s->world; r++) {
        s->ranks[r] = (dcp_rank_t){0};
        s->load_s[r] = 0;
        s->heap[r] = s->heap_at[r] = r;
    }
    forget_failures(s);
    double group_start = least_group_start(s);
    for (int64_t k = 0; k < s->count; k++) {
        int64_t i = s->problem->order[k];
        int packed = dcp_search_is_packed(s, i);
        double end = isinf(s->alone_s[i]) ? INFINITY : single_end(s, s->heap[0], i);
        if (packed && end <= target_s) {
            add_single(s, s->heap[0], i);
            continue;
        }
        int may_group = s->load_s[s->heap[0]] + group_start < target_s;
        if (packed && (end <= target_s * (1 + least_rise) || !may_group)) {
            target_s = fmax(end, target_s);
            forget_failures(s);
            add_single(s, s->heap[0], i);
            continue;
        }
        if (may_group && try_groups(s, i, target_s, !isinf(end))) {
            continue;
        }
        target_s = fmax(place_least(s, i), target_s * (1 + least_rise));
        forget_failures(s);
        if (target_s > limit_s) {
            return target_s;
        }
    }
    double last = 0;
    for (int32_t r = 0; r < s->world; r++) {
        last = fmax(last, s->load_s[r]);
    }
    return last;
}
