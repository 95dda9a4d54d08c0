/* DBuffer: the tensors of a model in one window, group by group, each group cut evenly
 * over the ranks at block borders (shard.h). Full tensors are views of it, a rank's
 * shard is its slices: one slice a group.
 *
 *   group 0: m x S_0        group 1: m x S_1     ...          (elements, fp32)
 *   |r0 |r1 |r2 |...        |r0 |r1 |r2 |...
 *
 * SHARED: one copy for all ranks of the machine (rank 0 brings it): weights. Each rank
 * writes its shard only; a barrier publishes it. So a gather moves nothing. PRIVATE:
 * each rank has a full copy that peers may read: gradients. dcp_dbuffer_reduce sums, in
 * rank order, this rank's shard over all copies into its own copy.
 *
 * Where nothing may be read one-sidedly: SHARD holds this rank's slices alone, one
 * after the other; dcp_dbuffer_gather puts a whole group together. LOCAL is a full copy
 * in memory of this rank's own, summed by messages: the same bits as PRIVATE.
 *
 * DEMAND has an address for everything and memory for what is in use: a group gets it
 * when it is acquired or gathered, and gives it back when it is released. Addresses
 * never change, so views outlive that; they read as zeros while there is no memory.
 *
 * Buffers of several element types share one layout: fp32 weights, their copies in bf16
 * for computing.
 */
#ifndef DCP_DBUFFER_H
#define DCP_DBUFFER_H

#include "dcp/comm.h"
#include "dcp/dtype.h"
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
    DCP_DBUFFER_SHARD = 3,
    DCP_DBUFFER_DEMAND = 4
} dcp_dbuffer_kind_t;

typedef struct dcp_dbuffer_options {
    dcp_dbuffer_kind_t kind;
    dcp_dtype_t dtype; /* DCP_F32, DCP_BF16 or DCP_U8 */
    int32_t keep_own;  /* DEMAND, 1: this rank's slices have memory always (a shard that
                          is gathered around itself) */
    const int32_t *places; /* LOCAL, [group count] >= 0: groups of the same number lie
                              in the same memory, which what is gathered last holds;
                              only for gathers. NULL: each in its own; copied */
    dcp_comm_t *replicas;  /* hybrid sharding: the ranks that hold the same shard, over
                              which sums run too; NULL: none. Borrowed */
} dcp_dbuffer_options_t;

/* Collective. Borrows comm and layout until destroyed. Zero-filled. The layout is for
 * as many ranks as comm has. */
dcp_status_t dcp_dbuffer_create(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                                dcp_dbuffer_kind_t kind, dcp_dbuffer_t **buffer_p);
dcp_status_t dcp_dbuffer_create_with(dcp_comm_t *comm,
                                     const dcp_dbuffer_layout_t *layout,
                                     const dcp_dbuffer_options_t *options,
                                     dcp_dbuffer_t **buffer_p);
void dcp_dbuffer_destroy(dcp_dbuffer_t *buffer);
dcp_dtype_t dcp_dbuffer_dtype(const dcp_dbuffer_t *buffer);
/* The accessors below, for buffers of any type. */
void *dcp_dbuffer_tensor_bytes(const dcp_dbuffer_t *buffer, int64_t tensor);
void *dcp_dbuffer_run_bytes(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run);
/* This rank's view of the whole; SHARD: its slices. Not of DEMAND, nor with places:
 * there groups do not follow one another. */
float *dcp_dbuffer_data(const dcp_dbuffer_t *buffer);
/* NULL for SHARD: no rank has a whole tensor. */
float *dcp_dbuffer_tensor_data(const dcp_dbuffer_t *buffer, int64_t tensor);
/* Where a run of this rank lies, whatever the kind. */
float *dcp_dbuffer_run_data(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run);
/* This rank's slice of a group. */
float *dcp_dbuffer_slice(const dcp_dbuffer_t *buffer, int32_t group);
/* All that this rank holds of the buffer (SHARED: its slices) becomes 0. */
void dcp_dbuffer_zero(dcp_dbuffer_t *buffer);
/* PRIVATE, LOCAL, DEMAND: every group's sum over all ranks, in rank order, then over
 * the replicas, in theirs; this rank's slice gets it, the rest stays. PRIVATE: not
 * collective without replicas, the caller fences with barriers. Others: collective. */
dcp_status_t dcp_dbuffer_reduce(dcp_dbuffer_t *buffer, dcp_pool_t *pool);
/* One group's; of PRIVATE, LOCAL and DEMAND. One collective, and one over replicas. */
dcp_status_t dcp_dbuffer_reduce_one(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                                    int32_t group);
/* SHARD: full [m x S] gets the slices of all ranks. Collective. */
dcp_status_t dcp_dbuffer_gather(dcp_dbuffer_t *buffer, int32_t group, float *full);
/* Sums full [m x S] over ranks, in rank order, by messages; this rank's slice of full
 * gets its part of the sum, the rest stays. Any kind. Collective. */
