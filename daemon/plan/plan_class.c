/* Classes: tensors into units, units into shapes, shapes into classes, classes into groups.
 *
 * One pass over the tensors in name order, both sides at once. A unit's raw key (sizes, dtypes,
 * meshes, placements) finds its shape in a table; only a new shape costs more: its intervals are
 * merged per dim, and the merged index lists (not the sizes) find its class. So 70,000 tensors with
 * 15 different keys are 70,000 look-ups, and 20,000 different shapes on the same meshes are few
 * classes. */
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "layout/scale.h"
#include "plan/plan_spec.h"

#include "base/banned.h"

struct table {
    uint32_t *slot; /* index + 1 */
    uint32_t size, n;
};

/* What a unit's elements are, and how the source's are cut for it. */
struct making {
    enum plan_value value;
    uint32_t block[2];
    const uint64_t *shape; /* of the unit */
};

struct builder {
    struct plan *p;
    const struct plan_input *input;
    struct err *e;
    struct specs specs;
    struct table shapes, classes;
    VEC(uint64_t) keys;          /* raw keys of shapes */
    VEC(uint64_t) key_at;        /* per shape: begin; its end is the next one's begin */
    VEC(uint32_t) structure_end; /* per class */
    VEC(uint32_t) scratch;       /* structure under construction */
    VEC(uint64_t) side_cuts;
    VEC(struct overlay_box) overlay;
    uint64_t *key;    /* raw key under construction */
    uint32_t *cursor; /* per destination: next tensor */
    /* per side: this unit's tensor, NULL where it has none; of the source the one that it is made from */
    const struct tensor **at;
    struct making making; /* of this unit */
    uint64_t total_bytes;
};

static int no_memory(struct builder *b)
{
    return err_set(b->e, RS_ENOMEM, "out of memory");
}

/* --- tables ------------------------------------------------------------------------------------
 */

static int table_grow(struct table *t, uint64_t (*hash)(const struct builder *b, uint32_t i),
                      const struct builder *b)
{
    if (t->n * 2 < t->size)
        return 0;
    uint32_t size = t->size == 0 ? 1024 : t->size * 2;
    uint32_t *slot = mem_calloc(size, sizeof *slot);
    if (slot == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < t->n; i++) {
        uint64_t at = hash(b, i);
        while (slot[at & (size - 1)] != 0)
            at++;
        slot[at & (size - 1)] = i + 1;
    }
    mem_free(t->slot);
    t->slot = slot;
    t->size = size;
    return 0;
}

static uint64_t shape_hash(const struct builder *b, uint32_t i)
{
    return hash_words(b->keys.at + b->key_at.at[i],
                      (b->key_at.at[i + 1] - b->key_at.at[i]) * sizeof(uint64_t));
}

/* Classes of explicit cells have an empty structure; they are in the table but never asked for. */
static uint64_t class_hash(const struct builder *b, uint32_t i)
{
    uint32_t begin = i == 0 ? 0 : b->structure_end.at[i - 1];
    return hash_words(b->p->structures.at + begin,
                      (b->structure_end.at[i] - begin) * sizeof(uint32_t));
}

/* --- structure of a shape: merged intervals --------------------------------------------------- */

/* Per side that takes part: where its cuts of this dim begin in side_cuts, and the walk's position.
 */
struct walk {
    uint64_t *cut;
    uint32_t leaf;
};

static bool scaled(const struct builder *b)
{
    return b->making.value != PLAN_SOURCE;
}

static int straddle(struct builder *b, uint8_t dim, uint64_t edge)
{
    const uint32_t *block = b->making.block;
    return err_set(
        b->e, RS_EPRECOND,
        "source shard edge %llu of its dim %u lies inside a block of %u x %u, so no source "
        "rank holds the whole block to scale it; shard the source at multiples of %u, or "
        "declare a block that its shards hold",
        (unsigned long long)edge, dim, block[0], block[1], block[dim]);
}

