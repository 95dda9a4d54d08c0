/* What the files of the reducer share; private to reducer*.c.
 *
 * A reduction is made of slices: the elements of one segment that one rank of the group
 * gets. A slice is cut into runs of REDUCER_RUN elements (whole blocks but for the last
 * run); a run is a message of precision.h, and a task of the pool. So
 *
 *   message from s to r:  | runs of segment 0's slice r | of segment 1's slice r | ...
 *
 * has dcp_precision_bytes of each slice in all, whatever the number of threads, and a
 * receiver sums run by run in cache.
 */
#ifndef REDUCER_PRIVATE_H
#define REDUCER_PRIVATE_H

#include "dcp/reducer.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    REDUCER_RUN = 128 * DCP_PRECISION_BLOCK, /* 64 KB of fp32: input, sum and codes
                                                stay in a core's cache */
    REDUCER_TEXT_BYTES = 160,
    REDUCER_COUNTS = 4, /* that a mismatch shows */
};

/* What ranks tell each other before anything moves. Travels as bytes. */
typedef struct reducer_terms {
    int32_t status; /* dcp_status_t of the rank's preparation */
    int32_t op;     /* reducer_op_t */
    int32_t precision, hadamard, nearest, machine_ranks;
    int32_t flush; /* two levels: residuals of other places hold something */
    int32_t count_known;
    uint64_t seed, hash; /* hash: of all counts */
    int64_t step, segment_count, total;
    int64_t counts[REDUCER_COUNTS];
    char text[REDUCER_TEXT_BYTES]; /* message of status */
} reducer_terms_t;

typedef enum reducer_op {
    REDUCER_CREATE = 0,
    REDUCER_REDUCE = 1,
    REDUCER_ALLREDUCE = 2,
} reducer_op_t;

/* Memory that grows and is kept for the next call. */
typedef struct reducer_room {
    void *memory;
    int64_t bytes;
} reducer_room_t;

typedef struct reducer_worker {
    dcp_pool_t *pool; /* of one: runs a codec inside a task */
    float *sum;       /* [REDUCER_RUN] */
} reducer_worker_t;

struct dcp_reducer {
    dcp_comm_t *comm; /* borrowed */
    int32_t rank, size;
    int32_t machine_ranks;       /* 1: one level */
    dcp_comm_t *machine;         /* ranks of this machine, NULL: one level */
    dcp_comm_t *places;          /* ranks of equal place, NULL: one level */
    dcp_comm_t *across;          /* borrowed: where codes travel */
    reducer_terms_t *terms;      /* [size] */
    int64_t *terms_counts;       /* [size] bytes of terms: for their gather */
    int64_t *even_counts;        /* [size] allreduce: elements of each rank's slice */
    int64_t *code_bytes;         /* [size] allreduce: codes of slices, place by place */
    int64_t *block_bytes;        /* [machine_ranks] of these: a place's */
    reducer_room_t table;        /* of reducer_exchange_t */
    reducer_room_t gather_table; /* of reducer_gather_t */
    reducer_room_t sums; /* two levels: of this machine, for ranks of this place */
    reducer_room_t send, receive;
    reducer_worker_t *workers; /* [worker_count] */
    int32_t worker_count;
};

typedef struct reducer_slice {
    const float *x;  /* [count] this rank's (or machine's) part of the sum */
    float *residual; /* [count] or NULL */
    int64_t count;
    int64_t first; /* number of x[0] among the elements of the call */
} reducer_slice_t;

typedef struct reducer_run {
    int64_t slice; /* index of slices */
    int64_t start, count;
    int64_t offset; /* of its codes: in the buffer that is sent, or in a message */
} reducer_run_t;

/* One exchange within `across`: everybody gets the sums of its slices. Arrays lie in
 * the reducer's table. */
typedef struct reducer_exchange {
    dcp_reducer_t *reducer;
    const dcp_reduce_args_t *args;
    uint64_t stream;          /* of random bits */
    int32_t size, rank;       /* of across */
    reducer_slice_t *slices;  /* [segment_count, size] */
    float **outs;             /* [segment_count] where own sums go */
    int64_t *send_counts;     /* [size] bytes, fp32: elements; own 0 */
    int64_t *receive_counts;  /* [size] the same */
    int64_t message_count;    /* what each other rank sends here, as above */
    reducer_run_t *send_runs; /* [send_run_count] of all ranks' slices but the own */
    reducer_run_t *own_runs;  /* [own_run_count] */
    int64_t send_run_count, own_run_count;
    double *squares; /* [send_run_count, 2] */
} reducer_exchange_t;

/* reducer.c */
/* At least `bytes`, contents undefined. */
dcp_status_t reducer_room_take(reducer_room_t *room, int64_t bytes, const char *what);
/* Tells everybody `own` and a status; the first rank's failure, or ERR_MISMATCH where
 * terms differ, on all ranks alike. any_flush_p: does one of them ask for it? */
dcp_status_t reducer_agree(dcp_reducer_t *reducer, reducer_terms_t *own,
                           dcp_status_t status, bool *any_flush_p);

/* reducer_exchange.c */
/* Table and buffers for `segments`; two levels: slices of this place, whose x points
 * into the sums. */
dcp_status_t reducer_exchange_prepare(dcp_reducer_t *reducer, dcp_pool_t *pool,
                                      const dcp_reduce_args_t *args,
                                      reducer_exchange_t *exchange);
/* Encodes, moves, decodes. Adds to *result. Every rank has prepared. */
dcp_status_t reducer_exchange_run(reducer_exchange_t *exchange, dcp_pool_t *pool,
                                  dcp_reduce_result_t *result);
/* Adds residual to x into sum (may be x), and zeroes it where the sum is finite. */
void reducer_flush(float *sum, const float *x, float *residual, int64_t count);
/* The stream of random bits of a rank in a step; second: of sums, in allreduce. */
uint64_t reducer_stream(const dcp_reducer_t *reducer, int64_t step, bool second);

/* reducer_levels.c */
/* Do residuals of slices of other places hold anything but zeros? */
bool reducer_levels_must_flush(const dcp_reducer_t *reducer,
                               const dcp_reduce_args_t *args);
/* Sums of this machine for the ranks of this place in all machines, into reducer->sums;
 * flush: with the residuals of other places, which become 0. */
dcp_status_t reducer_levels_sum(dcp_reducer_t *reducer, const dcp_reduce_args_t *args,
                                bool flush);
/* Floats of the sums of this place. */
int64_t reducer_levels_count(const dcp_reducer_t *reducer,
                             const dcp_reduce_args_t *args);

/* The second half of an allreduce. */
typedef struct reducer_gather {
    dcp_reducer_t *reducer;
    const dcp_reduce_args_t *args;
    float *out;          /* all sums; own ones are there */
    float *residual;     /* or NULL: of all elements */
    reducer_run_t *runs; /* [run_count] of all slices; start: in out */
    double *squares;     /* [runs of the own slice, 2] */
    int64_t run_count, own_first, own_end; /* own runs: own_first .. own_end - 1 */
    int64_t own_offset;                    /* of own codes */
} reducer_gather_t;

/* reducer_gather.c */
/* Cuts `count` elements evenly, at block borders, into even_counts; where the own slice
 * begins. */
int64_t reducer_gather_cut(dcp_reducer_t *reducer, int64_t count);
dcp_status_t reducer_gather_prepare(reducer_gather_t *gather);
dcp_status_t reducer_gather_run(reducer_gather_t *gather, dcp_pool_t *pool,
                                dcp_reduce_result_t *result);

#endif
