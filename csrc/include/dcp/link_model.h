/* A link for dcp_comm_create_emulated that the network simulator answers for: every
 * rank is a host (or machine_ranks of them are), with background jobs scaled to its
 * rate.
 *
 * Ranks hold models that say the same, since all ask for the same shared transfers. The
 * model's clock starts at epoch_ns and runs with real time. */
#ifndef DCP_LINK_MODEL_H
#define DCP_LINK_MODEL_H

#include "dcp/comm.h"
#include "dcp/network.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_link_options {
    double rate; /* bytes a second of a host's link */
    double latency_s;
    int32_t rank_count;
    int32_t machine_ranks; /* ranks of one host: between them nothing takes time */
    int32_t background;    /* jobs that share the hosts' links */
    double dwell_s;        /* mean time that one is present, and absent; 0: always */
    double duty, period_s; /* a job alone: seconds of an iteration and the share of it
                              that it communicates */
    uint64_t seed;
    int64_t epoch_ns; /* dcp_clock_ns, the same on all ranks */
} dcp_link_options_t;

dcp_status_t dcp_link_model_create(const dcp_link_options_t *options,
                                   dcp_link_ops_t *link_p);

#ifdef __cplusplus
}
#endif
#endif
