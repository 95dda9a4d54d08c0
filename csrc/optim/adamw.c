/* AdamW and its 8-bit form: state of a rank's runs alone (run_states.h), and one
 * dispatch a step over all of them, whatever the number of tensors.
 *
 *   adamw      m, v: fp32                               28 bytes an element and step
 *
 *   adamw8bit  m, v: a byte; a scale a block of a row   16
 *
 * No element looks at another (8-bit: at another block), and blocks do not depend on
 * where ranks are cut, so the bits do not depend on it either. The two kinds differ in
 * their kernels and in what a run gives them.
 */
#include "run_states.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"

#include <math.h>

enum { M, V, STATES };
enum { M8, M8_SCALE, V8, V8_SCALE, STATES8 };

static const optim_state_info_t infos[STATES] = {
    [M] = {"adamw.m", DCP_F32},
    [V] = {"adamw.v", DCP_F32},
};
static const optim_state_info_t infos8[STATES8] = {
    [M8] = {"adamw8bit.m", DCP_U8},
    [M8_SCALE] = {"adamw8bit.m_scale", DCP_F32},
    [V8] = {"adamw8bit.v", DCP_U8},
    [V8_SCALE] = {"adamw8bit.v_scale", DCP_F32},
};
static const run_states_kinds_t kinds = {infos, STATES, 0};
static const run_states_kinds_t kinds8 = {infos8, STATES8,
                                          (uint32_t)(1 << M8_SCALE | 1 << V8_SCALE)};

typedef struct adamw {
    const optim_context_t *context;
    const run_states_kinds_t *kinds;
    run_states_t states;
    dcp_adamw_args_t *ops;      /* owned, [run_count]: one of the two; numbers are */
    dcp_adamw8bit_args_t *ops8; /* those of each step */
} adamw_t;

/* What the kernel finds where, of run i. */
static dcp_adamw_args_t
op_of(const adamw_t *adamw, int64_t i)
{
    const dcp_optimizer_options_t *options = &adamw->context->options;
    const dcp_dbuffer_run_t *run = adamw->states.layout_runs[i];
    return (dcp_adamw_args_t){
        .count = run->count,
        .w = dcp_dbuffer_run_data(options->weights, run),
        .g = dcp_dbuffer_run_data(options->gradients, run),
        .m = adamw->states.runs[M][i].data,
        .v = adamw->states.runs[V][i].data,
    };
}

static dcp_adamw8bit_args_t
op8_of(const adamw_t *adamw, int64_t i)
{
    const dcp_optimizer_options_t *options = &adamw->context->options;
    const dcp_dbuffer_run_t *run = adamw->states.layout_runs[i];
    /* blocks of a tensor of one dimension go on from row to row: it is one */
    int64_t width = run_states_width(&options->tensors[run->tensor]);
    width = width == 1 ? run->count : width;
    return (dcp_adamw8bit_args_t){
        .rows = run->count / width,
        .width = width,
        .w = dcp_dbuffer_run_data(options->weights, run),
        .g = dcp_dbuffer_run_data(options->gradients, run),
        .m = adamw->states.runs[M8][i].data,
        .m_scale = adamw->states.runs[M8_SCALE][i].data,
        .v = adamw->states.runs[V8][i].data,
        .v_scale = adamw->states.runs[V8_SCALE][i].data,
    };
}

static dcp_status_t
fill(adamw_t *adamw)
{
    DCP_TRY(run_states_create(adamw->context, adamw->kinds, &adamw->states));
    int64_t run_count = adamw->states.run_count;
    int32_t eight = adamw->kinds == &kinds8;
    void *memory;
    DCP_TRY(dcp_alloc_array(run_count,
                            eight ? (int64_t)sizeof adamw->ops8[0]
                                  : (int64_t)sizeof adamw->ops[0],
                            "runs of an update", &memory));
    if (eight) {
        adamw->ops8 = memory;
    } else {
        adamw->ops = memory;
    }
    for (int64_t i = 0; i < run_count; i++) {
        if (eight) {
            adamw->ops8[i] = op8_of(adamw, i);
        } else {
            adamw->ops[i] = op_of(adamw, i);
        }
    }
    return DCP_OK;
}

