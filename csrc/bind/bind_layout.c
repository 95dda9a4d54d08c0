/* Layouts for Python: layout_plan, whose class with names and shapes is dcp/layout.py;
 * and exact_sum, the sum behind the gradient norm. */
#include "bind.h"

#include "dcp/alloc.h"
#include "dcp/dbuffer.h"
#include "dcp/shard.h"

PyDoc_STRVAR(
    layout_plan_doc,
    "layout_plan(sizes, blocks, ranks, unit, order)\n--\n\n"
    "Start of every tensor (int64 array) and elements of a rank's shard. Sizes "
    "and blocks in elements; order: 0 model, 1 shape, 2 size, 3 search.");

static PyObject *
layout_plan(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *sizes_object, *blocks_object;
    long long rank_count, unit;
    int order;
    if (!PyArg_ParseTuple(arguments, "OOLLi:layout_plan", &sizes_object, &blocks_object,
                          &rank_count, &unit, &order)) {
        return NULL;
    }
    PyArrayObject *sizes = NULL, *blocks = NULL;
    PyObject *starts = NULL, *result = NULL;
    dcp_layout_tensor_t *tensors = NULL;
    sizes = bind_integers(sizes_object, NPY_INT64, "sizes");
    blocks = sizes != NULL ? bind_integers(blocks_object, NPY_INT64, "blocks") : NULL;
    if (blocks == NULL) {
        goto done;
    }
    npy_intp count = PyArray_SIZE(sizes);
    dcp_status_t status = DCP_OK;
    if (PyArray_SIZE(blocks) != count) {
        status = DCP_FAIL(DCP_ERR_ARG, "blocks has %lld entries, sizes has %lld",
                          (long long)PyArray_SIZE(blocks), (long long)count);
        bind_raise(status);
        goto done;
    }
    void *memory;
    status = dcp_alloc_array(count, (int64_t)sizeof tensors[0], "tensors of a layout",
                             &memory);
    if (status != DCP_OK) {
        bind_raise(status);
        goto done;
    }
    tensors = memory;
    const int64_t *size = PyArray_DATA(sizes), *block = PyArray_DATA(blocks);
    for (npy_intp i = 0; i < count; i++) {
        tensors[i] = (dcp_layout_tensor_t){size[i], block[i]};
    }
    starts = PyArray_SimpleNew(1, &count, NPY_INT64);
    if (starts == NULL) {
        goto done;
    }
    int64_t *start = PyArray_DATA((PyArrayObject *)starts);
    int64_t shard = 0;
    BIND_NOGIL(status,
               dcp_layout_plan(tensors, count, (int64_t)rank_count, (int64_t)unit,
                               (dcp_layout_order_t)order, start, &shard));
    if (status != DCP_OK) {
        bind_raise(status);
        goto done;
    }
    result = Py_BuildValue("(OL)", starts, (long long)shard);
done:
    dcp_free(tensors);
    Py_XDECREF(starts);
    Py_XDECREF((PyObject *)sizes);
    Py_XDECREF((PyObject *)blocks);
    return result;
}

PyDoc_STRVAR(exact_sum_doc,
             "exact_sum(values)\n--\n\n"
             "Sum of a float64 array of numbers >= 0, rounded once: it depends on no "
             "order. NaN where one is negative or not finite.");

static PyObject *
exact_sum(PyObject *module, PyObject *argument)
{
    (void)module;
    PyArrayObject *values = bind_array(argument, NPY_DOUBLE, 1, "values");
    if (values == NULL) {
        return NULL;
    }
    dcp_exact_sum_t sum;
    dcp_exact_sum_init(&sum);
    const double *value = PyArray_DATA(values);
    npy_intp count = PyArray_SIZE(values);
    Py_BEGIN_ALLOW_THREADS for (npy_intp i = 0; i < count; i++)
    {
        dcp_exact_sum_add(&sum, value[i]);
    }
    Py_END_ALLOW_THREADS Py_DECREF((PyObject *)values);
    return PyFloat_FromDouble(dcp_exact_sum_value(&sum));
}

static PyMethodDef layout_methods[] = {
    {"layout_plan", layout_plan, METH_VARARGS, layout_plan_doc},
    {"exact_sum", exact_sum, METH_O, exact_sum_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_layout_register(PyObject *module)
{
    return PyModule_AddFunctions(module, layout_methods);
}
