/* CLOCK_MONOTONIC behind a table. */
#include "dcp/clock.h"

#include <stddef.h>
#include <time.h>

static int64_t
monotonic_ns(void *context)
{
    (void)context;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static const dcp_clock_ops_t default_ops = {monotonic_ns, NULL};
static const dcp_clock_ops_t *current_ops = &default_ops;

void
dcp_clock_set_ops(const dcp_clock_ops_t *ops)
{
    current_ops = ops != NULL ? ops : &default_ops;
}

int64_t
dcp_clock_ns(void)
{
    return current_ops->now_ns(current_ops->context);
}
