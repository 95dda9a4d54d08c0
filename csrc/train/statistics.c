/* What a controller is told of a step: gradient noise, errors of codes, times.
 *
 * Micro-gradients exist nowhere apart: micro-batches add to one buffer. So the buffer
 * is sketched after each (1,024 signed sums); the difference of two sketches is the
 * micro-gradient's, and its squared length estimates the micro-gradient's without bias.
 * A micro-batch that ranks share is the sum of what they have of it, so their sketches
 * are added before they are squared. With a loss of scale 1/N micro-batch i of n_i
 * tokens adds c_i = n_i / N times its mean gradient g_i, so n_i |g_i|^2 = N^2 / n_i
 * |c_i|^2. Where tokens have weights w, its share is s_i = w_i / sum w instead, and N
 * s_i |g_i|^2 = N / s_i |c_i|^2: then the weights' unit (a sequence, with one weight
 * each) is what is drawn independently, and noise is still told per token.
 *
 * All of it is also measured in the optimizer's metric (statistics_adam.c), where that
 * is known: sketches and squares take a factor a block, errors one an element.
 *
 * The error of every precision is measured by quantising runs of blocks without sending
 * them: one element in 32, others in every step. The difference to the step before is
 * that of sketches of each rank's shard; in the optimizer's metric it is told where
 * both were taken with the same factors.
 *
 * What a reduced gradient has too much of: errors of this step's codes, and the
 * residual that was added to it, the errors of earlier ones. Both are unbiased and
 * independent of the gradient, so their squares add to its own.
 *
 * All ranks end with the same numbers: each tells its own once a step, in one small
 * gather, and all combine them in rank order. Cost, in each metric: one read of the
 * gradients a micro-batch and one of the shard after the sum; an eighth of one for the
 * errors. */
#include "train_private.h"

#include "dcp/alloc.h"
#include "dcp/clock.h"
#include "dcp/kernels.h"

#include <math.h>
#include <string.h>

enum {
    B = DCP_SKETCH_BUCKETS,
    SHADOW_ELEMENTS = 8 * DCP_PRECISION_BLOCK, /* of a run that is quantised */
    SHADOW_SHARE = 32,                         /* one run in so many */
};
static const uint64_t sketch_seed = UINT64_C(0x736b65746368);

/* A rank's part of a micro-batch that several share. */
typedef struct shared_part {
    double first_rank, ordinal; /* which one: the n-th of this group in the step */
    double weight;              /* of its trainable tokens, all ranks' */
    double sums[B], adam[B];
} shared_part_t;

/* What a rank tells the others; doubles, so that one gather carries it. */
typedef struct numbers {
    double micro_squares, micro_count; /* |c_i|^2 / w_i of its own micro-batches */
    double micro_weight;               /* sum w_i */
    double squares, error[DCP_PRECISION_COUNT];
    double adam_micro_squares, adam_squares, adam_error[DCP_PRECISION_COUNT];
    double adam_mean_squares, adam_sent; /* of its shard; of its whole gradient */
    double moment_squares, moment_error[DCP_PRECISION_COUNT]; /* by elements */
    double reduce_error;
    double residual, adam_residual;     /* squares of what was added to the gradients */
    double difference, adam_difference; /* < 0: none */
    double codec_s, reduce_s, gather_s, reduce_bytes, gather_bytes, gather_calls;
    double latency_s;
    double shared_count;
} numbers_t;

struct train_statistics {
    double before[B], after[B];           /* of the gradients so far */
    double adam_before[B], adam_after[B]; /* the same in the optimizer's metric */
    bool adam;                            /* which is known in this step */
    double latest[B], shard[B]; /* of the shard after the step before, and now */
    double adam_latest[B], adam_shard[B];
    bool has_latest;
    int64_t latest_revision; /* of the factors of adam_latest; 0: it has none */
    numbers_t own;
    numbers_t *all;  /* owned, [ranks] */
    int64_t *counts; /* owned, [ranks] */
    shared_part_t *shared;
    int64_t shared_count, shared_room;
    int64_t spent_ns;
};

void
train_statistics_destroy(train_statistics_t *s)
{
    if (s != NULL) {
        dcp_free(s->shared);
        dcp_free(s->counts);
        dcp_free(s->all);
        dcp_free(s);
    }
}

