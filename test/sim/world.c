/* The world's actors and its clock. */
#include "test/sim/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/random.h"

#define ULL(x) ((unsigned long long)(x))
enum { MS = 1000 * 1000 };
#define S UINT64_C(1000000000)

uint64_t world_random(struct world *w, uint64_t n)
{
    return random_next(&w->random) % n;
}

bool world_chance(struct world *w, double p)
{
    return (double)(random_next(&w->random) >> 11) < p * 9007199254740992.0;
}

/* A fault's chance: none in the calm. */
static bool fault(struct world *w, double p)
{
    return world_chance(w, p * w->trouble) && !w->calm;
}

static void say(const struct world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void say(const struct world *w, const char *format, ...)
{
    if (!w->trace)
        return;
    va_list args;
    va_start(args, format);
    printf("%12.3f ms %6llu  ", (double)w->now_ns / 1e6, ULL(w->step));
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

struct version_truth *world_version(struct world *w, uint64_t version)
{
    for (uint32_t i = 0; i < w->n_versions; i++)
        if (w->versions[i].version == version)
            return &w->versions[i];
    rs_assert(w->n_versions < MAX_VERSIONS);
    w->versions[w->n_versions] = (struct version_truth){.version = version};
    return &w->versions[w->n_versions++];
}

struct worker *world_worker(struct world *w, uint64_t id)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].id == id && id != 0)
            return &w->workers[i];
    return NULL;
}

/* --- messages --- */

static struct message *send(struct world *w, enum message_type type, uint64_t at_ns)
{
    if (w->n_messages >= MAX_MESSAGES)
        world_fail(w, "too many messages: somebody talks without end");
    struct message *m = &w->messages[w->n_messages++];
    *m = (struct message){.at_ns = at_ns,
                          .number = ++w->n_sent,
                          .type = type,
                          .coordinator_life = w->coordinator_life};
    return m;
}

static bool take(struct world *w, struct message *ret)
{
    if (w->n_messages == 0)
        return false;
    uint32_t best = 0;
    for (uint32_t i = 1; i < w->n_messages; i++) {
        const struct message *a = &w->messages[i], *b = &w->messages[best];
        if (a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->number < b->number))
            best = i;
    }
    *ret = w->messages[best];
    w->messages[best] = w->messages[--w->n_messages];
    return true;
}

static uint64_t soon(struct world *w, uint64_t max_ms)
{
    return w->now_ns + 1000 + world_random(w, max_ms * MS);
}

static uint64_t ask(struct world *w, enum request_kind kind, uint64_t version, uint8_t content)
{
    rs_assert(w->n_requests < MAX_REQUESTS);
    w->requests[w->n_requests] = (struct request){.kind = kind,
                                                  .open = true,
                                                  .version = version,
                                                  .content = content,
                                                  .coordinator_life = w->coordinator_life};
    return ++w->n_requests;
}

/* An event for the decider, `ms` from now at most. A request's cookie opens when it arrives. */
static struct refit_event *tell(struct world *w, enum refit_event_type type, uint64_t ms)
{
    struct message *m = send(w, TO_COORDINATOR, soon(w, ms));
    m->ev.type = type;
    return &m->ev;
}

/* What a node says goes first in, first out; now and then it comes twice, the second time late. */
static void node_says(struct world *w, uint32_t node, enum refit_event_type type,
                      const struct refit_event *more)
{
    struct node *n = &w->nodes[node];
    uint64_t at = soon(w, 3);
    at = at > n->last_out_ns ? at : n->last_out_ns + 1;
    n->last_out_ns = at;
    bool about_attempt = type != REFIT_EV_NODE_UP && type != REFIT_EV_NODE_LOST;
    int copies = about_attempt && fault(w, 0.05) ? 2 : 1;
    for (int i = 0; i < copies; i++) {
        struct message *m = send(w, TO_COORDINATOR, i == 0 ? at : at + world_random(w, 2 * S));
        m->ev = *more;
        m->ev.type = type;
        m->ev.node.node = node;
        m->life = n->life;
    }
}

/* What a node does next comes to its end after a while, if it lives. */
enum { WORK_PREPARED, WORK_READ, WORK_STAGED, WORK_APPLIED };

static void node_step(struct world *w, uint32_t node, uint32_t what, const struct refit_action *a)
{
    struct message *m = send(w, NODE_STEP, soon(w, 15));
    m->who = node;
    m->step = what;
    m->life = w->nodes[node].life;
    m->action = *a;
}

/* --- the coordinator --- */

struct write {
    struct ledger_transaction t; /* first: the ledger gives it back */
    uint64_t sequence;
    struct world *w;
    uint64_t life;
};

static void step(struct world *w, struct refit_event *ev);

