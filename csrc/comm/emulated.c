/* A communicator whose data takes as long as a model of a link says.
 *
 * Every call tells when it came, moves its data through the inner communicator, asks
 * the model when a transfer that began with the latest rank would be done, and sleeps
 * until then. All ranks of the world compute that from the same numbers, so they agree
 * without another word. Communicators that were split off, and messages, are asked
 * about apart
 * (`shared` 0): they see the traffic of the world's collectives and of background jobs,
 * but not each other, and change nothing for others.
 *
 *   allgatherv       rank r sends its part to every other
 *   reduce_scatterv  slice s goes to rank s
 *   allreduce        both, 1 / W of the data each
 *   alltoallv        the counts, exchanged with the times
 *   broadcast        the root to every other
 *   messages         this rank's own, from when it came
 *
 * Asleep, a rank looks up every 50 ms for aborts, dead peers and interrupts. Windows
 * are memory that is read in place: no link between machines has that. Cost of a call:
 * one small gather of the inner communicator and the model's events. */
#define _GNU_SOURCE
#include "comm_transport.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

enum { LOOK_NS = 50 * 1000 * 1000 };

/* The link, shared by a communicator and those split from it. */
typedef struct emulated_link {
    dcp_link_ops_t ops;
    pthread_mutex_t mutex;
    int64_t users;
    int32_t size;   /* of the world */
    int64_t *bytes; /* [size x size] of the transfer asked about, under the mutex */
} emulated_link_t;

typedef struct emulated_comm {
    dcp_comm_t base;
    dcp_comm_t *inner; /* owned */
    emulated_link_t *link;
    int32_t shared;       /* the world itself */
    int32_t *world_ranks; /* [size] */
    int64_t *words;       /* [size x (1 + size)] when ranks came, and what they send */
    int64_t *word_counts; /* [size] */
} emulated_comm_t;

static const comm_ops_t emulated_ops;

static void
link_release(emulated_link_t *link)
{
    pthread_mutex_lock(&link->mutex);
    int64_t users = --link->users;
    pthread_mutex_unlock(&link->mutex);
    if (users == 0) {
        pthread_mutex_destroy(&link->mutex);
        link->ops.destroy(link->ops.context);
        dcp_free(link->bytes);
        dcp_free(link);
    }
}

static void
emulated_destroy(dcp_comm_t *base)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    dcp_comm_destroy(comm->inner);
    link_release(comm->link);
    dcp_free(comm->world_ranks);
    dcp_free(comm->words);
    dcp_free(comm->word_counts);
    dcp_free(comm);
}

static dcp_status_t
emulated_check(dcp_comm_t *base)
{
    dcp_comm_t *inner = ((emulated_comm_t *)base)->inner;
    if (inner->broken != DCP_OK) {
        dcp_set_last_error(inner->broken_text);
        return inner->broken;
    }
    return inner->ops->check(inner);
}

static void
emulated_abort(dcp_comm_t *base, const char *text)
{
    dcp_comm_abort(((emulated_comm_t *)base)->inner, text);
}

/* Sleeps until end_ns; the run's failures end it early. */
static dcp_status_t
sleep_until(emulated_comm_t *comm, int64_t end_ns)
{
    for (int64_t now_ns = dcp_clock_ns(); now_ns < end_ns; now_ns = dcp_clock_ns()) {
        int64_t look_ns = end_ns - now_ns < LOOK_NS ? end_ns : now_ns + LOOK_NS;
        struct timespec until = {.tv_sec = (time_t)(look_ns / 1000000000),
                                 .tv_nsec = (long)(look_ns % 1000000000)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
        }
        DCP_TRY(emulated_check(&comm->base));
        if (look_ns < end_ns && comm_interrupted()) {
            dcp_comm_abort(comm->inner, "interrupted while data was on the link");
            return DCP_FAIL(DCP_ERR_INTERRUPT,
                            "interrupted while data was on the emulated link");
        }
    }
    return DCP_OK;
}

/* Tells all when this rank came, and `extra` words; words then has everybody's. */
static dcp_status_t
meet(emulated_comm_t *comm, const int64_t *extra, int32_t extra_count,
     int64_t *start_ns_p)
{
    int32_t size = comm->base.size, rank = comm->base.rank, each = 1 + extra_count;
    int64_t came_ns = dcp_clock_ns(), start_ns = came_ns;
    int64_t *own = comm->words + (int64_t)rank * each;
    own[0] = came_ns;
    if (extra_count > 0) {
        memcpy(own + 1, extra, (size_t)extra_count * sizeof(int64_t));
    }
    for (int32_t r = 0; r < size; r++) {
        comm->word_counts[r] = each;
    }
    DCP_TRY(
        dcp_comm_allgatherv(comm->inner, own, comm->word_counts, comm->words, DCP_I64));
    for (int32_t r = 0; r < size; r++) {
        int64_t other_ns = comm->words[(int64_t)r * each];
        start_ns = other_ns > start_ns ? other_ns : start_ns;
    }
    comm->base.wait_ns = start_ns - came_ns; /* data is on the link from then on */
    *start_ns_p = start_ns;
    return DCP_OK;
}

