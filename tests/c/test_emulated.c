/* The emulated link from C: every collective as without it, ends that the model says,
 * and failures while data is on the link. */
#define _GNU_SOURCE
#include "comm_ranks.h"

#include "dcp/clock.h"
#include "dcp/link_model.h"

static const dcp_link_options_t fast = {.rate = 1e9,
                                        .latency_s = 1e-5,
                                        .machine_ranks = 1,
                                        .background = 2,
                                        .dwell_s = 0.05,
                                        .duty = 0.5,
                                        .period_s = 0.01,
                                        .seed = 9};

/* The rank's communicator becomes an emulated one. */
static dcp_status_t
emulate(rank_t *r, dcp_link_options_t options)
{
    dcp_link_ops_t link;
    dcp_comm_t *emulated;
    options.rank_count = r->size;
    options.epoch_ns = dcp_clock_ns();
    DCP_TRY(dcp_comm_broadcast(r->comm, &options.epoch_ns, 1, DCP_I64, 0));
    DCP_TRY(dcp_link_model_create(&options, &link));
    dcp_status_t status = dcp_comm_create_emulated(r->comm, &link, &emulated);
    if (status != DCP_OK) {
        link.destroy(link.context);
        return status;
    }
    r->comm = emulated;
    return DCP_OK;
}

static void
use_everything(rank_t *r)
{
    int32_t size = r->size, rank = r->rank;
    float x[64], y[64];
    int64_t counts[MAX_RANKS], ones[MAX_RANKS], from[MAX_RANKS], to[MAX_RANKS];
    REQUIRE(r, emulate(r, fast) == DCP_OK);
    REQUIRE(r, strcmp(dcp_comm_transport(r->comm), "emulated") == 0);
    for (int32_t i = 0; i < size; i++) {
        counts[i] = i % 3;
        ones[i] = 1;
        to[i] = rank * 10 + i;
    }
    for (int64_t i = 0; i < 64; i++) {
        x[i] = (float)(rank + 1) * (float)i;
    }
    float ranks_sum = (float)(size * (size + 1) / 2);
    REQUIRE(r, dcp_comm_allreduce(r->comm, x, y, 64, DCP_F32, DCP_SUM) == DCP_OK);
    REQUIRE(r, y[63] == ranks_sum * 63.0f);
    int64_t first = 0;
    for (int32_t i = 0; i < rank; i++) {
        first += counts[i];
    }
    REQUIRE(r, dcp_comm_reduce_scatterv(r->comm, x, counts, y, DCP_F32) == DCP_OK);
    for (int64_t i = 0; i < counts[rank]; i++) {
        REQUIRE(r, y[i] == ranks_sum * (float)(first + i));
    }
    int64_t mine[2] = {rank, rank}, all[2 * MAX_RANKS];
    REQUIRE(r, dcp_comm_allgatherv(r->comm, mine, counts, all, DCP_I64) == DCP_OK);
    REQUIRE(r, dcp_comm_alltoallv(r->comm, to, ones, from, ones, DCP_I64) == DCP_OK);
    for (int32_t i = 0; i < size; i++) {
        REQUIRE(r, from[i] == i * 10 + rank);
    }
    int64_t word = rank == size - 1 ? 77 : 0;
    REQUIRE(r, dcp_comm_broadcast(r->comm, &word, 1, DCP_I64, size - 1) == DCP_OK);
    REQUIRE(r, word == 77);
    int64_t next = -1;
    REQUIRE(r, dcp_comm_group_begin(r->comm) == DCP_OK);
    REQUIRE(r, dcp_comm_send(r->comm, &mine[0], 8, (rank + 1) % size) == DCP_OK);
    REQUIRE(r, dcp_comm_recv(r->comm, &next, 8, (rank + size - 1) % size) == DCP_OK);
    REQUIRE(r, dcp_comm_group_end(r->comm) == DCP_OK);
    REQUIRE(r, next == (rank + size - 1) % size);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    dcp_comm_t *half;
    int64_t sum = 0;
    REQUIRE(r, dcp_comm_split(r->comm, rank % 2, 0, &half) == DCP_OK);
    REQUIRE(r, dcp_comm_allreduce(half, mine, &sum, 1, DCP_I64, DCP_SUM) == DCP_OK);
    int64_t wanted = 0;
    for (int32_t i = rank % 2; i < size; i += 2) {
        wanted += i;
    }
    REQUIRE(r, sum == wanted);
    dcp_window_t *window;
    REQUIRE(r, dcp_window_create(half, 64, &window) == DCP_ERR_UNSUPPORTED);
    dcp_comm_destroy(half);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
}

/* A link whose transfers end when the test says, and which writes down what was asked.
 */
typedef struct fixed_link {
    int64_t wait_ns, calls, shared_calls, bytes;
} fixed_link_t;

