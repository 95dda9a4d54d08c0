/* What a collective call is, for agreement: compared field by field, shown in words.
 *
 * Counts travel as a 64-bit hash plus the first few, so that a call is one cache line
 * and a half whatever the world's size. All ranks compare the same descriptors in the
 * same order, so all give the same message. */
#include "comm_transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void
comm_call_set_counts(comm_call_t *call, const int64_t *counts, int32_t count)
{
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (int32_t i = 0; i < count; i++) {
        hash = (hash ^ (uint64_t)counts[i]) * 0xBF58476D1CE4E5B9u;
        hash ^= hash >> 29;
    }
    call->hash = hash;
    call->counts_known = count < COMM_CALL_COUNTS ? count : COMM_CALL_COUNTS;
    memcpy(call->counts, counts, (size_t)call->counts_known * sizeof counts[0]);
}

static const char *
op_name(int32_t op)
{
    static const char *const names[] = {
        [COMM_JOIN] = "join",
        [COMM_BARRIER] = "barrier",
        [COMM_ALLGATHERV] = "allgatherv",
        [COMM_REDUCE_SCATTERV] = "reduce_scatterv",
        [COMM_ALLREDUCE] = "allreduce",
        [COMM_ALLTOALLV] = "alltoallv",
        [COMM_BROADCAST] = "broadcast",
        [COMM_SPLIT] = "split",
        [COMM_WINDOW] = "window_create",
        [COMM_MESSAGES] = "send/recv group",
    };
    return (uint32_t)op < sizeof names / sizeof names[0] ? names[op] : "unknown";
}

static void
append(char *text, int64_t text_bytes, const char *piece)
{
    size_t used = strlen(text);
    snprintf(text + used, (size_t)text_bytes - used, "%s", piece);
}

void
comm_call_text(const comm_call_t *call, char *text, int64_t text_bytes)
{
    static const char *const reduce_names[] = {"sum", "max", "min"};
    char piece[64];
    snprintf(text, (size_t)text_bytes, "%s", op_name(call->op));
    if (call->total >= 0) {
        snprintf(piece, sizeof piece, " of %" PRId64, call->total);
        append(text, text_bytes, piece);
    }
    if (call->dtype >= 0) {
        snprintf(piece, sizeof piece, " %s", dcp_dtype_name((dcp_dtype_t)call->dtype));
        append(text, text_bytes, piece);
    }
    if (call->op == COMM_ALLREDUCE && (uint32_t)call->detail < 3) {
        snprintf(piece, sizeof piece, " (%s)", reduce_names[call->detail]);
        append(text, text_bytes, piece);
    }
    if (call->op == COMM_BROADCAST) {
        snprintf(piece, sizeof piece, " from rank %d", (int)call->detail);
        append(text, text_bytes, piece);
    }
    for (int32_t i = 0; i < call->counts_known; i++) {
        snprintf(piece, sizeof piece, "%s%" PRId64, i == 0 ? " (counts " : ", ",
                 call->counts[i]);
        append(text, text_bytes, piece);
    }
    if (call->counts_known > 0) {
        append(text, text_bytes,
               call->counts_known == COMM_CALL_COUNTS ? ", ...)" : ")");
    }
}

static bool
calls_agree(const comm_call_t *a, const comm_call_t *b)
{
    return a->sequence == b->sequence && a->op == b->op && a->dtype == b->dtype
           && a->detail == b->detail && a->total == b->total && a->hash == b->hash;
}

dcp_status_t
comm_call_compare(const comm_call_t *const *calls, int32_t size)
{
    for (int32_t rank = 1; rank < size; rank++) {
        if (!calls_agree(calls[0], calls[rank])) {
            char a[200], b[200];
            comm_call_text(calls[0], a, sizeof a);
            comm_call_text(calls[rank], b, sizeof b);
            return DCP_FAIL(DCP_ERR_MISMATCH,
                            "ranks disagree: rank 0 called %s (call %" PRId64
                            "), rank %d called %s (call %" PRId64
                            "): all ranks must make the same calls in the same order",
                            a, calls[0]->sequence, (int)rank, b, calls[rank]->sequence);
        }
    }
    return DCP_OK;
}
