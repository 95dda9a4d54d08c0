/* Where rows lie that ranks of a group exchange in messages.
 *
 * Memory of a rank with R of T rows, with r slots of u ranks: beside the exchange part
 * T 2 kv D floats of received keys and values, R 2 (kv + u) D to send, r times as much
 * of partial gradients, and up to 8 R H D of columns (kv, H: of the model). One block,
 * kept from micro-batch to micro-batch. */
#include "sequence.h"

#include "dcp/alloc.h"

enum { ALIGN_FLOATS = 16 };

typedef struct arena {
    float *base; /* NULL: only measure */
    int64_t used;
} arena_t;

static float *
take(arena_t *arena, int64_t count)
{
    int64_t start = arena->used;
    arena->used += (count + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    return arena->base != NULL ? arena->base + start : NULL;
}

/* Floats of a row of a rank's query heads; of the keys and values that they read. */
static int64_t
head_width(const sequence_pass_t *pass, const sequence_heads_t *heads)
{
    return heads->head_count * pass->config->head_dim;
}

static int64_t
kv_width(const sequence_pass_t *pass, const sequence_heads_t *heads)
{
    return 2 * heads->kv_count * pass->config->head_dim;
}

static int64_t
lay_out(sequence_pass_t *pass, bool training, float *base)
{
    arena_t arena = {.base = base};
    int64_t rows = sequence_pass_rows(pass, pass->rank);
    int64_t own_kv = kv_width(pass, &pass->heads);
    int64_t own_heads = head_width(pass, &pass->heads);
    pass->exchange = take(&arena, pass->cut.token_count * own_kv);
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        sequence_box_t *box = &pass->mail.boxes[rank];
        sequence_heads_t heads;
        sequence_pass_heads(pass, rank, &heads);
        int64_t its_rows = sequence_pass_rows(pass, rank);
        int64_t its_kv = rows * kv_width(pass, &heads);
        int64_t its_heads = rows * head_width(pass, &heads);
        box->kv_out = rank < pass->cut.ulysses
                          ? take(&arena, its_kv)
                          : pass->mail.boxes[rank % pass->cut.ulysses].kv_out;
        if (rank == pass->rank) {
            continue;
        }
        box->kv_in = take(&arena, its_rows * own_kv);
        box->partial_in = training ? take(&arena, its_kv) : NULL;
        if (!sequence_pass_partner(pass, rank)) {
            continue;
        }
        box->q_in = take(&arena, its_rows * own_heads);
        box->out_in = take(&arena, its_rows * own_heads);
        box->lse_in = take(&arena, its_rows * own_heads / pass->config->head_dim);
        box->q_out = take(&arena, its_heads);
        box->attn_out = take(&arena, its_heads);
        if (training) {
            box->dout_in = take(&arena, its_rows * own_heads);
            box->dq_in = take(&arena, its_rows * own_heads);
            box->dout_out = take(&arena, its_heads);
        }
    }
    return arena.used * (int64_t)sizeof(float);
}

/* All ranks compute the same thing, or all fail. */
static dcp_status_t
check_identity(sequence_pass_t *pass)
{
    int64_t own[2] = {pass->identity, ~pass->identity}, most[2];
    DCP_TRY(dcp_comm_allreduce(pass->comm, own, most, 2, DCP_I64, DCP_MAX));
    return most[0] == own[0] && most[1] == own[1]
               ? DCP_OK
               : sequence_fail_identity(pass, pass->rank == 0 ? 1 : 0);
}

dcp_status_t
sequence_mail_init(sequence_pass_t *pass, dcp_sharded_t *sharded, bool training)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(pass->cut.rank_count, (int64_t)sizeof(sequence_box_t),
                            "boxes of a group", &memory));
    pass->mail.boxes = memory;
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        pass->mail.boxes[rank] = (sequence_box_t){0};
    }
    DCP_TRY(check_identity(pass));
    DCP_TRY(sequence_memory(sharded, lay_out(pass, training, NULL), &memory));
    lay_out(pass, training, memory);
    return DCP_OK;
}

void
sequence_mail_fini(sequence_mail_t *mail)
{
    dcp_free(mail->boxes);
}