/* The source's cuts of one dim: between blocks only; for scales they are counted in blocks. */
static int source_cuts(struct builder *b, const struct spec *s, uint8_t dim, uint64_t *ret_cuts)
{
    uint64_t length = b->at[0]->shape[dim];
    spec_cuts(s, dim, length, ret_cuts);
    if (!scaled(b))
        return 0;
    for (uint32_t i = 0; i <= s->leaves[dim]; i++) {
        if (ret_cuts[i] % b->making.block[dim] != 0 && ret_cuts[i] != length)
            return straddle(b, dim, ret_cuts[i]);
        if (b->making.value == PLAN_SCALES)
            ret_cuts[i] = scale_count(b->making.block[dim], ret_cuts[i]);
    }
    return 0;
}

/* Merges the sides' cuts of one dim: appends, per non-empty interval, each side's leaf to scratch
 * and the interval's begin to the plan's cuts; returns the number of intervals through *ret. */
static int merge_dim(struct builder *b, uint8_t dim, uint64_t length, const uint32_t *spec,
                     uint32_t n_sides, uint32_t *ret)
{
    struct plan *p = b->p;
    size_t need = 0, most = 1;
    for (uint32_t i = 0; i < n_sides; i++) {
        need += b->specs.v.at[spec[i]].leaves[dim] + 1U;
        most += b->specs.v.at[spec[i]].leaves[dim];
    }
    if (vec_reserve(&b->side_cuts, need + n_sides) != 0 ||
        vec_reserve(&p->cuts, p->cuts.n + most + 1) != 0 ||
        vec_reserve(&b->scratch, b->scratch.n + most * n_sides + 1) != 0)
        return no_memory(b);
    uint64_t *at = b->side_cuts.at + n_sides; /* the first n_sides words are the walks' positions */
    uint64_t *leaf = b->side_cuts.at;
    for (uint32_t i = 0; i < n_sides; i++) {
        int r = 0;
        if (i == 0)
            r = source_cuts(b, &b->specs.v.at[spec[i]], dim, at);
        else
            spec_cuts(&b->specs.v.at[spec[i]], dim, length, at);
        if (r != 0)
            return r;
        at += b->specs.v.at[spec[i]].leaves[dim] + 1;
        leaf[i] = 0;
    }
    uint32_t *n_here = &b->scratch.at[b->scratch.n++];
    uint64_t begin = 0;
    *n_here = 0;
    while (begin < length) {
        uint64_t end = length;
        at = b->side_cuts.at + n_sides;
        for (uint32_t i = 0; i < n_sides; i++) {
            while (at[leaf[i] + 1] <= begin)
                leaf[i]++;
            end = at[leaf[i] + 1] < end ? at[leaf[i] + 1] : end;
            b->scratch.at[b->scratch.n++] = (uint32_t)leaf[i];
            at += b->specs.v.at[spec[i]].leaves[dim] + 1;
        }
        p->cuts.at[p->cuts.n++] = begin;
        (*n_here)++;
        begin = end;
    }
    p->cuts.at[p->cuts.n++] = length;
    *ret = *n_here;
    return 0;
}

/* Leaf sets of the cell on each side, from the structure (first the source, then the destinations).
 */
static void cell_sets(const struct builder *b, const struct plan_class *c, const uint32_t *spec,
                      uint32_t cell, uint32_t *ret_sets)
{
    const uint32_t *dims[BOX_MAX_DIMS];
    const uint32_t *at = b->p->structures.at + c->structure;
    uint32_t index[BOX_MAX_DIMS];
    for (uint8_t d = 0; d < c->n_dims; d++) {
        dims[d] = at + 1;
        at += 1 + (size_t)c->intervals[d] * c->n_sides;
    }
    for (int d = c->n_dims - 1; d >= 0; d--) {
        index[d] = cell % c->intervals[d];
        cell /= c->intervals[d];
    }
    for (uint32_t i = 0; i < c->n_sides; i++) {
        const struct spec *sp = &b->specs.v.at[spec[i]];
        uint32_t leaf = 0;
        for (uint8_t d = 0; d < BOX_MAX_DIMS; d++) {
            uint32_t in_dim = d < c->n_dims ? dims[d][(size_t)index[d] * c->n_sides + i] : 0;
            leaf = leaf * sp->leaves[d] + in_dim;
        }
        ret_sets[i] = sp->first_set + leaf;
    }
}

