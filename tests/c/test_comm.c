/* comm: collectives, messages, splits and windows against plain loops, with ranks as
 * threads over one mapping (so that TSan sees every access); failures of every kind;
 * allocations that fail. */
#define _GNU_SOURCE
#include "comm_ranks.h"

#include <sched.h>
#include <stdatomic.h>

static void
collectives_body(rank_t *r)
{
    static const uint64_t bounds[] = {4, 3000, 200000};
    dcp_rng_t rng;
    dcp_rng_init(&rng, r->seed, 0);
    for (uint64_t call = 0; call < 9; call++) {
        uint64_t bound = bounds[call % 3];
        int64_t counts[MAX_RANKS];
        int64_t total = random_counts(&rng, r->size, bound, counts);
        check_reductions(r, call, counts, total);
        check_moves(r, call, &rng, bound);
        REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    }
}

static void
test_collectives(void)
{
    rank_t ranks[MAX_RANKS];
    for (int32_t size = 1; size <= 5; size++) {
        run_ranks(ranks, size, collectives_body, (uint64_t)size, 60 * second_ns);
    }
}

/* Every dtype and operation, on few elements. */
static void
dtypes_body(rank_t *r)
{
    int32_t a[4] = {r->rank, -r->rank, 1 << 30, 7}, b[4];
    REQUIRE(r, dcp_comm_allreduce(r->comm, a, b, 4, DCP_I32, DCP_SUM) == DCP_OK);
    REQUIRE(r, b[0] == 3 && b[1] == -3 && (uint32_t)b[2] == 3u << 30 && b[3] == 21);
    REQUIRE(r, dcp_comm_allreduce(r->comm, a, b, 4, DCP_I32, DCP_MAX) == DCP_OK);
    REQUIRE(r, b[0] == 2 && b[1] == 0);
    int64_t c[2] = {-5 + r->rank, INT64_MAX - 2 + r->rank}, d[2];
    REQUIRE(r, dcp_comm_allreduce(r->comm, c, d, 2, DCP_I64, DCP_MIN) == DCP_OK);
    REQUIRE(r, d[0] == -5 && d[1] == INT64_MAX - 2);
    uint8_t e = (uint8_t)(100 + r->rank), f;
    REQUIRE(r, dcp_comm_allreduce(r->comm, &e, &f, 1, DCP_U8, DCP_SUM) == DCP_OK);
    REQUIRE(r, f == (uint8_t)303);
    double g = 1.0 + 1e-12 * r->rank, h;
    REQUIRE(r, dcp_comm_allreduce(r->comm, &g, &h, 1, DCP_F64, DCP_SUM) == DCP_OK);
    REQUIRE(r, h == 1.0 + (1.0 + 1e-12) + (1.0 + 2e-12));
    /* bf16: summed in fp32, rounded once: 256 + 1 + 1 = 258; in bf16 it would stay 256
     */
    uint16_t i = dcp_f32_to_bf16(r->rank == 0 ? 256.0f : 1.0f), j;
    REQUIRE(r, dcp_comm_allreduce(r->comm, &i, &j, 1, DCP_BF16, DCP_SUM) == DCP_OK);
    REQUIRE(r, dcp_bf16_to_f32(j) == 258.0f);
    float k[3] = {(float)r->rank, r->rank == 1 ? __builtin_nanf("") : 1.0f, -0.5f},
          l[3];
    REQUIRE(r, dcp_comm_allreduce(r->comm, k, l, 3, DCP_F32, DCP_MAX) == DCP_OK);
    REQUIRE(r, l[0] == 2.0f && l[1] != l[1] && l[2] == -0.5f);
    REQUIRE(r, dcp_comm_allreduce(r->comm, k, l, 3, DCP_F32, DCP_MIN) == DCP_OK);
    REQUIRE(r, l[0] == 0.0f && l[1] != l[1]);
}

/* ---- messages, splits, windows ---- */

/* All pairs, several messages each, in an order of each rank's own; some pass the ring.
 */
