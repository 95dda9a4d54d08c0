/* Muon: every matrix moves along the orthogonal factor of its momentum (Jordan et al.
 * 2024), scaled so that AdamW's learning rate and decay fit (Moonlight, arXiv
 * 2502.16982, section 2.2).
 *
 *   m = momentum m + g        u = g + momentum m  (nesterov)  or  m
 *   w -= lr (0.2 sqrt(max(rows, columns)) O + decay w),  O = Newton-Schulz(u)
 *
 * m lies where the shard lies and is keyed like the weights. u travels to the one owner
 * of its matrix, O comes back (owner_rounds.c): Newton-Schulz of a part of a matrix is
 * not the part of Newton-Schulz. A tensor of more than two dimensions is as many
 * matrices as its leading dimensions count (experts [E, a, b]), each with its own
 * owner.
 *
 * Cost a step, P elements: 20 P bytes beside carrying 2 x 4 P, and per matrix about
 * iterations (4 n^2 m + 2 n^3) flops (newton_schulz.c): against the 6 flops a parameter
 * and token of training that is 20/6 n / tokens of a step, few percent.
 */
#include "newton_schulz.h"
#include "owner_rounds.h"
#include "run_states.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>

enum { MOST_ITERATIONS = 100 };

static const optim_state_info_t states[] = {{"muon.momentum", DCP_F32}};

static const run_states_kinds_t kinds = {.count = 1, .infos = states};

typedef struct muon {
    const optim_context_t *context;
    optim_owners_t owners;
    optim_rounds_t *rounds;               /* owned */
    dcp_queue_t *queue;                   /* owned */
    float *scratch;                       /* owned; for the largest own matrix */
    run_states_t momentum;                /* owned */
    const dcp_dbuffer_run_t *layout_runs; /* of this rank */
    int64_t *numbers; /* owned; by run of the layout: its number in momentum */
    dcp_optimizer_step_args_t args; /* of the step under way */
} muon_t;

static bool
cut(const dcp_optimizer_tensor_t *tensor, int64_t unit, optim_unit_t *unit_p)
{
    optim_matrices_t matrices = optim_matrices_of(tensor);
    int64_t rows = matrices.rows, columns = matrices.columns;
    if (unit >= matrices.count || rows == 0 || columns == 0) {
        return false;
    }
    double n = (double)(rows < columns ? rows : columns);
    double m = (double)(rows < columns ? columns : rows);
    unit_p->rows = rows;
    unit_p->columns = columns;
    unit_p->count = rows * columns;
    unit_p->first = unit * unit_p->count;
    unit_p->cost = tensor->rule.iterations * (4 * n * n * m + 2 * n * n * n) + n * m;
    return true;
}

static dcp_status_t
check(const dcp_optimizer_tensor_t *tensor, int64_t number)
{
    const dcp_optimizer_rule_t *rule = &tensor->rule;
    if (tensor->dim_count < 2) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "tensor %" PRId64 " has %d dimensions: MUON is for matrices, "
                        "of 2 or more; ADAMW is for the rest",
                        number, (int)tensor->dim_count);
    }
    const double below_one = 1.0 - 0x1p-24; /* what rounds to 1 in fp32 is 1 */
    DCP_TRY(optim_check_in("momentum", rule->momentum, 0, below_one, "lie in [0, 1)",
                           number));
    if (rule->iterations < 1 || rule->iterations > MOST_ITERATIONS) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "iterations %d of tensor %" PRId64 " must lie in 1..%d",
                        (int)rule->iterations, number, MOST_ITERATIONS);
    }
    return DCP_OK;
}

static const dcp_optimizer_rule_t *
rule_of(const muon_t *muon, int64_t unit)
{
    return &muon->context->options.tensors[muon->owners.units[unit].tensor].rule;
}

static void
put(void *object, const optim_piece_t *piece, int64_t first, int64_t count, float *to)
{
    const muon_t *muon = object;
    const dcp_optimizer_rule_t *rule = rule_of(muon, piece->unit);
    const dcp_dbuffer_run_t *run = &muon->layout_runs[piece->run];
    const dcp_state_run_t *state = &muon->momentum.runs[0][muon->numbers[piece->run]];
    const float *gradient = dcp_dbuffer_run_data(muon->context->options.gradients, run)
                            + first - run->first;
    float *momentum = (float *)state->data + first - run->first;
    const float mu = (float)rule->momentum, scale = (float)muon->args.grad_scale;
    if (rule->nesterov) {
        for (int64_t i = 0; i < count; i++) {
            float g = scale * gradient[i];
            float m = mu * momentum[i] + g;
            momentum[i] = m;
            to[i] = g + mu * m;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        momentum[i] = mu * momentum[i] + scale * gradient[i];
        to[i] = momentum[i];
    }
}

static dcp_status_t
compute(void *object, int64_t unit, float *data)
{
    const muon_t *muon = object;
    const optim_unit_t *of = &muon->owners.units[unit];
    return optim_newton_schulz(muon->context->options.device, muon->queue, of->rows,
                               of->columns, rule_of(muon, unit)->iterations, data,
                               muon->scratch);
}

static void
apply(void *object, const optim_piece_t *piece, int64_t first, int64_t count,
      const float *from)
{
    const muon_t *muon = object;
    const dcp_optimizer_rule_t *rule = rule_of(muon, piece->unit);
    const optim_unit_t *unit = &muon->owners.units[piece->unit];
    const dcp_dbuffer_run_t *run = &muon->layout_runs[piece->run];
    float *w =
        dcp_dbuffer_run_data(muon->context->options.weights, run) + first - run->first;
    int64_t larger = unit->rows > unit->columns ? unit->rows : unit->columns;
    const float lr = (float)(muon->args.lr * rule->lr_scale);
    const float scale = (float)(0.2 * sqrt((double)larger));
    const float decay = (float)rule->weight_decay;
    for (int64_t i = 0; i < count; i++) {
        w[i] -= lr * (scale * from[i] + decay * w[i]);
    }
}

static dcp_status_t
step(void *object, const dcp_optimizer_step_args_t *args)
{
    muon_t *muon = object;
    muon->args = *args;
    const optim_work_t work = {muon, put, compute, apply};
    return optim_rounds_run(muon->rounds, &work);
}

static dcp_status_t
create_momentum(muon_t *muon)
{
    const dcp_optimizer_options_t *options = &muon->context->options;
    int64_t run_count;
    DCP_TRY(run_states_create(muon->context, &kinds, &muon->momentum));
    dcp_dbuffer_layout_runs(options->layout, dcp_comm_rank(options->comm),
                            &muon->layout_runs, &run_count);
    void *memory;
    DCP_TRY(dcp_alloc_array(run_count, (int64_t)sizeof(int64_t), "numbers of runs",
                            &memory));
    muon->numbers = memory;
    for (int64_t i = 0; i < muon->momentum.run_count; i++) {
        muon->numbers[muon->momentum.layout_runs[i] - muon->layout_runs] = i;
    }
    return DCP_OK;
}

/* Floats of scratch for the own matrix that needs most. */
static int64_t
scratch_of(const optim_owners_t *owners, int32_t rank)
{
    int64_t most = 0;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        const optim_unit_t *unit = &owners->units[u];
        int64_t floats = optim_newton_schulz_scratch(unit->rows, unit->columns);
        most = unit->owner == rank && floats > most ? floats : most;
    }
    return most;
}

