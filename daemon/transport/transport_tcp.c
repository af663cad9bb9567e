/* Over TCP: groups, attempts, and the vtable. tcp.h says how the parts work together. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "transport/tcp.h"

#include "base/banned.h"

/* One stream: on loopback two and four cost more CPU time per byte and are no faster, since a
 * device's sockets are served by one thread. */
enum { MAX_DEVICES = 16384, SILENCE_MS = 4000, DEFAULT_STREAMS = 1, BEATS_PER_SILENCE = 4 };
enum { MOST_TRAILING = 64 }; /* groups of a port whose answers are missing */

struct tcp *tcp_of_transport(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct tcp, base);
}

uint64_t tcp_beat_ns(const struct tcp *t)
{
    return t->options.silence_ms * UINT64_C(1000000) / BEATS_PER_SILENCE;
}

struct tcp_port *tcp_port_of(const struct tcp *t, uint32_t device)
{
    return device < t->n_devices ? t->peers[device].port : NULL;
}

/* --- groups that trail ------------------------------------------------------------------------ */

static void withdraw(struct tcp_group *g)
{
    for (uint32_t i = 0; i < g->n_messages; i++)
        tcp_link_withdraw(g->messages[i].link, &g->messages[i]);
}

void tcp_group_forget(struct tcp_group *g)
{
    queue_remove(&g->in_trailing);
    g->port->n_trailing--;
    mem_free(g);
}

/* It is over for its caller; of its messages only answers are missing. */
static void trail(struct tcp_group *g)
{
    g->group = NULL;
    for (uint32_t i = 0; i < g->n_messages; i++)
        g->messages[i].from = NULL;
    queue_push(&g->port->trailing, &g->in_trailing);
    g->port->n_trailing++;
}

static void drop_trailing(struct tcp_port *port)
{
    queue_foreach_safe (q, next, &port->trailing) {
        struct tcp_group *g = container_of(q, struct tcp_group, in_trailing);
        withdraw(g);
        tcp_group_forget(g);
    }
}

/* --- ports ------------------------------------------------------------------------------------ */

static void wake(struct tcp_port *port)
{
    uint64_t one = 1;
    ssize_t put = write(port->wake, &one, sizeof(one));
    (void)put; /* a full counter wakes as well */
}

static void port_free(struct tcp_port *port)
{
    struct tcp *t = port->tcp;
    drop_trailing(port);
    for (uint32_t i = 0; i < t->n_devices && port->in != NULL && port->out != NULL; i++) {
        tcp_link_free(port->in[i]);
        tcp_link_free(port->out[i]);
    }
    if (port->epoll >= 0)
        (void)close(port->epoll);
    if (port->wake >= 0)
        (void)close(port->wake);
    (void)pthread_mutex_destroy(&port->io);
    mem_free(port->in);
    mem_free(port->out);
    mem_free(port);
}

static int port_watch(struct tcp_port *port)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    port->epoll = epoll_create1(EPOLL_CLOEXEC);
    port->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (port->epoll < 0 || port->wake < 0 ||
        epoll_ctl(port->epoll, EPOLL_CTL_ADD, port->wake, &ev) != 0)
        return err_from_errno(errno);
    return 0;
}

static int port_new(struct tcp *t, uint32_t device, struct tcp_port **ret)
{
    struct tcp_port *port = mem_zalloc(sizeof(*port));
    if (port == NULL)
        return RS_ENOMEM;
    port->tcp = t;
    port->device = device;
    port->epoll = port->wake = -1;
    queue_init(&port->links);
    queue_init(&port->active);
    queue_init(&port->trailing);
    queue_init(&port->arrivals);
    rs_assert(pthread_mutex_init(&port->io, NULL) == 0);
    port->in = mem_calloc(t->n_devices, sizeof(struct tcp_link *));
    port->out = mem_calloc(t->n_devices, sizeof(struct tcp_link *));
    int r = port->in == NULL || port->out == NULL ? RS_ENOMEM : port_watch(port);
    if (r < 0) {
        port_free(port);
        return r;
    }
    *ret = port;
    return 0;
}

