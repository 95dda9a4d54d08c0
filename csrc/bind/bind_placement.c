/* Placements for Python: what ranks hold, moves between placements, sums into one. The
 * classes are in dcp/placement.py.
 *
 * A placement arrives as (kind, dim, values or None), as in placement.h; a list of them
 * has one for each axis of the mesh. */
#include "bind.h"

#include "dcp/redistribute.h"

typedef struct placed_list {
    dcp_placement_t items[DCP_MESH_AXES];
    PyArrayObject *values[DCP_MESH_AXES]; /* owned; what items borrow */
} placed_list_t;

typedef struct tensor {
    int64_t shape[DCP_PLACED_DIMS];
    int32_t dim_count;
    dcp_mesh_t mesh;
    placed_list_t source, target;
} tensor_t;

static void
release(tensor_t *tensor)
{
    for (int32_t a = 0; a < DCP_MESH_AXES; a++) {
        Py_CLEAR(tensor->source.values[a]);
        Py_CLEAR(tensor->target.values[a]);
    }
}

/* Up to `most` integers; their number, or -1 with an exception. */
static int32_t
parse_integers(PyObject *object, int64_t *numbers, int32_t most, const char *what)
{
    PyArrayObject *array = bind_integers(object, NPY_INT64, what);
    if (array == NULL) {
        return -1;
    }
    npy_intp count = PyArray_SIZE(array);
    if (count > most) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s has %lld entries, at most %d are possible",
                            what, (long long)count, (int)most));
        Py_DECREF(array);
        return -1;
    }
    for (npy_intp i = 0; i < count; i++) {
        numbers[i] = ((const int64_t *)PyArray_DATA(array))[i];
    }
    Py_DECREF(array);
    return (int32_t)count;
}

static int
parse_tensor(PyObject *shape, PyObject *sizes, tensor_t *tensor)
{
    int64_t mesh[DCP_MESH_AXES];
    tensor->dim_count = parse_integers(shape, tensor->shape, DCP_PLACED_DIMS, "shape");
    if (tensor->dim_count < 0) {
        return -1;
    }
    tensor->mesh.axis_count = parse_integers(sizes, mesh, DCP_MESH_AXES, "mesh");
    for (int32_t a = 0; a < tensor->mesh.axis_count; a++) {
        if (mesh[a] < 1 || mesh[a] > INT32_MAX) {
            bind_raise(DCP_FAIL(
                DCP_ERR_ARG, "mesh axis %d has size %lld: it must lie in 1..2^31 - 1",
                (int)a, (long long)mesh[a]));
            return -1;
        }
        tensor->mesh.sizes[a] = (int32_t)mesh[a];
    }
    return tensor->mesh.axis_count < 0 ? -1 : 0;
}

static int
parse_placements(PyObject *object, const tensor_t *tensor, placed_list_t *list)
{
    PyObject *items = PySequence_Fast(object, "placements must be a sequence");
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    if (count != tensor->mesh.axis_count) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%lld placements for a mesh of %d axes",
                            (long long)count, (int)tensor->mesh.axis_count));
        Py_DECREF(items);
        return -1;
    }
    for (Py_ssize_t a = 0; a < count; a++) {
        int kind, dim;
        PyObject *values;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items, a), "iiO", &kind, &dim,
                              &values)) {
            Py_DECREF(items);
            return -1;
        }
        list->items[a] =
            (dcp_placement_t){.kind = (dcp_placement_kind_t)kind, .dim = dim};
        if (values == Py_None) {
            continue;
        }
        list->values[a] = bind_integers(values, NPY_INT64, "units");
        if (list->values[a] == NULL) {
            Py_DECREF(items);
            return -1;
        }
        list->items[a].values = PyArray_DATA(list->values[a]);
        list->items[a].value_count = PyArray_SIZE(list->values[a]);
    }
    Py_DECREF(items);
    return 0;
}

