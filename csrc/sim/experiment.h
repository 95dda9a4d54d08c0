/* Shared by the files of the time-to-loss experiment. */
#ifndef EXPERIMENT_H
#define EXPERIMENT_H

#include "dcp/time_to_loss.h"

/* loss_model.c */
double loss_at(const dcp_loss_model_t *model, double progress);
/* Progress at which the loss is `target`. */
double progress_at(const dcp_loss_model_t *model, double target);
double noise_at(const dcp_loss_model_t *model, double loss); /* tokens */

/* step_model.c: the steps of the job in front on a network. */
typedef struct step_model {
    const dcp_time_to_loss_options_t *options;
    dcp_network_t *network; /* owned */
    dcp_flow_t *flows;      /* owned: of one byte of a bucket */
    dcp_flow_t *scaled;     /* owned scratch */
    int64_t flow_count;
    int64_t phase_offsets[3];
    int32_t phase_count;
} step_model_t;

typedef struct step_times {
    double end_s;
    double step_s, compute_s, codec_s;
    double move_s; /* of transfers, one after the other */
    double bytes;  /* received by a rank */
} step_times_t;

dcp_status_t step_model_create(const dcp_time_to_loss_options_t *options,
                               int32_t background_count, double dwell_scale,
                               step_model_t *model);
void step_model_clear(step_model_t *model);
/* Runs one step from start_s. */
dcp_status_t step_model_run(step_model_t *model, double start_s, dcp_arm_t arm,
                            step_times_t *times);
/* Bytes that a rank receives in a step. */
double step_bytes(const dcp_time_to_loss_options_t *options, dcp_precision_t precision);
/* Calls of a step, each of which waits for the latency. */
double step_calls(const step_model_t *model);
double step_codec_s(const dcp_time_to_loss_options_t *options,
                    dcp_precision_t precision);
/* Seconds of comm_s that stick out of a backward pass, in closed form. */
double step_exposed_s(const dcp_time_to_loss_options_t *options, double comm_s,
                      double compute_s);

/* oracle.c: mean seconds of a step by arm and number of jobs that are present. */
typedef struct oracle {
    double seconds[DCP_PRECISION_COUNT][DCP_CONTROL_MULTIPLES][65];
} oracle_t;
dcp_status_t oracle_tabulate(const dcp_time_to_loss_options_t *options,
                             oracle_t *oracle);
dcp_arm_t oracle_choose(const dcp_time_to_loss_options_t *options,
                        const oracle_t *oracle, double noise_tokens, uint64_t present);

#endif
