/* Edges: what crosses from one site to another, for each bundle, parents before children.
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
    return 0;
}

static uint32_t least(const struct plan *p, uint32_t first, uint32_t n, const uint64_t *load);

/* The need's batches, each from a holder of its own. */
static int holder_edges(struct edger *g, const struct need *x)
{
    struct plan *p = g->p;
    const struct plan_bundle *u = &p->bundles.at[x->bundle];
    int r = 0;
    for (uint32_t b = u->first_batch; b < u->first_batch + u->n_batches && r == 0; b++) {
        const struct set *source = &p->sets.at[p->batches.at[b].source];
        uint32_t from = g->n->batch_from[b];
        g->n->batch_from[b] = NONE32; /* once; a further need has its sends where there is least */
        if (from == NONE32) {
            from = least(p, source->first, source->n, p->egress);
            p->egress[from] += p->batches.at[b].bytes;
        }
        struct plan_edge edge = {.first_batch = b,
                                 .n_batches = 1,
                                 .from = from,
                                 .to = x->device,
                                 .parent = NONE32,
                                 .taker = NONE32,
                                 .tier = TIER_NETWORK,
                                 .staging = x->staging};
        r = add_edge(p, &edge);
    }
    return r;
}

static struct plan_edge bundle_edge(const struct plan *p, uint32_t bundle)
{
    const struct plan_bundle *u = &p->bundles.at[bundle];
    return (struct plan_edge){
        .first_batch = u->first_batch, .n_batches = u->n_batches, .taker = NONE32};
}

/* Those that take `hops` hops to arrive; false in *ret_more where none takes more. */
static int need_edges(struct edger *g, uint32_t bundle, uint8_t hops, bool *ret_more)
{
    int r = 0;
    *ret_more = false;
    for (uint32_t i = g->n->first_of_bundle[bundle];
         i < g->n->first_of_bundle[bundle + 1] && r == 0; i++) {
        const struct need *x = &g->n->v.at[i];
        *ret_more = *ret_more || x->hops > hops;
        if (x->hops != hops)
            continue;
        g->edge_of_need[i] = (uint32_t)g->p->edges.n;
        if (x->from == EACH_HOLDER) {
            r = holder_edges(g, x);
            continue;
        }
        struct plan_edge edge = bundle_edge(g->p, bundle);
        edge.from = x->from;
        edge.to = x->device;
        edge.parent = x->via != NONE32 ? g->edge_of_need[x->via] : NONE32;
        edge.tier = TIER_NETWORK;
        edge.staging = x->staging;
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

/* The takers [first, first + n) of one site get the bundle from `from` in their domain. */
static int site_edge(struct edger *g, uint32_t bundle, uint32_t from, uint32_t parent,
                     uint32_t first, uint32_t n)
{
    struct plan_edge edge = bundle_edge(g->p, bundle);
    edge.from = from;
    edge.to = least(g->p, first, n, g->n->domain_ingress);
    edge.parent = parent;
    edge.tier = TIER_DOMAIN;
    g->n->domain_ingress[edge.to] += g->p->bundles.at[bundle].bytes;
    g->n->domain_egress[edge.from] += g->p->bundles.at[bundle].bytes;
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

/* Fan-out inside the domains that the bundle's takers sit in. Where it has several batches no domain holds any of
 * them, so the first one's holders stand for all. */
static int domain_edges(struct edger *g, uint32_t bundle)
{
    struct plan *p = g->p;
    const struct plan_batch *batch = &p->batches.at[p->bundles.at[bundle].first_batch];
    const struct set *takers = &p->sets.at[batch->takers], *source = &p->sets.at[batch->source];
    uint32_t need = g->n->first_of_bundle[bundle], held = 0;
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
            r = site_edge(g, bundle, from, inside ? NONE32 : g->edge_of_need[need],
                          takers->first + k, m);
        }
        need += inside ? 0 : 1;
    }
    return r;
}

static int direct_edge(struct edger *g, uint32_t bundle, uint32_t end)
{
    struct plan *p = g->p;
    uint64_t bytes = p->bundles.at[bundle].bytes;
    const struct plan_batch *batch = &p->batches.at[p->bundles.at[bundle].first_batch];
    const struct set *source = &p->sets.at[batch->source];
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
    struct plan_edge edge = bundle_edge(p, bundle);
    edge.from = least(p, first, n, egress);
    edge.to = taker->device;
    edge.parent = NONE32;
    edge.taker = end;
    edge.tier = inside ? TIER_DOMAIN : TIER_NETWORK;
    egress[edge.from] += bytes;
    ingress[edge.to] += bytes;
    return add_edge(p, &edge);
}

static int bundle_edges(struct edger *g, uint32_t bundle)
{
    struct plan *p = g->p;
    struct plan_bundle *u = &p->bundles.at[bundle];
    bool more = bundle < g->n->n_reshard;
    int r = 0;
    u->first_edge = (uint32_t)p->edges.n;
    if (more) {
        for (uint8_t hops = 1; more && r == 0; hops++)
            r = need_edges(g, bundle, hops, &more);
        if (r == 0)
            r = domain_edges(g, bundle);
    } else {
        const struct set *takers = &p->sets.at[p->batches.at[u->first_batch].takers];
        for (uint32_t i = 0; i < takers->n && r == 0; i++)
            r = direct_edge(g, bundle, takers->first + i);
    }
    u->n_edges = (uint32_t)p->edges.n - u->first_edge;
    return r;
}

int plan_edges(struct plan *p, struct needs *n, struct err *e)
{
    struct edger g = {.p = p, .n = n};
    g.edge_of_need = mem_alloc((n->v.n + 1) * sizeof *g.edge_of_need);
    int r = g.edge_of_need == NULL ? RS_ENOMEM : vec_reserve(&p->edges, n->v.n);
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++) {
        uint32_t bundle = p->batches.at[p->runs.at[i].batch].bundle;
        if (p->bundles.at[bundle].first_edge == NONE32) /* in the order of their first runs */
            r = bundle_edges(&g, bundle);
    }
    mem_free(g.edge_of_need);
    if (r != 0)
        return err_set(e, r, r == RS_ENOMEM ? "out of memory" : "more than 2^31 transfers of runs");
    return 0;
}
