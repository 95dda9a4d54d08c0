/* One thread, one ring of job numbers, one lock.
 *
 * A job is a whole group of messages, so a lock and a wake-up (about 10 us) do not
 * count. A failed job makes those behind it no-ops: what it was to bring has not come,
 * and the communicator that it used is broken anyhow.
 */
#include "courier.h"

#include "dcp/alloc.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

struct optim_courier {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t posted, finished;
    optim_job_t func;
    void *context; /* borrowed */
    int64_t jobs[OPTIM_COURIER_JOBS];
    int64_t posted_count, finished_count; /* since creation, under lock */
    bool stopping;
    dcp_status_t status; /* of the first failed job, under lock */
    char message[1024];
};

static void *
courier_main(void *argument)
{
    optim_courier_t *courier = argument;
    pthread_mutex_lock(&courier->lock);
    for (;;) {
        while (courier->finished_count == courier->posted_count && !courier->stopping) {
            pthread_cond_wait(&courier->posted, &courier->lock);
        }
        if (courier->finished_count == courier->posted_count) {
            break;
        }
        int64_t job = courier->jobs[courier->finished_count % OPTIM_COURIER_JOBS];
        bool skip = courier->status != DCP_OK;
        pthread_mutex_unlock(&courier->lock);
        dcp_status_t status = skip ? DCP_OK : courier->func(courier->context, job);
        pthread_mutex_lock(&courier->lock);
        if (status != DCP_OK) {
            courier->status = status;
            snprintf(courier->message, sizeof courier->message, "%s", dcp_last_error());
        }
        courier->finished_count++;
        pthread_cond_broadcast(&courier->finished);
    }
    pthread_mutex_unlock(&courier->lock);
    return NULL;
}

dcp_status_t
optim_courier_create(optim_job_t func, void *context, optim_courier_t **courier_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(optim_courier_t), "thread for messages",
                             &memory));
    optim_courier_t *courier = memory;
    courier->func = func;
    courier->context = context;
    pthread_mutex_init(&courier->lock, NULL);
    pthread_cond_init(&courier->posted, NULL);
    pthread_cond_init(&courier->finished, NULL);
    int error = pthread_create(&courier->thread, NULL, courier_main, courier);
    if (error != 0) {
        pthread_cond_destroy(&courier->finished);
        pthread_cond_destroy(&courier->posted);
        pthread_mutex_destroy(&courier->lock);
        dcp_free(courier);
        return DCP_FAIL(DCP_ERR_NO_MEM, "a thread for messages: %s", strerror(error));
    }
    *courier_p = courier;
    return DCP_OK;
}

void
optim_courier_destroy(optim_courier_t *courier)
{
    if (courier == NULL) {
        return;
    }
    pthread_mutex_lock(&courier->lock);
    courier->stopping = true;
    pthread_cond_signal(&courier->posted);
    pthread_mutex_unlock(&courier->lock);
    pthread_join(courier->thread, NULL);
    pthread_cond_destroy(&courier->finished);
    pthread_cond_destroy(&courier->posted);
    pthread_mutex_destroy(&courier->lock);
    dcp_free(courier);
}

int64_t
optim_courier_post(optim_courier_t *courier, int64_t job)
{
    pthread_mutex_lock(&courier->lock);
    courier->jobs[courier->posted_count % OPTIM_COURIER_JOBS] = job;
    int64_t ticket = ++courier->posted_count;
    pthread_cond_signal(&courier->posted);
    pthread_mutex_unlock(&courier->lock);
    return ticket;
}

dcp_status_t
optim_courier_wait(optim_courier_t *courier, int64_t ticket)
{
    pthread_mutex_lock(&courier->lock);
    while (courier->finished_count < ticket) {
        pthread_cond_wait(&courier->finished, &courier->lock);
    }
    dcp_status_t status = courier->status;
    if (status != DCP_OK) {
        dcp_set_last_error(courier->message);
    }
    pthread_mutex_unlock(&courier->lock);
    return status;
}

void
optim_courier_clear(optim_courier_t *courier)
{
    pthread_mutex_lock(&courier->lock);
    while (courier->finished_count < courier->posted_count) {
        pthread_cond_wait(&courier->finished, &courier->lock);
    }
    courier->status = DCP_OK;
    pthread_mutex_unlock(&courier->lock);
}