static dcp_status_t
create(dcp_sharded_t *sharded)
{
    void *memory, *all, *counts;
    int64_t ranks = dcp_comm_size(sharded->comm);
    DCP_TRY(
        dcp_alloc_zeroed((int64_t)sizeof(train_statistics_t), "statistics", &memory));
    train_statistics_t *s = memory;
    dcp_status_t status =
        dcp_alloc_array(ranks, (int64_t)sizeof(numbers_t), "statistics", &all);
    if (status != DCP_OK) {
        goto err_statistics;
    }
    s->all = all;
    status = dcp_alloc_array(ranks, (int64_t)sizeof(int64_t), "statistics", &counts);
    if (status != DCP_OK) {
        goto err_statistics;
    }
    s->counts = counts;
    sharded->statistics = s;
    return DCP_OK;
err_statistics:
    train_statistics_destroy(s);
    return status;
}

/* Sketch of all that lies in this rank's gradient buffer. */
static dcp_status_t
sketch_gradients(const dcp_sharded_t *sharded, const float *factors, double *sums)
{
    memset(sums, 0, B * sizeof sums[0]);
    return dcp_cpu_sketch(
        sharded->pool,
        &(dcp_sketch_args_t){
            .count = dcp_dbuffer_layout_elements(sharded->layout),
            .x = dcp_dbuffer_data(sharded->buffers[DCP_SHARDED_GRADIENTS]),
            .weights = factors,
            .seed = sketch_seed,
            .sums = sums,
        });
}

/* In both metrics. */
static dcp_status_t
sketch_both(const dcp_sharded_t *sharded, double *sums, double *adam)
{
    DCP_TRY(sketch_gradients(sharded, NULL, sums));
    return sharded->statistics->adam
               ? sketch_gradients(sharded, train_factors(sharded), adam)
               : DCP_OK;
}

static double
square_length(const double *a, const double *b)
{
    double sum = 0;
    for (int i = 0; i < B; i++) {
        double x = a[i] - (b != NULL ? b[i] : 0.0);
        sum += x * x;
    }
    return sum;
}

dcp_status_t
train_statistics_begin(dcp_sharded_t *sharded)
{
    if (sharded->statistics == NULL) {
        DCP_TRY(create(sharded));
    }
    train_statistics_t *s = sharded->statistics;
    if (sharded->accumulated && sharded->measured) {
        return DCP_OK; /* goes on where the pass before ended */
    }
    int64_t start = dcp_clock_ns();
    s->own = (numbers_t){0};
    s->shared_count = 0;
    s->adam = train_factors(sharded) != NULL;
    memset(s->before, 0, sizeof s->before);
    memset(s->adam_before, 0, sizeof s->adam_before);
    memset(s->adam_after, 0, sizeof s->adam_after);
    if (sharded->accumulated) {
        DCP_TRY(sketch_both(sharded, s->before, s->adam_before));
    }
    s->spent_ns = dcp_clock_ns() - start;
    return DCP_OK;
}

static double
weight_of(const dcp_batch_t *batch)
{
    double sum = 0;
    for (int64_t i = 0; i < batch->token_count; i++) {
        if (batch->labels[i] >= 0) {
            sum += batch->weights != NULL ? (double)batch->weights[i] : 1.0;
        }
    }
    return sum;
}

/* Keeps this rank's part of a shared micro-batch until all tell theirs. */
static dcp_status_t
keep_shared(train_statistics_t *s, const dcp_micro_batch_t *micro, double weight)
{
    if (s->shared_count == s->shared_room) {
        int64_t room = s->shared_room == 0 ? 4 : 2 * s->shared_room;
        void *memory;
        DCP_TRY(dcp_alloc_array(room, (int64_t)sizeof(shared_part_t), "statistics",
                                &memory));
        if (s->shared_count > 0) {
            memcpy(memory, s->shared, (size_t)s->shared_count * sizeof s->shared[0]);
        }
        dcp_free(s->shared);
        s->shared = memory;
        s->shared_room = room;
    }
    shared_part_t *part = &s->shared[s->shared_count];
    part->first_rank = (double)micro->first_rank
                       + (double)micro->rank_count / 65536.0; /* tells groups apart */
    part->ordinal = 0;
    for (int64_t i = 0; i < s->shared_count; i++) {
        part->ordinal += s->shared[i].first_rank == part->first_rank;
    }
    part->weight = weight;
    for (int i = 0; i < B; i++) {
        part->sums[i] = s->after[i] - s->before[i];
        part->adam[i] = s->adam_after[i] - s->adam_before[i];
    }
    s->shared_count++;
    return DCP_OK;
}

