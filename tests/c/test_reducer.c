/* reducer: exact sums bit for bit, conservation through changes of every setting, bits
 * whatever the threads, values that are not finite, ranks that disagree or lack memory.
 * Ranks are threads. */
#define _GNU_SOURCE
#include "comm_ranks.h"

#include "dcp/clock.h"
#include "dcp/reducer.h"

#include <math.h>

/* Fails the n-th allocation of this thread. */
static _Thread_local int64_t fail_at, alloc_calls;

static void *
rank_alloc(void *context, int64_t bytes)
{
    (void)context;
    alloc_calls++;
    return fail_at > 0 && alloc_calls == fail_at
               ? NULL
               : aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
}

static const dcp_allocator_ops_t rank_allocator = {rank_alloc, check_alloc_free, NULL};

enum { MOST_SEGMENTS = 4 };

/* What one rank brings to a call. */
typedef struct input {
    int64_t segment_count, total;
    int64_t counts[MOST_SEGMENTS][MAX_RANKS], totals[MOST_SEGMENTS];
    float *data[MOST_SEGMENTS], *residual[MOST_SEGMENTS], *out[MOST_SEGMENTS];
    dcp_reduce_segment_t segments[MOST_SEGMENTS];
} input_t;

static int64_t
start_of(const int64_t *counts, int32_t rank)
{
    int64_t start = 0;
    for (int32_t r = 0; r < rank; r++) {
        start += counts[r];
    }
    return start;
}

/* The same counts on all ranks, values of each rank's own. */
static void
input_init(input_t *in, const rank_t *r, dcp_rng_t *rng, uint64_t bound, uint64_t call)
{
    *in = (input_t){.segment_count = (int64_t)dcp_rng_below(rng, MOST_SEGMENTS + 1)};
    for (int64_t i = 0; i < in->segment_count; i++) {
        in->totals[i] = random_counts(rng, r->size, bound, in->counts[i]);
        in->data[i] = contribution(call * 16 + (uint64_t)i, r->rank, in->totals[i]);
        in->residual[i] = floats(in->totals[i]);
        memset(in->residual[i], 0, (size_t)in->totals[i] * sizeof(float));
        in->out[i] = floats(in->counts[i][r->rank]);
        in->segments[i] = (dcp_reduce_segment_t){.data = in->data[i],
                                                 .counts = in->counts[i],
                                                 .residual = in->residual[i],
                                                 .out = in->out[i],
                                                 .first = in->total};
        in->total += in->totals[i];
    }
}

static void
input_fini(input_t *in)
{
    for (int64_t i = 0; i < in->segment_count; i++) {
        free(in->data[i]);
        free(in->residual[i]);
        free(in->out[i]);
    }
}

/* ---- exact sums ---- */

static void
exact_body(rank_t *r)
{
    dcp_pool_t *pool;
    dcp_reducer_t *reducer;
    REQUIRE(r, dcp_pool_create(1 + r->rank % 2, &pool) == DCP_OK);
    REQUIRE(r, dcp_reducer_create(r->comm, 1, &reducer) == DCP_OK);
    dcp_rng_t rng;
    dcp_rng_init(&rng, r->seed, 0);
    for (uint64_t call = 0; call < 6; call++) {
        input_t in;
        input_init(&in, r, &rng, call % 2 ? 60000 : 4, call);
        for (int64_t i = 0; i < in.segment_count; i++) {
            for (int64_t k = 0; k < in.totals[i]; k++) {
                in.residual[i][k] = value(900 + call, r->rank, k);
            }
            if (call % 3 == 0) {
                in.segments[i].residual = NULL;
            }
        }
        float *expected[MOST_SEGMENTS];
        for (int64_t i = 0; i < in.segment_count; i++) {
            float *sum = floats(in.totals[i]);
            for (int64_t k = 0; k < in.totals[i]; k++) {
                sum[k] = in.data[i][k] + (call % 3 ? in.residual[i][k] : 0.0f);
            }
            expected[i] = floats(in.counts[i][r->rank]);
            REQUIRE(r, dcp_comm_reduce_scatterv(r->comm, sum, in.counts[i], expected[i],
                                                DCP_F32)
                           == DCP_OK);
            free(sum);
            if (call > 2) { /* in place */
                in.segments[i].out = in.data[i] + start_of(in.counts[i], r->rank);
            }
        }
        dcp_reduce_args_t args = {.segments = in.segments,
                                  .segment_count = in.segment_count,
                                  .precision = DCP_PRECISION_FP32};
        dcp_reduce_result_t result;
        REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, &result) == DCP_OK);
        int64_t own = 0;
        for (int64_t i = 0; i < in.segment_count; i++) {
            own += in.counts[i][r->rank];
            REQUIRE(r, memcmp(in.segments[i].out, expected[i],
                              (size_t)in.counts[i][r->rank] * sizeof(float))
                           == 0);
            int64_t left = 0;
            for (int64_t k = 0; k < in.totals[i] && call % 3; k++) {
                left += in.residual[i][k] != 0;
            }
            REQUIRE(r, left == 0);
            free(expected[i]);
        }
        REQUIRE(r, result.sent_bytes == (in.total - own) * 4);
        REQUIRE(r, result.received_bytes == own * 4 * (r->size - 1));
        REQUIRE(r, result.sent_bytes
                       == dcp_reducer_bytes(reducer, DCP_PRECISION_FP32, in.segments,
                                            in.segment_count));
        input_fini(&in);
    }
    dcp_reducer_destroy(reducer);
    dcp_pool_destroy(pool);
}

