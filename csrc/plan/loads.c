/* Sharing out a step's sequences among groups that stay as they are.
 *
 * 1. Sequences go to groups by the largest differencing method on their time
 *    (b len + c len^2 of the group's setting), which balances linear and attention work
 *    together; or greedily, longest first.
 * 2. A group's time also has a fixed part per micro-batch, and how many it needs
 * follows from the token cap. So single moves and swaps between the group that ends
 * last and the ones that end first follow, as long as they help.
 * 3. Each group's sequences are split into the fewest micro-batches that first fit
 *    finds, evened out, longest first.
 * Groups may get different numbers of micro-batches, and none where sequences are few.
 * Where some groups span nodes, step 1 takes all for as slow as these, step 2 knows.
 * Cost: O(n log n + n G / 2) for step 1; step 2 is cut off after a number of tries that
 * depends on the number of groups G alone.
 */
#include "loads.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { PARTNERS = 4, TRIES_BASE = 64, TRIES_PER_GROUP = 2, SLACK = 8 };

/* Close enough to a bound: what is left is far below what a cost model knows. */
static const double good_gap = 2e-4;

/* Walks over all groups in all tries together. */
static const int64_t most_looks = 1 << 18;

dcp_status_t
plan_loads_create(const plan_problem_t *problem, plan_loads_t *loads)
{
    int64_t n = problem->request->length_count, world = problem->request->world;
    int64_t words = n + n + (n + SLACK * world) + 2 * (n + 1) + 2 * n;
    int64_t bytes = world * (int64_t)(sizeof(plan_load_t) + sizeof(plan_heap_item_t))
                    + words * 8 + n * (int64_t)sizeof(int32_t);
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(bytes, "the planner's groups", &memory));
    loads->problem = problem;
    loads->loads = memory;
    loads->load_count = 0;
    loads->heap = (plan_heap_item_t *)(void *)(loads->loads + world);
    loads->work_s = (double *)(void *)(loads->heap + world);
    loads->keys = loads->work_s + n;
    loads->items = (int64_t *)(loads->keys + n);
    loads->scratch = loads->items + n + SLACK * world;
    loads->trial = loads->scratch + n + 1;
    loads->bins = loads->trial + n + 1;
    loads->bin_order = loads->bins + n;
    loads->part = (int32_t *)(void *)(loads->bin_order + n);
    dcp_status_t status = plan_packer_create(n, &loads->packer);
    if (status != DCP_OK) {
        dcp_free(memory);
    }
    return status;
}

void
plan_loads_destroy(plan_loads_t *loads)
{
    plan_packer_destroy(loads->packer);
    dcp_free(loads->loads);
}

void
plan_loads_group(plan_loads_t *loads, const plan_setting_t *setting)
{
    const plan_problem_t *problem = loads->problem;
    const dcp_plan_request_t *request = problem->request;
    plan_rate_t rates[DCP_TIERS];
    int known[DCP_TIERS] = {0};
    int64_t cap_tokens = plan_cap_tokens(problem, setting);
    loads->load_count = request->world / setting->group;
    for (int32_t g = 0; g < loads->load_count; g++) {
        int32_t first = g * setting->group;
        int tier = dcp_cost_tier(&request->cost, first, setting->group);
        if (!known[tier]) {
            known[tier] = 1;
            rates[tier] = plan_rate(problem, first, setting);
        }
        loads->loads[g] = (plan_load_t){
            .setting = *setting,
            .first = first,
            .rate = rates[tier],
            .cap_tokens = cap_tokens,
        };
    }
    plan_rate_t rate = plan_rate_slowest(problem, setting);
    for (int64_t i = 0; i < request->length_count; i++) {
        double length = (double)request->lengths[i];
        loads->work_s[i] = rate.token_s * length + rate.square_s * length * length;
    }
}

