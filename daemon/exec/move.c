#include "exec/scaled.h"

#include <string.h>

#include "base/banned.h"

/* --- places ----------------------------------------------------------------------------------- */

static void row_major(struct kernel_view *v, unsigned n_dims, const uint64_t *shape, uint32_t bytes)
{
    int64_t stride = bytes;
    for (unsigned d = n_dims; d-- > 0;) {
        v->stride_bytes[d] = stride;
        stride *= (int64_t)shape[d];
    }
}

/* Moves a view from the first element of `at` to that of `to`. */
static struct kernel_view view_shift(const struct kernel_view *v, const struct box *at,
                                     const struct box *to)
{
    struct kernel_view r = *v;
    int64_t bytes = 0;
    for (unsigned d = 0; d < at->n_dims; d++)
        bytes += (int64_t)(to->offset[d] - at->offset[d]) * v->stride_bytes[d];
    r.base = (uint8_t *)v->base + bytes;
    return r;
}

static int scratch_view(const struct place *p, uint32_t tensor, const struct box *box,
                        uint32_t element_bytes, view_fn *fn, void *arg)
{
    const struct program_tensor *t = &p->program->tensors[tensor];
    struct box whole = box_whole(t->n_dims, t->shape);
    struct kernel_view view = {.base = p->scratch + t->scratch_offset};
    if (t->scratch_offset == UINT64_MAX)
        return RS_ENOTFOUND;
    row_major(&view, t->n_dims, t->shape, element_bytes);
    view = view_shift(&view, &whole, box);
    return fn(box, &view, arg);
}

static uint32_t place_tensor(const struct place *p, uint32_t tensor)
{
    return p->index == NULL ? tensor : p->index[tensor];
}

static const struct binding *place_binding(const struct place *p)
{
    return p->worker->bindings[p->memory];
}

int place_views(const struct place *p, uint32_t tensor, const struct box *box,
                uint32_t element_bytes, view_fn *fn, void *arg)
{
    if (p->worker == NULL)
        return scratch_view(p, tensor, box, element_bytes, fn, arg);
    return binding_views(place_binding(p), place_tensor(p, tensor), box,
                         worker_bases(p->plane, p->worker), fn, arg);
}

uint8_t place_dtype(const struct place *p, uint32_t tensor, uint8_t wire)
{
    if (p->worker == NULL)
        return wire;
    uint32_t t = place_tensor(p, tensor);
    return t < p->worker->n_tensors ? p->worker->dtypes[p->memory][t] : (uint8_t)DTYPE_NONE;
}

static int take_base(const struct box *part, const struct kernel_view *view, void *arg)
{
    (void)part;
    *(uint8_t **)arg = view->base;
    return 0;
}

/* A box of a whole tensor is one run where it is whole in all dims but one, and one element thick
 * in the dims before that. */
static bool scratch_contiguous(const struct place *p, uint32_t tensor, const struct box *box,
                               uint32_t element_bytes, uint8_t **ret_address)
{
    const struct program_tensor *t = &p->program->tensors[tensor];
    unsigned d = t->n_dims;
    while (d > 0 && box->size[d - 1] == t->shape[d - 1])
        d--;
    for (; d > 1; d--)
        if (box->size[d - 2] != 1)
            return false;
    return scratch_view(p, tensor, box, element_bytes, take_base, ret_address) == 0;
}

bool place_contiguous(const struct place *p, uint32_t tensor, const struct box *box,
                      uint32_t element_bytes, uint8_t **ret_address)
{
    void *address;
    if (p->worker == NULL)
        return scratch_contiguous(p, tensor, box, element_bytes, ret_address);
    if (!binding_contiguous(place_binding(p), place_tensor(p, tensor), box, element_bytes,
                            worker_bases(p->plane, p->worker), &address))
        return false;
    *ret_address = address;
    return true;
}

struct one_view {
    struct box part;
    struct kernel_view view;
};

/* The first alone is looked at. */
static int take_view(const struct box *part, const struct kernel_view *view, void *arg)
{
    *(struct one_view *)arg = (struct one_view){*part, *view};
    return 1;
}

bool place_rows(const struct place *p, uint32_t tensor, const struct box *box,
                uint32_t element_bytes, const void **ret_first, int64_t *ret_stride)
{
    struct one_view v;
    if (place_views(p, tensor, box, element_bytes, take_view, &v) != 1 || !box_equal(&v.part, box))
        return false;
    int64_t row = v.view.stride_bytes[0], bytes = element_bytes;
    if ((box->size[1] > 1 && v.view.stride_bytes[1] != bytes) || row % bytes != 0 ||
        (uintptr_t)v.view.base % element_bytes != 0)
        return false;
    *ret_first = v.view.base;
    *ret_stride = row;
    return true;
}

