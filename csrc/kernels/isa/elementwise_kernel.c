/* Sums: of two arrays (8 B read, 4 B written an element), of columns (4 B read an
 * element), and of gradient rows into an embedding (8 B read, 4 B written). */
#include "../rowwise.h"
#include "simd.h"

VF_INLINE void
add_step(const float *a, const float *b, float *out, int64_t count)
{
    vf_put(out, vf_get(a, count) + vf_get(b, count), count);
}

static void
add(const void *untyped, int64_t first, int64_t last)
{
    const dcp_add_args_t *args = untyped;
    const float *a = args->a, *b = args->b;
    float *out = args->out;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        add_step(a + i, b + i, out + i, VF);
    }
    if (i < last) {
        add_step(a + i, b + i, out + i, last - i);
    }
}

/* Four rows a turn, so that the sums are loaded and stored once for four loads of x. */
VF_INLINE void
add_four_rows(float *sums, const float *x, int64_t stride, int64_t count)
{
    vf pair = vf_get(x, count) + vf_get(x + stride, count);
    vf other = vf_get(x + 2 * stride, count) + vf_get(x + 3 * stride, count);
    vf_put(sums, vf_get(sums, count) + (pair + other), count);
}

static void
column_sum(const void *untyped, int64_t first, int64_t last, float *parts)
{
    const dcp_column_sum_args_t *args = untyped;
    int64_t width = args->width, stride = args->x_stride, row = first;
    memset(parts, 0, (size_t)width * sizeof(float));
    for (; row + 4 <= last; row += 4) {
        const float *x = args->x + row * stride;
        int64_t j = 0;
        for (; j + VF <= width; j += VF) {
            add_four_rows(parts + j, x + j, stride, VF);
        }
        if (j < width) {
            add_four_rows(parts + j, x + j, stride, width - j);
        }
    }
    for (; row < last; row++) {
        const float *x = args->x + row * stride;
        int64_t j = 0;
        for (; j + VF <= width; j += VF) {
            add_step(parts + j, x + j, parts + j, VF);
        }
        if (j < width) {
            add_step(parts + j, x + j, parts + j, width - j);
        }
    }
}

/* Columns first .. last-1 of every row, in row order. */
static void
embedding_backward(const void *untyped, int64_t first, int64_t last)
{
    const dcp_embedding_backward_args_t *args = untyped;
    int64_t width = args->width;
    for (int64_t row = 0; row < args->rows; row++) {
        const float *from = args->dout + row * width;
        float *to = args->dweight + args->tokens[row] * width;
        int64_t j = first;
        for (; j + VF <= last; j += VF) {
            add_step(to + j, from + j, to + j, VF);
        }
        if (j < last) {
            add_step(to + j, from + j, to + j, last - j);
        }
    }
}

const elementwise_ops_t ISA_NAME(elementwise_ops) = {
    .add = add,
    .column_sum = column_sum,
    .embedding_backward = embedding_backward,
};
