/* sim: work is conserved, ranks are never in two places, the makespan is the last end;
 * without jitter the plan's own times; jitter, stragglers, rounds. */
#include "check.h"

#include "dcp/rng.h"
#include "dcp/sim.h"

#include <math.h>
#include <string.h>

enum { MAX_BATCHES = 64, MAX_WORLD = 12 };

/* A plan on the stack: groups of 1..3 consecutive ranks, durations drawn. */
typedef struct drawn_plan {
    dcp_plan_t plan;
    int64_t rank_offsets[MAX_BATCHES + 1];
    int32_t ranks[MAX_BATCHES * 3], round[MAX_BATCHES];
    double start_s[MAX_BATCHES], end_s[MAX_BATCHES];
} drawn_plan_t;

/* Times and rounds as the planner's schedule gives them; `round_start` by hand. */
static void
schedule(drawn_plan_t *drawn, const double *duration_s, int rounds)
{
    double free_s[MAX_WORLD] = {0}, round_end[MAX_BATCHES + 1] = {0};
    int32_t used[MAX_WORLD] = {0};
    dcp_plan_t *plan = &drawn->plan;
    plan->makespan_s = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t m = 0; m < plan->micro_batch_count; m++) {
            double start = 0;
            int32_t at = 0;
            for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1];
                 i++) {
                start = fmax(start, free_s[plan->ranks[i]]);
                at = used[plan->ranks[i]] > at ? used[plan->ranks[i]] : at;
            }
            if (rounds && pass == 0) {
                plan->round[m] = at;
                round_end[at + 1] = fmax(round_end[at + 1], duration_s[m]);
                for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1];
                     i++) {
                    used[plan->ranks[i]] = at + 1;
                }
                continue;
            }
            start = rounds ? round_end[plan->round[m]] : start;
            plan->start_s[m] = start;
            plan->end_s[m] = start + duration_s[m];
            plan->makespan_s = fmax(plan->makespan_s, plan->end_s[m]);
            for (int64_t i = plan->rank_offsets[m]; i < plan->rank_offsets[m + 1];
                 i++) {
                free_s[plan->ranks[i]] = plan->end_s[m];
            }
        }
        if (!rounds) {
            return;
        }
        for (int r = 0; pass == 0 && r < MAX_BATCHES; r++) {
            round_end[r + 1] += round_end[r];
        }
    }
}

static void
draw(drawn_plan_t *drawn, dcp_rng_t *rng, int32_t world, int rounds)
{
    double duration_s[MAX_BATCHES];
    memset(drawn, 0, sizeof *drawn);
    dcp_plan_t *plan = &drawn->plan;
    plan->rank_offsets = drawn->rank_offsets;
    plan->ranks = drawn->ranks;
    plan->round = drawn->round;
    plan->start_s = drawn->start_s;
    plan->end_s = drawn->end_s;
    plan->micro_batch_count = (int64_t)dcp_rng_below(rng, MAX_BATCHES + 1);
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        uint64_t most = world < 3 ? (uint64_t)world : 3;
        int32_t group = 1 + (int32_t)dcp_rng_below(rng, most);
        int32_t first = (int32_t)dcp_rng_below(rng, (uint64_t)(world - group + 1));
        for (int32_t i = 0; i < group; i++) {
            plan->ranks[plan->rank_offsets[m] + i] = first + i;
        }
        plan->rank_offsets[m + 1] = plan->rank_offsets[m] + group;
        duration_s[m] = exp(dcp_rng_normal(rng));
    }
    schedule(drawn, duration_s, rounds);
}

