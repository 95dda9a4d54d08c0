/* Forward pass of Transformer1D, and the linear layers of both directions.
 *
 *   x_i -> RMSNorm -> q,k,v -> rotary -> attention -> o -> (dropout) -> + x_i =
 * x_middle x_middle -> RMSNorm -> gate, up -> SwiGLU -> down -> (dropout) -> + x_middle
 * = x_i+1
 *
 * A recomputed layer runs the same steps once more from x_i, up to gate and up, which
 * is all that its backward pass reads; a recomputed MLP from x_middle. They are the
 * same calls on the same values, so every bit is the same.
 *
 * q, k and v share one buffer [T, (H + 2 K) D]: three products write it side by side,
 * rotary positions turn q and k in one call, attention reads it with strides. Residual
 * additions happen in the products. */
#include "model_private.h"

#include <math.h>

dcp_status_t
dcp_linear_forward(dcp_model_t *model, dcp_linear_t *linear, int64_t row_count,
                   const float *x, float *y, int64_t ldy, const float *add)
{
    const float *bias;
    DCP_TRY(dcp_linear_pack_forward(model, linear));
    DCP_TRY(dcp_vector_values(model, &linear->bias, &bias));
    return model->device->gemm(
        model->queue, &(dcp_gemm_args_t){.m = row_count,
                                         .n = linear->out,
                                         .k = linear->in,
                                         .a = x,
                                         .lda = linear->in,
                                         .b_packed = linear->packed_forward,
                                         .c = y,
                                         .ldc = ldy,
                                         .add = add,
                                         .ld_add = linear->out,
                                         .bias = bias,
                                         .trans_b = 1,
                                         .compute = model->config.compute_dtype});
}

dcp_status_t
dcp_linear_backward_input(dcp_model_t *model, dcp_linear_t *linear, int64_t row_count,
                          const float *dy, int64_t ld_dy, float *dx, const float *add)
{
    DCP_TRY(dcp_linear_pack_backward(model, linear));
    return model->device->gemm(
        model->queue, &(dcp_gemm_args_t){.m = row_count,
                                         .n = linear->in,
                                         .k = linear->out,
                                         .a = dy,
                                         .lda = ld_dy,
                                         .b_packed = linear->packed_backward,
                                         .c = dx,
                                         .ldc = linear->in,
                                         .add = add,
                                         .ld_add = linear->in,
                                         .compute = model->config.compute_dtype});
}

dcp_status_t
dcp_linear_backward_weight(dcp_model_t *model, const dcp_linear_t *linear,
                           int64_t row_count, const float *dy, int64_t ld_dy,
                           const float *x)
{
    if (linear->dweight != NULL) {
        DCP_TRY(model->device->gemm(
            model->queue, &(dcp_gemm_args_t){.m = linear->out,
                                             .n = linear->in,
                                             .k = row_count,
                                             .a = dy,
                                             .lda = ld_dy,
                                             .trans_a = 1,
                                             .b = x,
                                             .ldb = linear->in,
                                             .c = linear->dweight,
                                             .ldc = linear->in,
                                             .accumulate = 1,
                                             .compute = model->config.compute_dtype}));
    }
    if (linear->bias.gradient != NULL) {
        DCP_TRY(model->device->column_sum(
            model->queue, &(dcp_column_sum_args_t){.rows = row_count,
                                                   .width = linear->out,
                                                   .x = dy,
                                                   .x_stride = ld_dy,
                                                   .out = linear->bias.gradient}));
    }
    return DCP_OK;
}

dcp_status_t
dcp_model_dropout(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed,
                  int64_t layer, int place, const float *x, const float *add,
                  float *out)
{
    return model->device->dropout(
        model->queue,
        &(dcp_dropout_args_t){.rows = pass->token_count,
                              .width = model->config.hidden_size,
                              .x = x,
                              .add = add,
                              .row_ids = pass->row_ids,
                              .seed = seed,
                              .site = 2 * (uint64_t)layer + (uint64_t)place,
                              .p = (float)model->config.dropout,
                              .out = out});
}

