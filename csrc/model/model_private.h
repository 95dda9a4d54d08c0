/* What the files of model/ share: the tensors of a layer, the memory of one pass, and
 * the model itself. */
#ifndef DCP_MODEL_PRIVATE_H
#define DCP_MODEL_PRIVATE_H

#include "dcp/device.h"
#include "dcp/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Tensors of one layer, in model order. X(slot, Hugging Face's name, present where) */
#define DCP_LAYER_SLOT_MAP(X)                                       \
    X(INPUT_NORM, "input_layernorm.weight", true)                   \
    X(Q_WEIGHT, "self_attn.q_proj.weight", true)                    \
    X(Q_BIAS, "self_attn.q_proj.bias", config->attention_bias != 0) \
    X(K_WEIGHT, "self_attn.k_proj.weight", true)                    \
    X(K_BIAS, "self_attn.k_proj.bias", config->attention_bias != 0) \
    X(V_WEIGHT, "self_attn.v_proj.weight", true)                    \
    X(V_BIAS, "self_attn.v_proj.bias", config->attention_bias != 0) \
    X(O_WEIGHT, "self_attn.o_proj.weight", true)                    \
    X(O_BIAS, "self_attn.o_proj.bias", config->attention_bias != 0) \
    X(POST_NORM, "post_attention_layernorm.weight", true)           \
    X(GATE_WEIGHT, "mlp.gate_proj.weight", true)                    \
    X(GATE_BIAS, "mlp.gate_proj.bias", config->mlp_bias != 0)       \
    X(UP_WEIGHT, "mlp.up_proj.weight", true)                        \
    X(UP_BIAS, "mlp.up_proj.bias", config->mlp_bias != 0)           \
    X(DOWN_WEIGHT, "mlp.down_proj.weight", true)                    \
    X(DOWN_BIAS, "mlp.down_proj.bias", config->mlp_bias != 0)

typedef enum dcp_layer_slot {
#define X(slot, name, present) SLOT_##slot,
    DCP_LAYER_SLOT_MAP(X)
#undef X
        SLOT_COUNT,
} dcp_layer_slot_t;

bool dcp_model_slot_present(const dcp_transformer1d_config_t *config,
                            dcp_layer_slot_t slot);

/* A 1-D tensor: a norm's weight or a bias. */
typedef struct dcp_vector {
    int64_t count;               /* 0: the model has none */
    const float *weight;         /* borrowed; NULL: none, or in bf16 */
    const uint16_t *weight_bf16; /* borrowed; read instead */
    float *gradient;             /* borrowed; NULL: not wanted */
    float *rounded; /* of the model's memory, [count]; compute_dtype bf16 */
    bool fresh;     /* `rounded` holds the present weight */
} dcp_vector_t;

/* y = x W^T + bias. W is [out, in], as Hugging Face stores it. */
typedef struct dcp_linear {
    int64_t out, in;
    const float *weight;         /* borrowed; NULL: in bf16 */
    const uint16_t *weight_bf16; /* borrowed; read instead */
    float *dweight;              /* borrowed; NULL: not wanted */
    dcp_vector_t bias;
    void *packed_forward;  /* owned by the model; panels of W^T, NULL: not yet */
    void *packed_backward; /* owned; panels of W */
    bool forward_fresh, backward_fresh; /* the panels hold the present weights */
} dcp_linear_t;

typedef struct dcp_layer {
    dcp_vector_t input_norm, post_norm;
    dcp_linear_t q, k, v, o, gate, up, down;
} dcp_layer_t;

enum { DCP_LINEARS_PER_LAYER = 7, DCP_VECTORS_PER_LAYER = 9 };
void dcp_layer_linears(dcp_layer_t *layer,
                       dcp_linear_t *linears[DCP_LINEARS_PER_LAYER]);
void dcp_layer_vectors(dcp_layer_t *layer,
                       dcp_vector_t *vectors[DCP_VECTORS_PER_LAYER]);
/* A layer with the sizes of its tensors and nothing bound. */
void dcp_layer_set_sizes(const dcp_transformer1d_config_t *config, dcp_layer_t *layer);

