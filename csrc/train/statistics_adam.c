/* Statistics in the optimizer's metric: gradients over Adam's denominator.
 *
 * An Adam-type update (in 8 bits too) divides by the root of v, so what it gains
 * depends on noise and errors in that metric. Each rank has v of its shard alone.
 *
 * Noise needs v of whole gradients. So denominators are averaged over blocks of 128
 * elements and told to all, after updates 1, 2, 4, 8 and every eighth from then on: v
 * moves slowly. What differs within a block is lost. Elements without v so far have had
 * no gradient and do not count.
 *
 * Errors of codes would suffer from that: a code's error is nearly the same all over a
 * block, so it is the elements with small v that it harms. Each rank therefore measures
 * them on its own part of the gradient of its own shard, element by element, with v as
 * this step is going to leave it. */
#include "train_private.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"

#include <math.h>
#include <string.h>

enum { BLOCK = DCP_PRECISION_BLOCK };

struct train_factors {
    const dcp_optimizer_t *optimizer; /* whose they are */
    int64_t block_count, revision;
    float *factor, *squared; /* [block_count] into memory */
    float *sums;             /* [2 * block_count] scratch: sums and counts */
};

void
train_factors_destroy(train_factors_t *factors)
{
    dcp_free(factors);
}

/* Does every trained tensor have a v? */
static bool
is_adams(const dcp_sharded_t *sharded)
{
    int32_t found = 0;
    for (int64_t t = 0; t < sharded->tensor_count; t++) {
        int32_t has = dcp_optimizer_has_second_moment(sharded->optimizer, t);
        if (sharded->trained[t] && !has) {
            return false;
        }
        found |= has;
    }
    return found;
}

static dcp_status_t
create(dcp_sharded_t *sharded)
{
    int64_t blocks = (dcp_dbuffer_layout_elements(sharded->layout) + BLOCK - 1) / BLOCK;
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(train_factors_t)
                                 + 4 * blocks * (int64_t)sizeof(float),
                             "statistics", &memory));
    train_factors_t *factors = memory;
    factors->block_count = blocks;
    factors->factor = (float *)(factors + 1);
    factors->squared = factors->factor + blocks;
    factors->sums = factors->squared + blocks;
    sharded->factors = factors;
    return DCP_OK;
}

/* Adds denominators of a tensor to the sums of their blocks. */
static void
add_piece(void *context, int64_t tensor, int64_t first, int64_t count, const float *v,
          double beta2)
{
    (void)beta2;
    const dcp_sharded_t *sharded = context;
    float *sums = sharded->factors->sums,
          *counts = sums + sharded->factors->block_count;
    int64_t start = dcp_dbuffer_layout_start(sharded->layout, tensor) + first;
    for (int64_t i = 0; i < count; i++) {
        int64_t block = (start + i) / BLOCK;
        sums[block] += sqrtf(v[i]);
        counts[block] += v[i] > 0.0f ? 1.0f : 0.0f;
    }
}

/* This rank's denominators. */
static void
add_own(dcp_sharded_t *sharded)
{
    train_factors_t *factors = sharded->factors;
    memset(factors->sums, 0,
           2 * (size_t)factors->block_count * sizeof factors->sums[0]);
    dcp_optimizer_second_moments(sharded->optimizer, add_piece, sharded);
}

/* Relative to the mean denominator: then numbers of steps whose v differ in size, as
 * the first ones' do, can be averaged. */
static void
set_factors(train_factors_t *factors)
{
    const float *sums = factors->sums, *counts = sums + factors->block_count;
    double sum = 0, count = 0;
    for (int64_t b = 0; b < factors->block_count; b++) {
        sum += (double)sums[b];
        count += (double)counts[b];
    }
    float mean = count > 0 ? (float)(sum / count) : 0.0f;
    for (int64_t b = 0; b < factors->block_count; b++) {
        bool known = sums[b] > 0.0f && isfinite(sums[b]);
        factors->factor[b] = known ? mean * counts[b] / sums[b] : 0.0f;
        factors->squared[b] = factors->factor[b] * factors->factor[b];
    }
}

static bool
is_due(int64_t updates)
{
    return updates <= 8 ? (updates & (updates - 1)) == 0 : updates % 8 == 0;
}

dcp_status_t
train_factors_refresh(dcp_sharded_t *sharded, int64_t updates)
{
    if (!is_due(updates)) {
        return DCP_OK;
    }
    if (sharded->factors != NULL) {
        sharded->factors->optimizer = NULL;
    }
    if (!is_adams(sharded)) {
        return DCP_OK;
    }
    if (sharded->factors == NULL) {
        DCP_TRY(create(sharded));
    }
    train_factors_t *factors = sharded->factors;
    add_own(sharded);
    DCP_TRY(dcp_comm_allreduce(sharded->comm, factors->sums, factors->sums,
                               2 * factors->block_count, DCP_F32, DCP_SUM));
    set_factors(factors);
    factors->revision++;
    factors->optimizer = sharded->optimizer;
    return DCP_OK;
}

