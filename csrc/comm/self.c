/* One rank alone: collectives are copies, windows are anonymous memory, messages go
 * from a send to the matching receive of the same group. */
#define _GNU_SOURCE
#include "comm_transport.h"

#include "dcp/alloc.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void
copy(void *to, const void *from, int64_t bytes)
{
    if (bytes > 0 && to != from) {
        memmove(to, from, (size_t)bytes);
    }
}

static int64_t
call_bytes(const comm_call_t *call)
{
    return call->total * dcp_dtype_bytes((dcp_dtype_t)call->dtype);
}

static void
self_destroy(dcp_comm_t *comm)
{
    dcp_free(comm);
}

static dcp_status_t
self_check(dcp_comm_t *comm)
{
    (void)comm;
    return DCP_OK;
}

static void
self_abort(dcp_comm_t *comm, const char *text)
{
    snprintf(comm->broken_text, sizeof comm->broken_text,
             "rank 0 (process %d) aborted: "
             "%s",
             (int)getpid(), text);
    comm->broken = DCP_ERR_ABORTED;
}

static dcp_status_t
self_barrier(dcp_comm_t *comm, const comm_call_t *call)
{
    (void)comm;
    (void)call;
    return DCP_OK;
}

/* allgatherv and reduce_scatterv alike */
static dcp_status_t
self_copy_v(dcp_comm_t *comm, const comm_call_t *call, const void *send,
            const int64_t *counts, void *recv)
{
    (void)comm;
    (void)counts;
    copy(recv, send, call_bytes(call));
    return DCP_OK;
}

static dcp_status_t
self_allreduce(dcp_comm_t *comm, const comm_call_t *call, const void *send, void *recv)
{
    (void)comm;
    copy(recv, send, call_bytes(call));
    return DCP_OK;
}

static dcp_status_t
self_alltoallv(dcp_comm_t *comm, const comm_call_t *call,
               const comm_exchange_t *exchange)
{
    (void)comm;
    copy(exchange->recv, exchange->send,
         exchange->send_counts[0] * dcp_dtype_bytes((dcp_dtype_t)call->dtype));
    return DCP_OK;
}

static dcp_status_t
self_broadcast(dcp_comm_t *comm, const comm_call_t *call, void *data)
{
    (void)comm;
    (void)call;
    (void)data;
    return DCP_OK;
}

static dcp_status_t
self_exchange(dcp_comm_t *comm, const comm_call_t *call, comm_message_t *messages,
              int64_t message_count)
{
    (void)comm;
    (void)call;
    (void)messages;
    (void)message_count; /* all to itself: comm.c has moved them */
    return DCP_OK;
}

static dcp_status_t
self_split(dcp_comm_t *comm, const comm_call_t *call, int32_t color, int32_t key,
           dcp_comm_t **new_p)
{
    (void)comm;
    (void)call;
    (void)key;
    if (color < 0) {
        *new_p = NULL;
        return DCP_OK;
    }
    return dcp_comm_create_self(new_p);
}

static dcp_status_t
self_window_create(dcp_comm_t *comm, const comm_call_t *call, int64_t bytes,
                   dcp_window_t **window_p)
{
    (void)call;
    dcp_window_t *window;
    dcp_status_t status = comm_window_alloc(comm, &window);
    if (status != DCP_OK) {
        return status;
    }
    status = comm_memory_check(bytes, "a window");
    if (status != DCP_OK) {
        goto err_free;
    }
    status = dcp_alloc_account(bytes, "window");
    if (status != DCP_OK) {
        goto err_free;
    }
    if (bytes > 0) {
        void *base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) {
            status = DCP_FAIL(DCP_ERR_NO_MEM, "a window of %" PRId64 " bytes: %s",
                              bytes, strerror(errno));
            goto err_account;
        }
        madvise(base, (size_t)bytes, MADV_HUGEPAGE); /* advice: may be refused */
        window->bases[0] = base;
    }
    window->bytes[0] = bytes;
    *window_p = window;
    return DCP_OK;
err_account:
    dcp_alloc_account(-bytes, "window");
err_free:
    dcp_free(window);
    return status;
}

static void
self_window_destroy(dcp_window_t *window)
{
    if (window->bases[0] != NULL) {
        munmap(window->bases[0], (size_t)window->bytes[0]);
    }
    dcp_alloc_account(-window->bytes[0], "window");
    dcp_free(window);
}

const comm_ops_t comm_self_ops = {
    .name = "self",
    .destroy = self_destroy,
    .check = self_check,
    .abort = self_abort,
    .barrier = self_barrier,
    .allgatherv = self_copy_v,
    .reduce_scatterv = self_copy_v,
    .allreduce = self_allreduce,
    .alltoallv = self_alltoallv,
    .broadcast = self_broadcast,
    .exchange = self_exchange,
    .split = self_split,
    .window_create = self_window_create,
    .window_destroy = self_window_destroy,
};

dcp_status_t
dcp_comm_create_self(dcp_comm_t **comm_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_comm_t), "communicator", &memory));
    dcp_comm_t *comm = memory;
    comm->ops = &comm_self_ops;
    comm->size = 1;
    *comm_p = comm;
    return DCP_OK;
}
