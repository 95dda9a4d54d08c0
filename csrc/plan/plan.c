/* The planner's driver: check the request, let a strategy draft, put times and bytes to
 * it, verify, hash.
 *
 * A strategy only decides which ranks compute which sequences in which order; all that
 * follows from that is computed here, once, for every strategy. The result is verified
 * always: it costs O(sequences), and a plan that verifies cannot deadlock.
 * Determinism: no clock, no addresses, no unordered containers; every sort breaks ties
 * by index.
 */
#include "dcp/plan.h"

#include "dcp/alloc.h"
#include "plan_draft.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DEFAULT_MAX_TOKENS = 4096, MAX_WORLD = 1 << 20 };

/* Token sums stay exact in a double. */
static const int64_t max_total_tokens = INT64_C(1) << 53;

static const plan_strategy_t strategies[] = {
    {"packed", plan_packed_run},
    {"bucket", plan_bucket_run},
};

int64_t
dcp_plan_strategy_count(void)
{
    return (int64_t)(sizeof strategies / sizeof strategies[0]);
}

const char *
dcp_plan_strategy_name(int64_t index)
{
    return index >= 0 && index < dcp_plan_strategy_count() ? strategies[index].name
                                                           : "unknown";
}

/* Levenshtein distance of names cut to 31 characters. */
static int
edit_distance(const char *a, const char *b)
{
    int row[32], columns = 0;
    while (columns < 31 && b[columns] != '\0') {
        columns++;
    }
    for (int j = 0; j <= columns; j++) {
        row[j] = j;
    }
    for (int i = 1; i <= 31 && a[i - 1] != '\0'; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            int least = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            diagonal = row[j];
            row[j] = change < least ? change : least;
        }
    }
    return row[columns];
}

static dcp_status_t
find_strategy(const char *name, const plan_strategy_t **strategy_p)
{
    const char *nearest = strategies[0].name;
    int least = 1 << 20;
    for (int64_t i = 0; i < dcp_plan_strategy_count(); i++) {
        if (strcmp(strategies[i].name, name) == 0) {
            *strategy_p = &strategies[i];
            return DCP_OK;
        }
        int distance = edit_distance(name, strategies[i].name);
        if (distance < least) {
            least = distance;
            nearest = strategies[i].name;
        }
    }
    char known[128] = "";
    for (int64_t i = 0; i < dcp_plan_strategy_count(); i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "",
                 strategies[i].name);
    }
    return DCP_FAIL(DCP_ERR_ARG,
                    "strategy '%.60s' is not known: did you mean '%s'? (known: %s)",
                    name, nearest, known);
}

dcp_status_t
dcp_plan_check(const dcp_plan_request_t *request)
{
    DCP_TRY(dcp_cost_check(&request->cost));
    if (request->world < 1 || request->world > MAX_WORLD) {
        return DCP_FAIL(DCP_ERR_ARG, "world_size = %d must lie in 1..%d",
                        request->world, (int)MAX_WORLD);
    }
    if (request->length_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "length_count = %" PRId64 " must be >= 0",
                        request->length_count);
    }
    if (request->memory_bytes < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "memory_bytes = %" PRId64 " must be >= 0",
                        request->memory_bytes);
    }
    if (request->max_tokens < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "max_tokens = %" PRId64 " must be >= 0",
                        request->max_tokens);
    }
    int64_t total = 0;
    for (int64_t i = 0; i < request->length_count; i++) {
        if (request->lengths[i] < 1) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "lengths[%" PRId64 "] = %" PRId64
                            " must be >= 1: drop empty sequences before planning",
                            i, request->lengths[i]);
        }
        if (request->lengths[i] > max_total_tokens - total) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "lengths add up to more than 2^53 tokens at index %" PRId64
                            " (%" PRId64 ")",
                            i, request->lengths[i]);
        }
        total += request->lengths[i];
    }
    const plan_strategy_t *strategy;
    return find_strategy(request->strategy, &strategy);
}

static int64_t
longest_length(const dcp_plan_request_t *request)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < request->length_count; i++) {
        longest = request->lengths[i] > longest ? request->lengths[i] : longest;
    }
    return longest;
}

static int64_t
memory_of(const dcp_plan_request_t *request, int64_t token_count)
{
    int64_t bytes = 0;
    /* one rank, nothing recomputed: cannot fail for a checked request */
    (void)dcp_cost_memory(&request->cost, token_count, 1, NULL, request->world, &bytes);
    return bytes;
}

