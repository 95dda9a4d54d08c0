/* AdamW with m and v in 8 bits an element, one fp32 scale a block of 256 (Dettmers et
 * al., arXiv 2110.02861).
 *
 * A code stands for a value in [0, 1] times the block's scale, its largest |m| or v.
 * Values are dense near 0 (dynamic tree): 2^i of them, evenly spaced, in decade i, so
 * that code c lies in decade i = floor(log2 c):
 *
 *   value(c) = 10^(i - top) (0.1 + 0.9 ((c + 1/2) / 2^i - 1)) / (1 - 0.45 / 2^top)
 *
 * m: a sign bit and c = 0..127, top 6; v: c = 0..255, top 7. Code 0 is exactly 0, the
 * largest code exactly 1 (the paper's 1.0 has no counterpart below zero). The exponent
 * of (float)c is i, so decoding is two 8-entry lookups and one multiply-add; encoding
 * finds the decade by its threshold and rounds a line: the nearest value, always. Two
 * exceptions keep a coordinate at rest where it is: |m| below half the least value
 * becomes 0, and v never does (unless below 2^-126, where m is below any eps), so that
 * no m is ever divided by eps alone.
 *
 * A step updates a block with the fresh m and v, before they are rounded: pass 1 reads
 * 10 B and writes 4 B an element and leaves both in 2 KiB on the stack, pass 2 writes 2
 * B. Blocks do not look at each other; a row's last block is short, and its last vector
 * goes through the same operations.
 */
#include "../rowwise.h"
#include "simd.h"

enum { BLOCK = DCP_ADAMW8BIT_BLOCK };

enum { DECADES = 8, M_TOP = 6, V_TOP = 7 };

typedef struct code_tables {
    /* by (i + 7) % 8, the low bits of the exponent of (float)c: value = base + slope c
     */
    float base[DECADES], slope[DECADES];
    /* by i: c = round(x * per + shift), at most last */
    float per[DECADES], shift[DECADES], last[DECADES];
    float least[DECADES + 3]; /* of decade i; of decade 0: half the least value; beyond
                                 the last: more than any x */
    /* The decade of 2^(k - 31): a power of two and the next have one threshold between
     * them at most. */
    int32_t first[32];
} code_tables_t;

#define TEN(n)          \
    ((n) == 0    ? 1.0  \
     : (n) == -1 ? 1e-1 \
     : (n) == -2 ? 1e-2 \
     : (n) == -3 ? 1e-3 \
     : (n) == -4 ? 1e-4 \
     : (n) == -5 ? 1e-5 \
     : (n) == -6 ? 1e-6 \
     : (n) == -7 ? 1e-7 \
                 : 1e1)
#define TWO(n) ((double)(1 << (n)))
#define WHOLE(top) (1.0 - 0.45 / TWO(top)) /* the largest value is divided by this */
#define BASE(i, top) \
    (float)(TEN((i) - (top)) * (0.1 - 0.9 + 0.45 / TWO(i)) / WHOLE(top))
#define SLOPE(i, top) (float)(TEN((i) - (top)) * 0.9 / TWO(i) / WHOLE(top))
#define PER(i, top) (float)(TWO(i) * WHOLE(top) / (0.9 * TEN((i) - (top))))
#define SHIFT(i, top) (float)(TWO(i) - TWO(i) / 9.0 - 0.5)
#define LAST(i, top) (float)(TWO((i) + 1) - 1.0)
/* half way from the largest value below to the first of decade i */
#define LEAST(i, top) \
    (float)(TEN((i) - (top)) * ((i) == 0 ? 0.275 : 0.1 + 0.18 / TWO(i)) / WHOLE(top))
#define BY_DECADE(X, top) \
    X(0, top)             \
    , X(1, top)           \
    , X(2, top)           \
    , X(3, top)           \
    , X(4, top)           \
    , X(5, top)           \
    , X(6, top)           \
    , X(7, top)
#define BY_EXPONENT(X, top) \
    X(1, top)               \
    , X(2, top)             \
    , X(3, top)             \
    , X(4, top)             \
    , X(5, top)             \
    , X(6, top)             \
    , X(7, top)             \
    , X(0, top)
