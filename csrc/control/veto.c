/* Precisions that are not to be used, whatever time they would save.
 *
 * By error: a relative squared error above the limit. By the loss: since the arm
 * changed to fewer bits, a line through (tokens, loss) rises by more standard errors
 * than the limit; then the precision is left for a while. A loss that is flat or falls
 * ever more slowly never does that. */
#include "control_private.h"

#include <math.h>

enum { LEAST_POINTS = 12, MOST_POINTS = 64, VETO_STEPS = 64 };

double
control_error(const dcp_controller_t *controller, int32_t precision)
{
    dcp_precision_t which = controller->precisions[precision];
    if (which == DCP_PRECISION_FP32) {
        return 0.0;
    }
    const control_mean_t *mean = &controller->state.error[which];
    return mean->weight > 0 ? control_mean_value(mean) : NAN;
}

void
control_veto_restart(control_state_t *state)
{
    state->line = (control_line_t){0};
    state->line_tokens = 0;
}

/* Slope of the line over its standard error. */
static double
slope_score(const control_line_t *line)
{
    double n = line->count, mean_x = line->x / n, mean_y = line->loss / n;
    double xx = line->xx - n * mean_x * mean_x;
    double xy = line->x_loss - n * mean_x * mean_y;
    double yy = line->loss_loss - n * mean_y * mean_y;
    double slope = xy / xx;
    double error = sqrt(fmax(0.0, yy - slope * xy) / (n - 2) / xx);
    return xx > 0 && error > 0 ? slope / error : 0.0;
}

int32_t
control_veto(dcp_controller_t *controller, const dcp_observation_t *observation)
{
    control_state_t *state = &controller->state;
    const dcp_control_options_t *options = &controller->options;
    int32_t reasons = 0;
    for (int32_t q = 0; q < options->precision_count; q++) {
        state->vetoed[q] -= state->vetoed[q] > 0;
        if (q != controller->base
            && control_error(controller, q) > options->error_limit) {
            reasons |= q == state->precision ? DCP_REASON_ERROR : 0;
        }
    }
    if (options->slope_limit <= 0 || state->precision == controller->base) {
        return reasons;
    }
    control_line_t *line = &state->line;
    state->line_tokens += (double)observation->tokens;
    double x = state->line_tokens / (double)options->tokens_per_step;
    double loss = observation->loss;
    line->count++;
    line->x += x;
    line->xx += x * x;
    line->loss += loss;
    line->loss_loss += loss * loss;
    line->x_loss += x * loss;
    if (line->count >= LEAST_POINTS && slope_score(line) > options->slope_limit) {
        state->vetoed[state->precision] = VETO_STEPS;
        control_veto_restart(state);
        reasons |= DCP_REASON_SLOPE;
    } else if (line->count >= MOST_POINTS) {
        control_veto_restart(state);
    }
    return reasons;
}

int32_t
control_allowed(const dcp_controller_t *controller, int32_t precision)
{
    if (precision == controller->base) {
        return 1;
    }
    double error = control_error(controller, precision);
    return controller->state.vetoed[precision] == 0
           && error <= controller->options.error_limit; /* false where not measured */
}
