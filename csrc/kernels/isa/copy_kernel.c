/* Copies of rows around the cache: rows of kilobytes, far more of them than it holds.
 *
 * Whole lines of the target are stored without being read first, a third less traffic
 * than through the cache; the ends of a row go through it. A jump from row to row stops
 * the hardware's prefetch, so while a line is copied its namesake of the next row is
 * asked for. Bound by memory: as fast as one large memcpy from rows of 2 KiB on. */
#include "../copy_ops.h"
#include "simd.h"

enum { LINE_BYTES = 64 };

static inline void
stream_line(char *to, const char *from) /* `to` on a border of lines */
{
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, _mm512_loadu_si512((const void *)from));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)from + i);
        _mm256_stream_si256((__m256i *)(void *)to + i, x);
    }
#elif defined(__SSE2__)
    for (int i = 0; i < 4; i++) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)from + i);
        _mm_stream_si128((__m128i *)(void *)to + i, x);
    }
#else
    memcpy(to, from, LINE_BYTES);
#endif
}

static void
stream_rows(char *to, int64_t to_step, const char *from, int64_t from_step,
            int64_t bytes, int64_t row_count)
{
    for (int64_t row = 0; row < row_count; row++, to += to_step, from += from_step) {
        int64_t at = (int64_t)(-(uintptr_t)to % LINE_BYTES);
        at = at < bytes ? at : bytes;
        memcpy(to, from, (size_t)at);
        int64_t ahead = row + 1 < row_count ? from_step : 0;
        for (; at + LINE_BYTES <= bytes; at += LINE_BYTES) {
            __builtin_prefetch(from + ahead + at);
            stream_line(to + at, from + at);
        }
        memcpy(to + at, from + at, (size_t)(bytes - at));
    }
#if defined(__SSE2__)
    _mm_sfence(); /* what follows must see it: stores around the cache are not ordered
                   */
#endif
}

const copy_ops_t ISA_NAME(copy_ops) = {.stream_rows = stream_rows};
