/* A model whose parameters, gradients and optimizer state are sharded over ranks, and
 * the execution of one optimizer step over it.
 *
 * One step, on every rank (the numbers are those of step.c):
 *
 *   1 agree     step number, plan and settings are the same everywhere, or ERR_MISMATCH
 *
 *   2 compute   this rank's micro-batches, alone or in a group of ranks that share one
 *
 *   3 exchange  losses and times; nobody computes any more
 *
 *   4 reduce    each rank sums its shard over all ranks, in rank order
 *
 *   5 norm      the true global norm, the same bits in every world
 *
 *   6 update    the optimizer on the shard, written where all ranks read weights
 *
 *   7 publish   a barrier
 */
#ifndef DCP_TRAIN_H
#define DCP_TRAIN_H

#include "dcp/comm.h"
#include "dcp/control.h"
#include "dcp/dbuffer.h"
#include "dcp/model.h"
#include "dcp/optim.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_sharded dcp_sharded_t;

/* How the ranks of a group share attention (csrc/train/sequence.h). */
typedef enum dcp_sequence_kind {
    DCP_SEQUENCE_AUTO = 0,    /* by heads as far as they divide, the rest by rows */
    DCP_SEQUENCE_ULYSSES = 1, /* by heads, evenly or not; some ranks may have none */
    DCP_SEQUENCE_RING = 2,    /* by rows */
} dcp_sequence_kind_t;

typedef struct dcp_sharded_options {
    int64_t block_rows;    /* rows that stay on one rank, >= 1 */
    uint64_t seed;         /* of the initial weights */
    int32_t initialise;    /* 0: weights stay zero, the caller fills them */
    int32_t forward_only;  /* 1: no gradients and no optimizer state */
    const uint8_t *frozen; /* [tensor count] 1: not trained; NULL: none; copied */
    int32_t no_windows;    /* 1: nothing is read one-sidedly. Every rank holds its shard
                              alone, a group of tensors is gathered when a pass enters it,
                              groups of ranks exchange messages, all ranks run equally many
                              micro-batches */
    int32_t reduce_layer; /* 1: a group's gradients are summed over ranks as soon as its
                             backward pass ends, into shards; all ranks run equally many
                             micro-batches. 0: once a step, from full buffers */
    dcp_sequence_kind_t sequence_kind;
    int32_t gather_step; /* with no_windows, 1: what is gathered stays until the weights
                            change: once a step instead of twice a pass, for memory of a
                            whole copy. Not with prefetch */
    int32_t machine_ranks; /* ranks of one machine, in a row: quantised sums have two
                              levels; 0 or 1: one; else it divides the ranks */
    int32_t prefetch; /* with no_windows, 1: the next group of a pass is gathered, by a
                         thread into a place of its own, while the pass computes in the
                         present one. 0: when the pass enters it */
} dcp_sharded_options_t;

/* What dcp_sharded_buffer returns. */
typedef enum dcp_sharded_kind {
    DCP_SHARDED_WEIGHTS = 0,
    DCP_SHARDED_GRADIENTS = 1,
} dcp_sharded_kind_t;

/* A micro-batch of ranks first_rank .. first_rank + rank_count - 1: all its sequences,
 * the same on each of these ranks, which share its rows among them. */
typedef struct dcp_micro_batch {
    dcp_batch_t batch; /* positions and attention NULL; no tokens: only keeps step with
                          others (zero weight) */
    int32_t first_rank, rank_count;
} dcp_micro_batch_t;

/* Ranks first .. first + count - 1. */
typedef struct dcp_rank_group {
    int32_t first, count;
} dcp_rank_group_t;

typedef struct dcp_step_args {
    const dcp_micro_batch_t *batches; /* this rank's, in order; borrowed for the call */
    int64_t batch_count;
    const dcp_rank_group_t *groups; /* every group of two or more ranks that any
                                       micro-batch of the step has: distinct, sorted,
                                       the same on all ranks; borrowed */
    int64_t group_count;
    int64_t step;            /* from 0 */
    int64_t update_count;    /* updates done so far (skipped steps do not count) */
    int64_t trainable_count; /* tokens of all ranks that are trained on; 0: no update,
                                and residuals stay as they are */
    uint64_t plan_hash;      /* must agree */
    double clip;             /* greatest norm; <= 0: no clipping */
    double lr;               /* of this step */
    int32_t skip_nonfinite;  /* 1: a step whose loss or norm is not finite changes
                                nothing; 0: ERR_NUMERIC */
    /* How gradients travel (reducer.h); must agree. Others than FP32 need gradients
     * that are reduced once a step. */
    dcp_precision_t precision;
    int32_t hadamard, nearest;
    int32_t feedback; /* 1: what codes leave out is kept for the next step. Memory: 4
                         bytes a parameter on every rank, taken at first use. 0: what
                         was kept so far is added to the gradients, once */
    uint64_t quantise_seed; /* of the run */
    int32_t statistics;     /* 1: measure what an observation needs (statistics.c) */
} dcp_step_args_t;

