/* A port with TLS and strangers: noise, silence and crowds, which a server goes on beside. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/random.h"
#include "test/lib/best_of.h"
#include "test/lib/rpc_secure.h"

static int connect_port(uint16_t port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Turns until the server has hung up. */
static void await_hang_up(struct secure *s, int fd)
{
    char bytes[512];
    uint64_t until = clock_mono_ns() + WAIT_MS * 1000000ULL;
    ssize_t n = 1;
    while (clock_mono_ns() < until) {
        n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            break;
        linked_turn(&s->p);
    }
    ck_assert_int_le(n, 0);
    ck_assert(n == 0 || errno == ECONNRESET);
    (void)close(fd);
}

START_TEST(random_bytes_are_refused_and_counted_and_hurt_nobody)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    uint64_t seed = 11;
    enum { N = 40 };
    int fd[N];
    secure_open(&s, false);
    for (int i = 0; i < N; i++) {
        uint8_t bytes[2048];
        for (size_t k = 0; k < sizeof bytes; k++)
            bytes[k] = (uint8_t)random_next(&seed);
        if (i % 2 == 0) /* looks like a ClientHello at first */
            memcpy(bytes, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
        fd[i] = connect_port(s.port);
        (void)!send(fd[i], bytes, 1 + random_next(&seed) % sizeof bytes, MSG_NOSIGNAL);
    }
    for (int i = 0; i < N; i++)
        await_hang_up(&s, fd[i]);
    await_refused(&s, N);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

START_TEST(who_connects_and_says_nothing_is_hung_up_on)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    secure_open(&s, false);
    uint64_t begun = clock_mono_ns();
    await_hang_up(&s, connect_port(s.port));
    ck_assert_uint_ge(clock_mono_ns() - begun, STRANGER_MS * 900000ULL);
    await_refused(&s, 1);
    int gone = connect_port(s.port); /* or goes at once */
    (void)close(gone);
    await_refused(&s, 2);
    expect_service(&s);
    secure_close(&s);
}
END_TEST

/* Opens n connections to the port, says so, waits, closes them, says so. */
static void crowd(int go, int ready, int n)
{
    uint16_t port = 0;
    char byte;
    int fd[128];
    (void)!read(go, &port, sizeof port);
    for (int i = 0; i < n; i++)
        fd[i] = connect_port(port);
    (void)!write(ready, "r", 1);
    (void)!read(go, &byte, 1);
    for (int i = 0; i < n; i++)
        (void)close(fd[i]);
    _exit(0);
}

/* gRPC's own listener would stop accepting for good here. */
START_TEST(a_crowd_beyond_the_descriptors_is_turned_away_and_the_port_lives_on)
{
    struct secure s = {.handshake_timeout_ms = STRANGER_MS};
    struct rlimit limit = {96, 96};
    int go[2], ready[2];
    char byte;
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pipe(ready), 0);
    pid_t child = fork(); /* before gRPC starts here */
    if (child == 0)
        crowd(go[0], ready[1], 120);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    secure_open(&s, false);
    ck_assert_int_eq(write(go[1], &s.port, sizeof s.port), (ssize_t)sizeof s.port);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1); /* all are in the backlog */
    await_refused(&s, 90);
    int spare[8], n_spare = 0; /* the ledger and others still find descriptors */
    while (n_spare < 8 && (spare[n_spare] = dup(0)) >= 0)
        n_spare++;
    ck_assert_int_eq(n_spare, 8);
    while (n_spare > 0)
        (void)close(spare[--n_spare]);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    await_refused(&s, 120); /* those that were let in said nothing */
    reconnect(&s);
    linked_until(&s.p, &s.p.n_up, 1); /* the last one's place is taken until it is closed */
    expect_name(&s, "2 0 0 0 n1");
    secure_close(&s);
}
END_TEST

/* Strangers that sit there don't hold up a stop. */
static uint64_t stop_beside_strangers(void *arg)
{
    struct secure s = {0};
    int fd[5];
    (void)arg;
    secure_open(&s, false);
    for (int i = 0; i < 5; i++)
        fd[i] = connect_port(s.port);
    linked_connect(&s.p);
    expect_name(&s, "2 0 0 0 n1");
    uint64_t begun = clock_mono_ns();
    linked_unserve(&s.p);
    uint64_t took = clock_mono_ns() - begun;
    for (int i = 0; i < 5; i++)
        (void)close(fd[i]);
    secure_close(&s);
    return took;
}

START_TEST(a_stop_waits_for_no_stranger)
{
    in_time_once(stop_beside_strangers, NULL, 3000000000U);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(random_bytes_are_refused_and_counted_and_hurt_nobody)                                        \
    X(who_connects_and_says_nothing_is_hung_up_on)                                                 \
    X(a_crowd_beyond_the_descriptors_is_turned_away_and_the_port_lives_on)                         \
    X(a_stop_waits_for_no_stranger)

#include "test/lib/main.h"
