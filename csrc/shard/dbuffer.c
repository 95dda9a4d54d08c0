/* DBuffer: the window behind a layout, and the operations on a rank's shard.
 *
 * Sums and norms run over the used part of each slice in fixed pieces, so that results
 * depend on neither thread nor world: a sum over ranks is taken element by element in
 * rank order, and a norm adds the fp64 squares of whole rows without rounding
 * (exact_sum.c) - a row is never cut, so its square is the same in every world. */
#include "dbuffer_private.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"

#include <inttypes.h>
#include <math.h>

enum {
    PIECE_ELEMENTS = 32768, /* of one task of a sum: 128 KiB a rank */
    SQUARE_SLOTS = 4096,    /* rows of one call of the kernel */
};

typedef struct piece {
    int64_t start, count; /* elements of the buffer */
} piece_t;

struct dcp_dbuffer {
    dcp_comm_t *comm;                   /* borrowed */
    const dcp_dbuffer_layout_t *layout; /* borrowed */
    dcp_dbuffer_kind_t kind;
    dcp_window_t *window; /* owned */
    float *data;          /* in the window; never NULL */
    int64_t
        moved_bytes; /* counted here beside what the window counts; negative: less */
    piece_t *pieces; /* owned; of this rank's shard, PRIVATE only */
    int64_t piece_count;
    double *squares; /* owned; [SQUARE_SLOTS], so that a norm cannot run out of memory
                        on one rank while the others wait */
};

/* Cuts the used part of this rank's slice of every group; with pieces NULL it only
 * counts. Padding between tensors is summed with them, what follows the last is not. */
static int64_t
cut_pieces(const dcp_dbuffer_layout_t *layout, int32_t rank, piece_t *pieces)
{
    const dcp_dbuffer_run_t *runs;
    int64_t run_count, piece_count = 0;
    dcp_dbuffer_layout_runs(layout, rank, &runs, &run_count);
    for (int64_t i = 0; i < run_count;) {
        int32_t group = layout->tensors[runs[i].tensor].group;
        int64_t start = runs[i].start, end = start;
        while (i < run_count && layout->tensors[runs[i].tensor].group == group) {
            end = runs[i].start + runs[i].count;
            i++;
        }
        for (; start < end; start += PIECE_ELEMENTS) {
            int64_t rest = end - start;
            if (pieces != NULL) {
                pieces[piece_count] =
                    (piece_t){start, rest < PIECE_ELEMENTS ? rest : PIECE_ELEMENTS};
            }
            piece_count++;
        }
    }
    return piece_count;
}

/* The window counts a shared copy on the rank that brings it. Every rank works on its
 * share of it, so every rank counts that: rank r takes over what is its part of
 * `bytes`. */
static dcp_status_t
share_account(dcp_dbuffer_t *buffer, int64_t bytes)
{
    if (buffer->kind != DCP_DBUFFER_SHARED) {
        return DCP_OK;
    }
    int32_t rank_count = buffer->layout->rank_count;
    int64_t share = bytes / rank_count;
    if (dcp_comm_rank(buffer->comm) == 0) {
        buffer->moved_bytes = share * (rank_count - 1) * -1;
    } else {
        buffer->moved_bytes = share;
    }
    dcp_status_t status =
        dcp_alloc_account(buffer->moved_bytes, "share of a sharded buffer");
    if (status != DCP_OK) {
        buffer->moved_bytes = 0;
    }
    return status;
}

dcp_status_t
dcp_dbuffer_create(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                   dcp_dbuffer_kind_t kind, dcp_dbuffer_t **buffer_p)
{
    int32_t rank = dcp_comm_rank(comm);
    if (layout->rank_count != dcp_comm_size(comm)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "the layout is for %d ranks, the communicator has %d",
                        (int)layout->rank_count, (int)dcp_comm_size(comm));
    }
    void *memory;
    dcp_status_t status =
        dcp_alloc_zeroed((int64_t)sizeof(dcp_dbuffer_t), "sharded buffer", &memory);
    if (status != DCP_OK) {
        return status;
    }
    dcp_dbuffer_t *buffer = memory;
    buffer->comm = comm;
    buffer->layout = layout;
    buffer->kind = kind;
    status =
        dcp_alloc_array(SQUARE_SLOTS, (int64_t)sizeof(double), "row squares", &memory);
    if (status != DCP_OK) {
        goto err_buffer;
    }
    buffer->squares = memory;
    if (kind == DCP_DBUFFER_PRIVATE) {
        buffer->piece_count = cut_pieces(layout, rank, NULL);
        status = dcp_alloc_array(buffer->piece_count, (int64_t)sizeof(piece_t),
                                 "pieces of a sum", &memory);
        if (status != DCP_OK) {
            goto err_buffer;
        }
        buffer->pieces = memory;
        cut_pieces(layout, rank, buffer->pieces);
    }
    /* one element at least, so that there is always something to point to */
    int64_t elements = dcp_dbuffer_layout_elements(layout);
    int64_t bytes = (elements > 0 ? elements : 1) * (int64_t)sizeof(float);
    status = share_account(buffer, bytes);
    if (status != DCP_OK) {
        goto err_buffer;
    }
    int32_t brings = kind == DCP_DBUFFER_PRIVATE || rank == 0;
    status = dcp_window_create(comm, brings ? bytes : 0, &buffer->window);
    if (status != DCP_OK) {
        goto err_buffer;
    }
    buffer->data =
        dcp_window_base(buffer->window, kind == DCP_DBUFFER_PRIVATE ? rank : 0);
    *buffer_p = buffer;
    return DCP_OK;
