/* optim: optimizers of whole matrices. Given identical gradients, weights and state are
 * the same bits in every world, with windows and with messages. Ranks are threads over
 * the shm transport. */
#include "check.h"
#include "rank_threads.h"

#include "optim/optim_private.h"

#include "dcp/rng.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { RANK_SLOTS = 6, TENSOR_SLOTS = 10, STATE_SLOTS = 6 };

typedef struct model {
    dcp_optimizer_tensor_t tensors[TENSOR_SLOTS];
    int64_t count;
} model_t;

typedef struct world {
    const model_t *model;
    const optim_ops_t *ops;
    int32_t size;
    int32_t no_windows;
    int64_t step_count;
    float gradient_scale; /* 0: all gradients are zero */
    const dcp_device_ops_t *device;
    /* what all ranks hold together, by tensor; owned */
    float *weights[TENSOR_SLOTS];
    float *states[STATE_SLOTS][TENSOR_SLOTS];
    const struct world *load; /* its state and weights are where this one begins */
    int64_t first_step;
    bool fails;            /* every rank is to end with an error */
    int32_t numeric_count; /* ranks that found the numbers at fault */
} world_t;

static int64_t
elements_of(const dcp_optimizer_tensor_t *tensor)
{
    int64_t count = 1;
    for (int32_t d = 0; d < tensor->dim_count; d++) {
        count *= tensor->shape[d];
    }
    return count;
}

static float
value_at(uint64_t seed, int64_t tensor, int64_t element)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, seed, (uint64_t)tensor << 40 | (uint64_t)element);
    return (float)dcp_rng_normal(&rng);
}

static dcp_optimizer_tensor_t
matrix(dcp_optimizer_kind_t kind, int32_t dim_count, int64_t a, int64_t b, int64_t c)
{
    dcp_optimizer_tensor_t tensor = {.dim_count = dim_count, .shape = {a, b, c}};
    tensor.rule = (dcp_optimizer_rule_t){
        .kind = kind,
        .lr_scale = 1,
        .weight_decay = 0.1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .momentum = 0.95,
        .nesterov = 1,
        .iterations = 5,
        .block = 16,
        .every = 3,
    };
    return tensor;
}

/* Wide and tall ones, one of one row, one of one column, experts, an empty one, one of
 * another kind in between. */
static model_t
odd_model(dcp_optimizer_kind_t kind)
{
    model_t m = {.count = 9};
    m.tensors[0] = matrix(kind, 2, 37, 20, 0);
    m.tensors[1] = matrix(kind, 3, 5, 9, 14);
    m.tensors[2] = matrix(DCP_OPTIMIZER_ADAMW, 1, 50, 0, 0);
    m.tensors[3] = matrix(kind, 2, 1, 33, 0);
    m.tensors[4] = matrix(kind, 2, 48, 3, 0);
    m.tensors[5] = matrix(kind, 2, 0, 7, 0);
    m.tensors[6] = matrix(kind, 2, 29, 1, 0);
    m.tensors[7] = matrix(kind, 2, 64, 65, 0);
    m.tensors[8] = matrix(kind, 2, 2, 2, 0);
    m.tensors[3].rule.lr_scale = 0.5;
    m.tensors[4].rule.nesterov = 0;
    m.tensors[7].rule.weight_decay = 0;
    return m;
}

typedef struct rank_setup {
    dcp_comm_t *comm;
    dcp_pool_t *pool;
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_t *weights, *gradients;
    int64_t members[TENSOR_SLOTS];
    optim_context_t context;
    void *object;
} rank_setup_t;

static void
teardown(const world_t *world, rank_setup_t *s)
{
    if (s->object != NULL) {
        world->ops->destroy(s->object);
    }
    dcp_dbuffer_destroy(s->gradients);
    dcp_dbuffer_destroy(s->weights);
    dcp_dbuffer_layout_destroy(s->layout);
    dcp_pool_destroy(s->pool);
    dcp_comm_destroy(s->comm);
}

