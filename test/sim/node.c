/* A daemon on a node: member, session, lease, data plane; and the coordinator's end of its link. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "test/sim/world.h"

#define ULL(x) ((unsigned long long)(x))

bool node_may_move(const struct world *w, const struct node *n)
{
    return n->alive && n->data_up && (n == &w->nodes[0] || w->now_ns < n->lease_until_ns);
}

/* --- the link --- */

/* In order and not before the link is whole again; 0 is a function call. */
static uint64_t link_at(struct world *w, uint32_t node, uint64_t *last_ns)
{
    const struct node *n = &w->nodes[node];
    uint64_t from = n->cut_until_ns > w->now_ns ? n->cut_until_ns : w->now_ns;
    uint64_t at = from + 1000 + world_random(w, (node == 0 ? 1 : 3) * MS);
    at = at > *last_ns ? at : *last_ns + 1;
    *last_ns = at;
    return at;
}

/* What is about attempts may be lost, doubled, or overtaken by what comes later, over and above what a
 * stream does: nothing in the protocol shall rest on the stream. */
static uint32_t copies(struct world *w, uint32_t node)
{
    if (node != 0 && world_fault(w, 0.004))
        return 0;
    return world_fault(w, 0.03) ? 2 : 1;
}

static uint64_t stray(struct world *w, uint64_t at, uint32_t copy)
{
    return copy > 0               ? at + world_random(w, S)
           : world_fault(w, 0.02) ? at + world_random(w, 30 * MS)
                                  : at;
}

static bool about_attempt(enum refit_event_type type)
{
    return type == REFIT_EV_PREPARED || type == REFIT_EV_PROGRESS || type == REFIT_EV_STAGED ||
           type == REFIT_EV_FAILED || type == REFIT_EV_QUIESCED;
}

void node_report(struct world *w, uint32_t node, const struct refit_event *ev)
{
    struct node *n = &w->nodes[node];
    if (n->session == 0)
        return;
    uint64_t at = link_at(w, node, &n->last_out_ns);
    uint32_t many = about_attempt(ev->type) ? copies(w, node) : 1;
    for (uint32_t i = 0; i < many; i++) {
        struct message *m = world_send(w, REPORT, about_attempt(ev->type) ? stray(w, at, i) : at);
        m->who = node;
        m->session = n->session;
        m->ev = *ev;
        if (about_attempt(ev->type) || ev->type == REFIT_EV_NODE_UP ||
            ev->type == REFIT_EV_NODE_LOST)
            m->ev.node.node = node;
    }
}

void node_order(struct world *w, uint32_t node, const struct refit_action *a, bool ends)
{
    struct node *n = &w->nodes[node];
    if (n->view != HERE)
        return;
    uint64_t at = link_at(w, node, &n->last_in_ns);
    bool attempt = a->type != REFIT_DO_TELL && a->type != REFIT_DO_APPLY;
    uint32_t many = attempt ? copies(w, node) : 1;
    for (uint32_t i = 0; i < many; i++) {
        struct message *m = world_send(w, ORDER, attempt ? stray(w, at, i) : at);
        m->who = node;
        m->session = n->view_session;
        m->action = *a;
        m->ends = ends;
    }
}

static struct message *node_timer(struct world *w, enum message_type type, uint32_t node,
                                  uint64_t at_ns)
{
    struct message *m = world_send(w, type, at_ns);
    m->who = node;
    m->life = w->nodes[node].life;
    return m;
}

/* --- the data plane --- */

static struct message *work(struct world *w, uint32_t node, enum work what, uint64_t attempt,
                            uint64_t max_ms)
{
    struct message *m = node_timer(w, NODE_WORKS, node, world_soon(w, max_ms));
    m->step = what;
    m->session = w->nodes[node].data_life;
    m->action.attempt = attempt;
    return m;
}

static void member_event(struct world *w, uint32_t node, struct member_event ev);

static void do_plan(struct world *w, uint32_t node, uint64_t attempt)
{
    struct node *n = &w->nodes[node];
    n->attempt = attempt; /* from now on it counts as not quiet */
    n->started = n->read = n->told = n->hangs = false;
    n->idle = 0;
    (void)work(w, node, WORK_PLANNED, attempt, 3);
}

