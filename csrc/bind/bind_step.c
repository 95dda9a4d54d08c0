/* dcp._dcp.Sharded: a sharded model and its steps. Arrays over its memory count as
 * views until they die, and it cannot be closed before. */
#include "bind_batch.h"
#include "bind_control.h"
#include "bind_optimizer.h"
#include "bind_view.h"

#include "dcp/train.h"

#include <string.h>

typedef struct sharded_object {
    PyObject_HEAD dcp_sharded_t *sharded; /* owned; NULL once closed */
    PyObject *world;                      /* keeps the communicator alive */
    dcp_pool_t *pool;                     /* the process's, borrowed */
    int32_t views;                        /* arrays that look into the buffers */
    int32_t state_views;                  /* and into the optimizer's state */
} sharded_object_t;

static PyTypeObject *sharded_type;

static dcp_sharded_t *
checked(sharded_object_t *self)
{
    if (self->sharded == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this sharded model is closed"));
    }
    return self->sharded;
}

PyDoc_STRVAR(
    sharded_doc,
    "Sharded(world, config, *, device, block_rows, seed, initialise, forward_only, "
    "frozen, no_windows, reduce_layer, sequence_parallel, prefetch, gather_step, "
    "machine_ranks)\n--\n\nA model "
    "sharded over "
    "the ranks of a "
    "world. Collective.");

static int
sharded_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"world",
                            "config",
                            "device",
                            "block_rows",
                            "seed",
                            "initialise",
                            "forward_only",
                            "frozen",
                            "no_windows",
                            "reduce_layer",
                            "sequence_parallel",
                            "prefetch",
                            "gather_step",
                            "machine_ranks",
                            NULL};
    sharded_object_t *self = (sharded_object_t *)object;
    PyObject *world, *mapping, *frozen = Py_None;
    const char *device_name = "cpu";
    long long block_rows = 1;
    unsigned long long seed = 0;
    int initialise = 1, forward_only = 0, no_windows = 0, reduce_layer = 0,
        prefetch = 0, gather_step = 0, machine_ranks = 1;
    int sequence_kind = DCP_SEQUENCE_AUTO;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO|$sLKppOppippi", names, &world, &mapping, &device_name,
            &block_rows, &seed, &initialise, &forward_only, &frozen, &no_windows,
            &reduce_layer, &sequence_kind, &prefetch, &gather_step, &machine_ranks)) {
        return -1;
    }
    if (self->sharded != NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this sharded model exists already"));
        return -1;
    }
    const dcp_device_ops_t *device = strcmp(device_name, "cpu") == 0 ? dcp_device_cpu()
                                     : strcmp(device_name, "late") == 0
                                         ? dcp_device_late()
                                         : NULL;
    if (device == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "device \"%s\" must be cpu", device_name));
        return -1;
    }
    dcp_comm_t *comm = bind_world_comm(world);
    dcp_transformer1d_config_t config;
    if (comm == NULL || bind_transformer1d_config(mapping, &config) < 0) {
        return -1;
    }
    if (sequence_kind < DCP_SEQUENCE_AUTO || sequence_kind > DCP_SEQUENCE_RING) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "sequence_parallel %d must lie in 0..2",
                            sequence_kind));
        return -1;
    }
    PyArrayObject *mask = NULL;
    if (frozen != Py_None) {
        mask = bind_array(frozen, NPY_UINT8, 1, "frozen");
        if (mask == NULL) {
            return -1;
        }
        if (PyArray_SIZE(mask) != dcp_model_tensor_count(&config)) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                "frozen has %lld items, the model %lld tensors",
                                (long long)PyArray_SIZE(mask),
                                (long long)dcp_model_tensor_count(&config)));
            Py_DECREF(mask);
            return -1;
        }
    }
    dcp_pool_t *pool = bind_pool_hold();
    if (pool == NULL) {
        Py_XDECREF(mask);
        return -1;
    }
    dcp_sharded_options_t options = {
        .block_rows = block_rows,
        .seed = seed,
        .initialise = initialise,
        .forward_only = forward_only,
        .frozen = mask != NULL ? PyArray_DATA(mask) : NULL,
        .no_windows = no_windows,
        .reduce_layer = reduce_layer,
        .sequence_kind = (dcp_sequence_kind_t)sequence_kind,
        .prefetch = prefetch,
        .gather_step = gather_step,
        .machine_ranks = machine_ranks,
    };
    dcp_status_t status;
    BIND_NOGIL(status, dcp_sharded_create(comm, &config, device, pool, &options,
                                          &self->sharded));
    Py_XDECREF(mask);
    if (status != DCP_OK) {
        bind_pool_drop();
        bind_raise(status);
        return -1;
    }
    self->world = Py_NewRef(world);
    return 0;
}

