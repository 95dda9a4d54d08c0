/* An optimizer: which kind updates which tensors, and what holds for all kinds.
 *
 * Tensors are sorted by kind once; every kind that occurs gets one object (part), and
 * parts are made, stepped and destroyed in the order of dcp_optimizer_kind_t, so that
 * all ranks go through the same collectives. Ranks whose rules differ would not; so the
 * rules are compared first, by a hash. The one choice made here: a tensor of
 * ADAMW8BIT that has few elements over all ranks belongs to ADAMW - a property of the
 * tensor, never of a shard or a group, so that grouping changes nothing.
 *
 * Rules live in the optimizer's copy of the tensors, to which the parts point: changed
 * numbers hold from the next step on.
 */
#include "optim_private.h"

#include "dcp/alloc.h"

#include <inttypes.h>
#include <math.h>

enum { KIND_COUNT = DCP_OPTIMIZER_SHAMPOO + 1 };

/* By kind; NULL: not there. */
static const optim_ops_t *const kinds[KIND_COUNT] = {
    [DCP_OPTIMIZER_ADAMW] = &optim_adamw_ops,
    [DCP_OPTIMIZER_ADAMW8BIT] = &optim_adamw8bit_ops,
    [DCP_OPTIMIZER_MUON] = &optim_muon_ops,
    [DCP_OPTIMIZER_SHAMPOO] = &optim_shampoo_ops,
};

typedef struct part {
    const optim_ops_t *ops;
    optim_context_t context;
    void *object; /* owned by ops->destroy */
} part_t;

struct dcp_optimizer {
    dcp_optimizer_tensor_t *tensors; /* owned, [tensor_count] */
    int64_t tensor_count;
    int64_t *members; /* owned, [tensor_count] those of each part one after the other */
    part_t parts[KIND_COUNT];
    int32_t part_count;
};

int64_t
optim_elements(const dcp_optimizer_tensor_t *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->dim_count; i++) {
        count *= tensor->shape[i];
    }
    return count;
}

int32_t
optim_is_member(const int64_t *members, int64_t member_count, int64_t tensor)
{
    int64_t low = 0, high = member_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (members[middle] < tensor) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < member_count && members[low] == tensor;
}

/* The kind that updates it. */
static dcp_optimizer_kind_t
kind_of(const dcp_optimizer_tensor_t *tensor)
{
    dcp_optimizer_kind_t kind = tensor->rule.kind;
    return kind == DCP_OPTIMIZER_ADAMW8BIT
                   && optim_elements(tensor) < DCP_OPTIMIZER_8BIT_LEAST
               ? DCP_OPTIMIZER_ADAMW
               : kind;
}

dcp_status_t
optim_check_in(const char *field, double value, double least, double most,
               const char *rule, int64_t number)
{
    if (!(value >= least && value <= most)) {
        return DCP_FAIL(DCP_ERR_ARG, "%s %g of tensor %" PRId64 " must %s", field,
                        value, number, rule);
    }
    return DCP_OK;
}

dcp_status_t
optim_check_adam(const dcp_optimizer_tensor_t *tensor, int64_t number)
{
    const dcp_optimizer_rule_t *rule = &tensor->rule;
    /* what rounds to 1 in fp32 is 1 to the kernels */
    const double below_one = 1.0 - 0x1p-24, tiny = 0x1p-126, huge = 3.0e38;
    DCP_TRY(
        optim_check_in("beta1", rule->beta1, 0, below_one, "lie in [0, 1)", number));
    DCP_TRY(
        optim_check_in("beta2", rule->beta2, 0, below_one, "lie in [0, 1)", number));
    return optim_check_in("eps", rule->eps, tiny, huge, "be positive and finite",
                          number);
}

static dcp_status_t
check_shape(const dcp_optimizer_tensor_t *tensor, int64_t number)
{
    if (tensor->dim_count < 0 || tensor->dim_count > DCP_OPTIMIZER_DIMS) {
        return DCP_FAIL(DCP_ERR_ARG, "tensor %" PRId64 " has %d dimensions, not 0..%d",
                        number, (int)tensor->dim_count, DCP_OPTIMIZER_DIMS);
    }
    int64_t elements = 1;
    for (int32_t i = 0; i < tensor->dim_count; i++) {
        int64_t size = tensor->shape[i];
        if (size < 0 || (size > 0 && elements > INT64_MAX / size)) {
            return DCP_FAIL(DCP_ERR_ARG,
                            "dimension %d of tensor %" PRId64 " is %" PRId64
                            ": elements cannot be counted in 64 bits",
                            (int)i, number, size);
        }
        elements *= size;
    }
    return DCP_OK;
}

