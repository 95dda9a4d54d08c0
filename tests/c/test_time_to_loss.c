/* time_to_loss: without others and without noise the steps formula times a step in
 * closed form; the bucket recursion; the oracle against every fixed arm; what is
 * observed; bad input. */
#include "check.h"

#include "dcp/time_to_loss.h"

#include <math.h>
#include <string.h>

enum { HOSTS = 4 };

static const dcp_precision_t precisions[] = {DCP_PRECISION_FP32, DCP_PRECISION_BF16,
                                             DCP_PRECISION_INT8, DCP_PRECISION_INT4};
static const int32_t multiples[] = {1, 2, 4, 8};
static const int32_t hosts[HOSTS] = {0, 1, 2, 3};

static int
near(double a, double b, double tolerance)
{
    return fabs(a - b) <= tolerance * fabs(b);
}

static dcp_time_to_loss_options_t
quiet(void)
{
    return (dcp_time_to_loss_options_t){
        .network = {.host_count = HOSTS,
                    .host_rate = 1e9,
                    .oversubscription = 1,
                    .latency_s = 1e-4,
                    .seed = 3},
        .hosts = hosts,
        .rank_count = HOSTS,
        .collective = DCP_COLLECTIVE_ALLTOALL,
        .parameter_count = 1 << 20,
        .compute_s = 0.01,
        .backward_share = 2.0 / 3.0,
        .optimizer_s = 1e-3,
        .bucket_count = 1,
        .codec_bytes_per_s = 1e11,
        .error = {0, 2.7e-6, 1.2e-3, 4.4e-3, 2.4e-4, 0.076},
        .loss = {.start = 9,
                 .floor = 2,
                 .knee = 20,
                 .power = 0.6,
                 .noise_scale = 2e7,
                 .noise_power = 0.25},
        .target_loss = 4,
        .micro_batches = 8,
        .noise_dimensions = 256,
        .seed = 5,
        .control = {.policy = DCP_POLICY_JOINT,
                    .precisions = precisions,
                    .precision_count = 4,
                    .base = DCP_PRECISION_FP32,
                    .multiples = multiples,
                    .multiple_count = 4,
                    .tokens_per_step = 8192,
                    .rank_count = HOSTS},
        .fixed = {DCP_PRECISION_FP32, 1},
    };
}

static double
run(const dcp_time_to_loss_options_t *o)
{
    dcp_time_to_loss_result_t result = {0};
    CHECK_OK(dcp_time_to_loss(o, NULL, NULL, &result));
    return result.time_s;
}

/* Seconds of a step of an arm without others, by the recursion of buckets. */
static double
step_of(const dcp_time_to_loss_options_t *o, dcp_arm_t arm)
{
    double n = o->bucket_count, compute_s = arm.multiple * o->compute_s;
    double share = 2.0 * (HOSTS - 1) / HOSTS / o->network.host_rate;
    double bytes =
        (double)dcp_precision_bytes(arm.precision, (int64_t)o->parameter_count);
    double codec_s = arm.precision == DCP_PRECISION_FP32
                         ? 0.0
                         : 4.0 * o->parameter_count / o->codec_bytes_per_s;
    double one_s = bytes * share / n + o->network.latency_s + codec_s / n;
    double end_s = 0, backward_s = n > 1 ? o->backward_share * o->compute_s : 0;
    for (int i = 1; i <= n; i++) {
        double ready_s = compute_s - backward_s + backward_s * i / n;
        end_s = fmax(end_s, ready_s) + one_s;
    }
    return fmax(end_s, compute_s) + o->optimizer_s;
}

/* Steps to the target with the noise scale followed, of a batch of `tokens`. */
static double
steps_of(const dcp_time_to_loss_options_t *o, double tokens, double w1)
{
    const dcp_loss_model_t *m = &o->loss;
    double steps = 0, progress = 0;
    for (;;) {
        double loss =
            m->floor + (m->start - m->floor) * pow(1 + progress / m->knee, -m->power);
        double noise = m->noise_scale * pow(loss, -1 / m->noise_power);
        double gain = 1 / (1 + w1 / HOSTS + (1 + w1) * noise / tokens);
        double goal =
            m->knee
            * (pow((m->start - m->floor) / (o->target_loss - m->floor), 1 / m->power)
               - 1);
        if (progress + gain >= goal) {
            return steps + (goal - progress) / gain;
        }
        progress += gain;
        steps++;
    }
}

