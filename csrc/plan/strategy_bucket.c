/* Strategy `bucket`: bucket parallel, the published systems' baseline, with the best
 * setting that it can have.
 *
 * One (group size, recompute) for the whole run. Of those that fit the run's longest
 * sequence, the pair with most tokens a second: one full micro-batch of every class up
 * to the run's longest, their tokens over their time, times the number of groups. So it
 * follows from the run, not from the step. Sizes need not be powers of two; groups are
 * aligned blocks of consecutive ranks, and ranks left over where the size does not
 * divide the world idle (which counts against it: fewer groups).
 *
 * A class holds the lengths in (2^(k-1), 2^k]; a micro-batch holds one class. Its batch
 * size is what the caps allow for the class's longest sequence; then the published
 * median rule: with t the time of a full micro-batch of the class and t_med the median
 * of t over the classes of the step, where t > t_med, bs' = max(1, floor(bs t_med /
 * t)). Micro-batches are dealt to the groups round robin in data order: that of their
 * first sequences. Sequences are laid one after another without padding, so the caps
 * count their tokens, not longest x count. Cost: O(sequences + micro-batches + pairs).
 */
#include "classes.h"

#include "dcp/alloc.h"

/* Median of the classes' times; of an even number, the mean of the middle two. */
static double
median_time(const plan_class_t *classes)
{
    double times[PLAN_CLASSES];
    int count = 0;
    for (int k = 0; k < PLAN_CLASSES; k++) {
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

/* Tokens a second of all groups over one full micro-batch of every class of the run. */
static double
throughput(const plan_pair_t *pair, int64_t run_longest)
{
    double tokens = 0, seconds = 0;
    for (int k = 0; k <= plan_class_of(run_longest); k++) {
        int64_t top = INT64_C(1) << k;
        plan_class_t class = {.longest = top < run_longest ? top : run_longest};
        plan_class_fill(&class, pair->cap_tokens, &pair->rate);
        tokens += (double)(class.batch_size * class.longest);
        seconds += class.time_s;
    }
    return pair->group_count * tokens / (seconds > 0 ? seconds : 1);
}

dcp_status_t
plan_bucket_setting(const plan_problem_t *problem, plan_setting_t *setting_p)
{
    plan_problem_t run = *problem; /* caps as in a step with the run's longest */
    const dcp_plan_request_t *request = problem->request;
    if (request->max_tokens == 0 && run.row_cap < problem->run_longest) {
        run.row_cap = problem->run_longest;
    }
    plan_pair_t *pairs;
    int64_t count;
    DCP_TRY(plan_pairs_create(&run, problem->run_longest, &pairs, &count));
    double most = -1;
    for (int64_t i = 0; i < count; i++) {
        double rate = throughput(&pairs[i], problem->run_longest);
        if (rate > most) {
            most = rate;
            *setting_p = pairs[i].setting;
        }
    }
    dcp_free(pairs);
    return DCP_OK;
}

/* Batch size of every class. */
static void
choose_sizes(int64_t cap_tokens, const plan_rate_t *rate, plan_class_t *classes)
{
    for (int k = 0; k < PLAN_CLASSES; k++) {
        if (classes[k].count > 0) {
            plan_class_fill(&classes[k], cap_tokens, rate);
        }
    }
    double median = median_time(classes);
    for (int k = 0; k < PLAN_CLASSES; k++) {
        plan_class_t *class = &classes[k];
        if (class->count > 0 && class->time_s > median) {
            double size = (double)class->batch_size * median / class->time_s;
            class->batch_size = size < 1 ? 1 : (int64_t)size;
        }
    }
}

/* Sends the next micro-batch of `class`, up to `end` of its members. */
static dcp_status_t
send(const plan_problem_t *problem, plan_draft_t *draft, const plan_setting_t *setting,
     const plan_class_t *class, int64_t start, int64_t end)
{
    int64_t groups = problem->request->world / setting->group;
    int64_t group = draft->plan->micro_batch_count % groups;
    return plan_draft_add(draft, (int32_t)group * setting->group, setting,
                          class->members + start, end - start);
}

/* A micro-batch goes out when its first sequence comes; what follows in the class fills
 * it. */
static dcp_status_t
deal(const plan_problem_t *problem, plan_draft_t *draft, const plan_setting_t *setting,
     const plan_class_t *classes)
{
    const dcp_plan_request_t *request = problem->request;
    int64_t seen[PLAN_CLASSES] = {0}, sent[PLAN_CLASSES] = {0};
    for (int64_t i = 0; i < request->length_count; i++) {
        int k = plan_class_of(request->lengths[i]);
        if (seen[k]++ < sent[k]) {
            continue;
        }
        int64_t end = sent[k] + classes[k].batch_size;
        end = end < classes[k].count ? end : classes[k].count;
        DCP_TRY(send(problem, draft, setting, &classes[k], sent[k], end));
        sent[k] = end;
    }
    return DCP_OK;
}

dcp_status_t
plan_bucket_with(const plan_problem_t *problem, plan_draft_t *draft,
                 const plan_setting_t *setting)
{
    plan_class_t classes[PLAN_CLASSES];
    void *memory;
    DCP_TRY(plan_classes_create(problem, classes, &memory));
    plan_rate_t rate = plan_rate_slowest(problem, setting);
    choose_sizes(plan_cap_tokens(problem, setting), &rate, classes);
    dcp_status_t status = deal(problem, draft, setting, classes);
    dcp_free(memory);
    return status;
}

dcp_status_t
plan_bucket_run(const plan_problem_t *problem, plan_draft_t *draft)
{
    plan_setting_t setting;
    DCP_TRY(plan_bucket_setting(problem, &setting));
    return plan_bucket_with(problem, draft, &setting);
}
