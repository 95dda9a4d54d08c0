/* The module dcp._dcp: exception classes from the status map, the process's thread
 * pool, and array conversion. One interpreter only: the pool and the exception classes
 * are process-wide (sub-interpreters are refused). */
#define BIND_IMPORTS_ARRAY
#include "bind.h"

#include "dcp/alloc.h"
#include "dcp/isa.h"
#include "dcp/kernels.h"
#include "dcp/log.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { STATUS_SLOTS = 32, MAX_THREADS = 4096 };

static PyObject *error_base;                  /* dcp.Error */
static PyObject *error_classes[STATUS_SLOTS]; /* by -status */
static dcp_pool_t *process_pool;
static int32_t process_pool_size;  /* wanted; 0: by default_thread_count */
static int32_t process_pool_users; /* objects that keep a pointer to it */

PyObject *
bind_raise(dcp_status_t status)
{
    int slot = -(int)status;
    PyObject *type = slot > 0 && slot < STATUS_SLOTS ? error_classes[slot] : NULL;
    const char *message = dcp_last_error();
    PyErr_SetString(type != NULL ? type : PyExc_SystemError,
                    message[0] != '\0' ? message : dcp_status_text(status));
    return NULL;
}

static int
add_class(PyObject *module, int slot, const char *name, const char *text,
          PyObject *builtin)
{
    char full[64], doc[160];
    snprintf(full, sizeof full, "dcp.%s", name);
    snprintf(doc, sizeof doc, "Raised for: %s. A kind of %s.", text,
             ((PyTypeObject *)builtin)->tp_name);
    PyObject *bases = PyTuple_Pack(2, error_base, builtin);
    if (bases == NULL) {
        return -1;
    }
    PyObject *type = PyErr_NewExceptionWithDoc(full, doc, bases, NULL);
    Py_DECREF(bases);
    if (type == NULL) {
        return -1;
    }
    error_classes[slot] = Py_NewRef(type);
    int result = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return result;
}

static int
add_classes(PyObject *module)
{
    error_base = PyErr_NewExceptionWithDoc(
        "dcp.Error", "Base of every error that dcp raises.", PyExc_Exception, NULL);
    if (error_base == NULL || PyModule_AddObjectRef(module, "Error", error_base) < 0) {
        return -1;
    }
#define X(code, value, text, py_class, py_base)                                 \
    if ((value) != 0                                                            \
        && add_class(module, -(value), #py_class, text, PyExc_##py_base) < 0) { \
        return -1;                                                              \
    }
    DCP_STATUS_MAP(X)
#undef X
    return 0;
}

static void
log_to_python(void *context, dcp_log_level_t level, const char *text)
{
    (void)context;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *logger =
        logging != NULL ? PyObject_CallMethod(logging, "getLogger", "s", "dcp") : NULL;
    PyObject *result = logger != NULL ? PyObject_CallMethod(logger, "log", "iss",
                                                            (int)level, "%s", text)
                                      : NULL;
    Py_XDECREF(result);
    Py_XDECREF(logger);
    Py_XDECREF(logging);
    PyErr_Clear(); /* a log line must not turn into an exception of whatever runs */
    PyGILState_Release(gil);
}

/* Threads by DCP_NUM_THREADS, else one a core; -1 with an exception where the variable
 * is not a count. */
static int32_t
default_thread_count(void)
{
    const char *text = getenv("DCP_NUM_THREADS");
    if (text == NULL || text[0] == '\0') {
        return dcp_core_count();
    }
    char *end;
    long count = strtol(text, &end, 10);
    if (*end != '\0' || count < 1 || count > MAX_THREADS) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "DCP_NUM_THREADS \"%s\" must be a number in 1..%d", text,
                            (int)MAX_THREADS));
        return -1;
    }
    return (int32_t)count;
}

