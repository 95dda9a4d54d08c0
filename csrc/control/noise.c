/* How noisy a gradient is, from what one step shows, and what follows from it.
 *
 * Micro-batches i of n_i tokens with mean gradients g_i, N = sum n_i, g = sum n_i g_i /
 * N. Tokens independent, covariance Sigma:
 *
 *   E sum n_i |g_i|^2 = N |G|^2 + K tr Sigma,     E |g|^2 = |G|^2 + tr Sigma / N
 *
 * Solving the two gives both without bias. A quantised sum adds its error to |g|^2,
 * which is known and taken off first. Only ratios of running means are used, never
 * running means of ratios. */
#include "control_private.h"

#include <math.h>

dcp_noise_t
dcp_noise_estimate(int64_t micro_batch_count, int64_t tokens, double micro_squares,
                   double mean_squares, double reduce_error)
{
    if (micro_batch_count < 2 || tokens < 1) {
        return (dcp_noise_t){NAN, NAN};
    }
    double count = (double)tokens, clean = mean_squares - reduce_error;
    double trace = (micro_squares - count * clean) / (double)(micro_batch_count - 1);
    return (dcp_noise_t){.trace = trace, .square = clean - trace / count};
}

double
dcp_steps_factor(double batch, double noise_tokens, double w1, double w2,
                 int32_t rank_count)
{
    return (1.0 + w2)
           * (1.0 + w1 / (double)rank_count + (1.0 + w1) * noise_tokens / batch);
}

double
dcp_lr_factor(dcp_lr_rule_t rule, double multiple, double noise_tokens,
              double tokens_per_step)
{
    double f = noise_tokens / tokens_per_step;
    if (rule == DCP_LR_FIXED || isnan(f) || multiple <= 0) {
        return 1.0;
    }
    double gain = isinf(f) ? multiple : (1.0 + f) / (1.0 + f / multiple);
    return rule == DCP_LR_GAIN ? gain : sqrt(gain);
}
