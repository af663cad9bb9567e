/* The contract of rpc.h, once over gRPC and once over the in-memory twin. */
#include "test/lib/rpc_twins.h"

#include "test/lib/health_fds.h"

#define T "/test.v1.Twins/"

/* Each claim becomes two tests. */
#define BOTH(name)                                                                                 \
    static void name(struct twin *t);                                                              \
    START_TEST(name##_over_grpc)                                                                   \
    {                                                                                              \
        struct twin t;                                                                             \
        twin_open(&t, false);                                                                      \
        name(&t);                                                                                  \
        twin_close(&t);                                                                            \
    }                                                                                              \
    END_TEST                                                                                       \
    START_TEST(name##_in_memory)                                                                   \
    {                                                                                              \
        struct twin t;                                                                             \
        twin_open(&t, true);                                                                       \
        name(&t);                                                                                  \
        twin_close(&t);                                                                            \
    }                                                                                              \
    END_TEST                                                                                       \
    static void name(struct twin *t)

BOTH(unary_gives_one_reply_and_ends_well)
{
    struct err e = {0};
    struct peer p = peer_ask(t, T "Echo", "hello", 5, 0);
    expect_message(&p, "hello", 5);
    expect_end(&p, 0, &e);
    peer_close(&p);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    ck_assert_int_eq(last_reason(t), 0);
    ck_assert_int_eq(seen_result(t, &t->service.seen.late_send), RS_ECANCELED);
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_opened), 1);
}

BOTH(an_empty_message_is_a_message)
{
    struct err e = {0};
    struct peer p = peer_ask(t, T "Echo", "", 0, 0);
    expect_message(&p, "", 0);
    expect_end(&p, 0, &e);
    peer_close(&p);
}

BOTH(server_stream_arrives_whole_and_in_order)
{
    struct err e = {0};
    unsigned n = 1000;
    struct peer p = peer_ask(t, T "Count", &n, sizeof n, 0);
    for (unsigned i = 0; i < n; i++)
        expect_message(&p, &i, sizeof i);
    expect_end(&p, 0, &e);
    expect_end(&p, 0, &e); /* asking again tells the same */
    peer_close(&p);
}

BOTH(client_stream_is_summed_at_its_half_close)
{
    struct err e = {0};
    struct peer p = peer_open(t, T "Sum", 0);
    uint8_t bytes[100];
    uint64_t total = 0;
    for (unsigned i = 0; i < 100; i++) {
        memset(bytes, (int)i, sizeof bytes);
        peer_send(&p, bytes, sizeof bytes);
        total += 100ULL * i;
    }
    ck_assert(seen_wait(t, &t->service.seen.n_messages, 100));
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_half_closed), 0);
    peer_half_close(&p);
    expect_message(&p, &total, sizeof total);
    expect_end(&p, 0, &e);
    peer_close(&p);
}

BOTH(bidi_answers_each_message_before_the_next)
{
    struct err e = {0};
    struct peer p = peer_open(t, T "Chat", 0);
    for (unsigned i = 0; i < 50; i++) {
        peer_send(&p, &i, sizeof i);
        expect_message(&p, &i, sizeof i);
    }
    peer_half_close(&p);
    expect_end(&p, 0, &e);
    peer_close(&p);
}

BOTH(an_unknown_method_is_unimplemented_at_once)
{
    struct err e = {0};
    struct peer p = peer_ask(t, T "Nothing", "x", 1, 0);
    expect_end(&p, RS_EUNIMPL, &e);
    peer_close(&p);
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_opened), 0);
}

BOTH(a_unary_call_without_a_message_is_invalid)
{
    struct err e = {0};
    struct peer p = peer_open(t, T "Echo", 0);
    peer_half_close(&p);
    expect_end(&p, RS_EINVAL, &e);
    ck_assert_str_eq(e.text, "no request message");
    peer_close(&p);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
}

