/* The public calls of the reducer: checks, agreement, the order of levels.
 *
 * A call goes: arguments (ERR_ARG without telling peers, as everywhere in comm),
 * memory, one small allgather in which all ranks tell what they are about to do and
 * whether they can; then nothing can fail but a peer. That round is what lets a rank
 * that lacks memory or disagrees be an error on all ranks, named, while residuals are
 * untouched and the communicator stays usable. It costs one latency a call, whatever
 * the number of segments.
 *
 * Conservation. What a rank has of an element is x + residual. It leaves that rank
 * once: as codes (the residual becomes what they lack), exactly (it becomes 0), or,
 * with two levels, handed over: x summed, and the residual to the rank of the machine
 * that will quantise this element. Whichever way a call takes, what is handed out plus
 * what residuals hold is what has come in. */
#include "reducer_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

dcp_status_t
reducer_room_take(reducer_room_t *room, int64_t bytes, const char *what)
{
    if (bytes <= room->bytes) {
        return DCP_OK;
    }
    dcp_free(room->memory); /* first: both together may be too much */
    *room = (reducer_room_t){0};
    void *memory;
    DCP_TRY(dcp_alloc(bytes, what, &memory));
    *room = (reducer_room_t){memory, bytes};
    return DCP_OK;
}

/* "reduce of 5 elements in 2 segments (counts 3, 2) as int8, ..." */
static void
terms_text(const reducer_terms_t *terms, char *text, size_t text_bytes)
{
    if (terms->op == REDUCER_CREATE) {
        snprintf(text, text_bytes, "reducer_create with %d ranks a machine",
                 (int)terms->machine_ranks);
        return;
    }
    char counts[24 * REDUCER_COUNTS] = "";
    for (int32_t i = 0; i < terms->count_known; i++) {
        size_t used = strlen(counts);
        snprintf(counts + used, sizeof counts - used, "%s%" PRId64, i > 0 ? ", " : "",
                 terms->counts[i]);
    }
    const char *precision = dcp_precision_name((dcp_precision_t)terms->precision);
    snprintf(text, text_bytes,
             "%s of %" PRId64 " elements in %" PRId64 " segments (counts %s%s) as "
             "%s%s%s, seed %" PRIu64 ", step %" PRId64,
             terms->op == REDUCER_REDUCE ? "reduce" : "allreduce", terms->total,
             terms->segment_count, counts,
             terms->count_known == REDUCER_COUNTS ? ", ..." : "",
             precision != NULL ? precision : "?", terms->hadamard ? " rotated" : "",
             terms->nearest ? " to nearest" : "", terms->seed, terms->step);
}

static bool
terms_agree(const reducer_terms_t *a, const reducer_terms_t *b)
{
    return a->op == b->op && a->precision == b->precision && a->hadamard == b->hadamard
           && a->nearest == b->nearest && a->machine_ranks == b->machine_ranks
           && a->seed == b->seed && a->hash == b->hash && a->step == b->step
           && a->segment_count == b->segment_count && a->total == b->total;
}

dcp_status_t
reducer_agree(dcp_reducer_t *reducer, reducer_terms_t *own, dcp_status_t status,
              bool *any_flush_p)
{
    *any_flush_p = own->flush != 0;
    if (reducer->size == 1) {
        return status;
    }
    own->status = (int32_t)status;
    if (status != DCP_OK) {
        snprintf(own->text, sizeof own->text, "%s", dcp_last_error());
    }
    DCP_TRY(dcp_comm_allgatherv(reducer->comm, own, reducer->terms_counts,
                                reducer->terms, DCP_U8));
    const reducer_terms_t *terms = reducer->terms;
    for (int32_t r = 0; r < reducer->size; r++) {
        if (terms[r].status != DCP_OK) {
            return DCP_FAIL((dcp_status_t)terms[r].status, "rank %d: %s", (int)r,
                            terms[r].text);
        }
        *any_flush_p = *any_flush_p || terms[r].flush != 0;
    }
    for (int32_t r = 1; r < reducer->size; r++) {
        if (!terms_agree(&terms[0], &terms[r])) {
            char a[360], b[360];
            terms_text(&terms[0], a, sizeof a);
            terms_text(&terms[r], b, sizeof b);
            return DCP_FAIL(
                DCP_ERR_MISMATCH,
                "ranks disagree: rank 0 called %s, rank %d called %s: all "
                "ranks must give the same counts and settings, and residuals "
                "for the same segments",
                a, (int)r, b);
        }
    }
    return DCP_OK;
}

