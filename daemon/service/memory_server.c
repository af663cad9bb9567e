#include "service/memory_server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "memory/memory_socket.h"
#include "service/memory_server_private.h"

#include "base/banned.h"

enum { BACKLOG = 128, ACCEPT_PAUSE_MS = 200 };

/* --- one client --------------------------------------------------------------------------------- */

bool memory_descriptors_are_scarce(int newest)
{
    struct rlimit l;
    return getrlimit(RLIMIT_NOFILE, &l) == 0 && (rlim_t)newest >= l.rlim_cur - l.rlim_cur / 8;
}

void connection_fds_drop(struct connection *c, uint32_t keep)
{
    while (c->n_fds > keep)
        (void)close(c->fds[--c->n_fds]);
    if (keep == 0) {
        c->fds_are_scarce = false;
        mem_free(c->parts);
        c->parts = NULL;
    }
}

bool connection_send(struct connection *c, const struct memory_record *r)
{
    ssize_t n;
    do {
        n = send(c->socket, r, sizeof *r, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *r;
}

static void free_if_stopped(struct memory_server *s)
{
    if (!s->stopping || s->n_open > 0 || s->n_clients > 0)
        return;
    void (*done)(void *) = s->stopped;
    void *arg = s->stopped_arg;
    mem_free(s);
    done(arg);
}

void connection_unref(struct connection *c)
{
    struct memory_server *s = c->client.server;
    if (--c->n_open > 0)
        return;
    (void)close(c->socket);
    if (c->pidfd >= 0)
        (void)close(c->pidfd);
    connection_fds_drop(c, 0);
    queue_remove(&c->client.in);
    s->n_clients--;
    mem_free(c);
    free_if_stopped(s);
}

static void on_connection_closed(uv_handle_t *h)
{
    connection_unref(h->data);
}

void connection_end(struct connection *c, const char *why)
{
    if (c->ended)
        return;
    c->ended = true;
    if (c->welcome) {
        log_debug("client %" PRIu64 " ended: pid %d, %s", c->client.id, (int)c->client.pid, why);
        c->client.server->ended(c->client.server->arg, &c->client);
    }
    segments_end(c);
    uv_close((uv_handle_t *)&c->poll, on_connection_closed);
    if (c->pidfd >= 0)
        uv_close((uv_handle_t *)&c->process, on_connection_closed);
}

static void hello_take(struct connection *c, const struct memory_record *r)
{
    uint8_t random[16];
    struct memory_record w = {.magic = MEMORY_SOCKET_MAGIC,
                              .type = MEMORY_WELCOME,
                              .protocol = MEMORY_SOCKET_PROTOCOL,
                              .request = r->request,
                              .incarnation = c->client.server->incarnation,
                              .client = c->client.id};
    if (r->protocol != MEMORY_SOCKET_PROTOCOL) {
        w.code = RS_EPROTO;
        (void)snprintf(w.text, sizeof w.text, "protocol %u is not spoken here; use %u", r->protocol,
                       MEMORY_SOCKET_PROTOCOL);
        (void)connection_send(c, &w);
        connection_end(c, "other protocol");
        return;
    }
    random_bytes(random, sizeof random);
    for (unsigned i = 0; i < sizeof random; i++)
        (void)snprintf(c->client.token + (size_t)2 * i, 3, "%02x", random[i]);
    memcpy(w.token, c->client.token, sizeof w.token);
    c->welcome = true;
    if (!connection_send(c, &w))
        connection_end(c, "it went before its welcome");
}

static void record_take(struct connection *c)
{
    const struct memory_record r = c->record;
    bool known = r.magic == MEMORY_SOCKET_MAGIC;
    if (known && !c->welcome && r.type == MEMORY_HELLO)
        hello_take(c, &r);
    else if (known && c->welcome && r.type == MEMORY_SEGMENT)
        segment_take(c, &r);
    else if (known && c->welcome && r.type == MEMORY_SEGMENT_DROP)
        segment_drop(c, &r);
    else
        connection_end(c, "a record that is not of the protocol");
    if (!c->checking) /* descriptors that nobody asked for, or of a refused segment */
        connection_fds_drop(c, 0);
}

/* Keeps the descriptors of the first message of the record that has some, closes the rest. Where they are scarce, one at most. */
static void fds_take(struct connection *c, struct msghdr *m)
{
    const bool first = c->n_fds == 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
            if (!first || c->n_fds == MAX_FDS) {
                (void)close(fd);
                continue;
            }
            c->fds[c->n_fds++] = fd;
            c->fds_are_scarce =
                c->fds_are_scarce || (c->n_fds > 1 && memory_descriptors_are_scarce(fd));
        }
    }
    if (c->fds_are_scarce)
        connection_fds_drop(c, 1);
}

