/* Local search on whole micro-batches, for steps of few sequences, where packing by
 * targets leaves ranks idle.
 *
 * State: an ordered list of micro-batches (block of ranks, sequences). Neighbours: a
 * micro-batch on another block or at another place in the list; a sequence in another
 * micro-batch, or alone on any block; two sequences swapped; two micro-batches joined.
 * All are priced with the cheapest recompute and scheduled exactly as the plan will be;
 * only micro-batches on ranks that end last are touched unless there are few. The first
 * better neighbour is taken, until none is or the budget of elementary steps is spent.
 * "Better" also looks at the ranks' mean end, a little, to get over plateaus. Starts:
 * the best plan so far, and for some group sizes all sequences dealt to equal blocks.
 */
#include "strategy_dcp.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { FEW_BATCHES = 10, MOST_BATCHES = 160, MOST_SEQUENCES = 320 };

static const int64_t budget_steps = 4000000;
static const double mean_weight = 0.01;

typedef struct state {
    int64_t count;        /* batches; some may hold nothing */
    dcp_batch_t *batches; /* [room] in the order of the list */
    int32_t *batch_of;    /* [sequences] */
    double makespan_s, score;
} state_t;

typedef struct refine {
    const plan_problem_t *problem;
    int64_t room, sequences;
    int64_t steps_left;
    state_t now, trial, best;
    double *ready; /* [world] */
    double *round; /* [room] longest of each round */
    void *memory;
} refine_t;

static void
copy_state(const refine_t *r, state_t *to, const state_t *from)
{
    memcpy(to->batches, from->batches, (size_t)from->count * sizeof to->batches[0]);
    memcpy(to->batch_of, from->batch_of, (size_t)r->sequences * sizeof to->batch_of[0]);
    to->count = from->count;
    to->makespan_s = from->makespan_s;
    to->score = from->score;
}

static void
price_batch(refine_t *r, dcp_batch_t *batch)
{
    plan_price_t price;
    const dcp_cost_t *cost = &r->problem->request->cost;
    r->steps_left -= 20;
    plan_price_init(cost, batch->group, dcp_cost_tier(cost, batch->first, batch->group),
                    &price);
    batch->time_s = price.start_s
                    + plan_least_recompute(r->problem, &price, batch->tokens,
                                           batch->squares, batch->recompute);
}

static void
put_sequence(const refine_t *r, dcp_batch_t *batch, int64_t i, int sign)
{
    double length = (double)r->problem->request->lengths[i];
    batch->tokens += sign * r->problem->request->lengths[i];
    batch->squares += sign * length * length;
    batch->count += sign;
}

/* End of the list, as plan_schedule will find it. */
static void
score_state(refine_t *r, state_t *state)
{
    int rounds = r->problem->request->rounds != 0;
    int32_t world = r->problem->request->world;
    double last = 0, sum = 0;
    r->steps_left -= world + 4 * state->count;
    for (int32_t k = 0; k < world; k++) {
        r->ready[k] = 0;
    }
    for (int64_t b = 0; b < state->count; b++) {
        const dcp_batch_t *batch = &state->batches[b];
        double *ready = r->ready + batch->first, start = 0;
        if (batch->count == 0) {
            continue;
        }
        for (int32_t k = 0; k < batch->group; k++) {
            start = ready[k] > start ? ready[k] : start;
        }
        double end = rounds ? start + 1 : start + batch->time_s;
        for (int32_t k = 0; k < batch->group; k++) {
            ready[k] = end;
        }
        r->steps_left -= batch->group;
        sum += batch->time_s * batch->group;
        if (rounds) {
            double *longest = &r->round[(int64_t)start];
            double known = end > last ? 0 : *longest; /* the first of a new round */
            *longest = batch->time_s > known ? batch->time_s : known;
        }
        last = end > last ? end : last;
    }
    if (rounds) {
        int64_t used = (int64_t)last;
        last = 0;
        for (int64_t k = 0; k < used; k++) {
            last += r->round[k];
        }
    }
    state->makespan_s = last;
    state->score = last + mean_weight * sum / world;
}

/* Takes the trial if it is better; else undoes it. */
static int
decide(refine_t *r)
{
    score_state(r, &r->trial);
    if (!(r->trial.score < r->now.score * (1 - 1e-9))) {
        return 0;
    }
    copy_state(r, &r->now, &r->trial);
    if (r->now.makespan_s < r->best.makespan_s) {
        copy_state(r, &r->best, &r->now);
    }
    return 1;
}

static void
begin(refine_t *r)
{
    copy_state(r, &r->trial, &r->now);
    r->steps_left -= r->now.count + r->sequences / 8;
}

