/* Which tensors a Transformer1D has, under which names and shapes, what its sizes must
 * obey, and the initial values.
 *
 * Names and shapes are Hugging Face's for LlamaForCausalLM, so that a checkpoint needs
 * no table of translations. Initial values are a pure function of (seed, tensor,
 * element): element e is lane e % 4 of Philox block e / 4 under the seed, so that any
 * rank can fill any range and all worlds start alike. */
#include "model_private.h"

#include "dcp/rng.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double TWO_PI = 6.283185307179586;

/* Sizes stay far below what could overflow a product of two of them. */
static const int64_t SIZE_LIMIT = INT32_MAX;
static const int64_t HEAD_DIM_LIMIT = 256; /* of the attention kernels */

static const char *const slot_names[SLOT_COUNT] = {
#define X(slot, name, present) [SLOT_##slot] = (name),
    DCP_LAYER_SLOT_MAP(X)
#undef X
};

bool
dcp_model_slot_present(const dcp_transformer1d_config_t *config, dcp_layer_slot_t slot)
{
    switch (slot) {
#define X(slot, name, present) \
    case SLOT_##slot:          \
        return (present);
        DCP_LAYER_SLOT_MAP(X)
#undef X
    case SLOT_COUNT:
        break;
    }
    return false;
}

static dcp_status_t
check_size(const char *key, int64_t value)
{
    if (value < 1 || value > SIZE_LIMIT) {
        return DCP_FAIL(DCP_ERR_ARG, "%s %" PRId64 " must lie in 1..%" PRId64, key,
                        value, SIZE_LIMIT);
    }
    return DCP_OK;
}

static dcp_status_t
check_flag(const char *key, int32_t value)
{
    if (value != 0 && value != 1) {
        return DCP_FAIL(DCP_ERR_ARG, "%s %" PRId32 " must be 0 or 1", key, value);
    }
    return DCP_OK;
}

static dcp_status_t
check_heads(const dcp_transformer1d_config_t *config)
{
    if (config->hidden_size % config->num_attention_heads != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "num_attention_heads %" PRId64
                        " must divide hidden_size %" PRId64,
                        config->num_attention_heads, config->hidden_size);
    }
    if (config->num_attention_heads % config->num_key_value_heads != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "num_key_value_heads %" PRId64
                        " must divide num_attention_heads %" PRId64,
                        config->num_key_value_heads, config->num_attention_heads);
    }
    if (config->head_dim % 2 != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "head_dim %" PRId64
                        " must be even: rotary positions turn pairs of elements",
                        config->head_dim);
    }
    if (config->head_dim > HEAD_DIM_LIMIT) {
        return DCP_FAIL(DCP_ERR_UNSUPPORTED,
                        "head_dim %" PRId64 ": attention supports at most %" PRId64,
                        config->head_dim, HEAD_DIM_LIMIT);
    }
    return check_size("num_attention_heads x head_dim",
                      config->num_attention_heads * config->head_dim);
}

dcp_status_t
dcp_transformer1d_check(const dcp_transformer1d_config_t *config)
{
    DCP_TRY(check_size("vocab_size", config->vocab_size));
    DCP_TRY(check_size("hidden_size", config->hidden_size));
    DCP_TRY(check_size("intermediate_size", config->intermediate_size));
    DCP_TRY(check_size("num_hidden_layers", config->num_hidden_layers));
    DCP_TRY(check_size("num_attention_heads", config->num_attention_heads));
    DCP_TRY(check_size("num_key_value_heads", config->num_key_value_heads));
    DCP_TRY(check_size("head_dim", config->head_dim));
    DCP_TRY(check_size("max_position_embeddings", config->max_position_embeddings));
    DCP_TRY(check_heads(config));
    DCP_TRY(check_flag("tie_word_embeddings", config->tie_word_embeddings));
    DCP_TRY(check_flag("attention_bias", config->attention_bias));
    DCP_TRY(check_flag("mlp_bias", config->mlp_bias));
    if (!(config->rope_theta > 0) || isinf(config->rope_theta)) {
        return DCP_FAIL(DCP_ERR_ARG, "rope_theta %g must be a positive number",
                        config->rope_theta);
    }
    if (!(config->rms_norm_eps > 0) || !(config->rms_norm_eps < 1)) {
        return DCP_FAIL(DCP_ERR_ARG, "rms_norm_eps %g must lie between 0 and 1",
                        config->rms_norm_eps);
    }
    if (!(config->dropout >= 0) || !(config->dropout < 1)) {
        return DCP_FAIL(DCP_ERR_ARG, "dropout %g must be at least 0 and below 1",
                        config->dropout);
    }
    if (config->compute_dtype != DCP_F32 && config->compute_dtype != DCP_BF16) {
        return DCP_FAIL(DCP_ERR_ARG, "compute_dtype %s must be float32 or bfloat16",
                        dcp_dtype_name(config->compute_dtype));
    }
    if (!(config->initializer_range >= 0) || !(config->initializer_range <= 1)) {
        return DCP_FAIL(DCP_ERR_ARG, "initializer_range %g must lie in 0..1",
                        config->initializer_range);
    }
    return DCP_OK;
}

