/* Derived tensors of all destinations: which there are, in how many ways each is made, and which of
 * the destinations' tensors they are. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

uint32_t plan_n_tensors(const struct plan *p)
{
    return p->source->n_tensors + (uint32_t)p->derived.n;
}

const char *plan_tensor_name(const struct plan *p, uint32_t tensor)
{
    if (tensor < p->source->n_tensors)
        return p->source->tensors[tensor].name;
    const struct plan_derived *d = &p->derived.at[tensor - p->source->n_tensors];
    return p->destinations[d->layout]->tensors[d->tensor].name;
}

uint32_t plan_tensor_origin(const struct plan *p, uint32_t tensor)
{
    uint32_t n = p->source->n_tensors;
    return tensor < n ? tensor : p->derived.at[tensor - n].origin;
}

int64_t plan_find_tensor(const struct plan *p, const char *name)
{
    int64_t index = layout_find(p->source, name);
    for (uint32_t i = 0; index < 0 && i < p->derived.n; i++)
        if (strcmp(plan_tensor_name(p, p->source->n_tensors + i), name) == 0)
            index = (int64_t)p->source->n_tensors + i;
    return index;
}

/* --- collecting ------------------------------------------------------------------------------- */

struct found {
    const struct tensor *t;
    uint32_t layout, tensor;
    uint32_t origin;
};

/* How it is made: equal for tensors that are one. */
static int compare_making(const struct found *a, const struct found *b)
{
    int order = strcmp(a->t->name, b->t->name);
    if (order != 0)
        return order;
    if (a->origin != b->origin)
        return a->origin < b->origin ? -1 : 1;
    return memcmp(a->t->derived_block, b->t->derived_block, sizeof a->t->derived_block);
}

static int compare_found(const void *x, const void *y)
{
    const struct found *a = x, *b = y;
    int order = compare_making(a, b);
    return order != 0 ? order : a->layout < b->layout ? -1 : a->layout > b->layout;
}

static uint32_t count_derived(const struct plan *p)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < p->n_destinations; l++)
        for (uint32_t t = 0; t < p->destinations[l]->n_tensors; t++)
            n += p->destinations[l]->tensors[t].derived_from != NULL;
    return n;
}

/* Those whose origin the source has: for others the origin itself is missing, which is said. */
static uint32_t find_derived(const struct plan *p, struct found *f)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < p->n_destinations; l++)
        for (uint32_t t = 0; t < p->destinations[l]->n_tensors; t++) {
            const struct tensor *tensor = &p->destinations[l]->tensors[t];
            int64_t origin =
                tensor->derived_from == NULL ? -1 : layout_find(p->source, tensor->derived_from);
            if (origin >= 0)
                f[n++] = (struct found){tensor, l, t, (uint32_t)origin};
        }
    return n;
}

static void list_derived(struct plan *p, const struct found *f, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || compare_making(&f[i - 1], &f[i]) != 0)
            p->derived.at[p->derived.n++] = (struct plan_derived){
                .layout = f[i].layout, .tensor = f[i].tensor, .origin = f[i].origin, .first = i};
        p->derived.at[p->derived.n - 1].n++;
        p->derived_of.at[p->derived_of.n++] = (struct plan_derived_of){f[i].layout, f[i].tensor};
    }
}

int plan_derive(struct plan *p)
{
    uint32_t n = count_derived(p);
    if (n == 0)
        return 0;
    struct found *f = mem_calloc(n, sizeof *f);
    if (f == NULL || vec_reserve(&p->derived, n) != 0 || vec_reserve(&p->derived_of, n) != 0) {
        mem_free(f);
        return RS_ENOMEM;
    }
    n = find_derived(p, f);
    qsort(f, n, sizeof *f, compare_found);
    list_derived(p, f, n);
    mem_free(f);
    return 0;
}
