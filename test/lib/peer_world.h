/* A coordinator and members in one process over the in-memory twin, with a clock of their own, and a ledger of what the
 * contract of peer.h promises: every callback is checked against it. Header only; one test program includes it.
 *
 * Each report says in its cookie which of its member's sessions it was made in (high half) and its number there; orders
 * the same of the coordinator's. So what is lost, doubled, turned around or late shows. */
#ifndef TEST_LIB_PEER_WORLD_H
#define TEST_LIB_PEER_WORLD_H

#include <check.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "peer/private.h"
#include "rpc/rpc_link_mem.h"

enum {
    WORLD_MEMBERS = 3,
    WORLD_NODES = WORLD_MEMBERS + 1,
    BEAT_MS = 500,
    LEASE_MS = 2500,
    SLACK_MS = 1000
};
#define WORLD_MS UINT64_C(1000000)

struct member_world {
    unsigned node;
    struct peer *peer; /* NULL: stopped */
    struct rpc_link *link;
    uint64_t incarnation;
    struct peer_member says; /* what introduce tells, where not 0 */
    bool quiet;              /* its data plane; false: introduce says not yet */
    bool frozen;             /* SIGSTOP: neither its loop nor its link turns */
    bool joined;             /* by its callbacks */
    uint64_t session;        /* of this member, counted over restarts */
    uint64_t n_sent;         /* reports in this session */
    uint64_t order_session, n_orders;
    uint64_t lease_until_ns;
    uint64_t coordinator;
    unsigned n_welcomed, n_severed, n_order;
    char severed[PEER_WHY_BYTES];
};

struct node_world { /* by the coordinator's callbacks */
    enum { NODE_GONE, NODE_HERE, NODE_SILENT_ } state;
    uint64_t session; /* of the coordinator with this node, counted over restarts */
    uint64_t n_sent;  /* orders in it */
    uint64_t report_session, n_reports; /* what the reports of this session say */
    uint64_t newest_report_session;     /* of any session before */
    unsigned n_joined, n_silent, n_lost, n_report;
    bool again;
    char why[PEER_WHY_BYTES];
    struct node_report last;
};

struct world {
    uv_loop_t loop;
    struct peer *coordinator; /* NULL: stopped */
    struct rpc_mem *server;
    uint64_t coordinator_incarnation;
    bool coordinator_frozen;
    struct member_world members[WORLD_NODES]; /* [0] is not used */
    struct node_world nodes[WORLD_NODES];
    struct member_world *starting;
    int refuse; /* what admit says */
    unsigned n_stopped;
    uint64_t own_lease_ns;
};

static struct world *world; /* the one of this process: hooks of peer.h take no argument */
static uint64_t world_now;
static const struct peer_node world_list[WORLD_NODES] = {{"n0", "127.0.0.1:7070"},
                                                         {"n1", "127.0.0.1:7071"},
                                                         {"n2", "127.0.0.1:7072"},
                                                         {"n3", "127.0.0.1:7073"}};

static uint64_t rnd(uint64_t *s, uint64_t below)
{
    return random_next(s) % below;
}

static uint64_t world_clock(void)
{
    return world_now;
}

static uint64_t tag(uint64_t session, uint64_t n)
{
    return session << 32 | n;
}

/* --- the coordinator's callbacks -------------------------------------------------------------------- */

static int on_admit(void *arg, uint32_t node, const struct peer_member *m, struct err *e)
{
    struct world *w = arg;
    (void)node;
    (void)m;
    return w->refuse != 0 ? err_set(e, w->refuse, "the ledger is behind") : 0;
}

static void on_joined(void *arg, uint32_t node, const struct peer_member *m, bool again)
{
    struct world *w = arg;
    struct node_world *n = &w->nodes[node];
    ck_assert_msg(n->state == NODE_GONE, "n%u joined while not lost", node);
    n->state = NODE_HERE;
    n->session++;
    n->n_sent = 0;
    if (n->report_session > n->newest_report_session)
        n->newest_report_session = n->report_session;
    n->report_session = 0;
    n->n_joined++;
    n->again = again;
    ck_assert_uint_ne(m->incarnation, 0);
}

