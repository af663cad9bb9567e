/* The blocking client's own promises, over gRPC. */
#include <signal.h>
#include <sys/wait.h>

#include "test/lib/best_of.h"
#include "test/lib/rpc_grpc_twin.h"

static uint64_t nobody_there(void *arg)
{
    struct rpc_channel *c = NULL;
    void *reply;
    size_t n;
    struct err e = {0};
    (void)arg;
    ck_assert_int_eq(rpc_channel_open("unix:/tmp/rs-nobody-is-here", NULL, &c, NULL), 0);
    uint64_t before = clock_mono_ns();
    ck_assert_int_eq(rpc_call_unary(c, T "Echo", "x", 1, WAIT_MS, &reply, &n, &e), RS_EUNAVAIL);
    uint64_t took = clock_mono_ns() - before;
    rpc_channel_close(c);
    return took;
}

START_TEST(nobody_there_is_unavailable_at_once)
{
    in_time_once(nobody_there, NULL, 2000000000U);
}
END_TEST

START_TEST(bad_targets_and_tokens_are_refused)
{
    struct rpc_channel *c = NULL;
    char target[256] = "unix:";
    memset(target + 5, 'p', 108);
    ck_assert_int_eq(rpc_channel_open(target, NULL, &c, NULL), RS_EINVAL);
    ck_assert_int_eq(rpc_channel_open("unix:", NULL, &c, NULL), RS_EINVAL);
    ck_assert_int_eq(rpc_channel_open("unix:/tmp/x", "new\nline", &c, NULL), RS_EINVAL);
    ck_assert_ptr_null(c);
}
END_TEST

START_TEST(a_receive_that_times_out_can_be_repeated)
{
    struct twin t;
    void *got = NULL;
    size_t n;
    struct err e = {0};
    open_grpc(&t);
    struct peer p = peer_ask(&t, T "Hold", "x", 1, 0);
    ck_assert(seen_wait(&t, &t.service.seen.n_messages, 1));
    ck_assert_int_eq(rpc_stream_receive(p.grpc, 0, &got, &n, &e), RS_EDEADLINE);
    ck_assert_int_eq(rpc_stream_receive(p.grpc, 50, &got, &n, &e), RS_EDEADLINE);
    twin_run(&t, release_held, &t.service);
    expect_message(&p, "late", 4);
    expect_end(&p, 0, &e);
    peer_close(&p);
    twin_close(&t);
}
END_TEST

START_TEST(messages_after_the_half_close_are_refused)
{
    struct twin t;
    struct err e = {0};
    open_grpc(&t);
    struct peer p = peer_open(&t, T "Chat", 0);
    ck_assert_int_eq(rpc_stream_send(p.grpc, "a", 1, WAIT_MS, NULL), 0);
    ck_assert_int_eq(rpc_stream_half_close(p.grpc, NULL), 0);
    ck_assert_int_eq(rpc_stream_half_close(p.grpc, NULL), 0);
    ck_assert_int_eq(rpc_stream_send(p.grpc, "b", 1, WAIT_MS, NULL), RS_EINVAL);
    expect_message(&p, "a", 1);
    expect_end(&p, 0, &e);
    peer_close(&p);
    twin_close(&t);
}
END_TEST

static void *cancel_from_aside(void *arg)
{
    rpc_stream_cancel(arg);
    return NULL;
}

START_TEST(another_thread_may_cancel_a_receiver)
{
    struct twin t;
    pthread_t thread;
    struct err e = {0};
    open_grpc(&t);
    struct peer p = peer_open(&t, T "Chat", 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, cancel_from_aside, p.grpc), 0);
    expect_end(&p, RS_ECANCELED, &e);
    (void)pthread_join(thread, NULL);
    peer_close(&p);
    twin_close(&t);
}
END_TEST

static void *many_echoes(void *arg)
{
    for (int i = 0; i < 100; i++)
        echo_works(arg);
    return NULL;
}

START_TEST(one_channel_serves_many_threads)
{
    struct twin t;
    pthread_t thread[4];
    open_grpc(&t);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, many_echoes, &t), 0);
    for (int i = 0; i < 4; i++)
        (void)pthread_join(thread[i], NULL);
    twin_close(&t);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_ended), 400);
}
END_TEST

