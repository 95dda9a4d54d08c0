/* A blocking thread pool with scratch memory per thread.
 *
 * One pool a rank, sized to cores / local ranks, so that ranks do not fight for cores.
 * The calling thread is worker 0; a pool of one starts no thread and runs tasks in the
 * caller, in order. Results must not depend on which worker runs a task: kernels cut
 * work by shape, never by worker count.
 */
#ifndef DCP_THREADS_H
#define DCP_THREADS_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_pool dcp_pool_t;

/* Runs task `task` on worker `worker` (0 .. dcp_pool_size - 1). */
typedef dcp_status_t (*dcp_task_func_t)(void *context, int64_t task, int32_t worker);

dcp_status_t dcp_pool_create(int32_t thread_count, dcp_pool_t **pool_p);
void dcp_pool_destroy(dcp_pool_t *pool);
int32_t dcp_pool_size(const dcp_pool_t *pool);

/* Runs tasks 0 .. task_count-1 in increasing order of start, waits for all. The first
 * failure (by task number) is returned with its message; tasks not yet started are
 * skipped after one. */
dcp_status_t dcp_pool_run(dcp_pool_t *pool, int64_t task_count, dcp_task_func_t func,
                          void *context);

/* Scratch of `worker`, at least `bytes`, 64-byte aligned, contents undefined; grows,
 * and is freed by dcp_pool_trim or with the pool. Valid until the next call for the
 * same worker. */
dcp_status_t dcp_pool_scratch(dcp_pool_t *pool, int32_t worker, int64_t bytes,
                              void **scratch_p);
/* Scratch of all workers together, and its release; not while a job runs. */
int64_t dcp_pool_scratch_bytes(const dcp_pool_t *pool);
void dcp_pool_trim(dcp_pool_t *pool);

/* Cores this process may run on (affinity mask). */
int32_t dcp_core_count(void);

#ifdef __cplusplus
}
#endif
#endif
