/* DBuffer: the memory behind a layout, and where things lie in it.
 *
 * SHARED and PRIVATE lie in windows; LOCAL and SHARD in memory of the rank's own;
 * DEMAND at addresses of its own that get memory by groups (dbuffer_demand.c). What
 * moves between ranks is in dbuffer_move.c, arithmetic on a rank's shard in
 * dbuffer_ops.c and dbuffer_norm.c.
 *
 * Work on a shard is cut into pieces once, when the buffer is made: fixed parts of the
 * used length of each slice, so that results depend on neither thread nor world, and an
 * operation on many groups is one job. */
#include "dbuffer_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <string.h>

enum { PIECE_ELEMENTS = 32768 }; /* 128 KiB of fp32 */

/* Cuts the used part of this rank's slice of every group; with pieces NULL it only
 * counts. Padding between tensors belongs to it, what follows the last does not. */
static int64_t
cut_pieces(const dcp_dbuffer_layout_t *layout, int32_t rank, dbuffer_piece_t *pieces)
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
                pieces[piece_count] = (dbuffer_piece_t){
                    .start = start,
                    .count = rest < PIECE_ELEMENTS ? rest : PIECE_ELEMENTS,
                    .group = group,
                };
            }
            piece_count++;
        }
    }
    return piece_count;
}

static dcp_status_t
make_pieces(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    void *memory;
    buffer->piece_count = cut_pieces(layout, buffer->rank, NULL);
    DCP_TRY(dcp_alloc_array(buffer->piece_count, (int64_t)sizeof(dbuffer_piece_t),
                            "pieces of a shard", &memory));
    buffer->pieces = memory;
    cut_pieces(layout, buffer->rank, buffer->pieces);
    DCP_TRY(dcp_alloc_zeroed((layout->group_count + 1) * (int64_t)sizeof(int64_t),
                             "pieces by group", &memory));
    buffer->piece_firsts = memory;
    for (int64_t i = 0; i < buffer->piece_count; i++) {
        buffer->piece_firsts[buffer->pieces[i].group + 1]++;
    }
    for (int32_t g = 0; g < layout->group_count; g++) {
        buffer->piece_firsts[g + 1] += buffer->piece_firsts[g];
    }
    return DCP_OK;
}

void
dbuffer_pieces(const dcp_dbuffer_t *buffer, int32_t group, int64_t *first_p,
               int64_t *count_p)
{
    if (group == DCP_DBUFFER_ALL_GROUPS) {
        *first_p = 0;
        *count_p = buffer->piece_count;
        return;
    }
    *first_p = buffer->piece_firsts[group];
    *count_p = buffer->piece_firsts[group + 1] - *first_p;
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
    int64_t share = bytes / buffer->rank_count;
    buffer->shared_bytes =
        buffer->rank == 0 ? share * (buffer->rank_count - 1) * -1 : share;
    dcp_status_t status =
        dcp_alloc_account(buffer->shared_bytes, "share of a sharded buffer");
    if (status != DCP_OK) {
        buffer->shared_bytes = 0;
    }
    return status;
}

/* One element at least, so that there is always something to point to. */
static int64_t
bytes_of(const dcp_dbuffer_t *buffer, int64_t elements)
{
    return (elements > 0 ? elements : 1) * buffer->item_bytes;
}

static dcp_status_t
place_in_window(dcp_dbuffer_t *buffer)
{
    int32_t owner = buffer->kind == DCP_DBUFFER_PRIVATE ? buffer->rank : 0;
    int64_t bytes = bytes_of(buffer, dcp_dbuffer_layout_elements(buffer->layout));
    DCP_TRY(share_account(buffer, bytes));
    DCP_TRY(dcp_window_create(buffer->comm, buffer->rank == owner ? bytes : 0,
                              &buffer->window));
    buffer->data = dcp_window_base(buffer->window, owner);
    return DCP_OK;
}

static dcp_status_t
place_alone(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int64_t elements = buffer->kind == DCP_DBUFFER_SHARD
                           ? layout->shard_starts[layout->group_count]
                           : dcp_dbuffer_layout_elements(layout);
    if (buffer->places != NULL) {
        elements = buffer->places[layout->group_count] / buffer->item_bytes;
    }
    buffer->memory_bytes = bytes_of(buffer, elements);
    DCP_TRY(dcp_alloc_zeroed(buffer->memory_bytes, "this rank's part of a buffer",
                             &buffer->memory));
    buffer->data = buffer->memory;
    return DCP_OK;
}