static void take_event(struct tcp_port *port, const struct epoll_event *ev)
{
    struct tcp_conn *c = ev->data.ptr;
    uint64_t v;
    if (c == NULL) {
        ssize_t got = read(port->wake, &v, sizeof(v));
        (void)got;
        return;
    }
    if ((ev->events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
        c->readable = true;
    if ((ev->events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0)
        c->writable = true;
    if ((ev->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
        c->hung = true;
}

/* Until `until_ns`, monotonic; 0: what there is; UINT64_MAX: for as long as it takes. */
static void take_events(struct tcp_port *port, uint64_t until_ns)
{
    enum { N_EVENTS = 64 };
    struct epoll_event events[N_EVENTS];
    uint64_t now = clock_mono_ns(), ns = until_ns > now ? until_ns - now : 0;
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000U), .tv_nsec = (long)(ns % 1000000000U)};
    int n = epoll_pwait2(port->epoll, events, N_EVENTS, until_ns == UINT64_MAX ? NULL : &t, NULL);
    for (int i = 0; i < n; i++)
        take_event(port, &events[i]);
}

void tcp_port_take_events(struct tcp_port *port)
{
    take_events(port, 0);
}

void tcp_port_tick(struct tcp_port *port, uint64_t now)
{
    if (port->group == NULL)
        take_events(port, 0);
    tcp_port_adopt(port);
    queue_foreach (q, &port->links) {
        struct tcp_link *l = container_of(q, struct tcp_link, in_port);
        /* After a stop of this process nobody's silence counts. */
        if (now - port->ticked_ns > 2 * tcp_beat_ns(port->tcp))
            l->heard_ns = now;
        tcp_link_tick(l, now);
    }
    port->ticked_ns = now;
}

/* --- letting in ------------------------------------------------------------------------------- */

/* The socket is new: the frame fits into its buffer. */
static bool welcome(const struct tcp_hello *h, int fd)
{
    uint8_t out[TCP_FRAME_BYTES];
    tcp_frame_pack(&(struct tcp_frame){.type = TCP_WELCOME,
                                       .from = h->from,
                                       .to = h->to,
                                       .epoch = h->epoch,
                                       .attempt = h->attempt},
                   out);
    return send(fd, out, sizeof(out), MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof(out);
}

/* Under tcp.mutex. */
static const char *admit_to(struct tcp_port *port, struct tcp_link *l, const struct tcp_hello *h,
                            int fd)
{
    if (h->attempt <= l->newest[h->stream])
        return "its token was used before";
    if (!welcome(h, fd))
        return "it left at once";
    l->newest[h->stream] = h->attempt;
    if (l->arrived[h->stream] >= 0)
        (void)close(l->arrived[h->stream]);
    l->arrived[h->stream] = fd;
    queue_remove(&l->in_arrivals);
    queue_push(&port->arrivals, &l->in_arrivals);
    return NULL;
}

static const char *judge(struct tcp *t, const struct tcp_hello *h, int fd)
{
    struct tcp_port *port = tcp_port_of(t, h->to);
    if (port == NULL || h->from >= t->n_devices || !t->peers[h->from].takes_part)
        return "it names devices that do not speak here";
    if (!tcp_token_equal(h->token, t->peers[h->from].token))
        return "its token is wrong";
    if (h->stream >= TRANSPORT_TCP_MAX_STREAMS)
        return "it has too many streams";
    struct tcp_link *l = tcp_link_get(port, h->from, false);
    if (l == NULL)
        return "no memory for its link";
    (void)pthread_mutex_lock(&t->mutex);
    const char *why = admit_to(port, l, h, fd);
    (void)pthread_mutex_unlock(&t->mutex);
    if (why == NULL)
        wake(port);
    return why;
}

/* Local devices connect when they need to: such a hello may be heard in the next attempt only. */
static bool from_here(const struct tcp *t, const struct tcp_hello *h)
{
    return h->from < t->n_devices && t->peers[h->from].port != NULL;
}

enum tcp_answer tcp_admit(struct tcp *t, const struct tcp_hello *h, int fd, const char **ret_why)
{
    uint64_t attempt = atomic_load(&t->attempt);
    if (h->model != t->options.model)
        return TCP_NOT_MINE;
    if (h->epoch > t->base.epoch || (h->epoch == t->base.epoch && h->attempt > attempt))
        return TCP_NOT_YET;
    if (h->epoch < t->base.epoch || (h->attempt < attempt && !from_here(t, h)))
        *ret_why = "its attempt is over";
    else
        *ret_why = judge(t, h, fd);
    return *ret_why == NULL ? TCP_TAKEN : TCP_REFUSED;
}

/* --- a group ---------------------------------------------------------------------------------- */

static bool may_start(struct tcp_group *g)
{
    struct tcp_port *port = g->port;
    if (atomic_load(&port->tcp->aborted) || g->attempt != atomic_load(&port->tcp->attempt)) {
        atomic_fetch_add(&port->stale_frames, g->n_messages);
        return false;
    }
    if (port->failed != 0)
        g->status = err_set(&g->err, port->failed,
                            "device %u: an earlier group of the attempt failed", port->device);
    else if (!fence_holds(port->tcp->options.fence))
        g->status = port->failed =
            err_set(&g->err, RS_EDEADLINE, "device %u: the lease has run out", port->device);
    return g->status == 0;
}

static bool group_stopped(const struct tcp_group *g)
{
    return g->status != 0 || atomic_load(&g->port->tcp->aborted);
}

/* What it sent and received is through; answers may be missing where another group follows. */
static bool group_through(const struct tcp_group *g)
{
    const struct tcp_port *port = g->port;
    if (g->n_open == 0 && port->n_trailing == 0)
        return true;
    return g->n_buffers == 0 && port->n_trailing < MOST_TRAILING &&
           atomic_load(&port->n_waiting) > 0;
}

static bool group_over(const struct tcp_group *g)
{
    return group_through(g) || group_stopped(g);
}

static void post_all(struct tcp_group *g, uint64_t now)
{
    queue_foreach (q, &g->port->active) { /* by messages that trail: nobody listened meanwhile */
        struct tcp_link *l = container_of(q, struct tcp_link, in_active);
        l->heard_ns = now;
        if (l->lost)
            tcp_link_fail(l, RS_EPEER, "its connection broke: %s", l->why);
    }
    for (uint32_t i = 0; i < g->n_messages; i++)
        tcp_link_post(g->messages[i].link, &g->messages[i], now);
}

static bool pump(struct tcp_port *port)
{
    bool moved = false;
    port->next_due_ns = UINT64_MAX;
    queue_foreach_safe (q, next, &port->active) {
        if (tcp_link_pump(container_of(q, struct tcp_link, in_active)))
            moved = true;
    }
    return moved;
}

static void wait_for_events(struct tcp_port *port)
{
    uint64_t until = port->next_due_ns;
    if (port->tcp->n_remote > 0 && port->ticked_ns + tcp_beat_ns(port->tcp) / 2 < until)
        until = port->ticked_ns + tcp_beat_ns(port->tcp) / 2;
    take_events(port, until);
}

static void tick_if_due(struct tcp_port *port)
{
    uint64_t now = clock_mono_ns();
    if (port->tcp->n_remote > 0 && now - port->ticked_ns >= tcp_beat_ns(port->tcp) / 2)
        tcp_port_tick(port, now);
}

/* True when it is through. A group that moves without ever waiting looks here for what else has come, now and then. */
static bool run_group_messages(struct tcp_group *g)
{
    enum { PUMPS_PER_LOOK = 64 };
    struct tcp_port *port = g->port;
    bool through = group_through(g);
    for (unsigned i = 1; !through && !group_stopped(g); i++) {
        bool moved = pump(port);
        if (!group_over(g) && (!moved || i % PUMPS_PER_LOOK == 0)) {
            if (moved)
                port->next_due_ns = 0; /* don't wait */
            wait_for_events(port);
            tcp_port_adopt(port);
        }
        if (!group_over(g))
            tick_if_due(port); /* so that a peer hears of us in the middle of a long message */
        through = group_through(g);
    }
    return through && g->status == 0;
}

/* Under port.io. Afterwards nobody touches the group's buffers. */
static void run_locked(struct tcp_group *g)
{
    struct tcp_port *port = g->port;
    if (!may_start(g)) {
        drop_trailing(port);
        return;
    }
    uint64_t now = clock_mono_ns();
    port->group = g;
    port->ticked_ns = now;
    post_all(g, now);
    tcp_port_adopt(port);
    bool through = run_group_messages(g);
    port->group = NULL;
    if (through && g->n_open > 0)
        trail(g);
    if (through)
        return;
    withdraw(g);
    drop_trailing(port);
}

/* On the stream's thread. Nothing touches the transport once it counts as over. */
static void run_group(void *arg)
{
    struct tcp_group *g = arg;
    struct tcp_port *port = g->port;
    struct tcp *t = port->tcp;
    struct transport_group *group = g->group;
    (void)atomic_fetch_sub(&port->n_waiting, 1);
    (void)pthread_mutex_lock(&port->io);
    run_locked(g);
    bool trails = g->group == NULL;
    if (!trails && g->status == 0 && g->n_open > 0)
        g->status =
            err_set(&g->err, RS_ECANCELED, "device %u: the attempt was aborted", port->device);
    int status = g->status;
    struct err e = g->err;
    (void)pthread_mutex_unlock(&port->io);
    if (!trails)
        mem_free(g);
    (void)pthread_mutex_lock(&t->mutex);
    t->n_groups--;
    (void)pthread_mutex_unlock(&t->mutex);
    group->on_done(group, status, &e);
}

/* Links are made here, those of a local other end too: where nobody asks for memory later, nobody
 * has to do without. */
static int group_fill(struct tcp_group *g, const struct transport_group *group)
{
    const struct tcp *t = g->port->tcp;
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *from = &group->messages[i];
        struct tcp_message *m = &g->messages[i];
        struct tcp_port *other = tcp_port_of(t, from->peer);
        queue_init(&m->in_link);
        m->group = g;
        m->link = tcp_link_get(g->port, from->peer, from->send);
        m->from = from;
        m->bytes = from->bytes;
        m->send = from->send;
        m->network = from->network;
        m->tag = from->tag;
        if (m->link == NULL ||
            (other != NULL && tcp_link_get(other, g->port->device, !from->send) == NULL))
            return RS_ENOMEM;
    }
    return 0;
}

static int group_new(struct tcp_port *port, struct transport_group *group, struct tcp_group **ret)
{
    struct tcp_group *g =
        mem_zalloc(sizeof(*g) + (size_t)group->n_messages * sizeof(g->messages[0]));
    if (g == NULL)
        return RS_ENOMEM;
    g->group = group;
    g->port = port;
    g->n_messages = group->n_messages;
    g->n_open = g->n_buffers = group->n_messages;
    queue_init(&g->in_trailing);
    int r = group_fill(g, group);
    if (r < 0) {
        mem_free(g);
        return r;
    }
    *ret = g;
    return 0;
}

/* Zero-size messages are left out by both sides; one here is a bug of the caller's cutting. */
static bool messages_valid(const struct tcp *t, const struct transport_group *group)
{
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *x = &group->messages[i];
        if (x->peer >= t->n_devices || !t->peers[x->peer].takes_part || x->bytes == 0)
            return false;
    }
    return true;
}

int tcp_count_group(struct tcp *t, uint64_t *ret_attempt)
{
    int r = 0;
    (void)pthread_mutex_lock(&t->mutex);
    *ret_attempt = atomic_load(&t->attempt);
    if (*ret_attempt == 0)
        r = RS_EPRECOND;
    else if (atomic_load(&t->aborted))
        r = RS_ECANCELED;
    else
        t->n_groups++;
    (void)pthread_mutex_unlock(&t->mutex);
    return r;
}

static int tcp_enqueue(struct transport *transport, uint32_t device, struct device_stream *stream,
                       struct transport_group *group)
{
    struct tcp *t = tcp_of_transport(transport);
    struct tcp_port *port = tcp_port_of(t, device);
    struct tcp_group *g;
    if (port == NULL || !messages_valid(t, group))
        return RS_EINVAL;
    int r = group_new(port, group, &g);
    if (r < 0)
        return r;
    r = tcp_count_group(t, &g->attempt);
    if (r < 0)
        goto free_group;
    (void)atomic_fetch_add(&port->n_waiting, 1);
    r = device_call(stream, run_group, g);
    if (r < 0)
        goto dismiss;
    wake(port); /* the one that runs may make way now */
    return 0;
dismiss:
    (void)atomic_fetch_sub(&port->n_waiting, 1);
    (void)pthread_mutex_lock(&t->mutex);
    t->n_groups--;
    (void)pthread_mutex_unlock(&t->mutex);
free_group:
    mem_free(g);
    return r;
}

/* --- attempts --------------------------------------------------------------------------------- */

/* Connections that ended since the last attempt are made again when they are needed. */
static void renew(struct tcp_port *port)
{
    (void)pthread_mutex_lock(&port->io);
    port->failed = 0;
    atomic_store(&port->first_byte_ns, 0);
    drop_trailing(
        port); /* the group that waited behind them may not have been enqueued after all */
    take_events(port, 0);
    tcp_port_adopt(port);
    queue_foreach (q, &port->links) {
        struct tcp_link *l = container_of(q, struct tcp_link, in_port);
        l->n_posted = 0;
        l->lost = false;
        l->why[0] = '\0';
        for (uint32_t s = 0; s < TRANSPORT_TCP_MAX_STREAMS; s++)
            tcp_conn_renew(&l->conns[s]);
    }
    (void)pthread_mutex_unlock(&port->io);
}

static int tcp_begin(struct transport *transport, uint64_t attempt, struct err *e)
{
    struct tcp *t = tcp_of_transport(transport);
    uint64_t last = atomic_load(&t->attempt);
    int r = 0;
    (void)pthread_mutex_lock(&t->mutex);
    if (t->n_groups > 0)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not over: %u groups are left",
                    (unsigned long long)last, t->n_groups);
    else if (attempt <= last)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not above the last one, %llu",
                    (unsigned long long)attempt, (unsigned long long)last);
    (void)pthread_mutex_unlock(&t->mutex);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (t->peers[i].port != NULL)
            renew(t->peers[i].port);
    atomic_store(&t->aborted, false);
    atomic_store(&t->attempt, attempt);
    tcp_node_wake(t->node);
    return 0;
}

