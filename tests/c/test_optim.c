/* optim: an optimizer of several kinds over two buffers. Given identical gradients,
 * weights and state are the same bits in every world, on a late device, with windows
 * and without; states cover each tensor once; bad rules, ranks that disagree and memory
 * that runs out are errors that leave nothing behind. Ranks are threads. */
#include "comm_ranks.h"

#include "dcp/optim.h"

#include <math.h>

enum { TENSORS = 7, STEPS = 3, STATE_SLOTS = 6, MOST = 9000 };

static dcp_optimizer_rule_t
rule_of(dcp_optimizer_kind_t kind)
{
    return (dcp_optimizer_rule_t){
        .kind = kind,
        .lr_scale = 1,
        .weight_decay = 0.1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
    };
}

/* Large and small, of one dimension and more, one of the others left alone. */
static void
fill_tensors(dcp_optimizer_tensor_t *tensors)
{
    const dcp_optimizer_kind_t eight = DCP_OPTIMIZER_ADAMW8BIT;
    const dcp_optimizer_tensor_t from[TENSORS] = {
        {2, {24, 300}, rule_of(eight)},
        {1, {5000}, rule_of(eight)},
        {0, {0}, rule_of(eight)},
        {2, {30, 7}, rule_of(DCP_OPTIMIZER_ADAMW)},
        {1, {100}, rule_of(DCP_OPTIMIZER_NONE)},
        {3, {3, 5, 257}, rule_of(DCP_OPTIMIZER_ADAMW)},
        {3, {4, 10, 130}, rule_of(eight)},
    };
    memcpy(tensors, from, sizeof from);
    tensors[3].rule.lr_scale = 0.5;
    tensors[6].rule.weight_decay = 0;
}

static int64_t
elements_of(const dcp_optimizer_tensor_t *tensor)
{
    int64_t count = 1;
    for (int32_t d = 0; d < tensor->dim_count; d++) {
        count *= tensor->shape[d];
    }
    return count;
}

typedef struct setup {
    dcp_comm_t *comm;
    dcp_pool_t *pool;
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_t *weights, *gradients;
    dcp_optimizer_tensor_t tensors[TENSORS];
    dcp_optimizer_t *optimizer;
} setup_t;

static dcp_optimizer_options_t
options_of(const setup_t *s, int late)
{
    return (dcp_optimizer_options_t){
        .comm = s->comm,
        .device = late ? dcp_device_late() : dcp_device_cpu(),
        .pool = s->pool,
        .layout = s->layout,
        .tensors = s->tensors,
        .tensor_count = TENSORS,
        .weights = s->weights,
        .gradients = s->gradients,
    };
}

/* Without the optimizer. */
static dcp_status_t
prepare(setup_t *s, int32_t threads, dcp_dbuffer_kind_t kind)
{
    dcp_dbuffer_tensor_t shapes[TENSORS];
    fill_tensors(s->tensors);
    for (int64_t t = 0; t < TENSORS; t++) {
        const dcp_optimizer_tensor_t *tensor = &s->tensors[t];
        int64_t count = elements_of(tensor);
        int64_t width =
            tensor->dim_count > 1 ? tensor->shape[tensor->dim_count - 1] : 1;
        shapes[t] = (dcp_dbuffer_tensor_t){
            .row_count = count / width,
            .row_width = width,
            .group = t < 4 ? 0 : 1,
            .block_count = width == 1 && count >= DCP_OPTIMIZER_8BIT_LEAST
                               ? DCP_OPTIMIZER_8BIT_BLOCK
                               : 0,
        };
    }
    DCP_TRY(dcp_pool_create(threads, &s->pool));
    DCP_TRY(dcp_dbuffer_layout_create(shapes, TENSORS, dcp_comm_size(s->comm), 1,
                                      DCP_ORDER_MODEL, &s->layout));
    DCP_TRY(dcp_dbuffer_create(s->comm, s->layout, kind, &s->weights));
    return dcp_dbuffer_create(s->comm, s->layout, kind, &s->gradients);
}

static void
release(setup_t *s)
{
    dcp_optimizer_destroy(s->optimizer);
    dcp_dbuffer_destroy(s->gradients);
    dcp_dbuffer_destroy(s->weights);
    dcp_dbuffer_layout_destroy(s->layout);
    dcp_pool_destroy(s->pool);
}