static int class_groups(struct builder *b, uint32_t class, const uint32_t *spec)
{
    struct plan *p = b->p;
    struct plan_class *c = &p->classes.at[class];
    uint32_t *sets = mem_calloc(c->n_sides, sizeof *sets);
    if (sets == NULL || vec_reserve(&p->groups, p->groups.n + c->n_cells) != 0) {
        mem_free(sets);
        return no_memory(b);
    }
    c->first_group = (uint32_t)p->groups.n;
    bool absent = false;
    int r = 0;
    for (uint32_t cell = 0; cell < c->n_cells && r == 0; cell++) {
        cell_sets(b, c, spec, cell, sets);
        uint32_t takers = sets[1];
        if (c->n_sides > 2)
            r = plan_set_union(p, sets + 1, c->n_sides - 1, &takers);
        if (r == 0 && p->sets.at[takers].n > 0 && p->sets.at[sets[0]].n == 0)
            absent = true;
        p->groups.at[p->groups.n++] =
            (struct plan_group){.class = class, .cell = cell, .source = sets[0], .takers = takers};
    }
    mem_free(sets);
    if (r == 0 && absent)
        return err_set(b->e, RS_EPRECOND,
                       "source layout '%s': all ranks that hold some needed part are absent",
                       b->specs.sides[0].layout->name != NULL ? b->specs.sides[0].layout->name
                                                              : "");
    return r == 0 ? 0 : no_memory(b);
}

/* --- new shapes ----------------------------------------------------------------------------------
 */

static int new_class(struct builder *b, uint8_t n_dims, enum plan_strategy strategy,
                     uint32_t *ret_class)
{
    struct plan *p = b->p;
    if (vec_reserve(&p->classes, p->classes.n + 1) != 0 ||
        vec_reserve(&b->structure_end, p->classes.n + 1) != 0 ||
        table_grow(&b->classes, class_hash, b) != 0)
        return no_memory(b);
    *ret_class = (uint32_t)p->classes.n++;
    p->classes.at[*ret_class] =
        (struct plan_class){.structure = NONE32, .n_dims = n_dims, .strategy = (uint8_t)strategy};
    b->structure_end.at[*ret_class] = (uint32_t)p->structures.n;
    b->classes.n++;
    return 0;
}

/* The class of the structure in scratch (head: strategy, dims, specs; then the merged lists). */
static int find_class(struct builder *b, const struct plan_class *like, uint32_t head,
                      const uint32_t *spec, uint32_t *ret_class)
{
    struct plan *p = b->p;
    size_t n = b->scratch.n;
    if (table_grow(&b->classes, class_hash, b) != 0)
        return no_memory(b);
    uint64_t at = hash_words(b->scratch.at, n * sizeof(uint32_t));
    uint32_t slot;
    while ((slot = b->classes.slot[at & (b->classes.size - 1)]) != 0) {
        uint32_t begin = slot == 1 ? 0 : b->structure_end.at[slot - 2];
        if (b->structure_end.at[slot - 1] - begin == n &&
            memcmp(p->structures.at + begin, b->scratch.at, n * sizeof(uint32_t)) == 0) {
            *ret_class = slot - 1;
            return 0;
        }
        at++;
    }
    uint64_t n_cells = 1;
    for (uint8_t d = 0; d < like->n_dims; d++)
        if ((n_cells *= like->intervals[d]) > INT32_MAX)
            return err_set(b->e, RS_EEXHAUSTED, "its shards overlap in more than 2^31 cells");
    if (vec_reserve(&p->structures, p->structures.n + n) != 0)
        return no_memory(b);
    size_t begin = p->structures.n;
    memcpy(p->structures.at + begin, b->scratch.at, n * sizeof(uint32_t));
    p->structures.n += n;
    int r = new_class(b, like->n_dims, (enum plan_strategy)like->strategy, ret_class);
    if (r != 0)
        return r;
    struct plan_class *c = &p->classes.at[*ret_class];
    memcpy(c->intervals, like->intervals, sizeof c->intervals);
    c->n_sides = like->n_sides;
    c->structure = (uint32_t)begin + head;
    c->n_cells = (uint32_t)n_cells;
    at = hash_words(b->scratch.at, n * sizeof(uint32_t));
    while (b->classes.slot[at & (b->classes.size - 1)] != 0)
        at++;
    b->classes.slot[at & (b->classes.size - 1)] = *ret_class + 1;
    return class_groups(b, *ret_class, spec);
}

