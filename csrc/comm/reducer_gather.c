/* The second half of an allreduce: every owner of a slice codes its sum, all decode
 * all.
 *
 * The owner decodes its own codes too, so that all ranks hold the same bits; what the
 * codes lack of the sum goes to the owner's residual of its own slice, which the next
 * call adds exactly. Codes lie place by place,
 *
 *   | rank 0 | rank 2 | rank 4 | rank 1 | rank 3 | rank 5 |     (two ranks a machine)
 *
 * so that a gather among ranks of equal place fills one block in place, and a gather
 * within the machine the others. fp32 moves as it is. */
#include "reducer_private.h"

#include "dcp/clock.h"
#include "dcp/kernels.h"

#include <string.h>

static bool
is_exact(const reducer_gather_t *gather)
{
    return gather->args->precision == DCP_PRECISION_FP32;
}

int64_t
reducer_gather_cut(dcp_reducer_t *reducer, int64_t count)
{
    int64_t blocks = (count + DCP_PRECISION_BLOCK - 1) / DCP_PRECISION_BLOCK;
    int64_t start = 0, own_start = 0;
    for (int32_t r = 0; r < reducer->size; r++) {
        int64_t end = blocks * (r + 1) / reducer->size * DCP_PRECISION_BLOCK;
        end = end < count ? end : count;
        own_start = r == reducer->rank ? start : own_start;
        reducer->even_counts[r] = end - start;
        start = end;
    }
    return own_start;
}

/* The runs of every slice, in the order of codes. */
static void
fill_runs(reducer_gather_t *gather)
{
    dcp_reducer_t *reducer = gather->reducer;
    int32_t each = reducer->machine_ranks;
    int64_t count = 0, offset = 0;
    for (int32_t place = 0; place < each; place++) {
        int64_t block_start = offset;
        for (int32_t r = place; r < reducer->size; r += each) {
            int64_t start = 0, code_start = offset;
            for (int32_t i = 0; i < r; i++) {
                start += reducer->even_counts[i];
            }
            gather->own_first = r == reducer->rank ? count : gather->own_first;
            gather->own_offset = r == reducer->rank ? offset : gather->own_offset;
            for (int64_t left = reducer->even_counts[r]; left > 0;) {
                int64_t n = left < REDUCER_RUN ? left : REDUCER_RUN;
                gather->runs[count++] = (reducer_run_t){r, start, n, offset};
                offset += dcp_precision_bytes(gather->args->precision, n);
                start += n;
                left -= n;
            }
            gather->own_end = r == reducer->rank ? count : gather->own_end;
            reducer->code_bytes[r / each + (reducer->size / each) * place] =
                offset - code_start;
        }
        reducer->block_bytes[place] = offset - block_start;
    }
    gather->run_count = count;
}

dcp_status_t
reducer_gather_prepare(reducer_gather_t *gather)
{
    dcp_reducer_t *reducer = gather->reducer;
    int64_t run_count = 0, bytes = 0;
    for (int32_t r = 0; r < reducer->size; r++) {
        int64_t count = reducer->even_counts[r];
        run_count += (count + REDUCER_RUN - 1) / REDUCER_RUN;
        bytes += dcp_precision_bytes(gather->args->precision, count);
    }
    int64_t item = (int64_t)(sizeof(reducer_run_t) + 2 * sizeof(double));
    DCP_TRY(reducer_room_take(&reducer->gather_table, run_count * item,
                              "runs of a reduction"));
    DCP_TRY(reducer_room_take(&reducer->receive, bytes, "codes to receive"));
    gather->runs = reducer->gather_table.memory;
    gather->squares = (double *)(void *)(gather->runs + run_count);
    fill_runs(gather);
    return DCP_OK;
}

