/* What moves in a simulation, in the order of the programs: the messages of legs by (round, stream), each with the
 * copies that follow it; then gather-broadcasts. plan_links.c knows how long it takes. */
#include "plan/plan_simulate.h"

#include <inttypes.h>
#include <math.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_links.h"
#include "plan/plan_private.h"

#include "base/banned.h"

enum { MOST_STEPS = 1 << 21 };

/* A stream's place in its legs. */
struct place {
    uint32_t leg;
    uint32_t
        round; /* of its next message; later where that has to wait for a step of another stream */
    uint32_t edge; /* of the leg: the first that is not behind */
    uint64_t at;   /* message of the leg */
};

struct simulation {
    const struct plan *p;
    struct links links;
    uint64_t together;    /* messages of a leg per step */
    uint32_t *done_first; /* per leg: into links.landed; NONE32: feeds nobody */
    uint32_t *n_done;     /* per leg that feeds: its steps so far */
    struct place *places; /* per stream */
    uint32_t *heap;       /* streams by (round, stream) */
    uint32_t n_heap;
    uint64_t device_bytes;
};

static double later(double a, double b)
{
    return a > b ? a : b;
}

static uint64_t clip(uint64_t v, uint64_t most)
{
    return v < most ? v : most;
}

/* --- the order -------------------------------------------------------------------------------- */

static bool before(const struct simulation *s, uint32_t a, uint32_t b)
{
    uint32_t x = s->places[a].round, y = s->places[b].round;
    return x != y ? x < y : a < b;
}

static void sift_down(struct simulation *s, uint32_t at)
{
    uint32_t stream = s->heap[at];
    for (;;) {
        uint32_t c = 2 * at + 1;
        if (c >= s->n_heap)
            break;
        if (c + 1 < s->n_heap && before(s, s->heap[c + 1], s->heap[c]))
            c++;
        if (!before(s, s->heap[c], stream))
            break;
        s->heap[at] = s->heap[c];
        at = c;
    }
    s->heap[at] = stream;
}

static uint32_t next_round(const struct simulation *s, uint32_t stream)
{
    const struct plan *p = s->p;
    const struct place *x = &s->places[stream];
    const struct plan_leg *l = &p->legs.at[x->leg];
    uint64_t at = plan_time(p, p->streams.at[stream].tier, x->at * p->message_step);
    return (uint32_t)plan_round(p, p->streams.at[stream].tier, l->start + at);
}

/* --- a step ----------------------------------------------------------------------------------- */

/* The edge of a leg that its bytes [begin, end) belong to, in part. */
struct part {
    const struct plan_edge *edge;
    uint64_t begin, end; /* in the edge */
};

static bool part_of(const struct plan *p, const struct plan_leg *l, uint32_t i, uint64_t begin,
                    uint64_t end, struct part *ret)
{
    if (i >= l->n_edges)
        return false;
    const struct plan_edge *e = &p->edges.at[p->leg_edges.at[l->first_edge + i]];
    if (e->offset >= end)
        return false;
    *ret = (struct part){.edge = e,
                         .begin = begin > e->offset ? begin - e->offset : 0,
                         .end = clip(end - e->offset, plan_edge_bytes(p, e))};
    return true;
}

/* A step that brings bytes to their sender: of which leg, and which of its. */
struct feed {
    uint32_t leg, step;
};

/* The step that brings the last byte that the part has of a batch; false where it has none, or from a holder. */
static bool feed_of(const struct simulation *s, const struct part *part, uint32_t batch,
                    struct feed *ret)
{
    const struct plan *p = s->p;
    const struct plan_edge *e = part->edge;
    uint32_t parent_edge = plan_edge_parent(p, e, batch);
    if (parent_edge == NONE32)
        return false;
    const struct plan_edge *parent = &p->edges.at[parent_edge];
    uint64_t begin = plan_batch_offset(p, e, parent->first_batch);
    uint64_t end = begin + plan_edge_bytes(p, parent);
    if (begin >= part->end || end <= part->begin)
        return false;
    const struct plan_leg *from = &p->legs.at[parent->leg];
    uint64_t last = parent->offset + clip(part->end, end) - begin - 1;
    uint64_t message = from->bytes <= p->message_bytes ? 0 : last / p->message_step;
    ret->leg = parent->leg;
    ret->step = (uint32_t)(clip(message, leg_messages(p, from) - 1) / s->together);
    return true;
}

/* The round from which on the bytes can be at their sender, where they aren't yet: then a step that brings them is
 * still to come, or its group has not ended (only where messages go together, else the plan's rounds see to it). */
