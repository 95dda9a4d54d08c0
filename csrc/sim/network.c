/* Event-driven simulation of flows that share links max-min fair.
 *
 * Between events every flow has a constant rate. Events: a flow ends, a transfer
 * begins, a background job comes, goes, or has computed. Flows that end together but
 * for rounding end in one event: a flow is done when less than 1e-9 of it is left. A
 * transfer waits `latency_s` before its flows begin. Host h has links 2h (up) and 2h +
 * 1 (down); rack r has the two after all hosts'.
 *
 * Cost of an event: rounds of filling over all active flows, about a microsecond for a
 * hundred; nothing is allocated once arrays have grown. */
#include "network_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const double DONE_SHARE = 1e-9;

static int32_t
rack_count(const dcp_network_options_t *o)
{
    return o->rack_hosts > 0 ? (o->host_count + o->rack_hosts - 1) / o->rack_hosts : 0;
}

static dcp_status_t
check_options(const dcp_network_options_t *o)
{
    if (o->host_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "host_count = %d must be >= 1",
                        (int)o->host_count);
    }
    if (o->rack_hosts < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "rack_hosts = %d must be >= 0",
                        (int)o->rack_hosts);
    }
    if (!(o->host_rate > 0) || isinf(o->host_rate)) {
        return DCP_FAIL(DCP_ERR_ARG, "host_rate = %g must be > 0 and finite",
                        o->host_rate);
    }
    if (!(o->oversubscription >= 1) || isinf(o->oversubscription)) {
        return DCP_FAIL(DCP_ERR_ARG, "oversubscription = %g must be >= 1 and finite",
                        o->oversubscription);
    }
    if (!(o->latency_s >= 0) || isinf(o->latency_s)) {
        return DCP_FAIL(DCP_ERR_ARG, "latency_s = %g must be >= 0 and finite",
                        o->latency_s);
    }
    return DCP_OK;
}

static dcp_status_t
alloc_links(dcp_network_t *network)
{
    void *memory;
    int64_t count = network->link_count;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(double), "link rates", &memory));
    network->capacity = memory;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(double), "link rests", &memory));
    network->residual = memory;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(int64_t), "link users", &memory));
    network->users = memory;
    return DCP_OK;
}

dcp_status_t
dcp_network_create(const dcp_network_options_t *options, dcp_network_t **network_p)
{
    DCP_TRY(check_options(options));
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_network_t), "network", &memory));
    dcp_network_t *network = memory;
    network->options = *options;
    network->link_count = 2 * (options->host_count + rack_count(options));
    dcp_status_t status = alloc_links(network);
    if (status != DCP_OK) {
        dcp_network_destroy(network);
        return status;
    }
    for (int32_t l = 0; l < network->link_count; l++) {
        int32_t uplink = l >= 2 * options->host_count;
        network->capacity[l] = uplink ? options->host_rate * options->rack_hosts
                                            / options->oversubscription
                                      : options->host_rate;
    }
    *network_p = network;
    return DCP_OK;
}

void
dcp_network_destroy(dcp_network_t *network)
{
    if (network == NULL) {
        return;
    }
    for (int32_t j = 0; j < network->job_count; j++) {
        network_job_clear(&network->jobs[j]);
    }
    for (int64_t t = 0; t < network->transfer_count; t++) {
        dcp_free(network->transfers[t].waiting);
    }
    dcp_free(network->jobs);
    dcp_free(network->transfers);
    dcp_free(network->flows);
    dcp_free(network->rates);
    dcp_free(network->offsets);
    dcp_free(network->link_of);
    dcp_free(network->frozen);
    dcp_free(network->capacity);
    dcp_free(network->residual);
    dcp_free(network->users);
    dcp_free(network);
}

/* `*array_p` with room for `room` items, the first `count` kept. */
static dcp_status_t
grow(void **array_p, int64_t count, int64_t room, int64_t item, const char *what)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(room, item, what, &memory));
    if (count > 0) {
        memcpy(memory, *array_p, (size_t)(count * item));
    }
    dcp_free(*array_p);
    *array_p = memory;
    return DCP_OK;
}

#define GROW(field, count, room, what)                                        \
    do {                                                                      \
        void *array = network->field;                                         \
        dcp_status_t grown =                                                  \
            grow(&array, count, room, (int64_t)sizeof *network->field, what); \
        network->field = array;                                               \
        DCP_TRY(grown);                                                       \
    } while (0)

dcp_status_t
network_reserve(dcp_network_t *network, int64_t more)
{
    int64_t wanted = network->flow_count + more;
    if (wanted <= network->flow_room) {
        return DCP_OK;
    }
    int64_t room = 2 * wanted > 64 ? 2 * wanted : 64;
    GROW(flows, network->flow_count, room, "flows");
    GROW(rates, 0, room, "rates of flows");
    GROW(offsets, 0, room + 1, "offsets of flows");
    GROW(link_of, 0, FLOW_LINKS * room, "links of flows");
    GROW(frozen, 0, room, "marks of flows");
    network->flow_room = room;
    return DCP_OK;
}

