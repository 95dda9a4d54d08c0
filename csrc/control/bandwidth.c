/* The running mean of the logarithm of bandwidth, which follows what lasts and not what
 * passes.
 *
 * Others' traffic comes and goes in phases: within one, single steps scatter, and the
 * mean smooths them; at a border the bandwidth is another at once. Several samples in a
 * row far from the mean, all on one side, are such a border: the mean becomes theirs.
 */
#include "control_private.h"

#include <math.h>

int32_t
control_bandwidth_add(dcp_controller_t *controller, double log_bandwidth)
{
    control_state_t *state = &controller->state;
    const dcp_control_options_t *options = &controller->options;
    double off = state->log_bandwidth.weight > 0
                     ? log_bandwidth - control_mean_value(&state->log_bandwidth)
                     : 0.0;
    int64_t side = off > options->jump ? 1 : off < -options->jump ? -1 : 0;
    if (side == 0 || (side > 0) != (state->jumps > 0)) {
        state->jumps = 0;
        state->jump_sum = 0;
    }
    state->jumps += side;
    state->jump_sum += side != 0 ? log_bandwidth : 0;
    control_mean_add(&state->log_bandwidth, log_bandwidth, options->bandwidth_mean);
    if (state->jumps < options->jump_count && -state->jumps < options->jump_count) {
        return 0;
    }
    double count = fabs((double)state->jumps);
    state->log_bandwidth =
        (control_mean_t){.sum = state->jump_sum / count, .weight = 1};
    state->jumps = 0;
    state->jump_sum = 0;
    return 1;
}
