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
    const dcp_window_t *window; /* NULL: none */
    int32_t rank_count;
} redistribute_call_t;

/* What happens in which order on this rank. */
typedef enum redistribute_order {
    KEEP_FIRST,     /* stays, arrives */
    STAGE_RECEIVED, /* arrives in scratch, stays, scratch to out */
    STAGE_ALL,      /* all of out in scratch, fence, scratch to out; all ranks alike */
} redistribute_order_t;

typedef struct redistribute_piece {
    int64_t from, to, count; /* positions, elements */
} redistribute_piece_t;

typedef struct redistribute_place {
    int64_t owner;  /* rank whose part of the window it is, -1: none of them */
    int64_t offset; /* bytes from its start */
} redistribute_place_t;

typedef struct redistribute_exchange {
    const dcp_redistribute_args_t *args;
    dcp_comm_t *comm; /* of those who exchange: members */
    int32_t member_count, self;
    int64_t item;
    dcp_placed_t source, target; /* this rank's */
    dcp_placed_t *leaving;  /* [members], what goes to each; to itself: what stays */
    dcp_placed_t *arriving; /* [members] */
    int64_t *send_counts;   /* [members] of leaving, 0 for itself */
    int64_t *recv_counts;   /* [members] */
    int64_t sent_count, received_count;
    int64_t *place_counts;        /* [ranks] of an allgather of places */
    redistribute_place_t *places; /* [ranks, 2] of local, of out; NULL: no window */
    bool gathers;                 /* one allgather does it */
    redistribute_order_t order;
    char *scratch;
    redistribute_piece_t *pieces; /* that stay, where they must move in order */
    int64_t piece_count;
    void *memory; /* all tables */
} redistribute_exchange_t;

/* redistribute_agree.c
 * Collective. `status`: how this rank's own preparations went. Everybody fails where
 * one did, or where calls differ. */
dcp_status_t redistribute_agree(dcp_comm_t *comm, const redistribute_call_t *call,
                                dcp_status_t status);
/* Is `comm` there, and of as many ranks as the mesh? */
dcp_status_t redistribute_check_comm(const dcp_comm_t *comm, const dcp_mesh_t *mesh);

/* redistribute_plan.c */
dcp_status_t redistribute_check(const dcp_redistribute_args_t *args);
/* Fills x from x->args: tables, order, memory. The caller frees scratch, pieces and
 * memory, also after a failure. */
dcp_status_t redistribute_prepare(redistribute_exchange_t *x);
/* Collective: tells all where in the window everything lies. */
dcp_status_t redistribute_meet(redistribute_exchange_t *x,
                               const redistribute_call_t *call);
int32_t redistribute_member_rank(const redistribute_exchange_t *x, int32_t member);

/* redistribute_copy.c: elements [first, first + count) of a set `part` that `held`
 * holds at `base`: out of there into `bytes`, or from `bytes` into there. */
void redistribute_read(const dcp_placed_t *held, const dcp_placed_t *part,
                       const char *base, int64_t item, int64_t first, int64_t count,
                       char *bytes);
void redistribute_write(const dcp_placed_t *held, const dcp_placed_t *part, char *base,
                        int64_t item, int64_t first, int64_t count, const char *bytes);
/* All of `part` from where `from` holds it to where `to` does; the memory of both lies
 * apart. */
void redistribute_copy(const dcp_placed_t *part, const dcp_placed_t *from,
                       const char *from_base, const dcp_placed_t *to, char *to_base,
                       int64_t item);

#endif
