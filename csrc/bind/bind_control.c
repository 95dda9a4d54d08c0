/* The type dcp._dcp.Controller: the controller over plain dicts (dcp/control.h).
 *
 * Observations and decisions are dicts with the C structs' names; an arm is
 * {"precision": name, "multiple": n}, numbers over precisions are {name: value}, and
 * None stands for NaN. */
#include "bind_control.h"
#include "bind.h"

#include "dcp/control.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

typedef struct controller_object {
    PyObject_HEAD;
    dcp_controller_t *controller;
} controller_object_t;

static const char *const policies[] = {"static", "precision", "accumulation",
                                       "decoupled", "joint"};
static const char *const lr_rules[] = {"fixed", "gain", "sqrt_gain"};

typedef struct number_field {
    const char *name;
    size_t offset;
    char kind; /* d: double, q: int64, i: int32 */
} number_field_t;

#define FIELD(type, name, kind) {#name, offsetof(type, name), kind}

static const number_field_t observation_fields[] = {
    FIELD(dcp_observation_t, step, 'q'),
    FIELD(dcp_observation_t, tokens, 'q'),
    FIELD(dcp_observation_t, step_s, 'd'),
    FIELD(dcp_observation_t, compute_s, 'd'),
    FIELD(dcp_observation_t, codec_s, 'd'),
    FIELD(dcp_observation_t, reduce_s, 'd'),
    FIELD(dcp_observation_t, gather_s, 'd'),
    FIELD(dcp_observation_t, reduce_bytes, 'd'),
    FIELD(dcp_observation_t, gather_bytes, 'd'),
    FIELD(dcp_observation_t, latency_s, 'd'),
    FIELD(dcp_observation_t, gather_calls, 'q'),
    FIELD(dcp_observation_t, loss, 'd'),
    FIELD(dcp_observation_t, skipped, 'i'),
    FIELD(dcp_observation_t, micro_batch_count, 'q'),
    FIELD(dcp_observation_t, micro_squares, 'd'),
    FIELD(dcp_observation_t, mean_squares, 'd'),
    FIELD(dcp_observation_t, reduce_error, 'd'),
    FIELD(dcp_observation_t, adam_micro_squares, 'd'),
    FIELD(dcp_observation_t, adam_mean_squares, 'd'),
    FIELD(dcp_observation_t, adam_reduce_error, 'd'),
    FIELD(dcp_observation_t, step_difference, 'd'),
    FIELD(dcp_observation_t, adam_step_difference, 'd'),
};

