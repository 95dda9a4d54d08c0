/* Transformer1D as an object: creating, binding tensors, checking batches, and the
 * three passes that callers see.
 *
 * The model owns no weights: callers bind a pointer per tensor (views of a shared
 * window, of NumPy arrays) and say when values changed. A pass is: check the batch on
 * the host, send it, run the layers, run the head chunk by chunk, fence. Every pass
 * fences before it returns, also on failure, since the device may still read the
 * borrowed batch. The head never holds more than a chunk of logits: product, cross
 * entropy with its gradient in place, and both gradient products follow each other for
 * a few thousand rows. */
#include "model_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LABEL_IGNORED = -100 };

dcp_status_t
dcp_model_create(const dcp_transformer1d_config_t *config,
                 const dcp_device_ops_t *device, dcp_pool_t *pool,
                 dcp_model_t **model_p)
{
    void *memory;
    dcp_status_t status = dcp_transformer1d_check(config);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_alloc_zeroed((int64_t)sizeof(dcp_model_t), "model", &memory);
    if (status != DCP_OK) {
        return status;
    }
    dcp_model_t *model = memory;
    model->config = *config;
    model->device = device;
    model->pool = pool;
    model->tensor_count = dcp_model_tensor_count(config);
    status = dcp_alloc_array(config->num_hidden_layers, (int64_t)sizeof(dcp_layer_t),
                             "model layers", &memory);
    if (status != DCP_OK) {
        goto err_model;
    }
    model->layers = memory;
    memset(model->layers, 0, (size_t)config->num_hidden_layers * sizeof(dcp_layer_t));
    for (int64_t i = 0; i < config->num_hidden_layers; i++) {
        dcp_layer_set_sizes(config, &model->layers[i]);
    }
    model->head = (dcp_linear_t){.out = config->vocab_size, .in = config->hidden_size};
    model->final_norm = (dcp_vector_t){.count = config->hidden_size};
    status = device->queue_create(pool, &model->queue);
    if (status != DCP_OK) {
        goto err_layers;
    }
    status = dcp_model_create_rounded(model);
    if (status != DCP_OK) {
        goto err_queue;
    }
    *model_p = model;
    return DCP_OK;

err_queue:
    device->queue_destroy(model->queue);
err_layers:
    dcp_free(model->layers);
err_model:
    dcp_free(model);
    return status;
}

void
dcp_model_destroy(dcp_model_t *model)
{
    if (model == NULL) {
        return;
    }
    dcp_model_destroy_copies(model);
    dcp_model_set_arena(model, NULL, 0);
    model->device->free(model->queue, model->rope_table);
    model->device->queue_destroy(model->queue);
    dcp_free(model->staging);
    dcp_free(model->layers);
    dcp_free(model);
}

void
dcp_model_set_hooks(dcp_model_t *model, const dcp_model_hooks_t *hooks)
{
    model->hooks = hooks != NULL ? *hooks : (dcp_model_hooks_t){0};
}

dcp_status_t
dcp_model_enter(dcp_model_t *model, int64_t group, int32_t backward)
{
    const dcp_model_hooks_t *hooks = &model->hooks;
    return hooks->enter != NULL
               ? hooks->enter(hooks->state, model->queue, (int32_t)group, backward)
               : DCP_OK;
}

dcp_status_t
dcp_model_leave(dcp_model_t *model, int64_t group, int32_t backward)
{
    const dcp_model_hooks_t *hooks = &model->hooks;
    return hooks->leave != NULL
               ? hooks->leave(hooks->state, model->queue, (int32_t)group, backward)
               : DCP_OK;
}

dcp_status_t
dcp_model_walk(dcp_model_t *model, int32_t training)
{
    int64_t last = 1 + model->config.num_hidden_layers;
    for (int64_t group = 0; group <= last; group++) {
        DCP_TRY(dcp_model_enter(model, group, 0));
        if (group < last || !training) {
            DCP_TRY(dcp_model_leave(model, group, 0));
        }
    }
    for (int64_t group = last; training && group >= 0; group--) {
        if (group < last) {
            DCP_TRY(dcp_model_enter(model, group, 1));
        }
        DCP_TRY(dcp_model_leave(model, group, 1));
    }
    return DCP_OK;
}

void
dcp_model_set_arena(dcp_model_t *model, void *arena, int64_t bytes)
{
    if (!model->arena_lent) {
        model->device->free(model->queue, model->arena);
    }
    model->arena = arena;
    model->arena_bytes = bytes;
    model->arena_lent = arena != NULL;
}