/* What holds for every time line, whatever the options. */
static void
check_invariants(const dcp_plan_t *plan, const dcp_timeline_t *line, double slowest)
{
    double last = 0, busy = 0, work = 0, own = 0;
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        own += (plan->end_s[m] - plan->start_s[m])
               * (double)(plan->rank_offsets[m + 1] - plan->rank_offsets[m]);
    }
    for (int32_t r = 0; r < line->world; r++) {
        double before = 0, rank_work = 0;
        for (int64_t i = line->span_offsets[r]; i < line->span_offsets[r + 1]; i++) {
            int64_t m = line->micro_batch[i];
            int found = 0;
            for (int64_t k = plan->rank_offsets[m]; k < plan->rank_offsets[m + 1];
                 k++) {
                found += plan->ranks[k] == r;
            }
            CHECK(found == 1);
            CHECK(line->start_s[i] >= before);
            CHECK(line->start_s[i] + line->work_s[i] <= line->end_s[i]);
            before = line->end_s[i];
            rank_work += line->work_s[i];
            last = fmax(last, before);
        }
        CHECK(line->busy_s[r] == rank_work);
        busy += line->busy_s[r];
        work += rank_work;
    }
    CHECK(line->span_offsets[line->world]
          == plan->rank_offsets[plan->micro_batch_count]);
    CHECK(line->makespan_s == last);
    CHECK(busy == work);
    if (slowest > 0) { /* no jitter: between the estimate and the slowest rank's */
        CHECK(busy >= own * (1 - 1e-12) && busy <= own * slowest * (1 + 1e-12));
    }
}

static void
test_plan_times_without_jitter(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 7, 0);
    for (int round = 0; round < 200; round++) {
        int32_t world = 1 + (int32_t)dcp_rng_below(&rng, MAX_WORLD);
        drawn_plan_t drawn;
        draw(&drawn, &rng, world, round % 2);
        dcp_sim_options_t options = {.world = world, .rounds = round % 2};
        dcp_timeline_t *line;
        CHECK_OK(dcp_sim_run(&drawn.plan, &options, &line));
        check_invariants(&drawn.plan, line, 1);
        double end = drawn.plan.makespan_s;
        CHECK(fabs(line->makespan_s - end) <= 1e-12 * end);
        for (int64_t i = 0; i < line->span_count; i++) {
            int64_t m = line->micro_batch[i];
            CHECK(fabs(line->start_s[i] - drawn.plan.start_s[m]) <= 1e-12 * end);
            CHECK(fabs(line->end_s[i] - drawn.plan.end_s[m]) <= 1e-12 * end);
        }
        dcp_timeline_destroy(line);
    }
}

/* A plan that knows no rounds gets them, and a round ends with its longest. */
static void
test_rounds_of_a_plan_without(void)
{
    int64_t offsets[] = {0, 1, 2, 4};
    int32_t ranks[] = {0, 1, 0, 1}, round[3] = {0};
    double start[] = {0, 0, 3}, end[] = {3, 1, 5};
    dcp_plan_t plan = {.micro_batch_count = 3,
                       .rank_offsets = offsets,
                       .ranks = ranks,
                       .start_s = start,
                       .end_s = end,
                       .round = round};
    dcp_sim_options_t options = {.world = 3, .rounds = 1};
    dcp_timeline_t *line;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    CHECK(line->makespan_s == 5);
    CHECK(line->busy_s[0] == 5 && line->busy_s[1] == 3 && line->busy_s[2] == 0);
    dcp_timeline_destroy(line);

    /* two rounds of rank 1 beside one of rank 0: they do not overlap */
    int64_t one_each[] = {0, 1, 2, 3};
    int32_t single[] = {0, 1, 1};
    plan.rank_offsets = one_each;
    plan.ranks = single;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    CHECK(line->makespan_s == 5);
    dcp_timeline_destroy(line);
    options.rounds = 0;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    CHECK(line->makespan_s == 3);
    dcp_timeline_destroy(line);

    int32_t backwards[] = {1, 1, 0};
    plan.round = backwards;
    options.rounds = 1;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
}

static void
test_stragglers(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 8, 0);
    for (int round = 0; round < 60; round++) {
        int32_t world = 1 + (int32_t)dcp_rng_below(&rng, MAX_WORLD);
        double slowdown[MAX_WORLD], slowest = 1;
        for (int32_t r = 0; r < world; r++) {
            slowdown[r] = 1 + dcp_rng_uniform(&rng);
            slowest = fmax(slowest, slowdown[r]);
        }
        drawn_plan_t drawn;
        draw(&drawn, &rng, world, round % 2);
        dcp_sim_options_t options = {
            .world = world, .rounds = round % 2, .slowdown = slowdown};
        dcp_timeline_t *line;
        CHECK_OK(dcp_sim_run(&drawn.plan, &options, &line));
        check_invariants(&drawn.plan, line, slowest);
        double end = drawn.plan.makespan_s;
        CHECK(line->makespan_s >= end * (1 - 1e-12));
        CHECK(line->makespan_s <= slowest * end * (1 + 1e-12));
        dcp_timeline_destroy(line);
    }
}

