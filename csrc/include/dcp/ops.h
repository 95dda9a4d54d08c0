/* Operations on tensors: one argument struct each, shared by every device.
 *
 * Conventions. Row-major fp32 unless said otherwise. T: tokens of a micro-batch (all
 * its sequences laid one after the other), H: query heads, K: key-value heads, D: head
 * dimension. `*_stride`: elements from one row (token) to the next; heads of a token
 * lie D apart. Sizes are int64_t; 0 rows are legal everywhere and do nothing. Pointers
 * are borrowed until the queue's next fence. Inputs and outputs do not overlap unless
 * said. "Accumulates" means: adds to what is there. Results do not depend on the number
 * of threads.
 */
#ifndef DCP_OPS_H
#define DCP_OPS_H

#include "dcp/dtype.h"
#include "dcp/precision.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `compute` of a product: DCP_F32 (0), or DCP_BF16: every factor is rounded to bf16
 * (nearest even), products are summed in fp32; what is stored stays fp32. A CPU with
 * AVX512_BF16 multiplies bf16, others widen what was rounded; the two differ in the
 * order of sums, and where factors are subnormal: those count as zero in the first.
 * What is said of bits below holds within either. */

/* C = op(A) op(B) [+ add] [+ bias], or C += op(A) op(B).
 * op(A) is [m, k]: stored [m, k] with row stride lda, or, with trans_a, [k, m]. op(B)
 * is [k, n]: stored [k, n] with row stride ldb, or, with trans_b, [n, k]. k = 0 gives
 * zero (plus add, bias, C). On the CPU the bits of an element depend only on its row of
 * op(A), its column of op(B), k and the instruction set: a row's result is the same
 * whatever other rows the call has, and whether B came packed. */
typedef struct dcp_gemm_args {
    int64_t m, n, k;
    const float *a;
    int64_t lda;
    const float *b;
    int64_t ldb;
    const void *b_packed; /* from dcp_gemm_pack of this op(B) [k, n], or NULL; then b is
                             not read */
    float *c;
    int64_t ldc;
    const float *add; /* [m, n] with row stride ld_add, added to the product; NULL:
                         none; may be c */
    int64_t ld_add;
    const float *bias; /* [n], added to every row; NULL: none */
    int32_t trans_a, trans_b;
    int32_t accumulate;  /* C += product; add and bias must be NULL then */
    dcp_dtype_t compute; /* b_packed must come from a pack of the same */
} dcp_gemm_args_t;

/* Panels of op(B) in the layout that the gemm kernel of the instruction set in use
 * reads. */
typedef struct dcp_gemm_pack_args {
    int64_t n, k;
    const float *b;
    int64_t ldb;
    int32_t trans_b;
    void *packed; /* dcp_gemm_pack_bytes(n, k, compute) bytes, 64-byte aligned */
    dcp_dtype_t compute;
    const uint16_t *b_bf16; /* read instead of b, [k, n] or [n, k] as b, where
                               compute is DCP_BF16; NULL: b */
} dcp_gemm_pack_args_t;

/* Variable-length attention. Sequence s owns query rows offsets[s] .. offsets[s+1]-1
 * and key rows key_offsets[s] .. (the same offsets where key_offsets is NULL). causal
 * is bottom-right aligned: query i of q_len sees keys j <= i + k_len - q_len. Query
 * head h reads key-value head h / (H / K). A row that sees no key: out 0, lse -inf.
 * Rows beyond the last offset: out 0, lse -inf. */
typedef struct dcp_attention_args {
    const float *q, *k, *v; /* [Tq, H, D], [Tk, K, D], [Tk, K, D] */
    int64_t q_stride, k_stride, v_stride, out_stride;
    const void *offsets;     /* [sequence_count + 1], int32 or int64 */
    const void *key_offsets; /* the same type, or NULL */
    const void *key_ends;    /* the same type, or NULL. Else sequence s owns key rows
                                key_offsets[s] .. key_ends[s] - 1, which may overlap */
    int32_t offsets_64;      /* offsets are int64 */
    int32_t causal;
    int64_t sequence_count;
    int64_t query_rows; /* Tq, rows of q and out */
    int64_t heads, kv_heads, head_dim;
    float scale;
    float *out;          /* [Tq, H, D] */
    float *lse;          /* [H, Tq], natural logarithm */
    dcp_dtype_t compute; /* DCP_BF16: q, k, v, probabilities and, backward, dout and
                            score gradients are rounded as factors; softmax fp32 */
} dcp_attention_args_t;

/* Gradients of the same; dq, dk, dv are overwritten (rows beyond the last offset: 0).
 * Deterministic. */