static void do_start(struct world *w, uint32_t node, uint64_t attempt)
{
    struct node *n = &w->nodes[node];
    struct trial *t = trial_find(w, attempt);
    rs_assert(t != NULL && n->attempt == attempt);
    n->started = true;
    n->hangs = world_fault(w, 0.01);
    trial_open(w, t, node);
    (void)work(w, node, WORK_TELLS, attempt, 12);
    (void)work(w, node, WORK_MOVES, attempt, 4);
}

static void do_report(struct world *w, uint32_t node, const struct member_action *a)
{
    static const enum refit_event_type types[] = {[MEMBER_REPORT_PREPARED] = REFIT_EV_PREPARED,
                                                  [MEMBER_REPORT_PROGRESS] = REFIT_EV_PROGRESS,
                                                  [MEMBER_REPORT_STAGED] = REFIT_EV_STAGED,
                                                  [MEMBER_REPORT_FAILED] = REFIT_EV_FAILED,
                                                  [MEMBER_REPORT_QUIESCED] = REFIT_EV_QUIESCED};
    struct refit_event ev = {.type = types[a->report],
                             .node = {.attempt = a->attempt, .code = a->code, .text = "node"}};
    struct trial *t = trial_find(w, a->attempt);
    if (a->session != w->nodes[node].session)
        world_fail(w, "node %u reports by session %llu, it has %llu", node, ULL(a->session),
                   ULL(w->nodes[node].session));
    if (a->report == MEMBER_REPORT_PROGRESS || a->report == MEMBER_REPORT_STAGED)
        ev.node.first_byte_ns = ev.node.last_byte_ns = w->now_ns;
    if (a->report == MEMBER_REPORT_STAGED ||
        (a->report == MEMBER_REPORT_PROGRESS && w->nodes[node].read))
        ev.node.sources_read_ns = w->now_ns;
    ev.node.sources_known = a->report == MEMBER_REPORT_PROGRESS && w->nodes[node].told;
    if (a->report == MEMBER_REPORT_FAILED && t != NULL)
        for (uint32_t i = 0; i < w->n_workers; i++)
            if (w->workers[i].node == node && t->role[i] != REFIT_ROLE_NONE && world_chance(w, 0.3))
                ev.node.worker = t->worker[i];
    if (a->report == MEMBER_REPORT_FAILED && t != NULL && a->code == RS_EDATALOSS &&
        wrong_seen(w, t, node) != 0)
        ev.node.worker = wrong_seen(w, t, node);
    if (a->report == MEMBER_REPORT_STAGED && t != NULL)
        wrong_note(w, t, node);
    node_report(w, node, &ev);
}

static void do_action(struct world *w, uint32_t node, const struct member_action *a)
{
    struct node *n = &w->nodes[node];
    switch (a->type) {
    case MEMBER_DO_PLAN:
        do_plan(w, node, a->attempt);
        break;
    case MEMBER_DO_PREPARE:
        (void)work(w, node, WORK_PREPARED, a->attempt, 10);
        break;
    case MEMBER_DO_START:
        do_start(w, node, a->attempt);
        break;
    case MEMBER_DO_ABORT:
        if (!n->mute)
            (void)work(w, node, WORK_QUIET, a->attempt, 15);
        break;
    case MEMBER_DO_KILL:
        n->mute = false;
        node_data_plane_dies(w, node);
        break;
    case MEMBER_DO_END:
        n->attempt = 0;
        n->started = false;
        break;
    case MEMBER_DO_REPORT:
        do_report(w, node, a);
        break;
    case MEMBER_DO_SET_DEADLINE:
        if (a->at_ns != MEMBER_NEVER)
            node_timer(w, NODE_TICKS, node, a->at_ns);
        break;
    }
}

static void member_event(struct world *w, uint32_t node, struct member_event ev)
{
    struct node *n = &w->nodes[node];
    struct member_update u; /* steps may nest: a kill is a step of its own */
    ev.now_ns = w->now_ns;
    member_step(&n->member, &ev, &u);
    member_check(&n->member);
    for (size_t i = 0; i < u.n_actions; i++)
        do_action(w, node, &u.actions[i]);
    if (member_quiet(&n->member) && n->attempt != 0)
        world_fail(w, "node %u says that it is quiet, but attempt %llu moves", node,
                   ULL(n->attempt));
}

