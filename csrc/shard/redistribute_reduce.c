/* The sum over all ranks of a mesh, each rank with its part of it.
 *
 * From the last axis to the first: an axis that shards sums by reduce-scatter what is
 * left of the tensor, so that each step works on the part the one before has left; then
 * the axes that replicate add up what is small by now. The communicator adds in rank
 * order, so the order is fixed, and all copies of an element come out of one sum.
 *
 * Where the parts of an axis follow each other in what is left (rows, ragged cuts),
 * they are summed where they lie; else (columns) they are packed first, once. Cost: the
 * reduce-scatters, a tensor of scratch for columns, a part of it between two shards. */
#include "redistribute_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <string.h>

/* One axis that shards: what is summed and what is left of it. */
typedef struct stage {
    int32_t axis;
    dcp_placed_t held, left; /* before and behind, on this rank */
    bool packed;             /* parts do not follow each other */
} stage_t;

typedef struct reduction {
    const dcp_placement_reduce_args_t *args;
    int32_t stage_count;
    stage_t stages[DCP_MESH_AXES];
    int64_t *counts; /* [ranks] */
    float *packed;   /* parts one after the other */
    float *mids[2];  /* between stages, in turns */
} reduction_t;

/* What coordinate `part` of an axis gets of what the axes behind have left this rank:
 * those in front do not cut yet. */
static void
part_of(const dcp_placement_reduce_args_t *args, int32_t axis, int32_t part,
        dcp_placed_t *placed_p)
{
    dcp_placement_t placements[DCP_MESH_AXES] = {{.kind = DCP_REPLICATE}};
    int32_t rank = 0;
    for (int32_t a = 0; a < args->mesh.axis_count; a++) {
        int32_t own = dcp_mesh_coordinate(&args->mesh, dcp_comm_rank(args->comm), a);
        rank = rank * args->mesh.sizes[a] + (a == axis ? part : own);
        placements[a] =
            a < axis ? (dcp_placement_t){.kind = DCP_REPLICATE} : args->target[a];
    }
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, placements, rank,
                        placed_p);
}

/* Lists the axes that shard, from the last to the first. */
static void
plan_stages(reduction_t *x)
{
    const dcp_placement_reduce_args_t *args = x->args;
    dcp_placed_t held;
    dcp_mesh_t whole = {.axis_count = 1, .sizes = {1}};
    dcp_placement_t replicate = {.kind = DCP_REPLICATE};
    dcp_placement_local(args->shape, args->dim_count, &whole, &replicate, 0, &held);
    for (int32_t a = args->mesh.axis_count - 1; a >= 0; a--) {
        if (args->target[a].kind == DCP_REPLICATE || args->mesh.sizes[a] == 1) {
            continue;
        }
        stage_t *stage = &x->stages[x->stage_count++];
        *stage = (stage_t){.axis = a, .held = held};
        int64_t next = 0, together;
        for (int32_t part = 0; part < args->mesh.sizes[a]; part++) {
            dcp_placed_t placed;
            part_of(args, a, part, &placed);
            if (placed.count == 0) {
                continue;
            }
            int64_t first =
                dcp_placed_position(&held, dcp_placed_run(&placed, 0, &together));
            int64_t last = dcp_placed_position(
                &held, dcp_placed_run(&placed, placed.count - 1, &together));
            stage->packed =
                stage->packed || first != next || last + 1 - first != placed.count;
            next = last + 1;
        }
        part_of(args, a, dcp_mesh_coordinate(&args->mesh, dcp_comm_rank(args->comm), a),
                &stage->left);
        held = stage->left;
    }
}

static dcp_status_t
prepare(reduction_t *x)
{
    const dcp_placement_reduce_args_t *args = x->args;
    int64_t packed = 0, mid = 0;
    for (int32_t i = 0; i < x->stage_count; i++) {
        const stage_t *stage = &x->stages[i];
        if (stage->packed && stage->held.count > packed) {
            packed = stage->held.count;
        }
        if (i + 1 < x->stage_count && stage->left.count > mid) {
            mid = stage->left.count;
        }
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(dcp_comm_size(args->comm), (int64_t)sizeof(int64_t),
                            "counts of a reduction", &memory));
    x->counts = memory;
    int64_t item = (int64_t)sizeof(float);
    DCP_TRY(dcp_alloc_array(packed, item, "packed parts of a reduction", &memory));
    x->packed = memory;
    for (int32_t i = 0; i < 2; i++) {
        DCP_TRY(dcp_alloc_array(mid, item, "part of a reduction", &memory));
        x->mids[i] = memory;
    }
    return DCP_OK;
}

