/* Batches, who needs them, and ingest: each domain on its own, which destination device takes each batch in.
 *
 * Batches with one taker have no choice and come first; the others follow, largest first, each to its
 * emptiest taker. Where that is full (by the lower bound), the emptiest destination device of the
 * takers' site may take it into staging; it writes the takers' memory from there, so it must reach
 * all of them by copies. */
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

/* A device is full beyond the bound and this part of it. */
enum { SLACK_SHIFT = 6 };

/* --- needs ------------------------------------------------------------------------------------ */

/* Groups by (source, takers). */
static int order_groups(const struct plan *p, uint32_t *ret_order)
{
    uint32_t n = (uint32_t)p->groups.n;
    uint32_t *key = mem_alloc((n + 1U) * sizeof *key);
    uint32_t *order = mem_alloc((n + 1U) * sizeof *order);
    int r = key == NULL || order == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->groups.at[i].takers;
    if (r == 0)
        r = sort_count(key, NULL, n, (uint32_t)p->sets.n, order);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = p->groups.at[i].source;
    if (r == 0)
        r = sort_count(key, order, n, (uint32_t)p->sets.n, ret_order);
    mem_free(key);
    mem_free(order);
    return r;
}

/* The run joins the batch before it where that has the same sets and room. */
static int add_to_batch(struct plan *p, struct needs *n, uint32_t run)
{
    const struct plan_group *g = &p->groups.at[p->runs.at[run].group];
    uint64_t bytes = p->runs.at[run].bytes;
    const struct batch *last = n->batches.n == 0 ? NULL : &n->batches.at[n->batches.n - 1];
    if (last == NULL || last->source != g->source || last->takers != g->takers ||
        last->bytes + bytes > plan_leg_bytes(p)) {
        if (vec_reserve(&n->batches, n->batches.n + 1) != 0)
            return RS_ENOMEM;
        n->batches.at[n->batches.n++] = (struct batch){g->source, g->takers, 0};
    }
    n->batches.at[n->batches.n - 1].bytes += bytes;
    p->runs.at[run].batch = (uint32_t)n->batches.n - 1;
    return 0;
}

static int make_batches(struct plan *p, struct needs *n)
{
    uint32_t *order = mem_alloc((p->groups.n + 1) * sizeof *order);
    int r = order == NULL ? RS_ENOMEM : order_groups(p, order);
    for (uint32_t i = 0; i < p->runs.n; i++)
        p->runs.at[i].batch = NONE32;
    for (uint32_t i = 0; i < p->groups.n && r == 0; i++) {
        const struct plan_group *g = &p->groups.at[order[i]];
        if (p->classes.at[g->class].strategy != PLAN_RESHARD)
            continue;
        for (uint32_t k = g->first_run; k < g->first_run + g->n_runs && r == 0; k++)
            r = add_to_batch(p, n, k);
    }
    mem_free(order);
    return r;
}

static int add_needs(struct plan *p, struct needs *n, uint32_t batch)
{
    const struct batch *x = &n->batches.at[batch];
    const struct set *takers = &p->sets.at[x->takers], *source = &p->sets.at[x->source];
    uint32_t at = 0;
    if (vec_reserve(&n->v, n->v.n + takers->n) != 0)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < takers->n;) {
        uint32_t begin = takers->first + i, domain = p->ends.at[begin].domain;
        while (i < takers->n && p->ends.at[takers->first + i].domain == domain)
            i++;
        while (at < source->n && p->ends.at[source->first + at].domain < domain)
            at++;
        if (at < source->n && p->ends.at[source->first + at].domain == domain)
            continue;
        n->v.at[n->v.n++] = (struct need){.batch = batch,
                                          .domain = domain,
                                          .first_end = begin,
                                          .n_ends = takers->first + i - begin,
                                          .device = NONE32,
                                          .from = NONE32,
                                          .via = NONE32};
    }
    return 0;
}

