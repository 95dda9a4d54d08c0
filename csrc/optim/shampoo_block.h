/* One block of a matrix under Shampoo: its statistics, roots and update. */
#ifndef DCP_OPTIM_SHAMPOO_BLOCK_H
#define DCP_OPTIM_SHAMPOO_BLOCK_H

#include "dcp/device.h"

#include <stdbool.h>

typedef struct shampoo_numbers {
    float beta1, beta2, eps;
    float bias1, bias2; /* 1 - beta^t */
} shampoo_numbers_t;

/* State of a block of [rows, columns]; left and right are square with the stride of
 * their tensor's largest block. */
typedef struct shampoo_block {
    int64_t rows, columns;
    float *left, *left_root; /* [rows, rows] */
    int64_t left_stride;
    float *right, *right_root; /* [columns, columns] */
    int64_t right_stride;
    float *m, *v, *data; /* [rows, columns] with row stride `stride` */
    int64_t stride;
} shampoo_block_t;

/* Bytes of scratch for blocks of at most [rows, columns]. */
int64_t shampoo_block_scratch(int64_t rows, int64_t columns);
/* data holds the gradient and becomes the direction of the update, without learning
 * rate and decay. Roots are made where they are due or have never been. Blocks. */
dcp_status_t shampoo_block_update(const dcp_device_ops_t *device, dcp_queue_t *queue,
                                  const shampoo_block_t *block, bool due,
                                  const shampoo_numbers_t *numbers, void *scratch);

#endif
