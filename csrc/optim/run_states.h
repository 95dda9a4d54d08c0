/* State that lies beside a rank's runs: of each run of a layout whose tensor is a
 * member, in buffer order, some arrays of an item an element, or an item a block of
 * DCP_OPTIMIZER_8BIT_BLOCK elements of a row. One piece of memory; each array starts at
 * a multiple of 64 bytes.
 *
 *   memory   state 0 of run 0 | state 1 of run 0 | ... | state 0 of run 1 | ...
 */
#ifndef DCP_RUN_STATES_H
#define DCP_RUN_STATES_H

#include "optim_private.h"

enum { RUN_STATES_MOST = 4 };

typedef struct run_states_kinds {
    const optim_state_info_t *infos; /* [count], borrowed */
    int32_t count;
    uint32_t by_block; /* bit k: an item of state k stands for a block */
} run_states_kinds_t;

typedef struct run_states {
    int64_t run_count;
    const dcp_dbuffer_run_t **layout_runs;  /* owned, [run_count] */
    dcp_state_run_t *runs[RUN_STATES_MOST]; /* owned, each [run_count] */
    void *memory;                           /* owned, zero at first */
} run_states_t;

/* Elements of a row: the last dimension; 1 of a tensor of fewer than two dimensions,
 * whose blocks go on from row to row. */
int64_t run_states_width(const dcp_optimizer_tensor_t *tensor);
/* On failure what is there must be destroyed too; zeroed before. */
dcp_status_t run_states_create(const optim_context_t *context,
                               const run_states_kinds_t *kinds, run_states_t *states);
void run_states_destroy(run_states_t *states);
void run_states_shape(const optim_context_t *context, const run_states_kinds_t *kinds,
                      int32_t state, int64_t tensor, int32_t *dim_count_p,
                      int64_t *shape);
/* Bytes of all this, and run_bytes more a run, on the rank that holds most. */
int64_t run_states_bytes(const dcp_dbuffer_layout_t *layout,
                         const dcp_optimizer_tensor_t *tensors, const int64_t *members,
                         int64_t member_count, const run_states_kinds_t *kinds,
                         int64_t run_bytes);

#endif
