/* Attention backward of one sequence, key-value head and segment of keys.
 *
 *   P = exp(scale Q K^T - lse)      delta = rowsum(dO O)
 *   dP = dO V^T                     dS = P (dP - delta)
 *   dV = P^T dO                     dK = scale dS^T Q          dQ = scale dS K
 *
 * Query rows are taken in blocks of BLOCK; a block is packed once (queries and dO
 * transposed into panels for the first two products, copied for the next two) while all
 * keys of the segment pass over it, MR at a time. Everything is computed as its
 * transpose, key rows by query columns, so that -lse and -delta are vectors at which
 * the accumulators start, and P^T and dS^T are the row operands of the next products.
 * dS^T of KEY_BLOCK keys waits for the product with the keys, which reads it by
 * columns.
 *
 * dK and dV collect in scratch over the blocks and heads; the first block that sees a
 * key starts from 0, the last one writes the result out. dQ of a block collects over
 * the segment and is then stored, or added to what other segments gave: always in the
 * order of the segments, so that segments may be computed apart and summed later with
 * the same bits.
 *
 * With two factors a word (words.h) the same runs on bf16 numbers. A word pairs what
 * follows each other in the sum: elements of a row in the first two products, query
 * rows in the sums of dV and dK, keys in that of dQ, so dS^T is stored twice and keys
 * are packed twice. Queries are scaled after the product, P is rounded only where it is
 * a factor.
 *
 * Cost a query row and key: 5 * dim multiply-adds, the exponential, 2 operations.
 */
#include "attention_pack.h"

#define BLOCK ATTENTION_QUERY_BLOCK
#define KEY_BLOCK ATTENTION_KEY_BLOCK
#define BLOCK_WORDS (BLOCK / FACTORS)

typedef struct backward {
    const attention_gradient_view_t *view;
    int64_t dim, width, block; /* as in the forward pass */
    int64_t first_key, end_key;
    int64_t depth;              /* words of dim */
    word_t *queries_t, *dout_t; /* [BLOCK / PANEL][depth][PANEL]; queries times scale,
                                   unless words hold two factors */
    word_t *queries, *dout;     /* [words of BLOCK][width] */
    float *minus_lse, *minus_delta; /* [BLOCK] */
    float *exact;                   /* P^T [MR][BLOCK] before it is rounded */
    word_t *weights;                /* P^T [MR][words of BLOCK] */
    word_t *gradients;              /* dS^T of MR keys, the same; one factor: in
                                       score_gradients */
    word_t *score_gradients;        /* dS^T [words of KEY_BLOCK][BLOCK] */
    float *dq;                      /* [BLOCK][width] */
    word_t *keys;                   /* [words of segment][width] */
    word_t *key_rows;               /* [segment][depth], one factor: keys */
    int64_t key_stride;             /* of key_rows */
    word_t *values_padded; /* [MR][depth], when fewer than MR are left, or rounded */
    float *dk, *dv;        /* [segment][width] */
    /* the block at hand */
    int64_t head, row, row_count;
} backward_t;

static void
layout(backward_t *b, arena_t *arena, int64_t key_count, int64_t dim)
{
    int64_t keys = round_up(key_count, MR);
    b->dim = dim;
    b->width = round_up(dim, VF);
    b->block = block_vectors(b->width / VF);
    b->depth = words_of(dim);
    b->queries_t = arena_words(arena, BLOCK * b->depth);
    b->dout_t = arena_words(arena, BLOCK * b->depth);
    b->queries = arena_words(arena, BLOCK_WORDS * b->width);
    b->dout = arena_words(arena, BLOCK_WORDS * b->width);
    b->minus_lse = arena_floats(arena, BLOCK);
    b->minus_delta = arena_floats(arena, BLOCK);
    b->weights = arena_words(arena, MR * BLOCK_WORDS);
    /* the last group of query rows reads a little past the last key's row */
    b->score_gradients = arena_words(arena, words_of(KEY_BLOCK) * BLOCK + 16);
    b->dq = arena_floats(arena, round_up(BLOCK, MR) * b->width);
    b->keys = arena_words(arena, words_of(keys) * b->width);
    b->values_padded = arena_words(arena, round_up(MR * b->depth, VF));
#if FACTORS == 1
    b->exact = b->weights;
    b->key_rows = b->keys;
    b->key_stride = b->width;
#else
    b->exact = arena_floats(arena, MR * BLOCK);
    b->gradients = arena_words(arena, MR * BLOCK_WORDS);
    b->key_rows = arena_words(arena, keys * b->depth);
    b->key_stride = b->depth;
#endif
    b->dk = arena_floats(arena, keys * b->width);
    b->dv = arena_floats(arena, keys * b->width);
}

