/* Which rank of a group holds which rows of a micro-batch.
 *
 * Causal attention costs more for later tokens. So every sequence of 2 r CHUNK tokens
 * or more is cut into 2 r chunks, and slot i gets chunks i and 2 r - 1 - i: tokens and
 * query-key pairs both come out even. Shorter ones are dealt whole, in order, and cut
 * wherever a slot is full. Shares are dealt over the running sum of tokens, so rounding
 * never adds up: slot i gets T / r rows, rounded up for the first T mod r slots, and
 * its ranks share them likewise. As ceil(ceil(T / r) / u) = ceil(T / p), no rank holds
 * more rows than the cost model counts. With r = 1 rows stay in order.
 *
 * O(r (sequences + r long ones)); 24 bytes a fragment. */
#include "sequence.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <string.h>

enum { CHUNK = 16 }; /* least tokens of a chunk */

/* What part `index` of `parts` gets of `total`, as even as possible. */
static int64_t
share(int64_t total, int32_t parts, int32_t index)
{
    return total / parts + (index < total % parts);
}

int64_t
sequence_rows(int64_t token_count, int32_t ulysses, int32_t ring, int32_t rank)
{
    return share(share(token_count, ring, rank / ulysses), ulysses, rank % ulysses);
}

typedef struct builder {
    sequence_cut_t *cut;
    int32_t rank; /* that is being filled, */
    int64_t left; /* and so many more rows fit */
} builder_t;

static int64_t
length_of(const dcp_batch_t *batch, int64_t sequence)
{
    return batch->offsets[sequence + 1] - batch->offsets[sequence];
}

static bool
is_long(const sequence_cut_t *cut, int64_t length)
{
    return cut->ring > 1 && length >= 2 * (int64_t)cut->ring * CHUNK;
}

static void
next_rank(builder_t *b)
{
    sequence_cut_t *cut = b->cut;
    b->rank++;
    cut->first_fragment[b->rank] = cut->fragment_count;
    b->left = sequence_rows(cut->token_count, cut->ulysses, cut->ring, b->rank);
    cut->first_row[b->rank + 1] = cut->first_row[b->rank] + b->left;
}

/* The next `count` rows go to the rank that is being filled and those after it. */
static void
emit(builder_t *b, int64_t sequence, int64_t begin, int64_t count)
{
    sequence_cut_t *cut = b->cut;
    while (count > 0) {
        while (b->left == 0) {
            next_rank(b);
        }
        int64_t taken = count < b->left ? count : b->left;
        int64_t rows = cut->first_row[b->rank + 1] - cut->first_row[b->rank];
        sequence_fragment_t *last = cut->fragment_count > cut->first_fragment[b->rank]
                                        ? &cut->fragments[cut->fragment_count - 1]
                                        : NULL;
        if (last != NULL && last->sequence == sequence
            && last->begin + last->span[1] == begin) {
            last->span[1] += (int32_t)taken;
        } else {
            cut->fragments[cut->fragment_count++] = (sequence_fragment_t){
                .sequence = (int32_t)sequence,
                .begin = (int32_t)begin,
                .span = {0, (int32_t)taken},
                .rank = b->rank,
                .row = (int32_t)(rows - b->left),
            };
        }
        b->left -= taken;
        begin += taken;
        count -= taken;
    }
}

/* Slot's two chunks of every long sequence; returns their tokens. */
static int64_t
emit_long(builder_t *b, const dcp_batch_t *batch, int32_t slot)
{
    const sequence_cut_t *cut = b->cut;
    int64_t before = 0;
    for (int64_t s = 0; s < batch->sequence_count; s++) {
        int64_t length = length_of(batch, s), front = 0, back = length;
        if (!is_long(cut, length)) {
            continue;
        }
        for (int32_t i = 0; i <= slot; i++) {
            int64_t rows =
                share(before + length, cut->ring, i) - share(before, cut->ring, i);
            int64_t first = rows / 2;
            back -= rows - first;
            if (i == slot) {
                emit(b, s, front, first);
                emit(b, s, back, rows - first);
            }
            front += first;
        }
        before += length;
    }
    return share(before, cut->ring, slot);
}

