/* dcp._dcp.Model: forward and backward over NumPy arrays, and what can be asked of a
 * configuration alone (tensors, initial values, bytes).
 *
 * A model keeps references to its weight arrays and reads them anew in every call: the
 * arrays may have been written in between, so packed copies are made again each time
 * (one pass over the weights). The process's pool may be replaced between two calls;
 * the core model, which borrows it, is then made again. */
#include "bind.h"

#include "dcp/alloc.h"
#include "dcp/device.h"
#include "dcp/model.h"

#include <stddef.h>
#include <string.h>

typedef struct model_object {
    PyObject_HEAD dcp_transformer1d_config_t config;
    const dcp_device_ops_t *device;
    dcp_model_t *model;     /* owned, NULL before the first call */
    const dcp_pool_t *pool; /* the pool `model` borrows */
    PyObject *weights;      /* tuple of arrays in model order */
    int busy;               /* a call runs, perhaps on another thread */
} model_object_t;

typedef enum field_kind {
    FIELD_SIZE,
    FIELD_NUMBER,
    FIELD_FLAG,
    FIELD_DTYPE,
} field_kind_t;

typedef struct field {
    const char *key;
    field_kind_t kind;
    size_t offset; /* in dcp_transformer1d_config_t */
} field_t;

#define FIELD(kind, key) {#key, kind, offsetof(dcp_transformer1d_config_t, key)}
static const field_t fields[] = {
    FIELD(FIELD_SIZE, vocab_size),
    FIELD(FIELD_SIZE, hidden_size),
    FIELD(FIELD_SIZE, intermediate_size),
    FIELD(FIELD_SIZE, num_hidden_layers),
    FIELD(FIELD_SIZE, num_attention_heads),
    FIELD(FIELD_SIZE, num_key_value_heads),
    FIELD(FIELD_SIZE, head_dim),
    FIELD(FIELD_SIZE, max_position_embeddings),
    FIELD(FIELD_NUMBER, rope_theta),
    FIELD(FIELD_NUMBER, rms_norm_eps),
    FIELD(FIELD_FLAG, tie_word_embeddings),
    FIELD(FIELD_FLAG, attention_bias),
    FIELD(FIELD_FLAG, mlp_bias),
    FIELD(FIELD_NUMBER, dropout),
    FIELD(FIELD_NUMBER, initializer_range),
    FIELD(FIELD_DTYPE, compute_dtype),
};
enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };

/* Sets the exception unless one is set already. */
static int
raise_field(dcp_status_t status, const field_t *field, PyObject *value,
            const char *rule)
{
    PyErr_Clear();
    PyObject *text = PyObject_Repr(value);
    const char *utf8 = text != NULL ? PyUnicode_AsUTF8(text) : NULL;
    PyErr_Clear();
    bind_raise(
        DCP_FAIL(status, "%s %.100s %s", field->key, utf8 != NULL ? utf8 : "?", rule));
    Py_XDECREF(text);
    return -1;
}

static int
read_dtype(const field_t *field, PyObject *value, char *place)
{
    if (!PyUnicode_Check(value)) {
        return raise_field(DCP_ERR_TYPE, field, value, "must be a name");
    }
    for (dcp_dtype_t dtype = DCP_F32; dtype <= DCP_BF16; dtype++) {
        if (PyUnicode_CompareWithASCIIString(value, dcp_dtype_name(dtype)) == 0) {
            memcpy(place, &dtype, sizeof dtype);
            return 0;
        }
    }
    return raise_field(DCP_ERR_ARG, field, value, "must be 'float32' or 'bfloat16'");
}

