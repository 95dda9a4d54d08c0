/* shard DBuffer by groups: arithmetic on slices, memory on demand, gathers in place and
 * ahead, sums over replicas, norms of blocks. Ranks are threads over the shm transport;
 * everything is held against plain loops over the tensors' elements. */
#include "comm_ranks.h"

#include "dcp/dbuffer.h"
#include "dcp/threads.h"

#include <math.h>

/* Two equal layers, small and odd tensors, one that is empty, one with blocks that are
 * not whole rows, a group with nothing in it but an empty tensor. */
enum { TENSORS = 11, GROUPS = 5 };
static const dcp_dbuffer_tensor_t tensors[TENSORS] = {
    {37, 6, 0, 0},     {1, 1, 0, 0},  {40, 24, 1, 0}, {11, 1, 1, 0},
    {40, 24, 2, 0},    {11, 1, 2, 0}, {0, 5, 3, 0},   {50, 300, 4, 160},
    {3000, 40, 4, 80}, {3, 7, 4, 0},  {1, 1, 4, 0},
};

static int64_t
elements_of(int64_t tensor)
{
    return tensors[tensor].row_count * tensors[tensor].row_width;
}

static float
element(uint64_t seed, int64_t tensor, int64_t i)
{
    return value(seed * 100 + (uint64_t)tensor, 7, i);
}

typedef struct world {
    dcp_comm_t *comm;
    dcp_pool_t *pool;
    dcp_dbuffer_layout_t *layout;
    const dcp_dbuffer_run_t *runs; /* of this rank */
    int64_t run_count;
} world_t;

static void
world_open(rank_t *r, dcp_comm_t *comm, world_t *world)
{
    *world = (world_t){.comm = comm};
    REQUIRE(r, dcp_pool_create(1 + r->rank % 2, &world->pool) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_layout_create(tensors, TENSORS, dcp_comm_size(comm), 1,
                                         DCP_ORDER_MODEL, &world->layout)
                   == DCP_OK);
    dcp_dbuffer_layout_runs(world->layout, dcp_comm_rank(comm), &world->runs,
                            &world->run_count);
}

static void
world_close(world_t *world)
{
    dcp_dbuffer_layout_destroy(world->layout);
    dcp_pool_destroy(world->pool);
}

static dcp_dbuffer_t *
make(rank_t *r, const world_t *world, dcp_dbuffer_kind_t kind, dcp_dtype_t dtype,
     int32_t keep_own)
{
    dcp_dbuffer_options_t options = {
        .kind = kind, .dtype = dtype, .keep_own = keep_own};
    dcp_dbuffer_t *buffer = NULL;
    REQUIRE(r, dcp_dbuffer_create_with(world->comm, world->layout, &options, &buffer)
                   == DCP_OK);
    return buffer;
}

/* This rank's runs get their elements. */
static void
write_runs(const world_t *world, dcp_dbuffer_t *buffer, uint64_t seed)
{
    for (int64_t i = 0; i < world->run_count; i++) {
        const dcp_dbuffer_run_t *run = &world->runs[i];
        for (int64_t k = 0; k < run->count; k++) {
            dcp_dbuffer_run_data(buffer, run)[k] =
                element(seed, run->tensor, run->first + k);
        }
    }
}

/* Elements of a tensor of a group that differ from `seed`'s, rounded to the type. */
static int64_t
wrong_in_group(const dcp_dbuffer_t *buffer, int32_t group, uint64_t seed)
{
    int64_t wrong = 0;
    for (int64_t t = 0; t < TENSORS; t++) {
        const void *data = dcp_dbuffer_tensor_bytes(buffer, t);
        for (int64_t k = 0; tensors[t].group == group && k < elements_of(t); k++) {
            float x = element(seed, t, k);
            wrong += dcp_dbuffer_dtype(buffer) == DCP_F32
                         ? ((const float *)data)[k] != x
                         : ((const uint16_t *)data)[k] != dcp_f32_to_bf16(x);
        }
    }
    return wrong;
}

