/* What other files of bind/ need of the controller. */
#ifndef BIND_CONTROL_H
#define BIND_CONTROL_H

#include "bind.h"

#include "dcp/control.h"

typedef struct bind_control_arrays {
    dcp_precision_t precisions[DCP_PRECISION_COUNT];
    int32_t multiples[DCP_CONTROL_MULTIPLES];
} bind_control_arrays_t;

/* As dicts, new references. */
PyObject *bind_observation(const dcp_observation_t *observation);
PyObject *bind_decision(const dcp_decision_t *decision);
/* {"precision": name, "multiple": n}; 0, or -1 with an exception. */
int bind_arm(PyObject *mapping, dcp_arm_t *arm_p);
/* A sequence of names. */
int bind_precisions(PyObject *names, dcp_precision_t *precisions, int32_t *count_p);
/* Keywords of dcp._dcp.Controller. */
int bind_control_options(PyObject *args, PyObject *keywords,
                         bind_control_arrays_t *arrays, dcp_control_options_t *options);
/* bind_step.c: observes what a model's latest step showed, decides, and makes rank 0's
 * decision everybody's: (observation, decision, inputs). Collective. */
PyObject *bind_control_step(PyObject *controller, PyObject *sharded);
/* The controller of an object, borrowed. */
dcp_controller_t *bind_controller(PyObject *object);

#endif
