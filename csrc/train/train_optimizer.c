/* The optimizer of a sharded model: its tensors' rules and shapes as dcp/optim.h wants
 * them. The buffers are the model's; the optimizer adds its state and nothing else.
 */
#include "train_private.h"

#include "dcp/alloc.h"

/* Rules [tensor_count] with shapes; *tensors_p is the caller's. frozen may be NULL. */
static dcp_status_t
describe(const dcp_model_tensor_t *model, const uint8_t *frozen, int64_t tensor_count,
         const dcp_optimizer_rule_t *rules, dcp_optimizer_tensor_t **tensors_p)
{
    void *memory;
    DCP_TRY(dcp_alloc_array(tensor_count, (int64_t)sizeof(dcp_optimizer_tensor_t),
                            "tensors of an optimizer", &memory));
    dcp_optimizer_tensor_t *tensors = memory;
    for (int64_t i = 0; i < tensor_count; i++) {
        tensors[i] = (dcp_optimizer_tensor_t){
            .dim_count = model[i].dim_count,
            .shape = {model[i].shape[0],
                      model[i].dim_count == 2 ? model[i].shape[1] : 0},
            .rule = rules[i],
        };
        if (frozen != NULL && frozen[i]) {
            tensors[i].rule.kind = DCP_OPTIMIZER_NONE;
        }
    }
    *tensors_p = tensors;
    return DCP_OK;
}

dcp_status_t
dcp_sharded_set_optimizer(dcp_sharded_t *sharded, const dcp_optimizer_rule_t *rules)
{
    if (sharded->forward_only) {
        return DCP_FAIL(DCP_ERR_STATE,
                        "this model was made forward only: it has no gradients that an "
                        "optimizer could use");
    }
    dcp_optimizer_tensor_t *tensors;
    dcp_status_t status = describe(sharded->tensors, sharded->frozen,
                                   sharded->tensor_count, rules, &tensors);
    if (status != DCP_OK) {
        dcp_comm_abort(sharded->comm, dcp_last_error());
        return status;
    }
    dcp_optimizer_options_t options = {
        .comm = sharded->comm,
        .device = sharded->device,
        .pool = sharded->pool,
        .layout = sharded->layout,
        .tensors = tensors,
        .tensor_count = sharded->tensor_count,
        .weights = sharded->buffers[DCP_SHARDED_WEIGHTS],
        .gradients = sharded->buffers[DCP_SHARDED_GRADIENTS],
        .no_windows = sharded->no_windows,
    };
    dcp_optimizer_t *optimizer = NULL;
    status = dcp_optimizer_create(&options, &optimizer);
    dcp_free(tensors);
    if (status == DCP_OK) {
        dcp_optimizer_destroy(sharded->optimizer);
        sharded->optimizer = optimizer;
    }
    return status;
}

dcp_status_t
dcp_sharded_set_rules(dcp_sharded_t *sharded, const dcp_optimizer_rule_t *rules)
{
    if (sharded->optimizer == NULL) {
        return DCP_FAIL(DCP_ERR_STATE, "no optimizer is set whose rules could change");
    }
    dcp_optimizer_tensor_t *tensors;
    DCP_TRY(describe(sharded->tensors, sharded->frozen, sharded->tensor_count, rules,
                     &tensors));
    dcp_status_t status = dcp_optimizer_set_rules(sharded->optimizer, tensors);
    dcp_free(tensors);
    return status;
}

const dcp_optimizer_t *
dcp_sharded_optimizer(const dcp_sharded_t *sharded)
{
    return sharded->optimizer;
}

/* With the model's tensors described. */
static dcp_status_t
bytes_of(const dcp_model_tensor_t *model, int64_t tensor_count,
         const dcp_optimizer_rule_t *rules, int32_t rank_count, int64_t block_rows,
         int32_t no_windows, int64_t *bytes_p)
{
    dcp_optimizer_tensor_t *tensors;
    DCP_TRY(describe(model, NULL, tensor_count, rules, &tensors));
    dcp_dbuffer_layout_t *layout = NULL;
    dcp_status_t status =
        train_plan_layout(model, tensor_count, rank_count, block_rows, &layout);
    if (status == DCP_OK) {
        *bytes_p = dcp_optimizer_bytes(layout, tensors, tensor_count, no_windows);
    }
    dcp_dbuffer_layout_destroy(layout);
    dcp_free(tensors);
    return status;
}

dcp_status_t
dcp_sharded_optimizer_bytes(const dcp_transformer1d_config_t *config,
                            const dcp_optimizer_rule_t *rules, int32_t rank_count,
                            int64_t block_rows, int32_t no_windows, int64_t *bytes_p)
{
    DCP_TRY(dcp_transformer1d_check(config));
    int64_t count = dcp_model_tensor_count(config);
    void *memory;
    DCP_TRY(dcp_alloc_array(count, (int64_t)sizeof(dcp_model_tensor_t), "tensor table",
                            &memory));
    dcp_model_tensor_t *model = memory;
    dcp_status_t status = DCP_OK;
    for (int64_t i = 0; i < count && status == DCP_OK; i++) {
        status = dcp_model_tensor_get(config, i, &model[i]);
    }
    if (status == DCP_OK) {
        status =
            bytes_of(model, count, rules, rank_count, block_rows, no_windows, bytes_p);
    }
    dcp_free(model);
    return status;
}
