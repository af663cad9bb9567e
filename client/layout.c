/* The public view of a layout, and the plain arrangement of its shards in memory. */
#include <string.h>

#include "base/mem.h"
#include "client/client.h"
#include "layout/dtype.h"

#include "base/banned.h"

enum { ALIGN_DEFAULT = 64 };

int reshard_layout_from_json(const char *text, size_t n_bytes, struct reshard_layout **ret_layout,
                             struct reshard_error *e)
{
    struct err err = {0};
    struct reshard_layout *l = mem_zalloc(sizeof *l);
    int r = l == NULL ? err_set(&err, RS_ENOMEM, "layout: out of memory")
                      : layout_from_json(text, n_bytes, &l->layout, &err);
    if (r == 0)
        *ret_layout = l;
    else
        mem_free(l);
    return client_give(e, r, &err);
}

void reshard_layout_free(struct reshard_layout *l)
{
    if (l != NULL)
        layout_free(l->layout);
    mem_free(l);
}

const char *reshard_layout_name(const struct reshard_layout *l)
{
    return l->layout->name;
}

uint32_t reshard_layout_n_ranks(const struct reshard_layout *l)
{
    return l->layout->n_ranks;
}

uint32_t reshard_layout_n_tensors(const struct reshard_layout *l)
{
    return l->layout->n_tensors;
}

int reshard_layout_tensor(const struct reshard_layout *l, uint32_t i,
                          struct reshard_tensor *ret_tensor)
{
    if (i >= l->layout->n_tensors)
        return RESHARD_EINVAL;
    const struct tensor *t = &l->layout->tensors[i];
    *ret_tensor = (struct reshard_tensor){.name = t->name,
                                          .dtype = dtype_name(t->dtype),
                                          .element_bytes = dtype_bytes(t->dtype),
                                          .n_dims = t->n_dims};
    memcpy(ret_tensor->shape, t->shape, sizeof t->shape);
    return 0;
}

int64_t reshard_layout_find(const struct reshard_layout *l, const char *name)
{
    return layout_find(l->layout, name);
}

_Static_assert((int)RESHARD_MAX_DIMS == (int)BOX_MAX_DIMS, "boxes of one size");

static void box_give(const struct box *from, struct reshard_box *to)
{
    to->n_dims = from->n_dims;
    memcpy(to->offset, from->offset, sizeof to->offset);
    memcpy(to->size, from->size, sizeof to->size);
}

uint32_t reshard_layout_shards(const struct reshard_layout *l, uint32_t i, uint32_t rank,
                               struct reshard_box *ret_boxes, uint32_t capacity)
{
    if (i >= l->layout->n_tensors)
        return 0;
    struct box one;
    if (capacity <= 1 || l->layout->tensors[i].mesh >= 0) {
        uint32_t n = layout_shards(l->layout, i, rank, &one, capacity == 0 ? 0 : 1);
        if (n > 0 && capacity > 0)
            box_give(&one, &ret_boxes[0]);
        return n;
    }
    const struct tensor *t = &l->layout->tensors[i];
    uint32_t n = 0;
    for (uint32_t k = 0; k < t->n_regions; k++) {
        if (t->regions[k].rank != rank || box_empty(&t->regions[k].box))
            continue;
        if (n < capacity)
            box_give(&t->regions[k].box, &ret_boxes[n]);
        n++;
    }
    return n;
}

uint64_t reshard_layout_rank_bytes(const struct reshard_layout *l, uint32_t rank)
{
    return layout_rank_bytes(l->layout, rank);
}

/* ---- dense pieces ---- */

static uint64_t n_boxes(const struct reshard_layout *l, uint32_t rank)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < l->layout->n_tensors; i++)
        n += reshard_layout_shards(l, i, rank, NULL, 0);
    return n;
}

