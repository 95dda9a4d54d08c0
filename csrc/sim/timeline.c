/* Runs a plan in simulated time.
 *
 * One walk over the plan's list, which is in the order of time on every rank, so every
 * micro-batch finds its ranks' earlier ones done: no event queue is needed. A rank's
 * share of a micro-batch lasts (the plan's estimate) x (its slowdown) x (its jitter);
 * ranks of a group exchange data in every layer, so the group lasts as long as its
 * slowest. In rounds, micro-batches of one round start together once the round before
 * it has ended on every rank.
 *
 * Invariants: work is conserved (busy_s of all ranks is the sum of all shares), spans
 * of one rank do not overlap, makespan is the latest end; with neither jitter nor
 * slowdown the plan's own times come out, but for the last bits of a sum. Jitter comes
 * from Philox by (seed, step, micro-batch, rank), so it depends on no order. Costs
 * O(spans), the logarithm and the cosine of the jitter aside.
 */
#include "dcp/alloc.h"
#include "dcp/rng.h"
#include "dcp/sim.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static dcp_status_t
check_options(const dcp_sim_options_t *options)
{
    if (options->world < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "world_size = %d must be >= 1", options->world);
    }
    if (!(options->jitter >= 0) || options->jitter > 4) {
        return DCP_FAIL(DCP_ERR_ARG, "jitter = %g must lie in 0..4", options->jitter);
    }
    for (int32_t r = 0; options->slowdown != NULL && r < options->world; r++) {
        if (!(options->slowdown[r] > 0) || !isfinite(options->slowdown[r])) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "slowdown of rank %d = %g must be finite and > 0", r,
                            options->slowdown[r]);
        }
    }
    return DCP_OK;
}

/* What the walk relies on; all else of a plan is dcp_plan_verify's. */
static dcp_status_t
check_plan(const dcp_plan_t *plan, int32_t world)
{
    const int64_t *offsets = plan->rank_offsets;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        double seconds = plan->end_s[m] - plan->start_s[m];
        if (offsets[m] < 0 || offsets[m + 1] <= offsets[m] || !(seconds >= 0)) {
            return DCP_FAIL(
                DCP_ERR_ARG,
                "micro_batches[%" PRId64 "] needs ranks and a duration >= 0", m);
        }
        for (int64_t i = offsets[m]; i < offsets[m + 1]; i++) {
            if (plan->ranks[i] < 0 || plan->ranks[i] >= world) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "micro_batches[%" PRId64
                                "] names rank %d, the simulated world has %d",
                                m, plan->ranks[i], world);
            }
        }
    }
    return DCP_OK;
}

/* exp(sigma z - sigma^2 / 2), z standard normal: log-normal of mean 1. */
static double
jitter_factor(const dcp_sim_options_t *options, int64_t micro_batch, int32_t rank)
{
    const uint32_t key[2] = {(uint32_t)options->seed, (uint32_t)(options->seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)micro_batch, (uint32_t)rank,
                                 (uint32_t)options->step,
                                 (uint32_t)((uint64_t)options->step >> 32)};
    uint32_t words[4];
    dcp_philox(key, counter, words);
    /* Box-Muller over (0, 1] and [0, 1) */
    double u = ((double)words[0] * 0x1p32 + (double)words[1] + 1) * 0x1p-64;
    double v = (double)words[2] * 0x1p-32;
    double z = sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
    return exp(options->jitter * z - 0.5 * options->jitter * options->jitter);
}

/* Room for all; zeroed, so one may destroy it at any point. */
static dcp_status_t
timeline_alloc(int32_t world, int64_t span_count, dcp_timeline_t **timeline_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(sizeof(dcp_timeline_t), "a time line", &memory));
    dcp_timeline_t *timeline = memory;
    timeline->world = world;
    timeline->span_count = span_count;
    const struct {
        void *field; /* of some pointer type */
        int64_t count;
    } parts[] = {
        {&timeline->span_offsets, (int64_t)world + 1},
        {&timeline->micro_batch, span_count},
        {&timeline->start_s, span_count},
        {&timeline->end_s, span_count},
        {&timeline->work_s, span_count},
        {&timeline->busy_s, world},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        void *part;
        dcp_status_t status =
            dcp_alloc_zeroed(parts[i].count * 8, "a time line's spans", &part);
        if (status != DCP_OK) {
            dcp_timeline_destroy(timeline);
            return status;
        }
        memcpy(parts[i].field, &part, sizeof part);
    }
    *timeline_p = timeline;
    return DCP_OK;
}

