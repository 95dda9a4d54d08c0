/* Length classes: powers of two, as the published systems cut them. Cost:
 * O(sequences). */
#include "classes.h"

#include "dcp/alloc.h"

#include <string.h>

int
plan_class_of(int64_t length)
{
    int k = 0;
    while (k < PLAN_CLASSES - 2 && (INT64_C(1) << k) < length) {
        k++;
    }
    return k;
}

dcp_status_t
plan_classes_create(const plan_problem_t *problem, plan_class_t *classes,
                    void **memory_p)
{
    const dcp_plan_request_t *request = problem->request;
    void *memory;
    DCP_TRY(dcp_alloc_array(request->length_count, sizeof(int64_t),
                            "the planner's classes", &memory));
    memset(classes, 0, PLAN_CLASSES * sizeof classes[0]);
    for (int64_t i = 0; i < request->length_count; i++) {
        plan_class_t *class = &classes[plan_class_of(request->lengths[i])];
        class->count++;
        class->longest =
            request->lengths[i] > class->longest ? request->lengths[i] : class->longest;
    }
    int64_t *members = memory;
    for (int k = 0; k < PLAN_CLASSES; k++) {
        classes[k].members = members;
        members += classes[k].count;
        classes[k].count = 0;
    }
    for (int64_t i = 0; i < request->length_count; i++) {
        plan_class_t *class = &classes[plan_class_of(request->lengths[i])];
        class->members[class->count++] = i;
    }
    *memory_p = memory;
    return DCP_OK;
}

void
plan_class_fill(plan_class_t *class, int64_t cap_tokens, const plan_rate_t *rate)
{
    double longest = (double)class->longest;
    class->batch_size = cap_tokens / class->longest;
    double size = (double)class->batch_size;
    class->time_s = plan_rate_time(rate, size * longest, size * longest * longest);
}
