/* Strategy `fixed-best`: the best single setting of each step, longest first.
 *
 * Settings are pairs of a group size and one of "none", "selective", "full" that fit
 * the step's longest sequence. For each, sequences go longest first to the aligned
 * group that would end first (micro-batches counted as tokens over cap), and the pair
 * with the least makespan wins; the smaller group where two are equal. Pairs are tried
 * in the order of what none of their plans can beat, and not at all where that is no
 * less than the best found, MOST_TRIES at most. Cost: O(n log n + n log G) a try.
 */
#include "loads.h"

#include "dcp/alloc.h"

enum { MOST_TRIES = 6 };

dcp_status_t
plan_fixed_best_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_pair_t *pairs;
    int64_t count;
    DCP_TRY(plan_pairs_create(problem, problem->longest, &pairs, &count));
    plan_pairs_bound(problem, pairs, count);
    plan_loads_t loads;
    dcp_status_t status = plan_loads_create(problem, &loads);
    if (status != DCP_OK) {
        goto err_pairs;
    }
    plan_setting_t best = pairs[0].setting;
    double least = -1;
    for (int tries = 0; tries < MOST_TRIES && count > 0; tries++) {
        plan_pair_t pair = plan_pairs_take(pairs, &count);
        if (least >= 0 && least <= pair.bound_s) {
            break;
        }
        plan_loads_group(&loads, &pair.setting);
        double last = plan_loads_greedy(&loads);
        if (least < 0 || last < least) {
            least = last;
            best = pair.setting;
        }
    }
    plan_loads_group(&loads, &best);
    plan_loads_greedy(&loads);
    plan_loads_settle(&loads);
    status = plan_loads_emit(&loads, draft);
    plan_loads_destroy(&loads);
err_pairs:
    dcp_free(pairs);
    return status;
}
