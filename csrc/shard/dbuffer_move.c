/* What moves between ranks: groups put together, and summed.
 *
 * Both work in place. A gather's input is this rank's part of its output; where compute
 * weights are bf16, the fp32 slice is rounded straight into that part. A sum's result
 * is this rank's slice of its input. In windows nothing is gathered (the shards are the
 * whole) and a sum reads its peers' slices where they lie. So no byte of a rank's own
 * is copied from one buffer to another, with one exception that is counted: an fp32
 * slice that lies apart from the whole it is gathered into.
 *
 * A transport may stage bytes on their way (the shm transport: one pass through pieces
 * that stay in cache); that is neither moved nor copied here.
 *
 * Hybrid sharding: ranks of a shard group reduce-scatter, then ranks with equal shards
 * sum these, in the order of replicas; all replicas get the same bits. */
#include "dbuffer_private.h"

#include "dcp/kernels.h"

#include <string.h>

static dcp_status_t
reduce_piece(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const dcp_dbuffer_t *buffer = context;
    const dbuffer_piece_t *piece = &buffer->pieces[task];
    return dcp_window_reduce(
        buffer->window, piece->start * buffer->item_bytes, piece->count,
        (float *)(void *)dbuffer_at(buffer, piece->group, piece->start));
}

/* A job over some of the pieces. */
typedef struct part {
    dcp_dbuffer_t *buffer;
    int64_t first;
} part_t;

static dcp_status_t
reduce_part(void *context, int64_t task, int32_t worker)
{
    const part_t *part = context;
    return reduce_piece(part->buffer, part->first + task, worker);
}

static dcp_status_t
sum_in_windows(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group)
{
    part_t part = {.buffer = buffer};
    int64_t count;
    dbuffer_pieces(buffer, group, &part.first, &count);
    return buffer->rank_count == 1 ? DCP_OK
                                   : dcp_pool_run(pool, count, reduce_part, &part);
}

dcp_status_t
dcp_dbuffer_reduce_group(dcp_dbuffer_t *buffer, int32_t group, float *full)
{
    if (buffer->rank_count == 1) {
        return DCP_OK; /* the one copy is the sum */
    }
    int64_t own = buffer->rank * buffer->layout->shards[group];
    return dcp_comm_reduce_scatterv(
        buffer->comm, full, dbuffer_group_counts(buffer, group), full + own, DCP_F32);
}

/* This rank's slice over all replicas. */
static dcp_status_t
sum_replicas(dcp_dbuffer_t *buffer, int32_t group)
{
    if (buffer->replicas == NULL || dcp_comm_size(buffer->replicas) == 1) {
        return DCP_OK;
    }
    float *slice = dcp_dbuffer_slice(buffer, group);
    return dcp_comm_allreduce(buffer->replicas, slice, slice,
                              buffer->layout->shards[group], DCP_F32, DCP_SUM);
}

static void
count_reduce(dcp_dbuffer_t *buffer, int32_t group)
{
    int64_t bytes = buffer->layout->shards[group] * buffer->item_bytes;
    int64_t replica_count =
        buffer->replicas != NULL ? dcp_comm_size(buffer->replicas) : 1;
    buffer->traffic.reduce_count++;
    buffer->traffic.moved_bytes += (buffer->rank_count - 1) * bytes;
    /* inputs for a part of the slice, and the results of the other parts */
    buffer->traffic.moved_bytes += 2 * bytes * (replica_count - 1) / replica_count;
}

static dcp_status_t
check_sum(const dcp_dbuffer_t *buffer)
{
    if (buffer->kind == DCP_DBUFFER_SHARED || buffer->kind == DCP_DBUFFER_SHARD) {
        return DCP_FAIL(DCP_ERR_STATE, "only a private or local buffer, or one on "
                                       "demand, has a copy on every rank to sum");
    }
    if (buffer->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_TYPE, "a buffer of %s cannot be summed: sums are fp32",
                        dcp_dtype_name(buffer->dtype));
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_reduce_one(dcp_dbuffer_t *buffer, dcp_pool_t *pool, int32_t group)
{
    DCP_TRY(check_sum(buffer));
    DCP_TRY(dbuffer_check_group(buffer, group));
    if (!dcp_dbuffer_is_held(buffer, group)) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "group %d has no memory: nothing was added to it", (int)group);
    }
    if (buffer->kind == DCP_DBUFFER_PRIVATE) {
        DCP_TRY(sum_in_windows(buffer, pool, group));
    } else {
        float *full = (float *)(void *)dbuffer_group_at(buffer, group);
        DCP_TRY(dcp_dbuffer_reduce_group(buffer, group, full));
    }
    DCP_TRY(sum_replicas(buffer, group));
    count_reduce(buffer, group);
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_reduce(dcp_dbuffer_t *buffer, dcp_pool_t *pool)
{
    int32_t group_count = buffer->layout->group_count;
    DCP_TRY(check_sum(buffer));
    if (buffer->kind != DCP_DBUFFER_PRIVATE) {
        for (int32_t g = 0; g < group_count; g++) {
            DCP_TRY(dcp_dbuffer_reduce_one(buffer, pool, g));
        }
        return DCP_OK;
    }
    DCP_TRY(sum_in_windows(buffer, pool, DCP_DBUFFER_ALL_GROUPS));
    for (int32_t g = 0; g < group_count; g++) {
        DCP_TRY(sum_replicas(buffer, g));
        count_reduce(buffer, g);
    }
    return DCP_OK;
}

