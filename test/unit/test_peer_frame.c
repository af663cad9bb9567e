/* Messages between daemons as bytes: every field comes back, hostile bytes are refused, memory may run out anywhere. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "test/lib/peer_random.h"

enum { LATER = 12345678 }; /* the receiver's clock against the sender's, ns */

static void same(const struct frame *a, const struct frame *b, uint64_t seed)
{
    struct buf x, y;
    buf_init(&x);
    buf_init(&y);
    say_frame(&x, a, LATER);
    say_frame(&y, b, 0);
    ck_assert_int_eq(buf_error(&x) | buf_error(&y), 0);
    buf_put_u8(&x, 0);
    buf_put_u8(&y, 0);
    ck_assert_msg(strcmp((char *)x.data, (char *)y.data) == 0,
                  "seed %" PRIu64 ":\nin:  %s\nout: %s", seed, (char *)x.data, (char *)y.data);
    buf_close(&x);
    buf_close(&y);
}

START_TEST(every_field_of_every_message_comes_back)
{
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t s = seed;
        struct pool pool = {0};
        struct frame in, out;
        struct err e = {0};
        struct buf bytes;
        bool up = rnd(&s, 2) != 0;
        rnd_frame(&s, &pool, up, &in);
        buf_init(&bytes);
        ck_assert_msg(frame_encode(&in, up, PEER_NOW, &bytes, &e) == 0, "%s", e.text);
        ck_assert_msg(frame_decode(bytes.data, bytes.n_bytes, up, PEER_NOW + LATER, &out, &e) == 0,
                      "seed %" PRIu64 ": %s", seed, e.text);
        same(&in, &out, seed);
        frame_close(&out);
        buf_close(&bytes);
        pool_free(&pool);
    }
}
END_TEST

/* --- parts ----------------------------------------------------------------------------------------- */

struct wire_log {
    struct frame_parts parts;
    struct frame out;
    unsigned n_sent;
    int last;
    struct err e;
};

static int wire_send(void *arg, const void *data, size_t n_bytes)
{
    struct wire_log *w = arg;
    ck_assert_uint_le(n_bytes, FRAME_WIRE_BYTES);
    w->n_sent++;
    w->last = frame_take(&w->parts, data, n_bytes, true, PEER_NOW + LATER, &w->out, &w->e);
    return w->last < 0 ? w->last : 0;
}

START_TEST(a_long_message_travels_in_pages_of_a_mebibyte)
{
    enum { N = 400000 };
    struct publication_print *prints = calloc(N, sizeof *prints);
    for (uint32_t i = 0; i < N; i++)
        prints[i] = (struct publication_print){i, i * UINT64_C(0x9E3779B97F4A7C15)};
    struct frame in = {.type = FRAME_REPORT};
    in.report = (struct node_report){.type = NODE_REPORT_EVENT, .model = "m"};
    in.report.event.type = REFIT_EV_PUBLISHED;
    in.report.has_prints = true;
    in.report.prints = prints;
    in.report.n_prints = N;
    struct wire_log w = {0};
    frame_parts_init(&w.parts);
    ck_assert_msg(frame_send(&in, true, PEER_NOW, wire_send, &w, &w.e) == 0, "%s", w.e.text);
    ck_assert_int_eq(w.last, 0);
    ck_assert_uint_ge(w.n_sent, 4);
    same(&in, &w.out, 0);
    frame_close(&w.out);
    frame_parts_close(&w.parts);
    free(prints);
}
END_TEST

static struct buf part_of(const void *data, size_t n_bytes, bool last)
{
    struct frame f = {.type = FRAME_PART, .part = {data, n_bytes, last}};
    struct buf b;
    struct err e = {0};
    buf_init(&b);
    ck_assert_int_eq(frame_encode(&f, true, 0, &b, &e), 0);
    return b;
}

static int take(struct frame_parts *p, struct buf *b, struct err *e)
{
    struct frame f;
    int r = frame_take(p, b->data, b->n_bytes, true, PEER_NOW, &f, e);
    if (r == 0)
        frame_close(&f);
    buf_close(b);
    return r;
}

START_TEST(parts_are_not_mixed_nested_empty_or_endless)
{
    struct frame_parts p;
    struct err e = {0};
    struct frame beat = {.type = FRAME_BEAT};
    struct buf b, inner;
    frame_parts_init(&p);
    b = part_of("xy", 2, false);
    ck_assert_int_eq(take(&p, &b, &e), 1);
    buf_init(&b);
    ck_assert_int_eq(frame_encode(&beat, true, 0, &b, &e), 0);
    ck_assert_int_eq(take(&p, &b, &e), RS_EPROTO);
    frame_parts_close(&p);
    frame_parts_init(&p);
    inner = part_of("xy", 2, true);
    b = part_of(inner.data, inner.n_bytes, true);
    buf_close(&inner);
    ck_assert_int_eq(take(&p, &b, &e), RS_EPROTO);
    b = part_of("", 0, false);
    ck_assert_int_eq(take(&p, &b, &e), RS_EPROTO);
    uint8_t *page = calloc(1, FRAME_PAGE_BYTES);
    int r = 1, n = 0;
    for (; r == 1; n++) {
        b = part_of(page, FRAME_PAGE_BYTES, false);
        r = take(&p, &b, &e);
    }
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_int_eq(n, FRAME_MAX_BYTES / FRAME_PAGE_BYTES + 1);
    frame_parts_close(&p);
    free(page);
}
END_TEST

