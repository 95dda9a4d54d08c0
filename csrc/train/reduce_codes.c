/* Part 4 of a step where gradients travel in few bits: all groups in one exchange of
 * comm's reducer, and what the codes leave out of them.
 *
 * Residuals lie in a buffer of their own, laid out as the gradients: this rank's own
 * for everything that it sends. A gradient that is not finite on any rank is not sent
 * at all (compute.c has told everybody), so residuals never take one in. Once gradients
 * travel in fp32 again what is left is added to them, and the plain reduction goes on
 * after that. A step without trainable tokens ends in no update, so it takes nothing of
 * residuals; one without feedback adds what is left to this rank's gradients first.
 * Groups that nobody trains are not sent. Cost: 4 bytes a parameter from the first step
 * with feedback on. */
#include "train_private.h"

#include "dcp/alloc.h"

dcp_status_t
dcp_sharded_need_residual(dcp_sharded_t *sharded)
{
    if (sharded->buffers[DCP_SHARDED_GRADIENTS] == NULL || sharded->reduce_layer) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "residuals belong to gradients that are reduced once a step");
    }
    sharded->residual_left = 1; /* the caller may write it */
    return sharded->residual != NULL
               ? DCP_OK
               : dcp_dbuffer_create(sharded->comm, sharded->layout, DCP_DBUFFER_LOCAL,
                                    &sharded->residual);
}

const dcp_dbuffer_t *
dcp_sharded_residual(const dcp_sharded_t *sharded)
{
    return sharded->residual;
}

bool
train_sends_residual(const dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    return sharded->residual != NULL && sharded->residual_left
           && args->trainable_count > 0;
}

bool
train_reduces_codes(const dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    return args->precision != DCP_PRECISION_FP32 || train_sends_residual(sharded, args);
}

int32_t
train_machine_count(const dcp_sharded_t *sharded)
{
    return dcp_comm_size(sharded->comm) / sharded->machine_ranks;
}

dcp_status_t
train_check_precision(const dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    if (dcp_precision_name(args->precision) == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "precision %d is none of dcp_precision_t",
                        (int)args->precision);
    }
    bool once = !sharded->reduce_layer;
    if (!once && args->precision != DCP_PRECISION_FP32) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "precision %s needs gradients that are reduced once a step, "
                        "not by layer",
                        dcp_precision_name(args->precision));
    }
    if (!once && args->statistics) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "statistics need gradients that are reduced once a step, not "
                        "by layer");
    }
    return DCP_OK;
}

static dcp_status_t
need_reducer(dcp_sharded_t *sharded)
{
    return sharded->reducer != NULL
               ? DCP_OK
               : dcp_reducer_create(sharded->comm, sharded->machine_ranks,
                                    &sharded->reducer);
}

/* One segment a group that is trained; counts [groups * ranks]. */
static int64_t
set_segments(const dcp_sharded_t *sharded, bool feedback,
             dcp_reduce_segment_t *segments, int64_t *counts)
{
    const dcp_dbuffer_t *gradients = sharded->buffers[DCP_SHARDED_GRADIENTS];
    float *data = dcp_dbuffer_data(gradients);
    float *residual = feedback ? dcp_dbuffer_data(sharded->residual) : NULL;
    int32_t ranks = dcp_comm_size(sharded->comm);
    int64_t found = 0;
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        dcp_dbuffer_group_t group = dcp_dbuffer_layout_group(sharded->layout, g);
        if (!train_group_is_trained(sharded, g)) {
            continue;
        }
        for (int32_t rank = 0; rank < ranks; rank++) {
            counts[found * ranks + rank] = group.shard;
        }
        segments[found] = (dcp_reduce_segment_t){
            .data = data + group.start,
            .counts = counts + found * ranks,
            .residual = residual != NULL ? residual + group.start : NULL,
            .out = dcp_dbuffer_slice(gradients, g),
            .first = group.start,
        };
        found++;
    }
    return found;
}

static dcp_status_t
make_segments(const dcp_sharded_t *sharded, bool feedback, void **memory_p,
              dcp_reduce_segment_t **segments_p, int64_t *segment_count_p)
{
    int64_t groups = dcp_dbuffer_layout_group_count(sharded->layout);
    int64_t words = groups * dcp_comm_size(sharded->comm);
    DCP_TRY(dcp_alloc(groups * (int64_t)sizeof(dcp_reduce_segment_t)
                          + words * (int64_t)sizeof(int64_t),
                      "segments of a reduction", memory_p));
    *segments_p = *memory_p;
    *segment_count_p =
        set_segments(sharded, feedback, *segments_p, (int64_t *)(*segments_p + groups));
    return DCP_OK;
}

/* What is left goes to this rank's gradients, exactly; no residual then. */
static void
add_residual(dcp_sharded_t *sharded)
{
    float *data = dcp_dbuffer_data(sharded->buffers[DCP_SHARDED_GRADIENTS]);
    float *residual = dcp_dbuffer_data(sharded->residual);
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        dcp_dbuffer_group_t group = dcp_dbuffer_layout_group(sharded->layout, g);
        int64_t end = group.start + dcp_comm_size(sharded->comm) * group.shard;
        if (!train_group_is_trained(sharded, g)) {
            continue;
        }
        for (int64_t i = group.start; i < end; i++) {
            data[i] += residual[i];
            residual[i] = 0.0f;
        }
    }
    sharded->residual_left = 0;
}

dcp_status_t
train_reduce_codes(dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    bool feedback = args->feedback && args->trainable_count > 0;
    if (feedback) {
        DCP_TRY(dcp_sharded_need_residual(sharded));
    }
    DCP_TRY(need_reducer(sharded));
    if (!feedback && train_sends_residual(sharded, args)) {
        add_residual(sharded);
    }
    void *memory;
    dcp_reduce_segment_t *segments;
    int64_t count;
    DCP_TRY(make_segments(sharded, feedback, &memory, &segments, &count));
    dcp_reduce_args_t reduce = {
        .segments = segments,
        .segment_count = count,
        .precision = args->precision,
        .hadamard = args->hadamard,
        .nearest = args->nearest,
        .seed = args->quantise_seed,
        .step = args->step,
    };
    dcp_reduce_result_t result = {0};
    dcp_status_t status =
        dcp_reducer_reduce(sharded->reducer, sharded->pool, &reduce, &result);
    dcp_free(memory);
    if (status != DCP_OK) {
        return status;
    }
    if (feedback) {
        sharded->residual_left = args->precision != DCP_PRECISION_FP32;
    }
    sharded->reduced_bytes += result.received_bytes;
    sharded->reduce_count++;
    sharded->moved = (train_moved_t){
        .codec_ns = result.codec_ns,
        .reduce_ns = result.move_ns,
        .error_squares = result.error_squares,
    };
    return DCP_OK;
}
