/* Sharded steps in every mode: ranks are threads over the shm transport. Weights after
 * some steps are the same bits with and without windows, gathered ahead or not, and
 * whatever a rank's neighbours do; memory that runs out is an error that leaves nothing
 * behind. */
#include "check.h"
#include "rank_threads.h"

#include "dcp/train.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Bits of a mode: gradients are reduced by layer, no windows, bf16 factors, groups are
 * gathered ahead. */
enum { BY_LAYER = 1, NO_WINDOWS = 2, IN_BF16 = 4, AHEAD = 8, MODES = 16 };
enum { RANK_SLOTS = 4, ROUNDS = 3, TOKENS = 5, STEPS = 2 };

/* changed between worlds only */
static dcp_transformer1d_config_t config = {
    .vocab_size = 11,
    .hidden_size = 8,
    .intermediate_size = 12,
    .num_hidden_layers = 3,
    .num_attention_heads = 2,
    .num_key_value_heads = 1,
    .head_dim = 4,
    .max_position_embeddings = 16,
    .rope_theta = 10000,
    .rms_norm_eps = 1e-6,
    .tie_word_embeddings = 1,
    .initializer_range = 0.1,
};

typedef struct task {
    int32_t rank, size, mode;
    int64_t batch_count; /* of this rank */
    dcp_status_t status;
    char message[512];
    int64_t count; /* elements of the rank's shard */
    float *shard;  /* malloc'd copy of the weights at the end */
    double losses[STEPS], evaluated;
    int64_t gathered_bytes, reduced_bytes; /* of the last step */
} task_t;

static int32_t failing_rank = -1; /* its second micro-batch has an impossible token */

/* Micro-batch `round` of a rank; none has tokens where (rank + round) % 3 == 2. */
static void
fill_batch(int32_t rank, int64_t round, int32_t *tokens, int64_t *offsets,
           dcp_micro_batch_t *micro)
{
    int64_t count = (rank + round) % 3 == 2 ? 0 : TOKENS;
    for (int64_t t = 0; t <= TOKENS; t++) {
        tokens[t] = (int32_t)((3 * t + 5 * rank + 7 * round) % config.vocab_size);
    }
    if (rank == failing_rank && round == 2) {
        tokens[1] = (int32_t)config.vocab_size;
    }
    offsets[0] = 0;
    offsets[1] = count;
    *micro = (dcp_micro_batch_t){
        .batch = {.token_count = count,
                  .sequence_count = 1,
                  .tokens = tokens,
                  .offsets = offsets,
                  .labels = tokens + 1,
                  .scale = 0.02},
        .first_rank = rank,
        .rank_count = 1,
    };
}

static dcp_status_t
set_adamw(dcp_sharded_t *sharded)
{
    dcp_optimizer_rule_t rules[64];
    for (int64_t i = 0; i < dcp_sharded_tensor_count(sharded); i++) {
        rules[i] = (dcp_optimizer_rule_t){
            .kind = DCP_OPTIMIZER_ADAMW,
            .lr_scale = 1,
            .weight_decay = dcp_sharded_tensor(sharded, i)->dim_count == 2 ? 0.1 : 0,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .eps = 1e-8,
        };
    }
    return dcp_sharded_set_optimizer(sharded, rules);
}

static dcp_status_t
run_steps(dcp_sharded_t *sharded, task_t *task)
{
    int32_t tokens[ROUNDS][TOKENS + 1];
    int64_t offsets[ROUNDS][2], busy_ns[RANK_SLOTS];
    dcp_micro_batch_t batches[ROUNDS];
    for (int64_t i = 0; i < ROUNDS; i++) {
        fill_batch(task->rank, i, tokens[i], offsets[i], &batches[i]);
    }
    dcp_step_args_t args = {
        .batches = batches,
        .batch_count = task->batch_count,
        .trainable_count = 50,
        .lr = 0.05,
        .clip = 0.5,
    };
    for (int64_t i = 0; i < STEPS; i++) {
        dcp_step_result_t result;
        args.step = args.update_count = i;
        DCP_TRY(dcp_sharded_step(sharded, &args, busy_ns, &result));
        task->losses[i] = result.loss;
        task->gathered_bytes = result.gathered_bytes;
        task->reduced_bytes = result.reduced_bytes;
    }
    args.batch_count = task->rank < ROUNDS ? task->rank : ROUNDS; /* uneven */
    return dcp_sharded_evaluate(sharded, &args, &task->evaluated);
}

static void
copy_shard(const dcp_sharded_t *sharded, task_t *task)
{
    const dcp_dbuffer_t *weights = dcp_sharded_buffer(sharded, DCP_SHARDED_WEIGHTS);
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(dcp_sharded_layout(sharded), task->rank, &runs, &run_count);
    task->shard = malloc(100000 * sizeof(float));
    task->count = 0;
    for (int64_t i = 0; i < run_count; i++) {
        memcpy(task->shard + task->count, dcp_dbuffer_run_data(weights, &runs[i]),
               (size_t)runs[i].count * sizeof(float));
        task->count += runs[i].count;
    }
}

