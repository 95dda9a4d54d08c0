/* Rules in, states out: for dcp._dcp.Sharded and dcp._dcp.ShardOptimizer alike;
 * and the bytes that an optimizer would need. */
#include "bind_optimizer.h"
#include "bind_view.h"

#include "dcp/train.h"

static int
rule_fill(dcp_optimizer_rule_t *rule, PyObject *item)
{
    PyObject *tuple = PySequence_Tuple(item);
    int kind;
    long long block;
    int ok = tuple != NULL
             && PyArg_ParseTuple(tuple, "iddddddpiLi", &kind, &rule->lr_scale,
                                 &rule->weight_decay, &rule->beta1, &rule->beta2,
                                 &rule->eps, &rule->momentum, &rule->nesterov,
                                 &rule->iterations, &block, &rule->every);
    Py_XDECREF(tuple);
    if (!ok) {
        return -1;
    }
    rule->kind = (dcp_optimizer_kind_t)kind;
    rule->block = block;
    return 0;
}

dcp_optimizer_rule_t *
bind_optimizer_rules(PyObject *sequence, int64_t tensor_count)
{
    PyObject *fast = PySequence_Fast(sequence, "rules must be a sequence");
    if (fast == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    dcp_optimizer_rule_t *rules = NULL;
    if (count != tensor_count) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "rules has %lld items for %lld tensors",
                            (long long)count, (long long)tensor_count));
        goto done;
    }
    rules = PyMem_Calloc((size_t)count + 1, sizeof *rules);
    if (rules == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; rules != NULL && i < count; i++) {
        if (rule_fill(&rules[i], PySequence_Fast_GET_ITEM(fast, i)) < 0) {
            PyMem_Free(rules);
            rules = NULL;
        }
    }
done:
    Py_DECREF(fast);
    return rules;
}

static PyObject *
shape_tuple(const int64_t *shape, int32_t dim_count)
{
    PyObject *tuple = PyTuple_New(dim_count);
    for (int32_t d = 0; tuple != NULL && d < dim_count; d++) {
        PyObject *size = PyLong_FromLongLong(shape[d]);
        if (size == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, d, size);
    }
    return tuple;
}

/* {tensor: shape} of one state. */
static PyObject *
state_shapes(const dcp_optimizer_t *optimizer, int32_t state, int64_t tensor_count)
{
    PyObject *shapes = PyDict_New();
    for (int64_t i = 0; shapes != NULL && i < tensor_count; i++) {
        int32_t dim_count;
        int64_t shape[DCP_OPTIMIZER_DIMS];
        dcp_optimizer_state_shape(optimizer, state, i, &dim_count, shape);
        if (dim_count < 0) {
            continue;
        }
        PyObject *key = PyLong_FromLongLong(i);
        PyObject *tuple = key != NULL ? shape_tuple(shape, dim_count) : NULL;
        if (tuple == NULL || PyDict_SetItem(shapes, key, tuple) < 0) {
            Py_CLEAR(shapes);
        }
        Py_XDECREF(key);
        Py_XDECREF(tuple);
    }
    return shapes;
}

PyObject *
bind_optimizer_states(const dcp_optimizer_t *optimizer, int64_t tensor_count)
{
    int32_t count = optimizer != NULL ? dcp_optimizer_state_count(optimizer) : 0;
    PyObject *list = PyList_New(count);
    for (int32_t state = 0; list != NULL && state < count; state++) {
        PyObject *shapes = state_shapes(optimizer, state, tensor_count);
        PyObject *item =
            shapes != NULL
                ? Py_BuildValue(
                      "ssN", dcp_optimizer_state_name(optimizer, state),
                      dcp_dtype_name(dcp_optimizer_state_dtype(optimizer, state)),
                      shapes)
                : NULL;
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, state, item);
    }
    return list;
}

PyObject *
bind_optimizer_state_runs(const dcp_optimizer_t *optimizer, PyObject *state,
                          PyObject *owner, int32_t *views)
{
    long number = PyLong_AsLong(state);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int32_t count = optimizer != NULL ? dcp_optimizer_state_count(optimizer) : 0;
    if (number < 0 || number >= count) {
        return bind_raise(DCP_FAIL(
            DCP_ERR_ARG, "state %ld: the optimizer has %d states", number, (int)count));
    }
    const dcp_state_run_t *runs;
    int64_t run_count;
    dcp_optimizer_state_runs(optimizer, (int32_t)number, &runs, &run_count);
    int type_num = bind_type_num(dcp_optimizer_state_dtype(optimizer, (int32_t)number));
    PyObject *list = PyList_New(run_count);
    for (int64_t i = 0; list != NULL && i < run_count; i++) {
        PyObject *view =
            bind_run_view(owner, views, runs[i].data, type_num, runs[i].count);
        if (bind_run_set(list, i, runs[i].tensor, runs[i].first, view) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyDoc_STRVAR(
    optimizer_bytes_doc,
    "optimizer_bytes(config, rules, *, ranks, block_rows, no_windows)\n--\n\n"
    "Most bytes of the optimizer's state and scratch that any rank would hold.");

static PyObject *
optimizer_bytes(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"config",     "rules",      "ranks",
                            "block_rows", "no_windows", NULL};
    PyObject *mapping, *sequence;
    int ranks = 1, no_windows = 0;
    long long block_rows = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$iLp", names, &mapping,
                                     &sequence, &ranks, &block_rows, &no_windows)) {
        return NULL;
    }
    dcp_transformer1d_config_t config;
    if (bind_transformer1d_config(mapping, &config) < 0) {
        return NULL;
    }
    dcp_status_t status = dcp_transformer1d_check(&config);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    dcp_optimizer_rule_t *rules =
        bind_optimizer_rules(sequence, dcp_model_tensor_count(&config));
    if (rules == NULL) {
        return NULL;
    }
    int64_t bytes = 0;
    BIND_NOGIL(status, dcp_sharded_optimizer_bytes(&config, rules, ranks, block_rows,
                                                   no_windows, &bytes));
    PyMem_Free(rules);
    return status == DCP_OK ? PyLong_FromLongLong(bytes) : bind_raise(status);
}

static PyMethodDef optimizer_functions[] = {
    {"optimizer_bytes", (PyCFunction)(void (*)(void))optimizer_bytes,
     METH_VARARGS | METH_KEYWORDS, optimizer_bytes_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_optimizer_register(PyObject *module)
{
    return PyModule_AddFunctions(module, optimizer_functions);
}
