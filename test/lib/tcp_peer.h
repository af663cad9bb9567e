/* A peer over TCP that the test plays byte by byte: its connections, its hello and its frames. For tests with Check; header
 * only; one test program includes it. */
#ifndef RS_TEST_TCP_PEER_H
#define RS_TEST_TCP_PEER_H

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "test/lib/tcp_planes.h"
#include "transport/tcp_frame.h"

static inline struct sockaddr_in loopback(uint16_t port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons(port),
                                .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
}

static inline int dial(const struct plane *p)
{
    struct sockaddr_in a = loopback(transport_tcp_node_port(p->node));
    struct timeval patience = {.tv_sec = PATIENCE_MS / 1000};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return fd;
}

/* Bound, and nobody listens there, nor anywhere else at that port while it is open. */
static inline int bind_at(uint16_t *ret_port)
{
    struct sockaddr_in a = loopback(0);
    socklen_t n = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *ret_port = ntohs(a.sin_port);
    return fd;
}

static inline int listen_at(uint16_t *ret_port)
{
    int fd = bind_at(ret_port);
    ck_assert_int_eq(listen(fd, 8), 0);
    return fd;
}

static inline void say(int fd, const void *data, size_t n)
{
    ck_assert_int_eq(send(fd, data, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* True when the other side has closed. */
static inline bool is_closed(int fd)
{
    uint8_t byte[256];
    ssize_t n;
    do
        n = recv(fd, byte, sizeof(byte), 0);
    while (n > 0);
    return n == 0 || errno == ECONNRESET;
}

static inline struct tcp_hello good_hello(uint64_t attempt)
{
    struct tcp_hello h = {
        .protocol = TCP_PROTOCOL, .epoch = EPOCH, .attempt = attempt, .from = 1, .to = 0};
    memcpy(h.token, TOKEN, sizeof(TOKEN));
    return h;
}

static inline void say_hello(int fd, const struct tcp_hello *h)
{
    uint8_t out[TCP_HELLO_BYTES];
    tcp_hello_pack(h, out);
    say(fd, out, sizeof(out));
}

static inline struct tcp_frame data_frame(uint64_t attempt, uint64_t sequence, uint32_t bytes)
{
    return (struct tcp_frame){.type = TCP_DATA,
                              .network = true,
                              .from = 1,
                              .to = 0,
                              .epoch = EPOCH,
                              .attempt = attempt,
                              .sequence = sequence,
                              .message_bytes = bytes,
                              .length = bytes};
}

static inline void say_frame(int fd, const struct tcp_frame *f, const void *payload, size_t n)
{
    uint8_t out[TCP_FRAME_BYTES];
    tcp_frame_pack(f, out);
    say(fd, out, sizeof(out));
    if (n > 0)
        say(fd, payload, n);
}

/* The next frame that is neither WELCOME nor ALIVE. */
static inline struct tcp_frame heard_frame(int fd)
{
    uint8_t in[TCP_FRAME_BYTES];
    struct tcp_frame f = {0};
    do {
        ck_assert_int_eq(recv(fd, in, sizeof(in), MSG_WAITALL), TCP_FRAME_BYTES);
        ck_assert_int_eq(tcp_frame_unpack(in, &f), 0);
    } while (f.type == TCP_ALIVE || f.type == TCP_WELCOME);
    return f;
}

static inline void until_refused(const struct plane *p, uint64_t n)
{
    uint64_t until = clock_mono_ns() + PATIENCE_MS * UINT64_C(1000000);
    while (transport_tcp_node_refused(p->node) < n && clock_mono_ns() < until)
        (void)poll(NULL, 0, 1);
    ck_assert_uint_eq(transport_tcp_node_refused(p->node), n);
}

/* Device 0 is here; device 1 is the test, at `port`. */
static inline void with_played_peer_within(struct plane *p, uint16_t port, uint32_t silence_ms)
{
    plane_listen(p);
    plane_local(p, 0);
    plane_remote(p, 1, port);
    plane_open_within(p, 2, 0, silence_ms);
}

static inline void with_played_peer(struct plane *p, uint16_t port)
{
    with_played_peer_within(p, port, PATIENCE_MS);
}

#endif
