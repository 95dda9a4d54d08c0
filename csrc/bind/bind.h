/* What every file of bind/ shares. Only files of this folder include Python.h.
 *
 * A method is: parse, convert, release the GIL, one core call, take the GIL, raise or
 * wrap. No algorithm lives here. Each bind_<domain>.c adds its types and functions to
 * the module in bind_<domain>_register.
 */
#ifndef DCP_BIND_H
#define DCP_BIND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL dcp_array_api
#ifndef BIND_IMPORTS_ARRAY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "dcp/dtype.h"
#include "dcp/status.h"
#include "dcp/threads.h"

#include <stdint.h>

/* Raises the class of `status` (dcp.ArgumentError, ...) with this thread's message.
 * Always returns NULL. Call with the GIL, on the thread where the core call failed. */
PyObject *bind_raise(dcp_status_t status);

/* Runs `call` without the GIL. */
#define BIND_NOGIL(status, call)                 \
    do {                                         \
        Py_BEGIN_ALLOW_THREADS(status) = (call); \
        Py_END_ALLOW_THREADS                     \
    } while (0)

/* The same for a call that computes on the process's pool: one at a time in a process,
 * since workers and their scratch serve one job. Not for calls that wait for peers. */
#define BIND_COMPUTE(status, call)                   \
    do {                                             \
        Py_BEGIN_ALLOW_THREADS bind_compute_begin(); \
        (status) = (call);                           \
        bind_compute_end();                          \
        Py_END_ALLOW_THREADS                         \
    } while (0)
void bind_compute_begin(void);
void bind_compute_end(void);

/* The process's thread pool: cores / local ranks threads, or DCP_NUM_THREADS; made at
 * first use. Its size follows bind_pool_resize. NULL with an exception set on failure.
 */
dcp_pool_t *bind_pool(void);

/* The same for an object that keeps the pointer: while one is held, the pool cannot
 * change. */
dcp_pool_t *bind_pool_hold(void);
void bind_pool_drop(void);

/* A C-contiguous, aligned, native array of this exact dtype (`type_num`) and
 * `dim_count` dimensions (-1: any), as a new reference; reads only, so read-only arrays
 * and memory maps are welcome; never converts floats. Another dtype, byte order or
 * layout, or an object on a device, is a dcp.DTypeError that names `what`, what came
 * and what is wanted. */
PyArrayObject *bind_array(PyObject *object, int type_num, int dim_count,
                          const char *what);

/* The same for arrays that are written: read-only ones are a dcp.ArgumentError. */
PyArrayObject *bind_array_writable(PyObject *object, int type_num, int dim_count,
                                   const char *what);

/* `compute` of a product by name: "float32" or "bfloat16"; else a dcp.ArgumentError. 0,
 * or -1 with an exception. */
int bind_compute(const char *name, dcp_dtype_t *compute_p);

/* Integers of any width, byte order, a list, a range: as a new contiguous 1-D int64 (or
 * int32) array; floats and bools are a dcp.DTypeError, values that do not fit a
 * dcp.ArgumentError that names the value. */
PyArrayObject *bind_integers(PyObject *object, int type_num, const char *what);

/* The communicator of a dcp._dcp.World, borrowed; NULL with an exception set where the
 * object is none or is closed. */
struct dcp_comm;
struct dcp_comm *bind_world_comm(PyObject *world);
/* Where a world keeps it, for what wraps it; NULL with an exception as above. */
struct dcp_comm **bind_world_comm_slot(PyObject *world);

/* A new dcp._dcp.Window of a world of `size` ranks; takes the window over, also when it
 * fails. */
struct dcp_window;
PyObject *bind_window_new(struct dcp_window *window, int32_t size);
/* The window of such an object, made by `size` ranks, borrowed; NULL with an exception
 * where it is none. */
const struct dcp_window *bind_window_of(PyObject *window, int32_t size);

/* Reads a mapping of dcp_transformer1d_config_t's fields (Hugging Face names; every key
 * needed, no other allowed) and checks it. 0, or -1 with an exception. */
struct dcp_transformer1d_config;
int bind_transformer1d_config(PyObject *mapping,
                              struct dcp_transformer1d_config *config_p);

/* Adds a type to the module under the last part of its name. type_p: NULL, or where a
 * reference goes that is kept for the life of the process. 0, or -1 with an exception.
 */
int bind_type_add(PyObject *module, PyType_Spec *spec, PyTypeObject **type_p);

/* Each adds its part to the module; 0, or -1 with an exception. */
int bind_world_register(PyObject *module);
int bind_window_register(PyObject *module); /* called by bind_world_register */
int bind_gemm_register(PyObject *module);
int bind_kernels_register(PyObject *module);
int bind_ops_register(PyObject *module);
int bind_quantise_register(PyObject *module);
int bind_model_register(PyObject *module);
int bind_layout_register(PyObject *module);
int bind_plan_register(PyObject *module);
int bind_sim_register(PyObject *module);
int bind_step_register(PyObject *module);
int bind_dbuffer_register(PyObject *module);
/* called by bind_dbuffer_register */
int bind_shard_optimizer_register(PyObject *module);
int bind_placement_register(PyObject *module);
int bind_link_register(PyObject *module);
int bind_control_register(PyObject *module);
int bind_time_to_loss_register(PyObject *module);
int bind_network_register(PyObject *module);

#endif
