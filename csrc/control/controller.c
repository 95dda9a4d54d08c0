/* The controller's state machine: learn, veto, choose.
 *
 * A decision is a pure function of state, observation and the world's three estimates,
 * in double precision and a fixed order, so a log of them replays bit for bit. All
 * state is one struct of 64-bit words, saved as it is. Cost: the grid, some hundred
 * products, a step.
 *
 * The learning rate's factor changes where the multiple does, and where the noise scale
 * has drifted so far that it would be another by a tenth; between, it is constant. */
#include "control_private.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum { STATE_VERSION = 3, HEAD_WORDS = 2 };
static const double LR_DRIFT = 0.1;

static double
or_default(double value, double otherwise)
{
    return value == 0 ? otherwise : value;
}

static dcp_status_t
check_share(const char *name, double value, double most)
{
    if (!(value > 0 && value <= most)) {
        return DCP_FAIL(DCP_ERR_ARG, "%s = %g must lie in (0, %g]", name, value, most);
    }
    return DCP_OK;
}

static dcp_status_t
take_precisions(dcp_controller_t *controller, const dcp_control_options_t *options)
{
    if (options->precision_count < 1
        || options->precision_count > DCP_PRECISION_COUNT) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "precisions: %d given, must be 1 to %d distinct ones",
                        (int)options->precision_count, (int)DCP_PRECISION_COUNT);
    }
    controller->base = -1;
    for (int32_t i = 0; i < options->precision_count; i++) {
        dcp_precision_t precision = options->precisions[i];
        if (dcp_precision_name(precision) == NULL) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "precisions[%d] = %d is none of dcp_precision_t", (int)i,
                            (int)precision);
        }
        for (int32_t j = 0; j < i; j++) {
            if (controller->precisions[j] == precision) {
                return DCP_FAIL(DCP_ERR_ARG, "precisions: %s is there twice",
                                dcp_precision_name(precision));
            }
        }
        controller->precisions[i] = precision;
        controller->base = precision == options->base ? i : controller->base;
    }
    if (controller->base < 0) {
        const char *name = dcp_precision_name(options->base);
        return DCP_FAIL(DCP_ERR_ARG, "base = %s must be one of the precisions",
                        name != NULL ? name : "(none)");
    }
    return DCP_OK;
}

static dcp_status_t
take_multiples(dcp_controller_t *controller, const dcp_control_options_t *options)
{
    if (options->multiple_count < 1
        || options->multiple_count > DCP_CONTROL_MULTIPLES) {
        return DCP_FAIL(DCP_ERR_ARG, "batch multiples: %d given, must be 1 to %d",
                        (int)options->multiple_count, (int)DCP_CONTROL_MULTIPLES);
    }
    for (int32_t i = 0; i < options->multiple_count; i++) {
        int32_t least = i == 0 ? 1 : options->multiples[i - 1] + 1;
        if (options->multiples[i] < least) {
            return DCP_FAIL(
                DCP_ERR_ARG,
                "batch multiples[%d] = %d must be >= %d: they ascend, from 1", (int)i,
                (int)options->multiples[i], (int)least);
        }
        controller->multiples[i] = options->multiples[i];
    }
    return DCP_OK;
}

