/* Workers: what they say by their node, and what they do about what they are told. */
#include <string.h>

#include "base/err.h"
#include "test/sim/world.h"

#define ULL(x) ((unsigned long long)(x))

static void attaches_soon(struct world *w, uint32_t index, uint64_t max_ms)
{
    world_send(w, WORKER_ATTACHES, world_soon(w, max_ms))->who = index;
}

/* What its daemon says of its memory: it has fingerprinted it, and the coordinator knows what was
 * committed; what was staged and not known as committed it knows by the attempt's content. */
static void tell_memory(struct world *w, struct worker *worker, struct refit_event *ev, bool again)
{
    const struct memory *m = worker_receiving(worker);
    bool live = memory_is_committed(w, worker, &worker->live);
    bool shadow = memory_is_committed(w, worker, &worker->shadow);
    bool known = m == &worker->live ? live : shadow;
    ev->attached.live = live ? worker->live.version : 0;
    ev->attached.shadow = shadow ? worker->shadow.version : 0;
    ev->attached.torn = !live && worker->receive == REFIT_IN_PLACE &&
                        (worker->awaits != 0 || (again && worker->live.version != 0));
    if (!known && memory_whole(w, worker, m) && m->vouched && m->content != 0) {
        ev->attached.uncommitted = m->version;
        ev->attached.uncommitted_content = m->content;
    }
    ev->attached.tells_memory = again;
}

static uint32_t push_of(const struct worker *worker, uint64_t version)
{
    return worker->push_version == version ? worker->push : 0;
}

void worker_tells(struct world *w, uint32_t index, bool again)
{
    struct worker *worker = &w->workers[index];
    const struct layout_truth *l = &w->layouts[worker->layout];
    struct refit_event ev = {.type = REFIT_EV_ATTACHED,
                             .cookie = UINT64_MAX,
                             .attached = {.worker = worker->id,
                                          .node = worker->node,
                                          .side = l->side,
                                          .layout_name = l->name,
                                          .rank = worker->rank,
                                          .receive = worker->receive,
                                          .accept_automatically = worker->automatic,
                                          .asleep = worker->asleep,
                                          .waits_for = worker->awaits,
                                          .push = push_of(worker, worker->awaits),
                                          .again = again,
                                          .published = worker->published}};
    if (l->side == REFIT_DESTINATION)
        tell_memory(w, worker, &ev, again);
    node_report(w, worker->node, &ev);
}

static void memory_is_new(struct worker *worker)
{
    memset(&worker->live, 0, sizeof worker->live);
    memset(&worker->shadow, 0, sizeof worker->shadow);
    worker->published = worker->awaits = worker->salt = worker->push_version = 0;
}

/* By Sleep, which is answered once nothing uses the memory: then it wakes. */
void worker_sleeps(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    if (!worker->attached || !worker->known || worker->asleep)
        return;
    world_say(w, "worker %u goes to sleep", index);
    worker->asleep = true;
    worker->publishing = false;
    memory_is_new(worker);
    struct refit_event ev = {.type = REFIT_EV_SLEPT, .left = {.worker = worker->id}};
    node_report(w, worker->node, &ev);
    attaches_soon(w, index, 80);
}

static void old_lease_ends(struct world *w, const struct worker *worker, uint64_t id)
{
    struct refit_event ev = {.type = REFIT_EV_LEFT,
                             .left = {.worker = id, .reason = "it has woken up"}};
    node_report(w, worker->node, &ev);
}

void worker_attaches(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    const struct node *n = &w->nodes[worker->node];
    if (worker->attached && !worker->asleep)
        return;
    if (!n->alive || n->session == 0 || (worker->asleep && n->attempt != 0)) {
        attaches_soon(w, index, 20);
        return;
    }
    uint64_t slept = worker->asleep ? worker->id : 0;
    if (worker->asleep)
        memory_is_new(worker);
    worker->asleep = false;
    worker->attached = true;
    worker->known = false;
    worker->publishing = false;
    worker->live.vouched = worker->shadow.vouched = false; /* that was known of an earlier lease */
    worker->life++;
    worker->id = (w->coordinator_life << 32) | (worker->life << 8) | index;
    worker_tells(w, index, false);
    if (slept != 0)
        old_lease_ends(w, worker, slept);
}

void worker_detached(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    if (!worker->attached)
        return;
    worker->attached = worker->asleep = false;
    worker->life++;
    attaches_soon(w, index, 30);
}

void worker_dies(struct world *w, uint32_t index)
{
    struct worker *worker = &w->workers[index];
    if (!worker->attached)
        return;
    world_say(w, "worker %u dies", index);
    worker->attached = worker->asleep = false;
    worker->life++;
    if (world_chance(w, 0.5)) /* a new process with new memory; else the memory outlives it */
        memory_is_new(worker);
    struct refit_event ev = {
        .type = REFIT_EV_LEFT,
        .left = {.worker = worker->id, .for_good = world_fault(w, 0.1), .reason = "process ended"}};
    node_report(w, worker->node, &ev);
    attaches_soon(w, index, 80);
}

/* --- sources --- */

static uint64_t salt_of(struct world *w, uint64_t version)
{
    struct version_truth *v = world_version(w, version);
    if (version == w->rehearsing)
        return version * 1000 + 777; /* coordinates */
    if (v->flavour < 4 && world_fault(w, 0.03))
        v->flavour++; /* the trainer has lost count */
    return version * 1000 + v->flavour;
}