static void
arithmetic(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *a = make(r, &world, DCP_DBUFFER_LOCAL, DCP_F32, 0);
    dcp_dbuffer_t *b = make(r, &world, DCP_DBUFFER_SHARD, DCP_F32, 0);
    dcp_dbuffer_t *half = make(r, &world, DCP_DBUFFER_SHARD, DCP_BF16, 0);
    write_runs(&world, a, 1);
    write_runs(&world, b, 2);
    const int32_t all = DCP_DBUFFER_ALL_GROUPS;
    REQUIRE(r, dcp_dbuffer_add(a, world.pool, all, 0.5f, b) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_scale(a, world.pool, 4, 3.0f) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_copy(half, world.pool, all, a) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_copy(b, world.pool, 4, half) == DCP_OK);
    int64_t wrong = 0, bad = 0;
    for (int64_t i = 0; i < world.run_count; i++) {
        const dcp_dbuffer_run_t *run = &world.runs[i];
        for (int64_t k = 0; k < run->count; k++) {
            int64_t at = run->first + k;
            int32_t last = tensors[run->tensor].group == 4;
            float y = element(2, run->tensor, at);
            float x = element(1, run->tensor, at) + 0.5f * y;
            x *= last ? 3.0f : 1.0f;
            uint16_t rounded = dcp_f32_to_bf16(x);
            y = last ? dcp_bf16_to_f32(rounded) : y;
            wrong += dcp_dbuffer_run_data(a, run)[k] != x;
            wrong += dcp_dbuffer_run_data(b, run)[k] != y;
            wrong += ((uint16_t *)dcp_dbuffer_run_bytes(half, run))[k] != rounded;
        }
    }
    REQUIRE(r, wrong == 0);
    REQUIRE(r, dcp_dbuffer_count_nonfinite(a, world.pool, all, &bad) == DCP_OK);
    REQUIRE(r, bad == 0);
    if (world.run_count > 0) {
        const dcp_dbuffer_run_t *run = &world.runs[world.run_count - 1];
        dcp_dbuffer_run_data(a, run)[0] = -INFINITY;
        dcp_dbuffer_run_data(a, run)[run->count - 1] = NAN;
        REQUIRE(r, dcp_dbuffer_count_nonfinite(a, world.pool, all, &bad) == DCP_OK);
        REQUIRE(r, bad == (run->count > 1 ? 2 : 1));
        REQUIRE(r, dcp_dbuffer_copy(half, world.pool, all, a) == DCP_OK);
        REQUIRE(r, dcp_dbuffer_count_nonfinite(half, world.pool, all, &bad) == DCP_OK);
        REQUIRE(r, bad == (run->count > 1 ? 2 : 1));
    }
    REQUIRE(r, dcp_dbuffer_fill(a, world.pool, all, 2.5f) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_fill(half, world.pool, all, 0.0f) == DCP_OK);
    for (int64_t i = 0; i < world.run_count; i++) {
        for (int64_t k = 0; k < world.runs[i].count; k++) {
            wrong += dcp_dbuffer_run_data(a, &world.runs[i])[k] != 2.5f;
            wrong += ((uint16_t *)dcp_dbuffer_run_bytes(half, &world.runs[i]))[k] != 0;
        }
    }
    REQUIRE(r, wrong == 0);
    REQUIRE(r, dcp_dbuffer_scale(half, world.pool, all, 2.0f) == DCP_ERR_TYPE);
    REQUIRE(r, dcp_dbuffer_add(a, world.pool, GROUPS, 1.0f, b) == DCP_ERR_ARG);
    REQUIRE(r, dcp_dbuffer_reduce(half, world.pool) == DCP_ERR_STATE);
    dcp_dbuffer_destroy(half);
    dcp_dbuffer_destroy(b);
    dcp_dbuffer_destroy(a);
    world_close(&world);
}

/* Shards that are gathered around themselves, and copies in bf16: right, in place, at
 * addresses that stay, and with nothing copied. */
