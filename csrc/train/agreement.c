/* Before a sharded model is made: do all ranks ask for the same one?
 *
 * Settings decide which collectives and windows follow, and in which order; ranks that
 * differ would pair wrong ones. So the settings are compared first, in one gather, and
 * all ranks find the same first difference. What is too long to send (the model, the
 * frozen tensors) goes as a hash.
 */
#include "train_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <string.h>

enum { SETTINGS = 11 };

static const char *const names[SETTINGS] = {
    "block_rows",    "no_windows", "reduce_layer",   "forward_only",
    "initialise",    "prefetch",   "gather_step",    "sequence_parallel",
    "machine_ranks", "the model",  "what is frozen",
};

/* FNV-1a. */
static uint64_t
hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static const uint64_t hash_start = UINT64_C(0xcbf29ce484222325);

/* Field by field: a struct has bytes between them. */
static uint64_t
hash_model(const dcp_transformer1d_config_t *config)
{
    const int64_t integers[] = {
        config->vocab_size,
        config->hidden_size,
        config->intermediate_size,
        config->num_hidden_layers,
        config->num_attention_heads,
        config->num_key_value_heads,
        config->head_dim,
        config->max_position_embeddings,
        config->tie_word_embeddings != 0,
        config->attention_bias != 0,
        config->mlp_bias != 0,
        (int64_t)config->compute_dtype,
    };
    const double reals[] = {
        config->rope_theta,
        config->rms_norm_eps,
        config->dropout,
        config->initializer_range,
    };
    uint64_t hash = hash_bytes(hash_start, integers, sizeof integers);
    return hash_bytes(hash, reals, sizeof reals);
}

int64_t
train_settings_hash(const dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    const double reals[] = {args->lr, args->clip};
    const int64_t integers[] = {
        args->update_count,        args->trainable_count > 0,
        args->skip_nonfinite != 0, (int64_t)args->precision,
        args->hadamard != 0,       args->nearest != 0,
        args->feedback != 0,       (int64_t)args->quantise_seed,
        args->statistics != 0,
    };
    uint64_t rules =
        sharded->optimizer != NULL ? dcp_optimizer_rules_hash(sharded->optimizer) : 0;
    uint64_t hash = hash_bytes(hash_start, reals, sizeof reals);
    hash = hash_bytes(hash, integers, sizeof integers);
    return (int64_t)hash_bytes(hash, &rules, sizeof rules);
}

static dcp_status_t
compare(const int64_t *settings, int32_t world)
{
    for (int32_t rank = 1; rank < world; rank++) {
        for (int i = 0; i < SETTINGS; i++) {
            int64_t own = settings[i], other = settings[rank * SETTINGS + i];
            if (own == other) {
                continue;
            }
            return i < SETTINGS - 2
                       ? DCP_FAIL(DCP_ERR_MISMATCH,
                                  "ranks disagree on %s: rank 0 has %" PRId64
                                  ", rank %d has %" PRId64,
                                  names[i], own, (int)rank, other)
                       : DCP_FAIL(
                             DCP_ERR_MISMATCH,
                             "ranks disagree on %s: rank 0 has one of hash %016" PRIx64
                             ", rank %d of %016" PRIx64,
                             names[i], (uint64_t)own, (int)rank, (uint64_t)other);
        }
    }
    return DCP_OK;
}

dcp_status_t
train_agree_on_options(const dcp_sharded_t *sharded,
                       const dcp_sharded_options_t *options)
{
    int32_t world = dcp_comm_size(sharded->comm);
    int64_t own[SETTINGS] = {
        options->block_rows,
        sharded->no_windows,
        sharded->reduce_layer,
        sharded->forward_only,
        options->initialise != 0,
        sharded->prefetch,
        sharded->gather_step,
        (int64_t)options->sequence_kind,
        sharded->machine_ranks,
        (int64_t)hash_model(&sharded->config),
        (int64_t)hash_bytes(hash_start, sharded->frozen, (size_t)sharded->tensor_count),
    };
    void *memory;
    DCP_TRY(dcp_alloc_array(world, (int64_t)(sizeof own + sizeof(int64_t)),
                            "settings of all ranks", &memory));
    int64_t *settings = memory, *counts = settings + world * SETTINGS;
    for (int32_t rank = 0; rank < world; rank++) {
        counts[rank] = SETTINGS;
    }
    dcp_status_t status =
        dcp_comm_allgatherv(sharded->comm, own, counts, settings, DCP_I64);
    if (status == DCP_OK) {
        status = compare(settings, world);
    }
    dcp_free(memory);
    return status;
}
