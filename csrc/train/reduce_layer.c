/* Gradients that are summed over ranks as soon as a group's backward pass ends.
 *
 * A pass adds to whole groups of gradients, zeroed when it enters them; when it leaves
 * one backward, every rank sums its slice over all ranks and adds that to its shard. So
 * a rank holds a shard and one or two groups, and an element's sum runs over
 * micro-batches, and within each over ranks in their order: a fixed order, in fp32. A
 * tied embedding has a place of its own, since the head adds to it from the last group
 * on and the embedding at the end; it is summed once, at the end.
 *
 * With windows ranks read each other's groups in place. Two places take turns: at the
 * barrier of group g all have added to g and, having come from there, read group g + 1;
 * so the place of g + 1 may be zeroed for g - 1. A barrier closes the pass. Without
 * windows the sum is one collective, and one place is enough.
 * Cost of a pass, P parameters, W ranks: zeroing 4 P bytes, reading 4 P (W - 1) / W of
 * others and adding 8 P / W; reduce = step reads that once a step.
 */
#include "train_private.h"

#include "dcp/alloc.h"

enum { PIECE_ELEMENTS = 32768 };

bool
train_group_is_trained(const dcp_sharded_t *sharded, int32_t group)
{
    for (int64_t i = 0; i < sharded->tensor_count; i++) {
        if (sharded->tensors[i].group == group && sharded->trained[i]) {
            return true;
        }
    }
    return false;
}

/* Elements before the group's place; `group` = -1: of all places. */
static int64_t
place_start(const dcp_sharded_t *sharded, int32_t group)
{
    int64_t turns = sharded->no_windows ? 1 : 2;
    int32_t tied = sharded->config.tie_word_embeddings;
    if (group < 0) {
        int64_t embedding = tied ? train_group_elements(sharded, 0) : 0;
        return turns * sharded->largest_group + embedding;
    }
    return (group == 0 && tied ? turns : group % turns) * sharded->largest_group;
}

dcp_status_t
train_reduce_create(dcp_sharded_t *sharded)
{
    int64_t item = (int64_t)sizeof(float);
    if (!sharded->reduce_layer || sharded->forward_only) {
        return DCP_OK;
    }
    sharded->largest_group = train_largest_group(sharded);
    int64_t elements = place_start(sharded, -1);
    if (sharded->no_windows) {
        void *memory;
        DCP_TRY(dcp_alloc_array(elements, item, "gradients of a group", &memory));
        sharded->group_memory = sharded->group_gradients = memory;
        return DCP_OK;
    }
    DCP_TRY(dcp_window_create(sharded->comm, elements * item, &sharded->group_window));
    sharded->group_gradients =
        dcp_window_base(sharded->group_window, dcp_comm_rank(sharded->comm));
    return DCP_OK;
}

void
train_reduce_destroy(dcp_sharded_t *sharded)
{
    dcp_window_destroy(sharded->group_window);
    dcp_free(sharded->group_memory);
}

float *
train_group_gradients(const dcp_sharded_t *sharded, int32_t group)
{
    return sharded->group_gradients + place_start(sharded, group);
}

dcp_status_t
train_reduce_enter(dcp_sharded_t *sharded, dcp_queue_t *queue, int32_t group,
                   int32_t backward)
{
    int32_t last = dcp_dbuffer_layout_group_count(sharded->layout) - 1;
    int32_t tied = sharded->config.tie_word_embeddings;
    /* the head adds to its group before the backward pass begins */
    int32_t first_use = group == last || (group == 0 && tied) ? !backward : backward;
    if (!first_use || !train_group_is_trained(sharded, group)) {
        return DCP_OK;
    }
    return sharded->device->zero(
        queue, &(dcp_zero_args_t){.bytes = train_group_elements(sharded, group)
                                           * (int64_t)sizeof(float),
                                  .x = train_group_gradients(sharded, group)});
}

/* One group's sum, cut into pieces. */
typedef struct addition {
    const dcp_window_t *window; /* to sum over ranks first; NULL: done already */
    int64_t offset;             /* bytes of the slice in the window */
    float *slice;               /* this rank's, of the whole group */
    float *sum;                 /* this rank's shard */
    int64_t count;
} addition_t;

static dcp_status_t
add_piece(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const addition_t *addition = context;
    int64_t first = task * PIECE_ELEMENTS, left = addition->count - first;
    int64_t count = left < PIECE_ELEMENTS ? left : PIECE_ELEMENTS;
    float *slice = addition->slice + first, *sum = addition->sum + first;
    if (addition->window != NULL) {
        DCP_TRY(dcp_window_reduce(addition->window,
                                  addition->offset + first * (int64_t)sizeof(float),
                                  count, slice));
    }
    for (int64_t i = 0; i < count; i++) {
        sum[i] += slice[i];
    }
    return DCP_OK;
}

dcp_status_t
train_reduce_leave(dcp_sharded_t *sharded, dcp_queue_t *queue, int32_t group)
{
    int32_t rank = dcp_comm_rank(sharded->comm);
    int32_t alone = dcp_comm_size(sharded->comm) == 1;
    int64_t shard = dcp_dbuffer_layout_group(sharded->layout, group).shard;
    float *full = train_group_gradients(sharded, group);
    dcp_dbuffer_t *sums = sharded->buffers[DCP_SHARDED_GRADIENTS];
    addition_t addition = {
        .window = alone ? NULL : sharded->group_window,
        .offset = (place_start(sharded, group) + rank * shard) * (int64_t)sizeof(float),
        .slice = full + rank * shard,
        .sum = dcp_dbuffer_slice(sums, group),
        .count = shard,
    };
    DCP_TRY(sharded->device->fence(queue));
    if (addition.window != NULL) {
        DCP_TRY(dcp_comm_barrier(sharded->comm));
    }
    if (train_group_is_trained(sharded, group)) {
        if (sharded->no_windows) {
            DCP_TRY(dcp_dbuffer_reduce_group(sums, group, full));
        }
        DCP_TRY(dcp_pool_run(sharded->pool,
                             (shard + PIECE_ELEMENTS - 1) / PIECE_ELEMENTS, add_piece,
                             &addition));
        sharded->reduced_bytes += train_received_bytes(sharded, group);
    }
    sharded->reduce_count += group == 0; /* the last of a pass */
    return group == 0 && addition.window != NULL ? dcp_comm_barrier(sharded->comm)
                                                 : DCP_OK;
}
