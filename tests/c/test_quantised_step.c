/* Steps whose gradients travel in few bits: ranks are threads over the shm transport.
 * Weights and residuals are the same bits with and without windows; what is sent and
 * what is left are the sum of all gradients; steps that end in no update take nothing
 * of residuals; memory that runs out is an error that leaves nothing behind. */
#include "check.h"
#include "rank_threads.h"

#include "dcp/reducer.h"
#include "dcp/train.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANK_SLOTS = 4, ROUNDS = 2, TOKENS = 24, STEPS = 4, MOST = 20000 };
/* What a world's ranks do beside training. */
enum { NOTHING, NAN_AT_2, EMPTY_AT_2, NO_FEEDBACK_AT_2, DISAGREE_AT_2 };

static const dcp_transformer1d_config_t config = {
    .vocab_size = 37,
    .hidden_size = 16,
    .intermediate_size = 24,
    .num_hidden_layers = 2,
    .num_attention_heads = 2,
    .num_key_value_heads = 1,
    .head_dim = 8,
    .max_position_embeddings = 32,
    .rope_theta = 10000,
    .rms_norm_eps = 1e-6,
    .tie_word_embeddings = 1,
    .initializer_range = 0.1,
};

typedef struct task {
    int32_t rank, size, no_windows, event, machine_ranks;
    dcp_precision_t precision;
    dcp_status_t status;
    char message[512];
    dcp_step_result_t results[STEPS];
    int64_t count, residual_count;
    /* of the shard at the end; of the residual before and after step 2 */
    float shard[MOST], before[MOST], after[MOST];
} task_t;

static void
fill_batch(const task_t *task, int64_t step, int64_t round, int32_t *tokens,
           int64_t *offsets, float *weights, dcp_micro_batch_t *micro)
{
    bool is_event = step == 2;
    /* a rank without tokens now and then; no tokens at all; a NaN on rank 1 */
    bool none =
        (task->rank + round + step) % 5 == 4 || (is_event && task->event == EMPTY_AT_2);
    for (int64_t t = 0; t <= TOKENS; t++) {
        tokens[t] = (int32_t)((3 * t + 5 * task->rank + 7 * round + 11 * step)
                              % config.vocab_size);
        weights[t] = 1.0f;
    }
    if (is_event && task->event == NAN_AT_2 && task->rank == task->size - 1) {
        none = false;
        weights[3] = NAN;
    }
    offsets[0] = 0;
    offsets[1] = none ? 0 : TOKENS;
    *micro = (dcp_micro_batch_t){
        .batch = {.token_count = offsets[1],
                  .sequence_count = 1,
                  .tokens = tokens,
                  .offsets = offsets,
                  .labels = tokens + 1,
                  .weights = weights,
                  .scale = 0.02},
        .first_rank = task->rank,
        .rank_count = 1,
    };
}

static dcp_status_t
set_adamw(dcp_sharded_t *sharded)
{
    dcp_optimizer_rule_t rules[64];
    for (int64_t i = 0; i < dcp_sharded_tensor_count(sharded); i++) {
        rules[i] = (dcp_optimizer_rule_t){.kind = DCP_OPTIMIZER_ADAMW,
                                          .lr_scale = 1,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-8};
    }
    return dcp_sharded_set_optimizer(sharded, rules);
}

static void
copy_residual(const dcp_sharded_t *sharded, task_t *task, float *to)
{
    const dcp_dbuffer_t *residual = dcp_sharded_residual(sharded);
    task->residual_count = dcp_dbuffer_layout_elements(dcp_sharded_layout(sharded));
    if (residual != NULL && task->residual_count <= MOST) {
        memcpy(to, dcp_dbuffer_data(residual),
               (size_t)task->residual_count * sizeof(float));
    }
}

static dcp_status_t
run_steps(dcp_sharded_t *sharded, task_t *task)
{
    int32_t tokens[ROUNDS][TOKENS + 1];
    float weights[ROUNDS][TOKENS + 1];
    int64_t offsets[ROUNDS][2], busy_ns[RANK_SLOTS], updates = 0;
    dcp_micro_batch_t batches[ROUNDS];
    for (int64_t i = 0; i < STEPS; i++) {
        for (int64_t round = 0; round < ROUNDS; round++) {
            fill_batch(task, i, round, tokens[round], offsets[round], weights[round],
                       &batches[round]);
        }
        bool is_event = i == 2;
        dcp_step_args_t args = {
            .batches = batches,
            .batch_count = ROUNDS,
            .step = i,
            .update_count = updates,
            .trainable_count = is_event && task->event == EMPTY_AT_2 ? 0 : 100,
            .lr = 0.01,
            .clip = 0.5,
            .skip_nonfinite = 1,
            .precision = task->precision,
            .hadamard = i % 2 == 1,
            .feedback = !(is_event && task->event == NO_FEEDBACK_AT_2),
            .quantise_seed = 3,
            .statistics = 1,
        };
        if (is_event && task->event == DISAGREE_AT_2 && task->rank == 0) {
            args.nearest = 1;
        }
        if (is_event) {
            copy_residual(sharded, task, task->before);
        }
        DCP_TRY(dcp_sharded_step(sharded, &args, busy_ns, &task->results[i]));
        if (is_event) {
            copy_residual(sharded, task, task->after);
        }
        updates += !task->results[i].skipped;
    }
    return DCP_OK;
}