static void
destroy(void *object)
{
    adamw_t *adamw = object;
    if (adamw != NULL) {
        dcp_free(adamw->ops8);
        dcp_free(adamw->ops);
        run_states_destroy(&adamw->states);
        dcp_free(adamw);
    }
}

static dcp_status_t
create_as(const optim_context_t *context, const run_states_kinds_t *of, void **object_p)
{
    void *memory;
    dcp_status_t status = dcp_alloc_zeroed((int64_t)sizeof(adamw_t), "adamw", &memory);
    if (status != DCP_OK) {
        return status;
    }
    adamw_t *adamw = memory;
    adamw->context = context;
    adamw->kinds = of;
    status = fill(adamw);
    if (status != DCP_OK) {
        destroy(adamw);
        return status;
    }
    *object_p = adamw;
    return DCP_OK;
}

static dcp_status_t
create(const optim_context_t *context, void **object_p)
{
    return create_as(context, &kinds, object_p);
}

static dcp_status_t
create8(const optim_context_t *context, void **object_p)
{
    return create_as(context, &kinds8, object_p);
}

/* The numbers of a step, which both kernels' structs name alike. */
#define SET_NUMBERS(op, rule, args)                         \
    do {                                                    \
        double t = (double)((args)->update_count + 1);      \
        (op)->lr = (float)((args)->lr * (rule)->lr_scale);  \
        (op)->beta1 = (float)(rule)->beta1;                 \
        (op)->beta2 = (float)(rule)->beta2;                 \
        (op)->eps = (float)(rule)->eps;                     \
        (op)->decay = (float)(rule)->weight_decay;          \
        (op)->bias1 = (float)(1.0 - pow((rule)->beta1, t)); \
        (op)->bias2 = (float)(1.0 - pow((rule)->beta2, t)); \
        (op)->grad_scale = (float)(args)->grad_scale;       \
    } while (0)

static dcp_status_t
submit(const adamw_t *adamw, dcp_queue_t *queue)
{
    const dcp_device_ops_t *device = adamw->context->options.device;
    int64_t run_count = adamw->states.run_count;
    if (adamw->ops8 != NULL) {
        dcp_adamw8bit_runs_args_t runs = {.run_count = run_count, .runs = adamw->ops8};
        DCP_TRY(device->adamw8bit_runs(queue, &runs));
    } else {
        dcp_adamw_runs_args_t runs = {.run_count = run_count, .runs = adamw->ops};
        DCP_TRY(device->adamw_runs(queue, &runs));
    }
    return device->fence(queue);
}

static dcp_status_t
step(void *object, const dcp_optimizer_step_args_t *args)
{
    adamw_t *adamw = object;
    const dcp_optimizer_options_t *options = &adamw->context->options;
    for (int64_t i = 0; i < adamw->states.run_count; i++) {
        int64_t tensor = adamw->states.layout_runs[i]->tensor;
        const dcp_optimizer_rule_t *rule = &options->tensors[tensor].rule;
        if (adamw->ops8 != NULL) {
            SET_NUMBERS(&adamw->ops8[i], rule, args);
        } else {
            SET_NUMBERS(&adamw->ops[i], rule, args);
        }
    }
    dcp_queue_t *queue;
    DCP_TRY(options->device->queue_create(options->pool, &queue));
    dcp_status_t status = submit(adamw, queue);
    options->device->queue_destroy(queue);
    return status;
}

static void
state_shape(const void *object, int32_t state, int64_t tensor, int32_t *dim_count_p,
            int64_t *shape)
{
    const adamw_t *adamw = object;
    run_states_shape(adamw->context, adamw->kinds, state, tensor, dim_count_p, shape);
}