/* ---- conservation (case C-02) ---- */

/* Per element: sums handed out + residuals of all ranks = sum of all inputs, through a
 * random sequence of precisions, levels, roundings and cuts into slices. Values are
 * multiples of 2^-8 below 1, so that fp32 itself loses little. */
static void
conservation_body(rank_t *r)
{
    enum { COUNT = 3000, CALLS = 14 };
    dcp_pool_t *pool;
    dcp_reducer_t *reducers[MAX_RANKS + 1] = {NULL};
    REQUIRE(r, dcp_pool_create(1, &pool) == DCP_OK);
    for (int32_t each = 1; each <= r->size; each++) {
        if (r->size % each == 0) {
            REQUIRE(r, dcp_reducer_create(r->comm, each, &reducers[each]) == DCP_OK);
        }
    }
    dcp_rng_t rng;
    dcp_rng_init(&rng, r->seed, 0);
    float *data = floats(COUNT), *residual = floats(COUNT), *out = floats(COUNT);
    double *handed = calloc(COUNT, sizeof(double)),
           *inputs = calloc(COUNT, sizeof(double));
    double *all = calloc(COUNT, sizeof(double));
    memset(residual, 0, COUNT * sizeof(float));
    for (uint64_t call = 0; call < CALLS; call++) {
        for (int64_t i = 0; i < COUNT; i++) {
            data[i] = rintf(remainderf(value(call, r->rank, i), 1.0f) * 256) / 256;
            inputs[i] += (double)data[i];
        }
        int64_t counts[MAX_RANKS] = {0}, left = COUNT;
        for (int32_t k = 0; k + 1 < r->size; k++) {
            counts[k] = (int64_t)dcp_rng_below(&rng, (uint64_t)left + 1);
            left -= counts[k];
        }
        counts[r->size - 1] = left;
        int32_t each;
        do {
            each = 1 + (int32_t)dcp_rng_below(&rng, (uint64_t)r->size);
        } while (reducers[each] == NULL);
        dcp_reduce_args_t args = {
            .segment_count = 1,
            .precision = (dcp_precision_t)dcp_rng_below(&rng, DCP_PRECISION_COUNT),
            .hadamard = (int32_t)dcp_rng_below(&rng, 2),
            .nearest = (int32_t)dcp_rng_below(&rng, 2),
            .seed = 5,
            .step = (int64_t)call};
        if (dcp_rng_below(&rng, 4) == 0) {
            REQUIRE(r, dcp_reducer_allreduce(reducers[each], pool, data, residual, out,
                                             COUNT, &args, NULL)
                           == DCP_OK);
            for (int64_t i = 0; i < COUNT && r->rank == 0; i++) {
                handed[i] += (double)out[i];
            }
            continue;
        }
        dcp_reduce_segment_t segment = {
            .data = data, .counts = counts, .residual = residual, .out = out};
        args.segments = &segment;
        REQUIRE(r, dcp_reducer_reduce(reducers[each], pool, &args, NULL) == DCP_OK);
        int64_t start = start_of(counts, r->rank);
        for (int64_t i = 0; i < counts[r->rank]; i++) {
            handed[start + i] += (double)out[i];
        }
    }
    for (int64_t i = 0; i < COUNT; i++) {
        handed[i] += (double)residual[i] - inputs[i];
    }
    REQUIRE(r, dcp_comm_allreduce(r->comm, handed, all, COUNT, DCP_F64, DCP_SUM)
                   == DCP_OK);
    double worst = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        worst = fabs(all[i]) > worst ? fabs(all[i]) : worst;
    }
    /* of each call and rank a rounding of values below 8 or so */
    REQUIRE(r, worst < CALLS * r->size * 0x1p-21);
    for (int32_t each = 1; each <= r->size; each++) {
        dcp_reducer_destroy(reducers[each]);
    }
    dcp_pool_destroy(pool);
    free(data);
    free(residual);
    free(out);
    free(handed);
    free(inputs);
    free(all);
}

