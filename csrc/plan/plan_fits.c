/* What fits nowhere, said before anything is planned: which sequence, what it needs,
 * and the smallest world that would do.
 *
 * Bytes fall with the world (shares of what is sharded), and from two ranks on with the
 * size of the group, so a sequence fits somewhere exactly if it fits on one rank or on
 * the largest group, with as much recomputed as possible. Both are monotone in the
 * world, so bisection finds the smallest one.
 */
#include "plan_draft.h"

#include <inttypes.h>
#include <stdio.h>

enum { WORLD_TEXT = 128 }; /* room for what is said of other worlds */

static int32_t
largest_group(const dcp_plan_request_t *request, int32_t world)
{
    return request->max_group > 0 && request->max_group < world ? request->max_group
                                                                : world;
}

/* Least bytes of a micro-batch of `length` tokens in a world, over every choice that
 * the token cap allows; INT64_MAX: none. */
static int64_t
least_bytes(const plan_problem_t *problem, int64_t length, int32_t world)
{
    const dcp_plan_request_t *request = problem->request;
    const int32_t groups[2] = {1, largest_group(request, world)};
    int64_t least = INT64_MAX;
    for (int g = 0; g < 2; g++) {
        int64_t rows = length / groups[g] + (length % groups[g] != 0);
        for (int which = PLAN_NONE; which < PLAN_RECOMPUTES && rows <= problem->row_cap;
             which++) {
            int32_t recompute[DCP_RECOMPUTE_KINDS];
            int64_t bytes = 0;
            plan_recompute(&request->cost, which, recompute);
            (void)dcp_cost_memory(&request->cost, length, groups[g], recompute, world,
                                  &bytes);
            least = bytes < least ? bytes : least;
        }
    }
    return least;
}

static int
fits(const plan_problem_t *problem, int64_t length, int32_t world)
{
    int64_t cap = problem->request->memory_bytes;
    int64_t least = least_bytes(problem, length, world);
    return least < INT64_MAX && (cap == 0 || least <= cap);
}

/* "no world would do" and why: what the cost model lets no rank of any world be
 * without, or what the largest group must still hold of the sequence. */
static void
name_no_world(const plan_problem_t *problem, int64_t length, char *text, size_t size)
{
    int64_t cap = problem->request->memory_bytes;
    int64_t fixed = least_bytes(problem, 0, PLAN_MAX_WORLD);
    int64_t bytes = least_bytes(problem, length, PLAN_MAX_WORLD);
    int32_t group = problem->request->max_group;
    if (cap > 0 && fixed > cap) {
        snprintf(text, size,
                 "no world would do: %" PRId64
                 " bytes are on every rank whatever the world",
                 fixed);
    } else if (bytes == INT64_MAX) {
        snprintf(text, size, "no world would do: at most %d ranks share a sequence",
                 largest_group(problem->request, PLAN_MAX_WORLD));
    } else {
        snprintf(text, size,
                 "no world would do: it leaves %" PRId64
                 " bytes on a rank whatever the world%s",
                 bytes, group > 0 ? ", within max_group" : "");
    }
}

/* "the smallest world that would do is N", or that none would. */
static void
name_world(const plan_problem_t *problem, int64_t length, char *text, size_t size)
{
    if (!fits(problem, length, PLAN_MAX_WORLD)) {
        name_no_world(problem, length, text, size);
        return;
    }
    int32_t low = problem->request->world, high = PLAN_MAX_WORLD;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (fits(problem, length, middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    snprintf(text, size, "the smallest world that would do is %d ranks", high);
}

static dcp_status_t
fail_length(const plan_problem_t *problem, int64_t index)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t length = request->lengths[index];
    int64_t bytes = least_bytes(problem, length, request->world);
    char world[WORLD_TEXT];
    name_world(problem, length, world, sizeof world);
    if (bytes == INT64_MAX) {
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "lengths[%" PRId64 "] = %" PRId64
                        " fits in no micro-batch: max_tokens caps one at %" PRId64
                        " on each rank of at most %d; %s",
                        index, length, request->max_tokens, problem->max_group, world);
    }
    return DCP_FAIL(DCP_ERR_INFEASIBLE,
                    "lengths[%" PRId64 "] = %" PRId64
                    " fits nowhere in a world of %d: it needs %" PRId64
                    " bytes on each rank whatever is recomputed (%" PRId64
                    " of them whatever the rank computes), and memory_bytes caps a "
                    "rank at %" PRId64 "; %s",
                    index, length, request->world, bytes,
                    least_bytes(problem, 0, request->world), request->memory_bytes,
                    world);
}

dcp_status_t
plan_check_fits(const plan_problem_t *problem)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t fixed = least_bytes(problem, 0, request->world);
    if (request->memory_bytes > 0 && fixed > request->memory_bytes) {
        char world[WORLD_TEXT];
        name_world(problem, 0, world, sizeof world);
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "memory_bytes = %" PRId64 " is less than the %" PRId64
                        " bytes that each of %d ranks holds whatever the rank "
                        "computes; %s",
                        request->memory_bytes, fixed, request->world, world);
    }
    if (request->length_count == 0 || fits(problem, problem->longest, request->world)) {
        return DCP_OK;
    }
    int64_t index = 0;
    while (fits(problem, request->lengths[index], request->world)) {
        index++;
    }
    return fail_length(problem, index);
}
