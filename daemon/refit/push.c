/* Pushes: all workers of the source publish a version, one of them submits it, and each waits for its end by its events.
 *
 * Who submits hears of a refusal by itself. The others hear that the version is withdrawn, with the reason, where
 *   a worker of the source says so (WITHDRAW): its Submit was refused, or it failed before; at once
 *   a worker of the source leaves before it was submitted: at once (not where its daemon was restarted: its process may be back)
 *   one is not there when the prepare deadline has passed since they published
 *   a newer version is committed
 * and SOURCE_RELEASED behind it, as soon as nothing can read their memory for that version. Whoever else submits it, or is
 * refused, says nothing of the push: what is on its way goes on, and who has been told waits for its end.
 *
 * Which push. A worker numbers its pushes of one version 1, 2, … and so do its peers, each for itself: they do the same. So
 * who publishes after its push was withdrawn hears that too, and who has begun the next one, or has started since, does
 * not; and who publishes for a push whose version has ended well meanwhile (receivers that hold it have fed each other)
 * has nothing to wait for. All of this is forgotten with the coordinator: who has withdrawn says it again when it has
 * attached anew. */
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))
enum { MS = 1000 * 1000 };

/* The version whose end this worker waits for, as part of a push; 0: none. */
static uint64_t waits_for(const struct refit_worker *w)
{
    if (w == NULL || w->gone || w->push == 0 || w->layout->side != REFIT_SOURCE)
        return 0;
    return w->published != 0 && !w->released ? w->published : w->claimed;
}

/* Something is on its way that has to do with this version: its end tells who waits. */
static bool is_open(const struct refit *r, uint64_t version)
{
    const struct refit_version *v = refit_find_version(r, version);
    return (r->in_flight != NULL && r->in_flight->version == version) ||
           (v != NULL && !refit_phase_final(v->phase.state));
}

bool push_is_stuck(const struct refit *r, const struct refit_worker *w)
{
    uint64_t version = waits_for(w);
    return version != 0 && w->withdrawn && !is_open(r, version);
}

/* --- withdrawn ---------------------------------------------------------------------------------- */

/* For those that wait for it, or publish it later: push_settle tells them. */
static void note(const struct step *s, uint64_t version, uint32_t push, uint64_t by,
                 const char *reason)
{
    struct refit_withdrawn *x = &s->r->withdrawn;
    if (by != 0 && by == x->by && version == x->version && push <= x->push)
        return; /* said already */
    *x = (struct refit_withdrawn){
        .version = version, .push = push, .by = by, .at_ns = s->ev->now_ns};
    (void)snprintf(x->reason, sizeof x->reason, "%s", reason);
}

/* Of the push that was withdrawn, and not of another process, which counts its pushes anew: a trainer that has started
 * again. What was claimed was published before this start. */
static bool is_noted(const struct refit_withdrawn *x, const struct refit_worker *w,
                     uint64_t version)
{
    return version == x->version && w->push <= x->push && w->id != x->by &&
           (w->attached_ns <= x->at_ns || w->claimed == version);
}

static void tell(struct step *s, struct refit_worker *w, uint64_t version, const char *reason)
{
    const struct refit_version bare = {.version = version};
    const struct refit_version *v = refit_find_version(s->r, version);
    w->withdrawn = true;
    step_tell(s, w, REFIT_TELL_WITHDRAWN, v == NULL ? &bare : v, reason);
}

/* When the last push of this worker of that version ended: who has begun one since has begun the next. REFIT_NEVER: it is not
 * over. */
static uint64_t over_since(const struct refit_worker *w, uint64_t version)
{
    bool over = w->published == version && w->released && w->released_ns != 0;
    return over ? w->released_ns : REFIT_NEVER;
}

/* What stands is withdrawn whatever its number, of which a process that has started again knows nothing: who waits now can't
 * get what it waits for. */
static uint32_t newest_push(const struct refit *r, uint64_t version, uint32_t push,
                            uint64_t until_ns)
{
    foreach_worker (w, r)
        if (waits_for(w) == version && w->push > push && w->push_since_ns <= until_ns)
            push = w->push;
    return push;
}

void push_withdraw(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    uint64_t version = ev->withdraw.version;
    struct refit_worker *w = refit_find_worker(r, ev->withdraw.worker);
    if (w == NULL || w->gone) {
        step_reply(s, ev->cookie, RS_ENOTFOUND, "no such worker");
        return;
    }
    if (w->layout->side != REFIT_SOURCE || version == 0 || version > REFIT_VERSION_MAX) {
        bool source = w->layout->side == REFIT_SOURCE;
        step_reply(s, ev->cookie, source ? RS_EINVAL : RS_EPRECOND,
                   source ? "versions are 1 … 9223372036854775807"
                          : "that worker is a destination: only sources withdraw");
        return;
    }
    const char *why = ev->withdraw.reason == NULL || ev->withdraw.reason[0] == '\0'
                          ? "no reason given"
                          : ev->withdraw.reason;
    if ((w->published == version && !w->released) || w->claimed == version) {
        w->push = w->push == 0 ? 1 : w->push;
        w->withdrawn = true; /* it knows */
    }
    const char *text = step_text(s, "%s has given it up: %.700s", worker_name(s, w), why);
    uint32_t push = ev->withdraw.push == 0 ? 1 : ev->withdraw.push;
    if (!ev->withdraw.again)
        push = newest_push(r, version, push, over_since(w, version));
    note(s, version, push, w->id, text);
    step_reply(s, ev->cookie, 0, "");
}

