/* Owns what one rank needs to train: the layout of the parameters over ranks, two
 * DBuffers (weights, gradients), the model bound to views of them, and an optimizer
 * with the state of this rank's shard (train_optimizer.c).
 *
 * Weights are a SHARED buffer: one copy on a machine, each rank writes its shard.
 * Gradients are PRIVATE: every rank holds a full one (reduce = step), so memory on a
 * machine is 4 bytes a parameter for weights, the optimizer's for its state, and 4 a
 * rank for gradients. Two settings, free of each other, change that:
 *
 *   windows = false: weights are shards of each rank's own (SHARD), whole groups are
 *     gathered (gather.c), whole gradients are LOCAL.
 *   reduce = layer: gradients are a SHARD beside one or two whole groups
 *     (reduce_layer.c).
 */
#include "sequence.h"

#include "dcp/alloc.h"

static dcp_status_t
describe_tensors(dcp_sharded_t *sharded)
{
    void *memory;
    int64_t count = sharded->tensor_count;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(dcp_model_tensor_t), "tensor table",
                            &memory));
    sharded->tensors = memory;
    DCP_TRY(dcp_alloc_zeroed(count, "frozen table", &memory));
    sharded->frozen = memory;
    DCP_TRY(dcp_alloc_zeroed(count, "trained table", &memory));
    sharded->trained = memory;
    for (int64_t i = 0; i < count; i++) {
        DCP_TRY(dcp_model_tensor_get(&sharded->config, i, &sharded->tensors[i]));
    }
    return DCP_OK;
}

dcp_status_t
train_plan_layout(const dcp_model_tensor_t *tensors, int64_t tensor_count,
                  int32_t rank_count, int64_t block_rows,
                  dcp_dbuffer_layout_t **layout_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(tensor_count, (int64_t)sizeof(dcp_dbuffer_tensor_t),
                            "tensor shapes", &memory));
    dcp_dbuffer_tensor_t *shapes = memory;
    for (int64_t i = 0; i < tensor_count; i++) {
        const dcp_model_tensor_t *tensor = &tensors[i];
        /* what may get 8-bit state is cut at its blocks, in every world */
        int64_t width = tensor->dim_count == 2 ? tensor->shape[1] : 1;
        int32_t blocks = width == 1 && tensor->shape[0] >= DCP_OPTIMIZER_8BIT_LEAST;
        shapes[i] = (dcp_dbuffer_tensor_t){
            .row_count = tensor->shape[0],
            .row_width = width,
            .group = tensor->group,
            .block_count = blocks ? DCP_OPTIMIZER_8BIT_BLOCK : 0,
        };
    }
    dcp_status_t status = dcp_dbuffer_layout_create(
        shapes, tensor_count, rank_count, block_rows, DCP_ORDER_MODEL, layout_p);
    dcp_free(shapes);
    return status;
}

static dcp_status_t
create_buffers(dcp_sharded_t *sharded)
{
    dcp_dbuffer_kind_t whole =
        sharded->no_windows ? DCP_DBUFFER_SHARD : DCP_DBUFFER_SHARED;
    dcp_dbuffer_kind_t copies =
        sharded->no_windows ? DCP_DBUFFER_LOCAL : DCP_DBUFFER_PRIVATE;
    const dcp_dbuffer_kind_t kinds[SHARDED_BUFFERS] = {
        [DCP_SHARDED_WEIGHTS] = whole,
        [DCP_SHARDED_GRADIENTS] = sharded->reduce_layer ? DCP_DBUFFER_SHARD : copies,
    };
    int32_t count = sharded->forward_only ? 1 : SHARDED_BUFFERS;
    for (int32_t i = 0; i < count; i++) {
        DCP_TRY(dcp_dbuffer_create(sharded->comm, sharded->layout, kinds[i],
                                   &sharded->buffers[i]));
    }
    DCP_TRY(train_gather_create(sharded));
    return train_reduce_create(sharded);
}

/* Where a pass finds a whole tensor's weights, and where it adds to its gradient. */
static void *
tensor_weights(const dcp_sharded_t *sharded, int64_t tensor)
{
    return dcp_dbuffer_tensor_bytes(
        sharded->no_windows ? sharded->whole : sharded->buffers[DCP_SHARDED_WEIGHTS],
        tensor);
}

