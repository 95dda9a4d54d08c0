/* Strategy `packed`: balanced packing with one setting for all.
 *
 * A setting is a group size and one of "none", "selective", "full". Those that fit the
 * longest sequence of the *run* compete anew in every step, and the one whose plan of
 * this step ends first is kept: packed's own best pair. Groups are aligned blocks of
 * consecutive ranks; ranks left over where the size does not divide the world idle.
 * Pairs are tried in the order of what none of their plans can beat (work over groups,
 * the longest sequence alone), and not at all where that is no less than the best plan
 * found: so few are tried, MOST_TRIES at most. How a pair's sequences are shared out is
 * in loads.c: Karmarkar and Karp's differencing, then moves and swaps.
 */
#include "loads.h"

#include "dcp/alloc.h"

#include <stddef.h>

enum { MOST_TRIES = 3 };

/* Leaves the best pair's plan in *best_p, one of the two. */
static dcp_status_t
try_pairs(plan_pair_t *pairs, int64_t count, plan_loads_t loads[2],
          plan_loads_t **best_p)
{
    plan_loads_t *best = NULL, *trial = &loads[0];
    for (int tries = 0; tries < MOST_TRIES && count > 0; tries++) {
        plan_pair_t pair = plan_pairs_take(pairs, &count);
        if (best != NULL && best->makespan_s <= pair.bound_s) {
            break;
        }
        DCP_TRY(plan_loads_balance(trial, &pair.setting, pair.bound_s));
        if (best == NULL || trial->makespan_s < best->makespan_s) {
            best = trial;
            trial = best == &loads[0] ? &loads[1] : &loads[0];
        }
    }
    *best_p = best;
    return DCP_OK;
}

dcp_status_t
plan_packed_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_pair_t *pairs;
    int64_t count;
    DCP_TRY(plan_pairs_create(problem, problem->run_longest, &pairs, &count));
    plan_pairs_bound(problem, pairs, count);
    plan_loads_t loads[2], *best;
    dcp_status_t status = plan_loads_create(problem, &loads[0]);
    if (status != DCP_OK) {
        goto err_pairs;
    }
    status = plan_loads_create(problem, &loads[1]);
    if (status != DCP_OK) {
        goto err_first;
    }
    status = try_pairs(pairs, count, loads, &best);
    if (status == DCP_OK) {
        status = plan_loads_emit(best, draft);
    }
    plan_loads_destroy(&loads[1]);
err_first:
    plan_loads_destroy(&loads[0]);
err_pairs:
    dcp_free(pairs);
    return status;
}
