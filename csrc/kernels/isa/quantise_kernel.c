/* Blocks of 128 elements to codes and back.
 *
 * A block is read (and the residual added), its largest absolute value found over the
 * bits as integers, so that whatever is not finite lies above all else; scale = largest
 * / largest code, kept in 2^-118 .. FLT_MAX / largest code, where neither 1 / scale nor
 * a decoded value overflows: tinier blocks have codes below the largest one, and
 * rounding stays unbiased. Then y = value / scale:
 *
 *   integers   floor((round(256 y) + r) / 256), r = 8 random bits; the sum that rounds
 *              256 y (1.5 * 2^23 is added) is at once an integer whose low byte, after
 *              a shift by 8, is the code
 *   fp8        the same of |y| in units of the last bit that its exponent leaves, the
 *              exponent being at least that of the smallest normal number
 *
 * What has a code keeps it, whatever r. Every step is one IEEE operation on lanes that
 * do not meet (no fused ones), sums of squares have 16 fixed lanes: bits are the same
 * in every instruction set. Squares are taken of y, which can neither overflow nor
 * vanish, and scaled in fp64.
 *
 * Element e of a stream has byte e % 4 of word (e % 256) / 64 of Philox block
 * (e / 256) * 16 + e % 64 / 4: vectors of words are stored as they come. RUN blocks are
 * drawn at once.
 *
 * Memory of an element: 4 B read (8 with residual), 0.5 to 4 B written (and 4).
 * Instructions for 16 elements with 16 lanes: 9 to read twice and find the largest, 4
 * to round to an integer code, 9 to draw and use random bits, 8 more for fp8, 6 for a
 * residual.
 */
#include "../quantise_ops.h"
#include "codes.h"
#include "philox.h"
#include "rotation.h"
#include "simd.h"

#include <math.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum {
    GROUP = 256, /* elements of 16 Philox blocks */
    RUN = 16,    /* blocks between draws */
    LANES = 16
};

#define LEAST_SCALE 0x1p-118f

/* What a block is worked on with. */
typedef struct work {
    _Alignas(64) float value[BLOCK]; /* to be sent; beyond a short block 0 */
    _Alignas(64) float turned[BLOCK];
    _Alignas(64) float said[BLOCK]; /* by the codes, over the scale */
    _Alignas(64) uint8_t code[BLOCK];
    _Alignas(64) int32_t signs[BLOCK]; /* of the rotation */
    _Alignas(64) uint8_t random[RUN * BLOCK + GROUP];
} work_t;

/* ---- stages of a block ---- */

/* Sum of a fixed tree over 16 lanes, which stand in 16 / VF vectors. */
VF_INLINE float
lanes_sum(const vf lanes[LANES / VF])
{
#if VF == 16
    return vf_sum(lanes[0]);
#elif VF == 8
    return vf_sum(lanes[0] + lanes[1]);
#else
    return vf_sum((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
#endif
}

/* Random bytes of elements number .. number + count - 1, count <= RUN * BLOCK; returns
 * where the first one's stands. */
static const uint8_t *
draw(work_t *work, const uint32_t key[2], uint64_t stream, uint64_t number,
     int64_t count)
{
    int64_t skip = (int64_t)(number % GROUP);
    uint64_t aligned =
        number - number % GROUP; /* what is added to it may wrap around */
    uint8_t *to = work->random;
    for (int64_t done = 0; done < skip + count; done += GROUP) {
        uint64_t block = (aligned + (uint64_t)done) / GROUP * 16;
        for (int lane = 0; lane < 16; lane += VF) {
            vi words[PHILOX_WORDS];
            philox_draw(key, block + (uint64_t)lane, stream, words);
            for (int w = 0; w < PHILOX_WORDS; w++) {
                memcpy(to + done + w * 64 + lane * 4, &words[w], sizeof words[w]);
            }
        }
    }
    return to + skip;
}

/* Bits of the largest absolute value. */
VF_INLINE int32_t
largest_bits(const float *x)
{
    vi largest = {0};
    for (int i = 0; i < BLOCK; i += VF) {
        largest = vi_max(largest, (vi)vf_load(x + i) & INT32_MAX);
    }
    return vi_max_across(largest);
}

/* What is to be sent: x itself where it may be read as it is. */
VF_INLINE const float *
gather(work_t *work, const float *x, const float *residual, int count)
{
    if (count == BLOCK) {
        if (residual == NULL) {
            return x;
        }
        for (int i = 0; i < BLOCK; i += VF) {
            vf_store(work->value + i, vf_load(x + i) + vf_load(residual + i));
        }
        return work->value;
    }
    memset(work->value, 0, sizeof work->value);
    for (int i = 0; i < count; i++) {
        work->value[i] = residual != NULL ? x[i] + residual[i] : x[i];
    }
    return work->value;
}

VF_INLINE void
encode(work_t *work, const dcp_precision_t precision, const int nearest, const float *x,
       float inverse, const uint8_t *random)
{
    const format_t format = format_of(precision);
    for (int i = 0; i < BLOCK; i += FOUR * VF) {
        vi codes[FOUR];
        for (int v = 0; v < FOUR; v++) {
            int at = i + v * VF;
            vf y = vf_load(x + at) * inverse;
            vi r = nearest ? (vi){0} : widen(random + at);
            codes[v] = is_fp8(precision) ? encode_fp8(format, y, r, nearest)
                                         : encode_integers(y, r, nearest);
        }
        narrow(work->code + i, codes);
    }
}

/* Adds the squares of y = inverse x and of y - said, times `factor`. */
VF_INLINE void
add_squares(const float *x, const float *said, float inverse, double factor,
            double *squares)
{
    vf sent[LANES / VF] = {0}, left[LANES / VF] = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int v = 0; v < LANES / VF; v++) {
            vf y = vf_load(x + i + v * VF) * inverse;
            vf e = y - vf_load(said + i + v * VF);
            sent[v] += y * y;
            left[v] += e * e;
        }
    }
    squares[0] += factor * (double)lanes_sum(sent);
    squares[1] += factor * (double)lanes_sum(left);
}

