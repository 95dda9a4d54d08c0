/* Micro-batches from Python to the core. They come as objects with the attributes of
 * dcp.loader.MicroBatch; their arrays are borrowed, and kept alive by the list, while a
 * call runs without the GIL. */
#include "bind_batch.h"

enum { ARRAYS_PER_BATCH = 5 };

void
bind_batches_fini(bind_batches_t *list)
{
    for (Py_ssize_t i = 0; list->arrays != NULL && i < ARRAYS_PER_BATCH * list->count;
         i++) {
        Py_XDECREF(list->arrays[i]);
    }
    PyMem_Free(list->arrays);
    PyMem_Free(list->batches);
    PyMem_Free(list->groups);
}

/* The attribute as an array of this type, or NULL: with an exception, or (optional,
 * None) without. */
static PyArrayObject *
batch_array(PyObject *object, const char *name, int type_num, npy_intp count,
            int optional)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL) {
        return NULL;
    }
    if (optional && value == Py_None) {
        Py_DECREF(value);
        return NULL;
    }
    PyArrayObject *array = bind_array(value, type_num, 1, name);
    Py_DECREF(value);
    if (array != NULL && count >= 0 && PyArray_SIZE(array) != count) {
        dcp_status_t status =
            DCP_FAIL(DCP_ERR_ARG, "%s has %lld items, tokens has %lld: they must agree",
                     name, (long long)PyArray_SIZE(array), (long long)count);
        Py_DECREF(array);
        bind_raise(status);
        return NULL;
    }
    return array;
}

static int
batch_fill(dcp_batch_t *batch, PyObject **arrays, PyObject *object)
{
    PyArrayObject *tokens = batch_array(object, "tokens", NPY_INT32, -1, 0);
    arrays[0] = (PyObject *)tokens;
    if (tokens == NULL) {
        return -1;
    }
    npy_intp count = PyArray_SIZE(tokens);
    PyArrayObject *offsets = batch_array(object, "offsets", NPY_INT64, -1, 0);
    arrays[1] = (PyObject *)offsets;
    if (offsets == NULL) {
        return -1;
    }
    PyArrayObject *labels = batch_array(object, "labels", NPY_INT32, count, 0);
    arrays[2] = (PyObject *)labels;
    if (labels == NULL) {
        return -1;
    }
    PyArrayObject *weights = batch_array(object, "weights", NPY_FLOAT32, count, 1);
    arrays[3] = (PyObject *)weights;
    if (weights == NULL && PyErr_Occurred()) {
        return -1;
    }
    PyArrayObject *row_ids = batch_array(object, "row_ids", NPY_INT64, count, 1);
    arrays[4] = (PyObject *)row_ids;
    if (row_ids == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (PyArray_SIZE(offsets) < 1) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "offsets is empty: it must hold 0 and the end of each "
                            "sequence"));
        return -1;
    }
    batch->token_count = count;
    batch->sequence_count = PyArray_SIZE(offsets) - 1;
    batch->tokens = PyArray_DATA(tokens);
    batch->offsets = PyArray_DATA(offsets);
    batch->labels = PyArray_DATA(labels);
    batch->weights = weights != NULL ? PyArray_DATA(weights) : NULL;
    batch->row_ids = row_ids != NULL ? PyArray_DATA(row_ids) : NULL;
    return 0;
}

/* The attribute, a pair of integers, into `pair`; left alone where there is none. */
static int
pair_fill(PyObject *object, const char *name, int32_t *pair)
{
    if (!PyObject_HasAttrString(object, name)) {
        return 0;
    }
    PyObject *value = PyObject_GetAttrString(object, name);
    PyObject *tuple = value != NULL ? PySequence_Tuple(value) : NULL;
    int result =
        tuple != NULL && PyArg_ParseTuple(tuple, "ii", &pair[0], &pair[1]) ? 0 : -1;
    Py_XDECREF(tuple);
    Py_XDECREF(value);
    return result;
}

/* The groups of a step: a sequence of (first rank, count), or None. */
static int
groups_init(bind_batches_t *list, PyObject *groups)
{
    if (groups == Py_None) {
        return 0;
    }
    PyObject *fast = PySequence_Fast(groups, "groups must be a sequence");
    if (fast == NULL) {
        return -1;
    }
    list->group_count = PySequence_Fast_GET_SIZE(fast);
    list->groups =
        PyMem_Calloc((size_t)list->group_count + 1, sizeof(dcp_rank_group_t));
    int result = 0;
    if (list->groups == NULL) {
        PyErr_NoMemory();
        result = -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < list->group_count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(fast, i);
        result = PyTuple_Check(item)
                         && PyArg_ParseTuple(item, "ii", &list->groups[i].first,
                                             &list->groups[i].count)
                     ? 0
                     : -1;
        if (result < 0 && !PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "groups must hold (first rank, count)");
        }
    }
    Py_DECREF(fast);
    return result;
}

int
bind_batches_init(bind_batches_t *list, PyObject *sequence, PyObject *groups,
                  int32_t rank, double scale, uint64_t dropout_seed)
{
    *list = (bind_batches_t){0};
    PyObject *fast = PySequence_Fast(sequence, "micro_batches must be a sequence");
    if (fast == NULL) {
        return -1;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    list->count = count;
    list->batches = PyMem_Calloc((size_t)count + 1, sizeof(dcp_micro_batch_t));
    list->arrays =
        PyMem_Calloc((size_t)(ARRAYS_PER_BATCH * count) + 1, sizeof(PyObject *));
    if (list->batches == NULL || list->arrays == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(fast, i);
        dcp_micro_batch_t *micro = &list->batches[i];
        micro->batch.scale = scale;
        micro->batch.dropout_seed = dropout_seed;
        int32_t group[2] = {rank, 1};
        if (batch_fill(&micro->batch, &list->arrays[ARRAYS_PER_BATCH * i], item) < 0
            || pair_fill(item, "group", group) < 0
            || pair_fill(item, "recompute", micro->batch.recompute) < 0) {
            goto fail;
        }
        micro->first_rank = group[0];
        micro->rank_count = group[1];
    }
    if (groups_init(list, groups) < 0) {
        goto fail;
    }
    Py_DECREF(fast);
    return 0;
fail:
    bind_batches_fini(list);
    Py_DECREF(fast);
    return -1;
}
