/* SwiGLU and GELU, forward and backward, in one pass each.
 *
 * Memory per element: swiglu 8 B read, 4 B written; its backward 12 B and 8 B (12 B
 * with `out`); gelu 4 B and 4 B; its backward 8 B and 4 B. Every vector is loaded
 * before anything of it is stored, so the operations may run in place.
 *
 * Sigmoid is 1 / (1 + e) or e / (1 + e) by the sign of x, e = e^-|x|: no overflow, and
 * exactly 0 where the true value is below 1e-38.
 *
 * The normal distribution function of GELU comes from its tail, not from erf: for
 * a = |x| it is Q(a) = e^(-a^2/2) R(a), R(a) = t P(t), t = 1 / (1 + 0.3 a), P the
 * minimax polynomial of degree 9 (relative error 3.5e-9 for a <= 15), so that negative
 * x keep a small relative error too; a^2 is carried in two parts where the set has a
 * fused multiply-add.
 */
#include "../rowwise.h"
#include "simd.h"

typedef struct sigmoid {
    vf value; /* s */
    vf slope; /* s (1 - s) = e / (1 + e)^2, without the cancellation of 1 - s */
} sigmoid_t;

static inline sigmoid_t
sigmoid_of(vf x)
{
    vf e = vf_exp(-vf_abs(x));
    vf r = 1.0f / (1.0f + e);
    sigmoid_t result = {vf_select(x < 0.0f, e, vf_set(1.0f)) * r, e * r * r};
    return result;
}

VF_INLINE void
swiglu_step(const float *gate, const float *up, float *out, int64_t count)
{
    vf g = vf_get(gate, count);
    vf_put(out, g * sigmoid_of(g).value * vf_get(up, count), count);
}

static void
swiglu(const void *untyped, int64_t first, int64_t last)
{
    const dcp_swiglu_args_t *args = untyped;
    int64_t width = args->width;
    for (int64_t row = first; row < last; row++) {
        const float *gate = args->gate + row * args->gate_stride;
        const float *up = args->up + row * args->up_stride;
        float *out = args->out + row * width;
        int64_t j = 0;
        for (; j + VF <= width; j += VF) {
            swiglu_step(gate + j, up + j, out + j, VF);
        }
        if (j < width) {
            swiglu_step(gate + j, up + j, out + j, width - j);
        }
    }
}

typedef struct swiglu_row {
    const float *dout, *gate, *up;
    float *dgate, *dup, *out;
} swiglu_row_t;

VF_INLINE void
swiglu_backward_step(const swiglu_row_t *row, int64_t j, int64_t count)
{
    vf g = vf_get(row->gate + j, count);
    vf u = vf_get(row->up + j, count);
    vf dout = vf_get(row->dout + j, count);
    sigmoid_t s = sigmoid_of(g);
    vf silu = g * s.value;
    vf slope = vf_fma(g, s.slope, s.value); /* of silu */
    vf_put(row->dgate + j, dout * u * slope, count);
    vf_put(row->dup + j, dout * silu, count);
    if (row->out != NULL) {
        vf_put(row->out + j, silu * u, count);
    }
}

static void
swiglu_backward(const void *untyped, int64_t first, int64_t last)
{
    const dcp_swiglu_backward_args_t *args = untyped;
    int64_t width = args->width;
    for (int64_t i = first; i < last; i++) {
        swiglu_row_t row = {
            .dout = args->dout + i * width,
            .gate = args->gate + i * args->gate_stride,
            .up = args->up + i * args->up_stride,
            .dgate = args->dgate + i * args->dgate_stride,
            .dup = args->dup + i * args->dup_stride,
            .out = args->out != NULL ? args->out + i * width : NULL,
        };
        int64_t j = 0;
        for (; j + VF <= width; j += VF) {
            swiglu_backward_step(&row, j, VF);
        }
        if (j < width) {
            swiglu_backward_step(&row, j, width - j);
        }
    }
}

typedef struct normal {
    vf below;   /* distribution function at x */
    vf density; /* at x */
} normal_t;

