/* Strategy `inter-published`: `inter` with the setting that the published comparison
 * ran in: full recompute for all, and for every class groups of 4, or the least larger
 * size that fits its longest sequence. What is left of `inter` are the accumulation
 * counts that even out the groups; see strategy_inter.c.
 */
#include "classes.h"

#include "dcp/alloc.h"

dcp_status_t
plan_inter_published_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_class_t classes[PLAN_CLASSES];
    void *memory;
    DCP_TRY(plan_classes_create(problem, classes, &memory));
    dcp_status_t status = DCP_OK;
    for (int k = 0; k < PLAN_CLASSES && status == DCP_OK; k++) {
        if (classes[k].count > 0) {
            status = plan_published_setting(problem, classes[k].longest,
                                            &classes[k].setting);
        }
    }
    if (status == DCP_OK) {
        status = plan_inter_with(problem, draft, classes);
    }
    dcp_free(memory);
    return status;
}