static int mesh_shape(struct builder *b, struct plan_shape *s, enum plan_strategy strategy)
{
    struct plan_class like = {.n_dims = s->n_dims, .strategy = (uint8_t)strategy};
    uint32_t *spec = mem_calloc(b->specs.n_sides, sizeof *spec);
    if (spec == NULL || vec_reserve(&b->scratch, (size_t)b->specs.n_sides + 2) != 0) {
        mem_free(spec);
        return no_memory(b);
    }
    int r = 0;
    b->scratch.n = 0;
    b->scratch.at[b->scratch.n++] = (uint32_t)strategy;
    b->scratch.at[b->scratch.n++] = s->n_dims;
    for (uint32_t i = 0; i < b->specs.n_sides && r == 0; i++) {
        if (b->at[i] == NULL)
            continue;
        struct spec_key key = specs_key(&b->specs, i, b->at[i]);
        r = specs_get(&b->specs, b->p, &key, &spec[like.n_sides], b->e);
        b->scratch.at[b->scratch.n++] = spec[like.n_sides++];
    }
    uint32_t head = (uint32_t)b->scratch.n;
    s->cuts = (uint32_t)b->p->cuts.n;
    for (uint8_t d = 0; d < s->n_dims && r == 0; d++)
        r = merge_dim(b, d, s->size[d], spec, like.n_sides, &like.intervals[d]);
    if (r == 0)
        r = find_class(b, &like, head, spec, &s->class);
    mem_free(spec);
    return r;
}

/* --- tensors by regions ----------------------------------------------------------------------- */

/* The part of a source box that can be scaled: whole blocks. False: nothing of it. */
static bool source_box(const struct builder *b, struct box *box)
{
    struct box scales;
    if (!scaled(b))
        return true;
    if (!scale_inside(b->making.block, b->at[0]->shape, box, &scales))
        return false;
    *box = b->making.value == PLAN_SCALES
               ? scales
               : scale_elements(b->making.block, b->at[0]->shape, &scales);
    return true;
}

static int add_overlay(struct builder *b, struct box *box, uint32_t set, bool source)
{
    if (box_empty(box) || (source && !source_box(b, box)))
        return 0;
    if (vec_reserve(&b->overlay, b->overlay.n + 1) != 0)
        return no_memory(b);
    b->overlay.at[b->overlay.n++] = (struct overlay_box){*box, set, source};
    return 0;
}

static int overlay_regions(struct builder *b, uint32_t side, const struct tensor *t)
{
    struct plan *p = b->p;
    int r = 0;
    for (uint32_t i = 0; i < t->n_regions && r == 0; i++) {
        uint32_t device = 0;
        if (side_absent(&b->specs.sides[side], t->regions[i].rank))
            continue;
        r = side_device(&b->specs.sides[side], p->topology, t->regions[i].rank, &device, b->e);
        if (r != 0)
            return r;
        if (vec_reserve(&p->sets, p->sets.n + 1) != 0 || vec_reserve(&p->ends, p->ends.n + 1) != 0)
            return no_memory(b);
        p->sets.at[p->sets.n++] = (struct set){(uint32_t)p->ends.n, 1};
        p->ends.at[p->ends.n++] = side_end(p, &b->specs, side, device, t->regions[i].rank);
        struct box box = t->regions[i].box;
        r = add_overlay(b, &box, (uint32_t)p->sets.n - 1, side == 0);
    }
    return r;
}

