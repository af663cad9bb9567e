/* An attempt's links: who the peers are, which transport carries its messages, and the connections
 * that it needs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "device/device_cuda.h"
#include "exec/attempt.h"
#include "exec/pairs.h"
#include "transport/transport_local.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

enum {
    CONNECT_MS = 10000, /* where PREPARE has no deadline */
    EARLY_MS = 500
};

enum part { PART_NONE, PART_LOCAL, PART_REMOTE };

/* --- peers ------------------------------------------------------------------------------------ */

static int check_peers_table(const struct wire_peers *h, const struct attempt *a, size_t n_bytes,
                             struct err *e)
{
    if (h->n_peers > WIRE_MAX_PEERS || h->n_devices != a->program.n_plan_devices ||
        n_bytes != sizeof(*h) + (size_t)h->n_peers * sizeof(struct wire_peer) +
                       (size_t)h->n_devices * sizeof(uint32_t))
        return err_set(e, RS_EPROTO,
                       "peers: %zu bytes for %u nodes and %u devices, the plan has %u", n_bytes,
                       h->n_peers, h->n_devices, a->program.n_plan_devices);
    return 0;
}

static int copy_peers(struct attempt *a, const uint8_t *data, const struct wire_peers *h,
                      struct err *e)
{
    size_t bytes = (size_t)h->n_peers * sizeof(struct wire_peer);
    a->peers = mem_alloc(bytes + 1);
    a->peer_of = mem_calloc(h->n_devices, sizeof(*a->peer_of));
    if (a->peers == NULL || a->peer_of == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    a->n_peers = h->n_peers;
    memcpy(a->peers, data + sizeof(*h), bytes);
    memcpy(a->peer_of, data + sizeof(*h) + bytes, h->n_devices * sizeof(*a->peer_of));
    for (uint32_t i = 0; i < a->n_peers; i++) {
        a->peers[i].address[WIRE_ADDRESS_BYTES - 1] = '\0';
        a->peers[i].name[WIRE_NAME_BYTES - 1] = '\0';
    }
    return 0;
}

static int check_peer_of(const struct attempt *a, struct err *e)
{
    for (uint32_t d = 0; d < a->program.n_plan_devices; d++)
        if (a->peer_of[d] != UINT32_MAX && a->peer_of[d] >= a->n_peers)
            return err_set(e, RS_EPROTO, "peers: device %u is at node %u of %u", d, a->peer_of[d],
                           a->n_peers);
    for (uint32_t d = 0; d < a->program.n_devices; d++)
        if (a->peer_of[a->program.devices[d].device] != UINT32_MAX)
            return err_set(e, RS_EPROTO, "peers: device %u is here and elsewhere",
                           a->program.devices[d].device);
    return 0;
}

int links_read_peers(struct attempt *a, int fd, struct err *e)
{
    const void *data;
    size_t n_bytes;
    struct wire_peers h = {0};
    int r = wire_map_fd(fd, &data, &n_bytes, e);
    if (r < 0)
        return err_prefix(e, r, "peers");
    if (n_bytes >= sizeof(h))
        memcpy(&h, data, sizeof(h));
    r = check_peers_table(&h, a, n_bytes, e);
    if (r == 0)
        r = copy_peers(a, data, &h, e);
    wire_unmap(data, n_bytes);
    return r == 0 ? check_peer_of(a, e) : r;
}

static bool is_local(const struct program *p, uint32_t device)
{
    for (uint32_t d = 0; d < p->n_devices; d++)
        if (p->devices[d].device == device)
            return true;
    return false;
}

static int check_comm(const struct attempt *a, size_t n_bytes, struct err *e)
{
    const struct program *p = &a->program;
    if (n_bytes < sizeof(a->comm) || a->comm.n_devices != p->n_plan_devices ||
        n_bytes - sizeof(a->comm) !=
            a->comm.n_devices + (uint64_t)a->comm.n_excluded * sizeof(*a->excluded))
        return err_set(e, RS_EPROTO, "communicator: %zu bytes for %u devices, the plan has %u",
                       n_bytes, a->comm.n_devices, p->n_plan_devices);
    return 0;
}

/* A device that sends or receives without a comm rank would wait for ever. */
static int check_members(const struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    for (uint32_t s = 0; s < p->n_streams; s++) {
        uint32_t here = p->devices[p->streams[s].device].device, peer = p->streams[s].peer;
        if (a->takes_part[here] == 0 || a->takes_part[peer] == 0)
            return err_set(e, RS_EPROTO, "communicator: device %u moves bytes and is not in it",
                           a->takes_part[here] == 0 ? here : peer);
    }
    for (uint32_t d = 0; d < p->n_plan_devices; d++)
        if (a->takes_part[d] != 0 && a->peer_of != NULL && a->peer_of[d] == UINT32_MAX &&
            !is_local(p, d))
            return err_set(e, RS_EPROTO, "communicator: device %u is on no node", d);
    return 0;
}

int links_read_comm(struct attempt *a, int fd, struct err *e)
{
    const void *data;
    size_t n_bytes;
    int r = wire_map_fd(fd, &data, &n_bytes, e);
    if (r < 0)
        return err_prefix(e, r, "communicator");
    if (n_bytes >= sizeof(a->comm))
        memcpy(&a->comm, data, sizeof(a->comm));
    r = check_comm(a, n_bytes, e);
    if (r == 0) {
        a->takes_part = mem_alloc(a->comm.n_devices + 1U);
        a->excluded = mem_calloc(a->comm.n_excluded + 1U, sizeof(*a->excluded));
        if (a->takes_part == NULL || a->excluded == NULL)
            r = err_set(e, RS_ENOMEM, "out of memory");
    }
    if (r == 0) {
        const uint8_t *at = (const uint8_t *)data + sizeof(a->comm);
        memcpy(a->takes_part, at, a->comm.n_devices);
        memcpy(a->excluded, at + a->comm.n_devices, a->comm.n_excluded * sizeof(*a->excluded));
    }
    wire_unmap(data, n_bytes);
    return r == 0 ? check_members(a, e) : r;
}

static const struct wire_peer *peer_at(const struct attempt *a, uint32_t device)
{
    return a->peer_of == NULL || a->peer_of[device] == UINT32_MAX ? NULL
                                                                  : &a->peers[a->peer_of[device]];
}

int links_check(const struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    for (uint32_t s = 0; s < p->n_streams; s++) {
        uint32_t device = p->streams[s].peer;
        if (is_local(p, device))
            continue;
        if (peer_at(a, device) == NULL)
            return err_set(e, RS_EPRECOND,
                           "device %u of the plan is on another node, and this data plane was not "
                           "told where",
                           device);
        if (a->plane->tcp == NULL && a->takes_part == NULL)
            return err_set(e, RS_EPRECOND,
                           "device %u of the plan is on node '%s', which transport '%s' does "
                           "not reach: set transport = tcp",
                           device, peer_at(a, device)->name,
                           a->plane->nccl != NULL ? "nccl without a communicator" : "memory");
    }
    return 0;
}

/* --- the transport ---------------------------------------------------------------------------- */

static enum part part_of(const struct attempt *a, uint32_t device)
{
    if (is_local(&a->program, device))
        return PART_LOCAL;
    return peer_at(a, device) != NULL ? PART_REMOTE : PART_NONE;
}

static uint32_t local_of(const struct program *p, uint32_t device)
{
    for (uint32_t d = 0; d < p->n_devices; d++)
        if (p->devices[d].device == device)
            return d;
    return UINT32_MAX;
}

/* Whether the program's messages between its device `local` and the plan's device `peer` are copied. */
static bool copied(const struct attempt *a, uint32_t local, uint32_t peer)
{
    uint32_t other = local_of(&a->program, peer);
    return other != UINT32_MAX && pairs_copied(a->plane, local, other);
}

static bool any_copied(const struct attempt *a)
{
    for (uint32_t d = 0; d < a->program.n_devices; d++)
        for (uint32_t k = 0; k < d; k++)
            if (pairs_copied(a->plane, d, k))
                return true;
    return false;
}

/* Something goes to another node, or to a device that can't be reached by copies. Of a communicator of
 * several nodes all must be members. */
static bool needs_network(const struct attempt *a)
{
    const struct program *p = &a->program;
    if (a->peers != NULL || a->takes_part != NULL || !any_copied(a))
        return true;
    for (uint32_t s = 0; s < p->n_streams; s++)
        if (!copied(a, p->streams[s].device, p->streams[s].peer))
            return true;
    return false;
}

static bool same_links(const struct model *m, const struct attempt *a)
{
    if (m->transport == NULL || (m->network == NULL && needs_network(a)) || m->epoch != a->epoch ||
        m->n_plan_devices != a->program.n_plan_devices)
        return false;
    for (uint32_t i = 0; i < PLANE_MAX_DEVICES; i++)
        if (m->plan_device[i] !=
            (i < a->program.n_devices ? a->program.devices[i].device : UINT32_MAX))
            return false;
    for (uint32_t d = 0; d < m->n_plan_devices; d++)
        if (m->parts[d] != part_of(a, d))
            return false;
    return memcmp(m->comm.id, a->comm.id, sizeof(m->comm.id)) == 0;
}

/* What transport_tcp_open and _renew are told; the caller frees it. */
static struct transport_tcp_device *tcp_devices(const struct attempt *a)
{
    const struct program *p = &a->program;
    struct transport_tcp_device *all = mem_calloc(p->n_plan_devices, sizeof(*all));
    for (uint32_t i = 0; all != NULL && i < p->n_devices; i++)
        all[p->devices[i].device].device = a->plane->devices[i].device;
    for (uint32_t d = 0; all != NULL && d < p->n_plan_devices; d++) {
        const struct wire_peer *peer = peer_at(a, d);
        if (peer == NULL)
            continue;
        all[d].address = peer->address;
        all[d].port = peer->port;
        all[d].node = peer->name;
        memcpy(all[d].token, peer->token, sizeof(all[d].token));
    }
    return all;
}

_Static_assert((int)WIRE_TOKEN_BYTES == (int)TRANSPORT_TOKEN_BYTES, "one kind of token");

static int open_tcp(const struct attempt *a, bool stands, struct err *e)
{
    const struct wire_hello *h = &a->plane->hello;
    struct transport_tcp_options options = {.network_bytes_per_s = h->network_bytes_per_s,
                                            .domain_bytes_per_s = h->domain_bytes_per_s,
                                            .streams = h->streams,
                                            .silence_ms = h->silence_ms,
                                            .model = a->model->id,
                                            .fence = &a->plane->fence};
    struct transport_tcp_device *all = tcp_devices(a);
    if (all == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    int r = stands ? transport_tcp_renew(a->model->network, all, e)
                   : transport_tcp_open(a->plane->tcp, all, a->program.n_plan_devices, a->epoch,
                                        &options, &a->model->network, e);
    mem_free(all);
    return r;
}

static int open_memory(const struct attempt *a, struct err *e)
{
    const struct wire_hello *h = &a->plane->hello;
    const struct program *p = &a->program;
    struct transport_mem_options options = {.network_bytes_per_s = h->network_bytes_per_s,
                                            .domain_bytes_per_s = h->domain_bytes_per_s,
                                            .seed = h->host_seed,
                                            .max_delay_us = h->host_max_delay_us,
                                            .fence = &a->plane->fence};
    struct device **devices = mem_calloc(p->n_plan_devices, sizeof(struct device *));
    if (devices == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < p->n_devices; i++)
        devices[p->devices[i].device] = a->plane->devices[i].device;
    int r =
        transport_mem_open(devices, p->n_plan_devices, a->epoch, &options, &a->model->network, e);
    mem_free(devices);
    return r;
}

#if defined(RS_CUDA)
/* An abort that hangs may go on writing for ever: only the end of this process stops it, and the
 * control process starts another. */
static void stuck(void *arg)
{
    (void)arg;
    (void)fputs("reshardd: data plane: a communicator's abort hangs; ending\n", stderr);
    _exit(EXIT_FAILURE);
}

/* What the communicator will have of each GPU that takes part, before it is made. */
static int comm_take(const struct attempt *a, struct device *const *devices, struct err *e)
{
    const struct program *p = &a->program;
    uint32_t n_local = 0;
    for (uint32_t i = 0; i < p->n_devices; i++)
        n_local += devices[p->devices[i].device] != NULL ? 1 : 0;
    uint64_t need =
        budget_communicator_bytes(n_local, a->takes_part != NULL, a->plane->hello.max_ctas);
    for (uint32_t i = 0; i < p->n_devices; i++) {
        struct comm_memory *m = &a->model->comm_memory[i];
        uint64_t total;
        if (devices[p->devices[i].device] == NULL)
            continue;
        int r = budget_take(&a->plane->devices[i].budget, BUDGET_COMMUNICATOR, need, e);
        if (r != 0)
            return err_prefix(e, r, "device %u (%s)", i, device_name(a->plane->devices[i].device));
        m->bytes = need;
        if (!device_cuda_memory(a->plane->devices[i].device, &m->free_before, &total))
            m->free_before = 0;
    }
    return 0;
}

/* What it really took, where that is more; buffers that come with the first use count as estimated. */
static int comm_measure(const struct attempt *a, struct err *e)
{
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < a->program.n_devices; i++) {
        struct comm_memory *m = &a->model->comm_memory[i];
        struct budget *b = &a->plane->devices[i].budget;
        uint64_t now, total;
        if (m->free_before == 0 || !device_cuda_memory(a->plane->devices[i].device, &now, &total) ||
            now >= m->free_before)
            continue;
        uint64_t took = m->free_before - now;
        m->free_before = 0;
        if (took <= m->bytes)
            continue;
        r = budget_take(b, BUDGET_COMMUNICATOR, took - m->bytes, e);
        b->measured[BUDGET_COMMUNICATOR] = r == 0;
        m->bytes = r == 0 ? took : m->bytes;
    }
    return r;
}

/* Where all devices are of this node, it makes the communicators' ids itself. */
static int open_nccl(const struct attempt *a, struct transport *parent, struct err *e)
{
    const struct program *p = &a->program;
    struct transport_nccl_options options = {
        .fence = &a->plane->fence,
        .on_stuck = stuck,
        .max_ctas = a->plane->hello.max_ctas,
        .shrink = {.parent = parent, .excluded = a->excluded, .n_excluded = a->comm.n_excluded}};
    struct device **devices = mem_calloc(p->n_plan_devices, sizeof(struct device *));
    bool *takes_part = mem_calloc(p->n_plan_devices, sizeof(*takes_part));
    int r = devices == NULL || takes_part == NULL ? err_set(e, RS_ENOMEM, "out of memory") : 0;
    for (uint32_t d = 0; r == 0 && d < p->n_plan_devices; d++)
        takes_part[d] = a->takes_part != NULL ? a->takes_part[d] != 0 : is_local(p, d);
    for (uint32_t i = 0; r == 0 && i < p->n_devices; i++)
        if (takes_part[p->devices[i].device])
            devices[p->devices[i].device] = a->plane->devices[i].device;
    if (r == 0)
        r = comm_take(a, devices, e);
    if (r == 0)
        r = transport_nccl_open(a->plane->nccl, devices, takes_part, p->n_plan_devices, a->epoch,
                                a->takes_part != NULL ? a->comm.id : NULL, &options,
                                &a->model->network, e);
    if (r == 0)
        log_debug("model %llx attempt %llu: %s communicator of epoch %llu, %s",
                  (unsigned long long)a->model->id, (unsigned long long)a->number,
                  parent != NULL ? "what is left of the" : "a new", (unsigned long long)a->epoch,
                  a->takes_part != NULL ? "with other nodes" : "of this node's devices");
    mem_free(devices);
    mem_free(takes_part);
    return r;
}
#endif

static void add_counters(const struct model *m, struct wire_stats *to)
{
    for (uint32_t i = 0; m->transport != NULL && i < PLANE_MAX_DEVICES; i++) {
        if (m->plan_device[i] == UINT32_MAX)
            continue;
        struct transport_counters c = transport_counters(m->transport, m->plan_device[i]);
        to->network_sent_bytes += c.network_sent_bytes;
        to->network_received_bytes += c.network_received_bytes;
        to->domain_sent_bytes += c.domain_sent_bytes;
        to->domain_received_bytes += c.domain_received_bytes;
        to->messages += c.messages;
        to->stale_frames += c.stale_frames;
        to->registrations += c.registrations;
        to->refused_registrations += c.refused_registrations;
        to->shrunk += c.shrunk;
        to->shrinks_failed += c.shrinks_failed;
    }
}

static void add_registered(struct transport_counters *to, const struct transport_counters *c)
{
    to->registrations += c->registrations;
    to->refused_registrations += c->refused_registrations;
    to->hits += c->hits;
    to->hit_bytes += c->hit_bytes;
}

/* A device's, of all models' links since the process began; what is registered, of those that stand. */
struct transport_counters links_registered(const struct plane *p, uint32_t device)
{
    struct transport_counters all = p->devices[device].registered;
    queue_foreach (q, &p->models) {
        const struct model *m = container_of(q, struct model, link);
        if (m->transport == NULL || m->plan_device[device] == UINT32_MAX)
            continue;
        struct transport_counters c = transport_counters(m->transport, m->plan_device[device]);
        add_registered(&all, &c);
        all.registered_bytes += c.registered_bytes;
    }
    return all;
}

static void keep_registered(struct plane *p, const struct model *m)
{
    for (uint32_t i = 0; m->transport != NULL && i < p->n_devices; i++) {
        if (m->plan_device[i] == UINT32_MAX)
            continue;
        struct transport_counters c = transport_counters(m->transport, m->plan_device[i]);
        add_registered(&p->devices[i].registered, &c);
    }
}

/* What a model's links were, until they are closed. */
struct old_links {
    struct transport *transport, *network;
    uint64_t comm_bytes[PLANE_MAX_DEVICES];
};

static void links_part(struct plane *p, struct model *m, struct old_links *ret)
{
    add_counters(m, &p->past);
    keep_registered(p, m);
    ret->transport = m->transport;
    ret->network = m->network;
    for (uint32_t i = 0; i < p->n_devices; i++) {
        ret->comm_bytes[i] = m->comm_memory[i].bytes;
        m->comm_memory[i] = (struct comm_memory){0};
    }
    mem_free(m->parts);
    m->transport = m->network = NULL;
    m->parts = NULL;
}

static void old_links_close(struct plane *p, struct old_links *old)
{
    transport_close(old->transport);
    for (uint32_t i = 0; i < p->n_devices; i++)
        budget_give(&p->devices[i].budget, BUDGET_COMMUNICATOR, old->comm_bytes[i]);
}

void links_close(struct plane *p, struct model *m)
{
    struct old_links old;
    links_part(p, m, &old);
    old_links_close(p, &old);
}

struct wire_stats links_stats(const struct plane *p)
{
    struct wire_stats s = p->past;
    queue_foreach (q, &p->models) {
        add_counters(container_of(q, struct model, link), &s);
    }
    if (p->tcp != NULL) {
        s.refused = transport_tcp_node_refused(p->tcp);
        s.connections = transport_tcp_node_connections(p->tcp);
        s.connected = transport_tcp_node_connected(p->tcp);
    }
    return s;
}

static int note_parts(struct model *m, const struct attempt *a)
{
    const struct program *p = &a->program;
    m->parts = mem_zalloc(p->n_plan_devices);
    if (m->parts == NULL)
        return RS_ENOMEM;
    m->epoch = a->epoch;
    m->n_plan_devices = p->n_plan_devices;
    m->comm = a->comm;
    for (uint32_t d = 0; d < p->n_plan_devices; d++)
        m->parts[d] = (uint8_t)part_of(a, d);
    memset(m->plan_device, 0xFF, sizeof(m->plan_device));
    for (uint32_t i = 0; i < p->n_devices; i++)
        m->plan_device[i] = p->devices[i].device;
    return 0;
}

static int open_network(const struct attempt *a, struct transport *parent, struct err *e)
{
    if (a->plane->tcp != NULL)
        return open_tcp(a, false, e);
#if defined(RS_CUDA)
    if (a->plane->nccl != NULL)
        return open_nccl(a, parent, e);
#endif
    (void)parent;
    return open_memory(a, e);
}

/* In front of the network, if there is one. */
static int open_copies(const struct attempt *a, struct err *e)
{
    const struct program *p = &a->program;
    uint32_t n = p->n_plan_devices;
    struct device **devices = mem_calloc(n, sizeof(struct device *));
    bool *pairs = mem_calloc((size_t)n * n, sizeof *pairs);
    int r = devices == NULL || pairs == NULL ? err_set(e, RS_ENOMEM, "out of memory") : 0;
    for (uint32_t i = 0; i < p->n_devices && r == 0; i++) {
        devices[p->devices[i].device] = a->plane->devices[i].device;
        for (uint32_t k = 0; k < p->n_devices; k++)
            pairs[(size_t)p->devices[i].device * n + p->devices[k].device] =
                pairs_copied(a->plane, i, k);
    }
    if (r == 0)
        r = transport_local_open(devices, pairs, n, a->epoch, a->model->network,
                                 &a->model->transport, e);
    mem_free(devices);
    mem_free(pairs);
    return r;
}

static int open_all(struct attempt *a, struct transport *parent, struct err *e)
{
    struct model *m = a->model;
    if (note_parts(m, a) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    int r = needs_network(a) ? open_network(a, parent, e) : 0;
    if (r == 0 && any_copied(a))
        r = open_copies(a, e);
    else if (r == 0)
        m->transport = m->network;
    if (r != 0) {
        transport_close(m->network);
        m->network = NULL;
    }
    return r;
}

/* The communicator that the attempt's is to be a part of stands here. */
static bool shrinks(const struct model *m, const struct attempt *a)
{
    return a->plane->nccl != NULL && m->network != NULL && a->comm.n_excluded > 0 &&
           memcmp(m->comm.id, a->comm.parent, sizeof(m->comm.id)) == 0;
}

/* One transport per epoch; a plan over other devices of the same epoch gets a new one, too. */
int links_open(struct attempt *a, struct err *e)
{
    struct model *m = a->model;
    struct old_links old;
    int r = 0;
    if (same_links(m, a)) {
        r = a->plane->tcp != NULL && m->network != NULL ? open_tcp(a, true, e) : 0;
    } else {
        bool kept = shrinks(m, a); /* until its communicators were taken */
        links_part(a->plane, m, &old);
        if (!kept)
            old_links_close(a->plane, &old);
        r = open_all(a, kept ? old.network : NULL, e);
        if (kept)
            old_links_close(a->plane, &old);
    }
    if (r == 0)
        ring_tell(a->plane, m);
    return r;
}

/* --- connections ------------------------------------------------------------------------------ */

static int pair_compare(const void *a, const void *b)
{
    const struct transport_pair *p = a, *q = b;
    if (p->device != q->device)
        return p->device < q->device ? -1 : 1;
    return p->peer < q->peer ? -1 : p->peer > q->peer;
}

/* Which device sends to which of another node, each pair once. */
static int find_pairs(struct attempt *a)
{
    const struct program *p = &a->program;
    uint32_t n = 0, kept = 0;
    a->pairs = mem_calloc(p->n_streams, sizeof(*a->pairs));
    if (a->pairs == NULL)
        return RS_ENOMEM;
    for (uint32_t s = 0; s < p->n_streams; s++)
        if (p->streams[s].send != 0 && !is_local(p, p->streams[s].peer))
            a->pairs[n++] = (struct transport_pair){p->devices[p->streams[s].device].device,
                                                    p->streams[s].peer};
    if (n > 0)
        qsort(a->pairs, n, sizeof(*a->pairs), pair_compare);
    for (uint32_t i = 0; i < n; i++)
        if (kept == 0 || pair_compare(&a->pairs[kept - 1], &a->pairs[i]) != 0)
            a->pairs[kept++] = a->pairs[i];
    a->connect.n_pairs = kept;
    return 0;
}

/* NCCL does not tell who is missing. */
static void name_nodes(const struct attempt *a, struct err *e)
{
    size_t n = strlen(e->text);
    for (uint32_t i = 0; i < a->n_peers && n + 1 < sizeof(e->text); i++) {
        int k = snprintf(e->text + n, sizeof(e->text) - n, "%s %s",
                         i == 0 ? "; others are on" : ",", a->peers[i].name);
        n += k > 0 ? (size_t)k : 0;
    }
}

static void on_connected(struct mailbox_item *item)
{
    struct attempt *a = container_of(item, struct attempt, connected);
    a->connecting = false;
#if defined(RS_CUDA)
    if (a->connect_status == 0)
        a->connect_status = comm_measure(a, &a->connect_err);
#endif
    if (a->connect_status == RS_EDEADLINE && a->takes_part != NULL)
        name_nodes(a, &a->connect_err);
    if (a->connect_status != 0 && a->connect_status != RS_ECANCELED)
        attempt_fail(a, a->connect_status, &a->connect_err, UINT32_MAX, UINT32_MAX);
    attempt_settle(a);
}

/* On a thread of the transport. */
static void connected(struct transport_connect *c, int status, const struct err *e)
{
    struct attempt *a = c->arg;
    a->connect_status = status;
    a->connect_err = *e;
    (void)mailbox_post(&a->plane->mailbox, &a->connected);
}

/* A communicator is given up a little before PREPARE is: why it has not come must be told by then. */
static uint64_t connect_deadline(const struct attempt *a, uint64_t deadline_ns)
{
    uint64_t now = clock_mono_ns();
    if (deadline_ns == 0)
        return now + CONNECT_MS * UINT64_C(1000000);
    if (a->takes_part == NULL || deadline_ns <= now)
        return deadline_ns;
    uint64_t margin = (deadline_ns - now) / 8, most = EARLY_MS * UINT64_C(1000000);
    return deadline_ns - (margin < most ? margin : most);
}

int links_connect(struct attempt *a, uint64_t deadline_ns, struct err *e)
{
    if (a->peers == NULL)
        return 0;
    queue_init(&a->connected.link);
    a->connected.fn = on_connected;
    a->connect = (struct transport_connect){
        .deadline_ns = connect_deadline(a, deadline_ns), .on_done = connected, .arg = a};
    int r = find_pairs(a);
    a->connect.pairs = a->pairs;
    if (r == 0)
        r = transport_connect(a->model->transport, &a->connect);
    if (r != 0)
        return err_set(e, r, "connecting to the other nodes: %s", err_name(r));
    a->connecting = true;
    return 0;
}
