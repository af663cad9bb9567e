/* For tests of layouts and plans: JSON with single quotes, a generator of random layouts, and who
 * holds an element by a rule of its own (index arithmetic per element, no boxes). */
#ifndef RS_TEST_LAYOUTS_H
#define RS_TEST_LAYOUTS_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "layout/layout.h"

/* Parses JSON written with ' for ", so that it can stand in C; the result of layout_from_json. */
static inline int layouts_try(const char *quoted, struct layout **ret, struct err *e)
{
    char *text = strdup(quoted);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '\'')
            *c = '"';
    *ret = NULL;
    int r = layout_from_json(text, strlen(text), ret, e);
    free(text);
    return r;
}

static inline struct layout *layouts_parse(const char *quoted)
{
    struct layout *l;
    struct err e = {0};
    int r = layouts_try(quoted, &l, &e);
    ck_assert_msg(r == 0, "%s: %s", err_name(r), e.text);
    return l;
}

/* A layout of one tensor "w" of float32 on one mesh: the pieces of JSON between the brackets.
 * `more` is further keys of the tensor, with a leading comma. */
static inline int layouts_try_one(const char *shape, unsigned n_ranks, const char *mesh_shape,
                                  const char *ranks, const char *placements, const char *more,
                                  struct layout **ret, struct err *e)
{
    char *text;
    ck_assert_int_gt(asprintf(&text,
                              "{'name': 'l', 'ranks': %u, 'meshes': [{'name': 'm', 'shape': [%s], "
                              "'ranks': [%s]}], 'tensors': [{'name': 'w', 'shape': [%s], 'dtype': "
                              "'float32', 'mesh': 'm', 'placements': [%s]%s}]}",
                              n_ranks, mesh_shape, ranks, shape, placements, more),
                     0);
    int r = layouts_try(text, ret, e);
    free(text);
    return r;
}

static inline struct layout *layouts_one(const char *shape, unsigned n_ranks,
                                         const char *mesh_shape, const char *ranks,
                                         const char *placements, const char *more)
{
    struct layout *l;
    struct err e = {0};
    int r = layouts_try_one(shape, n_ranks, mesh_shape, ranks, placements, more, &l, &e);
    ck_assert_msg(r == 0, "%s: %s", err_name(r), e.text);
    return l;
}

/* --- who holds an element, by index arithmetic --------------------------- */

static inline bool layouts_dim_holds(const struct layout *l, const struct tensor *t, unsigned d,
                                     const uint32_t *coordinates, uint64_t x)
{
    const struct mesh *m = &l->meshes[t->mesh];
    uint64_t length = t->shape[d];
    for (unsigned k = 0; k < m->n_dims; k++) {
        unsigned i = t->shard_order[k];
        if (t->placements[i] != (int)d)
            continue;
        uint64_t chunk = (length + m->shape[i] - 1) / m->shape[i];
        uint64_t piece = x / chunk;
        if (piece != coordinates[i])
            return false;
        x -= piece * chunk;
        length = length - piece * chunk < chunk ? length - piece * chunk : chunk;
    }
    return true;
}

/* How often `rank` holds the element (1 or 0; more would be a fault of the layout). */
static inline unsigned layouts_holds(const struct layout *l, const struct tensor *t, uint32_t rank,
                                     const uint64_t *at)
{
    unsigned n = 0;
    for (uint32_t i = 0; t->mesh < 0 && i < t->n_regions; i++) {
        bool in = t->regions[i].rank == rank;
        for (unsigned d = 0; d < t->n_dims; d++)
            in = in && at[d] >= t->regions[i].box.offset[d] &&
                 at[d] - t->regions[i].box.offset[d] < t->regions[i].box.size[d];
        n += in;
    }
    if (t->mesh < 0)
        return n;
    const struct mesh *m = &l->meshes[t->mesh];
    for (uint32_t p = 0; p < m->n_ranks; p++) {
        if (m->ranks[p] != rank)
            continue;
        uint32_t coordinates[LAYOUT_MAX_MESH_DIMS], rest = p;
        for (unsigned i = m->n_dims; i-- > 0; rest /= m->shape[i])
            coordinates[i] = rest % m->shape[i];
        bool in = true;
        for (unsigned d = 0; d < t->n_dims; d++)
            in = in && layouts_dim_holds(l, t, d, coordinates, at[d]);
        n += in;
    }
    return n;
}

static inline uint64_t layouts_elements(const struct tensor *t)
{
    uint64_t n = 1;
    for (unsigned d = 0; d < t->n_dims; d++)
        n *= t->shape[d];
    return n;
}

/* Coordinates of the element with that row-major number. */
static inline void layouts_unravel(const struct tensor *t, uint64_t element, uint64_t *ret_at)
{
    for (unsigned d = t->n_dims; d-- > 0; element /= t->shape[d])
        ret_at[d] = element % t->shape[d];
}

static inline bool layouts_box_has(const struct box *b, const uint64_t *at)
{
    for (unsigned d = 0; d < b->n_dims; d++)
        if (at[d] < b->offset[d] || at[d] - b->offset[d] >= b->size[d])
            return false;
    return true;
}

/* --- random layouts ------------------------------------------------------ */

static inline uint32_t layouts_below(uint64_t *seed, uint32_t n)
{
    return (uint32_t)(random_next(seed) % n);
}

