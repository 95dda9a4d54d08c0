/* The step planner: which rank computes which sequences of a step, in which
 * micro-batches.
 *
 * A pure function of its request: no clock, no state, no order of calls. The result is
 * plain data, checked (dcp_plan_verify) and hashed before it is handed out, so that
 * ranks can compare 128 bits instead of plans. Lengths are in tokens, times in seconds.
 *
 * What is general already: a micro-batch has a list of ranks (a sequence-parallel
 * group) and a recompute count per block kind. What is not there yet: every strategy
 * gives one rank and recomputes nothing, and the cost model says DCP_ERR_UNSUPPORTED to
 * anything else.
 */
#ifndef DCP_PLAN_H
#define DCP_PLAN_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Block kinds whose layers may drop their activations (recompute counts, in order). */
enum { DCP_RECOMPUTE_LAYER = 0, DCP_RECOMPUTE_MLP = 1, DCP_RECOMPUTE_KINDS = 2 };

/* Time of a micro-batch of sequences len_i on one rank:
 *     latency_s + token_s * sum(len_i) + square_s * sum(len_i^2)
 * Bytes on that rank in a world of W ranks, T = sum(len_i):
 *     fixed_bytes + sharded_bytes / W
 *         + (T > 0 ? scratch_bytes : 0) + token_bytes * T
 *         + logit_bytes * min(T, logit_chunk_tokens)
 * All >= 0 and finite. */
typedef struct dcp_cost {
    double latency_s;           /* a: what does not grow with tokens */
    double token_s;             /* b: linear layers, norms, loss */
    double square_s;            /* c: attention */
    double fixed_bytes;         /* on every rank, whatever it computes */
    double sharded_bytes;       /* of all ranks together, cut evenly */
    double scratch_bytes;       /* while any micro-batch runs */
    double token_bytes;         /* activations of one token */
    double logit_bytes;         /* one row of the loss's chunk of logits */
    int64_t logit_chunk_tokens; /* rows of that chunk, >= 0 */
} dcp_cost_t;

/* Everything a plan depends on. All borrowed for the call. */
typedef struct dcp_plan_request {
    const int64_t *lengths; /* [length_count] tokens, each >= 1 */
    int64_t length_count;   /* >= 0 */
    int32_t world;          /* ranks, >= 1 */
    dcp_cost_t cost;
    int64_t memory_bytes; /* most that one rank may hold; 0: no cap */
    int64_t max_tokens;   /* most tokens of one micro-batch; 0: 4096, or the longest
                             sequence where that is longer */
    uint64_t seed;
    const char *strategy; /* "packed", "bucket" */
} dcp_plan_request_t;

/* A flat list of micro-batches; those of one rank come in the order of time.
 * Micro-batch m runs on ranks[rank_offsets[m] .. rank_offsets[m + 1]) and computes
 * sequences[sequence_offsets[m] .. sequence_offsets[m + 1]) (indices into lengths). */
typedef struct dcp_plan {
    int64_t micro_batch_count;  /* M */
    int64_t *rank_offsets;      /* [M + 1] */
    int32_t *ranks;             /* [rank_offsets[M]] */
    int64_t *sequence_offsets;  /* [M + 1] */
    int64_t *sequences;         /* [sequence_offsets[M]] */
    int32_t *recompute;         /* [M, DCP_RECOMPUTE_KINDS] layers */
    double *start_s, *end_s;    /* [M] from the start of the step */
    int64_t *bytes;             /* [M] on each of its ranks, fixed part included */
    double makespan_s, bound_s; /* end of the last micro-batch; least possible */
    uint64_t hash[2];           /* of the request and of every choice */
} dcp_plan_t;

/* Plans, verifies and hashes. ERR_ARG: a length, the world or a coefficient breaks its
 * rule, or the strategy is unknown (the message suggests the nearest name);
 * ERR_INFEASIBLE: a sequence fits nowhere (index, length, bytes needed and cap named).
 * *plan_p is the caller's, see dcp_plan_destroy. */
dcp_status_t dcp_plan_create(const dcp_plan_request_t *request, dcp_plan_t **plan_p);
void dcp_plan_destroy(dcp_plan_t *plan);

/* Proves of any plan, whoever wrote it: ranks exist and are distinct; every sequence
 * exactly once; tokens and bytes under their caps and bytes as the cost model says; no
 * rank in two micro-batches at once, list in the order of time on every rank (so the
 * groups' order is acyclic), durations as the cost model says; makespan and bound
 * right. ERR_ARG names the first rule that is broken. Does not look at plan->hash. */
dcp_status_t dcp_plan_verify(const dcp_plan_request_t *request, const dcp_plan_t *plan);

/* The hash that `plan` should carry: request, ranks, sequences, recompute, in order. */
void dcp_plan_hash(const dcp_plan_request_t *request, const dcp_plan_t *plan,
                   uint64_t hash[2]);

/* Least makespan of any plan on one rank a micro-batch: see bound.c. Needs a request
 * that dcp_plan_check accepts. */
double dcp_plan_bound(const dcp_plan_request_t *request);

/* What dcp_plan_create checks before it plans. */
dcp_status_t dcp_plan_check(const dcp_plan_request_t *request);

/* Most tokens that one micro-batch may have under both caps of a checked request. */
int64_t dcp_plan_cap_tokens(const dcp_plan_request_t *request);

int64_t dcp_plan_strategy_count(void);
const char *dcp_plan_strategy_name(int64_t index); /* static storage */

/* ERR_ARG: a coefficient is negative or not finite. */
dcp_status_t dcp_cost_check(const dcp_cost_t *cost);

/* Time and bytes of one micro-batch with `token_count` tokens and `square_sum` =
 * sum(len^2). ERR_UNSUPPORTED: more than one rank, or anything recomputed (recompute
 * NULL: nothing). token_count 0 gives latency_s and the fixed part. */
dcp_status_t dcp_cost_time(const dcp_cost_t *cost, int64_t token_count,
                           double square_sum, int32_t rank_count,
                           const int32_t *recompute, double *seconds_p);
dcp_status_t dcp_cost_memory(const dcp_cost_t *cost, int64_t token_count,
                             int32_t rank_count, const int32_t *recompute,
                             int32_t world, int64_t *bytes_p);

#ifdef __cplusplus
}
#endif
#endif
