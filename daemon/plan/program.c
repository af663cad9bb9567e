#include "plan/program.h"

#include <string.h>

#include "base/mem.h"
#include "layout/scale.h"
#include "plan/plan.h"
#include "plan/program_format.h"

#include "base/banned.h"

/* Greatest size of anything, so that sums of a few of them cannot overflow. */
#define LIMIT_BYTES (UINT64_C(1) << 57)

static int bad(struct err *e, const char *what, uint64_t index)
{
    return err_set(e, RS_EPROTO, "program: %s %llu", what, (unsigned long long)index);
}

/* --- the frame -------------------------------------------------------------------------------- */

static int find_arrays(const uint8_t *data, size_t n_bytes, const struct program_header *h,
                       struct program *p, struct err *e)
{
    uint64_t at = sizeof *h;
#define X(name, type, count)                                                                       \
    at = (at + 7) / 8 * 8;                                                                         \
    if (at > n_bytes || h->count > (n_bytes - at) / sizeof(type))                                  \
        return err_set(e, RS_EPROTO, "program: " #name " do not fit in %zu bytes", n_bytes);       \
    p->name = (const type *)(const void *)(data + at);                                             \
    p->count = h->count;                                                                           \
    at += (uint64_t)h->count * sizeof(type);
    PROGRAM_ARRAYS(X)
#undef X
    if (at != n_bytes)
        return err_set(e, RS_EPROTO, "program: %zu bytes, its arrays end at %llu", n_bytes,
                       (unsigned long long)at);
    return 0;
}

static int open_frame(const void *data, size_t n_bytes, struct program *p, struct err *e)
{
    struct program_header h;
    if (n_bytes < sizeof h || (uintptr_t)data % 8 != 0)
        return err_set(e, RS_EPROTO, "program: %zu bytes, or not aligned to 8", n_bytes);
    memcpy(&h, data, sizeof h);
    if (h.magic != PROGRAM_MAGIC)
        return err_set(e, RS_EPROTO, "program: not a program of this version");
    if (h.chunk_bytes == 0 || h.chunk_bytes > LIMIT_BYTES || h.ring_slots == 0 ||
        h.scratch_bytes > LIMIT_BYTES)
        return err_set(e, RS_EPROTO, "program: impossible chunk, ring or scratch size");
    memcpy(p->digest, h.digest, sizeof p->digest);
    p->chunk_bytes = h.chunk_bytes;
    p->scratch_bytes = h.scratch_bytes;
    p->ring_slots = h.ring_slots;
    p->n_plan_devices = h.n_plan_devices;
    return find_arrays(data, n_bytes, &h, p, e);
}

/* --- single entries --------------------------------------------------------------------------- */

struct box program_source_box(const struct program_tensor *t, const struct box *box)
{
    if (t->value == PROGRAM_AS_SOURCE)
        return *box;
    struct box scales = t->value == PROGRAM_SCALES ? *box : scale_touched(t->block, box);
    return scale_elements(t->block, t->origin, &scales);
}

/* Shapes, blocks and dtypes of what is scaled fit together. */
static bool value_fits(const struct program_tensor *t)
{
    if (t->value == PROGRAM_AS_SOURCE)
        return true;
    if (t->value > PROGRAM_SCALES || t->n_dims != 2 ||
        (t->source_dtype != DTYPE_BFLOAT16 && t->source_dtype != DTYPE_FLOAT32))
        return false;
    for (unsigned d = 0; d < 2; d++) {
        if (t->block[d] == 0 || t->origin[d] == 0 || t->origin[d] > LIMIT_BYTES / 8)
            return false;
        uint64_t length =
            t->value == PROGRAM_SCALES ? scale_count(t->block[d], t->origin[d]) : t->origin[d];
        if (t->shape[d] != length)
            return false;
    }
    return t->origin[0] <= LIMIT_BYTES / 8 / t->origin[1] && scale_known(t->block, t->origin);
}

/* The wire dtypes in which a tensor can go out. */
static bool wire_fits(const struct program_tensor *t, enum dtype wire)
{
    enum dtype source = (enum dtype)t->source_dtype;
    if (t->value == PROGRAM_QUANTISED)
        return wire == DTYPE_FLOAT8_E4M3FN;
    if (t->value == PROGRAM_SCALES)
        return wire == DTYPE_FLOAT32;
    return wire == source || dtype_can_cast(source, wire);
}

static int check_tensors(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_tensors; i++) {
        const struct program_tensor *t = &p->tensors[i];
        if (t->n_dims > BOX_MAX_DIMS || dtype_bytes((enum dtype)t->source_dtype) == 0)
            return bad(e, "dims or dtype of tensor", i);
        uint64_t left = LIMIT_BYTES / 8;
        for (uint8_t d = 0; d < t->n_dims; d++) {
            if (t->shape[d] == 0 || t->shape[d] > left)
                return bad(e, "shape of tensor", i);
            left /= t->shape[d];
        }
        if (!value_fits(t))
            return bad(e, "block or shape of scaled tensor", i);
    }
    return 0;
}

