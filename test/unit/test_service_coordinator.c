/* The coordinator of three nodes, two of which are played by this test: what they are told, in answer to what they report. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "exec/wire.h"
#include "service/attempt_input.h"
#include "service/cells_sum.h"
#include "service/coordinator.h"
#include "service/held.h"

enum { OWN, TRAINER, ROLLOUT, N_NODES };
enum { MOST_ORDERS = 256, WAIT_TURNS = 2000 };

static const char source_text[] =
    "{\"name\":\"train\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"w\",\"shape\":[8],\"dtype\":\"int32\",\"mesh\":\"m\",\"placements\":["
    "\"Shard(0)\"]}]}";
static const char destination_text[] =
    "{\"name\":\"rollout\",\"ranks\":2,\"meshes\":[{\"name\":\"m\",\"shape\":[2],\"ranks\":[0,1]}],"
    "\"tensors\":[{\"name\":\"w\",\"shape\":[8],\"dtype\":\"int32\",\"mesh\":\"m\",\"placements\":["
    "\"Replicate\"]}]}";

/* An order as a played node got it. */
struct got {
    uint32_t node;
    struct node_order o;
    char text[256];
    struct attempt_peer peer; /* the first */
    uint32_t n_participants;
};

static struct world {
    uv_loop_t loop;
    struct config config;
    struct peer_node nodes[N_NODES];
    struct service *service;
    struct coordinator *c;
    struct ledger_store *store;
    struct layout_entry *source, *destination;
    struct got orders[MOST_ORDERS];
    unsigned n_orders, n_read;
    bool deaf[N_NODES]; /* its session is over: orders do not reach it */
    struct waiter submit;
    int submit_code;
    bool submitted;
} w;

/* --- the played nodes ------------------------------------------------------------------------------ */

static int on_send(struct service *s, uint32_t node, const struct node_order *o)
{
    (void)s;
    if (w.deaf[node])
        return RS_EUNAVAIL;
    ck_assert_uint_lt(w.n_orders, MOST_ORDERS);
    struct got *g = &w.orders[w.n_orders++];
    *g = (struct got){.node = node, .o = *o};
    (void)snprintf(g->text, sizeof g->text, "%s", o->text);
    if (o->type == NODE_ORDER_PREPARE) {
        ck_assert_uint_eq(o->n_peers, 1);
        g->peer = o->peers[0];
        g->n_participants = o->input->n_participants;
    }
    return 0;
}

static void on_look(const struct service *s, uint32_t node, struct peer_view *ret)
{
    static const char *const domains[] = {"", ""};
    static const char *const addresses[] = {"", "192.0.2.1", "192.0.2.2"};
    *ret = (struct peer_view){.state = PEER_HERE,
                              .name = s->config->nodes[node].name,
                              .n_devices = 2,
                              .domain_of_device = domains,
                              .data_address = addresses[node],
                              .why = ""};
}

static void on_wake(void *arg)
{
    struct service *s = arg;
    (void)uv_async_send(&s->wake);
}

static void on_mailbox(uv_async_t *wake)
{
    struct service *s = wake->data;
    (void)mailbox_drain(&s->mailbox);
}

static struct layout_entry *layout_put(const char *text)
{
    struct layout *l = NULL;
    struct layout_entry *entry;
    struct err e = {0};
    ck_assert_msg(layout_from_json(text, strlen(text), &l, &e) == 0, "%s", e.text);
    ck_assert_msg(layout_check(l, &e) == 0 && layout_digest(l) == 0, "%s", e.text);
    ck_assert_int_eq(layouts_add(&w.service->layouts, l, &entry, &e), 0);
    return entry;
}

static void world_open(void)
{
    struct err e = {0};
    w = (struct world){0};
    ck_assert_int_eq(uv_loop_init(&w.loop), 0);
    config_init(&w.config);
    for (uint32_t i = 0; i < N_NODES; i++)
        (void)snprintf(w.nodes[i].name, sizeof w.nodes[i].name, "n%u", i);
    (void)snprintf(w.config.node, sizeof w.config.node, "n0");
    w.config.nodes = w.nodes;
    w.config.n_nodes = N_NODES;
    struct service *s = w.service = mem_zalloc(sizeof *s);
    s->loop = &w.loop;
    s->config = &w.config;
    s->incarnation = 77;
    queue_init(&s->models);
    queue_init(&s->leases);
    queue_init(&s->waiters);
    layouts_init(&s->layouts, 8);
    plan_store_init(&s->plans);
    mailbox_init(&s->mailbox, on_wake, s);
    ck_assert_int_eq(uv_async_init(&w.loop, &s->wake, on_mailbox), 0);
    s->wake.data = s;
    s->n_handles = 1;
    w.store = ledger_store_new();
    ck_assert_int_eq(ledger_mem_open(w.store, &s->mailbox, &s->ledger), 0);
    ck_assert_int_eq(coordinator_new(s, &s->coordinator, &e), 0);
    w.c = s->coordinator;
    w.c->send = on_send;
    w.c->look = on_look;
    w.source = layout_put(source_text);
    w.destination = layout_put(destination_text);
}

static void on_wake_closed(uv_handle_t *h)
{
    service_handle_closed(h->data);
}

static void world_close(void)
{
    struct service *s = w.service;
    while (s->n_jobs > 0)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    s->stopping = true;
    ledger_close(s->ledger);
    while (!queue_empty(&w.c->deciders))
        decider_close(container_of(w.c->deciders.next, struct decider, in));
    while (!queue_empty(&s->models))
        model_close(container_of(s->models.next, struct model, in));
    mailbox_shut(&s->mailbox);
    uv_close((uv_handle_t *)&s->wake, on_wake_closed);
    (void)uv_run(&w.loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&w.loop), 0);
    ledger_store_free(w.store);
}

