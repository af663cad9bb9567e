/* Proves a binding: tensor by tensor that the pieces tile the rank's shards, then over all pieces
 * that each stays in its segment and that no byte has two owners.
 *
 * Cost: n log n for pieces whose byte ranges are apart, as arenas have them. Where ranges of pieces
 * interlace (columns of a fused matrix), each such pair is compared exactly, within a budget. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/region.h"
#include "memory/memory.h"
#include "memory/strided.h"

#include "base/banned.h"

enum { BOX_TEXT_BYTES = 256 };

/* Steps that one check may spend on pairs, some 100 ns each: under a second; and comparisons of
 * pieces with shards of one tensor. */
static const int64_t PAIR_BUDGET = INT64_C(1) << 23;
static const uint64_t MAX_TILE_PAIRS = UINT64_C(1) << 26;

struct check {
    const struct binding *binding;
    const struct layout *layout;
    uint32_t rank;
    const uint64_t *segment_bytes;
    uint32_t n_segments;
    bool aliases;
    struct err *e;
    struct box *shards; /* of the tensor at hand */
    size_t shards_capacity;
};

static const struct tensor *tensor_at(const struct check *c, uint32_t t)
{
    return &c->layout->tensors[t];
}

/* Starts an error about one piece: names the tensor, its number among the tensor's, and its box. */
static int piece_error(const struct check *c, uint32_t i, int code, const char *what)
{
    char text[BOX_TEXT_BYTES];
    const struct binding_piece p = binding_at(c->binding, i);
    return err_set(c->e, code, "tensor '%s': piece %u %s: %s", tensor_at(c, p.tensor)->name,
                   i - c->binding->first[p.tensor], box_text(&p.box, text, sizeof text), what);
}

/* --- coordinates: the pieces tile the shards -------------------------------------------------- */

static int load_shards(struct check *c, uint32_t t, uint32_t *ret_n)
{
    uint32_t n = layout_shards(c->layout, t, c->rank, NULL, 0);
    void *array = c->shards;
    if (mem_grow(&array, &c->shards_capacity, n, sizeof *c->shards) != 0)
        return err_set(c->e, RS_ENOMEM, "binding: out of memory");
    c->shards = array;
    if (n > 0)
        (void)layout_shards(c->layout, t, c->rank, c->shards, n);
    *ret_n = n;
    return 0;
}

static bool same_boxes(const struct check *c, uint32_t first, uint32_t n, uint32_t n_shards)
{
    if (n != n_shards)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const struct binding_piece p = binding_at(c->binding, first + i);
        if (!box_equal(&p.box, &c->shards[i]))
            return false;
    }
    return true;
}

/* Shards of one rank are disjoint, so what a piece has in common with each adds up. */
static int check_inside(const struct check *c, uint32_t i, uint32_t n_shards)
{
    const struct binding_piece p = binding_at(c->binding, i);
    uint64_t inside = 0;
    struct box common;
    char why[BOX_TEXT_BYTES * 2], text[BOX_TEXT_BYTES];
    for (uint32_t s = 0; s < n_shards; s++)
        if (box_intersect(&p.box, &c->shards[s], &common))
            inside += box_elements(&common);
    if (inside == box_elements(&p.box))
        return 0;
    (void)snprintf(why, sizeof why,
                   "the layout gives rank %u %s%s%s: bind only what the rank holds", c->rank,
                   n_shards == 0 ? "none of it" : box_text(&c->shards[0], text, sizeof text),
                   n_shards > 1 ? " and others" : "", n_shards == 0 ? "" : " of it");
    return piece_error(c, i, RS_EINVAL, why);
}

static int check_dims(const struct check *c, uint32_t i)
{
    const struct binding_piece p = binding_at(c->binding, i);
    const struct tensor *t = tensor_at(c, p.tensor);
    char why[BOX_TEXT_BYTES];
    if (p.box.n_dims == t->n_dims) {
        struct box whole = box_whole(t->n_dims, t->shape);
        for (unsigned d = 0; d < t->n_dims; d++)
            if (p.box.size[d] > whole.size[d] || p.box.offset[d] > whole.size[d] - p.box.size[d])
                return piece_error(c, i, RS_EINVAL, "it leaves the tensor's global shape");
        return 0;
    }
    (void)snprintf(why, sizeof why, "it has %u dims, the tensor has %u", p.box.n_dims, t->n_dims);
    return piece_error(c, i, RS_EINVAL, why);
}

/* The pieces of a tensor in the form that layout/region.h takes; `rank` holds the piece's index. */
struct piece_regions {
    struct region *regions;
    const struct region **pointers;
    uint32_t n;
};

static void piece_regions_close(struct piece_regions *r)
{
    mem_free(r->regions);
    mem_free(r->pointers);
}

