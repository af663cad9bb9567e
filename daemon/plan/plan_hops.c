#include "plan/plan_private.h"

#include "base/banned.h"

uint32_t set_site(const struct plan *p, const struct set *s, uint32_t domain, uint32_t site,
                  uint32_t *ret_first)
{
    uint32_t low = 0, high = s->n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct end *x = &p->ends.at[s->first + middle];
        if (x->domain < domain || (x->domain == domain && x->site < site))
            low = middle + 1;
        else
            high = middle;
    }
    uint32_t n = 0;
    while (low + n < s->n && p->ends.at[s->first + low + n].site == site)
        n++;
    *ret_first = s->first + low;
    return n;
}

/* The first end on a device, or NONE32. */
static uint32_t on_device(const struct plan *p, uint32_t first, uint32_t n, uint32_t device)
{
    for (uint32_t i = 0; i < n; i++)
        if (p->ends.at[first + i].device == device)
            return first + i;
    return NONE32;
}

/* NONE32 in a damaged plan: plan_check then says so. */
static uint32_t end_on(const struct plan *p, const struct set *s, uint32_t device)
{
    uint32_t first,
        n = set_site(p, s, p->topology->devices[device].domain, p->device_site[device], &first);
    return on_device(p, first, n, device);
}

static int add_hop(struct hops *h, struct hop hop)
{
    if (vec_reserve(&h->v, h->v.n + 1) != 0)
        return RS_ENOMEM;
    h->v.at[h->v.n++] = hop;
    return 0;
}

static uint8_t local_tier(uint32_t a, uint32_t b)
{
    return a == b ? TIER_DEVICE : TIER_DOMAIN;
}

/* The edge's own hop, then the further takers of the receiving site. */
static int edge_hops(const struct plan *p, const struct plan_run *r, uint32_t edge, struct hops *h)
{
    const struct plan_edge *e = &p->edges.at[edge];
    const struct plan_batch *b = &p->batches.at[r->batch];
    const struct set *takers = &p->sets.at[b->takers], *source = &p->sets.at[b->source];
    uint32_t first_edge = p->bundles.at[b->bundle].first_edge;
    bool relayed = e->parent != NONE32;
    struct hop hop = {
        .from = end_on(p, relayed ? takers : source, e->from),
        .to = e->taker,
        .from_device = e->from,
        .to_device = e->to,
        .edge = edge,
        .after = relayed ? h->of_edge.at[plan_edge_parent(p, e, r->batch) - first_edge] : NONE32,
        .from_side = relayed ? SIDE_DESTINATION : SIDE_SOURCE,
        .tier = e->tier};
    h->of_edge.at[edge - first_edge] = (uint32_t)h->v.n;
    if (e->taker != NONE32)
        return add_hop(h, hop);
    uint32_t first,
        n = set_site(p, takers, p->topology->devices[e->to].domain, p->device_site[e->to], &first);
    hop.to = e->staging ? NONE32 : on_device(p, first, n, e->to);
    uint32_t own = hop.to, parent = (uint32_t)h->v.n;
    int result = add_hop(h, hop);
    for (uint32_t i = first; i < first + n && result == 0; i++)
        if (i != own)
            result =
                add_hop(h, (struct hop){.from = own,
                                        .to = i,
                                        .from_device = e->to,
                                        .to_device = p->ends.at[i].device,
                                        .edge = NONE32,
                                        .after = parent,
                                        .from_side = e->staging ? SIDE_STAGING : SIDE_DESTINATION,
                                        .tier = local_tier(e->to, p->ends.at[i].device)});
    return result;
}

/* Takers whose own site has a holder: from their own device if it holds, else spread over the
 * site's. */
static int site_hops(const struct plan *p, const struct plan_group *g, uint32_t run, struct hops *h)
{
    const struct set *takers = &p->sets.at[g->takers], *source = &p->sets.at[g->source];
    uint32_t first = 0, n = 0;
    int r = 0;
    for (uint32_t i = takers->first; i < takers->first + takers->n && r == 0; i++) {
        const struct end *t = &p->ends.at[i];
        if (i == takers->first || p->ends.at[i - 1].site != t->site)
            n = set_site(p, source, t->domain, t->site, &first);
        if (n == 0)
            continue;
        uint32_t from = on_device(p, first, n, t->device);
        if (from == NONE32)
            from = first + (run + i - takers->first) % n;
        r = add_hop(h, (struct hop){.from = from,
                                    .to = i,
                                    .from_device = p->ends.at[from].device,
                                    .to_device = t->device,
                                    .edge = NONE32,
                                    .after = NONE32,
                                    .from_side = SIDE_SOURCE,
                                    .tier = local_tier(p->ends.at[from].device, t->device)});
    }
    return r;
}

int plan_run_hops(const struct plan *p, uint32_t run, struct hops *h)
{
    const struct plan_run *r = &p->runs.at[run];
    const struct plan_group *g = &p->groups.at[r->group];
    h->v.n = 0;
    const struct plan_bundle *b = &p->bundles.at[p->batches.at[r->batch].bundle];
    int result = vec_reserve(&h->of_edge, b->n_edges);
    for (uint32_t i = b->first_edge; i < b->first_edge + b->n_edges && result == 0; i++) {
        const struct plan_edge *e = &p->edges.at[i];
        if (r->batch - e->first_batch < e->n_batches)
            result = edge_hops(p, r, i, h);
    }
    return result == 0 ? site_hops(p, g, run, h) : result;
}

void hops_close(struct hops *h)
{
    mem_free(h->v.at);
    mem_free(h->of_edge.at);
}

uint32_t plan_find_runs(const struct plan *p, uint32_t group, uint32_t member, uint32_t *ret_first)
{
    const struct plan_group *g = &p->groups.at[group];
    const struct plan_run *runs = p->runs.at + g->first_run;
    uint32_t low = 0, high = g->n_runs; /* the first run that ends beyond member */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (runs[middle].member + runs[middle].count <= member)
            low = middle + 1;
        else
            high = middle;
    }
    uint32_t n = 0;
    while (low + n < g->n_runs && runs[low + n].member <= member)
        n++;
    *ret_first = g->first_run + low;
    return n;
}

uint64_t plan_run_offset(const struct plan *p, const struct plan_run *r, uint32_t member)
{
    struct run_walk w;
    uint64_t bytes = 0;
    run_walk_init(p, r, &w);
    while (run_walk_next(p, r, &w) && w.member < member)
        bytes += (member - w.member < w.n ? member - w.member : w.n) * w.bytes;
    return bytes;
}
