/* The planner: dcp._dcp.plan, plan_verify, plan_hash, cost_time, cost_memory and
 * plan_strategies. A request comes as one tuple
 *     (lengths, cost, world, memory_bytes, max_tokens, run_longest, max_group, rounds,
 *      fixed_group, (fixed layers, fixed mlps), seed, strategy),
 * cost as the tuple of dcp_cost_t's fields in order, flat; a plan goes out as a dict of
 * read-only arrays over the core's memory, and comes back in as a dict of arrays.
 * dcp/planning.py is the face of all this.
 */
#include "bind.h"

#include "dcp/plan.h"

#include <string.h>

/* A request and what keeps its pointers alive. */
typedef struct parsed_request {
    dcp_plan_request_t request;
    PyArrayObject *lengths;
} parsed_request_t;

static int
parse_cost(PyObject *tuple, dcp_cost_t *c)
{
    long long integers[DCP_COST_INTEGERS];
    if (!PyArg_ParseTuple(
            tuple,
            "dddddddddddddddddddddddLLL;cost must be a tuple of dcp_cost_t's fields",
            &c->latency_s, &c->token_s, &c->square_s, &c->group_s[0], &c->group_s[1],
            &c->hop_s[0], &c->hop_s[1], &c->gather_s[0], &c->gather_s[1],
            &c->exchange_s[0], &c->exchange_s[1], &c->layer_token_s, &c->layer_square_s,
            &c->layer_comm_share, &c->mlp_token_s, &c->fixed_bytes, &c->sharded_bytes,
            &c->scratch_bytes, &c->token_bytes, &c->layer_token_bytes,
            &c->mlp_token_bytes, &c->group_token_bytes, &c->logit_bytes, &integers[0],
            &integers[1], &integers[2])) {
        return -1;
    }
    c->logit_chunk_tokens = integers[0];
    c->layer_count = integers[1];
    c->node_ranks = integers[2];
    return 0;
}

/* PyArg converter ("O&"); clean up with Py_CLEAR(parsed->lengths). */
static int
parse_request(PyObject *tuple, void *address)
{
    parsed_request_t *parsed = address;
    PyObject *lengths, *cost;
    long long memory_bytes, max_tokens, run_longest;
    unsigned long long seed;
    dcp_plan_request_t *request = &parsed->request;
    int world, max_group, rounds, fixed_group, layers, mlps;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "request must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "OO!iLLLipi(ii)Ks", &lengths, &PyTuple_Type, &cost,
                          &world, &memory_bytes, &max_tokens, &run_longest, &max_group,
                          &rounds, &fixed_group, &layers, &mlps, &seed,
                          &request->strategy)) {
        return 0;
    }
    if (parse_cost(cost, &parsed->request.cost) < 0) {
        return 0;
    }
    parsed->lengths = bind_integers(lengths, NPY_INT64, "lengths");
    if (parsed->lengths == NULL) {
        return 0;
    }
    request->lengths = PyArray_DATA(parsed->lengths);
    request->length_count = PyArray_SIZE(parsed->lengths);
    request->world = world;
    request->memory_bytes = memory_bytes;
    request->max_tokens = max_tokens;
    request->run_longest = run_longest;
    request->max_group = max_group;
    request->rounds = rounds;
    request->fixed_group = fixed_group;
    request->fixed_recompute[DCP_RECOMPUTE_LAYER] = layers;
    request->fixed_recompute[DCP_RECOMPUTE_MLP] = mlps;
    request->seed = seed;
    return 1;
}

static void
plan_capsule_free(PyObject *capsule)
{
    dcp_plan_destroy(PyCapsule_GetPointer(capsule, NULL));
}

