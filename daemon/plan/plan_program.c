/* One node's part of a plan, as program.h says: its cells, places, items, streams, messages,
 * copies, holds.
 *
 * Everything is derived here from runs, legs and casts, and only for this node: what the others do
 * is skipped stream by stream. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"
#include "plan/program_format.h"

#include "base/banned.h"

/* Open addressing from 64-bit keys to indices. */
struct map {
    uint64_t *key;
    uint32_t *value; /* NONE32: empty */
    size_t size, n;
};

static int map_grow(struct map *m)
{
    if (m->n * 2 < m->size)
        return 0;
    struct map wider = {.size = m->size == 0 ? 1024 : m->size * 2};
    wider.key = mem_alloc(wider.size * sizeof *wider.key);
    wider.value = mem_alloc(wider.size * sizeof *wider.value);
    if (wider.key == NULL || wider.value == NULL) {
        mem_free(wider.key);
        mem_free(wider.value);
        return RS_ENOMEM;
    }
    memset(wider.value, 0xFF, wider.size * sizeof *wider.value);
    for (size_t i = 0; i < m->size; i++) {
        if (m->value[i] == NONE32)
            continue;
        size_t at = (m->key[i] * 0x9E3779B97F4A7C15U) >> 20 & (wider.size - 1);
        while (wider.value[at] != NONE32)
            at = (at + 1) & (wider.size - 1);
        wider.key[at] = m->key[i];
        wider.value[at] = m->value[i];
    }
    wider.n = m->n;
    mem_free(m->key);
    mem_free(m->value);
    *m = wider;
    return 0;
}

/* The value's place for the key; NONE32 there when it is new (the caller then sets it). NULL: no
 * memory. */
static uint32_t *map_at(struct map *m, uint64_t key)
{
    if (map_grow(m) != 0)
        return NULL;
    size_t at = (key * 0x9E3779B97F4A7C15U) >> 20 & (m->size - 1);
    while (m->value[at] != NONE32 && m->key[at] != key)
        at = (at + 1) & (m->size - 1);
    if (m->value[at] == NONE32) {
        m->key[at] = key;
        m->n++;
    }
    return &m->value[at];
}

static void map_close(struct map *m)
{
    mem_free(m->key);
    mem_free(m->value);
}

struct routed_copy {
    uint32_t device;
    struct program_item item;
};

struct routed_message {
    struct program_message m;
    uint32_t device;
    uint32_t order;
};

/* A cast leg that this node has an end of; sorted, those of one stream stand together. */
struct cast_record {
    uint32_t order;
    uint32_t send;
    uint32_t cast;
    uint32_t hop; /* 0: the gather from `giver` */
    uint32_t giver;
};

/* Members of a run mostly share a box. */
struct box_found {
    uint32_t shape, cell, piece, box;
};

struct encoder {
    const struct plan *p;
    uint32_t node;
    uint32_t *local;   /* per plan device: its number on the node, NONE32 elsewhere */
    uint8_t *set_here; /* per set: an end is on the node */
    uint32_t *
        run_cells; /* per run: the cell of its first member, those of the others follow; NONE32: none is here */
    uint32_t *unit_tensor; /* per unit: NONE32: none */
    struct box_found box_found;
    struct map cells; /* of casts */
    struct map boxes, places, lists;
    VEC(struct program_tensor) v_tensors;
    VEC(struct box) v_boxes;
    VEC(struct program_cell) v_cells;
    VEC(struct program_place) v_places;
    VEC(uint32_t) v_lists;
    VEC(struct program_item) v_items;
    VEC(struct program_stream) v_streams;
    VEC(struct routed_message) v_messages;
    VEC(struct routed_copy) v_copies;
    VEC(struct program_hold) v_holds;
    VEC(struct program_device) v_devices;
    VEC(uint32_t) list;        /* under construction */
    VEC(uint32_t) hold_places; /* of a run's or cast's cells */
    VEC(struct cast_record) v_records;
};

/* --- interned things -------------------------------------------------------------------------- */

static bool end_here(const struct encoder *x, uint32_t end)
{
    return x->local[x->p->ends.at[end].device] != NONE32;
}