static dcp_status_t
check_shards(const dcp_dbuffer_t *buffer)
{
    if (buffer->kind != DCP_DBUFFER_SHARD || buffer->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_STATE, "only of a buffer of fp32 shards a group is "
                                       "gathered: others hold whole tensors");
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_gather(dcp_dbuffer_t *buffer, int32_t group, float *full)
{
    DCP_TRY(check_shards(buffer));
    int64_t bytes = buffer->layout->shards[group] * buffer->item_bytes;
    DCP_TRY(dcp_comm_allgatherv(buffer->comm, dcp_dbuffer_slice(buffer, group),
                                dbuffer_group_counts(buffer, group), full, DCP_F32));
    buffer->traffic.gather_count++;
    buffer->traffic.moved_bytes += (buffer->rank_count - 1) * bytes;
    buffer->traffic.copied_bytes += bytes;
    return DCP_OK;
}

dcp_status_t
dbuffer_check_source(const dcp_dbuffer_t *whole, const dcp_dbuffer_t *from)
{
    if (from == NULL || from == whole) {
        if (whole->kind != DCP_DBUFFER_LOCAL && !whole->keep_own) {
            return DCP_FAIL(DCP_ERR_ARG, "from must be given: this rank's slices of "
                                         "the whole are not kept");
        }
        return DCP_OK;
    }
    if (from->layout != whole->layout || from->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "from must be float32 and of the same layout as the whole, got "
                        "%s",
                        dcp_dtype_name(from->dtype));
    }
    if (whole->kind == DCP_DBUFFER_PRIVATE || whole->kind == DCP_DBUFFER_SHARD
        || (whole->kind == DCP_DBUFFER_SHARED && whole->dtype == from->dtype)) {
        return DCP_FAIL(DCP_ERR_STATE, "a group is gathered into a buffer on demand, a "
                                       "local one or a shared one of another type");
    }
    return whole->dtype == DCP_U8
               ? DCP_FAIL(DCP_ERR_TYPE, "weights are not gathered as uint8")
               : DCP_OK;
}

/* This rank's slice into its place in the whole. */
static dcp_status_t
place_slice(dcp_dbuffer_t *whole, dcp_pool_t *pool, int32_t group,
            const dcp_dbuffer_t *from)
{
    if (from == NULL || from == whole) {
        return DCP_OK;
    }
    return dcp_cpu_cast(pool, &(dcp_cast_args_t){
                                  .count = whole->layout->shards[group],
                                  .from = from->dtype,
                                  .to = whole->dtype,
                                  .x = dcp_dbuffer_slice(from, group),
                                  .out = dcp_dbuffer_slice(whole, group),
                              });
}

dcp_status_t
dbuffer_exchange(dcp_dbuffer_t *whole, dcp_comm_t *comm, dcp_pool_t *pool,
                 int32_t group, const dcp_dbuffer_t *from, const int64_t *counts)
{
    DCP_TRY(place_slice(whole, pool, group, from));
    return dcp_comm_allgatherv(comm, dcp_dbuffer_slice(whole, group), counts,
                               dbuffer_group_at(whole, group), whole->dtype);
}

void
dbuffer_count_gather(dcp_dbuffer_t *whole, int32_t group, const dcp_dbuffer_t *from)
{
    int64_t bytes = whole->layout->shards[group] * whole->item_bytes;
    int32_t apart = from != NULL && from != whole && from->dtype == whole->dtype;
    whole->traffic.gather_count++;
    whole->traffic.copied_bytes += apart ? bytes : 0;
    if (whole->kind != DCP_DBUFFER_SHARED) {
        whole->traffic.moved_bytes += (whole->rank_count - 1) * bytes;
    }
}

dcp_status_t
dcp_dbuffer_gather_whole(dcp_dbuffer_t *whole, dcp_pool_t *pool, int32_t group,
                         const dcp_dbuffer_t *from)
{
    DCP_TRY(dbuffer_check_group(whole, group));
    DCP_TRY(dbuffer_check_source(whole, from));
    if (whole->prefetch != NULL) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "an order of gathers is declared: begin and wait "
                        "follow it");
    }
    if (whole->kind == DCP_DBUFFER_SHARED) {
        DCP_TRY(dcp_comm_barrier(whole->comm)); /* nobody reads the old one any more */
        DCP_TRY(place_slice(whole, pool, group, from));
        DCP_TRY(dcp_comm_barrier(whole->comm));
    } else {
        DCP_TRY(dbuffer_acquire_or_abort(whole, group));
        DCP_TRY(dbuffer_exchange(whole, whole->comm, pool, group, from,
                                 dbuffer_group_counts(whole, group)));
    }
    dbuffer_count_gather(whole, group, from);
    return DCP_OK;
}
