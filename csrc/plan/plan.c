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
    {"inter", plan_inter_run},
    {"bucket-published", plan_bucket_published_run},
    {"inter-published", plan_inter_published_run},
    {"fixed", plan_fixed_run},
    {"fixed-best", plan_fixed_best_run},
    {"knapformer", plan_knapformer_run},
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

void
plan_recompute(const dcp_cost_t *cost, int which,
               int32_t recompute[DCP_RECOMPUTE_KINDS])
{
    int32_t layers = (int32_t)cost->layer_count;
    recompute[DCP_RECOMPUTE_LAYER] = which == PLAN_FULL ? layers : 0;
    recompute[DCP_RECOMPUTE_MLP] = which == PLAN_SELECTIVE ? layers : 0;
}

double
plan_time(const plan_problem_t *problem, int64_t tokens, double squares, int32_t first,
          const plan_setting_t *setting)
{
    const dcp_cost_t *cost = &problem->request->cost;
    double seconds = 0;
    (void)dcp_cost_time(cost, tokens, squares, setting->group,
                        dcp_cost_tier(cost, first, setting->group), setting->recompute,
                        &seconds);
    return seconds;
}

int64_t
plan_bytes(const plan_problem_t *problem, int64_t tokens, const plan_setting_t *setting)
{
    int64_t bytes = 0;
    (void)dcp_cost_memory(&problem->request->cost, tokens, setting->group,
                          setting->recompute, problem->request->world, &bytes);
    return bytes;
}

int64_t
plan_cap_tokens(const plan_problem_t *problem, const plan_setting_t *setting)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t rows = request->max_tokens;
    if (rows == 0 && request->memory_bytes == 0) {
        rows = problem->longest > DEFAULT_MAX_TOKENS ? problem->longest
                                                     : DEFAULT_MAX_TOKENS;
    }
    int64_t most = max_total_tokens / 2;
    int64_t cap =
        rows == 0 || rows > most / setting->group ? most : rows * setting->group;
    if (request->memory_bytes == 0
        || plan_bytes(problem, cap, setting) <= request->memory_bytes) {
        return cap;
    }
    int64_t fits = 0, too_many = cap; /* memory is monotone in tokens */
    while (too_many - fits > 1) {
        int64_t middle = fits + (too_many - fits) / 2;
        if (plan_bytes(problem, middle, setting) <= request->memory_bytes) {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    return fits;
}

/* Full recompute on the largest group holds most tokens, or the group that gathers
 * least: whether any setting holds a micro-batch of `length` tokens. */
static int
fits_somewhere(const plan_problem_t *problem, int64_t length)
{
    for (int which = 0; which < PLAN_RECOMPUTES; which++) {
        for (int32_t group = 1; group <= problem->max_group; group++) {
            plan_setting_t setting = {.group = group};
            plan_recompute(&problem->request->cost, which, setting.recompute);
            if (length <= plan_cap_tokens(problem, &setting)) {
                return 1;
            }
        }
    }
    return 0;
}

/* A sequence that no micro-batch can hold. */
static dcp_status_t
check_fits(const plan_problem_t *problem)
{
    const dcp_plan_request_t *request = problem->request;
    if (fits_somewhere(problem, problem->longest)) {
        return DCP_OK;
    }
    for (int64_t i = 0; i < request->length_count; i++) {
        int64_t length = request->lengths[i];
        if (fits_somewhere(problem, length)) {
            continue;
        }
        plan_setting_t widest = {.group = problem->max_group};
        plan_recompute(&request->cost, PLAN_FULL, widest.recompute);
        int64_t bytes = plan_bytes(problem, length, &widest);
        if (request->memory_bytes > 0 && bytes > request->memory_bytes) {
            return DCP_FAIL(DCP_ERR_INFEASIBLE,
                            "lengths[%" PRId64 "] = %" PRId64
                            " fits on no rank: it needs %" PRId64 " bytes (%" PRId64
                            " of them whatever the rank computes), "
                            "and memory_bytes caps a rank at %" PRId64,
                            i, length, bytes, plan_bytes(problem, 0, &widest),
                            request->memory_bytes);
        }
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "lengths[%" PRId64 "] = %" PRId64
                        " fits in no micro-batch: max_tokens caps one at %" PRId64
                        " on each rank",
                        i, length, request->max_tokens);
    }
    return DCP_OK;
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
        int32_t group = (int32_t)(r1 - r0);
        DCP_TRY(dcp_cost_time(&request->cost, tokens, squares, group,
                              dcp_cost_tier(&request->cost, plan->ranks[r0], group),
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

static void
describe(const dcp_plan_request_t *request, plan_problem_t *problem)
{
    problem->request = request;
    problem->longest = longest_length(request);
    problem->run_longest = request->run_longest > problem->longest
                               ? request->run_longest
                               : problem->longest;
    problem->max_group = request->max_group > 0 && request->max_group < request->world
                             ? request->max_group
                             : request->world;
}

dcp_status_t
dcp_plan_create(const dcp_plan_request_t *request, dcp_plan_t **plan_p)
{
    DCP_TRY(dcp_plan_check(request));
    const plan_strategy_t *strategy;
    DCP_TRY(find_strategy(request->strategy, &strategy));
    plan_problem_t problem;
    describe(request, &problem);
    DCP_TRY(check_fits(&problem));

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
    problem.work_s = work_s;
    problem.bound_s = dcp_plan_bound(request);
    draft.plan->winner = strategy->name;
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