/* The links between two hosts. */
static void
route(const dcp_network_t *network, const dcp_flow_t *flow, net_flow_t *out)
{
    const dcp_network_options_t *o = &network->options;
    out->link_count = 0;
    if (flow->from == flow->to) {
        return;
    }
    out->links[out->link_count++] = 2 * flow->from;
    if (o->rack_hosts > 0) {
        int32_t from = flow->from / o->rack_hosts, to = flow->to / o->rack_hosts;
        if (from != to) {
            out->links[out->link_count++] = 2 * (o->host_count + from);
            out->links[out->link_count++] = 2 * (o->host_count + to) + 1;
        }
    }
    out->links[out->link_count++] = 2 * flow->to + 1;
}

/* A transfer's flows begin now. */
static dcp_status_t
open_flows(dcp_network_t *network, int64_t place)
{
    net_transfer_t *transfer = &network->transfers[place];
    DCP_TRY(network_reserve(network, transfer->waiting_count));
    for (int64_t i = 0; i < transfer->waiting_count; i++) {
        const dcp_flow_t *flow = &transfer->waiting[i];
        if (flow->bytes <= 0 || flow->from == flow->to) {
            continue;
        }
        net_flow_t *out = &network->flows[network->flow_count++];
        *out = (net_flow_t){.remaining = flow->bytes,
                            .least = flow->bytes * DONE_SHARE,
                            .transfer = place};
        route(network, flow, out);
        transfer->left++;
    }
    dcp_free(transfer->waiting);
    transfer->waiting = NULL;
    transfer->started = 1;
    transfer->end_s = network->now_s;
    network->waiting_count--;
    network->stale = 1;
    return DCP_OK;
}

static dcp_status_t
free_place(dcp_network_t *network, int64_t *place_p)
{
    for (int64_t i = 0; i < network->transfer_count; i++) {
        if (network->transfers[i].id < 0) {
            *place_p = i;
            return DCP_OK;
        }
    }
    if (network->transfer_count == network->transfer_room) {
        int64_t room = network->transfer_room > 0 ? 2 * network->transfer_room : 8;
        GROW(transfers, network->transfer_count, room, "transfers");
        network->transfer_room = room;
    }
    *place_p = network->transfer_count++;
    network->transfers[*place_p] = (net_transfer_t){.id = -1};
    return DCP_OK;
}

dcp_status_t
network_start(dcp_network_t *network, double start_s, const dcp_flow_t *flows,
              int64_t flow_count, int32_t job, int64_t *id_p)
{
    int64_t place;
    void *memory;
    DCP_TRY(free_place(network, &place));
    DCP_TRY(dcp_alloc_array(flow_count + 1, (int64_t)sizeof(dcp_flow_t),
                            "flows of a transfer", &memory));
    if (flow_count > 0) {
        memcpy(memory, flows, (size_t)flow_count * sizeof(dcp_flow_t));
    }
    network->transfers[place] = (net_transfer_t){
        .id = network->next_id++,
        .job = job,
        .ready_s = start_s + network->options.latency_s,
        .waiting = memory,
        .waiting_count = flow_count,
    };
    network->waiting_count++;
    *id_p = network->transfers[place].id;
    return DCP_OK;
}

static void
compute_rates(dcp_network_t *network)
{
    int64_t at = 0;
    for (int64_t f = 0; f < network->flow_count; f++) {
        const net_flow_t *flow = &network->flows[f];
        network->offsets[f] = at;
        for (int32_t i = 0; i < flow->link_count; i++) {
            network->link_of[at++] = flow->links[i];
        }
    }
    if (network->flow_count > 0) {
        network->offsets[network->flow_count] = at;
        max_min_flows_t flows = {network->flow_count, network->offsets,
                                 network->link_of, network->link_count,
                                 network->capacity};
        max_min_scratch_t scratch = {network->residual, network->users,
                                     network->frozen};
        max_min_fill(&flows, &scratch, network->rates);
    }
    for (int64_t f = 0; f < network->flow_count; f++) {
        network->flows[f].rate = network->rates[f];
    }
    network->stale = 0;
}

void
network_drop(dcp_network_t *network, int32_t job)
{
    for (int64_t t = 0; t < network->transfer_count; t++) {
        net_transfer_t *transfer = &network->transfers[t];
        if (transfer->id < 0 || transfer->job != job) {
            continue;
        }
        int64_t kept = 0;
        for (int64_t f = 0; f < network->flow_count; f++) {
            if (network->flows[f].transfer != t) {
                network->flows[kept++] = network->flows[f];
            }
        }
        network->stale |= kept != network->flow_count;
        network->flow_count = kept;
        network->waiting_count -= !transfer->started;
        dcp_free(transfer->waiting);
        *transfer = (net_transfer_t){.id = -1};
    }
}

