/* Statistics in the optimizer's metric: gradients over Adam's denominator.
 *
 * An Adam-type update (in 8 bits too) divides by the root of v, so what it gains
 * depends on noise and errors in that metric. Each rank has v of its shard alone; all
 * need it for whole gradients. So denominators are averaged over blocks of 128 elements
 * and told to all, after updates 1, 2, 4, 8 and every eighth from then on: v moves
 * slowly. What differs within a block is lost. Elements without v so far have had no
 * gradient and do not count. */
#include "train_private.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { BLOCK = DCP_PRECISION_BLOCK };

struct train_factors {
    const dcp_optimizer_t *optimizer; /* whose they are */
    int64_t block_count;
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
add_piece(void *context, int64_t tensor, int64_t first, int64_t count, const float *v)
{
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
