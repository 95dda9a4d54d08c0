/* Optimizers on shards: each rank updates its shard of the weights from its shard of
 * the summed gradient, and keeps the state of that shard alone.
 *
 * A rule says how one tensor is updated; tensors of one model may have different rules
 * (Muon for matrices, AdamW for the rest). Given identical gradients, weights and state
 * are bitwise equal for any number of ranks. State is keyed by tensor and element,
 * holds no padding, and so can be saved by N ranks and loaded by M.
 *
 *   element by element   ADAMW, ADAMW8BIT: one pass of a kernel over all runs of a rank
 *
 *   whole matrices       MUON, SHAMPOO: each has one owner; gradients go, updates come
 */
#ifndef DCP_OPTIM_H
#define DCP_OPTIM_H

#include "dcp/comm.h"
#include "dcp/dbuffer.h"
#include "dcp/device.h"
#include "dcp/dtype.h"
#include "dcp/ops.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_optimizer dcp_optimizer_t;

typedef enum dcp_optimizer_kind {
    DCP_OPTIMIZER_NONE = 0, /* frozen: never changed, no state */
    DCP_OPTIMIZER_ADAMW = 1,
    DCP_OPTIMIZER_ADAMW8BIT = 2,
    DCP_OPTIMIZER_MUON = 3,
    DCP_OPTIMIZER_SHAMPOO = 4,
} dcp_optimizer_kind_t;

/* How a tensor is updated. Fields of other kinds are not read. */
typedef struct dcp_optimizer_rule {
    dcp_optimizer_kind_t kind;
    double lr_scale;          /* times the step's learning rate, >= 0 */
    double weight_decay;      /* decoupled: w -= lr lr_scale weight_decay w */
    double beta1, beta2, eps; /* ADAMW, ADAMW8BIT, SHAMPOO */
    double momentum;          /* MUON */
    int32_t nesterov;         /* MUON */
    int32_t iterations;       /* MUON: Newton-Schulz steps */
    int64_t block; /* SHAMPOO: rows and columns of a preconditioner's block */
    int32_t every; /* SHAMPOO: steps between inverse roots */
} dcp_optimizer_rule_t;

enum { DCP_OPTIMIZER_DIMS = 8 };

/* ADAMW8BIT: tensors of fewer elements, over all ranks, are updated by ADAMW; blocks of
 * one scale lie within a row (1-D: at multiples of as many elements, so that a layout
 * needs block_count of these). */
enum {
    DCP_OPTIMIZER_8BIT_LEAST = 4096,
    DCP_OPTIMIZER_8BIT_BLOCK = DCP_ADAMW8BIT_BLOCK
};

typedef struct dcp_optimizer_tensor {
    /* 0..DCP_OPTIMIZER_DIMS; matrices are the last two dimensions, as many as the
     * others count */
    int32_t dim_count;
    int64_t shape[DCP_OPTIMIZER_DIMS];
    dcp_optimizer_rule_t rule;
} dcp_optimizer_tensor_t;

typedef struct dcp_optimizer_options {
    dcp_comm_t *comm; /* borrowed, as all below, until destroyed */
    const dcp_device_ops_t *device;
    dcp_pool_t *pool;
    const dcp_dbuffer_layout_t *layout;    /* of weights and gradients */
    const dcp_optimizer_tensor_t *tensors; /* [tensor_count of the layout]; copied */
    int64_t tensor_count;
    dcp_dbuffer_t *weights;   /* of any kind that holds this rank's slices always */
    dcp_dbuffer_t *gradients; /* this rank's slices hold the sum when a step begins */
    int32_t no_windows;       /* 1: nothing is read one-sidedly */
} dcp_optimizer_options_t;

/* Collective. Checks every rule; names tensor number, field and value. Ranks whose
 * rules differ all get ERR_MISMATCH. A rank that fails alone aborts comm. */
dcp_status_t dcp_optimizer_create(const dcp_optimizer_options_t *options,
                                  dcp_optimizer_t **optimizer_p);
void dcp_optimizer_destroy(dcp_optimizer_t *optimizer);
/* New numbers for the same kinds (a changed decay, say): ERR_ARG where a kind, or what
 * its state's shape depends on, differs. Not collective, but alike on all ranks. */
dcp_status_t dcp_optimizer_set_rules(dcp_optimizer_t *optimizer,
                                     const dcp_optimizer_tensor_t *tensors);

typedef struct dcp_optimizer_step_args {
    int64_t update_count; /* updates done before this one; Adam's t is one more */
    double lr;            /* of the step */
    double grad_scale;    /* clipping: every gradient is multiplied with it first */
} dcp_optimizer_step_args_t;

/* Collective, on all ranks, whatever they hold. Writes this rank's shard of the
 * weights; the caller publishes it (a barrier), and aborts comm where it fails. */
dcp_status_t dcp_optimizer_step(dcp_optimizer_t *optimizer,
                                const dcp_optimizer_step_args_t *args);

/* The same on ranks whose rules are the same: to compare them before a step. */
uint64_t dcp_optimizer_rules_hash(const dcp_optimizer_t *optimizer);

/* A state ("adamw.m", "muon.momentum", "shampoo.left", ...) of the tensors that have
 * it. Its shape for a tensor may differ from the tensor's; runs are elements of that
 * shape, row-major, and those of all ranks cover it once. */
typedef struct dcp_state_run {
    int64_t tensor;
    int64_t first, count; /* elements of the state of this tensor */
    void *data;           /* of this rank; owned by the optimizer */
} dcp_state_run_t;

int32_t dcp_optimizer_state_count(const dcp_optimizer_t *optimizer);
const char *dcp_optimizer_state_name(const dcp_optimizer_t *optimizer, int32_t state);
dcp_dtype_t dcp_optimizer_state_dtype(const dcp_optimizer_t *optimizer, int32_t state);
/* dim_count -1: this tensor has no such state. */
void dcp_optimizer_state_shape(const dcp_optimizer_t *optimizer, int32_t state,
                               int64_t tensor, int32_t *dim_count_p,
                               int64_t shape[DCP_OPTIMIZER_DIMS]);
/* *runs_p borrowed from the optimizer. */
void dcp_optimizer_state_runs(const dcp_optimizer_t *optimizer, int32_t state,
                              const dcp_state_run_t **runs_p, int64_t *run_count_p);

/* Adam's second moment of this rank's elements, decoded: v of `count` elements of a
 * tensor from `first` on, and how it decays. Good during the call alone. */
typedef void (*dcp_second_moment_visit_t)(void *context, int64_t tensor, int64_t first,
                                          int64_t count, const float *v, double beta2);
/* Piece by piece; 0: this tensor's kind keeps none. */
int32_t dcp_optimizer_has_second_moment(const dcp_optimizer_t *optimizer,
                                        int64_t tensor);
void dcp_optimizer_second_moments(const dcp_optimizer_t *optimizer,
                                  dcp_second_moment_visit_t visit, void *context);

/* Most bytes of state and scratch that any rank holds: for estimates before anything is
 * made. With one thread a rank; each further one adds scratch of SHAMPOO (about 0.6 MB
 * for blocks of 128). Scratch that kernels keep in the pool is not counted. */
int64_t dcp_optimizer_bytes(const dcp_dbuffer_layout_t *layout,
                            const dcp_optimizer_tensor_t *tensors, int64_t tensor_count,
                            int32_t no_windows);

#ifdef __cplusplus
}
#endif
#endif