static int
read_field(const field_t *field, PyObject *value, dcp_transformer1d_config_t *config)
{
    char *place = (char *)config + field->offset;
    if (field->kind == FIELD_DTYPE) {
        return read_dtype(field, value, place);
    }
    if (field->kind == FIELD_NUMBER) {
        double number = PyBool_Check(value) ? -1 : PyFloat_AsDouble(value);
        if (PyBool_Check(value) || PyErr_Occurred()) {
            return raise_field(DCP_ERR_TYPE, field, value, "must be a number");
        }
        memcpy(place, &number, sizeof number);
        return 0;
    }
    if (field->kind == FIELD_FLAG) {
        if (!PyBool_Check(value)) {
            return raise_field(DCP_ERR_TYPE, field, value, "must be True or False");
        }
        int32_t flag = value == Py_True;
        memcpy(place, &flag, sizeof flag);
        return 0;
    }
    if (PyBool_Check(value) || !PyIndex_Check(value)) {
        return raise_field(DCP_ERR_TYPE, field, value, "must be an integer");
    }
    PyObject *integer = PyNumber_Index(value);
    long long size = integer != NULL ? PyLong_AsLongLong(integer) : -1;
    Py_XDECREF(integer);
    if (PyErr_Occurred()) {
        return raise_field(DCP_ERR_ARG, field, value, "does not fit 64 bits");
    }
    int64_t size_64 = size;
    memcpy(place, &size_64, sizeof size_64);
    return 0;
}

int
bind_transformer1d_config(PyObject *mapping, dcp_transformer1d_config_t *config_p)
{
    dcp_transformer1d_config_t config = {0};
    if (!PyMapping_Check(mapping)) {
        bind_raise(DCP_FAIL(DCP_ERR_TYPE, "config must be a mapping, got %.100s",
                            Py_TYPE(mapping)->tp_name));
        return -1;
    }
    for (int i = 0; i < FIELD_COUNT; i++) {
        PyObject *value = PyMapping_GetItemString(mapping, fields[i].key);
        if (value == NULL) {
            PyErr_Clear();
            bind_raise(
                DCP_FAIL(DCP_ERR_ARG, "config must have the key %s", fields[i].key));
            return -1;
        }
        int result = read_field(&fields[i], value, &config);
        Py_DECREF(value);
        if (result < 0) {
            return -1;
        }
    }
    if (PyMapping_Size(mapping) != FIELD_COUNT) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "config has %lld keys, and only these %d are known: "
                            "vocab_size ... compute_dtype",
                            (long long)PyMapping_Size(mapping), (int)FIELD_COUNT));
        return -1;
    }
    dcp_status_t status = dcp_transformer1d_check(&config);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    *config_p = config;
    return 0;
}

/* A tuple of the float32 arrays of `sequence`, which must have the model's shapes. */
static PyObject *
tensor_tuple(const dcp_transformer1d_config_t *config, PyObject *sequence, int writable,
             const char *what)
{
    PyObject *items = PySequence_Tuple(sequence);
    if (items == NULL) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    PyObject *result = PyTuple_New(count);
    if (result == NULL) {
        goto fail;
    }
    if (count != dcp_model_tensor_count(config)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s has %lld arrays, the model %lld tensors",
                            what, (long long)count,
                            (long long)dcp_model_tensor_count(config)));
        goto fail;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        dcp_model_tensor_t tensor;
        dcp_model_tensor_get(config, i, &tensor);
        PyObject *item = PyTuple_GET_ITEM(items, i);
        PyArrayObject *array =
            writable
                ? bind_array_writable(item, NPY_FLOAT32, tensor.dim_count, tensor.name)
                : bind_array(item, NPY_FLOAT32, tensor.dim_count, tensor.name);
        if (array == NULL) {
            goto fail;
        }
        PyTuple_SET_ITEM(result, i, (PyObject *)array);
        for (int d = 0; d < tensor.dim_count; d++) {
            if (PyArray_DIM(array, d) != tensor.shape[d]) {
                bind_raise(DCP_FAIL(
                    DCP_ERR_ARG, "%s: dimension %d of %s is %lld, must be %lld", what,
                    d, tensor.name, (long long)PyArray_DIM(array, d),
                    (long long)tensor.shape[d]));
                goto fail;
            }
        }
    }
    Py_DECREF(items);
    return result;