static int tensor_index(struct encoder *x, uint32_t unit, uint32_t *ret)
{
    const struct plan *p = x->p;
    const struct plan_unit *u = &p->units.at[unit];
    const struct plan_shape *s = &p->shapes.at[u->shape];
    uint32_t *slot = &x->unit_tensor[unit];
    if (*slot == NONE32) {
        if (vec_reserve(&x->v_tensors, x->v_tensors.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_tensors.n;
        struct program_tensor *t = &x->v_tensors.at[x->v_tensors.n++];
        memset(t, 0, sizeof *t);
        memcpy(t->shape, s->size, s->n_dims * sizeof t->shape[0]);
        t->scratch_offset = UINT64_MAX;
        if (p->classes.at[s->class].strategy == PLAN_GATHER_BROADCAST && u->cast != NONE32)
            t->scratch_offset = p->casts.at[u->cast].scratch_offset;
        t->index = plan_tensor_origin(p, u->tensor);
        t->n_dims = s->n_dims;
        t->source_dtype = s->source_dtype;
        t->value = s->value;
        t->named_layout = t->named_tensor = PROGRAM_NONE;
        memcpy(t->origin, s->origin, sizeof t->origin);
        memcpy(t->block, s->block, sizeof t->block);
        if (s->value == PLAN_SCALES) {
            const struct plan_derived *d = &p->derived.at[u->tensor - p->source->n_tensors];
            t->named_layout = d->layout;
            t->named_tensor = d->tensor;
        }
    }
    *ret = *slot;
    return 0;
}

/* Members of a shape share the boxes: the key is the number that the cell has in the shape's first
 * unit. */
static int box_index(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t piece, uint32_t *ret)
{
    const struct plan *p = x->p;
    uint32_t shape = p->units.at[unit].shape;
    const struct plan_shape *s = &p->shapes.at[shape];
    uint32_t first = p->members.at[s->first_member];
    struct box_found *found = &x->box_found;
    if (found->shape == shape && found->cell == cell && found->piece == piece) {
        *ret = found->box;
        return 0;
    }
    uint32_t *slot = map_at(&x->boxes, plan_cell_number(p, first, cell, piece));
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        if (vec_reserve(&x->v_boxes, x->v_boxes.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_boxes.n;
        struct box b, *out = &x->v_boxes.at[x->v_boxes.n++];
        plan_piece_box(p, s, cell, piece, &b);
        memset(out, 0, sizeof *out);
        out->n_dims = b.n_dims;
        memcpy(out->offset, b.offset, sizeof out->offset);
        memcpy(out->size, b.size, sizeof out->size);
    }
    *found = (struct box_found){shape, cell, piece, *slot};
    *ret = *slot;
    return 0;
}

static int cell_new(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t piece)
{
    struct program_cell c;
    memset(&c, 0, sizeof c);
    c.id = plan_cell_number(x->p, unit, cell, piece);
    c.wire = x->p->shapes.at[x->p->units.at[unit].shape].wire;
    if (x->v_cells.n == NONE32 - 1)
        return RS_EEXHAUSTED;
    if (tensor_index(x, unit, &c.tensor) != 0 || box_index(x, unit, cell, piece, &c.box) != 0 ||
        vec_reserve(&x->v_cells, x->v_cells.n + 1) != 0)
        return RS_ENOMEM;
    x->v_cells.at[x->v_cells.n++] = c;
    return 0;
}

/* A cell of a cast. */
static int cell_index(struct encoder *x, uint32_t unit, uint32_t cell, uint32_t *ret)
{
    uint32_t *slot = map_at(&x->cells, plan_cell_number(x->p, unit, cell, NONE32));
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        uint32_t next = (uint32_t)x->v_cells.n;
        int r = cell_new(x, unit, cell, NONE32);
        if (r != 0)
            return r;
        *slot = next;
    }
    *ret = *slot;
    return 0;
}

/* Each cell belongs to one run: they are made run by run, and a run's first says where the others are. */
static int run_cells(struct encoder *x, uint32_t run, uint32_t *ret_first)
{
    const struct plan *p = x->p;
    const struct plan_run *u = &p->runs.at[run];
    uint32_t next = (uint32_t)x->v_cells.n;
    int r = 0;
    if (x->run_cells[run] == NONE32) {
        for (uint32_t m = u->member; m < u->member + u->count && r == 0; m++)
            r = cell_new(x, p->members.at[m], p->groups.at[u->group].cell, u->piece);
        if (r != 0)
            return r;
        x->run_cells[run] = next;
    }
    *ret_first = x->run_cells[run];
    return 0;
}

static int place_index(struct encoder *x, uint8_t side, uint32_t device, uint32_t layout,
                       uint32_t rank, uint32_t *ret)
{
    uint64_t key = (uint64_t)side << 62 | (uint64_t)layout << 32 | rank;
    if (side == PROGRAM_SCRATCH)
        key |= device;
    uint32_t *slot = map_at(&x->places, key);
    if (slot == NULL)
        return RS_ENOMEM;
    if (*slot == NONE32) {
        struct program_place place;
        memset(&place, 0, sizeof place);
        place.device = x->local[device];
        place.layout = layout;
        place.rank = rank;
        place.side = side;
        if (vec_reserve(&x->v_places, x->v_places.n + 1) != 0)
            return RS_ENOMEM;
        *slot = (uint32_t)x->v_places.n;
        x->v_places.at[x->v_places.n++] = place;
    }
    *ret = *slot;
    return 0;
}

static int end_place(struct encoder *x, uint32_t end, uint8_t side, uint32_t *ret)
{
    const struct end *n = &x->p->ends.at[end];
    return place_index(x, side, n->device, n->layout, n->rank, ret);
}

static int list_add(struct encoder *x, uint32_t place)
{
    if (vec_reserve(&x->list, x->list.n + 1) != 0)
        return RS_ENOMEM;
    x->list.at[x->list.n++] = place;
    return 0;
}

static int list_add_end(struct encoder *x, uint32_t end)
{
    uint32_t place;
    int r = end_place(x, end, PROGRAM_DESTINATION, &place);
    return r == 0 ? list_add(x, place) : r;
}

/* The interned list under construction; equal lists are one. Collisions probe on to the next key.
 */
static int list_index(struct encoder *x, uint32_t *ret)
{
    uint64_t key = x->list.n;
    for (size_t i = 0; i < x->list.n; i++)
        key = (key ^ x->list.at[i]) * 0x9E3779B97F4A7C15U + (key >> 31);
    for (;; key++) {
        uint32_t *slot = map_at(&x->lists, key);
        if (slot == NULL)
            return RS_ENOMEM;
        if (*slot == NONE32) {
            if (x->v_lists.n + x->list.n + 1 >= NONE32)
                return RS_EEXHAUSTED;
            if (vec_reserve(&x->v_lists, x->v_lists.n + x->list.n + 1) != 0)
                return RS_ENOMEM;
            *slot = (uint32_t)x->v_lists.n;
            x->v_lists.at[x->v_lists.n++] = (uint32_t)x->list.n;
            memcpy(x->v_lists.at + x->v_lists.n, x->list.at, x->list.n * sizeof(uint32_t));
            x->v_lists.n += x->list.n;
        }
        const uint32_t *found = x->v_lists.at + *slot;
        if (found[0] == x->list.n &&
            memcmp(found + 1, x->list.at, x->list.n * sizeof(uint32_t)) == 0) {
            *ret = *slot;
            return 0;
        }
    }
}

/* --- cells and holds of a group --------------------------------------------------------------- */

static int add_hold_places(struct encoder *x, const struct set *s, uint8_t side)
{
    for (uint32_t i = s->first; i < s->first + s->n; i++) {
        if (!end_here(x, i))
            continue;
        uint32_t place;
        int r = end_place(x, i, side, &place);
        if (r == 0)
            r = vec_reserve(&x->hold_places, x->hold_places.n + 1);
        if (r != 0)
            return r;
        x->hold_places.at[x->hold_places.n++] = place;
    }
    return 0;
}

/* All places of the group hold cells [first, first + count). */
static int add_holds(struct encoder *x, const struct plan_group *g, uint32_t first, uint32_t count)
{
    const struct plan *p = x->p;
    int r = 0;
    x->hold_places.n = 0;
    if (x->set_here[g->source])
        r = add_hold_places(x, &p->sets.at[g->source], PROGRAM_SOURCE);
    if (r == 0 && x->set_here[g->takers])
        r = add_hold_places(x, &p->sets.at[g->takers], PROGRAM_DESTINATION);
    if (r == 0)
        r = vec_reserve(&x->v_holds, x->v_holds.n + x->hold_places.n * count);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        for (uint32_t k = 0; k < x->hold_places.n; k++)
            x->v_holds.at[x->v_holds.n++] = (struct program_hold){x->hold_places.at[k], first + i};
    return r;
}

static int add_copies(struct encoder *x, uint32_t run, uint32_t from_end)
{
    struct routed_copy c = {.device = x->local[x->p->ends.at[from_end].device]};
    uint32_t first, count = x->p->runs.at[run].count;
    int r = end_place(x, from_end, PROGRAM_SOURCE, &c.item.from);
    if (r == 0)
        r = list_index(x, &c.item.places);
    if (r == 0)
        r = run_cells(x, run, &first);
    if (r == 0)
        r = vec_reserve(&x->v_copies, x->v_copies.n + count);
    for (uint32_t i = 0; r == 0 && i < count; i++) {
        c.item.cell = first + i;
        x->v_copies.at[x->v_copies.n++] = c;
    }
    return r;
}

/* Copies inside the node's sites: one item for all that is read from one holder. */
static int run_copies(struct encoder *x, uint32_t run, struct hops *h)
{
    int r = plan_run_hops(x->p, run, h);
    for (uint32_t i = 0; i < h->v.n && r == 0; i++) {
        struct hop *first = &h->v.at[i];
        if (first->edge != NONE32 || first->after != NONE32 || !end_here(x, first->from))
            continue;
        uint32_t from = first->from;
        x->list.n = 0;
        for (uint32_t k = i; k < h->v.n && r == 0; k++) {
            struct hop *other = &h->v.at[k];
            if (other->edge != NONE32 || other->after != NONE32 || other->from != from)
                continue;
            r = list_add_end(x, other->to);
            other->edge = 0; /* taken */
        }
        if (r == 0)
            r = add_copies(x, run, from);
    }
    return r;
}

static int encode_runs(struct encoder *x)
{
    const struct plan *p = x->p;
    struct hops h = {0};
    int r = 0;
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++) {
        const struct plan_run *run = &p->runs.at[i];
        const struct plan_group *g = &p->groups.at[run->group];
        bool source = x->set_here[g->source], takers = x->set_here[g->takers];
        uint32_t first;
        if (!source && !takers)
            continue;
        r = run_cells(x, i, &first);
        if (r == 0)
            r = add_holds(x, g, first, run->count);
        if (source && takers && r == 0)
            r = run_copies(x, i, &h);
    }
    hops_close(&h);
    return r;
}

/* --- streams of runs -------------------------------------------------------------------------- */

static int add_item(struct encoder *x, struct program_item item)
{
    if (x->v_items.n >= NONE32 - 1)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->v_items, x->v_items.n + 1) != 0)
        return RS_ENOMEM;
    x->v_items.at[x->v_items.n++] = item;
    return 0;
}

