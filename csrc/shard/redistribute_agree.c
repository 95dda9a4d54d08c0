/* What all redistributions begin with: do ranks agree?
 *
 * Ranks compare a hash of the call in one small allreduce, which also tells whether one
 * of them lacks memory; nothing is allocated for it. Only where hashes differ does a
 * second round bring both texts together. So a disagreement ends the call on all ranks
 * alike, and their communicator stays in step. */
#include "redistribute_private.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SIDE_BYTES = 180, TEXT_BYTES = 2 * SIDE_BYTES + 64 };

static uint64_t
mix(uint64_t hash, const void *data, int64_t bytes)
{
    const unsigned char *x = data;
    for (int64_t i = 0; i < bytes; i++) {
        hash = (hash ^ x[i]) * 0x100000001b3u; /* FNV-1a */
    }
    return hash;
}

static uint64_t
mix_placements(uint64_t hash, const dcp_mesh_t *mesh, const dcp_placement_t *placements)
{
    for (int32_t a = 0; a < mesh->axis_count && placements != NULL; a++) {
        int64_t head[3] = {(int64_t)placements[a].kind, placements[a].dim,
                           placements[a].value_count};
        hash = mix(hash, head, (int64_t)sizeof head);
        hash = mix(hash, placements[a].values,
                   placements[a].value_count * (int64_t)sizeof(int64_t));
    }
    return hash;
}

static int64_t
hash_call(const redistribute_call_t *call)
{
    uint64_t hash = 0xcbf29ce484222325u;
    int64_t head[4] = {call->dim_count, call->mesh->axis_count, (int64_t)call->dtype,
                       call->window != NULL};
    hash = mix(hash, call->what, (int64_t)strlen(call->what));
    hash = mix(hash, head, (int64_t)sizeof head);
    hash = mix(hash, call->shape, call->dim_count * (int64_t)sizeof(int64_t));
    hash =
        mix(hash, call->mesh->sizes, call->mesh->axis_count * (int64_t)sizeof(int32_t));
    for (int32_t r = 0; call->window != NULL && r < call->rank_count; r++) {
        /* where sizes agree, no rank can read past the end of another's part */
        int64_t bytes = dcp_window_bytes(call->window, r);
        hash = mix(hash, &bytes, (int64_t)sizeof bytes);
    }
    hash = mix_placements(hash, call->mesh, call->source);
    hash = mix_placements(hash, call->mesh, call->target);
    return (int64_t)(hash >> 1); /* not negative */
}

static void
describe(const redistribute_call_t *call, char text[TEXT_BYTES])
{
    char from[SIDE_BYTES] = "", to[SIDE_BYTES];
    if (call->source != NULL) {
        dcp_placement_text(call->shape, call->dim_count, call->mesh, call->source, from,
                           sizeof from);
    }
    dcp_placement_text(call->shape, call->dim_count, call->mesh, call->target, to,
                       sizeof to);
    snprintf(text, TEXT_BYTES, "%s of %s%s%s%s to %s", call->what,
             dcp_dtype_name(call->dtype), call->window != NULL ? " in a window" : "",
             call->source != NULL ? " " : "", from, to);
}

/* The first rank that differs from rank 0 shows its text to all. */
static dcp_status_t
fail_mismatch(dcp_comm_t *comm, const redistribute_call_t *call, int64_t hash)
{
    char mine[TEXT_BYTES] = "", first[TEXT_BYTES], other[TEXT_BYTES];
    describe(call, mine);
    memcpy(first, mine, sizeof first);
    memcpy(other, mine, sizeof other);
    int64_t first_hash = hash;
    DCP_TRY(dcp_comm_broadcast(comm, &first_hash, 1, DCP_I64, 0));
    int64_t rank = hash != first_hash ? dcp_comm_rank(comm) : INT64_MAX;
    DCP_TRY(dcp_comm_allreduce(comm, &rank, &rank, 1, DCP_I64, DCP_MIN));
    DCP_TRY(dcp_comm_broadcast(comm, first, TEXT_BYTES, DCP_U8, 0));
    DCP_TRY(dcp_comm_broadcast(comm, other, TEXT_BYTES, DCP_U8, (int32_t)rank));
    return DCP_FAIL(DCP_ERR_MISMATCH,
                    "ranks disagree: rank 0 called %s; rank %d called %s", first,
                    (int)rank, other);
}

dcp_status_t
redistribute_agree(dcp_comm_t *comm, const redistribute_call_t *call,
                   dcp_status_t status)
{
    int64_t hash = hash_call(call);
    int64_t failure = 0;
    if (status != DCP_OK) {
        failure =
            (int64_t)-status * (INT64_C(1) << 32) + INT32_MAX - dcp_comm_rank(comm);
    }
    int64_t agreed[3] = {hash, -hash, failure};
    DCP_TRY(dcp_comm_allreduce(comm, agreed, agreed, 3, DCP_I64, DCP_MAX));
    if (status != DCP_OK) {
        return status; /* with its own message */
    }
    if (agreed[2] > 0) {
        dcp_status_t theirs = (dcp_status_t) - (agreed[2] >> 32);
        return DCP_FAIL(theirs, "rank %d could not take part in %s: %s",
                        (int)(INT32_MAX - (agreed[2] & UINT32_MAX)), call->what,
                        dcp_status_text(theirs));
    }
    if (agreed[0] != -agreed[1]) {
        return fail_mismatch(comm, call, hash);
    }
    return DCP_OK;
}

dcp_status_t
redistribute_check_comm(const dcp_comm_t *comm, const dcp_mesh_t *mesh)
{
    if (comm == NULL) {
        return DCP_FAIL(DCP_ERR_ARG, "comm must not be NULL");
    }
    if (dcp_comm_size(comm) != dcp_mesh_rank_count(mesh)) {
        return DCP_FAIL(DCP_ERR_ARG, "the mesh has %d ranks, the communicator %d",
                        (int)dcp_mesh_rank_count(mesh), (int)dcp_comm_size(comm));
    }
    return DCP_OK;
}
