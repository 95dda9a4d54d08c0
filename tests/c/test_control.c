/* The controller from C: memory, states, its table. */
#include "check.h"

#include "dcp/control.h"

#include <math.h>
#include <string.h>

static const dcp_precision_t precisions[] = {DCP_PRECISION_FP32, DCP_PRECISION_INT8,
                                             DCP_PRECISION_INT4};
static const int32_t multiples[] = {1, 2, 4};

static dcp_control_options_t
options_of(dcp_policy_t policy)
{
    return (dcp_control_options_t){.policy = policy,
                                   .precisions = precisions,
                                   .precision_count = 3,
                                   .base = DCP_PRECISION_FP32,
                                   .multiples = multiples,
                                   .multiple_count = 3,
                                   .tokens_per_step = 1000,
                                   .rank_count = 2,
                                   .lr_rule = DCP_LR_SQRT_GAIN,
                                   .slope_limit = 4};
}

/* A world without noise in which moving fp32 takes as long as computing. */
typedef struct world {
    int64_t step;
    dcp_arm_t arm;
    int32_t applied;
    int32_t refuse;            /* apply fails */
    const dcp_arm_t *overrule; /* what rank 0 decided instead; NULL: the same */
} world_t;

static double
bytes_of(void *context, dcp_precision_t precision)
{
    (void)context;
    return (double)dcp_precision_bytes(precision, 1000000);
}

static double
codec_of(void *context, dcp_precision_t precision)
{
    (void)context;
    return precision == DCP_PRECISION_FP32 ? 0.0 : 1e-4;
}

static dcp_status_t
observe(void *context, dcp_observation_t *o)
{
    world_t *world = context;
    double bytes = bytes_of(world, world->arm.precision);
    double tokens = 1000.0 * world->arm.multiple;
    *o = (dcp_observation_t){
        .step = world->step,
        .arm = world->arm,
        .tokens = (int64_t)tokens,
        .compute_s = 1e-4 * tokens,
        .reduce_s = bytes / 4e7,
        .reduce_bytes = bytes,
        .step_s = 1e-4 * tokens + bytes / 4e7,
        .loss = 2.0,
        .micro_batch_count = 4,
        .micro_squares = tokens * (1.0 + 4.0 * 3000.0 / tokens),
        .mean_squares = 1.0 + 3000.0 / tokens,
        .adam_micro_squares = NAN,
        .step_difference = NAN,
        .adam_step_difference = NAN,
    };
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        o->error[q] = q == DCP_PRECISION_INT4 ? 0.03 : 1e-4;
        o->adam_error[q] = NAN;
    }
    return DCP_OK;
}

static dcp_status_t
apply(void *context, dcp_decision_t *decision)
{
    world_t *world = context;
    if (world->refuse) {
        return DCP_FAIL(DCP_ERR_PEER, "a rank is gone");
    }
    if (world->overrule != NULL) {
        decision->arm = *world->overrule;
        decision->lr_factor = 1.25;
    }
    world->arm = decision->arm;
    world->step = decision->step;
    world->applied++;
    return DCP_OK;
}

static const dcp_control_world_t table = {
    .observe = observe, .apply = apply, .reduce_bytes = bytes_of, .codec_s = codec_of};

static dcp_status_t
run(dcp_policy_t policy, int steps, world_t *world)
{
    dcp_control_options_t options = options_of(policy);
    dcp_control_world_t bound = table;
    dcp_controller_t *controller;
    dcp_decision_t decision;
    DCP_TRY(dcp_controller_create(&options, &controller));
    bound.context = world;
    world->arm = dcp_controller_start(controller).arm;
    dcp_status_t status = DCP_OK;
    for (int i = 0; status == DCP_OK && i < steps; i++) {
        status = dcp_controller_step(controller, &bound, &decision);
    }
    dcp_controller_destroy(controller);
    return status;
}

static dcp_status_t
life(void)
{
    return run(DCP_POLICY_JOINT, 3, &(world_t){0});
}

