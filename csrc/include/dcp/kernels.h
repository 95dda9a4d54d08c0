/* The CPU's operations. Each checks its arguments (ERR_ARG names argument, value,
 * rule), then computes on the pool. See ops.h for what they do. Scratch comes from the
 * pool.
 */
#ifndef DCP_KERNELS_H
#define DCP_KERNELS_H

#include "dcp/ops.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#ifdef __cplusplus
extern "C" {
#endif

#define X(op) \
    dcp_status_t dcp_cpu_##op(dcp_pool_t *pool, const dcp_##op##_args_t *args);
DCP_OP_MAP(X)
#undef X

/* Bytes of packed panels for op(B) [k, n] in the instruction set in use: 2 a factor
 * where it multiplies bf16 and compute is BF16, else 4. */
int64_t dcp_gemm_pack_bytes(int64_t n, int64_t k, dcp_dtype_t compute);

/* Copies `row_count` rows of `bytes` from and to places `step` bytes apart; they do not
 * overlap. total_bytes: of all that the caller moves in such rows; much of it goes
 * around the cache. */
void dcp_copy_rows(void *to, int64_t to_step, const void *from, int64_t from_step,
                   int64_t bytes, int64_t row_count, int64_t total_bytes);

/* What the codes of an 8-bit v stand for, times the block's scale. */
void dcp_adamw8bit_v_values(float values[DCP_ADAMW8BIT_CODES]);

/* "built-in", or the CBLAS that was found at build time: name and version. */
const char *dcp_blas_name(void);

#ifdef __cplusplus
}
#endif
#endif