static int count_view(const struct box *part, const struct kernel_view *view, void *arg)
{
    (void)view;
    *(uint64_t *)arg += box_elements(part);
    return 0;
}

static int check_writable(const struct place *p, uint32_t tensor, const struct box *box,
                          struct err *e)
{
    const struct binding *b = place_binding(p);
    uint32_t t = place_tensor(p, tensor);
    for (uint32_t i = b->first[t]; i < b->first[t + 1]; i++) {
        struct box common;
        if (p->worker->segments[b->rows[i].segment].writable)
            continue;
        const struct binding_piece piece = binding_at(b, i);
        if (box_intersect(&piece.box, box, &common))
            return err_set(e, RS_EPRECOND, "worker %llx: segment %u is mapped for reading only",
                           (unsigned long long)p->worker->id, piece.segment);
    }
    return 0;
}

int place_covers(const struct place *p, uint32_t tensor, const struct box *box,
                 uint32_t element_bytes, bool writable, struct err *e)
{
    uint64_t covered = 0;
    char text[256];
    if (p->worker != NULL &&
        (place_binding(p) == NULL || place_tensor(p, tensor) >= place_binding(p)->n_tensors))
        return err_set(e, RS_EPRECOND, "worker %llx has no such tensor bound",
                       (unsigned long long)p->worker->id);
    int r = box_empty(box) ? 0 : place_views(p, tensor, box, element_bytes, count_view, &covered);
    if (r == RS_ENOMEM)
        return err_set(e, r, "out of memory");
    if (r != 0 || (!box_empty(box) && covered != box_elements(box)))
        return err_set(e, RS_EPRECOND, "box %s is not bound", box_text(box, text, sizeof(text)));
    return writable && p->worker != NULL ? check_writable(p, tensor, box, e) : 0;
}

/* --- batches ---------------------------------------------------------------------------------- */

void batch_init(struct batch *b, struct device_stream *stream, struct plane_work *work)
{
    b->stream = stream;
    b->work = work;
    b->n_copies = 0;
    b->n_casts = 0;
    b->n_prints = 0;
}

int batch_flush(struct batch *b)
{
    int r = 0;
    if (b->n_copies > 0)
        r = device_copy(b->stream, b->copies, b->n_copies);
    if (r == 0 && b->n_casts > 0)
        r = device_quantise(b->stream, b->casts, b->n_casts);
    if (r == 0 && b->n_prints > 0)
        r = device_fingerprint(b->stream, b->prints, b->n_prints);
    b->n_copies = 0;
    b->n_casts = 0;
    b->n_prints = 0;
    return r;
}

int batch_cast(struct batch *b, const struct kernel_quantise *q)
{
    b->casts[b->n_casts++] = *q;
    return b->n_casts == sizeof(b->casts) / sizeof(b->casts[0]) ? batch_flush(b) : 0;
}

static int push_print(struct batch *b, const struct box *part, const struct kernel_view *view,
                      uint8_t dtype, uint64_t *fingerprint)
{
    struct kernel_fingerprint *f = &b->prints[b->n_prints++];
    memcpy(f->size, part->size, sizeof(f->size));
    memcpy(f->offset, part->offset, sizeof(f->offset));
    f->from = *view;
    f->fingerprint = fingerprint;
    f->n_dims = part->n_dims;
    f->dtype = dtype;
    return b->n_prints == sizeof(b->prints) / sizeof(b->prints[0]) ? batch_flush(b) : 0;
}

struct print_to {
    struct batch *batch;
    uint64_t *fingerprint;
    uint8_t dtype;
};

static int print_view(const struct box *part, const struct kernel_view *view, void *arg)
{
    struct print_to *to = arg;
    return push_print(to->batch, part, view, to->dtype, to->fingerprint);
}

int batch_print(struct batch *b, const struct place *place, uint32_t tensor, const struct box *box,
                uint8_t dtype, uint64_t *fingerprint)
{
    struct print_to to = {b, fingerprint, dtype};
    return place_views(place, tensor, box, dtype_bytes(dtype), print_view, &to);
}

/* A move being cut: level 0 is the source, level i target i - 1. The part gets smaller from level
 * to level; at the last one it lies in one view of each. */