fail:
    Py_XDECREF(result);
    Py_DECREF(items);
    return NULL;
}

PyDoc_STRVAR(model_doc,
             "Model(config, weights, *, device='cpu')\n--\n\nTransformer1D over "
             "float32 arrays, one a tensor in model order. Keeps references to them "
             "and reads them in every call.");

static int
model_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"config", "weights", "device", NULL};
    model_object_t *self = (model_object_t *)object;
    PyObject *mapping, *weights;
    const char *device = "cpu";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$s", names, &mapping, &weights,
                                     &device)) {
        return -1;
    }
    if (self->weights != NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this model exists already"));
        return -1;
    }
    if (strcmp(device, "cpu") == 0) {
        self->device = dcp_device_cpu();
    } else if (strcmp(device, "late") == 0) {
        self->device = dcp_device_late();
    } else {
        bind_raise(DCP_FAIL(
            DCP_ERR_ARG, "device \"%s\" must be cpu: this build has no other", device));
        return -1;
    }
    if (bind_transformer1d_config(mapping, &self->config) < 0) {
        return -1;
    }
    self->weights = tensor_tuple(&self->config, weights, 0, "weights");
    return self->weights != NULL ? 0 : -1;
}

static void
model_dealloc(PyObject *object)
{
    model_object_t *self = (model_object_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    dcp_model_destroy(self->model);
    Py_XDECREF(self->weights);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Everything a call holds while it runs without the GIL. */
typedef struct call {
    dcp_batch_t batch;
    PyArrayObject *tokens, *offsets, *labels, *weights, *row_ids;
    PyObject *gradients; /* tuple, or NULL */
    float **pointers;    /* weights, then gradients */
    int holds_pool;      /* the process's pool stays until call_fini */
    double loss;
} call_t;

static void
call_fini(model_object_t *self, call_t *call)
{
    Py_XDECREF(call->tokens);
    Py_XDECREF(call->offsets);
    Py_XDECREF(call->labels);
    Py_XDECREF(call->weights);
    Py_XDECREF(call->row_ids);
    Py_XDECREF(call->gradients);
    dcp_free(call->pointers);
    if (call->holds_pool) {
        bind_pool_drop();
    }
    self->busy = 0;
}

static int
check_count(const char *what, const PyArrayObject *array, int64_t count)
{
    if (array != NULL && PyArray_SIZE((PyArrayObject *)array) != count) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s has %lld items, tokens has %lld", what,
                            (long long)PyArray_SIZE((PyArrayObject *)array),
                            (long long)count));
        return -1;
    }
    return 0;
}

static int
call_read(call_t *call, PyObject *tokens, PyObject *offsets, PyObject *labels,
          PyObject *weights, PyObject *row_ids)
{
    call->tokens = bind_integers(tokens, NPY_INT32, "tokens");
    call->offsets =
        call->tokens != NULL ? bind_integers(offsets, NPY_INT64, "offsets") : NULL;
    if (call->offsets == NULL) {
        return -1;
    }
    if (labels != Py_None
        && (call->labels = bind_integers(labels, NPY_INT32, "labels")) == NULL) {
        return -1;
    }
    if (weights != Py_None
        && (call->weights = bind_array(weights, NPY_FLOAT32, 1, "weights")) == NULL) {
        return -1;
    }
    if (row_ids != Py_None
        && (call->row_ids = bind_integers(row_ids, NPY_INT64, "row_ids")) == NULL) {
        return -1;
    }
    int64_t count = PyArray_SIZE(call->tokens);
    if (PyArray_SIZE(call->offsets) < 1) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "offsets must hold at least one number, 0"));
        return -1;
    }
    if (check_count("labels", call->labels, count) < 0
        || check_count("weights", call->weights, count) < 0
        || check_count("row_ids", call->row_ids, count) < 0) {
        return -1;
    }
    call->batch = (dcp_batch_t){
        .token_count = count,
        .sequence_count = PyArray_SIZE(call->offsets) - 1,
        .tokens = PyArray_DATA(call->tokens),
        .offsets = PyArray_DATA(call->offsets),
        .labels = call->labels != NULL ? PyArray_DATA(call->labels) : NULL,
        .weights = call->weights != NULL ? PyArray_DATA(call->weights) : NULL,
        .row_ids = call->row_ids != NULL ? PyArray_DATA(call->row_ids) : NULL,
        .scale = 1,
    };
    return 0;
}

