/* AdamW on a rank's shard: m and v, fp32, of its own runs alone.
 *
 *   memory   m of run 0 | m of run 1 | ... | v of run 0 | v of run 1 | ...
 *
 * Runs are those of the layout, in buffer order, of the tensors with this rule; each
 * starts at a multiple of 64 bytes. A step is one dispatch over all of them: every
 * element is read and written once (28 bytes), whatever the number of tensors. No
 * element looks at another, so the bits do not depend on how tensors are cut.
 */
#include "optim_private.h"

#include "dcp/alloc.h"

#include <math.h>

enum { STATE_M, STATE_V, STATES, ALIGN = 16 /* elements */ };

static const optim_state_info_t states[STATES] = {
    [STATE_M] = {"adamw.m", DCP_F32},
    [STATE_V] = {"adamw.v", DCP_F32},
};

typedef struct adamw {
    const optim_context_t *context;
    int64_t run_count;
    dcp_state_run_t *runs[STATES]; /* owned, each [run_count] */
    dcp_adamw_args_t *ops;         /* owned, [run_count]; numbers are each step's */
    float *memory;                 /* owned */
} adamw_t;

static int64_t
aligned(int64_t count)
{
    return (count + ALIGN - 1) / ALIGN * ALIGN;
}

/* Runs of the members on a rank, and elements of one state with gaps. */
static void
measure(const dcp_dbuffer_layout_t *layout, int32_t rank, const int64_t *members,
        int64_t member_count, int64_t *run_count_p, int64_t *elements_p)
{
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(layout, rank, &runs, &count);
    *run_count_p = *elements_p = 0;
    for (int64_t i = 0; i < count; i++) {
        if (optim_is_member(members, member_count, runs[i].tensor)) {
            *elements_p += aligned(runs[i].count);
            (*run_count_p)++;
        }
    }
}

static void
place_runs(adamw_t *adamw, int64_t elements)
{
    const dcp_optimizer_options_t *options = &adamw->context->options;
    const dcp_dbuffer_run_t *runs;
    int64_t count, at = 0, start = 0;
    dcp_dbuffer_layout_runs(options->layout, dcp_comm_rank(options->comm), &runs,
                            &count);
    for (int64_t i = 0; i < count; i++) {
        const dcp_dbuffer_run_t *run = &runs[i];
        if (!optim_is_member(adamw->context->members, adamw->context->member_count,
                             run->tensor)) {
            continue;
        }
        for (int32_t state = 0; state < STATES; state++) {
            adamw->runs[state][at] = (dcp_state_run_t){
                .tensor = run->tensor,
                .first = run->first,
                .count = run->count,
                .data = adamw->memory + state * elements + start,
            };
        }
        adamw->ops[at] = (dcp_adamw_args_t){
            .count = run->count,
            .w = dcp_dbuffer_run_data(options->weights, run),
            .g = dcp_dbuffer_run_data(options->gradients, run),
            .m = adamw->runs[STATE_M][at].data,
            .v = adamw->runs[STATE_V][at].data,
        };
        start += aligned(run->count);
        at++;
    }
}

static dcp_status_t
fill(adamw_t *adamw)
{
    const optim_context_t *context = adamw->context;
    int64_t elements;
    measure(context->options.layout, dcp_comm_rank(context->options.comm),
            context->members, context->member_count, &adamw->run_count, &elements);
    void *memory;
    for (int32_t state = 0; state < STATES; state++) {
        DCP_TRY(dcp_alloc_array(adamw->run_count, (int64_t)sizeof(dcp_state_run_t),
                                "runs of a state", &memory));
        adamw->runs[state] = memory;
    }
    DCP_TRY(dcp_alloc_array(adamw->run_count, (int64_t)sizeof(dcp_adamw_args_t),
                            "runs of an update", &memory));
    adamw->ops = memory;
    DCP_TRY(dcp_alloc_zeroed(STATES * elements * (int64_t)sizeof(float),
                             "state of adamw", &memory));
    adamw->memory = memory;
    place_runs(adamw, elements);
    return DCP_OK;
}

