/* The library never prints: what it wants to say goes through this hook (the binding
 * sends it to Python's logging as "dcp"). Without a hook it is dropped.
 */
#ifndef DCP_LOG_H
#define DCP_LOG_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_log_level {
    DCP_LOG_DEBUG = 10, /* the levels of Python's logging */
    DCP_LOG_INFO = 20,
    DCP_LOG_WARNING = 30,
} dcp_log_level_t;

typedef void (*dcp_log_func_t)(void *context, dcp_log_level_t level, const char *text);

void dcp_log_set_hook(dcp_log_func_t hook, void *context);

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void
dcp_log(dcp_log_level_t level, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
