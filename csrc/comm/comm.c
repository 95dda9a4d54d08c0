/* The public calls: checks, sequence numbers, the first fatal error, dispatch.
 *
 * Every call goes: not NULL, run not failed, arguments (ERR_ARG without telling peers),
 * descriptor, transport. A fatal status (dead, missing or disagreeing rank, abort,
 * interrupt) stays with the communicator: later calls return it with the same message
 * at once. Memory that a call reads and memory that it writes may overlap only where
 * the header says so; everything else is refused here, so that transports may copy in
 * any order. Cost: well under a microsecond a call, the traffic counters' two looks at
 * the clock included (and two more where a transport waits). */
#include "comm_transport.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static _Atomic(bool (*)(void)) interrupt_poll;

void
dcp_comm_set_interrupt(bool (*poll)(void))
{
    atomic_store(&interrupt_poll, poll);
}

bool
comm_interrupted(void)
{
    bool (*poll)(void) = atomic_load(&interrupt_poll);
    return poll != NULL && poll();
}

void
dcp_comm_destroy(dcp_comm_t *comm)
{
    if (comm == NULL) {
        return;
    }
    dcp_free(comm->messages);
    comm->ops->destroy(comm);
}

int32_t
dcp_comm_rank(const dcp_comm_t *comm)
{
    return comm->rank;
}

int32_t
dcp_comm_size(const dcp_comm_t *comm)
{
    return comm->size;
}

const char *
dcp_comm_transport(const dcp_comm_t *comm)
{
    return comm->ops->name;
}

/* Keeps a fatal status for all later calls. */
static dcp_status_t
finish(dcp_comm_t *comm, dcp_status_t status)
{
    switch (status) {
    case DCP_ERR_PEER:
    case DCP_ERR_TIMEOUT:
    case DCP_ERR_MISMATCH:
    case DCP_ERR_ABORTED:
    case DCP_ERR_INTERRUPT:
        comm->broken = status;
        snprintf(comm->broken_text, sizeof comm->broken_text, "%s", dcp_last_error());
        break;
    default:
        break;
    }
    return status;
}

/* May a call begin? */
static dcp_status_t
begin(dcp_comm_t *comm, bool in_group)
{
    if (comm == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "comm must not be NULL");
    }
    if (comm->broken != DCP_OK) {
        dcp_set_last_error(comm->broken_text);
        return comm->broken;
    }
    if (comm->grouping && !in_group) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "a group of messages is open: only send, recv and group_end "
                        "are allowed until it ends");
    }
    return finish(comm, comm->ops->check(comm));
}

/* When the transport's part of a call begins; a rank alone waits for nobody. */
static int64_t
start_clock(dcp_comm_t *comm)
{
    comm->wait_ns = 0;
    return comm->size > 1 ? dcp_clock_ns() : 0;
}

/* Ends a call that began at start_ns and brought `received_bytes` of others. */
static dcp_status_t
finish_counted(dcp_comm_t *comm, int64_t start_ns, int64_t received_bytes,
               dcp_status_t status)
{
    if (status == DCP_OK) {
        int64_t all_ns = comm->size > 1 ? dcp_clock_ns() - start_ns : 0;
        comm->traffic.call_count++;
        comm->traffic.received_bytes += received_bytes;
        comm->traffic.wait_ns += comm->wait_ns;
        comm->traffic.move_ns += all_ns - comm->wait_ns;
    }
    return finish(comm, status);
}

dcp_comm_traffic_t
dcp_comm_traffic(const dcp_comm_t *comm)
{
    return comm->traffic;
}

static comm_call_t
new_call(dcp_comm_t *comm, comm_op_t op)
{
    comm_call_t call = {
        .sequence = ++comm->sequence, .op = (int32_t)op, .dtype = -1, .total = -1};
    return call;
}