static void
gathers(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *main = make(r, &world, DCP_DBUFFER_DEMAND, DCP_F32, 1);
    dcp_dbuffer_t *half = make(r, &world, DCP_DBUFFER_DEMAND, DCP_BF16, 0);
    dcp_dbuffer_t *shared = make(r, &world, DCP_DBUFFER_SHARED, DCP_BF16, 0);
    const void *place = dcp_dbuffer_tensor_bytes(main, 8);
    REQUIRE(r, dcp_dbuffer_gather_whole(half, world.pool, 0, NULL) == DCP_ERR_ARG);
    int64_t elements = 0;
    for (uint64_t step = 0; step < 2; step++) {
        write_runs(&world, main, step);
        for (int32_t g = 0; g < GROUPS; g++) {
            REQUIRE(r, !dcp_dbuffer_is_held(main, g));
            REQUIRE(r, dcp_dbuffer_gather_whole(main, world.pool, g, NULL) == DCP_OK);
            REQUIRE(r, dcp_dbuffer_gather_whole(half, world.pool, g, main) == DCP_OK);
            REQUIRE(r, dcp_dbuffer_gather_whole(shared, world.pool, g, main) == DCP_OK);
            REQUIRE(r, wrong_in_group(main, g, step) == 0);
            REQUIRE(r, wrong_in_group(half, g, step) == 0);
            REQUIRE(r, wrong_in_group(shared, g, step) == 0);
            elements += dcp_dbuffer_layout_group(world.layout, g).shard;
            dcp_dbuffer_release(main, g);
            dcp_dbuffer_release(half, g);
        }
        REQUIRE(r, place == dcp_dbuffer_tensor_bytes(main, 8));
    }
    /* what was given back reads as zeros; this rank's shard is still there */
    REQUIRE(r, ((uint16_t *)dcp_dbuffer_tensor_bytes(half, 8))[0] == 0);
    int64_t wrong = 0;
    for (int64_t i = 0; i < world.run_count; i++) {
        const dcp_dbuffer_run_t *run = &world.runs[i];
        for (int64_t k = 0; k < run->count; k++) {
            wrong += dcp_dbuffer_run_data(main, run)[k]
                     != element(1, run->tensor, run->first + k);
        }
    }
    REQUIRE(r, wrong == 0);
    int64_t others = r->size - 1;
    REQUIRE(r, dcp_dbuffer_traffic(main).moved_bytes == 4 * others * elements);
    REQUIRE(r, dcp_dbuffer_traffic(half).moved_bytes == 2 * others * elements);
    REQUIRE(r, dcp_dbuffer_traffic(shared).moved_bytes == 0);
    REQUIRE(r, dcp_dbuffer_traffic(main).copied_bytes == 0);
    REQUIRE(r, dcp_dbuffer_traffic(half).copied_bytes == 0);
    REQUIRE(r, dcp_dbuffer_traffic(main).gather_count == 2 * GROUPS);
    dcp_dbuffer_destroy(shared);
    dcp_dbuffer_destroy(half);
    dcp_dbuffer_destroy(main);
    world_close(&world);
}

/* Whole gradients that come and go by groups, summed in place. */
static void
sums(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    const dcp_dbuffer_kind_t kinds[] = {DCP_DBUFFER_PRIVATE, DCP_DBUFFER_LOCAL,
                                        DCP_DBUFFER_DEMAND};
    for (int k = 0; k < 3; k++) {
        dcp_dbuffer_t *buffer = make(r, &world, kinds[k], DCP_F32, 0);
        int64_t wrong = 0, elements = 0;
        if (kinds[k] == DCP_DBUFFER_DEMAND) {
            REQUIRE(r, dcp_dbuffer_reduce_one(buffer, world.pool, 1) == DCP_ERR_STATE);
            REQUIRE(r, dcp_dbuffer_fill(buffer, world.pool, 1, 1.0f) == DCP_ERR_STATE);
        }
        for (int32_t g = 0; g < GROUPS; g++) {
            if (kinds[k] == DCP_DBUFFER_DEMAND) {
                REQUIRE(r, dcp_dbuffer_acquire(buffer, g) == DCP_OK);
            }
            for (int64_t t = 0; t < TENSORS; t++) {
                float *data = dcp_dbuffer_tensor_data(buffer, t);
                for (int64_t i = 0; tensors[t].group == g && i < elements_of(t); i++) {
                    data[i] += value((uint64_t)t, r->rank, i);
                }
            }
            REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
            REQUIRE(r, dcp_dbuffer_reduce_one(buffer, world.pool, g) == DCP_OK);
            REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
            elements += dcp_dbuffer_layout_group(world.layout, g).shard;
            for (int64_t i = 0; i < world.run_count; i++) {
                const dcp_dbuffer_run_t *run = &world.runs[i];
                for (int64_t j = 0; tensors[run->tensor].group == g && j < run->count;
                     j++) {
                    wrong += dcp_dbuffer_run_data(buffer, run)[j]
                             != sum_of((uint64_t)run->tensor, r->size, run->first + j);
                }
            }
            dcp_dbuffer_release(buffer, g);
        }
        REQUIRE(r, wrong == 0);
        dcp_dbuffer_traffic_t traffic = dcp_dbuffer_traffic(buffer);
        REQUIRE(r, traffic.copied_bytes == 0);
        REQUIRE(r, traffic.reduce_count == GROUPS);
        REQUIRE(r, traffic.moved_bytes == 4 * (r->size - 1) * elements);
        dcp_dbuffer_destroy(buffer);
    }
    world_close(&world);
}