static int order_batches(struct needs *n)
{
    uint32_t n_batches = (uint32_t)n->batches.n;
    uint64_t *bytes = mem_alloc((n_batches + 1U) * sizeof *bytes);
    n->order = mem_calloc(n_batches + 1U, sizeof *n->order);
    int r = bytes == NULL || n->order == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n_batches; i++)
        bytes[i] = n->batches.at[i].bytes;
    if (r == 0)
        r = sort_descending(bytes, n_batches, n->order);
    mem_free(bytes);
    return r;
}

int plan_needs(struct plan *p, struct needs *ret)
{
    memset(ret, 0, sizeof *ret);
    uint32_t n_devices = p->topology->n_devices;
    int r = make_batches(p, ret);
    if (r == 0)
        r = order_batches(ret);
    if (r != 0)
        return r;
    ret->first_of_batch = mem_calloc(ret->batches.n + 2, sizeof *ret->first_of_batch);
    ret->domain_ingress = mem_calloc(n_devices + 1U, sizeof *ret->domain_ingress);
    ret->domain_egress = mem_calloc(n_devices + 1U, sizeof *ret->domain_egress);
    if (ret->first_of_batch == NULL || ret->domain_ingress == NULL || ret->domain_egress == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < ret->batches.n && r == 0; i++) {
        ret->first_of_batch[i] = (uint32_t)ret->v.n;
        r = add_needs(p, ret, i);
        ret->first_of_batch[i + 1] = (uint32_t)ret->v.n;
        if (ret->v.n > INT32_MAX)
            r = RS_EEXHAUSTED;
    }
    return r;
}

void needs_close(struct needs *n)
{
    mem_free(n->v.at);
    mem_free(n->batches.at);
    mem_free(n->first_of_batch);
    mem_free(n->order);
    mem_free(n->domain_ingress);
    mem_free(n->domain_egress);
}

/* --- ingest ----------------------------------------------------------------------------------- */

struct ingest {
    struct plan *p;
    struct needs *n;
    uint32_t *site_first; /* destination devices by site */
    uint32_t *site_devices;
    uint32_t *deferred;
    uint64_t cap;
};

static bool one_taker(const struct plan *p, const struct need *x)
{
    return p->ends.at[x->first_end].device == p->ends.at[x->first_end + x->n_ends - 1].device;
}

static bool one_site(const struct plan *p, const struct need *x)
{
    return p->ends.at[x->first_end].site == p->ends.at[x->first_end + x->n_ends - 1].site;
}

static uint32_t emptiest_taker(const struct plan *p, const struct need *x)
{
    uint32_t best = p->ends.at[x->first_end].device;
    for (uint32_t i = 1; i < x->n_ends; i++) {
        uint32_t d = p->ends.at[x->first_end + i].device;
        if (p->ingress[d] < p->ingress[best])
            best = d;
    }
    return best;
}

static void take(struct ingest *g, struct need *x, uint32_t device)
{
    x->device = device;
    g->p->ingress[device] += g->n->batches.at[x->batch].bytes;
}

static bool is_taker(const struct plan *p, const struct need *x, uint32_t device)
{
    for (uint32_t i = 0; i < x->n_ends; i++)
        if (p->ends.at[x->first_end + i].device == device)
            return true;
    return false;
}

/* The takers' links are full: the emptiest destination device of their site, else a taker all the
 * same. */
static void take_overflow(struct ingest *g, struct need *x)
{
    struct plan *p = g->p;
    uint32_t best = emptiest_taker(p, x);
    if (p->options.staging_ingest && one_site(p, x)) {
        uint32_t site = p->ends.at[x->first_end].site;
        for (uint32_t i = g->site_first[site]; i < g->site_first[site + 1]; i++)
            if (p->ingress[g->site_devices[i]] < p->ingress[best])
                best = g->site_devices[i];
    }
    take(g, x, best);
    x->staging = !is_taker(p, x, best);
}

static void ingest_domain(struct ingest *g, const uint32_t *list, uint32_t n)
{
    struct plan *p = g->p;
    uint32_t n_deferred = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct need *x = &g->n->v.at[list[i]];
        uint32_t d = emptiest_taker(p, x);
        if (p->ingress[d] + g->n->batches.at[x->batch].bytes <= g->cap)
            take(g, x, d);
        else
            g->deferred[n_deferred++] = list[i];
    }
    for (uint32_t i = 0; i < n_deferred; i++)
        take_overflow(g, &g->n->v.at[g->deferred[i]]);
}

