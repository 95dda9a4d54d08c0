/* Strategy `dcp`: group sizes, recompute, packing and accumulation chosen jointly for
 * the least makespan.
 *
 * Its own search places all sequences so that every rank ends by a target T
 * (strategy_dcp_place.c), evens out the ranks (_balance.c) and writes micro-batches
 * with the cheapest recompute (_emit.c). T starts at the bound; what was reached and
 * the bound then bracket further targets, because a little more time often allows
 * smaller groups, which cost less. Then it prices what every other strategy drafts for
 * the same step and returns the best of all: never behind any of them, and `winner`
 * tells whose it is. Targets are tried a fixed number of times, no clock is read.
 */
#include "strategy_dcp.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

/* Beyond MANY_RANKS every target costs more and gains less. */
enum { TARGETS = 8, TARGETS_OF_MANY = 3, MANY_RANKS = 256 };

/* Of many sequences, targets that gain little are tried this often. */
enum { PATIENCE = 1, MANY_SEQUENCES = 512 };
static const double worth_more = 0.03; /* of the gap to the bound */

/* Closer to the bound than this is far below what a cost model knows. */
static const double good_gap = 5e-4;

/* Where the first target rises by more, it was out of reach. */
static const double hopeless_rise = 0.005;

typedef struct contest {
    const plan_problem_t *problem;
    plan_draft_t best, trial;
    double *ready_s; /* [world] */
} contest_t;

/* Prices the trial and keeps it if it is the best so far. */
static dcp_status_t
enter(contest_t *contest, const char *winner)
{
    dcp_plan_t *plan = contest->trial.plan;
    plan->winner = winner;
    DCP_TRY(plan_schedule(contest->problem, plan, contest->ready_s));
    const dcp_plan_t *best = contest->best.plan;
    if (best->micro_batch_count == 0 || plan->makespan_s < best->makespan_s) {
        plan_draft_t kept = contest->best;
        contest->best = contest->trial;
        contest->trial = kept;
    }
    return DCP_OK;
}

/* What the fixed parts of whole micro-batches add to the bound, which counts shares of
 * them, if every rank gets equally many tokens. */
static double
whole_batches(const dcp_search_t *s)
{
    double tokens = 0, cap = (double)s->sizes[0].cap_none;
    for (int64_t i = 0; i < s->count; i++) {
        if (dcp_search_is_packed(s, i)) {
            tokens += (double)s->problem->request->lengths[i];
        }
    }
    double batches = cap > 0 ? tokens / s->world / cap : 0;
    return s->start_s * (ceil(batches) - fmax(batches, 1));
}

/* The own search: keeps the places that end first, writes and prices them. */
static dcp_status_t
search_targets(contest_t *contest, dcp_search_t *search)
{
    /* above the best target so far, of what it ended later; below it, of the bound */
    static const double above[TARGETS] = {0, 0.5, 0.5, 0, 0.5, 0, 0.3, 0.8};
    static const double below[TARGETS] = {0, 0, 0, 0.7, 0, 0.85, 0, 0};
    double bound = contest->problem->bound_s, reached = INFINITY;
    double best_target = bound + fmax(0, whole_batches(search));
    size_t bytes = (size_t)search->count * sizeof search->places[0];
    int targets = search->world > MANY_RANKS ? TARGETS_OF_MANY : TARGETS;
    int patience = search->count > MANY_SEQUENCES ? PATIENCE : targets;
    for (int i = 0; i < targets && patience > 0; i++) {
        double target = best_target;
        if (!isinf(reached)) {
            target = above[i] > 0 ? best_target + above[i] * (reached - best_target)
                                  : bound + below[i] * (best_target - bound);
        }
        double limit = i == 0 ? target * (1 + hopeless_rise) : INFINITY;
        double risen = dcp_search_place(search, target, limit);
        if (i == 0 && risen > limit) {
            best_target = risen; /* out of reach: start from there */
            continue;
        }
        double end = dcp_search_balance(search, bound * (1 + good_gap));
        patience -= end > reached - worth_more * (reached - bound);
        if (end < reached) {
            reached = end;
            best_target = target;
            memcpy(search->best_places, search->places, bytes);
        }
        if (reached <= bound * (1 + good_gap)) {
            break;
        }
    }
    if (isinf(reached)) { /* nothing placed within memory: the others' plans stand */
        return DCP_OK;
    }
    memcpy(search->places, search->best_places, bytes);
    DCP_TRY(dcp_search_emit(search, &contest->trial));
    return enter(contest, "dcp");
}