static void works_plan(struct world *w, uint32_t node, uint64_t attempt)
{
    static const uint8_t other[16] = {0xFF, 0xFF};
    const struct trial *t = trial_find(w, attempt);
    bool differs = node != 0 && world_fault(w, 0.005); /* it has other devices than it had said */
    if (t != NULL)
        member_event(w, node,
                     (struct member_event){.type = MEMBER_EV_PLANNED,
                                           .attempt = attempt,
                                           .digest = differs ? other : t->digest});
}

/* What its senders send has been told, read or not. */
static void works_tells(struct world *w, uint32_t node, uint64_t attempt)
{
    struct node *n = &w->nodes[node];
    if (n->attempt != attempt || !n->started || n->member.state.state != MEMBER_STARTED)
        return;
    n->told = true;
    member_event(w, node, (struct member_event){.type = MEMBER_EV_PROGRESS, .attempt = attempt});
}

/* Looks again and again until all of this node's part is done. */
static void works_moves(struct world *w, uint32_t node, uint64_t attempt)
{
    struct node *n = &w->nodes[node];
    struct trial *t = trial_find(w, attempt);
    if (t == NULL || n->attempt != attempt || !n->started || n->hangs)
        return;
    bool active = n->member.state.state == MEMBER_STARTED;
    if (!node_may_move(w, n) || world_fault(w, 0.002)) {
        if (active)
            member_event(
                w, node,
                (struct member_event){.type = MEMBER_EV_LANDED,
                                      .attempt = attempt,
                                      .code = node_may_move(w, n) ? RS_EDATALOSS : RS_EDEADLINE});
        return;
    }
    n->idle = trial_move(w, t, node) ? 0 : n->idle + 1;
    if (active && !n->read && trial_read(w, t, node)) {
        n->read = true;
        member_event(w, node,
                     (struct member_event){.type = MEMBER_EV_PROGRESS, .attempt = attempt});
    }
    if (active && trial_done(w, t, node) && wrong_seen(w, t, node) != 0) {
        member_event(w, node,
                     (struct member_event){.type = MEMBER_EV_LANDED,
                                           .attempt = attempt,
                                           .code = RS_EDATALOSS,
                                           .text = "differs from a source here"});
        return;
    }
    if (active && trial_done(w, t, node)) {
        n->attempt = 0; /* its streams are drained */
        member_event(w, node, (struct member_event){.type = MEMBER_EV_LANDED, .attempt = attempt});
        return;
    }
    if (active && n->idle > 60)
        member_event(
            w, node,
            (struct member_event){.type = MEMBER_EV_LANDED, .attempt = attempt, .code = RS_EPEER});
    else
        (void)work(w, node, WORK_MOVES, attempt, 4);
}

static void works_apply(struct world *w, uint32_t node, const struct message *m)
{
    struct worker *worker = world_worker(w, m->action.worker);
    if (worker == NULL || !worker->attached)
        return;
    struct refit_event ev = {.type = REFIT_EV_APPLIED,
                             .applied = {.worker = worker->id,
                                         .version = m->action.version,
                                         .code = world_fault(w, 0.03) ? RS_EDATALOSS : 0}};
    worker->live = worker->shadow;
    if (ev.applied.code != 0)
        worker->live.got = 0;
    node_report(w, node, &ev);
}

static void node_works(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    uint64_t attempt = m->action.attempt;
    if (m->life != n->life || m->session != n->data_life || !n->alive || !n->data_up)
        return;
    switch ((enum work)m->step) {
    case WORK_PLANNED:
        works_plan(w, m->who, attempt);
        break;
    case WORK_PREPARED:
        if (!world_fault(w, 0.01)) /* else it hangs; the deadline finds it */
            member_event(w, m->who,
                         (struct member_event){.type = MEMBER_EV_MADE_READY,
                                               .attempt = attempt,
                                               .code = world_fault(w, 0.01) ? RS_EDEVICE : 0});
        break;
    case WORK_TELLS:
        works_tells(w, m->who, attempt);
        break;
    case WORK_MOVES:
        works_moves(w, m->who, attempt);
        break;
    case WORK_QUIET:
        if (n->attempt == attempt) {
            n->attempt = 0;
            n->started = false;
        }
        member_event(w, m->who, (struct member_event){.type = MEMBER_EV_QUIET, .attempt = attempt});
        break;
    case WORK_APPLIED:
        works_apply(w, m->who, m);
        break;
    }
}