typedef struct dcp_attention_backward_args {
    dcp_attention_args_t forward; /* q, k, v, out, lse as the forward pass left them */
    const float *dout;            /* [Tq, H, D] */
    int64_t dout_stride;
    float *dq, *dk, *dv;
    int64_t dq_stride, dk_stride, dv_stride;
    int64_t key_rows;   /* Tk */
    int32_t accumulate; /* 1: dq, dk, dv are added to. key_ends must be NULL */
} dcp_attention_backward_args_t;

typedef enum dcp_norm_kind { DCP_NORM_RMS = 0, DCP_NORM_LAYER = 1 } dcp_norm_kind_t;

/* y = (x - mean) * rstd * weight + bias; RMSNorm has neither mean nor bias. */
typedef struct dcp_norm_args {
    dcp_norm_kind_t kind;
    int64_t rows, width;
    const float *x;      /* [rows, width] */
    const float *weight; /* [width] */
    const float *bias;   /* [width] or NULL */
    float eps;
    float *y;    /* [rows, width] */
    float *mean; /* [rows], LayerNorm only, else NULL */
    float *rstd; /* [rows] */
} dcp_norm_args_t;

typedef struct dcp_norm_backward_args {
    dcp_norm_kind_t kind;
    int64_t rows, width;
    const float *dy, *x, *weight;
    const float *mean, *rstd; /* as the forward pass left them */
    const float *add; /* [rows, width] added to dx (the residual's gradient), or NULL;
                         may be dx */
    float *dx;
    float *dweight; /* [width], accumulates; NULL: not wanted */
    float *dbias;   /* [width], accumulates; NULL: not wanted */
} dcp_norm_backward_args_t;

/* Rotary positions in place, the half-split form of Hugging Face: element i pairs with
 * i + D/2. table: cos at [p * D + i], sin at [p * D + D/2 + i] for i < D/2, row p =
 * position. */
typedef struct dcp_rope_args {
    int64_t rows, heads, head_dim;
    float *x; /* [rows, heads, D] */
    int64_t x_stride;
    const int32_t *positions; /* [rows] */
    const float *table;       /* [max_position, D] */
    int32_t inverse;          /* rotate back: the gradient */
} dcp_rope_args_t;

/* out = silu(gate) * up */
typedef struct dcp_swiglu_args {
    int64_t rows, width;
    const float *gate, *up; /* [rows, width] */
    int64_t gate_stride, up_stride;
    float *out; /* [rows, width], dense */
} dcp_swiglu_args_t;

typedef struct dcp_swiglu_backward_args {
    int64_t rows, width;
    const float *dout; /* [rows, width], dense */
    const float *gate, *up;
    int64_t gate_stride, up_stride;
    float *dgate, *dup; /* may be gate and up: in place */
    int64_t dgate_stride, dup_stride;
    float *out; /* silu(gate) * up again, for the weight gradient; NULL: not wanted; may
                   be dout */
} dcp_swiglu_backward_args_t;

typedef enum dcp_gelu_kind { DCP_GELU_ERF = 0, DCP_GELU_TANH = 1 } dcp_gelu_kind_t;

typedef struct dcp_gelu_args {
    dcp_gelu_kind_t kind;
    int64_t count;
    const float *x;
    float *out; /* may be x */
} dcp_gelu_args_t;

typedef struct dcp_gelu_backward_args {
    dcp_gelu_kind_t kind;
    int64_t count;
    const float *dout, *x;
    float *dx; /* may be dout or x */
} dcp_gelu_backward_args_t;

/* out[i] = weight[tokens[i]]; a token outside 0..vocab-1 is ERR_ARG and names it,
 * before anything is written. */
typedef struct dcp_embedding_args {
    int64_t rows, width, vocab;
    const int32_t *tokens;
    const float *weight;         /* [vocab, width] */
    float *out;                  /* [rows, width] */
    const uint16_t *weight_bf16; /* read instead of weight; NULL: weight */
    int32_t round;               /* 1: what is read is rounded to bf16 */
} dcp_embedding_args_t;

/* dweight[tokens[i]] += dout[i], in row order. */
typedef struct dcp_embedding_backward_args {
    int64_t rows, width, vocab;
    const int32_t *tokens;
    const float *dout;
    float *dweight;
} dcp_embedding_backward_args_t;

/* Cross entropy of rows of logits, and its gradient in place.
 * loss_p += sum over rows with label >= 0 of w_i * (logsumexp(logits_i) -
 * logits_i[label_i]), fp64, row order; logits_i becomes w_i * (softmax(logits_i) -
 * onehot(label_i)), 0 for a row with label -100. w_i = scale * (weights ? weights[i] :
 * 1). Labels other than -100 and 0..vocab-1 are ERR_ARG. */
