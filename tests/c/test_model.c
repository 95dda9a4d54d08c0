/* model: the late device, failing allocations, the promised bytes, bad batches. */
#include "check.h"

#include "dcp/device.h"
#include "dcp/model.h"
#include "dcp/rng.h"

#include <math.h>
#include <string.h>

static const dcp_transformer1d_config_t config = {.vocab_size = 37,
                                                  .hidden_size = 24,
                                                  .intermediate_size = 40,
                                                  .num_hidden_layers = 3,
                                                  .num_attention_heads = 4,
                                                  .num_key_value_heads = 2,
                                                  .head_dim = 8,
                                                  .max_position_embeddings = 512,
                                                  .rope_theta = 10000,
                                                  .rms_norm_eps = 1e-5,
                                                  .attention_bias = 1,
                                                  .mlp_bias = 1,
                                                  .dropout = 0.1,
                                                  .initializer_range = 0.2};

/* The same at either dtype. */
static dcp_transformer1d_config_t
computing(dcp_dtype_t dtype)
{
    dcp_transformer1d_config_t other = config;
    other.compute_dtype = dtype;
    return other;
}

enum { TOKENS = 96, SEQUENCES = 4, TENSORS_MOST = 128 };

/* A model with weights and gradients in memory of the test's own (not counted). */
typedef struct bench {
    int64_t tensor_count;
    int64_t counts[TENSORS_MOST];
    float *weights[TENSORS_MOST], *gradients[TENSORS_MOST];
    uint16_t *rounded[TENSORS_MOST]; /* the weights in bf16 */
} bench_t;

static void
bench_init(bench_t *bench, const dcp_transformer1d_config_t *model_config)
{
    bench->tensor_count = dcp_model_tensor_count(model_config);
    CHECK(bench->tensor_count <= TENSORS_MOST);
    for (int64_t i = 0; i < bench->tensor_count; i++) {
        dcp_model_tensor_t tensor;
        CHECK_OK(dcp_model_tensor_get(model_config, i, &tensor));
        int64_t count = tensor.shape[0] * tensor.shape[1];
        bench->counts[i] = count;
        bench->weights[i] = malloc((size_t)count * sizeof(float));
        bench->gradients[i] = calloc((size_t)count, sizeof(float));
        dcp_model_init_run(model_config, i, 5, 0, count, bench->weights[i]);
        bench->rounded[i] = malloc((size_t)count * sizeof(uint16_t));
        for (int64_t j = 0; j < count; j++) {
            if (tensor.dim_count == 1) { /* initially 1 and 0 */
                bench->weights[i][j] += 0.001f * (float)(j % 17);
            }
            bench->rounded[i][j] = dcp_f32_to_bf16(bench->weights[i][j]);
        }
    }
}

static void
bench_fini(bench_t *bench)
{
    for (int64_t i = 0; i < bench->tensor_count; i++) {
        free(bench->weights[i]);
        free(bench->gradients[i]);
        free(bench->rounded[i]);
    }
}

static int32_t tokens[TOKENS], labels[TOKENS];
static const int64_t offsets[SEQUENCES + 1] = {0, 40, 40, 41, TOKENS};
static dcp_batch_t batch = {.token_count = TOKENS,
                            .sequence_count = SEQUENCES,
                            .tokens = tokens,
                            .offsets = offsets,
                            .labels = labels,
                            .scale = 0.25,
                            .dropout_seed = 3};

static void
fill_batch(void)
{
    for (int32_t t = 0; t < TOKENS; t++) {
        tokens[t] = t * 7 % 37;
        labels[t] = t % 5 == 0 ? -100 : t * 11 % 37;
    }
}

typedef struct way {
    const dcp_device_ops_t *device;
    int32_t threads, recomputed;
    dcp_dtype_t compute;
    int32_t rounded; /* weights are bound in bf16 */
} way_t;