void node_data_plane_dies(struct world *w, uint32_t node)
{
    struct node *n = &w->nodes[node];
    if (!n->alive || !n->data_up)
        return;
    world_say(w, "data plane of node %u dies", node);
    n->data_up = false;
    n->data_life++;
    n->attempt = 0;
    n->started = n->mute = false;
    member_event(w, node, (struct member_event){.type = MEMBER_EV_DATA_PLANE_DEAD});
    node_report(w, node, &(struct refit_event){.type = REFIT_EV_NODE_LOST});
    node_timer(w, DATA_PLANE_RETURNS, node, world_soon(w, 60));
}

static void tell_up(struct world *w, uint32_t node)
{
    struct refit_event ev = {.type = REFIT_EV_NODE_UP};
    ev.node.committed = w->nodes[node].committed;
    ev.node.data_plane = w->nodes[node].data_life;
    if (w->nodes[node].data_up)
        node_report(w, node, &ev);
}

/* --- orders --- */

static void order_of_attempt(struct world *w, const struct message *m)
{
    const struct refit_action *a = &m->action;
    struct member_event ev = {.session = m->session,
                              .attempt = a->attempt,
                              .version = a->version,
                              .epoch = a->epoch,
                              .data_plane = a->data_plane,
                              .text = "ordered"};
    const struct trial *t = trial_find(w, a->attempt);
    if (m->ends)
        ev.type = MEMBER_EV_END;
    else if (a->type == REFIT_DO_PREPARE)
        ev.type = MEMBER_EV_PREPARE;
    else if (a->type == REFIT_DO_START)
        ev.type = MEMBER_EV_START;
    else
        ev.type = a->type == REFIT_DO_ABORT ? MEMBER_EV_ABORT : MEMBER_EV_EXPEL;
    if (ev.type == MEMBER_EV_PREPARE && t == NULL)
        return; /* a stray of long ago */
    ev.digest = t != NULL ? t->digest : NULL;
    member_event(w, m->who, ev);
}

static void order_arrives(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    const struct refit_action *a = &m->action;
    struct worker *worker = NULL;
    bool of_attempt = m->ends || (a->type != REFIT_DO_COMMITTED && a->type != REFIT_DO_TELL &&
                                  a->type != REFIT_DO_APPLY);
    if (n->alive && of_attempt) {
        order_of_attempt(w, m); /* of an old session too: the member refuses it by itself */
        return;
    }
    if (!n->alive || n->session == 0 || m->session != n->session)
        return;
    if (a->type == REFIT_DO_COMMITTED) {
        n->committed = a->version > n->committed ? a->version : n->committed;
        return;
    }
    if (a->type == REFIT_DO_TELL || a->type == REFIT_DO_APPLY) {
        worker = world_worker(w, a->worker);
        if (worker == NULL || !worker->attached)
            return; /* it is dead; that is on its way */
    }
    if (a->type == REFIT_DO_TELL) {
        uint64_t at = world_soon(w, 1);
        worker->last_in_ns = at > worker->last_in_ns ? at : worker->last_in_ns + 1;
        struct message *to = world_send(w, TO_WORKER, worker->last_in_ns);
        to->who = (uint32_t)(worker - w->workers);
        to->life = worker->life;
        to->action = *a;
    } else if (a->type == REFIT_DO_APPLY && worker->asleep) {
        return; /* that is on its way */
    } else if (a->type == REFIT_DO_APPLY) {
        if (!memory_whole(w, worker, &worker->shadow) || worker->shadow.version != a->version)
            world_fail(w, "apply of version %llu from a shadow that does not hold it",
                       ULL(a->version));
        if (!n->data_up || a->data_plane != n->data_life)
            return;
        worker->live.got = 0; /* from now on it is being written to */
        struct refit_action apply = *a;
        work(w, m->who, WORK_APPLIED, 0, 15)->action = apply;
    }
}

/* --- the session, at the node --- */

void node_seeks_soon(struct world *w, uint32_t node)
{
    node_timer(w, NODE_SEEKS, node, world_soon(w, 30));
}