static void
let_go(sharded_object_t *self)
{
    if (self->sharded != NULL) {
        dcp_sharded_t *sharded = self->sharded;
        self->sharded = NULL;
        /* may wait for a thread that gathers or carries, which may ask for signals */
        Py_BEGIN_ALLOW_THREADS dcp_sharded_destroy(sharded);
        Py_END_ALLOW_THREADS bind_pool_drop();
    }
    Py_CLEAR(self->world);
}

static void
sharded_dealloc(PyObject *object)
{
    sharded_object_t *self = (sharded_object_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    let_go(self);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(sharded_close_doc,
             "close()\n--\n\nLets go of all buffers; refused while arrays still "
             "look into them.");

static PyObject *
sharded_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    sharded_object_t *self = (sharded_object_t *)object;
    int32_t views = self->views + self->state_views;
    if (views > 0) {
        return bind_raise(
            DCP_FAIL(DCP_ERR_STATE,
                     "%d arrays still look into this model's buffers: drop them first",
                     (int)views));
    }
    let_go(self);
    Py_RETURN_NONE;
}

static PyObject *
busy_list(const int64_t *busy_ns, int32_t count)
{
    PyObject *list = PyList_New(count);
    for (int32_t i = 0; list != NULL && i < count; i++) {
        PyObject *seconds = PyFloat_FromDouble((double)busy_ns[i] * 1e-9);
        if (seconds == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, seconds);
    }
    return list;
}

typedef enum step_part {
    PART_ALL,
    PART_GRADIENTS,  /* up to the reduction */
    PART_ACCUMULATE, /* up to this rank's own gradients */
} step_part_t;

/* All parts take the same arguments. */
static PyObject *
run_step(sharded_object_t *self, PyObject *args, PyObject *kwargs, step_part_t part)
{
    static char *names[] = {
        "micro_batches", "scale",      "step",     "update_count",   "trainable_count",
        "plan_hash",     "clip",       "lr",       "skip_nonfinite", "dropout_seed",
        "groups",        "precision",  "hadamard", "nearest",        "feedback",
        "quantise_seed", "statistics", NULL};
    PyObject *micro_batches, *groups = Py_None;
    const char *precision = "fp32";
    unsigned long long quantise_seed = 0;
    int hadamard = 0, nearest = 0, feedback = 0, statistics = 0;
    double scale = 0;
    dcp_step_args_t step = {0};
    long long number = 0, update_count = 0, trainable = 0;
    unsigned long long plan_hash = 0, dropout_seed = 0;
    int skip = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O|$dLLLKddpKOspppKp", names, &micro_batches, &scale, &number,
            &update_count, &trainable, &plan_hash, &step.clip, &step.lr, &skip,
            &dropout_seed, &groups, &precision, &hadamard, &nearest, &feedback,
            &quantise_seed, &statistics)) {
        return NULL;
    }
    dcp_status_t parsed = dcp_precision_parse(precision, &step.precision);
    if (parsed != DCP_OK) {
        return bind_raise(parsed);
    }
    step.hadamard = hadamard;
    step.nearest = nearest;
    step.feedback = feedback;
    step.quantise_seed = quantise_seed;
    step.statistics = statistics;
    dcp_sharded_t *sharded = checked(self);
    bind_batches_t list;
    if (sharded == NULL
        || bind_batches_init(&list, micro_batches, groups,
                             dcp_comm_rank(dcp_sharded_comm(sharded)), scale,
                             dropout_seed)
               < 0) {
        return NULL;
    }
    int32_t ranks = dcp_comm_size(dcp_sharded_comm(sharded));
    int64_t *busy_ns = PyMem_Calloc((size_t)ranks, sizeof(int64_t));
    if (busy_ns == NULL) {
        bind_batches_fini(&list);
        return PyErr_NoMemory();
    }
    step.batches = list.batches;
    step.batch_count = list.count;
    step.groups = list.groups;
    step.group_count = list.group_count;
    step.step = number;
    step.update_count = update_count;
    step.trainable_count = trainable;
    step.plan_hash = plan_hash;
    step.skip_nonfinite = skip;
    dcp_status_t status;
    dcp_step_result_t result = {0};
    if (part == PART_ALL) {
        BIND_NOGIL(status, dcp_sharded_step(sharded, &step, busy_ns, &result));
    } else if (part == PART_ACCUMULATE) {
        BIND_NOGIL(status,
                   dcp_sharded_accumulate(sharded, &step, busy_ns, &result.loss));
    } else {
        BIND_NOGIL(status,
                   dcp_sharded_gradients(sharded, &step, busy_ns, &result.loss));
    }
    bind_batches_fini(&list);
    PyObject *out = NULL;
    if (status != DCP_OK) {
        bind_raise(status);
    } else if (part == PART_ALL) {
        PyObject *observation =
            statistics ? bind_observation(&result.observation) : Py_NewRef(Py_None);
        out = observation == NULL
                  ? NULL
                  : Py_BuildValue("{s:d,s:d,s:d,s:O,s:L,s:L,s:L,s:d,s:N,s:N}", "loss",
                                  result.loss, "grad_norm", result.grad_norm, "seconds",
                                  (double)result.wall_ns * 1e-9, "skipped",
                                  result.skipped ? Py_True : Py_False, "gathered_bytes",
                                  (long long)result.gathered_bytes, "reduced_bytes",
                                  (long long)result.reduced_bytes, "reduce_count",
                                  (long long)result.reduce_count, "statistics_s",
                                  (double)result.statistics_ns * 1e-9, "observation",
                                  observation, "busy_s", busy_list(busy_ns, ranks));
    } else {
        out = PyFloat_FromDouble(result.loss);
    }
    PyMem_Free(busy_ns);
    return out;
}

