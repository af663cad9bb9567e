/* TCP's own, between two data planes side by side: attempts one after the other, who waits for whom, groups that make way,
 * a set rate, and how an endpoint opens. */
#include <math.h>
#include <poll.h>

#include "base/clock.h"
#include "base/mem.h"
#include "test/lib/tcp_planes.h"

START_TEST(two_data_planes_exchange_and_their_connections_serve_the_next_attempt)
{
    struct pair x;
    pair_open(&x, 0);
    for (uint64_t attempt = 1; attempt <= 3; attempt++) {
        if (attempt > 1) {
            ck_assert_int_eq(transport_begin(x.a.t, attempt, NULL), 0);
            ck_assert_int_eq(transport_begin(x.b.t, attempt, NULL), 0);
        }
        exchange(&x, attempt);
    }
    ck_assert_uint_eq(transport_tcp_node_refused(x.a.node), 0);
    ck_assert_uint_eq(transport_tcp_node_refused(x.b.node), 0);
    pair_close(&x);
}
END_TEST

/* What the faster side sends of the next attempt waits for the slower one. */
START_TEST(a_frame_of_the_next_attempt_waits_until_it_begins)
{
    struct pair x;
    struct waited ws, wr;
    uint8_t sent[1000], landed[1000] = {0};
    struct transport_message send = {sent, sizeof(sent), 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, sizeof(landed), 0, false, true, 0, NULL, 0};
    fill(sent, sizeof(sent), 3);
    pair_open(&x, 0);
    ck_assert_int_eq(transport_begin(x.a.t, 2, NULL), 0);
    submit(&x.a, 0, &ws, &send, 1);
    submit(&x.b, 2, &wr, &receive, 1); /* of attempt 1: nobody sends it anything */
    ck_assert(!waited_within(&wr, 50));
    transport_abort(x.b.t);
    ck_assert_int_eq(waited_status(&wr), RS_ECANCELED);
    ck_assert_int_eq(landed[0], 0);
    ck_assert(!waited_within(&ws, 1));
    ck_assert_int_eq(transport_begin(x.b.t, 2, NULL), 0);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    ck_assert_int_eq(memcmp(sent, landed, sizeof(sent)), 0);
    pair_close(&x);
}
END_TEST

/* The sending side is slower than any silence, but not silent. */
START_TEST(a_peer_that_is_slow_but_alive_is_waited_for)
{
    struct pair x;
    struct waited ws, wr;
    uint8_t a = 1, b = 0;
    struct transport_message send = {&a, 1, 2, true, true, 0, NULL, 0},
                             receive = {&b, 1, 0, false, true, 0, NULL, 0};
    pair_open_within(&x, 0, ALIVE_MS);
    submit(&x.a, 0, &ws, &send, 1); /* waits for device 2, which is busy elsewhere */
    ck_assert_msg(!waited_within(&ws, LONG_MS), "%s", ws.err.text);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    struct transport_message late_send = {&a, 1, 2, true, true, 0, NULL, 0};
    submit(&x.b, 2, &wr, &receive, 1); /* now the receiver waits, over a connection that is there */
    ck_assert_msg(!waited_within(&wr, LONG_MS), "%s", wr.err.text);
    submit(&x.a, 0, &ws, &late_send, 1);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(waited_status(&ws), 0);
    pair_close(&x);
}
END_TEST

