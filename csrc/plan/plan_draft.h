/* What the driver and the strategies of plan/ share: the checked problem that a
 * strategy reads, the draft that it writes, and helpers.
 */
#ifndef DCP_PLAN_DRAFT_H
#define DCP_PLAN_DRAFT_H

#include "dcp/plan.h"

/* A checked request and what follows from it. */
typedef struct plan_problem {
    const dcp_plan_request_t *request;
    const double
        *work_s; /* [length_count] time of a sequence beyond latency_s, 0 or more */
    int64_t cap_tokens; /* most tokens of a micro-batch; no sequence is longer */
    double bound_s;
} plan_problem_t;

/* A plan being written. Each sequence is given once in all, so there are at most
 * length_count micro-batches; the list of ranks grows. */
typedef struct plan_draft {
    dcp_plan_t *plan;
    int64_t rank_capacity;
} plan_draft_t;

/* Appends a micro-batch, nothing recomputed; within one rank, calls come in the order
 * of time. */
dcp_status_t plan_draft_add(plan_draft_t *draft, const int32_t *ranks,
                            int32_t rank_count, const int64_t *sequences,
                            int64_t sequence_count);

/* A strategy: decides ranks, sequences and recompute of every micro-batch. The driver
 * adds times, bytes, makespan, bound and hash, and verifies. */
typedef struct plan_strategy {
    const char *name;
    dcp_status_t (*run)(const plan_problem_t *problem, plan_draft_t *draft);
} plan_strategy_t;

dcp_status_t plan_packed_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_bucket_run(const plan_problem_t *problem, plan_draft_t *draft);

/* Sorts indices by descending key, equal keys by ascending index (so the result is
 * unique). `scratch` has room for `count` indices. */
void plan_sort_descending(int64_t *indices, int64_t count, const double *keys,
                          int64_t *scratch);

/* Sorts indices by ascending value, in place. */
void plan_sort_ascending(int64_t *indices, int64_t count);

/* Partitions items into `part_count` >= 1 parts of nearly equal sums of `work_s`
 * (largest differencing method). part_p[i] in [0, part_count); parts are numbered by
 * descending sum. */
dcp_status_t plan_karmarkar_karp(const double *work_s, int64_t item_count,
                                 int32_t part_count, int32_t *part_p);

/* Packs sequences (indices, longest first) into the fewest micro-batches that first fit
 * finds, then evens out their tokens. bin_p[i] is the micro-batch of items[i];
 * *bin_count_p their number. Every length <= cap_tokens. */
typedef struct plan_packer plan_packer_t;
dcp_status_t plan_packer_create(int64_t max_items, plan_packer_t **packer_p);
void plan_packer_destroy(plan_packer_t *packer);
int64_t plan_packer_count(plan_packer_t *packer, const int64_t *lengths,
                          const int64_t *items, int64_t item_count, int64_t cap_tokens);
int64_t plan_packer_assign(plan_packer_t *packer, const int64_t *lengths,
                           const int64_t *items, int64_t item_count, int64_t cap_tokens,
                           int64_t *bin_p);

#endif