/* Destination devices of each site, ascending. */
static int list_sites(struct ingest *g)
{
    struct plan *p = g->p;
    uint32_t n = p->topology->n_devices, n_sites = 0, k = 0;
    uint8_t *seen = mem_calloc(n + 1U, 1);
    for (uint32_t d = 0; d < n; d++)
        n_sites = p->device_site[d] >= n_sites ? p->device_site[d] + 1 : n_sites;
    g->site_first = mem_calloc(n_sites + 2U, sizeof *g->site_first);
    g->site_devices = mem_calloc(n + 1U, sizeof *g->site_devices);
    uint32_t *order = mem_calloc(n + 1U, sizeof *order);
    int r = RS_ENOMEM;
    if (seen != NULL && g->site_first != NULL && g->site_devices != NULL && order != NULL)
        r = sort_count(p->device_site, NULL, n, n_sites, order);
    if (r == 0) {
        for (uint32_t i = 0; i < p->groups.n; i++) {
            const struct set *takers = &p->sets.at[p->groups.at[i].takers];
            for (uint32_t j = 0; j < takers->n; j++)
                seen[p->ends.at[takers->first + j].device] = 1;
        }
        for (uint32_t i = 0; i < n; i++) {
            if (!seen[order[i]])
                continue;
            g->site_devices[k++] = order[i];
            g->site_first[p->device_site[order[i]] + 1] = k;
        }
        for (uint32_t s = 0; s < n_sites; s++)
            if (g->site_first[s + 1] < g->site_first[s])
                g->site_first[s + 1] = g->site_first[s];
    }
    mem_free(seen);
    mem_free(order);
    return r;
}

/* Needs by (domain, one taker first, largest batch first). */
static int order_needs(struct ingest *g, uint32_t **ret_order)
{
    struct plan *p = g->p;
    uint32_t n = (uint32_t)g->n->v.n, k = 0;
    uint32_t *list = mem_alloc((n + 1U) * sizeof *list);
    uint32_t *domain = mem_alloc((n + 1U) * sizeof *domain);
    *ret_order = mem_alloc((n + 1U) * sizeof **ret_order);
    int r = RS_ENOMEM;
    if (list != NULL && domain != NULL && *ret_order != NULL) {
        for (int several = 0; several < 2; several++)
            for (uint32_t i = 0; i < g->n->batches.n; i++) {
                uint32_t batch = g->n->order[i];
                for (uint32_t x = g->n->first_of_batch[batch]; x < g->n->first_of_batch[batch + 1];
                     x++)
                    if (one_taker(p, &g->n->v.at[x]) == (several == 0))
                        list[k++] = x;
            }
        for (uint32_t x = 0; x < n; x++)
            domain[x] = g->n->v.at[x].domain;
        r = sort_count(domain, list, n, p->topology->n_domains, *ret_order);
    }
    mem_free(list);
    mem_free(domain);
    return r;
}

int plan_ingest(struct plan *p, struct needs *n)
{
    uint64_t bound = p->totals.lower_bound;
    struct ingest g = {.p = p, .n = n, .cap = bound + (bound >> SLACK_SHIFT)};
    uint32_t *order = NULL;
    g.deferred = mem_alloc((n->v.n + 1) * sizeof *g.deferred);
    int r = g.deferred == NULL ? RS_ENOMEM : list_sites(&g);
    if (r == 0)
        r = order_needs(&g, &order);
    for (uint32_t i = 0, end; r == 0 && i < n->v.n; i = end) {
        uint32_t domain = n->v.at[order[i]].domain;
        for (end = i; end < n->v.n && n->v.at[order[end]].domain == domain;)
            end++;
        ingest_domain(&g, order + i, end - i);
    }
    mem_free(order);
    mem_free(g.deferred);
    mem_free(g.site_first);
    mem_free(g.site_devices);
    return r;
}