/* Aborts both sides at a random moment, then asks for a clean attempt over the same connections. */
START_TEST(aborts_at_random_moments_leave_a_clean_next_attempt)
{
    enum { BYTES = 3 << 20, ROUNDS = 12, MOST_ROUNDS = 200 };
    struct pair x;
    uint64_t stale = 0, seed = 5, attempt = 1;
    uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES), *copy = malloc(BYTES);
    pair_open(&x, 300e6); /* some 10 ms a message */
    /* Until an abort has met the middle of a frame. */
    for (int round = 0; round < ROUNDS || (stale == 0 && round < MOST_ROUNDS);
         round++, attempt += 2) {
        struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
        struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
        struct waited ws, wr;
        fill(sent, BYTES, seed);
        submit(&x.a, 0, &ws, &send, 1);
        submit(&x.b, 2, &wr, &receive, 1);
        (void)poll(NULL, 0, (int)(random_next(&seed) % 10));
        transport_abort(round % 2 == 0 ? x.a.t : x.b.t);
        transport_abort(round % 2 == 0 ? x.b.t : x.a.t);
        (void)waited_status(&ws);
        (void)waited_status(&wr);
        ck_assert(transport_quiesced(x.a.t) && transport_quiesced(x.b.t));
        memcpy(copy, landed, BYTES);
        memset(sent, 0xEE, BYTES);
        ck_assert_int_eq(transport_begin(x.a.t, attempt + 1, NULL), 0);
        ck_assert_int_eq(transport_begin(x.b.t, attempt + 1, NULL), 0);
        exchange(&x, attempt);
        ck_assert_int_eq(memcmp(copy, landed, BYTES), 0);
        ck_assert_int_eq(transport_begin(x.a.t, attempt + 2, NULL), 0);
        ck_assert_int_eq(transport_begin(x.b.t, attempt + 2, NULL), 0);
        stale = 0;
        for (uint32_t d = 0; d < 4; d++)
            stale += transport_counters(d < 2 ? x.a.t : x.b.t, d).stale_frames;
    }
    ck_assert_uint_gt(stale, 0);
    pair_close(&x);
    free(sent);
    free(landed);
    free(copy);
}
END_TEST

/* How many frames were drained: none where the sender did not give up in the middle of one. */
static uint64_t give_up(void)
{
    enum { BYTES = 64 << 20, SENT = 0xEE, BEFORE = 0x5A };
    struct pair x;
    struct waited ws, wr;
    uint8_t *sent = malloc(BYTES), *landed = malloc(BYTES);
    struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
    memset(sent, SENT, BYTES);
    memset(landed, BEFORE, BYTES);
    pair_open(&x, 0);
    submit(&x.a, 0, &ws, &send, 1);
    while (transport_tcp_node_connected(x.b.node) == 0)
        (void)poll(NULL, 0, 1);
    ck_assert(!waited_within(&ws, 50)); /* the sockets are full */
    transport_abort(x.a.t);
    ck_assert_int_eq(waited_status(&ws), RS_ECANCELED);
    submit(&x.b, 2, &wr, &receive, 1);
    while (transport_counters(x.b.t, 2).network_received_bytes == 0)
        (void)poll(NULL, 0, 1);
    ck_assert(!waited_within(&wr, 200));
    transport_abort(x.b.t);
    (void)waited_status(&wr);
    ck_assert_int_eq(landed[0], SENT);
    for (size_t i = 0; i < BYTES; i++)
        if (landed[i] != SENT && landed[i] != BEFORE)
            ck_abort_msg("byte %zu is %02x", i, landed[i]);
    ck_assert_int_eq(transport_begin(x.a.t, 2, NULL), 0);
    ck_assert_int_eq(transport_begin(x.b.t, 2, NULL), 0);
    exchange(&x, 2);
    uint64_t drained = transport_counters(x.b.t, 2).stale_frames;
    pair_close(&x);
    free(sent);
    free(landed);
    return drained;
}

/* The sender gives up in the middle of a frame; its peer has not heard of that yet, and must not
 * take for content what fills the frame up. */
START_TEST(a_frame_that_was_given_up_brings_nothing_to_a_receiver_of_the_same_attempt)
{
    uint64_t drained = 0;
    for (int i = 0; i < 10 && drained == 0; i++)
        drained = give_up();
    ck_assert_uint_gt(drained, 0);
}
END_TEST