double
plan_loads_greedy(plan_loads_t *loads)
{
    const dcp_plan_request_t *request = loads->problem->request;
    plan_heap_item_t *heap = loads->heap;
    int64_t *tokens = loads->scratch; /* of each load; fewer matter than sequences */
    int64_t count = loads->load_count < request->length_count ? loads->load_count
                                                              : request->length_count;
    double makespan = 0;
    for (int64_t g = 0; g < count; g++) {
        heap[g] = (plan_heap_item_t){.key = 0, .index = g};
        tokens[g] = 0;
    }
    for (int64_t i = 0; i < request->length_count; i++) {
        int64_t item = loads->problem->order[i], g = heap[0].index;
        const plan_load_t *load = &loads->loads[g];
        int64_t cap = load->cap_tokens;
        int64_t before = tokens[g] / cap + (tokens[g] % cap != 0);
        tokens[g] += request->lengths[item];
        int64_t after = tokens[g] / cap + (tokens[g] % cap != 0);
        heap[0].key +=
            loads->work_s[item] + load->rate.latency_s * (double)(after - before);
        makespan = heap[0].key > makespan ? heap[0].key : makespan;
        loads->part[item] = (int32_t)g;
        plan_heap_sift(heap, count);
    }
    return makespan;
}

/* Time of a group that computes `items`. */
static double
load_time(const plan_loads_t *loads, const plan_load_t *load, const int64_t *items,
          int64_t count)
{
    const int64_t *lengths = loads->problem->request->lengths;
    double tokens = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        double length = (double)lengths[items[i]];
        tokens += length;
        squares += length * length;
    }
    int64_t batches =
        tokens <= (double)load->cap_tokens
            ? count > 0
            : plan_packer_count(loads->packer, lengths, items, count, load->cap_tokens);
    return load->rate.token_s * tokens + load->rate.square_s * squares
           + load->rate.latency_s * (double)batches;
}

void
plan_loads_settle(plan_loads_t *loads)
{
    int64_t n = loads->problem->request->length_count;
    for (int32_t g = 0; g < loads->load_count; g++) {
        loads->loads[g].count = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        loads->loads[loads->part[i]].count++;
    }
    int64_t *run = loads->items;
    for (int32_t g = 0; g < loads->load_count; g++) {
        plan_load_t *load = &loads->loads[g];
        load->items = run;
        load->capacity = load->count + SLACK;
        run += load->capacity;
        load->count = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        plan_load_t *load = &loads->loads[loads->part[loads->problem->order[i]]];
        load->items[load->count++] = loads->problem->order[i];
    }
    loads->makespan_s = 0;
    for (int32_t g = 0; g < loads->load_count; g++) {
        plan_load_t *load = &loads->loads[g];
        load->time_s = load_time(loads, load, load->items, load->count);
        loads->makespan_s =
            load->time_s > loads->makespan_s ? load->time_s : loads->makespan_s;
    }
}

/* Which item of `from` (position) should go to `to` in exchange for which (or -1), so
 * that the difference of work moved is nearest to half of what the groups differ by.
 * Returns 0 where no exchange makes the difference smaller. Both runs descend in work,
 * so one walk over both is enough. */
