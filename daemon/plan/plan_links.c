#include "plan/plan_links.h"

#include "base/banned.h"

/* Groups under way at a time (exec/lane.h), and slots that are told apart: more than all of those groups hold in
 * practice would change nothing. */
enum { GROUPS_UNDER_WAY = 4, MOST_SLOTS = 64 };

static double later(double a, double b)
{
    return a > b ? a : b;
}

int plan_links_init(struct links *l, const struct plan *p, const struct plan_model *m,
                    struct plan_simulation *s)
{
    size_t n = p->topology->n_devices, n_ports = 4 * n + 1;
    *l = (struct links){.model = m, .s = s};
    l->byte_s[TIER_NETWORK] = 1 / m->network_bytes_per_s;
    l->byte_s[TIER_DOMAIN] = 1 / m->domain_bytes_per_s;
    l->n_slots = p->options.ring_slots < MOST_SLOTS ? p->options.ring_slots : MOST_SLOTS;
    l->free = mem_calloc(n_ports, sizeof *l->free);
    l->n_peers = mem_calloc(n_ports, sizeof *l->n_peers);
    if (m->peers > 1)
        l->peers = mem_calloc(n_ports, m->peers * sizeof *l->peers);
    l->lanes = mem_calloc(n + 1, sizeof *l->lanes);
    l->slots = mem_calloc(n * l->n_slots + 1, sizeof *l->slots);
    l->ends = mem_calloc(n * GROUPS_UNDER_WAY + 1, sizeof *l->ends);
    if (l->free == NULL || l->n_peers == NULL || (m->peers > 1 && l->peers == NULL) ||
        l->lanes == NULL || l->slots == NULL || l->ends == NULL)
        return RS_ENOMEM;
    for (size_t d = 0; d < n; d++) {
        l->lanes[d].slots = l->slots + d * l->n_slots;
        l->lanes[d].ends = l->ends + d * GROUPS_UNDER_WAY;
    }
    return 0;
}

void plan_links_close(struct links *l)
{
    mem_free(l->free);
    mem_free(l->peers);
    mem_free(l->n_peers);
    mem_free(l->lanes);
    mem_free(l->slots);
    mem_free(l->ends);
    mem_free(l->landed);
}

/* --- groups ----------------------------------------------------------------------------------- */

/* The group is through: its slots are free, and what it brought may go on. */
static void end_group(struct links *l, struct link_lane *a)
{
    if (a->n == 0)
        return;
    for (uint32_t i = 0; i < a->n; i++) {
        a->slots[i].free = a->end;
        if (a->slots[i].lands != NONE32)
            l->landed[a->slots[i].lands] = a->end;
    }
    a->ends[a->n_groups++ % GROUPS_UNDER_WAY] = a->end;
    a->n = 0;
    a->end = 0;
}

/* The message's place in the device's groups: the slot that is free first. */
static double join(struct links *l, uint32_t device, const struct link_message *m, bool receives)
{
    struct link_lane *a = &l->lanes[device];
    if (a->n > 0 && (a->round != m->round || a->n == l->n_slots))
        end_group(l, a);
    a->round = m->round;
    if (a->n == 0) /* the oldest of those that may be under way with it */
        a->opened = later(a->opened, a->ends[a->n_groups % GROUPS_UNDER_WAY]);
    uint32_t best = a->n;
    for (uint32_t i = a->n + 1; i < l->n_slots; i++)
        if (a->slots[i].free < a->slots[best].free)
            best = i;
    struct link_slot slot = a->slots[best];
    a->slots[best] = a->slots[a->n];
    slot.lands = receives ? m->lands : NONE32;
    a->slots[a->n++] = slot;
    a->opened = later(a->opened, slot.free);
    return a->opened;
}

double plan_links_open(struct links *l, const struct link_message *m)
{
    double from = join(l, m->from, m, false), to = join(l, m->to, m, true);
    return later(from, to);
}

void plan_links_finish(struct links *l)
{
    for (uint32_t d = 0; d < l->s->n_devices; d++)
        end_group(l, &l->lanes[d]);
}

/* --- ports ------------------------------------------------------------------------------------ */

/* Buckets are twice as long once the time does not fit. */
static void widen(struct plan_simulation *s, double end)
{
    while (end > s->bucket_s * SIMULATION_BUCKETS) {
        s->bucket_s *= 2;
        for (int t = 0; t < 3; t++)
            for (int i = 0; i < SIMULATION_BUCKETS; i++) {
                double *b = s->tiers[t].bucket;
                b[i] = 2 * i + 1 < SIMULATION_BUCKETS ? b[2 * i] + b[2 * i + 1] : 0;
            }
    }
}