typedef struct dcp_cross_entropy_args {
    int64_t rows, vocab;
    float *logits; /* [rows, vocab] with row stride logits_stride */
    int64_t logits_stride;
    const int32_t *labels; /* [rows] */
    const float *weights;  /* [rows] or NULL */
    double scale;
    int32_t gradient; /* 0: loss only, logits are left as they are */
    double *loss_p;   /* accumulates */
} dcp_cross_entropy_args_t;

/* out = add + dropout(x): element kept with probability 1 - p and scaled by 1/(1-p).
 * Whether (row, column) is kept is a function of (seed, site, row_ids[row], column)
 * only, so that any plan and any recompute draws alike. */
typedef struct dcp_dropout_args {
    int64_t rows, width;
    const float *x;
    const float *add;       /* [rows, width] or NULL; may be out */
    const int64_t *row_ids; /* [rows]: number of the token in its step */
    uint64_t seed;          /* of run and step */
    uint64_t site;          /* layer and place */
    float p;                /* 0 <= p < 1 */
    float *out;             /* may be x; the backward pass is the same call on dout */
} dcp_dropout_args_t;

/* out[j] += sum over rows of x[i, j]: gradient of a bias. */
typedef struct dcp_column_sum_args {
    int64_t rows, width;
    const float *x;
    int64_t x_stride;
    float *out;
} dcp_column_sum_args_t;

/* out = a + b (b NULL: copy). */
typedef struct dcp_add_args {
    int64_t count;
    const float *a, *b;
    float *out; /* may be a or b */
} dcp_add_args_t;

/* The same on rows that lie apart. */
typedef struct dcp_row_add_args {
    int64_t rows, width;
    const float *a, *b; /* [rows, width]; b NULL: copy */
    float *out;         /* may be a or b */
    int64_t a_stride, b_stride, out_stride;
} dcp_row_add_args_t;

/* Between fp32 and bf16 (nearest even); the same type copies. */
typedef struct dcp_cast_args {
    int64_t count;
    const void *x;
    void *out; /* no overlap with x */
    dcp_dtype_t from, to;
} dcp_cast_args_t;

typedef struct dcp_zero_args {
    int64_t bytes;
    void *x;
} dcp_zero_args_t;

/* AdamW (Loshchilov & Hutter 2019) on a run of elements, decoupled decay. Bitwise the
 * same however the elements are cut into runs: tails use the operations of the vector
 * body. g' = grad_scale * g; m = b1 m + (1-b1) g';  v = b2 v + (1-b2) g'^2 w -= lr * (m
 * / bias1 / (sqrt(v / bias2) + eps) + decay * w) */
typedef struct dcp_adamw_args {
    int64_t count;
    float *w, *m, *v;
    const float *g;
    float lr, beta1, beta2, eps, decay;
    float bias1, bias2; /* 1 - beta^t */
    float grad_scale;   /* clipping */
} dcp_adamw_args_t;

/* The same on many runs in one dispatch; runs are borrowed until it is done. */
typedef struct dcp_adamw_runs_args {
    int64_t run_count;
    const dcp_adamw_args_t *runs;
} dcp_adamw_runs_args_t;

/* AdamW with m and v in 8 bits (arXiv 2110.02861; isa/adamw8bit_kernel.c has the code):
 * a scale a block of DCP_ADAMW8BIT_BLOCK elements of a row, the last block of a row
 * short. Computes as adamw does, from the decoded m and v; both are rounded after the
 * update. All zero: the state at the start. */
enum { DCP_ADAMW8BIT_BLOCK = 256, DCP_ADAMW8BIT_CODES = 256 };

typedef struct dcp_adamw8bit_args {
    int64_t rows, width;      /* dense */
    float *w;                 /* [rows, width], as m, v, g */
    uint8_t *m, *v;           /* codes */
    float *m_scale, *v_scale; /* [rows, blocks of a row] */
    const float *g;
    float lr, beta1, beta2, eps, decay;
    float bias1, bias2; /* 1 - beta^t */
    float grad_scale;   /* clipping */
} dcp_adamw8bit_args_t;

/* The same on many runs in one dispatch; runs are borrowed until it is done. */
typedef struct dcp_adamw8bit_runs_args {
    int64_t run_count;
    const dcp_adamw8bit_args_t *runs;
} dcp_adamw8bit_runs_args_t;

/* out[row] = sum of squares of row, fp64 in a fixed order that depends on `width` only.
 */
typedef struct dcp_row_squares_args {
    int64_t rows, width;
    const float *x; /* dense */
    double *out;    /* [rows] */
} dcp_row_squares_args_t;

