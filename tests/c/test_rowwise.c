/* Row-wise operations: scratch that cannot be had, offsets beyond 2^31 elements, and
 * buffers that end with the last element (for the address sanitizer). Their numbers are
 * compared with float64 in tests/unit/test_kernels.py. */
#define _GNU_SOURCE
#include "check.h"

#include "dcp/isa.h"
#include "dcp/kernels.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

enum { ROWS = 200, MAX_WIDTH = 70 };

/* An exact allocation of the libc, which the sanitizer fences; all ones. */
static float *
exact_floats(int64_t count)
{
    float *x = malloc((size_t)(count > 0 ? count : 1) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        x[i] = 1.0f;
    }
    return x;
}

static dcp_status_t
sums_scenario(void)
{
    dcp_pool_t *pool = NULL;
    dcp_status_t status = dcp_pool_create(2, &pool);
    if (status != DCP_OK) {
        return status;
    }
    static float x[ROWS * 8], rstd[ROWS], out[8], dx[ROWS * 8];
    static int32_t labels[ROWS];
    double loss = 0;
    dcp_column_sum_args_t sum = {ROWS, 8, x, 8, out};
    dcp_norm_backward_args_t norm = {.rows = ROWS,
                                     .width = 8,
                                     .dy = x,
                                     .x = x,
                                     .weight = x,
                                     .rstd = rstd,
                                     .dx = dx,
                                     .dweight = out};
    dcp_cross_entropy_args_t entropy = {.rows = ROWS,
                                        .vocab = 8,
                                        .logits = dx,
                                        .logits_stride = 8,
                                        .labels = labels,
                                        .scale = 1,
                                        .gradient = 1,
                                        .loss_p = &loss};
    out[0] = 5;
    status = dcp_cpu_column_sum(pool, &sum);
    if (status == DCP_OK) {
        status = dcp_cpu_norm_backward(pool, &norm);
    }
    if (status == DCP_OK) {
        status = dcp_cpu_cross_entropy(pool, &entropy);
        CHECK(status == DCP_OK || loss == 0);
    }
    CHECK(out[0] == 5);
    dcp_pool_destroy(pool);
    return status;
}

static void
test_ends(dcp_pool_t *pool, int64_t width)
{
    int64_t count = 3 * width;
    float *x = exact_floats(count), *y = exact_floats(count), *w = exact_floats(width);
    float *mean = exact_floats(3), *rstd = exact_floats(3), *sum = exact_floats(width);
    float *v = exact_floats(count), *m = exact_floats(count);
    int32_t zeros[3] = {0};
    int64_t ids[3] = {0};
    double loss = 0, squares[3];
    dcp_norm_args_t norm = {DCP_NORM_LAYER, 3, width, x, w, w, 1e-5f, y, mean, rstd};
    CHECK_OK(dcp_cpu_norm(pool, &norm));
    dcp_norm_backward_args_t norm_back = {DCP_NORM_LAYER, 3,    width, x, x,   w,
                                          mean,           rstd, y,     y, sum, w};
    CHECK_OK(dcp_cpu_norm_backward(pool, &norm_back));
    CHECK_OK(dcp_cpu_rope(
        pool, &(dcp_rope_args_t){3, 1, width / 2 * 2, x, width, zeros, v, 0}));
    CHECK_OK(
        dcp_cpu_swiglu(pool, &(dcp_swiglu_args_t){3, width, x, y, width, width, v}));
    CHECK_OK(dcp_cpu_swiglu_backward(
        pool, &(dcp_swiglu_backward_args_t){3, width, v, x, y, width, width, x, y,
                                            width, width, v}));
    for (int kind = 0; kind < 2; kind++) {
        dcp_gelu_kind_t gelu = (dcp_gelu_kind_t)kind;
        CHECK_OK(dcp_cpu_gelu(pool, &(dcp_gelu_args_t){gelu, count, x, x}));
        CHECK_OK(dcp_cpu_gelu_backward(
            pool, &(dcp_gelu_backward_args_t){gelu, count, x, y, x}));
    }
    CHECK_OK(dcp_cpu_embedding(pool, &(dcp_embedding_args_t){.rows = 3,
                                                             .width = width,
                                                             .vocab = 1,
                                                             .tokens = zeros,
                                                             .weight = w,
                                                             .out = y}));
    CHECK_OK(dcp_cpu_embedding_backward(
        pool, &(dcp_embedding_backward_args_t){3, width, 1, zeros, y, w}));
    uint16_t *narrow = malloc((size_t)width * sizeof *narrow);
    dcp_cast_args_t cast = {width, w, narrow, DCP_F32, DCP_BF16};
    CHECK_OK(dcp_cpu_cast(pool, &cast));
    dcp_embedding_args_t rounded = {.rows = 3, .width = width, .vocab = 1};
    rounded.tokens = zeros;
    rounded.weight = w;
    rounded.round = 1;
    rounded.out = x;
    CHECK_OK(dcp_cpu_embedding(pool, &rounded));
    rounded.weight = NULL;
    rounded.weight_bf16 = narrow;
    rounded.out = y;
    CHECK_OK(dcp_cpu_embedding(pool, &rounded));
    CHECK(memcmp(x, y, (size_t)count * sizeof(float)) == 0);
    cast = (dcp_cast_args_t){width, narrow, w, DCP_BF16, DCP_F32};
    CHECK_OK(dcp_cpu_cast(pool, &cast));
    CHECK(memcmp(w, y, (size_t)width * sizeof(float)) == 0);
    free(narrow);
    CHECK_OK(dcp_cpu_cross_entropy(
        pool,
        &(dcp_cross_entropy_args_t){3, width, x, width, zeros, NULL, 1, 1, &loss}));
    CHECK_OK(dcp_cpu_dropout(
        pool, &(dcp_dropout_args_t){3, width, x, y, ids, 1, 1, 0.5f, y}));
    CHECK_OK(dcp_cpu_column_sum(pool, &(dcp_column_sum_args_t){3, width, y, width, w}));
    CHECK_OK(dcp_cpu_add(pool, &(dcp_add_args_t){count, x, y, x}));
    CHECK_OK(dcp_cpu_zero(pool, &(dcp_zero_args_t){count * 4, m}));
    CHECK_OK(dcp_cpu_zero(pool, &(dcp_zero_args_t){count * 4, v}));
    CHECK_OK(dcp_cpu_adamw(pool, &(dcp_adamw_args_t){count, x, m, v, y, 1e-3f, 0.9f,
                                                     0.99f, 1e-8f, 0, 0.1f, 0.01f, 1}));
    CHECK_OK(
        dcp_cpu_row_squares(pool, &(dcp_row_squares_args_t){3, width, x, squares}));
    for (int64_t i = 0; i < 3; i++) {
        CHECK(isfinite(squares[i]));
    }
    float *all[] = {x, y, w, mean, rstd, sum, v, m};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        free(all[i]);
    }
}

