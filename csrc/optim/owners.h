/* Who works on what: units, their owners, rounds, and the pieces of units that ranks
 * hold. A pure function of tensors, layout and world: every rank has the same. */
#ifndef DCP_OPTIM_OWNERS_H
#define DCP_OPTIM_OWNERS_H

#include "optim_private.h"

#include <stdbool.h>

/* Rows that are worked on together, on one rank: a matrix, or a panel of one. */
typedef struct optim_unit {
    int64_t tensor;        /* number */
    int64_t first, count;  /* elements of the tensor, count = rows * columns */
    int64_t rows, columns; /* > 0 */
    double cost;           /* > 0, of a step, in any unit that is common to all */
    int32_t owner;         /* rank */
    int32_t round;
    int64_t place; /* element of the owner's slab, in its round */
} optim_unit_t;

/* What one rank holds of one unit. */
typedef struct optim_piece {
    int64_t unit;
    int64_t first, count; /* elements of the tensor */
    int64_t run;          /* number of the holder's run in the layout */
    int32_t rank;         /* holder */
    int64_t place; /* element of the holder's stage, in its round; -1: own unit */
} optim_piece_t;

typedef struct optim_owners {
    optim_unit_t *units; /* [unit_count] by tensor and element */
    int64_t *dealt; /* [unit_count] numbers of units, dearest first: of any world */
    int64_t *order; /* [unit_count] the same by round */
    int64_t unit_count;
    optim_piece_t *pieces; /* [piece_count] by unit and element */
    int64_t *piece_firsts; /* [unit_count + 1] of a unit in pieces */
    int64_t piece_count;
    int32_t round_count;
    int32_t rank_count;
    int64_t *slabs;   /* [rank_count] most elements of own units in a round */
    int64_t *stages;  /* [rank_count] most elements held of others' units in a round;
                         without windows that is bounded too */
    double imbalance; /* cost of the busiest rank / mean - 1; 0 without units */
} optim_owners_t;

/* How a tensor is cut: sets rows, columns, first, count and cost of its `unit`-th unit;
 * false where there is none. */
typedef bool (*optim_cut_t)(const dcp_optimizer_tensor_t *tensor, int64_t unit,
                            optim_unit_t *unit_p);

/* Deals the units of `members` over the ranks of the layout. On failure owners is
 * empty; fini in any case. */
dcp_status_t optim_owners_init(optim_owners_t *owners,
                               const dcp_dbuffer_layout_t *layout, int32_t rank_count,
                               const dcp_optimizer_tensor_t *tensors,
                               const int64_t *members, int64_t member_count,
                               optim_cut_t cut, int32_t no_windows);
void optim_owners_fini(optim_owners_t *owners);
/* Bytes of these tables. */
int64_t optim_owners_bytes(const optim_owners_t *owners);

/* Shape of a tensor of two dimensions or more as matrices: all but the last two
 * dimensions count them. */
typedef struct optim_matrices {
    int64_t count, rows, columns;
} optim_matrices_t;
optim_matrices_t optim_matrices_of(const dcp_optimizer_tensor_t *tensor);

#endif
