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
 * embedding.
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
    void *memory;
    int64_t item = (int64_t)sizeof(float);
    sharded->gathered_group = -1;
    if (!sharded->no_windows) {
        return DCP_OK;
    }
    DCP_TRY(dcp_alloc_array(train_largest_group(sharded), item, "weights of a group",
                            &memory));
    sharded->gathered = memory;
    if (sharded->config.tie_word_embeddings) {
        DCP_TRY(dcp_alloc_array(train_group_elements(sharded, 0), item,
                                "weights of the embedding", &memory));
        sharded->embedding = memory;
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

float *
train_group_weights(const dcp_sharded_t *sharded, int32_t group)
{
    return group == 0 && sharded->embedding != NULL ? sharded->embedding
                                                    : sharded->gathered;
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
    DCP_TRY(dcp_dbuffer_gather(sharded->buffers[DCP_SHARDED_WEIGHTS], group,
                               train_group_weights(sharded, group)));
    dcp_model_group_changed(sharded->model, group);
    if (own_place) {
        sharded->embedding_gathered = 1;
    } else {
        sharded->gathered_group = group;
    }
    sharded->gathered_bytes += train_received_bytes(sharded, group);
    return DCP_OK;
}
