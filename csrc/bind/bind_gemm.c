/* The matrix product on arrays, for tests and benchmarks: `gemm` and `gemm_pack`. Rows
 * may be strided (a slice of columns); columns must be dense. bf16 numbers are uint16
 * arrays of their bits. */
#include "bind.h"

#include "dcp/kernels.h"

int
bind_compute(const char *name, dcp_dtype_t *compute_p)
{
    for (int i = 0; i < 2; i++) {
        dcp_dtype_t dtype = i == 0 ? DCP_F32 : DCP_BF16;
        if (strcmp(name, dcp_dtype_name(dtype)) == 0) {
            *compute_p = dtype;
            return 0;
        }
    }
    bind_raise(DCP_FAIL(DCP_ERR_ARG,
                        "compute \"%s\" must be \"float32\" or "
                        "\"bfloat16\"",
                        name));
    return -1;
}

/* A 2-D array whose rows are dense, borrowed: its shape and row stride. */
typedef struct matrix {
    void *data;
    int64_t rows, columns, stride;
} matrix_t;

static int
matrix_read_type(PyObject *object, int type_num, const char *what, int writable,
                 matrix_t *matrix_p)
{
    PyArrayObject *array = (PyArrayObject *)object;
    const npy_intp item = type_num == NPY_FLOAT32 ? 4 : 2;
    int fits = PyArray_Check(object) && PyArray_TYPE(array) == type_num
               && PyArray_NDIM(array) == 2 && PyArray_ISBEHAVED_RO(array)
               && (!writable || PyArray_ISWRITEABLE(array));
    if (fits) {
        matrix_p->data = PyArray_DATA(array);
        matrix_p->rows = PyArray_DIM(array, 0);
        matrix_p->columns = PyArray_DIM(array, 1);
        matrix_p->stride = PyArray_STRIDE(array, 0) / item;
        if (matrix_p->rows <= 1 || matrix_p->columns == 0) {
            matrix_p->stride = matrix_p->columns; /* NumPy's then means nothing */
        } else {
            fits = PyArray_STRIDE(array, 0) > 0 && PyArray_STRIDE(array, 0) % item == 0;
        }
        fits = fits
               && (matrix_p->columns <= 1 || matrix_p->rows == 0
                   || PyArray_STRIDE(array, 1) == item);
    }
    if (!fits) {
        PyErr_Format(PyExc_TypeError, "%s must be a %s2-D %s array of dense rows", what,
                     writable ? "writable " : "",
                     type_num == NPY_FLOAT32 ? "float32" : "uint16");
        return -1;
    }
    return 0;
}

static int
matrix_read(PyObject *object, const char *what, int writable, matrix_t *matrix_p)
{
    return matrix_read_type(object, NPY_FLOAT32, what, writable, matrix_p);
}

PyDoc_STRVAR(
    gemm_doc,
    "gemm(a, b, c, *, trans_a=False, trans_b=False, accumulate=False, add=None, "
    "bias=None, packed=None, compute='float32')\n--\n\n"
    "c = op(a) op(b) [+ add] [+ bias] or c += op(a) op(b), in place.\n\n"
    "2-D float32 arrays with dense rows. `packed` is gemm_pack(b, trans_b=trans_b, "
    "compute=compute); b then gives only the shape. compute='bfloat16' rounds a and "
    "b.");

static PyObject *
gemm(PyObject *module, PyObject *positional, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"a",   "b",    "c",      "trans_a", "trans_b", "accumulate",
                            "add", "bias", "packed", "compute", NULL};
    PyObject *a, *b, *c, *add = Py_None, *bias = Py_None, *packed = Py_None;
    int trans_a = 0, trans_b = 0, accumulate = 0;
    const char *compute_name = "float32";
    dcp_dtype_t compute;
    matrix_t ma, mb, mc, m_add = {0};
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "OOO|$pppOOOs:gemm", names,
                                     &a, &b, &c, &trans_a, &trans_b, &accumulate, &add,
                                     &bias, &packed, &compute_name)
        || bind_compute(compute_name, &compute) < 0 || matrix_read(a, "a", 0, &ma) < 0
        || matrix_read(b, "b", 0, &mb) < 0 || matrix_read(c, "c", 1, &mc) < 0
        || (add != Py_None && matrix_read(add, "add", 0, &m_add) < 0)) {
        return NULL;
    }
    int64_t k = trans_a ? ma.rows : ma.columns;
    int64_t m = trans_a ? ma.columns : ma.rows;
    int64_t n = trans_b ? mb.rows : mb.columns;
    if (k != (trans_b ? mb.columns : mb.rows) || m != mc.rows || n != mc.columns
        || (add != Py_None && (m_add.rows != m || m_add.columns != n))) {
        PyErr_SetString(PyExc_ValueError, "shapes of a, b, c and add do not match");
        return NULL;
    }
    PyArrayObject *bias_array = NULL, *packed_array = NULL;
    PyObject *result = NULL;
    dcp_pool_t *pool = bind_pool();
    if (pool == NULL) {
        return NULL;
    }
    if (bias != Py_None) {
        bias_array = bind_array(bias, NPY_FLOAT32, 1, "bias");
        if (bias_array == NULL) {
            goto done;
        }
        if (PyArray_DIM(bias_array, 0) != n) {
            PyErr_SetString(PyExc_ValueError, "bias must have the columns of c");
            goto done;
        }
    }
    if (packed != Py_None) {
        packed_array = bind_array(packed, NPY_FLOAT32, 1, "packed");
        if (packed_array == NULL) {
            goto done;
        }
        if (PyArray_NBYTES(packed_array) < dcp_gemm_pack_bytes(n, k, compute)) {
            PyErr_SetString(PyExc_ValueError, "packed is not a gemm_pack of this b");
            goto done;
        }
    }
    dcp_gemm_args_t args = {
        .m = m,
        .n = n,
        .k = k,
        .a = ma.data,
        .lda = ma.stride,
        .b = mb.data,
        .ldb = mb.stride,
        .b_packed = packed_array != NULL ? PyArray_DATA(packed_array) : NULL,
        .c = mc.data,
        .ldc = mc.stride,
        .add = m_add.data,
        .ld_add = m_add.stride,
        .bias = bias_array != NULL ? PyArray_DATA(bias_array) : NULL,
        .trans_a = trans_a,
        .trans_b = trans_b,
        .accumulate = accumulate,
        .compute = compute,
    };
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_cpu_gemm(pool, &args));
    result = status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
