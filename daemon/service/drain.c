/* Nodes that are taken out of use: every model's decider hears of it, and lets the workers there go when nothing uses
 * them; their leases end on their node. Whoever asked is answered when the last decider has. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/coordinator.h"

#include "base/banned.h"

/* One request, and the answers of the deciders that it waits for. */
struct drain {
    struct queue in; /* coordinator.drains */
    struct coordinator *coordinator;
    uint64_t cookie; /* of who asked; nobody may be waiting with it any more */
    uint32_t n_open;
    struct op_reply reply;
    char text[ERR_TEXT_BYTES];
    uint32_t n_waits;
    struct drain_wait {
        struct waiter waiter;
        struct drain *drain;
    } waits[];
};

static void drain_close(struct drain *x)
{
    for (uint32_t i = 0; i < x->n_waits; i++)
        waiter_forget(&x->waits[i].waiter);
    queue_remove(&x->in);
    mem_free(x);
}

static void drain_answered(struct drain *x)
{
    if (--x->n_open > 0)
        return;
    struct op_reply reply = x->reply;
    reply.text = x->text;
    service_reply(x->coordinator->service, x->cookie, &reply);
    drain_close(x);
}

/* A decider that has never heard of the node has nothing there. */
static void on_drained(struct waiter *w, const struct op_reply *reply)
{
    struct drain *x = container_of(w, struct drain_wait, waiter)->drain;
    if (reply->code == 0) {
        x->reply.value += reply->value;
    } else if (reply->code != RS_ENOTFOUND && x->reply.code == 0) {
        x->reply.code = reply->code;
        (void)snprintf(x->text, sizeof x->text, "%s", reply->text);
    }
    drain_answered(x);
}

static void event_send(struct decider *d, uint32_t node, bool on, struct drain_wait *w)
{
    struct service *s = d->coordinator->service;
    w->waiter.done = on_drained;
    struct refit_event ev = {.type = REFIT_EV_DRAIN,
                             .cookie = waiter_add(s, &w->waiter),
                             .drain = {.node = node, .on = on}};
    uint64_t cookie = ev.cookie;
    int r = decider_event(d, &ev);
    if (r != 0)
        service_answer(s, cookie, r,
                       r == RS_EUNAVAIL ? "the daemon is stopping" : "no memory to drain");
}

int op_drain(struct service *s, uint32_t node, bool undrain, struct waiter *w, struct err *e)
{
    struct coordinator *c = s->coordinator;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    struct drain *x = mem_zalloc(sizeof *x + c->n_deciders * sizeof *x->waits);
    if (x == NULL)
        return err_set(e, RS_ENOMEM, "no memory to drain");
    x->coordinator = c;
    x->n_waits = c->n_deciders;
    x->n_open = c->n_deciders + 1; /* ours, so that it lives until all have been asked */
    x->cookie = waiter_add(s, w);
    queue_push(&c->drains, &x->in);
    c->nodes[node].draining = !undrain;
    log_info("node %s is %s", coordinator_node_name(c, node), undrain ? "in use again" : "drained");
    uint32_t i = 0;
    queue_foreach (q, &c->deciders) {
        struct drain_wait *wait = &x->waits[i++];
        wait->drain = x;
        event_send(container_of(q, struct decider, in), node, !undrain, wait);
    }
    drain_answered(x);
    return 0;
}

void drain_tell(struct decider *d, uint32_t node)
{
    struct refit_event ev = {.type = REFIT_EV_DRAIN, .drain = {.node = node, .on = true}};
    if (d->coordinator->nodes[node].draining)
        (void)decider_event(d, &ev);
}

void drain_sweep(struct decider *d)
{
    const struct coordinator *c = d->coordinator;
    queue_foreach_safe (q, tmp, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        bool known = refit_find_worker(d->refit, r->worker) != NULL;
        r->taken |= known;
        if (known || !r->taken || r->leaving || !c->nodes[r->node].draining)
            continue;
        char text[160];
        struct node_order o = {
            .type = NODE_ORDER_EVICT, .model = d->model, .worker = r->worker, .text = text};
        (void)snprintf(text, sizeof text, "node %s is drained: attach on another one",
                       coordinator_node_name(c, r->node));
        r->leaving =
            true; /* before the order: on this node its lease ends, and r with it, inside */
        uint32_t node = r->node;
        if (coordinator_order(d->coordinator, node, &o) != 0)
            r->leaving = false; /* again when the node is back; r is there: nothing was ended */
    }
}

void drains_forget(struct coordinator *c)
{
    while (!queue_empty(&c->drains))
        drain_close(container_of(c->drains.next, struct drain, in));
}