dcp_status_t
dcp_model_norm(dcp_model_t *model, int64_t row_count, const float *x,
               dcp_vector_t *weight, float *y, float *rstd)
{
    const float *values;
    DCP_TRY(dcp_vector_values(model, weight, &values));
    return model->device->norm(
        model->queue, &(dcp_norm_args_t){.kind = DCP_NORM_RMS,
                                         .rows = row_count,
                                         .width = model->config.hidden_size,
                                         .x = x,
                                         .weight = values,
                                         .eps = (float)model->config.rms_norm_eps,
                                         .y = y,
                                         .rstd = rstd});
}

/* out = add + dropout(x W^T + bias): the end of a residual branch. */
static dcp_status_t
branch_end(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed, int64_t layer,
           int place, dcp_linear_t *linear, const float *x, const float *add,
           float *out)
{
    int64_t h = model->config.hidden_size, rows = pass->token_count;
    if (!pass->training || model->config.dropout <= 0) {
        return dcp_linear_forward(model, linear, rows, x, out, h, add);
    }
    DCP_TRY(dcp_linear_forward(model, linear, rows, x, pass->norm, h, NULL));
    return dcp_model_dropout(model, pass, seed, layer, place, pass->norm, add, out);
}

static dcp_status_t
forward_attention(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed,
                  int64_t index, const dcp_kept_t *kept)
{
    const dcp_transformer1d_config_t *config = &model->config;
    dcp_layer_t *layer = &model->layers[index];
    int64_t rows = pass->token_count, d = config->head_dim;
    int64_t heads = config->num_attention_heads, kv_heads = config->num_key_value_heads;
    int64_t stride = (heads + 2 * kv_heads) * d;
    float *k = kept->qkv + heads * d, *v = k + kv_heads * d;
    DCP_TRY(dcp_model_norm(model, rows, kept->x, &layer->input_norm, pass->norm,
                           kept->input_rstd));
    DCP_TRY(dcp_linear_forward(model, &layer->q, rows, pass->norm, kept->qkv, stride,
                               NULL));
    DCP_TRY(dcp_linear_forward(model, &layer->k, rows, pass->norm, k, stride, NULL));
    DCP_TRY(dcp_linear_forward(model, &layer->v, rows, pass->norm, v, stride, NULL));
    DCP_TRY(model->device->rope(model->queue,
                                &(dcp_rope_args_t){.rows = rows,
                                                   .heads = heads + kv_heads,
                                                   .head_dim = d,
                                                   .x = kept->qkv,
                                                   .x_stride = stride,
                                                   .positions = pass->positions,
                                                   .table = model->rope_table}));
    dcp_attention_args_t attention;
    dcp_model_attention_args(model, pass, kept, &attention);
    DCP_TRY(pass->attention != NULL
                ? pass->attention->forward(pass->attention->state, model->queue, index,
                                           &attention)
                : model->device->attention(model->queue, &attention));
    return branch_end(model, pass, seed, index, 0, &layer->o, kept->attn, kept->x,
                      kept->x_middle);
}

/* Gate and up. */
static dcp_status_t
forward_inner(dcp_model_t *model, const dcp_pass_t *pass, int64_t index,
              const dcp_kept_t *kept)
{
    dcp_layer_t *layer = &model->layers[index];
    int64_t rows = pass->token_count, f = model->config.intermediate_size;
    DCP_TRY(dcp_model_norm(model, rows, kept->x_middle, &layer->post_norm, pass->norm,
                           kept->post_rstd));
    DCP_TRY(
        dcp_linear_forward(model, &layer->gate, rows, pass->norm, kept->gate, f, NULL));
    return dcp_linear_forward(model, &layer->up, rows, pass->norm, kept->up, f, NULL);
}

