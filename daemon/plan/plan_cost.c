/* Predicted time of a plan: its messages, in their order, through a model of the links.
 *
 * Each device has one link in and one out per tier. A message starts when both of its links are free and its bytes
 * are there, and takes bytes / rate. Links serve messages in the total order (round, stream), which is what
 * devices do; so idle time that the plan's order causes shows. Where a plan has very many messages, neighbours of
 * a leg are taken together. Floating point: this is for people, nothing is decided by it. */
#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"

#include "base/banned.h"

enum { MOST_STEPS = 1 << 21 };

struct simulation {
    const struct plan *p;
    double byte_s[3];     /* by tier */
    uint64_t together;    /* messages of a leg per step */
    double *in, *out;     /* per port: free from then on */
    double *done;         /* steps of legs that feed others */
    uint32_t *done_first; /* per leg; NONE32: feeds nobody */
    uint32_t *leg;        /* per stream: the leg it is at */
    uint64_t *at;         /* per stream: message of that leg */
    uint32_t *heap;       /* streams by (round, stream) of their next step */
    uint32_t *round;      /* per stream */
    uint32_t n_heap;
    double end;
};

static uint32_t port_of(uint32_t device, uint8_t tier)
{
    return 2 * device + (tier == TIER_NETWORK);
}

static bool before(const struct simulation *s, uint32_t a, uint32_t b)
{
    return s->round[a] != s->round[b] ? s->round[a] < s->round[b] : a < b;
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

static uint64_t clip(uint64_t v, uint64_t most)
{
    return v < most ? v : most;
}

/* When the bytes [begin, end) of the leg are at its sender. */
static double bytes_there(const struct simulation *s, const struct plan_leg *l, uint64_t begin,
                          uint64_t end)
{
    const struct plan *p = s->p;
    double there = 0;
    if (p->edges.at[p->leg_edges.at[l->first_edge]].parent == NONE32)
        return 0;
    for (uint32_t i = 0; i < l->n_edges; i++) {
        const struct plan_edge *e = &p->edges.at[p->leg_edges.at[l->first_edge + i]];
        uint64_t bytes = p->runs.at[e->run].bytes;
        if (e->offset >= end || e->offset + bytes <= begin)
            continue;
        const struct plan_edge *parent = &p->edges.at[e->parent];
        const struct plan_leg *from = &p->legs.at[parent->leg];
        uint64_t last = parent->offset + clip(end - e->offset, bytes) - 1;
        uint64_t message = from->bytes <= p->message_bytes ? 0 : last / p->message_step;
        double t = s->done[s->done_first[parent->leg] + message / s->together];
        there = t > there ? t : there;
    }
    return there;
}

static double later(double a, double b)
{
    return a > b ? a : b;
}

/* The stream's next messages; false where it has no further ones. */
static bool step(struct simulation *s, uint32_t stream)
{
    const struct plan *p = s->p;
    const struct plan_stream *st = &p->streams.at[stream];
    const struct plan_leg *l = &p->legs.at[s->leg[stream]];
    uint64_t n = leg_messages(p, l), first = s->at[stream];
    uint64_t last = clip(first + s->together, n);
    uint64_t begin = first * p->message_step;
    uint64_t end = last == n ? l->bytes : last * p->message_step;
    uint32_t out = port_of(st->from, st->tier), in = port_of(st->to, st->tier);
    double t = later(later(s->out[out], s->in[in]), bytes_there(s, l, begin, end));
    t += (double)(end - begin) * s->byte_s[st->tier];
    s->out[out] = s->in[in] = t;
    s->end = later(s->end, t);
    if (s->done_first[s->leg[stream]] != NONE32)
        s->done[s->done_first[s->leg[stream]] + first / s->together] = t;
    s->at[stream] = last;
    if (last == n) {
        s->leg[stream] = l->next;
        s->at[stream] = 0;
    }
    return s->leg[stream] != NONE32;
}

static uint32_t next_round(const struct simulation *s, uint32_t stream)
{
    const struct plan *p = s->p;
    const struct plan_leg *l = &p->legs.at[s->leg[stream]];
    uint64_t at = plan_time(p, p->streams.at[stream].tier, s->at[stream] * p->message_step);
    return (uint32_t)((l->start + at) / p->message_bytes);
}

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
        if (p->edges.at[i].parent != NONE32)
            s->done_first[p->edges.at[p->edges.at[i].parent].leg] = 0;
    for (uint32_t i = 0; i < p->legs.n; i++) {
        if (s->done_first[i] == NONE32)
            continue;
        s->done_first[i] = (uint32_t)steps;
        steps += (leg_messages(p, &p->legs.at[i]) - 1) / s->together + 1;
    }
    s->done = mem_calloc(steps + 1, sizeof *s->done);
    return s->done == NULL ? RS_ENOMEM : 0;
}

