/* Shared by the files of csrc/train. */
#ifndef DCP_TRAIN_PRIVATE_H
#define DCP_TRAIN_PRIVATE_H

#include "dcp/reducer.h"
#include "dcp/train.h"

enum { SHARDED_BUFFERS = 2 }; /* one a dcp_sharded_kind_t */

/* What lies in a place that groups of tensors take turns in. */
typedef struct train_place {
    int32_t group;   /* gathered into it, or about to be; -1: none */
    int32_t entered; /* a pass has been in it since */
} train_place_t;

/* What a rank tells the others around a step; all words are int64 so that one gather
 * carries it. */
typedef struct step_record {
    int64_t step;
    int64_t plan_hash;
    int64_t batch_count;
    int64_t settings_hash; /* train_settings_hash */
    int64_t busy_ns;
    int64_t not_finite; /* 1: loss or gradients are not; only where codes are sent */
    double loss;
} step_record_t;

/* What moving gradients took in a step, and what codes left out. */
typedef struct train_moved {
    int64_t codec_ns, reduce_ns;
    double error_squares;
} train_moved_t;

typedef struct train_statistics train_statistics_t; /* statistics.c */
typedef struct train_factors train_factors_t;       /* statistics_adam.c */

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
    dcp_optimizer_t *optimizer;              /* owned; NULL until it is set */
    step_record_t *records;                  /* owned, [ranks] */
    int64_t *record_counts;                  /* owned, [ranks] words of a record */
    int32_t forward_only, no_windows, reduce_layer, prefetch, gather_step; /* options */

    /* rounds.c */
    int32_t training;                      /* the present passes add to gradients */
    int64_t hook_ns;                       /* spent in hooks since a step began */
    int64_t *round_words;                  /* owned, [ranks] */
    int64_t gathered_bytes, reduced_bytes; /* received from others in this step */
    int64_t gather_ns, gather_calls;       /* of moving weights in it */
    int64_t latency_ns;                    /* of a call that told records */
    int64_t reduce_count;                  /* of the step, with what it accumulated */

    /* compute.c */
    int32_t accumulated; /* gradients hold earlier passes, which the step includes */
    double own_loss;     /* of these */

    /* gather.c: where whole weights lie; NULL with windows */
    dcp_dbuffer_t *whole;  /* owned; in the config's compute_dtype */
    train_place_t *places; /* owned, [place_count] */
    int32_t place_count;
    int32_t packed_group; /* the layer whose weights may be packed; -1: none */

    /* reduce_layer.c: where whole gradients of a group lie */
    int64_t largest_group;      /* elements of one place */
    float *group_memory;        /* owned; without windows */
    dcp_window_t *group_window; /* owned; with windows */
    float *group_gradients;     /* this rank's in one of these; NULL: reduce = step */

    /* reduce_codes.c */
    int32_t machine_ranks;   /* of two levels; 1: one level */
    dcp_reducer_t *reducer;  /* owned; NULL before its first use */
    dcp_dbuffer_t *residual; /* owned; NULL before the first step with feedback */
    int32_t residual_left;   /* it may hold something that is still to be sent */
    int32_t not_finite;      /* some rank's gradients of this step are not */
    double grad_scale;       /* clipping of the latest update; 0: none so far */
    train_moved_t moved;     /* in this step */

    /* statistics.c, control_world.c */
    train_statistics_t *statistics; /* owned; NULL before the first step with them */
    train_factors_t *factors;       /* owned; NULL before the first that are known */
    int32_t measured;               /* all micro-batches of this step so far */
    int32_t has_observation;        /* of the latest step */
    dcp_observation_t observation;
    int32_t codec_known, hadamard, nearest; /* these two: how, in the latest step */
    double codec_s[DCP_PRECISION_COUNT];

    /* sequence.h */
    dcp_sequence_kind_t sequence_kind; /* how groups share attention */
    sequence_pool_t *sequence_pool;    /* owned; NULL: no group so far */
};

/* Do all ranks make the same model in the same way? Collective. */
dcp_status_t train_agree_on_options(const dcp_sharded_t *sharded,
                                    const dcp_sharded_options_t *options);

/* Where a model's tensors lie. */
dcp_status_t train_plan_layout(const dcp_model_tensor_t *tensors, int64_t tensor_count,
                               int32_t rank_count, int64_t block_rows,
                               dcp_dbuffer_layout_t **layout_p);

/* Of what a step's update depends on and ranks must share. */
int64_t train_settings_hash(const dcp_sharded_t *sharded, const dcp_step_args_t *args);

/* Every rank's record to all, into sharded->records. */
dcp_status_t train_gather_records(dcp_sharded_t *sharded, const step_record_t *own);

/* All ranks run equally many micro-batches, and each group's in one round? Both from
 * what all ranks see: the records of part 1; a collective. */
