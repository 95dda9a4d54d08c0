/* shard DBuffer: layouts of groups, sums, norms. Ranks are threads over the shm
 * transport; what a norm gives must be the same bits in every world. */
#include "check.h"
#include "rank_threads.h"

#include "dcp/dbuffer.h"
#include "dcp/rng.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANK_SLOTS = 6, TENSOR_SLOTS = 16 };

typedef struct model {
    dcp_dbuffer_tensor_t tensors[TENSOR_SLOTS];
    int64_t count;
} model_t;

/* Two equal layers around which odd ones lie; a group whose tensors are not neighbours,
 * an empty tensor, one row more than ranks, one-element rows. */
static const model_t model = {
    {{37, 6, 0, 0},
     {3, 8, 1, 0},
     {11, 1, 1, 0},
     {40, 24, 1, 0},
     {3, 8, 2, 0},
     {11, 1, 2, 0},
     {40, 24, 2, 0},
     {0, 5, 3, 0},
     {1, 1, 3, 0},
     {9000, 3, 3, 0},
     {7, 100, 0, 0},
     {1, 40000, 3, 0}},
    12,
};

static int64_t
elements_of(const dcp_dbuffer_tensor_t *tensor)
{
    return tensor->row_count * tensor->row_width;
}

/* Every element of every tensor on one rank; rows whole; slices kept; 16-byte starts.
 */
static bool
layout_is_valid(const dcp_dbuffer_layout_t *layout, const model_t *m, int32_t ranks)
{
    static uint8_t seen[TENSOR_SLOTS][50000];
    memset(seen, 0, sizeof seen);
    bool valid = true;
    for (int32_t rank = 0; rank < ranks; rank++) {
        const dcp_dbuffer_run_t *runs;
        int64_t run_count, end = 0;
        dcp_dbuffer_layout_runs(layout, rank, &runs, &run_count);
        for (int64_t i = 0; i < run_count; i++) {
            const dcp_dbuffer_tensor_t *tensor = &m->tensors[runs[i].tensor];
            int64_t start = dcp_dbuffer_layout_start(layout, runs[i].tensor);
            valid = valid && runs[i].count > 0 && runs[i].start == start + runs[i].first
                    && runs[i].first % tensor->row_width == 0
                    && runs[i].count % tensor->row_width == 0 && runs[i].start >= end
                    && start % 4 == 0;
            end = runs[i].start + runs[i].count;
            valid = valid && end <= dcp_dbuffer_layout_elements(layout);
            for (int64_t k = 0; valid && k < runs[i].count; k++) {
                seen[runs[i].tensor][runs[i].first + k]++;
            }
        }
    }
    for (int64_t t = 0; t < m->count; t++) {
        for (int64_t k = 0; k < elements_of(&m->tensors[t]); k++) {
            valid = valid && seen[t][k] == 1;
        }
    }
    return valid;
}

static void
test_layout(void)
{
    for (int32_t ranks = 1; ranks <= 9; ranks++) {
        for (int64_t rows = 1; rows <= 3; rows++) {
            dcp_dbuffer_layout_t *layout;
            CHECK_OK(dcp_dbuffer_layout_create(model.tensors, model.count, ranks, rows,
                                               (dcp_layout_order_t)(rows % 4),
                                               &layout));
            CHECK(layout_is_valid(layout, &model, ranks));
            /* equal groups lie alike */
            int64_t shift = dcp_dbuffer_layout_start(layout, 4)
                            - dcp_dbuffer_layout_start(layout, 1);
            CHECK(dcp_dbuffer_layout_start(layout, 6)
                      - dcp_dbuffer_layout_start(layout, 3)
                  == shift);
            dcp_dbuffer_layout_destroy(layout);
        }
    }
}

