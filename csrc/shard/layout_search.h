/* Inside the layout planner: everything here counts in units (DESIGN 6: 16 bytes), so
 * that alignment is built in. A tensor of e elements takes ceil(e / unit) units, and
 * its blocks of g elements may be cut at multiples of g / gcd(g, unit) units. */
#ifndef DCP_SHARD_LAYOUT_SEARCH_H
#define DCP_SHARD_LAYOUT_SEARCH_H

#include "dcp/shard.h"
#include "dcp/status.h"

#include <stdint.h>

typedef struct layout_item {
    int64_t size;  /* units, >= 1 */
    int64_t block; /* units between the places where it may be cut, >= 1 */
} layout_item_t;

/* How far a walk over a layout has come. */
typedef struct layout_cursor {
    int64_t shard;  /* S in units, >= 1 */
    int64_t next;   /* first free unit */
    int64_t border; /* least multiple of shard >= next, > 0 */
} layout_cursor_t;

/* Start of the item at its earliest valid place, and moves the cursor behind it; -1
 * where no place exists in however many shards. */
int64_t dcp_layout_place(layout_cursor_t *cursor, layout_item_t item);

enum {
    LAYOUT_STEP_SLOTS = 64, /* distinct lcms: each at least doubles */
    LAYOUT_KIND_SLOTS = 16, /* kinds of a walk over all orders */
};

/* Items of one size and block. */
typedef struct layout_kind {
    layout_item_t item;
    int64_t count;  /* of them */
    int64_t stride; /* of its count in the number of a state */
    int64_t first;  /* of them, in by_kind */
} layout_kind_t;

typedef struct layout_search {
    const layout_item_t *items; /* borrowed */
    int64_t count;
    int64_t rank_count;
    int64_t lower;                    /* no S below fits */
    int64_t best;                     /* fits; above the limit: none found yet */
    int64_t spent;                    /* placements so far */
    int64_t total;                    /* units of all items */
    int64_t *by_size;                 /* [count] item numbers, size descending */
    int64_t steps[LAYOUT_STEP_SLOTS]; /* the L to try */
    int32_t step_count;               /* of them */
    const int64_t *order;             /* [count] that `fits` walks; NULL: any order */
    int64_t *by_kind;                 /* [count] item numbers, kind by kind */
    layout_kind_t kinds[LAYOUT_KIND_SLOTS]; /* where kind_count <= LAYOUT_KIND_SLOTS */
    int64_t kind_count;                     /* of all, LAYOUT_KIND_SLOTS or not */
    int64_t state_count;                    /* multisets; 0: too many to walk */
    int64_t *ends;                          /* [state_count] least end, or -1 */
    int64_t *sums;                          /* [state_count] units placed */
    uint8_t *last;                          /* [state_count] kind placed last */
} layout_search_t;

typedef struct layout_key {
    int64_t first, second; /* descending */
    int64_t item;          /* then ascending */
} layout_key_t;

/* Least S in units for `items` [count >= 1], in this order or, with any_order, in the
 * best that is found, which goes to `order` as item numbers either way.
 * shard_limit   largest S whose whole buffer can be counted in 64 bits */
dcp_status_t dcp_layout_search(const layout_item_t *items, int64_t count,
                               int64_t rank_count, int64_t shard_limit,
                               int32_t any_order, int64_t *order, int64_t *shard_p);

/* The rest is shared by layout_search.c and layout_orders.c. */

/* Exact: does a placement exist for this S, in search->order or, if NULL, in any? */
int32_t dcp_layout_search_fits(layout_search_t *search, int64_t shard);
/* Sets best to some S that fits. */
dcp_status_t dcp_layout_search_first(layout_search_t *search, int64_t shard_limit);
/* Lowers best by bisection over the multiples of each step. */
void dcp_layout_search_steps(layout_search_t *search);
/* Lowers best by trying values one by one. */
void dcp_layout_search_values(layout_search_t *search);
/* Item numbers by size (and block) or by block (and size), descending; keys is scratch.
 */
void dcp_layout_sort_items(const layout_search_t *search, int32_t by_block,
                           layout_key_t *keys, int64_t *order);
/* Lowers best by packing tensors that are one block each like parcels (layout_pack.c);
 * `order` is scratch, best_order the order of the best. Needs by_size. */
dcp_status_t dcp_layout_search_pack(layout_search_t *search, int64_t *order,
                                    int64_t *best_order);
/* Heuristic search over orders: sets best and best_order. `keys` and `order` are
 * scratch of `count` each. */
dcp_status_t dcp_layout_search_orders(layout_search_t *search, int64_t shard_limit,
                                      layout_key_t *keys, int64_t *order,
                                      int64_t *best_order);

#endif
