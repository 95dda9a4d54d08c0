/* Messages between two ranks: one ring of bytes per pair and direction.
 *
 *   head: bytes written so far        tail: bytes read so far        (both only grow)
 *   | size of message 0 | bytes, padded to 16 | size of message 1 | ...
 *
 * All sends and receives of a group advance side by side, each as far as its ring
 * allows; only when none can move does the rank sleep. So no order among them can
 * deadlock, and a message may be larger than its ring. The ring is memory of the
 * receiver, made when it first expects something from that sender: a sender may go
 * away as soon as its bytes are in the ring. Cost: two copies through a ring that stays
 * in cache, no memory for pairs that never talk. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RING_BYTES = 512 * 1024, UNIT_BYTES = 16, STEP_BYTES = 128 * 1024 };

typedef struct exchange {
    shm_comm_t *comm;
    comm_message_t *messages;
    int64_t count;
} exchange_t;

static shm_channel_t *
channel_of(const shm_comm_t *comm, int32_t from, int32_t to)
{
    return &comm->channels[(int64_t)from * comm->base.size + to];
}

static int64_t
padded(int64_t bytes)
{
    return (bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
}

/* Only the first unfinished message of a pair and direction may move. Starts a walk
 * over the messages: stamps of earlier walks no longer count. */
static bool
is_turn(const exchange_t *x, const comm_message_t *message)
{
    uint64_t *stamp =
        &x->comm->stamps[message->is_send * x->comm->base.size + message->peer];
    bool first = *stamp != x->comm->stamp;
    *stamp = x->comm->stamp;
    return first;
}

/* Copies between a ring and memory, around the end of the ring. */
static void
copy_ring(char *ring, uint64_t position, char *data, int64_t bytes, bool is_send)
{
    while (bytes > 0) {
        int64_t at = (int64_t)(position % RING_BYTES);
        int64_t n = RING_BYTES - at < bytes ? RING_BYTES - at : bytes;
        if (is_send) {
            memcpy(ring + at, data, (size_t)n);
        } else {
            memcpy(data, ring + at, (size_t)n);
        }
        data += n;
        position += (uint64_t)n;
        bytes -= n;
    }
}

static dcp_status_t
open_ring_in(shm_comm_t *comm, int32_t from)
{
    shm_map_t *map;
    int fd;
    DCP_TRY(shm_map_create(RING_BYTES, RING_BYTES, "message ring", &fd, &map));
    comm->rings_in[from] = map;
    comm->ring_fds[from] = fd;
    atomic_store(&channel_of(comm, from, comm->base.rank)->ring_fd, fd + 1);
    shm_ring(comm->root, comm->members[from]);
    return DCP_OK;
}

/* Bytes that the message can move now: room in the ring, or bytes that came. */
static int64_t
movable(const shm_comm_t *comm, const comm_message_t *message)
{
    int32_t rank = comm->base.rank, peer = message->peer;
    shm_channel_t *channel =
        message->is_send ? channel_of(comm, rank, peer) : channel_of(comm, peer, rank);
    uint64_t used = atomic_load(&channel->head) - atomic_load(&channel->tail);
    if (!message->is_send) {
        return (int64_t)used;
    }
    return atomic_load(&channel->ring_fd) != 0 ? RING_BYTES - (int64_t)used : 0;
}

/* Reads or writes the head of a message: its size. */
static dcp_status_t
move_head(shm_comm_t *comm, comm_message_t *message, char *ring, uint64_t position)
{
    int64_t head[2] = {message->bytes, 0};
    copy_ring(ring, position, (char *)head, UNIT_BYTES, message->is_send);
    if (head[0] != message->bytes) {
        char text[COMM_TEXT_BYTES];
        snprintf(text, sizeof text,
                 "rank %d sent %" PRId64 " bytes to rank %d, which expected %" PRId64,
                 (int)comm->members[message->peer], head[0],
                 (int)comm->members[comm->base.rank], message->bytes);
        shm_fail(comm->root, DCP_ERR_MISMATCH, text);
        return DCP_FAIL(DCP_ERR_MISMATCH, "%s", text);
    }
    message->done = 0;
    return DCP_OK;
}

