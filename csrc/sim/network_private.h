/* Shared by network.c and background.c. */
#ifndef NETWORK_PRIVATE_H
#define NETWORK_PRIVATE_H

#include "dcp/network.h"
#include "max_min.h"

enum { FLOW_LINKS = 4 }; /* host up, rack up, rack down, host down */

typedef struct net_flow {
    double remaining, least; /* bytes; done at or below least */
    double rate;
    int64_t transfer; /* place in transfers */
    int32_t link_count;
    int32_t links[FLOW_LINKS];
} net_flow_t;

typedef struct net_transfer {
    int64_t id;   /* -1: the place is free */
    int64_t left; /* flows that are not done */
    double end_s;
    int32_t job; /* of a background job; -1: the caller's */
    int32_t started;
    double ready_s;      /* when its flows begin */
    dcp_flow_t *waiting; /* owned, until then */
    int64_t waiting_count;
} net_transfer_t;

/* A background job: absent, computing, or communicating. */
typedef struct net_job {
    dcp_background_t options; /* hosts owned */
    int32_t present;
    double change_s;            /* when it comes or goes next; infinity: never */
    uint64_t changes;           /* so far: numbers the random draws */
    double compute_until_s;     /* infinity: it communicates, or is absent */
    int32_t phase, phase_count; /* of its collective */
    dcp_flow_t *flows;          /* owned, of all phases */
    int64_t *phase_offsets;     /* owned, [phase_count + 1] */
} net_job_t;

struct dcp_network {
    dcp_network_options_t options;
    int32_t link_count;
    double *capacity; /* owned, [link_count] */
    double now_s;
    int64_t next_id;

    net_flow_t *flows; /* owned, active ones */
    int64_t flow_count, flow_room;
    double *rates;    /* owned scratch, [flow_room] */
    int64_t *offsets; /* owned scratch, [flow_room + 1] */
    int32_t *link_of; /* owned scratch, [flow_room * FLOW_LINKS] */
    int8_t *frozen;   /* owned scratch, [flow_room] */
    double *residual; /* owned scratch, [link_count] */
    int64_t *users;   /* owned scratch, [link_count] */
    int32_t stale;    /* rates must be computed again */

    net_transfer_t *transfers; /* owned */
    int64_t transfer_count, transfer_room;
    int64_t waiting_count; /* transfers that have not begun */

    net_job_t *jobs; /* owned */
    int32_t job_count;
};

/* Room for more flows. */
dcp_status_t network_reserve(dcp_network_t *network, int64_t more);
/* Begins a transfer whose flows are the network's after the latency. */
dcp_status_t network_start(dcp_network_t *network, double start_s,
                           const dcp_flow_t *flows, int64_t flow_count, int32_t job,
                           int64_t *id_p);

/* background.c: when a job does something next; do it at now. */
double network_job_event(const net_job_t *job);
dcp_status_t network_job_act(dcp_network_t *network, int32_t job);
/* A transfer of the job is done. */
dcp_status_t network_job_done(dcp_network_t *network, int32_t job);
void network_job_clear(net_job_t *job);
/* A job's flows end at once. */
void network_drop(dcp_network_t *network, int32_t job);

#endif