/* Tokens first .. first + count - 1 of all short sequences. */
static void
emit_short(builder_t *b, const dcp_batch_t *batch, int64_t first, int64_t count)
{
    int64_t before = 0, end = first + count;
    for (int64_t s = 0; s < batch->sequence_count && before < end; s++) {
        int64_t length = length_of(batch, s);
        if (is_long(b->cut, length)) {
            continue;
        }
        int64_t from = first > before ? first - before : 0;
        int64_t to = end - before < length ? end - before : length;
        if (to > from) {
            emit(b, s, from, to - from);
        }
        before += length;
    }
}

static dcp_status_t
check(const dcp_batch_t *batch, int64_t *fragments_p, int32_t ring)
{
    const int64_t *offsets = batch->offsets;
    if (batch->token_count < 0 || batch->token_count > INT32_MAX
        || batch->sequence_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "a micro-batch of %" PRId64 " tokens and %" PRId64
                        " sequences: neither may be negative, tokens at most 2^31 - 1",
                        batch->token_count, batch->sequence_count);
    }
    if (offsets == NULL || offsets[0] != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "offsets must begin with 0");
    }
    sequence_cut_t cut = {.ring = ring};
    *fragments_p = 0;
    for (int64_t s = 0; s < batch->sequence_count; s++) {
        if (offsets[s + 1] < offsets[s]) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "offsets[%" PRId64 "] %" PRId64
                            " must not be less than the one before, %" PRId64,
                            s + 1, offsets[s + 1], offsets[s]);
        }
        *fragments_p += is_long(&cut, offsets[s + 1] - offsets[s]) ? 2 * ring : 1;
    }
    return offsets[batch->sequence_count] == batch->token_count
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_ARG,
                          "the last offset %" PRId64
                          " must be the number of tokens %" PRId64,
                          offsets[batch->sequence_count], batch->token_count);
}

dcp_status_t
sequence_cut_init(const dcp_batch_t *batch, int32_t rank_count, int32_t ulysses,
                  sequence_cut_t *cut)
{
    int64_t most = 0;
    void *memory;
    *cut = (sequence_cut_t){.rank_count = rank_count,
                            .ulysses = ulysses,
                            .ring = rank_count / ulysses,
                            .token_count = batch->token_count,
                            .sequence_count = batch->sequence_count};
    DCP_TRY(check(batch, &most, cut->ring));
    most += cut->ring + rank_count; /* cut where a slot, a rank is full */
    DCP_TRY(dcp_alloc_array(2 * ((int64_t)rank_count + 2), (int64_t)sizeof(int64_t),
                            "ranks of a group", &memory));
    cut->first_fragment = memory;
    cut->first_row = cut->first_fragment + rank_count + 2;
    memset(memory, 0, 2 * ((size_t)rank_count + 2) * sizeof(int64_t));
    dcp_status_t status = dcp_alloc_array(most, (int64_t)sizeof(sequence_fragment_t),
                                          "rows of a micro-batch over ranks", &memory);
    if (status != DCP_OK) {
        sequence_cut_fini(cut);
        return status;
    }
    cut->fragments = memory;
    builder_t b = {.cut = cut, .rank = -1};
    int64_t short_tokens = 0;
    for (int32_t slot = 0; slot < cut->ring; slot++) {
        int64_t rows = share(cut->token_count, cut->ring, slot);
        rows -= emit_long(&b, batch, slot);
        emit_short(&b, batch, short_tokens, rows);
        short_tokens += rows;
    }
    while (b.rank < rank_count - 1) {
        next_rank(&b);
    }
    cut->first_fragment[rank_count] = cut->fragment_count;
    return DCP_OK;
}

void
sequence_cut_fini(sequence_cut_t *cut)
{
    dcp_free(cut->fragments);
    dcp_free(cut->first_fragment);
    *cut = (sequence_cut_t){0};
}