static dcp_status_t
check_dtype(dcp_dtype_t dtype)
{
    if (dcp_dtype_bytes(dtype) == 0) {
        return DCP_FAIL(DCP_ERR_ARG, "dtype %d is none of dcp_dtype_t", (int)dtype);
    }
    return DCP_OK;
}

/* Sum of counts, which must be >= 0 and fit 62 bits in bytes. */
static dcp_status_t
check_counts(const char *what, const int64_t *counts, int32_t size, dcp_dtype_t dtype,
             int64_t *total_p)
{
    DCP_TRY(check_dtype(dtype));
    if (counts == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "%s must not be NULL", what);
    }
    int64_t room = INT64_MAX / 2 / dcp_dtype_bytes(dtype);
    int64_t total = 0;
    for (int32_t i = 0; i < size; i++) {
        if (counts[i] < 0) {
            return DCP_FAIL(DCP_ERR_ARG, "%s[%d] = %" PRId64 " must not be negative",
                            what, (int)i, counts[i]);
        }
        if (counts[i] > room - total) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "%s[%d] = %" PRId64 ": the sum of bytes overflows", what,
                            (int)i, counts[i]);
        }
        total += counts[i];
    }
    *total_p = total;
    return DCP_OK;
}

static dcp_status_t
check_pointer(const char *what, const void *pointer, int64_t count)
{
    if (pointer == NULL && count > 0) {
        return DCP_FAIL(DCP_ERR_ARG, "%s is NULL, but %" PRId64 " elements are needed",
                        what, count);
    }
    return DCP_OK;
}

/* recv must not touch send, except that it may be exactly `allowed`. */
static dcp_status_t
check_overlap(const void *send, int64_t send_bytes, const void *recv,
              int64_t recv_bytes, const char *allowed, const char *allowed_text)
{
    const char *s = send, *r = recv;
    bool apart = send_bytes == 0 || recv_bytes == 0 || s + send_bytes <= r
                 || r + recv_bytes <= s;
    if (!apart && r != allowed) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "recv (%" PRId64 " bytes) overlaps send (%" PRId64
                        " bytes): they must lie apart%s",
                        recv_bytes, send_bytes, allowed_text);
    }
    return DCP_OK;
}

static int64_t
sum_before(const int64_t *counts, int32_t rank)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < rank; i++) {
        sum += counts[i];
    }
    return sum;
}

dcp_status_t
dcp_comm_barrier(dcp_comm_t *comm)
{
    DCP_TRY(begin(comm, false));
    comm_call_t call = new_call(comm, COMM_BARRIER);
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, 0, comm->ops->barrier(comm, &call));
}

dcp_status_t
dcp_comm_allgatherv(dcp_comm_t *comm, const void *send, const int64_t *counts,
                    void *recv, dcp_dtype_t dtype)
{
    DCP_TRY(begin(comm, false));
    int64_t total;
    DCP_TRY(check_counts("counts", counts, comm->size, dtype, &total));
    int64_t item = dcp_dtype_bytes(dtype);
    DCP_TRY(check_pointer("send", send, counts[comm->rank]));
    DCP_TRY(check_pointer("recv", recv, total));
    if (total > 0) {
        /* in place: send is this rank's part of recv */
        char *own = (char *)recv + sum_before(counts, comm->rank) * item;
        if (send != own) {
            DCP_TRY(check_overlap(send, counts[comm->rank] * item, recv, total * item,
                                  NULL, ", or send be this rank's part of recv"));
        }
    }
    comm_call_t call = new_call(comm, COMM_ALLGATHERV);
    call.dtype = (int32_t)dtype;
    call.total = total;
    comm_call_set_counts(&call, counts, comm->size);
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, (total - counts[comm->rank]) * item,
                          comm->ops->allgatherv(comm, &call, send, counts, recv));
}