/* Everything around a controller: its world's numbers, and one decision. */
static dcp_status_t
control(dcp_sharded_t *sharded, const task_t *task)
{
    dcp_control_world_t world;
    dcp_observation_t seen;
    dcp_decision_t decision = {.step = STEPS, .arm = {task->precision, 1 + task->rank}};
    DCP_TRY(dcp_sharded_control_world(sharded, &world));
    DCP_TRY(dcp_sharded_note_step(sharded, (dcp_arm_t){task->precision, 1},
                                  1.0 + task->rank));
    DCP_TRY(world.observe(world.context, &seen));
    if (seen.step_s != (double)task->size || seen.step != STEPS - 1
        || !(world.codec_s(world.context, DCP_PRECISION_INT8) >= 0)
        || seen.reduce_bytes != world.reduce_bytes(world.context, task->precision)) {
        return DCP_FAIL(DCP_ERR_STATE, "step_s %g, %g bytes of %g", seen.step_s,
                        seen.reduce_bytes,
                        world.reduce_bytes(world.context, task->precision));
    }
    DCP_TRY(world.apply(world.context, &decision));
    return decision.arm.multiple == 1
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_STATE, "the decision is not rank 0's");
}

static dcp_status_t
run_rank(task_t *task)
{
    char run_id[64];
    snprintf(run_id, sizeof run_id, "test-codes-%d-%d", (int)getpid(), task->size);
    dcp_comm_options_t comm_options = {
        .rank = task->rank, .size = task->size, .run_id = run_id};
    dcp_sharded_options_t options = {.block_rows = 1,
                                     .seed = 5,
                                     .initialise = 1,
                                     .no_windows = task->no_windows,
                                     .machine_ranks = task->machine_ranks};
    dcp_comm_t *comm = NULL;
    dcp_pool_t *pool = NULL;
    dcp_sharded_t *sharded = NULL;
    dcp_status_t status = task->size == 1 ? dcp_comm_create_self(&comm)
                                          : dcp_comm_create_shm(&comm_options, &comm);
    if (status == DCP_OK) {
        status = dcp_pool_create(1 + task->rank % 2, &pool);
    }
    if (status == DCP_OK) {
        status = dcp_sharded_create(comm, &config, dcp_device_cpu(), pool, &options,
                                    &sharded);
    }
    if (status == DCP_OK) {
        status = set_adamw(sharded);
    }
    if (status == DCP_OK) {
        status = run_steps(sharded, task);
    }
    if (status == DCP_OK) {
        status = control(sharded, task);
    }
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    if (status == DCP_OK) {
        dcp_dbuffer_layout_runs(dcp_sharded_layout(sharded), task->rank, &runs,
                                &run_count);
        for (int64_t i = 0; i < run_count; i++) {
            memcpy(task->shard + task->count,
                   dcp_dbuffer_run_data(dcp_sharded_buffer(sharded, 0), &runs[i]),
                   (size_t)runs[i].count * sizeof(float));
            task->count += runs[i].count;
        }
    }
    dcp_sharded_destroy(sharded);
    dcp_pool_destroy(pool);
    dcp_comm_destroy(comm);
    return status;
}

static void *
rank_main(void *argument)
{
    task_t *task = argument;
    task->status = run_rank(task);
    snprintf(task->message, sizeof task->message, "%s", dcp_last_error());
    return NULL;
}

static void
run_world(const task_t *how, task_t *tasks)
{
    for (int32_t rank = 0; rank < how->size; rank++) {
        tasks[rank] = *how;
        tasks[rank].rank = rank;
    }
    run_rank_threads(rank_main, tasks, sizeof tasks[0], how->size);
    for (int32_t rank = 0; rank < how->size; rank++) {
        bool is_meant = how->event == DISAGREE_AT_2 || how->machine_ranks == 3;
        if (tasks[rank].status != DCP_OK && !is_meant) {
            printf("rank %d of %d, %s: %s\n", (int)rank, (int)how->size,
                   dcp_precision_name(how->precision), tasks[rank].message);
        }
    }
}

static task_t worlds[2][RANK_SLOTS];

static bool
same_floats(const float *a, const float *b, int64_t count)
{
    return memcmp(a, b, (size_t)count * sizeof(float)) == 0;
}

static bool
any(const float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (x[i] != 0.0f) {
            return true;
        }
    }
    return false;
}

