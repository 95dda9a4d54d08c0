/* AdamW, its 8-bit form and sums of squares: checks and the cut into tasks; the
 * arithmetic, and why any cut gives the same bits, is in isa/optimizer_kernel.c and
 * isa/adamw8bit_kernel.c. Many runs are cut as one, so that a step is one dispatch.
 */
#include "dcp/kernels.h"
#include "rowwise.h"

static dcp_status_t
check_in(const char *name, float value, float least, float most, const char *rule)
{
    if (!(value >= least && value <= most)) {
        return DCP_FAIL(DCP_ERR_ARG, "adamw: %s %g must %s", name, (double)value, rule);
    }
    return DCP_OK;
}

/* The numbers of a step, which both structs name alike. */
#define CHECK_NUMBERS(args)                                                           \
    do {                                                                              \
        const float below_one = 1.0f - 0x1p-24f, tiny = 0x1p-126f, huge = 3.0e38f;    \
        DCP_TRY(check_in("lr", (args)->lr, 0, huge, "be finite and not negative"));   \
        DCP_TRY(check_in("beta1", (args)->beta1, 0, below_one, "lie in [0, 1)"));     \
        DCP_TRY(check_in("beta2", (args)->beta2, 0, below_one, "lie in [0, 1)"));     \
        DCP_TRY(check_in("eps", (args)->eps, tiny, huge, "be positive and finite"));  \
        DCP_TRY(                                                                      \
            check_in("decay", (args)->decay, 0, huge, "be finite and not negative")); \
        DCP_TRY(                                                                      \
            check_in("bias1", (args)->bias1, tiny, 1, "lie in (0, 1]: 1 - beta1^t")); \
        DCP_TRY(                                                                      \
            check_in("bias2", (args)->bias2, tiny, 1, "lie in (0, 1]: 1 - beta2^t")); \
        DCP_TRY(check_in("grad_scale", (args)->grad_scale, 0, huge,                   \
                         "be finite and not negative"));                              \
    } while (0)

