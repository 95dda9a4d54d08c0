/* Gathers that run ahead: one thread of this rank, with a communicator of its own.
 *
 * Collectives pair by their order alone: two ranks that gather groups of equal size in
 * different orders would exchange wrong weights, and nobody would notice. So the order
 * is declared, compared over all ranks once, and what is begun must follow it; what is
 * there still is passed over. After that a gather is an entry of a queue: begun counts
 * those that the caller put in, done those that the thread took out.
 *
 *   caller   takes memory, begun++ ........ computes ........ waits for done > i
 *   thread              rounds its slice, gathers, done++
 *
 * The thread touches the group's memory, this rank's slice of `from`, and its
 * communicator; counters and the first failure are under the lock. It computes on a
 * pool of one, so the process's pool stays the caller's. */
#include "dbuffer_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

struct dbuffer_prefetch {
    dcp_dbuffer_t *whole;      /* borrowed: owns this */
    const dcp_dbuffer_t *from; /* borrowed; NULL: whole's own slices */
    dcp_comm_t *comm;          /* owned; the thread's */
    dcp_pool_t *pool;          /* owned; the thread's, of one */
    int32_t *order;            /* owned; [count] groups */
    int64_t *counts;           /* owned; [ranks] of a collective, the thread's */
    int64_t count;             /* > 0 */
    int64_t next;              /* the caller's: gathers begun or passed over */
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t *queue;      /* owned, under lock; [count] entry i is at i mod count */
    int64_t begun, done; /* under lock; entries since the start of the order */
    bool stopping;       /* under lock */
    dcp_status_t status; /* under lock; of the first failure, after which none runs */
    char message[1024];  /* under lock; its message */
};

static dcp_status_t
gather_group(dbuffer_prefetch_t *prefetch, int32_t group)
{
    int64_t shard = prefetch->whole->layout->shards[group];
    for (int32_t rank = 0; rank < prefetch->whole->rank_count; rank++) {
        prefetch->counts[rank] = shard;
    }
    return dbuffer_exchange(prefetch->whole, prefetch->comm, prefetch->pool, group,
                            prefetch->from, prefetch->counts);
}

static void *
thread_main(void *argument)
{
    dbuffer_prefetch_t *prefetch = argument;
    pthread_mutex_lock(&prefetch->lock);
    for (;;) {
        while (prefetch->done == prefetch->begun && !prefetch->stopping) {
            pthread_cond_wait(&prefetch->changed, &prefetch->lock);
        }
        if (prefetch->done == prefetch->begun) {
            break; /* what was begun is done: peers wait for it too */
        }
        int32_t group = prefetch->queue[prefetch->done % prefetch->count];
        dcp_status_t status = prefetch->status;
        pthread_mutex_unlock(&prefetch->lock);
        if (status == DCP_OK) {
            status = gather_group(prefetch, group);
        }
        pthread_mutex_lock(&prefetch->lock);
        if (status != DCP_OK && prefetch->status == DCP_OK) {
            prefetch->status = status;
            snprintf(prefetch->message, sizeof prefetch->message, "%s",
                     dcp_last_error());
        }
        prefetch->done++;
        pthread_cond_broadcast(&prefetch->changed);
    }
    pthread_mutex_unlock(&prefetch->lock);
    return NULL;
}

void
dbuffer_prefetch_destroy(dbuffer_prefetch_t *prefetch)
{
    if (prefetch == NULL) {
        return;
    }
    if (prefetch->has_thread) {
        pthread_mutex_lock(&prefetch->lock);
        prefetch->stopping = true;
        pthread_cond_broadcast(&prefetch->changed);
        pthread_mutex_unlock(&prefetch->lock);
        pthread_join(prefetch->thread, NULL);
    }
    pthread_cond_destroy(&prefetch->changed);
    pthread_mutex_destroy(&prefetch->lock);
    dcp_comm_destroy(prefetch->comm);
    dcp_pool_destroy(prefetch->pool);
    dcp_free(prefetch->counts);
    dcp_free(prefetch->queue);
    dcp_free(prefetch->order);
    dcp_free(prefetch);
}

