/* World's sums in few bits: float32 arrays, one segment a call. The reducer with its
 * memory stays with the world until another count of ranks a machine is asked for. */
#include "bind_reduce.h"

typedef struct call {
    PyArrayObject *x, *counts, *residual, *out; /* counts, residual: NULL for none */
    dcp_reduce_args_t args;
    int machine_ranks;
} call_t;

static void
release(call_t *call)
{
    Py_XDECREF(call->x);
    Py_XDECREF(call->counts);
    Py_XDECREF(call->residual);
    Py_XDECREF(call->out);
}

static int
check_size(PyArrayObject *array, int64_t wanted, const char *what)
{
    if (PyArray_SIZE(array) != wanted) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG, "%s has %lld elements, %lld are needed", what,
                            (long long)PyArray_SIZE(array), (long long)wanted));
        return -1;
    }
    return 0;
}

/* The sum of counts, one a rank, >= 0; own_p this rank's. -1 with an exception. */
static int64_t
check_counts(PyArrayObject *counts, const dcp_comm_t *comm, int64_t *own_p)
{
    if (PyArray_SIZE(counts) != dcp_comm_size(comm)) {
        bind_raise(DCP_FAIL(DCP_ERR_ARG,
                            "counts has %lld entries, but the world has %d ranks",
                            (long long)PyArray_SIZE(counts), (int)dcp_comm_size(comm)));
        return -1;
    }
    const int64_t *values = PyArray_DATA(counts);
    int64_t sum = 0;
    for (npy_intp r = 0; r < PyArray_SIZE(counts); r++) {
        if (values[r] < 0 || __builtin_add_overflow(sum, values[r], &sum)) {
            bind_raise(DCP_FAIL(DCP_ERR_ARG,
                                "counts[%d] = %lld must not be negative, nor overflow",
                                (int)r, (long long)values[r]));
            return -1;
        }
    }
    *own_p = values[dcp_comm_rank(comm)];
    return sum;
}

/* Fills the call; on failure -1 with an exception, and what was taken is in it. */
static int
parse(call_t *call, const dcp_comm_t *comm, PyObject *args)
{
    PyObject *x, *counts, *residual, *out;
    const char *precision;
    int hadamard, nearest;
    unsigned long long seed;
    long long step;
    if (!PyArg_ParseTuple(args, "OOsppOKLiO", &x, &counts, &precision, &hadamard,
                          &nearest, &residual, &seed, &step, &call->machine_ranks,
                          &out)) {
        return -1;
    }
    call->args.hadamard = hadamard;
    call->args.nearest = nearest;
    call->args.seed = seed;
    call->args.step = step;
    dcp_status_t status = dcp_precision_parse(precision, &call->args.precision);
    if (status != DCP_OK) {
        bind_raise(status);
        return -1;
    }
    call->x = bind_array(x, NPY_FLOAT32, -1, "x");
    if (call->x == NULL) {
        return -1;
    }
    int64_t total = PyArray_SIZE(call->x), own = total;
    if (counts != Py_None) {
        call->counts = bind_integers(counts, NPY_INT64, "counts");
        int64_t sum =
            call->counts != NULL ? check_counts(call->counts, comm, &own) : -1;
        if (sum < 0 || check_size(call->x, sum, "x") < 0) {
            return -1;
        }
    }
    if (residual != Py_None) {
        call->residual = bind_array_writable(residual, NPY_FLOAT32, -1, "residual");
        if (call->residual == NULL
            || check_size(call->residual, total, "residual") < 0) {
            return -1;
        }
    }
    npy_intp shape = (npy_intp)own;
    call->out = out == Py_None
                    ? (PyArrayObject *)PyArray_SimpleNew(1, &shape, NPY_FLOAT32)
                    : bind_array_writable(out, NPY_FLOAT32, -1, "out");
    return call->out == NULL ? -1 : check_size(call->out, own, "out");
}

/* The reducer of this count of ranks a machine; collective where it is made. */
static dcp_status_t
take_reducer(bind_reducer_t *self, dcp_comm_t *comm, int32_t machine_ranks,
             int32_t thread_count)
{
    if (self->pool == NULL) {
        DCP_TRY(dcp_pool_create(thread_count, &self->pool));
    }
    if (self->reducer != NULL && self->machine_ranks == machine_ranks) {
        return DCP_OK;
    }
    dcp_reducer_destroy(self->reducer);
    self->reducer = NULL;
    self->machine_ranks = machine_ranks;
    return dcp_reducer_create(comm, machine_ranks, &self->reducer);
}

static dcp_status_t
run(bind_reducer_t *self, dcp_comm_t *comm, call_t *call, int32_t thread_count,
    dcp_reduce_result_t *result)
{
    DCP_TRY(take_reducer(self, comm, call->machine_ranks, thread_count));
    const float *data = PyArray_DATA(call->x);
    float *residual = call->residual != NULL ? PyArray_DATA(call->residual) : NULL;
    float *out = PyArray_DATA(call->out);
    if (call->counts == NULL) {
        return dcp_reducer_allreduce(self->reducer, self->pool, data, residual, out,
                                     PyArray_SIZE(call->x), &call->args, result);
    }
    dcp_reduce_segment_t segment = {.data = data,
                                    .counts = PyArray_DATA(call->counts),
                                    .residual = residual,
                                    .out = out};
    call->args.segments = &segment;
    call->args.segment_count = 1;
    return dcp_reducer_reduce(self->reducer, self->pool, &call->args, result);
}

PyObject *
bind_reduce(bind_reducer_t *self, dcp_comm_t *comm, PyObject *args)
{
    call_t call = {.machine_ranks = 1};
    PyObject *answer = NULL;
    dcp_pool_t *pool = bind_pool(); /* for its size */
    if (pool == NULL || parse(&call, comm, args) < 0) {
        goto end;
    }
    int32_t thread_count = dcp_pool_size(pool);
    dcp_reduce_result_t result;
    dcp_status_t status;
    BIND_NOGIL(status, run(self, comm, &call, thread_count, &result));
    if (status != DCP_OK) {
        if (PyErr_Occurred() == NULL) { /* a signal handler's exception goes first */
            bind_raise(status);
        }
        goto end;
    }
    answer = Py_BuildValue("O{s:L,s:L,s:d,s:d,s:d,s:d}", (PyObject *)call.out,
                           "sent_bytes", (long long)result.sent_bytes, "received_bytes",
                           (long long)result.received_bytes, "codec_s",
                           (double)result.codec_ns * 1e-9, "move_s",
                           (double)result.move_ns * 1e-9, "squares", result.squares,
                           "error_squares", result.error_squares);
end:
    release(&call);
    return answer;
}

void
bind_reducer_destroy(bind_reducer_t *self)
{
    dcp_reducer_destroy(self->reducer);
    dcp_pool_destroy(self->pool);
    *self = (bind_reducer_t){0};
}