static dcp_status_t
make_layout(const model_t *m, int32_t size, dcp_dbuffer_layout_t **layout_p)
{
    dcp_dbuffer_tensor_t tensors[TENSOR_SLOTS];
    for (int64_t t = 0; t < m->count; t++) {
        const dcp_optimizer_tensor_t *from = &m->tensors[t];
        int64_t width = from->dim_count > 1 ? from->shape[from->dim_count - 1] : 1;
        tensors[t] = (dcp_dbuffer_tensor_t){.row_count = elements_of(from) / width,
                                            .row_width = width,
                                            .group = t < 3 ? 0 : 1};
    }
    return dcp_dbuffer_layout_create(tensors, m->count, size, 1, DCP_ORDER_MODEL,
                                     layout_p);
}

static dcp_status_t
setup(world_t *world, int32_t rank, const char *run_id, rank_setup_t *s)
{
    const model_t *m = world->model;
    dcp_comm_options_t options = {.rank = rank, .size = world->size, .run_id = run_id};
    DCP_TRY(world->size == 1 ? dcp_comm_create_self(&s->comm)
                             : dcp_comm_create_shm(&options, &s->comm));
    DCP_TRY(dcp_pool_create(1 + rank % 2, &s->pool));
    DCP_TRY(make_layout(m, world->size, &s->layout));
    DCP_TRY(dcp_dbuffer_create(
        s->comm, s->layout, world->no_windows ? DCP_DBUFFER_SHARD : DCP_DBUFFER_SHARED,
        &s->weights));
    DCP_TRY(dcp_dbuffer_create(
        s->comm, s->layout, world->no_windows ? DCP_DBUFFER_LOCAL : DCP_DBUFFER_PRIVATE,
        &s->gradients));
    s->context.options = (dcp_optimizer_options_t){
        .comm = s->comm,
        .device = world->device,
        .pool = s->pool,
        .layout = s->layout,
        .tensors = m->tensors,
        .tensor_count = m->count,
        .weights = s->weights,
        .gradients = s->gradients,
        .no_windows = world->no_windows,
    };
    s->context.members = s->members;
    for (int64_t t = 0; t < m->count; t++) {
        if (m->tensors[t].rule.kind != DCP_OPTIMIZER_ADAMW) {
            DCP_TRY(world->ops->check(&m->tensors[t], t));
            s->members[s->context.member_count++] = t;
        }
    }
    return world->ops->create(&s->context, &s->object);
}

/* Sets, or takes, what this rank holds of weights; gradients of a step. */
static void
fill_weights(world_t *world, rank_setup_t *s, bool take)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(s->layout, dcp_comm_rank(s->comm), &runs, &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        float *w = dcp_dbuffer_run_data(s->weights, &runs[i]);
        for (int64_t k = 0; k < runs[i].count; k++) {
            int64_t element = runs[i].first + k;
            if (take) {
                world->weights[runs[i].tensor][element] = w[k];
            } else {
                w[k] = world->load != NULL
                           ? world->load->weights[runs[i].tensor][element]
                           : value_at(1, runs[i].tensor, element);
            }
        }
    }
}

static void
fill_gradients(const world_t *world, rank_setup_t *s, int64_t step)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(s->layout, dcp_comm_rank(s->comm), &runs, &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        float *g = dcp_dbuffer_run_data(s->gradients, &runs[i]);
        for (int64_t k = 0; k < runs[i].count; k++) {
            g[k] = world->gradient_scale
                   * value_at(2 + (uint64_t)step, runs[i].tensor, runs[i].first + k);
        }
    }
}

/* Copies every run of every state from or to what all ranks hold together. */
static void
move_states(world_t *world, rank_setup_t *s, bool take)
{
    for (int32_t state = 0; state < world->ops->state_count; state++) {
        const dcp_state_run_t *runs;
        int64_t run_count;
        world->ops->state_runs(s->object, state, &runs, &run_count);
        for (int64_t i = 0; i < run_count; i++) {
            size_t bytes = (size_t)runs[i].count * sizeof(float);
            float *together =
                (take ? world : world->load)->states[state][runs[i].tensor];
            if (take) {
                memcpy(together + runs[i].first, runs[i].data, bytes);
            } else {
                memcpy(runs[i].data, together + runs[i].first, bytes);
            }
        }
    }
}