static void
test_random_layouts(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 4, 0);
    int64_t invalid = 0;
    for (int n = 0; n < 300; n++) {
        model_t random = {.count = (int64_t)dcp_rng_below(&rng, TENSOR_SLOTS)};
        int32_t groups = 0;
        for (int64_t i = 0; i < random.count; i++) {
            int32_t group = (int32_t)dcp_rng_below(&rng, (uint64_t)groups + 1);
            groups += group == groups;
            random.tensors[i] =
                (dcp_dbuffer_tensor_t){(int64_t)dcp_rng_below(&rng, 20),
                                       1 + (int64_t)dcp_rng_below(&rng, 9), group, 0};
        }
        int32_t ranks = 1 + (int32_t)dcp_rng_below(&rng, 9);
        dcp_dbuffer_layout_t *layout;
        CHECK_OK(dcp_dbuffer_layout_create(random.tensors, random.count, ranks,
                                           1 + (int64_t)dcp_rng_below(&rng, 4),
                                           DCP_ORDER_MODEL, &layout));
        invalid += !layout_is_valid(layout, &random, ranks);
        dcp_dbuffer_layout_destroy(layout);
    }
    CHECK(invalid == 0);
}

static void
test_layout_limits(void)
{
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_tensor_t bad_group[] = {{2, 2, 1, 0}};
    CHECK(dcp_dbuffer_layout_create(bad_group, 1, 2, 1, DCP_ORDER_MODEL, &layout)
          == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "group 1") != NULL);
    dcp_dbuffer_tensor_t huge[] = {{INT64_MAX / 2, 3, 0, 0}};
    CHECK(dcp_dbuffer_layout_create(huge, 1, 2, 1, DCP_ORDER_MODEL, &layout)
          == DCP_ERR_ARG);
    dcp_dbuffer_tensor_t large[5];
    for (int32_t i = 0; i < 5; i++) {
        large[i] = (dcp_dbuffer_tensor_t){INT64_MAX / 64, 4, i, 0};
    }
    CHECK(dcp_dbuffer_layout_create(large, 5, 1, 1, DCP_ORDER_MODEL, &layout)
          == DCP_ERR_ARG);
    CHECK(dcp_dbuffer_layout_create(model.tensors, model.count, 0, 1, DCP_ORDER_MODEL,
                                    &layout)
          == DCP_ERR_ARG);
    CHECK(dcp_dbuffer_layout_create(model.tensors, model.count, 1, 0, DCP_ORDER_MODEL,
                                    &layout)
          == DCP_ERR_ARG);
    CHECK_OK(dcp_dbuffer_layout_create(NULL, 0, 3, 1, DCP_ORDER_MODEL, &layout));
    CHECK(dcp_dbuffer_layout_elements(layout) == 0);
    dcp_dbuffer_layout_destroy(layout);
    dcp_dbuffer_layout_destroy(NULL);
    dcp_dbuffer_destroy(NULL);
}

/* Sums of the same terms, dealt to parts in any way, agree bit for bit. */
static void
test_exact_sum(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 5, 0);
    for (int n = 0; n < 50; n++) {
        dcp_exact_sum_t whole, parts[4], total;
        dcp_exact_sum_init(&whole);
        dcp_exact_sum_init(&total);
        for (int p = 0; p < 4; p++) {
            dcp_exact_sum_init(&parts[p]);
        }
        for (int i = 0; i < 200; i++) {
            double x =
                ldexp(dcp_rng_uniform(&rng), (int)dcp_rng_below(&rng, 200) - 100);
            dcp_exact_sum_add(&whole, x);
            dcp_exact_sum_add(&parts[dcp_rng_below(&rng, 4)], x);
        }
        for (int p = 0; p < 4; p++) {
            dcp_exact_sum_merge(&total, &parts[p]);
        }
        CHECK(dcp_exact_sum_value(&total) == dcp_exact_sum_value(&whole));
        for (int i = 0; i < DCP_EXACT_WORDS; i++) {
            total.words[i] = 0;
            for (int p = 0; p < 4; p++) {
                dcp_exact_sum_normalise(&parts[p]);
                CHECK(parts[p].words[i] >= 0 && parts[p].words[i] >> 32 == 0);
                total.words[i] += parts[p].words[i];
            }
        }
        CHECK(dcp_exact_sum_value(&total) == dcp_exact_sum_value(&whole));
    }
    dcp_exact_sum_t sum;
    dcp_exact_sum_init(&sum);
    CHECK(dcp_exact_sum_value(&sum) == 0.0);
    dcp_exact_sum_add(&sum, INFINITY);
    CHECK(isnan(dcp_exact_sum_value(&sum)));
}