static void tcp_abort(struct transport *transport)
{
    struct tcp *t = tcp_of_transport(transport);
    /* With the mutex, so that a group is either counted before or refused. */
    (void)pthread_mutex_lock(&t->mutex);
    atomic_store(&t->aborted, true);
    (void)pthread_mutex_unlock(&t->mutex);
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (t->peers[i].port != NULL)
            wake(t->peers[i].port);
    tcp_node_wake(t->node);
}

static bool tcp_quiesced(const struct transport *transport)
{
    struct tcp *t = tcp_of_transport(transport);
    (void)pthread_mutex_lock(&t->mutex);
    bool quiesced = t->n_groups == 0;
    (void)pthread_mutex_unlock(&t->mutex);
    return quiesced;
}

static struct transport_counters tcp_counters(const struct transport *transport, uint32_t device)
{
    struct tcp_port *port = tcp_port_of(tcp_of_transport(transport), device);
    if (port == NULL)
        return (struct transport_counters){0};
    return (struct transport_counters){
        .network_sent_bytes = atomic_load(&port->sent_bytes[true]),
        .network_received_bytes = atomic_load(&port->received_bytes[true]),
        .domain_sent_bytes = atomic_load(&port->sent_bytes[false]),
        .domain_received_bytes = atomic_load(&port->received_bytes[false]),
        .messages = atomic_load(&port->messages),
        .stale_frames = atomic_load(&port->stale_frames),
        .first_byte_ns = atomic_load(&port->first_byte_ns),
    };
}

