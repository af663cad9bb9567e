#include "exec/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/banned.h"

union wire_control {
    struct cmsghdr header; /* for its alignment */
    char data[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
};

static void attach_fds(struct msghdr *m, union wire_control *control, const int *fds, uint32_t n)
{
    if (n == 0)
        return;
    m->msg_control = control->data;
    m->msg_controllen = CMSG_SPACE(n * sizeof(int));
    memset(control->data, 0, sizeof(control->data));
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
}

static int wait_writable(int socket)
{
    struct pollfd p = {.fd = socket, .events = POLLOUT};
    int n;
    do {
        n = poll(&p, 1, -1);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? err_from_errno(errno) : 0;
}

static int send_packet(int socket, const struct msghdr *m, struct err *e)
{
    for (;;) {
        if (sendmsg(socket, m, MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int r = wait_writable(socket);
            if (r < 0)
                return err_set(e, r, "wait for the control socket");
            continue;
        }
        if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
            return err_set(e, RS_EPEER, "the other side of the control socket is gone");
        int code = err_from_errno(errno);
        return err_set(e, code, "send a packet: %s", strerror(errno));
    }
}

int wire_send(int socket, const struct wire_header *h, const void *body, size_t body_bytes,
              const void *table, size_t table_bytes, const int *fds, uint32_t n_fds, struct err *e)
{
    if (body_bytes > WIRE_MAX_BYTES - sizeof(*h) ||
        table_bytes > WIRE_MAX_BYTES - sizeof(*h) - body_bytes)
        return err_set(e, RS_EINVAL, "packet %s of %zu bytes: %d is the most",
                       wire_type_name(h->type), sizeof(*h) + body_bytes + table_bytes,
                       WIRE_MAX_BYTES);
    if (n_fds > WIRE_MAX_FDS)
        return err_set(e, RS_EINVAL, "packet %s with %u descriptors: %d are the most",
                       wire_type_name(h->type), n_fds, WIRE_MAX_FDS);
    struct wire_header header = *h;
    header.protocol = WIRE_PROTOCOL;
    header.body_bytes = (uint32_t)(body_bytes + table_bytes);
    struct iovec parts[3] = {
        {.iov_base = &header, .iov_len = sizeof(header)},
        {.iov_base = (void *)(uintptr_t)body, .iov_len = body_bytes},
        {.iov_base = (void *)(uintptr_t)table, .iov_len = table_bytes},
    };
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = 3};
    union wire_control control;
    attach_fds(&m, &control, fds, n_fds);
    return send_packet(socket, &m, e);
}

/* The kernel fills the control buffer to its alignment: there may be one more than we asked for. */
static void take_fd(struct wire_packet *p, int fd)
{
    if (p->n_fds < WIRE_MAX_FDS)
        p->fds[p->n_fds++] = fd;
    else
        (void)close(fd);
}

static void take_fds(struct msghdr *m, struct wire_packet *p)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c != NULL; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            take_fd(p, fd);
        }
    }
}

