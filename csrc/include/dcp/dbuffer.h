/* DBuffer: the tensors of a model in one window, group by group, each group cut evenly
 * over the ranks at block borders (shard.h). Full tensors are views of it, a rank's
 * shard is its slices: one slice a group.
 *
 *   group 0: m x S_0        group 1: m x S_1     ...          (elements, fp32)
 *   |r0 |r1 |r2 |...        |r0 |r1 |r2 |...
 *
 * SHARED: one copy for all ranks of the machine (rank 0 brings it): weights and
 * optimizer state. Each rank writes its shard only; a barrier publishes it. So a gather
 * moves nothing. PRIVATE: each rank has a full copy that peers may read: gradients.
 * dcp_dbuffer_reduce sums, in rank order, this rank's shard over all copies into its
 * own copy.
 *
 * Where nothing may be read one-sidedly: SHARD holds this rank's slices alone, one
 * after the other; dcp_dbuffer_gather puts a whole group together. LOCAL is a full copy
 * in memory of this rank's own, summed by messages: the same bits as PRIVATE.
 */
#ifndef DCP_DBUFFER_H
#define DCP_DBUFFER_H

#include "dcp/comm.h"
#include "dcp/shard.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_dbuffer_layout dcp_dbuffer_layout_t;
typedef struct dcp_dbuffer dcp_dbuffer_t;

typedef struct dcp_dbuffer_tensor {
    int64_t row_count; /* rows: leading dimensions flattened; 1-D tensor of n: n rows of
                          width 1, which may be cut anywhere */
    int64_t row_width; /* elements of a row */
    int32_t group;     /* groups are numbered 0 .. in order of first use */
    int64_t block_count; /* elements that stay on one rank; 0: block_rows of the layout,
                            1 for a 1-D tensor */
} dcp_dbuffer_tensor_t;

/* A contiguous run of one tensor on one rank. */
typedef struct dcp_dbuffer_run {
    int64_t tensor; /* number of the tensor */
    int64_t first;  /* element of the tensor where the run starts: a whole row for 2-D
                       tensors */
    int64_t count;  /* elements */
    int64_t start;  /* element of the buffer */
} dcp_dbuffer_run_t;

/* Plans every group (equal groups once). block_rows: rows that must stay together,
 * >= 1. */
dcp_status_t dcp_dbuffer_layout_create(const dcp_dbuffer_tensor_t *tensors,
                                       int64_t tensor_count, int32_t rank_count,
                                       int64_t block_rows, dcp_layout_order_t order,
                                       dcp_dbuffer_layout_t **layout_p);
void dcp_dbuffer_layout_destroy(dcp_dbuffer_layout_t *layout);
int32_t dcp_dbuffer_layout_rank_count(const dcp_dbuffer_layout_t *layout);
int64_t dcp_dbuffer_layout_elements(
    const dcp_dbuffer_layout_t *layout); /* of the whole buffer, padding included */
int64_t dcp_dbuffer_layout_start(const dcp_dbuffer_layout_t *layout,
                                 int64_t tensor); /* element of the buffer */
/* The runs of a rank, in buffer order; *runs_p borrowed from the layout. */
void dcp_dbuffer_layout_runs(const dcp_dbuffer_layout_t *layout, int32_t rank,
                             const dcp_dbuffer_run_t **runs_p, int64_t *run_count_p);

typedef struct dcp_dbuffer_group {
    int64_t start;       /* element of the buffer */
    int64_t shard;       /* S: elements of one rank's slice */
    int64_t shard_start; /* where the slice lies among a rank's slices */
} dcp_dbuffer_group_t;

int32_t dcp_dbuffer_layout_group_count(const dcp_dbuffer_layout_t *layout);
dcp_dbuffer_group_t dcp_dbuffer_layout_group(const dcp_dbuffer_layout_t *layout,
                                             int32_t group);

typedef enum dcp_dbuffer_kind {
    DCP_DBUFFER_SHARED = 0,
    DCP_DBUFFER_PRIVATE = 1,
    DCP_DBUFFER_LOCAL = 2,
    DCP_DBUFFER_SHARD = 3
} dcp_dbuffer_kind_t;

/* Collective. Borrows comm and layout until destroyed. Zero-filled. The layout is for
 * as many ranks as comm has. */
dcp_status_t dcp_dbuffer_create(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                                dcp_dbuffer_kind_t kind, dcp_dbuffer_t **buffer_p);
void dcp_dbuffer_destroy(dcp_dbuffer_t *buffer);
/* This rank's view of the whole; SHARD: its slices. */
float *dcp_dbuffer_data(const dcp_dbuffer_t *buffer);
/* NULL for SHARD: no rank has a whole tensor. */
float *dcp_dbuffer_tensor_data(const dcp_dbuffer_t *buffer, int64_t tensor);
/* Where a run of this rank lies, whatever the kind. */
float *dcp_dbuffer_run_data(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run);
/* This rank's slice of a group. */
float *dcp_dbuffer_slice(const dcp_dbuffer_t *buffer, int32_t group);
/* All that this rank holds of the buffer (SHARED: its slices) becomes 0. */
void dcp_dbuffer_zero(dcp_dbuffer_t *buffer);
/* PRIVATE, LOCAL: see above. PRIVATE: not collective, the caller fences with barriers.
 * LOCAL: collective. */
dcp_status_t dcp_dbuffer_reduce(dcp_dbuffer_t *buffer, dcp_pool_t *pool);
/* SHARD: full [m x S] gets the slices of all ranks. Collective. */
dcp_status_t dcp_dbuffer_gather(dcp_dbuffer_t *buffer, int32_t group, float *full);
/* The same rounded to bf16 (nearest even): half the bytes. */
dcp_status_t dcp_dbuffer_gather_bf16(dcp_dbuffer_t *buffer, int32_t group,
                                     uint16_t *full);
/* Sums full [m x S] over ranks, in rank order, by messages; this rank's slice of full
 * gets its part of the sum, the rest stays. Any kind. Collective. */
dcp_status_t dcp_dbuffer_reduce_group(dcp_dbuffer_t *buffer, int32_t group,
                                      float *full);

/* Sum of squares of this rank's shard, exactly: per row in fp64 (fixed order), rows
 * added without rounding, so that the total over ranks does not depend on how rows are
 * dealt. */
enum { DCP_EXACT_WORDS = 72 };
typedef struct dcp_exact_sum {
    int64_t words[DCP_EXACT_WORDS]; /* fixed point, 32 bits a word, carries pending;
                                       last word: count of non-finite */
} dcp_exact_sum_t;
void dcp_exact_sum_init(dcp_exact_sum_t *sum);
/* x >= 0; one that is negative or not finite makes the value NaN. */
void dcp_exact_sum_add(dcp_exact_sum_t *sum, double x);
void dcp_exact_sum_merge(dcp_exact_sum_t *sum, const dcp_exact_sum_t *other);
/* Resolves pending carries: words then lie below 2^32, so that the words of up to 2^30
 * sums may be added as integers, over ranks for example. */
void dcp_exact_sum_normalise(dcp_exact_sum_t *sum);
double dcp_exact_sum_value(
    const dcp_exact_sum_t *sum); /* nearest double; NaN if any was not finite */
/* Norm of all ranks' shards of `buffer`: collective, the same bits on every rank and in
 * every world. `mask` (per tensor, may be NULL) leaves out tensors with 0. */
dcp_status_t dcp_dbuffer_norm(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                              const uint8_t *mask, double *norm_p);

#ifdef __cplusplus
}
#endif
#endif
