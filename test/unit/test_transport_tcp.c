/* TCP's own: who is let in, what a peer that misbehaves does, and two data planes side by side.
 * The other side is a data plane of its own, or a peer that the test plays byte by byte. */
#include <arpa/inet.h>
#include <check.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "test/lib/waited.h"
#include "transport/tcp_frame.h"
#include "transport/transport.h"

/* Sanitized binaries are slower, threads of theirs may sleep longer than they are to. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SILENCE_MS = 2000, PATIENCE_MS = 40000 };
#else
enum { SILENCE_MS = 250, PATIENCE_MS = 10000 };
#endif
enum { EPOCH = 9, MAX_DEVICES = 4 };

/* A data plane: an endpoint, and a transport in which some devices are here. */
struct plane {
    struct transport_tcp_node *node;
    struct transport *t;
    struct device *devices[MAX_DEVICES];
    struct device_stream *streams[MAX_DEVICES];
    struct transport_tcp_device table[MAX_DEVICES];
    struct fence fence;
};

static const uint8_t TOKEN[TRANSPORT_TOKEN_BYTES] = "between a and b";

static void plane_listen(struct plane *p)
{
    memset(p, 0, sizeof(*p));
    ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &p->node, NULL), 0);
}

static void plane_local(struct plane *p, uint32_t device)
{
    struct device_host_options options = {0};
    ck_assert_int_eq(device_host_open(device, &options, &p->devices[device], NULL), 0);
    ck_assert_int_eq(device_stream_new(p->devices[device], "net", &p->streams[device], NULL), 0);
    p->table[device].device = p->devices[device];
}

static void plane_remote(struct plane *p, uint32_t device, uint16_t port)
{
    p->table[device].address = "127.0.0.1";
    p->table[device].port = port;
    memcpy(p->table[device].token, TOKEN, sizeof(TOKEN));
}

static void plane_open_within(struct plane *p, uint32_t n, double bytes_per_s, uint32_t silence_ms)
{
    struct transport_tcp_options options = {.silence_ms = silence_ms,
                                            .streams = 2,
                                            .network_bytes_per_s = bytes_per_s,
                                            .fence = &p->fence};
    struct err e = {0};
    int r = transport_tcp_open(p->node, p->table, n, EPOCH, &options, &p->t, &e);
    ck_assert_msg(r == 0, "%s", e.text);
    ck_assert_int_eq(transport_begin(p->t, 1, NULL), 0);
}

static void plane_open(struct plane *p, uint32_t n, double bytes_per_s)
{
    plane_open_within(p, n, bytes_per_s, SILENCE_MS);
}

static void plane_close(struct plane *p)
{
    for (uint32_t i = 0; i < MAX_DEVICES; i++)
        if (p->streams[i] != NULL)
            device_stream_free(p->streams[i]);
    transport_close(p->t);
    transport_tcp_node_close(p->node);
    for (uint32_t i = 0; i < MAX_DEVICES; i++)
        device_close(p->devices[i]);
}

static int waited_status(struct waited *w)
{
    return waited_status_in(w, PATIENCE_MS);
}

static void submit(struct plane *p, uint32_t device, struct waited *w,
                   const struct transport_message *messages, uint32_t n)
{
    waited_init(w, messages, n);
    ck_assert_int_eq(transport_enqueue(p->t, device, p->streams[device], &w->group), 0);
}

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)random_next(&seed);
}

/* --- the peer that the test plays ------------------------------------------------------------- */

static struct sockaddr_in loopback(uint16_t port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons(port),
                                .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
}

static int dial(const struct plane *p)
{
    struct sockaddr_in a = loopback(transport_tcp_node_port(p->node));
    struct timeval patience = {.tv_sec = 5};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return fd;
}

static int listen_at(uint16_t *ret_port)
{
    struct sockaddr_in a = loopback(0);
    socklen_t n = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0);
    ck_assert_int_eq(listen(fd, 8), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *ret_port = ntohs(a.sin_port);
    return fd;
}