/* What no plan of one setting for all can beat: work over ranks, of the best setting
 * that holds the longest sequence, on groups that lie as well as they can. */
static double
one_setting_bound(const plan_problem_t *problem)
{
    const dcp_plan_request_t *request = problem->request;
    double tokens = 0, squares = 0, least = INFINITY;
    for (int64_t i = 0; i < request->length_count; i++) {
        tokens += (double)request->lengths[i];
        squares += (double)request->lengths[i] * (double)request->lengths[i];
    }
    for (int32_t p = 1; p <= problem->max_group; p++) {
        plan_price_t price;
        plan_price_init(&request->cost, p, plan_best_tier(&request->cost, p), &price);
        for (int which = PLAN_NONE; which < PLAN_RECOMPUTES; which++) {
            plan_setting_t setting = {.group = p};
            plan_recompute(&request->cost, which, setting.recompute);
            if (request->memory_bytes > 0
                && plan_bytes(problem, problem->longest, &setting)
                       > request->memory_bytes) {
                continue;
            }
            double work = plan_price_work(&price, tokens, squares, setting.recompute);
            least = fmin(least, price.start_s + p * work / request->world);
        }
    }
    return least;
}

static dcp_status_t
price_others(contest_t *contest)
{
    int64_t count;
    const plan_strategy_t *others = plan_strategies(&count);
    double one_setting = one_setting_bound(contest->problem);
    for (int64_t k = 0; k < count; k++) {
        if (strcmp(others[k].name, "dcp") == 0
            || strcmp(others[k].name, "fixed") == 0) {
            continue;
        }
        if (others[k].one_setting && one_setting > contest->best.plan->makespan_s) {
            continue;
        }
        plan_draft_clear(&contest->trial);
        dcp_status_t status = others[k].run(contest->problem, &contest->trial);
        if (status == DCP_ERR_INFEASIBLE) {
            continue;
        }
        if (status != DCP_OK) {
            return status;
        }
        DCP_TRY(enter(contest, others[k].name));
    }
    return DCP_OK;
}

/* Small steps: local search from the best of all candidates. */
static dcp_status_t
refine(contest_t *contest, dcp_search_t *search)
{
    const dcp_plan_t *best = contest->best.plan;
    if (best->makespan_s <= contest->problem->bound_s * (1 + good_gap)) {
        return DCP_OK;
    }
    DCP_TRY(dcp_search_refine(contest->problem, best, search->trial, &contest->trial));
    return contest->trial.plan->micro_batch_count > 0 ? enter(contest, "dcp") : DCP_OK;
}

static dcp_status_t
search_all(contest_t *contest)
{
    dcp_search_t search;
    DCP_TRY(dcp_search_init(&search, contest->problem));
    dcp_status_t status = search_targets(contest, &search);
    if (status == DCP_OK) {
        status = price_others(contest);
    }
    if (status == DCP_OK) {
        status = refine(contest, &search);
    }
    dcp_search_fini(&search);
    return status;
}

dcp_status_t
plan_dcp_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    int64_t count = problem->request->length_count;
    contest_t contest = {.problem = problem, .best = *draft};
    void *ready_s;
    DCP_TRY(dcp_alloc_array(problem->request->world, sizeof(double), "a plan's ranks",
                            &ready_s));
    contest.ready_s = ready_s;
    dcp_status_t status = plan_draft_init(&contest.trial, count);
    if (status == DCP_OK) {
        status = search_all(&contest);
    }
    *draft = contest.best;
    plan_draft_fini(&contest.trial);
    dcp_free(ready_s);
    return status;
}
