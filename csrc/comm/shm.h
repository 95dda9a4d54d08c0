/* Shared state of the shm transport; private to shm*.c.
 *
 * Two kinds of shared memory:
 *
 *   segment (one a run)          the place to meet, a named file until all are there:
 *     failure | slot 0 | slot 1 | ...        a slot: process, bell, has it left
 *   comm memory (one a communicator, memfd of its rank 0):
 *     head | members | rows | channels | arena 0 | arena 1 | ...
 *
 * Waiting. Each rank sleeps on one futex word, its bell. Who changes what a sleeper
 * waits for rings its bell. A sleeper looks up every 50 ms: has the run failed, is a
 * peer dead, is the deadline over. So one wait serves rounds, messages and rendezvous,
 * and a failure wakes everybody at once.
 *
 * Rounds. A collective is a sequence of rounds (barriers), numbered by `phase`. What a
 * rank shows to others in a round (call, note, arena) has two copies, used in turn: a
 * copy written before round p is read after round p and before the reader arrives at
 * round p + 1, so it may be written again once round p + 1 has passed.
 */
#ifndef COMM_SHM_H
#define COMM_SHM_H

#include "comm_transport.h"

#include <stdatomic.h>

enum { SHM_NOTE_TEXT_BYTES = 320 };

/* Mapped shared memory; ranks of one process share a mapping. */
typedef struct shm_map {
    char *base;
    int64_t bytes;
    uint64_t device, inode; /* identity of the file */
    int64_t user_count;
    struct shm_map *next;
} shm_map_t;

typedef struct shm_slot {
    _Alignas(128) _Atomic uint32_t state; /* SHM_SLOT_... */
    int32_t pid;
    int64_t start_ticks;          /* of the process: tells it from a later one */
    uint64_t pid_namespace;       /* inode */
    _Atomic uint32_t bell;        /* futex word */
    _Atomic uint32_t sleep_count; /* threads of the rank that sleep on the bell */
    _Atomic uint32_t left;        /* 1: let go of its last communicator */
} shm_slot_t;

enum { SHM_SLOT_FREE = 0, SHM_SLOT_CLAIMED = 1, SHM_SLOT_ATTACHED = 2 };

typedef struct shm_segment {
    uint64_t magic;
    int32_t size;
    _Atomic int32_t attached_count;
    _Atomic uint32_t failed; /* 0: no, 1: being written, 2: yes */
    int32_t fail_status;
    char fail_text[COMM_TEXT_BYTES];
    int32_t world_fd; /* comm memory of the world, in rank 0's process */
    shm_slot_t slots[];
} shm_segment_t;

/* This rank's part in the run; shared by its communicators. */
typedef struct shm_root {
    shm_map_t *map;
    shm_segment_t *segment; /* in map */
    int32_t rank, size;
    int32_t spin_count;       /* looks before sleeping; 0: ranks outnumber cores */
    _Atomic uint32_t watched; /* looks at peers so far: whose turn it is */
    _Atomic int64_t user_count;
    int64_t timeout_ns;
} shm_root_t;

/* A word from one rank to the others, beside a round. */
typedef struct shm_note {
    int32_t status; /* dcp_status_t of the rank's own part */
    int32_t pid, fd;
    int32_t color, key;
    int64_t bytes;
    char text[SHM_NOTE_TEXT_BYTES]; /* message of status */
} shm_note_t;

typedef struct shm_member {
    _Alignas(128) _Atomic uint64_t phase; /* rounds it has arrived at */
    _Atomic uint32_t left;                /* 1: destroyed the communicator */
    comm_call_t calls[2];
    shm_note_t notes[2];
} shm_member_t;

typedef struct shm_channel { /* sender -> receiver; the ring lies with the receiver */
    _Alignas(64) _Atomic uint64_t head; /* bytes written */
    _Alignas(64) _Atomic uint64_t tail; /* bytes read */
    _Atomic int32_t ring_fd;            /* receiver's descriptor + 1; 0: no ring yet */
} shm_channel_t;

typedef struct shm_head {
    _Alignas(128) _Atomic uint64_t arrived; /* arrivals at all rounds */
    shm_member_t members[];
} shm_head_t;