static inline normal_t
normal_of(vf x)
{
    vf a = vf_min(vf_set(15.0f), vf_abs(x));
    vf square = a * a;
    vf square_low = vf_fma(a, a, -square); /* what rounding took; 0 if not fused */
    vf power = vf_exp(square * -0.5f);
    power = vf_fma(power * -0.5f, square_low, power);
    vf t = 1.0f / vf_fma(a, vf_set(0.3f), vf_set(1.0f));
    vf p = vf_set(-0.020628641f);
    p = vf_fma(p, t, vf_set(0.112464685f));
    p = vf_fma(p, t, vf_set(-0.228284538f));
    p = vf_fma(p, t, vf_set(0.191882968f));
    p = vf_fma(p, t, vf_set(-0.0795089058f));
    p = vf_fma(p, t, vf_set(0.0962047935f));
    p = vf_fma(p, t, vf_set(0.0783722633f));
    p = vf_fma(p, t, vf_set(0.110239339f));
    p = vf_fma(p, t, vf_set(0.119571318f));
    p = vf_fma(p, t, vf_set(0.119686717f));
    vf tail = p * t * power;
    vi negative = x < 0.0f;
    normal_t result = {vf_select(negative, tail, 1.0f - tail), power * 0.39894228f};
    return result;
}

VF_INLINE void
gelu_erf_step(const float *x, float *out, int64_t count)
{
    vf v = vf_get(x, count);
    vf_put(out, v * normal_of(v).below, count);
}

static void
gelu_erf(const void *untyped, int64_t first, int64_t last)
{
    const dcp_gelu_args_t *args = untyped;
    const float *x = args->x;
    float *out = args->out;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        gelu_erf_step(x + i, out + i, VF);
    }
    if (i < last) {
        gelu_erf_step(x + i, out + i, last - i);
    }
}

VF_INLINE void
gelu_erf_backward_step(const float *dout, const float *x, float *dx, int64_t count)
{
    vf v = vf_get(x, count);
    normal_t normal = normal_of(v);
    vf slope = vf_fma(v, normal.density, normal.below);
    vf_put(dx, vf_get(dout, count) * slope, count);
}

static void
gelu_erf_backward(const void *untyped, int64_t first, int64_t last)
{
    const dcp_gelu_backward_args_t *args = untyped;
    const float *dout = args->dout, *x = args->x;
    float *dx = args->dx;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        gelu_erf_backward_step(dout + i, x + i, dx + i, VF);
    }
    if (i < last) {
        gelu_erf_backward_step(dout + i, x + i, dx + i, last - i);
    }
}

/* 0.5 x (1 + tanh(u)) = x sigmoid(2 u), 2 u = 2 sqrt(2/pi) (x + 0.044715 x^3) */
static inline sigmoid_t
gelu_tanh_gate(vf x)
{
    return sigmoid_of(x * vf_fma(x * x, vf_set(0.0713548162f), vf_set(1.59576912f)));
}

VF_INLINE void
gelu_tanh_step(const float *x, float *out, int64_t count)
{
    vf v = vf_get(x, count);
    vf_put(out, v * gelu_tanh_gate(v).value, count);
}

static void
gelu_tanh(const void *untyped, int64_t first, int64_t last)
{
    const dcp_gelu_args_t *args = untyped;
    const float *x = args->x;
    float *out = args->out;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        gelu_tanh_step(x + i, out + i, VF);
    }
    if (i < last) {
        gelu_tanh_step(x + i, out + i, last - i);
    }
}

VF_INLINE void
gelu_tanh_backward_step(const float *dout, const float *x, float *dx, int64_t count)
{
    vf v = vf_min(vf_set(1e6f), vf_max(vf_set(-1e6f), vf_get(x, count)));
    sigmoid_t s = gelu_tanh_gate(v);
    vf slope = vf_fma(v * v, vf_set(0.2140644486f), vf_set(1.59576912f)); /* of 2 u */
    vf result = vf_fma(v * slope, s.slope, s.value);
    vf_put(dx, vf_get(dout, count) * result, count);
}

static void
gelu_tanh_backward(const void *untyped, int64_t first, int64_t last)
{
    const dcp_gelu_backward_args_t *args = untyped;
    const float *dout = args->dout, *x = args->x;
    float *dx = args->dx;
    int64_t i = first;
    for (; i + VF <= last; i += VF) {
        gelu_tanh_backward_step(dout + i, x + i, dx + i, VF);
    }
    if (i < last) {
        gelu_tanh_backward_step(dout + i, x + i, dx + i, last - i);
    }
}

const activation_ops_t ISA_NAME(activation_ops) = {
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .gelu = {gelu_erf, gelu_tanh},
    .gelu_backward = {gelu_erf_backward, gelu_tanh_backward},
};