PyDoc_STRVAR(
    sharded_step_doc,
    "step(micro_batches, *, scale, step, update_count, trainable_count, "
    "plan_hash, clip, lr, skip_nonfinite, dropout_seed, precision, hadamard, nearest, "
    "feedback, quantise_seed, statistics)\n--\n\nOne optimizer step. "
    "Collective. Returns a dict: loss, grad_norm, seconds, skipped, "
    "gathered_bytes, reduced_bytes, reduce_count, statistics_s, observation, busy_s.");

static PyObject *
sharded_step(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return run_step((sharded_object_t *)object, args, kwargs, PART_ALL);
}

PyDoc_STRVAR(sharded_gradients_doc,
             "gradients(micro_batches, *, scale, ...)\n--\n\nThe same up to the "
             "reduction: returns the "
             "loss; this rank's runs of the gradient buffer hold the sum over ranks.");

static PyObject *
sharded_gradients(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return run_step((sharded_object_t *)object, args, kwargs, PART_GRADIENTS);
}

PyDoc_STRVAR(sharded_accumulate_doc,
             "accumulate(micro_batches, *, scale, ...)\n--\n\nThe same up to this "
             "rank's own gradients, to which the next call adds. Returns the loss so "
             "far.");

static PyObject *
sharded_accumulate(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return run_step((sharded_object_t *)object, args, kwargs, PART_ACCUMULATE);
}

