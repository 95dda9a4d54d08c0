/* The rotation of a block: signs, then Walsh-Hadamard; short blocks in pieces of powers
 * of two, the largest first.
 *
 * It is orthonormal but for a factor: rotated values are 1/ROTATION of those of the
 * orthonormal transform, so that none is larger than the largest value that went in:
 * neither way overflows. Stages go
 * from neighbours outwards in every instruction set: a sum or a difference of the same
 * two numbers, hence the same bits. Some 9 instructions for 16 elements and lanes.
 */
#ifndef DCP_ROTATION_H
#define DCP_ROTATION_H

#include "dcp/precision.h"
#include "simd.h"

enum { ROTATION = 16, ROTATION_MOST = DCP_PRECISION_BLOCK };

/* sqrt(n), correctly rounded, n = 2^i. */
static const float rotation_roots_[] = {1.0f, 1.41421354f, 2.0f, 2.82842708f,
                                        4.0f, 5.65685415f, 8.0f, 11.3137083f};

#if defined(__clang__)
#define ROTATION_SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define ROTATION_SHUFFLE(x, ...) __builtin_shuffle(x, (vi){__VA_ARGS__})
#endif

/* Lane l of the result: lane l ^ distance of x. */
VF_INLINE vf
rotation_swap_(vf x, const int distance)
{
#if VF == 16
    return distance == 1 ? ROTATION_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13,
                                            12, 15, 14)
           : distance == 2 ? ROTATION_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9,
                                              14, 15, 12, 13)
           : distance == 4 ? ROTATION_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15,
                                              8, 9, 10, 11)
                           : ROTATION_SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2,
                                              3, 4, 5, 6, 7);
#elif VF == 8
    return distance == 1   ? ROTATION_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6)
           : distance == 2 ? ROTATION_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5)
                           : ROTATION_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3);
#else
    return distance == 1 ? ROTATION_SHUFFLE(x, 1, 0, 3, 2)
                         : ROTATION_SHUFFLE(x, 2, 3, 0, 1);
#endif
}

/* Sums to the lower, differences to the upper lane of each pair `distance` apart. */
VF_INLINE vf
rotation_lanes_(vf x, const int distance)
{
    vi upper;
    for (int l = 0; l < VF; l++) {
        upper[l] = l & distance ? INT32_MIN : 0;
    }
    return rotation_swap_(x, distance) + (vf)((vi)x ^ upper);
}

/* Of the way back the factor comes last: until then values are below the largest of the
 * block. What rounding moved beyond the largest float becomes that. A NaN stays. */
VF_INLINE vf
rotation_finish_(vf x, vf factor)
{
    const vf most = vf_set(0x1.fffffep+127f);
    return vf_min(most, vf_max(-most, x * factor));
}

/* A whole block. */
VF_INLINE void
rotation_whole_(const float *from, const int32_t *signs, float *to, const int back)
{
    const float root = 11.3137083f, whole = (float)ROTATION;
    const float factor = back ? whole / root : 1.0f / (root * whole);
    vf v[ROTATION_MOST / VF];
    for (int i = 0; i < ROTATION_MOST / VF; i++) {
        v[i] = vf_load(from + i * VF);
        if (!back) {
            v[i] *= (vf)(*(const vi_u *)(signs + i * VF) | (vi)vf_set(factor));
        }
        v[i] = rotation_lanes_(v[i], 1);
        v[i] = rotation_lanes_(v[i], 2);
#if VF > 4
        v[i] = rotation_lanes_(v[i], 4);
#endif
#if VF > 8
        v[i] = rotation_lanes_(v[i], 8);
#endif
    }
#pragma GCC unroll 8
    for (int h = 1; h < ROTATION_MOST / VF; h *= 2) {
#pragma GCC unroll 32
        for (int i = 0; i < ROTATION_MOST / VF; i++) {
            if ((i & h) == 0) {
                vf a = v[i], b = v[i + h];
                v[i] = a + b;
                v[i + h] = a - b;
            }
        }
    }
    for (int i = 0; i < ROTATION_MOST / VF; i++) {
        if (back) {
            vi sign = *(const vi_u *)(signs + i * VF);
            v[i] = rotation_finish_(v[i], (vf)(sign | (vi)vf_set(factor)));
        }
        vf_store(to + i * VF, v[i]);
    }
}

static float
rotation_signed_(float x, int32_t sign)
{
    return sign != 0 ? -x : x;
}

static void
rotation_pieces_(float *x, const int32_t *signs, int count, const int back)
{
    for (int n = ROTATION_MOST, power = 7, at = 0; n > 0; n /= 2, power--) {
        if ((count & n) == 0) {
            continue;
        }
        float root = rotation_roots_[power], whole = (float)ROTATION;
        float *piece = x + at;
        for (int i = 0; i < n && !back; i++) {
            piece[i] *= rotation_signed_(1.0f / (root * whole), signs[at + i]);
        }
        for (int h = 1; h < n; h *= 2) {
            for (int i = 0; i < n; i++) {
                if ((i & h) == 0) {
                    float a = piece[i], b = piece[i + h];
                    piece[i] = a + b;
                    piece[i + h] = a - b;
                }
            }
        }
        for (int i = 0; i < n && back; i++) {
            float factor = rotation_signed_(whole / root, signs[at + i]);
            piece[i] = rotation_finish_(vf_set(piece[i]), vf_set(factor))[0];
        }
        at += n;
    }
}

/* to = from turned; both have ROTATION_MOST places, of which `count` count. signs: the
 * sign bit, or 0, of each. */
static void
rotation_turn(const float *from, const int32_t *signs, int count, float *to)
{
    if (count == ROTATION_MOST) {
        rotation_whole_(from, signs, to, 0);
    } else {
        memcpy(to, from, ROTATION_MOST * sizeof(float));
        rotation_pieces_(to, signs, count, 0);
    }
}

/* In place. */
static void
rotation_turn_back(float *x, const int32_t *signs, int count)
{
    if (count == ROTATION_MOST) {
        rotation_whole_(x, signs, x, 1);
    } else {
        rotation_pieces_(x, signs, count, 1);
    }
}

#endif
