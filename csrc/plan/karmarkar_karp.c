/* Balanced partition: the largest differencing method (Karmarkar and Karp, 1982) for k
 * parts.
 *
 * State: a set of k-tuples of part sums, at first one tuple (w, 0, ..., 0) per item.
 * Repeat: take the two tuples with the largest difference (largest minus smallest sum)
 * and merge them, the largest sums of one with the smallest of the other. Items hang on
 * their part as a linked list, so a merge only joins lists.
 *
 * What keeps it small: items are sorted first, so fresh ones come in order and need no
 * heap. While a tuple has fewer than k items its smallest sum is 0, so its difference
 * is its largest item, at least as large as any item still to come: it is merged before
 * anything else can grow. So at most one tuple is not full, and all full ones hold at
 * least k items: (n / k + 2) k entries in all. Cost O(n log n + n k) in the worst case,
 * far less on real lengths; a merge of a full tuple with one item is O(k).
 * Equal differences: the older tuple first. So the result is unique.
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

/* A part of a tuple: its sum and its items, chained through next[]. */
typedef struct part {
    double sum;
    int64_t first, last;
} part_t;

typedef struct tuple {
    double difference;
    int64_t age; /* of creation: the tie-breaker */
    part_t
        *parts; /* [part_count], by descending sum; unused ones are empty, at the end */
} tuple_t;

typedef struct differencer {
    int32_t part_count;
    int64_t *next; /* [item_count] */
    tuple_t *heap; /* by (difference descending, age ascending) */
    int64_t heap_count;
    part_t *scratch; /* [part_count] */
    part_t *pool;    /* parts of every tuple alive */
    int64_t made;    /* tuples' worth of pool taken so far */
    int64_t spare;   /* number of a set of parts given back, chained by .first; or -1 */
    int64_t ages;
} differencer_t;

static int
before(const tuple_t *a, const tuple_t *b)
{
    return a->difference > b->difference
           || (a->difference == b->difference && a->age < b->age);
}

static void
heap_push(differencer_t *d, tuple_t tuple)
{
    int64_t at = d->heap_count++;
    while (at > 0 && before(&tuple, &d->heap[(at - 1) / 2])) {
        d->heap[at] = d->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    d->heap[at] = tuple;
}

static tuple_t
heap_pop(differencer_t *d)
{
    tuple_t top = d->heap[0];
    tuple_t moved = d->heap[--d->heap_count];
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= d->heap_count) {
            break;
        }
        if (child + 1 < d->heap_count && before(&d->heap[child + 1], &d->heap[child])) {
            child++;
        }
        if (!before(&d->heap[child], &moved)) {
            break;
        }
        d->heap[at] = d->heap[child];
        at = child;
    }
    d->heap[at] = moved;
    return top;
}

/* Stable merge sort by descending sum: runs that are already in order cost one pass. */
static void
sort_parts(part_t *parts, int32_t count, part_t *scratch)
{
    int64_t n = count;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t low = 0; low + width < n; low += 2 * width) {
            int64_t middle = low + width;
            int64_t high = middle + width < n ? middle + width : n;
            if (parts[middle - 1].sum >= parts[middle].sum) {
                continue;
            }
            int64_t left = low, right = middle;
            for (int64_t out = low; out < high; out++) {
                int take_left =
                    left < middle
                    && (right >= high || parts[left].sum >= parts[right].sum);
                scratch[out] = take_left ? parts[left++] : parts[right++];
            }
            for (int64_t i = low; i < high; i++) {
                parts[i] = scratch[i];
            }
        }
    }
}

/* Joins the items of `from` to `to`. */
static void
join(differencer_t *d, part_t *to, const part_t *from)
{
    if (from->first < 0) {
        return;
    }
    if (to->first < 0) {
        *to = *from;
        return;
    }
    d->next[to->last] = from->first;
    to->last = from->last;
    to->sum += from->sum;
}

/* Adds one item to the smallest part of `tuple` and moves that part to its place. */
static void
add_item(differencer_t *d, tuple_t *tuple, int64_t item, double work)
{
    int32_t at = d->part_count - 1;
    part_t single = {.sum = work, .first = item, .last = item};
    part_t moved = tuple->parts[at];
    join(d, &moved, &single);
    for (; at > 0 && tuple->parts[at - 1].sum < moved.sum; at--) {
        tuple->parts[at] = tuple->parts[at - 1];
    }
    tuple->parts[at] = moved;
}

static void
refresh(differencer_t *d, tuple_t *tuple)
{
    tuple->difference = tuple->parts[0].sum - tuple->parts[d->part_count - 1].sum;
    tuple->age = d->ages++;
}