static void
messages_body(rank_t *r)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 77, 0);
    enum { PER_PAIR = 3, ROUNDS = 3 };
    for (int round = 0; round < ROUNDS; round++) {
        int64_t counts[MAX_RANKS][MAX_RANKS][PER_PAIR];
        float *sent[MAX_RANKS][PER_PAIR], *got[MAX_RANKS][PER_PAIR];
        for (int32_t s = 0; s < r->size; s++) {
            for (int32_t d = 0; d < r->size; d++) {
                for (int m = 0; m < PER_PAIR; m++) {
                    uint64_t bound = m == 1 ? 300000 : 5;
                    counts[s][d][m] = (int64_t)dcp_rng_below(&rng, bound);
                }
            }
        }
        REQUIRE(r, dcp_comm_group_begin(r->comm) == DCP_OK);
        for (int32_t i = 0; i < r->size; i++) {
            int32_t peer = (i + r->rank * 2) % r->size;
            for (int m = 0; m < PER_PAIR; m++) {
                int64_t out = counts[r->rank][peer][m], in = counts[peer][r->rank][m];
                sent[peer][m] = contribution((uint64_t)(peer * 8 + m), r->rank, out);
                got[peer][m] = floats(in);
                if (r->rank % 2 == 0) {
                    REQUIRE(r, dcp_comm_send(r->comm, sent[peer][m], out * 4, peer)
                                   == DCP_OK);
                }
                REQUIRE(r,
                        dcp_comm_recv(r->comm, got[peer][m], in * 4, peer) == DCP_OK);
                if (r->rank % 2 == 1) {
                    REQUIRE(r, dcp_comm_send(r->comm, sent[peer][m], out * 4, peer)
                                   == DCP_OK);
                }
            }
        }
        REQUIRE(r, dcp_comm_group_end(r->comm) == DCP_OK);
        int64_t wrong = 0;
        for (int32_t peer = 0; peer < r->size; peer++) {
            for (int m = 0; m < PER_PAIR; m++) {
                for (int64_t i = 0; i < counts[peer][r->rank][m]; i++) {
                    wrong +=
                        got[peer][m][i] != value((uint64_t)(r->rank * 8 + m), peer, i);
                }
                free(sent[peer][m]);
                free(got[peer][m]);
            }
        }
        REQUIRE(r, wrong == 0);
    }
    /* outside a group: rank 0 to the last, which may be gone afterwards */
    int32_t token = 42;
    if (r->size > 1 && r->rank == 0) {
        REQUIRE(r, dcp_comm_send(r->comm, &token, 4, r->size - 1) == DCP_OK);
    } else if (r->size > 1 && r->rank == r->size - 1) {
        token = 0;
        REQUIRE(r, dcp_comm_recv(r->comm, &token, 4, 0) == DCP_OK);
        REQUIRE(r, token == 42);
    }
}

static void
split_body(rank_t *r)
{
    dcp_comm_t *part, *inner;
    int32_t color = r->rank == 0 ? -1 : r->rank % 2;
    REQUIRE(r, dcp_comm_split(r->comm, color, -r->rank, &part) == DCP_OK);
    REQUIRE(r, (part == NULL) == (r->rank == 0));
    if (part == NULL) {
        return;
    }
    /* ordered by key: the highest rank first */
    int32_t above = 0, members = 0;
    int64_t expected = 0;
    for (int32_t i = 1; i < r->size; i++) {
        members += i % 2 == color;
        above += i % 2 == color && i > r->rank;
        expected += i % 2 == color ? i : 0;
    }
    REQUIRE(r, dcp_comm_rank(part) == above && dcp_comm_size(part) == members);
    int64_t sum = r->rank, got;
    REQUIRE(r, dcp_comm_allreduce(part, &sum, &got, 1, DCP_I64, DCP_SUM) == DCP_OK);
    REQUIRE(r, got == expected);
    REQUIRE(r, dcp_comm_split(part, 0, 0, &inner) == DCP_OK);
    dcp_comm_destroy(part); /* a part of a part lives on its own */
    REQUIRE(r, dcp_comm_allreduce(inner, &sum, &got, 1, DCP_I64, DCP_MAX) == DCP_OK);
    REQUIRE(r, got >= r->rank);
    dcp_window_t *window;
    REQUIRE(r, dcp_window_create(inner, 4096, &window) == DCP_OK);
    dcp_comm_destroy(inner);
    REQUIRE(r, dcp_window_bytes(window, 0) == 4096);
    dcp_window_destroy(window);
}

