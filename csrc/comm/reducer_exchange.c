/* One exchange of codes: encode what goes to every other rank, all-to-all, decode and
 * sum.
 *
 * Order, so that a failure leaves residuals as they were: everything that can fail on
 * one rank alone (memory) is done in prepare, whose result all ranks agree on before
 * anybody encodes; then residuals change in place as codes are made; then codes move.
 * What can still fail is a peer that is gone, and then the run is over.
 *
 * A rank encodes run by run, in parallel; random bits and signs follow the element, so
 * runs may be cut anywhere at block borders. A receiver takes a run of its own slice,
 * decodes it from every message in rank order, adds its own part in its place, and
 * writes the sum once: element by element the same chain of fp32 additions whatever
 * the number of threads. Cost a rank: reads and codes its input once, decodes size - 1
 * messages of its slice; memory: what it sends, and what it receives.
 *
 * fp32 needs no codes: what is sent is read straight out of the input (plus residual),
 * so only what comes is stored. */
#include "reducer_private.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"
#include "dcp/kernels.h"

#include <math.h>
#include <string.h>

uint64_t
reducer_stream(const dcp_reducer_t *reducer, int64_t step, bool second)
{
    /* at most 1,024 ranks */
    return (uint64_t)step << 16 | (uint64_t)reducer->rank << 1 | second;
}

static bool
is_exact(const reducer_exchange_t *x)
{
    return x->args->precision == DCP_PRECISION_FP32;
}

static int64_t
run_count_of(int64_t count)
{
    return (count + REDUCER_RUN - 1) / REDUCER_RUN;
}

/* What `count` elements are in a message: bytes, or for fp32 elements. */
static int64_t
size_in_message(const reducer_exchange_t *x, int64_t count)
{
    return is_exact(x) ? count : dcp_precision_bytes(x->args->precision, count);
}

/* Segment `i`'s elements for rank `r` of the group. */
static int64_t
count_of(const reducer_exchange_t *x, int64_t i, int32_t r)
{
    const dcp_reducer_t *reducer = x->reducer;
    int32_t each = reducer->machine_ranks;
    int32_t owner = each == 1 ? r : r * each + reducer->rank % each;
    return x->args->segments[i].counts[owner];
}

/* Where things are: the slices of every segment. */
static void
fill_slices(reducer_exchange_t *x)
{
    const dcp_reducer_t *reducer = x->reducer;
    int32_t each = reducer->machine_ranks, place = reducer->rank % each;
    const float *sums = reducer->sums.memory;
    for (int64_t i = 0; i < x->args->segment_count; i++) {
        const dcp_reduce_segment_t *segment = &x->args->segments[i];
        int64_t start = 0;
        for (int32_t owner = 0; owner < reducer->size; owner++) {
            int64_t count = segment->counts[owner];
            if (each == 1 || owner % each == place) {
                reducer_slice_t *slice = &x->slices[i * x->size + owner / each];
                slice->x = each == 1 && count > 0 ? segment->data + start : sums;
                slice->residual = segment->residual != NULL && count > 0
                                      ? segment->residual + start
                                      : NULL;
                slice->count = count;
                slice->first = segment->first + start;
                sums = each > 1 ? sums + count : sums;
            }
            start += count;
        }
        x->outs[i] = segment->out;
    }
}

/* Cuts a slice into runs whose codes begin at `offset`; the end of its codes. */
static int64_t
cut(const reducer_exchange_t *x, int64_t slice, int64_t offset, reducer_run_t *runs,
    int64_t *run_count_p)
{
    int64_t left = x->slices[slice].count;
    for (int64_t start = 0; left > 0; start += REDUCER_RUN) {
        int64_t count = left < REDUCER_RUN ? left : REDUCER_RUN;
        runs[(*run_count_p)++] = (reducer_run_t){slice, start, count, offset};
        offset += size_in_message(x, count);
        left -= count;
    }
    return offset;
}

/* The runs of everything that is sent, in the order of the buffer, and of own slices.
 */
