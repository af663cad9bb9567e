#include "transport/tcp.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"

#include "base/banned.h"

/* A further connection is made for each so many bytes that wait. */
enum { STREAM_BYTES = 4 << 20 };

/* --- life ------------------------------------------------------------------------------------- */

static struct tcp_link *link_new(struct tcp_port *port, uint32_t peer, bool out)
{
    struct tcp_link *l = mem_zalloc(sizeof(*l));
    if (l == NULL)
        return NULL;
    queue_init(&l->in_port);
    queue_init(&l->in_active);
    queue_init(&l->messages);
    queue_init(&l->in_arrivals);
    l->port = port;
    l->peer = peer;
    l->out = out;
    for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++) {
        tcp_conn_init(&l->conns[s], l, s);
        l->arrived[s] = -1;
    }
    return l;
}

struct tcp_link *tcp_link_get(struct tcp_port *port, uint32_t peer, bool out)
{
    struct tcp_link **slot = out ? &port->out[peer] : &port->in[peer];
    (void)pthread_mutex_lock(&port->tcp->mutex);
    if (*slot == NULL)
        *slot = link_new(port, peer, out);
    struct tcp_link *l = *slot;
    (void)pthread_mutex_unlock(&port->tcp->mutex);
    return l;
}

void tcp_link_free(struct tcp_link *l)
{
    if (l == NULL)
        return;
    for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++) {
        tcp_conn_close(&l->conns[s]);
        if (l->arrived[s] >= 0)
            (void)close(l->arrived[s]);
    }
    mem_free(l);
}

/* --- failures --------------------------------------------------------------------------------- */

static bool peer_is_local(const struct tcp_link *l)
{
    return l->port->tcp->peers[l->peer].port != NULL;
}

int tcp_link_error(const struct tcp_link *l, struct err *e, int code, const char *text)
{
    const struct tcp_peer *peer = &l->port->tcp->peers[l->peer];
    char address[TCP_ADDRESS_TEXT_BYTES];
    (void)tcp_address_text(&peer->address, address);
    if (peer->node[0] == '\0')
        return err_set(e, code, "device %u, peer device %u at %s: %s", l->port->device, l->peer,
                       address, text);
    return err_set(e, code, "device %u, peer device %u of node '%s' at %s: %s", l->port->device,
                   l->peer, peer->node, address, text);
}

void tcp_link_fail(struct tcp_link *l, int code, const char *format, ...)
{
    struct tcp_group *g = l->port->group;
    char text[128];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (queue_empty(&l->messages) || g == NULL) {
        l->lost = true;
        memcpy(l->why, text, sizeof(l->why));
        return;
    }
    if (g->status != 0)
        return;
    g->status = tcp_link_error(l, &g->err, code, text);
    l->port->failed = code;
}

/* --- messages --------------------------------------------------------------------------------- */

void tcp_link_post(struct tcp_link *l, struct tcp_message *m, uint64_t now)
{
    struct tcp_port *port = l->port;
    if (queue_empty(&l->in_port))
        queue_push(&port->links, &l->in_port);
    if (queue_empty(&l->messages)) {
        queue_push(&port->active, &l->in_active);
        l->heard_ns = now;
    }
    m->sequence = l->n_posted++;
    m->posted = true;
    queue_push(&l->messages, &m->in_link);
    if (l->lost)
        tcp_link_fail(l, RS_EPEER, "its connection broke: %s", l->why);
}

static void leave(struct tcp_link *l, struct tcp_message *m)
{
    queue_remove(&m->in_link);
    if (queue_empty(&l->messages))
        queue_remove(&l->in_active);
}

void tcp_link_settle(struct tcp_link *l, struct tcp_message *m)
{
    struct tcp_group *g = m->group;
    if (m->done || m->moved < m->bytes)
        return;
    if (!m->released && (m->send || m->accepted)) {
        m->released = true;
        g->n_buffers--;
    }
    if (!m->accepted)
        return;
    m->done = true;
    g->n_open--;
    atomic_fetch_add(&l->port->messages, 1);
    leave(l, m);
    if (g->group == NULL && g->n_open == 0)
        tcp_group_forget(g);
}

void tcp_link_withdraw(struct tcp_link *l, struct tcp_message *m)
{
    for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++)
        tcp_conn_withdraw(&l->conns[s], m);
    if (m->posted && !m->done)
        leave(l, m);
}

struct tcp_message *tcp_link_find(struct tcp_link *l, uint64_t sequence)
{
    queue_foreach (q, &l->messages) {
        struct tcp_message *m = container_of(q, struct tcp_message, in_link);
        if (m->sequence == sequence)
            return m;
    }
    return NULL;
}

struct tcp_message *tcp_link_unsent(struct tcp_link *l)
{
    queue_foreach (q, &l->messages) {
        struct tcp_message *m = container_of(q, struct tcp_message, in_link);
        if (m->claimed < m->bytes)
            return m;
    }
    return NULL;
}

