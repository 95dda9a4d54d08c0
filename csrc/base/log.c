/* One hook for the process. */
#include "dcp/log.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static dcp_log_func_t current_hook;
static void *current_context;

void
dcp_log_set_hook(dcp_log_func_t hook, void *context)
{
    current_hook = hook;
    current_context = context;
}

void
dcp_log(dcp_log_level_t level, const char *format, ...)
{
    if (current_hook == NULL) {
        return;
    }
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    current_hook(current_context, level, text);
}
