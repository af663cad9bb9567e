/* A node that is not the coordinator, without a data plane: what it keeps of orders, and what the end of a session does. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/attempt_input.h"
#include "service/part.h"
#include "service/peers.h"
#include "test/lib/service_bed.h"

static struct world {
    uv_loop_t loop;
    struct config config;
    struct peer_node nodes[2];
    struct service *service;
    struct ledger_store *store;
} w;

static void service_open(void)
{
    struct err e = {0};
    struct service *s = w.service = service_bed_open(&w.loop, &w.config, w.store);
    s->node = 1;
    ck_assert_int_eq(remember_load(s, &e), 0);
}

static void world_open(void)
{
    w = (struct world){0};
    config_init(&w.config);
    w.config.nodes = w.nodes;
    w.config.n_nodes = 2;
    w.config.me = 1;
    w.store = ledger_store_new();
    service_open();
}

static void service_close(void)
{
    struct service *s = w.service;
    while (s->n_writes > 0)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    ledger_close(s->ledger);
    s->ledger = NULL;
    s->stopping = true;
    service_bed_close(s);
}

static void world_close(void)
{
    service_close();
    ledger_store_free(w.store);
}

static void committed_order(uint64_t version)
{
    struct node_order o = {.type = NODE_ORDER_COMMITTED,
                           .model = "m",
                           .version = version,
                           .wall_ns = 1000 + version,
                           .text = ""};
    node_order_take(w.service, &o);
}

struct asking {
    struct waiter waiter;
    int code;
    unsigned n_done;
};

static void on_done(struct waiter *waiter, const struct op_reply *reply)
{
    struct asking *a = container_of(waiter, struct asking, waiter);
    a->code = reply->code;
    a->n_done++;
}

START_TEST(what_is_committed_never_goes_back)
{
    world_open();
    committed_order(0); /* the model is known, nothing of it is committed */
    const struct model *m = model_find(w.service, "m");
    ck_assert(m != NULL && m->announced && m->committed.version == 0);
    committed_order(7);
    committed_order(5);
    ck_assert_uint_eq(m->committed.version, 7);
    ck_assert_uint_eq(m->committed.wall_ns, 1007);
    world_close();
}
END_TEST

START_TEST(what_was_committed_is_remembered_over_a_restart_but_not_told_to_who_polls)
{
    world_open();
    committed_order(7);
    service_close();
    service_open();
    const struct model *m = model_find(w.service, "m");
    ck_assert_ptr_nonnull(m);
    ck_assert_uint_eq(m->remembered, 7);
    ck_assert_uint_eq(m->committed.version, 0);
    struct poll p = {.deadline_ns = UINT64_MAX};
    struct err e = {0};
    ck_assert_int_eq(op_get_committed(w.service, 1, "m", 0, 0, 0, &p, &e), RS_EUNAVAIL);
    world_close();
}
END_TEST

START_TEST(nobody_is_asked_without_a_session)
{
    world_open();
    struct asking a = {.waiter.done = on_done};
    struct err e = {0};
    struct node_report r = {
        .type = NODE_REPORT_EVENT,
        .model = "m",
        .event = {.type = REFIT_EV_READY, .ready = {.worker = 1, .version = 1}}};
    ck_assert_int_eq(node_ask(w.service, &r, &a.waiter, &e), RS_EUNAVAIL);
    ck_assert_ptr_nonnull(strstr(e.text, "coordinator"));
    ck_assert_uint_eq(a.n_done, 0);
    ck_assert(queue_empty(&w.service->waiters));
    world_close();
}
END_TEST

START_TEST(the_end_of_a_session_answers_who_waits_for_the_coordinator_and_nobody_else)
{
    world_open();
    struct asking asked = {.waiter.done = on_done}, local = {.waiter.done = on_done};
    w.service->session = 1;
    (void)waiter_add(w.service, &asked.waiter);
    asked.waiter.asked = true;
    (void)waiter_add(w.service, &local.waiter);
    node_severed(w.service, "its stream broke");
    ck_assert_uint_eq(asked.n_done, 1);
    ck_assert_int_eq(asked.code, RS_EUNAVAIL);
    ck_assert_uint_eq(local.n_done, 0);
    ck_assert_uint_eq(w.service->session, 0);
    waiter_forget(&local.waiter);
    world_close();
}
END_TEST

START_TEST(a_reply_to_a_cookie_of_an_earlier_session_finds_nobody)
{
    world_open();
    struct asking a = {.waiter.done = on_done};
    w.service->session = 1;
    uint64_t cookie = waiter_add(w.service, &a.waiter);
    a.waiter.asked = true;
    node_severed(w.service, "its stream broke");
    struct node_order late = {
        .type = NODE_ORDER_REPLY, .model = "", .cookie = cookie, .text = "late"};
    node_order_take(w.service, &late);
    ck_assert_uint_eq(a.n_done, 1);
    ck_assert_int_eq(a.code, RS_EUNAVAIL);
    world_close();
}
END_TEST

START_TEST(orders_of_an_attempt_without_data_plane_or_sound_input_start_nothing)
{
    world_open();
    struct topology topology = {0};
    const struct attempt_input input = {.topology = &topology};
    struct node_order o = {.type = NODE_ORDER_PREPARE,
                           .model = "m",
                           .version = 1,
                           .attempt = 4,
                           .text = "",
                           .input = &input};
    w.service->session = 1;
    node_order_take(w.service, &o);
    const struct model *m = model_find(w.service, "m");
    ck_assert(part_is_quiet(m->part) && m->part->now == NULL && m->part->next == NULL);
    o.type = NODE_ORDER_START;
    node_order_take(w.service, &o);
    o.type = NODE_ORDER_ABORT;
    node_order_take(w.service, &o);
    o.type = NODE_ORDER_END;
    node_order_take(w.service, &o);
    ck_assert(part_is_quiet(m->part) && node_is_quiet(w.service));
    world_close();
}
END_TEST

#define TESTS(X)                                                                                   \
    X(what_is_committed_never_goes_back)                                                           \
    X(what_was_committed_is_remembered_over_a_restart_but_not_told_to_who_polls)                   \
    X(nobody_is_asked_without_a_session)                                                           \
    X(the_end_of_a_session_answers_who_waits_for_the_coordinator_and_nobody_else)                  \
    X(a_reply_to_a_cookie_of_an_earlier_session_finds_nobody)                                      \
    X(orders_of_an_attempt_without_data_plane_or_sound_input_start_nothing)
#include "test/lib/main.h"
