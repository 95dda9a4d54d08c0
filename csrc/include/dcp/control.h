/* The controller: which precision gradients travel in and how many tokens a step has,
 * so that a target loss is reached soonest.
 *
 * Steps needed with B tokens a step in precision q (DESIGN 8; McCandlish et al.,
 * arXiv 1812.06162, extended to quantised sums):
 *
 *   S(B, q) = S_min (1 + w2) [1 + w1 / W + (1 + w1) B_s / B]
 *
 * Seconds a step: T(q, A) = A t_c + exposed(q) + rest, A the batch multiple. The
 * objective is J(q, A) = S T; arms are (q, A) on a small grid. All of t_c, bandwidth,
 * latency, w1, B_s are measured while training: an observation after every step.
 *
 * The controller is a state machine: state and observation give a decision, with no
 * clock and no randomness of its own, so a log of observations replays bit for bit. It
 * sees whoever runs the steps through a table, the world: training, or the simulator.
 */
#ifndef DCP_CONTROL_H
#define DCP_CONTROL_H

#include "dcp/precision.h"
#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DCP_CONTROL_MULTIPLES = 16 }; /* most batch multiples of a grid */

typedef enum dcp_policy {
    DCP_POLICY_STATIC = 0,       /* base precision, least multiple */
    DCP_POLICY_PRECISION = 1,    /* argmin over precisions at the least multiple */
    DCP_POLICY_ACCUMULATION = 2, /* argmin over multiples at the base precision */
    DCP_POLICY_DECOUPLED = 3,    /* precision of the one, multiple of the other */
    DCP_POLICY_JOINT = 4,        /* argmin over both */
} dcp_policy_t;

/* How the learning rate follows the batch; gain = (1 + f) / (1 + f / k) for multiple k,
 * f = B_s / tokens_per_step, for which the rate was set (AdaScale, arXiv 2007.05105).
 */
typedef enum dcp_lr_rule {
    DCP_LR_FIXED = 0,
    DCP_LR_GAIN = 1,      /* gain: SGD */
    DCP_LR_SQRT_GAIN = 2, /* its square root: Adam and what normalises its update */
} dcp_lr_rule_t;

typedef struct dcp_arm {
    dcp_precision_t precision;
    int32_t multiple; /* tokens of a step = tokens_per_step x multiple */
} dcp_arm_t;

typedef struct dcp_control_options {
    dcp_policy_t policy;
    const dcp_precision_t *precisions; /* [precision_count] distinct, >= 1; copied */
    int32_t precision_count;
    dcp_precision_t base;     /* one of them */
    const int32_t *multiples; /* [multiple_count] ascending, >= 1; copied */
    int32_t multiple_count;
    int64_t tokens_per_step; /* of multiple 1 */
    int32_t rank_count;      /* W: ranks whose quantised gradients are summed */
    dcp_lr_rule_t lr_rule;
    double hysteresis;     /* another arm must promise a J less by this share: 0.05; or
                              by less, until that adds up to six times it */
    double bandwidth_mean; /* weight of the newest log bandwidth: 0.3 */
    double jump;           /* |log bandwidth - mean| above this is a jump: 0.5 */
    int32_t jump_count;    /* so many jumps in one direction start the mean anew: 3 */
    double noise_mean;     /* weight of the newest noise numbers: 0.05 */
    int32_t noise_steps;   /* observations before the multiple may leave the least: 8 */
    int32_t dwell_steps;   /* least steps between two changes of arm: 2 */
    double error_limit;    /* a precision of greater w1 is not used: 0.5 */
    double slope_limit; /* veto by the loss: where it rises by so many standard errors
                           of its slope, since a change to fewer bits, that precision
                           is left for a while; 0: off */
} dcp_control_options_t;

/* What one step showed; the same on all ranks. Times in seconds, of the slowest rank. A
 * number that was not measured is NaN. */
typedef struct dcp_observation {
    int64_t step;
    dcp_arm_t arm;             /* it ran with */
    int64_t tokens;            /* trainable, of all ranks */
    double step_s;             /* whole */
    double compute_s;          /* micro-batches, without what they wait for */
    double codec_s;            /* quantising and decoding in `arm.precision` */
    double reduce_s, gather_s; /* moving gradients, weights: from when all had come */
    double reduce_bytes, gather_bytes; /* received by a rank */
    double latency_s;                  /* of a call that moves next to nothing */
    int64_t gather_calls;              /* that weights took */
    double loss;                       /* of the step, per token; NaN: not finite */
    int32_t skipped;                   /* 1: not finite, nothing was changed */
    /* Gradient noise, token-weighted: micro-batch i of n_i tokens, mean gradient g_i.
     */
    int64_t micro_batch_count; /* K, over all ranks, with tokens */
    double micro_squares;      /* sum n_i |g_i|^2 */
    double mean_squares;       /* |g|^2 of the reduced gradient, before clipping */
    double reduce_error;       /* sum over ranks |x_r - Q(x_r)|^2, in the same units as
                                  mean_squares: what quantising added to it */
    double adam_micro_squares, adam_mean_squares, adam_reduce_error; /* the same with
                                   every element over the optimizer's denominator; NaN:
                                   the optimizer has none */
    double step_difference; /* |g - g of the step before|^2, NaN: none; with it the bias
                               of sorting micro-batches by length is measured, and the
                               noise of a step of one micro-batch */
    double adam_step_difference;       /* the same, both over the same denominators */
    double error[DCP_PRECISION_COUNT]; /* w1 of each precision by shadow quantising:
                                          relative squared error; NaN: not measured */
    double adam_error[DCP_PRECISION_COUNT]; /* over the optimizer's v, by elements */
} dcp_observation_t;

