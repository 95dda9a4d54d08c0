/* One vector type per instruction set, so that a kernel is written once and compiled
 * once a set. Included only by files of csrc/kernels/isa/, which are compiled with
 * -DDCP_ISA=<name> and that set's flags (csrc/isa.txt). Everything is static; the one
 * symbol a file exports is its table, named by ISA_NAME.
 */
#ifndef DCP_SIMD_H
#define DCP_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define ISA_JOIN_(a, b) a##_##b
#define ISA_JOIN(a, b) ISA_JOIN_(a, b)
#define ISA_NAME(name) ISA_JOIN(name, DCP_ISA) /* gemm_ops -> gemm_ops_avx2 */

#if defined(__AVX512F__)
#define VF 16 /* floats in a vector */
#elif defined(__AVX2__)
#define VF 8
#else
#define VF 4
#endif

typedef float vf __attribute__((vector_size(VF * 4)));
typedef int32_t vi __attribute__((vector_size(VF * 4)));
typedef float vf_u __attribute__((vector_size(VF * 4), aligned(4)));
typedef int32_t vi_u __attribute__((vector_size(VF * 4), aligned(4)));

static inline vf
vf_load(const float *p) /* unaligned */
{
    return *(const vf_u *)p;
}

static inline void
vf_store(float *p, vf x) /* unaligned */
{
    *(vf_u *)p = x;
}

static inline vf
vf_set(float x)
{
    return x - (vf){0};
}

/* First `count` (0..VF) elements; the rest are 0 and are not touched in memory. */
static inline vf
vf_load_part(const float *p, int64_t count)
{
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1u), p);
#else
    vf x = {0};
    memcpy(&x, p, (size_t)count * sizeof(float));
    return x;
#endif
}

static inline void
vf_store_part(float *p, vf x, int64_t count)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1u), (__m512)x);
#else
    memcpy(p, &x, (size_t)count * sizeof(float));
#endif
}

/* a * b + c; fused where the set has it, and then in every lane alike. */
static inline vf
vf_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline vf
vf_max(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi take_a = a > b;
    return (vf)(((vi)a & take_a) | ((vi)b & ~take_a));
#endif
}

static inline float
vf_sum(vf x) /* fixed order: halves added until one is left */
{
    float part[VF];
    vf_store(part, x);
    for (int width = VF / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) {
            part[i] += part[i + width];
        }
    }
    return part[0];
}

static inline float
vf_max_across(vf x)
{
    float part[VF];
    vf_store(part, x);
    for (int width = VF / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) {
            part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
        }
    }
    return part[0];
}

/* 2^x for x <= 127, relative error below 3e-7; x <= -126 gives 0 (subnormal results are
 * flushed). x = n + f with f in
 * [-1/2, 1/2]; n by the magic-number round, 2^f by a polynomial of degree 6 (Taylor of
 * 2^f, error 1.2e-7). */
static inline vf
vf_exp2(vf x)
{
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23 */
    vi tiny = x <= -126.0f;
    vf shifted = x + magic;
    vf n = shifted - magic;
    vf f = x - n;
    vf p = vf_set(1.5403530e-4f);
    p = vf_fma(p, f, vf_set(1.3333558e-3f));
    p = vf_fma(p, f, vf_set(9.6181291e-3f));
    p = vf_fma(p, f, vf_set(5.5504109e-2f));
    p = vf_fma(p, f, vf_set(2.4022651e-1f));
    p = vf_fma(p, f, vf_set(6.9314718e-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    vi bits = (vi)p + ((vi)shifted << 23);
    return (vf)(bits & ~tiny);
}

static inline vf
vf_exp(vf x) /* e^x for x <= 88 */
{
    return vf_exp2(x * 1.44269504f);
}

#endif