/* Hands out the pointers of bind in model order. */
typedef struct cursor {
    float *const *weights;               /* or NULL */
    const uint16_t *const *weights_bf16; /* or NULL */
    float *const *gradients;             /* or NULL */
    int64_t next;
} cursor_t;

static void
take_tensor(cursor_t *cursor, const float **weight, const uint16_t **weight_bf16,
            float **gradient)
{
    int64_t i = cursor->next++;
    *weight = cursor->weights != NULL ? cursor->weights[i] : NULL;
    *weight_bf16 = cursor->weights_bf16 != NULL ? cursor->weights_bf16[i] : NULL;
    *gradient = cursor->gradients != NULL ? cursor->gradients[i] : NULL;
}

static void
take_vector(cursor_t *cursor, dcp_vector_t *vector)
{
    if (vector->count > 0) {
        take_tensor(cursor, &vector->weight, &vector->weight_bf16, &vector->gradient);
    }
}

static void
take_linear(cursor_t *cursor, dcp_linear_t *linear)
{
    take_tensor(cursor, &linear->weight, &linear->weight_bf16, &linear->dweight);
    take_vector(cursor, &linear->bias);
}

static dcp_status_t
bind(dcp_model_t *model, cursor_t cursor)
{
    const dcp_transformer1d_config_t *config = &model->config;
    for (int64_t i = 0; i < model->tensor_count; i++) {
        if (cursor.weights != NULL ? cursor.weights[i] == NULL
                                   : cursor.weights_bf16[i] == NULL) {
            dcp_model_tensor_t tensor;
            DCP_TRY(dcp_model_tensor_get(config, i, &tensor));
            return DCP_FAIL(DCP_ERR_ARG, "weights[%" PRId64 "] (%s) must not be NULL",
                            i, tensor.name);
        }
    }
    take_tensor(&cursor, &model->embedding, &model->embedding_bf16, &model->dembedding);
    for (int64_t i = 0; i < config->num_hidden_layers; i++) {
        dcp_layer_t *layer = &model->layers[i];
        take_vector(&cursor, &layer->input_norm);
        take_linear(&cursor, &layer->q);
        take_linear(&cursor, &layer->k);
        take_linear(&cursor, &layer->v);
        take_linear(&cursor, &layer->o);
        take_vector(&cursor, &layer->post_norm);
        take_linear(&cursor, &layer->gate);
        take_linear(&cursor, &layer->up);
        take_linear(&cursor, &layer->down);
    }
    take_vector(&cursor, &model->final_norm);
    if (config->tie_word_embeddings) {
        model->head.weight = model->embedding;
        model->head.weight_bf16 = model->embedding_bf16;
        model->head.dweight = model->dembedding;
    } else {
        take_linear(&cursor, &model->head);
    }
    model->bound = true;
    model->trainable = cursor.gradients != NULL;
    dcp_model_weights_changed(model);
    return DCP_OK;
}

dcp_status_t
dcp_model_bind(dcp_model_t *model, float *const *weights, float *const *gradients)
{
    return bind(model, (cursor_t){.weights = weights, .gradients = gradients});
}

dcp_status_t
dcp_model_bind_bf16(dcp_model_t *model, const uint16_t *const *weights,
                    float *const *gradients)
{
    if (model->config.compute_dtype != DCP_BF16) {
        return DCP_FAIL(
            DCP_ERR_STATE,
            "weights in bf16 need compute_dtype bfloat16, this model's is %s",
            dcp_dtype_name(model->config.compute_dtype));
    }
    return bind(model, (cursor_t){.weights_bf16 = weights, .gradients = gradients});
}

static dcp_status_t
check_offsets(const dcp_transformer1d_config_t *config, const dcp_batch_t *batch)
{
    const int64_t *offsets = batch->offsets;
    if (offsets[0] != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "offsets[0] %" PRId64 " must be 0", offsets[0]);
    }
    for (int64_t s = 0; s < batch->sequence_count; s++) {
        int64_t length = offsets[s + 1] - offsets[s];
        if (length < 0) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "offsets[%" PRId64 "] %" PRId64
                            " must not be less than the one before, %" PRId64,
                            s + 1, offsets[s + 1], offsets[s]);
        }
        if (length > config->max_position_embeddings) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "sequence %" PRId64 " has %" PRId64
                            " tokens, more than max_position_embeddings %" PRId64,
                            s, length, config->max_position_embeddings);
        }
    }
    if (offsets[batch->sequence_count] != batch->token_count) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "the last offset %" PRId64
                        " must be the number of tokens %" PRId64,
                        offsets[batch->sequence_count], batch->token_count);
    }
    return DCP_OK;
}