err_buffer:
    dcp_dbuffer_destroy(buffer);
    return status;
}

void
dcp_dbuffer_destroy(dcp_dbuffer_t *buffer)
{
    if (buffer == NULL) {
        return;
    }
    dcp_window_destroy(buffer->window);
    /* after the window, so that less is held than before: it cannot fail */
    dcp_alloc_account(-buffer->moved_bytes, "share of a sharded buffer");
    dcp_free(buffer->pieces);
    dcp_free(buffer->squares);
    dcp_free(buffer);
}

float *
dcp_dbuffer_data(const dcp_dbuffer_t *buffer)
{
    return buffer->data;
}

float *
dcp_dbuffer_tensor_data(const dcp_dbuffer_t *buffer, int64_t tensor)
{
    return buffer->data + buffer->layout->starts[tensor];
}

static dcp_status_t
reduce_piece(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const dcp_dbuffer_t *buffer = context;
    piece_t piece = buffer->pieces[task];
    return dcp_window_reduce(buffer->window, piece.start * (int64_t)sizeof(float),
                             piece.count, buffer->data + piece.start);
}

dcp_status_t
dcp_dbuffer_reduce(dcp_dbuffer_t *buffer, dcp_pool_t *pool)
{
    if (buffer->kind != DCP_DBUFFER_PRIVATE) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "only a private buffer has a copy on every rank to sum");
    }
    if (buffer->layout->rank_count == 1) {
        return DCP_OK; /* the one copy is the sum */
    }
    return dcp_pool_run(pool, buffer->piece_count, reduce_piece, buffer);
}

/* Adds the squares of one run, row by row. */
static dcp_status_t
add_run(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const dcp_dbuffer_run_t *run,
        dcp_exact_sum_t *sum)
{
    int64_t width = buffer->layout->tensors[run->tensor].row_width;
    const float *x = buffer->data + run->start;
    if (width == 1) {
        for (int64_t i = 0; i < run->count; i++) {
            dcp_exact_sum_add(sum, (double)x[i] * (double)x[i]);
        }
        return DCP_OK;
    }
    int64_t row_count = run->count / width;
    for (int64_t row = 0; row < row_count; row += SQUARE_SLOTS) {
        int64_t rest = row_count - row;
        dcp_row_squares_args_t args = {
            .rows = rest < SQUARE_SLOTS ? rest : SQUARE_SLOTS,
            .width = width,
            .x = x + row * width,
            .out = buffer->squares,
        };
        DCP_TRY(dcp_cpu_row_squares(pool, &args));
        for (int64_t i = 0; i < args.rows; i++) {
            dcp_exact_sum_add(sum, buffer->squares[i]);
        }
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_norm(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const uint8_t *mask,
                 double *norm_p)
{
    dcp_exact_sum_t sum;
    dcp_exact_sum_init(&sum);
    const dcp_dbuffer_run_t *runs;
    int64_t run_count;
    dcp_dbuffer_layout_runs(buffer->layout, dcp_comm_rank(buffer->comm), &runs,
                            &run_count);
    for (int64_t i = 0; i < run_count; i++) {
        if (mask == NULL || mask[runs[i].tensor] != 0) {
            DCP_TRY(add_run(buffer, pool, &runs[i], &sum));
        }
    }
    dcp_exact_sum_normalise(&sum);
    DCP_TRY(dcp_comm_allreduce(buffer->comm, sum.words, sum.words, DCP_EXACT_WORDS,
                               DCP_I64, DCP_SUM));
    *norm_p = sqrt(dcp_exact_sum_value(&sum));
    return DCP_OK;
}
