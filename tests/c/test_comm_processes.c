/* comm with ranks as processes: the meeting place and what dead runs leave, a folder
 * without room, a seeded stress test where one rank is killed, counts beyond 2^31. */
#define _GNU_SOURCE
#include "comm_ranks.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

static char folder[64];

static int
count_files(void)
{
    DIR *listing = opendir(folder);
    int count = 0;
    for (struct dirent *e = readdir(listing); e != NULL; e = readdir(listing)) {
        count += e->d_name[0] != '.';
    }
    closedir(listing);
    return count;
}

static dcp_status_t
join(const char *run_id, int32_t rank, int32_t size, int64_t join_ns,
     dcp_comm_t **comm_p)
{
    dcp_comm_options_t options = {.rank = rank,
                                  .size = size,
                                  .run_id = run_id,
                                  .join_timeout_ns = join_ns,
                                  .folder = folder};
    return dcp_comm_create_shm(&options, comm_p);
}

/* A process that waits for peers that never come; returns once it has made its file. */
static pid_t
start_waiter(const char *run_id)
{
    int before = count_files();
    pid_t pid = fork();
    if (pid == 0) {
        dcp_comm_t *comm;
        join(run_id, 0, 2, 600 * second_ns, &comm);
        _exit(0);
    }
    while (count_files() == before) {
        sched_yield();
    }
    return pid;
}

static void
kill_and_wait(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* Case X-07: what killed runs leave is removed by any later run, what lives is not. */
static void
test_leftovers(void)
{
    dcp_comm_t *comm;
    pid_t live = start_waiter("live");
    for (int i = 0; i < 5; i++) {
        char run_id[32];
        snprintf(run_id, sizeof run_id, "dead-%d", i);
        kill_and_wait(start_waiter(run_id));
        CHECK(count_files() == 2); /* the live one's, and this */
        CHECK_OK(join("later", 0, 1, second_ns, &comm));
        dcp_comm_destroy(comm);
        CHECK(count_files() == 1);
    }
    /* the same run id again: the dead segment does not count */
    kill_and_wait(start_waiter("again"));
    CHECK(join("again", 1, 2, second_ns / 10, &comm) == DCP_ERR_TIMEOUT);
    CHECK(strstr(dcp_last_error(), "rank 0 did not come to join") != NULL);
    CHECK(count_files() == 1);
    /* a process of the live run may still come: it is met */
    CHECK(join("live", 0, 2, second_ns, &comm) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "rank 0 of run 'live' is taken") != NULL);
    CHECK_OK(join("live", 1, 2, 30 * second_ns, &comm));
    CHECK(count_files() == 0);
    waitpid(live, NULL, 0); /* it exits without destroying its communicator */
    CHECK(dcp_comm_barrier(comm) == DCP_ERR_PEER);
    char text[80];
    snprintf(text, sizeof text, "rank 0 (process %d) died", (int)live);
    CHECK(strstr(dcp_last_error(), text) != NULL);
    dcp_comm_destroy(comm);
}

static void
test_join_arguments(void)
{
    dcp_comm_t *comm;
    CHECK(join("a/b", 0, 1, 0, &comm) == DCP_ERR_ARG);
    CHECK(join("", 0, 1, 0, &comm) == DCP_ERR_ARG);
    CHECK(join(NULL, 0, 1, 0, &comm) == DCP_ERR_ARG);
    CHECK(join("a", 1, 1, 0, &comm) == DCP_ERR_ARG);
    CHECK(join("a", 0, 0, 0, &comm) == DCP_ERR_ARG);
    pid_t pid = start_waiter("two");
    CHECK(join("two", 1, 3, second_ns, &comm) == DCP_ERR_MISMATCH);
    CHECK(strstr(dcp_last_error(), "was begun with 2 ranks, but rank 1") != NULL);
    waitpid(pid, NULL, 0); /* it has learned of it */
    CHECK(count_files() == 0);
}

