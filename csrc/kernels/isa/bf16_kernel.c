/* Between fp32 and bf16 (nearest even): 6 bytes moved an element. Subnormal numbers
 * stay, NaNs stay NaNs; the instructions of AVX512_BF16 flush the former and are not
 * used. */
#include "../bf16.h"
#include "simd.h"

typedef uint16_t narrow_t __attribute__((vector_size(VF * 2)));
typedef uint32_t wide_t __attribute__((vector_size(VF * 4)));

VF_INLINE void
narrow_step(const float *from, uint16_t *to, int64_t count)
{
    wide_t bits = (wide_t)vf_round_bf16(vf_get(from, count));
    narrow_t x = __builtin_convertvector(bits >> 16, narrow_t);
    memcpy(to, &x, (size_t)count * sizeof *to);
}

VF_INLINE void
widen_step(const uint16_t *from, float *to, int64_t count)
{
    narrow_t x = {0};
    memcpy(&x, from, (size_t)count * sizeof *from);
    vf_put(to, (vf)(__builtin_convertvector(x, wide_t) << 16), count);
}

static void
array_round(int64_t count, const float *from, float *to)
{
    int64_t i = 0;
    for (; i + VF <= count; i += VF) {
        vf_store(to + i, vf_round_bf16(vf_load(from + i)));
    }
    if (i < count) {
        vf_store_part(to + i, vf_round_bf16(vf_load_part(from + i, count - i)),
                      count - i);
    }
}

static void
array_narrow(int64_t count, const float *from, uint16_t *to)
{
    int64_t i = 0;
    for (; i + VF <= count; i += VF) {
        narrow_step(from + i, to + i, VF);
    }
    if (i < count) {
        narrow_step(from + i, to + i, count - i);
    }
}

static void
array_widen(int64_t count, const uint16_t *from, float *to)
{
    int64_t i = 0;
    for (; i + VF <= count; i += VF) {
        widen_step(from + i, to + i, VF);
    }
    if (i < count) {
        widen_step(from + i, to + i, count - i);
    }
}

const bf16_ops_t ISA_NAME(bf16_ops) = {
    .round = array_round,
    .narrow = array_narrow,
    .widen = array_widen,
};
