/* Attention forward: softmax(scale * Q K^T) V of one sequence and key-value head.
 *
 * Keys are taken in tiles of TILE_KEYS. A tile is packed once (keys transposed into
 * panels, values copied) and stays in the first cache while every group of MR query
 * rows passes over it: scores of MR x PANEL in registers, the exponential there too,
 * then the product with the values added to the group's rows of the result, which wait
 * in scratch between tiles.
 *
 * Online softmax without row maxima: the exponent is s - m, where the reference m is
 * the row's score with the sequence's first key, and accumulators start at -m. fp32 has
 * room for weights far above 1, so m is raised, and what the row has so far scaled
 * down, only when a score is more than HEADROOM powers of two above it. One integer
 * maximum a vector finds out. Weights and sums have a relative precision, so none is
 * lost.
 *
 * Scores are compared before scaling, and masked by index: no real score is mistaken
 * for a masked one, however low, and large scores keep all their digits.
 *
 * With two factors a word (words.h) the same runs on bf16 numbers: queries are packed
 * for every tile, weights rounded as they are stored, while sums, references and lse
 * take them before that. With view->round the words are fp32 numbers that were rounded.
 *
 * Cost a row and vector of keys: 2 * dim multiply-adds, and 7 operations of the same
 * pipes for the exponential. Masked work: to a multiple of VF keys for scores, none for
 * values. Measured on Zen 5, dim 64: 78 % of the time is spent in the two products at
 * full rate, 9 % in the exponential, 5 % in packing.
 */
#include "attention_pack.h"

#if defined(__AVX512F__)
#define TILE_KEYS (64 * FACTORS)
#else
#define TILE_KEYS 128
#endif
#define TILE_WORDS (TILE_KEYS / FACTORS)
/* 2^32 and sums of it leave 2^95 to the values. */
#define HEADROOM 32.0f

/* What a group of MR rows keeps between tiles. */
enum { STATE_EXTRA = MR * VF + 16 };

typedef struct forward {
    const attention_view_t *view;
    int64_t width;       /* of a row of values and results: dim in whole vectors */
    int64_t block;       /* vectors of a block of it */
    float factor;        /* |scale| * log2(e); the sign of scale went into the keys */
    float limit;         /* HEADROOM / factor */
    int64_t state_count; /* floats of a group's state */
    int64_t depth;       /* words of dim */
    word_t *keys;        /* [TILE_KEYS / PANEL][depth][PANEL] */
    word_t *values;      /* [TILE_WORDS][width] */
    word_t *weights;     /* [MR][TILE_WORDS], exponentials of the current tile */
    float *scores;       /* [MR][PANEL], while references are raised */
    word_t *padded;      /* [MR][depth], query rows of a group that is not full, or
                            rounded ones */
    float *states;       /* [head][group of rows][state_count] */
} forward_t;

/* State: results [MR][width], lane-wise sums [MR][VF], references [MR]. */
typedef struct group {
    float *result, *sum, *reference;
    const word_t *q;
    int64_t q_stride;       /* in words */
    int64_t row, row_count; /* first row, rows of the group */
    int64_t head;
} group_t;

static void
layout(forward_t *f, arena_t *arena, int64_t row_count, int64_t group_size, int64_t dim)
{
    f->width = round_up(dim, VF);
    f->block = block_vectors(f->width / VF);
    f->state_count = round_up(MR * f->width + STATE_EXTRA, 16);
    f->depth = words_of(dim);
    f->keys = arena_words(arena, TILE_KEYS * f->depth);
    f->values = arena_words(arena, TILE_WORDS * f->width);
    f->weights = arena_words(arena, MR * TILE_WORDS);
    f->scores = arena_floats(arena, MR * PANEL);
    f->padded = arena_words(arena, round_up(MR * f->depth, VF));
    int64_t groups = (row_count + MR - 1) / MR * group_size;
    f->states = arena_floats(arena, groups * f->state_count);
}

static int64_t
forward_bytes(int64_t row_count, int64_t group_size, int64_t head_dim)
{
    forward_t f;
    arena_t arena = {NULL, 0};
    layout(&f, &arena, row_count, group_size, head_dim);
    return arena.used_bytes;
}

/* VF words of weights times x, which is at most 1. */
INLINE void
shrink_weights(word_t *weights, vf x)
{
#if FACTORS == 2
    wide_t words = (wide_t)words_load(weights);
    vf low = (vf)(words << 16) * x, high = (vf)(words & 0xffff0000u) * x;
    wide_t lower = (wide_t)vf_round_bf16(low) >> 16;
    words_store(weights, (vi)((wide_t)vf_round_bf16(high) | lower));
#else
    vf_store(weights, vf_load(weights) * x);
#endif
}

