#include "layout/box.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/banned.h"

bool box_empty(const struct box *b)
{
    for (unsigned d = 0; d < b->n_dims; d++)
        if (b->size[d] == 0)
            return true;
    return false;
}

bool box_equal(const struct box *a, const struct box *b)
{
    if (a->n_dims != b->n_dims)
        return false;
    for (unsigned d = 0; d < a->n_dims; d++)
        if (a->offset[d] != b->offset[d] || a->size[d] != b->size[d])
            return false;
    return true;
}

bool box_contains(const struct box *outer, const struct box *inner)
{
    for (unsigned d = 0; d < outer->n_dims; d++)
        if (inner->offset[d] < outer->offset[d] ||
            inner->offset[d] + inner->size[d] > outer->offset[d] + outer->size[d])
            return false;
    return true;
}

bool box_intersect(const struct box *a, const struct box *b, struct box *ret)
{
    struct box both = box_blank(a->n_dims);
    for (unsigned d = 0; d < a->n_dims; d++) {
        uint64_t a_end = a->offset[d] + a->size[d], b_end = b->offset[d] + b->size[d];
        uint64_t begin = a->offset[d] > b->offset[d] ? a->offset[d] : b->offset[d];
        uint64_t end = a_end < b_end ? a_end : b_end;
        if (begin >= end)
            return false;
        both.offset[d] = begin;
        both.size[d] = end - begin;
    }
    *ret = both;
    return true;
}

/* What box_range has found so far, and the box whose dims before the current one are fixed. */
struct range_cut {
    const struct box *whole;
    struct box fixed;
    struct box *out;
    unsigned n;
};

/* Emits the part [first, last) of dim d, whole in all later dims. */
static void range_emit(struct range_cut *c, unsigned d, uint64_t first, uint64_t last)
{
    struct box b = c->fixed;
    b.offset[d] = c->whole->offset[d] + first;
    b.size[d] = last - first;
    for (unsigned i = d + 1; i < c->whole->n_dims; i++) {
        b.offset[i] = c->whole->offset[i];
        b.size[i] = c->whole->size[i];
    }
    c->out[c->n++] = b;
}

static void range_cut_dim(struct range_cut *c, unsigned d, uint64_t begin, uint64_t end);

static void range_in_row(struct range_cut *c, unsigned d, uint64_t row, uint64_t begin,
                         uint64_t end)
{
    c->fixed.offset[d] = c->whole->offset[d] + row;
    c->fixed.size[d] = 1;
    range_cut_dim(c, d + 1, begin, end);
}

/* Elements [begin, end) of the dims from d on: a partial first row, whole rows, a partial last row.
 */
static void range_cut_dim(struct range_cut *c, unsigned d, uint64_t begin, uint64_t end)
{
    uint64_t row = 1;
    for (unsigned i = d + 1; i < c->whole->n_dims; i++)
        row *= c->whole->size[i];
    uint64_t first = begin / row, last = end / row;
    uint64_t head = begin % row, tail = end % row;
    if (first == last) {
        range_in_row(c, d, first, head, tail);
        return;
    }
    if (head != 0)
        range_in_row(c, d, first++, head, row);
    if (first < last)
        range_emit(c, d, first, last);
    if (tail != 0)
        range_in_row(c, d, last, 0, tail);
}

unsigned box_range(const struct box *b, uint64_t begin, uint64_t end, struct box *ret)
{
    if (begin >= end)
        return 0;
    if (b->n_dims == 0 || (begin == 0 && end == box_elements(b))) {
        ret[0] = *b;
        return 1;
    }
    struct range_cut c = {.whole = b, .fixed = {.n_dims = b->n_dims}, .out = ret};
    range_cut_dim(&c, 0, begin, end);
    return c.n;
}

char *box_text(const struct box *b, char *ret_text, unsigned capacity)
{
    unsigned at = 0;
    if (capacity == 0)
        return ret_text;
    ret_text[0] = '\0';
    for (unsigned d = 0; d <= b->n_dims && at < capacity; d++) {
        const char *before = d == 0 ? "[" : d < b->n_dims ? ", " : "";
        int n = d == b->n_dims ? snprintf(ret_text + at, capacity - at, d == 0 ? "[]" : "]")
                               : snprintf(ret_text + at, capacity - at, "%s%" PRIu64 ":%" PRIu64,
                                          before, b->offset[d], b->offset[d] + b->size[d]);
        at += n > 0 ? (unsigned)n : 0;
    }
    return ret_text;
}
