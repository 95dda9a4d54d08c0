/* DBuffer: the memory behind a layout, and the operations on a rank's shard.
 *
 * SHARED and PRIVATE lie in windows; LOCAL and SHARD in memory of the rank's own, and
 * groups are put together and summed by the communicator, in place.
 *
 * Sums and norms run over the used part of each slice in fixed pieces, so that results
 * depend on neither thread nor world: a sum over ranks is taken element by element in
 * rank order, and a norm adds the fp64 squares of whole rows without rounding
 * (exact_sum.c) - a row is never cut, so its square is the same in every world. */
#include "dbuffer_private.h"

#include "dcp/alloc.h"
#include "dcp/kernels.h"

#include <math.h>
#include <string.h>

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
    dcp_window_t *window; /* owned; SHARED and PRIVATE */
    float *memory;        /* owned; LOCAL and SHARD */
    float *data;          /* in one of these; never NULL */
    int64_t *counts;      /* owned; [ranks] of a collective over one group */
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

/* One element at least, so that there is always something to point to. */
static int64_t
bytes_of(int64_t elements)
{
    return (elements > 0 ? elements : 1) * (int64_t)sizeof(float);
}

static dcp_status_t
place_in_window(dcp_dbuffer_t *buffer)
{
    int32_t rank = dcp_comm_rank(buffer->comm);
    int32_t owner = buffer->kind == DCP_DBUFFER_PRIVATE ? rank : 0;
    int64_t bytes = bytes_of(dcp_dbuffer_layout_elements(buffer->layout));
    DCP_TRY(share_account(buffer, bytes));
    DCP_TRY(
        dcp_window_create(buffer->comm, rank == owner ? bytes : 0, &buffer->window));
    buffer->data = dcp_window_base(buffer->window, owner);
    return DCP_OK;
}

static dcp_status_t
place_alone(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    void *memory;
    int64_t elements = buffer->kind == DCP_DBUFFER_SHARD
                           ? layout->shard_starts[layout->group_count]
                           : dcp_dbuffer_layout_elements(layout);
    DCP_TRY(
        dcp_alloc_zeroed(bytes_of(elements), "this rank's part of a buffer", &memory));
    buffer->memory = buffer->data = memory;
    return DCP_OK;
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
    status = dcp_alloc_array(layout->rank_count, (int64_t)sizeof(int64_t),
                             "counts of a group", &memory);
    if (status != DCP_OK) {
        goto err_buffer;
    }
    buffer->counts = memory;
    status = kind == DCP_DBUFFER_SHARED || kind == DCP_DBUFFER_PRIVATE
                 ? place_in_window(buffer)
                 : place_alone(buffer);
    if (status != DCP_OK) {
        goto err_buffer;
    }
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
    dcp_free(buffer->memory);
    dcp_free(buffer->counts);
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
    return buffer->kind == DCP_DBUFFER_SHARD
               ? NULL
               : buffer->data + buffer->layout->starts[tensor];
}

float *
dcp_dbuffer_slice(const dcp_dbuffer_t *buffer, int32_t group)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    return buffer->kind == DCP_DBUFFER_SHARD
               ? buffer->data + layout->shard_starts[group]
               : buffer->data + layout->group_starts[group]
                     + dcp_comm_rank(buffer->comm) * layout->shards[group];
}

float *
dcp_dbuffer_run_data(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int32_t group = layout->tensors[run->tensor].group;
    return dcp_dbuffer_slice(buffer, group) + run->start - layout->group_starts[group]
           - dcp_comm_rank(buffer->comm) * layout->shards[group];
}

void
dcp_dbuffer_zero(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    if (buffer->kind == DCP_DBUFFER_PRIVATE || buffer->kind == DCP_DBUFFER_LOCAL) {
        memset(buffer->data, 0,
               (size_t)dcp_dbuffer_layout_elements(layout) * sizeof(float));
        return;
    }
    for (int32_t g = 0; g < layout->group_count; g++) {
        memset(dcp_dbuffer_slice(buffer, g), 0,
               (size_t)layout->shards[g] * sizeof(float));
    }
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

/* Every rank has as much of a group as any other. */
static const int64_t *
group_counts(dcp_dbuffer_t *buffer, int32_t group)
{
    for (int32_t rank = 0; rank < buffer->layout->rank_count; rank++) {
        buffer->counts[rank] = buffer->layout->shards[group];
    }
    return buffer->counts;
}

dcp_status_t
dcp_dbuffer_gather(dcp_dbuffer_t *buffer, int32_t group, float *full)
{
    if (buffer->kind != DCP_DBUFFER_SHARD) {
        return DCP_FAIL(DCP_ERR_STATE, "only of a buffer of shards a group is "
                                       "gathered: others hold whole tensors");
    }
    return dcp_comm_allgatherv(buffer->comm, dcp_dbuffer_slice(buffer, group),
                               group_counts(buffer, group), full, DCP_F32);
}

dcp_status_t
dcp_dbuffer_gather_bf16(dcp_dbuffer_t *buffer, int32_t group, uint16_t *full)
{
    if (buffer->kind != DCP_DBUFFER_SHARD) {
        return DCP_FAIL(DCP_ERR_STATE, "only of a buffer of shards a group is "
                                       "gathered: others hold whole tensors");
    }
    /* rounded straight into this rank's place of the whole: no copy in between */
    int64_t shard = buffer->layout->shards[group];
    const float *slice = dcp_dbuffer_slice(buffer, group);
    uint16_t *own = full + dcp_comm_rank(buffer->comm) * shard;
    for (int64_t i = 0; i < shard; i++) {
        own[i] = dcp_f32_to_bf16(slice[i]);
    }
    return dcp_comm_allgatherv(buffer->comm, own, group_counts(buffer, group), full,
                               DCP_BF16);
}

dcp_status_t
dcp_dbuffer_reduce_group(dcp_dbuffer_t *buffer, int32_t group, float *full)
{
    if (buffer->layout->rank_count == 1) {
        return DCP_OK; /* the one copy is the sum */
    }
    int64_t own = dcp_comm_rank(buffer->comm) * buffer->layout->shards[group];
    return dcp_comm_reduce_scatterv(buffer->comm, full, group_counts(buffer, group),
                                    full + own, DCP_F32);
}

static dcp_status_t
reduce_by_messages(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    for (int32_t g = 0; g < layout->group_count; g++) {
        DCP_TRY(dcp_dbuffer_reduce_group(buffer, g,
                                         buffer->data + layout->group_starts[g]));
    }
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_reduce(dcp_dbuffer_t *buffer, dcp_pool_t *pool)
{
    if (buffer->kind != DCP_DBUFFER_PRIVATE && buffer->kind != DCP_DBUFFER_LOCAL) {
        return DCP_FAIL(DCP_ERR_STATE, "only a private or local buffer has a copy on "
                                       "every rank to sum");
    }
    if (buffer->layout->rank_count == 1) {
        return DCP_OK; /* the one copy is the sum */
    }
    if (buffer->kind == DCP_DBUFFER_LOCAL) {
        return reduce_by_messages(buffer);
    }
    return dcp_pool_run(pool, buffer->piece_count, reduce_piece, buffer);
}

/* Adds the squares of one run, row by row. */
static dcp_status_t
add_run(dcp_dbuffer_t *buffer, dcp_pool_t *pool, const dcp_dbuffer_run_t *run,
        dcp_exact_sum_t *sum)
{
    int64_t width = buffer->layout->tensors[run->tensor].row_width;
    const float *x = dcp_dbuffer_run_data(buffer, run);
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
