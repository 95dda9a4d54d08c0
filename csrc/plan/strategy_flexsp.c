/* Strategy `flexsp`: FlexSP's formulation with a bounded search instead of its MILP.
 *
 * The step is cut into waves (its micro-batches), contiguous runs of the sequences in
 * order of length, so that the largest number of tokens of a wave is least. In a wave
 * every rank belongs to one group: group sizes and the sequences of each group are
 * chosen so that the group that ends last ends early: minimise
 *     max over groups p of  latency + sum over its sequences of t(s, p),
 * every group's tokens under its cap. Lengths are rounded up to 16 bucket tops, chosen
 * by dynamic programming so that rounding adds fewest tokens; in the search sequences
 * of a bucket are alike. Waves are as few as the caps allow, or up to 4 more: the count
 * whose waves' summed time is least is kept. Recompute is the least of none, selective
 * and full that holds the longest sequence; sizes are powers of two (1 among them,
 * which FlexSP leaves out) and the largest allowed.
 *
 * In place of the MILP, per wave: bisect on the time T. For a T, the longest first,
 * a bucket's sequences need the least size that ends one by T; they fill groups that
 * have room in time and tokens, then open new ones. Of the least T, the groups that end
 * last are doubled while ranks are free, and then give single sequences to the group
 * that ends first as long as that helps. Cost: steps of the search are counted, and
 * further counts of waves are tried only while few were taken; many waves get less
 * each. A barrier ends each wave there; here a rank goes on as soon as its next group
 * is free, unless ranks move in rounds.
 */
#include "choices.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum {
    BUCKETS = 16,
    TOPS = 64, /* candidates for bucket tops */
    MORE_COUNTS = 4,
    FEW_WAVES = 64, /* of more, each is worth less of a search */
    BISECTIONS = 8,
    MOVES = 32,
    STEPS_MOST = 24000, /* visits of (bucket, group) before the search stops */
};

typedef struct flex_group {
    int32_t size_index;
    int64_t tokens;
    double time_s;
    int64_t taken[BUCKETS];
} flex_group_t;

typedef struct flexsp {
    const plan_problem_t *problem;
    plan_setting_t setting; /* its recompute counts */
    int32_t sizes[PLAN_POWERS];
    int64_t caps[PLAN_POWERS];
    plan_rate_t rates[PLAN_POWERS];
    int64_t size_count;
    int64_t tops[BUCKETS]; /* descending */
    int bucket_count;
    int64_t *tokens_before; /* [n + 1] of the sequences in order, rounded up */
    int64_t *list;          /* [n] members of one group */
    flex_group_t *groups;   /* [W] of the wave */
    int32_t group_count, free_ranks;
    int64_t wave_count; /* asked for */
    int64_t steps;
} flexsp_t;

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
    double least[BUCKETS + 1][TOPS + 1]; /* [buckets used][tops covered] */
    int from[BUCKETS + 1][TOPS + 1];
    int count = list_tops(f->problem, tops);
    int most = count < BUCKETS ? count : BUCKETS;
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

static double
work_of(const flexsp_t *f, int64_t size_index, int64_t length)
{
    double l = (double)length;
    return f->rates[size_index].token_s * l + f->rates[size_index].square_s * l * l;
}

static void
take(flexsp_t *f, flex_group_t *group, int bucket, int64_t count)
{
    group->taken[bucket] += count;
    group->tokens += count * f->tops[bucket];
    group->time_s += (double)count * work_of(f, group->size_index, f->tops[bucket]);
}

/* Sequences of the bucket that the group has room for in time and tokens. */
static int64_t
room_for(const flexsp_t *f, const flex_group_t *group, int bucket, double time_s)
{
    int64_t length = f->tops[bucket];
    double each = work_of(f, group->size_index, length), left = time_s - group->time_s;
    int64_t by_tokens = (f->caps[group->size_index] - group->tokens) / length;
    if (each <= 0) {
        return by_tokens;
    }
    return left / each < (double)by_tokens ? (int64_t)fmax(0, left / each) : by_tokens;
}

/* The least size that ends one sequence of the bucket by `time_s`; size_count: none. */
static int64_t
size_for(const flexsp_t *f, int bucket, double time_s)
{
    int64_t i = 0;
    while (i < f->size_count
           && (f->caps[i] < f->tops[bucket]
               || f->rates[i].latency_s + work_of(f, i, f->tops[bucket]) > time_s)) {
        i++;
    }
    return i;
}

/* Groups that end all sequences of the wave by `time_s`; 0 where none are found. */
static int
try_time(flexsp_t *f, const int64_t counts[BUCKETS], double time_s)
{
    f->group_count = 0;
    f->free_ranks = f->problem->request->world;
    for (int b = 0; b < f->bucket_count; b++) {
        int64_t left = counts[b];
        f->steps += f->group_count + 1;
        for (int32_t g = 0; g < f->group_count && left > 0; g++) {
            int64_t room = room_for(f, &f->groups[g], b, time_s);
            room = room < left ? room : left;
            take(f, &f->groups[g], b, room);
            left -= room;
        }
        int64_t size_index = left > 0 ? size_for(f, b, time_s) : 0;
        while (left > 0) {
            if (size_index == f->size_count || f->sizes[size_index] > f->free_ranks) {
                return 0;
            }
            flex_group_t *group = &f->groups[f->group_count++];
            memset(group, 0, sizeof *group);
            group->size_index = (int32_t)size_index;
            group->time_s = f->rates[size_index].latency_s;
            f->free_ranks -= f->sizes[size_index];
            f->steps++;
            int64_t room = room_for(f, group, b, time_s);
            room = room < 1 ? 1 : room < left ? room : left; /* 1: rounding */
            take(f, group, b, room);
            left -= room;
        }
    }
    return 1;
}

