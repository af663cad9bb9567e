/* The listening socket and its thread. A connection says its hello within HELLO_MS, in one piece of
 * TCP_HELLO_BYTES, or it goes; what follows the hello stays in the socket for the group that reads
 * it. A hello of an attempt that has not begun here is kept so long, too. Strangers are counted, and
 * cost no more than one of N_CALLERS places: where all are taken the oldest goes, since who belongs
 * here speaks at once, and comes again. */
#include "transport/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

#include "base/banned.h"

enum { HELLO_MS = 3000, N_CALLERS = 64, BACKLOG = 1024, PAUSE_MS = 100 };

/* Who has connected and not said its hello yet. */
struct caller {
    int fd; /* -1: free */
    uint32_t at;
    uint64_t since_ns;
    uint8_t hello[TCP_HELLO_BYTES];
};

struct transport_tcp_node {
    union tcp_address address;
    int listener, epoll, wake;
    pthread_t thread;
    pthread_mutex_t mutex;
    struct queue transports;
    struct caller callers[N_CALLERS];
    uint64_t deaf_until_ns; /* no descriptors were left: not listening until then */
    _Atomic uint64_t refused, connections, connected;
    atomic_bool stop, changed;
};

/* --- addresses -------------------------------------------------------------------------------- */

int tcp_address_parse(const char *text, uint16_t port, union tcp_address *ret)
{
    union tcp_address a;
    memset(&a, 0, sizeof(a));
    if (inet_pton(AF_INET, text, &a.v4.sin_addr) == 1) {
        a.v4.sin_family = AF_INET;
        a.v4.sin_port = htons(port);
    } else if (inet_pton(AF_INET6, text, &a.v6.sin6_addr) == 1) {
        a.v6.sin6_family = AF_INET6;
        a.v6.sin6_port = htons(port);
    } else {
        return RS_EINVAL;
    }
    *ret = a;
    return 0;
}

socklen_t tcp_address_bytes(const union tcp_address *a)
{
    return a->any.sa_family == AF_INET6 ? sizeof(a->v6) : sizeof(a->v4);
}

const char *tcp_address_text(const union tcp_address *a, char out[TCP_ADDRESS_TEXT_BYTES])
{
    char host[INET6_ADDRSTRLEN] = "?";
    bool six = a->any.sa_family == AF_INET6;
    const void *in = six ? (const void *)&a->v6.sin6_addr : &a->v4.sin_addr;
    (void)inet_ntop(a->any.sa_family, in, host, sizeof(host));
    (void)snprintf(out, TCP_ADDRESS_TEXT_BYTES, six ? "[%s]:%u" : "%s:%u", host,
                   ntohs(six ? a->v6.sin6_port : a->v4.sin_port));
    return out;
}

/* --- callers ---------------------------------------------------------------------------------- */

static void let_go(struct caller *c)
{
    (void)close(c->fd);
    c->fd = -1;
}

static void refuse(struct transport_tcp_node *n, struct caller *c, const char *why)
{
    union tcp_address from = {0};
    char text[TCP_ADDRESS_TEXT_BYTES];
    socklen_t bytes = sizeof(from);
    if (getpeername(c->fd, &from.any, &bytes) == 0)
        log_debug("data connection from %s refused: %s", tcp_address_text(&from, text), why);
    let_go(c);
    atomic_fetch_add(&n->refused, 1);
}

