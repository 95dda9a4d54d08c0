/* The inverse fourth root of a symmetric matrix without negative eigenvalues. */
#ifndef DCP_OPTIM_INVERSE_ROOT_H
#define DCP_OPTIM_INVERSE_ROOT_H

#include "dcp/device.h"

/* Bytes of scratch. */
int64_t optim_inverse_root_scratch(int64_t n);
/* root [n, n] = (a + ridge I)^(-1/4), both with row stride ld; ridge = 1e-6 of the
 * largest eigenvalue, and what is negative counts as 0. a = 0 gives I. Only the upper
 * triangle of a is read. scratch is 64-byte aligned. ERR_NUMERIC where a is not finite.
 * Blocks; the bits depend on a alone. */
dcp_status_t optim_inverse_root(const dcp_device_ops_t *device, dcp_queue_t *queue,
                                int64_t n, const float *a, float *root, int64_t ld,
                                void *scratch);

#endif
