/* Totals of a finished plan, and the numbers of its transfers. */
#include <string.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"

#include "base/banned.h"

/* --- runs ------------------------------------------------------------------------------------- */

/* Bytes per tier from one look at each run: edges, and copies inside sites by counting takers. */
static void count_site(struct plan *p, uint64_t bytes, uint32_t to_device, uint32_t first,
                       uint32_t n, bool arrives)
{
    uint32_t same = 0;
    for (uint32_t i = 0; i < n; i++)
        same += p->ends.at[first + i].device == to_device;
    uint32_t own = arrives && same > 0 ? 1 : 0; /* that one is the edge itself */
    p->totals.device_bytes += (same - own) * bytes;
    p->totals.domain_bytes += (n - same) * bytes;
}

static void count_edge(struct plan *p, const struct plan_edge *e)
{
    uint64_t bytes = plan_edge_bytes(p, e);
    if (e->tier == TIER_NETWORK) {
        p->totals.network_bytes += bytes;
        p->egress[e->from] += bytes;
        p->ingress[e->to] += bytes;
    } else {
        p->totals.domain_bytes += bytes;
    }
    if (e->hops > p->totals.max_relay_depth)
        p->totals.max_relay_depth = e->hops;
    if (e->taker != NONE32)
        return;
    const struct set *takers = &p->sets.at[p->batches.at[e->first_batch].takers];
    uint32_t first,
        n = set_site(p, takers, p->topology->devices[e->to].domain, p->device_site[e->to], &first);
    count_site(p, bytes, e->to, first, n, !e->staging);
}

/* Takers whose site holds the cell: on a holder's device or beside it. */
static void count_local(struct plan *p, const struct plan_run *r)
{
    const struct plan_group *g = &p->groups.at[r->group];
    const struct set *takers = &p->sets.at[g->takers], *source = &p->sets.at[g->source];
    uint32_t first = 0, n = 0;
    for (uint32_t i = takers->first; i < takers->first + takers->n; i++) {
        const struct end *t = &p->ends.at[i];
        if (i == takers->first || p->ends.at[i - 1].site != t->site)
            n = set_site(p, source, t->domain, t->site, &first);
        if (n == 0)
            continue;
        bool same = false;
        for (uint32_t k = 0; k < n; k++)
            same = same || p->ends.at[first + k].device == t->device;
        if (same)
            p->totals.device_bytes += r->bytes;
        else
            p->totals.domain_bytes += r->bytes;
    }
}

static void count_runs(struct plan *p)
{
    for (uint32_t i = 0; i < p->edges.n; i++)
        count_edge(p, &p->edges.at[i]);
    for (uint32_t i = 0; i < p->runs.n; i++)
        count_local(p, &p->runs.at[i]);
    for (uint32_t i = 0; i < p->groups.n; i++)
        p->totals.destination_bytes += p->groups.at[i].bytes * p->sets.at[p->groups.at[i].takers].n;
    for (uint32_t i = 0; i < p->legs.n; i++) {
        uint32_t round = leg_last_round(p, &p->legs.at[i]);
        if (round + 1 > p->totals.n_rounds)
            p->totals.n_rounds = round + 1;
    }
}

/* --- transfer numbers ------------------------------------------------------------------------- */

/* Transfers of a member of the shape, ingests into staging aside: one per taker of each piece. */
static uint64_t shape_transfers(const struct plan *p, const struct plan_shape *s)
{
    const struct plan_class *c = &p->classes.at[s->class];
    uint64_t n = 0;
    for (uint32_t cell = 0; cell < c->n_cells; cell++) {
        uint32_t pieces = 1;
        if (s->first_piece != NONE32)
            pieces = p->pieces.at[s->first_piece + cell + 1] - p->pieces.at[s->first_piece + cell];
        n += (uint64_t)pieces * p->sets.at[p->groups.at[c->first_group + cell].takers].n;
    }
    return n;
}

