/* Attention over the rows of a group of ranks, forward, in place.
 *
 * Every rank computes its heads for all query rows of its slot. It gathers the keys and
 * values of these heads from all ranks' arenas into its exchange part, in the order of
 * the sequences; then a fragment of queries and all keys up to its last token are
 * ordinary causal attention, aligned at the end. It reads q and writes out and lse
 * where they lie: in the arenas of its slot's ranks, in the columns of its heads. So no
 * partial result is ever merged, and out and lse do not depend on who computed them
 * beyond the last bit.
 *
 * A layer needs a meeting before rows are read and one after they were written; a ring
 * alone (u = 1) writes only its own rows, and needs no second one as long as nothing
 * overwrites what slower ranks still read. */
#include "sequence.h"

int64_t
sequence_pass_gathered(const sequence_pass_t *pass)
{
    return 2 * pass->heads.kv_count * pass->config->head_dim;
}

sequence_view_t
sequence_view_of(const dcp_attention_args_t *args)
{
    return (sequence_view_t){
        .q = (float *)(uintptr_t)args->q,
        .k = (float *)(uintptr_t)args->k,
        .v = (float *)(uintptr_t)args->v,
        .out = args->out,
        .lse = args->lse,
        .q_stride = args->q_stride,
        .kv_stride = args->k_stride,
        .out_stride = args->out_stride,
    };
}

/* Number of a fragment's first token in the micro-batch. */
static int64_t
token_of(const sequence_pass_t *pass, const sequence_fragment_t *fragment)
{
    return pass->whole->offsets[fragment->sequence] + fragment->begin;
}

static dcp_status_t
gather_rows(sequence_pass_t *pass, dcp_queue_t *queue, int32_t rank, int64_t row,
            int64_t token, int64_t count)
{
    const sequence_view_t *view = &pass->views[rank];
    int64_t dim = pass->config->head_dim, width = pass->heads.kv_count * dim;
    int64_t shift = row * view->kv_stride + (pass->heads.kv_head - view->kv_head) * dim;
    int64_t gathered = sequence_pass_gathered(pass);
    dcp_row_add_args_t copy = {
        .rows = count,
        .width = width,
        .a = view->k + shift,
        .out = pass->exchange + token * gathered,
        .a_stride = view->kv_stride,
        .out_stride = gathered,
    };
    DCP_TRY(pass->device->row_add(queue, &copy));
    copy.a = view->v + shift;
    copy.out += width;
    return pass->device->row_add(queue, &copy);
}

/* Keys and values that this slot's queries read, into the exchange part; fragments that
 * follow each other at both places go together. */
static dcp_status_t
gather(sequence_pass_t *pass, dcp_queue_t *queue)
{
    const sequence_cut_t *cut = &pass->cut;
    for (int32_t rank = 0; rank < cut->rank_count; rank++) {
        int64_t row = 0, token = 0, count = 0;
        for (int64_t i = cut->first_fragment[rank]; i < cut->first_fragment[rank + 1];
             i++) {
            const sequence_fragment_t *fragment = &cut->fragments[i];
            if (!pass->wanted[i]) {
                continue;
            }
            if (fragment->row != row + count
                || token_of(pass, fragment) != token + count) {
                DCP_TRY(gather_rows(pass, queue, rank, row, token, count));
                row = fragment->row;
                token = token_of(pass, fragment);
                count = 0;
            }
            count += fragment->span[1];
        }
        DCP_TRY(gather_rows(pass, queue, rank, row, token, count));
    }
    return DCP_OK;
}

/* The arguments for one run of heads and the query rows of rank `rank`; keys and
 * offsets are the caller's. */
dcp_attention_args_t
sequence_query_args(const sequence_pass_t *pass, const dcp_attention_args_t *own,
                    int32_t rank, const sequence_run_t *run)
{
    const sequence_view_t *view = &pass->views[rank];
    int64_t head = run->head - view->head, dim = pass->config->head_dim;
    dcp_attention_args_t args = *own;
    args.q = view->q + head * dim;
    args.out = view->out + head * dim;
    args.lse = view->lse + head * sequence_pass_rows(pass, rank);
    args.q_stride = view->q_stride;
    args.out_stride = view->out_stride;
    args.query_rows = sequence_pass_rows(pass, rank);
    args.heads = run->head_count;
    args.kv_heads = run->kv_count;
    args.offsets_64 = 0;
    return args;
}

static dcp_status_t
attend(sequence_pass_t *pass, dcp_queue_t *queue, const dcp_attention_args_t *own,
       int32_t rank, const sequence_run_t *run)
{
    int64_t dim = pass->config->head_dim;
    sequence_spans_t spans = sequence_pass_spans(pass, rank);
    dcp_attention_args_t args = sequence_query_args(pass, own, rank, run);
    args.k = pass->exchange + (run->kv_head - pass->heads.kv_head) * dim;
    args.v = args.k + pass->heads.kv_count * dim;
    args.k_stride = args.v_stride = sequence_pass_gathered(pass);
    args.offsets = spans.offsets;
    args.key_offsets = spans.key_begins;
    args.key_ends = spans.key_ends;
    args.sequence_count =
        pass->cut.first_fragment[rank + 1] - pass->cut.first_fragment[rank];
    return pass->device->attention(queue, &args);
}

dcp_status_t
sequence_forward(void *state, dcp_queue_t *queue, int64_t layer,
                 const dcp_attention_args_t *args)
{
    (void)layer;
    sequence_pass_t *pass = state;
    const sequence_cut_t *cut = &pass->cut;
    sequence_view_t own = sequence_view_of(args);
    DCP_TRY(sequence_pass_meet(pass, queue, &own, false));
    if (pass->heads.run_count > 0) {
        DCP_TRY(gather(pass, queue));
    }
    int32_t first = pass->rank / cut->ulysses * cut->ulysses;
    for (int32_t rank = first; rank < first + cut->ulysses; rank++) {
        for (int32_t i = 0;
             i < pass->heads.run_count && sequence_pass_rows(pass, rank) > 0; i++) {
            DCP_TRY(attend(pass, queue, args, rank, &pass->heads.runs[i]));
        }
    }
    return cut->ulysses == 1 && pass->keeps_qkv
               ? DCP_OK
               : sequence_pass_part(pass, queue, &own, false);
}
