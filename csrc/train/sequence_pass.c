/* One micro-batch of a group: what this rank knows of it, and its own batch.
 *
 * Fragments in the order of the sequences say which keys a query fragment reads; spans
 * are the same as offsets for attention. Labels, weights and dropout numbers belong to
 * tokens, so that cutting sequences loses none.
 *
 * Memory beside the window: 33 bytes a fragment of the group, 12 a fragment of this
 * slot, 24 a row and 8 a fragment of this rank; fragments are no more than tokens and a
 * few a rank. */
#include "sequence.h"

#include "dcp/alloc.h"

#include <stdlib.h>

enum { ALIGN_BYTES = 64 };

static int64_t
round_up(int64_t bytes)
{
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

/* Bytes of the keys and values, or their partial gradients, of all rows. */
static int64_t
exchange_bytes(const dcp_transformer1d_config_t *config, int64_t token_count,
               const sequence_heads_t *heads)
{
    return round_up(token_count * 2 * heads->kv_count * config->head_dim
                    * (int64_t)sizeof(float));
}

int64_t
sequence_need(const dcp_sharded_t *sharded, const dcp_micro_batch_t *micro,
              bool training)
{
    const dcp_transformer1d_config_t *config = &sharded->config;
    int64_t rows = micro->batch.token_count, exchange = 0;
    int32_t rank = dcp_comm_rank(sharded->comm) - micro->first_rank;
    if (micro->rank_count > 1 && rank >= 0 && rank < micro->rank_count) {
        int32_t ulysses =
            sequence_ulysses(config, micro->rank_count, sharded->sequence_kind);
        sequence_heads_t heads;
        sequence_heads_of(config, ulysses, rank % ulysses, &heads);
        exchange = exchange_bytes(config, rows, &heads);
        rows = sequence_rows(rows, ulysses, micro->rank_count / ulysses, rank);
    }
    return SEQUENCE_HEAD_BYTES + exchange
           + dcp_model_arena_bytes(config, rows, training, micro->batch.recompute);
}

static int
compare_places(const void *a, const void *b)
{
    const sequence_fragment_t *x = *(const sequence_fragment_t *const *)a;
    const sequence_fragment_t *y = *(const sequence_fragment_t *const *)b;
    if (x->sequence != y->sequence) {
        return x->sequence < y->sequence ? -1 : 1;
    }
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static bool
is_own_slot(const sequence_pass_t *pass, int32_t rank)
{
    return rank / pass->cut.ulysses == pass->rank / pass->cut.ulysses;
}

/* Fragments by sequence, and which of them some query of this slot reads: those that
 * begin no later than the slot's last one of the same sequence. */
static dcp_status_t
order_fragments(sequence_pass_t *pass)
{
    const sequence_cut_t *cut = &pass->cut;
    int64_t count = cut->fragment_count;
    void *memory;
    DCP_TRY(dcp_alloc_array(count + 1, (int64_t)sizeof(void *), "fragments in order",
                            &memory));
    pass->order = memory;
    for (int64_t i = 0; i < count; i++) {
        pass->order[i] = &cut->fragments[i];
    }
    qsort(memory, (size_t)count, sizeof(void *), compare_places);
    DCP_TRY(dcp_alloc_zeroed(count, "fragments that are read", &memory));
    pass->wanted = memory;
    bool reads = false;
    for (int64_t i = count - 1; i >= 0; i--) {
        const sequence_fragment_t *fragment = pass->order[i];
        if (i + 1 == count || pass->order[i + 1]->sequence != fragment->sequence) {
            reads = false;
        }
        reads = reads || is_own_slot(pass, fragment->rank);
        pass->wanted[fragment - cut->fragments] = reads;
    }
    return DCP_OK;
}

sequence_spans_t
sequence_pass_spans(const sequence_pass_t *pass, int32_t rank)
{
    const sequence_cut_t *cut = &pass->cut;
    int32_t first_rank = pass->rank / cut->ulysses * cut->ulysses;
    int64_t first = cut->first_fragment[first_rank];
    int64_t count = cut->first_fragment[first_rank + cut->ulysses] - first;
    int64_t start = cut->first_fragment[rank] - first;
    return (sequence_spans_t){
        .offsets = pass->spans + start + rank - first_rank,
        .key_begins = pass->spans + count + cut->ulysses + start,
        .key_ends = pass->spans + 2 * count + cut->ulysses + start,
    };
}

/* The rows of every rank of the slot, and for each fragment its keys: all tokens of its
 * sequence up to its own last one, numbered as in the micro-batch. */
static dcp_status_t
fill_spans(sequence_pass_t *pass)
{
    const sequence_cut_t *cut = &pass->cut;
    int32_t first_rank = pass->rank / cut->ulysses * cut->ulysses;
    int64_t count = cut->first_fragment[first_rank + cut->ulysses]
                    - cut->first_fragment[first_rank];
    void *memory;
    DCP_TRY(dcp_alloc_array(3 * count + cut->ulysses, (int64_t)sizeof(int32_t),
                            "rows of a slot", &memory));
    pass->spans = memory;
    for (int32_t rank = first_rank; rank < first_rank + cut->ulysses; rank++) {
        sequence_spans_t spans = sequence_pass_spans(pass, rank);
        int32_t *offsets = pass->spans + (spans.offsets - pass->spans);
        int32_t *begins = pass->spans + (spans.key_begins - pass->spans);
        int32_t *ends = pass->spans + (spans.key_ends - pass->spans);
        const sequence_fragment_t *fragment =
            cut->fragments + cut->first_fragment[rank];
        const sequence_fragment_t *end = cut->fragments + cut->first_fragment[rank + 1];
        *offsets = 0;
        for (; fragment < end; fragment++) {
            int32_t base = (int32_t)pass->whole->offsets[fragment->sequence];
            *++offsets = fragment->row + fragment->span[1];
            *begins++ = base;
            *ends++ = base + fragment->begin + fragment->span[1];
        }
    }
    return DCP_OK;
}

/* This rank's rows as a batch of its own. */
static dcp_status_t
fill_batch(sequence_pass_t *pass)
{
    const sequence_cut_t *cut = &pass->cut;
    const dcp_batch_t *whole = pass->whole;
    int64_t first = cut->first_fragment[pass->rank];
    int64_t count = cut->first_fragment[pass->rank + 1] - first;
    int64_t rows = cut->first_row[pass->rank + 1] - cut->first_row[pass->rank];
    void *memory;
    DCP_TRY(dcp_alloc_array(3 * rows + count + 1, (int64_t)sizeof(int64_t),
                            "rows of a rank", &memory));
    pass->own_arrays = memory;
    int64_t *row_ids = memory, *offsets = row_ids + rows;
    int32_t *tokens = (int32_t *)(offsets + count + 1);
    int32_t *labels = tokens + rows, *positions = labels + rows;
    float *weights = (float *)(positions + rows);
    offsets[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const sequence_fragment_t *fragment = &cut->fragments[first + i];
        int64_t base = whole->offsets[fragment->sequence] + fragment->begin;
        for (int32_t t = 0; t < fragment->span[1]; t++) {
            int64_t row = fragment->row + t;
            tokens[row] = whole->tokens[base + t];
            labels[row] = whole->labels[base + t];
            positions[row] = fragment->begin + t;
            row_ids[row] = whole->row_ids != NULL ? whole->row_ids[base + t] : base + t;
            weights[row] = whole->weights != NULL ? whole->weights[base + t] : 1.0f;
        }
        offsets[i + 1] = fragment->row + fragment->span[1];
    }
    pass->own = *whole;
    pass->own.token_count = rows;
    pass->own.sequence_count = count;
    pass->own.tokens = tokens;
    pass->own.offsets = offsets;
    pass->own.labels = labels;
    pass->own.weights = whole->weights != NULL ? weights : NULL;
    pass->own.row_ids = row_ids;
    pass->own.positions = positions;
    pass->own.attention = &pass->hook;
    return DCP_OK;
}

/* FNV-1a of all that ranks must agree on. */
static int64_t
identity_of(const dcp_micro_batch_t *micro, int32_t ulysses, bool training)
{
    const dcp_batch_t *batch = &micro->batch;
    uint64_t hash = UINT64_C(14695981039346656037);
    const int64_t words[] = {batch->token_count,  batch->sequence_count, ulysses,
                             batch->recompute[0], batch->recompute[1],   training};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        hash = (hash ^ (uint64_t)words[i]) * UINT64_C(1099511628211);
    }
    for (int64_t i = 0; i <= batch->sequence_count; i++) {
        hash = (hash ^ (uint64_t)batch->offsets[i]) * UINT64_C(1099511628211);
    }
    for (int64_t i = 0; i < batch->token_count; i++) {
        hash = (hash ^ (uint32_t)batch->tokens[i]) * UINT64_C(1099511628211);
    }
    return (int64_t)hash;
}

static dcp_status_t
check(const sequence_pass_t *pass, const dcp_micro_batch_t *micro)
{
    const dcp_batch_t *batch = &micro->batch;
    if (pass->comm == NULL) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "a micro-batch on ranks %d..%d: the step's groups do not name "
                        "them, or rank %d is not one of them",
                        (int)micro->first_rank,
                        (int)(micro->first_rank + micro->rank_count - 1),
                        (int)(pass->rank + micro->first_rank));
    }
    if (batch->token_count > 0 && (batch->tokens == NULL || batch->labels == NULL)) {
        return DCP_FAIL(DCP_ERR_ARG, "%s of the batch must not be NULL",
                        batch->tokens == NULL ? "tokens" : "labels");
    }
    for (int64_t s = 0; s < batch->sequence_count; s++) {
        int64_t length = batch->offsets[s + 1] - batch->offsets[s];
        if (length > pass->config->max_position_embeddings) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "sequence %lld has %lld tokens, more than "
                            "max_position_embeddings %lld",
                            (long long)s, (long long)length,
                            (long long)pass->config->max_position_embeddings);
        }
    }
    return DCP_OK;
}