static dcp_status_t
check_order(const dcp_dbuffer_t *whole, const dcp_dbuffer_t *from, const int32_t *order,
            int64_t count)
{
    if (count < 0 || (count > 0 && order == NULL)) {
        return DCP_FAIL(DCP_ERR_ARG, "an order of %" PRId64 " gathers", count);
    }
    for (int64_t i = 0; i < count; i++) {
        DCP_TRY(dbuffer_check_group(whole, order[i]));
    }
    if (whole->kind != DCP_DBUFFER_DEMAND && whole->kind != DCP_DBUFFER_LOCAL) {
        return DCP_FAIL(DCP_ERR_STATE, "only into a buffer on demand or a local one "
                                       "groups are gathered ahead");
    }
    return dbuffer_check_source(whole, from);
}

/* FNV-1a. */
static int64_t
hash_order(const int32_t *order, int64_t count)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int64_t i = 0; i < count; i++) {
        hash = (hash ^ (uint64_t)order[i]) * UINT64_C(0x100000001b3);
    }
    return (int64_t)hash;
}

/* All ranks declare the same: least and largest of (length, hash) agree. */
static dcp_status_t
compare_orders(dcp_dbuffer_t *whole, const int32_t *order, int64_t count)
{
    int64_t own[2] = {count, hash_order(order, count)}, least[2], largest[2];
    DCP_TRY(dcp_comm_allreduce(whole->comm, own, least, 2, DCP_I64, DCP_MIN));
    DCP_TRY(dcp_comm_allreduce(whole->comm, own, largest, 2, DCP_I64, DCP_MAX));
    if (least[0] != largest[0]) {
        return DCP_FAIL(DCP_ERR_MISMATCH,
                        "ranks disagree on the order of gathers: %" PRId64
                        " here, %" PRId64 " to %" PRId64 " elsewhere",
                        count, least[0], largest[0]);
    }
    if (least[1] != largest[1]) {
        return DCP_FAIL(DCP_ERR_MISMATCH,
                        "ranks disagree on the order of %" PRId64
                        " gathers: hashes %016" PRIx64 " and %016" PRIx64,
                        count, (uint64_t)least[1], (uint64_t)largest[1]);
    }
    return DCP_OK;
}

/* Everything of this rank alone that can fail. */
static dcp_status_t
fill(dbuffer_prefetch_t *prefetch, const int32_t *order)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(prefetch->count, (int64_t)sizeof(int32_t),
                            "order of gathers", &memory));
    prefetch->order = memory;
    memcpy(memory, order, (size_t)prefetch->count * sizeof order[0]);
    DCP_TRY(dcp_alloc_array(prefetch->count, (int64_t)sizeof(int32_t),
                            "queue of gathers", &memory));
    prefetch->queue = memory;
    DCP_TRY(dcp_alloc_array(prefetch->whole->rank_count, (int64_t)sizeof(int64_t),
                            "counts of a group", &memory));
    prefetch->counts = memory;
    return dcp_pool_create(1, &prefetch->pool);
}

static dcp_status_t
start(dbuffer_prefetch_t *prefetch)
{
    int32_t rank = prefetch->whole->rank;
    DCP_TRY(dcp_comm_split(prefetch->whole->comm, 0, rank, &prefetch->comm));
    int error = pthread_create(&prefetch->thread, NULL, thread_main, prefetch);
    if (error != 0) {
        return DCP_FAIL(DCP_ERR_NO_MEM, "the thread that gathers did not start: %s",
                        strerror(error));
    }
    prefetch->has_thread = true;
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_gather_order(dcp_dbuffer_t *whole, const dcp_dbuffer_t *from,
                         const int32_t *order, int64_t count)
{
    DCP_TRY(check_order(whole, from, order, count));
    DCP_TRY(compare_orders(whole, order, count));
    dbuffer_prefetch_destroy(whole->prefetch);
    whole->prefetch = NULL;
    if (count == 0) {
        return DCP_OK;
    }
    void *memory;
    dcp_status_t status = dcp_alloc_zeroed((int64_t)sizeof(dbuffer_prefetch_t),
                                           "gathering ahead", &memory);
    if (status != DCP_OK) {
        dcp_comm_abort(whole->comm, dcp_last_error());
        return status;
    }
    dbuffer_prefetch_t *prefetch = memory;
    prefetch->whole = whole;
    prefetch->from = from;
    prefetch->count = count;
    pthread_mutex_init(&prefetch->lock, NULL);
    pthread_cond_init(&prefetch->changed, NULL);
    status = fill(prefetch, order);
    status = status == DCP_OK ? start(prefetch) : status;
    if (status != DCP_OK) { /* the others must not wait for this rank's gathers */
        dcp_comm_abort(whole->comm, dcp_last_error());
        dbuffer_prefetch_destroy(prefetch);
        return status;
    }
    whole->prefetch = prefetch;
    return DCP_OK;
}

static dcp_status_t
check_declared(const dcp_dbuffer_t *whole)
{
    return whole->prefetch != NULL
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_STATE, "no order of gathers is declared");
}