/* Moves what can be moved, at most one step. */
static dcp_status_t
advance(shm_comm_t *comm, comm_message_t *message, bool *moved_p)
{
    int32_t rank = comm->base.rank, peer = message->peer;
    bool is_send = message->is_send;
    if (!is_send && comm->rings_in[peer] == NULL) {
        DCP_TRY(open_ring_in(comm, peer));
    }
    shm_channel_t *channel =
        is_send ? channel_of(comm, rank, peer) : channel_of(comm, peer, rank);
    if (is_send && comm->rings_out[peer] == NULL) {
        int32_t fd = atomic_load(&channel->ring_fd);
        if (fd == 0) {
            return DCP_OK;
        }
        int32_t pid = comm->root->segment->slots[comm->members[peer]].pid;
        DCP_TRY(shm_map_peer(pid, fd - 1, RING_BYTES, "message ring",
                             &comm->rings_out[peer]));
    }
    char *ring = is_send ? comm->rings_out[peer]->base : comm->rings_in[peer]->base;
    _Atomic uint64_t *own = is_send ? &channel->head : &channel->tail;
    uint64_t position = atomic_load_explicit(own, memory_order_relaxed);
    int64_t room = movable(comm, message);
    int64_t moved = 0;
    if (message->done < 0 && room >= UNIT_BYTES) {
        DCP_TRY(move_head(comm, message, ring, position));
        moved = UNIT_BYTES;
    }
    if (message->done >= 0) {
        int64_t left = padded(message->bytes) - message->done;
        int64_t n = room - moved < left ? room - moved : left;
        n = n < STEP_BYTES ? n : STEP_BYTES;
        int64_t real =
            message->bytes - message->done < n ? message->bytes - message->done : n;
        if (real > 0) {
            copy_ring(ring, position + (uint64_t)moved, message->data + message->done,
                      real, is_send);
        }
        moved += n;
        message->done += n;
        message->finished = message->done == padded(message->bytes);
    }
    if (moved > 0) {
        atomic_store(own, position + (uint64_t)moved);
        shm_ring(comm->root, comm->members[peer]);
        *moved_p = true;
    }
    return DCP_OK;
}

/* Can any message move? For the wait. */
static bool
exchange_ready(void *context)
{
    exchange_t *x = context;
    x->comm->stamp++;
    for (int64_t i = 0; i < x->count; i++) {
        const comm_message_t *message = &x->messages[i];
        if (!message->finished && is_turn(x, message)
            && movable(x->comm, message) > 0) {
            return true;
        }
    }
    return false;
}

static bool
exchange_awaits(void *context, int32_t rank)
{
    exchange_t *x = context;
    for (int64_t i = 0; i < x->count; i++) {
        if (!x->messages[i].finished && x->messages[i].peer == rank) {
            return true;
        }
    }
    return false;
}

/* Has a sender shown nothing of its message yet? */
static bool
awaits_head(exchange_t *x)
{
    x->comm->stamp++;
    for (int64_t i = 0; i < x->count; i++) {
        const comm_message_t *message = &x->messages[i];
        if (!message->finished && is_turn(x, message) && !message->is_send
            && message->done < 0) {
            return true;
        }
    }
    return false;
}

dcp_status_t
shm_exchange(dcp_comm_t *base, const comm_call_t *call, comm_message_t *messages,
             int64_t message_count)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    exchange_t x = {comm, messages, message_count};
    comm->call = call;
    for (;;) {
        bool moved = false, finished = true;
        comm->stamp++;
        for (int64_t i = 0; i < message_count; i++) {
            if (messages[i].finished || !is_turn(&x, &messages[i])) {
                finished = finished && messages[i].finished;
                continue;
            }
            dcp_status_t status = advance(comm, &messages[i], &moved);
            if (status != DCP_OK) {
                char text[COMM_TEXT_BYTES];
                snprintf(text, sizeof text, "%s", dcp_last_error());
                shm_fail(comm->root, status, text); /* peers wait for this rank */
                dcp_set_last_error(text);
                return status;
            }
            finished = finished && messages[i].finished;
        }
        if (finished) {
            return DCP_OK;
        }
        if (!moved) {
            shm_waiting_t waiting = {exchange_ready, exchange_awaits, &x};
            bool absent = awaits_head(&x);
            int64_t start = absent ? dcp_clock_ns() : 0;
            DCP_TRY(shm_wait(comm, &waiting, comm->root->timeout_ns));
            base->wait_ns += absent ? dcp_clock_ns() - start : 0;
        }
    }
}

void
shm_message_fini(shm_comm_t *comm)
{
    for (int32_t r = 0; r < comm->base.size; r++) {
        shm_map_release(comm->rings_in[r]);
        shm_map_release(comm->rings_out[r]);
        if (comm->ring_fds[r] >= 0) {
            close(comm->ring_fds[r]);
        }
    }
}