static const number_field_t decision_fields[] = {
    FIELD(dcp_decision_t, step, 'q'),
    FIELD(dcp_decision_t, lr_factor, 'd'),
    FIELD(dcp_decision_t, reasons, 'i'),
    FIELD(dcp_decision_t, changed, 'i'),
    FIELD(dcp_decision_t, bandwidth, 'd'),
    FIELD(dcp_decision_t, latency_s, 'd'),
    FIELD(dcp_decision_t, noise_tokens, 'd'),
    FIELD(dcp_decision_t, noise_sorted_bias, 'd'),
    FIELD(dcp_decision_t, compute_s, 'd'),
    FIELD(dcp_decision_t, predicted_s, 'd'),
    FIELD(dcp_decision_t, objective, 'd'),
    FIELD(dcp_decision_t, best_objective, 'd'),
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static PyObject *
number_object(const void *base, const number_field_t *field)
{
    const char *at = (const char *)base + field->offset;
    if (field->kind == 'd') {
        double value;
        memcpy(&value, at, sizeof value);
        return isfinite(value) ? PyFloat_FromDouble(value) : Py_NewRef(Py_None);
    }
    int64_t whole = 0;
    if (field->kind == 'q') {
        memcpy(&whole, at, sizeof whole);
    } else {
        int32_t narrow;
        memcpy(&narrow, at, sizeof narrow);
        whole = narrow;
    }
    return PyLong_FromLongLong(whole);
}

/* Adds a new reference under a name; 0, or -1 with an exception. */
static int
put(PyObject *dict, const char *name, PyObject *value)
{
    int result = value != NULL ? PyDict_SetItemString(dict, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

static int
put_fields(PyObject *dict, const void *base, const number_field_t *fields, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (put(dict, fields[i].name, number_object(base, &fields[i])) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
arm_object(dcp_arm_t arm)
{
    return Py_BuildValue("{s:s,s:i}", "precision", dcp_precision_name(arm.precision),
                         "multiple", (int)arm.multiple);
}

static PyObject *
errors_object(const double *errors)
{
    PyObject *dict = PyDict_New();
    for (int32_t i = 0; dict != NULL && i < DCP_PRECISION_COUNT; i++) {
        PyObject *value =
            isfinite(errors[i]) ? PyFloat_FromDouble(errors[i]) : Py_NewRef(Py_None);
        if (put(dict, dcp_precision_name((dcp_precision_t)i), value) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

PyObject *
bind_observation(const dcp_observation_t *observation)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL
        || put_fields(dict, observation, observation_fields, COUNT(observation_fields))
               < 0
        || put(dict, "arm", arm_object(observation->arm)) < 0
        || put(dict, "error", errors_object(observation->error)) < 0
        || put(dict, "adam_error", errors_object(observation->adam_error)) < 0) {
        Py_XDECREF(dict);
        return NULL;
    }
    return dict;
}

PyObject *
bind_decision(const dcp_decision_t *decision)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL
        || put_fields(dict, decision, decision_fields, COUNT(decision_fields)) < 0
        || put(dict, "arm", arm_object(decision->arm)) < 0
        || put(dict, "error", errors_object(decision->error)) < 0) {
        Py_XDECREF(dict);
        return NULL;
    }
    return dict;
}

/* A number of a mapping; None: NaN. 0, or -1 with an exception. */
static int
get_double(PyObject *mapping, const char *name, double *value_p)
{
    PyObject *value = PyMapping_GetItemString(mapping, name);
    if (value == NULL) {
        PyErr_Clear();
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s is missing", name));
        return -1;
    }
    *value_p = value == Py_None ? NAN : PyFloat_AsDouble(value);
    Py_DECREF(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

static int
get_fields(PyObject *mapping, void *base, const number_field_t *fields, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        double value;
        char *at = (char *)base + fields[i].offset;
        if (!PyMapping_HasKeyString(mapping, fields[i].name)) {
            value = fields[i].kind == 'd' ? NAN : 0; /* was not measured */
        } else if (get_double(mapping, fields[i].name, &value) < 0) {
            return -1;
        }
        if (fields[i].kind == 'd') {
            memcpy(at, &value, sizeof value);
            continue;
        }
        if (!(fabs(value) <= 9007199254740992.0)) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s = %g must be a whole number",
                                fields[i].name, value));
            return -1;
        }
        int64_t whole = (int64_t)value;
        int32_t narrow = (int32_t)whole;
        memcpy(at, fields[i].kind == 'q' ? (void *)&whole : (void *)&narrow,
               fields[i].kind == 'q' ? sizeof whole : sizeof narrow);
    }
    return 0;
}

int
bind_arm(PyObject *mapping, dcp_arm_t *arm_p)
{
    double multiple;
    PyObject *name = PyMapping_GetItemString(mapping, "precision");
    const char *text = name != NULL ? PyUnicode_AsUTF8(name) : NULL;
    dcp_status_t status =
        text != NULL ? dcp_precision_parse(text, &arm_p->precision) : DCP_OK;
    Py_XDECREF(name);
    if (text == NULL || get_double(mapping, "multiple", &multiple) < 0) {
        return -1;
    }
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    arm_p->multiple = (int32_t)multiple;
    return 0;
}

static int
get_errors(PyObject *mapping, const char *name, double *errors)
{
    if (!PyMapping_HasKeyString(mapping, name)) {
        for (int32_t i = 0; i < DCP_PRECISION_COUNT; i++) {
            errors[i] = NAN;
        }
        return 0;
    }
    PyObject *dict = PyMapping_GetItemString(mapping, name);
    if (dict == NULL) {
        return -1;
    }
    int result = 0;
    for (int32_t i = 0; result == 0 && i < DCP_PRECISION_COUNT; i++) {
        result = get_double(dict, dcp_precision_name((dcp_precision_t)i), &errors[i]);
    }
    Py_DECREF(dict);
    return result;
}

static int
get_observation(PyObject *mapping, dcp_observation_t *observation)
{
    PyObject *arm = PyMapping_GetItemString(mapping, "arm");
    if (arm == NULL) {
        return -1;
    }
    int result = bind_arm(arm, &observation->arm);
    Py_DECREF(arm);
    if (result < 0
        || get_fields(mapping, observation, observation_fields,
                      COUNT(observation_fields))
               < 0
        || get_errors(mapping, "error", observation->error) < 0) {
        return -1;
    }
    return get_errors(mapping, "adam_error", observation->adam_error);
}

/* Place of a name in a list; -1 with an exception. */
static int
place_of(const char *what, const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return (int)i;
        }
    }
    bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s '%s' is none of those there are", what, name));
    return -1;
}

