/* a = Q diag(d) Q^T in fp64, root = Q diag((d + ridge)^(-1/4)) Q^T.
 *
 * Eigenvalues of statistics of gradients reach over many powers of ten, and the root
 * weighs the small ones most: an iteration in fp32 would return noise. So: Householder
 * reflections to tridiagonal form, then implicit QL steps with the shift of Wilkinson
 * (Golub & Van Loan, 8.3), until what is off the diagonal is below the rounding of the
 * largest eigenvalue. Everything runs along rows: a reflection is a sum of rows, and
 * vectors are kept as rows of Q^T, so that a rotation touches two of them.
 *
 * The entries of a are divided by their largest first: nothing over- or underflows. The
 * ridge covers what fp32 statistics do not know (2^-24 of the largest) 17 times over.
 * Fourth roots are two square roots, so results do not depend on a libm.
 *
 * Cost: about 2 n^3 + 1.3 n^3 + 5 n^3 flops in vectors of fp64, and one fp32 product.
 */
#include "inverse_root.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_STEPS = 64 /* of QL for one eigenvalue: two are usual */ };
static const double RIDGE = 1e-6;

typedef struct eigen {
    int64_t n;
    double *a;          /* [n, n]; its rows become the reflections */
    double *z;          /* [n, n]; in the end eigenvectors as rows */
    double *d, *e;      /* [n] diagonal, and right of it */
    double *p, *factor; /* [n] */
} eigen_t;

int64_t
optim_inverse_root_scratch(int64_t n)
{
    int64_t bytes = (2 * n * n + 4 * n) * (int64_t)sizeof(double);
    return (bytes + 63) / 64 * 64;
}

static eigen_t
lay_out(int64_t n, void *scratch)
{
    double *at = scratch;
    return (eigen_t){
        .n = n,
        .a = at,
        .z = at + n * n,
        .d = at + 2 * n * n,
        .e = at + 2 * n * n + n,
        .p = at + 2 * n * n + 2 * n,
        .factor = at + 2 * n * n + 3 * n,
    };
}

/* Loads the upper triangle, divided by the largest entry, which is returned; a NaN or
 * infinity if there is one. */
static double
load(eigen_t *x, const float *a, int64_t ld)
{
    double largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < x->n; i++) {
        for (int64_t j = i; j < x->n; j++) {
            double entry = fabs((double)a[i * ld + j]);
            finite = finite && isfinite(entry);
            largest = entry > largest ? entry : largest;
        }
    }
    if (!finite || largest == 0) {
        return finite ? 0 : INFINITY;
    }
    for (int64_t i = 0; i < x->n; i++) {
        for (int64_t j = i; j < x->n; j++) {
            double entry = (double)a[i * ld + j] / largest;
            x->a[i * x->n + j] = x->a[j * x->n + i] = entry;
        }
    }
    return largest;
}

/* y += f x */
static void
add_row(int64_t count, double f, const double *x, double *y)
{
    for (int64_t i = 0; i < count; i++) {
        y[i] += f * x[i];
    }
}

