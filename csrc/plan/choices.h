/* What the named strategies share: which settings they may choose from, what a setting
 * costs, and a heap.
 */
#ifndef DCP_CHOICES_H
#define DCP_CHOICES_H

#include "plan_draft.h"

/* Time of a micro-batch as a line in its tokens and its sum of squares. */
typedef struct plan_rate {
    double latency_s, token_s, square_s;
} plan_rate_t;

/* A setting for aligned groups: group g is ranks g * group .. + group - 1; the ranks
 * left over where the size does not divide the world idle. */
typedef struct plan_pair {
    plan_setting_t setting;
    int32_t group_count; /* world / group */
    int64_t cap_tokens;
    plan_rate_t rate; /* of the slowest group: one that spans nodes, if any does */
    double bound_s;   /* see plan_pairs_bound */
} plan_pair_t;

/* Of a group whose first rank is `first`. */
plan_rate_t plan_rate(const plan_problem_t *problem, int32_t first,
                      const plan_setting_t *setting);

/* Of the slowest aligned group of that size. */
plan_rate_t plan_rate_slowest(const plan_problem_t *problem,
                              const plan_setting_t *setting);

static inline double
plan_rate_time(const plan_rate_t *rate, double tokens, double squares)
{
    return rate->latency_s + rate->token_s * tokens + rate->square_s * squares;
}

/* Whether a micro-batch may hold a sequence of `length`, of this step or another of the
 * run. */
int plan_fits(const plan_problem_t *problem, const plan_setting_t *setting,
              int64_t length);

/* A setting of group and "none", "selective" or "full". */
plan_setting_t plan_setting_of(const plan_problem_t *problem, int32_t group, int which);

/* Group sizes worth a try, ascending: with k groups nothing is gained by leaving ranks
 * out, so the largest size of every number of groups, and the largest allowed. sizes_p
 * has room for plan_size_room(). */
int64_t plan_size_room(const plan_problem_t *problem);
int64_t plan_sizes(const plan_problem_t *problem, int32_t *sizes_p);

/* Every pair of such a size and "none", "selective", "full" that fits `length`; caps
 * are the problem's. ERR_INFEASIBLE where none does. The caller frees *pairs_p. */
dcp_status_t plan_pairs_create(const plan_problem_t *problem, int64_t length,
                               plan_pair_t **pairs_p, int64_t *count_p);

/* bound_s of every pair: what no plan of the step with aligned groups of that setting
 * alone can beat. */
void plan_pairs_bound(const plan_problem_t *problem, plan_pair_t *pairs, int64_t count);

/* Takes the pair of least bound_s out of the list and returns it. */
plan_pair_t plan_pairs_take(plan_pair_t *pairs, int64_t *count_p);

/* Powers of two up to max_group, and max_group; room for PLAN_POWERS. */
enum { PLAN_POWERS = 32 };
int64_t plan_power_sizes(const plan_problem_t *problem, int32_t sizes_p[PLAN_POWERS]);

/* The least recompute of none, selective, full for which one of `sizes` fits `length`,
 * and the least of these sizes. */
dcp_status_t plan_least_setting(const plan_problem_t *problem, const int32_t *sizes,
                                int64_t size_count, int64_t length,
                                plan_setting_t *setting_p);

/* The published setting: full recompute, group 4 (the world, or max_group, where that
 * is less) or else the least larger, or else the largest smaller one that fits
 * `length`. */
dcp_status_t plan_published_setting(const plan_problem_t *problem, int64_t length,
                                    plan_setting_t *setting_p);

/* ERR_INFEASIBLE: `length`, of the step or the run, fits in no micro-batch that the
 * strategy may form; `widest` is the setting that comes nearest. */
dcp_status_t plan_fits_nowhere(const plan_problem_t *problem, int64_t length,
                               const plan_setting_t *widest);

/* The setting `bucket` takes for the run. */
dcp_status_t plan_bucket_setting(const plan_problem_t *problem,
                                 plan_setting_t *setting_p);

/* A heap of (key, index), least key first, equal keys by least index. */
typedef struct plan_heap_item {
    double key;
    int64_t index;
} plan_heap_item_t;

void plan_heap_build(plan_heap_item_t *heap, int64_t count);
void plan_heap_sift(plan_heap_item_t *heap, int64_t count); /* the top got larger */
void plan_heap_push(plan_heap_item_t *heap, int64_t count, plan_heap_item_t item);

#endif