/* What `rank` holds by one of the two lists. 0, or -1 with an exception. */
static int
place(const tensor_t *tensor, const placed_list_t *list, int rank,
      dcp_placed_t *placed_p)
{
    dcp_status_t status = dcp_placement_check(tensor->shape, tensor->dim_count,
                                              &tensor->mesh, list->items);
    int32_t ranks = dcp_mesh_rank_count(&tensor->mesh);
    if (status == DCP_OK && (rank < 0 || rank >= ranks)) {
        status =
            DCP_FAIL(DCP_ERR_ARG, "rank %d must lie in 0..%d", rank, (int)ranks - 1);
    }
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    dcp_placement_local(tensor->shape, tensor->dim_count, &tensor->mesh, list->items,
                        rank, placed_p);
    return 0;
}

PyDoc_STRVAR(placement_local_doc,
             "placement_local(shape, mesh, placements, rank)\n--\n\n"
             "(low, size, first, count): elements [first, first + count) of the box of "
             "`size` that begins at index `low`.");

static PyObject *
placement_local(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shape, *mesh, *placements, *result = NULL;
    int rank;
    if (!PyArg_ParseTuple(args, "OOOi", &shape, &mesh, &placements, &rank)) {
        return NULL;
    }
    tensor_t tensor = {0};
    dcp_placed_t placed;
    if (parse_tensor(shape, mesh, &tensor) == 0
        && parse_placements(placements, &tensor, &tensor.source) == 0
        && place(&tensor, &tensor.source, rank, &placed) == 0) {
        PyObject *low = PyTuple_New(placed.dim_count);
        PyObject *size = PyTuple_New(placed.dim_count);
        for (int32_t d = 0; low != NULL && size != NULL && d < placed.dim_count; d++) {
            PyTuple_SET_ITEM(low, d, PyLong_FromLongLong(placed.low[d]));
            PyTuple_SET_ITEM(size, d, PyLong_FromLongLong(placed.size[d]));
        }
        result = low != NULL && size != NULL
                     ? Py_BuildValue("(OOLL)", low, size, (long long)placed.first,
                                     (long long)placed.count)
                     : NULL;
        Py_XDECREF(low);
        Py_XDECREF(size);
    }
    release(&tensor);
    return result;
}

/* The runs of a set that `source` and `target` hold, as [n, 3]: position in either,
 * elements. */
static PyObject *
list_runs(const dcp_placed_t *part, const dcp_placed_t *source,
          const dcp_placed_t *target)
{
    int64_t together, count = 0;
    for (int64_t at = 0; at < part->count; at += together) {
        dcp_placed_run(part, at, &together);
        count++;
    }
    npy_intp dims[2] = {(npy_intp)count, 3};
    PyObject *result = PyArray_SimpleNew(2, dims, NPY_INT64);
    if (result == NULL) {
        return NULL;
    }
    int64_t *row = PyArray_DATA((PyArrayObject *)result);
    for (int64_t at = 0; at < part->count; at += together, row += 3) {
        int64_t element = dcp_placed_run(part, at, &together);
        row[0] = source != NULL ? dcp_placed_position(source, element) : element;
        row[1] = dcp_placed_position(target, element);
        row[2] = together;
    }
    return result;
}

PyDoc_STRVAR(placement_runs_doc,
             "placement_runs(shape, mesh, placements, rank)\n--\n\n"
             "int64 [n, 3]: element of the tensor, position on the rank, elements, of "
             "every run.");

static PyObject *
placement_runs(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shape, *mesh, *placements, *result = NULL;
    int rank;
    if (!PyArg_ParseTuple(args, "OOOi", &shape, &mesh, &placements, &rank)) {
        return NULL;
    }
    tensor_t tensor = {0};
    dcp_placed_t placed;
    if (parse_tensor(shape, mesh, &tensor) == 0
        && parse_placements(placements, &tensor, &tensor.source) == 0
        && place(&tensor, &tensor.source, rank, &placed) == 0) {
        result = list_runs(&placed, NULL, &placed);
    }
    release(&tensor);
    return result;
}

PyDoc_STRVAR(
    placement_overlap_doc,
    "placement_overlap(shape, mesh, source, source_rank, target, target_rank)\n--\n\n"
    "int64 [n, 3]: position on the one rank, on the other, elements, of every run that "
    "both hold.");