static dcp_status_t
fixed_transfer(void *context, int64_t start_ns, const int64_t *bytes, int32_t size,
               int32_t shared, int64_t *end_ns_p)
{
    fixed_link_t *link = context;
    link->calls++;
    link->shared_calls += shared;
    for (int32_t i = 0; i < size * size; i++) {
        link->bytes += bytes[i];
    }
    *end_ns_p = start_ns + link->wait_ns;
    return DCP_OK;
}

static void
fixed_destroy(void *context)
{
    free(context);
}

static fixed_link_t *
fix(rank_t *r, int64_t wait_ns)
{
    fixed_link_t *link = calloc(1, sizeof *link);
    link->wait_ns = wait_ns;
    dcp_link_ops_t ops = {fixed_transfer, fixed_destroy, link};
    dcp_comm_t *emulated;
    REQUIRE(r, dcp_comm_create_emulated(r->comm, &ops, &emulated) == DCP_OK);
    r->comm = emulated;
    return link;
}

static void
count_bytes(rank_t *r)
{
    float x[60] = {0};
    int64_t counts[MAX_RANKS] = {0};
    fixed_link_t *link = fix(r, 2000000);
    counts[0] = 60;
    REQUIRE(r, dcp_comm_reduce_scatterv(r->comm, x, counts, x, DCP_F32) == DCP_OK);
    REQUIRE(r, link->bytes == (r->size - 1) * 240);
    REQUIRE(r, link->calls == 1 && link->shared_calls == 1);
    REQUIRE(r, dcp_comm_traffic(r->comm).move_ns >= 1000000);
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_OK);
    REQUIRE(r, link->bytes == (r->size - 1) * 240 && link->calls == 2);
}

/* All wait for a transfer that takes a minute; rank 0 ends the run after a moment. */
static void *
abort_soon(void *argument)
{
    usleep(100000);
    dcp_comm_abort(argument, "enough");
    return NULL;
}

static void
abort_on_the_link(rank_t *r)
{
    pthread_t thread;
    int64_t begin_ns = dcp_clock_ns();
    fix(r, 60 * second_ns);
    if (r->rank == 0) {
        REQUIRE(r, pthread_create(&thread, NULL, abort_soon, r->comm) == 0);
    }
    REQUIRE(r, dcp_comm_barrier(r->comm) == DCP_ERR_ABORTED);
    REQUIRE(r, strstr(dcp_last_error(), "enough") != NULL);
    REQUIRE(r, dcp_clock_ns() - begin_ns < 20 * second_ns);
    if (r->rank == 0) {
        pthread_join(thread, NULL);
    }
}

static void
check_ranks(int32_t size, void (*body)(rank_t *))
{
    rank_t ranks[MAX_RANKS];
    run_ranks(ranks, size, body, 1, 60 * second_ns);
    for (int32_t i = 0; i < size; i++) {
        check_passed += ranks[i].passed;
        check_failed += ranks[i].failed;
    }
}

static void
test_arguments(void)
{
    dcp_comm_t *comm, *emulated;
    dcp_link_ops_t none = {0};
    CHECK_OK(dcp_comm_create_self(&comm));
    CHECK(dcp_comm_create_emulated(comm, &none, &emulated) == DCP_ERR_ARG);
    CHECK(dcp_comm_create_emulated(comm, NULL, &emulated) == DCP_ERR_ARG);
    dcp_comm_destroy(comm);
}

static dcp_status_t
life_of_one(void)
{
    dcp_comm_t *comm, *emulated, *child;
    dcp_link_ops_t link;
    dcp_link_options_t options = fast;
    options.rank_count = 1;
    float x = 1;
    DCP_TRY(dcp_comm_create_self(&comm));
    dcp_status_t status = dcp_link_model_create(&options, &link);
    if (status != DCP_OK) {
        dcp_comm_destroy(comm);
        return status;
    }
    status = dcp_comm_create_emulated(comm, &link, &emulated);
    if (status != DCP_OK) {
        link.destroy(link.context);
        dcp_comm_destroy(comm);
        return status;
    }
    status = dcp_comm_allreduce(emulated, &x, &x, 1, DCP_F32, DCP_SUM);
    if (status == DCP_OK) {
        status = dcp_comm_split(emulated, 0, 0, &child);
    }
    if (status == DCP_OK) {
        dcp_comm_destroy(child);
    }
    dcp_comm_destroy(emulated);
    return status;
}

int
main(void)
{
    test_arguments();
    for (int32_t size = 1; size <= 4; size++) {
        check_ranks(size, use_everything);
    }
    check_ranks(3, count_bytes);
    check_ranks(3, abort_on_the_link);
    check_every_alloc(life_of_one); /* its allocator is not for threads: last */
    return check_finish();
}
