/* What only the gRPC side has: stop, sizes, keepalive, killed clients, descriptors, trailers, the
 * blocking client's own promises. */
#include "test/lib/rpc_twins.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <grpc/byte_buffer.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include "base/mailbox.h"
#include "base/random.h"

#define T "/test.v1.Twins/"

static void open_grpc(struct twin *t)
{
    twin_open(t, false);
}

static uint64_t now_ms(void)
{
    return clock_mono_ns() / 1000000;
}

static void echo_works(struct twin *t)
{
    void *reply = NULL;
    size_t n = 0;
    struct err e = {0};
    int r = rpc_call_unary(t->channel, T "Echo", "ping", 4, WAIT_MS, &reply, &n, &e);
    ck_assert_msg(r == 0, "echo: %s", err_text(&e, r));
    ck_assert_uint_eq(n, 4);
    ck_assert_int_eq(memcmp(reply, "ping", 4), 0);
    mem_free(reply);
}

static void get_n_calls(void *arg)
{
    struct twin *t = ((void **)arg)[0];
    *(uint32_t *)((void **)arg)[1] = rpc_server_n_calls(t->server);
}

static uint32_t n_calls(struct twin *t)
{
    uint32_t n = 0;
    void *args[2] = {t, &n};
    twin_run(t, get_n_calls, args);
    return n;
}

/* An answer may be read before the server has seen its call's end: waits for that. */
static void expect_no_calls(struct twin *t)
{
    uint64_t until = now_ms() + WAIT_MS;
    while (n_calls(t) != 0 && now_ms() < until)
        ;
    ck_assert_uint_eq(n_calls(t), 0);
}

/* What a stop leaves on purpose. */
static void remove_lock(const char *path)
{
    char lock[128];
    (void)snprintf(lock, sizeof lock, "%s.lock", path);
    ck_assert_int_eq(unlink(lock), 0);
}

/* --- stop ------------------------------------------------------------------------------------- */

static void short_stop(void *arg)
{
    struct twin *t = arg;
    rpc_server_stop(t->server, 200, on_stopped, t);
    rpc_server_stop(t->server, 0, on_stopped, t); /* the second signal changes nothing */
}

/* Five long polls that nobody answers, a unary call, a stream. */
START_TEST(a_stop_cuts_off_at_its_grace_what_does_not_end)
{
    struct twin t;
    struct peer poll[5];
    struct err e = {0};
    open_grpc(&t);
    for (int i = 0; i < 5; i++)
        poll[i] = peer_ask(&t, T "Hold", "x", 1, 0);
    struct peer stream = peer_open(&t, T "Sum", 0);
    peer_send(&stream, "x", 1);
    ck_assert(seen_wait(&t, &t.service.seen.n_messages, 6));
    uint64_t before = now_ms();
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
    ck_assert_uint_ge(now_ms() - before, 190);
    ck_assert_uint_lt(now_ms() - before, 4000);
    ck_assert_uint_eq(t.n_done, 1);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_ended), 6);
    ck_assert_int_eq(uv_loop_close(&t.loop), 0);
    rpc_channel_close(t.channel);
    remove_lock(t.path);
    ck_assert_int_eq(rmdir(t.directory), 0);
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

/* --- the blocking client ---------------------------------------------------------------------- */