/* The next order of that type to that node that was not read yet; the loop turns until it has come. */
static const struct got *expect(uint32_t node, enum node_order_type type)
{
    static bool read[MOST_ORDERS];
    if (w.n_read == 0)
        memset(read, 0, sizeof read);
    for (unsigned turn = 0; turn < WAIT_TURNS; turn++) {
        for (unsigned i = 0; i < w.n_orders; i++)
            if (!read[i] && w.orders[i].node == node && w.orders[i].o.type == type) {
                read[i] = true;
                w.n_read++;
                return &w.orders[i];
            }
        (void)uv_run(&w.loop, turn % 2 == 0 ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    }
    ck_abort_msg("node %u got no order of type %d", node, (int)type);
    return NULL;
}

static unsigned count(uint32_t node, enum node_order_type type)
{
    unsigned n = 0;
    for (unsigned i = 0; i < w.n_orders; i++)
        n += w.orders[i].node == node && w.orders[i].o.type == type;
    return n;
}

/* --- reports --------------------------------------------------------------------------------------- */

static struct node_report event_of(enum refit_event_type type)
{
    return (struct node_report){.type = NODE_REPORT_EVENT, .model = "m", .event = {.type = type}};
}

static void node_comes(uint32_t node)
{
    struct node_report r = event_of(REFIT_EV_NODE_UP);
    r.model = "";
    r.event.node.text = "";
    r.event.node.data_plane = 90 + node;
    r.data_port = (uint16_t)(7000 + node);
    coordinator_report(w.c, node, &r);
}

static struct node_report attached_of(uint32_t node, uint32_t rank)
{
    bool source = node == TRAINER;
    const struct layout *layout = (source ? w.source : w.destination)->layout;
    struct node_report r = event_of(REFIT_EV_ATTACHED);
    r.event.cookie = 1000 * node + rank + 1;
    r.event.attached.worker = 100 * node + rank;
    r.event.attached.side = source ? REFIT_SOURCE : REFIT_DESTINATION;
    r.event.attached.layout_name = layout->name;
    r.event.attached.rank = rank;
    r.event.attached.receive = source ? REFIT_RECEIVE_NONE : REFIT_STAGED_RECEIVE;
    r.event.attached.accept_automatically = true;
    memcpy(r.layout, layout->digest, sizeof r.layout);
    r.device = rank;
    r.pid = 4000;
    r.segment_bytes = 32;
    return r;
}

static void attach(uint32_t node, uint32_t rank)
{
    struct node_report r = attached_of(node, rank);
    coordinator_report(w.c, node, &r);
    const struct got *g = expect(node, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, r.event.cookie);
    ck_assert_msg(g->o.code == 0, "%s", g->text);
}

static void on_submitted(struct waiter *waiter, const struct op_reply *reply)
{
    (void)waiter;
    w.submit_code = reply->code;
    w.submitted = true;
}

static void submit(uint64_t version)
{
    struct err e = {0};
    const char id[] = {'r', (char)('0' + version), '\0'};
    struct op_submit o = {
        .model = "m", .version = version, .request_id = id, .options = "", .options_words = ""};
    w.submit.done = on_submitted;
    ck_assert_msg(op_submit(w.service, &o, &w.submit, &e) == 0, "%s", e.text);
}

static void publish(uint32_t rank, uint64_t version)
{
    struct node_report ask = {.type = NODE_REPORT_PUBLISH_ASK,
                              .model = "m",
                              .cookie = 50 + rank,
                              .worker = 100 * TRAINER + rank,
                              .version = version};
    coordinator_report(w.c, TRAINER, &ask);
    const struct got *g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 50 + rank);
    ck_assert_int_eq(g->o.code, 0);
    ck_assert_uint_eq(g->o.value, 0);
    const struct publication_print print = {0, 11 + rank};
    struct node_report r = event_of(REFIT_EV_PUBLISHED);
    r.event.cookie = 60 + rank;
    r.event.published.worker = 100 * TRAINER + rank;
    r.event.published.version = version;
    r.event.published.publication = 500 + rank;
    r.has_prints = true;
    r.prints = &print;
    r.n_prints = 1;
    coordinator_report(w.c, TRAINER, &r);
    g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 60 + rank);
    ck_assert_uint_eq(g->o.value, 500 + rank);
}

static void say(uint32_t node, enum refit_event_type type, uint64_t attempt)
{
    struct node_report r = event_of(type);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    coordinator_report(w.c, node, &r);
}

static void cells_say(uint32_t node, uint64_t attempt, uint64_t fingerprint)
{
    const struct cell_print print = {
        .cell = 0, .fingerprint = fingerprint, .layout = node == TRAINER ? 0 : 1, .rank = 0};
    struct node_report r = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &print, .n_cells = 1};
    coordinator_report(w.c, node, &r);
}

/* One cell, in short. */
static void sum_say(uint64_t attempt, uint64_t fingerprint)
{
    const struct cell_print print = {.cell = 0, .fingerprint = fingerprint, .layout = 1};
    struct cell_run run;
    struct node_report r = {
        .type = NODE_REPORT_CELL_SUM, .model = "m", .attempt = attempt, .runs = &run};
    (void)cells_sum(&print, 1, &run, 1, &r.n_runs, r.digest);
    coordinator_report(w.c, ROLLOUT, &r);
}

static void staged_say(uint64_t attempt)
{
    struct memory_fold folds[2];
    struct node_report r = event_of(REFIT_EV_STAGED);
    for (uint32_t rank = 0; rank < 2; rank++) {
        folds[rank] = (struct memory_fold){.rank = rank, .fold = 900 + rank};
        memcpy(folds[rank].layout, w.destination->layout->digest, 16);
    }
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    r.folds = folds;
    r.n_folds = 2;
    coordinator_report(w.c, ROLLOUT, &r);
}