static void count_staging(struct plan *p)
{
    for (uint32_t i = 0; i < p->edges.n; i++) {
        const struct plan_edge *e = &p->edges.at[i];
        const struct plan_batch *first = &p->batches.at[e->first_batch];
        const struct plan_batch *last = first + e->n_batches - 1;
        if (!e->staging)
            continue;
        for (uint32_t k = first->first_run; k < last->first_run + last->n_runs; k++) {
            const struct plan_run *r = &p->runs.at[p->batch_runs.at[k]];
            for (uint32_t m = r->member; m < r->member + r->count; m++)
                p->units.at[p->members.at[m]].first_transfer++;
        }
    }
}

/* Each unit's number of transfers, then the sums before it. */
static int number_transfers(struct plan *p)
{
    uint64_t *of_shape = mem_calloc(p->shapes.n + 1, sizeof *of_shape);
    if (of_shape == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < p->shapes.n; i++)
        of_shape[i] = shape_transfers(p, &p->shapes.at[i]);
    count_staging(p);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < p->units.n; i++) {
        struct plan_unit *u = &p->units.at[i];
        const struct plan_class *c = &p->classes.at[p->shapes.at[u->shape].class];
        uint64_t n = c->strategy == PLAN_GATHER_BROADCAST ? plan_broadcast_count(p, i)
                                                          : u->first_transfer + of_shape[u->shape];
        u->first_transfer = sum;
        sum += n;
    }
    p->totals.transfers = sum;
    mem_free(of_shape);
    return 0;
}

/* --- the busiest device ----------------------------------------------------------------------- */

static void find_busiest(struct plan *p)
{
    struct plan_totals *t = &p->totals;
    for (uint32_t d = 0; d < p->topology->n_devices; d++) {
        if (p->egress[d] > t->busiest_bytes) {
            t->busiest_bytes = p->egress[d];
            t->busiest_device = d;
            t->busiest_egress = true;
        }
        if (p->ingress[d] > t->busiest_bytes) {
            t->busiest_bytes = p->ingress[d];
            t->busiest_device = d;
            t->busiest_egress = false;
        }
    }
}

/* Where nothing crosses the network the domain tier is looked at: what a device reads from its
 * site's others, and gives to them. The bound there is the same with devices instead of domains. */
static int find_busiest_inside(struct plan *p)
{
    uint32_t n = p->topology->n_devices;
    uint64_t *out = mem_calloc(n + 1U, sizeof *out), *in = mem_calloc(n + 1U, sizeof *in);
    struct hops h = {0};
    struct plan_totals *t = &p->totals;
    int r = out == NULL || in == NULL ? RS_ENOMEM : 0;
    for (uint32_t i = 0; i < p->runs.n && r == 0; i++) {
        r = plan_run_hops(p, i, &h);
        for (uint32_t k = 0; k < h.v.n && r == 0; k++) {
            if (h.v.at[k].tier != TIER_DOMAIN)
                continue;
            out[h.v.at[k].from_device] += p->runs.at[i].bytes;
            in[h.v.at[k].to_device] += p->runs.at[i].bytes;
        }
    }
    for (uint32_t d = 0; d < n && r == 0; d++) {
        uint64_t most = out[d] > in[d] ? out[d] : in[d];
        if (in[d] > t->lower_bound)
            t->lower_bound = in[d]; /* what it needs and has not: no plan can do with less */
        if (most > t->busiest_bytes) {
            t->busiest_bytes = most;
            t->busiest_device = d;
            t->busiest_egress = out[d] >= in[d];
        }
    }
    hops_close(&h);
    mem_free(out);
    mem_free(in);
    return r;
}

int plan_count(struct plan *p)
{
    size_t bytes = (p->topology->n_devices + 1U) * sizeof *p->egress;
    memset(p->egress, 0, bytes);
    memset(p->ingress, 0, bytes);
    count_runs(p);
    int r = plan_broadcast_totals(p);
    if (r == 0)
        r = number_transfers(p);
    find_busiest(p);
    if (r == 0 && p->totals.network_bytes == 0)
        r = find_busiest_inside(p);
    return r;
}