/* Most are of a push, some of the next one of the same version; who is asked to publish may not be pushing. */
static void pushes(struct world *w, struct worker *worker, uint64_t version)
{
    if (worker->push_version != version) {
        worker->push_version = version;
        worker->push = version > w->newest_asked || world_chance(w, 0.7) ? 1 : 0;
    } else if (worker->push != 0 && world_chance(w, 0.1)) {
        worker->push++;
    }
}

void worker_publishes(struct world *w, struct worker *worker, uint64_t version)
{
    struct err e = {0};
    const struct node *n = &w->nodes[worker->node];
    if (!worker->attached || worker->asleep || worker->publishing || w->refit == NULL ||
        n->session == 0 || (worker->published == version && worker->awaits == version))
        return; /* one at a time, and not while it waits to hear how the last one ended */
    int rc = refit_publish_check(w->refit, worker->id, version, &e);
    if (rc == RS_EUNAVAIL) { /* it feeds a newcomer, which must not hold it up */
        struct refit_event *ev = world_tell(w, REFIT_EV_ABORT, 1);
        ev->cookie = UINT64_MAX;
        ev->abort.version = w->refit->committed;
        ev->abort.reason = "the trainer goes on";
        struct message *m = world_send(w, WORKER_PUBLISHES, world_soon(w, 20));
        m->who = (uint32_t)(worker - w->workers);
        m->request = version;
    }
    if (rc == 1 && (worker->published != version || worker->salt == 0))
        world_fail(w, "a source is said to hold version %llu, which it has written over",
                   ULL(version));
    if (rc != 0)
        return;
    struct refit_event now = {.type = REFIT_EV_PUBLISHING,
                              .published = {.worker = worker->id, .version = version}};
    world_step(w, &now);
    if (!worker->attached || n->session == 0)
        return; /* the coordinator died over it */
    worker->published = version;
    worker->publishing = true;
    pushes(w, worker, version);
    worker_scribble(w, worker, salt_of(w, version));
    struct refit_event ev = {.type = REFIT_EV_PUBLISHED,
                             .cookie = UINT64_MAX,
                             .published = {.worker = worker->id,
                                           .version = version,
                                           .publication = worker->salt,
                                           .push = push_of(worker, version)}};
    node_report(w, worker->node, &ev);
}

/* --- what they hear --- */

/* What ends a worker's wait: a release for a source; a commit or an abort for a destination. */
static void hears(const struct world *w, struct worker *worker, const struct refit_action *a)
{
    bool source = w->layouts[worker->layout].side == REFIT_SOURCE;
    bool ends = source ? a->tell == REFIT_TELL_SOURCE_RELEASED
                       : a->tell == REFIT_TELL_COMMITTED || a->tell == REFIT_TELL_ABORTED;
    if (ends && a->version == worker->awaits)
        worker->awaits = 0;
}

void worker_apply(struct world *w, const struct worker *worker, uint64_t version)
{
    struct refit_event ev = {
        .type = REFIT_EV_APPLY,
        .cookie = UINT64_MAX,
        .apply = {.worker = worker->id, .version = version, .skip = world_fault(w, 0.2)}};
    node_report(w, worker->node, &ev);
}

static void says(struct world *w, const struct worker *worker, enum refit_event_type type,
                 const struct refit_action *a)
{
    struct refit_event ev = {.type = type, .cookie = UINT64_MAX};
    if (type == REFIT_EV_READY) {
        ev.ready.worker = worker->id;
        ev.ready.version = a->version;
    } else {
        ev.verdict.worker = worker->id;
        ev.verdict.version = a->version;
        ev.verdict.attempt = a->attempt;
        ev.verdict.accept = !world_fault(w, 0.05);
        ev.verdict.reason = "a bad smell";
    }
    node_report(w, worker->node, &ev);
}

void worker_receives(struct world *w, const struct message *m)
{
    struct worker *worker = &w->workers[m->who];
    const struct refit_action *a = &m->action;
    if (!worker->attached || m->life != worker->life)
        return;
    hears(w, worker, a);
    if (worker->asleep)
        return;
    if (!worker->behaves && world_fault(w, 0.15))
        return; /* does not answer this one */
    switch (a->tell) {
    case REFIT_TELL_PUBLISH_REQUESTED:
        worker_publishes(w, worker, a->version);
        break;
    case REFIT_TELL_READY_REQUESTED:
        says(w, worker, REFIT_EV_READY, a);
        break;
    case REFIT_TELL_ACCEPT_REQUESTED:
        says(w, worker, REFIT_EV_VERDICT, a);
        break;
    case REFIT_TELL_COMMITTED:
        if (worker->receive == REFIT_STAGED_RECEIVE)
            worker_apply(w, worker, a->version);
        break;
    case REFIT_TELL_SOURCE_RELEASED:
        if (a->version == worker->published && !worker->publishing && world_chance(w, 0.5))
            worker_scribble(w, worker, 0); /* it trains on */
        break;
    case REFIT_TELL_ABORTED:
        break;
    case REFIT_TELL_WITHDRAWN:
        w->n_withdrawn++;
        break;
    }
}