static void
test_every_policy_goes_through_the_table(void)
{
    for (int32_t policy = DCP_POLICY_STATIC; policy <= DCP_POLICY_JOINT; policy++) {
        world_t world = {0};
        CHECK_OK(run((dcp_policy_t)policy, 30, &world));
        CHECK(world.applied == 30 && world.step == 30);
        CHECK((world.arm.precision == DCP_PRECISION_FP32)
              == (policy == DCP_POLICY_STATIC || policy == DCP_POLICY_ACCUMULATION));
        CHECK(policy > DCP_POLICY_PRECISION || world.arm.multiple == 1);
    }
    world_t world = {.refuse = 1};
    CHECK(run(DCP_POLICY_JOINT, 1, &world) == DCP_ERR_PEER);
}

/* A rank that would decide otherwise runs what rank 0 decided, and goes on from there
 * without an error; what is not on its grid is one. */
static void
test_what_the_world_decides_holds(void)
{
    dcp_control_options_t options = options_of(DCP_POLICY_STATIC);
    world_t world = {0};
    dcp_control_world_t bound = table;
    dcp_controller_t *controller;
    dcp_decision_t decision;
    bound.context = &world;
    CHECK_OK(dcp_controller_create(&options, &controller));
    dcp_arm_t own = dcp_controller_start(controller).arm;
    dcp_arm_t other = {options.precisions[options.precision_count - 1],
                       options.multiples[options.multiple_count - 1]};
    CHECK(own.precision != other.precision && own.multiple != other.multiple);
    world.arm = own;
    world.overrule = &other;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dcp_controller_step(controller, &bound, &decision));
        CHECK(decision.arm.precision == other.precision
              && decision.arm.multiple == other.multiple);
        dcp_arm_t now = dcp_controller_start(controller).arm;
        CHECK(now.precision == other.precision && now.multiple == other.multiple);
        CHECK(dcp_controller_start(controller).lr_factor == 1.25);
    }
    dcp_arm_t stranger = {other.precision, 999};
    world.overrule = &stranger;
    CHECK(dcp_controller_step(controller, &bound, &decision) == DCP_ERR_MISMATCH);
    dcp_controller_destroy(controller);
}

static void
test_states_are_words_that_carry_everything(void)
{
    dcp_control_options_t options = options_of(DCP_POLICY_JOINT);
    world_t first = {0}, second;
    dcp_control_world_t one_table = table, two_table = table;
    dcp_controller_t *one, *two;
    dcp_decision_t a, b;
    uint64_t words[2048], again[2048];
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    CHECK_OK(dcp_controller_create(&options, &one));
    CHECK_OK(dcp_controller_create(&options, &two));
    first.arm = dcp_controller_start(one).arm;
    one_table.context = &first;
    two_table.context = &second;
    int64_t count = dcp_controller_state_count(one);
    CHECK(count <= 2048);
    for (int i = 0; i < 20; i++) {
        dcp_controller_save(one, words);
        CHECK_OK(dcp_controller_load(two, words, count));
        second = first;
        CHECK_OK(dcp_controller_step(one, &one_table, &a));
        CHECK_OK(dcp_controller_step(two, &two_table, &b));
        dcp_controller_save(one, words);
        dcp_controller_save(two, again);
        CHECK(memcmp(words, again, (size_t)count * sizeof words[0]) == 0);
        CHECK(a.arm.precision == b.arm.precision && a.arm.multiple == b.arm.multiple);
        CHECK(a.predicted_s == b.predicted_s && a.objective == b.objective);
    }
    CHECK(dcp_controller_load(two, words, count - 1) == DCP_ERR_ARG);
    words[0]++;
    CHECK(dcp_controller_load(two, words, count) == DCP_ERR_ARG);
    dcp_controller_destroy(two);
    dcp_controller_destroy(one);
    dcp_controller_destroy(NULL);
}

