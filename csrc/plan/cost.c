/* The cost model: seconds and bytes of one micro-batch (formulas in plan.h, DESIGN 5).
 *
 * Both are monotone in every length, and the bytes fall with every layer that is
 * dropped: caps and the bound rely on that. Costs O(1); strategies that price a group
 * size very often keep the coefficients that do not depend on the sequences themselves.
 */
#include "dcp/plan.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>

/* Beyond this no cap and no machine reaches, and casts to integers stay defined. */
static const double most_bytes = 4e18;

static dcp_status_t
check_field(const char *name, double value)
{
    return isfinite(value) && value >= 0
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_ARG, "cost.%s = %g must be finite and >= 0", name,
                          value);
}

static dcp_status_t
check_tiers(const char *name, const double *values)
{
    DCP_TRY(check_field(name, values[DCP_TIER_NODE]));
    DCP_TRY(check_field(name, values[DCP_TIER_CLUSTER]));
    return values[DCP_TIER_CLUSTER] >= values[DCP_TIER_NODE]
               ? DCP_OK
               : DCP_FAIL(
                     DCP_ERR_ARG,
                     "cost.%s = %g across nodes must be no less than %g inside one",
                     name, values[DCP_TIER_CLUSTER], values[DCP_TIER_NODE]);
}

static dcp_status_t
check_count(const char *name, int64_t value, int64_t most)
{
    return value >= 0 && value <= most
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_ARG, "cost.%s = %" PRId64 " must lie in 0..%" PRId64,
                          name, value, most);
}

dcp_status_t
dcp_cost_check(const dcp_cost_t *cost)
{
    const struct {
        const char *name;
        double value;
    } fields[] = {
        {"latency_s", cost->latency_s},
        {"token_s", cost->token_s},
        {"square_s", cost->square_s},
        {"layer_token_s", cost->layer_token_s},
        {"layer_square_s", cost->layer_square_s},
        {"layer_comm_share", cost->layer_comm_share},
        {"mlp_token_s", cost->mlp_token_s},
        {"fixed_bytes", cost->fixed_bytes},
        {"sharded_bytes", cost->sharded_bytes},
        {"scratch_bytes", cost->scratch_bytes},
        {"token_bytes", cost->token_bytes},
        {"layer_token_bytes", cost->layer_token_bytes},
        {"mlp_token_bytes", cost->mlp_token_bytes},
        {"group_token_bytes", cost->group_token_bytes},
        {"logit_bytes", cost->logit_bytes},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        DCP_TRY(check_field(fields[i].name, fields[i].value));
    }
    DCP_TRY(check_tiers("group_s", cost->group_s));
    DCP_TRY(check_tiers("hop_s", cost->hop_s));
    DCP_TRY(check_tiers("gather_s", cost->gather_s));
    DCP_TRY(check_tiers("exchange_s", cost->exchange_s));
    DCP_TRY(check_count("logit_chunk_tokens", cost->logit_chunk_tokens, INT64_MAX));
    DCP_TRY(check_count("layer_count", cost->layer_count, 1 << 20));
    DCP_TRY(check_count("node_ranks", cost->node_ranks, 1 << 20));
    double dropped = (double)cost->layer_count
                     * fmax(cost->layer_token_bytes, cost->mlp_token_bytes);
    if (dropped > cost->token_bytes * (1 + 1e-12)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "cost.token_bytes = %g must cover its %" PRId64
                        " layers: %g bytes of a token can be dropped",
                        cost->token_bytes, cost->layer_count, dropped);
    }
    return DCP_OK;
}

int
dcp_cost_tier(const dcp_cost_t *cost, int32_t first, int32_t count)
{
    int64_t node = cost->node_ranks;
    return node > 0 && first / node != (first + count - 1) / node ? DCP_TIER_CLUSTER
                                                                  : DCP_TIER_NODE;
}

/* n' and m': how often each kind is computed again and its bytes are saved. */
static dcp_status_t
repeats(const dcp_cost_t *cost, int32_t rank_count, const int32_t *recompute,
        double repeats_p[DCP_RECOMPUTE_KINDS])
{
    static const int32_t none[DCP_RECOMPUTE_KINDS] = {0};
    const int32_t *counts = recompute != NULL ? recompute : none;
    int64_t layers = counts[DCP_RECOMPUTE_LAYER], mlps = counts[DCP_RECOMPUTE_MLP];
    if (rank_count < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "ranks = %d: a micro-batch needs at least one",
                        rank_count);
    }
    if (layers < 0 || mlps < 0 || layers + mlps > cost->layer_count) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "recompute = {layer: %" PRId64 ", mlp: %" PRId64
                        "} must be counts >= 0 of at most %" PRId64 " layers together",
                        layers, mlps, cost->layer_count);
    }
    repeats_p[DCP_RECOMPUTE_LAYER] = layers > 0 ? (double)(layers - 1) : 0;
    repeats_p[DCP_RECOMPUTE_MLP] = mlps > 0 ? (double)(mlps - 1) : 0;
    return DCP_OK;
}

dcp_status_t
dcp_cost_time(const dcp_cost_t *cost, int64_t token_count, double square_sum,
              int32_t rank_count, int tier, const int32_t *recompute, double *seconds_p)
{
    double again[DCP_RECOMPUTE_KINDS] = {0};
    DCP_TRY(repeats(cost, rank_count, recompute, again));
    double p = rank_count, tokens = (double)token_count;
    double layers = again[DCP_RECOMPUTE_LAYER], mlps = again[DCP_RECOMPUTE_MLP];
    double seconds = cost->latency_s;
    seconds +=
        ((cost->token_s + layers * cost->layer_token_s + mlps * cost->mlp_token_s)
             * tokens
         + (cost->square_s + layers * cost->layer_square_s) * square_sum)
        / p;
    if (rank_count > 1) {
        seconds += cost->group_s[tier] + cost->hop_s[tier] * (p - 1);
        seconds += tokens * (p - 1) / p
                   * (cost->gather_s[tier] + cost->exchange_s[tier] / p)
                   * (1 + layers * cost->layer_comm_share);
    }
    *seconds_p = seconds;
    return DCP_OK;
}

dcp_status_t
dcp_cost_memory(const dcp_cost_t *cost, int64_t token_count, int32_t rank_count,
                const int32_t *recompute, int32_t world, int64_t *bytes_p)
{
    double again[DCP_RECOMPUTE_KINDS] = {0};
    DCP_TRY(repeats(cost, rank_count, recompute, again));
    if (world < 1) {
        return DCP_FAIL(DCP_ERR_ARG, "world_size = %d must be >= 1", world);
    }
    int64_t rows = token_count / rank_count + (token_count % rank_count != 0);
    int64_t logits = rows < cost->logit_chunk_tokens ? rows : cost->logit_chunk_tokens;
    double bytes =
        cost->fixed_bytes + cost->sharded_bytes / world
        + (token_count > 0 ? cost->scratch_bytes : 0)
        + (double)rows
              * fmax(0, cost->token_bytes
                            - again[DCP_RECOMPUTE_LAYER] * cost->layer_token_bytes
                            - again[DCP_RECOMPUTE_MLP] * cost->mlp_token_bytes)
        + (rank_count > 1 ? (double)token_count * cost->group_token_bytes : 0)
        + cost->logit_bytes * (double)logits;
    *bytes_p = bytes < most_bytes ? (int64_t)ceil(bytes) : (int64_t)most_bytes;
    return DCP_OK;
}
