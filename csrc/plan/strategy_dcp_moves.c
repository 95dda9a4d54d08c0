/* Neighbours of a list of micro-batches, and the climb from one to the next.
 *
 * A micro-batch on another block or at another place in the list; a sequence in another
 * micro-batch, or alone on any block; two sequences swapped; two micro-batches joined.
 * All are priced with the cheapest recompute and scheduled exactly as the plan will be;
 * only micro-batches on ranks that end last are touched unless there are few. The first
 * better neighbour is taken. "Better" also looks at the ranks' mean end, a little, to
 * get over plateaus; then once more at the makespan alone. Every trial counts its
 * elementary steps.
 */
#include "strategy_dcp_refine.h"

#include <math.h>
#include <string.h>

enum { FEW_BATCHES = 10 };

static const double mean_weight = 0.01;

void
dcp_refine_copy(const dcp_refine_t *r, dcp_state_t *to, const dcp_state_t *from)
{
    memcpy(to->batches, from->batches, (size_t)from->count * sizeof to->batches[0]);
    memcpy(to->batch_of, from->batch_of, (size_t)r->sequences * sizeof to->batch_of[0]);
    to->count = from->count;
    to->makespan_s = from->makespan_s;
    to->score = from->score;
}

void
dcp_refine_price(dcp_refine_t *r, dcp_batch_t *batch)
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

void
dcp_refine_put(const dcp_refine_t *r, dcp_batch_t *batch, int64_t i, int sign)
{
    double length = (double)r->problem->request->lengths[i];
    batch->tokens += sign * r->problem->request->lengths[i];
    batch->squares += sign * length * length;
    batch->count += sign;
}

/* End of the list, as plan_schedule will find it. */
void
dcp_refine_score(dcp_refine_t *r, dcp_state_t *state)
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
    state->score = last + r->weight * sum / world;
}

/* Takes the trial if it is better; else undoes it. */
static int
decide(dcp_refine_t *r)
{
    dcp_refine_score(r, &r->trial);
    if (!(r->trial.score < r->now.score * (1 - 1e-9))) {
        return 0;
    }
    dcp_refine_copy(r, &r->now, &r->trial);
    if (r->now.makespan_s < r->best.makespan_s) {
        dcp_refine_copy(r, &r->best, &r->now);
    }
    return 1;
}

static void
begin(dcp_refine_t *r)
{
    dcp_refine_copy(r, &r->trial, &r->now);
    r->steps_left -= r->now.count + r->sequences / 8;
}

/* Batch b of the trial to the front or the back of the list; batch_of follows. */
static void
shift(dcp_refine_t *r, int64_t b, int to_front)
{
    dcp_state_t *t = &r->trial;
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
next_block(const dcp_refine_t *r, dcp_place_t *block)
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
try_reblock(dcp_refine_t *r, int64_t b)
{
    dcp_place_t block = {0, 0};
    while (r->steps_left > 0 && next_block(r, &block)) {
        for (int where = 0; where < 3; where++) {
            begin(r);
            dcp_batch_t *batch = &r->trial.batches[b];
            batch->first = block.first;
            batch->group = block.group;
            dcp_refine_price(r, batch);
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
try_join(dcp_refine_t *r, int64_t b, int64_t other)
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
    dcp_refine_price(r, to);
    return !isinf(to->time_s) && decide(r);
}

/* Moves sequence i from its batch to `other`, and j (or -1) back. */
static int
try_exchange(dcp_refine_t *r, int64_t i, int64_t other, int64_t j)
{
    begin(r);
    int32_t b = r->now.batch_of[i];
    dcp_batch_t *from = &r->trial.batches[b], *to = &r->trial.batches[other];
    dcp_refine_put(r, from, i, -1);
    dcp_refine_put(r, to, i, 1);
    r->trial.batch_of[i] = (int32_t)other;
    if (j >= 0) {
        dcp_refine_put(r, to, j, -1);
        dcp_refine_put(r, from, j, 1);
        r->trial.batch_of[j] = b;
    }
    dcp_refine_price(r, to);
    if (from->count > 0) {
        dcp_refine_price(r, from);
    }
    return !isinf(to->time_s) && !(from->count > 0 && isinf(from->time_s)) && decide(r);
}

/* Sequence i alone on any block, last or first in the list. */
static int
try_alone(dcp_refine_t *r, int64_t i)
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
            dcp_state_t *t = &r->trial;
            t->batches[count] =
                (dcp_batch_t){.first = block.first, .group = block.group};
            dcp_refine_put(r, &t->batches[count], i, 1);
            dcp_refine_put(r, &t->batches[b], i, -1);
            t->count = count + 1;
            t->batch_of[i] = (int32_t)count;
            dcp_refine_price(r, &t->batches[count]);
            dcp_refine_price(r, &t->batches[b]);
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
tidy(dcp_refine_t *r)
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
is_critical(dcp_refine_t *r, int64_t b)
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
improve_batch(dcp_refine_t *r, int64_t b)
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
climb_with(dcp_refine_t *r, double weight)
{
    int improved = 1;
    r->weight = weight;
    dcp_refine_score(r, &r->now);
    while (improved && r->steps_left > 0) {
        tidy(r);
        improved = 0;
        for (int64_t b = 0; b < r->now.count && !improved && r->steps_left > 0; b++) {
            dcp_refine_score(r, &r->now); /* leaves the ends of all ranks in ready */
            improved = is_critical(r, b) && improve_batch(r, b);
        }
    }
}

void
dcp_refine_climb(dcp_refine_t *r)
{
    climb_with(r, mean_weight);
    climb_with(r, 0);
}
