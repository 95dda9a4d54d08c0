/* Shared by the files of csrc/control. */
#ifndef CONTROL_PRIVATE_H
#define CONTROL_PRIVATE_H

#include "dcp/control.h"

/* A running mean that starts unbiased: value = sum / weight. Both 0: nothing yet. */
typedef struct control_mean {
    double sum, weight;
} control_mean_t;

/* Points (x, loss) since the last change to fewer bits. */
typedef struct control_line {
    double count, x, xx, loss, loss_loss, x_loss;
} control_line_t;

/* All that changes from step to step. Words of 64 bits only: it is saved as they are.
 */
typedef struct control_state {
    int64_t observed;            /* steps that were learnt from */
    int64_t arm_steps;           /* since the arm changed */
    int64_t precision, multiple; /* of the arm: places in the grid */
    double lr_factor;

    control_mean_t token_s;            /* seconds of computing a token */
    control_mean_t tokens;             /* of multiple 1 */
    control_mean_t rest_s;             /* of a step: what nothing explains */
    double gather_bytes, gather_calls; /* of the latest step */

    control_mean_t latency_s; /* of a call */
    control_mean_t log_bandwidth;
    int64_t jumps;   /* in a row, of one direction: its sign */
    double jump_sum; /* of their logs */

    int64_t in_adam; /* noise and errors are in the optimizer's metric */
    int64_t noise_count;
    control_mean_t trace, square;   /* of steps: gradient noise */
    control_mean_t within, between; /* traces: inside steps, from step to step */
    double last_tokens;
    /* Of that step, plain and in the optimizer's metric (NaN: unknown): |g|^2 without
     * the errors of codes, and those. */
    double last_squares[2], last_error[2];
    control_mean_t error[DCP_PRECISION_COUNT]; /* w1 */

    double above, below; /* CUSUM of log(measured / predicted) */
    int64_t alarms;      /* in a row that bandwidth does not explain */
    double correction[DCP_PRECISION_COUNT][DCP_CONTROL_MULTIPLES]; /* log, of arms */

    double promised[2]; /* shares of J, of steps in a row: by both or precisions; by
                           multiples */

    control_line_t line;
    double line_tokens;                  /* since the change */
    int64_t vetoed[DCP_PRECISION_COUNT]; /* steps that a precision is left for */
} control_state_t;

struct dcp_controller {
    dcp_control_options_t options; /* arrays are own copies, below */
    dcp_precision_t precisions[DCP_PRECISION_COUNT];
    int32_t multiples[DCP_CONTROL_MULTIPLES];
    int32_t base; /* place in precisions */
    control_state_t state;
};

static inline void
control_mean_add(control_mean_t *mean, double x, double weight)
{
    mean->sum += weight * (x - mean->sum);
    mean->weight += weight * (1.0 - mean->weight);
}

/* NaN before the first. */
static inline double
control_mean_value(const control_mean_t *mean)
{
    return mean->sum / mean->weight;
}

/* observe.c: the observation goes into the means. Returns reasons. */
int32_t control_learn(dcp_controller_t *controller, const dcp_control_world_t *world,
                      const dcp_observation_t *observation);
/* bandwidth.c: 1 where the mean began anew. */
int32_t control_bandwidth_add(dcp_controller_t *controller, double log_bandwidth);
/* monitor.c: measured against predicted; reasons. explained: the bandwidth of the step
 * was far from its mean. */
int32_t control_monitor(dcp_controller_t *controller, double predicted_s,
                        double measured_s, int32_t explained, double log_bandwidth);
/* veto.c */
int32_t control_veto(dcp_controller_t *controller,
                     const dcp_observation_t *observation);
void control_veto_restart(control_state_t *state);
/* w1 of a precision; NaN: not measured yet. */
double control_error(const dcp_controller_t *controller, int32_t precision);
int32_t control_allowed(const dcp_controller_t *controller, int32_t precision);

/* objective.c. B_s in tokens: NaN before it is known. */
double control_noise_tokens(const dcp_controller_t *controller);
/* Seconds that the calls of a step in a precision take whatever they move. */
double control_latency_s(const dcp_controller_t *controller,
                         const dcp_control_world_t *world, int32_t precision);
/* Seconds of a step of `tokens` (< 0: as many as usual) at an arm. */
double control_step_s(const dcp_controller_t *controller,
                      const dcp_control_world_t *world, int32_t precision,
                      int32_t multiple, double tokens);
double control_objective(const dcp_controller_t *controller,
                         const dcp_control_world_t *world, int32_t precision,
                         int32_t multiple);
/* The arm that the policy wants now, hysteresis included: places; *best_p: least J of
 * what it may choose. */
void control_choose(dcp_controller_t *controller, const dcp_control_world_t *world,
                    int32_t *precision_p, int32_t *multiple_p, double *best_p);

#endif
