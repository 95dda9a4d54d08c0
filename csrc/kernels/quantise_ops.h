/* Bodies of quantise, dequantise and sketch, one table an instruction set. */
#ifndef QUANTISE_OPS_H
#define QUANTISE_OPS_H

#include "dcp/ops.h"

#include <stdint.h>

/* What the seed of a call gives. */
typedef struct quantise_key {
    uint32_t random[2];                 /* Philox key of the random bits */
    int32_t signs[DCP_PRECISION_BLOCK]; /* of the rotation: the sign bit, or 0 */
} quantise_key_t;

/* Blocks first .. last - 1 of the operation. */
typedef struct quantise_ops {
    /* squares [2] are added to; NULL: not wanted */
    void (*quantise)(const dcp_quantise_args_t *args, const quantise_key_t *key,
                     int64_t first, int64_t last, double *squares);
    void (*dequantise)(const dcp_dequantise_args_t *args, const quantise_key_t *key,
                       int64_t first, int64_t last);
} quantise_ops_t;

typedef struct sketch_ops {
    /* Elements first .. last - 1 under a Philox key of signs; sums are added to. */
    void (*sketch)(const dcp_sketch_args_t *args, const uint32_t key[2], int64_t first,
                   int64_t last, double *sums);
} sketch_ops_t;

#if defined(__x86_64__)
extern const quantise_ops_t quantise_ops_avx2, quantise_ops_avx512;
extern const sketch_ops_t sketch_ops_avx2, sketch_ops_avx512;
#endif
extern const quantise_ops_t quantise_ops_portable;
extern const sketch_ops_t sketch_ops_portable;

#endif