static dcp_status_t
use_rank(world_t *world, rank_setup_t *s)
{
    fill_weights(world, s, false);
    if (world->load != NULL) {
        move_states(world, s, false);
    }
    for (int64_t step = 0; step < world->step_count; step++) {
        fill_gradients(world, s, world->first_step + step);
        const dcp_optimizer_step_args_t args = {
            .update_count = world->first_step + step, .lr = 0.02, .grad_scale = 0.5};
        DCP_TRY(world->ops->step(s->object, &args));
        DCP_TRY(dcp_comm_barrier(s->comm));
    }
    fill_weights(world, s, true);
    move_states(world, s, true);
    return dcp_comm_barrier(s->comm);
}

typedef struct rank_task {
    world_t *world;
    int32_t rank;
    char run_id[64];
    dcp_status_t status;
    char message[256];
} rank_task_t;

static void *
rank_main(void *argument)
{
    rank_task_t *task = argument;
    rank_setup_t s = {0};
    task->status = setup(task->world, task->rank, task->run_id, &s);
    if (task->status == DCP_OK) {
        task->status = use_rank(task->world, &s);
    }
    if (task->status != DCP_OK) {
        snprintf(task->message, sizeof task->message, "%s", dcp_last_error());
        if (s.comm != NULL) {
            dcp_comm_abort(s.comm, task->message);
        }
    }
    teardown(task->world, &s);
    return NULL;
}

/* Elements of a state of a tensor, from an object of one rank; -1: it has none. */
static int64_t
state_elements(const world_t *world, const void *object, int32_t state, int64_t tensor)
{
    int32_t dim_count = -1;
    int64_t shape[DCP_OPTIMIZER_DIMS], count = 1;
    world->ops->state_shape(object, state, tensor, &dim_count, shape);
    for (int32_t d = 0; d < dim_count; d++) {
        count *= shape[d];
    }
    return dim_count < 0 ? -1 : count;
}

/* Room for what ranks hold together; NaN where nobody writes. */
static void
alloc_together(world_t *world)
{
    world_t alone = {.model = world->model,
                     .ops = world->ops,
                     .size = 1,
                     .device = dcp_device_cpu()};
    rank_setup_t s = {0};
    CHECK_OK(setup(&alone, 0, "", &s));
    for (int64_t t = 0; t < world->model->count; t++) {
        int64_t count = elements_of(&world->model->tensors[t]);
        world->weights[t] = malloc((size_t)count * sizeof(float) + 1);
        for (int32_t state = 0; state < world->ops->state_count; state++) {
            bool member = world->model->tensors[t].rule.kind != DCP_OPTIMIZER_ADAMW;
            int64_t elements = member ? state_elements(world, s.object, state, t) : 0;
            elements = elements < 0 ? 0 : elements;
            float *together = malloc((size_t)elements * sizeof(float) + 1);
            for (int64_t i = 0; i < elements; i++) {
                together[i] = NAN;
            }
            world->states[state][t] = together;
        }
    }
    teardown(&alone, &s);
}

static void
free_world(world_t *world)
{
    for (int64_t t = 0; t < TENSOR_SLOTS; t++) {
        free(world->weights[t]);
        for (int32_t state = 0; state < STATE_SLOTS; state++) {
            free(world->states[state][t]);
        }
    }
}

static void
run_world(world_t *world)
{
    static int32_t number;
    rank_task_t tasks[RANK_SLOTS];
    world->device = world->device == NULL ? dcp_device_cpu() : world->device;
    alloc_together(world);
    number++;
    for (int32_t rank = 0; rank < world->size; rank++) {
        tasks[rank] = (rank_task_t){.world = world, .rank = rank};
        snprintf(tasks[rank].run_id, sizeof tasks[rank].run_id, "test-matrix-%d-%d",
                 (int)getpid(), (int)number);
    }
    run_rank_threads(rank_main, tasks, sizeof tasks[0], world->size);
    for (int32_t rank = 0; rank < world->size; rank++) {
        CHECK((tasks[rank].status != DCP_OK) == world->fails);
        world->numeric_count += tasks[rank].status == DCP_ERR_NUMERIC;
        if (tasks[rank].status != DCP_OK && !world->fails) {
            printf("rank %d of %d: %s\n", rank, world->size, tasks[rank].message);
        }
    }
}