static uint32_t first_end_on(const struct plan *p, const struct set *s, uint32_t device)
{
    for (uint32_t i = s->first; i < s->first + s->n; i++)
        if (p->ends.at[i].device == device)
            return i;
    return NONE32;
}

/* Where the sender of an edge reads. */
static int edge_from(struct encoder *x, const struct plan_edge *e, const struct plan_batch *g,
                     uint32_t *ret)
{
    bool relayed = e->parent != NONE32;
    const struct set *s = &x->p->sets.at[relayed ? g->takers : g->source];
    uint32_t end = first_end_on(x->p, s, e->from);
    rs_assert(end != NONE32);
    return end_place(x, end, relayed ? PROGRAM_DESTINATION : PROGRAM_SOURCE, ret);
}

/* Where the receiver of an edge writes. */
static int edge_places(struct encoder *x, const struct plan_edge *e, const struct plan_batch *g,
                       uint32_t *ret)
{
    const struct plan *p = x->p;
    int r = 0;
    x->list.n = 0;
    if (e->taker != NONE32) {
        r = list_add_end(x, e->taker);
    } else {
        uint32_t first, n = set_site(p, &p->sets.at[g->takers], p->topology->devices[e->to].domain,
                                     p->device_site[e->to], &first);
        for (uint32_t i = first; i < first + n && r == 0; i++)
            r = list_add_end(x, i);
    }
    return r == 0 ? list_index(x, ret) : r;
}