/* ---- bits ---- */

/* Pools of 1, 2, 3 threads give the same sums, residuals and squares; an allreduce is
 * the same on all ranks. */
static void
bits_body(rank_t *r)
{
    static const dcp_precision_t precisions[] = {
        DCP_PRECISION_INT4, DCP_PRECISION_FP8_E4M3, DCP_PRECISION_BF16};
    dcp_reducer_t *reducer;
    REQUIRE(r, dcp_reducer_create(r->comm, r->size % 2 ? 1 : 2, &reducer) == DCP_OK);
    for (uint64_t call = 0; call < 3; call++) {
        input_t first = {0};
        dcp_reduce_result_t result, first_result = {0};
        for (int32_t threads = 1; threads <= 3; threads++) {
            dcp_pool_t *pool;
            REQUIRE(r, dcp_pool_create(threads, &pool) == DCP_OK);
            dcp_rng_t rng;
            dcp_rng_init(&rng, r->seed + call, 0);
            input_t in;
            input_init(&in, r, &rng, 70000, call);
            dcp_reduce_args_t args = {.segments = in.segments,
                                      .segment_count = in.segment_count,
                                      .precision = precisions[call],
                                      .seed = 1,
                                      .step = (int64_t)call};
            REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, &result) == DCP_OK);
            for (int64_t i = 0; i < in.segment_count && threads > 1; i++) {
                REQUIRE(r, memcmp(in.out[i], first.out[i],
                                  (size_t)in.counts[i][r->rank] * sizeof(float))
                               == 0);
                REQUIRE(r, memcmp(in.residual[i], first.residual[i],
                                  (size_t)in.totals[i] * sizeof(float))
                               == 0);
            }
            REQUIRE(r, threads == 1
                           || (result.squares == first_result.squares
                               && result.error_squares == first_result.error_squares));
            if (threads == 1) {
                first = in;
                first_result = result;
            } else {
                input_fini(&in);
            }
            dcp_pool_destroy(pool);
        }
        input_fini(&first);
    }
    dcp_reducer_destroy(reducer);
}

/* An allreduce is the reduction, and each owner's sum coded once more; all ranks have
 * the same bits, in place too (case C-08). */
