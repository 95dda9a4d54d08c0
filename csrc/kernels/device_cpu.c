/* The CPU as a device. Its queue runs every operation at once; the queue of the test
 * device "late" keeps operations (arguments copied) and copies until the fence, so that
 * code which looks at a result too early is caught. */
#include "dcp/device.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"

#include <stdbool.h>
#include <string.h>

typedef dcp_status_t (*op_func_t)(dcp_pool_t *pool, const void *args);

typedef struct copy_args {
    void *to;
    const void *from;
    int64_t bytes;
} copy_args_t;

enum { ITEM_BYTES = 256 };

typedef struct late_item {
    op_func_t func;
    _Alignas(16) unsigned char args[ITEM_BYTES];
} late_item_t;

struct dcp_queue {
    dcp_pool_t *pool; /* borrowed */
    bool late;
    late_item_t *items; /* owned, [item_cap] */
    int64_t item_count, item_cap;
};

static dcp_status_t
queue_submit(dcp_queue_t *queue, op_func_t func, const void *args, size_t args_bytes)
{
    if (!queue->late) {
        return func(queue->pool, args);
    }
    if (queue->item_count == queue->item_cap) {
        int64_t cap = queue->item_cap > 0 ? 2 * queue->item_cap : 64;
        void *memory;
        DCP_TRY(
            dcp_alloc_array(cap, (int64_t)sizeof(late_item_t), "late queue", &memory));
        if (queue->item_count > 0) {
            memcpy(memory, queue->items,
                   (size_t)queue->item_count * sizeof(late_item_t));
        }
        dcp_free(queue->items);
        queue->items = memory;
        queue->item_cap = cap;
    }
    late_item_t *item = &queue->items[queue->item_count++];
    item->func = func;
    memcpy(item->args, args, args_bytes);
    return DCP_OK;
}

/* One wrapper to the kernel's own signature and one queue entry per operation. */
#define X(op)                                                                         \
    _Static_assert(sizeof(dcp_##op##_args_t) <= ITEM_BYTES,                           \
                   #op " arguments fit an item");                                     \
    static dcp_status_t run_##op(dcp_pool_t *pool, const void *args)                  \
    {                                                                                 \
        return dcp_cpu_##op(pool, args);                                              \
    }                                                                                 \
    static dcp_status_t queue_##op(dcp_queue_t *queue, const dcp_##op##_args_t *args) \
    {                                                                                 \
        return queue_submit(queue, run_##op, args, sizeof *args);                     \
    }
DCP_OP_MAP(X)
#undef X

static dcp_status_t
run_copy(dcp_pool_t *pool, const void *args)
{
    (void)pool;
    const copy_args_t *copy = args;
    if (copy->bytes > 0) {
        memcpy(copy->to, copy->from, (size_t)copy->bytes);
    }
    return DCP_OK;
}

static dcp_status_t
queue_copy(dcp_queue_t *queue, void *to, const void *from, int64_t bytes)
{
    copy_args_t args = {to, from, bytes};
    return queue_submit(queue, run_copy, &args, sizeof args);
}

static dcp_status_t
queue_create(dcp_pool_t *pool, bool late, dcp_queue_t **queue_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_queue_t), "queue", &memory));
    dcp_queue_t *queue = memory;
    queue->pool = pool;
    queue->late = late;
    *queue_p = queue;
    return DCP_OK;
}

static dcp_status_t
cpu_queue_create(dcp_pool_t *pool, dcp_queue_t **queue_p)
{
    return queue_create(pool, false, queue_p);
}

static dcp_status_t
late_queue_create(dcp_pool_t *pool, dcp_queue_t **queue_p)
{
    return queue_create(pool, true, queue_p);
}

static void
queue_destroy(dcp_queue_t *queue)
{
    if (queue != NULL) {
        dcp_free(queue->items);
        dcp_free(queue);
    }
}

static dcp_status_t
queue_fence(dcp_queue_t *queue)
{
    int64_t count = queue->item_count;
    queue->item_count = 0;
    for (int64_t i = 0; i < count; i++) {
        DCP_TRY(queue->items[i].func(queue->pool, queue->items[i].args));
    }
    return DCP_OK;
}

static dcp_status_t
queue_alloc(dcp_queue_t *queue, int64_t bytes, const char *what, void **pointer_p)
{
    (void)queue;
    return dcp_alloc(bytes, what, pointer_p);
}

static void
queue_free(dcp_queue_t *queue, void *pointer)
{
    (void)queue;
    dcp_free(pointer);
}

#define DEVICE(device_name, create)                                                 \
    {                                                                               \
        .name = (device_name), .queue_create = (create),                            \
        .queue_destroy = queue_destroy, .fence = queue_fence, .alloc = queue_alloc, \
        .free = queue_free, .copy = queue_copy,                                     \
        .gemm_pack_bytes = dcp_gemm_pack_bytes, DCP_OP_MAP(X)                       \
    }
#define X(op) .op = queue_##op,
static const dcp_device_ops_t cpu_device = DEVICE("cpu", cpu_queue_create);
static const dcp_device_ops_t late_device = DEVICE("late", late_queue_create);
#undef X

const dcp_device_ops_t *
dcp_device_cpu(void)
{
    return &cpu_device;
}

const dcp_device_ops_t *
dcp_device_late(void)
{
    return &late_device;
}
