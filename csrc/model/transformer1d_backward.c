/* Backward pass of Transformer1D: the forward pass read backwards, layer by layer.
 *
 * pass->dx holds the gradient of the residual and changes in place. Gradients of gate
 * and up replace gate and up; SwiGLU's output and both norms' outputs are computed
 * again where a weight gradient needs them (cheap against the products, and they need
 * not be kept), and layers that dropped more are first computed again. Weight gradients
 * accumulate into the caller's tensors. */
#include "model_private.h"

/* The gradient behind a residual branch's dropout: dx itself where there is none, else
 * pass->norm. */
static dcp_status_t
branch_gradient(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed,
                int64_t layer, int place, const float **gradient_p)
{
    if (model->config.dropout <= 0) {
        *gradient_p = pass->dx;
        return DCP_OK;
    }
    *gradient_p = pass->norm;
    return dcp_model_dropout(model, pass, seed, layer, place, pass->dx, NULL,
                             pass->norm);
}

/* dx += gradient through the norm whose output's gradient is pass->dnorm. */
static dcp_status_t
backward_norm(dcp_model_t *model, const dcp_pass_t *pass, const float *x,
              dcp_vector_t *weight, const float *rstd, bool first)
{
    const float *values;
    DCP_TRY(dcp_vector_values(model, weight, &values));
    return model->device->norm_backward(
        model->queue, &(dcp_norm_backward_args_t){.kind = DCP_NORM_RMS,
                                                  .rows = pass->token_count,
                                                  .width = model->config.hidden_size,
                                                  .dy = pass->dnorm,
                                                  .x = x,
                                                  .weight = values,
                                                  .rstd = rstd,
                                                  .add = first ? NULL : pass->dx,
                                                  .dx = pass->dx,
                                                  .dweight = weight->gradient});
}

static dcp_status_t
backward_mlp(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed, int64_t index,
             const dcp_kept_t *kept)
{
    dcp_layer_t *layer = &model->layers[index];
    int64_t rows = pass->token_count, h = model->config.hidden_size;
    int64_t f = model->config.intermediate_size;
    const float *dy;
    DCP_TRY(branch_gradient(model, pass, seed, index, 1, &dy));
    DCP_TRY(
        dcp_linear_backward_input(model, &layer->down, rows, dy, h, pass->inner, NULL));
    DCP_TRY(model->device->swiglu_backward(
        model->queue, &(dcp_swiglu_backward_args_t){.rows = rows,
                                                    .width = f,
                                                    .dout = pass->inner,
                                                    .gate = kept->gate,
                                                    .up = kept->up,
                                                    .gate_stride = f,
                                                    .up_stride = f,
                                                    .dgate = kept->gate,
                                                    .dup = kept->up,
                                                    .dgate_stride = f,
                                                    .dup_stride = f,
                                                    .out = pass->inner}));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->down, rows, dy, h, pass->inner));
    DCP_TRY(dcp_model_norm(model, rows, kept->x_middle, &layer->post_norm, pass->norm,
                           kept->post_rstd));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->gate, rows, kept->gate, f,
                                       pass->norm));
    DCP_TRY(
        dcp_linear_backward_weight(model, &layer->up, rows, kept->up, f, pass->norm));
    DCP_TRY(dcp_linear_backward_input(model, &layer->gate, rows, kept->gate, f,
                                      pass->dnorm, NULL));
    DCP_TRY(dcp_linear_backward_input(model, &layer->up, rows, kept->up, f, pass->dnorm,
                                      pass->dnorm));
    return backward_norm(model, pass, kept->x_middle, &layer->post_norm,
                         kept->post_rstd, false);
}

/* From dqkv, the gradient of the attention's inputs before rotation, to q, k, v's
 * weights and pass->dnorm. */