/* Batch b of the trial to the front or the back of the list; batch_of follows. */
static void
shift(refine_t *r, int64_t b, int to_front)
{
    state_t *t = &r->trial;
    dcp_batch_t moved = t->batches[b];
    int64_t to = to_front ? 0 : t->count - 1;
    if (to_front) {
        memmove(t->batches + 1, t->batches, (size_t)b * sizeof moved);
    } else {
        memmove(t->batches + b, t->batches + b + 1, (size_t)(to - b) * sizeof moved);
    }
    t->batches[to] = moved;
    for (int64_t i = 0; i < r->sequences; i++) {
        int32_t of = t->batch_of[i];
        t->batch_of[i] = of == b               ? (int32_t)to
                         : to_front && of < b  ? of + 1
                         : !to_front && of > b ? of - 1
                                               : of;
    }
    r->steps_left -= r->sequences;
}

/* Next block in the order of size, then of first rank; of few ranks all, else those
 * that start at a multiple of half their size. Returns 0 after the last. */
static int
next_block(const refine_t *r, dcp_place_t *block)
{
    int32_t world = r->problem->request->world, most = r->problem->max_group;
    int32_t step = world <= 8 || block->group < 3 ? 1 : block->group / 2;
    if (block->group == 0) {
        *block = (dcp_place_t){0, 1};
        return 1;
    }
    block->first += step;
    if (block->first + block->group <= world) {
        return 1;
    }
    block->group += block->group < 8 ? 1 : block->group / 4;
    block->first = 0;
    return block->group <= most;
}

static int
try_reblock(refine_t *r, int64_t b)
{
    dcp_place_t block = {0, 0};
    while (r->steps_left > 0 && next_block(r, &block)) {
        for (int where = 0; where < 3; where++) {
            begin(r);
            dcp_batch_t *batch = &r->trial.batches[b];
            batch->first = block.first;
            batch->group = block.group;
            price_batch(r, batch);
            if (isinf(batch->time_s)) {
                break;
            }
            if (where > 0) {
                shift(r, b, where == 1);
            }
            if (decide(r)) {
                return 1;
            }
        }
    }
    return 0;
}

static int
try_join(refine_t *r, int64_t b, int64_t other)
{
    begin(r);
    dcp_batch_t *from = &r->trial.batches[b], *to = &r->trial.batches[other];
    to->tokens += from->tokens;
    to->squares += from->squares;
    to->count += from->count;
    *from = (dcp_batch_t){.first = from->first, .group = from->group};
    for (int64_t i = 0; i < r->sequences; i++) {
        int32_t *of = &r->trial.batch_of[i];
        *of = *of == b ? (int32_t)other : *of;
    }
    price_batch(r, to);
    return !isinf(to->time_s) && decide(r);
}

/* Moves sequence i from its batch to `other`, and j (or -1) back. */
static int
try_exchange(refine_t *r, int64_t i, int64_t other, int64_t j)
{
    begin(r);
    int32_t b = r->now.batch_of[i];
    dcp_batch_t *from = &r->trial.batches[b], *to = &r->trial.batches[other];
    put_sequence(r, from, i, -1);
    put_sequence(r, to, i, 1);
    r->trial.batch_of[i] = (int32_t)other;
    if (j >= 0) {
        put_sequence(r, to, j, -1);
        put_sequence(r, from, j, 1);
        r->trial.batch_of[j] = b;
    }
    price_batch(r, to);
    if (from->count > 0) {
        price_batch(r, from);
    }
    return !isinf(to->time_s) && !(from->count > 0 && isinf(from->time_s)) && decide(r);
}

/* Sequence i alone on any block, last or first in the list. */
static int
try_alone(refine_t *r, int64_t i)
{
    int64_t count = r->now.count;
    int32_t b = r->now.batch_of[i];
    if (count == r->room || r->now.batches[b].count < 2) {
        return 0;
    }
    dcp_place_t block = {0, 0};
    while (r->steps_left > 0 && next_block(r, &block)) {
        for (int front = 0; front < 2; front++) {
            begin(r);
            state_t *t = &r->trial;
            t->batches[count] =
                (dcp_batch_t){.first = block.first, .group = block.group};
            put_sequence(r, &t->batches[count], i, 1);
            put_sequence(r, &t->batches[b], i, -1);
            t->count = count + 1;
            t->batch_of[i] = (int32_t)count;
            price_batch(r, &t->batches[count]);
            price_batch(r, &t->batches[b]);
            if (isinf(t->batches[count].time_s) || isinf(t->batches[b].time_s)) {
                break;
            }
            if (front) {
                shift(r, count, 1);
            }
            if (decide(r)) {
                return 1;
            }
        }
    }
    return 0;
}

/* Drops empty batches of `now`. */
static void
tidy(refine_t *r)
{
    int64_t kept = 0;
    for (int64_t b = 0; b < r->now.count; b++) {
        if (r->now.batches[b].count == 0) {
            continue;
        }
        for (int64_t i = 0; i < r->sequences && kept < b; i++) {
            int32_t *of = &r->now.batch_of[i];
            *of = *of == b ? (int32_t)kept : *of;
        }
        r->now.batches[kept++] = r->now.batches[b];
    }
    r->now.count = kept;
}

/* Whether a rank of batch b ends last. */
static int
is_critical(refine_t *r, int64_t b)
{
    const dcp_batch_t *batch = &r->now.batches[b];
    if (r->now.count <= FEW_BATCHES || r->problem->request->rounds != 0) {
        return 1;
    }
    for (int32_t k = 0; k < batch->group; k++) {
        if (r->ready[batch->first + k] >= r->now.makespan_s * (1 - 1e-9)) {
            return 1;
        }
    }
    return 0;
}