static dcp_status_t
take_numbers(dcp_control_options_t *o)
{
    if ((int32_t)o->policy < DCP_POLICY_STATIC
        || (int32_t)o->policy > DCP_POLICY_JOINT) {
        return DCP_FAIL(DCP_ERR_ARG, "policy %d is none of dcp_policy_t",
                        (int)o->policy);
    }
    if ((int32_t)o->lr_rule < DCP_LR_FIXED || (int32_t)o->lr_rule > DCP_LR_SQRT_GAIN) {
        return DCP_FAIL(DCP_ERR_ARG, "lr_rule %d is none of dcp_lr_rule_t",
                        (int)o->lr_rule);
    }
    if (o->tokens_per_step < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "tokens_per_step = %lld must be >= 1",
                        (long long)o->tokens_per_step);
    }
    if (o->rank_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "rank_count = %d must be >= 1",
                        (int)o->rank_count);
    }
    o->hysteresis = o->hysteresis < 0 ? 0.0 : or_default(o->hysteresis, 0.05);
    o->bandwidth_mean = or_default(o->bandwidth_mean, 0.3);
    o->jump = or_default(o->jump, 0.5);
    o->noise_mean = or_default(o->noise_mean, 0.05);
    o->error_limit = or_default(o->error_limit, 0.5);
    o->jump_count = o->jump_count == 0 ? 3 : o->jump_count;
    o->noise_steps = o->noise_steps == 0 ? 8 : o->noise_steps;
    o->dwell_steps = o->dwell_steps == 0 ? 2 : o->dwell_steps;
    if (!(o->hysteresis >= 0 && o->hysteresis < 1)) {
        return DCP_FAIL(DCP_ERR_ARG, "hysteresis = %g must lie in [0, 1)",
                        o->hysteresis);
    }
    DCP_TRY(check_share("bandwidth_mean", o->bandwidth_mean, 1));
    DCP_TRY(check_share("noise_mean", o->noise_mean, 1));
    DCP_TRY(check_share("jump", o->jump, 100));
    DCP_TRY(check_share("error_limit", o->error_limit, 1e6));
    if (o->jump_count < 1 || o->noise_steps < 1 || o->dwell_steps < 1) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "jump_count = %d, noise_steps = %d, dwell_steps = %d must be >= 1",
            (int)o->jump_count, (int)o->noise_steps, (int)o->dwell_steps);
    }
    if (!(o->slope_limit >= 0)) {
        return DCP_FAIL(DCP_ERR_ARG, "slope_limit = %g must be >= 0", o->slope_limit);
    }
    return DCP_OK;
}

dcp_status_t
dcp_controller_create(const dcp_control_options_t *options,
                      dcp_controller_t **controller_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_controller_t), "controller", &memory));
    dcp_controller_t *controller = memory;
    controller->options = *options;
    dcp_status_t status = take_precisions(controller, options);
    if (status == DCP_OK) {
        status = take_multiples(controller, options);
    }
    if (status == DCP_OK) {
        status = take_numbers(&controller->options);
    }
    if (status != DCP_OK) {
        dcp_free(controller);
        return status;
    }
    controller->options.precisions = controller->precisions;
    controller->options.multiples = controller->multiples;
    controller->state.precision = controller->base;
    controller->state.lr_factor = 1.0;
    *controller_p = controller;
    return DCP_OK;
}

void
dcp_controller_destroy(dcp_controller_t *controller)
{
    dcp_free(controller);
}

static dcp_arm_t
arm_of(const dcp_controller_t *controller)
{
    const control_state_t *state = &controller->state;
    return (dcp_arm_t){controller->precisions[state->precision],
                       controller->multiples[state->multiple]};
}

/* All numbers of a decision but objectives, from the state. */
static dcp_decision_t
describe(const dcp_controller_t *controller, int64_t step)
{
    const control_state_t *state = &controller->state;
    dcp_decision_t decision = {
        .step = step,
        .arm = arm_of(controller),
        .lr_factor = state->lr_factor,
        .bandwidth = exp(control_mean_value(&state->log_bandwidth)),
        .latency_s = control_mean_value(&state->latency_s),
        .noise_tokens = control_noise_tokens(controller),
        .noise_sorted_bias =
            control_mean_value(&state->within) / control_mean_value(&state->between),
        .compute_s =
            control_mean_value(&state->token_s) * control_mean_value(&state->tokens),
        .predicted_s = NAN,
        .objective = NAN,
        .best_objective = NAN,
    };
    for (int32_t i = 0; i < DCP_PRECISION_COUNT; i++) {
        decision.error[i] = NAN;
    }
    for (int32_t i = 0; i < controller->options.precision_count; i++) {
        decision.error[controller->precisions[i]] = control_error(controller, i);
    }
    return decision;
}

dcp_decision_t
dcp_controller_start(const dcp_controller_t *controller)
{
    dcp_decision_t decision = describe(controller, 0);
    decision.reasons = DCP_REASON_START;
    return decision;
}

