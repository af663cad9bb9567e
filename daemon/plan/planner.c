#include "plan/planner.h"

#include <string.h>

#include "plan/plan_broadcast.h"
#include "plan/plan_private.h"

#include "base/banned.h"

enum { LEAST_CHUNK_BYTES = 16 };

static int check_options(const struct plan_options *o, struct err *e)
{
    if (o->chunk_bytes < LEAST_CHUNK_BYTES || o->chunk_bytes > INT64_MAX / 64)
        return err_set(e, RS_EINVAL, "chunk_bytes is %llu; use %d … 2^57",
                       (unsigned long long)o->chunk_bytes, LEAST_CHUNK_BYTES);
    if (o->ring_slots == 0)
        return err_set(e, RS_EINVAL, "ring_slots is 0; use at least 1");
    if ((unsigned)o->strategy > PLAN_GATHER_BROADCAST)
        return err_set(e, RS_EINVAL, "unknown strategy %d", (int)o->strategy);
    for (uint32_t i = 0; i < o->n_rules; i++)
        if (o->rules[i].glob == NULL || (unsigned)o->rules[i].strategy > PLAN_GATHER_BROADCAST)
            return err_set(e, RS_EINVAL, "rule %u has no glob or an unknown strategy", i);
    return 0;
}

static int copy_options(struct plan *p, const struct plan_options *o)
{
    p->options = *o;
    p->options.rules = NULL;
    p->options.n_rules = 0;
    if (o->n_rules == 0)
        return 0;
    struct plan_rule *rules = mem_calloc(o->n_rules, sizeof *rules);
    if (rules == NULL)
        return RS_ENOMEM;
    p->options.rules = rules;
    for (uint32_t i = 0; i < o->n_rules; i++) {
        rules[i].strategy = o->rules[i].strategy;
        rules[i].glob = mem_strdup(o->rules[i].glob);
        if (rules[i].glob == NULL)
            return RS_ENOMEM;
        p->options.n_rules = i + 1;
    }
    return 0;
}

/* Sites: devices with equal node and domain, numbered by (domain, node). Devices stand in node
 * order, so inside a domain a site's devices are neighbours. */
static int find_sites(struct plan *p)
{
    const struct topology *t = p->topology;
    uint32_t n = t->n_devices, site = 0;
    uint32_t *domain = mem_alloc((n + 1U) * sizeof *domain);
    uint32_t *order = mem_alloc((n + 1U) * sizeof *order);
    int r = domain == NULL || order == NULL ? RS_ENOMEM : 0;
    for (uint32_t d = 0; r == 0 && d < n; d++)
        domain[d] = t->devices[d].domain;
    if (r == 0)
        r = sort_count(domain, NULL, n, t->n_domains, order);
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        const struct device_place *a = &t->devices[order[i]];
        if (i > 0) {
            const struct device_place *b = &t->devices[order[i - 1]];
            site += a->domain != b->domain || a->node != b->node;
        }
        p->device_site[order[i]] = site;
    }
    mem_free(domain);
    mem_free(order);
    return r;
}

static int check_topology(const struct topology *t, struct err *e)
{
    for (uint32_t d = 0; d < t->n_devices; d++) {
        if (t->devices[d].domain >= t->n_domains || t->devices[d].node >= t->n_nodes)
            return err_set(e, RS_EINVAL, "device %u has no node or no domain", d);
        if (d > 0 && t->devices[d].node < t->devices[d - 1].node)
            return err_set(e, RS_EINVAL, "devices are not in the order of their nodes");
    }
    return 0;
}

/* Domain links in eighths of a network link; 8 times as fast where the rates are not known. */
static uint32_t domain_speed(const struct topology *t)
{
    if (!(t->network_bytes_per_s > 0) || !(t->domain_bytes_per_s > 0))
        return 64;
    double eighths = t->domain_bytes_per_s / t->network_bytes_per_s * 8;
    return eighths < 1 ? 1 : eighths > 1024 ? 1024 : (uint32_t)eighths;
}

static int start(struct plan *p, const struct plan_input *input, struct err *e)
{
    const struct topology *t = input->topology;
    p->source = input->source;
    p->topology = t;
    p->n_destinations = input->n_destinations;
    p->domain_speed = domain_speed(t);
    p->device_site = mem_calloc(t->n_devices + 1U, sizeof *p->device_site);
    p->egress = mem_calloc(t->n_devices + 1U, sizeof *p->egress);
    p->ingress = mem_calloc(t->n_devices + 1U, sizeof *p->ingress);
    p->destinations = mem_calloc(input->n_destinations + 1U, sizeof(struct layout *));
    if (p->device_site == NULL || p->egress == NULL || p->ingress == NULL ||
        p->destinations == NULL || copy_options(p, &input->options) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < input->n_destinations; i++)
        p->destinations[i] = input->destinations[i];
    if (find_sites(p) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    return 0;
}

/* Who takes in and who sends each run of the reshard strategy, and what that makes of edges. */
static int assign(struct plan *p, struct err *e)
{
    struct needs n;
    int r = plan_needs(p, &n);
    if (r == 0)
        r = plan_ingest(p, &n);
    if (r == 0)
        r = plan_senders(p, &n);
    if (r == RS_EEXHAUSTED)
        err_set(
            e, r,
            "the source cuts its tensors so finely, and so many domains need the pieces, that "
            "the plan would have millions of transfers: shard the source over fewer ranks, with "
            "replicas, or give these tensors the strategy gather-broadcast by a rule");
    else if (r != 0)
        err_set(e, r, "out of memory");
    else
        r = plan_edges(p, &n, e);
    needs_close(&n);
    return r;
}

static int finish(struct plan *p, struct err *e)
{
    int r = plan_count(p);
    if (r == 0)
        r = plan_digest(p, p->totals.digest);
    return r == 0 ? 0 : err_set(e, r, "out of memory");
}

int plan_make(const struct plan_input *input, struct plan **ret, struct err *e)
{
    int r = check_options(&input->options, e);
    if (r == 0)
        r = check_topology(input->topology, e);
    if (r != 0)
        return r;
    struct plan *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    r = start(p, input, e);
    if (r == 0 && plan_derive(p) != 0)
        r = err_set(e, RS_ENOMEM, "out of memory");
    if (r == 0)
        r = plan_classes(p, input, e);
    if (r == 0)
        r = plan_runs(p, e);
    if (r == 0)
        r = assign(p, e);
    if (r == 0)
        r = plan_rounds(p, e);
    if (r == 0)
        r = plan_broadcast(p, e);
    if (r == 0)
        r = finish(p, e);
    if (r != 0) {
        plan_free(p);
        return r;
    }
    *ret = p;
    return 0;
}
