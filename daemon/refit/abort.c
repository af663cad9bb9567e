/* The end of an attempt that does not commit: what calls it off, until all is quiet, and what follows:
 * the version ends, or is tried again without the instances that failed. */
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

/* --- quiet --- */

static bool quiet(const struct refit *r)
{
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].part == REFIT_NODE_ABORTING)
            return false;
    return true;
}

static void try_again(struct step *s, struct refit_version *v)
{
    struct refit *r = s->r;
    step_record_attempt(s, v, REFIT_ABORTED);
    v->reason[0] = '\0';
    v->code = 0;
    phase_move(r, v, REFIT_SUBMITTED);
    attempt_clear(r);
    v->attempt = ++r->attempt_high;
    v->n_attempts++;
    step_record_model(s, r->committed);
    step_record_version(s, v, REFIT_SUBMITTED);
    step_record_attempt(s, v, REFIT_SUBMITTED);
    (void)step_persist(s, WRITE_BEGIN, v);
}

/* The trainer was told that it may write, and nobody else can feed the rest. */
static void source_gone(struct refit_version *v)
{
    char why[ERR_TEXT_BYTES];
    (void)snprintf(why, sizeof why, "%s", v->reason);
    (void)snprintf(
        v->reason, sizeof v->reason,
        "SOURCE_GONE: the sources were released once they were read, and no instance "
        "that could feed the others holds the version whole, compared with what they sent "
        "(%.700s)",
        why);
    v->code = RS_EPRECOND;
}

void attempt_finish(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    if (v == NULL || v->phase.state != REFIT_ABORTING || v->ending != REFIT_NONE || !quiet(r))
        return;
    r->deadline_ns = REFIT_NEVER;
    if (v->kind != REFIT_KIND_REFIT) {
        side_aborted(s);
        return;
    }
    if (r->again && (!v->source_released || feed_find(r, v, NULL) != NULL)) {
        try_again(s, v);
        return;
    }
    if (r->again)
        source_gone(v);
    queue_end(s, v, REFIT_ABORTED);
}

/* --- calling off --- */

void attempt_call_off(struct step *s, int code, const char *text)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    rs_assert(v != NULL && !r->committing);
    if (v->ending != REFIT_NONE)
        return;
    v->code = code;
    (void)snprintf(v->reason, sizeof v->reason, "%s", text);
    if (v->phase.state == REFIT_ABORTING) { /* a request, while a failed attempt lets go */
        r->again = false;
        return;
    }
    phase_move(r, v, REFIT_ABORTING);
    r->planning = r->epoch_writing = false;
    r->deadline_ns = deadline_after(s, r->config.quiesce_timeout_ms);
    step_notify(s, v);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].part != REFIT_NODE_IDLE) {
            r->nodes[i].part = REFIT_NODE_ABORTING;
            attempt_put_node(s, REFIT_DO_ABORT, &r->nodes[i])->text = step_text(s, "%s", v->reason);
        }
    attempt_finish(s);
}

/* Leaves the instance out of this version's later attempts. */
static void exclude(const struct refit_worker *w, const char *why)
{
    struct refit_instance *instance = worker_instance(w);
    instance->excluded = true;
    (void)snprintf(instance->reason, sizeof instance->reason, "%s", why);
}

/* Whether the policy can hold with the instances that take part and are not excluded. */
static bool can_do_without(const struct refit *r)
{
    uint32_t total = 0;
    foreach_layout (l, r) {
        if (l->side != REFIT_DESTINATION || !l->wanted)
            continue;
        uint32_t left = 0;
        for (uint32_t i = 0; i < l->n_instances; i++)
            left += l->instances[i].taking_part && !l->instances[i].excluded;
        if (left < version_min_instances(r->in_flight, l))
            return false;
        total += left;
    }
    return total > 0;
}

/* Ends the attempt because of instances that have been excluded; another follows where it can. */
static void abort_excluding(struct step *s, int code, const char *text)
{
    s->r->again = s->r->in_flight->kind == REFIT_KIND_REFIT && can_do_without(s->r);
    attempt_call_off(s, code, text);
}

/* --- what nodes say --- */

/* What has been found to differ is not held by anybody, whoever said so before. */
static void distrust(const struct refit *r, struct refit_worker *w)
{
    worker_holds_nothing(w);
    w->blamed = r->in_flight->version;
    w->blamed_in = r->in_flight->attempt;
    if (w->receive == REFIT_IN_PLACE || w->feeding == REFIT_FEED_LIVE) {
        w->torn = true;
        w->applied = 0;
    }
}