/* --- hostile bytes --------------------------------------------------------------------------------- */

START_TEST(damaged_bytes_are_refused_or_read_and_never_crash)
{
    unsigned refused = 0;
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t s = seed;
        struct pool pool = {0};
        struct frame in, out;
        struct err e = {0};
        struct buf bytes;
        bool up = rnd(&s, 2) != 0;
        rnd_frame(&s, &pool, up, &in);
        buf_init(&bytes);
        ck_assert_int_eq(frame_encode(&in, up, PEER_NOW, &bytes, &e), 0);
        for (uint64_t i = rnd(&s, 6); bytes.n_bytes > 0 && i > 0; i--)
            bytes.data[rnd(&s, bytes.n_bytes)] = (uint8_t)random_next(&s);
        size_t n = rnd(&s, 3) == 0 ? rnd(&s, bytes.n_bytes + 1) : bytes.n_bytes;
        int r = frame_decode(bytes.data, n, up, PEER_NOW, &out, &e);
        ck_assert_msg(r == 0 || r == RS_EPROTO || r == RS_EEXHAUSTED, "%d: %s", r, e.text);
        refused += r != 0;
        if (r == 0)
            frame_close(&out);
        buf_close(&bytes);
        pool_free(&pool);
    }
    ck_assert_uint_gt(refused, 500);
}
END_TEST

/* What indexes something in the same message is in range after decoding: each case breaks one number. */
static void order_refused(void (*damage)(struct node_order *o, struct attempt_input *i))
{
    unsigned tried = 0;
    for (uint64_t seed = 1; tried < 20; seed++) {
        uint64_t s = seed;
        struct pool pool = {0};
        struct frame f = {.type = FRAME_ORDER}, out;
        struct err e = {0};
        struct buf bytes;
        rnd_order(&s, &pool, &f.order);
        if (f.order.type == NODE_ORDER_PREPARE && f.order.input->topology->n_devices > 1 &&
            f.order.input->n_participants > 0 && f.order.n_peers > 0) {
            tried++;
            damage(&f.order, (struct attempt_input *)(uintptr_t)f.order.input);
            buf_init(&bytes);
            ck_assert_int_eq(frame_encode(&f, false, PEER_NOW, &bytes, &e), 0);
            ck_assert_msg(frame_decode(bytes.data, bytes.n_bytes, false, PEER_NOW, &out, &e) ==
                              RS_EPROTO,
                          "seed %" PRIu64, seed);
            buf_close(&bytes);
        }
        pool_free(&pool);
    }
}

static void bad_device_node(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->topology->devices[0].node = i->topology->n_nodes;
}
static void bad_device_domain(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->topology->devices[1].domain = i->topology->n_domains;
}
static void bad_device_twice(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->topology->devices[1] = i->topology->devices[0];
}
static void bad_participant_layout(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    ((struct participant *)(uintptr_t)i->participants)[0].layout = i->n_destinations + 1;
}
static void bad_node_number(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    ((uint32_t *)(uintptr_t)i->nodes)[0] = NODE_MAX;
}
static void bad_rate(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->topology->network_bytes_per_s = -1;
}
static void bad_strategy(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->options.strategy = (enum plan_strategy)3;
}
static void bad_verify(struct node_order *o, struct attempt_input *i)
{
    (void)o;
    i->verify = 3;
}
static void bad_peer_address(struct node_order *o, struct attempt_input *i)
{
    (void)i;
    memcpy(((struct attempt_peer *)(uintptr_t)o->peers)[0].address, "host", 5);
}
static void bad_peer_port(struct node_order *o, struct attempt_input *i)
{
    (void)i;
    o->has_comm_id = false; /* which needs none */
    ((struct attempt_peer *)(uintptr_t)o->peers)[0].port = 0;
}
/* One rank more than fits; what is read for it here lies in the order, too. */
static void bad_excluded(struct node_order *o, struct attempt_input *i)
{
    (void)i;
    o->has_comm_id = true;
    o->shrink.n_excluded = NODE_MAX_EXCLUDED + 1;
}

