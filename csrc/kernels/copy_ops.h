/* The table of isa/copy_kernel.c; private to kernels/. */
#ifndef COPY_OPS_H
#define COPY_OPS_H

#include <stdint.h>

typedef struct copy_ops {
    /* `row_count` rows of `bytes`, written around the cache, fenced */
    void (*stream_rows)(char *to, int64_t to_step, const char *from, int64_t from_step,
                        int64_t bytes, int64_t row_count);
} copy_ops_t;

extern const copy_ops_t copy_ops_portable, copy_ops_avx2, copy_ops_avx512;

#endif
