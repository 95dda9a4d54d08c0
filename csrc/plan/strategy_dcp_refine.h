/* Local search of strategy `dcp` on whole micro-batches: its state, its starts
 * (strategy_dcp_refine.c) and its neighbours (strategy_dcp_moves.c).
 */
#ifndef DCP_STRATEGY_DCP_REFINE_H
#define DCP_STRATEGY_DCP_REFINE_H

#include "strategy_dcp.h"

typedef struct dcp_state {
    int64_t count;        /* batches; some may hold nothing */
    dcp_batch_t *batches; /* [room] in the order of the list */
    int32_t *batch_of;    /* [sequences] */
    double makespan_s, score;
} dcp_state_t;

typedef struct dcp_refine {
    const plan_problem_t *problem;
    int64_t room, sequences;
    int64_t steps_left;
    double weight; /* mean_weight or 0 */
    dcp_state_t now, trial, best;
    double *ready; /* [world] */
    double *round; /* [room] longest of each round */
    void *memory;
} dcp_refine_t;

/* `to` becomes `from`. */
void dcp_refine_copy(const dcp_refine_t *r, dcp_state_t *to, const dcp_state_t *from);

/* Time of a batch with the cheapest recompute; INFINITY where it does not fit. */
void dcp_refine_price(dcp_refine_t *r, dcp_batch_t *batch);

/* Sequence i into the batch (sign 1) or out of it (-1), unpriced. */
void dcp_refine_put(const dcp_refine_t *r, dcp_batch_t *batch, int64_t i, int sign);

/* Makespan and score of a state; leaves every rank's end in r->ready. */
void dcp_refine_score(dcp_refine_t *r, dcp_state_t *state);

/* From `now` to better neighbours until there is none or the steps are spent; `best`
 * keeps the least makespan seen. */
void dcp_refine_climb(dcp_refine_t *r);

#endif
