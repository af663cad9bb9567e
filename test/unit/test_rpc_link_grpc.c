/* The asynchronous link over gRPC: whom it finds and when, peers that say nothing, and one that dies. Its contract:
 * test_rpc_link.c. */
#include "test/lib/best_of.h"
#include "test/lib/link_twins.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define T "/test.v1.Twins/"

START_TEST(bad_options_are_named)
{
    static const struct {
        const char *target, *token, *part;
    } bad[] = {{"", NULL, "ADDRESS:PORT"},
               {"192.0.2.1", NULL, "ADDRESS:PORT"},
               {"192.0.2.1:0", NULL, "ADDRESS:PORT"},
               {"2001:db8::1:7000", NULL, "two ways"},
               {"[2001:db8::1]:65536", NULL, "65536"},
               {"host.example:x", NULL, "ADDRESS:PORT"},
               {"under score!:1", NULL, "ADDRESS:PORT"},
               {"unix:", NULL, "socket path"},
               {"dns:///host.example:1", NULL, ""},
               {"unix:/tmp/x", "new\nline", "token"}};
    struct linked p;
    linked_init(&p, false);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct err e = {0};
        struct rpc_link_options o = {.target = bad[i].target, .token = bad[i].token};
        ck_assert_int_eq(rpc_link_open(&p.loop, &o, &link_events, &p, &p.link, &e), RS_EINVAL);
        ck_assert_msg(strstr(e.text, bad[i].part) != NULL, "'%s'", e.text);
    }
    linked_fini(&p);
}
END_TEST

START_TEST(a_link_that_finds_nobody_says_why_and_finds_who_comes)
{
    struct linked p;
    struct heard h = {0};
    linked_init(&p, false);
    linked_connect(&p);
    linked_until(&p, &p.n_down, 1);
    ck_assert_msg(strstr(p.down_text, "No such file") != NULL, "%s", p.down_text);
    call_ask(&p, &h, T "Echo", "x", 1);
    call_await_end(&h, RS_EUNAVAIL);
    ck_assert_uint_eq(p.n_up, 0);
    linked_serve(&p);
    linked_until(&p, &p.n_up, 1);
    ck_assert(rpc_link_is_up(p.link));
    linked_close(&p);
}
END_TEST

/* However long it was away: the back-off ends at 1 s, and gRPC shakes that by a fifth. */
static uint64_t comes_back(void *arg)
{
    struct linked p;
    (void)arg;
    linked_open(&p, false);
    linked_until(&p, &p.n_up, 1);
    linked_unserve(&p);
    linked_until_down(&p);
    uint64_t until = clock_mono_ns() + 2500000000ULL; /* so that the back-off has grown */
    while (clock_mono_ns() < until)
        linked_turn(&p);
    ck_assert_uint_eq(p.n_up, 1);
    linked_serve(&p);
    uint64_t served = clock_mono_ns();
    linked_until(&p, &p.n_up, 2);
    uint64_t took = clock_mono_ns() - served;
    printf("found again after %.0f ms\n", (double)took / 1e6);
    linked_close(&p);
    return took;
}

START_TEST(a_server_that_comes_back_is_found_within_two_seconds)
{
    in_time_once(comes_back, NULL, 2000000000U);
}
END_TEST

START_TEST(a_link_can_be_closed_before_its_loop_ever_ran)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, false); /* the server would accept in its loop, which is the same */
    call_ask(&p, &h, T "Echo", "x", 1);
    linked_disconnect(&p);
    ck_assert_int_eq(h.code, RS_ECANCELED);
    linked_fini(&p);
}
END_TEST

START_TEST(a_message_beyond_the_limit_ends_the_call)
{
    struct linked p;
    struct heard h = {0}, small = {0};
    static char big[60000];
    linked_init(&p, false);
    p.options.max_message_bytes = 50000;
    linked_serve(&p);
    linked_connect(&p);
    call_ask(&p, &h, T "Echo", big, sizeof big);
    call_ask(&p, &small, T "Echo", big, 50000);
    call_await_end(&h, RS_EEXHAUSTED);
    ck_assert_uint_eq(h.n_messages, 0);
    call_await_end(&small, 0);
    ck_assert_uint_eq(small.n_bytes, 50000);
    linked_close(&p);
}
END_TEST

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define N_MANY 1000
#else
#define N_MANY 10000
#endif