/* Flows whose bytes are through leave. */
static void
end_flows(dcp_network_t *network)
{
    int64_t kept = 0;
    for (int64_t f = 0; f < network->flow_count; f++) {
        net_flow_t *flow = &network->flows[f];
        if (flow->remaining > flow->least) {
            network->flows[kept++] = *flow;
            continue;
        }
        net_transfer_t *transfer = &network->transfers[flow->transfer];
        transfer->left--;
        transfer->end_s = network->now_s;
    }
    network->stale |= kept != network->flow_count;
    network->flow_count = kept;
}

/* When the next thing happens, but no later than `limit_s`. */
static double
next_event(const dcp_network_t *network, double limit_s)
{
    double next_s = limit_s;
    for (int64_t f = 0; f < network->flow_count; f++) {
        double end_s =
            network->now_s + network->flows[f].remaining / network->flows[f].rate;
        next_s = end_s < next_s ? end_s : next_s;
    }
    for (int64_t t = 0; network->waiting_count > 0 && t < network->transfer_count;
         t++) {
        const net_transfer_t *transfer = &network->transfers[t];
        if (transfer->id >= 0 && !transfer->started && transfer->ready_s < next_s) {
            next_s = transfer->ready_s;
        }
    }
    for (int32_t j = 0; j < network->job_count; j++) {
        double event_s = network_job_event(&network->jobs[j]);
        next_s = event_s < next_s ? event_s : next_s;
    }
    return next_s > network->now_s ? next_s : network->now_s;
}

/* Transfers of background jobs that are done hand over to their jobs. */
static dcp_status_t
end_jobs(dcp_network_t *network)
{
    for (int64_t t = 0; t < network->transfer_count; t++) {
        net_transfer_t *transfer = &network->transfers[t];
        if (transfer->id >= 0 && transfer->job >= 0 && transfer->started
            && transfer->left == 0) {
            int32_t job = transfer->job;
            *transfer = (net_transfer_t){.id = -1};
            DCP_TRY(network_job_done(network, job));
        }
    }
    return DCP_OK;
}

/* Goes on to the next event, or to limit_s; *reached_p whether it is limit_s. */
static dcp_status_t
advance(dcp_network_t *network, double limit_s, int32_t *reached_p)
{
    if (network->stale) {
        compute_rates(network);
    }
    double next_s = next_event(network, limit_s), dt = next_s - network->now_s;
    double slack = 1e-12 * (fabs(next_s) + 1e-6);
    for (int64_t f = 0; f < network->flow_count; f++) {
        net_flow_t *flow = &network->flows[f];
        flow->remaining -= flow->rate * dt;
        /* what the clock cannot tell from done is done */
        flow->remaining = flow->remaining <= flow->rate * slack ? 0 : flow->remaining;
    }
    network->now_s = next_s;
    *reached_p = next_s >= limit_s;
    end_flows(network);
    DCP_TRY(end_jobs(network));
    for (int64_t t = 0; network->waiting_count > 0 && t < network->transfer_count;
         t++) {
        const net_transfer_t *transfer = &network->transfers[t];
        if (transfer->id >= 0 && !transfer->started && transfer->ready_s <= next_s) {
            DCP_TRY(open_flows(network, t));
        }
    }
    for (int32_t j = 0; j < network->job_count; j++) {
        if (network_job_event(&network->jobs[j]) <= next_s) {
            DCP_TRY(network_job_act(network, j));
        }
    }
    return end_jobs(network);
}

double
dcp_network_now(const dcp_network_t *network)
{
    return network->now_s;
}

uint64_t
dcp_network_present(const dcp_network_t *network)
{
    uint64_t present = 0;
    for (int32_t j = 0; j < network->job_count && j < 64; j++) {
        present |= (uint64_t)(network->jobs[j].present != 0) << j;
    }
    return present;
}

dcp_status_t
dcp_network_run_until(dcp_network_t *network, double time_s)
{
    if (!(time_s >= network->now_s) || isinf(time_s)) {
        return DCP_FAIL(DCP_ERR_ARG, "time %g must be >= now, %g, and finite", time_s,
                        network->now_s);
    }
    int32_t reached = time_s == network->now_s;
    while (!reached) {
        DCP_TRY(advance(network, time_s, &reached));
    }
    return DCP_OK;
}

