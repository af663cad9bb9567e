/* The table of pieces, and reading it: which memory a box of a tensor lies in. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "memory/memory.h"

#include "base/banned.h"

static int compare_pieces(const void *a, const void *b)
{
    const struct binding_piece *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    for (unsigned d = 0; d < x->box.n_dims && d < y->box.n_dims; d++)
        if (x->box.offset[d] != y->box.offset[d])
            return x->box.offset[d] < y->box.offset[d] ? -1 : 1;
    return 0;
}

/* Most clients send them in order; then sorting costs one pass. */
static void sort_pieces(struct binding_piece *pieces, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        if (compare_pieces(&pieces[i - 1], &pieces[i]) > 0) {
            qsort(pieces, n, sizeof *pieces, compare_pieces);
            return;
        }
}

/* Pieces without an element say nothing. */
static uint32_t drop_empty(struct binding_piece *pieces, uint32_t n)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (box_empty(&pieces[i].box))
            continue;
        if (kept != i)
            pieces[kept] = pieces[i];
        kept++;
    }
    return kept;
}

/* Where a piece ends in dim 0; 1 without dims. */
static uint64_t end_of(const struct box *b)
{
    return b->n_dims == 0 ? 1 : b->offset[0] + b->size[0];
}

static uint64_t begin_of(const struct box *b)
{
    return b->n_dims == 0 ? 0 : b->offset[0];
}

static void index_pieces(struct binding *b, const struct binding_piece *pieces)
{
    for (uint32_t i = 0; i < b->n_pieces; i++)
        b->first[pieces[i].tensor + 1]++;
    for (uint32_t t = 0; t < b->n_tensors; t++)
        b->first[t + 1] += b->first[t];
    for (uint32_t i = 0; i < b->n_pieces; i++) {
        uint64_t end = end_of(&pieces[i].box);
        bool starts = i == b->first[pieces[i].tensor];
        b->reach[i] = !starts && b->reach[i - 1] > end ? b->reach[i - 1] : end;
    }
}

static void pack_pieces(struct binding *b, const struct binding_piece *pieces)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_pieces; i++) {
        const struct binding_piece *p = &pieces[i];
        struct binding_row *row = &b->rows[i];
        row->offset = p->offset;
        row->tensor = p->tensor;
        row->segment = p->segment;
        row->dims = n;
        row->n_dims = p->box.n_dims;
        for (unsigned d = 0; d < p->box.n_dims; d++)
            b->dims[n++] =
                (struct binding_dim){p->box.offset[d], p->box.size[d], p->stride_bytes[d]};
    }
}

struct binding_piece binding_at(const struct binding *b, uint32_t i)
{
    const struct binding_row *row = &b->rows[i];
    struct binding_piece p = {.tensor = row->tensor,
                              .segment = row->segment,
                              .box = {.n_dims = row->n_dims},
                              .offset = row->offset};
    for (unsigned d = 0; d < row->n_dims; d++) {
        const struct binding_dim *dim = &b->dims[row->dims + d];
        p.box.offset[d] = dim->offset;
        p.box.size[d] = dim->size;
        p.stride_bytes[d] = dim->stride_bytes;
    }
    return p;
}

uint64_t binding_elements(const struct binding *b, uint32_t tensor)
{
    uint64_t sum = 0;
    for (uint32_t i = b->first[tensor]; i < b->first[tensor + 1]; i++) {
        const struct binding_row *row = &b->rows[i];
        uint64_t n = 1;
        for (unsigned d = 0; d < row->n_dims; d++)
            n *= b->dims[row->dims + d].size;
        sum += n;
    }
    return sum;
}

static size_t count_dims(const struct binding_piece *pieces, uint32_t n)
{
    size_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += pieces[i].box.n_dims;
    return sum;
}

int binding_new(struct binding_piece *pieces, uint32_t n_pieces, uint32_t n_tensors,
                struct binding **ret)
{
    for (uint32_t i = 0; i < n_pieces; i++)
        if (pieces[i].tensor >= n_tensors || pieces[i].box.n_dims > BOX_MAX_DIMS)
            return RS_EINVAL;
    struct binding *b = mem_zalloc(sizeof *b);
    if (b == NULL)
        return RS_ENOMEM;
    b->n_tensors = n_tensors;
    b->n_pieces = drop_empty(pieces, n_pieces);
    b->first = mem_calloc((size_t)n_tensors + 1, sizeof *b->first);
    b->reach = mem_calloc(b->n_pieces, sizeof *b->reach);
    b->rows = mem_calloc(b->n_pieces, sizeof *b->rows);
    b->dims = mem_calloc(count_dims(pieces, b->n_pieces), sizeof *b->dims);
    if (b->first == NULL || b->reach == NULL || b->rows == NULL || b->dims == NULL) {
        binding_free(b);
        return RS_ENOMEM;
    }
    sort_pieces(pieces, b->n_pieces);
    index_pieces(b, pieces);
    pack_pieces(b, pieces);
    mem_free(pieces);
    *ret = b;
    return 0;
}

