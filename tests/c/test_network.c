/* The network simulator from C: memory, copies, the link's model, many events. */
#include "check.h"

#include "dcp/link_model.h"
#include "dcp/network.h"

#include <math.h>

static const dcp_network_options_t switch_of_4 = {.host_count = 4,
                                                  .host_rate = 1e9,
                                                  .oversubscription = 1,
                                                  .latency_s = 1e-4,
                                                  .seed = 7};
static const int32_t hosts[4] = {0, 1, 2, 3};

static dcp_status_t
make(dcp_network_t **network_p)
{
    dcp_background_t job = {.hosts = hosts,
                            .host_count = 4,
                            .compute_s = 0.01,
                            .bytes = 1e7,
                            .collective = DCP_COLLECTIVE_TWO_LEVEL,
                            .dwell_s = 0.5};
    DCP_TRY(dcp_network_create(&switch_of_4, network_p));
    dcp_status_t status = DCP_OK;
    for (int i = 0; status == DCP_OK && i < 3; i++) {
        status = dcp_network_add_background(*network_p, &job);
    }
    if (status != DCP_OK) {
        dcp_network_destroy(*network_p);
        *network_p = NULL;
    }
    return status;
}

/* Transfers one after the other; the end of the last. */
static dcp_status_t
send(dcp_network_t *network, int count, double *end_s_p)
{
    dcp_flow_t flows[16];
    int64_t flow_count, transfer;
    DCP_TRY(dcp_collective_flows(&switch_of_4, DCP_COLLECTIVE_ALLTOALL, hosts, 4, 1e7,
                                 0, flows, &flow_count, NULL));
    for (int i = 0; i < count; i++) {
        DCP_TRY(dcp_network_begin(network, dcp_network_now(network) + 0.005, flows,
                                  flow_count, &transfer));
        DCP_TRY(dcp_network_wait(network, transfer, end_s_p));
    }
    return DCP_OK;
}

static dcp_status_t
whole_life(void)
{
    dcp_network_t *network = NULL, *copy = NULL;
    double end_s = 0, copy_s = 0;
    DCP_TRY(make(&network));
    dcp_status_t status = send(network, 3, &end_s);
    if (status == DCP_OK) {
        status = dcp_network_copy(network, &copy);
    }
    if (status == DCP_OK) {
        status = send(copy, 2, &copy_s);
    }
    dcp_network_destroy(copy);
    dcp_network_destroy(network);
    return status;
}

static void
test_copies_go_on_alike_in_the_middle_of_a_transfer(void)
{
    dcp_network_t *network, *copy;
    dcp_flow_t flow = {0, 1, 5e8};
    int64_t transfer;
    double one_s, other_s;
    CHECK_OK(make(&network));
    CHECK_OK(dcp_network_begin(network, 0.3, &flow, 1, &transfer));
    CHECK_OK(dcp_network_run_until(network, 0.45));
    CHECK_OK(dcp_network_copy(network, &copy));
    CHECK_OK(dcp_network_wait(network, transfer, &one_s));
    CHECK_OK(dcp_network_wait(copy, transfer, &other_s));
    CHECK(one_s == other_s && one_s > 0.8);
    CHECK(dcp_network_present(network) == dcp_network_present(copy));
    CHECK(dcp_network_wait(network, transfer, &one_s) == DCP_ERR_ARG);
    dcp_network_destroy(copy);
    dcp_network_destroy(network);
}

static void
test_overlapping_transfers_wait_in_any_order(void)
{
    dcp_network_t *network;
    dcp_flow_t flow = {0, 1, 1e9};
    int64_t first, second;
    double first_s, second_s;
    CHECK_OK(dcp_network_create(&switch_of_4, &network));
    CHECK_OK(dcp_network_begin(network, 0.0, &flow, 1, &first));
    CHECK_OK(dcp_network_begin(network, 0.5, &flow, 1, &second));
    CHECK_OK(dcp_network_wait(network, second, &second_s));
    CHECK_OK(dcp_network_wait(network, first, &first_s));
    /* alone for half a second, half the rate until the first is through */
    CHECK(fabs(first_s - (1.5 + 1e-4)) < 1e-9);
    CHECK(fabs(second_s - (2.0 + 1e-4)) < 1e-9);
    CHECK(dcp_network_run_until(network, 0.1) == DCP_ERR_ARG);
    CHECK(dcp_network_begin(network, 0.1, &flow, 1, &first) == DCP_ERR_ARG);
    dcp_network_destroy(network);
}