START_TEST(nobody_there_is_unavailable_at_once)
{
    struct rpc_channel *c = NULL;
    void *reply;
    size_t n;
    struct err e = {0};
    ck_assert_int_eq(rpc_channel_open("unix:/tmp/rs-nobody-is-here", NULL, &c, NULL), 0);
    uint64_t before = now_ms();
    ck_assert_int_eq(rpc_call_unary(c, T "Echo", "x", 1, WAIT_MS, &reply, &n, &e), RS_EUNAVAIL);
    ck_assert_uint_lt(now_ms() - before, 2000);
    rpc_channel_close(c);
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

/* --- over the wire, without our client -------------------------------------------------------- */

struct raw {
    grpc_status_code status;
    char text[128];
    char details[64];
    size_t n_details;
};

/* An unary call by C core alone. */
static struct raw raw_call(struct twin *t, const char *method, const void *data, size_t n_bytes,
                           int compression)
{
    char target[256];
    struct raw r = {0};
    (void)snprintf(target, sizeof target, "unix:%s/a%%20b.sock", t->directory);
    grpc_arg arg = {.type = GRPC_ARG_INTEGER,
                    .key = (char *)(uintptr_t)GRPC_COMPRESSION_CHANNEL_DEFAULT_ALGORITHM};
    arg.value.integer = compression;
    grpc_channel_args args = {1, &arg};
    grpc_channel_credentials *creds = grpc_insecure_credentials_create();
    grpc_channel *c = grpc_channel_create(target, creds, &args);
    grpc_completion_queue *cq = grpc_completion_queue_create_for_pluck(NULL);
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_REALTIME);
    grpc_call *call =
        grpc_channel_create_call(c, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                 grpc_slice_from_copied_string(method), NULL, never, NULL);
    grpc_slice slice = grpc_slice_from_copied_buffer(data, n_bytes), text = grpc_empty_slice();
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1), *reply = NULL;
    grpc_metadata_array initial, trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    grpc_op ops[6] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA},  {.op = GRPC_OP_SEND_MESSAGE},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}, {.op = GRPC_OP_RECV_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_MESSAGE},           {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    ops[1].data.send_message.send_message = request;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &initial;
    ops[4].data.recv_message.recv_message = &reply;
    ops[5].data.recv_status_on_client.trailing_metadata = &trailing;
    ops[5].data.recv_status_on_client.status = &r.status;
    ops[5].data.recv_status_on_client.status_details = &text;
    ck_assert_int_eq(grpc_call_start_batch(call, ops, 6, &r, NULL), GRPC_CALL_OK);
    (void)grpc_completion_queue_pluck(cq, &r, never, NULL);
    (void)snprintf(r.text, sizeof r.text, "%.*s", (int)GRPC_SLICE_LENGTH(text),
                   (const char *)GRPC_SLICE_START_PTR(text));
    for (size_t i = 0; i < trailing.count; i++)
        if (grpc_slice_str_cmp(trailing.metadata[i].key, "grpc-status-details-bin") == 0) {
            r.n_details = GRPC_SLICE_LENGTH(trailing.metadata[i].value);
            ck_assert_uint_lt(r.n_details, sizeof r.details);
            memcpy(r.details, GRPC_SLICE_START_PTR(trailing.metadata[i].value), r.n_details);
        }
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_byte_buffer_destroy(request);
    if (reply != NULL)
        grpc_byte_buffer_destroy(reply);
    grpc_slice_unref(slice);
    grpc_slice_unref(text);
    grpc_call_unref(call);
    grpc_channel_credentials_release(creds);
    grpc_completion_queue_shutdown(cq);
    (void)grpc_completion_queue_pluck(cq, NULL, never, NULL);
    grpc_completion_queue_destroy(cq);
    grpc_channel_destroy(c);
    return r;
}

START_TEST(status_details_travel_in_their_trailer)
{
    struct twin t;
    open_grpc(&t);
    struct raw r = raw_call(&t, T "Fail", "\x08\x09\x12\x02\x00\xff", 6, 0);
    ck_assert_int_eq(r.status, GRPC_STATUS_FAILED_PRECONDITION);
    ck_assert_uint_eq(r.n_details, 6);
    ck_assert_int_eq(memcmp(r.details, "\x08\x09\x12\x02\x00\xff", 6), 0);
    r = raw_call(&t, T "Echo", "x", 1, 0);
    ck_assert_int_eq(r.status, GRPC_STATUS_OK);
    ck_assert_uint_eq(r.n_details, 0);
    twin_close(&t);
}
END_TEST

