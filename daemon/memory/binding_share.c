/* Memory that several bindings name: what may be shared, and what a refit would spoil. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "memory/memory.h"
#include "memory/strided.h"

#include "base/banned.h"

/* As many steps as binding_check spends: about a second. */
static const int64_t BUDGET = INT64_C(1) << 23;

/* Bytes [begin, end) of one piece of one user. */
struct span {
    uint64_t memory, begin, end;
    const struct binding_user *user;
    uint32_t piece; /* of the user's binding */
};

static struct binding_piece piece_of(const struct span *s)
{
    return binding_at(s->user->binding, s->piece);
}

static const struct tensor *tensor_of(const struct span *s)
{
    return &s->user->layout->tensors[s->user->binding->rows[s->piece].tensor];
}

static struct strided strided_of(const struct span *span)
{
    const struct binding_piece piece = piece_of(span), *p = &piece;
    struct strided s; /* sizes and strides beyond n_dims are never read */
    s.begin = span->begin;
    s.n_dims = p->box.n_dims;
    s.element_bytes = dtype_bytes(tensor_of(span)->dtype);
    for (unsigned d = 0; d < s.n_dims; d++) {
        s.size[d] = p->box.size[d];
        s.stride_bytes[d] = (uint64_t)p->stride_bytes[d];
    }
    return s;
}

static int compare_spans(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->memory != y->memory)
        return x->memory < y->memory ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* The same elements at the same place: to move one to the other is to leave it where it is. */
static bool same(const struct span *a, const struct span *b)
{
    const struct binding_piece first = piece_of(a), second = piece_of(b), *p = &first, *q = &second;
    if (a->user->written == b->user->written || a->begin != b->begin ||
        tensor_of(a)->dtype != tensor_of(b)->dtype || p->box.n_dims != q->box.n_dims ||
        strcmp(tensor_of(a)->name, tensor_of(b)->name) != 0)
        return false;
    for (unsigned d = 0; d < p->box.n_dims; d++)
        if (p->box.offset[d] != q->box.offset[d] || p->box.size[d] != q->box.size[d] ||
            (p->box.size[d] > 1 && p->stride_bytes[d] != q->stride_bytes[d]))
            return false;
    return true;
}

static int share_error(const struct span *a, const struct span *b, int found, struct err *e)
{
    return err_set(e, found == 1 ? RS_EINVAL : found,
                   "tensor '%.200s' of %s and tensor '%.200s' of %s %s: give what is written bytes "
                   "of its own",
                   tensor_of(a)->name, a->user->who, tensor_of(b)->name, b->user->who,
                   found == 1 ? "overlap in memory"
                              : "are too entangled in memory to tell whether they overlap");
}

static int compare_open(const struct span *all, uint32_t i, uint32_t *open, uint32_t *n_open,
                        int64_t *budget, struct err *e)
{
    const struct span *x = &all[i];
    struct strided s = strided_of(x);
    uint32_t kept = 0;
    for (uint32_t k = 0; k < *n_open; k++) {
        const struct span *o = &all[open[k]];
        if (o->memory != x->memory || o->end <= x->begin)
            continue;
        open[kept++] = open[k];
        if (o->user == x->user || (!o->user->written && !x->user->written) || same(o, x))
            continue;
        struct strided other = strided_of(o);
        int found = strided_overlap(&other, &s, budget);
        if (found != 0)
            return share_error(o, x, found, e);
    }
    *n_open = kept;
    return 0;
}

int bindings_disjoint(const struct binding_user *users, uint32_t n_users, struct err *e)
{
    int64_t budget = BUDGET;
    size_t n = 0;
    uint32_t n_open = 0, n_spans = 0;
    for (uint32_t u = 0; u < n_users; u++)
        n += users[u].binding->n_pieces;
    struct span *all = n > UINT32_MAX ? NULL : mem_calloc(n, sizeof *all);
    uint32_t *open = all == NULL ? NULL : mem_calloc(n, sizeof *open);
    int r = open == NULL ? err_set(e, RS_ENOMEM, "no memory to compare %zu pieces", n) : 0;
    for (uint32_t u = 0; r == 0 && u < n_users; u++)
        for (uint32_t i = 0; i < users[u].binding->n_pieces; i++) {
            struct span *s = &all[n_spans++];
            s->user = &users[u];
            const struct binding_row *row = &users[u].binding->rows[i];
            s->piece = i;
            s->memory = users[u].memory_of_segment[row->segment];
            s->begin = row->offset;
            if (users[u].offset_of_segment != NULL)
                s->begin += users[u].offset_of_segment[row->segment];
            struct strided strided = strided_of(s);
            s->end = strided_end(&strided);
        }
    if (r == 0 && n_spans > 0)
        qsort(all, n_spans, sizeof *all, compare_spans);
    for (uint32_t i = 0; r == 0 && i < n_spans; i++) {
        r = compare_open(all, i, open, &n_open, &budget, e);
        open[n_open++] = i;
    }
    mem_free(all);
    mem_free(open);
    return r;
}