/* Binds the arrays to a core model that uses the present pool. */
static dcp_status_t
call_bind(model_object_t *self, call_t *call, dcp_pool_t *pool)
{
    if (self->model == NULL || self->pool != pool) {
        dcp_model_destroy(self->model);
        self->model = NULL;
        DCP_TRY(dcp_model_create(&self->config, self->device, pool, &self->model));
        self->pool = pool;
    }
    int64_t count = PyTuple_GET_SIZE(self->weights);
    void *memory;
    DCP_TRY(dcp_alloc_array(2 * count, (int64_t)sizeof(float *), "tensor pointers",
                            &memory));
    call->pointers = memory;
    for (int64_t i = 0; i < count; i++) {
        call->pointers[i] =
            PyArray_DATA((PyArrayObject *)PyTuple_GET_ITEM(self->weights, i));
        if (call->gradients != NULL) {
            call->pointers[count + i] =
                PyArray_DATA((PyArrayObject *)PyTuple_GET_ITEM(call->gradients, i));
        }
    }
    return dcp_model_bind(self->model, call->pointers,
                          call->gradients != NULL ? call->pointers + count : NULL);
}

static int
call_begin(model_object_t *self, call_t *call)
{
    if (self->weights == NULL) {
        bind_raise(DCP_FAIL(DCP_ERR_STATE, "this model has not been made"));
        return -1;
    }
    if (self->busy) {
        bind_raise(DCP_FAIL(
            DCP_ERR_STATE, "another thread is in a call of this model: one at a time"));
        return -1;
    }
    memset(call, 0, sizeof *call);
    self->busy = 1;
    return 0;
}

static int
call_start(model_object_t *self, call_t *call)
{
    dcp_pool_t *pool = bind_pool_hold();
    if (pool == NULL) {
        return -1;
    }
    call->holds_pool = 1;
    dcp_status_t status = call_bind(self, call, pool);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(forward_backward_doc,
             "forward_backward(tokens, offsets, labels, gradients, *, weights=None, "
             "scale=1.0, row_ids=None, dropout_seed=0, recompute=(0, 0))\n--\n\nScaled "
             "loss; adds the gradient to the arrays of `gradients`. recompute: layers "
             "and MLPs.");

static PyObject *
model_forward_backward(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "offsets", "labels",       "gradients", "weights",
                            "scale",  "row_ids", "dropout_seed", "recompute", NULL};
    model_object_t *self = (model_object_t *)object;
    PyObject *tokens, *offsets, *labels, *gradients, *weights = Py_None;
    PyObject *row_ids = Py_None;
    double scale = 1;
    unsigned long long seed = 0;
    int32_t recompute[DCP_RECOMPUTE_KINDS] = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|$OdOK(ii)", names, &tokens,
                                     &offsets, &labels, &gradients, &weights, &scale,
                                     &row_ids, &seed, &recompute[DCP_RECOMPUTE_LAYER],
                                     &recompute[DCP_RECOMPUTE_MLP])) {
        return NULL;
    }
    call_t call;
    if (call_begin(self, &call) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (call_read(&call, tokens, offsets, labels, weights, row_ids) < 0) {
        goto done;
    }
    call.gradients = tensor_tuple(&self->config, gradients, 1, "gradients");
    if (call.gradients == NULL || call_start(self, &call) < 0) {
        goto done;
    }
    call.batch.scale = scale;
    call.batch.dropout_seed = seed;
    memcpy(call.batch.recompute, recompute, sizeof recompute);
    dcp_status_t status;
    BIND_COMPUTE(status,
                 dcp_model_forward_backward(self->model, &call.batch, &call.loss));
    result = status == DCP_OK ? PyFloat_FromDouble(call.loss) : bind_raise(status);
done:
    call_fini(self, &call);
    return result;
}