/* This rank's runs of a buffer; elements of some blocks are 0, as unused rows are. */
static void
fill_runs(const setup_t *s, dcp_dbuffer_t *buffer, uint64_t call)
{
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(s->layout, dcp_comm_rank(s->comm), &runs, &count);
    for (int64_t i = 0; i < count; i++) {
        float *at = dcp_dbuffer_run_data(buffer, &runs[i]);
        for (int64_t j = 0; j < runs[i].count; j++) {
            int64_t element = runs[i].first + j;
            at[j] = element / 700 % 3 == 1
                        ? 0
                        : value(call * 100 + (uint64_t)runs[i].tensor, 0, element);
        }
    }
}

static dcp_status_t
run_steps(setup_t *s, int32_t step_count)
{
    fill_runs(s, s->weights, 1);
    for (int32_t step = 0; step < step_count; step++) {
        fill_runs(s, s->gradients, 2 + (uint64_t)step);
        dcp_optimizer_step_args_t args = {
            .update_count = step, .lr = 0.01, .grad_scale = 0.75};
        DCP_TRY(dcp_optimizer_step(s->optimizer, &args));
        DCP_TRY(dcp_comm_barrier(s->comm));
    }
    return DCP_OK;
}

/* Everything that ranks hold, put together: [0] weights, then states in their order. */
typedef struct whole {
    unsigned char bytes[STATE_SLOTS + 1][TENSORS][4 * MOST];
    int32_t held[STATE_SLOTS + 1][TENSORS][MOST]; /* how often an item was there */
    int32_t state_count;
    char names[STATE_SLOTS][32];
} whole_t;

static pthread_mutex_t whole_lock = PTHREAD_MUTEX_INITIALIZER;
static whole_t *collected; /* of the world that runs */

static void
collect_items(int32_t slot, int64_t tensor, int64_t first, int64_t count,
              int64_t item_bytes, const void *data)
{
    memcpy(collected->bytes[slot][tensor] + first * item_bytes, data,
           (size_t)(count * item_bytes));
    for (int64_t i = first; i < first + count; i++) {
        collected->held[slot][tensor][i]++;
    }
}

static void
collect(const setup_t *s)
{
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    pthread_mutex_lock(&whole_lock);
    dcp_dbuffer_layout_runs(s->layout, dcp_comm_rank(s->comm), &runs, &count);
    for (int64_t i = 0; i < count; i++) {
        collect_items(0, runs[i].tensor, runs[i].first, runs[i].count, 4,
                      dcp_dbuffer_run_data(s->weights, &runs[i]));
    }
    collected->state_count = dcp_optimizer_state_count(s->optimizer);
    for (int32_t state = 0; state < collected->state_count; state++) {
        const dcp_state_run_t *state_runs;
        snprintf(collected->names[state], sizeof collected->names[state], "%s",
                 dcp_optimizer_state_name(s->optimizer, state));
        dcp_optimizer_state_runs(s->optimizer, state, &state_runs, &count);
        int64_t bytes = dcp_dtype_bytes(dcp_optimizer_state_dtype(s->optimizer, state));
        for (int64_t i = 0; i < count; i++) {
            collect_items(state + 1, state_runs[i].tensor, state_runs[i].first,
                          state_runs[i].count, bytes, state_runs[i].data);
        }
    }
    pthread_mutex_unlock(&whole_lock);
}

/* Each item of each state's shape is held once, and no other is. */
static void
require_cover(rank_t *r, const setup_t *s)
{
    for (int32_t slot = 0; slot <= collected->state_count; slot++) {
        for (int64_t t = 0; t < TENSORS; t++) {
            int32_t dims = s->tensors[t].dim_count, wrong = 0;
            int64_t shape[DCP_OPTIMIZER_DIMS], count = 1;
            memcpy(shape, s->tensors[t].shape, sizeof shape);
            if (slot > 0) {
                dcp_optimizer_state_shape(s->optimizer, slot - 1, t, &dims, shape);
            }
            for (int32_t d = 0; d < dims; d++) {
                count *= shape[d];
            }
            count = dims < 0 ? 0 : count;
            for (int64_t i = 0; i < MOST; i++) {
                wrong += collected->held[slot][t][i] != (i < count);
            }
            REQUIRE(r, wrong == 0);
        }
    }
}

static void
train_body(rank_t *r)
{
    setup_t s = {.comm = r->comm};
    int late = r->rank % 2;
    dcp_dbuffer_kind_t kind =
        r->size % 2 ? DCP_DBUFFER_SHARD : DCP_DBUFFER_SHARED; /* of memory */
    REQUIRE(r, prepare(&s, 1 + r->rank % 3, kind) == DCP_OK);
    dcp_optimizer_options_t options = options_of(&s, late);
    REQUIRE(r, dcp_optimizer_create(&options, &s.optimizer) == DCP_OK);
    REQUIRE(r, run_steps(&s, STEPS) == DCP_OK);
    collect(&s);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    if (r->rank == 0) {
        require_cover(r, &s);
    }
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    release(&s);
}

