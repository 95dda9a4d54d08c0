/* Attention: strided views, both offset types, both computations, scores against a
 * scalar reference, element offsets beyond 2^31, allocation failure, bad arguments.
 * Every instruction set.
 */
#define _DEFAULT_SOURCE
#include "check.h"

#include "dcp/isa.h"
#include "dcp/kernels.h"
#include "dcp/rng.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 24, ROWS = 60, SEQUENCES = 5 };

/* Columns of one fused row: q, k, v. */
enum { STRIDE = (HEADS + 2 * KV_HEADS) * DIM + 5 };

static const int32_t offsets_32[SEQUENCES + 1] = {0, 7, 7, 40, 41, 57};
static const int64_t offsets_64[SEQUENCES + 1] = {0, 7, 7, 40, 41, 57};

typedef struct problem {
    float fused[ROWS * STRIDE], gradients[ROWS * STRIDE];
    float out[ROWS * HEADS * DIM], dout[ROWS * HEADS * DIM], lse[HEADS * ROWS];
} problem_t;

static void
fill(float *x, int64_t count, uint64_t seed)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, seed, 0);
    for (int64_t i = 0; i < count; i++) {
        x[i] = (float)dcp_rng_normal(&rng);
    }
}

static dcp_attention_backward_args_t
arguments(problem_t *p, int32_t wide)
{
    return (dcp_attention_backward_args_t){
        .forward = {.q = p->fused,
                    .k = p->fused + HEADS * DIM,
                    .v = p->fused + (HEADS + KV_HEADS) * DIM,
                    .q_stride = STRIDE,
                    .k_stride = STRIDE,
                    .v_stride = STRIDE,
                    .out_stride = HEADS * DIM,
                    .offsets =
                        wide ? (const void *)offsets_64 : (const void *)offsets_32,
                    .offsets_64 = wide,
                    .causal = 1,
                    .sequence_count = SEQUENCES,
                    .query_rows = ROWS,
                    .heads = HEADS,
                    .kv_heads = KV_HEADS,
                    .head_dim = DIM,
                    .scale = 0.3f,
                    .out = p->out,
                    .lse = p->lse},
        .dout = p->dout,
        .dout_stride = HEADS * DIM,
        .dq = p->gradients,
        .dk = p->gradients + HEADS * DIM,
        .dv = p->gradients + (HEADS + KV_HEADS) * DIM,
        .dq_stride = STRIDE,
        .dk_stride = STRIDE,
        .dv_stride = STRIDE,
        .key_rows = ROWS,
    };
}

static double
dot(const float *a, const float *b)
{
    double sum = 0.0;
    for (int i = 0; i < DIM; i++) {
        sum += (double)a[i] * (double)b[i];
    }
    return sum;
}

/* Both passes of one query head in double, causal; gradients are added. */
static void
reference_head(const problem_t *p, int64_t first, int64_t end, int64_t head,
               double *out, double *gradients)
{
    int64_t q_shift = head * DIM;
    int64_t k_shift = (HEADS + head / (HEADS / KV_HEADS)) * DIM;
    int64_t v_shift = k_shift + KV_HEADS * DIM;
    for (int64_t i = first; i < end; i++) {
        double weights[ROWS], sum = 0.0, delta = 0.0;
        const float *dout = p->dout + i * HEADS * DIM + q_shift;
        const float *q = p->fused + i * STRIDE + q_shift;
        for (int64_t j = first; j <= i; j++) {
            weights[j] = exp(0.3f * dot(q, p->fused + j * STRIDE + k_shift));
            sum += weights[j];
        }
        for (int64_t j = first; j <= i; j++) {
            weights[j] /= sum;
            delta += weights[j] * dot(dout, p->fused + j * STRIDE + v_shift);
        }
        for (int64_t j = first; j <= i; j++) {
            const float *k = p->fused + j * STRIDE + k_shift;
            const float *v = p->fused + j * STRIDE + v_shift;
            double slope = weights[j] * (dot(dout, v) - delta) * 0.3f;
            for (int d = 0; d < DIM; d++) {
                out[i * HEADS * DIM + q_shift + d] += weights[j] * v[d];
                gradients[i * STRIDE + q_shift + d] += slope * k[d];
                gradients[j * STRIDE + k_shift + d] += slope * q[d];
                gradients[j * STRIDE + v_shift + d] += weights[j] * dout[d];
            }
        }
    }
}

