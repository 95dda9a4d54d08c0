/* The type dcp._dcp.World: a communicator for NumPy arrays. dcp.World derives from it.
 *
 * Arrays are C-contiguous and of one of five dtypes; counts are elements. One thread at
 * a time may be in a call (StateError otherwise); abort is allowed from any thread. A
 * wait in the core asks every 50 ms for pending signals, so that Ctrl-C ends it. */
#include "bind.h"
#include "bind_reduce.h"

#include "dcp/comm.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

typedef struct world {
    PyObject_HEAD;
    dcp_comm_t *comm; /* NULL: closed */
    int busy;         /* a thread is in a call */
    bind_reducer_t reducer;
} world_t;

static PyTypeObject *world_type;

/* Runs without the GIL, on the thread that waits. Leaves the exception set. */
static bool
poll_signals(void)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    bool pending = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return pending;
}

static PyObject *
raise_status(dcp_status_t status)
{
    /* a signal handler's own exception (KeyboardInterrupt) goes first */
    return PyErr_Occurred() != NULL ? NULL : bind_raise(status);
}

/* The communicator, or NULL with an exception; marks the object busy. */
static dcp_comm_t *
enter(world_t *self)
{
    if (self->comm == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "the world is closed"));
        return NULL;
    }
    if (self->busy) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "another thread is in a call of this world: "
                                           "one thread at a time may use it"));
        return NULL;
    }
    self->busy = 1;
    return self->comm;
}

/* Ends a call: `result` (given away) or an exception. */
static PyObject *
leave(world_t *self, dcp_status_t status, PyObject *result)
{
    self->busy = 0;
    if (status != DCP_OK) {
        Py_XDECREF(result);
        return raise_status(status);
    }
    return result;
}

static const struct {
    int type_num;
    dcp_dtype_t dtype;
} dtypes[] = {{NPY_FLOAT32, DCP_F32},
              {NPY_FLOAT64, DCP_F64},
              {NPY_INT32, DCP_I32},
              {NPY_INT64, DCP_I64},
              {NPY_UINT8, DCP_U8}};

/* A new reference to a contiguous array of a dtype that can travel. */
static PyArrayObject *
get_array(PyObject *object, dcp_dtype_t *dtype_p, int is_written, const char *what)
{
    int type_num = NPY_FLOAT32; /* what bind_array asks for in its message */
    if (PyArray_Check(object)) {
        int given = PyArray_TYPE((PyArrayObject *)object), known = 0;
        for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
            if (PyArray_EquivTypenums(given, dtypes[i].type_num)) {
                type_num = dtypes[i].type_num;
                *dtype_p = dtypes[i].dtype;
                known = 1;
            }
        }
        if (!known) {
            PyObject *name =
                PyObject_Str((PyObject *)PyArray_DESCR((PyArrayObject *)object));
            if (name != NULL) {
                bind_raise(DCP_FAIL(
                    DCP_ERR_TYPE,
                    "%s has dtype %s: float32, float64, int32, int64 and uint8 travel",
                    what, PyUnicode_AsUTF8(name)));
                Py_DECREF(name);
            }
            return NULL;
        }
    } else {
        *dtype_p = DCP_F32;
    }
    return is_written ? bind_array_writable(object, type_num, -1, what)
                      : bind_array(object, type_num, -1, what);
}

/* counts as int64[size], or NULL with an exception. */
static PyArrayObject *
get_counts(PyObject *object, const dcp_comm_t *comm, const char *what)
{
    PyArrayObject *counts = bind_integers(object, NPY_INT64, what);
    if (counts != NULL && PyArray_SIZE(counts) != dcp_comm_size(comm)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "%s has %lld entries, but the world has %d ranks", what,
                            (long long)PyArray_SIZE(counts), (int)dcp_comm_size(comm)));
        Py_CLEAR(counts);
    }
    return counts;
}

