/* Copies of many pieces: small ones in registers, much memory around the cache.
 *
 * memcpy goes around the cache only for one large piece. Rows that are much together do
 * so here from ROW_BYTES on, where it pays; rows of a few bytes are moved by sizes
 * known to the compiler, about 1 ns each. */
#include "copy_ops.h"
#include "dcp/isa.h"
#include "dcp/kernels.h"

#include <string.h>

enum {
    ROW_BYTES = 1024,      /* least that goes around the cache */
    LARGE_BYTES = 8 << 20, /* of all rows of a set; of one: memcpy knows */
};

#if defined(__x86_64__)
static const copy_ops_t *
ops(void)
{
    dcp_isa_t isa = dcp_isa_vectors();
    return isa == DCP_ISA_AVX512 ? &copy_ops_avx512
           : isa == DCP_ISA_AVX2 ? &copy_ops_avx2
                                 : &copy_ops_portable;
}
#else
static const copy_ops_t *
ops(void)
{
    return &copy_ops_portable;
}
#endif

void
dcp_copy_rows(void *to, int64_t to_step, const void *from, int64_t from_step,
              int64_t bytes, int64_t row_count, int64_t total_bytes)
{
    if (total_bytes >= LARGE_BYTES && bytes >= ROW_BYTES && bytes < LARGE_BYTES) {
        ops()->stream_rows(to, to_step, from, from_step, bytes, row_count);
        return;
    }
    char *out = to;
    const char *in = from;
    for (int64_t i = 0; i < row_count; i++, out += to_step, in += from_step) {
        switch (bytes) {
        case 4:
            memcpy(out, in, 4);
            break;
        case 8:
            memcpy(out, in, 8);
            break;
        case 16:
            memcpy(out, in, 16);
            break;
        case 32:
            memcpy(out, in, 32);
            break;
        default:
            memcpy(out, in, (size_t)bytes);
        }
    }
}
