/* Dropout of rows with Philox4x32-10: word of column c of a row = word (c % 64) / 16 of
 * block (c / 64) * 16 + c % 16, which in every vector width puts a vector's words into
 * neighbouring columns. The counter is (block, row id), the key comes with the job.
 *
 * Blocks with even and odd numbers stand in two vectors of 64-bit lanes of which only
 * the low halves count: a 32 x 32 bit product needs no shuffles then, its low half is
 * used where it lies and its high half is a shift away. Memory per element: 4 B read
 * (8 B with `add`), 4 B written; some 2.5 instructions an element with 16 lanes.
 */
#include "../rowwise.h"
#include "simd.h"

typedef uint64_t vq __attribute__((vector_size(VF * 4)));

enum {
    GROUP_BLOCKS = 16,
    GROUP_COLUMNS = 64,
    WORDS = 4,
    AHEAD = 512 /* elements: lines are asked for this far ahead */
};

static inline vq
product(vq a, uint32_t b) /* of the low halves */
{
#if defined(__AVX512F__)
    return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * b;
#endif
}

/* dcp_philox (dcp/rng.h) in every lane; upper halves are undefined, in and out. */
static inline void
philox(const uint32_t key[2], vq c[WORDS])
{
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        vq p0 = product(c[0], 0xD2511F53u);
        vq p1 = product(c[2], 0xCD9E8D57u);
        c[0] = (p1 >> 32) ^ c[1] ^ (uint64_t)k0;
        c[2] = (p0 >> 32) ^ c[3] ^ (uint64_t)k1;
        c[1] = p1;
        c[3] = p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* keep[w]: all bits of lane l set where the column of word w of block `block` + l
 * stays; blocks block .. block + VF - 1. */
static inline void
draw(const dropout_job_t *job, uint64_t row_id, uint64_t block, vi keep[WORDS])
{
    vq even[WORDS], odd[WORDS];
    vq number;
    for (int i = 0; i < VF / 2; i++) {
        number[i] = 2 * (uint64_t)i;
    }
    vq zero = {0};
    even[0] = number + block;
    odd[0] = number + (block + 1);
    even[1] = odd[1] = zero + (block >> 32);
    even[2] = odd[2] = zero + row_id;
    even[3] = odd[3] = zero + (row_id >> 32);
    philox(job->key, even);
    philox(job->key, odd);
    vi limit = (vi){0} + (int32_t)(job->threshold ^ 0x80000000u);
    for (int w = 0; w < WORDS; w++) {
        vi words = (vi)((even[w] & 0xffffffffu) | (odd[w] << 32));
        keep[w] = (words ^ INT32_MIN) < limit; /* unsigned, by flipping the top bit */
    }
}

VF_INLINE void
apply(const float *x, const float *add, float *out, vi keep, float scale, int64_t count)
{
    vf result = (vf)((vi)(vf_get(x, count) * scale) & keep);
    if (add != NULL) {
        result += vf_get(add, count);
    }
    vf_put(out, result, count);
}

static inline void
prefetch(const float *p)
{
    for (int w = 0; w < WORDS; w++) {
        vf_prefetch(p, AHEAD + w * GROUP_BLOCKS);
    }
}

/* The columns of blocks block .. block + VF - 1, the first of which is `column`. */
static inline void
apply_blocks(const dropout_job_t *job, int64_t row, int64_t block, int64_t column)
{
    const dcp_dropout_args_t *args = job->args;
    int64_t width = args->width, at = row * width + column;
    const float *x = args->x + at;
    const float *add = args->add != NULL ? args->add + at : NULL;
    float *out = args->out + at;
    prefetch(x);
    prefetch(out);
    if (add != NULL) {
        prefetch(add);
    }
    vi keep[WORDS];
    draw(job, (uint64_t)args->row_ids[row], (uint64_t)block, keep);
    for (int w = 0; w < WORDS; w++) {
        int64_t shift = w * GROUP_BLOCKS, left = width - column - shift;
        if (left <= 0) {
            break;
        }
        apply(x + shift, add != NULL ? add + shift : NULL, out + shift, keep[w],
              job->scale, left < VF ? left : VF);
    }
}

static void
dropout(const void *untyped, int64_t first, int64_t last)
{
    const dropout_job_t *job = untyped;
    int64_t width = job->args->width;
    for (int64_t row = first; row < last; row++) {
        for (int64_t begin = 0; begin < width; begin += GROUP_COLUMNS) {
            int64_t block = begin / GROUP_COLUMNS * GROUP_BLOCKS;
            for (int64_t lane = 0; lane < GROUP_BLOCKS && begin + lane < width;
                 lane += VF) {
                apply_blocks(job, row, block + lane, begin + lane);
            }
        }
    }
}

const dropout_ops_t ISA_NAME(dropout_ops) = {.dropout = dropout};
