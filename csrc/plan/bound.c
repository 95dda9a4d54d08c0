/* The least makespan T that any plan could have, in rounds or not (rounds only wait
 * more).
 *
 * A micro-batch on p ranks takes p (a(p) + its sequences' work) rank-seconds, and ends
 * within T. So a sequence i alone takes T_i <= T under its group and recompute, and is
 * charged at least
 *     w_i(T) = least p (T_i - a(p)) over all (p, recompute) that fit and T_i <= T,
 * and every rank that works pays a = a(1) <= a(p) at least once: sum w_i <= W (T - a).
 * How often it is paid follows from memory: of x tokens a rank at most, a sequence
 * takes the share len / (p x) of one micro-batch, so with
 *     w'_i(T) = least p (T_i - a(p)) + a len / x,     sum w'_i <= W T.
 * Both sums fall with T, so bisection finds the least T that obeys both.
 *
 * Which p matter: for one recompute, w and w' rise with p (communication grows, x
 * shrinks), so p is tried upwards until nothing need be recomputed and T_i <= the least
 * T in question. Where a sequence must recompute, the least time that fits is charged
 * together with the price of the recompute that holds most: no more than any choice
 * pays. Where recomputing could pay for itself, its time limit is left out. All errors
 * are to the safe side. Nearly all sequences are short and have one choice; equal
 * lengths are looked at once. Cost: O(sequences + choices x 50).
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

#include <math.h>

enum { ROUNDS_MOST = 80 };

typedef struct choice {
    double time_s;          /* of the sequence alone */
    double plain_s, paid_s; /* w, w' of all sequences of this length */
} choice_t;

typedef struct bound {
    const plan_problem_t *problem;
    double room_bytes;      /* for tokens; INFINITY: no cap */
    double plain_s, paid_s; /* sums over sequences with one choice */
    choice_t *choices;      /* of the others, one list after another */
    int64_t *list_ends;     /* [list_count] */
    int64_t choice_count, choice_capacity, list_count;
} bound_t;

/* 1 / x: the share of a micro-batch that one token a rank takes. */
static double
token_share(const bound_t *b, int32_t group, int which)
{
    const dcp_cost_t *cost = &b->problem->request->cost;
    double repeats = cost->layer_count > 1 ? (double)(cost->layer_count - 1) : 0;
    double slope = cost->token_bytes;
    slope -= which == PLAN_FULL        ? repeats * cost->layer_token_bytes
             : which == PLAN_SELECTIVE ? repeats * cost->mlp_token_bytes
                                       : 0;
    slope = fmax(0, slope) + (group > 1 ? group * cost->group_token_bytes : 0);
    double chunk = (double)cost->logit_chunk_tokens;
    double beyond = b->room_bytes - cost->logit_bytes * chunk;
    if (slope * chunk > beyond) {
        slope += cost->logit_bytes;
        beyond = b->room_bytes;
    }
    return slope > 0 && beyond > 0 ? slope / beyond : 0;
}

static double
square(int64_t length)
{
    return (double)length * (double)length;
}

/* w' of one sequence, see above; `work` is that of its least recompute. */
static double
paid(const bound_t *b, const plan_price_t *price, int64_t length, double work,
     int must_recompute)
{
    const dcp_plan_request_t *request = b->problem->request;
    double tokens = (double)length, a = request->cost.latency_s, p = price->group;
    double rows = p * work + a * tokens / (double)b->problem->row_cap;
    if (isinf(b->room_bytes)) {
        return rows;
    }
    double least = INFINITY, share = INFINITY;
    for (int which = PLAN_NONE; which < PLAN_RECOMPUTES; which++) {
        int32_t recompute[DCP_RECOMPUTE_KINDS];
        plan_recompute(&request->cost, which, recompute);
        double part = token_share(b, price->group, which);
        double other = p * plan_price_work(price, tokens, square(length), recompute);
        least = fmin(least, other + a * tokens * part);
        share = fmin(share, part);
    }
    return fmax(rows, must_recompute ? p * work + a * tokens * share : least);
}

static dcp_status_t
add_choice(bound_t *b, choice_t choice)
{
    if (b->choice_count == b->choice_capacity) {
        int64_t capacity = 2 * b->choice_capacity + 64;
        void *grown;
        DCP_TRY(
            dcp_alloc_array(capacity, sizeof(choice_t), "the bound's choices", &grown));
        choice_t *choices = grown;
        for (int64_t i = 0; i < b->choice_count; i++) {
            choices[i] = b->choices[i];
        }
        dcp_free(b->choices);
        b->choices = choices;
        b->choice_capacity = capacity;
    }
    b->choices[b->choice_count++] = choice;
    return DCP_OK;
}

