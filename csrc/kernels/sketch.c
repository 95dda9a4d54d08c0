/* The linear sketch: checks and parts; the sums are in isa/sketch_kernel.c.
 *
 * Elements are cut by their number alone into at most 64 parts, each with sums of its
 * own (8 KB of the pool's scratch), added in order. Signs have the Philox key that
 * block "sket" of the seed gives. */
#include "quantise_ops.h"
#include "rowwise.h"

#include "dcp/kernels.h"
#include "dcp/rng.h"

enum { LEAST_PART = 1 << 16, MOST_PARTS = 64 };

typedef struct sketch_job {
    const dcp_sketch_args_t *args;
    uint32_t key[2];
    int64_t part_count, part_elements;
    double *sums; /* [parts][buckets] */
} sketch_job_t;

static dcp_status_t
sketch_part(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const sketch_job_t *job = context;
    int64_t first = task * job->part_elements, last = first + job->part_elements;
    double *sums = job->sums + task * DCP_SKETCH_BUCKETS;
    for (int64_t b = 0; b < DCP_SKETCH_BUCKETS; b++) {
        sums[b] = 0;
    }
    ROWWISE_OPS(sketch_ops)
        ->sketch(job->args, job->key, first,
                 last < job->args->count ? last : job->args->count, sums);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_sketch(dcp_pool_t *pool, const dcp_sketch_args_t *args)
{
    CHECK_SIZE("sketch", count);
    if (args->first < 0 || args->first % 16 != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "sketch: first %lld must be a multiple of 16, >= 0",
                        (long long)args->first);
    }
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("sketch", x);
    CHECK_POINTER("sketch", sums);
    sketch_job_t job = {.args = args, .part_elements = LEAST_PART};
    const uint32_t seed[2] = {(uint32_t)args->seed, (uint32_t)(args->seed >> 32)};
    const uint32_t counter[4] = {0x736b6574u, 0, 0, 0};
    uint32_t words[4];
    dcp_philox(seed, counter, words);
    job.key[0] = words[0];
    job.key[1] = words[1];
    while ((args->count - 1) / job.part_elements >= MOST_PARTS) {
        job.part_elements *= 2;
    }
    job.part_count = (args->count - 1) / job.part_elements + 1;
    void *memory;
    DCP_TRY(dcp_pool_scratch(
        pool, 0, job.part_count * DCP_SKETCH_BUCKETS * (int64_t)sizeof(double),
        &memory));
    job.sums = memory;
    DCP_TRY(dcp_pool_run(pool, job.part_count, sketch_part, &job));
    for (int64_t p = 0; p < job.part_count; p++) {
        for (int64_t b = 0; b < DCP_SKETCH_BUCKETS; b++) {
            args->sums[b] += job.sums[p * DCP_SKETCH_BUCKETS + b];
        }
    }
    return DCP_OK;
}