/* The exchange part and the model's arena lie in this rank's part of the window. */
static void
use_window(sequence_pass_t *pass, dcp_sharded_t *sharded)
{
    int32_t rank = dcp_comm_rank(sharded->comm);
    char *base = dcp_window_base(pass->window, rank);
    int64_t start = SEQUENCE_HEAD_BYTES
                    + exchange_bytes(pass->config, pass->cut.token_count, &pass->heads);
    pass->exchange = (float *)(void *)(base + SEQUENCE_HEAD_BYTES);
    dcp_model_set_arena(sharded->model, base + start,
                        dcp_window_bytes(pass->window, rank) - start);
}

dcp_status_t
sequence_pass_init(sequence_pass_t *pass, dcp_sharded_t *sharded,
                   const dcp_micro_batch_t *micro, bool training)
{
    int32_t ulysses =
        sequence_ulysses(&sharded->config, micro->rank_count, sharded->sequence_kind);
    *pass = (sequence_pass_t){
        .device = sharded->device,
        .config = &sharded->config,
        .window = sequence_window(sharded),
        .comm = sequence_comm(sharded, micro->first_rank, micro->rank_count),
        .first_rank = micro->first_rank,
        .rank = dcp_comm_rank(sharded->comm) - micro->first_rank,
        .keeps_qkv = training && micro->batch.recompute[DCP_RECOMPUTE_LAYER] == 0,
        .whole = &micro->batch,
    };
    pass->hook = (dcp_attention_hook_t){
        .state = pass, .forward = sequence_forward, .backward = sequence_backward};
    DCP_TRY(sequence_cut_init(&micro->batch, micro->rank_count, ulysses, &pass->cut));
    DCP_TRY(check(pass, micro));
    sequence_heads_of(pass->config, ulysses, pass->rank % ulysses, &pass->heads);
    pass->identity = identity_of(micro, ulysses, training);
    void *memory;
    DCP_TRY(dcp_alloc_array(micro->rank_count, (int64_t)sizeof(sequence_view_t),
                            "rows of other ranks", &memory));
    pass->views = memory;
    if (pass->window == NULL) {
        DCP_TRY(sequence_mail_init(pass, sharded, training));
    } else {
        use_window(pass, sharded);
    }
    DCP_TRY(order_fragments(pass));
    DCP_TRY(fill_spans(pass));
    return fill_batch(pass);
}

void
sequence_pass_fini(sequence_pass_t *pass)
{
    dcp_free(pass->own_arrays);
    dcp_free(pass->spans);
    dcp_free(pass->wanted);
    dcp_free(pass->order);
    dcp_free(pass->views);
    sequence_mail_fini(&pass->mail);
    sequence_cut_fini(&pass->cut);
}
