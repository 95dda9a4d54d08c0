/* dcp.ops in C: operations on NumPy arrays. Converts and checks shapes (every message
 * names the argument), allocates the results, makes one core call without the GIL. */
#include "bind.h"

#include "dcp/kernels.h"

#include <inttypes.h>

/* The arrays of a call; all references owned. */
typedef struct attention_arrays {
    PyArrayObject *q, *k, *v;
    PyArrayObject *offsets, *key_offsets; /* int64; key_offsets NULL: none given */
    PyArrayObject *out, *lse;
    PyArrayObject *dout, *dq, *dk, *dv; /* backward */
} attention_arrays_t;

static void
arrays_release(attention_arrays_t *a)
{
    Py_XDECREF(a->q);
    Py_XDECREF(a->k);
    Py_XDECREF(a->v);
    Py_XDECREF(a->offsets);
    Py_XDECREF(a->key_offsets);
    Py_XDECREF(a->out);
    Py_XDECREF(a->lse);
    Py_XDECREF(a->dout);
    Py_XDECREF(a->dq);
    Py_XDECREF(a->dk);
    Py_XDECREF(a->dv);
}

static int
check_shape(PyArrayObject *array, const char *what, const npy_intp *shape)
{
    int same = 1;
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        same = same && PyArray_DIM(array, i) == shape[i];
    }
    if (same) {
        return 0;
    }
    PyObject *got = PyObject_GetAttrString((PyObject *)array, "shape");
    PyObject *wanted = PyArray_NDIM(array) == 2
                           ? Py_BuildValue("(nn)", shape[0], shape[1])
                           : Py_BuildValue("(nnn)", shape[0], shape[1], shape[2]);
    const char *got_text = "?", *wanted_text = "?";
    PyObject *got_str = got != NULL ? PyObject_Str(got) : NULL;
    PyObject *wanted_str = wanted != NULL ? PyObject_Str(wanted) : NULL;
    if (got_str != NULL && wanted_str != NULL) {
        got_text = PyUnicode_AsUTF8(got_str);
        wanted_text = PyUnicode_AsUTF8(wanted_str);
    }
    PyErr_Clear();
    bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s has shape %s, must have %s", what, got_text,
                        wanted_text));
    Py_XDECREF(got);
    Py_XDECREF(wanted);
    Py_XDECREF(got_str);
    Py_XDECREF(wanted_str);
    return -1;
}

static int
convert_offsets(attention_arrays_t *a, PyObject *offsets, PyObject *key_offsets)
{
    a->offsets = bind_integers(offsets, NPY_INT64, "offsets");
    if (a->offsets == NULL) {
        return -1;
    }
    npy_intp count = PyArray_SIZE(a->offsets);
    if (count < 1) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "offsets is empty, must hold at least the 0 at "
                            "which the first sequence begins"));
        return -1;
    }
    if (key_offsets != Py_None) {
        a->key_offsets = bind_integers(key_offsets, NPY_INT64, "key_offsets");
        if (a->key_offsets == NULL) {
            return -1;
        }
        if (PyArray_SIZE(a->key_offsets) != count) {
            bind_raise(DCP_FAIL(
                DCP_ERR_ARG, "key_offsets holds %zd values, must hold %zd as offsets",
                (ssize_t)PyArray_SIZE(a->key_offsets), (ssize_t)count));
            return -1;
        }
    }
    const char *what = a->key_offsets != NULL ? "key_offsets" : "offsets";
    const int64_t *values =
        PyArray_DATA(a->key_offsets != NULL ? a->key_offsets : a->offsets);
    if (values[count - 1] > PyArray_DIM(a->k, 0)) {
        bind_raise(DCP_FAIL(
            DCP_ERR_ARG, "%s[%zd] is %" PRId64 ", beyond the %zd rows of k", what,
            (ssize_t)(count - 1), values[count - 1], (ssize_t)PyArray_DIM(a->k, 0)));
        return -1;
    }
    return 0;
}

/* Inputs that both passes share, into arrays and arguments. */
static int
convert_inputs(attention_arrays_t *a, dcp_attention_args_t *args, PyObject *q,
               PyObject *k, PyObject *v, PyObject *offsets, PyObject *key_offsets)
{
    a->q = bind_array(q, NPY_FLOAT32, 3, "q");
    a->k = a->q != NULL ? bind_array(k, NPY_FLOAT32, 3, "k") : NULL;
    a->v = a->k != NULL ? bind_array(v, NPY_FLOAT32, 3, "v") : NULL;
    if (a->v == NULL) {
        return -1;
    }
    const npy_intp *k_shape = PyArray_DIMS(a->k);
    npy_intp dim = PyArray_DIM(a->q, 2);
    const npy_intp k_wanted[3] = {k_shape[0], k_shape[1], dim};
    if (check_shape(a->k, "k", k_wanted) < 0 || check_shape(a->v, "v", k_wanted) < 0
        || convert_offsets(a, offsets, key_offsets) < 0) {
        return -1;
    }
    args->q = PyArray_DATA(a->q);
    args->k = PyArray_DATA(a->k);
    args->v = PyArray_DATA(a->v);
    args->query_rows = PyArray_DIM(a->q, 0);
    args->heads = PyArray_DIM(a->q, 1);
    args->kv_heads = k_shape[1];
    args->head_dim = dim;
    args->q_stride = args->out_stride = args->heads * dim;
    args->k_stride = args->v_stride = args->kv_heads * dim;
    args->offsets = PyArray_DATA(a->offsets);
    args->key_offsets = a->key_offsets != NULL ? PyArray_DATA(a->key_offsets) : NULL;
    args->offsets_64 = 1;
    args->sequence_count = PyArray_SIZE(a->offsets) - 1;
    return 0;
}