static void
test_bits_do_not_depend_on_windows(void)
{
    for (int32_t size = 1; size <= RANK_SLOTS; size++) {
        for (int q = 0; q < DCP_PRECISION_COUNT; q++) {
            task_t how = {.size = size, .precision = (dcp_precision_t)q};
            for (int32_t no_windows = 0; no_windows < 2; no_windows++) {
                how.no_windows = no_windows;
                run_world(&how, worlds[no_windows]);
            }
            for (int32_t r = 0; r < size; r++) {
                const task_t *a = &worlds[0][r], *b = &worlds[1][r];
                CHECK(a->status == DCP_OK && b->status == DCP_OK);
                CHECK(a->count == b->count && a->count > 0 && a->count <= MOST);
                CHECK(same_floats(a->shard, b->shard, a->count));
                CHECK(a->residual_count <= MOST);
                CHECK(same_floats(a->after, b->after, a->residual_count));
                CHECK(any(a->after, a->residual_count)
                      == (size > 1 && q != DCP_PRECISION_FP32));
                for (int i = 0; i < STEPS; i++) {
                    const dcp_step_result_t *own = &a->results[i];
                    CHECK(own->reduce_count == 1 && !own->skipped);
                    CHECK(own->grad_norm == worlds[0][0].results[i].grad_norm);
                    CHECK(own->loss == worlds[0][0].results[i].loss);
                    CHECK(memcmp(&own->observation,
                                 &worlds[0][0].results[i].observation,
                                 sizeof own->observation)
                          == 0);
                }
            }
        }
    }
}

static void
test_two_levels(void)
{
    task_t how = {.size = 4, .precision = DCP_PRECISION_INT8, .machine_ranks = 2};
    run_world(&how, worlds[0]);
    how.machine_ranks = 4; /* one machine: one level */
    run_world(&how, worlds[1]);
    for (int32_t r = 0; r < 4; r++) {
        CHECK(worlds[0][r].status == DCP_OK && worlds[1][r].status == DCP_OK);
        /* one other machine instead of three other ranks */
        CHECK(3 * worlds[0][r].results[0].reduced_bytes
              == worlds[1][r].results[0].reduced_bytes);
    }
    how.machine_ranks = 3;
    run_world(&how, worlds[0]);
    CHECK(worlds[0][0].status == DCP_ERR_ARG);
    CHECK(strstr(worlds[0][0].message, "machine_ranks 3") != NULL);
}

/* Case C-06, and a step without any token: nothing is updated, residuals stay. */
static void
test_steps_without_update(void)
{
    for (int32_t event = NAN_AT_2; event <= EMPTY_AT_2; event++) {
        for (int q = 0; q < DCP_PRECISION_COUNT; q += 5) {
            task_t how = {.size = 3, .precision = (dcp_precision_t)q, .event = event};
            run_world(&how, worlds[0]);
            for (int32_t r = 0; r < 3; r++) {
                const task_t *task = &worlds[0][r];
                CHECK(task->status == DCP_OK);
                for (int i = 0; i < STEPS; i++) {
                    CHECK(task->results[i].skipped == (i == 2));
                }
                CHECK(same_floats(task->before, task->after, task->residual_count));
                CHECK(any(task->after, task->residual_count) == (q != 0));
                bool sent = event == EMPTY_AT_2 || q == DCP_PRECISION_FP32;
                CHECK(task->results[2].reduce_count == sent);
                CHECK(task->results[2].observation.skipped == 1);
            }
        }
    }
}

static void
test_without_feedback_what_is_left_goes_once(void)
{
    task_t how = {
        .size = 3, .precision = DCP_PRECISION_INT4, .event = NO_FEEDBACK_AT_2};
    run_world(&how, worlds[0]);
    for (int32_t r = 0; r < 3; r++) {
        CHECK(worlds[0][r].status == DCP_OK);
        CHECK(any(worlds[0][r].before, worlds[0][r].residual_count));
        CHECK(!any(worlds[0][r].after, worlds[0][r].residual_count));
    }
}

static void
test_ranks_that_disagree(void)
{
    task_t how = {.size = 3, .precision = DCP_PRECISION_INT4, .event = DISAGREE_AT_2};
    run_world(&how, worlds[0]);
    for (int32_t r = 0; r < 3; r++) {
        CHECK(worlds[0][r].status == DCP_ERR_MISMATCH);
        CHECK(strstr(worlds[0][r].message, "precision") != NULL);
    }
}

static dcp_status_t
scenario(void)
{
    static task_t task;
    task = (task_t){.size = 1, .precision = DCP_PRECISION_INT4, .no_windows = 1};
    return run_rank(&task);
}

int
main(void)
{
    test_bits_do_not_depend_on_windows();
    test_two_levels();
    test_steps_without_update();
    test_without_feedback_what_is_left_goes_once();
    test_ranks_that_disagree();
    check_every_alloc(scenario);
    CHECK(dcp_alloc_held_bytes() == 0);
    return check_finish();
}
