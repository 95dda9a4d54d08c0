/* plan: the partition, prices, strategy `dcp`, the bound, rounds, the proof and the
 * hash. */
#include "check.h"

#include "dcp/plan.h"
#include "dcp/rng.h"
#include "plan/plan_draft.h"

#include <math.h>
#include <string.h>

enum { MAX_COUNT = 4096 };

static const dcp_cost_t plain_cost = {
    .latency_s = 1e-4,
    .token_s = 1e-6,
    .square_s = 1e-9,
    .fixed_bytes = 1000,
    .sharded_bytes = 4000,
    .token_bytes = 10,
};

/* Groups, two tiers and recompute, all of which matter. */
static const dcp_cost_t full_cost = {
    .latency_s = 1e-3,
    .token_s = 1e-5,
    .square_s = 1e-8,
    .group_s = {1e-4, 1e-3},
    .hop_s = {1e-5, 1e-4},
    .gather_s = {1e-7, 2e-6},
    .exchange_s = {2e-7, 3e-6},
    .layer_token_s = 5e-7,
    .layer_square_s = 4e-10,
    .layer_comm_share = 0.05,
    .mlp_token_s = 3e-7,
    .fixed_bytes = 1000,
    .sharded_bytes = 4000,
    .scratch_bytes = 500,
    .token_bytes = 100,
    .layer_token_bytes = 11,
    .mlp_token_bytes = 6,
    .group_token_bytes = 1,
    .logit_bytes = 40,
    .logit_chunk_tokens = 64,
    .layer_count = 8,
    .node_ranks = 4,
};

static dcp_plan_request_t
request_for(const int64_t *lengths, int64_t count, int32_t world, const char *strategy)
{
    return (dcp_plan_request_t){
        .lengths = lengths,
        .length_count = count,
        .world = world,
        .cost = plain_cost,
        .strategy = strategy,
    };
}

static int64_t
sequences_of_rank(const dcp_plan_t *plan, int32_t rank)
{
    int64_t count = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        if (plan->ranks[plan->rank_offsets[m]] == rank) {
            count += plan->sequence_offsets[m + 1] - plan->sequence_offsets[m];
        }
    }
    return count;
}

/* The largest differencing method as the paper says it, with dense tuples: the judge.
 */
static void
plain_karmarkar_karp(const double *work, int count, int parts, double *sums)
{
    static double tuples[64][8];
    static int alive[64];
    for (int i = 0; i < count; i++) {
        memset(tuples[i], 0, sizeof tuples[i]);
        tuples[i][0] = work[i];
        alive[i] = 1;
    }
    for (int left = count; left > 1; left--) {
        int first = -1, second = -1;
        for (int i = 0; i < count; i++) {
            if (!alive[i]) {
                continue;
            }
            double d = tuples[i][0] - tuples[i][parts - 1];
            if (first < 0 || d > tuples[first][0] - tuples[first][parts - 1]) {
                second = first;
                first = i;
            } else if (second < 0
                       || d > tuples[second][0] - tuples[second][parts - 1]) {
                second = i;
            }
        }
        for (int p = 0; p < parts; p++) {
            tuples[first][p] += tuples[second][parts - 1 - p];
        }
        for (int p = 1; p < parts; p++) { /* insertion sort, descending */
            double x = tuples[first][p];
            int at = p;
            for (; at > 0 && tuples[first][at - 1] < x; at--) {
                tuples[first][at] = tuples[first][at - 1];
            }
            tuples[first][at] = x;
        }
        alive[second] = 0;
    }
    for (int i = 0; i < count; i++) {
        if (alive[i]) {
            memcpy(sums, tuples[i], (size_t)parts * sizeof sums[0]);
        }
    }
}

