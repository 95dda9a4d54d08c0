/* Codes of gradients and the sketch: the same bits in every instruction set, with any
 * number of threads and however a buffer is cut; buffers that end with their last
 * element and messages at odd addresses (for the sanitizers); error bounds; bad
 * arguments; scratch that cannot be had. Numbers are compared with NumPy in
 * tests/unit/test_quantise.py. */
#include "check.h"

#include "dcp/device.h"
#include "dcp/isa.h"
#include "dcp/kernels.h"
#include "dcp/rng.h"

#include <math.h>
#include <string.h>

enum { BLOCK = DCP_PRECISION_BLOCK, MOST = 70 * BLOCK };

static const dcp_isa_t isas[] = {DCP_ISA_PORTABLE, DCP_ISA_AVX2, DCP_ISA_AVX512};

/* Heavy tails over many magnitudes, some zeros; block 3 is not finite. */
static void
fill(float *x, int64_t count, uint64_t seed)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, seed, 0);
    for (int64_t i = 0; i < count; i++) {
        double normal = dcp_rng_normal(&rng);
        x[i] =
            (float)(normal * normal * normal * exp2((double)(i / BLOCK % 9) * 8 - 40));
        x[i] = dcp_rng_below(&rng, 10) == 0 ? 0.0f : x[i];
    }
    if (count > 3 * BLOCK + 5) {
        x[3 * BLOCK + 5] = NAN;
    }
}

typedef struct outcome {
    uint8_t codes[4 * MOST];
    float residual[MOST], decoded[MOST];
    double squares[2];
} outcome_t;

static void
run(dcp_pool_t *pool, const dcp_quantise_args_t *given, outcome_t *out)
{
    memset(out, 0x55, sizeof *out);
    dcp_quantise_args_t args = *given;
    args.codes = out->codes;
    args.squares = out->squares;
    out->squares[0] = out->squares[1] = 0;
    if (given->residual != NULL) {
        memcpy(out->residual, given->residual, (size_t)args.count * sizeof(float));
        args.residual = out->residual;
    }
    CHECK_OK(dcp_cpu_quantise(pool, &args));
    dcp_dequantise_args_t back = {
        .count = args.count,
        .codes = out->codes,
        .precision = args.precision,
        .hadamard = args.hadamard,
        .seed = args.seed,
        .out = out->decoded,
    };
    CHECK_OK(dcp_cpu_dequantise(pool, &back));
    back.accumulate = 1;
    CHECK_OK(dcp_cpu_dequantise(pool, &back)); /* twice: all but signs of zeros */
}

static int
same(const outcome_t *a, const outcome_t *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static float x[MOST], residual[MOST];
static outcome_t first_outcome, outcome;

static void
test_bits(dcp_pool_t *const pools[3])
{
    static const int64_t counts[] = {
        1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77, 17 * BLOCK, MOST};
    for (int p = 0; p < DCP_PRECISION_COUNT; p++) {
        for (int mode = 0; mode < 8 * 8; mode++) {
            dcp_quantise_args_t args = {
                .count = counts[mode / 8],
                .x = x,
                .residual = mode & 4 ? residual : NULL,
                .precision = (dcp_precision_t)p,
                .hadamard = mode & 1,
                .nearest = mode >> 1 & 1,
                .seed = 77,
                .stream = UINT64_C(5) << 40,
                .first = mode % 3 == 0   ? 0
                         : mode % 3 == 1 ? -300
                                         : INT64_MAX - 7,
            };
            for (int i = 0; i < 3; i++) {
                if (!dcp_isa_available(isas[i])) {
                    continue;
                }
                CHECK_OK(dcp_isa_set(dcp_isa_name(isas[i])));
                for (int t = 0; t < 3; t++) {
                    outcome_t *to = i == 0 && t == 0 ? &first_outcome : &outcome;
                    run(pools[t], &args, to);
                    CHECK(to == &first_outcome || same(&first_outcome, to));
                }
            }
        }
    }
}

/* A message of parts has the scales and codes of the whole. */
static void
test_cuts(dcp_pool_t *pool)
{
    static uint8_t codes[4 * MOST];
    for (int p = DCP_PRECISION_FP8_E4M3; p < DCP_PRECISION_COUNT; p++) {
        dcp_quantise_args_t whole = {.count = MOST - 9,
                                     .x = x,
                                     .precision = (dcp_precision_t)p,
                                     .hadamard = p & 1,
                                     .seed = 3,
                                     .first = 1000};
        run(pool, &whole, &first_outcome);
        int64_t blocks = (whole.count - 1) / BLOCK + 1;
        for (int64_t cut = 1; cut < blocks; cut += 13) {
            dcp_quantise_args_t part = whole;
            part.x += cut * BLOCK;
            part.first += cut * BLOCK;
            part.count -= cut * BLOCK;
            part.codes = codes;
            CHECK_OK(dcp_cpu_quantise(pool, &part));
            int64_t before = dcp_precision_bytes(part.precision, cut * BLOCK) - 4 * cut;
            int64_t bytes = dcp_precision_bytes(part.precision, part.count);
            int64_t scales = 4 * (blocks - cut);
            CHECK(memcmp(codes, first_outcome.codes + 4 * cut, (size_t)scales) == 0);
            CHECK(memcmp(codes + scales, first_outcome.codes + 4 * blocks + before,
                         (size_t)(bytes - scales))
                  == 0);
        }
    }
}

/* |left| of a block is at most a step of its largest values: what is sent and what
 * decodes differ by no more. */
static void
test_bounds(dcp_pool_t *pool)
{
    static const double steps[DCP_PRECISION_COUNT] = {0,       1.0 / 256, 1.0 / 8,
                                                      1.0 / 4, 1.0 / 127, 1.0 / 7};
    for (int p = 0; p < DCP_PRECISION_COUNT; p++) {
        dcp_quantise_args_t args = {
            .count = MOST - 1, .x = x, .precision = (dcp_precision_t)p, .seed = 9};
        run(pool, &args, &outcome);
        for (int64_t b = 0; b * BLOCK < args.count; b++) {
            double largest = 0, left = 0;
            for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < args.count; i++) {
                largest = fmax(largest, fabs((double)x[i]));
                left = fmax(left, fabs((double)outcome.decoded[i] / 2 - (double)x[i]));
            }
            CHECK(b == 3 || left <= largest * steps[p] * 1.000001);
        }
    }
}

