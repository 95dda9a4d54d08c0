/* dcp._dcp.time_to_loss: the experiment of dcp/time_to_loss.h on one flat set of
 * numbers; dcp/time_to_loss.py says what they are for a run. */
#include "bind_control.h"

#include "dcp/alloc.h"
#include "dcp/time_to_loss.h"

#include <string.h>

/* Steps that a watched run showed, for the log. */
typedef struct trace {
    double *rows; /* [room][TRACE_COLUMNS] */
    dcp_observation_t *observations;
    dcp_decision_t *decisions;
    int64_t count, room;
    int failed;
} trace_t;

enum { TRACE_COLUMNS = 3 }; /* now_s, loss, jobs present */

static int
grow(trace_t *trace)
{
    int64_t room = trace->room > 0 ? 2 * trace->room : 1024;
    double *rows =
        PyMem_RawRealloc(trace->rows, (size_t)room * TRACE_COLUMNS * sizeof(double));
    trace->rows = rows != NULL ? rows : trace->rows;
    dcp_observation_t *observations =
        PyMem_RawRealloc(trace->observations, (size_t)room * sizeof(dcp_observation_t));
    trace->observations = observations != NULL ? observations : trace->observations;
    dcp_decision_t *decisions =
        PyMem_RawRealloc(trace->decisions, (size_t)room * sizeof(dcp_decision_t));
    trace->decisions = decisions != NULL ? decisions : trace->decisions;
    if (rows == NULL || observations == NULL || decisions == NULL) {
        return -1;
    }
    trace->room = room;
    return 0;
}

static void
watch(void *context, double now_s, double loss, uint64_t present,
      const dcp_observation_t *observation, const dcp_decision_t *decision)
{
    trace_t *trace = context;
    if (trace->failed || (trace->count == trace->room && grow(trace) < 0)) {
        trace->failed = 1;
        return;
    }
    double *row = trace->rows + trace->count * TRACE_COLUMNS;
    row[0] = now_s;
    row[1] = loss;
    row[2] = (double)__builtin_popcountll(present);
    trace->observations[trace->count] = *observation;
    trace->decisions[trace->count++] = *decision;
}

static void
clear_trace(trace_t *trace)
{
    PyMem_RawFree(trace->rows);
    PyMem_RawFree(trace->observations);
    PyMem_RawFree(trace->decisions);
}