/* Both nodes, all workers, one version that both have begun to move; the attempt's number. */
static uint64_t until_started(void)
{
    for (uint32_t node = TRAINER; node <= ROLLOUT; node++) {
        node_comes(node);
        attach(node, 0);
        attach(node, 1);
    }
    submit(1);
    (void)expect(TRAINER, NODE_ORDER_TELL);
    (void)expect(TRAINER, NODE_ORDER_TELL);
    publish(0, 1);
    publish(1, 1);
    uint64_t attempt = expect(TRAINER, NODE_ORDER_PREPARE)->o.attempt;
    (void)expect(ROLLOUT, NODE_ORDER_PREPARE);
    say(TRAINER, REFIT_EV_PREPARED, attempt);
    ck_assert_uint_eq(count(TRAINER, NODE_ORDER_START), 0);
    say(ROLLOUT, REFIT_EV_PREPARED, attempt);
    (void)expect(TRAINER, NODE_ORDER_START);
    (void)expect(ROLLOUT, NODE_ORDER_START);
    return attempt;
}

static const struct refit_version *version_of(uint64_t version)
{
    const struct decider *d = decider_find(w.c, "m");
    return refit_find_version(d->refit, version);
}

static void until_phase(uint64_t version, enum refit_phase phase)
{
    for (unsigned turn = 0; turn < WAIT_TURNS; turn++) {
        if (version_of(version)->phase.state == (int)phase)
            return;
        (void)uv_run(&w.loop, turn % 2 == 0 ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    }
    ck_abort_msg("version %llu is %s (%s)", (unsigned long long)version,
                 refit_phase_name(version_of(version)->phase.state), version_of(version)->reason);
}

/* --- tests ----------------------------------------------------------------------------------------- */

START_TEST(both_nodes_get_the_same_input_and_each_the_way_to_the_other)
{
    world_open();
    (void)until_started();
    const struct got *a = NULL, *b = NULL;
    for (unsigned i = 0; i < w.n_orders; i++)
        if (w.orders[i].o.type == NODE_ORDER_PREPARE)
            *(w.orders[i].node == TRAINER ? &a : &b) = &w.orders[i];
    ck_assert_mem_eq(a->o.plan_digest, b->o.plan_digest, 16);
    ck_assert_mem_eq(a->o.input_digests, b->o.input_digests, sizeof a->o.input_digests);
    ck_assert_uint_eq(a->n_participants, 4);
    ck_assert_uint_eq(a->o.data_plane, 90 + TRAINER);
    ck_assert_uint_eq(b->o.data_plane, 90 + ROLLOUT);
    ck_assert_uint_eq(a->peer.node, ROLLOUT);
    ck_assert_str_eq(a->peer.address, "192.0.2.2");
    ck_assert_uint_eq(a->peer.port, 7000 + ROLLOUT);
    ck_assert_str_eq(b->peer.address, "192.0.2.1");
    ck_assert_mem_eq(a->peer.token, b->peer.token, NODE_TOKEN_BYTES);
    static const uint8_t zero[NODE_TOKEN_BYTES];
    ck_assert_mem_ne(a->peer.token, zero, sizeof zero);
    world_close();
}
END_TEST

static int row_find(const struct ledger_record *row, void *arg)
{
    return row->kind != LEDGER_VERSION
               ? 0
               : held_load(arg, row->version.version, row->version.fingerprints,
                           row->version.n_fingerprints_bytes);
}

START_TEST(what_all_nodes_staged_commits_and_the_ledger_keeps_what_memory_holds)
{
    struct err e = {0};
    struct held_store *held = held_new();
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    until_phase(1, REFIT_COMMITTED);
    for (uint32_t node = TRAINER; node <= ROLLOUT; node++) {
        ck_assert_int_eq(expect(node, NODE_ORDER_END)->o.code, 0);
        while (expect(node, NODE_ORDER_COMMITTED)->o.version !=
               1) /* 0 when the model was announced */
            ;
    }
    const struct got *worker = expect(ROLLOUT, NODE_ORDER_WORKER);
    ck_assert_uint_eq(worker->o.held, 1);
    ck_assert_uint_eq(worker->o.applied, 0);
    ck_assert(w.submitted && w.submit_code == 0);
    const uint8_t *digest = w.destination->layout->digest;
    ck_assert_int_eq(ledger_versions(w.service->ledger, "m", 1, 1, row_find, held, &e), 0);
    ck_assert(held_is(held, 1, digest, 0, 900) && held_is(held, 1, digest, 1, 901));
    ck_assert(!held_is(held, 1, digest, 0, 901));
    world_close();
    held_free(held);
}
END_TEST

START_TEST(nodes_that_saw_different_content_end_it_and_the_destination_is_blamed)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt); /* not believed: it is known by now that they differ */
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    const char *reason = version_of(1)->reason;
    ck_assert_msg(strstr(reason, "tensor 'w' [") != NULL &&
                      strstr(reason, "layout 'rollout' rank 0") != NULL &&
                      strstr(reason, "layout 'train' rank 0 sent") != NULL,
                  "%s", reason);
    ck_assert_int_ne(expect(ROLLOUT, NODE_ORDER_END)->o.code, 0);
    world_close();
}
END_TEST

START_TEST(what_a_node_received_is_believed_in_short_where_it_is_what_the_sources_told)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    sum_say(attempt, 5);
    staged_say(attempt);
    until_phase(1, REFIT_COMMITTED);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 0);
    world_close();
}
END_TEST

