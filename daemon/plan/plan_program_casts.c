/* What a program has of casts (plan_broadcast.h): legs of gathers and of the chain as streams, holds, copies. */
#include <stdlib.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_program.h"

#include "base/banned.h"

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
            r = encoder_list_add_end(x, i);
    return r;
}

static int cast_item(struct encoder *x, const struct cast_record *k, const struct plan_cast *c,
                     const struct plan_class *class, uint32_t cell, uint32_t from, uint32_t to)
{
    const struct plan *p = x->p;
    struct program_item item = {.from = PROGRAM_NONE, .places = PROGRAM_NONE};
    uint32_t end, giver = cast_giver(p, c, cell, &end), place;
    int r = encoder_cast_cell(x, c->unit, cell, &item.cell);
    if (r != 0)
        return r;
    if (k->send && (k->hop == 0 || (k->hop == 1 && giver == NONE32))) {
        r = encoder_end_place(x, end, PROGRAM_SOURCE, &item.from);
    } else if (k->send) {
        r = encoder_place(x, PROGRAM_SCRATCH, from, 0, 0, &item.from);
    } else {
        x->list.n = 0;
        r = encoder_place(x, PROGRAM_SCRATCH, to, 0, 0, &place);
        if (r == 0)
            r = encoder_list_add(x, place);
        if (r == 0)
            r = cast_takers(x, &p->sets.at[p->groups.at[class->first_group + cell].takers], to);
        if (r == 0)
            r = encoder_list(x, &item.places);
    }
    return r == 0 ? encoder_items(x, item, 1) : r;
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
        r = encoder_message(x, m, k->order);
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
        struct program_item item;
        uint32_t end;
        if (cast_giver(p, c, cell, &end) != NONE32)
            continue;
        x->list.n = 0;
        r = cast_takers(x, &p->sets.at[p->groups.at[class->first_group + cell].takers], c->gather);
        if (r != 0 || x->list.n == 0)
            continue;
        r = encoder_end_place(x, end, PROGRAM_SOURCE, &item.from);
        if (r == 0)
            r = encoder_list(x, &item.places);
        if (r == 0)
            r = encoder_cast_cell(x, c->unit, cell, &item.cell);
        if (r == 0)
            r = encoder_copies(x, x->local[c->gather], item, 1);
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
        r = encoder_cast_cell(x, c->unit, cell, &index);
        if (r == 0)
            r = encoder_holds(x, g, index, 1);
    }
    return r;
}

int encoder_casts(struct encoder *x)
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
            r = encoder_stream(x, from, to, k->order, k->send != 0,
                               inside ? TIER_DOMAIN : TIER_NETWORK);
        }
        uint32_t stream = (uint32_t)x->v_streams.n - 1;
        if (r == 0)
            r = encode_cast_leg(x, k, stream);
        if (r == 0)
            x->v_streams.at[stream].n_items = x->n_items - x->v_streams.at[stream].first_item;
    }
    return r;
}
