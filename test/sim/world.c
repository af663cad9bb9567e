/* The clock, messages, the coordinator with its ledger, and how a world is made. */
#include "test/sim/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/random.h"

#define ULL(x) ((unsigned long long)(x))

uint64_t world_random(struct world *w, uint64_t n)
{
    return random_next(&w->random) % n;
}

bool world_chance(struct world *w, double p)
{
    return (double)(random_next(&w->random) >> 11) < p * 9007199254740992.0;
}

bool world_fault(struct world *w, double p)
{
    return world_chance(w, p * w->trouble) && !w->calm;
}

void world_say(const struct world *w, const char *format, ...)
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

uint32_t world_index(struct world *w, const struct refit_worker *r)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].rank == r->rank &&
            strcmp(w->layouts[w->workers[i].layout].name, r->layout->name) == 0)
            return i;
    world_fail(w, "the decider knows %s/rank %u, which there is not", r->layout->name, r->rank);
}

/* --- messages: a heap by time, then number --- */

static bool before(const struct message *a, const struct message *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->number < b->number;
}

/* Where a message of that time belongs; the others make room. */
struct message *world_send(struct world *w, enum message_type type, uint64_t at_ns)
{
    if (w->n_messages >= MAX_MESSAGES)
        world_fail(w, "too many messages: somebody talks without end");
    struct message m = {.at_ns = at_ns,
                        .number = ++w->n_sent,
                        .type = type,
                        .coordinator_life = w->coordinator_life};
    uint32_t at = w->n_messages++;
    for (; at > 0 && before(&m, &w->messages[(at - 1) / 2]); at = (at - 1) / 2)
        w->messages[at] = w->messages[(at - 1) / 2];
    w->messages[at] = m;
    return &w->messages[at];
}

static void take(struct world *w, struct message *ret)
{
    *ret = w->messages[0];
    struct message last = w->messages[--w->n_messages];
    uint32_t at = 0;
    for (uint32_t child = 1; child < w->n_messages; child = 2 * at + 1) {
        if (child + 1 < w->n_messages && before(&w->messages[child + 1], &w->messages[child]))
            child++;
        if (!before(&w->messages[child], &last))
            break;
        w->messages[at] = w->messages[child];
        at = child;
    }
    w->messages[at] = last;
}

uint64_t world_soon(struct world *w, uint64_t max_ms)
{
    return w->now_ns + 1000 + world_random(w, max_ms * MS);
}

uint64_t world_ask(struct world *w, enum request_kind kind, uint64_t version, uint8_t content)
{
    rs_assert(w->n_requests < MAX_REQUESTS);
    w->requests[w->n_requests] = (struct request){.kind = kind,
                                                  .open = true,
                                                  .version = version,
                                                  .content = content,
                                                  .coordinator_life = w->coordinator_life};
    return ++w->n_requests;
}

struct refit_event *world_tell(struct world *w, enum refit_event_type type, uint64_t ms)
{
    struct message *m = world_send(w, TO_COORDINATOR, world_soon(w, ms));
    m->ev.type = type;
    return &m->ev;
}

/* --- the ledger --- */

struct write {
    struct ledger_transaction t; /* first: the ledger gives it back */
    uint64_t sequence;
    struct world *w;
    uint64_t life;
};

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
        world_step(w, &ev);
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
    world_send(w, LEDGER_WRITES, world_soon(w, 4));
}

static bool late(const struct world *w, const struct message *m)
{
    return m->coordinator_life != w->coordinator_life || w->refit == NULL;
}

static void ledger_writes(struct world *w, const struct message *m)
{
    if (late(w, m))
        return;
    struct ledger_mem_faults f = {.hold = true, .fail_at = world_fault(w, 0.02) ? 1 : 0};
    ledger_mem_set_faults(w->ledger, &f);
    (void)ledger_mem_release(w->ledger, 1);
}

/* --- the decider's actions --- */

static void do_plan(struct world *w, const struct refit_action *a)
{
    struct trial *t;
    struct message *m = world_send(w, TO_COORDINATOR, world_soon(w, 3));
    m->ev.type = REFIT_EV_PLANNED;
    m->ev.planned.attempt = a->attempt;
    uint64_t number = m->number;
    int code = trial_plan(w, a, &t);
    if (code == 0 && world_fault(w, 0.01))
        code = RS_EINTERNAL;
    for (uint32_t i = 0; i < w->n_messages; i++)
        if (w->messages[i].number == number) {
            w->messages[i].ev.planned.code = code;
            w->messages[i].ev.planned.digest = code == 0 ? t->digest : NULL;
        }
}

