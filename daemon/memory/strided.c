#include "memory/strided.h"

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

#include "base/banned.h"

enum {
    MAX_TERMS = 2 * BOX_MAX_DIMS,
    WORTH_DIVIDING = 4 /* candidates for a term from which on a common divisor is looked for */
};

/* Σ stride[k] · x_k with 0 <= x_k <= most[k]; strides descend. */
struct sum_set {
    int64_t stride[MAX_TERMS];
    int64_t most[MAX_TERMS];
    int64_t rest[MAX_TERMS + 1]; /* greatest sum of terms k … */
    unsigned n;
    int64_t *budget;
};

uint64_t strided_end(const struct strided *s)
{
    uint64_t end = s->begin;
    for (unsigned d = 0; d < s->n_dims; d++) {
        uint64_t reach;
        if (__builtin_mul_overflow(s->size[d] - 1, s->stride_bytes[d], &reach) ||
            __builtin_add_overflow(end, reach, &end))
            return UINT64_MAX;
    }
    if (end > STRIDED_MAX_BYTES - s->element_bytes)
        return UINT64_MAX;
    return end + s->element_bytes;
}

/* Cheaper than clearing all of it, which pairs would do millions of times. */
static void start_terms(struct sum_set *s, int64_t *budget)
{
    s->n = 0;
    s->budget = budget;
}

/* Keeps the order; terms of one stride become one. */
static void add_term(struct sum_set *s, uint64_t stride, uint64_t most)
{
    unsigned at = s->n;
    if (most == 0)
        return;
    while (at > 0 && s->stride[at - 1] < (int64_t)stride)
        at--;
    if (at > 0 && s->stride[at - 1] == (int64_t)stride) {
        s->most[at - 1] += (int64_t)most;
        return;
    }
    for (unsigned k = s->n; k > at; k--) {
        s->stride[k] = s->stride[k - 1];
        s->most[k] = s->most[k - 1];
    }
    s->stride[at] = (int64_t)stride;
    s->most[at] = (int64_t)most;
    s->n++;
}

/* Greatest common divisor of the strides of terms k …: all their sums are multiples of it. */
static int64_t common_divisor(const struct sum_set *s, unsigned k)
{
    int64_t a = s->stride[k];
    for (k++; k < s->n; k++)
        for (int64_t b = s->stride[k]; b != 0;) {
            int64_t t = a % b;
            a = b;
            b = t;
        }
    return a;
}

static void finish_terms(struct sum_set *s)
{
    s->rest[s->n] = 0;
    for (unsigned k = s->n; k-- > 0;)
        s->rest[k] = s->rest[k + 1] + s->stride[k] * s->most[k];
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return a <= 0 ? 0 : (a + b - 1) / b;
}

/* 1 where terms k … can sum to a number of [low, high]. */
static int reaches(const struct sum_set *s, unsigned k, int64_t low, int64_t high)
{
    if (high < 0 || low > s->rest[k])
        return 0;
    if (low <= 0 || high >= s->rest[k])
        return 1; /* all zero, or all at their most */
    int64_t first = divide_up(low - s->rest[k + 1], s->stride[k]);
    int64_t last = high / s->stride[k];
    if (last > s->most[k])
        last = s->most[k];
    if (last - first >= WORTH_DIVIDING) {
        int64_t common = common_divisor(s, k);
        if (high / common * common < low)
            return 0; /* none of its multiples lies there */
    }
    for (int64_t x = first; x <= last; x++) {
        if (--*s->budget < 0)
            return RS_EEXHAUSTED;
        int r = reaches(s, k + 1, low - x * s->stride[k], high - x * s->stride[k]);
        if (r != 0)
            return r;
    }
    return 0;
}

/* Each stride reaches beyond all that the smaller ones span: no two elements can meet. */
static bool nests(const struct strided *s)
{
    struct sum_set set;
    start_terms(&set, NULL);
    for (unsigned d = 0; d < s->n_dims; d++) {
        unsigned before = set.n;
        add_term(&set, s->stride_bytes[d], s->size[d] - 1);
        if (s->size[d] > 1 && set.n == before)
            return false; /* two dims of one stride */
    }
    finish_terms(&set);
    for (unsigned k = 0; k < set.n; k++)
        if (set.stride[k] < set.rest[k + 1] + s->element_bytes)
            return false;
    return true;
}

/* Two elements meet when their index vectors differ by some δ with |Σ δ_d · stride_d| less than an
 * element. δ or -δ has a positive first non-zero entry; d is its place. */
int strided_self_overlap(const struct strided *s, int64_t *budget)
{
    if (nests(s))
        return 0;
    for (unsigned d = 0; d < s->n_dims; d++) {
        if (s->size[d] < 2)
            continue;
        struct sum_set set;
        int64_t shift = -(int64_t)s->stride_bytes[d];
        start_terms(&set, budget);
        if (s->stride_bytes[d] == 0)
            return 1;
        add_term(&set, s->stride_bytes[d], s->size[d] - 2);
        for (unsigned k = d + 1; k < s->n_dims; k++) {
            if (s->size[k] > 1 && s->stride_bytes[k] == 0)
                return 1;
            add_term(&set, s->stride_bytes[k], 2 * (s->size[k] - 1));
            shift += (int64_t)(s->stride_bytes[k] * (s->size[k] - 1));
        }
        finish_terms(&set);
        int64_t near = (int64_t)s->element_bytes - 1;
        int r = reaches(&set, 0, shift - near, shift + near);
        if (r != 0)
            return r;
    }
    return 0;
}

/* Elements at x of a and y of b meet when -bytes(a) < x - y < bytes(b). The indices of b are
 * counted from its end, so that all terms are positive. */
int strided_overlap(const struct strided *a, const struct strided *b, int64_t *budget)
{
    struct sum_set set;
    int64_t shift = (int64_t)b->begin - (int64_t)a->begin;
    start_terms(&set, budget);
    if (--*budget < 0)
        return RS_EEXHAUSTED;
    for (unsigned d = 0; d < a->n_dims; d++)
        add_term(&set, a->stride_bytes[d], a->size[d] - 1);
    for (unsigned d = 0; d < b->n_dims; d++) {
        add_term(&set, b->stride_bytes[d], b->size[d] - 1);
        shift += (int64_t)(b->stride_bytes[d] * (b->size[d] - 1));
    }
    finish_terms(&set);
    return reaches(&set, 0, shift - (int64_t)a->element_bytes + 1,
                   shift + (int64_t)b->element_bytes - 1);
}