dcp_status_t
dcp_transformer1d_check_recompute(const dcp_transformer1d_config_t *config,
                                  const int32_t *recompute)
{
    int64_t layers = recompute[DCP_RECOMPUTE_LAYER];
    int64_t mlps = recompute[DCP_RECOMPUTE_MLP];
    if (layers < 0 || mlps < 0 || layers + mlps > config->num_hidden_layers) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "recompute = {layer: %" PRId64 ", mlp: %" PRId64
                        "} must be counts >= 0 of at most %" PRId64 " layers together",
                        layers, mlps, config->num_hidden_layers);
    }
    return DCP_OK;
}

static int64_t
layer_tensor_count(const dcp_transformer1d_config_t *config)
{
    int64_t count = 0;
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        count += dcp_model_slot_present(config, (dcp_layer_slot_t)slot);
    }
    return count;
}

int64_t
dcp_model_tensor_count(const dcp_transformer1d_config_t *config)
{
    return 1 + config->num_hidden_layers * layer_tensor_count(config) + 1
           + (config->tie_word_embeddings == 0);
}

static void
set_shape(dcp_model_tensor_t *tensor, int64_t rows, int64_t columns)
{
    tensor->dim_count = columns > 0 ? 2 : 1;
    tensor->shape[0] = rows;
    tensor->shape[1] = columns > 0 ? columns : 1;
}

static void
set_slot_shape(const dcp_transformer1d_config_t *config, dcp_layer_slot_t slot,
               dcp_model_tensor_t *tensor)
{
    int64_t h = config->hidden_size, f = config->intermediate_size;
    int64_t q = config->num_attention_heads * config->head_dim;
    int64_t kv = config->num_key_value_heads * config->head_dim;
    switch (slot) {
    case SLOT_INPUT_NORM:
    case SLOT_POST_NORM:
    case SLOT_O_BIAS:
    case SLOT_DOWN_BIAS:
        set_shape(tensor, h, 0);
        break;
    case SLOT_Q_WEIGHT:
        set_shape(tensor, q, h);
        break;
    case SLOT_Q_BIAS:
        set_shape(tensor, q, 0);
        break;
    case SLOT_K_WEIGHT:
    case SLOT_V_WEIGHT:
        set_shape(tensor, kv, h);
        break;
    case SLOT_K_BIAS:
    case SLOT_V_BIAS:
        set_shape(tensor, kv, 0);
        break;
    case SLOT_O_WEIGHT:
        set_shape(tensor, h, q);
        break;
    case SLOT_GATE_WEIGHT:
    case SLOT_UP_WEIGHT:
        set_shape(tensor, f, h);
        break;
    case SLOT_GATE_BIAS:
    case SLOT_UP_BIAS:
        set_shape(tensor, f, 0);
        break;
    case SLOT_DOWN_WEIGHT:
        set_shape(tensor, h, f);
        break;
    case SLOT_COUNT:
        break;
    }
}

/* Which slot of a layer its `nth` tensor is. */
static dcp_layer_slot_t
nth_slot(const dcp_transformer1d_config_t *config, int64_t nth)
{
    int slot = 0;
    for (;; slot++) {
        if (dcp_model_slot_present(config, (dcp_layer_slot_t)slot) && nth-- == 0) {
            return (dcp_layer_slot_t)slot;
        }
    }
}

