/* What one step of the job in front takes.
 *
 * A micro-batches are computed; in the last one's backward pass gradients become ready
 * bucket by bucket, and each bucket is quantised, summed and gathered as soon as it is
 * ready and the one before is through:
 *
 *   e_i = max(e_(i-1), r_i) + T(bucket i),  exposed = max(0, e_last - end of backward)
 *
 * T comes from the network, shared with jobs that react. With equal buckets and a
 * constant T in all of them the recursion is max(T / n, T - (1 - 1/n) backward), which
 * is what the controller is told. */
#include "experiment.h"

#include "dcp/alloc.h"

#include <string.h>

static const double FP32_BYTES = 4.0;

double
step_bytes(const dcp_time_to_loss_options_t *o, dcp_precision_t precision)
{
    double whole = (double)dcp_precision_bytes(precision, (int64_t)o->parameter_count);
    return 2.0 * whole * (o->rank_count - 1) / o->rank_count; /* summed and gathered */
}

double
step_calls(const step_model_t *model)
{
    int32_t buckets = model->options->bucket_count;
    return (buckets > 1 ? buckets : 1) * (double)model->phase_count;
}

double
step_codec_s(const dcp_time_to_loss_options_t *o, dcp_precision_t precision)
{
    return precision == DCP_PRECISION_FP32 || o->codec_bytes_per_s <= 0
               ? 0.0
               : FP32_BYTES * o->parameter_count / o->codec_bytes_per_s;
}

double
step_exposed_s(const dcp_time_to_loss_options_t *o, double comm_s, double compute_s)
{
    return dcp_exposed_s(comm_s, o->backward_share * compute_s, o->bucket_count);
}

/* The flows of a bucket of one byte, which is summed and gathered: two bytes. */
static dcp_status_t
plan_flows(const dcp_time_to_loss_options_t *o, step_model_t *model)
{
    void *memory;
    int64_t count = 0, total = 0;
    DCP_TRY(dcp_collective_flows(&o->network, o->collective, o->hosts, o->rank_count,
                                 2.0, 0, NULL, &count, &model->phase_count));
    for (int32_t p = 0; p < model->phase_count; p++) {
        DCP_TRY(dcp_collective_flows(&o->network, o->collective, o->hosts,
                                     o->rank_count, 2.0, p, NULL, &count, NULL));
        total += count;
        model->phase_offsets[p + 1] = total;
    }
    model->flow_count = total;
    DCP_TRY(dcp_alloc_array(2 * total + 1, (int64_t)sizeof(dcp_flow_t),
                            "flows of a bucket", &memory));
    model->flows = memory;
    model->scaled = model->flows + total;
    for (int32_t p = 0; p < model->phase_count; p++) {
        DCP_TRY(dcp_collective_flows(
            &o->network, o->collective, o->hosts, o->rank_count, 2.0, p,
            model->flows + model->phase_offsets[p], &count, NULL));
    }
    return DCP_OK;
}

dcp_status_t
step_model_create(const dcp_time_to_loss_options_t *o, int32_t background_count,
                  double dwell_scale, step_model_t *model)
{
    memset(model, 0, sizeof *model);
    model->options = o;
    dcp_status_t status = dcp_network_create(&o->network, &model->network);
    for (int32_t i = 0; status == DCP_OK && i < background_count; i++) {
        dcp_background_t job = o->background[i];
        job.dwell_s *= dwell_scale;
        status = dcp_network_add_background(model->network, &job);
    }
    if (status == DCP_OK) {
        status = plan_flows(o, model);
    }
    if (status != DCP_OK) {
        step_model_clear(model);
    }
    return status;
}

void
step_model_clear(step_model_t *model)
{
    dcp_network_destroy(model->network);
    dcp_free(model->flows);
    memset(model, 0, sizeof *model);
}

/* One bucket, phase after phase, from start_s. */
static dcp_status_t
move_bucket(step_model_t *model, double start_s, double bytes, double *end_s_p)
{
    double end_s = start_s;
    for (int64_t f = 0; f < model->flow_count; f++) {
        model->scaled[f] = model->flows[f];
        model->scaled[f].bytes *= bytes;
    }
    for (int32_t p = 0; p < model->phase_count; p++) {
        int64_t first = model->phase_offsets[p], id;
        DCP_TRY(dcp_network_run_until(model->network, end_s));
        DCP_TRY(dcp_network_begin(model->network, end_s, model->scaled + first,
                                  model->phase_offsets[p + 1] - first, &id));
        DCP_TRY(dcp_network_wait(model->network, id, &end_s));
    }
    *end_s_p = end_s;
    return DCP_OK;
}

dcp_status_t
step_model_run(step_model_t *model, double start_s, dcp_arm_t arm, step_times_t *times)
{
    const dcp_time_to_loss_options_t *o = model->options;
    int32_t buckets = o->bucket_count > 1 ? o->bucket_count : 1;
    double compute_s = arm.multiple * o->compute_s, done_s = start_s + compute_s;
    double backward_s = buckets > 1 ? o->backward_share * o->compute_s : 0.0;
    double codec_s = step_codec_s(o, arm.precision) / buckets;
    double bytes =
        (double)dcp_precision_bytes(arm.precision, (int64_t)o->parameter_count)
        / buckets;
    double end_s = start_s, move_s = 0;
    for (int32_t i = 0; i < buckets; i++) {
        double ready_s = done_s - backward_s * (1.0 - (i + 1.0) / buckets);
        double from_s = (end_s > ready_s ? end_s : ready_s) + codec_s;
        double now_s = dcp_network_now(model->network);
        from_s = from_s > now_s ? from_s : now_s;
        DCP_TRY(move_bucket(model, from_s, bytes, &end_s));
        move_s += end_s - from_s;
    }
    end_s = (end_s > done_s ? end_s : done_s) + o->optimizer_s;
    *times = (step_times_t){
        .end_s = end_s,
        .step_s = end_s - start_s,
        .compute_s = compute_s,
        .codec_s = codec_s * buckets,
        .move_s = move_s,
        .bytes = step_bytes(o, arm.precision),
    };
    return DCP_OK;
}
