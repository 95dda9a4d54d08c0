/* The matrix product on the CPU: checks, blocking, and work for the pool.
 *
 * C is cut into tiles, one task each. A task walks k in blocks; in a block it takes
 * CHUNK_ROWS rows of op(A) at a time, which then lie in the second-level cache (read in
 * place where rows are contiguous, else packed in strips), and streams the panels of
 * op(B) past them (packed once a step by dcp_cpu_gemm_pack, or here, per block). C is
 * read again once per k block, so these are deep.
 *
 * Invariants. An element of C is base + (sum of block 0) + (sum of block 1) + ..., each
 * sum one chain in increasing k; block borders depend on k only. So its bits depend on
 * its row of op(A), its column of op(B), k and the instruction set: not on m, n, the
 * cut into tasks, the thread count, strides, or whether B came packed. AVX2 and AVX-512
 * agree bit for bit.
 *
 * compute = BF16 rounds the factors while packing, A too, which is then always packed.
 * A set that multiplies bf16 has a table of two factors a word (gemm_ops.h), others
 * round and compute in fp32. Either way an element is as above, with the chain of its
 * table; its bits depend on the rounded row and column, not on where they came from.
 *
 * Cost: the register tile alone runs at 97 % of the FMA peak; where operands must be
 * packed, that adds (m + n) k moved elements to m n k multiply-adds: 4-8 % at m, n of
 * some hundred. No BLAS is called: see DECISIONS 8.
 */
#include "gemm_ops.h"

#include "dcp/isa.h"
#include "dcp/kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    K_BLOCK = 704, /* most words of k in a block */
    WORD_BYTES = 4,
    K_ALIGN = 16,             /* blocks but the last are multiples of this */
    CHUNK_ROWS = 96,          /* rows of op(A) that the panels stream by at a time */
    SLAB_BYTES = 4096 * 1024, /* most bytes of B that a task packs at a time */
    PACK_COLUMNS = 64,        /* columns that a task of dcp_cpu_gemm_pack packs */
    TASKS_PER_THREAD = 4,     /* or half as many where a task packs for itself */
    PACK_ALIGN = 16, /* packed columns are a multiple of this, whatever the set */
};

/* Below this many multiply-adds waking the workers costs more than it gives. */
static const double PARALLEL_WORK = 4e6;

static const gemm_ops_t *
ops_current(dcp_dtype_t compute)
{
#if defined(__x86_64__)
    if (compute == DCP_BF16 && dcp_isa_current() == DCP_ISA_AVX512BF16) {
        return &gemm_ops_avx512bf16;
    }
#else
    (void)compute;
#endif
    switch (dcp_isa_vectors()) {
#if defined(__x86_64__)
    case DCP_ISA_AVX2:
        return &gemm_ops_avx2;
    case DCP_ISA_AVX512:
        return &gemm_ops_avx512;
#endif
    default:
        return &gemm_ops_portable;
    }
}

static int64_t
ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t
most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Words that hold k factors. */
static int64_t
words_of(const gemm_ops_t *ops, int64_t k)
{
    return ceil_div(k, ops->factors);
}

/* Depth of the k blocks, `factors` a word: even, so that none is shallow. */
static int64_t
k_block(int64_t k, int64_t factors)
{
    int64_t count = most(1, ceil_div(k, K_BLOCK * factors));
    return ceil_div(ceil_div(k, count), K_ALIGN) * K_ALIGN;
}

/* A stored matrix of rows x columns elements: its pointer and its row stride. */
static dcp_status_t
check_matrix(const char *name, const char *stride_name, const void *pointer,
             int64_t rows, int64_t columns, int64_t stride)
{
    if (rows == 0 || columns == 0) {
        return DCP_OK;
    }
    if (pointer == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "%s is NULL, must point to %lld x %lld elements",
                        name, (long long)rows, (long long)columns);
    }
    if (stride < columns) {
        return DCP_FAIL(DCP_ERR_ARG, "%s %lld must be at least %lld, the width of %s",
                        stride_name, (long long)stride, (long long)columns, name);
    }
    return DCP_OK;
}

