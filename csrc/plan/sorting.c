/* Sorts of the planner: results do not depend on the C library, and no memory is
 * allocated behind dcp/alloc.h. Both orders are total (ties by index), so there is one
 * right answer.
 */
#include "plan_draft.h"

void
plan_sort_descending(int64_t *indices, int64_t count, const double *keys,
                     int64_t *scratch)
{
    /* bottom-up merge sort; runs already in order are left alone */
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t low = 0; low + width < count; low += 2 * width) {
            int64_t middle = low + width;
            int64_t high = middle + width < count ? middle + width : count;
            int64_t left = low, right = middle;
            for (int64_t out = low; out < high; out++) {
                int take_left = right >= high;
                if (left < middle && right < high) {
                    int64_t a = indices[left], b = indices[right];
                    take_left = keys[a] > keys[b] || (keys[a] == keys[b] && a < b);
                }
                scratch[out] = take_left ? indices[left++] : indices[right++];
            }
            for (int64_t i = low; i < high; i++) {
                indices[i] = scratch[i];
            }
        }
    }
}

static void
sift_down(int64_t *heap, int64_t at, int64_t count)
{
    int64_t value = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] > heap[child];
        if (heap[child] <= value) {
            break;
        }
        heap[at] = heap[child];
    }
    heap[at] = value;
}

void
plan_sort_ascending(int64_t *indices, int64_t count)
{
    for (int64_t i = count / 2 - 1; i >= 0; i--) {
        sift_down(indices, i, count);
    }
    for (int64_t last = count - 1; last > 0; last--) {
        int64_t top = indices[0];
        indices[0] = indices[last];
        indices[last] = top;
        sift_down(indices, 0, last);
    }
}
