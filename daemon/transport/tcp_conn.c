#include "transport/tcp.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"

#include "base/banned.h"

enum { FILLER_BYTES = 64 << 10, MOST_RUNS = 64 };

static const uint8_t zeros[FILLER_BYTES];

static struct tcp *tcp_of(const struct tcp_conn *c)
{
    return c->link->port->tcp;
}

static double rate_of(const struct tcp *t, bool network)
{
    return network ? t->options.network_bytes_per_s : t->options.domain_bytes_per_s;
}

/* --- life ------------------------------------------------------------------------------------- */

/* The kernel sizes the buffers itself: set to 1 or 4 MiB they gained nothing on loopback (0.33 and
 * 0.35 against 0.31 s of CPU time per GB), and for a long link they would be a guess. */
int tcp_socket_prepare(int fd)
{
    int one = 1;
    return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) == 0 ? 0
                                                                            : err_from_errno(errno);
}

void tcp_conn_init(struct tcp_conn *c, struct tcp_link *l, uint32_t stream)
{
    *c = (struct tcp_conn){.link = l, .fd = -1, .stream = stream};
}

static void count(struct tcp_conn *c)
{
    c->counted = true;
    tcp_node_count(tcp_of(c)->node, true);
}

int tcp_conn_open(struct tcp_conn *c, int fd, const struct tcp_hello *hello)
{
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
    if (epoll_ctl(c->link->port->epoll, EPOLL_CTL_ADD, fd, &ev) != 0)
        return err_from_errno(errno);
    tcp_conn_init(c, c->link, c->stream);
    c->fd = fd;
    c->said_ns = clock_mono_ns();
    c->readable = hello == NULL;
    c->writable = hello == NULL;
    c->connecting = hello != NULL;
    if (hello != NULL) {
        tcp_hello_pack(hello, c->out.header);
        c->out.header_bytes = TCP_HELLO_BYTES;
    } else {
        count(c);
    }
    return 0;
}

void tcp_conn_close(struct tcp_conn *c)
{
    if (c->fd >= 0)
        (void)close(c->fd);
    if (c->counted)
        tcp_node_count(tcp_of(c)->node, false);
    tcp_conn_init(c, c->link, c->stream);
}

static void fail(struct tcp_conn *c, int code, const char *what)
{
    tcp_link_fail(c->link, code, "%s", what);
    tcp_conn_close(c);
}

static void fail_errno(struct tcp_conn *c, const char *what)
{
    tcp_link_fail(c->link, RS_EPEER, "%s: %s", what, strerror(errno));
    tcp_conn_close(c);
}

void tcp_conn_withdraw(struct tcp_conn *c, const struct tcp_message *m)
{
    if (c->in.message == m) {
        c->in.message = NULL;
        c->in.due_ns = 0;
        atomic_fetch_add(&c->link->port->stale_frames, 1);
    }
    if (c->out.answering == m)
        c->out.answering = NULL;
    if (c->out.message != m)
        return;
    if (c->out.header_at == 0)
        memset(&c->out, 0, sizeof(c->out));
    c->out.message = NULL;
    c->out.due_ns = 0;
}

/* The attempt's first payload moves; only the holder of io writes it. */
static void first_byte(struct tcp_conn *c, uint64_t now)
{
    struct tcp_port *port = c->link->port;
    if (atomic_load(&port->first_byte_ns) == 0)
        atomic_store(&port->first_byte_ns, now);
}

/* --- writing ---------------------------------------------------------------------------------- */

static bool staged(const struct tcp_conn *c)
{
    return c->out.header_bytes > 0;
}

static void stage(struct tcp_conn *c, struct tcp_frame f)
{
    const struct tcp_link *l = c->link;
    f.from = l->out ? l->port->device : l->peer;
    f.to = l->out ? l->peer : l->port->device;
    f.epoch = tcp_of(c)->base.epoch;
    f.attempt = atomic_load(&tcp_of(c)->attempt);
    memset(&c->out, 0, sizeof(c->out));
    tcp_frame_pack(&f, c->out.header);
    c->out.header_bytes = TCP_FRAME_BYTES;
    c->out.attempt = f.attempt;
    c->out.length = f.length;
}