static void
test_karmarkar_karp(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 1, 0);
    for (int round = 0; round < 300; round++) {
        int count = 1 + (int)dcp_rng_below(&rng, 60);
        int parts = 1 + (int)dcp_rng_below(&rng, 8);
        double work[64], wanted[8] = {0}, got[8] = {0};
        int32_t part[64];
        for (int i = 0; i < count; i++) {
            work[i] = exp(1.5 * dcp_rng_normal(&rng));
        }
        plain_karmarkar_karp(work, count, parts, wanted);
        CHECK_OK(plan_karmarkar_karp(work, count, parts, part));
        for (int i = 0; i < count; i++) {
            CHECK(part[i] >= 0 && part[i] < parts);
            got[part[i]] += work[i];
        }
        for (int p = 0; p < parts; p++) {
            CHECK(fabs(got[p] - wanted[p]) <= 1e-9 * (1 + wanted[p]));
        }
    }
}

/* Case P-05: counts as even as possible, whatever does not divide. */
static void
test_even_counts(void)
{
    static const struct {
        int64_t count;
        int64_t wanted[4];
    } cases[] = {{9, {3, 2, 2, 2}}, {206, {52, 52, 51, 51}}, {3, {1, 1, 1, 0}}};
    int64_t lengths[206];
    for (int i = 0; i < 206; i++) {
        lengths[i] = 50;
    }
    for (int c = 0; c < 3; c++) {
        dcp_plan_request_t request = request_for(lengths, cases[c].count, 4, "dcp");
        request.max_group = 1;
        dcp_plan_t *plan;
        CHECK_OK(dcp_plan_create(&request, &plan));
        for (int32_t r = 0; r < 4; r++) {
            CHECK(sequences_of_rank(plan, r) == cases[c].wanted[r]);
        }
        dcp_plan_destroy(plan);
    }
}

/* Case P-06: the token cap beats the balance of squares. Case P-08: the cap counts
 * tokens laid one after another, not longest x count. */
static void
test_caps(void)
{
    const int64_t uneven[8] = {90, 15, 15, 15, 15, 15, 15, 15};
    static const char *const strategies[] = {"packed", "bucket", "dcp"};
    for (int s = 0; s < 3; s++) {
        for (int32_t world = 1; world <= 3; world++) {
            dcp_plan_request_t request = request_for(uneven, 8, world, strategies[s]);
            request.max_tokens = 100;
            request.max_group = 1;
            dcp_plan_t *plan;
            CHECK_OK(dcp_plan_create(&request, &plan));
            CHECK(plan->micro_batch_count >= 3);
            dcp_plan_destroy(plan);

            request.max_tokens = 0; /* the same cap, in bytes */
            request.max_group = 1;
            request.memory_bytes = 1000 + (3999 + world) / world + 10 * 100;
            CHECK_OK(dcp_plan_create(&request, &plan));
            CHECK(plan->micro_batch_count >= 3);
            dcp_plan_destroy(plan);

            request.memory_bytes = 1000 + 4000 / world + 10 * 89;
            CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_INFEASIBLE);
            CHECK(strstr(dcp_last_error(), "lengths[0] = 90") != NULL);
        }
    }
    int64_t clips[35];
    for (int i = 0; i < 35; i++) {
        clips[i] = 73 + (i * 41) % 42; /* 73 .. 114 */
    }
    int64_t sum = 0;
    for (int i = 0; i < 35; i++) {
        sum += clips[i];
    }
    CHECK(sum < 35 * 114);
    dcp_plan_request_t request = request_for(clips, 35, 1, "packed");
    request.max_tokens = sum;
    dcp_plan_t *plan;
    CHECK_OK(dcp_plan_create(&request, &plan));
    CHECK(plan->micro_batch_count == 1);
    dcp_plan_destroy(plan);
}