static void
set_lr_factor(dcp_controller_t *controller, int32_t multiple_changed)
{
    control_state_t *state = &controller->state;
    const dcp_control_options_t *options = &controller->options;
    double factor = dcp_lr_factor(
        options->lr_rule, (double)controller->multiples[state->multiple],
        control_noise_tokens(controller), (double)options->tokens_per_step);
    int32_t known = state->noise_count >= options->noise_steps;
    double drift = fabs(log(factor / state->lr_factor));
    if (known && (multiple_changed || drift > LR_DRIFT)) {
        state->lr_factor = factor;
    }
}

/* Moves to the arm that the policy wants; 1 where it is another. */
static int32_t
move(dcp_controller_t *controller, const dcp_control_world_t *world, double *best_p)
{
    control_state_t *state = &controller->state;
    int32_t precision, multiple;
    control_choose(controller, world, &precision, &multiple, best_p);
    state->arm_steps++;
    int32_t must = !control_allowed(controller, (int32_t)state->precision);
    int32_t other = precision != state->precision || multiple != state->multiple;
    int32_t may = must || state->arm_steps >= controller->options.dwell_steps
                  || state->observed == 1;
    if (!other || !may) {
        set_lr_factor(controller, 0);
        return 0;
    }
    if (precision != state->precision) {
        control_veto_restart(state);
    }
    int32_t multiple_changed = multiple != state->multiple;
    state->precision = precision;
    state->multiple = multiple;
    state->arm_steps = 0;
    state->above = state->below = 0;
    state->alarms = 0;
    set_lr_factor(controller, multiple_changed);
    return 1;
}

static dcp_status_t
check_observation(const dcp_controller_t *controller, const dcp_observation_t *o)
{
    dcp_arm_t arm = arm_of(controller);
    if (o->arm.precision != arm.precision || o->arm.multiple != arm.multiple) {
        const char *name = dcp_precision_name(o->arm.precision);
        return DCP_FAIL(DCP_ERR_STATE,
                        "step %lld ran with %s x %d, but the controller had decided on "
                        "%s x %d",
                        (long long)o->step, name != NULL ? name : "(none)",
                        (int)o->arm.multiple, dcp_precision_name(arm.precision),
                        (int)arm.multiple);
    }
    if (!o->skipped && (o->step_s < 0 || o->compute_s < 0 || o->tokens < 0)) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "observation of step %lld: step_s = %g, compute_s = %g, tokens = "
            "%lld must be >= 0",
            (long long)o->step, o->step_s, o->compute_s, (long long)o->tokens);
    }
    return DCP_OK;
}

dcp_status_t
dcp_controller_decide(dcp_controller_t *controller, const dcp_control_world_t *world,
                      const dcp_observation_t *observation, dcp_decision_t *decision_p)
{
    DCP_TRY(check_observation(controller, observation));
    control_state_t *state = &controller->state;
    int32_t reasons, changed = 0;
    double best = NAN;
    if (observation->skipped || !isfinite(observation->loss)
        || observation->tokens == 0) {
        reasons = DCP_REASON_SKIPPED;
    } else {
        reasons = control_learn(controller, world, observation);
        reasons |= control_veto(controller, observation);
        changed = move(controller, world, &best);
        reasons |= changed ? DCP_REASON_ARGMIN : 0;
    }
    *decision_p = describe(controller, observation->step + 1);
    decision_p->reasons = reasons;
    decision_p->changed = changed;
    decision_p->best_objective = best;
    int32_t q = (int32_t)state->precision, a = (int32_t)state->multiple;
    decision_p->predicted_s = control_step_s(controller, world, q, a, -1.0);
    decision_p->objective = control_objective(controller, world, q, a);
    return DCP_OK;
}

/* What runs is what the world decided: this state machine goes on from there. Where all
 * ranks decide alike, as they do but for the last bit of an exp, nothing changes. */
