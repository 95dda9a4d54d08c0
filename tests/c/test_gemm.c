/* Matrix product: values, argument checks, allocation failures, and that nothing beyond
 * operands and packed panels is touched. Small integers keep every sum exact, and are
 * bf16 numbers. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include "dcp/isa.h"
#include "dcp/kernels.h"

#include <string.h>
#include <sys/mman.h>

enum { M = 31, N = 83, K = 1450 };

static float a[M * K], b[K * N], b_t[N * K], a_t[K * M], c[M * N], want[M * N];
static uint16_t b_bf16[K * N], b_t_bf16[N * K];
static dcp_pool_t *pool;

static void
fill(void)
{
    for (int i = 0; i < M * K; i++) {
        a[i] = (float)(i * 7 % 11 - 5);
        a_t[i % K * M + i / K] = a[i];
    }
    for (int i = 0; i < K * N; i++) {
        b[i] = (float)(i * 5 % 13 - 6);
        b_t[i % N * K + i / N] = b[i];
        b_bf16[i] = b_t_bf16[i % N * K + i / N] = dcp_f32_to_bf16(b[i]);
    }
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < K; k++) {
                sum += a[i * K + k] * b[k * N + j];
            }
            want[i * N + j] = sum;
        }
    }
}

static dcp_gemm_args_t
product(int trans_a, int trans_b)
{
    return (dcp_gemm_args_t){
        .m = M,
        .n = N,
        .k = K,
        .a = trans_a ? a_t : a,
        .lda = trans_a ? M : K,
        .b = trans_b ? b_t : b,
        .ldb = trans_b ? K : N,
        .c = c,
        .ldc = N,
        .trans_a = trans_a,
        .trans_b = trans_b,
    };
}

static void
test_values(dcp_dtype_t compute)
{
    int64_t bytes = dcp_gemm_pack_bytes(N, K, compute);
    int64_t item = compute == DCP_BF16 && dcp_isa_current() == DCP_ISA_AVX512BF16
                       ? (int64_t)sizeof(uint16_t)
                       : (int64_t)sizeof(float);
    CHECK(bytes >= N * K * item && bytes <= (N + 15) * K * item && bytes % 64 == 0);
    char *packed = aligned_alloc(64, (size_t)bytes + 64);
    for (int way = 0; way < (compute == DCP_BF16 ? 12 : 8); way++) {
        dcp_gemm_args_t args = product(way & 1, way >> 1 & 1);
        args.compute = compute;
        memset(c, 0xff, sizeof c);
        if (way >= 4) {
            const uint16_t *narrow = args.trans_b ? b_t_bf16 : b_bf16;
            memset(packed + bytes, 0x5a, 64);
            dcp_gemm_pack_args_t pack = {.n = N,
                                         .k = K,
                                         .b = way < 8 ? args.b : NULL,
                                         .b_bf16 = way < 8 ? NULL : narrow,
                                         .ldb = args.ldb,
                                         .trans_b = args.trans_b,
                                         .packed = packed,
                                         .compute = compute};
            CHECK_OK(dcp_cpu_gemm_pack(pool, &pack));
            for (int i = 0; i < 64; i++) {
                CHECK(packed[bytes + i] == 0x5a);
            }
            args.b = NULL;
            args.b_packed = packed;
        }
        CHECK_OK(dcp_cpu_gemm(pool, &args));
        CHECK(memcmp(c, want, sizeof c) == 0);
        args.accumulate = 1;
        CHECK_OK(dcp_cpu_gemm(pool, &args));
        CHECK(c[0] == 2 * want[0] && c[M * N - 1] == 2 * want[M * N - 1]);
    }
    free(packed);
}

static void
check_refused(dcp_gemm_args_t args, const char *message)
{
    CHECK(dcp_cpu_gemm(pool, &args) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), message) == 0);
}

static void
test_refusals(void)
{
    dcp_gemm_args_t g = product(0, 0);
    g.m = -1;
    check_refused(g, "m -1 must not be negative");
    g = product(0, 0);
    g.n = -2;
    check_refused(g, "n -2 must not be negative");
    g = product(0, 0);
    g.k = -3;
    check_refused(g, "k -3 must not be negative");
    g = product(0, 0);
    g.lda = K - 1;
    check_refused(g, "lda 1449 must be at least 1450, the width of a");
    g = product(1, 1);
    g.lda = M - 1;
    check_refused(g, "lda 30 must be at least 31, the width of a");
    g = product(1, 1);
    g.ldb = K - 1;
    check_refused(g, "ldb 1449 must be at least 1450, the width of b");
    g = product(0, 0);
    g.ldc = N - 1;
    check_refused(g, "ldc 82 must be at least 83, the width of c");
    g = product(0, 0);
    g.add = want;
    check_refused(g, "ld_add 0 must be at least 83, the width of add");
    g.accumulate = 1;
    check_refused(g, "accumulate 1 must be 0 where add is given");
    g = product(0, 0);
    g.a = NULL;
    check_refused(g, "a is NULL, must point to 31 x 1450 elements");
    g = product(0, 1);
    g.b = NULL;
    check_refused(g, "b is NULL, must point to 83 x 1450 elements");
    g = product(0, 0);
    g.c = NULL;
    check_refused(g, "c is NULL, must point to 31 x 83 elements");
    dcp_gemm_pack_args_t p = {
        .n = N, .k = K, .b = b, .ldb = N, .packed = (char *)c + 4};
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_ARG);
    p.packed = NULL;
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_ARG);
    p.k = -1;
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_ARG);
    g = product(0, 0);
    g.compute = DCP_F64;
    CHECK(dcp_cpu_gemm(pool, &g) == DCP_ERR_TYPE);
    CHECK(strcmp(dcp_last_error(), "compute float64 must be float32 or bfloat16") == 0);
    p = (dcp_gemm_pack_args_t){
        .n = N, .k = K, .b = b, .ldb = N, .packed = c, .compute = DCP_I32};
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_TYPE);
    p.compute = DCP_F32;
    p.b_bf16 = b_bf16;
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_ARG);
    p.compute = DCP_BF16;
    p.ldb = N - 1;
    CHECK(dcp_cpu_gemm_pack(pool, &p) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), "ldb 82 must be at least 83, the width of b_bf16")
          == 0);
    CHECK(dcp_gemm_pack_bytes(INT64_MAX, 2, DCP_F32) == INT64_MAX);
    CHECK(dcp_gemm_pack_bytes((int64_t)1 << 40, (int64_t)1 << 40, DCP_F32)
          == INT64_MAX);
}

static void
test_nothing_to_do(void)
{
    CHECK_OK(dcp_cpu_gemm(pool, &(dcp_gemm_args_t){.n = 5, .k = 5}));
    CHECK_OK(dcp_cpu_gemm(pool, &(dcp_gemm_args_t){.m = 5, .k = 5}));
    CHECK_OK(dcp_cpu_gemm_pack(pool, &(dcp_gemm_pack_args_t){.n = 5}));
    CHECK(dcp_gemm_pack_bytes(5, 0, DCP_F32) == 0
          && dcp_gemm_pack_bytes(0, 5, DCP_F32) == 0);
    float out[2] = {3, 4}, bias[2] = {5, 6};
    dcp_gemm_args_t args = {.m = 1, .n = 2, .c = out, .ldc = 2, .accumulate = 1};
    CHECK_OK(dcp_cpu_gemm(pool, &args)); /* k = 0 */
    CHECK(out[0] == 3 && out[1] == 4);
    args.accumulate = 0;
    args.bias = bias;
    CHECK_OK(dcp_cpu_gemm(pool, &args));
    CHECK(out[0] == 5 && out[1] == 6);
    args.bias = NULL;
    CHECK_OK(dcp_cpu_gemm(pool, &args));
    CHECK(out[0] == 0 && out[1] == 0);
}