#define TABLES(top)                                                       \
    .base = {BY_EXPONENT(BASE, top)}, .slope = {BY_EXPONENT(SLOPE, top)}, \
    .per = {BY_DECADE(PER, top)}, .shift = {BY_DECADE(SHIFT, top)},       \
    .last = {BY_DECADE(LAST, top)}, .least = {BY_DECADE(LEAST, top), 10, 10, 10}

static const code_tables_t m_tables = {
    TABLES(M_TOP),
    .first = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2,
              2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 6},
};
static const code_tables_t v_tables = {
    TABLES(V_TOP),
    .first = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3,
              3, 3, 4, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 7},
};

/* Eight floats for table_get. */
VF_INLINE vf
table_load(const float *table)
{
#if defined(__AVX512F__)
    return (vf)_mm512_broadcast_f32x8(_mm256_loadu_ps(table));
#else
    return vf_load(table);
#endif
}

/* By the low three bits of each lane; the table in memory is the same. */
VF_INLINE vf
table_get(vf table, const float *memory, vi index)
{
#if defined(__AVX512F__)
    (void)memory;
    return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__)
    (void)memory;
    return (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
    (void)table;
    vf out;
    for (int i = 0; i < VF; i++) {
        out[i] = memory[index[i] & 7];
    }
    return out;
#endif
}

/* `count` bytes, widened; 0 in the other lanes. */
VF_INLINE vi
codes_get(const uint8_t *p, int64_t count)
{
#if defined(__AVX512F__)
    __m128i bytes = count == VF
                        ? _mm_loadu_si128((const __m128i *)(const void *)p)
                        : _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1u), p);
    return (vi)_mm512_cvtepu8_epi32(bytes);
#elif defined(__AVX2__)
    uint64_t word = 0;
    memcpy(&word, p, (size_t)count);
    return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)word));
#else
    vi out = {0};
    for (int64_t i = 0; i < count; i++) {
        out[i] = p[i];
    }
    return out;
#endif
}

VF_INLINE void
codes_put(uint8_t *p, vi codes, int64_t count)
{
#if defined(__AVX512F__)
    if (count == VF) {
        _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)codes));
    } else {
        _mm512_mask_cvtepi32_storeu_epi8(p, (__mmask16)((1u << count) - 1u),
                                         (__m512i)codes);
    }
#elif defined(__AVX2__)
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes),
                                     _mm256_extracti128_si256((__m256i)codes, 1));
    uint64_t word = (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
    memcpy(p, &word, (size_t)count);
#else
    for (int64_t i = 0; i < count; i++) {
        p[i] = (uint8_t)codes[i];
    }
#endif
}

/* Nearest integer, for 0 <= x < 2^22. */
VF_INLINE vi
to_nearest(vf x)
{
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    const vf magic = vf_set(8388608.0f); /* 2^23: the low bits are the integer */
    return (vi)(x + magic) & 0x7fffff;
#endif
}

/* c where x >= least, else 0. */
VF_INLINE vi
keep_from(vi c, vf x, vf least)
{
#if defined(__AVX512F__)
    return (vi)_mm512_maskz_mov_epi32(
        _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GE_OQ), (__m512i)c);
#else
    return c & (x >= least);
#endif
}

typedef struct decoder {
    float base_memory[DECADES], slope_memory[DECADES]; /* times the scale */
    vf base, slope;
} decoder_t;

VF_INLINE void
decoder_init(decoder_t *d, const code_tables_t *tables, float scale)
{
#if defined(__AVX2__)
    d->base = table_load(tables->base) * scale;
    d->slope = table_load(tables->slope) * scale;
#else
    for (int i = 0; i < DECADES; i++) {
        d->base_memory[i] = tables->base[i] * scale;
        d->slope_memory[i] = tables->slope[i] * scale;
    }
    d->base = d->slope = vf_set(0); /* tables are read from memory */
#endif
}