static int64_t
backward_bytes(int64_t key_count, int64_t head_dim)
{
    backward_t b;
    arena_t arena = {NULL, 0};
    layout(&b, &arena, key_count, head_dim);
    return arena.used_bytes;
}

/* Row of dO times row of out; with round, of the rounded dO. */
INLINE float
delta_of(const float *dout, const float *out, int64_t dim, int32_t round)
{
    vf sum = {0};
    int64_t d = 0;
    for (; d + VF <= dim; d += VF) {
        vf x = vf_load(dout + d);
        sum = vf_fma(round ? vf_round_bf16(x) : x, vf_load(out + d), sum);
    }
    if (d < dim) {
        vf x = vf_load_part(dout + d, dim - d);
        sum = vf_fma(round ? vf_round_bf16(x) : x, vf_load_part(out + d, dim - d), sum);
    }
    return sum_across(sum);
}

/* Packs the query block. Columns beyond its rows: operands 0, lse so large that weights
 * are 0. */
static void
pack_block(const backward_t *b)
{
    const attention_gradient_view_t *view = b->view;
    const attention_view_t *fwd = &view->forward;
    int64_t shift = b->head * b->dim;
    const float *q = fwd->q + b->row * fwd->q_stride + shift;
    const float *dout = view->dout + b->row * view->dout_stride + shift;
    const float *out = fwd->out + b->row * fwd->out_stride + shift;
    const float *lse = fwd->lse + b->head * fwd->lse_stride + b->row;
    const int32_t round = FACTORS == 2 || fwd->round;
    pack_transposed(b->queries_t, q, fwd->q_stride, b->row_count, b->dim,
                    FACTORS == 1 && !round ? fwd->scale : 1.0f);
    pack_transposed(b->dout_t, dout, view->dout_stride, b->row_count, b->dim, 1.0f);
    pack_rows(b->queries, b->width, q, fwd->q_stride, b->row_count, b->dim);
    pack_rows(b->dout, b->width, dout, view->dout_stride, b->row_count, b->dim);
    if (FACTORS == 1 && round) {
        int64_t columns = round_up(b->row_count, PANEL);
        round_vectors(b->queries_t, columns * b->dim);
        scale_vectors(b->queries_t, columns * b->dim, fwd->scale);
        round_vectors(b->dout_t, columns * b->dim);
        round_vectors(b->queries, b->row_count * b->width);
        round_vectors(b->dout, b->row_count * b->width);
    }
    for (int64_t i = 0; i < BLOCK; i++) {
        if (i >= b->row_count) {
            b->minus_lse[i] = -1000.0f;
            b->minus_delta[i] = 0.0f;
            continue;
        }
        b->minus_lse[i] = FACTORS == 1 ? -lse[i] : -lse[i] * LOG2_E;
        b->minus_delta[i] = -delta_of(dout + i * view->dout_stride,
                                      out + i * fwd->out_stride, b->dim, round);
    }
}

/* Scores of a tile to weights. One factor a word: the product began at -lse, and its
 * queries were scaled. */
INLINE vf
weight_of(const backward_t *b, vf s, int64_t column)
{
#if FACTORS == 1
    (void)b;
    (void)column;
    return exp2_tile(s * LOG2_E);
#else
    vf scale = vf_set(b->view->forward.scale * LOG2_E);
    return exp2_tile(vf_fma(s, scale, vf_load(b->minus_lse + column)));
#endif
}

/* dS^T of the tile where its two uses read it: by rows, and, by pairs of keys where a
 * word holds two factors, by columns. `to`: row of the first key in score_gradients. */