/* --- the transport ---------------------------------------------------------------------------- */

static void tcp_free(struct tcp *t)
{
    for (uint32_t i = 0; i < t->n_devices && t->peers != NULL; i++)
        if (t->peers[i].port != NULL)
            port_free(t->peers[i].port);
    (void)pthread_mutex_destroy(&t->mutex);
    mem_free(t->peers);
    mem_free(t);
}

static void tcp_close(struct transport *transport)
{
    struct tcp *t = tcp_of_transport(transport);
    rs_assert(t->n_groups == 0);
    tcp_node_remove(t->node, t);
    tcp_free(t);
}

static bool tcp_takes_pieces(const struct transport *t, uint32_t device, uint32_t peer)
{
    (void)t, (void)device, (void)peer;
    return true;
}

static const struct transport_ops tcp_ops = {
    .kind = "tcp",
    .takes_pieces = tcp_takes_pieces,
    .begin = tcp_begin,
    .connect = tcp_connect,
    .enqueue = tcp_enqueue,
    .abort = tcp_abort,
    .quiesced = tcp_quiesced,
    .counters = tcp_counters,
    .close = tcp_close,
};

static int set_remote(struct tcp_peer *peer, uint32_t i, const struct transport_tcp_device *d,
                      struct err *e)
{
    if (tcp_address_parse(d->address, d->port, &peer->address) < 0)
        return err_set(e, RS_EINVAL, "device %u: '%s' is no numeric address", i, d->address);
    (void)snprintf(peer->node, sizeof(peer->node), "%s", d->node != NULL ? d->node : "");
    memcpy(peer->token, d->token, TRANSPORT_TOKEN_BYTES);
    return 0;
}

