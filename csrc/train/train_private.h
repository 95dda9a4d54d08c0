/* Shared by the files of csrc/train. */
#ifndef DCP_TRAIN_PRIVATE_H
#define DCP_TRAIN_PRIVATE_H

#include "dcp/train.h"

enum { SHARDED_BUFFERS = 4 }; /* one a dcp_sharded_kind_t */

/* What a rank tells the others around a step; all words are int64 so that one gather
 * carries it. */
typedef struct step_record {
    int64_t step;
    int64_t plan_hash;
    int64_t batch_count;
    int64_t busy_ns;
    double loss;
} step_record_t;

typedef struct sequence_pool sequence_pool_t; /* sequence.h */

struct dcp_sharded {
    dcp_comm_t *comm; /* borrowed */
    dcp_transformer1d_config_t config;
    const dcp_device_ops_t *device;
    dcp_pool_t *pool; /* borrowed */
    int64_t tensor_count;
    dcp_model_tensor_t *tensors;             /* owned, [tensor_count] */
    uint8_t *frozen;                         /* owned, [tensor_count] 1: not trained */
    uint8_t *trained;                        /* owned, [tensor_count] the opposite */
    dcp_dbuffer_layout_t *layout;            /* owned */
    dcp_dbuffer_t *buffers[SHARDED_BUFFERS]; /* owned, by kind */
    dcp_model_t *model;                      /* owned */
    step_record_t *records;                  /* owned, [ranks] */
    int64_t *record_counts;                  /* owned, [ranks] words of a record */
    dcp_sequence_kind_t sequence_kind;       /* how groups share attention */
    sequence_pool_t *sequence_pool;          /* owned; NULL: no group so far */
};

/* Every rank's record to all, into sharded->records. */
dcp_status_t train_gather_records(dcp_sharded_t *sharded, const step_record_t *own);
/* Parts 2 and 3. */
dcp_status_t train_compute(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                           int64_t *busy_ns, double *loss_p);
/* Forward only; *loss_p is the sum over ranks, in rank order. */
dcp_status_t train_evaluate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                            double *loss_p);

#endif
