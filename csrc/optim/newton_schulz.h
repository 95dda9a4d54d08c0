/* The orthogonal factor of a matrix, approximately. */
#ifndef DCP_OPTIM_NEWTON_SCHULZ_H
#define DCP_OPTIM_NEWTON_SCHULZ_H

#include "dcp/device.h"

/* Floats of scratch. */
int64_t optim_newton_schulz_scratch(int64_t rows, int64_t columns);
/* Replaces x [rows, columns] by U f(S) V^T of its singular value decomposition, f close
 * to 1 where a singular value is more than a few thousandths of the norm. All zeros
 * stay zeros. scratch is 64-byte aligned. Blocks; the bits depend on x alone. */
dcp_status_t optim_newton_schulz(const dcp_device_ops_t *device, dcp_queue_t *queue,
                                 int64_t rows, int64_t columns, int32_t iterations,
                                 float *x, float *scratch);

#endif
