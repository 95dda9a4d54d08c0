/* Philox4x32-10 (dcp/rng.h) in vectors.
 *
 * Blocks with even and odd numbers stand in two vectors of 64-bit lanes of which only
 * the low halves count: a 32 x 32 bit product needs no shuffles then, its low half is
 * used where it lies and its high half is a shift away. Some 30 instructions a vector
 * of blocks and round: half of one for every random byte with 16 lanes.
 */
#ifndef DCP_PHILOX_H
#define DCP_PHILOX_H

#include "simd.h"

typedef uint64_t vq __attribute__((vector_size(VF * 4)));

enum { PHILOX_WORDS = 4 };

static inline vq
philox_product_(vq a, uint32_t b) /* of the low halves */
{
#if defined(__AVX512F__)
    return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * b;
#endif
}

VF_INLINE void
philox_round_(vq c[PHILOX_WORDS], vq k0, vq k1)
{
    vq p0 = philox_product_(c[0], 0xD2511F53u);
    vq p1 = philox_product_(c[2], 0xCD9E8D57u);
    c[0] = (p1 >> 32) ^ c[1] ^ k0;
    c[2] = (p0 >> 32) ^ c[3] ^ k1;
    c[1] = p1;
    c[3] = p0;
}

/* Both in every lane, side by side; upper halves are undefined, in and out. */
VF_INLINE void
philox_rounds_(const uint32_t key[2], vq even[PHILOX_WORDS], vq odd[PHILOX_WORDS])
{
    vq k0 = (vq){0} + key[0], k1 = (vq){0} + key[1];
    for (int round = 0; round < 10; round++) {
        philox_round_(even, k0, k1);
        philox_round_(odd, k0, k1);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* words[w]: in lane l word w of the block of counter (block + l, high). */
static inline void
philox_draw(const uint32_t key[2], uint64_t block, uint64_t high,
            vi words[PHILOX_WORDS])
{
    vq even[PHILOX_WORDS], odd[PHILOX_WORDS];
    vq number;
    for (int i = 0; i < VF / 2; i++) {
        number[i] = 2 * (uint64_t)i;
    }
    vq zero = {0};
    even[0] = number + block;
    odd[0] = number + (block + 1);
    even[1] = even[0] >> 32;
    odd[1] = odd[0] >> 32;
    even[2] = odd[2] = zero + high;
    even[3] = odd[3] = zero + (high >> 32);
    philox_rounds_(key, even, odd);
    for (int w = 0; w < PHILOX_WORDS; w++) {
        words[w] = (vi)((even[w] & 0xffffffffu) | (odd[w] << 32));
    }
}

#endif
