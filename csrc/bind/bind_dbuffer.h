/* What the files that bind buffers share. */
#ifndef DCP_BIND_DBUFFER_H
#define DCP_BIND_DBUFFER_H

#include "bind.h"

#include "dcp/dbuffer.h"

typedef struct layout_object {
    PyObject_HEAD dcp_dbuffer_layout_t *layout; /* owned */
    int32_t rank_count;
    int64_t tensor_count;
} layout_object_t;

typedef struct buffer_object {
    PyObject_HEAD dcp_dbuffer_t *buffer; /* owned; NULL once closed */
    PyObject *layout, *world;            /* kept alive */
    PyObject *replicas;                  /* kept alive; NULL: none */
    PyObject *source;                    /* kept alive; what the order gathers from */
    dcp_pool_t *pool;                    /* the process's, borrowed */
    int32_t views;                       /* arrays that look into the memory */
} buffer_object_t;

/* An open DBuffer, borrowed, or NULL with an exception that names `what`. */
buffer_object_t *bind_buffer(PyObject *object, const char *what);

/* The layout of a DBufferLayout, borrowed, or NULL with an exception. */
dcp_dbuffer_layout_t *bind_dbuffer_layout(PyObject *object);
/* Called by bind_dbuffer_register. */
int bind_dbuffer_layout_register(PyObject *module);

#endif
