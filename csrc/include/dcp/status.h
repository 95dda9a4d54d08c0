/* Status codes, and the message of the last failure on this thread.
 *
 * Every fallible function returns dcp_status_t. The first function that detects a fault
 * writes the message (DCP_FAIL: argument, its value, the rule); callers only pass the
 * code on (DCP_TRY). Outputs are written only on DCP_OK.
 */
#ifndef DCP_STATUS_H
#define DCP_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(code, value, text, Python class, Python built-in base). The binding makes one
 * exception class per distinct Python class; each derives from dcp.Error and the
 * built-in. */
#define DCP_STATUS_MAP(X)                                                           \
    X(OK, 0, "ok", Error, Exception)                                                \
    X(ERR_ARG, -1, "invalid argument", ArgumentError, ValueError)                   \
    X(ERR_TYPE, -2, "wrong type", DTypeError, TypeError)                            \
    X(ERR_NO_MEM, -3, "out of memory", OutOfMemoryError, MemoryError)               \
    X(ERR_STATE, -4, "call not allowed now", StateError, RuntimeError)              \
    X(ERR_IO, -5, "input or output failed", FileError, OSError)                     \
    X(ERR_TIMEOUT, -6, "deadline passed", DeadlineError, TimeoutError)              \
    X(ERR_PEER, -7, "a rank died", RankError, ConnectionError)                      \
    X(ERR_MISMATCH, -8, "ranks disagree", MismatchError, RuntimeError)              \
    X(ERR_ABORTED, -9, "aborted by a rank", AbortedError, ConnectionAbortedError)   \
    X(ERR_UNSUPPORTED, -10, "not supported", UnsupportedError, NotImplementedError) \
    X(ERR_NUMERIC, -11, "not a finite number", NumericError, ArithmeticError)       \
    X(ERR_INFEASIBLE, -12, "nothing fits", InfeasibleError, ValueError)             \
    X(ERR_INTERRUPT, -13, "interrupted", InterruptedCallError, InterruptedError)

typedef enum dcp_status {
#define X(code, value, text, py_class, py_base) DCP_##code = (value),
    DCP_STATUS_MAP(X)
#undef X
} dcp_status_t;

/* The fixed text of a code, "unknown status" for anything else. Never NULL, static
 * storage. */
const char *dcp_status_text(dcp_status_t status);

/* Message of the last failure on this thread; "" if there was none. Valid until the
 * next failure.
 */
const char *dcp_last_error(void);

/* Replaces the message of this thread: for a thread that passes on another thread's
 * failure. */
void dcp_set_last_error(const char *text);

/* Use through DCP_FAIL. Formats the message, returns `status`. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
dcp_status_t
dcp_fail_(dcp_status_t status, const char *format, ...);

#define DCP_FAIL(status, ...) dcp_fail_((status), __VA_ARGS__)

/* For functions that own nothing yet. */
#define DCP_TRY(call)                          \
    do {                                       \
        dcp_status_t dcp_try_status_ = (call); \
        if (dcp_try_status_ != DCP_OK) {       \
            return dcp_try_status_;            \
        }                                      \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
