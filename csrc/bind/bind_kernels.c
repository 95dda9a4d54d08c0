/* dcp._dcp.kernel_run: runs one row-wise CPU operation on given fields, for tests and
 * benchmarks of the kernels. Private: the fields go into the argument struct as they
 * come, and sizes are not compared with the arrays, so that a test can pass anything.
 */
#include "bind.h"

#include "dcp/kernels.h"

#include <stddef.h>
#include <string.h>

typedef enum field_kind {
    FIELD_INT32,
    FIELD_INT64,
    FIELD_UINT64,
    FIELD_FLOAT,
    FIELD_DOUBLE,
    FIELD_POINTER, /* to an array of type_num, or NULL for None or where left out */
} field_kind_t;

typedef struct field {
    const char *name;
    field_kind_t kind;
    int type_num; /* of a pointer's array */
    size_t offset;
} field_t;

typedef dcp_status_t (*run_func_t)(dcp_pool_t *pool, const void *args);

typedef struct op {
    const char *name;
    run_func_t run;
    const field_t *fields; /* ends with name NULL */
} op_t;

enum { MAX_ARGS_BYTES = 256, MAX_ARRAYS = 16 };

#define FIELD(op, name, kind) \
    {#name, FIELD_##kind, 0, offsetof(dcp_##op##_args_t, name)}
#define ARRAY(op, name, type) \
    {#name, FIELD_POINTER, NPY_##type, offsetof(dcp_##op##_args_t, name)}

#define END {NULL, FIELD_INT32, 0, 0}

static const field_t norm_fields[] = {
    FIELD(norm, kind, INT32),
    FIELD(norm, rows, INT64),
    FIELD(norm, width, INT64),
    ARRAY(norm, x, FLOAT32),
    ARRAY(norm, weight, FLOAT32),
    ARRAY(norm, bias, FLOAT32),
    FIELD(norm, eps, FLOAT),
    ARRAY(norm, y, FLOAT32),
    ARRAY(norm, mean, FLOAT32),
    ARRAY(norm, rstd, FLOAT32),
    END,
};
static const field_t norm_backward_fields[] = {
    FIELD(norm_backward, kind, INT32),
    FIELD(norm_backward, rows, INT64),
    FIELD(norm_backward, width, INT64),
    ARRAY(norm_backward, dy, FLOAT32),
    ARRAY(norm_backward, x, FLOAT32),
    ARRAY(norm_backward, weight, FLOAT32),
    ARRAY(norm_backward, mean, FLOAT32),
    ARRAY(norm_backward, rstd, FLOAT32),
    ARRAY(norm_backward, add, FLOAT32),
    ARRAY(norm_backward, dx, FLOAT32),
    ARRAY(norm_backward, dweight, FLOAT32),
    ARRAY(norm_backward, dbias, FLOAT32),
    END,
};
static const field_t rope_fields[] = {
    FIELD(rope, rows, INT64),
    FIELD(rope, heads, INT64),
    FIELD(rope, head_dim, INT64),
    ARRAY(rope, x, FLOAT32),
    FIELD(rope, x_stride, INT64),
    ARRAY(rope, positions, INT32),
    ARRAY(rope, table, FLOAT32),
    FIELD(rope, inverse, INT32),
    END,
};
static const field_t swiglu_fields[] = {
    FIELD(swiglu, rows, INT64),        FIELD(swiglu, width, INT64),
    ARRAY(swiglu, gate, FLOAT32),      ARRAY(swiglu, up, FLOAT32),
    FIELD(swiglu, gate_stride, INT64), FIELD(swiglu, up_stride, INT64),
    ARRAY(swiglu, out, FLOAT32),       END,
};
static const field_t swiglu_backward_fields[] = {
    FIELD(swiglu_backward, rows, INT64),
    FIELD(swiglu_backward, width, INT64),
    ARRAY(swiglu_backward, dout, FLOAT32),
    ARRAY(swiglu_backward, gate, FLOAT32),
    ARRAY(swiglu_backward, up, FLOAT32),
    FIELD(swiglu_backward, gate_stride, INT64),
    FIELD(swiglu_backward, up_stride, INT64),
    ARRAY(swiglu_backward, dgate, FLOAT32),
    ARRAY(swiglu_backward, dup, FLOAT32),
    FIELD(swiglu_backward, dgate_stride, INT64),
    FIELD(swiglu_backward, dup_stride, INT64),
    ARRAY(swiglu_backward, out, FLOAT32),
    END,
};
static const field_t gelu_fields[] = {
    FIELD(gelu, kind, INT32),
    FIELD(gelu, count, INT64),
    ARRAY(gelu, x, FLOAT32),
    ARRAY(gelu, out, FLOAT32),
    END,
};
static const field_t gelu_backward_fields[] = {
    FIELD(gelu_backward, kind, INT32),   FIELD(gelu_backward, count, INT64),
    ARRAY(gelu_backward, dout, FLOAT32), ARRAY(gelu_backward, x, FLOAT32),
    ARRAY(gelu_backward, dx, FLOAT32),   END,
};
static const field_t embedding_fields[] = {
    FIELD(embedding, rows, INT64),
    FIELD(embedding, width, INT64),
    FIELD(embedding, vocab, INT64),
    ARRAY(embedding, tokens, INT32),
    ARRAY(embedding, weight, FLOAT32),
    ARRAY(embedding, out, FLOAT32),
    ARRAY(embedding, weight_bf16, UINT16),
    FIELD(embedding, round, INT32),
    END,
};
static const field_t embedding_backward_fields[] = {
    FIELD(embedding_backward, rows, INT64),
    FIELD(embedding_backward, width, INT64),
    FIELD(embedding_backward, vocab, INT64),
    ARRAY(embedding_backward, tokens, INT32),
    ARRAY(embedding_backward, dout, FLOAT32),
    ARRAY(embedding_backward, dweight, FLOAT32),
    END,
};
static const field_t cross_entropy_fields[] = {
    FIELD(cross_entropy, rows, INT64),     FIELD(cross_entropy, vocab, INT64),
    ARRAY(cross_entropy, logits, FLOAT32), FIELD(cross_entropy, logits_stride, INT64),
    ARRAY(cross_entropy, labels, INT32),   ARRAY(cross_entropy, weights, FLOAT32),
    FIELD(cross_entropy, scale, DOUBLE),   FIELD(cross_entropy, gradient, INT32),
    ARRAY(cross_entropy, loss_p, FLOAT64), END,
};
static const field_t dropout_fields[] = {
    FIELD(dropout, rows, INT64),    FIELD(dropout, width, INT64),
    ARRAY(dropout, x, FLOAT32),     ARRAY(dropout, add, FLOAT32),
    ARRAY(dropout, row_ids, INT64), FIELD(dropout, seed, UINT64),
    FIELD(dropout, site, UINT64),   FIELD(dropout, p, FLOAT),
    ARRAY(dropout, out, FLOAT32),   END,
};
static const field_t column_sum_fields[] = {
    FIELD(column_sum, rows, INT64),  FIELD(column_sum, width, INT64),
    ARRAY(column_sum, x, FLOAT32),   FIELD(column_sum, x_stride, INT64),
    ARRAY(column_sum, out, FLOAT32), END,
};
static const field_t add_fields[] = {
    FIELD(add, count, INT64),
    ARRAY(add, a, FLOAT32),
    ARRAY(add, b, FLOAT32),
    ARRAY(add, out, FLOAT32),
    END,
};
static const field_t zero_fields[] = {
    FIELD(zero, bytes, INT64),
    ARRAY(zero, x, UINT8),
    END,
};
static const field_t adamw_fields[] = {
    FIELD(adamw, count, INT64),      ARRAY(adamw, w, FLOAT32),
    ARRAY(adamw, m, FLOAT32),        ARRAY(adamw, v, FLOAT32),
    ARRAY(adamw, g, FLOAT32),        FIELD(adamw, lr, FLOAT),
    FIELD(adamw, beta1, FLOAT),      FIELD(adamw, beta2, FLOAT),
    FIELD(adamw, eps, FLOAT),        FIELD(adamw, decay, FLOAT),
    FIELD(adamw, bias1, FLOAT),      FIELD(adamw, bias2, FLOAT),
    FIELD(adamw, grad_scale, FLOAT), END,
};
static const field_t adamw8bit_fields[] = {
    FIELD(adamw8bit, rows, INT64),
    FIELD(adamw8bit, width, INT64),
    ARRAY(adamw8bit, w, FLOAT32),
    ARRAY(adamw8bit, m, UINT8),
    ARRAY(adamw8bit, v, UINT8),
    ARRAY(adamw8bit, m_scale, FLOAT32),
    ARRAY(adamw8bit, v_scale, FLOAT32),
    ARRAY(adamw8bit, g, FLOAT32),
    FIELD(adamw8bit, lr, FLOAT),
    FIELD(adamw8bit, beta1, FLOAT),
    FIELD(adamw8bit, beta2, FLOAT),
    FIELD(adamw8bit, eps, FLOAT),
    FIELD(adamw8bit, decay, FLOAT),
    FIELD(adamw8bit, bias1, FLOAT),
    FIELD(adamw8bit, bias2, FLOAT),
    FIELD(adamw8bit, grad_scale, FLOAT),
    END,
};
static const field_t cast_fields[] = {
    FIELD(cast, count, INT64), ARRAY(cast, x, UINT8),  ARRAY(cast, out, UINT8),
    FIELD(cast, from, INT32),  FIELD(cast, to, INT32), END,
};
static const field_t row_squares_fields[] = {
    FIELD(row_squares, rows, INT64),
    FIELD(row_squares, width, INT64),
    ARRAY(row_squares, x, FLOAT32),
    ARRAY(row_squares, out, FLOAT64),
    END,
};

static const field_t quantise_fields[] = {
    FIELD(quantise, count, INT64),
    ARRAY(quantise, x, FLOAT32),
    ARRAY(quantise, residual, FLOAT32),
    ARRAY(quantise, codes, UINT8),
    FIELD(quantise, precision, INT32),
    FIELD(quantise, hadamard, INT32),
    FIELD(quantise, nearest, INT32),
    FIELD(quantise, seed, UINT64),
    FIELD(quantise, stream, UINT64),
    FIELD(quantise, first, INT64),
    ARRAY(quantise, weights, FLOAT32),
    ARRAY(quantise, squares, FLOAT64),
    END,
};
static const field_t dequantise_fields[] = {
    FIELD(dequantise, count, INT64),      ARRAY(dequantise, codes, UINT8),
    FIELD(dequantise, precision, INT32),  FIELD(dequantise, hadamard, INT32),
    FIELD(dequantise, accumulate, INT32), FIELD(dequantise, seed, UINT64),
    ARRAY(dequantise, out, FLOAT32),      END,
};
static const field_t sketch_fields[] = {
    FIELD(sketch, count, INT64),
    ARRAY(sketch, x, FLOAT32),
    ARRAY(sketch, weights, FLOAT32),
    FIELD(sketch, seed, UINT64),
    FIELD(sketch, first, INT64),
    ARRAY(sketch, sums, FLOAT64),
    END,
};

#define ROWWISE_OP_MAP(X) \
    X(norm)               \
    X(norm_backward)      \
    X(rope)               \
    X(swiglu)             \
    X(swiglu_backward)    \
    X(gelu)               \
    X(gelu_backward)      \
    X(embedding)          \
    X(embedding_backward) \
    X(cross_entropy)      \
    X(dropout)            \
    X(column_sum)         \
    X(add)                \
    X(cast)               \
    X(zero)               \
    X(adamw)              \
    X(adamw8bit)          \
    X(row_squares)        \
    X(quantise)           \
    X(dequantise)         \
    X(sketch)

#define X(op)                                                         \
    _Static_assert(sizeof(dcp_##op##_args_t) <= MAX_ARGS_BYTES, #op); \
    static dcp_status_t run_##op(dcp_pool_t *pool, const void *args)  \
    {                                                                 \
        return dcp_cpu_##op(pool, args);                              \
    }
ROWWISE_OP_MAP(X)
#undef X

static const op_t ops[] = {
#define X(op) {#op, run_##op, op##_fields},
    ROWWISE_OP_MAP(X)
#undef X
};

/* Writes one field; an array is kept in `arrays` until the call is over. */
static int
set_field(const field_t *field, PyObject *value, char *args,
          PyArrayObject *arrays[MAX_ARRAYS], int *array_count)
{
    void *at = args + field->offset;
    switch (field->kind) {
    case FIELD_INT32: {
        int32_t number = (int32_t)PyLong_AsLong(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case FIELD_INT64: {
        int64_t number = PyLong_AsLongLong(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case FIELD_UINT64: {
        uint64_t number = PyLong_AsUnsignedLongLong(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case FIELD_FLOAT: {
        float number = (float)PyFloat_AsDouble(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case FIELD_DOUBLE: {
        double number = PyFloat_AsDouble(value);
        memcpy(at, &number, sizeof number);
        break;
    }
    case FIELD_POINTER: {
        if (value == Py_None) {
            break;
        }
        PyArrayObject *array = bind_array(value, field->type_num, -1, field->name);
        if (array == NULL) {
            return -1;
        }
        arrays[(*array_count)++] = array;
        void *data = PyArray_DATA(array);
        memcpy(at, &data, sizeof data);
        break;
    }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static const op_t *
find_op(const char *name)
{
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        if (strcmp(ops[i].name, name) == 0) {
            return &ops[i];
        }
    }
    PyErr_Format(PyExc_KeyError, "no row-wise operation %s", name);
    return NULL;
}

static const field_t *
find_field(const op_t *op, PyObject *key)
{
    const char *name = PyUnicode_AsUTF8(key);
    if (name == NULL) {
        return NULL;
    }
    for (const field_t *field = op->fields; field->name != NULL; field++) {
        if (strcmp(field->name, name) == 0) {
            return field;
        }
    }
    PyErr_Format(PyExc_KeyError, "%s has no field %s", op->name, name);
    return NULL;
}

PyDoc_STRVAR(kernel_run_doc,
             "kernel_run(op, fields)\n--\n\nRuns one row-wise CPU operation on the "
             "fields of its argument struct (csrc/include/dcp/ops.h). Private, for "
             "tests: sizes are not compared with the arrays.");

static PyObject *
kernel_run(PyObject *module, PyObject *positional)
{
    (void)module;
    const char *name;
    PyObject *fields;
    if (!PyArg_ParseTuple(positional, "sO!", &name, &PyDict_Type, &fields)) {
        return NULL;
    }
    const op_t *op = find_op(name);
    dcp_pool_t *pool = bind_pool();
    if (op == NULL || pool == NULL) {
        return NULL;
    }
    _Alignas(16) char args[MAX_ARGS_BYTES] = {0};
    PyArrayObject *arrays[MAX_ARRAYS];
    int array_count = 0;
    Py_ssize_t position = 0;
    PyObject *key, *value, *result = NULL;
    while (PyDict_Next(fields, &position, &key, &value)) {
        const field_t *field = find_field(op, key);
        if (field == NULL || set_field(field, value, args, arrays, &array_count) < 0) {
            goto fail;
        }
    }
    dcp_status_t status;
    BIND_COMPUTE(status, op->run(pool, args));
    result = status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
fail:
    while (array_count > 0) {
        Py_DECREF(arrays[--array_count]);
    }
    return result;
}

static PyMethodDef kernel_methods[] = {
    {"kernel_run", kernel_run, METH_VARARGS, kernel_run_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_kernels_register(PyObject *module)
{
    return PyModule_AddFunctions(module, kernel_methods);
}
