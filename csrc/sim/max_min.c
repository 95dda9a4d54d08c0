/* Max-min fair rates by progressive filling (Bertsekas & Gallager, Data Networks, 6.5).
 *
 * All flows grow together until a link is full; its flows keep their rate, and the
 * others go on in what is left. Links that fill at the same share, but for rounding,
 * are taken in one round: symmetric traffic, such as a collective's, then needs one or
 * two rounds however many flows it has. Cost: rounds x (flows' links + links). */
#include "max_min.h"

#include "dcp/alloc.h"
#include "dcp/network.h"

#include <inttypes.h>
#include <math.h>

static const double TOGETHER = 1.0 + 1e-12; /* shares that count as equal */

static double
least_share(const max_min_flows_t *flows, const max_min_scratch_t *scratch)
{
    double share = INFINITY;
    for (int32_t l = 0; l < flows->link_count; l++) {
        if (scratch->users[l] > 0) {
            double own = scratch->residual[l] / (double)scratch->users[l];
            share = own < share ? own : share;
        }
    }
    return share;
}

void
max_min_fill(const max_min_flows_t *flows, const max_min_scratch_t *scratch,
             double *rates)
{
    int64_t open = flows->flow_count;
    for (int32_t l = 0; l < flows->link_count; l++) {
        scratch->residual[l] = flows->capacity[l];
        scratch->users[l] = 0;
    }
    for (int64_t f = 0; f < flows->flow_count; f++) {
        scratch->frozen[f] = flows->offsets[f] == flows->offsets[f + 1];
        rates[f] = INFINITY; /* of a flow without links */
        open -= scratch->frozen[f];
        for (int64_t i = flows->offsets[f]; i < flows->offsets[f + 1]; i++) {
            scratch->users[flows->link_of[i]]++;
        }
    }
    while (open > 0) {
        double share = least_share(flows, scratch), bound = share * TOGETHER;
        for (int64_t f = 0; f < flows->flow_count; f++) {
            for (int64_t i = flows->offsets[f];
                 !scratch->frozen[f] && i < flows->offsets[f + 1]; i++) {
                int32_t l = flows->link_of[i];
                if (scratch->residual[l] / (double)scratch->users[l] <= bound) {
                    scratch->frozen[f] = 2; /* in this round */
                }
            }
        }
        for (int64_t f = 0; f < flows->flow_count; f++) {
            if (scratch->frozen[f] != 2) {
                continue;
            }
            scratch->frozen[f] = 1;
            rates[f] = share;
            open--;
            for (int64_t i = flows->offsets[f]; i < flows->offsets[f + 1]; i++) {
                int32_t l = flows->link_of[i];
                double left = scratch->residual[l] - share;
                scratch->residual[l] = left > 0 ? left : 0;
                scratch->users[l]--;
            }
        }
    }
}

static dcp_status_t
check(int64_t flow_count, const int64_t *offsets, const int32_t *link_of,
      int32_t link_count, const double *capacity)
{
    if (flow_count < 0 || link_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "flow_count = %" PRId64 ", link_count = %d must be "
                        ">= 0",
                        flow_count, (int)link_count);
    }
    for (int32_t l = 0; l < link_count; l++) {
        if (!(capacity[l] > 0) || isinf(capacity[l])) {
            return DCP_FAIL(DCP_ERR_ARG, "capacity[%d] = %g must be > 0 and finite",
                            (int)l, capacity[l]);
        }
    }
    for (int64_t f = 0; f < flow_count; f++) {
        if (offsets[f + 1] < offsets[f]) {
            return DCP_FAIL(DCP_ERR_ARG, "offsets[%" PRId64 "] must not fall", f + 1);
        }
        for (int64_t i = offsets[f]; i < offsets[f + 1]; i++) {
            if (link_of[i] < 0 || link_of[i] >= link_count) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "link %d of flow %" PRId64 " must lie in 0..%d",
                                (int)link_of[i], f, (int)link_count - 1);
            }
        }
    }
    return DCP_OK;
}

dcp_status_t
dcp_max_min_rates(int64_t flow_count, const int64_t *offsets, const int32_t *link_of,
                  int32_t link_count, const double *capacity, double *rates)
{
    DCP_TRY(check(flow_count, offsets, link_of, link_count, capacity));
    void *memory;
    int64_t bytes =
        (int64_t)(sizeof(double) + sizeof(int64_t)) * link_count + flow_count;
    DCP_TRY(dcp_alloc(bytes + 1, "scratch of max-min rates", &memory));
    max_min_scratch_t scratch = {.residual = memory};
    scratch.users = (int64_t *)(void *)(scratch.residual + link_count);
    scratch.frozen = (int8_t *)(void *)(scratch.users + link_count);
    max_min_flows_t flows = {flow_count, offsets, link_of, link_count, capacity};
    max_min_fill(&flows, &scratch, rates);
    dcp_free(memory);
    return DCP_OK;
}
