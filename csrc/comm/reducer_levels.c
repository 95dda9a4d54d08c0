/* The first of two levels: ranks of one machine sum exactly what goes to the ranks of
 * equal place.
 *
 *   ranks   machine 0: 0 1 2 | machine 1: 3 4 5        (three ranks a machine)
 *   rank 1 gets, summed over 0 1 2, the slices of ranks 1 and 4; rank 4 those of 3 4 5;
 *   then 1 and 4 exchange codes.
 *
 * Slices of one machine's ranks lie one after the other, so each machine's part of a
 * segment is one reduce-scatter within this machine, out of the input and into the
 * sums: no staging but that of the transport. Memory: the sums, 1 / machine_ranks of
 * the input.
 *
 * Residuals of a slice live on the rank of its place in each machine. Where others hold
 * some (kept under one level, or another layout) they are handed over: one more
 * reduce-scatter, of the residuals, in place. */
#include "reducer_private.h"

#include <string.h>

int64_t
reducer_levels_count(const dcp_reducer_t *reducer, const dcp_reduce_args_t *args)
{
    int64_t total = 0;
    int32_t each = reducer->machine_ranks;
    for (int64_t i = 0; i < args->segment_count; i++) {
        for (int32_t r = reducer->rank % each; r < reducer->size; r += each) {
            total += args->segments[i].counts[r];
        }
    }
    return total;
}

static bool
is_zero(const float *x, int64_t count)
{
    enum { STRIDE = 4096 };
    for (int64_t start = 0; start < count; start += STRIDE) {
        int64_t end = count - start < STRIDE ? count : start + STRIDE;
        int32_t found = 0;
        for (int64_t i = start; i < end; i++) {
            found |= x[i] != 0.0f; /* a NaN too */
        }
        if (found) {
            return false;
        }
    }
    return true;
}

bool
reducer_levels_must_flush(const dcp_reducer_t *reducer, const dcp_reduce_args_t *args)
{
    int32_t each = reducer->machine_ranks, place = reducer->rank % each;
    for (int64_t i = 0; i < args->segment_count; i++) {
        const dcp_reduce_segment_t *segment = &args->segments[i];
        const float *residual = segment->residual;
        for (int32_t r = 0; r < reducer->size && residual != NULL; r++) {
            if (r % each != place && !is_zero(residual, segment->counts[r])) {
                return true;
            }
            residual += segment->counts[r];
        }
    }
    return false;
}

/* Hands the residuals of `counts` [machine_ranks] slices to the ranks of their place.
 */
static dcp_status_t
hand_over(const dcp_reducer_t *reducer, const int64_t *counts, float *residual)
{
    int32_t each = reducer->machine_ranks, place = reducer->rank % each;
    float *own = residual;
    for (int32_t p = 0; p < place; p++) {
        own += counts[p];
    }
    DCP_TRY(dcp_comm_reduce_scatterv(reducer->machine, residual, counts, own, DCP_F32));
    for (int32_t p = 0; p < each; p++) {
        if (p != place && counts[p] > 0) {
            memset(residual, 0, (size_t)counts[p] * sizeof *residual);
        }
        residual += counts[p];
    }
    return DCP_OK;
}

dcp_status_t
reducer_levels_sum(dcp_reducer_t *reducer, const dcp_reduce_args_t *args, bool flush)
{
    int32_t each = reducer->machine_ranks, place = reducer->rank % each;
    float *sums = reducer->sums.memory;
    for (int64_t i = 0; i < args->segment_count; i++) {
        const dcp_reduce_segment_t *segment = &args->segments[i];
        int64_t start = 0;
        for (int32_t r = 0; r < reducer->size; r += each) {
            const int64_t *counts = segment->counts + r;
            int64_t total = 0;
            for (int32_t p = 0; p < each; p++) {
                total += counts[p];
            }
            if (total == 0) { /* on all ranks */
                continue;
            }
            DCP_TRY(dcp_comm_reduce_scatterv(reducer->machine, segment->data + start,
                                             counts, sums, DCP_F32));
            if (flush && segment->residual != NULL) {
                DCP_TRY(hand_over(reducer, counts, segment->residual + start));
            }
            sums += counts[place];
            start += total;
        }
    }
    return DCP_OK;
}