static uint32_t waits_until(const struct simulation *s, const struct place *x, uint64_t begin,
                            uint64_t end)
{
    const struct plan *p = s->p;
    const struct plan_leg *l = &p->legs.at[x->leg];
    const struct link_lane *lane = &s->links.lanes[p->streams.at[l->stream].from];
    uint32_t until = x->round;
    struct part part;
    struct feed f;
    for (uint32_t i = x->edge; part_of(p, l, i, begin, end, &part); i++)
        for (uint32_t k = 0; k < plan_edge_parents(p, part.edge); k++) {
            if (!feed_of(s, &part, part.edge->first_batch + k, &f))
                continue;
            uint32_t other = s->places[p->legs.at[f.leg].stream].round;
            if (f.step >= s->n_done[f.leg])
                until = other >= until ? other + 1 : until;
            else if (s->links.landed[s->done_first[f.leg] + f.step] < 0 && lane->round >= until)
                until = lane->round + 1;
        }
    return until;
}

static double bytes_there(const struct simulation *s, const struct place *x, uint64_t begin,
                          uint64_t end)
{
    const struct plan *p = s->p;
    double ready = 0;
    struct part part;
    struct feed f;
    for (uint32_t i = x->edge; part_of(p, &p->legs.at[x->leg], i, begin, end, &part); i++)
        for (uint32_t k = 0; k < plan_edge_parents(p, part.edge); k++)
            if (feed_of(s, &part, part.edge->first_batch + k, &f))
                ready = later(ready, s->links.landed[s->done_first[f.leg] + f.step]);
    return ready;
}

/* The receiving device writes the takers of its site. */
static void hand_on(struct simulation *s, const struct plan_edge *e, uint64_t bytes, double ready)
{
    const struct plan *p = s->p;
    if (e->taker != NONE32)
        return;
    const struct set *takers = &p->sets.at[p->batches.at[e->first_batch].takers];
    bool own = !e->staging; /* one of those on the device itself is the message's own target */
    uint32_t first,
        n = set_site(p, takers, p->topology->devices[e->to].domain, p->device_site[e->to], &first);
    for (uint32_t i = first; i < first + n; i++) {
        uint32_t device = p->ends.at[i].device;
        if (device != e->to)
            (void)plan_links_copy(&s->links, e->to, device, bytes, ready);
        else if (own)
            own = false;
        else
            s->device_bytes += bytes;
    }
}

static void hand_on_parts(struct simulation *s, struct place *x, uint64_t begin, uint64_t end,
                          double ready)
{
    const struct plan *p = s->p;
    const struct plan_leg *l = &p->legs.at[x->leg];
    struct part part;
    while (part_of(p, l, x->edge, begin, end, &part)) {
        hand_on(s, part.edge, part.end - part.begin, ready);
        if (part.end < plan_edge_bytes(p, part.edge))
            return;
        x->edge++;
    }
}

/* The stream's next messages. False where they have to wait for another stream's: then *x is later in the order. */
static bool step(struct simulation *s, uint32_t stream)
{
    const struct plan *p = s->p;
    const struct plan_stream *st = &p->streams.at[stream];
    struct place *x = &s->places[stream];
    const struct plan_leg *l = &p->legs.at[x->leg];
    uint64_t n = leg_messages(p, l), last = clip(x->at + s->together, n);
    uint64_t begin = x->at * p->message_step, end = last == n ? l->bytes : last * p->message_step;
    struct link_message m = {.from = st->from,
                             .to = st->to,
                             .tier = (enum plan_tier)st->tier,
                             .round = x->round,
                             .bytes = end - begin,
                             .messages = last - x->at,
                             .lands = NONE32};
    uint32_t until = waits_until(s, x, begin, end);
    if (until > x->round) {
        x->round = until;
        return false;
    }
    if (s->done_first[x->leg] != NONE32)
        m.lands = s->done_first[x->leg] + s->n_done[x->leg]++;
    double open = plan_links_open(&s->links, &m);
    double ready = bytes_there(s, x, begin, end); /* known once what brought them has ended */
    hand_on_parts(s, x, begin, end, plan_links_send(&s->links, &m, later(open, ready)));
    x->at = last;
    return true;
}

static void run_legs(struct simulation *s)
{
    while (s->n_heap > 0) {
        uint32_t stream = s->heap[0];
        struct place *x = &s->places[stream];
        const struct plan_leg *l = &s->p->legs.at[x->leg];
        if (step(s, stream)) {
            if (x->at == leg_messages(s->p, l)) {
                x->leg = l->next;
                x->at = x->edge = 0;
            }
            if (x->leg == NONE32)
                s->heap[0] = s->heap[--s->n_heap];
            else if (next_round(s, stream) > x->round)
                x->round = next_round(s, stream);
        }
        if (s->n_heap > 0)
            sift_down(s, 0);
    }
    plan_links_finish(&s->links);
}