/* Gathers that run ahead in a declared order, while the caller communicates. */
static void
ahead(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *main = make(r, &world, DCP_DBUFFER_SHARD, DCP_F32, 0);
    dcp_dbuffer_t *half = make(r, &world, DCP_DBUFFER_DEMAND, DCP_BF16, 0);
    const int32_t order[] = {0, 1, 2, 3, 4, 3, 2, 1};
    enum { COUNT = sizeof order / sizeof order[0] };
    REQUIRE(r, dcp_dbuffer_gather_begin(half, 0) == DCP_ERR_STATE);
    REQUIRE(r, dcp_dbuffer_gather_order(half, main, order, COUNT) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_gather_wait(half, 0) == DCP_ERR_STATE);
    REQUIRE(r, dcp_dbuffer_gather_begin(half, 1) == DCP_ERR_STATE);
    REQUIRE(r, dcp_dbuffer_gather_whole(half, world.pool, 0, main) == DCP_ERR_STATE);
    for (uint64_t step = 0; step < 3; step++) {
        write_runs(&world, main, step);
        REQUIRE(r, dcp_dbuffer_gather_begin(half, order[0]) == DCP_OK);
        for (int i = 0; i < COUNT; i++) {
            REQUIRE(r, dcp_dbuffer_gather_wait(half, order[i]) == DCP_OK);
            if (i + 1 < COUNT) {
                REQUIRE(r, dcp_dbuffer_gather_begin(half, order[i + 1]) == DCP_OK);
            }
            int32_t one = 1;
            REQUIRE(r, dcp_comm_allreduce(r->comm, &one, &one, 1, DCP_I32, DCP_SUM)
                           == DCP_OK);
            REQUIRE(r, wrong_in_group(half, order[i], step) == 0);
            dcp_dbuffer_release(half, order[i]);
        }
        REQUIRE(r, dcp_dbuffer_gather_begin(half, order[0]) == DCP_OK);
        REQUIRE(r, dcp_dbuffer_gather_restart(half) == DCP_OK);
        dcp_dbuffer_release(half, order[0]);
    }
    REQUIRE(r, dcp_dbuffer_traffic(half).copied_bytes == 0);
    REQUIRE(r, dcp_dbuffer_gather_begin(half, order[0]) == DCP_OK); /* left alone */
    REQUIRE(r, dcp_dbuffer_gather_order(half, main, NULL, 0) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_gather_whole(half, world.pool, 4, main) == DCP_OK);
    REQUIRE(r, wrong_in_group(half, 4, 2) == 0);
    const int32_t other[] = {r->rank == 0 ? 2 : 1, 0};
    dcp_status_t status = dcp_dbuffer_gather_order(half, main, other, 2);
    REQUIRE(r, status == (r->size > 1 ? DCP_ERR_MISMATCH : DCP_OK));
    dcp_dbuffer_destroy(half);
    dcp_dbuffer_destroy(main);
    world_close(&world);
}

