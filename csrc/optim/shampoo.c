/* Shampoo: blocks of matrices with preconditioners of their own (Gupta et al. 2018,
 * arXiv 1802.09568; the form with blocks, grafting and stale roots: shampoo_block.c).
 *
 * A matrix is cut evenly into as few blocks as keep both sides <= block. A unit is a
 * panel: one row of blocks, contiguous in its tensor. Its owner keeps everything about
 * it - statistics and roots, m and v - so only the gradient travels there and the
 * update back (owner_rounds.c).
 *
 *   states   left, left_root    [blocks, bl, bl]   blocks in the order of rows, then
 *            right, right_root  [blocks, br, br]   columns; what a block that is one
 *            m, v               as the tensor      shorter does not use is 0
 *
 * Inverse roots are dear: every block gets new ones once in `every` steps, but not all
 * in the same step. Units in dealt order are spread over `every` turns by cost; units
 * of one turn are neighbours in that order, which go to different owners. So work is
 * even over ranks and over steps, but for the first step, which makes all. The turn of
 * a unit does not depend on the world, so neither do the bits.
 *
 * Blocks of a unit are tasks of the pool; each worker has a pool of one for its
 * products. Memory, blocks of 128: 24 bytes a parameter, divided by the ranks.
 */
#include "owner_rounds.h"
#include "shampoo_block.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>

enum {
    LEFT,
    RIGHT,
    LEFT_ROOT,
    RIGHT_ROOT,
    MEAN,
    SQUARE,
    STATES,
    ALIGN = 16, /* floats */
    MOST_BLOCK = 1024,
};

static const optim_state_info_t states[STATES] = {
    [LEFT] = {"shampoo.left", DCP_F32},
    [RIGHT] = {"shampoo.right", DCP_F32},
    [LEFT_ROOT] = {"shampoo.left_root", DCP_F32},
    [RIGHT_ROOT] = {"shampoo.right_root", DCP_F32},
    [MEAN] = {"shampoo.m", DCP_F32},
    [SQUARE] = {"shampoo.v", DCP_F32},
};

/* How the matrices of a tensor are cut. */
typedef struct grid {
    optim_matrices_t matrices;
    int64_t panels, columns; /* blocks down and across a matrix */
    int64_t left, right;     /* rows and columns of the largest block */
} grid_t;

typedef struct worker {
    dcp_pool_t *pool; /* owned; of one thread */
    dcp_queue_t *queue;
    void *scratch;
} worker_t;

typedef struct shampoo {
    const optim_context_t *context;
    optim_owners_t owners;
    optim_rounds_t *rounds;
    double *turns;    /* [unit_count] in [0, 1): of `every` steps */
    int64_t *numbers; /* [unit_count] in runs of this rank, -1: of another */
    float *memory;    /* states of own units, zero at first */
    dcp_state_run_t *runs[STATES]; /* each [run_count], by unit */
    int64_t run_count;
    worker_t *workers; /* [worker_count] */
    int32_t worker_count;
    dcp_optimizer_step_args_t args; /* of the step under way */
    int64_t unit;                   /* of the tasks under way */
    float *data;
} shampoo_t;

static int64_t
ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t
aligned(int64_t count)
{
    return ceil_div(count, ALIGN) * ALIGN;
}

static grid_t
grid_of(const dcp_optimizer_tensor_t *tensor)
{
    grid_t grid = {.matrices = optim_matrices_of(tensor)};
    if (grid.matrices.count == 0 || grid.matrices.rows == 0
        || grid.matrices.columns == 0) {
        return grid;
    }
    grid.panels = ceil_div(grid.matrices.rows, tensor->rule.block);
    grid.columns = ceil_div(grid.matrices.columns, tensor->rule.block);
    grid.left = ceil_div(grid.matrices.rows, grid.panels);
    grid.right = ceil_div(grid.matrices.columns, grid.columns);
    return grid;
}

/* Where part i of `count` equal parts begins; the first ones are one longer. */
static int64_t
part_start(int64_t total, int64_t count, int64_t i)
{
    int64_t longer = total % count;
    return i * (total / count) + (i < longer ? i : longer);
}