dcp_status_t
train_statistics_batch(dcp_sharded_t *sharded, const dcp_micro_batch_t *micro)
{
    train_statistics_t *s = sharded->statistics;
    int64_t start = dcp_clock_ns();
    double weight = weight_of(&micro->batch);
    if (weight == 0 && micro->rank_count == 1) {
        return DCP_OK; /* it added nothing */
    }
    DCP_TRY(sketch_both(sharded, s->after, s->adam_after));
    if (micro->rank_count > 1) {
        DCP_TRY(keep_shared(s, micro, weight));
    } else {
        s->own.micro_squares += square_length(s->after, s->before) / weight;
        s->own.adam_micro_squares +=
            square_length(s->adam_after, s->adam_before) / weight;
        s->own.micro_weight += weight;
        s->own.micro_count += 1;
    }
    memcpy(s->before, s->after, sizeof s->before);
    memcpy(s->adam_before, s->adam_after, sizeof s->adam_before);
    s->spent_ns += dcp_clock_ns() - start;
    return DCP_OK;
}

/* Quantises one block in every precision, sending nothing. */
static dcp_status_t
block_errors(dcp_sharded_t *sharded, const dcp_step_args_t *args, const float *x,
             int64_t block)
{
    numbers_t *own = &sharded->statistics->own;
    const float *squared = train_factors_squared(sharded);
    double weight = sharded->statistics->adam ? (double)squared[block] : 0.0;
    for (int q = DCP_PRECISION_BF16; q < DCP_PRECISION_COUNT; q++) {
        double squares[2] = {0, 0};
        DCP_TRY(
            dcp_cpu_quantise(sharded->pool, &(dcp_quantise_args_t){
                                                .count = DCP_PRECISION_BLOCK,
                                                .x = x + block * DCP_PRECISION_BLOCK,
                                                .precision = (dcp_precision_t)q,
                                                .hadamard = args->hadamard,
                                                .nearest = args->nearest,
                                                .seed = args->quantise_seed,
                                                .stream = (uint64_t)args->step,
                                                .first = block * DCP_PRECISION_BLOCK,
                                                .squares = squares,
                                            }));
        own->error[q] += squares[1];
        own->adam_error[q] += squares[1] * weight;
        if (q == DCP_PRECISION_BF16) {
            own->squares += squares[0];
            own->adam_squares += squares[0] * weight;
        }
    }
    return DCP_OK;
}

train_sample_t
train_sample(const dcp_sharded_t *sharded, int64_t step)
{
    int64_t runs = dcp_dbuffer_layout_elements(sharded->layout) / SHADOW_ELEMENTS;
    /* a run in 32, at a place that moves on by steps; small models: all */
    int64_t stride = runs >= 4 * SHADOW_SHARE ? SHADOW_SHARE : 1;
    return (train_sample_t){.stride = stride, .offset = (step * 11) % stride};
}

int64_t
train_sample_skip(const train_sample_t *sample, int64_t element)
{
    int64_t run = element / SHADOW_ELEMENTS;
    return run % sample->stride == sample->offset
               ? 0
               : (run + 1) * SHADOW_ELEMENTS - element;
}

dcp_status_t
train_statistics_errors(dcp_sharded_t *sharded, const dcp_step_args_t *args)
{
    train_statistics_t *s = sharded->statistics;
    int64_t start = dcp_clock_ns();
    const float *x = dcp_dbuffer_data(sharded->buffers[DCP_SHARDED_GRADIENTS]);
    int64_t blocks = dcp_dbuffer_layout_elements(sharded->layout) / DCP_PRECISION_BLOCK;
    train_sample_t sample = train_sample(sharded, args->step);
    for (int64_t b = 0; b < blocks;) {
        int64_t skipped = train_sample_skip(&sample, b * DCP_PRECISION_BLOCK);
        if (skipped == 0) {
            DCP_TRY(block_errors(sharded, args, x, b++));
        }
        b += skipped / DCP_PRECISION_BLOCK;
    }
    if (s->adam) {
        DCP_TRY(train_moment_errors(sharded, args, &s->own.moment_squares,
                                    s->own.moment_error));
    }
    s->spent_ns += dcp_clock_ns() - start;
    return DCP_OK;
}

