/* Anonymous shared memory: a memfd of one rank, which peers open through
 * /proc/<pid>/fd/<n>.
 *
 * It has no name, so nothing stays behind when its processes die, and it is not limited
 * by the size of /dev/shm (64 MB in containers). Ranks of one process (threads) get the
 * same mapping: a table by file identity counts its users. Pages are taken at creation:
 * by MADV_POPULATE_WRITE, which reports a full memory as an error and can use huge
 * pages (measured: 3 times faster than fallocate), else by fallocate. */
#define _GNU_SOURCE
#include "shm.h"

#include "dcp/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum { HUGE_BYTES = 2 << 20 };

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static shm_map_t *table; /* under table_lock */

dcp_status_t
shm_map_fd(int fd, int64_t bytes, const char *what, shm_map_t **map_p)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return DCP_FAIL(DCP_ERR_IO, "%s: %s", what, strerror(errno));
    }
    if (info.st_size < bytes) {
        return DCP_FAIL(DCP_ERR_IO, "%s has %" PRId64 " bytes, %" PRId64 " expected",
                        what, (int64_t)info.st_size, bytes);
    }
    dcp_status_t status = DCP_OK;
    pthread_mutex_lock(&table_lock);
    shm_map_t *map = table;
    while (map != NULL && (map->device != info.st_dev || map->inode != info.st_ino)) {
        map = map->next;
    }
    if (map != NULL) {
        map->user_count++;
        goto done;
    }
    void *memory;
    status = dcp_alloc_zeroed((int64_t)sizeof(shm_map_t), "mapping", &memory);
    if (status != DCP_OK) {
        goto done;
    }
    map = memory;
    void *base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        status = DCP_FAIL(DCP_ERR_NO_MEM, "%s of %" PRId64 " bytes: %s", what, bytes,
                          strerror(errno));
        dcp_free(map);
        goto done;
    }
    if (bytes >= 2 * HUGE_BYTES) { /* advice: a kernel without huge pages refuses */
        madvise(base, (size_t)(bytes / HUGE_BYTES * HUGE_BYTES), MADV_HUGEPAGE);
    }
    map->base = base;
    map->bytes = bytes;
    map->device = info.st_dev;
    map->inode = info.st_ino;
    map->user_count = 1;
    map->next = table;
    table = map;
done:
    pthread_mutex_unlock(&table_lock);
    if (status == DCP_OK) {
        *map_p = map;
    }
    return status;
}

void
shm_map_release(shm_map_t *map)
{
    if (map == NULL) {
        return;
    }
    pthread_mutex_lock(&table_lock);
    bool last = --map->user_count == 0;
    if (last) {
        shm_map_t **link = &table;
        while (*link != map) {
            link = &(*link)->next;
        }
        *link = map->next;
        munmap(map->base, (size_t)map->bytes);
    }
    pthread_mutex_unlock(&table_lock);
    if (last) {
        dcp_free(map);
    }
}

/* Takes the pages of the first `bytes`. */
static dcp_status_t
populate(const shm_map_t *map, int fd, int64_t bytes, const char *what)
{
    int error;
    do {
        error = madvise(map->base, (size_t)bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    } while (error == EINTR || error == EAGAIN);
    if (error == EINVAL) { /* an older kernel */
        do {
            error = posix_fallocate(fd, 0, bytes);
        } while (error == EINTR);
    }
    if (error != 0) {
        return DCP_FAIL(DCP_ERR_NO_MEM, "%s of %" PRId64 " bytes: %s", what, bytes,
                        strerror(error == EFAULT ? ENOSPC : error));
    }
    return DCP_OK;
}

dcp_status_t
shm_map_create(int64_t bytes, int64_t reserve_bytes, const char *what, int *fd_p,
               shm_map_t **map_p)
{
    int fd = memfd_create("dcp", MFD_CLOEXEC);
    if (fd < 0) {
        return DCP_FAIL(DCP_ERR_IO, "memfd_create for %s: %s", what, strerror(errno));
    }
    dcp_status_t status = DCP_OK;
    shm_map_t *map = NULL;
    if (ftruncate(fd, bytes) != 0) {
        status = DCP_FAIL(DCP_ERR_NO_MEM, "%s of %" PRId64 " bytes: %s", what, bytes,
                          strerror(errno));
        goto err_close;
    }
    status = shm_map_fd(fd, bytes, what, &map);
    if (status != DCP_OK) {
        goto err_close;
    }
    status = reserve_bytes > 0 ? populate(map, fd, reserve_bytes, what) : DCP_OK;
    if (status != DCP_OK) {
        goto err_release;
    }
    *fd_p = fd;
    *map_p = map;
    return DCP_OK;
err_release:
    shm_map_release(map);
err_close:
    close(fd);
    return status;
}

dcp_status_t
shm_map_peer(int32_t pid, int32_t fd, int64_t bytes, const char *what,
             shm_map_t **map_p)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, (int)fd);
    int own = open(path, O_RDWR | O_CLOEXEC);
    if (own < 0) {
        return DCP_FAIL(DCP_ERR_IO, "%s of process %d: open %s: %s", what, (int)pid,
                        path, strerror(errno));
    }
    dcp_status_t status = shm_map_fd(own, bytes, what, map_p);
    close(own);
    return status;
}