START_TEST(a_node_that_received_something_else_is_asked_for_each_cell_and_blamed_by_it)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    sum_say(attempt, 6);
    staged_say(attempt);
    ck_assert_uint_eq(expect(ROLLOUT, NODE_ORDER_CELLS)->o.attempt, attempt);
    ck_assert_int_ne(version_of(1)->phase.state, REFIT_STAGED); /* it is not staged before that */
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "layout 'rollout' rank 0"));
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 1);
    world_close();
}
END_TEST

START_TEST(a_node_that_is_sooner_than_the_sources_words_is_asked_for_each_cell)
{
    for (uint64_t told = 5; told <= 6; told++) {
        world_open();
        uint64_t attempt = until_started();
        sum_say(attempt, 5);
        staged_say(attempt);
        (void)expect(ROLLOUT, NODE_ORDER_CELLS);
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        cells_say(TRAINER, attempt, told);
        say(TRAINER, REFIT_EV_STAGED, attempt);
        if (told == 5)
            until_phase(1, REFIT_COMMITTED);
        else
            (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        world_close();
    }
}
END_TEST

START_TEST(who_is_in_doubt_when_another_has_differed_is_not_believed)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(TRAINER, attempt, 5);
    sum_say(attempt, 6);
    cells_say(TRAINER, attempt, 4); /* its sources differ */
    staged_say(attempt);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_CELLS), 0);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    world_close();
}
END_TEST

START_TEST(sums_of_cells_that_the_plan_has_not_end_the_attempt)
{
    static const struct cell_run far[][2] = {
        {{UINT64_MAX, 1}, {0, 1}}, {{0, UINT32_MAX}, {0, 1}}, {{1, 1}, {1U << 20, 1}}};
    for (unsigned i = 0; i < sizeof far / sizeof *far; i++) {
        world_open();
        uint64_t attempt = until_started();
        const struct node_report r = {.type = NODE_REPORT_CELL_SUM,
                                      .model = "m",
                                      .attempt = attempt,
                                      .runs = far[i],
                                      .n_runs = 2};
        coordinator_report(w.c, ROLLOUT, &r);
        (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "cells that the plan has not"));
        world_close();
    }
}
END_TEST

/* The last word to both of ROLLOUT's workers: what they hold, and of which version they have got wrong bytes. */
static void check_told(uint64_t held, uint64_t wrong)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        const struct got *last = NULL;
        for (unsigned i = 0; i < w.n_orders; i++)
            if (w.orders[i].node == ROLLOUT && w.orders[i].o.type == NODE_ORDER_WORKER &&
                w.orders[i].o.worker == 100 * ROLLOUT + rank)
                last = &w.orders[i];
        ck_assert_ptr_nonnull(last);
        ck_assert_uint_eq(last->o.held, held);
        ck_assert_uint_eq(last->o.version, wrong);
    }
}

START_TEST(all_workers_of_a_node_that_had_staged_wrong_bytes_are_not_believed_any_more)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    check_told(1, 0); /* by then nothing speaks against it */
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    check_told(0, 1);
    staged_say(attempt); /* once more, late */
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    check_told(0, 1);
    world_close();
}
END_TEST

/* Both of ROLLOUT's workers have the version, which they will not apply: the next may be written over it. */
static void commit_and_skip(uint64_t attempt)
{
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    until_phase(1, REFIT_COMMITTED);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct node_report r = event_of(REFIT_EV_APPLY);
        r.event.apply.worker = 100 * ROLLOUT + rank;
        r.event.apply.version = 1;
        r.event.apply.skip = true;
        coordinator_report(w.c, ROLLOUT, &r);
    }
}

START_TEST(sources_that_differ_before_anything_was_written_take_nothing_from_who_receives)
{
    world_open();
    commit_and_skip(until_started());
    check_told(1, 0);
    submit(2);
    (void)expect(TRAINER, NODE_ORDER_TELL);
    publish(0, 2);
    publish(1, 2);
    uint64_t attempt = expect(TRAINER, NODE_ORDER_PREPARE)->o.attempt;
    (void)expect(ROLLOUT, NODE_ORDER_PREPARE);
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EDATALOSS;
    r.event.node.text = "the source changed since it was published";
    coordinator_report(w.c, TRAINER, &r);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(2, REFIT_ABORTED);
    check_told(1, 0);
    world_close();
}
END_TEST

static void landed_say(uint64_t attempt, uint64_t landed)
{
    struct node_report r = event_of(REFIT_EV_PROGRESS);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    r.event.node.bytes.landed = landed;
    coordinator_report(w.c, ROLLOUT, &r);
}

static uint64_t landed_seen;

static void on_watched(struct watcher *x, int code, const char *text)
{
    const struct refit *r = x->decider->refit;
    (void)text;
    ck_assert_int_eq(code, 0);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].node == ROLLOUT)
            landed_seen = r->nodes[i].bytes.landed;
}

/* Who watches is not told of each step, but always of the last, though nothing follows. */
START_TEST(a_watcher_hears_of_the_last_bytes_that_landed)
{
    struct watcher x = {.changed = on_watched};
    struct err e = {0};
    world_open();
    uint64_t attempt = until_started();
    ck_assert_int_eq(op_watch_refit(w.service, "m", 1, &x, &e), 0);
    landed_seen = 0;
    for (uint64_t landed = 1; landed <= 100; landed++)
        landed_say(attempt, landed);
    while (landed_seen < 100) {
        int wait_ms = uv_backend_timeout(&w.loop);
        ck_assert_msg(0 <= wait_ms && wait_ms <= 101, "nobody is told within %d ms", wait_ms);
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    }
    landed_say(attempt, 101);
    landed_say(attempt, 102); /* and this one is due when the attempt has ended */
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EUNAVAIL;
    r.event.node.text = "it went away";
    coordinator_report(w.c, ROLLOUT, &r);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert(!uv_is_active((uv_handle_t *)&decider_find(w.c, "m")->progress));
    watcher_close(&x);
    world_close();
}
END_TEST

