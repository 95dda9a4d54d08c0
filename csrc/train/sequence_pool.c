/* What groups of ranks need of the world: communicators, and a window that holds the
 * arena of every rank, so that a group's ranks read each other's rows in place.
 *
 * Both are made before a step computes, when all ranks meet anyway, and kept. A part of
 * the window is as large as its rank's largest micro-batch so far needed; when one must
 * grow, all are freed first and made anew. Once there is a window, micro-batches of one
 * rank lie in it too, so that a rank never holds two arenas. Runs without groups pay
 * nothing. */
#include "sequence.h"

#include "dcp/alloc.h"

#include <inttypes.h>

typedef struct pool_comm {
    dcp_rank_group_t group;
    dcp_comm_t *comm; /* owned; NULL: this rank is not in the group */
} pool_comm_t;

struct sequence_pool {
    dcp_window_t *window; /* owned; NULL: none yet, or none wanted */
    void *memory;         /* owned: instead of a window */
    int64_t memory_bytes;
    pool_comm_t *comms; /* owned, [comm_count] */
    int64_t comm_count, comm_cap;
    int64_t needs[]; /* [ranks] */
};

static bool
is_in(const dcp_rank_group_t *group, int32_t rank)
{
    return rank >= group->first && rank - group->first < group->count;
}

static const pool_comm_t *
find(const sequence_pool_t *pool, int32_t first, int32_t count)
{
    for (int64_t i = 0; pool != NULL && i < pool->comm_count; i++) {
        const dcp_rank_group_t *group = &pool->comms[i].group;
        if (group->first == first && group->count == count) {
            return &pool->comms[i];
        }
    }
    return NULL;
}

dcp_comm_t *
sequence_comm(const dcp_sharded_t *sharded, int32_t first, int32_t count)
{
    const pool_comm_t *found = find(sharded->sequence_pool, first, count);
    return found != NULL ? found->comm : NULL;
}

const dcp_window_t *
sequence_window(const dcp_sharded_t *sharded)
{
    return sharded->sequence_pool != NULL ? sharded->sequence_pool->window : NULL;
}

dcp_status_t
sequence_memory(dcp_sharded_t *sharded, int64_t bytes, void **memory_p)
{
    sequence_pool_t *pool = sharded->sequence_pool;
    if (pool->memory == NULL || bytes > pool->memory_bytes) {
        dcp_free(pool->memory);
        pool->memory = NULL;
        DCP_TRY(dcp_alloc(bytes, "rows of other ranks", &pool->memory));
        pool->memory_bytes = bytes;
    }
    *memory_p = pool->memory;
    return DCP_OK;
}

static dcp_status_t
check_groups(const dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    int32_t size = dcp_comm_size(sharded->comm);
    for (int64_t i = 0; i < args->group_count; i++) {
        const dcp_rank_group_t *group = &args->groups[i];
        if (group->first < 0 || group->count < 2
            || group->first > size - group->count) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "groups[%" PRId64
                            "] of %d ranks from rank %d on must be two or more of the "
                            "%d ranks",
                            i, (int)group->count, (int)group->first, (int)size);
        }
    }
    return DCP_OK;
}

static dcp_status_t
reserve(sequence_pool_t *pool, int64_t count)
{
    void *memory;
    if (count <= pool->comm_cap) {
        return DCP_OK;
    }
    DCP_TRY(dcp_alloc_array(2 * count, (int64_t)sizeof(pool_comm_t),
                            "communicators of groups", &memory));
    pool_comm_t *comms = memory;
    for (int64_t i = 0; i < pool->comm_count; i++) {
        comms[i] = pool->comms[i];
    }
    dcp_free(pool->comms);
    pool->comms = comms;
    pool->comm_cap = 2 * count;
    return DCP_OK;
}

