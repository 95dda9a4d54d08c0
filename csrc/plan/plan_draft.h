/* What the driver and the strategies of plan/ share: the checked problem that a
 * strategy reads, the draft that it writes, and helpers.
 */
#ifndef DCP_PLAN_DRAFT_H
#define DCP_PLAN_DRAFT_H

#include "dcp/plan.h"

enum { PLAN_MAX_WORLD = 1 << 20 };

/* A checked request and what follows from it. Every sequence fits some (group,
 * recompute).
 */
typedef struct plan_problem {
    const dcp_plan_request_t *request;
    const double *work_s; /* [length_count] time of a sequence alone on one rank beyond
                             latency_s, nothing recomputed */
    const int64_t *order; /* [length_count] sequences, longest first, equal ones by
                             index */
    int64_t longest;      /* of the step */
    int64_t run_longest;  /* of the run, >= longest */
    int64_t row_cap;      /* most tokens of a micro-batch on each of its ranks */
    int32_t max_group;    /* most ranks of a group, 1..world */
    double bound_s;
} plan_problem_t;

/* Everything but bound_s (0); the lists are the problem's, see plan_problem_fini. The
 * request must pass dcp_plan_check and outlive the problem. */
dcp_status_t plan_problem_init(const dcp_plan_request_t *request,
                               plan_problem_t *problem);
void plan_problem_fini(plan_problem_t *problem);

/* Least makespan of any plan of the problem (bound.c), and dcp_plan_verify of one,
 * which believes bound_s. */
dcp_status_t plan_bound(const plan_problem_t *problem, double *bound_p);
dcp_status_t plan_verify(const plan_problem_t *problem, const dcp_plan_t *plan);

/* ERR_INFEASIBLE: a sequence fits nowhere, or the cap lies below the fixed part. */
dcp_status_t plan_check_fits(const plan_problem_t *problem);

/* A plan being written. Each sequence is given once in all, so there are at most
 * length_count micro-batches; the list of ranks grows. */
typedef struct plan_draft {
    dcp_plan_t *plan;
    int64_t rank_capacity;
} plan_draft_t;

/* How ranks share and drop: what the published strategies choose once for many. */
typedef struct plan_setting {
    int32_t group; /* ranks of a micro-batch */
    int32_t recompute[DCP_RECOMPUTE_KINDS];
} plan_setting_t;

/* An empty draft, and back to one. Destroying a zeroed draft is fine. */
dcp_status_t plan_draft_init(plan_draft_t *draft, int64_t length_count);
void plan_draft_clear(plan_draft_t *draft);
void plan_draft_fini(plan_draft_t *draft);

/* Puts start, end, bytes, round and makespan to what was drafted. `world_scratch` holds
 * `world` doubles. */
dcp_status_t plan_schedule(const plan_problem_t *problem, dcp_plan_t *plan,
                           double *world_scratch);

/* Appends a micro-batch on ranks first .. first + setting->group - 1; within one rank,
 * calls come in the order of time. */
dcp_status_t plan_draft_add(plan_draft_t *draft, int32_t first,
                            const plan_setting_t *setting, const int64_t *sequences,
                            int64_t sequence_count);

/* Counts of "none", "selective" and "full". */
enum { PLAN_NONE = 0, PLAN_SELECTIVE = 1, PLAN_FULL = 2, PLAN_RECOMPUTES = 3 };
void plan_recompute(const dcp_cost_t *cost, int which,
                    int32_t recompute[DCP_RECOMPUTE_KINDS]);

/* dcp_cost_time and dcp_cost_memory of a setting that fits the request; `first` is the
 * group's first rank. */
double plan_time(const plan_problem_t *problem, int64_t tokens, double squares,
                 int32_t first, const plan_setting_t *setting);
int64_t plan_bytes(const plan_problem_t *problem, int64_t tokens,
                   const plan_setting_t *setting);

/* Most tokens of a micro-batch of this setting under both caps; 0: not even one. */
int64_t plan_cap_tokens(const plan_problem_t *problem, const plan_setting_t *setting);

/* What one group size costs: a(p) and the time of a token, of a squared length and of
 * each repeated layer or MLP, work divided by p and communication included. */
typedef struct plan_price {
    int32_t group;
    double start_s;
    double token_s, square_s;
    double layer_token_s, layer_square_s, mlp_token_s;
} plan_price_t;

void plan_price_init(const dcp_cost_t *cost, int32_t group, int tier,
                     plan_price_t *price);

/* Seconds beyond start_s. */
double plan_price_work(const plan_price_t *price, double tokens, double squares,
                       const int32_t *recompute);

/* Tier of a group of `group` ranks that lies as well as it can. */
int plan_best_tier(const dcp_cost_t *cost, int32_t group);

/* The recompute counts of least time under both caps. Returns that time beyond start_s;
 * INFINITY where nothing fits. */
double plan_least_recompute(const plan_problem_t *problem, const plan_price_t *price,
                            int64_t tokens, double squares,
                            int32_t recompute[DCP_RECOMPUTE_KINDS]);

/* A strategy: decides ranks, sequences and recompute of every micro-batch. The driver
 * adds times, bytes, makespan, bound and hash, and verifies. */
typedef struct plan_strategy {
    const char *name;
    dcp_status_t (*run)(const plan_problem_t *problem, plan_draft_t *draft);
    int one_setting; /* all micro-batches share one size and one of "none", "selective",
                        "full": what no such plan can beat is known without a draft */
} plan_strategy_t;

/* All strategies, in the order of their names' indices. */
const plan_strategy_t *plan_strategies(int64_t *count_p);

dcp_status_t plan_dcp_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_packed_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_bucket_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_inter_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_bucket_published_run(const plan_problem_t *problem,
                                       plan_draft_t *draft);
dcp_status_t plan_inter_published_run(const plan_problem_t *problem,
                                      plan_draft_t *draft);
dcp_status_t plan_fixed_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_fixed_best_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_flexsp_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_megatron_run(const plan_problem_t *problem, plan_draft_t *draft);
dcp_status_t plan_knapformer_run(const plan_problem_t *problem, plan_draft_t *draft);

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