static int check_packet(const struct msghdr *m, size_t n_bytes, struct wire_packet *p,
                        struct err *e)
{
    if ((m->msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
        return err_set(e, RS_EPROTO, "packet with more bytes or descriptors than any has");
    if (n_bytes < sizeof(p->header))
        return err_set(e, RS_EPROTO, "packet of %zu bytes: no header", n_bytes);
    memcpy(&p->header, p->data, sizeof(p->header));
    if (p->header.protocol != WIRE_PROTOCOL)
        return err_set(e, RS_EPROTO, "protocol %u: this side speaks %u", p->header.protocol,
                       WIRE_PROTOCOL);
    if (p->header.body_bytes != n_bytes - sizeof(p->header))
        return err_set(e, RS_EPROTO, "packet %s: %zu bytes after the header, its header says %u",
                       wire_type_name(p->header.type), n_bytes - sizeof(p->header),
                       p->header.body_bytes);
    p->body = p->data + sizeof(p->header);
    return 0;
}

int wire_receive(int socket, struct wire_packet *ret, struct err *e)
{
    union wire_control control;
    struct iovec part = {.iov_base = ret->data, .iov_len = sizeof(ret->data)};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.data,
                       .msg_controllen = sizeof(control.data)};
    ssize_t n;
    ret->n_fds = 0;
    memset(&ret->header, 0, sizeof(ret->header));
    do {
        n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 1;
    if (n < 0 && errno != ECONNRESET) {
        int code = err_from_errno(errno);
        return err_set(e, code, "receive a packet: %s", strerror(errno));
    }
    if (n <= 0)
        return err_set(e, RS_EPEER, "the other side of the control socket is gone");
    take_fds(&m, ret);
    int r = check_packet(&m, (size_t)n, ret, e);
    if (r < 0)
        wire_packet_close(ret);
    return r;
}

void wire_packet_close(struct wire_packet *p)
{
    for (uint32_t i = 0; i < p->n_fds; i++)
        if (p->fds[i] >= 0)
            (void)close(p->fds[i]);
    p->n_fds = 0;
}

const char *wire_type_name(uint32_t type)
{
    static const char *const names[] = {
        [WIRE_HELLO] = "HELLO",       [WIRE_READY] = "READY",
        [WIRE_MAP] = "MAP",           [WIRE_MAPPED] = "MAPPED",
        [WIRE_BIND] = "BIND",         [WIRE_BOUND] = "BOUND",
        [WIRE_UNBIND] = "UNBIND",     [WIRE_UNBOUND] = "UNBOUND",
        [WIRE_PUBLISH] = "PUBLISH",   [WIRE_PUBLISHED] = "PUBLISHED",
        [WIRE_PREPARE] = "PREPARE",   [WIRE_PREPARED] = "PREPARED",
        [WIRE_START] = "START",       [WIRE_PROGRESS] = "PROGRESS",
        [WIRE_STAGED] = "STAGED",     [WIRE_APPLY] = "APPLY",
        [WIRE_APPLIED] = "APPLIED",   [WIRE_CHECK] = "CHECK",
        [WIRE_CHECKED] = "CHECKED",   [WIRE_ABORT] = "ABORT",
        [WIRE_QUIESCED] = "QUIESCED", [WIRE_LEASE] = "LEASE",
        [WIRE_STATS] = "STATS",       [WIRE_COUNTED] = "COUNTED",
        [WIRE_STOP] = "STOP",         [WIRE_FAILED] = "FAILED",
        [WIRE_COMM_ID] = "COMM_ID",   [WIRE_COMM_ID_MADE] = "COMM_ID_MADE",
    };
    if (type >= sizeof(names) / sizeof(names[0]) || names[type] == NULL)
        return "unknown";
    return names[type];
}

static int write_all(int fd, const uint8_t *data, size_t n_bytes)
{
    while (n_bytes > 0) {
        ssize_t n = write(fd, data, n_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_from_errno(errno);
        data += n;
        n_bytes -= (size_t)n;
    }
    return 0;
}

enum { MEMFD_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };

int wire_memfd(const char *name, const void *data, size_t n_bytes, struct err *e)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        int code = err_from_errno(errno);
        return err_set(e, code, "memfd %s: %s", name, strerror(errno));
    }
    int r = write_all(fd, data, n_bytes);
    if (r == 0 && fcntl(fd, F_ADD_SEALS, MEMFD_SEALS | F_SEAL_SEAL) < 0)
        r = err_from_errno(errno);
    if (r < 0) {
        (void)close(fd);
        return err_set(e, r, "memfd %s of %zu bytes: %s", name, n_bytes, err_name(r));
    }
    return fd;
}

int wire_map_fd(int fd, const void **ret_data, size_t *ret_n_bytes, struct err *e)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & MEMFD_SEALS) != MEMFD_SEALS)
        return err_set(e, RS_EPROTO, "descriptor is no sealed memfd");
    if (fstat(fd, &st) < 0)
        return err_set(e, err_from_errno(errno), "memfd: fstat failed");
    size_t n_bytes = (size_t)st.st_size;
    if (n_bytes == 0) {
        *ret_data = "";
        *ret_n_bytes = 0;
        return 0;
    }
    void *p = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        int code = err_from_errno(errno);
        return err_set(e, code, "map a memfd of %zu bytes: %s", n_bytes, strerror(errno));
    }
    *ret_data = p;
    *ret_n_bytes = n_bytes;
    return 0;
}

void wire_unmap(const void *data, size_t n_bytes)
{
    if (n_bytes > 0)
        (void)munmap((void *)(uintptr_t)data, n_bytes);
}
