/* Writes the micro-batches of a search's places.
 *
 * First what is computed by groups, then single sequences that must recompute, in the
 * order of placing: each is a micro-batch of its own, or joins the one before it on the
 * very same ranks where that saves time (one fixed part less against more recompute).
 * Then every rank's packed sequences in the fewest micro-batches, evened out; the two
 * smallest are joined as long as recomputing some is cheaper than another fixed part.
 * Recompute counts are the cheapest that fit each micro-batch.
 */
#include "strategy_dcp.h"

#include <math.h>

/* Time of a batch with what it holds; INFINITY where it does not fit. */
static double
price_batch(const dcp_search_t *s, dcp_batch_t *batch)
{
    const dcp_cost_t *cost = &s->problem->request->cost;
    plan_price_t price;
    plan_price_init(cost, batch->group, dcp_cost_tier(cost, batch->first, batch->group),
                    &price);
    batch->time_s = price.start_s
                    + plan_least_recompute(s->problem, &price, batch->tokens,
                                           batch->squares, batch->recompute);
    return batch->time_s;
}

/* The last batch of all ranks of a place, if that is its very block; else -1. */
static int64_t
batch_before(const dcp_search_t *s, dcp_place_t place)
{
    int64_t last = s->last_batch[place.first];
    if (last < 0 || s->batches[last].first != place.first
        || s->batches[last].group != place.group) {
        return -1;
    }
    for (int32_t r = place.first; r < place.first + place.group; r++) {
        if (s->last_batch[r] != last) {
            return -1;
        }
    }
    return last;
}

static int64_t
add_alone(dcp_search_t *s, int64_t batch_count, int64_t i)
{
    dcp_place_t place = s->places[i];
    int64_t length = s->problem->request->lengths[i];
    double squares = (double)length * (double)length;
    dcp_batch_t single = {.first = place.first,
                          .group = place.group,
                          .tokens = length,
                          .squares = squares,
                          .count = 1};
    price_batch(s, &single);
    int64_t before = batch_before(s, place);
    if (before >= 0) {
        dcp_batch_t joined = s->batches[before];
        joined.tokens += length;
        joined.squares += squares;
        joined.count++;
        if (price_batch(s, &joined) <= s->batches[before].time_s + single.time_s) {
            s->batches[before] = joined;
            s->batch_of[i] = before;
            return batch_count;
        }
    }
    s->batches[batch_count] = single;
    s->batch_of[i] = batch_count;
    for (int32_t r = place.first; r < place.first + place.group; r++) {
        s->last_batch[r] = batch_count;
    }
    return batch_count + 1;
}

/* Joins the two smallest of batches first .. count - 1 of one rank as long as that
 * saves time; the sequences' batch_of goes along. Returns the new count. */
static int64_t
join_small(dcp_search_t *s, int64_t first, int64_t count, const int64_t *run,
           int64_t run_count)
{
    while (count - first > 1) {
        int64_t a = first, b = first + 1;
        for (int64_t k = first; k < count; k++) {
            if (s->batches[k].tokens < s->batches[a].tokens) {
                a = k;
            }
        }
        b = a == first ? first + 1 : first;
        for (int64_t k = first; k < count; k++) {
            if (k != a && s->batches[k].tokens < s->batches[b].tokens) {
                b = k;
            }
        }
        dcp_batch_t joined = s->batches[a];
        joined.tokens += s->batches[b].tokens;
        joined.squares += s->batches[b].squares;
        joined.count += s->batches[b].count;
        if (price_batch(s, &joined) > s->batches[a].time_s + s->batches[b].time_s) {
            break;
        }
        int64_t low = a < b ? a : b, high = a < b ? b : a, last = --count;
        s->batches[low] = joined;
        s->batches[high] = s->batches[last];
        for (int64_t k = 0; k < run_count; k++) {
            int64_t *batch = &s->batch_of[run[k]];
            *batch = *batch == high ? low : *batch == last ? high : *batch;
        }
    }
    return count;
}

/* Batches of a rank's packed run. Returns the new count of batches. */
static int64_t
pack_rank(dcp_search_t *s, int32_t rank, int64_t batch_count)
{
    const int64_t *lengths = s->problem->request->lengths;
    const int64_t *run = s->items + s->run_starts[rank];
    int64_t run_count = s->run_counts[rank];
    int64_t bins = plan_packer_assign(s->packer, lengths, run, run_count,
                                      s->sizes[0].cap_none, s->bins);
    for (int64_t b = 0; b < bins; b++) {
        s->batches[batch_count + b] = (dcp_batch_t){.first = rank, .group = 1};
    }
    for (int64_t k = 0; k < run_count; k++) {
        dcp_batch_t *batch = &s->batches[batch_count + s->bins[k]];
        int64_t length = lengths[run[k]];
        batch->tokens += length;
        batch->squares += (double)length * (double)length;
        batch->count++;
        s->batch_of[run[k]] = batch_count + s->bins[k];
    }
    for (int64_t b = 0; b < bins; b++) {
        price_batch(s, &s->batches[batch_count + b]);
    }
    return join_small(s, batch_count, batch_count + bins, run, run_count);
}

static dcp_status_t
write_batches(dcp_search_t *s, int64_t batch_count, plan_draft_t *draft)
{
    int64_t *ends = s->bins, *sequences = s->trial, at = 0;
    for (int64_t b = 0; b < batch_count; b++) {
        ends[b] = at;
        at += s->batches[b].count;
    }
    for (int64_t i = 0; i < s->count; i++) { /* ascending in every batch */
        sequences[ends[s->batch_of[i]]++] = i;
    }
    for (int64_t b = 0; b < batch_count; b++) {
        const dcp_batch_t *batch = &s->batches[b];
        plan_setting_t setting = {
            .group = batch->group,
            .recompute = {batch->recompute[0], batch->recompute[1]},
        };
        DCP_TRY(plan_draft_add(draft, batch->first, &setting,
                               sequences + ends[b] - batch->count, batch->count));
    }
    return DCP_OK;
}

dcp_status_t
dcp_search_emit(dcp_search_t *search, plan_draft_t *draft)
{
    dcp_search_t *s = search;
    int64_t batch_count = 0;
    for (int32_t r = 0; r < s->world; r++) {
        s->last_batch[r] = -1;
    }
    for (int singles = 0; singles < 2; singles++) { /* groups first, on every rank */
        for (int64_t k = 0; k < s->count; k++) {
            int64_t i = s->problem->order[k];
            int single = s->places[i].group == 1;
            if (single == singles && !(single && dcp_search_is_packed(s, i))) {
                batch_count = add_alone(s, batch_count, i);
            }
        }
    }
    dcp_search_list(s);
    for (int32_t r = 0; r < s->world; r++) {
        if (s->run_counts[r] > 0) {
            batch_count = pack_rank(s, r, batch_count);
        }
    }
    return write_batches(s, batch_count, draft);
}
