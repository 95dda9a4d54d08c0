/* Rate of multiply-adds of one core, the bound of every product here.
 *
 * Prints "<name> <GFLOP/s>" for each vector width that this CPU has, in fp32, and
 * avx512bf16 for products of bf16 numbers summed in fp32: the best of the
 * repeats, each about 2 ms long, so that one of them falls between other jobs. Twelve
 * accumulators in named registers (written in assembly: a compiler that spills one
 * halves the figure) cover a latency of 4 cycles on 2 pipes. Built and run by the
 * benchmarks: cc -O2 fma_peak.c -o fma_peak && ./fma_peak [repeats].
 */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { INNER_COUNT = 200000 };

static double
now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#define FMA(op, reg, n) op " %%" reg "14, %%" reg "15, %%" reg #n "\n\t"
#define FMA_TWELVE(op, reg) \
    FMA(op, reg, 0)         \
    FMA(op, reg, 1)         \
    FMA(op, reg, 2)         \
    FMA(op, reg, 3)         \
    FMA(op, reg, 4)         \
    FMA(op, reg, 5)         \
    FMA(op, reg, 6)         \
    FMA(op, reg, 7) FMA(op, reg, 8) FMA(op, reg, 9) FMA(op, reg, 10) FMA(op, reg, 11)
#define FMA_MORE(op, reg) FMA(op, reg, 12) FMA(op, reg, 13)
#define LOOP(body) "1:\n\t" body "dec %0\n\t jnz 1b\n\t vzeroupper\n\t"

#define CLOBBERS                                                                    \
    "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
        "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"

static void
spin_ymm(int64_t count)
{
    __asm__ volatile(LOOP(FMA_TWELVE("vfmadd231ps", "ymm")) : "+r"(count) : : CLOBBERS);
}

static void
spin_zmm(int64_t count)
{
    __asm__ volatile(LOOP(FMA_TWELVE("vfmadd231ps", "zmm")) : "+r"(count) : : CLOBBERS);
}

static void
spin_bf16(int64_t count)
{
    /* its latency is longer: two accumulators more */
    __asm__ volatile(LOOP(FMA_TWELVE("vdpbf16ps", "zmm") FMA_MORE("vdpbf16ps", "zmm"))
                     : "+r"(count)
                     :
                     : CLOBBERS, "xmm12", "xmm13");
}

static void
report(const char *name, void (*spin)(int64_t), int products, int repeats)
{
    double best_s = 1e9;
    for (int i = 0; i < repeats; i++) {
        double start_s = now_s();
        spin(INNER_COUNT);
        double took_s = now_s() - start_s;
        best_s = took_s < best_s ? took_s : best_s;
    }
    printf("%s %.1f\n", name, 2e-9 * INNER_COUNT * products / best_s);
}
#endif

int
main(int argc, char **argv)
{
    int repeats = argc > 1 ? atoi(argv[1]) : 20;
    (void)repeats;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        report("avx2", spin_ymm, 12 * 8, repeats);
    }
    if (__builtin_cpu_supports("avx512f")) {
        report("avx512", spin_zmm, 12 * 16, repeats);
    }
    if (__builtin_cpu_supports("avx512bf16")) {
        report("avx512bf16", spin_bf16, 14 * 32, repeats);
    }
#endif
    return 0;
}