void node_severed(struct world *w, uint32_t node, enum member_event_type why)
{
    struct node *n = &w->nodes[node];
    if (!n->alive || n->session == 0)
        return;
    n->session = 0;
    if (why == MEMBER_EV_LEASE_OVER) { /* the data plane drops everything by itself */
        n->attempt = 0;
        n->started = false;
    }
    member_event(w, node, (struct member_event){.type = why, .text = "it is over"});
    if (node != 0)
        node_seeks_soon(w, node);
}

/* An Apply of an earlier session is still copying there. */
static bool applies(const struct world *w, uint32_t node)
{
    const struct node *n = &w->nodes[node];
    for (uint32_t i = 0; i < w->n_messages; i++) {
        const struct message *m = &w->messages[i];
        if (m->type == NODE_WORKS && m->who == node && m->step == WORK_APPLIED &&
            m->life == n->life && m->session == n->data_life)
            return true;
    }
    return false;
}

static void seeks(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!n->alive || m->life != n->life || n->session != 0)
        return;
    node_seeks_soon(w, m->who);
    if (!member_quiet(&n->member) || applies(w, m->who) || w->refit == NULL)
        return;
    uint64_t at = link_at(w, m->who, &n->last_out_ns);
    struct message *j = world_send(w, JOIN, at);
    j->who = m->who;
    j->life = n->life;
    n->joining = j->number;
}

static void welcomed(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!n->alive || m->life != n->life || m->request != n->joining || n->session != 0)
        return;
    n->session = m->session;
    n->lease_until_ns = m->sent_ns + LEASE_MS * (uint64_t)MS;
    member_event(w, m->who,
                 (struct member_event){.type = MEMBER_EV_JOINED,
                                       .session = n->session,
                                       .coordinator = m->coordinator_life});
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].node == m->who && w->workers[i].attached) {
            w->workers[i].publishing = false;
            worker_tells(w, i, true);
        }
    struct message *told = world_send(w, TOLD, link_at(w, m->who, &n->last_out_ns));
    told->who = m->who;
    told->session = n->session;
    tell_up(w, m->who);
    struct message *beat = node_timer(w, NODE_BEATS, m->who, w->now_ns + 1);
    beat->session = n->session;
    node_timer(w, LEASE_LOOK, m->who, n->lease_until_ns)->session = n->session;
}

static void beats(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!n->alive || m->session != n->session)
        return;
    struct message *b = world_send(w, BEAT, link_at(w, m->who, &n->last_out_ns));
    b->who = m->who;
    b->session = n->session;
    b->sent_ns = w->now_ns;
    node_timer(w, NODE_BEATS, m->who, w->now_ns + BEAT_MS * (uint64_t)MS)->session = n->session;
}

static void lease_look(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!n->alive || m->session != n->session)
        return;
    if (w->now_ns >= n->lease_until_ns) {
        world_say(w, "node %u: its lease is over", m->who);
        node_severed(w, m->who, MEMBER_EV_LEASE_OVER);
    } else {
        node_timer(w, LEASE_LOOK, m->who, n->lease_until_ns)->session = n->session;
    }
}

static void beat_answered(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    uint64_t until = m->sent_ns + LEASE_MS * (uint64_t)MS;
    if (n->alive && m->session == n->session && w->now_ns < n->lease_until_ns &&
        until > n->lease_until_ns)
        n->lease_until_ns = until;
}

/* --- the coordinator's end --- */

static void link_lost(struct world *w, uint32_t node, bool expelled)
{
    struct node *n = &w->nodes[node];
    check_lost(w, node);
    n->view = AWAY;
    struct refit_event ev = {.type = REFIT_EV_NODE_LOST,
                             .node = {.node = node, .expelled = expelled, .text = "link"}};
    world_step(w, &ev);
}

void link_silent(struct world *w, uint32_t node, const char *why)
{
    struct node *n = &w->nodes[node];
    if (n->view != HERE)
        return;
    w->n_silent++;
    world_say(w, "node %u is silent: %s", node, why);
    n->view = SILENT;
    struct refit_event ev = {.type = REFIT_EV_NODE_SILENT, .node = {.node = node, .text = why}};
    world_step(w, &ev);
}

