/* [cluster]: who is in it, who of them this daemon is, and whether this machine fits. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "peer/address.h"
#include "service/config.h"

#include "base/banned.h"

/* --- nodes --------------------------------------------------------------------------------------- */

static bool node_name_valid(const char *name, size_t n_bytes)
{
    return n_bytes > 0 && n_bytes < NODE_NAME_BYTES &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") >=
               n_bytes;
}

static int node_clash(const struct config *c, const struct peer_node *n, struct err *e)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        if (strcmp(c->nodes[i].name, n->name) == 0)
            return err_set(e, RS_EINVAL, "node %s stands twice", n->name);
        if (strcmp(c->nodes[i].address, n->address) == 0)
            return err_set(e, RS_EINVAL, "nodes %s and %s have one address, %s", c->nodes[i].name,
                           n->name, n->address);
    }
    return 0;
}

/* "n0=10.0.0.1:7070" */
static int node_add(struct config *c, const char *entry, struct err *e)
{
    struct peer_node n = {0};
    struct address a;
    const char *equals = strchr(entry, '=');
    size_t n_name = equals != NULL ? (size_t)(equals - entry) : 0;
    if (equals == NULL || !node_name_valid(entry, n_name))
        return err_set(e, RS_EINVAL,
                       "'%.80s': write name=address:port; a name has 1 … %d of A-Z a-z 0-9 . _ -",
                       entry, NODE_NAME_BYTES - 1);
    if (c->n_nodes == NODE_MAX)
        return err_set(e, RS_EEXHAUSTED, "more than %d nodes", NODE_MAX);
    memcpy(n.name, entry, n_name);
    int r = address_parse(equals + 1, true, &a, e);
    if (r == 0 && a.any)
        r = err_set(e, RS_EINVAL, "%s is no address that others can reach", a.host);
    if (r != 0)
        return err_prefix(e, r, "node %s", n.name);
    (void)address_text(&a, n.address, sizeof n.address);
    r = node_clash(c, &n, e);
    struct peer_node *more = r == 0 ? mem_realloc(c->nodes, (c->n_nodes + 1) * sizeof *more) : NULL;
    if (r == 0 && more == NULL)
        r = err_set(e, RS_ENOMEM, "no memory for the list of nodes");
    if (r != 0)
        return r;
    c->nodes = more;
    c->nodes[c->n_nodes++] = n;
    return 0;
}

int config_nodes_add(struct config *c, const char *value, struct err *e)
{
    char text[1024], *save = NULL;
    int r = 0;
    if (strlen(value) >= sizeof text)
        return err_set(e, RS_EINVAL, "is longer than %zu bytes in one line", sizeof text - 1);
    (void)snprintf(text, sizeof text, "%s", value);
    for (char *n = strtok_r(text, " ,\t", &save); r == 0 && n != NULL;
         n = strtok_r(NULL, " ,\t", &save))
        r = node_add(c, n, e);
    return r;
}

static int node_find(const struct config *c, const char *name, uint32_t *ret)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        if (strcmp(c->nodes[i].name, name) == 0) {
            *ret = i;
            return 0;
        }
    return RS_ENOTFOUND;
}

/* "n0, n1, n2 …" */
static const char *node_names(const struct config *c, char *ret, size_t capacity)
{
    size_t at = 0;
    ret[0] = '\0';
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        if (at + NODE_NAME_BYTES + 8 > capacity) {
            (void)snprintf(ret + at, capacity - at, " …");
            break;
        }
        at +=
            (size_t)snprintf(ret + at, capacity - at, "%s%s", i > 0 ? ", " : "", c->nodes[i].name);
    }
    return ret;
}

static int members_check(struct config *c, struct err *e)
{
    char names[512];
    if (c->coordinator[0] == '\0')
        return err_set(e, RS_EINVAL, "coordinator: not given; [cluster] has nodes %s: name one",
                       node_names(c, names, sizeof names));
    if (node_find(c, c->coordinator, &c->coordinator_index) != 0)
        return err_set(e, RS_EINVAL, "coordinator: '%s' is not among the nodes %s", c->coordinator,
                       node_names(c, names, sizeof names));
    if (node_find(c, c->node, &c->me) != 0)
        return err_set(e, RS_EINVAL,
                       "node: '%s' is not among the nodes %s; say which one this is by --node NAME "
                       "or [daemon] node",
                       c->node, node_names(c, names, sizeof names));
    return 0;
}

/* --- addresses, certificates --------------------------------------------------------------------- */

static int data_address_check(struct config *c, struct err *e)
{
    struct address own = {.host = "127.0.0.1", .family = ADDRESS_V4}, a;
    struct err ignored = {0};
    if (c->n_nodes > 0)
        (void)address_parse(c->nodes[c->me].address, true, &own, e);
    if (c->data_address[0] == '\0')
        (void)snprintf(c->data_address, sizeof c->data_address, "%s", own.host);
    if (address_parse(c->data_address, false, &a, &ignored) != 0)
        return 0; /* an interface's name: config_check_here */
    if (a.any)
        return err_set(e, RS_EINVAL, "data_address: %s is no address that others can reach",
                       a.host);
    (void)snprintf(c->data_address, sizeof c->data_address, "%s", a.host);
    return 0;
}

