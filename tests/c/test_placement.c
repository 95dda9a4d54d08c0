/* Placements against the list of all elements, and moves of real ranks (threads over
 * the shm transport, so that TSan sees every access): messages, groups, windows, in
 * place; disagreement; allocations that fail. */
#include "comm_ranks.h"

#include "dcp/redistribute.h"

#include <stdbool.h>

enum { MOST = 4096, MOST_RANKS = 6 };

typedef struct tensor {
    int32_t dim_count;
    int64_t shape[4];
    dcp_mesh_t mesh;
    dcp_placement_t placements[2][DCP_MESH_AXES];
    int64_t values[2][DCP_MESH_AXES][MOST_RANKS + 1];
    int64_t count; /* elements */
} tensor_t;

/* Numbers of the elements a rank holds, the slow way: walk the tensor, keep what every
 * axis keeps. Returns their count. */
static int64_t
held_by(const tensor_t *t, const dcp_placement_t *placements, int32_t rank,
        int64_t *elements)
{
    int64_t low[4] = {0}, size[4];
    memcpy(size, t->shape, sizeof size);
    int64_t first = 0, end = -1;
    for (int32_t a = t->mesh.axis_count - 1; a >= 0; a--) {
        int64_t part = dcp_mesh_coordinate(&t->mesh, rank, a), parts = t->mesh.sizes[a];
        const dcp_placement_t *p = &placements[a];
        if (p->kind == DCP_SHARD_EVEN) {
            int64_t each = (size[p->dim] + parts - 1) / parts;
            for (int64_t i = 0; i < part && size[p->dim] > 0; i++) {
                int64_t gone = each < size[p->dim] ? each : size[p->dim];
                low[p->dim] += gone;
                size[p->dim] -= gone;
            }
            size[p->dim] = each < size[p->dim] ? each : size[p->dim];
        } else if (p->kind != DCP_REPLICATE) {
            int64_t count = 1, sum = 0, before = 0;
            for (int32_t d = 0; d < t->dim_count; d++) {
                count *= size[d];
            }
            for (int64_t i = 0; i < parts; i++) {
                before += i < part ? p->values[i] : 0;
                sum += p->values[i];
            }
            first = count * before / sum;
            end = count * (before + p->values[part]) / sum;
        }
    }
    int64_t held = 0, at = 0;
    for (int64_t e = 0; e < t->count; e++) {
        int64_t rest = e;
        bool inside = true;
        for (int32_t d = t->dim_count - 1; d >= 0; d--) {
            int64_t index = rest % t->shape[d];
            rest /= t->shape[d];
            inside = inside && index >= low[d] && index < low[d] + size[d];
        }
        if (inside) {
            if (at >= first && (end < 0 || at < end)) {
                elements[held++] = e;
            }
            at++;
        }
    }
    return held;
}

/* Units whose sum divides every box's elements, on an axis: multiples of one rank's. */
static void
random_ragged(dcp_rng_t *rng, tensor_t *t, int32_t side, int32_t axis)
{
    int64_t *values = t->values[side][axis], sum = 0;
    int32_t parts = t->mesh.sizes[axis];
    for (int32_t i = 0; i < parts; i++) {
        values[i] = (int64_t)dcp_rng_below(rng, 3);
        sum += values[i];
    }
    values[dcp_rng_below(rng, (uint64_t)parts)] += sum == 0;
    t->placements[side][axis] = (dcp_placement_t){DCP_SHARD_RAGGED, -1, values, parts};
    if (dcp_placement_check(t->shape, t->dim_count, &t->mesh, t->placements[side])
        != DCP_OK) {
        memset(values, 0, (size_t)parts * sizeof values[0]);
        values[dcp_rng_below(rng, (uint64_t)parts)] = 2; /* all on one rank: it fits */
    }
}

