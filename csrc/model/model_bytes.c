/* What a pass holds at most: the promise behind memory caps and plans.
 *
 * The model's own memory is measured by the walk that lays it out. The kernels' scratch
 * follows from their cuts: a product packs at most one slab of B and one chunk of A per
 * worker; attention's backward pass keeps a segment of keys per worker and, with more
 * than one thread, partial query gradients of a long sequence's segments; sums over
 * rows keep one partial row per block. These are bounds, taken for the worst
 * micro-batch of so many tokens: a single sequence. tests/c/test_model.c holds them
 * against what is really allocated. */
#include "model_private.h"

#include "dcp/kernels.h"

enum {
    BLOCK_BYTES = 64,              /* alloc.h's header before each block */
    OBJECT_BYTES = 1024,           /* queue and the headers of all single blocks */
    GEMM_DEPTH = 704,              /* most rows of a slab of B, words of 4 bytes, */
    GEMM_SLAB_BYTES = 4096 * 1024, /* most bytes of one, */
    GEMM_PANEL = 64,               /* its columns are a multiple of at most this */
    GEMM_CHUNK_ROWS = 96,          /* of a packed op(A), */
    GEMM_TILE_ROWS = 12,           /* a multiple of at most this */
    ATTENTION_SEGMENT_KEYS = 480,  /* keys of a segment, */
    ATTENTION_SEGMENT_COUNT = 16,  /* most segments of a sequence; then they grow */
    ATTENTION_ROWS = 6,            /* a segment is a multiple of */
    ATTENTION_KEY_WIDTHS = 4,      /* padded head dimensions kept of a segment's key */
    ATTENTION_ROW_WIDTHS = 512,    /* and beside, of blocks of rows and tiles of keys */
    ATTENTION_BLOCK_FLOATS = 16384, /* of tiles of weights */
    ATTENTION_UNIT_ROWS = 512,      /* rows times heads of a forward unit, but */
    ATTENTION_LEAST_ROWS = 144,     /* at least so many rows */
    ATTENTION_UNIT_BYTES = 8,       /* of work lists, a token */
    SUM_BLOCKS = 64,                /* partial rows of a sum over rows */
};

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t
segment_keys(int64_t keys)
{
    int64_t count = (keys + ATTENTION_SEGMENT_KEYS - 1) / ATTENTION_SEGMENT_KEYS;
    count = smaller(larger(count, 1), ATTENTION_SEGMENT_COUNT);
    int64_t share = (keys + count - 1) / count;
    return larger(1, (share + ATTENTION_ROWS - 1) / ATTENTION_ROWS * ATTENTION_ROWS);
}

/* Scratch of a worker in attention: forward, the state of a unit's rows; backward, a
 * segment of keys with its gradients. */
static int64_t
attention_scratch_bytes(const dcp_transformer1d_config_t *config, int64_t keys)
{
    int64_t width = (config->head_dim + 15) / 16 * 16;
    int64_t group = config->num_attention_heads / config->num_key_value_heads;
    int64_t rows = larger(ATTENTION_UNIT_ROWS, ATTENTION_LEAST_ROWS * group);
    int64_t forward = rows * (width + 32);
    int64_t backward = (keys + ATTENTION_ROWS) * ATTENTION_KEY_WIDTHS * width;
    return (ATTENTION_BLOCK_FLOATS + ATTENTION_ROW_WIDTHS * width
            + larger(forward, backward))
           * (int64_t)sizeof(float);
}

/* Scratch of a worker in a weight's gradient dy^T x: only there is B not packed once a
 * step. `width` is the widest x. With bf16 factors every product packs its A, also one
 * of few rows and many columns. */