static void
allreduce_body(rank_t *r)
{
    dcp_pool_t *pool;
    dcp_reducer_t *reducer;
    REQUIRE(r, dcp_pool_create(1, &pool) == DCP_OK);
    REQUIRE(r, dcp_reducer_create(r->comm, r->size == 4 ? 2 : 1, &reducer) == DCP_OK);
    static const int64_t sizes[] = {0, 1, 5, 129, 100000};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t count = sizes[s];
        for (int32_t p = 0; p < DCP_PRECISION_COUNT; p++) {
            float *data = contribution(s, r->rank, count), *out = floats(count);
            float *again = floats(count);
            dcp_reduce_args_t args = {.precision = (dcp_precision_t)p, .step = 3};
            dcp_reduce_result_t result;
            REQUIRE(r, dcp_reducer_allreduce(reducer, pool, data, NULL, out, count,
                                             &args, &result)
                           == DCP_OK);
            REQUIRE(r, dcp_reducer_allreduce(reducer, pool, data, NULL, data, count,
                                             &args, &result)
                           == DCP_OK);
            REQUIRE(r, memcmp(out, data, (size_t)count * sizeof(float)) == 0);
            int64_t unequal = 0;
            REQUIRE(r, dcp_comm_allreduce(r->comm, out, again, count, DCP_F32, DCP_MAX)
                           == DCP_OK);
            for (int64_t i = 0; i < count; i++) {
                unequal += again[i] != out[i];
                double error = fabs((double)out[i] - (double)sum_of(s, r->size, i));
                unequal += error > 0.4 * 2200 * r->size; /* int4: 1/7 of the largest */
                unequal += p == DCP_PRECISION_FP32 && r->size != 4
                           && out[i] != sum_of(s, r->size, i);
            }
            REQUIRE(r, unequal == 0);
            free(data);
            free(out);
            free(again);
        }
    }
    dcp_reducer_destroy(reducer);
    dcp_pool_destroy(pool);
}

/* ---- values that are not finite (case C-06) ---- */

static void
nan_body(rank_t *r)
{
    enum { COUNT = 1024 };
    dcp_pool_t *pool;
    dcp_reducer_t *reducer;
    REQUIRE(r, dcp_pool_create(1, &pool) == DCP_OK);
    REQUIRE(r, dcp_reducer_create(r->comm, r->size == 4 ? 2 : 1, &reducer) == DCP_OK);
    for (int32_t p = 0; p < DCP_PRECISION_COUNT; p++) {
        int64_t counts[MAX_RANKS] = {COUNT};
        float data[COUNT], residual[COUNT], before[COUNT], out[COUNT];
        for (int64_t i = 0; i < COUNT; i++) {
            data[i] = value(3, r->rank, i);
            /* where two levels keep them: on ranks of the owner's place */
            before[i] = residual[i] =
                r->size == 4 && r->rank % 2 ? 0 : value(4, r->rank, i);
        }
        data[300] =
            r->rank == r->size - 1 ? NAN : 1.0f; /* of one rank, maybe the owner */
        dcp_reduce_segment_t segment = {
            .data = data, .counts = counts, .residual = residual, .out = out};
        dcp_reduce_args_t args = {.segments = &segment,
                                  .segment_count = 1,
                                  .precision = (dcp_precision_t)p,
                                  .hadamard = 1};
        REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, NULL) == DCP_OK);
        int64_t wrong = 0;
        for (int64_t i = 0; i < COUNT; i++) {
            wrong += !isfinite(residual[i]);
            /* elements of other blocks are sums */
            wrong += r->rank == 0 && i / 128 != 300 / 128 && !isfinite(out[i]);
        }
        wrong += r->rank == 0 && isfinite(out[300]);
        bool held_nan = r->rank == r->size - 1 && (r->size != 4 || r->rank % 2 == 0);
        wrong += held_nan && residual[300] != before[300];
        REQUIRE(r, wrong == 0);
    }
    dcp_reducer_destroy(reducer);
    dcp_pool_destroy(pool);
}

/* ---- disagreement and memory ---- */