/* A value of a tensor: of its place in the model only, over many magnitudes. */
static float
value_at(uint64_t seed, int64_t tensor, int64_t element)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, seed, (uint64_t)tensor << 32 | (uint64_t)element);
    float x = (float)dcp_rng_normal(&rng);
    return ldexpf(x, (int)dcp_rng_below(&rng, 20) - 10);
}

typedef struct rank_result {
    double norm, masked, after_nan; /* of the summed gradients */
    int64_t wrong_sums, wrong_weights, changed_copies;
    dcp_status_t status;
    char message[256];
} rank_result_t;

/* What a rank does with a layout of `tensors`. */
typedef dcp_status_t (*use_func_t)(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                                   dcp_pool_t *pool, rank_result_t *result);

typedef struct rank_task {
    int32_t rank, size;
    const model_t *model;
    use_func_t use;
    rank_result_t result;
} rank_task_t;

/* Runs of the own shard hold the sum in rank order; nothing else has changed. */
static void
check_sum(const dcp_dbuffer_layout_t *layout, int32_t rank, int32_t size,
          const float *data, rank_result_t *result)
{
    for (int32_t owner = 0; owner < size; owner++) {
        const dcp_dbuffer_run_t *runs;
        int64_t run_count;
        dcp_dbuffer_layout_runs(layout, owner, &runs, &run_count);
        for (int64_t i = 0; i < run_count; i++) {
            for (int64_t k = 0; k < runs[i].count; k++) {
                int64_t element = runs[i].first + k;
                float own = data[runs[i].start + k], sum = 0;
                for (int32_t r = 0; r < size; r++) {
                    float x = value_at((uint64_t)r, runs[i].tensor, element);
                    sum = r == 0 ? x : sum + x;
                }
                if (owner == rank) {
                    result->wrong_sums += own != sum;
                } else {
                    result->changed_copies +=
                        own != value_at((uint64_t)rank, runs[i].tensor, element);
                }
            }
        }
    }
}

static dcp_status_t
use_gradients(dcp_comm_t *comm, dcp_dbuffer_t *buffer,
              const dcp_dbuffer_layout_t *layout, dcp_pool_t *pool,
              rank_result_t *result)
{
    int32_t rank = dcp_comm_rank(comm), size = dcp_comm_size(comm);
    for (int64_t t = 0; t < model.count; t++) {
        float *data = dcp_dbuffer_tensor_data(buffer, t);
        for (int64_t k = 0; k < elements_of(&model.tensors[t]); k++) {
            data[k] = value_at((uint64_t)rank, t, k);
        }
    }
    DCP_TRY(dcp_comm_barrier(comm));
    DCP_TRY(dcp_dbuffer_reduce(buffer, pool));
    DCP_TRY(dcp_comm_barrier(comm));
    check_sum(layout, rank, size, dcp_dbuffer_data(buffer), result);
    /* from here on the values of rank 0: the same in every world */
    for (int64_t t = 0; t < model.count; t++) {
        float *data = dcp_dbuffer_tensor_data(buffer, t);
        for (int64_t k = 0; k < elements_of(&model.tensors[t]); k++) {
            data[k] = value_at(0, t, k);
        }
    }
    DCP_TRY(dcp_dbuffer_norm(buffer, pool, NULL, &result->norm));
    uint8_t mask[TENSOR_SLOTS];
    memset(mask, 1, sizeof mask);
    mask[9] = 0;
    DCP_TRY(dcp_dbuffer_norm(buffer, pool, mask, &result->masked));
    dcp_dbuffer_tensor_data(buffer, 8)[0] = NAN;
    return dcp_dbuffer_norm(buffer, pool, NULL, &result->after_nan);
}

