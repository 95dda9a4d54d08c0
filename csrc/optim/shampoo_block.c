/* The arithmetic of one block G [r, c], as in Distributed Shampoo (Shi et al. 2023,
 * arXiv 2309.06497; Anil et al. 2020, arXiv 2002.09018):
 *
 *   L = beta2 L + (1 - beta2) G G^T           R = beta2 R + (1 - beta2) G^T G
 *   m = beta1 m + (1 - beta1) G               v = beta2 v + (1 - beta2) G * G
 *   P = L^(-1/4) m R^(-1/4)                   roots are stale between their turns
 *   A = (m / bias1) / (sqrt(v / bias2) + eps) what AdamW would do
 *   update = P |A| / |P|                      grafting, Frobenius norms of the block
 *
 * Since the norm is grafted, neither L, R nor m in P needs a correction of its bias.
 * Norms are fp64 sums in an order of the block's own. Cost: products of 4 r c (r + c)
 * flops, one pass over m, v and G; where roots are due, two of inverse_root.c.
 */
#include "shampoo_block.h"

#include "inverse_root.h"

#include <math.h>

enum { LANES = 8, ALIGN_BYTES = 64 };

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t
float_bytes(int64_t count)
{
    return (count * (int64_t)sizeof(float) + ALIGN_BYTES - 1) / ALIGN_BYTES
           * ALIGN_BYTES;
}

int64_t
shampoo_block_scratch(int64_t rows, int64_t columns)
{
    int64_t side = larger(rows, columns);
    return float_bytes(side * side) + float_bytes(rows * columns)
           + optim_inverse_root_scratch(side);
}

/* statistic = beta2 statistic + (1 - beta2) product */
static void
blend(int64_t n, float beta2, const float *product, float *statistic, int64_t stride)
{
    const float rest = 1.0f - beta2;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            float *at = &statistic[i * stride + j];
            *at = beta2 * *at + rest * product[i * n + j];
        }
    }
}

static dcp_status_t
update_statistics(const dcp_device_ops_t *device, dcp_queue_t *queue,
                  const shampoo_block_t *b, float beta2, float *product)
{
    dcp_gemm_args_t args = {
        .m = b->rows,
        .n = b->rows,
        .k = b->columns,
        .a = b->data,
        .lda = b->stride,
        .b = b->data,
        .ldb = b->stride,
        .trans_b = 1,
        .c = product,
        .ldc = b->rows,
    };
    DCP_TRY(device->gemm(queue, &args));
    DCP_TRY(device->fence(queue));
    blend(b->rows, beta2, product, b->left, b->left_stride);
    args.m = args.n = args.ldc = b->columns;
    args.k = b->rows;
    args.trans_a = 1;
    args.trans_b = 0;
    DCP_TRY(device->gemm(queue, &args));
    DCP_TRY(device->fence(queue));
    blend(b->columns, beta2, product, b->right, b->right_stride);
    return DCP_OK;
}

/* Sum of the squares of a row, in lanes by column. */
static void
add_squares(int64_t count, const float *x, double sums[LANES])
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] += (double)x[i + lane] * (double)x[i + lane];
        }
    }
    for (int lane = 0; i < count; i++, lane++) {
        sums[lane] += (double)x[i] * (double)x[i];
    }
}

static double
total(const double sums[LANES])
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += sums[lane];
    }
    return sum;
}

/* Moves m and v on, and returns the norm of what AdamW would do. row [columns]. */
static double
update_moments(const shampoo_block_t *b, const shampoo_numbers_t *n, float *row)
{
    const float rest1 = 1.0f - n->beta1, rest2 = 1.0f - n->beta2;
    const float unbias1 = 1.0f / n->bias1, unbias2 = 1.0f / n->bias2;
    double sums[LANES] = {0};
    for (int64_t i = 0; i < b->rows; i++) {
        const float *g = b->data + i * b->stride;
        float *m = b->m + i * b->stride, *v = b->v + i * b->stride;
        for (int64_t j = 0; j < b->columns; j++) {
            m[j] = n->beta1 * m[j] + rest1 * g[j];
            v[j] = n->beta2 * v[j] + rest2 * g[j] * g[j];
            row[j] = m[j] * unbias1 / (sqrtf(v[j] * unbias2) + n->eps);
        }
        add_squares(b->columns, row, sums);
    }
    return sqrt(total(sums));
}

/* data = left_root m right_root; half [rows, columns]. */
static dcp_status_t
precondition(const dcp_device_ops_t *device, dcp_queue_t *queue,
             const shampoo_block_t *b, float *half)
{
    dcp_gemm_args_t args = {
        .m = b->rows,
        .n = b->columns,
        .k = b->rows,
        .a = b->left_root,
        .lda = b->left_stride,
        .b = b->m,
        .ldb = b->stride,
        .c = half,
        .ldc = b->columns,
    };
    DCP_TRY(device->gemm(queue, &args));
    args.k = b->columns;
    args.a = half;
    args.lda = b->columns;
    args.b = b->right_root;
    args.ldb = b->right_stride;
    args.c = b->data;
    args.ldc = b->stride;
    DCP_TRY(device->gemm(queue, &args));
    return device->fence(queue);
}

/* data gets the norm that it is grafted with. */
static void
graft(const shampoo_block_t *b, double norm)
{
    double sums[LANES] = {0};
    for (int64_t i = 0; i < b->rows; i++) {
        add_squares(b->columns, b->data + i * b->stride, sums);
    }
    double own = sqrt(total(sums));
    const float scale = own > 0 ? (float)(norm / own) : 0.0f;
    for (int64_t i = 0; i < b->rows; i++) {
        float *row = b->data + i * b->stride;
        for (int64_t j = 0; j < b->columns; j++) {
            row[j] *= scale;
        }
    }
}

dcp_status_t
shampoo_block_update(const dcp_device_ops_t *device, dcp_queue_t *queue,
                     const shampoo_block_t *block, bool due,
                     const shampoo_numbers_t *numbers, void *scratch)
{
    int64_t side = larger(block->rows, block->columns);
    float *product = scratch;
    float *half = (float *)(void *)((char *)scratch + float_bytes(side * side));
    char *roots = (char *)half + float_bytes(block->rows * block->columns);
    DCP_TRY(update_statistics(device, queue, block, numbers->beta2, product));
    /* roots that were made have a positive diagonal */
    if (due || block->left_root[0] == 0 || block->right_root[0] == 0) {
        DCP_TRY(optim_inverse_root(device, queue, block->rows, block->left,
                                   block->left_root, block->left_stride, roots));
        DCP_TRY(optim_inverse_root(device, queue, block->columns, block->right,
                                   block->right_root, block->right_stride, roots));
    }
    double norm = update_moments(block, numbers, product);
    DCP_TRY(precondition(device, queue, block, half));
    graft(block, norm);
    return DCP_OK;
}
