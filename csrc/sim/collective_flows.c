/* What a collective puts on the network.
 *
 * `bytes` is what one host holds in all. A reduce-scatter or a gather of n hosts moves
 * (n - 1) / n of it through every host's link, as a ring or directly. Steps of a ring
 * are not simulated one by one: neighbours stream, and the ring's rate is that of its
 * slowest flow, as a transfer's end is that of its last.
 *
 * Across racks the two differ: of a rack of r hosts a ring sends what one neighbour
 * does, all-to-all what r hosts send to all others. Two levels sum inside racks first.
 */
#include "dcp/network.h"

#include <inttypes.h>
#include <stddef.h>

static int32_t
rack_of(const dcp_network_options_t *options, int32_t host)
{
    return options->rack_hosts > 0 ? host / options->rack_hosts : 0;
}

typedef struct flow_list {
    dcp_flow_t *flows; /* NULL: only counted */
    int64_t count;
} flow_list_t;

static void
add(flow_list_t *list, int32_t from, int32_t to, double bytes)
{
    if (list->flows != NULL) {
        list->flows[list->count] = (dcp_flow_t){from, to, bytes};
    }
    list->count++;
}

/* Hosts of `host`'s rack among all, and its place among them. */
static int32_t
rack_mates(const dcp_network_options_t *options, const int32_t *hosts, int32_t count,
           int32_t host, int32_t *place_p)
{
    int32_t mates = 0;
    *place_p = 0;
    for (int32_t i = 0; i < count; i++) {
        if (rack_of(options, hosts[i]) == rack_of(options, host)) {
            *place_p = hosts[i] == host ? mates : *place_p;
            mates++;
        }
    }
    return mates;
}

static void
two_level(const dcp_network_options_t *options, const int32_t *hosts, int32_t count,
          double bytes, int32_t phase, flow_list_t *list)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t place, other_place;
        int32_t mates = rack_mates(options, hosts, count, hosts[i], &place);
        int32_t racks = count / mates;
        for (int32_t j = 0; j < count; j++) {
            int32_t same = rack_of(options, hosts[i]) == rack_of(options, hosts[j]);
            rack_mates(options, hosts, count, hosts[j], &other_place);
            if (phase == 0 && same && i != j) {
                add(list, hosts[i], hosts[j], bytes / mates);
            }
            if (phase == 1 && !same && place == other_place) {
                add(list, hosts[i], hosts[j], bytes / mates / racks);
            }
        }
    }
}

/* Two levels need racks with equally many of the hosts. */
static dcp_status_t
check_racks(const dcp_network_options_t *options, const int32_t *hosts, int32_t count)
{
    int32_t first, place;
    first = count > 0 ? rack_mates(options, hosts, count, hosts[0], &place) : 0;
    for (int32_t i = 1; i < count; i++) {
        if (rack_mates(options, hosts, count, hosts[i], &place) != first) {
            return DCP_FAIL(
                DCP_ERR_ARG,
                "two levels need equally many hosts in every rack: host %d's "
                "has another number than host %d's",
                (int)hosts[i], (int)hosts[0]);
        }
    }
    return DCP_OK;
}

dcp_status_t
dcp_collective_flows(const dcp_network_options_t *options, dcp_collective_t collective,
                     const int32_t *hosts, int32_t host_count, double bytes,
                     int32_t phase, dcp_flow_t *flows, int64_t *flow_count_p,
                     int32_t *phase_count_p)
{
    flow_list_t list = {.flows = flows};
    int32_t phase_count = 1;
    double share = bytes / host_count;
    switch (collective) {
    case DCP_COLLECTIVE_RING:
        for (int32_t i = 0; phase == 0 && host_count > 1 && i < host_count; i++) {
            add(&list, hosts[i], hosts[(i + 1) % host_count], bytes - share);
        }
        break;
    case DCP_COLLECTIVE_ALLTOALL:
        for (int32_t i = 0; phase == 0 && i < host_count; i++) {
            for (int32_t j = 0; j < host_count; j++) {
                if (i != j) {
                    add(&list, hosts[i], hosts[j], share);
                }
            }
        }
        break;
    case DCP_COLLECTIVE_TWO_LEVEL:
        DCP_TRY(check_racks(options, hosts, host_count));
        phase_count = 2;
        two_level(options, hosts, host_count, bytes, phase, &list);
        break;
    default:
        return DCP_FAIL(DCP_ERR_ARG, "collective %d is none of dcp_collective_t",
                        (int)collective);
    }
    *flow_count_p = list.count;
    if (phase_count_p != NULL) {
        *phase_count_p = phase_count;
    }
    return DCP_OK;
}
