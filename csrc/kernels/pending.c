/* Weak stand-ins while the kernels are written side by side; deleted when all stand. */
#include "dcp/kernels.h"
#define X(op)                                                                            \
    __attribute__((weak)) dcp_status_t dcp_cpu_##op(dcp_pool_t *pool,                    \
                                                    const dcp_##op##_args_t *args)       \
    {                                                                                    \
        (void)pool;                                                                      \
        (void)args;                                                                      \
        return DCP_FAIL(DCP_ERR_UNSUPPORTED, #op);                                       \
    }
X(gemm) X(gemm_pack) X(attention) X(attention_backward)
#undef X
__attribute__((weak)) int64_t
dcp_gemm_pack_bytes(int64_t n, int64_t k)
{
    return n * k * 4;
}
__attribute__((weak)) const char *
dcp_blas_name(void)
{
    return "built-in";
}