static int64_t
sum_counts(PyArrayObject *counts)
{
    const int64_t *values = PyArray_DATA(counts);
    int64_t sum = 0;
    for (npy_intp i = 0; i < PyArray_SIZE(counts); i++) {
        if (__builtin_add_overflow(sum, values[i], &sum)) {
            return -1;
        }
    }
    return sum;
}

/* Has the array as many elements as the call needs? 0, or -1 with an exception. */
static int
check_size(PyArrayObject *array, int64_t wanted, const char *what)
{
    if (PyArray_SIZE(array) != wanted) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "%s has %lld elements, the counts ask for %lld", what,
                            (long long)PyArray_SIZE(array), (long long)wanted));
        return -1;
    }
    return 0;
}

/* `out` if given (checked), else a new array of `count` elements. */
static PyArrayObject *
get_out(PyObject *out, int64_t count, dcp_dtype_t dtype)
{
    int type_num = NPY_FLOAT32;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        type_num = dtypes[i].dtype == dtype ? dtypes[i].type_num : type_num;
    }
    if (out == NULL || out == Py_None) {
        if (count < 0) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                "counts must not be negative and must not overflow"));
            return NULL;
        }
        npy_intp shape = (npy_intp)count;
        return (PyArrayObject *)PyArray_SimpleNew(1, &shape, type_num);
    }
    PyArrayObject *array = bind_array_writable(out, type_num, -1, "out");
    if (array != NULL && check_size(array, count, "out") < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *
world_barrier(PyObject *object, PyObject *unused)
{
    (void)unused;
    world_t *self = (world_t *)object;
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_comm_barrier(comm));
    return leave(self, status, Py_NewRef(Py_None));
}

static PyObject *
world_allreduce(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    PyObject *x, *out;
    int op;
    if (!PyArg_ParseTuple(args, "OiO", &x, &op, &out)) {
        return NULL;
    }
    dcp_dtype_t dtype;
    PyArrayObject *send = get_array(x, &dtype, 0, "x");
    if (send == NULL) {
        return NULL;
    }
    dcp_comm_t *comm = NULL;
    PyArrayObject *recv = get_out(out, PyArray_SIZE(send), dtype);
    if (recv == NULL || (comm = enter(self)) == NULL) {
        goto fail;
    }
    dcp_status_t status;
    BIND_NOGIL(status,
               dcp_comm_allreduce(comm, PyArray_DATA(send), PyArray_DATA(recv),
                                  PyArray_SIZE(send), dtype, (dcp_reduce_op_t)op));
    Py_DECREF(send);
    return leave(self, status, (PyObject *)recv);
fail:
    Py_DECREF(send);
    Py_XDECREF(recv);
    return NULL;
}

/* allgatherv (gather != 0) and reduce_scatterv: x, counts, out. */
static PyObject *
run_ragged(world_t *self, PyObject *args, int gather)
{
    PyObject *x, *counts_object, *out;
    if (!PyArg_ParseTuple(args, "OOO", &x, &counts_object, &out)) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    PyArrayObject *counts = NULL, *recv = NULL;
    dcp_dtype_t dtype;
    PyArrayObject *send = get_array(x, &dtype, 0, "x");
    if (send == NULL || (counts = get_counts(counts_object, comm, "counts")) == NULL) {
        goto fail;
    }
    int64_t own = ((const int64_t *)PyArray_DATA(counts))[dcp_comm_rank(comm)];
    int64_t total = sum_counts(counts);
    if (check_size(send, gather ? own : total, "x") < 0
        || (recv = get_out(out, gather ? total : own, dtype)) == NULL) {
        goto fail;
    }
    dcp_status_t status;
    Py_BEGIN_ALLOW_THREADS status =
        (gather ? dcp_comm_allgatherv : dcp_comm_reduce_scatterv)(
            comm, PyArray_DATA(send), PyArray_DATA(counts), PyArray_DATA(recv), dtype);
    Py_END_ALLOW_THREADS Py_DECREF(send);
    Py_DECREF(counts);
    return leave(self, status, (PyObject *)recv);
fail:
    Py_XDECREF(send);
    Py_XDECREF(counts);
    self->busy = 0;
    return NULL;
}