dcp_status_t
dcp_comm_reduce_scatterv(dcp_comm_t *comm, const void *send, const int64_t *counts,
                         void *recv, dcp_dtype_t dtype)
{
    DCP_TRY(begin(comm, false));
    int64_t total;
    DCP_TRY(check_counts("counts", counts, comm->size, dtype, &total));
    int64_t item = dcp_dtype_bytes(dtype);
    DCP_TRY(check_pointer("send", send, total));
    DCP_TRY(check_pointer("recv", recv, counts[comm->rank]));
    if (total > 0) {
        const char *own = (const char *)send + sum_before(counts, comm->rank) * item;
        DCP_TRY(check_overlap(send, total * item, recv, counts[comm->rank] * item, own,
                              ", or recv be this rank's slice of send"));
    }
    comm_call_t call = new_call(comm, COMM_REDUCE_SCATTERV);
    call.dtype = (int32_t)dtype;
    call.total = total;
    comm_call_set_counts(&call, counts, comm->size);
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, counts[comm->rank] * item * (comm->size - 1),
                          comm->ops->reduce_scatterv(comm, &call, send, counts, recv));
}

dcp_status_t
dcp_comm_allreduce(dcp_comm_t *comm, const void *send, void *recv, int64_t count,
                   dcp_dtype_t dtype, dcp_reduce_op_t op)
{
    DCP_TRY(begin(comm, false));
    int64_t total;
    DCP_TRY(check_counts("count", &count, 1, dtype, &total));
    if ((int)op < 0 || (int)op > (int)DCP_MIN) {
        return DCP_FAIL(DCP_ERR_ARG, "op %d is none of dcp_reduce_op_t", (int)op);
    }
    DCP_TRY(check_pointer("send", send, count));
    DCP_TRY(check_pointer("recv", recv, count));
    int64_t bytes = count * dcp_dtype_bytes(dtype);
    DCP_TRY(check_overlap(send, bytes, recv, bytes, send, ", or be the same"));
    comm_call_t call = new_call(comm, COMM_ALLREDUCE);
    call.dtype = (int32_t)dtype;
    call.total = count;
    call.detail = (int32_t)op;
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, 2 * bytes / comm->size * (comm->size - 1),
                          comm->ops->allreduce(comm, &call, send, recv));
}

dcp_status_t
dcp_comm_alltoallv(dcp_comm_t *comm, const void *send, const int64_t *send_counts,
                   void *recv, const int64_t *recv_counts, dcp_dtype_t dtype)
{
    DCP_TRY(begin(comm, false));
    int64_t send_total, recv_total;
    DCP_TRY(check_counts("send_counts", send_counts, comm->size, dtype, &send_total));
    DCP_TRY(check_counts("recv_counts", recv_counts, comm->size, dtype, &recv_total));
    DCP_TRY(check_pointer("send", send, send_total));
    DCP_TRY(check_pointer("recv", recv, recv_total));
    if (send_counts[comm->rank] != recv_counts[comm->rank]) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "send_counts[%d] = %" PRId64 " and recv_counts[%d] = %" PRId64
                        " must be equal on rank %d itself",
                        (int)comm->rank, send_counts[comm->rank], (int)comm->rank,
                        recv_counts[comm->rank], (int)comm->rank);
    }
    int64_t item = dcp_dtype_bytes(dtype);
    DCP_TRY(check_overlap(send, send_total * item, recv, recv_total * item, NULL, ""));
    comm_call_t call = new_call(comm, COMM_ALLTOALLV);
    call.dtype = (int32_t)dtype;
    comm_exchange_t exchange = {send, recv, send_counts, recv_counts, NULL};
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, (recv_total - recv_counts[comm->rank]) * item,
                          comm->ops->alltoallv(comm, &call, &exchange));
}