static void written(struct ledger_transaction *t, int code, const struct err *e)
{
    struct write *write = (struct write *)(void *)t;
    struct world *w = write->w;
    struct refit_event ev = {.type = code == 0 ? REFIT_EV_DURABLE : REFIT_EV_NOT_DURABLE,
                             .durable = {.sequence = write->sequence, .code = code}};
    struct err copy = *e; /* lies in the transaction, which ends here */
    ev.durable.text = copy.text;
    bool alive = w->refit != NULL && write->life == w->coordinator_life;
    ledger_transaction_close(t);
    free(write);
    if (alive)
        step(w, &ev);
}

static void persist(struct world *w, const struct refit_action *a)
{
    struct write *write = calloc(1, sizeof *write);
    rs_assert(write != NULL && ledger_transaction_init(&write->t, a->records, a->n_records) == 0);
    write->t.done = written;
    write->sequence = a->sequence;
    write->w = w;
    write->life = w->coordinator_life;
    ledger_submit(w->ledger, &write->t);
    send(w, LEDGER_WRITES, soon(w, 4));
}

static uint64_t source_content(const struct world *w)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->layouts[w->workers[i].layout].side == REFIT_SOURCE)
            sum += w->workers[i].salt * (w->workers[i].rank + 1);
    return sum;
}

static void to_node(struct world *w, const struct refit_action *a)
{
    struct node *n = &w->nodes[a->node];
    if (a->type == REFIT_DO_PREPARE && n->up && n->known_life == n->life) {
        n->attempt = a->attempt; /* from now on it counts as not quiet */
        n->version = a->version;
        n->started = n->read = false;
        n->content = source_content(w);
        for (uint32_t i = 0; i < w->n_workers; i++) {
            const struct refit_worker *r = refit_find_worker(w->refit, w->workers[i].id);
            n->part[i] = w->workers[i].node == a->node && r != NULL && r->taking_part;
            n->skip[i] = n->part[i] && refit_holds_already(w->refit, r);
        }
    }
    uint64_t at = soon(w, 3);
    at = at > n->last_in_ns ? at : n->last_in_ns + 1;
    n->last_in_ns = at;
    struct message *m = send(w, TO_NODE, at);
    m->action = *a;
    m->who = a->node;
    m->life = n->known_life;
}

static void apply(struct world *w, const struct worker *worker, uint64_t version)
{
    struct refit_event *ev = tell(w, REFIT_EV_APPLY, 20);
    ev->cookie = UINT64_MAX;
    ev->apply.worker = worker->id;
    ev->apply.version = version;
    ev->apply.skip = world_chance(w, 0.2);
}

/* What a client does about "try again". */
static void apply_again(struct world *w, const struct request *q)
{
    const struct worker *worker = world_worker(w, q->worker);
    if (q->kind == ASK_APPLY && worker != NULL && worker->attached)
        apply(w, worker, q->version);
}

static void act(struct world *w, const struct refit_action *a)
{
    check_action(w, a);
    switch (a->type) {
    case REFIT_DO_PERSIST:
        persist(w, a);
        break;
    case REFIT_DO_PLAN: {
        static const uint8_t digest[16] = {1};
        struct refit_event *ev = tell(w, REFIT_EV_PLANNED, 3);
        ev->planned.attempt = a->attempt;
        ev->planned.digest = digest;
        ev->planned.code = fault(w, 0.01) ? RS_EINTERNAL : 0;
        break;
    }
    case REFIT_DO_PREPARE:
    case REFIT_DO_START:
    case REFIT_DO_ABORT:
        to_node(w, a);
        break;
    case REFIT_DO_EXPEL:
        w->n_expels++;
        send(w, NODE_DIES, soon(w, 5))->who = a->node;
        break;
    case REFIT_DO_APPLY: {
        struct worker *worker = world_worker(w, a->worker);
        if (worker == NULL || !worker->attached)
            break; /* it is dead; that is on its way */
        if (!worker->shadow.whole || worker->shadow.version != a->version)
            world_fail(w, "apply of version %llu from a shadow that does not hold it",
                       ULL(a->version));
        worker->live.whole = false; /* from now on it is being written to */
        node_step(w, worker->node, WORK_APPLIED, a);
        break;
    }
    case REFIT_DO_TELL: {
        const struct worker *worker = world_worker(w, a->worker);
        if (worker == NULL)
            break;
        struct message *m = send(w, TO_WORKER, soon(w, 3));
        m->who = (uint32_t)(worker - w->workers);
        m->life = worker->life;
        m->action = *a;
        break;
    }
    case REFIT_DO_NOTIFY:
        say(w, "version %llu attempt %llu: %s %s", ULL(a->version), ULL(a->attempt),
            refit_phase_name((int)a->phase), a->text);
        w->n_aborts += a->phase == REFIT_ABORTED;
        break;
    case REFIT_DO_SET_DEADLINE:
        w->deadline_ns = a->at_ns;
        if (a->at_ns != REFIT_NEVER) {
            struct message *m = send(w, TICK, a->at_ns > w->now_ns ? a->at_ns : w->now_ns + 1);
            w->tick_number = m->number;
        }
        break;
    case REFIT_DO_REPLY:
        say(w, "reply %llu: %s %s", ULL(a->cookie), err_name(a->code), a->text);
        if (a->code == RS_EUNAVAIL)
            apply_again(w, &w->requests[a->cookie - 1]);
        break;
    case REFIT_DO_COMMITTED:
        say(w, "version %llu is committed", ULL(a->version));
        break;
    case REFIT_DO_MARK:
        break;
    }
}