static void busy(struct plan_simulation *s, struct plan_tier_line *t, double begin, double end)
{
    widen(s, end);
    uint32_t i = (uint32_t)(begin / s->bucket_s);
    for (; i < SIMULATION_BUCKETS && begin < end; i++) {
        double until = (i + 1) * s->bucket_s < end ? (i + 1) * s->bucket_s : end;
        if (until > begin) {
            t->bucket[i] += until - begin;
            begin = until;
        }
    }
}

/* `bytes` cross the port, the last of them at `end`. */
static void cross(struct links *l, uint32_t port, enum plan_tier tier, uint64_t bytes, double end)
{
    struct plan_port *x = &l->s->ports[port];
    double took = (double)bytes * l->byte_s[tier];
    x->bytes += bytes;
    x->busy_s += took;
    x->last_s = later(x->last_s, end);
    busy(l->s, &l->s->tiers[tier], end - took > 0 ? end - took : 0, end);
}

static void count(struct links *l, enum plan_tier tier, uint64_t bytes, uint64_t messages,
                  double first, double end)
{
    struct plan_tier_line *t = &l->s->tiers[tier];
    if (t->bytes == 0 || first < t->first_s)
        t->first_s = first;
    t->bytes += bytes;
    t->messages += messages;
    t->last_s = later(t->last_s, end);
    l->s->steps++;
}

/* One peer: both links serve this message alone. */
static double send_alone(struct links *l, const struct link_message *m, uint32_t out, uint32_t in,
                         double ready)
{
    double latency = l->model->chunk_latency_s;
    double start = later(ready, later(l->free[out], l->free[in]));
    double end = start + latency * (double)m->messages + (double)m->bytes * l->byte_s[m->tier];
    l->free[out] = l->free[in] = end;
    count(l, m->tier, m->bytes, m->messages, start + latency, end);
    return end;
}

/* Not before one of the messages under way at the port is through. */
static double *peer_of(struct links *l, uint32_t port)
{
    return &l->peers[(size_t)port * l->model->peers + l->n_peers[port]++ % l->model->peers];
}

/* Several: each link serves its own queue, and latencies overlap as far as peers allow. */
static double send_among(struct links *l, const struct link_message *m, uint32_t out, uint32_t in,
                         double ready)
{
    double latency = l->model->chunk_latency_s, took = (double)m->bytes * l->byte_s[m->tier];
    double *a = peer_of(l, out), *b = peer_of(l, in);
    double start = later(ready, later(*a, *b)) + latency;
    l->free[out] = later(l->free[out], start) + took;
    l->free[in] = later(l->free[in], start) + took;
    double paced = start - latency + (latency * (double)m->messages + took) / l->model->peers;
    double end = later(paced, later(l->free[out], l->free[in]));
    *a = *b = end;
    count(l, m->tier, m->bytes, m->messages, start, end);
    return end;
}

static double send(struct links *l, const struct link_message *m, double ready)
{
    uint32_t out = plan_port_of(m->from, m->tier, true), in = plan_port_of(m->to, m->tier, false);
    double end =
        l->peers == NULL ? send_alone(l, m, out, in, ready) : send_among(l, m, out, in, ready);
    cross(l, out, m->tier, m->bytes, end);
    cross(l, in, m->tier, m->bytes, end);
    return end;
}

double plan_links_send(struct links *l, const struct link_message *m, double ready)
{
    double end = send(l, m, ready);
    struct link_lane *from = &l->lanes[m->from], *to = &l->lanes[m->to];
    from->end = later(from->end, end);
    to->end = later(to->end, end);
    return end;
}

double plan_links_stream(struct links *l, const struct link_message *m, double ready,
                         uint64_t chunk, double *ret_first)
{
    uint32_t out = plan_port_of(m->from, m->tier, true), in = plan_port_of(m->to, m->tier, false);
    double start = later(ready, later(l->free[out], l->free[in]));
    double end = send(l, m, ready);
    chunk = chunk < m->bytes ? chunk : m->bytes;
    *ret_first = start + l->model->chunk_latency_s + (double)chunk * l->byte_s[m->tier];
    return end;
}

double plan_links_copy(struct links *l, uint32_t from, uint32_t to, uint64_t bytes, double ready)
{
    uint32_t out = plan_port_of(from, TIER_DOMAIN, true), in = plan_port_of(to, TIER_DOMAIN, false);
    double took = (double)bytes * l->byte_s[TIER_DOMAIN];
    double start = later(ready, l->free[out]);
    l->free[out] = start + took;
    l->free[in] = later(ready, l->free[in]) + took;
    double end = later(l->free[out], l->free[in]);
    count(l, TIER_DOMAIN, bytes, 0, start, end);
    cross(l, out, TIER_DOMAIN, bytes, l->free[out]);
    cross(l, in, TIER_DOMAIN, bytes, l->free[in]);
    return end;
}