/* Workers of an incarnation that is gone, or that the node did not tell of. */
static void drop_workers(struct world *w, uint32_t node, uint64_t session)
{
    uint64_t ids[MAX_WORKERS * 2];
    uint32_t n = 0;
    if (w->refit == NULL)
        return;
    for (struct queue *q = w->refit->workers.next; q != &w->refit->workers; q = q->next) {
        const struct refit_worker *r = container_of(q, struct refit_worker, link);
        const struct worker *worker = world_worker(w, r->id);
        bool told = worker != NULL && worker->told_session == session && session != 0;
        if (r->node == node && !r->gone && !told && n < MAX_WORKERS * 2)
            ids[n++] = r->id;
    }
    for (uint32_t i = 0; i < n && w->refit != NULL; i++) {
        struct refit_event ev = {.type = REFIT_EV_LEFT,
                                 .left = {.worker = ids[i], .reason = "its daemon is another"}};
        world_step(w, &ev);
    }
}

static void joins(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (w->refit == NULL || m->life != n->life || !n->alive || m->number != n->joining)
        return;
    if (!member_quiet(&n->member))
        world_fail(w, "node %u joins though attempt %llu moves there", m->who,
                   ULL(n->member.attempt));
    if (n->view == HERE)
        link_silent(w, m->who, "it joins again");
    if (w->refit != NULL && n->view == SILENT)
        link_lost(w, m->who, false);
    if (w->refit != NULL && n->view_life != n->life)
        drop_workers(w, m->who, 0);
    if (w->refit == NULL)
        return;
    n->view = HERE;
    n->view_session = ++w->n_sessions;
    n->view_life = n->life;
    n->heard_ns = w->now_ns;
    struct message *to = world_send(w, WELCOME, link_at(w, m->who, &n->last_in_ns));
    to->who = m->who;
    to->life = n->life;
    to->session = n->view_session;
    to->request = m->number;
    to->sent_ns = w->now_ns;
}

static bool by_session(const struct world *w, const struct message *m)
{
    const struct node *n = &w->nodes[m->who];
    return w->refit != NULL && n->view == HERE && m->session == n->view_session;
}

static void report_arrives(struct world *w, struct message *m)
{
    if (!by_session(w, m))
        return;
    w->nodes[m->who].heard_ns = w->now_ns;
    if (m->ev.type == REFIT_EV_NODE_LOST)
        check_lost(w, m->who);
    if (m->ev.type == REFIT_EV_PROGRESS)
        wrong_known(w, &m->ev);
    if (w->refit == NULL)
        return; /* it died over what was wrong */
    if ((m->ev.type == REFIT_EV_STAGED && !wrong_staged(w, &m->ev)) ||
        (m->ev.type == REFIT_EV_FAILED && !wrong_failed(w, &m->ev)))
        return;
    if (m->ev.type == REFIT_EV_ATTACHED && w->refit != NULL)
        wrong_attached(w, &m->ev);
    world_arrive(w, m);
}

static void beat_arrives(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (!by_session(w, m))
        return;
    n->heard_ns = w->now_ns;
    struct message *a = world_send(w, BEAT_ANSWER, link_at(w, m->who, &n->last_in_ns));
    a->who = m->who;
    a->session = m->session;
    a->sent_ns = m->sent_ns;
}

static void coordinator_looks(struct world *w, const struct message *m)
{
    if (w->refit == NULL || m->coordinator_life != w->coordinator_life)
        return;
    world_send(w, COORDINATOR_LOOKS, w->now_ns + 20 * (uint64_t)MS);
    for (uint32_t i = 1; i < w->n_nodes && w->refit != NULL; i++) {
        struct node *n = &w->nodes[i];
        uint64_t silent = w->now_ns - n->heard_ns;
        if (n->view == HERE && silent > SILENT_MS * (uint64_t)MS)
            link_silent(w, i, "no beat");
        if (w->refit != NULL && n->view == SILENT && silent > (LEASE_MS + SLACK_MS) * (uint64_t)MS)
            link_lost(w, i, true);
    }
}