/* Is `group` the next of a declared order? */
static dcp_status_t
check_next(const dcp_dbuffer_t *whole, int32_t group)
{
    DCP_TRY(check_declared(whole));
    const dbuffer_prefetch_t *prefetch = whole->prefetch;
    int32_t expected = prefetch->order[prefetch->next % prefetch->count];
    return group == expected
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_STATE,
                          "group %d is not the next of the declared order: that is "
                          "group %d",
                          (int)group, (int)expected);
}

dcp_status_t
dcp_dbuffer_gather_begin(dcp_dbuffer_t *whole, int32_t group)
{
    DCP_TRY(check_next(whole, group));
    dbuffer_prefetch_t *prefetch = whole->prefetch;
    DCP_TRY(dbuffer_acquire_or_abort(whole, group));
    dbuffer_count_gather(whole, group, prefetch->from);
    prefetch->next++;
    pthread_mutex_lock(&prefetch->lock);
    while (prefetch->begun - prefetch->done == prefetch->count) {
        pthread_cond_wait(&prefetch->changed, &prefetch->lock);
    }
    prefetch->queue[prefetch->begun % prefetch->count] = group;
    prefetch->begun++;
    pthread_cond_broadcast(&prefetch->changed);
    pthread_mutex_unlock(&prefetch->lock);
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_gather_skip(dcp_dbuffer_t *whole, int32_t group)
{
    DCP_TRY(check_next(whole, group));
    whole->prefetch->next++;
    return DCP_OK;
}

/* Waits until `count` entries are done. */
static dcp_status_t
wait_for(dbuffer_prefetch_t *prefetch, int64_t count)
{
    pthread_mutex_lock(&prefetch->lock);
    while (prefetch->done < count) {
        pthread_cond_wait(&prefetch->changed, &prefetch->lock);
    }
    dcp_status_t status = prefetch->status;
    if (status != DCP_OK) {
        dcp_set_last_error(prefetch->message);
    }
    pthread_mutex_unlock(&prefetch->lock);
    return status;
}

dcp_status_t
dcp_dbuffer_gather_wait(dcp_dbuffer_t *whole, int32_t group)
{
    DCP_TRY(check_declared(whole));
    dbuffer_prefetch_t *prefetch = whole->prefetch;
    /* only this thread changes begun and the queue */
    int64_t entry = prefetch->begun - 1, oldest = prefetch->begun - prefetch->count;
    oldest = oldest > 0 ? oldest : 0;
    while (entry >= oldest && prefetch->queue[entry % prefetch->count] != group) {
        entry--;
    }
    if (entry < oldest) {
        return DCP_FAIL(DCP_ERR_STATE, "no gather of group %d has begun", (int)group);
    }
    return wait_for(prefetch, entry + 1);
}

dcp_status_t
dcp_dbuffer_gather_restart(dcp_dbuffer_t *whole)
{
    DCP_TRY(check_declared(whole));
    dbuffer_prefetch_t *prefetch = whole->prefetch;
    DCP_TRY(wait_for(prefetch, prefetch->begun));
    pthread_mutex_lock(&prefetch->lock);
    prefetch->begun = prefetch->done = prefetch->next = 0;
    pthread_mutex_unlock(&prefetch->lock);
    return DCP_OK;
}