static void
fill_runs(reducer_exchange_t *x)
{
    int64_t offset = 0, count = 0;
    for (int32_t r = 0; r < x->size; r++) {
        int64_t start = offset;
        for (int64_t i = 0; i < x->args->segment_count && r != x->rank; i++) {
            offset = cut(x, i * x->size + r, offset, x->send_runs, &count);
        }
        x->send_counts[r] = offset - start;
    }
    x->message_count = 0;
    count = 0;
    for (int64_t i = 0; i < x->args->segment_count; i++) {
        x->message_count =
            cut(x, i * x->size + x->rank, x->message_count, x->own_runs, &count);
    }
    for (int32_t r = 0; r < x->size; r++) {
        x->receive_counts[r] = r != x->rank ? x->message_count : 0;
    }
}

/* Lays the arrays into a block; without one only measures. Bytes. */
static int64_t
lay_out(reducer_exchange_t *x, char *block)
{
    int64_t segment_count = x->args->segment_count, at = 0;
#define TAKE(field, count)                                          \
    do {                                                            \
        x->field = block != NULL ? (void *)(block + at) : NULL;     \
        at += ((int64_t)sizeof *x->field * (count) + 63) / 64 * 64; \
    } while (0)
    TAKE(slices, segment_count * x->size);
    TAKE(outs, segment_count);
    TAKE(send_counts, x->size);
    TAKE(receive_counts, x->size);
    TAKE(send_runs, x->send_run_count);
    TAKE(own_runs, x->own_run_count);
    TAKE(squares, 2 * x->send_run_count);
#undef TAKE
    return at;
}

/* One pool and one sum a worker. */
static dcp_status_t
take_workers(dcp_reducer_t *reducer, int32_t count)
{
    if (reducer->worker_count >= count) {
        return DCP_OK;
    }
    void *memory;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(reducer_worker_t),
                            "workers of a reduction", &memory));
    reducer_worker_t *workers = memory;
    if (reducer->worker_count > 0) {
        memcpy(workers, reducer->workers,
               (size_t)reducer->worker_count * sizeof *workers);
    }
    dcp_free(reducer->workers);
    reducer->workers = workers;
    while (reducer->worker_count < count) {
        reducer_worker_t *worker = &workers[reducer->worker_count];
        DCP_TRY(
            dcp_alloc(REDUCER_RUN * (int64_t)sizeof(float), "sum of a run", &memory));
        dcp_status_t status = dcp_pool_create(1, &worker->pool);
        if (status != DCP_OK) {
            dcp_free(memory);
            return status;
        }
        worker->sum = memory;
        reducer->worker_count++;
    }
    return DCP_OK;
}

dcp_status_t
reducer_exchange_prepare(dcp_reducer_t *reducer, dcp_pool_t *pool,
                         const dcp_reduce_args_t *args, reducer_exchange_t *x)
{
    *x = (reducer_exchange_t){.reducer = reducer,
                              .args = args,
                              .stream = reducer_stream(reducer, args->step, false),
                              .size = dcp_comm_size(reducer->across),
                              .rank = dcp_comm_rank(reducer->across)};
    int64_t sends = 0, own = 0;
    for (int64_t i = 0; i < args->segment_count; i++) {
        for (int32_t r = 0; r < x->size; r++) {
            int64_t count = count_of(x, i, r);
            if (r != x->rank) {
                sends += size_in_message(x, count);
                x->send_run_count += run_count_of(count);
            } else {
                own += size_in_message(x, count);
                x->own_run_count += run_count_of(count);
            }
        }
    }
    DCP_TRY(take_workers(reducer, dcp_pool_size(pool)));
    DCP_TRY(
        reducer_room_take(&reducer->table, lay_out(x, NULL), "runs of a reduction"));
    if (!is_exact(x)) {
        DCP_TRY(reducer_room_take(&reducer->send, sends, "codes to send"));
    }
    int64_t item = is_exact(x) ? (int64_t)sizeof(float) : 1;
    DCP_TRY(reducer_room_take(&reducer->receive, own * (x->size - 1) * item,
                              "codes to receive"));
    lay_out(x, reducer->table.memory);
    fill_slices(x);
    fill_runs(x);
    return DCP_OK;
}

