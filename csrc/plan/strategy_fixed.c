/* Strategy `fixed`: one setting given by the request for all groups, for checks and for
 * people who want just that. Balanced like `packed`: see loads.c. The group size must
 * divide the world (dcp_plan_check), so that no rank idles unasked.
 */
#include "loads.h"

dcp_status_t
plan_fixed_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    const dcp_plan_request_t *request = problem->request;
    plan_setting_t setting = {.group = request->fixed_group};
    for (int kind = 0; kind < DCP_RECOMPUTE_KINDS; kind++) {
        setting.recompute[kind] = request->fixed_recompute[kind];
    }
    if (!plan_fits(problem, &setting, problem->longest)) {
        return plan_fits_nowhere(problem, problem->longest, &setting);
    }
    plan_loads_t loads;
    DCP_TRY(plan_loads_create(problem, &loads));
    dcp_status_t status = plan_loads_balance(&loads, &setting, 0);
    if (status == DCP_OK) {
        status = plan_loads_emit(&loads, draft);
    }
    plan_loads_destroy(&loads);
    return status;
}