/* Sources that are replicas of one another are compared before anything is prepared. */
static bool sources_disagree(struct world *w, const struct refit_action *a)
{
    const struct trial *t = trial_find(w, a->attempt);
    if (a->type != REFIT_DO_PREPARE || t == NULL || !t->disagree)
        return false;
    struct refit_event *ev = world_tell(w, REFIT_EV_FAILED, 2);
    ev->node.node = a->node;
    ev->node.attempt = a->attempt;
    ev->node.code = RS_EDATALOSS;
    ev->node.text = "train/rank 0 and train/rank 1 differ";
    return true;
}

static void do_expel(struct world *w, const struct refit_action *a)
{
    struct node *n = &w->nodes[a->node];
    w->n_expels++;
    if (a->node != 0 && n->expelled == a->attempt) { /* asked once already */
        struct message *m = world_send(w, SEVERED, w->now_ns + 1);
        m->who = a->node;
        m->session = n->view_session;
        m->step = 1;
    } else {
        node_order(w, a->node, a, false);
    }
    n->expelled = a->attempt;
}

static void do_tell(struct world *w, const struct refit_action *a)
{
    const struct worker *worker = world_worker(w, a->worker);
    if (worker != NULL)
        node_order(w, worker->node, a, false);
}

static void do_notify(struct world *w, const struct refit_action *a)
{
    world_say(w, "version %llu attempt %llu kind %d: %s %s", ULL(a->version), ULL(a->attempt),
              (int)a->kind, refit_phase_name((int)a->phase), a->text);
    w->n_aborts += a->phase == REFIT_ABORTED;
    w->n_rehearsed += a->phase == REFIT_REHEARSED;
    for (struct queue *q = w->refit->workers.next;
         q != &w->refit->workers && a->phase == REFIT_ACCEPTING; q = q->next) {
        const struct refit_worker *r = container_of(q, struct refit_worker, link);
        struct worker *worker = &w->workers[world_index(w, r)];
        if (worker->automatic && r->taking_part) {
            worker->accepted_attempt = a->attempt;
            worker->accepted_id = r->id;
        }
    }
    if (!refit_phase_final((int)a->phase) || a->attempt == 0)
        return;
    for (uint32_t i = 0; i < w->n_nodes; i++)
        node_order(w, i, a, true);
}

/* What a client does about "try again", and what its daemon does about a refusal. */
static void do_reply(struct world *w, const struct refit_action *a)
{
    const struct request *q = &w->requests[a->cookie - 1];
    struct worker *worker = world_worker(w, q->worker);
    world_say(w, "reply %llu: %s %s", ULL(a->cookie), err_name(a->code), a->text);
    if (worker == NULL || !worker->attached)
        return;
    if (q->kind == ASK_APPLY && a->code == RS_EUNAVAIL)
        worker_apply(w, worker, q->version);
    if (q->kind != ASK_ATTACH)
        return;
    if (a->code != 0) {
        worker_detached(w, (uint32_t)(worker - w->workers));
        return;
    }
    worker->known = true;
    w->layouts[worker->layout].known = true;
    if (worker->receive == REFIT_STAGED_RECEIVE && a->attempt > a->value &&
        a->attempt <= a->version) /* committed, held and not applied, as Attached says */
        worker_apply(w, worker, a->attempt);
}

static void act(struct world *w, const struct refit_action *a)
{
    check_action(w, a);
    switch (a->type) {
    case REFIT_DO_PERSIST:
        persist(w, a);
        break;
    case REFIT_DO_PLAN:
        do_plan(w, a);
        break;
    case REFIT_DO_PREPARE:
    case REFIT_DO_START:
    case REFIT_DO_ABORT:
        if (!sources_disagree(w, a))
            node_order(w, a->node, a, false);
        break;
    case REFIT_DO_EXPEL:
        do_expel(w, a);
        break;
    case REFIT_DO_APPLY:
        node_order(w, a->node, a, false);
        break;
    case REFIT_DO_TELL:
        do_tell(w, a);
        break;
    case REFIT_DO_NOTIFY:
        do_notify(w, a);
        break;
    case REFIT_DO_SET_DEADLINE:
        w->deadline_ns = a->at_ns;
        if (a->at_ns != REFIT_NEVER) {
            uint64_t at = a->at_ns > w->now_ns ? a->at_ns : w->now_ns + 1;
            w->tick_number = world_send(w, TICK, at)->number;
        }
        break;
    case REFIT_DO_REPLY:
        do_reply(w, a);
        break;
    case REFIT_DO_COMMITTED:
        world_say(w, "version %llu is committed", ULL(a->version));
        for (uint32_t i = 0; i < w->n_nodes; i++)
            node_order(w, i, a, false);
        break;
    case REFIT_DO_MARK:
        w->n_caught_up += strcmp(a->text, "caught_up") == 0;
        break;
    case REFIT_DO_ENDED:
        break;
    }
}

