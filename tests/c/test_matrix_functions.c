/* optim: what optimizers of matrices are made of - Newton-Schulz, inverse roots, owners
 * and rounds - each against what is known exactly. */
#include "check.h"

#include "optim/inverse_root.h"
#include "optim/newton_schulz.h"
#include "optim/owners.h"

#include "dcp/rng.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { RANK_SLOTS = 6, TENSOR_SLOTS = 10 };

static float
value_at(uint64_t seed, int64_t stream, int64_t element)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, seed, (uint64_t)stream << 40 | (uint64_t)element);
    return (float)dcp_rng_normal(&rng);
}

/* Singular values as the iteration maps them. */
static double
quintic(double s, int32_t iterations)
{
    for (int32_t i = 0; i < iterations; i++) {
        s = s * (3.4445 - 4.7750 * s * s + 2.0315 * s * s * s * s);
    }
    return s;
}

static void
run_newton_schulz(int64_t rows, int64_t columns, float *x)
{
    dcp_pool_t *pool;
    dcp_queue_t *queue;
    void *scratch;
    CHECK_OK(dcp_pool_create(2, &pool));
    CHECK_OK(dcp_device_cpu()->queue_create(pool, &queue));
    CHECK_OK(
        dcp_alloc(optim_newton_schulz_scratch(rows, columns) * 4, "test", &scratch));
    CHECK_OK(
        optim_newton_schulz(dcp_device_cpu(), queue, rows, columns, 5, x, scratch));
    dcp_free(scratch);
    dcp_device_cpu()->queue_destroy(queue);
    dcp_pool_destroy(pool);
}

/* Of D = diag(s) between two Householder reflections the result is known exactly. */
static void
test_newton_schulz(void)
{
    static float x[600 * 600];
    static double u[600], v[600];
    const int64_t shapes[][2] = {{2, 2},     {1, 40},    {40, 1},   {30, 50},
                                 {500, 210}, {210, 599}, {599, 599}};
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        int64_t rows = shapes[n][0], columns = shapes[n][1];
        int64_t least = rows < columns ? rows : columns;
        double uu = 0, vv = 0, norm = 0, worst = 0;
        for (int64_t i = 0; i < rows; i++) {
            u[i] = value_at(3, 0, i);
            uu += u[i] * u[i];
        }
        for (int64_t i = 0; i < columns; i++) {
            v[i] = value_at(4, 0, i);
            vv += v[i] * v[i];
        }
        for (int64_t i = 0; i < least; i++) {
            double s = 1 + (double)(i % 7);
            norm += s * s;
        }
        norm = sqrt(norm);
        for (int pass = 0; pass < 2; pass++) {
            /* (I - 2 u u^T / uu) D (I - 2 v v^T / vv), entry by entry */
            double vd = 0, ud = 0, udv = 0;
            for (int64_t i = 0; i < least; i++) {
                double s = 1 + (double)(i % 7);
                udv += u[i] * v[i] * (pass == 0 ? s : quintic(s / norm, 5));
            }
            for (int64_t i = 0; i < rows; i++) {
                double si = 1 + (double)(i % 7);
                si = i >= least ? 0 : pass == 0 ? si : quintic(si / norm, 5);
                vd = si * v[i < columns ? i : 0];
                for (int64_t j = 0; j < columns; j++) {
                    double sj = 1 + (double)(j % 7);
                    sj = j >= least ? 0 : pass == 0 ? sj : quintic(sj / norm, 5);
                    ud = u[j < rows ? j : 0] * sj;
                    double entry = (i == j ? si : 0) - 2 * u[i] * ud / uu
                                   - 2 * vd * v[j] / vv
                                   + 4 * u[i] * udv * v[j] / (uu * vv);
                    if (pass == 0) {
                        x[i * columns + j] = (float)entry;
                    } else {
                        double error = fabs(x[i * columns + j] - entry);
                        worst = error > worst ? error : worst;
                    }
                }
            }
            if (pass == 0) {
                run_newton_schulz(rows, columns, x);
            }
        }
        CHECK(worst < 5e-5); /* small singular values grow 480-fold, so does rounding */
    }
}