START_TEST(compressed_messages_are_not_taken)
{
    struct twin t;
    static char zeros[60000];
    open_grpc(&t);
    struct raw r = raw_call(&t, T "Echo", zeros, sizeof zeros, GRPC_COMPRESS_GZIP);
    ck_assert_int_eq(r.status, GRPC_STATUS_UNIMPLEMENTED);
    echo_works(&t);
    expect_no_calls(&t);
    twin_close(&t);
}
END_TEST

static int connect_raw(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

START_TEST(random_bytes_and_half_preambles_hurt_nobody)
{
    static const char preamble[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    struct twin t;
    uint64_t seed = 7;
    open_grpc(&t);
    for (int i = 0; i < 100; i++) {
        uint8_t noise[512];
        int fd = connect_raw(t.path);
        ck_assert_int_ge(fd, 0);
        for (size_t k = 0; k < sizeof noise; k++)
            noise[k] = (uint8_t)random_next(&seed);
        if (i % 2 == 0)
            (void)!send(fd, preamble, sizeof preamble - 1, MSG_NOSIGNAL);
        (void)!send(fd, noise, random_next(&seed) % sizeof noise, MSG_NOSIGNAL);
        (void)close(fd);
    }
    echo_works(&t);
    expect_no_calls(&t);
    twin_close(&t);
}
END_TEST

/* --- keepalive -------------------------------------------------------------------------------- */

/* An HTTP/2 client of a dozen lines that pings. */
static int pinger_open(const char *path)
{
    static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                                "\0\0\0\4\0\0\0\0\0"; /* empty SETTINGS */
    int fd = connect_raw(path);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(send(fd, hello, sizeof hello - 1, MSG_NOSIGNAL), sizeof hello - 1);
    return fd;
}

static void pinger_ping(int fd)
{
    static const char ping[17] = {0,   0,   8,   6,   0,   0,   0,   0,  0,
                                  'p', 'i', 'n', 'g', 'p', 'i', 'n', 'g'};
    (void)!send(fd, ping, sizeof ping, MSG_NOSIGNAL);
}

/* Reads what is there, up to `ms` from now; true where a GOAWAY or the end was among it. Answers
 * the server's pings. */
static bool pinger_is_gone(int fd, uint64_t ms)
{
    uint64_t until = now_ms() + ms;
    for (uint64_t now = now_ms(); now < until; now = now_ms()) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        uint8_t frame[9 + 16384];
        if (poll(&p, 1, (int)(until - now)) <= 0)
            continue;
        if (recv(fd, frame, 9, MSG_WAITALL) != 9)
            return true;
        size_t n = (size_t)frame[0] << 16 | (size_t)frame[1] << 8 | frame[2];
        ck_assert_uint_le(n, 16384);
        if (n > 0 && recv(fd, frame + 9, n, MSG_WAITALL) != (ssize_t)n)
            return true;
        if (frame[3] == 7)
            return true;
        if (frame[3] == 6 && (frame[4] & 1) == 0) {
            frame[4] = 1;
            (void)!send(fd, frame, 9 + n, MSG_NOSIGNAL);
        }
    }
    return false;
}

START_TEST(an_eager_pinger_is_cut_off_and_an_agreed_one_is_not)
{
    struct twin t;
    open_grpc(&t);
    struct peer watch = peer_open(&t, T "Chat", 0);
    int eager = pinger_open(t.path), agreed = pinger_open(t.path);
    bool eager_gone = false;
    for (int i = 0; i < 24; i++) { /* 2.4 s, beyond the client's keepalive of 1 s */
        if (!eager_gone)
            pinger_ping(eager);
        if (i % 10 == 0)
            pinger_ping(agreed);
        eager_gone = eager_gone || pinger_is_gone(eager, 50);
        ck_assert(!pinger_is_gone(agreed, 50));
    }
    ck_assert(eager_gone);
    peer_send(&watch, "x", 1);
    expect_message(&watch, "x", 1);
    peer_close(&watch);
    (void)close(eager);
    (void)close(agreed);
    twin_close(&t);
}
END_TEST

/* A client that answers no ping is dead: its connection goes, within interval and timeout. */
START_TEST(a_silent_connection_is_closed)
{
    struct twin t;
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    o.keepalive_ms = 200;
    o.keepalive_timeout_ms = 200;
    twin_open_with(&t, false, &o, NULL);
    int fd = pinger_open(t.path);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    uint64_t until = now_ms() + 5000;
    uint8_t bytes[256];
    ssize_t n = 1;
    while (n > 0 && now_ms() < until && poll(&p, 1, 5000) == 1)
        n = recv(fd, bytes, sizeof bytes, 0); /* reads, but never answers */
    ck_assert_int_le(n, 0);
    (void)close(fd);
    twin_close(&t);
}
END_TEST

/* --- clients that go -------------------------------------------------------------------------- */

static size_t resident_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%lu %lu", &total, &resident), 2);
    (void)fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

#if defined(__SANITIZE_THREAD__)
#define N_CANCELLED                                                                                \
    200 /* of each of gRPC's accesses a report is made and suppressed: more takes minutes */
#else
#define N_CANCELLED 2000
#endif

/* Cancelled at every stage; nothing stays. */
START_TEST(thousands_of_cancelled_calls_leave_nothing)
{
    struct twin t;
    uint64_t seed = 3;
    open_grpc(&t);
    size_t before = 0;
    for (int i = 0; i < N_CANCELLED; i++) {
        if (i == N_CANCELLED / 4)
            before = resident_bytes();
        struct peer p = peer_open(&t, i % 2 == 0 ? T "Watch" : T "Sum", 0);
        unsigned stage = (unsigned)(random_next(&seed) % 4);
        if (stage > 0)
            peer_send(&p, "x", 1);
        if (stage > 1 && i % 2 == 0)
            peer_half_close(&p);
        if (stage > 2) {
            void *got = NULL;
            size_t n;
            if (rpc_stream_receive(p.grpc, 1, &got, &n, NULL) == 0)
                mem_free(got);
        }
        peer_close(&p);
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which keep freed memory */
    ck_assert_uint_lt(resident_bytes(),
                      before + (8U << 20)); /* 1,500 calls of 12 kB would be 18 MB */
#endif
    (void)before;
    echo_works(&t);
    expect_no_calls(&t);
    twin_close(&t);
    ck_assert_uint_eq(seen_count(&t, &t.service.seen.n_opened),
                      seen_count(&t, &t.service.seen.n_ended));
}
END_TEST

/* A client process: floods itself without reading and holds calls, says so, and waits to be killed.
 */
static void doomed_client(const char *path, int go, int ready)
{
    struct rpc_channel *c = NULL;
    struct rpc_stream *s = NULL;
    char target[160], byte;
    (void)!read(go, &byte, 1);
    (void)snprintf(target, sizeof target, "unix:%s", path);
    if (rpc_channel_open(target, NULL, &c, NULL) != 0)
        _exit(1);
    for (int i = 0; i < 20; i++) {
        if (rpc_stream_open(c, i == 0 ? T "Flood" : T "Watch", 0, &s, NULL) != 0 ||
            rpc_stream_send(s, "x", 1, WAIT_MS, NULL) != 0)
            _exit(1);
        (void)rpc_stream_half_close(s, NULL);
    }
    (void)!write(ready, "r", 1);
    for (;;)
        (void)pause();
}

/* Killed in the middle of being written to; no SIGPIPE, no call left. */
START_TEST(killed_clients_leave_no_call_and_no_harm)
{
    struct twin t;
    pid_t child[4];
    int go[2], ready[2];
    char byte, path[96];
    memset(&t, 0, sizeof t);
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pipe(ready), 0);
    (void)snprintf(path, sizeof path, "/tmp/rs-killed-%d", (int)getpid());
    for (int i = 0; i < 4; i++) /* before gRPC starts here */
        if ((child[i] = fork()) == 0)
            doomed_client(path, go[0], ready[1]);
    (void)close(ready[1]); /* a child that fails shows as the end of its pipe */
    seen_init(&t.service.seen);
    (void)signal(SIGPIPE, SIG_DFL);
    ck_assert_int_eq(uv_loop_init(&t.loop), 0);
    t.command.data = &t;
    ck_assert_int_eq(uv_async_init(&t.loop, &t.command, run_command), 0);
    struct rpc_server_options o = twin_options(&t);
    o.unix_path = path;
    o.max_queued_bytes = 1U << 30; /* so that floods fill the socket and wait */
    (void)pthread_mutex_init(&t.mutex, NULL);
    (void)pthread_cond_init(&t.changed, NULL);
    ck_assert_int_eq(rpc_server_start(&t.loop, &o, methods, N_METHODS, &t.server, NULL), 0);
    ck_assert_int_eq(pthread_create(&t.thread, NULL, run_loop, &t), 0);
    ck_assert_int_eq(write(go[1], "gggg", 4), 4);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    ck_assert(seen_wait(&t, &t.service.seen.n_messages, 4 * 19));
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(kill(child[i], SIGKILL), 0);
        ck_assert_int_eq(waitpid(child[i], NULL, 0), child[i]);
    }
    ck_assert(seen_wait(&t, &t.service.seen.n_ended, 4 * 20));
    expect_no_calls(&t);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
}
END_TEST