void
dcp_reducer_destroy(dcp_reducer_t *reducer)
{
    if (reducer == NULL) {
        return;
    }
    for (int32_t i = 0; i < reducer->worker_count; i++) {
        dcp_pool_destroy(reducer->workers[i].pool);
        dcp_free(reducer->workers[i].sum);
    }
    dcp_free(reducer->workers);
    dcp_free(reducer->table.memory);
    dcp_free(reducer->gather_table.memory);
    dcp_free(reducer->sums.memory);
    dcp_free(reducer->send.memory);
    dcp_free(reducer->receive.memory);
    dcp_comm_destroy(reducer->places);
    dcp_comm_destroy(reducer->machine);
    dcp_free(reducer);
}

/* The reducer in one block with its tables. */
static dcp_status_t
alloc_reducer(dcp_comm_t *comm, int32_t machine_ranks, dcp_reducer_t **reducer_p)
{
    int64_t size = dcp_comm_size(comm);
    int64_t head = ((int64_t)sizeof(dcp_reducer_t) + 63) / 64 * 64;
    int64_t each = (int64_t)(sizeof(reducer_terms_t) + 4 * sizeof(int64_t));
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(head + size * each, "reducer", &memory));
    dcp_reducer_t *reducer = memory;
    reducer->comm = reducer->across = comm;
    reducer->rank = dcp_comm_rank(comm);
    reducer->size = (int32_t)size;
    reducer->machine_ranks = machine_ranks;
    reducer->terms = (reducer_terms_t *)(void *)((char *)memory + head);
    reducer->terms_counts = (int64_t *)(reducer->terms + size);
    reducer->even_counts = reducer->terms_counts + size;
    reducer->code_bytes = reducer->even_counts + size;
    reducer->block_bytes = reducer->code_bytes + size;
    for (int64_t r = 0; r < size; r++) {
        reducer->terms_counts[r] = (int64_t)sizeof(reducer_terms_t);
    }
    *reducer_p = reducer;
    return DCP_OK;
}

/* Has one rank failed? Then all get its status; the others do not know its message. */
static dcp_status_t
agree_status(dcp_comm_t *comm, dcp_status_t status)
{
    if (dcp_comm_size(comm) == 1) {
        return status;
    }
    char own_text[REDUCER_TEXT_BYTES];
    snprintf(own_text, sizeof own_text, "%s", dcp_last_error());
    enum { RANKS = 1 << 20 };
    int64_t worst = (int64_t)status * RANKS + dcp_comm_rank(comm); /* status <= 0 */
    worst = status == DCP_OK ? INT64_MAX : worst;
    DCP_TRY(dcp_comm_allreduce(comm, &worst, &worst, 1, DCP_I64, DCP_MIN));
    if (worst == INT64_MAX) {
        return DCP_OK;
    }
    int64_t rank = worst & (RANKS - 1);
    dcp_status_t failed = (dcp_status_t)((worst - rank) / RANKS);
    if (rank == dcp_comm_rank(comm)) {
        return DCP_FAIL(failed, "rank %d: %s", (int)rank, own_text);
    }
    return DCP_FAIL(failed, "rank %d could not make its reducer: %s", (int)rank,
                    dcp_status_text(failed));
}

dcp_status_t
dcp_reducer_create(dcp_comm_t *comm, int32_t machine_ranks, dcp_reducer_t **reducer_p)
{
    if (comm == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "comm must not be NULL");
    }
    int32_t size = dcp_comm_size(comm);
    if (machine_ranks < 1 || size % machine_ranks != 0) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "machine_ranks %d must be at least 1 and divide the %d ranks",
                        (int)machine_ranks, (int)size);
    }
    machine_ranks = machine_ranks == size ? 1 : machine_ranks;
    dcp_reducer_t *reducer = NULL;
    dcp_status_t status = alloc_reducer(comm, machine_ranks, &reducer);
    status = agree_status(comm, status);
    if (status != DCP_OK) {
        goto err_destroy;
    }
    reducer_terms_t terms = {.op = REDUCER_CREATE, .machine_ranks = machine_ranks};
    bool flush;
    status = reducer_agree(reducer, &terms, DCP_OK, &flush);
    if (status != DCP_OK) {
        goto err_destroy;
    }
    if (machine_ranks > 1) {
        int32_t rank = reducer->rank;
        status = dcp_comm_split(comm, rank / machine_ranks, rank, &reducer->machine);
        if (status != DCP_OK) {
            goto err_destroy;
        }
        status = dcp_comm_split(comm, rank % machine_ranks, rank, &reducer->places);
        if (status != DCP_OK) {
            goto err_destroy;
        }
        reducer->across = reducer->places;
    }
    *reducer_p = reducer;
    return DCP_OK;
