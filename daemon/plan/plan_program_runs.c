/* What a program has of runs: the cells, holds and copies of those that this node has a part in, and the streams of its
 * devices. */
#include "plan/plan_program.h"

#include "base/banned.h"

static int add_copies(struct encoder *x, uint32_t run, uint32_t from_end)
{
    struct program_item item;
    uint32_t device = x->local[x->p->ends.at[from_end].device];
    int r = encoder_end_place(x, from_end, PROGRAM_SOURCE, &item.from);
    if (r == 0)
        r = encoder_list(x, &item.places);
    if (r == 0)
        r = encoder_run_cells(x, run, &item.cell);
    return r == 0 ? encoder_copies(x, device, item, x->p->runs.at[run].count) : r;
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
            r = encoder_list_add_end(x, other->to);
            other->edge = 0; /* taken */
        }
        if (r == 0)
            r = add_copies(x, run, from);
    }
    return r;
}

int encoder_runs(struct encoder *x)
{
    const struct plan *p = x->p;
    struct hops h = {0};
    int r = encoder_run_tensors(x);
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++) {
        const struct plan_run *run = &p->runs.at[i];
        const struct plan_group *g = &p->groups.at[run->group];
        uint32_t first;
        if (!run_here(x, i))
            continue;
        r = encoder_run_cells(x, i, &first);
        if (r == 0)
            r = encoder_holds(x, g, first, run->count);
        if (r == 0 && x->set_here[g->source] && x->set_here[g->takers])
            r = run_copies(x, i, &h);
    }
    hops_close(&h);
    return r;
}

/* --- streams ----------------------------------------------------------------------------------- */

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
    return encoder_end_place(x, end, relayed ? PROGRAM_DESTINATION : PROGRAM_SOURCE, ret);
}

/* Where the receiver of an edge writes. */
static int edge_places(struct encoder *x, const struct plan_edge *e, const struct plan_batch *g,
                       uint32_t *ret)
{
    const struct plan *p = x->p;
    int r = 0;
    x->list.n = 0;
    if (e->taker != NONE32) {
        r = encoder_list_add_end(x, e->taker);
    } else {
        uint32_t first, n = set_site(p, &p->sets.at[g->takers], p->topology->devices[e->to].domain,
                                     p->device_site[e->to], &first);
        for (uint32_t i = first; i < first + n && r == 0; i++)
            r = encoder_list_add_end(x, i);
    }
    return r == 0 ? encoder_list(x, ret) : r;
}

static int run_items(struct encoder *x, uint32_t run, struct program_item item)
{
    int r = encoder_run_cells(x, run, &item.cell);
    return r == 0 ? encoder_items(x, item, x->p->runs.at[run].count) : r;
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

static int encode_stream(struct encoder *x, uint32_t stream, bool send)
{
    const struct plan *p = x->p;
    const struct plan_stream *s = &p->streams.at[stream];
    int r = encoder_stream(x, s->from, s->to, stream, send, s->tier);
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
            r = encoder_message(x, m, stream);
        }
    }
    x->v_streams.at[index].bytes = s->bytes;
    x->v_streams.at[index].n_items = x->n_items - x->v_streams.at[index].first_item;
    return r;
}

int encoder_streams(struct encoder *x)
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
