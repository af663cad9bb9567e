/* All connections that an attempt needs, made at once, by one thread: it must hear of each, whatever it is looking at just then. */
#include "test/lib/tcp_peer.h"
#include "transport/tcp.h"

/* Devices 0 to 2 are here, each other one is a peer that the test plays. The last peer is the first device's, too. */
enum { HERE = 3, PEERS = 4, ALL = HERE + PEERS };

/* Who does not hear of an event looks again at half a beat, the eighth part of this: after every patience. */
enum { NEVER_SILENT_MS = 3600 * 1000 };

static const struct transport_pair pairs[PEERS] = {{0, 3}, {1, 4}, {2, 5}, {0, 6}};

struct played {
    struct transport_tcp_node *node;
    struct transport *t;
    struct device *devices[HERE];
    struct transport_connect connect;
    struct waited w;
    int listener, fds[ALL]; /* by peer */
};

static void on_connected(struct transport_connect *c, int status, const struct err *e)
{
    struct waited *w = c->arg;
    waited_done(&w->group, status, e);
}

static void played_open(struct played *x)
{
    struct transport_tcp_device table[ALL];
    const struct transport_tcp_options options = {.silence_ms = NEVER_SILENT_MS};
    const struct device_host_options host = {0};
    struct err e = {0};
    uint16_t port;
    memset(table, 0, sizeof table);
    memset(x, 0, sizeof *x);
    x->listener = listen_at(&port);
    for (uint32_t d = 0; d < ALL; d++) {
        if (d < HERE) {
            ck_assert_int_eq(device_host_open(d, &host, &x->devices[d], NULL), 0);
            table[d].device = x->devices[d];
            continue;
        }
        table[d].address = "127.0.0.1";
        table[d].port = port;
        memcpy(table[d].token, TOKEN, sizeof TOKEN);
    }
    ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &x->node, NULL), 0);
    int r = transport_tcp_open(x->node, table, ALL, EPOCH, &options, &x->t, &e);
    ck_assert_msg(r == 0, "%s", e.text);
    ck_assert_int_eq(transport_begin(x->t, 1, NULL), 0);
    waited_init(&x->w, NULL, 0);
    x->connect = (struct transport_connect){.pairs = pairs,
                                            .n_pairs = PEERS,
                                            .deadline_ns = clock_mono_ns() +
                                                           NEVER_SILENT_MS * UINT64_C(1000000),
                                            .on_done = on_connected,
                                            .arg = &x->w};
    ck_assert_int_eq(transport_connect(x->t, &x->connect), 0);
}

/* All have said whom they call. */
static void hear_hellos(struct played *x)
{
    for (uint32_t i = 0; i < PEERS; i++) {
        uint8_t bytes[TCP_HELLO_BYTES];
        struct tcp_hello h;
        int fd = accept(x->listener, NULL, NULL);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(recv(fd, bytes, sizeof bytes, MSG_WAITALL), TCP_HELLO_BYTES);
        ck_assert_int_eq(tcp_hello_unpack(bytes, &h), 0);
        ck_assert(h.to >= HERE && h.to < ALL && x->fds[h.to] == 0);
        x->fds[h.to] = fd;
    }
}

static void welcome(const struct played *x, const struct transport_pair *pair)
{
    uint8_t bytes[TCP_FRAME_BYTES];
    tcp_frame_pack(&(struct tcp_frame){.type = TCP_WELCOME,
                                       .from = pair->device,
                                       .to = pair->peer,
                                       .epoch = EPOCH,
                                       .attempt = 1},
                   bytes);
    say(x->fds[pair->peer], bytes, sizeof bytes);
}

static struct tcp_port *port_of(const struct played *x, uint32_t device)
{
    return tcp_port_of(tcp_of_transport(x->t), device);
}

static struct tcp_conn *conn_of(const struct played *x, const struct transport_pair *pair)
{
    return &port_of(x, pair->device)->out[pair->peer]->conns[0];
}

/* The node's thread has seen that it was let in. */
static bool is_in(const struct played *x, const struct transport_pair *pair)
{
    struct tcp_port *port = port_of(x, pair->device);
    (void)pthread_mutex_lock(&port->io);
    bool in = conn_of(x, pair)->welcome;
    (void)pthread_mutex_unlock(&port->io);
    return in;
}

/* What was said to it is in its socket, or has been read. */
static void has_come(const struct played *x, const struct transport_pair *pair)
{
    struct tcp_port *port = port_of(x, pair->device);
    struct pollfd fd = {.events = POLLIN};
    (void)pthread_mutex_lock(&port->io);
    fd.fd = conn_of(x, pair)->fd;
    (void)pthread_mutex_unlock(&port->io);
    while (poll(&fd, 1, 1) == 0 && !is_in(x, pair))
        ;
}

static void played_close(struct played *x)
{
    transport_close(x->t);
    transport_tcp_node_close(x->node);
    for (uint32_t d = 0; d < HERE; d++)
        device_close(x->devices[d]);
    for (uint32_t d = HERE; d < ALL; d++)
        close(x->fds[d]);
    close(x->listener);
}

/* The thread looks at the pairs in turn, and is held up at the third: past the first, before the last, which is another connection
 * of the same device. What then comes for both it takes when it looks at the last: that of the first must not be lost by it. */
START_TEST(a_welcome_that_comes_behind_the_look_is_not_lost_to_another_connection)
{
    struct played x;
    played_open(&x);
    hear_hellos(&x);
    struct tcp_port *gate = port_of(&x, pairs[2].device);
    (void)pthread_mutex_lock(&gate->io);
    welcome(&x, &pairs[1]);
    for (unsigned i = 1; !is_in(&x, &pairs[1]); i++) {
        (void)poll(NULL, 0, 1);
        if (i % 100 != 0)
            continue;
        (void)pthread_mutex_unlock(&gate->io); /* it was held up before it could look */
        (void)poll(NULL, 0, 1);
        (void)pthread_mutex_lock(&gate->io);
    }
    for (uint32_t i = 0; i < PEERS; i++)
        if (i != 1)
            welcome(&x, &pairs[i]);
    has_come(&x, &pairs[0]);
    has_come(&x, &pairs[3]);
    struct pollfd third = {.fd = conn_of(&x, &pairs[2])->fd, .events = POLLIN};
    ck_assert_int_eq(poll(&third, 1, -1), 1); /* nobody reads it: the port is ours */
    (void)pthread_mutex_unlock(&gate->io);
    ck_assert_int_eq(waited_status(&x.w), 0);
    played_close(&x);
}
END_TEST

#define TESTS(X) X(a_welcome_that_comes_behind_the_look_is_not_lost_to_another_connection)

#include "test/lib/main.h"
