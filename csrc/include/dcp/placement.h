/* Placements: which elements of a tensor each rank of a mesh holds.
 *
 *   mesh (2, 3), ranks row-major    axis 0: Replicate         axis 1: RaggedShard (1,
 * 2, 1) 0 1 2                         ranks 0 and 3 hold the first quarter of the
 * elements, 3 4 5                         1 and 4 the next half, 2 and 5 the last
 * quarter
 *
 * One placement for each axis of the mesh. They are applied from the last axis to the
 * first, each to what the one before has left, so the last axis cuts the tensor itself.
 * An even shard cuts a dimension into chunks of ceil(n / p), the last ones short or
 * empty. A ragged shard cuts the row-major sequence of elements that the others leave:
 * it must come first (leftmost) of all that cut, and there is at most one.
 *
 * So what a rank holds is always a range of the row-major elements of a box of the
 * tensor: dcp_placed_t. Its local order is that of the whole tensor. The part that two
 * ranks share is such a thing again, found without looking at elements.
 */
#ifndef DCP_PLACEMENT_H
#define DCP_PLACEMENT_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DCP_MESH_AXES = 4, DCP_PLACED_DIMS = 8 };

/* Ranks in a grid; the last axis counts fastest. */
typedef struct dcp_mesh {
    int32_t axis_count;           /* 1..DCP_MESH_AXES */
    int32_t sizes[DCP_MESH_AXES]; /* >= 1 */
} dcp_mesh_t;

typedef enum dcp_placement_kind {
    DCP_REPLICATE = 0,
    DCP_SHARD_EVEN = 1,   /* dim: the dimension that is cut */
    DCP_SHARD_RAGGED = 2, /* values[p]: relative units; dim: a unit is whole entries of
                             so many leading dimensions, -1: elements */
    DCP_SHARD_AT = 3, /* values[p + 1]: ascending borders in elements, first 0, last all
                       */
} dcp_placement_kind_t;

typedef struct dcp_placement {
    dcp_placement_kind_t kind;
    int32_t dim;
    const int64_t *values; /* borrowed */
    int64_t value_count;
} dcp_placement_t;

/* Elements [first, first + count) of the row-major elements of a box. */
typedef struct dcp_placed {
    int32_t dim_count;
    int64_t first, count;
    int64_t contiguous;              /* elements of the box that lie in one piece in the
                                        tensor */
    int64_t low[DCP_PLACED_DIMS];    /* first index of the box */
    int64_t size[DCP_PLACED_DIMS];   /* of the box */
    int64_t stride[DCP_PLACED_DIMS]; /* elements of the tensor a step takes */
    int64_t weight[DCP_PLACED_DIMS]; /* elements of the box a step takes */
} dcp_placed_t;

int32_t dcp_mesh_rank_count(const dcp_mesh_t *mesh);
int32_t dcp_mesh_coordinate(const dcp_mesh_t *mesh, int32_t rank, int32_t axis);

/* Are mesh, shape and placements [axis_count] possible, on every rank? ERR_ARG names
 * what is not. */
dcp_status_t dcp_placement_check(const int64_t *shape, int32_t dim_count,
                                 const dcp_mesh_t *mesh,
                                 const dcp_placement_t *placements);
/* What `rank` holds; the arguments have passed the check. */
void dcp_placement_local(const int64_t *shape, int32_t dim_count,
                         const dcp_mesh_t *mesh, const dcp_placement_t *placements,
                         int32_t rank, dcp_placed_t *placed_p);

/* Elements that both hold, of one tensor. */
dcp_placed_t dcp_placed_overlap(const dcp_placed_t *a, const dcp_placed_t *b);
/* Number of elements of the tensor of the held element `position` (0..count - 1); how
 * many from there on lie together. */
int64_t dcp_placed_run(const dcp_placed_t *placed, int64_t position, int64_t *count_p);
/* The held elements from `position` on as rows: `row_count` pieces of `together`
 * elements, `element` the first of all. In the tensor a row is stride[dim] behind the
 * one before, in whatever holds them all weight[dim]. */
typedef struct dcp_placed_rows {
    int64_t element, together, row_count;
    int32_t dim; /* 0 where there is one row */
} dcp_placed_rows_t;
dcp_placed_rows_t dcp_placed_rows(const dcp_placed_t *placed, int64_t position);
/* How many of the held elements have a number below `element`: the position of
 * `element` where it is held. */
int64_t dcp_placed_position(const dcp_placed_t *placed, int64_t element);

/* "[4, 6] on (2, 3): (Replicate, RaggedShard(1, 2, 1))", cut off where it is too long.
 */
void dcp_placement_text(const int64_t *shape, int32_t dim_count, const dcp_mesh_t *mesh,
                        const dcp_placement_t *placements, char *text,
                        int64_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
