/* Seconds to the target, up to S_min, of an arm; and the arm that a policy wants.
 *
 *   J(q, A) = S(B, q) T(q, A)
 *   T(q, A) = A t_c + exposed(gather + reduce(q) + codec(q)) + rest
 *
 * Gathering and reducing take their calls' latency and their bytes over the bandwidth.
 * The grid is small, so all of it is priced at every step. An arm is left only for one
 * that promises a J less by the hysteresis, which keeps noise in the measurements from
 * moving the arm; or for one that promises less than that for so many steps in a row
 * that it adds up, since what lasts is no noise. A policy that tunes a knob alone
 * prices it with the other where that policy believes it to be: neither half of
 * `decoupled` sees what the other does. */
#include "control_private.h"

#include <math.h>
#include <stddef.h>

/* Hystereses that small promises may add up to, step by step, before they count. */
static const double PATIENCE = 6.0;

double
dcp_exposed_s(double comm_s, double backward_s, int32_t bucket_count)
{
    if (bucket_count <= 1) {
        return comm_s;
    }
    double n = bucket_count, last_s = comm_s / n;
    double rest_s = comm_s - (1.0 - 1.0 / n) * backward_s;
    return rest_s > last_s ? rest_s : last_s;
}

double
control_noise_tokens(const dcp_controller_t *controller)
{
    const control_state_t *state = &controller->state;
    if (state->noise_count == 0) {
        return NAN;
    }
    const dcp_control_options_t *options = &controller->options;
    double trace = fmax(0.0, control_mean_value(&state->trace));
    double square = control_mean_value(&state->square);
    /* beyond a thousand of the largest batches the choice is the same */
    double most = 1000.0 * (double)options->tokens_per_step
                  * (double)controller->multiples[options->multiple_count - 1];
    return square * most > trace ? trace / square : most;
}

static double
tokens_of(const dcp_controller_t *controller)
{
    const control_mean_t *mean = &controller->state.tokens;
    return mean->weight > 0 ? control_mean_value(mean)
                            : (double)controller->options.tokens_per_step;
}

double
control_latency_s(const dcp_controller_t *controller, const dcp_control_world_t *world,
                  int32_t precision)
{
    const control_state_t *state = &controller->state;
    if (state->latency_s.weight == 0 || world->reduce_calls == NULL) {
        return 0.0;
    }
    dcp_precision_t which = controller->precisions[precision];
    double calls = state->gather_calls + world->reduce_calls(world->context, which);
    return calls * control_mean_value(&state->latency_s);
}

double
control_step_s(const dcp_controller_t *controller, const dcp_control_world_t *world,
               int32_t precision, int32_t multiple, double tokens)
{
    const control_state_t *state = &controller->state;
    if (state->token_s.weight == 0) {
        return NAN;
    }
    dcp_precision_t which = controller->precisions[precision];
    double usual = tokens_of(controller), token_s = control_mean_value(&state->token_s);
    double compute_s =
        token_s * (tokens >= 0 ? tokens : usual * controller->multiples[multiple]);
    double bytes = state->gather_bytes + world->reduce_bytes(world->context, which);
    double comm_s = world->codec_s(world->context, which)
                    + control_latency_s(controller, world, precision);
    if (bytes > 0 && state->log_bandwidth.weight > 0) {
        comm_s += bytes / exp(control_mean_value(&state->log_bandwidth));
    }
    if (world->exposed_s != NULL) {
        comm_s = world->exposed_s(world->context, comm_s, token_s * usual);
    }
    double rest_s = state->rest_s.weight > 0 ? control_mean_value(&state->rest_s) : 0.0;
    return (compute_s + comm_s + rest_s) * exp(state->correction[precision][multiple]);
}

double
control_objective(const dcp_controller_t *controller, const dcp_control_world_t *world,
                  int32_t precision, int32_t multiple)
{
    double batch = tokens_of(controller) * controller->multiples[multiple];
    double noise = control_noise_tokens(controller);
    double error = control_error(controller, precision);
    /* before anything is known: a batch of the noise scale */
    noise = isnan(noise) ? tokens_of(controller) : noise;
    error = isnan(error) ? 0.0 : error;
    return dcp_steps_factor(batch, noise, error, 0.0, controller->options.rank_count)
           * control_step_s(controller, world, precision, multiple, -1.0);
}

/* What a policy may choose from, and where it is now. */
typedef struct search {
    int32_t precision, multiple;           /* present */
    int32_t all_precisions, all_multiples; /* 1: any; 0: the present one only */
} search_t;

/* The best of it, or the present one where that is as good but for the hysteresis.
 * *promised_p: what was promised since the present one was last the best. */
static search_t
argmin(const dcp_controller_t *controller, const dcp_control_world_t *world,
       search_t search, double *promised_p, double *best_p)
{
    const dcp_control_options_t *options = &controller->options;
    search_t best = search;
    double least = INFINITY;
    for (int32_t q = 0; q < options->precision_count; q++) {
        for (int32_t a = 0; a < options->multiple_count; a++) {
            int32_t open = (search.all_precisions || q == search.precision)
                           && (search.all_multiples || a == search.multiple);
            if (!open || !control_allowed(controller, q)) {
                continue;
            }
            double objective = control_objective(controller, world, q, a);
            if (objective < least) {
                least = objective;
                best.precision = q;
                best.multiple = a;
            }
        }
    }
    *best_p = least;
    double present =
        control_objective(controller, world, search.precision, search.multiple);
    double promise = 1.0 - least / present;
    *promised_p = promise > 0 ? *promised_p + promise : 0.0;
    int32_t stay = control_allowed(controller, search.precision)
                   && !(promise > options->hysteresis)
                   && !(*promised_p > PATIENCE * options->hysteresis);
    *promised_p = stay ? *promised_p : 0.0;
    return stay ? search : best;
}

void
control_choose(dcp_controller_t *controller, const dcp_control_world_t *world,
               int32_t *precision_p, int32_t *multiple_p, double *best_p)
{
    control_state_t *state = &controller->state;
    const dcp_control_options_t *options = &controller->options;
    int32_t q = (int32_t)state->precision, a = (int32_t)state->multiple;
    int32_t noise_known = state->noise_count >= options->noise_steps;
    int32_t time_known = state->token_s.weight > 0;
    dcp_policy_t policy = options->policy;
    *precision_p = q;
    *multiple_p = a;
    *best_p = time_known ? control_objective(controller, world, q, a) : NAN;
    if (policy == DCP_POLICY_STATIC || !time_known) {
        return;
    }
    if (policy == DCP_POLICY_JOINT) {
        search_t found = argmin(controller, world, (search_t){q, a, 1, noise_known},
                                &state->promised[0], best_p);
        *precision_p = found.precision;
        *multiple_p = found.multiple;
        return;
    }
    if (policy != DCP_POLICY_ACCUMULATION) {
        *precision_p = argmin(controller, world, (search_t){q, 0, 1, 0},
                              &state->promised[0], best_p)
                           .precision;
    }
    if (policy != DCP_POLICY_PRECISION) {
        search_t search = {controller->base, a, 0, noise_known};
        *multiple_p =
            argmin(controller, world, search, &state->promised[1], best_p).multiple;
    }
}