static dcp_status_t
run_on(way_t way, bench_t *bench, double *loss, float *logits)
{
    dcp_pool_t *pool;
    dcp_model_t *model = NULL;
    dcp_transformer1d_config_t own = computing(way.compute);
    int32_t recomputed = way.recomputed;
    DCP_TRY(dcp_pool_create(way.threads, &pool));
    dcp_status_t status = dcp_model_create(&own, way.device, pool, &model);
    if (status == DCP_OK) {
        status =
            way.rounded
                ? dcp_model_bind_bf16(model, (const uint16_t *const *)bench->rounded,
                                      bench->gradients)
                : dcp_model_bind(model, bench->weights, bench->gradients);
    }
    for (int i = 0; i < 2 && status == DCP_OK; i++) {
        dcp_batch_t dropping = batch;
        dropping.recompute[DCP_RECOMPUTE_LAYER] = i == 0 ? recomputed : 0;
        dropping.recompute[DCP_RECOMPUTE_MLP] = i == 1 ? recomputed : 0;
        status = dcp_model_forward_backward(model, &dropping, loss);
    }
    if (status == DCP_OK) {
        status = dcp_model_loss(model, &batch, loss);
    }
    if (status == DCP_OK) {
        status = dcp_model_logits(model, &batch, logits);
    }
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    return status;
}

/* Bitwise the same on the device that holds everything back, with any thread count,
 * whatever is recomputed, and whether weights are rounded on the way or before. */
static void
test_late(dcp_dtype_t compute)
{
    bench_t now, late;
    static float logits[TOKENS * 37], logits_late[TOKENS * 37];
    double loss = 0, loss_late = 0;
    bench_init(&now, &config);
    bench_init(&late, &config);
    CHECK_OK(run_on((way_t){dcp_device_cpu(), 1, 0, compute, 0}, &now, &loss, logits));
    CHECK_OK(run_on((way_t){dcp_device_late(), 3, 3, compute, compute == DCP_BF16},
                    &late, &loss_late, logits_late));
    CHECK(isfinite(loss) && loss > 0 && loss == loss_late);
    CHECK(memcmp(logits, logits_late, sizeof logits) == 0);
    for (int64_t i = 0; i < now.tensor_count; i++) {
        CHECK(memcmp(now.gradients[i], late.gradients[i],
                     (size_t)now.counts[i] * sizeof(float))
              == 0);
    }
    bench_fini(&now);
    bench_fini(&late);
}

static bench_t scenario_bench;
static way_t scenario_way;

static dcp_status_t
scenario(void)
{
    double loss = 0;
    static float logits[TOKENS * 37];
    return run_on(scenario_way, &scenario_bench, &loss, logits);
}

static void
test_allocation_failures(void)
{
    bench_init(&scenario_bench, &config);
    for (int32_t i = 0; i < 4; i++) {
        scenario_way = (way_t){i % 2 ? dcp_device_late() : dcp_device_cpu(), 2,
                               2 + i % 2, i < 2 ? DCP_F32 : DCP_BF16, i == 3};
        check_every_alloc(scenario);
    }
    bench_fini(&scenario_bench);
}

/* Weights in bf16 are for a model that computes in it, and none may be missing. */
static void
test_binding_bf16(void)
{
    bench_t bench;
    dcp_pool_t *pool;
    dcp_model_t *model;
    dcp_transformer1d_config_t own = computing(DCP_F32);
    bench_init(&bench, &config);
    CHECK_OK(dcp_pool_create(1, &pool));
    CHECK_OK(dcp_model_create(&own, dcp_device_cpu(), pool, &model));
    const uint16_t *const *rounded = (const uint16_t *const *)bench.rounded;
    CHECK(dcp_model_bind_bf16(model, rounded, NULL) == DCP_ERR_STATE);
    CHECK(strstr(dcp_last_error(), "float32") != NULL);
    dcp_model_destroy(model);
    own.compute_dtype = DCP_F64;
    CHECK(dcp_model_create(&own, dcp_device_cpu(), pool, &model) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "compute_dtype float64") != NULL);
    own.compute_dtype = DCP_BF16;
    CHECK_OK(dcp_model_create(&own, dcp_device_cpu(), pool, &model));
    uint16_t *missing = bench.rounded[3];
    bench.rounded[3] = NULL;
    CHECK(dcp_model_bind_bf16(model, rounded, NULL) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "q_proj.bias") != NULL);
    bench.rounded[3] = missing;
    CHECK_OK(dcp_model_bind_bf16(model, rounded, bench.gradients));
    /* one place after the other, and values that change there */
    double loss = 0, again = 0, other = 0;
    CHECK_OK(dcp_model_loss(model, &batch, &loss));
    CHECK_OK(dcp_model_bind(model, bench.weights, NULL));
    CHECK_OK(dcp_model_loss(model, &batch, &again));
    CHECK(loss == again && loss > 0);
    for (int64_t j = 0; j < bench.counts[1]; j++) {
        bench.weights[1][j] *= 2;
    }
    dcp_model_group_changed(model, 1);
    CHECK_OK(dcp_model_loss(model, &batch, &other));
    CHECK(other != loss && other > 0);
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
}