static void known_say(uint64_t attempt)
{
    struct node_report r = event_of(REFIT_EV_PROGRESS);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    r.event.node.sources_known = true;
    coordinator_report(w.c, TRAINER, &r);
}

static bool are_proven(void)
{
    const struct refit *refit = decider_find(w.c, "m")->refit;
    bool first = refit_find_worker(refit, 100 * ROLLOUT)->proven;
    ck_assert_int_eq(first, refit_find_worker(refit, 100 * ROLLOUT + 1)->proven);
    return first;
}

START_TEST(what_is_staged_is_proven_by_what_the_sources_node_told_before_it_staged)
{
    for (int sources_first = 0; sources_first < 2; sources_first++) {
        world_open();
        uint64_t attempt = until_started();
        for (int turn = 0; turn < 2; turn++) {
            ck_assert(!are_proven());
            if ((turn == 0) == (sources_first != 0)) {
                cells_say(TRAINER, attempt, 5);
                known_say(attempt);
            } else {
                cells_say(ROLLOUT, attempt, 5);
                staged_say(attempt);
            }
        }
        ck_assert(are_proven());
        check_told(1, 0);
        world_close();
    }
}
END_TEST

START_TEST(wrong_bytes_are_found_by_it_and_never_proven)
{
    for (int sources_first = 0; sources_first < 2; sources_first++) {
        world_open();
        uint64_t attempt = until_started();
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (sources_first != 0)) {
                cells_say(TRAINER, attempt, 5);
                known_say(attempt);
            } else {
                cells_say(ROLLOUT, attempt, 6);
                staged_say(attempt);
            }
            ck_assert(!are_proven()); /* also while the words to it are looked for */
        }
        (void)expect(TRAINER, NODE_ORDER_ABORT);
        (void)expect(ROLLOUT, NODE_ORDER_ABORT);
        known_say(attempt); /* once more, late */
        ck_assert(!are_proven());
        check_told(0, 1);
        world_close();
    }
}
END_TEST

/* The attempt ends, and says who has kept its cells to itself; nothing that has landed is proven. */
static void check_untold(uint64_t attempt)
{
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    ck_assert(!are_proven());
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    const char *reason = version_of(1)->reason;
    ck_assert_msg(strstr(reason, "node n1: it says that it has told what its sources send, but not "
                                 "of tensor 'w' [") != NULL &&
                      strstr(reason, "layout 'rollout' rank 0 holds") != NULL,
                  "%s", reason);
}

START_TEST(a_node_that_keeps_cells_of_its_sources_to_itself_is_named)
{
    for (int order = 0; order < 3; order++) {
        world_open();
        uint64_t attempt = until_started();
        if (order == 0)
            known_say(attempt); /* without a word about any cell */
        cells_say(ROLLOUT, attempt, 5);
        if (order == 1)
            known_say(attempt);
        if (order == 2) {
            staged_say(attempt);
            say(TRAINER, REFIT_EV_STAGED, attempt);
        }
        check_untold(attempt);
        world_close();
    }
}
END_TEST

START_TEST(cells_that_a_node_keeps_to_itself_are_missed_where_another_tells_in_short)
{
    world_open();
    uint64_t attempt = until_started();
    known_say(attempt); /* without a word about any cell */
    sum_say(attempt, 5);
    staged_say(attempt);
    (void)expect(ROLLOUT, NODE_ORDER_CELLS);
    ck_assert(!are_proven());
    cells_say(ROLLOUT, attempt, 5);
    check_untold(attempt);
    world_close();
}
END_TEST

START_TEST(nobody_speaks_for_ranks_of_another_node)
{
    world_open();
    uint64_t attempt = until_started();
    const struct cell_print print = {.cell = 0, .fingerprint = 5, .layout = 0, .rank = 0};
    struct node_report r = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &print, .n_cells = 1};
    coordinator_report(w.c, ROLLOUT, &r); /* as if it were the source, which is believed */
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, attempt);
    until_phase(1, REFIT_ABORTED);
    ck_assert_msg(
        strstr(version_of(1)->reason, "node n2: it reports cells of ranks that it has not") != NULL,
        "%s", version_of(1)->reason);
    world_close();
}
END_TEST

START_TEST(who_was_compared_is_believed_though_the_sources_node_fails_afterwards)
{
    for (int known = 0; known < 2; known++) {
        world_open();
        uint64_t attempt = until_started();
        cells_say(TRAINER, attempt, 5);
        if (known)
            known_say(attempt);
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        struct node_report r = event_of(REFIT_EV_FAILED);
        r.event.node.attempt = attempt;
        r.event.node.code = RS_EDATALOSS;
        r.event.node.text = "the source changed while it was being sent";
        coordinator_report(w.c, TRAINER, &r);
        check_told(known ? 1 : 0, known ? 0 : 1);
        ck_assert_int_eq(are_proven(), known);
        world_close();
    }
}
END_TEST

START_TEST(
    what_has_staged_is_not_believed_where_another_node_found_wrong_bytes_before_the_sources_told)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 6);
    staged_say(attempt);
    struct node_report r = event_of(REFIT_EV_FAILED);
    r.event.node.attempt = attempt;
    r.event.node.code = RS_EDATALOSS;
    r.event.node.text = "what has landed differs";
    coordinator_report(w.c, TRAINER, &r);
    ck_assert_int_eq(version_of(1)->phase.state, REFIT_ABORTING);
    check_told(0, 1);
    staged_say(attempt);
    check_told(0, 1);
    world_close();
}
END_TEST

