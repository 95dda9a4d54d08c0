/* Carries units to their owners and back, round by round, in bounded memory. */
#ifndef DCP_OPTIM_OWNER_ROUNDS_H
#define DCP_OPTIM_OWNER_ROUNDS_H

#include "owners.h"

typedef struct optim_rounds optim_rounds_t;

/* What a kind does. put and apply are called for parts of pieces that this rank holds,
 * from several threads; compute for the units it owns, one at a time, from the caller's
 * thread. None communicates. */
typedef struct optim_work {
    void *object;
    /* Writes what the owner needs of elements first .. first + count - 1 of the piece's
     * tensor. */
    void (*put)(void *object, const optim_piece_t *piece, int64_t first, int64_t count,
                float *to);
    /* Replaces what was put [rows, columns] by the result. */
    dcp_status_t (*compute)(void *object, int64_t unit, float *data);
    /* Takes the result of the same elements. */
    void (*apply)(void *object, const optim_piece_t *piece, int64_t first,
                  int64_t count, const float *from);
} optim_work_t;

/* Collective. Context and owners are borrowed until destroyed. */
dcp_status_t optim_rounds_create(const optim_context_t *context,
                                 const optim_owners_t *owners,
                                 optim_rounds_t **rounds_p);
void optim_rounds_destroy(optim_rounds_t *rounds);
/* Collective: every element of every unit is put, computed and applied once. A rank
 * that fails alone ends the communicator for all. */
dcp_status_t optim_rounds_run(optim_rounds_t *rounds, const optim_work_t *work);
/* Bytes of one on the rank that holds most. */
int64_t optim_rounds_bytes(const optim_owners_t *owners, int32_t no_windows);

#endif
