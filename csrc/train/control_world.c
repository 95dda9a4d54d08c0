/* The world that a controller sees while training: its observations are those of
 * statistics.c, its decisions rank 0's.
 *
 * All ranks run the same state machine on the same observations, so all come to rank
 * 0's decision themselves; a rank that does not (its processor's exp rounds otherwise)
 * takes it over, state included (dcp_controller_step), and one that decides for another
 * step ends the run. Only codec times could differ, so rank 0 measures these once, at
 * the first observation, on a sample, as the step quantised, and tells them. */
#include "train_private.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"
#include "dcp/kernels.h"

#include <inttypes.h>

enum { CODEC_ELEMENTS = 1 << 18, CODEC_ROUNDS = 3 };

/* Best of a few: quantising and decoding `count` elements. */
static dcp_status_t
time_codec(const dcp_sharded_t *sharded, dcp_precision_t precision, const float *x,
           float *out, void *codes, int64_t count, int64_t *best_ns_p)
{
    dcp_pool_t *pool = sharded->pool;
    *best_ns_p = INT64_MAX;
    for (int round = 0; round < CODEC_ROUNDS; round++) {
        int64_t start = dcp_clock_ns();
        DCP_TRY(dcp_cpu_quantise(pool, &(dcp_quantise_args_t){
                                           .count = count,
                                           .x = x,
                                           .codes = codes,
                                           .precision = precision,
                                           .hadamard = sharded->hadamard,
                                           .nearest = sharded->nearest,
                                       }));
        DCP_TRY(dcp_cpu_dequantise(pool, &(dcp_dequantise_args_t){
                                             .count = count,
                                             .codes = codes,
                                             .precision = precision,
                                             .hadamard = sharded->hadamard,
                                             .accumulate = 1,
                                             .out = out,
                                         }));
        int64_t ns = dcp_clock_ns() - start;
        *best_ns_p = ns < *best_ns_p ? ns : *best_ns_p;
    }
    return DCP_OK;
}

/* Seconds for what this rank sends and receives of gradients, of each precision. */
static dcp_status_t
measure_codecs(const dcp_sharded_t *sharded, double *codec_s)
{
    int64_t count = CODEC_ELEMENTS;
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(3 * count * (int64_t)sizeof(float), "codec", &memory));
    float *x = memory, *out = x + count;
    for (int64_t i = 0; i < count; i++) {
        x[i] = (float)((i * 2654435761u) % 1000) * 1e-3f - 0.5f;
    }
    double sent = 0;
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        if (train_group_is_trained(sharded, g)) {
            sent += (double)(train_machine_count(sharded) - 1)
                    * (double)dcp_dbuffer_layout_group(sharded->layout, g).shard;
        }
    }
    dcp_status_t status = DCP_OK;
    codec_s[DCP_PRECISION_FP32] = 0.0;
    for (int q = DCP_PRECISION_BF16; q < DCP_PRECISION_COUNT && status == DCP_OK; q++) {
        int64_t ns;
        status =
            time_codec(sharded, (dcp_precision_t)q, x, out, out + count, count, &ns);
        codec_s[q] = (double)ns * 1e-9 * sent / (double)count;
    }
    dcp_free(memory);
    return status;
}

static dcp_status_t
calibrate(dcp_sharded_t *sharded)
{
    if (sharded->codec_known) {
        return DCP_OK;
    }
    if (dcp_comm_rank(sharded->comm) == 0) {
        DCP_TRY(measure_codecs(sharded, sharded->codec_s));
    }
    DCP_TRY(dcp_comm_broadcast(sharded->comm, sharded->codec_s, DCP_PRECISION_COUNT,
                               DCP_F64, 0));
    sharded->codec_known = 1;
    return DCP_OK;
}

static dcp_status_t
observe(void *context, dcp_observation_t *observation_p)
{
    dcp_sharded_t *sharded = context;
    if (!sharded->has_observation) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "there is no observation: the latest step was none, or ran "
                        "without statistics");
    }
    DCP_TRY(calibrate(sharded));
    *observation_p = sharded->observation;
    return DCP_OK;
}

static dcp_status_t
apply(void *context, dcp_decision_t *decision_p)
{
    dcp_sharded_t *sharded = context;
    int64_t own_step = decision_p->step;
    DCP_TRY(dcp_comm_broadcast(sharded->comm, decision_p, (int64_t)sizeof *decision_p,
                               DCP_U8, 0));
    if (decision_p->step != own_step) {
        dcp_status_t status =
            DCP_FAIL(DCP_ERR_MISMATCH,
                     "rank 0 decides for step %" PRId64 ", rank %d for step %" PRId64,
                     decision_p->step, (int)dcp_comm_rank(sharded->comm), own_step);
        dcp_comm_abort(sharded->comm, dcp_last_error()); /* rank 0 does not know */
        return status;
    }
    return DCP_OK;
}

/* Codes go between machines; fp32 is summed as it lies, over all ranks. */
static double
reduce_bytes(void *context, dcp_precision_t precision)
{
    const dcp_sharded_t *sharded = context;
    double peers = precision == DCP_PRECISION_FP32 ? dcp_comm_size(sharded->comm) - 1
                                                   : train_machine_count(sharded) - 1;
    double sum = 0;
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        int64_t shard = dcp_dbuffer_layout_group(sharded->layout, g).shard;
        sum += train_group_is_trained(sharded, g)
                   ? peers * (double)dcp_precision_bytes(precision, shard)
                   : 0.0;
    }
    return sum;
}

/* In fp32 every group is a call, unless it is read in windows; codes are one exchange,
 * and with two levels each group is summed within machines first, which is not counted:
 * no link is crossed. */
static double
reduce_calls(void *context, dcp_precision_t precision)
{
    const dcp_sharded_t *sharded = context;
    if (precision != DCP_PRECISION_FP32) {
        return train_machine_count(sharded) > 1;
    }
    double calls = 0;
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        calls += sharded->no_windows && train_group_is_trained(sharded, g);
    }
    return calls;
}

static double
codec_seconds(void *context, dcp_precision_t precision)
{
    const dcp_sharded_t *sharded = context;
    return sharded->codec_s[precision];
}

dcp_status_t
dcp_sharded_control_world(dcp_sharded_t *sharded, dcp_control_world_t *world_p)
{
    *world_p = (dcp_control_world_t){
        .context = sharded,
        .observe = observe,
        .apply = apply,
        .reduce_bytes = reduce_bytes,
        .reduce_calls = reduce_calls,
        .codec_s = codec_seconds,
    };
    return DCP_OK;
}

dcp_status_t
dcp_sharded_note_step(dcp_sharded_t *sharded, dcp_arm_t arm, double step_s)
{
    /* the slowest rank's time: all wait for it at the end anyway, but for the data that
     * it asked for before */
    DCP_TRY(dcp_comm_allreduce(sharded->comm, &step_s, &sharded->observation.step_s, 1,
                               DCP_F64, DCP_MAX));
    sharded->observation.arm = arm;
    return DCP_OK;
}
