/* The vector types of csrc/kernels/isa/simd.h, compiled for portable. */
#define DCP_ISA portable
#include "kernels/isa/simd.h"

#include "dcp/isa.h"
#include "simd_checks.h"

int
main(void)
{
    return run_checks();
}