BOTH(a_method_s_own_size_limit_holds_to_the_byte)
{
    static char bytes[65537];
    struct err e = {0};
    struct peer p = peer_ask(t, T "Echo", bytes, 65536, 0);
    expect_message(&p, bytes, 65536);
    expect_end(&p, 0, &e);
    peer_close(&p);
    p = peer_ask(t, T "Echo", bytes, 65537, 0);
    expect_end(&p, RS_EEXHAUSTED, &e);
    ck_assert_ptr_nonnull(strstr(e.text, "65537"));
    peer_close(&p);
    p = peer_ask(t, T "Echo", "still here", 10, 0);
    expect_message(&p, "still here", 10);
    peer_close(&p);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 3));
}

BOTH(a_stream_s_oversize_message_ends_it_after_the_good_ones)
{
    static char bytes[65537];
    struct err e = {0};
    struct peer p = peer_open(t, T "Chat", 0);
    peer_send(&p, "good", 4);
    expect_message(&p, "good", 4);
    peer_send(&p, bytes, sizeof bytes);
    expect_end(&p, RS_EEXHAUSTED, &e);
    peer_close(&p);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
}

BOTH(a_cancelled_call_ends_once_and_was_never_half_closed)
{
    struct err e = {0};
    struct peer p = peer_open(t, T "Sum", 0);
    peer_send(&p, "abc", 3);
    ck_assert(seen_wait(t, &t->service.seen.n_messages, 1));
    peer_cancel(&p);
    expect_end(&p, RS_ECANCELED, &e);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    ck_assert_int_eq(last_reason(t), RS_ECANCELED);
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_half_closed), 0);
    peer_close(&p);
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_ended), 1);
}

BOTH(a_deadline_ends_the_call_on_both_sides)
{
    struct err e = {0};
    struct peer first = peer_ask(t, T "Echo", "x", 1, 0); /* a busy machine takes long to connect */
    expect_message(&first, "x", 1);
    peer_close(&first);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    struct peer p = peer_ask(t, T "Hold", "x", 1, 3000);
    ck_assert(seen_wait(t, &t->service.seen.n_messages, 1));
    peer_let_expire(&p);
    expect_end(&p, RS_EDEADLINE, &e);
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 2));
    ck_assert_int_eq(last_reason(t), RS_EDEADLINE);
    peer_close(&p);
}

BOTH(a_handler_knows_the_time_left)
{
    uint64_t asked = clock_mono_ns();
    struct peer with = peer_ask(t, T "TimeLeft", "x", 1, 20000);
    struct peer without = peer_ask(t, T "TimeLeft", "x", 1, 0);
    uint64_t never = UINT64_MAX;
    void *got = NULL;
    size_t n;
    ck_assert_int_eq(peer_receive(&with, &got, &n, NULL), 0);
    ck_assert_uint_eq(n, sizeof never);
    uint64_t left;
    memcpy(&left, got, sizeof left);
    ck_assert_uint_ge(left + (clock_mono_ns() - asked), 20000000000U);
    ck_assert_uint_lt(left, 20500000000U); /* the wire rounds up */
    mem_free(got);
    expect_message(&without, &never, sizeof never);
    peer_close(&with);
    peer_close(&without);
}

BOTH(a_reader_that_does_not_read_is_cut_off)
{
    struct err e = {0};
    struct peer p = peer_ask(t, T "Flood", "x", 1, 0);
    void *got = NULL;
    size_t n;
    int r;
    if (!t->in_memory) /* the flood is the loop's: it has ended once the next call is answered */
        ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    ck_assert_int_eq(seen_result(t, &t->service.seen.flood_result), RS_EEXHAUSTED);
    ck_assert_uint_ge(seen_count(t, &t->service.seen.n_flooded), 1024);
    ck_assert_uint_le(seen_count(t, &t->service.seen.n_flooded),
                      1024 + 1024); /* the queue, and what the network holds */
    while ((r = peer_receive(&p, &got, &n, &e)) == 0)
        mem_free(got);
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(e.text, "too slow"));
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    ck_assert_int_eq(last_reason(t), RS_EPEER);
    peer_close(&p);
}

BOTH(status_text_keeps_its_utf8)
{
    struct err e = {0};
    struct peer p = peer_ask(t, T "Fail", "\x08\x01", 2, 0);
    expect_end(&p, RS_EPRECOND, &e);
    ck_assert_str_eq(e.text, "tensor 'w': gr\xc3\xb6\xc3\x9f"
                             "e");
    peer_close(&p);
}

