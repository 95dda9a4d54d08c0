/* Communicators over shared memory: creation, splitting, letting go.
 *
 * Creation: rank 0 makes the comm memory, all meet in the segment (shm_meet.c), map it,
 * and pass a first round. Splitting: all tell color and key in a round, every new
 * group's rank 0 makes its comm memory, tells where in a second round, the others map
 * it, and a third round agrees that all could. So a rank that lacks memory makes the
 * call fail on all ranks alike, and nothing is half made. Memory of a communicator:
 * four copies of an arena a rank, 1 MB each in the world, 256 KB in groups. Each rank
 * counts its share of the world's as held; a group's arenas take pages when used. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/alloc.h"
#include "dcp/threads.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MAX_RANKS = 1024,
    /* One copy of an arena. Measured, 64 MB over 2 and 4 ranks on 2 cores: 512 KB to
     * 2 MB are alike, less costs rounds, more leaves the cache. Groups are many. */
    WORLD_ARENA_BYTES = 1 << 20,
    GROUP_ARENA_BYTES = 256 * 1024,
    LEAST_ARENA_BYTES = 64 * 1024,
    ARENA_RANKS = 8, /* beyond so many ranks arenas shrink */
    SPIN_COUNT =
        2000, /* about 20-60 us: a step of a collective, not a step of training */
};

/* Offsets of the parts of comm memory; ends with the total. */
typedef struct layout {
    int64_t rows, channels, arenas, total, arena_bytes;
} layout_t;

