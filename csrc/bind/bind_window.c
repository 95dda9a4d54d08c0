/* The type dcp._dcp.Window: memory that ranks read in place, as NumPy views.
 *
 * A view keeps its window alive; the memory goes when the last view and the last rank
 * have let go. Fencing is the caller's: barriers of the world. */
#include "bind.h"

#include "dcp/comm.h"

typedef struct window {
    PyObject_HEAD;
    dcp_window_t *window; /* never NULL */
    int32_t size;         /* ranks */
} window_t;

static PyTypeObject *window_type;

PyObject *
bind_window_new(struct dcp_window *window, int32_t size)
{
    window_t *self = (window_t *)window_type->tp_alloc(window_type, 0);
    if (self == NULL) {
        dcp_window_destroy(window);
        return NULL;
    }
    self->window = window;
    self->size = size;
    return (PyObject *)self;
}

const struct dcp_window *
bind_window_of(PyObject *window, int32_t size)
{
    if (window_type == NULL || !PyObject_TypeCheck(window, window_type)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE,
                            "window must be a dcp._dcp.Window, got %.100s",
                            Py_TYPE(window)->tp_name));
        return NULL;
    }
    if (((window_t *)window)->size != size) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "window was made by %d ranks, the world has %d",
                            (int)((window_t *)window)->size, (int)size));
        return NULL;
    }
    return ((window_t *)window)->window;
}

static void
window_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    dcp_window_destroy(((window_t *)object)->window);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(window_part_doc,
             "part(rank)\n--\n\nThe bytes that a rank brought, as a writable view.");

static PyObject *
window_part(PyObject *object, PyObject *argument)
{
    window_t *self = (window_t *)object;
    long rank = PyLong_AsLong(argument);
    if (rank == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (rank < 0 || rank >= self->size) {
        return bind_raise(DCP_FAIL(DCP_ERR_ARG, "rank %ld must lie in 0..%d", rank,
                                   (int)self->size - 1));
    }
    npy_intp bytes = (npy_intp)dcp_window_bytes(self->window, (int32_t)rank);
    if (bytes == 0) {
        return PyArray_SimpleNew(1, &bytes, NPY_UINT8);
    }
    PyObject *view = PyArray_SimpleNewFromData(
        1, &bytes, NPY_UINT8, dcp_window_base(self->window, (int32_t)rank));
    if (view == NULL) {
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef(object)) < 0) {
        Py_DECREF(view);
        return NULL;
    }
    return view;
}

PyDoc_STRVAR(window_reduce_doc,
             "reduce(offset, out)\n--\n\nSums float32 from byte `offset` of every "
             "rank's part, in rank order, into `out`, which may be a view of the own "
             "part at `offset`.");

static PyObject *
window_reduce(PyObject *object, PyObject *args)
{
    window_t *self = (window_t *)object;
    long long offset;
    PyObject *out_object;
    if (!PyArg_ParseTuple(args, "LO", &offset, &out_object)) {
        return NULL;
    }
    PyArrayObject *out = bind_array_writable(out_object, NPY_FLOAT32, 1, "out");
    if (out == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_window_reduce(self->window, offset, PyArray_SIZE(out),
                                         PyArray_DATA(out)));
    Py_DECREF(out);
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

static PyMethodDef window_methods[] = {
    {"part", window_part, METH_O, window_part_doc},
    {"reduce", window_reduce, METH_VARARGS, window_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot window_slots[] = {
    {Py_tp_doc, "Memory that all ranks of a world see (see World._window)."},
    {Py_tp_dealloc, window_dealloc},
    {Py_tp_methods, window_methods},
    {0, NULL},
};

static PyType_Spec window_spec = {
    .name = "dcp._dcp.Window",
    .basicsize = sizeof(window_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = window_slots,
};

int
bind_window_register(PyObject *module)
{
    return bind_type_add(module, &window_spec, &window_type);
}