/* Everything that could be wrong with a batch, before anything runs; counts the tokens
 * that are trained on. */
static dcp_status_t
check_batch(const dcp_model_t *model, const dcp_batch_t *batch, bool labelled,
            int64_t *trained_count_p)
{
    int64_t vocab = model->config.vocab_size, trained_count = 0;
    if (!model->bound) {
        return DCP_FAIL(DCP_ERR_STATE, "the model has no weights: bind them first");
    }
    if (batch->token_count < 0 || batch->sequence_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "token_count %" PRId64 " and sequence_count %" PRId64
                        " must not be negative",
                        batch->token_count, batch->sequence_count);
    }
    if (batch->offsets == NULL
        || (batch->token_count > 0
            && (batch->tokens == NULL || (labelled && batch->labels == NULL)))) {
        return DCP_FAIL(DCP_ERR_ARG, "%s of the batch must not be NULL",
                        batch->offsets == NULL  ? "offsets"
                        : batch->tokens == NULL ? "tokens"
                                                : "labels");
    }
    DCP_TRY(check_offsets(&model->config, batch));
    for (int64_t t = 0; t < batch->token_count; t++) {
        int32_t token = batch->tokens[t];
        if (token < 0 || token >= vocab) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "tokens[%" PRId64 "] %" PRId32 " must lie in 0..%" PRId64
                            " (vocab_size)",
                            t, token, vocab - 1);
        }
    }
    for (int64_t t = 0; labelled && t < batch->token_count; t++) {
        int32_t label = batch->labels[t];
        if (label != LABEL_IGNORED && (label < 0 || label >= vocab)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "labels[%" PRId64 "] %" PRId32
                            " must be -100 or lie in 0..%" PRId64 " (vocab_size)",
                            t, label, vocab - 1);
        }
        trained_count += label >= 0;
    }
    *trained_count_p = trained_count;
    return DCP_OK;
}

/* Waits for everything that was queued. Keeps the first failure and its message; after
 * one nobody knows which panels were packed. */
static dcp_status_t
finish(dcp_model_t *model, dcp_status_t status)
{
    char message[1024];
    if (status == DCP_OK) {
        status = model->device->fence(model->queue);
    } else {
        snprintf(message, sizeof message, "%s", dcp_last_error());
        (void)model->device->fence(model->queue);
        dcp_set_last_error(message);
    }
    if (status != DCP_OK) {
        dcp_model_weights_changed(model);
    }
    return status;
}

/* Rows [first, first + count) of the head: loss, and for training the gradients. */
static dcp_status_t
head_chunk(dcp_model_t *model, const dcp_pass_t *pass, double scale, int64_t first,
           int64_t count)
{
    int64_t h = model->config.hidden_size;
    int64_t stride = dcp_model_logits_stride(&model->config);
    const float *x = pass->norm + first * h;
    DCP_TRY(
        dcp_linear_forward(model, &model->head, count, x, pass->logits, stride, NULL));
    DCP_TRY(model->device->cross_entropy(
        model->queue, &(dcp_cross_entropy_args_t){.rows = count,
                                                  .vocab = model->config.vocab_size,
                                                  .logits = pass->logits,
                                                  .logits_stride = stride,
                                                  .labels = pass->labels + first,
                                                  .weights = pass->weights != NULL
                                                                 ? pass->weights + first
                                                                 : NULL,
                                                  .scale = scale,
                                                  .gradient = pass->training,
                                                  .loss_p = pass->loss}));
    if (!pass->training) {
        return DCP_OK;
    }
    DCP_TRY(dcp_linear_backward_weight(model, &model->head, count, pass->logits, stride,
                                       x));
    return dcp_linear_backward_input(model, &model->head, count, pass->logits, stride,
                                     pass->dnorm + first * h, NULL);
}

/* The head over all rows; chunks without a trained token have no loss and no gradient
 * and are passed over. */