dcp_status_t dcp_dbuffer_reduce_group(dcp_dbuffer_t *buffer, int32_t group,
                                      float *full);

/* Puts group `group` of `whole` together where it lies, in its own type: fp32 is
 * rounded to bf16 on the way. Nothing is copied in between.
 * whole: DEMAND (gets memory) or LOCAL; SHARED, of another type than `from`: every rank
 * writes its slice of the one copy. from: fp32 of the same layout, this rank's slices;
 * NULL: whole's own are in place. Collective. */
dcp_status_t dcp_dbuffer_gather_whole(dcp_dbuffer_t *whole, dcp_pool_t *pool,
                                      int32_t group, const dcp_dbuffer_t *from);

/* DEMAND: memory of a group, zeroed but for kept slices; nothing where it has it. */
dcp_status_t dcp_dbuffer_acquire(dcp_dbuffer_t *buffer, int32_t group);
/* Gives it back to the system; kept slices stay. */
void dcp_dbuffer_release(dcp_dbuffer_t *buffer, int32_t group);
int32_t dcp_dbuffer_is_held(const dcp_dbuffer_t *buffer, int32_t group);

/* Gathering ahead, by a thread with a communicator of its own, beside which the caller
 * computes and communicates. A DEMAND or LOCAL buffer declares the order of its gathers
 * once, so that no two ranks can pair different groups; begin and wait follow it, again
 * from its start where it ends.
 * Collective; ERR_MISMATCH on all ranks where orders differ. count 0: no order. */
dcp_status_t dcp_dbuffer_gather_order(dcp_dbuffer_t *whole, const dcp_dbuffer_t *from,
                                      const int32_t *order, int64_t count);
/* Begins the next gather of the order, which must be of `group`: takes memory, returns
 * at once. Until it has been waited for `from` must not change. Not collective, but
 * alike on all ranks. */
dcp_status_t dcp_dbuffer_gather_begin(dcp_dbuffer_t *whole, int32_t group);
/* Instead of begin: what was gathered of `group`, the next of the order, is there
 * still, and nothing moves. Alike on all ranks. */
dcp_status_t dcp_dbuffer_gather_skip(dcp_dbuffer_t *whole, int32_t group);
/* Waits for the latest begun gather of `group`; ERR_STATE where there is none. */
dcp_status_t dcp_dbuffer_gather_wait(dcp_dbuffer_t *whole, int32_t group);
/* Waits for all, and goes back to the start of the order. */
dcp_status_t dcp_dbuffer_gather_restart(dcp_dbuffer_t *whole);

/* Operations on this rank's slice of one group, or of all: one job of the pool, however
 * many tensors there are. Not collective. Padding between tensors takes part. */
enum { DCP_DBUFFER_ALL_GROUPS = -1 };
dcp_status_t dcp_dbuffer_fill(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                              float value);
dcp_status_t dcp_dbuffer_scale(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                               float factor);
/* buffer += factor * other; both fp32. */
dcp_status_t dcp_dbuffer_add(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                             float factor, const dcp_dbuffer_t *other);
/* buffer = other, converted between fp32 and bf16 where their types differ. */
dcp_status_t dcp_dbuffer_copy(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group,
                              const dcp_dbuffer_t *other);
/* Elements that are not finite. */
dcp_status_t dcp_dbuffer_count_nonfinite(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                                         int32_t group, int64_t *count_p);

/* What has gone through a buffer on this rank since it was made. */
typedef struct dcp_dbuffer_traffic {
    int64_t moved_bytes;  /* received of, or read from, other ranks */
    int64_t copied_bytes; /* of this rank's own, copied from one place in memory to
                             another (staging of the transport aside) */
    int64_t gather_count, reduce_count; /* of groups */
} dcp_dbuffer_traffic_t;
dcp_dbuffer_traffic_t dcp_dbuffer_traffic(const dcp_dbuffer_t *buffer);

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
 * every world. `mask` (per tensor, may be NULL) leaves out tensors with 0. Squares are
 * added in fp64, row by row; block by block where blocks are not whole rows. */
dcp_status_t dcp_dbuffer_norm(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                              const uint8_t *mask, double *norm_p);

typedef struct dcp_dbuffer_norm_args {
    const uint8_t *mask; /* [tensors] 0: left out; NULL: all */
    int32_t largest; /* 1: the largest absolute value instead; NaN where there is one
                      */
    /* Replicated values, the same on every rank, which count once. */
    const float *const *extras; /* [extra_count] borrowed */
    const int64_t *extra_counts;
    int64_t extra_count;
} dcp_dbuffer_norm_args_t;

dcp_status_t dcp_dbuffer_norm_with(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                                   const dcp_dbuffer_norm_args_t *args, double *norm_p);

#ifdef __cplusplus
}
#endif
#endif
