/* Proves a plan against its request, whoever wrote it.
 *
 * Every rule is checked from the request alone; nothing that the plan says is taken for
 * granted, so a plan edited by hand, damaged on the way or made by a faulty strategy is
 * found here and not as a wrong gradient. The order of groups is acyclic because the
 * starts are one global clock: on no rank does a micro-batch start before the one
 * listed before it there has ended, so following the list never waits in a circle. In
 * rounds, those of one round share no rank and start together when the longest of the
 * round before has ended; a rank without one joins with zero weight, so all ranks run
 * equally many.
 * Cost: O(micro-batches + sequences + ranks).
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define BROKEN(rule, ...) \
    DCP_FAIL(DCP_ERR_ARG, "plan breaks the rule '" rule "': " __VA_ARGS__)

static const double time_tolerance = 1e-9; /* relative: for numbers read from text */

typedef struct check {
    const plan_problem_t *problem;
    const dcp_plan_request_t *request;
    const dcp_plan_t *plan;
    double *busy_until_s;  /* [world] */
    int64_t *last_user;    /* [world] micro-batch that last named the rank, + 1 */
    int64_t *last_round;   /* [world] round of the rank's last micro-batch, + 1 */
    double *round_start_s; /* [micro_batch_count] in rounds */
    int64_t *computed_by;  /* [length_count] micro-batch, + 1; 0: none yet */
} check_t;

static int
differs(double got, double wanted)
{
    return !(fabs(got - wanted) <= time_tolerance * fabs(wanted) + 1e-15);
}

static dcp_status_t
check_lists(const dcp_plan_t *plan)
{
    int64_t count = plan->micro_batch_count;
    if (count < 0 || plan->rank_offsets[0] != 0 || plan->sequence_offsets[0] != 0) {
        return BROKEN("offsets start at 0", "%" PRId64 " micro-batches", count);
    }
    for (int64_t m = 0; m < count; m++) {
        if (plan->rank_offsets[m + 1] <= plan->rank_offsets[m]) {
            return BROKEN("at least one rank", "micro_batches[%" PRId64 "] has none",
                          m);
        }
        if (plan->sequence_offsets[m + 1] <= plan->sequence_offsets[m]) {
            return BROKEN("at least one sequence",
                          "micro_batches[%" PRId64 "] has none", m);
        }
    }
    return DCP_OK;
}

static dcp_status_t
check_ranks(const check_t *check, int64_t m)
{
    const dcp_plan_t *plan = check->plan;
    for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
        int32_t rank = plan->ranks[i];
        if (rank < 0 || rank >= check->request->world) {
            return BROKEN("ranks exist",
                          "micro_batches[%" PRId64 "] names rank %d of a world of %d",
                          m, rank, check->request->world);
        }
        if (check->last_user[rank] == m + 1) {
            return BROKEN("ranks are distinct",
                          "micro_batches[%" PRId64 "] names rank %d twice", m, rank);
        }
        check->last_user[rank] = m + 1;
        if (i > plan->rank_offsets[m] && rank != plan->ranks[i - 1] + 1) {
            return BROKEN("ranks are consecutive and ascending",
                          "micro_batches[%" PRId64 "] names rank %d after rank %d", m,
                          rank, plan->ranks[i - 1]);
        }
    }
    return DCP_OK;
}

/* Coverage comes before what follows from it: a sequence that is missing or twice also
 * changes bytes and durations. */
static dcp_status_t
check_coverage(const check_t *check)
{
    const dcp_plan_t *plan = check->plan;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        for (int64_t i = plan->sequence_offsets[m]; i < plan->sequence_offsets[m + 1];
             i++) {
            int64_t sequence = plan->sequences[i];
            if (sequence < 0 || sequence >= check->request->length_count) {
                return BROKEN("sequences exist",
                              "micro_batches[%" PRId64 "] names sequence %" PRId64
                              " of %" PRId64,
                              m, sequence, check->request->length_count);
            }
            if (check->computed_by[sequence] != 0) {
                return BROKEN("every sequence exactly once",
                              "sequence %" PRId64 " is in micro_batches[%" PRId64
                              "] and [%" PRId64 "]",
                              sequence, check->computed_by[sequence] - 1, m);
            }
            check->computed_by[sequence] = m + 1;
        }
    }
    for (int64_t i = 0; i < check->request->length_count; i++) {
        if (check->computed_by[i] == 0) {
            return BROKEN("every sequence exactly once",
                          "sequence %" PRId64 " is in no micro-batch", i);
        }
    }
    return DCP_OK;
}

