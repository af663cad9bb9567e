/* transport_connect: the node's thread makes the connections that an attempt needs, all at once,
 * each again and again until it stands or the deadline has come. While it does, the ports' events
 * wake it. No group runs meanwhile on those ports. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "transport/tcp.h"

#include "base/banned.h"

enum { BACKOFF_FIRST_MS = 10, BACKOFF_MOST_MS = 250 };

/* --- beginning -------------------------------------------------------------------------------- */

static bool is_remote(const struct tcp *t, uint32_t device)
{
    return device < t->n_devices && t->peers[device].takes_part && t->peers[device].port == NULL;
}

/* Local peers are reached when they are needed. */
static int dial_new(struct tcp *t, struct transport_connect *c, struct tcp_dial **ret)
{
    struct tcp_dial *d = mem_zalloc(sizeof(*d) + (size_t)c->n_pairs * sizeof(d->pairs[0]));
    if (d == NULL)
        return RS_ENOMEM;
    d->request = c;
    for (uint32_t i = 0; i < c->n_pairs; i++) {
        struct tcp_port *port = tcp_port_of(t, c->pairs[i].device);
        struct tcp_link *l = NULL;
        if (!is_remote(t, c->pairs[i].peer))
            continue;
        rs_assert(port != NULL);
        l = tcp_link_get(port, c->pairs[i].peer, true);
        if (l == NULL || tcp_node_watch(t->node, port) != 0) {
            mem_free(d);
            return RS_ENOMEM;
        }
        d->pairs[d->n++] = (struct tcp_dialled){.link = l, .backoff_ms = BACKOFF_FIRST_MS};
    }
    *ret = d;
    return 0;
}

static void ignore_ports(struct tcp *t)
{
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (t->peers[i].port != NULL)
            tcp_node_ignore(t->node, t->peers[i].port);
}

int tcp_connect(struct transport *transport, struct transport_connect *c)
{
    struct tcp *t = tcp_of_transport(transport);
    struct tcp_dial *d;
    uint64_t attempt;
    int r = dial_new(t, c, &d);
    if (r == 0 && (r = tcp_count_group(t, &attempt)) != 0)
        mem_free(d);
    if (r != 0) {
        ignore_ports(t);
        return r;
    }
    tcp_node_lock(t->node);
    rs_assert(t->dial == NULL);
    t->dial = d;
    tcp_node_unlock(t->node);
    tcp_node_wake(t->node);
    return 0;
}

/* --- going on --------------------------------------------------------------------------------- */

/* Under port.io. */
static bool stream_stands(struct tcp_conn *c)
{
    while (tcp_conn_write(c) || tcp_conn_read(c))
        ;
    return c->fd >= 0 && !c->connecting && c->welcome;
}

static void again_later(struct tcp_dialled *x, uint64_t now)
{
    x->retry_ns = now + x->backoff_ms * UINT64_C(1000000);
    x->backoff_ms = x->backoff_ms * 2 > BACKOFF_MOST_MS ? BACKOFF_MOST_MS : x->backoff_ms * 2;
}

/* Under port.io. */
static void dial_pair(struct tcp_dialled *x, uint64_t now)
{
    struct tcp_link *l = x->link;
    bool stands = true, due = now >= x->retry_ns, failed = false;
    if (queue_empty(&l->in_port))
        queue_push(&l->port->links, &l->in_port);
    for (uint32_t s = 0; s < l->port->tcp->options.streams; s++) {
        struct tcp_conn *c = &l->conns[s];
        if (c->fd < 0 && due)
            tcp_link_dial(l, s);
        bool one = stream_stands(c);
        failed = failed || c->fd < 0;
        stands = stands && one;
    }
    if (failed && due)
        again_later(x, now);
    x->stands = stands;
    if (stands)
        l->lost = false;
}

static int dial_status(struct tcp *t, const struct tcp_dial *d, uint64_t now, struct err *e)
{
    char text[192];
    if (atomic_load(&t->aborted))
        return err_set(e, RS_ECANCELED, "the attempt was aborted");
    for (uint32_t i = 0; i < d->n && now >= d->request->deadline_ns; i++) {
        const struct tcp_link *l = d->pairs[i].link;
        if (d->pairs[i].stands)
            continue;
        (void)snprintf(text, sizeof(text), "no connection before the deadline: %s",
                       l->why[0] != '\0' ? l->why : "no answer");
        return tcp_link_error(l, e, RS_EDEADLINE, text);
    }
    return 0;
}

static void dial_over(struct tcp *t, int status, const struct err *e)
{
    struct transport_connect *c = t->dial->request;
    mem_free(t->dial);
    t->dial = NULL;
    ignore_ports(t);
    (void)pthread_mutex_lock(&t->mutex);
    t->n_groups--;
    (void)pthread_mutex_unlock(&t->mutex);
    c->on_done(c, status, e);
}

/* What has happened on the pairs' ports. All of it before any pair is looked at: a port's events are those of several pairs,
 * and an event that was taken wakes nobody any more. */
static void take_events(struct tcp_dial *d)
{
    for (uint32_t i = 0; i < d->n; i++) {
        struct tcp_dialled *x = &d->pairs[i];
        if (x->stands)
            continue;
        (void)pthread_mutex_lock(&x->link->port->io);
        tcp_port_take_events(x->link->port);
        (void)pthread_mutex_unlock(&x->link->port->io);
    }
}

/* When the next pair is to be tried again; 0: all stand. */
static uint64_t dial_pairs(struct tcp_dial *d, uint64_t now)
{
    uint64_t next = 0;
    take_events(d);
    for (uint32_t i = 0; i < d->n; i++) {
        struct tcp_dialled *x = &d->pairs[i];
        if (!x->stands) {
            (void)pthread_mutex_lock(&x->link->port->io);
            dial_pair(x, now);
            (void)pthread_mutex_unlock(&x->link->port->io);
        }
        if (x->stands)
            continue;
        uint64_t at = x->retry_ns > now ? x->retry_ns : UINT64_MAX; /* or when something happens */
        next = next == 0 || at < next ? at : next;
    }
    return next;
}

uint64_t tcp_dial_step(struct tcp *t, uint64_t now)
{
    struct err e = {0};
    if (t->dial == NULL)
        return UINT64_MAX;
    uint64_t next = atomic_load(&t->aborted) ? UINT64_MAX : dial_pairs(t->dial, now);
    int status = next == 0 ? 0 : dial_status(t, t->dial, now, &e);
    if (next == 0 || status != 0) {
        dial_over(t, status, &e);
        return UINT64_MAX;
    }
    return next < t->dial->request->deadline_ns ? next : t->dial->request->deadline_ns;
}