dcp_pool_t *
bind_pool(void)
{
    if (process_pool == NULL) {
        int32_t size =
            process_pool_size > 0 ? process_pool_size : default_thread_count();
        if (size < 0) {
            return NULL;
        }
        dcp_status_t status = dcp_pool_create(size, &process_pool);
        if (status != DCP_OK) {
            bind_raise(status);
            return NULL;
        }
    }
    return process_pool;
}

static pthread_mutex_t compute_lock = PTHREAD_MUTEX_INITIALIZER;

void
bind_compute_begin(void)
{
    pthread_mutex_lock(&compute_lock);
}

void
bind_compute_end(void)
{
    pthread_mutex_unlock(&compute_lock);
}

dcp_pool_t *
bind_pool_hold(void)
{
    dcp_pool_t *pool = bind_pool();
    process_pool_users += pool != NULL;
    return pool;
}

void
bind_pool_drop(void)
{
    process_pool_users--;
}

static PyObject *
raise_type(const char *what, PyObject *object, int type_num, int dim_count)
{
    PyArray_Descr *wanted = PyArray_DescrFromType(type_num);
    char dims[32] = "";
    if (dim_count >= 0) {
        snprintf(dims, sizeof dims, "%d-D ", dim_count);
    }
    if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        PyErr_Format(error_classes[-DCP_ERR_TYPE],
                     "%s must be a C-contiguous %s%R array, got a %d-D %s%R array",
                     what, dims, wanted, PyArray_NDIM(array),
                     PyArray_IS_C_CONTIGUOUS(array) ? "" : "non-contiguous ",
                     (PyObject *)PyArray_DESCR(array));
    } else if (PyObject_HasAttrString(object, "__cuda_array_interface__")) {
        PyErr_Format(
            error_classes[-DCP_ERR_TYPE],
            "%s lies on a CUDA device, and this call works on the CPU: copy it first",
            what);
    } else {
        PyErr_Format(error_classes[-DCP_ERR_TYPE],
                     "%s must be a %s%R array, got %.100s", what, dims, wanted,
                     Py_TYPE(object)->tp_name);
    }
    Py_XDECREF(wanted);
    return NULL;
}

PyArrayObject *
bind_array(PyObject *object, int type_num, int dim_count, const char *what)
{
    PyObject *array = NULL;
    if (PyArray_Check(object)) {
        array = Py_NewRef(object);
    } else if (PyObject_HasAttrString(object, "__cuda_array_interface__")) {
        return (PyArrayObject *)raise_type(what, object, type_num, dim_count);
    } else if (PyObject_CheckBuffer(object)
               || PyObject_HasAttrString(object, "__array__")) {
        array = PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
        if (array == NULL) {
            return NULL;
        }
    } else if (PyObject_HasAttrString(object, "__dlpack__")) {
        PyObject *numpy = PyImport_ImportModule("numpy");
        array = numpy != NULL ? PyObject_CallMethod(numpy, "from_dlpack", "O", object)
                              : NULL;
        Py_XDECREF(numpy);
        if (array == NULL) {
            return NULL;
        }
    } else {
        return (PyArrayObject *)raise_type(what, object, type_num, dim_count);
    }
    PyArrayObject *result = (PyArrayObject *)array;
    if (!PyArray_EquivTypenums(PyArray_TYPE(result), type_num)
        || !PyArray_ISNOTSWAPPED(result) || !PyArray_IS_C_CONTIGUOUS(result)
        || !PyArray_ISALIGNED(result)
        || (dim_count >= 0 && PyArray_NDIM(result) != dim_count)) {
        raise_type(what, array, type_num, dim_count);
        Py_DECREF(array);
        return NULL;
    }
    return result;
}

