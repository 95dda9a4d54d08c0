/* The quintic Newton-Schulz iteration of Muon (Jordan et al. 2024).
 *
 * X <- (a I + b A + c A^2) X with A = X X^T, or, where there are more rows than
 * columns, X (a I + b A + c A^2) with A = X^T X: no transposed copy, A is as small as
 * can be. X starts at norm 1 (fp64 sum of squares), so no singular value is above 1.
 * The coefficients make small ones grow fast (slope a = 3.44) at the price of an end
 * that is only near 1: after five steps singular values from 0.01 to 1 lie in 0.68
 * .. 1.14.
 *
 * A and A^2 are symmetric: strips of rows are computed from the diagonal on and
 * mirrored. An element of a product is one chain over k of commuting products, so what
 * is mirrored has the bits that computing it would give.
 *
 * Cost, n = the smaller side, m = the larger: products of 4 n^2 m + 2 n^3 flops a step,
 * of which the strips save up to 7/16 of 2 n^2 m + 2 n^3 (eight strips); four
 * more passes over n^2 elements. Scratch: n m + 2 n^2 floats.
 */
#include "newton_schulz.h"

#include <math.h>
#include <stdbool.h>

static const float A1 = 3.4445f, A3 = -4.7750f, A5 = 2.0315f;
static const double LEAST_NORM =
    1e-7; /* a smaller norm counts as this: no noise grows */

enum {
    STRIP_ROWS = 96, /* below this packing costs more than symmetry saves */
    STRIPS = 8,
    ALIGN = 16, /* floats: parts of the scratch start on a cache line */
};

static int64_t
aligned(int64_t count)
{
    return (count + ALIGN - 1) / ALIGN * ALIGN;
}

int64_t
optim_newton_schulz_scratch(int64_t rows, int64_t columns)
{
    int64_t n = rows < columns ? rows : columns;
    /* squares of rows (fp64) lie in the first part before anything else does */
    int64_t first = rows * columns > 2 * rows ? rows * columns : 2 * rows;
    return aligned(first) + 2 * aligned(n * n);
}

/* Norm in fp64, rows added in order. squares [rows]. */
static dcp_status_t
norm_of(const dcp_device_ops_t *device, dcp_queue_t *queue, int64_t rows,
        int64_t columns, const float *x, double *squares, double *norm_p)
{
    dcp_row_squares_args_t args = {
        .rows = rows, .width = columns, .x = x, .out = squares};
    DCP_TRY(device->row_squares(queue, &args));
    DCP_TRY(device->fence(queue));
    double sum = 0;
    for (int64_t row = 0; row < rows; row++) {
        sum += squares[row];
    }
    *norm_p = sqrt(sum);
    return DCP_OK;
}

/* out [n, n] = op(x) op(x)^T, the strips from the diagonal on; k terms each. With
 * `transposed` x is [k, n], else [n, k]. */
static dcp_status_t
product_with_itself(const dcp_device_ops_t *device, dcp_queue_t *queue, int64_t n,
                    int64_t k, bool transposed, const float *x, float *out)
{
    int64_t strip = (n + STRIPS - 1) / STRIPS;
    strip = strip < STRIP_ROWS ? STRIP_ROWS : strip;
    int64_t stride = transposed ? n : k;
    for (int64_t row = 0; row < n; row += strip) {
        const float *from = transposed ? x + row : x + row * stride;
        dcp_gemm_args_t args = {
            .m = n - row < strip ? n - row : strip,
            .n = n - row,
            .k = k,
            .a = from,
            .lda = stride,
            .trans_a = transposed,
            .b = from,
            .ldb = stride,
            .trans_b = !transposed,
            .c = out + row * n + row,
            .ldc = n,
        };
        DCP_TRY(device->gemm(queue, &args));
    }
    DCP_TRY(device->fence(queue));
    for (int64_t row = strip; row < n; row++) {
        int64_t known = row / strip * strip; /* this strip begins there */
        for (int64_t column = 0; column < known; column++) {
            out[row * n + column] = out[column * n + row];
        }
    }
    return DCP_OK;
}

/* square becomes A1 I + A3 gram + A5 square. */
static void
polynomial(int64_t n, const float *gram, float *square)
{
    for (int64_t i = 0; i < n * n; i++) {
        square[i] = A3 * gram[i] + A5 * square[i];
    }
    for (int64_t i = 0; i < n; i++) {
        square[i * n + i] += A1;
    }
}

static dcp_status_t
iterate(const dcp_device_ops_t *device, dcp_queue_t *queue, int64_t rows,
        int64_t columns, const float *from, float *to, float *gram, float *square)
{
    bool tall = rows > columns;
    int64_t n = tall ? columns : rows, m = tall ? rows : columns;
    DCP_TRY(product_with_itself(device, queue, n, m, tall, from, gram));
    DCP_TRY(product_with_itself(device, queue, n, n, false, gram, square));
    polynomial(n, gram, square);
    dcp_gemm_args_t args = {
        .m = rows,
        .n = columns,
        .k = n,
        .a = tall ? from : square,
        .lda = n,
        .b = tall ? square : from,
        .ldb = columns,
        .c = to,
        .ldc = columns,
    };
    DCP_TRY(device->gemm(queue, &args));
    return device->fence(queue);
}

dcp_status_t
optim_newton_schulz(const dcp_device_ops_t *device, dcp_queue_t *queue, int64_t rows,
                    int64_t columns, int32_t iterations, float *x, float *scratch)
{
    int64_t n = rows < columns ? rows : columns, count = rows * columns;
    float *square = scratch, *gram = scratch + aligned(n * n);
    float *other = gram + aligned(n * n);
    double norm;
    DCP_TRY(norm_of(device, queue, rows, columns, x, (double *)(void *)other, &norm));
    float scale = (float)(1.0 / (norm < LEAST_NORM ? LEAST_NORM : norm));
    /* so that the last step writes to x */
    float *from = iterations % 2 != 0 ? other : x;
    for (int64_t i = 0; i < count; i++) {
        from[i] = x[i] * scale;
    }
    for (int32_t i = 0; i < iterations; i++) {
        float *to = from == x ? other : x;
        DCP_TRY(iterate(device, queue, rows, columns, from, to, gram, square));
        from = to;
    }
    return DCP_OK;
}
