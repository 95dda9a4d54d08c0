/* shard layout: every layout that comes out is checked from the definition (no overlap,
 * no block cut, alignment), and on small cases S is compared with an oracle that knows
 * no greedy: it keeps every element where the tensors placed so far may end. */
#include "check.h"

#include "dcp/rng.h"
#include "dcp/shard.h"

#include <stdbool.h>
#include <string.h>

enum { TENSOR_SLOTS = 6, ELEMENT_SLOTS = 600 };

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The definition: no border k S inside the tensor that is not a whole number of blocks
 * from its start. */
static bool
start_is_valid(dcp_layout_tensor_t tensor, int64_t start, int64_t ranks, int64_t shard)
{
    int64_t end = start + tensor.element_count;
    for (int64_t k = 1; k <= ranks; k++) {
        int64_t border = k * shard;
        if (border > start && border < end
            && (border - start) % tensor.block_count != 0) {
            return false;
        }
    }
    return end <= ranks * shard;
}

static bool
layout_is_valid(const dcp_layout_tensor_t *tensors, int64_t count, int64_t ranks,
                int64_t unit, int64_t shard, const int64_t *starts)
{
    bool valid = shard % unit == 0;
    for (int64_t i = 0; i < count; i++) {
        valid = valid && starts[i] >= 0 && starts[i] % unit == 0
                && start_is_valid(tensors[i], starts[i], ranks, shard);
        for (int64_t j = 0; j < i; j++) {
            int64_t end_i = starts[i] + tensors[i].element_count;
            int64_t end_j = starts[j] + tensors[j].element_count;
            valid = valid
                    && (tensors[i].element_count == 0 || tensors[j].element_count == 0
                        || end_i <= starts[j] || end_j <= starts[i]);
        }
    }
    return valid;
}

/* Marks in `next` every end of the tensor when it starts at or after an end in `ends`.
 */
static void
oracle_add(const bool *ends, dcp_layout_tensor_t tensor, int64_t ranks, int64_t unit,
           int64_t shard, bool *next)
{
    bool reached = false;
    for (int64_t start = 0; start <= ranks * shard; start++) {
        reached = reached || ends[start];
        if (reached && start % unit == 0
            && start_is_valid(tensor, start, ranks, shard)) {
            next[start + tensor.element_count] = true;
        }
    }
}

/* Least S of all placements, in this order or in any; -1: above what fits the slots. */
static int64_t
oracle(const dcp_layout_tensor_t *tensors, int64_t count, int64_t ranks, int64_t unit,
       bool any_order)
{
    static bool ends[1 << TENSOR_SLOTS][ELEMENT_SLOTS];
    for (int64_t shard = 0; ranks * shard < ELEMENT_SLOTS; shard += unit) {
        memset(ends, 0, sizeof ends);
        ends[0][0] = true;
        for (int32_t set = 0; set < 1 << count; set++) {
            for (int64_t i = 0; i < count; i++) {
                bool next_in_order = set == (1 << i) - 1;
                if ((set >> i & 1) == 0 && (any_order || next_in_order)) {
                    oracle_add(ends[set], tensors[i], ranks, unit, shard,
                               ends[set | 1 << i]);
                }
            }
        }
        for (int64_t end = 0; end <= ranks * shard; end++) {
            if (ends[(1 << count) - 1][end]) {
                return shard;
            }
        }
    }
    return -1;
}

static int64_t
random_tensors(dcp_rng_t *rng, dcp_layout_tensor_t *tensors)
{
    static const int64_t widths[] = {1, 1, 2, 3, 4, 5, 6, 7, 8, 12};
    int64_t count = (int64_t)dcp_rng_below(rng, TENSOR_SLOTS + 1);
    for (int64_t i = 0; i < count; i++) {
        int64_t width = widths[dcp_rng_below(rng, 10)];
        int64_t rows = (int64_t)dcp_rng_below(rng, 9);
        int64_t block_rows = 1 + (int64_t)dcp_rng_below(rng, 3);
        tensors[i].element_count = rows * width;
        tensors[i].block_count = width * (rows > 0 ? smaller(block_rows, rows) : 1);
        uint64_t kind = dcp_rng_below(rng, 8);
        if (kind == 0 && rows > 0) { /* whole on one rank */
            tensors[i].block_count = tensors[i].element_count;
        } else if (kind == 1) { /* tiles: blocks that are no rows */
            tensors[i].block_count = 1 + (int64_t)dcp_rng_below(rng, 12);
        }
        if (i > 0 && dcp_rng_below(rng, 3) == 0) {
            tensors[i] = tensors[dcp_rng_below(rng, (uint64_t)i)];
        }
    }
    return count;
}