static void
test_closed_form(void)
{
    dcp_time_to_loss_options_t o = quiet();
    o.control.policy = (dcp_policy_t)DCP_POLICY_FIXED;
    const int32_t buckets[] = {1, 2, 7};
    for (int b = 0; b < 3; b++) {
        o.bucket_count = buckets[b];
        for (int q = 0; q < 4; q++) {
            for (int a = 0; a < 4; a++) {
                o.fixed = (dcp_arm_t){precisions[q], multiples[a]};
                dcp_time_to_loss_result_t result;
                CHECK_OK(dcp_time_to_loss(&o, NULL, NULL, &result));
                double tokens = 8192.0 * multiples[a];
                double steps = steps_of(&o, tokens, o.error[precisions[q]]);
                CHECK(near(result.time_s, steps * step_of(&o, o.fixed), 1e-6));
                CHECK(near(result.tokens, steps * tokens, 1e-9));
                CHECK(result.steps == (int64_t)ceil(steps));
                CHECK(result.change_count == 0);
                CHECK(near(
                    result.arm_share[(int)precisions[q] * DCP_CONTROL_MULTIPLES + a], 1,
                    1e-12));
            }
        }
    }
}

/* What nothing hides, as the controller is told it, is what the recursion leaves. */
static void
test_exposed(void)
{
    dcp_time_to_loss_options_t o = quiet();
    o.network.latency_s = 0;
    o.codec_bytes_per_s = 0;
    for (int n = 1; n <= 9; n++) {
        for (double rate = 1e7; rate < 1e12; rate *= 3) {
            o.bucket_count = n;
            o.network.host_rate = rate;
            double whole_s = 4.0 * o.parameter_count * 2 * (HOSTS - 1) / HOSTS / rate;
            double exposed_s =
                dcp_exposed_s(whole_s, o.backward_share * o.compute_s, n);
            double step_s = step_of(&o, (dcp_arm_t){DCP_PRECISION_FP32, 2});
            CHECK(near(2 * o.compute_s + exposed_s + o.optimizer_s, step_s, 1e-9));
        }
    }
}

/* Alone, the oracle is no worse than any fixed arm, and near what a choice of the best
 * arm at every loss gives. */
static void
test_oracle_alone(void)
{
    dcp_time_to_loss_options_t o = quiet();
    o.control.policy = (dcp_policy_t)DCP_POLICY_ORACLE;
    double oracle_s = run(&o), best_s = INFINITY;
    o.control.policy = (dcp_policy_t)DCP_POLICY_FIXED;
    for (int q = 0; q < 4; q++) {
        for (int a = 0; a < 4; a++) {
            o.fixed = (dcp_arm_t){precisions[q], multiples[a]};
            best_s = fmin(best_s, run(&o));
        }
    }
    CHECK(oracle_s <= best_s * (1 + 1e-9));
    o.control.policy = DCP_POLICY_JOINT;
    double joint_s = run(&o);
    CHECK(joint_s >= oracle_s * (1 - 1e-9) && joint_s <= 1.05 * oracle_s);
    o.control.policy = DCP_POLICY_STATIC;
    double static_s = run(&o);
    o.control.policy = (dcp_policy_t)DCP_POLICY_FIXED;
    o.fixed = (dcp_arm_t){DCP_PRECISION_FP32, 1};
    CHECK(static_s == run(&o));
}

static dcp_background_t
job_behind(double dwell_s)
{
    return (dcp_background_t){.hosts = hosts,
                              .host_count = HOSTS,
                              .compute_s = 0.02,
                              .bytes = 2e7,
                              .collective = DCP_COLLECTIVE_ALLTOALL,
                              .dwell_s = dwell_s};
}

/* Jobs behind that are always there cost time, the more the more there are; racks with
 * narrow uplinks too; the same seed is the same run, another is not. */
static void
test_congestion(void)
{
    dcp_time_to_loss_options_t o = quiet();
    dcp_background_t jobs[2] = {job_behind(0), job_behind(0)};
    double times[3];
    o.control.policy = DCP_POLICY_STATIC;
    o.background = jobs;
    for (int32_t n = 0; n <= 2; n++) {
        o.background_count = n;
        times[n] = run(&o);
    }
    CHECK(times[0] < times[1] && times[1] < times[2]);
    jobs[0].dwell_s = jobs[1].dwell_s = 0.3;
    double between = run(&o);
    CHECK(times[0] < between && between < times[2]);
    CHECK(run(&o) == between);
    o.network.seed = 4;
    CHECK(run(&o) != between);
    o.background_count = 0;
    o.network.rack_hosts = 2;
    o.network.oversubscription = 8;
    double narrow = run(&o);
    CHECK(narrow > times[0]);
    o.collective = DCP_COLLECTIVE_TWO_LEVEL;
    CHECK(run(&o) < narrow);
}

