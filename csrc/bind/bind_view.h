/* Arrays over memory of the core. */
#ifndef DCP_BIND_VIEW_H
#define DCP_BIND_VIEW_H

#include "bind.h"

/* The NumPy type of elements of the core. bf16 comes as its bits, uint16: NumPy has no
 * such type. */
int bind_type_num(dcp_dtype_t dtype);

/* An array over `data`, memory of `owner`, which it keeps alive; until the array and
 * all that look into it die, *views, a field of `owner`, is one more. NULL with an
 * exception. */
PyObject *bind_view(PyObject *owner, int32_t *views, void *data, int type_num,
                    int dim_count, npy_intp *shape, int writable);

/* The same, 1-D and writable: a run of a tensor that this rank holds. */
PyObject *bind_run_view(PyObject *owner, int32_t *views, void *data, int type_num,
                        int64_t count);

/* Item i of a new list becomes (tensor, first, view). Takes the view over, which may be
 * NULL with an exception. 0, or -1 with an exception. */
int bind_run_set(PyObject *list, int64_t i, int64_t tensor, int64_t first,
                 PyObject *view);

#endif