static dcp_status_t
check_tensor(const dcp_optimizer_tensor_t *tensor, int64_t number)
{
    DCP_TRY(check_shape(tensor, number));
    const dcp_optimizer_rule_t *rule = &tensor->rule;
    if (rule->kind == DCP_OPTIMIZER_NONE) {
        return DCP_OK;
    }
    int32_t known = rule->kind > 0 && (int)rule->kind < KIND_COUNT;
    if (!known || kinds[rule->kind] == NULL) {
        return DCP_FAIL(known ? DCP_ERR_UNSUPPORTED : DCP_ERR_ARG,
                        "kind %d of tensor %" PRId64 " is no optimizer of this build",
                        (int)rule->kind, number);
    }
    const double huge = 3.0e38; /* of a float */
    DCP_TRY(optim_check_in("lr_scale", rule->lr_scale, 0, huge,
                           "be finite and not negative", number));
    DCP_TRY(optim_check_in("weight_decay", rule->weight_decay, 0, huge,
                           "be finite and not negative", number));
    return kinds[rule->kind]->check(tensor, number);
}

/* Every tensor's elements are those of the layout. */
static dcp_status_t
check_layout(const dcp_optimizer_options_t *options)
{
    void *memory;
    DCP_TRY(dcp_alloc_zeroed(options->tensor_count * (int64_t)sizeof(int64_t),
                             "elements of tensors", &memory));
    int64_t *counts = memory;
    dcp_status_t status = DCP_OK;
    for (int32_t rank = 0; rank < dcp_comm_size(options->comm); rank++) {
        const dcp_dbuffer_run_t *runs;
        int64_t run_count;
        dcp_dbuffer_layout_runs(options->layout, rank, &runs, &run_count);
        for (int64_t i = 0; i < run_count && status == DCP_OK; i++) {
            if (runs[i].tensor >= options->tensor_count) {
                status =
                    DCP_FAIL(DCP_ERR_ARG,
                             "tensor_count %" PRId64 " is less than that of the layout",
                             options->tensor_count);
            } else {
                counts[runs[i].tensor] += runs[i].count;
            }
        }
    }
    for (int64_t i = 0; i < options->tensor_count && status == DCP_OK; i++) {
        int64_t count = optim_elements(&options->tensors[i]);
        if (counts[i] != count) {
            status = DCP_FAIL(DCP_ERR_ARG,
                              "tensor %" PRId64 " has %" PRId64
                              " elements by its shape and %" PRId64 " in the layout",
                              i, count, counts[i]);
        }
    }
    dcp_free(memory);
    return status;
}

static dcp_status_t
check(const dcp_optimizer_options_t *options)
{
    for (int64_t i = 0; i < options->tensor_count; i++) {
        DCP_TRY(check_tensor(&options->tensors[i], i));
    }
    return check_layout(options);
}

/* FNV-1a over 64-bit words. */
static uint64_t
hash_words(uint64_t hash, const void *words, size_t count)
{
    const unsigned char *at = words;
    for (size_t i = 0; i < count * sizeof(uint64_t); i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* Field by field: a struct has bytes between them. */
static uint64_t
hash_tensors(const dcp_optimizer_tensor_t *tensors, int64_t count)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int64_t i = 0; i < count; i++) {
        const dcp_optimizer_rule_t *rule = &tensors[i].rule;
        const int64_t integers[] = {
            tensors[i].dim_count, (int64_t)rule->kind, rule->nesterov,
            rule->iterations,     rule->block,         rule->every,
        };
        const double reals[] = {
            rule->lr_scale, rule->weight_decay, rule->beta1,
            rule->beta2,    rule->eps,          rule->momentum,
        };
        hash = hash_words(hash, integers, sizeof integers / sizeof integers[0]);
        hash = hash_words(hash, reals, sizeof reals / sizeof reals[0]);
        int32_t dims = tensors[i].dim_count;
        int32_t known = dims >= 0 && dims <= DCP_OPTIMIZER_DIMS;
        hash = hash_words(hash, tensors[i].shape, known ? (size_t)dims : 0);
    }
    return hash;
}

/* Collective. */
static dcp_status_t
agree(const dcp_optimizer_options_t *options)
{
    int32_t world = dcp_comm_size(options->comm);
    int64_t own = (int64_t)hash_tensors(options->tensors, options->tensor_count);
    void *memory;
    DCP_TRY(dcp_alloc_array(world, 2 * (int64_t)sizeof(int64_t), "rules of all ranks",
                            &memory));
    int64_t *hashes = memory, *counts = hashes + world;
    for (int32_t rank = 0; rank < world; rank++) {
        counts[rank] = 1;
    }
    dcp_status_t status =
        dcp_comm_allgatherv(options->comm, &own, counts, hashes, DCP_I64);
    for (int32_t rank = 1; rank < world && status == DCP_OK; rank++) {
        if (hashes[rank] != hashes[0]) {
            status = DCP_FAIL(DCP_ERR_MISMATCH,
                              "ranks disagree on the optimizer: rank 0 has rules of "
                              "hash %016" PRIx64 ", rank %d of %016" PRIx64,
                              (uint64_t)hashes[0], (int)rank, (uint64_t)hashes[rank]);
        }
    }
    dcp_free(memory);
    return status;
}