static int overlay_mesh(struct builder *b, uint32_t side, const struct tensor *t)
{
    struct spec_key key = specs_key(&b->specs, side, t);
    uint32_t index = 0;
    uint64_t *cuts[BOX_MAX_DIMS] = {NULL};
    int r = specs_get(&b->specs, b->p, &key, &index, b->e);
    if (r != 0)
        return r;
    const struct spec *sp = &b->specs.v.at[index];
    for (uint8_t d = 0; d < t->n_dims && r == 0; d++) {
        cuts[d] = mem_calloc(sp->leaves[d] + 1U, sizeof(uint64_t));
        if (cuts[d] == NULL)
            r = no_memory(b);
        else
            spec_cuts(sp, d, t->shape[d], cuts[d]);
    }
    for (uint32_t leaf = 0; leaf < sp->n_leaves && r == 0; leaf++) {
        struct box box = {.n_dims = t->n_dims};
        uint32_t rest = leaf;
        for (int d = BOX_MAX_DIMS - 1; d >= 0; d--) {
            uint32_t i = rest % sp->leaves[d];
            rest /= sp->leaves[d];
            if (d < t->n_dims) {
                box.offset[d] = cuts[d][i];
                box.size[d] = cuts[d][i + 1] - cuts[d][i];
            }
        }
        if (r == 0 && b->p->sets.at[sp->first_set + leaf].n > 0) /* else its ranks are absent */
            r = add_overlay(b, &box, sp->first_set + leaf, side == 0);
    }
    for (uint8_t d = 0; d < t->n_dims; d++)
        mem_free(cuts[d]);
    return r;
}

static int overlay_shape(struct builder *b, struct plan_shape *s, enum plan_strategy strategy)
{
    int r = 0;
    b->overlay.n = 0;
    for (uint32_t i = 0; i < b->specs.n_sides && r == 0; i++)
        if (b->at[i] != NULL)
            r = b->at[i]->mesh < 0 ? overlay_regions(b, i, b->at[i]) : overlay_mesh(b, i, b->at[i]);
    if (r == 0)
        r = new_class(b, s->n_dims, strategy, &s->class);
    if (r == 0)
        r = plan_overlay(b->p, s->class, b->overlay.at, (uint32_t)b->overlay.n, b->e);
    if (r == RS_EPRECOND && scaled(b) && b->e != NULL) {
        struct err cause = *b->e;
        r = err_set(b->e, r,
                    "%s; each of its blocks of %u x %u must lie in one source region: move the "
                    "regions' edges to multiples of that, or declare a block that they hold",
                    cause.text, b->making.block[0], b->making.block[1]);
    }
    return r;
}

/* --- units ------------------------------------------------------------------------------------ */

static size_t put_side_key(const struct builder *b, uint32_t side, uint64_t *key)
{
    const struct tensor *t = b->at[side];
    memset(key, 0, 3 * sizeof *key);
    if (t == NULL)
        return 3;
    if (t->mesh < 0) {
        key[0] = UINT64_MAX;
        key[1] = (uint64_t)(uintptr_t)t; /* regions: the tensor stands for itself */
        return 3;
    }
    struct spec_key k = specs_key(&b->specs, side, t);
    key[0] = (uint64_t)k.mesh + 1;
    memcpy(key + 1, k.placements, sizeof k.placements);
    memcpy((char *)(key + 1) + sizeof k.placements, k.order, sizeof k.order);
    return 3;
}

static int new_shape(struct builder *b, size_t n_key, enum dtype wire, enum plan_strategy strategy)
{
    struct plan *p = b->p;
    const struct tensor *t = b->at[0];
    if (vec_reserve(&p->shapes, p->shapes.n + 1) != 0 ||
        vec_reserve(&b->keys, b->keys.n + n_key) != 0 ||
        vec_reserve(&b->key_at, p->shapes.n + 2) != 0)
        return no_memory(b);
    struct plan_shape s = {.first_piece = NONE32,
                           .n_dims = t->n_dims,
                           .source_dtype = (uint8_t)t->dtype,
                           .wire = (uint8_t)wire,
                           .wire_bytes = (uint8_t)dtype_bytes(wire),
                           .value = (uint8_t)b->making.value};
    bool regions = false;
    memcpy(s.size, b->making.shape, t->n_dims * sizeof *s.size);
    if (scaled(b)) {
        memcpy(s.block, b->making.block, sizeof s.block);
        memcpy(s.origin, t->shape, sizeof s.origin);
    }
    for (uint32_t i = 0; i < b->specs.n_sides; i++)
        regions = regions || (b->at[i] != NULL && b->at[i]->mesh < 0);
    int r = regions ? overlay_shape(b, &s, strategy) : mesh_shape(b, &s, strategy);
    if (r != 0)
        return err_prefix(b->e, r, "tensor '%s'", t->name);
    memcpy(b->keys.at + b->keys.n, b->key, n_key * sizeof(uint64_t));
    b->key_at.at[p->shapes.n] = b->keys.n;
    b->keys.n += n_key;
    b->key_at.at[p->shapes.n + 1] = b->keys.n;
    p->shapes.at[p->shapes.n++] = s;
    return 0;
}

