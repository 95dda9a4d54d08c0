/* What a micro-batch drops in its forward pass and computes again in its backward pass.
 * Results are bitwise the same whatever is dropped.
 */
#ifndef DCP_RECOMPUTE_H
#define DCP_RECOMPUTE_H

/* Block kinds whose layers may drop their activations (recompute counts, in order).
 * The first n layers drop everything but their input, the m layers after them the inner
 * activations of their MLP; n + m <= layer_count. What is dropped shares one place a
 * kind, and the last to use that place need not be computed again: n dropped layers
 * cost max(n - 1, 0) forward passes and save as many layers' bytes. "selective" is {0,
 * L}, "full" is {L, 0}. */
enum { DCP_RECOMPUTE_LAYER = 0, DCP_RECOMPUTE_MLP = 1, DCP_RECOMPUTE_KINDS = 2 };

#endif
