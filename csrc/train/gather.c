/* Weights where nothing is read one-sidedly: every rank holds its shard alone, and a
 * group of tensors is put together for a pass that enters it.
 *
 * Groups take turns in one place, since a pass leaves each before it enters the next;
 * a tied embedding has a place of its own, because the head reads it while the pass is
 * in the last group. What a place holds stays good until the weights change: so the
 * last group is gathered once for both directions, and a tied embedding once a step.
 *
 * With `prefetch` even and odd groups have a place each. While a pass is in one group,
 * a thread gathers the next of the pass into the other place, which the pass has left:
 *
 *   groups of a pass, forward and backward:  0 1 2 ... last-1 last last-1 ... 2 1
 *
 * (backward, the embedding only adds to its gradient). This is the order that ranks
 * declare, once; a pass that ends early, forward only, goes back to its start. Nothing
 * is begun that the pass does not enter, so nothing is under way between two passes,
 * and weights may change there. Two places keep more: last - 1 for both directions, and
 * where the passes of a step meet, group 1, and 2 where the embedding is tied.
 *
 * All ranks decide alike, since all walk through the same passes.
 * With `gather_step` every group has a place of its own, so that what is gathered
 * stays, packed, until the weights change: for links on which bytes cost more than
 * memory.
 *
 * Cost of a pass: P parameters forward and the layers' again backward, each rank
 * receives (W - 1) / W of it (gather_step: P a step); memory beside the shard: the
 * largest group (two with prefetch), and a tied embedding. With compute_dtype bf16
 * places hold bf16: half of both; every rank rounds its shard on the way out.
 */
#include "train_private.h"

#include "dcp/alloc.h"

enum { EMBEDDING_PLACE = 2 }; /* where it is tied */

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

static int32_t
place_of(const dcp_sharded_t *sharded, int32_t group)
{
    if (sharded->gather_step) {
        return group;
    }
    if (group == 0 && sharded->config.tie_word_embeddings) {
        return EMBEDDING_PLACE;
    }
    return sharded->prefetch ? group % 2 : 0;
}

static dcp_status_t
create_places(dcp_sharded_t *sharded, int32_t *places)
{
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        places[g] = place_of(sharded, g);
    }
    return dcp_dbuffer_create_with(
        sharded->comm, sharded->layout,
        &(dcp_dbuffer_options_t){.kind = DCP_DBUFFER_LOCAL,
                                 .dtype = sharded->config.compute_dtype,
                                 .places = sharded->gather_step ? NULL : places},
        &sharded->whole);
}

/* Collective. */
static dcp_status_t
declare_order(dcp_sharded_t *sharded, int32_t *order)
{
    int32_t last = dcp_dbuffer_layout_group_count(sharded->layout) - 1;
    for (int32_t g = 0; g <= last; g++) {
        order[g] = g;
    }
    for (int32_t g = last - 1; g > 0; g--) {
        order[2 * last - g] = g;
    }
    return dcp_dbuffer_gather_order(
        sharded->whole, sharded->buffers[DCP_SHARDED_WEIGHTS], order, 2 * last);
}

dcp_status_t
train_gather_create(dcp_sharded_t *sharded)
{
    void *memory;
    int32_t group_count = dcp_dbuffer_layout_group_count(sharded->layout);
    sharded->place_count =
        group_count > EMBEDDING_PLACE ? group_count : EMBEDDING_PLACE + 1;
    DCP_TRY(dcp_alloc_array(sharded->place_count, (int64_t)sizeof(train_place_t),
                            "places of groups", &memory));
    sharded->places = memory;
    train_gather_forget(sharded);
    if (!sharded->no_windows) {
        return DCP_OK;
    }
    int64_t count = 2 * (int64_t)group_count;
    DCP_TRY(
        dcp_alloc_array(count, (int64_t)sizeof(int32_t), "groups of a pass", &memory));
    dcp_status_t status = create_places(sharded, memory);
    if (status == DCP_OK && sharded->prefetch) {
        status = declare_order(sharded, memory);
    }
    dcp_free(memory);
    return status;
}

void
train_gather_destroy(dcp_sharded_t *sharded)
{
    dcp_dbuffer_destroy(sharded->whole);
    dcp_free(sharded->places);
}

void
train_gather_forget(dcp_sharded_t *sharded)
{
    for (int32_t i = 0; i < sharded->place_count; i++) {
        sharded->places[i] = (train_place_t){.group = -1};
    }
    sharded->packed_group = -1;
}

/* Gathers a group, or begins to, unless it is there. */
static dcp_status_t
gather(dcp_sharded_t *sharded, int32_t group)
{
    train_place_t *place = &sharded->places[place_of(sharded, group)];
    if (place->group == group) {
        return sharded->prefetch ? dcp_dbuffer_gather_skip(sharded->whole, group)
                                 : DCP_OK;
    }
    DCP_TRY(sharded->prefetch
                ? dcp_dbuffer_gather_begin(sharded->whole, group)
                : dcp_dbuffer_gather_whole(sharded->whole, sharded->pool, group,
                                           sharded->buffers[DCP_SHARDED_WEIGHTS]));
    *place = (train_place_t){.group = group};
    sharded->gathered_bytes += (dcp_comm_size(sharded->comm) - 1)
                               * dcp_dbuffer_layout_group(sharded->layout, group).shard
                               * dcp_dtype_bytes(sharded->config.compute_dtype);
    return DCP_OK;
}

/* The group that the pass enters next and reads; -1: none. */
static int32_t
next_group(const dcp_sharded_t *sharded, int32_t group, int32_t backward)
{
    int32_t last = dcp_dbuffer_layout_group_count(sharded->layout) - 1;
    if (!backward && group < last) {
        return group + 1;
    }
    return (backward || sharded->training) && group > 1 ? group - 1 : -1;
}

/* What is packed of a group is stale once it was gathered again, or, of a layer, once
 * the pass was in another one. */
static void
note_entered(dcp_sharded_t *sharded, int32_t group)
{
    train_place_t *place = &sharded->places[place_of(sharded, group)];
    int32_t last = dcp_dbuffer_layout_group_count(sharded->layout) - 1;
    int32_t layer = group > 0 && group < last;
    int32_t lost = layer && !sharded->gather_step && sharded->packed_group != group;
    if (!place->entered || lost) {
        dcp_model_group_changed(sharded->model, group);
    }
    place->entered = 1;
    sharded->packed_group = layer ? group : sharded->packed_group;
}

dcp_status_t
train_gather_enter(dcp_sharded_t *sharded, dcp_queue_t *queue, int32_t group,
                   int32_t backward)
{
    if (group == 0 && backward) {
        return DCP_OK; /* only adds to its gradient */
    }
    const train_place_t *place = &sharded->places[place_of(sharded, group)];
    if (sharded->prefetch || place->group != group) {
        /* the queue may still read what lies where the next is gathered to */
        DCP_TRY(sharded->device->fence(queue));
    }
    if (sharded->prefetch && group == 0) { /* a pass begins */
        DCP_TRY(dcp_dbuffer_gather_restart(sharded->whole));
    }
    if (!sharded->prefetch || group == 0) {
        DCP_TRY(gather(sharded, group));
    }
    if (sharded->prefetch) {
        if (!place->entered) {
            DCP_TRY(dcp_dbuffer_gather_wait(sharded->whole, group));
        }
        int32_t next = next_group(sharded, group, backward);
        DCP_TRY(next >= 0 ? gather(sharded, next) : DCP_OK);
    }
    note_entered(sharded, group);
    return DCP_OK;
}