const float *
train_factors(const dcp_sharded_t *sharded)
{
    const train_factors_t *factors = sharded->factors;
    return factors != NULL && factors->optimizer == sharded->optimizer ? factors->factor
                                                                       : NULL;
}

const float *
train_factors_squared(const dcp_sharded_t *sharded)
{
    return train_factors(sharded) != NULL ? sharded->factors->squared : NULL;
}

int64_t
train_factors_revision(const dcp_sharded_t *sharded)
{
    return train_factors(sharded) != NULL ? sharded->factors->revision : 0;
}

/* Errors of codes, element by element. */
typedef struct moment_errors {
    const dcp_sharded_t *sharded;
    const dcp_step_args_t *args;
    double
        scale; /* of the squares of this rank's own part, as the optimizer sees them */
    train_sample_t sample;
    double *squares, *errors;
    dcp_status_t status;
} moment_errors_t;

/* A block of x in every precision; weights [BLOCK] 1 / denominator^2. */
static dcp_status_t
block_errors(const moment_errors_t *m, const float *x, int64_t first,
             const double *weights)
{
    float residual[BLOCK];
    char codes[BLOCK * sizeof(float) + sizeof(float)];
    for (int i = 0; i < BLOCK; i++) {
        *m->squares += (double)x[i] * (double)x[i] * weights[i];
    }
    for (int q = DCP_PRECISION_BF16; q < DCP_PRECISION_COUNT; q++) {
        memset(residual, 0, sizeof residual);
        dcp_quantise_args_t args = {
            .count = BLOCK,
            .x = x,
            .residual = residual,
            .codes = codes,
            .precision = (dcp_precision_t)q,
            .hadamard = m->args->hadamard,
            .nearest = m->args->nearest,
            .seed = m->args->quantise_seed,
            .stream = (uint64_t)m->args->step,
            .first = first,
        };
        DCP_TRY(dcp_cpu_quantise(m->sharded->pool, &args));
        for (int i = 0; i < BLOCK; i++) {
            m->errors[q] += (double)residual[i] * (double)residual[i] * weights[i];
        }
    }
    return DCP_OK;
}

static void
measure_piece(void *context, int64_t tensor, int64_t first, int64_t count,
              const float *v, double beta2)
{
    moment_errors_t *m = context;
    int64_t start = dcp_dbuffer_layout_start(m->sharded->layout, tensor) + first;
    const float *x = dcp_dbuffer_data(m->sharded->buffers[DCP_SHARDED_GRADIENTS]);
    x += start;
    for (int64_t at = 0; at + BLOCK <= count && m->status == DCP_OK;) {
        int64_t skipped = train_sample_skip(&m->sample, start + at);
        if (skipped > 0) {
            at += skipped;
            continue;
        }
        double weights[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            double own = (double)x[at + i];
            double next = beta2 * (double)v[at + i]
                          + (1.0 - beta2) * m->scale * own * own; /* v of this step */
            weights[i] = next > 0 ? 1.0 / next : 0.0;
        }
        m->status = block_errors(m, x + at, start + at, weights);
        at += BLOCK;
    }
}

dcp_status_t
train_moment_errors(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                    double *squares, double *errors)
{
    double clip = sharded->grad_scale > 0 ? sharded->grad_scale : 1.0;
    moment_errors_t m = {
        .sharded = sharded,
        .args = args,
        .scale = clip * clip * dcp_comm_size(sharded->comm),
        .sample = train_sample(sharded, args->step),
        .squares = squares,
        .errors = errors,
    };
    dcp_optimizer_second_moments(sharded->optimizer, measure_piece, &m);
    return m.status;
}

double
train_factors_shard_squares(const dcp_sharded_t *sharded)
{
    const float *squared = train_factors_squared(sharded);
    const dcp_dbuffer_t *gradients = sharded->buffers[DCP_SHARDED_GRADIENTS];
    int32_t rank = dcp_comm_rank(sharded->comm);
    double total = 0;
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        dcp_dbuffer_group_t group = dcp_dbuffer_layout_group(sharded->layout, g);
        const float *x = dcp_dbuffer_slice(gradients, g);
        int64_t start = group.start + rank * group.shard;
        for (int64_t i = 0; i < group.shard;) {
            int64_t block = (start + i) / BLOCK;
            int64_t end = (block + 1) * BLOCK - start;
            end = end < group.shard ? end : group.shard;
            double sum = 0;
            for (; i < end; i++) {
                sum += (double)x[i] * (double)x[i];
            }
            total += sum * (double)squared[block];
        }
    }
    return total;
}
