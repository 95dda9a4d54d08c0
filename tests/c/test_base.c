/* base: status, allocation, random numbers, thread pool, bf16. */
#include "check.h"

#include "dcp/dtype.h"
#include "dcp/rng.h"
#include "dcp/threads.h"

#include <math.h>
#include <string.h>

static void
test_status(void)
{
    CHECK(DCP_FAIL(DCP_ERR_ARG, "rows %d must be positive", -1) == DCP_ERR_ARG);
    CHECK(strcmp(dcp_last_error(), "rows -1 must be positive") == 0);
    CHECK(DCP_FAIL(DCP_ERR_IO, "while: %s", dcp_last_error()) == DCP_ERR_IO);
    CHECK(strcmp(dcp_last_error(), "while: rows -1 must be positive") == 0);
    CHECK(strcmp(dcp_status_text((dcp_status_t)77), "unknown status") == 0);
}

static void
test_alloc(void)
{
    int64_t held = dcp_alloc_held_bytes();
    void *p;
    CHECK_OK(dcp_alloc(100, "x", &p));
    CHECK((uintptr_t)p % 64 == 0);
    CHECK(dcp_alloc_held_bytes() > held);
    dcp_free(p);
    CHECK(dcp_alloc_held_bytes() == held);
    CHECK(dcp_alloc_array(INT64_MAX / 4, 8, "x", &p) == DCP_ERR_ARG);
    CHECK(dcp_alloc(-1, "x", &p) == DCP_ERR_ARG);
    dcp_alloc_set_cap(1000);
    CHECK(dcp_alloc(2000, "a big thing", &p) == DCP_ERR_NO_MEM);
    CHECK(strstr(dcp_last_error(), "a big thing") != NULL);
    dcp_alloc_set_cap(0);
    dcp_free(NULL);
}

static void
test_philox(void)
{
    /* Known answers of Random123's kat_vectors for philox4x32 10. */
    uint32_t out[4];
    dcp_philox((const uint32_t[2]){0, 0}, (const uint32_t[4]){0, 0, 0, 0}, out);
    CHECK(out[0] == 0x6627e8d5u && out[1] == 0xe169c58du && out[2] == 0xbc57ac4cu
          && out[3] == 0x9b00dbd8u);
    dcp_philox((const uint32_t[2]){0xa4093822u, 0x299f31d0u},
               (const uint32_t[4]){0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
               out);
    CHECK(out[0] == 0xd16cfe09u && out[1] == 0x94fdccebu && out[2] == 0x5001e420u
          && out[3] == 0x24126ea1u);
    dcp_rng_t rng;
    dcp_rng_init(&rng, 1, 2);
    double sum = 0, squares = 0;
    for (int i = 0; i < 100000; i++) {
        double x = dcp_rng_normal(&rng);
        sum += x;
        squares += x * x;
    }
    CHECK(fabs(sum / 1e5) < 0.02 && fabs(squares / 1e5 - 1) < 0.02);
    for (int i = 0; i < 1000; i++) {
        CHECK(dcp_rng_below(&rng, 7) < 7);
    }
}

typedef struct tally {
    int64_t done[1000];
    int64_t fail_at;
} tally_t;

static dcp_status_t
count_task(void *context, int64_t task, int32_t worker)
{
    tally_t *tally = context;
    (void)worker;
    tally->done[task]++;
    return task >= tally->fail_at ? DCP_FAIL(DCP_ERR_IO, "task %d", (int)task) : DCP_OK;
}

static void
test_pool(void)
{
    for (int32_t size = 1; size <= 4; size++) {
        dcp_pool_t *pool;
        CHECK_OK(dcp_pool_create(size, &pool));
        for (int round = 0; round < 50; round++) {
            tally_t tally = {.fail_at = 1000};
            CHECK_OK(dcp_pool_run(pool, 1000, count_task, &tally));
            int64_t wrong = 0;
            for (int i = 0; i < 1000; i++) {
                wrong += tally.done[i] != 1;
            }
            CHECK(wrong == 0);
        }
        tally_t tally = {.fail_at = 17};
        CHECK(dcp_pool_run(pool, 1000, count_task, &tally) == DCP_ERR_IO);
        CHECK(strcmp(dcp_last_error(), "task 17") == 0);
        CHECK_OK(dcp_pool_run(pool, 0, count_task, &tally));
        dcp_pool_destroy(pool);
    }
    dcp_pool_t *pool;
    CHECK(dcp_pool_create(0, &pool) == DCP_ERR_ARG);
    dcp_pool_destroy(NULL);
}

static dcp_status_t
pool_scenario(void)
{
    dcp_pool_t *pool;
    DCP_TRY(dcp_pool_create(3, &pool));
    void *scratch;
    dcp_status_t status = dcp_pool_scratch(pool, 1, 1000, &scratch);
    if (status == DCP_OK) {
        status = dcp_pool_scratch(pool, 1, 5000, &scratch);
    }
    dcp_pool_destroy(pool);
    return status;
}

static void
test_bf16(void)
{
    CHECK(dcp_f32_to_bf16(1.0f) == 0x3f80);
    CHECK(dcp_f32_to_bf16(1.00390625f) == 0x3f80); /* half way: to even */
    CHECK(dcp_f32_to_bf16(1.01171875f) == 0x3f82);
    CHECK(isnan(dcp_bf16_to_f32(dcp_f32_to_bf16(NAN))));
    CHECK(isinf(dcp_bf16_to_f32(dcp_f32_to_bf16(INFINITY))));
    CHECK(isinf(dcp_bf16_to_f32(dcp_f32_to_bf16(3.4e38f))));
    for (uint32_t i = 0; i < 65536; i++) {
        float x = dcp_bf16_to_f32((uint16_t)i);
        if (!isnan(x) && dcp_f32_to_bf16(x) != i) {
            CHECK(dcp_f32_to_bf16(x) == i);
        }
    }
}

int
main(void)
{
    test_status();
    test_alloc();
    test_philox();
    test_pool();
    check_every_alloc(pool_scenario);
    test_bf16();
    return check_finish();
}
