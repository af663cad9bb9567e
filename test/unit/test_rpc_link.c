/* The asynchronous link: one contract, over gRPC and in memory. What only gRPC has: test_rpc_link_grpc.c. */
#include "test/lib/link_twins.h"

#define T "/test.v1.Twins/"

#define PAIR_TEST(name)                                                                            \
    static void name(bool in_memory);                                                              \
    START_TEST(name##_over_grpc)                                                                   \
    {                                                                                              \
        name(false);                                                                               \
    }                                                                                              \
    END_TEST                                                                                       \
    START_TEST(name##_in_memory)                                                                   \
    {                                                                                              \
        name(true);                                                                                \
    }                                                                                              \
    END_TEST                                                                                       \
    static void name(bool in_memory)

/* --- one call of each kind -------------------------------------------------------------------- */

PAIR_TEST(a_unary_call_gives_its_reply_and_then_its_end)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Echo", "ping", 4);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_messages, 1);
    ck_assert_str_eq(h.last, "ping");
    ck_assert_str_eq(h.text, "");
    ck_assert_uint_eq(h.n_details, 0);
    linked_until(&p, &p.n_up, 1);
    linked_close(&p);
    ck_assert_uint_eq(p.n_up, 1);
    ck_assert_uint_eq(p.n_down, 0); /* closing is no break */
}

PAIR_TEST(an_empty_message_is_a_message)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Echo", "", 0);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_messages, 1);
    ck_assert_uint_eq(h.n_bytes, 0);
    linked_close(&p);
}

PAIR_TEST(a_server_stream_arrives_whole_and_in_order)
{
    struct linked p;
    struct heard h = {0};
    unsigned n = 500;
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Count", &n, sizeof n);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_messages, 500);
    ck_assert(h.in_order);
    linked_close(&p);
}

PAIR_TEST(a_client_stream_is_summed_at_its_half_close)
{
    struct linked p;
    struct heard h = {0};
    uint64_t total;
    linked_open(&p, in_memory);
    call_open(&p, &h, T "Sum", 0);
    for (uint8_t i = 1; i <= 100; i++)
        ck_assert_int_eq(call_send(&h, &i, 1), 0);
    call_half_close(&h);
    ck_assert_int_eq(call_send(&h, "x", 1), RS_ECANCELED);
    call_half_close(&h);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_last, sizeof total);
    memcpy(&total, h.last, sizeof total);
    ck_assert_uint_eq(total, 5050);
    linked_close(&p);
}

PAIR_TEST(a_bidi_call_answers_each_message_before_the_next)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, in_memory);
    call_open(&p, &h, T "Chat", 0);
    for (unsigned i = 0; i < 20; i++) {
        ck_assert_int_eq(call_send(&h, &i, sizeof i), 0);
        linked_until(&p, &h.n_messages, i + 1);
    }
    ck_assert(h.in_order);
    ck_assert_uint_eq(h.n_end, 0);
    ck_assert_uint_eq(rpc_link_n_calls(p.link), 1);
    call_half_close(&h);
    call_await_end(&h, 0);
    ck_assert_uint_eq(rpc_link_n_calls(p.link), 0);
    linked_close(&p);
}

/* --- ends ------------------------------------------------------------------------------------- */

PAIR_TEST(code_text_and_details_of_an_end_arrive)
{
    struct linked p;
    struct heard h = {0}, u = {0}, r = {0};
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Fail", "why\0so", 6);
    call_ask(&p, &u, T "Nothing", "x", 1);
    call_ask(&p, &r, T "Refuse", "x", 1);
    call_await_end(&h, RS_EPRECOND);
    ck_assert_str_eq(h.text, "tensor 'w': gr\xc3\xb6\xc3\x9f"
                             "e");
    ck_assert_uint_eq(h.n_details, 6);
    ck_assert_int_eq(memcmp(h.details, "why\0so", 6), 0);
    call_await_end(&u, RS_EUNIMPL);
    call_await_end(&r, RS_EPERM);
    ck_assert_str_eq(r.text, "not you");
    linked_close(&p);
}

