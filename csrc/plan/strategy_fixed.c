/* Strategy `fixed`: one setting given by the request for all groups, for checks and for
 * people who want just that. Balanced like `packed`: see loads.c. The group size must
 * divide the world, so that no rank idles unasked.
 */
#include "loads.h"

static dcp_status_t
check_setting(const plan_problem_t *problem, const plan_setting_t *setting)
{
    int32_t world = problem->request->world;
    if (setting->group < 1 || world % setting->group != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "plan.sp = %d: groups of that size must divide the world of "
                        "%d ranks",
                        setting->group, world);
    }
    if (setting->group > problem->max_group) {
        return DCP_FAIL(DCP_ERR_ARG, "plan.sp = %d must be <= max_group = %d",
                        setting->group, problem->max_group);
    }
    double seconds;
    DCP_TRY(dcp_cost_time(&problem->request->cost, 0, 0, setting->group, DCP_TIER_NODE,
                          setting->recompute, &seconds)); /* checks the counts */
    return plan_fits(problem, setting, problem->longest)
               ? DCP_OK
               : plan_fits_nowhere(problem, problem->longest, setting);
}

dcp_status_t
plan_fixed_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    const dcp_plan_request_t *request = problem->request;
    plan_setting_t setting = {.group = request->fixed_group};
    for (int kind = 0; kind < DCP_RECOMPUTE_KINDS; kind++) {
        setting.recompute[kind] = request->fixed_recompute[kind];
    }
    DCP_TRY(check_setting(problem, &setting));
    plan_loads_t loads;
    DCP_TRY(plan_loads_create(problem, &loads));
    dcp_status_t status = plan_loads_balance(&loads, &setting, 0);
    if (status == DCP_OK) {
        status = plan_loads_emit(&loads, draft);
    }
    plan_loads_destroy(&loads);
    return status;
}