static void
random_tensor(dcp_rng_t *rng, const dcp_mesh_t *mesh, tensor_t *t)
{
    static const int64_t sizes[] = {1, 2, 3, 4, 6, 12, 0, 5};
    t->mesh = *mesh;
    t->dim_count = (int32_t)dcp_rng_below(rng, 4);
    t->count = 1;
    for (int32_t d = 0; d < t->dim_count; d++) {
        t->shape[d] = sizes[dcp_rng_below(rng, dcp_rng_below(rng, 8) == 0 ? 8 : 6)];
        t->count *= t->shape[d];
    }
    for (int32_t side = 0; side < 2; side++) {
        for (int32_t a = 0; a < mesh->axis_count; a++) {
            t->placements[side][a] = (dcp_placement_t){.kind = DCP_REPLICATE};
        }
        int32_t ragged =
            (int32_t)dcp_rng_below(rng, (uint64_t)mesh->axis_count + 1) - 1;
        for (int32_t a = mesh->axis_count - 1; a > ragged; a--) {
            if (t->dim_count > 0 && dcp_rng_below(rng, 3) > 0) {
                t->placements[side][a] = (dcp_placement_t){
                    .kind = DCP_SHARD_EVEN,
                    .dim = (int32_t)dcp_rng_below(rng, (uint64_t)t->dim_count)};
            }
        }
        if (ragged >= 0) {
            random_ragged(rng, t, side, ragged);
        }
    }
}

static const dcp_mesh_t meshes[] = {{1, {1}},      {1, {2}},    {1, {5}},
                                    {2, {2, 2}},   {2, {2, 3}}, {2, {3, 2}},
                                    {3, {2, 1, 3}}};
enum { MESH_COUNT = sizeof meshes / sizeof meshes[0] };

/* Runs, positions and overlaps against the lists. */
static void
check_sets(const tensor_t *t, int32_t a, int32_t b)
{
    static int64_t left[MOST], right[MOST];
    dcp_placed_t x, y;
    int64_t left_count = held_by(t, t->placements[0], a, left);
    int64_t right_count = held_by(t, t->placements[1], b, right);
    dcp_placement_local(t->shape, t->dim_count, &t->mesh, t->placements[0], a, &x);
    dcp_placement_local(t->shape, t->dim_count, &t->mesh, t->placements[1], b, &y);
    int64_t wrong = (x.count != left_count) + (y.count != right_count);
    for (int64_t i = 0; i < left_count; i++) {
        int64_t together;
        wrong += dcp_placed_run(&x, i, &together) != left[i];
        bool ends =
            i + together == left_count || left[i + together] != left[i] + together;
        wrong +=
            together < 1 || left[i + together - 1] != left[i] + together - 1 || !ends;
    }
    for (int64_t e = 0, below = 0; e <= t->count; e++) {
        wrong += dcp_placed_position(&x, e) != below;
        below += below < left_count && left[below] == e;
    }
    dcp_placed_t both = dcp_placed_overlap(&x, &y);
    int64_t shared = 0;
    for (int64_t i = 0, j = 0; i < left_count && j < right_count;) {
        if (left[i] == right[j]) {
            int64_t together;
            wrong += shared >= both.count
                     || dcp_placed_run(&both, shared, &together) != left[i];
            shared++;
            i++;
            j++;
        } else if (left[i] < right[j]) {
            i++;
        } else {
            j++;
        }
    }
    CHECK(wrong == 0 && shared == both.count);
}

static void
test_sets(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 11, 0);
    for (int32_t i = 0; i < 400; i++) {
        const dcp_mesh_t *mesh = &meshes[i % MESH_COUNT];
        tensor_t t;
        random_tensor(&rng, mesh, &t);
        CHECK_OK(dcp_placement_check(t.shape, t.dim_count, mesh, t.placements[0]));
        CHECK_OK(dcp_placement_check(t.shape, t.dim_count, mesh, t.placements[1]));
        for (int32_t a = 0; a < dcp_mesh_rank_count(mesh); a++) {
            check_sets(
                &t, a,
                (int32_t)dcp_rng_below(&rng, (uint64_t)dcp_mesh_rank_count(mesh)));
        }
    }
}

static void
test_largest_sizes(void)
{
    int64_t shape[2] = {INT64_C(1) << 30, INT64_C(1) << 28};
    dcp_mesh_t mesh = {2, {3, 2}};
    int64_t units[3] = {INT64_C(1) << 27, 0, INT64_C(1) << 28};
    dcp_placement_t placements[2] = {{DCP_SHARD_RAGGED, 1, units, 3},
                                     {DCP_SHARD_EVEN, 0, NULL, 0}};
    CHECK(dcp_placement_check(shape, 2, &mesh, placements) == DCP_ERR_ARG);
    units[1] = INT64_C(1) << 27; /* their sum divides 2^29 rows */
    CHECK_OK(dcp_placement_check(shape, 2, &mesh, placements));
    dcp_placed_t placed;
    dcp_placement_local(shape, 2, &mesh, placements, 5, &placed);
    CHECK(placed.count == INT64_C(1) << 56);
    int64_t together;
    CHECK(dcp_placed_run(&placed, placed.count - 1, &together)
          == (INT64_C(1) << 58) - 1);
    CHECK(dcp_placed_position(&placed, INT64_C(1) << 58) == placed.count);
    shape[1] = INT64_C(1) << 31;
    CHECK(dcp_placement_check(shape, 2, &mesh, placements) == DCP_ERR_ARG);
}

