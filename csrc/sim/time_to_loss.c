/* The experiment: steps until the loss is at the target, under a policy.
 *
 * Every step takes what step_model.c says and makes 1 / S of progress, S by the true
 * noise scale of the present loss. The controller is asked through its table after
 * every step, with observations as training would give them: measured times scatter by
 * `time_noise`, the two squared norms by what K micro-batches of noise in
 * `noise_dimensions` dimensions scatter, errors of precisions by a tenth. The last step
 * counts as far as the target.
 *
 * Draws depend on (seed, step, what for), so that policies meet the same background
 * jobs, and runs repeat bit for bit. Cost of a step: a transfer a bucket and the grid.
 */
#include "experiment.h"

#include "dcp/alloc.h"
#include "dcp/rng.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const double ERROR_NOISE = 0.1; /* of the log of a measured w */
static const double LOSS_NOISE = 0.02;

typedef struct experiment {
    const dcp_time_to_loss_options_t *options;
    step_model_t model;
    dcp_observation_t observation;
    dcp_rng_t rng;
} experiment_t;

static dcp_status_t
observe(void *context, dcp_observation_t *observation_p)
{
    *observation_p = ((experiment_t *)context)->observation;
    return DCP_OK;
}

static dcp_status_t
apply(void *context, dcp_decision_t *decision_p)
{
    (void)context; /* one controller decides for all ranks */
    (void)decision_p;
    return DCP_OK;
}

static double
reduce_bytes(void *context, dcp_precision_t precision)
{
    return step_bytes(((experiment_t *)context)->options, precision);
}

static double
reduce_calls(void *context, dcp_precision_t precision)
{
    const experiment_t *x = context;
    (void)precision;
    return step_calls(&x->model);
}

static double
codec_s(void *context, dcp_precision_t precision)
{
    return step_codec_s(((experiment_t *)context)->options, precision);
}

static double
exposed_s(void *context, double comm_s, double compute_s)
{
    return step_exposed_s(((experiment_t *)context)->options, comm_s, compute_s);
}

/* What the step showed, with the scatter of real measurements. */
static void
measure(experiment_t *x, int64_t step, dcp_arm_t arm, const step_times_t *times,
        double loss)
{
    const dcp_time_to_loss_options_t *o = x->options;
    dcp_rng_t *rng = &x->rng;
    double batch = (double)o->control.tokens_per_step * arm.multiple;
    double count = o->micro_batches * arm.multiple, each = batch / count;
    double noise = noise_at(&o->loss, loss), d = o->noise_dimensions;
    double time = o->time_noise;
    dcp_rng_init(rng, o->seed, (uint64_t)step);
    double micro =
        1.0 + noise / each * (1.0 + sqrt(2.0 / (d * count)) * dcp_rng_normal(rng));
    double mean = 1.0 + noise / batch * (1.0 + sqrt(2.0 / d) * dcp_rng_normal(rng))
                  + 2.0 * sqrt(noise / batch / d) * dcp_rng_normal(rng);
    x->observation = (dcp_observation_t){
        .step = step,
        .arm = arm,
        .tokens = (int64_t)batch,
        .step_s = times->step_s * exp(0.5 * time * dcp_rng_normal(rng)),
        .compute_s = times->compute_s * exp(0.5 * time * dcp_rng_normal(rng)),
        .codec_s = times->codec_s,
        .reduce_s = times->move_s * exp(time * dcp_rng_normal(rng)),
        .reduce_bytes = times->bytes,
        .latency_s = o->network.latency_s,
        .loss = loss + LOSS_NOISE * dcp_rng_normal(rng),
        .micro_batch_count = (int64_t)count,
        .micro_squares = batch * micro,
        .mean_squares = mean,
        .adam_micro_squares = NAN,
        .adam_mean_squares = NAN,
        .adam_reduce_error = NAN,
        .step_difference = NAN,
        .adam_step_difference = NAN,
    };
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        x->observation.error[q] = o->error[q] * exp(ERROR_NOISE * dcp_rng_normal(rng));
        x->observation.adam_error[q] = NAN;
    }
}