static dcp_status_t
fill(muon_t *muon)
{
    const optim_context_t *context = muon->context;
    const dcp_optimizer_options_t *options = &context->options;
    DCP_TRY(optim_owners_init(
        &muon->owners, options->layout, dcp_comm_size(options->comm), options->tensors,
        context->members, context->member_count, cut, options->no_windows));
    DCP_TRY(create_momentum(muon));
    int64_t floats = scratch_of(&muon->owners, dcp_comm_rank(options->comm));
    void *memory;
    DCP_TRY(dcp_alloc_array(floats, (int64_t)sizeof(float), "scratch of Newton-Schulz",
                            &memory));
    muon->scratch = memory;
    DCP_TRY(options->device->queue_create(options->pool, &muon->queue));
    return optim_rounds_create(context, &muon->owners, &muon->rounds);
}

static void
destroy(void *object)
{
    muon_t *muon = object;
    if (muon == NULL) {
        return;
    }
    optim_rounds_destroy(muon->rounds);
    if (muon->queue != NULL) {
        muon->context->options.device->queue_destroy(muon->queue);
    }
    dcp_free(muon->scratch);
    dcp_free(muon->numbers);
    run_states_destroy(&muon->momentum);
    optim_owners_fini(&muon->owners);
    dcp_free(muon);
}

static dcp_status_t
create(const optim_context_t *context, void **object_p)
{
    void *memory;
    dcp_status_t status = dcp_alloc_zeroed((int64_t)sizeof(muon_t), "muon", &memory);
    if (status != DCP_OK) {
        return status;
    }
    muon_t *muon = memory;
    muon->context = context;
    status = fill(muon);
    if (status != DCP_OK) {
        destroy(muon);
        return status;
    }
    *object_p = muon;
    return DCP_OK;
}

static void
state_shape(const void *object, int32_t state, int64_t tensor, int32_t *dim_count_p,
            int64_t *shape)
{
    const muon_t *muon = object;
    run_states_shape(muon->context, &kinds, state, tensor, dim_count_p, shape);
}

static void
state_runs(const void *object, int32_t state, const dcp_state_run_t **runs_p,
           int64_t *run_count_p)
{
    const muon_t *muon = object;
    *runs_p = muon->momentum.runs[state];
    *run_count_p = muon->momentum.run_count;
}

static int64_t
bytes(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
      const int64_t *members, int64_t member_count, int32_t no_windows)
{
    optim_owners_t owners;
    int32_t rank_count = dcp_dbuffer_layout_rank_count(layout);
    int64_t scratch = 0, most_runs = 0;
    if (optim_owners_init(&owners, layout, rank_count, tensors, members, member_count,
                          cut, no_windows)
        != DCP_OK) {
        optim_owners_fini(&owners);
        return INT64_MAX; /* not even the plan fits */
    }
    for (int32_t rank = 0; rank < rank_count; rank++) {
        const dcp_dbuffer_run_t *runs;
        int64_t run_count, floats = scratch_of(&owners, rank);
        dcp_dbuffer_layout_runs(layout, rank, &runs, &run_count);
        scratch = floats > scratch ? floats : scratch;
        most_runs = run_count > most_runs ? run_count : most_runs;
    }
    int64_t total = run_states_bytes(layout, tensors, members, member_count, &kinds, 0)
                    + scratch * (int64_t)sizeof(float)
                    + most_runs * (int64_t)sizeof(int64_t) + optim_owners_bytes(&owners)
                    + optim_rounds_bytes(&owners, no_windows) + (int64_t)sizeof(muon_t);
    optim_owners_fini(&owners);
    return total;
}

const optim_ops_t optim_muon_ops = {
    .check = check,
    .create = create,
    .destroy = destroy,
    .step = step,
    .state_count = 1,
    .states = states,
    .state_shape = state_shape,
    .state_runs = state_runs,
    .bytes = bytes,
};