static PyObject *
placement_overlap(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shape, *mesh, *source, *target, *result = NULL;
    int source_rank, target_rank;
    if (!PyArg_ParseTuple(args, "OOOiOi", &shape, &mesh, &source, &source_rank, &target,
                          &target_rank)) {
        return NULL;
    }
    tensor_t tensor = {0};
    dcp_placed_t has, wants;
    if (parse_tensor(shape, mesh, &tensor) == 0
        && parse_placements(source, &tensor, &tensor.source) == 0
        && parse_placements(target, &tensor, &tensor.target) == 0
        && place(&tensor, &tensor.source, source_rank, &has) == 0
        && place(&tensor, &tensor.target, target_rank, &wants) == 0) {
        dcp_placed_t both = dcp_placed_overlap(&has, &wants);
        result = list_runs(&both, &has, &wants);
    }
    release(&tensor);
    return result;
}

static const struct {
    int type_num;
    dcp_dtype_t dtype;
} dtypes[] = {{NPY_FLOAT32, DCP_F32}, {NPY_UINT16, DCP_BF16}, {NPY_FLOAT64, DCP_F64},
              {NPY_INT32, DCP_I32},   {NPY_INT64, DCP_I64},   {NPY_UINT8, DCP_U8}};

/* The dtype of an array, as an index of `dtypes`, or -1 with an exception. */
static int
find_dtype(PyObject *object)
{
    if (!PyArray_Check(object)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE, "local must be a NumPy array, got %.100s",
                            Py_TYPE(object)->tp_name));
        return -1;
    }
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)object),
                                  dtypes[i].type_num)) {
            return (int)i;
        }
    }
    PyObject *name = PyObject_Str((PyObject *)PyArray_DESCR((PyArrayObject *)object));
    if (name != NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE,
                            "local has dtype %s: float32, float64, uint16 (bfloat16), "
                            "int32, int64 and uint8 move",
                            PyUnicode_AsUTF8(name)));
        Py_DECREF(name);
    }
    return -1;
}

/* `out` if given, else a new array of `count` elements. */
static PyArrayObject *
get_out(PyObject *out, int64_t count, int type_num)
{
    if (out != Py_None) {
        return bind_array_writable(out, type_num, -1, "out");
    }
    npy_intp size = (npy_intp)count;
    return (PyArrayObject *)PyArray_SimpleNew(1, &size, type_num);
}

static PyObject *
raise_status(dcp_status_t status)
{
    /* a signal handler's own exception (KeyboardInterrupt) goes first */
    return PyErr_Occurred() != NULL ? NULL : bind_raise(status);
}

/* (out, (sent, received, kept, staged)); takes `out`. */
static PyObject *
wrap(PyArrayObject *out, const dcp_moved_t *moved)
{
    return Py_BuildValue("(N(LLLL))", (PyObject *)out, (long long)moved->sent_bytes,
                         (long long)moved->received_bytes, (long long)moved->kept_bytes,
                         (long long)moved->staged_bytes);
}

PyDoc_STRVAR(
    placement_redistribute_doc,
    "placement_redistribute(world, group, group_axis, shape, mesh, source, target, "
    "local, out, window)\n--\n\n"
    "(out, (sent, received, kept, staged bytes)). group, out and window may be None.");

static PyObject *
placement_redistribute(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *world, *group, *shape, *mesh, *source, *target, *local_object,
        *out_object, *window;
    dcp_redistribute_args_t args = {0};
    if (!PyArg_ParseTuple(arguments, "OOiOOOOOOO", &world, &group, &args.group_axis,
                          &shape, &mesh, &source, &target, &local_object, &out_object,
                          &window)) {
        return NULL;
    }
    tensor_t tensor = {0};
    PyArrayObject *local = NULL, *out = NULL;
    dcp_placed_t placed;
    int type = find_dtype(local_object);
    if (type < 0 || (args.comm = bind_world_comm(world)) == NULL
        || (group != Py_None && (args.group = bind_world_comm(group)) == NULL)
        || (window != Py_None
            && (args.window = bind_window_of(window, dcp_comm_size(args.comm))) == NULL)
        || parse_tensor(shape, mesh, &tensor) < 0
        || parse_placements(source, &tensor, &tensor.source) < 0
        || parse_placements(target, &tensor, &tensor.target) < 0
        || place(&tensor, &tensor.target, dcp_comm_rank(args.comm), &placed) < 0) {
        goto fail;
    }
    local = bind_array(local_object, dtypes[type].type_num, -1, "local");
    out =
        local != NULL ? get_out(out_object, placed.count, dtypes[type].type_num) : NULL;
    if (out == NULL) {
        goto fail;
    }
    args.shape = tensor.shape;
    args.dim_count = tensor.dim_count;
    args.mesh = tensor.mesh;
    args.source = tensor.source.items;
    args.target = tensor.target.items;
    args.dtype = dtypes[type].dtype;
    args.local = PyArray_DATA(local);
    args.local_count = PyArray_SIZE(local);
    args.out = PyArray_DATA(out);
    args.out_count = PyArray_SIZE(out);
    dcp_moved_t moved = {0};
    dcp_status_t status;
    BIND_NOGIL(status, dcp_redistribute(&args, &moved));
    release(&tensor);
    Py_DECREF(local);
    if (status != DCP_OK) {
        Py_DECREF(out);
        return raise_status(status);
    }
    return wrap(out, &moved);
fail:
    release(&tensor);
    Py_XDECREF(local);
    return NULL;
}

