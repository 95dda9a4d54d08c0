/* What windows of every transport share: the tables, the accessors, the reduction.
 *
 * A window is one pointer per rank. The reduction is pure memory traffic: with n ranks
 * each element is read n times and written once, at the speed of memory. It works in
 * blocks (comm_reduce), so dst may be this rank's own part. */
#include "comm_transport.h"

#include "dcp/alloc.h"

#include <inttypes.h>

dcp_status_t
comm_window_alloc(const dcp_comm_t *comm, dcp_window_t **window_p)
{
    /* one block: the head, then three tables of 8-byte items */
    int64_t head = ((int64_t)sizeof(dcp_window_t) + 63) / 64 * 64;
    int64_t each = (int64_t)(sizeof(char *) + sizeof(int64_t) + sizeof(void *));
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(head + comm->size * each, "window tables", &memory));
    dcp_window_t *window = memory;
    window->ops = comm->ops;
    window->rank = comm->rank;
    window->size = comm->size;
    window->bases = (char **)((char *)memory + head);
    window->bytes = (int64_t *)(window->bases + comm->size);
    window->maps = (void **)(window->bytes + comm->size);
    *window_p = window;
    return DCP_OK;
}

void *
dcp_window_base(const dcp_window_t *window, int32_t rank)
{
    return window->bases[rank];
}

int64_t
dcp_window_bytes(const dcp_window_t *window, int32_t rank)
{
    return window->bytes[rank];
}

void
dcp_window_destroy(dcp_window_t *window)
{
    if (window != NULL) {
        window->ops->window_destroy(window);
    }
}

enum { REDUCE_RANKS = 64 }; /* sources handed on at once */

dcp_status_t
dcp_window_reduce(const dcp_window_t *window, int64_t offset, int64_t count, float *dst)
{
    if (window == NULL || (dst == NULL && count > 0)) {
        return DCP_FAIL(DCP_ERR_ARG, "%s must not be NULL",
                        window == NULL ? "window" : "dst");
    }
    if (offset < 0 || offset % 4 != 0 || count < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "offset %" PRId64 " must be >= 0 and a multiple of 4, count "
                        "%" PRId64 " must be >= 0",
                        offset, count);
    }
    for (int32_t r = 0; r < window->size; r++) {
        if (offset > window->bytes[r] || count > (window->bytes[r] - offset) / 4) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "offset %" PRId64 " + %" PRId64
                            " floats passes the end of rank %d's part of %" PRId64
                            " bytes",
                            offset, count, (int)r, window->bytes[r]);
        }
    }
    if (count == 0) {
        return DCP_OK;
    }
    if (window->size > REDUCE_RANKS) {
        void *memory;
        DCP_TRY(dcp_alloc_array(window->size, (int64_t)sizeof(void *),
                                "sources of a window reduction", &memory));
        const void **sources = memory;
        for (int32_t r = 0; r < window->size; r++) {
            sources[r] = window->bases[r] + offset;
        }
        comm_reduce(dst, sources, window->size, count, DCP_F32, DCP_SUM);
        dcp_free(memory);
        return DCP_OK;
    }
    const void *sources[REDUCE_RANKS];
    for (int32_t r = 0; r < window->size; r++) {
        sources[r] = window->bases[r] + offset;
    }
    comm_reduce(dst, sources, window->size, count, DCP_F32, DCP_SUM);
    return DCP_OK;
}