START_TEST(a_silent_node_ends_the_attempt_only_when_nothing_of_it_moves)
{
    world_open();
    uint64_t attempt = until_started();
    w.deaf[ROLLOUT] = true;
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    (void)expect(TRAINER, NODE_ORDER_ABORT);
    say(TRAINER, REFIT_EV_QUIESCED, attempt);
    for (unsigned i = 0; i < 20; i++)
        (void)uv_run(&w.loop, UV_RUN_NOWAIT);
    ck_assert_int_eq(version_of(1)->phase.state, REFIT_ABORTING);
    coordinator_node_gone(w.c, ROLLOUT, true, "its lease is over");
    until_phase(1, REFIT_ABORTED);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "n2"));
    world_close();
}
END_TEST

START_TEST(a_node_that_comes_back_without_a_worker_has_lost_it_and_keeps_the_others)
{
    world_open();
    (void)until_started();
    const struct decider *d = decider_find(w.c, "m");
    w.deaf[ROLLOUT] = true;
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    coordinator_node_gone(w.c, ROLLOUT, false, "it joins anew");
    w.deaf[ROLLOUT] = false;
    struct node_report again = attached_of(ROLLOUT, 1);
    again.event.attached.tells_memory = true;
    coordinator_report(w.c, ROLLOUT, &again);
    const struct got *g;
    do
        g = expect(ROLLOUT, NODE_ORDER_REPLY);
    while (g->o.cookie != again.event.cookie || g < &w.orders[8]);
    ck_assert_int_eq(g->o.code, 0);
    node_comes(ROLLOUT);
    ck_assert_ptr_null(roster_find(d, 100 * ROLLOUT));
    ck_assert_ptr_nonnull(roster_find(d, 100 * ROLLOUT + 1));
    ck_assert(!refit_find_worker(d->refit, 100 * ROLLOUT + 1)->gone);
    const struct refit_worker *lost = refit_find_worker(d->refit, 100 * ROLLOUT);
    ck_assert(lost == NULL || lost->gone);
    world_close();
}
END_TEST

/* The answer to a wake is lost with the session: the node has not got the new worker, and tells of the sleeper. */
START_TEST(a_sleeper_whose_wake_nobody_heard_of_sleeps_on)
{
    world_open();
    (void)until_started();
    const struct decider *d = decider_find(w.c, "m");
    struct node_report slept = event_of(REFIT_EV_SLEPT), woken = attached_of(ROLLOUT, 1);
    slept.event.left.worker = 100 * ROLLOUT + 1;
    coordinator_report(w.c, ROLLOUT, &slept);
    say(TRAINER, REFIT_EV_QUIESCED, version_of(1)->attempt);
    say(ROLLOUT, REFIT_EV_QUIESCED, version_of(1)->attempt);
    until_phase(1, REFIT_ABORTED);
    w.deaf[ROLLOUT] = true;
    woken.event.attached.worker = 250;
    coordinator_report(w.c, ROLLOUT, &woken);
    ck_assert(!refit_find_worker(d->refit, 250)->gone);
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    coordinator_node_gone(w.c, ROLLOUT, false, "it joins anew");
    w.deaf[ROLLOUT] = false;
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct node_report again = attached_of(ROLLOUT, rank);
        again.event.cookie = 7000 + rank;
        again.event.attached.tells_memory = true;
        again.event.attached.asleep = rank == 1;
        coordinator_report(w.c, ROLLOUT, &again);
        const struct got *g;
        do
            g = expect(ROLLOUT, NODE_ORDER_REPLY);
        while (g->o.cookie != again.event.cookie);
        ck_assert_msg(g->o.code == 0, "%s", g->text);
    }
    node_comes(ROLLOUT);
    const struct refit_worker *sleeper = refit_find_worker(d->refit, 100 * ROLLOUT + 1);
    ck_assert(sleeper != NULL && !sleeper->gone && sleeper->asleep);
    ck_assert_ptr_null(refit_find_worker(d->refit, 250));
    ck_assert_ptr_null(roster_find(d, 250));
    world_close();
}
END_TEST

/* A new lease of that rank, whose node says: it got version 1 whole, and heard of no commit. What is believed of it. */
static uint64_t held_after_claim(uint32_t rank, uint64_t fold)
{
    const struct decider *d = decider_find(w.c, "m");
    struct node_report left = event_of(REFIT_EV_LEFT), r = attached_of(ROLLOUT, rank);
    left.event.left.worker = 100 * ROLLOUT + rank;
    left.event.left.reason = "its process ended";
    coordinator_report(w.c, ROLLOUT, &left);
    r.event.cookie = 7000 + rank;
    r.event.attached.worker = 100 * ROLLOUT + 50 + rank;
    r.event.attached.uncommitted = 1;
    r.event.attached.uncommitted_content = version_of(1)->publication;
    r.shadow_fold = fold;
    coordinator_report(w.c, ROLLOUT, &r);
    while (expect(ROLLOUT, NODE_ORDER_REPLY)->o.cookie != r.event.cookie)
        ;
    return refit_find_worker(d->refit, r.event.attached.worker)->held;
}

START_TEST(what_a_node_holds_whole_is_taken_for_a_committed_version_only_by_its_fold)
{
    world_open();
    uint64_t attempt = until_started();
    cells_say(ROLLOUT, attempt, 5);
    staged_say(attempt);
    cells_say(TRAINER, attempt, 5);
    say(TRAINER, REFIT_EV_STAGED, attempt);
    until_phase(1, REFIT_COMMITTED);
    ck_assert_uint_eq(held_after_claim(0, 900), 1); /* as staged_say told */
    ck_assert_uint_eq(held_after_claim(1, 900), 0); /* of another rank: wrong bytes, here */
    world_close();
}
END_TEST