/* The first transport to which it belongs judges; one that belongs to none may be early. */
static enum tcp_answer admit(struct transport_tcp_node *n, const struct tcp_hello *h, int fd,
                             const char **ret_why)
{
    enum tcp_answer answer = TCP_NOT_MINE;
    (void)pthread_mutex_lock(&n->mutex);
    queue_foreach (q, &n->transports) {
        answer = tcp_admit(container_of(q, struct tcp, in_node), h, fd, ret_why);
        if (answer != TCP_NOT_MINE)
            break;
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return answer;
}

/* What it says after its hello is not for the node; that it leaves is. */
static int keep(struct transport_tcp_node *n, struct caller *c)
{
    struct epoll_event ev = {.events = EPOLLRDHUP, .data.ptr = c};
    return epoll_ctl(n->epoll, EPOLL_CTL_ADD, c->fd, &ev);
}

static void hear_out(struct transport_tcp_node *n, struct caller *c)
{
    struct tcp_hello h;
    const char *why = NULL;
    enum tcp_answer answer = TCP_REFUSED;
    if (tcp_hello_unpack(c->hello, &h) != 0)
        why = "what it said is no hello";
    else if (h.protocol != TCP_PROTOCOL)
        why = "it speaks another protocol";
    else if (tcp_socket_prepare(c->fd) != 0)
        why = "its socket could not be set up";
    else if (epoll_ctl(n->epoll, EPOLL_CTL_DEL, c->fd, NULL) != 0)
        why = "its socket could not be handed over";
    else
        answer = admit(n, &h, c->fd, &why);
    if ((answer == TCP_NOT_YET || answer == TCP_NOT_MINE) && keep(n, c) != 0) {
        why = "it could not be kept";
        answer = TCP_REFUSED;
    }
    if (answer == TCP_REFUSED)
        refuse(n, c, why);
    else if (answer == TCP_TAKEN)
        c->fd = -1;
}

/* An attempt may have begun: those that were early are heard again. */
static void hear_again(struct transport_tcp_node *n)
{
    if (!atomic_exchange(&n->changed, false))
        return;
    for (int i = 0; i < N_CALLERS; i++)
        if (n->callers[i].fd >= 0 && n->callers[i].at == TCP_HELLO_BYTES)
            hear_out(n, &n->callers[i]);
}

static void hear(struct transport_tcp_node *n, struct caller *c)
{
    if (c->at == TCP_HELLO_BYTES) {
        refuse(n, c, "it left before its attempt began");
        return;
    }
    ssize_t got = recv(c->fd, c->hello + c->at, TCP_HELLO_BYTES - c->at, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (got == 0 &&
        c->at == 0) { /* the coordinator's look at this port, a health check: no stranger */
        let_go(c);
        return;
    }
    if (got <= 0) {
        refuse(n, c, "it left without a hello");
        return;
    }
    c->at += (uint32_t)got;
    if (c->at == TCP_HELLO_BYTES)
        hear_out(n, c);
}

static struct caller *free_place(struct transport_tcp_node *n)
{
    struct caller *oldest = &n->callers[0];
    for (int i = 0; i < N_CALLERS; i++) {
        if (n->callers[i].fd < 0)
            return &n->callers[i];
        if (n->callers[i].since_ns < oldest->since_ns)
            oldest = &n->callers[i];
    }
    refuse(n, oldest, "too many say nothing");
    return oldest;
}

/* Of what listens: EPOLLIN, or nothing for a while. */
static void listen_for(struct transport_tcp_node *n, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = &n->listener};
    rs_assert(epoll_ctl(n->epoll, EPOLL_CTL_MOD, n->listener, &ev) == 0);
}

static void take_caller(struct transport_tcp_node *n)
{
    int fd = accept4(n->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
        n->deaf_until_ns = clock_mono_ns() + PAUSE_MS * UINT64_C(1000000);
        listen_for(n, 0);
    }
    if (fd < 0)
        return;
    struct caller *c = free_place(n);
    *c = (struct caller){.fd = fd, .since_ns = clock_mono_ns()};
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(n->epoll, EPOLL_CTL_ADD, fd, &ev) != 0)
        refuse(n, c, "no room to watch it");
}

/* --- the thread ------------------------------------------------------------------------------- */

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Ends what is overdue; returns when the next will be. */
static uint64_t expire(struct transport_tcp_node *n, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < N_CALLERS; i++) {
        struct caller *c = &n->callers[i];
        uint64_t due = c->since_ns + HELLO_MS * UINT64_C(1000000);
        if (c->fd >= 0 && due <= now)
            refuse(n, c,
                   c->at < TCP_HELLO_BYTES ? "no hello came in time"
                                           : "its attempt has not begun here");
        else if (c->fd >= 0)
            next = earlier(next, due);
    }
    if (n->deaf_until_ns != 0 && n->deaf_until_ns <= now) {
        n->deaf_until_ns = 0;
        listen_for(n, EPOLLIN);
    }
    return n->deaf_until_ns != 0 ? earlier(next, n->deaf_until_ns) : next;
}