INLINE void
gradients_store(const backward_t *b, vf s[MR][NV], int nv, int64_t column, word_t *to)
{
#if FACTORS == 1
    (void)b;
    UNROLL for (int r = 0; r < MR; r++)
    {
        rows_store(to + r * BLOCK + column, s[r], nv);
    }
#else
    UNROLL for (int r = 0; r < MR; r++)
    {
        rows_store(b->gradients + r * BLOCK_WORDS + column / 2, s[r], nv);
    }
    UNROLL for (int r = 0; r < MR; r += 2)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            words_store(to + r / 2 * BLOCK + column + v * VF,
                        interleave(s[r][v], s[r + 1][v]));
        }
    }
#endif
}

/* P^T and dS^T of MR keys and nv vectors of query columns. Row r of the tile may use
 * columns from `unseen` + r * step on. */
INLINE void
score_columns(const backward_t *b, int nv, int masked, int64_t column, int64_t unseen,
              const word_t *keys, const word_t *values, int64_t value_stride,
              word_t *gradients)
{
    int64_t start = column / PANEL * PANEL * b->depth + column % PANEL;
    vf s[MR][NV];
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            s[r][v] = FACTORS == 1 ? vf_load(b->minus_lse + column + v * VF) : (vf){0};
        }
    }
    product(s, nv, keys, b->key_stride, 1, b->queries_t + start, PANEL, b->depth);
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            vf p = weight_of(b, s[r][v], column + v * VF);
            if (masked) {
                p = mask_select(mask_below(unseen + r - column - v * VF), (vf){0}, p);
            }
            vf_store(b->exact + r * BLOCK + column + v * VF, p);
            s[r][v] = p;
        }
        if (FACTORS == 2) {
            rows_store(b->weights + r * BLOCK_WORDS + column / FACTORS, s[r], nv);
        }
    }
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            s[r][v] = vf_load(b->minus_delta + column + v * VF);
        }
    }
    product(s, nv, values, value_stride, 1, b->dout_t + start, PANEL, b->depth);
    UNROLL for (int r = 0; r < MR; r++)
    {
        UNROLL for (int v = 0; v < nv; v++)
        {
            vf p = vf_load(b->exact + r * BLOCK + column + v * VF);
            s[r][v] *= p;
        }
    }
    gradients_store(b, s, nv, column, gradients);
}

#define SCORE(name, n, masked)                                                         \
    NOINLINE void name(const backward_t *b, int64_t column, int64_t unseen,            \
                       const word_t *keys, const word_t *values, int64_t value_stride, \
                       word_t *gradients)                                              \
    {                                                                                  \
        score_columns(b, n, masked, column, unseen, keys, values, value_stride,        \
                      gradients);                                                      \
    }
SCORE(score_whole, NV, 0)
SCORE(score_1, 1, 1)
SCORE(score_2, 2, 1)
#if NV == 4
SCORE(score_3, 3, 1)
SCORE(score_4, 4, 1)
#endif

/* What the sums of MR keys take: index 0 dv, 1 dk. */
typedef struct product {
    const word_t *a[2], *x[2]; /* P^T and dS^T; dO and Q, from the first column used */
    int64_t count;             /* words of query columns */
    float *sums[2];            /* [MR][width] */
    float *out[2];             /* rows of dv and dk after the last block, else NULL */
    int64_t out_stride[2];
    float factor[2];
    int64_t row_count;
    int first;      /* sums hold nothing yet */
    int accumulate; /* out is added to */
} product_t;

