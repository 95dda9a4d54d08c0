/* Ranks of a group exchange messages, where nothing is read one-sidedly.
 *
 * The maths is that of the window, and so are its bits: every rank first gets the keys
 * and values that its heads read from all ranks, and from the ranks of its slot the
 * columns of its heads of q (backward: out, lse and the gradient of out too), into
 * boxes that views show as if they lay there; afterwards results go back the same way.
 * Partial dk and dv go to the rows' owner, who adds them in rank order. All messages of
 * a meeting start together, so no order among ranks can deadlock. */
#include "sequence.h"

#include "dcp/clock.h"

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

/* Columns of rows that lie apart, into or out of a box. */
static dcp_status_t
copy_rows(sequence_pass_t *pass, dcp_queue_t *queue, float *to, int64_t to_stride,
          const float *from, int64_t from_stride, int64_t width)
{
    return pass->device->row_add(
        queue, &(dcp_row_add_args_t){.rows = sequence_pass_rows(pass, pass->rank),
                                     .width = width,
                                     .a = from,
                                     .out = to,
                                     .a_stride = from_stride,
                                     .out_stride = to_stride});
}

static dcp_status_t
pack(sequence_pass_t *pass, dcp_queue_t *queue, const sequence_view_t *own,
     bool backward)
{
    int64_t dim = pass->config->head_dim;
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        const sequence_box_t *box = &pass->mail.boxes[rank];
        sequence_heads_t heads;
        sequence_pass_heads(pass, rank, &heads);
        int64_t kv = kv_width(pass, &heads), width = head_width(pass, &heads);
        int64_t shift = heads.head * dim;
        if (rank < pass->cut.ulysses) {
            DCP_TRY(copy_rows(pass, queue, box->kv_out, kv,
                              own->k + heads.kv_head * dim, own->kv_stride, kv / 2));
            DCP_TRY(copy_rows(pass, queue, box->kv_out + kv / 2, kv,
                              own->v + heads.kv_head * dim, own->kv_stride, kv / 2));
        }
        if (!sequence_pass_partner(pass, rank)) {
            continue;
        }
        DCP_TRY(copy_rows(pass, queue, box->q_out, width, own->q + shift, own->q_stride,
                          width));
        if (backward) {
            DCP_TRY(copy_rows(pass, queue, box->attn_out, width, own->out + shift,
                              own->out_stride, width));
            DCP_TRY(copy_rows(pass, queue, box->dout_out, width, own->dout + shift,
                              own->dout_stride, width));
        }
    }
    return DCP_OK;
}

/* `out` goes to `rank`, `in` comes from there; numbers are floats, 0: nothing. */
static dcp_status_t
swap(sequence_pass_t *pass, int32_t rank, const float *out, int64_t out_count,
     float *in, int64_t in_count)
{
    if (out_count > 0) {
        DCP_TRY(
            dcp_comm_send(pass->comm, out, out_count * (int64_t)sizeof(float), rank));
    }
    return in_count > 0
               ? dcp_comm_recv(pass->comm, in, in_count * (int64_t)sizeof(float), rank)
               : DCP_OK;
}

/* Numbers of floats that go to and come from a rank. */
typedef struct traffic {
    int64_t kv_out, kv_in, heads_out, heads_in, lse_out, lse_in;
    int64_t lse_first; /* of its heads, in this rank's lse */
} traffic_t;

static traffic_t
traffic_with(const sequence_pass_t *pass, int32_t rank)
{
    sequence_heads_t heads;
    sequence_pass_heads(pass, rank, &heads);
    int64_t rows = sequence_pass_rows(pass, pass->rank);
    int64_t its_rows = sequence_pass_rows(pass, rank), dim = pass->config->head_dim;
    traffic_t t = {
        .kv_out = rows * kv_width(pass, &heads),
        .kv_in = its_rows * kv_width(pass, &pass->heads),
        .lse_first = rows * heads.head,
    };
    if (sequence_pass_partner(pass, rank)) {
        t.heads_out = rows * head_width(pass, &heads);
        t.heads_in = its_rows * head_width(pass, &pass->heads);
        t.lse_out = t.heads_out / dim;
        t.lse_in = t.heads_in / dim;
    }
    return t;
}