int
bind_precisions(PyObject *names, dcp_precision_t *precisions, int32_t *count_p)
{
    PyObject *list = PySequence_Fast(names, "precisions must be a sequence of names");
    if (list == NULL) {
        return -1;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    int result = 0;
    if (count > DCP_PRECISION_COUNT) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "precisions: %lld given, there are %d",
                            (long long)count, (int)DCP_PRECISION_COUNT));
        result = -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < count; i++) {
        const char *name = PyUnicode_AsUTF8(PySequence_Fast_GET_ITEM(list, i));
        dcp_status_t status =
            name != NULL ? dcp_precision_parse(name, &precisions[i]) : DCP_OK;
        if (status != DCP_OK) {
            bind_raise(status);
        }
        result = name == NULL || status != DCP_OK ? -1 : 0;
    }
    *count_p = (int32_t)count;
    Py_DECREF(list);
    return result;
}

/* Fills options; the arrays are the caller's. */
int
bind_control_options(PyObject *args, PyObject *keywords, bind_control_arrays_t *arrays,
                     dcp_control_options_t *options)
{
    static char *names[] = {
        "policy",      "precisions", "base",        "multiples",      "tokens_per_step",
        "rank_count",  "lr_rule",    "hysteresis",  "bandwidth_mean", "jump",
        "jump_count",  "noise_mean", "noise_steps", "dwell_steps",    "error_limit",
        "slope_limit", NULL};
    const char *policy = NULL, *base = NULL, *lr_rule = "fixed";
    PyObject *precisions = NULL, *multiples = NULL;
    long long tokens_per_step = 0;
    int rank_count = 0, jump_count = 0, noise_steps = 0, dwell_steps = 0;
    *options = (dcp_control_options_t){.slope_limit = 4};
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "|$sOsOLisdddidiidd", names, &policy, &precisions, &base,
            &multiples, &tokens_per_step, &rank_count, &lr_rule, &options->hysteresis,
            &options->bandwidth_mean, &options->jump, &jump_count, &options->noise_mean,
            &noise_steps, &dwell_steps, &options->error_limit, &options->slope_limit)) {
        return -1;
    }
    if (policy == NULL || precisions == NULL || base == NULL || multiples == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "policy, precisions, base and multiples must be given"));
        return -1;
    }
    int place = place_of("policy", policy, policies, COUNT(policies));
    int rule = place < 0 ? -1 : place_of("lr_rule", lr_rule, lr_rules, COUNT(lr_rules));
    if (rule < 0
        || bind_precisions(precisions, arrays->precisions, &options->precision_count)
               < 0) {
        return -1;
    }
    dcp_status_t status = dcp_precision_parse(base, &options->base);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    PyArrayObject *array = bind_integers(multiples, NPY_INT32, "multiples");
    if (array == NULL) {
        return -1;
    }
    npy_intp count = PyArray_SIZE(array);
    options->multiple_count =
        count <= DCP_CONTROL_MULTIPLES ? (int32_t)count : DCP_CONTROL_MULTIPLES + 1;
    if (count <= DCP_CONTROL_MULTIPLES) {
        memcpy(arrays->multiples, PyArray_DATA(array), (size_t)count * sizeof(int32_t));
    }
    Py_DECREF(array);
    options->policy = (dcp_policy_t)place;
    options->lr_rule = (dcp_lr_rule_t)rule;
    options->precisions = arrays->precisions;
    options->multiples = arrays->multiples;
    options->tokens_per_step = tokens_per_step;
    options->rank_count = rank_count;
    options->jump_count = jump_count;
    options->noise_steps = noise_steps;
    options->dwell_steps = dwell_steps;
    return 0;
}