/* Where groups lie that share memory: each place is as large as its largest group. */
static dcp_status_t
share_places(dcp_dbuffer_t *buffer, const int32_t *places)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int64_t end = 0;
    void *memory;
    DCP_TRY(dcp_alloc_array(layout->group_count + 1, (int64_t)sizeof(int64_t),
                            "places of groups", &memory));
    buffer->places = memory;
    for (int32_t g = 0; g < layout->group_count; g++) {
        int64_t largest = 0;
        int32_t first = 0;
        while (places[first] != places[g]) {
            first++;
        }
        for (int32_t other = g; first == g && other < layout->group_count; other++) {
            if (places[other] == places[g] && layout->shards[other] > largest) {
                largest = layout->shards[other];
            }
        }
        buffer->places[g] = first == g ? end : buffer->places[first];
        end += buffer->rank_count * largest * buffer->item_bytes;
    }
    buffer->places[layout->group_count] = end;
    return DCP_OK;
}

static dcp_status_t
check_options(const dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
              const dcp_dbuffer_options_t *options)
{
    if (layout->rank_count != dcp_comm_size(comm)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "the layout is for %d ranks, the communicator has %d",
                        (int)layout->rank_count, (int)dcp_comm_size(comm));
    }
    if (options->dtype != DCP_F32 && options->dtype != DCP_BF16
        && options->dtype != DCP_U8) {
        return DCP_FAIL(DCP_ERR_TYPE,
                        "dtype %s of a buffer must be float32, bfloat16 or uint8",
                        dcp_dtype_name(options->dtype));
    }
    if ((int)options->kind < 0 || (int)options->kind > (int)DCP_DBUFFER_DEMAND) {
        return DCP_FAIL(DCP_ERR_ARG, "kind %d is none of dcp_dbuffer_kind_t",
                        (int)options->kind);
    }
    if (options->keep_own && options->kind != DCP_DBUFFER_DEMAND) {
        return DCP_FAIL(DCP_ERR_ARG, "keep_own is for DEMAND: other kinds keep all");
    }
    for (int32_t g = 0; options->places != NULL && g < layout->group_count; g++) {
        if (options->places[g] < 0 || options->kind != DCP_DBUFFER_LOCAL) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "place %d of group %d must be >= 0, and is for LOCAL",
                            (int)options->places[g], (int)g);
        }
    }
    return DCP_OK;
}

/* Everything that can fail; the caller destroys what is there on failure. */
static dcp_status_t
fill(dcp_dbuffer_t *buffer, const dcp_dbuffer_options_t *options)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(DBUFFER_PARTS, (int64_t)sizeof(dbuffer_norm_part_t),
                            "parts of a norm", &memory));
    buffer->norm_parts = memory;
    DCP_TRY(dcp_pool_create(1, &buffer->inline_pool));
    DCP_TRY(dcp_alloc_array(buffer->rank_count, (int64_t)sizeof(int64_t),
                            "counts of a group", &memory));
    buffer->counts = memory;
    DCP_TRY(make_pieces(buffer));
    if (options->places != NULL) {
        DCP_TRY(share_places(buffer, options->places));
    }
    switch (buffer->kind) {
    case DCP_DBUFFER_SHARED:
    case DCP_DBUFFER_PRIVATE:
        return place_in_window(buffer);
    case DCP_DBUFFER_DEMAND:
        return dbuffer_reserve(buffer);
    default:
        return place_alone(buffer);
    }
}

dcp_status_t
dcp_dbuffer_create_with(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                        const dcp_dbuffer_options_t *options, dcp_dbuffer_t **buffer_p)
{
    DCP_TRY(check_options(comm, layout, options));
    void *memory;
    DCP_TRY(
        dcp_alloc_zeroed((int64_t)sizeof(dcp_dbuffer_t), "sharded buffer", &memory));
    dcp_dbuffer_t *buffer = memory;
    buffer->comm = comm;
    buffer->replicas = options->replicas;
    buffer->layout = layout;
    buffer->kind = options->kind;
    buffer->dtype = options->dtype;
    buffer->item_bytes = dcp_dtype_bytes(options->dtype);
    buffer->keep_own = options->keep_own;
    buffer->rank = dcp_comm_rank(comm);
    buffer->rank_count = layout->rank_count;
    dcp_status_t status = fill(buffer, options);
    if (status != DCP_OK) {
        dcp_dbuffer_destroy(buffer);
        return status;
    }
    *buffer_p = buffer;
    return DCP_OK;
}

dcp_status_t
dcp_dbuffer_create(dcp_comm_t *comm, const dcp_dbuffer_layout_t *layout,
                   dcp_dbuffer_kind_t kind, dcp_dbuffer_t **buffer_p)
{
    dcp_dbuffer_options_t options = {.kind = kind, .dtype = DCP_F32};
    return dcp_dbuffer_create_with(comm, layout, &options, buffer_p);
}