static dcp_status_t
take_over(dcp_controller_t *controller, const dcp_decision_t *decision)
{
    control_state_t *state = &controller->state;
    int32_t precision = 0, multiple = 0;
    while (precision < controller->options.precision_count
           && controller->precisions[precision] != decision->arm.precision) {
        precision++;
    }
    while (multiple < controller->options.multiple_count
           && controller->multiples[multiple] != decision->arm.multiple) {
        multiple++;
    }
    if (precision == controller->options.precision_count
        || multiple == controller->options.multiple_count) {
        const char *name = dcp_precision_name(decision->arm.precision);
        return DCP_FAIL(DCP_ERR_MISMATCH,
                        "step %lld is to run with %s x %d, which is not on this "
                        "controller's grid: all ranks must have the same settings",
                        (long long)decision->step, name != NULL ? name : "(none)",
                        (int)decision->arm.multiple);
    }
    if (precision != state->precision) {
        control_veto_restart(state);
    }
    if (precision != state->precision || multiple != state->multiple) {
        state->precision = precision;
        state->multiple = multiple;
        state->arm_steps = 0;
        state->above = state->below = 0;
        state->alarms = 0;
    }
    state->lr_factor = decision->lr_factor;
    return DCP_OK;
}

dcp_status_t
dcp_controller_step(dcp_controller_t *controller, const dcp_control_world_t *world,
                    dcp_decision_t *decision_p)
{
    dcp_observation_t observation;
    DCP_TRY(world->observe(world->context, &observation));
    DCP_TRY(dcp_controller_decide(controller, world, &observation, decision_p));
    DCP_TRY(world->apply(world->context, decision_p));
    return take_over(controller, decision_p);
}

/* What a state belongs to. */
static uint64_t
grid_hash(const dcp_controller_t *controller)
{
    const dcp_control_options_t *o = &controller->options;
    const int64_t words[] = {(int64_t)o->policy, o->precision_count,
                             o->multiple_count,  (int64_t)o->base,
                             o->tokens_per_step, (int64_t)o->lr_rule};
    uint64_t hash = 1469598103934665603u; /* FNV-1a over words */
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        hash = (hash ^ (uint64_t)words[i]) * 1099511628211u;
    }
    for (int32_t i = 0; i < o->precision_count; i++) {
        hash = (hash ^ (uint64_t)controller->precisions[i]) * 1099511628211u;
    }
    for (int32_t i = 0; i < o->multiple_count; i++) {
        hash = (hash ^ (uint64_t)controller->multiples[i]) * 1099511628211u;
    }
    return hash;
}

int64_t
dcp_controller_state_count(const dcp_controller_t *controller)
{
    (void)controller;
    return HEAD_WORDS + (int64_t)(sizeof(control_state_t) / sizeof(uint64_t));
}

void
dcp_controller_save(const dcp_controller_t *controller, uint64_t *words)
{
    words[0] = STATE_VERSION;
    words[1] = grid_hash(controller);
    memcpy(words + HEAD_WORDS, &controller->state, sizeof controller->state);
}

/* Could a controller have come to these counts? A file may hold anything. */
static int32_t
is_sound(const control_state_t *state)
{
    const int64_t most = INT64_C(1) << 53;
    const int64_t counts[] = {state->observed, state->arm_steps, state->noise_count,
                              state->alarms};
    int32_t sound = state->jumps >= -most && state->jumps <= most;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        sound &= counts[i] >= 0 && counts[i] <= most;
    }
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        sound &= state->vetoed[q] >= 0 && state->vetoed[q] <= most;
    }
    return sound;
}

dcp_status_t
dcp_controller_load(dcp_controller_t *controller, const uint64_t *words, int64_t count)
{
    int64_t wanted = dcp_controller_state_count(controller);
    if (count != wanted || words[0] != STATE_VERSION) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "controller state of %lld words, version %llu: this version has "
            "%lld words, version %d",
            (long long)count, count > 0 ? (unsigned long long)words[0] : 0ULL,
            (long long)wanted, (int)STATE_VERSION);
    }
    control_state_t state;
    memcpy(&state, words + HEAD_WORDS, sizeof state);
    const dcp_control_options_t *o = &controller->options;
    if (!is_sound(&state)) {
        return DCP_FAIL(DCP_ERR_ARG, "controller state is damaged: its counts are "
                                     "none that a controller comes to");
    }
    if (words[1] != grid_hash(controller) || state.precision < 0
        || state.precision >= o->precision_count || state.multiple < 0
        || state.multiple >= o->multiple_count) {
        return DCP_FAIL(DCP_ERR_ARG, "controller state is of another policy, grid, "
                                     "token budget or learning rate rule");
    }
    controller->state = state;
    return DCP_OK;
}
