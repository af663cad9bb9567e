/* Batches and bundles, who needs them, and ingest: each domain on its own, which destination device takes each bundle
 * in.
 *
 * Bundles with one taker have no choice and come first; the others follow, largest first, each to its
 * emptiest taker. Where that is full (by the lower bound), the emptiest destination device of the
 * takers' site may take it into staging; it writes the takers' memory from there, so it must reach
 * all of them by copies. */
#include <string.h>

#include "plan/plan_private.h"

#include "base/banned.h"

/* A device is full beyond the bound and this part of it. */
enum { SLACK_SHIFT = 6 };

/* --- needs ------------------------------------------------------------------------------------ */

/* Groups by (source, takers), or by (takers, source). */
static int order_groups(const struct plan *p, bool takers_first, uint32_t *ret_order)
{
    uint32_t n = (uint32_t)p->groups.n, n_sets = (uint32_t)p->sets.n;
    uint32_t *key = mem_alloc((n + 1U) * sizeof *key);
    uint32_t *order = mem_alloc((n + 1U) * sizeof *order);
    int r = key == NULL || order == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = takers_first ? p->groups.at[i].source : p->groups.at[i].takers;
    if (r == 0)
        r = sort_count(key, NULL, n, n_sets, order);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        key[i] = takers_first ? p->groups.at[i].takers : p->groups.at[i].source;
    if (r == 0)
        r = sort_count(key, order, n, n_sets, ret_order);
    mem_free(key);
    mem_free(order);
    return r;
}

static int open_batch(struct plan *p, const struct plan_group *g)
{
    if (vec_reserve(&p->batches, p->batches.n + 1) != 0)
        return RS_ENOMEM;
    p->batches.at[p->batches.n++] = (struct plan_batch){
        .source = g->source, .takers = g->takers, .first_run = (uint32_t)p->batch_runs.n};
    return 0;
}

/* The run joins the batch before it where that has the same sets and room. */
static int add_to_batch(struct plan *p, uint32_t run, bool alone)
{
    struct plan_run *r = &p->runs.at[run];
    const struct plan_group *g = &p->groups.at[r->group];
    const struct plan_batch *last = p->batches.n == 0 ? NULL : &p->batches.at[p->batches.n - 1];
    if (alone || last == NULL || last->source != g->source || last->takers != g->takers ||
        last->bytes + r->bytes > plan_leg_bytes(p))
        if (open_batch(p, g) != 0)
            return RS_ENOMEM;
    if (vec_reserve(&p->batch_runs, p->batch_runs.n + 1) != 0)
        return RS_ENOMEM;
    struct plan_batch *b = &p->batches.at[p->batches.n - 1];
    r->batch = (uint32_t)p->batches.n - 1;
    r->offset = b->bytes;
    b->bytes += r->bytes;
    b->n_runs++;
    p->batch_runs.at[p->batch_runs.n++] = run;
    return 0;
}

/* True where a holder sits in a domain that a taker sits in. */
static bool held_beside(const struct plan *p, const struct plan_batch *b)
{
    const struct set *s = &p->sets.at[b->source], *t = &p->sets.at[b->takers];
    uint32_t i = 0, k = 0;
    while (i < s->n && k < t->n) {
        uint32_t x = p->ends.at[s->first + i].domain, y = p->ends.at[t->first + k].domain;
        if (x == y)
            return true;
        i += x < y;
        k += y < x;
    }
    return false;
}

/* A batch is a bundle of its own, or (`together`) joins the one before it where that has the same takers and room, and
 * no domain holds a part of it. */
static int add_to_bundle(struct plan *p, uint32_t batch, bool together)
{
    struct plan_batch *b = &p->batches.at[batch];
    struct plan_bundle *u = p->bundles.n == 0 ? NULL : &p->bundles.at[p->bundles.n - 1];
    const struct plan_batch *first = u == NULL ? NULL : &p->batches.at[u->first_batch];
    if (!together || u == NULL || first->takers != b->takers ||
        u->bytes + b->bytes > plan_leg_bytes(p) || held_beside(p, b) || held_beside(p, first)) {
        if (vec_reserve(&p->bundles, p->bundles.n + 1) != 0)
            return RS_ENOMEM;
        u = &p->bundles.at[p->bundles.n++];
        *u = (struct plan_bundle){.first_batch = batch, .first_edge = NONE32};
    }
    b->bundle = (uint32_t)p->bundles.n - 1;
    b->offset = u->bytes;
    u->bytes += b->bytes;
    u->n_batches++;
    return 0;
}

static int batch_strategy(struct plan *p, const uint32_t *order, enum plan_strategy strategy)
{
    int r = 0;
    for (uint32_t i = 0; i < p->groups.n && r == 0; i++) {
        const struct plan_group *g = &p->groups.at[order == NULL ? i : order[i]];
        if (p->classes.at[g->class].strategy != strategy)
            continue;
        for (uint32_t k = g->first_run; k < g->first_run + g->n_runs && r == 0; k++)
            r = add_to_batch(p, k, strategy == PLAN_DIRECT);
    }
    return r;
}