int64_t
dcp_plan_cap_tokens(const dcp_plan_request_t *request)
{
    int64_t cap = request->max_tokens;
    if (cap == 0) {
        int64_t longest = longest_length(request);
        cap = longest > DEFAULT_MAX_TOKENS ? longest : DEFAULT_MAX_TOKENS;
    }
    if (request->memory_bytes == 0
        || memory_of(request, cap) <= request->memory_bytes) {
        return cap;
    }
    int64_t fits = 0, too_many = cap; /* memory is monotone in tokens */
    while (too_many - fits > 1) {
        int64_t middle = fits + (too_many - fits) / 2;
        if (memory_of(request, middle) <= request->memory_bytes) {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    return fits;
}

/* A sequence that no micro-batch can hold. */
static dcp_status_t
check_fits(const dcp_plan_request_t *request, int64_t cap_tokens)
{
    for (int64_t i = 0; i < request->length_count; i++) {
        int64_t length = request->lengths[i];
        if (length <= cap_tokens) {
            continue;
        }
        int64_t bytes = memory_of(request, length);
        if (request->memory_bytes > 0 && bytes > request->memory_bytes) {
            return DCP_FAIL(
                DCP_ERR_INFEASIBLE,
                "lengths[%" PRId64 "] = %" PRId64 " fits on no rank: it needs %" PRId64
                " bytes (%" PRId64 " of them whatever the rank computes), "
                "and memory_bytes caps a rank at %" PRId64,
                i, length, bytes, memory_of(request, 0), request->memory_bytes);
        }
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "lengths[%" PRId64 "] = %" PRId64
                        " fits in no micro-batch: max_tokens caps one at %" PRId64,
                        i, length, request->max_tokens);
    }
    return DCP_OK;
}

dcp_status_t
plan_draft_add(plan_draft_t *draft, const int32_t *ranks, int32_t rank_count,
               const int64_t *sequences, int64_t sequence_count)
{
    dcp_plan_t *plan = draft->plan;
    int64_t m = plan->micro_batch_count;
    int64_t rank_end = plan->rank_offsets[m] + rank_count;
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
    memcpy(plan->ranks + plan->rank_offsets[m], ranks,
           (size_t)rank_count * sizeof ranks[0]);
    memcpy(plan->sequences + plan->sequence_offsets[m], sequences,
           (size_t)sequence_count * sizeof sequences[0]);
    plan->rank_offsets[m + 1] = rank_end;
    plan->sequence_offsets[m + 1] = plan->sequence_offsets[m] + sequence_count;
    plan->micro_batch_count = m + 1;
    return DCP_OK;
}

/* Room for as many micro-batches as there are sequences; zeroed, so one may destroy it
 * at any point. */
static dcp_status_t
plan_alloc(int64_t length_count, plan_draft_t *draft)
{
    void *memory;
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
    draft->plan = plan;
    draft->rank_capacity = n;
    return DCP_OK;
}

void
dcp_plan_destroy(dcp_plan_t *plan)
{
    if (plan == NULL) {
        return;
    }
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

/* Puts start, end and bytes to every micro-batch: each starts when all of its ranks
 * have ended what comes before it in the list. */
static dcp_status_t
schedule(const dcp_plan_request_t *request, dcp_plan_t *plan, double *ready_s)
{
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        int64_t tokens = 0;
        double squares = 0, start = 0, seconds;
        for (int64_t i = plan->sequence_offsets[m]; i < plan->sequence_offsets[m + 1];
             i++) {
            int64_t length = request->lengths[plan->sequences[i]];
            tokens += length;
            squares += (double)length * (double)length;
        }
        int64_t r0 = plan->rank_offsets[m], r1 = plan->rank_offsets[m + 1];
        for (int64_t i = r0; i < r1; i++) {
            double ready = ready_s[plan->ranks[i]];
            start = ready > start ? ready : start;
        }
        const int32_t *recompute = plan->recompute + m * DCP_RECOMPUTE_KINDS;
        DCP_TRY(dcp_cost_time(&request->cost, tokens, squares, (int32_t)(r1 - r0),
                              recompute, &seconds));
        DCP_TRY(dcp_cost_memory(&request->cost, tokens, (int32_t)(r1 - r0), recompute,
                                request->world, &plan->bytes[m]));
        plan->start_s[m] = start;
        plan->end_s[m] = start + seconds;
        for (int64_t i = r0; i < r1; i++) {
            ready_s[plan->ranks[i]] = plan->end_s[m];
        }
        plan->makespan_s =
            plan->end_s[m] > plan->makespan_s ? plan->end_s[m] : plan->makespan_s;
    }
    return DCP_OK;
}

static dcp_status_t
finish(const plan_problem_t *problem, dcp_plan_t *plan)
{
    const dcp_plan_request_t *request = problem->request;
    void *ready_s;
    DCP_TRY(dcp_alloc_zeroed(request->world * (int64_t)sizeof(double), "a plan's ranks",
                             &ready_s));
    dcp_status_t status = schedule(request, plan, ready_s);
    dcp_free(ready_s);
    if (status != DCP_OK) {
        return status;
    }
    /* sums in another order may differ in the last bit */
    plan->bound_s =
        problem->bound_s < plan->makespan_s ? problem->bound_s : plan->makespan_s;
    dcp_plan_hash(request, plan, plan->hash);
    return dcp_plan_verify(request, plan);
}

dcp_status_t
dcp_plan_create(const dcp_plan_request_t *request, dcp_plan_t **plan_p)
{
    DCP_TRY(dcp_plan_check(request));
    const plan_strategy_t *strategy;
    DCP_TRY(find_strategy(request->strategy, &strategy));
    int64_t cap_tokens = dcp_plan_cap_tokens(request);
    DCP_TRY(check_fits(request, cap_tokens));

    plan_draft_t draft;
    DCP_TRY(plan_alloc(request->length_count, &draft));
    void *memory;
    dcp_status_t status = dcp_alloc_array(request->length_count, sizeof(double),
                                          "the planner's costs", &memory);
    if (status != DCP_OK) {
        goto err_plan;
    }
    double *work_s = memory;
    for (int64_t i = 0; i < request->length_count; i++) {
        double length = (double)request->lengths[i];
        work_s[i] =
            request->cost.token_s * length + request->cost.square_s * length * length;
    }
    plan_problem_t problem = {
        .request = request,
        .work_s = work_s,
        .cap_tokens = cap_tokens,
        .bound_s = dcp_plan_bound(request),
    };
    status = request->length_count > 0 ? strategy->run(&problem, &draft) : DCP_OK;
    if (status == DCP_OK) {
        status = finish(&problem, draft.plan);
    }
    dcp_free(work_s);
    if (status != DCP_OK) {
        goto err_plan;
    }
    *plan_p = draft.plan;
    return DCP_OK;

err_plan:
    dcp_plan_destroy(draft.plan);
    return status;
}