/* How much the residual adds, which this step sends. */
dcp_status_t
train_statistics_residual(dcp_sharded_t *sharded)
{
    train_statistics_t *s = sharded->statistics;
    int64_t start = dcp_clock_ns();
    double squares[2] = {0, 0}, adam[2] = {0, 0};
    dcp_quantise_args_t args = {
        .count = dcp_dbuffer_layout_elements(sharded->layout),
        .x = dcp_dbuffer_data(sharded->residual),
        .precision = DCP_PRECISION_FP32,
        .squares = squares,
    };
    DCP_TRY(dcp_cpu_quantise(sharded->pool, &args));
    if (s->adam) {
        args.weights = train_factors_squared(sharded);
        args.squares = adam;
        DCP_TRY(dcp_cpu_quantise(sharded->pool, &args));
    }
    s->own.residual = squares[0];
    s->own.adam_residual = adam[0];
    s->spent_ns += dcp_clock_ns() - start;
    return DCP_OK;
}

/* Sketch of this rank's slices, which hold the sum over ranks. */
static dcp_status_t
sketch_shard(const dcp_sharded_t *sharded, const float *factors, double *sums)
{
    int32_t rank = dcp_comm_rank(sharded->comm);
    memset(sums, 0, B * sizeof sums[0]);
    for (int32_t g = 0; g < dcp_dbuffer_layout_group_count(sharded->layout); g++) {
        dcp_dbuffer_group_t group = dcp_dbuffer_layout_group(sharded->layout, g);
        const float *x = dcp_dbuffer_slice(sharded->buffers[DCP_SHARDED_GRADIENTS], g);
        int64_t start = group.start + rank * group.shard;
        /* any numbers do that no two elements share */
        int64_t first = (group.shard_start + 15 + 32 * (int64_t)g) / 16 * 16;
        for (int64_t at = 0, end; at < group.shard; at = end) {
            /* up to where a block of factors begins, and from there on */
            int64_t into = (start + at) % DCP_PRECISION_BLOCK;
            end = into != 0 ? at + DCP_PRECISION_BLOCK - into : group.shard;
            end = end < group.shard ? end : group.shard;
            const float *weights =
                factors != NULL ? factors + (start + at) / DCP_PRECISION_BLOCK : NULL;
            DCP_TRY(
                dcp_cpu_sketch(sharded->pool, &(dcp_sketch_args_t){
                                                  .count = end - at,
                                                  .x = x + at,
                                                  .weights = weights,
                                                  .seed = sketch_seed,
                                                  .first = first + (at + 15) / 16 * 16,
                                                  .sums = sums,
                                              }));
        }
    }
    return DCP_OK;
}

/* Adds up the parts of every shared micro-batch, in rank order. Collective. */
static dcp_status_t
combine_shared(dcp_sharded_t *sharded, numbers_t *sum)
{
    train_statistics_t *s = sharded->statistics;
    int32_t ranks = dcp_comm_size(sharded->comm);
    int64_t words = (int64_t)(sizeof(shared_part_t) / sizeof(double)), total = 0;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t count = (int64_t)s->all[r].shared_count;
        s->counts[r] = count * words;
        total += count;
    }
    if (total == 0) {
        return DCP_OK;
    }
    void *memory;
    DCP_TRY(
        dcp_alloc_array(total, (int64_t)sizeof(shared_part_t), "statistics", &memory));
    shared_part_t *parts = memory;
    dcp_status_t status =
        dcp_comm_allgatherv(sharded->comm, s->shared, s->counts, parts, DCP_F64);
    for (int64_t i = 0; i < total && status == DCP_OK; i++) {
        if (parts[i].ordinal < 0) {
            continue; /* added to another already */
        }
        for (int64_t j = i + 1; j < total; j++) {
            if (parts[j].first_rank == parts[i].first_rank
                && parts[j].ordinal == parts[i].ordinal) {
                for (int b = 0; b < B; b++) {
                    parts[i].sums[b] += parts[j].sums[b];
                    parts[i].adam[b] += parts[j].adam[b];
                }
                parts[j].ordinal = -1;
            }
        }
        double weight = parts[i].weight;
        if (weight != 0) { /* NaN too: the step was not finite */
            sum->micro_squares += square_length(parts[i].sums, NULL) / weight;
            sum->adam_micro_squares += square_length(parts[i].adam, NULL) / weight;
            sum->micro_weight += weight;
            sum->micro_count += 1;
        }
    }
    dcp_free(memory);
    return status;
}