typedef struct dcp_step_result {
    double loss;      /* sum over ranks, in rank order */
    double grad_norm; /* before clipping */
    int64_t wall_ns;  /* of the call on this rank */
    int32_t skipped;  /* nothing was changed */
    /* Received of other ranks: weights to gather them, gradients to sum them. */
    int64_t gathered_bytes, reduced_bytes;
    int64_t reduce_count;          /* reductions of the step: 1; with reduce_layer one a
                                      micro-batch; 0: not finite, no codes were sent */
    int64_t statistics_ns;         /* what measuring cost this rank */
    dcp_observation_t observation; /* with args.statistics; the caller knows the arm's
                                      multiple and the whole step's time */
} dcp_step_result_t;

/* Collective. Borrows comm, device and pool until destroyed. */
dcp_status_t dcp_sharded_create(dcp_comm_t *comm,
                                const dcp_transformer1d_config_t *config,
                                const dcp_device_ops_t *device, dcp_pool_t *pool,
                                const dcp_sharded_options_t *options,
                                dcp_sharded_t **sharded_p);
void dcp_sharded_destroy(dcp_sharded_t *sharded);

/* Collective. Makes the optimizer and its state, for one rule a tensor [tensor count]
 * (frozen tensors get none, whatever theirs says); an earlier one and its state are
 * dropped, once the new one is there. Wherever it fails, that is the optimizer still.
 */
dcp_status_t dcp_sharded_set_optimizer(dcp_sharded_t *sharded,
                                       const dcp_optimizer_rule_t *rules);
/* New numbers for the optimizer that is there (dcp_optimizer_set_rules); ERR_STATE
 * where there is none. */
dcp_status_t dcp_sharded_set_rules(dcp_sharded_t *sharded,
                                   const dcp_optimizer_rule_t *rules);
/* NULL before dcp_sharded_set_optimizer. */
const dcp_optimizer_t *dcp_sharded_optimizer(const dcp_sharded_t *sharded);
/* dcp_optimizer_bytes for a model that is not there. */
dcp_status_t dcp_sharded_optimizer_bytes(const dcp_transformer1d_config_t *config,
                                         const dcp_optimizer_rule_t *rules,
                                         int32_t rank_count, int64_t block_rows,
                                         int32_t no_windows, int64_t *bytes_p);

/* Collective: steps 1 to 7; ERR_STATE without an optimizer. busy_ns [ranks] gets each
 * rank's time in step 2. A failure on one rank aborts the communicator, so that all
 * fail. */
dcp_status_t dcp_sharded_step(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                              int64_t *busy_ns, dcp_step_result_t *result_p);

/* Collective: steps 1 to 4. This rank's slices of the gradient buffer hold the sum
 * afterwards. */
dcp_status_t dcp_sharded_gradients(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                                   int64_t *busy_ns, double *loss_p);

/* Collective: steps 1 to 3. The gradients stay where they are, and the next
 * dcp_sharded_step or dcp_sharded_gradients adds its micro-batches to them, *loss_p
 * being the sum so far: the bits are those of one call with all micro-batches, in this
 * order. With reduce_layer every pass sums over ranks, as always. */
dcp_status_t dcp_sharded_accumulate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                                    int64_t *busy_ns, double *loss_p);

/* Collective: forward only; *loss_p is the sum over ranks, in rank order. Ranks may
 * bring different numbers of micro-batches in every mode. */
dcp_status_t dcp_sharded_evaluate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                                  double *loss_p);

/* The weights were written from outside: collective, publishes them. */
dcp_status_t dcp_sharded_publish(dcp_sharded_t *sharded);

/* What quantising left out so far, in the gradients' layout: each rank its own whole
 * buffer; NULL before the first step with feedback. dcp_sharded_need_residual makes it
 * (collective), zero, and is to be called before it is written from outside. */
const dcp_dbuffer_t *dcp_sharded_residual(const dcp_sharded_t *sharded);
dcp_status_t dcp_sharded_need_residual(dcp_sharded_t *sharded);

/* The world that a controller sees (control.h): observe gives the latest step's
 * observation, completed by the caller's numbers; apply broadcasts rank 0's decision;
 * codec times are calibrated on the model's own sizes at the first call, by rank 0.
 * Borrowed from sharded. */
dcp_status_t dcp_sharded_control_world(dcp_sharded_t *sharded,
                                       dcp_control_world_t *world_p);
/* Before dcp_controller_step: the arm of the step, the whole step's seconds, of which
 * the slowest rank's count. Collective. */
dcp_status_t dcp_sharded_note_step(dcp_sharded_t *sharded, dcp_arm_t arm,
                                   double step_s);

/* NULL where options.forward_only left it out. */
const dcp_dbuffer_t *dcp_sharded_buffer(const dcp_sharded_t *sharded,
                                        dcp_sharded_kind_t kind);
const dcp_dbuffer_layout_t *dcp_sharded_layout(const dcp_sharded_t *sharded);
int64_t dcp_sharded_tensor_count(const dcp_sharded_t *sharded);
const dcp_model_tensor_t *dcp_sharded_tensor(const dcp_sharded_t *sharded,
                                             int64_t index);
int32_t dcp_sharded_is_frozen(const dcp_sharded_t *sharded, int64_t index);
dcp_comm_t *dcp_sharded_comm(const dcp_sharded_t *sharded);

#ifdef __cplusplus
}
#endif
#endif