enum {
    DCP_REASON_START = 1,    /* first decision */
    DCP_REASON_ARGMIN = 2,   /* another arm is better by more than the hysteresis */
    DCP_REASON_JUMP = 4,     /* the bandwidth's mean began anew */
    DCP_REASON_RESIDUAL = 8, /* measured and predicted times part: CUSUM */
    DCP_REASON_ERROR = 16,   /* a precision is vetoed by its error */
    DCP_REASON_SLOPE = 32,   /* ... by the loss */
    DCP_REASON_SKIPPED = 64, /* the step was not finite: nothing was learnt of it */
};

typedef struct dcp_decision {
    int64_t step; /* the first step it holds for */
    dcp_arm_t arm;
    double lr_factor; /* of the learning rate; 1 at multiple 1 */
    int32_t reasons;  /* DCP_REASON_... */
    int32_t changed;  /* the arm is another than before */
    /* What it was taken from; NaN: not known yet. */
    double bandwidth;         /* bytes a second of all that moves, running mean */
    double latency_s;         /* of a call, running mean */
    double noise_tokens;      /* B_s used */
    double noise_sorted_bias; /* of that, by sorting: within steps over between steps */
    double compute_s;         /* t_c of multiple 1 */
    double predicted_s;       /* of the next step */
    double objective;         /* J of the arm, over S_min */
    double best_objective;    /* least J of what the policy may choose */
    double error[DCP_PRECISION_COUNT]; /* w1 used */
} dcp_decision_t;

/* Whoever runs the steps. */
typedef struct dcp_control_world {
    void *context;
    /* What the step that just ended showed. */
    dcp_status_t (*observe)(void *context, dcp_observation_t *observation_p);
    /* The decision of rank 0 becomes every rank's, and holds from its step on.
     * *decision_p gets it. */
    dcp_status_t (*apply)(void *context, dcp_decision_t *decision_p);
    /* Bytes that a rank receives in a reduction in this precision. */
    double (*reduce_bytes)(void *context, dcp_precision_t precision);
    /* Calls that a reduction takes; NULL: none whose latency shows. */
    double (*reduce_calls)(void *context, dcp_precision_t precision);
    /* Seconds that quantising and decoding takes, calibrated or measured. */
    double (*codec_s)(void *context, dcp_precision_t precision);
    /* Seconds of communication that nothing hides, where moving and coding take comm_s
     * and the computation of a step of multiple 1 compute_s; NULL: all of comm_s. */
    double (*exposed_s)(void *context, double comm_s, double compute_s);
} dcp_control_world_t;

typedef struct dcp_controller dcp_controller_t;

/* ERR_ARG: an option breaks its rule, named. Zero in hysteresis, bandwidth_mean, jump,
 * noise_mean, error_limit (doubles) and in the counts means what stands behind the
 * colon; hysteresis < 0: none. */
dcp_status_t dcp_controller_create(const dcp_control_options_t *options,
                                   dcp_controller_t **controller_p);
void dcp_controller_destroy(dcp_controller_t *controller);

/* The arm of step 0. */
dcp_decision_t dcp_controller_start(const dcp_controller_t *controller);

/* observe, decide, apply; what apply made of the decision is what holds, also for this
 * controller's state. ERR_MISMATCH: it is not on the grid. */
dcp_status_t dcp_controller_step(dcp_controller_t *controller,
                                 const dcp_control_world_t *world,
                                 dcp_decision_t *decision_p);
/* Only decides: the world's three estimates are asked, nothing is observed or applied.
 */
dcp_status_t dcp_controller_decide(dcp_controller_t *controller,
                                   const dcp_control_world_t *world,
                                   const dcp_observation_t *observation,
                                   dcp_decision_t *decision_p);

/* The whole state as plain words, for checkpoints: bitwise the same afterwards. */
int64_t dcp_controller_state_count(const dcp_controller_t *controller);
void dcp_controller_save(const dcp_controller_t *controller, uint64_t *words);
/* ERR_ARG: of another version or grid. */
dcp_status_t dcp_controller_load(dcp_controller_t *controller, const uint64_t *words,
                                 int64_t count);

/* Parts of it, for tests, the simulator and Python. */

/* S / S_min. batch, noise_tokens in tokens; w1, w2 relative squared errors. */
double dcp_steps_factor(double batch, double noise_tokens, double w1, double w2,
                        int32_t rank_count);
double dcp_lr_factor(dcp_lr_rule_t rule, double multiple, double noise_tokens,
                     double tokens_per_step);
/* Seconds of communication that stick out of a backward pass of backward_s, where
 * gradients go in bucket_count equal buckets, each as soon as it is ready; 1: none
 * hides. */
double dcp_exposed_s(double comm_s, double backward_s, int32_t bucket_count);
/* Noise scale from one step's numbers: trace of the covariance per token and the
 * squared length of the true gradient; their ratio is B_s. K >= 2, else NaN. */
typedef struct dcp_noise {
    double trace, square;
} dcp_noise_t;
dcp_noise_t dcp_noise_estimate(int64_t micro_batch_count, int64_t tokens,
                               double micro_squares, double mean_squares,
                               double reduce_error);

#ifdef __cplusplus
}
#endif
#endif