static void
test_bad_requests(void)
{
    int64_t lengths[3] = {5, 0, 7};
    dcp_plan_t *plan;
    dcp_plan_request_t request = request_for(lengths, 3, 2, "packed");
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "lengths[1] = 0") != NULL);
    lengths[1] = INT64_MAX;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    lengths[1] = 6;
    request.world = 0;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "world_size = 0") != NULL);
    request.world = 2;
    request.strategy = "paked";
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "'packed'") != NULL);
    request.strategy = "bukcet";
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "mean 'bucket'") != NULL);
    request.strategy = "packed";
    request.max_tokens = 6;
    request.max_group = 1;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_INFEASIBLE);
    CHECK(strstr(dcp_last_error(), "lengths[2] = 7") != NULL);
    request.max_tokens = 0;
    request.cost.token_s = NAN;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "token_s") != NULL);
    double seconds;
    CHECK(dcp_cost_time(&plain_cost, 1, 1, 0, 0, NULL, &seconds) == DCP_ERR_ARG);
    CHECK(dcp_cost_time(&plain_cost, 1, 1, 1, 0, (const int32_t[2]){0, 3}, &seconds)
          == DCP_ERR_ARG);
    request.cost = full_cost;
    request.strategy = "fixed";
    request.fixed_group = 3;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "fixed_group = 3 must divide world_size = 2")
          != NULL);
}

static void
fill_lengths(dcp_rng_t *rng, double mean, double spread, int64_t *lengths,
             int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double x = exp(mean + spread * dcp_rng_normal(rng));
        lengths[i] = x < 1 ? 1 : x > 131072 ? 131072 : (int64_t)x;
    }
}

/* Long-tailed lengths, many and few: bound kept, balance good where there is enough to
 * balance with. */
static void
test_balance(void)
{
    static int64_t lengths[MAX_COUNT];
    static const int32_t worlds[] = {1, 2, 3, 8, 32};
    dcp_rng_t rng;
    dcp_rng_init(&rng, 2, 0);
    for (int w = 0; w < 5; w++) {
        for (int64_t a_rank = 8; a_rank <= 64; a_rank *= 8) {
            int64_t count = a_rank * worlds[w];
            fill_lengths(&rng, 6, 1.3, lengths, count);
            dcp_plan_request_t request =
                request_for(lengths, count, worlds[w], "packed");
            request.cost.latency_s = 0;
            dcp_plan_t *plan;
            CHECK_OK(dcp_plan_create(&request, &plan));
            CHECK(plan->makespan_s >= plan->bound_s);
            CHECK(plan->makespan_s <= plan->bound_s * (a_rank > 8 ? 1.001 : 1.02));
            dcp_plan_destroy(plan);
        }
    }
}

/* Random requests: every plan verifies (dcp_plan_create proves it), twice the same is
 * the same, and any change of the request changes the hash. */
static void
test_random(void)
{
    static int64_t lengths[MAX_COUNT];
    static const char *const strategies[] = {"packed", "bucket", "dcp"};
    dcp_rng_t rng;
    dcp_rng_init(&rng, 3, 0);
    for (int round = 0; round < 400; round++) {
        int64_t count = (int64_t)dcp_rng_below(&rng, round % 10 == 0 ? 500 : 40);
        int32_t world = 1 + (int32_t)dcp_rng_below(&rng, 9);
        fill_lengths(&rng, 4, 1.5, lengths, count);
        dcp_plan_request_t request =
            request_for(lengths, count, world, strategies[round % 3]);
        if (dcp_rng_below(&rng, 2)) {
            request.cost = full_cost;
            request.rounds = (int32_t)dcp_rng_below(&rng, 2);
        }
        request.max_tokens = dcp_rng_below(&rng, 2) ? 0 : 131072;
        if (dcp_rng_below(&rng, 2)) {
            int64_t longest = 0;
            for (int64_t i = 0; i < count; i++) {
                longest = lengths[i] > longest ? lengths[i] : longest;
            }
            double bytes = request.cost.token_bytes;
            request.memory_bytes = 6000 + (int64_t)(bytes * (double)longest)
                                   + (int64_t)dcp_rng_below(&rng, 9999);
        }
        dcp_plan_t *plan, *again;
        CHECK_OK(dcp_plan_create(&request, &plan));
        CHECK_OK(dcp_plan_create(&request, &again));
        CHECK(memcmp(plan->hash, again->hash, sizeof plan->hash) == 0);
        CHECK(plan->makespan_s >= plan->bound_s);
        dcp_plan_destroy(again);
        dcp_plan_request_t other = request;
        other.seed++;
        CHECK_OK(dcp_plan_create(&other, &again));
        CHECK(memcmp(plan->hash, again->hash, sizeof plan->hash) != 0);
        dcp_plan_destroy(again);
        dcp_plan_destroy(plan);
    }
}

