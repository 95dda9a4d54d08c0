/* The norm of all ranks' shards, the same bits in every world.
 *
 * Squares are added in fp64 over what is never cut between ranks: a row, or, where a
 * tensor's blocks are not whole rows, a block (the last may be short). These sums are
 * added without rounding (exact_sum.c), so neither the ranks that hold them nor their
 * order matter, and one job over a few parts adds them in any. A largest value needs no
 * such care.
 *
 * Replicated values are the same on every rank; rank 0 alone adds them. */
#include "dbuffer_private.h"

#include "dcp/kernels.h"

#include <math.h>
#include <string.h>

enum { BLOCK_ELEMENTS = 32768 }; /* that a part takes at once, about */

/* Elements whose squares are added in fp64. */
static int64_t
unit_of(const dcp_dbuffer_tensor_t *tensor)
{
    int64_t block = tensor->block_count, width = tensor->row_width;
    return block > 0 && block % width != 0 ? block : width;
}

static void
add_elements(const float *x, int64_t count, dcp_exact_sum_t *sum)
{
    for (int64_t i = 0; i < count; i++) {
        dcp_exact_sum_add(sum, (double)x[i] * (double)x[i]);
    }
}

/* Adds the squares of rows of `width`, at most DBUFFER_SQUARES. */
static dcp_status_t
add_rows(const dcp_dbuffer_t *buffer, dbuffer_norm_part_t *part, const float *x,
         int64_t row_count, int64_t width)
{
    dcp_row_squares_args_t args = {
        .rows = row_count,
        .width = width,
        .x = x,
        .out = part->squares,
    };
    DCP_TRY(dcp_cpu_row_squares(buffer->inline_pool, &args));
    for (int64_t i = 0; i < row_count; i++) {
        dcp_exact_sum_add(&part->sum, part->squares[i]);
    }
    return DCP_OK;
}

enum { LANES = 32 };

/* Bits of the largest absolute value: as integers they are in the order of the values,
 * and those of a NaN are the largest. Not inlined, or the lanes leave their registers.
 */
__attribute__((noinline)) static int32_t
largest_bits(const float *x, int64_t count)
{
    int32_t lanes[LANES] = {0}, largest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        int32_t bits[LANES];
        memcpy(bits, x + i, sizeof bits);
        for (int k = 0; k < LANES; k++) {
            int32_t size = bits[k] & 0x7fffffff;
            lanes[k] = size > lanes[k] ? size : lanes[k];
        }
    }
    for (; i < count; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    for (int k = 0; k < LANES; k++) {
        largest = lanes[k] > largest ? lanes[k] : largest;
    }
    return largest;
}

typedef struct walk {
    dcp_dbuffer_t *buffer;
    const dcp_dbuffer_norm_args_t *args;
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
} walk_t;

/* `count` elements of a run, whole units but for the last. */
static dcp_status_t
add_block(const walk_t *walk, dbuffer_norm_part_t *part, const float *x, int64_t count,
          int64_t unit)
{
    if (walk->args->largest) {
        int32_t bits = largest_bits(x, count);
        part->largest = bits > part->largest ? bits : part->largest;
        return DCP_OK;
    }
    if (unit == 1) {
        add_elements(x, count, &part->sum);
        return DCP_OK;
    }
    int64_t whole = count / unit, rest = count % unit;
    DCP_TRY(add_rows(walk->buffer, part, x, whole, unit));
    return rest > 0 ? add_rows(walk->buffer, part, x + whole * unit, 1, rest) : DCP_OK;
}

/* Part `task` takes every DBUFFER_PARTS-th block of units. */
static dcp_status_t
walk_part(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const walk_t *walk = context;
    dbuffer_norm_part_t *part = &walk->buffer->norm_parts[task];
    dcp_exact_sum_init(&part->sum);
    part->largest = 0;
    int64_t turn = 0;
    for (int64_t i = 0; i < walk->run_count; i++) {
        const dcp_dbuffer_run_t *run = &walk->runs[i];
        if (walk->args->mask != NULL && walk->args->mask[run->tensor] == 0) {
            continue;
        }
        int64_t unit = unit_of(&walk->buffer->layout->tensors[run->tensor]);
        int64_t units = BLOCK_ELEMENTS / unit;
        units = units < 1 ? 1 : units < DBUFFER_SQUARES ? units : DBUFFER_SQUARES;
        int64_t block = unit == 1 ? BLOCK_ELEMENTS : units * unit;
        const float *x = dcp_dbuffer_run_data(walk->buffer, run);
        for (int64_t first = 0; first < run->count; first += block, turn++) {
            int64_t rest = run->count - first;
            if (turn % DBUFFER_PARTS == task) {
                DCP_TRY(add_block(walk, part, x + first, rest < block ? rest : block,
                                  unit));
            }
        }
    }
    return DCP_OK;
}

static dcp_status_t
largest_value(const walk_t *walk, double *norm_p)
{
    const dcp_dbuffer_norm_args_t *args = walk->args;
    int32_t bits = 0;
    for (int k = 0; k < DBUFFER_PARTS; k++) {
        int32_t part = walk->buffer->norm_parts[k].largest;
        bits = part > bits ? part : bits;
    }
    for (int64_t i = 0; i < args->extra_count; i++) {
        int32_t extra = largest_bits(args->extras[i], args->extra_counts[i]);
        bits = extra > bits ? extra : bits;
    }
    DCP_TRY(dcp_comm_allreduce(walk->buffer->comm, &bits, &bits, 1, DCP_I32, DCP_MAX));
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    *norm_p = (double)largest;
    return DCP_OK;
}

static dcp_status_t
root_of_sum(const walk_t *walk, double *norm_p)
{
    const dcp_dbuffer_norm_args_t *args = walk->args;
    dcp_exact_sum_t sum;
    dcp_exact_sum_init(&sum);
    for (int k = 0; k < DBUFFER_PARTS; k++) {
        dcp_exact_sum_merge(&sum, &walk->buffer->norm_parts[k].sum);
    }
    for (int64_t i = 0; walk->buffer->rank == 0 && i < args->extra_count; i++) {
        add_elements(args->extras[i], args->extra_counts[i], &sum);
    }
    dcp_exact_sum_normalise(&sum);
    DCP_TRY(dcp_comm_allreduce(walk->buffer->comm, sum.words, sum.words,
                               DCP_EXACT_WORDS, DCP_I64, DCP_SUM));
    *norm_p = sqrt(dcp_exact_sum_value(&sum));
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_norm_with(dcp_dbuffer_t *buffer, dcp_pool_t *pool,
                      const dcp_dbuffer_norm_args_t *args, double *norm_p)
{
    if (buffer->dtype != DCP_F32) {
        return DCP_FAIL(DCP_ERR_TYPE, "norm: a buffer of %s, must be float32",
                        dcp_dtype_name(buffer->dtype));
    }
    walk_t walk = {.buffer = buffer, .args = args};
    dcp_dbuffer_layout_runs(buffer->layout, buffer->rank, &walk.runs, &walk.run_count);
    DCP_TRY(dcp_pool_run(pool, DBUFFER_PARTS, walk_part, &walk));
    return args->largest ? largest_value(&walk, norm_p) : root_of_sum(&walk, norm_p);
}

dcp_status_t
dcp_dbuffer_norm(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const uint8_t *mask,
                 double *norm_p)
{
    dcp_dbuffer_norm_args_t args = {.mask = mask};
    return dcp_dbuffer_norm_with(buffer, pool, &args, norm_p);
}