static int run_items(struct encoder *x, uint32_t run, struct program_item item)
{
    uint32_t first, count = x->p->runs.at[run].count;
    int r = run_cells(x, run, &first);
    for (uint32_t i = 0; i < count && r == 0; i++) {
        item.cell = first + i;
        r = add_item(x, item);
    }
    return r;
}

static int edge_items(struct encoder *x, const struct plan_edge *e, bool send)
{
    const struct plan *p = x->p;
    int r = 0;
    for (uint32_t b = e->first_batch; b < e->first_batch + e->n_batches && r == 0; b++) {
        const struct plan_batch *batch = &p->batches.at[b];
        struct program_item item = {.from = PROGRAM_NONE, .places = PROGRAM_NONE};
        r = send ? edge_from(x, e, batch, &item.from) : edge_places(x, e, batch, &item.places);
        for (uint32_t k = 0; k < batch->n_runs && r == 0; k++)
            r = run_items(x, p->batch_runs.at[batch->first_run + k], item);
    }
    return r;
}

static int add_message(struct encoder *x, struct program_message m, uint32_t order)
{
    if (x->v_messages.n >= NONE32 - 1)
        return RS_EEXHAUSTED;
    if (vec_reserve(&x->v_messages, x->v_messages.n + 1) != 0)
        return RS_ENOMEM;
    uint32_t device = x->v_streams.at[m.stream].device;
    x->v_messages.at[x->v_messages.n++] = (struct routed_message){m, device, order};
    return 0;
}

static int open_stream(struct encoder *x, uint32_t from, uint32_t to, uint32_t order, bool send,
                       uint8_t tier)
{
    if (vec_reserve(&x->v_streams, x->v_streams.n + 1) != 0)
        return RS_ENOMEM;
    struct program_stream *s = &x->v_streams.at[x->v_streams.n++];
    memset(s, 0, sizeof *s);
    s->device = x->local[send ? from : to];
    s->peer = send ? to : from;
    s->order = order;
    s->first_item = (uint32_t)x->v_items.n;
    s->send = send;
    s->tier = tier;
    return 0;
}

