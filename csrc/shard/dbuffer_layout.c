/* Where the groups of a DBuffer lie, and the runs of every rank.
 *
 * Each group is planned on its own (layout.c), equal groups once: the layers of a model
 * give one plan. Groups follow one another, each m x S_g elements, so that what a rank
 * holds of a group is one slice and starts at a multiple of 16 bytes.
 * Cost: planning, then O(tensors log tensors + runs). */
#include "dbuffer_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNIT_ELEMENTS = 16
}; /* 16 bytes of the smallest item that may share a layout:
      8-bit state */

/* The tensors of all groups, group by group, each group in model order. */
typedef struct members {
    int64_t *tensors;           /* [tensor_count] */
    int64_t *firsts;            /* [group_count + 1] in tensors */
    dcp_layout_tensor_t *sizes; /* [tensor_count], as tensors */
    int64_t *starts;            /* [tensor_count], as tensors: inside the group */
} members_t;

static dcp_status_t
check_tensors(const dcp_dbuffer_tensor_t *tensors, int64_t tensor_count,
              int32_t rank_count, int64_t block_rows, int32_t *group_count_p)
{
    if (tensor_count < 0 || rank_count < 1 || block_rows < 1) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "tensor_count %" PRId64
                        " must not be negative, ranks %d and block_rows %" PRId64
                        " must be at least 1",
                        tensor_count, (int)rank_count, block_rows);
    }
    int32_t group_count = 0;
    for (int64_t i = 0; i < tensor_count; i++) {
        dcp_dbuffer_tensor_t tensor = tensors[i];
        if (tensor.row_count < 0 || tensor.row_width < 0
            || (tensor.row_width > 0
                && tensor.row_count > INT64_MAX / tensor.row_width)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "tensor %" PRId64 " of %" PRId64 " rows of %" PRId64
                            " elements cannot be counted in 64 bits",
                            i, tensor.row_count, tensor.row_width);
        }
        if (tensor.block_count < 0) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "block of %" PRId64 " elements of tensor %" PRId64
                            " must not be negative (0: by rows)",
                            tensor.block_count, i);
        }
        if (tensor.group < 0 || tensor.group > group_count) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "group %d of tensor %" PRId64
                            " must lie in 0..%d: groups are numbered by first use",
                            (int)tensor.group, i, (int)group_count);
        }
        group_count += tensor.group == group_count;
    }
    *group_count_p = group_count;
    return DCP_OK;
}

static void
fill_members(const dcp_dbuffer_layout_t *layout, int64_t block_rows, members_t *members)
{
    for (int32_t g = 0; g <= layout->group_count; g++) {
        members->firsts[g] = 0;
    }
    for (int64_t i = 0; i < layout->tensor_count; i++) {
        members->firsts[layout->tensors[i].group + 1]++;
    }
    for (int32_t g = 0; g < layout->group_count; g++) {
        members->firsts[g + 1] += members->firsts[g];
    }
    int64_t *next = members->starts; /* scratch until the groups are planned */
    memcpy(next, members->firsts, (size_t)layout->group_count * sizeof next[0]);
    for (int64_t i = 0; i < layout->tensor_count; i++) {
        dcp_dbuffer_tensor_t tensor = layout->tensors[i];
        int64_t place = next[tensor.group]++;
        int64_t rows = tensor.row_count < block_rows ? tensor.row_count : block_rows;
        /* a row of one element: a 1-D tensor, which may be cut anywhere */
        int64_t block = tensor.row_width == 1 ? 1 : rows * tensor.row_width;
        block = tensor.block_count > 0 ? tensor.block_count : block;
        members->tensors[place] = i;
        members->sizes[place] = (dcp_layout_tensor_t){
            tensor.row_count * tensor.row_width, block > 0 ? block : 1};
    }
}

/* An earlier group of the same sizes, or -1. */
static int32_t
equal_group(const members_t *members, int32_t group)
{
    int64_t first = members->firsts[group];
    int64_t count = members->firsts[group + 1] - first;
    for (int32_t g = group - 1; g >= 0; g--) {
        if (members->firsts[g + 1] - members->firsts[g] == count
            && memcmp(members->sizes + members->firsts[g], members->sizes + first,
                      (size_t)count * sizeof members->sizes[0])
                   == 0) {
            return g;
        }
    }
    return -1;
}