static void
test_worlds(void)
{
    static whole_t alone, world;
    rank_t ranks[MAX_RANKS];
    for (int32_t size = 1; size <= MAX_RANKS; size++) {
        collected = size == 1 ? &alone : &world;
        memset(collected, 0, sizeof *collected);
        run_ranks(ranks, size, train_body, 0, 60 * second_ns);
        CHECK(memcmp(collected->bytes, alone.bytes, sizeof alone.bytes) == 0);
        CHECK(collected->state_count == STATE_SLOTS);
    }
    const char *names[STATE_SLOTS] = {"adamw.m",     "adamw.v",
                                      "adamw8bit.m", "adamw8bit.m_scale",
                                      "adamw8bit.v", "adamw8bit.v_scale"};
    for (int32_t i = 0; i < STATE_SLOTS; i++) {
        CHECK(strcmp(alone.names[i], names[i]) == 0);
    }
}

static void
disagree_body(rank_t *r)
{
    setup_t s = {.comm = r->comm};
    REQUIRE(r, prepare(&s, 1, DCP_DBUFFER_SHARD) == DCP_OK);
    s.tensors[5].rule.eps = r->rank == 1 ? 1e-7 : 1e-8;
    dcp_optimizer_options_t options = options_of(&s, 0);
    REQUIRE(r, dcp_optimizer_create(&options, &s.optimizer) == DCP_ERR_MISMATCH);
    REQUIRE(r, strstr(dcp_last_error(), "rank 1") != NULL);
    s.tensors[5].rule.eps = 1e-8; /* and the world goes on */
    REQUIRE(r, dcp_optimizer_create(&options, &s.optimizer) == DCP_OK);
    release(&s);
}

static void
test_ranks_that_disagree(void)
{
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, 3, disagree_body, 0, 60 * second_ns);
}

/* Creates an optimizer where `tensors` are these; the message must hold `part`. */
static void
refused(const dcp_optimizer_tensor_t *tensors, const char *part)
{
    setup_t s = {0};
    CHECK_OK(dcp_comm_create_self(&s.comm));
    CHECK_OK(prepare(&s, 1, DCP_DBUFFER_SHARD));
    dcp_optimizer_options_t options = options_of(&s, 0);
    options.tensors = tensors;
    CHECK(dcp_optimizer_create(&options, &s.optimizer) != DCP_OK);
    CHECK(strstr(dcp_last_error(), part) != NULL);
    release(&s);
    dcp_comm_destroy(s.comm);
}

static void
test_bad_rules(void)
{
    dcp_optimizer_tensor_t good[TENSORS], bad[TENSORS];
    fill_tensors(good);
#define REFUSED(field, value, part)     \
    do {                                \
        memcpy(bad, good, sizeof good); \
        bad[3].field = (value);         \
        refused(bad, part);             \
    } while (0)
    REFUSED(rule.beta1, 1.0, "beta1 1 of tensor 3 must lie in [0, 1)");
    REFUSED(rule.beta2, -0.5, "beta2 -0.5 of tensor 3");
    REFUSED(rule.eps, 0.0, "eps 0 of tensor 3 must be positive");
    REFUSED(rule.lr_scale, -1.0, "lr_scale -1 of tensor 3");
    REFUSED(rule.weight_decay, (double)NAN, "weight_decay");
    REFUSED(rule.kind, (dcp_optimizer_kind_t)77, "kind 77 of tensor 3");
    REFUSED(dim_count, 9, "tensor 3 has 9 dimensions");
    REFUSED(shape[0], 31,
            "tensor 3 has 217 elements by its shape and 210 in the layout");
    REFUSED(shape[0], -1, "dimension 0 of tensor 3 is -1");
    REFUSED(shape[0], INT64_MAX, "cannot be counted");
#undef REFUSED
}

