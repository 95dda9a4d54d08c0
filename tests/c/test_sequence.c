/* Groups of ranks: which rows and heads a rank gets, the kernels' parts that serve
 * them, and whole gradients, with ranks as threads over the shm transport. */
#include "check.h"
#include "rank_threads.h"

#include "dcp/kernels.h"
#include "dcp/rng.h"
#include "train/sequence.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

static uint64_t random_state = 1;

static int64_t
draw(int64_t below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((random_state >> 33) % (uint64_t)below);
}

static float
draw_float(void)
{
    return (float)draw(2001) / 1000.0f - 1.0f;
}

/* Rows ------------------------------------------------------------------------- */

enum { MOST_SEQUENCES = 40, MOST_TOKENS = 16384 };

/* Every token once, rows in order, no rank above ceil(T / p). */
static void
check_cut(const dcp_batch_t *batch, int32_t ranks, int32_t ulysses)
{
    static uint8_t seen[MOST_TOKENS];
    sequence_cut_t cut;
    CHECK_OK(sequence_cut_init(batch, ranks, ulysses, &cut));
    memset(seen, 0, sizeof seen);
    int64_t most = (batch->token_count + ranks - 1) / ranks;
    int failed = 0;
    for (int32_t rank = 0; rank < ranks; rank++) {
        int64_t rows = cut.first_row[rank + 1] - cut.first_row[rank], row = 0;
        failed += rows > most;
        failed +=
            rows != sequence_rows(batch->token_count, ulysses, ranks / ulysses, rank);
        for (int64_t i = cut.first_fragment[rank]; i < cut.first_fragment[rank + 1];
             i++) {
            const sequence_fragment_t *f = &cut.fragments[i];
            failed +=
                f->rank != rank || f->row != row || f->span[0] != 0 || f->span[1] < 1;
            for (int32_t t = 0; t < f->span[1]; t++) {
                int64_t token = batch->offsets[f->sequence] + f->begin + t;
                failed += token >= batch->offsets[f->sequence + 1] || seen[token] != 0;
                seen[token] = 1;
            }
            row += f->span[1];
        }
        failed += row != rows;
    }
    failed += cut.first_row[ranks] != batch->token_count
              || cut.first_fragment[ranks] != cut.fragment_count;
    CHECK(failed == 0);
    sequence_cut_fini(&cut);
}

static void
test_cuts(void)
{
    int64_t offsets[MOST_SEQUENCES + 1];
    for (int round = 0; round < 400; round++) {
        int64_t count = draw(MOST_SEQUENCES + 1);
        offsets[0] = 0;
        for (int64_t s = 0; s < count; s++) {
            int64_t below = round % 3 == 0 ? 4 : round % 3 == 1 ? 60 : 400;
            offsets[s + 1] = offsets[s] + draw(below);
        }
        dcp_batch_t batch = {
            .token_count = offsets[count], .sequence_count = count, .offsets = offsets};
        int32_t ulysses = 1 + (int32_t)draw(4);
        check_cut(&batch, ulysses * (1 + (int32_t)draw(5)), ulysses);
    }
}

/* One long sequence over a ring: query-key pairs of ranks differ by little. */
static void
test_zigzag_is_even(void)
{
    const int64_t offsets[] = {0, 4099};
    dcp_batch_t batch = {.token_count = 4099, .sequence_count = 1, .offsets = offsets};
    for (int32_t ranks = 2; ranks <= 8; ranks++) {
        sequence_cut_t cut;
        CHECK_OK(sequence_cut_init(&batch, ranks, 1, &cut));
        double least = INFINITY, most = 0;
        for (int32_t rank = 0; rank < ranks; rank++) {
            double pairs = 0;
            for (int64_t i = cut.first_fragment[rank]; i < cut.first_fragment[rank + 1];
                 i++) {
                const sequence_fragment_t *f = &cut.fragments[i];
                pairs += (double)f->span[1] * (f->begin + 0.5 * (f->span[1] + 1));
            }
            least = fmin(least, pairs);
            most = fmax(most, pairs);
        }
        CHECK(most <= 1.01 * least);
        sequence_cut_fini(&cut);
    }
}