static int encode_stream(struct encoder *x, uint32_t stream, bool send)
{
    const struct plan *p = x->p;
    const struct plan_stream *s = &p->streams.at[stream];
    int r = open_stream(x, s->from, s->to, stream, send, s->tier);
    if (r != 0)
        return r;
    uint32_t index = (uint32_t)x->v_streams.n - 1;
    for (uint32_t at = s->first_leg; at != NONE32 && r == 0; at = p->legs.at[at].next) {
        const struct plan_leg *l = &p->legs.at[at];
        for (uint32_t i = 0; i < l->n_edges && r == 0; i++)
            r = edge_items(x, &p->edges.at[p->leg_edges.at[l->first_edge + i]], send);
        uint64_t n = leg_messages(p, l);
        struct leg_cursor c = {0};
        for (uint64_t i = 0; i < n && r == 0; i++) {
            struct program_message m = {.stream = index};
            leg_message(p, l, i, &c, &m.begin, &m.end, &m.round);
            m.begin += l->base;
            m.end += l->base;
            r = add_message(x, m, stream);
        }
    }
    x->v_streams.at[index].bytes = s->bytes;
    x->v_streams.at[index].n_items = (uint32_t)x->v_items.n - x->v_streams.at[index].first_item;
    return r;
}

/* In the order of (stream, receive before send). */
static int encode_streams(struct encoder *x)
{
    const struct plan *p = x->p;
    int r = 0;
    for (uint32_t i = 0; i < p->streams.n && r == 0; i++) {
        if (x->local[p->streams.at[i].to] != NONE32)
            r = encode_stream(x, i, false);
        if (r == 0 && x->local[p->streams.at[i].from] != NONE32)
            r = encode_stream(x, i, true);
    }
    return r;
}

/* --- gather-broadcast ------------------------------------------------------------------------- */

static int add_record(struct encoder *x, uint32_t cast, uint32_t hop, uint32_t from, uint32_t to)
{
    for (uint32_t send = 0; send < 2; send++) {
        if (x->local[send ? from : to] == NONE32)
            continue;
        if (vec_reserve(&x->v_records, x->v_records.n + 1) != 0)
            return RS_ENOMEM;
        x->v_records.at[x->v_records.n++] =
            (struct cast_record){.order = cast_order(x->p, from, to, hop == 0),
                                 .send = send,
                                 .cast = cast,
                                 .hop = hop,
                                 .giver = hop == 0 ? from : NONE32};
    }
    return 0;
}

static int gather_records(struct encoder *x, uint32_t cast)
{
    const struct plan *p = x->p;
    const struct plan_cast *c = &p->casts.at[cast];
    const struct plan_class *class = &p->classes.at[p->shapes.at[p->units.at[c->unit].shape].class];
    int r = 0;
    for (uint32_t cell = 0; cell < class->n_cells && r == 0; cell++) {
        uint32_t end, giver = cast_giver(p, c, cell, &end);
        bool known =
            giver == NONE32 || (x->local[giver] == NONE32 && x->local[c->gather] == NONE32);
        for (size_t i = x->v_records.n; i-- > 0 && !known && x->v_records.at[i].cast == cast;)
            known = x->v_records.at[i].giver == giver;
        if (!known)
            r = add_record(x, cast, 0, giver, c->gather);
    }
    return r;
}

static int hop_records(struct encoder *x, uint32_t cast)
{
    const struct plan *p = x->p;
    struct chain c = chain_of(p, p->casts.at[cast].gather);
    int r = 0;
    for (uint32_t h = 1; h <= c.n_hops && r == 0; h++) {
        uint32_t from = chain_device(p, &c, h - 1), to = chain_device(p, &c, h);
        if (x->local[from] != NONE32 || x->local[to] != NONE32)
            r = add_record(x, cast, h, from, to);
    }
    return r;
}

static int record_compare(const void *a, const void *b)
{
    const struct cast_record *p = a, *q = b;
    if (p->order != q->order)
        return p->order < q->order ? -1 : 1;
    if (p->send != q->send)
        return p->send < q->send ? -1 : 1;
    return p->cast < q->cast ? -1 : p->cast > q->cast;
}

/* The takers on `device` of the cell, into the list under construction. */
static int cast_takers(struct encoder *x, const struct set *s, uint32_t device)
{
    int r = 0;
    for (uint32_t i = s->first; i < s->first + s->n && r == 0; i++)
        if (x->p->ends.at[i].device == device)
            r = list_add_end(x, i);
    return r;
}

