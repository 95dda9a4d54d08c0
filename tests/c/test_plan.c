/* plan: the partition, both strategies, the bound, the proof and the hash. */
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
        dcp_plan_request_t request = request_for(lengths, cases[c].count, 4, "packed");
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
    static const char *const strategies[] = {"packed", "bucket"};
    for (int s = 0; s < 2; s++) {
        for (int32_t world = 1; world <= 3; world++) {
            dcp_plan_request_t request = request_for(uneven, 8, world, strategies[s]);
            request.max_tokens = 100;
            dcp_plan_t *plan;
            CHECK_OK(dcp_plan_create(&request, &plan));
            CHECK(plan->micro_batch_count >= 3);
            dcp_plan_destroy(plan);

            request.max_tokens = 0; /* the same cap, in bytes */
            request.memory_bytes = 1000 + (3999 + world) / world + 10 * 100;
            CHECK(dcp_plan_cap_tokens(&request) == 100);
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
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_INFEASIBLE);
    CHECK(strstr(dcp_last_error(), "lengths[2] = 7") != NULL);
    request.max_tokens = 0;
    request.cost.token_s = NAN;
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "token_s") != NULL);
    double seconds;
    CHECK(dcp_cost_time(&plain_cost, 1, 1, 2, NULL, &seconds) == DCP_ERR_UNSUPPORTED);
    CHECK(dcp_cost_time(&plain_cost, 1, 1, 0, NULL, &seconds) == DCP_ERR_ARG);
    CHECK(dcp_cost_time(&plain_cost, 1, 1, 1, (const int32_t[2]){0, 3}, &seconds)
          == DCP_ERR_UNSUPPORTED);
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

/* The median rule: two classes with batch sizes 8 and 1; the longer class's time is
 * above the median and its size is at least 1. */
static void
test_bucket(void)
{
    int64_t lengths[40];
    for (int i = 0; i < 40; i++) {
        lengths[i] = i % 10 == 0 ? 1000 : 100;
    }
    dcp_plan_request_t request = request_for(lengths, 40, 2, "bucket");
    request.max_tokens = 2000;
    request.cost = (dcp_cost_t){.token_s = 1e-6, .square_s = 1e-8};
    /* full sizes 20 and 2; t = 20 (1e-4 + 1e-4) = 4e-3, 2 (1e-3 + 1e-2) = 2.2e-2;
     * median 1.3e-2, so the long class gets floor(2 * 1.3 / 2.2) = 1 */
    dcp_plan_t *plan;
    CHECK_OK(dcp_plan_create(&request, &plan));
    CHECK(plan->micro_batch_count == 4 + 2);
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        int64_t first = plan->sequence_offsets[m];
        int64_t size = plan->sequence_offsets[m + 1] - first;
        int64_t length = lengths[plan->sequences[first]];
        CHECK(plan->ranks[m] == (int32_t)(m % 2));
        CHECK(length == 1000 ? size == 1 : size == 20 || size == 16);
        for (int64_t i = first; i < first + size; i++) {
            CHECK(lengths[plan->sequences[i]] == length);
        }
    }
    dcp_plan_destroy(plan);
}

/* Random requests: every plan verifies (dcp_plan_create proves it), twice the same is
 * the same, and any change of the request changes the hash. */
static void
test_random(void)
{
    static int64_t lengths[MAX_COUNT];
    static const char *const strategies[] = {"packed", "bucket"};
    dcp_rng_t rng;
    dcp_rng_init(&rng, 3, 0);
    for (int round = 0; round < 400; round++) {
        int64_t count = (int64_t)dcp_rng_below(&rng, round % 10 == 0 ? 500 : 40);
        int32_t world = 1 + (int32_t)dcp_rng_below(&rng, 9);
        fill_lengths(&rng, 4, 1.5, lengths, count);
        dcp_plan_request_t request =
            request_for(lengths, count, world, strategies[round % 2]);
        request.max_tokens = dcp_rng_below(&rng, 2) ? 0 : 131072;
        if (dcp_rng_below(&rng, 2)) {
            int64_t longest = 0;
            for (int64_t i = 0; i < count; i++) {
                longest = lengths[i] > longest ? lengths[i] : longest;
            }
            request.memory_bytes = 1000 + 4000 / world
                                   + 10 * (longest + (int64_t)dcp_rng_below(&rng, 99))
                                   + 1;
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
#undef BREAK
    int32_t saved = plan->recompute[1];
    plan->recompute[1] = 2;
    CHECK(dcp_plan_verify(&request, plan) == DCP_ERR_UNSUPPORTED);
    plan->recompute[1] = saved;

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

static dcp_status_t
plan_scenario(void)
{
    static const int64_t lengths[12] = {900, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46};
    static const char *const strategies[] = {"packed", "bucket"};
    for (int s = 0; s < 2; s++) {
        dcp_plan_request_t request = request_for(lengths, 12, 3, strategies[s]);
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
    test_bucket();
    test_random();
    test_verify();
    check_every_alloc(plan_scenario);
    return check_finish();
}
