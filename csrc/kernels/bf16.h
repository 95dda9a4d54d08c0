/* Arrays between fp32 and bf16 (nearest even), one table per instruction set. */
#ifndef DCP_KERNELS_BF16_H
#define DCP_KERNELS_BF16_H

#include "rowwise.h"

/* What packing reads: fp32 numbers as they are, the same to be rounded to bf16, or bf16
 * numbers. */
typedef enum source {
    SOURCE_FLOAT = 0,
    SOURCE_ROUND = 1,
    SOURCE_BF16 = 2,
} source_t;

typedef struct bf16_ops {
    /* to[i] = from[i] as a bf16 number, in fp32; to may be from. */
    void (*round)(int64_t count, const float *from, float *to);
    void (*narrow)(int64_t count, const float *from, uint16_t *to);
    void (*widen)(int64_t count, const uint16_t *from, float *to);
} bf16_ops_t;

extern const bf16_ops_t bf16_ops_portable, bf16_ops_avx2, bf16_ops_avx512;

#endif
