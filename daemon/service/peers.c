#include "service/peers.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "device/fence.h"
#include "service/coordinator.h"
#include "service/nodes.h"
#include "service/release.h"

#include "base/banned.h"

_Static_assert((int)PEERS_SLACK_MS >= 2 * (int)FENCE_DRAIN_MS,
               "a data plane whose GPU hangs has ended when its node is given up");

struct peers {
    struct service *service;
    struct peer *peer;
    char environment[1024]; /* "": not known before the data plane serves */
    bool waits_quiet; /* the last session's attempts still move here: no JOIN before they do not */
    char **domains;   /* of our own devices */
    struct peer_commit *commits; /* borrowed by peer until the next introduce */
    void (*stopped)(void *arg);
    void *stopped_arg;
};

/* What all daemons of a cluster must have alike: their data planes cut messages by it. */
static void environment_text(const struct config *c, struct buf *to)
{
    buf_printf(to, "backend %s, transport %s, chunk_bytes %llu, ring_slots %u", c->backend,
               c->transport, (unsigned long long)c->chunk_bytes, c->ring_slots);
}

/* What a machine has of its own: interfaces, files, how much is logged. All other NCCL_* must be alike. */
static bool machines_own(const char *name, size_t n)
{
    static const char *const own[] = {"NCCL_SOCKET_IFNAME",   "NCCL_OOB_NET_IFNAME",
                                      "NCCL_IB_HCA",          "NCCL_IB_GID_INDEX",
                                      "NCCL_TOPO_FILE",       "NCCL_TOPO_DUMP_FILE",
                                      "NCCL_GRAPH_DUMP_FILE", "NCCL_HOSTID",
                                      "NCCL_CONF_FILE",       "NCCL_DEBUG",
                                      "NCCL_DEBUG_FILE",      "NCCL_DEBUG_SUBSYS",
                                      "NCCL_RAS_ADDR",        "NCCL_IGNORE_CPU_AFFINITY"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strlen(own[i]) == n && strncmp(own[i], name, n) == 0)
            return true;
    return false;
}

/* ", NCCL_ALGO Ring": what parts items in a text of items is written as something else in a value. */
static void variable_put(const char *entry, struct buf *to)
{
    size_t n = strcspn(entry, "=");
    if (strncmp(entry, "NCCL_", 5) != 0 || entry[n] == '\0' || machines_own(entry, n))
        return;
    buf_printf(to, ", %.*s ", (int)n, entry);
    for (const char *v = entry + n + 1; *v != '\0'; v++)
        buf_printf(to, "%c", *v == ',' ? ';' : *v == ' ' ? '_' : *v);
    if (entry[n + 1] == '\0')
        buf_printf(to, "''");
}

static void nccl_text(const struct link_about *about, struct buf *to)
{
    buf_printf(to, ", nccl %d.%d.%d, cuda %d", about->nccl_version / 10000,
               about->nccl_version % 10000 / 100, about->nccl_version % 100,
               about->cuda_version / 1000);
    for (char **v = environ; v != NULL && *v != NULL; v++)
        variable_put(*v, to);
}

static bool has_gpus(const struct config *c)
{
    return strcmp(c->transport, "nccl") == 0;
}

/* about NULL: before the data plane serves; that is enough without GPUs. */
static int environment_make(const struct config *c, const struct link_about *about, char *ret,
                            size_t capacity, struct err *e)
{
    struct buf b;
    int r = 0;
    buf_init(&b);
    environment_text(c, &b);
    if (has_gpus(c) && about != NULL)
        nccl_text(about, &b);
    if (buf_error(&b) != 0)
        r = err_set(e, RS_ENOMEM, "no memory for the cluster");
    else if (b.n_bytes >= capacity)
        r = err_set(
            e, RS_EEXHAUSTED,
            "the NCCL_* variables of the environment are too long to be compared with other "
            "nodes' (%zu bytes, %zu are the most): set fewer",
            b.n_bytes, capacity - 1);
    else
        (void)snprintf(ret, capacity, "%.*s", (int)b.n_bytes, (const char *)b.data);
    buf_close(&b);
    return r;
}

/* --- the coordinator's side ---------------------------------------------------------------------- */

