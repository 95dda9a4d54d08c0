/* A micro-batch whose rows are shared by a group of ranks. Internal to csrc/train.
 *
 *   sequence_cut.c        which rank holds which rows: pure
 *   sequence_heads.c      which rank computes which heads: pure
 *   sequence_pool.c       the communicators of groups, the window that holds arenas
 *   sequence_pass.c       one micro-batch: this rank's batch, meeting the others
 *   sequence_meet.c       meetings; running a micro-batch
 *   sequence_mail.c       the same by messages, where there are no windows
 *   sequence_boxes.c      where messages' rows lie
 *   sequence_attention.c  attention over the rows of all ranks, forward
 *   sequence_gradient.c   the same backward
 *
 * The p ranks of a group are r slots of u: rank = slot * u + part. A slot holds r-th
 * parts of the rows ("ring"); its u ranks share them evenly, and share the heads for
 * which they compute attention over all rows of the slot ("Ulysses").
 */
#ifndef DCP_TRAIN_SEQUENCE_H
#define DCP_TRAIN_SEQUENCE_H

#include "train_private.h"

#include <stdbool.h>
#include <stdint.h>

/* Part of one sequence that lies with one rank, its rows one after the other. */
typedef struct sequence_fragment {
    int32_t sequence;
    int32_t begin;   /* position of its first token in the sequence */
    int32_t span[2]; /* 0, tokens: offsets of a batch that holds it alone */
    int32_t rank;    /* of the group */
    int32_t row;     /* of its first token there */
} sequence_fragment_t;

/* The rows of a micro-batch over the ranks of a group. */
typedef struct sequence_cut {
    int32_t rank_count, ulysses, ring; /* p = u r */
    int64_t token_count, sequence_count;
    int64_t fragment_count;
    sequence_fragment_t *fragments; /* owned, [fragment_count] rank after rank */
    int64_t *first_fragment;        /* owned, [p + 1] */
    int64_t *first_row;             /* owned, [p + 1] rows of the ranks before */
} sequence_cut_t;

/* Rows of rank `rank` among p = ulysses * ring: never more than ceil(tokens / p). */
int64_t sequence_rows(int64_t token_count, int32_t ulysses, int32_t ring, int32_t rank);
/* ulysses must divide rank_count. Checks the batch's offsets. */
dcp_status_t sequence_cut_init(const dcp_batch_t *batch, int32_t rank_count,
                               int32_t ulysses, sequence_cut_t *cut);
void sequence_cut_fini(sequence_cut_t *cut); /* zeros are fine */

/* Query heads of one call of attention, all with the same number per key-value head. */
typedef struct sequence_run {
    int64_t head, head_count, kv_head, kv_count;
} sequence_run_t;

enum { SEQUENCE_RUNS = 3 };

/* The heads of one part of a slot. */
typedef struct sequence_heads {
    int64_t head, head_count;  /* its query heads */
    int64_t kv_head, kv_count; /* key-value heads that these read */
    int32_t run_count;
    sequence_run_t runs[SEQUENCE_RUNS];
} sequence_heads_t;

int32_t sequence_ulysses(const dcp_transformer1d_config_t *config, int32_t rank_count,
                         dcp_sequence_kind_t kind);
void sequence_heads_of(const dcp_transformer1d_config_t *config, int32_t ulysses,
                       int32_t part, sequence_heads_t *heads_p);

/* Where this rank finds the rows of a rank, for one call. Columns begin at the heads
 * named. */
typedef struct sequence_view {
    float *q, *k, *v, *out, *lse; /* lse: [heads, rows] */
    float *dout, *dq;             /* backward */
    float *partial; /* dk and dv of this rank's rows that the rank's queries give */
    int64_t q_stride, kv_stride, out_stride, dout_stride, dq_stride;
    int64_t head, kv_head;
} sequence_view_t;

enum {
    SEQUENCE_HEAD_BYTES = 256
}; /* of a part of the window, for notices; then come
      the exchange and the model's arena */

/* Where rows lie that come and go in messages, for one rank: NULL where none do. */
typedef struct sequence_box {
    float *kv_in;                                    /* [its rows, 2, kv_count, D] */
    float *q_in, *out_in, *dout_in, *dq_in, *lse_in; /* [its rows, own heads, D] */
    float *q_out, *attn_out, *dout_out;              /* [own rows, its heads, D] */
    float *kv_out;     /* [own rows, 2, its kv_count, D] */
    float *partial_in; /* [own rows, 2, its kv_count, D] */
} sequence_box_t;

typedef struct sequence_mail {
    sequence_box_t *boxes; /* owned, [p]; NULL: window */
} sequence_mail_t;