static bool
cut(const dcp_optimizer_tensor_t *tensor, int64_t unit, optim_unit_t *unit_p)
{
    grid_t grid = grid_of(tensor);
    if (unit >= grid.matrices.count * grid.panels) {
        return false;
    }
    int64_t rows = grid.matrices.rows, columns = grid.matrices.columns;
    int64_t panel = unit % grid.panels, start = part_start(rows, grid.panels, panel);
    unit_p->rows = part_start(rows, grid.panels, panel + 1) - start;
    unit_p->columns = columns;
    unit_p->first = (unit / grid.panels * rows + start) * columns;
    unit_p->count = unit_p->rows * columns;
    /* flops of products, and of roots, which run at a tenth of their speed */
    double r = (double)unit_p->rows, c = (double)grid.right;
    double roots = 80 * (r * r * r + c * c * c) / tensor->rule.every;
    unit_p->cost = (double)grid.columns * (4 * r * c * (r + c) + roots);
    return true;
}

static dcp_status_t
check(const dcp_optimizer_tensor_t *tensor, int64_t number)
{
    const dcp_optimizer_rule_t *rule = &tensor->rule;
    if (tensor->dim_count < 2) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "tensor %" PRId64 " has %d dimensions: SHAMPOO is for "
                        "matrices, of 2 or more; ADAMW is for the rest",
                        number, (int)tensor->dim_count);
    }
    if (rule->block < 1 || rule->block > MOST_BLOCK) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "block %" PRId64 " of tensor %" PRId64 " must lie in 1..%d",
                        rule->block, number, MOST_BLOCK);
    }
    if (rule->every < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "every %d of tensor %" PRId64 " must be >= 1",
                        (int)rule->every, number);
    }
    return optim_check_adam(tensor, number);
}

static int32_t
same_state(const dcp_optimizer_rule_t *from, const dcp_optimizer_rule_t *to)
{
    return from->block == to->block;
}

static void
put(void *object, const optim_piece_t *piece, int64_t first, int64_t count, float *to)
{
    const shampoo_t *shampoo = object;
    const dcp_optimizer_options_t *options = &shampoo->context->options;
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(options->layout, piece->rank, &runs, &run_count);
    const dcp_dbuffer_run_t *run = &runs[piece->run];
    const float *gradient =
        dcp_dbuffer_run_data(options->gradients, run) + first - run->first;
    const float scale = (float)shampoo->args.grad_scale;
    for (int64_t i = 0; i < count; i++) {
        to[i] = scale * gradient[i];
    }
}

static void
apply(void *object, const optim_piece_t *piece, int64_t first, int64_t count,
      const float *from)
{
    const shampoo_t *shampoo = object;
    const dcp_optimizer_options_t *options = &shampoo->context->options;
    const dcp_optimizer_rule_t *rule =
        &options->tensors[shampoo->owners.units[piece->unit].tensor].rule;
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(options->layout, piece->rank, &runs, &run_count);
    const dcp_dbuffer_run_t *run = &runs[piece->run];
    float *w = dcp_dbuffer_run_data(options->weights, run) + first - run->first;
    const float lr = (float)(shampoo->args.lr * rule->lr_scale);
    const float decay = (float)rule->weight_decay;
    for (int64_t i = 0; i < count; i++) {
        w[i] -= lr * (from[i] + decay * w[i]);
    }
}

static float *
state_of(const shampoo_t *shampoo, int32_t state, int64_t unit)
{
    return shampoo->runs[state][shampoo->numbers[unit]].data;
}