static int64_t
gemm_scratch_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
                   int64_t width)
{
    int64_t float_bytes = (int64_t)sizeof(float);
    int64_t depth = smaller((token_count + 15) / 16 * 16, GEMM_DEPTH);
    int64_t columns = (width + GEMM_PANEL - 1) / GEMM_PANEL * GEMM_PANEL;
    int64_t weight = GEMM_CHUNK_ROWS * depth * float_bytes + BLOCK_BYTES
                     + smaller(columns * depth * float_bytes, GEMM_SLAB_BYTES);
    if (config->compute_dtype == DCP_F32) {
        return weight;
    }
    int64_t rows = smaller(token_count + GEMM_TILE_ROWS - 1, GEMM_CHUNK_ROWS);
    int64_t widest = larger(width, config->vocab_size);
    int64_t words = smaller((widest + 15) / 16 * 16, GEMM_DEPTH);
    return larger(weight, rows * words * float_bytes + BLOCK_BYTES);
}

/* Sequences that attention's backward pass may cut into segments: those with more than
 * one in 2 P of all (key-value head, sequence) units' work. */
static int64_t
split_sequences(const dcp_transformer1d_config_t *config, int32_t thread_count)
{
    return (2 * (int64_t)thread_count - 1) / config->num_key_value_heads;
}

/* Scratch of all workers together. */
static int64_t
scratch_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
              int32_t thread_count)
{
    int64_t float_bytes = (int64_t)sizeof(float);
    int64_t q_width = config->num_attention_heads * config->head_dim;
    int64_t longest = smaller(token_count, config->max_position_embeddings);
    int64_t keys = segment_keys(longest);
    int64_t attention = attention_scratch_bytes(config, smaller(keys, longest));
    int64_t partial_rows = 0;
    for (int64_t key = keys; thread_count > 1 && key < longest; key += keys) {
        partial_rows += longest - key;
    }
    if (longest > 0) {
        int64_t sequences = token_count / longest + (token_count % longest != 0);
        partial_rows *= smaller(sequences, split_sequences(config, thread_count));
    }
    int64_t shared =
        partial_rows * q_width * float_bytes + token_count * ATTENTION_UNIT_BYTES;
    int64_t width =
        larger(larger(config->hidden_size, q_width), config->intermediate_size);
    int64_t sums = SUM_BLOCKS * width * float_bytes;
    int64_t every = larger(gemm_scratch_bytes(config, token_count, width), attention);
    return thread_count * (every + BLOCK_BYTES)
           + larger(0, larger(sums, attention + shared) - every);
}

/* Both panels of a weight. */
static int64_t
panel_bytes(int64_t out, int64_t in, dcp_dtype_t compute)
{
    return dcp_gemm_pack_bytes(out, in, compute) + dcp_gemm_pack_bytes(in, out, compute)
           + 2 * BLOCK_BYTES;
}

int64_t
dcp_model_beside_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
                       int32_t thread_count)
{
    return dcp_model_staging_bytes(config, token_count)
           + dcp_model_rope_rows(config, token_count) * config->head_dim
                 * (int64_t)sizeof(float)
           + scratch_bytes(config, token_count, thread_count);
}

int64_t
dcp_model_pass_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
                     const int32_t *recompute, int32_t thread_count)
{
    dcp_pass_t pass;
    dcp_layer_t layer;
    dcp_linear_t *linears[DCP_LINEARS_PER_LAYER];
    dcp_pass_layout(config, token_count, true, recompute, NULL, &pass);
    int64_t bytes = (int64_t)sizeof(dcp_model_t) + OBJECT_BYTES
                    + config->num_hidden_layers * (int64_t)sizeof(dcp_layer_t);
    bytes += pass.bytes + dcp_model_beside_bytes(config, token_count, thread_count);
    dcp_layer_set_sizes(config, &layer);
    dcp_layer_linears(&layer, linears);
    for (int j = 0; j < DCP_LINEARS_PER_LAYER; j++) {
        bytes += config->num_hidden_layers
                 * panel_bytes(linears[j]->out, linears[j]->in, config->compute_dtype);
    }
    bytes +=
        panel_bytes(config->vocab_size, config->hidden_size, config->compute_dtype);
    return bytes + dcp_model_rounded_bytes(config);
}