static float *
tensor_gradient(const dcp_sharded_t *sharded, int64_t tensor)
{
    int32_t group = sharded->tensors[tensor].group;
    int64_t start = dcp_dbuffer_layout_start(sharded->layout, tensor)
                    - dcp_dbuffer_layout_group(sharded->layout, group).start;
    if (sharded->frozen[tensor]) {
        return NULL;
    }
    return sharded->reduce_layer ? train_group_gradients(sharded, group) + start
                                 : dcp_dbuffer_tensor_data(
                                       sharded->buffers[DCP_SHARDED_GRADIENTS], tensor);
}

static dcp_status_t
bind_model(dcp_sharded_t *sharded)
{
    void *memory;
    int64_t count = sharded->tensor_count;
    bool narrow = sharded->no_windows && sharded->config.compute_dtype == DCP_BF16;
    DCP_TRY(dcp_alloc_zeroed(3 * count * (int64_t)sizeof(void *), "tensor pointers",
                             &memory));
    float **weights = memory, **gradients = weights + count;
    const uint16_t **compute_copies = (const uint16_t **)(gradients + count);
    for (int64_t i = 0; i < count; i++) {
        if (narrow) {
            compute_copies[i] = tensor_weights(sharded, i);
        } else {
            weights[i] = tensor_weights(sharded, i);
        }
        gradients[i] = sharded->forward_only ? NULL : tensor_gradient(sharded, i);
    }
    float **trained = sharded->forward_only ? NULL : gradients;
    dcp_status_t status =
        narrow ? dcp_model_bind_bf16(sharded->model, compute_copies, trained)
               : dcp_model_bind(sharded->model, weights, trained);
    dcp_free(memory);
    return status;
}

static void
initialise_shard(dcp_sharded_t *sharded, uint64_t seed)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(sharded->layout, dcp_comm_rank(sharded->comm), &runs,
                            &run_count);
    const dcp_dbuffer_t *weights = sharded->buffers[DCP_SHARDED_WEIGHTS];
    for (int64_t i = 0; i < run_count; i++) {
        dcp_model_init_run(&sharded->config, runs[i].tensor, seed, runs[i].first,
                           runs[i].count, dcp_dbuffer_run_data(weights, &runs[i]));
    }
}

/* Everything that can fail; the caller destroys what is there on failure. */
static dcp_status_t
fill(dcp_sharded_t *sharded, const dcp_sharded_options_t *options)
{
    int32_t size = dcp_comm_size(sharded->comm);
    void *memory;
    DCP_TRY(
        dcp_alloc_array(size, (int64_t)sizeof(step_record_t), "step records", &memory));
    sharded->records = memory;
    DCP_TRY(
        dcp_alloc_array(size, (int64_t)sizeof(int64_t), "step record counts", &memory));
    sharded->record_counts = memory;
    DCP_TRY(
        dcp_alloc_array(size, (int64_t)sizeof(int64_t), "words of rounds", &memory));
    sharded->round_words = memory;
    for (int32_t i = 0; i < size; i++) {
        sharded->record_counts[i] = (int64_t)(sizeof(step_record_t) / sizeof(int64_t));
    }
    DCP_TRY(describe_tensors(sharded));
    for (int64_t i = 0; i < sharded->tensor_count; i++) {
        sharded->frozen[i] = options->frozen != NULL && options->frozen[i] != 0;
        sharded->trained[i] = !sharded->frozen[i];
    }
    DCP_TRY(train_agree_on_options(sharded, options));
    DCP_TRY(train_plan_layout(sharded->tensors, sharded->tensor_count, size,
                              options->block_rows, &sharded->layout));
    DCP_TRY(create_buffers(sharded));
    DCP_TRY(dcp_model_create(&sharded->config, sharded->device, sharded->pool,
                             &sharded->model));
    DCP_TRY(bind_model(sharded));
    train_set_hooks(sharded);
    if (options->initialise) {
        initialise_shard(sharded, options->seed);
    }
    return dcp_sharded_publish(sharded);
}