/* A read-only array over memory that `capsule` owns, put into `dict`. */
static int
put_view(PyObject *dict, const char *key, PyObject *capsule, int type_num,
         npy_intp count, npy_intp columns, void *data)
{
    npy_intp shape[2] = {count, columns};
    PyObject *array =
        PyArray_SimpleNewFromData(columns > 0 ? 2 : 1, shape, type_num, data);
    if (array == NULL) {
        return -1;
    }
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    Py_INCREF(capsule);
    if (PyArray_SetBaseObject((PyArrayObject *)array, capsule) < 0) {
        Py_DECREF(array);
        return -1;
    }
    int result = PyDict_SetItemString(dict, key, array);
    Py_DECREF(array);
    return result;
}

static PyObject *
hash_text(const uint64_t hash[2])
{
    char text[33];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)hash[0],
             (unsigned long long)hash[1]);
    return PyUnicode_FromString(text);
}

/* Takes the plan over. */
static PyObject *
wrap_plan(dcp_plan_t *plan)
{
    PyObject *capsule = PyCapsule_New(plan, NULL, plan_capsule_free);
    if (capsule == NULL) {
        dcp_plan_destroy(plan);
        return NULL;
    }
    npy_intp m = plan->micro_batch_count;
    PyObject *hash = hash_text(plan->hash);
    PyObject *dict = hash == NULL
                         ? NULL
                         : Py_BuildValue("{s:O,s:d,s:d,s:s}", "hash", hash,
                                         "makespan_s", plan->makespan_s, "bound_s",
                                         plan->bound_s, "winner", plan->winner);
    Py_XDECREF(hash);
    if (dict != NULL
        && (put_view(dict, "rank_offsets", capsule, NPY_INT64, m + 1, 0,
                     plan->rank_offsets)
                < 0
            || put_view(dict, "ranks", capsule, NPY_INT32, plan->rank_offsets[m], 0,
                        plan->ranks)
                   < 0
            || put_view(dict, "sequence_offsets", capsule, NPY_INT64, m + 1, 0,
                        plan->sequence_offsets)
                   < 0
            || put_view(dict, "sequences", capsule, NPY_INT64,
                        plan->sequence_offsets[m], 0, plan->sequences)
                   < 0
            || put_view(dict, "recompute", capsule, NPY_INT32, m, DCP_RECOMPUTE_KINDS,
                        plan->recompute)
                   < 0
            || put_view(dict, "start_s", capsule, NPY_DOUBLE, m, 0, plan->start_s) < 0
            || put_view(dict, "end_s", capsule, NPY_DOUBLE, m, 0, plan->end_s) < 0
            || put_view(dict, "bytes", capsule, NPY_INT64, m, 0, plan->bytes) < 0
            || put_view(dict, "round", capsule, NPY_INT32, m, 0, plan->round) < 0)) {
        Py_CLEAR(dict);
    }
    Py_DECREF(capsule);
    return dict;
}

PyDoc_STRVAR(plan_doc, "plan(request)\n--\n\nPlans a step: a dict of read-only arrays, "
                       "hash, makespan_s and bound_s.");

static PyObject *
module_plan(PyObject *module, PyObject *args)
{
    (void)module;
    parsed_request_t parsed = {.lengths = NULL};
    if (!PyArg_ParseTuple(args, "O&", parse_request, &parsed)) {
        return NULL;
    }
    dcp_plan_t *plan = NULL;
    dcp_status_t status;
    BIND_NOGIL(status, dcp_plan_create(&parsed.request, &plan));
    Py_DECREF(parsed.lengths);
    return status == DCP_OK ? wrap_plan(plan) : bind_raise(status);
}

/* The arrays of a plan that came from Python, in the order of plan_fields. */
enum { FIELD_COUNT = 9 };
static const struct {
    const char *key;
    int type_num, dim_count;
} plan_fields[FIELD_COUNT] = {
    {"rank_offsets", NPY_INT64, 1},
    {"ranks", NPY_INT32, 1},
    {"sequence_offsets", NPY_INT64, 1},
    {"sequences", NPY_INT64, 1},
    {"recompute", NPY_INT32, 2},
    {"start_s", NPY_DOUBLE, 1},
    {"end_s", NPY_DOUBLE, 1},
    {"bytes", NPY_INT64, 1},
    {"round", NPY_INT32, 1},
};

