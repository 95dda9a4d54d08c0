/* The cluster simulator: dcp._dcp.sim_run takes the dict of arrays that a plan is (see
 * bind_plan.c) and gives the time line as a dict of read-only arrays over the core's
 * memory. dcp/simulate.py is its face.
 */
#include "bind.h"

#include "dcp/sim.h"

#include <string.h>

/* The arrays of a plan that a simulation reads. */
enum { OFFSETS, RANKS, START, END, ROUND, FIELD_COUNT };
static const struct {
    const char *key;
    int type_num;
} sim_fields[FIELD_COUNT] = {
    [OFFSETS] = {"rank_offsets", NPY_INT64}, [RANKS] = {"ranks", NPY_INT32},
    [START] = {"start_s", NPY_DOUBLE},       [END] = {"end_s", NPY_DOUBLE},
    [ROUND] = {"round", NPY_INT32},
};

static void
arrays_fini(PyArrayObject *arrays[FIELD_COUNT])
{
    for (int i = 0; i < FIELD_COUNT; i++) {
        Py_CLEAR(arrays[i]);
    }
}

/* Fills `plan` with pointers into `arrays`; 0, or -1 with an exception. */
static int
parse_plan(PyObject *dict, PyArrayObject *arrays[FIELD_COUNT], dcp_plan_t *plan)
{
    memset(plan, 0, sizeof *plan);
    for (int i = 0; i < FIELD_COUNT; i++) {
        PyObject *item = PyDict_GetItemString(dict, sim_fields[i].key);
        if (item == NULL) {
            PyErr_SetString(PyExc_KeyError, sim_fields[i].key);
            return -1;
        }
        arrays[i] = bind_array(item, sim_fields[i].type_num, 1, sim_fields[i].key);
        if (arrays[i] == NULL) {
            return -1;
        }
    }
    npy_intp m = PyArray_SIZE(arrays[OFFSETS]) - 1;
    plan->micro_batch_count = m;
    plan->rank_offsets = PyArray_DATA(arrays[OFFSETS]);
    plan->ranks = PyArray_DATA(arrays[RANKS]);
    plan->start_s = PyArray_DATA(arrays[START]);
    plan->end_s = PyArray_DATA(arrays[END]);
    plan->round = PyArray_DATA(arrays[ROUND]);
    if (m < 0 || PyArray_SIZE(arrays[START]) != m || PyArray_SIZE(arrays[END]) != m
        || PyArray_SIZE(arrays[ROUND]) != m || plan->rank_offsets[0] != 0
        || PyArray_SIZE(arrays[RANKS]) != plan->rank_offsets[m]) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "the plan's lists do not fit each other"));
        return -1;
    }
    return 0;
}

static void
timeline_capsule_free(PyObject *capsule)
{
    dcp_timeline_destroy(PyCapsule_GetPointer(capsule, NULL));
}

/* A read-only array over memory that `capsule` owns; NULL with an exception. */
static PyObject *
view(PyObject *capsule, int type_num, npy_intp count, void *data)
{
    PyObject *array = PyArray_SimpleNewFromData(1, &count, type_num, data);
    if (array == NULL) {
        return NULL;
    }
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_INCREF(capsule);
    if (PyArray_SetBaseObject((PyArrayObject *)array, capsule) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* Takes the time line over. */
static PyObject *
wrap_timeline(dcp_timeline_t *timeline)
{
    PyObject *capsule = PyCapsule_New(timeline, NULL, timeline_capsule_free);
    if (capsule == NULL) {
        dcp_timeline_destroy(timeline);
        return NULL;
    }
    npy_intp spans = timeline->span_count, world = timeline->world;
    /* "N" takes each array over and passes a failure on */
    PyObject *dict = Py_BuildValue(
        "{s:N,s:N,s:N,s:N,s:N,s:N,s:d}", "span_offsets",
        view(capsule, NPY_INT64, world + 1, timeline->span_offsets), "micro_batch",
        view(capsule, NPY_INT64, spans, timeline->micro_batch), "start_s",
        view(capsule, NPY_DOUBLE, spans, timeline->start_s), "end_s",
        view(capsule, NPY_DOUBLE, spans, timeline->end_s), "work_s",
        view(capsule, NPY_DOUBLE, spans, timeline->work_s), "busy_s",
        view(capsule, NPY_DOUBLE, world, timeline->busy_s), "makespan_s",
        timeline->makespan_s);
    Py_DECREF(capsule);
    return dict;
}

PyDoc_STRVAR(
    sim_run_doc,
    "sim_run(plan, world, rounds, jitter, slowdown, seed, step)\n--\n\n"
    "Runs a plan in simulated time; slowdown is an array of one factor a rank, "
    "or None.");

static PyObject *
module_sim_run(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *dict, *factors;
    dcp_sim_options_t options = {0};
    int world, rounds;
    unsigned long long seed;
    long long step;
    if (!PyArg_ParseTuple(args, "O!ipdOKL", &PyDict_Type, &dict, &world, &rounds,
                          &options.jitter, &factors, &seed, &step)) {
        return NULL;
    }
    options.world = world;
    options.rounds = rounds;
    options.seed = seed;
    options.step = step;
    PyArrayObject *arrays[FIELD_COUNT] = {NULL}, *slowdown = NULL;
    dcp_timeline_t *timeline = NULL;
    dcp_plan_t plan;
    PyObject *result = NULL;
    if (parse_plan(dict, arrays, &plan) < 0) {
        goto fail;
    }
    if (factors != Py_None) {
        slowdown = bind_array(factors, NPY_DOUBLE, 1, "slowdown");
        if (slowdown == NULL) {
            goto fail;
        }
        if (PyArray_SIZE(slowdown) != world) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                "slowdown has %lld factors, the world has %d ranks",
                                (long long)PyArray_SIZE(slowdown), world));
            goto fail;
        }
        options.slowdown = PyArray_DATA(slowdown);
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_sim_run(&plan, &options, &timeline));
    result = status == DCP_OK ? wrap_timeline(timeline) : bind_raise(status);

fail:
    Py_XDECREF(slowdown);
    arrays_fini(arrays);
    return result;
}

static PyMethodDef sim_methods[] = {
    {"sim_run", module_sim_run, METH_VARARGS, sim_run_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_sim_register(PyObject *module)
{
    return PyModule_AddFunctions(module, sim_methods);
}
