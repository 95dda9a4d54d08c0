/* Strategy `packed`: balanced packing on one rank a micro-batch.
 *
 * 1. Sequences go to ranks by the largest differencing method on their time
 *    (b len + c len^2), which balances linear and attention work together.
 * 2. A rank's time also has a fixed part per micro-batch, and how many it needs follows
 *    from the token cap. So single moves and swaps between the rank that ends last and
 *    the ones that end first follow, as long as they help.
 * 3. Each rank's sequences are split into the fewest micro-batches that first fit
 *    finds, evened out, longest first.
 * Ranks may get different numbers of micro-batches, and none where sequences are few.
 * Cost: O(n log n + n W / 2) for step 1; step 2 is cut off after a number of tries that
 * depends on the world alone.
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { PARTNERS = 4, TRIES_BASE = 64, TRIES_PER_RANK = 2, SLACK = 8 };

/* Close enough to the bound: what is left is far below what a cost model knows. */
static const double good_gap = 2e-4;

typedef struct rank_load {
    int64_t *items;          /* sequences, longest first */
    int64_t count, capacity; /* capacity: SLACK more than at first */
    double time_s;           /* with latency_s for each micro-batch */
} rank_load_t;

/* n sequences, W ranks; everything lies in one block of memory. */
typedef struct packing {
    const plan_problem_t *problem;
    int64_t cap_tokens; /* of a micro-batch on one rank */
    rank_load_t *ranks; /* [W] */
    int64_t *items;     /* [n + SLACK * W] the ranks' runs */
    int64_t *order;     /* [n] sequences, longest first */
    int64_t *scratch;   /* [n + 1] of sorts; the first trial run */
    int64_t *trial;     /* [n + 1] the second trial run */
    int64_t *bins;      /* [n] micro-batch of each item of a rank */
    double *keys;       /* [n] lengths; then work of each micro-batch of a rank */
    int32_t *part;      /* [n] rank by the differencing method */
    plan_packer_t *packer;
} packing_t;

static dcp_status_t
packing_create(const plan_problem_t *problem, packing_t *p)
{
    int64_t n = problem->request->length_count, world = problem->request->world;
    int64_t words = (n + SLACK * world) + n + 2 * (n + 1) + 2 * n;
    int64_t bytes =
        world * (int64_t)sizeof(rank_load_t) + words * 8 + n * (int64_t)sizeof(int32_t);
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(bytes, "the planner's ranks", &memory));
    p->problem = problem;
    p->ranks = memory;
    p->items = (int64_t *)(void *)(p->ranks + world);
    p->order = p->items + n + SLACK * world;
    p->scratch = p->order + n;
    p->trial = p->scratch + n + 1;
    p->bins = p->trial + n + 1;
    p->keys = (double *)(p->bins + n);
    p->part = (int32_t *)(void *)(p->keys + n);
    dcp_status_t status = plan_packer_create(n, &p->packer);
    if (status != DCP_OK) {
        dcp_free(memory);
    }
    return status;
}

static void
packing_destroy(packing_t *p)
{
    plan_packer_destroy(p->packer);
    dcp_free(p->ranks);
}

/* Time of a rank that computes `items`. */
static double
load_time(const packing_t *p, const int64_t *items, int64_t count)
{
    const dcp_plan_request_t *request = p->problem->request;
    double work = 0;
    for (int64_t i = 0; i < count; i++) {
        work += p->problem->work_s[items[i]];
    }
    int64_t batches =
        plan_packer_count(p->packer, request->lengths, items, count, p->cap_tokens);
    return work + request->cost.latency_s * (double)batches;
}

