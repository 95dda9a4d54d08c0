/* Ranks that work together: collectives, messages, windows.
 *
 * Every call is collective over its communicator unless said otherwise: all ranks call
 * it, in the same order, with agreeing arguments. comm.c checks that: each call carries
 * a sequence number, the operation, counts, dtype; a rank that differs makes the call
 * fail on all ranks with ERR_MISMATCH and a message that shows both sides. A dead rank
 * gives ERR_PEER (rank and process id named), a rank that does not come ERR_TIMEOUT
 * (who is missing, operation, sequence number), an abort ERR_ABORTED with the aborter's
 * message. After any of these the whole run is broken: every later call on it and on
 * every communicator split from it returns the same error at once. Where one rank alone
 * lacks memory (split, window_create) all ranks get its error and may go on. A wrong
 * argument (ERR_ARG) is found before peers are told: the rank may call again, rightly.
 * Sums are fp32 (fp64 for fp64, wrapping integers), in rank order: every rank gets
 * bitwise the same. Counts and offsets are 64-bit elements. Waits block (futex), so
 * more ranks than cores work well. One thread per communicator.
 */
#ifndef DCP_COMM_H
#define DCP_COMM_H

#include "dcp/dtype.h"
#include "dcp/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_comm dcp_comm_t;
typedef struct dcp_window dcp_window_t;

typedef struct dcp_comm_options {
    int32_t rank, size; /* 0 <= rank < size */
    const char *run_id; /* names the run: [A-Za-z0-9_.-], at most 64; ranks with the
                           same one meet */
    int64_t timeout_ns; /* deadline of every wait on a peer; <= 0: 600 s */
    int64_t join_timeout_ns; /* deadline of the rendezvous; <= 0: 60 s */
    const char *folder;      /* where ranks meet; NULL: /dev/shm */
} dcp_comm_options_t;

/* Called about every 50 ms by a thread that waits for a peer; true makes its call fail
 * with ERR_INTERRUPT and all others' with ERR_ABORTED. NULL: none. One a process. */
void dcp_comm_set_interrupt(bool (*poll)(void));

/* One rank: no other process is involved. */
dcp_status_t dcp_comm_create_self(dcp_comm_t **comm_p);
/* Ranks of one machine, over shared memory. Meets the others; reclaims what dead runs
 * left. */
dcp_status_t dcp_comm_create_shm(const dcp_comm_options_t *options,
                                 dcp_comm_t **comm_p);
/* Not collective. Peers that still wait see the rank as gone. destroy(NULL) is fine. */
void dcp_comm_destroy(dcp_comm_t *comm);

int32_t dcp_comm_rank(const dcp_comm_t *comm);
int32_t dcp_comm_size(const dcp_comm_t *comm);
const char *dcp_comm_transport(const dcp_comm_t *comm); /* "self", "shm" */

dcp_status_t dcp_comm_barrier(dcp_comm_t *comm);
/* recv [sum counts] gets every rank's counts[r] elements in rank order. counts agree on
 * all ranks.
 */
dcp_status_t dcp_comm_allgatherv(dcp_comm_t *comm, const void *send,
                                 const int64_t *counts, void *recv, dcp_dtype_t dtype);
/* recv [counts[rank]] gets this rank's slice of the sum over ranks of send [sum
 * counts]. */
dcp_status_t dcp_comm_reduce_scatterv(dcp_comm_t *comm, const void *send,
                                      const int64_t *counts, void *recv,
                                      dcp_dtype_t dtype);
typedef enum dcp_reduce_op { DCP_SUM = 0, DCP_MAX = 1, DCP_MIN = 2 } dcp_reduce_op_t;
dcp_status_t dcp_comm_allreduce(dcp_comm_t *comm, const void *send, void *recv,
                                int64_t count, dcp_dtype_t dtype,
                                dcp_reduce_op_t op); /* recv may be send */
/* send holds send_counts[r] elements for rank r, in rank order; recv gets
 * recv_counts[r] from rank r. That recv_counts match the peers' send_counts is checked.
 */
dcp_status_t dcp_comm_alltoallv(dcp_comm_t *comm, const void *send,
                                const int64_t *send_counts, void *recv,
                                const int64_t *recv_counts, dcp_dtype_t dtype);
/* The same for parts that lie anywhere, in any number of pieces: ranges of what goes to
 * a rank are asked for (once or twice), and of what comes from a rank handed over
 * (once). No rank sends to itself: send_counts[rank] = recv_counts[rank] = 0. Reads and
 * writes take turns: what is written must not be what is still to be read. */
