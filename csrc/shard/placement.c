/* What a rank holds under a placement, in closed form.
 *
 * The idea: even shards cut boxes out of boxes, and a ragged shard, applied last, takes
 * a range of a box's row-major elements. Within a box the row-major order is that of
 * the whole tensor, so a range of the box is the box between two numbers of elements:
 * two such sets intersect in the common box between the larger lower and the smaller
 * upper number. That covers the case where a ragged and an even shard cut the same
 * dimension (the strided case), with nothing special about it.
 *
 * Invariants: first + count <= elements of the box; a set with count 0 is never looked
 * into. Cost: O(dimensions) for a set, an overlap, a run, a position; a ragged
 * placement adds the sum of its units. */
#include "dcp/placement.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const int64_t most_elements = INT64_MAX / 16; /* bytes fit 64 bits */

int32_t
dcp_mesh_rank_count(const dcp_mesh_t *mesh)
{
    int32_t count = 1;
    for (int32_t a = 0; a < mesh->axis_count; a++) {
        count *= mesh->sizes[a];
    }
    return count;
}

int32_t
dcp_mesh_coordinate(const dcp_mesh_t *mesh, int32_t rank, int32_t axis)
{
    for (int32_t a = mesh->axis_count - 1; a > axis; a--) {
        rank /= mesh->sizes[a];
    }
    return rank % mesh->sizes[axis];
}

/* Appends to a text that is cut off at its end. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void
append(char *text, int64_t text_bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, (size_t)text_bytes - used, format, arguments);
    va_end(arguments);
}

static void
append_numbers(char *text, int64_t text_bytes, const int64_t *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        append(text, text_bytes, "%s%" PRId64, i > 0 ? ", " : "", numbers[i]);
    }
}

static void
append_placement(const dcp_placement_t *placement, char *text, int64_t text_bytes)
{
    switch (placement->kind) {
    case DCP_REPLICATE:
        append(text, text_bytes, "Replicate()");
        return;
    case DCP_SHARD_EVEN:
        append(text, text_bytes, "Shard(%d)", (int)placement->dim);
        return;
    case DCP_SHARD_RAGGED:
    case DCP_SHARD_AT:
    default:
        append(text, text_bytes, "%s((",
               placement->kind == DCP_SHARD_AT ? "RaggedShard.at" : "RaggedShard");
        append_numbers(text, text_bytes, placement->values, placement->value_count);
        append(text, text_bytes, ")");
        if (placement->kind == DCP_SHARD_RAGGED && placement->dim >= 0) {
            append(text, text_bytes, ", dims=(");
            for (int32_t i = 0; i < placement->dim; i++) {
                append(text, text_bytes, i > 0 ? ", %d" : "%d", (int)i);
            }
            append(text, text_bytes, placement->dim == 1 ? ",)" : ")");
        }
        append(text, text_bytes, ")");
    }
}

void
dcp_placement_text(const int64_t *shape, int32_t dim_count, const dcp_mesh_t *mesh,
                   const dcp_placement_t *placements, char *text, int64_t text_bytes)
{
    text[0] = '\0';
    append(text, text_bytes, "[");
    append_numbers(text, text_bytes, shape, dim_count);
    append(text, text_bytes, "] on mesh (");
    for (int32_t a = 0; a < mesh->axis_count; a++) {
        append(text, text_bytes, "%s%d", a > 0 ? ", " : "", (int)mesh->sizes[a]);
    }
    append(text, text_bytes, "): (");
    for (int32_t a = 0; a < mesh->axis_count; a++) {
        append(text, text_bytes, a > 0 ? ", " : "");
        append_placement(&placements[a], text, text_bytes);
    }
    append(text, text_bytes, ")");
}

/* Weights and contiguous elements of the box from low, size and stride; everything in
 * it is held. */
static void
measure_box(const int64_t *shape, dcp_placed_t *placed)
{
    int64_t weight = 1;
    bool whole = true; /* all dimensions behind this one */
    placed->contiguous = 1;
    for (int32_t d = placed->dim_count - 1; d >= 0; d--) {
        placed->weight[d] = weight;
        weight *= placed->size[d];
        if (whole) {
            placed->contiguous = weight;
        }
        whole = whole && placed->size[d] == shape[d];
    }
    placed->first = 0;
    placed->count = weight;
}