/* Codes of x (or of x + residual) in a precision, for a message (precision.h). Blocks
 * start at x[0], every DCP_PRECISION_BLOCK elements. The scale of a block is its
 * largest absolute value over the largest code, at least 2^-118 (values far below are
 * rounded to 0 or to that, stochastically without bias) and so that the largest code
 * decodes to a finite number; a block of zeros has scale 0 and decodes to zeros; a
 * block with a value that is not finite has scale NaN and decodes to NaN, and its
 * residual stays as it was. bf16 and fp32 have no scales and pass such a value on;
 * finite numbers beyond bf16 become its largest.
 *
 * Integers and fp8 are rounded stochastically, unbiased to 1/512 of the gap between two
 * codes, with 8 random bits an element that depend on (seed, stream, first + its place)
 * alone; what has a code keeps it. bf16 is always rounded to nearest even. So parts
 * that start at multiples of a block may be quantised in any order, in calls of their
 * own. Bits do not depend on threads or on the instruction set. codes may have any
 * address; x, residual, codes, weights and squares do not overlap. With right arguments
 * the call cannot fail: it allocates nothing. */
typedef struct dcp_quantise_args {
    int64_t count;
    const float *x;  /* [count] */
    float *residual; /* [count] added to x first; gets what the codes leave of the sum
                        (without codes it is only read); NULL: none */
    void *codes;     /* dcp_precision_bytes; NULL: only `squares` is wanted */
    dcp_precision_t precision;
    int32_t hadamard; /* 1: each block is rotated first: signs by (seed, element within
                         its block), then Walsh-Hadamard, orthonormal (but that scales
                         are of values over 16); a short block in pieces of powers of
                         two. Residual and error are of the original coordinates.
                         Changes nothing for fp32 and bf16 */
    int32_t nearest;  /* 1: to nearest instead, ties to even */
    uint64_t seed;    /* of the run */
    uint64_t stream;  /* of who sends when: step and rank */
    int64_t first; /* number of x[0], any: elements of one stream must differ in it */
    const float *weights; /* [blocks] weight of a block in `squares`; NULL: 1 */
    double *squares; /* [2] adds the sum of squares of what was to be sent, and of what
                        codes leave of it; NULL: not wanted. In a fixed order */
} dcp_quantise_args_t;

/* out = what a message holds, or out += it. codes may have any address; they do not
 * overlap out. Finite blocks decode to finite numbers. */
typedef struct dcp_dequantise_args {
    int64_t count;
    const void *codes;
    dcp_precision_t precision;
    int32_t hadamard, accumulate;
    uint64_t seed; /* as it was quantised with */
    float *out;    /* [count] */
} dcp_dequantise_args_t;

/* A linear sketch: sums[b] += sum over elements i of bucket b of sign(i) w(i) x(i),
 * with signs by (seed, first + i): the squared length of the sums estimates that of w x
 * without bias, and the sketch of a difference is the difference of sketches. Buckets
 * by (first + i) % DCP_SKETCH_BUCKETS, so that parts of a buffer may be sketched apart.
 * A value that is not finite makes a sum so. Fixed order: fp32 within 16 numbers of a
 * bucket, fp64 across. x, weights and sums do not overlap. */
enum { DCP_SKETCH_BUCKETS = 1024 };
typedef struct dcp_sketch_args {
    int64_t count;
    const float *x;       /* [count] */
    const float *weights; /* [blocks of DCP_PRECISION_BLOCK elements from x[0] on]
                             factor of a block; NULL: 1 */
    uint64_t seed;
    int64_t first; /* number of x[0]: a multiple of 16 */
    double *sums;  /* [DCP_SKETCH_BUCKETS] */
} dcp_sketch_args_t;

/* All operations, for tables of them. */
#define DCP_OP_MAP(X)     \
    X(gemm)               \
    X(gemm_pack)          \
    X(attention)          \
    X(attention_backward) \
    X(norm)               \
    X(norm_backward)      \
    X(rope)               \
    X(swiglu)             \
    X(swiglu_backward)    \
    X(gelu)               \
    X(gelu_backward)      \
    X(embedding)          \
    X(embedding_backward) \
    X(cross_entropy)      \
    X(dropout)            \
    X(column_sum)         \
    X(add)                \
    X(row_add)            \
    X(cast)               \
    X(zero)               \
    X(adamw)              \
    X(adamw_runs)         \
    X(adamw8bit)          \
    X(adamw8bit_runs)     \
    X(row_squares)        \
    X(quantise)           \
    X(dequantise)         \
    X(sketch)

#ifdef __cplusplus
}
#endif
#endif