/* Adds a product to MR rows of dv or dk, or, after the last block, writes them out. */
INLINE void
collect(const backward_t *b, int nv, int64_t d, const product_t *p, int which)
{
    vf c[MR][NV];
    if (p->first) {
        tile_zero(c, nv);
    } else {
        tile_load(c, nv, p->sums[which] + d, b->width);
    }
    product(c, nv, p->a[which], BLOCK_WORDS, 1, p->x[which] + d, b->width, p->count);
    float *out = p->out[which];
    if (out == NULL) {
        tile_store(c, nv, p->sums[which] + d, b->width);
        return;
    }
    vf scale = vf_set(p->factor[which]);
    UNROLL for (int r = 0; r < MR; r++)
    {
        if (r < p->row_count) {
            UNROLL for (int v = 0; v < nv; v++)
            {
                float *to = out + r * p->out_stride[which] + d + v * VF;
                int64_t rest = min_i64(b->dim - d - v * VF, VF);
                vf x = c[r][v] * scale;
                if (p->accumulate) {
                    x += vf_load_part(to, rest);
                }
                if (rest == VF) {
                    vf_store(to, x);
                } else {
                    vf_store_part(to, x, rest);
                }
            }
        }
    }
}

/* Both sums of MR keys, for nv vectors of their columns. */
#define COLLECT(name, n)                                                   \
    NOINLINE void name(const backward_t *b, int64_t d, const product_t *p) \
    {                                                                      \
        collect(b, n, d, p, 0);                                            \
        collect(b, n, d, p, 1);                                            \
    }
COLLECT(collect_1, 1)
COLLECT(collect_2, 2)
#if NV == 4
COLLECT(collect_3, 3)
COLLECT(collect_4, 4)
#endif

/* Rows of MR values as words: in place if they can be read so. */
static const word_t *
tile_values(const backward_t *b, int64_t key, int64_t key_count, int64_t *stride_p)
{
    const attention_view_t *fwd = &b->view->forward;
    const float *values = fwd->v + key * fwd->v_stride;
#if FACTORS == 1
    if (key_count == MR && !fwd->round) {
        *stride_p = fwd->v_stride;
        return values;
    }
#endif
    pack_tile_rows(b->values_padded, values, fwd->v_stride, key_count, b->dim,
                   fwd->round);
    *stride_p = b->depth;
    return b->values_padded;
}

/* dS^T of keys that are not there, `key_count` and after, is no factor of dq. */
static void
clear_missing_key(word_t *gradients, int64_t key_count)
{
#if FACTORS == 2
    if (key_count % 2 != 0) {
        word_t *row = gradients + key_count / 2 * BLOCK;
        for (int64_t c = 0; c < BLOCK; c++) {
            row[c] &= 0xffff;
        }
    }
#else
    (void)gradients;
    (void)key_count;
#endif
}

/* P^T and dS^T of the keys of one register tile against the query block, from column
 * `start` on. */
static void
score_keys(const backward_t *b, int64_t key, int64_t key_count, int64_t unseen,
           int64_t start, word_t *gradients)
{
    int64_t value_stride;
    const word_t *values = tile_values(b, key, key_count, &value_stride);
    const word_t *keys = b->key_rows + (key - b->first_key) * b->key_stride;
    int64_t end = b->row_count;
    int64_t column = start / VF * VF;
    for (int64_t r = 0; r < words_of(MR); r++) {
        for (int64_t c = 0; c < column; c += VF) {
            words_store(gradients + r * BLOCK + c, (word_vector_t){0});
        }
    }
    while (column < end) {
        int64_t count =
            min_i64(round_up(column + 1, PANEL), round_up(end, VF)) - column;
        int64_t nv = count / VF;
        if (nv == NV && unseen + MR - 1 <= column) {
            score_whole(b, column, unseen, keys, values, value_stride, gradients);
        } else {
#define CALL(n) score_##n(b, column, unseen, keys, values, value_stride, gradients)
            SWITCH_VECTORS(nv, CALL)
#undef CALL
        }
        column += count;
    }
    if (FACTORS == 1 && b->view->forward.round) {
        round_vectors(b->weights, MR * BLOCK);
        round_vectors(gradients, MR * BLOCK);
    }
    clear_missing_key(gradients, key_count);
}