void
dcp_timeline_destroy(dcp_timeline_t *timeline)
{
    if (timeline == NULL) {
        return;
    }
    dcp_free(timeline->busy_s);
    dcp_free(timeline->work_s);
    dcp_free(timeline->end_s);
    dcp_free(timeline->start_s);
    dcp_free(timeline->micro_batch);
    dcp_free(timeline->span_offsets);
    dcp_free(timeline);
}

/* Where each rank stands while the plan is walked. */
typedef struct progress {
    int64_t *next_span;  /* [world] */
    double *free_s;      /* [world] end of its last micro-batch */
    int32_t *next_round; /* [world] first round that the rank has not used */
} progress_t;

static void
progress_fini(progress_t *progress)
{
    dcp_free(progress->next_round);
    dcp_free(progress->free_s);
    dcp_free(progress->next_span);
}

static dcp_status_t
progress_init(progress_t *progress, const dcp_timeline_t *timeline)
{
    int64_t world = timeline->world;
    void *memory;
    *progress = (progress_t){NULL, NULL, NULL};
    DCP_TRY(dcp_alloc_array(world, sizeof(int64_t), "a time line's ranks", &memory));
    progress->next_span = memory;
    dcp_status_t status = dcp_alloc_zeroed(world * (int64_t)sizeof(double),
                                           "a time line's ranks", &memory);
    if (status != DCP_OK) {
        goto err;
    }
    progress->free_s = memory;
    status = dcp_alloc_zeroed(world * (int64_t)sizeof(int32_t), "a time line's ranks",
                              &memory);
    if (status != DCP_OK) {
        goto err;
    }
    progress->next_round = memory;
    memcpy(progress->next_span, timeline->span_offsets,
           (size_t)world * sizeof progress->next_span[0]);
    return DCP_OK;

err:
    progress_fini(progress);
    return status;
}

/* Writes micro-batch m, started at start_s, on all its ranks; returns its end. */
static double
run_micro_batch(const dcp_plan_t *plan, const dcp_sim_options_t *options, int64_t m,
                double start_s, progress_t *progress, dcp_timeline_t *timeline)
{
    int64_t first = plan->rank_offsets[m], last = plan->rank_offsets[m + 1];
    double estimate_s = plan->end_s[m] - plan->start_s[m], longest_s = 0;
    for (int64_t i = first; i < last; i++) {
        int32_t rank = plan->ranks[i];
        double work_s = estimate_s;
        if (options->slowdown != NULL) {
            work_s *= options->slowdown[rank];
        }
        if (options->jitter > 0) {
            work_s *= jitter_factor(options, m, rank);
        }
        longest_s = fmax(longest_s, work_s);
        int64_t span = progress->next_span[rank];
        timeline->micro_batch[span] = m;
        timeline->start_s[span] = start_s;
        timeline->work_s[span] = work_s;
        timeline->busy_s[rank] += work_s;
    }
    for (int64_t i = first; i < last; i++) {
        int32_t rank = plan->ranks[i];
        timeline->end_s[progress->next_span[rank]++] = start_s + longest_s;
        progress->free_s[rank] = start_s + longest_s;
    }
    timeline->makespan_s = fmax(timeline->makespan_s, start_s + longest_s);
    return start_s + longest_s;
}

static void
run_one_sided(const dcp_plan_t *plan, const dcp_sim_options_t *options,
              progress_t *progress, dcp_timeline_t *timeline)
{
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        double start_s = 0;
        for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
            start_s = fmax(start_s, progress->free_s[plan->ranks[i]]);
        }
        run_micro_batch(plan, options, m, start_s, progress, timeline);
    }
}