static dcp_status_t
check_adamw(const dcp_adamw_args_t *args)
{
    CHECK_SIZE("adamw", count);
    CHECK_NUMBERS(args);
    if (args->count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("adamw", w);
    CHECK_POINTER("adamw", m);
    CHECK_POINTER("adamw", v);
    CHECK_POINTER("adamw", g);
    return DCP_OK;
}

static dcp_status_t
check_adamw8bit(const dcp_adamw8bit_args_t *args)
{
    CHECK_SIZE("adamw8bit", rows);
    CHECK_SIZE("adamw8bit", width);
    CHECK_NUMBERS(args);
    if (args->rows == 0 || args->width == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("adamw8bit", w);
    CHECK_POINTER("adamw8bit", m);
    CHECK_POINTER("adamw8bit", v);
    CHECK_POINTER("adamw8bit", m_scale);
    CHECK_POINTER("adamw8bit", v_scale);
    CHECK_POINTER("adamw8bit", g);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_adamw(dcp_pool_t *pool, const dcp_adamw_args_t *args)
{
    DCP_TRY(check_adamw(args));
    return rowwise_run(pool, args->count, 1, ROWWISE_OPS(optimizer_ops)->adamw, args);
}

/* Runs as one row of items, cut into tasks without regard to where runs end. */
typedef struct runs_job {
    rowwise_func_t func;
    const char *args; /* of run r at args + r * args_bytes */
    size_t args_bytes;
    const int64_t *firsts; /* [run_count + 1] items before each run */
    int64_t run_count, items_per_task;
} runs_job_t;

static dcp_status_t
runs_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const runs_job_t *job = context;
    int64_t first = task * job->items_per_task, last = first + job->items_per_task;
    int64_t run = 0, end = job->run_count; /* the last run that starts at or before */
    while (end - run > 1) {
        int64_t middle = run + (end - run) / 2;
        if (job->firsts[middle] <= first) {
            run = middle;
        } else {
            end = middle;
        }
    }
    for (; run < job->run_count && job->firsts[run] < last; run++) {
        int64_t from = first - job->firsts[run], to = last - job->firsts[run];
        int64_t count = job->firsts[run + 1] - job->firsts[run];
        job->func(job->args + (size_t)run * job->args_bytes, from > 0 ? from : 0,
                  to < count ? to : count);
    }
    return DCP_OK;
}

static dcp_status_t
run_runs(dcp_pool_t *pool, runs_job_t *job)
{
    int64_t per_task = job->items_per_task, items = job->firsts[job->run_count];
    return dcp_pool_run(pool, items / per_task + (items % per_task > 0), runs_task,
                        job);
}

enum { TASK_ELEMENTS = 32768 };

/* [run_count + 1], of the pool's scratch. */
static dcp_status_t
take_firsts(dcp_pool_t *pool, int64_t run_count, int64_t **firsts_p)
{
    void *memory;
    DCP_TRY(
        dcp_pool_scratch(pool, 0, (run_count + 1) * (int64_t)sizeof(int64_t), &memory));
    *firsts_p = memory;
    (*firsts_p)[0] = 0;
    return DCP_OK;
}

dcp_status_t
dcp_cpu_adamw_runs(dcp_pool_t *pool, const dcp_adamw_runs_args_t *args)
{
    CHECK_SIZE("adamw_runs", run_count);
    if (args->run_count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("adamw_runs", runs);
    int64_t *firsts;
    DCP_TRY(take_firsts(pool, args->run_count, &firsts));
    for (int64_t r = 0; r < args->run_count; r++) {
        DCP_TRY(check_adamw(&args->runs[r]));
        firsts[r + 1] = firsts[r] + args->runs[r].count;
    }
    runs_job_t job = {
        .func = ROWWISE_OPS(optimizer_ops)->adamw,
        .args = (const char *)args->runs,
        .args_bytes = sizeof args->runs[0],
        .firsts = firsts,
        .run_count = args->run_count,
        .items_per_task = TASK_ELEMENTS,
    };
    return run_runs(pool, &job);
}

dcp_status_t
dcp_cpu_adamw8bit_runs(dcp_pool_t *pool, const dcp_adamw8bit_runs_args_t *args)
{
    CHECK_SIZE("adamw8bit_runs", run_count);
    if (args->run_count == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("adamw8bit_runs", runs);
    int64_t *firsts;
    DCP_TRY(take_firsts(pool, args->run_count, &firsts));
    for (int64_t r = 0; r < args->run_count; r++) {
        const dcp_adamw8bit_args_t *run = &args->runs[r];
        DCP_TRY(check_adamw8bit(run));
        int64_t row_blocks =
            run->width / DCP_ADAMW8BIT_BLOCK + (run->width % DCP_ADAMW8BIT_BLOCK > 0);
        firsts[r + 1] = firsts[r] + run->rows * row_blocks;
    }
    runs_job_t job = {
        .func = ROWWISE_OPS(adamw8bit_ops)->adamw8bit,
        .args = (const char *)args->runs,
        .args_bytes = sizeof args->runs[0],
        .firsts = firsts,
        .run_count = args->run_count,
        .items_per_task = TASK_ELEMENTS / DCP_ADAMW8BIT_BLOCK,
    };
    return run_runs(pool, &job);
}

dcp_status_t
dcp_cpu_adamw8bit(dcp_pool_t *pool, const dcp_adamw8bit_args_t *args)
{
    dcp_adamw8bit_runs_args_t one = {.run_count = 1, .runs = args};
    return dcp_cpu_adamw8bit_runs(pool, &one);
}

void
dcp_adamw8bit_v_values(float values[DCP_ADAMW8BIT_CODES])
{
    values[0] = 0.0f;
    double decade = 1e-7, whole = 1.0 - 0.45 / 128.0;
    for (int first = 1; first < DCP_ADAMW8BIT_CODES; first *= 2, decade *= 10.0) {
        for (int c = first; c < 2 * first; c++) {
            double place = (c + 0.5) / first - 1.0; /* in the decade, 0 to 1 */
            values[c] = (float)(decade * (0.1 + 0.9 * place) / whole);
        }
    }
}

dcp_status_t
dcp_cpu_row_squares(dcp_pool_t *pool, const dcp_row_squares_args_t *args)
{
    CHECK_SIZE("row_squares", rows);
    CHECK_SIZE("row_squares", width);
    if (args->rows == 0) {
        return DCP_OK;
    }
    CHECK_POINTER("row_squares", out);
    if (args->width > 0) {
        CHECK_POINTER("row_squares", x);
    }
    return rowwise_run(pool, args->rows, args->width,
                       ROWWISE_OPS(optimizer_ops)->row_squares, args);
}