/* The unit of the tensors in b->at: finds or makes its shape. */
static int add_unit(struct builder *b, uint32_t tensor, enum dtype wire,
                    enum plan_strategy strategy)
{
    struct plan *p = b->p;
    const struct tensor *t = b->at[0];
    size_t n = 0;
    b->key[n++] = (uint64_t)t->n_dims | (uint64_t)t->dtype << 8 | (uint64_t)wire << 16 |
                  (uint64_t)strategy << 24 | (uint64_t)b->making.value << 32;
    for (uint8_t d = 0; d < t->n_dims; d++)
        b->key[n++] = t->shape[d];
    b->key[n++] = scaled(b) ? (uint64_t)b->making.block[0] << 32 | b->making.block[1] : 0;
    for (uint32_t i = 0; i < b->specs.n_sides; i++)
        n += put_side_key(b, i, b->key + n);
    if (table_grow(&b->shapes, shape_hash, b) != 0 || vec_reserve(&p->units, p->units.n + 1) != 0)
        return no_memory(b);
    uint64_t at = hash_words(b->key, n * sizeof(uint64_t));
    uint32_t slot;
    while ((slot = b->shapes.slot[at & (b->shapes.size - 1)]) != 0) {
        uint64_t begin = b->key_at.at[slot - 1];
        if (b->key_at.at[slot] - begin == n &&
            memcmp(b->keys.at + begin, b->key, n * sizeof(uint64_t)) == 0)
            break;
        at++;
    }
    if (slot == 0) {
        int r = new_shape(b, n, wire, strategy);
        if (r != 0)
            return r;
        slot = (uint32_t)p->shapes.n;
        b->shapes.slot[at & (b->shapes.size - 1)] = slot;
        b->shapes.n++;
    }
    p->units.at[p->units.n++] = (struct plan_unit){.tensor = tensor, .shape = slot - 1};
    p->shapes.at[slot - 1].n_members++;
    return 0;
}

static enum plan_strategy strategy_of(const struct plan *p, const char *name)
{
    for (uint32_t i = 0; i < p->options.n_rules; i++)
        if (fnmatch(p->options.rules[i].glob, name, 0) == 0)
            return p->options.rules[i].strategy;
    return p->options.strategy;
}

/* The pair check knows how to say what is wrong; it is asked only once something is. */
static int pair_error(struct builder *b, uint32_t destination, const char *name)
{
    int r = layout_check_pair(b->input->source, b->input->destinations[destination], b->e);
    if (r != 0)
        return r;
    return err_set(b->e, RS_EPRECOND, "tensor '%s': source and destination do not agree", name);
}

static bool tensors_agree(const struct tensor *s, const struct tensor *d)
{
    return s->n_dims == d->n_dims &&
           memcmp(s->shape, d->shape, s->n_dims * sizeof s->shape[0]) == 0 &&
           layout_dtypes_agree(s, d);
}

/* Derived tensors have no source tensor of their name: add_derived. */
static void skip_derived(const struct layout *l, uint32_t *tensor)
{
    while (*tensor < l->n_tensors && l->tensors[*tensor].derived_from != NULL)
        ++*tensor;
}

/* Puts the destinations' tensors named like source tensor t in b->at; *ret_n says how many. */
static int match_tensor(struct builder *b, const struct tensor *t, uint32_t *ret_n)
{
    *ret_n = 0;
    for (uint32_t l = 0; l < b->input->n_destinations; l++) {
        const struct layout *d = b->input->destinations[l];
        b->at[l + 1] = NULL;
        skip_derived(d, &b->cursor[l]);
        if (b->cursor[l] >= d->n_tensors)
            continue;
        const struct tensor *dt = &d->tensors[b->cursor[l]];
        int order = strcmp(dt->name, t->name);
        if (order > 0)
            continue;
        if (order < 0 || !tensors_agree(t, dt))
            return pair_error(b, l, dt->name);
        b->cursor[l]++;
        b->at[l + 1] = dt;
        ++*ret_n;
    }
    return 0;
}

static bool has_elements(const struct tensor *t)
{
    for (uint8_t d = 0; d < t->n_dims; d++)
        if (t->shape[d] == 0)
            return false;
    return true;
}

