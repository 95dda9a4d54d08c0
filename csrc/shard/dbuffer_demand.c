/* DEMAND: addresses for whole groups, memory only for those in use.
 *
 * Addresses of all groups are mapped once, without a claim on memory, each group on
 * pages of its own. To acquire a group is to count its bytes and take its pages, so
 * that a full machine is an error here and not a kill later; to release it gives the
 * pages back. Nothing else knows: views of tensors, saved by whoever computes with
 * them, stay good for the next time. Writing where there is no memory takes a page that
 * nobody counts, and is gone when the group is acquired.
 *
 *   keep_own:  | slices of ranks before | own slice, whole pages | ranks after |
 *                on demand                always                   on demand
 *
 * Cost: a system call or two, and clearing pages, about a third of the time of a copy.
 */
#define _GNU_SOURCE
#include "dbuffer_private.h"

#include "dcp/alloc.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum { HUGE_BYTES = 2 << 20, HUGE_FROM_BYTES = 4 * HUGE_BYTES };

/* Bytes of the buffer. */
typedef struct extent {
    int64_t first, end;
} extent_t;

static int64_t
round_up(int64_t x, int64_t unit)
{
    return (x + unit - 1) / unit * unit;
}

static int64_t
page_bytes(void)
{
    return (int64_t)sysconf(_SC_PAGESIZE);
}

static int64_t
group_bytes(const dcp_dbuffer_t *buffer, int32_t group)
{
    return buffer->rank_count * buffer->layout->shards[group] * buffer->item_bytes;
}

static extent_t
whole_extent(const dcp_dbuffer_t *buffer, int32_t group)
{
    int64_t first = buffer->places[group];
    return (extent_t){first,
                      round_up(first + group_bytes(buffer, group), page_bytes())};
}

/* This rank's slice and what shares its pages. */
static extent_t
own_extent(const dcp_dbuffer_t *buffer, int32_t group)
{
    int64_t page = page_bytes();
    int64_t slice = buffer->layout->shards[group] * buffer->item_bytes;
    int64_t first = buffer->places[group] + buffer->rank * slice;
    return (extent_t){first / page * page, round_up(first + slice, page)};
}

/* The parts of a group that come and go; *count_p is 1 or 2. */
static void
demand_extents(const dcp_dbuffer_t *buffer, int32_t group, extent_t extents[2],
               int32_t *count_p)
{
    extents[0] = whole_extent(buffer, group);
    *count_p = 1;
    if (buffer->keep_own) {
        extent_t own = own_extent(buffer, group);
        extents[1] = (extent_t){own.end, extents[0].end};
        extents[0].end = own.first;
        *count_p = 2;
    }
}

/* Memory behind addresses, zeroed. */
static dcp_status_t
populate(dcp_dbuffer_t *buffer, extent_t extent)
{
    size_t bytes = (size_t)(extent.end - extent.first);
    if (bytes == 0) {
        return DCP_OK;
    }
    int error;
    do {
        error = madvise(buffer->data + extent.first, bytes, MADV_POPULATE_WRITE) == 0
                    ? 0
                    : errno;
    } while (error == EINTR || error == EAGAIN);
    if (error != 0 && error != EINVAL) { /* EINVAL: an older kernel; pages come when
                                            touched */
        return DCP_FAIL(DCP_ERR_NO_MEM, "%zu bytes of a group of tensors: %s", bytes,
                        strerror(error));
    }
    return DCP_OK;
}

static void
drop(const dcp_dbuffer_t *buffer, extent_t extent)
{
    if (extent.end > extent.first) {
        madvise(buffer->data + extent.first, (size_t)(extent.end - extent.first),
                MADV_DONTNEED);
    }
}

