/* Transformer1D: the Llama family (RMSNorm, rotary positions, grouped-query attention,
 * SwiGLU), forward and backward over a table of device operations. Weights and
 * gradients belong to the caller, who binds pointers per tensor.
 */
#ifndef DCP_MODEL_H
#define DCP_MODEL_H

#include "dcp/device.h"
#include "dcp/dtype.h"
#include "dcp/recompute.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_transformer1d_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
    int64_t max_position_embeddings;
    double rope_theta;
    double rms_norm_eps;
    int32_t tie_word_embeddings, attention_bias, mlp_bias;
    double dropout;           /* on both residual branches, 0 <= p < 1 */
    double initializer_range; /* standard deviation of the initial weights */
    /* DCP_F32, or DCP_BF16: a pass reads every weight rounded to bf16, products take
     * bf16 factors (ops.h); activations, sums, gradients and main weights stay fp32 */
    dcp_dtype_t compute_dtype;
} dcp_transformer1d_config_t;

typedef struct dcp_model_tensor {
    char name[96];     /* Hugging Face's name */
    int32_t dim_count; /* 1 or 2 */
    int64_t shape[2];
    int32_t group; /* embedding; one a layer; final norm and head */
    char group_name[64];
} dcp_model_tensor_t;

typedef struct dcp_model dcp_model_t;

/* Attention over more than this rank's rows: computes what the device's attention would
 * for a rank that held every row of the group. args are those of this rank's rows
 * alone, with its row strides; offsets in them mean nothing. Called once a layer in
 * each direction, and once more where a layer is computed again; must leave its results
 * complete in queue order. */
typedef struct dcp_attention_hook {
    void *state;
    dcp_status_t (*forward)(void *state, dcp_queue_t *queue, int64_t layer,
                            const dcp_attention_args_t *args);
    dcp_status_t (*backward)(void *state, dcp_queue_t *queue, int64_t layer,
                             const dcp_attention_backward_args_t *args);
} dcp_attention_hook_t;

/* One micro-batch: whole sequences, laid one after the other. Everything borrowed for
 * the call, in host memory. */
typedef struct dcp_batch {
    int64_t token_count, sequence_count;
    const int32_t *tokens;  /* [T] */
    const int64_t *offsets; /* [sequence_count + 1], offsets[0] = 0, last = T */
    const int32_t *labels;  /* [T], -100: not trained on */
    const float *weights;   /* [T] weight of each token's loss, or NULL: 1 */
    double scale;           /* of the loss and so of the gradient: 1/N */
    const int64_t
        *row_ids; /* [T] number of each token in its step (dropout); NULL: 0..T-1 */
    uint64_t dropout_seed;                  /* of run and step */
    int32_t recompute[DCP_RECOMPUTE_KINDS]; /* layers that drop their activations */
    /* Rows that are parts of sequences, the rest on other ranks: NULL where the batch
     * holds whole sequences. Then offsets are the borders of the parts. */
    const int32_t *positions;              /* [T] of each token in its sequence */
    const dcp_attention_hook_t *attention; /* reaches the other rows */
} dcp_batch_t;

/* Calls around the use of one group of tensors (dcp_model_tensor_t.group) in a pass:
 * before the pass first reads or adds to them, and after it last did. A pass enters
 * groups 0 .. G - 1 in order and leaves each before it enters the next; where it
 * trains, it stays in G - 1, leaves that one backward, and goes on G - 2 .. 0 backward.
 * A layer that is computed again is entered once for both. Where embeddings are tied,
 * the head reads and adds to a tensor of group 0 while the pass is in group G - 1. The
 * queue is not fenced before a call. */
typedef struct dcp_model_hooks {
    void *state;
    dcp_status_t (*enter)(void *state, dcp_queue_t *queue, int32_t group,
                          int32_t backward);
    dcp_status_t (*leave)(void *state, dcp_queue_t *queue, int32_t group,
                          int32_t backward);
} dcp_model_hooks_t;

