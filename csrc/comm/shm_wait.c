/* Bells, waits, failures, and the watch over peers.
 *
 * A sleeper announces itself (sleep_count), reads its bell, looks once more, and sleeps
 * until the bell differs. A ringer changes the state first, then looks for sleepers:
 * both sides are sequentially consistent, so either the ringer sees the sleeper or the
 * sleeper sees the change. Ringing costs a system call only where somebody sleeps.
 *
 * The watch runs in waiters only, every 50 ms: a process is dead when its /proc entry
 * is gone, belongs to a later process (start time) or is a zombie. Each look takes
 * eight peers in turn, so that many ranks do not spend their time reading /proc. The
 * first failure is written to the segment; all ranks return that one. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WATCH_NS = 50 * 1000 * 1000, WATCH_RANKS = 8 };

static void
futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec limit = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void
futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static inline void
relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void
shm_ring(shm_root_t *root, int32_t root_rank)
{
    shm_slot_t *slot = &root->segment->slots[root_rank];
    if (atomic_load(&slot->sleep_count) > 0) {
        atomic_fetch_add(&slot->bell, 1);
        futex_wake_all(&slot->bell);
    }
}

bool
shm_process_start(int32_t pid, int64_t *start_ticks_p)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    /* the name, in parentheses, may hold anything: fields count from the last one */
    char *field = strrchr(text, ')');
    if (field == NULL || field[1] == '\0' || field[2] == 'Z' || field[2] == 'X') {
        return false;
    }
    field++; /* the space before field 3; start time is field 22 */
    for (int i = 3; i < 22 && field != NULL; i++) {
        field = strchr(field + 1, ' ');
    }
    return field != NULL && sscanf(field, "%" SCNd64, start_ticks_p) == 1;
}

static bool
is_dead(const shm_slot_t *slot)
{
    int64_t start_ticks;
    return slot->pid != (int32_t)getpid()
           && (!shm_process_start(slot->pid, &start_ticks)
               || start_ticks != slot->start_ticks);
}

void
shm_fail(shm_root_t *root, dcp_status_t status, const char *text)
{
    shm_segment_t *segment = root->segment;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&segment->failed, &none, 1)) {
        /* Another rank is writing its failure, which is the one that counts: a moment,
         * unless that rank is killed in it. */
        int64_t end_ns = dcp_clock_ns() + WATCH_NS;
        while (atomic_load(&segment->failed) != 2 && dcp_clock_ns() < end_ns) {
            sched_yield();
        }
        return;
    }
    segment->fail_status = (int32_t)status;
    snprintf(segment->fail_text, sizeof segment->fail_text, "%s", text);
    atomic_store(&segment->failed, 2);
    for (int32_t r = 0; r < root->size; r++) {
        shm_ring(root, r);
    }
}

dcp_status_t
shm_check(shm_root_t *root)
{
    shm_segment_t *segment = root->segment;
    if (atomic_load_explicit(&segment->failed, memory_order_acquire) != 2) {
        return DCP_OK;
    }
    dcp_set_last_error(segment->fail_text);
    return (dcp_status_t)segment->fail_status;
}

/* Fails the run and returns what was recorded first, by whomever. */
static dcp_status_t
fail_run(shm_root_t *root, dcp_status_t status, const char *text)
{
    shm_fail(root, status, text);
    dcp_status_t recorded = shm_check(root);
    return recorded != DCP_OK ? recorded : DCP_FAIL(status, "%s", text);
}

static void
call_text(const shm_comm_t *comm, char *text, int64_t text_bytes)
{
    char name[240];
    comm_call_text(comm->call, name, sizeof name);
    snprintf(text, (size_t)text_bytes, "%s (call %" PRId64 ")", name,
             comm->call->sequence);
}

static int32_t
pid_of(const shm_comm_t *comm, int32_t rank)
{
    return comm->root->segment->slots[comm->members[rank]].pid;
}

static dcp_status_t
fail_dead(shm_comm_t *comm, int32_t root_rank)
{
    char call[280], text[COMM_TEXT_BYTES];
    call_text(comm, call, sizeof call);
    snprintf(text, sizeof text, "rank %d (process %d) died; rank %d noticed in %s",
             (int)root_rank, (int)comm->root->segment->slots[root_rank].pid,
             (int)comm->root->rank, call);
    return fail_run(comm->root, DCP_ERR_PEER, text);
}