/* Tensors of which weights or a state differ in some bit, or are not covered. */
static int64_t
differences(const world_t *a, const world_t *b)
{
    int64_t different = 0;
    world_t alone = {
        .model = a->model, .ops = a->ops, .size = 1, .device = dcp_device_cpu()};
    rank_setup_t s = {0};
    CHECK_OK(setup(&alone, 0, "", &s));
    for (int64_t t = 0; t < a->model->count; t++) {
        size_t bytes = (size_t)elements_of(&a->model->tensors[t]) * sizeof(float);
        different += memcmp(a->weights[t], b->weights[t], bytes) != 0;
        if (a->model->tensors[t].rule.kind == DCP_OPTIMIZER_ADAMW) {
            continue;
        }
        for (int32_t state = 0; state < a->ops->state_count; state++) {
            int64_t count = state_elements(a, s.object, state, t);
            for (int64_t i = 0; i < count; i++) {
                if (memcmp(&a->states[state][t][i], &b->states[state][t][i], 4) != 0
                    || isnan(a->states[state][t][i])) {
                    different++;
                    break;
                }
            }
        }
    }
    teardown(&alone, &s);
    return different;
}

static void
check_worlds(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    model_t m = odd_model(kind);
    world_t one = {
        .model = &m, .ops = ops, .size = 1, .step_count = 5, .gradient_scale = 1};
    run_world(&one);
    for (int32_t size = 1; size <= RANK_SLOTS; size++) {
        for (int32_t no_windows = 0; no_windows <= 1; no_windows++) {
            world_t many = one;
            many.size = size;
            many.no_windows = no_windows;
            many.device = size == 2 ? dcp_device_late() : dcp_device_cpu();
            run_world(&many);
            CHECK(differences(&one, &many) == 0);
            free_world(&many);
        }
    }
    free_world(&one);
}

/* Two steps on n ranks, saved, loaded, and three more on m: as five on one. */
static void
check_resume(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    model_t m = odd_model(kind);
    world_t one = {
        .model = &m, .ops = ops, .size = 1, .step_count = 5, .gradient_scale = 1};
    run_world(&one);
    for (int32_t size = 1; size <= RANK_SLOTS; size++) {
        world_t saved = {.model = &m,
                         .ops = ops,
                         .size = size,
                         .step_count = 2,
                         .gradient_scale = 1,
                         .no_windows = size % 2};
        run_world(&saved);
        world_t loaded = {.model = &m,
                          .ops = ops,
                          .size = RANK_SLOTS + 1 - size,
                          .step_count = 3,
                          .first_step = 2,
                          .gradient_scale = 1,
                          .load = &saved};
        run_world(&loaded);
        CHECK(differences(&one, &loaded) == 0);
        free_world(&loaded);
        free_world(&saved);
    }
    free_world(&one);
}

/* Nothing moves but by decay, nothing becomes NaN. */
static void
check_zero_gradient(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    model_t m = odd_model(kind);
    world_t world = {
        .model = &m, .ops = ops, .size = 3, .step_count = 2, .gradient_scale = 0};
    run_world(&world);
    int64_t wrong = 0;
    for (int64_t t = 0; t < m.count; t++) {
        const dcp_optimizer_rule_t *rule = &m.tensors[t].rule;
        bool member = rule->kind != DCP_OPTIMIZER_ADAMW;
        double keep = member ? 1 - 0.02 * rule->lr_scale * rule->weight_decay : 1;
        for (int64_t i = 0; i < elements_of(&m.tensors[t]); i++) {
            double expected = value_at(1, t, i) * keep * keep;
            wrong += !(fabs(world.weights[t][i] - expected) <= 1e-6 * fabs(expected));
        }
    }
    CHECK(wrong == 0);
    free_world(&world);
}

