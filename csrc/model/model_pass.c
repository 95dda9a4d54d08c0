/* The memory of one pass, and sending a batch to the device.
 *
 * One walk lays out the arena; without a base it only measures, so that what
 * model_bytes.c promises and what a pass takes cannot disagree. The arena
 * is as large as the largest micro-batch so far needed, and grows by being freed first,
 * so that old and new are never held at once. Per token and layer it keeps
 * 2 h + (2 H + 2 K) D + H + 2 f + 2 floats: outputs of norms and of SwiGLU are computed
 * again in the backward pass, and the logits exist one chunk at a time. Of layers that
 * are recomputed only the h floats of x are kept one by one; the rest of them lies in
 * one place, as does gate and up of recomputed MLPs. The last layer to write there
 * leaves its arrays for the backward pass, which begins with it.
 *
 * Everything grows and stays, yet all of it together is never more than one pass was to
 * hold: a long micro-batch that recomputes much and a short one that recomputes nothing
 * would else leave the scratch of the one beside the arena of the other.
 *
 * What the batch does not say in the device's words is derived in host memory
 * ("staging"): positions inside sequences, offsets without empty sequences (so that
 * they number T at most), row numbers for dropout. */
#include "model_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum {
    ALIGN_BYTES = 64,
    CHUNK_BYTES = 4 << 20, /* of logits at once, but: */
    CHUNK_LEAST_ROWS = 64,
    ROPE_ROWS = 256, /* the table grows by so many */
};

typedef struct arena {
    char *base;   /* NULL: only measure */
    int64_t used; /* bytes */
} arena_t;