static void
window_body(rank_t *r)
{
    enum { COUNT = 5003 };
    dcp_window_t *window;
    /* the last rank brings nothing: there is nothing to see of it */
    int64_t bytes = r->rank == r->size - 1 ? 0 : 4096 * (r->rank + 1);
    REQUIRE(r, dcp_window_create(r->comm, bytes, &window) == DCP_OK);
    REQUIRE(r, dcp_window_base(window, r->size - 1) == NULL);
    for (int32_t i = 0; i + 1 < r->size; i++) {
        const char *base = dcp_window_base(window, i);
        REQUIRE(r, (uintptr_t)base % 4096 == 0 && base[4096 * (i + 1) - 1] == 0);
        REQUIRE(r, dcp_window_bytes(window, i) == 4096 * (i + 1));
    }
    float x;
    REQUIRE(r, dcp_window_reduce(window, 0, 1, &x) == DCP_ERR_ARG);
    dcp_window_destroy(window);

    REQUIRE(r, dcp_window_create(r->comm, 4 * COUNT + 64, &window) == DCP_OK);
    float *own = (float *)dcp_window_base(window, r->rank) + 16;
    for (int64_t i = 0; i < COUNT; i++) {
        own[i] = value(9, r->rank, i);
    }
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    int64_t first = r->rank * COUNT / r->size, end = (r->rank + 1) * COUNT / r->size;
    float *aside = floats(end - first);
    REQUIRE(r, dcp_window_reduce(window, 64 + 4 * first, end - first, aside) == DCP_OK);
    REQUIRE(r, dcp_window_reduce(window, 64 + 4 * first, end - first, own + first)
                   == DCP_OK);
    int64_t wrong = memcmp(aside, own + first, (size_t)(end - first) * 4) != 0;
    for (int64_t i = first; i < end; i++) {
        wrong += own[i] != sum_of(9, r->size, i);
    }
    REQUIRE(r, wrong == 0);
    REQUIRE(r, dcp_window_reduce(window, 2, 1, &x) == DCP_ERR_ARG);
    REQUIRE(r, dcp_window_reduce(window, 0, COUNT + 17, &x) == DCP_ERR_ARG);
    free(aside);
    dcp_window_destroy(window);
    /* more than any machine has: an error on all ranks, and the run goes on */
    REQUIRE(r, dcp_window_create(r->comm, r->rank == 0 ? INT64_C(1) << 50 : 0, &window)
                   == DCP_ERR_NO_MEM);
    REQUIRE(r, strstr(dcp_last_error(), "available") != NULL);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
}

static void
test_parts(void)
{
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, 3, dtypes_body, 0, 60 * second_ns);
    for (int32_t size = 1; size <= 4; size++) {
        run_ranks(ranks, size, messages_body, 0, 60 * second_ns);
        run_ranks(ranks, size, window_body, 0, 60 * second_ns);
    }
    run_ranks(ranks, 6, split_body, 0, 60 * second_ns);
}

/* ---- failures ---- */

static void
mismatch_body(rank_t *r)
{
    float x[8] = {0}, y[8];
    keep(r, r->rank == 1 ? dcp_comm_barrier(r->comm)
                         : dcp_comm_allreduce(r->comm, x, y, 5, DCP_F32, DCP_SUM));
    /* sticky, and at once */
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_ERR_MISMATCH);
    REQUIRE(r, strcmp(dcp_last_error(), r->message) == 0);
}

static void
counts_mismatch_body(rank_t *r)
{
    int64_t send[3] = {1, 2, 3}, recv[3] = {0};
    recv[0] = recv[1] = recv[2] = r->rank + 1;
    recv[2] += r->rank == 1; /* rank 1 expects 3 from rank 2, which sends 2 */
    float x[16] = {0}, y[16];
    keep(r, dcp_comm_alltoallv(r->comm, x, send, y, recv, DCP_F32));
}

static void
sizes_mismatch_body(rank_t *r)
{
    char x[8] = {0};
    keep(r, r->rank == 0 ? dcp_comm_send(r->comm, x, 8, 1)
                         : dcp_comm_recv(r->comm, x, 7, 0));
    if (r->rank == 0) { /* its bytes were away: it learns of it in the next call */
        keep(r, dcp_comm_barrier(r->comm));
    }
}

/* Cases F-08: the counts of calls differ. */
static void
left_body(rank_t *r)
{
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    if (r->rank != 1) {
        keep(r, dcp_comm_barrier(r->comm));
    }
}

static atomic_int late_go;

static void
late_body(rank_t *r)
{
    if (r->rank == 1) {
        while (atomic_load(&late_go) < 2) {
            sched_yield();
        }
    }
    keep(r, dcp_comm_barrier(r->comm));
    atomic_fetch_add(&late_go, 1);
}