static void
whole_tensor(const int64_t *shape, int32_t dim_count, dcp_placed_t *placed)
{
    *placed = (dcp_placed_t){.dim_count = dim_count};
    int64_t stride = 1;
    for (int32_t d = dim_count - 1; d >= 0; d--) {
        placed->size[d] = shape[d];
        placed->stride[d] = stride;
        stride *= shape[d];
    }
    measure_box(shape, placed);
}

static void
cut_even(const int64_t *shape, int32_t dim, int64_t part, int64_t parts,
         dcp_placed_t *placed)
{
    int64_t size = placed->size[dim];
    int64_t each = (size + parts - 1) / parts;
    int64_t low = part * each < size ? part * each : size;
    int64_t high = low + each < size ? low + each : size;
    placed->low[dim] += low;
    placed->size[dim] = high - low;
    measure_box(shape, placed);
}

static int64_t
common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Elements in front of `part` of a ragged placement of a box of `count` elements. */
static int64_t
ragged_border(const dcp_placement_t *placement, int64_t count, int64_t part)
{
    if (placement->kind == DCP_SHARD_AT) {
        return placement->values[part];
    }
    int64_t sum = 0, before = 0, divisor = 0;
    for (int64_t i = 0; i < placement->value_count; i++) {
        before += i < part ? placement->values[i] : 0;
        sum += placement->values[i];
        divisor = common_divisor(divisor, placement->values[i]);
    }
    return count / (sum / divisor) * (before / divisor);
}

void
dcp_placement_local(const int64_t *shape, int32_t dim_count, const dcp_mesh_t *mesh,
                    const dcp_placement_t *placements, int32_t rank,
                    dcp_placed_t *placed_p)
{
    whole_tensor(shape, dim_count, placed_p);
    for (int32_t a = mesh->axis_count - 1; a >= 0; a--) {
        int64_t part = dcp_mesh_coordinate(mesh, rank, a);
        const dcp_placement_t *placement = &placements[a];
        if (placement->kind == DCP_SHARD_EVEN) {
            cut_even(shape, placement->dim, part, mesh->sizes[a], placed_p);
        } else if (placement->kind != DCP_REPLICATE) {
            int64_t count = placed_p->count;
            placed_p->first = ragged_border(placement, count, part);
            placed_p->count =
                ragged_border(placement, count, part + 1) - placed_p->first;
        }
    }
}

static dcp_status_t
check_mesh(const int64_t *shape, int32_t dim_count, const dcp_mesh_t *mesh)
{
    if (mesh->axis_count < 1 || mesh->axis_count > DCP_MESH_AXES) {
        return DCP_FAIL(DCP_ERR_ARG, "mesh has %d axes: 1..%d are possible",
                        (int)mesh->axis_count, (int)DCP_MESH_AXES);
    }
    int64_t ranks = 1;
    for (int32_t a = 0; a < mesh->axis_count; a++) {
        ranks *= mesh->sizes[a];
        if (mesh->sizes[a] < 1 || ranks > INT32_MAX) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "mesh axis %d has size %d: sizes must be at least 1, their "
                            "product at most 2^31 - 1",
                            (int)a, (int)mesh->sizes[a]);
        }
    }
    if (dim_count < 0 || dim_count > DCP_PLACED_DIMS) {
        return DCP_FAIL(DCP_ERR_ARG, "shape has %d dimensions: 0..%d are possible",
                        (int)dim_count, (int)DCP_PLACED_DIMS);
    }
    int64_t count = 1;
    for (int32_t d = 0; d < dim_count; d++) {
        /* an empty dimension makes the product 0, but strides must fit all the same */
        int64_t size = shape[d] > 1 ? shape[d] : 1;
        if (shape[d] < 0 || size > most_elements / count) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "shape[%d] = %" PRId64 ": sizes must not be negative, and "
                            "bytes must fit 64 bits",
                            (int)d, shape[d]);
        }
        count *= size;
    }
    return DCP_OK;
}