static dcp_status_t
run_stage(reduction_t *x, const stage_t *stage, const float *from, float *to)
{
    const dcp_placement_reduce_args_t *args = x->args;
    int64_t item = (int64_t)sizeof(float), at = 0;
    for (int32_t part = 0; part < args->mesh.sizes[stage->axis]; part++) {
        dcp_placed_t placed;
        part_of(args, stage->axis, part, &placed);
        x->counts[part] = placed.count;
        if (stage->packed) {
            redistribute_read(&stage->held, &placed, (const char *)from, item, 0,
                              placed.count, (char *)(x->packed + at));
        }
        at += placed.count;
    }
    return dcp_comm_reduce_scatterv(args->groups[stage->axis],
                                    stage->packed ? x->packed : from, x->counts, to,
                                    DCP_F32);
}

static dcp_status_t
run(reduction_t *x)
{
    const dcp_placement_reduce_args_t *args = x->args;
    const float *from = args->full;
    for (int32_t i = 0; i < x->stage_count; i++) {
        float *to = i + 1 < x->stage_count ? x->mids[i % 2] : args->out;
        DCP_TRY(run_stage(x, &x->stages[i], from, to));
        from = to;
    }
    if (x->stage_count == 0 && args->out_count > 0) {
        memcpy(args->out, args->full, (size_t)args->out_count * sizeof(float));
    }
    for (int32_t a = args->mesh.axis_count - 1; a >= 0; a--) {
        if (args->target[a].kind == DCP_REPLICATE && args->mesh.sizes[a] > 1) {
            DCP_TRY(dcp_comm_allreduce(args->groups[a], args->out, args->out,
                                       args->out_count, DCP_F32, DCP_SUM));
        }
    }
    return DCP_OK;
}

static dcp_status_t
check_args(const dcp_placement_reduce_args_t *args)
{
    DCP_TRY(
        dcp_placement_check(args->shape, args->dim_count, &args->mesh, args->target));
    DCP_TRY(redistribute_check_comm(args->comm, &args->mesh));
    for (int32_t a = 0; a < args->mesh.axis_count; a++) {
        int32_t size = args->mesh.sizes[a];
        if (size > 1
            && (args->groups[a] == NULL || dcp_comm_size(args->groups[a]) != size)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "groups[%d] must be the %d ranks along mesh axis %d",
                            (int)a, (int)size, (int)a);
        }
    }
    int64_t whole = 1;
    for (int32_t d = 0; d < args->dim_count; d++) {
        whole *= args->shape[d];
    }
    if (args->full_count != whole) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "x has %" PRId64 " elements, the whole tensor has %" PRId64,
                        args->full_count, whole);
    }
    dcp_placed_t own;
    dcp_placement_local(args->shape, args->dim_count, &args->mesh, args->target,
                        dcp_comm_rank(args->comm), &own);
    if (args->out_count != own.count) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "out has %" PRId64 " elements: rank %d is to hold %" PRId64,
                        args->out_count, (int)dcp_comm_rank(args->comm), own.count);
    }
    if (args->full < args->out + own.count && args->out < args->full + whole) {
        return DCP_FAIL(DCP_ERR_ARG, "out overlaps x: they must lie apart");
    }
    return DCP_OK;
}

/* Bytes of this rank's summands that others add, and of others' that it adds. */
static dcp_moved_t
count_moved(const reduction_t *x)
{
    const dcp_placement_reduce_args_t *args = x->args;
    int64_t item = (int64_t)sizeof(float);
    dcp_moved_t moved = {.kept_bytes = args->out_count * item};
    for (int32_t i = 0; i < x->stage_count; i++) {
        const stage_t *stage = &x->stages[i];
        int64_t peers = args->mesh.sizes[stage->axis] - 1;
        moved.sent_bytes += (stage->held.count - stage->left.count) * item;
        moved.received_bytes += peers * stage->left.count * item;
        moved.staged_bytes += stage->packed ? stage->held.count * item : 0;
    }
    for (int32_t a = 0; a < args->mesh.axis_count; a++) {
        if (args->target[a].kind == DCP_REPLICATE) {
            int64_t peers = args->mesh.sizes[a] - 1;
            moved.sent_bytes += peers * args->out_count * item;
            moved.received_bytes += peers * args->out_count * item;
        }
    }
    return moved;
}

dcp_status_t
dcp_placement_reduce(const dcp_placement_reduce_args_t *args, dcp_moved_t *moved_p)
{
    dcp_status_t status = check_args(args);
    if (status != DCP_OK) {
        return status;
    }
    reduction_t x = {.args = args};
    plan_stages(&x);
    redistribute_call_t call = {.what = "reduce",
                                .shape = args->shape,
                                .dim_count = args->dim_count,
                                .mesh = &args->mesh,
                                .target = args->target,
                                .dtype = DCP_F32};
    status = redistribute_agree(args->comm, &call, prepare(&x));
    if (status == DCP_OK) {
        status = run(&x);
    }
    if (status == DCP_OK) {
        *moved_p = count_moved(&x);
    }
    dcp_free(x.mids[1]);
    dcp_free(x.mids[0]);
    dcp_free(x.packed);
    dcp_free(x.counts);
    return status;
}
