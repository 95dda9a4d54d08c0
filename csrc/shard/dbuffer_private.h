/* Inside DBuffer: what a layout and a buffer hold, and what its files share. */
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

/* What one task of an operation works on: a part of this rank's slice of a group. */
typedef struct dbuffer_piece {
    int64_t start, count; /* elements of the buffer */
    int32_t group;
} dbuffer_piece_t;

enum { DBUFFER_SQUARES = 512, DBUFFER_PARTS = 16 };

/* What one task of a norm adds up. */
typedef struct dbuffer_norm_part {
    dcp_exact_sum_t sum;
    double squares[DBUFFER_SQUARES]; /* of one call of the kernel */
    int32_t largest;                 /* bits of an absolute value */
} dbuffer_norm_part_t;

typedef struct dbuffer_prefetch dbuffer_prefetch_t; /* dbuffer_prefetch.c */

struct dcp_dbuffer {
    dcp_comm_t *comm;                   /* borrowed */
    dcp_comm_t *replicas;               /* borrowed; NULL: none */
    const dcp_dbuffer_layout_t *layout; /* borrowed */
    dcp_dbuffer_kind_t kind;
    dcp_dtype_t dtype;
    int64_t item_bytes;
    int32_t rank, rank_count;

    dcp_window_t *window; /* owned; SHARED and PRIVATE */
    void *memory;         /* owned; LOCAL and SHARD */
    int64_t memory_bytes; /* of it */
    char *data;           /* in one of these, or the reserved addresses; never NULL */
    int64_t shared_bytes; /* counted here beside what the window counts; negative: less
                           */

    int64_t *places; /* owned; [group_count + 1] bytes from data; NULL: the groups
                        follow one another */

    /* dbuffer_demand.c: DEMAND */
    char *reserved;         /* owned: mapped addresses */
    int64_t reserved_bytes; /* of them */
    uint8_t *held;          /* owned; [group_count] has memory behind it */
    int64_t held_bytes;     /* counted for it */
    int32_t keep_own;       /* this rank's slices have memory always */

    dbuffer_piece_t *pieces; /* owned; [piece_count] */
    int64_t *piece_firsts;   /* owned; [group_count + 1] in pieces */
    int64_t piece_count;
    int64_t *counts; /* owned; [ranks] of a collective over one group */
    /* so that a norm cannot run out of memory on one rank while the others wait */
    dbuffer_norm_part_t *norm_parts; /* owned; [DBUFFER_PARTS] */
    dcp_pool_t *inline_pool;         /* owned; of one: for kernels called in a task */
    dcp_dbuffer_traffic_t traffic;
    dbuffer_prefetch_t *prefetch; /* owned; NULL: no order declared */
};

/* Where element `start` of the buffer, of `group` and this rank's slice, lies. */
char *dbuffer_at(const dcp_dbuffer_t *buffer, int32_t group, int64_t start);
/* The whole group; not of SHARD. */
char *dbuffer_group_at(const dcp_dbuffer_t *buffer, int32_t group);
dcp_status_t dbuffer_check_group(const dcp_dbuffer_t *buffer, int32_t group);
/* Every rank has as much of a group as any other. */
const int64_t *dbuffer_group_counts(dcp_dbuffer_t *buffer, int32_t group);
/* Pieces [*first_p, *first_p + *count_p) of a group; of all where it is ALL_GROUPS. */
void dbuffer_pieces(const dcp_dbuffer_t *buffer, int32_t group, int64_t *first_p,
                    int64_t *count_p);

/* dbuffer_demand.c */
dcp_status_t dbuffer_reserve(dcp_dbuffer_t *buffer);
void dbuffer_unreserve(dcp_dbuffer_t *buffer);
/* Before a collective: nothing where the group has memory; a rank that gets none ends
 * the communicator, so that the others do not wait for it. */
dcp_status_t dbuffer_acquire_or_abort(dcp_dbuffer_t *buffer, int32_t group);

/* dbuffer_move.c: may `from` fill groups of `whole`? And the exchange alone, over
 * `comm`, once the memory is there: this rank's slice is rounded into place by `pool`,
 * then all slices are gathered. */
dcp_status_t dbuffer_check_source(const dcp_dbuffer_t *whole,
                                  const dcp_dbuffer_t *from);
dcp_status_t dbuffer_exchange(dcp_dbuffer_t *whole, dcp_comm_t *comm, dcp_pool_t *pool,
                              int32_t group, const dcp_dbuffer_t *from,
                              const int64_t *counts);
void dbuffer_count_gather(dcp_dbuffer_t *whole, int32_t group,
                          const dcp_dbuffer_t *from);

/* dbuffer_prefetch.c */
void dbuffer_prefetch_destroy(dbuffer_prefetch_t *prefetch);

#endif