/* ALIVE for devices that are idle; those with a group see to it themselves. */
static void tick_ports(struct tcp *t, uint64_t now)
{
    for (uint32_t i = 0; i < t->n_devices; i++) {
        struct tcp_port *port = t->peers[i].port;
        if (port == NULL || pthread_mutex_trylock(&port->io) != 0)
            continue;
        tcp_port_tick(port, now);
        (void)pthread_mutex_unlock(&port->io);
    }
}

static uint64_t tick(struct transport_tcp_node *n, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    (void)pthread_mutex_lock(&n->mutex);
    queue_foreach (q, &n->transports) {
        struct tcp *t = container_of(q, struct tcp, in_node);
        if (t->n_remote > 0) {
            next = earlier(next, now + tcp_beat_ns(t) / 2);
            tick_ports(t, now);
        }
        next = earlier(next, tcp_dial_step(t, now)); /* behind what takes the same ports' events */
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return next;
}

static int wait_ms(uint64_t now, uint64_t next)
{
    if (next == UINT64_MAX)
        return -1;
    return next <= now ? 0 : (int)((next - now) / 1000000U) + 1;
}

static void woken(struct transport_tcp_node *n)
{
    uint64_t v;
    ssize_t got = read(n->wake, &v, sizeof(v));
    (void)got;
}

static void *serve(void *arg)
{
    enum { N_EVENTS = 32 };
    struct transport_tcp_node *n = arg;
    struct epoll_event events[N_EVENTS];
    while (!atomic_load(&n->stop)) {
        uint64_t now = clock_mono_ns();
        hear_again(n);
        uint64_t next = earlier(expire(n, now), tick(n, now));
        int count = epoll_wait(n->epoll, events, N_EVENTS, wait_ms(now, next));
        for (int i = 0; i < count; i++) {
            void *what = events[i].data.ptr;
            struct caller *c = what;
            if (what == &n->listener)
                take_caller(n);
            else if (what == &n->wake)
                woken(n);
            else if (what != NULL && c->fd >= 0)
                hear(n, c);
        }
    }
    return NULL;
}

/* --- life ------------------------------------------------------------------------------------- */

void tcp_node_wake(struct transport_tcp_node *n)
{
    uint64_t one = 1;
    atomic_store(&n->changed, true);
    ssize_t put = write(n->wake, &one, sizeof(one));
    (void)put; /* a full counter wakes as well */
}

void tcp_node_add(struct transport_tcp_node *node, struct tcp *t)
{
    (void)pthread_mutex_lock(&node->mutex);
    queue_push(&node->transports, &t->in_node);
    (void)pthread_mutex_unlock(&node->mutex);
    tcp_node_wake(node);
}

void tcp_node_lock(struct transport_tcp_node *node)
{
    (void)pthread_mutex_lock(&node->mutex);
}

void tcp_node_unlock(struct transport_tcp_node *node)
{
    (void)pthread_mutex_unlock(&node->mutex);
}

int tcp_node_watch(struct transport_tcp_node *node, struct tcp_port *port)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(node->epoll, EPOLL_CTL_ADD, port->epoll, &ev) == 0 || errno == EEXIST)
        return 0;
    return err_from_errno(errno);
}

void tcp_node_ignore(struct transport_tcp_node *node, struct tcp_port *port)
{
    (void)epoll_ctl(node->epoll, EPOLL_CTL_DEL, port->epoll, NULL);
}

void tcp_node_count(struct transport_tcp_node *node, bool made)
{
    if (made) {
        atomic_fetch_add(&node->connections, 1);
        atomic_fetch_add(&node->connected, 1);
    } else {
        atomic_fetch_sub(&node->connections, 1);
    }
}

void tcp_node_remove(struct transport_tcp_node *node, struct tcp *t)
{
    (void)pthread_mutex_lock(&node->mutex);
    queue_remove(&t->in_node);
    (void)pthread_mutex_unlock(&node->mutex);
}

