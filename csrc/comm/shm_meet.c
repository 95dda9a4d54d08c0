/* Where the ranks of a run meet: a small named file, from creation until all are there.
 *
 *   <folder>/dcp-<user id>-<run id>
 *
 * Made aside, filled, then linked to its name: whoever finds the name finds a whole
 * segment. Sized by fallocate, so a full folder is an error and never SIGBUS. Everybody
 * who attaches holds a shared lock (flock) on the file until all have met; then the
 * last to come removes the name. So a name whose file can be locked exclusively is what
 * a dead run left: the kernel drops locks with the process, and neither reused process
 * ids nor containers that share /dev/shm can make a live run look dead. Leftovers of
 * all run ids are removed by every later run of the same user.
 *
 * Between a look at the name and the lock the file may have been replaced: after
 * locking we check that the name still leads to the file that we hold. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/clock.h"
#include "dcp/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Changes with the layout of anything in shared memory. */
static const uint64_t segment_magic = UINT64_C(0x3130306d68737064);

static int
lock_file(int fd, int operation)
{
    int result;
    do {
        result = flock(fd, operation);
    } while (result != 0 && errno == EINTR);
    return result;
}

static bool
is_named(int fd, const char *path)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_ino == b.st_ino
           && a.st_dev == b.st_dev;
}

/* Removes the file behind fd if nobody alive uses it. True: it did, or tried and found
 * that the name had gone on to another file. */
static bool
reclaim(int fd, const char *path)
{
    if (lock_file(fd, LOCK_EX | LOCK_NB) != 0) {
        return false;
    }
    uint64_t magic = 0;
    if (is_named(fd, path) && pread(fd, &magic, sizeof magic, 0) == sizeof magic
        && magic == segment_magic && unlink(path) == 0) {
        dcp_log(DCP_LOG_INFO, "removed %s, left by a run that died", path);
    }
    return true;
}

/* Removes what dead runs of this user left. */
static void
reclaim_all(const char *folder, const char *own_path)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) {
        return;
    }
    char prefix[32], path[SHM_PATH_BYTES + 256];
    snprintf(prefix, sizeof prefix, "dcp-%u-", (unsigned)geteuid());
    struct dirent *entry;
    while ((entry = readdir(listing)) != NULL) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (strcmp(path, own_path) == 0) {
            continue;
        }
        int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd >= 0) {
            reclaim(fd, path);
            close(fd);
        }
    }
    closedir(listing);
}

static int64_t
segment_bytes(int32_t size)
{
    return (int64_t)sizeof(shm_segment_t) + size * (int64_t)sizeof(shm_slot_t);
}

static dcp_status_t
fail_full(const char *folder, const char *path, int64_t bytes, int error)
{
    struct statvfs info;
    int64_t available = -1;
    if (statvfs(folder, &info) == 0) {
        available = (int64_t)(info.f_bavail * info.f_frsize);
    }
    return DCP_FAIL(DCP_ERR_NO_MEM,
                    "%s needs %" PRId64 " bytes, but %s has %" PRId64
                    " free (%s): make room, or give it more (docker run --shm-size)",
                    path, bytes, folder, available, strerror(error));
}

/* Makes the segment and links it to `path`. *fd_p = -1 with DCP_OK: somebody else was
 * first. The file is locked (shared). */
