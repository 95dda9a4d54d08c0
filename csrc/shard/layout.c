/* Layout planner, front: checks, reduction to units, the sorted orders, final starts.
 * The search for the least S is in layout_search.c.
 *
 * [Note: Greedy placement is exact]
 * For a fixed order and S each tensor takes its earliest valid start. Sizes are fixed
 * and validity of a start depends on nothing but the start, so an earlier end never
 * hurts those that follow: if any placement exists, the greedy one does. The earliest
 * start is found in O(1). A tensor that ends before the next border starts at once.
 * Otherwise it must meet that border after a whole number d of blocks; if more than S
 * then remains, it meets the next border too, which needs S itself to be whole blocks.
 * If no such d >= 1 fits before the border, the tensor starts at the border, or, where
 * it is longer than S, as late in that shard as possible - and if that fails, no later
 * shard differs. So one check costs O(tensors). Starts and S are multiples of the unit,
 * so everything is counted in units, and a cut of a block of g elements at a border can
 * only happen every g / gcd(g, unit) units. */
#include "dcp/shard.h"

#include "dcp/alloc.h"
#include "layout_search.h"

#include <inttypes.h>
#include <stdlib.h>

static int64_t
greatest_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static layout_item_t
item_of(dcp_layout_tensor_t tensor, int64_t unit)
{
    return (layout_item_t){
        .size = tensor.element_count / unit + (tensor.element_count % unit != 0),
        .block = tensor.block_count / greatest_divisor(tensor.block_count, unit),
    };
}

int64_t
dcp_layout_place(layout_cursor_t *cursor, layout_item_t item)
{
    const int64_t shard = cursor->shard;
    int64_t room = cursor->border - cursor->next;
    int64_t start = cursor->next;
    if (item.size > room) {
        int64_t before = room - room % item.block; /* units ahead of the border */
        if (before == 0 || (item.size - before > shard && shard % item.block != 0)) {
            start = cursor->border;
            cursor->border += shard;
            before = shard - shard % item.block;
            if (item.size > shard) {
                if (before == 0 || (item.size - before > shard && before != shard)) {
                    return -1;
                }
                start = cursor->border - before;
            }
        } else {
            start = cursor->border - before;
        }
    }
    cursor->next = start + item.size;
    if (cursor->next > cursor->border) {
        int64_t beyond = cursor->next - cursor->border;
        cursor->border +=
            beyond <= shard ? shard : (beyond + shard - 1) / shard * shard;
    }
    return start;
}

int32_t
dcp_layout_fits(const dcp_layout_tensor_t *tensors, const int64_t *order,
                int64_t tensor_count, int64_t rank_count, int64_t unit, int64_t shard,
                int64_t *starts)
{
    if (shard < 0 || shard % unit != 0
        || (rank_count > 0 && shard > INT64_MAX / (rank_count + 1))) {
        return 0;
    }
    int64_t end = rank_count * (shard / unit);
    layout_cursor_t cursor = {shard / unit, 0, shard / unit};
    for (int64_t i = 0; i < tensor_count; i++) {
        int64_t tensor = order != NULL ? order[i] : i;
        if (tensors[tensor].element_count == 0) {
            starts[tensor] = cursor.next * unit;
            continue;
        }
        if (tensors[tensor].element_count > (end - cursor.next) * unit) {
            return 0;
        }
        int64_t start = dcp_layout_place(&cursor, item_of(tensors[tensor], unit));
        if (start < 0 || cursor.next > end) {
            return 0;
        }
        starts[tensor] = start * unit;
    }
    return 1;
}

static dcp_status_t
check_arguments(const dcp_layout_tensor_t *tensors, int64_t tensor_count,
                int64_t rank_count, int64_t unit, dcp_layout_order_t order)
{
    if (tensor_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "tensor_count %" PRId64 " must not be negative",
                        tensor_count);
    }
    if (rank_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "ranks %" PRId64 " must be at least 1",
                        rank_count);
    }
    if (unit < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "unit %" PRId64 " must be at least 1", unit);
    }
    if ((int)order < DCP_ORDER_MODEL || (int)order > DCP_ORDER_SEARCH) {
        return DCP_FAIL(DCP_ERR_ARG, "order %d is none of model, shape, size, search",
                        (int)order);
    }
    for (int64_t i = 0; i < tensor_count; i++) {
        if (tensors[i].element_count < 0) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "element count %" PRId64 " of tensor %" PRId64
                            " must not be negative",
                            tensors[i].element_count, i);
        }
        if (tensors[i].block_count < 1) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "block of %" PRId64 " elements of tensor %" PRId64
                            " must be at least 1",
                            tensors[i].block_count, i);
        }
    }
    return DCP_OK;
}