START_TEST(numbers_that_point_outside_their_message_are_refused)
{
    order_refused(bad_device_node);
    order_refused(bad_device_domain);
    order_refused(bad_device_twice);
    order_refused(bad_participant_layout);
    order_refused(bad_node_number);
    order_refused(bad_rate);
    order_refused(bad_strategy);
    order_refused(bad_verify);
    order_refused(bad_peer_address);
    order_refused(bad_peer_port);
    order_refused(bad_excluded);
}
END_TEST

/* --- texts ----------------------------------------------------------------------------------------- */

START_TEST(a_text_that_is_too_long_or_no_utf8_is_cut_and_cleaned_not_refused)
{
    char *text = malloc(10000);
    memset(text, 'x', 9999);
    text[9999] = '\0';
    memcpy(text + 4093, "\xe2\x80\xa6", 3); /* would be cut within the character */
    text[7] = '\xff';
    struct frame in = {.type = FRAME_ORDER}, out;
    in.order = (struct node_order){.type = NODE_ORDER_EVICT, .model = "m", .text = text};
    struct err e = {0};
    struct buf bytes;
    buf_init(&bytes);
    ck_assert_int_eq(frame_encode(&in, false, PEER_NOW, &bytes, &e), 0);
    ck_assert_msg(frame_decode(bytes.data, bytes.n_bytes, false, PEER_NOW, &out, &e) == 0, "%s",
                  e.text);
    ck_assert_int_eq(out.order.text[7], '?');
    ck_assert_int_eq(out.order.text[8], 'x');
    ck_assert_uint_ge(strlen(out.order.text), 4090);
    frame_close(&out);
    in.order.text = NULL;
    buf_close(&bytes);
    buf_init(&bytes);
    ck_assert_int_eq(frame_encode(&in, false, PEER_NOW, &bytes, &e), 0);
    ck_assert_int_eq(frame_decode(bytes.data, bytes.n_bytes, false, PEER_NOW, &out, &e), 0);
    ck_assert_str_eq(out.order.text, "");
    frame_close(&out);
    buf_close(&bytes);
    free(text);
}
END_TEST

START_TEST(ages_and_remainders_stay_within_the_receivers_clock)
{
    struct frame in = {.type = FRAME_REPORT}, out;
    struct err e = {0};
    struct buf bytes;
    in.report = (struct node_report){.type = NODE_REPORT_EVENT, .model = "m"};
    in.report.event.type = REFIT_EV_STAGED;
    in.report.event.node.first_byte_ns = 5;            /* older than the receiver's boot */
    in.report.event.node.last_byte_ns = PEER_NOW + 77; /* not yet: taken as now */
    buf_init(&bytes);
    ck_assert_int_eq(frame_encode(&in, true, PEER_NOW, &bytes, &e), 0);
    ck_assert_int_eq(frame_decode(bytes.data, bytes.n_bytes, true, 1000, &out, &e), 0);
    ck_assert_uint_eq(out.report.event.node.first_byte_ns, 1);
    ck_assert_uint_eq(out.report.event.node.last_byte_ns, 1000);
    ck_assert_uint_eq(out.report.event.node.verified_ns, 0);
    frame_close(&out);
    buf_close(&bytes);
}
END_TEST

/* --- memory ---------------------------------------------------------------------------------------- */

START_TEST(messages_survive_the_failure_of_any_allocation)
{
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t s = seed;
        struct pool pool = {0};
        struct frame in, out;
        struct buf bytes;
        bool up = rnd(&s, 2) != 0;
        rnd_frame(&s, &pool, up, &in);
        for (long i = 1;; i++) {
            struct err e = {0};
            buf_init(&bytes);
            mem_fail_at(i);
            int r = frame_encode(&in, up, PEER_NOW, &bytes, &e);
            bool encoded = r == 0;
            if (encoded)
                r = frame_decode(bytes.data, bytes.n_bytes, up, PEER_NOW, &out, &e);
            int struck = mem_failed();
            mem_fail_at(0);
            ck_assert_msg(r == 0 || struck, "seed %" PRIu64 ": %s", seed, e.text);
            if (struck)
                ck_assert_msg(r == RS_ENOMEM || r == RS_EEXHAUSTED, "seed %" PRIu64 ": %d %s", seed,
                              r, e.text);
            if (r == 0)
                frame_close(&out);
            buf_close(&bytes);
            if (!struck)
                break;
        }
        pool_free(&pool);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_field_of_every_message_comes_back)                                                     \
    X(a_long_message_travels_in_pages_of_a_mebibyte)                                               \
    X(parts_are_not_mixed_nested_empty_or_endless)                                                 \
    X(damaged_bytes_are_refused_or_read_and_never_crash)                                           \
    X(numbers_that_point_outside_their_message_are_refused)                                        \
    X(a_text_that_is_too_long_or_no_utf8_is_cut_and_cleaned_not_refused)                           \
    X(ages_and_remainders_stay_within_the_receivers_clock)                                         \
    X(messages_survive_the_failure_of_any_allocation)

#include "test/lib/main.h"