/* Insertion sort into the order that SHAPE and SIZE promise. */
static void
sort_as(dcp_layout_order_t order, dcp_layout_tensor_t *tensors, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        for (int64_t j = i; j > 0; j--) {
            dcp_layout_tensor_t a = tensors[j - 1], b = tensors[j];
            bool by_block = order == DCP_ORDER_SHAPE && a.block_count != b.block_count;
            bool swap = by_block ? a.block_count < b.block_count
                                 : a.element_count < b.element_count;
            if (!swap) {
                break;
            }
            tensors[j - 1] = b;
            tensors[j] = a;
        }
    }
}

static void
test_small_against_oracle(void)
{
    static const int64_t units[] = {1, 1, 2, 3, 4, 8};
    dcp_rng_t rng;
    dcp_rng_init(&rng, 6, 0);
    int64_t invalid = 0, not_least = 0, compared = 0;
    for (int n = 0; n < 4000; n++) {
        dcp_layout_tensor_t tensors[TENSOR_SLOTS];
        int64_t count = random_tensors(&rng, tensors);
        int64_t ranks = 1 + (int64_t)dcp_rng_below(&rng, 7);
        int64_t unit = units[dcp_rng_below(&rng, 6)];
        dcp_layout_order_t order = (dcp_layout_order_t)(n % 4);
        bool any_order = order == DCP_ORDER_SEARCH;
        int64_t starts[TENSOR_SLOTS], shard = -1;
        CHECK_OK(dcp_layout_plan(tensors, count, ranks, unit, order, starts, &shard));
        invalid += !layout_is_valid(tensors, count, ranks, unit, shard, starts);
        if (order == DCP_ORDER_SHAPE || order == DCP_ORDER_SIZE) {
            sort_as(order, tensors, count);
        }
        int64_t least = oracle(tensors, count, ranks, unit, any_order);
        compared += least >= 0;
        not_least += least >= 0 && shard != least;
    }
    CHECK(invalid == 0);
    CHECK(not_least == 0);
    CHECK(compared > 3500);
}

static void
test_fits_against_oracle(void)
{
    dcp_rng_t rng;
    dcp_rng_init(&rng, 7, 0);
    int64_t wrong = 0, fitting = 0, gaps = 0;
    for (int n = 0; n < 500; n++) {
        dcp_layout_tensor_t tensors[TENSOR_SLOTS];
        int64_t count = random_tensors(&rng, tensors);
        int64_t ranks = 1 + (int64_t)dcp_rng_below(&rng, 5);
        bool before = false;
        for (int64_t shard = 0; shard < 40; shard++) {
            static bool ends[TENSOR_SLOTS + 1][ELEMENT_SLOTS];
            memset(ends, 0, sizeof ends);
            ends[0][0] = true;
            for (int64_t i = 0; i < count; i++) {
                oracle_add(ends[i], tensors[i], ranks, 1, shard, ends[i + 1]);
            }
            bool exists = memchr(ends[count], 1, ELEMENT_SLOTS) != NULL;
            int64_t starts[TENSOR_SLOTS];
            bool fits =
                dcp_layout_fits(tensors, NULL, count, ranks, 1, shard, starts) != 0;
            wrong += fits != exists;
            wrong += fits && !layout_is_valid(tensors, count, ranks, 1, shard, starts);
            fitting += fits;
            gaps += before && !fits;
            before = fits;
        }
    }
    CHECK(wrong == 0);
    CHECK(fitting > 1000);
    CHECK(gaps > 0); /* fitting is not monotone in S: the reason for the candidates */
}

/* Many tensors and ranks: too large for the oracle, valid all the same, and never worse
 * than all in one order. */
static void
test_many(void)
{
    enum { COUNT = 300 };
    static dcp_layout_tensor_t tensors[COUNT];
    static int64_t starts[COUNT];
    dcp_rng_t rng;
    dcp_rng_init(&rng, 8, 0);
    for (int n = 0; n < 12; n++) {
        int64_t total = 0;
        for (int64_t i = 0; i < COUNT; i++) {
            int64_t width = 1 + (int64_t)dcp_rng_below(&rng, n % 2 ? 64 : 2000);
            int64_t rows = (int64_t)dcp_rng_below(&rng, 500);
            tensors[i] = (dcp_layout_tensor_t){rows * width, width};
            total += rows * width;
        }
        int64_t ranks = 1 + (int64_t)dcp_rng_below(&rng, 1200);
        int64_t shards[4];
        for (int order = 0; order < 4; order++) {
            CHECK_OK(dcp_layout_plan(tensors, COUNT, ranks, 4,
                                     (dcp_layout_order_t)order, starts,
                                     &shards[order]));
            CHECK(layout_is_valid(tensors, COUNT, ranks, 4, shards[order], starts));
            CHECK(ranks * shards[order] >= total);
        }
        CHECK(shards[3] <= shards[0]);
    }
}