/* Its node joins again and says the same of a worker that is known to hold version 1; `proven`: as that is known. */
static const struct refit_worker *told_again(uint32_t rank, bool proven, uint64_t fold,
                                             bool as_shadow)
{
    const struct decider *d = decider_find(w.c, "m");
    struct refit_worker *worker = refit_find_worker(d->refit, 100 * ROLLOUT + rank);
    struct node_report r = attached_of(ROLLOUT, rank);
    ck_assert(worker->held == 1 && worker->proven);
    worker->proven = proven; /* false: as a catch-up leaves it that ends before it is compared */
    r.event.cookie = 7000 + 100 * fold + rank;
    r.event.attached.tells_memory = true;
    r.event.attached.shadow = as_shadow ? 1 : 0;
    r.event.attached.uncommitted = as_shadow ? 0 : 1;
    r.event.attached.uncommitted_content = as_shadow ? 0 : version_of(1)->publication;
    r.shadow_fold = fold;
    coordinator_report(w.c, ROLLOUT, &r);
    while (expect(ROLLOUT, NODE_ORDER_REPLY)->o.cookie != r.event.cookie)
        ;
    return worker;
}

START_TEST(what_was_never_compared_is_compared_when_its_node_tells_of_it_again)
{
    for (int as_shadow = 0; as_shadow < 2; as_shadow++) {
        world_open();
        uint64_t attempt = until_started();
        cells_say(ROLLOUT, attempt, 5);
        staged_say(attempt);
        cells_say(TRAINER, attempt, 5);
        say(TRAINER, REFIT_EV_STAGED, attempt);
        until_phase(1, REFIT_COMMITTED);
        ck_assert_uint_eq(told_again(0, true, 4, as_shadow)->held, 1); /* known anyway */
        ck_assert_uint_eq(told_again(0, false, 900, as_shadow)->held, 1);
        ck_assert(told_again(0, false, 900, as_shadow)->proven);
        ck_assert_uint_eq(told_again(1, false, 900, as_shadow)->held, 0);
        world_close();
    }
}
END_TEST

START_TEST(workers_of_other_nodes_cells_of_other_plans_and_layouts_unheard_of_are_refused)
{
    world_open();
    uint64_t attempt = until_started();
    struct node_report r = event_of(REFIT_EV_READY);
    r.event.cookie = 9;
    r.event.ready.worker = 100 * ROLLOUT;
    r.event.ready.version = 1;
    coordinator_report(w.c, TRAINER, &r); /* not its worker */
    const struct got *g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 9);
    ck_assert_int_eq(g->o.code, RS_ENOTFOUND);
    r = attached_of(TRAINER, 0);
    r.event.cookie = 10;
    r.event.attached.worker = 5;
    r.layout[0] ^= 1;
    coordinator_report(w.c, TRAINER, &r);
    g = expect(TRAINER, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, 10);
    ck_assert_int_eq(g->o.code, RS_ENOTFOUND);
    ck_assert_ptr_nonnull(strstr(g->text, "PutLayout"));
    const struct cell_print far = {.cell = UINT64_MAX};
    struct node_report cells = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &far, .n_cells = 1};
    coordinator_report(w.c, ROLLOUT, &cells);
    (void)expect(ROLLOUT, NODE_ORDER_ABORT);
    ck_assert_ptr_nonnull(strstr(version_of(1)->reason, "cells that the plan has not"));
    world_close();
}
END_TEST

START_TEST(who_asked_before_its_node_fell_silent_gets_no_answer_in_the_next_session)
{
    world_open();
    (void)until_started();
    unsigned before = count(ROLLOUT, NODE_ORDER_REPLY);
    struct node_report r = event_of(REFIT_EV_APPLY);
    r.event.cookie = 9;
    r.event.apply.worker = 100 * ROLLOUT;
    r.event.apply.version = 1;
    r.event.apply.skip = true;
    coordinator_report(w.c, ROLLOUT, &r);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_REPLY), before + 1);
    /* Submit's answer waits for the ledger; a node's Apply waits likewise for APPLIED. Here: nothing is left behind. */
    coordinator_node_silent(w.c, ROLLOUT, "its stream broke");
    ck_assert(queue_empty(&w.c->asked));
    world_close();
}
END_TEST

/* --- drain ------------------------------------------------------------------------------------------ */

struct asking {
    struct waiter waiter;
    unsigned n_answers;
    int code;
    uint64_t value;
    char text[128];
};

static void on_drain_answer(struct waiter *waiter, const struct op_reply *reply)
{
    struct asking *a = container_of(waiter, struct asking, waiter);
    a->n_answers++;
    a->code = reply->code;
    a->value = reply->value;
    (void)snprintf(a->text, sizeof a->text, "%s", reply->text != NULL ? reply->text : "");
}

static int drain(struct asking *a, bool undrain)
{
    struct err e = {0};
    *a = (struct asking){.waiter.done = on_drain_answer};
    return op_drain(w.service, ROLLOUT, undrain, &a->waiter, &e);
}

/* One node with two workers, and a ledger that waits. */
static void drain_world_open(void)
{
    world_open();
    node_comes(ROLLOUT);
    attach(ROLLOUT, 0);
    attach(ROLLOUT, 1);
    while (w.service->n_writes > 0)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    ledger_mem_set_faults(w.service->ledger, &(struct ledger_mem_faults){.hold = true});
}

static int drain_row(const struct ledger_record *row, void *arg)
{
    if (row->kind == LEDGER_DRAIN && strcmp(row->drain.node, "n2") == 0)
        *(uint64_t *)arg = row->drain.since_wall_ns;
    return 0;
}

