/* A draft becomes a plan: lists that grow, then times, bytes and rounds.
 *
 * On their own, ranks start a micro-batch as soon as all of its group have ended what
 * they had before. In rounds, a micro-batch runs in the first round after the last one
 * of any of its ranks, rounds follow each other, and each lasts as long as its longest
 * micro-batch. Either way the list's order is kept on every rank. Cost: O(sequences +
 * members of all groups).
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

#include <string.h>

void
dcp_plan_destroy(dcp_plan_t *plan)
{
    if (plan == NULL) {
        return;
    }
    dcp_free(plan->round);
    dcp_free(plan->bytes);
    dcp_free(plan->end_s);
    dcp_free(plan->start_s);
    dcp_free(plan->recompute);
    dcp_free(plan->sequences);
    dcp_free(plan->sequence_offsets);
    dcp_free(plan->ranks);
    dcp_free(plan->rank_offsets);
    dcp_free(plan);
}

/* Room for as many micro-batches as there are sequences. */
dcp_status_t
plan_draft_init(plan_draft_t *draft, int64_t length_count)
{
    void *memory;
    *draft = (plan_draft_t){NULL, 0};
    DCP_TRY(dcp_alloc_zeroed(sizeof(dcp_plan_t), "a plan", &memory));
    dcp_plan_t *plan = memory;
    int64_t n = length_count;
    const struct {
        void **field;
        int64_t count, item_bytes;
    } parts[] = {
        {(void **)&plan->rank_offsets, n + 1, sizeof(int64_t)},
        {(void **)&plan->ranks, n, sizeof(int32_t)},
        {(void **)&plan->sequence_offsets, n + 1, sizeof(int64_t)},
        {(void **)&plan->sequences, n, sizeof(int64_t)},
        {(void **)&plan->recompute, n * DCP_RECOMPUTE_KINDS, sizeof(int32_t)},
        {(void **)&plan->start_s, n, sizeof(double)},
        {(void **)&plan->end_s, n, sizeof(double)},
        {(void **)&plan->bytes, n, sizeof(int64_t)},
        {(void **)&plan->round, n, sizeof(int32_t)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        void *part;
        dcp_status_t status = dcp_alloc_zeroed(parts[i].count * parts[i].item_bytes,
                                               "a plan's lists", &part);
        if (status != DCP_OK) {
            dcp_plan_destroy(plan);
            return status;
        }
        memcpy(parts[i].field, &part, sizeof part);
    }
    plan->winner = "";
    draft->plan = plan;
    draft->rank_capacity = n;
    return DCP_OK;
}

void
plan_draft_clear(plan_draft_t *draft)
{
    draft->plan->micro_batch_count = 0;
    draft->plan->makespan_s = 0;
}

void
plan_draft_fini(plan_draft_t *draft)
{
    dcp_plan_destroy(draft->plan);
    draft->plan = NULL;
}

dcp_status_t
plan_draft_add(plan_draft_t *draft, int32_t first, const plan_setting_t *setting,
               const int64_t *sequences, int64_t sequence_count)
{
    dcp_plan_t *plan = draft->plan;
    int64_t m = plan->micro_batch_count;
    int64_t rank_end = plan->rank_offsets[m] + setting->group;
    if (rank_end > draft->rank_capacity) {
        void *grown;
        DCP_TRY(
            dcp_alloc_array(2 * rank_end, sizeof(int32_t), "a plan's ranks", &grown));
        memcpy(grown, plan->ranks,
               (size_t)plan->rank_offsets[m] * sizeof plan->ranks[0]);
        dcp_free(plan->ranks);
        plan->ranks = grown;
        draft->rank_capacity = 2 * rank_end;
    }
    for (int32_t i = 0; i < setting->group; i++) {
        plan->ranks[plan->rank_offsets[m] + i] = first + i;
    }
    memcpy(plan->sequences + plan->sequence_offsets[m], sequences,
           (size_t)sequence_count * sizeof sequences[0]);
    memcpy(plan->recompute + m * DCP_RECOMPUTE_KINDS, setting->recompute,
           sizeof setting->recompute);
    plan->rank_offsets[m + 1] = rank_end;
    plan->sequence_offsets[m + 1] = plan->sequence_offsets[m] + sequence_count;
    plan->micro_batch_count = m + 1;
    return DCP_OK;
}

/* Bytes of micro-batch m, and its duration in end_s: starts are known only when all
 * durations are. */
static dcp_status_t
price(const dcp_plan_request_t *request, dcp_plan_t *plan, int64_t m)
{
    int64_t tokens = 0, r0 = plan->rank_offsets[m];
    double squares = 0;
    for (int64_t i = plan->sequence_offsets[m]; i < plan->sequence_offsets[m + 1];
         i++) {
        int64_t length = request->lengths[plan->sequences[i]];
        tokens += length;
        squares += (double)length * (double)length;
    }
    const int32_t *recompute = plan->recompute + m * DCP_RECOMPUTE_KINDS;
    int32_t group = (int32_t)(plan->rank_offsets[m + 1] - r0);
    DCP_TRY(dcp_cost_time(&request->cost, tokens, squares, group,
                          dcp_cost_tier(&request->cost, plan->ranks[r0], group),
                          recompute, &plan->end_s[m]));
    return dcp_cost_memory(&request->cost, tokens, group, recompute, request->world,
                           &plan->bytes[m]);
}

/* Latest value of `of_rank` over the ranks of micro-batch m. */
static double
latest(const dcp_plan_t *plan, int64_t m, const double *of_rank)
{
    double most = 0;
    for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
        double value = of_rank[plan->ranks[i]];
        most = value > most ? value : most;
    }
    return most;
}