BOTH(on_open_may_refuse_and_hears_no_message)
{
    struct err e = {0};
    struct peer p = peer_open(t, T "Refuse", 0);
    peer_send(&p, "x", 1);
    expect_end(&p, RS_EPERM, &e);
    ck_assert_str_eq(e.text, "not you");
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 1));
    ck_assert_uint_eq(seen_count(t, &t->service.seen.n_messages), 0);
    peer_close(&p);
}

BOTH(an_anonymous_caller_is_told_apart)
{
    struct peer p = peer_ask(t, T "Who", "x", 1, 0);
    expect_message(&p, "0 0 0 0", 7);
    peer_close(&p);
}

BOTH(many_calls_are_open_at_once)
{
    struct peer p[40];
    struct err e = {0};
    for (unsigned i = 0; i < 40; i++)
        p[i] = peer_ask(t, T "Hold", "x", 1, 0);
    ck_assert(seen_wait(t, &t->service.seen.n_messages, 40));
    twin_run(t, release_held, &t->service);
    for (unsigned i = 0; i < 40; i++) {
        expect_message(&p[i], "late", 4);
        expect_end(&p[i], 0, &e);
        peer_close(&p[i]);
    }
    ck_assert(seen_wait(t, &t->service.seen.n_ended, 40));
}

BOTH(a_stop_ends_streams_and_lets_unary_calls_finish)
{
    struct err e = {0};
    struct peer health = peer_ask(t, "/grpc.health.v1.Health/Watch", "", 0, 0);
    struct peer stream = peer_open(t, T "Chat", 0);
    struct peer watch = peer_ask(t, T "Watch", "x", 1, 0);
    struct peer unary = peer_ask(t, T "Hold", "x", 1, 0);
    ck_assert(seen_wait(t, &t->service.seen.n_messages, 2));
    peer_send(&stream, "x", 1);
    expect_message(&stream, "x", 1);
    expect_message(&health, "\x08\x01", 2);
    twin_stop(t);
    twin_stop(t); /* the second is ignored */
    expect_message(&health, "\x08\x02", 2);
    expect_end(&health, RS_EUNAVAIL, &e);
    expect_end(&stream, RS_EUNAVAIL, &e);
    ck_assert_str_eq(e.text, "the daemon stops");
    expect_end(&watch, RS_EUNAVAIL, &e);
    twin_run(t, release_held, &t->service);
    expect_message(&unary, "late", 4);
    expect_end(&unary, 0, &e);
    struct peer late = peer_ask(t, T "Echo", "x", 1, WAIT_MS);
    expect_end(&late, RS_EUNAVAIL, &e);
    peer_close(&late);
    peer_close(&health);
    peer_close(&stream);
    peer_close(&watch);
    peer_close(&unary);
}

BOTH(health_knows_the_services_of_the_table)
{
    struct err e = {0};
    struct peer p = peer_ask(t, "/grpc.health.v1.Health/Check", "", 0, 0);
    expect_message(&p, "\x08\x01", 2);
    expect_end(&p, 0, &e);
    peer_close(&p);
    p = peer_ask(t, "/grpc.health.v1.Health/Check", "\x0a\x0dtest.v1.Twins", 15, 0);
    expect_message(&p, "\x08\x01", 2);
    peer_close(&p);
    p = peer_ask(t, "/grpc.health.v1.Health/Check", "\x0a\x0ctest.v1.Twin", 14, 0);
    expect_end(&p, RS_ENOTFOUND, &e);
    peer_close(&p);
    p = peer_ask(t, "/grpc.health.v1.Health/Watch", "\x0a\x01z", 3, 0);
    expect_message(&p, "\x08\x03", 2);
    peer_cancel(&p);
    peer_close(&p);
    p = peer_ask(t, "/grpc.health.v1.Health/Check", "\x0a\x7f", 2, 0);
    expect_end(&p, RS_EINVAL, &e);
    peer_close(&p);
}

/* --- reflection: expected bytes are protoc's descriptor and reflection.proto's public numbers - */

static void open_with_reflection(struct twin *t, bool in_memory)
{
    memset(t, 0, sizeof *t);
    seen_init(&t->service.seen);
    struct rpc_server_options o = twin_options(t);
    o.descriptor_set = health_fds;
    o.descriptor_set_bytes = sizeof health_fds;
    twin_open_with(t, in_memory, &o, NULL);
}

