/* Settings that the named strategies choose from.
 *
 * A strategy with one setting for all tries pairs of a group size and one of "none",
 * "selective", "full". Sizes are any integers, but of all sizes that give the same
 * number of groups the largest leaves fewest ranks idle and least memory on each: so
 * about 2 sqrt(world) of them are enough (all up to sqrt(world)). A sequence that fits
 * any size fits the largest or one rank alone, and both are among them. What comes
 * after costs a few evaluations of the cost model a pair: times are lines in tokens and
 * squares, taken once a pair. */
#include "choices.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

plan_rate_t
plan_rate(const plan_problem_t *problem, int32_t first, const plan_setting_t *setting)
{
    /* far out on the line, so that the latency does not eat the slope's digits */
    const int64_t many = INT64_C(1) << 40;
    double zero = plan_time(problem, 0, 0, first, setting);
    return (plan_rate_t){
        .latency_s = zero,
        .token_s = (plan_time(problem, many, 0, first, setting) - zero) / (double)many,
        .square_s =
            (plan_time(problem, 0, (double)many * (double)many, first, setting) - zero)
            / ((double)many * (double)many),
    };
}

plan_rate_t
plan_rate_slowest(const plan_problem_t *problem, const plan_setting_t *setting)
{
    const dcp_plan_request_t *request = problem->request;
    for (int32_t first = 0; first <= request->world - setting->group;
         first += setting->group) {
        if (dcp_cost_tier(&request->cost, first, setting->group) == DCP_TIER_CLUSTER) {
            return plan_rate(problem, first, setting);
        }
    }
    return plan_rate(problem, 0, setting);
}

int
plan_fits(const plan_problem_t *problem, const plan_setting_t *setting, int64_t length)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t rows = length / setting->group + (length % setting->group != 0);
    if (request->max_tokens > 0 && rows > request->max_tokens) {
        return 0;
    }
    return request->memory_bytes == 0
           || plan_bytes(problem, length, setting) <= request->memory_bytes;
}

plan_setting_t
plan_setting_of(const plan_problem_t *problem, int32_t group, int which)
{
    plan_setting_t setting = {.group = group};
    plan_recompute(&problem->request->cost, which, setting.recompute);
    return setting;
}

int64_t
plan_size_room(const plan_problem_t *problem)
{
    int64_t root = 1;
    while (root * root < problem->request->world) {
        root++;
    }
    return 2 * root + 2;
}

int64_t
plan_sizes(const plan_problem_t *problem, int32_t *sizes_p)
{
    int32_t world = problem->request->world, size = 0;
    int64_t count = 0;
    while (size < problem->max_group) {
        /* the largest size with as many groups as size + 1 */
        int32_t next = world / (world / (size + 1));
        size = next < problem->max_group ? next : problem->max_group;
        sizes_p[count++] = size;
    }
    return count;
}

int64_t
plan_power_sizes(const plan_problem_t *problem, int32_t sizes_p[PLAN_POWERS])
{
    int64_t count = 0;
    for (int32_t size = 1; size <= problem->max_group; size *= 2) {
        sizes_p[count++] = size;
    }
    if (sizes_p[count - 1] != problem->max_group) {
        sizes_p[count++] = problem->max_group;
    }
    return count;
}

dcp_status_t
plan_fits_nowhere(const plan_problem_t *problem, int64_t length,
                  const plan_setting_t *widest)
{
    const dcp_plan_request_t *request = problem->request;
    char name[64] = "the longest sequence of the run";
    for (int64_t i = 0; i < request->length_count; i++) {
        if (request->lengths[i] == length) {
            snprintf(name, sizeof name, "lengths[%" PRId64 "]", i);
            break;
        }
    }
    int64_t bytes = plan_bytes(problem, length, widest);
    if (request->memory_bytes > 0 && bytes > request->memory_bytes) {
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "%s = %" PRId64
                        " tokens fits in no micro-batch of strategy '%s': on groups of "
                        "%d it needs %" PRId64
                        " bytes a rank, and memory_bytes caps a rank at %" PRId64,
                        name, length, request->strategy, widest->group, bytes,
                        request->memory_bytes);
    }
    return DCP_FAIL(
        DCP_ERR_INFEASIBLE,
        "%s = %" PRId64
        " tokens fits in no micro-batch of strategy '%s': groups of %d, and "
        "max_tokens caps each of their ranks at %" PRId64,
        name, length, request->strategy, widest->group, request->max_tokens);
}