static dcp_status_t
create_parts(dcp_optimizer_t *optimizer, const dcp_optimizer_options_t *options)
{
    int64_t *member = optimizer->members;
    for (int kind = 1; kind < KIND_COUNT; kind++) {
        part_t *part = &optimizer->parts[optimizer->part_count];
        part->ops = kinds[kind];
        part->context.options = *options;
        part->context.options.tensors = optimizer->tensors;
        part->context.members = member;
        for (int64_t i = 0; i < optimizer->tensor_count; i++) {
            if ((int)kind_of(&optimizer->tensors[i]) == kind) {
                *member++ = i;
            }
        }
        part->context.member_count = member - part->context.members;
        if (part->context.member_count > 0) {
            DCP_TRY(part->ops->create(&part->context, &part->object));
            optimizer->part_count++;
        }
    }
    return DCP_OK;
}

/* The copies to which parts will point. */
static dcp_status_t
copy_tensors(const dcp_optimizer_options_t *options, dcp_optimizer_t *optimizer)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(options->tensor_count, (int64_t)sizeof options->tensors[0],
                            "rules of an optimizer", &memory));
    optimizer->tensors = memory;
    for (int64_t i = 0; i < options->tensor_count; i++) {
        optimizer->tensors[i] = options->tensors[i];
    }
    optimizer->tensor_count = options->tensor_count;
    DCP_TRY(dcp_alloc_array(options->tensor_count, (int64_t)sizeof(int64_t),
                            "tensors by kind", &memory));
    optimizer->members = memory;
    return DCP_OK;
}

static dcp_status_t
create(const dcp_optimizer_options_t *options, dcp_optimizer_t **optimizer_p,
       int32_t *alone_p)
{
    *alone_p = 0;
    DCP_TRY(agree(options));
    DCP_TRY(check(options)); /* of the same numbers: all ranks fail, or none */
    *alone_p = 1;
    void *memory;
    DCP_TRY(dcp_alloc_zeroed((int64_t)sizeof(dcp_optimizer_t), "optimizer", &memory));
    *optimizer_p = memory;
    DCP_TRY(copy_tensors(options, *optimizer_p));
    return create_parts(*optimizer_p, options);
}

dcp_status_t
dcp_optimizer_create(const dcp_optimizer_options_t *options,
                     dcp_optimizer_t **optimizer_p)
{
    dcp_optimizer_t *optimizer = NULL;
    int32_t alone;
    dcp_status_t status = create(options, &optimizer, &alone);
    if (status != DCP_OK) {
        /* memory may run out on one rank before the others notice anything */
        if (alone || status == DCP_ERR_NO_MEM) {
            dcp_comm_abort(options->comm, dcp_last_error());
        }
        dcp_optimizer_destroy(optimizer);
        return status;
    }
    *optimizer_p = optimizer;
    return DCP_OK;
}

void
dcp_optimizer_destroy(dcp_optimizer_t *optimizer)
{
    if (optimizer == NULL) {
        return;
    }
    for (int32_t i = optimizer->part_count - 1; i >= 0; i--) {
        optimizer->parts[i].ops->destroy(optimizer->parts[i].object);
    }
    dcp_free(optimizer->members);
    dcp_free(optimizer->tensors);
    dcp_free(optimizer);
}

static dcp_status_t
check_change(const dcp_optimizer_tensor_t *from, const dcp_optimizer_tensor_t *to,
             int64_t number)
{
    DCP_TRY(check_tensor(to, number));
    int32_t same_shape = from->dim_count == to->dim_count;
    for (int32_t i = 0; same_shape && i < from->dim_count; i++) {
        same_shape = from->shape[i] == to->shape[i];
    }
    const optim_ops_t *ops = kinds[from->rule.kind];
    if (!same_shape || from->rule.kind != to->rule.kind
        || (ops != NULL && ops->same_state != NULL
            && !ops->same_state(&from->rule, &to->rule))) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "the new rule of tensor %" PRId64
                        " (kind %d, was %d) needs another state: make a new optimizer",
                        number, (int)to->rule.kind, (int)from->rule.kind);
    }
    return DCP_OK;
}

dcp_status_t
dcp_optimizer_set_rules(dcp_optimizer_t *optimizer,
                        const dcp_optimizer_tensor_t *tensors)
{
    for (int64_t i = 0; i < optimizer->tensor_count; i++) {
        DCP_TRY(check_change(&optimizer->tensors[i], &tensors[i], i));
    }
    for (int64_t i = 0; i < optimizer->tensor_count; i++) {
        optimizer->tensors[i] = tensors[i];
    }
    return DCP_OK;
}