static int
best_exchange(const plan_loads_t *loads, const plan_load_t *from, const plan_load_t *to,
              int64_t *give_p, int64_t *take_p)
{
    const double *work = loads->work_s;
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

/* A copy of `run` without position `drop` (-1: none) and with `item` put in its place.
 * Returns the count. */
static int64_t
edit_run(const plan_loads_t *loads, const plan_load_t *run, int64_t drop, int64_t item,
         int64_t *out)
{
    const int64_t *lengths = loads->problem->request->lengths;
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
replace_run(plan_load_t *load, const int64_t *items, int64_t count, double time_s)
{
    memcpy(load->items, items, (size_t)count * sizeof items[0]);
    load->count = count;
    load->time_s = time_s;
}

/* Tries the best exchange of two groups. Returns whether it made the slower one faster
 * and was kept. */
static int
try_exchange(plan_loads_t *loads, plan_load_t *slow, plan_load_t *fast)
{
    int64_t give, take;
    if (!best_exchange(loads, slow, fast, &give, &take)) {
        return 0;
    }
    int64_t given = slow->items[give], taken = take >= 0 ? fast->items[take] : -1;
    int64_t slow_count = edit_run(loads, slow, give, taken, loads->scratch);
    int64_t fast_count = edit_run(loads, fast, take, given, loads->trial);
    double slow_s = load_time(loads, slow, loads->scratch, slow_count);
    double fast_s = load_time(loads, fast, loads->trial, fast_count);
    double limit = slow->time_s * (1 - 1e-9);
    if (slow_s >= limit || fast_s >= limit) {
        return 0;
    }
    replace_run(slow, loads->scratch, slow_count, slow_s);
    replace_run(fast, loads->trial, fast_count, fast_s);
    return 1;
}

/* Step 2, as long as it helps and the makespan is above enough_s. */
static void
improve(plan_loads_t *loads, double enough_s)
{
    int32_t count = loads->load_count;
    int64_t tries = TRIES_BASE + (int64_t)TRIES_PER_GROUP * count;
    tries = tries * count > most_looks ? TRIES_BASE + most_looks / count : tries;
    int improved = count > 1;
    while (improved && tries-- > 0) {
        int32_t slow = 0, fast[PARTNERS], fast_count = 0;
        for (int32_t g = 0; g < count; g++) {
            slow = loads->loads[g].time_s > loads->loads[slow].time_s ? g : slow;
            int32_t at = fast_count < PARTNERS ? fast_count++ : PARTNERS;
            for (; at > 0 && loads->loads[g].time_s < loads->loads[fast[at - 1]].time_s;
                 at--) {
                if (at < PARTNERS) {
                    fast[at] = fast[at - 1];
                }
            }
            if (at < PARTNERS) {
                fast[at] = g;
            }
        }
        loads->makespan_s = loads->loads[slow].time_s;
        if (loads->makespan_s <= enough_s) {
            return;
        }
        improved = 0;
        for (int32_t i = 0; i < fast_count && !improved; i++) {
            improved =
                fast[i] != slow
                && try_exchange(loads, &loads->loads[slow], &loads->loads[fast[i]]);
        }
    }
}

dcp_status_t
plan_loads_balance(plan_loads_t *loads, const plan_setting_t *setting, double bound_s)
{
    plan_loads_group(loads, setting);
    DCP_TRY(plan_karmarkar_karp(loads->work_s, loads->problem->request->length_count,
                                loads->load_count, loads->part));
    plan_loads_settle(loads);
    improve(loads, bound_s * (1 + good_gap));
    return DCP_OK;
}

/* A group's micro-batches: bins[i] of its i-th item; bin_order by descending work.
 * Returns their number. */
static int64_t
split(plan_loads_t *loads, const plan_load_t *load)
{
    const int64_t *lengths = loads->problem->request->lengths;
    int64_t bin_count = plan_packer_assign(loads->packer, lengths, load->items,
                                           load->count, load->cap_tokens, loads->bins);
    for (int64_t b = 0; b < bin_count; b++) {
        loads->keys[b] = 0;
        loads->bin_order[b] = b;
    }
    for (int64_t i = 0; i < load->count; i++) {
        loads->keys[loads->bins[i]] += loads->work_s[load->items[i]];
    }
    plan_sort_descending(loads->bin_order, bin_count, loads->keys, loads->scratch);
    return bin_count;
}

static dcp_status_t
emit_load(plan_loads_t *loads, const plan_load_t *load, plan_draft_t *draft)
{
    int64_t bin_count = split(loads, load);
    /* a counting sort of the sequences by micro-batch */
    int64_t *starts = loads->scratch, at = 0;
    for (int64_t b = 0; b < bin_count; b++) {
        starts[b] = 0;
    }
    for (int64_t i = 0; i < load->count; i++) {
        starts[loads->bins[i]]++;
    }
    for (int64_t b = 0; b < bin_count; b++) {
        int64_t size = starts[loads->bin_order[b]];
        starts[loads->bin_order[b]] = at;
        at += size;
    }
    for (int64_t i = 0; i < load->count; i++) {
        loads->trial[starts[loads->bins[i]]++] = load->items[i];
    }
    at = 0;
    for (int64_t b = 0; b < bin_count; b++) {
        int64_t end = starts[loads->bin_order[b]];
        plan_sort_ascending(loads->trial + at, end - at);
        DCP_TRY(plan_draft_add(draft, load->first, &load->setting, loads->trial + at,
                               end - at));
        at = end;
    }
    return DCP_OK;
}

dcp_status_t
plan_loads_emit(plan_loads_t *loads, plan_draft_t *draft)
{
    for (int32_t g = 0; g < loads->load_count; g++) {
        DCP_TRY(emit_load(loads, &loads->loads[g], draft));
    }
    return DCP_OK;
}