/* residual = value - said * scale */
VF_INLINE void
keep(const float *value, const float *said, float scale, int count, float *residual)
{
    if (count == BLOCK) {
        for (int i = 0; i < BLOCK; i += VF) {
            vf_store(residual + i, vf_load(value + i) - vf_load(said + i) * scale);
        }
        return;
    }
    for (int i = 0; i < count; i++) {
        float sent = said[i] * scale;
        residual[i] = value[i] - sent;
    }
}

/* ---- a block ---- */

/* Where a block comes from and goes to; NULL: not wanted. */
typedef struct block {
    const float *x;
    float *residual;
    uint8_t *codes, *scale;
    const uint8_t *random;
    double *squares;
    double weight;
    int count;
} block_t;

VF_INLINE void
quantise_scaled(work_t *work, const block_t *b, const dcp_precision_t precision,
                const int nearest, int hadamard)
{
    const format_t format = format_of(precision);
    const float *value = gather(work, b->x, b->residual, b->count), *x = value;
    if (hadamard) {
        rotation_turn(value, work->signs, b->count, work->turned);
        x = work->turned;
    }
    int32_t bits = largest_bits(x);
    float scale = bits < INFINITE ? float_of(bits) / format.largest : NAN, inverse = 0;
    if (bits == 0 || bits >= INFINITE) {
        memset(work->code, 0, sizeof work->code);
    } else {
        scale = scale > LEAST_SCALE ? scale : LEAST_SCALE;
        scale = scale < format.most_scale ? scale : format.most_scale;
        inverse = 1.0f / scale;
        encode(work, precision, nearest, x, inverse, b->random);
    }
    if (b->codes != NULL) {
        memcpy(b->scale, &scale, sizeof scale);
        if (precision == DCP_PRECISION_INT4) {
            pack(work->code, b->codes, b->count);
        } else {
            memcpy(b->codes, work->code, b->count == BLOCK ? BLOCK : (size_t)b->count);
        }
    }
    if (b->residual == NULL && b->squares == NULL) {
        return;
    }
    if (bits >= INFINITE) {
        if (b->squares != NULL) {
            b->squares[0] += (double)NAN;
            b->squares[1] += (double)NAN;
        }
        return;
    }
    for (int i = 0; i < BLOCK; i += VF) {
        vf_store(work->said + i, decode(precision, work->code + i));
    }
    if (b->squares != NULL) {
        double unit = (double)scale * (hadamard ? ROTATION : 1);
        add_squares(x, work->said, inverse, b->weight * unit * unit, b->squares);
    }
    if (b->residual != NULL && b->codes != NULL) {
        if (hadamard) {
            for (int i = 0; i < BLOCK; i += VF) {
                vf_store(work->said + i, vf_load(work->said + i) * scale);
            }
            rotation_turn_back(work->said, work->signs, b->count);
        }
        keep(value, work->said, hadamard ? 1.0f : scale, b->count, b->residual);
    }
}