static int64_t
round_up(int64_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

static layout_t
comm_layout(int64_t size, bool is_world)
{
    layout_t layout;
    int64_t arena = is_world ? WORLD_ARENA_BYTES : GROUP_ARENA_BYTES;
    arena = size > ARENA_RANKS ? arena * ARENA_RANKS / size : arena;
    arena = arena < LEAST_ARENA_BYTES ? LEAST_ARENA_BYTES : arena;
    /* pieces of up to `size` ranks, each rounded up, must fit */
    layout.arena_bytes = round_up(arena > 512 * size ? arena : 512 * size);
    layout.arenas =
        round_up((int64_t)sizeof(shm_head_t) + size * (int64_t)sizeof(shm_member_t));
    layout.rows = layout.arenas + 4 * size * layout.arena_bytes;
    layout.channels =
        round_up(layout.rows + 4 * size * size * (int64_t)sizeof(int64_t));
    layout.total =
        round_up(layout.channels + size * size * (int64_t)sizeof(shm_channel_t));
    return layout;
}

/* Makes the memory of a communicator; rows and channels take pages when first used, and
 * so do the arenas of a group: most groups only ever meet in barriers. */
static dcp_status_t
make_memory(int32_t size, bool is_world, int *fd_p, shm_map_t **map_p)
{
    layout_t layout = comm_layout(size, is_world);
    DCP_TRY(comm_memory_check(layout.rows, "memory of a communicator"));
    return shm_map_create(layout.total, is_world ? layout.rows : layout.arenas,
                          "memory of a communicator", fd_p, map_p);
}

static void
use_memory(shm_comm_t *comm, bool is_world, shm_map_t *map)
{
    layout_t layout = comm_layout(comm->base.size, is_world);
    comm->map = map;
    comm->rows = (int64_t *)(map->base + layout.rows);
    comm->channels = (shm_channel_t *)(map->base + layout.channels);
    comm->arenas = map->base + layout.arenas;
    comm->arena_bytes = layout.arena_bytes;
    comm->head = (shm_head_t *)map->base;
}

static void shm_destroy(dcp_comm_t *base);

static dcp_status_t
check_run(dcp_comm_t *base)
{
    return shm_check(((shm_comm_t *)base)->root);
}

static void
abort_run(dcp_comm_t *base, const char *reason)
{
    shm_root_t *root = ((shm_comm_t *)base)->root;
    char text[COMM_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d (process %d) aborted: %s", (int)root->rank,
             (int)getpid(), reason);
    shm_fail(root, DCP_ERR_ABORTED, text);
}

static dcp_status_t shm_split(dcp_comm_t *base, const comm_call_t *call, int32_t color,
                              int32_t key, dcp_comm_t **new_p);

static const comm_ops_t shm_ops = {
    .name = "shm",
    .destroy = shm_destroy,
    .check = check_run,
    .abort = abort_run,
    .barrier = shm_barrier,
    .allgatherv = shm_allgatherv,
    .reduce_scatterv = shm_reduce_scatterv,
    .allreduce = shm_allreduce,
    .alltoallv = shm_alltoallv,
    .broadcast = shm_broadcast,
    .exchange = shm_exchange,
    .split = shm_split,
    .window_create = shm_window_create,
    .window_destroy = shm_window_destroy,
};

/* A forked child has a copy of everything; that it lets go says nothing of the rank. */
static bool
is_own_process(const shm_root_t *root)
{
    return root->segment != NULL
           && root->segment->slots[root->rank].pid == (int32_t)getpid();
}

static void
release_root(shm_root_t *root)
{
    if (atomic_fetch_sub(&root->user_count, 1) > 1) {
        return;
    }
    if (is_own_process(root)) {
        atomic_store(&root->segment->slots[root->rank].left, 1);
        for (int32_t r = 0; r < root->size; r++) {
            shm_ring(root, r);
        }
    }
    shm_map_release(root->map);
    dcp_free(root);
}

/* A communicator without memory and members yet; takes over one use of root. */
static dcp_status_t
alloc_comm(shm_root_t *root, int32_t rank, int32_t size, int64_t counted_bytes,
           shm_comm_t **comm_p)
{
    int64_t each =
        (int64_t)(sizeof(void *) * 3 + sizeof(uint64_t) * 2 + sizeof(int32_t) * 2);
    int64_t head = ((int64_t)sizeof(shm_comm_t) + 63) / 64 * 64;
    void *memory;
    dcp_status_t status = dcp_alloc_account(counted_bytes, "memory of a communicator");
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_alloc_zeroed(head + size * each, "communicator", &memory);
    if (status != DCP_OK) {
        dcp_alloc_account(-counted_bytes, "memory of a communicator");
        return status;
    }
    shm_comm_t *comm = memory;
    comm->counted_bytes = counted_bytes;
    comm->base.ops = &shm_ops;
    comm->base.rank = rank;
    comm->base.size = size;
    comm->root = root;
    comm->sources = (const void **)((char *)memory + head);
    comm->rings_in = (shm_map_t **)(comm->sources + size);
    comm->rings_out = comm->rings_in + size;
    comm->stamps = (uint64_t *)(comm->rings_out + size);
    comm->members = (int32_t *)(comm->stamps + 2 * size);
    comm->ring_fds = comm->members + size;
    for (int32_t r = 0; r < size; r++) {
        comm->ring_fds[r] = -1;
        comm->members[r] = r;
    }
    *comm_p = comm;
    return DCP_OK;
}

static void
shm_destroy(dcp_comm_t *base)
{
    shm_comm_t *comm = (shm_comm_t *)base;
    if (comm->head != NULL && is_own_process(comm->root)) {
        atomic_store(&comm->head->members[base->rank].left, 1);
        for (int32_t r = 0; r < base->size; r++) {
            shm_ring(comm->root, comm->members[r]);
        }
    }
    shm_message_fini(comm);
    shm_map_release(comm->map);
    dcp_alloc_account(-comm->counted_bytes, "memory of a communicator");
    release_root(comm->root);
    dcp_free(comm);
}

typedef struct member_key {
    int32_t color, key, rank; /* rank in the parent */
} member_key_t;

static int
compare_keys(const void *a, const void *b)
{
    const member_key_t *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1)
                            : (x->rank > y->rank) - (x->rank < y->rank);
}

/* The new group of this rank from the notes of the first round: *new_p without memory
 * yet, *leader_p the parent's rank of its rank 0. */