/* In the middle of a message, at the receiver or at the sender alone. */
START_TEST(no_chunk_is_read_or_sent_once_the_lease_is_over)
{
    enum { BYTES = 16 << 20 };
    for (int at_sender = 0; at_sender < 2; at_sender++) {
        struct pair x;
        struct waited ws, wr;
        uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES), *copy = malloc(BYTES);
        struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
        struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
        memset(sent, 0xEE, BYTES);
        pair_open(&x, 4e6); /* some seconds, if nobody stops it */
        submit(&x.a, 0, &ws, &send, 1);
        submit(&x.b, 2, &wr, &receive, 1);
        while (transport_counters(x.b.t, 2).network_received_bytes < 1 << 18)
            (void)poll(NULL, 0, 1);
        fence_prolong(at_sender ? &x.a.fence : &x.b.fence, 1);
        ck_assert_int_eq(waited_status(at_sender ? &ws : &wr), RS_EDEADLINE);
        if (!at_sender)
            memcpy(copy, landed, BYTES);
        fence_prolong(at_sender ? &x.a.fence : &x.b.fence, UINT64_MAX);
        ck_assert_uint_lt(transport_counters(x.a.t, 0).network_sent_bytes, BYTES);
        if (!at_sender) {
            (void)poll(NULL, 0, 20);
            ck_assert_int_eq(memcmp(copy, landed, BYTES), 0);
        }
        transport_abort(x.a.t);
        transport_abort(x.b.t);
        (void)waited_status(&ws);
        (void)waited_status(&wr);
        pair_close(&x);
        free(sent);
        free(landed);
        free(copy);
    }
}
END_TEST

/* The receive is not posted: the sender is held back, its bytes stay in the sockets, which are full
 * for longer than any silence; but the peer is alive, and says so. */
START_TEST(a_sender_is_held_back_until_its_receive_is_posted)
{
    enum { BYTES = 64 << 20 };
    struct pair x;
    struct waited ws, wr;
    uint8_t *sent = malloc(BYTES), *landed = calloc(1, BYTES);
    struct transport_message send = {sent, BYTES, 2, true, true, 0, NULL, 0};
    struct transport_message receive = {landed, BYTES, 0, false, true, 0, NULL, 0};
    fill(sent, BYTES, 8);
    pair_open_within(&x, 0, ALIVE_MS);
    submit(&x.a, 0, &ws, &send, 1);
    ck_assert_msg(!waited_within(&ws, LONG_MS), "%s", ws.err.text);
    uint64_t held = transport_counters(x.a.t, 0).network_sent_bytes;
    ck_assert_uint_lt(held, BYTES);
    submit(&x.b, 2, &wr, &receive, 1);
    ck_assert_int_eq(waited_status(&ws), 0);
    ck_assert_int_eq(waited_status(&wr), 0);
    ck_assert_int_eq(memcmp(sent, landed, BYTES), 0);
    ck_assert_uint_eq(transport_counters(x.b.t, 2).network_received_bytes, BYTES);
    pair_close(&x);
    free(sent);
    free(landed);
}
END_TEST

/* --- groups that make way --------------------------------------------------------------------- */

/* Device 0 sends to device 2, each message in a group of its own; nothing is received yet. */
enum { TRAIL_BYTES = 1000, TRAIL_MOST = 70, TRAIL_LIMIT = 64 };

struct trail {
    struct pair x;
    uint32_t n;
    uint8_t sent[TRAIL_MOST][TRAIL_BYTES], landed[TRAIL_MOST][TRAIL_BYTES];
    struct transport_message sends[TRAIL_MOST], receives[TRAIL_MOST];
    struct waited ws[TRAIL_MOST], wr;
};

static struct trail *trail_open(uint32_t n, uint32_t silence_ms)
{
    struct trail *t = calloc(1, sizeof(*t));
    t->n = n;
    pair_open_within(&t->x, 0, silence_ms);
    for (uint32_t i = 0; i < n; i++) {
        fill(t->sent[i], TRAIL_BYTES, i + 1);
        t->sends[i] =
            (struct transport_message){t->sent[i], TRAIL_BYTES, 2, true, true, i, NULL, 0};
        t->receives[i] =
            (struct transport_message){t->landed[i], TRAIL_BYTES, 0, false, true, i, NULL, 0};
        submit(&t->x.a, 0, &t->ws[i], &t->sends[i], 1);
    }
    return t;
}