/* Device memory of one pass over T tokens; all of it lies in one arena.
 *
 *   inputs | x_0 .. x_L | part | part | ... | norm, dnorm, dx | shared scratch
 *
 * A layer's part is its attention's arrays, then its MLP's (gate, up). With n layers
 * and m MLPs recomputed the parts are: one of layers 0 .. n-1; the attention's of each
 * of layers n .. n+m-1, then one MLP's for all of these; one of each other layer.
 * Forward only, all layers use the same part and x_0 = x_1 = ... The scratch serves,
 * one after the other: the MLP's inner activation; the attention's gradients; a chunk
 * of logits. Every pointer is NULL where `arena` only measures. */
typedef struct dcp_pass {
    int64_t token_count, sequence_count;    /* sequences: without the empty ones */
    int64_t chunk_rows;                     /* rows of logits at once */
    int64_t recompute[DCP_RECOMPUTE_KINDS]; /* n and m; zero forward only */
    bool training;
    const dcp_attention_hook_t *attention; /* or NULL: rows are whole sequences */
    int32_t *tokens, *labels, *positions;  /* [T] */
    int64_t *offsets;                      /* [T + 1], sequence_count + 1 in use */
    int64_t *row_ids;                      /* [T] */
    float *weights;                        /* [T], or NULL: all 1 */
    double *loss;                          /* [1] */
    char *x_base;                          /* x_0 */
    int64_t x_stride;                      /* bytes from one x to the next */
    char *part_base;                       /* first part */
    int64_t attention_bytes, mlp_bytes;    /* of a part's halves */
    float *final_rstd;                     /* [T] */
    float *norm;                           /* [T, h] a norm's output */
    float *dnorm;                          /* [T, h] its gradient; training */
    float *dx;           /* [T, h] gradient of the residual; training */
    float *inner;        /* [T, f], in the scratch */
    float *dattn, *dqkv; /* [T, H D], [T, (H + 2 K) D], in the scratch */
    float *logits;       /* [chunk_rows, V], in the scratch */
    int64_t bytes;       /* of the arena */
} dcp_pass_t;

/* What the forward pass keeps of one layer. */
typedef struct dcp_kept {
    float *x;          /* [T, h] residual at the layer's entry */
    float *x_next;     /* [T, h] at its exit: the next layer's x */
    float *input_rstd; /* [T] */
    float *qkv;        /* [T, (H + 2 K) D], rotated */
    float *attn;       /* [T, H D] */
    float *lse;        /* [H, T] */
    float *x_middle;   /* [T, h] residual between attention and MLP */
    float *post_rstd;  /* [T] */
    float *gate, *up;  /* [T, f] */
} dcp_kept_t;

struct dcp_model {
    dcp_transformer1d_config_t config;
    const dcp_device_ops_t *device; /* borrowed */
    dcp_pool_t *pool;               /* borrowed */
    dcp_queue_t *queue;             /* owned */
    int64_t tensor_count;
    bool bound, trainable;  /* weights are bound; gradients too */
    const float *embedding; /* NULL: in bf16 */
    const uint16_t *embedding_bf16;
    float *dembedding;
    dcp_vector_t final_norm;
    dcp_layer_t *layers; /* owned, [num_hidden_layers] */
    dcp_linear_t head;   /* the embedding where tied */
    void *rounded;       /* owned, device: all vectors'; NULL: compute_dtype fp32 */
    uint16_t *narrow;    /* in it: on the way from a vector to its rounded copy */
    int64_t panel_layer; /* has the packed copies, where only one layer's are kept */
    void *arena;         /* device; owned unless `arena_lent`; NULL: none yet */
    int64_t arena_bytes;
    bool arena_lent;
    dcp_model_hooks_t hooks; /* functions NULL: none */
    float *rope_table;       /* owned, device, [rope_rows, D] */
    int64_t rope_rows;
    void *staging; /* owned, host: what a pass derives from the batch */
    int64_t staging_bytes;
    int64_t promised_bytes; /* most that any pass so far was to hold of what grows:
                               arena, staging, rope table, the pool's scratch */
};

/* Lays out one pass over `token_count` tokens from `arena` (NULL: only measures), with
 * `recompute` counts as in dcp_batch_t (NULL: none; forward only ignores them). Pure:
 * the same arguments on another rank give the same distances from its arena. */
void dcp_pass_layout(const dcp_transformer1d_config_t *config, int64_t token_count,
                     bool training, const int32_t *recompute, char *arena,
                     dcp_pass_t *pass_p);
/* Where layer `layer`'s arrays lie; those of recomputed layers share one place. */
void dcp_pass_kept(const dcp_transformer1d_config_t *config, const dcp_pass_t *pass,
                   int64_t layer, dcp_kept_t *kept_p);