/* Bytes between two ranks of the communicator; 0 between a rank and itself. */
typedef int64_t (*bytes_between_t)(const emulated_comm_t *comm, const void *context,
                                   int32_t from, int32_t to);

static dcp_status_t
wait_for_link(emulated_comm_t *comm, int64_t start_ns, int32_t shared,
              bytes_between_t between, const void *context)
{
    emulated_link_t *link = comm->link;
    int64_t end_ns = start_ns;
    pthread_mutex_lock(&link->mutex);
    memset(link->bytes, 0, (size_t)link->size * (size_t)link->size * sizeof(int64_t));
    for (int32_t from = 0; from < comm->base.size; from++) {
        for (int32_t to = 0; to < comm->base.size; to++) {
            if (from != to) {
                link->bytes[comm->world_ranks[from] * link->size
                            + comm->world_ranks[to]] = between(comm, context, from, to);
            }
        }
    }
    dcp_status_t status = link->ops.transfer(link->ops.context, start_ns, link->bytes,
                                             link->size, shared, &end_ns);
    pthread_mutex_unlock(&link->mutex);
    DCP_TRY(status);
    return sleep_until(comm, end_ns);
}

static int64_t
item_of(const comm_call_t *call)
{
    return dcp_dtype_bytes((dcp_dtype_t)call->dtype);
}

/* What `between` functions need of a call. */
typedef struct call_bytes {
    const int64_t *counts;
    int64_t item, total;
    int32_t root;
} call_bytes_t;

static int64_t
no_bytes(const emulated_comm_t *comm, const void *context, int32_t from, int32_t to)
{
    (void)comm;
    (void)context;
    (void)from;
    (void)to;
    return 0;
}

static int64_t
gathered_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
               int32_t to)
{
    (void)comm;
    (void)to;
    const call_bytes_t *call = context;
    return call->counts[from] * call->item;
}

static int64_t
scattered_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
                int32_t to)
{
    (void)comm;
    (void)from;
    const call_bytes_t *call = context;
    return call->counts[to] * call->item;
}

static int64_t
reduced_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
              int32_t to)
{
    (void)from;
    (void)to;
    const call_bytes_t *call = context;
    return 2 * call->total * call->item / comm->base.size;
}

static int64_t
exchanged_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
                int32_t to)
{
    const call_bytes_t *call = context;
    return comm->words[(int64_t)from * (1 + comm->base.size) + 1 + to] * call->item;
}

static int64_t
broadcast_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
                int32_t to)
{
    (void)comm;
    (void)to;
    const call_bytes_t *call = context;
    return from == call->root ? call->total * call->item : 0;
}

static dcp_status_t
emulated_barrier(dcp_comm_t *base, const comm_call_t *call)
{
    (void)call;
    emulated_comm_t *comm = (emulated_comm_t *)base;
    int64_t start_ns;
    DCP_TRY(meet(comm, NULL, 0, &start_ns));
    DCP_TRY(dcp_comm_barrier(comm->inner));
    return wait_for_link(comm, start_ns, comm->shared, no_bytes, NULL);
}

static dcp_status_t
emulated_allgatherv(dcp_comm_t *base, const comm_call_t *call, const void *send,
                    const int64_t *counts, void *recv)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    call_bytes_t bytes = {.counts = counts, .item = item_of(call)};
    int64_t start_ns;
    DCP_TRY(meet(comm, NULL, 0, &start_ns));
    DCP_TRY(
        dcp_comm_allgatherv(comm->inner, send, counts, recv, (dcp_dtype_t)call->dtype));
    return wait_for_link(comm, start_ns, comm->shared, gathered_bytes, &bytes);
}

static dcp_status_t
emulated_reduce_scatterv(dcp_comm_t *base, const comm_call_t *call, const void *send,
                         const int64_t *counts, void *recv)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    call_bytes_t bytes = {.counts = counts, .item = item_of(call)};
    int64_t start_ns;
    DCP_TRY(meet(comm, NULL, 0, &start_ns));
    DCP_TRY(dcp_comm_reduce_scatterv(comm->inner, send, counts, recv,
                                     (dcp_dtype_t)call->dtype));
    return wait_for_link(comm, start_ns, comm->shared, scattered_bytes, &bytes);
}

