/* Names and message sizes of the precisions gradients travel in. */
#include "dcp/precision.h"

#include <stddef.h>
#include <string.h>

typedef struct precision_format {
    const char *name;
    int32_t code_bits;   /* of an element */
    int32_t block_bytes; /* of a block's scale */
} precision_format_t;

static const precision_format_t formats[DCP_PRECISION_COUNT] = {
    [DCP_PRECISION_FP32] = {"fp32", 32, 0},
    [DCP_PRECISION_BF16] = {"bf16", 16, 0},
    [DCP_PRECISION_FP8_E4M3] = {"fp8_e4m3", 8, 4},
    [DCP_PRECISION_FP8_E5M2] = {"fp8_e5m2", 8, 4},
    [DCP_PRECISION_INT8] = {"int8", 8, 4},
    [DCP_PRECISION_INT4] = {"int4", 4, 4},
};

static int32_t
is_known(dcp_precision_t precision)
{
    return (int32_t)precision >= 0 && (int32_t)precision < DCP_PRECISION_COUNT;
}

const char *
dcp_precision_name(dcp_precision_t precision)
{
    return is_known(precision) ? formats[precision].name : NULL;
}

dcp_status_t
dcp_precision_parse(const char *name, dcp_precision_t *precision_p)
{
    for (int32_t i = 0; i < DCP_PRECISION_COUNT; i++) {
        if (strcmp(formats[i].name, name) == 0) {
            *precision_p = (dcp_precision_t)i;
            return DCP_OK;
        }
    }
    return DCP_FAIL(DCP_ERR_ARG,
                    "precision '%s' must be one of fp32, bf16, fp8_e4m3, fp8_e5m2, "
                    "int8, int4",
                    name);
}

int64_t
dcp_precision_bytes(dcp_precision_t precision, int64_t count)
{
    if (!is_known(precision) || count <= 0) {
        return 0;
    }
    const precision_format_t *format = &formats[precision];
    int64_t blocks = (count - 1) / DCP_PRECISION_BLOCK + 1;
    return blocks * format->block_bytes
           + count / 8 * format->code_bits /* whole bytes, without overflow */
           + (count % 8 * format->code_bits + 7) / 8;
}