/* c in 0..255 */
VF_INLINE vf
decode(const decoder_t *d, vi c)
{
    vf x = __builtin_convertvector(c, vf);
    vi index = (vi)x >> 23;
    vf slope = table_get(d->slope, d->slope_memory, index);
    vf base = table_get(d->base, d->base_memory, index);
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_fmadd_ps(_mm512_test_epi32_mask((__m512i)c, (__m512i)c),
                                     (__m512)slope, (__m512)x, (__m512)base);
#else
    return vf_select(c != 0, vf_fma(slope, x, base), vf_set(0));
#endif
}

typedef struct encoder {
    const code_tables_t *tables;
    vf inverse; /* of the scale; 0: the block is 0 */
    vf per, shift, last;
#if defined(__AVX512F__)
    __m512i first_low, first_high;
    vf next; /* least of decade i + 1 */
#elif defined(__AVX2__)
    vf next, second; /* least of decades i + 1 and i + 2 */
#endif
} encoder_t;

/* 1 / scale would overflow: such numbers count as 0. */
static const float least_scale = 0x1p-126f;

VF_INLINE void
encoder_init(encoder_t *e, const code_tables_t *tables, float scale)
{
    e->tables = tables;
    e->inverse = vf_set(scale >= least_scale ? 1.0f / scale : 0.0f);
    e->per = table_load(tables->per);
    e->shift = table_load(tables->shift);
    e->last = table_load(tables->last);
#if defined(__AVX512F__)
    e->first_low = _mm512_loadu_si512(tables->first);
    e->first_high = _mm512_loadu_si512(tables->first + 16);
    e->next = table_load(tables->least + 1);
#elif defined(__AVX2__)
    e->next = table_load(tables->least + 1);
    e->second = table_load(tables->least + 2);
#endif
}

/* How many thresholds from that of decade 1 on are at most x. */
VF_INLINE vi
decade_of(const encoder_t *e, vf x)
{
#if defined(__AVX512F__)
    /* 2^-31 is below every threshold */
    __m512i bits = _mm512_max_epi32((__m512i)x, _mm512_set1_epi32(0x30000000));
    __m512i first = _mm512_permutex2var_epi32(e->first_low, _mm512_srli_epi32(bits, 23),
                                              e->first_high);
    __mmask16 beyond = _mm512_cmp_ps_mask(
        (__m512)x, (__m512)table_get(e->next, NULL, (vi)first), _CMP_GE_OQ);
    return (vi)_mm512_mask_add_epi32(first, beyond, first, _mm512_set1_epi32(1));
#elif defined(__AVX2__)
    vi i = (x >= vf_set(e->tables->least[4])) & 4; /* bisection */
    i += (x >= table_get(e->second, NULL, i)) & 2;
    return i + ((x >= table_get(e->next, NULL, i)) & 1);
#else
    vi i = {0};
    for (int k = 1; k < DECADES; k++) {
        i -= x >= vf_set(e->tables->least[k]);
    }
    return i;
#endif
}

/* The nearest code from 1 on, for x in [0, 1]; the caller decides what becomes 0. */
VF_INLINE vi
encode(const encoder_t *e, vf x)
{
    vi i = decade_of(e, x);
    vf c = vf_fma(x, table_get(e->per, e->tables->per, i),
                  table_get(e->shift, e->tables->shift, i));
    /* the last value of a decade is also nearest to what lies a bit beyond it */
    vf last = table_get(e->last, e->tables->last, i);
    return to_nearest(vf_max(vf_min(c, last), vf_set(1)));
}

typedef struct adamw8bit_consts {
    vf beta1, beta2, rest1, rest2, unbias1, unbias2, lr, eps, decay, grad_scale;
} adamw8bit_consts_t;

/* Of a block, before they are rounded. */
typedef struct fresh {
    float m[BLOCK], v[BLOCK];
} fresh_t;

/* By lane; apart from the arrays, so that they stay in registers. */
typedef struct largest {
    vf m, v;
} largest_t;

