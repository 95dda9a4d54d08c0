/* In how many bits a gradient travels between ranks.
 *
 * Formats of one block of DCP_PRECISION_BLOCK elements (the last block of a message may
 * be short):
 *
 *   fp32, bf16            as they are, no scale
 *   fp8 e4m3, e5m2, int8  a code of 8 bits an element and one fp32 scale
 *   int4                  a code of 4 bits an element and one fp32 scale
 *
 * A message of n elements holds all scales, then all codes; it has
 * dcp_precision_bytes(precision, n) bytes, whatever the values are.
 */
#ifndef DCP_PRECISION_H
#define DCP_PRECISION_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DCP_PRECISION_BLOCK = 128 };

typedef enum dcp_precision {
    DCP_PRECISION_FP32 = 0,
    DCP_PRECISION_BF16 = 1,
    DCP_PRECISION_FP8_E4M3 = 2,
    DCP_PRECISION_FP8_E5M2 = 3,
    DCP_PRECISION_INT8 = 4,
    DCP_PRECISION_INT4 = 5,
} dcp_precision_t;
enum { DCP_PRECISION_COUNT = 6 };

/* "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"; NULL where it is none. */
const char *dcp_precision_name(dcp_precision_t precision);
/* ERR_ARG names the text and what there is. */
dcp_status_t dcp_precision_parse(const char *name, dcp_precision_t *precision_p);
/* Bytes of a message of `count` >= 0 elements; 0 for no elements. */
int64_t dcp_precision_bytes(dcp_precision_t precision, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
