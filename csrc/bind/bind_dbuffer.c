/* dcp._dcp.DBuffer, for dcp/sharded_tensors.py. A buffer keeps its
 * layout and worlds alive; arrays over it count as views until they die, and it cannot
 * be closed before. Calls on a closed world are refused. */
#include "bind_dbuffer.h"
#include "bind_view.h"

static PyTypeObject *buffer_type;

buffer_object_t *
bind_buffer(PyObject *object, const char *what)
{
    if (!PyObject_TypeCheck(object, buffer_type)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE, "%s must be a DBuffer, got %.100s", what,
                            Py_TYPE(object)->tp_name));
        return NULL;
    }
    buffer_object_t *self = (buffer_object_t *)object;
    if (self->buffer == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "%s is closed", what));
        return NULL;
    }
    return self;
}

static dcp_dbuffer_t *
checked(PyObject *object)
{
    buffer_object_t *self = bind_buffer(object, "this buffer");
    return self != NULL ? self->buffer : NULL;
}

/* For calls that go through its worlds. */
static dcp_dbuffer_t *
checked_with_world(PyObject *object)
{
    buffer_object_t *self = bind_buffer(object, "this buffer");
    if (self == NULL || bind_world_comm(self->world) == NULL
        || (self->replicas != NULL && bind_world_comm(self->replicas) == NULL)) {
        return NULL;
    }
    return self->buffer;
}

PyDoc_STRVAR(buffer_doc,
             "DBuffer(world, layout, kind, *, dtype, keep_own, replicas)\n--\n\nA "
             "distributed buffer. Collective. kind: 0 shared, 1 private, 2 local, 3 "
             "shard, 4 on demand; dtype: 0 float32, 1 bfloat16, 5 uint8.");

static int
buffer_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"world",    "layout",   "kind", "dtype",
                            "keep_own", "replicas", NULL};
    buffer_object_t *self = (buffer_object_t *)object;
    PyObject *world, *layout_object, *replicas = Py_None;
    int kind, dtype = DCP_F32, keep_own = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOi|$ipO", names, &world,
                                     &layout_object, &kind, &dtype, &keep_own,
                                     &replicas)) {
        return -1;
    }
    dcp_comm_t *comm = bind_world_comm(world);
    dcp_dbuffer_layout_t *layout =
        comm != NULL ? bind_dbuffer_layout(layout_object) : NULL;
    dcp_comm_t *replica_comm =
        layout != NULL && replicas != Py_None ? bind_world_comm(replicas) : NULL;
    if (layout == NULL || (replicas != Py_None && replica_comm == NULL)) {
        return -1;
    }
    if (self->buffer != NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this buffer exists already"));
        return -1;
    }
    self->pool = bind_pool_hold();
    if (self->pool == NULL) {
        return -1;
    }
    dcp_dbuffer_options_t options = {
        .kind = (dcp_dbuffer_kind_t)kind,
        .dtype = (dcp_dtype_t)dtype,
        .keep_own = keep_own,
        .replicas = replica_comm,
    };
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_create_with(comm, layout, &options, &self->buffer));
    if (status != DCP_OK) {
        if (status == DCP_ERR_NO_MEM && dcp_comm_size(comm) > 1) {
            dcp_comm_abort(comm, dcp_last_error()); /* of this rank alone, maybe */
        }
        bind_pool_drop();
        bind_raise(status);
        return -1;
    }
    self->world = Py_NewRef(world);
    self->layout = Py_NewRef(layout_object);
    self->replicas = replicas != Py_None ? Py_NewRef(replicas) : NULL;
    return 0;
}

static void
let_go(buffer_object_t *self)
{
    if (self->buffer != NULL) {
        dcp_dbuffer_t *buffer = self->buffer;
        self->buffer = NULL;
        /* may wait for the thread that gathers, which may ask for signals */
        Py_BEGIN_ALLOW_THREADS dcp_dbuffer_destroy(buffer);
        Py_END_ALLOW_THREADS bind_pool_drop();
    }
    Py_CLEAR(self->source);
    Py_CLEAR(self->replicas);
    Py_CLEAR(self->world);
    Py_CLEAR(self->layout);
}

