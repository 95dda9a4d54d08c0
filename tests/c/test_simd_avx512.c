/* The vector types of csrc/kernels/isa/simd.h, compiled for avx512. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define HAS_TARGET 1
#else
#define HAS_TARGET 0 /* clang's pragma does not switch the intrinsics on */
#endif
#define DCP_ISA avx512
#include "kernels/isa/simd.h"

#include "dcp/isa.h"
#include "simd_checks.h"

int
main(void)
{
    if (!HAS_TARGET || !dcp_isa_available(DCP_ISA_AVX512)) {
        printf("no avx512 here\n");
        return check_finish();
    }
    return run_checks();
}
