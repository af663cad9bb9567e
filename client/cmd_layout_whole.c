/* Does each instance of a layout hold every tensor as far as the whole layout does? One that does not
 * is no fault of the layout (ranks that compute together may be split over instances by intent), but
 * most often [[0, 2], [1, 3]] stands where [[0, 1], [2, 3]] was meant. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "client/cmd_layout.h"
#include "layout/region.h"

#include "base/banned.h"

/* A part of one tensor that some rank of an instance holds. */
struct part {
    uint32_t instance;
    struct box box;
};

struct whole {
    const struct layout *l;
    uint32_t *instance_of; /* [rank] */
    uint64_t *has_of;      /* [instance] elements of one tensor */
    struct part *parts;    /* of one tensor */
    size_t n, capacity;
    uint32_t instance, tensor; /* the first that is not whole */
    uint64_t has, of;          /* elements of it */
    uint32_t n_tensors;        /* that are not whole in some instance */
};

static int compare_part(const void *x, const void *y)
{
    const struct part *a = x, *b = y;
    if (a->instance != b->instance)
        return a->instance < b->instance ? -1 : 1;
    return region_box_compare(&a->box, &b->box);
}

static int add_part(struct whole *w, uint32_t rank, const struct box *box)
{
    void *parts = w->parts;
    if (box_empty(box))
        return 0;
    int r = mem_grow(&parts, &w->capacity, w->n + 1, sizeof *w->parts);
    if (r != 0)
        return r;
    w->parts = parts;
    w->parts[w->n++] = (struct part){w->instance_of[rank], *box};
    return 0;
}

static int collect(struct whole *w, const struct tensor *t)
{
    int r = 0;
    w->n = 0;
    for (uint32_t i = 0; r == 0 && i < t->n_regions; i++)
        r = add_part(w, t->regions[i].rank, &t->regions[i].box);
    for (uint32_t i = 0; r == 0 && t->mesh >= 0 && i < w->l->meshes[t->mesh].n_ranks; i++) {
        struct box b = layout_position_shard(w->l, t, i);
        r = add_part(w, w->l->meshes[t->mesh].ranks[i], &b);
    }
    return r;
}

/* Distinct parts of a tensor are disjoint (layout_check), so elements add up. */
static uint64_t elements(const struct part *parts, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (i == 0 || region_box_compare(&parts[i - 1].box, &parts[i].box) != 0)
            sum += box_elements(&parts[i].box);
    return sum;
}

/* Elements that some rank holds; reorders the parts. */
static uint64_t elements_of_all(struct whole *w)
{
    for (size_t i = 0; i < w->n; i++)
        w->parts[i].instance = 0;
    qsort(w->parts, w->n, sizeof *w->parts, compare_part);
    return elements(w->parts, w->n);
}

/* Notes tensor t where an instance lacks a part of it, and the first such instance. */
static int judge(struct whole *w, uint32_t t)
{
    int r = collect(w, &w->l->tensors[t]);
    if (r != 0)
        return r;
    qsort(w->parts, w->n, sizeof *w->parts, compare_part);
    memset(w->has_of, 0, w->l->n_instances * sizeof *w->has_of);
    for (size_t i = 0, n; i < w->n; i += n) {
        for (n = 1; i + n < w->n && w->parts[i + n].instance == w->parts[i].instance;)
            n++;
        w->has_of[w->parts[i].instance] = elements(w->parts + i, n);
    }
    uint64_t of = elements_of_all(w);
    uint32_t i = 0;
    while (i < w->l->n_instances && w->has_of[i] == of)
        i++;
    if (i < w->l->n_instances && w->n_tensors++ == 0) {
        w->instance = i;
        w->tensor = t;
        w->has = w->has_of[i];
        w->of = of;
    }
    return 0;
}

static void put_ranks(struct buf *b, const struct instance *in)
{
    enum { RANKS_SAID = 8 };
    for (uint32_t i = 0; i < in->n_ranks && i < RANKS_SAID; i++)
        buf_printf(b, "%s%" PRIu32, i == 0 ? "" : ", ", in->ranks[i]);
    if (in->n_ranks > RANKS_SAID)
        buf_printf(b, ", …");
}

int cmd_layout_whole(const struct layout *l, struct buf *warning)
{
    struct whole w = {.l = l,
                      .instance_of = mem_calloc(l->n_ranks, sizeof(uint32_t)),
                      .has_of = mem_calloc(l->n_instances, sizeof(uint64_t))};
    int r = w.instance_of == NULL || w.has_of == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < l->n_instances; i++)
        for (uint32_t k = 0; k < l->instances[i].n_ranks; k++)
            w.instance_of[l->instances[i].ranks[k]] = i;
    for (uint32_t t = 0; r == 0 && l->n_instances > 1 && t < l->n_tensors; t++)
        r = judge(&w, t);
    if (r == 0 && w.n_tensors > 0) {
        buf_printf(warning, "instance %" PRIu32 " (ranks ", w.instance);
        put_ranks(warning, &l->instances[w.instance]);
        buf_printf(warning,
                   ") holds %" PRIu64 " of the %" PRIu64 " elements of tensor '%s'; %" PRIu32
                   " of %" PRIu32 " tensors are not whole in every instance: an instance is the "
                   "ranks that serve one copy of the model",
                   w.has, w.of, l->tensors[w.tensor].name, w.n_tensors, l->n_tensors);
        r = buf_error(warning);
    }
    mem_free(w.parts);
    mem_free(w.has_of);
    mem_free(w.instance_of);
    return r;
}