static dcp_status_t
emulated_allreduce(dcp_comm_t *base, const comm_call_t *call, const void *send,
                   void *recv)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    call_bytes_t bytes = {.total = call->total, .item = item_of(call)};
    int64_t start_ns;
    DCP_TRY(meet(comm, NULL, 0, &start_ns));
    DCP_TRY(dcp_comm_allreduce(comm->inner, send, recv, call->total,
                               (dcp_dtype_t)call->dtype,
                               (dcp_reduce_op_t)call->detail));
    return wait_for_link(comm, start_ns, comm->shared, reduced_bytes, &bytes);
}

static dcp_status_t
emulated_alltoallv(dcp_comm_t *base, const comm_call_t *call,
                   const comm_exchange_t *exchange)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    dcp_dtype_t dtype = (dcp_dtype_t)call->dtype;
    call_bytes_t bytes = {.item = item_of(call)};
    int64_t start_ns;
    DCP_TRY(meet(comm, exchange->send_counts, base->size, &start_ns));
    DCP_TRY(exchange->parts != NULL
                ? dcp_comm_alltoall_parts(comm->inner, exchange->parts,
                                          exchange->send_counts, exchange->recv_counts,
                                          dtype)
                : dcp_comm_alltoallv(comm->inner, exchange->send, exchange->send_counts,
                                     exchange->recv, exchange->recv_counts, dtype));
    return wait_for_link(comm, start_ns, comm->shared, exchanged_bytes, &bytes);
}

static dcp_status_t
emulated_broadcast(dcp_comm_t *base, const comm_call_t *call, void *data)
{
    emulated_comm_t *comm = (emulated_comm_t *)base;
    call_bytes_t bytes = {
        .total = call->total, .item = item_of(call), .root = call->detail};
    int64_t start_ns;
    DCP_TRY(meet(comm, NULL, 0, &start_ns));
    DCP_TRY(dcp_comm_broadcast(comm->inner, data, call->total, (dcp_dtype_t)call->dtype,
                               call->detail));
    return wait_for_link(comm, start_ns, comm->shared, broadcast_bytes, &bytes);
}

/* A rank's messages. */
typedef struct message_list {
    const comm_message_t *messages;
    int64_t count;
} message_list_t;

static int64_t
message_bytes(const emulated_comm_t *comm, const void *context, int32_t from,
              int32_t to)
{
    const message_list_t *list = context;
    int64_t bytes = 0;
    for (int64_t i = 0; i < list->count; i++) {
        const comm_message_t *message = &list->messages[i];
        int32_t sender = message->is_send ? comm->base.rank : message->peer;
        int32_t receiver = message->is_send ? message->peer : comm->base.rank;
        bytes += sender == from && receiver == to ? message->bytes : 0;
    }
    return bytes;
}

static dcp_status_t
post_messages(emulated_comm_t *comm, comm_message_t *messages, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        comm_message_t *message = &messages[i];
        if (message->peer == comm->base.rank) {
            continue; /* comm.c has moved it */
        }
        DCP_TRY(message->is_send ? dcp_comm_send(comm->inner, message->data,
                                                 message->bytes, message->peer)
                                 : dcp_comm_recv(comm->inner, message->data,
                                                 message->bytes, message->peer));
    }
    return DCP_OK;
}

static dcp_status_t
emulated_exchange(dcp_comm_t *base, const comm_call_t *call, comm_message_t *messages,
                  int64_t message_count)
{
    (void)call;
    emulated_comm_t *comm = (emulated_comm_t *)base;
    message_list_t list = {messages, message_count};
    int64_t start_ns = dcp_clock_ns();
    DCP_TRY(dcp_comm_group_begin(comm->inner));
    dcp_status_t status = post_messages(comm, messages, message_count);
    if (status != DCP_OK) {
        dcp_comm_group_cancel(comm->inner);
        return status;
    }
    DCP_TRY(dcp_comm_group_end(comm->inner));
    return wait_for_link(comm, start_ns, 0, message_bytes, &list);
}

static dcp_status_t
wrap(dcp_comm_t *inner, emulated_link_t *link, int32_t shared, emulated_comm_t **comm_p)
{
    void *memory;
    int64_t size = inner->size, word = (int64_t)sizeof(int64_t);
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(emulated_comm_t), "emulated communicator",
                             &memory));
    emulated_comm_t *comm = memory;
    comm->base =
        (dcp_comm_t){.ops = &emulated_ops, .rank = inner->rank, .size = inner->size};
    comm->link = link;
    comm->shared = shared;
    dcp_status_t status = dcp_alloc_zeroed(size * 4, "ranks of the world", &memory);
    if (status == DCP_OK) {
        comm->world_ranks = memory;
        status = dcp_alloc_zeroed(size * (1 + size) * word, "words of ranks", &memory);
    }
    if (status == DCP_OK) {
        comm->words = memory;
        status = dcp_alloc_zeroed(size * word, "word counts", &memory);
    }
    if (status != DCP_OK) {
        dcp_free(comm->world_ranks);
        dcp_free(comm->words);
        dcp_free(comm);
        return status;
    }
    comm->word_counts = memory;
    comm->inner = inner;
    *comm_p = comm;
    return DCP_OK;
}

