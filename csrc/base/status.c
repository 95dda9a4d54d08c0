/* Thread-local message of the last failure. A message longer than the buffer is cut:
 * the argument, its value and the rule stand first in every message, so what is lost is
 * the tail. */
#include "dcp/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1024];

const char *
dcp_status_text(dcp_status_t status)
{
    switch (status) {
#define X(code, value, text, py_class, py_base) \
    case DCP_##code:                            \
        return text;
        DCP_STATUS_MAP(X)
#undef X
    }
    return "unknown status";
}

const char *
dcp_last_error(void)
{
    return last_error;
}

void
dcp_set_last_error(const char *text)
{
    snprintf(last_error, sizeof last_error, "%s", text);
}

dcp_status_t
dcp_fail_(dcp_status_t status, const char *format, ...)
{
    /* Arguments may point into last_error (a message that wraps another): format aside
     * first. */
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    return status;
}
