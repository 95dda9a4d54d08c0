/* Rotary positions of rows in place: one pass, 4 B read and 4 B written per element.
 * The row's cosines and sines are loaded once a head from the first cache; a row of the
 * table serves all heads. */
#include "../rowwise.h"
#include "simd.h"

enum { AHEAD = 512 }; /* elements: lines are asked for this far ahead */

VF_INLINE void
rotate_step(float *x, const float *cosines, int64_t half, vf sign, int64_t i,
            int64_t count)
{
    vf_prefetch(x, AHEAD + i);
    vf_prefetch(x, AHEAD + half + i);
    vf c = vf_get(cosines + i, count);
    vf s = vf_get(cosines + half + i, count) * sign;
    vf a = vf_get(x + i, count);
    vf b = vf_get(x + half + i, count);
    vf_put(x + i, a * c - b * s, count);
    vf_put(x + half + i, vf_fma(a, s, b * c), count);
}

static void
rotate(const void *untyped, int64_t first, int64_t last)
{
    const dcp_rope_args_t *args = untyped;
    int64_t dim = args->head_dim, half = dim / 2;
    vf sign = vf_set(args->inverse ? -1.0f : 1.0f);
    for (int64_t row = first; row < last; row++) {
        const float *cosines = args->table + args->positions[row] * dim;
        for (int64_t head = 0; head < args->heads; head++) {
            float *x = args->x + row * args->x_stride + head * dim;
            int64_t i = 0;
            for (; i + VF <= half; i += VF) {
                rotate_step(x, cosines, half, sign, i, VF);
            }
            if (i < half) {
                rotate_step(x, cosines, half, sign, i, half - i);
            }
        }
    }
}

const rope_ops_t ISA_NAME(rope_ops) = {.rotate = rotate};
