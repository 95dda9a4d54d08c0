/* Lays state out beside the runs of a rank (run_states.h).
 *
 * Where an item stands for a block, a run must begin at one: at the start of a row, or,
 * in a tensor of one dimension, at a multiple of the block. So a block is never shared
 * by two ranks, and what it holds does not depend on how many there are.
 */
#include "run_states.h"

#include "dcp/alloc.h"

#include <inttypes.h>

enum { ALIGN_BYTES = 64, BLOCK = DCP_OPTIMIZER_8BIT_BLOCK };

int64_t
run_states_width(const dcp_optimizer_tensor_t *tensor)
{
    return tensor->dim_count < 2 ? 1 : tensor->shape[tensor->dim_count - 1];
}

static int64_t
blocks_of(int64_t elements)
{
    return elements / BLOCK + (elements % BLOCK > 0);
}

static int32_t
is_by_block(const run_states_kinds_t *kinds, int32_t state)
{
    return (kinds->by_block >> state & 1) != 0;
}

/* Items of elements 0 .. element - 1, which end a row or the tensor. */
static int64_t
items_before(const dcp_optimizer_tensor_t *tensor, const run_states_kinds_t *kinds,
             int32_t state, int64_t element)
{
    int64_t width = run_states_width(tensor);
    if (!is_by_block(kinds, state)) {
        return element;
    }
    return width == 1 ? blocks_of(element) : element / width * blocks_of(width);
}

static int64_t
items_of(const dcp_optimizer_tensor_t *tensor, const run_states_kinds_t *kinds,
         int32_t state, const dcp_dbuffer_run_t *run)
{
    return items_before(tensor, kinds, state, run->first + run->count)
           - items_before(tensor, kinds, state, run->first);
}

static int64_t
bytes_of(const dcp_optimizer_tensor_t *tensor, const run_states_kinds_t *kinds,
         int32_t state, const dcp_dbuffer_run_t *run)
{
    int64_t bytes = items_of(tensor, kinds, state, run)
                    * dcp_dtype_bytes(kinds->infos[state].dtype);
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

/* The members' runs on a rank, and the bytes of their state. */
static void
measure(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
        int32_t rank, const int64_t *members, int64_t member_count,
        const run_states_kinds_t *kinds, int64_t *run_count_p, int64_t *bytes_p)
{
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(layout, rank, &runs, &count);
    *run_count_p = *bytes_p = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!optim_is_member(members, member_count, runs[i].tensor)) {
            continue;
        }
        for (int32_t k = 0; k < kinds->count; k++) {
            *bytes_p += bytes_of(&tensors[runs[i].tensor], kinds, k, &runs[i]);
        }
        (*run_count_p)++;
    }
}

static void
place(const optim_context_t *context, const run_states_kinds_t *kinds,
      run_states_t *states)
{
    const dcp_optimizer_options_t *options = &context->options;
    const dcp_dbuffer_run_t *runs;
    int64_t count, at = 0;
    char *memory = states->memory;
    dcp_dbuffer_layout_runs(options->layout, dcp_comm_rank(options->comm), &runs,
                            &count);
    for (int64_t i = 0; i < count; i++) {
        const dcp_dbuffer_run_t *run = &runs[i];
        if (!optim_is_member(context->members, context->member_count, run->tensor)) {
            continue;
        }
        const dcp_optimizer_tensor_t *tensor = &options->tensors[run->tensor];
        states->layout_runs[at] = run;
        for (int32_t k = 0; k < kinds->count; k++) {
            states->runs[k][at] = (dcp_state_run_t){
                .tensor = run->tensor,
                .first = items_before(tensor, kinds, k, run->first),
                .count = items_of(tensor, kinds, k, run),
                .data = memory,
            };
            memory += bytes_of(tensor, kinds, k, run);
        }
        at++;
    }
}

/* On all ranks, so that all find the same. */
static dcp_status_t
check_blocks(const optim_context_t *context)
{
    const dcp_optimizer_options_t *options = &context->options;
    for (int32_t rank = 0; rank < dcp_comm_size(options->comm); rank++) {
        const dcp_dbuffer_run_t *runs;
        int64_t count;
        dcp_dbuffer_layout_runs(options->layout, rank, &runs, &count);
        for (int64_t i = 0; i < count; i++) {
            if (!optim_is_member(context->members, context->member_count,
                                 runs[i].tensor)) {
                continue;
            }
            int64_t width = run_states_width(&options->tensors[runs[i].tensor]);
            int64_t unit = width == 1 ? BLOCK : width;
            if (runs[i].first % unit != 0) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "the layout cuts tensor %" PRId64 " at element %" PRId64
                                ": its 8-bit state needs cuts at multiples of %" PRId64
                                " (block_count)",
                                runs[i].tensor, runs[i].first, unit);
            }
        }
    }
    return DCP_OK;
}

dcp_status_t
run_states_create(const optim_context_t *context, const run_states_kinds_t *kinds,
                  run_states_t *states)
{
    int64_t bytes;
    if (kinds->by_block != 0) {
        DCP_TRY(check_blocks(context));
    }
    measure(context->options.layout, context->options.tensors,
            dcp_comm_rank(context->options.comm), context->members,
            context->member_count, kinds, &states->run_count, &bytes);
    void *memory;
    DCP_TRY(dcp_alloc_array(states->run_count, (int64_t)sizeof states->layout_runs[0],
                            "runs of an optimizer", &memory));
    states->layout_runs = memory;
    for (int32_t k = 0; k < kinds->count; k++) {
        DCP_TRY(dcp_alloc_array(states->run_count, (int64_t)sizeof(dcp_state_run_t),
                                "runs of a state", &memory));
        states->runs[k] = memory;
    }
    DCP_TRY(dcp_alloc_zeroed(bytes, "state of an optimizer", &states->memory));
    place(context, kinds, states);
    return DCP_OK;
}

void
run_states_destroy(run_states_t *states)
{
    dcp_free(states->memory);
    for (int32_t k = RUN_STATES_MOST - 1; k >= 0; k--) {
        dcp_free(states->runs[k]);
    }
    dcp_free(states->layout_runs);
}

void
run_states_shape(const optim_context_t *context, const run_states_kinds_t *kinds,
                 int32_t state, int64_t tensor, int32_t *dim_count_p, int64_t *shape)
{
    const dcp_optimizer_tensor_t *of = &context->options.tensors[tensor];
    if (is_by_block(kinds, state) && run_states_width(of) == 1) {
        *dim_count_p = 1;
        shape[0] = blocks_of(optim_elements(of));
        return;
    }
    *dim_count_p = of->dim_count;
    for (int32_t i = 0; i < of->dim_count; i++) {
        int32_t cut = is_by_block(kinds, state) && i == of->dim_count - 1;
        shape[i] = cut ? blocks_of(of->shape[i]) : of->shape[i];
    }
}

int64_t
run_states_bytes(const dcp_dbuffer_layout_t *layout,
                 const dcp_optimizer_tensor_t *tensors, const int64_t *members,
                 int64_t member_count, const run_states_kinds_t *kinds,
                 int64_t run_bytes)
{
    int64_t most = 0;
    run_bytes += (int64_t)sizeof(dcp_dbuffer_run_t *)
                 + kinds->count * (int64_t)sizeof(dcp_state_run_t);
    for (int32_t rank = 0; rank < dcp_dbuffer_layout_rank_count(layout); rank++) {
        int64_t run_count, bytes;
        measure(layout, tensors, rank, members, member_count, kinds, &run_count,
                &bytes);
        int64_t here = bytes + run_count * run_bytes;
        most = here > most ? here : most;
    }
    return most;
}
