/* dcp._dcp.ShardOptimizer: an optimizer over two buffers of one layout, for
 * dcp/sharded_tensors.py. It keeps them alive; arrays over its state count as views
 * until they die, and it cannot be closed before. */
#include "bind_dbuffer.h"
#include "bind_optimizer.h"

#include <string.h>

typedef struct optimizer_object {
    PyObject_HEAD dcp_optimizer_t *optimizer;       /* owned; NULL once closed */
    PyObject *world, *layout, *weights, *gradients; /* kept alive */
    dcp_optimizer_tensor_t *tensors;                /* owned, [tensor_count] */
    int64_t tensor_count;
    int32_t views; /* arrays that look into the state */
} optimizer_object_t;

static int
rules_fill(dcp_optimizer_tensor_t *tensors, int64_t count, PyObject *sequence)
{
    dcp_optimizer_rule_t *rules = bind_optimizer_rules(sequence, count);
    if (rules == NULL) {
        return -1;
    }
    for (int64_t i = 0; i < count; i++) {
        tensors[i].rule = rules[i];
    }
    PyMem_Free(rules);
    return 0;
}

static int
shape_fill(dcp_optimizer_tensor_t *tensor, PyObject *item)
{
    PyObject *tuple = PySequence_Tuple(item);
    if (tuple == NULL) {
        return -1;
    }
    Py_ssize_t dims = PyTuple_GET_SIZE(tuple);
    /* only the leading dimensions are flattened: a matrix is [all but the last, last]
     */
    Py_ssize_t extra = dims > DCP_OPTIMIZER_DIMS ? dims - DCP_OPTIMIZER_DIMS : 0;
    tensor->dim_count = (int32_t)(dims - extra);
    int64_t first = 1;
    for (Py_ssize_t i = 0; i < dims; i++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (size == -1 && PyErr_Occurred()) {
            Py_DECREF(tuple);
            return -1;
        }
        first = i <= extra ? first * size : size;
        tensor->shape[i <= extra ? 0 : i - extra] = first;
    }
    Py_DECREF(tuple);
    return 0;
}

static int
tensors_fill(optimizer_object_t *self, PyObject *shapes, PyObject *rules)
{
    PyObject *fast = PySequence_Fast(shapes, "shapes must be a sequence");
    if (fast == NULL) {
        return -1;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    self->tensor_count = count;
    self->tensors = PyMem_Calloc((size_t)count + 1, sizeof self->tensors[0]);
    int result = self->tensors != NULL ? 0 : -1;
    if (result < 0) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; result == 0 && i < count; i++) {
        result = shape_fill(&self->tensors[i], PySequence_Fast_GET_ITEM(fast, i));
    }
    Py_DECREF(fast);
    return result == 0 ? rules_fill(self->tensors, count, rules) : -1;
}

PyDoc_STRVAR(optimizer_doc,
             "ShardOptimizer(world, layout, weights, gradients, shapes, rules, *, "
             "no_windows)\n--\n\nState and steps of an optimizer. One shape and one "
             "rule a tensor. Collective.");

static int
optimizer_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"world",  "layout", "weights",    "gradients",
                            "shapes", "rules",  "no_windows", NULL};
    optimizer_object_t *self = (optimizer_object_t *)object;
    PyObject *world, *layout, *weights_object, *gradients_object, *shapes, *rules;
    int no_windows = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO|$p", names, &world, &layout,
                                     &weights_object, &gradients_object, &shapes,
                                     &rules, &no_windows)) {
        return -1;
    }
    dcp_comm_t *comm = bind_world_comm(world);
    buffer_object_t *weights =
        comm != NULL ? bind_buffer(weights_object, "weights") : NULL;
    buffer_object_t *gradients =
        weights != NULL ? bind_buffer(gradients_object, "gradients") : NULL;
    if (gradients == NULL) {
        return -1;
    }
    if (self->tensors != NULL || weights->layout != layout
        || gradients->layout != layout) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "weights and gradients must be new and of this "
                            "layout"));
        return -1;
    }
    if (tensors_fill(self, shapes, rules) < 0) {
        return -1;
    }
    dcp_optimizer_options_t options = {
        .comm = comm,
        .device = dcp_device_cpu(),
        .pool = weights->pool,
        .layout = ((layout_object_t *)layout)->layout,
        .tensors = self->tensors,
        .tensor_count = self->tensor_count,
        .weights = weights->buffer,
        .gradients = gradients->buffer,
        .no_windows = no_windows,
    };
    dcp_status_t status;
    BIND_NOGIL(status, dcp_optimizer_create(&options, &self->optimizer));
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    self->world = Py_NewRef(world);
    self->layout = Py_NewRef(layout);
    self->weights = Py_NewRef(weights_object);
    self->gradients = Py_NewRef(gradients_object);
    weights->views++; /* they cannot be closed before this */
    gradients->views++;
    return 0;
}

/* The buffers may be closed again. */
static void
drop_buffers(optimizer_object_t *self)
{
    ((buffer_object_t *)self->weights)->views--;
    ((buffer_object_t *)self->gradients)->views--;
}