static bool stage_data(struct tcp_conn *c)
{
    struct tcp_message *m = tcp_link_unsent(c->link);
    if (m == NULL)
        return false;
    struct tcp *t = tcp_of(c);
    double rate = rate_of(t, m->network);
    uint64_t n = pace_chunk(rate, m->bytes - m->claimed, TCP_MAX_PAYLOAD_BYTES);
    stage(c, (struct tcp_frame){.type = TCP_DATA,
                                .network = m->network,
                                .sequence = m->sequence,
                                .message_bytes = m->bytes,
                                .tag = m->tag,
                                .offset = m->claimed,
                                .length = (uint32_t)n});
    c->out.message = m;
    c->out.offset = m->claimed;
    if (rate > 0)
        c->out.due_ns =
            pace_reserve(&c->link->port->pace, PACE_EGRESS, m->network, rate, n, clock_mono_ns());
    m->claimed += n;
    return true;
}

static bool stage_answer(struct tcp_conn *c)
{
    struct tcp_message *m = tcp_link_unanswered(c->link);
    if (m == NULL)
        return false;
    m->answer_due = false;
    stage(c, (struct tcp_frame){
                 .type = TCP_ACCEPT, .sequence = m->sequence, .message_bytes = m->bytes});
    c->out.answering = m;
    return true;
}

void tcp_conn_keep_alive(struct tcp_conn *c, uint64_t now)
{
    if (c->fd >= 0 && !c->connecting && !staged(c) && now - c->said_ns > tcp_beat_ns(tcp_of(c)))
        stage(c, (struct tcp_frame){.type = TCP_ALIVE});
}

/* True when it must wait: for its paced time, or for the attempt after the one it was aborted in.
 */
static bool must_wait(struct tcp_conn *c)
{
    struct tcp_port *port = c->link->port;
    if (c->out.length > 0 && c->out.message == NULL)
        return c->out.attempt >= atomic_load(&tcp_of(c)->attempt);
    if (c->out.due_ns == 0 || c->out.due_ns <= clock_mono_ns())
        return false;
    if (c->out.due_ns < port->next_due_ns)
        port->next_due_ns = c->out.due_ns;
    return true;
}

static bool connected(struct tcp_conn *c)
{
    int e = 0;
    socklen_t n = sizeof(e);
    if (!c->writable)
        return false;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &e, &n) == 0 && e != 0) {
        errno = e;
        fail_errno(c, "connecting");
        return false;
    }
    c->connecting = false;
    c->readable = true;
    count(c);
    return true;
}

static void written(struct tcp_conn *c)
{
    struct tcp_message *sent = c->out.message, *answered = c->out.answering;
    uint32_t length = c->out.length;
    memset(&c->out, 0, sizeof(c->out));
    c->said_ns = clock_mono_ns();
    if (answered != NULL) {
        answered->accepted = true;
        tcp_link_settle(c->link, answered);
    }
    if (sent == NULL)
        return;
    atomic_fetch_add(&c->link->port->sent_bytes[sent->network], length);
    sent->moved += length;
    tcp_link_settle(c->link, sent);
}

/* True when the lease is over: the group fails, its buffers are left alone. */
static bool fenced(struct tcp_conn *c)
{
    if (fence_holds(tcp_of(c)->options.fence))
        return false;
    tcp_link_fail(c->link, RS_EDEADLINE, "the lease has run out");
    return true;
}

/* Header and payload in one call, straight out of the message's memory. */
static ssize_t send_some(struct tcp_conn *c)
{
    struct tcp_out *o = &c->out;
    size_t left = o->length - o->at;
    struct iovec iov[1 + MOST_RUNS] = {{o->header + o->header_at, o->header_bytes - o->header_at}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = 1};
    if (o->message != NULL) {
        m.msg_iovlen +=
            transport_runs(o->message->from, o->offset + o->at, left, iov + 1, MOST_RUNS);
    } else if (left > 0) {
        iov[1] =
            (struct iovec){(void *)(uintptr_t)zeros, left < sizeof(zeros) ? left : sizeof(zeros)};
        m.msg_iovlen = 2;
    }
    return sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void sent_some(struct tcp_out *o, size_t n)
{
    size_t header = o->header_bytes - o->header_at;
    if (header > n)
        header = n;
    o->header_at += (uint32_t)header;
    o->at += (uint32_t)(n - header);
}

static bool stage_next(struct tcp_conn *c)
{
    return c->link->out ? stage_data(c) : stage_answer(c);
}

bool tcp_conn_write(struct tcp_conn *c)
{
    if (c->fd < 0 || (c->connecting && !connected(c)))
        return false;
    if (!c->writable || (!staged(c) && !stage_next(c)) || must_wait(c) ||
        (c->out.message != NULL && fenced(c)))
        return false;
    uint64_t began = clock_mono_ns();
    ssize_t n = send_some(c);
    if (n < 0 && errno == EINTR)
        return true;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        c->writable = false;
        return false;
    }
    if (n < 0) {
        fail_errno(c, "sending");
        return true;
    }
    sent_some(&c->out, (size_t)n);
    if (c->out.message != NULL && c->out.at > 0)
        first_byte(c, began);
    if (c->out.header_at == c->out.header_bytes && c->out.at == c->out.length)
        written(c);
    return true;
}

