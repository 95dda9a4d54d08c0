/* Checks of csrc/kernels/isa/simd.h for the instruction set it is compiled for;
 * included by test_simd_*.c after it. */
#ifndef DCP_SIMD_CHECKS_H
#define DCP_SIMD_CHECKS_H

#include "check.h"

#include <math.h>

static float
from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Greatest relative errors over both signs and every magnitude that does not under- or
 * overflow. */
static void
check_accuracy(void)
{
    double worst_exp2 = 0, worst_exp = 0;
    for (uint32_t bits = 0x2f000000u; bits < 0x42fc0000u; bits += 257) { /* to 126 */
        for (uint32_t sign = 0; sign < 2; sign++) {
            float x = from_bits(bits | sign << 31);
            double error =
                fabs((double)vf_exp2(vf_set(x))[VF - 1] / exp2((double)x) - 1);
            worst_exp2 = error > worst_exp2 ? error : worst_exp2;
            if (fabsf(x) < 87.3f) {
                error = fabs((double)vf_exp(vf_set(x))[0] / exp((double)x) - 1);
                worst_exp = error > worst_exp ? error : worst_exp;
            }
        }
    }
    CHECK(worst_exp2 < 2e-7);
    CHECK(worst_exp < 1e-7);
}

static void
check_edges(void)
{
    CHECK(vf_exp2(vf_set(0))[0] == 1 && vf_exp(vf_set(0))[0] == 1);
    CHECK(vf_exp2(vf_set(-0.0f))[0] == 1 && vf_exp(vf_set(-0.0f))[0] == 1);
    CHECK(vf_exp2(vf_set(127))[0] == 0x1p127f && vf_exp2(vf_set(-125))[0] == 0x1p-125f);
    float zeros[] = {-126, -126.5f, -127, -1e5f, -3e38f, -INFINITY};
    for (int i = 0; i < 6; i++) {
        CHECK(vf_exp2(vf_set(zeros[i]))[0] == 0 && vf_exp(vf_set(zeros[i]))[0] == 0);
    }
    CHECK(vf_exp2(vf_set(nextafterf(-126, 0)))[0] >= 0x1p-126f);
    uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u,
                       0x7fffffffu, 0x7fc00001u, 0xffc001ffu};
    for (int i = 0; i < 7; i++) { /* whatever the payload */
        vf nan = vf_set(0);
        vi bits = (vi){0} + (int32_t)nans[i];
        memcpy(&nan, &bits, sizeof nan);
        CHECK(isnan(vf_exp2(nan)[0]) && isnan(vf_exp(nan)[0]));
        CHECK(vf_max(nan, vf_set(1))[0] == 1 && isnan(vf_max(vf_set(1), nan)[0]));
        CHECK(vf_min(nan, vf_set(1))[0] == 1 && isnan(vf_min(vf_set(1), nan)[0]));
    }
}

static void
check_lanes(void)
{
    float in[VF + 1], out[VF + 1];
    for (int i = 0; i <= VF; i++) {
        in[i] = (float)(i + 1);
    }
    for (int64_t count = 0; count <= VF; count++) {
        for (int i = 0; i <= VF; i++) {
            out[i] = -1;
        }
        vf x = vf_load_part(in, count);
        vf_store_part(out, x, count);
        vf filled = vf_fill(vf_load(in), count, 9);
        for (int i = 0; i < VF; i++) {
            CHECK(x[i] == (i < count ? in[i] : 0));
            CHECK(out[i] == (i < count ? in[i] : -1));
            CHECK(filled[i] == (i < count ? in[i] : 9));
        }
    }
    CHECK(vf_sum(vf_load(in)) == VF * (VF + 1) / 2);
    for (int at = 0; at < VF; at++) {
        vf x = vf_set(-5);
        x[at] = -2;
        CHECK(vf_max_across(x) == -2);
        CHECK(vf_abs(x)[at] == 2);
    }
    for (int i = 1; i < 1000; i++) {
        CHECK(vf_sqrt(vf_set((float)i * 1.7f))[VF - 1] == sqrtf((float)i * 1.7f));
    }
}

static int
run_checks(void)
{
    check_accuracy();
    check_edges();
    check_lanes();
    return check_finish();
}

#endif
