/* dcp.ops in C, the part for gradients that travel: quantise, dequantise, sketch. */
#include "bind.h"

#include "dcp/kernels.h"

#include <inttypes.h>

/* 64 bits without a sign; else a dcp.ArgumentError. 0, or -1 with an exception. */
static int
read_word(PyObject *object, const char *what, uint64_t *value_p)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) {
        return -1;
    }
    *value_p = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        PyObject *text = PyObject_Str(number);
        const char *digits = text != NULL ? PyUnicode_AsUTF8(text) : NULL;
        PyErr_Clear();
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s %s must lie in 0..2^64-1", what,
                            digits != NULL ? digits : "?"));
        Py_XDECREF(text);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    return 0;
}

static int
overlaps(PyArrayObject *a, PyArrayObject *b)
{
    uintptr_t a_at = (uintptr_t)PyArray_DATA(a), b_at = (uintptr_t)PyArray_DATA(b);
    return a_at < b_at + (uintptr_t)PyArray_NBYTES(b)
           && b_at < a_at + (uintptr_t)PyArray_NBYTES(a);
}

/* A new reference in *residual_p where one is given. */
static int
read_residual(PyObject *object, PyArrayObject *x, PyArrayObject **residual_p)
{
    *residual_p = NULL;
    if (object == Py_None) {
        return 0;
    }
    PyArrayObject *residual = bind_array_writable(object, NPY_FLOAT32, -1, "residual");
    if (residual == NULL) {
        return -1;
    }
    if (PyArray_SIZE(residual) != PyArray_SIZE(x)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "residual holds %zd elements, must hold %zd as x",
                            (ssize_t)PyArray_SIZE(residual), (ssize_t)PyArray_SIZE(x)));
        Py_DECREF(residual);
        return -1;
    }
    if (overlaps(residual, x)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "residual must not share memory with x"));
        Py_DECREF(residual);
        return -1;
    }
    *residual_p = residual;
    return 0;
}

PyDoc_STRVAR(quantise_doc,
             "quantise(x, precision, seed, stream, first, nearest, hadamard, residual)"
             "\n--\n\n"
             "Codes of x in a precision. See dcp.ops.quantise.");

static PyObject *
ops_quantise(PyObject *module, PyObject *positional)
{
    (void)module;
    PyObject *x_object, *seed, *stream, *residual_object;
    const char *precision;
    long long first;
    int nearest, hadamard;
    dcp_quantise_args_t args = {0};
    dcp_status_t status = DCP_OK;
    if (!PyArg_ParseTuple(positional, "OsOOLppO:quantise", &x_object, &precision, &seed,
                          &stream, &first, &nearest, &hadamard, &residual_object)
        || read_word(seed, "seed", &args.seed) < 0
        || read_word(stream, "stream", &args.stream) < 0) {
        return NULL;
    }
    status = dcp_precision_parse(precision, &args.precision);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    PyArrayObject *x = bind_array(x_object, NPY_FLOAT32, -1, "x");
    PyArrayObject *residual = NULL, *codes = NULL;
    if (x == NULL || read_residual(residual_object, x, &residual) < 0) {
        goto fail;
    }
    args.count = PyArray_SIZE(x);
    npy_intp bytes = (npy_intp)dcp_precision_bytes(args.precision, args.count);
    dcp_pool_t *pool = bind_pool();
    codes =
        pool != NULL ? (PyArrayObject *)PyArray_SimpleNew(1, &bytes, NPY_UINT8) : NULL;
    if (codes == NULL) {
        goto fail;
    }
    args.x = PyArray_DATA(x);
    args.residual = residual != NULL ? PyArray_DATA(residual) : NULL;
    args.codes = PyArray_DATA(codes);
    args.hadamard = hadamard;
    args.nearest = nearest;
    args.first = first;
    BIND_COMPUTE(status, dcp_cpu_quantise(pool, &args));
    if (status != DCP_OK) {
        bind_raise(status);
        goto fail;
    }
    Py_DECREF(x);
    Py_XDECREF(residual);
    return (PyObject *)codes;
fail:
    Py_XDECREF(x);
    Py_XDECREF(residual);
    Py_XDECREF(codes);
    return NULL;
}