PyDoc_STRVAR(placement_reduce_doc,
             "placement_reduce(world, groups, shape, mesh, target, x, out)\n--\n\n"
             "(out, (sent, received, kept, staged bytes)). groups: a world or None for "
             "each axis of the mesh; out may be None.");

static PyObject *
placement_reduce(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *world, *groups, *shape, *mesh, *target, *x_object, *out_object;
    if (!PyArg_ParseTuple(arguments, "OO!OOOOO", &world, &PyTuple_Type, &groups, &shape,
                          &mesh, &target, &x_object, &out_object)) {
        return NULL;
    }
    tensor_t tensor = {0};
    dcp_placement_reduce_args_t args = {0};
    dcp_comm_t *comms[DCP_MESH_AXES] = {NULL};
    PyArrayObject *x = NULL, *out = NULL;
    dcp_placed_t placed;
    if ((args.comm = bind_world_comm(world)) == NULL
        || parse_tensor(shape, mesh, &tensor) < 0
        || parse_placements(target, &tensor, &tensor.target) < 0
        || place(&tensor, &tensor.target, dcp_comm_rank(args.comm), &placed) < 0
        || (x = bind_array(x_object, NPY_FLOAT32, -1, "x")) == NULL
        || (out = get_out(out_object, placed.count, NPY_FLOAT32)) == NULL) {
        goto fail;
    }
    for (Py_ssize_t a = 0; a < PyTuple_GET_SIZE(groups) && a < DCP_MESH_AXES; a++) {
        PyObject *group = PyTuple_GET_ITEM(groups, a);
        if (group != Py_None && (comms[a] = bind_world_comm(group)) == NULL) {
            goto fail;
        }
    }
    args.groups = comms;
    args.shape = tensor.shape;
    args.dim_count = tensor.dim_count;
    args.mesh = tensor.mesh;
    args.target = tensor.target.items;
    args.full = PyArray_DATA(x);
    args.full_count = PyArray_SIZE(x);
    args.out = PyArray_DATA(out);
    args.out_count = PyArray_SIZE(out);
    dcp_moved_t moved = {0};
    dcp_status_t status;
    BIND_NOGIL(status, dcp_placement_reduce(&args, &moved));
    release(&tensor);
    Py_DECREF(x);
    if (status != DCP_OK) {
        Py_DECREF(out);
        return raise_status(status);
    }
    return wrap(out, &moved);
fail:
    release(&tensor);
    Py_XDECREF(x);
    Py_XDECREF(out);
    return NULL;
}

static PyMethodDef placement_methods[] = {
    {"placement_local", placement_local, METH_VARARGS, placement_local_doc},
    {"placement_runs", placement_runs, METH_VARARGS, placement_runs_doc},
    {"placement_overlap", placement_overlap, METH_VARARGS, placement_overlap_doc},
    {"placement_redistribute", placement_redistribute, METH_VARARGS,
     placement_redistribute_doc},
    {"placement_reduce", placement_reduce, METH_VARARGS, placement_reduce_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_placement_register(PyObject *module)
{
    return PyModule_AddFunctions(module, placement_methods);
}