/* Merges `from` into `into`: the largest parts of one with the smallest of the other.
 */
static void
merge(differencer_t *d, tuple_t *into, const tuple_t *from)
{
    for (int32_t i = 0; i < d->part_count; i++) {
        join(d, &into->parts[d->part_count - 1 - i], &from->parts[i]);
    }
    sort_parts(into->parts, d->part_count, d->scratch);
}

/* Parts of a tuple that was merged away, or fresh ones. */
static part_t *
take_parts(differencer_t *d)
{
    part_t *parts;
    if (d->spare >= 0) {
        parts = d->pool + d->spare * d->part_count;
        d->spare = parts[0].first;
    } else {
        parts = d->pool + d->made++ * d->part_count;
    }
    for (int32_t p = 0; p < d->part_count; p++) {
        parts[p] = (part_t){.sum = 0, .first = -1, .last = -1};
    }
    return parts;
}

static void
give_parts(differencer_t *d, part_t *parts)
{
    parts[0].first = d->spare;
    d->spare = (parts - d->pool) / d->part_count;
}

/* A new tuple of items from order[at] on, one a part, for as long as the next partner
 * of the growing tuple is an item. Returns the first item not taken. */
static int64_t
start_tuple(differencer_t *d, const int64_t *order, int64_t at, int64_t count,
            const double *work_s)
{
    tuple_t tuple = {.parts = take_parts(d)};
    for (int32_t p = 0; p < d->part_count && at < count; p++, at++) {
        double work = work_s[order[at]];
        if (p > 0 && d->heap_count > 0 && d->heap[0].difference > work) {
            break;
        }
        tuple.parts[p] = (part_t){.sum = work, .first = order[at], .last = order[at]};
    }
    refresh(d, &tuple);
    heap_push(d, tuple);
    return at;
}

/* The method itself; leaves the one last tuple in heap[0]. */
static void
run(differencer_t *d, const int64_t *order, int64_t count, const double *work_s)
{
    int64_t at = 0;
    while (at < count || d->heap_count > 1) {
        if (at < count
            && (d->heap_count == 0 || work_s[order[at]] >= d->heap[0].difference)) {
            at = start_tuple(d, order, at, count, work_s);
            continue;
        }
        tuple_t top = heap_pop(d);
        if (at < count
            && (d->heap_count == 0 || work_s[order[at]] >= d->heap[0].difference)) {
            add_item(d, &top, order[at], work_s[order[at]]);
            at++;
        } else {
            tuple_t second = heap_pop(d);
            merge(d, &top, &second);
            give_parts(d, second.parts);
        }
        refresh(d, &top);
        heap_push(d, top);
    }
}

dcp_status_t
plan_karmarkar_karp(const double *work_s, int64_t item_count, int32_t part_count,
                    int32_t *part_p)
{
    if (part_count == 1 || item_count == 0) {
        for (int64_t i = 0; i < item_count; i++) {
            part_p[i] = 0;
        }
        return DCP_OK;
    }
    int64_t tuple_count = item_count / part_count + 2;
    int64_t pool_bytes = tuple_count * part_count * (int64_t)sizeof(part_t);
    int64_t heap_bytes = tuple_count * (int64_t)sizeof(tuple_t);
    int64_t scratch_bytes = part_count * (int64_t)sizeof(part_t);
    int64_t list_bytes = item_count * (int64_t)sizeof(int64_t);
    void *memory;
    DCP_TRY(dcp_alloc(pool_bytes + heap_bytes + scratch_bytes + 3 * list_bytes,
                      "the planner's partition", &memory));
    char *base = memory;
    differencer_t d = {
        .part_count = part_count,
        .pool = (part_t *)(void *)base,
        .heap = (tuple_t *)(void *)(base + pool_bytes),
        .scratch = (part_t *)(void *)(base + pool_bytes + heap_bytes),
        .next = (int64_t *)(void *)(base + pool_bytes + heap_bytes + scratch_bytes),
        .spare = -1,
    };
    int64_t *order = d.next + item_count, *sort_scratch = d.next + 2 * item_count;
    for (int64_t i = 0; i < item_count; i++) {
        order[i] = i;
        d.next[i] = -1;
    }
    plan_sort_descending(order, item_count, work_s, sort_scratch);
    run(&d, order, item_count, work_s);
    for (int32_t p = 0; p < part_count; p++) {
        for (int64_t i = d.heap[0].parts[p].first; i >= 0; i = d.next[i]) {
            part_p[i] = p;
        }
    }
    dcp_free(memory);
    return DCP_OK;
}