static dcp_status_t
create_segment(const char *folder, const char *path, int32_t size, int *fd_p)
{
    *fd_p = -1;
    char aside[SHM_PATH_BYTES + 32] = "";
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
        snprintf(aside, sizeof aside, "%s.%d.new", path, (int)gettid());
        fd = open(aside, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    }
    if (fd < 0) {
        return errno == ENOSPC ? fail_full(folder, path, segment_bytes(size), errno)
                               : DCP_FAIL(DCP_ERR_IO, "cannot make a file in %s: %s",
                                          folder, strerror(errno));
    }
    dcp_status_t status = DCP_OK;
    int error;
    do {
        error = posix_fallocate(fd, 0, segment_bytes(size));
    } while (error == EINTR);
    if (error != 0) {
        status = fail_full(folder, path, segment_bytes(size), error);
        goto err_close;
    }
    shm_segment_t head = {.magic = segment_magic, .size = size, .world_fd = -1};
    if (lock_file(fd, LOCK_SH) != 0
        || pwrite(fd, &head, sizeof head, 0) != (ssize_t)sizeof head) {
        status = DCP_FAIL(DCP_ERR_IO, "cannot write %s: %s", path, strerror(errno));
        goto err_close;
    }
    char by_fd[64];
    snprintf(by_fd, sizeof by_fd, "/proc/self/fd/%d", fd);
    int linked = aside[0] != '\0'
                     ? link(aside, path)
                     : linkat(AT_FDCWD, by_fd, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
    if (linked != 0 && errno != EEXIST) {
        status = DCP_FAIL(DCP_ERR_IO, "cannot link %s: %s", path, strerror(errno));
    }
    if (aside[0] != '\0') {
        unlink(aside);
    }
    if (linked == 0) {
        *fd_p = fd;
        return DCP_OK;
    }
err_close:
    close(fd);
    return status;
}

/* Opens and locks the segment at `path`. *fd_p = -1 with DCP_OK: look again. */
static dcp_status_t
open_segment(const char *path, int *fd_p)
{
    *fd_p = -1;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return errno == ENOENT
                   ? DCP_OK
                   : DCP_FAIL(DCP_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    }
    if (reclaim(fd, path) || lock_file(fd, LOCK_SH) != 0 || !is_named(fd, path)) {
        close(fd);
        return DCP_OK;
    }
    *fd_p = fd;
    return DCP_OK;
}

static dcp_status_t
find_segment(const dcp_comm_options_t *options, const char *folder, const char *path,
             int64_t deadline_ns, int *fd_p)
{
    for (;;) {
        DCP_TRY(open_segment(path, fd_p));
        if (*fd_p < 0) {
            DCP_TRY(create_segment(folder, path, options->size, fd_p));
        }
        if (*fd_p >= 0) {
            return DCP_OK;
        }
        if (dcp_clock_ns() > deadline_ns) {
            return DCP_FAIL(DCP_ERR_TIMEOUT,
                            "%s changes hands all the time: is the run id '%s' unique?",
                            path, options->run_id);
        }
    }
}

static uint64_t
own_pid_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

/* Takes this rank's slot. */
static dcp_status_t
claim_slot(const dcp_comm_options_t *options, int32_t world_fd, shm_segment_t *segment)
{
    char text[COMM_TEXT_BYTES];
    shm_slot_t *slot = &segment->slots[options->rank];
    uint32_t is_free = SHM_SLOT_FREE;
    if (!atomic_compare_exchange_strong(&slot->state, &is_free, SHM_SLOT_CLAIMED)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "rank %d of run '%s' is taken already by process %d: every "
                        "process needs its own rank, every run its own id",
                        (int)options->rank, options->run_id, (int)slot->pid);
    }
    slot->pid = (int32_t)getpid();
    slot->pid_namespace = own_pid_namespace();
    if (!shm_process_start(slot->pid, &slot->start_ticks)) {
        snprintf(text, sizeof text, "/proc/%d/stat cannot be read: is /proc mounted?",
                 (int)slot->pid);
        return DCP_FAIL(DCP_ERR_UNSUPPORTED, "%s", text);
    }
    if (options->rank == 0) {
        segment->world_fd = world_fd;
    }
    atomic_store(&slot->state, SHM_SLOT_ATTACHED);
    return DCP_OK;
}

dcp_status_t
shm_meet_begin(const dcp_comm_options_t *options, int32_t world_fd, shm_root_t *root,
               int *fd_p, char path[SHM_PATH_BYTES])
{
    const char *folder = options->folder != NULL ? options->folder : "/dev/shm";
    int length = snprintf(path, SHM_PATH_BYTES, "%s/dcp-%u-%s", folder,
                          (unsigned)geteuid(), options->run_id);
    if (length >= SHM_PATH_BYTES) {
        return DCP_FAIL(DCP_ERR_ARG, "folder '%s' is too long", folder);
    }
    reclaim_all(folder, path);
    int fd;
    dcp_status_t status = find_segment(options, folder, path,
                                       dcp_clock_ns() + options->join_timeout_ns, &fd);
    if (status != DCP_OK) {
        return status;
    }
    shm_segment_t head;
    if (pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head
        || head.magic != segment_magic) {
        status = DCP_FAIL(DCP_ERR_STATE,
                          "%s was made by another version of dcp: use one version for "
                          "all ranks",
                          path);
        goto err_close;
    }
    status = shm_map_fd(fd, segment_bytes(head.size), path, &root->map);
    if (status != DCP_OK) {
        goto err_close;
    }
    root->segment = (shm_segment_t *)root->map->base;
    root->size = head.size;
    if (head.size != options->size) {
        char text[COMM_TEXT_BYTES];
        snprintf(
            text, sizeof text,
            "run '%s' was begun with %d ranks, but rank %d (process %d) was told %d",
            options->run_id, (int)head.size, (int)options->rank, (int)getpid(),
            (int)options->size);
        shm_fail(root, DCP_ERR_MISMATCH, text);
        status = DCP_FAIL(DCP_ERR_MISMATCH, "%s", text);
        goto err_release;
    }
    status = claim_slot(options, world_fd, root->segment);
    if (status != DCP_OK) {
        goto err_release;
    }
    /* the last to come wakes those who wait for it, and takes the name away */
    if (atomic_fetch_add(&root->segment->attached_count, 1) + 1 == options->size) {
        unlink(path);
        for (int32_t r = 0; r < options->size; r++) {
            shm_ring(root, r);
        }
    }
    *fd_p = fd;
    return DCP_OK;
err_release:
    shm_map_release(root->map);
err_close:
    close(fd);
    return status;
}

void
shm_meet_end(int fd, const char *path)
{
    if (is_named(fd, path)) {
        unlink(path);
    }
    close(fd);
}
