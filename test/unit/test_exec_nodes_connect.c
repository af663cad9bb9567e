/* Nodes that prepare: their connections are made, waited for and refused by name; strangers. */
#include <arpa/inet.h>
#include <errno.h>

#include "test/lib/best_of.h"
#include "test/lib/rig_nodes.h"
#include "transport/tcp_frame.h"

/* --- preparing --- */

static void never_opened(struct rig *r)
{
    for (uint32_t l = 0; l <= r->n_layouts; l++) {
        layout_free(r->layouts[l]);
        free(r->rank_device[l]);
    }
}

START_TEST(an_address_that_is_not_there_or_a_port_in_use_is_refused_by_name)
{
    struct cluster c;
    static const char *const bad[] = {"192.0.2.7", "localhost", "2001:db8::1"};
    for (int i = 0; i < 3; i++) {
        plain_cluster(&c, 1, 1, "Replicate", 8);
        struct rig *r = &c.n[0];
        memcpy(r->o.hello.transport, "tcp", 4);
        snprintf(r->o.hello.data_address, sizeof(r->o.hello.data_address), "%s", bad[i]);
        r->o.lenient = true;
        rig_open(r);
        ck_assert(r->refused);
        rig_end(r, true);
        rig_free(r);
        never_opened(&c.n[1]);
    }
    plain_cluster(&c, 1, 1, "Replicate", 8);
    memcpy(c.n[0].o.hello.transport, "tcp", 4);
    rig_open(&c.n[0]);
    memcpy(c.n[1].o.hello.transport, "tcp", 4);
    c.n[1].o.node = 1;
    c.n[1].o.hello.data_port = c.n[0].data_port;
    c.n[1].o.lenient = true;
    rig_open(&c.n[1]);
    ck_assert(c.n[1].refused);
    cluster_foreach(&c, r)
    {
        rig_end(r, true);
        rig_free(r);
    }
}
END_TEST

START_TEST(a_fixed_port_and_an_ipv6_address_are_listened_at)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 8);
    struct rig *r = &c.n[0];
    memcpy(r->o.hello.transport, "tcp", 4);
    memcpy(r->o.hello.data_address, "::1", 4);
    rig_open(r);
    struct sockaddr_in6 a = {.sin6_family = AF_INET6,
                             .sin6_port = htons(r->data_port),
                             .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    close(fd);
    uint16_t port = r->data_port;
    rig_close(r);
    memset(&c.n[1].o.hello, 0, sizeof(c.n[1].o.hello));
    r = &c.n[1];
    memcpy(r->o.hello.transport, "tcp", 4);
    memcpy(r->o.hello.data_address, "::1", 4);
    r->o.hello.data_port = port; /* free again, though a connection of it may linger */
    rig_open(r);
    ck_assert_uint_eq(r->data_port, port);
    rig_close(r);
}
END_TEST

/* How long the one that prepared first has to wait once the other does, too. */
static uint64_t prepare_in_order(void *arg)
{
    uint32_t first = *(uint32_t *)arg;
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    new_version(&c, 1);
    next_attempt(&c);
    uint64_t requests[2];
    requests[first] = rig_send_prepare(&c.n[first], WIRE_VERIFY_FULL, NULL);
    if (first == 0)
        ck_assert(!rig_receive(&c.n[0], 150));
    (void)rig_stats(&c.n[0]); /* its loop is not blocked meanwhile */
    requests[!first] = rig_send_prepare(&c.n[!first], WIRE_VERIFY_FULL, NULL);
    uint64_t began = clock_mono_ns();
    expect_all(&c, requests, WIRE_PREPARED); /* both: START comes after, as from a coordinator */
    uint64_t took = clock_mono_ns() - began;
    start_all(&c, requests);
    finish_all(&c, requests, true);
    ck_assert_uint_eq(wrong_at(&c, 1), 0);
    ck_assert_uint_eq(stats_of_all(&c).refused, 0);
    cluster_close(&c);
    return took;
}

/* The one that sends prepares first: it waits for the other, and nobody counts a stranger. */
START_TEST(nodes_may_prepare_in_any_order)
{
    for (uint32_t first = 0; first < 2; first++)
        in_time_once(prepare_in_order, &first, 1000000000);
}
END_TEST

