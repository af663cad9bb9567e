/* The topology file (config/FORMATS.md): nodes, domains, and the device of each rank. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/mem.h"
#include "topology/topology.h"

#include "base/banned.h"

enum {
    MAX_JSON_BYTES = 1 << 26,
    MAX_JSON_VALUES = 1 << 23,
    MAX_DEPTH = 8,
    MAX_NAME_BYTES = 512,
    MAX_RANKS = 1 << 20,
    MAX_DESTINATIONS = 1 << 10
};

/* Nodes by name, with the number of each one's first device. */
struct node_entry {
    const char *name;
    uint32_t node;
};

struct decoder {
    struct topology_file *f;
    struct err *e;
    struct node_entry *by_name;
    uint32_t *first_device; /* [node], and one more: the number of all devices */
};

static int check_keys(const json_t *object, const char *const *known, const char *list,
                      struct err *e)
{
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return err_set(e, RS_EINVAL, "must be an object with %s", list);
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (known[i] != NULL && strcmp(known[i], key) != 0)
            i++;
        if (known[i] == NULL)
            return err_set(e, RS_EINVAL, "unknown key '%.100s'; there are: %s", key, list);
    }
    return 0;
}

static bool name_valid(const char *name)
{
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7F)
            return false;
    return n > 0 && n <= MAX_NAME_BYTES;
}

static int copy_name(const json_t *value, const char *key, char **ret, struct err *e)
{
    const char *text = json_string_value(value);
    if (text == NULL)
        return err_set(e, RS_EINVAL, "key '%s' is missing or no string", key);
    if (!name_valid(text))
        return err_set(e, RS_EINVAL, "key '%s' must be 1 to %d printable bytes", key,
                       MAX_NAME_BYTES);
    *ret = mem_strdup(text);
    return *ret == NULL ? RS_ENOMEM : 0;
}

/* --- nodes and domains --------------------------------------------------- */

static int compare_entry(const void *a, const void *b)
{
    const struct node_entry *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : (x->node > y->node) - (x->node < y->node);
}

static int compare_entry_key(const void *name, const void *entry)
{
    return strcmp(name, ((const struct node_entry *)entry)->name);
}

static int decode_node(struct decoder *c, const json_t *object, uint32_t i)
{
    static const char *const keys[] = {"name", "devices", "domain", NULL};
    struct topology *t = &c->f->topology;
    int r = check_keys(object, keys, "name, devices, domain", c->e);
    if (r == 0)
        r = copy_name(json_object_get(object, "name"), "name", &t->nodes[i], c->e);
    if (r != 0)
        return err_prefix(c->e, r, "node %" PRIu32 " of the list", i);
    const json_t *devices = json_object_get(object, "devices");
    int64_t n = json_is_integer(devices) ? json_integer_value(devices) : 0;
    if (n < 1 || n > TOPOLOGY_MAX_DEVICES - c->first_device[i])
        return err_set(
            c->e, RS_EINVAL,
            "node '%s': key 'devices' must be an integer from 1; all nodes together have "
            "at most %d",
            t->nodes[i], TOPOLOGY_MAX_DEVICES);
    c->first_device[i + 1] = c->first_device[i] + (uint32_t)n;
    const json_t *domain = json_object_get(object, "domain");
    if (domain != NULL && (!json_is_string(domain) || !name_valid(json_string_value(domain))))
        return err_set(c->e, RS_EINVAL, "node '%s': key 'domain' must be a name", t->nodes[i]);
    return 0;
}

static int check_node_names(struct decoder *c)
{
    struct topology *t = &c->f->topology;
    for (uint32_t i = 0; i < t->n_nodes; i++)
        c->by_name[i] = (struct node_entry){t->nodes[i], i};
    qsort(c->by_name, t->n_nodes, sizeof *c->by_name, compare_entry);
    for (uint32_t i = 1; i < t->n_nodes; i++)
        if (strcmp(c->by_name[i - 1].name, c->by_name[i].name) == 0)
            return err_set(c->e, RS_EINVAL, "node '%s' is listed twice", c->by_name[i].name);
    return 0;
}

static const char *domain_name(const struct topology *t, const json_t *list, uint32_t node)
{
    const json_t *domain = json_object_get(json_array_get(list, node), "domain");
    return domain == NULL ? t->nodes[node] : json_string_value(domain);
}