static uint64_t in_ledger(void)
{
    uint64_t since = 0;
    ck_assert_int_eq(ledger_load(w.service->ledger, drain_row, &since, NULL), 0);
    return since;
}

START_TEST(a_drain_is_in_the_ledger_before_anybody_leaves)
{
    struct asking a, undo;
    drain_world_open();
    ck_assert_int_eq(drain(&a, false), 0);
    for (unsigned i = 0; i < 10; i++)
        (void)uv_run(&w.loop, UV_RUN_NOWAIT);
    ck_assert(a.n_answers == 0 && count(ROLLOUT, NODE_ORDER_EVICT) == 0 && in_ledger() == 0);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert_uint_ne(in_ledger(), 0);
    ck_assert_uint_eq(in_ledger(), w.c->nodes[ROLLOUT].drained_wall_ns);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), 2);
    ck_assert(a.n_answers == 1 && a.code == 0 && a.value == 2);
    ck_assert_int_eq(drain(&undo, true), 0);
    ck_assert_uint_ne(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert(undo.n_answers == 1 && undo.code == 0 && in_ledger() == 0);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    world_close();
}
END_TEST

START_TEST(a_drain_that_can_not_be_written_is_none)
{
    struct asking a;
    drain_world_open();
    ledger_mem_set_faults(w.service->ledger,
                          &(struct ledger_mem_faults){.hold = true, .fail_at = 1});
    ck_assert_int_eq(drain(&a, false), 0);
    ck_assert_uint_eq(ledger_mem_release(w.service->ledger, 1), 1);
    ck_assert(a.n_answers == 1 && a.code == RS_EFULL);
    ck_assert_uint_eq(w.c->nodes[ROLLOUT].drained_wall_ns, 0);
    ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), 0);
    ck_assert(queue_empty(&w.c->drains));
    world_close();
}
END_TEST

/* Who asked is answered once. Once the ledger has it the workers leave, whatever he was told. */
START_TEST(a_drain_is_whole_or_none_at_every_failed_allocation)
{
    bool struck = true;
    for (long i = 1; struck; i++) {
        struct asking a;
        drain_world_open();
        mem_fail_at(i);
        int rc = drain(&a, false);
        if (rc == 0)
            (void)ledger_mem_release(w.service->ledger, 1);
        struck = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(rc != 0 ? rc : a.code, struck ? RS_ENOMEM : 0);
        ck_assert_uint_eq(a.n_answers, rc == 0 ? 1 : 0);
        ck_assert_uint_eq(in_ledger(), w.c->nodes[ROLLOUT].drained_wall_ns);
        for (unsigned n = 0; in_ledger() != 0 && n < 2; n++)
            (void)expect(ROLLOUT, NODE_ORDER_EVICT);
        ck_assert_uint_eq(count(ROLLOUT, NODE_ORDER_EVICT), in_ledger() != 0 ? 2 : 0);
        ck_assert(queue_empty(&w.c->drains));
        world_close();
    }
}
END_TEST

#define TESTS(X)                                                                                    \
    X(both_nodes_get_the_same_input_and_each_the_way_to_the_other)                                  \
    X(what_all_nodes_staged_commits_and_the_ledger_keeps_what_memory_holds)                         \
    X(nodes_that_saw_different_content_end_it_and_the_destination_is_blamed)                        \
    X(what_a_node_received_is_believed_in_short_where_it_is_what_the_sources_told)                  \
    X(a_node_that_received_something_else_is_asked_for_each_cell_and_blamed_by_it)                  \
    X(a_node_that_is_sooner_than_the_sources_words_is_asked_for_each_cell)                          \
    X(who_is_in_doubt_when_another_has_differed_is_not_believed)                                    \
    X(sums_of_cells_that_the_plan_has_not_end_the_attempt)                                          \
    X(all_workers_of_a_node_that_had_staged_wrong_bytes_are_not_believed_any_more)                  \
    X(sources_that_differ_before_anything_was_written_take_nothing_from_who_receives)               \
    X(a_watcher_hears_of_the_last_bytes_that_landed)                                                \
    X(what_is_staged_is_proven_by_what_the_sources_node_told_before_it_staged)                      \
    X(wrong_bytes_are_found_by_it_and_never_proven)                                                 \
    X(a_node_that_keeps_cells_of_its_sources_to_itself_is_named)                                    \
    X(cells_that_a_node_keeps_to_itself_are_missed_where_another_tells_in_short)                    \
    X(nobody_speaks_for_ranks_of_another_node)                                                      \
    X(who_was_compared_is_believed_though_the_sources_node_fails_afterwards)                        \
    X(what_has_staged_is_not_believed_where_another_node_found_wrong_bytes_before_the_sources_told) \
    X(a_silent_node_ends_the_attempt_only_when_nothing_of_it_moves)                                 \
    X(a_node_that_comes_back_without_a_worker_has_lost_it_and_keeps_the_others)                     \
    X(a_sleeper_whose_wake_nobody_heard_of_sleeps_on)                                               \
    X(what_a_node_holds_whole_is_taken_for_a_committed_version_only_by_its_fold)                    \
    X(what_was_never_compared_is_compared_when_its_node_tells_of_it_again)                          \
    X(workers_of_other_nodes_cells_of_other_plans_and_layouts_unheard_of_are_refused)               \
    X(who_asked_before_its_node_fell_silent_gets_no_answer_in_the_next_session)                     \
    X(a_drain_is_in_the_ledger_before_anybody_leaves)                                               \
    X(a_drain_that_can_not_be_written_is_none)                                                      \
    X(a_drain_is_whole_or_none_at_every_failed_allocation)
#include "test/lib/main.h"
