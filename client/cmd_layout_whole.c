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

enum { PARTS_MOST = 1 << 25 }; /* that are looked at: 0.2 us each */

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

/* Cut in the same way over the same ranks, as the experts of a layer are: what holds for one holds for
 * the other. */
static bool cut_alike(const struct tensor *a, const struct tensor *b)
{
    return a->mesh >= 0 && a->mesh == b->mesh && a->n_dims == b->n_dims &&
           memcmp(a->shape, b->shape, a->n_dims * sizeof *a->shape) == 0 &&
           memcmp(a->placements, b->placements, sizeof a->placements) == 0 &&
           memcmp(a->shard_order, b->shard_order, sizeof a->shard_order) == 0;
}

/* Notes all tensors, or as many as a few seconds allow; gives how many. */
static int judge_all(struct whole *w, uint32_t *ret_n)
{
    const struct tensor *all = w->l->tensors;
    uint64_t n_parts = 0;
    uint32_t t = 0;
    int r = 0;
    bool whole = true; /* the last tensor was */
    for (; r == 0 && w->l->n_instances > 1 && t < w->l->n_tensors && n_parts < PARTS_MOST; t++) {
        if (t > 0 && cut_alike(&all[t - 1], &all[t])) {
            w->n_tensors += !whole;
            continue;
        }
        uint32_t before = w->n_tensors;
        r = judge(w, t);
        whole = w->n_tensors == before;
        n_parts += w->n;
    }
    *ret_n = w->l->n_instances > 1 ? t : w->l->n_tensors;
    return r;
}

static void put_warning(struct buf *b, const struct whole *w, uint32_t n_judged)
{
    const struct layout *l = w->l;
    if (w->n_tensors > 0) {
        buf_printf(b, "instance %" PRIu32 " (ranks ", w->instance);
        put_ranks(b, &l->instances[w->instance]);
        buf_printf(b,
                   ") holds %" PRIu64 " of the %" PRIu64 " elements of tensor '%s'; %" PRIu32
                   " of %" PRIu32 " tensors are not whole in every instance: an instance is the "
                   "ranks that serve one copy of the model",
                   w->has, w->of, l->tensors[w->tensor].name, w->n_tensors, n_judged);
    }
    if (n_judged < l->n_tensors)
        buf_printf(b,
                   "%sthe layout is too large to check all of it: %" PRIu32 " of %" PRIu32
                   " tensors were looked at for instances that lack a part",
                   w->n_tensors > 0 ? "; " : "", n_judged, l->n_tensors);
}

int cmd_layout_whole(const struct layout *l, struct buf *warning)
{
    uint32_t n_judged;
    struct whole w = {.l = l,
                      .instance_of = mem_calloc(l->n_ranks, sizeof(uint32_t)),
                      .has_of = mem_calloc(l->n_instances, sizeof(uint64_t))};
    int r = w.instance_of == NULL || w.has_of == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < l->n_instances; i++)
        for (uint32_t k = 0; k < l->instances[i].n_ranks; k++)
            w.instance_of[l->instances[i].ranks[k]] = i;
    if (r == 0)
        r = judge_all(&w, &n_judged);
    if (r == 0) {
        put_warning(warning, &w, n_judged);
        r = buf_error(warning);
    }
    mem_free(w.parts);
    mem_free(w.has_of);
    mem_free(w.instance_of);
    return r;
}
