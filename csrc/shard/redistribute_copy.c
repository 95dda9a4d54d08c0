/* Copies of sets that lie in pieces.
 *
 * A set is walked a row of runs at a time (dcp_placed_rows), so that columns of a few
 * elements cost a copy of some bytes each and not the search for their place. */
#include "redistribute_private.h"

#include "dcp/kernels.h"

/* The next rows of `part` from element `first` on, at most `count` elements. */
static dcp_placed_rows_t
next_rows(const dcp_placed_t *part, int64_t first, int64_t count)
{
    dcp_placed_rows_t rows = dcp_placed_rows(part, first);
    if (rows.together * rows.row_count > count) {
        rows.row_count = rows.together < count ? count / rows.together : 1;
        rows.together = rows.together < count ? rows.together : count;
    }
    return rows;
}

void
redistribute_read(const dcp_placed_t *held, const dcp_placed_t *part, const char *base,
                  int64_t item, int64_t first, int64_t count, char *bytes)
{
    while (count > 0) {
        dcp_placed_rows_t rows = next_rows(part, first, count);
        int64_t moved = rows.together * rows.row_count;
        dcp_copy_rows(bytes, rows.together * item,
                      base + dcp_placed_position(held, rows.element) * item,
                      held->weight[rows.dim] * item, rows.together * item,
                      rows.row_count, moved * item);
        bytes += moved * item;
        first += moved;
        count -= moved;
    }
}

void
redistribute_write(const dcp_placed_t *held, const dcp_placed_t *part, char *base,
                   int64_t item, int64_t first, int64_t count, const char *bytes)
{
    while (count > 0) {
        dcp_placed_rows_t rows = next_rows(part, first, count);
        int64_t moved = rows.together * rows.row_count;
        dcp_copy_rows(base + dcp_placed_position(held, rows.element) * item,
                      held->weight[rows.dim] * item, bytes, rows.together * item,
                      rows.together * item, rows.row_count, part->count * item);
        bytes += moved * item;
        first += moved;
        count -= moved;
    }
}

void
redistribute_copy(const dcp_placed_t *part, const dcp_placed_t *from,
                  const char *from_base, const dcp_placed_t *to, char *to_base,
                  int64_t item)
{
    for (int64_t at = 0; at < part->count;) {
        dcp_placed_rows_t rows = dcp_placed_rows(part, at);
        dcp_copy_rows(to_base + dcp_placed_position(to, rows.element) * item,
                      to->weight[rows.dim] * item,
                      from_base + dcp_placed_position(from, rows.element) * item,
                      from->weight[rows.dim] * item, rows.together * item,
                      rows.row_count, part->count * item);
        at += rows.together * rows.row_count;
    }
}