static PyArrayObject *
new_like(PyArrayObject *array)
{
    return (PyArrayObject *)PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array),
                                              NPY_FLOAT32);
}

PyDoc_STRVAR(attention_doc,
             "attention(q, k, v, offsets, key_offsets, causal, scale, compute)\n--\n\n"
             "Variable-length attention: (out, lse). See dcp.ops.attention.");

static PyObject *
ops_attention(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *q, *k, *v, *offsets, *key_offsets;
    int causal;
    attention_arrays_t a = {0};
    dcp_attention_args_t args = {0};
    const char *compute;
    if (!PyArg_ParseTuple(arguments, "OOOOOpfs:attention", &q, &k, &v, &offsets,
                          &key_offsets, &causal, &args.scale, &compute)
        || bind_compute(compute, &args.compute) < 0) {
        return NULL;
    }
    dcp_pool_t *pool = bind_pool();
    if (pool == NULL || convert_inputs(&a, &args, q, k, v, offsets, key_offsets) < 0) {
        goto fail;
    }
    args.causal = causal;
    const npy_intp lse_shape[2] = {PyArray_DIM(a.q, 1), PyArray_DIM(a.q, 0)};
    a.out = new_like(a.q);
    a.lse = (PyArrayObject *)PyArray_SimpleNew(2, lse_shape, NPY_FLOAT32);
    if (a.out == NULL || a.lse == NULL) {
        goto fail;
    }
    args.out = PyArray_DATA(a.out);
    args.lse = PyArray_DATA(a.lse);
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_cpu_attention(pool, &args));
    if (status != DCP_OK) {
        bind_raise(status);
        goto fail;
    }
    PyObject *result = Py_BuildValue("(OO)", a.out, a.lse);
    arrays_release(&a);
    return result;
fail:
    arrays_release(&a);
    return NULL;
}

PyDoc_STRVAR(
    attention_backward_doc,
    "attention_backward(dout, q, k, v, out, lse, offsets, key_offsets, causal, scale, "
    "compute)\n--\n\n"
    "Gradients of attention: (dq, dk, dv). See dcp.ops.attention_backward.");

static PyObject *
ops_attention_backward(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *dout, *q, *k, *v, *out, *lse, *offsets, *key_offsets;
    int causal;
    attention_arrays_t a = {0};
    dcp_attention_backward_args_t args = {0};
    const char *compute;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOpfs:attention_backward", &dout, &q, &k,
                          &v, &out, &lse, &offsets, &key_offsets, &causal,
                          &args.forward.scale, &compute)
        || bind_compute(compute, &args.forward.compute) < 0) {
        return NULL;
    }
    dcp_pool_t *pool = bind_pool();
    if (pool == NULL
        || convert_inputs(&a, &args.forward, q, k, v, offsets, key_offsets) < 0) {
        goto fail;
    }
    args.forward.causal = causal;
    const npy_intp lse_shape[2] = {PyArray_DIM(a.q, 1), PyArray_DIM(a.q, 0)};
    a.dout = bind_array(dout, NPY_FLOAT32, 3, "dout");
    a.out = a.dout != NULL ? bind_array(out, NPY_FLOAT32, 3, "out") : NULL;
    a.lse = a.out != NULL ? bind_array(lse, NPY_FLOAT32, 2, "lse") : NULL;
    if (a.lse == NULL || check_shape(a.dout, "dout", PyArray_DIMS(a.q)) < 0
        || check_shape(a.out, "out", PyArray_DIMS(a.q)) < 0
        || check_shape(a.lse, "lse", lse_shape) < 0) {
        goto fail;
    }
    a.dq = new_like(a.q);
    a.dk = new_like(a.k);
    a.dv = new_like(a.v);
    if (a.dq == NULL || a.dk == NULL || a.dv == NULL) {
        goto fail;
    }
    args.forward.out = PyArray_DATA(a.out);
    args.forward.lse = PyArray_DATA(a.lse);
    args.dout = PyArray_DATA(a.dout);
    args.dq = PyArray_DATA(a.dq);
    args.dk = PyArray_DATA(a.dk);
    args.dv = PyArray_DATA(a.dv);
    args.dout_stride = args.dq_stride = args.forward.q_stride;
    args.dk_stride = args.dv_stride = args.forward.k_stride;
    args.key_rows = PyArray_DIM(a.k, 0);
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_cpu_attention_backward(pool, &args));
    if (status != DCP_OK) {
        bind_raise(status);
        goto fail;
    }
    PyObject *result = Py_BuildValue("(OOO)", a.dq, a.dk, a.dv);
    arrays_release(&a);
    return result;
fail:
    arrays_release(&a);
    return NULL;
}

static PyMethodDef ops_methods[] = {
    {"attention", ops_attention, METH_VARARGS, attention_doc},
    {"attention_backward", ops_attention_backward, METH_VARARGS,
     attention_backward_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_ops_register(PyObject *module)
{
    return PyModule_AddFunctions(module, ops_methods);
}