static PyObject *
world_allgatherv(PyObject *object, PyObject *args)
{
    return run_ragged((world_t *)object, args, 1);
}

static PyObject *
world_reduce_scatterv(PyObject *object, PyObject *args)
{
    return run_ragged((world_t *)object, args, 0);
}

static PyObject *
world_quantised_reduce(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    PyObject *result = bind_reduce(&self->reducer, comm, args);
    self->busy = 0;
    return result;
}

static PyObject *
world_alltoallv(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    PyObject *x, *send_object, *recv_object, *out;
    if (!PyArg_ParseTuple(args, "OOOO", &x, &send_object, &recv_object, &out)) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    PyArrayObject *sends = NULL, *recvs = NULL, *recv = NULL;
    dcp_dtype_t dtype;
    PyArrayObject *send = get_array(x, &dtype, 0, "x");
    if (send == NULL || (sends = get_counts(send_object, comm, "counts")) == NULL
        || (recvs = get_counts(recv_object, comm, "recv_counts")) == NULL
        || check_size(send, sum_counts(sends), "x") < 0
        || (recv = get_out(out, sum_counts(recvs), dtype)) == NULL) {
        goto fail;
    }
    dcp_status_t status;
    BIND_NOGIL(status,
               dcp_comm_alltoallv(comm, PyArray_DATA(send), PyArray_DATA(sends),
                                  PyArray_DATA(recv), PyArray_DATA(recvs), dtype));
    Py_DECREF(send);
    Py_DECREF(sends);
    Py_DECREF(recvs);
    return leave(self, status, (PyObject *)recv);
fail:
    Py_XDECREF(send);
    Py_XDECREF(sends);
    Py_XDECREF(recvs);
    self->busy = 0;
    return NULL;
}

static PyObject *
world_broadcast(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    PyObject *x;
    int root;
    if (!PyArg_ParseTuple(args, "Oi", &x, &root)) {
        return NULL;
    }
    dcp_dtype_t dtype;
    PyArrayObject *data = get_array(x, &dtype, 1, "x");
    if (data == NULL) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        Py_DECREF(data);
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_comm_broadcast(comm, PyArray_DATA(data), PyArray_SIZE(data),
                                          dtype, root));
    return leave(self, status, (PyObject *)data);
}

/* Sends and receives of arrays as one group: sends [(array, to)], receives
 * [(array, from)]. */
static PyObject *
world_exchange(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    PyObject *lists[2];
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &lists[0], &PyList_Type,
                          &lists[1])) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    PyObject *held = PyList_New(0); /* keeps the arrays while the group runs */
    dcp_status_t status = held != NULL ? dcp_comm_group_begin(comm) : DCP_OK;
    int is_open = held != NULL && status == DCP_OK;
    for (int side = 0; side < 2 && is_open && status == DCP_OK; side++) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[side]); i++) {
            PyObject *x;
            int peer;
            dcp_dtype_t dtype;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(lists[side], i), "Oi", &x, &peer)) {
                goto end;
            }
            PyArrayObject *array = get_array(x, &dtype, side, "array");
            if (array == NULL || PyList_Append(held, (PyObject *)array) < 0) {
                Py_XDECREF(array);
                goto end;
            }
            Py_DECREF(array);
            status = side == 0 ? dcp_comm_send(comm, PyArray_DATA(array),
                                               PyArray_NBYTES(array), peer)
                               : dcp_comm_recv(comm, PyArray_DATA(array),
                                               PyArray_NBYTES(array), peer);
            if (status != DCP_OK) {
                goto end;
            }
        }
    }
    if (is_open && status == DCP_OK) {
        is_open = 0;
        BIND_NOGIL(status, dcp_comm_group_end(comm));
    }
