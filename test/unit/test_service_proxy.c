/* Calls that a member passes on: a member's door, its session, and a coordinator that is played by this test, over the
 * in-memory twins of both. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"
#include "peer/layout_pages.h"
#include "peer/private.h"
#include "rpc/rpc_link_mem.h"
#include "rpc/rpc_mem.h"
#include "service/front.h"
#include "service/proxy.h"
#include "service/state.h"

enum { MAX_SEEN = 16 };

/* What the coordinator's handlers saw, and what they are to do. */
static struct played {
    unsigned n_open, n_messages, n_half_closed, n_ended;
    int end_reason;
    size_t n_bytes;
    char first[64];
    struct rpc_identity who;
    int origin;
    uint64_t deadline_ns;
    struct rpc_call *call;
} seen;

static struct world {
    uv_loop_t loop;
    struct config config[2];
    struct service service[2]; /* coordinator, member: contexts, nothing of them runs */
    struct peer *peer[2];
    struct rpc_mem *server[2];
    struct rpc_method *door, *played;
    struct rpc_link *link;
    unsigned n_stopped;
} * w;

static uint64_t now_ns;

static uint64_t clock_fake(void)
{
    return now_ns;
}

/* --- the played coordinator -------------------------------------------------------------------------- */

static void played_open(struct rpc_call *call)
{
    struct err e = {0};
    seen.n_open++;
    seen.call = call;
    seen.deadline_ns = rpc_call_deadline_ns(call);
    seen.origin = proxy_origin(call, &seen.who, &e);
}

static void played_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    (void)call;
    seen.n_messages++;
    seen.n_bytes += n_bytes;
    if (seen.n_messages == 1)
        (void)snprintf(seen.first, sizeof seen.first, "%.*s", (int)n_bytes, (const char *)data);
}

static void played_half_close(struct rpc_call *call)
{
    (void)call;
    seen.n_half_closed++;
}

static void played_end(struct rpc_call *call, int reason)
{
    (void)call;
    seen.n_ended++;
    seen.end_reason = reason;
    seen.call = NULL;
}

/* --- making ------------------------------------------------------------------------------------------ */

static struct peer *resolve(void *context)
{
    return context == &w->service[0] ? w->peer[0] : w->peer[1];
}

static int open_link(uv_loop_t *loop, const struct rpc_link_options *options,
                     const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                     struct err *e)
{
    (void)loop;
    int r = rpc_link_mem_open(w->server[0], options, events, arg, ret, e);
    w->link = *ret;
    return r;
}

static bool identify(void *context, const char *token, struct rpc_identity *ret)
{
    (void)context;
    if (strncmp(token, "uid", 3) != 0) {
        *ret = (struct rpc_identity){.kind = RPC_ANONYMOUS,
                                     .name = "unknown"}; /* as the service does */
        return true;
    }
    *ret = (struct rpc_identity){
        .kind = RPC_LOCAL, .client = 5, .uid = (uint32_t)atoi(token + 3), .pid = 4711};
    return true;
}

static void peer_begin(unsigned i)
{
    const struct config *c = &w->config[i];
    struct peer_options o = {.loop = &w->loop,
                             .nodes = c->nodes,
                             .n_nodes = c->n_nodes,
                             .me = c->me,
                             .coordinator = c->coordinator_index,
                             .beat_ms = c->beat_ms,
                             .lease_ms = c->lease_ms,
                             .environment = "backend host",
                             .incarnation = 1 + i,
                             .release = "1",
                             .data_address = "127.0.0.1",
                             .clock = clock_fake,
                             .open_link = open_link};
    struct err e = {0};
    ck_assert_msg(peer_start(&o, &w->peer[i], &e) == 0, "%s", e.text);
}

/* The coordinator's methods: Peer's real ones, all others played. */
static size_t played_methods(void)
{
    struct rpc_method *m;
    size_t n;
    ck_assert_int_eq(front_methods(&w->config[0], &m, &n, NULL), 0);
    for (size_t i = 0; i < n; i++)
        if (strncmp(m[i].path, "/reshard.v1.Peer/", 17) != 0) {
            m[i].on_open = played_open;
            m[i].on_message = played_message;
            m[i].on_half_close = played_half_close;
            m[i].on_end = played_end;
        }
    w->played = m;
    return n;
}