const union tcp_address *tcp_node_address(const struct transport_tcp_node *node)
{
    return &node->address;
}

uint16_t transport_tcp_node_port(const struct transport_tcp_node *node)
{
    return ntohs(node->address.any.sa_family == AF_INET6 ? node->address.v6.sin6_port
                                                         : node->address.v4.sin_port);
}

uint64_t transport_tcp_node_refused(const struct transport_tcp_node *node)
{
    return atomic_load(&((struct transport_tcp_node *)(uintptr_t)node)->refused);
}

uint64_t transport_tcp_node_connections(const struct transport_tcp_node *node)
{
    return atomic_load(&((struct transport_tcp_node *)(uintptr_t)node)->connections);
}

uint64_t transport_tcp_node_connected(const struct transport_tcp_node *node)
{
    return atomic_load(&((struct transport_tcp_node *)(uintptr_t)node)->connected);
}

static int listen_at(struct transport_tcp_node *n)
{
    socklen_t bytes = tcp_address_bytes(&n->address);
    n->listener = socket(n->address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (n->listener < 0 || bind(n->listener, &n->address.any, bytes) != 0 ||
        listen(n->listener, BACKLOG) != 0 || getsockname(n->listener, &n->address.any, &bytes) != 0)
        return err_from_errno(errno);
    return 0;
}

static int watch(struct transport_tcp_node *n)
{
    struct epoll_event listener = {.events = EPOLLIN, .data.ptr = &n->listener};
    struct epoll_event waker = {.events = EPOLLIN, .data.ptr = &n->wake};
    n->epoll = epoll_create1(EPOLL_CLOEXEC);
    n->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (n->epoll < 0 || n->wake < 0 ||
        epoll_ctl(n->epoll, EPOLL_CTL_ADD, n->listener, &listener) != 0 ||
        epoll_ctl(n->epoll, EPOLL_CTL_ADD, n->wake, &waker) != 0)
        return err_from_errno(errno);
    return 0;
}

static void close_all(struct transport_tcp_node *n)
{
    for (int i = 0; i < N_CALLERS; i++)
        if (n->callers[i].fd >= 0)
            (void)close(n->callers[i].fd);
    if (n->listener >= 0)
        (void)close(n->listener);
    if (n->epoll >= 0)
        (void)close(n->epoll);
    if (n->wake >= 0)
        (void)close(n->wake);
}

int transport_tcp_node_open(const char *address, uint16_t port, struct transport_tcp_node **ret,
                            struct err *e)
{
    struct transport_tcp_node *n = mem_zalloc(sizeof(*n));
    if (n == NULL)
        return err_set(e, RS_ENOMEM, "listening at %s: out of memory", address);
    n->listener = n->epoll = n->wake = -1;
    for (int i = 0; i < N_CALLERS; i++)
        n->callers[i].fd = -1;
    queue_init(&n->transports);
    rs_assert(pthread_mutex_init(&n->mutex, NULL) == 0);
    int r = tcp_address_parse(address, port, &n->address);
    if (r < 0) {
        (void)err_set(e, r, "data address '%s' is no numeric address", address);
        goto undo;
    }
    r = listen_at(n);
    if (r == 0)
        r = watch(n);
    if (r == 0 && pthread_create(&n->thread, NULL, serve, n) != 0)
        r = RS_EEXHAUSTED;
    if (r < 0) {
        (void)err_set(e, r, "listening at data address %s, port %u: %s", address, port,
                      strerror(errno));
        goto undo;
    }
    *ret = n;
    return 0;
undo:
    close_all(n);
    (void)pthread_mutex_destroy(&n->mutex);
    mem_free(n);
    return r;
}

void transport_tcp_node_close(struct transport_tcp_node *node)
{
    if (node == NULL)
        return;
    rs_assert(queue_empty(&node->transports));
    atomic_store(&node->stop, true);
    tcp_node_wake(node);
    (void)pthread_join(node->thread, NULL);
    close_all(node);
    (void)pthread_mutex_destroy(&node->mutex);
    mem_free(node);
}