static double
dot(int64_t count, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

/* The reflection that makes x a multiple of its first entry: x becomes v, the multiple
 * is returned, *factor_p gets f of I - f v v^T. */
static double
reflection(int64_t count, double *x, double *factor_p)
{
    double tail = dot(count - 1, x + 1, x + 1), first = x[0];
    *factor_p = 0;
    if (tail == 0) {
        return first;
    }
    double norm = sqrt(first * first + tail);
    double alpha = first > 0 ? -norm : norm;
    x[0] = first - alpha;
    *factor_p = 2 / (x[0] * x[0] + tail);
    return alpha;
}

/* a becomes tridiagonal (d, e); its row k keeps reflection k from element k + 1 on. */
static void
tridiagonalise(eigen_t *x)
{
    int64_t n = x->n;
    for (int64_t k = 0; k < n; k++) {
        x->d[k] = x->a[k * n + k];
        x->e[k] = x->factor[k] = 0;
        int64_t count = n - k - 1;
        if (count == 0) {
            break;
        }
        double *v = x->a + k * n + k + 1, *p = x->p;
        x->e[k] = reflection(count, v, &x->factor[k]);
        double f = x->factor[k];
        if (f == 0) {
            continue;
        }
        double *rest = x->a + (k + 1) * n + k + 1; /* [count, count] with stride n */
        memset(p, 0, (size_t)count * sizeof *p);
        for (int64_t i = 0; i < count; i++) {
            add_row(count, f * v[i], rest + i * n, p);
        }
        add_row(count, -0.5 * f * dot(count, p, v), v, p);
        for (int64_t i = 0; i < count; i++) {
            double vi = v[i], pi = p[i], *row = rest + i * n;
            for (int64_t j = 0; j < count; j++) {
                row[j] -= vi * p[j] + pi * v[j];
            }
        }
    }
}

/* z = Q^T, Q the product of the reflections. */
static void
accumulate(eigen_t *x)
{
    int64_t n = x->n;
    memset(x->z, 0, (size_t)(n * n) * sizeof *x->z);
    for (int64_t i = 0; i < n; i++) {
        x->z[i * n + i] = 1;
    }
    for (int64_t k = n - 2; k >= 0; k--) {
        int64_t count = n - k - 1;
        const double *v = x->a + k * n + k + 1;
        double f = x->factor[k], *part = x->z + (k + 1) * n + k + 1, *p = x->p;
        if (f == 0) {
            continue;
        }
        memset(p, 0, (size_t)count * sizeof *p);
        for (int64_t i = 0; i < count; i++) {
            add_row(count, f * v[i], part + i * n, p);
        }
        for (int64_t i = 0; i < count; i++) {
            add_row(count, -v[i], p, part + i * n);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            double other = x->z[i * n + j];
            x->z[i * n + j] = x->z[j * n + i];
            x->z[j * n + i] = other;
        }
    }
}

/* Rows i and i + 1 of z. */
static void
rotate(eigen_t *x, int64_t i, double c, double s)
{
    double *upper = x->z + i * x->n, *lower = upper + x->n;
    for (int64_t k = 0; k < x->n; k++) {
        double u = upper[k], l = lower[k];
        upper[k] = c * u - s * l;
        lower[k] = s * u + c * l;
    }
}

/* One implicit step on rows first..last, from the bottom to the top. */
static void
ql_step(eigen_t *x, int64_t first, int64_t last)
{
    double *d = x->d, *e = x->e;
    double half = (d[first + 1] - d[first]) / (2 * e[first]);
    double far = sqrt(half * half + 1);
    double g = d[last] - d[first] + e[first] / (half + (half < 0 ? -far : far));
    double s = 1, c = 1, shift = 0;
    for (int64_t i = last - 1; i >= first; i--) {
        double f = s * e[i], b = c * e[i], r = sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0) { /* it falls apart here */
            d[i + 1] -= shift;
            e[last] = 0;
            return;
        }
        s = f / r;
        c = g / r;
        g = d[i + 1] - shift;
        r = (d[i] - g) * s + 2 * c * b;
        shift = s * r;
        d[i + 1] = g + shift;
        g = c * r - b;
        rotate(x, i, c, s);
    }
    d[first] -= shift;
    e[first] = g;
    e[last] = 0;
}

/* d becomes the eigenvalues; false where steps do not end. */
static bool
diagonalise(eigen_t *x)
{
    double norm = 0;
    for (int64_t i = 0; i < x->n; i++) {
        double row = fabs(x->d[i]) + fabs(x->e[i]);
        norm = row > norm ? row : norm;
    }
    const double negligible = 0x1p-52 * norm;
    for (int64_t first = 0; first < x->n; first++) {
        for (int32_t steps = 0;; steps++) {
            int64_t last = first;
            while (last < x->n - 1 && fabs(x->e[last]) > negligible) {
                last++;
            }
            if (last == first) {
                break;
            }
            if (steps == MOST_STEPS) {
                return false;
            }
            ql_step(x, first, last);
        }
    }
    return true;
}

/* root = Y^T Y, rows of Y [n, n]: eigenvectors times the eighth root of what they
 * weigh. Y lies where a was. */
static dcp_status_t
product(const dcp_device_ops_t *device, dcp_queue_t *queue, const eigen_t *x,
        double largest, float *root, int64_t ld)
{
    int64_t n = x->n;
    float *y = (float *)(void *)x->a;
    double top = 0;
    for (int64_t i = 0; i < n; i++) {
        top = x->d[i] > top ? x->d[i] : top;
    }
    for (int64_t i = 0; i < n; i++) {
        double value = ((x->d[i] > 0 ? x->d[i] : 0) + RIDGE * top) * largest;
        double factor = 1 / sqrt(sqrt(sqrt(value)));
        for (int64_t k = 0; k < n; k++) {
            y[i * n + k] = (float)(factor * x->z[i * n + k]);
        }
    }
    dcp_gemm_args_t args = {
        .m = n,
        .n = n,
        .k = n,
        .a = y,
        .lda = n,
        .trans_a = 1,
        .b = y,
        .ldb = n,
        .c = root,
        .ldc = ld,
    };
    DCP_TRY(device->gemm(queue, &args));
    return device->fence(queue);
}

dcp_status_t
optim_inverse_root(const dcp_device_ops_t *device, dcp_queue_t *queue, int64_t n,
                   const float *a, float *root, int64_t ld, void *scratch)
{
    eigen_t x = lay_out(n, scratch);
    double largest = load(&x, a, ld);
    if (largest == 0) {
        for (int64_t i = 0; i < n * n; i++) {
            root[i / n * ld + i % n] = i / n == i % n ? 1.0f : 0.0f;
        }
        return DCP_OK;
    }
    if (isfinite(largest)) {
        tridiagonalise(&x);
        accumulate(&x);
    }
    if (!isfinite(largest) || !diagonalise(&x)) {
        return DCP_FAIL(DCP_ERR_NUMERIC,
                        "no eigenvalues of a %" PRId64 " x %" PRId64
                        " matrix: not finite numbers",
                        n, n);
    }
    return product(device, queue, &x, largest, root, ld);
}