/* Block `task` of the unit under way. */
static dcp_status_t
block_task(void *context, int64_t task, int32_t worker)
{
    const shampoo_t *shampoo = context;
    const optim_unit_t *unit = &shampoo->owners.units[shampoo->unit];
    const dcp_optimizer_tensor_t *tensor =
        &shampoo->context->options.tensors[unit->tensor];
    const dcp_optimizer_rule_t *rule = &tensor->rule;
    grid_t grid = grid_of(tensor);
    int64_t column = part_start(unit->columns, grid.columns, task);
    int64_t left = task * grid.left * grid.left, right = task * grid.right * grid.right;
    const shampoo_block_t block = {
        .rows = unit->rows,
        .columns = part_start(unit->columns, grid.columns, task + 1) - column,
        .left = state_of(shampoo, LEFT, shampoo->unit) + left,
        .left_root = state_of(shampoo, LEFT_ROOT, shampoo->unit) + left,
        .left_stride = grid.left,
        .right = state_of(shampoo, RIGHT, shampoo->unit) + right,
        .right_root = state_of(shampoo, RIGHT_ROOT, shampoo->unit) + right,
        .right_stride = grid.right,
        .m = state_of(shampoo, MEAN, shampoo->unit) + column,
        .v = state_of(shampoo, SQUARE, shampoo->unit) + column,
        .data = shampoo->data + column,
        .stride = unit->columns,
    };
    int64_t turn = (int64_t)(shampoo->turns[shampoo->unit] * rule->every);
    double t = (double)(shampoo->args.update_count + 1);
    const shampoo_numbers_t numbers = {
        .beta1 = (float)rule->beta1,
        .beta2 = (float)rule->beta2,
        .eps = (float)rule->eps,
        .bias1 = (float)(1.0 - pow(rule->beta1, t)),
        .bias2 = (float)(1.0 - pow(rule->beta2, t)),
    };
    const worker_t *own = &shampoo->workers[worker];
    return shampoo_block_update(shampoo->context->options.device, own->queue, &block,
                                shampoo->args.update_count % rule->every == turn,
                                &numbers, own->scratch);
}

static dcp_status_t
compute(void *object, int64_t unit, float *data)
{
    shampoo_t *shampoo = object;
    int64_t tensor = shampoo->owners.units[unit].tensor;
    shampoo->unit = unit;
    shampoo->data = data;
    return dcp_pool_run(shampoo->context->options.pool,
                        grid_of(&shampoo->context->options.tensors[tensor]).columns,
                        block_task, shampoo);
}

static dcp_status_t
step(void *object, const dcp_optimizer_step_args_t *args)
{
    shampoo_t *shampoo = object;
    shampoo->args = *args;
    const optim_work_t work = {shampoo, put, compute, apply};
    return optim_rounds_run(shampoo->rounds, &work);
}

/* Elements of a state of a unit, and where they begin in its tensor's. */
static int64_t
unit_state(const optim_unit_t *unit, const grid_t *grid, int32_t state,
           int64_t *first_p)
{
    int64_t matrix_elements = grid->matrices.rows * grid->matrices.columns;
    int64_t within = unit->first % matrix_elements / grid->matrices.columns;
    /* the first panels are as high as the largest block, the rest one row lower */
    int64_t longer = grid->matrices.rows % grid->panels;
    int64_t low = grid->matrices.rows / grid->panels;
    int64_t panel =
        within < longer * (low + 1) ? within / (low + 1) : (within - longer) / low;
    int64_t first =
        (unit->first / matrix_elements * grid->panels + panel) * grid->columns;
    int64_t side = state == LEFT || state == LEFT_ROOT ? grid->left : grid->right;
    *first_p = state >= MEAN ? unit->first : first * side * side;
    return state >= MEAN ? unit->count : grid->columns * side * side;
}

/* Elements that the states of a rank's units take. */
static int64_t
state_elements(const optim_owners_t *owners, const dcp_optimizer_tensor_t *tensors,
               int32_t rank, int64_t *run_count_p)
{
    int64_t elements = 0, first;
    *run_count_p = 0;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        const optim_unit_t *unit = &owners->units[u];
        grid_t grid = grid_of(&tensors[unit->tensor]);
        if (unit->owner == rank) {
            (*run_count_p)++;
            for (int32_t state = 0; state < STATES; state++) {
                elements += aligned(unit_state(unit, &grid, state, &first));
            }
        }
    }
    return elements;
}

static void
place_states(shampoo_t *shampoo)
{
    const optim_owners_t *owners = &shampoo->owners;
    const dcp_optimizer_options_t *options = &shampoo->context->options;
    int64_t at = 0, start = 0;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        const optim_unit_t *unit = &owners->units[u];
        grid_t grid = grid_of(&options->tensors[unit->tensor]);
        shampoo->numbers[u] = -1;
        if (unit->owner != dcp_comm_rank(options->comm)) {
            continue;
        }
        for (int32_t state = 0; state < STATES; state++) {
            int64_t first, count = unit_state(unit, &grid, state, &first);
            shampoo->runs[state][at] = (dcp_state_run_t){
                .tensor = unit->tensor,
                .first = first,
                .count = count,
                .data = shampoo->memory + start,
            };
            start += aligned(count);
        }
        shampoo->numbers[u] = at++;
    }
}

