/* Splits one rank's sequences into micro-batches under the token cap.
 *
 * First fit, longest first, finds how many are needed (at most 11/9 of the least + 1).
 * Then the same sequences are dealt again into that many, each to the one with fewest
 * tokens: that evens out the micro-batches, so that the largest (peak memory) is small;
 * if it does not stay under the cap, first fit's own answer stands. A tournament tree
 * over the free room of every micro-batch makes both O(n log n).
 */
#include "plan_draft.h"

#include "dcp/alloc.h"

#include <stddef.h>

struct plan_packer {
    int64_t leaf_count;  /* power of two >= max_items */
    int64_t *most_free;  /* [2 * leaf_count] node i: largest free room below it */
    int64_t *second_bin; /* [max_items] the second deal */
};

dcp_status_t
plan_packer_create(int64_t max_items, plan_packer_t **packer_p)
{
    int64_t leaf_count = 1;
    while (leaf_count < max_items) {
        leaf_count *= 2;
    }
    void *memory;
    int64_t lists = (int64_t)sizeof(plan_packer_t)
                    + (2 * leaf_count + max_items) * (int64_t)sizeof(int64_t);
    DCP_TRY(dcp_alloc(lists, "the planner's micro-batches", &memory));
    plan_packer_t *packer = memory;
    packer->leaf_count = leaf_count;
    packer->most_free = (int64_t *)(void *)(packer + 1);
    packer->second_bin = packer->most_free + 2 * leaf_count;
    *packer_p = packer;
    return DCP_OK;
}

void
plan_packer_destroy(plan_packer_t *packer)
{
    dcp_free(packer);
}

/* A tree over `leaves` (a power of two) bins with `cap` free in the first `bin_count`.
 */
static void
reset(plan_packer_t *packer, int64_t leaves, int64_t bin_count, int64_t cap)
{
    for (int64_t i = 0; i < leaves; i++) {
        packer->most_free[leaves + i] = i < bin_count ? cap : -1;
    }
    for (int64_t i = leaves - 1; i >= 1; i--) {
        int64_t left = packer->most_free[2 * i], right = packer->most_free[2 * i + 1];
        packer->most_free[i] = left >= right ? left : right;
    }
}

static void
take(plan_packer_t *packer, int64_t node, int64_t tokens)
{
    packer->most_free[node] -= tokens;
    for (node /= 2; node >= 1; node /= 2) {
        int64_t left = packer->most_free[2 * node];
        int64_t right = packer->most_free[2 * node + 1];
        packer->most_free[node] = left >= right ? left : right;
    }
}

static int64_t
leaves_for(int64_t bin_count)
{
    int64_t leaves = 1;
    while (leaves < bin_count) {
        leaves *= 2;
    }
    return leaves;
}

/* What first fit never exceeds: of two bins at most half full it would have made one,
 * so all but one hold more than half a cap. */
static int64_t
most_bins(const int64_t *lengths, const int64_t *items, int64_t item_count,
          int64_t cap_tokens)
{
    int64_t tokens = 0;
    for (int64_t i = 0; i < item_count; i++) {
        tokens += lengths[items[i]];
    }
    int64_t bins = cap_tokens > 0 ? 2 * (tokens / cap_tokens) + 2 : item_count;
    return bins < item_count ? bins : item_count;
}

/* First bin with room for each item; bin_p may be NULL. Returns the bins used. */
static int64_t
first_fit(plan_packer_t *packer, const int64_t *lengths, const int64_t *items,
          int64_t item_count, int64_t cap_tokens, int64_t *bin_p)
{
    int64_t bin_count = most_bins(lengths, items, item_count, cap_tokens);
    int64_t leaves = leaves_for(bin_count), used = 0;
    reset(packer, leaves, bin_count, cap_tokens);
    for (int64_t i = 0; i < item_count; i++) {
        int64_t tokens = lengths[items[i]], node = 1;
        while (node < leaves) {
            node *= 2;
            if (packer->most_free[node] < tokens) {
                node++;
            }
        }
        take(packer, node, tokens);
        int64_t bin = node - leaves;
        used = bin + 1 > used ? bin + 1 : used;
        if (bin_p != NULL) {
            bin_p[i] = bin;
        }
    }
    return used;
}

/* Each item to the bin with most room. Returns whether all fit. */
static int
widest_fit(plan_packer_t *packer, const int64_t *lengths, const int64_t *items,
           int64_t item_count, int64_t cap_tokens, int64_t bin_count, int64_t *bin_p)
{
    int64_t leaves = leaves_for(bin_count);
    reset(packer, leaves, bin_count, cap_tokens);
    for (int64_t i = 0; i < item_count; i++) {
        int64_t tokens = lengths[items[i]], node = 1;
        if (packer->most_free[1] < tokens) {
            return 0;
        }
        while (node < leaves) {
            node *= 2;
            if (packer->most_free[node] < packer->most_free[node + 1]) {
                node++;
            }
        }
        take(packer, node, tokens);
        bin_p[i] = node - leaves;
    }
    return 1;
}

int64_t
plan_packer_count(plan_packer_t *packer, const int64_t *lengths, const int64_t *items,
                  int64_t item_count, int64_t cap_tokens)
{
    return item_count == 0
               ? 0
               : first_fit(packer, lengths, items, item_count, cap_tokens, NULL);
}

int64_t
plan_packer_assign(plan_packer_t *packer, const int64_t *lengths, const int64_t *items,
                   int64_t item_count, int64_t cap_tokens, int64_t *bin_p)
{
    if (item_count == 0) {
        return 0;
    }
    int64_t bin_count =
        first_fit(packer, lengths, items, item_count, cap_tokens, bin_p);
    if (widest_fit(packer, lengths, items, item_count, cap_tokens, bin_count,
                   packer->second_bin)) {
        for (int64_t i = 0; i < item_count; i++) {
            bin_p[i] = packer->second_bin[i];
        }
    }
    return bin_count;
}