static dcp_status_t
gather_group(shm_comm_t *comm, int32_t color, shm_comm_t **new_p, int32_t *leader_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(comm->base.size, (int64_t)sizeof(member_key_t),
                            "members of a group", &memory));
    member_key_t *keys = memory;
    int32_t count = 0, rank = 0;
    for (int32_t r = 0; r < comm->base.size; r++) {
        const shm_note_t *note = shm_note_of(comm, r);
        if (note->color == color) {
            keys[count++] = (member_key_t){color, note->key, r};
        }
    }
    qsort(keys, (size_t)count, sizeof keys[0], compare_keys);
    while (keys[rank].rank != comm->base.rank) {
        rank++;
    }
    shm_comm_t *new_comm = NULL;
    dcp_status_t status = alloc_comm(comm->root, rank, count, 0, &new_comm);
    if (status == DCP_OK) {
        for (int32_t i = 0; i < count; i++) {
            new_comm->members[i] = comm->members[keys[i].rank];
        }
        atomic_fetch_add(&comm->root->user_count, 1);
        *leader_p = keys[0].rank;
        *new_p = new_comm;
    }
    dcp_free(keys);
    return status;
}

static dcp_status_t
shm_split(dcp_comm_t *base, const comm_call_t *call, int32_t color, int32_t key,
          dcp_comm_t **new_p)
{
    shm_comm_t *comm = (shm_comm_t *)base, *new_comm = NULL;
    shm_note_t note = {.color = color, .key = key};
    dcp_status_t status = shm_round(comm, call, &note);
    if (status != DCP_OK) {
        return status;
    }
    int32_t leader = 0;
    int fd = -1;
    shm_map_t *map = NULL;
    if (color >= 0) {
        status = gather_group(comm, color, &new_comm, &leader);
        if (status == DCP_OK && leader == base->rank) {
            status = make_memory(new_comm->base.size, false, &fd, &map);
        }
    }
    note = (shm_note_t){.pid = (int32_t)getpid(), .fd = fd};
    status = shm_agree(comm, NULL, &note, status);
    if (status != DCP_OK) {
        goto err_release;
    }
    if (new_comm != NULL && leader != base->rank) {
        const shm_note_t *there = shm_note_of(comm, leader);
        status = shm_map_peer(there->pid, there->fd,
                              comm_layout(new_comm->base.size, false).total,
                              "memory of a communicator", &map);
    }
    note = (shm_note_t){0};
    status = shm_agree(comm, NULL, &note, status);
    if (status != DCP_OK) {
        goto err_release;
    }
    if (fd >= 0) {
        close(fd);
    }
    if (new_comm != NULL) {
        use_memory(new_comm, false, map);
    }
    *new_p = new_comm != NULL ? &new_comm->base : NULL;
    return DCP_OK;
err_release:
    shm_map_release(map);
    if (fd >= 0) {
        close(fd);
    }
    if (new_comm != NULL) {
        shm_destroy(&new_comm->base);
    }
    return status;
}

static dcp_status_t
check_options(const dcp_comm_options_t *options)
{
    if (options->size < 1 || options->size > MAX_RANKS) {
        return DCP_FAIL(DCP_ERR_ARG, "size %d must lie in 1..%d", (int)options->size,
                        MAX_RANKS);
    }
    if (options->rank < 0 || options->rank >= options->size) {
        return DCP_FAIL(DCP_ERR_ARG, "rank %d must lie in 0..%d", (int)options->rank,
                        (int)options->size - 1);
    }
    const char *id = options->run_id;
    size_t length = id != NULL ? strlen(id) : 0;
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";
    if (length < 1 || length > 64 || strspn(id, allowed) != length) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "run_id '%s' must be 1 to 64 characters of [A-Za-z0-9_.-]",
                        id != NULL ? id : "(NULL)");
    }
    return DCP_OK;
}

/* Waiting for the others at the segment. */
static bool
all_attached(void *context)
{
    shm_comm_t *comm = context;
    return atomic_load(&comm->root->segment->attached_count) == comm->root->size;
}

static bool
awaits_attach(void *context, int32_t rank)
{
    shm_comm_t *comm = context;
    return atomic_load(&comm->root->segment->slots[rank].state) != SHM_SLOT_ATTACHED;
}