dcp_status_t
dcp_comm_alltoall_parts(dcp_comm_t *comm, const dcp_comm_parts_t *parts,
                        const int64_t *send_counts, const int64_t *recv_counts,
                        dcp_dtype_t dtype)
{
    DCP_TRY(begin(comm, false));
    int64_t total;
    DCP_TRY(check_counts("send_counts", send_counts, comm->size, dtype, &total));
    DCP_TRY(check_counts("recv_counts", recv_counts, comm->size, dtype, &total));
    int32_t rank = comm->rank;
    if (send_counts[rank] != 0 || recv_counts[rank] != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "send_counts[%d] = %" PRId64 " and recv_counts[%d] = %" PRId64
                        " must be 0 on rank %d itself",
                        (int)rank, send_counts[rank], (int)rank, recv_counts[rank],
                        (int)rank);
    }
    comm_call_t call = new_call(comm, COMM_ALLTOALLV);
    call.dtype = (int32_t)dtype;
    comm_exchange_t exchange = {NULL, NULL, send_counts, recv_counts, parts};
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, total * dcp_dtype_bytes(dtype),
                          comm->ops->alltoallv(comm, &call, &exchange));
}

dcp_status_t
dcp_comm_broadcast(dcp_comm_t *comm, void *data, int64_t count, dcp_dtype_t dtype,
                   int32_t root)
{
    DCP_TRY(begin(comm, false));
    int64_t total;
    DCP_TRY(check_counts("count", &count, 1, dtype, &total));
    if (root < 0 || root >= comm->size) {
        return DCP_FAIL(DCP_ERR_ARG, "root %d must lie in 0..%d", (int)root,
                        (int)comm->size - 1);
    }
    DCP_TRY(check_pointer("data", data, count));
    comm_call_t call = new_call(comm, COMM_BROADCAST);
    call.dtype = (int32_t)dtype;
    call.total = count;
    call.detail = root;
    int64_t bytes = comm->rank != root ? count * dcp_dtype_bytes(dtype) : 0;
    int64_t start = start_clock(comm);
    return finish_counted(comm, start, bytes, comm->ops->broadcast(comm, &call, data));
}

dcp_status_t
dcp_comm_group_begin(dcp_comm_t *comm)
{
    DCP_TRY(begin(comm, false));
    comm->grouping = true;
    comm->message_count = 0;
    return DCP_OK;
}

/* Adds a message to the open group. */
static dcp_status_t
add_message(dcp_comm_t *comm, const comm_message_t *message)
{
    if (comm->message_count == comm->message_room) {
        int64_t room = comm->message_room == 0 ? 16 : 2 * comm->message_room;
        void *memory;
        DCP_TRY(dcp_alloc_array(room, (int64_t)sizeof(comm_message_t),
                                "messages of a group", &memory));
        if (comm->message_count > 0) {
            memcpy(memory, comm->messages,
                   (size_t)comm->message_count * sizeof(comm_message_t));
        }
        dcp_free(comm->messages);
        comm->messages = memory;
        comm->message_room = room;
    }
    comm->messages[comm->message_count++] = *message;
    return DCP_OK;
}

/* The next message of this rank to itself from `i` on, of the given direction. */
static int64_t
next_own(const dcp_comm_t *comm, int64_t i, bool is_send)
{
    while (i < comm->message_count
           && (comm->messages[i].peer != comm->rank
               || comm->messages[i].is_send != is_send)) {
        i++;
    }
    return i;
}

/* Messages of a rank to itself: the k-th send goes to the k-th receive. */
static dcp_status_t
run_own_messages(dcp_comm_t *comm)
{
    int64_t send = next_own(comm, 0, true), recv = next_own(comm, 0, false);
    while (send < comm->message_count || recv < comm->message_count) {
        if (send == comm->message_count || recv == comm->message_count) {
            return DCP_FAIL(
                DCP_ERR_STATE, "a %s between rank %d and itself has no %s in its group",
                send == comm->message_count ? "receive" : "send", (int)comm->rank,
                send == comm->message_count ? "send" : "receive");
        }
        comm_message_t *from = &comm->messages[send], *to = &comm->messages[recv];
        if (from->bytes != to->bytes) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "rank %d sends %" PRId64
                            " bytes to itself, but expects %" PRId64,
                            (int)comm->rank, from->bytes, to->bytes);
        }
        if (from->bytes > 0) {
            memmove(to->data, from->data, (size_t)from->bytes);
        }
        from->finished = to->finished = true;
        send = next_own(comm, send + 1, true);
        recv = next_own(comm, recv + 1, false);
    }
    return DCP_OK;
}