static int check_boxes(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_boxes; i++) {
        const struct box *b = &p->boxes[i];
        if (b->n_dims > BOX_MAX_DIMS)
            return bad(e, "dims of box", i);
        for (uint8_t d = 0; d < b->n_dims; d++)
            if (b->size[d] == 0 || b->size[d] > LIMIT_BYTES || b->offset[d] > LIMIT_BYTES)
                return bad(e, "size of box", i);
    }
    return 0;
}

static int check_cells(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_cells; i++) {
        const struct program_cell *c = &p->cells[i];
        if (c->tensor >= p->n_tensors || c->box >= p->n_boxes)
            return bad(e, "tensor or box of cell", i);
        const struct program_tensor *t = &p->tensors[c->tensor];
        const struct box *b = &p->boxes[c->box];
        enum dtype wire = (enum dtype)c->wire;
        if (!wire_fits(t, wire))
            return bad(e, "wire dtype of cell", i);
        if (b->n_dims != t->n_dims)
            return bad(e, "box dims of cell", i);
        uint64_t bytes = dtype_bytes(wire);
        for (uint8_t d = 0; d < b->n_dims; d++) {
            if (b->offset[d] + b->size[d] > t->shape[d])
                return bad(e, "box beyond its tensor: cell", i);
            bytes *= t->shape[d];
        }
        if (t->scratch_offset != UINT64_MAX &&
            (t->scratch_offset > p->scratch_bytes || bytes > p->scratch_bytes - t->scratch_offset))
            return bad(e, "scratch of cell", i);
    }
    return 0;
}

static int check_places(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_places; i++) {
        const struct program_place *x = &p->places[i];
        if (x->device >= p->n_devices || x->side > PROGRAM_SCRATCH)
            return bad(e, "device or side of place", i);
        if (x->side == PROGRAM_SCRATCH && p->scratch_bytes == 0)
            return bad(e, "no scratch for place", i);
    }
    return 0;
}

static bool place_fits(const struct program *p, uint32_t place, uint32_t cell)
{
    if (place >= p->n_places)
        return false;
    return p->places[place].side != PROGRAM_SCRATCH ||
           p->tensors[p->cells[cell].tensor].scratch_offset != UINT64_MAX;
}

/* The places that an item is written to. */
static bool list_fits(const struct program *p, uint32_t list, uint32_t cell)
{
    if (list >= p->n_lists || p->lists[list] == 0 || p->lists[list] > p->n_lists - list - 1)
        return false;
    for (uint32_t i = 1; i <= p->lists[list]; i++) {
        uint32_t place = p->lists[list + i];
        if (!place_fits(p, place, cell) || p->places[place].side == PROGRAM_SOURCE)
            return false;
    }
    return true;
}

/* --- items, streams, copies ------------------------------------------------------------------- */

static int check_item(const struct program *p, uint32_t i, uint32_t device, bool reads, bool writes,
                      struct err *e)
{
    const struct program_item *x = &p->items[i];
    if (x->cell >= p->n_cells)
        return bad(e, "cell of item", i);
    if (reads ? !place_fits(p, x->from, x->cell) || p->places[x->from].device != device
              : x->from != PROGRAM_NONE)
        return bad(e, "where to read item", i);
    if (writes ? !list_fits(p, x->places, x->cell) : x->places != PROGRAM_NONE)
        return bad(e, "where to write item", i);
    return 0;
}

static int check_streams(const struct program *p, uint32_t *ret_n_items, struct err *e)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->n_streams; i++) {
        const struct program_stream *s = &p->streams[i];
        if (s->device >= p->n_devices || s->peer >= p->n_plan_devices || s->send > 1 ||
            (s->tier != TIER_DOMAIN && s->tier != TIER_NETWORK))
            return bad(e, "ends of stream", i);
        if (i > 0 && (s->order < s[-1].order || (s->order == s[-1].order && s->send <= s[-1].send)))
            return bad(e, "order of stream", i);
        if (s->first_item != at || s->n_items == 0 || s->n_items > p->n_items - at)
            return bad(e, "items of stream", i);
        uint64_t bytes = 0;
        for (uint32_t k = 0; k < s->n_items; k++) {
            int r = check_item(p, at + k, s->device, s->send, !s->send, e);
            if (r != 0)
                return r;
            bytes += program_cell_bytes(p, p->items[at + k].cell);
            if (bytes > LIMIT_BYTES)
                return bad(e, "size of stream", i);
        }
        if (bytes != s->bytes)
            return bad(e, "sum of stream", i);
        at += s->n_items;
    }
    *ret_n_items = at;
    return 0;
}

