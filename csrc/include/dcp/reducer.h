/* Sums over ranks in few bits: quantise once, all-to-all, sum in fp32 in rank order.
 *
 * Each rank quantises what goes to every other rank, once; scales travel in the same
 * message; the receiver decodes and sums in fp32, in rank order, its own part exactly.
 * Codes are never summed, and nothing is quantised a second time on the way.
 *
 * Two levels: ranks of one machine (machine_ranks in a row) first sum exactly among
 * themselves what goes to the ranks of equal place in other machines, then these
 * exchange it in few bits. Across machines W / machine_ranks times less travels.
 *
 * Error feedback: where residuals are given, what the codes left out of a sum is kept
 * on the rank that quantised and added to the next one. For every element, over all
 * ranks and calls: sums handed out + residuals = sum of all inputs. That stays so when
 * precision, levels, layout or (by adding residuals up) the world changes.
 */
#ifndef DCP_REDUCER_H
#define DCP_REDUCER_H

#include "dcp/comm.h"
#include "dcp/precision.h"
#include "dcp/threads.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_reducer dcp_reducer_t;

/* Values of this rank, one slice for every rank, in rank order. */
typedef struct dcp_reduce_segment {
    const float *data;     /* [sum counts] */
    const int64_t *counts; /* [ranks] elements of each rank's slice, >= 0, the same on
                              all ranks */
    float *residual; /* [sum counts] what earlier calls left out; NULL: no feedback, on
                        all ranks alike. This rank's own slice is added to its own part,
                        then 0. Two levels use only the slices of equal place; what
                        others hold is handed to the rank of their place in this
                        machine, then 0 */
    float *out;      /* [counts[rank]] gets the sum; may be this rank's slice of data */
    int64_t first;   /* number of data[0] among all elements of the call: random bits
                        follow it */
} dcp_reduce_segment_t;

typedef struct dcp_reduce_args {
    const dcp_reduce_segment_t *segments; /* all go in one exchange */
    int64_t segment_count;
    dcp_precision_t precision; /* FP32: exact; residuals are added once and become 0.
                                  BF16 keeps residuals too */
    int32_t hadamard, nearest; /* as dcp_quantise_args_t */
    uint64_t seed;             /* of the run */
    int64_t step;              /* with the rank the stream of random bits */
} dcp_reduce_args_t;

typedef struct dcp_reduce_result {
    int64_t sent_bytes, received_bytes; /* of this rank, to and from other ranks; two
                                           levels: across machines */
    int64_t codec_ns;                   /* spent quantising, decoding and summing */
    int64_t move_ns;                    /* of the exchange, from when all had come */
    double squares, error_squares; /* of what this rank quantised, and of what the codes
                                      left of it */
} dcp_reduce_result_t;

/* Collective. machine_ranks: 1 or size: one level; else it divides size. Borrows comm.
 */
dcp_status_t dcp_reducer_create(dcp_comm_t *comm, int32_t machine_ranks,
                                dcp_reducer_t **reducer_p);
void dcp_reducer_destroy(dcp_reducer_t *reducer);

/* Collective: sums every segment, each rank gets its slice; over one level in rank
 * order, over two in rank order within a machine, then over machines. Arguments that
 * disagree are ERR_MISMATCH on all ranks, a rank without memory ERR_NO_MEM on all;
 * after both residuals are what they were and calls may go on. A peer that is gone ends
 * the run. Where a value is not finite (codes: a block's), the sum is not and the
 * residual stays. Memory beside the caller's, kept for the next call: what is sent (not
 * for fp32) and what is received, 1 / machine_ranks of data for the sums of two levels,
 * some KB a thread. */
dcp_status_t dcp_reducer_reduce(dcp_reducer_t *reducer, dcp_pool_t *pool,
                                const dcp_reduce_args_t *args,
                                dcp_reduce_result_t *result_p);

/* Collective: every rank gets all sums in `out` [count], bitwise the same: each owner
 * of a slice quantises its sum once more and all, itself too, decode that; what these
 * codes left out goes to the owner's residual of its slice. Slices are even, at block
 * borders. One rank alone gets the sum itself. `out` may be `data`. Of args only the
 * settings count; both rounds of codes are in the result. */
dcp_status_t dcp_reducer_allreduce(dcp_reducer_t *reducer, dcp_pool_t *pool,
                                   const float *data, float *residual, float *out,
                                   int64_t count, const dcp_reduce_args_t *args,
                                   dcp_reduce_result_t *result_p);

/* What one rank sends in a reduce of these counts, in bytes, across machines. */
int64_t dcp_reducer_bytes(const dcp_reducer_t *reducer, dcp_precision_t precision,
                          const dcp_reduce_segment_t *segments, int64_t segment_count);

#ifdef __cplusplus
}
#endif
#endif