/* Numbers domains in the order of their first node, and fills in the devices of each node. */
static int fill_devices(struct decoder *c, const json_t *list, struct node_entry *wanted,
                        uint32_t *domain_of)
{
    struct topology *t = &c->f->topology;
    for (uint32_t i = 0; i < t->n_nodes; i++)
        wanted[i] = (struct node_entry){domain_name(t, list, i), i};
    qsort(wanted, t->n_nodes, sizeof *wanted, compare_entry);
    for (uint32_t i = 0; i < t->n_nodes; i++) /* the first node of its domain, for now */
        domain_of[wanted[i].node] = i > 0 && strcmp(wanted[i - 1].name, wanted[i].name) == 0
                                        ? domain_of[wanted[i - 1].node]
                                        : wanted[i].node;
    for (uint32_t i = 0; i < t->n_nodes; i++) {
        if (domain_of[i] != i) {
            domain_of[i] = domain_of[domain_of[i]]; /* a lower node, numbered already */
            continue;
        }
        t->domains[t->n_domains] = mem_strdup(domain_name(t, list, i));
        if (t->domains[t->n_domains] == NULL)
            return RS_ENOMEM;
        domain_of[i] = t->n_domains++;
    }
    for (uint32_t i = 0; i < t->n_nodes; i++)
        for (uint32_t d = c->first_device[i]; d < c->first_device[i + 1]; d++)
            t->devices[d] = (struct device_place){i, d - c->first_device[i], domain_of[i]};
    return 0;
}

static int make_devices(struct decoder *c, const json_t *list)
{
    struct topology *t = &c->f->topology;
    uint32_t n_devices = c->first_device[t->n_nodes];
    struct node_entry *wanted = mem_calloc(t->n_nodes, sizeof *wanted);
    uint32_t *domain_of = mem_calloc(t->n_nodes, sizeof *domain_of);
    t->domains = mem_calloc(t->n_nodes, sizeof *t->domains);
    t->devices = mem_calloc(n_devices, sizeof *t->devices);
    int r = RS_ENOMEM;
    if (wanted != NULL && domain_of != NULL && t->domains != NULL && t->devices != NULL) {
        t->n_devices = n_devices;
        r = fill_devices(c, list, wanted, domain_of);
    }
    mem_free(domain_of);
    mem_free(wanted);
    return r;
}

static int decode_nodes(struct decoder *c, const json_t *root)
{
    const json_t *list = json_object_get(root, "nodes");
    struct topology *t = &c->f->topology;
    size_t n = json_array_size(list);
    if (n == 0)
        return err_set(c->e, RS_EINVAL, "key 'nodes' must be a list with at least one node");
    if (n > TOPOLOGY_MAX_NODES)
        return err_set(c->e, RS_EEXHAUSTED, "%zu nodes are more than %d", n, TOPOLOGY_MAX_NODES);
    t->nodes = mem_calloc(n, sizeof *t->nodes);
    c->by_name = mem_calloc(n, sizeof *c->by_name);
    c->first_device = mem_calloc(n + 1, sizeof *c->first_device);
    if (t->nodes == NULL || c->by_name == NULL || c->first_device == NULL)
        return RS_ENOMEM;
    t->n_nodes = (uint32_t)n;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < t->n_nodes; i++)
        r = decode_node(c, json_array_get(list, i), i);
    if (r == 0)
        r = check_node_names(c);
    return r == 0 ? make_devices(c, list) : r;
}

/* --- ranks --------------------------------------------------------------- */

/* "node:3": the device, or TOPOLOGY_NONE. The name may have colons itself. */
static int32_t find_device(const struct decoder *c, const char *text)
{
    char name[MAX_NAME_BYTES + 1];
    const char *colon = strrchr(text, ':');
    if (colon == NULL || (size_t)(colon - text) > MAX_NAME_BYTES)
        return TOPOLOGY_NONE;
    size_t digits = strspn(colon + 1, "0123456789");
    if (digits == 0 || digits > 7 || colon[1 + digits] != '\0')
        return TOPOLOGY_NONE;
    memcpy(name, text, (size_t)(colon - text));
    name[colon - text] = '\0';
    const struct node_entry *found =
        bsearch(name, c->by_name, c->f->topology.n_nodes, sizeof *c->by_name, compare_entry_key);
    unsigned long local = strtoul(colon + 1, NULL, 10);
    if (found == NULL || local >= c->first_device[found->node + 1] - c->first_device[found->node])
        return TOPOLOGY_NONE;
    return (int32_t)(c->first_device[found->node] + local);
}

static int decode_map(struct decoder *c, const json_t *list, struct placement_map *m)
{
    if (!json_is_array(list))
        return err_set(c->e, RS_EINVAL, "must be a list of devices, one per rank");
    size_t n = json_array_size(list);
    if (n > MAX_RANKS)
        return err_set(c->e, RS_EEXHAUSTED, "%zu ranks are more than %d", n, MAX_RANKS);
    m->device = mem_calloc(n, sizeof *m->device);
    if (m->device == NULL)
        return RS_ENOMEM;
    m->n_ranks = (uint32_t)n;
    for (uint32_t rank = 0; rank < m->n_ranks; rank++) {
        const json_t *value = json_array_get(list, rank);
        const char *text = json_string_value(value);
        m->device[rank] = text == NULL ? TOPOLOGY_NONE : find_device(c, text);
        if (text == NULL && !json_is_null(value))
            return err_set(c->e, RS_EINVAL,
                           "rank %" PRIu32 ": must be a device like \"%.40s:0\", or null", rank,
                           c->f->topology.nodes[0]);
        if (text != NULL && m->device[rank] == TOPOLOGY_NONE)
            return err_set(c->e, RS_EINVAL,
                           "rank %" PRIu32 ": there is no device '%.100s'; write node:number", rank,
                           text);
    }
    return 0;
}