static void on_report(void *arg, uint32_t node, const struct node_report *r)
{
    struct world *w = arg;
    struct node_world *n = &w->nodes[node];
    ck_assert_msg(n->state == NODE_HERE, "a report of n%u, which is not here", node);
    n->n_report++;
    n->last = *r;
    if (r->type != NODE_REPORT_PUBLISH_ASK)
        return;
    uint64_t session = r->cookie >> 32, number = r->cookie & UINT32_MAX;
    if (n->report_session == 0) {
        ck_assert_msg(session > n->newest_report_session,
                      "n%u: a report of session %" PRIu64 " after one of %" PRIu64, node, session,
                      n->newest_report_session);
        n->report_session = session;
        n->n_reports = 0;
    }
    ck_assert_msg(session == n->report_session, "n%u: reports of two sessions in one", node);
    ck_assert_msg(number == n->n_reports, "n%u: report %" PRIu64 " where %" PRIu64 " was due", node,
                  number, n->n_reports);
    n->n_reports++;
}

static void on_silent(void *arg, uint32_t node, const char *why)
{
    struct node_world *n = &((struct world *)arg)->nodes[node];
    ck_assert_msg(n->state == NODE_HERE, "n%u is silent and was not here", node);
    n->state = NODE_SILENT_;
    n->n_silent++;
    (void)snprintf(n->why, sizeof n->why, "%s", why);
}

static void on_lost(void *arg, uint32_t node, const char *why)
{
    struct world *w = arg;
    struct node_world *n = &w->nodes[node];
    struct member_world *m = &w->members[node];
    ck_assert_msg(n->state == NODE_SILENT_, "n%u is lost and was not silent", node);
    n->state = NODE_GONE;
    n->n_lost++;
    (void)snprintf(n->why, sizeof n->why, "%s", why);
    /* The promise: nothing of it moves. Its lease has run out, or its data plane is quiet or dead. */
    ck_assert_msg(m->lease_until_ns <= world_now || m->quiet || m->peer == NULL,
                  "n%u is lost (%s) while its lease runs for %" PRIu64 " ms more", node, why,
                  (m->lease_until_ns - world_now) / WORLD_MS);
}

static void on_own_lease(void *arg, uint64_t until_ns)
{
    ((struct world *)arg)->own_lease_ns = until_ns;
}

/* --- a member's callbacks --------------------------------------------------------------------------- */

static int on_introduce(void *arg, struct peer_member *ret)
{
    struct member_world *m = arg;
    static const char *const domains[] = {"", "rack"};
    if (!m->quiet)
        return RS_EUNAVAIL;
    *ret = m->says;
    ret->n_devices = 2;
    ret->domain_of_device = domains;
    return 0;
}

static void on_welcomed(void *arg, uint64_t coordinator)
{
    struct member_world *m = arg;
    ck_assert(!m->joined);
    m->joined = true;
    m->quiet = false; /* from now on its data plane may move bytes */
    m->session++;
    m->n_sent = 0;
    m->order_session = 0;
    m->coordinator = coordinator;
    m->n_welcomed++;
}

static void on_order(void *arg, const struct node_order *o)
{
    struct member_world *m = arg;
    uint64_t session = o->cookie >> 32, number = o->cookie & UINT32_MAX;
    ck_assert(m->joined);
    m->n_order++;
    if (o->type != NODE_ORDER_REPLY)
        return;
    if (m->order_session == 0) {
        m->order_session = session;
        m->n_orders = 0;
    }
    ck_assert_uint_eq(session, m->order_session);
    ck_assert_uint_eq(number, m->n_orders);
    m->n_orders++;
}

static void on_severed(void *arg, const char *why)
{
    struct member_world *m = arg;
    ck_assert(m->joined);
    m->joined = false;
    m->n_severed++;
    (void)snprintf(m->severed, sizeof m->severed, "%s", why);
}

static void on_lease(void *arg, uint64_t until_ns)
{
    struct member_world *m = arg;
    ck_assert(m->joined);
    ck_assert_uint_ge(until_ns, m->lease_until_ns);
    m->lease_until_ns = until_ns;
}

/* --- making ----------------------------------------------------------------------------------------- */

