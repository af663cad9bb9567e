#include "layout/region.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

/* Comparisons that one overlap check may spend: about a second. Boxes in rows and columns, as every
 * sharding rule makes them, need n log n; only a tangle of thousands of staggered boxes needs more.
 */
static const int64_t OVERLAP_BUDGET = INT64_C(1) << 28;

int region_box_compare(const struct box *a, const struct box *b)
{
    for (unsigned d = 0; d < a->n_dims; d++) {
        if (a->offset[d] != b->offset[d])
            return a->offset[d] < b->offset[d] ? -1 : 1;
        if (a->size[d] != b->size[d])
            return a->size[d] < b->size[d] ? -1 : 1;
    }
    return 0;
}

static int compare_box_rank(const void *a, const void *b)
{
    const struct region *x = *(const struct region *const *)a;
    const struct region *y = *(const struct region *const *)b;
    int order = region_box_compare(&x->box, &y->box);
    return order != 0 ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

int region_distinct(const struct tensor *t, const struct region ***ret, uint32_t *ret_n)
{
    const struct region **all = mem_calloc(t->n_regions, sizeof *all);
    if (all == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < t->n_regions; i++)
        all[i] = &t->regions[i];
    qsort(all, t->n_regions, sizeof *all, compare_box_rank);
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_regions; i++)
        if (n == 0 || !box_equal(&all[n - 1]->box, &all[i]->box))
            all[n++] = all[i];
    *ret = all;
    *ret_n = n;
    return 0;
}

static int compare_offset(const void *a, const void *b, void *dim)
{
    unsigned d = *(unsigned *)dim;
    uint64_t x = (*(const struct region *const *)a)->box.offset[d];
    uint64_t y = (*(const struct region *const *)b)->box.offset[d];
    return (x > y) - (x < y);
}

static uint64_t box_end(const struct region *r, unsigned d)
{
    return r->box.offset[d] + r->box.size[d];
}

struct overlap {
    unsigned n_dims;
    int64_t budget;
    const struct region *a, *b;
};

/* Tests each pair whose intervals in dim d meet; `regions` is sorted by their begin in d. */
static int overlap_sweep(struct overlap *o, const struct region **regions, uint32_t n, unsigned d)
{
    struct box common;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = i + 1; j < n && regions[j]->box.offset[d] < box_end(regions[i], d); j++) {
            if (--o->budget < 0)
                return RS_EEXHAUSTED;
            if (box_intersect(&regions[i]->box, &regions[j]->box, &common)) {
                o->a = regions[i];
                o->b = regions[j];
                return 1;
            }
        }
    return 0;
}

/* The end of the group that begins at `at`: the longest run whose intervals in d hang together. */
static uint32_t overlap_group(const struct region **regions, uint32_t n, uint32_t at, unsigned d)
{
    uint64_t end = box_end(regions[at], d);
    uint32_t i = at + 1;
    for (; i < n && regions[i]->box.offset[d] < end; i++)
        if (box_end(regions[i], d) > end)
            end = box_end(regions[i], d);
    return i;
}

/* Splits the boxes into groups that a whole plane of dim d separates, each group by the next dim,
 * until no dim separates any more. */
static int overlap_split(struct overlap *o, const struct region **regions, uint32_t n,
                         unsigned first_dim, unsigned depth)
{
    for (unsigned k = 0; n > 1 && k < o->n_dims; k++) {
        unsigned d = (first_dim + k) % o->n_dims;
        o->budget -= n;
        if (o->budget < 0)
            return RS_EEXHAUSTED;
        qsort_r(regions, n, sizeof *regions, compare_offset, &d);
        if (overlap_group(regions, n, 0, d) == n)
            continue;
        if (depth == 0)
            return overlap_sweep(o, regions, n, d);
        int r = 0;
        for (uint32_t at = 0, end; r == 0 && at < n; at = end) {
            end = overlap_group(regions, n, at, d);
            r = overlap_split(o, regions + at, end - at, (d + 1) % o->n_dims, depth - 1);
        }
        return r;
    }
    if (n < 2)
        return 0;
    return overlap_sweep(o, regions, n, (first_dim + o->n_dims - 1) % o->n_dims);
}