/* Exact allocations of the libc, which the sanitizer fences; messages at addresses that
 * are odd. */
static void
test_ends(dcp_pool_t *pool, int64_t count)
{
    size_t bytes = (size_t)(count > 0 ? count : 1) * sizeof(float);
    float *in = malloc(bytes), *kept = malloc(bytes), *out = malloc(bytes);
    for (int64_t i = 0; i < count; i++) {
        in[i] = (float)(i % 7) - 3;
        kept[i] = 0.25f;
    }
    for (int mode = 0; mode < DCP_PRECISION_COUNT * 4; mode++) {
        dcp_precision_t precision = (dcp_precision_t)(mode / 4);
        int64_t message = dcp_precision_bytes(precision, count);
        uint8_t *codes = malloc((size_t)message + 1);
        double squares[2] = {0, 0};
        dcp_quantise_args_t args = {
            .count = count,
            .x = in,
            .residual = mode & 2 ? kept : NULL,
            .codes = codes + 1,
            .precision = precision,
            .hadamard = mode & 1,
            .squares = mode & 2 ? squares : NULL,
        };
        CHECK_OK(dcp_cpu_quantise(pool, &args));
        dcp_dequantise_args_t back = {.count = count,
                                      .codes = codes + 1,
                                      .precision = precision,
                                      .hadamard = mode & 1,
                                      .out = out};
        CHECK_OK(dcp_cpu_dequantise(pool, &back));
        free(codes);
    }
    double sums[DCP_SKETCH_BUCKETS] = {0};
    dcp_sketch_args_t sketch = {.count = count, .x = in, .first = 16, .sums = sums};
    CHECK_OK(dcp_cpu_sketch(pool, &sketch));
    free(in);
    free(kept);
    free(out);
}

static void
test_sketch_bits(dcp_pool_t *const pools[3])
{
    enum { COUNT = 300001 };
    static float values[COUNT], weights[COUNT / BLOCK + 1];
    static double expected[DCP_SKETCH_BUCKETS], sums[DCP_SKETCH_BUCKETS];
    fill(values, COUNT, 4);
    for (int64_t b = 0; b * BLOCK < COUNT; b++) {
        weights[b] = (float)(b % 5);
    }
    for (int mode = 0; mode < 4; mode++) {
        for (int run_idx = 0; run_idx < 9; run_idx++) {
            if (!dcp_isa_available(isas[run_idx / 3])) {
                continue;
            }
            CHECK_OK(dcp_isa_set(dcp_isa_name(isas[run_idx / 3])));
            double *to = run_idx == 0 ? expected : sums;
            memset(to, 0, sizeof sums);
            dcp_sketch_args_t args = {.count = COUNT,
                                      .x = values,
                                      .weights = mode & 1 ? weights : NULL,
                                      .seed = 8,
                                      .first = mode & 2 ? 16 * 12345 : 0,
                                      .sums = to};
            CHECK_OK(dcp_cpu_sketch(pools[run_idx % 3], &args));
            CHECK(memcmp(to, expected, sizeof expected) == 0);
        }
    }
}