/* A list of (now_s, loss, jobs, observation, decision). */
static PyObject *
trace_object(const trace_t *trace)
{
    PyObject *list = PyList_New(trace->count);
    for (int64_t i = 0; list != NULL && i < trace->count; i++) {
        const double *row = trace->rows + i * TRACE_COLUMNS;
        PyObject *item = Py_BuildValue("(ddiNN)", row[0], row[1], (int)row[2],
                                       bind_observation(&trace->observations[i]),
                                       bind_decision(&trace->decisions[i]));
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static int
get_number(PyObject *mapping, const char *name, double *value_p)
{
    PyObject *value = PyDict_GetItemString(mapping, name);
    if (value == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "setup: %s is missing", name));
        return -1;
    }
    *value_p = PyFloat_AsDouble(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Numbers of `setup` by name. */
static int
get_setup(PyObject *setup, dcp_time_to_loss_options_t *o, dcp_background_t *job,
          double *background_count_p)
{
    double hosts, rack_hosts, collective, buckets, background_collective, limit;
    const struct {
        const char *name;
        double *value;
    } numbers[] = {
        {"hosts", &hosts},
        {"rack_hosts", &rack_hosts},
        {"host_rate", &o->network.host_rate},
        {"oversubscription", &o->network.oversubscription},
        {"latency_s", &o->network.latency_s},
        {"parameter_count", &o->parameter_count},
        {"compute_s", &o->compute_s},
        {"backward_share", &o->backward_share},
        {"optimizer_s", &o->optimizer_s},
        {"bucket_count", &buckets},
        {"collective", &collective},
        {"codec_bytes_per_s", &o->codec_bytes_per_s},
        {"time_noise", &o->time_noise},
        {"micro_batches", &o->micro_batches},
        {"noise_dimensions", &o->noise_dimensions},
        {"loss_start", &o->loss.start},
        {"loss_floor", &o->loss.floor},
        {"loss_knee", &o->loss.knee},
        {"loss_power", &o->loss.power},
        {"noise_scale", &o->loss.noise_scale},
        {"noise_power", &o->loss.noise_power},
        {"target_loss", &o->target_loss},
        {"step_limit", &limit},
        {"background_count", background_count_p},
        {"background_compute_s", &job->compute_s},
        {"background_bytes", &job->bytes},
        {"background_dwell_s", &job->dwell_s},
        {"background_collective", &background_collective},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (get_number(setup, numbers[i].name, numbers[i].value) < 0) {
            return -1;
        }
    }
    o->network.host_count = (int32_t)hosts;
    o->network.rack_hosts = (int32_t)rack_hosts;
    o->rank_count = (int32_t)hosts;
    o->bucket_count = (int32_t)buckets;
    o->collective = (dcp_collective_t)collective;
    o->step_limit = (int64_t)limit;
    job->collective = (dcp_collective_t)background_collective;
    return 0;
}

static dcp_status_t
run(dcp_time_to_loss_options_t *o, const dcp_background_t *job,
    int32_t background_count, trace_t *trace, dcp_time_to_loss_result_t *result)
{
    int32_t count = o->network.host_count;
    void *memory;
    if (count < 1 || count > 65536 || background_count < 0 || background_count > 64) {
        return DCP_FAIL(
            DCP_ERR_ARG,
            "hosts = %d must lie in 1..65536, background_count = %d in 0..64",
            (int)count, (int)background_count);
    }
    DCP_TRY(dcp_alloc(count * (int64_t)sizeof(int32_t)
                          + 64 * (int64_t)sizeof(dcp_background_t),
                      "hosts and jobs", &memory));
    dcp_background_t *jobs = memory;
    int32_t *hosts = (int32_t *)(void *)(jobs + 64);
    for (int32_t h = 0; h < count; h++) {
        hosts[h] = h;
    }
    for (int32_t i = 0; i < background_count; i++) {
        jobs[i] = *job;
        jobs[i].hosts = hosts;
        jobs[i].host_count = count;
    }
    o->hosts = hosts;
    o->background = jobs;
    o->background_count = background_count;
    dcp_status_t status =
        dcp_time_to_loss(o, trace != NULL ? watch : NULL, trace, result);
    dcp_free(memory);
    return status;
}

PyDoc_STRVAR(
    time_to_loss_doc,
    "time_to_loss(setup, control, errors, *, seed, network_seed, policy, fixed, "
    "trace)\n--\n\nOne run of the experiment. setup: numbers by name; control: "
    "keywords of Controller; errors: w1 by precision; policy: None, 'oracle' or "
    "'fixed' (of the arm `fixed`). (time_s, steps, tokens, changes, {precision: "
    "[share by multiple]}, trace or None).");

static PyObject *
result_object(const dcp_time_to_loss_result_t *result,
              const dcp_control_options_t *control, const trace_t *trace)
{
    PyObject *shares = PyDict_New();
    for (int32_t q = 0; shares != NULL && q < control->precision_count; q++) {
        int32_t which = (int32_t)control->precisions[q];
        PyObject *list = PyList_New(control->multiple_count);
        for (int32_t a = 0; list != NULL && a < control->multiple_count; a++) {
            PyList_SET_ITEM(list, a,
                            PyFloat_FromDouble(
                                result->arm_share[which * DCP_CONTROL_MULTIPLES + a]));
        }
        if (list == NULL
            || PyDict_SetItemString(shares, dcp_precision_name((dcp_precision_t)which),
                                    list)
                   < 0) {
            Py_CLEAR(shares);
        }
        Py_XDECREF(list);
    }
    if (shares == NULL) {
        return NULL;
    }
    return Py_BuildValue("(dLdLNN)", result->time_s, (long long)result->steps,
                         result->tokens, (long long)result->change_count, shares,
                         trace != NULL ? trace_object(trace) : Py_NewRef(Py_None));
}

static PyObject *
module_time_to_loss(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"setup",  "control", "errors", "seed", "network_seed",
                            "policy", "fixed",   "trace",  NULL};
    PyObject *setup, *control, *errors, *fixed = Py_None;
    unsigned long long seed, network_seed;
    const char *policy = NULL;
    int traced = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!O!$KKzOp", names,
                                     &PyDict_Type, &setup, &PyDict_Type, &control,
                                     &PyDict_Type, &errors, &seed, &network_seed,
                                     &policy, &fixed, &traced)) {
        return NULL;
    }
    dcp_time_to_loss_options_t o = {.seed = seed};
    dcp_background_t job = {0};
    bind_control_arrays_t arrays;
    double background_count;
    PyObject *empty = PyTuple_New(0);
    if (empty == NULL) {
        return NULL;
    }
    int parsed = bind_control_options(empty, control, &arrays, &o.control);
    Py_DECREF(empty);
    if (parsed < 0 || get_setup(setup, &o, &job, &background_count) < 0) {
        return NULL;
    }
    o.network.seed = network_seed;
    for (int32_t q = 0; q < DCP_PRECISION_COUNT; q++) {
        if (get_number(errors, dcp_precision_name((dcp_precision_t)q), &o.error[q])
            < 0) {
            return NULL;
        }
    }
    if (policy != NULL) {
        o.control.policy =
            (dcp_policy_t)(strcmp(policy, "oracle") == 0 ? DCP_POLICY_ORACLE
                                                         : DCP_POLICY_FIXED);
    }
    if ((int32_t)o.control.policy == DCP_POLICY_FIXED
        && bind_arm(fixed, &o.fixed) < 0) {
        return NULL;
    }
    trace_t trace = {0};
    dcp_time_to_loss_result_t result;
    dcp_status_t status;
    BIND_NOGIL(status, run(&o, &job, (int32_t)background_count, traced ? &trace : NULL,
                           &result));
    PyObject *object = NULL;
    if (status != DCP_OK) {
        bind_raise(status);
    } else if (trace.failed) {
        PyErr_NoMemory();
    } else {
        object = result_object(&result, &o.control, traced ? &trace : NULL);
    }
    clear_trace(&trace);
    return object;
}

static PyMethodDef functions[] = {
    {"time_to_loss", (PyCFunction)(void (*)(void))module_time_to_loss,
     METH_VARARGS | METH_KEYWORDS, time_to_loss_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_time_to_loss_register(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