static dcp_status_t
check(const dcp_time_to_loss_options_t *o)
{
    const dcp_loss_model_t *loss = &o->loss;
    if (!(loss->knee > 0) || !(loss->power > 0) || !(loss->start > loss->floor)
        || !(loss->noise_scale >= 0) || !(loss->noise_power > 0)) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "loss model: knee = %g, power = %g and noise_power = %g must be "
            "> 0, start = %g above floor = %g, noise_scale = %g >= 0",
            loss->knee, loss->power, loss->noise_power, loss->start, loss->floor,
            loss->noise_scale);
    }
    if (!(o->target_loss > loss->floor)) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "target loss %g cannot be reached: the loss model falls towards its floor "
            "of %g and no further",
            o->target_loss, loss->floor);
    }
    if (!(o->target_loss < loss->start)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "target loss %g must be below %g, where the loss model starts",
                        o->target_loss, loss->start);
    }
    if (o->rank_count < 1 || !(o->compute_s > 0) || !(o->parameter_count >= 1)
        || !(o->micro_batches >= 1) || !(o->noise_dimensions >= 1)
        || !(o->time_noise >= 0)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "rank_count = %d, parameter_count = %g, micro_batches = %g, "
                        "noise_dimensions = %g must be >= 1, compute_s = %g > 0, "
                        "time_noise = %g >= 0",
                        (int)o->rank_count, o->parameter_count, o->micro_batches,
                        o->noise_dimensions, o->compute_s, o->time_noise);
    }
    if (!(o->backward_share >= 0 && o->backward_share <= 1) || !(o->optimizer_s >= 0)
        || isinf(o->optimizer_s) || !(o->codec_bytes_per_s >= 0) || isinf(o->compute_s)
        || o->bucket_count > 65536) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "backward_share = %g must lie in [0, 1], optimizer_s = %g and "
                        "codec_bytes_per_s = %g be >= 0, compute_s = %g finite, "
                        "bucket_count = %d <= 65536",
                        o->backward_share, o->optimizer_s, o->codec_bytes_per_s,
                        o->compute_s, (int)o->bucket_count);
    }
    if (o->background_count < 0 || o->background_count > 64) {
        return DCP_FAIL(DCP_ERR_ARG, "background_count = %d must lie in 0..64",
                        (int)o->background_count);
    }
    return DCP_OK;
}

/* The grid breaks no rule, whoever chooses from it. */
static dcp_status_t
check_grid(const dcp_time_to_loss_options_t *o)
{
    dcp_control_options_t control = o->control;
    dcp_controller_t *controller;
    int32_t policy = (int32_t)control.policy;
    int32_t known = 0;
    if (policy == DCP_POLICY_ORACLE || policy == DCP_POLICY_FIXED) {
        control.policy = DCP_POLICY_STATIC;
    }
    DCP_TRY(dcp_controller_create(&control, &controller));
    dcp_controller_destroy(controller);
    for (int32_t q = 0; q < o->control.precision_count; q++) {
        for (int32_t a = 0; a < o->control.multiple_count; a++) {
            known |= o->fixed.precision == o->control.precisions[q]
                     && o->fixed.multiple == o->control.multiples[a];
        }
    }
    if (policy == DCP_POLICY_FIXED && !known) {
        const char *name = dcp_precision_name(o->fixed.precision);
        return DCP_FAIL(DCP_ERR_ARG, "fixed arm %s x %d is not in the grid",
                        name != NULL ? name : "(none)", (int)o->fixed.multiple);
    }
    return DCP_OK;
}

/* Where an arm stands in the shares of the result. */
static double *
share_of(const dcp_time_to_loss_options_t *o, dcp_time_to_loss_result_t *result,
         dcp_arm_t arm)
{
    for (int32_t a = 0; a < o->control.multiple_count; a++) {
        if (o->control.multiples[a] == arm.multiple) {
            return &result
                        ->arm_share[(int32_t)arm.precision * DCP_CONTROL_MULTIPLES + a];
        }
    }
    return &result->arm_share[(int32_t)arm.precision * DCP_CONTROL_MULTIPLES];
}

typedef struct pilot {
    dcp_controller_t *controller; /* NULL: the oracle, or a fixed arm */
    oracle_t *oracle;             /* NULL: none */
} pilot_t;

