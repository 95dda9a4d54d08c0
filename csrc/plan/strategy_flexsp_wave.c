/* The groups of one wave of strategy `flexsp`.
 *
 * In a wave every rank belongs to one group: group sizes and the sequences of each
 * group are chosen so that the group that ends last ends early: minimise max over
 * groups p of  latency + sum over its sequences of t(s, p), every group's tokens under
 * its cap. In place of the MILP: bisect on the time T. For a T, the longest first, a
 * bucket's sequences need the least size that ends one by T; they fill groups that have
 * room in time and tokens, then open new ones. Of the least T, the groups that end last
 * are doubled while ranks are free, and then give single sequences to the group that
 * ends first as long as that helps. Cost: O(buckets x groups) for every T; many waves
 * get fewer.
 */
#include "strategy_flexsp.h"

#include <math.h>
#include <string.h>

enum {
    FEW_WAVES = 64, /* of more, each is worth less of a search */
    BISECTIONS = 8,
    MOVES = 32,
};

static void
take(flexsp_t *f, flex_group_t *group, int bucket, int64_t count)
{
    group->taken[bucket] += count;
    group->tokens += count * f->tops[bucket];
    group->time_s += (double)count * f->work[group->size_index][bucket];
}

/* Sequences of the bucket that the group has room for in time and tokens. Most groups
 * are full or end by time, which the slow division of tokens need not find out. */
static int64_t
room_for(const flexsp_t *f, const flex_group_t *group, int bucket, double time_s)
{
    int64_t length = f->tops[bucket];
    int64_t tokens = f->caps[group->size_index] - group->tokens;
    double each = f->work[group->size_index][bucket], left = time_s - group->time_s;
    if (each > 0 && left < each) {
        return 0;
    }
    if (each > 0 && left / each * (double)length <= (double)tokens) {
        return (int64_t)(left / each);
    }
    return tokens / length;
}

/* The least size that ends one sequence of the bucket by `time_s`; size_count: none. */
static int64_t
size_for(const flexsp_t *f, int bucket, double time_s)
{
    int64_t i = 0;
    while (i < f->size_count
           && (f->caps[i] < f->tops[bucket]
               || f->rates[i].latency_s + f->work[i][bucket] > time_s)) {
        i++;
    }
    return i;
}

/* Groups that end all sequences of the wave by `time_s`; 0 where none are found. */
static int
try_time(flexsp_t *f, const int64_t counts[FLEXSP_BUCKETS], double time_s)
{
    memset(f->groups, 0, (size_t)f->group_count * sizeof f->groups[0]);
    f->group_count = 0;
    f->free_ranks = f->problem->request->world;
    for (int b = 0; b < f->bucket_count; b++) {
        int64_t left = counts[b];
        f->steps += f->group_count + 1;
        for (int32_t g = 0; g < f->group_count && left > 0; g++) {
            int64_t room = room_for(f, &f->groups[g], b, time_s);
            if (room > 0) {
                room = room < left ? room : left;
                take(f, &f->groups[g], b, room);
                left -= room;
            }
        }
        int64_t size_index = left > 0 ? size_for(f, b, time_s) : 0;
        while (left > 0) {
            if (size_index == f->size_count || f->sizes[size_index] > f->free_ranks) {
                return 0;
            }
            flex_group_t *group = &f->groups[f->group_count++];
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
least_time(const flexsp_t *f, const int64_t counts[FLEXSP_BUCKETS])
{
    double longest = 0, work = 0;
    for (int b = 0; b < f->bucket_count; b++) {
        double alone = INFINITY, shared = INFINITY;
        for (int64_t i = 0; i < f->size_count && counts[b] > 0; i++) {
            double w = f->work[i][b];
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
            time_s += (double)group->taken[b] * f->work[next][b];
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
            double after = fast->time_s + f->work[fast->size_index][b];
            double rest = slow->time_s - f->work[slow->size_index][b];
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

double
flexsp_solve_wave(flexsp_t *f, const int64_t counts[FLEXSP_BUCKETS])
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