/* Prepare at node 0 alone, until its deadline: by what it says. How long after the deadline. */
static uint64_t never_connected(struct cluster *c, const char *word)
{
    c->n[0].deadline_ns = clock_mono_ns() + UINT64_C(300000000);
    rig_expect(&c->n[0], rig_send_prepare(&c->n[0], WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_int_eq(c->n[0].packet->header.code, RS_EDEADLINE);
    const char *text = rig_failure(&c->n[0])->text;
    ck_assert_msg(strstr(text, "node 'node-b' at 127.0.0.1:") != NULL, "%s", text);
    ck_assert_msg(strstr(text, word) != NULL, "%s", text);
    ck_assert_uint_ge(clock_mono_ns(), c->n[0].deadline_ns);
    uint64_t late = clock_mono_ns() - c->n[0].deadline_ns;
    rig_abort(&c->n[0]);
    c->n[0].deadline_ns = 0;
    return late;
}

enum { MOST_LATE_NS = 500000000 };

static uint64_t never_prepares(void *arg)
{
    struct cluster c;
    (void)arg;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    next_attempt(&c);
    uint64_t late = never_connected(&c, "no answer");
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
    return late;
}

START_TEST(a_peer_that_never_prepares_fails_at_the_deadline_by_name)
{
    in_time_once(never_prepares, NULL, MOST_LATE_NS);
}
END_TEST

static uint64_t does_not_listen(void *arg)
{
    struct cluster c;
    (void)arg;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    uint16_t port = c.n[1].data_port;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof(a);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0); /* bound, and not listening */
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    c.n[1].data_port = ntohs(a.sin_port);
    next_attempt(&c);
    uint64_t late = never_connected(&c, "refused");
    close(fd);
    c.n[1].data_port = port;
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
    return late;
}

START_TEST(a_peer_that_does_not_listen_fails_at_the_deadline_by_name)
{
    in_time_once(does_not_listen, NULL, MOST_LATE_NS);
}
END_TEST

/* How late its failure is, or how long the abort takes, whichever is more. */
static uint64_t wrong_token(void *arg)
{
    struct cluster c;
    (void)arg;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    next_attempt(&c);
    c.token[0][1][3] ^= 1;
    tell_peers(&c, 0);
    rig_expect(&c.n[1], rig_send_prepare(&c.n[1], WIRE_VERIFY_OFF, NULL), WIRE_PREPARED);
    uint64_t late = never_connected(&c, "closed by the other side");
    ck_assert_uint_ge(rig_stats(&c.n[1]).refused, 1);
    rig_abort(&c.n[1]);

    next_attempt(&c);
    (void)rig_send_prepare(&c.n[0], WIRE_VERIFY_OFF, NULL);
    (void)rig_stats(&c.n[0]);
    uint64_t began = clock_mono_ns();
    rig_abort(&c.n[0]);
    uint64_t took = clock_mono_ns() - began;
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
    return took > late ? took : late;
}

START_TEST(a_wrong_token_is_refused_and_counted_and_an_aborted_prepare_ends_at_once)
{
    in_time_once(wrong_token, NULL, MOST_LATE_NS);
}
END_TEST

START_TEST(peers_that_make_no_sense_are_refused)
{
    struct cluster c;
    plain_cluster(&c, 1, 1, "Replicate", 64);
    cluster_open(&c);
    struct rig *r = &c.n[0];
    for (int i = 0; i < 5; i++) {
        next_attempt(&c);
        uint32_t none = UINT32_MAX, far = 9, here = 0;
        uint8_t *table = r->peers.data + r->peers.n_bytes - 2 * sizeof(uint32_t);
        struct wire_peers h = {.n_peers = UINT32_MAX, .n_devices = 2};
        if (i == 0)
            r->peers.n_bytes = 3;
        else if (i == 1)
            memcpy(r->peers.data, &h, sizeof(h));
        else if (i == 2)
            memcpy(table + sizeof(uint32_t), &far, sizeof(far));
        else if (i == 3)
            memcpy(table, &here, sizeof(here));
        else
            memcpy(table + sizeof(uint32_t), &none,
                   sizeof(none)); /* the stream's peer is nowhere */
        rig_expect(r, rig_send_prepare(r, WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
        ck_assert_int_eq(r->packet->header.code, i == 4 ? RS_EPRECOND : RS_EPROTO);
        rig_abort(r);
    }
    r->peers.n_bytes = 0;
    r->attempt++;
    c.n[1].attempt++;
    rig_expect(r, rig_send_prepare(r, WIRE_VERIFY_OFF, NULL), WIRE_FAILED);
    ck_assert_ptr_nonnull(strstr(rig_failure(r)->text, "was not told where"));
    refit(&c, 1, WIRE_VERIFY_FULL);
    cluster_close(&c);
}
END_TEST

/* --- strangers --- */

static int dial(uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(port),
                            .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return fd;
}

static void wait_closed(int fd)
{
    struct timeval patience = {.tv_sec = RIG_WAIT_MS / 1000};
    uint8_t byte;
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    ssize_t n = recv(fd, &byte, 1, 0);
    ck_assert(n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
}

static void try_hello(const struct cluster *c, struct tcp_hello h)
{
    uint8_t out[TCP_HELLO_BYTES];
    int fd = dial(c->n[1].data_port);
    tcp_hello_pack(&h, out);
    ck_assert_int_eq(send(fd, out, sizeof(out), MSG_NOSIGNAL), TCP_HELLO_BYTES);
    wait_closed(fd);
}

/* One who has listened in and knows the token, and some who don't, while the refit goes on. */
START_TEST(strangers_and_used_or_old_tokens_are_refused_and_the_refit_goes_on)
{
    struct cluster c;
    uint64_t requests[2];
    uint8_t noise[200] = {7, 7, 7};
    plain_cluster(&c, 1, 1, "Replicate", 1024);
    cluster_foreach(&c, r)
    {
        r->o.hello.network_bytes_per_s = 2e6;
    }
    cluster_open(&c);
    refit(&c, 1, WIRE_VERIFY_OFF);
    struct tcp_hello old = {.protocol = TCP_PROTOCOL,
                            .model = RIG_MODEL,
                            .epoch = 1,
                            .attempt = c.n[0].attempt,
                            .from = 0,
                            .to = 1};
    memcpy(old.token, c.token[0][1], sizeof(old.token));
    new_version(&c, 2);
    prepare_all(&c, WIRE_VERIFY_FULL, NULL);
    start_all(&c, requests);
    try_hello(&c, old); /* of an older attempt */
    struct tcp_hello now = old;
    now.attempt++;
    try_hello(&c, now); /* the older attempt's token */
    memcpy(now.token, c.token[0][1], sizeof(now.token));
    now.to = 0;
    try_hello(&c, now);                /* the right token for another pair of devices */
    int look = dial(c.n[1].data_port); /* without a word: as the coordinator's, no stranger */
    close(look);
    int scanner = dial(c.n[1].data_port), garbage = dial(c.n[1].data_port);
    ck_assert_int_eq(send(scanner, noise, 1, MSG_NOSIGNAL), 1);
    close(scanner);
    ck_assert_int_eq(send(garbage, noise, sizeof(noise), MSG_NOSIGNAL), (ssize_t)sizeof(noise));
    wait_closed(garbage);
    finish_all(&c, requests, true);
    ck_assert_uint_eq(wrong_at(&c, 2), 0);
    ck_assert_uint_eq(rig_stats(&c.n[1]).refused, 5);
    ck_assert_uint_eq(rig_stats(&c.n[0]).refused, 0);
    cluster_close(&c);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(an_address_that_is_not_there_or_a_port_in_use_is_refused_by_name)                            \
    X(a_fixed_port_and_an_ipv6_address_are_listened_at)                                            \
    X(nodes_may_prepare_in_any_order)                                                              \
    X(a_peer_that_never_prepares_fails_at_the_deadline_by_name)                                    \
    X(a_peer_that_does_not_listen_fails_at_the_deadline_by_name)                                   \
    X(a_wrong_token_is_refused_and_counted_and_an_aborted_prepare_ends_at_once)                    \
    X(peers_that_make_no_sense_are_refused)                                                        \
    X(strangers_and_used_or_old_tokens_are_refused_and_the_refit_goes_on)
#include "test/lib/main.h"
