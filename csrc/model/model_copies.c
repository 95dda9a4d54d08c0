/* What a pass reads of the weights, which belong to the caller: copies that are made
 * when they are first needed and kept until the weights change.
 *
 * A matrix is read as panels, packed at most twice between two changes: for y = x W^T
 * and for dx = dy W. With compute_dtype bf16 the panels are bf16 (half the bytes), and
 * every other weight is read rounded as well: embedding rows by the operation that
 * looks them up, 1-D tensors from rounded fp32 copies made here. So what a pass
 * computes does not depend on whether the caller's weights lie in fp32 or were rounded
 * already. Each vector has a place of its own (they are few thousand numbers); panels
 * of all layers share one set where group_changed says that only one layer's are kept.
 * All copies are made in queue order. */
#include "model_private.h"

void
dcp_layer_linears(dcp_layer_t *layer, dcp_linear_t *linears[DCP_LINEARS_PER_LAYER])
{
    linears[0] = &layer->q;
    linears[1] = &layer->k;
    linears[2] = &layer->v;
    linears[3] = &layer->o;
    linears[4] = &layer->gate;
    linears[5] = &layer->up;
    linears[6] = &layer->down;
}

void
dcp_layer_vectors(dcp_layer_t *layer, dcp_vector_t *vectors[DCP_VECTORS_PER_LAYER])
{
    dcp_linear_t *linears[DCP_LINEARS_PER_LAYER];
    dcp_layer_linears(layer, linears);
    for (int j = 0; j < DCP_LINEARS_PER_LAYER; j++) {
        vectors[j] = &linears[j]->bias;
    }
    vectors[DCP_LINEARS_PER_LAYER] = &layer->input_norm;
    vectors[DCP_LINEARS_PER_LAYER + 1] = &layer->post_norm;
}

static dcp_linear_t
linear_of(int64_t out, int64_t in, int32_t has_bias)
{
    return (dcp_linear_t){.out = out, .in = in, .bias = {.count = has_bias ? out : 0}};
}

void
dcp_layer_set_sizes(const dcp_transformer1d_config_t *config, dcp_layer_t *layer)
{
    int64_t h = config->hidden_size, f = config->intermediate_size;
    int64_t q = config->num_attention_heads * config->head_dim;
    int64_t kv = config->num_key_value_heads * config->head_dim;
    int32_t attention_bias = config->attention_bias, mlp_bias = config->mlp_bias;
    *layer = (dcp_layer_t){
        .input_norm = {.count = h},
        .post_norm = {.count = h},
        .q = linear_of(q, h, attention_bias),
        .k = linear_of(kv, h, attention_bias),
        .v = linear_of(kv, h, attention_bias),
        .o = linear_of(h, q, attention_bias),
        .gate = linear_of(f, h, mlp_bias),
        .up = linear_of(f, h, mlp_bias),
        .down = linear_of(h, f, mlp_bias),
    };
}

/* Elements of all vectors, and of the longest. */
static int64_t
vector_elements(const dcp_transformer1d_config_t *config, int64_t *longest_p)
{
    dcp_layer_t layer;
    dcp_vector_t *vectors[DCP_VECTORS_PER_LAYER];
    int64_t all = 0, longest = config->hidden_size;
    dcp_layer_set_sizes(config, &layer);
    dcp_layer_vectors(&layer, vectors);
    for (int j = 0; j < DCP_VECTORS_PER_LAYER; j++) {
        all += vectors[j]->count;
        longest = longest > vectors[j]->count ? longest : vectors[j]->count;
    }
    *longest_p = longest;
    return config->num_hidden_layers * all + config->hidden_size;
}

int64_t
dcp_model_rounded_bytes(const dcp_transformer1d_config_t *config)
{
    int64_t longest;
    int64_t all = vector_elements(config, &longest);
    return config->compute_dtype == DCP_BF16
               ? all * (int64_t)sizeof(float) + longest * (int64_t)sizeof(uint16_t)
               : 0;
}

dcp_status_t
dcp_model_create_rounded(dcp_model_t *model)
{
    const dcp_transformer1d_config_t *config = &model->config;
    int64_t bytes = dcp_model_rounded_bytes(config);
    if (bytes == 0) {
        return DCP_OK;
    }
    DCP_TRY(model->device->alloc(model->queue, bytes, "rounded norm weights and biases",
                                 &model->rounded));
    float *next = model->rounded;
    for (int64_t i = 0; i < config->num_hidden_layers; i++) {
        dcp_vector_t *vectors[DCP_VECTORS_PER_LAYER];
        dcp_layer_vectors(&model->layers[i], vectors);
        for (int j = 0; j < DCP_VECTORS_PER_LAYER; j++) {
            vectors[j]->rounded = next;
            next += vectors[j]->count;
        }
    }
    model->final_norm.rounded = next;
    model->narrow = (uint16_t *)(next + config->hidden_size);
    return DCP_OK;
}

static void
free_panels(dcp_model_t *model, dcp_linear_t *linear)
{
    model->device->free(model->queue, linear->packed_forward);
    model->device->free(model->queue, linear->packed_backward);
}