static void *
take(arena_t *arena, int64_t count, int64_t item_bytes)
{
    int64_t start = arena->used;
    arena->used += (count * item_bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    return arena->base != NULL ? arena->base + start : NULL;
}

static float *
take_floats(arena_t *arena, int64_t count)
{
    return take(arena, count, (int64_t)sizeof(float));
}

static int64_t
max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t
min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t
qkv_width(const dcp_transformer1d_config_t *config)
{
    return (config->num_attention_heads + 2 * config->num_key_value_heads)
           * config->head_dim;
}

int64_t
dcp_model_logits_stride(const dcp_transformer1d_config_t *config)
{
    return (config->vocab_size + 15) / 16 * 16;
}

static void
take_attention(const dcp_transformer1d_config_t *config, int64_t rows, arena_t *arena,
               dcp_kept_t *kept)
{
    int64_t heads = config->num_attention_heads;
    kept->input_rstd = take_floats(arena, rows);
    kept->qkv = take_floats(arena, rows * qkv_width(config));
    kept->attn = take_floats(arena, rows * heads * config->head_dim);
    kept->lse = take_floats(arena, rows * heads);
    kept->x_middle = take_floats(arena, rows * config->hidden_size);
    kept->post_rstd = take_floats(arena, rows);
}

static void
take_mlp(const dcp_transformer1d_config_t *config, int64_t rows, arena_t *arena,
         dcp_kept_t *kept)
{
    kept->gate = take_floats(arena, rows * config->intermediate_size);
    kept->up = take_floats(arena, rows * config->intermediate_size);
}

/* All parts, where layers may differ in what they drop. */
static void
take_parts(const dcp_transformer1d_config_t *config, arena_t *arena, dcp_pass_t *pass)
{
    dcp_kept_t kept;
    arena_t one = {0};
    take_attention(config, pass->token_count, &one, &kept);
    pass->attention_bytes = one.used;
    take_mlp(config, pass->token_count, &one, &kept);
    pass->mlp_bytes = one.used - pass->attention_bytes;
    int64_t n = pass->recompute[DCP_RECOMPUTE_LAYER];
    int64_t m = pass->recompute[DCP_RECOMPUTE_MLP];
    int64_t other = pass->training ? config->num_hidden_layers - n - m : 1;
    int64_t attentions = min_i64(n, 1) + m + other;
    int64_t mlps = min_i64(n, 1) + min_i64(m, 1) + other;
    pass->part_base =
        take(arena, 1, attentions * pass->attention_bytes + mlps * pass->mlp_bytes);
}

/* The parts of the scratch begin at the same place: only one is alive at a time. */
static void
take_scratch(const dcp_transformer1d_config_t *config, arena_t *arena, dcp_pass_t *pass)
{
    int64_t rows = pass->token_count;
    arena_t mlp = *arena, attention = *arena, head = *arena;
    pass->inner = take_floats(&mlp, rows * config->intermediate_size);
    if (pass->training) {
        pass->dattn = take_floats(&attention, rows * config->num_attention_heads
                                                  * config->head_dim);
        pass->dqkv = take_floats(&attention, rows * qkv_width(config));
    }
    pass->logits =
        take_floats(&head, pass->chunk_rows * dcp_model_logits_stride(config));
    arena->used = max_i64(mlp.used, max_i64(attention.used, head.used));
}

void
dcp_pass_layout(const dcp_transformer1d_config_t *config, int64_t token_count,
                bool training, const int32_t *recompute, char *base, dcp_pass_t *pass_p)
{
    int64_t rows = token_count, h = config->hidden_size;
    int64_t layers = config->num_hidden_layers;
    arena_t arena = {.base = base};
    dcp_pass_t pass = {.token_count = rows, .training = training};
    int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(float) / config->vocab_size;
    for (int kind = 0; kind < DCP_RECOMPUTE_KINDS; kind++) {
        pass.recompute[kind] = training && recompute != NULL ? recompute[kind] : 0;
    }
    pass.chunk_rows = min_i64(rows, max_i64(chunk, CHUNK_LEAST_ROWS));
    pass.loss = take(&arena, 1, (int64_t)sizeof(double));
    pass.offsets = take(&arena, rows + 1, (int64_t)sizeof(int64_t));
    pass.row_ids = take(&arena, rows, (int64_t)sizeof(int64_t));
    pass.tokens = take(&arena, rows, (int64_t)sizeof(int32_t));
    pass.labels = take(&arena, rows, (int64_t)sizeof(int32_t));
    pass.positions = take(&arena, rows, (int64_t)sizeof(int32_t));
    pass.weights = take_floats(&arena, rows);
    pass.final_rstd = take_floats(&arena, rows);

    pass.x_base = take(&arena, rows * h, (int64_t)sizeof(float));
    if (training) {
        pass.x_stride = arena.used - (pass.x_base - base);
        take(&arena, 1, layers * pass.x_stride);
    }
    take_parts(config, &arena, &pass);
    pass.norm = take_floats(&arena, rows * h);
    if (training) {
        pass.dnorm = take_floats(&arena, rows * h);
        pass.dx = take_floats(&arena, rows * h);
    }
    take_scratch(config, &arena, &pass);
    pass.bytes = arena.used;
    *pass_p = pass;
}

void
dcp_pass_kept(const dcp_transformer1d_config_t *config, const dcp_pass_t *pass,
              int64_t layer, dcp_kept_t *kept_p)
{
    int64_t n = pass->recompute[DCP_RECOMPUTE_LAYER];
    int64_t m = pass->recompute[DCP_RECOMPUTE_MLP];
    int64_t part_bytes = pass->attention_bytes + pass->mlp_bytes;
    char *middle = pass->part_base + (n > 0 ? part_bytes : 0); /* of layers n .. */
    char *middle_mlp = middle + m * pass->attention_bytes;
    arena_t attention = {.base = pass->part_base};
    arena_t mlp = {.base = pass->part_base + pass->attention_bytes};
    if (pass->training && layer >= n && layer < n + m) {
        attention.base = middle + (layer - n) * pass->attention_bytes;
        mlp.base = middle_mlp;
    } else if (pass->training && layer >= n) {
        attention.base =
            middle_mlp + (m > 0 ? pass->mlp_bytes : 0) + (layer - n - m) * part_bytes;
        mlp.base = attention.base + pass->attention_bytes;
    }
    take_attention(config, pass->token_count, &attention, kept_p);
    take_mlp(config, pass->token_count, &mlp, kept_p);
    kept_p->x = (float *)(void *)(pass->x_base + layer * pass->x_stride);
    kept_p->x_next = (float *)(void *)(pass->x_base + (layer + 1) * pass->x_stride);
}

int64_t
dcp_model_arena_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
                      int32_t training, const int32_t *recompute)
{
    dcp_pass_t pass;
    dcp_pass_layout(config, token_count, training != 0, recompute, NULL, &pass);
    return pass.bytes;
}

