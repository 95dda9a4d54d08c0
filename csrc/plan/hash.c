/* A stable 128-bit hash of a plan: what was asked and what was chosen.
 *
 * Two lanes of a multiply-xorshift mixer (the finaliser of SplitMix64) over 64-bit
 * words; values, not bytes, go in, so byte order and struct padding do not matter. Each
 * list is preceded by its length. Times and bytes stay out: they follow from the rest,
 * and compilers may differ in their last bit. Not cryptographic: it finds ranks that
 * disagree, not liars.
 */
#include "dcp/plan.h"

#include <string.h>

static uint64_t
mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    return x;
}

static void
add_word(uint64_t hash[2], uint64_t word)
{
    hash[0] = mix(hash[0] + UINT64_C(0x9e3779b97f4a7c15) + word);
    hash[1] = mix((hash[1] ^ word) * UINT64_C(0xd1342543de82ef95) + hash[0]);
}

static void
add_double(uint64_t hash[2], double value)
{
    uint64_t bits;
    value += 0.0; /* -0 becomes 0 */
    memcpy(&bits, &value, sizeof bits);
    add_word(hash, bits);
}

static void
add_request(uint64_t hash[2], const dcp_plan_request_t *request)
{
    const dcp_cost_t *cost = &request->cost;
    add_word(hash, (uint64_t)request->length_count);
    for (int64_t i = 0; i < request->length_count; i++) {
        add_word(hash, (uint64_t)request->lengths[i]);
    }
    add_word(hash, (uint64_t)request->world);
    const double doubles[] = {
        cost->latency_s,         cost->token_s,           cost->square_s,
        cost->group_s[0],        cost->group_s[1],        cost->hop_s[0],
        cost->hop_s[1],          cost->gather_s[0],       cost->gather_s[1],
        cost->exchange_s[0],     cost->exchange_s[1],     cost->layer_token_s,
        cost->layer_square_s,    cost->layer_comm_share,  cost->mlp_token_s,
        cost->fixed_bytes,       cost->sharded_bytes,     cost->scratch_bytes,
        cost->token_bytes,       cost->layer_token_bytes, cost->mlp_token_bytes,
        cost->group_token_bytes, cost->logit_bytes,
    };
    _Static_assert(sizeof doubles / sizeof doubles[0] == DCP_COST_DOUBLES,
                   "every coefficient is hashed");
    for (int i = 0; i < DCP_COST_DOUBLES; i++) {
        add_double(hash, doubles[i]);
    }
    add_word(hash, (uint64_t)cost->logit_chunk_tokens);
    add_word(hash, (uint64_t)cost->layer_count);
    add_word(hash, (uint64_t)cost->node_ranks);
    add_word(hash, (uint64_t)request->memory_bytes);
    add_word(hash, (uint64_t)request->max_tokens);
    add_word(hash, (uint64_t)request->run_longest);
    add_word(hash, (uint64_t)request->max_group);
    add_word(hash, (uint64_t)request->rounds);
    add_word(hash, (uint64_t)request->fixed_group);
    add_word(hash, (uint64_t)request->fixed_recompute[0]);
    add_word(hash, (uint64_t)request->fixed_recompute[1]);
    add_word(hash, request->seed);
    size_t name_bytes = strlen(request->strategy);
    add_word(hash, (uint64_t)name_bytes);
    for (size_t i = 0; i < name_bytes; i++) {
        add_word(hash, (uint64_t)(unsigned char)request->strategy[i]);
    }
}

void
dcp_plan_hash(const dcp_plan_request_t *request, const dcp_plan_t *plan,
              uint64_t hash[2])
{
    hash[0] = UINT64_C(0x6463702e706c616e); /* "dcp.plan" */
    hash[1] = 2;                            /* version of what is hashed */
    add_request(hash, request);
    add_word(hash, (uint64_t)plan->micro_batch_count);
    for (int64_t m = 0; m < plan->micro_batch_count; m++) {
        int64_t r0 = plan->rank_offsets[m], r1 = plan->rank_offsets[m + 1];
        int64_t s0 = plan->sequence_offsets[m], s1 = plan->sequence_offsets[m + 1];
        add_word(hash, (uint64_t)(r1 - r0));
        for (int64_t i = r0; i < r1; i++) {
            add_word(hash, (uint64_t)plan->ranks[i]);
        }
        add_word(hash, (uint64_t)(s1 - s0));
        for (int64_t i = s0; i < s1; i++) {
            add_word(hash, (uint64_t)plan->sequences[i]);
        }
        for (int kind = 0; kind < DCP_RECOMPUTE_KINDS; kind++) {
            add_word(hash, (uint64_t)plan->recompute[m * DCP_RECOMPUTE_KINDS + kind]);
        }
    }
}