/* All ranks have to see each other's processes. */
static dcp_status_t
check_namespaces(shm_root_t *root)
{
    const shm_slot_t *own = &root->segment->slots[root->rank];
    for (int32_t r = 0; r < root->size; r++) {
        if (root->segment->slots[r].pid_namespace != own->pid_namespace) {
            return DCP_FAIL(DCP_ERR_UNSUPPORTED,
                            "rank %d and rank %d run in different process namespaces "
                            "(containers): start them in one",
                            (int)root->rank, (int)r);
        }
    }
    return DCP_OK;
}

/* Waits for all, maps rank 0's comm memory, passes the first round. */
static dcp_status_t
join(shm_comm_t *comm, shm_map_t *own_map, int64_t join_timeout_ns)
{
    comm_call_t call = {.op = COMM_JOIN, .dtype = -1, .total = -1};
    comm->call = &call;
    shm_waiting_t waiting = {all_attached, awaits_attach, comm};
    DCP_TRY(shm_wait(comm, &waiting, join_timeout_ns));
    DCP_TRY(shm_check(comm->root));
    dcp_status_t status = check_namespaces(comm->root);
    const shm_segment_t *segment = comm->root->segment;
    shm_map_t *map = own_map;
    if (status == DCP_OK && map == NULL) {
        status = shm_map_peer(segment->slots[0].pid, segment->world_fd,
                              comm_layout(comm->base.size, true).total,
                              "memory of a communicator", &map);
    }
    if (status != DCP_OK) {
        char text[COMM_TEXT_BYTES];
        snprintf(text, sizeof text, "rank %d: %s", (int)comm->root->rank,
                 dcp_last_error());
        shm_fail(comm->root, status, text);
        return shm_check(comm->root);
    }
    use_memory(comm, true, map);
    return shm_round(comm, &call, NULL);
}

dcp_status_t
dcp_comm_create_shm(const dcp_comm_options_t *given, dcp_comm_t **comm_p)
{
    DCP_TRY(check_options(given));
    dcp_comm_options_t options = *given;
    options.timeout_ns =
        given->timeout_ns > 0 ? given->timeout_ns : 600 * INT64_C(1000000000);
    options.join_timeout_ns =
        given->join_timeout_ns > 0 ? given->join_timeout_ns : 60 * INT64_C(1000000000);
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(shm_root_t), "part in a run", &memory));
    shm_root_t *root = memory;
    root->rank = options.rank;
    root->size = options.size;
    root->timeout_ns = options.timeout_ns;
    root->spin_count = options.size <= dcp_core_count() ? SPIN_COUNT : 0;
    root->user_count = 1;
    shm_comm_t *comm = NULL;
    dcp_status_t status =
        alloc_comm(root, options.rank, options.size,
                   comm_layout(options.size, true).rows / options.size, &comm);
    if (status != DCP_OK) {
        dcp_free(root);
        return status;
    }
    /* a rank 0 without memory goes to the meeting all the same, to tell the others */
    int world_fd = -1, fd = -1;
    shm_map_t *own_map = NULL;
    if (options.rank == 0) {
        status = make_memory(options.size, true, &world_fd, &own_map);
    }
    char path[SHM_PATH_BYTES];
    char text[COMM_TEXT_BYTES];
    snprintf(text, sizeof text, "rank 0: %s", dcp_last_error());
    dcp_status_t met = shm_meet_begin(&options, world_fd, root, &fd, path);
    if (met != DCP_OK) {
        status = met;
        root->segment = NULL;
        root->map = NULL;
    } else if (status != DCP_OK) {
        shm_fail(root, status, text);
        status = shm_check(root);
    } else {
        status = join(comm, own_map, options.join_timeout_ns);
    }
    if (fd >= 0) {
        shm_meet_end(fd, path);
    }
    if (world_fd >= 0) {
        close(world_fd);
    }
    if (status != DCP_OK) {
        if (comm->map == NULL) {
            shm_map_release(own_map);
        }
        shm_destroy(&comm->base);
        return status;
    }
    *comm_p = &comm->base;
    return DCP_OK;
}
