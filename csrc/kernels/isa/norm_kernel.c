/* RMSNorm and LayerNorm of rows.
 *
 * A row is read from memory once: the sums over it come first, then the result while
 * the row is in the first cache. Each loop asks for what the next one needs, so that
 * memory does not stand still between them. Memory per element: forward 4 B read, 4 B
 * written; backward 8 B read (12 B with `add`), 4 B written. The share of the weight's
 * gradient is added up row by row in the block's part, which stays in cache.
 */
#include "../rowwise.h"
#include "simd.h"

/* Sum of (x - shift)^2; four sums in flight hide the latency. Asks for y, which is
 * written next. */
static float
sum_squares(const float *x, float shift, int64_t width, const float *y)
{
    vf sums[4] = {{0}}, by = vf_set(shift);
    int64_t j = 0;
    for (; j + 4 * VF <= width; j += 4 * VF) {
        for (int i = 0; i < 4; i++) {
            vf_prefetch(y, j + i * VF);
            vf d = vf_load(x + j + i * VF) - by;
            sums[i] = vf_fma(d, d, sums[i]);
        }
    }
    for (; j + VF <= width; j += VF) {
        vf d = vf_load(x + j) - by;
        sums[0] = vf_fma(d, d, sums[0]);
    }
    if (j < width) {
        vf d = vf_fill(vf_load_part(x + j, width - j) - by, width - j, 0.0f);
        sums[1] = vf_fma(d, d, sums[1]);
    }
    return vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static float
sum_row(const float *x, int64_t width)
{
    vf sums[4] = {{0}};
    int64_t j = 0;
    for (; j + 4 * VF <= width; j += 4 * VF) {
        for (int i = 0; i < 4; i++) {
            sums[i] += vf_load(x + j + i * VF);
        }
    }
    for (; j + VF <= width; j += VF) {
        sums[0] += vf_load(x + j);
    }
    if (j < width) {
        sums[1] += vf_load_part(x + j, width - j);
    }
    return vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

typedef struct row_in {
    const float *x, *weight, *bias;
    vf mean, rstd;
} row_in_t;

VF_INLINE void
forward_step(const row_in_t *in, float *y, int64_t j, int64_t count)
{
    vf scaled = (vf_get(in->x + j, count) - in->mean) * in->rstd;
    vf result = scaled * vf_get(in->weight + j, count);
    if (in->bias != NULL) {
        result += vf_get(in->bias + j, count);
    }
    vf_put(y + j, result, count);
}

static inline void
forward_row(row_in_t in, float *y, int64_t width)
{
    int64_t j = 0;
    for (; j + VF <= width; j += VF) {
        vf_prefetch(in.x, width + j); /* the next row, while this one is in cache */
        forward_step(&in, y, j, VF);
    }
    if (j < width) {
        forward_step(&in, y, j, width - j);
    }
}

static void
forward_rms(const void *untyped, int64_t first, int64_t last)
{
    const dcp_norm_args_t *args = untyped;
    int64_t width = args->width;
    for (int64_t row = first; row < last; row++) {
        const float *x = args->x + row * width;
        float mean_square =
            sum_squares(x, 0.0f, width, args->y + row * width) / (float)width;
        float rstd = 1.0f / __builtin_sqrtf(mean_square + args->eps);
        row_in_t in = {x, args->weight, NULL, {0}, vf_set(rstd)};
        forward_row(in, args->y + row * width, width);
        args->rstd[row] = rstd;
    }
}

static void
forward_layer(const void *untyped, int64_t first, int64_t last)
{
    const dcp_norm_args_t *args = untyped;
    int64_t width = args->width;
    for (int64_t row = first; row < last; row++) {
        const float *x = args->x + row * width;
        float mean = sum_row(x, width) / (float)width;
        float variance =
            sum_squares(x, mean, width, args->y + row * width) / (float)width;
        float rstd = 1.0f / __builtin_sqrtf(variance + args->eps);
        row_in_t in = {x, args->weight, args->bias, vf_set(mean), vf_set(rstd)};
        forward_row(in, args->y + row * width, width);
        args->mean[row] = mean;
        args->rstd[row] = rstd;
    }
}

/* One row of the backward pass: g = dy * weight, h = (x - mean) * rstd;
 * dx = add + rstd * (g - mean(g) - h * mean(g h)), without mean(g) for RMSNorm. */
typedef struct row_back {
    const float *dy, *x, *weight, *add;
    float *dx, *dweight, *dbias; /* the latter two: parts, or NULL */
    vf mean, rstd;
} row_back_t;

VF_INLINE void
sums_step(const row_back_t *in, int64_t j, int64_t count, vf *sum_g, vf *sum_gh)
{
    vf dy = vf_get(in->dy + j, count);
    vf h = (vf_get(in->x + j, count) - in->mean) * in->rstd;
    vf g = dy * vf_get(in->weight + j, count); /* 0 in lanes beyond the row */
    *sum_g += g;
    *sum_gh = vf_fma(g, h, *sum_gh);
    if (in->dweight != NULL) {
        vf_put(in->dweight + j, vf_fma(dy, h, vf_get(in->dweight + j, count)), count);
    }
    if (in->dbias != NULL) {
        vf_put(in->dbias + j, vf_get(in->dbias + j, count) + dy, count);
    }
}

VF_INLINE void
dx_step(const row_back_t *in, int64_t j, int64_t count, vf mean_g, vf mean_gh)
{
    vf h = (vf_get(in->x + j, count) - in->mean) * in->rstd;
    vf g = vf_get(in->dy + j, count) * vf_get(in->weight + j, count);
    vf dx = (g - mean_g - h * mean_gh) * in->rstd;
    if (in->add != NULL) {
        dx += vf_get(in->add + j, count);
    }
    vf_put(in->dx + j, dx, count);
}

VF_INLINE void
backward_row(row_back_t in, int64_t width, int centred)
{
    vf sum_g[2] = {{0}}, sum_gh[2] = {{0}};
    int64_t j = 0;
    for (; j + 2 * VF <= width; j += 2 * VF) {
        for (int i = 0; i < 2; i++) { /* what the second loop needs */
            vf_prefetch(in.dx, j + i * VF);
            if (in.add != NULL) {
                vf_prefetch(in.add, j + i * VF);
            }
        }
        sums_step(&in, j, VF, &sum_g[0], &sum_gh[0]);
        sums_step(&in, j + VF, VF, &sum_g[1], &sum_gh[1]);
    }
    if (j + VF <= width) {
        sums_step(&in, j, VF, &sum_g[0], &sum_gh[0]);
        j += VF;
    }
    if (j < width) {
        sums_step(&in, j, width - j, &sum_g[1], &sum_gh[1]);
    }
    vf mean_gh = vf_set(vf_sum(sum_gh[0] + sum_gh[1]) / (float)width);
    vf mean_g = {0};
    if (centred) {
        mean_g = vf_set(vf_sum(sum_g[0] + sum_g[1]) / (float)width);
    }
    for (j = 0; j + VF <= width; j += VF) {
        vf_prefetch(in.dy, width + j); /* the next row, while this one is in cache */
        vf_prefetch(in.x, width + j);
        dx_step(&in, j, VF, mean_g, mean_gh);
    }
    if (j < width) {
        dx_step(&in, j, width - j, mean_g, mean_gh);
    }
}

VF_INLINE void
backward_rows(const dcp_norm_backward_args_t *args, int64_t first, int64_t last,
              float *parts, int centred)
{
    int64_t width = args->width;
    if (parts != NULL) {
        memset(parts, 0, 2 * (size_t)width * sizeof(float));
    }
    for (int64_t row = first; row < last; row++) {
        int64_t at = row * width;
        row_back_t in = {
            .dy = args->dy + at,
            .x = args->x + at,
            .weight = args->weight,
            .add = args->add != NULL ? args->add + at : NULL,
            .dx = args->dx + at,
            .dweight = args->dweight != NULL ? parts : NULL,
            .dbias = args->dbias != NULL ? parts + width : NULL,
            .mean = centred ? vf_set(args->mean[row]) : (vf){0},
            .rstd = vf_set(args->rstd[row]),
        };
        backward_row(in, width, centred);
    }
}

static void
backward_rms(const void *args, int64_t first, int64_t last, float *parts)
{
    backward_rows(args, first, last, parts, 0);
}

static void
backward_layer(const void *args, int64_t first, int64_t last, float *parts)
{
    backward_rows(args, first, last, parts, 1);
}

const norm_ops_t ISA_NAME(norm_ops) = {
    .forward = {forward_rms, forward_layer},
    .backward = {backward_rms, backward_layer},
};