static int decode_named(struct decoder *c, const char *name, const json_t *list)
{
    struct topology_file *f = c->f;
    uint32_t i = f->n_destinations++;
    if (name != NULL) {
        if (!name_valid(name))
            return err_set(c->e, RS_EINVAL, "key 'destination' has an invalid layout name");
        f->destination_names[i] = mem_strdup(name);
        if (f->destination_names[i] == NULL)
            return RS_ENOMEM;
    }
    int r = decode_map(c, list, &f->destinations[i]);
    if (r != 0 && name != NULL)
        return err_prefix(c->e, r, "destination '%s'", name);
    return r == 0 ? 0 : err_prefix(c->e, r, "destination");
}

static int decode_destinations(struct decoder *c, const json_t *root)
{
    struct topology_file *f = c->f;
    json_t *value = json_object_get(root, "destination");
    size_t n = json_is_object(value) ? json_object_size(value) : 1;
    if (n == 0 || n > MAX_DESTINATIONS)
        return err_set(c->e, RS_EINVAL, "key 'destination' must have 1 to %d layouts",
                       MAX_DESTINATIONS);
    f->destinations = mem_calloc(n, sizeof *f->destinations);
    f->destination_names = mem_calloc(n, sizeof *f->destination_names);
    if (f->destinations == NULL || f->destination_names == NULL)
        return RS_ENOMEM;
    if (!json_is_object(value))
        return value == NULL ? err_set(c->e, RS_EINVAL, "key 'destination' is missing")
                             : decode_named(c, NULL, value);
    const char *name;
    json_t *list;
    json_object_foreach(value, name, list)
    {
        int r = decode_named(c, name, list);
        if (r != 0)
            return r;
    }
    return 0;
}

static int decode_rate(struct decoder *c, const json_t *root, const char *key, double *ret)
{
    const json_t *value = json_object_get(root, key);
    if (value == NULL)
        return 0;
    double rate = json_number_value(value) * 1e9;
    if (!json_is_number(value) || !(rate > 0) || !isfinite(rate))
        return err_set(c->e, RS_EINVAL, "key '%s' must be a number greater than 0", key);
    *ret = rate;
    return 0;
}

static int decode_file(struct decoder *c, const json_t *root)
{
    static const char *const keys[] = {
        "nodes", "source", "destination", "network_gbytes_per_s", "domain_gbytes_per_s", NULL};
    struct topology *t = &c->f->topology;
    int r = check_keys(
        root, keys, "nodes, source, destination, network_gbytes_per_s, domain_gbytes_per_s", c->e);
    if (r == 0)
        r = decode_nodes(c, root);
    if (r == 0 && json_object_get(root, "source") == NULL)
        r = err_set(c->e, RS_EINVAL, "key 'source' is missing");
    if (r == 0) {
        r = decode_map(c, json_object_get(root, "source"), &c->f->source);
        r = r == 0 ? 0 : err_prefix(c->e, r, "source");
    }
    if (r == 0)
        r = decode_destinations(c, root);
    if (r == 0)
        r = decode_rate(c, root, "network_gbytes_per_s", &t->network_bytes_per_s);
    return r == 0 ? decode_rate(c, root, "domain_gbytes_per_s", &t->domain_bytes_per_s) : r;
}

static int parse(const char *text, size_t n_bytes, json_t **ret, struct err *e)
{
    json_error_t error;
    int r = json_check_size(text, n_bytes, "the topology", MAX_JSON_BYTES, MAX_JSON_VALUES,
                            MAX_DEPTH, e);
    if (r != 0)
        return r;
    *ret = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (*ret != NULL)
        return 0;
    /* jansson says so only at times: then there is no text, or one about the last token. */
    if (error.text[0] == '\0' || json_error_code(&error) == json_error_out_of_memory)
        return RS_ENOMEM;
    return err_set(e, RS_EINVAL, "line %d, column %d: %s", error.line, error.column, error.text);
}

int topology_from_json(const char *text, size_t n_bytes, struct topology_file **ret, struct err *e)
{
    json_t *root = NULL;
    int r = parse(text, n_bytes, &root, e);
    struct decoder c = {.f = r == 0 ? mem_zalloc(sizeof *c.f) : NULL, .e = e};
    if (r == 0)
        r = c.f == NULL ? RS_ENOMEM : decode_file(&c, root);
    mem_free(c.by_name);
    mem_free(c.first_device);
    json_decref(root);
    if (r == RS_ENOMEM)
        (void)err_set(e, r, "out of memory");
    if (r == 0)
        *ret = c.f;
    else
        topology_file_free(c.f);
    return r;
}