static int cast_item(struct encoder *x, const struct cast_record *k, const struct plan_cast *c,
                     const struct plan_class *class, uint32_t cell, uint32_t from, uint32_t to)
{
    const struct plan *p = x->p;
    struct program_item item = {.from = PROGRAM_NONE, .places = PROGRAM_NONE};
    uint32_t end, giver = cast_giver(p, c, cell, &end), place;
    int r = cell_index(x, c->unit, cell, &item.cell);
    if (r != 0)
        return r;
    if (k->send && (k->hop == 0 || (k->hop == 1 && giver == NONE32))) {
        r = end_place(x, end, PROGRAM_SOURCE, &item.from);
    } else if (k->send) {
        r = place_index(x, PROGRAM_SCRATCH, from, 0, 0, &item.from);
    } else {
        x->list.n = 0;
        r = place_index(x, PROGRAM_SCRATCH, to, 0, 0, &place);
        if (r == 0)
            r = list_add(x, place);
        if (r == 0)
            r = cast_takers(x, &p->sets.at[p->groups.at[class->first_group + cell].takers], to);
        if (r == 0)
            r = list_index(x, &item.places);
    }
    return r == 0 ? add_item(x, item) : r;
}

static int encode_cast_leg(struct encoder *x, const struct cast_record *k, uint32_t stream)
{
    const struct plan *p = x->p;
    const struct plan_cast *c = &p->casts.at[k->cast];
    const struct plan_class *class = &p->classes.at[p->shapes.at[p->units.at[c->unit].shape].class];
    struct chain chain = chain_of(p, c->gather);
    struct cast_leg l = k->hop == 0 ? cast_gather(p, c, k->giver) : cast_hop(p, c, &chain, k->hop);
    uint32_t from = k->hop == 0 ? k->giver : chain_device(p, &chain, k->hop - 1);
    uint32_t to = k->hop == 0 ? c->gather : chain_device(p, &chain, k->hop);
    int r = 0;
    for (uint32_t cell = 0; cell < class->n_cells && r == 0; cell++) {
        uint32_t end;
        if (k->hop == 0 && cast_giver(p, c, cell, &end) != k->giver)
            continue;
        r = cast_item(x, k, c, class, cell, from, to);
    }
    uint64_t n = cast_messages(p, &l), base = x->v_streams.at[stream].bytes;
    for (uint64_t i = 0; i < n && r == 0; i++) {
        struct program_message m = {.stream = stream};
        cast_message(p, &l, i, &m.begin, &m.end, &m.round);
        m.begin += base;
        m.end += base;
        r = add_message(x, m, k->order);
    }
    x->v_streams.at[stream].bytes += l.bytes;
    return r;
}

/* What the gather device's own takers need and it holds itself. */
static int cast_copies(struct encoder *x, const struct plan_cast *c)
{
    const struct plan *p = x->p;
    const struct plan_class *class = &p->classes.at[p->shapes.at[p->units.at[c->unit].shape].class];
    int r = 0;
    for (uint32_t cell = 0; cell < class->n_cells && r == 0; cell++) {
        struct routed_copy copy = {.device = x->local[c->gather]};
        uint32_t end;
        if (cast_giver(p, c, cell, &end) != NONE32)
            continue;
        x->list.n = 0;
        r = cast_takers(x, &p->sets.at[p->groups.at[class->first_group + cell].takers], c->gather);
        if (r != 0 || x->list.n == 0)
            continue;
        r = end_place(x, end, PROGRAM_SOURCE, &copy.item.from);
        if (r == 0)
            r = list_index(x, &copy.item.places);
        if (r == 0)
            r = cell_index(x, c->unit, cell, &copy.item.cell);
        if (r == 0)
            r = vec_reserve(&x->v_copies, x->v_copies.n + 1);
        if (r == 0)
            x->v_copies.at[x->v_copies.n++] = copy;
    }
    return r;
}

static int cast_holds(struct encoder *x, const struct plan_cast *c)
{
    const struct plan_class *class =
        &x->p->classes.at[x->p->shapes.at[x->p->units.at[c->unit].shape].class];
    int r = 0;
    for (uint32_t cell = 0; cell < class->n_cells && r == 0; cell++) {
        const struct plan_group *g = &x->p->groups.at[class->first_group + cell];
        uint32_t index;
        if (!x->set_here[g->source] && !x->set_here[g->takers])
            continue;
        r = cell_index(x, c->unit, cell, &index);
        if (r == 0)
            r = add_holds(x, g, index, 1);
    }
    return r;
}