int64_t
dcp_model_rope_rows(const dcp_transformer1d_config_t *config, int64_t length)
{
    int64_t rows = (length + ROPE_ROWS - 1) / ROPE_ROWS * ROPE_ROWS;
    return min_i64(rows, config->max_position_embeddings);
}

int64_t
dcp_model_staging_bytes(const dcp_transformer1d_config_t *config, int64_t token_count)
{
    int64_t numbers = config->dropout > 0 ? 2 * token_count + 1 : token_count + 1;
    return numbers * (int64_t)sizeof(int64_t) + token_count * (int64_t)sizeof(int32_t);
}

/* Device memory that can only grow; its content is lost when it does. The queue is
 * idle. */
static dcp_status_t
grow_device(dcp_model_t *model, void **memory, int64_t *bytes, int64_t wanted,
            const char *what)
{
    if (wanted <= *bytes) {
        return DCP_OK;
    }
    if (model->arena_lent) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "%s: %" PRId64
                        " bytes, the arena lent to the model has %" PRId64,
                        what, wanted, *bytes);
    }
    model->device->free(model->queue, *memory);
    *memory = NULL;
    *bytes = 0;
    DCP_TRY(model->device->alloc(model->queue, wanted, what, memory));
    *bytes = wanted;
    return DCP_OK;
}

static dcp_status_t
grow_staging(dcp_model_t *model, int64_t wanted)
{
    if (wanted <= model->staging_bytes) {
        return DCP_OK;
    }
    dcp_free(model->staging);
    model->staging = NULL;
    model->staging_bytes = 0;
    DCP_TRY(dcp_alloc(wanted, "staging of a micro-batch", &model->staging));
    model->staging_bytes = wanted;
    return DCP_OK;
}

/* cos and sin of position * theta^(-2 i / D), computed in double. */
static void
fill_rope_rows(const dcp_transformer1d_config_t *config, int64_t first, int64_t count,
               float *rows)
{
    int64_t d = config->head_dim;
    for (int64_t i = 0; i < d / 2; i++) {
        double frequency = pow(config->rope_theta, -2.0 * (double)i / (double)d);
        for (int64_t r = 0; r < count; r++) {
            double angle = (double)(first + r) * frequency;
            rows[r * d + i] = (float)cos(angle);
            rows[r * d + d / 2 + i] = (float)sin(angle);
        }
    }
}

static dcp_status_t
grow_rope(dcp_model_t *model, int64_t length)
{
    const dcp_transformer1d_config_t *config = &model->config;
    int64_t rows = dcp_model_rope_rows(config, length);
    if (rows <= model->rope_rows) {
        return DCP_OK;
    }
    int64_t row_bytes = config->head_dim * (int64_t)sizeof(float);
    model->device->free(model->queue, model->rope_table);
    model->rope_table = NULL;
    model->rope_rows = 0;
    void *table, *staging;
    DCP_TRY(
        model->device->alloc(model->queue, rows * row_bytes, "rotary table", &table));
    model->rope_table = table;
    DCP_TRY(dcp_alloc(ROPE_ROWS * row_bytes, "rotary table staging", &staging));
    dcp_status_t status = DCP_OK;
    for (int64_t first = 0; first < rows && status == DCP_OK; first += ROPE_ROWS) {
        int64_t count = min_i64(ROPE_ROWS, rows - first);
        fill_rope_rows(config, first, count, staging);
        status = model->device->copy(model->queue,
                                     model->rope_table + first * config->head_dim,
                                     staging, count * row_bytes);
        if (status == DCP_OK) {
            status = model->device->fence(model->queue);
        }
    }
    dcp_free(staging);
    if (status == DCP_OK) {
        model->rope_rows = rows;
    }
    return status;
}

/* Positions and offsets of the batch, in staging; returns the longest sequence. */
static int64_t
stage_sequences(const dcp_batch_t *batch, int64_t *offsets, int32_t *positions,
                int64_t *sequence_count_p)
{
    int64_t count = 0, longest = 0;
    offsets[0] = 0;
    for (int64_t s = 0; s < batch->sequence_count; s++) {
        int64_t begin = batch->offsets[s], end = batch->offsets[s + 1];
        if (begin == end) {
            continue;
        }
        offsets[++count] = end;
        for (int64_t t = begin; t < end; t++) {
            positions[t] =
                batch->positions != NULL ? batch->positions[t] : (int32_t)(t - begin);
            longest = max_i64(longest, (int64_t)positions[t] + 1);
        }
    }
    *sequence_count_p = count;
    return longest;
}

