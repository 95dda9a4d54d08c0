/* What the files that bind optimizers share. */
#ifndef DCP_BIND_OPTIMIZER_H
#define DCP_BIND_OPTIMIZER_H

#include "bind.h"

#include "dcp/optim.h"

/* One rule a tensor [tensor_count], from tuples of the fields of dcp_optimizer_rule_t
 * in their order; to be freed by PyMem_Free. NULL with an exception. */
dcp_optimizer_rule_t *bind_optimizer_rules(PyObject *sequence, int64_t tensor_count);

/* A list of (name, dtype, {tensor number: shape}); empty where optimizer is NULL. */
PyObject *bind_optimizer_states(const dcp_optimizer_t *optimizer, int64_t tensor_count);

/* What this rank holds of a state: a list of (tensor number, first element, array),
 * each array a view that keeps `owner` alive and counts in `views`. */
PyObject *bind_optimizer_state_runs(const dcp_optimizer_t *optimizer, PyObject *state,
                                    PyObject *owner, int32_t *views);

/* Called by bind_step_register. */
int bind_optimizer_register(PyObject *module);

#endif
