/* A thread that does jobs in the order in which they are posted: messages, while the
 * caller computes. It is the one thread that uses the communicator its jobs use. */
#ifndef DCP_OPTIM_COURIER_H
#define DCP_OPTIM_COURIER_H

#include "dcp/status.h"

#include <stdint.h>

typedef struct optim_courier optim_courier_t;
typedef dcp_status_t (*optim_job_t)(void *context, int64_t job);

enum { OPTIM_COURIER_JOBS = 8 }; /* most that may be posted and not yet waited for */

/* context is borrowed until destroyed. */
dcp_status_t optim_courier_create(optim_job_t func, void *context,
                                  optim_courier_t **courier_p);
/* Waits for posted jobs. destroy(NULL) is fine. */
void optim_courier_destroy(optim_courier_t *courier);
/* Returns the job's ticket. */
int64_t optim_courier_post(optim_courier_t *courier, int64_t job);
/* Waits until the job of the ticket and all before it are done. After one has failed
 * the rest are skipped, and every wait returns its status and message until clear. */
dcp_status_t optim_courier_wait(optim_courier_t *courier, int64_t ticket);
/* Waits for everything posted and forgets a failure. */
void optim_courier_clear(optim_courier_t *courier);

#endif