/* Units in dealt order, spread over a cycle by the cost of their roots. */
static void
set_turns(shampoo_t *shampoo)
{
    const optim_owners_t *owners = &shampoo->owners;
    double total = 0, sum = 0;
    for (int64_t u = 0; u < owners->unit_count; u++) {
        total += owners->units[u].cost;
    }
    for (int64_t i = 0; i < owners->unit_count; i++) {
        int64_t u = owners->dealt[i];
        shampoo->turns[u] = sum / total;
        sum += owners->units[u].cost;
    }
}

static dcp_status_t
create_states(shampoo_t *shampoo)
{
    const dcp_optimizer_options_t *options = &shampoo->context->options;
    int64_t elements =
        state_elements(&shampoo->owners, options->tensors, dcp_comm_rank(options->comm),
                       &shampoo->run_count);
    void *memory;
    for (int32_t state = 0; state < STATES; state++) {
        DCP_TRY(dcp_alloc_array(shampoo->run_count, (int64_t)sizeof(dcp_state_run_t),
                                "runs of a state", &memory));
        shampoo->runs[state] = memory;
    }
    DCP_TRY(dcp_alloc_array(shampoo->owners.unit_count, (int64_t)sizeof(double),
                            "turns of roots", &memory));
    shampoo->turns = memory;
    DCP_TRY(dcp_alloc_array(shampoo->owners.unit_count, (int64_t)sizeof(int64_t),
                            "numbers of runs", &memory));
    shampoo->numbers = memory;
    DCP_TRY(dcp_alloc_zeroed(elements * (int64_t)sizeof(float), "state of shampoo",
                             &memory));
    shampoo->memory = memory;
    place_states(shampoo);
    set_turns(shampoo);
    return DCP_OK;
}