dcp_status_t
dcp_network_begin(dcp_network_t *network, double start_s, const dcp_flow_t *flows,
                  int64_t flow_count, int64_t *transfer_p)
{
    if (!(start_s >= network->now_s) || isinf(start_s)) {
        return DCP_FAIL(DCP_ERR_ARG, "start %g must be >= now, %g, and finite", start_s,
                        network->now_s);
    }
    for (int64_t i = 0; i < flow_count; i++) {
        int32_t hosts = network->options.host_count;
        if (flows[i].from < 0 || flows[i].from >= hosts || flows[i].to < 0
            || flows[i].to >= hosts) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "flow %" PRId64 " from %d to %d: hosts must lie "
                            "in 0..%d",
                            i, (int)flows[i].from, (int)flows[i].to, (int)hosts - 1);
        }
        if (!(flows[i].bytes >= 0) || isinf(flows[i].bytes)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "flow %" PRId64 ": bytes = %g must be >= 0 and "
                            "finite",
                            i, flows[i].bytes);
        }
    }
    return network_start(network, start_s, flows, flow_count, -1, transfer_p);
}

dcp_status_t
dcp_network_wait(dcp_network_t *network, int64_t transfer, double *end_s_p)
{
    int64_t place = 0;
    while (place < network->transfer_count
           && network->transfers[place].id != transfer) {
        place++;
    }
    if (transfer < 0 || place == network->transfer_count) {
        return DCP_FAIL(DCP_ERR_ARG, "transfer %" PRId64 " is none that is waited for",
                        transfer);
    }
    int32_t reached;
    while (!network->transfers[place].started || network->transfers[place].left > 0) {
        DCP_TRY(advance(network, INFINITY, &reached));
    }
    *end_s_p = network->transfers[place].end_s;
    network->transfers[place] = (net_transfer_t){.id = -1};
    return DCP_OK;
}

static dcp_status_t
copy_array(const void *from, int64_t count, int64_t item, void **to_p)
{
    *to_p = NULL;
    if (from == NULL) {
        return DCP_OK;
    }
    DCP_TRY(dcp_alloc_array(count + 1, item, "copy of a network", to_p));
    memcpy(*to_p, from, (size_t)(count * item));
    return DCP_OK;
}

#define COPY(to, from, count)                                               \
    do {                                                                    \
        void *copied;                                                       \
        DCP_TRY(copy_array(from, count, (int64_t)sizeof *(from), &copied)); \
        (to) = copied;                                                      \
    } while (0)

static dcp_status_t
copy_jobs(const dcp_network_t *from, dcp_network_t *to)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((from->job_count + 1) * (int64_t)sizeof(net_job_t), "jobs",
                             &memory));
    to->jobs = memory;
    for (int32_t j = 0; j < from->job_count; j++) {
        const net_job_t *job = &from->jobs[j];
        to->jobs[j] = *job;
        to->jobs[j].options.hosts = NULL;
        to->jobs[j].flows = NULL;
        to->jobs[j].phase_offsets = NULL;
        to->job_count++;
        COPY(to->jobs[j].options.hosts, job->options.hosts, job->options.host_count);
        COPY(to->jobs[j].phase_offsets, job->phase_offsets, job->phase_count + 1);
        COPY(to->jobs[j].flows, job->flows, job->phase_offsets[job->phase_count]);
    }
    return DCP_OK;
}

static dcp_status_t
copy_transfers(const dcp_network_t *from, dcp_network_t *to)
{
    DCP_TRY(network_reserve(to, from->flow_count));
    if (from->flow_count > 0) {
        memcpy(to->flows, from->flows, (size_t)from->flow_count * sizeof(net_flow_t));
    }
    to->flow_count = from->flow_count;
    for (int64_t t = 0; t < from->transfer_count; t++) {
        int64_t place;
        DCP_TRY(free_place(to, &place));
        to->transfers[place] = from->transfers[t];
        to->transfers[place].waiting = NULL;
        COPY(to->transfers[place].waiting, from->transfers[t].waiting,
             from->transfers[t].waiting_count);
        if (from->transfers[t].id < 0) {
            /* keeps its place: flows name places */
            to->transfers[place].id = INT64_MAX;
        }
    }
    for (int64_t t = 0; t < to->transfer_count; t++) {
        to->transfers[t].id =
            to->transfers[t].id == INT64_MAX ? -1 : to->transfers[t].id;
    }
    return DCP_OK;
}

dcp_status_t
dcp_network_copy(const dcp_network_t *network, dcp_network_t **copy_p)
{
    dcp_network_t *copy;
    DCP_TRY(dcp_network_create(&network->options, &copy));
    copy->now_s = network->now_s;
    copy->next_id = network->next_id;
    copy->stale = 1;
    dcp_status_t status = copy_jobs(network, copy);
    if (status == DCP_OK) {
        status = copy_transfers(network, copy);
    }
    if (status != DCP_OK) {
        dcp_network_destroy(copy);
        return status;
    }
    copy->waiting_count = network->waiting_count;
    *copy_p = copy;
    return DCP_OK;
}
