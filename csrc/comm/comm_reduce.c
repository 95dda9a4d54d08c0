/* Element-wise reduction of several arrays in a fixed order.
 *
 * Works block by block through a buffer that stays in L1: sources are added one after
 * the other, then the block is stored. So nothing is written before every source of
 * the block was read, and dst may be one of the sources; and the compiler sees that the
 * buffer aliases nothing, and vectorises. The loops are memory-bound: each source is
 * read once, dst written once, the buffer costs L1 traffic only. bf16 is summed in fp32
 * and rounded once. Maximum and minimum keep a NaN. Integers wrap. */
#include "comm_transport.h"

#include <string.h>

enum { BLOCK_ITEMS = 1024 };

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define FLOAT_MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define FLOAT_MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define WHOLE_MAX(a, b) ((a) > (b) ? (a) : (b))
#define WHOLE_MIN(a, b) ((a) < (b) ? (a) : (b))

/* reduce_<name>: items of `type` in memory, `sum` in the buffer. */
#define DEFINE_REDUCE(name, type, sum, LOAD, STORE, OP)                \
    static void reduce_##name(void *dst, const void *const *sources,   \
                              int32_t sources_n, int64_t count)        \
    {                                                                  \
        sum block[BLOCK_ITEMS];                                        \
        for (int64_t start = 0; start < count; start += BLOCK_ITEMS) { \
            int64_t left = count - start;                              \
            int64_t n = left < BLOCK_ITEMS ? left : BLOCK_ITEMS;       \
            const type *first = (const type *)sources[0] + start;      \
            const type *second = (const type *)sources[1] + start;     \
            for (int64_t i = 0; i < n; i++) {                          \
                block[i] = (sum)OP(LOAD(first[i]), LOAD(second[i]));   \
            }                                                          \
            for (int32_t s = 2; s < sources_n; s++) {                  \
                const type *source = (const type *)sources[s] + start; \
                for (int64_t i = 0; i < n; i++) {                      \
                    block[i] = (sum)OP(block[i], LOAD(source[i]));     \
                }                                                      \
            }                                                          \
            type *out = (type *)dst + start;                           \
            for (int64_t i = 0; i < n; i++) {                          \
                out[i] = STORE(block[i]);                              \
            }                                                          \
        }                                                              \
    }

DEFINE_REDUCE(sum_f32, float, float, SAME, SAME, ADD)
DEFINE_REDUCE(max_f32, float, float, SAME, SAME, FLOAT_MAX)
DEFINE_REDUCE(min_f32, float, float, SAME, SAME, FLOAT_MIN)
DEFINE_REDUCE(sum_bf16, uint16_t, float, dcp_bf16_to_f32, dcp_f32_to_bf16, ADD)
DEFINE_REDUCE(max_bf16, uint16_t, float, dcp_bf16_to_f32, dcp_f32_to_bf16, FLOAT_MAX)
DEFINE_REDUCE(min_bf16, uint16_t, float, dcp_bf16_to_f32, dcp_f32_to_bf16, FLOAT_MIN)
DEFINE_REDUCE(sum_f64, double, double, SAME, SAME, ADD)
DEFINE_REDUCE(max_f64, double, double, SAME, SAME, FLOAT_MAX)
DEFINE_REDUCE(min_f64, double, double, SAME, SAME, FLOAT_MIN)
/* unsigned: wrapping is defined, and the bits are those of two's complement */
DEFINE_REDUCE(sum_i32, uint32_t, uint32_t, SAME, SAME, ADD)
DEFINE_REDUCE(max_i32, int32_t, int32_t, SAME, SAME, WHOLE_MAX)
DEFINE_REDUCE(min_i32, int32_t, int32_t, SAME, SAME, WHOLE_MIN)
DEFINE_REDUCE(sum_i64, uint64_t, uint64_t, SAME, SAME, ADD)
DEFINE_REDUCE(max_i64, int64_t, int64_t, SAME, SAME, WHOLE_MAX)
DEFINE_REDUCE(min_i64, int64_t, int64_t, SAME, SAME, WHOLE_MIN)
DEFINE_REDUCE(sum_u8, uint8_t, uint8_t, SAME, SAME, ADD)
DEFINE_REDUCE(max_u8, uint8_t, uint8_t, SAME, SAME, WHOLE_MAX)
DEFINE_REDUCE(min_u8, uint8_t, uint8_t, SAME, SAME, WHOLE_MIN)

typedef void (*reduce_func_t)(void *dst, const void *const *sources, int32_t sources_n,
                              int64_t count);

static const reduce_func_t reduce_funcs[6][3] = {
    [DCP_F32] = {reduce_sum_f32, reduce_max_f32, reduce_min_f32},
    [DCP_BF16] = {reduce_sum_bf16, reduce_max_bf16, reduce_min_bf16},
    [DCP_F64] = {reduce_sum_f64, reduce_max_f64, reduce_min_f64},
    [DCP_I32] = {reduce_sum_i32, reduce_max_i32, reduce_min_i32},
    [DCP_I64] = {reduce_sum_i64, reduce_max_i64, reduce_min_i64},
    [DCP_U8] = {reduce_sum_u8, reduce_max_u8, reduce_min_u8},
};

void
comm_reduce(void *dst, const void *const *sources, int32_t source_count, int64_t count,
            dcp_dtype_t dtype, dcp_reduce_op_t op)
{
    if (count == 0) {
        return;
    }
    if (source_count == 1) {
        memmove(dst, sources[0], (size_t)(count * dcp_dtype_bytes(dtype)));
        return;
    }
    reduce_funcs[dtype][op](dst, sources, source_count, count);
}