PAIR_TEST(a_cancelled_call_ends_once_and_hears_no_message)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, in_memory);
    call_open(&p, &h, T "Chat", 0);
    ck_assert_int_eq(call_send(&h, "x", 1), 0);
    linked_until(&p, &h.n_messages, 1);
    ck_assert_int_eq(call_send(&h, "y", 1), 0);
    call_cancel(&h);
    call_cancel(&h);
    ck_assert_int_eq(call_send(&h, "z", 1), RS_ECANCELED);
    ck_assert_uint_eq(h.n_end, 0);
    call_await_end(&h, RS_ECANCELED);
    ck_assert_uint_eq(h.n_messages, 1);
    linked_until(&p, &p.service.seen.n_ended, 1);
    ck_assert_int_eq(p.service.seen.last_reason, RS_ECANCELED);
    linked_close(&p);
}

PAIR_TEST(a_deadline_ends_the_call_on_both_sides)
{
    struct linked p;
    struct heard h = {0};
    linked_open(&p, in_memory);
    linked_until(&p, &p.n_up, 1); /* which takes a busy machine a part of the deadline */
    call_open(&p, &h, T "Watch", 3000);
    ck_assert_int_eq(call_send(&h, "x", 1), 0);
    linked_until(&p, &p.service.seen.n_messages, 1);
    if (in_memory)
        rpc_link_mem_expire(h.call);
    call_await_end(&h, RS_EDEADLINE);
    linked_until(&p, &p.service.seen.n_ended, 1);
    ck_assert_int_eq(p.service.seen.last_reason, RS_EDEADLINE);
    linked_close(&p);
}

PAIR_TEST(a_handler_knows_the_time_left)
{
    struct linked p;
    struct heard h = {0}, none = {0};
    uint64_t left = 0;
    linked_open(&p, in_memory);
    uint64_t asked = clock_mono_ns();
    call_open(&p, &h, T "TimeLeft", 20000);
    ck_assert_int_eq(call_send(&h, "x", 1), 0);
    call_half_close(&h);
    call_await_end(&h, 0);
    memcpy(&left, h.last, sizeof left);
    ck_assert_uint_ge(left + (clock_mono_ns() - asked), 20000000000ULL);
    ck_assert_uint_le(left, 20500000000ULL); /* on the wire it is rounded up by up to 1 % */
    call_ask(&p, &none, T "TimeLeft", "x", 1);
    call_await_end(&none, 0);
    memcpy(&left, none.last, sizeof left);
    ck_assert_uint_eq(left, UINT64_MAX);
    linked_close(&p);
}

PAIR_TEST(closing_ends_every_call_and_then_the_link)
{
    struct linked p;
    struct heard h[30] = {{0}};
    linked_open(&p, in_memory);
    for (int i = 0; i < 30; i++) {
        call_open(&p, &h[i], i % 2 == 0 ? T "Watch" : T "Chat", 0);
        ck_assert_int_eq(call_send(&h[i], "x", 1), 0);
    }
    linked_until(&p, &h[29].n_messages, 1);
    struct rpc_link_call *refused = NULL;
    struct rpc_link_call_options o = {.path = T "Echo"};
    p.busy++;
    rpc_link_close(p.link);
    rpc_link_close(p.link);
    ck_assert_int_eq(rpc_link_call_open(p.link, &o, &heard_events, NULL, &refused, NULL),
                     RS_ECANCELED);
    p.busy--;
    ck_assert_int_eq(call_send(&h[0], "x", 1), RS_ECANCELED);
    linked_until(&p, &p.n_closed, 1);
    for (int i = 0; i < 30; i++) {
        ck_assert_uint_eq(h[i].n_end, 1);
        ck_assert_int_eq(h[i].code, RS_ECANCELED);
        ck_assert_str_eq(h[i].text, "the link was closed");
    }
    ck_assert_uint_eq(p.n_down, 0);
    linked_close(&p);
}

/* --- from within callbacks -------------------------------------------------------------------- */

static void ask_again(struct heard *h)
{
    struct heard *next = h + 1;
    if (next->p == NULL)
        call_ask(h->p, next, T "Echo", "again", 5);
}

