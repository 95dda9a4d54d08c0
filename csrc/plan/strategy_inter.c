/* Strategy `inter`: the paper's. Each length class has its own group size, and counts
 * of accumulation even out the groups.
 *
 * Recompute is bucket's, the same for all. A class takes the size, of those that fit
 * its longest sequence, whose full micro-batch computes most tokens a rank-second; its
 * batch size is what the caps allow, without bucket's median rule. A *chunk* is what
 * one group computes of one class, g micro-batches one after another. With t_i the time
 * of class i's full micro-batch, targets T = k t_i (T <= G max t) are enumerated; for
 * each, g_i has least |g t_i - T|, misses above the target weighed 1.2, below 1.0, with
 * g_i t_i <= G max t. The published sampler keeps the target of least summed penalty
 * and draws further sequences to fill it. Here the step's sequences are given and may
 * be few, so targets below t_i count as well: shares of the even time, rank-seconds of
 * the step over the world; for them micro-batches of class i hold fewer sequences, T /
 * t_i of the full ones. Even shares and then the targets of least penalty are laid out,
 * and the one that ends first is kept. Laid out: chunks of larger groups first, longer
 * ones first, each on the aligned block of ranks that is free first; a class's last
 * chunk has what is left. No sequence is dropped, none drawn twice. Cost: O(sequences +
 * tries (sequences log W + classes W)); tries are few where that is much.
 */
#include "classes.h"

#include "dcp/alloc.h"

#include <math.h>
#include <string.h>

enum {
    GROUP_MOST = 5, /* longest chunk over longest micro-batch, as published */
    TIMES_MOST = 8, /* multiples of each class's time that are targets */
    SHARES = 4,     /* shares of the even time that are targets */
    TARGETS_MOST = PLAN_CLASSES * TIMES_MOST + SHARES,
    TRIES_MOST = 24,    /* targets laid out */
    WORK_MOST = 150000, /* sequences and blocks looked at in all */
};

static const double penalty_above = 1.2, penalty_below = 1.0;

typedef struct target {
    double time_s, penalty;
} target_t;

typedef struct inter {
    const plan_problem_t *problem;
    plan_class_t *classes;               /* [PLAN_CLASSES] */
    int order[PLAN_CLASSES];             /* classes in use: larger groups first, then
                                            longer micro-batches */
    int64_t batch_size[PLAN_CLASSES];    /* sequences of a micro-batch */
    int64_t chunk_batches[PLAN_CLASSES]; /* g of each class */
    int used_count;
    double longest_s;       /* of a full micro-batch of any class */
    double *ready_s;        /* [W] */
    plan_heap_item_t *heap; /* [W] blocks of one size, first free first */
} inter_t;

/* Time of a micro-batch of these members on a group. */
static double
batch_time(const inter_t *inter, const plan_rate_t *rate, const plan_class_t *class,
           int64_t start, int64_t end)
{
    double tokens = 0, squares = 0;
    for (int64_t i = start; i < end; i++) {
        double length = (double)inter->problem->request->lengths[class->members[i]];
        tokens += length;
        squares += length * length;
    }
    return plan_rate_time(rate, tokens, squares);
}

/* Sets the micro-batches of class k for a target; returns the penalty of a chunk. */
static double
aim_class(inter_t *inter, int k, double target_s)
{
    const plan_class_t *class = &inter->classes[k];
    double t = class->time_s, least = INFINITY;
    inter->batch_size[k] = class->batch_size;
    inter->chunk_batches[k] = 1;
    if (t > target_s) {
        double size = (double)class->batch_size * target_s / t;
        inter->batch_size[k] = size < 1 ? 1 : (int64_t)size;
        t *= (double)inter->batch_size[k] / (double)class->batch_size;
    }
    int64_t most = t > 0 ? (int64_t)fmin(GROUP_MOST * inter->longest_s / t, 1e15) : 1;
    int64_t below = t > 0 ? (int64_t)fmin(target_s / t, 1e15) : 1;
    for (int64_t g = below < 1 ? 1 : below; g <= below + 1; g++) {
        double miss = (double)g * t - target_s;
        double penalty = miss > 0 ? penalty_above * miss : -penalty_below * miss;
        if ((g <= most || g == 1) && penalty < least) {
            least = penalty;
            inter->chunk_batches[k] = g;
        }
    }
    return least;
}

/* Blocks of one size, by when all of their ranks are free. Returns how many. */
static int64_t
open_blocks(inter_t *inter, int32_t group)
{
    int64_t count = inter->problem->request->world / group;
    for (int64_t b = 0; b < count; b++) {
        double ready = 0;
        for (int32_t r = 0; r < group; r++) {
            ready = fmax(ready, inter->ready_s[b * group + r]);
        }
        inter->heap[b] = (plan_heap_item_t){.key = ready, .index = b};
    }
    plan_heap_build(inter->heap, count);
    return count;
}