static void distrust_node(const struct refit *r, uint32_t node)
{
    foreach_worker (w, r)
        if (w->taking_part && w->node == node && worker_accepts(w) && w->held != 0)
            distrust(r, w);
}

static void distrust_id(const struct refit *r, uint64_t id)
{
    struct refit_worker *w = refit_find_worker(r, id);
    if (w != NULL && w->taking_part && w->layout->side == REFIT_DESTINATION)
        distrust(r, w);
}

/* Whoever has got wrong bytes, though the attempt may have been called off before that was known. Once all have staged
 * nothing is wrong any more: what comes then was on its way from before. */
static void distrust_named(const struct step *s)
{
    const struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    int phase = r->in_flight->phase.state;
    if (ev->node.code != RS_EDATALOSS || r->committing ||
        (phase >= REFIT_STAGED && phase != REFIT_ABORTING))
        return;
    distrust_id(r, ev->node.worker);
    for (size_t i = 0; i < ev->node.n_wrong; i++)
        distrust_id(r, ev->node.wrong[i]);
}

void attempt_failed(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    struct refit_node *n = attempt_answering_node(s);
    if (n == NULL)
        return;
    distrust_named(s);
    if (n->part == REFIT_NODE_IDLE || n->part == REFIT_NODE_ABORTING || r->committing ||
        r->in_flight->phase.state >= REFIT_STAGED)
        return;
    n->settled = true;
    int code = ev->node.code == 0 ? RS_EINTERNAL : ev->node.code;
    const char *text = step_text(s, "node %.64s: %.900s", NODE_NAME(r, n->node),
                                 ev->node.text == NULL ? err_name(code) : ev->node.text);
    struct refit_worker *w = ev->node.worker == 0 ? NULL : refit_find_worker(r, ev->node.worker);
    bool known = w != NULL && w->taking_part && w->layout->side == REFIT_DESTINATION;
    bool written = r->in_flight->phase.state >= REFIT_TRANSFERRING; /* nothing is before START */
    if (code == RS_EDATALOSS && !known && written)
        distrust_node(r, n->node);
    if (!known || !worker_accepts(w)) {
        attempt_call_off(s, code, text);
        return;
    }
    exclude(w, text);
    abort_excluding(s, code, text);
}

void attempt_quiesced(struct step *s)
{
    struct refit_node *n = attempt_answering_node(s);
    if (n == NULL || n->part != REFIT_NODE_ABORTING)
        return;
    n->part = REFIT_NODE_IDLE;
    attempt_finish(s);
}

/* Excludes the instances with workers on the node; false where the plan's source is on it too. */
static bool exclude_node(struct refit *r, uint32_t node, const char *why)
{
    bool source = false;
    foreach_worker (w, r) {
        if (!w->taking_part || w->node != node)
            continue;
        if (worker_accepts(w))
            exclude(w, why);
        else
            source = true;
    }
    return !source;
}

/* A node that takes part is no good any more: the attempt ends while bytes may still have to move. */
static void node_fails(struct step *s, const struct refit_node *n, const char *text)
{
    if (exclude_node(s->r, n->node, text))
        abort_excluding(s, RS_EPEER, text);
    else
        attempt_call_off(s, RS_EPEER, text);
}

/* Whether the loss of a node ends the attempt in flight: from PLAN until everything is staged. */
static bool node_matters(const struct refit *r, const struct refit_node *n)
{
    return r->in_flight != NULL && n->taking_part && attempt_chosen(r) &&
           r->in_flight->phase.state < REFIT_STAGED;
}

void attempt_node_silent(struct step *s, struct refit_node *n)
{
    const char *why = s->ev->node.text;
    if (node_matters(s->r, n)) /* its part goes on ABORTING until NODE_LOST */
        node_fails(s, n,
                   step_text(s, "node %.64s is silent%s%.500s", NODE_NAME(s->r, n->node),
                             why == NULL ? "" : ": ", why == NULL ? "" : why));
}