static dcp_status_t
backward_qkv(dcp_model_t *model, const dcp_pass_t *pass, dcp_layer_t *layer,
             const dcp_kept_t *kept)
{
    int64_t rows = pass->token_count, d = model->config.head_dim;
    int64_t heads = model->config.num_attention_heads;
    int64_t kv_heads = model->config.num_key_value_heads;
    int64_t stride = (heads + 2 * kv_heads) * d;
    const float *dk = pass->dqkv + heads * d, *dv = dk + kv_heads * d;
    DCP_TRY(dcp_model_norm(model, rows, kept->x, &layer->input_norm, pass->norm,
                           kept->input_rstd));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->q, rows, pass->dqkv, stride,
                                       pass->norm));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->k, rows, dk, stride, pass->norm));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->v, rows, dv, stride, pass->norm));
    DCP_TRY(dcp_linear_backward_input(model, &layer->q, rows, pass->dqkv, stride,
                                      pass->dnorm, NULL));
    DCP_TRY(dcp_linear_backward_input(model, &layer->k, rows, dk, stride, pass->dnorm,
                                      pass->dnorm));
    return dcp_linear_backward_input(model, &layer->v, rows, dv, stride, pass->dnorm,
                                     pass->dnorm);
}

static dcp_status_t
backward_attention(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed,
                   int64_t index, const dcp_kept_t *kept)
{
    dcp_layer_t *layer = &model->layers[index];
    int64_t rows = pass->token_count, d = model->config.head_dim;
    int64_t heads = model->config.num_attention_heads;
    int64_t kv_heads = model->config.num_key_value_heads;
    int64_t stride = (heads + 2 * kv_heads) * d;
    const float *dy;
    DCP_TRY(branch_gradient(model, pass, seed, index, 0, &dy));
    DCP_TRY(dcp_linear_backward_weight(model, &layer->o, rows, dy,
                                       model->config.hidden_size, kept->attn));
    DCP_TRY(dcp_linear_backward_input(model, &layer->o, rows, dy,
                                      model->config.hidden_size, pass->dattn, NULL));
    dcp_attention_backward_args_t args = {.dout = pass->dattn,
                                          .dout_stride = heads * d,
                                          .dq = pass->dqkv,
                                          .dk = pass->dqkv + heads * d,
                                          .dv = pass->dqkv + (heads + kv_heads) * d,
                                          .dq_stride = stride,
                                          .dk_stride = stride,
                                          .dv_stride = stride,
                                          .key_rows = rows};
    dcp_model_attention_args(model, pass, kept, &args.forward);
    DCP_TRY(pass->attention != NULL
                ? pass->attention->backward(pass->attention->state, model->queue, index,
                                            &args)
                : model->device->attention_backward(model->queue, &args));
    DCP_TRY(model->device->rope(model->queue,
                                &(dcp_rope_args_t){.rows = rows,
                                                   .heads = heads + kv_heads,
                                                   .head_dim = d,
                                                   .x = pass->dqkv,
                                                   .x_stride = stride,
                                                   .positions = pass->positions,
                                                   .table = model->rope_table,
                                                   .inverse = 1}));
    DCP_TRY(backward_qkv(model, pass, layer, kept));
    return backward_norm(model, pass, kept->x, &layer->input_norm, kept->input_rstd,
                         false);
}

dcp_status_t
dcp_model_run_backward(dcp_model_t *model, const dcp_pass_t *pass,
                       uint64_t dropout_seed)
{
    const dcp_transformer1d_config_t *config = &model->config;
    dcp_kept_t kept;
    dcp_pass_kept(config, pass, config->num_hidden_layers - 1, &kept);
    DCP_TRY(backward_norm(model, pass, kept.x_next, &model->final_norm,
                          pass->final_rstd, true));
    DCP_TRY(dcp_model_leave(model, 1 + config->num_hidden_layers, 1));
    for (int64_t i = config->num_hidden_layers - 1; i >= 0; i--) {
        dcp_pass_kept(config, pass, i, &kept);
        DCP_TRY(dcp_model_enter(model, 1 + i, 1));
        DCP_TRY(dcp_model_recompute(model, pass, dropout_seed, i, &kept));
        DCP_TRY(backward_mlp(model, pass, dropout_seed, i, &kept));
        DCP_TRY(backward_attention(model, pass, dropout_seed, i, &kept));
        DCP_TRY(dcp_model_leave(model, 1 + i, 1));
    }
    DCP_TRY(dcp_model_enter(model, 0, 1));
    if (model->dembedding != NULL) {
        DCP_TRY(model->device->embedding_backward(
            model->queue,
            &(dcp_embedding_backward_args_t){.rows = pass->token_count,
                                             .width = config->hidden_size,
                                             .vocab = config->vocab_size,
                                             .tokens = pass->tokens,
                                             .dout = pass->dx,
                                             .dweight = model->dembedding}));
    }
    return dcp_model_leave(model, 0, 1);
}
