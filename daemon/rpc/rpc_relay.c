#include "rpc/rpc_relay.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/err.h"

#include "base/banned.h"

enum { REMOTE, LOCAL };

/* How long a remote side may take for the last bytes, and to hang up too, once gRPC has. */
#define LAST_BYTES_MS 2000U

static void on_handle_closed(uv_handle_t *handle)
{
    struct rpc_relay *r = handle->data;
    if (--r->n_handles > 0)
        return;
    (void)close(r->fd[REMOTE]);
    (void)close(r->fd[LOCAL]);
    r->on_closed(r, r->arg);
}

void rpc_relay_close(struct rpc_relay *r)
{
    if (r->closing)
        return;
    r->closing = true;
    uv_close((uv_handle_t *)&r->poll[REMOTE], on_handle_closed);
    uv_close((uv_handle_t *)&r->poll[LOCAL], on_handle_closed);
    uv_close((uv_handle_t *)&r->timer, on_handle_closed);
}

static bool is_empty(const struct rpc_relay_pipe *p)
{
    return p->n == p->at;
}

/* False: that side is broken. */
static bool fill(struct rpc_relay_pipe *p, int fd)
{
    ssize_t n = recv(fd, p->data, sizeof p->data, 0);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    p->ended = n == 0;
    p->at = 0;
    p->n = (size_t)n;
    return true;
}

static bool drain(struct rpc_relay_pipe *p, int fd)
{
    while (!is_empty(p)) {
        ssize_t n = send(fd, p->data + p->at, p->n - p->at, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN;
        p->at += (size_t)n;
    }
    return true;
}

static void on_late(uv_timer_t *timer)
{
    rpc_relay_close(timer->data);
}

/* Tells the other side of an end, behind the last byte. */
static void pass_end(struct rpc_relay *r, int from)
{
    struct rpc_relay_pipe *p = &r->pipe[from];
    if (!p->ended || p->shut || !is_empty(p))
        return;
    p->shut = true;
    (void)shutdown(r->fd[1 - from], SHUT_WR);
}

static void on_ready(uv_poll_t *poll, int status, int events);

/* What each side is waited for: to be read where there is room, to be written where there is something.
 */
static void rearm(struct rpc_relay *r)
{
    if (r->pipe[LOCAL].shut) {
        r->pipe[REMOTE].at = r->pipe[REMOTE].n = 0; /* for nobody */
        (void)uv_poll_stop(&r->poll[LOCAL]);
        (void)uv_poll_start(&r->poll[REMOTE], UV_READABLE, on_ready);
        return;
    }
    for (int side = 0; side < 2; side++) {
        int events = 0;
        if (!r->pipe[side].ended && is_empty(&r->pipe[side]))
            events |= UV_READABLE;
        if (!is_empty(&r->pipe[1 - side]))
            events |= UV_WRITABLE;
        if (events == 0)
            (void)uv_poll_stop(&r->poll[side]);
        else
            (void)uv_poll_start(&r->poll[side], events, on_ready);
    }
}

static bool read_side(struct rpc_relay *r, int from)
{
    struct rpc_relay_pipe *p = &r->pipe[from];
    bool good = fill(p, r->fd[from]);
    if (from == REMOTE)
        return good;
    p->ended = p->ended || !good; /* however gRPC hangs up: what it wrote is still to go */
    if (p->ended)
        (void)uv_timer_start(&r->timer, on_late, LAST_BYTES_MS, 0);
    return true;
}

static bool write_side(struct rpc_relay *r, int from)
{
    struct rpc_relay_pipe *p = &r->pipe[from];
    bool good = drain(p, r->fd[1 - from]);
    if (from == LOCAL || good)
        return good;
    p->at = p->n = 0; /* gRPC has hung up, but may have left something to read */
    return true;
}

/* Moves what can be moved between `from` and the other side; false: it is over. */
static bool move(struct rpc_relay *r, int from, bool readable)
{
    struct rpc_relay_pipe *p = &r->pipe[from];
    if (readable && !p->ended && is_empty(p) && !read_side(r, from))
        return false;
    if (!write_side(r, from))
        return false;
    pass_end(r, from);
    return true;
}

/* gRPC hears nothing more, but a close over bytes that nobody read would be a reset, which takes the
 * last ones that it wrote away from the remote side: they are read until that has hung up too. */
static bool linger(struct rpc_relay *r)
{
    struct rpc_relay_pipe *p = &r->pipe[REMOTE];
    bool alive = fill(p, r->fd[REMOTE]) && !p->ended;
    p->at = p->n = 0;
    return alive;
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct rpc_relay *r = poll->data;
    int side = poll == &r->poll[REMOTE] ? REMOTE : LOCAL;
    bool readable = (events & UV_READABLE) != 0;
    bool alive = status == 0;
    if (alive && r->pipe[LOCAL].shut)
        alive = linger(r);
    else if (alive)
        alive = move(r, side, readable);
    if (alive && (events & UV_WRITABLE) != 0)
        alive = move(r, 1 - side, false);
    if (!alive || (r->pipe[LOCAL].shut && r->pipe[REMOTE].ended))
        rpc_relay_close(r);
    else
        rearm(r);
}

static int connect_local(const char *name, int max_fd)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    rs_assert(n + 1 <= sizeof a.sun_path);
    memcpy(a.sun_path + 1, name, n);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
    /* Never waits: either there is room in the listener's backlog, or not. */
    if (fd < max_fd && connect(fd, (const struct sockaddr *)&a, size) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

/* Both, or none: what was opened before a failure closes on the loop. */
static int open_handles(struct rpc_relay *r, uv_loop_t *loop)
{
    for (int side = 0; side < 2; side++) {
        if (uv_poll_init(loop, &r->poll[side], r->fd[side]) != 0)
            break;
        r->poll[side].data = r;
        r->n_handles++;
    }
    if (r->n_handles < 2)
        return RS_EIO;
    (void)uv_timer_init(loop, &r->timer); /* never fails */
    r->timer.data = r;
    r->n_handles++;
    return 0;
}

int rpc_relay_start(struct rpc_relay *r, uv_loop_t *loop, int remote_fd, const char *local,
                    int max_fd, void (*on_closed)(struct rpc_relay *r, void *arg), void *arg)
{
    int local_fd = connect_local(local, max_fd);
    if (local_fd < 0) {
        (void)close(remote_fd);
        return RS_EEXHAUSTED;
    }
    /* The buffers stay as they are: nothing of them is read before it is written. */
    for (int side = 0; side < 2; side++) {
        struct rpc_relay_pipe *p = &r->pipe[side];
        p->at = p->n = 0;
        p->ended = p->shut = false;
    }
    queue_init(&r->link);
    r->fd[REMOTE] = remote_fd;
    r->fd[LOCAL] = local_fd;
    r->n_handles = 0;
    r->closing = false;
    r->on_closed = on_closed;
    r->arg = arg;
    if (open_handles(r, loop) == 0) {
        rearm(r);
        return 0;
    }
    if (r->n_handles == 1) { /* it has begun, and ends */
        r->closing = true;
        uv_close((uv_handle_t *)&r->poll[REMOTE], on_handle_closed);
        return 0;
    }
    (void)close(remote_fd);
    (void)close(local_fd);
    return RS_EIO;
}