typedef struct shm_comm {
    dcp_comm_t base;
    shm_root_t *root;
    shm_map_t *map;          /* comm memory */
    shm_head_t *head;        /* in map, as the following */
    int64_t *rows;           /* counts of alltoallv: [2, size, 2, size] */
    shm_channel_t *channels; /* [sender, receiver] */
    char *arenas;            /* [size, 4, arena_bytes] */
    int64_t arena_bytes;     /* of one copy */
    int64_t counted_bytes;   /* of this rank's share of the memory */
    uint64_t phase;          /* last round */
    uint64_t alltoall_count; /* calls so far: picks the copy of rows */
    const comm_call_t *call; /* running one, for messages */
    int32_t *members;        /* [size]: rank in the run */
    const void **sources;    /* [size], scratch */
    shm_map_t **rings_in;    /* [size] */
    shm_map_t **rings_out;   /* [size] */
    int32_t *ring_fds;       /* [size]: own rings, -1: none */
    uint64_t *stamps;        /* [2, size], scratch of a message group */
    uint64_t stamp;
} shm_comm_t;

/* What a wait waits for. */
typedef struct shm_waiting {
    bool (*ready)(void *context);
    bool (*awaits)(void *context, int32_t rank); /* is this rank still missing? */
    void *context;
} shm_waiting_t;

/* shm_map.c: memory of `bytes` of which the first `reserve_bytes` are taken at once. */
dcp_status_t shm_map_create(int64_t bytes, int64_t reserve_bytes, const char *what,
                            int *fd_p, shm_map_t **map_p);
dcp_status_t shm_map_fd(int fd, int64_t bytes, const char *what, shm_map_t **map_p);
dcp_status_t shm_map_peer(int32_t pid, int32_t fd, int64_t bytes, const char *what,
                          shm_map_t **map_p);
void shm_map_release(shm_map_t *map); /* NULL is fine */

/* shm_meet.c */
enum { SHM_PATH_BYTES = 256 };

/* Attaches to the run's segment, made by whoever is first; the rank's slot is taken.
 * fd_p, path: for shm_meet_end. */
dcp_status_t shm_meet_begin(const dcp_comm_options_t *options, int32_t world_fd,
                            shm_root_t *root, int *fd_p, char path[SHM_PATH_BYTES]);
/* All are there, or the meeting failed: the segment loses its name. */
void shm_meet_end(int fd, const char *path);

/* shm_wait.c */
bool shm_process_start(int32_t pid, int64_t *start_ticks_p); /* false: dead */
void shm_ring(shm_root_t *root, int32_t root_rank);
dcp_status_t shm_wait(shm_comm_t *comm, const shm_waiting_t *waiting,
                      int64_t timeout_ns);
/* Records a failure of the run (the first one wins) and wakes everybody. */
void shm_fail(shm_root_t *root, dcp_status_t status, const char *text);
dcp_status_t shm_check(shm_root_t *root); /* the recorded failure, or DCP_OK */

/* shm_collective.c */
dcp_status_t shm_round(shm_comm_t *comm, const comm_call_t *call,
                       const shm_note_t *note);
/* A round with notes that fails on all ranks alike if one rank's status is not OK. */
dcp_status_t shm_agree(shm_comm_t *comm, const comm_call_t *call, shm_note_t *note,
                       dcp_status_t status);
const shm_note_t *shm_note_of(const shm_comm_t *comm, int32_t rank);
dcp_status_t shm_barrier(dcp_comm_t *comm, const comm_call_t *call);
dcp_status_t shm_allgatherv(dcp_comm_t *comm, const comm_call_t *call, const void *send,
                            const int64_t *counts, void *recv);
dcp_status_t shm_reduce_scatterv(dcp_comm_t *comm, const comm_call_t *call,
                                 const void *send, const int64_t *counts, void *recv);
dcp_status_t shm_allreduce(dcp_comm_t *comm, const comm_call_t *call, const void *send,
                           void *recv);
dcp_status_t shm_alltoallv(dcp_comm_t *comm, const comm_call_t *call,
                           const comm_exchange_t *exchange);
dcp_status_t shm_broadcast(dcp_comm_t *comm, const comm_call_t *call, void *data);

/* shm_message.c */
dcp_status_t shm_exchange(dcp_comm_t *comm, const comm_call_t *call,
                          comm_message_t *messages, int64_t message_count);
void shm_message_fini(shm_comm_t *comm);

/* shm_window.c */
dcp_status_t shm_window_create(dcp_comm_t *comm, const comm_call_t *call, int64_t bytes,
                               dcp_window_t **window_p);
void shm_window_destroy(dcp_window_t *window);

#endif