/* What no groups of the wave can beat: its longest sequence, its work on all ranks. */
static double
least_time(const flexsp_t *f, const int64_t counts[BUCKETS])
{
    double longest = 0, work = 0;
    for (int b = 0; b < f->bucket_count; b++) {
        double alone = INFINITY, shared = INFINITY;
        for (int64_t i = 0; i < f->size_count && counts[b] > 0; i++) {
            double w = work_of(f, i, f->tops[b]);
            if (f->caps[i] >= f->tops[b]) {
                alone = fmin(alone, f->rates[i].latency_s + w);
                shared = fmin(shared, f->sizes[i] * w);
            }
        }
        if (counts[b] > 0) {
            longest = fmax(longest, alone);
            work += (double)counts[b] * shared;
        }
    }
    return fmax(longest, work / f->problem->request->world);
}

static int32_t
extreme_group(const flexsp_t *f, int latest)
{
    int32_t found = 0;
    for (int32_t g = 1; g < f->group_count; g++) {
        int later = f->groups[g].time_s > f->groups[found].time_s;
        int earlier = f->groups[g].time_s < f->groups[found].time_s;
        found = (latest ? later : earlier) ? g : found;
    }
    return found;
}

/* Doubles the groups that end last while ranks are free and it helps. */
static void
expand(flexsp_t *f)
{
    for (int tries = 0; tries < MOVES && f->free_ranks > 0; tries++) {
        flex_group_t *group = &f->groups[extreme_group(f, 1)];
        int64_t next = group->size_index + 1;
        int32_t size = f->sizes[group->size_index];
        if (next == f->size_count || f->sizes[next] - size > f->free_ranks
            || f->caps[next] < group->tokens) {
            return;
        }
        double time_s = f->rates[next].latency_s;
        for (int b = 0; b < f->bucket_count; b++) {
            time_s += (double)group->taken[b] * work_of(f, next, f->tops[b]);
        }
        if (time_s >= group->time_s) {
            return;
        }
        group->size_index = (int32_t)next;
        group->time_s = time_s;
        f->free_ranks -= f->sizes[next] - size;
    }
}

/* Single sequences from the group that ends last to the one that ends first. */
static void
move_sequences(flexsp_t *f)
{
    for (int tries = 0; tries < MOVES && f->group_count > 1; tries++) {
        flex_group_t *slow = &f->groups[extreme_group(f, 1)];
        flex_group_t *fast = &f->groups[extreme_group(f, 0)];
        double least = slow->time_s * (1 - 1e-9);
        int best = -1;
        for (int b = 0; b < f->bucket_count; b++) {
            double after = fast->time_s + work_of(f, fast->size_index, f->tops[b]);
            double rest = slow->time_s - work_of(f, slow->size_index, f->tops[b]);
            if (slow->taken[b] > 0
                && f->caps[fast->size_index] - fast->tokens >= f->tops[b]
                && fmax(after, rest) < least) {
                least = fmax(after, rest);
                best = b;
            }
        }
        if (best < 0) {
            return;
        }
        take(f, slow, best, -1);
        take(f, fast, best, 1);
    }
}

/* Leaves the groups of a wave; returns its time, INFINITY where it does not fit. */
static double
solve_wave(flexsp_t *f, const int64_t counts[BUCKETS])
{
    int few = f->wave_count <= FEW_WAVES;
    const double growth = few ? 1.25 : 2;
    const int bisections = few ? BISECTIONS : BISECTIONS / 2;
    double low = least_time(f, counts), high = low;
    for (int tries = 0; !try_time(f, counts, high); tries++) {
        if (high == INFINITY) {
            return INFINITY;
        }
        low = high;
        high = tries < 2 * BISECTIONS ? high * growth : INFINITY;
    }
    for (int i = 0; i < bisections && high < INFINITY && high > low; i++) {
        double middle = low + (high - low) / 2;
        if (try_time(f, counts, middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    try_time(f, counts, high);
    expand(f);
    move_sequences(f);
    return f->groups[extreme_group(f, 1)].time_s;
}

/* Sequences of the wave by bucket; they lie one bucket after another. */
static void
count_buckets(const flexsp_t *f, int64_t start, int64_t end, int64_t counts[BUCKETS])
{
    memset(counts, 0, BUCKETS * sizeof counts[0]);
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
emit_wave(flexsp_t *f, int64_t start, const int64_t counts[BUCKETS],
          plan_draft_t *draft)
{
    int64_t at[BUCKETS];
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
        int64_t counts[BUCKETS];
        double time_s = INFINITY;
        for (end = wave_end(f, start, cap);; end = start + (end - start + 1) / 2) {
            count_buckets(f, start, end, counts);
            time_s = solve_wave(f, counts);
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
    DCP_TRY(dcp_alloc(world * (int64_t)sizeof(flex_group_t)
                          + (2 * n + 1) * (int64_t)sizeof(int64_t),
                      "the planner's waves", &memory));
    f.groups = memory;
    f.tokens_before = (int64_t *)(void *)(f.groups + world);
    f.list = f.tokens_before + n + 1;
    choose_buckets(&f);
    sum_tokens(&f);
    dcp_status_t status = search(&f, draft);
    dcp_free(memory);
    return status;
}