static void
buffer_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    let_go((buffer_object_t *)object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(buffer_close_doc,
             "close()\n--\n\nLets go of the memory; refused while arrays still look "
             "into it.");

static PyObject *
buffer_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    buffer_object_t *self = (buffer_object_t *)object;
    if (self->views > 0) {
        return bind_raise(DCP_FAIL(
            DCP_ERR_STATE, "%d arrays still look into this buffer: drop them first",
            (int)self->views));
    }
    let_go(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(buffer_tensor_doc,
             "tensor(index, count, writable)\n--\n\nThe `count` elements of a whole "
             "tensor, as a 1-D array.");

static PyObject *
buffer_tensor(PyObject *object, PyObject *args)
{
    long long index, count;
    int writable;
    if (!PyArg_ParseTuple(args, "LLp", &index, &count, &writable)) {
        return NULL;
    }
    buffer_object_t *self = (buffer_object_t *)object;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL) {
        return NULL;
    }
    int64_t tensor_count = ((layout_object_t *)self->layout)->tensor_count;
    if (index < 0 || index >= tensor_count) {
        return bind_raise(DCP_FAIL(DCP_ERR_ARG, "tensor %lld must lie in 0..%lld",
                                   index, (long long)tensor_count - 1));
    }
    char *data = dcp_dbuffer_tensor_bytes(buffer, index);
    if (data == NULL) {
        return bind_raise(DCP_FAIL(DCP_ERR_STATE, "no rank has a whole tensor where "
                                                  "each holds its shard alone"));
    }
    npy_intp size = (npy_intp)count;
    return bind_view(object, &self->views, data,
                     bind_type_num(dcp_dbuffer_dtype(buffer)), 1, &size, writable);
}

PyDoc_STRVAR(buffer_runs_doc,
             "runs()\n--\n\nThis rank's shard: a list of (tensor, first element, "
             "writable array).");

static PyObject *
buffer_runs(PyObject *object, PyObject *unused)
{
    (void)unused;
    buffer_object_t *self = (buffer_object_t *)object;
    dcp_dbuffer_t *buffer = checked_with_world(object);
    if (buffer == NULL) {
        return NULL;
    }
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(((layout_object_t *)self->layout)->layout,
                            dcp_comm_rank(bind_world_comm(self->world)), &runs, &count);
    int type_num = bind_type_num(dcp_dbuffer_dtype(buffer));
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *view =
            bind_run_view(object, &self->views, dcp_dbuffer_run_bytes(buffer, &runs[i]),
                          type_num, runs[i].count);
        if (bind_run_set(list, i, runs[i].tensor, runs[i].first, view) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
none_or_raise(dcp_status_t status)
{
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

PyDoc_STRVAR(buffer_zero_doc, "zero()\n--\n\nAll that this rank holds becomes 0.");

static PyObject *
buffer_zero(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS dcp_dbuffer_zero(buffer);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyDoc_STRVAR(
    buffer_fill_doc,
    "fill(group, value)\n--\n\nOf this rank's slice; group -1: of all groups.");

static PyObject *
buffer_fill(PyObject *object, PyObject *args)
{
    int group;
    float value;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL || !PyArg_ParseTuple(args, "if", &group, &value)) {
        return NULL;
    }
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_dbuffer_fill(buffer, ((buffer_object_t *)object)->pool,
                                          group, value));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_scale_doc, "scale(group, factor)\n--\n\nTimes factor.");

static PyObject *
buffer_scale(PyObject *object, PyObject *args)
{
    int group;
    float factor;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL || !PyArg_ParseTuple(args, "if", &group, &factor)) {
        return NULL;
    }
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_dbuffer_scale(buffer, ((buffer_object_t *)object)->pool,
                                           group, factor));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_add_doc,
             "add(group, factor, other)\n--\n\nPlus factor times another buffer.");

static PyObject *
buffer_add(PyObject *object, PyObject *args)
{
    int group;
    float factor;
    PyObject *other_object;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL
        || !PyArg_ParseTuple(args, "ifO", &group, &factor, &other_object)) {
        return NULL;
    }
    buffer_object_t *other = bind_buffer(other_object, "other");
    if (other == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_dbuffer_add(buffer, ((buffer_object_t *)object)->pool,
                                         group, factor, other->buffer));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_copy_doc,
             "copy(group, other)\n--\n\nBecomes another buffer, in its own type.");

