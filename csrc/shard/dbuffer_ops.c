/* Operations on this rank's slice of a group, or of all groups: one job of the pool
 * over fixed pieces, whatever the number of tensors.
 *
 * All are bound by memory: fill writes 4 bytes an element, scale reads and writes 4, a
 * copy does the same, add reads 8 and writes 4. Padding between tensors takes part,
 * which is cheaper than to leave it out. */
#include "dbuffer_private.h"

#include "dcp/kernels.h"

#include <stdatomic.h>
#include <string.h>

typedef struct op op_t;

/* x and y: a piece of the buffer and of the other one. */
typedef void (*op_func_t)(op_t *op, char *x, const char *y, int64_t count);

struct op {
    dcp_dbuffer_t *buffer;
    const dcp_dbuffer_t *other; /* NULL: none */
    op_func_t func;
    int64_t first; /* piece */
    float value;
    _Atomic int64_t count; /* result */
};

static void
fill_f32(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    float *out = (float *)(void *)x, value = op->value;
    for (int64_t i = 0; i < count; i++) {
        out[i] = value;
    }
}

static void
fill_bf16(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    uint16_t *out = (uint16_t *)(void *)x, value = dcp_f32_to_bf16(op->value);
    for (int64_t i = 0; i < count; i++) {
        out[i] = value;
    }
}

static void
fill_u8(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    memset(x, (int)op->value, (size_t)count);
}

static void
zero_bytes(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    memset(x, 0, (size_t)(count * op->buffer->item_bytes));
}

static void
scale_f32(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    float *out = (float *)(void *)x, factor = op->value;
    for (int64_t i = 0; i < count; i++) {
        out[i] *= factor;
    }
}

static void
add_f32(op_t *op, char *x, const char *y, int64_t count)
{
    float *restrict out = (float *)(void *)x;
    const float *restrict in = (const float *)(const void *)y;
    float factor = op->value;
    for (int64_t i = 0; i < count; i++) {
        out[i] += factor * in[i];
    }
}

static void
copy_bytes(op_t *op, char *x, const char *y, int64_t count)
{
    memcpy(x, y, (size_t)(count * op->buffer->item_bytes));
}

/* All exponent bits set: infinite or NaN. */
static void
count_f32(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    const float *in = (const float *)(const void *)x;
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &in[i], sizeof bits);
        found += (bits & 0x7f800000u) == 0x7f800000u;
    }
    if (found > 0) {
        atomic_fetch_add(&op->count, found);
    }
}

static void
count_bf16(op_t *op, char *x, const char *y, int64_t count)
{
    (void)y;
    const uint16_t *in = (const uint16_t *)(const void *)x;
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        found += (in[i] & 0x7f80u) == 0x7f80u;
    }
    if (found > 0) {
        atomic_fetch_add(&op->count, found);
    }
}

static dcp_status_t
run_piece(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    op_t *op = context;
    const dbuffer_piece_t *piece = &op->buffer->pieces[op->first + task];
    const char *y =
        op->other != NULL ? dbuffer_at(op->other, piece->group, piece->start) : NULL;
    op->func(op, dbuffer_at(op->buffer, piece->group, piece->start), y, piece->count);
    return DCP_OK;
}

/* Has this rank's slice of the group memory? */
static dcp_status_t
check_held(const dcp_dbuffer_t *buffer, int32_t group)
{
    if (buffer->kind != DCP_DBUFFER_DEMAND || buffer->keep_own) {
        return DCP_OK;
    }
    int32_t all = group == DCP_DBUFFER_ALL_GROUPS;
    for (int32_t g = all ? 0 : group; g < buffer->layout->group_count; g++) {
        if (!buffer->held[g]) {
            return DCP_FAIL(DCP_ERR_STATE, "group %d has no memory: acquire it first",
                            (int)g);
        }
        if (!all) {
            break;
        }
    }
    return DCP_OK;
}

static dcp_status_t
run(op_t *op, dcp_pool_t *pool, int32_t group)
{
    if (group != DCP_DBUFFER_ALL_GROUPS) {
        DCP_TRY(dbuffer_check_group(op->buffer, group));
    }
    DCP_TRY(check_held(op->buffer, group));
    if (op->other != NULL) {
        if (op->other->layout != op->buffer->layout
            || op->other->rank != op->buffer->rank) {
            return DCP_FAIL(DCP_ERR_ARG, "other must be of the same layout and rank");
        }
        DCP_TRY(check_held(op->other, group));
    }
    int64_t count;
    dbuffer_pieces(op->buffer, group, &op->first, &count);
    return dcp_pool_run(pool, count, run_piece, op);
}

