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

/* Least S in units for `items` kept in this order (by_order), or in any order, which is
 * then written to `order` (as item numbers). `items` [count >= 1].
 * shard_limit   largest S whose whole buffer can be counted in 64 bits */
dcp_status_t dcp_layout_search(const layout_item_t *items, int64_t count,
                               int64_t rank_count, int64_t shard_limit,
                               int32_t any_order, int64_t *order, int64_t *shard_p);

#endif
