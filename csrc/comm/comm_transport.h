/* What comm.c and the transports share; private to this folder.
 *
 * comm.c checks arguments, numbers the calls and keeps the first fatal error; a
 * transport moves bytes. Every collective carries a comm_call_t, which the transport
 * brings to all ranks in its opening round and compares there (comm_call_compare), so
 * that agreement costs no extra round.
 */
#ifndef COMM_TRANSPORT_H
#define COMM_TRANSPORT_H

#include "dcp/comm.h"

#include <stdbool.h>
#include <stdint.h>

enum { COMM_TEXT_BYTES = 640, COMM_CALL_COUNTS = 5 };

typedef enum comm_op {
    COMM_JOIN = 0,
    COMM_BARRIER = 1,
    COMM_ALLGATHERV = 2,
    COMM_REDUCE_SCATTERV = 3,
    COMM_ALLREDUCE = 4,
    COMM_ALLTOALLV = 5,
    COMM_BROADCAST = 6,
    COMM_SPLIT = 7,
    COMM_WINDOW = 8,
    COMM_MESSAGES = 9, /* not collective: never compared */
} comm_op_t;

/* What ranks must agree on. Lives in shared memory: plain data, fixed width. */
typedef struct comm_call {
    int64_t sequence;     /* number of the call on its communicator, from 1 */
    int32_t op;           /* comm_op_t */
    int32_t dtype;        /* dcp_dtype_t, -1: none */
    int32_t detail;       /* reduce op or root */
    int32_t counts_known; /* of counts: how many lead the message, 0: only total */
    int64_t total;        /* elements, -1: ranks may differ */
    uint64_t hash;        /* of all counts */
    int64_t counts[COMM_CALL_COUNTS];
} comm_call_t;

/* A message between begin and end. */
typedef struct comm_message {
    char *data;    /* borrowed; never written where is_send */
    int64_t bytes; /* of data */
    int64_t done;  /* bytes moved; -1: header not yet */
    int32_t peer;  /* rank in the communicator */
    bool is_send;  /* else receive */
    bool finished; /* all moved */
} comm_message_t;

/* Both sides of an alltoallv: arrays, or parts where these are given. */
typedef struct comm_exchange {
    const void *send;
    void *recv;
    const int64_t *send_counts, *recv_counts; /* [size] */
    const dcp_comm_parts_t *parts;            /* NULL: send and recv are used */
} comm_exchange_t;

typedef struct comm_ops {
    const char *name;
    void (*destroy)(dcp_comm_t *comm);
    /* Has the run failed? Cheap; sets the message. */
    dcp_status_t (*check)(dcp_comm_t *comm);
    void (*abort)(dcp_comm_t *comm, const char *text);
    dcp_status_t (*barrier)(dcp_comm_t *comm, const comm_call_t *call);
    dcp_status_t (*allgatherv)(dcp_comm_t *comm, const comm_call_t *call,
                               const void *send, const int64_t *counts, void *recv);
    dcp_status_t (*reduce_scatterv)(dcp_comm_t *comm, const comm_call_t *call,
                                    const void *send, const int64_t *counts,
                                    void *recv);
    dcp_status_t (*allreduce)(dcp_comm_t *comm, const comm_call_t *call,
                              const void *send, void *recv);
    dcp_status_t (*alltoallv)(dcp_comm_t *comm, const comm_call_t *call,
                              const comm_exchange_t *exchange);
    dcp_status_t (*broadcast)(dcp_comm_t *comm, const comm_call_t *call, void *data);
    dcp_status_t (*exchange)(dcp_comm_t *comm, const comm_call_t *call,
                             comm_message_t *messages, int64_t message_count);
    dcp_status_t (*split)(dcp_comm_t *comm, const comm_call_t *call, int32_t color,
                          int32_t key, dcp_comm_t **new_p);
    dcp_status_t (*window_create)(dcp_comm_t *comm, const comm_call_t *call,
                                  int64_t bytes, dcp_window_t **window_p);
    void (*window_destroy)(dcp_window_t *window);
} comm_ops_t;

/* Head of every transport's communicator. */
struct dcp_comm {
    const comm_ops_t *ops;
    int32_t rank, size;
    int64_t sequence; /* of the last collective */
    bool grouping;    /* between group_begin and group_end */
    int64_t message_count, message_room;
    comm_message_t *messages; /* [message_room], of the open group */
    dcp_comm_traffic_t traffic;
    int64_t wait_ns;                   /* of the running call, by the transport: until
                                          all had come */
    dcp_status_t broken;               /* first fatal error, DCP_OK: none */
    char broken_text[COMM_TEXT_BYTES]; /* its message */
};

struct dcp_window {
    const comm_ops_t *ops;
    int32_t rank, size;
    char **bases;   /* [size], NULL where that rank brought nothing */
    int64_t *bytes; /* [size] */
    void **maps;    /* [size], of the transport; NULL where nothing is mapped */
};

/* comm_window.c: a window whose tables are zero; dcp_free lets go. */
dcp_status_t comm_window_alloc(const dcp_comm_t *comm, dcp_window_t **window_p);

/* comm_call.c */
void comm_call_set_counts(comm_call_t *call, const int64_t *counts, int32_t count);
/* "allreduce of 5 float32 (sum)", into text. */
void comm_call_text(const comm_call_t *call, char *text, int64_t text_bytes);
/* Are all of calls[0..size) equal? Else ERR_MISMATCH that shows two sides. */
dcp_status_t comm_call_compare(const comm_call_t *const *calls, int32_t size);

/* comm_reduce.c: dst[i] = sources[0][i] op sources[1][i] op ..., in this order. dst may
 * be one of the sources, exactly. Unaligned pointers are fine only where items are
 * aligned. */
void comm_reduce(void *dst, const void *const *sources, int32_t source_count,
                 int64_t count, dcp_dtype_t dtype, dcp_reduce_op_t op);

/* comm_memory.c: ERR_NO_MEM where `bytes` would not fit the machine's free memory. */
dcp_status_t comm_memory_check(int64_t bytes, const char *what);

/* comm.c: is an interrupt pending? */
bool comm_interrupted(void);
/* self.c */
extern const comm_ops_t comm_self_ops;

#endif