static void
abort_body(rank_t *r)
{
    dcp_comm_t *part;
    REQUIRE(r, dcp_comm_split(r->comm, r->rank == 2, 0, &part) == DCP_OK);
    if (r->rank == 2) {
        dcp_comm_abort(part, "the loss is NaN");
        keep(r, dcp_comm_barrier(r->comm));
    } else if (r->rank == 1) {
        keep(r, dcp_comm_recv(r->comm, NULL, 0, 0)); /* rank 0 never sends */
    } else {
        keep(r, dcp_comm_barrier(part)); /* rank 1 never comes */
    }
    dcp_comm_destroy(part);
}

static void
arguments_body(rank_t *r)
{
    dcp_comm_t *c = r->comm;
    float x[8] = {0}, y[8];
    int64_t negative[2] = {4, -1}, good[2] = {2, 2};
    int64_t huge[2] = {INT64_MAX / 4, INT64_MAX / 4};
    REQUIRE(r, dcp_comm_barrier(NULL) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_allgatherv(c, x, negative, y, DCP_F32) == DCP_ERR_ARG);
    REQUIRE(r, strstr(dcp_last_error(), "counts[1] = -1") != NULL);
    REQUIRE(r, dcp_comm_allgatherv(c, x, huge, y, DCP_F32) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_allgatherv(c, x, good, NULL, DCP_F32) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_allgatherv(c, y + 1, good, y, DCP_F32) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_reduce_scatterv(c, x, good, x + 1, DCP_F32) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_allreduce(c, x, x + 1, 4, DCP_F32, DCP_SUM) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_allreduce(c, x, y, 4, (dcp_dtype_t)99, DCP_SUM) == DCP_ERR_ARG);
    REQUIRE(r,
            dcp_comm_allreduce(c, x, y, 4, DCP_F32, (dcp_reduce_op_t)9) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_broadcast(c, x, 4, DCP_F32, 2) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_send(c, x, 4, -1) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_recv(c, x, -4, 0) == DCP_ERR_ARG);
    REQUIRE(r, dcp_comm_group_end(c) == DCP_ERR_STATE);
    REQUIRE(r, dcp_comm_group_begin(c) == DCP_OK);
    REQUIRE(r, dcp_comm_barrier(c) == DCP_ERR_STATE);
    REQUIRE(r, dcp_comm_send(c, x, 4, r->rank) == DCP_OK);
    REQUIRE(r, dcp_comm_group_end(c) == DCP_ERR_STATE); /* no receive */
    dcp_comm_t *part;
    REQUIRE(r, dcp_comm_split(c, -2, 0, &part) == DCP_ERR_ARG);
    dcp_window_t *window;
    REQUIRE(r, dcp_window_create(c, -1, &window) == DCP_ERR_ARG);
    /* and none of this has hurt */
    REQUIRE(r, dcp_comm_allgatherv(c, x, good, y, DCP_F32) == DCP_OK);
    REQUIRE(r, dcp_comm_barrier(c) == DCP_OK);
}

static void
check_all(rank_t *ranks, int32_t size, dcp_status_t status, const char *text)
{
    for (int32_t i = 0; i < size; i++) {
        CHECK(ranks[i].status == status);
        CHECK(strstr(ranks[i].message, text) != NULL);
        CHECK(strcmp(ranks[i].message, ranks[0].message) == 0);
        if (ranks[i].status != status || strstr(ranks[i].message, text) == NULL) {
            printf("rank %d: %d '%s'\n", (int)i, (int)ranks[i].status,
                   ranks[i].message);
        }
    }
}

static void
test_failures(void)
{
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, 3, mismatch_body, 0, 60 * second_ns);
    check_all(ranks, 3, DCP_ERR_MISMATCH, "rank 0 called allreduce of 5 float32 (sum)");
    check_all(ranks, 3, DCP_ERR_MISMATCH, "rank 1 called barrier (call 1)");
    run_ranks(ranks, 3, counts_mismatch_body, 0, 60 * second_ns);
    check_all(ranks, 3, DCP_ERR_MISMATCH,
              "rank 2 sends 2 float32 to rank 1, which expects 3");
    run_ranks(ranks, 2, sizes_mismatch_body, 0, 60 * second_ns);
    check_all(ranks, 2, DCP_ERR_MISMATCH,
              "rank 0 sent 8 bytes to rank 1, which expected 7");
    run_ranks(ranks, 3, left_body, 0, 60 * second_ns);
    CHECK(ranks[0].status == DCP_ERR_PEER && ranks[2].status == DCP_ERR_PEER);
    CHECK(strstr(ranks[0].message, "rank 1 (process ") != NULL);
    CHECK(strstr(ranks[0].message, "barrier (call 2)") != NULL);
    atomic_store(&late_go, 0);
    run_ranks(ranks, 3, late_body, 0, second_ns / 5);
    check_all(ranks, 3, DCP_ERR_TIMEOUT, "rank 1 (process ");
    check_all(ranks, 3, DCP_ERR_TIMEOUT,
              "did not come to barrier (call 1) within 0.2 s");
    run_ranks(ranks, 3, abort_body, 0, 60 * second_ns);
    check_all(ranks, 3, DCP_ERR_ABORTED, "aborted: the loss is NaN");
    CHECK(strncmp(ranks[0].message, "rank 2 (process ", 16) == 0);
    run_ranks(ranks, 2, arguments_body, 0, 60 * second_ns);
}