/* Holds a stream, and for five of the server's keepalive times does nothing that has to do with it. */
static void idle_client(const char *path, int go)
{
    struct rpc_channel *c = NULL;
    struct rpc_stream *s = NULL;
    char target[160], byte;
    void *got = NULL;
    size_t n;
    (void)!read(go, &byte, 1);
    (void)snprintf(target, sizeof target, "unix:%s", path);
    if (rpc_channel_open(target, NULL, &c, NULL) != 0 ||
        rpc_stream_open(c, T "Chat", 0, &s, NULL) != 0 ||
        rpc_stream_send(s, "x", 1, WAIT_MS, NULL) != 0)
        _exit(1);
    (void)poll(NULL, 0, 2500); /* the claim is about doing nothing for a while */
    if (rpc_stream_receive(s, WAIT_MS, &got, &n, NULL) != 0 ||
        rpc_stream_receive(s, 0, &got, &n, NULL) != RS_EDEADLINE)
        _exit(2);
    rpc_stream_close(s);
    rpc_channel_close(c);
    _exit(0);
}

START_TEST(an_idle_program_keeps_its_streams)
{
    struct twin t;
    pid_t child;
    int go[2], status = 0;
    char path[96];
    ck_assert_int_eq(pipe(go), 0);
    (void)snprintf(path, sizeof path, "/tmp/rs-idle-%d", (int)getpid());
    if ((child = fork()) ==
        0) /* before gRPC starts here; in a process of its own, where only its threads read */
        idle_client(path, go[0]);
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    (void)pthread_mutex_init(&t.mutex, NULL);
    (void)pthread_cond_init(&t.changed, NULL);
    ck_assert_int_eq(uv_loop_init(&t.loop), 0);
    t.command.data = &t;
    ck_assert_int_eq(uv_async_init(&t.loop, &t.command, run_command), 0);
    struct rpc_server_options o = twin_options(&t);
    o.unix_path = path;
    o.keepalive_ms = 500;
    o.keepalive_timeout_ms = 500;
    ck_assert_int_eq(rpc_server_start(&t.loop, &o, methods, N_METHODS, &t.server, NULL), 0);
    ck_assert_int_eq(pthread_create(&t.thread, NULL, run_loop, &t), 0);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
}
END_TEST

