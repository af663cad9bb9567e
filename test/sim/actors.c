/* What the trainer's program and the operator do, and what goes wrong. */
#include "test/sim/world.h"

/* --- the trainer's program --- */

static struct refit_event *submit(struct world *w, uint64_t version, uint8_t content,
                                  uint64_t request)
{
    struct message *m = world_send(w, TO_COORDINATOR, world_soon(w, 5));
    m->ev.type = REFIT_EV_SUBMIT;
    m->ev.cookie = UINT64_MAX;
    m->ev.submit.version = version;
    m->request = request;
    m->step = content;
    return &m->ev;
}

static void publish_all(struct world *w, uint64_t version)
{
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->layouts[w->workers[i].layout].side == REFIT_SOURCE && world_chance(w, 0.7))
            worker_publishes(w, &w->workers[i], version);
}

static void aborts(struct world *w)
{
    struct refit_event *ev = world_tell(w, REFIT_EV_ABORT, 5);
    ev->cookie = UINT64_MAX;
    ev->abort.version = world_chance(w, 0.5) ? 0 : w->newest_asked;
    ev->abort.reason = "by hand";
}

static void marks(struct world *w)
{
    struct refit_event *ev = world_tell(w, REFIT_EV_MARK, 5);
    ev->cookie = UINT64_MAX;
    ev->mark.version = w->newest_asked;
    ev->mark.name = "generation_begin";
}

void trainer_submits_new(struct world *w)
{
    w->newest_asked += 1 + world_random(w, 2);
    w->rehearsing = 0;
    publish_all(w, w->newest_asked);
    (void)submit(w, w->newest_asked, 1, ++w->last_request);
}

static void rehearses(struct world *w)
{
    w->rehearsing = w->newest_asked + 1;
    submit(w, w->rehearsing, 1, ++w->last_request)->submit.rehearsal = true;
}

static void withdraws(struct world *w, uint64_t version)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        const struct worker *worker = &w->workers[i];
        if (w->layouts[worker->layout].side != REFIT_SOURCE || !worker->attached)
            continue;
        struct refit_event ev = {
            .type = REFIT_EV_WITHDRAW,
            .cookie = UINT64_MAX,
            .withdraw = {worker->id, version, 1, world_chance(w, 0.3), "its submit was refused"}};
        node_report(w, worker->node, &ev);
        return;
    }
}

/* A push that nobody submits: who submits gives it up, if its word gets through, or else goes on to the next. */
static void gives_up(struct world *w)
{
    publish_all(w, w->newest_asked + 1);
    withdraws(w, w->newest_asked + 1);
}

/* In the calm: what is lost (a coordinator that died with it) is asked again. */
static void insists(struct world *w)
{
    if (w->told_committed >= w->newest_asked)
        return;
    if (w->refit != NULL &&
        (w->refit->in_flight == NULL || w->refit->in_flight->kind == REFIT_KIND_CATCH_UP))
        (void)submit(w, w->newest_asked, 1, ++w->last_request);
    world_send(w, TRAINER_ACTS, w->now_ns + 600 * (uint64_t)MS);
}

void trainer_acts(struct world *w)
{
    if (w->calm) {
        insists(w);
        return;
    }
    uint64_t dice = world_random(w, 100);
    if (dice < 55 || w->newest_asked == 0)
        trainer_submits_new(w);
    else if (dice < 62) /* the same request once more */
        (void)submit(w, w->newest_asked, 1, w->last_request);
    else if (dice < 75) /* a new try */
        (void)submit(w, w->newest_asked, 1, ++w->last_request);
    else if (dice < 79)
        (void)submit(w, w->newest_asked, 2, ++w->last_request);
    else if (dice < 83)
        (void)submit(w, 1 + world_random(w, w->newest_asked), 1, ++w->last_request);
    else if (dice < 87)
        aborts(w);
    else if (dice < 90)
        marks(w);
    else if (dice < 94)
        rehearses(w);
    else if (dice < 97)
        gives_up(w);
    else if (dice < 98) /* whatever has become of it */
        withdraws(w, w->newest_asked);
    else if (w->told_committed != 0) /* what is committed, once more: a newcomer may have it */
        publish_all(w, w->told_committed);
    if (++w->n_trainer_acts < w->max_trainer_acts)
        world_send(w, TRAINER_ACTS, world_soon(w, 150));
}

/* --- the operator, and fate --- */

static void drains(struct world *w)
{
    uint32_t node = (uint32_t)world_random(w, w->n_nodes);
    struct refit_event *ev = world_tell(w, REFIT_EV_DRAIN, 5);
    ev->cookie = UINT64_MAX;
    ev->drain.node = node;
    ev->drain.on = true;
}

/* Whatever is drained may come back. */
static void undrains(struct world *w)
{
    for (uint32_t i = 0; i < w->n_nodes; i++) {
        struct refit_event *ev = world_tell(w, REFIT_EV_DRAIN, 20);
        ev->cookie = UINT64_MAX;
        ev->drain.node = i;
    }
}

static uint32_t any_node(struct world *w)
{
    return (uint32_t)world_random(w, w->n_nodes);
}

static void link_is_cut(struct world *w)
{
    uint32_t node = any_node(w);
    uint64_t ms = 20 + world_random(w, 600);
    world_say(w, "link of node %u is cut for %llu ms", node, (unsigned long long)ms);
    if (node != 0)
        w->nodes[node].cut_until_ns = w->now_ns + ms * MS;
}

void operator_acts(struct world *w)
{
    if (world_fault(w, 0.3))
        world_send(w, WORKER_DIES, world_soon(w, 50))->who =
            (uint32_t)world_random(w, w->n_workers);
    if (world_fault(w, 0.1))
        world_send(w, WORKER_SLEEPS, world_soon(w, 50))->who =
            (uint32_t)world_random(w, w->n_workers);
    if (world_fault(w, 0.12))
        world_send(w, DATA_PLANE_DIES, world_soon(w, 50))->who = any_node(w);
    if (world_fault(w, 0.12))
        world_send(w, NODE_DIES, world_soon(w, 50))->who =
            w->n_nodes > 1 ? 1 + (uint32_t)world_random(w, w->n_nodes - 1) : 0;
    if (world_fault(w, 0.15))
        link_is_cut(w);
    if (world_fault(w, 0.1))
        w->nodes[any_node(w)].mute = true;
    if (world_fault(w, 0.03))
        drains(w);
    else
        undrains(w);
    if (!w->calm)
        world_send(w, OPERATOR_ACTS, world_soon(w, 200));
}