typedef struct dcp_comm_parts {
    void (*read)(void *context, int32_t to, int64_t first, int64_t count, void *bytes);
    void (*write)(void *context, int32_t from, int64_t first, int64_t count,
                  const void *bytes);
    void *context;
} dcp_comm_parts_t;
dcp_status_t dcp_comm_alltoall_parts(dcp_comm_t *comm, const dcp_comm_parts_t *parts,
                                     const int64_t *send_counts,
                                     const int64_t *recv_counts, dcp_dtype_t dtype);
dcp_status_t dcp_comm_broadcast(dcp_comm_t *comm, void *data, int64_t count,
                                dcp_dtype_t dtype, int32_t root);

/* Messages between ranks, started together between begin and end (as NCCL groups): no
 * order among them can deadlock. Only the ranks that exchange take part. Messages of
 * one pair match in order.
 */
dcp_status_t dcp_comm_group_begin(dcp_comm_t *comm);
dcp_status_t dcp_comm_send(dcp_comm_t *comm, const void *data, int64_t bytes,
                           int32_t to);
dcp_status_t dcp_comm_recv(dcp_comm_t *comm, void *data, int64_t bytes, int32_t from);
dcp_status_t dcp_comm_group_end(dcp_comm_t *comm);
/* Closes an open group and forgets its messages: for a caller that failed in between.
 */
void dcp_comm_group_cancel(dcp_comm_t *comm);

/* Ranks of equal color (>= 0) form a communicator, ordered by (key, rank). color -1:
 * none, *new_p = NULL. Collective over comm. */
dcp_status_t dcp_comm_split(dcp_comm_t *comm, int32_t color, int32_t key,
                            dcp_comm_t **new_p);

/* Ends the communicator and every one it shares ranks with: all calls on all ranks
 * return ERR_ABORTED with this text. Not collective. */
void dcp_comm_abort(dcp_comm_t *comm, const char *text);

/* What has gone through a communicator on this rank since it was made: collectives,
 * barriers too, and groups of messages (a single one is a group), not splits and
 * windows; only calls that succeeded. A rank alone has no times. */
typedef struct dcp_comm_traffic {
    int64_t call_count;
    int64_t received_bytes; /* of other ranks, data only; reductions: as if each rank
                               summed its slice, an even one in allreduce */
    int64_t wait_ns;        /* until all that take part had come; messages: asleep while
                               a sender had shown nothing */
    int64_t move_ns;        /* the rest of the calls' time */
} dcp_comm_traffic_t;
dcp_comm_traffic_t dcp_comm_traffic(const dcp_comm_t *comm);

/* How long data takes between ranks, as a model says (the network simulator's,
 * sim/link_model.c). All ranks ask for the same transfers of the world in the same
 * order, so each has a model of its own that says the same. */
typedef struct dcp_link_ops {
    /* When a transfer that begins at start_ns (dcp_clock_ns) is done. bytes[from * size
     * + to] between ranks of the world. `shared` 1: every rank of the world asks for
     * this one, and traffic of others reacts to it; 0: only some do, and nothing is
     * changed.
     */
    dcp_status_t (*transfer)(void *context, int64_t start_ns, const int64_t *bytes,
                             int32_t size, int32_t shared, int64_t *end_ns_p);
    void (*destroy)(void *context);
    void *context;
} dcp_link_ops_t;

/* Wraps a communicator: data moves through `inner`, then every call waits until the
 * link says that it is done. No windows: window_create is ERR_UNSUPPORTED. Takes over
 * inner and the link, which go with *comm_p; on failure they stay the caller's.
 * Collective. */
dcp_status_t dcp_comm_create_emulated(dcp_comm_t *inner, const dcp_link_ops_t *link,
                                      dcp_comm_t **comm_p);

/* Memory that peers may read (and, by agreement, write) in place. Each rank brings
 * `bytes` >= 0 of its own, zero-filled, page-aligned; pages take memory when first
 * touched, but are reserved at creation, so that a full memory is an error here and
 * never a fault later. Counted by alloc.h on the rank that brings them. */
dcp_status_t dcp_window_create(dcp_comm_t *comm, int64_t bytes,
                               dcp_window_t **window_p);
void *dcp_window_base(const dcp_window_t *window,
                      int32_t rank); /* NULL where that rank brought 0 */
int64_t dcp_window_bytes(const dcp_window_t *window, int32_t rank);
/* Not collective; the memory goes when the last rank has let go. */
void dcp_window_destroy(dcp_window_t *window);
/* dst[i] = sum over ranks, in rank order, of the fp32 at byte `offset` + 4 i of each
 * rank's part. dst may be this rank's own part of the window at `offset`. Not
 * collective: the caller has fenced with barriers. */
dcp_status_t dcp_window_reduce(const dcp_window_t *window, int64_t offset,
                               int64_t count, float *dst);

#ifdef __cplusplus
}
#endif
#endif