static dcp_status_t
encode_run(void *context, int64_t task, int32_t worker)
{
    const reducer_exchange_t *x = context;
    const dcp_reduce_args_t *given = x->args;
    const reducer_run_t *run = &x->send_runs[task];
    const reducer_slice_t *slice = &x->slices[run->slice];
    double *squares = x->squares + 2 * task;
    squares[0] = squares[1] = 0;
    dcp_quantise_args_t args = {
        .count = run->count,
        .x = slice->x + run->start,
        .residual = slice->residual != NULL ? slice->residual + run->start : NULL,
        .codes = (char *)x->reducer->send.memory + run->offset,
        .precision = given->precision,
        .hadamard = given->hadamard,
        .nearest = given->nearest,
        .seed = given->seed,
        .stream = x->stream,
        .first = slice->first + run->start,
        .squares = squares,
    };
    return dcp_cpu_quantise(x->reducer->workers[worker].pool, &args);
}

void
reducer_flush(float *sum, const float *x, float *residual, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        sum[i] = x[i] + residual[i];
        /* what is not finite takes no residual along */
        residual[i] = isfinite(sum[i]) ? 0.0f : residual[i];
    }
}

/* sum = or += this rank's own part of a run. */
static void
add_own(const reducer_slice_t *slice, const reducer_run_t *run, bool is_first,
        float *sum)
{
    const float *x = slice->x + run->start;
    float *residual = slice->residual != NULL ? slice->residual + run->start : NULL;
    if (is_first && residual != NULL) {
        reducer_flush(sum, x, residual, run->count);
    } else if (is_first && sum != x) {
        memcpy(sum, x, (size_t)run->count * sizeof *sum);
    }
    if (is_first) {
        return;
    }
    for (int64_t i = 0; i < run->count; i++) {
        float own = x[i];
        if (residual != NULL) {
            own += residual[i];
            residual[i] = isfinite(own) ? 0.0f : residual[i];
        }
        sum[i] += own;
    }
}

/* sum = or += the run as it stands in a message. */
static dcp_status_t
add_message(const reducer_exchange_t *x, const reducer_run_t *run, const char *message,
            bool is_first, dcp_pool_t *pool, float *sum)
{
    if (!is_exact(x)) {
        dcp_dequantise_args_t args = {
            .count = run->count,
            .codes = message + run->offset,
            .precision = x->args->precision,
            .hadamard = x->args->hadamard,
            .accumulate = !is_first,
            .seed = x->args->seed,
            .out = sum,
        };
        return dcp_cpu_dequantise(pool, &args);
    }
    const float *from = (const float *)(const void *)message + run->offset;
    if (is_first) {
        memcpy(sum, from, (size_t)run->count * sizeof *sum);
        return DCP_OK;
    }
    for (int64_t i = 0; i < run->count; i++) {
        sum[i] += from[i];
    }
    return DCP_OK;
}

static dcp_status_t
sum_run(void *context, int64_t task, int32_t worker_idx)
{
    const reducer_exchange_t *x = context;
    const reducer_worker_t *worker = &x->reducer->workers[worker_idx];
    const reducer_run_t *run = &x->own_runs[task];
    const reducer_slice_t *slice = &x->slices[run->slice];
    float *out = x->outs[run->slice / x->size] + run->start;
    /* an input that the sum replaces is read when it is this rank's turn */
    float *sum = out == slice->x + run->start && x->rank > 0 ? worker->sum : out;
    const char *message = x->reducer->receive.memory;
    int64_t item = is_exact(x) ? (int64_t)sizeof(float) : 1;
    for (int32_t r = 0; r < x->size; r++) {
        if (r == x->rank) {
            add_own(slice, run, r == 0, sum);
            continue;
        }
        DCP_TRY(add_message(x, run, message, r == 0, worker->pool, sum));
        message += x->message_count * item;
    }
    if (sum != out) {
        memcpy(out, sum, (size_t)run->count * sizeof *out);
    }
    return DCP_OK;
}