/* Are the values of a ragged placement fit for an axis of `parts` ranks? */
static dcp_status_t
check_values(const dcp_placement_t *placement, int32_t axis, int64_t parts)
{
    bool at = placement->kind == DCP_SHARD_AT;
    const char *what = at ? "borders" : "units";
    if (placement->value_count != parts + at) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "RaggedShard of mesh axis %d has %" PRId64
                        " %s: an axis of %" PRId64 " ranks needs %" PRId64,
                        (int)axis, placement->value_count, what, parts, parts + at);
    }
    const int64_t *values = placement->values;
    int64_t sum = 0;
    for (int64_t i = 0; i < placement->value_count; i++) {
        int64_t least = at && i > 0 ? values[i - 1] : 0;
        if (values[i] < least || values[i] > most_elements) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "RaggedShard of mesh axis %d: %s[%" PRId64 "] = %" PRId64
                            " must be at least %" PRId64 " and fit 64 bits in bytes",
                            (int)axis, what, i, values[i], least);
        }
        if (!at && values[i] > most_elements - sum) {
            return DCP_FAIL(
                DCP_ERR_ARG,
                "RaggedShard of mesh axis %d: the sum of units passes %" PRId64,
                (int)axis, most_elements);
        }
        sum += at ? 0 : values[i];
    }
    if (!at && sum == 0) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "RaggedShard of mesh axis %d: all units are 0, one must be more",
            (int)axis);
    }
    if (at && values[0] != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "RaggedShard of mesh axis %d: borders[0] = %" PRId64
                        " must be 0",
                        (int)axis, values[0]);
    }
    return DCP_OK;
}

/* Elements that a border of a ragged shard must not cut, in a box: the user's leading
 * dimensions, and entries of a dimension above 0 that an even shard has cut. The larger
 * is a multiple of the smaller, so it is their lcm. `dim`: the last leading dimension
 * that entries may be numbered by, 0: the box is one block. */
static int64_t
block_of(const dcp_placed_t *box, const dcp_mesh_t *mesh,
         const dcp_placement_t *placements, int32_t axis, int32_t *dim_p)
{
    int32_t dims =
        placements[axis].kind == DCP_SHARD_RAGGED && placements[axis].dim >= 0
            ? placements[axis].dim
            : box->dim_count;
    for (int32_t a = axis + 1; a < mesh->axis_count; a++) {
        if (placements[a].kind == DCP_SHARD_EVEN && placements[a].dim > 0
            && placements[a].dim + 1 < dims) {
            dims = placements[a].dim + 1;
        }
    }
    int64_t block = 1;
    for (int32_t d = dims; d < box->dim_count; d++) {
        block *= box->size[d];
    }
    *dim_p = dims;
    return block;
}

static dcp_status_t
fail_cut(const dcp_placed_t *box, const dcp_placement_t *placement, int32_t axis,
         int32_t dims, const char *rule)
{
    char text[128] = "", size[128] = "";
    append_placement(placement, text, sizeof text);
    append_numbers(size, sizeof size, box->size, box->dim_count);
    return DCP_FAIL(DCP_ERR_ARG,
                    "%s of mesh axis %d does not fit a local shape of [%s], cut along "
                    "its %d leading dimensions: %s",
                    text, (int)axis, size, (int)dims, rule);
}