static dcp_status_t
check_size(const char *name, int64_t size)
{
    return size >= 0 ? DCP_OK
                     : DCP_FAIL(DCP_ERR_ARG, "%s %lld must not be negative", name,
                                (long long)size);
}

static dcp_status_t
check_compute(dcp_dtype_t compute)
{
    return compute == DCP_F32 || compute == DCP_BF16
               ? DCP_OK
               : DCP_FAIL(DCP_ERR_TYPE, "compute %s must be float32 or bfloat16",
                          dcp_dtype_name(compute));
}

static dcp_status_t
check_gemm(const dcp_gemm_args_t *g)
{
    DCP_TRY(check_size("m", g->m));
    DCP_TRY(check_size("n", g->n));
    DCP_TRY(check_size("k", g->k));
    DCP_TRY(check_compute(g->compute));
    if (g->accumulate && (g->add != NULL || g->bias != NULL)) {
        return DCP_FAIL(DCP_ERR_ARG, "accumulate %d must be 0 where %s is given",
                        (int)g->accumulate, g->add != NULL ? "add" : "bias");
    }
    if (g->m == 0 || g->n == 0) {
        return DCP_OK;
    }
    DCP_TRY(check_matrix("a", "lda", g->a, g->trans_a ? g->k : g->m,
                         g->trans_a ? g->m : g->k, g->lda));
    if (g->b_packed == NULL) {
        DCP_TRY(check_matrix("b", "ldb", g->b, g->trans_b ? g->n : g->k,
                             g->trans_b ? g->k : g->n, g->ldb));
    }
    DCP_TRY(check_matrix("c", "ldc", g->c, g->m, g->n, g->ldc));
    if (g->add != NULL) {
        DCP_TRY(check_matrix("add", "ld_add", g->add, g->m, g->n, g->ld_add));
    }
    return DCP_OK;
}

typedef struct job {
    dcp_pool_t *pool;
    const dcp_gemm_args_t *args;
    const gemm_ops_t *ops;
    source_t source;                 /* what packing reads */
    int32_t packs_a;                 /* A is not read in place */
    int64_t panel;                   /* columns of a whole B panel */
    int64_t k_step;                  /* depth of a k block, elements */
    int64_t task_rows, task_columns; /* of a tile of C */
    int64_t row_tasks;
    int64_t a_bytes, b_bytes; /* scratch of a worker */
} job_t;

/* Cuts C into row_count x column_count tiles, at least `least_columns` across: as many
 * as wanted, then with the least packing (a task packs for itself), then in rows rather
 * than columns, so that a row of A is read once. */
static void
job_cut(job_t *job, int64_t wanted, int64_t least_columns, int64_t *row_count_p,
        int64_t *column_count_p)
{
    const dcp_gemm_args_t *g = job->args;
    int64_t panels = ceil_div(g->n, job->panel);
    int64_t row_limit = most(1, least(wanted, g->m / (2 * job->ops->rows)));
    int64_t best_tasks = 0;
    double best_cost = 0;
    for (int64_t rows = 1; rows <= row_limit; rows++) {
        int64_t columns = least(panels, most(least_columns, ceil_div(wanted, rows)));
        int64_t tasks = least(wanted, rows * columns);
        double cost = (job->packs_a ? (double)g->m * (double)columns : 0)
                      + (g->b_packed == NULL ? (double)g->n * (double)rows : 0);
        if (tasks > best_tasks || (tasks == best_tasks && cost <= best_cost)) {
            best_tasks = tasks;
            best_cost = cost;
            *row_count_p = rows;
            *column_count_p = columns;
        }
    }
}