static PyObject *
buffer_copy(PyObject *object, PyObject *args)
{
    int group;
    PyObject *other_object;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL || !PyArg_ParseTuple(args, "iO", &group, &other_object)) {
        return NULL;
    }
    buffer_object_t *other = bind_buffer(other_object, "other");
    if (other == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_dbuffer_copy(buffer, ((buffer_object_t *)object)->pool,
                                          group, other->buffer));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_nonfinite_doc,
             "nonfinite(group)\n--\n\nElements of this rank's slice that are not "
             "finite.");

static PyObject *
buffer_nonfinite(PyObject *object, PyObject *argument)
{
    dcp_dbuffer_t *buffer = checked(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    int64_t count = 0;
    dcp_status_t status;
    BIND_COMPUTE(status,
                 dcp_dbuffer_count_nonfinite(buffer, ((buffer_object_t *)object)->pool,
                                             (int32_t)group, &count));
    return status == DCP_OK ? PyLong_FromLongLong(count) : bind_raise(status);
}

PyDoc_STRVAR(buffer_norm_doc,
             "norm(mask, largest, extras)\n--\n\nNorm of all ranks' shards and of the "
             "replicated float32 arrays `extras`. mask: uint8 [tensors] or None. "
             "Collective.");

static PyObject *
buffer_norm(PyObject *object, PyObject *args)
{
    PyObject *mask_object, *extras_object;
    int largest;
    buffer_object_t *self = (buffer_object_t *)object;
    dcp_dbuffer_t *buffer = checked_with_world(object);
    if (buffer == NULL
        || !PyArg_ParseTuple(args, "OpO", &mask_object, &largest, &extras_object)) {
        return NULL;
    }
    PyObject *fast = PySequence_Fast(extras_object, "extras must be a sequence"),
             *result = NULL;
    if (fast == NULL) {
        return NULL;
    }
    PyArrayObject *mask = NULL, **arrays = NULL;
    const float **data = NULL;
    int64_t *counts = NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast), held = 0;
    arrays = PyMem_Calloc((size_t)count + 1, sizeof arrays[0]);
    data = PyMem_Calloc((size_t)count + 1, sizeof data[0]);
    counts = PyMem_Calloc((size_t)count + 1, sizeof counts[0]);
    if (arrays == NULL || data == NULL || counts == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (mask_object != Py_None) {
        mask = bind_array(mask_object, NPY_UINT8, 1, "mask");
        if (mask == NULL) {
            goto done;
        }
        if (PyArray_SIZE(mask) != ((layout_object_t *)self->layout)->tensor_count) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG, "mask must have one item a tensor"));
            goto done;
        }
    }
    for (; held < count; held++) {
        arrays[held] =
            bind_array(PySequence_Fast_GET_ITEM(fast, held), NPY_FLOAT32, -1, "extras");
        if (arrays[held] == NULL) {
            goto done;
        }
        data[held] = PyArray_DATA(arrays[held]);
        counts[held] = PyArray_SIZE(arrays[held]);
    }
    dcp_dbuffer_norm_args_t norm_args = {
        .mask = mask != NULL ? PyArray_DATA(mask) : NULL,
        .largest = largest,
        .extras = data,
        .extra_counts = counts,
        .extra_count = count,
    };
    double norm = 0;
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_norm_with(buffer, self->pool, &norm_args, &norm));
    result = status == DCP_OK ? PyFloat_FromDouble(norm) : bind_raise(status);
