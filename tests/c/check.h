/* A C test is a program: CHECK(...) counts, tests are listed in main, the last line is
 * "N passed, N failed". */
#ifndef DCP_CHECK_H
#define DCP_CHECK_H

#include "dcp/alloc.h"
#include "dcp/status.h"

#include <stdio.h>
#include <stdlib.h>

static int check_passed, check_failed;

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (condition) {                                                           \
            check_passed++;                                                        \
        } else {                                                                   \
            check_failed++;                                                        \
            printf("%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
                   dcp_last_error());                                              \
        }                                                                          \
    } while (0)

#define CHECK_OK(call) CHECK((call) == DCP_OK)

static inline int
check_finish(void)
{
    printf("%d passed, %d failed\n", check_passed, check_failed);
    return check_failed > 0;
}

/* An allocator that fails on the n-th call (from 1) after check_fail_alloc(n); 0:
 * never. */
static int64_t check_alloc_calls, check_alloc_fail_at;

static inline void *
check_alloc(void *context, int64_t bytes)
{
    (void)context;
    check_alloc_calls++;
    if (check_alloc_fail_at > 0 && check_alloc_calls == check_alloc_fail_at) {
        return NULL;
    }
    return aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
}

static inline void
check_alloc_free(void *context, void *pointer, int64_t bytes)
{
    (void)context;
    (void)bytes;
    free(pointer);
}

static inline void
check_fail_alloc(int64_t n)
{
    static const dcp_allocator_ops_t ops = {check_alloc, check_alloc_free, NULL};
    dcp_alloc_set_ops(&ops);
    check_alloc_calls = 0;
    check_alloc_fail_at = n;
}

/* Runs `scenario` (returns a status; cleans up after itself) with the 1st, 2nd, ...
 * allocation failing until it passes; every failure must be ERR_NO_MEM and leave
 * nothing held. */
static inline void
check_every_alloc(dcp_status_t (*scenario)(void))
{
    int64_t held = dcp_alloc_held_bytes();
    for (int64_t n = 1;; n++) {
        check_fail_alloc(n);
        dcp_status_t status = scenario();
        CHECK(dcp_alloc_held_bytes() == held);
        if (status == DCP_OK) {
            break;
        }
        CHECK(status == DCP_ERR_NO_MEM);
        if (n > 100000) { /* the scenario never passes */
            CHECK(n <= 100000);
            break;
        }
    }
    check_fail_alloc(0);
}

#endif
