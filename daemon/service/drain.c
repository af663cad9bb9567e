/* Nodes that are taken out of use: the ledger remembers it, then every model's decider hears of it, and lets the workers there
 * go when nothing uses them; their leases end on their node. Whoever asked is answered when the last decider has. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "service/coordinator.h"

#include "base/banned.h"

/* One request: its record, then the answers of the deciders that it waits for. */
struct drain {
    struct queue in; /* coordinator.drains */
    struct coordinator *coordinator;
    struct ledger_transaction transaction;
    uint64_t cookie; /* of who asked; nobody may be waiting with it any more */
    uint32_t node;
    uint64_t since_wall_ns; /* 0: it is in use again */
    uint32_t n_open;
    struct op_reply reply;
    char text[ERR_TEXT_BYTES];
    struct drain_wait {
        struct waiter waiter;
        struct drain *drain;
    } * waits; /* of each decider */
    uint32_t n_waits;
};

static void drain_close(struct drain *x)
{
    for (uint32_t i = 0; i < x->n_waits; i++)
        waiter_forget(&x->waits[i].waiter);
    queue_remove(&x->in);
    mem_free(x->waits);
    mem_free(x);
}

/* Answers now. */
static void drain_fail(struct drain *x, int code, const char *text)
{
    struct op_reply reply = {.code = code, .text = text};
    service_reply(x->coordinator->service, x->cookie, &reply);
    drain_close(x);
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

static void event_send(struct decider *d, const struct drain *x, struct drain_wait *w)
{
    struct service *s = d->coordinator->service;
    w->waiter.done = on_drained;
    struct refit_event ev = {.type = REFIT_EV_DRAIN,
                             .cookie = waiter_add(s, &w->waiter),
                             .drain = {.node = x->node, .on = x->since_wall_ns != 0}};
    uint64_t cookie = ev.cookie;
    int r = decider_event(d, &ev);
    /* The ledger has it: the decider hears of it all the same. UNTESTED: it has the room from earlier steps. */
    if (r == RS_ENOMEM) {
        ev.cookie = 0;
        (void)decider_event(d, &ev);
    }
    if (r != 0)
        service_answer(s, cookie, r,
                       r == RS_EUNAVAIL
                           ? "the daemon is stopping"
                           : "it is done, but there is no memory to wait for the workers");
}

/* Nobody waits for what they answer. */
static void deciders_tell(const struct drain *x)
{
    struct refit_event ev = {.type = REFIT_EV_DRAIN,
                             .drain = {.node = x->node, .on = x->since_wall_ns != 0}};
    queue_foreach (q, &x->coordinator->deciders)
        (void)decider_event(container_of(q, struct decider, in),
                            &ev); /* kept where there is no memory */
}

/* The ledger has it. */
static void drain_act(struct drain *x)
{
    struct coordinator *c = x->coordinator;
    c->nodes[x->node].drained_wall_ns = x->since_wall_ns;
    log_info("node %s is %s", coordinator_node_name(c, x->node),
             x->since_wall_ns != 0 ? "drained" : "in use again");
    x->waits = mem_calloc(c->n_deciders, sizeof *x->waits);
    if (x->waits == NULL) {
        deciders_tell(x);
        drain_fail(x, RS_ENOMEM, "it is done, but there is no memory to wait for the workers");
        return;
    }
    x->n_waits = c->n_deciders;
    x->n_open = 1; /* ours, so that it lives until all have been asked */
    uint32_t i = 0;
    queue_foreach (q, &c->deciders) {
        struct drain_wait *wait = &x->waits[i++];
        wait->drain = x;
        x->n_open++;
        event_send(container_of(q, struct decider, in), x, wait);
    }
    drain_answered(x);
}

static void on_written(struct ledger_transaction *t, int code, const struct err *e)
{
    struct drain *x = container_of(t, struct drain, transaction);
    struct service *s = x->coordinator->service;
    ledger_transaction_close(t);
    s->n_writes--;
    if (code != 0)
        drain_fail(x, code, err_text(e, code));
    else if (s->stopping)
        drain_fail(x, RS_EUNAVAIL, "the daemon is stopping, but the ledger has it");
    else
        drain_act(x);
    service_check_ledger(s, code);
    service_stop_if_idle(s);
}

/* A drain that goes on began when it began. */
static uint64_t since(const struct node *n, bool undrain)
{
    if (undrain)
        return 0;
    return n->drained_wall_ns != 0 ? n->drained_wall_ns : clock_wall_ns();
}

int op_drain(struct service *s, uint32_t node, bool undrain, struct waiter *w, struct err *e)
{
    struct coordinator *c = s->coordinator;
    struct ledger_record record = {.kind = LEDGER_DRAIN,
                                   .drain = {.node = coordinator_node_name(c, node),
                                             .since_wall_ns = since(&c->nodes[node], undrain)}};
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    struct drain *x = mem_zalloc(sizeof *x);
    if (x == NULL || ledger_transaction_init(&x->transaction, &record, 1) != 0) {
        mem_free(x);
        return err_set(e, RS_ENOMEM, "no memory to drain");
    }
    x->coordinator = c;
    x->node = node;
    x->since_wall_ns = record.drain.since_wall_ns;
    x->cookie = waiter_add(s, w);
    x->transaction.done = on_written;
    queue_push(&c->drains, &x->in);
    s->n_writes++;
    ledger_submit(s->ledger, &x->transaction);
    return 0;
}

void drain_restore(struct coordinator *c, const struct ledger_drain *row)
{
    for (uint32_t i = 0; i < c->n_nodes; i++)
        if (strcmp(coordinator_node_name(c, i), row->node) == 0) {
            c->nodes[i].drained_wall_ns = row->since_wall_ns;
            return;
        }
    if (row->since_wall_ns != 0)
        log_warn("node %s is drained by the ledger, and no node of that name is there", row->node);
}

void drain_tell(struct decider *d, uint32_t node)
{
    struct refit_event ev = {.type = REFIT_EV_DRAIN, .drain = {.node = node, .on = true}};
    if (d->coordinator->nodes[node].drained_wall_ns != 0)
        (void)decider_event(d, &ev);
}

void drain_sweep(struct decider *d)
{
    const struct coordinator *c = d->coordinator;
    queue_foreach_safe (q, tmp, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        bool known = refit_find_worker(d->refit, r->worker) != NULL;
        r->taken |= known;
        if (known || !r->taken || r->leaving || c->nodes[r->node].drained_wall_ns == 0)
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