done:
    for (Py_ssize_t i = 0; i < held; i++) {
        Py_DECREF((PyObject *)arrays[i]);
    }
    PyMem_Free(arrays);
    PyMem_Free(data);
    PyMem_Free(counts);
    Py_XDECREF((PyObject *)mask);
    Py_DECREF(fast);
    return result;
}

PyDoc_STRVAR(buffer_reduce_doc,
             "reduce(group)\n--\n\nThis rank's slice becomes the sum over ranks and "
             "replicas; group -1: of all groups.");

static PyObject *
buffer_reduce(PyObject *object, PyObject *argument)
{
    buffer_object_t *self = (buffer_object_t *)object;
    dcp_dbuffer_t *buffer = checked_with_world(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    dcp_status_t status;
    if (group == DCP_DBUFFER_ALL_GROUPS) {
        BIND_NOGIL(status, dcp_dbuffer_reduce(buffer, self->pool));
    } else {
        BIND_NOGIL(status, dcp_dbuffer_reduce_one(buffer, self->pool, (int32_t)group));
    }
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_acquire_doc,
             "acquire(group)\n--\n\nMemory for a group of a buffer on demand, zeroed.");

static PyObject *
buffer_acquire(PyObject *object, PyObject *argument)
{
    dcp_dbuffer_t *buffer = checked(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_acquire(buffer, (int32_t)group));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_release_doc,
             "release(group)\n--\n\nGives the memory of a group back; arrays over it "
             "read as zeros.");

static PyObject *
buffer_release(PyObject *object, PyObject *argument)
{
    dcp_dbuffer_t *buffer = checked(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS dcp_dbuffer_release(buffer, (int32_t)group);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyDoc_STRVAR(
    buffer_gather_doc,
    "gather(group, source)\n--\n\nPuts a group together from the slices of all "
    "ranks, those of `source` or (None) its own. Collective.");

/* `source` of gather and gather_order: 0, or -1 with an exception. */
static int
source_of(PyObject *object, dcp_dbuffer_t **source_p)
{
    *source_p = NULL;
    if (object == Py_None) {
        return 0;
    }
    buffer_object_t *source = bind_buffer(object, "source");
    *source_p = source != NULL ? source->buffer : NULL;
    return source != NULL ? 0 : -1;
}

static PyObject *
buffer_gather(PyObject *object, PyObject *args)
{
    int group;
    PyObject *source_object;
    dcp_dbuffer_t *source, *buffer = checked_with_world(object);
    if (buffer == NULL || !PyArg_ParseTuple(args, "iO", &group, &source_object)
        || source_of(source_object, &source) < 0) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_gather_whole(
                           buffer, ((buffer_object_t *)object)->pool, group, source));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_gather_order_doc,
             "gather_order(order, source)\n--\n\nDeclares the order in which groups "
             "will be gathered ahead; empty: none. Collective.");

static PyObject *
buffer_gather_order(PyObject *object, PyObject *args)
{
    PyObject *order_object, *source_object;
    dcp_dbuffer_t *source, *buffer = checked_with_world(object);
    if (buffer == NULL || !PyArg_ParseTuple(args, "OO", &order_object, &source_object)
        || source_of(source_object, &source) < 0) {
        return NULL;
    }
    PyArrayObject *order = bind_integers(order_object, NPY_INT32, "order");
    if (order == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_gather_order(buffer, source, PyArray_DATA(order),
                                                PyArray_SIZE(order)));
    Py_DECREF((PyObject *)order);
    if (status == DCP_OK) { /* the thread reads it: it must outlive the order */
        Py_XSETREF(((buffer_object_t *)object)->source, Py_NewRef(source_object));
    }
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_gather_begin_doc,
             "gather_begin(group)\n--\n\nBegins the next gather of the order.");

static PyObject *
buffer_gather_begin(PyObject *object, PyObject *argument)
{
    dcp_dbuffer_t *buffer = checked_with_world(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_gather_begin(buffer, (int32_t)group));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_gather_wait_doc,
             "gather_wait(group)\n--\n\nWaits for the latest begun gather of a group.");

static PyObject *
buffer_gather_wait(PyObject *object, PyObject *argument)
{
    dcp_dbuffer_t *buffer = checked(object);
    long group = buffer != NULL ? PyLong_AsLong(argument) : -1;
    if (buffer == NULL || (group == -1 && PyErr_Occurred())) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_gather_wait(buffer, (int32_t)group));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_gather_restart_doc,
             "gather_restart()\n--\n\nWaits for all, and goes back to the start of the "
             "order.");

static PyObject *
buffer_gather_restart(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_dbuffer_gather_restart(buffer));
    return none_or_raise(status);
}