void
dcp_model_destroy_copies(dcp_model_t *model)
{
    dcp_linear_t *linears[DCP_LINEARS_PER_LAYER];
    for (int64_t i = 0; i < model->config.num_hidden_layers; i++) {
        dcp_layer_linears(&model->layers[i], linears);
        for (int j = 0; j < DCP_LINEARS_PER_LAYER; j++) {
            free_panels(model, linears[j]);
        }
    }
    free_panels(model, &model->head);
    model->device->free(model->queue, model->rounded);
}

dcp_status_t
dcp_vector_values(dcp_model_t *model, dcp_vector_t *vector, const float **values_p)
{
    const uint16_t *narrow = vector->weight_bf16;
    if (vector->rounded == NULL || vector->count == 0) {
        *values_p = vector->weight;
        return DCP_OK;
    }
    if (!vector->fresh && narrow == NULL) {
        DCP_TRY(
            model->device->cast(model->queue, &(dcp_cast_args_t){.count = vector->count,
                                                                 .x = vector->weight,
                                                                 .out = model->narrow,
                                                                 .from = DCP_F32,
                                                                 .to = DCP_BF16}));
        narrow = model->narrow;
    }
    if (!vector->fresh) {
        DCP_TRY(
            model->device->cast(model->queue, &(dcp_cast_args_t){.count = vector->count,
                                                                 .x = narrow,
                                                                 .out = vector->rounded,
                                                                 .from = DCP_BF16,
                                                                 .to = DCP_F32}));
        vector->fresh = true;
    }
    *values_p = vector->rounded;
    return DCP_OK;
}

/* Panels of op(weight), made again in place where they are stale. */
static dcp_status_t
pack(dcp_model_t *model, dcp_gemm_pack_args_t args, void **packed, bool *fresh)
{
    if (*fresh) {
        return DCP_OK;
    }
    args.compute = model->config.compute_dtype;
    if (*packed == NULL) {
        DCP_TRY(model->device->alloc(
            model->queue, model->device->gemm_pack_bytes(args.n, args.k, args.compute),
            "packed weight", packed));
    }
    args.packed = *packed;
    DCP_TRY(model->device->gemm_pack(model->queue, &args));
    *fresh = true;
    return DCP_OK;
}

dcp_status_t
dcp_linear_pack_forward(dcp_model_t *model, dcp_linear_t *linear)
{
    return pack(model,
                (dcp_gemm_pack_args_t){.n = linear->out,
                                       .k = linear->in,
                                       .b = linear->weight,
                                       .b_bf16 = linear->weight_bf16,
                                       .ldb = linear->in,
                                       .trans_b = 1},
                &linear->packed_forward, &linear->forward_fresh);
}

dcp_status_t
dcp_linear_pack_backward(dcp_model_t *model, dcp_linear_t *linear)
{
    return pack(model,
                (dcp_gemm_pack_args_t){.n = linear->in,
                                       .k = linear->out,
                                       .b = linear->weight,
                                       .b_bf16 = linear->weight_bf16,
                                       .ldb = linear->in},
                &linear->packed_backward, &linear->backward_fresh);
}

static void
forget_panels(dcp_linear_t *linear)
{
    linear->forward_fresh = linear->backward_fresh = false;
}

static void
forget_layer(dcp_layer_t *layer)
{
    dcp_linear_t *linears[DCP_LINEARS_PER_LAYER];
    dcp_vector_t *vectors[DCP_VECTORS_PER_LAYER];
    dcp_layer_linears(layer, linears);
    for (int j = 0; j < DCP_LINEARS_PER_LAYER; j++) {
        forget_panels(linears[j]);
    }
    dcp_layer_vectors(layer, vectors);
    for (int j = 0; j < DCP_VECTORS_PER_LAYER; j++) {
        vectors[j]->fresh = false;
    }
}

void
dcp_model_weights_changed(dcp_model_t *model)
{
    for (int64_t i = 0; i < model->config.num_hidden_layers; i++) {
        forget_layer(&model->layers[i]);
    }
    forget_panels(&model->head);
    model->final_norm.fresh = false;
}

/* The panels of layer `layer` lie from now on where those of `panel_layer` lay. */
static void
move_panels(dcp_model_t *model, int64_t layer)
{
    dcp_linear_t *own[DCP_LINEARS_PER_LAYER], *other[DCP_LINEARS_PER_LAYER];
    dcp_layer_linears(&model->layers[layer], own);
    dcp_layer_linears(&model->layers[model->panel_layer], other);
    for (int j = 0; j < DCP_LINEARS_PER_LAYER && layer != model->panel_layer; j++) {
        void *forward = own[j]->packed_forward, *backward = own[j]->packed_backward;
        own[j]->packed_forward = other[j]->packed_forward;
        own[j]->packed_backward = other[j]->packed_backward;
        other[j]->packed_forward = forward;
        other[j]->packed_backward = backward;
        forget_panels(other[j]);
    }
    model->panel_layer = layer;
}

void
dcp_model_group_changed(dcp_model_t *model, int32_t group)
{
    int64_t layers = model->config.num_hidden_layers, layer = (int64_t)group - 1;
    if (layer >= 0 && layer < layers) {
        move_panels(model, layer);
        forget_layer(&model->layers[layer]);
        return;
    }
    if ((layer < 0) == (model->config.tie_word_embeddings != 0)) {
        forget_panels(&model->head);
    }
    if (layer == layers) {
        model->final_norm.fresh = false;
    }
}
