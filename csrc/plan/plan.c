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

enum { DEFAULT_MAX_TOKENS = 4096 };

/* Token sums stay exact in a double. */
static const int64_t max_total_tokens = INT64_C(1) << 53;

static const plan_strategy_t strategies[] = {
    {"dcp", plan_dcp_run, 0},
    {"packed", plan_packed_run, 1},
    {"bucket", plan_bucket_run, 1},
    {"inter", plan_inter_run, 0},
    {"bucket-published", plan_bucket_published_run, 1},
    {"inter-published", plan_inter_published_run, 0},
    {"fixed", plan_fixed_run, 1},
    {"fixed-best", plan_fixed_best_run, 1},
    {"flexsp", plan_flexsp_run, 0},
    {"megatron", plan_megatron_run, 0},
    {"knapformer", plan_knapformer_run, 0},
};

const plan_strategy_t *
plan_strategies(int64_t *count_p)
{
    *count_p = dcp_plan_strategy_count();
    return strategies;
}

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
    char known[256] = "";
    for (int64_t i = 0; i < dcp_plan_strategy_count(); i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "",
                 strategies[i].name);
    }
    return DCP_FAIL(DCP_ERR_ARG,
                    "strategy '%.60s' is not known: did you mean '%s'? (known: %s)",
                    name, nearest, known);
}

/* The one setting of strategy "fixed". */
static dcp_status_t
check_fixed(const dcp_plan_request_t *request)
{
    int32_t group = request->fixed_group, world = request->world;
    if (group < 1 || group > world || world % group != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "fixed_group = %d must divide world_size = %d: every rank "
                        "belongs to one group",
                        group, world);
    }
    if (request->max_group > 0 && group > request->max_group) {
        return DCP_FAIL(DCP_ERR_ARG, "fixed_group = %d is more than max_group = %d",
                        group, request->max_group);
    }
    double seconds;
    return dcp_cost_time(&request->cost, 0, 0, 1, DCP_TIER_NODE,
                         request->fixed_recompute, &seconds);
}

dcp_status_t
dcp_plan_check(const dcp_plan_request_t *request)
{
    DCP_TRY(dcp_cost_check(&request->cost));
    if (request->world < 1 || request->world > PLAN_MAX_WORLD) {
        return DCP_FAIL(DCP_ERR_ARG, "world_size = %d must lie in 1..%d",
                        request->world, (int)PLAN_MAX_WORLD);
    }
    if (request->length_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "length_count = %" PRId64 " must be >= 0",
                        request->length_count);
    }
    if (request->memory_bytes < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "memory_bytes = %" PRId64 " must be >= 0",
                        request->memory_bytes);
    }
    if (request->max_group < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "max_group = %d must be >= 0", request->max_group);
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
    DCP_TRY(find_strategy(request->strategy, &strategy));
    return strcmp(strategy->name, "fixed") == 0 ? check_fixed(request) : DCP_OK;
}

static dcp_status_t
finish(const plan_problem_t *problem, dcp_plan_t *plan)
{
    const dcp_plan_request_t *request = problem->request;
    void *scratch;
    DCP_TRY(
        dcp_alloc_array(request->world, sizeof(double), "a plan's ranks", &scratch));
    dcp_status_t status = plan_schedule(problem, plan, scratch);
    dcp_free(scratch);
    if (status != DCP_OK) {
        return status;
    }
    /* sums in another order may differ in the last bit */
    plan->bound_s =
        problem->bound_s < plan->makespan_s ? problem->bound_s : plan->makespan_s;
    dcp_plan_hash(request, plan, plan->hash);
    return plan_verify(problem, plan);
}

dcp_status_t
plan_problem_init(const dcp_plan_request_t *request, plan_problem_t *problem)
{
    int64_t n = request->length_count;
    void *memory;
    DCP_TRY(dcp_alloc_array(3 * n, sizeof(double), "the planner's lists", &memory));
    double *work_s = memory, *keys = work_s; /* keys only while sorting */
    int64_t *order = (int64_t *)(work_s + n);
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++) {
        order[i] = i;
        keys[i] = (double)request->lengths[i];
        longest = request->lengths[i] > longest ? request->lengths[i] : longest;
    }
    plan_sort_descending(order, n, keys, order + n);
    for (int64_t i = 0; i < n; i++) {
        double length = (double)request->lengths[i];
        work_s[i] =
            request->cost.token_s * length + request->cost.square_s * length * length;
    }
    int64_t row_cap = request->max_tokens > 0        ? request->max_tokens
                      : request->memory_bytes > 0    ? INT64_MAX
                      : longest > DEFAULT_MAX_TOKENS ? longest
                                                     : DEFAULT_MAX_TOKENS;
    int32_t world = request->world, group = request->max_group;
    *problem = (plan_problem_t){
        .request = request,
        .work_s = work_s,
        .order = order,
        .longest = longest,
        .run_longest = request->run_longest > longest ? request->run_longest : longest,
        .row_cap = row_cap,
        .max_group = group > 0 && group < world ? group : world,
    };
    return DCP_OK;
}

void
plan_problem_fini(plan_problem_t *problem)
{
    void *memory;
    memcpy(&memory, &problem->work_s, sizeof memory); /* without its const */
    dcp_free(memory);
}

static dcp_status_t
draft_and_finish(const plan_problem_t *problem, const plan_strategy_t *strategy,
                 dcp_plan_t **plan_p)
{
    plan_draft_t draft;
    DCP_TRY(plan_draft_init(&draft, problem->request->length_count));
    draft.plan->winner = strategy->name;
    dcp_status_t status = DCP_OK;
    if (problem->request->length_count > 0) {
        status = strategy->run(problem, &draft);
    }
    if (status == DCP_OK) {
        status = finish(problem, draft.plan);
    }
    if (status != DCP_OK) {
        plan_draft_fini(&draft);
        return status;
    }
    *plan_p = draft.plan;
    return DCP_OK;
}

dcp_status_t
dcp_plan_create(const dcp_plan_request_t *request, dcp_plan_t **plan_p)
{
    DCP_TRY(dcp_plan_check(request));
    const plan_strategy_t *strategy;
    DCP_TRY(find_strategy(request->strategy, &strategy));
    plan_problem_t problem;
    DCP_TRY(plan_problem_init(request, &problem));
    dcp_status_t status = plan_check_fits(&problem);
    if (status == DCP_OK) {
        status = plan_bound(&problem, &problem.bound_s);
    }
    if (status == DCP_OK) {
        status = draft_and_finish(&problem, strategy, plan_p);
    }
    plan_problem_fini(&problem);
    return status;
}