/* The round of every micro-batch, and their number. */
static dcp_status_t
find_rounds(const dcp_plan_t *plan, progress_t *progress, int32_t *round,
            int32_t *round_count_p)
{
    int32_t most = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        most = plan->round[m] > most ? plan->round[m] : most;
    }
    int given = most > 0;
    int32_t count = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        int32_t earliest = 0;
        int64_t first = plan->rank_offsets[m], last = plan->rank_offsets[m + 1];
        for (int64_t i = first; i < last; i++) {
            int32_t next = progress->next_round[plan->ranks[i]];
            earliest = next > earliest ? next : earliest;
        }
        round[m] = given ? plan->round[m] : earliest;
        if (round[m] < earliest) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "micro_batches[%" PRId64
                            "] has round %d, and one of its ranks is past it",
                            m, round[m]);
        }
        for (int64_t i = first; i < last; i++) {
            progress->next_round[plan->ranks[i]] = round[m] + 1;
        }
        count = round[m] + 1 > count ? round[m] + 1 : count;
    }
    *round_count_p = count;
    return DCP_OK;
}

/* A rank's list is in the order of rounds, but the whole list need not be:
 * micro-batches are chained by round first, in list order. */
static dcp_status_t
run_rounds(const dcp_plan_t *plan, const dcp_sim_options_t *options,
           progress_t *progress, dcp_timeline_t *timeline)
{
    void *rounds, *chains = NULL;
    int64_t count = plan->micro_batch_count;
    DCP_TRY(dcp_alloc_array(count, sizeof(int32_t), "a time line's rounds", &rounds));
    int32_t round_count = 0, *round = rounds;
    dcp_status_t status = find_rounds(plan, progress, round, &round_count);
    if (status != DCP_OK) {
        goto err_rounds;
    }
    status = dcp_alloc_array(count + round_count, sizeof(int64_t),
                             "a time line's rounds", &chains);
    if (status != DCP_OK) {
        goto err_rounds;
    }
    int64_t *next = chains, *head = next + count; /* -1 ends a chain */
    for (int32_t r = 0; r < round_count; r++) {
        head[r] = -1;
    }
    for (int64_t m = count - 1; m >= 0; m--) {
        next[m] = head[round[m]];
        head[round[m]] = m;
    }
    double start_s = 0;
    for (int32_t r = 0; r < round_count; r++) {
        double end_s = start_s;
        for (int64_t m = head[r]; m >= 0; m = next[m]) {
            end_s = fmax(
                end_s, run_micro_batch(plan, options, m, start_s, progress, timeline));
        }
        start_s = end_s;
    }

err_rounds:
    dcp_free(chains);
    dcp_free(rounds);
    return status;
}

dcp_status_t
dcp_sim_run(const dcp_plan_t *plan, const dcp_sim_options_t *options,
            dcp_timeline_t **timeline_p)
{
    DCP_TRY(check_options(options));
    DCP_TRY(check_plan(plan, options->world));
    int64_t span_count = plan->rank_offsets[plan->micro_batch_count];
    dcp_timeline_t *timeline;
    DCP_TRY(timeline_alloc(options->world, span_count, &timeline));
    for (int64_t i = 0; i < span_count; i++) {
        timeline->span_offsets[plan->ranks[i] + 1]++;
    }
    for (int32_t r = 0; r < options->world; r++) {
        timeline->span_offsets[r + 1] += timeline->span_offsets[r];
    }
    progress_t progress;
    dcp_status_t status = progress_init(&progress, timeline);
    if (status != DCP_OK) {
        goto err_timeline;
    }
    if (options->rounds) {
        status = run_rounds(plan, options, &progress, timeline);
    } else {
        run_one_sided(plan, options, &progress, timeline);
    }
    progress_fini(&progress);
    if (status != DCP_OK) {
        goto err_timeline;
    }
    *timeline_p = timeline;
    return DCP_OK;

err_timeline:
    dcp_timeline_destroy(timeline);
    return status;
}