static void
close_blocks(inter_t *inter, int32_t group, int64_t count)
{
    for (int64_t b = 0; b < count; b++) {
        for (int32_t r = 0; r < group; r++) {
            inter->ready_s[inter->heap[b].index * group + r] = inter->heap[b].key;
        }
    }
}

/* Puts one class's chunks on the open blocks; draft NULL: only times. */
static dcp_status_t
place_class(inter_t *inter, int k, int64_t block_count,
            const plan_rate_t rates[DCP_TIERS], plan_draft_t *draft)
{
    const dcp_cost_t *cost = &inter->problem->request->cost;
    const plan_class_t *class = &inter->classes[k];
    int32_t group = class->setting.group;
    int64_t size = inter->batch_size[k], chunk_batches = inter->chunk_batches[k];
    int64_t batches = (class->count + size - 1) / size;
    for (int64_t batch = 0; batch < batches;) {
        int32_t first = (int32_t)inter->heap[0].index * group;
        const plan_rate_t *rate = &rates[dcp_cost_tier(cost, first, group)];
        int64_t end = chunk_batches < batches - batch ? batch + chunk_batches : batches;
        for (; batch < end; batch++) {
            int64_t from = batch * size;
            int64_t to = batch + 1 < batches ? from + size : class->count;
            inter->heap[0].key += batch_time(inter, rate, class, from, to);
            if (draft != NULL) {
                DCP_TRY(plan_draft_add(draft, first, &class->setting,
                                       class->members + from, to - from));
            }
        }
        plan_heap_sift(inter->heap, block_count);
    }
    return DCP_OK;
}

/* Lays the step out with the chunks as they are; draft NULL: only the makespan. */
static dcp_status_t
lay_out(inter_t *inter, plan_draft_t *draft, double *makespan_p)
{
    int32_t world = inter->problem->request->world;
    for (int32_t r = 0; r < world; r++) {
        inter->ready_s[r] = 0;
    }
    for (int i = 0; i < inter->used_count;) {
        const plan_setting_t *setting = &inter->classes[inter->order[i]].setting;
        plan_rate_t rates[DCP_TIERS];
        rates[DCP_TIER_NODE] = plan_rate(inter->problem, 0, setting);
        rates[DCP_TIER_CLUSTER] = plan_rate_slowest(inter->problem, setting);
        int64_t count = open_blocks(inter, setting->group);
        for (; i < inter->used_count; i++) {
            int k = inter->order[i];
            if (inter->classes[k].setting.group != setting->group) {
                break;
            }
            DCP_TRY(place_class(inter, k, count, rates, draft));
        }
        close_blocks(inter, setting->group, count);
    }
    *makespan_p = 0;
    for (int32_t r = 0; r < world; r++) {
        *makespan_p = fmax(*makespan_p, inter->ready_s[r]);
    }
    return DCP_OK;
}

/* Sets every class's micro-batches for a target; returns the summed penalty. */
static double
aim(inter_t *inter, double target_s)
{
    double sum = 0;
    for (int i = 0; i < inter->used_count; i++) {
        sum += aim_class(inter, inter->order[i], target_s);
    }
    return sum;
}

/* The targets: first shares of the even time, then multiples of micro-batches by
 * penalty, equal ones by time. Returns how many. */
static int
list_targets(inter_t *inter, target_t targets[TARGETS_MOST])
{
    double rank_seconds = 0;
    for (int i = 0; i < inter->used_count; i++) {
        const plan_class_t *class = &inter->classes[inter->order[i]];
        rank_seconds += class->setting.group * class->time_s * (double)class->count
                        / (double)class->batch_size;
    }
    int shares = 0;
    for (; shares < SHARES; shares++) {
        double time_s = rank_seconds / inter->problem->request->world / (shares + 1);
        targets[shares] = (target_t){.time_s = time_s};
    }
    int count = shares;
    for (int i = 0; i < inter->used_count; i++) {
        double t = inter->classes[inter->order[i]].time_s;
        for (int k = 1; k <= TIMES_MOST && k * t <= GROUP_MOST * inter->longest_s;
             k++) {
            target_t target = {.time_s = k * t, .penalty = aim(inter, k * t)};
            int at = count++;
            for (; at > shares
                   && (targets[at - 1].penalty > target.penalty
                       || (targets[at - 1].penalty == target.penalty
                           && targets[at - 1].time_s > target.time_s));
                 at--) {
                targets[at] = targets[at - 1];
            }
            targets[at] = target;
        }
    }
    return count;
}