PyDoc_STRVAR(loss_doc, "loss(tokens, offsets, labels, *, weights=None, scale=1.0)\n--\n"
                       "\nScaled loss, without dropout.");

static PyObject *
model_loss(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "offsets", "labels", "weights", "scale", NULL};
    model_object_t *self = (model_object_t *)object;
    PyObject *tokens, *offsets, *labels, *weights = Py_None;
    double scale = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$Od", names, &tokens, &offsets,
                                     &labels, &weights, &scale)) {
        return NULL;
    }
    call_t call;
    if (call_begin(self, &call) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (call_read(&call, tokens, offsets, labels, weights, Py_None) < 0
        || call_start(self, &call) < 0) {
        goto done;
    }
    call.batch.scale = scale;
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_model_loss(self->model, &call.batch, &call.loss));
    result = status == DCP_OK ? PyFloat_FromDouble(call.loss) : bind_raise(status);
done:
    call_fini(self, &call);
    return result;
}

PyDoc_STRVAR(logits_doc, "logits(tokens, offsets)\n--\n\nfloat32 [T, vocab_size].");

static PyObject *
model_logits(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "offsets", NULL};
    model_object_t *self = (model_object_t *)object;
    PyObject *tokens, *offsets;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &tokens, &offsets)) {
        return NULL;
    }
    call_t call;
    if (call_begin(self, &call) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (call_read(&call, tokens, offsets, Py_None, Py_None, Py_None) < 0
        || call_start(self, &call) < 0) {
        goto done;
    }
    npy_intp shape[2] = {call.batch.token_count, self->config.vocab_size};
    result = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    if (result == NULL) {
        goto done;
    }
    float *logits = PyArray_DATA((PyArrayObject *)result);
    dcp_status_t status;
    BIND_COMPUTE(status, dcp_model_logits(self->model, &call.batch, logits));
    if (status != DCP_OK) {
        Py_CLEAR(result);
        bind_raise(status);
    }
done:
    call_fini(self, &call);
    return result;
}