static dcp_status_t
fail_late(shm_comm_t *comm, const shm_waiting_t *waiting, int64_t timeout_ns)
{
    char call[280], text[COMM_TEXT_BYTES], missing[200] = "";
    call_text(comm, call, sizeof call);
    for (int32_t r = 0; r < comm->base.size; r++) {
        if (r == comm->base.rank || !waiting->awaits(waiting->context, r)) {
            continue;
        }
        size_t used = strlen(missing);
        const char *comma = used > 0 ? ", " : "";
        shm_slot_t *slot = &comm->root->segment->slots[comm->members[r]];
        if (atomic_load(&slot->state) == SHM_SLOT_ATTACHED) {
            snprintf(missing + used, sizeof missing - used, "%srank %d (process %d)",
                     comma, (int)comm->members[r], (int)slot->pid);
        } else {
            snprintf(missing + used, sizeof missing - used, "%srank %d", comma,
                     (int)comm->members[r]);
        }
    }
    snprintf(text, sizeof text, "%s did not come to %s within %.3g s; rank %d waited",
             missing, call, (double)timeout_ns / 1e9, (int)comm->root->rank);
    return fail_run(comm->root, DCP_ERR_TIMEOUT, text);
}

static dcp_status_t
fail_left(shm_comm_t *comm, int32_t rank)
{
    char call[280], text[COMM_TEXT_BYTES];
    call_text(comm, call, sizeof call);
    snprintf(text, sizeof text,
             "rank %d (process %d) has closed its communicator, but rank %d waits for "
             "it in %s",
             (int)comm->members[rank], (int)pid_of(comm, rank), (int)comm->root->rank,
             call);
    return fail_run(comm->root, DCP_ERR_PEER, text);
}

static dcp_status_t
fail_interrupted(shm_comm_t *comm)
{
    char call[280], text[COMM_TEXT_BYTES];
    call_text(comm, call, sizeof call);
    snprintf(text, sizeof text, "rank %d (process %d) was interrupted in %s",
             (int)comm->root->rank, (int)getpid(), call);
    shm_fail(comm->root, DCP_ERR_ABORTED, text);
    return DCP_FAIL(DCP_ERR_INTERRUPT, "interrupted in %s", call);
}

/* Looks at the next few peers of the run, and at the members that are awaited. */
static dcp_status_t
watch_peers(shm_comm_t *comm, const shm_waiting_t *waiting)
{
    shm_root_t *root = comm->root;
    int32_t look_count = root->size < WATCH_RANKS ? root->size : WATCH_RANKS;
    for (int32_t i = 0; i < look_count; i++) {
        uint32_t turn = atomic_fetch_add(&root->watched, 1);
        int32_t r = (int32_t)(turn % (uint32_t)root->size);
        shm_slot_t *slot = &root->segment->slots[r];
        /* left is read after the process was found dead: it may have left just before
         */
        if (r != root->rank && atomic_load(&slot->state) == SHM_SLOT_ATTACHED
            && is_dead(slot) && atomic_load(&slot->left) == 0) {
            return waiting->ready(waiting->context) ? DCP_OK : fail_dead(comm, r);
        }
    }
    for (int32_t r = 0; comm->head != NULL && r < comm->base.size; r++) {
        if (r != comm->base.rank && atomic_load(&comm->head->members[r].left) != 0
            && waiting->awaits(waiting->context, r)) {
            return waiting->ready(waiting->context) ? DCP_OK : fail_left(comm, r);
        }
    }
    return DCP_OK;
}

dcp_status_t
shm_wait(shm_comm_t *comm, const shm_waiting_t *waiting, int64_t timeout_ns)
{
    shm_root_t *root = comm->root;
    for (int32_t i = 0; i < root->spin_count; i++) {
        if (waiting->ready(waiting->context)) {
            return DCP_OK;
        }
        relax();
    }
    shm_slot_t *slot = &root->segment->slots[root->rank];
    dcp_status_t status = DCP_OK;
    int64_t begin_ns = dcp_clock_ns(), watch_ns = begin_ns;
    atomic_fetch_add(&slot->sleep_count, 1);
    for (;;) {
        uint32_t bell = atomic_load(&slot->bell);
        if (waiting->ready(waiting->context)) {
            break;
        }
        status = shm_check(root);
        if (status != DCP_OK) {
            break;
        }
        futex_wait(&slot->bell, bell, WATCH_NS);
        int64_t now_ns = dcp_clock_ns();
        if (now_ns - watch_ns < WATCH_NS) {
            continue;
        }
        watch_ns = now_ns;
        status = watch_peers(comm, waiting);
        if (status == DCP_OK && comm_interrupted()) {
            status = fail_interrupted(comm);
        }
        if (status == DCP_OK && now_ns - begin_ns > timeout_ns
            && !waiting->ready(waiting->context)) {
            status = fail_late(comm, waiting, timeout_ns);
        }
        if (status != DCP_OK) {
            break;
        }
    }
    atomic_fetch_sub(&slot->sleep_count, 1);
    return status;
}