static dcp_status_t
encode_run(void *context, int64_t task, int32_t worker)
{
    const reducer_gather_t *gather = context;
    const dcp_reduce_args_t *given = gather->args;
    const reducer_run_t *run = &gather->runs[gather->own_first + task];
    char *codes = (char *)gather->reducer->receive.memory + run->offset;
    double *squares = gather->squares + 2 * task;
    squares[0] = squares[1] = 0;
    if (is_exact(gather)) {
        memcpy(codes, gather->out + run->start, (size_t)run->count * sizeof(float));
        return DCP_OK;
    }
    dcp_quantise_args_t args = {
        .count = run->count,
        .x = gather->out + run->start,
        .residual = gather->residual != NULL ? gather->residual + run->start : NULL,
        .codes = codes,
        .precision = given->precision,
        .hadamard = given->hadamard,
        .nearest = given->nearest,
        .seed = given->seed,
        .stream = reducer_stream(gather->reducer, given->step, true),
        .first = run->start,
        .squares = squares,
    };
    return dcp_cpu_quantise(gather->reducer->workers[worker].pool, &args);
}

static dcp_status_t
decode_run(void *context, int64_t task, int32_t worker)
{
    const reducer_gather_t *gather = context;
    const reducer_run_t *run = &gather->runs[task];
    const char *codes = (const char *)gather->reducer->receive.memory + run->offset;
    float *out = gather->out + run->start;
    if (is_exact(gather)) {
        memcpy(out, codes, (size_t)run->count * sizeof(float));
        return DCP_OK;
    }
    dcp_dequantise_args_t args = {
        .count = run->count,
        .codes = codes,
        .precision = gather->args->precision,
        .hadamard = gather->args->hadamard,
        .seed = gather->args->seed,
        .out = out,
    };
    return dcp_cpu_dequantise(gather->reducer->workers[worker].pool, &args);
}

static dcp_status_t
move(const reducer_gather_t *gather)
{
    const dcp_reducer_t *reducer = gather->reducer;
    int32_t each = reducer->machine_ranks, place = reducer->rank % each;
    char *codes = reducer->receive.memory, *block = codes;
    for (int32_t p = 0; p < place; p++) {
        block += reducer->block_bytes[p];
    }
    const int64_t *bytes = reducer->code_bytes + (reducer->size / each) * place;
    DCP_TRY(dcp_comm_allgatherv(reducer->across, codes + gather->own_offset, bytes,
                                block, DCP_U8));
    if (reducer->machine == NULL) {
        return DCP_OK;
    }
    return dcp_comm_allgatherv(reducer->machine, block, reducer->block_bytes, codes,
                               DCP_U8);
}

dcp_status_t
reducer_gather_run(reducer_gather_t *gather, dcp_pool_t *pool,
                   dcp_reduce_result_t *result)
{
    const dcp_reducer_t *reducer = gather->reducer;
    if (reducer->size == 1) {
        return DCP_OK; /* nothing travels: the sum is exact */
    }
    int64_t start = dcp_clock_ns(), own_count = gather->own_end - gather->own_first;
    DCP_TRY(dcp_pool_run(pool, own_count, encode_run, gather));
    for (int64_t i = 0; i < own_count && !is_exact(gather); i++) {
        result->squares += gather->squares[2 * i];
        result->error_squares += gather->squares[2 * i + 1];
    }
    result->codec_ns += dcp_clock_ns() - start;
    dcp_comm_traffic_t before = dcp_comm_traffic(reducer->across);
    DCP_TRY(move(gather));
    dcp_comm_traffic_t after = dcp_comm_traffic(reducer->across);
    result->move_ns += after.move_ns - before.move_ns;
    result->received_bytes += after.received_bytes - before.received_bytes;
    int64_t own = dcp_precision_bytes(gather->args->precision,
                                      reducer->even_counts[reducer->rank]);
    result->sent_bytes += own * (dcp_comm_size(reducer->across) - 1);
    start = dcp_clock_ns();
    DCP_TRY(dcp_pool_run(pool, gather->run_count, decode_run, gather));
    result->codec_ns += dcp_clock_ns() - start;
    return DCP_OK;
}