end:
    if (is_open) {
        dcp_comm_group_cancel(comm);
    }
    Py_XDECREF(held);
    self->busy = 0;
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

static PyObject *
world_split(PyObject *object, PyObject *args)
{
    world_t *self = (world_t *)object;
    int color, key;
    if (!PyArg_ParseTuple(args, "ii", &color, &key)) {
        return NULL;
    }
    world_t *part = (world_t *)Py_TYPE(object)->tp_alloc(Py_TYPE(object), 0);
    if (part == NULL) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        Py_DECREF(part);
        return NULL;
    }
    dcp_comm_t *new_comm = NULL;
    dcp_status_t status;
    BIND_NOGIL(status, dcp_comm_split(comm, color, key, &new_comm));
    part->comm = new_comm;
    if (status == DCP_OK && new_comm == NULL) {
        Py_DECREF(part);
        return leave(self, DCP_OK, Py_NewRef(Py_None));
    }
    return leave(self, status, (PyObject *)part);
}

static PyObject *
world_window(PyObject *object, PyObject *argument)
{
    world_t *self = (world_t *)object;
    long long bytes = PyLong_AsLongLong(argument);
    if (bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    dcp_window_t *window = NULL;
    dcp_status_t status;
    BIND_NOGIL(status, dcp_window_create(comm, bytes, &window));
    PyObject *result =
        status == DCP_OK ? bind_window_new(window, dcp_comm_size(comm)) : NULL;
    return leave(self, status, result);
}

static PyObject *
world_traffic(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_comm_t *comm = bind_world_comm(object);
    if (comm == NULL) {
        return NULL;
    }
    dcp_comm_traffic_t traffic = dcp_comm_traffic(comm);
    return Py_BuildValue(
        "LLdd", (long long)traffic.call_count, (long long)traffic.received_bytes,
        (double)traffic.wait_ns * 1e-9, (double)traffic.move_ns * 1e-9);
}

static PyObject *
world_abort(PyObject *object, PyObject *argument)
{
    world_t *self = (world_t *)object;
    const char *text = PyUnicode_AsUTF8(argument);
    if (text == NULL) {
        return NULL;
    }
    dcp_comm_abort(self->comm, text);
    Py_RETURN_NONE;
}

static PyObject *
world_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    world_t *self = (world_t *)object;
    if (self->comm == NULL) {
        Py_RETURN_NONE;
    }
    dcp_comm_t *comm = enter(self);
    if (comm == NULL) {
        return NULL;
    }
    self->comm = NULL;
    self->busy = 0;
    Py_BEGIN_ALLOW_THREADS bind_reducer_destroy(&self->reducer);
    dcp_comm_destroy(comm);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *
world_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank",           "size",   "run_id", "timeout_s",
                            "join_timeout_s", "folder", NULL};
    dcp_comm_options_t options = {.size = 1};
    double timeout_s = 0, join_timeout_s = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|iizddz", names, &options.rank,
                                     &options.size, &options.run_id, &timeout_s,
                                     &join_timeout_s, &options.folder)) {
        return NULL;
    }
    world_t *self = (world_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    options.timeout_ns = (int64_t)(timeout_s * 1e9);
    options.join_timeout_ns = (int64_t)(join_timeout_s * 1e9);
    dcp_status_t status;
    Py_BEGIN_ALLOW_THREADS status = options.run_id == NULL
                                        ? dcp_comm_create_self(&self->comm)
                                        : dcp_comm_create_shm(&options, &self->comm);
    Py_END_ALLOW_THREADS if (status != DCP_OK)
    {
        Py_DECREF(self);
        return raise_status(status);
    }
    return (PyObject *)self;
}