static int
controller_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    controller_object_t *self = (controller_object_t *)object;
    dcp_control_options_t options;
    bind_control_arrays_t arrays;
    if (bind_control_options(args, keywords, &arrays, &options) < 0) {
        return -1;
    }
    dcp_controller_t *controller;
    dcp_status_t status = dcp_controller_create(&options, &controller);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    dcp_controller_destroy(self->controller);
    self->controller = controller;
    return 0;
}

static void
controller_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    dcp_controller_destroy(((controller_object_t *)object)->controller);
    type->tp_free(object);
    Py_DECREF(type);
}

static dcp_controller_t *
controller_of(PyObject *object)
{
    dcp_controller_t *controller = ((controller_object_t *)object)->controller;
    if (controller == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this controller was not made"));
    }
    return controller;
}

static PyObject *
controller_start(PyObject *object, PyObject *unused)
{
    (void)unused;
    const dcp_controller_t *controller = controller_of(object);
    if (controller == NULL) {
        return NULL;
    }
    dcp_decision_t decision = dcp_controller_start(controller);
    return bind_decision(&decision);
}

/* The world's estimates as arrays. */
typedef struct estimates {
    double reduce_bytes[DCP_PRECISION_COUNT], codec_s[DCP_PRECISION_COUNT];
    double reduce_calls[DCP_PRECISION_COUNT];
    double backward_share;
    int bucket_count;
} estimates_t;

static double
estimate_exposed(void *context, double comm_s, double compute_s)
{
    const estimates_t *estimates = context;
    return dcp_exposed_s(comm_s, estimates->backward_share * compute_s,
                         estimates->bucket_count);
}

static double
estimate_bytes(void *context, dcp_precision_t precision)
{
    return ((const estimates_t *)context)->reduce_bytes[precision];
}

static double
estimate_calls(void *context, dcp_precision_t precision)
{
    return ((const estimates_t *)context)->reduce_calls[precision];
}

static double
estimate_codec(void *context, dcp_precision_t precision)
{
    return ((const estimates_t *)context)->codec_s[precision];
}