static dcp_status_t
run_rank(task_t *task)
{
    char run_id[64];
    snprintf(run_id, sizeof run_id, "test-train-%d-%d", (int)getpid(), task->size);
    dcp_comm_options_t comm_options = {
        .rank = task->rank, .size = task->size, .run_id = run_id};
    dcp_sharded_options_t options = {
        .block_rows = 1,
        .seed = 5,
        .initialise = 1,
        .no_windows = (task->mode & NO_WINDOWS) != 0,
        .reduce_layer = (task->mode & BY_LAYER) != 0,
        .prefetch = (task->mode & AHEAD) != 0,
    };
    dcp_transformer1d_config_t own = config;
    own.compute_dtype = task->mode & IN_BF16 ? DCP_BF16 : DCP_F32;
    dcp_comm_t *comm = NULL;
    dcp_pool_t *pool = NULL;
    dcp_sharded_t *sharded = NULL;
    dcp_status_t status = task->size == 1 ? dcp_comm_create_self(&comm)
                                          : dcp_comm_create_shm(&comm_options, &comm);
    if (status == DCP_OK) {
        status = dcp_pool_create(1 + task->rank % 2, &pool);
    }
    if (status == DCP_OK) {
        status = dcp_sharded_create(
            comm, &own, task->rank % 2 ? dcp_device_late() : dcp_device_cpu(), pool,
            &options, &sharded);
    }
    if (status == DCP_OK) {
        status = set_adamw(sharded);
    }
    if (status == DCP_OK) {
        status = run_steps(sharded, task);
    }
    if (status == DCP_OK && task->shard == NULL) {
        copy_shard(sharded, task);
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
run_world(int32_t size, int32_t mode, const int64_t *counts, task_t *tasks)
{
    for (int32_t rank = 0; rank < size; rank++) {
        tasks[rank] = (task_t){
            .rank = rank, .size = size, .mode = mode, .batch_count = counts[rank]};
    }
    run_rank_threads(rank_main, tasks, sizeof tasks[0], size);
}

static void
test_modes(void)
{
    const int64_t counts[] = {ROUNDS, ROUNDS, ROUNDS, ROUNDS};
    for (int32_t size = 1; size <= RANK_SLOTS; size++) {
        task_t tasks[MODES][RANK_SLOTS];
        for (int32_t mode = 0; mode < MODES; mode++) {
            run_world(size, mode, counts, tasks[mode]);
            for (int32_t rank = 0; rank < size; rank++) {
                const task_t *task = &tasks[mode][rank];
                const task_t *same = &tasks[mode & ~(NO_WINDOWS | AHEAD)][rank];
                CHECK(task->status == DCP_OK);
                if (task->status != DCP_OK) {
                    printf("mode %d, rank %d of %d: %s\n", mode, rank, size,
                           task->message);
                    continue;
                }
                CHECK(task->count == same->count && task->count > 0);
                CHECK(memcmp(task->shard, same->shard,
                             (size_t)task->count * sizeof(float))
                      == 0);
                CHECK(memcmp(task->losses, same->losses, sizeof task->losses) == 0);
                CHECK(task->losses[0] == tasks[mode & IN_BF16][rank].losses[0]);
                CHECK((task->losses[0] == tasks[0][rank].losses[0])
                      == !(mode & IN_BF16));
                CHECK(task->evaluated == same->evaluated);
                int64_t once = tasks[0][rank].reduced_bytes;
                CHECK(task->reduced_bytes == (mode & BY_LAYER ? ROUNDS : 1) * once);
                CHECK((task->gathered_bytes > 0)
                      == ((mode & NO_WINDOWS) != 0 && size > 1));
                CHECK(task->gathered_bytes * (mode & IN_BF16 ? 2 : 1)
                      == tasks[mode & ~IN_BF16][rank].gathered_bytes);
                int64_t in_one_place = tasks[mode & ~AHEAD][rank].gathered_bytes;
                CHECK(task->gathered_bytes < in_one_place || in_one_place == 0
                      || !(mode & AHEAD));
            }
        }
        for (int32_t i = 0; i < MODES * size; i++) {
            free(tasks[i / size][i % size].shard);
        }
    }
}

/* Two micro-batches here and three there are an error on all ranks that says so. */
static void
test_uneven_counts(void)
{
    const int64_t counts[] = {3, 2, 3};
    for (int32_t mode = 1; mode < IN_BF16; mode++) {
        task_t tasks[RANK_SLOTS];
        run_world(3, mode, counts, tasks);
        for (int32_t rank = 0; rank < 3; rank++) {
            CHECK(tasks[rank].status == DCP_ERR_MISMATCH);
            CHECK(
                strstr(tasks[rank].message, "rank 0 has 3 micro-batches, rank 1 has 2")
                != NULL);
        }
    }
}

/* A rank that fails in the middle of a pass, while others have begun a gather that it
 * never joins, ends all. */
static void
test_failure_ahead(void)
{
    const int64_t counts[] = {ROUNDS, ROUNDS, ROUNDS};
    for (int32_t mode = NO_WINDOWS | AHEAD; mode <= (NO_WINDOWS | AHEAD | BY_LAYER);
         mode++) {
        task_t tasks[RANK_SLOTS];
        failing_rank = 1;
        run_world(3, mode, counts, tasks);
        failing_rank = -1;
        for (int32_t rank = 0; rank < 3; rank++) {
            CHECK(tasks[rank].status != DCP_OK);
            CHECK(strstr(tasks[rank].message, rank == 1 ? "token" : "rank 1") != NULL);
        }
    }
}

static int32_t scenario_mode;

static dcp_status_t
scenario(void)
{
    task_t task = {.size = 1, .mode = scenario_mode, .batch_count = 2};
    float unused;
    task.shard = &unused; /* nothing is copied */
    return run_rank(&task);
}

int
main(void)
{
    for (config.tie_word_embeddings = 0; config.tie_word_embeddings < 2;
         config.tie_word_embeddings++) {
        test_modes();
    }
    config.tie_word_embeddings = 1;
    test_failure_ahead();
    test_uneven_counts();
    for (scenario_mode = 0; scenario_mode < MODES; scenario_mode++) {
        if (!(scenario_mode & AHEAD) || scenario_mode & NO_WINDOWS) {
            check_every_alloc(scenario);
        }
    }
    CHECK(dcp_alloc_held_bytes() == 0);
    return check_finish();
}
