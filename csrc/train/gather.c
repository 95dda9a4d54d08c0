/* Weights where nothing is read one-sidedly: every rank holds its shard alone, and a
 * group of tensors is put together when a pass enters it.
 *
 * One place serves all groups, one after the other, since a pass leaves each group
 * before it enters the next; a tied embedding has a place of its own, because the head
 * reads it while the pass is in the last group. What a place holds stays good until the
 * weights change: so the last group is gathered once for both directions, and a tied
 * embedding once a step. All ranks decide alike, since all walk through the same
 * passes.
 * Cost of a pass: P parameters forward and the layers' again backward, each rank
 * receives (W - 1) / W of it; memory beside the shard: the largest group, and a tied
 * embedding. With compute_dtype bf16 places hold bf16: half of both; every rank rounds
 * its shard on the way out.
 */
#include "train_private.h"

#include "dcp/alloc.h"

int64_t
train_largest_group(const dcp_sharded_t *sharded)
{
    int64_t largest = 0;
    int32_t first = sharded->config.tie_word_embeddings ? 1 : 0;
    for (int32_t g = first; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        int64_t elements = train_group_elements(sharded, g);
        largest = elements > largest ? elements : largest;
    }
    return largest;
}

int64_t
train_group_elements(const dcp_sharded_t *sharded, int32_t group)
{
    return dcp_comm_size(sharded->comm)
           * dcp_dbuffer_layout_group(sharded->layout, group).shard;
}

dcp_status_t
train_gather_create(dcp_sharded_t *sharded)
{
    int64_t item = dcp_dtype_bytes(sharded->config.compute_dtype);
    sharded->gathered_group = -1;
    if (!sharded->no_windows) {
        return DCP_OK;
    }
    DCP_TRY(dcp_alloc_array(train_largest_group(sharded), item, "weights of a group",
                            &sharded->gathered));
    if (sharded->config.tie_word_embeddings) {
        DCP_TRY(dcp_alloc_array(train_group_elements(sharded, 0), item,
                                "weights of the embedding", &sharded->embedding));
    }
    return DCP_OK;
}

void
train_gather_destroy(dcp_sharded_t *sharded)
{
    dcp_free(sharded->embedding);
    dcp_free(sharded->gathered);
}

void
train_gather_forget(dcp_sharded_t *sharded)
{
    sharded->gathered_group = -1;
    sharded->embedding_gathered = 0;
}

void *
train_group_weights(const dcp_sharded_t *sharded, int32_t group)
{
    return group == 0 && sharded->embedding != NULL ? sharded->embedding
                                                    : sharded->gathered;
}

static dcp_status_t
gather(dcp_sharded_t *sharded, int32_t group)
{
    dcp_dbuffer_t *weights = sharded->buffers[DCP_SHARDED_WEIGHTS];
    void *place = train_group_weights(sharded, group);
    return sharded->config.compute_dtype == DCP_BF16
               ? dcp_dbuffer_gather_bf16(weights, group, place)
               : dcp_dbuffer_gather(weights, group, place);
}

dcp_status_t
train_gather_enter(dcp_sharded_t *sharded, dcp_queue_t *queue, int32_t group,
                   int32_t backward)
{
    if (group == 0 && backward) {
        return DCP_OK; /* only adds to its gradient */
    }
    int32_t own_place = group == 0 && sharded->embedding != NULL;
    if (own_place ? sharded->embedding_gathered : sharded->gathered_group == group) {
        return DCP_OK;
    }
    /* the queue may still read what lies there */
    DCP_TRY(sharded->device->fence(queue));
    DCP_TRY(gather(sharded, group));
    dcp_model_group_changed(sharded->model, group);
    if (own_place) {
        sharded->embedding_gathered = 1;
    } else {
        sharded->gathered_group = group;
    }
    sharded->gathered_bytes += (dcp_comm_size(sharded->comm) - 1)
                               * dcp_dbuffer_layout_group(sharded->layout, group).shard
                               * dcp_dtype_bytes(sharded->config.compute_dtype);
    return DCP_OK;
}