/* {name: number}; precisions that are missing are NaN. */
static int
get_estimates(PyObject *mapping, double *values)
{
    for (int32_t i = 0; i < DCP_PRECISION_COUNT; i++) {
        const char *name = dcp_precision_name((dcp_precision_t)i);
        values[i] = NAN;
        if (PyMapping_HasKeyString(mapping, name)
            && get_double(mapping, name, &values[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
controller_decide(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"observation",  "reduce_bytes",   "codec_s", "reduce_calls",
                            "bucket_count", "backward_share", NULL};
    dcp_controller_t *controller = controller_of(object);
    PyObject *mapping, *bytes = NULL, *codec = NULL, *calls = NULL;
    dcp_observation_t observation;
    estimates_t estimates = {.bucket_count = 1};
    if (controller == NULL
        || !PyArg_ParseTupleAndKeywords(args, keywords, "O|$OOOid", names, &mapping,
                                        &bytes, &codec, &calls, &estimates.bucket_count,
                                        &estimates.backward_share)) {
        return NULL;
    }
    if (bytes == NULL || codec == NULL) {
        return bind_raise(
            DCP_FAIL(DCP_ERR_ARG, "reduce_bytes and codec_s must be given"));
    }
    if (get_observation(mapping, &observation) < 0
        || get_estimates(bytes, estimates.reduce_bytes) < 0
        || get_estimates(codec, estimates.codec_s) < 0
        || (calls != NULL && get_estimates(calls, estimates.reduce_calls) < 0)) {
        return NULL;
    }
    const dcp_control_world_t world = {.context = &estimates,
                                       .reduce_bytes = estimate_bytes,
                                       .reduce_calls = calls ? estimate_calls : NULL,
                                       .codec_s = estimate_codec,
                                       .exposed_s = estimate_exposed};
    dcp_decision_t decision;
    dcp_status_t status =
        dcp_controller_decide(controller, &world, &observation, &decision);
    return status == DCP_OK ? bind_decision(&decision) : bind_raise(status);
}

static PyObject *
controller_state(PyObject *object, PyObject *unused)
{
    (void)unused;
    const dcp_controller_t *controller = controller_of(object);
    if (controller == NULL) {
        return NULL;
    }
    Py_ssize_t bytes = (Py_ssize_t)dcp_controller_state_count(controller) * 8;
    PyObject *state = PyBytes_FromStringAndSize(NULL, bytes);
    if (state != NULL) {
        dcp_controller_save(controller, (uint64_t *)(void *)PyBytes_AS_STRING(state));
    }
    return state;
}

static PyObject *
controller_load_state(PyObject *object, PyObject *argument)
{
    dcp_controller_t *controller = controller_of(object);
    char *bytes;
    Py_ssize_t size;
    if (controller == NULL || PyBytes_AsStringAndSize(argument, &bytes, &size) < 0) {
        return NULL;
    }
    dcp_status_t status =
        dcp_controller_load(controller, (const uint64_t *)(void *)bytes, size / 8);
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

dcp_controller_t *
bind_controller(PyObject *object)
{
    return controller_of(object);
}

static PyMethodDef controller_methods[] = {
    {"start", controller_start, METH_NOARGS, "start()\n--\n\nThe decision of step 0."},
    {"decide", (PyCFunction)(void (*)(void))controller_decide,
     METH_VARARGS | METH_KEYWORDS,
     "decide(observation, *, reduce_bytes, codec_s, reduce_calls=None, "
     "bucket_count=1, backward_share=0.0)\n--\n\nLearns from an observation "
     "and decides about the next step."},
    {"step", bind_control_step, METH_O,
     "step(sharded)\n--\n\nCollective. Observes what the model's latest step showed, "
     "decides, and makes rank 0's decision everybody's: (observation, decision, "
     "inputs)."},
    {"state", controller_state, METH_NOARGS,
     "state()\n--\n\nThe whole state, as bytes."},
    {"load_state", controller_load_state, METH_O,
     "load_state(state)\n--\n\nTakes a state of `state()` over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot controller_slots[] = {
    {Py_tp_doc, "Tunes precision and batch multiple (see dcp.Controller)."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, controller_init},
    {Py_tp_dealloc, controller_dealloc},
    {Py_tp_methods, controller_methods},
    {0, NULL},
};

static PyType_Spec controller_spec = {
    .name = "dcp._dcp.Controller",
    .basicsize = sizeof(controller_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = controller_slots,
};

PyDoc_STRVAR(precision_bytes_doc,
             "precision_bytes(precision, count)\n--\n\nBytes of a message of so many "
             "elements.");

static PyObject *
module_precision_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    long long count;
    dcp_precision_t precision;
    if (!PyArg_ParseTuple(args, "sL", &name, &count)) {
        return NULL;
    }
    dcp_status_t status = dcp_precision_parse(name, &precision);
    return status == DCP_OK ? PyLong_FromLongLong(dcp_precision_bytes(precision, count))
                            : bind_raise(status);
}

static PyMethodDef functions[] = {
    {"precision_bytes", module_precision_bytes, METH_VARARGS, precision_bytes_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_control_register(PyObject *module)
{
    return bind_type_add(module, &controller_spec, NULL) < 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}
