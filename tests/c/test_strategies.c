/* plan: every strategy's plan verifies where worlds, lengths and caps are awkward, and
 * leaves nothing behind where memory runs out. */
#include "check.h"

#include "dcp/plan.h"
#include "dcp/rng.h"
#include "plan/choices.h"

#include <math.h>
#include <string.h>

enum { MAX_COUNT = 300 };

static const dcp_cost_t tiered_cost = {
    .latency_s = 1e-4,
    .token_s = 1e-6,
    .square_s = 1e-9,
    .group_s = {2e-5, 9e-5},
    .hop_s = {1e-6, 8e-6},
    .gather_s = {1e-8, 9e-8},
    .exchange_s = {2e-8, 9e-8},
    .layer_token_s = 5e-8,
    .layer_square_s = 5e-11,
    .layer_comm_share = 0.1,
    .mlp_token_s = 2e-8,
    .fixed_bytes = 1000,
    .sharded_bytes = 4000,
    .scratch_bytes = 100,
    .token_bytes = 100,
    .layer_token_bytes = 20,
    .mlp_token_bytes = 8,
    .group_token_bytes = 2,
    .logit_bytes = 40,
    .logit_chunk_tokens = 64,
    .layer_count = 4,
    .node_ranks = 4,
};

static int64_t case_lengths[MAX_COUNT];

static dcp_plan_request_t
request_for(int64_t count, int32_t world, const char *strategy)
{
    return (dcp_plan_request_t){
        .lengths = case_lengths,
        .length_count = count,
        .world = world,
        .cost = tiered_cost,
        .fixed_group = 1,
        .strategy = strategy,
    };
}

/* Fills case_lengths; returns how many. */
static int64_t
fill_case(int which)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 7, (uint64_t)which);
    static const int64_t counts[] = {1, 1, 2, 40, 41, 7, 60, MAX_COUNT};
    for (int64_t i = 0; i < counts[which]; i++) {
        double tail = exp(5 + 1.5 * dcp_rng_normal(&rng));
        int64_t random = tail < 1 ? 1 : tail > 20000 ? 20000 : (int64_t)tail;
        const int64_t all[] = {1, 5000,   i + 1, 77, i == 0 ? 9000 : 1,
                               1, random, random};
        case_lengths[i] = all[which];
    }
    return counts[which];
}

/* The least memory that holds the longest sequence, on one rank or on all. */
static int64_t
least_memory(int64_t count, int32_t world)
{
    int64_t longest = 0, least = INT64_MAX;
    for (int64_t i = 0; i < count; i++) {
        longest = case_lengths[i] > longest ? case_lengths[i] : longest;
    }
    const int32_t full[DCP_RECOMPUTE_KINDS] = {4, 0};
    for (int on_all = 0; on_all < 2; on_all++) {
        int64_t bytes;
        CHECK_OK(dcp_cost_memory(&tiered_cost, longest, on_all ? world : 1, full, world,
                                 &bytes));
        least = bytes < least ? bytes : least;
    }
    return least;
}

static void
check_plan(const dcp_plan_request_t *request)
{
    dcp_plan_t *plan = NULL;
    CHECK_OK(dcp_plan_create(request, &plan));
    if (plan != NULL) {
        CHECK_OK(dcp_plan_verify(request, plan));
        CHECK(plan->sequence_offsets[plan->micro_batch_count] == request->length_count);
    }
    dcp_plan_destroy(plan);
}