static void
world_dealloc(PyObject *object)
{
    world_t *self = (world_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    bind_reducer_destroy(&self->reducer);
    dcp_comm_destroy(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
world_rank(PyObject *object, void *unused)
{
    (void)unused;
    dcp_comm_t *comm = bind_world_comm(object);
    return comm != NULL ? PyLong_FromLong(dcp_comm_rank(comm)) : NULL;
}

static PyObject *
world_size(PyObject *object, void *unused)
{
    (void)unused;
    dcp_comm_t *comm = bind_world_comm(object);
    return comm != NULL ? PyLong_FromLong(dcp_comm_size(comm)) : NULL;
}

static PyObject *
world_transport(PyObject *object, void *unused)
{
    (void)unused;
    dcp_comm_t *comm = bind_world_comm(object);
    return comm != NULL ? PyUnicode_FromString(dcp_comm_transport(comm)) : NULL;
}

static PyObject *
world_closed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((world_t *)object)->comm == NULL);
}

struct dcp_comm *
bind_world_comm(PyObject *world)
{
    if (world_type == NULL || !PyObject_TypeCheck(world, world_type)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE, "world must be a dcp.World, got %.100s",
                            Py_TYPE(world)->tp_name));
        return NULL;
    }
    dcp_comm_t *comm = ((world_t *)world)->comm;
    if (comm == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "the world is closed"));
    }
    return comm;
}

struct dcp_comm **
bind_world_comm_slot(PyObject *world)
{
    return bind_world_comm(world) != NULL ? &((world_t *)world)->comm : NULL;
}

PyDoc_STRVAR(die_with_parent_doc,
             "die_with_parent(parent)\n--\n\nKills this process when process `parent` "
             "ends. False if it has ended already.");

static PyObject *
module_die_with_parent(PyObject *module, PyObject *argument)
{
    (void)module;
    long parent = PyLong_AsLong(argument);
    if (parent == -1 && PyErr_Occurred()) {
        return NULL;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return PyBool_FromLong(getppid() == (pid_t)parent);
}

static PyMethodDef world_methods[] = {
    {"_barrier", world_barrier, METH_NOARGS, NULL},
    {"_allreduce", world_allreduce, METH_VARARGS, NULL},
    {"_allgatherv", world_allgatherv, METH_VARARGS, NULL},
    {"_reduce_scatterv", world_reduce_scatterv, METH_VARARGS, NULL},
    {"_quantised_reduce", world_quantised_reduce, METH_VARARGS, NULL},
    {"_alltoallv", world_alltoallv, METH_VARARGS, NULL},
    {"_broadcast", world_broadcast, METH_VARARGS, NULL},
    {"_exchange", world_exchange, METH_VARARGS, NULL},
    {"_split", world_split, METH_VARARGS, NULL},
    {"_window", world_window, METH_O,
     "_window(bytes)\n--\n\nMemory that all ranks see; each brings `bytes`, zeros."},
    {"_traffic", world_traffic, METH_NOARGS, NULL},
    {"_abort", world_abort, METH_O, NULL},
    {"_close", world_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef world_getters[] = {
    {"rank", world_rank, NULL, "Number of this rank, 0 <= rank < size.", NULL},
    {"size", world_size, NULL, "Number of ranks.", NULL},
    {"transport", world_transport, NULL,
     "How bytes travel: 'self', 'shm' or 'emulated'.", NULL},
    {"closed", world_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot world_slots[] = {
    {Py_tp_doc, "A communicator (see dcp.World, which derives from it)."},
    {Py_tp_new, world_new},
    {Py_tp_dealloc, world_dealloc},
    {Py_tp_methods, world_methods},
    {Py_tp_getset, world_getters},
    {0, NULL},
};

static PyType_Spec world_spec = {
    .name = "dcp._dcp.World",
    .basicsize = sizeof(world_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = world_slots,
};

static PyMethodDef functions[] = {
    {"die_with_parent", module_die_with_parent, METH_O, die_with_parent_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_world_register(PyObject *module)
{
    dcp_comm_set_interrupt(poll_signals);
    return bind_type_add(module, &world_spec, &world_type) < 0
                   || PyModule_AddFunctions(module, functions) < 0
               ? -1
               : bind_window_register(module);
}