PyDoc_STRVAR(buffer_traffic_doc,
             "traffic()\n--\n\nA dict: bytes moved and copied, groups gathered and "
             "reduced, so far.");

static PyObject *
buffer_traffic(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_dbuffer_t *buffer = checked(object);
    if (buffer == NULL) {
        return NULL;
    }
    dcp_dbuffer_traffic_t traffic = dcp_dbuffer_traffic(buffer);
    return Py_BuildValue(
        "{s:L,s:L,s:L,s:L}", "moved_bytes", (long long)traffic.moved_bytes,
        "copied_bytes", (long long)traffic.copied_bytes, "gathers",
        (long long)traffic.gather_count, "reduces", (long long)traffic.reduce_count);
}

static PyMethodDef buffer_methods[] = {
    {"tensor", buffer_tensor, METH_VARARGS, buffer_tensor_doc},
    {"runs", buffer_runs, METH_NOARGS, buffer_runs_doc},
    {"zero", buffer_zero, METH_NOARGS, buffer_zero_doc},
    {"fill", buffer_fill, METH_VARARGS, buffer_fill_doc},
    {"scale", buffer_scale, METH_VARARGS, buffer_scale_doc},
    {"add", buffer_add, METH_VARARGS, buffer_add_doc},
    {"copy", buffer_copy, METH_VARARGS, buffer_copy_doc},
    {"nonfinite", buffer_nonfinite, METH_O, buffer_nonfinite_doc},
    {"norm", buffer_norm, METH_VARARGS, buffer_norm_doc},
    {"reduce", buffer_reduce, METH_O, buffer_reduce_doc},
    {"acquire", buffer_acquire, METH_O, buffer_acquire_doc},
    {"release", buffer_release, METH_O, buffer_release_doc},
    {"gather", buffer_gather, METH_VARARGS, buffer_gather_doc},
    {"gather_order", buffer_gather_order, METH_VARARGS, buffer_gather_order_doc},
    {"gather_begin", buffer_gather_begin, METH_O, buffer_gather_begin_doc},
    {"gather_wait", buffer_gather_wait, METH_O, buffer_gather_wait_doc},
    {"gather_restart", buffer_gather_restart, METH_NOARGS, buffer_gather_restart_doc},
    {"traffic", buffer_traffic, METH_NOARGS, buffer_traffic_doc},
    {"close", buffer_close, METH_NOARGS, buffer_close_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)buffer_doc}, {Py_tp_init, buffer_init},
    {Py_tp_new, PyType_GenericNew},  {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_methods, buffer_methods}, {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "dcp._dcp.DBuffer",
    .basicsize = (int)sizeof(buffer_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = buffer_slots,
};

int
bind_dbuffer_register(PyObject *module)
{
    return bind_dbuffer_layout_register(module) < 0
                   || bind_type_add(module, &buffer_spec, &buffer_type) < 0
               ? -1
               : bind_shard_optimizer_register(module);
}
