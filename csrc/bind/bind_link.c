/* Puts a world on an emulated link that the network simulator answers for. */
#include "bind.h"

#include "dcp/clock.h"
#include "dcp/comm.h"
#include "dcp/link_model.h"

/* Collective: all ranks count time from rank 0's now. */
static dcp_status_t
emulate(dcp_comm_t **comm_p, dcp_link_options_t *options)
{
    dcp_comm_t *inner = *comm_p;
    dcp_link_ops_t link;
    options->rank_count = dcp_comm_size(inner);
    options->epoch_ns = dcp_clock_ns();
    DCP_TRY(dcp_comm_broadcast(inner, &options->epoch_ns, 1, DCP_I64, 0));
    DCP_TRY(dcp_link_model_create(options, &link));
    dcp_status_t status = dcp_comm_create_emulated(inner, &link, comm_p);
    if (status != DCP_OK) {
        link.destroy(link.context);
    }
    return status;
}

PyDoc_STRVAR(
    emulate_link_doc,
    "emulate_link(world, *, rate, latency_s, machine_ranks, background, dwell_s, "
    "duty, period_s, seed)\n--\n\nCollective: from now on data between the "
    "ranks takes as long as this link says.");

static PyObject *
module_emulate_link(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"world",      "rate",    "latency_s", "machine_ranks",
                            "background", "dwell_s", "duty",      "period_s",
                            "seed",       NULL};
    PyObject *world;
    dcp_link_options_t options = {0};
    int machine_ranks, background;
    unsigned long long seed;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O$ddiidddK", names, &world,
                                     &options.rate, &options.latency_s, &machine_ranks,
                                     &background, &options.dwell_s, &options.duty,
                                     &options.period_s, &seed)) {
        return NULL;
    }
    options.machine_ranks = machine_ranks;
    options.background = background;
    options.seed = seed;
    dcp_comm_t **comm_p = bind_world_comm_slot(world);
    if (comm_p == NULL) {
        return NULL;
    }
    dcp_status_t status;
    BIND_NOGIL(status, emulate(comm_p, &options));
    return status == DCP_OK ? Py_NewRef(Py_None) : bind_raise(status);
}

static PyMethodDef functions[] = {
    {"emulate_link", (PyCFunction)(void (*)(void))module_emulate_link,
     METH_VARARGS | METH_KEYWORDS, emulate_link_doc},
    {NULL, NULL, 0, NULL},
};

int
bind_link_register(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