static void crash(struct world *w);

/* Gives one event, now and then with memory that runs out first: that must change nothing. */
static void step(struct world *w, struct refit_event *ev)
{
    ev->now_ns = w->now_ns;
    ev->wall_ns = w->wall_ns + w->now_ns;
    w->step++;
    if (fault(w, 0.05)) {
        mem_fail_at(1 + (long)world_random(w, 4));
        int rc = refit_step(w->refit, ev, &w->update);
        mem_fail_at(0);
        if (rc != 0) {
            rs_assert(rc == RS_ENOMEM && w->update.n_actions == 0);
            w->n_no_memory++;
            rs_assert(refit_step(w->refit, ev, &w->update) == 0);
        }
    } else {
        rs_assert(refit_step(w->refit, ev, &w->update) == 0);
    }
    for (size_t i = 0; i < w->update.n_actions; i++)
        act(w, &w->update.actions[i]);
    check_step(w);
    if (w->step == w->crash_at || (w->crash_at == 0 && fault(w, 0.002)))
        crash(w);
}

static void tell_layout(struct world *w, const struct layout_truth *l, bool member)
{
    uint8_t digest[16] = {(uint8_t)(l - w->layouts + 1)};
    if (w->refit == NULL) /* it died over the layout before */
        return;
    struct refit_event ev = {.type = REFIT_EV_LAYOUT,
                             .layout = {.side = l->side,
                                        .name = l->name,
                                        .digest = digest,
                                        .instance_of_rank = l->instance_of_rank,
                                        .n_ranks = l->n_ranks,
                                        .n_instances = l->n_instances,
                                        .member = member}};
    step(w, &ev);
}

static int restore_row(const struct ledger_record *row, void *arg)
{
    struct world *w = arg;
    if (row->kind == LEDGER_MEMBER && row->member.active)
        for (uint32_t i = 0; i < w->n_layouts; i++)
            if (strcmp(w->layouts[i].name, row->member.name) == 0)
                tell_layout(w, &w->layouts[i], true);
    return refit_restore(w->refit, row, NULL);
}

static void coordinator_start(struct world *w)
{
    struct refit_config config;
    refit_config_default(&config);
    config.prepare_timeout_ms = 400;
    config.transfer_timeout_ms = 400;
    config.accept_timeout_ms = 200;
    config.quiesce_timeout_ms = 100;
    w->coordinator_life++;
    w->refit = refit_new("m", &config);
    rs_assert(w->refit != NULL && ledger_mem_open(w->store, NULL, &w->ledger) == 0);
    struct ledger_mem_faults hold = {.hold = true};
    ledger_mem_set_faults(w->ledger, &hold);
    uint64_t crash_at = w->crash_at;
    w->crash_at = UINT64_MAX; /* not in the middle of the start */
    rs_assert(ledger_load(w->ledger, restore_row, w, NULL) == 0);
    struct refit_event ev = {.type = REFIT_EV_RESTORED};
    step(w, &ev);
    w->crash_at = crash_at;
    check_restored(w);
    for (uint32_t i = 0; i < w->n_layouts; i++)
        tell_layout(w, &w->layouts[i], false);
    if (w->refit == NULL)
        return;
    say(w, "coordinator life %llu, newest committed %llu", ULL(w->coordinator_life),
        ULL(w->refit->committed));
    for (uint32_t i = 0; i < w->n_nodes; i++)
        if (w->nodes[i].up)
            node_says(w, i, REFIT_EV_NODE_UP, &(struct refit_event){0});
    for (uint32_t i = 0; i < w->n_workers; i++)
        send(w, WORKER_ATTACHES, soon(w, 20))->who = i;
}

/* The coordinator's process ends. A few of the transactions that it waits for still make it. The
 * data planes end what they do: they are its children, or their lease runs out. */