int region_overlap(const struct region **regions, uint32_t n, const struct region **ret_a,
                   const struct region **ret_b)
{
    if (n < 2)
        return 0;
    struct overlap o = {.n_dims = regions[0]->box.n_dims, .budget = OVERLAP_BUDGET};
    int r = 1;
    if (o.n_dims == 0) { /* all 0-d boxes are the same box: region_distinct leaves one */
        o.a = regions[0];
        o.b = regions[1];
    } else {
        r = overlap_split(&o, regions, n, 0, 32);
    }
    if (r == 1) {
        *ret_a = o.a;
        *ret_b = o.b;
    }
    return r;
}

/* Keeps of `boxes` what meets `need`, cut to it; returns how many and their elements. */
static uint32_t gap_clip(struct box *boxes, uint32_t n, const struct box *need,
                         uint64_t *ret_elements)
{
    uint32_t kept = 0;
    *ret_elements = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct box common;
        if (!box_intersect(&boxes[i], need, &common))
            continue;
        *ret_elements += box_elements(&common);
        boxes[kept++] = common;
    }
    return kept;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Collects the borders of the boxes strictly inside `need` in dim d, sorted. */
static uint32_t gap_borders(const struct box *boxes, uint32_t n, const struct box *need, unsigned d,
                            uint64_t *ret_borders)
{
    uint32_t found = 0;
    uint64_t need_end = need->offset[d] + need->size[d];
    for (uint32_t i = 0; i < n; i++) {
        uint64_t begin = boxes[i].offset[d], end = begin + boxes[i].size[d];
        if (begin > need->offset[d])
            ret_borders[found++] = begin;
        if (end < need_end)
            ret_borders[found++] = end;
    }
    qsort(ret_borders, found, sizeof *ret_borders, compare_u64);
    return found;
}

/* Where to cut `need`: the middle border of the dim that has most of them. */
static void gap_choose(const struct box *boxes, uint32_t n, const struct box *need,
                       uint64_t *borders, unsigned *ret_dim, uint64_t *ret_at)
{
    uint32_t most = 0;
    for (unsigned d = 0; d < need->n_dims; d++) {
        uint32_t found = gap_borders(boxes, n, need, d, borders);
        if (found <= most)
            continue;
        most = found;
        *ret_dim = d;
        *ret_at = borders[found / 2];
    }
}

static uint64_t covered(const struct box *boxes, uint32_t n, const struct box *need)
{
    uint64_t elements = 0;
    struct box common;
    for (uint32_t i = 0; i < n; i++)
        if (box_intersect(&boxes[i], need, &common))
            elements += box_elements(&common);
    return elements;
}

/* Halves `need` towards a side that lacks elements until nothing is left that covers it. */
static struct box gap_narrow(struct box *boxes, uint32_t n, struct box need, uint64_t *borders)
{
    while (n > 0) {
        unsigned d = 0;
        uint64_t at = 0, elements;
        gap_choose(boxes, n, &need, borders, &d, &at);
        struct box low = need, high = need;
        low.size[d] = at - need.offset[d];
        high.offset[d] = at;
        high.size[d] = need.size[d] - low.size[d];
        need = covered(boxes, n, &low) < box_elements(&low) ? low : high;
        n = gap_clip(boxes, n, &need, &elements);
    }
    return need;
}

int region_gap(const struct region *const *regions, uint32_t n, const struct box *need,
               struct box *ret_missing)
{
    if (box_empty(need))
        return 0;
    struct box *boxes = mem_calloc(n, sizeof *boxes);
    uint64_t *borders = mem_calloc(n, 2 * sizeof *borders);
    int r = boxes == NULL || borders == NULL ? RS_ENOMEM : 0;
    uint64_t elements = 0;
    for (uint32_t i = 0; r == 0 && i < n; i++)
        boxes[i] = regions[i]->box;
    if (r == 0) {
        n = gap_clip(boxes, n, need, &elements);
        r = elements < box_elements(need);
    }
    if (r == 1)
        *ret_missing = gap_narrow(boxes, n, *need, borders);
    mem_free(borders);
    mem_free(boxes);
    return r;
}