static void
test_nothing_to_send_takes_the_latency(void)
{
    dcp_network_t *network;
    dcp_flow_t flows[2] = {{0, 1, 0.0}, {2, 2, 1e9}};
    int64_t transfer;
    double end_s;
    CHECK_OK(dcp_network_create(&switch_of_4, &network));
    CHECK_OK(dcp_network_begin(network, 1.0, flows, 2, &transfer));
    CHECK_OK(dcp_network_wait(network, transfer, &end_s));
    CHECK(end_s == 1.0 + 1e-4);
    CHECK_OK(dcp_network_begin(network, 2.0, NULL, 0, &transfer));
    CHECK_OK(dcp_network_wait(network, transfer, &end_s));
    CHECK(end_s == 2.0 + 1e-4);
    dcp_network_destroy(network);
}

static void
test_many_events(void)
{
    dcp_network_t *network;
    double end_s = 0;
    CHECK_OK(make(&network));
    CHECK_OK(send(network, 20000, &end_s));
    CHECK(end_s > 20000 * 0.005 && end_s < 20000 * 0.2);
    dcp_network_destroy(network);
}

static const dcp_link_options_t link_options = {.rate = 1e6,
                                                .latency_s = 1e-4,
                                                .rank_count = 4,
                                                .machine_ranks = 2,
                                                .background = 2,
                                                .dwell_s = 1,
                                                .duty = 0.75,
                                                .period_s = 1,
                                                .seed = 3,
                                                .epoch_ns = 1000};

static void
test_models_of_a_link_agree_and_what_is_not_shared_leaves_no_trace(void)
{
    dcp_link_ops_t one, two;
    int64_t bytes[16] = {0}, end_one, end_two, end_extra;
    CHECK_OK(dcp_link_model_create(&link_options, &one));
    CHECK_OK(dcp_link_model_create(&link_options, &two));
    int64_t start = 1000;
    for (int i = 0; i < 50; i++) {
        bytes[0 * 4 + 2] = 10000 * (i % 7);
        bytes[3 * 4 + 1] = 5000 * (i % 3);
        bytes[0 * 4 + 1] = 1 << 30; /* inside a machine: free */
        start += 300000000;
        if (i % 5 == 0) {
            CHECK_OK(two.transfer(two.context, start, bytes, 4, 0, &end_extra));
        }
        CHECK_OK(one.transfer(one.context, start, bytes, 4, 1, &end_one));
        CHECK_OK(two.transfer(two.context, start, bytes, 4, 1, &end_two));
        CHECK(end_one == end_two && end_one >= start + 100000);
    }
    CHECK(one.transfer(one.context, start, bytes, 3, 1, &end_one) == DCP_ERR_ARG);
    one.destroy(one.context);
    two.destroy(two.context);
}

static dcp_status_t
life_of_a_link(void)
{
    dcp_link_ops_t link;
    int64_t bytes[16] = {0}, end_ns;
    bytes[2] = 1000;
    DCP_TRY(dcp_link_model_create(&link_options, &link));
    dcp_status_t status = link.transfer(link.context, 2000, bytes, 4, 0, &end_ns);
    if (status == DCP_OK) {
        status = link.transfer(link.context, 2000, bytes, 4, 1, &end_ns);
    }
    link.destroy(link.context);
    return status;
}

int
main(void)
{
    test_copies_go_on_alike_in_the_middle_of_a_transfer();
    test_overlapping_transfers_wait_in_any_order();
    test_nothing_to_send_takes_the_latency();
    test_many_events();
    test_models_of_a_link_agree_and_what_is_not_shared_leaves_no_trace();
    check_every_alloc(whole_life);
    check_every_alloc(life_of_a_link);
    return check_finish();
}