static void crash(struct world *w)
{
    say(w, "coordinator crashes");
    w->n_crashes++;
    struct refit *dead = w->refit;
    w->refit = NULL; /* `written` tells nobody */
    if (w->calm)
        rs_assert(w->crash_at != 0);
    size_t waiting = ledger_mem_waiting(w->ledger);
    (void)ledger_mem_release(w->ledger, world_random(w, waiting + 1));
    struct ledger_mem_faults lost = {.fail_at = 1, .fail_code = RS_ECANCELED, .hold = true};
    while (ledger_mem_waiting(w->ledger) > 0) { /* frees what would be lost; leaves nothing */
        ledger_mem_set_faults(w->ledger, &lost);
        (void)ledger_mem_release(w->ledger, 1);
    }
    ledger_mem_crash(w->ledger);
    w->ledger = NULL;
    refit_free(dead);
    w->coordinator_life++;
    for (uint32_t i = 0; i < w->n_nodes; i++) {
        w->nodes[i].attempt = 0;
        w->nodes[i].life++;
    }
    for (uint32_t i = 0; i < w->n_workers; i++)
        w->workers[i].attached = false;
    send(w, COORDINATOR_RETURNS, soon(w, 50));
}

/* --- nodes --- */

static void each_written(struct world *w, struct node *n, bool whole)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        struct worker *worker = &w->workers[i];
        if (!n->part[i] || w->layouts[worker->layout].side != REFIT_DESTINATION)
            continue;
        struct memory *m = worker->receive == REFIT_IN_PLACE ? &worker->live : &worker->shadow;
        if (n->skip[i]) {
            if (worker->attached &&
                (!m->whole || m->version != n->version || m->content != n->content))
                world_fail(w, "worker %u is skipped, but does not hold version %llu as published",
                           i, ULL(n->version));
            continue;
        }
        *m = (struct memory){.version = n->version, .content = n->content, .whole = whole};
    }
}

static void node_receives(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!n->up || m->life != n->life)
        return;
    const struct refit_action *a = &m->action;
    struct refit_event answer = {.node = {.attempt = a->attempt}};
    if (a->type == REFIT_DO_ABORT) {
        if (n->mute)
            return;
        n->attempt = 0;
        node_says(w, m->who, REFIT_EV_QUIESCED, &answer);
    } else if (a->attempt != n->attempt) {
        world_fail(w, "node %u is asked for attempt %llu, it has %llu", m->who, ULL(a->attempt),
                   ULL(n->attempt));
    } else if (a->type == REFIT_DO_PREPARE) {
        node_step(w, m->who, WORK_PREPARED, a);
    } else {
        n->started = true;
        each_written(w, n, false);
        node_step(w, m->who, WORK_READ, a);
    }
}

static void node_applied(struct world *w, const struct message *m)
{
    struct worker *worker = world_worker(w, m->action.worker);
    if (worker == NULL)
        return;
    struct refit_event ev = {.applied = {.worker = worker->id,
                                         .version = m->action.version,
                                         .code = fault(w, 0.03) ? RS_EDATALOSS : 0}};
    worker->live = worker->shadow;
    worker->live.whole &= ev.applied.code == 0;
    struct message *out = send(w, TO_COORDINATOR, soon(w, 3));
    out->ev = ev;
    out->ev.type = REFIT_EV_APPLIED;
    out->who = m->who + 1; /* of this life of that node: it can't come after NODE_LOST */
    out->life = m->life;
}

static void node_works(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (m->step == WORK_APPLIED) {
        if (n->up && m->life == n->life)
            node_applied(w, m);
        return;
    }
    if (!n->up || m->life != n->life || m->action.attempt != n->attempt || n->attempt == 0)
        return;
    struct refit_event ev = {.node = {.attempt = n->attempt}};
    if (fault(w, 0.02)) {
        ev.node.code = RS_EDATALOSS;
        ev.node.text = "a difference";
        for (uint32_t i = 0; i < w->n_workers; i++)
            if (n->part[i] && world_chance(w, 0.5))
                ev.node.worker = w->workers[i].id;
        node_says(w, m->who, REFIT_EV_FAILED, &ev);
        return;
    }
    if (fault(w, 0.01))
        return; /* hangs; the deadline finds it */
    if (m->step == WORK_PREPARED) {
        node_says(w, m->who, REFIT_EV_PREPARED, &ev);
    } else if (m->step == WORK_READ) {
        n->read = true;
        ev.node.sources_read_ns = w->now_ns;
        ev.node.first_byte_ns = w->now_ns;
        node_says(w, m->who, REFIT_EV_PROGRESS, &ev);
        node_step(w, m->who, WORK_STAGED, &m->action);
    } else {
        each_written(w, n, true);
        ev.node.sources_read_ns = ev.node.first_byte_ns = ev.node.last_byte_ns = w->now_ns;
        node_says(w, m->who, REFIT_EV_STAGED, &ev);
        n->attempt = 0; /* its streams are drained */
    }
}