dcp_status_t
dcp_sharded_create(dcp_comm_t *comm, const dcp_transformer1d_config_t *config,
                   const dcp_device_ops_t *device, dcp_pool_t *pool,
                   const dcp_sharded_options_t *options, dcp_sharded_t **sharded_p)
{
    DCP_TRY(dcp_transformer1d_check(config));
    if (options->block_rows < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "block_rows %lld must be at least 1",
                        (long long)options->block_rows);
    }
    int32_t size = dcp_comm_size(comm);
    if (options->machine_ranks < 0
        || (options->machine_ranks > 1 && size % options->machine_ranks != 0)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "machine_ranks %d must be at least 1 and divide the %d ranks",
                        (int)options->machine_ranks, (int)size);
    }
    void *memory;
    if (options->gather_step && options->prefetch) {
        return DCP_FAIL(DCP_ERR_ARG, "gather_step keeps what is gathered: there is "
                                     "nothing to prefetch, which must be 0");
    }
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_sharded_t), "sharded model", &memory));
    dcp_sharded_t *sharded = memory;
    sharded->comm = comm;
    sharded->config = *config;
    sharded->device = device;
    sharded->pool = pool;
    sharded->forward_only = options->forward_only != 0;
    sharded->no_windows = options->no_windows != 0;
    sharded->reduce_layer = options->reduce_layer != 0;
    sharded->prefetch = options->prefetch != 0;
    sharded->gather_step = options->gather_step != 0;
    bool has_levels = options->machine_ranks > 1 && options->machine_ranks < size;
    sharded->machine_ranks = has_levels ? options->machine_ranks : 1;
    sharded->tensor_count = dcp_model_tensor_count(config);
    sharded->sequence_kind = options->sequence_kind;
    dcp_status_t status = fill(sharded, options);
    if (status != DCP_OK) {
        dcp_comm_abort(comm, dcp_last_error());
        dcp_sharded_destroy(sharded);
        return status;
    }
    *sharded_p = sharded;
    return DCP_OK;
}

void
dcp_sharded_destroy(dcp_sharded_t *sharded)
{
    if (sharded == NULL) {
        return;
    }
    dcp_optimizer_destroy(sharded->optimizer);
    train_statistics_destroy(sharded->statistics);
    train_factors_destroy(sharded->factors);
    dcp_reducer_destroy(sharded->reducer);
    dcp_dbuffer_destroy(sharded->residual);
    dcp_model_destroy(sharded->model);
    train_reduce_destroy(sharded);
    train_gather_destroy(sharded);
    sequence_pool_destroy(sharded->sequence_pool);
    for (int32_t i = SHARDED_BUFFERS - 1; i >= 0; i--) {
        dcp_dbuffer_destroy(sharded->buffers[i]);
    }
    dcp_dbuffer_layout_destroy(sharded->layout);
    dcp_free(sharded->trained);
    dcp_free(sharded->frozen);
    dcp_free(sharded->tensors);
    dcp_free(sharded->round_words);
    dcp_free(sharded->record_counts);
    dcp_free(sharded->records);
    dcp_free(sharded);
}

dcp_status_t
dcp_sharded_publish(dcp_sharded_t *sharded)
{
    dcp_model_weights_changed(sharded->model);
    train_gather_forget(sharded);
    return dcp_comm_barrier(sharded->comm);
}

const dcp_dbuffer_t *
dcp_sharded_buffer(const dcp_sharded_t *sharded, dcp_sharded_kind_t kind)
{
    return sharded->buffers[kind];
}

const dcp_dbuffer_layout_t *
dcp_sharded_layout(const dcp_sharded_t *sharded)
{
    return sharded->layout;
}

int64_t
dcp_sharded_tensor_count(const dcp_sharded_t *sharded)
{
    return sharded->tensor_count;
}

const dcp_model_tensor_t *
dcp_sharded_tensor(const dcp_sharded_t *sharded, int64_t index)
{
    return &sharded->tensors[index];
}

int32_t
dcp_sharded_is_frozen(const dcp_sharded_t *sharded, int64_t index)
{
    return sharded->frozen[index];
}

dcp_comm_t *
dcp_sharded_comm(const dcp_sharded_t *sharded)
{
    return sharded->comm;
}