/* Element `e` of the tensor of a case. */
static float
content(int64_t e)
{
    return (float)(e * 7 % 1000) + 0.5f;
}

typedef struct move {
    dcp_comm_t *group;
    int32_t group_axis;
    bool in_window, in_place;
} move_t;

static void
check_move(rank_t *r, const tensor_t *t, const move_t *move)
{
    static _Thread_local int64_t has[MOST], wants[MOST];
    int64_t has_count = held_by(t, t->placements[0], r->rank, has);
    int64_t wants_count = held_by(t, t->placements[1], r->rank, wants);
    dcp_window_t *window = NULL;
    float *memory = NULL, *local, *out;
    int64_t room = (has_count + wants_count + 2) * (int64_t)sizeof(float);
    if (move->in_window) {
        REQUIRE(r, dcp_window_create(r->comm, room, &window) == DCP_OK);
        local = dcp_window_base(window, r->rank);
    } else {
        local = memory = malloc((size_t)room);
    }
    out = move->in_place ? local + 1 : local + has_count;
    for (int64_t i = 0; i < has_count; i++) {
        local[i] = content(has[i]);
    }
    dcp_redistribute_args_t args = {.comm = r->comm,
                                    .group = move->group,
                                    .group_axis = move->group_axis,
                                    .shape = t->shape,
                                    .dim_count = t->dim_count,
                                    .mesh = t->mesh,
                                    .source = t->placements[0],
                                    .target = t->placements[1],
                                    .dtype = DCP_F32,
                                    .local = local,
                                    .local_count = has_count,
                                    .out = out,
                                    .out_count = wants_count,
                                    .window = window};
    dcp_moved_t moved = {0};
    REQUIRE(r, dcp_redistribute(&args, &moved) == DCP_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < wants_count; i++) {
        wrong += out[i] != content(wants[i]);
    }
    REQUIRE(r, wrong == 0);
    REQUIRE(r, moved.kept_bytes + moved.received_bytes
                   == wants_count * (int64_t)sizeof(float));
    REQUIRE(r, move->in_place || moved.staged_bytes == 0);
    dcp_window_destroy(window);
    free(memory);
}

/* The ranks along each axis, NULL where it is alone. */
static void
split_axes(rank_t *r, const dcp_mesh_t *mesh, dcp_comm_t **groups)
{
    for (int32_t a = 0; a < mesh->axis_count; a++) {
        int32_t key = dcp_mesh_coordinate(mesh, r->rank, a), step = 1;
        for (int32_t b = mesh->axis_count - 1; b > a; b--) {
            step *= mesh->sizes[b];
        }
        groups[a] = NULL;
        if (mesh->sizes[a] > 1) {
            REQUIRE(r, dcp_comm_split(r->comm, r->rank - key * step, key, &groups[a])
                           == DCP_OK);
        }
    }
}

static void
check_sum(rank_t *r, const tensor_t *t, dcp_comm_t **groups)
{
    static _Thread_local int64_t wants[MOST];
    int64_t count = held_by(t, t->placements[1], r->rank, wants);
    float *full = floats(t->count), *out = floats(count);
    for (int64_t e = 0; e < t->count; e++) {
        full[e] = content(e) + (float)r->rank; /* sums are exact */
    }
    dcp_placement_reduce_args_t args = {.comm = r->comm,
                                        .groups = groups,
                                        .shape = t->shape,
                                        .dim_count = t->dim_count,
                                        .mesh = t->mesh,
                                        .target = t->placements[1],
                                        .full = full,
                                        .full_count = t->count,
                                        .out = out,
                                        .out_count = count};
    dcp_moved_t moved;
    REQUIRE(r, dcp_placement_reduce(&args, &moved) == DCP_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        float sum =
            content(wants[i]) * (float)r->size + (float)(r->size * (r->size - 1) / 2);
        wrong += out[i] != sum;
    }
    REQUIRE(r, wrong == 0);
    free(full);
    free(out);
}

