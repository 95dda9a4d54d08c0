/* dcp._dcp.Network and max_min_rates: the network simulator (dcp/network.h). */
#include "bind.h"

#include "dcp/network.h"

#include <stdlib.h>

typedef struct network_object {
    PyObject_HEAD;
    dcp_network_t *network;
    dcp_network_options_t options;
} network_object_t;

static int
network_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"hosts",     "rack_hosts", "host_rate", "oversubscription",
                            "latency_s", "seed",       NULL};
    network_object_t *self = (network_object_t *)object;
    dcp_network_options_t o = {.oversubscription = 1};
    int hosts = 0, rack_hosts = 0;
    unsigned long long seed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$iidddK", names, &hosts,
                                     &rack_hosts, &o.host_rate, &o.oversubscription,
                                     &o.latency_s, &seed)) {
        return -1;
    }
    o.host_count = hosts;
    o.rack_hosts = rack_hosts;
    o.seed = seed;
    dcp_network_t *network;
    dcp_status_t status = dcp_network_create(&o, &network);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    dcp_network_destroy(self->network);
    self->network = network;
    self->options = o;
    return 0;
}

static void
network_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    dcp_network_destroy(((network_object_t *)object)->network);
    type->tp_free(object);
    Py_DECREF(type);
}

static dcp_network_t *
network_of(PyObject *object)
{
    dcp_network_t *network = ((network_object_t *)object)->network;
    if (network == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this network was not made"));
    }
    return network;
}

static PyObject *
network_add_background(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"hosts",      "compute_s", "bytes",
                            "collective", "dwell_s",   NULL};
    dcp_network_t *network = network_of(object);
    PyObject *hosts;
    dcp_background_t job = {0};
    int collective = 0;
    if (network == NULL
        || !PyArg_ParseTupleAndKeywords(args, keywords, "O|$ddid", names, &hosts,
                                        &job.compute_s, &job.bytes, &collective,
                                        &job.dwell_s)) {
        return NULL;
    }
    PyArrayObject *array = bind_integers(hosts, NPY_INT32, "hosts");
    if (array == NULL) {
        return NULL;
    }
    job.hosts = PyArray_DATA(array);
    job.host_count = (int32_t)PyArray_SIZE(array);
    job.collective = (dcp_collective_t)collective;
    dcp_status_t status = dcp_network_add_background(network, &job);
    Py_DECREF(array);
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

/* [n, 3] float64: from, to, bytes. */
static PyArrayObject *
flow_rows(PyObject *object)
{
    PyArrayObject *rows = bind_array(object, NPY_FLOAT64, 2, "flows");
    if (rows != NULL && PyArray_DIM(rows, 1) != 3) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "flows must have 3 columns: from, to, bytes"));
        Py_CLEAR(rows);
    }
    return rows;
}

static PyObject *
network_begin(PyObject *object, PyObject *args)
{
    dcp_network_t *network = network_of(object);
    double start_s;
    PyObject *flows;
    if (network == NULL || !PyArg_ParseTuple(args, "dO", &start_s, &flows)) {
        return NULL;
    }
    PyArrayObject *rows = flow_rows(flows);
    if (rows == NULL) {
        return NULL;
    }
    npy_intp count = PyArray_DIM(rows, 0);
    dcp_flow_t *list = PyMem_Malloc((size_t)(count + 1) * sizeof(dcp_flow_t));
    if (list == NULL) {
        Py_DECREF(rows);
        return PyErr_NoMemory();
    }
    const double *values = PyArray_DATA(rows);
    for (npy_intp i = 0; i < count; i++) {
        list[i] = (dcp_flow_t){(int32_t)values[3 * i], (int32_t)values[3 * i + 1],
                               values[3 * i + 2]};
    }
    int64_t transfer;
    dcp_status_t status = dcp_network_begin(network, start_s, list, count, &transfer);
    PyMem_Free(list);
    Py_DECREF(rows);
    return status == DCP_OK ? PyLong_FromLongLong(transfer) : bind_raise(status);
}

static PyObject *
network_wait(PyObject *object, PyObject *argument)
{
    dcp_network_t *network = network_of(object);
    long long transfer = PyLong_AsLongLong(argument);
    if (network == NULL || (transfer == -1 && PyErr_Occurred())) {
        return NULL;
    }
    double end_s;
    dcp_status_t status = dcp_network_wait(network, transfer, &end_s);
    return status == DCP_OK ? PyFloat_FromDouble(end_s) : bind_raise(status);
}