static void
test_fused_rows(dcp_dtype_t compute, double tolerance)
{
    static problem_t p;
    static double out[ROWS * HEADS * DIM], gradients[ROWS * STRIDE];
    memset(out, 0, sizeof out);
    memset(gradients, 0, sizeof gradients);
    fill(p.fused, ROWS * STRIDE, 1);
    fill(p.dout, ROWS * HEADS * DIM, 2);
    for (int64_t i = 0; i < ROWS * STRIDE; i++) {
        p.gradients[i] = 99.0f; /* columns between rows must stay as they are */
    }
    for (int s = 0; s < SEQUENCES; s++) {
        for (int64_t head = 0; head < HEADS; head++) {
            reference_head(&p, offsets_64[s], offsets_64[s + 1], head, out, gradients);
        }
    }
    dcp_pool_t *pool;
    CHECK_OK(dcp_pool_create(2, &pool));
    for (int32_t wide = 0; wide < 2; wide++) {
        dcp_attention_backward_args_t args = arguments(&p, wide);
        args.forward.compute = compute;
        CHECK_OK(dcp_cpu_attention(pool, &args.forward));
        CHECK_OK(dcp_cpu_attention_backward(pool, &args));
        double worst = 0.0;
        for (int64_t i = 0; i < ROWS * HEADS * DIM; i++) {
            worst = fmax(worst, fabs(out[i] - (double)p.out[i]));
        }
        int64_t touched = 0;
        for (int64_t i = 0; i < ROWS * STRIDE; i++) {
            if (i % STRIDE < STRIDE - 5) {
                worst = fmax(worst, fabs(gradients[i] - (double)p.gradients[i]));
            } else {
                touched += p.gradients[i] != 99.0f;
            }
        }
        CHECK(worst < tolerance);
        CHECK(touched == 0);
        CHECK(isinf(p.lse[57]) && p.lse[57] < 0.0f);
    }
    dcp_pool_destroy(pool);
}

/* Case A-12: rows so far apart that 32-bit element offsets would wrap. The buffer is
 * mapped, and only the rows that are used become memory. */
static void
test_far_rows(void)
{
    enum { KEYS = 3, NEAR = 2 * DIM };
    const int64_t stride = (INT64_C(1) << 30) + 7; /* the last row begins beyond 2^31 */
    size_t bytes = (size_t)(KEYS * stride) * sizeof(float);
    float *far_keys = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(far_keys != MAP_FAILED);
    if (far_keys == MAP_FAILED) {
        return;
    }
    float near_rows[KEYS * NEAR], q[DIM], dout[DIM];
    fill(near_rows, KEYS * NEAR, 3);
    fill(q, DIM, 4);
    fill(dout, DIM, 5);
    for (int64_t row = 0; row < KEYS; row++) {
        memcpy(far_keys + row * stride, near_rows + row * NEAR, NEAR * sizeof(float));
    }
    const int64_t offsets[2] = {0, 1}, key_offsets[2] = {0, KEYS};
    dcp_pool_t *pool;
    CHECK_OK(dcp_pool_create(1, &pool));
    float out[2][DIM], lse[2], dq[2][DIM], dk[KEYS * DIM], dv[KEYS * DIM];
    float near_dk[KEYS * DIM], near_dv[KEYS * DIM];
    for (int is_far = 0; is_far < 2; is_far++) {
        const float *keys = is_far ? far_keys : near_rows;
        int64_t key_stride = is_far ? stride : NEAR;
        dcp_attention_backward_args_t args = {
            .forward = {.q = q,
                        .k = keys,
                        .v = keys + DIM,
                        .q_stride = is_far ? stride : DIM,
                        .k_stride = key_stride,
                        .v_stride = key_stride,
                        .out_stride = is_far ? stride : DIM,
                        .offsets = offsets,
                        .key_offsets = key_offsets,
                        .offsets_64 = 1,
                        .causal = 1,
                        .sequence_count = 1,
                        .query_rows = 1,
                        .heads = 1,
                        .kv_heads = 1,
                        .head_dim = DIM,
                        .scale = 1.0f,
                        .out = out[is_far],
                        .lse = &lse[is_far]},
            .dout = dout,
            .dout_stride = DIM,
            .dq = dq[is_far],
            .dk = is_far ? dk : near_dk,
            .dv = is_far ? dv : near_dv,
            .dq_stride = DIM,
            .dk_stride = DIM,
            .dv_stride = DIM,
            .key_rows = KEYS,
        };
        CHECK_OK(dcp_cpu_attention(pool, &args.forward));
        CHECK_OK(dcp_cpu_attention_backward(pool, &args));
    }
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0 && lse[0] == lse[1]);
    CHECK(memcmp(dq[0], dq[1], sizeof dq[0]) == 0);
    CHECK(memcmp(dk, near_dk, sizeof dk) == 0 && memcmp(dv, near_dv, sizeof dv) == 0);
    dcp_pool_destroy(pool);
    munmap(far_keys, bytes);
}

