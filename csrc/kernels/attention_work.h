/* Shared by attention.c and attention_gradient.c; not for others. */
#ifndef DCP_ATTENTION_WORK_H
#define DCP_ATTENTION_WORK_H

#include "attention.h"

#include "dcp/kernels.h"

#include <stddef.h>

/* Sequences first_sequence .. end_sequence-1; of a single one, maybe only rows (or
 * keys) first .. end-1. */
typedef struct attention_unit {
    int64_t first_sequence, end_sequence;
    int64_t first, end; /* end 0: all */
    float *partial;     /* backward: dq of this segment, NULL: write dq itself */
    double cost;
} attention_unit_t;

typedef struct attention_job {
    dcp_pool_t *pool;
    const dcp_attention_args_t *args;
    const dcp_attention_backward_args_t *gradient_args; /* NULL in the forward pass */
    attention_unit_t *units;
    int64_t unit_count;
    int64_t shared_bytes, task_bytes; /* of worker 0's scratch; of everyone's */
    int64_t row_limit;                /* forward: most query rows of a unit */
} attention_job_t;

static inline int64_t
attention_offset(const dcp_attention_args_t *args, const void *offsets, int64_t i)
{
    return args->offsets_64 ? ((const int64_t *)offsets)[i]
                            : ((const int32_t *)offsets)[i];
}

static inline const void *
attention_key_offsets(const dcp_attention_args_t *args)
{
    return args->key_offsets != NULL ? args->key_offsets : args->offsets;
}

/* Everything of the arguments but pointers. key_rows < 0: not known. */
dcp_status_t attention_check(const dcp_attention_args_t *args, int64_t key_rows);
dcp_status_t attention_check_stride(const char *what, int64_t stride, int64_t heads,
                                    int64_t dim);

/* One sequence and key-value head. */
attention_view_t attention_view(const dcp_attention_args_t *args, int64_t sequence,
                                int64_t kv_head);

/* Query-key pairs of rows first .. end-1. */
double attention_pairs(const attention_view_t *view, int64_t first, int64_t end);

/* Appends a unit, or, while job->units is NULL, only counts it. A run of small
 * sequences that follows another one joins it. `last`: the latest unit, zeros at first.
 */
void attention_add_unit(attention_job_t *job, attention_unit_t unit,
                        attention_unit_t *last);

/* For qsort: dearest first, so that cores finish together. */
int attention_compare_units(const void *a, const void *b);

/* Worker's scratch; worker 0's task part lies behind the shared part. */
dcp_status_t attention_scratch(const attention_job_t *job, int32_t worker,
                               void **scratch_p);

/* Zeroes `width` elements of rows first .. end-1. */
void attention_clear_rows(float *x, int64_t stride, int64_t width, int64_t first,
                          int64_t end);

#endif