static void
moves_body(rank_t *r)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, r->seed, 0);
    for (int32_t m = 0; m < MESH_COUNT; m++) {
        if (dcp_mesh_rank_count(&meshes[m]) != r->size) {
            continue;
        }
        dcp_comm_t *groups[DCP_MESH_AXES];
        split_axes(r, &meshes[m], groups);
        for (int32_t i = 0; i < 24; i++) {
            tensor_t t;
            random_tensor(&rng, &meshes[m], &t);
            move_t move = {NULL, 0, i % 2 == 1, i % 4 >= 2};
            int32_t cutting = 0;
            for (int32_t a = 0; a < t.mesh.axis_count; a++) {
                if (t.placements[0][a].kind != DCP_REPLICATE) {
                    cutting++;
                    move.group = groups[a];
                    move.group_axis = a;
                }
            }
            move.group = cutting == 1 ? move.group : NULL;
            check_move(r, &t, &move);
            check_sum(r, &t, groups);
        }
        for (int32_t a = 0; a < meshes[m].axis_count; a++) {
            dcp_comm_destroy(groups[a]);
        }
    }
}

static void
test_moves(void)
{
    static const int32_t sizes[] = {1, 2, 4, 5, 6};
    rank_t ranks[MOST_RANKS];
    for (int32_t i = 0; i < 5; i++) {
        run_ranks(ranks, sizes[i], moves_body, 3 + (uint64_t)i, 60 * second_ns);
    }
}

static void
disagree_body(rank_t *r)
{
    int64_t shape[1] = {6}, units[2] = {1, r->rank == 1 ? 2 : 1};
    dcp_placement_t source[1] = {{.kind = DCP_REPLICATE}};
    dcp_placement_t target[1] = {{DCP_SHARD_RAGGED, -1, units, 2}};
    float local[6] = {0}, out[6];
    dcp_redistribute_args_t args = {
        .comm = r->comm,
        .shape = shape,
        .dim_count = 1,
        .mesh = {1, {2}},
        .source = source,
        .target = target,
        .local = local,
        .local_count = 6,
        .out = out,
        .out_count = r->rank == 1 ? 4 : 3,
    };
    dcp_moved_t moved;
    keep(r, dcp_redistribute(&args, &moved));
    REQUIRE(r, r->status == DCP_ERR_MISMATCH);
    units[1] = 1;
    args.out_count = 3;
    REQUIRE(r, dcp_redistribute(&args, &moved) == DCP_OK);
    args.out_count = 4;
    REQUIRE(r, dcp_redistribute(&args, &moved) == DCP_ERR_ARG);
}

static void
test_disagreement(void)
{
    rank_t ranks[2];
    run_ranks(ranks, 2, disagree_body, 0, 60 * second_ns);
    CHECK(strcmp(ranks[0].message, ranks[1].message) == 0);
    CHECK(strstr(ranks[0].message, "RaggedShard((1, 2))") != NULL);
}

/* One rank alone: tables, pieces that move in place, scratch of sums. */
static dcp_status_t
alone(void)
{
    int64_t shape[2] = {4, 3}, units[1] = {1};
    dcp_mesh_t mesh = {1, {1}};
    dcp_placement_t source[1] = {{DCP_SHARD_EVEN, 1, NULL, 0}};
    dcp_placement_t target[1] = {{DCP_SHARD_RAGGED, -1, units, 1}};
    float buffer[16] = {0}, out[12];
    dcp_comm_t *comm;
    dcp_status_t status = dcp_comm_create_self(&comm);
    if (status != DCP_OK) {
        return status;
    }
    dcp_redistribute_args_t args = {.comm = comm,
                                    .shape = shape,
                                    .dim_count = 2,
                                    .mesh = mesh,
                                    .source = source,
                                    .target = target,
                                    .local = buffer,
                                    .local_count = 12,
                                    .out = buffer + 2,
                                    .out_count = 12};
    dcp_moved_t moved;
    status = dcp_redistribute(&args, &moved);
    if (status == DCP_OK) {
        dcp_comm_t *groups[1] = {NULL};
        dcp_placement_reduce_args_t sum = {.comm = comm,
                                           .groups = groups,
                                           .shape = shape,
                                           .dim_count = 2,
                                           .mesh = mesh,
                                           .target = target,
                                           .full = buffer,
                                           .full_count = 12,
                                           .out = out,
                                           .out_count = 12};
        status = dcp_placement_reduce(&sum, &moved);
    }
    dcp_comm_destroy(comm);
    return status;
}

int
main(void)
{
    test_sets();
    test_largest_sizes();
    test_moves();
    test_disagreement();
    check_every_alloc(alone);
    return check_finish();
}
