/* Who is let in at a data plane's TCP port, and what strangers and crowds cost those who belong there. */
#include <sys/resource.h>
#include <time.h>

#include "test/lib/best_of.h"
#include "test/lib/tcp_peer.h"

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

static uint64_t cpu_in_a_while(void *w)
{
    double before = cpu_ms();
    ck_assert(!waited_within(w, 200));
    return (uint64_t)((cpu_ms() - before) * 1e6);
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
    in_time_once(cpu_in_a_while, &w, 50000000);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    struct tcp_frame f = data_frame(1, 0, 8);
    say_frame(fd, &f, "8 bytes!", 8);
    ck_assert_int_eq(waited_status(&w), 0);
    close(fd);
    plane_close(&p);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(strangers_are_refused_and_counted_and_the_attempt_goes_on)                                   \
    X(half_open_connections_do_not_keep_others_out)                                                \
    X(without_descriptors_it_waits_without_spinning_and_then_lets_in)

#include "test/lib/main.h"