/* Too large for the oracle, small enough to try every S from the lower bound on with
 * the greedy check, which the oracle has proved: the scans skip nothing that fits. */
static void
test_middle_size_is_the_least(void)
{
    enum { COUNT = 20 };
    dcp_rng_t rng;
    dcp_rng_init(&rng, 9, 0);
    int64_t not_least = 0, above = 0;
    for (int n = 0; n < 60; n++) {
        dcp_layout_tensor_t tensors[COUNT];
        int64_t starts[COUNT], shard, total = 0, largest = 1;
        int64_t ranks = 2 + (int64_t)dcp_rng_below(&rng, 30);
        for (int64_t i = 0; i < COUNT; i++) {
            int64_t width = 1 + (int64_t)dcp_rng_below(&rng, n % 3 ? 24 : 96);
            int64_t rows = 1 + (int64_t)dcp_rng_below(&rng, n % 2 ? 40 : 400);
            int64_t block = width * smaller(rows, 1 + (int64_t)dcp_rng_below(&rng, 4));
            tensors[i] = (dcp_layout_tensor_t){rows * width, block};
            total += rows * width;
            largest = block > largest ? block : largest;
        }
        CHECK_OK(
            dcp_layout_plan(tensors, COUNT, ranks, 4, DCP_ORDER_MODEL, starts, &shard));
        int64_t least = (total / ranks > largest ? total / ranks : largest) / 4 * 4;
        int64_t bound = least;
        while (!dcp_layout_fits(tensors, NULL, COUNT, ranks, 4, least, starts)) {
            least += 4;
        }
        not_least += least != shard;
        above += least > bound + 4;
    }
    CHECK(not_least == 0);
    CHECK(above > 20);
}

/* Tensors that are one block each: never worse than the largest first to the rank that
 * has least, which is within 4/3 of the best. */
static void
test_parcels(void)
{
    enum { COUNT = 200 };
    static dcp_layout_tensor_t tensors[COUNT], sorted[COUNT];
    static int64_t starts[COUNT];
    dcp_rng_t rng;
    dcp_rng_init(&rng, 10, 0);
    for (int n = 0; n < 12; n++) {
        int64_t ranks = 2 + (int64_t)dcp_rng_below(&rng, 30), shard, loads[40] = {0};
        for (int64_t i = 0; i < COUNT; i++) {
            int64_t most_units = 1 + 5000 / (n + 1);
            int64_t size = 4 * (1 + (int64_t)dcp_rng_below(&rng, (uint64_t)most_units));
            sorted[i] = tensors[i] = (dcp_layout_tensor_t){size, size};
        }
        sort_as(DCP_ORDER_SIZE, sorted, COUNT);
        for (int64_t i = 0; i < COUNT; i++) {
            int64_t least = 0;
            for (int64_t r = 1; r < ranks; r++) {
                least = loads[r] < loads[least] ? r : least;
            }
            loads[least] += sorted[i].element_count;
        }
        int64_t most = 0;
        for (int64_t r = 0; r < ranks; r++) {
            most = loads[r] > most ? loads[r] : most;
        }
        CHECK_OK(dcp_layout_plan(tensors, COUNT, ranks, 4, DCP_ORDER_SEARCH, starts,
                                 &shard));
        CHECK(layout_is_valid(tensors, COUNT, ranks, 4, shard, starts));
        CHECK(shard <= most);
    }
    /* beside what may be cut, and one that is larger than any share */
    for (int64_t i = 0; i < COUNT; i += 3) {
        tensors[i].block_count = 1 + i % 7;
    }
    tensors[1] = (dcp_layout_tensor_t){1000000, 1000000};
    int64_t shard;
    CHECK_OK(dcp_layout_plan(tensors, COUNT, 16, 4, DCP_ORDER_SEARCH, starts, &shard));
    CHECK(layout_is_valid(tensors, COUNT, 16, 4, shard, starts));
    CHECK(shard == 1000000);
}

static void
test_orders(void)
{
    dcp_layout_tensor_t tensors[] = {{8, 1}, {24, 4}, {0, 1}, {16, 8}, {24, 2}};
    int64_t starts[5], shard;
    CHECK_OK(dcp_layout_plan(tensors, 5, 1, 4, DCP_ORDER_MODEL, starts, &shard));
    CHECK(shard == 72 && starts[0] == 0 && starts[1] == 8 && starts[3] == 32
          && starts[4] == 48);
    CHECK_OK(dcp_layout_plan(tensors, 5, 1, 4, DCP_ORDER_SHAPE, starts, &shard));
    CHECK(starts[3] == 0 && starts[1] == 16 && starts[4] == 40 && starts[0] == 64);
    CHECK_OK(dcp_layout_plan(tensors, 5, 1, 4, DCP_ORDER_SIZE, starts, &shard));
    CHECK(starts[1] == 0 && starts[4] == 24 && starts[3] == 48 && starts[0] == 64);
}