/* One micro-batch in flight. */
typedef struct sequence_pass {
    const dcp_device_ops_t *device;
    const dcp_transformer1d_config_t *config;
    const dcp_window_t *window; /* NULL: ranks exchange messages */
    dcp_comm_t *comm;           /* of the group */
    int32_t first_rank, rank; /* of the group in the world; of this rank in the group */
    bool keeps_qkv;           /* a layer's q, k, v lie alone until its backward pass */
    const dcp_batch_t *whole; /* the micro-batch */
    sequence_cut_t cut;
    sequence_heads_t heads;            /* of this rank */
    const sequence_fragment_t **order; /* owned, by sequence and position */
    int32_t *spans; /* owned: offsets of the slot's rows, their keys' begins and ends */
    uint8_t *wanted;  /* owned, [fragment_count] 1: read by a query of this slot */
    void *own_arrays; /* owned: what `own` points to */
    dcp_batch_t own;  /* this rank's rows */
    dcp_attention_hook_t hook;
    sequence_view_t *views; /* owned, [p] */
    float *exchange; /* [T, 2, kv_count, D]: keys and values, or partial gradients */
    sequence_mail_t mail;
    int64_t identity;
    uint64_t turn;     /* calls so far */
    int64_t waited_ns; /* for others */
} sequence_pass_t;

/* Offsets of rank `rank`'s rows, begins and ends of their keys: [its fragments]. */
typedef struct sequence_spans {
    const int32_t *offsets, *key_begins, *key_ends;
} sequence_spans_t;

dcp_status_t sequence_pass_init(sequence_pass_t *pass, dcp_sharded_t *sharded,
                                const dcp_micro_batch_t *micro, bool training);
void sequence_pass_fini(sequence_pass_t *pass);
sequence_spans_t sequence_pass_spans(const sequence_pass_t *pass, int32_t rank);
/* Another rank of this one's slot? */
bool sequence_pass_partner(const sequence_pass_t *pass, int32_t rank);
/* Waits until views[] shows every rank's rows of this call; `own` shows this rank's. */
dcp_status_t sequence_pass_meet(sequence_pass_t *pass, dcp_queue_t *queue,
                                const sequence_view_t *own, bool backward);
/* Waits until what others computed of this rank's rows has arrived. */
dcp_status_t sequence_pass_part(sequence_pass_t *pass, dcp_queue_t *queue,
                                const sequence_view_t *own, bool backward);
int64_t sequence_pass_rows(const sequence_pass_t *pass, int32_t rank);
void sequence_pass_heads(const sequence_pass_t *pass, int32_t rank,
                         sequence_heads_t *heads_p);

/* The same by messages: sequence_mail.c. */
dcp_status_t sequence_mail_init(sequence_pass_t *pass, dcp_sharded_t *sharded,
                                bool training);
dcp_status_t sequence_mail_meet(sequence_pass_t *pass, dcp_queue_t *queue,
                                const sequence_view_t *own, bool backward);
dcp_status_t sequence_mail_part(sequence_pass_t *pass, dcp_queue_t *queue,
                                const sequence_view_t *own, bool backward);
void sequence_mail_fini(sequence_mail_t *mail);
/* This rank and `rank` do not compute the same thing. */
dcp_status_t sequence_fail_identity(const sequence_pass_t *pass, int32_t rank);

/* What forward and backward share. */
sequence_view_t sequence_view_of(const dcp_attention_args_t *args);
/* Floats of a row of the exchange part. */
int64_t sequence_pass_gathered(const sequence_pass_t *pass);
/* The arguments for one run of heads and the query rows of rank `rank`; keys and
 * offsets (int32) are the caller's. */
dcp_attention_args_t sequence_query_args(const sequence_pass_t *pass,
                                         const dcp_attention_args_t *own, int32_t rank,
                                         const sequence_run_t *run);

/* dcp_attention_hook_t over a sequence_pass_t. */
dcp_status_t sequence_forward(void *state, dcp_queue_t *queue, int64_t layer,
                              const dcp_attention_args_t *args);
dcp_status_t sequence_backward(void *state, dcp_queue_t *queue, int64_t layer,
                               const dcp_attention_backward_args_t *args);

/* Bytes of a rank's part of the window for one micro-batch. */
int64_t sequence_need(const dcp_sharded_t *sharded, const dcp_micro_batch_t *micro,
                      bool training);
/* Collective: communicators for args' groups, and a window for its micro-batches. */
dcp_status_t sequence_prepare(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                              bool training);
/* Memory of this rank for one micro-batch at a time, kept. */
dcp_status_t sequence_memory(dcp_sharded_t *sharded, int64_t bytes, void **memory_p);
const dcp_window_t *sequence_window(const dcp_sharded_t *sharded); /* or NULL */
/* NULL where this step has none of that group. */
dcp_comm_t *sequence_comm(const dcp_sharded_t *sharded, int32_t first, int32_t count);
/* One micro-batch, alone or in a group; *waited_p += time spent waiting for others. */
dcp_status_t sequence_run(dcp_sharded_t *sharded, const dcp_micro_batch_t *micro,
                          bool training, double *loss_p, int64_t *waited_p);
void sequence_pool_destroy(sequence_pool_t *pool); /* NULL is fine */

#endif