PyArrayObject *
bind_array_writable(PyObject *object, int type_num, int dim_count, const char *what)
{
    PyArrayObject *array = bind_array(object, type_num, dim_count, what);
    if (array != NULL && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(error_classes[-DCP_ERR_ARG],
                     "%s is written, but the array is read-only", what);
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

PyArrayObject *
bind_integers(PyObject *object, int type_num, const char *what)
{
    PyObject *any = PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    if (any == NULL) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)any;
    if (PyArray_NDIM(array) != 1) {
        PyErr_Format(error_classes[-DCP_ERR_ARG], "%s must be 1-D, got %d dimensions",
                     what, PyArray_NDIM(array));
        Py_DECREF(any);
        return NULL;
    }
    if (PyArray_SIZE(array) > 0 && !PyArray_ISINTEGER(array)) {
        PyErr_Format(error_classes[-DCP_ERR_TYPE], "%s must be integers, got %R", what,
                     (PyObject *)PyArray_DESCR(array));
        Py_DECREF(any);
        return NULL;
    }
    npy_intp count = PyArray_SIZE(array);
    PyObject *result = PyArray_SimpleNew(1, &count, type_num);
    /* through Python's integers only where a value could be lost: unsigned 64-bit to
     * signed, 64 to 32 bits */
    PyObject *wide = result != NULL ? PyArray_Cast(array, NPY_INT64) : NULL;
    if (wide == NULL) {
        Py_XDECREF(result);
        Py_DECREF(any);
        return NULL;
    }
    const int64_t *values = PyArray_DATA((PyArrayObject *)wide);
    int is_u64 = count > 0 && PyArray_ISUNSIGNED(array) && PyArray_ITEMSIZE(array) == 8;
    for (npy_intp i = 0; i < count; i++) {
        int lost = (is_u64 && values[i] < 0)
                   || (type_num == NPY_INT32
                       && (values[i] > INT32_MAX || values[i] < INT32_MIN));
        if (lost) {
            PyObject *index = PyLong_FromSsize_t(i);
            PyObject *value = index != NULL ? PyObject_GetItem(any, index) : NULL;
            PyErr_Format(error_classes[-DCP_ERR_ARG], "%s[%zd] = %S does not fit %s",
                         what, (Py_ssize_t)i, value,
                         type_num == NPY_INT32 ? "int32" : "int64");
            Py_XDECREF(index);
            Py_XDECREF(value);
            Py_DECREF(wide);
            Py_DECREF(result);
            Py_DECREF(any);
            return NULL;
        }
        if (type_num == NPY_INT32) {
            ((int32_t *)PyArray_DATA((PyArrayObject *)result))[i] = (int32_t)values[i];
        } else {
            ((int64_t *)PyArray_DATA((PyArrayObject *)result))[i] = values[i];
        }
    }
    Py_DECREF(wide);
    Py_DECREF(any);
    return (PyArrayObject *)result;
}

PyDoc_STRVAR(
    set_num_threads_doc,
    "set_num_threads(count)\n--\n\nSize of this process's thread pool from now on.");

static PyObject *
module_set_num_threads(PyObject *module, PyObject *argument)
{
    (void)module;
    long count = PyLong_AsLong(argument);
    if (count == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (count < 1 || count > 4096) {
        dcp_status_t status =
            DCP_FAIL(DCP_ERR_ARG, "count %ld must lie in 1..4096", count);
        return bind_raise(status);
    }
    if (process_pool != NULL && dcp_pool_size(process_pool) != (int32_t)count) {
        if (process_pool_users > 0) {
            dcp_status_t status = DCP_FAIL(
                DCP_ERR_STATE,
                "the thread pool is in use by %d models or calls: close them before "
                "another thread count",
                (int)process_pool_users);
            return bind_raise(status);
        }
        dcp_pool_destroy(process_pool);
        process_pool = NULL;
    }
    process_pool_size = (int32_t)count;
    Py_RETURN_NONE;
}

static PyObject *
module_set_isa(PyObject *module, PyObject *argument)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8(argument);
    if (name == NULL) {
        return NULL;
    }
    dcp_status_t status = dcp_isa_set(name);
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    Py_RETURN_NONE;
}

static PyObject *
module_cpu_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *isas = PyList_New(0);
    for (int i = 0; isas != NULL && i < DCP_ISA_COUNT; i++) {
        if (dcp_isa_available((dcp_isa_t)i)) {
            PyObject *name = PyUnicode_FromString(dcp_isa_name((dcp_isa_t)i));
            if (name == NULL || PyList_Append(isas, name) < 0) {
                Py_CLEAR(isas);
            }
            Py_XDECREF(name);
        }
    }
    if (isas == NULL) {
        return NULL;
    }
    return Py_BuildValue("{s:i,s:s,s:N,s:s}", "cores", (int)dcp_core_count(), "isa",
                         dcp_isa_name(dcp_isa_current()), "isas", isas, "blas",
                         dcp_blas_name());
}