/* One split makes the communicators of as many groups as share no rank. */
static dcp_status_t
split_some(dcp_sharded_t *sharded, const dcp_step_args_t *args, bool *done_p)
{
    sequence_pool_t *pool = sharded->sequence_pool;
    int32_t rank = dcp_comm_rank(sharded->comm), end = 0, color = -1;
    int64_t first = pool->comm_count;
    *done_p = true;
    for (int64_t i = 0; i < args->group_count; i++) {
        const dcp_rank_group_t *group = &args->groups[i];
        if (find(pool, group->first, group->count) != NULL) {
            continue;
        }
        if (group->first < end) {
            *done_p = false;
            continue;
        }
        DCP_TRY(reserve(pool, pool->comm_count + 1));
        pool->comms[pool->comm_count++] = (pool_comm_t){.group = *group};
        end = group->first + group->count;
        color = is_in(group, rank) ? group->first : color;
    }
    if (pool->comm_count == first) {
        return DCP_OK;
    }
    dcp_comm_t *comm;
    DCP_TRY(dcp_comm_split(sharded->comm, color, rank, &comm));
    for (int64_t i = first; i < pool->comm_count; i++) {
        if (is_in(&pool->comms[i].group, rank)) {
            pool->comms[i].comm = comm;
        }
    }
    return DCP_OK;
}

static dcp_status_t
grow_window(dcp_sharded_t *sharded, int64_t need)
{
    sequence_pool_t *pool = sharded->sequence_pool;
    int32_t size = dcp_comm_size(sharded->comm);
    void *memory;
    DCP_TRY(dcp_alloc_array(size, (int64_t)sizeof(int64_t), "sizes", &memory));
    int64_t *ones = memory;
    for (int32_t r = 0; r < size; r++) {
        ones[r] = 1;
    }
    dcp_status_t status =
        dcp_comm_allgatherv(sharded->comm, &need, ones, pool->needs, DCP_I64);
    dcp_free(memory);
    DCP_TRY(status);
    bool fits = pool->window != NULL;
    for (int32_t r = 0; r < size && fits; r++) {
        fits = pool->needs[r] <= dcp_window_bytes(pool->window, r);
    }
    if (fits) {
        return DCP_OK;
    }
    int32_t rank = dcp_comm_rank(sharded->comm);
    int64_t bytes = need;
    if (pool->window != NULL && dcp_window_bytes(pool->window, rank) > bytes) {
        bytes = dcp_window_bytes(pool->window, rank);
    }
    dcp_model_set_arena(sharded->model, NULL, 0);
    dcp_window_destroy(pool->window);
    pool->window = NULL;
    return dcp_window_create(sharded->comm, bytes, &pool->window);
}

dcp_status_t
sequence_prepare(dcp_sharded_t *sharded, const dcp_step_args_t *args, bool training)
{
    if (args->group_count == 0 && sharded->sequence_pool == NULL) {
        return DCP_OK;
    }
    DCP_TRY(check_groups(sharded, args));
    if (sharded->sequence_pool == NULL) {
        void *memory;
        int64_t needs = dcp_comm_size(sharded->comm)
                        * (int64_t)sizeof sharded->sequence_pool->needs[0];
        DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(sequence_pool_t) + needs,
                                 "groups of ranks", &memory));
        sharded->sequence_pool = memory;
    }
    bool done = false;
    while (!done) {
        DCP_TRY(split_some(sharded, args, &done));
    }
    if (sharded->no_windows) {
        return DCP_OK;
    }
    int64_t need = 0;
    for (int64_t i = 0; i < args->batch_count; i++) {
        int64_t bytes = sequence_need(sharded, &args->batches[i], training);
        need = bytes > need ? bytes : need;
    }
    return grow_window(sharded, need);
}

void
sequence_pool_destroy(sequence_pool_t *pool)
{
    if (pool == NULL) {
        return;
    }
    dcp_window_destroy(pool->window);
    dcp_free(pool->memory);
    for (int64_t i = 0; i < pool->comm_count; i++) {
        dcp_comm_destroy(pool->comms[i].comm);
    }
    dcp_free(pool->comms);
    dcp_free(pool);
}