/* Runs the messages of the group and closes it. */
static dcp_status_t
run_messages(dcp_comm_t *comm)
{
    comm->grouping = false;
    DCP_TRY(run_own_messages(comm));
    comm_call_t call = {
        .sequence = comm->sequence, .op = COMM_MESSAGES, .dtype = -1, .total = -1};
    int64_t bytes = 0;
    for (int64_t i = 0; i < comm->message_count; i++) {
        const comm_message_t *message = &comm->messages[i];
        bytes += message->is_send || message->peer == comm->rank ? 0 : message->bytes;
    }
    int64_t start = start_clock(comm);
    return finish_counted(
        comm, start, bytes,
        comm->ops->exchange(comm, &call, comm->messages, comm->message_count));
}

static dcp_status_t
post(dcp_comm_t *comm, char *data, int64_t bytes, int32_t peer, bool is_send)
{
    DCP_TRY(begin(comm, true));
    if (peer < 0 || peer >= comm->size) {
        return DCP_FAIL(DCP_ERR_ARG, "%s %d must lie in 0..%d", is_send ? "to" : "from",
                        (int)peer, (int)comm->size - 1);
    }
    if (bytes < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "bytes %" PRId64 " must not be negative", bytes);
    }
    DCP_TRY(check_pointer("data", data, bytes));
    comm_message_t message = {
        .data = data, .bytes = bytes, .done = -1, .peer = peer, .is_send = is_send};
    if (comm->grouping) {
        return add_message(comm, &message);
    }
    comm->message_count = 0;
    DCP_TRY(add_message(comm, &message));
    return run_messages(comm);
}

dcp_status_t
dcp_comm_send(dcp_comm_t *comm, const void *data, int64_t bytes, int32_t to)
{
    return post(comm, (char *)(uintptr_t)data, bytes, to, true);
}

dcp_status_t
dcp_comm_recv(dcp_comm_t *comm, void *data, int64_t bytes, int32_t from)
{
    return post(comm, data, bytes, from, false);
}

dcp_status_t
dcp_comm_group_end(dcp_comm_t *comm)
{
    DCP_TRY(begin(comm, true));
    if (!comm->grouping) {
        return DCP_FAIL(DCP_ERR_STATE, "group_end without group_begin");
    }
    return run_messages(comm);
}

void
dcp_comm_group_cancel(dcp_comm_t *comm)
{
    comm->grouping = false;
    comm->message_count = 0;
}

dcp_status_t
dcp_comm_split(dcp_comm_t *comm, int32_t color, int32_t key, dcp_comm_t **new_p)
{
    DCP_TRY(begin(comm, false));
    if (color < -1) {
        return DCP_FAIL(DCP_ERR_ARG, "color %d must be >= 0, or -1 for none",
                        (int)color);
    }
    comm_call_t call = new_call(comm, COMM_SPLIT);
    return finish(comm, comm->ops->split(comm, &call, color, key, new_p));
}

void
dcp_comm_abort(dcp_comm_t *comm, const char *text)
{
    if (comm != NULL) {
        comm->ops->abort(comm, text != NULL ? text : "no reason given");
    }
}

dcp_status_t
dcp_window_create(dcp_comm_t *comm, int64_t bytes, dcp_window_t **window_p)
{
    DCP_TRY(begin(comm, false));
    if (bytes < 0 || bytes > INT64_MAX / 4) {
        return DCP_FAIL(DCP_ERR_ARG, "bytes %" PRId64 " must lie in 0..2^61", bytes);
    }
    comm_call_t call = new_call(comm, COMM_WINDOW);
    return finish(comm, comm->ops->window_create(comm, &call, bytes, window_p));
}
