/* Workers sleep on a condition variable between jobs and take task numbers from one
 * atomic counter. Cost of a job: one broadcast and one wait (about 10 us on two cores);
 * jobs are whole kernels. A fork leaves the child without workers: never run a parent's
 * pool in a forked child. */
#define _GNU_SOURCE
#include "dcp/threads.h"

#include "dcp/alloc.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef struct worker {
    pthread_t thread;
    void *scratch;         /* owned, NULL until asked for */
    int64_t scratch_bytes; /* of scratch */
    int32_t index;
    dcp_pool_t *pool; /* the pool it belongs to */
} worker_t;

struct dcp_pool {
    int32_t size;          /* workers, the caller included */
    int32_t started_count; /* threads to join: workers 1 .. started_count */
    worker_t *workers;     /* [size] */
    pthread_mutex_t lock;
    pthread_cond_t work_ready, work_done;
    uint64_t job;       /* number of the current job; a change wakes the workers */
    int32_t busy_count; /* workers still in the job */
    bool stopping;
    dcp_task_func_t func;
    void *context;
    int64_t task_count;
    _Atomic int64_t next_task;
    _Atomic bool failed;
    int64_t failed_task; /* least failed task, under lock */
    dcp_status_t status; /* its status, under lock */
    char message[1024];  /* its message, under lock */
};

static void
run_tasks(dcp_pool_t *pool, int32_t index)
{
    while (!atomic_load(&pool->failed)) {
        int64_t task = atomic_fetch_add(&pool->next_task, 1);
        if (task >= pool->task_count) {
            return;
        }
        dcp_status_t status = pool->func(pool->context, task, index);
        if (status != DCP_OK) {
            pthread_mutex_lock(&pool->lock);
            if (pool->status == DCP_OK || task < pool->failed_task) {
                pool->status = status;
                pool->failed_task = task;
                snprintf(pool->message, sizeof pool->message, "%s", dcp_last_error());
            }
            pthread_mutex_unlock(&pool->lock);
            atomic_store(&pool->failed, true);
        }
    }
}

static void *
worker_main(void *argument)
{
    worker_t *worker = argument;
    dcp_pool_t *pool = worker->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->job == seen && !pool->stopping) {
            pthread_cond_wait(&pool->work_ready, &pool->lock);
        }
        if (pool->stopping) {
            break;
        }
        seen = pool->job;
        pthread_mutex_unlock(&pool->lock);
        run_tasks(pool, worker->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy_count == 0) {
            pthread_cond_signal(&pool->work_done);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

dcp_status_t
dcp_pool_create(int32_t thread_count, dcp_pool_t **pool_p)
{
    if (thread_count < 1 || thread_count > 4096) {
        return DCP_FAIL(DCP_ERR_ARG, "thread_count %d must lie in 1..4096",
                        (int)thread_count);
    }
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_pool_t), "thread pool", &memory));
    dcp_pool_t *pool = memory;
    dcp_status_t status = dcp_alloc_zeroed(thread_count * (int64_t)sizeof(worker_t),
                                           "thread pool workers", &memory);
    if (status != DCP_OK) {
        dcp_free(pool);
        return status;
    }
    pool->workers = memory;
    pool->size = thread_count;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work_ready, NULL);
    pthread_cond_init(&pool->work_done, NULL);
    for (int32_t i = 0; i < thread_count; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i;
    }
    for (int32_t i = 1; i < thread_count; i++) {
        int error = pthread_create(&pool->workers[i].thread, NULL, worker_main,
                                   &pool->workers[i]);
        if (error != 0) {
            dcp_pool_destroy(pool);
            return DCP_FAIL(DCP_ERR_NO_MEM, "thread %d of %d did not start: %s", (int)i,
                            (int)thread_count, strerror(error));
        }
        pool->started_count = i;
    }
    *pool_p = pool;
    return DCP_OK;
}

void
dcp_pool_destroy(dcp_pool_t *pool)
{
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->work_ready);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 1; i <= pool->started_count; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    for (int32_t i = 0; i < pool->size; i++) {
        dcp_free(pool->workers[i].scratch);
    }
    pthread_cond_destroy(&pool->work_done);
    pthread_cond_destroy(&pool->work_ready);
    pthread_mutex_destroy(&pool->lock);
    dcp_free(pool->workers);
    dcp_free(pool);
}

int32_t
dcp_pool_size(const dcp_pool_t *pool)
{
    return pool->size;
}

dcp_status_t
dcp_pool_run(dcp_pool_t *pool, int64_t task_count, dcp_task_func_t func, void *context)
{
    if (pool->size == 1 || task_count <= 1) {
        for (int64_t task = 0; task < task_count; task++) {
            DCP_TRY(func(context, task, 0));
        }
        return DCP_OK;
    }
    pthread_mutex_lock(&pool->lock);
    pool->func = func;
    pool->context = context;
    pool->task_count = task_count;
    atomic_store(&pool->next_task, 0);
    atomic_store(&pool->failed, false);
    pool->status = DCP_OK;
    pool->busy_count = pool->size - 1;
    pool->job++;
    pthread_cond_broadcast(&pool->work_ready);
    pthread_mutex_unlock(&pool->lock);
    run_tasks(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->busy_count > 0) {
        pthread_cond_wait(&pool->work_done, &pool->lock);
    }
    dcp_status_t status = pool->status;
    if (status != DCP_OK) {
        dcp_set_last_error(pool->message);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

dcp_status_t
dcp_pool_scratch(dcp_pool_t *pool, int32_t worker, int64_t bytes, void **scratch_p)
{
    worker_t *own = &pool->workers[worker];
    if (own->scratch_bytes < bytes || own->scratch == NULL) {
        dcp_free(own->scratch);
        own->scratch = NULL;
        own->scratch_bytes = 0;
        DCP_TRY(dcp_alloc(bytes, "scratch of a worker thread", &own->scratch));
        own->scratch_bytes = bytes;
    }
    *scratch_p = own->scratch;
    return DCP_OK;
}

int64_t
dcp_pool_scratch_bytes(const dcp_pool_t *pool)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->size; i++) {
        bytes += pool->workers[i].scratch_bytes;
    }
    return bytes;
}

void
dcp_pool_trim(dcp_pool_t *pool)
{
    for (int32_t i = 0; i < pool->size; i++) {
        dcp_free(pool->workers[i].scratch);
        pool->workers[i].scratch = NULL;
        pool->workers[i].scratch_bytes = 0;
    }
}

int32_t
dcp_core_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        return 1; /* more than CPU_SETSIZE cores: the caller may set the count by hand
                   */
    }
    int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}