static double
greater(double a, double b)
{
    return a > b ? a : b;
}

/* Of what a rank may lack: then the sum does. */
static double
sum_of_known(double a, double b)
{
    return a < 0 || b < 0 ? -1 : a + b;
}

/* Every rank's numbers, combined alike everywhere. Collective. */
static dcp_status_t
exchange(dcp_sharded_t *sharded, numbers_t *sum)
{
    train_statistics_t *s = sharded->statistics;
    int32_t ranks = dcp_comm_size(sharded->comm);
    for (int32_t r = 0; r < ranks; r++) {
        s->counts[r] = (int64_t)(sizeof(numbers_t) / sizeof(double));
    }
    DCP_TRY(dcp_comm_allgatherv(sharded->comm, &s->own, s->counts, s->all, DCP_F64));
    *sum = s->all[0];
    for (int32_t r = 1; r < ranks; r++) {
        const numbers_t *other = &s->all[r];
        sum->micro_squares += other->micro_squares;
        sum->micro_count += other->micro_count;
        sum->micro_weight += other->micro_weight;
        sum->squares += other->squares;
        sum->adam_micro_squares += other->adam_micro_squares;
        sum->adam_squares += other->adam_squares;
        sum->adam_mean_squares += other->adam_mean_squares;
        sum->adam_sent += other->adam_sent;
        for (int q = 0; q < DCP_PRECISION_COUNT; q++) {
            sum->error[q] += other->error[q];
            sum->adam_error[q] += other->adam_error[q];
            sum->moment_error[q] += other->moment_error[q];
        }
        sum->moment_squares += other->moment_squares;
        sum->reduce_error += other->reduce_error;
        sum->residual += other->residual;
        sum->adam_residual += other->adam_residual;
        sum->difference = sum_of_known(sum->difference, other->difference);
        sum->adam_difference =
            sum_of_known(sum->adam_difference, other->adam_difference);
        sum->codec_s = greater(sum->codec_s, other->codec_s);
        sum->reduce_s = greater(sum->reduce_s, other->reduce_s);
        sum->gather_s = greater(sum->gather_s, other->gather_s);
        sum->reduce_bytes = greater(sum->reduce_bytes, other->reduce_bytes);
        sum->gather_bytes = greater(sum->gather_bytes, other->gather_bytes);
        sum->gather_calls = greater(sum->gather_calls, other->gather_calls);
        sum->latency_s = greater(sum->latency_s, other->latency_s);
    }
    return combine_shared(sharded, sum);
}

/* The difference to the step before, where both were finite. */
static dcp_status_t
difference(dcp_sharded_t *sharded, bool finite)
{
    train_statistics_t *s = sharded->statistics;
    s->own.difference = s->own.adam_difference = -1;
    int64_t revision = 0;
    if (finite) {
        DCP_TRY(sketch_shard(sharded, NULL, s->shard));
        if (s->has_latest) {
            s->own.difference = square_length(s->shard, s->latest);
        }
        memcpy(s->latest, s->shard, sizeof s->latest);
    }
    if (finite && s->adam) {
        revision = train_factors_revision(sharded);
        DCP_TRY(sketch_shard(sharded, train_factors(sharded), s->adam_shard));
        if (s->latest_revision == revision) {
            s->own.adam_difference = square_length(s->adam_shard, s->adam_latest);
        }
        memcpy(s->adam_latest, s->adam_shard, sizeof s->adam_latest);
    }
    s->has_latest = finite;
    s->latest_revision = revision;
    return DCP_OK;
}