void push_worker_left(struct step *s, const struct refit_worker *left)
{
    struct refit *r = s->r;
    if (left->layout->side != REFIT_SOURCE)
        return;
    const char *why = step_text(s, "%s left before it was submitted: %s", worker_name(s, left),
                                left->gone_reason);
    foreach_worker (w, r) {
        uint64_t version = waits_for(w);
        if (w == left || version == 0 || w->withdrawn || is_open(r, version))
            continue;
        note(s, version, w->push, 0, why);
        tell(s, w, version, why);
    }
}

/* --- what nobody has to say --------------------------------------------------------------------- */

/* NULL, or which rank of the source is not there, and why. */
static const char *missing(struct step *s, const struct refit_layout *l)
{
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        const struct refit_worker *w = l->worker_of_rank[rank];
        if (l->instance_of_rank[rank] == UINT32_MAX)
            continue;
        if (w == NULL)
            return step_text(s, "%.256s/rank %u is not attached", l->name, rank);
        if (w->gone)
            return step_text(s, "%.256s/rank %u left: %s", l->name, rank, w->gone_reason);
        if (refit_node(s->r, w->node)->expelled)
            return step_text(s, "%.256s/rank %u is on node %.64s, which is not in the cluster",
                             l->name, rank, NODE_NAME(s->r, w->node));
    }
    return NULL;
}

/* Of one layout, and looked for once in a pass: a thousand ranks may wait for the same one. */
struct absent {
    bool known;
    const char *who; /* as `missing` */
};

/* NULL, or why this worker waits in vain for a version that nothing is done about. */
static const char *in_vain(struct step *s, const struct refit_worker *w, uint64_t version,
                           struct absent *absent)
{
    struct refit *r = s->r;
    if (version < r->committed)
        return step_text(s, "version %llu is committed", ULL(r->committed));
    if (!absent->known)
        *absent = (struct absent){true, missing(s, w->layout)};
    const char *who = absent->who;
    if (who == NULL)
        return NULL;
    uint64_t at_ns = w->push_ns + (uint64_t)r->config.prepare_timeout_ms * MS;
    if (s->ev->now_ns < at_ns) {
        r->push_at_ns = at_ns < r->push_at_ns ? at_ns : r->push_at_ns;
        return NULL;
    }
    const char *why = step_text(s, "nobody has submitted it, and %s", who);
    note(s, version, w->push, 0, why);
    return why;
}

/* The version that this publication was for has ended well without it. (Who has started since counts anew: its push is
 * another.) */
static bool is_late(const struct refit_worker *w, const struct refit_version *v)
{
    return v != NULL && w->push <= v->push && w->attached_ns < v->submitted_ns &&
           (v->phase.state == REFIT_COMMITTED || v->phase.state == REFIT_SUPERSEDED);
}

static void release(struct step *s, struct refit_worker *w, uint64_t version)
{
    const struct refit_version bare = {.version = version};
    const struct refit_version *v = refit_find_version(s->r, version);
    if (v != NULL && !w->withdrawn && published_differs(s->r, v))
        step_tell(s, w, REFIT_TELL_ABORTED, v, published_differs_text(s, v));
    w->released = true;
    w->released_ns = s->ev->now_ns;
    w->claimed = 0;
    step_tell(s, w, REFIT_TELL_SOURCE_RELEASED, v == NULL ? &bare : v, "");
}

static void settle(struct step *s, struct refit_worker *w, struct absent *absent)
{
    const struct refit *r = s->r;
    uint64_t version = waits_for(w);
    if (version == 0)
        return;
    bool open = is_open(r, version);
    const char *why = NULL;
    if (!w->withdrawn && is_noted(&r->withdrawn, w, version))
        why = step_text(s, "%s", r->withdrawn.reason); /* it may be another's before this is told */
    else if (!w->withdrawn && !open)
        why = in_vain(s, w, version, absent);
    if (why != NULL)
        tell(s, w, version, why);
    if (!open && (w->withdrawn || is_late(w, refit_find_version(r, version))))
        release(s, w, version);
}

static void settle_all(struct step *s)
{
    s->r->push_at_ns = REFIT_NEVER;
    foreach_layout (l, s->r) {
        struct absent absent = {0};
        for (uint32_t rank = 0; l->side == REFIT_SOURCE && rank < l->n_ranks; rank++)
            settle(s, l->worker_of_rank[rank], &absent);
    }
}

void push_settle(struct step *s)
{
    const struct refit_withdrawn *x = &s->r->withdrawn;
    uint64_t version = x->version, at_ns = x->at_ns;
    settle_all(s);
    if (x->version != version || x->at_ns != at_ns) /* for peers that came before who noted it */
        settle_all(s);
}

/* --- what goes on ------------------------------------------------------------------------------- */

void push_begins(struct refit_worker *w, uint64_t version, uint32_t push, uint64_t now_ns)
{
    if (w->push_version != version || w->push != push)
        w->push_since_ns = now_ns;
    w->push_version = version;
    w->push = push;
    w->push_ns = now_ns;
    w->withdrawn = false;
}

void push_submitted(const struct refit *r, struct refit_version *v)
{
    foreach_worker (w, r)
        if (w->layout->side == REFIT_SOURCE && !w->gone && w->published == v->version &&
            w->push > v->push)
            v->push = w->push;
}
