/* Edges: what crosses from one site to another, for each run, parents before children.
 *
 * For reshard: the network transfers that ingest and senders decided (those from holders first,
 * then the relays), then one per further site of the domain. For direct: one per taker that no
 * holder of its own site serves. */
#include "plan/plan_private.h"

#include "base/banned.h"

struct edger {
    struct plan *p;
    struct needs *n;
    uint32_t *edge_of_need;
};

static int add_edge(struct plan *p, struct plan_edge *edge)
{
    if (p->edges.n >= INT32_MAX)
        return RS_EEXHAUSTED;
    if (vec_reserve(&p->edges, p->edges.n + 1) != 0)
        return RS_ENOMEM;
    const struct plan_edge *parent = edge->parent == NONE32 ? NULL : &p->edges.at[edge->parent];
    edge->depth = (uint8_t)(parent == NULL ? 1 : parent->depth + 1);
    edge->hops = (uint8_t)((parent == NULL ? 0 : parent->hops) + (edge->tier == TIER_NETWORK));
    p->edges.at[p->edges.n++] = *edge;
    p->runs.at[edge->run].n_edges++;
    return 0;
}

/* Those that take `hops` hops to arrive; false in *ret_more where none takes more. */
static int need_edges(struct edger *g, uint32_t run, uint8_t hops, bool *ret_more)
{
    int r = 0;
    *ret_more = false;
    uint32_t batch = g->p->runs.at[run].batch;
    for (uint32_t i = g->n->first_of_batch[batch]; i < g->n->first_of_batch[batch + 1] && r == 0;
         i++) {
        const struct need *x = &g->n->v.at[i];
        *ret_more = *ret_more || x->hops > hops;
        if (x->hops != hops)
            continue;
        struct plan_edge edge = {.run = run,
                                 .from = x->from,
                                 .to = x->device,
                                 .parent = x->via != NONE32 ? g->edge_of_need[x->via] : NONE32,
                                 .taker = NONE32,
                                 .tier = TIER_NETWORK,
                                 .staging = x->staging};
        g->edge_of_need[i] = (uint32_t)g->p->edges.n;
        r = add_edge(g->p, &edge);
    }
    return r;
}

static uint32_t least(const struct plan *p, uint32_t first, uint32_t n, const uint64_t *load)
{
    uint32_t best = p->ends.at[first].device;
    for (uint32_t i = 1; i < n; i++) {
        uint32_t d = p->ends.at[first + i].device;
        if (load[d] < load[best])
            best = d;
    }
    return best;
}

/* The takers [first, first + n) of one site get the run from `from` in their domain. */
static int site_edge(struct edger *g, uint32_t run, uint32_t from, uint32_t parent, uint32_t first,
                     uint32_t n)
{
    struct plan_edge edge = {.run = run,
                             .from = from,
                             .to = least(g->p, first, n, g->n->domain_ingress),
                             .parent = parent,
                             .taker = NONE32,
                             .tier = TIER_DOMAIN};
    g->n->domain_ingress[edge.to] += g->p->runs.at[run].bytes;
    g->n->domain_egress[edge.from] += g->p->runs.at[run].bytes;
    return add_edge(g->p, &edge);
}

/* Ends from `at` on that share a domain (or a site). */
static uint32_t same_domain(const struct plan *p, const struct set *s, uint32_t at)
{
    uint32_t n = 1;
    while (at + n < s->n &&
           p->ends.at[s->first + at + n].domain == p->ends.at[s->first + at].domain)
        n++;
    return n;
}

static uint32_t same_site(const struct plan *p, const struct set *s, uint32_t at)
{
    uint32_t n = 1;
    while (at + n < s->n && p->ends.at[s->first + at + n].site == p->ends.at[s->first + at].site)
        n++;
    return n;
}

static bool site_holds(const struct plan *p, uint32_t first, uint32_t n, uint32_t site)
{
    for (uint32_t i = 0; i < n; i++)
        if (p->ends.at[first + i].site == site)
            return true;
    return false;
}

