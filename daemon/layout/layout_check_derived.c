/* The rules of derived tensors: scales per block of a weight that is cast. Every rank must have the scales of all blocks that its part
 * of the weight touches. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout_check.h"
#include "layout/scale.h"

#include "base/banned.h"

/* The pieces of a length cut by several mesh dims in turn, compared in step for a tensor and the
 * tensor that holds one value per block of it. */
struct edges {
    const uint32_t *cuts; /* sizes of the mesh dims that cut this tensor dim, in cutting order */
    unsigned n_cuts;
    uint64_t block;
    uint64_t length; /* of the weight */
};

static bool edges_agree(struct edges *g, unsigned k, uint64_t begin, uint64_t end,
                        uint64_t scale_begin, uint64_t scale_end)
{
    if (k == g->n_cuts) {
        if (begin == end && scale_begin == scale_end)
            return true;
        return begin % g->block == 0 && (end % g->block == 0 || end == g->length) &&
               begin / g->block == scale_begin && (end + g->block - 1) / g->block == scale_end;
    }
    for (uint32_t i = 0; i < g->cuts[k]; i++) {
        uint64_t b, n, sb, sn;
        layout_chunk(end - begin, g->cuts[k], i, &b, &n);
        layout_chunk(scale_end - scale_begin, g->cuts[k], i, &sb, &sn);
        if (!edges_agree(g, k + 1, begin + b, begin + n, scale_begin + sb, scale_begin + sn))
            return false;
        if (b == end - begin && sb == scale_end - scale_begin)
            break; /* this piece and all later ones are empty on both */
    }
    return true;
}

static bool derived_edges_agree(const struct layout *l, const struct tensor *t,
                                const struct tensor *from, unsigned d)
{
    const struct mesh *m = &l->meshes[from->mesh];
    uint32_t cuts[LAYOUT_MAX_MESH_DIMS];
    struct edges g = {.cuts = cuts, .block = t->derived_block[d], .length = from->shape[d]};
    for (unsigned k = 0; k < m->n_dims; k++)
        if (from->placements[from->shard_order[k]] == (int)d)
            cuts[g.n_cuts++] = m->shape[from->shard_order[k]];
    return edges_agree(&g, 0, 0, from->shape[d], 0, t->shape[d]);
}

/* Both are cut alike, and only between blocks: then every rank has the scales of its blocks. */
static bool derived_alike(const struct layout *l, const struct tensor *t, const struct tensor *from)
{
    return t->mesh >= 0 && t->mesh == from->mesh &&
           memcmp(t->placements, from->placements, l->meshes[t->mesh].n_dims) == 0 &&
           memcmp(t->shard_order, from->shard_order, l->meshes[t->mesh].n_dims) == 0 &&
           derived_edges_agree(l, t, from, 0) && derived_edges_agree(l, t, from, 1);
}

/* Looks at pairs of boxes that are worth waiting for. */
static const uint64_t DERIVED_BUDGET = UINT64_C(1) << 28;

struct boxes {
    struct box *at;
    uint32_t n, capacity;
};

struct derived {
    const struct layout *l;
    const struct tensor *t, *from;
    struct boxes part, scales; /* of the rank at hand */
    uint64_t budget;
};

/* All boxes of a rank. 0 or RS_ENOMEM. */
static int rank_boxes(const struct layout *l, const struct tensor *t, uint32_t rank,
                      struct boxes *ret)
{
    uint32_t index = (uint32_t)(t - l->tensors);
    ret->n = layout_shards(l, index, rank, ret->at, ret->capacity);
    if (ret->n <= ret->capacity)
        return 0;
    mem_free(ret->at);
    ret->capacity = 0;
    ret->at = mem_calloc(ret->n, sizeof *ret->at);
    if (ret->at == NULL)
        return RS_ENOMEM;
    ret->capacity = ret->n;
    (void)layout_shards(l, index, rank, ret->at, ret->capacity);
    return 0;
}