/* Do units or borders go into the box that the axes to the right leave? */
static dcp_status_t
check_cut(const dcp_placed_t *box, const dcp_mesh_t *mesh,
          const dcp_placement_t *placements, int32_t axis)
{
    const dcp_placement_t *placement = &placements[axis];
    const int64_t *values = placement->values;
    int32_t dims;
    int64_t block = block_of(box, mesh, placements, axis, &dims);
    int64_t count = box->count;
    char rule[200];
    if (placement->kind == DCP_SHARD_AT) {
        int64_t end = values[placement->value_count - 1];
        if (end != count) {
            snprintf(rule, sizeof rule,
                     "the last border must be its %" PRId64 " elements", count);
            return fail_cut(box, placement, axis, dims, rule);
        }
        for (int64_t i = 0; i < placement->value_count && count > 0; i++) {
            if (values[i] % block != 0) {
                snprintf(rule, sizeof rule,
                         "border %" PRId64 " must be a multiple of %" PRId64
                         " elements",
                         values[i], block);
                return fail_cut(box, placement, axis, dims, rule);
            }
        }
        return DCP_OK;
    }
    int64_t divisor = 0, sum = 0;
    for (int64_t i = 0; i < placement->value_count; i++) {
        divisor = common_divisor(divisor, values[i]);
        sum += values[i];
    }
    if (count > 0 && count / block % (sum / divisor) != 0) {
        snprintf(rule, sizeof rule,
                 "the sum of units, %" PRId64 " (over their common divisor %" PRId64
                 "), must divide %" PRId64,
                 sum, divisor, count / block);
        return fail_cut(box, placement, axis, dims, rule);
    }
    return DCP_OK;
}

/* Is the list in itself possible? *ragged_p: the axis of the ragged shard, or -1. */
static dcp_status_t
check_list(int32_t dim_count, const dcp_mesh_t *mesh, const dcp_placement_t *placements,
           int32_t *ragged_p)
{
    int32_t ragged = -1;
    for (int32_t a = mesh->axis_count - 1; a >= 0; a--) {
        const dcp_placement_t *placement = &placements[a];
        if ((int)placement->kind < 0 || placement->kind > DCP_SHARD_AT) {
            return DCP_FAIL(DCP_ERR_ARG, "placement %d of mesh axis %d is unknown",
                            (int)placement->kind, (int)a);
        }
        if (placement->kind == DCP_REPLICATE) {
            continue;
        }
        if (ragged >= 0) {
            return DCP_FAIL(
                DCP_ERR_ARG,
                "mesh axis %d cuts what the RaggedShard of axis %d has cut: "
                "a RaggedShard must stand left of all others that shard, and "
                "there is at most one",
                (int)a, (int)ragged);
        }
        if (placement->kind == DCP_SHARD_EVEN) {
            if (placement->dim < 0 || placement->dim >= dim_count) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "Shard(%d) of mesh axis %d: the tensor has %d "
                                "dimensions",
                                (int)placement->dim, (int)a, (int)dim_count);
            }
            continue;
        }
        if (placement->kind == DCP_SHARD_RAGGED
            && (placement->dim < -1 || placement->dim > dim_count)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "RaggedShard of mesh axis %d: dims names %d leading "
                            "dimensions, the tensor has %d",
                            (int)a, (int)placement->dim, (int)dim_count);
        }
        DCP_TRY(check_values(placement, a, mesh->sizes[a]));
        ragged = a;
    }
    *ragged_p = ragged;
    return DCP_OK;
}

dcp_status_t
dcp_placement_check(const int64_t *shape, int32_t dim_count, const dcp_mesh_t *mesh,
                    const dcp_placement_t *placements)
{
    int32_t ragged = -1;
    DCP_TRY(check_mesh(shape, dim_count, mesh));
    DCP_TRY(check_list(dim_count, mesh, placements, &ragged));
    if (ragged < 0) {
        return DCP_OK;
    }
    /* the boxes that the axes right of the ragged one make, one for each of their
     * coordinates: these count fastest */
    int32_t boxes = 1;
    for (int32_t a = ragged + 1; a < mesh->axis_count; a++) {
        boxes *= mesh->sizes[a];
    }
    for (int32_t rank = 0; rank < boxes; rank++) {
        dcp_placed_t box;
        whole_tensor(shape, dim_count, &box);
        for (int32_t a = mesh->axis_count - 1; a > ragged; a--) {
            if (placements[a].kind == DCP_SHARD_EVEN) {
                cut_even(shape, placements[a].dim, dcp_mesh_coordinate(mesh, rank, a),
                         mesh->sizes[a], &box);
            }
        }
        DCP_TRY(check_cut(&box, mesh, placements, ragged));
    }
    return DCP_OK;
}