static dcp_status_t
make_pilot(const dcp_time_to_loss_options_t *o, pilot_t *pilot)
{
    *pilot = (pilot_t){0};
    switch ((int32_t)o->control.policy) {
    case DCP_POLICY_FIXED:
        return DCP_OK;
    case DCP_POLICY_ORACLE: {
        void *memory;
        DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(oracle_t), "times of arms", &memory));
        pilot->oracle = memory;
        return oracle_tabulate(o, pilot->oracle);
    }
    default:
        return dcp_controller_create(&o->control, &pilot->controller);
    }
}

static void
clear_pilot(pilot_t *pilot)
{
    dcp_controller_destroy(pilot->controller);
    dcp_free(pilot->oracle);
}

static dcp_status_t
run(const dcp_time_to_loss_options_t *o, experiment_t *x, pilot_t *pilot,
    dcp_time_to_loss_watch_t watch, void *context, dcp_time_to_loss_result_t *result)
{
    const dcp_control_world_t world = {
        .context = x,
        .observe = observe,
        .apply = apply,
        .reduce_bytes = reduce_bytes,
        .reduce_calls = reduce_calls,
        .codec_s = codec_s,
        .exposed_s = exposed_s,
    };
    double target = progress_at(&o->loss, o->target_loss), progress = 0, now_s = 0;
    int64_t limit = o->step_limit > 0 ? o->step_limit : 10 * 1000 * 1000;
    dcp_arm_t arm = o->fixed;
    dcp_decision_t decision = {0};
    if (pilot->controller != NULL) {
        decision = dcp_controller_start(pilot->controller);
        arm = decision.arm;
    }
    while (progress < target) {
        if (result->steps == limit) {
            return DCP_FAIL(DCP_ERR_TIMEOUT,
                            "the target loss %g is not reached in %" PRId64 " steps",
                            o->target_loss, limit);
        }
        double loss = loss_at(&o->loss, progress), noise = noise_at(&o->loss, loss);
        uint64_t present = dcp_network_present(x->model.network);
        if (pilot->oracle != NULL) {
            dcp_arm_t before = arm;
            arm = oracle_choose(o, pilot->oracle, noise, present);
            result->change_count += result->steps > 0
                                    && (arm.precision != before.precision
                                        || arm.multiple != before.multiple);
        }
        step_times_t times;
        DCP_TRY(step_model_run(&x->model, now_s, arm, &times));
        double batch = (double)o->control.tokens_per_step * arm.multiple;
        double gain = 1.0
                      / dcp_steps_factor(batch, noise, o->error[arm.precision], 0.0,
                                         o->rank_count);
        double part = progress + gain >= target ? (target - progress) / gain : 1.0;
        progress = part < 1.0 ? target : progress + gain;
        result->time_s += part * times.step_s;
        result->tokens += part * batch;
        *share_of(o, result, arm) += part * times.step_s;
        now_s = times.end_s;
        measure(x, result->steps, arm, &times, loss);
        result->steps++;
        if (pilot->controller != NULL) {
            DCP_TRY(dcp_controller_step(pilot->controller, &world, &decision));
            result->change_count += decision.changed;
        }
        if (watch != NULL) {
            watch(context, now_s, loss, present, &x->observation, &decision);
        }
        arm = pilot->controller != NULL ? decision.arm : arm;
    }
    for (size_t i = 0; i < sizeof result->arm_share / sizeof result->arm_share[0];
         i++) {
        result->arm_share[i] /= result->time_s > 0 ? result->time_s : 1.0;
    }
    return DCP_OK;
}

dcp_status_t
dcp_time_to_loss(const dcp_time_to_loss_options_t *options,
                 dcp_time_to_loss_watch_t watch, void *context,
                 dcp_time_to_loss_result_t *result_p)
{
    DCP_TRY(check(options));
    DCP_TRY(check_grid(options));
    experiment_t x = {.options = options};
    pilot_t pilot;
    memset(result_p, 0, sizeof *result_p);
    dcp_status_t status = make_pilot(options, &pilot);
    if (status == DCP_OK) {
        status = step_model_create(options, options->background_count, 1.0, &x.model);
    }
    if (status == DCP_OK) {
        status = run(options, &x, &pilot, watch, context, result_p);
    }
    step_model_clear(&x.model);
    clear_pilot(&pilot);
    return status;
}