static void turn(void)
{
    for (int i = 0; i < 4; i++) {
        if (w->link != NULL)
            (void)rpc_link_mem_run(w->link);
        rpc_mem_run(w->server[0]);
        rpc_mem_run(w->server[1]);
        (void)uv_run(&w->loop, UV_RUN_NOWAIT);
    }
}

static void world_begin(const char *roles, bool joined)
{
    char text[512];
    struct err e = {0};
    size_t n;
    w = mem_zalloc(sizeof *w);
    ck_assert_ptr_nonnull(w);
    memset(&seen, 0, sizeof seen);
    now_ns = UINT64_C(1000000000);
    ck_assert_int_eq(uv_loop_init(&w->loop), 0);
    for (unsigned i = 0; i < 2; i++) {
        (void)snprintf(text, sizeof text,
                       "[daemon]\nnode = n%u\n[cluster]\ncoordinator = n0\n"
                       "nodes = n0=127.0.0.1:7070 n1=127.0.0.1:7071\n[roles]\n%s",
                       i, roles);
        config_init(&w->config[i]);
        ck_assert_msg(config_parse(&w->config[i], text, "f", &e) == 0, "%s", e.text);
        w->service[i].config = &w->config[i];
        w->service[i].loop = &w->loop;
    }
    peer_set_resolver(resolve);
    peer_begin(0);
    struct rpc_server_options o = {.context = &w->service[0], .identify = identify};
    n = played_methods();
    ck_assert_int_eq(rpc_mem_new(&o, w->played, n, &w->server[0], &e), 0);
    o.context = &w->service[1];
    ck_assert_int_eq(front_methods(&w->config[1], &w->door, &n, &e), 0);
    ck_assert_int_eq(rpc_mem_new(&o, w->door, n, &w->server[1], &e), 0);
    peer_begin(1);
    for (int i = 0; joined && i < 5; i++) {
        now_ns += 100000000;
        peer_tick(w->peer[1]);
        turn();
    }
    ck_assert_msg(peer_joined(w->peer[1]) == joined, "%s", peer_text(w->peer[1]));
}

static void on_stopped(void *arg)
{
    (void)arg;
    w->n_stopped++;
}

static void world_end(void)
{
    rpc_link_mem_cut(w->link, "the end");
    turn();
    peer_stop(w->peer[1], on_stopped, NULL);
    struct rpc_link *l = w->link;
    w->link = NULL;
    (void)rpc_link_mem_run(l);
    peer_stop(w->peer[0], on_stopped, NULL);
    for (unsigned i = 0; i < 2; i++) {
        rpc_mem_cancel_all(w->server[i]);
        rpc_mem_free(w->server[i]);
        config_close(&w->config[i]);
    }
    (void)uv_run(&w->loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(w->n_stopped, 2);
    ck_assert_int_eq(uv_loop_close(&w->loop), 0);
    mem_free(w->door);
    mem_free(w->played);
    mem_free(w);
    w = NULL;
}

static struct rpc_mem_call *call_open(const char *method, const char *token)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/reshard.v1.%s", method);
    struct rpc_mem_call *c = rpc_mem_open(w->server[1], path, token, UINT64_MAX);
    ck_assert_ptr_nonnull(c);
    return c;
}

/* The next message as text; "" where there is none yet. */
static void receive(struct rpc_mem_call *c, int code, const char *text, struct err *e)
{
    void *data = NULL;
    size_t n = 0;
    int r = rpc_mem_receive(c, &data, &n, e);
    ck_assert_msg(r == code, "%d: %s", r, e->text);
    if (text != NULL) {
        ck_assert_uint_eq(n, strlen(text));
        ck_assert_mem_eq(data, text, n);
    }
    mem_free(data);
}

/* --- tests ------------------------------------------------------------------------------------------- */