/* fp32 and bf16: no scale. A finite number that would round to infinity becomes the
 * largest bf16 number instead. */
VF_INLINE void
quantise_plain(work_t *work, const block_t *b, const dcp_precision_t precision)
{
    const float *value = gather(work, b->x, b->residual, b->count), *said = value;
    int32_t bits = largest_bits(value);
    if (precision == DCP_PRECISION_BF16) {
        uint8_t narrow_bytes[BLOCK * 2];
        float most = float_of(bits < INFINITE ? 0x7f7f0000 : INFINITE);
        vf high = vf_set(most), low = vf_set(-most);
        for (int i = 0; i < BLOCK; i += VF) {
            vf y = vf_min(high, vf_max(low, vf_round_bf16(vf_load(value + i))));
            vf_store(work->said + i, y);
            halves_t half = __builtin_convertvector((words_t)y >> 16, halves_t);
            memcpy(narrow_bytes + 2 * i, &half, sizeof half);
        }
        said = work->said;
        if (b->codes != NULL) {
            memcpy(b->codes, narrow_bytes, (size_t)b->count * 2);
        }
    } else if (b->codes != NULL) {
        memcpy(b->codes, value, (size_t)b->count * 4);
    }
    if (b->squares != NULL) {
        /* over a power of two near the largest, as the others are over their scale */
        int32_t exponent = bits & INFINITE;
        exponent = exponent > (8 << 23) ? exponent : 8 << 23;
        exponent = exponent < (246 << 23) ? exponent : 246 << 23;
        float unit = float_of(exponent), inverse = 1.0f / unit;
        for (int i = 0; i < BLOCK; i += VF) {
            vf_store(work->turned + i, vf_load(said + i) * inverse);
        }
        double factor = b->weight * (double)unit * (double)unit;
        if (bits >= INFINITE) {
            factor = (double)NAN;
        }
        add_squares(value, work->turned, inverse, factor, b->squares);
    }
    if (b->residual != NULL && b->codes != NULL && bits < INFINITE) {
        keep(value, said, 1.0f, b->count, b->residual);
    }
}

VF_INLINE void
quantise_blocks(const dcp_quantise_args_t *args, const quantise_key_t *key,
                int64_t first, int64_t last, double *squares,
                const dcp_precision_t precision, const int nearest)
{
    const int scaled = is_scaled(precision);
    int64_t block_count = (args->count - 1) / BLOCK + 1;
    uint8_t *scales = args->codes;
    uint8_t *codes = scales != NULL && scaled ? scales + 4 * block_count : scales;
    work_t work;
    memcpy(work.signs, key->signs, sizeof work.signs);
    const uint8_t *random = NULL;
    for (int64_t i = first; i < last; i++) {
        int64_t start = i * BLOCK, left = args->count - start;
        if (scaled && !nearest && (i - first) % RUN == 0) {
            int64_t run = RUN * BLOCK < left ? RUN * BLOCK : left;
            run = run < (last - i) * BLOCK ? run : (last - i) * BLOCK;
            uint64_t number = (uint64_t)args->first + (uint64_t)start;
            random = draw(&work, key->random, args->stream, number, run);
        }
        block_t block = {
            .x = args->x + start,
            .residual = args->residual != NULL ? args->residual + start : NULL,
            .codes = codes != NULL ? codes + bytes_of(precision, start) : NULL,
            .scale = scales != NULL ? scales + 4 * i : NULL,
            .random = random != NULL ? random + (i - first) % RUN * BLOCK : NULL,
            .squares = squares,
            .weight = args->weights != NULL ? (double)args->weights[i] : 1.0,
            .count = left < BLOCK ? (int)left : BLOCK,
        };
        if (scaled) {
            quantise_scaled(&work, &block, precision, nearest, args->hadamard);
        } else {
            quantise_plain(&work, &block, precision);
        }
    }
}

