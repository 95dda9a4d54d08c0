/* Attention over the rows of a group of ranks, backward, in place.
 *
 * With the final lse the gradient is a sum over pairs of fragments, so that keys and
 * values are read where they lie. The exchange part takes what this rank's queries give
 * the keys and values of all rows, in the order of ranks. dq is added up in the arena
 * of the row's owner, whose columns of other heads belong to others. Once all are done,
 * the owner adds its rows' partial dk and dv of all ranks in rank order: deterministic.
 *
 * Nobody writes to an exchange part again before all have met in the next layer, when
 * these sums are done. */
#include "sequence.h"

/* The arguments for one run of heads, queries of rank `rank` and keys of rank
 * `key_rank` from row `key_row` on. */
static dcp_attention_backward_args_t
gradient_args(const sequence_pass_t *pass, const dcp_attention_backward_args_t *own,
              int32_t rank, int32_t key_rank, int64_t key_row,
              const sequence_run_t *run)
{
    const sequence_view_t *view = &pass->views[rank], *keys = &pass->views[key_rank];
    int64_t dim = pass->config->head_dim, gathered = sequence_pass_gathered(pass);
    int64_t shift = (run->head - view->head) * dim;
    int64_t key_shift =
        key_row * keys->kv_stride + (run->kv_head - keys->kv_head) * dim;
    dcp_attention_backward_args_t args = *own;
    args.forward = sequence_query_args(pass, &own->forward, rank, run);
    args.forward.k = keys->k + key_shift;
    args.forward.v = keys->v + key_shift;
    args.forward.k_stride = args.forward.v_stride = keys->kv_stride;
    args.dout = view->dout + shift;
    args.dq = view->dq + shift;
    args.dout_stride = view->dout_stride;
    args.dq_stride = view->dq_stride;
    args.dk = pass->exchange + (pass->cut.first_row[key_rank] + key_row) * gathered
              + (run->kv_head - pass->heads.kv_head) * dim;
    args.dv = args.dk + pass->heads.kv_count * dim;
    args.dk_stride = args.dv_stride = gathered;
    return args;
}

/* Every query fragment of rank `rank` with its own keys. Overwrites dq, and these rows
 * of the partial dk and dv. */
static dcp_status_t
backward_same(sequence_pass_t *pass, dcp_queue_t *queue,
              const dcp_attention_backward_args_t *own, int32_t rank)
{
    for (int32_t i = 0; i < pass->heads.run_count; i++) {
        dcp_attention_backward_args_t args =
            gradient_args(pass, own, rank, rank, 0, &pass->heads.runs[i]);
        args.forward.offsets = sequence_pass_spans(pass, rank).offsets;
        args.forward.sequence_count =
            pass->cut.first_fragment[rank + 1] - pass->cut.first_fragment[rank];
        args.key_rows = sequence_pass_rows(pass, rank);
        DCP_TRY(pass->device->attention_backward(queue, &args));
    }
    return DCP_OK;
}

/* One query fragment and one earlier fragment of its sequence: added. */
static dcp_status_t
backward_pair(sequence_pass_t *pass, dcp_queue_t *queue,
              const dcp_attention_backward_args_t *own,
              const sequence_fragment_t *queries, const sequence_fragment_t *keys)
{
    for (int32_t i = 0; i < pass->heads.run_count; i++) {
        dcp_attention_backward_args_t args = gradient_args(
            pass, own, queries->rank, keys->rank, keys->row, &pass->heads.runs[i]);
        int64_t row = queries->row;
        args.forward.q += row * args.forward.q_stride;
        args.forward.out += row * args.forward.out_stride;
        args.forward.lse += row;
        args.dout += row * args.dout_stride;
        args.dq += row * args.dq_stride;
        args.forward.offsets = queries->span;
        args.forward.key_offsets = keys->span;
        args.forward.sequence_count = 1;
        args.forward.causal = 0;
        args.key_rows = keys->span[1];
        args.accumulate = 1;
        DCP_TRY(pass->device->attention_backward(queue, &args));
    }
    return DCP_OK;
}

