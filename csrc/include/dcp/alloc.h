/* All memory of the core comes from here: 64-byte aligned, counted, and replaceable, so
 * that a test can make the n-th allocation fail and `--memory` can cap what one rank
 * holds.
 */
#ifndef DCP_ALLOC_H
#define DCP_ALLOC_H

#include "dcp/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where bytes come from. alloc returns NULL on failure; alignment is always 64. */
typedef struct dcp_allocator_ops {
    void *(*alloc)(void *context, int64_t bytes);
    void (*free)(void *context, void *pointer, int64_t bytes);
    void *context; /* borrowed for as long as the table is set */
} dcp_allocator_ops_t;

/* Sets the process's allocator; NULL restores the default. Only while nothing is
 * allocated from another one (tests do it first thing). */
void dcp_alloc_set_ops(const dcp_allocator_ops_t *ops);

/* Allocates `bytes` >= 0 (0 gives a unique pointer). `what` names the thing in the
 * message. */
dcp_status_t dcp_alloc(int64_t bytes, const char *what, void **pointer_p);
dcp_status_t dcp_alloc_zeroed(int64_t bytes, const char *what, void **pointer_p);

/* dcp_alloc of count * item_bytes with a check that the product fits. */
dcp_status_t dcp_alloc_array(int64_t count, int64_t item_bytes, const char *what,
                             void **pointer_p);

/* dcp_free(NULL) is fine. */
void dcp_free(void *pointer);

/* Counts bytes that live elsewhere (a mapped window) as held by this process; negative
 * to release. Fails when they would pass the cap. */
dcp_status_t dcp_alloc_account(int64_t bytes, const char *what);

int64_t dcp_alloc_held_bytes(void); /* now */
int64_t dcp_alloc_peak_bytes(void); /* since the last reset */
void dcp_alloc_reset_peak(void);    /* peak = held */
void dcp_alloc_set_cap(
    int64_t bytes); /* 0: no cap; beyond it dcp_alloc fails with ERR_NO_MEM */

#ifdef __cplusplus
}
#endif
#endif