VF_INLINE void
update(const adamw8bit_consts_t *c, const decoder_t *dm, const decoder_t *dv,
       const dcp_adamw8bit_args_t *args, int64_t at, int64_t j, fresh_t *fresh,
       largest_t *largest, int64_t count)
{
    vi m_codes = codes_get(args->m + at, count);
    vf m_sign = (vf)((m_codes & 0x80) << 24);
    vf m0 = (vf)((vi)decode(dm, m_codes & 0x7f) ^ (vi)m_sign);
    vf v0 = decode(dv, codes_get(args->v + at, count));
    vf grad = vf_get(args->g + at, count) * c->grad_scale;
    vf m1 = vf_fma(c->beta1, m0, c->rest1 * grad);
    vf v1 = vf_fma(c->beta2, v0, c->rest2 * grad * grad);
    vf w0 = vf_get(args->w + at, count);
    vf step = (m1 * c->unbias1) / (vf_sqrt(v1 * c->unbias2) + c->eps);
    vf_put(args->w + at, w0 - c->lr * vf_fma(c->decay, w0, step), count);
    vf_store(fresh->m + j, m1);
    vf_store(fresh->v + j, v1);
    largest->m = vf_max(vf_abs(m1), largest->m);
    largest->v = vf_max(v1, largest->v);
}

VF_INLINE void
round_codes(const encoder_t *em, const encoder_t *ev, const dcp_adamw8bit_args_t *args,
            int64_t at, int64_t j, const fresh_t *fresh, int64_t count)
{
    vf m = vf_load(fresh->m + j), x = vf_abs(m) * em->inverse;
    vi sign = ((vi)m >> 24) & 0x80;
    vi m_codes = keep_from(encode(em, x) | sign, x, vf_set(m_tables.least[0]));
    codes_put(args->m + at, m_codes, count);
    vf v = vf_load(fresh->v + j);
    vi v_codes = keep_from(encode(ev, v * ev->inverse), v, vf_set(least_scale));
    codes_put(args->v + at, v_codes, count);
}

static void
adamw8bit_block(const adamw8bit_consts_t *c, const dcp_adamw8bit_args_t *args,
                int64_t block, int64_t at, int64_t count)
{
    fresh_t fresh; /* written as far as it is read */
    largest_t largest = {vf_set(0), vf_set(0)};
    decoder_t dm, dv;
    decoder_init(&dm, &m_tables, args->m_scale[block]);
    decoder_init(&dv, &v_tables, args->v_scale[block]);
    int64_t j = 0;
    for (; j + VF <= count; j += VF) {
        update(c, &dm, &dv, args, at + j, j, &fresh, &largest, VF);
    }
    if (j < count) {
        update(c, &dm, &dv, args, at + j, j, &fresh, &largest, count - j);
    }
    float m_scale = vf_max_across(largest.m), v_scale = vf_max_across(largest.v);
    encoder_t em, ev;
    encoder_init(&em, &m_tables, m_scale);
    encoder_init(&ev, &v_tables, v_scale);
    for (j = 0; j + VF <= count; j += VF) {
        round_codes(&em, &ev, args, at + j, j, &fresh, VF);
    }
    if (j < count) {
        round_codes(&em, &ev, args, at + j, j, &fresh, count - j);
    }
    args->m_scale[block] = m_scale;
    args->v_scale[block] = v_scale;
}

/* Blocks first .. last-1, row by row. */
static void
adamw8bit(const void *untyped, int64_t first, int64_t last)
{
    const dcp_adamw8bit_args_t *args = untyped;
    adamw8bit_consts_t c = {
        .beta1 = vf_set(args->beta1),
        .beta2 = vf_set(args->beta2),
        .rest1 = vf_set(1.0f - args->beta1),
        .rest2 = vf_set(1.0f - args->beta2),
        .unbias1 = vf_set(1.0f / args->bias1),
        .unbias2 = vf_set(1.0f / args->bias2),
        .lr = vf_set(args->lr),
        .eps = vf_set(args->eps),
        .decay = vf_set(args->decay),
        .grad_scale = vf_set(args->grad_scale),
    };
    int64_t row_blocks = (args->width + BLOCK - 1) / BLOCK;
    for (int64_t block = first; block < last; block++) {
        int64_t start = block % row_blocks * BLOCK;
        int64_t rest = args->width - start;
        adamw8bit_block(&c, args, block, block / row_blocks * args->width + start,
                        rest < BLOCK ? rest : BLOCK);
    }
}

const adamw8bit_ops_t ISA_NAME(adamw8bit_ops) = {
    .adamw8bit = adamw8bit,
};
