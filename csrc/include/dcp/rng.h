/* Philox4x32-10 (Salmon et al., SC 2011): counter-based, so that a random number is a
 * pure function of (seed, what it is for, index) and does not depend on the order of
 * calls, the plan or the world.
 */
#ifndef DCP_RNG_H
#define DCP_RNG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Four 32-bit words of block `counter` under `key`. */
static inline void
dcp_philox(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* A stream of words: `seed` and `stream` are the key and half of the counter. */
typedef struct dcp_rng {
    uint64_t seed;
    uint64_t stream;
    uint64_t block; /* next block */
    uint32_t words[4];
    int32_t used; /* of words, 4: none left */
} dcp_rng_t;

void dcp_rng_init(dcp_rng_t *rng, uint64_t seed, uint64_t stream);
uint32_t dcp_rng_u32(dcp_rng_t *rng);
uint64_t dcp_rng_u64(dcp_rng_t *rng);
/* Uniform in [0, bound), bound >= 1, without bias (Lemire's rejection). */
uint64_t dcp_rng_below(dcp_rng_t *rng, uint64_t bound);
double dcp_rng_uniform(dcp_rng_t *rng); /* [0, 1), 53 bits */
double dcp_rng_normal(dcp_rng_t *rng);  /* Box-Muller */

#ifdef __cplusplus
}
#endif
#endif