/* A mesh of 1 to 3 dims over a shuffled subset of the ranks. */
static inline void layouts_random_mesh(struct layout *l, struct mesh *m, unsigned number,
                                       uint64_t *seed)
{
    char name[16];
    (void)snprintf(name, sizeof name, "m%u", number);
    m->name = strdup(name);
    m->n_ranks = 1;
    do {
        m->shape[m->n_dims] = 1 + layouts_below(seed, 4);
        if (m->n_ranks * m->shape[m->n_dims] > l->n_ranks)
            m->shape[m->n_dims] = 1;
        m->n_ranks *= m->shape[m->n_dims++];
    } while (m->n_dims < 3 && layouts_below(seed, 2) == 0);
    uint32_t *all = calloc(l->n_ranks, sizeof *all);
    m->ranks = calloc(m->n_ranks, sizeof *m->ranks);
    for (uint32_t i = 0; i < l->n_ranks; i++)
        all[i] = i;
    for (uint32_t i = 0; i < m->n_ranks; i++) {
        uint32_t k = i + layouts_below(seed, l->n_ranks - i);
        m->ranks[i] = all[k];
        all[k] = all[i];
    }
    free(all);
}

static inline void layouts_random_placements(struct layout *l, struct tensor *t, uint64_t *seed)
{
    const struct mesh *m = &l->meshes[t->mesh];
    for (unsigned i = 0; i < m->n_dims; i++) {
        uint32_t d = layouts_below(seed, t->n_dims + 1U);
        t->placements[i] = d == t->n_dims ? LAYOUT_REPLICATE : (int8_t)d;
        t->shard_order[i] = (uint8_t)i;
    }
    for (unsigned i = m->n_dims; i-- > 1;) {
        unsigned k = layouts_below(seed, i + 1);
        uint8_t swap = t->shard_order[i];
        t->shard_order[i] = t->shard_order[k];
        t->shard_order[k] = swap;
    }
}

/* Cuts `b` at random into disjoint boxes, each held by one or two random ranks. */
static inline void layouts_random_regions(struct layout *l, struct tensor *t, struct box b,
                                          unsigned depth, uint64_t *seed)
{
    uint32_t d = t->n_dims == 0 ? 0 : layouts_below(seed, t->n_dims);
    if (depth > 0 && t->n_dims > 0 && b.size[d] > 1 && layouts_below(seed, 4) != 0) {
        struct box low = b, high = b;
        low.size[d] = 1 + layouts_below(seed, (uint32_t)b.size[d] - 1);
        high.offset[d] += low.size[d];
        high.size[d] -= low.size[d];
        layouts_random_regions(l, t, low, depth - 1, seed);
        layouts_random_regions(l, t, high, depth - 1, seed);
        return;
    }
    uint32_t first = layouts_below(seed, l->n_ranks), copies = 1 + layouts_below(seed, 2);
    for (uint32_t i = 0; i < copies && i < l->n_ranks; i++)
        t->regions[t->n_regions++] = (struct region){.rank = (first + i) % l->n_ranks, .box = b};
}

/* Gives tensor t of l (shape, dtype set) a random mesh or random regions that tile it. */
static inline void layouts_random_hold(struct layout *l, struct tensor *t, uint64_t *seed)
{
    t->mesh = (int32_t)layouts_below(seed, l->n_meshes + 1) - 1;
    if (t->mesh >= 0) {
        layouts_random_placements(l, t, seed);
        return;
    }
    t->regions = calloc(64, sizeof *t->regions);
    if (layouts_elements(t) > 0)
        layouts_random_regions(l, t, box_whole(t->n_dims, t->shape), 4, seed);
}

/* 0 to 5 dims, at most a few hundred elements, now and then none. */
static inline void layouts_random_shape(struct tensor *t, uint64_t *seed)
{
    t->n_dims = (uint8_t)layouts_below(seed, 6);
    for (unsigned d = 0; d < t->n_dims; d++)
        t->shape[d] = layouts_below(seed, 40) == 0 ? 0
                                                   : 1 + layouts_below(seed, t->n_dims <= 2   ? 14
                                                                             : t->n_dims == 3 ? 6
                                                                                              : 3);
}

/* A checked layout of n_tensors tensors. Where `like` is given, its names, shapes and dtypes. */
static inline struct layout *layouts_random(uint64_t *seed, const char *name, uint32_t n_ranks,
                                            uint32_t n_tensors, const struct layout *like)
{
    struct layout *l = layout_new();
    struct err e = {0};
    l->name = strdup(name);
    l->n_ranks = n_ranks;
    l->n_meshes = 1 + layouts_below(seed, 3);
    l->meshes = calloc(l->n_meshes, sizeof *l->meshes);
    for (uint32_t i = 0; i < l->n_meshes; i++)
        layouts_random_mesh(l, &l->meshes[i], i, seed);
    l->n_tensors = n_tensors;
    l->tensors = calloc(n_tensors, sizeof *l->tensors);
    for (uint32_t i = 0; i < n_tensors; i++) {
        struct tensor *t = &l->tensors[i];
        char text[16];
        (void)snprintf(text, sizeof text, "t%u", i);
        t->name = strdup(like != NULL ? like->tensors[i].name : text);
        t->dtype = DTYPE_FLOAT32;
        if (like == NULL) {
            layouts_random_shape(t, seed);
        } else {
            t->n_dims = like->tensors[i].n_dims;
            memcpy(t->shape, like->tensors[i].shape, sizeof t->shape);
            t->dtype = like->tensors[i].dtype;
        }
        layouts_random_hold(l, t, seed);
    }
    int r = layout_check(l, &e);
    ck_assert_msg(r == 0, "%s", e.text);
    ck_assert_int_eq(layout_digest(l), 0);
    return l;
}

#endif