START_TEST(bytes_pass_unread_both_ways_and_the_caller_is_told)
{
    struct err e = {0};
    world_begin("", true);
    struct rpc_mem_call *c = call_open("Refit/Submit", "uid77");
    rpc_mem_send(c, "no protobuf at all", 18);
    rpc_mem_half_close(c);
    turn();
    ck_assert_uint_eq(seen.n_open, 1);
    ck_assert_str_eq(seen.first, "no protobuf at all");
    ck_assert_uint_eq(seen.deadline_ns, UINT64_MAX);
    ck_assert_int_eq(seen.origin, 0);
    ck_assert_int_eq(seen.who.kind, RPC_LOCAL);
    ck_assert_uint_eq(seen.who.uid, 77);
    ck_assert_int_eq(seen.who.pid, 4711);
    ck_assert_uint_eq(seen.who.client,
                      PROXY_CLIENT); /* not the number of a client of the coordinator's */
    ck_assert_int_eq(rpc_call_send(seen.call, "answer", 6), 0);
    rpc_call_finish(seen.call, 0, NULL);
    turn();
    receive(c, 0, "answer", &e);
    receive(c, 1, NULL, &e);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(a_streams_messages_keep_their_order_and_status_text_and_details_come_back)
{
    struct err e = {0};
    size_t n = 0;
    world_begin("", true);
    struct rpc_mem_call *c = call_open("Refit/WatchRefit", NULL);
    rpc_mem_send(c, "q", 1);
    rpc_mem_half_close(c);
    turn();
    ck_assert_int_eq(seen.who.kind, RPC_ANONYMOUS); /* who reads need not say who it is */
    ck_assert_int_eq(rpc_call_send(seen.call, "1", 1), 0);
    turn();
    receive(c, 0, "1", &e);
    ck_assert_int_eq(rpc_call_send(seen.call, "2", 1), 0);
    ck_assert_int_eq(rpc_call_send(seen.call, "3", 1), 0);
    rpc_call_finish_details(seen.call, RS_EABORTED, "the attempt ended", "DETAILS", 7);
    turn();
    receive(c, 0, "2", &e);
    receive(c, 0, "3", &e);
    receive(c, RS_EABORTED, NULL, &e);
    ck_assert_str_eq(e.text, "the attempt ended");
    const void *details = rpc_mem_details(c, &n);
    ck_assert_uint_eq(n, 7);
    ck_assert_mem_eq(details, "DETAILS", 7);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(a_callers_cancellation_reaches_the_coordinator)
{
    world_begin("", true);
    struct rpc_mem_call *c = call_open("Refit/WatchRefit", NULL);
    rpc_mem_send(c, "q", 1);
    turn();
    ck_assert_uint_eq(seen.n_open, 1);
    rpc_mem_cancel(c);
    turn();
    ck_assert_uint_eq(seen.n_ended, 1);
    ck_assert_int_eq(seen.end_reason, RS_ECANCELED);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(a_link_that_breaks_is_unavailable_and_names_the_coordinator)
{
    struct err e = {0};
    world_begin("", true);
    struct rpc_mem_call *c = call_open("Admin/Abort", "uid0");
    rpc_mem_send(c, "q", 1);
    turn();
    rpc_link_mem_cut(w->link, "connection reset by peer");
    turn();
    receive(c, RS_EUNAVAIL, NULL, &e);
    ck_assert_msg(strstr(e.text, "n0 at 127.0.0.1:7070") && strstr(e.text, "connection reset"),
                  "%s", e.text);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(without_a_session_it_is_unavailable_and_says_why)
{
    struct err e = {0};
    world_begin("", false);
    struct rpc_mem_call *c = call_open("Admin/Versions", NULL);
    rpc_mem_run(w->server[1]);
    receive(c, RS_EUNAVAIL, NULL, &e);
    ck_assert_msg(strstr(e.text, "the coordinator n0 at 127.0.0.1:7070 is not reachable") &&
                      strstr(e.text, "seeking"),
                  "%s", e.text);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(who_may_not_or_says_nothing_is_refused_before_anything_is_passed_on)
{
    struct err e = {0};
    world_begin("trainer = uid:1\n", true);
    struct rpc_mem_call *c = call_open("Refit/Submit", "uid2");
    rpc_mem_run(w->server[1]);
    receive(c, RS_EPERM, NULL, &e);
    ck_assert_msg(strstr(e.text, "Submit needs the role trainer; uid 2"), "%s", e.text);
    rpc_mem_close(c);
    c = call_open("Refit/Submit", NULL);
    rpc_mem_run(w->server[1]);
    receive(c, RS_EUNAUTH, NULL, &e);
    rpc_mem_close(c);
    c = call_open("Refit/WatchRefit", "a token of an earlier start");
    rpc_mem_run(w->server[1]);
    receive(c, RS_EUNAUTH, NULL, &e);
    rpc_mem_close(c);
    turn();
    ck_assert_uint_eq(seen.n_open, 0);
    world_end();
}
END_TEST

START_TEST(an_origin_is_believed_with_the_token_of_a_live_session_only)
{
    char token[PEER_TOKEN_TEXT];
    world_begin("", true);
    peer_token(w->peer[1], token);
    struct {
        const char *token, *origin;
        int want;
    } cases[] = {
        {token, "local 3 4", 0},
        {token, "tls trainer-1", 0},
        {token, "anonymous", 0},
        {token, "local 3", RS_EINVAL},
        {token, "local 3 4 5", RS_EINVAL},
        {token, "root", RS_EINVAL},
        {"00112233445566778899aabbccddeeff", "local 0 1", RS_EUNAVAIL},
        {"", "local 0 1", RS_EUNAVAIL},
        {NULL, "local 0 1", 1}, /* nobody passed it on: what it says of itself is not looked at */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct rpc_metadata metadata[] = {{PROXY_ORIGIN, cases[i].origin},
                                          {PROXY_PEER, cases[i].token}};
        struct rpc_link_call_options o = {.path = "/reshard.v1.Refit/Submit",
                                          .metadata = metadata,
                                          .n_metadata = cases[i].token != NULL ? 2 : 1};
        static const struct rpc_link_call_events events;
        struct rpc_link_call *call;
        struct err e = {0};
        ck_assert_int_eq(rpc_link_call_open(w->link, &o, &events, NULL, &call, &e), 0);
        turn();
        ck_assert_msg(seen.origin == cases[i].want, "case %zu: %d", i, seen.origin);
        rpc_link_call_cancel(call);
        turn();
    }
    ck_assert_uint_eq(seen.n_open, sizeof cases / sizeof *cases);
    world_end();
}
END_TEST

START_TEST(a_page_of_a_layout_that_makes_no_sense_is_refused_here)
{
    struct err e = {0};
    world_begin("", true);
    struct rpc_mem_call *c = call_open("Refit/PutLayout", "uid0");
    rpc_mem_send(c, "\xff\xff", 2);
    turn();
    receive(c, RS_EINVAL, NULL, &e);
    ck_assert_uint_eq(seen.n_messages, 0);
    ck_assert_uint_eq(seen.n_ended, seen.n_open);
    rpc_mem_close(c);
    world_end();
}
END_TEST

START_TEST(calls_that_are_passed_on_survive_the_failure_of_any_allocation)
{
    for (long i = 1; i < 200; i++) {
        struct err e = {0};
        void *data = NULL;
        size_t n;
        world_begin("", true);
        mem_fail_at(i);
        struct rpc_mem_call *c =
            rpc_mem_open(w->server[1], "/reshard.v1.Refit/Submit", "uid7", UINT64_MAX);
        if (c != NULL) {
            rpc_mem_send(c, "q", 1);
            rpc_mem_half_close(c);
        }
        turn();
        if (seen.call != NULL) {
            (void)rpc_call_send(seen.call, "a", 1);
            rpc_call_finish(seen.call, 0, NULL);
        }
        turn();
        int struck = mem_failed();
        mem_fail_at(0);
        int r = c != NULL ? rpc_mem_receive(c, &data, &n, &e) : RS_ENOMEM;
        ck_assert_msg(r != RS_EDEADLINE, "allocation %ld: the caller hears nothing", i);
        mem_free(data);
        rpc_mem_close(c);
        world_end();
        if (!struck)
            return;
    }
    ck_abort_msg("it never ran out of allocations to fail");
}
END_TEST

#define TESTS(X)                                                                                   \
    X(bytes_pass_unread_both_ways_and_the_caller_is_told)                                          \
    X(a_streams_messages_keep_their_order_and_status_text_and_details_come_back)                   \
    X(a_callers_cancellation_reaches_the_coordinator)                                              \
    X(a_link_that_breaks_is_unavailable_and_names_the_coordinator)                                 \
    X(without_a_session_it_is_unavailable_and_says_why)                                            \
    X(who_may_not_or_says_nothing_is_refused_before_anything_is_passed_on)                         \
    X(an_origin_is_believed_with_the_token_of_a_live_session_only)                                 \
    X(a_page_of_a_layout_that_makes_no_sense_is_refused_here)                                      \
    X(calls_that_are_passed_on_survive_the_failure_of_any_allocation)

#include "test/lib/main.h"