done:
    Py_XDECREF(bias_array);
    Py_XDECREF(packed_array);
    return result;
}

PyDoc_STRVAR(gemm_pack_doc,
             "gemm_pack(b, *, trans_b=False, compute='float32')\n--\n\n"
             "Panels of op(b) for the instruction set in use, as a 1-D float32 array "
             "(of bytes, whatever they hold). b may be uint16, bits of bf16 numbers, "
             "where compute is 'bfloat16'.");

/* A 64-byte aligned 1-D fp32 array: a slice of a longer one. */
static PyArrayObject *
aligned_array(int64_t bytes)
{
    npy_intp count = (npy_intp)(bytes / 4);
    npy_intp longer = count + 16;
    PyObject *whole = PyArray_ZEROS(1, &longer, NPY_FLOAT32, 0);
    if (whole == NULL) {
        return NULL;
    }
    char *data = PyArray_DATA((PyArrayObject *)whole);
    data += (64 - (uintptr_t)data % 64) % 64;
    PyObject *array = PyArray_SimpleNewFromData(1, &count, NPY_FLOAT32, data);
    if (array == NULL) {
        Py_DECREF(whole);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, whole) < 0) { /* takes whole */
        Py_DECREF(array);
        return NULL;
    }
    return (PyArrayObject *)array;
}

static PyObject *
gemm_pack(PyObject *module, PyObject *positional, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"b", "trans_b", "compute", NULL};
    PyObject *b;
    int trans_b = 0;
    const char *compute_name = "float32";
    dcp_dtype_t compute;
    matrix_t mb;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "O|$ps:gemm_pack", names, &b,
                                     &trans_b, &compute_name)
        || bind_compute(compute_name, &compute) < 0) {
        return NULL;
    }
    int is_bf16 = PyArray_Check(b) && PyArray_TYPE((PyArrayObject *)b) == NPY_UINT16;
    if (matrix_read_type(b, is_bf16 ? NPY_UINT16 : NPY_FLOAT32, "b", 0, &mb) < 0) {
        return NULL;
    }
    dcp_pool_t *pool = bind_pool();
    if (pool == NULL) {
        return NULL;
    }
    dcp_gemm_pack_args_t args = {
        .n = trans_b ? mb.rows : mb.columns,
        .k = trans_b ? mb.columns : mb.rows,
        .b = is_bf16 ? NULL : mb.data,
        .b_bf16 = is_bf16 ? mb.data : NULL,
        .ldb = mb.stride,
        .trans_b = trans_b,
        .compute = compute,
    };
    PyArrayObject *packed = aligned_array(dcp_gemm_pack_bytes(args.n, args.k, compute));
    if (packed == NULL) {
        return NULL;
    }
    args.packed = PyArray_DATA(packed);
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_cpu_gemm_pack(pool, &args));
    if (status != DCP_OK) {
        Py_DECREF(packed);
        return bind_raise(status);
    }
    return (PyObject *)packed;
}

static PyMethodDef gemm_methods[] = {
    {"gemm", (PyCFunction)(void (*)(void))gemm, METH_VARARGS | METH_KEYWORDS, gemm_doc},
    {"gemm_pack", (PyCFunction)(void (*)(void))gemm_pack, METH_VARARGS | METH_KEYWORDS,
     gemm_pack_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_gemm_register(PyObject *module)
{
    return PyModule_AddFunctions(module, gemm_methods);
}
