/* Max-min fair rates without allocation. */
#ifndef MAX_MIN_H
#define MAX_MIN_H

#include <stdint.h>

typedef struct max_min_flows {
    int64_t flow_count;
    const int64_t *offsets; /* [flow_count + 1] */
    const int32_t *link_of;
    int32_t link_count;
    const double *capacity; /* [link_count] */
} max_min_flows_t;

/* scratch: residual [links], users [links], frozen [flows], all of the caller. */
typedef struct max_min_scratch {
    double *residual;
    int64_t *users;
    int8_t *frozen;
} max_min_scratch_t;

void max_min_fill(const max_min_flows_t *flows, const max_min_scratch_t *scratch,
                  double *rates);

#endif