static atomic_int interrupt_stage; /* 1: rank 0 goes to wait, 2: interrupted, 3: back */

static bool
poll_interrupt(void)
{
    int wanted = 1;
    return atomic_compare_exchange_strong(&interrupt_stage, &wanted, 2);
}

static void
interrupt_body(rank_t *r)
{
    if (r->rank == 0) {
        atomic_store(&interrupt_stage, 1);
    }
    /* rank 1 comes only then, or the barrier might still be complete for it */
    while (r->rank == 1 && atomic_load(&interrupt_stage) != 3) {
        sched_yield();
    }
    keep(r, dcp_comm_barrier(r->comm));
    if (r->rank == 0) {
        atomic_store(&interrupt_stage, 3);
    }
}

static void
test_interrupt(void)
{
    rank_t ranks[2];
    dcp_comm_set_interrupt(poll_interrupt);
    run_ranks(ranks, 2, interrupt_body, 0, 60 * second_ns);
    dcp_comm_set_interrupt(NULL);
    CHECK(ranks[0].status == DCP_ERR_INTERRUPT);
    CHECK(ranks[1].status == DCP_ERR_ABORTED);
    CHECK(strstr(ranks[1].message, "rank 0 (process ") != NULL);
    CHECK(strstr(ranks[1].message, "was interrupted in barrier (call 1)") != NULL);
}

static void
test_self(void)
{
    dcp_comm_t *comm, *part;
    CHECK_OK(dcp_comm_create_self(&comm));
    CHECK(dcp_comm_size(comm) == 1 && strcmp(dcp_comm_transport(comm), "self") == 0);
    rank_t r = {.size = 1, .comm = comm, .seed = 3};
    collectives_body(&r);
    messages_body(&r);
    window_body(&r);
    CHECK_OK(dcp_comm_split(comm, 0, 0, &part));
    dcp_comm_abort(part, "enough");
    CHECK(dcp_comm_barrier(part) == DCP_ERR_ABORTED);
    dcp_comm_destroy(part);
    CHECK_OK(dcp_comm_split(comm, -1, 0, &part));
    CHECK(part == NULL);
    dcp_comm_destroy(comm);
    dcp_comm_destroy(NULL);
    CHECK(r.failed == 0);
    check_passed += r.passed;
}

static dcp_status_t
shm_scenario(void)
{
    char run_id[40];
    snprintf(run_id, sizeof run_id, "alloc-%d", (int)getpid());
    dcp_comm_options_t options = {.size = 1, .run_id = run_id};
    dcp_comm_t *comm, *part = NULL;
    DCP_TRY(dcp_comm_create_shm(&options, &comm));
    dcp_window_t *window = NULL;
    char x[4] = {1}, y[4];
    dcp_status_t status = dcp_comm_split(comm, 0, 0, &part);
    if (status == DCP_OK) {
        status = dcp_window_create(part, 8192, &window);
    }
    if (status == DCP_OK) {
        status = dcp_comm_group_begin(comm);
    }
    for (int i = 0; i < 20 && status == DCP_OK; i++) {
        status = dcp_comm_send(comm, x, 4, 0);
        status = status == DCP_OK ? dcp_comm_recv(comm, y, 4, 0) : status;
    }
    if (status == DCP_OK) {
        status = dcp_comm_group_end(comm);
    }
    dcp_window_destroy(window);
    dcp_comm_destroy(part);
    dcp_comm_destroy(comm);
    return status;
}

int
main(void)
{
    int64_t held = dcp_alloc_held_bytes();
    test_self();
    test_collectives();
    test_parts();
    test_failures();
    test_interrupt();
    CHECK(dcp_alloc_held_bytes() == held);
    check_every_alloc(shm_scenario);
    return check_finish();
}
