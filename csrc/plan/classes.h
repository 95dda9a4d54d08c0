/* Length classes, as `bucket` and `inter` use them.
 */
#ifndef DCP_CLASSES_H
#define DCP_CLASSES_H

#include "choices.h"

enum { PLAN_CLASSES = 64 };

/* Class k holds the lengths in (2^(k-1), 2^k]. */
typedef struct plan_class {
    int64_t count;          /* sequences of the step; 0: class not in use */
    int64_t longest;        /* of these */
    int64_t *members;       /* [count] in data order */
    plan_setting_t setting; /* of its micro-batches */
    int64_t batch_size;     /* sequences of a full micro-batch */
    double time_s;          /* of a full micro-batch of the longest */
} plan_class_t;

/* k with 2^(k-1) < length <= 2^k. */
int plan_class_of(int64_t length);

/* Counts, longest and members; classes [PLAN_CLASSES]. members lie in *memory_p, which
 * the caller frees. */
dcp_status_t plan_classes_create(const plan_problem_t *problem, plan_class_t *classes,
                                 void **memory_p);

/* As many sequences as the caps allow of its longest, and the time of these; `rate` is
 * of the class's setting. */
void plan_class_fill(plan_class_t *class, int64_t cap_tokens, const plan_rate_t *rate);

/* Bucket parallel with one setting for all classes; see strategy_bucket.c. */
dcp_status_t plan_bucket_with(const plan_problem_t *problem, plan_draft_t *draft,
                              const plan_setting_t *setting);

/* Groups evened out by accumulation counts, with the classes' own settings; see
 * strategy_inter.c. */
dcp_status_t plan_inter_with(const plan_problem_t *problem, plan_draft_t *draft,
                             plan_class_t *classes);

#endif