static void
quantise(const dcp_quantise_args_t *args, const quantise_key_t *key, int64_t first,
         int64_t last, double *squares)
{
    switch (args->precision) {
#define CASE(name)                                                                     \
    case DCP_PRECISION_##name:                                                         \
        if (args->nearest) {                                                           \
            quantise_blocks(args, key, first, last, squares, DCP_PRECISION_##name, 1); \
        } else {                                                                       \
            quantise_blocks(args, key, first, last, squares, DCP_PRECISION_##name, 0); \
        }                                                                              \
        break;
        CASE(FP32)
        CASE(BF16)
        CASE(FP8_E4M3)
        CASE(FP8_E5M2)
        CASE(INT8)
        CASE(INT4)
#undef CASE
    }
}

/* ---- and back ---- */

VF_INLINE void
put(float *out, vf x, const int accumulate)
{
    vf_store(out, accumulate ? vf_load(out) + x : x);
}

/* out = or += VF values at element i of `from`, which stands at the block's codes. */
VF_INLINE vf
value_at(const dcp_precision_t precision, const uint8_t *from, int i, float scale)
{
    if (precision == DCP_PRECISION_FP32) {
        vf x;
        memcpy(&x, from + 4 * i, sizeof x);
        return x;
    }
    if (precision == DCP_PRECISION_BF16) {
        halves_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        return (vf)(__builtin_convertvector(half, words_t) << 16);
    }
    return decode(precision, from + i) * scale;
}

VF_INLINE void
dequantise_block(work_t *work, const dcp_precision_t precision, const int accumulate,
                 const uint8_t *from, float scale, int hadamard, int count, float *out)
{
    if (precision == DCP_PRECISION_INT4) {
        unpack(work->code, from, count);
        from = work->code;
    } else if (count < BLOCK) {
        memset(work->value, 0, sizeof work->value);
        memcpy(work->value, from, (size_t)bytes_of(precision, count));
        from = (const uint8_t *)work->value;
    }
    if (count == BLOCK && !hadamard) {
        for (int i = 0; i < BLOCK; i += VF) {
            put(out + i, value_at(precision, from, i, scale), accumulate);
        }
        return;
    }
    for (int i = 0; i < BLOCK; i += VF) {
        vf_store(work->turned + i, value_at(precision, from, i, scale));
    }
    if (hadamard) {
        rotation_turn_back(work->turned, work->signs, count);
    }
    if (count == BLOCK) {
        for (int i = 0; i < BLOCK; i += VF) {
            put(out + i, vf_load(work->turned + i), accumulate);
        }
        return;
    }
    for (int i = 0; i < count; i++) {
        out[i] = accumulate ? out[i] + work->turned[i] : work->turned[i];
    }
}

VF_INLINE void
dequantise_blocks(const dcp_dequantise_args_t *args, const quantise_key_t *key,
                  int64_t first, int64_t last, const dcp_precision_t precision,
                  const int accumulate)
{
    const int scaled = is_scaled(precision);
    int64_t block_count = (args->count - 1) / BLOCK + 1;
    const uint8_t *scales = args->codes;
    const uint8_t *codes = scaled ? scales + 4 * block_count : scales;
    work_t work;
    memcpy(work.signs, key->signs, sizeof work.signs);
    for (int64_t i = first; i < last; i++) {
        int64_t start = i * BLOCK, left = args->count - start;
        float scale = 1.0f;
        if (scaled) {
            memcpy(&scale, scales + 4 * i, sizeof scale);
        }
        dequantise_block(&work, precision, accumulate,
                         codes + bytes_of(precision, start), scale,
                         scaled && args->hadamard && scale == scale,
                         left < BLOCK ? (int)left : BLOCK, args->out + start);
    }
}

static void
dequantise(const dcp_dequantise_args_t *args, const quantise_key_t *key, int64_t first,
           int64_t last)
{
    switch (args->precision) {
#define CASE(name)                                                              \
    case DCP_PRECISION_##name:                                                  \
        if (args->accumulate) {                                                 \
            dequantise_blocks(args, key, first, last, DCP_PRECISION_##name, 1); \
        } else {                                                                \
            dequantise_blocks(args, key, first, last, DCP_PRECISION_##name, 0); \
        }                                                                       \
        break;
        CASE(FP32)
        CASE(BF16)
        CASE(FP8_E4M3)
        CASE(FP8_E5M2)
        CASE(INT8)
        CASE(INT4)
#undef CASE
    }
}

const quantise_ops_t ISA_NAME(quantise_ops) = {
    .quantise = quantise,
    .dequantise = dequantise,
};