/* More than one round, and matrices of more than one strip: held bytes stay below what
 * was promised. */
static void
check_bytes(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    model_t m = {.count = 4};
    m.tensors[0] = matrix(kind, 2, 400, 700, 0);
    m.tensors[1] = matrix(kind, 3, 3, 600, 500);
    m.tensors[2] = matrix(kind, 2, 900, 500, 0);
    m.tensors[3] = matrix(kind, 2, 7, 3, 0);
    int64_t members[] = {0, 1, 2, 3};
    for (int64_t t = 0; t < m.count; t++) {
        m.tensors[t].rule.block = 128;
    }
    world_t world = {.model = &m,
                     .ops = ops,
                     .size = 1,
                     .step_count = 1,
                     .gradient_scale = 1,
                     .device = dcp_device_cpu()};
    alloc_together(&world);
    rank_setup_t s = {0};
    CHECK_OK(setup(&world, 0, "", &s));
    int64_t bound = ops->bytes(s.layout, m.tensors, members, m.count, 0);
    ops->destroy(s.object);
    s.object = NULL;
    int64_t before = dcp_alloc_held_bytes();
    CHECK_OK(ops->create(&s.context, &s.object));
    dcp_alloc_reset_peak();
    CHECK_OK(use_rank(&world, &s));
    int64_t held = dcp_alloc_peak_bytes() - before - dcp_pool_scratch_bytes(s.pool);
    CHECK(held <= bound);
    CHECK(bound < held + held / 4);
    teardown(&world, &s);
    free_world(&world);
}

/* Several rounds in worlds of several ranks. */
static void
check_rounds(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    model_t m = {.count = 3};
    m.tensors[0] = matrix(kind, 3, 5, 260, 250);
    m.tensors[1] = matrix(kind, 3, 20, 250, 300);
    m.tensors[2] = matrix(kind, 2, 230, 1300, 0);
    for (int64_t t = 0; t < m.count; t++) {
        m.tensors[t].rule.block = 128;
        m.tensors[t].rule.iterations = 1;
    }
    world_t one = {
        .model = &m, .ops = ops, .size = 1, .step_count = 1, .gradient_scale = 1};
    run_world(&one);
    for (int32_t no_windows = 0; no_windows <= 1; no_windows++) {
        world_t two = one;
        two.size = 2 + no_windows;
        two.no_windows = no_windows;
        two.device = NULL;
        run_world(&two);
        CHECK(differences(&one, &two) == 0);
        free_world(&two);
    }
    free_world(&one);
}

/* cases O-05 and O-08: a random 256 x 256 matrix alone, and one of 2 x 2 of which most
 * ranks have nothing, are what one rank makes of them. */
static void
check_alone(const optim_ops_t *ops, dcp_optimizer_kind_t kind, int64_t side)
{
    model_t m = {.count = 1};
    m.tensors[0] = matrix(kind, 2, side, side, 0);
    m.tensors[0].rule.block = 128;
    world_t one = {
        .model = &m, .ops = ops, .size = 1, .step_count = 2, .gradient_scale = 1};
    run_world(&one);
    for (int32_t size = 2; size <= 4; size++) {
        world_t many = one;
        many.size = size;
        many.no_windows = size == 3;
        run_world(&many);
        CHECK(differences(&one, &many) == 0);
        free_world(&many);
    }
    free_world(&one);
}

/* Statistics that overflow are an error of their owners, and end all ranks. */
static void
test_overflow(void)
{
    model_t m = {.count = 2};
    m.tensors[0] = matrix(DCP_OPTIMIZER_SHAMPOO, 2, 30, 40, 0);
    m.tensors[1] = matrix(DCP_OPTIMIZER_SHAMPOO, 2, 20, 20, 0);
    for (int32_t no_windows = 0; no_windows <= 1; no_windows++) {
        world_t world = {.model = &m,
                         .ops = &optim_shampoo_ops,
                         .size = 3,
                         .no_windows = no_windows,
                         .step_count = 2,
                         .gradient_scale = 1e30f,
                         .fails = true};
        run_world(&world);
        CHECK(world.numeric_count > 0);
        free_world(&world);
    }
}