static void node_dies(struct world *w, uint32_t node)
{
    struct node *n = &w->nodes[node];
    if (!n->up)
        return;
    say(w, "data plane of node %u dies", node);
    n->up = false;
    n->life++;
    n->attempt = 0;
    n->mute = false;
    node_says(w, node, REFIT_EV_NODE_LOST, &(struct refit_event){0});
    send(w, NODE_RETURNS, soon(w, 60))->who = node;
}

/* --- workers --- */

static void worker_attaches(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    const struct layout_truth *l = &w->layouts[worker->layout];
    if (worker->attached || w->refit == NULL)
        return;
    worker->attached = true;
    worker->publishing = false;
    worker->life++;
    uint64_t before = worker->id; /* what it said as that one may still be on its way */
    worker->id = (w->coordinator_life << 32) | (worker->life << 8) | index;
    /* The daemon has fingerprinted what it says to hold, against what the ledger knows as
     * committed. */
    bool live = worker->live.whole && world_version(w, worker->live.version)->committed;
    bool shadow = worker->shadow.whole && world_version(w, worker->shadow.version)->committed;
    struct refit_event ev = {
        .type = REFIT_EV_ATTACHED,
        .cookie = ask(w, ASK_OTHER, 0, 0),
        .attached = {.worker = worker->id,
                     .node = worker->node,
                     .side = l->side,
                     .layout_name = l->name,
                     .rank = worker->rank,
                     .receive = worker->receive,
                     .accept_automatically = worker->automatic,
                     .live = live ? worker->live.version : 0,
                     .shadow = shadow ? worker->shadow.version : 0,
                     .torn = !live && worker->receive == REFIT_IN_PLACE && worker->awaits != 0,
                     .waits_for = worker->awaits}};
    step(w, &ev);
    if (w->refit == NULL)
        return;
    if (refit_find_worker(w->refit, worker->id) == NULL) { /* its memory is still in use */
        worker->attached = false;
        worker->id = before;
        send(w, WORKER_ATTACHES, soon(w, 20))->who = index;
    } else {
        worker->left_for_good = false;
        w->layouts[worker->layout].known = true;
        const struct refit_worker *r = refit_find_worker(w->refit, worker->id);
        if (r->receive == REFIT_STAGED_RECEIVE && r->held > r->applied) /* as Attached says */
            apply(w, worker, r->held);
    }
}

static void worker_dies(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    if (!worker->attached)
        return;
    say(w, "worker %u dies", index);
    worker->attached = false;
    worker->life++;
    bool keeps = world_chance(w, 0.5);
    if (!keeps) { /* a new process with new memory; else the memory outlives it */
        worker->live = worker->shadow = (struct memory){0};
        worker->published = worker->awaits = 0;
    }
    struct refit_event *ev = tell(w, REFIT_EV_LEFT, 3);
    ev->left.worker = worker->id;
    ev->left.for_good = fault(w, 0.1);
    ev->left.reason = "process ended";
    send(w, WORKER_ATTACHES, soon(w, 80))->who = index;
}

static void publish(struct world *w, struct worker *worker, uint64_t version)
{
    if (!worker->attached || worker->publishing || w->refit == NULL)
        return; /* one at a time */
    struct err e = {0};
    if (refit_publish_check(w->refit, worker->id, version, &e) != 0)
        return;
    worker->published = version;
    worker->publishing = true;
    worker->salt = version * 1000 + worker->layout + (fault(w, 0.03) ? 7 : 0);
    struct refit_event *ev = tell(w, REFIT_EV_PUBLISHED, 5);
    ev->cookie = UINT64_MAX; /* opened on arrival */
    ev->published.worker = worker->id;
    ev->published.version = version;
    ev->published.publication = worker->salt;
}

/* What ends a worker's wait: a release for a source; a commit or an abort for a destination. */
static void hears(const struct world *w, struct worker *worker, const struct refit_action *a)
{
    bool source = w->layouts[worker->layout].side == REFIT_SOURCE;
    bool ends = source ? a->tell == REFIT_TELL_SOURCE_RELEASED
                       : a->tell == REFIT_TELL_COMMITTED || a->tell == REFIT_TELL_ABORTED;
    if (ends && a->version == worker->awaits)
        worker->awaits = 0;
}