static void
test_bad_offsets(void)
{
    const int64_t falling[] = {0, 5, 3}, late[] = {1, 3}, other[] = {0, 2};
    sequence_cut_t cut;
    dcp_batch_t batch = {.token_count = 3, .sequence_count = 2, .offsets = falling};
    CHECK(sequence_cut_init(&batch, 2, 1, &cut) == DCP_ERR_ARG);
    batch = (dcp_batch_t){.token_count = 3, .sequence_count = 1, .offsets = late};
    CHECK(sequence_cut_init(&batch, 2, 1, &cut) == DCP_ERR_ARG);
    batch.offsets = other;
    CHECK(sequence_cut_init(&batch, 2, 1, &cut) == DCP_ERR_ARG);
}

static dcp_status_t
cut_scenario(void)
{
    const int64_t offsets[] = {0, 100, 107};
    dcp_batch_t batch = {.token_count = 107, .sequence_count = 2, .offsets = offsets};
    sequence_cut_t cut;
    dcp_status_t status = sequence_cut_init(&batch, 3, 1, &cut);
    sequence_cut_fini(&cut);
    return status;
}

/* Heads ------------------------------------------------------------------------ */

/* Cases S-03, S-04, S-05: the parts have `wanted` heads, each head once, and every call
 * reads the key-value heads of its query heads. */
static void
check_heads(int64_t heads, int64_t kv_heads, int32_t parts, const int64_t *wanted)
{
    dcp_transformer1d_config_t config = {.num_attention_heads = heads,
                                         .num_key_value_heads = kv_heads};
    int64_t next = 0, group = heads / kv_heads;
    int failed = 0;
    for (int32_t part = 0; part < parts; part++) {
        sequence_heads_t h;
        sequence_heads_of(&config, parts, part, &h);
        failed += wanted != NULL && h.head_count != wanted[part];
        failed += h.head_count > 0 && h.head != next;
        for (int32_t i = 0; i < h.run_count; i++) {
            const sequence_run_t *run = &h.runs[i];
            failed += run->head != next || run->head_count % run->kv_count != 0;
            for (int64_t j = 0; j < run->head_count; j++) {
                int64_t read = run->kv_head + j / (run->head_count / run->kv_count);
                failed += read != (run->head + j) / group;
                failed += read < h.kv_head || read >= h.kv_head + h.kv_count;
            }
            next += run->head_count;
        }
    }
    CHECK(failed == 0 && next == heads);
}

static void
test_heads(void)
{
    const int64_t seven[] = {2, 2, 2, 1}, twenty[] = {3, 3, 3, 3, 2, 2, 2, 2};
    const int64_t twelve[] = {3, 3, 3, 3}, one[] = {1, 1, 0, 0};
    check_heads(7, 7, 4, seven);
    check_heads(20, 20, 8, twenty);
    check_heads(12, 12, 4, twelve);
    check_heads(12, 3, 4, twelve);
    check_heads(2, 1, 4, one);
    for (int32_t parts = 1; parts <= 40; parts++) {
        check_heads(40, 8, parts, NULL);
        check_heads(28, 7, parts, NULL);
    }
    dcp_transformer1d_config_t config = {.num_attention_heads = 40,
                                         .num_key_value_heads = 8};
    for (int32_t rank = 0; rank < 40; rank++) {
        sequence_heads_t h;
        sequence_heads_of(&config, 40, rank, &h);
        CHECK(h.kv_head == rank / 5 && h.kv_count == 1);
    }
    CHECK(sequence_ulysses(&config, 6, DCP_SEQUENCE_AUTO) == 2);
    CHECK(sequence_ulysses(&config, 7, DCP_SEQUENCE_AUTO) == 1);
    CHECK(sequence_ulysses(&config, 6, DCP_SEQUENCE_ULYSSES) == 6);
    CHECK(sequence_ulysses(&config, 6, DCP_SEQUENCE_RING) == 1);
}