static void
state_runs(const void *object, int32_t state, const dcp_state_run_t **runs_p,
           int64_t *run_count_p)
{
    const adamw_t *adamw = object;
    *runs_p = adamw->states.runs[state];
    *run_count_p = adamw->states.run_count;
}

static double
beta2_of(const adamw_t *adamw, const dcp_dbuffer_run_t *run)
{
    return adamw->context->options.tensors[run->tensor].rule.beta2;
}

static void
second_moments(const void *object, dcp_second_moment_visit_t visit, void *context)
{
    const adamw_t *adamw = object;
    for (int64_t i = 0; i < adamw->states.run_count; i++) {
        const dcp_dbuffer_run_t *run = adamw->states.layout_runs[i];
        visit(context, run->tensor, run->first, run->count, adamw->ops[i].v,
              beta2_of(adamw, run));
    }
}

/* Of one run: decoded in pieces that do not end with every short row. */
static void
second_moments8_run(const adamw_t *adamw, int64_t i, const float *values,
                    dcp_second_moment_visit_t visit, void *context)
{
    enum { PIECE = 16 * DCP_ADAMW8BIT_BLOCK };
    const dcp_dbuffer_run_t *run = adamw->states.layout_runs[i];
    const dcp_adamw8bit_args_t *op = &adamw->ops8[i];
    const float *scale = op->v_scale; /* blocks lie in the order of elements */
    float v[PIECE];
    int64_t seen = 0, held = 0;
    while (seen < run->count) {
        int64_t rest = op->width - (seen + held) % op->width; /* of the row */
        int64_t count = rest < DCP_ADAMW8BIT_BLOCK ? rest : DCP_ADAMW8BIT_BLOCK;
        bool ends = seen + held == run->count;
        if (ends || held + count > PIECE) {
            visit(context, run->tensor, run->first + seen, held, v,
                  beta2_of(adamw, run));
            seen += held;
            held = 0;
            continue;
        }
        for (int64_t j = 0; j < count; j++) {
            v[held + j] = values[op->v[seen + held + j]] * *scale;
        }
        held += count;
        scale++;
    }
}

static void
second_moments8(const void *object, dcp_second_moment_visit_t visit, void *context)
{
    const adamw_t *adamw = object;
    float values[DCP_ADAMW8BIT_CODES];
    dcp_adamw8bit_v_values(values);
    for (int64_t i = 0; i < adamw->states.run_count; i++) {
        second_moments8_run(adamw, i, values, visit, context);
    }
}

static int64_t
bytes(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
      const int64_t *members, int64_t member_count, int32_t no_windows)
{
    (void)no_windows;
    return run_states_bytes(layout, tensors, members, member_count, &kinds,
                            (int64_t)sizeof(dcp_adamw_args_t))
           + (int64_t)sizeof(adamw_t);
}

static int64_t
bytes8(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
       const int64_t *members, int64_t member_count, int32_t no_windows)
{
    (void)no_windows;
    return run_states_bytes(layout, tensors, members, member_count, &kinds8,
                            (int64_t)sizeof(dcp_adamw8bit_args_t))
           + (int64_t)sizeof(adamw_t);
}

const optim_ops_t optim_adamw_ops = {
    .check = optim_check_adam,
    .create = create,
    .destroy = destroy,
    .step = step,
    .state_count = STATES,
    .states = infos,
    .state_shape = state_shape,
    .state_runs = state_runs,
    .second_moments = second_moments,
    .bytes = bytes,
};

const optim_ops_t optim_adamw8bit_ops = {
    .check = optim_check_adam,
    .create = create8,
    .destroy = destroy,
    .step = step,
    .state_count = STATES8,
    .states = infos8,
    .state_shape = state_shape,
    .state_runs = state_runs,
    .second_moments = second_moments8,
    .bytes = bytes8,
};
