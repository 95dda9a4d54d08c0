/* Which rank of a slot computes which heads.
 *
 * The u ranks of a slot take query heads in order, as evenly as possible; with more
 * ranks than heads the last have none. Key-value heads are not dealt: a rank reads
 * those that its query heads read, so that one may be read by several ranks, and the
 * partial gradients that these give it are added up by the rows' owner. A rank whose
 * heads begin or end inside a key-value head's group of query heads needs up to three
 * calls of attention, since a call has one number of query heads per key-value head. */
#include "sequence.h"

static int32_t
common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return (int32_t)a;
}

/* Heads where they divide: they read less of the others' rows. The rest is ring. */
int32_t
sequence_ulysses(const dcp_transformer1d_config_t *config, int32_t rank_count,
                 dcp_sequence_kind_t kind)
{
    switch (kind) {
    case DCP_SEQUENCE_ULYSSES:
        return rank_count;
    case DCP_SEQUENCE_RING:
        return 1;
    case DCP_SEQUENCE_AUTO:
        break;
    }
    return common_divisor(config->num_attention_heads, rank_count);
}

void
sequence_heads_of(const dcp_transformer1d_config_t *config, int32_t ulysses,
                  int32_t part, sequence_heads_t *heads_p)
{
    int64_t heads = config->num_attention_heads;
    int64_t group = heads / config->num_key_value_heads;
    int64_t share = heads / ulysses, more = heads % ulysses;
    int64_t head = part * share + (part < more ? part : more);
    int64_t end = head + share + (part < more);
    sequence_heads_t result = {
        .head = head, .head_count = end - head, .kv_head = head / group};
    if (end > head) {
        result.kv_count = (end - 1) / group + 1 - result.kv_head;
    }
    while (head < end) {
        sequence_run_t run = {.head = head, .kv_head = head / group, .kv_count = 1};
        int64_t next = (run.kv_head + 1) * group;
        if (head % group == 0 && end - head >= group) {
            run.kv_count = (end - head) / group;
            next = head + run.kv_count * group;
        }
        next = next < end ? next : end;
        run.head_count = next - head;
        result.runs[result.run_count++] = run;
        head = next;
    }
    *heads_p = result;
}