/* Row 1 begins 2^31 + 4 elements after row 0; only the two rows are ever touched, the
 * pages between exist on paper. Case A-12. */
static void
test_far_rows(dcp_pool_t *pool)
{
    const int64_t stride = ((int64_t)1 << 31) + 4;
    size_t bytes = (size_t)(stride + 64) * sizeof(float);
    float *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (x == MAP_FAILED) {
        printf("no 8 GiB of address space: rows beyond 2^31 elements not tested\n");
        return;
    }
    float *far = x + stride;
    for (int i = 0; i < 8; i++) {
        far[i] = (float)(i + 1);
    }
    float table[16] = {0, 0, 0, 0, 1, 1, 1, 1}; /* a quarter turn */
    int32_t positions[2] = {0, 0};
    CHECK_OK(dcp_cpu_rope(pool,
                          &(dcp_rope_args_t){2, 1, 8, x, stride, positions, table, 0}));
    CHECK(far[0] == -5 && far[3] == -8 && far[4] == 1 && far[7] == 4);
    float sums[8] = {0};
    CHECK_OK(dcp_cpu_column_sum(pool, &(dcp_column_sum_args_t){2, 8, x, stride, sums}));
    CHECK(sums[0] == -5 && sums[7] == 4);
    float out[16];
    CHECK_OK(
        dcp_cpu_swiglu(pool, &(dcp_swiglu_args_t){2, 8, x, x, stride, stride, out}));
    CHECK(out[0] == 0 && fabsf(out[15] - 16 / (1 + expf(-4))) < 1e-5f);
    double loss = 0;
    int32_t labels[2] = {-100, 7};
    CHECK_OK(dcp_cpu_cross_entropy(
        pool, &(dcp_cross_entropy_args_t){2, 8, x, stride, labels, NULL, 1, 1, &loss}));
    CHECK(loss > 0 && far[7] < 0 && far[6] > 0);

    /* token 2^29 of a weight with 4 columns is element 2^31 */
    int32_t token = 1 << 29;
    far[-4] = 3;
    CHECK_OK(
        dcp_cpu_embedding(pool, &(dcp_embedding_args_t){.rows = 1,
                                                        .width = 4,
                                                        .vocab = (int64_t)token + 1,
                                                        .tokens = &token,
                                                        .weight = x,
                                                        .out = out}));
    CHECK(out[0] == 3);
    CHECK_OK(dcp_cpu_embedding_backward(
        pool,
        &(dcp_embedding_backward_args_t){1, 4, (int64_t)token + 1, &token, out, x}));
    CHECK(far[-4] == 6 && x[0] == 0);
    munmap(x, bytes);
}

int
main(void)
{
    check_every_alloc(sums_scenario);
    for (int i = 0; i < DCP_ISA_COUNT; i++) {
        if (!dcp_isa_available((dcp_isa_t)i)) {
            continue;
        }
        CHECK_OK(dcp_isa_set(dcp_isa_name((dcp_isa_t)i)));
        dcp_pool_t *pool;
        CHECK_OK(dcp_pool_create(2, &pool));
        for (int64_t width = 1; width <= MAX_WIDTH; width++) {
            test_ends(pool, width);
        }
        test_far_rows(pool);
        dcp_pool_destroy(pool);
    }
    return check_finish();
}