/* The first edge of a part that lies inside a block. */
static bool edge_inside(const struct tensor *t, const struct tensor *from, const struct box *b,
                        unsigned *ret_dim, uint64_t *ret_edge)
{
    for (unsigned d = 0; d < 2; d++) {
        uint64_t end = b->offset[d] + b->size[d], block = t->derived_block[d];
        *ret_dim = d;
        *ret_edge = b->offset[d] % block != 0 ? b->offset[d] : end;
        if (b->offset[d] % block != 0 || (end % block != 0 && end != from->shape[d]))
            return true;
    }
    return false;
}

static int scales_missing(const struct derived *c, uint32_t rank, const struct box *part,
                          const struct box *need, struct err *e)
{
    char x[256], y[256];
    unsigned d;
    uint64_t edge;
    const char *name = c->t->derived_from;
    if (edge_inside(c->t, c->from, part, &d, &edge))
        return err_set(e, RS_EINVAL,
                       "derived from '%s': shard edge %" PRIu64
                       " of its dim %u lies inside a block "
                       "of %" PRIu32 ", and rank %" PRIu32
                       " does not hold the scales %s of all blocks that its part touches; choose "
                       "another shard count, or replicate this tensor",
                       name, edge, d, c->t->derived_block[d], rank, box_text(need, x, sizeof x));
    return err_set(e, RS_EINVAL,
                   "derived from '%s': rank %" PRIu32 " holds %s of it, but not all of the scales "
                   "%s; place this tensor as that one is, or replicate it",
                   name, rank, box_text(part, x, sizeof x), box_text(need, y, sizeof y));
}

/* The rank's part of this tensor (disjoint boxes) has the scales of each box of its part of the
 * other. */
static int check_derived_rank(struct derived *c, uint32_t rank, struct err *e)
{
    int r = rank_boxes(c->l, c->from, rank, &c->part);
    if (r == 0 && c->part.n > 0)
        r = rank_boxes(c->l, c->t, rank, &c->scales);
    if (r == 0 && c->part.n > 0 && (uint64_t)c->part.n * (c->scales.n + 1U) > c->budget)
        return err_set(e, RS_EEXHAUSTED, "derived from '%s': too many regions to compare",
                       c->t->derived_from);
    for (uint32_t i = 0; r == 0 && i < c->part.n; i++) {
        struct box need = scale_touched(c->t->derived_block, &c->part.at[i]), common;
        uint64_t covered = 0;
        c->budget -= c->scales.n;
        for (uint32_t k = 0; k < c->scales.n; k++)
            if (box_intersect(&need, &c->scales.at[k], &common))
                covered += box_elements(&common);
        if (covered != box_elements(&need))
            r = scales_missing(c, rank, &c->part.at[i], &need, e);
    }
    return r;
}

/* Pairs that have been checked rank by rank: models have thousands, of few kinds. */
enum { DERIVED_SEEN = 32 };
struct derived_seen {
    const struct tensor *t[DERIVED_SEEN], *from[DERIVED_SEEN];
    uint32_t n; /* in all; the last DERIVED_SEEN are kept */
};

static bool placed_alike(const struct tensor *a, const struct tensor *b)
{
    return a->mesh >= 0 && a->mesh == b->mesh &&
           memcmp(a->placements, b->placements, sizeof a->placements) == 0 &&
           memcmp(a->shard_order, b->shard_order, sizeof a->shard_order) == 0 &&
           memcmp(a->shape, b->shape, 2 * sizeof *a->shape) == 0;
}

static bool derived_was_seen(const struct derived_seen *s, const struct tensor *t,
                             const struct tensor *from)
{
    for (uint32_t i = 0; i < s->n && i < DERIVED_SEEN; i++)
        if (placed_alike(s->t[i], t) && placed_alike(s->from[i], from) &&
            memcmp(s->t[i]->derived_block, t->derived_block, sizeof t->derived_block) == 0)
            return true;
    return false;
}