static dcp_status_t
use_weights(dcp_comm_t *comm, dcp_dbuffer_t *buffer, const dcp_dbuffer_layout_t *layout,
            dcp_pool_t *pool, rank_result_t *result)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(layout, dcp_comm_rank(comm), &runs, &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        for (int64_t k = 0; k < runs[i].count; k++) {
            dcp_dbuffer_data(buffer)[runs[i].start + k] =
                value_at(9, runs[i].tensor, runs[i].first + k);
        }
    }
    DCP_TRY(dcp_comm_barrier(comm));
    for (int64_t t = 0; t < model.count; t++) {
        const float *data = dcp_dbuffer_tensor_data(buffer, t);
        for (int64_t k = 0; k < elements_of(&model.tensors[t]); k++) {
            result->wrong_weights += data[k] != value_at(9, t, k);
        }
    }
    DCP_TRY(dcp_comm_barrier(comm));
    return dcp_dbuffer_reduce(buffer, pool) == DCP_ERR_STATE ? DCP_OK : DCP_ERR_STATE;
}

/* Whole groups put together from the shards of all ranks. */
static dcp_status_t
check_gather(dcp_dbuffer_t *buffer, const dcp_dbuffer_layout_t *layout, float *full,
             rank_result_t *result)
{
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(layout); g++) {
        DCP_TRY(dcp_dbuffer_gather(buffer, g, full));
        int64_t start = dcp_dbuffer_layout_group(layout, g).start;
        for (int64_t t = 0; t < model.count; t++) {
            const float *data = full + dcp_dbuffer_layout_start(layout, t) - start;
            for (int64_t k = 0;
                 model.tensors[t].group == g && k < elements_of(&model.tensors[t]);
                 k++) {
                result->wrong_weights += data[k] != value_at(0, t, k);
            }
        }
    }
    return DCP_OK;
}

/* Shards alone: the same runs as everywhere, a group when it is gathered, the same
 * norm. */
static dcp_status_t
use_shards(dcp_comm_t *comm, dcp_dbuffer_t *buffer, const dcp_dbuffer_layout_t *layout,
           dcp_pool_t *pool, rank_result_t *result)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(layout, dcp_comm_rank(comm), &runs, &run_count);
    float *end = dcp_dbuffer_data(buffer);
    for (int64_t i = 0; i < run_count; i++) {
        float *data = dcp_dbuffer_run_data(buffer, &runs[i]);
        result->wrong_weights += data < end;
        end = data + runs[i].count;
        for (int64_t k = 0; k < runs[i].count; k++) {
            data[k] = value_at(0, runs[i].tensor, runs[i].first + k);
        }
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(dcp_dbuffer_layout_elements(layout), (int64_t)sizeof(float),
                            "test", &memory));
    dcp_status_t status = check_gather(buffer, layout, memory, result);
    dcp_free(memory);
    double norm = 0;
    if (status == DCP_OK) {
        status = dcp_dbuffer_norm(buffer, pool, NULL, &norm);
    }
    if (status == DCP_OK
        && (norm != result->norm || dcp_dbuffer_tensor_data(buffer, 0))) {
        status = DCP_ERR_STATE;
    }
    dcp_dbuffer_zero(buffer);
    for (int64_t i = 0; i < run_count; i++) {
        for (int64_t k = 0; k < runs[i].count; k++) {
            result->wrong_sums += dcp_dbuffer_run_data(buffer, &runs[i])[k] != 0;
        }
    }
    if (status == DCP_OK && dcp_dbuffer_reduce(buffer, pool) != DCP_ERR_STATE) {
        status = DCP_ERR_STATE;
    }
    return status;
}

