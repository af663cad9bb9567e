/* The coordinator's nodes: who they are, orders to them, what they must know when they come. */
#include "service/coordinator.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/nodes.h"

#include "base/banned.h"

static int peer_send(struct service *s, uint32_t node, const struct node_order *o)
{
    return s->peer != NULL && !s->stopping ? peer_order(s->peer, node, o) : RS_EUNAVAIL;
}

static void peer_view_of(const struct service *s, uint32_t node, struct peer_view *ret)
{
    if (s->peer != NULL) {
        peer_look(s->peer, node, ret);
        return;
    }
    *ret = (struct peer_view){.state = PEER_AWAY,
                              .name = s->config->nodes[node].name,
                              .data_address = "",
                              .release = "",
                              .why = "this daemon is starting or stopping"};
}

int coordinator_new(struct service *s, struct coordinator **ret, struct err *e)
{
    const struct config *config = s->config;
    struct coordinator *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the coordinator");
    c->service = s;
    c->send = peer_send;
    c->look = peer_view_of;
    queue_init(&c->deciders);
    queue_init(&c->asked);
    queue_init(&c->drains);
    c->n_nodes = config->n_nodes > 0 ? config->n_nodes : 1;
    c->nodes = mem_calloc(c->n_nodes, sizeof *c->nodes);
    c->own_domains = nodes_own_domains(config, NULL);
    if (c->nodes != NULL && c->own_domains != NULL) {
        *ret = c;
        return 0;
    }
    coordinator_close(c);
    return err_set(e, RS_ENOMEM, "no memory for the coordinator");
}

static void commits_free(struct node *n)
{
    for (uint32_t i = 0; i < n->n_commits; i++)
        mem_free(n->commits[i].model);
    mem_free(n->commits);
    n->commits = NULL;
    n->n_commits = 0;
}

void coordinator_close(struct coordinator *c)
{
    if (c == NULL)
        return;
    drains_forget(c);
    for (uint32_t i = 0; c->nodes != NULL && i < c->n_nodes; i++) {
        asked_forget(c, i);
        commits_free(&c->nodes[i]);
    }
    nodes_domains_free(c->own_domains, c->service->config->devices);
    mem_free(c->nodes);
    mem_free(c);
}

int coordinator_order(struct coordinator *c, uint32_t node, const struct node_order *o)
{
    struct service *s = c->service;
    if (node != s->node)
        return c->send(s, node, o);
    node_order_take(s, o);
    return 0;
}

const char *coordinator_node_name(const struct coordinator *c, uint32_t node)
{
    const struct config *config = c->service->config;
    return node == c->service->node ? config->node : config->nodes[node].name;
}

/* --- what is committed -------------------------------------------------------------------------- */

static uint64_t committed_content(const struct refit *r)
{
    const struct refit_version *v = refit_find_version(r, r->committed);
    return v != NULL ? v->publication : 0;
}

static void committed_tell(struct decider *d, uint32_t node)
{
    struct node_order o = {.type = NODE_ORDER_COMMITTED,
                           .model = d->model,
                           .version = d->refit->committed,
                           .content = committed_content(d->refit),
                           .wall_ns = d->refit->committed_wall_ns,
                           .text = ""};
    (void)coordinator_order(d->coordinator, node, &o); /* who is away is told when it comes */
}

void coordinator_announce(struct decider *d)
{
    d->announced = true;
    for (uint32_t i = 0; i < d->coordinator->n_nodes; i++)
        committed_tell(d, i);
}

void coordinator_brief(struct coordinator *c, uint32_t node)
{
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (d->announced || node == c->service->node)
            committed_tell(d, node);
    }
}

/* --- nodes that come and go --------------------------------------------------------------------- */

int coordinator_node_joined(struct coordinator *c, uint32_t node, const struct peer_member *m)
{
    struct node *n = &c->nodes[node];
    commits_free(n);
    n->commits = mem_calloc(m->n_commits, sizeof *n->commits);
    if (n->commits == NULL)
        return RS_ENOMEM;
    for (; n->n_commits < m->n_commits; n->n_commits++) {
        n->commits[n->n_commits].version = m->commits[n->n_commits].version;
        n->commits[n->n_commits].model = mem_strdup(m->commits[n->n_commits].model);
        if (n->commits[n->n_commits].model == NULL)
            return RS_ENOMEM;
    }
    return 0;
}