err_destroy:
    dcp_reducer_destroy(reducer);
    return status;
}

static bool
is_apart(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes)
{
    const char *x = a, *y = b;
    return a_bytes == 0 || b_bytes == 0 || x + a_bytes <= y || y + b_bytes <= x;
}

static dcp_status_t
check_segment(const dcp_reducer_t *reducer, const dcp_reduce_segment_t *segment,
              int64_t i, int64_t *total_p)
{
    if (segment->counts == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "segment %" PRId64 ": counts must not be NULL", i);
    }
    int64_t total = 0, own_start = 0;
    for (int32_t r = 0; r < reducer->size; r++) {
        int64_t count = segment->counts[r];
        if (count < 0 || count > INT64_MAX / 64 - total - *total_p) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "segment %" PRId64 ": counts[%d] = %" PRId64
                            " must not be negative, and the sum must fit memory",
                            i, (int)r, count);
        }
        own_start += r < reducer->rank ? count : 0;
        total += count;
    }
    int64_t own = segment->counts[reducer->rank];
    if ((segment->data == NULL && total > 0) || (segment->out == NULL && own > 0)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "segment %" PRId64 ": %s is NULL, but %" PRId64
                        " elements are needed",
                        i, segment->data == NULL ? "data" : "out",
                        segment->data == NULL ? total : own);
    }
    int64_t item = (int64_t)sizeof(float), bytes = total * item;
    bool in_place = own > 0 && segment->out == segment->data + own_start;
    if (!in_place && !is_apart(segment->data, bytes, segment->out, own * item)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "segment %" PRId64
                        ": out overlaps data: they must lie apart, or "
                        "out be this rank's slice of data",
                        i);
    }
    if (segment->residual != NULL
        && (!is_apart(segment->residual, bytes, segment->data, bytes)
            || !is_apart(segment->residual, bytes, segment->out, own * item))) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "segment %" PRId64 ": residual overlaps data or out: they must "
                        "lie apart",
                        i);
    }
    *total_p += total;
    return DCP_OK;
}

static dcp_status_t
check_settings(const dcp_reducer_t *reducer, const dcp_pool_t *pool,
               const dcp_reduce_args_t *args)
{
    if (reducer == NULL || pool == NULL || args == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "%s must not be NULL",
                        reducer == NULL ? "reducer"
                        : pool == NULL  ? "pool"
                                        : "args");
    }
    if (dcp_precision_name(args->precision) == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "precision %d is none of dcp_precision_t",
                        (int)args->precision);
    }
    return DCP_OK;
}

static dcp_status_t
check_segments(const dcp_reducer_t *reducer, const dcp_reduce_args_t *args,
               int64_t *total_p)
{
    if (args->segment_count < 0
        || (args->segments == NULL && args->segment_count > 0)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "segment_count %" PRId64 " must be >= 0, and segments not NULL",
                        args->segment_count);
    }
    *total_p = 0;
    for (int64_t i = 0; i < args->segment_count; i++) {
        DCP_TRY(check_segment(reducer, &args->segments[i], i, total_p));
    }
    return DCP_OK;
}

static reducer_terms_t
make_terms(const dcp_reducer_t *reducer, const dcp_reduce_args_t *args, reducer_op_t op,
           int64_t total)
{
    reducer_terms_t terms = {.op = (int32_t)op,
                             .precision = (int32_t)args->precision,
                             .hadamard = args->hadamard != 0,
                             .nearest = args->nearest != 0,
                             .machine_ranks = reducer->machine_ranks,
                             .seed = args->seed,
                             .step = args->step,
                             .segment_count = args->segment_count,
                             .total = total,
                             .hash = 0x9E3779B97F4A7C15u};
    for (int64_t i = 0; i < args->segment_count; i++) {
        const dcp_reduce_segment_t *segment = &args->segments[i];
        for (int32_t r = 0; r <= reducer->size; r++) {
            int64_t value = r < reducer->size
                                ? segment->counts[r]
                                : (segment->residual != NULL && total > 0);
            terms.hash = (terms.hash ^ (uint64_t)value) * 0xBF58476D1CE4E5B9u;
            terms.hash ^= terms.hash >> 29;
            if (r < reducer->size && terms.count_known < REDUCER_COUNTS) {
                terms.counts[terms.count_known++] = value;
            }
        }
    }
    return terms;
}