void links_forget(struct world *w)
{
    for (uint32_t i = 0; i < w->n_nodes; i++) {
        struct node *n = &w->nodes[i];
        if (i != 0 && n->session != 0) {
            struct message *m = node_timer(w, SEVERED, i, world_soon(w, 5));
            m->session = n->session;
        }
        n->view = AWAY;
        n->view_session = n->view_life = n->expelled = 0;
    }
}

/* --- life --- */

void node_start(struct world *w, uint32_t node, bool with_coordinator)
{
    struct node *n = &w->nodes[node];
    n->alive = n->data_up = true;
    n->life++;
    n->data_life++;
    n->session = 0;
    n->attempt = n->committed = 0;
    n->started = n->mute = false;
    member_init(&n->member, "m", 100);
    member_event(
        w, node,
        (struct member_event){.type = MEMBER_EV_DATA_PLANE_UP, .data_plane = n->data_life});
    if (!with_coordinator) {
        node_seeks_soon(w, node);
        return;
    }
    n->view = HERE;
    n->view_life = n->life;
    n->session = n->view_session = ++w->n_sessions;
    member_event(w, node,
                 (struct member_event){.type = MEMBER_EV_JOINED,
                                       .session = n->session,
                                       .coordinator = w->coordinator_life});
    tell_up(w, node);
}

void node_dies(struct world *w, uint32_t node)
{
    struct node *n = &w->nodes[node];
    if (!n->alive)
        return;
    world_say(w, "daemon of node %u dies", node);
    n->alive = n->data_up = n->started = false;
    n->session = n->attempt = 0;
    n->life++;
    n->data_life++;
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].node == node)
            worker_detached(w, i);
    if (node == 0)
        return; /* comes back with the coordinator */
    node_timer(w, NODE_RETURNS, node, world_soon(w, 60));
    if (n->view == HERE) { /* its connections are reset */
        struct message *m = world_send(w, SEVERED, world_soon(w, 5));
        m->who = node;
        m->session = n->view_session;
        m->step = 1;
    }
}

static void severed(struct world *w, const struct message *m)
{
    struct node *n = &w->nodes[m->who];
    if (m->step == 1) {
        if (w->refit != NULL && n->view == HERE && n->view_session == m->session)
            link_silent(w, m->who, "its connection was reset");
    } else if (m->life == n->life && m->session == n->session) {
        node_severed(w, m->who, MEMBER_EV_BROKEN);
    }
}

bool node_handles(struct world *w, struct message *m)
{
    struct node *n = m->type == TO_WORKER ? NULL : &w->nodes[m->who % MAX_NODES];
    switch (m->type) {
    case REPORT:
        report_arrives(w, m);
        return true;
    case TOLD:
        if (by_session(w, m))
            drop_workers(w, m->who, m->session);
        return true;
    case ORDER:
        order_arrives(w, m);
        return true;
    case JOIN:
        joins(w, m);
        return true;
    case WELCOME:
        welcomed(w, m);
        return true;
    case BEAT:
        beat_arrives(w, m);
        return true;
    case BEAT_ANSWER:
        beat_answered(w, m);
        return true;
    case SEVERED:
        severed(w, m);
        return true;
    case NODE_WORKS:
        node_works(w, m);
        return true;
    case NODE_BEATS:
        beats(w, m);
        return true;
    case NODE_SEEKS:
        seeks(w, m);
        return true;
    case NODE_TICKS:
        if (n->alive && m->life == n->life)
            member_event(w, m->who, (struct member_event){.type = MEMBER_EV_TICK});
        return true;
    case LEASE_LOOK:
        lease_look(w, m);
        return true;
    case NODE_DIES:
        if (m->who == 0 && !w->calm)
            world_crash(w);
        if (m->who != 0)
            node_dies(w, m->who);
        return true;
    case NODE_RETURNS:
        node_start(w, m->who, false);
        return true;
    case DATA_PLANE_DIES:
        node_data_plane_dies(w, m->who);
        return true;
    case DATA_PLANE_RETURNS:
        if (n->alive && m->life == n->life) {
            n->data_up = true;
            member_event(
                w, m->who,
                (struct member_event){.type = MEMBER_EV_DATA_PLANE_UP, .data_plane = n->data_life});
            tell_up(w, m->who);
        }
        return true;
    case COORDINATOR_LOOKS:
        coordinator_looks(w, m);
        return true;
    default:
        return false;
    }
}
