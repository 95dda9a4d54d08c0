/* Where tensors lie in a buffer that is cut over ranks (RaggedShard, veScale-FSDP,
 * arXiv 2602.22437; DESIGN 6).
 *
 *   rank 0          rank 1          rank 2             a layout of one group: m ranks x
 * S elements
 *   |--S------------|--S------------|--S------------|
 *   [ tensor a       |    ][ b  ]    [ c      |   ]      a border k*S never cuts a
 * block of a tensor
 */
#ifndef DCP_SHARD_H
#define DCP_SHARD_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_layout_tensor {
    int64_t element_count; /* >= 0 */
    int64_t block_count; /* elements of a block, >= 1; the last block of the tensor may
                            be short */
} dcp_layout_tensor_t;

typedef enum dcp_layout_order {
    DCP_ORDER_MODEL = 0,  /* as given */
    DCP_ORDER_SHAPE = 1,  /* by block, then size, descending; stable */
    DCP_ORDER_SIZE = 2,   /* by size, descending; stable */
    DCP_ORDER_SEARCH = 3, /* the best that a seeded search finds; all orders where few
                             tensors differ */
} dcp_layout_order_t;

/* Finds the least S found by DESIGN 6 and the start of every tensor.
 * tensors   borrowed for the call
 * unit      S and every start are multiples of it, >= 1 (elements)
 * starts    [tensor_count], written on success
 * shard_p   S, in elements; 0 when there is nothing to place */
dcp_status_t dcp_layout_plan(const dcp_layout_tensor_t *tensors, int64_t tensor_count,
                             int64_t rank_count, int64_t unit, dcp_layout_order_t order,
                             int64_t *starts, int64_t *shard_p);

/* Does a placement in this order exist for this S? Exact: greedy earliest start. Writes
 * starts if so. */
int32_t dcp_layout_fits(const dcp_layout_tensor_t *tensors, const int64_t *order,
                        int64_t tensor_count, int64_t rank_count, int64_t unit,
                        int64_t shard, int64_t *starts);

#ifdef __cplusplus
}
#endif
#endif
