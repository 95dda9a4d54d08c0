/* The step planner: which ranks compute which sequences of a step, in which
 * micro-batches, and what they recompute.
 *
 * A pure function of its request: no clock, no state, no order of calls. The result is
 * plain data, checked (dcp_plan_verify) and hashed before it is handed out, so that
 * ranks can compare 128 bits instead of plans. Lengths are in tokens, times in seconds.
 */
#ifndef DCP_PLAN_H
#define DCP_PLAN_H

#include "dcp/recompute.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A group inside one node, a group that spans nodes. */
enum { DCP_TIER_NODE = 0, DCP_TIER_CLUSTER = 1, DCP_TIERS = 2 };

/* Seconds of a micro-batch of sequences len_i on p consecutive ranks, with
 * T = sum(len_i), Q = sum(len_i^2), n' = max(n - 1, 0), m' = max(m - 1, 0) and the
 * coefficients of the group's tier t:
 *     a(p)   latency_s, and for p > 1: + group_s[t] + hop_s[t] (p - 1)
 *     work   (token_s T + square_s Q
 *             + n' (layer_token_s T + layer_square_s Q) + m' mlp_token_s T) / p
 *     comm   T (p - 1) / p (gather_s[t] + exchange_s[t] / p) (1 + n' layer_comm_share)
 * Bytes on each rank in a world of W, R = ceil(T / p):
 *     fixed_bytes + sharded_bytes / W + (T > 0 ? scratch_bytes : 0)
 *         + R (token_bytes - n' layer_token_bytes - m' mlp_token_bytes)
 *         + (p > 1 ? T group_token_bytes : 0)
 *         + logit_bytes min(R, logit_chunk_tokens)
 * All >= 0 and finite; group_s and hop_s across nodes are no less than inside one;
 * layer_count max(layer_token_bytes, mlp_token_bytes) <= token_bytes, so that memory
 * never falls below its fixed part. */
typedef struct dcp_cost {
    double latency_s;             /* a: what does not grow with tokens */
    double token_s;               /* b: linear layers, norms, loss */
    double square_s;              /* c: attention */
    double group_s[DCP_TIERS];    /* of a group, whatever its size */
    double hop_s[DCP_TIERS];      /* of each of its ranks beyond the first */
    double gather_s[DCP_TIERS];   /* a token's keys and values to all: ring */
    double exchange_s[DCP_TIERS]; /* a token's rows by heads: Ulysses */
    double layer_token_s;         /* forward again, of one layer */
    double layer_square_s;
    double layer_comm_share;    /* of comm, that one layer repeats */
    double mlp_token_s;         /* forward again, of one layer's MLP */
    double fixed_bytes;         /* on every rank, whatever it computes */
    double sharded_bytes;       /* of all ranks together, cut evenly */
    double scratch_bytes;       /* while any micro-batch runs */
    double token_bytes;         /* activations of one token, nothing dropped */
    double layer_token_bytes;   /* of these, one layer's: dropped with it */
    double mlp_token_bytes;     /* of these, one layer's MLP's */
    double group_token_bytes;   /* a token of the whole group, where p > 1 */
    double logit_bytes;         /* one row of the loss's chunk of logits */
    int64_t logit_chunk_tokens; /* rows of that chunk, >= 0 */
    int64_t layer_count;        /* L, >= 0 */
    int64_t node_ranks;         /* ranks of a node: rank / node_ranks; 0: one node */
} dcp_cost_t;

/* The fields above in order, for code that walks over them: doubles, then integers. */
enum { DCP_COST_DOUBLES = 3 + 4 * DCP_TIERS + 4 + 8, DCP_COST_INTEGERS = 3 };

/* Everything a plan depends on. All borrowed for the call. */
typedef struct dcp_plan_request {
    const int64_t *lengths; /* [length_count] tokens, each >= 1 */
    int64_t length_count;   /* >= 0 */
    int32_t world;          /* ranks, >= 1 */
    dcp_cost_t cost;
    int64_t memory_bytes; /* most that one rank may hold; 0: no cap */
    int64_t max_tokens;   /* most tokens of one micro-batch on each of its ranks,
                             ceil(T / p). 0: none where memory_bytes caps, else 4096 or
                             the longest sequence where that is longer */
    int64_t
        run_longest;   /* longest sequence of the whole run, for strategies that settle
                          once a run; 0 or less than this step's: this step's */
    int32_t max_group; /* most ranks of one group; 0: world */
    int32_t rounds;    /* 0: ranks run on their own (parameters resident or read
                          one-sidedly); 1: all ranks move together, micro-batch by
                          micro-batch, and a round lasts as long as its longest group */
    int32_t fixed_group; /* of strategy "fixed": ranks of every group, >= 1 */
    int32_t fixed_recompute[DCP_RECOMPUTE_KINDS]; /* of strategy "fixed" */
    uint64_t seed;
    const char *strategy;
} dcp_plan_request_t;

