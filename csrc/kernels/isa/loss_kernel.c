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

/* Sum of e^(x - max), which is stored where `store`. */
VF_INLINE float
sum_exp(float *x, float max, int64_t width, int store)
{
    vf sums[2] = {{0}}, shift = vf_set(max);
    int64_t j = 0;
    for (; j + 2 * VF <= width; j += 2 * VF) {
        for (int i = 0; i < 2; i++) {
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

static void
cross_entropy(const void *untyped, int64_t first, int64_t last)
{
    const loss_job_t *job = untyped;
    const dcp_cross_entropy_args_t *args = job->args;
    int64_t vocab = args->vocab;
    for (int64_t row = first; row < last; row++) {
        float *x = args->logits + row * args->logits_stride;
        int32_t label = args->labels[row];
        job->losses[row] = 0;
        if (label < 0) {
            if (args->gradient) {
                memset(x, 0, (size_t)vocab * sizeof(float));
            }
            continue;
        }
        double weight =
            args->scale * (args->weights != NULL ? (double)args->weights[row] : 1.0);
        float max = row_max(x, vocab), wanted = x[label];
        float sum =
            args->gradient ? sum_exp(x, max, vocab, 1) : sum_exp(x, max, vocab, 0);
        job->losses[row] = weight * (log((double)sum) + ((double)max - (double)wanted));
        if (args->gradient) {
            scale_row(x, (float)(weight / (double)sum), vocab);
            x[label] -= (float)weight;
        }
    }
}

const loss_ops_t ISA_NAME(loss_ops) = {.cross_entropy = cross_entropy};