/* Fan-out inside the domains that the run's takers sit in. */
static int domain_edges(struct edger *g, uint32_t run)
{
    struct plan *p = g->p;
    const struct plan_group *group = &p->groups.at[p->runs.at[run].group];
    const struct set *takers = &p->sets.at[group->takers], *source = &p->sets.at[group->source];
    uint32_t need = g->n->first_of_batch[g->p->runs.at[run].batch], held = 0;
    int r = 0;
    for (uint32_t i = 0, n; i < takers->n && r == 0; i += n) {
        uint32_t domain = p->ends.at[takers->first + i].domain;
        n = same_domain(p, takers, i);
        while (held < source->n && p->ends.at[source->first + held].domain < domain)
            held++;
        bool inside = held < source->n && p->ends.at[source->first + held].domain == domain;
        uint32_t n_held = inside ? same_domain(p, source, held) : 0;
        const struct need *x = inside ? NULL : &g->n->v.at[need];
        for (uint32_t k = i, m; k < i + n && r == 0; k += m) {
            uint32_t site = p->ends.at[takers->first + k].site;
            m = same_site(p, takers, k);
            if (inside ? site_holds(p, source->first + held, n_held, site)
                       : p->device_site[x->device] == site)
                continue;
            uint32_t from =
                inside ? least(p, source->first + held, n_held, g->n->domain_egress) : x->device;
            r = site_edge(g, run, from, inside ? NONE32 : g->edge_of_need[need], takers->first + k,
                          m);
        }
        need += inside ? 0 : 1;
    }
    return r;
}

static int direct_edge(struct edger *g, uint32_t run, uint32_t end)
{
    struct plan *p = g->p;
    const struct set *source = &p->sets.at[p->groups.at[p->runs.at[run].group].source];
    const struct end *taker = &p->ends.at[end];
    uint32_t first = 0;
    while (first < source->n && p->ends.at[source->first + first].domain < taker->domain)
        first++;
    bool inside = first < source->n && p->ends.at[source->first + first].domain == taker->domain;
    uint32_t n = inside ? same_domain(p, source, first) : source->n;
    first = source->first + (inside ? first : 0);
    if (inside && site_holds(p, first, n, taker->site))
        return 0;
    uint64_t *egress = inside ? g->n->domain_egress : p->egress;
    uint64_t *ingress = inside ? g->n->domain_ingress : p->ingress;
    struct plan_edge edge = {.run = run,
                             .from = least(p, first, n, egress),
                             .to = taker->device,
                             .parent = NONE32,
                             .taker = end,
                             .tier = inside ? TIER_DOMAIN : TIER_NETWORK};
    egress[edge.from] += p->runs.at[run].bytes;
    ingress[edge.to] += p->runs.at[run].bytes;
    return add_edge(p, &edge);
}

static int run_edges(struct edger *g, uint32_t run)
{
    struct plan *p = g->p;
    const struct plan_group *group = &p->groups.at[p->runs.at[run].group];
    p->runs.at[run].first_edge = (uint32_t)p->edges.n;
    int r = 0;
    if (p->classes.at[group->class].strategy == PLAN_DIRECT) {
        const struct set *takers = &p->sets.at[group->takers];
        for (uint32_t i = 0; i < takers->n && r == 0; i++)
            r = direct_edge(g, run, takers->first + i);
        return r;
    }
    bool more = true;
    for (uint8_t hops = 1; more && r == 0; hops++)
        r = need_edges(g, run, hops, &more);
    return r == 0 ? domain_edges(g, run) : r;
}

int plan_edges(struct plan *p, struct needs *n, struct err *e)
{
    struct edger g = {.p = p, .n = n};
    g.edge_of_need = mem_alloc((n->v.n + 1) * sizeof *g.edge_of_need);
    int r = g.edge_of_need == NULL ? RS_ENOMEM : vec_reserve(&p->edges, n->v.n);
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++)
        r = run_edges(&g, i);
    mem_free(g.edge_of_need);
    if (r != 0)
        return err_set(e, r, r == RS_ENOMEM ? "out of memory" : "more than 2^31 transfers of runs");
    return 0;
}