/* After a failed allocation the same model works on, with fresh panels. */
static void
test_recovers(void)
{
    bench_t bench;
    bench_init(&bench, &config);
    dcp_pool_t *pool;
    dcp_model_t *model;
    double want = 0, loss = 0;
    CHECK_OK(dcp_pool_create(1, &pool));
    CHECK_OK(dcp_model_create(&config, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
    dcp_alloc_set_cap(dcp_alloc_held_bytes() + 100000);
    CHECK(dcp_model_forward_backward(model, &batch, &loss) == DCP_ERR_NO_MEM);
    CHECK(loss == 0);
    dcp_alloc_set_cap(0);
    CHECK_OK(dcp_model_loss(model, &batch, &loss));
    dcp_model_destroy(model);
    CHECK_OK(dcp_model_create(&config, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, bench.weights, NULL));
    CHECK_OK(dcp_model_loss(model, &batch, &want));
    CHECK(loss == want && want > 0);
    CHECK(dcp_model_forward_backward(model, &batch, &loss) == DCP_ERR_STATE);
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
}

/* What a pass holds stays under the promise, and the promise is not far above. */
static void
check_bytes(const dcp_transformer1d_config_t *model_config, int64_t token_count,
            int64_t sequence_count, int32_t layers, int32_t mlps, int32_t threads,
            double slack)
{
    bench_t bench;
    bench_init(&bench, model_config);
    int32_t *ids = calloc((size_t)token_count, sizeof *ids);
    int64_t *starts = malloc((size_t)(sequence_count + 1) * sizeof *starts);
    for (int64_t s = 0; s <= sequence_count; s++) {
        starts[s] = token_count * s / sequence_count;
    }
    dcp_batch_t big = {.token_count = token_count,
                       .sequence_count = sequence_count,
                       .tokens = ids,
                       .offsets = starts,
                       .labels = ids,
                       .scale = 1,
                       .recompute = {layers, mlps}};
    int64_t held = dcp_alloc_held_bytes();
    dcp_alloc_reset_peak();
    dcp_pool_t *pool;
    dcp_model_t *model;
    double loss = 0;
    CHECK_OK(dcp_pool_create(threads, &pool));
    int64_t pool_bytes = dcp_alloc_held_bytes() - held;
    CHECK_OK(dcp_model_create(model_config, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
    CHECK_OK(dcp_model_forward_backward(model, &big, &loss));
    int64_t real = dcp_alloc_peak_bytes() - held - pool_bytes;
    int64_t promised =
        dcp_model_pass_bytes(model_config, token_count, big.recompute, threads);
    CHECK(real <= promised);
    CHECK((double)promised <= slack * (double)real);
    if (real > promised || (double)promised > slack * (double)real) {
        printf(
            "tokens %lld, sequences %lld, recompute {%d, %d}, threads %d: real %lld, "
            "promised %lld\n",
            (long long)token_count, (long long)sequence_count, (int)layers, (int)mlps,
            (int)threads, (long long)real, (long long)promised);
    }
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    free(ids);
    free(starts);
    bench_fini(&bench);
}

static void
test_bytes(dcp_dtype_t compute)
{
    dcp_transformer1d_config_t tiny = computing(compute);
    tiny.vocab_size = 257;
    tiny.hidden_size = 128;
    tiny.intermediate_size = 344;
    tiny.num_key_value_heads = 4;
    tiny.head_dim = 32;
    tiny.max_position_embeddings = 32768;
    tiny.num_hidden_layers = 2;
    check_bytes(&tiny, 1500, 1, 0, 0, 2, 1.12);
    check_bytes(&tiny, 2000, 1, 2, 0, 1, 1.03);
    check_bytes(&tiny, 2500, 300, 0, 2, 2, 1.15);
    tiny.vocab_size = 20000; /* logits and packed head dominate */
    tiny.tie_word_embeddings = 1;
    tiny.dropout = 0;
    check_bytes(&tiny, 300, 3, 1, 1, 2, 1.05);
    tiny.hidden_size = 16; /* the head's input gradient packs wide rows */
    tiny.intermediate_size = 20;
    tiny.head_dim = 4;
    tiny.num_hidden_layers = 1;
    check_bytes(&tiny, 100, 1, 0, 0, 1, 1.2);
}

/* The bound over many shapes, wherever scratch or panels or activations dominate. */
static void
test_bytes_of_many_shapes(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 7, 0);
    for (int i = 0; i < 48; i++) {
        dcp_transformer1d_config_t shape = computing(i % 2 ? DCP_BF16 : DCP_F32);
        shape.vocab_size = 1 + (int64_t)dcp_rng_below(&rng, 3000);
        shape.num_hidden_layers = 1 + (int64_t)dcp_rng_below(&rng, 3);
        shape.num_key_value_heads = 1 + (int64_t)dcp_rng_below(&rng, 2);
        shape.num_attention_heads =
            shape.num_key_value_heads * (1 + (int64_t)dcp_rng_below(&rng, 3));
        shape.hidden_size =
            shape.num_attention_heads * (1 + (int64_t)dcp_rng_below(&rng, 60));
        shape.intermediate_size = 1 + (int64_t)dcp_rng_below(&rng, 500);
        shape.head_dim = 2 * (1 + (int64_t)dcp_rng_below(&rng, i % 7 == 0 ? 128 : 32));
        shape.max_position_embeddings = 1 << 20;
        shape.dropout = i % 3 == 0 ? 0 : 0.5;
        if (i % 8 == 2 || i % 8 == 5) { /* one key-value head for many query heads */
            shape.num_key_value_heads = 1;
            shape.num_attention_heads = 24;
            shape.hidden_size = 24;
        }
        int64_t token_count = 1 + (int64_t)dcp_rng_below(&rng, i % 5 == 0 ? 1500 : 300);
        int64_t sequences = i % 3 == 0 ? 1 : 1 + (int64_t)dcp_rng_below(&rng, 50);
        int32_t threads = 1 + (int32_t)dcp_rng_below(&rng, 5);
        int32_t layers =
            (int32_t)dcp_rng_below(&rng, (uint64_t)shape.num_hidden_layers + 1);
        int32_t mlps = (int32_t)dcp_rng_below(
            &rng, (uint64_t)(shape.num_hidden_layers - layers) + 1);
        check_bytes(&shape, token_count, sequences, layers, mlps, threads, 1e9);
    }
}

/* A long pass that drops everything leaves much scratch, a short one that drops nothing
 * a large arena; one model that runs them by turns holds no more than either was to
 * hold. */
static void
test_bytes_of_alternating_passes(dcp_dtype_t compute)
{
    enum { LONG = 6000 };
    dcp_transformer1d_config_t shape = computing(compute);
    shape.max_position_embeddings = LONG;
    bench_t bench;
    dcp_pool_t *pool;
    dcp_model_t *model;
    static int32_t ids[LONG];
    int64_t starts[2] = {0, LONG};
    bench_init(&bench, &shape);
    CHECK_OK(dcp_pool_create(2, &pool));
    int64_t before = dcp_alloc_held_bytes();
    CHECK_OK(dcp_model_create(&shape, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
    dcp_batch_t one = {.token_count = LONG,
                       .sequence_count = 1,
                       .tokens = ids,
                       .offsets = starts,
                       .labels = ids,
                       .scale = 1};
    const int32_t full[DCP_RECOMPUTE_KINDS] = {3, 0};
    int64_t promised = dcp_model_pass_bytes(&shape, LONG, full, 2);
    int64_t count = LONG;
    while (dcp_model_pass_bytes(&shape, count, NULL, 2) > promised) {
        count--;
    }
    CHECK(count > LONG / 4);
    dcp_alloc_reset_peak();
    double loss = 0;
    for (int i = 0; i < 4; i++) {
        one.token_count = starts[1] = i % 2 == 0 ? LONG : count;
        one.recompute[DCP_RECOMPUTE_LAYER] = i % 2 == 0 ? 3 : 0;
        CHECK_OK(dcp_model_forward_backward(model, &one, &loss));
        CHECK(dcp_alloc_peak_bytes() - before <= promised);
    }
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
}

static void
expect(dcp_model_t *model, const dcp_batch_t *bad, const char *words)
{
    double loss = 0;
    CHECK(dcp_model_forward_backward(model, bad, &loss) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), words) != NULL);
    CHECK(loss == 0);
}

static void
test_bad_batches(void)
{
    bench_t bench;
    bench_init(&bench, &config);
    dcp_pool_t *pool;
    dcp_model_t *model;
    double loss = 0;
    CHECK_OK(dcp_pool_create(1, &pool));
    CHECK_OK(dcp_model_create(&config, dcp_device_cpu(), pool, &model));
    CHECK(dcp_model_loss(model, &batch, &loss) == DCP_ERR_STATE);
    float *missing = bench.weights[3];
    bench.weights[3] = NULL;
    CHECK(dcp_model_bind(model, bench.weights, NULL) == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "q_proj.bias") != NULL);
    bench.weights[3] = missing;
    CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
    dcp_batch_t bad = batch;
    bad.token_count = -1;
    expect(model, &bad, "token_count -1");
    bad = batch;
    bad.labels = NULL;
    expect(model, &bad, "labels");
    bad = batch;
    bad.tokens = NULL;
    expect(model, &bad, "tokens");
    bad = batch;
    bad.recompute[DCP_RECOMPUTE_LAYER] = 2;
    bad.recompute[DCP_RECOMPUTE_MLP] = 2;
    expect(model, &bad, "recompute = {layer: 2, mlp: 2}");
    bad = batch;
    bad.sequence_count = 2;
    expect(model, &bad, "the last offset 40");
    tokens[8] = 37;
    expect(model, &batch, "tokens[8] 37");
    fill_batch();
    labels[9] = -99;
    expect(model, &batch, "labels[9] -99");
    fill_batch();
    bad = batch;
    bad.token_count = bad.sequence_count = 0;
    CHECK_OK(dcp_model_forward_backward(model, &bad, &loss));
    CHECK(loss == 0);
    dcp_model_destroy(model);
    dcp_model_destroy(NULL);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
}

/* A tensor without a gradient is frozen: nothing is written, the others are the same.
 */
static void
test_frozen(void)
{
    bench_t bench, frozen;
    bench_init(&bench, &config);
    bench_init(&frozen, &config);
    float *left_out[TENSORS_MOST];
    for (int64_t i = 0; i < frozen.tensor_count; i++) {
        left_out[i] = i % 3 == 0 ? NULL : frozen.gradients[i];
    }
    dcp_pool_t *pool;
    dcp_model_t *model;
    double loss = 0, loss_frozen = 0;
    CHECK_OK(dcp_pool_create(1, &pool));
    CHECK_OK(dcp_model_create(&config, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
    CHECK_OK(dcp_model_forward_backward(model, &batch, &loss));
    CHECK_OK(dcp_model_bind(model, frozen.weights, left_out));
    CHECK_OK(dcp_model_forward_backward(model, &batch, &loss_frozen));
    CHECK(loss == loss_frozen);
    for (int64_t i = 0; i < frozen.tensor_count; i++) {
        size_t bytes = (size_t)bench.counts[i] * sizeof(float);
        CHECK(left_out[i] == NULL
              || memcmp(bench.gradients[i], frozen.gradients[i], bytes) == 0);
    }
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
    bench_fini(&frozen);
}

/* What the hooks of a pass saw. */
typedef struct witness {
    int64_t forward[3], backward[3]; /* attention calls a layer */
    int32_t calls[64];               /* of enter and leave, in order */
    int call_count;
} witness_t;

static dcp_status_t
see_forward(void *state, dcp_queue_t *queue, int64_t layer,
            const dcp_attention_args_t *args)
{
    ((witness_t *)state)->forward[layer]++;
    return dcp_device_cpu()->attention(queue, args);
}

static dcp_status_t
see_backward(void *state, dcp_queue_t *queue, int64_t layer,
             const dcp_attention_backward_args_t *args)
{
    ((witness_t *)state)->backward[layer]++;
    return dcp_device_cpu()->attention_backward(queue, args);
}

static dcp_status_t
see(witness_t *witness, int32_t group, int32_t backward, int32_t leaves)
{
    CHECK(witness->call_count < 64);
    witness->calls[witness->call_count++] = 4 * group + 2 * backward + leaves;
    return DCP_OK;
}

static dcp_status_t
see_enter(void *state, dcp_queue_t *queue, int32_t group, int32_t backward)
{
    (void)queue;
    return see(state, group, backward, 0);
}

static dcp_status_t
see_leave(void *state, dcp_queue_t *queue, int32_t group, int32_t backward)
{
    (void)queue;
    return see(state, group, backward, 1);
}

/* A layer that is computed again asks the attention hook again, and its group is
 * entered once for both, as in a pass that drops nothing. */
static void
test_hooks_of_recomputed_layers(void)
{
    bench_t bench, plain;
    witness_t walk = {0};
    dcp_pool_t *pool;
    dcp_model_t *model;
    double loss = 0, want = 0;
    bench_init(&bench, &config);
    bench_init(&plain, &config);
    CHECK_OK(dcp_pool_create(2, &pool));
    CHECK_OK(dcp_model_create(&config, dcp_device_cpu(), pool, &model));
    CHECK_OK(dcp_model_bind(model, plain.weights, plain.gradients));
    CHECK_OK(dcp_model_forward_backward(model, &batch, &want));
    dcp_model_set_hooks(model, &(dcp_model_hooks_t){&walk, see_enter, see_leave});
    CHECK_OK(dcp_model_walk(model, 1));
    for (int32_t layers = 0; layers <= 3; layers++) {
        witness_t witness = {0};
        dcp_attention_hook_t attention = {&witness, see_forward, see_backward};
        dcp_batch_t hooked = batch;
        hooked.recompute[DCP_RECOMPUTE_LAYER] = layers;
        hooked.recompute[DCP_RECOMPUTE_MLP] = 3 - layers;
        hooked.attention = &attention;
        dcp_model_set_hooks(model,
                            &(dcp_model_hooks_t){&witness, see_enter, see_leave});
        for (int64_t i = 0; i < bench.tensor_count; i++) {
            memset(bench.gradients[i], 0, (size_t)bench.counts[i] * sizeof(float));
        }
        CHECK_OK(dcp_model_bind(model, bench.weights, bench.gradients));
        loss = 0;
        CHECK_OK(dcp_model_forward_backward(model, &hooked, &loss));
        CHECK(loss == want);
        for (int64_t i = 0; i < bench.tensor_count; i++) {
            CHECK(memcmp(bench.gradients[i], plain.gradients[i],
                         (size_t)bench.counts[i] * sizeof(float))
                  == 0);
        }
        CHECK(witness.call_count == walk.call_count);
        CHECK(memcmp(witness.calls, walk.calls, sizeof walk.calls) == 0);
        for (int64_t i = 0; i < 3; i++) {
            CHECK(witness.forward[i] == (i < layers - 1 ? 2 : 1));
            CHECK(witness.backward[i] == 1);
        }
        witness = (witness_t){0};
        CHECK_OK(dcp_model_loss(model, &hooked, &loss)); /* drops nothing */
        CHECK(witness.forward[0] == 1 && witness.backward[0] == 0);
    }
    dcp_model_destroy(model);
    dcp_pool_destroy(pool);
    bench_fini(&bench);
    bench_fini(&plain);
}

int
main(void)
{
    fill_batch();
    test_hooks_of_recomputed_layers();
    test_late(DCP_F32);
    test_late(DCP_BF16);
    test_allocation_failures();
    test_binding_bf16();
    test_recovers();
    test_bytes(DCP_F32);
    test_bytes(DCP_BF16);
    test_bytes_of_many_shapes();
    test_bytes_of_alternating_passes(DCP_F32);
    test_bytes_of_alternating_passes(DCP_BF16);
    test_bad_batches();
    test_frozen();
    return check_finish();
}