/* Case X-07: a folder without room is an error that names path, need and free bytes. */
static void
test_full_folder(void)
{
    if (unshare(CLONE_NEWNS) != 0
        || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0
        || mount("none", folder, "tmpfs", 0, "size=8k") != 0) {
        printf("test_full_folder: not run, mounting needs root (%s)\n",
               strerror(errno));
        return;
    }
    char path[128];
    snprintf(path, sizeof path, "%s/filler", folder);
    FILE *file = fopen(path, "w");
    char block[8192] = {0};
    CHECK(file != NULL && fwrite(block, 1, sizeof block, file) == sizeof block);
    fclose(file);
    dcp_comm_t *comm;
    CHECK(join("full", 0, 1, second_ns, &comm) == DCP_ERR_NO_MEM);
    CHECK(strstr(dcp_last_error(), folder) != NULL);
    CHECK(strstr(dcp_last_error(), " has 0 free") != NULL);
    CHECK(count_files() == 1);
    /* a small one is no limit for windows: they are not files there */
    unlink(path);
    CHECK_OK(join("small", 0, 1, second_ns, &comm));
    dcp_window_t *window;
    CHECK_OK(dcp_window_create(comm, 1 << 20, &window));
    dcp_window_destroy(window);
    dcp_comm_destroy(comm);
    umount(folder);
}

/* ---- counts beyond 2^31 (case X-03) ---- */

enum { PATTERN_BYTES = 64 << 20 };
static const int64_t big_count = (INT64_C(1) << 31) + 8;

/* A range of big_count bytes that shows one piece of memory again and again. */
static uint8_t *
repeated(int fd)
{
    int64_t bytes = (big_count + PATTERN_BYTES - 1) / PATTERN_BYTES * PATTERN_BYTES;
    char *base =
        mmap(NULL, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int64_t at = 0; at < bytes; at += PATTERN_BYTES) {
        mmap(base + at, PATTERN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             fd, 0);
    }
    return (uint8_t *)base;
}

static void
big_body(rank_t *r)
{
    int fd = memfd_create("big", 0);
    REQUIRE(r, ftruncate(fd, PATTERN_BYTES) == 0);
    uint8_t *data = repeated(fd);
    uint8_t tail[16] = {0};
    if (r->rank == 0) {
        for (int64_t i = 0; i < PATTERN_BYTES; i++) {
            data[i] = (uint8_t)(i * 7 + (i >> 12));
        }
    }
    int64_t sends[2] = {0, r->rank == 0 ? big_count : 0};
    int64_t receives[2] = {r->rank == 1 ? big_count : 0, 0};
    REQUIRE(r, dcp_comm_alltoallv(r->comm, data, sends, r->rank == 0 ? tail : data,
                                  receives, DCP_U8)
                   == DCP_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < PATTERN_BYTES; i++) {
        wrong += data[i] != (uint8_t)(i * 7 + (i >> 12));
    }
    REQUIRE(r, wrong == 0);
    /* the last bytes come from the last window of the pattern: overwritten before */
    REQUIRE(r, data[big_count - 1] == (uint8_t)(7 * 7));
    munmap(data, (size_t)big_count);
    close(fd);
}

static void
test_big_counts(void)
{
    rank_t ranks[2];
    run_ranks(ranks, 2, big_body, 0, 60 * second_ns);
}

/* ---- processes: a seeded schedule, then one is killed ---- */

static int
stress_process(rank_t *r, uint64_t steps)
{
    dcp_rng_t shared, own;
    dcp_rng_init(&shared, r->seed, 0);
    dcp_rng_init(&own, r->seed, 1 + (uint64_t)r->rank);
    for (uint64_t step = 0; step < steps && r->failed == 0; step++) {
        for (uint64_t spin = dcp_rng_below(&own, 4); spin > 0; spin--) {
            sched_yield(); /* ranks come in any order */
        }
        int64_t counts[MAX_RANKS];
        uint64_t bound = dcp_rng_below(&shared, 5) == 0 ? 60000 : 50;
        int64_t total = random_counts(&shared, r->size, bound, counts);
        switch (dcp_rng_below(&shared, 4)) {
        case 0:
            check_reductions(r, step, counts, total);
            break;
        case 1:
            check_moves(r, step, &shared, bound);
            break;
        case 2: {
            int32_t next = (r->rank + 1) % r->size;
            int32_t last = (r->rank + r->size - 1) % r->size;
            int64_t n = counts[r->rank], m = counts[last], wrong = 0;
            float *x = contribution(step, r->rank, n), *y = floats(m);
            REQUIRE(r, dcp_comm_group_begin(r->comm) == DCP_OK);
            REQUIRE(r, dcp_comm_send(r->comm, x, 4 * n, next) == DCP_OK);
            REQUIRE(r, dcp_comm_recv(r->comm, y, 4 * m, last) == DCP_OK);
            REQUIRE(r, dcp_comm_group_end(r->comm) == DCP_OK);
            for (int64_t i = 0; i < m; i++) {
                wrong += y[i] != value(step, last, i);
            }
            REQUIRE(r, wrong == 0);
            free(x);
            free(y);
            break;
        }
        default: {
            dcp_comm_t *part;
            int64_t one = 1, members = 0;
            int32_t color = (int32_t)dcp_rng_below(&own, 2);
            REQUIRE(r, dcp_comm_split(r->comm, color, 0, &part) == DCP_OK);
            REQUIRE(r, dcp_comm_allreduce(part, &one, &members, 1, DCP_I64, DCP_SUM)
                           == DCP_OK);
            REQUIRE(r, members == dcp_comm_size(part));
            dcp_comm_destroy(part);
            break;
        }
        }
    }
    return r->failed == 0 ? 0 : 1;
}