/* case O-05 */
static void
test_known_matrix(void)
{
    float x[] = {1, 0, 1, 0}, row[] = {1, 0};
    run_newton_schulz(2, 2, x);
    run_newton_schulz(1, 2, row);
    CHECK(fabs(row[0] - 0.69644) < 1e-5 && row[1] == 0);
    CHECK(fabs(x[0] - 0.49245) < 1e-5 && fabs(x[2] - 0.49245) < 1e-5);
    CHECK(fabs(x[0] / row[0] - sqrt(0.5)) < 1e-6);
    float zero[6] = {0};
    run_newton_schulz(2, 3, zero);
    CHECK(zero[0] == 0 && zero[5] == 0);
}

static dcp_status_t
run_inverse_root(int64_t n, const float *a, float *root)
{
    dcp_pool_t *pool;
    dcp_queue_t *queue;
    void *scratch;
    CHECK_OK(dcp_pool_create(1, &pool));
    CHECK_OK(dcp_device_cpu()->queue_create(pool, &queue));
    CHECK_OK(dcp_alloc(optim_inverse_root_scratch(n), "test", &scratch));
    dcp_status_t status =
        optim_inverse_root(dcp_device_cpu(), queue, n, a, root, n, scratch);
    dcp_free(scratch);
    dcp_device_cpu()->queue_destroy(queue);
    dcp_pool_destroy(pool);
    return status;
}

/* x x^T in fp64 */
static void
square_of(int64_t n, int64_t k, const float *x, double *out)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++) {
                sum += (double)x[i * k + l] * (double)x[j * k + l];
            }
            out[i * n + j] = sum;
        }
    }
}

/* root^4 (a + ridge I) = I, for statistics of full rank. */
static void
test_inverse_root(void)
{
    static float x[96 * 200], a[96 * 96], root[96 * 96];
    static double gram[96 * 96], second[96 * 96], product[96 * 96];
    const int64_t sizes[] = {1, 2, 3, 7, 32, 96};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t n = sizes[s];
        for (int64_t i = 0; i < n * 200; i++) {
            x[i] = value_at(5, n, i) * 1e-4f;
        }
        square_of(n, 200, x, gram);
        for (int64_t i = 0; i < n * n; i++) {
            a[i] = (float)gram[i];
        }
        CHECK_OK(run_inverse_root(n, a, root));
        square_of(n, n, root, gram); /* of a symmetric matrix */
        float narrow[96 * 96];
        for (int64_t i = 0; i < n * n; i++) {
            narrow[i] = (float)gram[i];
        }
        square_of(n, n, narrow, second);
        double worst = 0;
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                product[i * n + j] = 0;
                for (int64_t k = 0; k < n; k++) {
                    product[i * n + j] += second[i * n + k] * (double)a[k * n + j];
                }
                double error = fabs(product[i * n + j] - (i == j));
                worst = error > worst ? error : worst;
            }
        }
        CHECK(worst < 1e-4);
    }
}

/* Zero, of rank 1, with entries that are no numbers. */
static void
test_inverse_root_limits(void)
{
    enum { N = 20 };
    float a[N * N] = {0}, root[N * N];
    CHECK_OK(run_inverse_root(N, a, root));
    CHECK(root[0] == 1 && root[1] == 0 && root[N * N - 1] == 1);
    for (int64_t i = 0; i < N * N; i++) {
        a[i] = (float)((i / N + 1) * (i % N + 1)); /* u u^T, |u|^2 = 2870 */
    }
    CHECK_OK(run_inverse_root(N, a, root));
    double along = 0, ridge = 2870e-6;
    for (int64_t i = 0; i < N * N; i++) {
        along += root[i] * (double)((i / N + 1) * (i % N + 1)) / 2870;
    }
    CHECK(fabs(along / pow(2870 + ridge, -0.25) - 1) < 1e-4);
    /* across, where only the ridge is: a vector orthogonal to u */
    double across = (4 * root[0] - 4 * root[1] + root[N + 1]) / 5;
    CHECK(fabs(across / pow(ridge, -0.25) - 1) < 1e-3);
    a[3] = INFINITY;
    CHECK(run_inverse_root(N, a, root) == DCP_ERR_NUMERIC);
    a[3] = NAN;
    CHECK(run_inverse_root(N, a, root) == DCP_ERR_NUMERIC);
}