static dcp_status_t
use_buffers(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout, dcp_pool_t *pool,
            rank_result_t *result)
{
    dcp_dbuffer_t *buffer;
    DCP_TRY(dcp_dbuffer_create(comm, layout, DCP_DBUFFER_PRIVATE, &buffer));
    dcp_status_t status = use_gradients(comm, buffer, layout, pool, result);
    dcp_dbuffer_destroy(buffer);
    double norm = result->norm;
    if (status == DCP_OK) {
        status = dcp_dbuffer_create(comm, layout, DCP_DBUFFER_LOCAL, &buffer);
    }
    if (status == DCP_OK) {
        status = use_gradients(comm, buffer, layout, pool, result);
        dcp_dbuffer_destroy(buffer);
        result->wrong_sums += norm != result->norm;
    }
    if (status == DCP_OK) {
        status = dcp_dbuffer_create(comm, layout, DCP_DBUFFER_SHARD, &buffer);
    }
    if (status == DCP_OK) {
        status = use_shards(comm, buffer, layout, pool, result);
        dcp_dbuffer_destroy(buffer);
    }
    if (status == DCP_OK) {
        status = dcp_dbuffer_create(comm, layout, DCP_DBUFFER_SHARED, &buffer);
    }
    if (status == DCP_OK) {
        status = use_weights(comm, buffer, layout, pool, result);
        dcp_dbuffer_destroy(buffer);
    }
    return status;
}

static dcp_status_t
run_rank(rank_task_t *task)
{
    char run_id[64];
    snprintf(run_id, sizeof run_id, "test-dbuffer-%d-%d", (int)getpid(), task->size);
    dcp_comm_options_t options = {
        .rank = task->rank, .size = task->size, .run_id = run_id};
    dcp_comm_t *comm = NULL;
    dcp_pool_t *pool = NULL;
    dcp_dbuffer_layout_t *layout = NULL;
    dcp_status_t status = task->size == 1 ? dcp_comm_create_self(&comm)
                                          : dcp_comm_create_shm(&options, &comm);
    if (status == DCP_OK) {
        status = dcp_pool_create(1 + task->rank % 2, &pool);
    }
    if (status == DCP_OK) {
        status = dcp_dbuffer_layout_create(task->model->tensors, task->model->count,
                                           task->size, 1 + task->size % 3,
                                           DCP_ORDER_MODEL, &layout);
    }
    if (status == DCP_OK) {
        status = task->use(comm, layout, pool, &task->result);
    }
    if (status != DCP_OK && comm != NULL) {
        dcp_comm_abort(comm, dcp_last_error());
    }
    dcp_dbuffer_layout_destroy(layout);
    dcp_pool_destroy(pool);
    dcp_comm_destroy(comm);
    return status;
}

static void *
rank_main(void *argument)
{
    rank_task_t *task = argument;
    task->result.status = run_rank(task);
    snprintf(task->result.message, sizeof task->result.message, "%s", dcp_last_error());
    return NULL;
}

static void
run_world(const model_t *m, int32_t size, use_func_t use, rank_task_t *tasks)
{
    for (int32_t rank = 0; rank < size; rank++) {
        tasks[rank] = (rank_task_t){.rank = rank, .size = size, .model = m, .use = use};
    }
    run_rank_threads(rank_main, tasks, sizeof tasks[0], size);
    for (int32_t rank = 0; rank < size; rank++) {
        CHECK(tasks[rank].result.status == DCP_OK);
        if (tasks[rank].result.status != DCP_OK) {
            printf("rank %d of %d: %s\n", rank, size, tasks[rank].result.message);
        }
    }
}

static void
test_worlds(void)
{
    double squares = 0, masked = 0;
    for (int64_t t = 0; t < model.count; t++) {
        for (int64_t k = 0; k < elements_of(&model.tensors[t]); k++) {
            double x = value_at(0, t, k);
            squares += x * x;
            masked += t == 9 ? 0 : x * x;
        }
    }
    rank_result_t first = {0};
    for (int32_t size = 1; size <= RANK_SLOTS; size++) {
        rank_task_t tasks[RANK_SLOTS];
        run_world(&model, size, use_buffers, tasks);
        for (int32_t rank = 0; rank < size; rank++) {
            const rank_result_t *result = &tasks[rank].result;
            CHECK(result->wrong_sums == 0);
            CHECK(result->changed_copies == 0);
            CHECK(result->wrong_weights == 0);
            CHECK(isnan(result->after_nan));
            if (size == 1) {
                first = *result;
                CHECK(fabs(first.norm / sqrt(squares) - 1) < 1e-13);
                CHECK(fabs(first.masked / sqrt(masked) - 1) < 1e-13);
            }
            CHECK(result->norm == first.norm);
            CHECK(result->masked == first.masked);
        }
    }
}