static int encode_casts(struct encoder *x)
{
    const struct plan *p = x->p;
    int r = 0;
    for (uint32_t i = 0; i < p->casts.n && r == 0; i++) {
        r = cast_holds(x, &p->casts.at[i]);
        if (r == 0)
            r = gather_records(x, i);
        if (r == 0)
            r = hop_records(x, i);
        if (r == 0 && x->local[p->casts.at[i].gather] != NONE32)
            r = cast_copies(x, &p->casts.at[i]);
    }
    if (r == 0 && x->v_records.n > 0)
        qsort(x->v_records.at, x->v_records.n, sizeof *x->v_records.at, record_compare);
    for (uint32_t i = 0; i < x->v_records.n && r == 0; i++) {
        const struct cast_record *k = &x->v_records.at[i];
        const struct plan_cast *c = &p->casts.at[k->cast];
        if (i == 0 || k->order != k[-1].order || k->send != k[-1].send) {
            struct chain chain = chain_of(p, c->gather);
            uint32_t from = k->hop == 0 ? k->giver : chain_device(p, &chain, k->hop - 1);
            uint32_t to = k->hop == 0 ? c->gather : chain_device(p, &chain, k->hop);
            bool inside = p->topology->devices[from].domain == p->topology->devices[to].domain;
            r = open_stream(x, from, to, k->order, k->send != 0,
                            inside ? TIER_DOMAIN : TIER_NETWORK);
        }
        uint32_t stream = (uint32_t)x->v_streams.n - 1;
        if (r == 0)
            r = encode_cast_leg(x, k, stream);
        if (r == 0)
            x->v_streams.at[stream].n_items =
                (uint32_t)x->v_items.n - x->v_streams.at[stream].first_item;
    }
    return r;
}

/* --- devices ---------------------------------------------------------------------------------- */

static int message_compare(const void *a, const void *b)
{
    const struct routed_message *p = a, *q = b;
    if (p->device != q->device)
        return p->device < q->device ? -1 : 1;
    if (p->m.round != q->m.round)
        return p->m.round < q->m.round ? -1 : 1;
    if (p->order != q->order)
        return p->order < q->order ? -1 : 1;
    return p->m.begin < q->m.begin ? -1 : p->m.begin > q->m.begin;
}

static int find_devices(struct encoder *x)
{
    const struct plan *p = x->p;
    uint32_t n = p->topology->n_devices;
    x->local = mem_alloc((n + 1U) * sizeof *x->local);
    x->set_here = mem_calloc(p->sets.n + 1, 1);
    x->run_cells = mem_alloc((p->runs.n + 1) * sizeof *x->run_cells);
    x->unit_tensor = mem_alloc((p->units.n + 1) * sizeof *x->unit_tensor);
    if (x->local == NULL || x->set_here == NULL || x->run_cells == NULL || x->unit_tensor == NULL)
        return RS_ENOMEM;
    memset(x->run_cells, 0xFF, p->runs.n * sizeof *x->run_cells);
    memset(x->unit_tensor, 0xFF, p->units.n * sizeof *x->unit_tensor);
    x->box_found = (struct box_found){.shape = NONE32};
    for (uint32_t d = 0; d < n; d++) {
        x->local[d] = NONE32;
        if (p->topology->devices[d].node != x->node)
            continue;
        if (vec_reserve(&x->v_devices, x->v_devices.n + 1) != 0)
            return RS_ENOMEM;
        x->local[d] = (uint32_t)x->v_devices.n;
        x->v_devices.at[x->v_devices.n++] = (struct program_device){.device = d};
    }
    for (uint32_t i = 0; i < p->sets.n; i++)
        for (uint32_t k = 0; k < p->sets.at[i].n && !x->set_here[i]; k++)
            x->set_here[i] = end_here(x, p->sets.at[i].first + k);
    return 0;
}