static bool contains(const uint8_t *data, size_t n, const void *part, size_t n_part)
{
    return memmem(data, n, part, n_part) != NULL;
}

/* Asks one question; the answer must echo it and hold `part`. */
static void reflect(struct peer *p, const char *ask, size_t n_ask, const void *part, size_t n_part)
{
    void *got = NULL;
    size_t n = 0;
    uint8_t echo[64] = {0x12, (uint8_t)n_ask}; /* original_request = 2 */
    memcpy(echo + 2, ask, n_ask);
    peer_send(p, ask, n_ask);
    ck_assert_int_eq(peer_receive(p, &got, &n, NULL), 0);
    ck_assert(contains(got, n, echo, n_ask + 2));
    ck_assert(contains(got, n, part, n_part));
    mem_free(got);
}

static void reflection(bool in_memory)
{
    struct twin t;
    struct err e = {0};
    /* The set holds one file, field 1, whose length takes two bytes. */
    const uint8_t *file = health_fds + 3;
    size_t n_file = sizeof health_fds - 3;
    open_with_reflection(&t, in_memory);
    struct peer p =
        peer_open(&t, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", 0);
    reflect(&p, "\x3a\x00", 2, "\x0a\x0dtest.v1.Twins", 15);
    reflect(&p, "\x3a\x00", 2, "\x0a\x15grpc.health.v1.Health", 23);
    reflect(&p, "\x1a\x0chealth.proto", 14, file, n_file);
    reflect(&p, "\x22\x15grpc.health.v1.Health", 23, file, n_file);
    reflect(&p, "\x22\x1bgrpc.health.v1.Health.Check", 29, file, n_file);
    reflect(&p, "\x22\x21grpc.health.v1.HealthCheckRequest", 35, file, n_file);
    reflect(&p, "\x22\x30grpc.health.v1.HealthCheckResponse.ServingStatus", 50, file, n_file);
    reflect(&p, "\x22\x1bgrpc.health.v1.Health.Chec!", 29, "\x08\x05", 2);
    reflect(&p, "\x22\x0egrpc.health.v1", 16, "\x08\x05", 2);
    reflect(&p, "\x1a\x0bother.proto", 13, "\x08\x05", 2);
    peer_half_close(&p);
    expect_end(&p, 0, &e);
    peer_close(&p);
    twin_close(&t);
}

START_TEST(reflection_finds_files_and_symbols_over_grpc)
{
    reflection(false);
}
END_TEST

START_TEST(reflection_finds_files_and_symbols_in_memory)
{
    reflection(true);
}
END_TEST

START_TEST(a_damaged_descriptor_set_is_refused_at_start)
{
    struct rpc_server_options o = {.descriptor_set = health_fds,
                                   .descriptor_set_bytes = sizeof health_fds - 1};
    struct rpc_mem *m = NULL;
    struct err e = {0};
    ck_assert_int_eq(rpc_mem_new(&o, methods, N_METHODS, &m, &e), RS_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "descriptor set"));
}
END_TEST

/* --- identity --------------------------------------------------------------------------------- */

static void expect_who(const char *token, const char *expected)
{
    struct twin t;
    memset(&t, 0, sizeof t);
    seen_init(&t.service.seen);
    struct rpc_server_options o = twin_options(&t);
    void *reply = NULL;
    size_t n;
    twin_open_with(&t, false, &o, token);
    ck_assert_int_eq(rpc_call_unary(t.channel, T "Who", "x", 1, WAIT_MS, &reply, &n, NULL), 0);
    ck_assert_uint_eq(n, strlen(expected));
    ck_assert_int_eq(memcmp(reply, expected, n), 0);
    mem_free(reply);
    twin_close(&t);
}

START_TEST(a_known_token_is_its_client_over_grpc)
{
    expect_who("token-of-7", "1 7 1000 4242");
}
END_TEST

START_TEST(an_unknown_token_is_anonymous_over_grpc)
{
    expect_who("token-of-8", "0 0 0 0");
}
END_TEST