static void
test_bad_arguments(dcp_pool_t *pool)
{
    uint8_t codes[8];
    float value = 1;
    double sums[DCP_SKETCH_BUCKETS] = {0};
    dcp_quantise_args_t args = {.count = -1, .x = &value, .codes = codes};
    CHECK(dcp_cpu_quantise(pool, &args) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "quantise: count -1") != NULL);
    args = (dcp_quantise_args_t){.count = 1, .x = &value, .codes = codes};
    args.precision = (dcp_precision_t)6;
    CHECK(dcp_cpu_quantise(pool, &args) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "precision 6 must be") != NULL);
    args = (dcp_quantise_args_t){.count = 1, .codes = codes};
    CHECK(dcp_cpu_quantise(pool, &args) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "x is NULL") != NULL);
    dcp_dequantise_args_t back = {.count = 1, .out = &value};
    CHECK(dcp_cpu_dequantise(pool, &back) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "codes is NULL") != NULL);
    back = (dcp_dequantise_args_t){.count = 1, .codes = codes};
    CHECK(dcp_cpu_dequantise(pool, &back) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "out is NULL") != NULL);
    dcp_sketch_args_t sketch = {.count = 1, .x = &value, .first = 8, .sums = sums};
    CHECK(dcp_cpu_sketch(pool, &sketch) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "first 8 must be a multiple of 16") != NULL);
    CHECK_OK(dcp_cpu_quantise(pool, &(dcp_quantise_args_t){.count = 0}));
    CHECK_OK(dcp_cpu_dequantise(pool, &(dcp_dequantise_args_t){.count = 0}));
    CHECK_OK(dcp_cpu_sketch(pool, &(dcp_sketch_args_t){.count = 0}));
}

/* The queue that runs late: arguments are copied, nothing happens before the fence. */
static void
test_late_queue(dcp_pool_t *pool)
{
    const dcp_device_ops_t *device = dcp_device_late();
    dcp_queue_t *queue = NULL;
    CHECK_OK(device->queue_create(pool, &queue));
    float in[3] = {1, -2, 3}, out[3] = {0};
    uint8_t codes[7] = {0};
    double sums[DCP_SKETCH_BUCKETS] = {0};
    dcp_quantise_args_t args = {
        .count = 3, .x = in, .codes = codes, .precision = DCP_PRECISION_INT8};
    dcp_dequantise_args_t back = {
        .count = 3, .codes = codes, .precision = DCP_PRECISION_INT8, .out = out};
    dcp_sketch_args_t sketch = {.count = 3, .x = out, .sums = sums};
    CHECK_OK(device->quantise(queue, &args));
    CHECK_OK(device->dequantise(queue, &back));
    CHECK_OK(device->sketch(queue, &sketch));
    args.count = back.count = sketch.count = 0;
    CHECK(codes[3] == 0 && out[0] == 0 && sums[0] == 0);
    CHECK_OK(device->fence(queue));
    CHECK(fabsf(out[1] + 2) < 0.03f && fabs(fabs(sums[2]) - 3) < 0.03);
    device->queue_destroy(queue);
}

static dcp_status_t
scratch_scenario(void)
{
    dcp_pool_t *pool = NULL;
    dcp_status_t status = dcp_pool_create(2, &pool);
    if (status != DCP_OK) {
        return status;
    }
    static double sums[DCP_SKETCH_BUCKETS];
    dcp_sketch_args_t args = {.count = MOST, .x = residual, .sums = sums};
    sums[0] = 7;
    status = dcp_cpu_sketch(pool, &args);
    CHECK(status == DCP_OK || sums[0] == 7);
    dcp_pool_destroy(pool);
    return status;
}

int
main(void)
{
    dcp_pool_t *pools[3];
    for (int32_t t = 0; t < 3; t++) {
        CHECK_OK(dcp_pool_create(t + 1, &pools[t]));
    }
    fill(x, MOST, 1);
    fill(residual, MOST, 2);
    residual[3 * BLOCK + 5] = 0;
    test_bits(pools);
    test_sketch_bits(pools);
    for (int i = 0; i < 3; i++) {
        if (dcp_isa_available(isas[i])) {
            CHECK_OK(dcp_isa_set(dcp_isa_name(isas[i])));
            test_cuts(pools[1]);
            test_bounds(pools[1]);
            for (int64_t count = 0; count < 20; count++) {
                test_ends(pools[0], count);
                test_ends(pools[0], BLOCK + 7 * count);
            }
            test_ends(pools[2], 40 * BLOCK + 1);
        }
    }
    test_bad_arguments(pools[0]);
    test_late_queue(pools[0]);
    for (int t = 0; t < 3; t++) {
        dcp_pool_destroy(pools[t]);
    }
    check_every_alloc(scratch_scenario);
    return check_finish();
}
