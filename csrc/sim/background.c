/* Jobs that share the network with the one in front.
 *
 * A job comes and goes at times of its own: how long it stays or stays away is drawn
 * for (seed, job, number of the change), so that it does not depend on what anybody
 * sends. While it is there it computes, then sums its gradient over its hosts
 * (reduce-scatter and gather: twice the collective's bytes), then computes again; that
 * takes as long as the links let it. A job that goes drops what it was sending. */
#include "network_private.h"

#include "dcp/alloc.h"
#include "dcp/rng.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Uniform in (0, 1] of a job's draw. */
static double
draw(const dcp_network_t *network, int32_t job, uint64_t number)
{
    uint64_t seed = network->options.seed;
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t counter[4] = {(uint32_t)number, (uint32_t)(number >> 32), (uint32_t)job,
                           0x6a6f6273u};
    uint32_t words[4];
    dcp_philox(key, counter, words);
    return ((double)words[0] + 1.0) / 4294967296.0;
}

static void
begin_iteration(dcp_network_t *network, net_job_t *job)
{
    job->phase = 0;
    job->compute_until_s = network->now_s + job->options.compute_s;
}

static void
schedule_change(dcp_network_t *network, int32_t number)
{
    net_job_t *job = &network->jobs[number];
    double dwell_s = job->options.dwell_s;
    job->changes++;
    job->change_s =
        dwell_s > 0
            ? network->now_s - dwell_s * log(draw(network, number, job->changes))
            : INFINITY;
}

double
network_job_event(const net_job_t *job)
{
    return job->compute_until_s < job->change_s ? job->compute_until_s : job->change_s;
}

/* The next phase of the collective begins, or the next iteration. */
static dcp_status_t
go_on(dcp_network_t *network, int32_t number)
{
    net_job_t *job = &network->jobs[number];
    while (job->phase < job->phase_count) {
        int64_t first = job->phase_offsets[job->phase];
        int64_t count = job->phase_offsets[job->phase + 1] - first, id;
        job->phase++;
        if (count > 0) {
            job->compute_until_s = INFINITY;
            return network_start(network, network->now_s, job->flows + first, count,
                                 number, &id);
        }
    }
    begin_iteration(network, job);
    return DCP_OK;
}

dcp_status_t
network_job_done(dcp_network_t *network, int32_t number)
{
    return go_on(network, number);
}

dcp_status_t
network_job_act(dcp_network_t *network, int32_t number)
{
    net_job_t *job = &network->jobs[number];
    if (job->change_s > network->now_s) {
        return go_on(network, number); /* it has computed */
    }
    job->present = !job->present;
    schedule_change(network, number);
    if (job->present) {
        begin_iteration(network, job);
    } else {
        network_drop(network, number);
        job->compute_until_s = INFINITY;
    }
    return DCP_OK;
}

void
network_job_clear(net_job_t *job)
{
    dcp_free((void *)(uintptr_t)job->options.hosts);
    dcp_free(job->flows);
    dcp_free(job->phase_offsets);
}

static dcp_status_t
check(const dcp_network_t *network, const dcp_background_t *b)
{
    if (b->host_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "a background job's host_count = %d must be >= 1",
                        (int)b->host_count);
    }
    for (int32_t i = 0; i < b->host_count; i++) {
        if (b->hosts[i] < 0 || b->hosts[i] >= network->options.host_count) {
            return DCP_FAIL(DCP_ERR_ARG, "a background job's host %d must lie in 0..%d",
                            (int)b->hosts[i], (int)network->options.host_count - 1);
        }
        for (int32_t j = 0; j < i; j++) {
            if (b->hosts[j] == b->hosts[i]) {
                return DCP_FAIL(DCP_ERR_ARG, "a background job has host %d twice",
                                (int)b->hosts[i]);
            }
        }
    }
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"compute_s", b->compute_s}, {"bytes", b->bytes}, {"dwell_s", b->dwell_s}};
    for (int32_t i = 0; i < 3; i++) {
        if (!(numbers[i].value >= 0) || isinf(numbers[i].value)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "a background job's %s = %g must be >= 0 and finite",
                            numbers[i].name, numbers[i].value);
        }
    }
    if (b->compute_s <= 0 && (b->bytes <= 0 || b->host_count == 1)) {
        return DCP_FAIL(DCP_ERR_ARG, "a background job's iteration takes no time: "
                                     "compute_s or bytes must be > 0");
    }
    return DCP_OK;
}

/* The flows of all phases of the job's sum. */
static dcp_status_t
plan_flows(const dcp_network_t *network, net_job_t *job)
{
    const dcp_background_t *b = &job->options;
    const dcp_network_options_t *o = &network->options;
    int64_t count = 0, total = 0;
    void *memory;
    DCP_TRY(dcp_collective_flows(o, b->collective, b->hosts, b->host_count,
                                 2 * b->bytes, 0, NULL, &count, &job->phase_count));
    DCP_TRY(dcp_alloc_zeroed((job->phase_count + 1) * (int64_t)sizeof(int64_t),
                             "phases of a job", &memory));
    job->phase_offsets = memory;
    for (int32_t p = 0; p < job->phase_count; p++) {
        DCP_TRY(dcp_collective_flows(o, b->collective, b->hosts, b->host_count,
                                     2 * b->bytes, p, NULL, &count, NULL));
        total += count;
        job->phase_offsets[p + 1] = total;
    }
    DCP_TRY(dcp_alloc_array(total + 1, (int64_t)sizeof(dcp_flow_t), "flows of a job",
                            &memory));
    job->flows = memory;
    for (int32_t p = 0; p < job->phase_count; p++) {
        DCP_TRY(dcp_collective_flows(o, b->collective, b->hosts, b->host_count,
                                     2 * b->bytes, p,
                                     job->flows + job->phase_offsets[p], &count, NULL));
    }
    return DCP_OK;
}

dcp_status_t
dcp_network_add_background(dcp_network_t *network, const dcp_background_t *background)
{
    DCP_TRY(check(network, background));
    void *memory;
    int32_t number = network->job_count;
    DCP_TRY(dcp_alloc_zeroed((number + 1) * (int64_t)sizeof(net_job_t),
                             "background jobs", &memory));
    net_job_t *jobs = memory, *job = &jobs[number];
    job->options = *background;
    job->options.hosts = NULL;
    dcp_status_t status = dcp_alloc_array(
        background->host_count, (int64_t)sizeof(int32_t), "hosts of a job", &memory);
    if (status == DCP_OK) {
        memcpy(memory, background->hosts,
               (size_t)background->host_count * sizeof(int32_t));
        job->options.hosts = memory;
        status = plan_flows(network, job);
    }
    if (status != DCP_OK) {
        network_job_clear(job);
        dcp_free(jobs);
        return status;
    }
    if (number > 0) {
        memcpy(jobs, network->jobs, (size_t)number * sizeof(net_job_t));
    }
    dcp_free(network->jobs);
    network->jobs = jobs;
    network->job_count++;
    /* as often there as not, from the start */
    job->present = background->dwell_s <= 0 || draw(network, number, 0) <= 0.5;
    job->compute_until_s = INFINITY;
    schedule_change(network, number);
    if (job->present) {
        begin_iteration(network, job);
    }
    return DCP_OK;
}