/* A rank's process. The victim dies in the middle; the others must learn of it. */
static int
process_main(int32_t rank, int32_t size, int32_t victim, const char *run_id,
             uint64_t seed)
{
    rank_t r = {.rank = rank, .size = size, .seed = seed};
    dcp_comm_options_t options = {
        .rank = rank, .size = size, .run_id = run_id, .folder = folder};
    if (dcp_comm_create_shm(&options, &r.comm) != DCP_OK) {
        printf("rank %d: %s\n", (int)rank, dcp_last_error());
        return 1;
    }
    int64_t pid = getpid(), pids[MAX_RANKS], ones[MAX_RANKS] = {1, 1, 1, 1, 1, 1};
    REQUIRE(&r, dcp_comm_allgatherv(r.comm, &pid, ones, pids, DCP_I64) == DCP_OK);
    int result = stress_process(&r, 60);
    if (victim >= 0 && result == 0) {
        dcp_status_t status = DCP_OK;
        float x[1000] = {0}, y[1000];
        for (int call = 0; status == DCP_OK; call++) {
            if (rank == victim && call == 20) {
                raise(SIGKILL);
            }
            status = dcp_comm_allreduce(r.comm, x, y, 1000, DCP_F32, DCP_SUM);
        }
        char text[64];
        snprintf(text, sizeof text, "rank %d (process %d) died", (int)victim,
                 (int)pids[victim]);
        REQUIRE(&r, status == DCP_ERR_PEER);
        REQUIRE(&r, strstr(dcp_last_error(), text) != NULL);
        REQUIRE(&r, strstr(dcp_last_error(), "(call ") != NULL);
        result = r.failed != 0;
    }
    dcp_comm_destroy(r.comm);
    return result;
}

static void
test_processes(void)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        int32_t size = 2 + (int32_t)(seed % 4);
        int32_t victim = seed % 2 == 0 ? -1 : (int32_t)seed % size;
        char run_id[40];
        snprintf(run_id, sizeof run_id, "stress-%d-%d", (int)getpid(), (int)seed);
        pid_t pids[MAX_RANKS];
        fflush(stdout);
        for (int32_t rank = 0; rank < size; rank++) {
            pids[rank] = fork();
            if (pids[rank] == 0) {
                int result = process_main(rank, size, victim, run_id, seed);
                fflush(stdout);
                _exit(result);
            }
        }
        for (int32_t rank = 0; rank < size; rank++) {
            int state;
            waitpid(pids[rank], &state, 0);
            CHECK(rank == victim ? WIFSIGNALED(state)
                                 : WIFEXITED(state) && WEXITSTATUS(state) == 0);
        }
        CHECK(count_files() == 0);
    }
}

int
main(void)
{
    snprintf(folder, sizeof folder, "/tmp/test-comm-%d", (int)getpid());
    CHECK(mkdir(folder, 0700) == 0);
    test_processes(); /* first, with one thread: a fork copies no other */
    test_leftovers();
    test_join_arguments();
    test_big_counts();
    test_full_folder();
    rmdir(folder);
    return check_finish();
}