struct cut {
    struct batch *batch;
    const struct move *move;
    const struct move_end *to; /* KERNEL_MAX_TARGETS of move's at most */
    uint32_t n_to;
    uint64_t *fingerprint;
    uint32_t level;
    struct box at[1 + KERNEL_MAX_TARGETS];
    struct kernel_view views[1 + KERNEL_MAX_TARGETS];
};

static bool same_view(const struct kernel_view *a, const struct kernel_view *b,
                      const struct box *part)
{
    bool same = a->base == b->base;
    for (unsigned d = 0; d < part->n_dims; d++)
        same = same && (part->size[d] == 1 || a->stride_bytes[d] == b->stride_bytes[d]);
    return same;
}

static int push_copy(struct cut *c, const struct box *part)
{
    const struct move *m = c->move;
    struct batch *b = c->batch;
    struct kernel_copy *k = &b->copies[b->n_copies];
    k->from = view_shift(&c->views[0], &c->at[0], part);
    k->n_targets = 0;
    for (uint32_t i = 1; i <= c->n_to; i++) {
        struct kernel_view to = view_shift(&c->views[i], &c->at[i], part);
        if (m->from_dtype != m->to_dtype || !same_view(&k->from, &to, part))
            k->to[k->n_targets++] = to;
    }
    if (k->n_targets == 0)
        return c->fingerprint == NULL ? 0
                                      : push_print(b, part, &k->from, m->to_dtype, c->fingerprint);
    memcpy(k->size, part->size, sizeof(k->size));
    memcpy(k->offset, part->offset, sizeof(k->offset));
    k->fingerprint = c->fingerprint;
    k->n_dims = part->n_dims;
    k->from_dtype = m->from_dtype;
    k->to_dtype = m->to_dtype;
    k->streaming = m->streaming;
    b->n_copies++;
    return b->n_copies == sizeof(b->copies) / sizeof(b->copies[0]) ? batch_flush(b) : 0;
}

/* A part of what lies at a compact end. */
static struct kernel_view compact_view(const struct move *m, const struct move_end *end,
                                       uint32_t bytes, const struct box *part)
{
    const struct box *box = end->box != NULL ? end->box : &m->box;
    struct kernel_view view = {.base = end->compact};
    row_major(&view, box->n_dims, box->size, bytes);
    return view_shift(&view, box, part);
}

int batch_print_compact(struct batch *b, const struct move *m)
{
    struct kernel_view view = compact_view(m, &m->from, dtype_bytes(m->from_dtype), &m->box);
    if (m->fingerprint == NULL || box_empty(&m->box))
        return 0;
    return push_print(b, &m->box, &view, m->from_dtype, m->fingerprint);
}

static int cut_level(struct cut *c, const struct box *part);

static int cut_view(const struct box *part, const struct kernel_view *view, void *arg)
{
    struct cut *c = arg;
    c->at[c->level] = *part;
    c->views[c->level] = *view;
    c->level++;
    int r = cut_level(c, part);
    c->level--;
    return r;
}

static int cut_level(struct cut *c, const struct box *part)
{
    const struct move *m = c->move;
    if (c->level == 1 + c->n_to)
        return push_copy(c, part);
    const struct move_end *end = c->level == 0 ? &m->from : &c->to[c->level - 1];
    uint32_t bytes = dtype_bytes(c->level == 0 ? m->from_dtype : m->to_dtype);
    if (end->place != NULL)
        return place_views(end->place, m->tensor, part, bytes, cut_view, c);
    struct kernel_view view = compact_view(m, end, bytes, part);
    return cut_view(part, &view, c);
}

int batch_move(struct batch *b, const struct move *m)
{
    bool made = m->from.place != NULL && place_makes(m->from.place, m->tensor) != NULL;
    return made ? scaled_move(b, m) : batch_gather(b, m);
}

int batch_gather(struct batch *b, const struct move *m)
{
    struct cut c; /* its arrays are large, and filled level by level */
    int r = 0;
    c.batch = b;
    c.move = m;
    c.fingerprint = m->fingerprint;
    c.level = 0;
    for (uint32_t done = 0; done < m->n_to && r == 0; done += KERNEL_MAX_TARGETS) {
        c.to = m->to + done;
        c.n_to = m->n_to - done < KERNEL_MAX_TARGETS ? m->n_to - done : KERNEL_MAX_TARGETS;
        r = cut_level(&c, &m->box);
        c.fingerprint = NULL;
    }
    return r;
}
