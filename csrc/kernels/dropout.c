/* Dropout: checks, the key and the threshold; the drawing is in isa/dropout_kernel.c.
 *
 * The seed and the site, 64 bits each, make Philox's 64-bit key through Philox itself:
 * key = first two words of block (site, "drop") under key `seed`. A word below
 * (1 - p) 2^32 keeps its element. Nothing else enters, so any device can draw alike.
 */
#include "dcp/kernels.h"
#include "dcp/rng.h"
#include "rowwise.h"

static dropout_job_t
make_job(const dcp_dropout_args_t *args)
{
    uint32_t seed[2] = {(uint32_t)args->seed, (uint32_t)(args->seed >> 32)};
    uint32_t counter[4] = {(uint32_t)args->site, (uint32_t)(args->site >> 32),
                           0x64726f70u, 0};
    uint32_t words[4];
    dcp_philox(seed, counter, words);
    double keep = 1.0 - (double)args->p;
    double limit = keep * 4294967296.0 + 0.5;
    dropout_job_t job = {
        .args = args,
        .key = {words[0], words[1]},
        .threshold = limit >= 4294967295.0 ? 0xffffffffu : (uint32_t)limit,
        .scale = (float)(1.0 / keep),
    };
    return job;
}

dcp_status_t
dcp_cpu_dropout(dcp_pool_t *pool, const dcp_dropout_args_t *args)
{
    CHECK_SIZE("dropout", rows);
    CHECK_SIZE("dropout", width);
    if (!(args->p >= 0.0f && args->p < 1.0f)) {
        return DCP_FAIL(DCP_ERR_ARG, "dropout: p %g must lie in [0, 1)",
                        (double)args->p);
    }
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("dropout", x);
    CHECK_POINTER("dropout", row_ids);
    CHECK_POINTER("dropout", out);
    if (args->p == 0.0f) {
        dcp_add_args_t add = {args->rows * args->width, args->x, args->add, args->out};
        return dcp_cpu_add(pool, &add);
    }
    dropout_job_t job = make_job(args);
    return rowwise_run(pool, args->rows, args->width, ROWWISE_OPS(dropout_ops)->dropout,
                       &job);
}
