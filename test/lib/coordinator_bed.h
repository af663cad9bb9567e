/* The coordinator of three nodes, two of which are played by the test: what they report, in short, and the orders that they got.
 * For tests with Check; header only; one test program includes it. */
#ifndef RS_TEST_COORDINATOR_BED_H
#define RS_TEST_COORDINATOR_BED_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/attempt_input.h"
#include "service/cells_sum.h"
#include "service/coordinator.h"
#include "test/lib/service_bed.h"

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

static inline int on_send(struct service *s, uint32_t node, const struct node_order *o)
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

static inline void on_look(const struct service *s, uint32_t node, struct peer_view *ret)
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

static inline struct layout_entry *layout_put(const char *text)
{
    struct layout *l = NULL;
    struct layout_entry *entry;
    struct err e = {0};
    ck_assert_msg(layout_from_json(text, strlen(text), &l, &e) == 0, "%s", e.text);
    ck_assert_msg(layout_check(l, &e) == 0 && layout_digest(l) == 0, "%s", e.text);
    ck_assert_int_eq(layouts_add(&w.service->layouts, l, &entry, &e), 0);
    return entry;
}

static inline void world_open(void)
{
    struct err e = {0};
    w = (struct world){0};
    config_init(&w.config);
    for (uint32_t i = 0; i < N_NODES; i++)
        (void)snprintf(w.nodes[i].name, sizeof w.nodes[i].name, "n%u", i);
    (void)snprintf(w.config.node, sizeof w.config.node, "n0");
    w.config.nodes = w.nodes;
    w.config.n_nodes = N_NODES;
    w.store = ledger_store_new();
    struct service *s = w.service = service_bed_open(&w.loop, &w.config, w.store);
    s->incarnation = 77;
    ck_assert_int_eq(coordinator_new(s, &s->coordinator, &e), 0);
    w.c = s->coordinator;
    w.c->send = on_send;
    w.c->look = on_look;
    w.source = layout_put(source_text);
    w.destination = layout_put(destination_text);
}

static inline void world_close(void)
{
    struct service *s = w.service;
    while (s->n_jobs > 0)
        (void)uv_run(&w.loop, UV_RUN_ONCE);
    s->stopping = true;
    ledger_close(s->ledger);
    while (!queue_empty(&w.c->deciders))
        decider_close(container_of(w.c->deciders.next, struct decider, in));
    service_bed_close(s);
    ledger_store_free(w.store);
}

/* The next order of that type to that node that was not read yet; the loop turns until it has come. */
static inline const struct got *expect(uint32_t node, enum node_order_type type)
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

static inline unsigned count(uint32_t node, enum node_order_type type)
{
    unsigned n = 0;
    for (unsigned i = 0; i < w.n_orders; i++)
        n += w.orders[i].node == node && w.orders[i].o.type == type;
    return n;
}

/* --- reports --------------------------------------------------------------------------------------- */

static inline struct node_report event_of(enum refit_event_type type)
{
    return (struct node_report){.type = NODE_REPORT_EVENT, .model = "m", .event = {.type = type}};
}

static inline void node_comes(uint32_t node)
{
    struct node_report r = event_of(REFIT_EV_NODE_UP);
    r.model = "";
    r.event.node.text = "";
    r.event.node.data_plane = 90 + node;
    r.data_port = (uint16_t)(7000 + node);
    coordinator_report(w.c, node, &r);
}

static inline struct node_report attached_of(uint32_t node, uint32_t rank)
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

static inline void attach(uint32_t node, uint32_t rank)
{
    struct node_report r = attached_of(node, rank);
    coordinator_report(w.c, node, &r);
    const struct got *g = expect(node, NODE_ORDER_REPLY);
    ck_assert_uint_eq(g->o.cookie, r.event.cookie);
    ck_assert_msg(g->o.code == 0, "%s", g->text);
}

static inline void on_submitted(struct waiter *waiter, const struct op_reply *reply)
{
    (void)waiter;
    w.submit_code = reply->code;
    w.submitted = true;
}

static inline void submit(uint64_t version)
{
    struct err e = {0};
    const char id[] = {'r', (char)('0' + version), '\0'};
    struct op_submit o = {
        .model = "m", .version = version, .request_id = id, .options = "", .options_words = ""};
    w.submit.done = on_submitted;
    ck_assert_msg(op_submit(w.service, &o, &w.submit, &e) == 0, "%s", e.text);
}

static inline void publish(uint32_t rank, uint64_t version)
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

/* As part of its first push of the version. */
static inline void push(uint32_t rank, uint64_t version)
{
    struct node_report r = event_of(REFIT_EV_PUBLISHED);
    publish(rank, version);
    r.event.published.worker = 100 * TRAINER + rank;
    r.event.published.version = version;
    r.event.published.push = 1;
    coordinator_report(w.c, TRAINER, &r);
}

static inline void say(uint32_t node, enum refit_event_type type, uint64_t attempt)
{
    struct node_report r = event_of(type);
    r.event.node.attempt = attempt;
    r.event.node.text = "";
    coordinator_report(w.c, node, &r);
}

static inline void cells_say(uint32_t node, uint64_t attempt, uint64_t fingerprint)
{
    const struct cell_print print = {
        .cell = 0, .fingerprint = fingerprint, .layout = node == TRAINER ? 0 : 1, .rank = 0};
    struct node_report r = {
        .type = NODE_REPORT_CELLS, .model = "m", .attempt = attempt, .cells = &print, .n_cells = 1};
    coordinator_report(w.c, node, &r);
}

/* One cell, in short. */
static inline void sum_say(uint64_t attempt, uint64_t fingerprint)
{
    const struct cell_print print = {.cell = 0, .fingerprint = fingerprint, .layout = 1};
    struct cell_run run;
    struct node_report r = {
        .type = NODE_REPORT_CELL_SUM, .model = "m", .attempt = attempt, .runs = &run};
    (void)cells_sum(&print, 1, &run, 1, &r.n_runs, r.digest);
    coordinator_report(w.c, ROLLOUT, &r);
}

static inline void staged_say(uint64_t attempt)
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
static inline uint64_t until_started(void)
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

static inline const struct refit_version *version_of(uint64_t version)
{
    const struct decider *d = decider_find(w.c, "m");
    return refit_find_version(d->refit, version);
}

static inline void until_phase(uint64_t version, enum refit_phase phase)
{
    for (unsigned turn = 0; turn < WAIT_TURNS; turn++) {
        if (version_of(version)->phase.state == (int)phase)
            return;
        (void)uv_run(&w.loop, turn % 2 == 0 ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    }
    ck_abort_msg("version %llu is %s (%s)", (unsigned long long)version,
                 refit_phase_name(version_of(version)->phase.state), version_of(version)->reason);
}

#endif
