/* Strategy `flexsp`: FlexSP's formulation with a bounded search instead of its MILP.
 *
 * The step is cut into waves (its micro-batches), contiguous runs of the sequences in
 * order of length, so that the largest number of tokens of a wave is least; the groups
 * of a wave are chosen in strategy_flexsp_wave.c. Lengths are rounded up to 16 bucket
 * tops, chosen by dynamic programming so that rounding adds fewest tokens. Waves are as
 * few as the caps allow, or up to 4 more: the count whose waves' summed time is least
 * is kept. Recompute is the least of none, selective and full that holds the longest
 * sequence; sizes are powers of two (1 among them, which FlexSP leaves out) and the
 * largest allowed.
 *
 * Cost: steps of the search are counted, and further counts of waves are tried only
 * while few were taken. A barrier ends each wave there; here a rank goes on as soon as
 * its next group is free, unless ranks move in rounds.
 */
#include "strategy_flexsp.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum {
    TOPS = 64, /* candidates for bucket tops */
    MORE_COUNTS = 4,
    STEPS_MOST = 24000, /* visits of (bucket, group) before the search stops */
};

/* Candidates for bucket tops: lengths of the step, at least a ratio apart. */
typedef struct top {
    int64_t length, count, tokens; /* of the sequences that round up to it */
} top_t;

static int
list_tops(const plan_problem_t *problem, top_t tops[TOPS])
{
    const dcp_plan_request_t *request = problem->request;
    int64_t n = request->length_count;
    double longest = (double)problem->longest;
    double shortest = (double)request->lengths[problem->order[n - 1]];
    double ratio = pow(shortest / longest, 1.0 / (TOPS - 1)); /* < 1 */
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t length = request->lengths[problem->order[i]];
        if (count == 0
            || (count < TOPS && length != tops[count - 1].length
                && (double)length <= (double)tops[count - 1].length * ratio)) {
            tops[count++] = (top_t){.length = length};
        }
        tops[count - 1].count++;
        tops[count - 1].tokens += length;
    }
    return count;
}

/* Bucket tops that round up to fewest tokens. */
static void
choose_buckets(flexsp_t *f)
{
    top_t tops[TOPS];
    double least[FLEXSP_BUCKETS + 1][TOPS + 1]; /* [buckets used][tops covered] */
    int from[FLEXSP_BUCKETS + 1][TOPS + 1];
    int count = list_tops(f->problem, tops);
    int most = count < FLEXSP_BUCKETS ? count : FLEXSP_BUCKETS;
    for (int end = 0; end <= count; end++) {
        least[0][end] = end == 0 ? 0 : INFINITY;
    }
    for (int used = 1; used <= most; used++) {
        for (int end = 0; end <= count; end++) {
            double added;
            int64_t members = 0, tokens = 0;
            least[used][end] = INFINITY;
            from[used][end] = 0;
            for (int start = end - 1; start >= 0; start--) {
                members += tops[start].count;
                tokens += tops[start].tokens;
                added = (double)members * (double)tops[start].length - (double)tokens;
                if (least[used - 1][start] + added < least[used][end]) {
                    least[used][end] = least[used - 1][start] + added;
                    from[used][end] = start;
                }
            }
        }
    }
    f->bucket_count = most;
    for (int used = most, end = count; used > 0; used--) {
        end = from[used][end];
        f->tops[used - 1] = tops[end].length;
    }
}

static void
price_buckets(flexsp_t *f)
{
    for (int64_t i = 0; i < f->size_count; i++) {
        for (int b = 0; b < f->bucket_count; b++) {
            double l = (double)f->tops[b];
            f->work[i][b] = f->rates[i].token_s * l + f->rates[i].square_s * l * l;
        }
    }
}

/* Tokens of the sequences in order, rounded up to their bucket's top. */
static void
sum_tokens(flexsp_t *f)
{
    int b = 0;
    f->tokens_before[0] = 0;
    for (int64_t i = 0; i < f->problem->request->length_count; i++) {
        int64_t length = f->problem->request->lengths[f->problem->order[i]];
        while (b + 1 < f->bucket_count && length <= f->tops[b + 1]) {
            b++;
        }
        f->tokens_before[i + 1] = f->tokens_before[i] + f->tops[b];
    }
}