/* The keys of one register tile against the query block. */
static void
pass_keys(const backward_t *b, int64_t key, int64_t key_count, word_t *gradients,
          int first, int last)
{
    const attention_gradient_view_t *view = b->view;
    const attention_view_t *fwd = &view->forward;
    /* first query column that sees the first key; a later key is seen a column later */
    int64_t unseen =
        fwd->causal ? key + fwd->query_count - fwd->key_count - b->row : -BLOCK;
    int64_t start = max_i64(unseen, 0);
    score_keys(b, key, key_count, unseen, start, gradients);
    int64_t slot = (key - b->first_key) * b->width;
    int64_t word = start / FACTORS; /* may begin one column early: weights 0 */
    product_t p = {
        .a = {b->weights + word, (FACTORS == 1 ? gradients : b->gradients) + word},
        .x = {b->dout + word * b->width, b->queries + word * b->width},
        .count = words_of(b->row_count) - word,
        .sums = {b->dv + slot, b->dk + slot},
        .out_stride = {view->dv_stride, view->dk_stride},
        .factor = {1.0f, fwd->scale},
        .row_count = key_count,
        .first = first,
        .accumulate = view->accumulate,
    };
    if (last) {
        p.out[0] = view->dv + key * view->dv_stride;
        p.out[1] = view->dk + key * view->dk_stride;
    }
    int64_t vectors = b->width / VF;
    for (int64_t v = 0; v < vectors; v += b->block) {
        int64_t nv = min_i64(b->block, vectors - v);
#define CALL(n) collect_##n(b, v *VF, &p)
        SWITCH_VECTORS(nv, CALL)
#undef CALL
    }
}

/* dq of MR query rows += dS of `count` keys times the keys. */
INLINE void
collect_dq(const backward_t *b, int nv, int64_t d, int64_t row, int64_t key,
           int64_t count, int start)
{
    vf c[MR][NV];
    float *dq = b->dq + row * b->width + d;
    if (start) {
        tile_zero(c, nv);
    } else {
        tile_load(c, nv, dq, b->width);
    }
    product(c, nv, b->score_gradients + row, 1, BLOCK,
            b->keys + (key - b->first_key) / FACTORS * b->width + d, b->width,
            words_of(count));
    tile_store(c, nv, dq, b->width);
}

#define COLLECT_DQ(name, n)                                                      \
    NOINLINE void name(const backward_t *b, int64_t d, int64_t row, int64_t key, \
                       int64_t count, int start)                                 \
    {                                                                            \
        collect_dq(b, n, d, row, key, count, start);                             \
    }
COLLECT_DQ(collect_dq_1, 1)
COLLECT_DQ(collect_dq_2, 2)
#if NV == 4
COLLECT_DQ(collect_dq_3, 3)
COLLECT_DQ(collect_dq_4, 4)
#endif

static void
pass_dq(const backward_t *b, int64_t key, int64_t key_count)
{
    const attention_view_t *fwd = &b->view->forward;
    int64_t vectors = b->width / VF;
    for (int64_t row = 0; row < b->row_count; row += MR) {
        int64_t last = min_i64(row + MR, b->row_count) - 1;
        int64_t seen = attention_visible(fwd, b->row + last) - key;
        int64_t count = min_i64(key_count, seen);
        if (count <= 0) {
            continue;
        }
        for (int64_t v = 0; v < vectors; v += b->block) {
            int64_t nv = min_i64(b->block, vectors - v);
            int start = key == b->first_key;
#define CALL(n) collect_dq_##n(b, v *VF, row, key, count, start)
            SWITCH_VECTORS(nv, CALL)
#undef CALL
        }
    }
}

static void
write_dq(const backward_t *b, int32_t store)
{
    const attention_gradient_view_t *view = b->view;
    vf scale = vf_set(view->forward.scale);
    for (int64_t r = 0; r < b->row_count; r++) {
        if (attention_visible(&view->forward, b->row + r) <= b->first_key) {
            continue; /* sees nothing of this segment */
        }
        const float *from = b->dq + r * b->width;
        float *to = view->dq + (b->row + r - view->dq_first) * view->dq_stride
                    + b->head * view->dq_head_stride;
        for (int64_t d = 0; d < b->dim; d += VF) {
            int64_t count = min_i64(VF, b->dim - d);
            vf x = vf_load(from + d) * scale;
            if (!store) {
                x += vf_load_part(to + d, count);
            }
            vf_store_part(to + d, x, count);
        }
    }
}