static int open_peer(struct tcp *t, uint32_t i, const struct transport_tcp_device *d,
                     const uint8_t own_token[TRANSPORT_TOKEN_BYTES], struct err *e)
{
    struct tcp_peer *peer = &t->peers[i];
    peer->takes_part = d->device != NULL || d->address != NULL;
    if (d->device != NULL) {
        int r = port_new(t, i, &peer->port);
        if (r < 0)
            return err_set(e, r, "device %u: no means for its connections", i);
        peer->address = *tcp_node_address(t->node);
        memcpy(peer->token, own_token, TRANSPORT_TOKEN_BYTES);
    } else if (d->address != NULL) {
        t->n_remote++;
        return set_remote(peer, i, d, e);
    }
    return 0;
}

/* --- renewal ---------------------------------------------------------------------------------- */

static bool same_address(const union tcp_address *a, const union tcp_address *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

static void hang_up(struct tcp_link *l)
{
    for (uint32_t s = 0; l != NULL && s < TRANSPORT_TCP_MAX_STREAMS; s++)
        tcp_conn_close(&l->conns[s]);
}

/* Another process listens there now: what stands to the former one is of no use. */
static void leave_device(struct tcp *t, uint32_t device)
{
    for (uint32_t i = 0; i < t->n_devices; i++) {
        struct tcp_port *port = t->peers[i].port;
        if (port == NULL)
            continue;
        (void)pthread_mutex_lock(&port->io);
        hang_up(port->in[device]);
        hang_up(port->out[device]);
        (void)pthread_mutex_unlock(&port->io);
    }
}

int transport_tcp_renew(struct transport *transport, const struct transport_tcp_device *devices,
                        struct err *e)
{
    struct tcp *t = tcp_of_transport(transport);
    int r = 0;
    rs_assert(tcp_quiesced(transport));
    tcp_node_lock(t->node);
    for (uint32_t i = 0; i < t->n_devices && r == 0; i++) {
        struct tcp_peer *peer = &t->peers[i];
        union tcp_address before = peer->address;
        if (peer->port != NULL || !peer->takes_part)
            continue;
        rs_assert(devices[i].address != NULL);
        r = set_remote(peer, i, &devices[i], e);
        if (r == 0 && !same_address(&before, &peer->address))
            leave_device(t, i);
    }
    tcp_node_unlock(t->node);
    return r;
}

/* --- opening ---------------------------------------------------------------------------------- */

static void set_options(struct tcp *t, const struct transport_tcp_options *o)
{
    t->options = *o;
    if (o->streams == 0)
        t->options.streams = DEFAULT_STREAMS;
    if (o->streams > TRANSPORT_TCP_MAX_STREAMS)
        t->options.streams = TRANSPORT_TCP_MAX_STREAMS;
    if (o->silence_ms == 0)
        t->options.silence_ms = SILENCE_MS;
}

int transport_tcp_open(struct transport_tcp_node *node, const struct transport_tcp_device *devices,
                       uint32_t n_devices, uint64_t epoch,
                       const struct transport_tcp_options *options, struct transport **ret,
                       struct err *e)
{
    uint8_t own_token[TRANSPORT_TOKEN_BYTES];
    int r = 0;
    if (n_devices > MAX_DEVICES)
        return err_set(e, RS_EEXHAUSTED, "TCP transport of %u devices: %d are the most", n_devices,
                       MAX_DEVICES);
    struct tcp *t = mem_zalloc(sizeof(*t));
    if (t == NULL)
        return err_set(e, RS_ENOMEM, "TCP transport of %u devices", n_devices);
    t->base = (struct transport){.ops = &tcp_ops, .epoch = epoch};
    t->node = node;
    t->n_devices = n_devices;
    queue_init(&t->in_node);
    set_options(t, options);
    rs_assert(pthread_mutex_init(&t->mutex, NULL) == 0);
    t->peers = mem_calloc(n_devices, sizeof(*t->peers));
    if (t->peers == NULL)
        r = err_set(e, RS_ENOMEM, "TCP transport of %u devices", n_devices);
    random_bytes(own_token, sizeof(own_token));
    for (uint32_t i = 0; i < n_devices && r == 0; i++)
        r = open_peer(t, i, &devices[i], own_token, e);
    if (r < 0) {
        tcp_free(t);
        return r;
    }
    tcp_node_add(node, t);
    *ret = &t->base;
    return 0;
}
