/* The cluster simulator: what becomes of a plan on ranks that are not all alike and
 * micro-batches that do not take what the cost model says.
 *
 * It runs the very plan that the executor would run and keeps no state; equal arguments
 * give equal time lines, bit for bit. Times in seconds from the start of the step.
 */
#ifndef DCP_SIM_H
#define DCP_SIM_H

#include "dcp/plan.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_sim_options {
    int32_t world;  /* of the plan, >= 1 */
    int32_t rounds; /* 0: a micro-batch starts once all its ranks are free; 1: all ranks
                       move together, and a round lasts as long as its longest
                       micro-batch. A plan made for rounds says which; of another, a
                       micro-batch takes the first round that none of its ranks has
                       used */
    double jitter;  /* >= 0: standard deviation of the natural logarithm of the factor,
                       of mean 1, by which a rank's share of a micro-batch lasts longer
                       or shorter; drawn for (seed, step, micro-batch, rank) */
    const double *slowdown; /* [world] borrowed, > 0: how many times its estimate a rank
                               takes; NULL: 1 */
    uint64_t seed;
    int64_t step;
} dcp_sim_options_t;

/* What happened. Rank r was in spans span_offsets[r] .. span_offsets[r + 1), in the
 * order of time. A micro-batch starts and ends on all its ranks at once: who is done
 * early waits for its peers, so work_s <= end_s - start_s. */
typedef struct dcp_timeline {
    int32_t world;
    int64_t span_count;
    int64_t *span_offsets; /* [world + 1] */
    int64_t *micro_batch;  /* [span_count] index into the plan's list */
    double *start_s;       /* [span_count] */
    double *end_s;         /* [span_count] */
    double *work_s;        /* [span_count] of this rank */
    double *busy_s;        /* [world] sum of work_s */
    double makespan_s;     /* latest end_s; 0 without spans */
} dcp_timeline_t;

/* ERR_ARG: an option breaks its rule, or the plan names a rank outside the world.
 * *timeline_p is the caller's, see dcp_timeline_destroy. O(spans). */
dcp_status_t dcp_sim_run(const dcp_plan_t *plan, const dcp_sim_options_t *options,
                         dcp_timeline_t **timeline_p);
void dcp_timeline_destroy(dcp_timeline_t *timeline);

#ifdef __cplusplus
}
#endif
#endif