/* Mean 1, its standard deviation of the logarithm as asked, another one for another
 * seed, step, micro-batch and rank. */
static void
test_jitter(void)
{
    enum { COUNT = 20000 };
    static int64_t offsets[COUNT + 1];
    static int32_t ranks[COUNT], round[COUNT];
    static double start[COUNT], end[COUNT];
    for (int m = 0; m < COUNT; m++) {
        offsets[m + 1] = m + 1;
        ranks[m] = m % 2;
        end[m] = 1;
    }
    dcp_plan_t plan = {.micro_batch_count = COUNT,
                       .rank_offsets = offsets,
                       .ranks = ranks,
                       .start_s = start,
                       .end_s = end,
                       .round = round};
    dcp_sim_options_t options = {.world = 2, .jitter = 0.3, .seed = 5, .step = 9};
    dcp_timeline_t *line, *again;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    double sum = 0, logs = 0, squares = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        double x = log(line->work_s[i]);
        sum += line->work_s[i];
        logs += x;
        squares += x * x;
    }
    double deviation = sqrt(squares / COUNT - logs / COUNT * (logs / COUNT));
    CHECK(fabs(sum / COUNT - 1) < 0.01);
    CHECK(fabs(deviation - 0.3) < 0.01);
    CHECK_OK(dcp_sim_run(&plan, &options, &again));
    CHECK(memcmp(line->work_s, again->work_s, COUNT * sizeof(double)) == 0);
    dcp_timeline_destroy(again);
    for (int changed = 0; changed < 2; changed++) {
        dcp_sim_options_t other = options;
        other.seed += (uint64_t)(changed == 0);
        other.step += changed == 1;
        CHECK_OK(dcp_sim_run(&plan, &other, &again));
        int64_t equal = 0;
        for (int64_t i = 0; i < COUNT; i++) {
            equal += line->work_s[i] == again->work_s[i];
        }
        CHECK(equal < 5);
        dcp_timeline_destroy(again);
    }
    dcp_timeline_destroy(line);

    /* in a group every rank draws its own, and the slowest decides */
    int64_t group[] = {0, 2};
    int32_t both[] = {0, 1};
    plan.micro_batch_count = 1;
    plan.rank_offsets = group;
    plan.ranks = both;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    CHECK(line->work_s[0] != line->work_s[1]);
    CHECK(line->makespan_s == fmax(line->work_s[0], line->work_s[1]));
    dcp_timeline_destroy(line);
}

static void
test_bad_input(void)
{
    int64_t offsets[] = {0, 1};
    int32_t ranks[] = {2}, round[] = {0};
    double start[] = {0}, end[] = {1}, slowdown[] = {1, 0, 1};
    dcp_plan_t plan = {.micro_batch_count = 1,
                       .rank_offsets = offsets,
                       .ranks = ranks,
                       .start_s = start,
                       .end_s = end,
                       .round = round};
    dcp_sim_options_t options = {.world = 3};
    dcp_timeline_t *line;
    CHECK_OK(dcp_sim_run(&plan, &options, &line));
    dcp_timeline_destroy(line);
    options.world = 2;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "names rank 2") != NULL);
    options.world = 0;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
    options.world = 3;
    options.slowdown = slowdown;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "slowdown of rank 1 = 0") != NULL);
    options.slowdown = NULL;
    options.jitter = NAN;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
    options.jitter = 0;
    offsets[1] = 0;
    CHECK(dcp_sim_run(&plan, &options, &line) == DCP_ERR_ARG);
    dcp_timeline_destroy(NULL);
}

static dcp_status_t
one_run(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 9, 0);
    drawn_plan_t drawn;
    draw(&drawn, &rng, 5, 1);
    dcp_sim_options_t options = {.world = 5, .rounds = 1, .jitter = 0.1};
    dcp_timeline_t *line = NULL;
    dcp_status_t status = dcp_sim_run(&drawn.plan, &options, &line);
    dcp_timeline_destroy(line);
    return status;
}

int
main(void)
{
    test_plan_times_without_jitter();
    test_rounds_of_a_plan_without();
    test_stragglers();
    test_jitter();
    test_bad_input();
    check_every_alloc(one_run);
    return check_finish();
}