START_TEST(tcp_serves_too_and_a_channel_finds_a_restarted_daemon)
{
    struct rpc_channel *c = NULL;
    char target[32] = "127.0.0.1:0";
    for (int start = 0; start < 2; start++) {
        struct twin t;
        void *reply = NULL;
        size_t n;
        int r = RS_EUNAVAIL;
        memset(&t, 0, sizeof t);
        seen_init(&t.service.seen);
        struct rpc_server_options o = twin_options(&t);
        o.tcp_address = target; /* the second time with the port that the first one got */
        twin_open_with(&t, false, &o, NULL);
        (void)snprintf(target, sizeof target, "127.0.0.1:%u", rpc_server_port(t.server));
        if (c == NULL)
            ck_assert_int_eq(rpc_channel_open(target, NULL, &c, NULL), 0);
        for (uint64_t until = now_ms() + 5000; r == RS_EUNAVAIL && now_ms() < until;)
            r = rpc_call_unary(c, T "Echo", "x", 1, WAIT_MS, &reply, &n, NULL);
        ck_assert_int_eq(r, 0);
        mem_free(reply);
        twin_close(&t);
    }
    rpc_channel_close(c);
}
END_TEST

/* A server in a process of its own, until it is killed. */
static void serve(const char *path, int ready)
{
    struct service v = {0};
    uv_loop_t loop;
    struct rpc_server *s = NULL;
    struct rpc_server_options o = {
        .unix_path = path, .context = &v, .keepalive_timeout_ms = PATIENT_MS};
    seen_init(&v.seen);
    if (uv_loop_init(&loop) != 0 ||
        rpc_server_start(&loop, &o, methods, N_METHODS, &s, NULL) != 0 || write(ready, "r", 1) != 1)
        _exit(1);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    _exit(1);
}

static void chat(struct rpc_stream *s, const char *word)
{
    void *got = NULL;
    size_t n = 0;
    ck_assert_int_eq(rpc_stream_send(s, word, 1, WAIT_MS, NULL), 0);
    ck_assert_int_eq(rpc_stream_receive(s, WAIT_MS, &got, &n, NULL), 0);
    ck_assert_uint_eq(n, 1);
    ck_assert_int_eq(memcmp(got, word, 1), 0);
    mem_free(got);
}

/* For longer than pings of 1 s, and 2 s for their answers, would allow. */
START_TEST(a_daemon_that_gets_no_cpu_for_a_while_keeps_its_clients)
{
    char directory[] = "/tmp/rs-rpc-XXXXXX", path[64], target[80], byte;
    struct rpc_channel *c = NULL;
    struct rpc_stream *s = NULL;
    void *got = NULL;
    size_t n = 0;
    int ready[2];
    ck_assert_ptr_nonnull(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/s", directory);
    (void)snprintf(target, sizeof target, "unix:%s", path);
    ck_assert_int_eq(pipe(ready), 0);
    pid_t child = fork(); /* before gRPC starts here */
    if (child == 0)
        serve(path, ready[1]);
    (void)close(ready[1]); /* one that fails shows as the end of its pipe */
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    ck_assert_int_eq(rpc_channel_open(target, NULL, &c, NULL), 0);
    ck_assert_int_eq(rpc_stream_open(c, T "Chat", 0, &s, NULL), 0);
    chat(s, "a");
    ck_assert_int_eq(kill(child, SIGSTOP), 0);
    ck_assert_int_eq(rpc_stream_receive(s, 6000, &got, &n, NULL), RS_EDEADLINE);
    ck_assert_int_eq(kill(child, SIGCONT), 0);
    chat(s, "b");
    rpc_stream_close(s);
    rpc_channel_close(c);
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    (void)unlink(path);
    remove_lock(path);
    ck_assert_int_eq(rmdir(directory), 0);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_daemon_that_gets_no_cpu_for_a_while_keeps_its_clients)                                     \
    X(nobody_there_is_unavailable_at_once)                                                         \
    X(bad_targets_and_tokens_are_refused)                                                          \
    X(a_receive_that_times_out_can_be_repeated)                                                    \
    X(messages_after_the_half_close_are_refused)                                                   \
    X(another_thread_may_cancel_a_receiver)                                                        \
    X(one_channel_serves_many_threads)                                                             \
    X(tcp_serves_too_and_a_channel_finds_a_restarted_daemon)

#include "test/lib/main.h"
