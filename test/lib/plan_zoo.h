/* Builds layouts, topologies and plan inputs in memory, for planner tests and the planner's
 * benchmark.
 *
 * A case owns all that its input points to; case_close frees it. Builders abort on bad arguments:
 * they are test code. */
#ifndef RS_TEST_PLAN_ZOO_H
#define RS_TEST_PLAN_ZOO_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "plan/planner.h"
#include "topology/topology.h"

enum { CASE_MAX_DESTINATIONS = 4 };

struct zoo_case {
    struct layout *source;
    struct layout *destinations[CASE_MAX_DESTINATIONS];
    int32_t *source_device;
    int32_t *destination_device[CASE_MAX_DESTINATIONS];
    struct topology topology;
    struct plan_input input;
};

static inline struct layout *case_layout(const char *name, uint32_t n_ranks)
{
    struct layout *l = layout_new();
    rs_assert(l != NULL);
    l->name = mem_strdup(name);
    l->n_ranks = n_ranks;
    return l;
}

/* A mesh of n_dims with shape, and ranks first, first + step, … where `ranks` is NULL. Returns its
 * index. */
static inline int32_t case_mesh(struct layout *l, uint8_t n_dims, const uint32_t *shape,
                                const uint32_t *ranks, uint32_t first, uint32_t step)
{
    l->meshes = mem_realloc(l->meshes, (l->n_meshes + 1) * sizeof *l->meshes);
    struct mesh *m = &l->meshes[l->n_meshes];
    memset(m, 0, sizeof *m);
    m->name = mem_printf("m%u", l->n_meshes);
    m->n_dims = n_dims;
    m->n_ranks = 1;
    for (uint8_t i = 0; i < n_dims; i++) {
        m->shape[i] = shape[i];
        m->n_ranks *= shape[i];
    }
    m->ranks = mem_calloc(m->n_ranks, sizeof *m->ranks);
    for (uint32_t i = 0; i < m->n_ranks; i++)
        m->ranks[i] = ranks != NULL ? ranks[i] : first + i * step;
    return (int32_t)l->n_meshes++;
}

/* placements: one character per mesh dim, 'R' or the digit of the tensor dim. */
static inline struct tensor *case_tensor(struct layout *l, const char *name, enum dtype dtype,
                                         uint8_t n_dims, const uint64_t *shape, int32_t mesh,
                                         const char *placements)
{
    if ((l->n_tensors & (l->n_tensors - 1)) == 0) /* grows at powers of two */
        l->tensors = mem_realloc(l->tensors,
                                 (l->n_tensors == 0 ? 1 : 2 * l->n_tensors) * sizeof *l->tensors);
    struct tensor *t = &l->tensors[l->n_tensors++];
    memset(t, 0, sizeof *t);
    t->name = mem_strdup(name);
    t->dtype = dtype;
    t->n_dims = n_dims;
    if (n_dims > 0)
        memcpy(t->shape, shape, n_dims * sizeof *shape);
    t->mesh = mesh;
    for (uint8_t i = 0; placements != NULL && placements[i] != '\0'; i++)
        t->placements[i] = placements[i] == 'R' ? LAYOUT_REPLICATE : (int8_t)(placements[i] - '0');
    for (uint8_t i = 0; i < LAYOUT_MAX_MESH_DIMS; i++)
        t->shard_order[i] = i;
    return t;
}

static inline void case_region(struct tensor *t, uint32_t rank, const uint64_t *offset,
                               const uint64_t *size)
{
    t->mesh = -1;
    t->regions = mem_realloc(t->regions, (t->n_regions + 1) * sizeof *t->regions);
    struct region *r = &t->regions[t->n_regions++];
    memset(r, 0, sizeof *r);
    r->rank = rank;
    r->box.n_dims = t->n_dims;
    memcpy(r->box.offset, offset, t->n_dims * sizeof *offset);
    memcpy(r->box.size, size, t->n_dims * sizeof *size);
}

/* Nodes of `per_node` devices; node i is in domain i / nodes_per_domain. */
static inline void case_topology(struct zoo_case *c, uint32_t n_nodes, uint32_t per_node,
                                 uint32_t nodes_per_domain)
{
    struct topology *t = &c->topology;
    t->n_nodes = n_nodes;
    t->n_domains = (n_nodes - 1) / nodes_per_domain + 1;
    t->n_devices = n_nodes * per_node;
    t->nodes = mem_calloc(n_nodes, sizeof *t->nodes);
    t->domains = mem_calloc(t->n_domains, sizeof *t->domains);
    t->devices = mem_calloc(t->n_devices, sizeof *t->devices);
    for (uint32_t i = 0; i < n_nodes; i++)
        t->nodes[i] = mem_printf("n%u", i);
    for (uint32_t i = 0; i < t->n_domains; i++)
        t->domains[i] = mem_printf("d%u", i);
    for (uint32_t d = 0; d < t->n_devices; d++)
        t->devices[d] =
            (struct device_place){d / per_node, d % per_node, d / per_node / nodes_per_domain};
    t->network_bytes_per_s = 50e9;
    t->domain_bytes_per_s = 400e9;
}

static inline int32_t *case_devices(uint32_t n, uint32_t first)
{
    int32_t *d = mem_calloc(n + 1, sizeof *d);
    for (uint32_t i = 0; i < n; i++)
        d[i] = (int32_t)(first + i);
    return d;
}

/* Checks the layouts (canonical order, digests) and fills c->input. Rank r of the source sits on
 * device first_source + r, of destination k on first_destination[k] + r. */
static inline void case_finish(struct zoo_case *c, uint32_t first_source,
                               const uint32_t *first_destination)
{
    struct err e = {0};
    uint32_t n = 0;
    if (layout_check(c->source, &e) != 0 || layout_digest(c->source) != 0)
        fprintf(stderr, "%s\n", e.text), abort();
    c->source_device = case_devices(c->source->n_ranks, first_source);
    for (; n < CASE_MAX_DESTINATIONS && c->destinations[n] != NULL; n++) {
        if (layout_check(c->destinations[n], &e) != 0 || layout_digest(c->destinations[n]) != 0)
            fprintf(stderr, "%s\n", e.text), abort();
        c->destination_device[n] = case_devices(c->destinations[n]->n_ranks, first_destination[n]);
    }
    c->input = (struct plan_input){
        .source = c->source,
        .source_device = c->source_device,
        .n_destinations = n,
        .destinations = (const struct layout *const *)c->destinations,
        .destination_device = (const int32_t *const *)c->destination_device,
        .topology = &c->topology,
        .options = plan_options_default(),
    };
}

static inline void case_close(struct zoo_case *c)
{
    layout_free(c->source);
    mem_free(c->source_device);
    for (unsigned i = 0; i < CASE_MAX_DESTINATIONS; i++) {
        layout_free(c->destinations[i]);
        mem_free(c->destination_device[i]);
    }
    for (uint32_t i = 0; i < c->topology.n_nodes; i++)
        mem_free(c->topology.nodes[i]);
    for (uint32_t i = 0; i < c->topology.n_domains; i++)
        mem_free(c->topology.domains[i]);
    mem_free(c->topology.nodes);
    mem_free(c->topology.domains);
    mem_free(c->topology.devices);
    memset(c, 0, sizeof *c);
}

#endif