static void
mismatch_body(rank_t *r)
{
    dcp_pool_t *pool;
    dcp_reducer_t *reducer;
    REQUIRE(r, dcp_pool_create(1, &pool) == DCP_OK);
    REQUIRE(r, dcp_reducer_create(r->comm, 1, &reducer) == DCP_OK);
    float data[6] = {1, 2, 3, 4, 5, 6}, residual[6] = {7, 7, 7, 7, 7, 7}, out[6];
    int64_t counts[3] = {1, 2, 3};
    for (int32_t what = 0; what < 7; what++) {
        bool odd = r->rank == 1;
        int64_t given[3] = {counts[0], counts[1] + (odd && what == 2),
                            counts[2] - (odd && what == 2)};
        dcp_reduce_segment_t segment = {.data = data,
                                        .counts = given,
                                        .residual = odd && what == 5 ? NULL : residual,
                                        .out = out};
        dcp_reduce_args_t args = {.segments = &segment,
                                  .segment_count = odd && what == 6 ? 0 : 1,
                                  .precision = odd && what == 0 ? DCP_PRECISION_INT8
                                                                : DCP_PRECISION_INT4,
                                  .step = odd && what == 1 ? 8 : 9,
                                  .seed = odd && what == 3,
                                  .nearest = odd && what == 4};
        keep(r, dcp_reducer_reduce(reducer, pool, &args, NULL));
        REQUIRE(r, r->status == DCP_ERR_MISMATCH);
        REQUIRE(r, strstr(r->message, "rank 0 called reduce") != NULL);
        REQUIRE(r, strstr(r->message, "rank 1 called reduce") != NULL);
        REQUIRE(r, what != 0
                       || (strstr(r->message, "int8") && strstr(r->message, "int4")));
        REQUIRE(r,
                what != 1
                    || (strstr(r->message, "step 8") && strstr(r->message, "step 9")));
        int64_t changed = 0;
        for (int i = 0; i < 6; i++) {
            changed += residual[i] != 7;
        }
        REQUIRE(r, changed == 0);
    }
    /* a wrong argument is found before peers are told */
    dcp_reduce_segment_t segment = {
        .data = data, .counts = counts, .residual = residual, .out = data};
    dcp_reduce_args_t args = {
        .segments = &segment, .segment_count = 1, .precision = DCP_PRECISION_INT8};
    if (r->rank == 1) {
        REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, NULL) == DCP_ERR_ARG);
        args.precision = (dcp_precision_t)17;
        REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, NULL) == DCP_ERR_ARG);
        args.precision = DCP_PRECISION_INT8;
    }
    segment.out = out;
    REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, NULL) == DCP_OK);
    dcp_reducer_destroy(reducer);
    REQUIRE(r, dcp_reducer_create(r->comm, 2, &reducer) == DCP_ERR_ARG);
    REQUIRE(r, dcp_reducer_create(r->comm, r->rank == 1 ? 3 : 1, &reducer) == DCP_OK);
    dcp_reducer_destroy(reducer); /* three ranks a machine of three: one level too */
    dcp_pool_destroy(pool);
}

/* Rank 1 lacks memory for its n-th block, n = 1, 2, ...: all ranks are told, residuals
 * stay, and the next call with memory works. */
static void
memory_body(rank_t *r)
{
    enum { COUNT = 5000 };
    dcp_pool_t *pool;
    REQUIRE(r, dcp_pool_create(2, &pool) == DCP_OK);
    bool finished = false;
    for (int64_t n = 1; !finished && n < 100; n++) {
        alloc_calls = 0;
        fail_at = r->rank == 1 ? n : 0;
        dcp_reducer_t *reducer = NULL;
        dcp_status_t status = dcp_reducer_create(r->comm, 2, &reducer);
        float data[COUNT], residual[COUNT], out[COUNT];
        int64_t counts[MAX_RANKS] = {0};
        for (int64_t i = 0; i < COUNT; i++) {
            data[i] = value(1, r->rank, i);
            residual[i] = 1;
        }
        for (int32_t k = 0; k < r->size; k++) {
            counts[k] = COUNT / r->size;
        }
        dcp_reduce_segment_t segment = {
            .data = data, .counts = counts, .residual = residual, .out = out};
        dcp_reduce_args_t args = {
            .segments = &segment, .segment_count = 1, .precision = DCP_PRECISION_INT8};
        bool was_made = status == DCP_OK;
        if (was_made) {
            status = dcp_reducer_reduce(reducer, pool, &args, NULL);
            finished = status == DCP_OK;
        }
        REQUIRE(r, status == DCP_OK || status == DCP_ERR_NO_MEM);
        REQUIRE(r, finished || strstr(dcp_last_error(), "rank 1") != NULL);
        int64_t changed = 0;
        for (int64_t i = 0; i < COUNT; i++) {
            changed += residual[i] != 1;
        }
        REQUIRE(r, finished || changed == 0);
        fail_at = 0;
        if (was_made && !finished) {
            REQUIRE(r, dcp_reducer_reduce(reducer, pool, &args, NULL) == DCP_OK);
        }
        dcp_reducer_destroy(reducer);
    }
    REQUIRE(r, finished);
    dcp_pool_destroy(pool);
}