static dcp_status_t
send_batch(dcp_model_t *model, const dcp_batch_t *batch, dcp_pass_t *pass)
{
    const dcp_device_ops_t *device = model->device;
    int64_t rows = batch->token_count;
    int64_t *offsets = model->staging;
    int64_t *row_ids = offsets + rows + 1;
    bool dropout = pass->training && model->config.dropout > 0;
    int32_t *positions =
        (int32_t *)(model->config.dropout > 0 ? row_ids + rows : row_ids);
    int64_t longest = stage_sequences(batch, offsets, positions, &pass->sequence_count);
    DCP_TRY(grow_rope(model, longest));
    DCP_TRY(device->copy(model->queue, pass->offsets, offsets,
                         (pass->sequence_count + 1) * (int64_t)sizeof(int64_t)));
    int64_t bytes = rows * (int64_t)sizeof(int32_t);
    DCP_TRY(device->copy(model->queue, pass->positions, positions, bytes));
    DCP_TRY(device->copy(model->queue, pass->tokens, batch->tokens, bytes));
    if (batch->labels != NULL) {
        DCP_TRY(device->copy(model->queue, pass->labels, batch->labels, bytes));
    }
    if (batch->weights != NULL) {
        DCP_TRY(device->copy(model->queue, pass->weights, batch->weights, bytes));
    } else {
        pass->weights = NULL;
    }
    if (dropout) {
        for (int64_t t = 0; t < rows && batch->row_ids == NULL; t++) {
            row_ids[t] = t;
        }
        DCP_TRY(device->copy(model->queue, pass->row_ids,
                             batch->row_ids != NULL ? batch->row_ids : row_ids,
                             rows * (int64_t)sizeof(int64_t)));
    }
    return DCP_OK;
}

/* Frees what former passes left where it and this pass's own need would pass what any
 * pass was to hold. The queue is idle. */
static void
make_room(dcp_model_t *model, int64_t token_count, int64_t arena_bytes)
{
    int64_t row_bytes = model->config.head_dim * (int64_t)sizeof(float);
    int64_t wanted =
        dcp_model_beside_bytes(&model->config, token_count, dcp_pool_size(model->pool));
    int64_t held = model->staging_bytes + model->rope_rows * row_bytes
                   + dcp_pool_scratch_bytes(model->pool);
    int64_t arena = max_i64(arena_bytes, model->arena_bytes);
    int64_t most = max_i64(model->promised_bytes,
                           (model->arena_lent ? arena : arena_bytes) + wanted);
    model->promised_bytes = most;
    if (arena + max_i64(held, wanted) <= most) {
        return;
    }
    dcp_pool_trim(model->pool);
    dcp_free(model->staging);
    model->staging = NULL;
    model->staging_bytes = 0;
    model->device->free(model->queue, model->rope_table);
    model->rope_table = NULL;
    model->rope_rows = 0;
    if (arena + wanted > most) { /* not where the arena is lent */
        dcp_model_set_arena(model, NULL, 0);
    }
}

dcp_status_t
dcp_pass_begin(dcp_model_t *model, const dcp_batch_t *batch, bool training,
               dcp_pass_t *pass_p)
{
    dcp_pass_t pass;
    dcp_pass_layout(&model->config, batch->token_count, training, batch->recompute,
                    NULL, &pass);
    make_room(model, batch->token_count, pass.bytes);
    DCP_TRY(grow_device(model, &model->arena, &model->arena_bytes, pass.bytes,
                        "activations of a micro-batch"));
    DCP_TRY(grow_staging(model,
                         dcp_model_staging_bytes(&model->config, batch->token_count)));
    dcp_pass_layout(&model->config, batch->token_count, training, batch->recompute,
                    model->arena, &pass);
    pass.attention = batch->attention;
    DCP_TRY(send_batch(model, batch, &pass));
    *pass_p = pass;
    return DCP_OK;
}