typedef struct seen {
    int64_t steps;
    double before_s, loss, noise;
    int wrong;
} seen_t;

static void
watch(void *context, double now_s, double loss, uint64_t present,
      const dcp_observation_t *observation, const dcp_decision_t *decision)
{
    seen_t *seen = context;
    double took_s = now_s - seen->before_s;
    seen->wrong += observation->step != seen->steps++ || !(loss <= seen->loss)
                   || present != 0 || decision->step != observation->step + 1
                   || !near(observation->step_s, took_s, 1e-9)
                   || observation->tokens != 8192 * observation->arm.multiple;
    seen->before_s = now_s;
    seen->loss = loss;
    seen->noise = decision->noise_tokens;
}

/* Observations are true where nothing scatters, and the noise scale that the
 * controller finds is the model's, which grows as the loss falls. */
static void
test_observations(void)
{
    dcp_time_to_loss_options_t o = quiet();
    seen_t seen = {.loss = INFINITY};
    dcp_time_to_loss_result_t result;
    o.noise_dimensions = 1e12;
    o.control.policy = DCP_POLICY_STATIC;
    CHECK_OK(dcp_time_to_loss(&o, watch, &seen, &result));
    CHECK(seen.wrong == 0 && seen.steps == result.steps);
    double first = 2e7 * pow(9, -4), last = 2e7 * pow(o.target_loss, -4);
    CHECK(seen.noise > 5 * first && near(seen.noise, last, 0.05));
}

static dcp_status_t
with(dcp_time_to_loss_options_t o)
{
    dcp_time_to_loss_result_t result;
    return dcp_time_to_loss(&o, NULL, NULL, &result);
}

static void
test_bad_input(void)
{
    dcp_time_to_loss_options_t o = quiet();
    o.target_loss = 2;
    CHECK(with(o) == DCP_ERR_ARG && strstr(dcp_last_error(), "floor of 2") != NULL);
    o.target_loss = NAN;
    CHECK(with(o) == DCP_ERR_ARG);
    o.target_loss = 9;
    CHECK(with(o) == DCP_ERR_ARG && strstr(dcp_last_error(), "below 9") != NULL);
    o = quiet();
    o.loss.knee = 0;
    CHECK(with(o) == DCP_ERR_ARG);
    o = quiet();
    o.backward_share = 1.5;
    CHECK(with(o) == DCP_ERR_ARG);
    o = quiet();
    o.optimizer_s = -1;
    CHECK(with(o) == DCP_ERR_ARG);
    o = quiet();
    o.compute_s = NAN;
    CHECK(with(o) == DCP_ERR_ARG);
    o = quiet();
    o.background_count = 65;
    CHECK(with(o) == DCP_ERR_ARG);
    const int32_t policies[] = {DCP_POLICY_JOINT, DCP_POLICY_ORACLE, DCP_POLICY_FIXED};
    for (int i = 0; i < 3; i++) {
        o = quiet();
        o.control.policy = (dcp_policy_t)policies[i];
        o.control.multiple_count = 0;
        CHECK(with(o) == DCP_ERR_ARG);
        o.control.multiple_count = 4;
        o.control.base = DCP_PRECISION_FP8_E4M3;
        CHECK(with(o) == DCP_ERR_ARG && strstr(dcp_last_error(), "fp8_e4m3") != NULL);
    }
    o = quiet();
    o.control.policy = (dcp_policy_t)DCP_POLICY_FIXED;
    o.fixed.multiple = 3;
    CHECK(with(o) == DCP_ERR_ARG && strstr(dcp_last_error(), "fp32 x 3") != NULL);
    o = quiet();
    o.step_limit = 3;
    CHECK(with(o) == DCP_ERR_TIMEOUT);
}

static dcp_status_t
one_run(void)
{
    dcp_time_to_loss_options_t o = quiet();
    dcp_background_t job = job_behind(0.5);
    o.background = &job;
    o.background_count = 1;
    o.target_loss = 7;
    DCP_TRY(with(o));
    o.control.policy = (dcp_policy_t)DCP_POLICY_ORACLE;
    return with(o);
}

int
main(void)
{
    test_closed_form();
    test_exposed();
    test_oracle_alone();
    test_congestion();
    test_observations();
    test_bad_input();
    check_every_alloc(one_run);
    return check_finish();
}