static struct peer *world_resolve(void *context)
{
    return ((struct world *)context)->coordinator;
}

static int world_open_link(uv_loop_t *loop, const struct rpc_link_options *options,
                           const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                           struct err *e)
{
    (void)loop;
    int r = rpc_link_mem_open(world->coordinator_frozen ? NULL : world->server, options, events,
                              arg, ret, e);
    if (r == 0)
        world->starting->link = *ret;
    return r;
}

static struct peer_options world_options(uint32_t me)
{
    return (struct peer_options){.loop = world != NULL ? &world->loop : NULL,
                                 .nodes = world_list,
                                 .n_nodes = WORLD_NODES,
                                 .me = me,
                                 .beat_ms = BEAT_MS,
                                 .lease_ms = LEASE_MS,
                                 .slack_ms = SLACK_MS,
                                 .environment = "backend host, transport tcp",
                                 .release = "1",
                                 .data_address = "127.0.0.1",
                                 .clock = world_clock,
                                 .open_link = world_open_link};
}

static void coordinator_begin(void)
{
    struct peer_options o = world_options(0);
    size_t n;
    const struct rpc_method *methods = peer_methods(&n);
    struct rpc_server_options server = {.context = world, .max_queued_messages = 1024};
    struct err e = {0};
    o.incarnation = ++world->coordinator_incarnation;
    o.events = (struct peer_events){.arg = world,
                                    .admit = on_admit,
                                    .joined = on_joined,
                                    .report = on_report,
                                    .silent = on_silent,
                                    .lost = on_lost,
                                    .lease = on_own_lease};
    ck_assert_msg(peer_start(&o, &world->coordinator, &e) == 0, "%s", e.text);
    ck_assert_int_eq(rpc_mem_new(&server, methods, n, &world->server, &e), 0);
    for (unsigned i = 1; i < WORLD_NODES; i++)
        if (world->members[i].link != NULL)
            rpc_link_mem_join(world->members[i].link, world->server);
}

static void member_begin(unsigned node)
{
    struct member_world *m = world->starting = &world->members[node];
    struct peer_options o = world_options(node);
    struct err e = {0};
    m->incarnation = m->incarnation == 0 ? 100 * node + 1 : m->incarnation + 1;
    o.incarnation = m->incarnation;
    m->node = node;
    m->quiet = true; /* the data plane of the one before died with it */
    m->lease_until_ns = 0;
    m->joined = false;
    o.events = (struct peer_events){.arg = m,
                                    .introduce = on_introduce,
                                    .welcomed = on_welcomed,
                                    .order = on_order,
                                    .severed = on_severed,
                                    .lease = on_lease};
    ck_assert_msg(peer_start(&o, &m->peer, &e) == 0, "%s", e.text);
}

static void world_begin(void)
{
    world = mem_zalloc(sizeof *world);
    ck_assert_ptr_nonnull(world);
    world_now = UINT64_C(1000000) * WORLD_MS;
    ck_assert_int_eq(uv_loop_init(&world->loop), 0);
    peer_set_resolver(world_resolve);
    coordinator_begin();
}

/* --- turning ---------------------------------------------------------------------------------------- */

static void world_turn(void)
{
    for (int i = 0; i < 3; i++) {
        for (unsigned k = 1; k < WORLD_NODES; k++)
            if (world->members[k].link != NULL && !world->members[k].frozen &&
                !world->coordinator_frozen)
                (void)rpc_link_mem_run(world->members[k].link);
        if (world->server != NULL)
            rpc_mem_run(world->server);
        (void)uv_run(&world->loop, UV_RUN_NOWAIT);
    }
}

static void world_step(uint64_t ms)
{
    for (uint64_t t = 0; t < ms; t += 50) {
        world_now += 50 * WORLD_MS;
        if (world->coordinator != NULL && !world->coordinator_frozen)
            peer_tick(world->coordinator);
        for (unsigned k = 1; k < WORLD_NODES; k++)
            if (world->members[k].peer != NULL && !world->members[k].frozen)
                peer_tick(world->members[k].peer);
        world_turn();
    }
}

static void on_stopped(void *arg)
{
    (void)arg;
    world->n_stopped++;
}