/* One dimension, cut in the middle of a block. */
static void
cut_body(rank_t *r)
{
    setup_t s = {.comm = r->comm};
    dcp_dbuffer_tensor_t shape = {.row_count = 4200, .row_width = 1};
    REQUIRE(r, dcp_pool_create(1, &s.pool) == DCP_OK);
    REQUIRE(r,
            dcp_dbuffer_layout_create(&shape, 1, r->size, 1, DCP_ORDER_MODEL, &s.layout)
                == DCP_OK);
    REQUIRE(r, dcp_dbuffer_create(r->comm, s.layout, DCP_DBUFFER_SHARD, &s.weights)
                   == DCP_OK);
    dcp_optimizer_options_t options = options_of(&s, 0);
    s.tensors[0] =
        (dcp_optimizer_tensor_t){1, {4200}, rule_of(DCP_OPTIMIZER_ADAMW8BIT)};
    options.tensor_count = 1;
    options.gradients = s.weights;
    REQUIRE(r, dcp_optimizer_create(&options, &s.optimizer) == DCP_ERR_ARG);
    REQUIRE(r, strstr(dcp_last_error(), "at multiples of 256") != NULL);
    release(&s);
}

static void
test_a_layout_that_cuts_blocks(void)
{
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, 3, cut_body, 0, 60 * second_ns);
}

static void
test_changed_rules(void)
{
    setup_t s = {0};
    CHECK_OK(dcp_comm_create_self(&s.comm));
    CHECK_OK(prepare(&s, 1, DCP_DBUFFER_SHARD));
    dcp_optimizer_options_t options = options_of(&s, 0);
    CHECK_OK(dcp_optimizer_create(&options, &s.optimizer));
    uint64_t hash = dcp_optimizer_rules_hash(s.optimizer);
    dcp_optimizer_tensor_t tensors[TENSORS];
    memcpy(tensors, s.tensors, sizeof tensors);
    tensors[3].rule.eps = 1e-6;
    CHECK_OK(dcp_optimizer_set_rules(s.optimizer, tensors));
    CHECK(dcp_optimizer_rules_hash(s.optimizer) != hash);
    tensors[3].rule.kind = DCP_OPTIMIZER_NONE;
    CHECK(dcp_optimizer_set_rules(s.optimizer, tensors) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "tensor 3") != NULL);
    memcpy(tensors, s.tensors, sizeof tensors);
    tensors[0].rule.eps = 0; /* what is refused changes nothing */
    CHECK(dcp_optimizer_set_rules(s.optimizer, tensors) == DCP_ERR_ARG);
    CHECK_OK(run_steps(&s, 1));
    dcp_optimizer_step_args_t args = {.lr = -1, .grad_scale = 1};
    CHECK(dcp_optimizer_step(s.optimizer, &args) == DCP_ERR_ARG);
    args = (dcp_optimizer_step_args_t){.update_count = -1, .lr = 1, .grad_scale = 1};
    CHECK(dcp_optimizer_step(s.optimizer, &args) == DCP_ERR_ARG);
    args = (dcp_optimizer_step_args_t){.lr = 1, .grad_scale = (double)INFINITY};
    CHECK(dcp_optimizer_step(s.optimizer, &args) == DCP_ERR_ARG);
    release(&s);
    dcp_comm_destroy(s.comm);
}

/* What is promised is enough for what is held, and not much more. */
static void
test_bytes(void)
{
    setup_t s = {0};
    CHECK_OK(dcp_comm_create_self(&s.comm));
    CHECK_OK(prepare(&s, 1, DCP_DBUFFER_SHARD));
    dcp_optimizer_options_t options = options_of(&s, 0);
    int64_t before = dcp_alloc_held_bytes();
    CHECK_OK(dcp_optimizer_create(&options, &s.optimizer));
    int64_t held = dcp_alloc_held_bytes() - before;
    int64_t bytes = dcp_optimizer_bytes(s.layout, s.tensors, TENSORS, 0);
    CHECK(held <= bytes + 4096); /* the optimizer's own tables */
    CHECK(bytes <= held);
    release(&s);
    dcp_comm_destroy(s.comm);
}

static dcp_status_t
scenario(void)
{
    setup_t s = {0};
    dcp_status_t status = dcp_comm_create_self(&s.comm);
    if (status == DCP_OK) {
        status = prepare(&s, 1, DCP_DBUFFER_SHARD);
    }
    if (status == DCP_OK) {
        dcp_optimizer_options_t options = options_of(&s, 1);
        status = dcp_optimizer_create(&options, &s.optimizer);
    }
    if (status == DCP_OK) {
        status = run_steps(&s, 1);
    }
    release(&s);
    dcp_comm_destroy(s.comm);
    return status;
}

int
main(void)
{
    test_worlds();
    test_ranks_that_disagree();
    test_bad_rules();
    test_a_layout_that_cuts_blocks();
    test_changed_rules();
    test_bytes();
    check_every_alloc(scenario); /* last: its counters are not for threads */
    return check_finish();
}