/* Whoever is on a drained node and is not known any more has left: its lease is ended. */
static void end_drained(struct world *w)
{
    for (size_t i = 0; i < w->refit->n_nodes; i++)
        for (uint32_t k = 0; k < w->n_workers && w->refit->nodes[i].draining; k++) {
            struct worker *worker = &w->workers[k];
            if (worker->node != w->refit->nodes[i].node || !worker->attached || !worker->known ||
                refit_find_worker(w->refit, worker->id) != NULL)
                continue;
            w->n_drained++;
            worker_detached(w, k);
        }
}

/* Now and then memory runs out first: that must change nothing. */
void world_step(struct world *w, struct refit_event *ev)
{
    if (w->refit == NULL)
        return;
    ev->now_ns = w->now_ns;
    ev->wall_ns = w->wall_ns + w->now_ns;
    w->step++;
    if (world_fault(w, 0.05)) {
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
    end_drained(w);
    check_step(w);
    if (w->step == w->crash_at || (w->crash_at == 0 && world_fault(w, 0.001)))
        world_crash(w);
}

/* --- what arrives --- */

static enum request_kind kind_of(const struct refit_event *ev)
{
    switch (ev->type) {
    case REFIT_EV_SUBMIT:
        return ev->submit.rehearsal ? ASK_OTHER : ASK_SUBMIT;
    case REFIT_EV_ABORT:
        return ASK_ABORT;
    case REFIT_EV_APPLY:
        return ASK_APPLY;
    case REFIT_EV_ATTACHED:
        return ASK_ATTACH;
    case REFIT_EV_DRAIN:
        return ev->drain.on ? ASK_DRAIN : ASK_OTHER;
    default:
        return ASK_OTHER;
    }
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

static enum refit_role role_of(const struct world *w, const struct worker *worker)
{
    return w->layouts[worker->layout].side == REFIT_SOURCE ? REFIT_ROLE_SENDS : REFIT_ROLE_RECEIVES;
}

/* Of a version that may still go on: what is refused as too late nobody waits for. */
static void awaits_end(const struct world *w, struct worker *worker, uint64_t version)
{
    const struct refit_version *v = refit_find_version(w->refit, version);
    const struct refit_version *flying = w->refit->in_flight;
    bool source = w->layouts[worker->layout].side == REFIT_SOURCE;
    const struct refit_worker *r = refit_find_worker(w->refit, worker->id);
    if (flying != NULL && flying->version == version && flying->kind != REFIT_KIND_REFIT &&
        r != NULL && r->taking_part && refit_worker_role(w->refit, r) == role_of(w, worker))
        v = flying;
    bool over = v == NULL ? version <= w->refit->committed : refit_phase_final(v->phase.state);
    bool released = v != NULL && v->source_released && source;
    if (!over && !released)
        worker->awaits = version;
}

/* What the world has to know of an event before the decider has it. */
static void note_event(struct world *w, const struct refit_event *ev)
{
    struct worker *worker = NULL;
    const struct refit_worker *r =
        ev->type == REFIT_EV_VERDICT ? refit_find_worker(w->refit, ev->verdict.worker) : NULL;
    if (r != NULL && ev->verdict.accept) {
        worker = &w->workers[world_index(w, r)];
        worker->accepted_attempt = ev->verdict.attempt;
        worker->accepted_id = r->id;
    }
    if (ev->type == REFIT_EV_VERDICT && (worker = world_worker(w, ev->verdict.worker)) != NULL)
        awaits_end(w, worker, ev->verdict.version);
    if (ev->type == REFIT_EV_READY && (worker = world_worker(w, ev->ready.worker)) != NULL)
        awaits_end(w, worker, ev->ready.version);
    if (ev->type == REFIT_EV_ATTACHED && (worker = world_worker(w, ev->attached.worker)) != NULL)
        worker->told_session = w->nodes[worker->node].view_session;
    if (ev->type == REFIT_EV_PUBLISHED &&
        (worker = world_worker(w, ev->published.worker)) != NULL) {
        worker->publishing = false;
        awaits_end(w, worker, ev->published.version);
    }
}

void world_arrive(struct world *w, struct message *m)
{
    struct refit_event *ev = &m->ev;
    char id[32];
    uint8_t content[16] = {(uint8_t)m->step};
    struct refit_policy named[MAX_LAYOUTS];
    if (w->refit == NULL)
        return;
    if (ev->type == REFIT_EV_SUBMIT) {
        (void)snprintf(id, sizeof id, "r%llu", ULL(m->request));
        ev->submit.request_id = id;
        ev->submit.content = content;
        ev->submit.release_at = w->release_at;
        ev->submit.policies = named;
        ev->submit.n_policies = policies(w, named);
        world_say(w, "submit version %llu content %u request %s", ULL(ev->submit.version), m->step,
                  id);
    }
    if (ev->cookie == UINT64_MAX) {
        ev->cookie = world_ask(w, kind_of(ev), ev->type == REFIT_EV_SUBMIT ? ev->submit.version : 0,
                               content[0]);
        struct request *q = &w->requests[ev->cookie - 1];
        if (ev->type == REFIT_EV_APPLY) {
            q->version = ev->apply.version;
            q->worker = ev->apply.worker;
        }
        if (ev->type == REFIT_EV_ATTACHED)
            q->worker = ev->attached.worker;
        if (ev->type == REFIT_EV_DRAIN)
            q->worker = ev->drain.node;
    }
    note_event(w, ev);
    world_step(w, ev);
}

/* --- the coordinator's life --- */

static void tell_layout(struct world *w, const struct layout_truth *l, bool member)
{
    uint8_t digest[16] = {(uint8_t)(l - w->layouts + 1)};
    struct refit_event ev = {.type = REFIT_EV_LAYOUT,
                             .layout = {.side = l->side,
                                        .name = l->name,
                                        .digest = digest,
                                        .instance_of_rank = l->instance_of_rank,
                                        .n_ranks = l->n_ranks,
                                        .n_instances = l->n_instances,
                                        .member = member}};
    world_step(w, &ev); /* nothing, where it died over the layout before */
}

static int restore_row(const struct ledger_record *row, void *arg)
{
    struct world *w = arg;
    if (row->kind == LEDGER_MEMBER && row->member.active)
        for (uint32_t i = 0; i < w->n_layouts; i++)
            if (strcmp(w->layouts[i].name, row->member.name) == 0) {
                tell_layout(w, &w->layouts[i], true);
                w->layouts[i].known = true;
            }
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
    config.n_nodes = w->n_nodes;
    config.settle_ms = LEASE_MS + SLACK_MS;
    config.feed = w->feed;
    config.catch_up = w->catch_up;
    config.catch_up_retry_ms = 20;
    w->coordinator_life++;
    w->refit = refit_new("m", &config);
    rs_assert(w->refit != NULL && ledger_mem_open(w->store, NULL, &w->ledger) == 0);
    struct ledger_mem_faults hold = {.hold = true};
    ledger_mem_set_faults(w->ledger, &hold);
    uint64_t crash_at = w->crash_at;
    w->crash_at = UINT64_MAX; /* not in the middle of the start */
    for (uint32_t i = 0; i < w->n_layouts; i++)
        w->layouts[i].known = false; /* until its member row or a worker says so */
    rs_assert(ledger_load(w->ledger, restore_row, w, NULL) == 0);
    struct refit_event ev = {.type = REFIT_EV_RESTORED};
    world_step(w, &ev);
    w->crash_at = crash_at;
    check_restored(w);
    for (uint32_t i = 0; i < w->n_layouts; i++)
        tell_layout(w, &w->layouts[i], false);
    if (w->refit == NULL)
        return;
    world_say(w, "coordinator life %llu, newest committed %llu", ULL(w->coordinator_life),
              ULL(w->refit->committed));
    node_start(w, 0, true);
    world_send(w, COORDINATOR_LOOKS, w->now_ns + 20 * (uint64_t)MS);
}

/* The coordinator's process ends, and its node's data plane with it. A few of the transactions that
 * it waits for still make it. */
void world_crash(struct world *w)
{
    if (w->refit == NULL)
        return;
    world_say(w, "coordinator crashes");
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
    w->rehearsing = 0;
    links_forget(w);
    node_dies(w, 0);
    world_send(w, COORDINATOR_RETURNS, world_soon(w, 50));
}

/* --- the clock --- */

static void deliver(struct world *w, struct message *m)
{
    if (node_handles(w, m))
        return;
    switch (m->type) {
    case TO_COORDINATOR:
        if (!late(w, m))
            world_arrive(w, m);
        break;
    case TO_WORKER:
        worker_receives(w, m);
        break;
    case LEDGER_WRITES:
        ledger_writes(w, m);
        break;
    case WORKER_ATTACHES:
        worker_attaches(w, m->who);
        break;
    case WORKER_SLEEPS:
        worker_sleeps(w, m->who);
        break;
    case WORKER_DIES:
        worker_dies(w, m->who);
        break;
    case WORKER_PUBLISHES:
        worker_publishes(w, &w->workers[m->who], m->request);
        break;
    case TRAINER_ACTS:
        trainer_acts(w);
        break;
    case OPERATOR_ACTS:
        operator_acts(w);
        break;
    case COORDINATOR_RETURNS:
        coordinator_start(w);
        break;
    case TICK:
        if (!late(w, m) && m->number == w->tick_number) {
            struct refit_event ev = {.type = REFIT_EV_TICK};
            world_step(w, &ev);
        }
        break;
    default:
        world_fail(w, "nobody takes message type %d", (int)m->type);
    }
}

static void run_until(struct world *w, uint64_t end_ns)
{
    struct message m;
    while (w->n_messages > 0 && w->messages[0].at_ns <= end_ns) {
        take(w, &m);
        w->now_ns = m.at_ns > w->now_ns ? m.at_ns : w->now_ns;
        deliver(w, &m);
    }
    w->now_ns = end_ns > w->now_ns ? end_ns : w->now_ns;
}

/* Whoever still holds a version that it never applied (its event was lost) says that it skips it. */
static void skip_all(struct world *w)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].receive == REFIT_STAGED_RECEIVE && w->workers[i].attached) {
            struct refit_event *ev = world_tell(w, REFIT_EV_APPLY, 5);
            ev->cookie = UINT64_MAX;
            ev->apply.worker = w->workers[i].id;
            const struct refit_worker *r =
                w->refit == NULL ? NULL : refit_find_worker(w->refit, w->workers[i].id);
            ev->apply.version = r == NULL ? 0 : r->held;
            ev->apply.skip = true;
        }
}