void attempt_node_lost(struct step *s, struct refit_node *n)
{
    const struct refit *r = s->r;
    const char *why = s->ev->node.text;
    if (r->in_flight == NULL || !n->taking_part)
        return;
    bool was_aborting = n->part == REFIT_NODE_ABORTING;
    n->part = REFIT_NODE_IDLE;
    if (was_aborting)
        attempt_finish(s);
    else if (node_matters(r, n))
        node_fails(s, n,
                   step_text(s, "the data plane of node %.64s is gone%s%.500s",
                             NODE_NAME(r, n->node), why == NULL ? "" : ": ",
                             why == NULL ? "" : why));
}

/* --- what becomes of workers --- */

/* While ACCEPTING: this worker will not say any more what it thinks. */
static void reject_for(struct step *s, struct refit_worker *w, const char *text)
{
    w->verdict = REFIT_WORKER_REJECTED;
    attempt_settled(s, w->layout, w->layout->instance_of_rank[w->rank], text);
}

void attempt_node_expelled(struct step *s, const struct refit_node *n)
{
    const struct refit *r = s->r;
    if (r->in_flight == NULL || r->committing || r->in_flight->phase.state != REFIT_ACCEPTING)
        return;
    foreach_worker (w, r)
        if (w->node == n->node && w->taking_part && worker_accepts(w) &&
            w->verdict == REFIT_WORKER_NO_VERDICT)
            reject_for(s, w,
                       step_text(s, "%s: node %.64s was expelled", worker_name(s, w),
                                 NODE_NAME(r, n->node)));
}

/* All that the attempt reads of this worker has been read, or nothing is to be read any more. */
static bool is_read(const struct refit *r, const struct refit_worker *w)
{
    return r->in_flight->phase.state >= REFIT_STAGED || refit_node(r, w->node)->sources_read;
}

void attempt_worker_lost(struct step *s, struct refit_worker *w, const char *how)
{
    struct refit *r = s->r;
    if (!w->taking_part || !attempt_chosen(r) || r->committing)
        return;
    if (!worker_accepts(w) && is_read(r, w))
        return;
    const char *text = step_text(s, "%s %s", worker_name(s, w), how);
    if (!worker_accepts(w)) {
        attempt_call_off(s, RS_EABORTED, text);
    } else if (r->in_flight->phase.state == REFIT_ACCEPTING) {
        reject_for(s, w, text);
    } else {
        exclude(w, text);
        abort_excluding(s, RS_EABORTED, text);
    }
}

/* --- time --- */

static void expel_silent(struct step *s)
{
    struct refit *r = s->r;
    r->expelled = true;
    r->deadline_ns = deadline_after(s, r->config.quiesce_timeout_ms);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].part == REFIT_NODE_ABORTING)
            (void)attempt_put_node(s, REFIT_DO_EXPEL, &r->nodes[i]);
}

/* In PREPARED only those that have not said Ready are missing: a refit without them may do. */
static void exclude_not_ready(struct refit *r)
{
    foreach_worker (w, r)
        if (w->taking_part && worker_accepts(w) && w->receive == REFIT_IN_PLACE &&
            w->ready != r->in_flight->version)
            exclude(w, "not Ready by the prepare deadline");
}

/* A source that has been released and does not publish again: the trainer has gone on. */
static bool waits_for_released(const struct refit *r, const struct refit_version *v)
{
    foreach_worker (w, r)
        if (w->layout->side == REFIT_SOURCE && w->published == v->version && w->released)
            return v->publication != 0;
    return false;
}

void attempt_deadline(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    rs_assert(v != NULL && !r->committing);
    int phase = v->phase.state;
    if (phase == REFIT_ABORTING) {
        expel_silent(s);
        return;
    }
    if (phase == REFIT_SUBMITTED && attempt_close_gathering(s))
        return;
    const char *what = phase <= REFIT_PREPARED       ? "prepare"
                       : phase == REFIT_TRANSFERRING ? "transfer"
                                                     : "accept";
    uint32_t ms = phase <= REFIT_PREPARED       ? v->prepare_timeout_ms
                  : phase == REFIT_TRANSFERRING ? v->transfer_timeout_ms
                                                : v->accept_timeout_ms;
    const char *text =
        step_text(s, "%sthe %s deadline (%u ms) passed, waiting for: %s",
                  phase == REFIT_SUBMITTED && waits_for_released(r, v) ? "SOURCE_GONE: " : "", what,
                  ms, missing_text(s, v));
    if (phase == REFIT_PREPARED) {
        exclude_not_ready(r);
        abort_excluding(s, RS_EDEADLINE, text);
    } else {
        attempt_call_off(s, RS_EDEADLINE, text);
    }
}