void
dcp_dbuffer_destroy(dcp_dbuffer_t *buffer)
{
    if (buffer == NULL) {
        return;
    }
    dbuffer_prefetch_destroy(buffer->prefetch);
    dbuffer_unreserve(buffer);
    dcp_window_destroy(buffer->window);
    /* after the window, so that less is held than before: it cannot fail */
    dcp_alloc_account(-buffer->shared_bytes, "share of a sharded buffer");
    dcp_free(buffer->memory);
    dcp_free(buffer->places);
    dcp_free(buffer->counts);
    dcp_free(buffer->piece_firsts);
    dcp_free(buffer->pieces);
    dcp_pool_destroy(buffer->inline_pool);
    dcp_free(buffer->norm_parts);
    dcp_free(buffer);
}

dcp_dtype_t
dcp_dbuffer_dtype(const dcp_dbuffer_t *buffer)
{
    return buffer->dtype;
}

dcp_dbuffer_traffic_t
dcp_dbuffer_traffic(const dcp_dbuffer_t *buffer)
{
    return buffer->traffic;
}

dcp_status_t
dbuffer_check_group(const dcp_dbuffer_t *buffer, int32_t group)
{
    if (group < 0 || group >= buffer->layout->group_count) {
        return DCP_FAIL(DCP_ERR_ARG, "group %d must lie in 0..%d", (int)group,
                        (int)buffer->layout->group_count - 1);
    }
    return DCP_OK;
}

const int64_t *
dbuffer_group_counts(dcp_dbuffer_t *buffer, int32_t group)
{
    for (int32_t rank = 0; rank < buffer->rank_count; rank++) {
        buffer->counts[rank] = buffer->layout->shards[group];
    }
    return buffer->counts;
}

char *
dbuffer_group_at(const dcp_dbuffer_t *buffer, int32_t group)
{
    return buffer->data
           + (buffer->places != NULL
                  ? buffer->places[group]
                  : buffer->layout->group_starts[group] * buffer->item_bytes);
}

char *
dbuffer_at(const dcp_dbuffer_t *buffer, int32_t group, int64_t start)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    int64_t inside = start - layout->group_starts[group];
    if (buffer->kind != DCP_DBUFFER_SHARD) {
        return dbuffer_group_at(buffer, group) + inside * buffer->item_bytes;
    }
    int64_t element =
        layout->shard_starts[group] + inside - buffer->rank * layout->shards[group];
    return buffer->data + element * buffer->item_bytes;
}

void *
dcp_dbuffer_tensor_bytes(const dcp_dbuffer_t *buffer, int64_t tensor)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    return buffer->kind == DCP_DBUFFER_SHARD
               ? NULL
               : dbuffer_at(buffer, layout->tensors[tensor].group,
                            layout->starts[tensor]);
}

void *
dcp_dbuffer_run_bytes(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run)
{
    return dbuffer_at(buffer, buffer->layout->tensors[run->tensor].group, run->start);
}

float *
dcp_dbuffer_data(const dcp_dbuffer_t *buffer)
{
    return (float *)(void *)buffer->data;
}

float *
dcp_dbuffer_tensor_data(const dcp_dbuffer_t *buffer, int64_t tensor)
{
    return dcp_dbuffer_tensor_bytes(buffer, tensor);
}

float *
dcp_dbuffer_slice(const dcp_dbuffer_t *buffer, int32_t group)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    return (float *)(void *)dbuffer_at(buffer, group,
                                       layout->group_starts[group]
                                           + buffer->rank * layout->shards[group]);
}

float *
dcp_dbuffer_run_data(const dcp_dbuffer_t *buffer, const dcp_dbuffer_run_t *run)
{
    return dcp_dbuffer_run_bytes(buffer, run);
}

/* Of what it points to, DEMAND zeroes what has memory. */
void
dcp_dbuffer_zero(dcp_dbuffer_t *buffer)
{
    const dcp_dbuffer_layout_t *layout = buffer->layout;
    if (buffer->kind == DCP_DBUFFER_PRIVATE || buffer->kind == DCP_DBUFFER_LOCAL) {
        int64_t bytes = dcp_dbuffer_layout_elements(layout) * buffer->item_bytes;
        memset(buffer->data, 0,
               (size_t)(buffer->places != NULL ? buffer->memory_bytes : bytes));
        return;
    }
    int32_t demand = buffer->kind == DCP_DBUFFER_DEMAND;
    for (int32_t g = 0; g < layout->group_count; g++) {
        size_t slice_bytes = (size_t)(layout->shards[g] * buffer->item_bytes);
        if (demand && buffer->held[g]) {
            memset(dbuffer_group_at(buffer, g), 0,
                   slice_bytes * (size_t)buffer->rank_count);
        } else if (!demand || buffer->keep_own) {
            memset(dcp_dbuffer_slice(buffer, g), 0, slice_bytes);
        }
    }
}
