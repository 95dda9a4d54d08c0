/* Ranks that move together, micro-batch by micro-batch: where groups of tensors are
 * gathered, or their gradients summed, by collectives inside a pass.
 *
 * Then all ranks must run equally many passes, and the ranks that share a micro-batch
 * must reach it in the same round, or some would wait in a collective for others that
 * wait for them. Both are checked before anything runs, from numbers that all ranks
 * see, so that all come to the same verdict. A rank without work in a round calls the
 * hooks of a pass without tokens.
 */
#include "train_private.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"

#include <inttypes.h>
#include <string.h>

static dcp_status_t
run_enter(dcp_sharded_t *sharded, dcp_queue_t *queue, int32_t group, int32_t backward)
{
    if (sharded->no_windows) {
        DCP_TRY(train_gather_enter(sharded, queue, group, backward));
    }
    return sharded->reduce_layer && sharded->training
               ? train_reduce_enter(sharded, queue, group, backward)
               : DCP_OK;
}

static dcp_status_t
enter(void *state, dcp_queue_t *queue, int32_t group, int32_t backward)
{
    dcp_sharded_t *sharded = state;
    int64_t start = dcp_clock_ns();
    dcp_comm_traffic_t before = dcp_comm_traffic(sharded->comm);
    dcp_status_t status = run_enter(sharded, queue, group, backward);
    dcp_comm_traffic_t after = dcp_comm_traffic(sharded->comm);
    sharded->gather_ns += after.move_ns - before.move_ns;
    sharded->gather_calls += after.call_count - before.call_count;
    sharded->hook_ns += dcp_clock_ns() - start;
    return status;
}

static dcp_status_t
leave(void *state, dcp_queue_t *queue, int32_t group, int32_t backward)
{
    dcp_sharded_t *sharded = state;
    if (!backward || !sharded->reduce_layer) {
        return DCP_OK;
    }
    int64_t start = dcp_clock_ns();
    dcp_status_t status = train_reduce_leave(sharded, queue, group);
    sharded->hook_ns += dcp_clock_ns() - start;
    return status;
}

void
train_set_hooks(dcp_sharded_t *sharded)
{
    if (sharded->no_windows || sharded->reduce_layer) {
        dcp_model_set_hooks(
            sharded->model,
            &(dcp_model_hooks_t){.state = sharded, .enter = enter, .leave = leave});
    }
}

int64_t
train_received_bytes(const dcp_sharded_t *sharded, int32_t group)
{
    return (dcp_comm_size(sharded->comm) - 1)
           * dcp_dbuffer_layout_group(sharded->layout, group).shard
           * (int64_t)sizeof(float);
}

/* Every rank's micro-batches: groups[(rank * rounds + round) * 2] = first rank, count.
 */
static dcp_status_t
compare_groups(const int32_t *groups, int32_t world, int64_t rounds, int64_t step)
{
    for (int32_t rank = 0; rank < world; rank++) {
        for (int64_t round = 0; round < rounds; round++) {
            const int32_t *own = groups + (rank * rounds + round) * 2;
            int32_t first = own[0], count = own[1];
            if (count < 1 || first < 0 || first > rank || rank - first >= count
                || count > world - first) {
                return DCP_FAIL(
                    DCP_ERR_ARG,
                    "step %" PRId64 ", micro-batch %" PRId64
                    " of rank %d: the group of %d ranks from %d must hold this rank "
                    "and lie in 0..%d",
                    step, round, (int)rank, (int)count, (int)first, (int)world - 1);
            }
            /* whoever shares it with a neighbour must find the same there */
            for (int32_t other = rank - 1; other <= rank + 1; other += 2) {
                if (other < first || other >= first + count) {
                    continue;
                }
                const int32_t *its = groups + (other * rounds + round) * 2;
                if (its[0] == first && its[1] == count) {
                    continue;
                }
                return DCP_FAIL(
                    DCP_ERR_MISMATCH,
                    "step %" PRId64 ", micro-batch %" PRId64
                    ": rank %d shares it among %d ranks from %d, rank %d among %d from "
                    "%d: a group must reach it in the same round (windows=false and "
                    "reduce=layer)",
                    step, round, (int)rank, (int)count, (int)first, (int)other,
                    (int)its[1], (int)its[0]);
            }
        }
    }
    return DCP_OK;
}

dcp_status_t
train_check_rounds(dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    int32_t world = dcp_comm_size(sharded->comm), rank = dcp_comm_rank(sharded->comm);
    int64_t rounds = args->batch_count, words = rounds * 2;
    void *memory;
    if (world == 1 || rounds == 0) {
        return DCP_OK;
    }
    DCP_TRY(dcp_alloc_array(world * words, (int64_t)sizeof(int32_t), "groups of a step",
                            &memory));
    int32_t *groups = memory;
    for (int64_t i = 0; i < rounds; i++) {
        groups[rank * words + 2 * i] = args->batches[i].first_rank;
        groups[rank * words + 2 * i + 1] = args->batches[i].rank_count;
    }
    for (int32_t r = 0; r < world; r++) {
        sharded->round_words[r] = words;
    }
    dcp_status_t status = dcp_comm_allgatherv(sharded->comm, groups + rank * words,
                                              sharded->round_words, groups, DCP_I32);
    if (status == DCP_OK) {
        status = compare_groups(groups, world, rounds, args->step);
    }
    dcp_free(memory);
    return status;
}

dcp_status_t
train_check_counts(const dcp_sharded_t *sharded, int64_t step)
{
    const step_record_t *first = &sharded->records[0];
    for (int32_t rank = 1; rank < dcp_comm_size(sharded->comm); rank++) {
        const step_record_t *other = &sharded->records[rank];
        if (other->batch_count != first->batch_count) {
            return DCP_FAIL(DCP_ERR_MISMATCH,
                            "step %" PRId64 ": rank 0 has %" PRId64
                            " micro-batches, rank %d has %" PRId64
                            ": with windows=false or reduce=layer all ranks must run "
                            "equally many (fill up with empty ones)",
                            step, first->batch_count, (int)rank, other->batch_count);
        }
    }
    return DCP_OK;
}

dcp_status_t
train_pad_rounds(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                 dcp_step_args_t *padded_p, void **memory_p)
{
    static const int64_t no_offsets[1] = {0};
    int64_t rounds;
    DCP_TRY(dcp_comm_allreduce(sharded->comm, &args->batch_count, &rounds, 1, DCP_I64,
                               DCP_MAX));
    DCP_TRY(dcp_alloc_array(rounds, (int64_t)sizeof(dcp_micro_batch_t),
                            "micro-batches of all rounds", memory_p));
    dcp_micro_batch_t *batches = *memory_p;
    for (int64_t i = 0; i < rounds; i++) {
        batches[i] = i < args->batch_count
                         ? args->batches[i]
                         : (dcp_micro_batch_t){
                               .batch = {.offsets = no_offsets},
                               .first_rank = dcp_comm_rank(sharded->comm),
                               .rank_count = 1,
                           };
    }
    *padded_p = *args;
    padded_p->batches = batches;
    padded_p->batch_count = rounds;
    return DCP_OK;
}