typedef struct parsed_plan {
    dcp_plan_t plan;
    PyArrayObject *arrays[FIELD_COUNT];
} parsed_plan_t;

static void
parsed_plan_fini(parsed_plan_t *parsed)
{
    for (int i = 0; i < FIELD_COUNT; i++) {
        Py_CLEAR(parsed->arrays[i]);
    }
}

/* The sizes that the core takes for granted. */
static int
check_sizes(const parsed_plan_t *parsed)
{
    npy_intp m = PyArray_SIZE(parsed->arrays[0]) - 1;
    const int64_t *rank_offsets = PyArray_DATA(parsed->arrays[0]);
    const int64_t *sequence_offsets = PyArray_DATA(parsed->arrays[2]);
    return m >= 0 && PyArray_SIZE(parsed->arrays[2]) == m + 1
           && PyArray_DIM(parsed->arrays[4], 0) == m
           && PyArray_DIM(parsed->arrays[4], 1) == DCP_RECOMPUTE_KINDS
           && PyArray_SIZE(parsed->arrays[5]) == m
           && PyArray_SIZE(parsed->arrays[6]) == m
           && PyArray_SIZE(parsed->arrays[7]) == m
           && PyArray_SIZE(parsed->arrays[8]) == m
           && PyArray_SIZE(parsed->arrays[1]) == rank_offsets[m]
           && PyArray_SIZE(parsed->arrays[3]) == sequence_offsets[m];
}

static int
parsed_plan_init(parsed_plan_t *parsed, PyObject *dict)
{
    memset(parsed, 0, sizeof *parsed);
    for (int i = 0; i < FIELD_COUNT; i++) {
        PyObject *item = PyDict_GetItemString(dict, plan_fields[i].key);
        if (item == NULL) {
            PyErr_SetString(PyExc_KeyError, plan_fields[i].key);
            goto fail;
        }
        parsed->arrays[i] = bind_array(item, plan_fields[i].type_num,
                                       plan_fields[i].dim_count, plan_fields[i].key);
        if (parsed->arrays[i] == NULL) {
            goto fail;
        }
    }
    if (!check_sizes(parsed)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "the plan's lists do not fit each other"));
        goto fail;
    }
    dcp_plan_t *plan = &parsed->plan;
    plan->micro_batch_count = PyArray_SIZE(parsed->arrays[0]) - 1;
    plan->rank_offsets = PyArray_DATA(parsed->arrays[0]);
    plan->ranks = PyArray_DATA(parsed->arrays[1]);
    plan->sequence_offsets = PyArray_DATA(parsed->arrays[2]);
    plan->sequences = PyArray_DATA(parsed->arrays[3]);
    plan->recompute = PyArray_DATA(parsed->arrays[4]);
    plan->start_s = PyArray_DATA(parsed->arrays[5]);
    plan->end_s = PyArray_DATA(parsed->arrays[6]);
    plan->bytes = PyArray_DATA(parsed->arrays[7]);
    plan->round = PyArray_DATA(parsed->arrays[8]);
    PyObject *winner = PyDict_GetItemString(dict, "winner"); /* borrowed, dict lives */
    plan->winner = winner != NULL ? PyUnicode_AsUTF8(winner) : "";
    if (plan->winner == NULL) {
        goto fail;
    }
    return 0;

fail:
    parsed_plan_fini(parsed);
    return -1;
}

PyDoc_STRVAR(plan_verify_doc,
             "plan_verify(request, plan, makespan_s, bound_s)\n--\n\nProves a plan or "
             "raises dcp.ArgumentError with the rule it breaks. Returns its hash.");