/* Those of the strategy reshard first. */
static int make_bundles(struct plan *p, struct needs *n, bool together)
{
    uint32_t *order = mem_alloc((p->groups.n + 1) * sizeof *order), n_reshard = 0;
    p->batches.n = p->batch_runs.n = p->bundles.n = 0;
    int r = order == NULL ? RS_ENOMEM : order_groups(p, together, order);
    if (r == 0)
        r = batch_strategy(p, order, PLAN_RESHARD);
    n_reshard = (uint32_t)p->batches.n;
    if (r == 0)
        r = batch_strategy(p, NULL, PLAN_DIRECT);
    for (uint32_t i = 0; i < p->batches.n && r == 0; i++) {
        r = add_to_bundle(p, i, together && i < n_reshard);
        if (i < n_reshard)
            n->n_reshard = (uint32_t)p->bundles.n;
    }
    mem_free(order);
    return r;
}

/* Every taker's domain but those that hold; an upper bound. */
static uint64_t count_needs(const struct plan *p, const struct needs *n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n->n_reshard; i++) {
        const struct plan_bundle *u = &p->bundles.at[i];
        const struct set *takers = &p->sets.at[p->batches.at[u->first_batch].takers];
        for (uint32_t k = 0; k < takers->n; k++)
            sum += k == 0 ||
                   p->ends.at[takers->first + k].domain != p->ends.at[takers->first + k - 1].domain;
        sum += u->n_batches - 1;
    }
    return sum;
}

uint64_t plan_bundle_from = 1 << 19;

/* More needs are refused, since each costs some 250 bytes until the plan is made. */
enum { MOST_NEEDS = 1 << 23 };

static int add_needs(struct plan *p, struct needs *n, uint32_t bundle)
{
    const struct plan_batch *x = &p->batches.at[p->bundles.at[bundle].first_batch];
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
        n->v.at[n->v.n++] = (struct need){.bundle = bundle,
                                          .domain = domain,
                                          .first_end = begin,
                                          .n_ends = takers->first + i - begin,
                                          .device = NONE32,
                                          .from = NONE32,
                                          .via = NONE32};
    }
    return 0;
}

static int order_bundles(const struct plan *p, struct needs *n)
{
    uint64_t *bytes = mem_alloc((n->n_reshard + 1U) * sizeof *bytes);
    n->order = mem_calloc(n->n_reshard + 1U, sizeof *n->order);
    int r = bytes == NULL || n->order == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; r == 0 && i < n->n_reshard; i++)
        bytes[i] = p->bundles.at[i].bytes;
    if (r == 0)
        r = sort_descending(bytes, n->n_reshard, n->order);
    mem_free(bytes);
    return r;
}

/* Without relays a bundle would be sent by its holders to every domain, batch by batch, which saves nothing. */
static int choose_bundles(struct plan *p, struct needs *n)
{
    int r = make_bundles(p, n, false);
    if (r == 0 && p->options.relay && count_needs(p, n) > plan_bundle_from)
        r = make_bundles(p, n, true);
    if (r == 0 && count_needs(p, n) > MOST_NEEDS)
        r = RS_EEXHAUSTED;
    return r;
}

int plan_needs(struct plan *p, struct needs *ret)
{
    memset(ret, 0, sizeof *ret);
    uint32_t n_devices = p->topology->n_devices;
    int r = choose_bundles(p, ret);
    if (r == 0)
        r = order_bundles(p, ret);
    if (r != 0)
        return r;
    ret->first_of_bundle = mem_calloc(ret->n_reshard + 2U, sizeof *ret->first_of_bundle);
    ret->batch_from = mem_alloc((p->batches.n + 1) * sizeof *ret->batch_from);
    ret->domain_ingress = mem_calloc(n_devices + 1U, sizeof *ret->domain_ingress);
    ret->domain_egress = mem_calloc(n_devices + 1U, sizeof *ret->domain_egress);
    if (ret->first_of_bundle == NULL || ret->batch_from == NULL || ret->domain_ingress == NULL ||
        ret->domain_egress == NULL)
        return RS_ENOMEM;
    memset(ret->batch_from, 0xFF, (p->batches.n + 1) * sizeof *ret->batch_from);
    for (uint32_t i = 0; i < ret->n_reshard && r == 0; i++) {
        ret->first_of_bundle[i] = (uint32_t)ret->v.n;
        r = add_needs(p, ret, i);
        ret->first_of_bundle[i + 1] = (uint32_t)ret->v.n;
    }
    return r;
}

void needs_close(struct needs *n)
{
    mem_free(n->v.at);
    mem_free(n->first_of_bundle);
    mem_free(n->batch_from);
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
    g->p->ingress[device] += g->p->bundles.at[x->bundle].bytes;
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
        if (p->ingress[d] + p->bundles.at[x->bundle].bytes <= g->cap)
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

/* Needs by (domain, one taker first, largest bundle first). */
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
            for (uint32_t i = 0; i < g->n->n_reshard; i++) {
                uint32_t bundle = g->n->order[i];
                for (uint32_t x = g->n->first_of_bundle[bundle];
                     x < g->n->first_of_bundle[bundle + 1]; x++)
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