static void say(int fd, const void *data, size_t n)
{
    ck_assert_int_eq(send(fd, data, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* True when the other side has closed. */
static bool is_closed(int fd)
{
    uint8_t byte[256];
    ssize_t n;
    do
        n = recv(fd, byte, sizeof(byte), 0);
    while (n > 0);
    return n == 0 || errno == ECONNRESET;
}

static struct tcp_hello good_hello(uint64_t attempt)
{
    struct tcp_hello h = {
        .protocol = TCP_PROTOCOL, .epoch = EPOCH, .attempt = attempt, .from = 1, .to = 0};
    memcpy(h.token, TOKEN, sizeof(TOKEN));
    return h;
}

static void say_hello(int fd, const struct tcp_hello *h)
{
    uint8_t out[TCP_HELLO_BYTES];
    tcp_hello_pack(h, out);
    say(fd, out, sizeof(out));
}

static struct tcp_frame data_frame(uint64_t attempt, uint64_t sequence, uint32_t bytes)
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

static void say_frame(int fd, const struct tcp_frame *f, const void *payload, size_t n)
{
    uint8_t out[TCP_FRAME_BYTES];
    tcp_frame_pack(f, out);
    say(fd, out, sizeof(out));
    if (n > 0)
        say(fd, payload, n);
}

/* The next frame that is neither WELCOME nor ALIVE. */
static struct tcp_frame heard_frame(int fd)
{
    uint8_t in[TCP_FRAME_BYTES];
    struct tcp_frame f = {0};
    do {
        ck_assert_int_eq(recv(fd, in, sizeof(in), MSG_WAITALL), TCP_FRAME_BYTES);
        ck_assert_int_eq(tcp_frame_unpack(in, &f), 0);
    } while (f.type == TCP_ALIVE || f.type == TCP_WELCOME);
    return f;
}

static void until_refused(const struct plane *p, uint64_t n)
{
    uint64_t until = clock_mono_ns() + UINT64_C(5000000000);
    while (transport_tcp_node_refused(p->node) < n && clock_mono_ns() < until)
        (void)poll(NULL, 0, 1);
    ck_assert_uint_eq(transport_tcp_node_refused(p->node), n);
}

/* Device 0 is here; device 1 is the test, at `port`. */
static void with_played_peer(struct plane *p, uint16_t port)
{
    plane_listen(p);
    plane_local(p, 0);
    plane_remote(p, 1, port);
    plane_open(p, 2, 0);
}

/* --- two data planes -------------------------------------------------------------------------- */

struct pair {
    struct plane a, b;
};

/* Devices 0 and 1 at a, 2 and 3 at b. */
static void pair_open(struct pair *x, double bytes_per_s)
{
    plane_listen(&x->a);
    plane_listen(&x->b);
    for (uint32_t d = 0; d < 4; d++) {
        plane_local(d < 2 ? &x->a : &x->b, d);
        plane_remote(d < 2 ? &x->b : &x->a, d,
                     transport_tcp_node_port(d < 2 ? x->a.node : x->b.node));
    }
    plane_open(&x->a, 4, bytes_per_s);
    plane_open(&x->b, 4, bytes_per_s);
}

static void pair_close(struct pair *x)
{
    plane_close(&x->a);
    plane_close(&x->b);
}

/* Each device sends to each other and receives from it. */
static void exchange(struct pair *x, uint64_t seed)
{
    enum { N = 4, MOST = 3 << 20 };
    struct waited w[N];
    struct transport_message m[N][2 * N];
    uint8_t *sent = malloc(N * N * MOST), *landed = calloc(N * N, MOST);
    size_t bytes[N][N];
    for (uint32_t a = 0; a < N; a++)
        for (uint32_t b = 0; b < N; b++) {
            bytes[a][b] = 1 + random_next(&seed) % MOST;
            fill(sent + (a * N + b) * MOST, bytes[a][b], seed + a * N + b);
        }
    for (uint32_t d = 0; d < N; d++) {
        for (uint32_t k = 0; k < N; k++) {
            m[d][2 * k] = (struct transport_message){
                sent + (d * N + k) * MOST, bytes[d][k], k, true, true, 0, NULL, 0};
            m[d][2 * k + 1] = (struct transport_message){
                landed + (k * N + d) * MOST, bytes[k][d], k, false, true, 0, NULL, 0};
        }
        submit(d < 2 ? &x->a : &x->b, d, &w[d], m[d], 2 * N);
    }
    for (uint32_t d = 0; d < N; d++)
        ck_assert_msg(waited_status(&w[d]) == 0, "%s", w[d].err.text);
    for (uint32_t i = 0; i < N * N; i++)
        ck_assert_int_eq(memcmp(sent + i * MOST, landed + i * MOST, bytes[i / N][i % N]), 0);
    free(sent);
    free(landed);
}

START_TEST(two_data_planes_exchange_and_their_connections_serve_the_next_attempt)
{
    struct pair x;
    pair_open(&x, 0);
    for (uint64_t attempt = 1; attempt <= 3; attempt++) {
        if (attempt > 1) {
            ck_assert_int_eq(transport_begin(x.a.t, attempt, NULL), 0);
            ck_assert_int_eq(transport_begin(x.b.t, attempt, NULL), 0);
        }
        exchange(&x, attempt);
    }
    ck_assert_uint_eq(transport_tcp_node_refused(x.a.node), 0);
    ck_assert_uint_eq(transport_tcp_node_refused(x.b.node), 0);
    pair_close(&x);
}
END_TEST

/* What the faster side sends of the next attempt waits for the slower one. */
START_TEST(a_frame_of_the_next_attempt_waits_until_it_begins)
{
    struct pair x;
    struct waited ws, wr;
    uint8_t sent[1000], landed[1000] = {0};
    struct transport_message send = {sent, sizeof(sent), 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, sizeof(landed), 0, false, true, 0, NULL, 0};
    fill(sent, sizeof(sent), 3);
    pair_open(&x, 0);
    ck_assert_int_eq(transport_begin(x.a.t, 2, NULL), 0);
    submit(&x.a, 0, &ws, &send, 1);
    submit(&x.b, 2, &wr, &receive, 1); /* of attempt 1: nobody sends it anything */
    ck_assert(!waited_within(&wr, 50));
    transport_abort(x.b.t);
    ck_assert_int_eq(waited_status(&wr), RS_ECANCELED);
    ck_assert_int_eq(landed[0], 0);
    ck_assert(!waited_within(&ws, 1));
    ck_assert_int_eq(transport_begin(x.b.t, 2, NULL), 0);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    ck_assert_int_eq(memcmp(sent, landed, sizeof(sent)), 0);
    pair_close(&x);
}
END_TEST

/* The sending side is slower than any silence, but not silent. */
START_TEST(a_peer_that_is_slow_but_alive_is_waited_for)
{
    struct pair x;
    struct waited ws, wr;
    uint8_t a = 1, b = 0;
    struct transport_message send = {&a, 1, 2, true, true, 0, NULL, 0},
                             receive = {&b, 1, 0, false, true, 0, NULL, 0};
    pair_open(&x, 0);
    submit(&x.a, 0, &ws, &send, 1); /* waits for device 2, which is busy elsewhere */
    ck_assert_msg(!waited_within(&ws, 4 * SILENCE_MS), "%s", ws.err.text);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    struct transport_message late_send = {&a, 1, 2, true, true, 0, NULL, 0};
    submit(&x.b, 2, &wr, &receive, 1); /* now the receiver waits, over a connection that is there */
    ck_assert_msg(!waited_within(&wr, 4 * SILENCE_MS), "%s", wr.err.text);
    submit(&x.a, 0, &ws, &late_send, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    pair_close(&x);
}
END_TEST

/* Aborts both sides at a random moment, then asks for a clean attempt over the same connections. */
START_TEST(aborts_at_random_moments_leave_a_clean_next_attempt)
{
    enum { BYTES = 3 << 20, ROUNDS = 12 };
    struct pair x;
    uint64_t stale = 0, seed = 5, attempt = 1;
    uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES), *copy = malloc(BYTES);
    pair_open(&x, 300e6); /* some 10 ms a message */
    for (int round = 0; round < ROUNDS; round++, attempt += 2) {
        struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
        struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
        struct waited ws, wr;
        fill(sent, BYTES, seed);
        submit(&x.a, 0, &ws, &send, 1);
        submit(&x.b, 2, &wr, &receive, 1);
        (void)poll(NULL, 0, (int)(random_next(&seed) % 10));
        transport_abort(round % 2 == 0 ? x.a.t : x.b.t);
        transport_abort(round % 2 == 0 ? x.b.t : x.a.t);
        (void)waited_status(&ws);
        (void)waited_status(&wr);
        ck_assert(transport_quiesced(x.a.t) && transport_quiesced(x.b.t));
        memcpy(copy, landed, BYTES);
        memset(sent, 0xEE, BYTES);
        ck_assert_int_eq(transport_begin(x.a.t, attempt + 1, NULL), 0);
        ck_assert_int_eq(transport_begin(x.b.t, attempt + 1, NULL), 0);
        exchange(&x, attempt);
        ck_assert_int_eq(memcmp(copy, landed, BYTES), 0);
        ck_assert_int_eq(transport_begin(x.a.t, attempt + 2, NULL), 0);
        ck_assert_int_eq(transport_begin(x.b.t, attempt + 2, NULL), 0);
    }
    for (uint32_t d = 0; d < 4; d++)
        stale += transport_counters(d < 2 ? x.a.t : x.b.t, d).stale_frames;
    ck_assert_uint_gt(stale, 0);
    pair_close(&x);
    free(sent);
    free(landed);
    free(copy);
}
END_TEST

/* The sender gives up in the middle of a frame; its peer has not heard of that yet, and must not
 * take for content what fills the frame up. */
START_TEST(a_frame_that_was_given_up_brings_nothing_to_a_receiver_of_the_same_attempt)
{
    enum { BYTES = 64 << 20, SENT = 0xEE, BEFORE = 0x5A };
    struct pair x;
    struct waited ws, wr;
    uint8_t *sent = malloc(BYTES), *landed = malloc(BYTES);
    struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
    memset(sent, SENT, BYTES);
    memset(landed, BEFORE, BYTES);
    pair_open(&x, 0);
    submit(&x.a, 0, &ws, &send, 1);
    while (transport_tcp_node_connected(x.b.node) == 0)
        (void)poll(NULL, 0, 1);
    ck_assert(!waited_within(&ws, 50)); /* the sockets are full */
    transport_abort(x.a.t);
    ck_assert_int_eq(waited_status(&ws), RS_ECANCELED);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert(!waited_within(&wr, SILENCE_MS * 3 / 4));
    transport_abort(x.b.t);
    (void)waited_status(&wr);
    ck_assert_int_eq(landed[0], SENT);
    for (size_t i = 0; i < BYTES; i++)
        if (landed[i] != SENT && landed[i] != BEFORE)
            ck_abort_msg("byte %zu is %02x", i, landed[i]);
    ck_assert_int_eq(transport_begin(x.a.t, 2, NULL), 0);
    ck_assert_int_eq(transport_begin(x.b.t, 2, NULL), 0);
    exchange(&x, 2);
    ck_assert_uint_gt(transport_counters(x.b.t, 2).stale_frames, 0);
    pair_close(&x);
    free(sent);
    free(landed);
}
END_TEST

/* In the middle of a message, at the receiver or at the sender alone. */
START_TEST(no_chunk_is_read_or_sent_once_the_lease_is_over)
{
    enum { BYTES = 16 << 20 };
    for (int at_sender = 0; at_sender < 2; at_sender++) {
        struct pair x;
        struct waited ws, wr;
        uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES), *copy = malloc(BYTES);
        struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
        struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
        memset(sent, 0xEE, BYTES);
        pair_open(&x, 100e6);
        submit(&x.a, 0, &ws, &send, 1);
        submit(&x.b, 2, &wr, &receive, 1);
        while (transport_counters(x.b.t, 2).network_received_bytes < 1 << 20)
            (void)poll(NULL, 0, 1);
        fence_prolong(at_sender ? &x.a.fence : &x.b.fence, 1);
        ck_assert_int_eq(waited_status(at_sender ? &ws : &wr), RS_EDEADLINE);
        if (!at_sender)
            memcpy(copy, landed, BYTES);
        fence_prolong(at_sender ? &x.a.fence : &x.b.fence, UINT64_MAX);
        ck_assert_uint_lt(transport_counters(x.a.t, 0).network_sent_bytes, BYTES);
        if (!at_sender) {
            (void)poll(NULL, 0, 20);
            ck_assert_int_eq(memcmp(copy, landed, BYTES), 0);
        }
        transport_abort(x.a.t);
        transport_abort(x.b.t);
        (void)waited_status(&ws);
        (void)waited_status(&wr);
        pair_close(&x);
        free(sent);
        free(landed);
        free(copy);
    }
}
END_TEST

/* --- strangers -------------------------------------------------------------------------------- */

START_TEST(strangers_are_refused_and_counted_and_the_attempt_goes_on)
{
    struct plane p;
    uint8_t landed[8] = {0}, noise[4096];
    struct transport_message receive = {landed, 8, 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer(&p, 1);
    submit(&p, 0, &w, &receive, 1);
    fill(noise, sizeof(noise), 1);

    int look = dial(&p); /* as the coordinator's at the port of a node that joins: no stranger */
    close(look);
    int scanner = dial(&p);
    say(scanner, noise, 1);
    close(scanner);
    int garbage = dial(&p);
    say(garbage, noise, sizeof(noise));
    ck_assert(is_closed(garbage));
    struct tcp_hello h = good_hello(1);
    struct {
        const char *what;
        struct tcp_hello hello;
    } wrong[6] = {{"token", h}, {"protocol", h}, {"epoch", h},
                  {"to", h},    {"from", h},     {"stream", h}};
    wrong[0].hello.token[15] ^= 1;
    wrong[1].hello.protocol++;
    wrong[2].hello.epoch--;
    wrong[3].hello.to = 1; /* not here */
    wrong[4].hello.from = 77;
    wrong[5].hello.stream = TRANSPORT_TCP_MAX_STREAMS;
    for (int i = 0; i < 6; i++) {
        int fd = dial(&p);
        say_hello(fd, &wrong[i].hello);
        ck_assert_msg(is_closed(fd), "a wrong %s was let in", wrong[i].what);
        close(fd);
    }
    until_refused(&p, 8);

    int fd = dial(&p);
    say_hello(fd, &h);
    int again = dial(&p);
    say_hello(again, &h); /* the same hello a second time */
    ck_assert(is_closed(again));
    until_refused(&p, 9);
    struct tcp_frame f = data_frame(1, 0, 8);
    say_frame(fd, &f, "8 bytes!", 8);
    ck_assert_int_eq(waited_status(&w), 0);
    ck_assert_int_eq(memcmp(landed, "8 bytes!", 8), 0);
    close(fd);
    close(again);
    close(garbage);
    plane_close(&p);
}
END_TEST

/* More of them than there are places, each with half a hello; who belongs here still gets in. */
START_TEST(half_open_connections_do_not_keep_others_out)
{
    enum { N = 100 };
    struct plane p;
    uint8_t landed[8] = {0}, hello[TCP_HELLO_BYTES];
    struct transport_message receive = {landed, 8, 1, false, true, 0, NULL, 0};
    struct waited w;
    int idle[N];
    struct tcp_hello h = good_hello(1);
    with_played_peer(&p, 1);
    submit(&p, 0, &w, &receive, 1);
    tcp_hello_pack(&h, hello);
    for (int i = 0; i < N; i++) {
        idle[i] = dial(&p);
        say(idle[i], hello, TCP_HELLO_BYTES / 2);
    }
    int fd = dial(&p);
    say(fd, hello, 1); /* in pieces */
    (void)poll(NULL, 0, 5);
    say(fd, hello + 1, TCP_HELLO_BYTES - 1);
    struct tcp_frame f = data_frame(1, 0, 8);
    say_frame(fd, &f, "8 bytes!", 8);
    ck_assert_int_eq(waited_status(&w), 0);
    ck_assert_uint_ge(transport_tcp_node_refused(p.node), N - 64);
    for (int i = 0; i < N; i++)
        close(idle[i]);
    close(fd);
    plane_close(&p);
}
END_TEST

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

START_TEST(without_descriptors_it_waits_without_spinning_and_then_lets_in)
{
    struct plane p;
    uint8_t landed[8] = {0};
    struct transport_message receive = {landed, 8, 1, false, true, 0, NULL, 0};
    struct waited w;
    struct rlimit limit, none;
    struct tcp_hello h = good_hello(1);
    plane_listen(&p);
    plane_local(&p, 0);
    plane_remote(&p, 1, 1);
    plane_open_within(&p, 2, 0, PATIENCE_MS); /* not let in for a while, the peer is silent */
    submit(&p, 0, &w, &receive, 1);
    struct sockaddr_in a = loopback(transport_tcp_node_port(p.node));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 3; /* no new descriptor */
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    say_hello(fd, &h);
    double before = cpu_ms();
    ck_assert(!waited_within(&w, 200));
    ck_assert_double_lt(cpu_ms() - before, 50);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    struct tcp_frame f = data_frame(1, 0, 8);
    say_frame(fd, &f, "8 bytes!", 8);
    ck_assert_int_eq(waited_status(&w), 0);
    close(fd);
    plane_close(&p);
}
END_TEST

/* --- peers that misbehave --------------------------------------------------------------------- */

START_TEST(an_old_attempts_chunk_is_drained_and_counted_and_never_lands)
{
    struct plane p;
    uint8_t landed[8] = {0};
    struct transport_message receive = {landed, 8, 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer(&p, 1);
    ck_assert_int_eq(transport_begin(p.t, 5, NULL), 0);
    submit(&p, 0, &w, &receive, 1);
    int fd = dial(&p);
    struct tcp_hello h = good_hello(5);
    say_hello(fd, &h);
    struct tcp_frame old = data_frame(4, 0, 8), now = data_frame(5, 0, 8);
    say_frame(fd, &old, "old news", 8);
    ck_assert(!waited_within(&w, 50));
    ck_assert_int_eq(landed[0], 0);
    say_frame(fd, &now, "8 bytes!", 8);
    ck_assert_int_eq(waited_status(&w), 0);
    ck_assert_int_eq(memcmp(landed, "8 bytes!", 8), 0);
    ck_assert_uint_eq(transport_counters(p.t, 0).stale_frames, 1);
    close(fd);
    plane_close(&p);
}
END_TEST

/* A receive of 8 bytes is posted; the peer sends what the test says. */
static void misbehaves(const struct tcp_frame *frames, int n, int status, const char *word,
                       bool refused)
{
    struct plane p;
    uint8_t landed[64];
    memset(landed, 0x5A, sizeof(landed));
    struct transport_message receive = {landed, 8, 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer(&p, 1234);
    submit(&p, 0, &w, &receive, 1);
    int fd = dial(&p);
    struct tcp_hello h = good_hello(1);
    say_hello(fd, &h);
    for (int i = 0; i < n; i++)
        say_frame(fd, &frames[i], "payload!payload!", frames[i].length);
    ck_assert_int_eq(waited_status(&w), status);
    ck_assert_msg(strstr(w.err.text, word) != NULL, "%s", w.err.text);
    ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1:1234"));
    for (int i = 8; i < 64; i++)
        ck_assert_int_eq(landed[i], 0x5A);
    if (refused) {
        struct tcp_frame f = heard_frame(fd);
        while (f.type == TCP_ACCEPT)
            f = heard_frame(fd);
        ck_assert_int_eq(f.type, TCP_REFUSE);
    } else {
        ck_assert(is_closed(fd));
    }
    close(fd);
    plane_close(&p);
}

START_TEST(more_or_fewer_bytes_than_planned_fail_both_groups)
{
    struct tcp_frame longer = data_frame(1, 0, 16), shorter = data_frame(1, 0, 4);
    struct tcp_frame part[2] = {data_frame(1, 0, 8), data_frame(1, 0, 8)};
    part[0].length = 5;
    part[1].length = 5;
    misbehaves(&longer, 1, RS_EPROTO, "16 bytes", true);
    misbehaves(&shorter, 1, RS_EPROTO, "4 bytes", true);
    misbehaves(part, 2, RS_EPROTO, "more bytes than the message has", true);
}
END_TEST

START_TEST(frames_that_are_none_fail_the_group)
{
    struct tcp_frame f = data_frame(1, 0, 8);
    f.epoch++;
    misbehaves(&f, 1, RS_EPROTO, "no frame of this link", false);
    f = data_frame(1, 0, 8);
    f.from = 0;
    misbehaves(&f, 1, RS_EPROTO, "no frame of this link", false);
    f = data_frame(1, 0, 8);
    f.offset = UINT64_MAX - 4;
    misbehaves(&f, 1, RS_EPROTO, "no frame of this link", false);
    f = data_frame(1, 0, 8);
    f.type = TCP_ACCEPT; /* the wrong way */
    f.length = 0;
    misbehaves(&f, 1, RS_EPROTO, "no frame of this link", false);
    f.type = 99;
    misbehaves(&f, 1, RS_EPROTO, "no frame of this link", false);
}
END_TEST

/* In the middle of a message: by RST, or in order. */
static void dies(bool reset)
{
    struct plane p;
    uint8_t landed[4096];
    struct transport_message receive = {landed, sizeof(landed), 1, false, true, 0, NULL, 0};
    struct linger now = {.l_onoff = 1};
    struct waited w;
    with_played_peer(&p, 1234);
    submit(&p, 0, &w, &receive, 1);
    int fd = dial(&p);
    struct tcp_hello h = good_hello(1);
    struct tcp_frame f = data_frame(1, 0, sizeof(landed));
    say_hello(fd, &h);
    say_frame(fd, &f, "payload", 7);
    ck_assert_int_eq(heard_frame(fd).type, TCP_ACCEPT);
    if (reset)
        ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now)), 0);
    close(fd);
    ck_assert_int_eq(waited_status(&w), RS_EPEER);
    ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1:1234"));

    /* The next attempt is not burdened: the peer comes back over a new connection. */
    ck_assert_int_eq(transport_begin(p.t, 2, NULL), 0);
    submit(&p, 0, &w, &receive, 1);
    fd = dial(&p);
    h.attempt = 2;
    f.attempt = 2;
    say_hello(fd, &h);
    static const uint8_t whole[4096] = {1, 2, 3};
    say_frame(fd, &f, whole, sizeof(whole));
    ck_assert_int_eq(waited_status(&w), 0);
    ck_assert_int_eq(memcmp(landed, whole, sizeof(whole)), 0);
    close(fd);
    plane_close(&p);
}

START_TEST(a_peer_that_dies_in_the_middle_of_a_message_fails_the_group)
{
    dies(true);
    dies(false);
}
END_TEST

/* Its last frame waits for a receive that is not posted: that must not hide its end. */
START_TEST(a_peer_that_dies_ahead_of_its_receives_fails_the_group_at_once)
{
    struct plane p;
    uint8_t landed[8];
    struct transport_message receive = {landed, sizeof(landed), 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer(&p, 1234);
    submit(&p, 0, &w, &receive, 1);
    int fd = dial(&p);
    struct tcp_hello h = good_hello(1);
    struct tcp_frame ahead = data_frame(1, 7, 8);
    say_hello(fd, &h);
    say_frame(fd, &ahead, "8 bytes!", 8);
    close(fd);
    ck_assert_int_eq(waited_status(&w), RS_EPEER);
    plane_close(&p);
}
END_TEST

START_TEST(a_peer_that_does_not_listen_fails_the_sender_at_once)
{
    struct plane p;
    uint16_t port;
    uint8_t byte = 1;
    struct transport_message send = {&byte, 1, 1, true, true, 0, NULL, 0};
    struct waited w;
    close(listen_at(&port));
    with_played_peer(&p, port);
    submit(&p, 0, &w, &send, 1);
    ck_assert_int_eq(waited_status(&w), RS_EPEER);
    ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1"));
    ck_assert_ptr_nonnull(strstr(w.err.text, "refused"));
    plane_close(&p);
}
END_TEST

/* As a stopped process: its kernel takes connection and bytes, and nobody reads them. */
START_TEST(a_peer_that_reads_nothing_is_past_its_deadline)
{
    enum { BYTES = 64 << 20 };
    struct plane p;
    uint16_t port;
    int listener = listen_at(&port);
    static const size_t sizes[2] = {1, BYTES}; /* fits into the socket's buffer, does not */
    uint8_t *data = calloc(1, BYTES);
    for (int i = 0; i < 2; i++) {
        struct transport_message send = {data, sizes[i], 1, true, true, 0, NULL, 0};
        struct waited w;
        with_played_peer(&p, port);
        uint64_t began = clock_mono_ns();
        submit(&p, 0, &w, &send, 1);
        ck_assert_int_eq(waited_status(&w), RS_EDEADLINE);
        ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1"));
        ck_assert_uint_ge(clock_mono_ns() - began, SILENCE_MS * UINT64_C(1000000));
        ck_assert_uint_lt(clock_mono_ns() - began, 8 * SILENCE_MS * UINT64_C(1000000));
        plane_close(&p);
    }
    free(data);
    close(listener);
}
END_TEST

/* It has said hello and sent a part, and then nothing. */
START_TEST(a_peer_that_falls_silent_in_a_message_is_past_its_deadline)
{
    struct plane p;
    uint8_t landed[4096];
    struct transport_message receive = {landed, sizeof(landed), 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer(&p, 1);
    submit(&p, 0, &w, &receive, 1);
    int fd = dial(&p);
    struct tcp_hello h = good_hello(1);
    struct tcp_frame f = data_frame(1, 0, sizeof(landed));
    say_hello(fd, &h);
    say_frame(fd, &f, "payload", 7);
    ck_assert_int_eq(waited_status(&w), RS_EDEADLINE);
    close(fd);
    plane_close(&p);
}
END_TEST

/* The receive is not posted: the sender is held back, its bytes stay in the sockets, which are full
 * for longer than any silence; but the peer is alive, and says so. */
START_TEST(a_sender_is_held_back_until_its_receive_is_posted)
{
    enum { BYTES = 64 << 20 };
    struct pair x;
    struct waited ws, wr;
    uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES);
    struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
    fill(sent, BYTES, 8);
    pair_open(&x, 0);
    submit(&x.a, 0, &ws, &send, 1);
    ck_assert_msg(!waited_within(&ws, 4 * SILENCE_MS), "%s", ws.err.text);
    uint64_t held = transport_counters(x.a.t, 0).network_sent_bytes;
    ck_assert_uint_lt(held, BYTES);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&ws), 0);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(memcmp(sent, landed, BYTES), 0);
    ck_assert_uint_eq(transport_counters(x.b.t, 2).network_received_bytes, BYTES);
    pair_close(&x);
    free(sent);
    free(landed);
}
END_TEST

/* --- groups that make way --------------------------------------------------------------------- */

/* Device 0 sends to device 2, each message in a group of its own; nothing is received yet. */
enum { TRAIL_BYTES = 1000, TRAIL_MOST = 70, TRAIL_LIMIT = 64 };

struct trail {
    struct pair x;
    uint32_t n;
    uint8_t sent[TRAIL_MOST][TRAIL_BYTES], landed[TRAIL_MOST][TRAIL_BYTES];
    struct transport_message sends[TRAIL_MOST], receives[TRAIL_MOST];
    struct waited ws[TRAIL_MOST], wr;
};

static struct trail *trail_open(uint32_t n)
{
    struct trail *t = calloc(1, sizeof(*t));
    t->n = n;
    pair_open(&t->x, 0);
    for (uint32_t i = 0; i < n; i++) {
        fill(t->sent[i], TRAIL_BYTES, i + 1);
        t->sends[i] =
            (struct transport_message){t->sent[i], TRAIL_BYTES, 2, true, true, i, NULL, 0};
        t->receives[i] =
            (struct transport_message){t->landed[i], TRAIL_BYTES, 0, false, true, i, NULL, 0};
        submit(&t->x.a, 0, &t->ws[i], &t->sends[i], 1);
    }
    return t;
}

static void trail_close(struct trail *t)
{
    pair_close(&t->x);
    free(t);
}

START_TEST(groups_make_way_and_the_last_one_waits_for_the_answers_to_all)
{
    struct trail *t = trail_open(3);
    ck_assert_int_eq(waited_status(&t->ws[0]), 0);
    ck_assert_int_eq(waited_status(&t->ws[1]), 0);
    ck_assert(!waited_within(&t->ws[2], 2 * SILENCE_MS)); /* the peer is alive all the time */
    submit(&t->x.b, 2, &t->wr, t->receives, 3);
    ck_assert_int_eq(waited_status(&t->wr), 0);
    ck_assert_int_eq(waited_status(&t->ws[2]), 0);
    ck_assert_int_eq(memcmp(t->sent, t->landed, 3 * TRAIL_BYTES), 0);
    ck_assert_uint_eq(transport_counters(t->x.a.t, 0).messages, 3);
    trail_close(t);
}
END_TEST

START_TEST(no_more_than_so_many_groups_make_way)
{
    struct trail *t = trail_open(TRAIL_MOST);
    for (uint32_t i = 0; i < TRAIL_LIMIT; i++)
        ck_assert_int_eq(waited_status(&t->ws[i]), 0);
    ck_assert(!waited_within(&t->ws[TRAIL_LIMIT], SILENCE_MS));
    submit(&t->x.b, 2, &t->wr, t->receives, TRAIL_MOST);
    ck_assert_int_eq(waited_status(&t->wr), 0);
    for (uint32_t i = TRAIL_LIMIT; i < TRAIL_MOST; i++)
        ck_assert_int_eq(waited_status(&t->ws[i]), 0);
    ck_assert_int_eq(memcmp(t->sent, t->landed, sizeof(t->sent)), 0);
    trail_close(t);
}
END_TEST

START_TEST(what_is_refused_after_its_group_made_way_fails_a_later_one)
{
    struct trail *t = trail_open(3);
    ck_assert_int_eq(waited_status(&t->ws[0]), 0);
    t->receives[0].bytes--;
    submit(&t->x.b, 2, &t->wr, t->receives, 3);
    ck_assert_int_eq(waited_status(&t->wr), RS_EPROTO);
    ck_assert_int_eq(waited_status(&t->ws[2]), RS_EPROTO);
    trail_close(t);
}
END_TEST

START_TEST(an_abort_ends_groups_that_made_way_and_the_next_attempt_is_clean)
{
    struct trail *t = trail_open(3);
    ck_assert_int_eq(waited_status(&t->ws[1]), 0);
    transport_abort(t->x.a.t);
    transport_abort(t->x.b.t);
    ck_assert_int_eq(waited_status(&t->ws[2]), RS_ECANCELED);
    ck_assert(transport_quiesced(t->x.a.t));
    ck_assert_int_eq(transport_begin(t->x.a.t, 2, NULL), 0);
    ck_assert_int_eq(transport_begin(t->x.b.t, 2, NULL), 0);
    exchange(&t->x, 5);
    trail_close(t);
}
END_TEST

/* 8 MiB at 100 MiB/s: 80 ms, with one sender, and with two to one receiver 160 ms. Rate 0: as fast as it goes. */
static double paced_ms(uint32_t n_senders, double bytes_per_s)
{
    enum { BYTES = 8 << 20 };
    struct pair x;
    struct waited ws[2], wr;
    uint8_t *data = calloc(4, BYTES);
    struct transport_message send[2], receive[2];
    pair_open(&x, bytes_per_s);
    uint64_t began = clock_mono_ns();
    for (uint32_t i = 0; i < n_senders; i++) {
        send[i] = (struct transport_message){data + i * BYTES, BYTES, 2, true, true, 0, NULL, 0};
        receive[i] =
            (struct transport_message){data + (2 + i) * BYTES, BYTES, i, false, true, 0, NULL, 0};
        submit(&x.a, i, &ws[i], &send[i], 1);
    }
    submit(&x.b, 2, &wr, receive, n_senders);
    for (uint32_t i = 0; i < n_senders; i++)
        ck_assert_int_eq(waited_status(&ws[i]), 0);
    ck_assert_int_eq(waited_status(&wr), 0);
    double ms = (double)(clock_mono_ns() - began) / 1e6;
    pair_close(&x);
    free(data);
    return ms;
}

START_TEST(a_set_rate_holds_per_device_and_direction)
{
    const double rate = 100.0 * (1 << 20);
    double one = INFINITY, two = INFINITY, free = 0;
    for (int i = 0; i < 3; i++) {
        free = fmax(free, paced_ms(1, 0)); /* what this machine, busy as it is, takes anyway */
        one = fmin(one, paced_ms(1, rate));
        two = fmin(two, paced_ms(2, rate));
    }
    ck_assert_double_ge(one, 78);
    ck_assert_double_lt(one, 120 + 4 * free);
    ck_assert_double_ge(two, 155);
}
END_TEST

/* --- opening ---------------------------------------------------------------------------------- */

START_TEST(an_address_that_is_none_is_refused)
{
    struct transport_tcp_node *node = NULL;
    struct transport_tcp_options options = {0};
    struct transport_tcp_device devices[1] = {{.address = "no.where", .port = 1}};
    struct transport *t = NULL;
    struct err e = {0};
    ck_assert_int_eq(transport_tcp_node_open("localhost", 0, &node, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "localhost"));
    ck_assert_int_lt(transport_tcp_node_open("192.0.2.1", 0, &node, &e),
                     0); /* not of this machine */
    ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &node, NULL), 0);
    ck_assert_int_eq(transport_tcp_open(node, devices, 1, 1, &options, &t, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "no.where"));
    transport_tcp_node_close(node);
}
END_TEST