dcp_status_t
plan_pairs_create(const plan_problem_t *problem, int64_t length, plan_pair_t **pairs_p,
                  int64_t *count_p)
{
    int64_t room = plan_size_room(problem);
    void *memory;
    DCP_TRY(dcp_alloc(
        room * (int64_t)(PLAN_RECOMPUTES * sizeof(plan_pair_t) + sizeof(int32_t)),
        "the planner's settings", &memory));
    plan_pair_t *pairs = memory;
    int32_t *sizes = (int32_t *)(void *)(pairs + room * PLAN_RECOMPUTES);
    int64_t size_count = plan_sizes(problem, sizes), count = 0;
    for (int64_t i = 0; i < size_count; i++) {
        for (int which = 0; which < PLAN_RECOMPUTES; which++) {
            plan_setting_t setting = plan_setting_of(problem, sizes[i], which);
            if (plan_fits(problem, &setting, length)) {
                pairs[count++] = (plan_pair_t){
                    .setting = setting,
                    .group_count = problem->request->world / setting.group,
                    .cap_tokens = plan_cap_tokens(problem, &setting),
                    .rate = plan_rate_slowest(problem, &setting),
                };
            }
        }
    }
    if (count == 0) {
        plan_setting_t widest = plan_setting_of(problem, problem->max_group, PLAN_FULL);
        dcp_free(memory);
        return plan_fits_nowhere(problem, length, &widest);
    }
    *pairs_p = pairs;
    *count_p = count;
    return DCP_OK;
}

void
plan_pairs_bound(const plan_problem_t *problem, plan_pair_t *pairs, int64_t count)
{
    const dcp_plan_request_t *request = problem->request;
    double tokens = 0, squares = 0, longest = (double)problem->longest;
    for (int64_t i = 0; i < request->length_count; i++) {
        double length = (double)request->lengths[i];
        tokens += length;
        squares += length * length;
    }
    for (int64_t i = 0; i < count; i++) {
        const plan_rate_t *rate = &pairs[i].rate;
        double batches = ceil(tokens / (double)pairs[i].cap_tokens);
        double work = rate->token_s * tokens + rate->square_s * squares;
        double even = (work + rate->latency_s * batches) / pairs[i].group_count;
        double alone = plan_rate_time(rate, longest, longest * longest);
        pairs[i].bound_s = even > alone ? even : alone;
    }
}

plan_pair_t
plan_pairs_take(plan_pair_t *pairs, int64_t *count_p)
{
    int64_t least = 0, last = *count_p - 1;
    for (int64_t i = 0; i <= last; i++) {
        least = pairs[i].bound_s < pairs[least].bound_s ? i : least;
    }
    plan_pair_t pair = pairs[least];
    for (int64_t i = least; i < last; i++) {
        pairs[i] = pairs[i + 1]; /* keeps the order: equal bounds, the smaller size */
    }
    *count_p = last;
    return pair;
}

dcp_status_t
plan_least_setting(const plan_problem_t *problem, const int32_t *sizes,
                   int64_t size_count, int64_t length, plan_setting_t *setting_p)
{
    for (int which = 0; which < PLAN_RECOMPUTES; which++) {
        for (int64_t i = 0; i < size_count; i++) {
            *setting_p = plan_setting_of(problem, sizes[i], which);
            if (plan_fits(problem, setting_p, length)) {
                return DCP_OK;
            }
        }
    }
    return plan_fits_nowhere(problem, length, setting_p);
}

dcp_status_t
plan_published_setting(const plan_problem_t *problem, int64_t length,
                       plan_setting_t *setting_p)
{
    enum { PUBLISHED_GROUP = 4 };
    int32_t usual =
        problem->max_group < PUBLISHED_GROUP ? problem->max_group : PUBLISHED_GROUP;
    for (int32_t group = usual; group <= problem->max_group; group++) {
        *setting_p = plan_setting_of(problem, group, PLAN_FULL);
        if (plan_fits(problem, setting_p, length)) {
            return DCP_OK;
        }
    }
    plan_setting_t widest = *setting_p;
    for (int32_t group = usual - 1; group >= 1; group--) {
        *setting_p = plan_setting_of(problem, group, PLAN_FULL);
        if (plan_fits(problem, setting_p, length)) {
            return DCP_OK;
        }
    }
    return plan_fits_nowhere(problem, length, &widest);
}

static int
before(const plan_heap_item_t *a, const plan_heap_item_t *b)
{
    return a->key < b->key || (a->key == b->key && a->index < b->index);
}

static void
heap_sift_at(plan_heap_item_t *heap, int64_t at, int64_t count)
{
    plan_heap_item_t moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && before(&heap[child + 1], &heap[child]);
        if (before(&moved, &heap[child])) {
            break;
        }
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

void
plan_heap_sift(plan_heap_item_t *heap, int64_t count)
{
    heap_sift_at(heap, 0, count);
}

void
plan_heap_push(plan_heap_item_t *heap, int64_t count, plan_heap_item_t item)
{
    int64_t at = count;
    for (; at > 0 && before(&item, &heap[(at - 1) / 2]); at = (at - 1) / 2) {
        heap[at] = heap[(at - 1) / 2];
    }
    heap[at] = item;
}

void
plan_heap_build(plan_heap_item_t *heap, int64_t count)
{
    for (int64_t i = count / 2 - 1; i >= 0; i--) {
        heap_sift_at(heap, i, count);
    }
}