/* Raises the references of a group so that none of `count` scores is above its
 * reference; scales what is there already: weights of the tile's keys before `column`,
 * sums, and, unless it is the first tile, results. */
NOINLINE void
raise_reference(const forward_t *f, const group_t *g, int64_t column, int64_t count,
                int first_tile)
{
    for (int r = 0; r < MR; r++) {
        float *row = f->scores + r * PANEL;
        vf top = vf_set(-INFINITY);
        for (int64_t c = 0; c < count; c += VF) {
            top = vf_max(vf_load(row + c), top);
        }
        float raise = vf_max_across(top);
        if (!(raise > 0.0f)) {
            continue;
        }
        g->reference[r] += raise;
        vf shrink = exp2_tile(vf_set(-raise * f->factor));
        vf_store(g->sum + r * VF, vf_load(g->sum + r * VF) * shrink);
        for (int64_t c = 0; c < words_of(column); c += VF) {
            shrink_weights(f->weights + r * TILE_WORDS + c, shrink);
        }
        for (int64_t d = 0; !first_tile && d < f->width; d += VF) {
            float *x = g->result + r * f->width + d;
            vf_store(x, vf_load(x) * shrink);
        }
        for (int64_t c = 0; c < count; c += VF) {
            vf_store(row + c, vf_load(row + c) - vf_set(raise));
        }
    }
}

/* Weights 2^(factor * (s - m)) of the group and one panel, nv vectors of it, and their
 * sums. seen: keys of the panel that row 0 sees; each row sees `step` more than the one
 * before. */
INLINE void
weigh_panel(const forward_t *f, const group_t *g, int nv, int masked, int64_t column,
            int64_t seen, int64_t step, int first_tile)
{
    int first_panel = first_tile && column == 0;
    vf s[MR][NV];
    UNROLL for (int r = 0; r < MR; r++)
    {
        vf start = first_panel ? (vf){0} : vf_set(-g->reference[r]);
        UNROLL for (int v = 0; v < nv; v++)
        {
            s[r][v] = start;
        }
    }
    product(s, nv, g->q, g->q_stride, 1, f->keys + column * f->depth, PANEL, f->depth);
    if (first_panel) {
        UNROLL for (int r = 0; r < MR; r++)
        {
            float reference = s[r][0][0];
            reference = isfinite(reference) ? reference : 0.0f;
            g->reference[r] = reference;
            vf_store(g->sum + r * VF, (vf){0});
            UNROLL for (int v = 0; v < nv; v++)
            {
                s[r][v] -= vf_set(reference);
            }
        }
    }
    vi top = {0};
    UNROLL for (int v = 0; v < nv; v++)
    {
        UNROLL for (int r = 0; r < MR; r++)
        {
            if (masked) {
                s[r][v] = mask_select(mask_below(seen + r * step - v * VF), s[r][v],
                                      vf_set(-INFINITY));
            }
            /* compared as integers, on pipes that the multiply-adds do not need: right
             * for a limit above 0 (negative ones order wrongly, and stay below it) */
            top = vi_max((vi)s[r][v], top);
        }
    }
    if (__builtin_expect(any_greater((vf)top, vf_set(f->limit)), 0)) {
        tile_store(s, nv, f->scores, PANEL);
        raise_reference(f, g, column, nv * VF, first_tile);
        tile_load(s, nv, f->scores, PANEL);
    }
    vf factor = vf_set(f->factor);
    vf sum[MR];
    UNROLL for (int r = 0; r < MR; r++)
    {
        sum[r] = vf_load(g->sum + r * VF);
    }
    UNROLL for (int v = 0; v < nv; v++)
    {
        UNROLL for (int r = 0; r < MR; r++)
        {
            vf p = exp2_tile(s[r][v] * factor);
            if (masked) {
                p = mask_select(mask_below(seen + r * step - v * VF), p, (vf){0});
            }
            sum[r] += p;
            s[r][v] = p;
        }
    }
    UNROLL for (int r = 0; r < MR; r++)
    {
        vf_store(g->sum + r * VF, sum[r]);
        rows_store(f->weights + r * TILE_WORDS + column / FACTORS, s[r], nv);
    }
}

#define WEIGH(name, n, masked)                                               \
    NOINLINE void name(const forward_t *f, const group_t *g, int64_t column, \
                       int64_t seen, int64_t step, int first_tile)           \
    {                                                                        \
        weigh_panel(f, g, n, masked, column, seen, step, first_tile);        \
    }
