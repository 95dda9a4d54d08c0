/* Strategy `bucket-published`: bucket parallel with the setting that the published
 * comparison ran it in: groups of 4, or the least larger size that fits the run's
 * longest sequence, and full recompute for all. The rest is strategy_bucket.c.
 */
#include "classes.h"

dcp_status_t
plan_bucket_published_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_setting_t setting;
    DCP_TRY(plan_published_setting(problem, problem->run_longest, &setting));
    return plan_bucket_with(problem, draft, &setting);
}