/* Lays one box at *end (aligned first); moves *end beyond it. */
static int place(const struct reshard_layout *l, uint32_t i, const struct reshard_box *box,
                 uint64_t align, struct reshard_piece *ret, uint64_t *end, struct err *e)
{
    const struct tensor *t = &l->layout->tensors[i];
    uint64_t at, bytes = dtype_bytes(t->dtype);
    for (uint32_t d = 0; d < box->n_dims; d++)
        bytes *= box->size[d]; /* a checked layout's products stay below 2^63 */
    if (__builtin_add_overflow(*end, align - 1, &at) || (at &= ~(align - 1)) > INT64_MAX - bytes)
        return err_set(e, RS_EINVAL, "dense pieces: tensor '%s' would end beyond 2^63 bytes",
                       t->name);
    *ret =
        (struct reshard_piece){.tensor = t->name, .offset_bytes = at, .box = *box, .dense = true};
    *end = at + bytes;
    return 0;
}

static int place_tensor(const struct reshard_layout *l, uint32_t i, uint32_t rank,
                        struct reshard_segment *segment, uint64_t align,
                        struct reshard_piece *pieces, size_t *n, uint64_t *end, struct err *e)
{
    uint32_t count = reshard_layout_shards(l, i, rank, NULL, 0);
    if (count == 0)
        return 0;
    struct reshard_box *boxes = mem_calloc(count, sizeof *boxes);
    if (boxes == NULL)
        return err_set(e, RS_ENOMEM, "dense pieces: out of memory");
    int r = 0;
    (void)reshard_layout_shards(l, i, rank, boxes, count);
    for (uint32_t k = 0; r == 0 && k < count; k++) {
        struct reshard_piece piece = {0};
        r = place(l, i, &boxes[k], align, &piece, end, e);
        piece.segment = segment;
        if (r == 0 && pieces != NULL)
            pieces[*n] = piece;
        (*n)++;
    }
    mem_free(boxes);
    return r;
}

int reshard_pieces_dense(const struct reshard_layout *l, uint32_t rank,
                         struct reshard_segment *segment, uint64_t offset_bytes, uint32_t align,
                         struct reshard_piece **ret_pieces, size_t *ret_n_pieces, uint64_t *ret_end,
                         struct reshard_error *e)
{
    struct err err = {0};
    uint64_t step = align == 0 ? ALIGN_DEFAULT : align;
    if ((step & (step - 1)) != 0)
        return client_give(
            e, err_set(&err, RS_EINVAL, "dense pieces: align %u is no power of two", align), &err);
    if (rank >= l->layout->n_ranks)
        return client_give(e,
                           err_set(&err, RS_EINVAL,
                                   "dense pieces: rank %u: layout '%s' has ranks 0 … %u", rank,
                                   l->layout->name, l->layout->n_ranks - 1),
                           &err);
    struct reshard_piece *pieces = NULL;
    if (segment != NULL && (pieces = mem_calloc(n_boxes(l, rank) + 1, sizeof *pieces)) == NULL)
        return client_give(e, err_set(&err, RS_ENOMEM, "dense pieces: out of memory"), &err);
    size_t n = 0;
    uint64_t end = offset_bytes;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < l->layout->n_tensors; i++)
        r = place_tensor(l, i, rank, segment, step, pieces, &n, &end, &err);
    if (r == 0 && segment != NULL && end > reshard_segment_bytes(segment))
        r = err_set(&err, RS_EINVAL, "dense pieces: rank %u needs %llu bytes, the segment has %llu",
                    rank, (unsigned long long)end,
                    (unsigned long long)reshard_segment_bytes(segment));
    if (r != 0) {
        mem_free(pieces);
        return client_give(e, r, &err);
    }
    if (segment != NULL) {
        *ret_pieces = pieces;
        *ret_n_pieces = n;
    }
    *ret_end = end;
    return client_give(e, 0, &err);
}

void reshard_pieces_free(struct reshard_piece *pieces)
{
    mem_free(pieces);
}