START_TEST(ten_thousand_calls_at_once_all_end)
{
    struct linked p;
    struct heard *h = calloc(N_MANY, sizeof *h);
    linked_init(&p, false);
    linked_serve(&p);
    linked_connect(&p);
    uint64_t begun = clock_mono_ns();
    for (unsigned i = 0; i < N_MANY; i++)
        call_ask(&p, &h[i], T "Echo", &i, sizeof i);
    for (unsigned i = 0; i < N_MANY; i++) {
        call_await_end(&h[i], 0);
        ck_assert_uint_eq(h[i].sum, i);
    }
    printf("%d calls at once: %.0f ms\n", N_MANY, (double)(clock_mono_ns() - begun) / 1e6);
    linked_close(&p);
    free(h);
}
END_TEST

/* A listener that takes a connection, and then says these bytes, or nothing, and never reads. */
static int mute_listener(uint16_t *ret_port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0);
    ck_assert_int_eq(listen(fd, 8), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *ret_port = ntohs(a.sin_port);
    return fd;
}

/* Settings that say nothing: as far as HTTP/2 goes the peer is there. */
static const uint8_t settings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};

static void open_to_mute(struct linked *p, uint16_t port, uint32_t connect_timeout_ms)
{
    linked_init(p, false);
    (void)snprintf(p->target, sizeof p->target, "127.0.0.1:%u", port);
    p->options.keepalive_ms = 300;
    p->options.keepalive_timeout_ms = 300;
    p->options.connect_timeout_ms = connect_timeout_ms;
    linked_connect(p);
}

static uint64_t never_reads(void *arg)
{
    struct linked p;
    struct heard h = {0};
    static char block[16384];
    uint16_t port = 0;
    int fd = mute_listener(&port), r = 0;
    (void)arg;
    open_to_mute(&p, port, PATIENT_MS);
    call_open(&p, &h, T "Sum", 0);
    int peer = accept(fd, NULL, NULL);
    ck_assert_int_eq(send(peer, settings, sizeof settings, 0), (ssize_t)sizeof settings);
    linked_until(&p, &p.n_up, 1);
    uint64_t up = clock_mono_ns();
    for (int i = 0; i < 4096 && r == 0; i++) /* 64 MiB, beyond the queue's 16 */
        r = call_send(&h, block, sizeof block);
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_uint_le(rpc_link_call_queued_bytes(h.call), 16U << 20);
    call_await_end(&h, RS_EUNAVAIL);
    linked_until(&p, &p.n_down, 1);
    uint64_t took = clock_mono_ns() - up;
    (void)close(peer);
    (void)close(fd);
    linked_close(&p);
    return took;
}

START_TEST(a_peer_that_never_reads_pushes_back_and_is_dropped)
{
    in_time_once(never_reads, NULL, 3000000000U);
}
END_TEST

START_TEST(garbage_for_a_server_is_a_reason_and_no_harm)
{
    struct linked p;
    struct heard h = {0};
    uint16_t port = 0;
    int fd = mute_listener(&port);
    open_to_mute(&p, port, PATIENT_MS);
    call_ask(&p, &h, T "Echo", "x", 1);
    int peer = accept(fd, NULL, NULL);
    ck_assert_int_gt(send(peer, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, 0), 0);
    call_await_end(&h, RS_EUNAVAIL);
    linked_until(&p, &p.n_down, 1);
    (void)close(peer);
    (void)close(fd);
    linked_close(&p);
}
END_TEST

static uint64_t says_nothing(void *arg)
{
    struct linked p;
    struct heard h = {0};
    uint16_t port = 0;
    int fd = mute_listener(&port);
    uint64_t begun = clock_mono_ns();
    (void)arg;
    open_to_mute(&p, port, 500);
    call_ask(&p, &h, T "Echo", "x", 1);
    call_await_end(&h, RS_EUNAVAIL);
    uint64_t took = clock_mono_ns() - begun;
    (void)close(fd);
    linked_close(&p);
    return took;
}