uint64_t
dcp_optimizer_rules_hash(const dcp_optimizer_t *optimizer)
{
    return hash_tensors(optimizer->tensors, optimizer->tensor_count);
}

dcp_status_t
dcp_optimizer_step(dcp_optimizer_t *optimizer, const dcp_optimizer_step_args_t *args)
{
    if (args->update_count < 0) {
        return DCP_FAIL(DCP_ERR_ARG, "update_count %" PRId64 " must not be negative",
                        args->update_count);
    }
    if (!(args->lr >= 0 && isfinite(args->lr))
        || !(args->grad_scale >= 0 && isfinite(args->grad_scale))) {
        return DCP_FAIL(DCP_ERR_ARG,
                        "lr %g and grad_scale %g must be finite and not negative",
                        args->lr, args->grad_scale);
    }
    for (int32_t i = 0; i < optimizer->part_count; i++) {
        DCP_TRY(optimizer->parts[i].ops->step(optimizer->parts[i].object, args));
    }
    return DCP_OK;
}

/* The part whose state number `*state` is, counted over all parts; it becomes the
 * number in that part. */
static const part_t *
part_of(const dcp_optimizer_t *optimizer, int32_t *state)
{
    const part_t *part = optimizer->parts;
    while (*state >= part->ops->state_count) {
        *state -= part->ops->state_count;
        part++;
    }
    return part;
}

int32_t
dcp_optimizer_state_count(const dcp_optimizer_t *optimizer)
{
    int32_t count = 0;
    for (int32_t i = 0; i < optimizer->part_count; i++) {
        count += optimizer->parts[i].ops->state_count;
    }
    return count;
}

const char *
dcp_optimizer_state_name(const dcp_optimizer_t *optimizer, int32_t state)
{
    return part_of(optimizer, &state)->ops->states[state].name;
}

dcp_dtype_t
dcp_optimizer_state_dtype(const dcp_optimizer_t *optimizer, int32_t state)
{
    return part_of(optimizer, &state)->ops->states[state].dtype;
}

void
dcp_optimizer_state_shape(const dcp_optimizer_t *optimizer, int32_t state,
                          int64_t tensor, int32_t *dim_count_p,
                          int64_t shape[DCP_OPTIMIZER_DIMS])
{
    const part_t *part = part_of(optimizer, &state);
    *dim_count_p = -1;
    for (int64_t i = 0; i < part->context.member_count; i++) {
        if (part->context.members[i] == tensor) {
            part->ops->state_shape(part->object, state, tensor, dim_count_p, shape);
            return;
        }
    }
}

void
dcp_optimizer_state_runs(const dcp_optimizer_t *optimizer, int32_t state,
                         const dcp_state_run_t **runs_p, int64_t *run_count_p)
{
    const part_t *part = part_of(optimizer, &state);
    part->ops->state_runs(part->object, state, runs_p, run_count_p);
}

int32_t
dcp_optimizer_has_second_moment(const dcp_optimizer_t *optimizer, int64_t tensor)
{
    dcp_optimizer_kind_t kind = kind_of(&optimizer->tensors[tensor]);
    return kind != DCP_OPTIMIZER_NONE && kinds[kind]->second_moments != NULL;
}

void
dcp_optimizer_second_moments(const dcp_optimizer_t *optimizer,
                             dcp_second_moment_visit_t visit, void *context)
{
    for (int32_t i = 0; i < optimizer->part_count; i++) {
        const part_t *part = &optimizer->parts[i];
        if (part->ops->second_moments != NULL) {
            part->ops->second_moments(part->object, visit, context);
        }
    }
}

int64_t
dcp_optimizer_bytes(const dcp_dbuffer_layout_t *layout,
                    const dcp_optimizer_tensor_t *tensors, int64_t tensor_count,
                    int32_t no_windows)
{
    int64_t bytes = 0;
    void *memory;
    if (dcp_alloc_array(tensor_count, (int64_t)sizeof(int64_t), "tensors by kind",
                        &memory)
        != DCP_OK) {
        return INT64_MAX; /* nothing fits */
    }
    for (int kind = 1; kind < KIND_COUNT; kind++) {
        int64_t *members = memory, count = 0;
        for (int64_t i = 0; i < tensor_count; i++) {
            if ((int)kind_of(&tensors[i]) == kind) {
                members[count++] = i;
            }
        }
        if (count > 0 && kinds[kind] != NULL) {
            bytes += kinds[kind]->bytes(layout, tensors, members, count, no_windows);
        }
    }
    dcp_free(memory);
    return bytes;
}
