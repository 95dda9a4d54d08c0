/* Sequential draws from Philox blocks. */
#include "dcp/rng.h"

#include <math.h>

void
dcp_rng_init(dcp_rng_t *rng, uint64_t seed, uint64_t stream)
{
    *rng = (dcp_rng_t){.seed = seed, .stream = stream, .block = 0, .used = 4};
}

uint32_t
dcp_rng_u32(dcp_rng_t *rng)
{
    if (rng->used == 4) {
        const uint32_t key[2] = {(uint32_t)rng->seed, (uint32_t)(rng->seed >> 32)};
        const uint32_t counter[4] = {(uint32_t)rng->block, (uint32_t)(rng->block >> 32),
                                     (uint32_t)rng->stream,
                                     (uint32_t)(rng->stream >> 32)};
        dcp_philox(key, counter, rng->words);
        rng->block++;
        rng->used = 0;
    }
    return rng->words[rng->used++];
}

uint64_t
dcp_rng_u64(dcp_rng_t *rng)
{
    uint64_t low = dcp_rng_u32(rng);
    return low | (uint64_t)dcp_rng_u32(rng) << 32;
}

uint64_t
dcp_rng_below(dcp_rng_t *rng, uint64_t bound)
{
    /* The values under `tail` = 2^64 mod bound would make the low results likelier:
     * redraw them. */
    uint64_t tail = (0 - bound) % bound;
    for (;;) {
        uint64_t x = dcp_rng_u64(rng);
        if (x >= tail) {
            return x % bound;
        }
    }
}

double
dcp_rng_uniform(dcp_rng_t *rng)
{
    return (double)(dcp_rng_u64(rng) >> 11) * 0x1p-53;
}

double
dcp_rng_normal(dcp_rng_t *rng)
{
    double u = 1.0 - dcp_rng_uniform(rng); /* (0, 1] */
    double v = dcp_rng_uniform(rng);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
