/* What the parts of strategy `dcp` share; strategy_dcp.c tells how they work together.
 */
#ifndef DCP_STRATEGY_DCP_H
#define DCP_STRATEGY_DCP_H

#include "plan_draft.h"

/* Room that a rank's run of single sequences has to grow. */
enum { DCP_SEARCH_SLACK = 8 };

/* A group size that the search tries, by tier, and what fits it. */
typedef struct dcp_size {
    plan_price_t price[DCP_TIERS];
    int32_t group;
    int64_t cap_none; /* most tokens with nothing recomputed */
    int64_t cap_any;  /* with anything recomputed */
} dcp_size_t;

/* Where a sequence is computed; group 1: alone on a rank, packed with others there. */
typedef struct dcp_place {
    int32_t first, group;
} dcp_place_t;

/* What one rank has so far. Groups come first on every rank, in the order of placing.
 */
typedef struct dcp_rank {
    double group_s;  /* end of its last group */
    double single_s; /* work of its single sequences, without the packed ones' a */
    int64_t tokens;  /* of those that are packed */
} dcp_rank_t;

/* A micro-batch being put together. */
typedef struct dcp_batch {
    int32_t first, group;
    int32_t recompute[DCP_RECOMPUTE_KINDS];
    int64_t tokens, count; /* count: sequences */
    double squares, time_s;
} dcp_batch_t;

typedef struct dcp_search {
    const plan_problem_t *problem;
    int64_t count;  /* sequences */
    int32_t world;  /* ranks */
    double start_s; /* a */
    int32_t size_count;
    dcp_size_t *sizes;        /* [size_count] ascending, sizes[0].group == 1 */
    dcp_place_t *places;      /* [count] being made */
    dcp_place_t *best_places; /* [count] the best so far */
    dcp_rank_t *ranks;        /* [world] */
    double *load_s;           /* [world] end of each rank, in place.c */
    double *rest_s;           /* [world] of it, what is not the run below */
    int32_t *heap;            /* [world] ranks, least load on top */
    int32_t *heap_at;         /* [world] */
    double *failed_s;         /* [size_count, DCP_TIERS] a time that found no block */
    double *room_s;       /* [size_count] no block leaves more, INFINITY: not known */
    int32_t *queue;       /* [world] of place.c */
    int32_t *hint;        /* [size_count] where the last block of this size was found */
    double *hint_s;       /* [size_count] and its time */
    double *alone_s;      /* [count] time of each sequence as a single, without a where
                             it is packed; INFINITY: does not fit a rank */
    int64_t *run_starts;  /* [world + 1] each rank's run in items */
    int64_t *run_counts;  /* [world] */
    int64_t *items;       /* [count + slack * world] single sequences, longest first */
    int64_t *trial;       /* [2 * (count + 1)] runs being tried; scratch of sorts */
    int64_t *bins;        /* [count] */
    dcp_batch_t *batches; /* [count] of emit.c */
    int64_t *batch_of;    /* [count] */
    int64_t *last_batch;  /* [world] the rank's last one so far, or -1 */
    double *keys;         /* [count] */
    plan_packer_t *packer;
    void *memory; /* holds all lists above */
} dcp_search_t;

dcp_status_t dcp_search_init(dcp_search_t *search, const plan_problem_t *problem);
void dcp_search_fini(dcp_search_t *search);

/* Seconds of sequence `length` alone on a group, a(p) included, with the least
 * recompute that fits; INFINITY where nothing does. */
double dcp_search_time(const dcp_search_t *search, int32_t size, int tier,
                       int64_t length);

/* Whether a single sequence is packed with others (nothing recomputed). */
static inline int
dcp_search_is_packed(const dcp_search_t *search, int64_t sequence)
{
    return search->problem->request->lengths[sequence] <= search->sizes[0].cap_none;
}

/* Micro-batches that `tokens` packed tokens of one rank take. */
static inline double
dcp_search_batches(const dcp_search_t *search, int64_t tokens)
{
    int64_t cap = search->sizes[0].cap_none;
    return cap > 0 ? (double)((tokens + cap - 1) / cap) : 0;
}

/* Places every sequence so that all ranks end by target_s, or by as little more as it
 * finds. Fills places and ranks; returns the latest end it expects, or gives up where
 * that passes limit_s and returns what the target has risen to. */
double dcp_search_place(dcp_search_t *search, double target_s, double limit_s);

/* Fills every rank's run of packed singles from places. */
void dcp_search_list(dcp_search_t *search);

/* Moves and swaps of packed single sequences between the rank that ends last and
 * others.
 * Returns the latest end. */
double dcp_search_balance(dcp_search_t *search, double enough_s);

/* Writes the plan of places: groups, then every rank's singles in micro-batches. */
dcp_status_t dcp_search_emit(dcp_search_t *search, plan_draft_t *draft);

/* Looks for a better plan than `best` by local search where the step is small. Writes
 * it to `draft`, or nothing. `scratch` holds length_count indices. */
dcp_status_t dcp_search_refine(const plan_problem_t *problem, const dcp_plan_t *best,
                               int64_t *scratch, plan_draft_t *draft);

#endif
