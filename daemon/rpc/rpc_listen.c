#include "rpc/rpc_listen.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/netaddr.h"

#include "base/banned.h"

#define BACKLOG 1024
/* Descriptors that connections leave to the ledger, logs and workers' memory. */
#define RESERVE_MOST 64

void rpc_listener_init(struct rpc_listener *l)
{
    *l = (struct rpc_listener){.fd = -1, .lock_fd = -1, .spare_fd = -1};
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
}

static int fail(struct err *e, const char *what, const char *name)
{
    int saved = errno;
    return err_set(e, err_from_errno(saved), "%s '%s': %s", what, name, strerror(saved));
}

/* --- Unix ------------------------------------------------------------------------------------- */

static int check_path(const char *path, struct err *e)
{
    size_t n = strlen(path);
    if (n > RPC_UNIX_PATH_MAX)
        return err_set(e, RS_EINVAL,
                       "socket path '%s' has %zu bytes, at most %d: choose a shorter one", path, n,
                       RPC_UNIX_PATH_MAX);
    if (n == 0 || path[0] == '@')
        return err_set(e, RS_EINVAL, "socket path '%s': a path in the file system is needed", path);
    return 0;
}

static int take_lock(struct rpc_listener *l, const char *path, struct err *e)
{
    char name[RPC_UNIX_PATH_MAX + sizeof ".lock"];
    (void)snprintf(name, sizeof name, "%s.lock", path);
    l->lock_fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (l->lock_fd < 0 && (errno == ENOENT || errno == ENOTDIR))
        return err_set(e, RS_ENOTFOUND, "socket path '%s': its directory does not exist: make it",
                       path);
    if (l->lock_fd < 0)
        return fail(e, "lock file", name);
    if (flock(l->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno == EWOULDBLOCK)
        return err_set(
            e, RS_EEXIST,
            "socket path '%s': another daemon holds '%s': stop it or choose another path", path,
            name);
    return fail(e, "lock file", name);
}

static void fill(struct sockaddr_un *a, const char *path)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    memcpy(a->sun_path, path, strlen(path) + 1);
}

/* True where nobody listens: only a refused connection is proof, a slow or full listener is alive.
 */
static bool is_left_over(const char *path)
{
    struct sockaddr_un a;
    fill(&a, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    bool refused = connect(fd, (const struct sockaddr *)&a, sizeof a) != 0 && errno == ECONNREFUSED;
    (void)close(fd);
    return refused;
}

/* Under the lock: makes way for bind where a dead daemon's socket lies, and nowhere else. */
static int clear_path(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? 0 : fail(e, "socket path", path);
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, RS_EINVAL,
                       "socket path '%s': a file that is no socket is there: move it away", path);
    if (!is_left_over(path))
        return err_set(
            e, RS_EEXIST,
            "socket path '%s': another daemon lives there: stop it or choose another path", path);
    if (unlink(path) != 0)
        return fail(e, "left-over socket", path);
    return 0;
}

static int bind_unix(struct rpc_listener *l, const char *path, uint32_t mode, struct err *e)
{
    struct sockaddr_un a;
    struct stat st;
    fill(&a, path);
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return fail(e, "socket", path);
    /* Linux gives the file the socket's mode: never wider open than asked for, not even for a
     * moment. */
    (void)fchmod(l->fd, (mode_t)mode);
    if (bind(l->fd, (const struct sockaddr *)&a, sizeof a) != 0)
        return fail(e, "bind socket", path);
    if (lstat(path, &st) != 0)
        return fail(e, "bound socket", path);
    (void)snprintf(l->path, sizeof l->path, "%s", path);
    l->device = st.st_dev;
    l->inode = st.st_ino;
    if (chmod(path, (mode_t)mode) != 0)
        return fail(e, "mode of socket", path);
    if (listen(l->fd, BACKLOG) != 0)
        return fail(e, "listen on socket", path);
    return 0;
}

int rpc_listen_unix(struct rpc_listener *l, const char *path, uint32_t mode, struct err *e)
{
    rpc_listener_init(l);
    int r = check_path(path, e);
    if (r == 0)
        r = take_lock(l, path, e);
    if (r == 0)
        r = clear_path(path, e);
    if (r == 0)
        r = bind_unix(l, path, mode, e);
    if (r != 0)
        rpc_listener_close(l);
    return r;
}

/* --- TCP -------------------------------------------------------------------------------------- */

static int bound_port(int fd, uint16_t *ret)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        return -1;
    *ret = ntohs(a.ss_family == AF_INET ? ((struct sockaddr_in *)&a)->sin_port
                                        : ((struct sockaddr_in6 *)&a)->sin6_port);
    return 0;
}