/* Groups that take turns in two places, and what is there still passed over. */
static void
turns(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *main = make(r, &world, DCP_DBUFFER_SHARD, DCP_F32, 0), *whole = NULL;
    const int32_t places[GROUPS] = {7, 0, 1, 0, 1}, order[] = {0, 1, 2, 4, 2, 1};
    int64_t start = dcp_alloc_held_bytes();
    dcp_dbuffer_options_t options = {
        .kind = DCP_DBUFFER_LOCAL, .dtype = DCP_BF16, .places = places};
    REQUIRE(r,
            dcp_dbuffer_create_with(r->comm, world.layout, &options, &whole) == DCP_OK);
    if (r->size == 1) {
        dcp_dbuffer_t *apart = make(r, &world, DCP_DBUFFER_LOCAL, DCP_BF16, 0);
        int64_t held = dcp_alloc_held_bytes() - start;
        dcp_dbuffer_destroy(apart);
        held -= 2 * (dcp_alloc_held_bytes() - start);
        int64_t saved = dcp_dbuffer_layout_group(world.layout, 2).shard
                        + dcp_dbuffer_layout_group(world.layout, 3).shard;
        REQUIRE(r, held >= 2 * saved - 256 && saved > 0);
    }
    dcp_dbuffer_zero(whole);
    write_runs(&world, main, 5);
    for (int32_t g = 0; g < GROUPS; g++) {
        REQUIRE(r, dcp_dbuffer_gather_whole(whole, world.pool, g, main) == DCP_OK);
        REQUIRE(r, wrong_in_group(whole, g, 5) == 0);
    }
    REQUIRE(r, wrong_in_group(whole, 0, 5) == 0);
    REQUIRE(r, dcp_dbuffer_gather_skip(whole, 0) == DCP_ERR_STATE);
    REQUIRE(r, dcp_dbuffer_gather_order(whole, main, order, 6) == DCP_OK);
    for (int32_t pass = 0; pass < 3; pass++) {
        REQUIRE(r, dcp_dbuffer_gather_skip(whole, 1) == DCP_ERR_STATE);
        REQUIRE(r, dcp_dbuffer_gather_skip(whole, 0) == DCP_OK);
        REQUIRE(r, dcp_dbuffer_gather_wait(whole, 0) == DCP_ERR_STATE);
        for (int32_t i = 1; i < 5; i++) {
            REQUIRE(r, dcp_dbuffer_gather_begin(whole, order[i]) == DCP_OK);
            REQUIRE(r, dcp_dbuffer_gather_wait(whole, order[i]) == DCP_OK);
            REQUIRE(r, wrong_in_group(whole, order[i], 5) == 0);
            REQUIRE(r, wrong_in_group(whole, order[i - 1], 5) == 0 || i > 2);
        }
        REQUIRE(r, dcp_dbuffer_gather_skip(whole, 1) == DCP_OK);
        REQUIRE(r, wrong_in_group(whole, 1, 5) == 0);
        if (pass == 0) { /* from the end of the order it goes on at its start */
            continue;
        }
        REQUIRE(r, dcp_dbuffer_gather_skip(whole, 0) == DCP_OK);
        REQUIRE(r, dcp_dbuffer_gather_restart(whole) == DCP_OK);
    }
    dcp_dbuffer_destroy(whole);
    dcp_dbuffer_destroy(main);
    world_close(&world);
}

/* A rank that leaves in the middle of the order is an error of who waits for it. */
static void
abandoned(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *main = make(r, &world, DCP_DBUFFER_DEMAND, DCP_F32, 1);
    const int32_t order[] = {4, 1};
    REQUIRE(r, dcp_dbuffer_gather_order(main, NULL, order, 2) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_gather_begin(main, 4) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_gather_wait(main, 4) == DCP_OK);
    if (r->rank != 1) {
        REQUIRE(r, dcp_dbuffer_gather_begin(main, 1) == DCP_OK);
        dcp_status_t status = dcp_dbuffer_gather_wait(main, 1);
        REQUIRE(r, status == DCP_ERR_PEER);
        REQUIRE(r, strstr(dcp_last_error(), "rank 1") != NULL);
        REQUIRE(r, dcp_dbuffer_gather_restart(main) == status);
    }
    dcp_dbuffer_destroy(main);
    world_close(&world);
}

/* Replicas x shards: rank = replica x shards + place. The update of all replicas starts
 * from the same bits: the sums of shard groups, added in the order of replicas. */
