/* The cost model in the form that planning asks for: rates of a group size, how many
 * tokens fit, and the cheapest recompute that makes a micro-batch fit.
 *
 * Bytes fall by the same amount with every layer and every MLP that is recomputed, and
 * time rises linearly, so the cheapest counts are an integer knapsack of two items:
 * for every number of layers the least number of MLPs that fits, O(layers), exact to
 * the byte. More tokens never need fewer bytes, so caps are found by bisection from an
 * estimate that is nearly right.
 */
#include "plan_draft.h"

#include <math.h>

/* Token sums stay exact in a double. */
static const int64_t most_tokens = INT64_C(1) << 52;

void
plan_recompute(const dcp_cost_t *cost, int which,
               int32_t recompute[DCP_RECOMPUTE_KINDS])
{
    int32_t layers = (int32_t)cost->layer_count;
    recompute[DCP_RECOMPUTE_LAYER] = which == PLAN_FULL ? layers : 0;
    recompute[DCP_RECOMPUTE_MLP] = which == PLAN_SELECTIVE ? layers : 0;
}

double
plan_time(const plan_problem_t *problem, int64_t tokens, double squares, int32_t first,
          const plan_setting_t *setting)
{
    const dcp_cost_t *cost = &problem->request->cost;
    double seconds = 0;
    (void)dcp_cost_time(cost, tokens, squares, setting->group,
                        dcp_cost_tier(cost, first, setting->group), setting->recompute,
                        &seconds);
    return seconds;
}

int64_t
plan_bytes(const plan_problem_t *problem, int64_t tokens, const plan_setting_t *setting)
{
    int64_t bytes = 0;
    (void)dcp_cost_memory(&problem->request->cost, tokens, setting->group,
                          setting->recompute, problem->request->world, &bytes);
    return bytes;
}

static int
fits(const plan_problem_t *problem, int64_t tokens, const plan_setting_t *setting)
{
    return plan_bytes(problem, tokens, setting) <= problem->request->memory_bytes;
}

int64_t
plan_cap_tokens(const plan_problem_t *problem, const plan_setting_t *setting)
{
    int64_t rows = problem->row_cap;
    int64_t cap =
        rows > most_tokens / setting->group ? most_tokens : rows * setting->group;
    if (problem->request->memory_bytes == 0 || fits(problem, cap, setting)) {
        return cap;
    }
    /* a straight line through 1 and a middling number, then doubling steps around it */
    int64_t probe = 65536 < cap ? 65536 : cap;
    double low_bytes = (double)plan_bytes(problem, 1, setting);
    double slope =
        ((double)plan_bytes(problem, probe, setting) - low_bytes) / (double)probe;
    double guess = ((double)problem->request->memory_bytes - low_bytes) / slope;
    int64_t fit = guess >= 1 ? (guess < (double)cap ? (int64_t)guess : cap - 1) : 0;
    int64_t step = 1 + fit / 4096, too_many = cap;
    while (fit > 0 && !fits(problem, fit, setting)) {
        too_many = fit;
        fit = fit > step ? fit - step : 0;
        step *= 2;
    }
    step = 1 + fit / 4096;
    while (too_many == cap && fit + step < cap) {
        if (!fits(problem, fit + step, setting)) {
            too_many = fit + step;
        } else {
            fit += step;
            step *= 2;
        }
    }
    while (too_many - fit > 1) {
        int64_t middle = fit + (too_many - fit) / 2;
        if (fits(problem, middle, setting)) {
            fit = middle;
        } else {
            too_many = middle;
        }
    }
    return fit;
}

int
plan_best_tier(const dcp_cost_t *cost, int32_t group)
{
    return cost->node_ranks > 0 && group > cost->node_ranks ? DCP_TIER_CLUSTER
                                                            : DCP_TIER_NODE;
}

void
plan_price_init(const dcp_cost_t *cost, int32_t group, int tier, plan_price_t *price)
{
    double p = group, comm = 0;
    price->group = group;
    price->start_s = cost->latency_s;
    if (group > 1) {
        price->start_s += cost->group_s[tier] + cost->hop_s[tier] * (p - 1);
        comm = (p - 1) / p * (cost->gather_s[tier] + cost->exchange_s[tier] / p);
    }
    price->token_s = cost->token_s / p + comm;
    price->square_s = cost->square_s / p;
    price->layer_token_s = cost->layer_token_s / p + comm * cost->layer_comm_share;
    price->layer_square_s = cost->layer_square_s / p;
    price->mlp_token_s = cost->mlp_token_s / p;
}

