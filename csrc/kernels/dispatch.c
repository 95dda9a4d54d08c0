/* Picks the instruction set once. The tables themselves stand beside the kernels that
 * use them. */
#include "dcp/isa.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define HAS_X86 1
#else
#define HAS_X86 0
#endif

static const char *const names[DCP_ISA_COUNT] = {"portable", "avx2", "avx512",
                                                 "avx512bf16"};
static _Atomic int current = -1;

const char *
dcp_isa_name(dcp_isa_t isa)
{
    return (unsigned)isa < DCP_ISA_COUNT ? names[isa] : "unknown";
}

int32_t
dcp_isa_available(dcp_isa_t isa)
{
    switch (isa) {
    case DCP_ISA_PORTABLE:
        return 1;
#if HAS_X86
    case DCP_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case DCP_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
               && __builtin_cpu_supports("avx512dq")
               && __builtin_cpu_supports("avx512vl");
    case DCP_ISA_AVX512BF16:
        return dcp_isa_available(DCP_ISA_AVX512)
               && __builtin_cpu_supports("avx512bf16");
#endif
    default:
        return 0;
    }
}

dcp_status_t
dcp_isa_set(const char *name)
{
    for (int i = 0; i < DCP_ISA_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            if (!dcp_isa_available((dcp_isa_t)i)) {
                return DCP_FAIL(DCP_ERR_ARG,
                                "DCP_ISA \"%s\" is not available on this CPU", name);
            }
            atomic_store(&current, i);
            return DCP_OK;
        }
    }
    return DCP_FAIL(DCP_ERR_ARG,
                    "DCP_ISA \"%s\" must be one of portable, avx2, avx512, avx512bf16",
                    name);
}

dcp_isa_t
dcp_isa_current(void)
{
    int isa = atomic_load(&current);
    if (isa < 0) {
        /* An unusable DCP_ISA is reported by the binding at import; here the best set
         * serves. */
        const char *wanted = getenv("DCP_ISA");
        if (wanted == NULL || wanted[0] == '\0' || dcp_isa_set(wanted) != DCP_OK) {
            for (isa = DCP_ISA_COUNT - 1; !dcp_isa_available((dcp_isa_t)isa); isa--) {
            }
            atomic_store(&current, isa);
        }
        isa = atomic_load(&current);
    }
    return (dcp_isa_t)isa;
}

dcp_isa_t
dcp_isa_vectors(void)
{
    dcp_isa_t isa = dcp_isa_current();
    return isa == DCP_ISA_AVX512BF16 ? DCP_ISA_AVX512 : isa;
}