static void
sum_micro_batch(const check_t *check, int64_t m, int64_t *tokens_p, double *squares_p)
{
    const dcp_plan_t *plan = check->plan;
    int64_t tokens = 0;
    double squares = 0;
    for (int64_t i = plan->sequence_offsets[m]; i < plan->sequence_offsets[m + 1];
         i++) {
        int64_t length = check->request->lengths[plan->sequences[i]];
        tokens += length;
        squares += (double)length * (double)length;
    }
    *tokens_p = tokens;
    *squares_p = squares;
}

static dcp_status_t
check_recompute(const check_t *check, int64_t m)
{
    const int32_t *counts = check->plan->recompute + m * DCP_RECOMPUTE_KINDS;
    int64_t layers = counts[DCP_RECOMPUTE_LAYER], mlps = counts[DCP_RECOMPUTE_MLP];
    int64_t most = check->request->cost.layer_count;
    if (layers < 0 || mlps < 0 || layers + mlps > most) {
        return BROKEN("recompute counts within the layers",
                      "micro_batches[%" PRId64 "] recomputes {layer: %" PRId64
                      ", mlp: %" PRId64 "} of %" PRId64 " layers",
                      m, layers, mlps, most);
    }
    return DCP_OK;
}

static dcp_status_t
check_memory(const check_t *check, int64_t m, int64_t tokens)
{
    const dcp_plan_request_t *request = check->request;
    const dcp_plan_t *plan = check->plan;
    int64_t bytes, ranks = plan->rank_offsets[m + 1] - plan->rank_offsets[m];
    int64_t rows = tokens / ranks + (tokens % ranks != 0);
    if (rows > check->problem->row_cap) {
        return BROKEN("tokens under the cap",
                      "micro_batches[%" PRId64 "] has %" PRId64
                      " tokens on each rank, the cap is %" PRId64,
                      m, rows, check->problem->row_cap);
    }
    DCP_TRY(dcp_cost_memory(&request->cost, tokens, (int32_t)ranks,
                            plan->recompute + m * DCP_RECOMPUTE_KINDS, request->world,
                            &bytes));
    if (request->memory_bytes > 0 && bytes > request->memory_bytes) {
        return BROKEN("memory under the cap",
                      "micro_batches[%" PRId64 "] needs %" PRId64
                      " bytes, memory_bytes is %" PRId64,
                      m, bytes, request->memory_bytes);
    }
    if (plan->bytes[m] != bytes) {
        return BROKEN("bytes as the cost model says",
                      "micro_batches[%" PRId64 "].bytes is %" PRId64
                      ", the model says %" PRId64,
                      m, plan->bytes[m], bytes);
    }
    return DCP_OK;
}

static dcp_status_t
check_times(const check_t *check, int64_t m, int64_t tokens, double squares)
{
    const dcp_plan_t *plan = check->plan;
    double seconds, start = plan->start_s[m], end = plan->end_s[m];
    const dcp_cost_t *cost = &check->request->cost;
    int64_t r0 = plan->rank_offsets[m];
    int32_t group = (int32_t)(plan->rank_offsets[m + 1] - r0);
    DCP_TRY(dcp_cost_time(cost, tokens, squares, group,
                          dcp_cost_tier(cost, plan->ranks[r0], group),
                          plan->recompute + m * DCP_RECOMPUTE_KINDS, &seconds));
    if (!isfinite(start) || !isfinite(end) || start < 0
        || differs(end, start + seconds)) {
        return BROKEN("durations as the cost model says",
                      "micro_batches[%" PRId64
                      "] runs from %.9g to %.9g s, the model says %.9g s",
                      m, start, end, seconds);
    }
    for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
        int32_t rank = plan->ranks[i];
        double busy = check->busy_until_s[rank];
        if (start < busy && differs(start, busy)) {
            return BROKEN("one micro-batch at a time",
                          "micro_batches[%" PRId64
                          "] starts at %.9g s, rank %d is busy until %.9g s",
                          m, start, rank, busy);
        }
        check->busy_until_s[rank] = end;
    }
    return DCP_OK;
}

/* Starts of the rounds from the ends that the plan claims; those are checked later. */
static dcp_status_t
find_rounds(check_t *check)
{
    const dcp_plan_t *plan = check->plan;
    int64_t count = plan->micro_batch_count;
    double *longest = check->round_start_s;
    for (int64_t m = 0; m < count; m++) {
        if (plan->round[m] < 0 || plan->round[m] >= count) {
            return BROKEN("rounds count from 0",
                          "micro_batches[%" PRId64 "].round is %d, of %" PRId64
                          " micro-batches",
                          m, plan->round[m], count);
        }
        double *most = &longest[plan->round[m]];
        *most = fmax(*most, plan->end_s[m] - plan->start_s[m]);
    }
    double start = 0;
    for (int64_t r = 0; r < count; r++) {
        double lasts = longest[r];
        longest[r] = start;
        start += lasts;
    }
    return DCP_OK;
}