/* End of the wave that starts at `start` under a cap of tokens. */
static int64_t
wave_end(const flexsp_t *f, int64_t start, int64_t cap)
{
    int64_t n = f->problem->request->length_count;
    int64_t low = start + 1, high = n; /* one sequence at least */
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (f->tokens_before[middle] - f->tokens_before[start] <= cap) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Least cap of tokens with which `count` waves hold all. */
static int64_t
wave_cap(const flexsp_t *f, int64_t count)
{
    int64_t n = f->problem->request->length_count, total = f->tokens_before[n];
    int64_t low = total / count, high = total;
    low = low > f->problem->longest ? low : f->problem->longest;
    while (low < high) {
        int64_t middle = low + (high - low) / 2, at = 0, used = 0;
        for (; at < n && used < count; used++) {
            at = wave_end(f, at, middle);
        }
        if (at == n) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Sequences of the wave by bucket; they lie one bucket after another. */
static void
count_buckets(const flexsp_t *f, int64_t start, int64_t end,
              int64_t counts[FLEXSP_BUCKETS])
{
    memset(counts, 0, FLEXSP_BUCKETS * sizeof counts[0]);
    int b = 0;
    for (int64_t i = start; i < end; i++) {
        int64_t length = f->problem->request->lengths[f->problem->order[i]];
        while (b + 1 < f->bucket_count && length <= f->tops[b + 1]) {
            b++;
        }
        counts[b]++;
    }
}

/* Writes the groups of a wave whose first sequence is order[start]; larger first. */
static dcp_status_t
emit_wave(flexsp_t *f, int64_t start, const int64_t counts[FLEXSP_BUCKETS],
          plan_draft_t *draft)
{
    int64_t at[FLEXSP_BUCKETS];
    for (int b = 0; b < f->bucket_count; b++) {
        at[b] = start;
        start += counts[b];
    }
    int32_t first = 0;
    for (int64_t s = f->size_count - 1; s >= 0; s--) {
        for (int32_t g = 0; g < f->group_count; g++) {
            const flex_group_t *group = &f->groups[g];
            int64_t count = 0;
            if (group->size_index != s) {
                continue;
            }
            for (int b = 0; b < f->bucket_count; b++) {
                for (int64_t i = 0; i < group->taken[b]; i++) {
                    f->list[count++] = f->problem->order[at[b]++];
                }
            }
            if (count > 0) {
                plan_sort_ascending(f->list, count);
                f->setting.group = f->sizes[s];
                DCP_TRY(plan_draft_add(draft, first, &f->setting, f->list, count));
                first += f->sizes[s];
            }
        }
    }
    return DCP_OK;
}

/* All waves of a count, and their summed time; where no groups are found for a wave,
 * its shorter half waits for the next one (one sequence always fits). draft NULL: only
 * the time. */
static dcp_status_t
solve_waves(flexsp_t *f, int64_t wave_count, plan_draft_t *draft, double *time_p)
{
    int64_t n = f->problem->request->length_count, cap = wave_cap(f, wave_count);
    f->wave_count = wave_count;
    *time_p = 0;
    for (int64_t start = 0, end; start < n; start = end) {
        int64_t counts[FLEXSP_BUCKETS];
        double time_s = INFINITY;
        for (end = wave_end(f, start, cap);; end = start + (end - start + 1) / 2) {
            count_buckets(f, start, end, counts);
            time_s = flexsp_solve_wave(f, counts);
            if (time_s < INFINITY || end - start <= 1) {
                break;
            }
        }
        *time_p += time_s;
        if (draft != NULL) {
            DCP_TRY(emit_wave(f, start, counts, draft));
        }
    }
    return DCP_OK;
}

/* As few waves as the caps allow. */
static int64_t
fewest_waves(const flexsp_t *f)
{
    double most = 1;
    for (int64_t i = 0; i < f->size_count; i++) {
        double groups = f->problem->request->world / f->sizes[i];
        most = fmax(most, groups * (double)f->caps[i]);
    }
    int64_t n = f->problem->request->length_count;
    double count = ceil((double)f->tokens_before[n] / most);
    return count < 1 ? 1 : count < (double)n ? (int64_t)count : n;
}

/* The draft is that of the best count; the first one is written at once, since often no
 * other is tried. */
static dcp_status_t
search(flexsp_t *f, plan_draft_t *draft)
{
    int64_t n = f->problem->request->length_count, fewest = fewest_waves(f);
    int64_t best = fewest;
    double least, time_s;
    DCP_TRY(solve_waves(f, fewest, draft, &least));
    for (int64_t count = fewest + 1;
         count <= n && count <= fewest + MORE_COUNTS && f->steps <= STEPS_MOST;
         count++) {
        DCP_TRY(solve_waves(f, count, NULL, &time_s));
        if (time_s < least) {
            least = time_s;
            best = count;
        }
    }
    if (best == fewest) {
        return DCP_OK;
    }
    plan_draft_clear(draft);
    return solve_waves(f, best, draft, &time_s);
}

dcp_status_t
plan_flexsp_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    flexsp_t f = {.problem = problem};
    f.size_count = plan_power_sizes(problem, f.sizes);
    DCP_TRY(plan_least_setting(problem, f.sizes, f.size_count, problem->longest,
                               &f.setting));
    for (int64_t i = 0; i < f.size_count; i++) {
        f.setting.group = f.sizes[i];
        f.caps[i] = plan_cap_tokens(problem, &f.setting);
        f.rates[i] = plan_rate_slowest(problem, &f.setting);
    }
    int64_t n = problem->request->length_count, world = problem->request->world;
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(world * (int64_t)sizeof(flex_group_t)
                                 + (2 * n + 1) * (int64_t)sizeof(int64_t),
                             "the planner's waves", &memory));
    f.groups = memory;
    f.tokens_before = (int64_t *)(void *)(f.groups + world);
    f.list = f.tokens_before + n + 1;
    choose_buckets(&f);
    price_buckets(&f);
    sum_tokens(&f);
    dcp_status_t status = search(&f, draft);
    dcp_free(memory);
    return status;
}
