/* AdamW on a run of elements, and the sum of squares of rows.
 *
 * AdamW: 16 B read, 12 B written an element, one division and one square root, both
 * correctly rounded. The rest of a run goes through the operations of the full vectors,
 * so an element's result does not depend on where its run begins or ends.
 *
 * Sum of squares: element j adds to double j % 16 of sixteen, whatever the vector width
 * (4 B read an element); a product of two floats is exact in a double, so a fused
 * multiply-add changes nothing: all instruction sets give the same bits.
 */
#include "../rowwise.h"
#include "simd.h"

typedef struct adamw_consts {
    vf beta1, beta2, rest1, rest2; /* rest: 1 - beta */
    vf unbias1, unbias2;           /* 1 / (1 - beta^t) */
    vf lr, eps, decay, grad_scale;
} adamw_consts_t;

VF_INLINE void
adamw_step(const adamw_consts_t *c, float *w, float *m, float *v, const float *g,
           int64_t count)
{
    vf grad = vf_get(g, count) * c->grad_scale;
    vf m1 = vf_fma(c->beta1, vf_get(m, count), c->rest1 * grad);
    vf v1 = vf_fma(c->beta2, vf_get(v, count), c->rest2 * grad * grad);
    vf w0 = vf_get(w, count);
    vf step = (m1 * c->unbias1) / (vf_sqrt(v1 * c->unbias2) + c->eps);
    vf_put(w, w0 - c->lr * vf_fma(c->decay, w0, step), count);
    vf_put(m, m1, count);
    vf_put(v, v1, count);
}

static void
adamw(const void *untyped, int64_t first, int64_t last)
{
    const dcp_adamw_args_t *args = untyped;
    adamw_consts_t c = {
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
    float *w = args->w, *m = args->m, *v = args->v;
    const float *g = args->g;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        adamw_step(&c, w + i, m + i, v + i, g + i, VF);
    }
    if (i < last) {
        adamw_step(&c, w + i, m + i, v + i, g + i, last - i);
    }
}

enum { LANES = 16, VD = VF / 2 }; /* doubles in a vector */

typedef double vd __attribute__((vector_size(VF * 4)));
typedef float half_vf __attribute__((vector_size(VF * 2)));

static double
squares(const float *x, int64_t width)
{
    vd sums[LANES / VD] = {{0}};
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        for (int i = 0; i < LANES / VD; i++) {
            half_vf part;
            memcpy(&part, x + j + i * VD, sizeof part);
            vd wide = __builtin_convertvector(part, vd);
            sums[i] += wide * wide;
        }
    }
    double lanes[LANES];
    memcpy(lanes, sums, sizeof lanes);
    for (int i = 0; j < width; i++, j++) {
        lanes[i] += (double)x[j] * (double)x[j];
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            lanes[i] += lanes[i + half];
        }
    }
    return lanes[0];
}

static void
row_squares(const void *untyped, int64_t first, int64_t last)
{
    const dcp_row_squares_args_t *args = untyped;
    for (int64_t row = first; row < last; row++) {
        args->out[row] = squares(args->x + row * args->width, args->width);
    }
}

const optimizer_ops_t ISA_NAME(optimizer_ops) = {
    .adamw = adamw,
    .row_squares = row_squares,
};