START_TEST(tokens_count_in_memory_too)
{
    struct twin t;
    twin_open(&t, true);
    struct peer p = {.t = &t, .mem = rpc_mem_open(t.mem, T "Who", "token-of-7", UINT64_MAX)};
    peer_send(&p, "x", 1);
    peer_half_close(&p);
    expect_message(&p, "1 7 1000 4242", 13);
    peer_close(&p);
    twin_close(&t);
}
END_TEST

/* --- memory: every allocation of the twin and of a call may fail ------------------------------ */

/* One round of everything; what fails must fail cleanly, and on_open and on_end must pair. */
static void one_round(struct rpc_mem *m)
{
    static const char *const paths[] = {
        T "Echo", T "Sum", T "Fail", "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct rpc_mem_call *c = rpc_mem_open(m, paths[i], NULL, UINT64_MAX);
        void *got = NULL;
        size_t n;
        if (c == NULL)
            continue;
        rpc_mem_send(c, "\x3a\x00", i == 1 ? 0 : 2);
        rpc_mem_half_close(c);
        if (rpc_mem_receive(c, &got, &n, NULL) == 0)
            mem_free(got);
        rpc_mem_close(c);
    }
}

START_TEST(every_failed_allocation_is_an_error_and_nothing_leaks)
{
    for (long i = 1;; i++) {
        struct service v = {0};
        seen_init(&v.seen);
        struct rpc_server_options o = {
            .context = &v, .descriptor_set = health_fds, .descriptor_set_bytes = sizeof health_fds};
        struct rpc_mem *m = NULL;
        mem_fail_at(i);
        int r = rpc_mem_new(&o, methods, N_METHODS, &m, NULL);
        if (r == 0)
            one_round(m);
        int struck = mem_failed();
        mem_fail_at(0);
        if (r == 0)
            ck_assert_uint_eq(rpc_mem_n_calls(m), 0);
        else
            ck_assert_int_eq(r, RS_ENOMEM);
        if (r == 0)
            rpc_mem_free(m);
        ck_assert_uint_eq(v.seen.n_opened, v.seen.n_ended);
        if (!struck) {
            ck_assert_int_gt(i, 10);
            break;
        }
    }
}
END_TEST

#define PAIR(X, name) X(name##_over_grpc) X(name##_in_memory)
#define TESTS(X)                                                                                   \
    PAIR(X, unary_gives_one_reply_and_ends_well)                                                   \
    PAIR(X, an_empty_message_is_a_message)                                                         \
    PAIR(X, server_stream_arrives_whole_and_in_order)                                              \
    PAIR(X, client_stream_is_summed_at_its_half_close)                                             \
    PAIR(X, bidi_answers_each_message_before_the_next)                                             \
    PAIR(X, an_unknown_method_is_unimplemented_at_once)                                            \
    PAIR(X, a_unary_call_without_a_message_is_invalid)                                             \
    PAIR(X, a_method_s_own_size_limit_holds_to_the_byte)                                           \
    PAIR(X, a_stream_s_oversize_message_ends_it_after_the_good_ones)                               \
    PAIR(X, a_cancelled_call_ends_once_and_was_never_half_closed)                                  \
    PAIR(X, a_deadline_ends_the_call_on_both_sides)                                                \
    PAIR(X, a_handler_knows_the_time_left)                                                         \
    PAIR(X, a_reader_that_does_not_read_is_cut_off)                                                \
    PAIR(X, status_text_keeps_its_utf8)                                                            \
    PAIR(X, on_open_may_refuse_and_hears_no_message)                                               \
    PAIR(X, an_anonymous_caller_is_told_apart)                                                     \
    PAIR(X, many_calls_are_open_at_once)                                                           \
    PAIR(X, a_stop_ends_streams_and_lets_unary_calls_finish)                                       \
    PAIR(X, health_knows_the_services_of_the_table)                                                \
    PAIR(X, reflection_finds_files_and_symbols)                                                    \
    X(a_damaged_descriptor_set_is_refused_at_start)                                                \
    X(a_known_token_is_its_client_over_grpc)                                                       \
    X(an_unknown_token_is_anonymous_over_grpc)                                                     \
    X(tokens_count_in_memory_too)                                                                  \
    X(every_failed_allocation_is_an_error_and_nothing_leaks)

#include "test/lib/main.h"