/* --- reading ---------------------------------------------------------------------------------- */

static void drain(struct tcp_conn *c)
{
    atomic_fetch_add(&c->link->port->stale_frames, 1);
    c->in.message = NULL;
    c->in.due_ns = 0;
    c->in.left = c->in.frame.length;
    c->in.header_at = 0;
}

/* Tells the sender and fails the group. At best effort: where there is no room for the frame the
 * connection's end tells it. */
static void refuse(struct tcp_conn *c, uint64_t bytes, const char *what)
{
    const struct tcp_frame *f = &c->in.frame;
    tcp_link_fail(c->link, RS_EPROTO,
                  "%s: the sender's message has %llu bytes, the receiver's %llu", what,
                  (unsigned long long)f->message_bytes, (unsigned long long)bytes);
    if (staged(c)) {
        tcp_conn_close(c);
        return;
    }
    stage(c,
          (struct tcp_frame){.type = TCP_REFUSE, .sequence = f->sequence, .message_bytes = bytes});
    drain(c);
    (void)tcp_conn_write(c);
}

static void land(struct tcp_conn *c, struct tcp_message *m)
{
    struct tcp_in *in = &c->in;
    double rate = rate_of(tcp_of(c), m->network);
    first_byte(c, clock_mono_ns());
    if (m->claimed == 0)
        m->answer_due = true;
    m->claimed += in->frame.length;
    in->message = m;
    in->left = in->frame.length;
    in->header_at = 0;
    in->due_ns = rate > 0 ? pace_reserve(&c->link->port->pace, PACE_INGRESS, m->network, rate,
                                         in->frame.length, clock_mono_ns())
                          : 0;
}

/* False: its receive is not posted yet, or its attempt has not begun here. */
static bool take_data(struct tcp_conn *c)
{
    struct tcp_link *l = c->link;
    const struct tcp_frame *f = &c->in.frame;
    uint64_t attempt = atomic_load(&tcp_of(c)->attempt);
    if (f->attempt > attempt || (f->attempt == attempt && f->sequence >= l->n_posted))
        return false;
    if (f->attempt < attempt || l->port->failed != 0) {
        drain(c);
        return true;
    }
    struct tcp_message *m = tcp_link_find(l, f->sequence);
    if (m == NULL)
        refuse(c, 0, "more than was planned");
    else if (m->bytes != f->message_bytes)
        refuse(c, m->bytes, "sizes differ");
    else if (m->tag != f->tag)
        refuse(c, m->bytes, "it is another message than was planned");
    else if (m->network != f->network)
        refuse(c, m->bytes, "tiers differ");
    else if (f->length > m->bytes - m->claimed)
        refuse(c, m->bytes, "more bytes than the message has");
    else
        land(c, m);
    return true;
}

static void take_answer(struct tcp_conn *c)
{
    struct tcp_link *l = c->link;
    const struct tcp_frame f = c->in.frame;
    c->in.header_at = 0;
    if (f.attempt != atomic_load(&tcp_of(c)->attempt)) {
        atomic_fetch_add(&l->port->stale_frames, 1);
        return;
    }
    struct tcp_message *m = tcp_link_find(l, f.sequence);
    if (m == NULL)
        return; /* its group has failed */
    if (f.type == TCP_REFUSE) {
        tcp_link_fail(l, RS_EPROTO,
                      "refused: the sender's message has %llu bytes, the receiver's %llu",
                      (unsigned long long)m->bytes, (unsigned long long)f.message_bytes);
        return;
    }
    m->accepted = true;
    tcp_link_settle(l, m);
}

static bool of_this_link(const struct tcp_conn *c, const struct tcp_frame *f)
{
    const struct tcp_link *l = c->link;
    uint32_t from = l->out ? l->port->device : l->peer, to = l->out ? l->peer : l->port->device;
    bool way = f->type == TCP_ALIVE || (f->type == TCP_DATA) == !l->out;
    if (f->type == TCP_WELCOME && c->welcome)
        return false;
    return way && f->from == from && f->to == to && f->epoch == tcp_of(c)->base.epoch;
}