/* --- descriptors ------------------------------------------------------------------------------ */

/* Opens n connections, says so, waits, closes them, says so. */
static void crowd(const char *path, int go, int ready, int n)
{
    int fd[128];
    char byte;
    (void)!read(go, &byte, 1);
    for (int i = 0; i < n; i++)
        fd[i] = connect_raw(path);
    (void)!write(ready, "r", 1);
    (void)!read(go, &byte, 1);
    for (int i = 0; i < n; i++)
        (void)close(fd[i]);
    (void)!write(ready, "r", 1);
    _exit(0);
}

static uint64_t cpu_ms(void)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 +
           (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
}

START_TEST(a_crowd_beyond_the_descriptors_costs_no_cpu_and_leaves_no_harm)
{
    struct twin t;
    struct rlimit limit = {64, 64};
    int go[2], ready[2];
    char byte;
    pid_t child;
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pipe(ready), 0);
    char directory[] = "/tmp/rs-crowd-XXXXXX", path[64];
    ck_assert_ptr_nonnull(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/s", directory);
    if ((child = fork()) == 0)
        crowd(path, go[0], ready[1], 100);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    (void)pthread_mutex_init(&t.mutex, NULL);
    (void)pthread_cond_init(&t.changed, NULL);
    ck_assert_int_eq(uv_loop_init(&t.loop), 0);
    t.command.data = &t;
    ck_assert_int_eq(uv_async_init(&t.loop, &t.command, run_command), 0);
    o.unix_path = path;
    ck_assert_int_eq(rpc_server_start(&t.loop, &o, methods, N_METHODS, &t.server, NULL), 0);
    ck_assert_int_eq(pthread_create(&t.thread, NULL, run_loop, &t), 0);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    int spare[8], n_spare = 0; /* the ledger and others still find descriptors */
    while (n_spare < 8 && (spare[n_spare] = dup(0)) >= 0)
        n_spare++;
    ck_assert_int_eq(n_spare, 8);
    while (n_spare > 0)
        (void)close(spare[--n_spare]);
    uint64_t before = cpu_ms();
    (void)poll(NULL, 0, 1000); /* a span to measure over, nothing is awaited */
    ck_assert_uint_lt(cpu_ms() - before, 100);
    ck_assert_int_eq(write(go[1], "g", 1), 1);
    ck_assert_int_eq(read(ready[0], &byte, 1), 1);
    uint64_t closed = now_ms();
    char target[96];
    void *reply = NULL;
    size_t n;
    int r = RS_EUNAVAIL;
    (void)snprintf(target, sizeof target, "unix:%s", path);
    while (r == RS_EUNAVAIL && now_ms() - closed < 5000) { /* a new channel has no back-off */
        struct rpc_channel *c = NULL;
        ck_assert_int_eq(rpc_channel_open(target, NULL, &c, NULL), 0);
        r = rpc_call_unary(c, T "Echo", "x", 1, WAIT_MS, &reply, &n, NULL);
        rpc_channel_close(c);
    }
    ck_assert_int_eq(r, 0);
    ck_assert_uint_lt(now_ms() - closed, 2000);
    mem_free(reply);
    twin_stop(&t);
    twin_await_stop(&t);
    remove_lock(path);
    ck_assert_int_eq(rmdir(directory), 0);
    (void)waitpid(child, NULL, 0);
}
END_TEST