/* Brings MR rows of the next block closer while this one is at work, and the rows of dq
 * that it will be added to: rows lie far apart, which no hardware prefetcher follows.
 */
static void
fetch_ahead(const backward_t *b, int64_t index, int32_t store)
{
    const attention_gradient_view_t *view = b->view;
    const attention_view_t *fwd = &view->forward;
    int64_t shift = b->head * b->dim;
    for (int64_t r = index * MR; r < min_i64((index + 1) * MR, BLOCK); r++) {
        int64_t next = b->row + BLOCK + r;
        if (next < fwd->query_count) {
            for (int64_t d = shift; d < shift + b->dim; d += 16) {
                __builtin_prefetch(fwd->q + next * fwd->q_stride + d, 0, 2);
                __builtin_prefetch(view->dout + next * view->dout_stride + d, 0, 2);
                __builtin_prefetch(fwd->out + next * fwd->out_stride + d, 0, 2);
            }
        }
        if (!store && r < b->row_count) {
            const float *dq = view->dq + (b->row + r - view->dq_first) * view->dq_stride
                              + b->head * view->dq_head_stride;
            for (int64_t d = 0; d < b->dim; d += 16) {
                __builtin_prefetch(dq + d, 1, 2);
            }
        }
    }
}

static void
pass_block(const backward_t *b, int32_t store, int first_head, int last_head)
{
    const attention_view_t *fwd = &b->view->forward;
    int64_t seen = attention_visible(fwd, b->row + b->row_count - 1);
    int64_t end = min_i64(b->end_key, seen);
    int last_block = b->row + b->row_count == fwd->query_count;
    for (int64_t key = b->first_key; key < end; key += KEY_BLOCK) {
        int64_t key_count = min_i64(KEY_BLOCK, end - key);
        for (int64_t i = 0; i < key_count; i += MR) {
            int64_t first_row = attention_first_row(fwd, key + i);
            fetch_ahead(b, (key + i - b->first_key) / MR, store);
            pass_keys(b, key + i, min_i64(MR, b->end_key - key - i),
                      b->score_gradients + i / FACTORS * BLOCK,
                      first_head && first_row >= b->row, last_head && last_block);
        }
        pass_dq(b, key, key_count);
    }
}

/* The segment's keys, up to a whole number of register tiles. */
static void
pack_keys(const backward_t *b)
{
    const attention_view_t *fwd = &b->view->forward;
    int64_t count = b->end_key - b->first_key;
    const float *keys = fwd->k + b->first_key * fwd->k_stride;
    pack_rows(b->keys, b->width, keys, fwd->k_stride, count, b->dim);
#if FACTORS == 1
    if (fwd->round) {
        round_vectors(b->keys, count * b->width);
    }
    int64_t padded = round_up(count, MR) - count;
    memset(b->keys + count * b->width, 0, (size_t)(padded * b->width) * sizeof(word_t));
#else
    for (int64_t key = 0; key < count; key += MR) {
        pack_tile_rows(b->key_rows + key * b->depth, keys + key * fwd->k_stride,
                       fwd->k_stride, min_i64(MR, count - key), b->dim, 1);
    }
#endif
}

static void
backward(const attention_gradient_view_t *view, int64_t first, int64_t end,
         int32_t store, void *scratch)
{
    const attention_view_t *fwd = &view->forward;
    backward_t b = {.view = view, .first_key = first, .end_key = end};
    arena_t arena = {scratch, 0};
    layout(&b, &arena, end - first, fwd->head_dim);
    pack_keys(&b);
    int64_t start = attention_first_row(fwd, first);
    for (b.head = 0; b.head < fwd->group_size; b.head++) {
        for (b.row = start; b.row < fwd->query_count; b.row += BLOCK) {
            b.row_count = min_i64(BLOCK, fwd->query_count - b.row);
            pack_block(&b);
            pass_block(&b, store, b.head == 0, b.head == fwd->group_size - 1);
            write_dq(&b, store);
        }
    }
}

extern const attention_backward_ops_t ISA_NAME(attention_backward_ops);
const attention_backward_ops_t ISA_NAME(attention_backward_ops) = {
    .scratch_bytes = backward_bytes,
    .run = backward,
};