void binding_free(struct binding *b)
{
    if (b == NULL)
        return;
    mem_free(b->rows);
    mem_free(b->dims);
    mem_free(b->first);
    mem_free(b->reach);
    mem_free(b);
}

/* The first piece of the tensor that may reach into `box`: reach is ascending within a tensor. */
static uint32_t first_reaching(const struct binding *b, uint32_t tensor, const struct box *box)
{
    uint32_t low = b->first[tensor], high = b->first[tensor + 1];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (b->reach[middle] > begin_of(box))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Where a piece begins in dim 0; as begin_of. */
static uint64_t row_begin(const struct binding_row *row, const struct binding_dim *dims)
{
    return row->n_dims == 0 ? 0 : dims[0].offset;
}

/* What a box and a piece (of as many dims) have in common. This is looked for as often as small
 * boxes are moved: from the table as it lies, in one pass. */
struct common {
    struct box part;
    uint64_t elements;
    uint64_t bytes; /* from the start of the segment to the part's first element */
};

static bool common_of(const struct binding_row *row, const struct binding_dim *dims,
                      const struct box *box, struct common *ret)
{
    uint64_t elements = 1, bytes = row->offset;
    ret->part = box_blank(row->n_dims);
    for (unsigned d = 0; d < row->n_dims; d++) {
        uint64_t begin = dims[d].offset, end = begin + dims[d].size;
        uint64_t box_begin = box->offset[d], box_end = box_begin + box->size[d];
        uint64_t first = begin > box_begin ? begin : box_begin;
        uint64_t last = end < box_end ? end : box_end;
        if (first >= last)
            return false;
        ret->part.offset[d] = first;
        ret->part.size[d] = last - first;
        elements *= last - first;
        bytes += (first - begin) * (uint64_t)dims[d].stride_bytes;
    }
    ret->elements = elements;
    ret->bytes = bytes;
    return true;
}

int binding_views(const struct binding *b, uint32_t tensor, const struct box *box,
                  void *const *segment_base,
                  int (*fn)(const struct box *part, const struct kernel_view *view, void *arg),
                  void *arg)
{
    struct common x;
    uint64_t missing = box_elements(box);
    if (missing == 0)
        return 0;
    if (tensor >= b->n_tensors)
        return RS_ENOTFOUND;
    for (uint32_t i = first_reaching(b, tensor, box); i < b->first[tensor + 1] && missing > 0;
         i++) {
        const struct binding_row *row = &b->rows[i];
        const struct binding_dim *dims = &b->dims[row->dims];
        if (row_begin(row, dims) >= end_of(box))
            break;
        if (row->n_dims != box->n_dims || !common_of(row, dims, box, &x))
            continue;
        if (segment_base[row->segment] == NULL)
            return RS_ENOTFOUND;
        struct kernel_view view = {.base = (char *)segment_base[row->segment] + x.bytes};
        for (unsigned d = 0; d < row->n_dims; d++)
            view.stride_bytes[d] = dims[d].stride_bytes;
        int r = fn(&x.part, &view, arg);
        if (r != 0)
            return r;
        missing -= x.elements;
    }
    return missing == 0 ? 0 : RS_ENOTFOUND;
}

/* True where elements of `box` stand side by side, the last dim fastest. */
static bool is_dense(const struct binding_dim *dims, const struct box *box, uint32_t element_bytes)
{
    int64_t expected = element_bytes;
    for (unsigned d = box->n_dims; d-- > 0;) {
        if (box->size[d] == 1)
            continue;
        if (dims[d].stride_bytes != expected)
            return false;
        expected *= (int64_t)box->size[d];
    }
    return true;
}

bool binding_contiguous(const struct binding *b, uint32_t tensor, const struct box *box,
                        uint32_t element_bytes, void *const *segment_base, void **ret_address)
{
    struct common x;
    uint64_t elements = box_elements(box);
    if (tensor >= b->n_tensors || elements == 0)
        return false;
    for (uint32_t i = first_reaching(b, tensor, box); i < b->first[tensor + 1]; i++) {
        const struct binding_row *row = &b->rows[i];
        const struct binding_dim *dims = &b->dims[row->dims];
        if (row_begin(row, dims) > begin_of(box))
            break;
        if (row->n_dims != box->n_dims || !common_of(row, dims, box, &x) || x.elements != elements)
            continue;
        if (segment_base[row->segment] == NULL || !is_dense(dims, box, element_bytes))
            return false;
        *ret_address = (char *)segment_base[row->segment] + x.bytes;
        return true;
    }
    return false;
}