static dcp_status_t
map_addresses(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int64_t page = page_bytes(), end = 0;
    for (int32_t g = 0; g < layout->group_count; g++) {
        int64_t bytes = group_bytes(buffer, g);
        end = round_up(end, bytes >= HUGE_FROM_BYTES ? HUGE_BYTES : page);
        buffer->places[g] = end;
        end += bytes;
    }
    buffer->places[layout->group_count] = round_up(end, page);
    int64_t mapped = round_up(end + 1, HUGE_BYTES) + HUGE_BYTES;
    void *base = mmap(NULL, (size_t)mapped, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return DCP_FAIL(DCP_ERR_NO_MEM,
                        "addresses for a buffer of %" PRId64 " bytes: %s", end,
                        strerror(errno));
    }
    buffer->reserved = base;
    buffer->reserved_bytes = mapped;
    uintptr_t at = ((uintptr_t)base + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    buffer->data = (char *)at;
    for (int32_t g = 0; g < layout->group_count; g++) {
        if (group_bytes(buffer, g) >= HUGE_FROM_BYTES && !buffer->keep_own) {
            extent_t extent = whole_extent(buffer, g); /* advice: may be refused */
            madvise(buffer->data + extent.first, (size_t)(extent.end - extent.first),
                    MADV_HUGEPAGE);
        }
    }
    return DCP_OK;
}

static dcp_status_t
take(dcp_dbuffer_t *buffer, extent_t extent)
{
    int64_t bytes = extent.end - extent.first;
    DCP_TRY(dcp_alloc_account(bytes, "a group of tensors"));
    buffer->held_bytes += bytes;
    dcp_status_t status = populate(buffer, extent);
    if (status != DCP_OK) {
        drop(buffer, extent);
        dcp_alloc_account(-bytes, "a group of tensors");
        buffer->held_bytes -= bytes;
    }
    return status;
}

static void
give_back(dcp_dbuffer_t *buffer, extent_t extent)
{
    drop(buffer, extent);
    dcp_alloc_account(extent.first - extent.end, "a group of tensors");
    buffer->held_bytes -= extent.end - extent.first;
}

dcp_status_t
dbuffer_reserve(dcp_dbuffer_t *buffer)
{
    int32_t group_count = buffer->layout->group_count;
    void *memory;
    DCP_TRY(dcp_alloc_array(group_count + 1, (int64_t)sizeof(int64_t),
                            "places of groups", &memory));
    buffer->places = memory;
    DCP_TRY(dcp_alloc_zeroed(group_count, "groups in use", &memory));
    buffer->held = memory;
    DCP_TRY(map_addresses(buffer));
    for (int32_t g = 0; buffer->keep_own && g < group_count; g++) {
        DCP_TRY(take(buffer, own_extent(buffer, g)));
    }
    return DCP_OK;
}

void
dbuffer_unreserve(dcp_dbuffer_t *buffer)
{
    if (buffer->reserved != NULL) {
        munmap(buffer->reserved, (size_t)buffer->reserved_bytes);
    }
    dcp_alloc_account(-buffer->held_bytes, "a group of tensors");
    dcp_free(buffer->held);
}

static dcp_status_t
check_demand(const dcp_dbuffer_t *buffer, int32_t group)
{
    if (buffer->kind != DCP_DBUFFER_DEMAND) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "only of a buffer on demand memory of a group is acquired: "
                        "others have it always");
    }
    return dbuffer_check_group(buffer, group);
}

dcp_status_t
dcp_dbuffer_acquire(dcp_dbuffer_t *buffer, int32_t group)
{
    DCP_TRY(check_demand(buffer, group));
    if (buffer->held[group]) {
        return DCP_OK;
    }
    extent_t extents[2];
    int32_t count;
    demand_extents(buffer, group, extents, &count);
    for (int32_t i = 0; i < count; i++) {
        drop(buffer, extents[i]); /* what was written while there was no memory */
        dcp_status_t status = take(buffer, extents[i]);
        if (status != DCP_OK) {
            if (i > 0) {
                give_back(buffer, extents[0]);
            }
            return status;
        }
    }
    buffer->held[group] = 1;
    return DCP_OK;
}

dcp_status_t
dbuffer_acquire_or_abort(dcp_dbuffer_t *buffer, int32_t group)
{
    if (dcp_dbuffer_is_held(buffer, group)) {
        return DCP_OK;
    }
    dcp_status_t status = dcp_dbuffer_acquire(buffer, group);
    if (status != DCP_OK) {
        dcp_comm_abort(buffer->comm, dcp_last_error());
    }
    return status;
}

void
dcp_dbuffer_release(dcp_dbuffer_t *buffer, int32_t group)
{
    if (buffer->kind != DCP_DBUFFER_DEMAND || group < 0
        || group >= buffer->layout->group_count || !buffer->held[group]) {
        return;
    }
    extent_t extents[2];
    int32_t count;
    demand_extents(buffer, group, extents, &count);
    for (int32_t i = 0; i < count; i++) {
        give_back(buffer, extents[i]);
    }
    buffer->held[group] = 0;
}

int32_t
dcp_dbuffer_is_held(const dcp_dbuffer_t *buffer, int32_t group)
{
    return buffer->kind != DCP_DBUFFER_DEMAND || buffer->held[group];
}