/* Kernels ---------------------------------------------------------------------- */

enum {
    ROWS = 40,
    HEADS = 4,
    KV = 2,
    DIM = 6,
    WIDTH = HEADS * DIM,
    KV_WIDTH = KV * DIM
};

static float q[ROWS * WIDTH], k[ROWS * KV_WIDTH], v[ROWS * KV_WIDTH],
    dout[ROWS * WIDTH];

static void
fill(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        x[i] = draw_float();
    }
}

static dcp_attention_args_t
attention_args(float *out, float *lse)
{
    return (dcp_attention_args_t){.q = q,
                                  .k = k,
                                  .v = v,
                                  .q_stride = WIDTH,
                                  .k_stride = KV_WIDTH,
                                  .v_stride = KV_WIDTH,
                                  .out_stride = WIDTH,
                                  .causal = 1,
                                  .sequence_count = 1,
                                  .query_rows = ROWS,
                                  .heads = HEADS,
                                  .kv_heads = KV,
                                  .head_dim = DIM,
                                  .scale = 0.4f,
                                  .out = out,
                                  .lse = lse};
}

static double
difference(const float *a, const float *b, int64_t count)
{
    double most = 0;
    for (int64_t i = 0; i < count; i++) {
        most = fmax(most, fabs((double)a[i] - b[i]));
    }
    return most;
}

/* A sequence as fragments with overlapping key ranges: the same as the whole. */
static void
test_key_ends(dcp_pool_t *pool)
{
    static float out[ROWS * WIDTH], lse[HEADS * ROWS], part[ROWS * WIDTH];
    static float part_lse[HEADS * ROWS];
    const int32_t whole[] = {0, ROWS}, cut[] = {0, 7, 8, ROWS};
    const int32_t begins[] = {0, 0, 0}, ends[] = {7, 8, ROWS}, beyond[] = {7, 8, -1};
    dcp_attention_args_t args = attention_args(out, lse);
    args.offsets = whole;
    CHECK_OK(dcp_cpu_attention(pool, &args));
    args = attention_args(part, part_lse);
    args.offsets = cut;
    args.key_offsets = begins;
    args.key_ends = ends;
    args.sequence_count = 3;
    CHECK_OK(dcp_cpu_attention(pool, &args));
    CHECK(difference(out, part, ROWS * WIDTH) <= 1e-6);
    CHECK(difference(lse, part_lse, HEADS * ROWS) <= 1e-6);
    args.key_ends = beyond;
    CHECK(dcp_cpu_attention(pool, &args) == DCP_ERR_ARG);
    args.key_ends = ends;
    args.key_offsets = NULL;
    CHECK(dcp_cpu_attention(pool, &args) == DCP_ERR_ARG);
}

/* The gradient of a whole sequence is the sum over pairs of its parts, with the lse of
 * the whole; scores far apart (cases S-08, S-09: nothing is ever merged). */