dcp_status_t
dcp_model_tensor_get(const dcp_transformer1d_config_t *config, int64_t index,
                     dcp_model_tensor_t *tensor_p)
{
    int64_t count = dcp_model_tensor_count(config);
    if (index < 0 || index >= count) {
        return DCP_FAIL(DCP_ERR_ARG, "tensor %" PRId64 " must lie in 0..%" PRId64,
                        index, count - 1);
    }
    dcp_model_tensor_t tensor = {0};
    int64_t per_layer = layer_tensor_count(config);
    int64_t layers = config->num_hidden_layers;
    if (index == 0) {
        set_shape(&tensor, config->vocab_size, config->hidden_size);
        snprintf(tensor.name, sizeof tensor.name, "model.embed_tokens.weight");
        snprintf(tensor.group_name, sizeof tensor.group_name, "model.embed_tokens");
    } else if (index <= layers * per_layer) {
        int64_t layer = (index - 1) / per_layer;
        dcp_layer_slot_t slot = nth_slot(config, (index - 1) % per_layer);
        set_slot_shape(config, slot, &tensor);
        tensor.group = (int32_t)(1 + layer);
        snprintf(tensor.name, sizeof tensor.name, "model.layers.%" PRId64 ".%s", layer,
                 slot_names[slot]);
        snprintf(tensor.group_name, sizeof tensor.group_name, "model.layers.%" PRId64,
                 layer);
    } else {
        bool head = index == layers * per_layer + 2;
        set_shape(&tensor, head ? config->vocab_size : config->hidden_size,
                  head ? config->hidden_size : 0);
        tensor.group = (int32_t)(1 + layers);
        snprintf(tensor.name, sizeof tensor.name, "%s",
                 head ? "lm_head.weight" : "model.norm.weight");
        snprintf(tensor.group_name, sizeof tensor.group_name, "model.norm");
    }
    *tensor_p = tensor;
    return DCP_OK;
}

/* Standard deviation of a tensor's initial values: 0 for biases, -1 for norm weights,
 * which are 1. What adds to the residual starts smaller by sqrt(2 layers), so that the
 * residual's variance does not grow with depth (GPT-2, Radford et al. 2019). */
static double
initial_deviation(const dcp_transformer1d_config_t *config, int64_t index)
{
    int64_t per_layer = layer_tensor_count(config);
    int64_t layers = config->num_hidden_layers;
    if (index == 0 || index == layers * per_layer + 2) {
        return config->initializer_range;
    }
    if (index == layers * per_layer + 1) {
        return -1;
    }
    switch (nth_slot(config, (index - 1) % per_layer)) {
    case SLOT_INPUT_NORM:
    case SLOT_POST_NORM:
        return -1;
    case SLOT_O_WEIGHT:
    case SLOT_DOWN_WEIGHT:
        return config->initializer_range / sqrt(2.0 * (double)layers);
    case SLOT_Q_WEIGHT:
    case SLOT_K_WEIGHT:
    case SLOT_V_WEIGHT:
    case SLOT_GATE_WEIGHT:
    case SLOT_UP_WEIGHT:
        return config->initializer_range;
    default:
        return 0;
    }
}

/* Four standard normal numbers from one Philox block (Box-Muller). */
static void
normal_block(uint64_t seed, int64_t index, uint64_t block, double out[4])
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32),
                                 (uint32_t)index, 0x696e6974u /* "init" */};
    uint32_t words[4];
    dcp_philox(key, counter, words);
    for (int pair = 0; pair < 4; pair += 2) {
        double u = ((double)words[pair] + 0.5) / 4294967296.0;
        double angle = TWO_PI * ((double)words[pair + 1] + 0.5) / 4294967296.0;
        double radius = sqrt(-2 * log(u));
        out[pair] = radius * cos(angle);
        out[pair + 1] = radius * sin(angle);
    }
}

void
dcp_model_init_run(const dcp_transformer1d_config_t *config, int64_t index,
                   uint64_t seed, int64_t first, int64_t count, float *out)
{
    double deviation = initial_deviation(config, index);
    if (deviation <= 0) {
        for (int64_t i = 0; i < count; i++) {
            out[i] = deviation < 0 ? 1.0f : 0.0f;
        }
        return;
    }
    double normals[4];
    for (int64_t i = 0; i < count; i++) {
        int64_t element = first + i;
        if (i == 0 || element % 4 == 0) {
            normal_block(seed, index, (uint64_t)element / 4, normals);
        }
        out[i] = (float)(deviation * normals[element % 4]);
    }
}
