/* Monotonic time, replaceable so that deadlines can be tested without waiting. */
#ifndef DCP_CLOCK_H
#define DCP_CLOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_clock_ops {
    int64_t (*now_ns)(void *context);
    void *context;
} dcp_clock_ops_t;

void dcp_clock_set_ops(const dcp_clock_ops_t *ops); /* NULL: CLOCK_MONOTONIC */
int64_t dcp_clock_ns(void);

#ifdef __cplusplus
}
#endif
#endif