/* Rows of the table of rotary angles that serve sequences of up to `length` tokens. */
int64_t dcp_model_rope_rows(const dcp_transformer1d_config_t *config, int64_t length);
/* Elements from one row of a chunk of logits to the next. */
int64_t dcp_model_logits_stride(const dcp_transformer1d_config_t *config);
int64_t dcp_model_staging_bytes(const dcp_transformer1d_config_t *config,
                                int64_t token_count);
/* Most that a pass holds of what grows with its tokens and is not in the arena. */
int64_t dcp_model_beside_bytes(const dcp_transformer1d_config_t *config,
                               int64_t token_count, int32_t thread_count);

/* Makes the arena, the staging memory and the rope table large enough, lays out the
 * pass and sends the batch to the device. The batch has been checked. */
dcp_status_t dcp_pass_begin(dcp_model_t *model, const dcp_batch_t *batch, bool training,
                            dcp_pass_t *pass_p);

/* The copies that a pass reads instead of the weights: model_copies.c. */
/* Bytes of the rounded 1-D tensors; 0 with compute_dtype fp32. */
int64_t dcp_model_rounded_bytes(const dcp_transformer1d_config_t *config);
dcp_status_t dcp_model_create_rounded(dcp_model_t *model);
void dcp_model_destroy_copies(dcp_model_t *model);
/* What a pass reads of a 1-D tensor, made now where it is stale; NULL where there is
 * none. */
dcp_status_t dcp_vector_values(dcp_model_t *model, dcp_vector_t *vector,
                               const float **values_p);
/* Makes the panels of W^T, or of W, where they are stale. */
dcp_status_t dcp_linear_pack_forward(dcp_model_t *model, dcp_linear_t *linear);
dcp_status_t dcp_linear_pack_backward(dcp_model_t *model, dcp_linear_t *linear);

/* y [T, out] (row stride ldy) = x W^T + bias, or + add. */
dcp_status_t dcp_linear_forward(dcp_model_t *model, dcp_linear_t *linear,
                                int64_t row_count, const float *x, float *y,
                                int64_t ldy, const float *add);
/* dx [T, in] = dy W [+ add]; dy has row stride ld_dy. */
dcp_status_t dcp_linear_backward_input(dcp_model_t *model, dcp_linear_t *linear,
                                       int64_t row_count, const float *dy,
                                       int64_t ld_dy, float *dx, const float *add);
/* dW += dy^T x, dbias += column sums of dy. */
dcp_status_t dcp_linear_backward_weight(dcp_model_t *model, const dcp_linear_t *linear,
                                        int64_t row_count, const float *dy,
                                        int64_t ld_dy, const float *x);

/* Dropout of a residual branch; `place` 0: attention, 1: MLP. out = add + dropout(x).
 */
dcp_status_t dcp_model_dropout(dcp_model_t *model, const dcp_pass_t *pass,
                               uint64_t seed, int64_t layer, int place, const float *x,
                               const float *add, float *out);

/* The attention of one layer over what the pass keeps of it. */
void dcp_model_attention_args(const dcp_model_t *model, const dcp_pass_t *pass,
                              const dcp_kept_t *kept, dcp_attention_args_t *args_p);

/* y = RMSNorm(x). */
dcp_status_t dcp_model_norm(dcp_model_t *model, int64_t row_count, const float *x,
                            dcp_vector_t *weight, float *y, float *rstd);

/* Before and after the use of a group of tensors (dcp_model_hooks_t). */
dcp_status_t dcp_model_enter(dcp_model_t *model, int64_t group, int32_t backward);
dcp_status_t dcp_model_leave(dcp_model_t *model, int64_t group, int32_t backward);

/* What the backward pass of a layer needs and the layers after it have overwritten, if
 * any, computed again from what is left. Uses pass->norm. */
dcp_status_t dcp_model_recompute(dcp_model_t *model, const dcp_pass_t *pass,
                                 uint64_t dropout_seed, int64_t index,
                                 const dcp_kept_t *kept);

/* From tokens to the last layer's residual; then the final norm into pass->norm. */
dcp_status_t dcp_model_run_forward(dcp_model_t *model, const dcp_pass_t *pass,
                                   uint64_t dropout_seed);
/* From pass->dnorm, the gradient of the final norm's output, to all gradients. */
dcp_status_t dcp_model_run_backward(dcp_model_t *model, const dcp_pass_t *pass,
                                    uint64_t dropout_seed);

#endif