PAIR_TEST(a_callback_may_open_calls)
{
    struct linked p;
    struct heard h[3] = {{.at_end = ask_again}, {0}, {.p = &p}};
    linked_open(&p, in_memory);
    call_ask(&p, &h[0], T "Echo", "once", 4);
    call_await_end(&h[0], 0);
    call_await_end(&h[1], 0);
    ck_assert_str_eq(h[1].last, "again");
    linked_close(&p);
}

PAIR_TEST(a_callback_may_cancel_its_call)
{
    struct linked p;
    struct heard h = {.then = call_cancel};
    unsigned n = 100;
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Count", &n, sizeof n);
    linked_until(&p, &h.n_end, 1);
    ck_assert(h.code == RS_ECANCELED || h.code == 0); /* the server had said its all */
    ck_assert_uint_eq(h.n_messages, 1);
    linked_close(&p);
}

static void close_link_of(struct heard *h)
{
    h->p->busy++;
    rpc_link_close(h->p->link);
    h->p->busy--;
}

PAIR_TEST(a_callback_may_close_the_link)
{
    struct linked p;
    struct heard h = {.then = close_link_of}, other = {0};
    linked_open(&p, in_memory);
    call_open(&p, &other, T "Watch", 0);
    call_open(&p, &h, T "Chat", 0);
    ck_assert_int_eq(call_send(&h, "x", 1), 0);
    linked_until(&p, &p.n_closed, 1);
    ck_assert_uint_eq(h.n_messages, 1);
    ck_assert_int_eq(h.code, RS_ECANCELED);
    ck_assert_int_eq(other.code, RS_ECANCELED);
    linked_close(&p);
}

/* --- queues ----------------------------------------------------------------------------------- */

PAIR_TEST(a_full_queue_pushes_back_and_tells_when_it_has_room)
{
    struct linked p;
    struct heard h = {0};
    unsigned sent = 0;
    uint8_t one = 1;
    int r;
    linked_init(&p, in_memory);
    p.options.max_queued_messages = 8;
    linked_serve(&p);
    linked_connect(&p);
    call_open(&p, &h, T "Sum", 0);
    while ((r = call_send(&h, &one, 1)) == 0 && sent < 100)
        sent++;
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_uint_ge(sent, 8);
    ck_assert_uint_le(sent, 9); /* one may be on its way */
    ck_assert_uint_eq(rpc_link_call_queued_bytes(h.call), 8);
    linked_until(&p, &h.n_writable, 1);
    ck_assert_int_eq(call_send(&h, &one, 1), 0);
    call_half_close(&h);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_writable, 1);
    ck_assert_uint_eq(p.service.seen.n_messages, sent + 1);
    linked_close(&p);
}

PAIR_TEST(the_queue_s_bytes_are_bounded_but_one_message_always_fits)
{
    static char big[20000];
    struct linked p;
    struct heard h = {0};
    linked_init(&p, in_memory);
    p.options.max_queued_bytes = 10000;
    linked_serve(&p);
    linked_connect(&p);
    call_open(&p, &h, T "Sum", 0);
    int r = 0, n = 0;
    for (; n < 5 && r == 0; n++)
        r = call_send(&h, big, sizeof big);
    ck_assert_int_eq(r, RS_EEXHAUSTED);
    ck_assert_int_le(n, 3);
    call_half_close(&h);
    call_await_end(&h, 0);
    linked_close(&p);
}

static void hold_self(struct heard *h)
{
    call_hold(h, true);
}

PAIR_TEST(a_held_call_hears_nothing_until_it_is_let_go)
{
    struct linked p;
    struct heard h = {.then = hold_self};
    unsigned n = 200;
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Count", &n, sizeof n);
    linked_until(&p, &h.n_messages, 1);
    for (unsigned i = 0; i < 5; i++)
        linked_turn(&p);
    ck_assert_uint_eq(h.n_messages, 1);
    ck_assert_uint_eq(h.n_end, 0);
    h.then = NULL;
    call_hold(&h, false);
    call_await_end(&h, 0);
    ck_assert_uint_eq(h.n_messages, 200);
    ck_assert(h.in_order);
    linked_close(&p);
}

PAIR_TEST(a_held_call_can_be_cancelled)
{
    struct linked p;
    struct heard h = {.then = hold_self};
    unsigned n = 200;
    linked_open(&p, in_memory);
    call_ask(&p, &h, T "Count", &n, sizeof n);
    linked_until(&p, &h.n_messages, 1);
    call_cancel(&h);
    linked_until(&p, &h.n_end, 1);
    ck_assert_uint_eq(h.n_messages, 1);
    linked_close(&p);
}

