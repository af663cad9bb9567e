/* Nodes: up, silent, lost, drained. What that does to the attempt in flight is abort.c's. */
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

struct refit_node *refit_node(const struct refit *r, uint32_t node)
{
    if (node < r->n_nodes && r->nodes[node].node == node)
        return &r->nodes[node]; /* where numbers are dense and came in order: nearly always */
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].node == node)
            return &r->nodes[i];
    return NULL;
}

/* step_reserve has made room for one more. NULL: too many nodes. */
struct refit_node *refit_node_get(struct refit *r, uint32_t node)
{
    struct refit_node *n = refit_node(r, node);
    if (n != NULL || r->n_nodes >= REFIT_MAX_NODES)
        return n;
    rs_assert(r->n_nodes < r->nodes_capacity);
    n = &r->nodes[r->n_nodes++];
    *n = (struct refit_node){.node = node};
    return n;
}

const char *refit_node_lacks(const struct refit_node *n)
{
    if (n->draining)
        return "drained";
    if (n->expelled)
        return "not in the cluster";
    if (n->silent)
        return "silent";
    if (n->up)
        return "";
    return n->broken[0] != '\0' ? n->broken : "its data plane is not ready";
}

/* What is on its way is not above what a member knows as committed: an old ledger was put in place, and
 * a version must not be committed twice. */
static void ledger_is_behind(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    if (v == NULL || r->committing || r->known_committed <= r->committed ||
        (v->kind != REFIT_KIND_CATCH_UP && v->version > r->known_committed))
        return;
    attempt_call_off(
        s, RS_EPRECOND,
        step_text(s,
                  "node %.64s knows version %llu as committed; this coordinator's ledger "
                  "is behind (newest %llu): was an old file restored?",
                  NODE_NAME(r, s->ev->node.node), ULL(r->known_committed), ULL(r->committed)));
}

/* --- after a restart --- */

void nodes_restored(struct step *s)
{
    struct refit *r = s->r;
    if (r->config.n_nodes > 1 && r->attempt_high > 0)
        r->settle_until_ns = deadline_after(s, r->config.settle_ms);
}

bool nodes_settled(const struct refit *r)
{
    return r->settle_until_ns == 0;
}

/* Each step: nothing of before this start can move any more. */
void nodes_settle_down(struct step *s)
{
    struct refit *r = s->r;
    uint32_t joined = 0;
    for (size_t i = 0; i < r->n_nodes; i++)
        joined += r->nodes[i].joined;
    if (joined >= r->config.n_nodes || s->ev->now_ns >= r->settle_until_ns)
        r->settle_until_ns = 0;
}

/* --- up, silent, lost --- */

void nodes_up(struct step *s)
{
    struct refit *r = s->r;
    struct refit_node *n = refit_node_get(r, s->ev->node.node);
    if (n != NULL && (!n->up || n->silent))
        r->epoch_stale = true;
    if (n != NULL) {
        n->joined = n->up = true;
        n->data_plane = s->ev->node.data_plane;
        n->silent = n->expelled = false;
        n->broken[0] = '\0';
    }
    if (s->ev->node.committed > r->known_committed)
        r->known_committed = s->ev->node.committed;
    ledger_is_behind(s);
}

void nodes_silent(struct step *s)
{
    struct refit *r = s->r;
    struct refit_node *n = refit_node(r, s->ev->node.node);
    if (n == NULL || n->silent || n->expelled)
        return;
    n->silent = true;
    r->epoch_stale = true;
    attempt_node_silent(s, n);
}

void nodes_lost(struct step *s)
{
    struct refit *r = s->r;
    bool broken = s->ev->node.code == RS_EDEVICE;
    struct refit_node *n =
        broken ? refit_node_get(r, s->ev->node.node) : refit_node(r, s->ev->node.node);
    if (n == NULL)
        return;
    n->silent = false;
    (void)snprintf(n->broken, sizeof n->broken, "%s",
                   !broken                    ? ""
                   : s->ev->node.text == NULL ? "its data plane does not start"
                                              : s->ev->node.text);
    if (n->up) {
        n->up = false;
        r->epoch_stale = true;
        attempt_node_lost(s, n);
    }
    if (s->ev->node.expelled && !n->expelled) {
        n->expelled = true;
        attempt_node_expelled(s, n);
    }
}

/* --- draining --- */

static bool drains(const struct refit *r, const struct refit_worker *w)
{
    const struct refit_node *n = refit_node(r, w->node);
    return n != NULL && n->draining;
}

static void drain_worker(struct step *s, struct refit_worker *w)
{
    struct refit_node *n = refit_node(s->r, w->node);
    if (w->leaving || w->taking_part || w->applying != 0)
        return;
    n->n_drained += !w->gone;
    w->gone = w->leaving = true;
    (void)snprintf(w->gone_reason, sizeof w->gone_reason, "node %.64s is drained",
                   NODE_NAME(s->r, w->node));
    s->r->epoch_stale = true;
    workers_unwant(s->r, w->layout);
}

/* Whoever is on a node that is drained leaves as soon as no attempt uses it; then whoever asked hears. */
void nodes_settle(struct step *s)
{
    struct refit *r = s->r;
    bool any_drains = false;
    for (size_t i = 0; i < r->n_nodes; i++)
        any_drains |= r->nodes[i].draining;
    if (!any_drains)
        return;
    foreach_worker (w, r)
        if (drains(r, w))
            drain_worker(s, w);
    for (size_t i = 0; i < r->n_nodes; i++) {
        bool any = false;
        foreach_worker (w, r)
            any |= w->node == r->nodes[i].node && !w->gone;
        if (r->nodes[i].draining && !any)
            step_answer(s, WAITER_DRAIN, r->nodes[i].node, 0, "", r->nodes[i].n_drained);
    }
}

void nodes_drain(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    struct refit_node *n = refit_node(r, ev->drain.node);
    if (n == NULL) {
        step_reply(s, ev->cookie, RS_ENOTFOUND,
                   step_text(s, "no node %.64s is known", NODE_NAME(r, ev->drain.node)));
        return;
    }
    if (!ev->drain.on) {
        n->draining = false;
        step_answer(s, WAITER_DRAIN, n->node, RS_ECANCELED, "the node is drained no longer", 0);
        step_reply(s, ev->cookie, 0, "");
        return;
    }
    n->n_drained = n->draining ? n->n_drained : 0;
    n->draining = true;
    step_wait(
        s, &(struct refit_waiter){.kind = WAITER_DRAIN, .cookie = ev->cookie, .worker = n->node});
}
