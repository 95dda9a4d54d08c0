/* Strategy `knapformer`: bags of ranks with a capacity (KnapFormer's sequence
 * balancer).
 *
 * The world is cut into *bags*, groups that stay for the step. There the user gives the
 * bag sizes; here it is the least size, with the least of no, selective and full
 * recompute, that holds the longest sequence of the run, of the sizes that divide the
 * world or else of all; ranks left over form one smaller bag. A bag's capacity is its
 * share of the step's work, total / world x size, where a sequence's work is that of
 * one rank (b len + c len^2: no communication and no latency in it). Longest first, a
 * sequence goes to the least occupied bag, occupied work over capacity, of those that
 * can hold it. There a bag computes its sequences at once; here they are split into
 * micro-batches where the caps demand it. Cost: O(n log n + n log bags).
 */
#include "loads.h"

#include "dcp/alloc.h"

#include <stddef.h>

/* Adds the bag of the ranks that are left over, if any. */
static void
add_small_bag(const plan_problem_t *problem, plan_loads_t *loads)
{
    int32_t world = problem->request->world;
    plan_setting_t setting = loads->loads[0].setting;
    setting.group = world % setting.group;
    if (setting.group == 0) {
        return;
    }
    int32_t first = world - setting.group;
    loads->loads[loads->load_count++] = (plan_load_t){
        .setting = setting,
        .first = first,
        .rate = plan_rate(problem, first, &setting),
        .cap_tokens = plan_cap_tokens(problem, &setting),
    };
}

/* Shares out: all bags of one size in a heap by work, the small one beside it. */
static void
deal(const plan_problem_t *problem, plan_loads_t *loads, int64_t bag_count)
{
    const dcp_plan_request_t *request = problem->request;
    const plan_load_t *small =
        bag_count < loads->load_count ? &loads->loads[bag_count] : NULL;
    double small_work = 0;
    for (int64_t b = 0; b < bag_count; b++) {
        loads->heap[b] = (plan_heap_item_t){.key = 0, .index = b};
    }
    for (int64_t i = 0; i < request->length_count; i++) {
        int64_t item = problem->order[i];
        /* capacities are as the sizes, so occupancies compare as work over size */
        if (small != NULL && request->lengths[item] <= small->cap_tokens
            && small_work / small->setting.group
                   < loads->heap[0].key / loads->loads[0].setting.group) {
            small_work += problem->work_s[item];
            loads->part[item] = (int32_t)bag_count;
            continue;
        }
        loads->part[item] = (int32_t)loads->heap[0].index;
        loads->heap[0].key += problem->work_s[item];
        plan_heap_sift(loads->heap, bag_count);
    }
}

/* The bag size and what is recomputed, for the run. */
static dcp_status_t
choose_bag(const plan_problem_t *problem, plan_setting_t *setting_p)
{
    int32_t world = problem->request->world;
    void *memory;
    DCP_TRY(dcp_alloc_array(3 * plan_size_room(problem), sizeof(int32_t),
                            "the planner's sizes", &memory));
    int32_t *sizes = memory;
    int64_t count = plan_sizes(problem, sizes), whole = 0;
    int32_t *order = sizes + count; /* those that divide the world, then all */
    for (int64_t i = 0; i < count; i++) {
        if (world % sizes[i] == 0) {
            order[whole++] = sizes[i];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        order[whole + i] = sizes[i];
    }
    dcp_status_t status = plan_least_setting(problem, order, whole + count,
                                             problem->run_longest, setting_p);
    dcp_free(memory);
    return status;
}

dcp_status_t
plan_knapformer_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_setting_t setting;
    DCP_TRY(choose_bag(problem, &setting));
    plan_loads_t loads;
    DCP_TRY(plan_loads_create(problem, &loads));
    plan_loads_group(&loads, &setting);
    int64_t bag_count = loads.load_count;
    add_small_bag(problem, &loads);
    deal(problem, &loads, bag_count);
    plan_loads_settle(&loads);
    dcp_status_t status = plan_loads_emit(&loads, draft);
    plan_loads_destroy(&loads);
    return status;
}