/* --- posting to the loop ---------------------------------------------------------------------- */

#define N_POSTERS 4
#define N_POSTS   25000

struct posted {
    struct mailbox_item item;
    struct posts *posts;
};

struct posts {
    struct mailbox mailbox;
    uv_async_t async;
    unsigned n_seen, n_accepted[N_POSTERS], shut_after;
    struct posted *items[N_POSTERS];
};

static void count_post(struct mailbox_item *item)
{
    struct posts *p = container_of(item, struct posted, item)->posts;
    if (++p->n_seen == p->shut_after && !uv_is_closing((uv_handle_t *)&p->async)) {
        mailbox_shut(&p->mailbox);
        uv_close((uv_handle_t *)&p->async, NULL);
    }
}

static void wake_posts(void *arg)
{
    (void)uv_async_send(&((struct posts *)arg)->async);
}

static void drain_posts(uv_async_t *async)
{
    (void)mailbox_drain(&((struct posts *)async->data)->mailbox);
}

struct poster {
    struct posts *posts;
    int index;
};

static void *post_all(void *arg)
{
    struct poster *me = arg;
    for (int i = 0; i < N_POSTS; i++) {
        struct posted *item = &me->posts->items[me->index][i];
        me->posts->n_accepted[me->index] += mailbox_post(&me->posts->mailbox, &item->item);
    }
    return NULL;
}

