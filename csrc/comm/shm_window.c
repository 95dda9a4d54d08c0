/* Windows: each rank's part is a memfd that all map.
 *
 * Four rounds: sizes; does the sum fit the machine (rank 0 looks before anyone takes
 * pages); made; mapped. Each fails on all ranks alike, with the message of the rank
 * that failed first, and leaves nothing. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

/* Maps the parts of the others, told in the notes of the last round. */
static dcp_status_t
map_parts(shm_comm_t *comm, dcp_window_t *window)
{
    for (int32_t r = 0; r < window->size; r++) {
        const shm_note_t *note = shm_note_of(comm, r);
        if (window->bytes[r] == 0 || r == window->rank) {
            continue;
        }
        shm_map_t *map;
        DCP_TRY(shm_map_peer(note->pid, note->fd, window->bytes[r], "window", &map));
        window->maps[r] = map;
        window->bases[r] = map->base;
    }
    return DCP_OK;
}

/* This rank's own part. */
static dcp_status_t
make_part(dcp_window_t *window, int64_t bytes, int *fd_p)
{
    DCP_TRY(dcp_alloc_account(bytes, "window"));
    if (bytes == 0) {
        return DCP_OK;
    }
    shm_map_t *map;
    dcp_status_t status = shm_map_create(bytes, bytes, "window", fd_p, &map);
    if (status != DCP_OK) {
        dcp_alloc_account(-bytes, "window");
        return status;
    }
    window->maps[window->rank] = map;
    window->bases[window->rank] = map->base;
    return DCP_OK;
}

static dcp_status_t
check_sum(const dcp_window_t *window)
{
    int64_t sum = 0;
    for (int32_t r = 0; r < window->size; r++) {
        if (window->bytes[r] > INT64_MAX / 2 - sum) {
            return DCP_FAIL(DCP_ERR_ARG, "bytes of all ranks overflow");
        }
        sum += window->bytes[r];
    }
    char what[80];
    snprintf(what, sizeof what, "a window over %d ranks", (int)window->size);
    return comm_memory_check(sum, what);
}

dcp_status_t
shm_window_create(dcp_comm_t *base, const comm_call_t *call, int64_t bytes,
                  dcp_window_t **window_p)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    dcp_window_t *window = NULL;
    dcp_status_t status = comm_window_alloc(base, &window);
    shm_note_t note = {.bytes = bytes};
    status = shm_agree(comm, call, &note, status);
    if (status != DCP_OK) {
        dcp_free(window);
        return status;
    }
    for (int32_t r = 0; r < base->size; r++) {
        window->bytes[r] = shm_note_of(comm, r)->bytes;
    }
    int fd = -1;
    note = (shm_note_t){0};
    status = shm_agree(comm, NULL, &note, base->rank == 0 ? check_sum(window) : DCP_OK);
    bool accounted = false;
    if (status == DCP_OK) {
        status = make_part(window, bytes, &fd);
        accounted = status == DCP_OK;
        note = (shm_note_t){.pid = (int32_t)getpid(), .fd = fd};
        status = shm_agree(comm, NULL, &note, status);
    }
    if (status == DCP_OK) {
        status = map_parts(comm, window);
        note = (shm_note_t){0};
        status = shm_agree(comm, NULL, &note, status);
    }
    if (fd >= 0) {
        close(fd);
    }
    if (status != DCP_OK) {
        window->bytes[base->rank] = accounted ? bytes : 0;
        shm_window_destroy(window);
        return status;
    }
    *window_p = window;
    return DCP_OK;
}

void
shm_window_destroy(dcp_window_t *window)
{
    for (int32_t r = 0; r < window->size; r++) {
        shm_map_release(window->maps[r]);
    }
    dcp_alloc_account(-window->bytes[window->rank], "window");
    dcp_free(window);
}
