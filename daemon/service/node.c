/* This node's end of what it and the coordinator say to each other: by function calls where the coordinator is here,
 * by the session's stream elsewhere (peer/peer.h). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "service/comm.h"
#include "service/coordinator.h"
#include "service/lease.h"
#include "service/part.h"

#include "base/banned.h"

/* --- reports ------------------------------------------------------------------------------------ */

int node_tell(struct service *s, const struct node_report *r)
{
    if (s->session == 0)
        return RS_EUNAVAIL;
    if (s->coordinator == NULL)
        return s->peer != NULL ? peer_report(s->peer, r) : RS_EUNAVAIL;
    coordinator_report(s->coordinator, s->node, r);
    return 0;
}

int node_ask(struct service *s, struct node_report *r, struct waiter *w, struct err *e)
{
    uint64_t cookie = waiter_add(s, w);
    w->asked = true;
    if (r->type == NODE_REPORT_PUBLISH_ASK)
        r->cookie = cookie;
    else
        r->event.cookie = cookie;
    int code = node_tell(s, r);
    if (code == 0)
        return 0;
    waiter_forget(w);
    return err_set(e, code, "the coordinator can't be reached now: %s; try again",
                   s->peer != NULL ? peer_text(s->peer) : err_name(code));
}

/* --- orders ------------------------------------------------------------------------------------- */

static void on_reply(struct service *s, const struct node_order *o)
{
    struct op_reply reply = {.code = o->code,
                             .text = o->text,
                             .version = o->version,
                             .attempt = o->attempt,
                             .value = o->value,
                             .phase = o->phase};
    service_reply(s, o->cookie, &reply);
}

static void on_committed(struct model *m, const struct node_order *o)
{
    m->announced = true;
    if (o->version < m->committed.version)
        return; /* who polls never sees an older one */
    if (m->committed.version != 0 && o->version > m->committed.version)
        crash_point(CRASH_COMMIT_HEARD);
    m->committed.version = o->version;
    m->committed.wall_ns = o->wall_ns;
    remember_committed(m);
    watch_committed(m);
}

/* An attach that waits for its answer is told by this first. */
/* What memory is that version by this node's account is not, but for what the decider's last word says. */
static void content_forget(struct lease *l, uint64_t version)
{
    bool staged = l->receive == REFIT_STAGED_RECEIVE;
    uint64_t believed[] = {[WIRE_LIVE] = staged ? l->applied : l->held, [WIRE_SHADOW] = l->held};
    for (unsigned i = 0; version != 0 && i < 2; i++) {
        if (l->content[i].version != version || believed[i] == version)
            continue;
        l->content[i] = (struct memory_content){0};
        l->torn |= i == WIRE_LIVE;
    }
}

static void on_worker(struct service *s, const struct node_order *o)
{
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->id != o->worker)
            continue;
        l->held = o->held;
        l->applied = o->applied;
        content_forget(l, o->version);
    }
}

static void on_tell(struct lease *l, const struct node_order *o)
{
    bool end = l->side == REFIT_SOURCE
                   ? o->tell == REFIT_TELL_SOURCE_RELEASED
                   : o->tell == REFIT_TELL_COMMITTED || o->tell == REFIT_TELL_ABORTED;
    if (end && o->version >= l->waits_for)
        l->waits_for = 0;
    if (end)
        lease_publish_ends(l, o->version);
    if (l->stream != NULL)
        l->stream->tell(l->stream, o->tell, o->version, o->attempt, o->text);
}

static void on_lease_order(struct service *s, const struct node_order *o)
{
    struct lease *l = lease_find(s, o->worker);
    if (l == NULL)
        return; /* its end has been told already */
    if (o->type == NODE_ORDER_APPLY) {
        /* One for a data plane that has died since was answered with it, one for a sleeper with SLEPT. */
        if (!l->asleep && (o->data_plane == 0 || o->data_plane == link_child(s->link)))
            lease_apply(l, o->version);
    } else if (o->type == NODE_ORDER_TELL)
        on_tell(l, o);
    else
        lease_end(l, true, RS_EABORTED, o->text);
}

static struct model *model_of(struct service *s, const struct node_order *o)
{
    struct model *m;
    struct err e = {0};
    int r = model_open(s, o->model, &m, &e);
    if (r == 0)
        return m;
    log_error("model %s: an order of the coordinator is not followed: %s", o->model,
              err_text(&e, r));
    if (o->type == NODE_ORDER_PREPARE || o->type == NODE_ORDER_COMM_ID) {
        struct node_report report = {
            .type = NODE_REPORT_EVENT,
            .model = o->model,
            .event = {.type = REFIT_EV_FAILED,
                      .node = {.attempt = o->attempt, .code = r, .text = err_text(&e, r)}}};
        (void)node_tell(s, &report);
    }
    return NULL;
}

