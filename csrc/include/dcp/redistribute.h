/* Moves between placements (placement.h), and sums into one.
 *
 * Every call is collective over a communicator whose ranks are those of the mesh. What
 * differs between ranks (shape, mesh, placements, dtype) is ERR_MISMATCH on all of them
 * with both sides shown, before anything moves, and the communicator stays usable.
 * Wrong arguments are ERR_ARG before peers are told, as in comm.h.
 */
#ifndef DCP_REDISTRIBUTE_H
#define DCP_REDISTRIBUTE_H

#include "dcp/comm.h"
#include "dcp/placement.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What one rank moved. */
typedef struct dcp_moved {
    int64_t sent_bytes;     /* of this rank to others */
    int64_t received_bytes; /* of others to this rank */
    int64_t kept_bytes;     /* from this rank's old part to its new one */
    int64_t staged_bytes;   /* went through scratch, because the way was blocked */
} dcp_moved_t;

typedef struct dcp_redistribute_args {
    dcp_comm_t *comm;  /* borrowed; all ranks of the mesh */
    dcp_comm_t *group; /* borrowed; the ranks along group_axis; NULL: none. For a source
                          that is replicated on all other axes: then only these
                          exchange, and a gather sends each element once */
    int32_t group_axis;
    const int64_t *shape; /* [dim_count], of the whole tensor */
    int32_t dim_count;
    dcp_mesh_t mesh;
    const dcp_placement_t *source, *target; /* [axis_count] */
    dcp_dtype_t dtype;
    const void *local; /* what this rank holds now, in its local order */
    int64_t local_count;
    void *out; /* where its new part goes; may overlap local */
    int64_t out_count;
    const dcp_window_t *window; /* NULL, or the window of comm in which local lies on
                                   every rank: peers then copy from it themselves */
} dcp_redistribute_args_t;

/* Each rank gets its new part: from every other rank exactly the elements that it lacks
 * (of equal copies: from the one with its own coordinates), straight from local to out.
 *
 * Messages: one alltoall; one allgather where the target is whole and the source one
 * range a rank. Window: copies from the peers' parts, between two fences.
 * In place: nothing passes scratch where the new part lands on nothing that must still
 * leave, or where nothing arrives (so: a rank that only gives, or only takes, needs
 * none); else what arrives does. Parts in a window that land on another rank's old part
 * all pass scratch. */
dcp_status_t dcp_redistribute(const dcp_redistribute_args_t *args,
                              dcp_moved_t *moved_p);

typedef struct dcp_placement_reduce_args {
    dcp_comm_t *comm;          /* borrowed; all ranks of the mesh */
    dcp_comm_t *const *groups; /* [axis_count], the ranks along each axis; NULL for an
                                  axis of one rank */
    const int64_t *shape;
    int32_t dim_count;
    dcp_mesh_t mesh;
    const dcp_placement_t *target;
    const float *full; /* [whole tensor], this rank's summand */
    int64_t full_count;
    float *out; /* this rank's part of the sum; apart from full */
    int64_t out_count;
} dcp_placement_reduce_args_t;

/* Sum over all ranks, placed: from the last axis to the first, a reduce-scatter inside
 * each axis that shards; then, last to first, an allreduce across each that replicates.
 * Within an axis ranks are added in order, so for (Replicate, RaggedShard) on (2, 3):
 * (g0 + g1 + g2) + (g3 + g4 + g5), and all copies of an element are the same bits. */
dcp_status_t dcp_placement_reduce(const dcp_placement_reduce_args_t *args,
                                  dcp_moved_t *moved_p);

#ifdef __cplusplus
}
#endif
#endif