static double
repeats(int32_t count)
{
    return count > 1 ? count - 1 : 0;
}

double
plan_price_work(const plan_price_t *price, double tokens, double squares,
                const int32_t *recompute)
{
    double layers = repeats(recompute[DCP_RECOMPUTE_LAYER]);
    double mlps = repeats(recompute[DCP_RECOMPUTE_MLP]);
    return tokens
               * (price->token_s + layers * price->layer_token_s
                  + mlps * price->mlp_token_s)
           + squares * (price->square_s + layers * price->layer_square_s);
}

/* What is missing for a micro-batch to fit, and what a repeat of each kind saves. */
typedef struct shortage {
    double bytes, layer_bytes, mlp_bytes;
} shortage_t;

/* Whether `setting` saves what is missing; exact where rounding could matter. */
static int
covers(const plan_problem_t *problem, int64_t tokens, const shortage_t *missing,
       const plan_setting_t *setting)
{
    double left =
        missing->bytes
        - repeats(setting->recompute[DCP_RECOMPUTE_LAYER]) * missing->layer_bytes
        - repeats(setting->recompute[DCP_RECOMPUTE_MLP]) * missing->mlp_bytes;
    double doubt = 2 + 1e-12 * missing->bytes;
    return left < -doubt || (left <= doubt && fits(problem, tokens, setting));
}

/* Puts the least count of MLPs that fits beside the layers into `setting`; returns
 * whether there is one. */
static int
least_mlps(const plan_problem_t *problem, int64_t tokens, const shortage_t *missing,
           plan_setting_t *setting)
{
    int32_t layers = setting->recompute[DCP_RECOMPUTE_LAYER];
    int32_t most = (int32_t)problem->request->cost.layer_count - layers;
    double left = missing->bytes - repeats(layers) * missing->layer_bytes;
    double guess = left > 0 && missing->mlp_bytes > 0
                       ? floor(left / missing->mlp_bytes * (1 - 1e-12))
                       : 0;
    if (guess > most) {
        return 0;
    }
    /* one dropped MLP saves nothing */
    for (int32_t mlps = (int32_t)guess; mlps <= most; mlps += 1 + (mlps == 0)) {
        setting->recompute[DCP_RECOMPUTE_MLP] = mlps;
        if (covers(problem, tokens, missing, setting)) {
            return 1;
        }
        if (left > 0 && missing->mlp_bytes == 0) {
            return 0;
        }
    }
    return 0;
}

double
plan_least_recompute(const plan_problem_t *problem, const plan_price_t *price,
                     int64_t tokens, double squares,
                     int32_t recompute[DCP_RECOMPUTE_KINDS])
{
    const dcp_plan_request_t *request = problem->request;
    const dcp_cost_t *cost = &request->cost;
    plan_setting_t setting = {.group = price->group};
    int64_t rows = tokens / price->group + (tokens % price->group != 0);
    if (rows > problem->row_cap) {
        return INFINITY;
    }
    recompute[DCP_RECOMPUTE_LAYER] = recompute[DCP_RECOMPUTE_MLP] = 0;
    int64_t bytes =
        request->memory_bytes == 0 ? 0 : plan_bytes(problem, tokens, &setting);
    if (bytes <= request->memory_bytes) {
        return plan_price_work(price, (double)tokens, squares, recompute);
    }
    shortage_t missing = {
        .bytes = (double)(bytes - request->memory_bytes),
        .layer_bytes = cost->layer_token_bytes * (double)rows,
        .mlp_bytes = cost->mlp_token_bytes * (double)rows,
    };
    double least = INFINITY;
    for (int32_t layers = 0; layers <= (int32_t)cost->layer_count; layers++) {
        setting.recompute[DCP_RECOMPUTE_LAYER] = layers;
        if (!least_mlps(problem, tokens, &missing, &setting)) {
            continue;
        }
        double work =
            plan_price_work(price, (double)tokens, squares, setting.recompute);
        if (work < least) {
            least = work;
            recompute[DCP_RECOMPUTE_LAYER] = layers;
            recompute[DCP_RECOMPUTE_MLP] = setting.recompute[DCP_RECOMPUTE_MLP];
        }
        if (setting.recompute[DCP_RECOMPUTE_MLP] == 0) {
            break; /* more layers cost more and save what is not needed */
        }
    }
    return least;
}