/* 1: a whole record is there; 0: not yet; RS_EPEER: the end. */
static int record_read(struct connection *c)
{
    union {
        struct cmsghdr align;
        char data[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {(char *)&c->record + c->n_read, sizeof c->record - c->n_read};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.data,
                       .msg_controllen = sizeof control.data};
    ssize_t n = recvmsg(c->socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : RS_EPEER;
    fds_take(c, &m);
    if (n == 0)
        return RS_EPEER;
    c->n_read += (size_t)n;
    if (c->n_read < sizeof c->record)
        return 0;
    c->n_read = 0;
    return 1;
}

static void on_readable(uv_poll_t *handle, int status, int events)
{
    struct connection *c = handle->data;
    (void)events;
    int r = status < 0 ? RS_EPEER : record_read(c);
    if (r == 1)
        record_take(c);
    else if (r != 0)
        connection_end(c, "connection closed");
}

void connection_read(struct connection *c)
{
    (void)uv_poll_start(&c->poll, UV_READABLE, on_readable);
}

static void on_process_end(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    connection_end(handle->data, "process ended");
}

static void connection_open(struct memory_server *s, int socket)
{
    struct ucred who;
    socklen_t n = sizeof who;
    struct connection *c = NULL;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0 ||
        s->n_clients >= s->config->max_clients || memory_descriptors_are_scarce(socket) ||
        (c = mem_zalloc(sizeof *c)) == NULL) {
        log_warn("client refused: %u clients, max_clients %u, descriptor %d", s->n_clients,
                 s->config->max_clients, socket);
        (void)close(socket);
        return;
    }
    c->client =
        (struct memory_client){.server = s, .id = ++s->next_client, .uid = who.uid, .pid = who.pid};
    queue_init(&c->segments);
    queue_push(&s->clients, &c->client.in);
    s->n_clients++;
    c->socket = socket;
    /* A process of another pid namespace has pid 0 here: then its connection alone tells its end. */
    c->pidfd = who.pid > 0 ? (int)syscall(SYS_pidfd_open, who.pid, 0) : -1;
    rs_assert(uv_poll_init(s->loop, &c->poll, socket) == 0);
    c->poll.data = c;
    c->n_open = 1;
    connection_read(c);
    if (c->pidfd >= 0 && uv_poll_init(s->loop, &c->process, c->pidfd) == 0) {
        c->process.data = c;
        c->n_open++;
        (void)uv_poll_start(&c->process, UV_READABLE, on_process_end);
    } else if (c->pidfd >= 0) {
        (void)close(c->pidfd);
        c->pidfd = -1;
    }
}

/* --- the server --------------------------------------------------------------------------------- */

static void on_connect(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *t)
{
    struct memory_server *s = t->data;
    (void)uv_poll_start(&s->poll, UV_READABLE, on_connect);
}

static void on_connect(uv_poll_t *handle, int status, int events)
{
    struct memory_server *s = handle->data;
    (void)status;
    (void)events;
    int socket = accept4(s->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket >= 0) {
        connection_open(s, socket);
        return;
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS)
        return;
    /* The listening socket stays readable: without a pause this would be a busy loop. */
    log_warn("memory socket: no client accepted for %d ms: %s", ACCEPT_PAUSE_MS, strerror(errno));
    (void)uv_poll_stop(&s->poll);
    (void)uv_timer_start(&s->pause, on_pause_over, ACCEPT_PAUSE_MS, 0);
}

static int path_clear(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return 0;
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, RS_EEXIST, "%s is there and is no socket; move it away", path);
    (void)unlink(path);
    return 0;
}

