#include "client/link.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "memory/memory_socket.h"

#include "base/banned.h"

struct link {
    atomic_uint refs;
    atomic_bool lost;
    int memory_fd;
    pthread_mutex_t memory_mutex;
    uint64_t next_request;
    uint64_t incarnation;
    struct rpc_channel *channel;
};

uint64_t deadline_after_ms(uint32_t ms)
{
    return clock_mono_ns() + (uint64_t)ms * 1000000;
}

uint32_t deadline_left_ms(uint64_t deadline_ns)
{
    uint64_t now = clock_mono_ns();
    if (deadline_ns <= now)
        return 0;
    uint64_t ms = (deadline_ns - now + 999999) / 1000000;
    return ms > UINT32_MAX ? UINT32_MAX : (uint32_t)ms;
}

static int poll_timeout(uint64_t deadline_ns)
{
    uint32_t ms = deadline_left_ms(deadline_ns);
    return ms > INT32_MAX ? INT32_MAX : (int)ms;
}

/* Waits until fd is ready for `events`: 0, RS_EDEADLINE or RS_EIO. */
static int wait_for(int fd, short events, uint64_t deadline_ns, struct err *e)
{
    struct pollfd p = {.fd = fd, .events = events};
    for (;;) {
        int n = poll(&p, 1, poll_timeout(deadline_ns));
        if (n > 0)
            return 0;
        if (n == 0)
            return err_set(e, RS_EDEADLINE, "memory socket: the daemon did not answer in time");
        if (errno != EINTR)
            return err_set(e, RS_EIO, "memory socket: poll: %s", strerror(errno));
    }
}

/* ---- records of the memory socket ---- */

