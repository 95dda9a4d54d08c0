/* Ranks as threads of one process: each runs its own task. */
#ifndef RANK_THREADS_H
#define RANK_THREADS_H

#include "check.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_RANK_THREADS = 16 };

/* tasks: [count] of `bytes` each. */
static inline void
run_rank_threads(void *(*body)(void *), void *tasks, size_t bytes, int32_t count)
{
    pthread_t threads[MOST_RANK_THREADS];
    CHECK(count <= MOST_RANK_THREADS);
    for (int32_t i = 0; i < count; i++) {
        char *task = (char *)tasks + (size_t)i * bytes;
        CHECK(pthread_create(&threads[i], NULL, body, task) == 0);
    }
    for (int32_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
}

#endif
