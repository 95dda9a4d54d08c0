/* Element types and conversions. */
#ifndef DCP_DTYPE_H
#define DCP_DTYPE_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_dtype {
    DCP_F32 = 0,
    DCP_BF16 = 1,
    DCP_F64 = 2,
    DCP_I32 = 3,
    DCP_I64 = 4,
    DCP_U8 = 5,
} dcp_dtype_t;

/* Bytes of one item; 0 for an unknown code. */
int64_t dcp_dtype_bytes(dcp_dtype_t dtype);
const char *
dcp_dtype_name(dcp_dtype_t dtype); /* NumPy's name, "unknown" for an unknown code */

static inline float
dcp_bf16_to_f32(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Nearest even; a NaN stays a (quiet) NaN. */
static inline uint16_t
dcp_f32_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x0040u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __cplusplus
}
#endif
#endif