static dcp_status_t
check_f32(const dcp_dbuffer_t *buffer, const char *what)
{
    if (buffer->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_TYPE, "%s: a buffer of %s, must be float32", what,
                        dcp_dtype_name(buffer->dtype));
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_fill(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group, float value)
{
    op_t op = {.buffer = buffer, .value = value};
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    op.func = bits == 0                   ? zero_bytes
              : buffer->dtype == DCP_F32  ? fill_f32
              : buffer->dtype == DCP_BF16 ? fill_bf16
                                          : fill_u8;
    if (buffer->dtype == DCP_U8 && !(value >= 0 && value <= 255)) {
        return DCP_FAIL(DCP_ERR_ARG, "value %g of a buffer of uint8 must lie in 0..255",
                        (double)value);
    }
    return run(&op, pool, group);
}

dcp_status_t
dcp_dbuffer_scale(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group, float factor)
{
    DCP_TRY(check_f32(buffer, "scale"));
    op_t op = {.buffer = buffer, .func = scale_f32, .value = factor};
    return run(&op, pool, group);
}

dcp_status_t
dcp_dbuffer_add(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group, float factor,
                const dcp_dbuffer_t *other)
{
    DCP_TRY(check_f32(buffer, "add"));
    DCP_TRY(check_f32(other, "add"));
    if (other == buffer) {
        return dcp_dbuffer_scale(buffer, pool, group, 1.0f + factor);
    }
    op_t op = {.buffer = buffer, .other = other, .func = add_f32, .value = factor};
    return run(&op, pool, group);
}

/* One job a group: the cast is an operation of the device. */
static dcp_status_t
cast_groups(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
            const dcp_dbuffer_t *other)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int32_t all = group == DCP_DBUFFER_ALL_GROUPS;
    for (int32_t g = all ? 0 : group; g < (all ? layout->group_count : group + 1);
         g++) {
        int64_t first, count;
        dbuffer_pieces(buffer, g, &first, &count);
        if (count == 0) {
            continue;
        }
        const dbuffer_piece_t *head = &buffer->pieces[first],
                              *tail = head + (count - 1);
        DCP_TRY(dcp_cpu_cast(pool, &(dcp_cast_args_t){
                                       .count = tail->start + tail->count - head->start,
                                       .from = other->dtype,
                                       .to = buffer->dtype,
                                       .x = dbuffer_at(other, g, head->start),
                                       .out = dbuffer_at(buffer, g, head->start),
                                   }));
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_copy(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                 const dcp_dbuffer_t *other)
{
    if (buffer == other) {
        return DCP_OK;
    }
    op_t op = {.buffer = buffer, .other = other, .func = copy_bytes};
    if (buffer->dtype == other->dtype) {
        DCP_TRY(run(&op, pool, group));
        int64_t first, count;
        dbuffer_pieces(buffer, group, &first, &count);
        for (int64_t i = first; i < first + count; i++) {
            buffer->traffic.copied_bytes +=
                buffer->pieces[i].count * buffer->item_bytes;
        }
        return DCP_OK;
    }
    if (other->layout != buffer->layout || other->rank != buffer->rank) {
        return DCP_FAIL(DCP_ERR_ARG, "other must be of the same layout and rank");
    }
    if (group != DCP_DBUFFER_ALL_GROUPS) {
        DCP_TRY(dbuffer_check_group(buffer, group));
    }
    DCP_TRY(check_held(buffer, group));
    DCP_TRY(check_held(other, group));
    return cast_groups(buffer, pool, group, other);
}

dcp_status_t
dcp_dbuffer_count_nonfinite(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                            int64_t *count_p)
{
    if (buffer->dtype == DCP_U8) {
        *count_p = 0;
        return DCP_OK;
    }
    op_t op = {.buffer = buffer,
               .func = buffer->dtype == DCP_F32 ? count_f32 : count_bf16};
    DCP_TRY(run(&op, pool, group));
    *count_p = atomic_load(&op.count);
    return DCP_OK;
}
