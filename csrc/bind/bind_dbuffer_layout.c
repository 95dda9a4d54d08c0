/* dcp._dcp.DBufferLayout: where the tensors of distributed buffers lie. */
#include "bind_dbuffer.h"

#include "dcp/alloc.h"

static PyTypeObject *layout_type;

dcp_dbuffer_layout_t *
bind_dbuffer_layout(PyObject *object)
{
    if (!PyObject_TypeCheck(object, layout_type)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE, "layout must be a DBufferLayout, got %.100s",
                            Py_TYPE(object)->tp_name));
        return NULL;
    }
    layout_object_t *self = (layout_object_t *)object;
    if (self->layout == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this layout was not initialised"));
    }
    return self->layout;
}

PyDoc_STRVAR(
    layout_doc,
    "DBufferLayout(tensors, ranks, block_rows, order)\n--\n\nWhere the tensors "
    "of a buffer lie. tensors: int64 array [n, 4] of rows, row width, group, "
    "elements of a block (0: by rows).");

static int
layout_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    layout_object_t *self = (layout_object_t *)object;
    PyObject *table_object;
    int ranks, order;
    long long block_rows;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "DBufferLayout takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OiLi", &table_object, &ranks, &block_rows, &order)) {
        return -1;
    }
    PyArrayObject *table = bind_array(table_object, NPY_INT64, 2, "tensors");
    if (table == NULL) {
        return -1;
    }
    dcp_dbuffer_tensor_t *tensors = NULL;
    dcp_status_t status = DCP_OK;
    npy_intp count = PyArray_DIM(table, 0);
    if (PyArray_DIM(table, 1) != 4 || self->layout != NULL) {
        status = DCP_FAIL(DCP_ERR_ARG, "tensors must have 4 columns");
        goto done;
    }
    void *memory;
    status = dcp_alloc_array(count, (int64_t)sizeof tensors[0], "tensors of a layout",
                             &memory);
    if (status != DCP_OK) {
        goto done;
    }
    tensors = memory;
    const int64_t *row = PyArray_DATA(table);
    for (npy_intp i = 0; i < count; i++, row += 4) {
        tensors[i] = (dcp_dbuffer_tensor_t){row[0], row[1], (int32_t)row[2], row[3]};
    }
    BIND_NOGIL(status,
               dcp_dbuffer_layout_create(tensors, count, ranks, block_rows,
                                         (dcp_layout_order_t)order, &self->layout));
done:
    dcp_free(tensors);
    Py_DECREF(table);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    self->rank_count = ranks;
    self->tensor_count = count;
    return 0;
}

static void
layout_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    dcp_dbuffer_layout_destroy(((layout_object_t *)object)->layout);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(layout_runs_doc,
             "runs(rank)\n--\n\nA list of (tensor, first element, elements).");

static PyObject *
layout_runs(PyObject *object, PyObject *argument)
{
    layout_object_t *self = (layout_object_t *)object;
    if (bind_dbuffer_layout(object) == NULL) {
        return NULL;
    }
    long rank = PyLong_AsLong(argument);
    if (rank == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (rank < 0 || rank >= self->rank_count) {
        return bind_raise(DCP_FAIL(DCP_ERR_ARG, "rank %ld must lie in 0..%d", rank,
                                   (int)self->rank_count - 1));
    }
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(self->layout, (int32_t)rank, &runs, &count);
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *item =
            Py_BuildValue("LLL", (long long)runs[i].tensor, (long long)runs[i].first,
                          (long long)runs[i].count);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

PyDoc_STRVAR(layout_shards_doc,
             "shards()\n--\n\nElements of one rank's slice of each group.");

static PyObject *
layout_shards(PyObject *object, PyObject *unused)
{
    (void)unused;
    const dcp_dbuffer_layout_t *layout = bind_dbuffer_layout(object);
    if (layout == NULL) {
        return NULL;
    }
    int32_t count = dcp_dbuffer_layout_group_count(layout);
    PyObject *list = PyList_New(count);
    for (int32_t g = 0; list != NULL && g < count; g++) {
        PyObject *item = PyLong_FromLongLong(dcp_dbuffer_layout_group(layout, g).shard);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, g, item);
    }
    return list;
}

static PyMethodDef layout_methods[] = {
    {"runs", layout_runs, METH_O, layout_runs_doc},
    {"shards", layout_shards, METH_NOARGS, layout_shards_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot layout_slots[] = {
    {Py_tp_doc, (void *)layout_doc}, {Py_tp_init, layout_init},
    {Py_tp_new, PyType_GenericNew},  {Py_tp_dealloc, layout_dealloc},
    {Py_tp_methods, layout_methods}, {0, NULL},
};

static PyType_Spec layout_spec = {
    .name = "dcp._dcp.DBufferLayout",
    .basicsize = (int)sizeof(layout_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = layout_slots,
};

int
bind_dbuffer_layout_register(PyObject *module)
{
    return bind_type_add(module, &layout_spec, &layout_type);
}
