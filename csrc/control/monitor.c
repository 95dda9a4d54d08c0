/* Does a step take what was predicted? A CUSUM (Page 1954) of log(measured / predicted)
 * notices what is small and lasts.
 *
 * An alarm starts the bandwidth's mean anew. Where alarms go on although bandwidth is
 * what was assumed, the model of this arm is wrong (its codec, contention): the arm
 * gets a factor of its own, which fades, so that it is tried again. */
#include "control_private.h"

#include <math.h>

static const double SLACK = 0.15;    /* of the log that an alarm ignores */
static const double THRESHOLD = 1.0; /* sum of the rest */
static const double FADE = 0.99;     /* of corrections, a step */
static const double LARGEST = 1.4;   /* of a log correction: a factor of 4 */

int32_t
control_monitor(dcp_controller_t *controller, double predicted_s, double measured_s,
                int32_t explained, double log_bandwidth)
{
    control_state_t *state = &controller->state;
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        for (int32_t a = 0; a < DCP_CONTROL_MULTIPLES; a++) {
            state->correction[q][a] *= FADE;
        }
    }
    if (!(predicted_s > 0) || !(measured_s > 0)) {
        return 0;
    }
    double off = log(measured_s / predicted_s);
    state->above = fmax(0.0, state->above + off - SLACK);
    state->below = fmax(0.0, state->below - off - SLACK);
    if (state->above < THRESHOLD && state->below < THRESHOLD) {
        return 0;
    }
    state->above = state->below = 0;
    if (explained) {
        state->log_bandwidth = (control_mean_t){.sum = log_bandwidth, .weight = 1};
        state->alarms = 0;
        return DCP_REASON_RESIDUAL;
    }
    if (++state->alarms >= 2) {
        double *correction = &state->correction[state->precision][state->multiple];
        *correction = fmax(-LARGEST, fmin(LARGEST, *correction + off));
        state->alarms = 0;
    }
    return DCP_REASON_RESIDUAL;
}