/* The list of `count` sequences of one length; `enough_s`: T is no less. */
static dcp_status_t
list_choices(bound_t *b, int64_t length, double count, double enough_s)
{
    const plan_problem_t *problem = b->problem;
    const dcp_cost_t *cost = &problem->request->cost;
    for (int32_t p = 1; p <= problem->max_group; p++) {
        plan_price_t price;
        int32_t recompute[DCP_RECOMPUTE_KINDS];
        plan_price_init(cost, p, plan_best_tier(cost, p), &price);
        double work =
            plan_least_recompute(problem, &price, length, square(length), recompute);
        if (isinf(work)) {
            continue;
        }
        int must = recompute[0] > 0 || recompute[1] > 0;
        double time = price.start_s + work;
        DCP_TRY(add_choice(b, (choice_t){
                                  .time_s = time,
                                  .plain_s = count * p * work,
                                  .paid_s = count * paid(b, &price, length, work, must),
                              }));
        if (!must && time <= enough_s) {
            break;
        }
    }
    b->list_ends[b->list_count++] = b->choice_count;
    return DCP_OK;
}

/* Whether some plan could end by T as far as the sums know. */
static int
may_end_by(const bound_t *b, double time_s)
{
    double world = b->problem->request->world;
    double plain = b->plain_s, paid_s = b->paid_s;
    int64_t c = 0;
    for (int64_t i = 0; i < b->list_count; i++) {
        double least = INFINITY, least_paid = INFINITY;
        for (; c < b->list_ends[i]; c++) {
            const choice_t *choice = &b->choices[c];
            if (choice->time_s <= time_s) {
                least = fmin(least, choice->plain_s);
                least_paid = fmin(least_paid, choice->paid_s);
            }
        }
        plain += least;
        paid_s += least_paid;
    }
    return plain <= world * (time_s - b->problem->request->cost.latency_s)
           && paid_s <= world * time_s;
}

/* Least time of one sequence under any choice. */
static double
least_time(const plan_problem_t *problem, int64_t length)
{
    const dcp_cost_t *cost = &problem->request->cost;
    double least = INFINITY;
    for (int32_t p = 1; p <= problem->max_group; p++) {
        plan_price_t price;
        int32_t recompute[DCP_RECOMPUTE_KINDS];
        plan_price_init(cost, p, plan_best_tier(cost, p), &price);
        least = fmin(least, price.start_s
                                + plan_least_recompute(problem, &price, length,
                                                       square(length), recompute));
    }
    return least;
}

/* One choice for those that are short, lists for the others. */
static dcp_status_t
gather(bound_t *b, double low_s)
{
    const plan_problem_t *problem = b->problem;
    const dcp_plan_request_t *request = problem->request;
    int64_t cap = plan_cap_tokens(problem, &(plan_setting_t){.group = 1});
    plan_price_t price;
    plan_price_init(&request->cost, 1, DCP_TIER_NODE, &price);
    for (int64_t i = 0, end; i < request->length_count; i = end) {
        int64_t length = request->lengths[problem->order[i]];
        for (end = i + 1; end < request->length_count
                          && request->lengths[problem->order[end]] == length;
             end++) {
        }
        double work = problem->work_s[problem->order[i]], count = (double)(end - i);
        if (length <= cap && price.start_s + work <= low_s) {
            b->plain_s += count * work;
            b->paid_s += count * paid(b, &price, length, work, 0);
        } else {
            DCP_TRY(list_choices(b, length, count, low_s));
        }
    }
    return DCP_OK;
}

static dcp_status_t
solve(bound_t *b, double *bound_p)
{
    const plan_problem_t *problem = b->problem;
    const dcp_plan_request_t *request = problem->request;
    double sum = 0;
    for (int64_t i = 0; i < request->length_count; i++) {
        sum += problem->work_s[i];
    }
    double low = fmax(least_time(problem, problem->longest),
                      request->cost.latency_s + sum / request->world);
    DCP_TRY(gather(b, low));
    if (may_end_by(b, low)) {
        *bound_p = low;
        return DCP_OK;
    }
    double high = low > 0 ? 2 * low : 1e-9;
    while (!may_end_by(b, high)) {
        low = high;
        high *= 2;
    }
    for (int i = 0; i < ROUNDS_MOST && high - low > 1e-13 * high; i++) {
        double middle = low + (high - low) / 2;
        if (may_end_by(b, middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    *bound_p = high;
    return DCP_OK;
}

dcp_status_t
plan_bound(const plan_problem_t *problem, double *bound_p)
{
    const dcp_plan_request_t *request = problem->request;
    *bound_p = 0;
    if (request->length_count == 0) {
        return DCP_OK;
    }
    const dcp_cost_t *cost = &request->cost;
    bound_t b = {.problem = problem, .room_bytes = INFINITY};
    if (request->memory_bytes > 0) {
        b.room_bytes = (double)request->memory_bytes - cost->fixed_bytes
                       - cost->sharded_bytes / request->world - cost->scratch_bytes;
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(request->length_count, sizeof(int64_t), "the bound's lists",
                            &memory));
    b.list_ends = memory;
    dcp_status_t status = solve(&b, bound_p);
    dcp_free(b.choices);
    dcp_free(memory);
    return status;
}