static void
job_plan(job_t *job)
{
    const dcp_gemm_args_t *g = job->args;
    int64_t threads = dcp_pool_size(job->pool);
    double work = (double)g->m * (double)g->n * (double)g->k;
    bool alone = threads == 1 || work < PARALLEL_WORK;
    job->k_step = k_block(g->k, job->ops->factors);
    int64_t panels = ceil_div(g->n, job->panel);
    int64_t row_count = 1, column_count = 1;
    if (g->b_packed == NULL) {
        int64_t panel_bytes =
            most(1, words_of(job->ops, job->k_step)) * job->panel * WORD_BYTES;
        column_count = ceil_div(panels, most(1, SLAB_BYTES / panel_bytes));
    }
    if (!alone) {
        bool packs = job->packs_a || g->b_packed == NULL;
        int64_t wanted = threads * (packs ? TASKS_PER_THREAD / 2 : TASKS_PER_THREAD);
        job_cut(job, wanted, column_count, &row_count, &column_count);
    }
    job->task_columns = ceil_div(panels, column_count) * job->panel;
    job->task_rows =
        ceil_div(ceil_div(g->m, row_count), job->ops->rows) * job->ops->rows;
    job->row_tasks = ceil_div(g->m, job->task_rows);
    int64_t step_bytes = words_of(job->ops, job->k_step) * WORD_BYTES;
    job->a_bytes = job->packs_a ? least(CHUNK_ROWS, job->task_rows) * step_bytes : 0;
    job->a_bytes = ceil_div(job->a_bytes, 64) * 64;
    job->b_bytes = g->b_packed == NULL ? job->task_columns * step_bytes : 0;
}

/* One k block of a tile, `depth` elements from k_begin: rows in chunks, so that a
 * packed chunk of A stays near. */
static void
block_rows(const job_t *job, gemm_block_t *block, int64_t row_begin, int64_t row_end,
           int64_t k_begin, int64_t depth, void *a_scratch)
{
    const dcp_gemm_args_t *g = job->args;
    block->kc = words_of(job->ops, depth);
    block->a = a_scratch;
    block->a_stride = block->kc;
    block->a_strips = g->trans_a && depth > 0; /* else a may be NULL */
    float *c = block->c;
    const float *base = block->base;
    for (int64_t row = row_begin; row < row_end; row += CHUNK_ROWS) {
        block->m = least(CHUNK_ROWS, row_end - row);
        if (block->a_strips) {
            job->ops->pack_strips(job->source, block->m, depth,
                                  g->a + k_begin * g->lda + row, g->lda, a_scratch);
        } else if (depth > 0 && job->packs_a) {
            job->ops->pack_rows(block->m, depth, g->a + row * g->lda + k_begin, g->lda,
                                a_scratch);
        } else if (depth > 0) {
            block->a = g->a + row * g->lda + k_begin;
            block->a_stride = g->lda;
        }
        block->c = c + (row - row_begin) * g->ldc;
        block->base = base == NULL ? NULL : base + (row - row_begin) * block->ld_base;
        job->ops->block(block);
    }
}