static void
set_ranks(const dcp_plan_t *plan, int64_t m, double *of_rank, double value)
{
    for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
        of_rank[plan->ranks[i]] = value;
    }
}

/* Rounds of all micro-batches; starts[r] becomes the start of round r (there are no
 * more rounds than micro-batches). */
static void
place_in_rounds(dcp_plan_t *plan, double *next_round, double *starts)
{
    int64_t count = plan->micro_batch_count;
    for (int64_t m = 0; m < count; m++) {
        double round = latest(plan, m, next_round);
        set_ranks(plan, m, next_round, round + 1);
        plan->round[m] = (int32_t)round;
        starts[m] = 0;
    }
    for (int64_t m = 0; m < count; m++) {
        double *most = &starts[plan->round[m]];
        *most = plan->end_s[m] > *most ? plan->end_s[m] : *most;
    }
    double start = 0;
    for (int64_t r = 0; r < count; r++) {
        double lasts = starts[r];
        starts[r] = start;
        start += lasts;
    }
}

dcp_status_t
plan_schedule(const plan_problem_t *problem, dcp_plan_t *plan, double *world_scratch)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t count = plan->micro_batch_count;
    double *ready = world_scratch, *round_start = NULL;
    for (int32_t r = 0; r < request->world; r++) {
        ready[r] = 0;
    }
    for (int64_t m = 0; m < count; m++) {
        DCP_TRY(price(request, plan, m));
    }
    void *memory = NULL;
    if (request->rounds != 0) {
        DCP_TRY(dcp_alloc_array(count, sizeof(double), "a plan's rounds", &memory));
        round_start = memory;
        place_in_rounds(plan, ready, round_start);
    }
    plan->makespan_s = 0;
    for (int64_t m = 0; m < count; m++) {
        double start =
            round_start != NULL ? round_start[plan->round[m]] : latest(plan, m, ready);
        double end = start + plan->end_s[m];
        plan->start_s[m] = start;
        plan->end_s[m] = end;
        if (round_start == NULL) {
            plan->round[m] = 0;
            set_ranks(plan, m, ready, end);
        }
        plan->makespan_s = end > plan->makespan_s ? end : plan->makespan_s;
    }
    dcp_free(memory);
    return DCP_OK;
}