/* --- what the holders of a site give ---------------------------------------------------------- */

static bool share_site(const struct plan *p, const struct set *a, const struct set *b)
{
    uint32_t i = 0, k = 0;
    while (i < a->n && k < b->n) {
        const struct end *x = &p->ends.at[a->first + i], *y = &p->ends.at[b->first + k];
        if (x->site == y->site)
            return true;
        if (x->domain < y->domain || (x->domain == y->domain && x->site < y->site))
            i++;
        else
            k++;
    }
    return false;
}

static int copy_run(struct simulation *s, uint32_t run, struct hops *h)
{
    int r = plan_run_hops(s->p, run, h);
    uint64_t bytes = s->p->runs.at[run].bytes;
    for (uint32_t i = 0; i < h->v.n && r == 0; i++) {
        const struct hop *x = &h->v.at[i];
        if (x->edge != NONE32 || x->after != NONE32)
            continue;
        if (x->tier == TIER_DEVICE)
            s->device_bytes += bytes;
        else
            (void)plan_links_copy(&s->links, x->from_device, x->to_device, bytes, 0);
    }
    return r;
}

static int copies(struct simulation *s)
{
    const struct plan *p = s->p;
    struct hops h = {0};
    int r = 0;
    for (uint32_t i = 0; i < p->groups.n && r == 0; i++) {
        const struct plan_group *g = &p->groups.at[i];
        if (g->n_runs == 0 || !share_site(p, &p->sets.at[g->source], &p->sets.at[g->takers]))
            continue;
        for (uint32_t k = g->first_run; k < g->first_run + g->n_runs && r == 0; k++)
            r = copy_run(s, k, &h);
    }
    hops_close(&h);
    return r;
}

/* --- gather-broadcast ------------------------------------------------------------------------- */

static enum plan_tier tier_between(const struct plan *p, uint32_t a, uint32_t b)
{
    return p->topology->devices[a].domain == p->topology->devices[b].domain ? TIER_DOMAIN
                                                                            : TIER_NETWORK;
}

static uint64_t messages_of(const struct plan *p, uint64_t bytes)
{
    return bytes <= p->message_bytes ? 1 : (bytes - 1) / p->message_step + 1;
}

static const struct plan_class *cast_class(const struct plan *p, const struct plan_cast *c)
{
    return &p->classes.at[p->shapes.at[p->units.at[c->unit].shape].class];
}

static void count_takers(struct simulation *s, const struct plan_cast *c, uint32_t cell,
                         uint64_t bytes)
{
    const struct plan *p = s->p;
    const struct set *takers =
        &p->sets.at[p->groups.at[cast_class(p, c)->first_group + cell].takers];
    for (uint32_t i = 0; i < takers->n; i++) {
        uint32_t d = p->ends.at[takers->first + i].device;
        if (d == c->gather || (i > 0 && p->ends.at[takers->first + i - 1].device == d))
            s->device_bytes += bytes; /* others are on the chain */
    }
}

static double gather_part(struct simulation *s, const struct plan_cast *c, uint32_t giver,
                          uint64_t bytes, double ready)
{
    if (bytes == 0)
        return ready;
    double first;
    struct link_message m = {.from = giver,
                             .to = c->gather,
                             .tier = tier_between(s->p, giver, c->gather),
                             .bytes = bytes,
                             .messages = messages_of(s->p, bytes)};
    return plan_links_stream(&s->links, &m, ready, bytes, &first);
}

/* Cells of one giver that stand together go as one. Returns when all of the tensor is at the gather device. */
static double gather(struct simulation *s, const struct plan_cast *c, double ready)
{
    const struct plan *p = s->p;
    const struct plan_shape *shape = &p->shapes.at[p->units.at[c->unit].shape];
    uint32_t n_cells = cast_class(p, c)->n_cells, giver = NONE32, end;
    uint64_t bytes = 0;
    double there = ready;
    for (uint32_t cell = 0; cell < n_cells; cell++) {
        uint32_t from = cast_giver(p, c, cell, &end);
        uint64_t size = plan_cell_bytes(p, shape, cell);
        count_takers(s, c, cell, size);
        if (from == NONE32)
            continue;
        if (from != giver) {
            there = later(there, gather_part(s, c, giver, bytes, ready));
            giver = from;
            bytes = 0;
        }
        bytes += size;
    }
    return later(there, gather_part(s, c, giver, bytes, ready));
}