static int bind_failed(const char *address, struct err *e)
{
    if (errno == EADDRINUSE)
        return err_set(e, RS_EEXIST,
                       "address '%s' is in use: stop the other daemon or choose another port",
                       address);
    if (errno == EADDRNOTAVAIL)
        return err_set(e, RS_ENOTFOUND,
                       "address '%s' is none of this machine's: `ip address` lists them", address);
    return fail(e, "bind", address);
}

static int bind_tcp(struct rpc_listener *l, const char *address, const struct netaddr *a,
                    struct err *e)
{
    struct sockaddr_storage sa;
    socklen_t n;
    int on = 1;
    int r = netaddr_sockaddr(a, &sa, &n, e);
    if (r != 0)
        return r;
    l->fd = socket(a->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return fail(e, "socket for", address);
    /* Lets a restart pass over TIME_WAIT; two listeners on one port stay impossible on Linux. */
    (void)setsockopt(l->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (a->family == AF_INET6) /* [::] and 0.0.0.0 are two addresses */
        (void)setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(l->fd, (const struct sockaddr *)&sa, n) != 0 || listen(l->fd, BACKLOG) != 0)
        return bind_failed(address, e);
    return bound_port(l->fd, &l->port) == 0 ? 0 : fail(e, "port of", address);
}

static int listen_tcp(struct rpc_listener *l, const char *address, bool loopback_only,
                      struct err *e)
{
    struct netaddr a;
    rpc_listener_init(l);
    int r = netaddr_parse(address, NETADDR_PORT_OR_ANY, &a, e);
    if (r == 0 && loopback_only && !netaddr_is_loopback(&a))
        r = err_set(e, RS_EINVAL,
                    "address '%s' is reachable from outside, which needs TLS: use 127.0.0.1",
                    address);
    if (r == 0)
        r = bind_tcp(l, address, &a, e);
    if (r != 0)
        rpc_listener_close(l);
    return r;
}

int rpc_listen_tcp(struct rpc_listener *l, const char *address, struct err *e)
{
    return listen_tcp(l, address, true, e);
}

int rpc_listen_network(struct rpc_listener *l, const char *address, struct err *e)
{
    return listen_tcp(l, address, false, e);
}

/* --- both ------------------------------------------------------------------------------------- */

void rpc_listener_limit(struct rpc_listener *l, uint32_t n_connections)
{
    struct rlimit limit;
    uint64_t soft = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
    if (soft > INT32_MAX)
        soft = INT32_MAX;
    uint64_t reserve = soft / 4 < RESERVE_MOST ? soft / 4 : RESERVE_MOST;
    uint64_t most = soft - reserve;
    l->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    /* The lowest free descriptor is given out first, so the number says how many are open. */
    if (n_connections != 0 && l->spare_fd >= 0) {
        uint64_t asked = (uint64_t)l->spare_fd + 1 + n_connections;
        most = asked < most ? asked : most;
    }
    l->max_fd = (int)most;
}

/* Descriptors are out: takes the connection with the spare one and closes it, else it would wait
 * and wake us for ever. */
static void turn_away(struct rpc_listener *l)
{
    close_fd(&l->spare_fd);
    int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) {
        (void)close(fd);
        l->n_turned_away++;
    }
    l->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* A link that is cut says nothing. Where nothing is on its way, the other end's kernel is asked, which answers however busy or halted
 * its process is: after 3 s without an answer the connection is broken. Bytes that are on their way are sent again instead, and the
 * owner's ping tells. */
static void tcp_set(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                   {SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 1}, /* s */
                   {IPPROTO_TCP, TCP_KEEPINTVL, 1},
                   {IPPROTO_TCP, TCP_KEEPCNT, 2}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value,
                         sizeof options[i].value);
}

int rpc_listener_accept(struct rpc_listener *l)
{
    for (int tries = 0; tries < 64; tries++) {
        int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE))
            turn_away(l);
        else if (fd < 0 && errno != EINTR && errno != ECONNABORTED)
            return -1;
        else if (fd >= l->max_fd) {
            (void)close(fd);
            l->n_turned_away++;
        } else if (fd >= 0) {
            if (l->path[0] == '\0')
                tcp_set(fd);
            return fd;
        }
    }
    return -1;
}

static void remove_own_socket(const struct rpc_listener *l)
{
    struct stat st;
    if (l->path[0] != '\0' && lstat(l->path, &st) == 0 && st.st_dev == l->device &&
        st.st_ino == l->inode)
        (void)unlink(l->path);
}

void rpc_listener_close(struct rpc_listener *l)
{
    close_fd(&l->fd);
    close_fd(&l->spare_fd);
    remove_own_socket(l);
    l->path[0] = '\0';
    close_fd(&l->lock_fd); /* last: nobody binds before the socket is gone */
}
