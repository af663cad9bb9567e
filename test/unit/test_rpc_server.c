/* What only the gRPC side has: how a server starts and stops, failing memory, and sizes. */
#include "test/lib/best_of.h"
#include "test/lib/rpc_grpc_twin.h"

/* --- stop ------------------------------------------------------------------------------------- */

static void short_stop(void *arg)
{
    struct twin *t = arg;
    rpc_server_stop(t->server, 200, on_stopped, t);
    rpc_server_stop(t->server, 0, on_stopped, t); /* the second signal changes nothing */
}

/* Five long polls that nobody answers, a unary call, a stream. */
static uint64_t cut_off(void *arg)
{
    struct twin t;
    struct peer poll[5];
    struct err e = {0};
    (void)arg;
    open_grpc(&t);
    for (int i = 0; i < 5; i++)
        poll[i] = peer_ask(&t, T "Hold", "x", 1, 0);
    struct peer stream = peer_open(&t, T "Sum", 0);
    peer_send(&stream, "x", 1);
    ck_assert(seen_wait(&t, &t.service.seen.n_messages, 6));
    uint64_t before = clock_mono_ns();
    twin_run(&t, short_stop, &t);
    for (int i = 0; i < 5; i++) {
        void *got = NULL;
        size_t n;
        int r = peer_receive(&poll[i], &got, &n, &e);
        ck_assert_msg(r == RS_ECANCELED || r == RS_EUNAVAIL, "%d %s", r, err_text(&e, r));
        peer_close(&poll[i]);
    }
    expect_end(&stream, RS_EUNAVAIL, &e);
    peer_close(&stream);
    (void)pthread_join(t.thread, NULL);
    uint64_t took = clock_mono_ns() - before;
    ck_assert_uint_ge(took, 190000000);
    ck_assert_uint_eq(t.n_done, 1);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_ended), 6);
    ck_assert_int_eq(uv_loop_close(&t.loop), 0);
    rpc_channel_close(t.channel);
    remove_lock(t.path);
    ck_assert_int_eq(rmdir(t.directory), 0);
    return took;
}

START_TEST(a_stop_cuts_off_at_its_grace_what_does_not_end)
{
    in_time_once(cut_off, NULL, 4000000000U);
}
END_TEST

static void close_now(void *arg)
{
    *(bool *)arg = true;
}

