/* A gRPC server as seen over the wire, without our client: trailers, compression, noise, keepalive. */
#include <poll.h>

#include <grpc/byte_buffer.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include "base/random.h"
#include "test/lib/best_of.h"
#include "test/lib/rpc_grpc_twin.h"

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
    /* 2.4 s, beyond the client's keepalive of 1 s; and longer where the machine is so busy that pings come more slowly. */
    for (int i = 0; i < 24 || (!eager_gone && i < 200); i++) {
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

static uint64_t silent(void *arg)
{
    struct twin t;
    (void)arg;
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    o.keepalive_ms = 200;
    o.keepalive_timeout_ms = 200;
    twin_open_with(&t, false, &o, NULL);
    int fd = pinger_open(t.path);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    uint64_t before = clock_mono_ns();
    uint8_t bytes[256];
    ssize_t n = 1;
    while (n > 0 && poll(&p, 1, WAIT_MS) == 1)
        n = recv(fd, bytes, sizeof bytes, 0); /* reads, but never answers */
    ck_assert_int_le(n, 0);
    uint64_t took = clock_mono_ns() - before;
    (void)close(fd);
    twin_close(&t);
    return took;
}

/* A client that answers no ping is dead: its connection goes, within interval and timeout. */
START_TEST(a_silent_connection_is_closed)
{
    in_time_once(silent, NULL, 5000000000U);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(status_details_travel_in_their_trailer)                                                      \
    X(compressed_messages_are_not_taken)                                                           \
    X(random_bytes_and_half_preambles_hurt_nobody)                                                 \
    X(an_eager_pinger_is_cut_off_and_an_agreed_one_is_not)                                         \
    X(a_silent_connection_is_closed)

#include "test/lib/main.h"