static dcp_status_t
self_scenario(const optim_ops_t *ops, dcp_optimizer_kind_t kind)
{
    static model_t m;
    m = odd_model(kind);
    world_t world = {.model = &m, .ops = ops, .size = 1, .device = dcp_device_cpu()};
    rank_setup_t s = {0};
    dcp_status_t status = setup(&world, 0, "", &s);
    if (status == DCP_OK) {
        const dcp_optimizer_step_args_t args = {.lr = 0.1, .grad_scale = 1};
        status = ops->step(s.object, &args);
    }
    teardown(&world, &s);
    return status;
}

static dcp_status_t
muon_scenario(void)
{
    return self_scenario(&optim_muon_ops, DCP_OPTIMIZER_MUON);
}

static void
test_shampoo_rules(void)
{
    dcp_optimizer_tensor_t good = matrix(DCP_OPTIMIZER_SHAMPOO, 2, 4, 4, 0);
    CHECK_OK(optim_shampoo_ops.check(&good, 0));
    dcp_optimizer_tensor_t bad = matrix(DCP_OPTIMIZER_SHAMPOO, 1, 4, 0, 0);
    CHECK(optim_shampoo_ops.check(&bad, 7) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "tensor 7 ") != NULL);
    for (int field = 0; field < 5; field++) {
        bad = good;
        bad.rule.block = field == 0 ? 0 : 16;
        bad.rule.every = field == 1 ? 0 : 1;
        bad.rule.beta1 = field == 2 ? 1 : 0.9;
        bad.rule.beta2 = field == 3 ? -0.1 : 0.9;
        bad.rule.eps = field == 4 ? 0 : 1e-8;
        CHECK(optim_shampoo_ops.check(&bad, 1) == DCP_ERR_ARG);
    }
    bad = good;
    bad.rule.block = 8;
    CHECK(!optim_shampoo_ops.same_state(&good.rule, &bad.rule));
}

static dcp_status_t
shampoo_scenario(void)
{
    return self_scenario(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
}

static void
test_muon_rules(void)
{
    dcp_optimizer_tensor_t good = matrix(DCP_OPTIMIZER_MUON, 2, 4, 4, 0);
    CHECK_OK(optim_muon_ops.check(&good, 0));
    dcp_optimizer_tensor_t vector = matrix(DCP_OPTIMIZER_MUON, 1, 4, 0, 0);
    CHECK(optim_muon_ops.check(&vector, 7) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "tensor 7 ") != NULL);
    dcp_optimizer_tensor_t bad = good;
    bad.rule.momentum = 1;
    CHECK(optim_muon_ops.check(&bad, 1) == DCP_ERR_ARG);
    bad = good;
    bad.rule.iterations = 0;
    CHECK(optim_muon_ops.check(&bad, 1) == DCP_ERR_ARG);
}

int
main(void)
{
    test_muon_rules();
    check_worlds(&optim_muon_ops, DCP_OPTIMIZER_MUON);
    check_resume(&optim_muon_ops, DCP_OPTIMIZER_MUON);
    check_zero_gradient(&optim_muon_ops, DCP_OPTIMIZER_MUON);
    check_rounds(&optim_muon_ops, DCP_OPTIMIZER_MUON);
    check_bytes(&optim_muon_ops, DCP_OPTIMIZER_MUON);
    check_alone(&optim_muon_ops, DCP_OPTIMIZER_MUON, 256);
    check_alone(&optim_muon_ops, DCP_OPTIMIZER_MUON, 2);
    test_shampoo_rules();
    test_overflow();
    check_worlds(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
    check_resume(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
    check_zero_gradient(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
    check_rounds(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
    check_bytes(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO);
    check_alone(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO, 256);
    check_alone(&optim_shampoo_ops, DCP_OPTIMIZER_SHAMPOO, 2);
    check_every_alloc(muon_scenario); /* last: its counters are not for threads */
    check_every_alloc(shampoo_scenario);
    return check_finish();
}
