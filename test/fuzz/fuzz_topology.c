/* Any bytes as a topology file: refused with a reason, or every rank sits on a device that exists.
 */
#include <stdint.h>
#include <stdlib.h>

#include "topology/topology.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_map(const struct topology *t, const struct placement_map *m)
{
    char text[64];
    for (uint32_t r = 0; r < m->n_ranks; r++) {
        int32_t d = m->device[r];
        if (d < TOPOLOGY_NONE || d >= (int64_t)t->n_devices)
            abort();
        if (d >= 0)
            (void)topology_device_text(t, (uint32_t)d, text, sizeof text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct topology_file *f = NULL;
    struct err e = {0};
    int r = topology_from_json((const char *)data, size, &f, &e);
    if ((r == 0) != (f != NULL) || (r != 0 && e.text[0] == '\0'))
        abort();
    if (f == NULL)
        return 0;
    for (uint32_t d = 0; d < f->topology.n_devices; d++)
        if (f->topology.devices[d].domain >= f->topology.n_domains)
            abort();
    check_map(&f->topology, &f->source);
    for (uint32_t i = 0; i < f->n_destinations; i++)
        check_map(&f->topology, &f->destinations[i]);
    topology_file_free(f);
    return 0;
}