dcp_status_t train_check_counts(const dcp_sharded_t *sharded, int64_t step);
dcp_status_t train_check_rounds(dcp_sharded_t *sharded, const dcp_step_args_t *args);
/* args with micro-batches without tokens at the end, so that all ranks have equally
 * many. Collective. *memory_p is the caller's, to be freed also on failure. */
dcp_status_t train_pad_rounds(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                              dcp_step_args_t *padded_p, void **memory_p);
void train_set_hooks(dcp_sharded_t *sharded);
/* Bytes that a rank receives of others when a group is summed. */
int64_t train_received_bytes(const dcp_sharded_t *sharded, int32_t group);

/* Has the group a tensor that is trained? The others' gradients stay zero, unsent. */
bool train_group_is_trained(const dcp_sharded_t *sharded, int32_t group);
/* Elements of a whole group; of the largest but a tied embedding. */
int64_t train_group_elements(const dcp_sharded_t *sharded, int32_t group);
int64_t train_largest_group(const dcp_sharded_t *sharded);

dcp_status_t train_gather_create(dcp_sharded_t *sharded);
void train_gather_destroy(dcp_sharded_t *sharded);
/* The weights change: what was gathered is stale. */
void train_gather_forget(dcp_sharded_t *sharded);
dcp_status_t train_gather_enter(dcp_sharded_t *sharded, dcp_queue_t *queue,
                                int32_t group, int32_t backward);

dcp_status_t train_reduce_create(dcp_sharded_t *sharded);
void train_reduce_destroy(dcp_sharded_t *sharded);
float *train_group_gradients(const dcp_sharded_t *sharded, int32_t group);
dcp_status_t train_reduce_enter(dcp_sharded_t *sharded, dcp_queue_t *queue,
                                int32_t group, int32_t backward);
/* Backward. */
dcp_status_t train_reduce_leave(dcp_sharded_t *sharded, dcp_queue_t *queue,
                                int32_t group);

/* Are the step's precision and statistics possible? */
dcp_status_t train_check_precision(const dcp_sharded_t *sharded,
                                   const dcp_step_args_t *args);
/* Machines that codes travel between; one level: ranks. */
int32_t train_machine_count(const dcp_sharded_t *sharded);
/* Will this step send what residuals hold? */
bool train_sends_residual(const dcp_sharded_t *sharded, const dcp_step_args_t *args);
/* Do gradients go through the reducer? */
bool train_reduces_codes(const dcp_sharded_t *sharded, const dcp_step_args_t *args);
/* Part 4 with it. Collective. */
dcp_status_t train_reduce_codes(dcp_sharded_t *sharded, const dcp_step_args_t *args);

void train_statistics_destroy(train_statistics_t *statistics);
/* Before the first micro-batch; after each; before part 4, twice; after part 5,
 * collective. */
dcp_status_t train_statistics_begin(dcp_sharded_t *sharded);
dcp_status_t train_statistics_batch(dcp_sharded_t *sharded,
                                    const dcp_micro_batch_t *micro);
/* Which elements are quantised without being sent: some runs of them. */
typedef struct train_sample {
    int64_t stride, offset;
} train_sample_t;
train_sample_t train_sample(const dcp_sharded_t *sharded, int64_t step);
/* Elements from this one to the next of the sample; 0: it is one. */
int64_t train_sample_skip(const train_sample_t *sample, int64_t element);
dcp_status_t train_statistics_errors(dcp_sharded_t *sharded,
                                     const dcp_step_args_t *args);
dcp_status_t train_statistics_residual(dcp_sharded_t *sharded);
dcp_status_t train_statistics_end(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                                  const int64_t *busy_ns, dcp_step_result_t *result);

void train_factors_destroy(train_factors_t *factors);
/* After update number `updates`, from 1, of a step with statistics. Collective. */
dcp_status_t train_factors_refresh(dcp_sharded_t *sharded, int64_t updates);
/* One over the optimizer's denominator, a block of DCP_PRECISION_BLOCK elements of the
 * gradient buffer; its square. NULL: not known, or the optimizer has none. */
const float *train_factors(const dcp_sharded_t *sharded);
const float *train_factors_squared(const dcp_sharded_t *sharded);
/* How often they were refreshed, from 1; 0: not known. */
int64_t train_factors_revision(const dcp_sharded_t *sharded);
/* Adds sums over sampled elements of this rank's shard: squares of its own gradient,
 * and of what codes leave of it, by precision, over v. */
dcp_status_t train_moment_errors(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                                 double *squares, double *errors);
/* Of this rank's slices, in that metric; where it is known. */
double train_factors_shard_squares(const dcp_sharded_t *sharded);

/* Parts 2 and 3. */
dcp_status_t train_compute(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                           int64_t *busy_ns, double *loss_p);
/* Forward only; *loss_p is the sum over ranks, in rank order. */
dcp_status_t train_evaluate(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                            double *loss_p);

#endif