static void
expect_broken(const dcp_plan_request_t *request, const dcp_plan_t *plan,
              const char *rule)
{
    CHECK(dcp_plan_verify(request, plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), rule) != NULL);
}

static void
test_verify(void)
{
    static int64_t lengths[30];
    for (int i = 0; i < 30; i++) {
        lengths[i] = 10 + 7 * i;
    }
    dcp_plan_request_t request = request_for(lengths, 30, 3, "packed");
    request.max_tokens = 600;
    request.max_group = 1;
    dcp_plan_t *plan;
    CHECK_OK(dcp_plan_create(&request, &plan));
    CHECK_OK(dcp_plan_verify(&request, plan));

#define BREAK(place, value, rule)              \
    do {                                       \
        __typeof__(place) saved_ = (place);    \
        (place) = (value);                     \
        expect_broken(&request, plan, (rule)); \
        (place) = saved_;                      \
    } while (0)
    BREAK(plan->sequences[0], plan->sequences[1], "every sequence exactly once");
    BREAK(plan->sequences[0], 30, "sequences exist");
    BREAK(plan->sequences[0], -1, "sequences exist");
    BREAK(plan->ranks[0], 3, "ranks exist");
    BREAK(plan->ranks[0], -1, "ranks exist");
    BREAK(plan->ranks[plan->micro_batch_count - 1], 0, "one micro-batch at a time");
    BREAK(plan->bytes[0], plan->bytes[0] - 1, "bytes as the cost model says");
    BREAK(plan->end_s[0], plan->end_s[0] * 1.001, "durations as the cost model says");
    BREAK(plan->start_s[0], NAN, "durations as the cost model says");
    BREAK(plan->makespan_s, plan->makespan_s * 1.001, "makespan");
    BREAK(plan->bound_s, plan->bound_s * 0.9, "bound");
    BREAK(plan->sequence_offsets[1], 0, "at least one sequence");
    BREAK(plan->rank_offsets[1], 0, "at least one rank");
    BREAK(plan->micro_batch_count, plan->micro_batch_count - 1,
          "every sequence exactly once");
    BREAK(request.max_tokens, 300, "tokens under the cap");
    BREAK(request.memory_bytes, plan->bytes[0] - 1, "memory under the cap");
    BREAK(plan->recompute[1], 2, "recompute counts within the layers");
    BREAK(plan->recompute[0], -1, "recompute counts within the layers");
    BREAK(plan->round[0], 1, "rounds only where ranks move together");
    BREAK(plan->winner, "packer", "the winner is a strategy");
#undef BREAK

    /* swapping two sequences of two micro-batches changes the hash */
    uint64_t hash[2];
    int64_t *sequences = plan->sequences, last = plan->sequence_offsets[1];
    int64_t kept = sequences[0];
    sequences[0] = sequences[last];
    sequences[last] = kept;
    dcp_plan_hash(&request, plan, hash);
    CHECK(memcmp(hash, plan->hash, sizeof hash) != 0);
    dcp_plan_destroy(plan);
    dcp_plan_destroy(NULL);
}

