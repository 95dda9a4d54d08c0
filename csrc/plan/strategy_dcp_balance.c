/* Evens out the ranks by moving packed single sequences.
 *
 * The rank that ends last gives a sequence to one that ends early, or swaps two, so
 * that the difference of their ends is as near to halved as can be. Both runs are in
 * descending length, so one walk over both finds the best exchange. An exchange is kept
 * if both ranks then end before the slower one did, fixed part a of every micro-batch
 * that the token cap makes necessary included. Tries are limited by the world alone.
 */
#include "strategy_dcp.h"

#include <math.h>
#include <string.h>

/* Others are looked at where the ranks that end first have nothing to exchange. */
enum { PARTNERS = 4, TRIES_BASE = 64, MOST_SWEEPS = 256 };

void
dcp_search_list(dcp_search_t *search)
{
    dcp_search_t *s = search;
    for (int32_t r = 0; r < s->world; r++) {
        s->run_counts[r] = 0;
    }
    for (int64_t i = 0; i < s->count; i++) {
        if (s->places[i].group == 1 && dcp_search_is_packed(s, i)) {
            s->run_counts[s->places[i].first]++;
        }
    }
    s->run_starts[0] = 0;
    for (int32_t r = 0; r < s->world; r++) {
        s->run_starts[r + 1] = s->run_starts[r] + s->run_counts[r] + DCP_SEARCH_SLACK;
        s->run_counts[r] = 0;
    }
    for (int64_t k = 0; k < s->count; k++) {
        int64_t i = s->problem->order[k];
        int32_t r = s->places[i].first;
        if (s->places[i].group == 1 && dcp_search_is_packed(s, i)) {
            s->items[s->run_starts[r] + s->run_counts[r]++] = i;
        }
    }
}

/* Micro-batches of a run, longest first. First fit opens one more than the tokens need
 * only for a sequence that no open one has room for, so only if those before it, one
 * in each at least, fill all of them up to less than its length; else packing need not
 * be tried. */
static double
run_batches(dcp_search_t *s, const int64_t *items, int64_t count, int64_t tokens)
{
    const int64_t *lengths = s->problem->request->lengths;
    int64_t cap = s->sizes[0].cap_none, before = 0;
    double batches = dcp_search_batches(s, tokens);
    for (int64_t i = 0; i < count && batches > 1; i++) {
        if ((double)i >= batches
            && (double)before > batches * (double)(cap - lengths[items[i]])) {
            return (double)plan_packer_count(s->packer, lengths, items, count, cap);
        }
        before += lengths[items[i]];
    }
    return batches;
}

/* Seconds of a run of packed singles. */
static double
run_time(dcp_search_t *s, const int64_t *items, int64_t count)
{
    const int64_t *lengths = s->problem->request->lengths;
    double work = 0;
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; i++) {
        work += s->alone_s[items[i]];
        tokens += lengths[items[i]];
    }
    return work + s->start_s * run_batches(s, items, count, tokens);
}

/* What should go from rank `slow` to `fast` (position) in exchange for what (or -1).
 * Returns 0 where no exchange makes the difference smaller. */
static int
best_exchange(const dcp_search_t *s, int32_t slow, int32_t fast, int64_t *give_p,
              int64_t *take_p)
{
    const int64_t *from = s->items + s->run_starts[slow];
    const int64_t *to = s->items + s->run_starts[fast];
    int64_t from_count = s->run_counts[slow], to_count = s->run_counts[fast];
    int64_t room = s->run_starts[fast + 1] - s->run_starts[fast];
    double difference = s->load_s[slow] - s->load_s[fast], wanted = difference / 2;
    double least = difference;
    int found = 0;
    int64_t j = 0; /* to_count stands for "nothing in exchange" */
    for (int64_t i = 0; i < from_count; i++) {
        double work = s->alone_s[from[i]];
        while (j < to_count && work - s->alone_s[to[j]] < wanted) {
            j++;
        }
        for (int64_t k = j > 0 ? j - 1 : 0; k <= j; k++) {
            double moved = work - (k < to_count ? s->alone_s[to[k]] : 0);
            double miss = fabs(moved - wanted);
            if ((k < to_count || to_count < room) && moved > 0 && moved < difference
                && miss < least) {
                least = miss;
                *give_p = i;
                *take_p = k < to_count ? k : -1;
                found = 1;
            }
        }
    }
    return found;
}

