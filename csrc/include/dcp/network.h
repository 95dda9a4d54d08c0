/* The network simulator: flows over links, shared max-min fair, event by event.
 *
 * Hosts hang on a switch, or in racks whose switches have uplinks to one core; every
 * link has two directions. A transfer is a set of flows that begin together and is done
 * when the last of them is; flows share links max-min fair at every moment (progressive
 * filling), rates change only when a flow begins or ends. Background jobs come and go,
 * and while they are there compute and then communicate, over and over: they react to
 * us as we do to them. Seeded; the same calls give the same times, bit for bit.
 */
#ifndef DCP_NETWORK_H
#define DCP_NETWORK_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_network dcp_network_t;

typedef struct dcp_network_options {
    int32_t host_count; /* >= 1 */
    int32_t rack_hosts; /* hosts of a rack; 0: one switch for all */
    double host_rate;   /* bytes a second of a host's link, each direction */
    double
        oversubscription; /* >= 1: uplink of a rack = rack_hosts x host_rate / this */
    double latency_s;     /* before the first byte of a transfer arrives, >= 0 */
    uint64_t seed;        /* of background jobs */
} dcp_network_options_t;

typedef struct dcp_flow {
    int32_t from, to; /* hosts; equal: costs nothing */
    double bytes;     /* >= 0 */
} dcp_flow_t;

typedef enum dcp_collective {
    DCP_COLLECTIVE_RING = 0,      /* reduce-scatter or gather of `bytes` a rank's whole:
                                     each host sends (n-1)/n of it to its neighbour */
    DCP_COLLECTIVE_ALLTOALL = 1,  /* each host sends 1/n of it to every other */
    DCP_COLLECTIVE_TWO_LEVEL = 2, /* inside racks first, then across */
} dcp_collective_t;

/* A job that shares the network. Present and absent in turn, each for a time drawn from
 * an exponential distribution of mean dwell_s (0: present always); while present it
 * computes compute_s, then runs its collective, over and over. */
typedef struct dcp_background {
    const int32_t *hosts; /* [host_count] distinct; copied */
    int32_t host_count;
    double compute_s, bytes; /* of one iteration: the whole of its gradient */
    dcp_collective_t collective;
    double dwell_s;
} dcp_background_t;

dcp_status_t dcp_network_create(const dcp_network_options_t *options,
                                dcp_network_t **network_p);
void dcp_network_destroy(dcp_network_t *network);
dcp_status_t dcp_network_add_background(dcp_network_t *network,
                                        const dcp_background_t *background);
/* A copy that goes on alike. */
dcp_status_t dcp_network_copy(const dcp_network_t *network, dcp_network_t **copy_p);

double dcp_network_now(const dcp_network_t *network);
/* Which background jobs are present now, bit i: job i (the first 64). */
uint64_t dcp_network_present(const dcp_network_t *network);
/* Lets background traffic go on until `time_s` >= now. */
dcp_status_t dcp_network_run_until(dcp_network_t *network, double time_s);
/* Begins a transfer at start_s >= now; *transfer_p names it until it is waited for. */
dcp_status_t dcp_network_begin(dcp_network_t *network, double start_s,
                               const dcp_flow_t *flows, int64_t flow_count,
                               int64_t *transfer_p);
/* Runs until the transfer is done; *end_s_p when. */
dcp_status_t dcp_network_wait(dcp_network_t *network, int64_t transfer,
                              double *end_s_p);

/* The flows of a collective over `hosts`, in phases that follow one another (two-level
 * has more than one). Asks for counts with flows NULL. */
dcp_status_t dcp_collective_flows(const dcp_network_options_t *options,
                                  dcp_collective_t collective, const int32_t *hosts,
                                  int32_t host_count, double bytes, int32_t phase,
                                  dcp_flow_t *flows, int64_t *flow_count_p,
                                  int32_t *phase_count_p);

/* Max-min fair rates of flows over links: link_of[offsets[f] .. offsets[f+1]) are the
 * links of flow f; a flow without links gets infinity. Pure. */
dcp_status_t dcp_max_min_rates(int64_t flow_count, const int64_t *offsets,
                               const int32_t *link_of, int32_t link_count,
                               const double *capacity, double *rates);

#ifdef __cplusplus
}
#endif
#endif