/* --- metadata --------------------------------------------------------------------------------- */

PAIR_TEST(token_and_metadata_reach_the_handler)
{
    struct linked p;
    struct heard who = {0}, meta_call = {0}, without = {0};
    const struct rpc_metadata pairs[] = {
        {"x-other", "not kept"}, {"reshard-model", "qwen 3"}, {"reshard-other", ""}};
    linked_init(&p, in_memory);
    p.options.token = "token-of-7";
    linked_serve(&p);
    linked_connect(&p);
    call_ask(&p, &who, T "Who", "x", 1);
    struct rpc_link_call_options o = {.path = T "Meta", .metadata = pairs, .n_metadata = 3};
    call_open_with(&p, &meta_call, &o);
    ck_assert_int_eq(call_send(&meta_call, "x", 1), 0);
    call_half_close(&meta_call);
    call_ask(&p, &without, T "Meta", "x", 1);
    call_await_end(&who, 0);
    call_await_end(&meta_call, 0);
    call_await_end(&without, 0);
    ck_assert_str_eq(who.last, "1 7 1000 4242");
    ck_assert_str_eq(meta_call.last, "qwen 3");
    ck_assert_str_eq(without.last, "-");
    linked_close(&p);
}

PAIR_TEST(metadata_that_no_header_may_hold_is_refused)
{
    static const struct rpc_metadata bad[] = {{"Reshard-model", "x"}, {"", "x"},
                                              {"reshard-bin", "x"},   {"grpc-timeout", "1S"},
                                              {":path", "/x"},        {"reshard-x", "new\nline"},
                                              {"reshard-x", "\x7f"},  {"reshard-x", "\xc3\xb6"}};
    struct linked p;
    linked_open(&p, in_memory);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct rpc_link_call_options o = {.path = T "Echo", .metadata = &bad[i], .n_metadata = 1};
        struct rpc_link_call *c = NULL;
        struct err e = {0};
        ck_assert_int_eq(rpc_link_call_open(p.link, &o, &heard_events, NULL, &c, &e), RS_EINVAL);
        ck_assert_ptr_nonnull(strstr(e.text, "/test.v1.Twins/Echo: metadata"));
        ck_assert_ptr_null(c);
    }
    ck_assert_uint_eq(rpc_link_n_calls(p.link), 0);
    linked_close(&p);
}

/* --- breaks ----------------------------------------------------------------------------------- */

PAIR_TEST(a_break_ends_calls_and_the_link_comes_back)
{
    struct linked p;
    struct heard watch = {0}, after = {0};
    linked_open(&p, in_memory);
    for (unsigned round = 1; round <= 2; round++) {
        struct heard h = {0};
        linked_until(&p, &p.n_up, round);
        watch = (struct heard){0};
        call_ask(&p, &watch, T "Watch", "x", 1);
        linked_until(&p, &p.service.seen.n_messages, round);
        linked_unserve(&p);
        call_await_end(&watch, RS_EUNAVAIL);
        linked_until_down(&p);
        ck_assert(p.down_text[0] != '\0');
        ck_assert(!rpc_link_is_up(p.link));
        call_ask(&p, &h, T "Echo", "x", 1);
        call_await_end(&h, RS_EUNAVAIL); /* nobody is there */
        ck_assert_uint_eq(h.n_messages, 0);
        linked_serve(&p);
        if (in_memory)
            rpc_link_mem_join(p.link, p.mem);
    }
    linked_until(&p, &p.n_up, 3);
    call_ask(&p, &after, T "Echo", "back", 4);
    call_await_end(&after, 0);
    ck_assert_str_eq(after.last, "back");
    linked_close(&p);
}

