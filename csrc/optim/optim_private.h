/* Between optimizer.c, which knows no kind, and the kinds, one table each. A kind's
 * object serves all tensors with its rule; optimizer.c makes one for each kind that
 * some tensor has, in the order of dcp_optimizer_kind_t, and steps them in that order,
 * on all ranks. */
#ifndef DCP_OPTIM_PRIVATE_H
#define DCP_OPTIM_PRIVATE_H

#include "dcp/optim.h"

typedef struct optim_context {
    /* tensors: the optimizer's own copy, in which rules may change between steps */
    dcp_optimizer_options_t options;
    const int64_t *members; /* numbers of the tensors of this kind, ascending */
    int64_t member_count;
} optim_context_t;

typedef struct optim_state_info {
    const char *name;
    dcp_dtype_t dtype;
} optim_state_info_t;

typedef struct optim_ops {
    dcp_status_t (*check)(const dcp_optimizer_tensor_t *tensor, int64_t number);
    /* Can the state made under one rule go on under the other? NULL: always. */
    int32_t (*same_state)(const dcp_optimizer_rule_t *from,
                          const dcp_optimizer_rule_t *to);
    /* Context and what it points to outlive the object. Collective. */
    dcp_status_t (*create)(const optim_context_t *context, void **object_p);
    void (*destroy)(void *object);
    dcp_status_t (*step)(void *object, const dcp_optimizer_step_args_t *args);
    int32_t state_count;
    const optim_state_info_t *states; /* [state_count] */
    void (*state_shape)(const void *object, int32_t state, int64_t tensor,
                        int32_t *dim_count_p, int64_t *shape);
    void (*state_runs)(const void *object, int32_t state,
                       const dcp_state_run_t **runs_p, int64_t *run_count_p);
    /* NULL: the kind keeps none. */
    void (*second_moments)(const void *object, dcp_second_moment_visit_t visit,
                           void *visit_context);
    /* Of state and scratch, on the rank that holds most. */
    int64_t (*bytes)(const dcp_dbuffer_layout_t *layout,
                     const dcp_optimizer_tensor_t *tensors, const int64_t *members,
                     int64_t member_count, int32_t no_windows);
} optim_ops_t;

int64_t optim_elements(const dcp_optimizer_tensor_t *tensor);
/* Is `tensor` one of the members, which ascend? */
int32_t optim_is_member(const int64_t *members, int64_t member_count, int64_t tensor);
/* ERR_ARG names the tensor's number, field, value and rule. */
dcp_status_t optim_check_in(const char *field, double value, double least, double most,
                            const char *rule, int64_t number);
/* beta1, beta2, eps of the Adam family. */
dcp_status_t optim_check_adam(const dcp_optimizer_tensor_t *tensor, int64_t number);

extern const optim_ops_t optim_adamw_ops;     /* adamw.c */
extern const optim_ops_t optim_adamw8bit_ops; /* adamw.c */
extern const optim_ops_t optim_muon_ops;      /* muon.c */
extern const optim_ops_t optim_shampoo_ops;   /* shampoo.c */

#endif