/* A copy of a rank's run without position `drop` (-1: none) and with `item` (-1: none)
 * in its place. Returns the count. */
static int64_t
edit_run(const dcp_search_t *s, int32_t rank, int64_t drop, int64_t item, int64_t *out)
{
    const int64_t *lengths = s->problem->request->lengths;
    const int64_t *run = s->items + s->run_starts[rank];
    int64_t count = 0;
    for (int64_t i = 0; i < s->run_counts[rank]; i++) {
        if (item >= 0 && lengths[item] > lengths[run[i]]) {
            out[count++] = item;
            item = -1;
        }
        if (i != drop) {
            out[count++] = run[i];
        }
    }
    if (item >= 0) {
        out[count++] = item;
    }
    return count;
}

static void
keep_run(dcp_search_t *s, int32_t rank, const int64_t *items, int64_t count,
         double end_s)
{
    memcpy(s->items + s->run_starts[rank], items, (size_t)count * sizeof items[0]);
    s->run_counts[rank] = count;
    s->load_s[rank] = end_s;
}

static int
try_exchange(dcp_search_t *s, int32_t slow, int32_t fast)
{
    int64_t give, take;
    if (!best_exchange(s, slow, fast, &give, &take)) {
        return 0;
    }
    int64_t *slow_trial = s->trial, *fast_trial = s->trial + s->count + 1;
    int64_t given = s->items[s->run_starts[slow] + give];
    int64_t taken = take >= 0 ? s->items[s->run_starts[fast] + take] : -1;
    int64_t slow_count = edit_run(s, slow, give, taken, slow_trial);
    int64_t fast_count = edit_run(s, fast, take, given, fast_trial);
    double slow_s = s->rest_s[slow] + run_time(s, slow_trial, slow_count);
    double fast_s = s->rest_s[fast] + run_time(s, fast_trial, fast_count);
    double limit = s->load_s[slow] * (1 - 1e-9);
    if (slow_s >= limit || fast_s >= limit) {
        return 0;
    }
    keep_run(s, slow, slow_trial, slow_count, slow_s);
    keep_run(s, fast, fast_trial, fast_count, fast_s);
    s->places[given].first = fast;
    if (taken >= 0) {
        s->places[taken].first = slow;
    }
    return 1;
}

/* The rank that ends last, and the PARTNERS that end first, in order. */
static int32_t
find_ends(const dcp_search_t *s, int32_t *fast, int32_t *fast_count_p)
{
    int32_t slow = 0, count = 0;
    for (int32_t r = 0; r < s->world; r++) {
        slow = s->load_s[r] > s->load_s[slow] ? r : slow;
        if (count == PARTNERS && s->load_s[r] >= s->load_s[fast[count - 1]]) {
            continue;
        }
        int32_t at = count < PARTNERS ? count++ : PARTNERS - 1;
        for (; at > 0 && s->load_s[r] < s->load_s[fast[at - 1]]; at--) {
            fast[at] = fast[at - 1];
        }
        fast[at] = r;
    }
    *fast_count_p = count;
    return slow;
}

double
dcp_search_balance(dcp_search_t *search, double enough_s)
{
    dcp_search_t *s = search;
    dcp_search_list(s);
    for (int32_t r = 0; r < s->world; r++) { /* with the true number of batches */
        int64_t count = s->run_counts[r];
        double work = s->start_s * dcp_search_batches(s, s->ranks[r].tokens);
        for (int64_t i = 0; i < count; i++) {
            work += s->alone_s[s->items[s->run_starts[r] + i]];
        }
        s->rest_s[r] = s->load_s[r] - work;
        s->load_s[r] = s->rest_s[r] + run_time(s, s->items + s->run_starts[r], count);
    }
    int64_t tries = TRIES_BASE + s->world, sweeps_left = MOST_SWEEPS;
    int improved = 1;
    for (;;) {
        int32_t fast[PARTNERS], fast_count;
        int32_t slow = find_ends(s, fast, &fast_count);
        if (s->load_s[slow] <= enough_s || !improved || tries-- == 0) {
            return s->load_s[slow];
        }
        improved = 0;
        for (int32_t i = 0; i < fast_count && !improved; i++) {
            improved = fast[i] != slow && try_exchange(s, slow, fast[i]);
        }
        for (int32_t k = 1; k < s->world && sweeps_left > 0 && !improved; k++) {
            int32_t other = (slow + k) % s->world;
            improved = try_exchange(s, slow, other);
            sweeps_left--;
        }
    }
}
