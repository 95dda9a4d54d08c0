/* The experiment of ML-for-ML: a training job in front, others behind it on one
 * network, and how long each policy of the controller takes to a target loss.
 *
 * The controller is the one that trains (control.h); here the world behind its table is
 * a model: steps take what the network simulator says, with buckets of gradients
 * reduced while the backward pass of the last micro-batch goes on; progress follows the
 * steps formula with the true noise scale, which grows as the loss falls; what the
 * controller observes is noisy as it is in training.
 */
#ifndef DCP_TIME_TO_LOSS_H
#define DCP_TIME_TO_LOSS_H

#include "dcp/control.h"
#include "dcp/network.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Policies of the simulator alone, after those of dcp_policy_t. */
enum {
    DCP_POLICY_ORACLE =
        16, /* argmin over both with true numbers and the jobs now present */
    DCP_POLICY_FIXED =
        17, /* one arm throughout: best_fixed is the best of all of them */
};

/* L(p) = floor + (start - floor) (1 + p / knee)^-power, p = progress in steps of an
 * endless batch; B_s(L) = noise_scale / L^(1 / noise_power) (Kaplan et al. 2020). */
typedef struct dcp_loss_model {
    double start, floor, knee, power;
    double noise_scale, noise_power; /* tokens */
} dcp_loss_model_t;

typedef struct dcp_time_to_loss_options {
    dcp_network_options_t network;
    const dcp_background_t *background; /* [background_count] borrowed */
    int32_t background_count;
    const int32_t *hosts; /* [rank_count] of the job in front; borrowed */
    int32_t rank_count;
    dcp_collective_t collective;
    double parameter_count;
    double compute_s;      /* forward and backward of multiple 1 */
    double backward_share; /* of compute_s: 2/3 */
    double optimizer_s;    /* of a step */
    int32_t bucket_count; /* reduced one after the other, each as soon as it is ready in
                             the last micro-batch's backward pass; 1: no overlap */
    double codec_bytes_per_s;          /* of the fp32 gradient; 0: costs nothing */
    double error[DCP_PRECISION_COUNT]; /* true w1 of each precision */
    dcp_loss_model_t loss;
    double
        target_loss;   /* ERR_ARG where the model cannot reach it: its floor is named */
    double time_noise; /* standard deviation of the log of measured times */
    double micro_batches;    /* of multiple 1 over all ranks, and */
    double noise_dimensions; /* that noise fills: how much noise scales scatter */
    uint64_t seed;
    int64_t step_limit;            /* ERR_TIMEOUT beyond; 0: 10 million */
    dcp_control_options_t control; /* policy may be one of the simulator's */
    dcp_arm_t fixed;               /* of DCP_POLICY_FIXED */
} dcp_time_to_loss_options_t;

typedef struct dcp_time_to_loss_result {
    double time_s;
    int64_t steps;
    double tokens;
    int64_t change_count;                                          /* of the arm */
    double arm_share[DCP_PRECISION_COUNT * DCP_CONTROL_MULTIPLES]; /* of time in each */
} dcp_time_to_loss_result_t;

/* Called after every step, where given. */
typedef void (*dcp_time_to_loss_watch_t)(void *context, double now_s, double loss,
                                         uint64_t present,
                                         const dcp_observation_t *observation,
                                         const dcp_decision_t *decision);

dcp_status_t dcp_time_to_loss(const dcp_time_to_loss_options_t *options,
                              dcp_time_to_loss_watch_t watch, void *context,
                              dcp_time_to_loss_result_t *result_p);

#ifdef __cplusplus
}
#endif
#endif