WEIGH(weigh_whole, NV, 0)
WEIGH(weigh_1, 1, 1)
WEIGH(weigh_2, 2, 1)
#if NV == 4
WEIGH(weigh_3, 3, 1)
WEIGH(weigh_4, 4, 1)
#endif

static void
weigh_tile(const forward_t *f, const group_t *g, int64_t key_count, int64_t seen,
           int64_t step, int first_tile)
{
    int64_t end = min_i64(key_count, seen + (g->row_count - 1) * step);
    for (int64_t column = 0; column < end; column += PANEL) {
        int64_t count = min_i64(PANEL, end - column);
        int64_t nv = (count + VF - 1) / VF;
        int64_t panel_seen = min_i64(seen, key_count) - column;
        int64_t panel_step = seen >= key_count ? 0 : step;
        if (panel_seen >= PANEL) {
            weigh_whole(f, g, column, 0, 0, first_tile);
            continue;
        }
#define CALL(n) weigh_##n(f, g, column, panel_seen, panel_step, first_tile)
        SWITCH_VECTORS(nv, CALL)
#undef CALL
    }
}

/* Adds weights x values to a block of the result's columns; after the last tile divides
 * by the sums and writes the rows out. */
INLINE void
add_values(const forward_t *f, const group_t *g, int nv, int64_t d, int64_t count,
           int first_tile, const float *inverse)
{
    vf o[MR][NV];
    float *result = g->result + d;
    if (first_tile) {
        tile_zero(o, nv);
    } else {
        tile_load(o, nv, result, f->width);
    }
    product(o, nv, f->weights, TILE_WORDS, 1, f->values + d, f->width, words_of(count));
    if (inverse == NULL) {
        tile_store(o, nv, result, f->width);
        return;
    }
    const attention_view_t *view = f->view;
    float *out = view->out + g->row * view->out_stride + g->head * view->head_dim + d;
    int64_t rest = view->head_dim - d;
    UNROLL for (int r = 0; r < MR; r++)
    {
        if (r < g->row_count) {
            vf scale = vf_set(inverse[r]);
            UNROLL for (int v = 0; v < nv; v++)
            {
                vf x = o[r][v] * scale;
                if (rest - v * VF >= VF) {
                    vf_store(out + r * view->out_stride + v * VF, x);
                } else {
                    vf_store_part(out + r * view->out_stride + v * VF, x,
                                  rest - v * VF);
                }
            }
        }
    }
}

#define ADD(name, n)                                                                   \
    NOINLINE void name(const forward_t *f, const group_t *g, int64_t d, int64_t count, \
                       int first_tile, const float *inverse)                           \
    {                                                                                  \
        add_values(f, g, n, d, count, first_tile, inverse);                            \
    }
ADD(add_values_1, 1)
ADD(add_values_2, 2)
#if NV == 4
ADD(add_values_3, 3)
ADD(add_values_4, 4)
#endif

/* offset + log(sum), in a form that keeps the digits where both are large and opposite
 */
static float
log_sum(double offset, float sum)
{
    int exponent;
    float mantissa = frexpf(sum, &exponent);
    return (float)(offset + exponent * 0.69314718055994531 + (double)logf(mantissa));
}

/* Sums, log-sum-exp and 1 / sum of a group's rows; rows that see no key get 0 and
 * -inf. */
static void
finish_sums(const forward_t *f, const group_t *g, float inverse[MR])
{
    const attention_view_t *view = f->view;
    for (int64_t r = 0; r < MR; r++) {
        inverse[r] = 0.0f;
        if (r < g->row_count) {
            int64_t row = g->row + r;
            float lse = -INFINITY;
            if (attention_visible(view, row) > 0) {
                float sum = sum_across(vf_load(g->sum + r * VF));
                inverse[r] = 1.0f / sum;
                lse = log_sum(fabs((double)view->scale) * (double)g->reference[r], sum);
            }
            view->lse[g->head * view->lse_stride + row] = lse;
        }
    }
}

static void
clear_head_rows(const attention_view_t *view, int64_t head, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++) {
        memset(view->out + row * view->out_stride + head * view->head_dim, 0,
               (size_t)view->head_dim * sizeof(float));
        view->lse[head * view->lse_stride + row] = -INFINITY;
    }
}

