/* Placeholder of the skeleton: replaced by the part that owns it. */
#include "bind.h"

int
bind_plan_register(PyObject *module)
{
    (void)module;
    return 0;
}