static PyObject *
module_plan_verify(PyObject *module, PyObject *args)
{
    (void)module;
    parsed_request_t parsed = {.lengths = NULL};
    parsed_plan_t plan;
    PyObject *dict;
    double makespan_s, bound_s;
    if (!PyArg_ParseTuple(args, "O&O!dd", parse_request, &parsed, &PyDict_Type, &dict,
                          &makespan_s, &bound_s)) {
        Py_XDECREF(parsed.lengths);
        return NULL;
    }
    if (parsed_plan_init(&plan, dict) < 0) {
        Py_DECREF(parsed.lengths);
        return NULL;
    }
    plan.plan.makespan_s = makespan_s;
    plan.plan.bound_s = bound_s;
    dcp_status_t status;
    uint64_t hash[2];
    BIND_NOGIL(status, dcp_plan_verify(&parsed.request, &plan.plan));
    if (status == DCP_OK) {
        dcp_plan_hash(&parsed.request, &plan.plan, hash);
    }
    parsed_plan_fini(&plan);
    Py_DECREF(parsed.lengths);
    return status == DCP_OK ? hash_text(hash) : bind_raise(status);
}

PyDoc_STRVAR(cost_time_doc,
             "cost_time(cost, tokens, square_sum, first_rank, ranks, recompute)\n--\n"
             "\nSeconds of one micro-batch.");

static PyObject *
module_cost_time(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tuple;
    dcp_cost_t cost;
    long long tokens;
    double square_sum, seconds;
    int first, ranks;
    int32_t recompute[DCP_RECOMPUTE_KINDS];
    if (!PyArg_ParseTuple(args, "O!Ldii(ii)", &PyTuple_Type, &tuple, &tokens,
                          &square_sum, &first, &ranks, &recompute[0], &recompute[1])
        || parse_cost(tuple, &cost) < 0) {
        return NULL;
    }
    dcp_status_t status = dcp_cost_check(&cost);
    if (status == DCP_OK) {
        int tier = ranks > 0 ? dcp_cost_tier(&cost, first, ranks) : DCP_TIER_NODE;
        status =
            dcp_cost_time(&cost, tokens, square_sum, ranks, tier, recompute, &seconds);
    }
    return status == DCP_OK ? PyFloat_FromDouble(seconds) : bind_raise(status);
}

PyDoc_STRVAR(cost_memory_doc,
             "cost_memory(cost, tokens, ranks, recompute, world)\n--\n\n"
             "Bytes on each rank of one micro-batch.");

static PyObject *
module_cost_memory(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tuple;
    dcp_cost_t cost;
    long long tokens;
    int ranks, world;
    int32_t recompute[DCP_RECOMPUTE_KINDS];
    int64_t bytes;
    if (!PyArg_ParseTuple(args, "O!Li(ii)i", &PyTuple_Type, &tuple, &tokens, &ranks,
                          &recompute[0], &recompute[1], &world)
        || parse_cost(tuple, &cost) < 0) {
        return NULL;
    }
    dcp_status_t status = dcp_cost_check(&cost);
    if (status == DCP_OK) {
        status = dcp_cost_memory(&cost, tokens, ranks, recompute, world, &bytes);
    }
    return status == DCP_OK ? PyLong_FromLongLong(bytes) : bind_raise(status);
}

static PyObject *
module_plan_strategies(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    Py_ssize_t count = (Py_ssize_t)dcp_plan_strategy_count();
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(dcp_plan_strategy_name(i));
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

static PyMethodDef plan_methods[] = {
    {"plan", module_plan, METH_VARARGS, plan_doc},
    {"plan_verify", module_plan_verify, METH_VARARGS, plan_verify_doc},
    {"cost_time", module_cost_time, METH_VARARGS, cost_time_doc},
    {"cost_memory", module_cost_memory, METH_VARARGS, cost_memory_doc},
    {"plan_strategies", module_plan_strategies, METH_NOARGS,
     "plan_strategies()\n--\n\nNames of the strategies."},
    {NULL, NULL, 0, NULL},
};

int
bind_plan_register(PyObject *module)
{
    return PyModule_AddFunctions(module, plan_methods);
}
