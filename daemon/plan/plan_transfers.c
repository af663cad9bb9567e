/* The stream of transfers: for each tensor, cell and piece the hops of its run, with numbers. */
#include <string.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"

#include "base/banned.h"

struct stream_state {
    const struct plan *p;
    int (*fn)(const struct plan_transfer *t, void *arg);
    void *arg;
    struct hops hops;
    uint32_t hops_run;
    VEC(uint32_t) rounds; /* of each hop of this cell */
    uint64_t next_id;
};

static struct plan_end end_of(const struct plan *p, uint32_t end, uint32_t device,
                              enum plan_side side)
{
    struct plan_end e = {.device = device, .side = end == NONE32 ? SIDE_STAGING : side};
    if (end != NONE32) {
        e.layout = p->ends.at[end].layout;
        e.rank = p->ends.at[end].rank;
    }
    return e;
}

/* Edges have their message's round; what is copied on inside the site counts as one later. */
static uint32_t hop_round(struct stream_state *s, const struct plan_run *r, const struct hop *h,
                          uint64_t offset)
{
    if (h->edge != NONE32) {
        const struct plan_edge *e = &s->p->edges.at[h->edge];
        offset += e->offset + plan_batch_offset(s->p, e, r->batch) + r->offset;
        return leg_round_of(s->p, &s->p->legs.at[e->leg], offset);
    }
    return h->after == NONE32 ? 0 : s->rounds.at[h->after] + 1;
}

static int emit_cell(struct stream_state *s, uint32_t run, uint32_t unit)
{
    const struct plan *p = s->p;
    const struct plan_run *r = &p->runs.at[run];
    const struct plan_unit *u = &p->units.at[unit];
    const struct plan_shape *shape = &p->shapes.at[u->shape];
    uint32_t cell = p->groups.at[r->group].cell;
    struct plan_transfer t = {.tensor = u->tensor,
                              .value = (enum plan_value)shape->value,
                              .block = {shape->block[0], shape->block[1]},
                              .wire = (enum dtype)shape->wire};
    if (s->hops_run != run && plan_run_hops(p, run, &s->hops) != 0)
        return RS_ENOMEM;
    s->hops_run = run;
    if (vec_reserve(&s->rounds, s->hops.v.n) != 0)
        return RS_ENOMEM;
    plan_piece_box(p, shape, cell, r->piece, &t.box);
    t.bytes = plan_piece_bytes(p, shape, cell, r->piece);
    t.cell = plan_cell_number(p, unit, cell, r->piece);
    t.strategy = (enum plan_strategy)p->classes.at[shape->class].strategy;
    uint64_t first_id = s->next_id, offset = plan_run_offset(p, r, u->member);
    for (uint32_t i = 0; i < s->hops.v.n; i++) {
        const struct hop *h = &s->hops.v.at[i];
        uint64_t after = first_id + h->after;
        t.id = s->next_id++;
        t.tier = (enum plan_tier)h->tier;
        t.from = end_of(p, h->from, h->from_device, h->from_side);
        t.to = end_of(p, h->to, h->to_device, SIDE_DESTINATION);
        t.round = s->rounds.at[i] = hop_round(s, r, h, offset);
        t.n_after = h->after != NONE32;
        t.after = t.n_after ? &after : NULL;
        int result = s->fn(&t, s->arg);
        if (result != 0)
            return result;
    }
    return 0;
}

static int emit_unit(struct stream_state *s, uint32_t unit)
{
    const struct plan *p = s->p;
    const struct plan_unit *u = &p->units.at[unit];
    const struct plan_class *c = &p->classes.at[p->shapes.at[u->shape].class];
    s->next_id = u->first_transfer;
    if (c->strategy == PLAN_GATHER_BROADCAST)
        return plan_broadcast_transfers(p, unit, s->fn, s->arg);
    for (uint32_t cell = 0; cell < c->n_cells; cell++) {
        uint32_t first, n = plan_find_runs(p, c->first_group + cell, u->member, &first);
        for (uint32_t k = 0; k < n; k++) {
            int r = emit_cell(s, first + k, unit);
            if (r != 0)
                return r;
        }
    }
    return 0;
}

/* The first unit of a tensor or of a later one. */
static uint32_t first_unit(const struct plan *p, uint32_t tensor)
{
    uint32_t low = 0, high = (uint32_t)p->units.n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (p->units.at[middle].tensor < tensor)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int plan_transfers(const struct plan *p, int64_t tensor,
                   int (*fn)(const struct plan_transfer *t, void *arg), void *arg)
{
    struct stream_state s = {.p = p, .fn = fn, .arg = arg, .hops_run = NONE32};
    uint32_t begin = 0, end = (uint32_t)p->units.n;
    if (tensor >= 0) {
        begin = first_unit(p, (uint32_t)tensor);
        end = first_unit(p, (uint32_t)tensor + 1);
    }
    int r = 0;
    for (uint32_t u = begin; u < end && r == 0; u++)
        r = emit_unit(&s, u);
    hops_close(&s.hops);
    mem_free(s.rounds.at);
    return r;
}
