/* What the files of redistribution share; private to shard/redistribute*.c. */
#ifndef REDISTRIBUTE_PRIVATE_H
#define REDISTRIBUTE_PRIVATE_H

#include "dcp/redistribute.h"

#include <stdbool.h>
#include <stdint.h>

/* What ranks must agree on before they move anything. */
typedef struct redistribute_call {
    const char *what; /* "redistribute", "reduce" */
    const int64_t *shape;
    int32_t dim_count;
    const dcp_mesh_t *mesh;
    const dcp_placement_t *source; /* NULL: none */
    const dcp_placement_t *target;
    dcp_dtype_t dtype;
    bool in_window;
} redistribute_call_t;

/* Collective. `status`: how this rank's own preparations went. Everybody fails where
 * one did, or where calls differ. */
dcp_status_t redistribute_agree(dcp_comm_t *comm, const redistribute_call_t *call,
                                dcp_status_t status);

/* Is `comm` there, and of as many ranks as the mesh? */
dcp_status_t redistribute_check_comm(const dcp_comm_t *comm, const dcp_mesh_t *mesh);

/* Elements [first, first + count) of a set `part` of what `held` holds at `base`: out
 * of there into `bytes`, or from `bytes` into there. */
void redistribute_read(const dcp_placed_t *held, const dcp_placed_t *part,
                       const char *base, int64_t item, int64_t first, int64_t count,
                       char *bytes);
void redistribute_write(const dcp_placed_t *held, const dcp_placed_t *part, char *base,
                        int64_t item, int64_t first, int64_t count, const char *bytes);

#endif