static int piece_regions_open(const struct check *c, uint32_t t, struct piece_regions *r)
{
    uint32_t first = c->binding->first[t];
    r->n = c->binding->first[t + 1] - first;
    r->regions = mem_calloc(r->n, sizeof *r->regions);
    r->pointers = mem_calloc(r->n, sizeof *r->pointers);
    if (r->regions == NULL || r->pointers == NULL) {
        piece_regions_close(r);
        return err_set(c->e, RS_ENOMEM, "binding: out of memory");
    }
    for (uint32_t i = 0; i < r->n; i++) {
        r->regions[i] =
            (struct region){.rank = first + i, .box = binding_at(c->binding, first + i).box};
        r->pointers[i] = &r->regions[i];
    }
    return 0;
}

static int check_disjoint(const struct check *c, uint32_t t, struct piece_regions *r)
{
    const struct region *a = NULL, *b = NULL;
    char why[BOX_TEXT_BYTES * 2], text[BOX_TEXT_BYTES];
    int found =
        tensor_at(c, t)->n_dims == 0 && r->n > 1 ? 1 : region_overlap(r->pointers, r->n, &a, &b);
    if (found == 0)
        return 0;
    if (found < 0)
        return err_set(c->e, found, "tensor '%s': its %u pieces are too entangled to compare",
                       tensor_at(c, t)->name, r->n);
    if (a == NULL)
        return piece_error(c, c->binding->first[t], RS_EINVAL,
                           "a tensor of 0 dims is bound by one piece, there are more");
    (void)snprintf(why, sizeof why, "piece %u %s has elements of it, too: bind each element once",
                   b->rank - c->binding->first[t], box_text(&b->box, text, sizeof text));
    return piece_error(c, a->rank, RS_EINVAL, why);
}

static int check_covered(const struct check *c, uint32_t t, const struct piece_regions *r,
                         uint32_t n_shards)
{
    struct box missing;
    char text[BOX_TEXT_BYTES];
    for (uint32_t s = 0; s < n_shards; s++) {
        int found = region_gap(r->pointers, r->n, &c->shards[s], &missing);
        if (found < 0)
            return err_set(c->e, found, "binding: %s", err_name(found));
        if (found == 1)
            return err_set(c->e, RS_EINVAL,
                           "tensor '%s': %s, which the layout gives rank %u, is not bound: add a "
                           "piece for it",
                           tensor_at(c, t)->name, box_text(&missing, text, sizeof text), c->rank);
    }
    return 0;
}

static uint64_t elements_of(const struct box *boxes, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += box_elements(&boxes[i]);
    return sum;
}

/* Disjoint pieces inside the shards tile them if they have as many elements. */
static int check_tiling(const struct check *c, uint32_t t, uint32_t n_shards)
{
    struct piece_regions r;
    uint64_t bound = 0;
    int code = piece_regions_open(c, t, &r);
    if (code != 0)
        return code;
    code = check_disjoint(c, t, &r);
    for (uint32_t i = 0; i < r.n; i++)
        bound += box_elements(&r.regions[i].box);
    if (code == 0 && bound != elements_of(c->shards, n_shards))
        code = check_covered(c, t, &r, n_shards);
    piece_regions_close(&r);
    return code;
}

static int check_tensor(struct check *c, uint32_t t)
{
    uint32_t first = c->binding->first[t], n = c->binding->first[t + 1] - first, n_shards = 0;
    int code = load_shards(c, t, &n_shards);
    for (uint32_t i = 0; code == 0 && i < n; i++)
        code = check_dims(c, first + i);
    if (code != 0 || same_boxes(c, first, n, n_shards))
        return code;
    if ((uint64_t)n * n_shards > MAX_TILE_PAIRS)
        return err_set(c->e, RS_EEXHAUSTED,
                       "tensor '%s': %u pieces over %u regions are too many to compare: use one "
                       "piece per region",
                       tensor_at(c, t)->name, n, n_shards);
    for (uint32_t i = 0; code == 0 && i < n; i++)
        code = check_inside(c, first + i, n_shards);
    return code != 0 ? code : check_tiling(c, t, n_shards);
}

/* --- bytes ------------------------------------------------------------------------------------ */

static struct strided strided_of(const struct check *c, uint32_t i)
{
    const struct binding_piece p = binding_at(c->binding, i);
    struct strided s; /* sizes and strides beyond n_dims are never read */
    s.begin = p.offset;
    s.n_dims = p.box.n_dims;
    s.element_bytes = dtype_bytes(tensor_at(c, p.tensor)->dtype);
    for (unsigned d = 0; d < s.n_dims; d++) {
        s.size[d] = p.box.size[d];
        s.stride_bytes[d] = (uint64_t)p.stride_bytes[d];
    }
    return s;
}

/* Bytes [begin, end) that a piece spans. */
struct extent {
    uint64_t begin, end;
    uint32_t group; /* only extents of one group may not overlap: the segment, or the tensor, too */
    uint32_t segment;
    uint32_t piece;
};

