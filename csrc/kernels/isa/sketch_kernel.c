/* Signed sums of a linear sketch (ops.h).
 *
 * Elements whose numbers leave the same rest of 1,024 share a bucket, so neighbours add
 * to neighbouring sums, lane by lane. Signs: a group of 2,048 elements has 16 Philox
 * blocks; vector k of 16 elements takes bit 31 - k % 32 of word k / 32 of all 16, so
 * that the words, moved up by one bit a vector, are the signs as they stand. Eight
 * groups are added in fp32 (16 numbers a bucket), then to the fp64 sums.
 *
 * Memory: 4 B read an element; sums (12 KB) stay in cache. Instructions for 16 elements
 * with 16 lanes: about 8, one of them for the drawing.
 */
#include "../quantise_ops.h"
#include "philox.h"
#include "simd.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum {
    BUCKETS = DCP_SKETCH_BUCKETS,
    LANES = 16,
    PARTS = LANES / VF,
    GROUP = 2048, /* elements */
    BITS = 32,
    FLUSH_GROUPS = 8
};

/* Adds `count` (1 .. LANES) elements. */
VF_INLINE void
add_lanes(float *sums, const float *x, const vi words[PARTS], vf weight,
          const int weighted, int64_t count)
{
    for (int p = 0; p < PARTS; p++) {
        int64_t left = count - p * VF;
        int64_t n = left < 0 ? 0 : left < VF ? left : VF;
        vf y = vf_get(x + p * VF, n);
        if (weighted) {
            y *= weight;
        }
        y = (vf)((vi)y ^ (words[p] & INT32_MIN));
        vf_put(sums + p * VF, vf_get(sums + p * VF, n) + y, n);
    }
}

/* Elements first .. last - 1 of x, all of one group, whose words are given. */
VF_INLINE void
add_group(const dcp_sketch_args_t *args, int64_t first, int64_t last,
          const int32_t words[PHILOX_WORDS][LANES], float *sums, const int weighted)
{
    int64_t at = (args->first + first) % GROUP; /* in the group */
    for (int64_t i = first; i < last;) {
        int64_t vector = at / LANES, bit = vector % BITS;
        vi shifted[PARTS];
        for (int p = 0; p < PARTS; p++) {
            memcpy(&shifted[p], &words[vector / BITS][p * VF], sizeof shifted[p]);
            shifted[p] = (vi)((vi)shifted[p] << (int32_t)bit);
        }
        for (; bit < BITS && i < last; bit++, i += LANES, at += LANES) {
            vf weight =
                weighted ? vf_set(args->weights[i / DCP_PRECISION_BLOCK]) : vf_set(1);
            float *to = sums + at % BUCKETS;
            if (last - i >= LANES) {
                add_lanes(to, args->x + i, shifted, weight, weighted, LANES);
            } else {
                add_lanes(to, args->x + i, shifted, weight, weighted, last - i);
            }
            for (int p = 0; p < PARTS; p++) {
                shifted[p] <<= 1;
            }
        }
    }
}

static void
flush(float *sums, double *total)
{
    for (int b = 0; b < BUCKETS; b++) {
        total[b] += (double)sums[b];
        sums[b] = 0;
    }
}

static void
sketch(const dcp_sketch_args_t *args, const uint32_t key[2], int64_t first,
       int64_t last, double *total)
{
    _Alignas(64) float sums[BUCKETS] = {0};
    int groups = 0;
    while (first < last) {
        int64_t number = args->first + first;
        int64_t end = first + (GROUP - number % GROUP);
        end = end < last ? end : last;
        int32_t words[PHILOX_WORDS][LANES];
        for (int p = 0; p < PARTS; p++) {
            vi drawn[PHILOX_WORDS];
            uint64_t block = (uint64_t)(number / GROUP) * LANES + (uint64_t)(p * VF);
            philox_draw(key, block, 0, drawn);
            for (int w = 0; w < PHILOX_WORDS; w++) {
                memcpy(&words[w][p * VF], &drawn[w], sizeof drawn[w]);
            }
        }
        if (args->weights != NULL) {
            add_group(args, first, end, (const int32_t(*)[LANES])words, sums, 1);
        } else {
            add_group(args, first, end, (const int32_t(*)[LANES])words, sums, 0);
        }
        if (++groups == FLUSH_GROUPS) {
            flush(sums, total);
            groups = 0;
        }
        first = end;
    }
    flush(sums, total);
}

const sketch_ops_t ISA_NAME(sketch_ops) = {.sketch = sketch};