static dcp_status_t
plan_groups(dcp_dbuffer_layout_t *layout, const members_t *members,
            dcp_layout_order_t order)
{
    int64_t start = 0;
    layout->shard_starts[0] = 0;
    for (int32_t g = 0; g < layout->group_count; g++) {
        int64_t first = members->firsts[g];
        int64_t count = members->firsts[g + 1] - first;
        int32_t equal = equal_group(members, g);
        if (equal >= 0) {
            layout->shards[g] = layout->shards[equal];
            memcpy(members->starts + first, members->starts + members->firsts[equal],
                   (size_t)count * sizeof members->starts[0]);
        } else {
            DCP_TRY(dcp_layout_plan(members->sizes + first, count, layout->rank_count,
                                    UNIT_ELEMENTS, order, members->starts + first,
                                    &layout->shards[g]));
        }
        layout->group_starts[g] = start;
        layout->shard_starts[g + 1] = layout->shard_starts[g] + layout->shards[g];
        for (int64_t i = first; i < first + count; i++) {
            layout->starts[members->tensors[i]] = start + members->starts[i];
        }
        int64_t elements = layout->rank_count * layout->shards[g];
        if (start > INT64_MAX / (int64_t)sizeof(float) - elements) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "the groups up to number %d have more bytes than can be "
                            "counted in 64 bits",
                            (int)g);
        }
        start += elements;
    }
    layout->group_starts[layout->group_count] = start;
    return DCP_OK;
}

typedef struct place {
    int64_t start, tensor;
} place_t;

