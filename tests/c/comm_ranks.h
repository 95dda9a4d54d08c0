/* Ranks for the tests of comm: as threads of one process, or one by one; and checks of
 * every collective against plain loops. A body counts for itself (REQUIRE): CHECK's
 * counters are not for threads. */
#ifndef COMM_RANKS_H
#define COMM_RANKS_H

#include "check.h"

#include "dcp/comm.h"
#include "dcp/rng.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 6 };
static const int64_t second_ns = 1000000000;

typedef struct rank {
    pthread_t thread;
    int32_t rank, size;
    char run_id[32];
    int64_t timeout_ns;
    void (*body)(struct rank *);
    dcp_comm_t *comm;
    dcp_status_t status; /* for the body to fill */
    char message[1024];  /* its message */
    int failed, passed;  /* REQUIRE */
    uint64_t seed;
} rank_t;

#define REQUIRE(r, condition)                                                         \
    do {                                                                              \
        if (condition) {                                                              \
            (r)->passed++;                                                            \
        } else {                                                                      \
            (r)->failed++;                                                            \
            printf("%s:%d: rank %d of %d: %s (last error: %s)\n", __FILE__, __LINE__, \
                   (int)(r)->rank, (int)(r)->size, #condition, dcp_last_error());     \
        }                                                                             \
    } while (0)

static int32_t run_number;

static inline void
keep(rank_t *r, dcp_status_t status)
{
    r->status = status;
    snprintf(r->message, sizeof r->message, "%s",
             status != DCP_OK ? dcp_last_error() : "");
}

static inline void *
rank_main(void *argument)
{
    rank_t *r = argument;
    dcp_comm_options_t options = {.rank = r->rank,
                                  .size = r->size,
                                  .run_id = r->run_id,
                                  .timeout_ns = r->timeout_ns,
                                  .join_timeout_ns = 30 * second_ns};
    dcp_status_t status = dcp_comm_create_shm(&options, &r->comm);
    REQUIRE(r, status == DCP_OK);
    if (status == DCP_OK) {
        r->body(r);
        dcp_comm_destroy(r->comm);
    }
    return NULL;
}

static inline void
run_ranks(rank_t *ranks, int32_t size, void (*body)(rank_t *), uint64_t seed,
          int64_t timeout_ns)
{
    int32_t number = run_number++;
    for (int32_t i = 0; i < size; i++) {
        ranks[i] = (rank_t){.rank = i,
                            .size = size,
                            .body = body,
                            .seed = seed,
                            .timeout_ns = timeout_ns};
        snprintf(ranks[i].run_id, sizeof ranks[i].run_id, "test-%d-%d", (int)getpid(),
                 (int)number);
        pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]);
    }
    for (int32_t i = 0; i < size; i++) {
        pthread_join(ranks[i].thread, NULL);
        check_passed += ranks[i].passed;
        check_failed += ranks[i].failed;
    }
}

/* Element i of what rank `rank` contributes to call `call`. */
static inline float
value(uint64_t call, int32_t rank, int64_t i)
{
    uint32_t key[2] = {(uint32_t)call, (uint32_t)rank}, out[4];
    dcp_philox(key, (const uint32_t[4]){(uint32_t)i, 0, 0, 0}, out);
    return (float)(int32_t)out[0] * 1e-6f;
}

static inline float
sum_of(uint64_t call, int32_t size, int64_t i)
{
    float sum = value(call, 0, i);
    for (int32_t r = 1; r < size; r++) {
        sum += value(call, r, i);
    }
    return sum;
}

static inline float *
floats(int64_t count)
{
    return malloc((size_t)(count + 1) * sizeof(float));
}

static inline float *
contribution(uint64_t call, int32_t rank, int64_t count)
{
    float *x = floats(count);
    for (int64_t i = 0; i < count; i++) {
        x[i] = value(call, rank, i);
    }
    return x;
}