static void worker_receives(struct world *w, const struct message *m)
{
    struct worker *worker = &w->workers[m->who];
    const struct refit_action *a = &m->action;
    if (!worker->attached || m->life != worker->life)
        return;
    hears(w, worker, a);
    if (!worker->behaves && fault(w, 0.15))
        return; /* does not answer this one */
    struct refit_event *ev;
    switch (a->tell) {
    case REFIT_TELL_PUBLISH_REQUESTED:
        publish(w, worker, a->version);
        break;
    case REFIT_TELL_READY_REQUESTED:
        ev = tell(w, REFIT_EV_READY, 10);
        ev->cookie = UINT64_MAX;
        ev->ready.worker = worker->id;
        ev->ready.version = a->version;
        break;
    case REFIT_TELL_ACCEPT_REQUESTED:
        ev = tell(w, REFIT_EV_VERDICT, 10);
        ev->cookie = UINT64_MAX;
        ev->verdict.worker = worker->id;
        ev->verdict.version = a->version;
        ev->verdict.attempt = a->attempt;
        ev->verdict.accept = !fault(w, 0.05);
        ev->verdict.reason = "a bad smell";
        break;
    case REFIT_TELL_COMMITTED:
        if (worker->receive == REFIT_STAGED_RECEIVE)
            apply(w, worker, a->version);
        break;
    case REFIT_TELL_ABORTED:
    case REFIT_TELL_SOURCE_RELEASED:
        break;
    }
}

/* --- trainer and operator --- */

static void submit(struct world *w, uint64_t version, uint8_t content, uint64_t request)
{
    struct message *m = send(w, TO_COORDINATOR, soon(w, 5));
    m->ev.type = REFIT_EV_SUBMIT;
    m->ev.cookie = UINT64_MAX;
    m->ev.submit.version = version;
    m->request = request;
    m->step = content;
}

static void publish_all(struct world *w, uint64_t version)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->layouts[w->workers[i].layout].side == REFIT_SOURCE && world_chance(w, 0.7))
            publish(w, &w->workers[i], version);
}

static void operator_aborts(struct world *w)
{
    struct refit_event *ev = tell(w, REFIT_EV_ABORT, 5);
    ev->cookie = UINT64_MAX;
    ev->abort.version = world_chance(w, 0.5) ? 0 : w->newest_asked;
    ev->abort.reason = "by hand";
}

static void submit_new(struct world *w)
{
    w->newest_asked += 1 + world_random(w, 2);
    publish_all(w, w->newest_asked);
    submit(w, w->newest_asked, 1, ++w->last_request);
}

/* In the calm: what is lost (a coordinator that died with it) is asked again. */
static void trainer_insists(struct world *w)
{
    if (w->told_committed >= w->newest_asked)
        return;
    if (w->refit != NULL && w->refit->in_flight == NULL)
        submit(w, w->newest_asked, 1, ++w->last_request);
    send(w, TRAINER_ACTS, w->now_ns + 600 * (uint64_t)MS);
}

static void trainer_acts(struct world *w)
{
    if (w->calm) {
        trainer_insists(w);
        return;
    }
    uint64_t dice = world_random(w, 100);
    if (dice < 60 || w->newest_asked == 0)
        submit_new(w);
    else if (dice < 70) /* the same request once more */
        submit(w, w->newest_asked, 1, w->last_request);
    else if (dice < 80) /* a new try */
        submit(w, w->newest_asked, 1, ++w->last_request);
    else if (dice < 85)
        submit(w, w->newest_asked, 2, ++w->last_request);
    else if (dice < 90)
        submit(w, 1 + world_random(w, w->newest_asked), 1, ++w->last_request);
    else if (dice < 95)
        operator_aborts(w);
    else {
        struct refit_event *ev = tell(w, REFIT_EV_MARK, 5);
        ev->cookie = UINT64_MAX;
        ev->mark.version = w->newest_asked;
        ev->mark.name = "generation_begin";
    }
    if (++w->n_trainer_acts < w->max_trainer_acts)
        send(w, TRAINER_ACTS, soon(w, 150));
}

static void trouble(struct world *w)
{
    if (fault(w, 0.3))
        send(w, WORKER_DIES, soon(w, 50))->who = (uint32_t)world_random(w, w->n_workers);
    if (fault(w, 0.15))
        send(w, NODE_DIES, soon(w, 50))->who = (uint32_t)world_random(w, w->n_nodes);
    if (fault(w, 0.1))
        w->nodes[world_random(w, w->n_nodes)].mute = true;
    if (!w->calm)
        send(w, OPERATOR_ACTS, soon(w, 200));
}

/* --- the clock --- */

static enum request_kind kind_of(enum refit_event_type type)
{
    return type == REFIT_EV_SUBMIT  ? ASK_SUBMIT
           : type == REFIT_EV_ABORT ? ASK_ABORT
           : type == REFIT_EV_APPLY ? ASK_APPLY
                                    : ASK_OTHER;
}

static uint32_t policies(const struct world *w, struct refit_policy *ret)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_layouts; i++)
        if (w->layouts[i].named)
            ret[n++] = (struct refit_policy){.layout_name = (char *)(uintptr_t)w->layouts[i].name,
                                             .min_instances = w->layouts[i].min_instances};
    return n;
}

static bool late(const struct world *w, const struct message *m)
{
    return m->coordinator_life != w->coordinator_life || w->refit == NULL;
}