/* Down the chain, message by message: a hop begins when the first message is at its sender, and ends one message
 * after the hop before. */
static double broadcast(struct simulation *s, const struct plan_cast *c, double ready)
{
    const struct plan *p = s->p;
    struct chain chain = chain_of(p, c->gather);
    struct link_message m = {
        .from = c->gather, .bytes = c->bytes, .messages = messages_of(p, c->bytes)};
    uint64_t chunk = clip(p->message_bytes, c->bytes);
    double end = ready, first = ready;
    for (uint32_t h = 1; h <= chain.n_hops; h++) {
        m.to = chain_device(p, &chain, h);
        m.tier = tier_between(p, m.from, m.to);
        double message_s =
            s->links.model->chunk_latency_s + (double)chunk * s->links.byte_s[m.tier];
        /* So late that its last message comes after the hop before has ended. */
        double took = (double)m.messages * s->links.model->chunk_latency_s +
                      (double)m.bytes * s->links.byte_s[m.tier];
        double start = h == 1 ? ready : later(first, end + message_s - took);
        end = plan_links_stream(&s->links, &m, start, chunk, &first);
        m.from = m.to;
    }
    return end;
}

/* One after another; a tensor is gathered while the one before goes down the chain, in the other half of the scratch. */
static void run_casts(struct simulation *s)
{
    const struct plan *p = s->p;
    double begin = s->links.s->makespan_s, free[2] = {begin, begin};
    for (uint32_t i = 0; i < p->casts.n; i++) {
        double there = gather(s, &p->casts.at[i], free[i % 2]);
        free[i % 2] = broadcast(s, &p->casts.at[i], there);
    }
}

/* --- set-up ----------------------------------------------------------------------------------- */

static int count_steps(struct simulation *s)
{
    const struct plan *p = s->p;
    uint64_t messages = 0, steps = 0;
    for (uint32_t i = 0; i < p->legs.n; i++)
        messages += leg_messages(p, &p->legs.at[i]);
    s->together = messages / MOST_STEPS + 1;
    for (uint32_t i = 0; i < p->legs.n; i++)
        s->done_first[i] = NONE32;
    for (uint32_t i = 0; i < p->edges.n; i++)
        for (uint32_t k = 0; k < plan_edge_parents(p, &p->edges.at[i]); k++)
            s->done_first[p->edges.at[p->edges.at[i].parent + k].leg] = 0;
    for (uint32_t i = 0; i < p->legs.n; i++) {
        if (s->done_first[i] == NONE32)
            continue;
        s->done_first[i] = (uint32_t)steps;
        steps += (leg_messages(p, &p->legs.at[i]) - 1) / s->together + 1;
    }
    s->links.landed = mem_alloc((steps + 1) * sizeof *s->links.landed);
    if (s->links.landed == NULL)
        return RS_ENOMEM;
    for (uint64_t i = 0; i < steps; i++)
        s->links.landed[i] = -1; /* not yet */
    return 0;
}

static int simulation_init(struct simulation *s)
{
    const struct plan *p = s->p;
    size_t n_legs = p->legs.n + 1, n = p->streams.n + 1;
    s->done_first = mem_calloc(n_legs, sizeof *s->done_first);
    s->n_done = mem_calloc(n_legs, sizeof *s->n_done);
    s->places = mem_calloc(n, sizeof *s->places);
    s->heap = mem_calloc(n, sizeof *s->heap);
    if (s->done_first == NULL || s->n_done == NULL || s->places == NULL || s->heap == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < p->streams.n; i++) {
        s->places[i].leg = p->streams.at[i].first_leg;
        s->places[i].round = next_round(s, i);
        s->heap[s->n_heap++] = i;
    }
    for (uint32_t i = s->n_heap; i-- > 0;)
        sift_down(s, i);
    return count_steps(s);
}

static void simulation_close(struct simulation *s)
{
    plan_links_close(&s->links);
    mem_free(s->done_first);
    mem_free(s->n_done);
    mem_free(s->places);
    mem_free(s->heap);
}

/* --- the result ------------------------------------------------------------------------------- */

static void sum_up(struct plan_simulation *s)
{
    for (uint32_t i = 0; i < 4 * s->n_devices; i++) {
        const struct plan_port *x = &s->ports[i];
        struct plan_tier_line *t = &s->tiers[plan_port_tier(i)];
        t->n_ports += x->bytes > 0;
        t->busy_s += x->busy_s;
        if (x->last_s > s->ports[s->critical_port].last_s)
            s->critical_port = i;
    }
}

