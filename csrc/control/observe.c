/* What a step showed goes into the running means.
 *
 * Times are per token, since steps of one budget differ in tokens. Bandwidth is that of
 * all that moved in the step, without the latency of its calls. Noise numbers take the
 * optimizer's own norm where it has one: Adam divides by its second moment, so noise
 * counts there. They are averaged as shares of the step's own |g|^2: gradients shrink
 * tenfold in the first steps of a run, which would else outweigh all later ones. What
 * is NaN was not measured and changes nothing. */
#include "control_private.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

static const double TIME_MEAN = 0.2;
static const double ERROR_MEAN = 0.2;

static int32_t
uses_adam(const dcp_controller_t *controller, double adam)
{
    return controller->options.lr_rule == DCP_LR_SQRT_GAIN && !isnan(adam);
}

/* What was learnt in one metric does not go on in the other. */
static void
choose_metric(dcp_controller_t *controller, const dcp_observation_t *o)
{
    control_state_t *state = &controller->state;
    if (state->in_adam || !uses_adam(controller, o->adam_micro_squares)) {
        return;
    }
    state->in_adam = 1;
    state->noise_count = 0;
    state->trace = state->square = (control_mean_t){0};
    memset(state->error, 0, sizeof state->error);
}

/* A step of one micro-batch, as a long sequence may fill it, shows no noise inside.
 * Left out, noise would be that of steps of short sequences alone. So it and the step
 * before are the two micro-batches of one. That the gradient moves between them counts
 * as noise: too much of it for large steps, but those have micro-batches. */
static dcp_noise_t
noise_of_pair(const control_state_t *state, const dcp_observation_t *o, int32_t adam,
              double clean, double error, double *size_p)
{
    double before = state->last_tokens, tokens = (double)o->tokens;
    double difference = adam ? o->adam_step_difference : o->step_difference;
    if (before < 1 || tokens < 1) {
        return (dcp_noise_t){NAN, NAN};
    }
    difference -= state->last_error[adam] + error;
    difference = difference < 0 ? 0 : difference; /* NaN stays */
    double both = before + tokens;
    double squares = before * state->last_squares[adam] + tokens * clean;
    double mean = (squares - before * tokens / both * difference) / both;
    *size_p = squares / both;
    return dcp_noise_estimate(2, (int64_t)both, squares, mean, 0.0);
}

static void
learn_noise(dcp_controller_t *controller, const dcp_observation_t *o)
{
    control_state_t *state = &controller->state;
    int32_t adam = uses_adam(controller, o->adam_micro_squares);
    const double squares[2] = {o->mean_squares, o->adam_mean_squares};
    const double errors[2] = {o->reduce_error, o->adam_reduce_error};
    double size = squares[adam];
    dcp_noise_t noise =
        o->micro_batch_count == 1
            ? noise_of_pair(state, o, adam, size - errors[adam], errors[adam], &size)
            : dcp_noise_estimate(o->micro_batch_count, o->tokens,
                                 adam ? o->adam_micro_squares : o->micro_squares, size,
                                 errors[adam]);
    if (isfinite(noise.trace / size) && isfinite(noise.square / size)) {
        control_mean_add(&state->trace, noise.trace / size,
                         controller->options.noise_mean);
        control_mean_add(&state->square, noise.square / size,
                         controller->options.noise_mean);
        state->noise_count++;
    }
    /* E |g_t - g_(t-1)|^2 = tr (1 / N_t + 1 / N_(t-1)): steps are drawn at random,
     * while micro-batches are sorted by length */
    noise = dcp_noise_estimate(o->micro_batch_count, o->tokens, o->micro_squares,
                               o->mean_squares, o->reduce_error);
    double tokens = (double)o->tokens;
    if (isfinite(o->step_difference) && state->last_tokens > 0
        && isfinite(noise.trace / o->mean_squares)) {
        double inverse = o->mean_squares * (1.0 / tokens + 1.0 / state->last_tokens);
        control_mean_add(&state->between, o->step_difference / inverse,
                         controller->options.noise_mean);
        control_mean_add(&state->within, noise.trace / o->mean_squares,
                         controller->options.noise_mean);
    }
    state->last_tokens = tokens;
    for (int32_t m = 0; m < 2; m++) {
        state->last_squares[m] = squares[m] - errors[m];
        state->last_error[m] = errors[m];
    }
}

static void
learn_errors(dcp_controller_t *controller, const dcp_observation_t *o)
{
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        double error =
            uses_adam(controller, o->adam_error[q]) ? o->adam_error[q] : o->error[q];
        if (isfinite(error)) {
            control_mean_add(&controller->state.error[q], error, ERROR_MEAN);
        }
    }
}

static double
or_zero(double x)
{
    return isfinite(x) ? x : 0.0;
}

/* Bytes of a step over the seconds that they took. */
static double
log_bandwidth_of(const dcp_controller_t *controller, const dcp_control_world_t *world,
                 double bytes, double move_s)
{
    int32_t precision = (int32_t)controller->state.precision;
    double latency_s = control_latency_s(controller, world, precision);
    /* latency scatters too: where it is nearly all, something is left for the bytes */
    return log(bytes / fmax(move_s - latency_s, 1e-3 * move_s));
}

int32_t
control_learn(dcp_controller_t *controller, const dcp_control_world_t *world,
              const dcp_observation_t *o)
{
    control_state_t *state = &controller->state;
    int32_t reasons = 0, explained = 0;
    double log_bandwidth = NAN;
    double bytes = or_zero(o->reduce_bytes) + or_zero(o->gather_bytes);
    double move_s = or_zero(o->reduce_s) + or_zero(o->gather_s);
    double predicted_s = control_step_s(controller, world, (int32_t)state->precision,
                                        (int32_t)state->multiple, (double)o->tokens);
    state->gather_bytes = or_zero(o->gather_bytes);
    state->gather_calls = (double)o->gather_calls;
    if (isfinite(o->latency_s)) {
        control_mean_add(&state->latency_s, o->latency_s, TIME_MEAN);
    }
    if (bytes > 0 && move_s > 0) {
        log_bandwidth = log_bandwidth_of(controller, world, bytes, move_s);
        double off = log_bandwidth - control_mean_value(&state->log_bandwidth);
        explained = fabs(off) > 0.5 * controller->options.jump;
        if (control_bandwidth_add(controller, log_bandwidth)) {
            reasons |= DCP_REASON_JUMP;
        }
    }
    if (o->tokens > 0 && isfinite(o->compute_s) && isfinite(o->step_s)) {
        double tokens = (double)o->tokens;
        control_mean_add(&state->token_s, o->compute_s / tokens, TIME_MEAN);
        control_mean_add(&state->tokens, tokens / o->arm.multiple, TIME_MEAN);
        double comm_s = move_s + or_zero(o->codec_s);
        if (world->exposed_s != NULL) {
            comm_s = world->exposed_s(world->context, comm_s,
                                      o->compute_s / o->arm.multiple);
        }
        control_mean_add(&state->rest_s, fmax(0.0, o->step_s - o->compute_s - comm_s),
                         TIME_MEAN);
    }
    reasons |=
        control_monitor(controller, predicted_s, o->step_s, explained, log_bandwidth);
    choose_metric(controller, o);
    learn_noise(controller, o);
    learn_errors(controller, o);
    state->observed++;
    return reasons;
}
