/* The cost model: seconds and bytes of one micro-batch.
 *
 * DESIGN: T = a + b tokens + c sum(len^2), memory = fixed + activations + logits. Both
 * are monotone in every length, which the caps and the bound rely on. Sequence-parallel
 * groups and recompute are refused here, in one place, until the model knows them.
 */
#include "dcp/plan.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>

dcp_status_t
dcp_cost_check(const dcp_cost_t *cost)
{
    const struct {
        const char *name;
        double value;
    } fields[] = {
        {"latency_s", cost->latency_s},         {"token_s", cost->token_s},
        {"square_s", cost->square_s},           {"fixed_bytes", cost->fixed_bytes},
        {"sharded_bytes", cost->sharded_bytes}, {"scratch_bytes", cost->scratch_bytes},
        {"token_bytes", cost->token_bytes},     {"logit_bytes", cost->logit_bytes},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (!isfinite(fields[i].value) || fields[i].value < 0) {
            return DCP_FAIL(DCP_ERR_ARG, "cost.%s = %g must be finite and >= 0",
                            fields[i].name, fields[i].value);
        }
    }
    if (cost->logit_chunk_tokens < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "cost.logit_chunk_tokens = %" PRId64 " must be >= 0",
                        cost->logit_chunk_tokens);
    }
    return DCP_OK;
}

static dcp_status_t
check_choice(int32_t rank_count, const int32_t *recompute)
{
    if (rank_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "ranks = %d: a micro-batch needs at least one",
                        rank_count);
    }
    if (rank_count > 1) {
        return DCP_FAIL(DCP_ERR_UNSUPPORTED,
                        "ranks = %d: sequence-parallel groups are not supported yet, "
                        "only one rank a micro-batch",
                        rank_count);
    }
    for (int kind = 0; recompute != NULL && kind < DCP_RECOMPUTE_KINDS; kind++) {
        if (recompute[kind] != 0) {
            return DCP_FAIL(DCP_ERR_UNSUPPORTED,
                            "recompute of %d layers is not supported yet, only none",
                            recompute[kind]);
        }
    }
    return DCP_OK;
}

dcp_status_t
dcp_cost_time(const dcp_cost_t *cost, int64_t token_count, double square_sum,
              int32_t rank_count, const int32_t *recompute, double *seconds_p)
{
    DCP_TRY(check_choice(rank_count, recompute));
    *seconds_p = cost->latency_s + cost->token_s * (double)token_count
                 + cost->square_s * square_sum;
    return DCP_OK;
}

dcp_status_t
dcp_cost_memory(const dcp_cost_t *cost, int64_t token_count, int32_t rank_count,
                const int32_t *recompute, int32_t world, int64_t *bytes_p)
{
    DCP_TRY(check_choice(rank_count, recompute));
    if (world < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "world_size = %d must be >= 1", world);
    }
    int64_t rows =
        token_count < cost->logit_chunk_tokens ? token_count : cost->logit_chunk_tokens;
    double bytes = cost->fixed_bytes + cost->sharded_bytes / world
                   + (token_count > 0 ? cost->scratch_bytes : 0)
                   + cost->token_bytes * (double)token_count
                   + cost->logit_bytes * (double)rows;
    /* beyond this no cap and no machine reaches, and the cast stays defined */
    *bytes_p = bytes < 4e18 ? (int64_t)ceil(bytes) : INT64_C(4000000000000000000);
    return DCP_OK;
}