static dcp_status_t
alone_scenario(void)
{
    dcp_comm_t *comm = NULL;
    dcp_pool_t *pool = NULL;
    dcp_reducer_t *reducer = NULL;
    float data[300], out[300], residual[300] = {0};
    int64_t count = 300;
    for (int i = 0; i < 300; i++) {
        data[i] = (float)i;
    }
    dcp_reduce_segment_t segment = {
        .data = data, .counts = &count, .residual = residual, .out = out};
    dcp_reduce_args_t args = {
        .segments = &segment, .segment_count = 1, .precision = DCP_PRECISION_INT4};
    dcp_status_t status = dcp_comm_create_self(&comm);
    status = status != DCP_OK ? status : dcp_pool_create(1, &pool);
    status = status != DCP_OK ? status : dcp_reducer_create(comm, 1, &reducer);
    status = status != DCP_OK ? status : dcp_reducer_reduce(reducer, pool, &args, NULL);
    CHECK(status != DCP_OK || memcmp(out, data, sizeof out) == 0);
    status = status != DCP_OK ? status
                              : dcp_reducer_allreduce(reducer, pool, data, residual,
                                                      out, count, &args, NULL);
    CHECK(status != DCP_OK || memcmp(out, data, sizeof out) == 0);
    dcp_reducer_destroy(reducer);
    dcp_pool_destroy(pool);
    dcp_comm_destroy(comm);
    return status;
}

/* ---- traffic ---- */

static int64_t
tick(void *context)
{
    (void)context;
    static _Thread_local int64_t now;
    return now += 1000;
}

/* A thread's clock moves by 1 us a look: a call takes as many as it looks. */
static void
traffic_body(rank_t *r)
{
    dcp_comm_traffic_t before = dcp_comm_traffic(r->comm);
    REQUIRE(r, before.call_count == 0 && before.move_ns == 0);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    dcp_comm_traffic_t after = dcp_comm_traffic(r->comm);
    REQUIRE(r, after.call_count == 1 && after.received_bytes == 0);
    /* the last to come looks twice and has not waited; others look four times */
    REQUIRE(r, r->size == 1 ? after.move_ns == 0 && after.wait_ns == 0
                            : after.move_ns > 0);
    REQUIRE(r, after.wait_ns % 1000 == 0 && after.move_ns % 1000 == 0);
    int64_t waited = after.wait_ns > 0, waited_count = 0;
    REQUIRE(r, dcp_comm_allreduce(r->comm, &waited, &waited_count, 1, DCP_I64, DCP_SUM)
                   == DCP_OK);
    REQUIRE(r, waited_count == r->size - 1); /* all but the last */
}

int
main(void)
{
    dcp_alloc_set_ops(&rank_allocator);
    rank_t ranks[MAX_RANKS];
    int64_t held = dcp_alloc_held_bytes();
    for (int32_t size = 1; size <= MAX_RANKS; size++) {
        run_ranks(ranks, size, exact_body, (uint64_t)size, 60 * second_ns);
        run_ranks(ranks, size, allreduce_body, 0, 60 * second_ns);
        for (uint64_t seed = 0; seed < 3; seed++) {
            run_ranks(ranks, size, conservation_body, seed, 60 * second_ns);
        }
    }
    for (int32_t size = 2; size <= 4; size++) {
        run_ranks(ranks, size, bits_body, (uint64_t)size, 60 * second_ns);
        run_ranks(ranks, size, nan_body, 0, 60 * second_ns);
    }
    run_ranks(ranks, 3, mismatch_body, 0, 60 * second_ns);
    run_ranks(ranks, 4, memory_body, 0, 60 * second_ns);
    CHECK(dcp_alloc_held_bytes() == held);
    static const dcp_clock_ops_t clock = {tick, NULL};
    dcp_clock_set_ops(&clock);
    for (int32_t size = 1; size <= 3; size++) {
        run_ranks(ranks, size, traffic_body, 0, INT64_C(1) << 60);
    }
    dcp_clock_set_ops(NULL);
    check_every_alloc(alone_scenario);
    return check_finish();
}