static void
test_accumulate(dcp_pool_t *pool, float shift)
{
    static float out[ROWS * WIDTH], lse[HEADS * ROWS];
    static float dq[2][ROWS * WIDTH], dk[2][ROWS * KV_WIDTH], dv[2][ROWS * KV_WIDTH];
    const int32_t whole[] = {0, ROWS}, cut[] = {0, 13, ROWS};
    const int32_t first[] = {0, 13}, second[] = {0, ROWS - 13};
    for (int64_t i = 0; i < ROWS * KV_WIDTH; i++) {
        k[i] += shift;
    }
    dcp_attention_backward_args_t args = {.forward = attention_args(out, lse),
                                          .dout = dout,
                                          .dout_stride = WIDTH,
                                          .dq = dq[0],
                                          .dk = dk[0],
                                          .dv = dv[0],
                                          .dq_stride = WIDTH,
                                          .dk_stride = KV_WIDTH,
                                          .dv_stride = KV_WIDTH,
                                          .key_rows = ROWS};
    args.forward.offsets = whole;
    CHECK_OK(dcp_cpu_attention(pool, &args.forward));
    CHECK_OK(dcp_cpu_attention_backward(pool, &args));
    args.dq = dq[1];
    args.dk = dk[1];
    args.dv = dv[1];
    args.forward.offsets = cut;
    args.forward.sequence_count = 2;
    CHECK_OK(dcp_cpu_attention_backward(pool, &args));
    args.forward.q += 13 * WIDTH;
    args.forward.out += 13 * WIDTH;
    args.forward.lse += 13;
    args.dout += 13 * WIDTH;
    args.dq += 13 * WIDTH;
    args.forward.offsets = second;
    args.forward.key_offsets = first;
    args.forward.sequence_count = 1;
    args.forward.causal = 0;
    args.key_rows = 13;
    args.accumulate = 1;
    args.forward.query_rows = ROWS; /* rows of lse; those beyond the offsets stay */
    CHECK_OK(dcp_cpu_attention_backward(pool, &args));
    double limit = 2e-5 * (1 + fabs((double)shift));
    CHECK(difference(dq[0], dq[1], ROWS * WIDTH) <= limit);
    CHECK(difference(dk[0], dk[1], ROWS * KV_WIDTH) <= limit);
    CHECK(difference(dv[0], dv[1], ROWS * KV_WIDTH) <= limit);
    args.forward.key_ends = first;
    CHECK(dcp_cpu_attention_backward(pool, &args) == DCP_ERR_ARG);
    for (int64_t i = 0; i < ROWS * KV_WIDTH; i++) {
        k[i] -= shift;
    }
}