static void
hybrid(rank_t *r)
{
    dcp_comm_t *shards, *replicas;
    int32_t width = r->size / 2, replica = r->rank / width, place = r->rank % width;
    REQUIRE(r, dcp_comm_split(r->comm, replica, r->rank, &shards) == DCP_OK);
    REQUIRE(r, dcp_comm_split(r->comm, place, r->rank, &replicas) == DCP_OK);
    world_t world;
    world_open(r, shards, &world);
    for (int kind = DCP_DBUFFER_PRIVATE; kind <= DCP_DBUFFER_LOCAL; kind++) {
        dcp_dbuffer_options_t options = {.kind = (dcp_dbuffer_kind_t)kind,
                                         .replicas = replicas};
        dcp_dbuffer_t *buffer = NULL;
        REQUIRE(r, dcp_dbuffer_create_with(shards, world.layout, &options, &buffer)
                       == DCP_OK);
        for (int64_t t = 0; t < TENSORS; t++) {
            for (int64_t i = 0; i < elements_of(t); i++) {
                dcp_dbuffer_tensor_data(buffer, t)[i] = value((uint64_t)t, r->rank, i);
            }
        }
        REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
        REQUIRE(r, dcp_dbuffer_reduce(buffer, world.pool) == DCP_OK);
        REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
        int64_t wrong = 0;
        for (int64_t i = 0; i < world.run_count; i++) {
            const dcp_dbuffer_run_t *run = &world.runs[i];
            for (int64_t k = 0; k < run->count; k++) {
                float parts[2] = {0, 0};
                for (int32_t rank = 0; rank < r->size; rank++) {
                    float x = value((uint64_t)run->tensor, rank, run->first + k);
                    float *part = &parts[rank / width];
                    *part = rank % width == 0 ? x : *part + x;
                }
                wrong += dcp_dbuffer_run_data(buffer, run)[k] != parts[0] + parts[1];
            }
        }
        REQUIRE(r, wrong == 0);
        double norm, least, largest;
        REQUIRE(r, dcp_dbuffer_norm(buffer, world.pool, NULL, &norm) == DCP_OK);
        REQUIRE(r, dcp_comm_allreduce(r->comm, &norm, &least, 1, DCP_F64, DCP_MIN)
                       == DCP_OK);
        REQUIRE(r, dcp_comm_allreduce(r->comm, &norm, &largest, 1, DCP_F64, DCP_MAX)
                       == DCP_OK);
        REQUIRE(r, least == largest && norm > 0);
        dcp_dbuffer_destroy(buffer);
    }
    world_close(&world);
    dcp_comm_destroy(replicas);
    dcp_comm_destroy(shards);
}

/* case F-05: shard gradients 3 on one rank and 4 on the other beside a replicated one
 * of 12: norm 13 (counting it twice gives 17.69), largest 12; the same where every
 * shard stands twice. */
static void
known_norm(rank_t *r)
{
    dcp_comm_t *comm;
    REQUIRE(r, dcp_comm_split(r->comm, r->rank / 2, r->rank, &comm) == DCP_OK);
    const dcp_dbuffer_tensor_t one = {32, 4, 0, 0};
    dcp_pool_t *pool;
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_t *buffer;
    REQUIRE(r, dcp_pool_create(1, &pool) == DCP_OK);
    REQUIRE(r, dcp_dbuffer_layout_create(&one, 1, 2, 1, DCP_ORDER_MODEL, &layout)
                   == DCP_OK);
    REQUIRE(r, dcp_dbuffer_create(comm, layout, DCP_DBUFFER_SHARD, &buffer) == DCP_OK);
    dcp_dbuffer_slice(buffer, 0)[0] = dcp_comm_rank(comm) == 0 ? 3.0f : -4.0f;
    float twelve[2] = {0, -12};
    const float *extras[] = {twelve};
    int64_t count = 2;
    dcp_dbuffer_norm_args_t args = {
        .extras = extras, .extra_counts = &count, .extra_count = 1};
    double norm;
    REQUIRE(r, dcp_dbuffer_norm(buffer, pool, NULL, &norm) == DCP_OK && norm == 5);
    REQUIRE(r, dcp_dbuffer_norm_with(buffer, pool, &args, &norm) == DCP_OK);
    REQUIRE(r, norm == 13);
    args.largest = 1;
    REQUIRE(r, dcp_dbuffer_norm_with(buffer, pool, &args, &norm) == DCP_OK);
    REQUIRE(r, norm == 12);
    args.extra_count = 0;
    REQUIRE(r, dcp_dbuffer_norm_with(buffer, pool, &args, &norm) == DCP_OK);
    REQUIRE(r, norm == 4);
    twelve[0] = NAN;
    args.extra_count = 1;
    REQUIRE(r, dcp_dbuffer_norm_with(buffer, pool, &args, &norm) == DCP_OK);
    REQUIRE(r, isnan(norm));
    dcp_dbuffer_destroy(buffer);
    dcp_dbuffer_layout_destroy(layout);
    dcp_pool_destroy(pool);
    dcp_comm_destroy(comm);
}

