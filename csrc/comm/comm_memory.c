/* How much memory is there? Asked before a big block of shared memory is taken, because
 * the kernel would not refuse it: it would kill a process later.
 *
 * Free is what the machine calls available, and what the control group (version 1 or 2)
 * leaves, page cache counted as free. A file that cannot be read sets no limit. */
#include "comm_transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The number after `key` (whole file where key is ""), -1 where there is none. */
static int64_t
read_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return -1;
    }
    char line[256];
    int64_t number = -1;
    size_t key_length = strlen(key);
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, key, key_length) == 0
            && sscanf(line + key_length, "%" SCNd64, &number) == 1) {
            break;
        }
    }
    fclose(file);
    return number;
}

/* Room of the group in `folder`; INT64_MAX: no limit. */
static int64_t
group_room(const char *folder, const char *limit_name, const char *used_name)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    int64_t limit = read_number(path, "");
    snprintf(path, sizeof path, "%s/%s", folder, used_name);
    int64_t used = read_number(path, "");
    if (limit < 0 || used < 0 || limit > INT64_MAX / 2) {
        return INT64_MAX;
    }
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    int64_t cache = read_number(path, "inactive_file ");
    int64_t room = limit - used + (cache > 0 ? cache : 0);
    return room > 0 ? room : 0;
}

static int64_t
own_group_room(void)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL) {
        return INT64_MAX;
    }
    int64_t room = INT64_MAX;
    char line[512], folder[560];
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        controllers++;
        int64_t found = INT64_MAX;
        if (controllers[0] == '\0') {
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", group);
            found = group_room(folder, "memory.max", "memory.current");
        } else if (strcmp(controllers, "memory") == 0) {
            snprintf(folder, sizeof folder, "/sys/fs/cgroup/memory%s", group);
            found =
                group_room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes");
        }
        room = found < room ? found : room;
    }
    fclose(file);
    return room;
}

dcp_status_t
comm_memory_check(int64_t bytes, const char *what)
{
    int64_t machine = read_number("/proc/meminfo", "MemAvailable:");
    machine = machine < 0 ? INT64_MAX : machine * 1024;
    int64_t group = own_group_room();
    int64_t available = machine < group ? machine : group;
    if (bytes > available) {
        return DCP_FAIL(DCP_ERR_NO_MEM,
                        "%s needs %" PRId64 " bytes, but %s leaves %" PRId64
                        " bytes available",
                        what, bytes,
                        machine < group ? "the machine (MemAvailable)"
                                        : "the control group's memory limit",
                        available);
    }
    return DCP_OK;
}
