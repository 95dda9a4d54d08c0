/* Strategy `megatron`: Megatron-Core's default dynamic context parallelism, a greedy in
 * waves.
 *
 * Recompute is the least of none, selective and full that holds the step's longest
 * sequence; most tokens on a rank follow from it and the caps. A sequence needs
 * CP(s) = the least power of two whose ranks hold it together (or the largest group
 * allowed, where only that holds it). Work is counted as there, s^2 / CP.
 * A wave: longest first, a sequence opens a group of CP(s) ranks while as many are
 * free, else it joins the least loaded group if that has room for it, else it waits for
 * the next wave. Sizes only fall, so every group is large enough for what may join.
 * Then the smallest groups are doubled until no rank idles (or as long as ranks and
 * caps allow: worlds that are no power of two leave some idle). Groups lie by
 * descending size, which aligns them. There a barrier ends each wave; here a rank goes
 * on as soon as its next group is free, unless ranks move in rounds. Cost: O(n log W) a
 * wave's visits; a wave stops when no group has room for the shortest sequence left.
 */
#include "choices.h"

#include "dcp/alloc.h"

typedef struct wave_group {
    int32_t size; /* ranks */
    int64_t tokens, cap_tokens, count;
    int64_t last; /* sequence (position in order), chained through member[]; -1: none */
} wave_group_t;

typedef struct megatron {
    const plan_problem_t *problem;
    plan_setting_t setting; /* its recompute counts */
    int32_t sizes[PLAN_POWERS];
    int64_t caps[PLAN_POWERS]; /* most tokens of a group of each size */
    int64_t size_count;
    int64_t *next;   /* [n + 1] waiting sequences by position in order; next[n] first */
    int64_t *member; /* [n] */
    int64_t *list;   /* [n] members of one group */
    wave_group_t *groups;   /* [W] */
    plan_heap_item_t *heap; /* [W] groups by load */
    int32_t group_count, free_ranks;
} megatron_t;

/* Index of CP(s) in sizes. */
static int64_t
size_for(const megatron_t *m, int64_t length)
{
    int64_t i = 0;
    while (m->caps[i] < length) {
        i++;
    }
    return i;
}

/* Opens a group for a sequence of `length`. Returns its number. */
static int64_t
open_group(megatron_t *m, int64_t size_index, double square)
{
    int64_t group = m->group_count;
    int32_t size = m->sizes[size_index];
    m->groups[group] =
        (wave_group_t){.size = size, .cap_tokens = m->caps[size_index], .last = -1};
    plan_heap_push(m->heap, group,
                   (plan_heap_item_t){.key = square / size, .index = group});
    m->group_count++;
    m->free_ranks -= size;
    return group;
}

static void
join_group(megatron_t *m, int64_t group, int64_t position, int64_t length)
{
    wave_group_t *g = &m->groups[group];
    m->member[position] = g->last;
    g->last = position;
    g->tokens += length;
    g->count++;
}

/* Takes what fits into one wave out of the waiting list. */
static void
fill_wave(megatron_t *m)
{
    const dcp_plan_request_t *request = m->problem->request;
    int64_t n = request->length_count, before = n, with_room = 0;
    int64_t shortest = request->lengths[m->problem->order[n - 1]];
    m->group_count = 0;
    m->free_ranks = request->world;
    for (int64_t at = m->next[n]; at < n && (m->free_ranks > 0 || with_room > 0);
         at = m->next[at]) {
        int64_t length = request->lengths[m->problem->order[at]];
        int64_t size_index = size_for(m, length), group;
        double square = (double)length * (double)length;
        if (m->sizes[size_index] <= m->free_ranks) {
            group = open_group(m, size_index, square);
            with_room++;
        } else {
            group = m->heap[0].index;
            const wave_group_t *g = &m->groups[group];
            if (length > g->cap_tokens - g->tokens) {
                before = at;
                continue;
            }
            m->heap[0].key += square / g->size;
            plan_heap_sift(m->heap, m->group_count);
        }
        join_group(m, group, at, length);
        m->next[before] = m->next[at];
        const wave_group_t *g = &m->groups[group];
        with_room -= g->cap_tokens - g->tokens < shortest;
    }
}

/* Doubles the smallest groups as long as ranks are free and the caps allow. */
static void
expand(megatron_t *m)
{
    int64_t count = m->group_count;
    for (int64_t g = 0; g < count; g++) { /* equal sizes: longer sequences first */
        m->heap[g] = (plan_heap_item_t){.key = m->groups[g].size, .index = g};
    }
    plan_heap_build(m->heap, count);
    while (count > 0) {
        wave_group_t *g = &m->groups[m->heap[0].index];
        int64_t i = 0;
        while (i < m->size_count && m->sizes[i] != 2 * g->size) {
            i++;
        }
        if (i == m->size_count || g->size > m->free_ranks || m->caps[i] < g->tokens) {
            m->heap[0] = m->heap[--count];
        } else {
            m->free_ranks -= g->size;
            g->size *= 2;
            m->heap[0].key = g->size;
        }
        plan_heap_sift(m->heap, count);
    }
}

static dcp_status_t
emit_wave(megatron_t *m, plan_draft_t *draft)
{
    int32_t first = 0;
    for (int64_t s = m->size_count - 1; s >= 0; s--) { /* descending sizes */
        for (int32_t i = 0; i < m->group_count; i++) {
            const wave_group_t *g = &m->groups[i];
            if (g->size != m->sizes[s]) {
                continue;
            }
            int64_t count = 0;
            for (int64_t at = g->last; at >= 0; at = m->member[at]) {
                m->list[count++] = m->problem->order[at];
            }
            plan_sort_ascending(m->list, count);
            m->setting.group = g->size;
            DCP_TRY(plan_draft_add(draft, first, &m->setting, m->list, count));
            first += g->size;
        }
    }
    return DCP_OK;
}

static dcp_status_t
run_waves(megatron_t *m, plan_draft_t *draft)
{
    int64_t n = m->problem->request->length_count;
    for (int64_t i = 0; i < n; i++) {
        m->next[i] = i + 1;
    }
    m->next[n] = 0;
    while (m->next[n] < n) {
        fill_wave(m);
        expand(m);
        DCP_TRY(emit_wave(m, draft));
    }
    return DCP_OK;
}

dcp_status_t
plan_megatron_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    megatron_t m = {.problem = problem};
    m.size_count = plan_power_sizes(problem, m.sizes);
    DCP_TRY(plan_least_setting(problem, m.sizes, m.size_count, problem->longest,
                               &m.setting));
    for (int64_t i = 0; i < m.size_count; i++) {
        m.setting.group = m.sizes[i];
        m.caps[i] = plan_cap_tokens(problem, &m.setting);
    }
    int64_t n = problem->request->length_count, world = problem->request->world;
    void *memory;
    DCP_TRY(dcp_alloc(world * (int64_t)(sizeof(wave_group_t) + sizeof(plan_heap_item_t))
                          + (3 * n + 1) * (int64_t)sizeof(int64_t),
                      "the planner's waves", &memory));
    m.groups = memory;
    m.heap = (plan_heap_item_t *)(void *)(m.groups + world);
    m.next = (int64_t *)(void *)(m.heap + world);
    m.member = m.next + n + 1;
    m.list = m.member + n;
    dcp_status_t status = run_waves(&m, draft);
    dcp_free(memory);
    return status;
}