/* Rows further apart than 2^31 elements, in address space that is never filled. */
static void
test_far_rows(void)
{
    /* read from memory, for clang 14 cuts a constant displacement to 32 bits */
    volatile int64_t distance = ((int64_t)1 << 31) + 3;
    const int64_t far = distance;
    const size_t bytes = (size_t)(2 * far + 8) * sizeof(float);
    float *space = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) {
        printf("no address space for rows 2^31 elements apart\n");
        return;
    }
    float *left = space, *right = space + 2, *out = space + 4; /* 3 matrices of 2 x 2 */
    for (int row = 0; row < 2; row++) {
        memcpy(left + row * far,
               (const float[2]){(float)(1 + 2 * row), (float)(2 + 2 * row)}, 8);
        memcpy(right + row * far,
               (const float[2]){(float)(5 + 2 * row), (float)(6 + 2 * row)}, 8);
    }
    for (int way = 0; way < 4; way++) {
        dcp_gemm_args_t args = {
            .m = 2, .n = 2, .k = 2, .a = left, .b = right, .c = out};
        args.lda = args.ldb = args.ldc = far;
        args.trans_a = way & 1;
        args.trans_b = way >> 1;
        CHECK_OK(dcp_cpu_gemm(pool, &args));
        /* (1 2; 3 4) (5 6; 7 8), its factors transposed or not */
        static const float products[4][4] = {
            {19, 22, 43, 50}, {26, 30, 38, 44}, {17, 23, 39, 53}, {23, 31, 34, 46}};
        CHECK(memcmp(out, products[way], 8) == 0);
        CHECK(memcmp(out + far, products[way] + 2, 8) == 0);
    }
    munmap(space, bytes);
}