/* The header is there. False: it waits. */
static bool take_frame(struct tcp_conn *c)
{
    if (tcp_frame_unpack(c->in.header, &c->in.frame) != 0 || !of_this_link(c, &c->in.frame)) {
        fail(c, RS_EPROTO, "what came is no frame of this link");
        return true;
    }
    if (c->in.frame.type == TCP_DATA)
        return take_data(c);
    if (c->in.frame.type == TCP_WELCOME)
        c->welcome = true;
    if (c->in.frame.type == TCP_ALIVE || c->in.frame.type == TCP_WELCOME)
        c->in.header_at = 0;
    else
        take_answer(c);
    return true;
}

static void landed(struct tcp_conn *c)
{
    struct tcp_message *m = c->in.message;
    c->in.message = NULL;
    if (m == NULL)
        return;
    transport_damage(m->from, c->in.frame.offset, c->in.frame.length);
    atomic_fetch_add(&c->link->port->received_bytes[m->network], c->in.frame.length);
    m->moved += c->in.frame.length;
    tcp_link_settle(c->link, m);
}

/* Payload straight into the message's memory, and the next header in the same call. */
static ssize_t receive_some(struct tcp_conn *c)
{
    static _Thread_local uint8_t filler[FILLER_BYTES];
    struct tcp_in *in = &c->in;
    struct iovec iov[MOST_RUNS + 1];
    uint64_t at = in->frame.offset + in->frame.length - in->left;
    size_t covered = 0;
    uint32_t n = 0;
    if (in->message != NULL)
        n = transport_runs(in->message->from, at, in->left, iov, MOST_RUNS);
    else if (in->left > 0)
        iov[n++] = (struct iovec){filler, in->left < sizeof(filler) ? in->left : sizeof(filler)};
    for (uint32_t i = 0; i < n; i++)
        covered += iov[i].iov_len;
    if (covered == in->left)
        iov[n++] = (struct iovec){in->header + in->header_at, TCP_FRAME_BYTES - in->header_at};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = n};
    return recvmsg(c->fd, &m, MSG_DONTWAIT);
}

static void received_some(struct tcp_conn *c, size_t n)
{
    uint32_t payload = n < c->in.left ? (uint32_t)n : c->in.left;
    c->link->heard_ns = clock_mono_ns();
    c->in.left -= payload;
    if (payload > 0 && c->in.left == 0)
        landed(c);
    c->in.header_at += (uint32_t)(n - payload);
}

static bool paced(struct tcp_conn *c)
{
    struct tcp_port *port = c->link->port;
    if (c->in.due_ns == 0 || c->in.due_ns <= clock_mono_ns())
        return false;
    if (c->in.due_ns < port->next_due_ns)
        port->next_due_ns = c->in.due_ns;
    return true;
}

bool tcp_conn_read(struct tcp_conn *c)
{
    if (c->fd < 0 || c->connecting)
        return false;
    if (c->in.left == 0 && c->in.header_at == TCP_FRAME_BYTES) {
        bool taken = take_frame(c);
        if (!taken && c->hung) /* nobody is left to whom it could be accepted */
            fail(c, RS_EPEER, "the connection was closed by the other side");
        return taken;
    }
    if (!c->readable || paced(c) || (c->in.message != NULL && fenced(c)))
        return false;
    ssize_t n = receive_some(c);
    if (n < 0 && errno == EINTR)
        return true;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        c->readable = false;
        return false;
    }
    if (n < 0)
        fail_errno(c, "receiving");
    else if (n == 0)
        fail(c, RS_EPEER, "the connection was closed by the other side");
    else
        received_some(c, (size_t)n);
    return true;
}

/* --- between attempts ------------------------------------------------------------------------- */

static bool is_gone(const struct tcp_conn *c)
{
    uint8_t byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return c->hung || n == 0 ||
           (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void tcp_conn_renew(struct tcp_conn *c)
{
    const struct tcp_link *l = c->link;
    bool remote = tcp_of(c)->peers[l->peer].port == NULL;
    while (l->out && remote && tcp_conn_read(c))
        ; /* its WELCOME may be there */
    if (c->fd >= 0 && (is_gone(c) || (l->out && remote && !c->welcome)))
        tcp_conn_close(c);
}