static int count_bytes(struct builder *b, const struct tensor *t, enum dtype wire)
{
    uint64_t elements = 1, out = dtype_bytes(wire), in = dtype_bytes(t->dtype);
    for (uint8_t d = 0; d < t->n_dims; d++)
        elements *= t->shape[d];
    b->p->totals.logical_bytes += elements * out;
    uint64_t n = elements * (out > in ? out : in);
    if (n > INT64_MAX / 64 || (b->total_bytes += n) > INT64_MAX / 64)
        return err_set(b->e, RS_EEXHAUSTED, "the tensors have more than 2^57 bytes in all");
    return 0;
}

/* What becomes of source tensor t in a destination. */
static struct making making_of(const struct layout *l, const struct tensor *d,
                               const struct tensor *t)
{
    struct making m = {.shape = t->shape};
    if (d->scaled_by == 0)
        return m;
    m.value = PLAN_QUANTISED;
    memcpy(m.block, l->tensors[d->scaled_by - 1].derived_block, sizeof m.block);
    return m;
}

/* True where destination side l takes the tensor as `wire` and m say. */
static bool taken_so(const struct builder *b, uint32_t l, enum dtype wire, const struct making *m)
{
    const struct tensor *d = b->at[l];
    if (d == NULL || d->dtype != wire)
        return false;
    struct making other = making_of(b->input->destinations[l - 1], d, b->at[0]);
    return other.value == m->value && memcmp(other.block, m->block, sizeof other.block) == 0;
}

/* The unit of the tensors in b->at from side l on that are taken as l does; they are taken out of b->at. */
static int add_alike(struct builder *b, uint32_t l, uint32_t tensor, enum plan_strategy strategy)
{
    enum dtype wire = b->at[l]->dtype;
    struct making m = making_of(b->input->destinations[l - 1], b->at[l], b->at[0]);
    bool all = true;
    for (uint32_t k = l; k < b->specs.n_sides; k++)
        all = all && (b->at[k] == NULL || taken_so(b, k, wire, &m));
    b->making = m;
    if (all) {
        int r = add_unit(b, tensor, wire, strategy);
        memset(b->at + 1, 0, (b->specs.n_sides - 1U) * sizeof *b->at);
        return r;
    }
    const struct tensor **kept = mem_calloc(b->specs.n_sides, sizeof *kept);
    if (kept == NULL)
        return no_memory(b);
    for (uint32_t k = l; k < b->specs.n_sides; k++)
        if (!taken_so(b, k, wire, &m)) {
            kept[k] = b->at[k];
            b->at[k] = NULL;
        }
    int r = add_unit(b, tensor, wire, strategy);
    for (uint32_t k = 1; k < b->specs.n_sides; k++)
        b->at[k] = kept[k];
    mem_free(kept);
    return r;
}

/* One unit per wire dtype (and block) among the destinations that take the tensor, in their order. */
static int add_tensor(struct builder *b, uint32_t tensor)
{
    const struct tensor *t = &b->input->source->tensors[tensor];
    uint32_t n = 0;
    int r = match_tensor(b, t, &n);
    if (r != 0 || n == 0)
        return r;
    b->p->totals.tensors++;
    enum plan_strategy strategy = strategy_of(b->p, t->name);
    b->at[0] = t;
    bool first = true;
    for (uint32_t l = 1; l < b->specs.n_sides && r == 0; l++) {
        if (b->at[l] == NULL)
            continue;
        if (first)
            r = count_bytes(b, t, b->at[l]->dtype);
        first = false;
        if (r == 0 && has_elements(t))
            r = add_alike(b, l, tensor, strategy);
        else
            return r;
    }
    return r;
}

