/* The network simulator as the answer to how long a transfer between ranks takes.
 *
 * Ranks of a machine share a host. A shared transfer is what all ranks ask for, in the
 * same order: it becomes part of the model's past, and background jobs react to it. One
 * that only some ranks ask for is tried on a copy, since the other ranks' models must
 * not differ. The model's clock is real time since the epoch; it never goes back. */
#include "dcp/link_model.h"

#include "dcp/alloc.h"

#include <math.h>

static const double LONGEST_S = 1e8; /* the clock ends not far beyond */

typedef struct link_model {
    dcp_network_t *network; /* owned */
    int64_t epoch_ns;
    int32_t rank_count, machine_ranks;
    dcp_flow_t *flows; /* owned, [hosts x hosts] */
} link_model_t;

static void
model_destroy(void *context)
{
    link_model_t *model = context;
    if (model != NULL) {
        dcp_network_destroy(model->network);
        dcp_free(model->flows);
        dcp_free(model);
    }
}

static int64_t
make_flows(link_model_t *model, const int64_t *bytes)
{
    int32_t size = model->rank_count, each = model->machine_ranks;
    int32_t hosts = size / each;
    int64_t count = 0;
    for (int32_t from = 0; from < hosts; from++) {
        for (int32_t to = 0; to < hosts; to++) {
            int64_t sum = 0;
            for (int32_t i = 0; from != to && i < each * each; i++) {
                sum += bytes[(from * each + i / each) * size + to * each + i % each];
            }
            if (sum > 0) {
                model->flows[count++] = (dcp_flow_t){from, to, (double)sum};
            }
        }
    }
    return count;
}

static dcp_status_t
run(dcp_network_t *network, double start_s, const dcp_flow_t *flows, int64_t count,
    double *end_s_p)
{
    int64_t transfer;
    double now_s = dcp_network_now(network);
    start_s = start_s > now_s ? start_s : now_s;
    DCP_TRY(dcp_network_run_until(network, start_s));
    DCP_TRY(dcp_network_begin(network, start_s, flows, count, &transfer));
    return dcp_network_wait(network, transfer, end_s_p);
}

static dcp_status_t
model_transfer(void *context, int64_t start_ns, const int64_t *bytes, int32_t size,
               int32_t shared, int64_t *end_ns_p)
{
    link_model_t *model = context;
    if (size != model->rank_count) {
        return DCP_FAIL(DCP_ERR_ARG, "transfer among %d ranks, the link has %d",
                        (int)size, (int)model->rank_count);
    }
    double start_s = (double)(start_ns - model->epoch_ns) * 1e-9, end_s = 0;
    int64_t count = make_flows(model, bytes);
    dcp_network_t *network = model->network;
    if (!shared) {
        DCP_TRY(dcp_network_copy(model->network, &network));
    }
    dcp_status_t status = run(network, start_s, model->flows, count, &end_s);
    if (!shared) {
        dcp_network_destroy(network);
    }
    DCP_TRY(status);
    if (!(end_s < LONGEST_S)) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "the link would take %g s for this transfer: its rate is too low",
            end_s - start_s);
    }
    *end_ns_p = model->epoch_ns + (int64_t)ceil(end_s * 1e9);
    return DCP_OK;
}

static dcp_status_t
check(const dcp_link_options_t *o)
{
    if (o->rank_count < 1 || o->machine_ranks < 1
        || o->rank_count % o->machine_ranks != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "machine_ranks = %d must be >= 1 and divide the %d "
                        "ranks",
                        (int)o->machine_ranks, (int)o->rank_count);
    }
    if (o->background < 0 || o->background > 64) {
        return DCP_FAIL(DCP_ERR_ARG, "background = %d must lie in 0..64",
                        (int)o->background);
    }
    if (!(o->duty > 0 && o->duty < 1) || !(o->period_s > 0) || isinf(o->period_s)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "duty = %g must lie in (0, 1), period_s = %g be > 0 "
                        "and finite",
                        o->duty, o->period_s);
    }
    return DCP_OK;
}

/* Jobs over all hosts, each of which alone would communicate `duty` of its period: 2
 * (n - 1) / n of its bytes go through every host's link. */
static dcp_status_t
add_jobs(link_model_t *model, const dcp_link_options_t *o, int32_t hosts)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(hosts, (int64_t)sizeof(int32_t), "hosts", &memory));
    int32_t *numbers = memory;
    for (int32_t h = 0; h < hosts; h++) {
        numbers[h] = h;
    }
    dcp_background_t job = {
        .hosts = numbers,
        .host_count = hosts,
        .compute_s = (1.0 - o->duty) * o->period_s,
        .bytes = o->duty * o->period_s * o->rate * hosts / (2.0 * (hosts - 1.0)),
        .collective = DCP_COLLECTIVE_RING,
        .dwell_s = o->dwell_s,
    };
    dcp_status_t status = DCP_OK;
    for (int32_t i = 0; status == DCP_OK && hosts > 1 && i < o->background; i++) {
        status = dcp_network_add_background(model->network, &job);
    }
    dcp_free(memory);
    return status;
}

dcp_status_t
dcp_link_model_create(const dcp_link_options_t *options, dcp_link_ops_t *link_p)
{
    DCP_TRY(check(options));
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(link_model_t), "link model", &memory));
    link_model_t *model = memory;
    int32_t hosts = options->rank_count / options->machine_ranks;
    model->epoch_ns = options->epoch_ns;
    model->rank_count = options->rank_count;
    model->machine_ranks = options->machine_ranks;
    dcp_network_options_t network = {.host_count = hosts,
                                     .host_rate = options->rate,
                                     .oversubscription = 1,
                                     .latency_s = options->latency_s,
                                     .seed = options->seed};
    dcp_status_t status = dcp_alloc_array(
        (int64_t)hosts * hosts, (int64_t)sizeof(dcp_flow_t), "flows", &memory);
    if (status == DCP_OK) {
        model->flows = memory;
        status = dcp_network_create(&network, &model->network);
    }
    if (status == DCP_OK) {
        status = add_jobs(model, options, hosts);
    }
    if (status != DCP_OK) {
        model_destroy(model);
        return status;
    }
    *link_p = (dcp_link_ops_t){model_transfer, model_destroy, model};
    return DCP_OK;
}