static void
destroy(void *object)
{
    adamw_t *adamw = object;
    if (adamw == NULL) {
        return;
    }
    dcp_free(adamw->memory);
    dcp_free(adamw->ops);
    for (int32_t state = STATES - 1; state >= 0; state--) {
        dcp_free(adamw->runs[state]);
    }
    dcp_free(adamw);
}

static dcp_status_t
create(const optim_context_t *context, void **object_p)
{
    void *memory;
    dcp_status_t status = dcp_alloc_zeroed((int64_t)sizeof(adamw_t), "adamw", &memory);
    if (status != DCP_OK) {
        return status;
    }
    adamw_t *adamw = memory;
    adamw->context = context;
    status = fill(adamw);
    if (status != DCP_OK) {
        destroy(adamw);
        return status;
    }
    *object_p = adamw;
    return DCP_OK;
}

static dcp_status_t
step(void *object, const dcp_optimizer_step_args_t *args)
{
    adamw_t *adamw = object;
    const dcp_optimizer_options_t *options = &adamw->context->options;
    double t = (double)(args->update_count + 1);
    for (int64_t i = 0; i < adamw->run_count; i++) {
        const dcp_optimizer_rule_t *rule =
            &options->tensors[adamw->runs[STATE_M][i].tensor].rule;
        dcp_adamw_args_t *op = &adamw->ops[i];
        op->lr = (float)(args->lr * rule->lr_scale);
        op->beta1 = (float)rule->beta1;
        op->beta2 = (float)rule->beta2;
        op->eps = (float)rule->eps;
        op->decay = (float)rule->weight_decay;
        op->bias1 = (float)(1.0 - pow(rule->beta1, t));
        op->bias2 = (float)(1.0 - pow(rule->beta2, t));
        op->grad_scale = (float)args->grad_scale;
    }
    dcp_queue_t *queue;
    DCP_TRY(options->device->queue_create(options->pool, &queue));
    dcp_status_t status = options->device->adamw_runs(
        queue,
        &(dcp_adamw_runs_args_t){.run_count = adamw->run_count, .runs = adamw->ops});
    if (status == DCP_OK) {
        status = options->device->fence(queue);
    }
    options->device->queue_destroy(queue);
    return status;
}

static void
state_shape(const void *object, int32_t state, int64_t tensor, int32_t *dim_count_p,
            int64_t *shape)
{
    (void)state;
    const adamw_t *adamw = object;
    const dcp_optimizer_tensor_t *of = &adamw->context->options.tensors[tensor];
    *dim_count_p = of->dim_count;
    for (int32_t i = 0; i < of->dim_count; i++) {
        shape[i] = of->shape[i];
    }
}

static void
state_runs(const void *object, int32_t state, const dcp_state_run_t **runs_p,
           int64_t *run_count_p)
{
    const adamw_t *adamw = object;
    *runs_p = adamw->runs[state];
    *run_count_p = adamw->run_count;
}

static int64_t
bytes(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
      const int64_t *members, int64_t member_count, int32_t no_windows)
{
    (void)tensors;
    (void)no_windows;
    const int64_t run_bytes =
        (int64_t)(STATES * sizeof(dcp_state_run_t) + sizeof(dcp_adamw_args_t));
    int64_t most = 0;
    for (int32_t rank = 0; rank < dcp_dbuffer_layout_rank_count(layout); rank++) {
        int64_t run_count, elements;
        measure(layout, rank, members, member_count, &run_count, &elements);
        int64_t here =
            STATES * elements * (int64_t)sizeof(float) + run_count * run_bytes;
        most = here > most ? here : most;
    }
    return most + (int64_t)sizeof(adamw_t);
}

const optim_ops_t optim_adamw_ops = {
    .check = optim_check_adam,
    .create = create,
    .destroy = destroy,
    .step = step,
    .state_count = STATES,
    .states = states,
    .state_shape = state_shape,
    .state_runs = state_runs,
    .bytes = bytes,
};