static PyMethodDef model_methods[] = {
    {"forward_backward", (PyCFunction)(void (*)(void))model_forward_backward,
     METH_VARARGS | METH_KEYWORDS, forward_backward_doc},
    {"loss", (PyCFunction)(void (*)(void))model_loss, METH_VARARGS | METH_KEYWORDS,
     loss_doc},
    {"logits", (PyCFunction)(void (*)(void))model_logits, METH_VARARGS | METH_KEYWORDS,
     logits_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot model_slots[] = {
    {Py_tp_doc, (void *)model_doc}, {Py_tp_init, model_init},
    {Py_tp_dealloc, model_dealloc}, {Py_tp_methods, model_methods},
    {Py_tp_new, PyType_GenericNew}, {0, NULL},
};

static PyType_Spec model_spec = {
    .name = "dcp._dcp.Model",
    .basicsize = (int)sizeof(model_object_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = model_slots,
};

static PyObject *
config_check(PyObject *module, PyObject *mapping)
{
    (void)module;
    dcp_transformer1d_config_t config;
    if (bind_transformer1d_config(mapping, &config) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
config_tensors(PyObject *module, PyObject *mapping)
{
    (void)module;
    dcp_transformer1d_config_t config;
    if (bind_transformer1d_config(mapping, &config) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < dcp_model_tensor_count(&config); i++) {
        dcp_model_tensor_t tensor;
        dcp_model_tensor_get(&config, i, &tensor);
        PyObject *shape = tensor.dim_count == 2
                              ? Py_BuildValue("(LL)", (long long)tensor.shape[0],
                                              (long long)tensor.shape[1])
                              : Py_BuildValue("(L)", (long long)tensor.shape[0]);
        PyObject *item = shape != NULL
                             ? Py_BuildValue("(sNis)", tensor.name, shape,
                                             (int)tensor.group, tensor.group_name)
                             : NULL;
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *
config_initial(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *mapping;
    long long index, first, count;
    unsigned long long seed;
    dcp_transformer1d_config_t config;
    dcp_model_tensor_t tensor;
    if (!PyArg_ParseTuple(args, "OLKLL", &mapping, &index, &seed, &first, &count)
        || bind_transformer1d_config(mapping, &config) < 0) {
        return NULL;
    }
    dcp_status_t status = dcp_model_tensor_get(&config, index, &tensor);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    int64_t total = tensor.shape[0] * tensor.shape[1];
    if (first < 0 || count < 0 || first > total || count > total - first) {
        return bind_raise(
            DCP_FAIL(DCP_ERR_ARG,
                     "first %lld and count %lld must lie in the %lld elements of %s",
                     first, count, (long long)total, tensor.name));
    }
    npy_intp size = count;
    PyObject *array = PyArray_SimpleNew(1, &size, NPY_FLOAT32);
    if (array == NULL) {
        return NULL;
    }
    float *out = PyArray_DATA((PyArrayObject *)array);
    Py_BEGIN_ALLOW_THREADS dcp_model_init_run(&config, index, seed, first, count, out);
    Py_END_ALLOW_THREADS return array;
}

static PyObject *
config_activation_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *mapping;
    long long token_count;
    int thread_count;
    int32_t recompute[DCP_RECOMPUTE_KINDS] = {0};
    dcp_transformer1d_config_t config;
    if (!PyArg_ParseTuple(args, "OLi|(ii)", &mapping, &token_count, &thread_count,
                          &recompute[DCP_RECOMPUTE_LAYER],
                          &recompute[DCP_RECOMPUTE_MLP])
        || bind_transformer1d_config(mapping, &config) < 0) {
        return NULL;
    }
    if (token_count < 0 || thread_count < 1) {
        return bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                   "token_count %lld must not be negative, and "
                                   "thread_count %d must be positive",
                                   token_count, thread_count));
    }
    dcp_status_t status = dcp_transformer1d_check_recompute(&config, recompute);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    return PyLong_FromLongLong(
        dcp_model_pass_bytes(&config, token_count, recompute, thread_count));
}

static PyMethodDef config_functions[] = {
    {"transformer1d_check", config_check, METH_O,
     "transformer1d_check(config)\n--\n\nRaises where a field breaks a rule."},
    {"transformer1d_tensors", config_tensors, METH_O,
     "transformer1d_tensors(config)\n--\n\nA list of (name, shape, group, group name), "
     "in model order."},
    {"transformer1d_initial", config_initial, METH_VARARGS,
     "transformer1d_initial(config, index, seed, first, count)\n--\n\nInitial values "
     "of "
     "a run of elements of a tensor, float32 [count]."},
    {"transformer1d_activation_bytes", config_activation_bytes, METH_VARARGS,
     "transformer1d_activation_bytes(config, token_count, thread_count, recompute=(0, "
     "0))\n--\n\nBytes that a pass over so many tokens holds at most, beside weights "
     "and gradients. recompute: layers and MLPs."},
    {NULL, NULL, 0, NULL},
};

int
bind_model_register(PyObject *module)
{
    return bind_type_add(module, &model_spec, NULL) < 0
               ? -1
               : PyModule_AddFunctions(module, config_functions);
}