/* Step 1: fills the ranks' runs. */
static dcp_status_t
deal(packing_t *p)
{
    const dcp_plan_request_t *request = p->problem->request;
    int64_t n = request->length_count;
    DCP_TRY(plan_karmarkar_karp(p->problem->work_s, n, request->world, p->part));
    for (int64_t i = 0; i < n; i++) {
        p->order[i] = i;
        p->keys[i] = (double)request->lengths[i];
        p->ranks[p->part[i]].count++;
    }
    plan_sort_descending(p->order, n, p->keys, p->scratch);
    int64_t *run = p->items;
    for (int32_t r = 0; r < request->world; r++) {
        p->ranks[r].items = run;
        p->ranks[r].capacity = p->ranks[r].count + SLACK;
        run += p->ranks[r].capacity;
        p->ranks[r].count = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        rank_load_t *rank = &p->ranks[p->part[p->order[i]]];
        rank->items[rank->count++] = p->order[i];
    }
    for (int32_t r = 0; r < request->world; r++) {
        p->ranks[r].time_s = load_time(p, p->ranks[r].items, p->ranks[r].count);
    }
    return DCP_OK;
}

/* Which item of `from` (position) should go to `to` in exchange for which (or -1), so
 * that the difference of work moved is nearest to half of what the ranks differ by.
 * Returns 0 where no exchange makes the difference smaller. Both runs descend in work,
 * so one walk over both is enough. */
static int
best_exchange(const packing_t *p, const rank_load_t *from, const rank_load_t *to,
              int64_t *give_p, int64_t *take_p)
{
    const double *work = p->problem->work_s;
    double difference = from->time_s - to->time_s, wanted = difference / 2;
    double least = difference; /* |moved - wanted| must beat that of moving nothing */
    int found = 0;
    int64_t j = 0; /* to->count stands for "nothing in exchange" */
    for (int64_t i = 0; i < from->count; i++) {
        double w = work[from->items[i]];
        while (j < to->count && w - work[to->items[j]] < wanted) {
            j++;
        }
        /* candidates: the first item that moves enough, and the one before it */
        for (int64_t k = j > 0 ? j - 1 : 0; k <= j; k++) {
            double moved = w - (k < to->count ? work[to->items[k]] : 0);
            double miss = fabs(moved - wanted);
            int fits = k < to->count || to->count < to->capacity;
            if (fits && moved > 0 && moved < difference && miss < least) {
                least = miss;
                *give_p = i;
                *take_p = k < to->count ? k : -1;
                found = 1;
            }
        }
    }
    return found;
}

/* A copy of `run` without position `drop` (-1: none) and with `item` (-1: none) put in
 * its place. Returns the count. */
static int64_t
edit_run(const packing_t *p, const rank_load_t *run, int64_t drop, int64_t item,
         int64_t *out)
{
    const int64_t *lengths = p->problem->request->lengths;
    int64_t count = 0;
    for (int64_t i = 0; i < run->count; i++) {
        if (item >= 0 && lengths[item] > lengths[run->items[i]]) {
            out[count++] = item;
            item = -1;
        }
        if (i != drop) {
            out[count++] = run->items[i];
        }
    }
    if (item >= 0) {
        out[count++] = item;
    }
    return count;
}

static void
replace_run(rank_load_t *rank, const int64_t *items, int64_t count, double time_s)
{
    memcpy(rank->items, items, (size_t)count * sizeof items[0]);
    rank->count = count;
    rank->time_s = time_s;
}

/* Tries the best exchange of two ranks. Returns whether it made the slower one faster
 * and was kept. */
static int
try_exchange(packing_t *p, rank_load_t *slow, rank_load_t *fast)
{
    int64_t give, take;
    if (!best_exchange(p, slow, fast, &give, &take)) {
        return 0;
    }
    int64_t given = slow->items[give], taken = take >= 0 ? fast->items[take] : -1;
    int64_t slow_count = edit_run(p, slow, give, taken, p->scratch);
    int64_t fast_count = edit_run(p, fast, take, given, p->trial);
    double slow_s = load_time(p, p->scratch, slow_count);
    double fast_s = load_time(p, p->trial, fast_count);
    double limit = slow->time_s * (1 - 1e-9);
    if (slow_s >= limit || fast_s >= limit) {
        return 0;
    }
    replace_run(slow, p->scratch, slow_count, slow_s);
    replace_run(fast, p->trial, fast_count, fast_s);
    return 1;
}

