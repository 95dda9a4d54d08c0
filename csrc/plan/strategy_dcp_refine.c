/* Local search on whole micro-batches, for steps of few sequences, where packing by
 * targets leaves ranks idle.
 *
 * State: an ordered list of micro-batches (block of ranks, sequences). It climbs
 * (strategy_dcp_moves.c) from the best plan so far, and from all sequences dealt to
 * equal blocks, for some sizes of these, until a budget of elementary steps is spent.
 */
#include "strategy_dcp_refine.h"

#include "dcp/alloc.h"

#include <math.h>

enum { MOST_BATCHES = 160, MOST_SEQUENCES = 320 };

static const int64_t budget_steps = 4000000;

/* State `now` from a plan. */
static void
start_from_plan(dcp_refine_t *r, const dcp_plan_t *plan)
{
    r->now.count = plan->micro_batch_count;
    for (int64_t b = 0; b < r->now.count; b++) {
        int64_t r0 = plan->rank_offsets[b];
        dcp_batch_t *batch = &r->now.batches[b];
        *batch = (dcp_batch_t){.first = plan->ranks[r0],
                               .group = (int32_t)(plan->rank_offsets[b + 1] - r0)};
        for (int64_t k = plan->sequence_offsets[b]; k < plan->sequence_offsets[b + 1];
             k++) {
            dcp_refine_put(r, batch, plan->sequences[k], 1);
            r->now.batch_of[plan->sequences[k]] = (int32_t)b;
        }
        dcp_refine_price(r, batch);
    }
    dcp_refine_score(r, &r->now);
}

/* Sequence i alone on the block of `group` ranks, or of the ranks left over, where it
 * ends first. Returns the block's number. */
static int32_t
choose_block(dcp_refine_t *r, int64_t i, int32_t group, dcp_batch_t *alone)
{
    int32_t world = r->problem->request->world, best = 0;
    double least = INFINITY, whole_s = INFINITY;
    for (int32_t k = 0; k * group < world; k++) {
        int32_t left = world - k * group;
        dcp_batch_t batch = {.first = k * group, .group = left < group ? left : group};
        dcp_refine_put(r, &batch, i, 1);
        if (k == 0 || batch.group < group) {
            dcp_refine_price(r, &batch);
            whole_s = batch.time_s;
        }
        batch.time_s = whole_s;
        if (k == 0 || r->ready[k] + whole_s < least) {
            least = r->ready[k] + whole_s;
            best = k;
            *alone = batch;
        }
    }
    dcp_refine_price(r, alone);
    return best;
}

/* All sequences, longest first, to blocks of `group` ranks and the ranks left over; in
 * one micro-batch with what is there, where it fits for less. Returns whether all fit.
 */
static int
start_from_blocks(dcp_refine_t *r, int32_t group)
{
    double *load = r->ready;
    int64_t count = 0;
    for (int32_t k = 0; k < r->problem->request->world; k++) {
        load[k] = 0;
    }
    for (int64_t k = 0; k < r->sequences; k++) {
        int64_t i = r->problem->order[k], last = count - 1;
        dcp_batch_t alone, joined;
        int32_t block = choose_block(r, i, group, &alone);
        while (last >= 0 && r->now.batches[last].first != alone.first) {
            last--;
        }
        if (last >= 0) {
            joined = r->now.batches[last];
            dcp_refine_put(r, &joined, i, 1);
            dcp_refine_price(r, &joined);
            if (joined.time_s <= r->now.batches[last].time_s + alone.time_s) {
                load[block] += joined.time_s - r->now.batches[last].time_s;
                r->now.batches[last] = joined;
                r->now.batch_of[i] = (int32_t)last;
                continue;
            }
        }
        if (isinf(alone.time_s) || count == r->room) {
            return 0;
        }
        load[block] += alone.time_s;
        r->now.batch_of[i] = (int32_t)count;
        r->now.batches[count++] = alone;
    }
    r->now.count = count;
    dcp_refine_score(r, &r->now);
    return 1;
}

static dcp_status_t
write_best(dcp_refine_t *r, plan_draft_t *draft, int64_t *scratch)
{
    plan_draft_clear(draft);
    for (int64_t b = 0; b < r->best.count; b++) {
        const dcp_batch_t *batch = &r->best.batches[b];
        plan_setting_t setting = {
            .group = batch->group,
            .recompute = {batch->recompute[0], batch->recompute[1]},
        };
        int64_t count = 0;
        for (int64_t i = 0; i < r->sequences; i++) {
            if (r->best.batch_of[i] == b) {
                scratch[count++] = i;
            }
        }
        if (count > 0) {
            DCP_TRY(plan_draft_add(draft, batch->first, &setting, scratch, count));
        }
    }
    return DCP_OK;
}

static dcp_status_t
refine_init(dcp_refine_t *r, const plan_problem_t *problem, int64_t room)
{
    int64_t n = problem->request->length_count, world = problem->request->world;
    *r = (dcp_refine_t){
        .problem = problem, .room = room, .sequences = n, .steps_left = budget_steps};
    int64_t batch_bytes = room * (int64_t)sizeof(dcp_batch_t);
    DCP_TRY(dcp_alloc(3 * batch_bytes + (world + room + 3 * n) * 8,
                      "the planner's refinement", &r->memory));
    char *at = r->memory;
    dcp_state_t *const states[] = {&r->now, &r->trial, &r->best};
    for (int k = 0; k < 3; k++, at += batch_bytes) {
        states[k]->batches = (dcp_batch_t *)(void *)at;
    }
    for (int k = 0; k < 3; k++, at += n * 8) {
        states[k]->batch_of = (int32_t *)(void *)at;
    }
    r->ready = (double *)(void *)at;
    r->round = r->ready + world;
    return DCP_OK;
}

dcp_status_t
dcp_search_refine(const plan_problem_t *problem, const dcp_plan_t *best,
                  int64_t *scratch, plan_draft_t *draft)
{
    int64_t n = problem->request->length_count, batches = best->micro_batch_count;
    plan_draft_clear(draft);
    if (n > MOST_SEQUENCES || batches > MOST_BATCHES) {
        return DCP_OK;
    }
    dcp_refine_t r;
    DCP_TRY(refine_init(&r, problem, (batches > n / 2 ? batches : n / 2) + 16));
    start_from_plan(&r, best);
    dcp_refine_copy(&r, &r.best, &r.now);
    r.steps_left = budget_steps / 2;
    dcp_refine_climb(&r);
    int64_t rest = budget_steps / 2;
    for (int32_t p = problem->max_group; p >= 1 && rest > 0; p -= p > 8 ? p / 4 : 1) {
        r.steps_left = rest / 3;
        int64_t before = r.steps_left;
        if (start_from_blocks(&r, p)) {
            if (r.now.makespan_s < r.best.makespan_s) {
                dcp_refine_copy(&r, &r.best, &r.now);
            }
            dcp_refine_climb(&r);
        }
        rest -= before - r.steps_left;
    }
    dcp_status_t status = DCP_OK;
    if (r.best.makespan_s < best->makespan_s * (1 - 1e-12)) {
        status = write_best(&r, draft, scratch);
    }
    dcp_free(r.memory);
    return status;
}