/* Leaves the micro-batches of the best target. */
static dcp_status_t
choose_target(inter_t *inter)
{
    const dcp_plan_request_t *request = inter->problem->request;
    target_t targets[TARGETS_MOST];
    int count = list_targets(inter, targets);
    int64_t work = request->length_count + inter->used_count * (int64_t)request->world;
    int64_t tries = WORK_MOST / work;
    tries = tries < SHARES ? SHARES : tries > TRIES_MOST ? TRIES_MOST : tries;
    double least = INFINITY, best = 0, last = -1;
    for (int i = 0; i < count && tries > 0; i++) {
        if (targets[i].time_s == last) {
            continue;
        }
        last = targets[i].time_s;
        tries--;
        double makespan;
        aim(inter, last);
        DCP_TRY(lay_out(inter, NULL, &makespan));
        if (makespan < least) {
            least = makespan;
            best = last;
        }
    }
    aim(inter, best);
    return DCP_OK;
}

/* Classes in use: larger groups first, then longer micro-batches, then longer ones. */
static void
order_classes(inter_t *inter)
{
    const plan_class_t *classes = inter->classes;
    inter->used_count = 0;
    inter->longest_s = 0;
    for (int k = PLAN_CLASSES - 1; k >= 0; k--) {
        if (classes[k].count == 0) {
            continue;
        }
        inter->longest_s = fmax(inter->longest_s, classes[k].time_s);
        int at = inter->used_count++;
        for (; at > 0; at--) {
            const plan_class_t *other = &classes[inter->order[at - 1]];
            if (other->setting.group > classes[k].setting.group
                || (other->setting.group == classes[k].setting.group
                    && other->time_s >= classes[k].time_s)) {
                break;
            }
            inter->order[at] = inter->order[at - 1];
        }
        inter->order[at] = k;
    }
}

dcp_status_t
plan_inter_with(const plan_problem_t *problem, plan_draft_t *draft,
                plan_class_t *classes)
{
    for (int k = 0; k < PLAN_CLASSES; k++) {
        if (classes[k].count > 0) {
            plan_rate_t rate = plan_rate_slowest(problem, &classes[k].setting);
            plan_class_fill(&classes[k], plan_cap_tokens(problem, &classes[k].setting),
                            &rate);
        }
    }
    int64_t world = problem->request->world;
    void *memory;
    DCP_TRY(dcp_alloc_array(world, sizeof(plan_heap_item_t) + sizeof(double),
                            "the planner's blocks", &memory));
    inter_t inter = {.problem = problem, .classes = classes, .heap = memory};
    inter.ready_s = (double *)(void *)(inter.heap + world);
    order_classes(&inter);
    double makespan;
    dcp_status_t status = choose_target(&inter);
    if (status == DCP_OK) {
        status = lay_out(&inter, draft, &makespan);
    }
    dcp_free(memory);
    return status;
}

/* The size whose full micro-batch of the class computes most tokens a rank-second. One
 * at least fits: the one that fits the run's longest. */
static void
choose_group(const plan_pair_t *pairs, int64_t count, plan_class_t *class)
{
    double most = -1;
    for (int64_t i = 0; i < count; i++) {
        plan_class_t full = *class;
        if (pairs[i].cap_tokens < class->longest) {
            continue;
        }
        plan_class_fill(&full, pairs[i].cap_tokens, &pairs[i].rate);
        double seconds = pairs[i].setting.group * full.time_s;
        double rate = (double)(full.batch_size * full.longest)
                      / (seconds > 0 ? seconds : pairs[i].setting.group);
        if (rate > most) {
            most = rate;
            class->setting = pairs[i].setting;
        }
    }
}

dcp_status_t
plan_inter_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_setting_t bucket;
    DCP_TRY(plan_bucket_setting(problem, &bucket));
    plan_pair_t *pairs;
    int64_t count, same = 0;
    DCP_TRY(plan_pairs_create(problem, 1, &pairs, &count));
    for (int64_t i = 0; i < count; i++) { /* only bucket's recompute */
        if (memcmp(pairs[i].setting.recompute, bucket.recompute,
                   sizeof bucket.recompute)
            == 0) {
            pairs[same++] = pairs[i];
        }
    }
    plan_class_t classes[PLAN_CLASSES];
    void *memory;
    dcp_status_t status = plan_classes_create(problem, classes, &memory);
    if (status == DCP_OK) {
        for (int k = 0; k < PLAN_CLASSES; k++) {
            if (classes[k].count > 0) {
                choose_group(pairs, same, &classes[k]);
            }
        }
        status = plan_inter_with(problem, draft, classes);
        dcp_free(memory);
    }
    dcp_free(pairs);
    return status;
}