/* Both calls: gather NULL for reduce. Every rank is told before anything changes. */
static dcp_status_t
run(dcp_reducer_t *reducer, dcp_pool_t *pool, const dcp_reduce_args_t *args,
    reducer_gather_t *gather, int64_t total, dcp_reduce_result_t *result_p)
{
    bool has_levels = reducer->machine_ranks > 1;
    reducer_exchange_t exchange;
    dcp_status_t status = DCP_OK;
    if (has_levels) {
        int64_t floats = reducer_levels_count(reducer, args);
        status = reducer_room_take(&reducer->sums, floats * (int64_t)sizeof(float),
                                   "sums of a machine");
    }
    if (status == DCP_OK) {
        status = reducer_exchange_prepare(reducer, pool, args, &exchange);
    }
    if (status == DCP_OK && gather != NULL) {
        status = reducer_gather_prepare(gather);
    }
    reducer_terms_t terms = make_terms(
        reducer, args, gather != NULL ? REDUCER_ALLREDUCE : REDUCER_REDUCE, total);
    terms.flush = has_levels && reducer_levels_must_flush(reducer, args);
    bool flush;
    DCP_TRY(reducer_agree(reducer, &terms, status, &flush));
    dcp_reduce_result_t result = {0};
    status = has_levels ? reducer_levels_sum(reducer, args, flush) : DCP_OK;
    if (status == DCP_OK) {
        status = reducer_exchange_run(&exchange, pool, &result);
    }
    if (status == DCP_OK && gather != NULL) {
        status = reducer_gather_run(gather, pool, &result);
    }
    if (status != DCP_OK) {
        /* peers may wait for this rank: nobody goes on alone */
        char text[512];
        snprintf(text, sizeof text, "%s", dcp_last_error());
        dcp_comm_abort(reducer->comm, text);
        dcp_set_last_error(text);
        return status;
    }
    if (result_p != NULL) {
        *result_p = result;
    }
    return DCP_OK;
}

dcp_status_t
dcp_reducer_reduce(dcp_reducer_t *reducer, dcp_pool_t *pool,
                   const dcp_reduce_args_t *args, dcp_reduce_result_t *result_p)
{
    int64_t total;
    DCP_TRY(check_settings(reducer, pool, args));
    DCP_TRY(check_segments(reducer, args, &total));
    return run(reducer, pool, args, NULL, total, result_p);
}

dcp_status_t
dcp_reducer_allreduce(dcp_reducer_t *reducer, dcp_pool_t *pool, const float *data,
                      float *residual, float *out, int64_t count,
                      const dcp_reduce_args_t *given, dcp_reduce_result_t *result_p)
{
    DCP_TRY(check_settings(reducer, pool, given));
    if (count < 0 || count > INT64_MAX / 64) {
        return DCP_FAIL(DCP_ERR_ARG, "count %" PRId64 " must be >= 0 and fit memory",
                        count);
    }
    if (count > 0 && (data == NULL || out == NULL)) {
        return DCP_FAIL(DCP_ERR_ARG, "%s is NULL, but %" PRId64 " elements are needed",
                        data == NULL ? "data" : "out", count);
    }
    int64_t bytes = count * (int64_t)sizeof(float);
    if (out != data && !is_apart(out, bytes, data, bytes)) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "out overlaps data: they must lie apart, or be the "
                        "same");
    }
    if (residual != NULL && !is_apart(out, bytes, residual, bytes)) {
        return DCP_FAIL(DCP_ERR_ARG, "out overlaps residual: they must lie apart");
    }
    int64_t own_start = reducer_gather_cut(reducer, count);
    dcp_reduce_segment_t segment = {.data = data,
                                    .counts = reducer->even_counts,
                                    .residual = residual,
                                    .out = count > 0 ? out + own_start : NULL};
    dcp_reduce_args_t args = *given;
    args.segments = &segment;
    args.segment_count = 1;
    int64_t total;
    DCP_TRY(check_segments(reducer, &args, &total));
    reducer_gather_t gather = {
        .reducer = reducer, .args = &args, .out = out, .residual = residual};
    return run(reducer, pool, &args, &gather, total, result_p);
}

int64_t
dcp_reducer_bytes(const dcp_reducer_t *reducer, dcp_precision_t precision,
                  const dcp_reduce_segment_t *segments, int64_t segment_count)
{
    int32_t each = reducer->machine_ranks;
    int64_t bytes = 0;
    for (int64_t i = 0; i < segment_count; i++) {
        for (int32_t r = reducer->rank % each; r < reducer->size; r += each) {
            bytes += r != reducer->rank
                         ? dcp_precision_bytes(precision, segments[i].counts[r])
                         : 0;
        }
    }
    return bytes;
}
