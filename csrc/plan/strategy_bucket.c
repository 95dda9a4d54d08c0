/* Strategy `bucket`: the published baseline on one rank a micro-batch.
 *
 * A class holds the lengths in (2^(k-1), 2^k]; a micro-batch holds one class. Its batch
 * size is what the caps allow for the class's longest sequence; then the published
 * median rule: with t the time of a full micro-batch of the class and t_med the median
 * of t over the classes of the step, where t > t_med, bs' = max(1, floor(bs t_med /
 * t)). Sequences come in data order; a micro-batch goes out when it is full, the
 * remainders at the end by ascending class; ranks are dealt round robin. Sequences are
 * laid one after another without padding, so the caps count their tokens, not longest x
 * count. Cost: O(sequences + micro-batches).
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

enum { CLASS_COUNT = 64 };

typedef struct length_class {
    int64_t count, longest;
    int64_t batch_size;
    double time_s;    /* of a micro-batch of batch_size of the longest */
    int64_t *members; /* [batch_size or count, the less] the micro-batch being filled */
    int64_t member_count;
} length_class_t;

/* k with 2^(k-1) < length <= 2^k. */
static int
class_of(int64_t length)
{
    int k = 0;
    while (k < 62 && (INT64_C(1) << k) < length) {
        k++;
    }
    return k;
}

static double
batch_time(const dcp_cost_t *cost, int64_t batch_size, int64_t length)
{
    double l = (double)length;
    return cost->latency_s
           + (double)batch_size * (cost->token_s * l + cost->square_s * l * l);
}

/* Median of the classes' times; of an even number, the mean of the middle two. */
static double
median_time(const length_class_t *classes)
{
    double times[CLASS_COUNT];
    int count = 0;
    for (int k = 0; k < CLASS_COUNT; k++) {
        if (classes[k].count == 0) {
            continue;
        }
        int at = count++;
        for (; at > 0 && times[at - 1] > classes[k].time_s; at--) {
            times[at] = times[at - 1];
        }
        times[at] = classes[k].time_s;
    }
    return count == 0 ? 0 : (times[(count - 1) / 2] + times[count / 2]) / 2;
}

/* Batch size of every class. */
static void
choose_sizes(const plan_problem_t *problem, int64_t cap_tokens, length_class_t *classes)
{
    const dcp_plan_request_t *request = problem->request;
    for (int64_t i = 0; i < request->length_count; i++) {
        length_class_t *c = &classes[class_of(request->lengths[i])];
        c->count++;
        c->longest =
            request->lengths[i] > c->longest ? request->lengths[i] : c->longest;
    }
    for (int k = 0; k < CLASS_COUNT; k++) {
        length_class_t *c = &classes[k];
        if (c->count > 0) {
            c->batch_size = cap_tokens / c->longest; /* >= 1: all fit */
            c->time_s = batch_time(&request->cost, c->batch_size, c->longest);
        }
    }
    double median = median_time(classes);
    for (int k = 0; k < CLASS_COUNT; k++) {
        length_class_t *c = &classes[k];
        if (c->count > 0 && c->time_s > median) {
            double size = (double)c->batch_size * median / c->time_s;
            c->batch_size = size < 1 ? 1 : (int64_t)size;
        }
    }
}

static dcp_status_t
send(length_class_t *c, int32_t world, plan_draft_t *draft)
{
    int32_t rank = (int32_t)(draft->plan->micro_batch_count % world);
    DCP_TRY(plan_draft_add(draft, rank, &(plan_setting_t){.group = 1}, c->members,
                           c->member_count));
    c->member_count = 0;
    return DCP_OK;
}

static dcp_status_t
deal(const dcp_plan_request_t *request, length_class_t *classes, plan_draft_t *draft)
{
    for (int64_t i = 0; i < request->length_count; i++) {
        length_class_t *c = &classes[class_of(request->lengths[i])];
        c->members[c->member_count++] = i;
        if (c->member_count == c->batch_size) {
            DCP_TRY(send(c, request->world, draft));
        }
    }
    for (int k = 0; k < CLASS_COUNT; k++) {
        if (classes[k].member_count > 0) {
            DCP_TRY(send(&classes[k], request->world, draft));
        }
    }
    return DCP_OK;
}

dcp_status_t
plan_bucket_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    length_class_t classes[CLASS_COUNT] = {{0}};
    int64_t cap_tokens = plan_cap_tokens(problem, &(plan_setting_t){.group = 1});
    if (problem->longest > cap_tokens) {
        return DCP_FAIL(DCP_ERR_INFEASIBLE,
                        "a sequence of %lld tokens fits on no single rank",
                        (long long)problem->longest);
    }
    choose_sizes(problem, cap_tokens, classes);
    void *memory;
    DCP_TRY(dcp_alloc_array(problem->request->length_count, sizeof(int64_t),
                            "the planner's classes", &memory));
    int64_t *members = memory;
    for (int k = 0; k < CLASS_COUNT; k++) {
        classes[k].members = members;
        members += classes[k].count; /* never holds more than the class has */
    }
    dcp_status_t status = deal(problem->request, classes, draft);
    dcp_free(memory);
    return status;
}