PyDoc_STRVAR(
    sharded_evaluate_doc,
    "evaluate(micro_batches, scale, groups)\n--\n\nSum over ranks of the scaled "
    "loss, without dropout. Collective.");

static PyObject *
sharded_evaluate(PyObject *object, PyObject *args)
{
    sharded_object_t *self = (sharded_object_t *)object;
    PyObject *micro_batches, *groups;
    double scale;
    if (!PyArg_ParseTuple(args, "OdO", &micro_batches, &scale, &groups)) {
        return NULL;
    }
    dcp_sharded_t *sharded = checked(self);
    bind_batches_t list;
    if (sharded == NULL
        || bind_batches_init(&list, micro_batches, groups,
                             dcp_comm_rank(dcp_sharded_comm(sharded)), scale, 0)
               < 0) {
        return NULL;
    }
    double loss = 0;
    dcp_status_t status;
    dcp_step_args_t step = {.batches = list.batches,
                            .batch_count = list.count,
                            .groups = list.groups,
                            .group_count = list.group_count};
    BIND_NOGIL(status, dcp_sharded_evaluate(sharded, &step, &loss));
    bind_batches_fini(&list);
    return status == DCP_OK ? PyFloat_FromDouble(loss) : bind_raise(status);
}

PyDoc_STRVAR(
    sharded_note_step_doc,
    "note_step(precision, multiple, seconds)\n--\n\nWhat an observation of the "
    "latest step still lacks: its arm, and how long all of it took. "
    "Collective.");

static PyObject *
sharded_note_step(PyObject *object, PyObject *args)
{
    const char *precision;
    int multiple;
    double seconds;
    if (!PyArg_ParseTuple(args, "sid", &precision, &multiple, &seconds)) {
        return NULL;
    }
    dcp_sharded_t *sharded = checked((sharded_object_t *)object);
    if (sharded == NULL) {
        return NULL;
    }
    dcp_arm_t arm = {.multiple = multiple};
    dcp_status_t status = dcp_precision_parse(precision, &arm.precision);
    if (status == DCP_OK) {
        BIND_NOGIL(status, dcp_sharded_note_step(sharded, arm, seconds));
    }
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    Py_RETURN_NONE;
}