/* What moved is what the plan says, byte for byte. */
static int conserved(const struct simulation *x, struct err *e)
{
    const struct plan *p = x->p;
    const struct plan_totals *t = &p->totals;
    const struct plan_simulation *s = x->links.s;
    if (s->tiers[TIER_NETWORK].bytes != t->network_bytes ||
        s->tiers[TIER_DOMAIN].bytes != t->domain_bytes || x->device_bytes != t->device_bytes)
        return err_set(e, RS_EINTERNAL,
                       "the simulation moved %" PRIu64 " bytes over the network, %" PRIu64
                       " inside domains and %" PRIu64 " inside devices; the plan has %" PRIu64
                       ", %" PRIu64 " and %" PRIu64,
                       s->tiers[TIER_NETWORK].bytes, s->tiers[TIER_DOMAIN].bytes, x->device_bytes,
                       t->network_bytes, t->domain_bytes, t->device_bytes);
    for (uint32_t d = 0; d < s->n_devices; d++)
        for (int out = 0; out < 2; out++) {
            uint64_t plan = out ? p->egress[d] : p->ingress[d];
            uint64_t moved = s->ports[plan_port_of(d, TIER_NETWORK, out)].bytes;
            if (moved != plan)
                return err_set(e, RS_EINTERNAL,
                               "the simulation moved %" PRIu64 " bytes %s device %u; the plan has "
                               "%" PRIu64,
                               moved, out ? "out of" : "into", d, plan);
        }
    return 0;
}

static int check_model(const struct plan_model *m, struct err *e)
{
    if (!isfinite(m->network_bytes_per_s) || !isfinite(m->domain_bytes_per_s) ||
        !(m->network_bytes_per_s > 0) || !(m->domain_bytes_per_s > 0))
        return err_set(e, RS_EINVAL,
                       "the topology names no rates: give network_gbytes_per_s and "
                       "domain_gbytes_per_s");
    if (!isfinite(m->chunk_latency_s) || m->chunk_latency_s < 0)
        return err_set(e, RS_EINVAL, "the latency of a chunk is no time");
    if (m->peers == 0 || m->peers > MODEL_MOST_PEERS)
        return err_set(e, RS_EINVAL, "%u peers; use 1 … %d", m->peers, MODEL_MOST_PEERS);
    return 0;
}

static int run(struct simulation *s)
{
    int r = simulation_init(s);
    if (r == 0)
        r = copies(s);
    if (r != 0)
        return r;
    run_legs(s);
    for (uint32_t i = 0; i < 4 * s->links.s->n_devices; i++)
        s->links.s->makespan_s = later(s->links.s->makespan_s, s->links.s->ports[i].last_s);
    run_casts(s);
    return 0;
}

struct plan_model plan_model_of(const struct topology *t)
{
    return (struct plan_model){.network_bytes_per_s = t->network_bytes_per_s,
                               .domain_bytes_per_s = t->domain_bytes_per_s,
                               .peers = 1};
}

int plan_simulate(const struct plan *p, const struct plan_model *m, struct plan_simulation *ret,
                  struct err *e)
{
    int r = check_model(m, e);
    if (r != 0)
        return r;
    struct plan_simulation out = {.n_devices = p->topology->n_devices};
    struct simulation s = {.p = p};
    out.bound_s = (double)p->totals.lower_bound /
                  (p->totals.network_bytes > 0 ? m->network_bytes_per_s : m->domain_bytes_per_s);
    out.bucket_s = out.bound_s > 0 ? out.bound_s / (SIMULATION_BUCKETS / 2.0) : 1e-9;
    out.ports = mem_calloc(4 * (size_t)out.n_devices + 1, sizeof *out.ports);
    r = out.ports == NULL ? RS_ENOMEM : plan_links_init(&s.links, p, m, &out);
    if (r == 0)
        r = run(&s);
    if (r != 0) {
        err_set(e, r, "out of memory");
    } else {
        sum_up(&out);
        out.makespan_s = out.ports[out.critical_port].last_s;
        out.tiers[TIER_DEVICE].bytes = s.device_bytes;
        out.messages_a_step = s.together;
        r = conserved(&s, e);
    }
    simulation_close(&s);
    if (r != 0)
        plan_simulation_close(&out);
    else
        *ret = out;
    return r;
}

void plan_simulation_close(struct plan_simulation *s)
{
    mem_free(s->ports);
    s->ports = NULL;
}

double plan_predict_s(const struct plan *p, const struct topology *t)
{
    struct plan_model m = plan_model_of(t);
    struct plan_simulation s = {0};
    double result = plan_simulate(p, &m, &s, NULL) == 0 ? s.makespan_s : 0;
    plan_simulation_close(&s);
    return result;
}