static void trail_close(struct trail *t)
{
    pair_close(&t->x);
    free(t);
}

START_TEST(groups_make_way_and_the_last_one_waits_for_the_answers_to_all)
{
    struct trail *t = trail_open(3, ALIVE_MS);
    ck_assert_int_eq(waited_status(&t->ws[0]), 0);
    ck_assert_int_eq(waited_status(&t->ws[1]), 0);
    ck_assert(!waited_within(&t->ws[2], LONG_MS)); /* the peer is alive all the time */
    submit(&t->x.b, 2, &t->wr, t->receives, 3);
    ck_assert_int_eq(waited_status(&t->wr), 0);
    ck_assert_int_eq(waited_status(&t->ws[2]), 0);
    ck_assert_int_eq(memcmp(t->sent, t->landed, 3 * TRAIL_BYTES), 0);
    ck_assert_uint_eq(transport_counters(t->x.a.t, 0).messages, 3);
    trail_close(t);
}
END_TEST

START_TEST(no_more_than_so_many_groups_make_way)
{
    struct trail *t = trail_open(TRAIL_MOST, PATIENCE_MS);
    for (uint32_t i = 0; i < TRAIL_LIMIT; i++)
        ck_assert_int_eq(waited_status(&t->ws[i]), 0);
    ck_assert(!waited_within(&t->ws[TRAIL_LIMIT], SILENCE_MS));
    submit(&t->x.b, 2, &t->wr, t->receives, TRAIL_MOST);
    ck_assert_int_eq(waited_status(&t->wr), 0);
    for (uint32_t i = TRAIL_LIMIT; i < TRAIL_MOST; i++)
        ck_assert_int_eq(waited_status(&t->ws[i]), 0);
    ck_assert_int_eq(memcmp(t->sent, t->landed, sizeof(t->sent)), 0);
    trail_close(t);
}
END_TEST

START_TEST(what_is_refused_after_its_group_made_way_fails_a_later_one)
{
    struct trail *t = trail_open(3, PATIENCE_MS);
    ck_assert_int_eq(waited_status(&t->ws[0]), 0);
    t->receives[0].bytes--;
    submit(&t->x.b, 2, &t->wr, t->receives, 3);
    ck_assert_int_eq(waited_status(&t->wr), RS_EPROTO);
    ck_assert_int_eq(waited_status(&t->ws[2]), RS_EPROTO);
    trail_close(t);
}
END_TEST

START_TEST(an_abort_ends_groups_that_made_way_and_the_next_attempt_is_clean)
{
    struct trail *t = trail_open(3, PATIENCE_MS);
    ck_assert_int_eq(waited_status(&t->ws[1]), 0);
    transport_abort(t->x.a.t);
    transport_abort(t->x.b.t);
    ck_assert_int_eq(waited_status(&t->ws[2]), RS_ECANCELED);
    ck_assert(transport_quiesced(t->x.a.t));
    ck_assert_int_eq(transport_begin(t->x.a.t, 2, NULL), 0);
    ck_assert_int_eq(transport_begin(t->x.b.t, 2, NULL), 0);
    exchange(&t->x, 5);
    trail_close(t);
}
END_TEST

/* 8 MiB at 100 MiB/s: 80 ms, with one sender, and with two to one receiver 160 ms. Rate 0: as fast as it goes. */
static double paced_ms(uint32_t n_senders, double bytes_per_s)
{
    enum { BYTES = 8 << 20 };
    struct pair x;
    struct waited ws[2], wr;
    uint8_t *data = calloc(4, BYTES);
    struct transport_message send[2], receive[2];
    pair_open(&x, bytes_per_s);
    uint64_t began = clock_mono_ns();
    for (uint32_t i = 0; i < n_senders; i++) {
        send[i] = (struct transport_message){data + i * BYTES, BYTES, 2, true, true, 0, NULL, 0};
        receive[i] =
            (struct transport_message){data + (2 + i) * BYTES, BYTES, i, false, true, 0, NULL, 0};
        submit(&x.a, i, &ws[i], &send[i], 1);
    }
    submit(&x.b, 2, &wr, receive, n_senders);
    for (uint32_t i = 0; i < n_senders; i++)
        ck_assert_int_eq(waited_status(&ws[i]), 0);
    ck_assert_int_eq(waited_status(&wr), 0);
    double ms = (double)(clock_mono_ns() - began) / 1e6;
    pair_close(&x);
    free(data);
    return ms;
}