/* {name: seconds, bytes or calls} of every precision. */
static PyObject *
world_estimates(const dcp_control_world_t *world,
                double (*estimate)(void *context, dcp_precision_t precision))
{
    PyObject *dict = PyDict_New();
    for (int q = 0; dict != NULL && q < DCP_PRECISION_COUNT; q++) {
        PyObject *value =
            PyFloat_FromDouble(estimate(world->context, (dcp_precision_t)q));
        if (value == NULL
            || PyDict_SetItemString(dict, dcp_precision_name((dcp_precision_t)q), value)
                   < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

PyObject *
bind_control_step(PyObject *controller_object, PyObject *object)
{
    dcp_controller_t *controller = bind_controller(controller_object);
    if (controller == NULL) {
        return NULL;
    }
    if (sharded_type == NULL || !PyObject_TypeCheck(object, sharded_type)) {
        return bind_raise(DCP_FAIL(DCP_ERR_TYPE,
                                   "sharded must be a dcp._dcp.Sharded, got %.100s",
                                   Py_TYPE(object)->tp_name));
    }
    dcp_sharded_t *sharded = checked((sharded_object_t *)object);
    if (sharded == NULL) {
        return NULL;
    }
    dcp_control_world_t world;
    dcp_observation_t observation;
    dcp_decision_t decision;
    dcp_status_t status = dcp_sharded_control_world(sharded, &world);
    if (status == DCP_OK) {
        BIND_NOGIL(status, dcp_controller_step(controller, &world, &decision));
    }
    if (status == DCP_OK) { /* what it saw: the latest step's, still */
        status = world.observe(world.context, &observation);
    }
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    PyObject *seen = bind_observation(&observation);
    PyObject *decided = bind_decision(&decision);
    PyObject *bytes = world_estimates(&world, world.reduce_bytes);
    PyObject *calls = world_estimates(&world, world.reduce_calls);
    PyObject *codec = world_estimates(&world, world.codec_s);
    PyObject *out = NULL;
    if (seen != NULL && decided != NULL && bytes != NULL && calls != NULL
        && codec != NULL) {
        out = Py_BuildValue("(OO{s:O,s:O,s:O})", seen, decided, "reduce_bytes", bytes,
                            "reduce_calls", calls, "codec_s", codec);
    }
    Py_XDECREF(seen);
    Py_XDECREF(decided);
    Py_XDECREF(bytes);
    Py_XDECREF(calls);
    Py_XDECREF(codec);
    return out;
}

PyDoc_STRVAR(sharded_residual_doc,
             "residual(make)\n--\n\nWhat quantising left out, this rank's own whole "
             "tensors: a list of (tensor, 0, writable array); empty where there is "
             "none. With make there is, collective.");

static PyObject *
sharded_residual(PyObject *object, PyObject *argument)
{
    sharded_object_t *self = (sharded_object_t *)object;
    dcp_sharded_t *sharded = checked(self);
    int make = PyObject_IsTrue(argument);
    if (sharded == NULL || make < 0) {
        return NULL;
    }
    dcp_status_t status = DCP_OK;
    if (make) {
        BIND_NOGIL(status, dcp_sharded_need_residual(sharded));
    }
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    const dcp_dbuffer_t *residual = dcp_sharded_residual(sharded);
    int64_t count = residual != NULL ? dcp_sharded_tensor_count(sharded) : 0;
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        const dcp_model_tensor_t *tensor = dcp_sharded_tensor(sharded, i);
        int64_t width = tensor->dim_count == 2 ? tensor->shape[1] : 1;
        PyObject *view =
            bind_run_view(object, &self->views, dcp_dbuffer_tensor_data(residual, i),
                          NPY_FLOAT32, tensor->shape[0] * width);
        if (bind_run_set(list, i, i, 0, view) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyDoc_STRVAR(sharded_publish_doc, "publish()\n--\n\nMakes weights that were written "
                                  "from outside visible to all ranks. "
                                  "Collective.");

static PyObject *
sharded_publish(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_sharded_t *sharded = checked((sharded_object_t *)object);
    if (sharded == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, dcp_sharded_publish(sharded));
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    Py_RETURN_NONE;
}

static const dcp_dbuffer_t *
kind_buffer(sharded_object_t *self, int kind)
{
    dcp_sharded_t *sharded = checked(self);
    if (sharded == NULL) {
        return NULL;
    }
    const dcp_dbuffer_t *buffer =
        kind >= 0 && kind <= DCP_SHARDED_GRADIENTS
            ? dcp_sharded_buffer(sharded, (dcp_sharded_kind_t)kind)
            : NULL;
    if (buffer == NULL) {
        bind_raise(
            DCP_FAIL(DCP_ERR_ARG, "kind %d: this model has no such buffer", kind));
    }
    return buffer;
}

PyDoc_STRVAR(sharded_tensor_view_doc, "tensor_view(kind, index)\n--\n\nThe whole "
                                      "tensor as a read-only array over the buffer.");

static PyObject *
sharded_tensor_view(PyObject *object, PyObject *args)
{
    sharded_object_t *self = (sharded_object_t *)object;
    int kind;
    long long index;
    if (!PyArg_ParseTuple(args, "iL", &kind, &index)) {
        return NULL;
    }
    const dcp_dbuffer_t *buffer = kind_buffer(self, (int)kind);
    if (buffer == NULL) {
        return NULL;
    }
    if (index < 0 || index >= dcp_sharded_tensor_count(self->sharded)) {
        return bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                   "index %lld: the model has %lld tensors", index,
                                   (long long)dcp_sharded_tensor_count(self->sharded)));
    }
    const dcp_model_tensor_t *tensor = dcp_sharded_tensor(self->sharded, index);
    npy_intp shape[2] = {tensor->shape[0], tensor->shape[1]};
    float *data = dcp_dbuffer_tensor_data(buffer, index);
    if (data == NULL) {
        return bind_raise(DCP_FAIL(DCP_ERR_STATE,
                                   "%s: no rank has a whole tensor where each holds "
                                   "its shard alone: gather the runs of all ranks",
                                   tensor->name));
    }
    return bind_view(object, &self->views, data, NPY_FLOAT32, tensor->dim_count, shape,
                     0);
}

PyDoc_STRVAR(sharded_runs_doc, "runs(kind)\n--\n\nThis rank's shard: a list of (tensor "
                               "index, first element, writable "
                               "array over the buffer).");

static PyObject *
sharded_runs(PyObject *object, PyObject *argument)
{
    sharded_object_t *self = (sharded_object_t *)object;
    long kind = PyLong_AsLong(argument);
    if (kind == -1 && PyErr_Occurred()) {
        return NULL;
    }
    const dcp_dbuffer_t *buffer = kind_buffer(self, (int)kind);
    if (buffer == NULL) {
        return NULL;
    }
    const dcp_dbuffer_run_t *runs;
    int64_t count;
    dcp_dbuffer_layout_runs(dcp_sharded_layout(self->sharded),
                            dcp_comm_rank(dcp_sharded_comm(self->sharded)), &runs,
                            &count);
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *view =
            bind_run_view(object, &self->views, dcp_dbuffer_run_data(buffer, &runs[i]),
                          NPY_FLOAT32, runs[i].count);
        if (bind_run_set(list, i, runs[i].tensor, runs[i].first, view) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyDoc_STRVAR(
    sharded_tensors_doc,
    "tensors()\n--\n\nA list of (name, shape, group name, frozen), in model order.");

static PyObject *
sharded_tensors(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_sharded_t *sharded = checked((sharded_object_t *)object);
    if (sharded == NULL) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < dcp_sharded_tensor_count(sharded); i++) {
        const dcp_model_tensor_t *tensor = dcp_sharded_tensor(sharded, i);
        PyObject *frozen = dcp_sharded_is_frozen(sharded, i) ? Py_True : Py_False;
        PyObject *item =
            tensor->dim_count == 2
                ? Py_BuildValue("s(LL)sO", tensor->name, (long long)tensor->shape[0],
                                (long long)tensor->shape[1], tensor->group_name, frozen)
                : Py_BuildValue("s(L)sO", tensor->name, (long long)tensor->shape[0],
                                tensor->group_name, frozen);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

PyDoc_STRVAR(
    sharded_set_optimizer_doc,
    "set_optimizer(rules, keep)\n--\n\nOne rule a tensor, each a tuple of the fields "
    "of dcp_optimizer_rule_t. keep: the state that is there goes on under new numbers, "
    "else it is made anew. Collective.");

static PyObject *
sharded_set_optimizer(PyObject *object, PyObject *args)
{
    sharded_object_t *self = (sharded_object_t *)object;
    PyObject *sequence;
    int keep;
    if (!PyArg_ParseTuple(args, "Op", &sequence, &keep)) {
        return NULL;
    }
    dcp_sharded_t *sharded = checked(self);
    if (sharded == NULL) {
        return NULL;
    }
    if (!keep && self->state_views > 0) {
        return bind_raise(
            DCP_FAIL(DCP_ERR_STATE,
                     "%d arrays still look into the optimizer's state: drop them first",
                     (int)self->state_views));
    }
    dcp_optimizer_rule_t *rules =
        bind_optimizer_rules(sequence, dcp_sharded_tensor_count(sharded));
    if (rules == NULL) {
        return NULL;
    }
    dcp_status_t status;
    if (keep) {
        status = dcp_sharded_set_rules(sharded, rules);
    } else {
        BIND_NOGIL(status, dcp_sharded_set_optimizer(sharded, rules));
    }
    PyMem_Free(rules);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(sharded_states_doc,
             "states()\n--\n\nThe optimizer's states: a list of (name, dtype, {tensor "
             "index: shape}); empty before one is set.");

static PyObject *
sharded_states(PyObject *object, PyObject *unused)
{
    (void)unused;
    dcp_sharded_t *sharded = checked((sharded_object_t *)object);
    if (sharded == NULL) {
        return NULL;
    }
    return bind_optimizer_states(dcp_sharded_optimizer(sharded),
                                 dcp_sharded_tensor_count(sharded));
}

PyDoc_STRVAR(sharded_state_runs_doc,
             "state_runs(state)\n--\n\nWhat this rank holds of state number `state`: a "
             "list of (tensor index, first element of the state's shape, writable "
             "array).");

static PyObject *
sharded_state_runs(PyObject *object, PyObject *argument)
{
    sharded_object_t *self = (sharded_object_t *)object;
    dcp_sharded_t *sharded = checked(self);
    return sharded != NULL
               ? bind_optimizer_state_runs(dcp_sharded_optimizer(sharded), argument,
                                           object, &self->state_views)
               : NULL;
}

static PyMethodDef sharded_methods[] = {
    {"step", (PyCFunction)(void (*)(void))sharded_step, METH_VARARGS | METH_KEYWORDS,
     sharded_step_doc},
    {"gradients", (PyCFunction)(void (*)(void))sharded_gradients,
     METH_VARARGS | METH_KEYWORDS, sharded_gradients_doc},
    {"accumulate", (PyCFunction)(void (*)(void))sharded_accumulate,
     METH_VARARGS | METH_KEYWORDS, sharded_accumulate_doc},
    {"evaluate", sharded_evaluate, METH_VARARGS, sharded_evaluate_doc},
    {"publish", sharded_publish, METH_NOARGS, sharded_publish_doc},
    {"note_step", sharded_note_step, METH_VARARGS, sharded_note_step_doc},
    {"residual", sharded_residual, METH_O, sharded_residual_doc},
    {"tensor_view", sharded_tensor_view, METH_VARARGS, sharded_tensor_view_doc},
    {"runs", sharded_runs, METH_O, sharded_runs_doc},
    {"set_optimizer", sharded_set_optimizer, METH_VARARGS, sharded_set_optimizer_doc},
    {"states", sharded_states, METH_NOARGS, sharded_states_doc},
    {"state_runs", sharded_state_runs, METH_O, sharded_state_runs_doc},
    {"tensors", sharded_tensors, METH_NOARGS, sharded_tensors_doc},
    {"close", sharded_close, METH_NOARGS, sharded_close_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sharded_slots[] = {
    {Py_tp_doc, (void *)sharded_doc}, {Py_tp_init, sharded_init},
    {Py_tp_new, PyType_GenericNew},   {Py_tp_dealloc, sharded_dealloc},
    {Py_tp_methods, sharded_methods}, {0, NULL},
};

static PyType_Spec sharded_spec = {
    .name = "dcp._dcp.Sharded",
    .basicsize = (int)sizeof(sharded_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = sharded_slots,
};

int
bind_step_register(PyObject *module)
{
    return bind_optimizer_register(module) < 0
               ? -1
               : bind_type_add(module, &sharded_spec, &sharded_type);
}
