/* Which instruction set the CPU kernels use. Chosen once, at first use: the best that
 * this CPU has, or what DCP_ISA (portable, avx2, avx512, avx512bf16) asks for. Never by
 * the machine that built dcp.
 */
#ifndef DCP_ISA_H
#define DCP_ISA_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_isa {
    DCP_ISA_PORTABLE = 0,
    DCP_ISA_AVX2 = 1,
    DCP_ISA_AVX512 = 2,
    DCP_ISA_AVX512BF16 = 3, /* AVX-512 that multiplies bf16; fp32 as AVX-512 */
    DCP_ISA_COUNT = 4,
} dcp_isa_t;

const char *dcp_isa_name(dcp_isa_t isa);
/* Built into this library and runnable on this CPU? */
int32_t dcp_isa_available(dcp_isa_t isa);
/* The one in use. */
dcp_isa_t dcp_isa_current(void);
/* The one whose fp32 kernels it runs: avx512 for avx512bf16, else itself. */
dcp_isa_t dcp_isa_vectors(void);
/* Sets it by name, for tests and benchmarks; not while a kernel runs. */
dcp_status_t dcp_isa_set(const char *name);

#ifdef __cplusplus
}
#endif
#endif