struct tcp_message *tcp_link_unanswered(struct tcp_link *l)
{
    queue_foreach (q, &l->messages) {
        struct tcp_message *m = container_of(q, struct tcp_message, in_link);
        if (m->answer_due)
            return m;
    }
    return NULL;
}

/* --- connections ------------------------------------------------------------------------------ */

static int start_connecting(const union tcp_address *to, int *ret)
{
    int fd = socket(to->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_from_errno(errno);
    int r = tcp_socket_prepare(fd);
    if (r == 0 && connect(fd, &to->any, tcp_address_bytes(to)) != 0 && errno != EINPROGRESS)
        r = RS_EPEER;
    if (r < 0) {
        int saved = errno;
        (void)close(fd);
        errno = saved;
        return r;
    }
    *ret = fd;
    return 0;
}

void tcp_link_dial(struct tcp_link *l, uint32_t stream)
{
    struct tcp *t = l->port->tcp;
    const struct tcp_peer *peer = &t->peers[l->peer];
    struct tcp_hello hello = {.protocol = TCP_PROTOCOL,
                              .model = t->options.model,
                              .epoch = t->base.epoch,
                              .attempt = atomic_load(&t->attempt),
                              .from = l->port->device,
                              .to = l->peer,
                              .stream = stream};
    memcpy(hello.token, peer->token, sizeof(hello.token));
    int fd = -1;
    int r = start_connecting(&peer->address, &fd);
    if (r == 0)
        r = tcp_conn_open(&l->conns[stream], fd, &hello);
    if (r == 0)
        return;
    int saved = errno;
    if (fd >= 0)
        (void)close(fd);
    tcp_link_fail(l, r, "connecting: %s", strerror(saved));
}

static uint64_t unsent_bytes(const struct tcp_link *l)
{
    uint64_t bytes = 0;
    queue_foreach (q, &l->messages) {
        const struct tcp_message *m = container_of(q, struct tcp_message, in_link);
        bytes += m->bytes - m->claimed;
    }
    return bytes;
}

static void open_streams(struct tcp_link *l)
{
    uint64_t wanted = 1 + unsent_bytes(l) / STREAM_BYTES;
    for (uint32_t s = 0; s < l->port->tcp->options.streams && s < wanted; s++)
        if (l->conns[s].fd < 0 && l->port->failed == 0)
            tcp_link_dial(l, s);
}

/* Replaces the one before, whose other end has gone: its hello's generation was above. */
static void adopt(struct tcp_link *l, uint32_t stream, int fd)
{
    struct tcp_conn *c = &l->conns[stream];
    if (c->fd >= 0 && !queue_empty(&l->messages))
        tcp_link_fail(l, RS_EPEER, "its connection was replaced");
    tcp_conn_close(c);
    if (l->n_posted == 0)
        l->lost = false; /* nothing of this attempt can have gone with the former one */
    if (tcp_conn_open(c, fd, NULL) == 0)
        return;
    tcp_link_fail(l, RS_EEXHAUSTED, "a connection could not be watched: %s", strerror(errno));
    (void)close(fd);
}

void tcp_port_adopt(struct tcp_port *port)
{
    struct queue *q;
    (void)pthread_mutex_lock(&port->tcp->mutex);
    while ((q = queue_pop(&port->arrivals)) != NULL) {
        struct tcp_link *l = container_of(q, struct tcp_link, in_arrivals);
        if (queue_empty(&l->in_port))
            queue_push(&port->links, &l->in_port);
        for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++) {
            if (l->arrived[s] < 0)
                continue;
            adopt(l, s, l->arrived[s]);
            l->arrived[s] = -1;
        }
    }
    (void)pthread_mutex_unlock(&port->tcp->mutex);
}

/* --- moving ----------------------------------------------------------------------------------- */

bool tcp_link_pump(struct tcp_link *l)
{
    bool moved = false;
    if (l->out)
        open_streams(l);
    for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++) {
        moved = tcp_conn_read(&l->conns[s]) || moved;
        moved = tcp_conn_write(&l->conns[s]) || moved;
    }
    return moved;
}

static void check_silence(struct tcp_link *l, uint64_t now)
{
    uint64_t silence_ns = l->port->tcp->options.silence_ms * UINT64_C(1000000);
    if (l->port->group != NULL && !queue_empty(&l->messages) && now - l->heard_ns > silence_ns)
        tcp_link_fail(l, RS_EDEADLINE, "nothing was heard of it for %u ms",
                      l->port->tcp->options.silence_ms);
}

void tcp_link_tick(struct tcp_link *l, uint64_t now)
{
    if (peer_is_local(l))
        return;
    for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++) {
        struct tcp_conn *c = &l->conns[s];
        tcp_conn_keep_alive(c, now);
        if (queue_empty(&l->messages)) {
            while (l->out && tcp_conn_read(c))
                ;
            while (tcp_conn_write(c))
                ;
        }
    }
    check_silence(l, now);
}