static int on_admit(void *arg, uint32_t node, const struct peer_member *m, struct err *e)
{
    const struct peers *p = arg;
    (void)node;
    if (p->service->stopping)
        return err_set(e, RS_EUNAVAIL, "the coordinator is stopping");
    if (m->n_devices == 0 || m->n_devices > CONFIG_MAX_DEVICES)
        return err_set(e, RS_EINVAL, "%u devices; a node has 1 … %d", m->n_devices,
                       CONFIG_MAX_DEVICES);
    return 0;
}

static void on_joined(void *arg, uint32_t node, const struct peer_member *m, bool again)
{
    struct peers *p = arg;
    struct coordinator *c = p->service->coordinator;
    (void)again;
    if (coordinator_node_joined(c, node, m) != 0)
        peer_sever(p->peer, node, "no memory for what it knows as committed");
    else
        coordinator_brief(c, node);
}

static void on_report(void *arg, uint32_t node, const struct node_report *r)
{
    struct peers *p = arg;
    if (!p->service->stopping)
        coordinator_report(p->service->coordinator, node, r);
}

static void on_silent(void *arg, uint32_t node, const char *why)
{
    struct peers *p = arg;
    coordinator_node_silent(p->service->coordinator, node, why);
}

static void on_lost(void *arg, uint32_t node, const char *why)
{
    struct peers *p = arg;
    struct peer_view v;
    peer_look(p->peer, node, &v);
    coordinator_node_gone(p->service->coordinator, node, v.state == PEER_AWAY, why);
}

/* --- the member's side --------------------------------------------------------------------------- */

static int commits_fill(struct peers *p, struct peer_member *ret)
{
    struct service *s = p->service;
    uint32_t n = 0;
    mem_free(p->commits);
    p->commits = mem_calloc(s->n_models, sizeof *p->commits);
    if (p->commits == NULL)
        return RS_ENOMEM;
    queue_foreach (q, &s->models) {
        const struct model *m = container_of(q, struct model, in);
        uint64_t newest =
            m->committed.version > m->remembered ? m->committed.version : m->remembered;
        if (newest != 0)
            p->commits[n++] = (struct peer_commit){.model = m->name, .version = newest};
    }
    ret->commits = p->commits;
    ret->n_commits = n;
    return 0;
}

static int on_introduce(void *arg, struct peer_member *ret)
{
    struct peers *p = arg;
    struct service *s = p->service;
    p->waits_quiet = !node_is_quiet(s) || p->environment[0] == '\0';
    if (p->waits_quiet || s->stopping)
        return RS_EUNAVAIL;
    *ret = (struct peer_member){.incarnation = s->incarnation,
                                .protocol = PEER_PROTOCOL,
                                .n_devices = s->config->devices,
                                .domain_of_device = (const char *const *)p->domains};
    (void)snprintf(ret->release, sizeof ret->release, "%s", RESHARD_RELEASE);
    (void)snprintf(ret->data_address, sizeof ret->data_address, "%s", s->config->data_address);
    (void)snprintf(ret->environment, sizeof ret->environment, "%s", p->environment);
    return commits_fill(p, ret);
}

void peers_quiet(struct peers *p)
{
    if (p == NULL || p->peer == NULL || !p->waits_quiet || p->environment[0] == '\0' ||
        !node_is_quiet(p->service))
        return;
    p->waits_quiet = false;
    peer_ready(p->peer);
}

static void on_welcomed(void *arg, uint64_t coordinator_incarnation)
{
    struct peers *p = arg;
    node_welcomed(p->service, coordinator_incarnation);
}

static void on_order(void *arg, const struct node_order *o)
{
    struct peers *p = arg;
    if (!p->service->stopping)
        node_order_take(p->service, o);
}

static void on_severed(void *arg, const char *why)
{
    struct peers *p = arg;
    if (p->service->stopping)
        return;
    p->waits_quiet = true;
    node_severed(p->service, why);
    peers_quiet(p);
}

static void on_lease(void *arg, uint64_t until_ns)
{
    struct peers *p = arg;
    struct peer_strangers refused = service_strangers(p->service);
    if (p->service->link != NULL)
        link_lease(p->service->link, until_ns);
    if (p->peer != NULL) /* not while it starts */
        peer_set_strangers(p->peer, &refused);
}