static dcp_status_t
use_known_gradients(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                    dcp_pool_t *pool, rank_result_t *result)
{
    dcp_dbuffer_t *buffer;
    DCP_TRY(dcp_dbuffer_create(comm, layout, DCP_DBUFFER_PRIVATE, &buffer));
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(layout, dcp_comm_rank(comm), &runs, &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        float own = dcp_comm_rank(comm) == 0 ? 3.0f : 4.0f;
        dcp_dbuffer_data(buffer)[runs[i].start] = runs[i].tensor == 1 ? 12.0f : own;
    }
    const uint8_t mask[] = {1, 0};
    dcp_status_t status = dcp_dbuffer_norm(buffer, pool, mask, &result->masked);
    if (status == DCP_OK) {
        status = dcp_dbuffer_norm(buffer, pool, NULL, &result->norm);
    }
    dcp_dbuffer_destroy(buffer);
    return status;
}

/* case F-05: gradients 3 on one rank and 4 on the other have norm 5, and with a tensor
 * of gradient 12 that only one of them holds, 13. */
static void
test_known_norm(void)
{
    static const model_t two = {{{32, 4, 0, 0}, {1, 1, 0, 0}}, 2}; /* both hold rows */
    rank_task_t tasks[RANK_SLOTS];
    run_world(&two, 2, use_known_gradients, tasks);
    for (int rank = 0; rank < 2; rank++) {
        CHECK(tasks[rank].result.masked == 5.0);
        CHECK(tasks[rank].result.norm == 13.0);
    }
}

static void
test_create_limits(void)
{
    dcp_comm_t *comm;
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_t *buffer;
    CHECK_OK(dcp_comm_create_self(&comm));
    CHECK_OK(dcp_dbuffer_layout_create(model.tensors, model.count, 2, 1,
                                       DCP_ORDER_MODEL, &layout));
    CHECK(dcp_dbuffer_create(comm, layout, DCP_DBUFFER_SHARED, &buffer) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "2 ranks") != NULL);
    dcp_dbuffer_layout_destroy(layout);
    CHECK_OK(dcp_dbuffer_layout_create(NULL, 0, 1, 1, DCP_ORDER_MODEL, &layout));
    CHECK_OK(dcp_dbuffer_create(comm, layout, DCP_DBUFFER_PRIVATE, &buffer));
    CHECK(dcp_dbuffer_data(buffer) != NULL);
    dcp_dbuffer_destroy(buffer);
    dcp_dbuffer_layout_destroy(layout);
    dcp_comm_destroy(comm);
}

static dcp_status_t
self_scenario(void)
{
    dcp_comm_t *comm = NULL;
    dcp_dbuffer_layout_t *layout = NULL;
    dcp_dbuffer_t *buffer = NULL;
    dcp_status_t status = dcp_comm_create_self(&comm);
    if (status == DCP_OK) {
        status = dcp_dbuffer_layout_create(model.tensors, model.count, 1, 1,
                                           DCP_ORDER_SEARCH, &layout);
    }
    for (int kind = DCP_DBUFFER_SHARED; status == DCP_OK && kind <= DCP_DBUFFER_SHARD;
         kind++) {
        status = dcp_dbuffer_create(comm, layout, (dcp_dbuffer_kind_t)kind, &buffer);
        if (status == DCP_OK) {
            dcp_dbuffer_destroy(buffer);
        }
    }
    dcp_dbuffer_layout_destroy(layout);
    dcp_comm_destroy(comm);
    return status;
}

int
main(void)
{
    test_layout();
    test_random_layouts();
    test_layout_limits();
    test_exact_sum();
    test_create_limits();
    test_worlds();
    test_known_norm();
    check_every_alloc(self_scenario);
    return check_finish();
}
