/* Proves a plan against its request, whoever wrote it.
 *
 * Every rule is checked from the request alone; nothing that the plan says is taken for
 * granted, so a plan edited by hand, damaged on the way or made by a faulty strategy is
 * found here and not as a wrong gradient. The order of groups is acyclic because the
 * starts are one global clock: on no rank does a micro-batch start before the one
 * listed before it there has ended, so following the list never waits in a circle.
 * Cost: O(micro-batches + sequences + ranks).
 */
#include "dcp/plan.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>

#define BROKEN(rule, ...) \
    DCP_FAIL(DCP_ERR_ARG, "plan breaks the rule '" rule "': " __VA_ARGS__)

static const double time_tolerance = 1e-9; /* relative: for numbers read from text */

typedef struct check {
    const dcp_plan_request_t *request;
    const dcp_plan_t *plan;
    double *busy_until_s; /* [world] */
    int64_t *last_user;   /* [world] micro-batch that last named the rank, + 1 */
    int64_t *computed_by; /* [length_count] micro-batch, + 1; 0: none yet */
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
    }
    return DCP_OK;
}

static dcp_status_t
check_sequences(const check_t *check, int64_t m, int64_t *tokens_p, double *squares_p)
{
    const dcp_plan_t *plan = check->plan;
    int64_t tokens = 0;
    double squares = 0;
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
        int64_t length = check->request->lengths[sequence];
        tokens += length;
        squares += (double)length * (double)length;
    }
    *tokens_p = tokens;
    *squares_p = squares;
    return DCP_OK;
}

static dcp_status_t
check_memory(const check_t *check, int64_t m, int64_t tokens)
{
    const dcp_plan_request_t *request = check->request;
    const dcp_plan_t *plan = check->plan;
    int64_t bytes;
    DCP_TRY(dcp_cost_memory(
        &request->cost, tokens,
        (int32_t)(plan->rank_offsets[m + 1] - plan->rank_offsets[m]),
        plan->recompute + m * DCP_RECOMPUTE_KINDS, request->world, &bytes));
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

static dcp_status_t
check_totals(const check_t *check)
{
    const dcp_plan_t *plan = check->plan;
    for (int64_t i = 0; i < check->request->length_count; i++) {
        if (check->computed_by[i] == 0) {
            return BROKEN("every sequence exactly once",
                          "sequence %" PRId64 " is in no micro-batch", i);
        }
    }
    double last = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        last = plan->end_s[m] > last ? plan->end_s[m] : last;
    }
    if (differs(plan->makespan_s, last)) {
        return BROKEN("makespan is the end of the last micro-batch",
                      "makespan_s is %.9g, the last ends at %.9g s", plan->makespan_s,
                      last);
    }
    double bound = dcp_plan_bound(check->request);
    if (differs(plan->bound_s, bound)) {
        return BROKEN("bound as the cost model says",
                      "bound_s is %.9g, the model says %.9g", plan->bound_s, bound);
    }
    return DCP_OK;
}

static dcp_status_t
check_all(const check_t *check)
{
    DCP_TRY(check_lists(check->plan));
    for (int64_t m = 0; m < check->plan->micro_batch_count; m++) {
        int64_t tokens = 0;
        double squares = 0;
        DCP_TRY(check_ranks(check, m));
        DCP_TRY(check_sequences(check, m, &tokens, &squares));
        DCP_TRY(check_memory(check, m, tokens));
        DCP_TRY(check_times(check, m, tokens, squares));
    }
    return check_totals(check);
}

dcp_status_t
dcp_plan_verify(const dcp_plan_request_t *request, const dcp_plan_t *plan)
{
    DCP_TRY(dcp_plan_check(request));
    int64_t world = request->world, n = request->length_count;
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((2 * world + n) * 8, "the plan's proof", &memory));
    check_t check = {
        .request = request,
        .plan = plan,
        .busy_until_s = memory,
        .last_user = (int64_t *)memory + world,
        .computed_by = (int64_t *)memory + 2 * world,
    };
    dcp_status_t status = check_all(&check);
    dcp_free(memory);
    return status;
}