static void
test_limits(void)
{
    int64_t starts[3], shard = 7;
    CHECK_OK(dcp_layout_plan(NULL, 0, 5, 4, DCP_ORDER_SEARCH, starts, &shard));
    CHECK(shard == 0);
    dcp_layout_tensor_t empty[] = {{0, 1}, {0, 9}};
    CHECK_OK(dcp_layout_plan(empty, 2, 5, 4, DCP_ORDER_MODEL, starts, &shard));
    CHECK(shard == 0 && starts[0] == 0 && starts[1] == 0);
    /* more ranks than rows: three rows on eight ranks */
    dcp_layout_tensor_t rows[] = {{3 * 8, 8}};
    CHECK_OK(dcp_layout_plan(rows, 1, 8, 4, DCP_ORDER_MODEL, starts, &shard));
    CHECK(shard == 8);
    /* a block larger than an even share sets S */
    dcp_layout_tensor_t block[] = {{100, 100}, {10, 1}};
    CHECK_OK(dcp_layout_plan(block, 2, 50, 4, DCP_ORDER_MODEL, starts, &shard));
    CHECK(shard == 100);
    /* 671e9 elements on 10,000 ranks, and what cannot be counted */
    dcp_layout_tensor_t large[] = {{671000000000, 7168}, {1, 1}};
    CHECK_OK(dcp_layout_plan(large, 2, 10000, 4, DCP_ORDER_MODEL, starts, &shard));
    CHECK(layout_is_valid(large, 2, 10000, 4, shard, starts));
    dcp_layout_tensor_t parts[12];
    int64_t places[12];
    for (int64_t i = 0; i < 12;
         i++) { /* too many kinds to walk: the heuristic search */
        parts[i] =
            (dcp_layout_tensor_t){671000000000 + i, i % 3 ? 7168 + i : 671000000000};
    }
    CHECK_OK(dcp_layout_plan(parts, 12, 10000, 4, DCP_ORDER_SEARCH, places, &shard));
    CHECK(shard >= 671000000000);
    CHECK(dcp_layout_plan(parts, 12, INT64_MAX / 1000, 4, DCP_ORDER_SEARCH, places,
                          &shard)
          == DCP_ERR_ARG);
    dcp_layout_tensor_t huge[] = {{INT64_MAX, 1}, {INT64_MAX, 1}};
    CHECK(dcp_layout_plan(huge, 2, 2, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    dcp_layout_tensor_t wide[] = {{INT64_MAX / 64, INT64_MAX / 64}};
    CHECK(dcp_layout_plan(wide, 1, 1000000, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    CHECK(strstr(dcp_last_error(), "64 bits") != NULL);
    CHECK(dcp_layout_plan(rows, -1, 1, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    CHECK(dcp_layout_plan(rows, 1, 0, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    CHECK(dcp_layout_plan(rows, 1, 1, 0, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    CHECK(dcp_layout_plan(rows, 1, 1, 4, (dcp_layout_order_t)9, starts, &shard)
          == DCP_ERR_ARG);
    dcp_layout_tensor_t bad[] = {{-1, 1}, {4, 0}};
    CHECK(dcp_layout_plan(bad, 1, 1, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
    CHECK(dcp_layout_plan(bad + 1, 1, 1, 4, DCP_ORDER_MODEL, starts, &shard)
          == DCP_ERR_ARG);
}

static dcp_status_t
plan_scenario(void)
{
    dcp_layout_tensor_t tensors[30];
    int64_t starts[30], shard;
    for (int64_t i = 0; i < 30; i++) {
        tensors[i] = (dcp_layout_tensor_t){(i + 1) * 12, i % 5 + 1};
    }
    for (int order = 0; order < 4; order++) {
        DCP_TRY(dcp_layout_plan(tensors, 30, 3, 4, (dcp_layout_order_t)order, starts,
                                &shard));
    }
    for (int64_t i = 0; i < 30; i++) {
        tensors[i].block_count = tensors[i].element_count; /* parcels */
    }
    DCP_TRY(dcp_layout_plan(tensors, 30, 3, 4, DCP_ORDER_SEARCH, starts, &shard));
    return dcp_layout_plan(tensors, 4, 3, 4, DCP_ORDER_SEARCH, starts, &shard);
}

int
main(void)
{
    test_small_against_oracle();
    test_fits_against_oracle();
    test_many();
    test_middle_size_is_the_least();
    test_parcels();
    test_orders();
    test_limits();
    check_every_alloc(plan_scenario);
    return check_finish();
}