/* Of a version that may still go on: what is refused as too late nobody waits for. */
static void awaits_end(const struct world *w, struct worker *worker, uint64_t version)
{
    const struct refit_version *v = refit_find_version(w->refit, version);
    bool over = v == NULL ? version <= w->refit->committed : refit_phase_final(v->phase.state);
    bool released =
        v != NULL && v->source_released && w->layouts[worker->layout].side == REFIT_SOURCE;
    if (!over && !released)
        worker->awaits = version;
}

/* What the world has to know of an event before the decider has it. */
static void note_event(struct world *w, const struct message *m)
{
    const struct refit_event *ev = &m->ev;
    struct worker *worker = NULL;
    if (ev->type == REFIT_EV_VERDICT && ev->verdict.accept &&
        (worker = world_worker(w, ev->verdict.worker)) != NULL)
        worker->accepted_attempt = ev->verdict.attempt;
    if (ev->type == REFIT_EV_VERDICT && (worker = world_worker(w, ev->verdict.worker)) != NULL)
        awaits_end(w, worker, ev->verdict.version);
    if (ev->type == REFIT_EV_READY && (worker = world_worker(w, ev->ready.worker)) != NULL)
        awaits_end(w, worker, ev->ready.version);
    if (ev->type == REFIT_EV_NODE_UP || ev->type == REFIT_EV_NODE_LOST)
        w->nodes[ev->node.node].known_life = m->life;
    if (ev->type == REFIT_EV_LEFT && (worker = world_worker(w, ev->left.worker)) != NULL)
        worker->left_for_good = ev->left.for_good;
    if (ev->type == REFIT_EV_PUBLISHED &&
        (worker = world_worker(w, ev->published.worker)) != NULL) {
        worker->publishing = false;
        awaits_end(w, worker, ev->published.version);
    }
    if (ev->type == REFIT_EV_STAGED)
        for (uint32_t i = 0; i < w->n_workers; i++)
            if (w->workers[i].automatic && w->workers[i].accepted_attempt < ev->node.attempt)
                w->workers[i].accepted_attempt = ev->node.attempt;
}

static void arrive(struct world *w, struct message *m)
{
    if (late(w, m) || (m->who > 0 && w->nodes[m->who - 1].life != m->life))
        return;
    struct refit_event *ev = &m->ev;
    char id[32];
    uint8_t content[16] = {(uint8_t)m->step};
    struct refit_policy named[MAX_LAYOUTS];
    if (ev->type == REFIT_EV_SUBMIT) {
        (void)snprintf(id, sizeof id, "r%llu", ULL(m->request));
        ev->submit.request_id = id;
        ev->submit.content = content;
        ev->submit.release_at = w->release_at;
        ev->submit.policies = named;
        ev->submit.n_policies = policies(w, named);
        say(w, "submit version %llu content %u request %s", ULL(ev->submit.version), m->step, id);
    }
    if (ev->cookie == UINT64_MAX)
        ev->cookie = ask(w, kind_of(ev->type), ev->type == REFIT_EV_SUBMIT ? ev->submit.version : 0,
                         content[0]);
    if (ev->type == REFIT_EV_APPLY) {
        w->requests[ev->cookie - 1].version = ev->apply.version;
        w->requests[ev->cookie - 1].worker = ev->apply.worker;
    }
    note_event(w, m);
    step(w, ev);
}

static void ledger_writes(struct world *w, const struct message *m)
{
    if (late(w, m))
        return;
    struct ledger_mem_faults f = {.hold = true, .fail_at = fault(w, 0.02) ? 1 : 0};
    ledger_mem_set_faults(w->ledger, &f);
    (void)ledger_mem_release(w->ledger, 1);
}

static void deliver(struct world *w, struct message *m)
{
    switch (m->type) {
    case TO_COORDINATOR:
        arrive(w, m);
        break;
    case TO_NODE:
        node_receives(w, m);
        break;
    case TO_WORKER:
        worker_receives(w, m);
        break;
    case LEDGER_WRITES:
        ledger_writes(w, m);
        break;
    case NODE_STEP:
        node_works(w, m);
        break;
    case NODE_RETURNS:
        w->nodes[m->who].up = true;
        node_says(w, m->who, REFIT_EV_NODE_UP, &(struct refit_event){0});
        break;
    case WORKER_ATTACHES:
        worker_attaches(w, m->who);
        break;
    case WORKER_DIES:
        worker_dies(w, m->who);
        break;
    case NODE_DIES:
        node_dies(w, m->who);
        break;
    case TRAINER_ACTS:
        trainer_acts(w);
        break;
    case OPERATOR_ACTS:
        trouble(w);
        break;
    case COORDINATOR_RETURNS:
        coordinator_start(w);
        break;
    case TICK:
        if (!late(w, m) && m->number == w->tick_number) {
            struct refit_event ev = {.type = REFIT_EV_TICK};
            step(w, &ev);
        }
        break;
    }
}