/* Checks every field; names the Hugging Face key that breaks a rule. */
dcp_status_t dcp_transformer1d_check(const dcp_transformer1d_config_t *config);
/* Checks recompute counts, as in dcp_batch_t. */
dcp_status_t dcp_transformer1d_check_recompute(const dcp_transformer1d_config_t *config,
                                               const int32_t *recompute);

int64_t dcp_model_tensor_count(const dcp_transformer1d_config_t *config);
/* Tensor `index` in model order: embedding, layers, final norm, head (none where tied).
 */
dcp_status_t dcp_model_tensor_get(const dcp_transformer1d_config_t *config,
                                  int64_t index, dcp_model_tensor_t *tensor_p);

/* Initial value of elements [first, first + count) of a tensor: a pure function of
 * (seed, tensor, element), so that each rank fills its own shard. Norm weights 1,
 * biases 0, matrices normal(0, initializer_range); what adds to the residual (o_proj,
 * down_proj) smaller by sqrt(2 num_hidden_layers). */
void dcp_model_init_run(const dcp_transformer1d_config_t *config, int64_t index,
                        uint64_t seed, int64_t first, int64_t count, float *out);

/* Borrows device and pool until destroyed. */
dcp_status_t dcp_model_create(const dcp_transformer1d_config_t *config,
                              const dcp_device_ops_t *device, dcp_pool_t *pool,
                              dcp_model_t **model_p);
void dcp_model_destroy(dcp_model_t *model);

/* Pointers per tensor, borrowed until the next bind. gradients NULL: forward only; one
 * of them NULL: frozen, its gradient is not computed. */
dcp_status_t dcp_model_bind(dcp_model_t *model, float *const *weights,
                            float *const *gradients);
/* The same where weights lie as bf16 (gathered compute copies); compute_dtype must be
 * DCP_BF16. The bits of a pass are those of the fp32 weights that were rounded. */
dcp_status_t dcp_model_bind_bf16(dcp_model_t *model, const uint16_t *const *weights,
                                 float *const *gradients);
/* The weights' values changed: packed copies are stale. */
void dcp_model_weights_changed(dcp_model_t *model);
/* The same of one group, whose weights came to lie where they are bound, over those of
 * another layer: only one layer's packed copies are kept in memory from now on. */
void dcp_model_group_changed(dcp_model_t *model, int32_t group);

/* hooks NULL: none; else copied. */
void dcp_model_set_hooks(dcp_model_t *model, const dcp_model_hooks_t *hooks);
/* Calls the hooks of one pass in their order, and nothing else: for a rank that has
 * nothing to compute while others do. */
dcp_status_t dcp_model_walk(dcp_model_t *model, int32_t training);
/* Passes lie in `arena` (device memory, borrowed, 64-byte aligned) from now on, and
 * fail where it is too small; NULL: in memory of the model's own. */
void dcp_model_set_arena(dcp_model_t *model, void *arena, int64_t bytes);

/* *loss_p += scaled loss; gradients accumulate. A batch with no tokens only calls the
 * hooks. */
dcp_status_t dcp_model_forward_backward(dcp_model_t *model, const dcp_batch_t *batch,
                                        double *loss_p);
/* Forward only, no dropout. */
dcp_status_t dcp_model_loss(dcp_model_t *model, const dcp_batch_t *batch,
                            double *loss_p);
/* logits [T, vocab], host memory; labels are not read. */
dcp_status_t dcp_model_logits(dcp_model_t *model, const dcp_batch_t *batch,
                              float *logits);

/* Bytes of the arena that one pass takes. */
int64_t dcp_model_arena_bytes(const dcp_transformer1d_config_t *config,
                              int64_t token_count, int32_t training,
                              const int32_t *recompute);
/* Bytes that a forward and backward pass over a micro-batch of `token_count` tokens
 * holds at most beside weights and gradients, packed weights and the scratch of a CPU
 * pool of `thread_count` threads included; never less than what is really held.
 * recompute as in dcp_batch_t, NULL: nothing. */
int64_t dcp_model_pass_bytes(const dcp_transformer1d_config_t *config,
                             int64_t token_count, const int32_t *recompute,
                             int32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