enum { PAGE_BYTES = 4096, SPACE_BYTES = 8 * PAGE_BYTES };

/* Bytes that end where a page begins that may not be touched. */
static void *
guarded(size_t bytes)
{
    char *space = mmap(NULL, SPACE_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(space != MAP_FAILED && bytes <= SPACE_BYTES);
    CHECK(mprotect(space + SPACE_BYTES, PAGE_BYTES, PROT_NONE) == 0);
    return space + SPACE_BYTES - bytes;
}

static void
guarded_free(void *pointer, size_t bytes)
{
    munmap((char *)pointer + bytes - SPACE_BYTES, SPACE_BYTES + PAGE_BYTES);
}

/* Nothing beyond an operand is read, nothing beyond C written. */
static void
test_borders(dcp_dtype_t compute)
{
    static const int64_t sizes[][3] = {{1, 1, 1},    {1, 17, 3}, {5, 15, 31},
                                       {13, 33, 33}, {3, 7, 65}, {25, 31, 17}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const int64_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2];
        const size_t a_bytes = (size_t)(m * k) * 4, b_bytes = (size_t)(k * n) * 4;
        const size_t c_bytes = (size_t)(m * n) * 4;
        float *left = guarded(a_bytes), *right = guarded(b_bytes);
        float *out = guarded(c_bytes);
        uint16_t *narrow = guarded(b_bytes / 2);
        char *packed = aligned_alloc(64, (size_t)dcp_gemm_pack_bytes(n, k, compute));
        for (int64_t i = 0; i < m * k; i++) {
            left[i] = 1.0f;
        }
        for (int64_t i = 0; i < k * n; i++) {
            right[i] = 2.0f;
            narrow[i] = dcp_f32_to_bf16(2.0f);
        }
        for (int way = 0; way < 12; way++) {
            dcp_gemm_args_t g = {
                .m = m, .n = n, .k = k, .a = left, .b = right, .c = out, .ldc = n};
            g.trans_a = way & 1;
            g.trans_b = way >> 1 & 1;
            g.lda = g.trans_a ? m : k;
            g.ldb = g.trans_b ? k : n;
            g.compute = compute;
            if (way >= 4) {
                const uint16_t *bits = way >= 8 && compute == DCP_BF16 ? narrow : NULL;
                dcp_gemm_pack_args_t p = {.n = n, .k = k, .b = right, .ldb = g.ldb};
                p.trans_b = g.trans_b;
                p.packed = packed;
                p.compute = compute;
                p.b_bf16 = bits;
                CHECK_OK(dcp_cpu_gemm_pack(pool, &p));
                g.b_packed = packed;
            }
            CHECK_OK(dcp_cpu_gemm(pool, &g));
            int64_t right_count = 0;
            for (int64_t i = 0; i < m * n; i++) {
                right_count += out[i] == 2.0f * (float)k;
            }
            CHECK(right_count == m * n);
        }
        guarded_free(left, a_bytes);
        guarded_free(right, b_bytes);
        guarded_free(out, c_bytes);
        guarded_free(narrow, b_bytes / 2);
        free(packed);
    }
}

static dcp_status_t
unpacked_scenario(void)
{
    dcp_pool_t *own;
    DCP_TRY(dcp_pool_create(1, &own)); /* the counting allocator is for one thread */
    dcp_gemm_args_t args = product(1, 1);
    dcp_status_t status = dcp_cpu_gemm(own, &args);
    dcp_pool_destroy(own);
    return status;
}

int
main(void)
{
    fill();
    for (int isa = 0; isa < DCP_ISA_COUNT; isa++) {
        if (!dcp_isa_available((dcp_isa_t)isa)) {
            continue;
        }
        CHECK_OK(dcp_isa_set(dcp_isa_name((dcp_isa_t)isa)));
        for (int32_t threads = 1; threads <= 3; threads++) {
            CHECK_OK(dcp_pool_create(threads, &pool));
            test_values(DCP_F32);
            test_values(DCP_BF16);
            test_nothing_to_do();
            test_refusals();
            test_far_rows();
            test_borders(DCP_F32);
            test_borders(DCP_BF16);
            dcp_pool_destroy(pool);
        }
    }
    check_every_alloc(unpacked_scenario);
    return check_finish();
}
