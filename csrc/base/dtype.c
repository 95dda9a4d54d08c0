/* One row per element type. */
#include "dcp/dtype.h"

static const struct {
    int64_t bytes;
    const char *name;
} rows[] = {
    [DCP_F32] = {4, "float32"}, [DCP_BF16] = {2, "bfloat16"},
    [DCP_F64] = {8, "float64"}, [DCP_I32] = {4, "int32"},
    [DCP_I64] = {8, "int64"},   [DCP_U8] = {1, "uint8"},
};

int64_t
dcp_dtype_bytes(dcp_dtype_t dtype)
{
    unsigned row = (unsigned)dtype;
    return row < sizeof rows / sizeof rows[0] ? rows[row].bytes : 0;
}

const char *
dcp_dtype_name(dcp_dtype_t dtype)
{
    unsigned row = (unsigned)dtype;
    return row < sizeof rows / sizeof rows[0] ? rows[row].name : "unknown";
}