static int tls_check(const struct config *c, struct err *e)
{
    int n = (c->tls_ca[0] != '\0') + (c->tls_certificate[0] != '\0') + (c->tls_key[0] != '\0');
    struct address a;
    if (n != 0 && n != 3)
        return err_set(e, RS_EINVAL, "tls_ca, tls_certificate, tls_key: give all three or none");
    for (uint32_t i = 0; n == 0 && !c->insecure_network && i < c->n_nodes; i++)
        if (address_parse(c->nodes[i].address, true, &a, e) == 0 && !a.loopback)
            return err_set(e, RS_EINVAL,
                           "nodes: %s=%s is beyond loopback: give tls_ca, tls_certificate and "
                           "tls_key, or, where every host of the network is trusted, "
                           "insecure_network = yes",
                           c->nodes[i].name, c->nodes[i].address);
    return 0;
}

/* --- %n ------------------------------------------------------------------------------------------ */

static int name_fill(const struct config *c, const char *key, char *path, struct err *e)
{
    char out[CONFIG_MAX_PATH];
    size_t at = 0;
    if (strstr(path, "%n") == NULL)
        return 0;
    if (!node_name_valid(c->node, strlen(c->node)))
        return err_set(e, RS_EINVAL, "%s: node '%s' can't stand in a path", key, c->node);
    for (const char *p = path; *p != '\0'; p++) {
        const char *piece = p[0] == '%' && p[1] == 'n' ? c->node : NULL;
        size_t n = piece != NULL ? strlen(piece) : 1;
        if (at + n >= sizeof out)
            return err_set(e, RS_EINVAL, "%s: longer than %zu bytes with the node's name in it",
                           key, sizeof out - 1);
        memcpy(out + at, piece != NULL ? piece : p, n);
        at += n;
        p += piece != NULL;
    }
    out[at] = '\0';
    memcpy(path, out, at + 1);
    return 0;
}

static int names_fill(struct config *c, struct err *e)
{
    int r = name_fill(c, "socket", c->socket, e);
    if (r == 0)
        r = name_fill(c, "state_dir", c->state_dir, e);
    if (r == 0)
        r = name_fill(c, "tls_ca", c->tls_ca, e);
    if (r == 0)
        r = name_fill(c, "tls_certificate", c->tls_certificate, e);
    return r == 0 ? name_fill(c, "tls_key", c->tls_key, e) : r;
}

/* --- checks -------------------------------------------------------------------------------------- */

int config_cluster_check(struct config *c, struct err *e)
{
    int r = names_fill(c, e);
    c->me = c->coordinator_index = 0;
    if (r == 0 && c->n_nodes == 0 && c->coordinator[0] != '\0')
        r = err_set(e, RS_EINVAL, "coordinator: '%s', but [cluster] has no nodes", c->coordinator);
    if (r == 0 && c->n_nodes > 0)
        r = members_check(c, e);
    if (r == 0 && c->lease_ms < 2 * c->beat_ms)
        r = err_set(e, RS_EINVAL, "lease_ms: %u is less than two beats (beat_ms = %u)", c->lease_ms,
                    c->beat_ms);
    if (r == 0)
        r = tls_check(c, e);
    return r == 0 ? data_address_check(c, e) : r;
}

static int readable_check(const char *key, const char *path, struct err *e)
{
    int fd = path[0] != '\0' ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return path[0] == '\0'
                   ? 0
                   : err_set(e, err_from_errno(errno), "%s: %s: %s", key, path, strerror(errno));
    (void)close(fd);
    return 0;
}

static int here_address_check(struct config *c, struct err *e)
{
    struct address own = {.family = ADDRESS_V4}, a;
    struct err ignored = {0};
    int r = c->n_nodes > 0 ? address_parse(c->nodes[c->me].address, true, &own, e) : 0;
    if (r == 0 && c->n_nodes > 0 && (r = address_is_here(&own, e)) != 0)
        return err_prefix(e, r, "nodes: %s=%s", c->node, c->nodes[c->me].address);
    if (r == 0 && address_parse(c->data_address, false, &a, &ignored) != 0)
        r = address_of_interface(c->data_address, own.family, &a, e);
    if (r == 0)
        r = address_is_here(&a, e);
    if (r != 0)
        return err_prefix(e, r, "data_address");
    (void)snprintf(c->data_address, sizeof c->data_address, "%s", a.host);
    return 0;
}

int config_check_here(struct config *c, struct err *e)
{
    int r = here_address_check(c, e);
    if (r == 0)
        r = readable_check("tls_ca", c->tls_ca, e);
    if (r == 0)
        r = readable_check("tls_certificate", c->tls_certificate, e);
    return r == 0 ? readable_check("tls_key", c->tls_key, e) : r;
}