static void run_until(struct world *w, uint64_t end_ns)
{
    struct message m;
    while (take(w, &m)) {
        if (m.at_ns > end_ns) {
            w->messages[w->n_messages++] = m; /* not yet */
            break;
        }
        w->now_ns = m.at_ns > w->now_ns ? m.at_ns : w->now_ns;
        deliver(w, &m);
    }
    w->now_ns = end_ns > w->now_ns ? end_ns : w->now_ns;
}

void world_run(struct world *w)
{
    coordinator_start(w);
    send(w, TRAINER_ACTS, soon(w, 50));
    send(w, OPERATOR_ACTS, soon(w, 100));
    run_until(w, w->now_ns + w->max_trainer_acts * (uint64_t)150 * MS + S);
    w->calm = true;
    run_until(w, w->now_ns + 3 * S); /* everybody comes back, whatever was in flight ends */
    for (uint32_t i = 0; i < w->n_nodes; i++)
        w->nodes[i].mute = false;
    /* One more version, which has to be committed. Whoever still holds a committed version that it
     * never applied (its event was lost) says that it skips it. */
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].receive == REFIT_STAGED_RECEIVE && w->workers[i].attached) {
            struct refit_event *ev = tell(w, REFIT_EV_APPLY, 5);
            ev->cookie = UINT64_MAX;
            ev->apply.worker = w->workers[i].id;
            ev->apply.version = w->refit == NULL ? 0 : w->refit->committed;
            ev->apply.skip = true;
        }
    run_until(w, w->now_ns + S);
    submit_new(w);
    send(w, TRAINER_ACTS, w->now_ns + S);
    run_until(w, w->now_ns + 12 * S);
    check_end(w);
}

/* --- making a world --- */

static void add_layout(struct world *w, enum refit_side side, const char *name,
                       uint32_t n_instances, uint32_t ranks_each)
{
    struct layout_truth *l = &w->layouts[w->n_layouts++];
    *l = (struct layout_truth){
        .side = side, .n_ranks = n_instances * ranks_each, .n_instances = n_instances};
    (void)snprintf(l->name, sizeof l->name, "%s", name);
    l->min_instances = n_instances;
    bool in_place = world_chance(w, 0.5), automatic = world_chance(w, 0.5);
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        l->instance_of_rank[rank] = rank / ranks_each;
        struct worker *worker = &w->workers[w->n_workers++];
        *worker = (struct worker){.node = (uint32_t)world_random(w, w->n_nodes),
                                  .layout = w->n_layouts - 1,
                                  .rank = rank,
                                  .automatic = automatic,
                                  .behaves = world_chance(w, 0.7)};
        worker->receive = side == REFIT_SOURCE ? REFIT_RECEIVE_NONE
                          : in_place           ? REFIT_IN_PLACE
                                               : REFIT_STAGED_RECEIVE;
    }
    if (side == REFIT_DESTINATION && world_chance(w, 0.4)) {
        l->named = true;
        l->min_instances = (uint32_t)world_random(w, n_instances + 1);
    }
}

void world_init(struct world *w, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->random = seed;
    w->now_ns = S;
    w->wall_ns = UINT64_C(1700000000) * S;
    w->deadline_ns = REFIT_NEVER;
    w->messages = calloc(MAX_MESSAGES, sizeof *w->messages);
    w->store = ledger_store_new();
    rs_assert(w->messages != NULL && w->store != NULL);
    refit_update_init(&w->update);
    w->trouble = (double)world_random(w, 5) / 2.0; /* a fifth of the worlds has no faults at all */
    w->max_trainer_acts = 8 + (uint32_t)world_random(w, 12);
    w->n_nodes = 1 + (uint32_t)world_random(w, MAX_NODES);
    for (uint32_t i = 0; i < w->n_nodes; i++)
        w->nodes[i].up = true;
    w->release_at = (enum refit_release_at)world_random(w, 4);
    add_layout(w, REFIT_SOURCE, "train", 1, 1 + (uint32_t)world_random(w, 3));
    add_layout(w, REFIT_DESTINATION, "rollout", 1 + (uint32_t)world_random(w, 3),
               1 + (uint32_t)world_random(w, 2));
    if (world_chance(w, 0.4))
        add_layout(w, REFIT_DESTINATION, "eval", 1 + (uint32_t)world_random(w, 2), 1);
}

void world_close(struct world *w)
{
    refit_free(w->refit);
    refit_update_close(&w->update);
    if (w->ledger != NULL) {
        w->refit = NULL;
        (void)ledger_mem_release(w->ledger, ledger_mem_waiting(w->ledger));
        ledger_close(w->ledger);
    }
    ledger_store_free(w->store);
    free(w->messages);
}