static inline int64_t
random_counts(dcp_rng_t *rng, int32_t size, uint64_t bound, int64_t *counts)
{
    int64_t total = 0;
    for (int32_t r = 0; r < size; r++) {
        counts[r] = (int64_t)dcp_rng_below(rng, bound);
        counts[r] = dcp_rng_below(rng, 4) == 0 ? 0 : counts[r];
        total += counts[r];
    }
    return total;
}

static inline void
check_reductions(rank_t *r, uint64_t call, const int64_t *counts, int64_t total)
{
    float *send = contribution(call, r->rank, total), *recv = floats(total);
    int64_t start = 0, wrong = 0;
    for (int32_t i = 0; i < r->rank; i++) {
        start += counts[i];
    }
    REQUIRE(r,
            dcp_comm_reduce_scatterv(r->comm, send, counts, recv, DCP_F32) == DCP_OK);
    for (int64_t i = 0; i < counts[r->rank]; i++) {
        wrong += recv[i] != sum_of(call, r->size, start + i);
    }
    REQUIRE(r, wrong == 0);
    REQUIRE(r,
            dcp_comm_allreduce(r->comm, send, recv, total, DCP_F32, DCP_SUM) == DCP_OK);
    for (int64_t i = 0; i < total; i++) {
        wrong += recv[i] != sum_of(call, r->size, i);
    }
    REQUIRE(r, wrong == 0);
    /* in place: the slice of send, then send itself */
    float *copy = contribution(call, r->rank, total);
    REQUIRE(r, dcp_comm_reduce_scatterv(r->comm, copy, counts, copy + start, DCP_F32)
                   == DCP_OK);
    for (int64_t i = 0; i < counts[r->rank]; i++) {
        wrong += copy[start + i] != recv[start + i];
    }
    REQUIRE(r, dcp_comm_allgatherv(r->comm, copy + start, counts, copy, DCP_F32)
                   == DCP_OK);
    REQUIRE(r, memcmp(copy, recv, (size_t)total * 4) == 0);
    REQUIRE(r,
            dcp_comm_allreduce(r->comm, send, send, total, DCP_F32, DCP_SUM) == DCP_OK);
    REQUIRE(r, memcmp(send, recv, (size_t)total * 4) == 0);
    REQUIRE(r, wrong == 0);
    free(send);
    free(recv);
    free(copy);
}

static inline void
check_moves(rank_t *r, uint64_t call, dcp_rng_t *rng, uint64_t bound)
{
    /* table[s][d]: the same on all ranks */
    int64_t table[MAX_RANKS][MAX_RANKS], sends = 0, receives = 0;
    int64_t recv_counts[MAX_RANKS];
    for (int32_t s = 0; s < r->size; s++) {
        random_counts(rng, r->size, bound, table[s]);
    }
    for (int32_t i = 0; i < r->size; i++) {
        sends += table[r->rank][i];
        recv_counts[i] = table[i][r->rank];
        receives += recv_counts[i];
    }
    float *send = contribution(call, r->rank, sends), *recv = floats(receives);
    REQUIRE(
        r, dcp_comm_alltoallv(r->comm, send, table[r->rank], recv, recv_counts, DCP_F32)
               == DCP_OK);
    int64_t at = 0, wrong = 0;
    for (int32_t s = 0; s < r->size; s++) {
        int64_t start = 0;
        for (int32_t d = 0; d < r->rank; d++) {
            start += table[s][d];
        }
        for (int64_t i = 0; i < table[s][r->rank]; i++) {
            wrong += recv[at++] != value(call, s, start + i);
        }
    }
    REQUIRE(r, wrong == 0);
    int32_t root = (int32_t)dcp_rng_below(rng, (uint64_t)r->size);
    int64_t count = (int64_t)dcp_rng_below(rng, bound);
    float *data = contribution(call, r->rank, count);
    REQUIRE(r, dcp_comm_broadcast(r->comm, data, count, DCP_F32, root) == DCP_OK);
    for (int64_t i = 0; i < count; i++) {
        wrong += data[i] != value(call, root, i);
    }
    REQUIRE(r, wrong == 0);
    free(send);
    free(recv);
    free(data);
}

#endif