void world_run(struct world *w)
{
    coordinator_start(w);
    for (uint32_t i = 1; i < w->n_nodes; i++)
        node_start(w, i, false);
    for (uint32_t i = 0; i < w->n_workers; i++)
        world_send(w, WORKER_ATTACHES, world_soon(w, 20))->who = i;
    world_send(w, TRAINER_ACTS, world_soon(w, 50));
    world_send(w, OPERATOR_ACTS, world_soon(w, 100));
    run_until(w, w->now_ns + w->max_trainer_acts * (uint64_t)150 * MS + S);
    w->calm = true;
    operator_acts(w);                /* the last: what is drained comes back */
    run_until(w, w->now_ns + 3 * S); /* everybody comes back, whatever was in flight ends */
    for (uint32_t i = 0; i < w->n_nodes; i++)
        w->nodes[i].mute = false;
    skip_all(w);
    run_until(w, w->now_ns + S);
    trainer_submits_new(w); /* one more version, which has to be committed */
    world_send(w, TRAINER_ACTS, w->now_ns + S);
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
    w->feed = world_chance(w, 0.7);
    w->catch_up = world_chance(w, 0.7);
    w->n_nodes = 1 + (uint32_t)world_random(w, MAX_NODES);
    w->release_at = (enum refit_release_at)world_random(w, 4);
    add_layout(w, REFIT_SOURCE, "train", 1, 1 + (uint32_t)world_random(w, 4));
    add_layout(w, REFIT_DESTINATION, "rollout", 1 + (uint32_t)world_random(w, 3),
               1 + (uint32_t)world_random(w, 2));
    if (world_chance(w, 0.4))
        add_layout(w, REFIT_DESTINATION, "eval", 1 + (uint32_t)world_random(w, 2), 1);
    trial_layouts(w);
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
    trial_layouts_close(w);
    free(w->messages);
}
