#include "service/nodes.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "service/attempt_input.h"
#include "service/release.h"

#include "base/banned.h"

void nodes_domains_free(char **domains, uint32_t n)
{
    for (uint32_t i = 0; domains != NULL && i < n; i++)
        mem_free(domains[i]);
    mem_free(domains);
}

/* Device i's domain as the data plane found it: a fabric's has the same name on all of its nodes. */
static char *found_domain(const struct config *config, const struct link_about *about, uint32_t i)
{
    const struct wire_ready_device *d = &about->devices[i];
    bool one = true;
    for (uint32_t k = 0; k < about->n_devices; k++)
        one = one && about->devices[k].island == d->island && about->devices[k].fabric[0] == '\0';
    if (d->fabric[0] != '\0')
        return mem_printf("fabric %s", d->fabric);
    return one ? mem_strdup("") : mem_printf("%s/%u", config->node, d->island);
}

static char *own_domain(const struct config *config, const struct link_about *about, uint32_t i)
{
    if (config->domains[0] == '\0' && about != NULL && about->nccl_version != 0 &&
        about->n_devices == config->devices)
        return found_domain(config, about, i);
    return config->n_domains == 1 ? mem_strdup("")
                                  : mem_printf("%s/%u", config->node, config->domain_of_device[i]);
}

const char *nodes_domains_text(const struct config *config, char *const *domains, char *ret,
                               size_t capacity)
{
    size_t at = 0;
    ret[0] = '\0';
    for (uint32_t i = 0, end; i < config->devices && at < capacity; i = end) {
        for (end = i + 1; end < config->devices && strcmp(domains[end], domains[i]) == 0;)
            end++;
        int n = snprintf(ret + at, capacity - at, "%s%s: %u-%u", i > 0 ? "; " : "",
                         domains[i][0] != '\0' ? domains[i] : config->node, i, end - 1);
        at += n > 0 ? (size_t)n : 0;
    }
    return ret;
}

char **nodes_own_domains(const struct config *config, const struct link_about *about)
{
    char **domains = mem_calloc(config->devices, sizeof(char *));
    for (uint32_t i = 0; domains != NULL && i < config->devices; i++) {
        domains[i] = own_domain(config, about, i);
        if (domains[i] == NULL) {
            nodes_domains_free(domains, i);
            return NULL;
        }
    }
    return domains;
}

void nodes_look(const struct coordinator *c, uint32_t node, struct peer_view *ret)
{
    const struct service *s = c->service;
    if (node != s->node) {
        c->look(s, node, ret);
        return;
    }
    *ret = (struct peer_view){
        .state = PEER_HERE,
        .name = s->config->node,
        .incarnation = s->incarnation,
        .n_devices = s->config->devices,
        .domain_of_device = (const char *const *)c->own_domains,
        .data_address = s->config->data_address,
        .release = RESHARD_RELEASE,
        .why = "",
    };
}

/* --- topologies --------------------------------------------------------------------------------- */

/* The index of a domain, added where it is new; UINT32_MAX: no memory. */
static uint32_t domain_index(struct topology *t, const char *name)
{
    for (uint32_t i = t->n_domains;
         i-- > 0;) /* the newest first: devices of a domain stand together */
        if (strcmp(t->domains[i], name) == 0)
            return i;
    if ((t->domains[t->n_domains] = mem_strdup(name)) == NULL)
        return UINT32_MAX;
    return t->n_domains++;
}

static bool node_put(struct topology *t, const struct peer_view *v)
{
    uint32_t node = t->n_nodes;
    if ((t->nodes[node] = mem_strdup(v->name)) == NULL)
        return false;
    t->n_nodes++;
    for (uint32_t i = 0; i < v->n_devices; i++) {
        const char *domain = v->domain_of_device[i];
        uint32_t index = domain_index(t, domain[0] != '\0' ? domain : v->name);
        if (index == UINT32_MAX)
            return false;
        t->devices[t->n_devices++] =
            (struct device_place){.node = node, .local = i, .domain = index};
    }
    return true;
}

struct topology *nodes_topology(const struct coordinator *c, const uint32_t *nodes, uint32_t n)
{
    const struct config *config = c->service->config;
    struct topology *t = mem_zalloc(sizeof *t);
    struct peer_view v;
    size_t n_devices = 0;
    for (uint32_t i = 0; i < n; i++) {
        nodes_look(c, nodes[i], &v);
        n_devices += v.n_devices;
    }
    if (t == NULL)
        return NULL;
    t->nodes = mem_calloc(n, sizeof(char *));
    t->domains = mem_calloc(n_devices, sizeof(char *)); /* at most one per device */
    t->devices = mem_calloc(n_devices, sizeof *t->devices);
    bool ok = t->nodes != NULL && t->domains != NULL && t->devices != NULL;
    for (uint32_t i = 0; ok && i < n; i++) {
        nodes_look(c, nodes[i], &v);
        ok = node_put(t, &v);
    }
    t->network_bytes_per_s = config->network_gbytes_per_s * 1e9;
    t->domain_bytes_per_s = config->domain_gbytes_per_s * 1e9;
    if (ok)
        return t;
    topology_free(t);
    return NULL;
}
