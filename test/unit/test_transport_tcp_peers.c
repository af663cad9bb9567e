/* What a peer over TCP that misbehaves does to a group: the other side is played by the test, byte by byte. */
#include "test/lib/best_of.h"
#include "test/lib/tcp_peer.h"

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
    int fd = bind_at(&port);
    with_played_peer(&p, port);
    submit(&p, 0, &w, &send, 1);
    ck_assert_int_eq(waited_status(&w), RS_EPEER);
    ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1"));
    ck_assert_ptr_nonnull(strstr(w.err.text, "refused"));
    close(fd);
    plane_close(&p);
}
END_TEST

static uint64_t reads_nothing(void *arg)
{
    struct transport_message send = {NULL, *(size_t *)arg, 1, true, true, 0, NULL, 0};
    uint8_t *data = calloc(1, send.bytes);
    struct plane p;
    struct waited w;
    uint16_t port;
    int listener = listen_at(&port);
    send.data = data;
    with_played_peer_within(&p, port, SILENCE_MS);
    uint64_t began = clock_mono_ns();
    submit(&p, 0, &w, &send, 1);
    ck_assert_int_eq(waited_status(&w), RS_EDEADLINE);
    uint64_t took = clock_mono_ns() - began;
    ck_assert_ptr_nonnull(strstr(w.err.text, "device 1 at 127.0.0.1"));
    ck_assert_uint_ge(took, SILENCE_MS * UINT64_C(1000000));
    plane_close(&p);
    free(data);
    close(listener);
    return took;
}

/* As a stopped process: its kernel takes connection and bytes, and nobody reads them. */
START_TEST(a_peer_that_reads_nothing_is_past_its_deadline)
{
    size_t sizes[2] = {1, 64 << 20}; /* fits into the socket's buffer, does not */
    for (int i = 0; i < 2; i++)
        in_time_once(reads_nothing, &sizes[i], 8 * SILENCE_MS * UINT64_C(1000000));
}
END_TEST

/* It has said hello and sent a part, and then nothing. */
START_TEST(a_peer_that_falls_silent_in_a_message_is_past_its_deadline)
{
    struct plane p;
    uint8_t landed[4096];
    struct transport_message receive = {landed, sizeof(landed), 1, false, true, 0, NULL, 0};
    struct waited w;
    with_played_peer_within(&p, 1, SILENCE_MS);
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
    X(an_old_attempts_chunk_is_drained_and_counted_and_never_lands)                                \
    X(more_or_fewer_bytes_than_planned_fail_both_groups)                                           \
    X(frames_that_are_none_fail_the_group)                                                         \
    X(a_peer_that_dies_in_the_middle_of_a_message_fails_the_group)                                 \
    X(a_peer_that_dies_ahead_of_its_receives_fails_the_group_at_once)                              \
    X(a_peer_that_does_not_listen_fails_the_sender_at_once)                                        \
    X(a_peer_that_reads_nothing_is_past_its_deadline)                                              \
    X(a_peer_that_falls_silent_in_a_message_is_past_its_deadline)                                  \
    X(headers_of_random_bytes_are_refused_and_good_ones_come_back)

#include "test/lib/main.h"
