/* Inside DBuffer: what a layout holds. */
#ifndef DCP_SHARD_DBUFFER_PRIVATE_H
#define DCP_SHARD_DBUFFER_PRIVATE_H

#include "dcp/dbuffer.h"

struct dcp_dbuffer_layout {
    int64_t tensor_count;
    int32_t rank_count;
    int32_t group_count;
    dcp_dbuffer_tensor_t *tensors; /* [tensor_count] */
    int64_t *starts;               /* [tensor_count] element of the buffer */
    int64_t *group_starts;         /* [group_count + 1] element of the buffer */
    int64_t *shards;               /* [group_count] S, elements */
    int64_t *shard_starts;         /* [group_count + 1] of a rank's slices */
    dcp_dbuffer_run_t *runs;       /* rank by rank, each in buffer order */
    int64_t *run_firsts;           /* [rank_count + 1] in runs */
};

#endif