static dcp_status_t
run_head(dcp_model_t *model, const dcp_pass_t *pass, const dcp_batch_t *batch)
{
    int64_t h = model->config.hidden_size;
    DCP_TRY(model->device->zero(
        model->queue,
        &(dcp_zero_args_t){.bytes = (int64_t)sizeof(double), .x = pass->loss}));
    for (int64_t first = 0; first < pass->token_count; first += pass->chunk_rows) {
        int64_t left = pass->token_count - first;
        int64_t count = left < pass->chunk_rows ? left : pass->chunk_rows;
        bool trained = false;
        for (int64_t t = first; t < first + count && !trained; t++) {
            trained = batch->labels[t] >= 0;
        }
        if (trained) {
            DCP_TRY(head_chunk(model, pass, batch->scale, first, count));
        } else if (pass->training) {
            DCP_TRY(model->device->zero(
                model->queue,
                &(dcp_zero_args_t){.bytes = count * h * (int64_t)sizeof(float),
                                   .x = pass->dnorm + first * h}));
        }
    }
    return DCP_OK;
}

/* What of a pass may fail once the batch is known to be good. */
static dcp_status_t
run_loss(dcp_model_t *model, const dcp_batch_t *batch, bool training, double *loss)
{
    dcp_pass_t pass;
    DCP_TRY(dcp_pass_begin(model, batch, training, &pass));
    DCP_TRY(dcp_model_run_forward(model, &pass, batch->dropout_seed));
    DCP_TRY(run_head(model, &pass, batch));
    if (training) {
        DCP_TRY(dcp_model_run_backward(model, &pass, batch->dropout_seed));
    } else {
        DCP_TRY(dcp_model_leave(model, 1 + model->config.num_hidden_layers, 0));
    }
    return model->device->copy(model->queue, loss, pass.loss, (int64_t)sizeof(double));
}

static dcp_status_t
pass_loss(dcp_model_t *model, const dcp_batch_t *batch, bool training, double *loss_p)
{
    int64_t trained_count = 0;
    DCP_TRY(check_batch(model, batch, true, &trained_count));
    DCP_TRY(dcp_transformer1d_check_recompute(&model->config, batch->recompute));
    if (batch->token_count == 0 && batch->attention == NULL) {
        return dcp_model_walk(model, training);
    }
    bool joined = batch->attention != NULL || model->hooks.enter != NULL;
    if (trained_count == 0 && !joined) {
        return DCP_OK;
    }
    double loss = 0;
    DCP_TRY(finish(model, run_loss(model, batch, training, &loss)));
    *loss_p += loss;
    return DCP_OK;
}

dcp_status_t
dcp_model_forward_backward(dcp_model_t *model, const dcp_batch_t *batch, double *loss_p)
{
    if (model->bound && !model->trainable) {
        return DCP_FAIL(
            DCP_ERR_STATE,
            "the model has no gradients: bind them, or ask for the loss only");
    }
    return pass_loss(model, batch, true, loss_p);
}

dcp_status_t
dcp_model_loss(dcp_model_t *model, const dcp_batch_t *batch, double *loss_p)
{
    return pass_loss(model, batch, false, loss_p);
}

static dcp_status_t
run_logits(dcp_model_t *model, const dcp_batch_t *batch, float *logits)
{
    dcp_pass_t pass;
    int64_t h = model->config.hidden_size, vocab = model->config.vocab_size;
    dcp_batch_t unlabelled = *batch;
    unlabelled.labels = NULL;
    unlabelled.weights = NULL;
    DCP_TRY(dcp_pass_begin(model, &unlabelled, false, &pass));
    DCP_TRY(dcp_model_run_forward(model, &pass, 0));
    for (int64_t first = 0; first < pass.token_count; first += pass.chunk_rows) {
        int64_t left = pass.token_count - first;
        int64_t count = left < pass.chunk_rows ? left : pass.chunk_rows;
        DCP_TRY(dcp_linear_forward(model, &model->head, count, pass.norm + first * h,
                                   pass.logits, vocab, NULL));
        DCP_TRY(model->device->copy(model->queue, logits + first * vocab, pass.logits,
                                    count * vocab * (int64_t)sizeof(float)));
    }
    return dcp_model_leave(model, 1 + model->config.num_hidden_layers, 0);
}

dcp_status_t
dcp_model_logits(dcp_model_t *model, const dcp_batch_t *batch, float *logits)
{
    int64_t unused = 0;
    DCP_TRY(check_batch(model, batch, false, &unused));
    if (batch->token_count == 0) {
        return dcp_model_walk(model, 0);
    }
    return finish(model, run_logits(model, batch, logits));
}