static void post_from_threads(unsigned shut_after)
{
    struct posts p = {.shut_after = shut_after};
    struct poster poster[N_POSTERS];
    pthread_t thread[N_POSTERS];
    uv_loop_t loop;
    unsigned n_accepted = 0;
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(uv_async_init(&loop, &p.async, drain_posts), 0);
    p.async.data = &p;
    mailbox_init(&p.mailbox, wake_posts, &p);
    for (int i = 0; i < N_POSTERS; i++) {
        p.items[i] = calloc(N_POSTS, sizeof *p.items[i]);
        for (int k = 0; k < N_POSTS; k++)
            p.items[i][k] = (struct posted){.item = {.fn = count_post}, .posts = &p};
        poster[i] = (struct poster){&p, i};
        ck_assert_int_eq(pthread_create(&thread[i], NULL, post_all, &poster[i]), 0);
    }
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    for (int i = 0; i < N_POSTERS; i++) {
        (void)pthread_join(thread[i], NULL);
        n_accepted += p.n_accepted[i];
    }
    (void)mailbox_drain(&p.mailbox); /* what was posted before the shut is still there */
    ck_assert_uint_eq(p.n_seen, n_accepted);
    ck_assert_uint_ge(p.n_seen, shut_after);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    mailbox_close(&p.mailbox);
    for (int i = 0; i < N_POSTERS; i++)
        free(p.items[i]);
}

START_TEST(every_post_of_every_thread_arrives)
{
    post_from_threads(N_POSTERS * N_POSTS);
}
END_TEST

START_TEST(posts_that_race_with_the_close_are_refused_or_arrive)
{
    post_from_threads(N_POSTS);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_stop_cuts_off_at_its_grace_what_does_not_end)                                              \
    X(a_server_can_be_stopped_before_its_loop_ever_ran)                                            \
    X(a_stop_leaves_the_loop_s_other_handles_alone)                                                \
    X(a_start_that_fails_says_why_and_leaves_nothing)                                              \
    X(every_failed_allocation_of_a_start_is_an_error_and_leaves_nothing)                           \
    X(every_failed_allocation_of_a_call_is_an_answer)                                              \
    X(sizes_around_four_mebibytes)                                                                 \
    X(nobody_there_is_unavailable_at_once)                                                         \
    X(bad_targets_and_tokens_are_refused)                                                          \
    X(a_receive_that_times_out_can_be_repeated)                                                    \
    X(messages_after_the_half_close_are_refused)                                                   \
    X(another_thread_may_cancel_a_receiver)                                                        \
    X(one_channel_serves_many_threads)                                                             \
    X(tcp_serves_too_and_a_channel_finds_a_restarted_daemon)                                       \
    X(status_details_travel_in_their_trailer)                                                      \
    X(compressed_messages_are_not_taken)                                                           \
    X(random_bytes_and_half_preambles_hurt_nobody)                                                 \
    X(an_eager_pinger_is_cut_off_and_an_agreed_one_is_not)                                         \
    X(a_silent_connection_is_closed)                                                               \
    X(an_idle_program_keeps_its_streams)                                                           \
    X(thousands_of_cancelled_calls_leave_nothing)                                                  \
    X(killed_clients_leave_no_call_and_no_harm)                                                    \
    X(a_crowd_beyond_the_descriptors_costs_no_cpu_and_leaves_no_harm)                              \
    X(every_post_of_every_thread_arrives)                                                          \
    X(posts_that_race_with_the_close_are_refused_or_arrive)

#include "test/lib/main.h"