/* Scratch of a worker, for the largest blocks. */
static int64_t
scratch_bytes(const dcp_optimizer_tensor_t *tensors, const int64_t *members,
              int64_t member_count)
{
    int64_t most = 0;
    for (int64_t i = 0; i < member_count; i++) {
        grid_t grid = grid_of(&tensors[members[i]]);
        int64_t bytes = shampoo_block_scratch(grid.left, grid.right);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static dcp_status_t
create_workers(shampoo_t *shampoo)
{
    const optim_context_t *context = shampoo->context;
    int32_t count = dcp_pool_size(context->options.pool);
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(count * (int64_t)sizeof(worker_t), "workers", &memory));
    shampoo->workers = memory;
    shampoo->worker_count = count;
    int64_t bytes = scratch_bytes(context->options.tensors, context->members,
                                  context->member_count);
    for (int32_t i = 0; i < count; i++) {
        worker_t *worker = &shampoo->workers[i];
        DCP_TRY(dcp_pool_create(1, &worker->pool));
        DCP_TRY(context->options.device->queue_create(worker->pool, &worker->queue));
        DCP_TRY(dcp_alloc(bytes, "scratch of shampoo", &worker->scratch));
    }
    return DCP_OK;
}

static dcp_status_t
fill(shampoo_t *shampoo)
{
    const optim_context_t *context = shampoo->context;
    const dcp_optimizer_options_t *options = &context->options;
    DCP_TRY(optim_owners_init(&shampoo->owners, options->layout,
                              dcp_comm_size(options->comm), options->tensors,
                              context->members, context->member_count, cut,
                              options->no_windows));
    DCP_TRY(create_states(shampoo));
    DCP_TRY(create_workers(shampoo));
    return optim_rounds_create(context, &shampoo->owners, &shampoo->rounds);
}

static void
destroy(void *object)
{
    shampoo_t *shampoo = object;
    if (shampoo == NULL) {
        return;
    }
    optim_rounds_destroy(shampoo->rounds);
    for (int32_t i = 0; i < shampoo->worker_count; i++) {
        worker_t *worker = &shampoo->workers[i];
        dcp_free(worker->scratch);
        if (worker->queue != NULL) {
            shampoo->context->options.device->queue_destroy(worker->queue);
        }
        dcp_pool_destroy(worker->pool);
    }
    dcp_free(shampoo->workers);
    dcp_free(shampoo->memory);
    dcp_free(shampoo->numbers);
    dcp_free(shampoo->turns);
    for (int32_t state = STATES - 1; state >= 0; state--) {
        dcp_free(shampoo->runs[state]);
    }
    optim_owners_fini(&shampoo->owners);
    dcp_free(shampoo);
}

static dcp_status_t
create(const optim_context_t *context, void **object_p)
{
    void *memory;
    dcp_status_t status =
        dcp_alloc_zeroed((int64_t)sizeof(shampoo_t), "shampoo", &memory);
    if (status != DCP_OK) {
        return status;
    }
    shampoo_t *shampoo = memory;
    shampoo->context = context;
    status = fill(shampoo);
    if (status != DCP_OK) {
        destroy(shampoo);
        return status;
    }
    *object_p = shampoo;
    return DCP_OK;
}

static void
state_shape(const void *object, int32_t state, int64_t tensor, int32_t *dim_count_p,
            int64_t *shape)
{
    const shampoo_t *shampoo = object;
    const dcp_optimizer_tensor_t *of = &shampoo->context->options.tensors[tensor];
    if (state >= MEAN) {
        *dim_count_p = of->dim_count;
        for (int32_t i = 0; i < of->dim_count; i++) {
            shape[i] = of->shape[i];
        }
        return;
    }
    grid_t grid = grid_of(of);
    *dim_count_p = 3;
    shape[0] = grid.matrices.count * grid.panels * grid.columns;
    shape[1] = shape[2] = state == LEFT || state == LEFT_ROOT ? grid.left : grid.right;
}

static void
state_runs(const void *object, int32_t state, const dcp_state_run_t **runs_p,
           int64_t *run_count_p)
{
    const shampoo_t *shampoo = object;
    *runs_p = shampoo->runs[state];
    *run_count_p = shampoo->run_count;
}

/* Of one worker; scratch of its products, which pools keep, included. */
static int64_t
worker_bytes(const dcp_optimizer_tensor_t *tensors, const int64_t *members,
             int64_t member_count)
{
    const int64_t pool_bytes = 16384;
    int64_t side = 0;
    for (int64_t i = 0; i < member_count; i++) {
        int64_t block = tensors[members[i]].rule.block;
        side = block > side ? block : side;
    }
    return scratch_bytes(tensors, members, member_count) + pool_bytes
           + 2 * (side + 96) * (side + 32) * (int64_t)sizeof(float);
}

static int64_t
bytes(const dcp_dbuffer_layout_t *layout, const dcp_optimizer_tensor_t *tensors,
      const int64_t *members, int64_t member_count, int32_t no_windows)
{
    optim_owners_t owners;
    int32_t rank_count = dcp_dbuffer_layout_rank_count(layout);
    int64_t most = 0;
    if (optim_owners_init(&owners, layout, rank_count, tensors, members, member_count,
                          cut, no_windows)
        != DCP_OK) {
        optim_owners_fini(&owners);
        return INT64_MAX; /* not even the plan fits */
    }
    for (int32_t rank = 0; rank < rank_count; rank++) {
        int64_t run_count;
        int64_t here =
            state_elements(&owners, tensors, rank, &run_count) * (int64_t)sizeof(float);
        here += run_count * STATES * (int64_t)sizeof(dcp_state_run_t);
        most = here > most ? here : most;
    }
    most += worker_bytes(tensors, members, member_count) + optim_owners_bytes(&owners)
            + owners.unit_count * (int64_t)(sizeof(double) + sizeof(int64_t))
            + optim_rounds_bytes(&owners, no_windows)
            + (int64_t)(sizeof(shampoo_t) + sizeof(worker_t));
    optim_owners_fini(&owners);
    return most;
}

const optim_ops_t optim_shampoo_ops = {
    .check = check,
    .same_state = same_state,
    .create = create,
    .destroy = destroy,
    .step = step,
    .state_count = STATES,
    .states = states,
    .state_shape = state_shape,
    .state_runs = state_runs,
    .bytes = bytes,
};
