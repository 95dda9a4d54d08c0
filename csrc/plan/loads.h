/* Groups that share out a step's sequences and keep them until its end: what `packed`,
 * `fixed`, `fixed-best` and `knapformer` do.
 */
#ifndef DCP_LOADS_H
#define DCP_LOADS_H

#include "choices.h"

typedef struct plan_load {
    plan_setting_t setting;
    int32_t first; /* rank */
    plan_rate_t rate;
    int64_t cap_tokens;
    int64_t *items;          /* sequences, longest first */
    int64_t count, capacity; /* capacity: a few more than at first */
    double time_s;           /* with the latency of each micro-batch */
} plan_load_t;

/* n sequences, W ranks. */
typedef struct plan_loads {
    const plan_problem_t *problem;
    plan_load_t *loads; /* [load_count] at most W */
    int32_t load_count;
    int32_t *part;  /* [n] load of each sequence */
    double *work_s; /* [n] of each sequence on the slowest load, without latency */
    double makespan_s;
    int64_t *items;            /* [n + slack W] the loads' runs */
    int64_t *scratch, *trial;  /* [n + 1] each */
    int64_t *bins, *bin_order; /* [n] */
    double *keys;              /* [n] */
    plan_heap_item_t *heap;    /* [W] */
    plan_packer_t *packer;
} plan_loads_t;

dcp_status_t plan_loads_create(const plan_problem_t *problem, plan_loads_t *loads);
void plan_loads_destroy(plan_loads_t *loads);

/* Aligned groups of one setting, all empty; work_s filled. */
void plan_loads_group(plan_loads_t *loads, const plan_setting_t *setting);

/* part[] longest first to the load that would end first. Returns the estimated
 * makespan: micro-batches counted as tokens / cap, rounded up. */
double plan_loads_greedy(plan_loads_t *loads);

/* Puts the sequences where part[] says and times the loads. */
void plan_loads_settle(plan_loads_t *loads);

/* Writes every load's micro-batches, most work first. */
dcp_status_t plan_loads_emit(plan_loads_t *loads, plan_draft_t *draft);

/* The largest differencing method, then moves and swaps, with one setting for all;
 * `bound_s` is what no plan of it can beat. */
dcp_status_t plan_loads_balance(plan_loads_t *loads, const plan_setting_t *setting,
                                double bound_s);

#endif