static int check_piece(const struct check *c, uint32_t i, struct extent *ret)
{
    const struct binding_piece p = binding_at(c->binding, i);
    char why[BOX_TEXT_BYTES];
    int64_t budget = PAIR_BUDGET;
    if (p.segment >= c->n_segments) {
        (void)snprintf(why, sizeof why, "segment %u: the worker has %u", p.segment, c->n_segments);
        return piece_error(c, i, RS_EINVAL, why);
    }
    for (unsigned d = 0; d < p.box.n_dims; d++)
        if (p.stride_bytes[d] < 0)
            return piece_error(c, i, RS_EINVAL, "strides must not be negative");
    struct strided s = strided_of(c, i);
    uint64_t end = strided_end(&s);
    if (end > c->segment_bytes[p.segment]) {
        (void)snprintf(why, sizeof why,
                       "its last element ends at byte %" PRIu64 "%s of segment %u, which has "
                       "%" PRIu64 ": check offset and byte strides",
                       end, end == UINT64_MAX ? " or beyond" : "", p.segment,
                       c->segment_bytes[p.segment]);
        return piece_error(c, i, RS_EINVAL, why);
    }
    int found = strided_self_overlap(&s, &budget);
    if (found != 0)
        return piece_error(c, i, found < 0 ? found : RS_EINVAL,
                           found < 0 ? "its strides are too entangled to tell whether elements "
                                       "overlap: use strides that nest"
                                     : "its byte strides make elements overlap: each element "
                                       "needs bytes of its own (make the tensor contiguous)");
    *ret = (struct extent){.begin = s.begin,
                           .end = end,
                           .group = c->aliases ? p.tensor : 0,
                           .segment = p.segment,
                           .piece = i};
    return 0;
}

static int compare_extents(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->piece > y->piece) - (x->piece < y->piece);
}

static int overlap_error(const struct check *c, uint32_t a, uint32_t b)
{
    char why[BOX_TEXT_BYTES * 3], text[BOX_TEXT_BYTES];
    const struct binding_piece p = binding_at(c->binding, b);
    (void)snprintf(why, sizeof why,
                   "it shares memory of segment %u with tensor '%.300s', piece %u %s: each "
                   "element needs bytes of its own",
                   p.segment, tensor_at(c, p.tensor)->name, b - c->binding->first[p.tensor],
                   box_text(&p.box, text, sizeof text));
    return piece_error(c, a, RS_EINVAL, why);
}

static bool same_group(const struct extent *a, const struct extent *b)
{
    return a->segment == b->segment && a->group == b->group;
}

/* Compares `x` with the extents that began before it and are still open; drops those that ended. */
static int compare_open(const struct check *c, const struct extent *x, const struct extent *extents,
                        uint32_t *open, uint32_t *n_open, int64_t *budget)
{
    struct strided s = strided_of(c, x->piece);
    uint32_t kept = 0;
    for (uint32_t k = 0; k < *n_open; k++) {
        const struct extent *o = &extents[open[k]];
        if (!same_group(o, x) || o->end <= x->begin)
            continue;
        open[kept++] = open[k];
        struct strided other = strided_of(c, o->piece);
        int found = strided_overlap(&other, &s, budget);
        if (found == 1)
            return overlap_error(c, o->piece, x->piece);
        if (found < 0)
            return piece_error(c, x->piece, found,
                               "too many strided pieces are interlaced with it to tell whether "
                               "they overlap: bind larger pieces");
    }
    *n_open = kept;
    return 0;
}

static int sweep(const struct check *c, struct extent *extents, uint32_t *open)
{
    int64_t budget = PAIR_BUDGET;
    uint32_t n_open = 0;
    qsort(extents, c->binding->n_pieces, sizeof *extents, compare_extents);
    for (uint32_t i = 0; i < c->binding->n_pieces; i++) {
        int code = compare_open(c, &extents[i], extents, open, &n_open, &budget);
        if (code != 0)
            return code;
        open[n_open++] = i;
    }
    return 0;
}

static int check_bytes(const struct check *c)
{
    uint32_t n = c->binding->n_pieces;
    struct extent *extents = mem_calloc(n, sizeof *extents);
    uint32_t *open = mem_calloc(n, sizeof *open);
    int code = extents == NULL || open == NULL
                   ? err_set(c->e, RS_ENOMEM, "binding: %u pieces: out of memory", n)
                   : 0;
    for (uint32_t i = 0; code == 0 && i < n; i++)
        code = check_piece(c, i, &extents[i]);
    if (code == 0)
        code = sweep(c, extents, open);
    mem_free(extents);
    mem_free(open);
    return code;
}

int binding_check(const struct binding *b, const struct layout *layout, uint32_t rank,
                  const uint64_t *segment_bytes, uint32_t n_segments, bool aliases, struct err *e)
{
    struct check c = {.binding = b,
                      .layout = layout,
                      .rank = rank,
                      .segment_bytes = segment_bytes,
                      .n_segments = n_segments,
                      .aliases = aliases,
                      .e = e};
    if (b->n_tensors != layout->n_tensors)
        return err_set(e, RS_EINVAL, "binding: it is of %u tensors, the layout has %u",
                       b->n_tensors, layout->n_tensors);
    int code = 0;
    for (uint32_t t = 0; code == 0 && t < b->n_tensors; t++)
        code = check_tensor(&c, t);
    mem_free(c.shards);
    return code != 0 ? code : check_bytes(&c);
}