static dcp_dtype_t scenario_compute;

static dcp_status_t
attention_scenario(void)
{
    static problem_t p;
    fill(p.fused, ROWS * STRIDE, 6);
    fill(p.dout, ROWS * HEADS * DIM, 7);
    dcp_attention_backward_args_t args = arguments(&p, 0);
    args.forward.compute = scenario_compute;
    dcp_pool_t *pool;
    DCP_TRY(dcp_pool_create(2, &pool));
    dcp_status_t status = dcp_cpu_attention(pool, &args.forward);
    if (status == DCP_OK) {
        status = dcp_cpu_attention_backward(pool, &args);
    }
    dcp_pool_destroy(pool);
    return status;
}

static void
test_bad_arguments(void)
{
    static problem_t p;
    dcp_pool_t *pool;
    CHECK_OK(dcp_pool_create(1, &pool));
    dcp_attention_backward_args_t args = arguments(&p, 0);
    args.forward.q_stride = HEADS * DIM - 1;
    CHECK(dcp_cpu_attention(pool, &args.forward) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), "q_stride 95 is below the 4 x 24 elements of a row")
          == 0);
    args = arguments(&p, 0);
    args.dv_stride = 1;
    CHECK(dcp_cpu_attention_backward(pool, &args) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "dv_stride 1") != NULL);
    args = arguments(&p, 0);
    args.key_rows = 56;
    CHECK(dcp_cpu_attention_backward(pool, &args) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), "offsets[5] is 57, beyond the 56 rows of k") == 0);
    args.key_rows = -1;
    CHECK(dcp_cpu_attention_backward(pool, &args) == DCP_ERR_ARG);
    args = arguments(&p, 0);
    args.forward.query_rows = 56;
    CHECK(dcp_cpu_attention(pool, &args.forward) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), "offsets[5] is 57, beyond the 56 rows of q") == 0);
    args = arguments(&p, 0);
    args.forward.sequence_count = -1;
    CHECK(dcp_cpu_attention(pool, &args.forward) == DCP_ERR_ARG);
    args = arguments(&p, 0);
    args.forward.compute = DCP_I64;
    CHECK(dcp_cpu_attention(pool, &args.forward) == DCP_ERR_TYPE);
    CHECK(strcmp(dcp_last_error(), "compute int64 must be float32 or bfloat16") == 0);
    args = arguments(&p, 0);
    args.forward.sequence_count = 0; /* nothing to do but the rows no one owns */
    args.forward.query_rows = 2;
    p.out[HEADS * DIM] = 5.0f;
    CHECK_OK(dcp_cpu_attention(pool, &args.forward));
    CHECK(p.out[HEADS * DIM] == 0.0f && isinf(p.lse[1]));
    dcp_pool_destroy(pool);
}

int
main(void)
{
    for (int isa = 0; isa < DCP_ISA_COUNT; isa++) {
        if (!dcp_isa_available((dcp_isa_t)isa)) {
            continue;
        }
        CHECK_OK(dcp_isa_set(dcp_isa_name((dcp_isa_t)isa)));
        test_fused_rows(DCP_F32, 2e-5);
        /* sums of 17 products of numbers up to 3, each rounded to 2^-9 */
        test_fused_rows(DCP_BF16, 0.1);
        test_far_rows();
        for (int bf16 = 0; bf16 < 2; bf16++) {
            scenario_compute = bf16 ? DCP_BF16 : DCP_F32;
            check_every_alloc(attention_scenario);
        }
    }
    test_bad_arguments();
    return check_finish();
}