dcp_status_t
train_statistics_end(dcp_sharded_t *sharded, const dcp_step_args_t *args,
                     const int64_t *busy_ns, dcp_step_result_t *result)
{
    train_statistics_t *s = sharded->statistics;
    int64_t start = dcp_clock_ns();
    bool finite = isfinite(result->grad_norm) && isfinite(result->loss);
    DCP_TRY(difference(sharded, finite));
    s->own.reduce_error = sharded->moved.error_squares;
    s->own.codec_s = (double)sharded->moved.codec_ns * 1e-9;
    s->own.reduce_s = (double)sharded->moved.reduce_ns * 1e-9;
    s->own.reduce_bytes = (double)sharded->reduced_bytes;
    s->own.gather_s = (double)sharded->gather_ns * 1e-9;
    s->own.gather_bytes = (double)sharded->gathered_bytes;
    s->own.gather_calls = (double)sharded->gather_calls;
    s->own.latency_s = (double)sharded->latency_ns * 1e-9;
    s->own.shared_count = (double)s->shared_count;
    if (s->adam) {
        double ranks = dcp_comm_size(sharded->comm);
        s->own.adam_mean_squares = train_factors_shard_squares(sharded);
        s->own.adam_sent = square_length(s->adam_before, NULL) * (ranks - 1) / ranks;
    }
    numbers_t sum;
    DCP_TRY(exchange(sharded, &sum));
    double per_token = (double)args->trainable_count * sum.micro_weight;
    if (!sharded->measured) {
        per_token = NAN; /* some micro-batches were accumulated without */
    }
    dcp_observation_t o = {
        .step = args->step,
        .arm = {.precision = args->precision, .multiple = 1},
        .tokens = args->trainable_count,
        .step_s = NAN,
        .codec_s = sum.codec_s,
        .reduce_s = sum.reduce_s,
        .reduce_bytes = sum.reduce_bytes,
        .gather_s = sum.gather_s,
        .gather_bytes = sum.gather_bytes,
        .gather_calls = (int64_t)sum.gather_calls,
        .latency_s = sum.latency_s,
        .loss = finite ? result->loss : NAN,
        .skipped = result->skipped,
        .micro_batch_count = (int64_t)sum.micro_count,
        .micro_squares = sum.micro_squares * per_token,
        .mean_squares = result->grad_norm * result->grad_norm,
        .reduce_error = sum.reduce_error + sum.residual,
        .adam_micro_squares = s->adam ? sum.adam_micro_squares * per_token : NAN,
        .adam_mean_squares = s->adam ? sum.adam_mean_squares : NAN,
        .adam_reduce_error = NAN,
        .step_difference = sum.difference < 0 ? NAN : sum.difference,
        .adam_step_difference = sum.adam_difference < 0 ? NAN : sum.adam_difference,
    };
    for (int32_t r = 0; r < dcp_comm_size(sharded->comm); r++) {
        o.compute_s = greater(o.compute_s, (double)busy_ns[r] * 1e-9);
    }
    for (int q = 0; q < DCP_PRECISION_COUNT; q++) {
        bool measured = q != DCP_PRECISION_FP32 && sum.squares > 0;
        o.error[q] = q == DCP_PRECISION_FP32 ? 0.0
                     : measured              ? sum.error[q] / sum.squares
                                             : NAN;
        o.adam_error[q] = NAN;
        if (s->adam && (q == DCP_PRECISION_FP32 || sum.moment_squares > 0)) {
            o.adam_error[q] = q == DCP_PRECISION_FP32
                                  ? 0.0
                                  : sum.moment_error[q] / sum.moment_squares;
        }
    }
    if (s->adam) { /* what was sent, at the error of its precision in blocks */
        double error = sum.adam_squares > 0
                           ? sum.adam_error[args->precision] / sum.adam_squares
                           : 0.0;
        o.adam_reduce_error = sum.adam_sent * error + sum.adam_residual;
    }
    result->observation = o;
    result->statistics_ns = s->spent_ns + (dcp_clock_ns() - start);
    return DCP_OK;
}
