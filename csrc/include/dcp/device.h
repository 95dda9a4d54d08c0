/* A device: memory and operations on a queue.
 *
 * Every operation takes a queue and may return before it is done; nothing may look at a
 * result, nor free or reuse an argument, before a fence on that queue. Arguments
 * structs themselves are copied by the call. An error may be reported by a later call
 * or by the fence. Operations of one queue run in order. The CPU's queue runs at once;
 * the test device "late" keeps everything until the fence.
 */
#ifndef DCP_DEVICE_H
#define DCP_DEVICE_H

#include "dcp/ops.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_queue dcp_queue_t;

typedef struct dcp_device_ops {
    const char *name; /* "cpu", "late", "cuda" */
    dcp_status_t (*queue_create)(dcp_pool_t *pool,
                                 dcp_queue_t **queue_p); /* borrows the pool */
    void (*queue_destroy)(dcp_queue_t *queue);
    dcp_status_t (*fence)(
        dcp_queue_t *queue); /* waits for everything; reports the first failure */
    dcp_status_t (*alloc)(dcp_queue_t *queue, int64_t bytes, const char *what,
                          void **pointer_p);
    void (*free)(dcp_queue_t *queue, void *pointer);
    /* Bytes between any two places (host or device), in queue order. */
    dcp_status_t (*copy)(dcp_queue_t *queue, void *to, const void *from, int64_t bytes);
    int64_t (*gemm_pack_bytes)(int64_t n, int64_t k, dcp_dtype_t compute);
#define X(op) dcp_status_t (*op)(dcp_queue_t * queue, const dcp_##op##_args_t *args);
    DCP_OP_MAP(X)
#undef X
} dcp_device_ops_t;

/* The CPU. `late` holds every operation back until the fence: for tests of the rule
 * above. */
const dcp_device_ops_t *dcp_device_cpu(void);
const dcp_device_ops_t *dcp_device_late(void);

#ifdef __cplusplus
}
#endif
#endif