/* What verify says of groups and of rounds. */
static void
test_verify_groups(void)
{
    static const int64_t lengths[5] = {900, 800, 20, 20, 20};
    dcp_plan_request_t request = request_for(lengths, 5, 4, "fixed");
    request.cost = full_cost;
    request.fixed_group = 2;
    dcp_plan_t *plan;
    CHECK_OK(dcp_plan_create(&request, &plan));
    CHECK(plan->rank_offsets[1] == 2);
    int32_t second = plan->ranks[1];
    plan->ranks[1] = plan->ranks[0];
    expect_broken(&request, plan, "ranks are distinct");
    plan->ranks[1] = (second + 1) % 4;
    expect_broken(&request, plan, "ranks are consecutive");
    dcp_plan_destroy(plan);

    request.rounds = 1;
    CHECK_OK(dcp_plan_create(&request, &plan));
    int64_t last = plan->micro_batch_count - 1;
    int32_t round = plan->round[last];
    CHECK(round > 0 || last < 2);
    plan->round[last] = (int32_t)plan->micro_batch_count;
    expect_broken(&request, plan, "rounds count from 0");
    plan->round[last] = round > 0 ? 0 : 1;
    CHECK(dcp_plan_verify(&request, plan) == DCP_ERR_ARG);
    plan->round[last] = round;
    CHECK_OK(dcp_plan_verify(&request, plan));
    plan->start_s[last] += 1;
    plan->end_s[last] += 1;
    expect_broken(&request, plan, "a round starts when");
    dcp_plan_destroy(plan);
}

/* The cheapest recompute that fits is what trying every pair of counts finds, and caps
 * in tokens are exact to the token. */
static void
test_prices(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 4, 0);
    const int64_t one = 1;
    for (int round = 0; round < 500; round++) {
        dcp_plan_request_t request = request_for(&one, 1, 8, "dcp");
        request.cost = full_cost;
        request.memory_bytes = 4000 + (int64_t)dcp_rng_below(&rng, 100000);
        plan_problem_t problem;
        CHECK_OK(plan_problem_init(&request, &problem));
        int32_t group = 1 + (int32_t)dcp_rng_below(&rng, 8), got[2];
        int tier = dcp_cost_tier(&request.cost, 0, group);
        int64_t tokens = 1 + (int64_t)dcp_rng_below(&rng, 5000);
        double squares = 300.0 * (double)tokens, least = INFINITY;
        plan_price_t price;
        plan_price_init(&request.cost, group, tier, &price);
        double time = price.start_s
                      + plan_least_recompute(&problem, &price, tokens, squares, got);
        for (int32_t n = 0; n <= 8; n++) {
            for (int32_t m = 0; n + m <= 8; m++) {
                int32_t counts[2] = {n, m};
                int64_t bytes;
                double seconds;
                CHECK_OK(
                    dcp_cost_memory(&request.cost, tokens, group, counts, 8, &bytes));
                CHECK_OK(dcp_cost_time(&request.cost, tokens, squares, group, tier,
                                       counts, &seconds));
                if (bytes <= request.memory_bytes) {
                    least = seconds < least ? seconds : least;
                }
            }
        }
        CHECK(isinf(least) ? isinf(time) : fabs(time - least) <= 1e-9 * least);
        plan_setting_t setting = {.group = group, .recompute = {round % 9, 0}};
        int64_t cap = plan_cap_tokens(&problem, &setting);
        CHECK(cap == 0 || plan_bytes(&problem, cap, &setting) <= request.memory_bytes);
        CHECK(plan_bytes(&problem, cap + 1, &setting) > request.memory_bytes);
        plan_problem_fini(&problem);
    }
}

static dcp_status_t
plan_scenario(void)
{
    static const int64_t lengths[12] = {900, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46};
    for (int rounds = 0; rounds < 2; rounds++) {
        dcp_plan_request_t request = request_for(lengths, 12, 3, "dcp");
        request.cost = full_cost;
        request.memory_bytes = 30000;
        request.rounds = rounds;
        dcp_plan_t *plan;
        DCP_TRY(dcp_plan_create(&request, &plan));
        dcp_plan_destroy(plan);
    }
    return DCP_OK;
}

int
main(void)
{
    test_karmarkar_karp();
    test_even_counts();
    test_caps();
    test_bad_requests();
    test_balance();
    test_prices();
    test_random();
    test_verify();
    test_verify_groups();
    check_every_alloc(plan_scenario);
    return check_finish();
}