static int
compare_places(const void *left, const void *right)
{
    const place_t *a = left, *b = right;
    if (a->start != b->start) {
        return a->start < b->start ? -1 : 1;
    }
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

/* Adds the runs of one tensor to every rank's; with runs NULL it only counts them. */
static void
add_runs(const dcp_dbuffer_layout_t *layout, int64_t tensor, dcp_dbuffer_run_t *runs,
         int64_t *nexts)
{
    int32_t group = layout->tensors[tensor].group;
    int64_t count =
        layout->tensors[tensor].row_count * layout->tensors[tensor].row_width;
    int64_t shard = layout->shards[group];
    int64_t start = layout->starts[tensor] - layout->group_starts[group];
    for (int64_t first = 0; first < count;) {
        int64_t rank = (start + first) / shard;
        int64_t end = (rank + 1) * shard - start;
        end = end < count ? end : count;
        if (runs != NULL) {
            runs[nexts[rank]] = (dcp_dbuffer_run_t){tensor, first, end - first,
                                                    layout->starts[tensor] + first};
        }
        nexts[rank]++;
        first = end;
    }
}

/* places [tensor_count] and nexts [rank_count] are scratch. */
static dcp_status_t
make_runs(dcp_dbuffer_layout_t *layout, place_t *places, int64_t *nexts)
{
    int64_t rank_count = layout->rank_count;
    memset(nexts, 0, (size_t)rank_count * sizeof nexts[0]);
    for (int64_t i = 0; i < layout->tensor_count; i++) {
        places[i] = (place_t){layout->starts[i], i};
        add_runs(layout, i, NULL, nexts);
    }
    layout->run_firsts[0] = 0;
    for (int64_t r = 0; r < rank_count; r++) {
        layout->run_firsts[r + 1] = layout->run_firsts[r] + nexts[r];
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(layout->run_firsts[rank_count],
                            (int64_t)sizeof layout->runs[0], "runs of a layout",
                            &memory));
    layout->runs = memory;
    qsort(places, (size_t)layout->tensor_count, sizeof places[0], compare_places);
    memcpy(nexts, layout->run_firsts, (size_t)rank_count * sizeof nexts[0]);
    for (int64_t i = 0; i < layout->tensor_count; i++) {
        add_runs(layout, places[i].tensor, layout->runs, nexts);
    }
    return DCP_OK;
}

static dcp_status_t
plan_with_scratch(dcp_dbuffer_layout_t *layout, int64_t block_rows,
                  dcp_layout_order_t order)
{
    int64_t count = layout->tensor_count;
    int64_t word = (int64_t)sizeof(int64_t);
    /* places and group numbers share the last part */
    int64_t words = 6 * count + layout->group_count + 1 + layout->rank_count;
    void *memory;
    DCP_TRY(dcp_alloc_array(words, word, "layout of a buffer", &memory));
    members_t members;
    members.sizes = memory;
    members.tensors = (int64_t *)(members.sizes + count);
    members.starts = members.tensors + count;
    place_t *places = (place_t *)(members.starts + count);
    members.firsts = (int64_t *)(places + count);
    int64_t *nexts = members.firsts + layout->group_count + 1;
    fill_members(layout, block_rows, &members);
    dcp_status_t status = plan_groups(layout, &members, order);
    if (status == DCP_OK) {
        status = make_runs(layout, places, nexts);
    }
    dcp_free(memory);
    return status;
}

static dcp_status_t
allocate(dcp_dbuffer_layout_t *layout)
{
    int64_t word = (int64_t)sizeof(int64_t);
    void *memory;
    DCP_TRY(dcp_alloc_array(layout->tensor_count, (int64_t)sizeof layout->tensors[0],
                            "tensors of a layout", &memory));
    layout->tensors = memory;
    DCP_TRY(dcp_alloc_array(layout->tensor_count, word, "starts", &memory));
    layout->starts = memory;
    DCP_TRY(dcp_alloc_array(layout->group_count + 1, word, "group starts", &memory));
    layout->group_starts = memory;
    DCP_TRY(dcp_alloc_array(layout->group_count, word, "shard sizes", &memory));
    layout->shards = memory;
    DCP_TRY(dcp_alloc_array(layout->group_count + 1, word, "shard starts", &memory));
    layout->shard_starts = memory;
    DCP_TRY(dcp_alloc_array(layout->rank_count + 1, word, "runs per rank", &memory));
    layout->run_firsts = memory;
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_layout_create(const dcp_dbuffer_tensor_t *tensors, int64_t tensor_count,
                          int32_t rank_count, int64_t block_rows,
                          dcp_layout_order_t order, dcp_dbuffer_layout_t **layout_p)
{
    int32_t group_count = 0;
    dcp_status_t status =
        check_tensors(tensors, tensor_count, rank_count, block_rows, &group_count);
    if (status != DCP_OK) {
        return status;
    }
    void *memory;
    status = dcp_alloc_zeroed((int64_t)sizeof(dcp_dbuffer_layout_t),
                              "layout of a buffer", &memory);
    if (status != DCP_OK) {
        return status;
    }
    dcp_dbuffer_layout_t *layout = memory;
    layout->tensor_count = tensor_count;
    layout->rank_count = rank_count;
    layout->group_count = group_count;
    status = allocate(layout);
    if (status != DCP_OK) {
        goto err_layout;
    }
    for (int64_t i = 0; i < tensor_count; i++) {
        layout->tensors[i] = tensors[i];
    }
    status = plan_with_scratch(layout, block_rows, order);
    if (status != DCP_OK) {
        goto err_layout;
    }
    *layout_p = layout;
    return DCP_OK;
err_layout:
    dcp_dbuffer_layout_destroy(layout);
    return status;
}

void
dcp_dbuffer_layout_destroy(dcp_dbuffer_layout_t *layout)
{
    if (layout == NULL) {
        return;
    }
    dcp_free(layout->runs);
    dcp_free(layout->run_firsts);
    dcp_free(layout->shard_starts);
    dcp_free(layout->shards);
    dcp_free(layout->group_starts);
    dcp_free(layout->starts);
    dcp_free(layout->tensors);
    dcp_free(layout);
}

int32_t
dcp_dbuffer_layout_rank_count(const dcp_dbuffer_layout_t *layout)
{
    return layout->rank_count;
}

int64_t
dcp_dbuffer_layout_elements(const dcp_dbuffer_layout_t *layout)
{
    return layout->group_starts[layout->group_count];
}

int32_t
dcp_dbuffer_layout_group_count(const dcp_dbuffer_layout_t *layout)
{
    return layout->group_count;
}

dcp_dbuffer_group_t
dcp_dbuffer_layout_group(const dcp_dbuffer_layout_t *layout, int32_t group)
{
    return (dcp_dbuffer_group_t){
        .start = layout->group_starts[group],
        .shard = layout->shards[group],
        .shard_start = layout->shard_starts[group],
    };
}

int64_t
dcp_dbuffer_layout_start(const dcp_dbuffer_layout_t *layout, int64_t tensor)
{
    return layout->starts[tensor];
}

void
dcp_dbuffer_layout_runs(const dcp_dbuffer_layout_t *layout, int32_t rank,
                        const dcp_dbuffer_run_t **runs_p, int64_t *run_count_p)
{
    *runs_p = layout->runs + layout->run_firsts[rank];
    *run_count_p = layout->run_firsts[rank + 1] - layout->run_firsts[rank];
}