static int check_copies(const struct program *p, uint32_t at, struct err *e)
{
    for (uint32_t i = 0; i < p->n_devices; i++) {
        const struct program_device *d = &p->devices[i];
        if (d->device >= p->n_plan_devices || (i > 0 && d->device <= d[-1].device))
            return bad(e, "number of device", i);
        if (d->first_copy != at || d->n_copies > p->n_items - at)
            return bad(e, "copies of device", i);
        for (uint32_t k = 0; k < d->n_copies; k++) {
            int r = check_item(p, at + k, i, true, true, e);
            if (r != 0)
                return r;
        }
        at += d->n_copies;
    }
    return at == p->n_items ? 0 : err_set(e, RS_EPROTO, "program: items that belong to nothing");
}

/* --- messages --------------------------------------------------------------------------------- */

/* How far a stream's messages have come: they must follow one another without a gap. */
struct progress {
    uint64_t bytes;      /* up to here */
    uint64_t item_begin; /* of `item`, the one that holds `bytes` */
    uint32_t item;
};

static bool whole_elements(const struct program *p, const struct program_stream *s,
                           struct progress *g)
{
    while (g->item < s->n_items) {
        uint32_t cell = p->items[s->first_item + g->item].cell;
        uint64_t bytes = program_cell_bytes(p, cell);
        if (g->bytes < g->item_begin + bytes)
            return (g->bytes - g->item_begin) % dtype_bytes((enum dtype)p->cells[cell].wire) == 0;
        g->item_begin += bytes;
        g->item++;
    }
    return true;
}

static int check_message(const struct program *p, uint32_t i, uint32_t device, bool first,
                         struct progress *progress, struct err *e)
{
    const struct program_message *m = &p->messages[i];
    if (m->stream >= p->n_streams || p->streams[m->stream].device != device)
        return bad(e, "stream of message", i);
    const struct program_stream *s = &p->streams[m->stream];
    struct progress *g = &progress[m->stream];
    if (m->begin != g->bytes || m->end <= m->begin || m->end > s->bytes ||
        m->end - m->begin > p->chunk_bytes)
        return bad(e, "range of message", i);
    g->bytes = m->end;
    if (!whole_elements(p, s, g))
        return bad(e, "an element is cut by message", i);
    if (first)
        return 0;
    const struct program_message *before = m - 1;
    uint32_t order = p->streams[before->stream].order;
    if (m->round < before->round || (m->round == before->round && s->order < order))
        return bad(e, "order of message", i);
    return 0;
}

static int check_messages(const struct program *p, struct progress *progress, struct err *e)
{
    uint32_t at = 0;
    for (uint32_t d = 0; d < p->n_devices; d++) {
        if (p->devices[d].first_message != at || p->devices[d].n_messages > p->n_messages - at)
            return bad(e, "messages of device", d);
        for (uint32_t k = 0; k < p->devices[d].n_messages; k++) {
            int r = check_message(p, at + k, d, k == 0, progress, e);
            if (r != 0)
                return r;
        }
        at += p->devices[d].n_messages;
    }
    if (at != p->n_messages)
        return err_set(e, RS_EPROTO, "program: messages that belong to no device");
    for (uint32_t i = 0; i < p->n_streams; i++)
        if (progress[i].bytes != p->streams[i].bytes)
            return bad(e, "bytes without a message in stream", i);
    return 0;
}

static int check_holds(const struct program *p, struct err *e)
{
    for (uint32_t i = 0; i < p->n_holds; i++) {
        const struct program_hold *h = &p->holds[i];
        if (h->place >= p->n_places || h->cell >= p->n_cells ||
            p->places[h->place].side == PROGRAM_SCRATCH)
            return bad(e, "place or cell of hold", i);
        if (i > 0 && (h->place < h[-1].place || (h->place == h[-1].place && h->cell <= h[-1].cell)))
            return bad(e, "order of hold", i);
    }
    return 0;
}

int program_open(const void *data, size_t n_bytes, struct program *ret, struct err *e)
{
    struct program p;
    uint32_t n_items = 0;
    memset(&p, 0, sizeof p);
    int r = open_frame(data, n_bytes, &p, e);
    if (r == 0)
        r = check_tensors(&p, e);
    if (r == 0)
        r = check_boxes(&p, e);
    if (r == 0)
        r = check_cells(&p, e);
    if (r == 0)
        r = check_places(&p, e);
    if (r == 0)
        r = check_streams(&p, &n_items, e);
    if (r == 0)
        r = check_copies(&p, n_items, e);
    if (r == 0)
        r = check_holds(&p, e);
    if (r != 0)
        return r;
    struct progress *progress = mem_calloc((size_t)p.n_streams + 1, sizeof *progress);
    if (progress == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    r = check_messages(&p, progress, e);
    mem_free(progress);
    if (r == 0)
        *ret = p;
    return r;
}
