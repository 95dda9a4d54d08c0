/* Micro-batches from Python. */
#ifndef DCP_BIND_BATCH_H
#define DCP_BIND_BATCH_H

#include "bind.h"

#include "dcp/train.h"

/* Micro-batches converted for the core. */
typedef struct bind_batches {
    dcp_micro_batch_t *batches; /* [count] */
    PyObject **arrays;          /* [5 * count], references held; some NULL */
    Py_ssize_t count;
    dcp_rank_group_t *groups; /* [group_count] */
    Py_ssize_t group_count;
} bind_batches_t;

/* From a sequence of objects with the attributes of dcp.loader.MicroBatch, and the
 * groups of the step, a sequence of (first rank, count) or None. `rank` is the
 * caller's: what names no group is its alone. 0, or -1 with an exception and nothing to
 * free. */
int bind_batches_init(bind_batches_t *list, PyObject *sequence, PyObject *groups,
                      int32_t rank, double scale, uint64_t dropout_seed);
void bind_batches_fini(bind_batches_t *list);

#endif