static double norms[MAX_RANKS + 1][MAX_RANKS]; /* [world, rank] */

/* Blocks that are not whole rows may be cut inside rows: the norm must not see it. */
static void
block_norm(rank_t *r)
{
    world_t world;
    world_open(r, r->comm, &world);
    dcp_dbuffer_t *buffer = make(r, &world, DCP_DBUFFER_SHARD, DCP_F32, 0);
    write_runs(&world, buffer, 3);
    REQUIRE(r, dcp_dbuffer_norm(buffer, world.pool, NULL, &norms[r->size][r->rank])
                   == DCP_OK);
    dcp_dbuffer_destroy(buffer);
    world_close(&world);
}

static void
test_block_norms(void)
{
    double squares = 0;
    for (int64_t t = 0; t < TENSORS; t++) {
        for (int64_t k = 0; k < elements_of(t); k++) {
            squares += (double)element(3, t, k) * (double)element(3, t, k);
        }
    }
    for (int32_t size = 1; size <= MAX_RANKS; size++) {
        rank_t ranks[MAX_RANKS];
        run_ranks(ranks, size, block_norm, 0, 60 * second_ns);
        for (int32_t rank = 0; rank < size; rank++) {
            CHECK(norms[size][rank] == norms[1][0]);
        }
    }
    CHECK(fabs(norms[1][0] / sqrt(squares) - 1) < 1e-13);
}

typedef struct alone {
    dcp_comm_t *comm;
    dcp_pool_t *pool;
    dcp_dbuffer_layout_t *layout;
    dcp_dbuffer_t *main, *half;
} alone_t;

static dcp_status_t
open_alone(alone_t *alone)
{
    *alone = (alone_t){0};
    DCP_TRY(dcp_comm_create_self(&alone->comm));
    DCP_TRY(dcp_pool_create(1, &alone->pool));
    DCP_TRY(dcp_dbuffer_layout_create(tensors, TENSORS, 1, 1, DCP_ORDER_MODEL,
                                      &alone->layout));
    dcp_dbuffer_options_t options = {.kind = DCP_DBUFFER_DEMAND, .keep_own = 1};
    DCP_TRY(
        dcp_dbuffer_create_with(alone->comm, alone->layout, &options, &alone->main));
    options = (dcp_dbuffer_options_t){.kind = DCP_DBUFFER_DEMAND, .dtype = DCP_BF16};
    return dcp_dbuffer_create_with(alone->comm, alone->layout, &options, &alone->half);
}

static void
close_alone(alone_t *alone)
{
    dcp_dbuffer_destroy(alone->half);
    dcp_dbuffer_destroy(alone->main);
    dcp_dbuffer_layout_destroy(alone->layout);
    dcp_pool_destroy(alone->pool);
    dcp_comm_destroy(alone->comm);
}

static dcp_status_t
use_alone(alone_t *alone)
{
    const int32_t order[] = {0, 4};
    DCP_TRY(open_alone(alone));
    DCP_TRY(dcp_dbuffer_gather_whole(alone->half, alone->pool, 1, alone->main));
    DCP_TRY(dcp_dbuffer_gather_order(alone->half, alone->main, order, 2));
    DCP_TRY(dcp_dbuffer_gather_begin(alone->half, 0));
    return dcp_dbuffer_gather_wait(alone->half, 0);
}

static dcp_status_t
alone_scenario(void)
{
    alone_t alone;
    dcp_status_t status = use_alone(&alone);
    close_alone(&alone);
    return status;
}

