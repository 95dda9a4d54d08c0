/* The least makespan that any plan could have.
 *
 * With one rank a micro-batch and no recompute a sequence has one choice, so DESIGN's
 * bisection has a closed form. Let a = latency_s, w_i the time of sequence i beyond a,
 * W the world, C the most tokens of a micro-batch. Then the makespan T obeys
 *     T >= a + max w_i                        some micro-batch holds the longest,
 *     W (T - a) >= sum w_i                    every busy rank pays a at least once,
 *     W T >= sum (w_i + a len_i / C)          there are >= sum len_i / C micro-batches.
 * C comes from the memory cap and from max_tokens, whichever is less, never from the
 * plan at hand.
 */
#include "dcp/plan.h"

double
dcp_plan_bound(const dcp_plan_request_t *request)
{
    const dcp_cost_t *cost = &request->cost;
    if (request->length_count == 0) {
        return 0;
    }
    double longest = 0, work = 0, tokens = 0;
    for (int64_t i = 0; i < request->length_count; i++) {
        double length = (double)request->lengths[i];
        double w = cost->token_s * length + cost->square_s * length * length;
        longest = w > longest ? w : longest;
        work += w;
        tokens += length;
    }
    double cap = 1e300;
    double bound = cost->latency_s + longest;
    double even = cost->latency_s + work / request->world;
    double counted = (work + cost->latency_s * tokens / cap) / request->world;
    bound = even > bound ? even : bound;
    return counted > bound ? counted : bound;
}