static int add_derived(struct builder *b, uint32_t number)
{
    const struct plan_derived *d = &b->p->derived.at[number];
    const struct tensor *t = &b->p->destinations[d->layout]->tensors[d->tensor];
    uint32_t tensor = b->input->source->n_tensors + number;
    b->at[0] = &b->input->source->tensors[d->origin];
    for (uint32_t l = 1; l < b->specs.n_sides; l++)
        b->at[l] = NULL;
    for (uint32_t i = d->first; i < d->first + d->n; i++) {
        const struct plan_derived_of *of = &b->p->derived_of.at[i];
        b->at[of->layout + 1] = &b->p->destinations[of->layout]->tensors[of->tensor];
    }
    b->making = (struct making){.value = PLAN_SCALES, .shape = t->shape};
    memcpy(b->making.block, t->derived_block, sizeof t->derived_block);
    b->p->totals.tensors++;
    int r = count_bytes(b, t, t->dtype);
    if (r == 0 && has_elements(t))
        r = add_unit(b, tensor, t->dtype, strategy_of(b->p, t->name));
    return r;
}

/* --- members ---------------------------------------------------------------------------------- */

/* Members in the order (class, shape, unit), so that a class's and a shape's stand together. */
static int place_members(struct builder *b)
{
    struct plan *p = b->p;
    uint32_t n_shapes = (uint32_t)p->shapes.n;
    uint32_t *class = mem_calloc((size_t)n_shapes + 1, sizeof *class);
    if (class == NULL || vec_reserve(&p->members, p->units.n + 1) != 0 ||
        vec_reserve(&p->class_shapes, p->shapes.n + 1) != 0) {
        mem_free(class);
        return no_memory(b);
    }
    for (uint32_t i = 0; i < n_shapes; i++)
        class[i] = p->shapes.at[i].class;
    int r = sort_count(class, NULL, n_shapes, (uint32_t)p->classes.n, p->class_shapes.at);
    mem_free(class);
    if (r != 0)
        return no_memory(b);
    p->class_shapes.n = n_shapes;
    uint32_t at = 0;
    for (uint32_t i = 0; i < n_shapes; i++) {
        struct plan_shape *s = &p->shapes.at[p->class_shapes.at[i]];
        struct plan_class *c = &p->classes.at[s->class];
        if (c->n_shapes++ == 0) {
            c->first_shape = i;
            c->first_member = at;
        }
        s->first_member = at;
        at += s->n_members;
        c->n_members += s->n_members;
        s->n_members = 0;
    }
    p->members.n = p->units.n;
    for (uint32_t u = 0; u < p->units.n; u++) {
        struct plan_shape *s = &p->shapes.at[p->units.at[u].shape];
        p->units.at[u].member = s->first_member + s->n_members++;
        p->members.at[p->units.at[u].member] = u;
    }
    return 0;
}

static int check_leftovers(struct builder *b)
{
    for (uint32_t l = 0; l < b->input->n_destinations; l++) {
        const struct layout *d = b->input->destinations[l];
        skip_derived(d, &b->cursor[l]);
        if (b->cursor[l] < d->n_tensors)
            return pair_error(b, l, d->tensors[b->cursor[l]].name);
    }
    return 0;
}

static int build(struct builder *b)
{
    uint32_t n_sides = b->input->n_destinations + 1;
    int r = specs_init(&b->specs, b->input, b->e);
    if (r != 0)
        return r;
    b->key = mem_calloc(2 + BOX_MAX_DIMS + 3 * (size_t)n_sides, sizeof *b->key);
    b->cursor = mem_calloc(n_sides, sizeof *b->cursor);
    b->at = mem_calloc(n_sides, sizeof *b->at);
    if (b->key == NULL || b->cursor == NULL || b->at == NULL)
        return no_memory(b);
    for (uint32_t t = 0; t < b->input->source->n_tensors && r == 0; t++)
        r = add_tensor(b, t);
    if (r == 0)
        r = check_leftovers(b);
    for (uint32_t i = 0; i < b->p->derived.n && r == 0; i++)
        r = add_derived(b, i);
    return r == 0 ? place_members(b) : r;
}

int plan_classes(struct plan *p, const struct plan_input *input, struct err *e)
{
    struct builder b = {.p = p, .input = input, .e = e};
    int r = build(&b);
    specs_close(&b.specs);
    mem_free(b.shapes.slot);
    mem_free(b.classes.slot);
    mem_free(b.keys.at);
    mem_free(b.key_at.at);
    mem_free(b.structure_end.at);
    mem_free(b.scratch.at);
    mem_free(b.side_cuts.at);
    mem_free(b.overlay.at);
    mem_free(b.key);
    mem_free(b.cursor);
    mem_free(b.at);
    return r;
}