PyDoc_STRVAR(dequantise_doc,
             "dequantise(codes, count, precision, seed, hadamard)\n--\n\n"
             "What codes hold. See dcp.ops.dequantise.");

static PyObject *
ops_dequantise(PyObject *module, PyObject *positional)
{
    (void)module;
    PyObject *codes_object, *seed;
    const char *precision;
    long long count;
    int hadamard;
    dcp_dequantise_args_t args = {0};
    if (!PyArg_ParseTuple(positional, "OLsOp:dequantise", &codes_object, &count,
                          &precision, &seed, &hadamard)
        || read_word(seed, "seed", &args.seed) < 0) {
        return NULL;
    }
    dcp_status_t status = dcp_precision_parse(precision, &args.precision);
    if (status == DCP_OK && count < 0) {
        status = DCP_FAIL(DCP_ERR_ARG, "count %lld must not be negative", count);
    }
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    PyArrayObject *codes = bind_array(codes_object, NPY_UINT8, 1, "codes"), *out = NULL;
    if (codes == NULL) {
        return NULL;
    }
    args.count = count;
    int64_t bytes = dcp_precision_bytes(args.precision, args.count);
    if (PyArray_SIZE(codes) != bytes) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "codes holds %zd bytes, must hold %" PRId64
                            " for %lld elements in %s",
                            (ssize_t)PyArray_SIZE(codes), bytes, count, precision));
        goto fail;
    }
    npy_intp shape = (npy_intp)count;
    dcp_pool_t *pool = bind_pool();
    out = pool != NULL ? (PyArrayObject *)PyArray_SimpleNew(1, &shape, NPY_FLOAT32)
                       : NULL;
    if (out == NULL) {
        goto fail;
    }
    args.codes = PyArray_DATA(codes);
    args.hadamard = hadamard;
    args.out = PyArray_DATA(out);
    BIND_COMPUTE(status, dcp_cpu_dequantise(pool, &args));
    if (status != DCP_OK) {
        bind_raise(status);
        goto fail;
    }
    Py_DECREF(codes);
    return (PyObject *)out;
fail:
    Py_DECREF(codes);
    Py_XDECREF(out);
    return NULL;
}

PyDoc_STRVAR(sketch_doc, "sketch(x, seed, first)\n--\n\n"
                         "Linear sketch of x: float64 [1024]. See dcp.ops.sketch.");

static PyObject *
ops_sketch(PyObject *module, PyObject *positional)
{
    (void)module;
    PyObject *x_object, *seed;
    long long first;
    dcp_sketch_args_t args = {0};
    if (!PyArg_ParseTuple(positional, "OOL:sketch", &x_object, &seed, &first)
        || read_word(seed, "seed", &args.seed) < 0) {
        return NULL;
    }
    PyArrayObject *x = bind_array(x_object, NPY_FLOAT32, -1, "x"), *sums = NULL;
    npy_intp buckets = DCP_SKETCH_BUCKETS;
    dcp_pool_t *pool = x != NULL ? bind_pool() : NULL;
    if (pool != NULL) {
        sums = (PyArrayObject *)PyArray_ZEROS(1, &buckets, NPY_FLOAT64, 0);
    }
    if (sums != NULL) {
        args.count = PyArray_SIZE(x);
        args.x = PyArray_DATA(x);
        args.first = first;
        args.sums = PyArray_DATA(sums);
        dcp_status_t status;
        BIND_COMPUTE(status, dcp_cpu_sketch(pool, &args));
        if (status != DCP_OK) {
            bind_raise(status);
            Py_CLEAR(sums);
        }
    }
    Py_XDECREF(x);
    return (PyObject *)sums;
}

static PyMethodDef quantise_methods[] = {
    {"quantise", ops_quantise, METH_VARARGS, quantise_doc},
    {"dequantise", ops_dequantise, METH_VARARGS, dequantise_doc},
    {"sketch", ops_sketch, METH_VARARGS, sketch_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_quantise_register(PyObject *module)
{
    return PyModule_AddFunctions(module, quantise_methods);
}