void node_order_take(struct service *s, const struct node_order *o)
{
    struct model *m;
    switch (o->type) {
    case NODE_ORDER_PREPARE:
    case NODE_ORDER_START:
    case NODE_ORDER_ABORT:
    case NODE_ORDER_END:
    case NODE_ORDER_EXPEL:
    case NODE_ORDER_CELLS:
        if ((m = model_of(s, o)) != NULL)
            part_order(m->part, o);
        break;
    case NODE_ORDER_COMM_ID:
        if ((m = model_of(s, o)) != NULL)
            comm_id_make(m->part, o);
        break;
    case NODE_ORDER_COMMITTED:
        if ((m = model_of(s, o)) != NULL)
            on_committed(m, o);
        break;
    case NODE_ORDER_WORKER:
        on_worker(s, o);
        break;
    case NODE_ORDER_REPLY:
        on_reply(s, o);
        break;
    case NODE_ORDER_APPLY:
    case NODE_ORDER_TELL:
    case NODE_ORDER_EVICT:
        on_lease_order(s, o);
        leases_sweep(s);
        break;
    }
}

/* --- data plane and session --------------------------------------------------------------------- */

static void up_tell(struct service *s)
{
    struct node_report r = {.type = NODE_REPORT_EVENT,
                            .model = "",
                            .event = {.type = REFIT_EV_NODE_UP,
                                      .node = {.text = "", .data_plane = link_child(s->link)}},
                            .data_port = link_data_port(s->link)};
    s->introduced = node_tell(s, &r) == 0;
}

/* Gives how it was lost, or that it does not start. */
static void lost_text(const struct service *s, const char *why, char *ret, size_t capacity)
{
    const char *newest;
    uint32_t n = s->link != NULL ? link_failing(s->link, &newest) : 0;
    if (n == 0)
        (void)snprintf(ret, capacity, "its data plane was lost: %s", why);
    else
        (void)snprintf(ret, capacity,
                       "its data plane does not start (%" PRIu32 " starts failed in a row): %s", n,
                       why);
}

static void lost_tell(struct service *s, const char *why)
{
    char text[400];
    const char *newest;
    bool failing = s->link != NULL && link_failing(s->link, &newest) != 0;
    lost_text(s, why, text, sizeof text);
    struct node_report r = {
        .type = NODE_REPORT_EVENT,
        .model = "",
        .event = {.type = REFIT_EV_NODE_LOST,
                  .node = {.code = failing ? RS_EDEVICE : RS_EPEER,
                           .text = failing ? text : why}}}; /* that it is gone is what it says */
    (void)node_tell(s, &r);
}

/* NODE_UP comes last: what was not reported before it is not here. */
static void introduce(struct service *s)
{
    const char *why;
    if (s->session == 0)
        return;
    if (!s->node_up) {
        if (s->link != NULL && link_failing(s->link, &why) != 0)
            lost_tell(s, why);
        return;
    }
    if (!s->introduced)
        leases_tell(s);
    up_tell(s);
}

void node_welcomed(struct service *s, uint64_t coordinator_incarnation)
{
    s->session = ++s->sessions;
    s->coordinator_incarnation = coordinator_incarnation;
    s->introduced = false;
    queue_foreach (q, &s->models)
        part_joined(container_of(q, struct model, in)->part);
    introduce(s);
}

static void asked_end(struct service *s, const char *why)
{
    struct queue asked;
    queue_init(&asked);
    queue_foreach_safe (q, tmp, &s->waiters) {
        if (!container_of(q, struct waiter, in)->asked)
            continue;
        queue_remove(q);
        queue_push(&asked, q);
    }
    while (!queue_empty(&asked))
        waiter_end(container_of(asked.next, struct waiter, in), RS_EUNAVAIL, why);
}

void node_severed(struct service *s, const char *why)
{
    char text[320];
    (void)snprintf(text, sizeof text, "the coordinator can't be reached: %s", why);
    s->session = 0;
    s->introduced = false;
    log_warn("session with the coordinator over: %s", why);
    queue_foreach (q, &s->models)
        part_broken(container_of(q, struct model, in)->part, text);
    asked_end(s, text);
}

void node_up(struct service *s)
{
    s->node_up = true;
    log_info("data plane serves: workers %u", s->n_leases);
    queue_foreach (q, &s->models)
        part_data_plane(container_of(q, struct model, in)->part, true, "");
    introduce(s);
    leases_sweep(s);
}

void node_lost(struct service *s, const char *why)
{
    char text[400];
    lost_text(s, why, text, sizeof text);
    leases_lost_data_plane(s);
    s->node_up = false;
    queue_foreach (q, &s->models)
        part_data_plane(container_of(q, struct model, in)->part, false, text);
    lost_tell(s, why);
    leases_sweep(s);
}

bool node_is_quiet(const struct service *s)
{
    queue_foreach (q, &s->models)
        if (!part_is_quiet(container_of(q, struct model, in)->part))
            return false;
    queue_foreach (q, &s->leases)
        if (link_waits(&container_of(q, struct lease, in)->apply))
            return false;
    return true;
}
