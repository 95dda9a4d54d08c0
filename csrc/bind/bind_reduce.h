/* Sums in few bits for dcp._dcp.World (bind_world.c): a reducer that is kept. */
#ifndef DCP_BIND_REDUCE_H
#define DCP_BIND_REDUCE_H

#include "bind.h"

#include "dcp/reducer.h"

/* Of one world. The pool is its own: ranks that are threads of one process reduce side
 * by side. */
typedef struct bind_reducer {
    dcp_reducer_t *reducer; /* NULL: none yet */
    int32_t machine_ranks;  /* of reducer */
    dcp_pool_t *pool;       /* NULL: none yet */
} bind_reducer_t;

/* (x, counts or None, precision, hadamard, nearest, residual or None, seed, step,
 * machine_ranks, out or None) -> (sums, figures). counts None: all sums everywhere. The
 * caller keeps other threads out. NULL with an exception. */
PyObject *bind_reduce(bind_reducer_t *self, dcp_comm_t *comm, PyObject *args);
void bind_reducer_destroy(bind_reducer_t *self);

#endif
