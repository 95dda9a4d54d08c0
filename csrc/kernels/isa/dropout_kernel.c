/* Dropout of rows with Philox4x32-10: word of column c of a row = word (c % 64) / 16 of
 * block (c / 64) * 16 + c % 16, which in every vector width puts a vector's words into
 * neighbouring columns. The counter is (block, row id), the key comes with the job.
 * The drawing takes some 2.5 instructions an element with 16 lanes. Memory per element:
 * 4 B read (8 B with `add`), 4 B written.
 */
#include "../rowwise.h"
#include "philox.h"
#include "simd.h"

enum {
    GROUP_BLOCKS = 16,
    GROUP_COLUMNS = 64,
    WORDS = PHILOX_WORDS,
    AHEAD = 512 /* elements: lines are asked for this far ahead */
};

/* keep[w]: all bits of lane l set where the column of word w of block `block` + l
 * stays; blocks block .. block + VF - 1. */
static inline void
draw(const dropout_job_t *job, uint64_t row_id, uint64_t block, vi keep[WORDS])
{
    vi words[WORDS];
    philox_draw(job->key, block, row_id, words);
    vi limit = (vi){0} + (int32_t)(job->threshold ^ 0x80000000u);
    for (int w = 0; w < WORDS; w++) {
        keep[w] =
            (words[w] ^ INT32_MIN) < limit; /* unsigned, by flipping the top bit */
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