static dcp_status_t
check_round(const check_t *check, int64_t m)
{
    const dcp_plan_t *plan = check->plan;
    int32_t round = plan->round[m];
    if (check->request->rounds == 0) {
        return round == 0 ? DCP_OK
                          : BROKEN("rounds only where ranks move together",
                                   "micro_batches[%" PRId64 "].round is %d", m, round);
    }
    for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1]; i++) {
        int32_t rank = plan->ranks[i];
        if (check->last_round[rank] > round) {
            return BROKEN("one micro-batch a rank and round",
                          "rank %d has round %d after round %" PRId64, rank, round,
                          check->last_round[rank] - 1);
        }
        check->last_round[rank] = round + 1;
    }
    double start = check->round_start_s[round];
    if (differs(plan->start_s[m], start)) {
        return BROKEN("a round starts when the longest of the one before has ended",
                      "micro_batches[%" PRId64 "] starts at %.9g s, round %d at %.9g s",
                      m, plan->start_s[m], round, start);
    }
    return DCP_OK;
}

static dcp_status_t
check_winner(const dcp_plan_t *plan)
{
    for (int64_t i = 0; i < dcp_plan_strategy_count(); i++) {
        if (strcmp(plan->winner, dcp_plan_strategy_name(i)) == 0) {
            return DCP_OK;
        }
    }
    return BROKEN("the winner is a strategy", "winner is '%.60s'", plan->winner);
}

static dcp_status_t
check_totals(const check_t *check)
{
    const dcp_plan_t *plan = check->plan;
    double last = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        last = plan->end_s[m] > last ? plan->end_s[m] : last;
    }
    if (differs(plan->makespan_s, last)) {
        return BROKEN("makespan is the end of the last micro-batch",
                      "makespan_s is %.9g, the last ends at %.9g s", plan->makespan_s,
                      last);
    }
    return DCP_OK;
}

static dcp_status_t
check_bound(const plan_problem_t *problem, const dcp_plan_t *plan)
{
    if (differs(plan->bound_s, problem->bound_s)) {
        return BROKEN("bound as the cost model says",
                      "bound_s is %.9g, the model says %.9g", plan->bound_s,
                      problem->bound_s);
    }
    return DCP_OK;
}

static dcp_status_t
check_all(check_t *check)
{
    DCP_TRY(check_lists(check->plan));
    if (check->request->rounds != 0) {
        DCP_TRY(find_rounds(check));
    }
    DCP_TRY(check_winner(check->plan));
    DCP_TRY(check_coverage(check));
    for (int64_t m = 0; m < check->plan->micro_batch_count; m++) {
        int64_t tokens = 0;
        double squares = 0;
        DCP_TRY(check_ranks(check, m));
        sum_micro_batch(check, m, &tokens, &squares);
        DCP_TRY(check_recompute(check, m));
        DCP_TRY(check_memory(check, m, tokens));
        DCP_TRY(check_round(check, m));
        DCP_TRY(check_times(check, m, tokens, squares));
    }
    return check_totals(check);
}

/* Every rule but the bound's. */
static dcp_status_t
prove(const plan_problem_t *problem, const dcp_plan_t *plan)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t world = request->world, n = request->length_count;
    int64_t batches = plan->micro_batch_count > 0 ? plan->micro_batch_count : 0;
    void *memory;
    DCP_TRY(
        dcp_alloc_zeroed((3 * world + n + batches) * 8, "the plan's proof", &memory));
    int64_t *words = memory;
    check_t check = {
        .problem = problem,
        .request = request,
        .plan = plan,
        .busy_until_s = memory,
        .last_user = words + world,
        .last_round = words + 2 * world,
        .computed_by = words + 3 * world,
        .round_start_s = (double *)memory + 3 * world + n,
    };
    dcp_status_t status = check_all(&check);
    dcp_free(memory);
    return status;
}

dcp_status_t
plan_verify(const plan_problem_t *problem, const dcp_plan_t *plan)
{
    DCP_TRY(prove(problem, plan));
    return check_bound(problem, plan);
}

dcp_status_t
dcp_plan_verify(const dcp_plan_request_t *request, const dcp_plan_t *plan)
{
    DCP_TRY(dcp_plan_check(request));
    plan_problem_t problem;
    DCP_TRY(plan_problem_init(request, &problem));
    dcp_status_t status = prove(&problem, plan); /* so every sequence fits */
    if (status == DCP_OK) {
        status = plan_bound(&problem, &problem.bound_s);
    }
    if (status == DCP_OK) {
        status = check_bound(&problem, plan);
    }
    plan_problem_fini(&problem);
    return status;
}