static dcp_status_t
gemm_task(void *context, int64_t task, int32_t worker)
{
    const job_t *job = context;
    const dcp_gemm_args_t *g = job->args;
    int64_t row = task % job->row_tasks * job->task_rows;
    int64_t column = task / job->row_tasks * job->task_columns;
    int64_t row_end = least(g->m, row + job->task_rows);
    int64_t columns = least(job->task_columns, g->n - column);
    char *scratch = NULL;
    if (job->a_bytes + job->b_bytes > 0) {
        void *memory;
        DCP_TRY(
            dcp_pool_scratch(job->pool, worker, job->a_bytes + job->b_bytes, &memory));
        scratch = memory;
    }
    float *c = g->c + row * g->ldc + column;
    int64_t k = 0;
    do { /* once for k = 0 */
        int64_t depth = least(job->k_step, g->k - k);
        bool first = k == 0 && !g->accumulate;
        gemm_block_t block = {.n = columns, .c = c, .ldc = g->ldc};
        block.base = c;
        block.ld_base = g->ldc;
        if (first) {
            block.base = g->add == NULL ? NULL : g->add + row * g->ld_add + column;
            block.ld_base = g->ld_add;
            block.bias = g->bias == NULL ? NULL : g->bias + column;
        }
        if (g->b_packed != NULL) {
            int64_t words = words_of(job->ops, g->k);
            block.b = (const char *)g->b_packed + column * words * WORD_BYTES;
            block.b_skip = k / job->ops->factors;
            block.panel_stride = job->panel * words;
        } else if (depth > 0) {
            const float *from =
                g->b + (g->trans_b ? column * g->ldb + k : k * g->ldb + column);
            block.b = scratch + job->a_bytes;
            block.panel_stride = job->panel * words_of(job->ops, depth);
            job->ops->pack_b(job->source, columns, depth, from, g->ldb, g->trans_b,
                             block.panel_stride, scratch + job->a_bytes);
        }
        block_rows(job, &block, row, row_end, k, depth, scratch);
        k += depth;
    } while (k < g->k);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_gemm(dcp_pool_t *pool, const dcp_gemm_args_t *args)
{
    DCP_TRY(check_gemm(args));
    if (args->m == 0 || args->n == 0) {
        return DCP_OK;
    }
    job_t job = {.pool = pool, .args = args, .ops = ops_current(args->compute)};
    job.source = args->compute == DCP_BF16 ? SOURCE_ROUND : SOURCE_FLOAT;
    job.packs_a = args->trans_a || args->compute == DCP_BF16;
    job.panel = 2 * job.ops->vector;
    job_plan(&job);
    int64_t column_tasks = ceil_div(args->n, job.task_columns);
    return dcp_pool_run(pool, job.row_tasks * column_tasks, gemm_task, &job);
}

int64_t
dcp_gemm_pack_bytes(int64_t n, int64_t k, dcp_dtype_t compute)
{
    if (n <= 0 || k <= 0) {
        return 0;
    }
    int64_t bytes;
    if (n > INT64_MAX - PACK_ALIGN
        || __builtin_mul_overflow(ceil_div(n, PACK_ALIGN) * PACK_ALIGN,
                                  words_of(ops_current(compute), k), &bytes)
        || __builtin_mul_overflow(bytes, (int64_t)WORD_BYTES, &bytes)) {
        return INT64_MAX; /* no allocator has that */
    }
    return bytes;
}

typedef struct pack_job {
    const dcp_gemm_pack_args_t *args;
    const gemm_ops_t *ops;
    source_t source;
} pack_job_t;

static dcp_status_t
pack_task(void *context, int64_t task, int32_t worker)
{
    (void)worker;
    const pack_job_t *job = context;
    const dcp_gemm_pack_args_t *p = job->args;
    int64_t column = task * PACK_COLUMNS;
    int64_t columns = least(PACK_COLUMNS, p->n - column);
    int64_t first = p->trans_b ? column * p->ldb : column;
    const void *from = p->b_bf16 != NULL ? (const void *)(p->b_bf16 + first)
                                         : (const void *)(p->b + first);
    int64_t words = words_of(job->ops, p->k);
    job->ops->pack_b(job->source, columns, p->k, from, p->ldb, p->trans_b,
                     2 * job->ops->vector * words,
                     (char *)p->packed + column * words * WORD_BYTES);
    return DCP_OK;
}

dcp_status_t
dcp_cpu_gemm_pack(dcp_pool_t *pool, const dcp_gemm_pack_args_t *args)
{
    DCP_TRY(check_size("n", args->n));
    DCP_TRY(check_size("k", args->k));
    DCP_TRY(check_compute(args->compute));
    if (args->b_bf16 != NULL && args->compute != DCP_BF16) {
        return DCP_FAIL(DCP_ERR_ARG, "b_bf16 must be NULL where compute is float32");
    }
    if (args->n == 0 || args->k == 0) {
        return DCP_OK;
    }
    const void *b =
        args->b_bf16 != NULL ? (const void *)args->b_bf16 : (const void *)args->b;
    DCP_TRY(check_matrix(args->b_bf16 != NULL ? "b_bf16" : "b", "ldb", b,
                         args->trans_b ? args->n : args->k,
                         args->trans_b ? args->k : args->n, args->ldb));
    if (args->packed == NULL || (uintptr_t)args->packed % 64 != 0) {
        return DCP_FAIL(DCP_ERR_ARG, "packed %p must be 64-byte aligned memory",
                        args->packed);
    }
    source_t source = args->b_bf16 != NULL        ? SOURCE_BF16
                      : args->compute == DCP_BF16 ? SOURCE_ROUND
                                                  : SOURCE_FLOAT;
    pack_job_t job = {args, ops_current(args->compute), source};
    return dcp_pool_run(pool, ceil_div(args->n, PACK_COLUMNS), pack_task, &job);
}

const char *
dcp_blas_name(void)
{
    return "built-in";
}