static int simulation_init(struct simulation *s)
{
    const struct plan *p = s->p;
    size_t n_ports = 2 * (size_t)p->topology->n_devices + 2, n = p->streams.n + 1;
    s->in = mem_calloc(n_ports, sizeof *s->in);
    s->out = mem_calloc(n_ports, sizeof *s->out);
    s->done_first = mem_calloc(p->legs.n + 1, sizeof *s->done_first);
    s->leg = mem_calloc(n, sizeof *s->leg);
    s->at = mem_calloc(n, sizeof *s->at);
    s->heap = mem_calloc(n, sizeof *s->heap);
    s->round = mem_calloc(n, sizeof *s->round);
    if (s->in == NULL || s->out == NULL || s->done_first == NULL || s->leg == NULL ||
        s->at == NULL || s->heap == NULL || s->round == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < p->streams.n; i++) {
        s->leg[i] = p->streams.at[i].first_leg;
        s->heap[s->n_heap++] = i;
        s->round[i] = next_round(s, i);
    }
    for (uint32_t i = s->n_heap; i-- > 0;)
        sift_down(s, i);
    return count_steps(s);
}

static void simulation_close(struct simulation *s)
{
    mem_free(s->in);
    mem_free(s->out);
    mem_free(s->done);
    mem_free(s->done_first);
    mem_free(s->leg);
    mem_free(s->at);
    mem_free(s->heap);
    mem_free(s->round);
}

static void simulate(struct simulation *s)
{
    while (s->n_heap > 0) {
        uint32_t stream = s->heap[0];
        if (step(s, stream))
            s->round[stream] = next_round(s, stream);
        else
            s->heap[0] = s->heap[--s->n_heap];
        if (s->n_heap > 0)
            sift_down(s, 0);
    }
}

/* Broadcasts come after the runs, one after another, each at the pace of the slower tier that it uses. */
static double broadcast_s(const struct plan *p, const double byte_s[3])
{
    if (p->casts.n == 0)
        return 0;
    const struct plan_cast *first = &p->casts.at[0], *last = &p->casts.at[p->casts.n - 1];
    struct chain c = chain_of(p, last->gather);
    uint64_t bytes = last->start + last->bytes + c.n_hops * p->message_bytes - first->gather_start;
    return (double)bytes * byte_s[p->totals.network_bytes > 0 ? TIER_NETWORK : TIER_DOMAIN];
}

/* Copies inside a site that no message brings: the busiest device's, at the rate inside domains. */
static double copies_s(const struct plan *p, double byte_s)
{
    if (p->totals.network_bytes > 0)
        return 0;
    return (double)p->totals.busiest_bytes * byte_s;
}

double plan_predict_s(const struct plan *p, const struct topology *t)
{
    struct simulation s = {.p = p};
    if (!(t->network_bytes_per_s > 0) || !(t->domain_bytes_per_s > 0))
        return 0;
    s.byte_s[TIER_NETWORK] = 1 / t->network_bytes_per_s;
    s.byte_s[TIER_DOMAIN] = 1 / t->domain_bytes_per_s;
    double result = 0;
    if (simulation_init(&s) == 0) {
        simulate(&s);
        result = later(s.end, copies_s(p, s.byte_s[TIER_DOMAIN])) + broadcast_s(p, s.byte_s);
    }
    simulation_close(&s);
    return result;
}
