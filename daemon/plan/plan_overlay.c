/* Cells of a tensor with explicit regions on some side: the common refinement of all boxes.
 *
 * Sweeps dim after dim: between two neighbouring cuts of a dim the same boxes are active, and only
 * their cuts matter in the next dim. Neighbouring slabs with the same boxes are one. Mesh sides
 * come in as the boxes of their leaves, so one function serves every mix. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

int plan_set_union(struct plan *p, const uint32_t *sets, uint32_t n, uint32_t *ret_set)
{
    size_t total = 0;
    for (uint32_t i = 0; i < n; i++)
        total += p->sets.at[sets[i]].n;
    if (vec_reserve(&p->ends, p->ends.n + total) != 0 || vec_reserve(&p->sets, p->sets.n + 1) != 0)
        return RS_ENOMEM;
    struct end *out = p->ends.at + p->ends.n;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct set *s = &p->sets.at[sets[i]];
        if (s->n > 0)
            memcpy(out + k, p->ends.at + s->first, s->n * sizeof *out);
        k += s->n;
    }
    qsort(out, k, sizeof *out, plan_end_compare);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < k; i++)
        if (kept == 0 || plan_end_compare(&out[kept - 1], &out[i]) != 0)
            out[kept++] = out[i];
    *ret_set = (uint32_t)p->sets.n;
    p->sets.at[p->sets.n++] = (struct set){(uint32_t)p->ends.n, kept};
    p->ends.n += kept;
    return 0;
}

struct sweep {
    struct plan *p;
    struct err *e;
    const struct overlay_box *boxes;
    uint32_t class;
    uint8_t n_dims;
    struct box box; /* of the slab so far */
    uint32_t *sets; /* scratch of n */
    uint32_t n;
};

static int compare_u64(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static int add_cell(struct sweep *s, const uint32_t *active, uint32_t n)
{
    struct plan *p = s->p;
    uint32_t n_source = 0, n_takers = 0;
    struct plan_group g = {.class = s->class};
    for (uint32_t i = 0; i < n; i++)
        if (!s->boxes[active[i]].source)
            s->sets[n_takers++] = s->boxes[active[i]].set;
    if (n_takers == 0)
        return 0;
    if (plan_set_union(p, s->sets, n_takers, &g.takers) != 0)
        return err_set(s->e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < n; i++)
        if (s->boxes[active[i]].source)
            s->sets[n_source++] = s->boxes[active[i]].set;
    if (n_source == 0) {
        char text[256];
        return err_set(s->e, RS_EPRECOND, "no source region holds %s, which the destination needs",
                       box_text(&s->box, text, sizeof text));
    }
    if (plan_set_union(p, s->sets, n_source, &g.source) != 0 ||
        vec_reserve(&p->boxes, p->boxes.n + 1) != 0 ||
        vec_reserve(&p->groups, p->groups.n + 1) != 0)
        return err_set(s->e, RS_ENOMEM, "out of memory");
    struct plan_class *c = &p->classes.at[s->class];
    g.cell = c->n_cells++;
    p->boxes.at[p->boxes.n++] = s->box;
    p->groups.at[p->groups.n++] = g;
    return 0;
}

static int sweep_dim(struct sweep *s, uint8_t dim, const uint32_t *active, uint32_t n);

/* The boxes of `active` that cover [begin, end) of dim, into `slab`. */
static uint32_t slab_of(const struct sweep *s, uint8_t dim, const uint32_t *active, uint32_t n,
                        uint64_t begin, uint32_t *slab)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct box *b = &s->boxes[active[i]].box;
        if (b->offset[dim] <= begin && begin < b->offset[dim] + b->size[dim])
            slab[k++] = active[i];
    }
    return k;
}

static int sweep_slabs(struct sweep *s, uint8_t dim, const uint32_t *active, uint32_t n,
                       const uint64_t *cut, uint32_t n_cuts, uint32_t *slab)
{
    uint32_t k = 0, begin = 0;
    int r = 0;
    for (uint32_t i = 0; i + 1 < n_cuts && r == 0; i++) {
        if (i == begin)
            k = slab_of(s, dim, active, n, cut[i], slab);
        uint32_t *next = slab + n;
        uint32_t k_next = i + 2 < n_cuts ? slab_of(s, dim, active, n, cut[i + 1], next) : NONE32;
        if (k_next == k && memcmp(slab, next, k * sizeof *slab) == 0)
            continue;
        s->box.offset[dim] = cut[begin];
        s->box.size[dim] = cut[i + 1] - cut[begin];
        if (k > 0)
            r = sweep_dim(s, (uint8_t)(dim + 1), slab, k);
        begin = i + 1;
    }
    return r;
}

static int sweep_dim(struct sweep *s, uint8_t dim, const uint32_t *active, uint32_t n)
{
    if (dim == s->n_dims)
        return add_cell(s, active, n);
    uint64_t *cut = mem_calloc(2 * (size_t)n, sizeof *cut);
    uint32_t *slab = mem_calloc(2 * (size_t)n, sizeof *slab);
    int r = RS_ENOMEM;
    if (cut != NULL && slab != NULL) {
        for (uint32_t i = 0; i < n; i++) {
            const struct box *b = &s->boxes[active[i]].box;
            cut[2 * i] = b->offset[dim];
            cut[2 * i + 1] = b->offset[dim] + b->size[dim];
        }
        qsort(cut, 2 * (size_t)n, sizeof *cut, compare_u64);
        uint32_t k = 0;
        for (uint32_t i = 0; i < 2 * n; i++)
            if (k == 0 || cut[k - 1] != cut[i])
                cut[k++] = cut[i];
        r = sweep_slabs(s, dim, active, n, cut, k, slab);
    } else {
        r = err_set(s->e, RS_ENOMEM, "out of memory");
    }
    mem_free(cut);
    mem_free(slab);
    return r;
}

int plan_overlay(struct plan *p, uint32_t class, const struct overlay_box *boxes, uint32_t n,
                 struct err *e)
{
    struct plan_class *c = &p->classes.at[class];
    struct sweep s = {.p = p, .e = e, .boxes = boxes, .class = class, .n_dims = c->n_dims, .n = n};
    uint32_t *active = mem_calloc((size_t)n + 1, sizeof *active);
    s.sets = mem_calloc((size_t)n + 1, sizeof *s.sets);
    c->first_box = (uint32_t)p->boxes.n;
    c->first_group = (uint32_t)p->groups.n;
    s.box.n_dims = s.n_dims;
    int r;
    if (active == NULL || s.sets == NULL) {
        r = err_set(e, RS_ENOMEM, "out of memory");
    } else {
        for (uint32_t i = 0; i < n; i++)
            active[i] = i;
        r = sweep_dim(&s, 0, active, n);
    }
    mem_free(active);
    mem_free(s.sets);
    return r;
}