/* fp32: elements first .. first + count - 1 of the message to rank `to`. */
static void
read_exact(void *context, int32_t to, int64_t first, int64_t count, void *bytes)
{
    const reducer_exchange_t *x = context;
    float *out = bytes;
    for (int64_t i = 0; i < x->args->segment_count && count > 0; i++) {
        const reducer_slice_t *slice = &x->slices[i * x->size + to];
        int64_t n = slice->count - first < count ? slice->count - first : count;
        if (n > 0 && slice->residual == NULL) {
            memcpy(out, slice->x + first, (size_t)n * sizeof *out);
        }
        for (int64_t k = 0; k < n && slice->residual != NULL; k++) {
            out[k] = slice->x[first + k] + slice->residual[first + k];
        }
        if (n > 0) {
            out += n;
            count -= n;
            first += n;
        }
        first -= slice->count;
    }
}

static void
write_exact(void *context, int32_t from, int64_t first, int64_t count,
            const void *bytes)
{
    const reducer_exchange_t *x = context;
    float *messages = x->reducer->receive.memory;
    int64_t message = from < x->rank ? from : from - 1;
    memcpy(messages + message * x->message_count + first, bytes,
           (size_t)count * sizeof *messages);
}

/* What has been sent exactly leaves no residual. */
static void
clear_residuals(const reducer_exchange_t *x)
{
    for (int64_t i = 0; i < x->send_run_count; i++) {
        const reducer_run_t *run = &x->send_runs[i];
        const reducer_slice_t *slice = &x->slices[run->slice];
        for (int64_t k = run->start;
             k < run->start + run->count && slice->residual != NULL; k++) {
            bool is_sent = isfinite(slice->x[k] + slice->residual[k]);
            slice->residual[k] = is_sent ? 0.0f : slice->residual[k];
        }
    }
}

static dcp_status_t
move(reducer_exchange_t *x)
{
    dcp_reducer_t *reducer = x->reducer;
    if (!is_exact(x)) {
        return dcp_comm_alltoallv(reducer->across, reducer->send.memory, x->send_counts,
                                  reducer->receive.memory, x->receive_counts, DCP_U8);
    }
    dcp_comm_parts_t parts = {read_exact, write_exact, x};
    DCP_TRY(dcp_comm_alltoall_parts(reducer->across, &parts, x->send_counts,
                                    x->receive_counts, DCP_F32));
    clear_residuals(x);
    return DCP_OK;
}

dcp_status_t
reducer_exchange_run(reducer_exchange_t *x, dcp_pool_t *pool,
                     dcp_reduce_result_t *result)
{
    const dcp_reducer_t *reducer = x->reducer;
    int64_t start = dcp_clock_ns();
    if (!is_exact(x)) {
        DCP_TRY(dcp_pool_run(pool, x->send_run_count, encode_run, x));
        for (int64_t i = 0; i < x->send_run_count; i++) {
            result->squares += x->squares[2 * i];
            result->error_squares += x->squares[2 * i + 1];
        }
    }
    result->codec_ns += dcp_clock_ns() - start;
    dcp_comm_traffic_t before = dcp_comm_traffic(reducer->across);
    if (x->size > 1) {
        DCP_TRY(move(x));
    }
    dcp_comm_traffic_t after = dcp_comm_traffic(reducer->across);
    result->move_ns += after.move_ns - before.move_ns;
    result->received_bytes += after.received_bytes - before.received_bytes;
    int64_t item = is_exact(x) ? (int64_t)sizeof(float) : 1;
    for (int32_t r = 0; r < x->size; r++) {
        result->sent_bytes += x->send_counts[r] * item;
    }
    start = dcp_clock_ns();
    DCP_TRY(dcp_pool_run(pool, x->own_run_count, sum_run, x));
    result->codec_ns += dcp_clock_ns() - start;
    return DCP_OK;
}