static void
test_row_add(dcp_pool_t *pool)
{
    float a[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, out[12] = {0};
    dcp_row_add_args_t args = {
        .rows = 3, .width = 2, .a = a, .out = out + 1, .a_stride = 4, .out_stride = 3};
    const float copied[12] = {0, 1, 2, 0, 5, 6, 0, 9, 10},
                added[12] = {0, 2, 4, 0, 10, 12, 0, 18, 20};
    CHECK_OK(dcp_cpu_row_add(pool, &args));
    CHECK(memcmp(out, copied, sizeof out) == 0);
    args.b = out + 1;
    args.b_stride = 3;
    CHECK_OK(dcp_cpu_row_add(pool, &args));
    CHECK(memcmp(out, added, sizeof out) == 0);
    args.a_stride = 1;
    CHECK(dcp_cpu_row_add(pool, &args) == DCP_ERR_ARG);
    args.rows = 0;
    CHECK_OK(dcp_cpu_row_add(pool, &args));
}

/* Groups ----------------------------------------------------------------------- */

enum { SLOTS = 4, TOKENS = 150, PARAMETERS = 1 << 13 };

static const dcp_transformer1d_config_t model_config = {
    .vocab_size = 11,
    .hidden_size = 12,
    .intermediate_size = 10,
    .num_hidden_layers = 2,
    .num_attention_heads = 3,
    .num_key_value_heads = 1,
    .head_dim = 4,
    .max_position_embeddings = 128,
    .rope_theta = 10000,
    .rms_norm_eps = 1e-6,
    .initializer_range = 0.1,
};

typedef struct task {
    int32_t rank, size, no_windows, layers;
    dcp_sequence_kind_t kind;
    int32_t disagree; /* rank 1 has another token */
    dcp_status_t status;
    char message[512];
    double loss, evaluated;
    float *gradients; /* [PARAMETERS], shared; each rank writes its shard */
} task_t;

/* A micro-batch of all ranks, then one of ranks 0 and 1, and in windows one alone. */
static dcp_status_t
run_steps(dcp_sharded_t *sharded, task_t *task)
{
    int32_t tokens[TOKENS + 1];
    int64_t busy_ns[SLOTS], row_ids[TOKENS];
    const int64_t long_offsets[] = {0, 2, 3, 100, 100, 130};
    const int64_t short_offsets[] = {0, 1}, no_offsets[] = {0};
    for (int64_t t = 0; t <= TOKENS; t++) {
        tokens[t] = (int32_t)((5 * t + t * t / 7) % model_config.vocab_size);
        row_ids[t % TOKENS] = t % TOKENS;
    }
    tokens[40] = task->disagree && task->rank == 1 ? 0 : 1;
    dcp_micro_batch_t batches[3] = {
        {.batch = {.token_count = 130,
                   .sequence_count = 5,
                   .tokens = tokens,
                   .offsets = long_offsets,
                   .labels = tokens + 1,
                   .scale = 0.02,
                   .row_ids = row_ids,
                   .recompute = {task->layers, 0}},
         .rank_count = task->size},
        {.batch = {.token_count = 1,
                   .sequence_count = 1,
                   .tokens = tokens + 140,
                   .offsets = short_offsets,
                   .labels = tokens + 141,
                   .scale = 0.02,
                   .row_ids = row_ids + 140},
         .rank_count = task->size > 1 ? 2 : 1},
        {.batch = {.token_count = 0, .offsets = no_offsets},
         .first_rank = task->rank,
         .rank_count = 1},
    };
    dcp_rank_group_t groups[2] = {{.first = 0, .count = 2}, {.count = task->size}};
    if (task->rank >= 2) {
        batches[1] = batches[2];
    }
    dcp_step_args_t args = {.batches = batches,
                            .batch_count = 3,
                            .groups = groups,
                            .group_count = task->size == 1   ? 0
                                           : task->size == 2 ? 1
                                                             : 2,
                            .trainable_count = 50};
    for (int turn = 0; turn < 2; turn++) { /* the second finds everything there */
        DCP_TRY(dcp_sharded_gradients(sharded, &args, busy_ns, &task->loss));
        DCP_TRY(dcp_sharded_evaluate(sharded, &args, &task->evaluated));
    }
    const dcp_dbuffer_run_t *runs;
    int64_t run_count, starts[64] = {0};
    for (int64_t i = 0; i < dcp_sharded_tensor_count(sharded); i++) {
        const dcp_model_tensor_t *tensor = dcp_sharded_tensor(sharded, i);
        starts[i + 1] =
            starts[i]
            + tensor->shape[0] * (tensor->dim_count == 2 ? tensor->shape[1] : 1);
    }
    dcp_dbuffer_layout_runs(dcp_sharded_layout(sharded), task->rank, &runs, &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        memcpy(task->gradients + starts[runs[i].tensor] + runs[i].first,
               dcp_dbuffer_run_data(dcp_sharded_buffer(sharded, DCP_SHARDED_GRADIENTS),
                                    &runs[i]),
               (size_t)runs[i].count * sizeof(float));
    }
    return DCP_OK;
}

static dcp_status_t
run_rank(task_t *task)
{
    char run_id[64];
    snprintf(run_id, sizeof run_id, "test-sequence-%d-%d", (int)getpid(), task->size);
    dcp_comm_options_t comm_options = {
        .rank = task->rank, .size = task->size, .run_id = run_id};
    dcp_sharded_options_t options = {.block_rows = 1,
                                     .seed = 5,
                                     .initialise = 1,
                                     .no_windows = task->no_windows,
                                     .sequence_kind = task->kind};
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
            comm, &model_config, task->rank % 2 ? dcp_device_late() : dcp_device_cpu(),
            pool, &options, &sharded);
    }
    if (status == DCP_OK) {
        status = run_steps(sharded, task);
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
run_world(const task_t *like, task_t *tasks)
{
    for (int32_t rank = 0; rank < like->size; rank++) {
        tasks[rank] = *like;
        tasks[rank].rank = rank;
    }
    run_rank_threads(rank_main, tasks, sizeof tasks[0], like->size);
}

static double
norm_of(const float *x, const float *minus)
{
    double sum = 0;
    for (int64_t i = 0; i < PARAMETERS; i++) {
        double d = (double)x[i] - (minus != NULL ? (double)minus[i] : 0.0);
        sum += d * d;
    }
    return sqrt(sum);
}

/* Every way to share a micro-batch gives one rank's gradient; messages give the bits of
 * windows, and recomputing those of keeping. */
static void
test_groups(void)
{
    static float one[PARAMETERS], first[PARAMETERS], other[PARAMETERS];
    task_t tasks[SLOTS], alone = {.size = 1, .gradients = one};
    run_world(&alone, tasks);
    CHECK(tasks[0].status == DCP_OK);
    double loss = tasks[0].loss;
    for (int32_t size = 2; size <= SLOTS; size++) {
        for (int kind = DCP_SEQUENCE_AUTO; kind <= DCP_SEQUENCE_RING; kind++) {
            for (int mode = 0; mode < 3; mode++) {
                task_t like = {.size = size,
                               .kind = (dcp_sequence_kind_t)kind,
                               .no_windows = mode == 1,
                               .layers = mode == 2 ? 2 : 0,
                               .gradients = mode == 0 ? first : other};
                run_world(&like, tasks);
                for (int32_t rank = 0; rank < size; rank++) {
                    CHECK(tasks[rank].status == DCP_OK);
                    if (tasks[rank].status != DCP_OK) {
                        printf("rank %d of %d, kind %d, mode %d: %s\n", rank, size,
                               kind, mode, tasks[rank].message);
                    }
                    CHECK(fabs(tasks[rank].loss - loss) <= 1e-5 * fabs(loss));
                    CHECK(fabs(tasks[rank].evaluated - loss) <= 1e-5 * fabs(loss));
                }
                CHECK(norm_of(like.gradients, one) <= 1e-5 * norm_of(one, NULL));
                CHECK(mode == 0 || memcmp(first, other, sizeof first) == 0);
            }
        }
    }
}

/* Case S-10: ranks that do not compute the same thing fail, all of them. */
static void
test_disagreement(void)
{
    static float unused[PARAMETERS];
    for (int32_t no_windows = 0; no_windows < 2; no_windows++) {
        task_t tasks[SLOTS], like = {.size = 3,
                                     .disagree = 1,
                                     .no_windows = no_windows,
                                     .gradients = unused};
        run_world(&like, tasks);
        int named = 0;
        for (int32_t rank = 0; rank < 3; rank++) {
            CHECK(tasks[rank].status == DCP_ERR_MISMATCH
                  || tasks[rank].status == DCP_ERR_ABORTED);
            named += strstr(tasks[rank].message, "share a micro-batch") != NULL;
        }
        CHECK(named > 0);
    }
}

int
main(void)
{
    test_cuts();
    test_zigzag_is_even();
    test_bad_offsets();
    test_heads();
    dcp_pool_t *pool;
    for (int32_t threads = 1; threads <= 2; threads++) {
        CHECK_OK(dcp_pool_create(threads, &pool));
        fill(q, ROWS * WIDTH);
        fill(k, ROWS * KV_WIDTH);
        fill(v, ROWS * KV_WIDTH);
        fill(dout, ROWS * WIDTH);
        test_key_ends(pool);
        test_accumulate(pool, 0);
        test_accumulate(pool, 20);
        test_row_add(pool);
        dcp_pool_destroy(pool);
    }
    test_groups();
    test_disagreement();
    check_every_alloc(cut_scenario);
    CHECK(dcp_alloc_held_bytes() == 0);
    return check_finish();
}