static PyObject *
module_memory(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return Py_BuildValue("{s:L,s:L}", "held", (long long)dcp_alloc_held_bytes(), "peak",
                         (long long)dcp_alloc_peak_bytes());
}

static PyObject *
module_set_memory_cap(PyObject *module, PyObject *argument)
{
    (void)module;
    long long bytes = PyLong_AsLongLong(argument);
    if (bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    dcp_alloc_set_cap(bytes);
    Py_RETURN_NONE;
}

static PyObject *
module_account_memory(PyObject *module, PyObject *argument)
{
    (void)module;
    long long bytes = PyLong_AsLongLong(argument);
    if (bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    dcp_status_t status = dcp_alloc_account(bytes, "buffer of Python's");
    if (status != DCP_OK) {
        return bind_raise(status);
    }
    Py_RETURN_NONE;
}

int
bind_type_add(PyObject *module, PyType_Spec *spec, PyTypeObject **type_p)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    if (type_p != NULL && result == 0) {
        *type_p = (PyTypeObject *)type;
    } else {
        Py_DECREF(type);
    }
    return result;
}

static PyMethodDef module_methods[] = {
    {"set_num_threads", module_set_num_threads, METH_O, set_num_threads_doc},
    {"set_isa", module_set_isa, METH_O,
     "set_isa(name)\n--\n\nInstruction set of the CPU kernels: portable, avx2 or "
     "avx512."},
    {"cpu_info", module_cpu_info, METH_NOARGS,
     "cpu_info()\n--\n\nCores, instruction sets and BLAS of this process."},
    {"memory", module_memory, METH_NOARGS,
     "memory()\n--\n\nBytes that the core holds now and held at most."},
    {"set_memory_cap", module_set_memory_cap, METH_O,
     "set_memory_cap(bytes)\n--\n\nMost bytes that the core may hold in this process; "
     "0: no cap."},
    {"account_memory", module_account_memory, METH_O,
     "account_memory(bytes)\n--\n\nCount bytes that Python allocated as held by the "
     "core, under its cap; negative to release."},
    {NULL, NULL, 0, NULL},
};

static int
module_exec(PyObject *module)
{
    import_array1(-1);
    if (add_classes(module) < 0) {
        return -1;
    }
    dcp_log_set_hook(log_to_python, NULL);
    const char *isa = getenv("DCP_ISA");
    if (isa != NULL && isa[0] != '\0') {
        dcp_status_t status = dcp_isa_set(isa);
        if (status != DCP_OK) {
            bind_raise(status);
            return -1;
        }
    }
    if (bind_world_register(module) < 0 || bind_gemm_register(module) < 0
        || bind_kernels_register(module) < 0 || bind_ops_register(module) < 0
        || bind_quantise_register(module) < 0 || bind_model_register(module) < 0
        || bind_layout_register(module) < 0 || bind_plan_register(module) < 0
        || bind_sim_register(module) < 0 || bind_step_register(module) < 0
        || bind_placement_register(module) < 0 || bind_dbuffer_register(module) < 0
        || bind_link_register(module) < 0 || bind_control_register(module) < 0
        || bind_time_to_loss_register(module) < 0
        || bind_network_register(module) < 0) {
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, .m_name = "dcp._dcp",        .m_doc = "The C core of dcp.",
    .m_size = 0,           .m_methods = module_methods, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__dcp(void); /* the prototype that -Wmissing-prototypes wants */

PyMODINIT_FUNC
PyInit__dcp(void)
{
    return PyModuleDef_Init(&module_def);
}