static int check_derived_placement(const struct layout *l, const struct tensor *t,
                                   const struct tensor *from, struct derived_seen *seen,
                                   struct err *e)
{
    struct derived c = {.l = l, .t = t, .from = from, .budget = DERIVED_BUDGET};
    int r = 0;
    if (derived_alike(l, t, from) || derived_was_seen(seen, t, from))
        return 0;
    for (uint32_t rank = 0; r == 0 && rank < l->n_ranks; rank++)
        r = check_derived_rank(&c, rank, e);
    mem_free(c.part.at);
    mem_free(c.scales.at);
    if (r == 0) {
        seen->t[seen->n % DERIVED_SEEN] = t;
        seen->from[seen->n++ % DERIVED_SEEN] = from;
    }
    return r;
}

/* What can be made: float32 scales of a float8 tensor that is cast, in blocks that can be worked on. */
static int check_derived_kind(const struct tensor *t, const struct tensor *from, struct err *e)
{
    if (t->dtype != DTYPE_FLOAT32)
        return err_set(e, RS_EINVAL, "derived from '%s': block_scale gives float32, this is %s",
                       t->derived_from, dtype_name(t->dtype));
    if (from->dtype != DTYPE_FLOAT8_E4M3FN || !from->cast)
        return err_set(e, RS_EINVAL,
                       "derived from '%s', which is no cast to float8_e4m3fn; give that one the "
                       "dtype float8_e4m3fn and \"cast\": true",
                       t->derived_from);
    if (!scale_known(t->derived_block, from->shape))
        return err_set(e, RS_EINVAL,
                       "derived from '%s': a block of %" PRIu32 " x %" PRIu32
                       " has more than %d elements; use [128, 128], or a block as great as the "
                       "whole tensor",
                       t->derived_from, t->derived_block[0], t->derived_block[1], SCALE_MAX_BLOCK);
    return 0;
}

static int check_derived(struct layout *l, struct tensor *t, struct derived_seen *seen,
                         struct err *e)
{
    int64_t index = layout_find(l, t->derived_from);
    if (index < 0)
        return err_set(e, RS_EINVAL, "derived from '%s', which the layout does not have",
                       t->derived_from);
    struct tensor *from = &l->tensors[index];
    if (from == t || from->derived_from != NULL)
        return err_set(e, RS_EINVAL, "derived from '%s', which is derived itself", t->derived_from);
    if (t->n_dims != 2 || from->n_dims != 2)
        return err_set(e, RS_EINVAL, "derived from '%s': block_scale needs 2 dims on both",
                       t->derived_from);
    for (unsigned d = 0; d < 2; d++) {
        uint64_t blocks = scale_count(t->derived_block[d], from->shape[d]);
        if (t->shape[d] != blocks)
            return err_set(e, RS_EINVAL,
                           "derived from '%s': dim %u has %" PRIu64 " blocks, the shape says "
                           "%" PRIu64,
                           t->derived_from, d, blocks, t->shape[d]);
    }
    if (from->scaled_by != 0)
        return err_set(e, RS_EINVAL, "derived from '%s', and so is '%s'; keep one", t->derived_from,
                       l->tensors[from->scaled_by - 1].name);
    int r = check_derived_kind(t, from, e);
    if (r == 0)
        r = check_derived_placement(l, t, from, seen, e);
    if (r == 0)
        from->scaled_by = (uint32_t)(t - l->tensors) + 1;
    return r;
}

int layout_check_derived(struct layout *l, struct err *e)
{
    struct derived_seen seen = {0};
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < l->n_tensors; i++)
        if (l->tensors[i].derived_from != NULL &&
            (r = check_derived(l, &l->tensors[i], &seen, e)) != 0)
            r = err_prefix(e, r, "tensor '%s'", l->tensors[i].name);
    return r;
}