static int record_send(int socket_fd, const struct memory_record *record, const int *fds,
                       uint32_t n_fds, uint64_t deadline_ns, struct err *e)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)record, .iov_len = sizeof *record};
    union {
        char bytes[CMSG_SPACE((MEMORY_MAX_PARTS + 1) * sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    rs_assert(n_fds <= MEMORY_MAX_PARTS + 1);
    if (n_fds > 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    for (;;) {
        ssize_t n = sendmsg(socket_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n == (ssize_t)sizeof *record)
            return 0;
        if (n >= 0)
            return err_set(e, RS_EIO, "memory socket: a record was sent in part");
        if (errno == EAGAIN) {
            int r = wait_for(socket_fd, POLLOUT, deadline_ns, e);
            if (r != 0)
                return r;
        } else if (errno != EINTR) {
            return err_set(e, RS_EUNAVAIL, "memory socket: %s", strerror(errno));
        }
    }
}

static int record_receive(int socket_fd, struct memory_record *ret, uint64_t deadline_ns,
                          struct err *e)
{
    size_t have = 0;
    while (have < sizeof *ret) {
        int r = wait_for(socket_fd, POLLIN, deadline_ns, e);
        if (r != 0) /* a record that was read in part cannot be found again */
            return have == 0 ? r : err_prefix(e, RS_EIO, "a record was received in part");
        ssize_t n = recv(socket_fd, (char *)ret + have, sizeof *ret - have, MSG_DONTWAIT);
        if (n > 0)
            have += (size_t)n;
        else if (n == 0)
            return err_set(e, RS_EUNAVAIL, "memory socket: the daemon closed it");
        else if (errno != EAGAIN && errno != EINTR)
            return err_set(e, RS_EUNAVAIL, "memory socket: %s", strerror(errno));
    }
    if (ret->magic != MEMORY_SOCKET_MAGIC)
        return err_set(e, RS_EPROTO, "memory socket: what answers there is no reshardd");
    ret->token[sizeof ret->token - 1] = '\0';
    ret->text[sizeof ret->text - 1] = '\0';
    return 0;
}

/* One request and the reply that carries its number; older replies (their callers gave up) are
 * passed over. */
static int record_exchange(struct link *l, struct memory_record *record, const int *fds,
                           uint32_t n_fds, uint64_t deadline_ns, struct err *e)
{
    pthread_mutex_lock(&l->memory_mutex);
    record->magic = MEMORY_SOCKET_MAGIC;
    record->request = ++l->next_request;
    struct memory_record reply;
    int r = record_send(l->memory_fd, record, fds, n_fds, deadline_ns, e);
    do {
        if (r == 0)
            r = record_receive(l->memory_fd, &reply, deadline_ns, e);
    } while (r == 0 && reply.request < record->request);
    pthread_mutex_unlock(&l->memory_mutex);
    if (r == 0 && (reply.type != MEMORY_SEGMENT_REPLY || reply.request != record->request))
        r = err_set(e, RS_EPROTO, "memory socket: a reply that belongs to no request");
    if (r == RS_EUNAVAIL || r == RS_EPROTO || r == RS_EIO)
        link_lose(l);
    if (r != 0)
        return r;
    if (reply.code != 0)
        return err_set(e, reply.code, "%s", reply.text);
    *record = reply;
    return 0;
}

int link_segment_add(struct link *l, int fd, uint64_t bytes, uint64_t deadline_ns,
                     uint64_t *ret_segment, struct err *e)
{
    struct memory_record record = {
        .type = MEMORY_SEGMENT, .kind = MEMORY_SEGMENT_MEMFD, .writable = 1, .bytes = bytes};
    int r = record_exchange(l, &record, &fd, 1, deadline_ns, e);
    if (r == 0)
        *ret_segment = record.segment;
    return r;
}

int link_device_segment_add(struct link *l, uint32_t kind, const struct memory_device *device,
                            const int *fds, uint32_t n_fds, uint64_t bytes, uint64_t deadline_ns,
                            uint64_t *ret_segment, uint32_t *ret_local, struct err *e)
{
    struct memory_record record = {
        .type = MEMORY_SEGMENT, .kind = kind, .writable = 1, .bytes = bytes, .device = *device};
    int r = record_exchange(l, &record, fds, n_fds, deadline_ns, e);
    if (r == 0) {
        *ret_segment = record.segment;
        *ret_local = record.device.local;
    }
    return r;
}

int link_segment_drop(struct link *l, uint64_t segment, uint64_t deadline_ns, struct err *e)
{
    struct memory_record record = {.type = MEMORY_SEGMENT_DROP, .segment = segment};
    return record_exchange(l, &record, NULL, 0, deadline_ns, e);
}

/* ---- life ---- */

static int memory_connect(const char *path, int *ret_fd, struct err *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n + sizeof ".mem" > sizeof address.sun_path)
        return err_set(e, RS_EINVAL, "socket path '%s' is longer than %zu bytes; use a shorter one",
                       path, sizeof address.sun_path - sizeof ".mem");
    memcpy(address.sun_path, path, n);
    memcpy(address.sun_path + n, ".mem", sizeof ".mem");
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_set(e, RS_EIO, "socket: %s", strerror(errno));
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        int why = errno;
        close(fd);
        int code = why == EACCES || why == EPERM ? RS_EPERM : RS_EUNAVAIL;
        if (why == ENOENT && access(path, F_OK) == 0)
            return err_set(e, code,
                           "no daemon at '%s': there is no '%s' beside it; is that its [daemon] "
                           "socket, and is reshardd running?",
                           path, address.sun_path);
        return err_set(e, code, "no daemon at '%s': %s%s", path, strerror(why),
                       code == RS_EUNAVAIL ? "; is reshardd running?" : "");
    }
    *ret_fd = fd;
    return 0;
}

static int hello(struct link *l, char ret_token[MEMORY_SOCKET_TOKEN_BYTES], uint64_t deadline_ns,
                 struct err *e)
{
    struct memory_record record = {
        .magic = MEMORY_SOCKET_MAGIC, .type = MEMORY_HELLO, .protocol = MEMORY_SOCKET_PROTOCOL};
    int r = record_send(l->memory_fd, &record, NULL, 0, deadline_ns, e);
    if (r == 0)
        r = record_receive(l->memory_fd, &record, deadline_ns, e);
    if (r != 0)
        return err_prefix(e, r, "hello");
    if (record.type != MEMORY_WELCOME)
        return err_set(e, RS_EPROTO, "hello: the daemon answers with record type %u", record.type);
    if (record.code != 0)
        return err_set(e, record.code, "hello: %s", record.text);
    if (record.protocol != MEMORY_SOCKET_PROTOCOL)
        return err_set(e, RS_EPROTO, "hello: the daemon speaks protocol %u, this library %u",
                       record.protocol, MEMORY_SOCKET_PROTOCOL);
    if (strnlen(record.token, MEMORY_SOCKET_TOKEN_BYTES) != MEMORY_SOCKET_TOKEN_BYTES - 1)
        return err_set(e, RS_EPROTO, "hello: the daemon's token is not 32 characters");
    memcpy(ret_token, record.token, MEMORY_SOCKET_TOKEN_BYTES);
    l->incarnation = record.incarnation;
    return 0;
}

static int channel_open(struct link *l, const char *path, const char *token, struct err *e)
{
    char *target = mem_printf("unix:%s", path);
    if (target == NULL)
        return err_set(e, RS_ENOMEM, "channel: out of memory");
    int r = rpc_channel_open(target, token, &l->channel, e);
    mem_free(target);
    return r;
}

static void link_free(struct link *l)
{
    rpc_channel_close(l->channel);
    if (l->memory_fd >= 0)
        close(l->memory_fd);
    pthread_mutex_destroy(&l->memory_mutex);
    mem_free(l);
}

int link_open(const char *path, uint64_t deadline_ns, struct link **ret, struct err *e)
{
    struct link *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "connection: out of memory");
    atomic_init(&l->refs, 1);
    atomic_init(&l->lost, false);
    l->memory_fd = -1;
    pthread_mutex_init(&l->memory_mutex, NULL);
    char token[MEMORY_SOCKET_TOKEN_BYTES];
    int r = memory_connect(path, &l->memory_fd, e);
    if (r == 0)
        r = hello(l, token, deadline_ns, e);
    if (r == 0)
        r = channel_open(l, path, token, e);
    if (r != 0) {
        link_free(l);
        return r;
    }
    *ret = l;
    return 0;
}

struct link *link_ref(struct link *l)
{
    atomic_fetch_add(&l->refs, 1);
    return l;
}

void link_unref(struct link *l)
{
    if (l != NULL && atomic_fetch_sub(&l->refs, 1) == 1)
        link_free(l);
}

struct rpc_channel *link_channel(const struct link *l)
{
    return l->channel;
}

uint64_t link_incarnation(const struct link *l)
{
    return l->incarnation;
}

bool link_alive(struct link *l)
{
    struct pollfd p = {.fd = l->memory_fd, .events = POLLRDHUP};
    if (!atomic_load(&l->lost) && poll(&p, 1, 0) > 0 &&
        (p.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0)
        link_lose(l);
    return !atomic_load(&l->lost);
}

void link_lose(struct link *l)
{
    atomic_store(&l->lost, true);
}
