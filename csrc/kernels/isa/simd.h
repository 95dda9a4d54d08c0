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
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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

#if defined(__AVX2__) && !defined(__AVX512F__)
static inline __m256i
vf_part_mask_(int64_t count) /* the first `count` lanes set */
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

/* First `count` (0..VF) elements; the rest are 0 and are not touched in memory. */
static inline vf
vf_load_part(const float *p, int64_t count)
{
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1u), p);
#elif defined(__AVX2__)
    return (vf)_mm256_maskload_ps(p, vf_part_mask_(count));
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
#elif defined(__AVX2__)
    _mm256_maskstore_ps(p, vf_part_mask_(count), (__m256)x);
#else
    memcpy(p, &x, (size_t)count * sizeof(float));
#endif
}

/* A loop over a row calls one body with count = VF and, for the rest of the row, with
 * fewer; inlined, the first is a plain load. */
#define VF_INLINE static inline __attribute__((always_inline))

VF_INLINE vi
vi_max(vi a, vi b)
{
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi take_a = a > b;
    return (a & take_a) | (b & ~take_a);
#endif
}

VF_INLINE vf
vf_get(const float *p, int64_t count)
{
    return count == VF ? vf_load(p) : vf_load_part(p, count);
}

VF_INLINE void
vf_put(float *p, vf x, int64_t count)
{
    if (count == VF) {
        vf_store(p, x);
    } else {
        vf_store_part(p, x, count);
    }
}

/* Asks for the cache line of p[ahead], which may lie beyond the array: for kernels that
 * compute much or read a row twice, where the hardware's prefetch comes too late. */
static inline void
vf_prefetch(const float *p, int64_t ahead)
{
    uintptr_t at = (uintptr_t)p + (uintptr_t)ahead * sizeof(float);
    __builtin_prefetch((const void *)at, 0, 3);
}

/* a * b + c; fused where the set has it, and then in every lane alike. */
static inline vf
vf_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA) && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Rounded to bf16, nearest even, and still fp32: the upper half of the bits, the lower
 * one zero. A NaN stays one. */
static inline vf
vf_round_bf16(vf x)
{
    vi bits = (vi)x;
    vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vi nan = x != x;
    return (vf)(((rounded & ~nan) | ((bits | 0x400000) & nan)) & ~0xffff);
}

/* The larger; b where either is a NaN, in every instruction set. So vf_max(limit, x)
 * keeps the NaN of x, and vf_max(x, best) leaves it out. */
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

static inline vf
vf_min(vf a, vf b) /* the smaller; b where either is a NaN */
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vi take_a = a < b;
    return (vf)(((vi)a & take_a) | ((vi)b & ~take_a));
#endif
}

static inline vf
vf_abs(vf x)
{
    return (vf)((vi)x & INT32_MAX);
}

/* a where the lane of `mask` (a comparison's result) is set, else b. */
static inline vf
vf_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

/* The first `count` lanes of x, `fill` in the others. */
static inline vf
vf_fill(vf x, int64_t count, float fill)
{
    static const int32_t numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                        8, 9, 10, 11, 12, 13, 14, 15};
    vi lane;
    memcpy(&lane, numbers, sizeof lane);
    return vf_select(lane < (int32_t)count, x, vf_set(fill));
}

static inline vf
vf_sqrt(vf x) /* correctly rounded */
{
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < VF; i++) {
        x[i] = __builtin_sqrtf(x[i]);
    }
    return x;
#endif
}

static inline float
vf_sum(vf x) /* fixed order: halves added until one is left */
{
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                             _mm512_extractf32x8_ps((__m512)x, 1));
#else
    __m256 y = (__m256)x;
#endif
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

static inline float
vf_max_across(vf x)
{
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 y = _mm256_max_ps(_mm512_castps512_ps256((__m512)x),
                             _mm512_extractf32x8_ps((__m512)x, 1));
#else
    __m256 y = (__m256)x;
#endif
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
#else
    float low = x[0] > x[2] ? x[0] : x[2], high = x[1] > x[3] ? x[1] : x[3];
    return low > high ? low : high;
#endif
}

/* scale * 2^n where `keep`, else 0, for the n of `shifted` = n + VF_MAGIC, n >= -126.
 * The low bits of shifted are n + 127, so a shift makes them the exponent; the product
 * (not a sum of bits) carries every NaN on. */
#define VF_MAGIC 12583039.0f /* 1.5 * 2^23 + 127 */

static inline vf
vf_scale_(vf scale, vf shifted, vf x, float least)
{
    vf power = (vf)((vi)shifted << 23);
#if defined(__AVX512F__)
    __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLE_UQ);
    return (vf)_mm512_maskz_mul_ps(keep, (__m512)scale, (__m512)power);
#else
    vi tiny = x <= least;
    return (vf)((vi)(scale * power) & ~tiny);
#endif
}

/* 2^x for x <= 127, relative error below 2e-7; exactly 1 for 0, 0 for x <= -126 and
 * -inf (subnormal results are flushed), NaN for NaN. x = n + f with f in [-1/2, 1/2]; n
 * by the magic-number round, 2^f by the minimax polynomial of degree 5 through 2^0 = 1
 * (error 9.2e-8). For softmax inner loops; vf_exp is the accurate one. */
static inline vf
vf_exp2(vf x)
{
    const vf magic = vf_set(VF_MAGIC);
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = vf_set(1.3264727e-3f);
    p = vf_fma(p, f, vf_set(9.671513e-3f));
    p = vf_fma(p, f, vf_set(5.5507336e-2f));
    p = vf_fma(p, f, vf_set(2.4022242e-1f));
    p = vf_fma(p, f, vf_set(6.93147e-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_scale_(p, shifted, x, -126.0f);
}

/* e^x for x <= 88, relative error below 1e-7; exactly 1 for 0, 0 for x <= -87.33 and
 * -inf, NaN for NaN. x = n ln 2 + r, ln 2 in two parts of which n times the first is
 * exact; e^r = 1 + r + r^2 q(r), q minimax (error 3e-9). */
static inline vf
vf_exp(vf x)
{
    const vf magic = vf_set(VF_MAGIC);
    vf shifted = vf_fma(x, vf_set(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf q = vf_set(1.381454e-3f);
    q = vf_fma(q, r, vf_set(8.368745e-3f));
    q = vf_fma(q, r, vf_set(4.166839e-2f));
    q = vf_fma(q, r, vf_set(1.6666521e-1f));
    q = vf_fma(q, r, vf_set(0.49999994f));
    vf p = vf_fma(q, r * r, r) + 1.0f;
    return vf_scale_(p, shifted, x, -87.33f);
}

#endif