/* xorshift64*. */
static uint64_t
draw(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* Any number that a file or a wild measurement may hold. */
static double
any_number(uint64_t *state)
{
    static const double edges[] = {0.0, -1.0, 1e-320, 1e308, -1e308, 1.0};
    uint64_t bits = draw(state);
    double x;
    memcpy(&x, &bits, sizeof x); /* NaN and Inf too */
    return bits % 3 == 0 ? edges[(bits >> 8) % 6] : x;
}

/* Words that a disk has damaged are refused, or taken without harm: decisions go on and
 * stay on the grid, whatever is observed. */
static void
test_damaged_states_and_wild_observations(void)
{
    dcp_control_options_t options = options_of(DCP_POLICY_JOINT);
    uint64_t words[2048], seed = 88172645463325252u;
    int taken = 0, refused = 0;
    for (int trial = 0; trial < 2000; trial++) {
        world_t world = {0};
        dcp_control_world_t bound = table;
        dcp_controller_t *controller;
        dcp_decision_t decision;
        bound.context = &world;
        CHECK_OK(dcp_controller_create(&options, &controller));
        int64_t count = dcp_controller_state_count(controller);
        dcp_controller_save(controller, words);
        for (uint64_t i = 0; i < 1 + draw(&seed) % 4; i++) {
            uint64_t at = draw(&seed) % (uint64_t)count;
            double x = any_number(&seed);
            if (draw(&seed) % 2) {
                words[at] ^= UINT64_C(1) << draw(&seed) % 64;
            } else {
                memcpy(&words[at], &x, sizeof x);
            }
        }
        if (dcp_controller_load(controller, words, count) != DCP_OK) {
            refused++;
            dcp_controller_destroy(controller);
            continue;
        }
        taken++;
        for (int step = 0; step < 8; step++) {
            dcp_observation_t o;
            world.arm = dcp_controller_start(controller).arm;
            CHECK_OK(observe(&world, &o));
            double *const numbers[] = {
                &o.step_s,       &o.compute_s, &o.codec_s,      &o.reduce_s,
                &o.reduce_bytes, &o.loss,      &o.gather_bytes, &o.latency_s,
                &o.mean_squares, &o.error[3],  &o.micro_squares};
            *numbers[draw(&seed) % (sizeof numbers / sizeof numbers[0])] =
                any_number(&seed);
            dcp_status_t status =
                dcp_controller_decide(controller, &bound, &o, &decision);
            CHECK(status == DCP_OK || status == DCP_ERR_ARG);
            int on_grid = 0;
            for (int32_t i = 0; status == DCP_OK && i < options.multiple_count; i++) {
                on_grid |= decision.arm.multiple == options.multiples[i];
            }
            CHECK(on_grid == (status == DCP_OK));
            world.step++;
        }
        dcp_controller_destroy(controller);
    }
    CHECK(taken > 100 && refused > 100);
}

static void
test_formulas(void)
{
    CHECK(dcp_steps_factor(100, 400, 0, 0, 8) == 5.0);
    CHECK(fabs(dcp_steps_factor(100, 400, 0.5, 0.1, 8) - 1.1 * (1 + 0.0625 + 6))
          < 1e-12);
    CHECK(dcp_lr_factor(DCP_LR_GAIN, 4, INFINITY, 100) == 4.0);
    CHECK(dcp_lr_factor(DCP_LR_SQRT_GAIN, 4, INFINITY, 100) == 2.0);
    CHECK(dcp_lr_factor(DCP_LR_GAIN, 4, 0, 100) == 1.0);
    CHECK(dcp_lr_factor(DCP_LR_FIXED, 4, 1e6, 100) == 1.0);
    CHECK(isnan(dcp_noise_estimate(1, 100, 1, 1, 0).trace));
    dcp_noise_t noise = dcp_noise_estimate(4, 100, 100 * (1 + 4 * 0.5), 1.5, 0);
    CHECK(fabs(noise.trace - 50) < 1e-9 && fabs(noise.square - 1) < 1e-9);
    CHECK(dcp_exposed_s(3.0, 2.0, 1) == 3.0);
    CHECK(fabs(dcp_exposed_s(3.0, 2.0, 4) - 1.5) < 1e-12);
    CHECK(fabs(dcp_exposed_s(0.4, 2.0, 4) - 0.1) < 1e-12);
}

int
main(void)
{
    test_every_policy_goes_through_the_table();
    test_states_are_words_that_carry_everything();
    test_what_the_world_decides_holds();
    test_damaged_states_and_wild_observations();
    test_formulas();
    check_every_alloc(life);
    return check_finish();
}