static PyObject *
network_run_until(PyObject *object, PyObject *argument)
{
    dcp_network_t *network = network_of(object);
    double time_s = PyFloat_AsDouble(argument);
    if (network == NULL || (time_s == -1.0 && PyErr_Occurred())) {
        return NULL;
    }
    dcp_status_t status = dcp_network_run_until(network, time_s);
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

static PyObject *
network_collective(PyObject *object, PyObject *args)
{
    network_object_t *self = (network_object_t *)object;
    PyObject *hosts;
    int collective, phase;
    double bytes;
    if (network_of(object) == NULL
        || !PyArg_ParseTuple(args, "iOdi", &collective, &hosts, &bytes, &phase)) {
        return NULL;
    }
    PyArrayObject *array = bind_integers(hosts, NPY_INT32, "hosts");
    if (array == NULL) {
        return NULL;
    }
    int32_t count = (int32_t)PyArray_SIZE(array), phases = 0;
    int64_t flow_count = 0;
    dcp_flow_t *flows = NULL;
    PyObject *result = NULL;
    dcp_status_t status = dcp_collective_flows(
        &self->options, (dcp_collective_t)collective, PyArray_DATA(array), count, bytes,
        phase, NULL, &flow_count, &phases);
    if (status == DCP_OK) {
        flows = PyMem_Malloc((size_t)(flow_count + 1) * sizeof(dcp_flow_t));
        if (flows == NULL) {
            Py_DECREF(array);
            return PyErr_NoMemory();
        }
        status = dcp_collective_flows(&self->options, (dcp_collective_t)collective,
                                      PyArray_DATA(array), count, bytes, phase, flows,
                                      &flow_count, &phases);
    }
    Py_DECREF(array);
    if (status != DCP_OK) {
        PyMem_Free(flows);
        return bind_raise(status);
    }
    npy_intp shape[2] = {flow_count, 3};
    PyObject *rows = PyArray_SimpleNew(2, shape, NPY_FLOAT64);
    if (rows != NULL) {
        double *values = PyArray_DATA((PyArrayObject *)rows);
        for (int64_t i = 0; i < flow_count; i++) {
            values[3 * i] = flows[i].from;
            values[3 * i + 1] = flows[i].to;
            values[3 * i + 2] = flows[i].bytes;
        }
        result = Py_BuildValue("(Ni)", rows, (int)phases);
    }
    PyMem_Free(flows);
    return result;
}

static PyObject *
network_now(PyObject *object, void *unused)
{
    (void)unused;
    dcp_network_t *network = network_of(object);
    return network != NULL ? PyFloat_FromDouble(dcp_network_now(network)) : NULL;
}

static PyObject *
network_present(PyObject *object, void *unused)
{
    (void)unused;
    dcp_network_t *network = network_of(object);
    return network != NULL ? PyLong_FromUnsignedLongLong(dcp_network_present(network))
                           : NULL;
}

static PyObject *
network_copy(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_network_t *network = network_of(object), *copy;
    if (network == NULL) {
        return NULL;
    }
    dcp_status_t status = dcp_network_copy(network, &copy);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    network_object_t *other =
        (network_object_t *)Py_TYPE(object)->tp_alloc(Py_TYPE(object), 0);
    if (other == NULL) {
        dcp_network_destroy(copy);
        return NULL;
    }
    other->network = copy;
    other->options = ((network_object_t *)object)->options;
    return (PyObject *)other;
}

static PyMethodDef network_methods[] = {
    {"add_background", (PyCFunction)(void (*)(void))network_add_background,
     METH_VARARGS | METH_KEYWORDS,
     "add_background(hosts, *, compute_s, bytes, collective, dwell_s)\n--\n\nAdds a "
     "job."},
    {"begin", network_begin, METH_VARARGS,
     "begin(start_s, flows)\n--\n\nBegins a transfer of float64 rows (from, to, "
     "bytes); "
     "its number."},
    {"wait", network_wait, METH_O,
     "wait(transfer)\n--\n\nSeconds at which it is done."},
    {"run_until", network_run_until, METH_O,
     "run_until(time_s)\n--\n\nLets background traffic go on."},
    {"collective", network_collective, METH_VARARGS,
     "collective(kind, hosts, bytes, phase)\n--\n\n(flows, number of phases)."},
    {"copy", network_copy, METH_NOARGS, "copy()\n--\n\nOne that goes on alike."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef network_getters[] = {
    {"now", network_now, NULL, "Seconds.", NULL},
    {"present", network_present, NULL, "Bit i: background job i is there.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot network_slots[] = {
    {Py_tp_doc, "Flows over links (see dcp.simulate.network)."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, network_init},
    {Py_tp_dealloc, network_dealloc},
    {Py_tp_methods, network_methods},
    {Py_tp_getset, network_getters},
    {0, NULL},
};

static PyType_Spec network_spec = {
    .name = "dcp._dcp.Network",
    .basicsize = sizeof(network_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = network_slots,
};

PyDoc_STRVAR(
    max_min_rates_doc,
    "max_min_rates(offsets, links, capacity)\n--\n\nMax-min fair rates of flows "
    "over links: flow f uses links[offsets[f]:offsets[f + 1]].");

static PyObject *
module_max_min_rates(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *offsets_object, *links_object, *capacity_object;
    if (!PyArg_ParseTuple(args, "OOO", &offsets_object, &links_object,
                          &capacity_object)) {
        return NULL;
    }
    PyArrayObject *offsets = bind_integers(offsets_object, NPY_INT64, "offsets");
    PyArrayObject *links =
        offsets != NULL ? bind_integers(links_object, NPY_INT32, "links") : NULL;
    PyArrayObject *capacity =
        links != NULL ? bind_array(capacity_object, NPY_FLOAT64, 1, "capacity") : NULL;
    PyObject *rates = NULL;
    if (capacity != NULL) {
        npy_intp count = PyArray_SIZE(offsets) - 1, total = PyArray_SIZE(links);
        const int64_t *borders = PyArray_DATA(offsets);
        if (count < 0 || borders[0] != 0 || borders[count] != total) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                "offsets must begin with 0 and end with the "
                                "number of links, %lld",
                                (long long)total));
        } else {
            rates = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
        }
    }
    if (rates != NULL) {
        dcp_status_t status = dcp_max_min_rates(
            PyArray_SIZE(offsets) - 1, PyArray_DATA(offsets), PyArray_DATA(links),
            (int32_t)PyArray_SIZE(capacity), PyArray_DATA(capacity),
            PyArray_DATA((PyArrayObject *)rates));
        if (status != DCP_OK) {
            Py_CLEAR(rates);
            bind_raise(status);
        }
    }
    Py_XDECREF(offsets);
    Py_XDECREF(links);
    Py_XDECREF(capacity);
    return rates;
}

static PyMethodDef functions[] = {
    {"max_min_rates", module_max_min_rates, METH_VARARGS, max_min_rates_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_network_register(PyObject *module)
{
    return bind_type_add(module, &network_spec, NULL) < 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}