static void
let_go(optimizer_object_t *self)
{
    if (self->optimizer != NULL) {
        dcp_optimizer_t *optimizer = self->optimizer;
        self->optimizer = NULL;
        /* may wait for the thread that carries, which may ask for signals */
        Py_BEGIN_ALLOW_THREADS dcp_optimizer_destroy(optimizer);
        Py_END_ALLOW_THREADS drop_buffers(self);
    }
    Py_CLEAR(self->gradients);
    Py_CLEAR(self->weights);
    Py_CLEAR(self->layout);
    Py_CLEAR(self->world);
}

static void
optimizer_dealloc(PyObject *object)
{
    optimizer_object_t *self = (optimizer_object_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    let_go(self);
    PyMem_Free(self->tensors);
    type->tp_free(object);
    Py_DECREF(type);
}

static optimizer_object_t *
checked(PyObject *object)
{
    optimizer_object_t *self = (optimizer_object_t *)object;
    if (self->optimizer == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this optimizer is closed"));
        return NULL;
    }
    return self;
}

PyDoc_STRVAR(optimizer_close_doc, "close()\n--\n\nLets go of the state; refused while "
                                  "arrays still look into it.");

static PyObject *
optimizer_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    optimizer_object_t *self = (optimizer_object_t *)object;
    if (self->views > 0) {
        return bind_raise(
            DCP_FAIL(DCP_ERR_STATE,
                     "%d arrays still look into the optimizer's state: drop them first",
                     (int)self->views));
    }
    let_go(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(optimizer_step_doc,
             "step(update_count, lr, grad_scale)\n--\n\nUpdates this rank's shard. "
             "Collective.");

static PyObject *
optimizer_step(PyObject *object, PyObject *args)
{
    optimizer_object_t *self = checked(object);
    long long update_count;
    dcp_optimizer_step_args_t step;
    if (self == NULL
        || !PyArg_ParseTuple(args, "Ldd", &update_count, &step.lr, &step.grad_scale)
        || bind_world_comm(self->world) == NULL) {
        return NULL;
    }
    step.update_count = update_count;
    dcp_status_t status;
    BIND_NOGIL(status, dcp_optimizer_step(self->optimizer, &step));
    if (status != DCP_OK && status != DCP_ERR_ARG) {
        /* the others may be waiting; arguments are wrong on all alike */
        dcp_comm_abort(bind_world_comm(self->world), dcp_last_error());
    }
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

PyDoc_STRVAR(optimizer_set_rules_doc,
             "set_rules(rules)\n--\n\nNew numbers for the same kinds.");

static PyObject *
optimizer_set_rules(PyObject *object, PyObject *rules)
{
    optimizer_object_t *self = checked(object);
    if (self == NULL) {
        return NULL;
    }
    size_t bytes = (size_t)self->tensor_count * sizeof self->tensors[0];
    dcp_optimizer_tensor_t *tensors = PyMem_Malloc(bytes + 1);
    if (tensors == NULL) {
        return PyErr_NoMemory();
    }
    memcpy(tensors, self->tensors, bytes);
    PyObject *result = NULL;
    if (rules_fill(tensors, self->tensor_count, rules) == 0) {
        dcp_status_t status = dcp_optimizer_set_rules(self->optimizer, tensors);
        result = status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
    }
    PyMem_Free(tensors);
    return result;
}

PyDoc_STRVAR(optimizer_states_doc,
             "states()\n--\n\nA list of (name, dtype, {tensor: shape of its "
             "state}).");

static PyObject *
optimizer_states(PyObject *object, PyObject *unused)
{
    (void)unused;
    optimizer_object_t *self = checked(object);
    if (self == NULL) {
        return NULL;
    }
    return bind_optimizer_states(self->optimizer, self->tensor_count);
}

PyDoc_STRVAR(optimizer_state_runs_doc,
             "state_runs(state)\n--\n\nWhat this rank holds of state number `state`: a "
             "list of (tensor, first element of the state's shape, writable array).");

static PyObject *
optimizer_state_runs(PyObject *object, PyObject *argument)
{
    optimizer_object_t *self = checked(object);
    return self != NULL ? bind_optimizer_state_runs(self->optimizer, argument, object,
                                                    &self->views)
                        : NULL;
}

static PyMethodDef optimizer_methods[] = {
    {"step", optimizer_step, METH_VARARGS, optimizer_step_doc},
    {"set_rules", optimizer_set_rules, METH_O, optimizer_set_rules_doc},
    {"states", optimizer_states, METH_NOARGS, optimizer_states_doc},
    {"state_runs", optimizer_state_runs, METH_O, optimizer_state_runs_doc},
    {"close", optimizer_close, METH_NOARGS, optimizer_close_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot optimizer_slots[] = {
    {Py_tp_doc, (void *)optimizer_doc}, {Py_tp_init, optimizer_init},
    {Py_tp_new, PyType_GenericNew},     {Py_tp_dealloc, optimizer_dealloc},
    {Py_tp_methods, optimizer_methods}, {0, NULL},
};

static PyType_Spec optimizer_spec = {
    .name = "dcp._dcp.ShardOptimizer",
    .basicsize = (int)sizeof(optimizer_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = optimizer_slots,
};

int
bind_shard_optimizer_register(PyObject *module)
{
    return bind_type_add(module, &optimizer_spec, NULL);
}