/* By (place, cell): they were added with ascending cells, so it is enough to part them by place. */
static int sort_holds(struct encoder *x)
{
    size_t n_places = x->v_places.n, n = x->v_holds.n;
    size_t *at = mem_calloc(n_places + 1, sizeof *at);
    struct program_hold *sorted = mem_alloc(n * sizeof *sorted);
    if (at == NULL || sorted == NULL) {
        mem_free(at);
        mem_free(sorted);
        return RS_ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        at[x->v_holds.at[i].place + 1]++;
    for (size_t i = 0; i < n_places; i++)
        at[i + 1] += at[i];
    for (size_t i = 0; i < n; i++)
        sorted[at[x->v_holds.at[i].place]++] = x->v_holds.at[i];
    mem_free(at);
    mem_free(x->v_holds.at);
    x->v_holds.at = sorted;
    x->v_holds.capacity = n;
    return 0;
}

/* Copies behind the streams' items, by device; messages by device in their order; holds sorted. */
static int lay_out(struct encoder *x)
{
    uint32_t at = 0;
    int r = sort_holds(x);
    if (x->v_messages.n > 0)
        qsort(x->v_messages.at, x->v_messages.n, sizeof *x->v_messages.at, message_compare);
    for (uint32_t d = 0; d < x->v_devices.n && r == 0; d++) {
        struct program_device *out = &x->v_devices.at[d];
        out->first_copy = (uint32_t)x->v_items.n;
        for (size_t i = 0; i < x->v_copies.n && r == 0; i++)
            if (x->v_copies.at[i].device == d)
                r = add_item(x, x->v_copies.at[i].item);
        out->n_copies = (uint32_t)x->v_items.n - out->first_copy;
        out->first_message = at;
        while (at < x->v_messages.n && x->v_messages.at[at].device == d)
            at++;
        out->n_messages = at - out->first_message;
    }
    return r;
}

static void pad(struct buf *out, size_t begin)
{
    while ((out->n_bytes - begin) % 8 != 0 && buf_error(out) == 0)
        buf_put_u8(out, 0);
}

static void put_array(struct buf *out, size_t begin, const void *at, size_t n_bytes)
{
    pad(out, begin);
    if (n_bytes > 0)
        buf_put(out, at, n_bytes);
}

static int write_out(const struct encoder *x, struct buf *out)
{
    struct program_header h;
    size_t begin = out->n_bytes;
    memset(&h, 0, sizeof h);
    h.magic = PROGRAM_MAGIC;
    memcpy(h.digest, x->p->totals.digest, sizeof h.digest);
    h.chunk_bytes = x->p->options.chunk_bytes;
    h.scratch_bytes = x->p->scratch_bytes;
    h.ring_slots = x->p->options.ring_slots;
    h.n_plan_devices = x->p->topology->n_devices;
#define X(name, type, count) h.count = (uint32_t)x->v_##name.n;
    PROGRAM_ARRAYS(X)
#undef X
    buf_put(out, &h, sizeof h);
    put_array(out, begin, x->v_tensors.at, x->v_tensors.n * sizeof *x->v_tensors.at);
    put_array(out, begin, x->v_boxes.at, x->v_boxes.n * sizeof *x->v_boxes.at);
    put_array(out, begin, x->v_cells.at, x->v_cells.n * sizeof *x->v_cells.at);
    put_array(out, begin, x->v_places.at, x->v_places.n * sizeof *x->v_places.at);
    put_array(out, begin, x->v_lists.at, x->v_lists.n * sizeof *x->v_lists.at);
    put_array(out, begin, x->v_items.at, x->v_items.n * sizeof *x->v_items.at);
    put_array(out, begin, x->v_streams.at, x->v_streams.n * sizeof *x->v_streams.at);
    pad(out, begin);
    for (size_t i = 0; i < x->v_messages.n; i++)
        buf_put(out, &x->v_messages.at[i].m, sizeof(struct program_message));
    put_array(out, begin, x->v_devices.at, x->v_devices.n * sizeof *x->v_devices.at);
    put_array(out, begin, x->v_holds.at, x->v_holds.n * sizeof *x->v_holds.at);
    return buf_error(out);
}

static void encoder_close(struct encoder *x)
{
    map_close(&x->cells);
    map_close(&x->boxes);
    map_close(&x->places);
    map_close(&x->lists);
    mem_free(x->local);
    mem_free(x->set_here);
    mem_free(x->run_cells);
    mem_free(x->unit_tensor);
    mem_free(x->v_tensors.at);
    mem_free(x->v_boxes.at);
    mem_free(x->v_cells.at);
    mem_free(x->v_places.at);
    mem_free(x->v_lists.at);
    mem_free(x->v_items.at);
    mem_free(x->v_streams.at);
    mem_free(x->v_messages.at);
    mem_free(x->v_copies.at);
    mem_free(x->v_holds.at);
    mem_free(x->v_devices.at);
    mem_free(x->list.at);
    mem_free(x->hold_places.at);
    mem_free(x->v_records.at);
}

int plan_program(const struct plan *p, uint32_t node, struct buf *out, struct err *e)
{
    struct encoder x = {.p = p, .node = node};
    if (node >= p->topology->n_nodes)
        return err_set(e, RS_EINVAL, "node %u of %u", node, p->topology->n_nodes);
    int r = find_devices(&x);
    if (r == 0)
        r = encode_runs(&x);
    if (r == 0)
        r = encode_streams(&x);
    if (r == 0)
        r = encode_casts(&x);
    if (r == 0)
        r = lay_out(&x);
    if (r == 0)
        r = write_out(&x, out);
    encoder_close(&x);
    if (r != 0)
        return err_set(
            e, r, r == RS_ENOMEM ? "out of memory" : "the node's part has more than 2^32 entries");
    return 0;
}