/* Who is who in the world: a child's members tell each other. */
static dcp_status_t
name_ranks(emulated_comm_t *child, int32_t world_rank)
{
    for (int32_t r = 0; r < child->base.size; r++) {
        child->word_counts[r] = 1;
    }
    child->world_ranks[child->base.rank] = world_rank;
    return dcp_comm_allgatherv(child->inner, &child->world_ranks[child->base.rank],
                               child->word_counts, child->world_ranks, DCP_I32);
}

static dcp_status_t
emulated_split(dcp_comm_t *base, const comm_call_t *call, int32_t color, int32_t key,
               dcp_comm_t **new_p)
{
    (void)call;
    emulated_comm_t *comm = (emulated_comm_t *)base, *child;
    dcp_comm_t *inner;
    DCP_TRY(dcp_comm_split(comm->inner, color, key, &inner));
    *new_p = NULL;
    if (inner == NULL) {
        return DCP_OK;
    }
    dcp_status_t status = wrap(inner, comm->link, 0, &child);
    if (status != DCP_OK) {
        dcp_comm_abort(inner, dcp_last_error());
        dcp_comm_destroy(inner);
        return status;
    }
    pthread_mutex_lock(&comm->link->mutex);
    comm->link->users++;
    pthread_mutex_unlock(&comm->link->mutex);
    status = name_ranks(child, comm->world_ranks[base->rank]);
    if (status != DCP_OK) {
        emulated_destroy(&child->base);
        return status;
    }
    *new_p = &child->base;
    return DCP_OK;
}

static dcp_status_t
emulated_window_create(dcp_comm_t *base, const comm_call_t *call, int64_t bytes,
                       dcp_window_t **window_p)
{
    (void)base;
    (void)call;
    (void)bytes;
    (void)window_p;
    return DCP_FAIL(DCP_ERR_UNSUPPORTED,
                    "ranks on an emulated link share no memory: there are no windows "
                    "(windows=False, plan.windows=false)");
}

static void
emulated_window_destroy(dcp_window_t *window)
{
    (void)window; /* there are none */
}

static const comm_ops_t emulated_ops = {
    .name = "emulated",
    .destroy = emulated_destroy,
    .check = emulated_check,
    .abort = emulated_abort,
    .barrier = emulated_barrier,
    .allgatherv = emulated_allgatherv,
    .reduce_scatterv = emulated_reduce_scatterv,
    .allreduce = emulated_allreduce,
    .alltoallv = emulated_alltoallv,
    .broadcast = emulated_broadcast,
    .exchange = emulated_exchange,
    .split = emulated_split,
    .window_create = emulated_window_create,
    .window_destroy = emulated_window_destroy,
};

static dcp_status_t
make_link(const dcp_link_ops_t *ops, int32_t size, emulated_link_t **link_p)
{
    void *memory;
    DCP_TRY(
        dcp_alloc_zeroed((int64_t)sizeof(emulated_link_t), "emulated link", &memory));
    emulated_link_t *link = memory;
    dcp_status_t status =
        dcp_alloc_zeroed((int64_t)size * size * (int64_t)sizeof(int64_t),
                         "bytes between ranks", &memory);
    if (status != DCP_OK) {
        dcp_free(link);
        return status;
    }
    link->bytes = memory;
    link->ops = *ops;
    link->size = size;
    link->users = 1;
    pthread_mutex_init(&link->mutex, NULL);
    *link_p = link;
    return DCP_OK;
}

dcp_status_t
dcp_comm_create_emulated(dcp_comm_t *inner, const dcp_link_ops_t *link,
                         dcp_comm_t **comm_p)
{
    if (inner == NULL || link == NULL || link->transfer == NULL
        || link->destroy == NULL) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "inner and link, with both its functions, must not "
                        "be NULL");
    }
    emulated_link_t *shared;
    emulated_comm_t *comm;
    DCP_TRY(make_link(link, inner->size, &shared));
    dcp_status_t status = wrap(inner, shared, 1, &comm);
    if (status != DCP_OK) {
        pthread_mutex_destroy(&shared->mutex);
        dcp_free(shared->bytes);
        dcp_free(shared);
        return status;
    }
    for (int32_t r = 0; r < inner->size; r++) {
        comm->world_ranks[r] = r;
    }
    *comm_p = &comm->base;
    return DCP_OK;
}
