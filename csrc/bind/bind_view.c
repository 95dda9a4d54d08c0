/* Arrays over memory of the core, without a copy. Memory must not go while an array
 * looks into it, and Python decides when arrays die: each has a capsule as its base
 * that holds a reference to the object that owns the memory and counts in that object's
 * `views`, so the owner lives as long and can refuse to be closed. Under the GIL. */
#include "bind_view.h"

int
bind_type_num(dcp_dtype_t dtype)
{
    switch (dtype) {
    case DCP_F64:
        return NPY_FLOAT64;
    case DCP_I32:
        return NPY_INT32;
    case DCP_I64:
        return NPY_INT64;
    case DCP_U8:
        return NPY_UINT8;
    case DCP_BF16:
        return NPY_UINT16;
    default:
        return NPY_FLOAT32;
    }
}

static void
view_release(PyObject *capsule)
{
    int32_t *views = PyCapsule_GetPointer(capsule, NULL);
    PyObject *owner = PyCapsule_GetContext(capsule);
    *views -= 1; /* before the owner that it is a field of may go */
    Py_DECREF(owner);
}

PyObject *
bind_view(PyObject *owner, int32_t *views, void *data, int type_num, int dim_count,
          npy_intp *shape, int writable)
{
    PyObject *array = PyArray_SimpleNewFromData(dim_count, shape, type_num, data);
    PyObject *capsule = array != NULL ? PyCapsule_New(views, NULL, view_release) : NULL;
    if (capsule == NULL) {
        Py_XDECREF(array);
        return NULL;
    }
    PyCapsule_SetContext(capsule, Py_NewRef(owner)); /* of a capsule: cannot fail */
    *views += 1;
    if (PyArray_SetBaseObject((PyArrayObject *)array, capsule)
        < 0) { /* takes the capsule */
        Py_DECREF(array);
        return NULL;
    }
    if (!writable) {
        PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    return array;
}

PyObject *
bind_run_view(PyObject *owner, int32_t *views, void *data, int type_num, int64_t count)
{
    npy_intp size = (npy_intp)count;
    return bind_view(owner, views, data, type_num, 1, &size, 1);
}

int
bind_run_set(PyObject *list, int64_t i, int64_t tensor, int64_t first, PyObject *view)
{
    PyObject *item =
        view != NULL ? Py_BuildValue("LLN", (long long)tensor, (long long)first, view)
                     : NULL;
    if (item == NULL) {
        return -1;
    }
    PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    return 0;
}