START_TEST(a_server_can_be_stopped_before_its_loop_ever_ran)
{
    char directory[] = "/tmp/rs-rpc-XXXXXX", path[64];
    struct service v = {0};
    uv_loop_t loop;
    struct rpc_server *s = NULL;
    bool done = false;
    ck_assert_ptr_nonnull(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/s", directory);
    struct rpc_server_options o = {.unix_path = path, .tcp_address = "127.0.0.1:0", .context = &v};
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(rpc_server_start(&loop, &o, methods, N_METHODS, &s, NULL), 0);
    ck_assert_uint_ne(rpc_server_port(s), 0);
    rpc_server_stop(s, 5000, close_now, &done);
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    ck_assert(done);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    ck_assert_int_ne(access(path, F_OK), 0);
    remove_lock(path);
    ck_assert_int_eq(rmdir(directory), 0);
}
END_TEST

/* Other handles of the loop are none of the server's business. */
START_TEST(a_stop_leaves_the_loop_s_other_handles_alone)
{
    struct twin t;
    uv_timer_t timer;
    uv_idle_t idle;
    uv_signal_t sig;
    open_grpc(&t);
    echo_works(&t);
    twin_stop(&t);
    (void)pthread_join(t.thread, NULL);
    ck_assert_int_eq(uv_timer_init(&t.loop, &timer), 0);
    ck_assert_int_eq(uv_idle_init(&t.loop, &idle), 0);
    ck_assert_int_eq(uv_signal_init(&t.loop, &sig), 0);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_close((uv_handle_t *)&idle, NULL);
    uv_close((uv_handle_t *)&sig, NULL);
    ck_assert_int_eq(uv_run(&t.loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&t.loop), 0);
    rpc_channel_close(t.channel);
    remove_lock(t.path);
    ck_assert_int_eq(rmdir(t.directory), 0);
}
END_TEST

/* --- start ------------------------------------------------------------------------------------ */

START_TEST(a_start_that_fails_says_why_and_leaves_nothing)
{
    struct twin t;
    uv_loop_t loop;
    struct rpc_server *s = NULL;
    struct err e = {0};
    open_grpc(&t);
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    struct rpc_server_options o = {.unix_path = t.path};
    ck_assert_int_eq(rpc_server_start(&loop, &o, methods, N_METHODS, &s, &e), RS_EEXIST);
    ck_assert_ptr_nonnull(strstr(e.text, "another daemon holds"));
    o = (struct rpc_server_options){.tcp_address = "0.0.0.0:0"};
    ck_assert_int_eq(rpc_server_start(&loop, &o, methods, N_METHODS, &s, &e), RS_EINVAL);
    o = (struct rpc_server_options){0};
    ck_assert_int_eq(rpc_server_start(&loop, &o, methods, N_METHODS, &s, &e), RS_EINVAL);
    struct rpc_method twice[2] = {methods[0], methods[0]};
    o = (struct rpc_server_options){.tcp_address = "127.0.0.1:0"};
    ck_assert_int_eq(rpc_server_start(&loop, &o, twice, 2, &s, &e), RS_EINVAL);
    ck_assert_ptr_null(s);
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    echo_works(&t); /* the first daemon never noticed */
    twin_close(&t);
}
END_TEST

START_TEST(every_failed_allocation_of_a_start_is_an_error_and_leaves_nothing)
{
    for (long i = 1;; i++) {
        struct service v = {0};
        uv_loop_t loop;
        struct rpc_server *s = NULL;
        bool done = false;
        struct rpc_server_options o = {.tcp_address = "127.0.0.1:0", .context = &v};
        ck_assert_int_eq(uv_loop_init(&loop), 0);
        mem_fail_at(i);
        int r = rpc_server_start(&loop, &o, methods, N_METHODS, &s, NULL);
        int struck = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (r == 0)
            rpc_server_stop(s, 0, close_now, &done);
        ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
        ck_assert_int_eq(uv_loop_close(&loop), 0);
        ck_assert_int_eq(done, r == 0);
        if (!struck) {
            ck_assert_int_ge(i, 3);
            break;
        }
    }
}
END_TEST

START_TEST(every_failed_allocation_of_a_call_is_an_answer)
{
    struct twin t;
    unsigned n_failed = 0;
    open_grpc(&t);
    echo_works(&t);
    for (long i = 1; i < 14; i++) {
        void *reply = NULL;
        size_t n;
        mem_fail_at(i);
        int r = rpc_call_unary(t.channel, T "Echo", "ping", 4, WAIT_MS, &reply, &n, NULL);
        mem_fail_at(0);
        ck_assert_msg(r == 0 || r == RS_ENOMEM || r == RS_EEXHAUSTED, "%d", r);
        n_failed += r != 0;
        if (r == 0)
            mem_free(reply);
    }
    ck_assert_uint_ge(n_failed, 4);
    echo_works(&t);
    twin_close(&t);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_opened),
                      seen_count(&t, &t.service.seen.n_ended));
}
END_TEST

/* --- sizes ------------------------------------------------------------------------------------ */

/* With the greatest limit of the table, where gRPC itself is the one that refuses. */
START_TEST(sizes_around_four_mebibytes)
{
#if defined(__SANITIZE_THREAD__)
    return; /* each word that gRPC writes to a socket is a suppressed report: minutes for these
               sizes */
#endif
    static const size_t sizes[] = {(4U << 20) - 1, 4U << 20, (4U << 20) + 1, 64U << 20, 4U << 20};
    struct twin t;
    char *bytes = calloc(1, 64U << 20);
    open_grpc(&t);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *reply = NULL;
        size_t n = 0;
        char expected[32];
        struct err e = {0};
        int r = rpc_call_unary(t.channel, T "Size", bytes, sizes[i], WAIT_MS, &reply, &n, &e);
        if (sizes[i] > 4U << 20) {
            ck_assert_msg(r == RS_EEXHAUSTED, "%zu: %d %s", sizes[i], r, e.text);
            continue;
        }
        (void)snprintf(expected, sizeof expected, "%zu", sizes[i]);
        ck_assert_msg(r == 0, "%zu: %s", sizes[i], e.text);
        ck_assert_uint_eq(n, strlen(expected));
        ck_assert_int_eq(memcmp(reply, expected, n), 0);
        mem_free(reply);
    }
    free(bytes);
    twin_close(&t);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_stop_cuts_off_at_its_grace_what_does_not_end)                                              \
    X(a_server_can_be_stopped_before_its_loop_ever_ran)                                            \
    X(a_stop_leaves_the_loop_s_other_handles_alone)                                                \
    X(a_start_that_fails_says_why_and_leaves_nothing)                                              \
    X(every_failed_allocation_of_a_start_is_an_error_and_leaves_nothing)                           \
    X(every_failed_allocation_of_a_call_is_an_answer)                                              \
    X(sizes_around_four_mebibytes)

#include "test/lib/main.h"