START_TEST(a_set_rate_holds_per_device_and_direction)
{
    const double rate = 100.0 * (1 << 20);
    double one = INFINITY, two = INFINITY, free = 0;
    for (int i = 0; i < 3 || (i < 10 && one >= 120 + 4 * free); i++) {
        free = fmax(free, paced_ms(1, 0)); /* what this machine, busy as it is, takes anyway */
        one = fmin(one, paced_ms(1, rate));
        two = fmin(two, paced_ms(2, rate));
    }
    ck_assert_double_ge(one, 78);
    ck_assert_double_lt(one, 120 + 4 * free);
    ck_assert_double_ge(two, 155);
}
END_TEST

/* --- opening ---------------------------------------------------------------------------------- */

START_TEST(an_address_that_is_none_is_refused)
{
    struct transport_tcp_node *node = NULL;
    struct transport_tcp_options options = {0};
    struct transport_tcp_device devices[1] = {{.address = "no.where", .port = 1}};
    struct transport *t = NULL;
    struct err e = {0};
    ck_assert_int_eq(transport_tcp_node_open("localhost", 0, &node, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "localhost"));
    ck_assert_int_lt(transport_tcp_node_open("192.0.2.1", 0, &node, &e),
                     0); /* not of this machine */
    ck_assert_int_eq(transport_tcp_node_open("127.0.0.1", 0, &node, NULL), 0);
    ck_assert_int_eq(transport_tcp_open(node, devices, 1, 1, &options, &t, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "no.where"));
    transport_tcp_node_close(node);
}
END_TEST

START_TEST(opening_without_memory_fails_and_leaves_nothing_behind)
{
    struct plane p;
    struct transport_tcp_options options = {0};
    bool struck;
    plane_listen(&p);
    plane_local(&p, 0);
    plane_local(&p, 1);
    for (long i = 1;; i++) {
        struct transport_tcp_node *node = NULL;
        mem_fail_at(i);
        int r = transport_tcp_node_open("127.0.0.1", 0, &node, NULL);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        transport_tcp_node_close(node);
        if (!struck)
            break;
    }
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = transport_tcp_open(p.node, p.table, 2, EPOCH, &options, &p.t, NULL);
        struck = mem_failed() != 0;
        mem_fail_at(0);
        ck_assert_int_eq(r, struck ? RS_ENOMEM : 0);
        if (!struck)
            break;
    }
    plane_close(&p);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(two_data_planes_exchange_and_their_connections_serve_the_next_attempt)                       \
    X(a_frame_of_the_next_attempt_waits_until_it_begins)                                           \
    X(a_peer_that_is_slow_but_alive_is_waited_for)                                                 \
    X(aborts_at_random_moments_leave_a_clean_next_attempt)                                         \
    X(no_chunk_is_read_or_sent_once_the_lease_is_over)                                             \
    X(a_frame_that_was_given_up_brings_nothing_to_a_receiver_of_the_same_attempt)                  \
    X(a_sender_is_held_back_until_its_receive_is_posted)                                           \
    X(groups_make_way_and_the_last_one_waits_for_the_answers_to_all)                               \
    X(no_more_than_so_many_groups_make_way)                                                        \
    X(what_is_refused_after_its_group_made_way_fails_a_later_one)                                  \
    X(an_abort_ends_groups_that_made_way_and_the_next_attempt_is_clean)                            \
    X(a_set_rate_holds_per_device_and_direction)                                                   \
    X(an_address_that_is_none_is_refused)                                                          \
    X(opening_without_memory_fails_and_leaves_nothing_behind)

#include "test/lib/main.h"