static void
pass_tile(const forward_t *f, const group_t *g, int64_t key, int64_t key_count)
{
    const attention_view_t *view = f->view;
    int64_t step = view->causal ? 1 : 0;
    int64_t seen = view->causal ? g->row + 1 + view->key_count - view->query_count - key
                                : key_count;
    int64_t seen_last = seen + (g->row_count - 1) * step;
    int64_t count = min_i64(key_count, seen_last);
    int first_tile = key == 0;
    int last_tile =
        seen_last <= TILE_KEYS && (view->causal || key + key_count == view->key_count);
    weigh_tile(f, g, key_count, seen, step, first_tile);
    if (FACTORS == 1 && view->round) {
        round_vectors(f->weights, MR * TILE_WORDS);
    }
    float inverse[MR];
    if (last_tile) {
        finish_sums(f, g, inverse);
    }
    const float *finish = last_tile ? inverse : NULL;
    int64_t vectors = f->width / VF;
    for (int64_t v = 0; v < vectors; v += f->block) {
        int64_t nv = min_i64(f->block, vectors - v);
#define CALL(n) add_values_##n(f, g, v *VF, count, first_tile, finish)
        SWITCH_VECTORS(nv, CALL)
#undef CALL
    }
    if (last_tile && seen + key <= 0) {
        /* rows without a key: 0 whatever the values are */
        clear_head_rows(view, g->head, g->row, g->row + 1 - seen - key);
    }
}

/* Rows of the range that come before its first group of MR rows: groups are counted
 * from the sequence's end, so that, where masks are causal, the one that is not full
 * sees fewest keys. */
static int64_t
lead_rows(const attention_view_t *view, int64_t first)
{
    return first == 0 ? view->query_count % MR : 0;
}

/* All groups of one head that see the tile. `start`: the first row that does, or one of
 * its group. */
static void
pass_head(const forward_t *f, int64_t head, int64_t first, int64_t start, int64_t end,
          int64_t key, int64_t key_count)
{
    const attention_view_t *view = f->view;
    int64_t lead = lead_rows(view, first);
    int64_t groups = (end - first + MR - 1) / MR;
    int64_t index = start < first + lead ? 0 : (start - first - lead) / MR + (lead > 0);
    int64_t row = index == 0 ? first : first + lead + (index - (lead > 0)) * MR;
    float *state = f->states + (head * groups + index) * f->state_count;
    while (row < end) {
        group_t g = {
            .result = state,
            .sum = state + MR * f->width,
            .reference = state + MR * f->width + MR * VF,
            .q = f->padded,
            .q_stride = f->depth,
            .row = row,
            .row_count = row == first && lead > 0 ? lead : MR,
            .head = head,
        };
        const float *q = view->q + row * view->q_stride + head * view->head_dim;
#if FACTORS == 1
        if (g.row_count == MR && !view->round) {
            g.q = q;
            g.q_stride = view->q_stride;
        }
#endif
        if (g.q == f->padded) {
            pack_tile_rows(f->padded, q, view->q_stride, g.row_count, view->head_dim,
                           view->round);
        }
        pass_tile(f, &g, key, key_count);
        row += g.row_count;
        state += f->state_count;
    }
}

static void
clear_rows(const attention_view_t *view, int64_t first, int64_t end)
{
    for (int64_t head = 0; head < view->group_size; head++) {
        clear_head_rows(view, head, first, end);
    }
}

static void
forward(const attention_view_t *view, int64_t first, int64_t end, void *scratch)
{
    if (view->key_count == 0) {
        clear_rows(view, first, end);
        return;
    }
    forward_t f = {.view = view};
    arena_t arena = {scratch, 0};
    layout(&f, &arena, end - first, view->group_size, view->head_dim);
    f.factor = fabsf(view->scale) * LOG2_E;
    f.limit = HEADROOM / f.factor;
    float sign = view->scale < 0.0f ? -1.0f : 1.0f;

    /* rows that see no key; whole groups of them are not visited again */
    int64_t idle = max_i64(first, min_i64(attention_first_row(view, 0), end));
    clear_rows(view, first, idle);
    int64_t key_end = attention_visible(view, end - 1);
    for (int64_t key = 0; key < key_end; key += TILE_KEYS) {
        int64_t key_count = min_i64(TILE_KEYS, key_end - key);
        pack_transposed(f.keys, view->k + key * view->k_stride, view->k_stride,
                        key_count, view->head_dim, sign);
        pack_rows(f.values, f.width, view->v + key * view->v_stride, view->v_stride,
                  key_count, view->head_dim);
        if (view->round) {
            round_vectors(f.keys, round_up(key_count, PANEL) * view->head_dim);
            round_vectors(f.values, key_count * f.width);
        }
        int64_t start = max_i64(attention_first_row(view, key), first);
        for (int64_t head = 0; head < view->group_size; head++) {
            pass_head(&f, head, first, start, end, key, key_count);
        }
    }
}

extern const attention_forward_ops_t ISA_NAME(attention_forward_ops);
const attention_forward_ops_t ISA_NAME(attention_forward_ops) = {
    .scratch_bytes = forward_bytes,
    .run = forward,
};
