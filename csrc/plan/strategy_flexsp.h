/* What the two files of strategy `flexsp` share. */
#ifndef DCP_STRATEGY_FLEXSP_H
#define DCP_STRATEGY_FLEXSP_H

#include "choices.h"

enum { FLEXSP_BUCKETS = 16 };

typedef struct flex_group {
    int32_t size_index;
    int64_t tokens;
    double time_s;
    int64_t taken[FLEXSP_BUCKETS];
} flex_group_t;

typedef struct flexsp {
    const plan_problem_t *problem;
    plan_setting_t setting; /* its recompute counts */
    int32_t sizes[PLAN_POWERS];
    int64_t caps[PLAN_POWERS];
    plan_rate_t rates[PLAN_POWERS];
    int64_t size_count;
    int64_t tops[FLEXSP_BUCKETS]; /* descending */
    int bucket_count;
    double work[PLAN_POWERS]
               [FLEXSP_BUCKETS]; /* s of one sequence, by size and bucket */
    int64_t *tokens_before;      /* [n + 1] of the sequences in order, rounded up */
    int64_t *list;               /* [n] members of one group */
    flex_group_t *groups;        /* [W] of the wave */
    int32_t group_count, free_ranks;
    int64_t wave_count; /* asked for */
    int64_t steps;      /* taken by the search, see strategy_flexsp.c */
} flexsp_t;

/* Leaves the groups of a wave of so many sequences by bucket; returns its time,
 * INFINITY where it does not fit. */
double flexsp_solve_wave(flexsp_t *f, const int64_t counts[FLEXSP_BUCKETS]);

#endif