int64_t
dcp_placed_run(const dcp_placed_t *placed, int64_t position, int64_t *count_p)
{
    int64_t at = placed->first + position, element = 0, rest = at;
    for (int32_t d = 0; d < placed->dim_count; d++) {
        int64_t index = rest / placed->weight[d];
        rest -= index * placed->weight[d];
        element += (placed->low[d] + index) * placed->stride[d];
    }
    int64_t together = placed->contiguous - at % placed->contiguous;
    int64_t left = placed->count - position;
    *count_p = together < left ? together : left;
    return element;
}

dcp_placed_rows_t
dcp_placed_rows(const dcp_placed_t *placed, int64_t position)
{
    dcp_placed_rows_t rows = {.row_count = 1};
    rows.element = dcp_placed_run(placed, position, &rows.together);
    int64_t at = placed->first + position;
    if (rows.together < placed->contiguous || at % placed->contiguous != 0) {
        return rows; /* a piece of a run */
    }
    for (int32_t d = placed->dim_count - 1; d >= 0; d--) {
        if (placed->weight[d] == placed->contiguous && placed->size[d] > 1) {
            int64_t in_box = placed->size[d] - at / placed->weight[d] % placed->size[d];
            int64_t held = (placed->count - position) / placed->contiguous;
            rows.row_count = in_box < held ? in_box : held;
            rows.dim = d;
            break;
        }
    }
    return rows;
}

/* Elements of the box below a number of the tensor; the box is not empty. */
static int64_t
box_position(const dcp_placed_t *placed, int64_t element)
{
    if (placed->dim_count == 0) {
        return element > 0;
    }
    int64_t position = 0, rest = element;
    for (int32_t d = 0; d < placed->dim_count; d++) {
        int64_t index = rest / placed->stride[d];
        rest -= index * placed->stride[d];
        index -= placed->low[d];
        if (index < 0) {
            return position;
        }
        if (index >= placed->size[d]) {
            return position + placed->size[d] * placed->weight[d];
        }
        position += index * placed->weight[d];
    }
    return position;
}

int64_t
dcp_placed_position(const dcp_placed_t *placed, int64_t element)
{
    if (placed->count == 0) {
        return 0;
    }
    int64_t position = box_position(placed, element) - placed->first;
    return position < 0 ? 0 : position < placed->count ? position : placed->count;
}

dcp_placed_t
dcp_placed_overlap(const dcp_placed_t *a, const dcp_placed_t *b)
{
    dcp_placed_t both = {.dim_count = a->dim_count};
    if (a->count == 0 || b->count == 0) {
        return both;
    }
    bool together =
        true; /* dimensions behind this one are whole in a, and so in both */
    int64_t weight = 1;
    both.contiguous = 1;
    for (int32_t d = a->dim_count - 1; d >= 0; d--) {
        int64_t a_end = a->low[d] + a->size[d], b_end = b->low[d] + b->size[d];
        int64_t end = a_end < b_end ? a_end : b_end;
        both.low[d] = a->low[d] > b->low[d] ? a->low[d] : b->low[d];
        both.size[d] = end - both.low[d];
        if (both.size[d] <= 0) {
            return (dcp_placed_t){.dim_count = a->dim_count};
        }
        both.stride[d] = a->stride[d];
        both.weight[d] = weight;
        weight *= both.size[d];
        if (together) {
            both.contiguous = weight;
        }
        /* whole: as many as the stride of the dimension before says */
        together =
            together && (d == 0 || both.size[d] * both.stride[d] == both.stride[d - 1]);
    }
    int64_t run;
    int64_t a_low = dcp_placed_run(a, 0, &run), b_low = dcp_placed_run(b, 0, &run);
    int64_t a_last = dcp_placed_run(a, a->count - 1, &run);
    int64_t b_last = dcp_placed_run(b, b->count - 1, &run);
    int64_t low = a_low > b_low ? a_low : b_low;
    int64_t last = a_last < b_last ? a_last : b_last;
    if (low > last) {
        return (dcp_placed_t){.dim_count = a->dim_count};
    }
    both.first = box_position(&both, low);
    both.count = box_position(&both, last + 1) - both.first;
    return both;
}
