/* What the best arm is for one who knows the truth: noise scale, quantisation errors,
 * the jobs that are present now. Not when they will come or go.
 *
 * Mean times of steps are tabulated beforehand, for every arm and number of jobs, all
 * of them present throughout; jobs are taken to be alike. Cost: arms x jobs x some
 * steps. */
#include "experiment.h"

#include <math.h>

enum { WARM_STEPS = 4, MEAN_STEPS = 48 };

static dcp_status_t
mean_step(const dcp_time_to_loss_options_t *o, int32_t jobs, dcp_arm_t arm,
          double *seconds_p)
{
    step_model_t model;
    step_times_t times;
    double now_s = 0, first_s = 0;
    DCP_TRY(step_model_create(o, jobs, 0.0, &model));
    dcp_status_t status = DCP_OK;
    for (int32_t i = 0; status == DCP_OK && i < WARM_STEPS + MEAN_STEPS; i++) {
        first_s = i == WARM_STEPS ? now_s : first_s;
        status = step_model_run(&model, now_s, arm, &times);
        now_s = times.end_s;
    }
    step_model_clear(&model);
    *seconds_p = (now_s - first_s) / MEAN_STEPS;
    return status;
}

dcp_status_t
oracle_tabulate(const dcp_time_to_loss_options_t *o, oracle_t *oracle)
{
    const dcp_control_options_t *c = &o->control;
    for (int32_t q = 0; q < c->precision_count; q++) {
        for (int32_t a = 0; a < c->multiple_count; a++) {
            for (int32_t jobs = 0; jobs <= o->background_count; jobs++) {
                DCP_TRY(mean_step(o, jobs,
                                  (dcp_arm_t){c->precisions[q], c->multiples[a]},
                                  &oracle->seconds[q][a][jobs]));
            }
        }
    }
    return DCP_OK;
}

dcp_arm_t
oracle_choose(const dcp_time_to_loss_options_t *o, const oracle_t *oracle,
              double noise_tokens, uint64_t present)
{
    const dcp_control_options_t *c = &o->control;
    int32_t jobs = 0;
    double least = INFINITY;
    dcp_arm_t best = {c->precisions[0], c->multiples[0]};
    for (uint64_t left = present; left != 0; left &= left - 1) {
        jobs++;
    }
    for (int32_t q = 0; q < c->precision_count; q++) {
        for (int32_t a = 0; a < c->multiple_count; a++) {
            double batch = (double)c->tokens_per_step * c->multiples[a];
            double objective =
                dcp_steps_factor(batch, noise_tokens, o->error[c->precisions[q]], 0.0,
                                 o->rank_count)
                * oracle->seconds[q][a][jobs];
            if (objective < least) {
                least = objective;
                best = (dcp_arm_t){c->precisions[q], c->multiples[a]};
            }
        }
    }
    return best;
}