typedef struct sort_key {
    int64_t first, second; /* descending */
    int64_t tensor;        /* then ascending: stable */
} sort_key_t;

static int
compare_keys(const void *left, const void *right)
{
    const sort_key_t *a = left, *b = right;
    if (a->first != b->first) {
        return a->first > b->first ? -1 : 1;
    }
    if (a->second != b->second) {
        return a->second > b->second ? -1 : 1;
    }
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

/* order[i]: number of the tensor in place i; empty tensors included. */
static dcp_status_t
sort_tensors(const dcp_layout_tensor_t *tensors, int64_t tensor_count,
             dcp_layout_order_t kind, int64_t *order)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(tensor_count, (int64_t)sizeof(sort_key_t), "layout order",
                            &memory));
    sort_key_t *keys = memory;
    for (int64_t i = 0; i < tensor_count; i++) {
        int64_t size = tensors[i].element_count, block = tensors[i].block_count;
        keys[i].first = kind == DCP_ORDER_SHAPE  ? block
                        : kind == DCP_ORDER_SIZE ? size
                                                 : 0;
        keys[i].second = kind == DCP_ORDER_SHAPE ? size : 0;
        keys[i].tensor = i;
    }
    qsort(keys, (size_t)tensor_count, sizeof keys[0], compare_keys);
    for (int64_t i = 0; i < tensor_count; i++) {
        order[i] = keys[i].tensor;
    }
    dcp_free(keys);
    return DCP_OK;
}

/* The tensors that take place, in `order`, as items; kept[i] is the tensor of item i.
 */
static dcp_status_t
make_items(const dcp_layout_tensor_t *tensors, int64_t tensor_count, int64_t unit,
           const int64_t *order, layout_item_t *items, int64_t *kept,
           int64_t *item_count_p)
{
    int64_t count = 0, total = 0;
    for (int64_t i = 0; i < tensor_count; i++) {
        if (tensors[order[i]].element_count == 0) {
            continue;
        }
        layout_item_t item = item_of(tensors[order[i]], unit);
        if (item.size > INT64_MAX / unit / 4 - total) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "the tensors up to number %" PRId64
                            " have more elements than can be counted in 64 bits",
                            order[i]);
        }
        total += item.size;
        kept[count] = order[i];
        items[count++] = item;
    }
    *item_count_p = count;
    return DCP_OK;
}

dcp_status_t
dcp_layout_plan(const dcp_layout_tensor_t *tensors, int64_t tensor_count,
                int64_t rank_count, int64_t unit, dcp_layout_order_t order,
                int64_t *starts, int64_t *shard_p)
{
    DCP_TRY(check_arguments(tensors, tensor_count, rank_count, unit, order));
    void *memory;
    dcp_status_t status = dcp_alloc_array(tensor_count, 4 * (int64_t)sizeof(int64_t),
                                          "layout planner", &memory);
    if (status != DCP_OK) {
        return status;
    }
    int64_t *sorted = memory;
    int64_t *kept = sorted + tensor_count;
    int64_t *found = kept + tensor_count; /* order of the items that was found */
    int64_t *final = found + tensor_count;
    layout_item_t *items = NULL;
    int64_t item_count = 0, shard = 0;
    status = dcp_alloc_array(tensor_count, (int64_t)sizeof *items, "layout planner",
                             &memory);
    if (status != DCP_OK) {
        goto err_orders;
    }
    items = memory;
    status = sort_tensors(tensors, tensor_count, order, sorted);
    if (status != DCP_OK) {
        goto err_items;
    }
    status = make_items(tensors, tensor_count, unit, sorted, items, kept, &item_count);
    if (status != DCP_OK) {
        goto err_items;
    }
    if (item_count > 0) {
        status = dcp_layout_search(items, item_count, rank_count,
                                   INT64_MAX / unit / 2 / (rank_count + 1),
                                   order == DCP_ORDER_SEARCH, found, &shard);
        if (status != DCP_OK) {
            goto err_items;
        }
    }
    /* empty tensors go first: they take no place anywhere */
    int64_t place = 0;
    for (int64_t i = 0; i < tensor_count; i++) {
        if (tensors[i].element_count == 0) {
            final[place++] = i;
        }
    }
    for (int64_t i = 0; i < item_count; i++) {
        final[place++] = kept[found[i]];
    }
    if (!dcp_layout_fits(tensors, final, tensor_count, rank_count, unit, shard * unit,
                         starts)) {
        status = DCP_FAIL(DCP_ERR_STATE, "the layout that was found does not fit");
        goto err_items;
    }
    *shard_p = shard * unit;
err_items:
    dcp_free(items);
err_orders:
    dcp_free(sorted);
    return status;
}