static bool
cut_whole(const dcp_optimizer_tensor_t *tensor, int64_t unit, optim_unit_t *unit_p)
{
    unit_p->rows = tensor->shape[0];
    unit_p->columns = tensor->shape[1];
    unit_p->first = 0;
    unit_p->count = unit_p->rows * unit_p->columns;
    unit_p->cost = (double)unit_p->count;
    return unit == 0;
}

/* Every unit has one owner; loads differ by no more than the dearest; rounds are full
 * and within bounds. */
static void
test_owners(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 11, 0);
    for (int n = 0; n < 40; n++) {
        int64_t tensor_count = 1 + (int64_t)dcp_rng_below(&rng, TENSOR_SLOTS);
        dcp_optimizer_tensor_t tensors[TENSOR_SLOTS];
        dcp_dbuffer_tensor_t buffers[TENSOR_SLOTS];
        int64_t members[TENSOR_SLOTS];
        double loads[RANK_SLOTS] = {0}, most = 0, dearest = 0, total = 0;
        for (int64_t t = 0; t < tensor_count; t++) {
            int64_t rows = 1 + (int64_t)dcp_rng_below(&rng, 900);
            int64_t columns = 1 + (int64_t)dcp_rng_below(&rng, 900);
            tensors[t] =
                (dcp_optimizer_tensor_t){.dim_count = 2, .shape = {rows, columns}};
            buffers[t] =
                (dcp_dbuffer_tensor_t){.row_count = rows, .row_width = columns};
            members[t] = t;
        }
        int32_t size = 1 + (int32_t)dcp_rng_below(&rng, RANK_SLOTS);
        dcp_dbuffer_layout_t *layout;
        optim_owners_t owners;
        CHECK_OK(dcp_dbuffer_layout_create(buffers, tensor_count, size, 1,
                                           DCP_ORDER_MODEL, &layout));
        CHECK_OK(optim_owners_init(&owners, layout, size, tensors, members,
                                   tensor_count, cut_whole, n % 2));
        CHECK(owners.unit_count == tensor_count);
        int64_t held = 0, wrong = 0;
        for (int64_t u = 0; u < owners.unit_count; u++) {
            const optim_unit_t *unit = &owners.units[u];
            loads[unit->owner] += unit->cost;
            total += unit->cost;
            dearest = unit->cost > dearest ? unit->cost : dearest;
            wrong += unit->place + unit->count > owners.slabs[unit->owner];
            wrong += unit->round < 0 || unit->round >= owners.round_count;
            int64_t next = unit->first;
            for (int64_t p = owners.piece_firsts[u]; p < owners.piece_firsts[u + 1];
                 p++) {
                const optim_piece_t *piece = &owners.pieces[p];
                wrong += piece->unit != u || piece->first != next;
                wrong += (piece->place < 0) != (piece->rank == unit->owner);
                wrong += piece->place + piece->count > owners.stages[piece->rank]
                         && piece->place >= 0;
                next += piece->count;
                held += piece->count;
            }
            wrong += next != unit->first + unit->count;
        }
        for (int32_t rank = 0; rank < size; rank++) {
            most = loads[rank] > most ? loads[rank] : most;
            wrong += owners.slabs[rank] > (1 << 20);
            wrong += owners.stages[rank] > (1 << 20) && n % 2;
        }
        CHECK(wrong == 0);
        CHECK(held == (int64_t)total);
        CHECK(most <= total / size + dearest);
        CHECK(fabs(owners.imbalance - (most * size / total - 1)) < 1e-9);
        optim_owners_fini(&owners);
        dcp_dbuffer_layout_destroy(layout);
    }
}

int
main(void)
{
    test_newton_schulz();
    test_known_matrix();
    test_inverse_root();
    test_inverse_root_limits();
    test_owners();
    return check_finish();
}