static int listen_open(struct memory_server *s, struct err *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat st;
    int n = snprintf(s->path, sizeof s->path, "%s.mem", s->config->socket);
    if (n < 0 || (size_t)n >= sizeof s->path)
        return err_set(e, RS_EINVAL, "%s.mem is longer than %zu bytes", s->config->socket,
                       sizeof s->path - 1);
    memcpy(address.sun_path, s->path, sizeof s->path);
    int r = path_clear(s->path, e);
    if (r != 0)
        return r;
    s->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s->socket < 0)
        return err_set(e, err_from_errno(errno), "memory socket: %s", strerror(errno));
    (void)fchmod(s->socket, s->config->socket_mode); /* so that it is never open wider than this */
    if (bind(s->socket, (struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(s->path, s->config->socket_mode) != 0 || lstat(s->path, &st) != 0 ||
        listen(s->socket, BACKLOG) != 0) {
        r = err_set(e, err_from_errno(errno), "memory socket %s: %s", s->path, strerror(errno));
        (void)close(s->socket);
        return r;
    }
    s->inode = st.st_ino;
    return 0;
}

int memory_server_start(uv_loop_t *loop, const struct config *config, uint64_t incarnation,
                        void (*ended)(void *arg, struct memory_client *client), void *arg,
                        struct memory_server **ret, struct err *e)
{
    struct memory_server *s = mem_zalloc(sizeof *s);
    if (s == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the memory socket");
    s->loop = loop;
    s->config = config;
    s->incarnation = incarnation;
    s->ended = ended;
    s->arg = arg;
    queue_init(&s->clients);
    int r = listen_open(s, e);
    if (r != 0) {
        mem_free(s);
        return r;
    }
    rs_assert(uv_poll_init(loop, &s->poll, s->socket) == 0 && uv_timer_init(loop, &s->pause) == 0);
    s->poll.data = s->pause.data = s;
    s->n_open = 2;
    (void)uv_poll_start(&s->poll, UV_READABLE, on_connect);
    *ret = s;
    return 0;
}

void memory_server_devices(struct memory_server *s,
                           int (*device_of)(void *arg, const char *name, uint32_t *ret,
                                            struct err *e),
                           void *arg)
{
    s->device_of = device_of;
    s->device_arg = arg;
}

static void on_server_closed(uv_handle_t *h)
{
    struct memory_server *s = h->data;
    if (--s->n_open == 0)
        (void)close(s->socket);
    free_if_stopped(s);
}

void memory_server_stop(struct memory_server *s, void (*done)(void *arg), void *arg)
{
    struct stat st;
    s->stopping = true;
    s->stopped = done;
    s->stopped_arg = arg;
    if (lstat(s->path, &st) == 0 && st.st_ino == s->inode)
        (void)unlink(s->path);
    queue_foreach_safe (q, tmp, &s->clients)
        connection_end(connection_of(container_of(q, struct memory_client, in)),
                       "the daemon is stopping");
    uv_close((uv_handle_t *)&s->poll, on_server_closed);
    uv_close((uv_handle_t *)&s->pause, on_server_closed);
}

static bool token_equal(const char *a, const char *b)
{
    unsigned char differ = 0;
    for (unsigned i = 0; i < MEMORY_SOCKET_TOKEN_BYTES - 1; i++)
        differ = (unsigned char)(differ | (a[i] ^ b[i]));
    return differ == 0;
}

const struct memory_client *memory_server_find(const struct memory_server *s, const char *token)
{
    if (strnlen(token, MEMORY_SOCKET_TOKEN_BYTES) != MEMORY_SOCKET_TOKEN_BYTES - 1)
        return NULL;
    queue_foreach (q, &s->clients) {
        const struct connection *c = connection_of(container_of(q, struct memory_client, in));
        if (c->welcome && !c->ended && token_equal(c->client.token, token))
            return &c->client;
    }
    return NULL;
}

const struct memory_client *memory_server_client(const struct memory_server *s, uint64_t id)
{
    queue_foreach (q, &s->clients) {
        const struct connection *c = connection_of(container_of(q, struct memory_client, in));
        if (c->client.id == id && c->welcome && !c->ended)
            return &c->client;
    }
    return NULL;
}

uint32_t memory_server_n_clients(const struct memory_server *s)
{
    return s->n_clients;
}