/* The first better neighbour that changes batch b. */
static int
improve_batch(refine_t *r, int64_t b)
{
    if (try_reblock(r, b)) {
        return 1;
    }
    for (int64_t other = 0; other < r->now.count && r->steps_left > 0; other++) {
        if (other != b && try_join(r, b, other)) {
            return 1;
        }
    }
    for (int64_t i = 0; i < r->sequences && r->steps_left > 0; i++) {
        if (r->now.batch_of[i] != b) {
            continue;
        }
        for (int64_t other = 0; other < r->now.count && r->steps_left > 0; other++) {
            if (other != b && try_exchange(r, i, other, -1)) {
                return 1;
            }
        }
        if (try_alone(r, i)) {
            return 1;
        }
        for (int64_t j = 0; j < r->sequences && r->steps_left > 0; j++) {
            int32_t other = r->now.batch_of[j];
            if (other != b && try_exchange(r, i, other, j)) {
                return 1;
            }
        }
    }
    return 0;
}

static void
climb(refine_t *r)
{
    int improved = 1;
    while (improved && r->steps_left > 0) {
        tidy(r);
        improved = 0;
        for (int64_t b = 0; b < r->now.count && !improved && r->steps_left > 0; b++) {
            score_state(r, &r->now); /* leaves the ends of all ranks in ready */
            improved = is_critical(r, b) && improve_batch(r, b);
        }
    }
}

/* State `now` from a plan. */
static void
start_from_plan(refine_t *r, const dcp_plan_t *plan)
{
    r->now.count = plan->micro_batch_count;
    for (int64_t b = 0; b < r->now.count; b++) {
        int64_t r0 = plan->rank_offsets[b];
        dcp_batch_t *batch = &r->now.batches[b];
        *batch = (dcp_batch_t){.first = plan->ranks[r0],
                               .group = (int32_t)(plan->rank_offsets[b + 1] - r0)};
        for (int64_t k = plan->sequence_offsets[b]; k < plan->sequence_offsets[b + 1];
             k++) {
            put_sequence(r, batch, plan->sequences[k], 1);
            r->now.batch_of[plan->sequences[k]] = (int32_t)b;
        }
        price_batch(r, batch);
    }
    score_state(r, &r->now);
}

/* All sequences, longest first, to the least loaded of the blocks of `group` ranks; in
 * one micro-batch with what is there, where it fits for less. Returns whether all fit.
 */
static int
start_from_blocks(refine_t *r, int32_t group)
{
    int32_t blocks = r->problem->request->world / group;
    double *load = r->ready;
    int64_t count = 0;
    for (int32_t k = 0; k < blocks; k++) {
        load[k] = 0;
    }
    for (int64_t k = 0; k < r->sequences; k++) {
        int64_t i = r->problem->order[k], last = -1;
        int32_t block = 0;
        for (int32_t c = 1; c < blocks; c++) {
            block = load[c] < load[block] ? c : block;
        }
        dcp_batch_t alone = {.first = block * group, .group = group}, joined;
        put_sequence(r, &alone, i, 1);
        price_batch(r, &alone);
        for (int64_t b = count - 1; b >= 0 && last < 0; b--) {
            last = r->now.batches[b].first == alone.first ? b : -1;
        }
        if (last >= 0) {
            joined = r->now.batches[last];
            put_sequence(r, &joined, i, 1);
            price_batch(r, &joined);
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
    score_state(r, &r->now);
    return 1;
}

static dcp_status_t
write_best(refine_t *r, plan_draft_t *draft, int64_t *scratch)
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
refine_init(refine_t *r, const plan_problem_t *problem, int64_t room)
{
    int64_t n = problem->request->length_count, world = problem->request->world;
    *r = (refine_t){
        .problem = problem, .room = room, .sequences = n, .steps_left = budget_steps};
    int64_t batch_bytes = room * (int64_t)sizeof(dcp_batch_t);
    DCP_TRY(dcp_alloc(3 * batch_bytes + (world + room + 3 * n) * 8,
                      "the planner's refinement", &r->memory));
    char *at = r->memory;
    state_t *const states[] = {&r->now, &r->trial, &r->best};
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
    refine_t r;
    DCP_TRY(refine_init(&r, problem, (batches > n / 2 ? batches : n / 2) + 16));
    start_from_plan(&r, best);
    copy_state(&r, &r.best, &r.now);
    r.steps_left = budget_steps / 2;
    climb(&r);
    int64_t rest = budget_steps / 2;
    for (int32_t p = problem->max_group; p >= 1 && rest > 0; p -= p > 8 ? p / 4 : 1) {
        r.steps_left = rest / 3;
        int64_t before = r.steps_left;
        if (start_from_blocks(&r, p)) {
            if (r.now.makespan_s < r.best.makespan_s) {
                copy_state(&r, &r.best, &r.now);
            }
            climb(&r);
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
