/* Nodes, their devices, and the NVLink domains that group devices; where each rank sits.
 *
 * Pure. Devices are numbered 0 … n_devices-1 in node order, then device order: that index is "the
 * device" in plans. Thread: any, for reading. */
#ifndef RS_TOPOLOGY_TOPOLOGY_H
#define RS_TOPOLOGY_TOPOLOGY_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum {
    TOPOLOGY_MAX_NODES = 1 << 16,
    TOPOLOGY_MAX_DEVICES = 1 << 18,
    TOPOLOGY_NONE = -1,
    TOPOLOGY_ABSENT = -2
};

struct device_place {
    uint32_t node;   /* index into nodes */
    uint32_t local;  /* number within its node */
    uint32_t domain; /* index into domains */
};

struct topology {
    char **nodes; /* names */
    uint32_t n_nodes;
    char **domains; /* names; a node's own name unless told */
    uint32_t n_domains;
    struct device_place *devices;
    uint32_t n_devices;
    double network_bytes_per_s; /* per device and direction; 0: unknown */
    double domain_bytes_per_s;
};

/* Rank to device of one side: device[r], TOPOLOGY_NONE for an unused id. */
struct placement_map {
    int32_t *device;
    uint32_t n_ranks;
};

/* A topology file: the topology and where the ranks of both sides sit. */
struct topology_file {
    struct topology topology;
    struct placement_map source;
    struct placement_map *destinations; /* n_destinations of them */
    char **destination_names; /* layout name each is for; NULL where the file has one plain list */
    uint32_t n_destinations;
};

/* "n1:3" of device d; returns ret_text. */
char *topology_device_text(const struct topology *t, uint32_t device, char *ret_text,
                           size_t capacity);
/* Index of node `name`'s device `local`, or TOPOLOGY_NONE. */
int32_t topology_find(const struct topology *t, const char *name, uint32_t local);
void topology_close(struct topology *t);

/* topology_json.c: parses a topology file (config/FORMATS.md). RS_EINVAL names node, key or rank. */
int topology_from_json(const char *text, size_t n_bytes, struct topology_file **ret, struct err *e);
void topology_file_free(struct topology_file *f);

#endif