/* --- life ---------------------------------------------------------------------------------------- */

static const struct layout *on_layout(void *arg, const uint8_t digest[16])
{
    struct peers *p = arg;
    const struct layout_entry *entry = layouts_find(&p->service->layouts, digest);
    return entry != NULL ? entry->layout : NULL;
}

static struct peer *peer_of_service(void *rpc_context)
{
    const struct service *s = rpc_context;
    return s->peer;
}

void peers_about(struct peers *p)
{
    struct err e = {0};
    char text[sizeof p->environment];
    if (p == NULL || p->service->link == NULL)
        return;
    const struct config *c = p->service->config;
    const struct link_about *about = link_about(p->service->link);
    char **domains = nodes_own_domains(c, about);
    int r = domains == NULL ? err_set(&e, RS_ENOMEM, "no memory for the cluster")
                            : environment_make(c, about, text, sizeof text, &e);
    if (r != 0) {
        nodes_domains_free(domains, c->devices);
        log_error("cluster: what this node is can't be told: %s", err_text(&e, r));
        return;
    }
    if (p->environment[0] != '\0' && strcmp(text, p->environment) != 0)
        log_warn("cluster: the new data plane is another (%s) than the last one (%s)", text,
                 p->environment);
    nodes_domains_free(p->domains, c->devices);
    p->domains = domains;
    (void)snprintf(p->environment, sizeof p->environment, "%s", text);
    peers_quiet(p);
}

static const char *given(const char *text)
{
    return text[0] != '\0' ? text : NULL;
}

static void peers_free(struct peers *p)
{
    nodes_domains_free(p->domains, p->service->config->devices);
    mem_free(p->commits);
    mem_free(p);
}

int peers_start(struct service *s, struct peers **ret, struct err *e)
{
    const struct config *c = s->config;
    struct peers *p = mem_zalloc(sizeof *p);
    if (p == NULL || (p->domains = nodes_own_domains(c, NULL)) == NULL) {
        mem_free(p);
        return err_set(e, RS_ENOMEM, "no memory for the cluster");
    }
    p->service = s;
    const struct link_about none = {0};
    int r = environment_make(c, &none, p->environment, sizeof p->environment, e);
    if (r != 0) {
        peers_free(p);
        return err_prefix(e, r, "cluster");
    }
    if (has_gpus(c))
        p->environment[0] = '\0'; /* with the versions that the data plane finds */
    struct peer_options o = {
        .loop = s->loop,
        .nodes = c->nodes,
        .n_nodes = c->n_nodes,
        .me = c->me,
        .coordinator = c->coordinator_index,
        .beat_ms = c->beat_ms,
        .lease_ms = c->lease_ms,
        .slack_ms = PEERS_SLACK_MS,
        .environment = p->environment,
        .incarnation = s->incarnation,
        .release = RESHARD_RELEASE,
        .data_address = c->data_address,
        .peer_role = c->peer,
        .tls_ca = given(c->tls_ca),
        .tls_certificate = given(c->tls_certificate),
        .tls_key = given(c->tls_key),
        .events = {.arg = p,
                   .admit = on_admit,
                   .joined = on_joined,
                   .report = on_report,
                   .silent = on_silent,
                   .lost = on_lost,
                   .introduce = on_introduce,
                   .welcomed = on_welcomed,
                   .order = on_order,
                   .severed = on_severed,
                   .lease = on_lease},
    };
    r = peer_start(&o, &p->peer, e);
    if (r != 0) {
        peers_free(p);
        return err_prefix(e, r, "cluster");
    }
    s->peer = p->peer;
    peer_set_resolver(peer_of_service);
    peer_set_layouts(p->peer, on_layout, p);
    *ret = p;
    return 0;
}

static void on_stopped(void *arg)
{
    struct peers *p = arg;
    void (*done)(void *) = p->stopped;
    void *done_arg = p->stopped_arg;
    peers_free(p);
    done(done_arg);
}

void peers_stop(struct peers *p, void (*done)(void *arg), void *arg)
{
    p->stopped = done;
    p->stopped_arg = arg;
    p->service->peer = NULL;
    peer_stop(p->peer, on_stopped, p);
}