static uint64_t committed_by(const struct node *n, const char *model)
{
    for (uint32_t i = 0; i < n->n_commits; i++)
        if (strcmp(n->commits[i].model, model) == 0)
            return n->commits[i].version;
    return 0;
}

/* A ledger that has lost versions shows by what others know of it. */
static void commits_open(struct coordinator *c, const struct node *n)
{
    struct decider *d;
    struct err e = {0};
    for (uint32_t i = 0; i < n->n_commits; i++)
        if (n->commits[i].version != 0 && decider_open(c, n->commits[i].model, &d, &e) != 0)
            log_warn("model %s: a node knows version %" PRIu64 " of it; not taken up: %s",
                     n->commits[i].model, n->commits[i].version, e.text);
}

/* A worker of this node that it has not told of since its session began. */
static struct roster_entry *worker_missing(const struct decider *d, uint32_t node)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *r = container_of(q, struct roster_entry, in);
        if (r->node == node && !r->reported)
            return r;
    }
    return NULL;
}

void worker_missing_leave(struct decider *d, struct roster_entry *r)
{
    struct refit_event ev = {.type = REFIT_EV_LEFT,
                             .left = {.worker = r->worker,
                                      .for_good = false,
                                      .may_return = true,
                                      .reason = "its node came back without it"}};
    roster_remove(r);
    (void)decider_event(d, &ev);
}

static void workers_missing_leave(struct decider *d, uint32_t node)
{
    for (struct roster_entry *r; (r = worker_missing(d, node)) != NULL;)
        worker_missing_leave(d, r);
}

void coordinator_node_up(struct coordinator *c, uint32_t node, const struct node_report *r)
{
    struct node *n = &c->nodes[node];
    commits_open(c, n);
    n->up = true;
    n->broken[0] = '\0';
    n->data_port = r->data_port;
    n->data_plane = r->event.node.data_plane;
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        struct refit_event ev = {.type = REFIT_EV_NODE_UP,
                                 .node = {.node = node,
                                          .text = "",
                                          .committed = committed_by(n, d->model),
                                          .data_plane = n->data_plane}};
        (void)decider_event(d, &ev);
        drain_tell(d, node);
        workers_missing_leave(d, node);
    }
}

static void event_all(struct coordinator *c, enum refit_event_type type, uint32_t node, int code,
                      bool expelled, const char *text)
{
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        struct refit_event ev = {.type = type,
                                 .node = {.node = node,
                                          .attempt = d->run.id,
                                          .code = code,
                                          .text = text,
                                          .expelled = expelled}};
        landed_drop(&d->landed, node);
        if (type == REFIT_EV_NODE_LOST)
            run_node_quiet(d, node);
        (void)decider_event(d, &ev);
    }
}

void coordinator_node_lost(struct coordinator *c, uint32_t node, int code, const char *why)
{
    struct node *n = &c->nodes[node];
    n->n_lost += n->up; /* what has not started can't be lost */
    n->up = false;
    (void)snprintf(n->broken, sizeof n->broken, "%s", code == RS_EDEVICE ? why : "");
    event_all(c, REFIT_EV_NODE_LOST, node, code, false, why);
}

void coordinator_node_silent(struct coordinator *c, uint32_t node, const char *why)
{
    asked_forget(c, node);
    event_all(c, REFIT_EV_NODE_SILENT, node, RS_EUNAVAIL, false, why);
}

/* Its workers' leases go on there; they are reported when it is back. */
void coordinator_node_gone(struct coordinator *c, uint32_t node, bool expelled, const char *why)
{
    asked_forget(c, node);
    c->nodes[node].n_lost++;
    c->nodes[node].up = false;
    c->nodes[node].broken[0] = '\0'; /* it tells again when it is back */
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        queue_foreach (w, &d->roster) {
            struct roster_entry *r = container_of(w, struct roster_entry, in);
            if (r->node != node)
                continue;
            r->reported = false;
            r->told_held = r->told_applied = UINT64_MAX; /* told anew */
        }
    }
    event_all(c, REFIT_EV_NODE_LOST, node, RS_EUNAVAIL, expelled, why);
}
