#include "topology/topology.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

char *topology_device_text(const struct topology *t, uint32_t device, char *ret_text,
                           size_t capacity)
{
    const struct device_place *p = &t->devices[device];
    (void)snprintf(ret_text, capacity, "%s:%" PRIu32, t->nodes[p->node], p->local);
    return ret_text;
}

/* The first device of a node: devices stand in node order. */
static uint32_t first_device(const struct topology *t, uint32_t node)
{
    uint32_t low = 0, high = t->n_devices;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (t->devices[middle].node < node)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int32_t topology_find(const struct topology *t, const char *name, uint32_t local)
{
    for (uint32_t node = 0; node < t->n_nodes; node++) {
        if (strcmp(t->nodes[node], name) != 0)
            continue;
        uint64_t device = (uint64_t)first_device(t, node) + local;
        bool there = device < t->n_devices && t->devices[device].node == node;
        return there ? (int32_t)device : TOPOLOGY_NONE;
    }
    return TOPOLOGY_NONE;
}

static void free_names(char **names, uint32_t n)
{
    for (uint32_t i = 0; names != NULL && i < n; i++)
        mem_free(names[i]);
    mem_free(names);
}

void topology_close(struct topology *t)
{
    free_names(t->nodes, t->n_nodes);
    free_names(t->domains, t->n_domains);
    mem_free(t->devices);
    *t = (struct topology){0};
}

void topology_file_free(struct topology_file *f)
{
    if (f == NULL)
        return;
    topology_close(&f->topology);
    mem_free(f->source.device);
    for (uint32_t i = 0; f->destinations != NULL && i < f->n_destinations; i++)
        mem_free(f->destinations[i].device);
    mem_free(f->destinations);
    free_names(f->destination_names, f->n_destinations);
    mem_free(f);
}