START_TEST(a_server_that_says_nothing_is_given_up)
{
    in_time_once(says_nothing, NULL, 3000000000U);
}
END_TEST

/* --- a peer that stops without a word --------------------------------------------------------- */

static void stop_loop(uv_signal_t *signal, int number)
{
    (void)number;
    uv_stop(signal->loop);
}

/* A server in a process of its own. */
static void serve_until_killed(const char *path, int ready)
{
    struct service v = {0};
    uv_loop_t loop;
    uv_signal_t term;
    struct rpc_server *s = NULL;
    struct rpc_server_options o = {.unix_path = path, .context = &v};
    seen_init(&v.seen);
    if (uv_loop_init(&loop) != 0 || uv_signal_init(&loop, &term) != 0 ||
        uv_signal_start(&term, stop_loop, SIGTERM) != 0 ||
        rpc_server_start(&loop, &o, methods, N_METHODS, &s, NULL) != 0)
        _exit(1);
    (void)!write(ready, "r", 1);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    _exit(0);
}

struct mortal {
    struct linked p;
    pid_t child;
};

/* SIGSTOP keeps the connection and answers nothing, as a cut link does. */
static uint64_t dies_and_comes_back(void *arg)
{
    struct mortal *m = arg;
    struct linked *p = &m->p;
    struct heard watch = {0}, echo_call = {0}, again = {0};
    unsigned n_up = p->n_up;
    call_ask(p, &watch, T "Watch", "x", 1);
    call_ask(p, &echo_call, T "Echo", "x", 1);
    call_await_end(&echo_call, 0);
    ck_assert_int_eq(kill(m->child, SIGSTOP), 0);
    uint64_t stopped = clock_mono_ns();
    call_await_end(&watch, RS_EUNAVAIL);
    linked_until_down(p);
    uint64_t took = clock_mono_ns() - stopped;
    printf("dead peer noticed after %.0f ms\n", (double)took / 1e6);
    ck_assert_int_eq(kill(m->child, SIGCONT), 0);
    linked_until(p, &p->n_up, n_up + 1);
    call_ask(p, &again, T "Echo", "x", 1);
    call_await_end(&again, 0);
    return took;
}

/* 1 s to the ping, 2 s for its answer, and a slow machine. */
START_TEST(a_dead_peer_shows_within_three_seconds_and_is_found_again)
{
    struct mortal m;
    struct linked *p = &m.p;
    int ready[2];
    char byte;
    linked_init(p, false);
    p->options.keepalive_timeout_ms = p->options.connect_timeout_ms = 0; /* the defaults */
    ck_assert_int_eq(pipe(ready), 0);
    m.child = fork(); /* before gRPC starts here */
    if (m.child == 0)
        serve_until_killed(p->path, ready[1]);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    linked_connect(p);
    linked_until(p, &p->n_up, 1);
    in_time_once(dies_and_comes_back, &m, 3500000000U);
    ck_assert_int_eq(kill(m.child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(m.child, NULL, 0), m.child);
    linked_until_down(p);
    linked_disconnect(p);
    (void)unlink(p->path);
    linked_fini(p);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(bad_options_are_named)                                                                       \
    X(a_link_that_finds_nobody_says_why_and_finds_who_comes)                                       \
    X(a_server_that_comes_back_is_found_within_two_seconds)                                        \
    X(a_link_can_be_closed_before_its_loop_ever_ran)                                               \
    X(a_message_beyond_the_limit_ends_the_call)                                                    \
    X(ten_thousand_calls_at_once_all_end)                                                          \
    X(a_peer_that_never_reads_pushes_back_and_is_dropped)                                          \
    X(garbage_for_a_server_is_a_reason_and_no_harm)                                                \
    X(a_server_that_says_nothing_is_given_up)                                                      \
    X(a_dead_peer_shows_within_three_seconds_and_is_found_again)

#include "test/lib/main.h"