PAIR_TEST(many_calls_are_open_at_once)
{
    struct linked p;
    enum { N = 300 };
    static struct heard h[N];
    memset(h, 0, sizeof h);
    linked_open(&p, in_memory);
    for (unsigned i = 0; i < N; i++)
        call_ask(&p, &h[i], T "Echo", &i, sizeof i);
    ck_assert_uint_eq(rpc_link_n_calls(p.link), N);
    for (unsigned i = 0; i < N; i++) {
        call_await_end(&h[i], 0);
        ck_assert_uint_eq(h[i].n_messages, 1);
        ck_assert_uint_eq(h[i].sum, i);
    }
    linked_close(&p);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Opens, calls, closes, with the i-th allocation failing; what begins must end. */
static bool one_failing_round(bool in_memory, long i)
{
    struct linked p;
    struct heard h[3] = {{0}};
    static const char *const paths[3] = {T "Echo", T "Sum", T "Fail"};
    static const struct rpc_metadata pair = {"reshard-model", "m"};
    unsigned n_open = 0, n_end = 0;
    linked_init(&p, in_memory);
    linked_serve(&p);
    p.options.token = "token-of-7";
    mem_fail_at(i);
    int r = in_memory ? rpc_link_mem_open(p.mem, &p.options, &link_events, &p, &p.link, NULL)
                      : rpc_link_open(&p.loop, &p.options, &link_events, &p, &p.link, NULL);
    for (int k = 0; k < 3 && r == 0; k++) {
        struct rpc_link_call_options o = {.path = paths[k], .metadata = &pair, .n_metadata = 1};
        h[k].p = &p;
        if (rpc_link_call_open(p.link, &o, &heard_events, &h[k], &h[k].call, NULL) != 0)
            continue;
        n_open++;
        (void)rpc_link_call_send(h[k].call, "x", 1);
        rpc_link_call_half_close(h[k].call);
    }
    for (int k = 0; k < 3; k++)
        if (h[k].call != NULL)
            linked_until(&p, &h[k].n_end, 1);
    bool struck = mem_failed() != 0;
    mem_fail_at(0);
    for (int k = 0; k < 3; k++)
        n_end += h[k].n_end;
    ck_assert_uint_eq(n_open, n_end);
    if (r == 0)
        linked_disconnect(&p);
    else
        ck_assert_int_eq(r, RS_ENOMEM);
    linked_fini(&p);
    return struck;
}

PAIR_TEST(every_failed_allocation_is_an_error_or_an_end)
{
    long i = 1;
    while (one_failing_round(in_memory, i))
        i++;
    ck_assert_int_gt(i, 10);
}

#define PAIR(X, name) X(name##_over_grpc) X(name##_in_memory)
#define TESTS(X)                                                                                   \
    PAIR(X, a_unary_call_gives_its_reply_and_then_its_end)                                         \
    PAIR(X, an_empty_message_is_a_message)                                                         \
    PAIR(X, a_server_stream_arrives_whole_and_in_order)                                            \
    PAIR(X, a_client_stream_is_summed_at_its_half_close)                                           \
    PAIR(X, a_bidi_call_answers_each_message_before_the_next)                                      \
    PAIR(X, code_text_and_details_of_an_end_arrive)                                                \
    PAIR(X, a_cancelled_call_ends_once_and_hears_no_message)                                       \
    PAIR(X, a_deadline_ends_the_call_on_both_sides)                                                \
    PAIR(X, a_handler_knows_the_time_left)                                                         \
    PAIR(X, closing_ends_every_call_and_then_the_link)                                             \
    PAIR(X, a_callback_may_open_calls)                                                             \
    PAIR(X, a_callback_may_cancel_its_call)                                                        \
    PAIR(X, a_callback_may_close_the_link)                                                         \
    PAIR(X, a_full_queue_pushes_back_and_tells_when_it_has_room)                                   \
    PAIR(X, the_queue_s_bytes_are_bounded_but_one_message_always_fits)                             \
    PAIR(X, a_held_call_hears_nothing_until_it_is_let_go)                                          \
    PAIR(X, a_held_call_can_be_cancelled)                                                          \
    PAIR(X, token_and_metadata_reach_the_handler)                                                  \
    PAIR(X, metadata_that_no_header_may_hold_is_refused)                                           \
    PAIR(X, a_break_ends_calls_and_the_link_comes_back)                                            \
    PAIR(X, many_calls_are_open_at_once)                                                           \
    PAIR(X, every_failed_allocation_is_an_error_or_an_end)

#include "test/lib/main.h"