/* Its process is killed: nothing is said. */
static void member_kill(unsigned node)
{
    struct member_world *m = &world->members[node];
    unsigned before = world->n_stopped;
    m->frozen = false;
    rpc_link_mem_cut(m->link, "killed");
    m->quiet = true;
    struct peer *p = m->peer;
    m->peer = NULL;
    m->joined = false;
    p->options.events = (struct peer_events){0}; /* nobody hears what it still thinks */
    (void)rpc_link_mem_run(m->link);
    peer_stop(p, on_stopped, NULL);
    struct rpc_link *l = m->link;
    m->link = NULL;
    (void)rpc_link_mem_run(l);
    while (world->n_stopped == before)
        (void)uv_run(&world->loop, UV_RUN_NOWAIT);
}

static void member_end(unsigned node)
{
    struct member_world *m = &world->members[node];
    unsigned before = world->n_stopped;
    m->frozen = false;
    m->quiet = true;
    peer_stop(m->peer, on_stopped, NULL);
    for (int i = 0; i < 40 && world->n_stopped == before; i++) {
        world_now += 50 * WORLD_MS;
        if (m->link != NULL && m->peer != NULL && i > 0 && m->peer->member->link != NULL)
            member_tick(m->peer, world_now);
        struct rpc_link *l = m->link;
        bool closing = m->peer->member->call == NULL;
        (void)rpc_link_mem_run(l);
        if (closing)
            m->link = NULL;
        rpc_mem_run(world->server);
        (void)uv_run(&world->loop, UV_RUN_NOWAIT);
        if (m->link == NULL)
            break;
    }
    m->link = NULL;
    m->joined = false;
    while (world->n_stopped == before)
        (void)uv_run(&world->loop, UV_RUN_NOWAIT);
    m->peer = NULL;
}

/* kill: without a word, as its process's end would be. */
static void coordinator_end(bool kill)
{
    unsigned before = world->n_stopped;
    struct peer *p = world->coordinator;
    world->coordinator_frozen = false;
    world->coordinator = NULL;
    if (kill)
        for (unsigned k = 1; k < WORLD_NODES; k++)
            if (world->members[k].link != NULL)
                rpc_link_mem_cut(world->members[k].link, "connection reset");
    p->options.events = (struct peer_events){0};
    peer_stop(p, on_stopped, NULL);
    world_turn();
    while (world->n_stopped == before)
        (void)uv_run(&world->loop, UV_RUN_NOWAIT);
    for (unsigned k = 1; k < WORLD_NODES; k++)
        if (world->members[k].link != NULL)
            rpc_link_mem_cut(world->members[k].link, "connection refused");
    rpc_mem_cancel_all(world->server);
    rpc_mem_free(world->server);
    world->server = NULL;
    for (unsigned k = 1; k < WORLD_NODES; k++)
        world->nodes[k].state = NODE_GONE; /* the next one knows nothing of it */
    world_turn();
}

static void world_end(void)
{
    for (unsigned k = 1; k < WORLD_NODES; k++)
        if (world->members[k].peer != NULL)
            member_kill(k);
    if (world->coordinator != NULL)
        coordinator_end(true);
    (void)uv_run(&world->loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&world->loop), 0);
    mem_free(world);
    world = NULL;
}

/* --- saying ----------------------------------------------------------------------------------------- */

static int world_report(unsigned node)
{
    struct member_world *m = &world->members[node];
    struct node_report r = {
        .type = NODE_REPORT_PUBLISH_ASK, .model = "m", .cookie = tag(m->session, m->n_sent)};
    int x = peer_report(m->peer, &r);
    if (x == 0)
        m->n_sent++;
    return x;
}

static int world_order(unsigned node)
{
    struct node_world *n = &world->nodes[node];
    struct node_order o = {
        .type = NODE_ORDER_REPLY, .model = "m", .cookie = tag(n->session, n->n_sent)};
    int x = peer_order(world->coordinator, node, &o);
    if (x == 0)
        n->n_sent++;
    return x;
}

static struct peer_view world_look(unsigned node)
{
    struct peer_view v;
    peer_look(world->coordinator, node, &v);
    return v;
}

#endif