/* A flat list of micro-batches; those of one rank come in the order of time.
 * Micro-batch m runs on ranks[rank_offsets[m] .. rank_offsets[m + 1]), consecutive and
 * ascending, and computes sequences[sequence_offsets[m] .. sequence_offsets[m + 1])
 * (indices into lengths). */
typedef struct dcp_plan {
    int64_t micro_batch_count;  /* M */
    int64_t *rank_offsets;      /* [M + 1] */
    int32_t *ranks;             /* [rank_offsets[M]] */
    int64_t *sequence_offsets;  /* [M + 1] */
    int64_t *sequences;         /* [sequence_offsets[M]] */
    int32_t *recompute;         /* [M, DCP_RECOMPUTE_KINDS] layers */
    double *start_s, *end_s;    /* [M] from the start of the step */
    int64_t *bytes;             /* [M] on each of its ranks, fixed part included */
    int32_t *round;             /* [M] with request.rounds: its round, from 0; else 0 */
    double makespan_s, bound_s; /* end of the last micro-batch; least possible */
    const char *winner;         /* strategy whose draft this is; static storage */
    uint64_t hash[2];           /* of the request and of every choice */
} dcp_plan_t;

/* Plans, verifies and hashes. ERR_ARG: a length, the world or a coefficient breaks its
 * rule, or the strategy is unknown (the message suggests the nearest name);
 * ERR_INFEASIBLE: a sequence fits nowhere (index, length, bytes needed and cap named).
 * *plan_p is the caller's, see dcp_plan_destroy. */
dcp_status_t dcp_plan_create(const dcp_plan_request_t *request, dcp_plan_t **plan_p);
void dcp_plan_destroy(dcp_plan_t *plan);

/* Proves of any plan, whoever wrote it: ranks exist, are distinct and consecutive;
 * every sequence exactly once; recompute counts within the layers; tokens and bytes
 * under their caps and bytes as the cost model says; no rank in two micro-batches at
 * once, list in the order of time on every rank (so the groups' order is acyclic),
 * durations as the cost model says; makespan and bound right. ERR_ARG names the first
 * rule that is broken. Does not look at plan->hash. */
dcp_status_t dcp_plan_verify(const dcp_plan_request_t *request, const dcp_plan_t *plan);

/* The hash that `plan` should carry: request, ranks, sequences, recompute, in order. */
void dcp_plan_hash(const dcp_plan_request_t *request, const dcp_plan_t *plan,
                   uint64_t hash[2]);

/* What dcp_plan_create checks before it plans. */
dcp_status_t dcp_plan_check(const dcp_plan_request_t *request);

int64_t dcp_plan_strategy_count(void);
const char *dcp_plan_strategy_name(int64_t index); /* static storage */

/* ERR_ARG: a coefficient is negative or not finite. */
dcp_status_t dcp_cost_check(const dcp_cost_t *cost);

/* Tier of ranks first .. first + count - 1. */
int dcp_cost_tier(const dcp_cost_t *cost, int32_t first, int32_t count);

/* Time and bytes of one micro-batch with `token_count` tokens and `square_sum` =
 * sum(len^2) on `rank_count` ranks; recompute NULL: nothing. token_count 0 gives a(p)
 * and the fixed part. ERR_ARG: rank_count < 1, or recompute counts beyond the layers.
 */
dcp_status_t dcp_cost_time(const dcp_cost_t *cost, int64_t token_count,
                           double square_sum, int32_t rank_count, int tier,
                           const int32_t *recompute, double *seconds_p);
dcp_status_t dcp_cost_memory(const dcp_cost_t *cost, int64_t token_count,
                             int32_t rank_count, const int32_t *recompute,
                             int32_t world, int64_t *bytes_p);

#ifdef __cplusplus
}
#endif
#endif