static dcp_status_t
forward_mlp(dcp_model_t *model, const dcp_pass_t *pass, uint64_t seed, int64_t index,
            const dcp_kept_t *kept)
{
    dcp_layer_t *layer = &model->layers[index];
    int64_t rows = pass->token_count, f = model->config.intermediate_size;
    DCP_TRY(forward_inner(model, pass, index, kept));
    DCP_TRY(
        model->device->swiglu(model->queue, &(dcp_swiglu_args_t){.rows = rows,
                                                                 .width = f,
                                                                 .gate = kept->gate,
                                                                 .up = kept->up,
                                                                 .gate_stride = f,
                                                                 .up_stride = f,
                                                                 .out = pass->inner}));
    return branch_end(model, pass, seed, index, 1, &layer->down, pass->inner,
                      kept->x_middle, kept->x_next);
}

void
dcp_model_attention_args(const dcp_model_t *model, const dcp_pass_t *pass,
                         const dcp_kept_t *kept, dcp_attention_args_t *args_p)
{
    int64_t d = model->config.head_dim;
    int64_t heads = model->config.num_attention_heads;
    int64_t kv_heads = model->config.num_key_value_heads;
    int64_t stride = (heads + 2 * kv_heads) * d;
    *args_p = (dcp_attention_args_t){.q = kept->qkv,
                                     .k = kept->qkv + heads * d,
                                     .v = kept->qkv + (heads + kv_heads) * d,
                                     .q_stride = stride,
                                     .k_stride = stride,
                                     .v_stride = stride,
                                     .out_stride = heads * d,
                                     .offsets = pass->offsets,
                                     .offsets_64 = 1,
                                     .causal = 1,
                                     .sequence_count = pass->sequence_count,
                                     .query_rows = pass->token_count,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = d,
                                     .scale = (float)(1 / sqrt((double)d)),
                                     .out = kept->attn,
                                     .lse = kept->lse,
                                     .compute = model->config.compute_dtype};
}

dcp_status_t
dcp_model_recompute(dcp_model_t *model, const dcp_pass_t *pass, uint64_t dropout_seed,
                    int64_t index, const dcp_kept_t *kept)
{
    int64_t layers = pass->recompute[DCP_RECOMPUTE_LAYER];
    int64_t mlps_end = layers + pass->recompute[DCP_RECOMPUTE_MLP];
    bool whole = index < layers - 1;
    if (whole) {
        DCP_TRY(forward_attention(model, pass, dropout_seed, index, kept));
    }
    return whole || (index >= layers && index < mlps_end - 1)
               ? forward_inner(model, pass, index, kept)
               : DCP_OK;
}

dcp_status_t
dcp_model_run_forward(dcp_model_t *model, const dcp_pass_t *pass, uint64_t dropout_seed)
{
    const dcp_transformer1d_config_t *config = &model->config;
    dcp_kept_t kept;
    dcp_pass_kept(config, pass, 0, &kept);
    DCP_TRY(dcp_model_enter(model, 0, 0));
    DCP_TRY(model->device->embedding(
        model->queue,
        &(dcp_embedding_args_t){.rows = pass->token_count,
                                .width = config->hidden_size,
                                .vocab = config->vocab_size,
                                .tokens = pass->tokens,
                                .weight = model->embedding,
                                .out = kept.x,
                                .weight_bf16 = model->embedding_bf16,
                                .round = config->compute_dtype == DCP_BF16}));
    DCP_TRY(dcp_model_leave(model, 0, 0));
    for (int64_t i = 0; i < config->num_hidden_layers; i++) {
        dcp_pass_kept(config, pass, i, &kept);
        DCP_TRY(dcp_model_enter(model, 1 + i, 0));
        DCP_TRY(forward_attention(model, pass, dropout_seed, i, &kept));
        DCP_TRY(forward_mlp(model, pass, dropout_seed, i, &kept));
        DCP_TRY(dcp_model_leave(model, 1 + i, 0));
    }
    DCP_TRY(dcp_model_enter(model, 1 + config->num_hidden_layers, 0));
    return dcp_model_norm(model, pass->token_count, kept.x_next, &model->final_norm,
                          pass->norm, pass->final_rstd);
}
