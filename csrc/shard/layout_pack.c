/* Layout planner, parcels: tensors that are one block each, shared out over ranks.
 *
 * Whole tensors (the matrices of an optimizer that needs them whole) cannot be cut, so
 * the least S is that of bin packing with one bin a rank, which walking through one
 * order after the other hardly finds. Here S is bisected, and for each S the order is
 * built: first what may be cut, largest first, then the parcels into the rest of that
 * shard and the shards behind it, largest first, each into the first with room; then
 * shard by shard. Small tensors that may be cut anywhere fill gaps like parcels, as
 * they need no cut. The order is then placed greedily as any other, so a result is
 * exact for its order. Bisection over first fit is known as MULTIFIT: for parcels alone
 * at most 13/11 of the least, in practice within a percent.
 * Cost: O(parcels x shards) a value of S, equal sizes go on where the last one went. */
#include "layout_search.h"

#include "dcp/alloc.h"

#include <string.h>

enum {
    FILLER_SHARE = 16,         /* a tensor below S / 16 fills gaps */
    PACK_PLACEMENTS = 20000000 /* steps over shards, of all S together */
};

typedef struct packing {
    int64_t *rooms; /* [count + 1] units left in each shard, from the first on */
    int64_t *heads; /* [count + 1] first item in each, or -1 */
    int64_t *tails; /* [count + 1] */
    int64_t *nexts; /* [count] item behind this one, or -1 */
} packing_t;

static int32_t
is_parcel(layout_item_t item, int64_t shard)
{
    return item.block >= item.size
           || (item.block == 1 && item.size < shard / FILLER_SHARE);
}

/* Deals the parcels; returns the number of shards used, or -1 where they do not fit. */
static int64_t
deal(layout_search_t *search, packing_t *packing, int64_t shard, int64_t first_room,
     int64_t shards)
{
    int64_t used = 0, start = 0, last_size = -1;
    for (int64_t i = 0; i < search->count; i++) {
        int64_t number = search->by_size[i];
        layout_item_t item = search->items[number];
        if (!is_parcel(item, shard)) {
            continue;
        }
        int64_t at = item.size == last_size ? start : 0;
        for (; at < used && packing->rooms[at] < item.size; at++) {
            search->spent++;
        }
        if (at == used) {
            if (used == 0 && first_room < item.size) {
                packing->rooms[used] = first_room; /* stays for smaller ones */
                packing->heads[used++] = -1;
                at++;
            }
            if (used == shards) {
                return -1;
            }
            packing->rooms[used] = used == 0 ? first_room : shard;
            packing->heads[used++] = -1;
        }
        if (packing->rooms[at] < item.size) {
            return -1;
        }
        packing->rooms[at] -= item.size;
        if (packing->heads[at] < 0) {
            packing->heads[at] = number;
        } else {
            packing->nexts[packing->tails[at]] = number;
        }
        packing->tails[at] = number;
        packing->nexts[number] = -1;
        start = at;
        last_size = item.size;
    }
    return used;
}

/* Writes an order for this S; 0 where none was found. */
static int32_t
pack(layout_search_t *search, packing_t *packing, int64_t shard, int64_t *order)
{
    int64_t place = 0;
    layout_cursor_t cursor = {shard, 0, shard};
    for (int64_t i = 0; i < search->count; i++) {
        int64_t number = search->by_size[i];
        if (!is_parcel(search->items[number], shard)) {
            if (dcp_layout_place(&cursor, search->items[number]) < 0) {
                return 0;
            }
            order[place++] = number;
        }
    }
    search->spent += search->count;
    int64_t shards = search->rank_count - (cursor.border / shard - 1);
    if (shards < 1) {
        return 0;
    }
    int64_t used = deal(search, packing, shard, cursor.border - cursor.next, shards);
    for (int64_t b = 0; b < used; b++) {
        for (int64_t n = packing->heads[b]; n >= 0; n = packing->nexts[n]) {
            order[place++] = n;
        }
    }
    return used >= 0;
}

dcp_status_t
dcp_layout_search_pack(layout_search_t *search, int64_t *order, int64_t *best_order)
{
    int64_t parcels = 0;
    for (int64_t i = 0; i < search->count; i++) {
        layout_item_t item = search->items[i];
        parcels += item.block >= item.size && item.size > 1;
    }
    if (parcels < 2) {
        return DCP_OK;
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(search->count + 1, 4 * (int64_t)sizeof(int64_t),
                            "layout search", &memory));
    packing_t packing = {.rooms = memory};
    packing.heads = packing.rooms + search->count + 1;
    packing.tails = packing.heads + search->count + 1;
    packing.nexts = packing.tails + search->count + 1;
    int64_t low = search->lower, high = search->best - 1;
    int64_t end = search->spent + PACK_PLACEMENTS;
    while (low <= high && search->spent < end) {
        int64_t shard = low + (high - low) / 2;
        if (pack(search, &packing, shard, order)) {
            search->order = order;
            if (dcp_layout_search_fits(search, shard)) {
                search->best = shard;
                memcpy(best_order, order, (size_t)search->count * sizeof order[0]);
                high = shard - 1;
                continue;
            }
        }
        low = shard + 1;
    }
    dcp_free(memory);
    return DCP_OK;
}