/* Step 2. */
static void
improve(packing_t *p)
{
    int32_t world = p->problem->request->world;
    int64_t tries = TRIES_BASE + (int64_t)TRIES_PER_RANK * world;
    int improved = world > 1;
    while (improved && tries-- > 0) {
        int32_t slow = 0, fast[PARTNERS], fast_count = 0;
        for (int32_t r = 0; r < world; r++) {
            slow = p->ranks[r].time_s > p->ranks[slow].time_s ? r : slow;
            int32_t at = fast_count < PARTNERS ? fast_count++ : PARTNERS;
            for (; at > 0 && p->ranks[r].time_s < p->ranks[fast[at - 1]].time_s; at--) {
                if (at < PARTNERS) {
                    fast[at] = fast[at - 1];
                }
            }
            if (at < PARTNERS) {
                fast[at] = r;
            }
        }
        if (p->ranks[slow].time_s <= p->problem->bound_s * (1 + good_gap)) {
            return;
        }
        improved = 0;
        for (int32_t i = 0; i < fast_count && !improved; i++) {
            improved =
                fast[i] != slow && try_exchange(p, &p->ranks[slow], &p->ranks[fast[i]]);
        }
    }
}

/* Step 3: writes one rank's micro-batches, most work first. */
static dcp_status_t
emit(packing_t *p, int32_t rank, plan_draft_t *draft)
{
    const dcp_plan_request_t *request = p->problem->request;
    const rank_load_t *load = &p->ranks[rank];
    int64_t bin_count = plan_packer_assign(p->packer, request->lengths, load->items,
                                           load->count, p->cap_tokens, p->bins);
    for (int64_t b = 0; b < bin_count; b++) {
        p->keys[b] = 0;
        p->order[b] = b;
    }
    for (int64_t i = 0; i < load->count; i++) {
        p->keys[p->bins[i]] += p->problem->work_s[load->items[i]];
    }
    plan_sort_descending(p->order, bin_count, p->keys, p->scratch);
    /* a counting sort of the sequences by micro-batch */
    int64_t *starts = p->scratch, at = 0;
    for (int64_t b = 0; b < bin_count; b++) {
        starts[b] = 0;
    }
    for (int64_t i = 0; i < load->count; i++) {
        starts[p->bins[i]]++;
    }
    for (int64_t b = 0; b < bin_count; b++) {
        int64_t size = starts[p->order[b]];
        starts[p->order[b]] = at;
        at += size;
    }
    for (int64_t i = 0; i < load->count; i++) {
        p->trial[starts[p->bins[i]]++] = load->items[i];
    }
    at = 0;
    for (int64_t b = 0; b < bin_count; b++) {
        int64_t end = starts[p->order[b]];
        plan_sort_ascending(p->trial + at, end - at);
        DCP_TRY(plan_draft_add(draft, rank, &(plan_setting_t){.group = 1},
                               p->trial + at, end - at));
        at = end;
    }
    return DCP_OK;
}

dcp_status_t
plan_packed_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    packing_t p;
    int64_t cap_tokens = plan_cap_tokens(problem, &(plan_setting_t){.group = 1});
    if (problem->longest > cap_tokens) {
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "a sequence of %lld tokens fits on no single rank",
                        (long long)problem->longest);
    }
    DCP_TRY(packing_create(problem, &p));
    p.cap_tokens = cap_tokens;
    dcp_status_t status = deal(&p);
    if (status == DCP_OK) {
        improve(&p);
    }
    for (int32_t r = 0; status == DCP_OK && r < problem->request->world; r++) {
        status = emit(&p, r, draft);
    }
    packing_destroy(&p);
    return status;
}
