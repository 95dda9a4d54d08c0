/* Counted allocation. A 64-byte header before each block holds its size, so that free
 * needs none; the price is 64 bytes a block, and blocks here are few and large.
 * Counters are atomics: any thread may allocate. */
#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 64 };

static void *
default_alloc(void *context, int64_t bytes)
{
    (void)context;
    /* aligned_alloc wants a multiple of the alignment */
    return aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
}

static void
default_free(void *context, void *pointer, int64_t bytes)
{
    (void)context;
    (void)bytes;
    free(pointer);
}

static const dcp_allocator_ops_t default_ops = {default_alloc, default_free, NULL};
static const dcp_allocator_ops_t *current_ops = &default_ops;
static _Atomic int64_t held_bytes, peak_bytes, cap_bytes;

void
dcp_alloc_set_ops(const dcp_allocator_ops_t *ops)
{
    current_ops = ops != NULL ? ops : &default_ops;
}

dcp_status_t
dcp_alloc_account(int64_t bytes, const char *what)
{
    int64_t held = atomic_fetch_add(&held_bytes, bytes) + bytes;
    int64_t cap = atomic_load(&cap_bytes);
    if (bytes > 0 && cap > 0 && held > cap) {
        atomic_fetch_sub(&held_bytes, bytes);
        return DCP_FAIL(
            DCP_ERR_NO_MEM,
            "%s needs %" PRId64 " bytes, but %" PRId64 " of the memory cap of %" PRId64
            " bytes are held: raise the cap or lower the tokens of a micro-batch",
            what, bytes, held - bytes, cap);
    }
    int64_t peak = atomic_load(&peak_bytes);
    while (held > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, held)) {
    }
    return DCP_OK;
}

dcp_status_t
dcp_alloc(int64_t bytes, const char *what, void **pointer_p)
{
    if (bytes < 0 || bytes > INT64_MAX / 2) {
        return DCP_FAIL(DCP_ERR_ARG, "%s: %" PRId64 " bytes cannot be allocated", what,
                        bytes);
    }
    int64_t total = bytes + HEADER_BYTES;
    DCP_TRY(dcp_alloc_account(total, what));
    char *base = current_ops->alloc(current_ops->context, total);
    if (base == NULL) {
        dcp_alloc_account(-total, what);
        return DCP_FAIL(DCP_ERR_NO_MEM, "%s: no memory for %" PRId64 " bytes", what,
                        bytes);
    }
    memcpy(base, &total, sizeof total);
    *pointer_p = base + HEADER_BYTES;
    return DCP_OK;
}

dcp_status_t
dcp_alloc_zeroed(int64_t bytes, const char *what, void **pointer_p)
{
    DCP_TRY(dcp_alloc(bytes, what, pointer_p));
    memset(*pointer_p, 0, (size_t)bytes);
    return DCP_OK;
}

dcp_status_t
dcp_alloc_array(int64_t count, int64_t item_bytes, const char *what, void **pointer_p)
{
    if (count < 0 || item_bytes <= 0 || count > INT64_MAX / 2 / item_bytes) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "%s: %" PRId64 " items of %" PRId64 " bytes overflow", what,
                        count, item_bytes);
    }
    return dcp_alloc(count * item_bytes, what, pointer_p);
}

void
dcp_free(void *pointer)
{
    if (pointer == NULL) {
        return;
    }
    char *base = (char *)pointer - HEADER_BYTES;
    int64_t total;
    memcpy(&total, base, sizeof total);
    current_ops->free(current_ops->context, base, total);
    atomic_fetch_sub(&held_bytes, total);
}

int64_t
dcp_alloc_held_bytes(void)
{
    return atomic_load(&held_bytes);
}

int64_t
dcp_alloc_peak_bytes(void)
{
    return atomic_load(&peak_bytes);
}

void
dcp_alloc_reset_peak(void)
{
    atomic_store(&peak_bytes, atomic_load(&held_bytes));
}

void
dcp_alloc_set_cap(int64_t bytes)
{
    atomic_store(&cap_bytes, bytes);
}