START_TEST(opening_without_memory_fails_and_leaves_nothing_behind)
{
    struct plane p;
    struct transport_tcp_options options = {0};
    bool struck;
    plane_listen(&p);
    plane_local(&p, 0);
    plane_local(&p, 1);
    for (long i = 1;; i++) {
        struct transport_tcp_node *node = NULL;
        mem_fail_at(i);
        int r = transport_tcp_node_open("127.0.0.1", 0, &node, NULL);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        transport_tcp_node_close(node);
        if (!struck)
            break;
    }
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = transport_tcp_open(p.node, p.table, 2, EPOCH, &options, &p.t, NULL);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (!struck)
            break;
    }
    plane_close(&p);
}
END_TEST

START_TEST(headers_of_random_bytes_are_refused_and_good_ones_come_back)
{
    uint64_t seed = 3;
    for (int i = 0; i < 20000; i++) {
        struct tcp_frame f = data_frame(random_next(&seed), random_next(&seed), 1 + (uint32_t)i),
                         back;
        uint8_t bytes[TCP_FRAME_BYTES], again[TCP_FRAME_BYTES];
        f.message_bytes = f.length + random_next(&seed) % 1000000;
        f.offset = random_next(&seed) % (f.message_bytes - f.length + 1);
        tcp_frame_pack(&f, bytes);
        ck_assert_int_eq(tcp_frame_unpack(bytes, &back), 0);
        ck_assert_uint_eq(back.sequence, f.sequence);
        bytes[random_next(&seed) % TCP_FRAME_BYTES] ^= (uint8_t)(1 + random_next(&seed) % 255);
        if (tcp_frame_unpack(bytes, &back) == 0) { /* what is accepted fits together */
            ck_assert_uint_le(back.length, TCP_MAX_PAYLOAD_BYTES);
            ck_assert(back.type != TCP_DATA || back.offset + back.length <= back.message_bytes);
            tcp_frame_pack(&back, again);
            ck_assert_int_eq(memcmp(bytes, again, sizeof(again)), 0);
        }
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(two_data_planes_exchange_and_their_connections_serve_the_next_attempt)                       \
    X(a_frame_of_the_next_attempt_waits_until_it_begins)                                           \
    X(a_peer_that_is_slow_but_alive_is_waited_for)                                                 \
    X(aborts_at_random_moments_leave_a_clean_next_attempt)                                         \
    X(no_chunk_is_read_or_sent_once_the_lease_is_over)                                             \
    X(strangers_are_refused_and_counted_and_the_attempt_goes_on)                                   \
    X(half_open_connections_do_not_keep_others_out)                                                \
    X(without_descriptors_it_waits_without_spinning_and_then_lets_in)                              \
    X(a_frame_that_was_given_up_brings_nothing_to_a_receiver_of_the_same_attempt)                  \
    X(an_old_attempts_chunk_is_drained_and_counted_and_never_lands)                                \
    X(more_or_fewer_bytes_than_planned_fail_both_groups)                                           \
    X(frames_that_are_none_fail_the_group)                                                         \
    X(a_peer_that_dies_in_the_middle_of_a_message_fails_the_group)                                 \
    X(a_peer_that_dies_ahead_of_its_receives_fails_the_group_at_once)                              \
    X(a_peer_that_does_not_listen_fails_the_sender_at_once)                                        \
    X(a_peer_that_reads_nothing_is_past_its_deadline)                                              \
    X(a_peer_that_falls_silent_in_a_message_is_past_its_deadline)                                  \
    X(a_sender_is_held_back_until_its_receive_is_posted)                                           \
    X(groups_make_way_and_the_last_one_waits_for_the_answers_to_all)                               \
    X(no_more_than_so_many_groups_make_way)                                                        \
    X(what_is_refused_after_its_group_made_way_fails_a_later_one)                                  \
    X(an_abort_ends_groups_that_made_way_and_the_next_attempt_is_clean)                            \
    X(a_set_rate_holds_per_device_and_direction)                                                   \
    X(an_address_that_is_none_is_refused)                                                          \
    X(opening_without_memory_fails_and_leaves_nothing_behind)                                      \
    X(headers_of_random_bytes_are_refused_and_good_ones_come_back)

#include "test/lib/main.h"
