/* What the row-wise operations share: argument checks, the cut of rows into tasks, sums
 * over rows in a fixed order, and the tables of vector bodies (csrc/kernels/isa/).
 */
#ifndef ROWWISE_H
#define ROWWISE_H

#include "dcp/isa.h"
#include "dcp/ops.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#include <stddef.h>
#include <stdint.h>

/* Computes rows first .. last-1 of the operation that `args` describes. */
typedef void (*rowwise_func_t)(const void *args, int64_t first, int64_t last);

/* The same, and writes its rows' share of sums over rows to `parts`: [part][width]. */
typedef void (*rowwise_sum_func_t)(const void *args, int64_t first, int64_t last,
                                   float *parts);

/* Runs func over all rows, row_elems elements each, in tasks of about 128 KiB. */
dcp_status_t rowwise_run(dcp_pool_t *pool, int64_t rows, int64_t row_elems,
                         rowwise_func_t func, const void *args);

enum { ROWWISE_MAX_PARTS = 2 };

/* Runs func over fixed blocks of rows, at least 64 a block and at most 64 blocks, then
 * adds the parts to outs[part] ([width], NULL: not wanted) in the order of the blocks.
 */
dcp_status_t rowwise_run_sums(dcp_pool_t *pool, int64_t rows, int64_t width,
                              rowwise_sum_func_t func, const void *args,
                              int32_t part_count, float *const *outs);

/* value >= 0 */
dcp_status_t rowwise_check_size(const char *op, const char *name, int64_t value);
/* not NULL */
dcp_status_t rowwise_check_pointer(const char *op, const char *name,
                                   const void *pointer);
/* stride >= least */
dcp_status_t rowwise_check_stride(const char *op, const char *name, int64_t stride,
                                  int64_t least);
/* every value in 0 .. bound-1, or equal to `ignored` */
dcp_status_t rowwise_check_indices(const char *op, const char *name,
                                   const int32_t *values, int64_t count, int64_t bound,
                                   const char *bound_name, int32_t ignored);

/* Inside a function with `args`, which returns a status. */
#define CHECK_SIZE(op, field) DCP_TRY(rowwise_check_size(op, #field, args->field))
#define CHECK_POINTER(op, field) DCP_TRY(rowwise_check_pointer(op, #field, args->field))
#define CHECK_STRIDE(op, field, least) \
    DCP_TRY(rowwise_check_stride(op, #field, args->field, least))

/* Tables of vector bodies, one instance per instruction set. A func's `args` is the
 * operation's argument struct unless said. */
typedef struct norm_ops {
    rowwise_func_t forward[2];      /* by dcp_norm_kind_t */
    rowwise_sum_func_t backward[2]; /* parts: dweight, dbias; NULL: neither is wanted */
} norm_ops_t;

typedef struct rope_ops {
    rowwise_func_t rotate;
} rope_ops_t;

typedef struct activation_ops {
    rowwise_func_t swiglu, swiglu_backward;
    rowwise_func_t gelu[2], gelu_backward[2]; /* by dcp_gelu_kind_t; rows: elements */
} activation_ops_t;

typedef struct loss_job {
    const dcp_cross_entropy_args_t *args;
    double *losses; /* [rows], written */
} loss_job_t;

typedef struct loss_ops {
    rowwise_func_t cross_entropy; /* args: loss_job_t */
} loss_ops_t;

typedef struct dropout_job {
    const dcp_dropout_args_t *args;
    uint32_t key[2];    /* of Philox */
    uint32_t threshold; /* words below are kept */
    float scale;        /* 1 / (1 - p) */
} dropout_job_t;

typedef struct dropout_ops {
    rowwise_func_t dropout; /* args: dropout_job_t */
} dropout_ops_t;

typedef struct elementwise_ops {
    rowwise_func_t add;                /* rows: elements; b is not NULL */
    rowwise_sum_func_t column_sum;     /* parts: the sum */
    rowwise_func_t embedding_backward; /* rows: columns of dweight */
} elementwise_ops_t;

typedef struct optimizer_ops {
    rowwise_func_t adamw; /* rows: elements */
    rowwise_func_t row_squares;
} optimizer_ops_t;

typedef struct adamw8bit_ops {
    rowwise_func_t adamw8bit; /* rows: blocks */
} adamw8bit_ops_t;

#define ROWWISE_TABLE_MAP(X) \
    X(norm_ops)              \
    X(rope_ops)              \
    X(activation_ops)        \
    X(loss_ops)              \
    X(dropout_ops)           \
    X(elementwise_ops)       \
    X(optimizer_ops)         \
    X(adamw8bit_ops)
#define X(name) extern const name##_t name##_portable, name##_avx2, name##_avx512;
ROWWISE_TABLE_MAP(X)
#undef X

#if defined(__x86_64__)
#define ROWWISE_OPS(name)                                 \
    (dcp_isa_vectors() == DCP_ISA_AVX512 ? &name##_avx512 \
     : dcp_isa_vectors() == DCP_ISA_AVX2 ? &name##_avx2   \
                                         : &name##_portable)
#else
#define ROWWISE_OPS(name) (&name##_portable)
#endif

#endif