/* Held bytes go up and down with the groups in use, and a cap binds. */
static void
test_held_bytes(void)
{
    alone_t alone;
    CHECK_OK(open_alone(&alone));
    int64_t start = dcp_alloc_held_bytes();
    int64_t bytes = 2 * dcp_dbuffer_layout_group(alone.layout, 4).shard;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dcp_dbuffer_acquire(alone.half, 4));
        CHECK_OK(dcp_dbuffer_acquire(alone.half, 4));
        int64_t held = dcp_alloc_held_bytes() - start;
        CHECK(held >= bytes && held < bytes + 2 * 4096);
        uint16_t *data = dcp_dbuffer_tensor_bytes(alone.half, 8);
        CHECK(data[0] == 0 && data[1000] == 0);
        data[0] = data[1000] = 7;
        dcp_dbuffer_release(alone.half, 4);
        dcp_dbuffer_release(alone.half, 4);
        CHECK(dcp_alloc_held_bytes() == start);
        data[1000] = 9; /* harmless, and gone when there is memory again */
    }
    dcp_alloc_set_cap(start + bytes / 2);
    CHECK(dcp_dbuffer_acquire(alone.half, 4) == DCP_ERR_NO_MEM);
    CHECK(strstr(dcp_last_error(), "cap") != NULL);
    dcp_alloc_set_cap(0);
    CHECK(dcp_alloc_held_bytes() == start);
    CHECK(dcp_dbuffer_acquire(alone.half, GROUPS) == DCP_ERR_ARG);
    CHECK_OK(dcp_dbuffer_acquire(alone.half, 4));
    close_alone(&alone);
}

static void
test_limits(void)
{
    alone_t alone;
    dcp_dbuffer_t *buffer;
    CHECK_OK(open_alone(&alone));
    dcp_dbuffer_options_t options = {.dtype = DCP_F64};
    CHECK(dcp_dbuffer_create_with(alone.comm, alone.layout, &options, &buffer)
          == DCP_ERR_TYPE);
    options = (dcp_dbuffer_options_t){.kind = DCP_DBUFFER_LOCAL, .keep_own = 1};
    CHECK(dcp_dbuffer_create_with(alone.comm, alone.layout, &options, &buffer)
          == DCP_ERR_ARG);
    const int32_t order[] = {GROUPS}, places[GROUPS] = {0, 1, 0, -1, 0};
    options = (dcp_dbuffer_options_t){.kind = DCP_DBUFFER_LOCAL, .places = places};
    CHECK(dcp_dbuffer_create_with(alone.comm, alone.layout, &options, &buffer)
          == DCP_ERR_ARG);
    options = (dcp_dbuffer_options_t){.kind = DCP_DBUFFER_SHARD, .places = places};
    CHECK(dcp_dbuffer_create_with(alone.comm, alone.layout, &options, &buffer)
          == DCP_ERR_ARG);
    CHECK(dcp_dbuffer_gather_order(alone.half, alone.main, order, 1) == DCP_ERR_ARG);
    CHECK(dcp_dbuffer_gather_whole(alone.half, alone.pool, -1, alone.main)
          == DCP_ERR_ARG);
    CHECK(dcp_dbuffer_norm(alone.half, alone.pool, NULL, &(double){0}) == DCP_ERR_TYPE);
    CHECK_OK(dcp_dbuffer_create(alone.comm, alone.layout, DCP_DBUFFER_SHARED, &buffer));
    CHECK(dcp_dbuffer_acquire(buffer, 0) == DCP_ERR_STATE);
    CHECK(dcp_dbuffer_gather_whole(buffer, alone.pool, 0, alone.main) == DCP_ERR_STATE);
    dcp_dbuffer_destroy(buffer);
    close_alone(&alone);
}

int
main(void)
{
    static void (*const bodies[])(rank_t *) = {arithmetic, gathers, sums, ahead, turns};
    for (int32_t size = 1; size <= 4; size++) {
        for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
            rank_t ranks[MAX_RANKS];
            run_ranks(ranks, size, bodies[i], 0, 60 * second_ns);
        }
    }
    for (int32_t size = 2; size <= 6; size += 2) {
        rank_t ranks[MAX_RANKS];
        run_ranks(ranks, size, hybrid, 0, 60 * second_ns);
    }
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, 3, abandoned, 0, 60 * second_ns);
    run_ranks(ranks, 2, known_norm, 0, 60 * second_ns);
    run_ranks(ranks, 4, known_norm, 0, 60 * second_ns);
    test_block_norms();
    test_held_bytes();
    test_limits();
    check_every_alloc(alone_scenario);
    return check_finish();
}