static dcp_status_t
send_inputs(sequence_pass_t *pass, const sequence_view_t *own, bool backward)
{
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        const sequence_box_t *box = &pass->mail.boxes[rank];
        if (rank == pass->rank) {
            continue;
        }
        traffic_t t = traffic_with(pass, rank);
        DCP_TRY(swap(pass, rank, box->kv_out, t.kv_out, box->kv_in, t.kv_in));
        DCP_TRY(swap(pass, rank, box->q_out, t.heads_out, box->q_in, t.heads_in));
        if (backward) {
            DCP_TRY(
                swap(pass, rank, box->attn_out, t.heads_out, box->out_in, t.heads_in));
            DCP_TRY(
                swap(pass, rank, box->dout_out, t.heads_out, box->dout_in, t.heads_in));
            DCP_TRY(swap(pass, rank, own->lse + t.lse_first, t.lse_out, box->lse_in,
                         t.lse_in));
        }
    }
    return DCP_OK;
}

static dcp_status_t
send_results(sequence_pass_t *pass, const sequence_view_t *own, bool backward)
{
    int64_t width = kv_width(pass, &pass->heads);
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        const sequence_box_t *box = &pass->mail.boxes[rank];
        if (rank == pass->rank) {
            continue;
        }
        traffic_t t = traffic_with(pass, rank);
        if (backward) {
            DCP_TRY(swap(pass, rank, box->dq_in, t.heads_in, box->q_out, t.heads_out));
            DCP_TRY(swap(pass, rank, pass->exchange + pass->cut.first_row[rank] * width,
                         t.kv_in, box->partial_in, t.kv_out));
        } else {
            DCP_TRY(
                swap(pass, rank, box->out_in, t.heads_in, box->attn_out, t.heads_out));
            DCP_TRY(swap(pass, rank, box->lse_in, t.lse_in, own->lse + t.lse_first,
                         t.lse_out));
        }
    }
    return DCP_OK;
}

typedef dcp_status_t (*send_t)(sequence_pass_t *pass, const sequence_view_t *own,
                               bool backward);

static dcp_status_t
exchange(sequence_pass_t *pass, dcp_queue_t *queue, send_t send,
         const sequence_view_t *own, bool backward)
{
    DCP_TRY(pass->device->fence(queue));
    int64_t start = dcp_clock_ns();
    DCP_TRY(dcp_comm_group_begin(pass->comm));
    dcp_status_t status = send(pass, own, backward);
    if (status != DCP_OK) {
        dcp_comm_group_cancel(pass->comm);
        return status;
    }
    status = dcp_comm_group_end(pass->comm);
    pass->waited_ns += dcp_clock_ns() - start;
    return status;
}

dcp_status_t
sequence_mail_meet(sequence_pass_t *pass, dcp_queue_t *queue,
                   const sequence_view_t *own, bool backward)
{
    int64_t dim = pass->config->head_dim, kv = kv_width(pass, &pass->heads);
    int64_t width = head_width(pass, &pass->heads);
    DCP_TRY(pack(pass, queue, own, backward));
    DCP_TRY(exchange(pass, queue, send_inputs, own, backward));
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        const sequence_box_t *box = &pass->mail.boxes[rank];
        if (rank == pass->rank) {
            pass->views[rank] = *own;
            pass->views[rank].partial = pass->exchange + pass->cut.first_row[rank] * kv;
            continue;
        }
        pass->views[rank] = (sequence_view_t){
            .q = box->q_in,
            .k = box->kv_in,
            .v = box->kv_in + pass->heads.kv_count * dim,
            .out = box->out_in,
            .lse = box->lse_in,
            .dout = box->dout_in,
            .dq = box->dq_in,
            .partial = box->partial_in,
            .q_stride = width,
            .kv_stride = kv,
            .out_stride = width,
            .dout_stride = width,
            .dq_stride = width,
            .head = pass->heads.head,
            .kv_head = pass->heads.kv_head,
        };
    }
    return DCP_OK;
}

dcp_status_t
sequence_mail_part(sequence_pass_t *pass, dcp_queue_t *queue,
                   const sequence_view_t *own, bool backward)
{
    int64_t dim = pass->config->head_dim;
    DCP_TRY(exchange(pass, queue, send_results, own, backward));
    for (int32_t rank = 0; rank < pass->cut.rank_count; rank++) {
        const sequence_box_t *box = &pass->mail.boxes[rank];
        if (!sequence_pass_partner(pass, rank)) {
            continue;
        }
        sequence_heads_t heads;
        sequence_pass_heads(pass, rank, &heads);
        int64_t width = head_width(pass, &heads), shift = heads.head * dim;
        DCP_TRY(backward ? copy_rows(pass, queue, own->dq + shift, own->dq_stride,
                                     box->q_out, width, width)
                         : copy_rows(pass, queue, own->out + shift, own->out_stride,
                                     box->attn_out, width, width));
    }
    return DCP_OK;
}
