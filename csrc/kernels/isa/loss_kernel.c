/* Cross entropy of rows of logits, gradient in place.
 *
 * Three passes over a row that the cache holds: the maximum; e^(x - max), stored where
 * the gradient is wanted, and its sum; then the weight over the sum times what is
 * stored. Memory per element: 4 B read, 4 B written. The maximum leaves NaNs out and
 * the sum brings them back in, so a NaN reaches the loss.
 */
#include "../rowwise.h"
#include "simd.h"

#include <math.h>

static float
row_max(const float *x, int64_t width)
{
    vf best[4];
    for (int i = 0; i < 4; i++) {
        best[i] = vf_set(-INFINITY);
    }
    int64_t j = 0;
    for (; j + 4 * VF <= width; j += 4 * VF) {
        for (int i = 0; i < 4; i++) {
            best[i] = vf_max(vf_load(x + j + i * VF), best[i]);
        }
    }
    for (; j + VF <= width; j += VF) {
        best[0] = vf_max(vf_load(x + j), best[0]);
    }
    if (j < width) {
        vf rest = vf_fill(vf_load_part(x + j, width - j), width - j, -INFINITY);
        best[1] = vf_max(rest, best[1]);
    }
    return vf_max_across(vf_max(vf_max(best[0], best[1]), vf_max(best[2], best[3])));
}

/* Sum of e^(x - max), which is stored where `store`; asks for the row that lies `ahead`
 * elements on. */
VF_INLINE float
sum_exp(float *x, float max, int64_t width, int64_t ahead, int store)
{
    vf sums[2] = {{0}}, shift = vf_set(max);
    int64_t j = 0;
    for (; j + 2 * VF <= width; j += 2 * VF) {
        for (int i = 0; i < 2; i++) {
            vf_prefetch(x, ahead + j + i * VF);
            vf e = vf_exp(vf_load(x + j + i * VF) - shift);
            sums[i] += e;
            if (store) {
                vf_store(x + j + i * VF, e);
            }
        }
    }
    for (; j < width; j += VF) {
        int64_t count = width - j < VF ? width - j : VF;
        vf e = vf_exp(vf_load_part(x + j, count) - shift);
        sums[0] += vf_fill(e, count, 0.0f);
        if (store) {
            vf_store_part(x + j, e, count);
        }
    }
    return vf_sum(sums[0] + sums[1]);
}

static void
scale_row(float *x, float factor, int64_t width)
{
    int64_t j = 0;
    for (; j + VF <= width; j += VF) {
        vf_store(x + j, vf_load(x + j) * factor);
    }
    if (j < width) {
        vf_store_part(x + j, vf_load_part(x + j, width - j) * factor, width - j);
    }
}

/* The label's logit is taken out while the others are summed: its gradient, w (p - 1) =
 * -w others / sum, and the loss keep their precision where p is almost 1. */
static double
row_loss(const dcp_cross_entropy_args_t *args, int64_t row, int32_t label)
{
    int64_t vocab = args->vocab, stride = args->logits_stride;
    float *x = args->logits + row * stride;
    double weight =
        args->scale * (args->weights != NULL ? (double)args->weights[row] : 1.0);
    float max = row_max(x, vocab), wanted = x[label];
    double own = (double)vf_exp(vf_set(wanted - max))[0];
    x[label] = -INFINITY;
    double others = args->gradient ? (double)sum_exp(x, max, vocab, stride, 1)
                                   : (double)sum_exp(x, max, vocab, stride, 0);
    double sum = others + own;
    if (args->gradient) {
        scale_row(x, (float)(weight / sum), vocab);
        x[label] = (float)(-weight * others / sum);
    } else {
        x[label] = wanted;
    }
    return weight * (log(sum) + ((double)max - (double)wanted));
}

static void
cross_entropy(const void *untyped, int64_t first, int64_t last)
{
    const loss_job_t *job = untyped;
    const dcp_cross_entropy_args_t *args = job->args;
    for (int64_t row = first; row < last; row++) {
        int32_t label = args->labels[row];
        if (label >= 0) {
            job->losses[row] = row_loss(args, row, label);
            continue;
        }
        job->losses[row] = 0;
        if (args->gradient) {
            float *x = args->logits + row * args->logits_stride;
            memset(x, 0, (size_t)args->vocab * sizeof(float));
        }
    }
}

const loss_ops_t ISA_NAME(loss_ops) = {.cross_entropy = cross_entropy};
