/* Sums of doubles without rounding: a fixed-point number wide enough for every double
 * (Kulisch's accumulator), rounded once at the end. So a sum does not depend on the
 * order or grouping of its terms, and ranks that hold any parts of it agree bit for
 * bit.
 *
 * Word i counts 2^(32 i - 1088): the least double is 2^-1074, the largest needs word
 * 66, the rest is room for carries. A word takes 32 bits of each term and keeps what
 * passes 32 bits as pending carry until it reaches 2^62; normal words lie in [0, 2^32).
 * An add touches three words, about 2 ns. */
#include "dcp/dbuffer.h"

#include <math.h>
#include <string.h>

enum {
    NUMBER_WORDS = DCP_EXACT_WORDS - 1, /* the last word counts what is not finite */
    LEAST_EXPONENT = -1088,             /* of bit 0 of word 0 */
    MANTISSA_BITS = 53,
    DENORMAL_EXPONENT = -1074, /* of the last bit of a subnormal double */
};

static const int64_t PENDING_LIMIT = (int64_t)1 << 62;
static const int64_t WORD_MASK = 0xffffffff;

void
dcp_exact_sum_normalise(dcp_exact_sum_t *sum)
{
    int64_t carry = 0;
    for (int i = 0; i < NUMBER_WORDS; i++) {
        int64_t word = sum->words[i];
        int64_t low = (word & WORD_MASK) + carry; /* carry < 2^31, so no overflow */
        sum->words[i] = low & WORD_MASK;
        carry = (word >> 32) + (low >> 32);
    }
}

void
dcp_exact_sum_init(dcp_exact_sum_t *sum)
{
    memset(sum, 0, sizeof *sum);
}

void
dcp_exact_sum_add(dcp_exact_sum_t *sum, double x)
{
    if (!isfinite(x) || x < 0) {
        sum->words[NUMBER_WORDS]++;
        return;
    }
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t mantissa = bits & (((uint64_t)1 << 52) - 1);
    int32_t exponent = (int32_t)(bits >> 52);
    if (exponent > 0) {
        mantissa |= (uint64_t)1 << 52;
        exponent--;
    }
    int32_t place = exponent + DENORMAL_EXPONENT - LEAST_EXPONENT;
    int64_t *word = &sum->words[place / 32];
    uint64_t low = (mantissa & 0xffffffffu) << (place % 32);
    uint64_t high = (mantissa >> 32) << (place % 32);
    word[0] += (int64_t)(low & 0xffffffffu);
    word[1] += (int64_t)((low >> 32) + (high & 0xffffffffu));
    word[2] += (int64_t)(high >> 32);
    if (word[0] >= PENDING_LIMIT || word[1] >= PENDING_LIMIT
        || word[2] >= PENDING_LIMIT) {
        dcp_exact_sum_normalise(sum);
    }
}

void
dcp_exact_sum_merge(dcp_exact_sum_t *sum, const dcp_exact_sum_t *other)
{
    dcp_exact_sum_t term = *other;
    dcp_exact_sum_normalise(&term);
    dcp_exact_sum_normalise(sum);
    for (int i = 0; i < DCP_EXACT_WORDS; i++) {
        sum->words[i] += term.words[i];
    }
}

static int
bit(const dcp_exact_sum_t *sum, int place)
{
    return (int)(sum->words[place / 32] >> (place % 32) & 1);
}

double
dcp_exact_sum_value(const dcp_exact_sum_t *sum)
{
    if (sum->words[NUMBER_WORDS] != 0) {
        return NAN;
    }
    dcp_exact_sum_t number = *sum;
    dcp_exact_sum_normalise(&number);
    int top = NUMBER_WORDS * 32 - 1; /* highest bit that is set */
    while (top >= 0 && !bit(&number, top)) {
        top--;
    }
    if (top < 0) {
        return 0.0;
    }
    int last = top - MANTISSA_BITS + 1; /* lowest bit that the double keeps */
    int least = DENORMAL_EXPONENT - LEAST_EXPONENT;
    last = last > least ? last : least;
    uint64_t mantissa = 0;
    for (int i = top; i >= last; i--) {
        mantissa = mantissa << 1 | (uint64_t)bit(&number, i);
    }
    int half = bit(&number, last - 1), rest = 0;
    for (int i = last - 2; i >= 0 && half && !rest; i--) {
        rest = bit(&number, i);
    }
    if (half && (rest || (mantissa & 1))) {
        mantissa++; /* nearest, ties to even; 2^53 is still exact */
    }
    return ldexp((double)mantissa, last + LEAST_EXPONENT);
}