/* Zeroes the partial gradients of rows of other slots: pairs only add to them. */
static dcp_status_t
clear_others(sequence_pass_t *pass, dcp_queue_t *queue)
{
    const sequence_cut_t *cut = &pass->cut;
    int64_t width = sequence_pass_gathered(pass);
    int32_t first = pass->rank / cut->ulysses * cut->ulysses;
    int64_t begin = cut->first_row[first];
    int64_t end = cut->first_row[first + cut->ulysses];
    DCP_TRY(pass->device->zero(
        queue, &(dcp_zero_args_t){.bytes = begin * width * (int64_t)sizeof(float),
                                  .x = pass->exchange}));
    return pass->device->zero(
        queue, &(dcp_zero_args_t){.bytes = (cut->token_count - end) * width
                                           * (int64_t)sizeof(float),
                                  .x = pass->exchange + end * width});
}

static dcp_status_t
backward_heads(sequence_pass_t *pass, dcp_queue_t *queue,
               const dcp_attention_backward_args_t *own)
{
    const sequence_cut_t *cut = &pass->cut;
    int32_t first = pass->rank / cut->ulysses * cut->ulysses;
    DCP_TRY(clear_others(pass, queue));
    for (int32_t rank = first; rank < first + cut->ulysses; rank++) {
        if (sequence_pass_rows(pass, rank) > 0) {
            DCP_TRY(backward_same(pass, queue, own, rank));
        }
    }
    int64_t start = 0; /* of the sequence */
    for (int64_t i = 0; i < cut->fragment_count; i++) {
        const sequence_fragment_t *queries = pass->order[i];
        if (queries->sequence != pass->order[start]->sequence) {
            start = i;
        }
        if (queries->rank < first || queries->rank >= first + cut->ulysses) {
            continue;
        }
        for (int64_t j = start; j < i; j++) {
            DCP_TRY(backward_pair(pass, queue, own, queries, pass->order[j]));
        }
    }
    return DCP_OK;
}

/* dk and dv of this rank's rows: the sum over ranks, in rank order. The first slot's
 * ranks together have all key-value heads; `covered` of them have a value already. */
static dcp_status_t
sum_partials(sequence_pass_t *pass, dcp_queue_t *queue,
             const dcp_attention_backward_args_t *own)
{
    const sequence_cut_t *cut = &pass->cut;
    int64_t dim = pass->config->head_dim, covered = 0;
    for (int32_t rank = 0; rank < cut->rank_count; rank++) {
        sequence_heads_t heads;
        sequence_pass_heads(pass, rank, &heads);
        int64_t stride = 2 * heads.kv_count * dim;
        const float *partial = pass->views[rank].partial;
        for (int64_t kv = 0; kv < heads.kv_count;) {
            int64_t head = heads.kv_head + kv;
            bool adds = head < covered;
            int64_t end = adds && covered < heads.kv_head + heads.kv_count
                              ? covered - heads.kv_head
                              : heads.kv_count;
            for (int which = 0; which < 2; which++) {
                float *out = (which == 0 ? own->dk : own->dv) + head * dim;
                const float *from = partial + (which * heads.kv_count + kv) * dim;
                DCP_TRY(pass->device->row_add(
                    queue,
                    &(dcp_row_add_args_t){.rows = sequence_pass_rows(pass, pass->rank),
                                          .width = (end - kv) * dim,
                                          .a = adds ? out : from,
                                          .b = adds ? from : NULL,
                                          .out = out,
                                          .a_stride = adds ? own->dk_stride : stride,
                                          .b_stride = stride,
                                          .out_stride = own->dk_stride}));
            }
            kv = end;
            covered = covered > heads.kv_head + end ? covered : heads.kv_head + end;
        }
    }
    return DCP_OK;
}

dcp_status_t
sequence_backward(void *state, dcp_queue_t *queue, int64_t layer,
                  const dcp_attention_backward_args_t *args)
{
    (void)layer;
    sequence_pass_t *pass = state;
    sequence_view_t own = sequence_view_of(&args->forward);
    own.dout = (float *)(uintptr_t)args->dout;
    own.dq = args->dq;
    own.dout_stride = args->dout_stride;
    own.dq_stride = args->dq_stride;
    DCP_TRY(sequence_pass_meet(pass, queue, &own, true));
    if (pass->heads.run_count > 0) {
        DCP_TRY(backward_heads(pass, queue, args));
    }
    DCP_TRY(sequence_pass_part(pass, queue, &own, true));
    return sequence_pass_rows(pass, pass->rank) > 0 ? sum_partials(pass, queue, args)
                                                    : DCP_OK;
}