static void
test_every_strategy(void)
{
    static const int32_t worlds[] = {1, 2, 3, 4, 5, 6, 12};
    for (int64_t s = 0; s < dcp_plan_strategy_count(); s++) {
        const char *name = dcp_plan_strategy_name(s);
        for (int c = 0; c < 8; c++) {
            int64_t count = fill_case(c);
            for (int w = 0; w < 7; w++) {
                dcp_plan_request_t request = request_for(count, worlds[w], name);
                check_plan(&request);
                request.run_longest = 30000;
                check_plan(&request);
                request.rounds = 1;
                check_plan(&request);
                request.rounds = 0;
                request.run_longest = 0;
                request.fixed_group = worlds[w];
                request.fixed_recompute[DCP_RECOMPUTE_LAYER] = 4;
                request.memory_bytes = least_memory(count, worlds[w]);
                if (strcmp(name, "fixed") == 0) {
                    request.memory_bytes *= 3;
                }
                check_plan(&request);
            }
        }
    }
}

/* Where nothing fits alone, the error names what does not. */
static void
test_what_does_not_fit(void)
{
    int64_t count = fill_case(4);
    dcp_plan_request_t request = request_for(count, 4, "fixed");
    dcp_plan_t *plan;
    request.max_tokens = 3000; /* 9000 tokens fit groups of 3 and more */
    CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_INFEASIBLE);
    CHECK(strstr(dcp_last_error(), "lengths[0] = 9000") != NULL);
    CHECK(strstr(dcp_last_error(), "3000") != NULL);
    static const char *const once_a_run[] = {"bucket", "packed", "knapformer",
                                             "bucket-published"};
    for (int s = 0; s < 4; s++) {
        request.strategy = once_a_run[s];
        request.run_longest = 0;
        check_plan(&request);
        request.run_longest = 12001;
        CHECK(dcp_plan_create(&request, &plan) == DCP_ERR_INFEASIBLE);
        CHECK(strstr(dcp_last_error(), "12001") != NULL);
    }
}

/* Sizes: the largest of every number of groups. */
static void
test_sizes(void)
{
    for (int32_t world = 1; world <= 50; world++) {
        dcp_plan_request_t request = request_for(0, world, "packed");
        for (int32_t most = 1; most <= world; most++) {
            plan_problem_t problem = {.request = &request, .max_group = most};
            int32_t sizes[64];
            CHECK(plan_size_room(&problem) <= 64);
            int64_t count = plan_sizes(&problem, sizes);
            CHECK(count <= plan_size_room(&problem));
            CHECK(sizes[0] == 1);
            CHECK(sizes[count - 1] == most);
            for (int32_t size = 1; size <= most; size++) {
                int64_t i = 0; /* some size as large has as many groups */
                while (i < count
                       && (sizes[i] < size || world / sizes[i] != world / size)) {
                    i++;
                }
                CHECK(i < count);
            }
        }
    }
}

static void
test_heap(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 3, 0);
    plan_heap_item_t heap[40];
    for (int64_t count = 0; count < 40; count++) {
        plan_heap_item_t item = {(double)dcp_rng_below(&rng, 9), count};
        plan_heap_push(heap, count, item);
    }
    plan_heap_build(heap, 40);
    for (int64_t left = 40; left > 1; left--) {
        plan_heap_item_t top = heap[0];
        heap[0] = heap[left - 1];
        plan_heap_sift(heap, left - 1);
        CHECK(top.key < heap[0].key
              || (top.key == heap[0].key && top.index < heap[0].index));
    }
}

static const char *alloc_strategy;

static dcp_status_t
plan_once(void)
{
    dcp_plan_request_t request = request_for(fill_case(6), 6, alloc_strategy);
    request.fixed_group = 2;
    dcp_plan_t *plan;
    DCP_TRY(dcp_plan_create(&request, &plan));
    dcp_plan_destroy(plan);
    return DCP_OK;
}

static void
test_alloc_failures(void)
{
    for (int64_t s = 0; s < dcp_plan_strategy_count(); s++) {
        alloc_strategy = dcp_plan_strategy_name(s);
        check_every_alloc(plan_once);
    }
}

int
main(void)
{
    test_every_strategy();
    test_what_does_not_fit();
    test_sizes();
    test_heap();
    test_alloc_failures();
    return check_finish();
}
