/* Workers: layouts, attach, leave, publish, ready, verdict, apply, marks. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

static void refuse(struct step *s, int code, const char *text)
{
    step_reply(s, s->ev->cookie, code, text);
}

static void agree(struct step *s)
{
    step_reply(s, s->ev->cookie, 0, "");
}

/* --- layouts --- */

static bool layout_alive(const struct refit *r, const struct refit_layout *l)
{
    foreach_worker (w, r)
        if (w->layout == l && !w->gone)
            return true;
    return false;
}

/* The layout that a new one of this side and name takes the place of. A model has one source. */
static struct refit_layout *layout_before(const struct refit *r, enum refit_side side,
                                          const char *name)
{
    foreach_layout (l, r)
        if (l->side == side && (side == REFIT_SOURCE || strcmp(l->name, name) == 0))
            return l;
    return NULL;
}

void refit_layout_free(struct refit_layout *l)
{
    if (l == NULL)
        return;
    mem_free(l->name);
    mem_free(l->instance_of_rank);
    mem_free(l->ranks_by_instance);
    mem_free(l->worker_of_rank);
    mem_free(l->left_of_rank);
    mem_free(l->instances);
    mem_free(l);
}

static void index_instances(struct refit_layout *l)
{
    uint32_t begin = 0;
    for (uint32_t rank = 0; rank < l->n_ranks; rank++)
        if (l->instance_of_rank[rank] != UINT32_MAX)
            l->instances[l->instance_of_rank[rank]].n_ranks++;
    for (uint32_t i = 0; i < l->n_instances; i++) {
        l->instances[i].ranks = l->ranks_by_instance + begin;
        begin += l->instances[i].n_ranks;
        l->instances[i].n_ranks = 0; /* counted up again as they are filled in */
    }
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        if (l->instance_of_rank[rank] == UINT32_MAX)
            continue;
        struct refit_instance *instance = &l->instances[l->instance_of_rank[rank]];
        l->ranks_by_instance[(instance->ranks - l->ranks_by_instance) + instance->n_ranks++] = rank;
    }
}

static struct refit_layout *layout_make(const struct refit_event *ev)
{
    uint32_t n = ev->layout.n_ranks;
    struct refit_layout *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return NULL;
    queue_init(&l->link);
    l->side = ev->layout.side;
    l->n_ranks = n;
    l->n_instances = ev->layout.n_instances;
    l->name = mem_strdup(ev->layout.name);
    l->instance_of_rank = mem_calloc(n, sizeof *l->instance_of_rank);
    l->ranks_by_instance = mem_calloc(n, sizeof *l->ranks_by_instance);
    l->worker_of_rank = mem_calloc(n, sizeof *l->worker_of_rank);
    l->left_of_rank = mem_calloc(n, sizeof *l->left_of_rank);
    l->instances = mem_calloc(l->n_instances, sizeof *l->instances);
    if (l->name == NULL || l->instance_of_rank == NULL || l->ranks_by_instance == NULL ||
        l->worker_of_rank == NULL || l->left_of_rank == NULL || l->instances == NULL) {
        refit_layout_free(l);
        return NULL;
    }
    memcpy(l->digest, ev->layout.digest, sizeof l->digest);
    memcpy(l->instance_of_rank, ev->layout.instance_of_rank, n * sizeof *l->instance_of_rank);
    index_instances(l);
    return l;
}

static const char *layout_fault(const struct refit_event *ev)
{
    size_t name_bytes = ev->layout.name == NULL ? 0 : strlen(ev->layout.name);
    if (name_bytes == 0 || name_bytes > REFIT_MAX_NAME_BYTES)
        return "the layout's name must have 1 … 512 bytes";
    if (ev->layout.n_ranks == 0 || ev->layout.n_instances == 0)
        return "a layout has at least one rank and one instance";
    for (uint32_t rank = 0; rank < ev->layout.n_ranks; rank++) {
        uint32_t instance = ev->layout.instance_of_rank[rank];
        if (instance != UINT32_MAX && instance >= ev->layout.n_instances)
            return "a rank is in an instance that the layout does not have";
    }
    return NULL;
}

static uint32_t count_layouts(const struct refit *r)
{
    uint32_t n = 0;
    foreach_layout (l, r)
        n++;
    return n;
}

static void worker_free(struct refit *r, struct refit_worker *w)
{
    if (w->layout->worker_of_rank[w->rank] == w) {
        w->layout->worker_of_rank[w->rank] = NULL;
        w->layout->left_of_rank[w->rank] = true;
    }
    queue_remove(&w->link);
    r->n_workers--;
    mem_free(w);
}

/* Workers that are gone and the layout that they had. */
static void layout_drop(struct refit *r, struct refit_layout *l)
{
    for (struct queue *q = r->workers.next, *next = q->next; q != &r->workers;
         q = next, next = q->next)
        if (worker_of(q)->layout == l)
            worker_free(r, worker_of(q));
    queue_remove(&l->link);
    refit_layout_free(l);
}

/* A source of another name takes its place: the ledger shall not bring both back. */
static void record_gone(struct step *s, const struct refit_layout *l)
{
    struct ledger_member *m = &step_record(s, LEDGER_MEMBER)->member;
    *m = (struct ledger_member){.side = (uint32_t)l->side, .name = step_text(s, "%s", l->name)};
    memcpy(m->digest, l->digest, sizeof m->digest);
    (void)step_persist(s, WRITE_NOTE, NULL);
}

int workers_layout(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    const char *fault = layout_fault(ev);
    if (fault != NULL) {
        refuse(s, RS_EINVAL, fault);
        return 0;
    }
    struct refit_layout *before = layout_before(r, ev->layout.side, ev->layout.name);
    if (before != NULL && memcmp(before->digest, ev->layout.digest, sizeof before->digest) == 0 &&
        strcmp(before->name, ev->layout.name) == 0) {
        agree(s);
        return 0;
    }
    bool in_use =
        before != NULL && (layout_alive(r, before) || attempt_chosen(r) ||
                           (r->in_flight != NULL && r->in_flight->phase.state == REFIT_ABORTING));
    if (in_use) {
        refuse(
            s, RS_EPRECOND,
            step_text(s,
                      "%s layout '%.256s' with another digest has live workers; all of them must "
                      "leave before the layout changes",
                      before->side == REFIT_SOURCE ? "source" : "destination", before->name));
        return 0;
    }
    if (before == NULL && count_layouts(r) > REFIT_MAX_LAYOUTS) {
        refuse(s, RS_EEXHAUSTED, "a model has at most 64 destination layouts");
        return 0;
    }
    struct refit_layout *l = layout_make(ev);
    if (l == NULL)
        return RS_ENOMEM;
    if (before != NULL) {
        bool renamed = strcmp(before->name, l->name) != 0;
        l->wanted = before->wanted && !renamed;
        if (renamed && before->wanted_durable)
            record_gone(s, before);
        layout_drop(r, before);
        r->epoch_stale = true;
    }
    l->wanted |= ev->layout.member;
    l->wanted_durable = ev->layout.member;
    queue_push(&r->layouts, &l->link);
    agree(s);
    return 0;
}

/* --- attach and leave --- */

static void reply_attached(struct step *s, const struct refit_worker *w)
{
    step_reply_values(s, s->ev->cookie, s->r->committed, w->held, REFIT_NONE, w->applied);
}

/* 0, or why the attach is refused (*ret_text). */
static int attach_fault(struct step *s, const struct refit_layout *l, const char **ret_text)
{
    const struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    bool source = ev->attached.side == REFIT_SOURCE;
    if (l == NULL) {
        *ret_text = step_text(s, "no %s layout '%.256s' has been put",
                              source ? "source" : "destination", ev->attached.layout_name);
        return RS_ENOTFOUND;
    }
    if (ev->attached.rank >= l->n_ranks || l->instance_of_rank[ev->attached.rank] == UINT32_MAX) {
        *ret_text = step_text(s, "layout '%.256s' has no rank %u", l->name, ev->attached.rank);
        return RS_EINVAL;
    }
    if (source != (ev->attached.receive == REFIT_RECEIVE_NONE)) {
        *ret_text = "receive is staged or in_place for a destination, and not set for a source";
        return RS_EINVAL;
    }
    const struct refit_worker *there = l->worker_of_rank[ev->attached.rank];
    bool wakes = there != NULL && there->asleep && there->node == ev->attached.node;
    if (there != NULL && !there->gone && !wakes) {
        *ret_text = step_text(s,
                              "%.256s/rank %u is attached already (worker %016llx); it must end "
                              "or be evicted first",
                              l->name, there->rank, ULL(there->id));
        return RS_EEXIST;
    }
    if (there != NULL && refit_worker_busy(r, there)) {
        *ret_text = step_text(
            s, "%.256s/rank %u has left, but attempt %llu still uses its memory; try again",
            l->name, there->rank, ULL(r->in_flight == NULL ? 0 : r->in_flight->attempt));
        return RS_EUNAVAIL;
    }
    const struct refit_node *n = refit_node(r, ev->attached.node);
    if (n != NULL && n->draining) {
        *ret_text =
            step_text(s, "node %.64s is drained: attach on another node", NODE_NAME(r, n->node));
        return RS_EUNAVAIL;
    }
    bool takes_place = there != NULL; /* of who is gone or asleep: not one more */
    if (!takes_place && r->n_workers >= r->config.max_workers) {
        *ret_text = step_text(s, "more than %u workers", r->config.max_workers);
        return RS_EEXHAUSTED;
    }
    return 0;
}

/* Whole, verified, and committed by nobody that this worker had heard of. It may have been committed since: then it was
 * compared with that. Else only its node has seen it, unless it is what was proven before. */
static void fill_uncommitted(struct refit_worker *w, const struct refit *r,
                             const struct refit_event *ev, bool proven_before)
{
    uint64_t version = ev->attached.uncommitted, content = ev->attached.uncommitted_content;
    const struct refit_version *v = refit_find_version(r, version);
    if (version == 0 || content == 0)
        return;
    bool committed = v != NULL && v->phase.state == REFIT_COMMITTED && v->publication == content;
    bool useless = version <= r->committed && !committed; /* nobody will ever commit it */
    if (useless || version <= w->blamed) {
        w->torn |= w->receive == REFIT_IN_PLACE;
        return;
    }
    w->held = version;
    w->held_content = content;
    w->proven = committed || proven_before;
    w->blamed = 0; /* for another version, of which nothing has come there */
    if (w->receive == REFIT_IN_PLACE) {
        w->torn = false;
        w->applied = committed ? version : 0;
    }
}

static void fill_memory(struct refit_worker *w, const struct refit *r, const struct refit_event *ev)
{
    uint64_t before = w->held;
    bool same = w->proven && w->held == ev->attached.uncommitted &&
                w->held_content == ev->attached.uncommitted_content;
    w->torn = ev->attached.torn;
    /* Only committed content can have been verified. */
    w->applied = ev->attached.live <= r->committed ? ev->attached.live : 0;
    w->held = w->receive == REFIT_IN_PLACE          ? w->applied
              : ev->attached.shadow <= r->committed ? ev->attached.shadow
                                                    : 0;
    w->proven = w->held != 0; /* compared with what it has to be */
    if (w->held != 0)
        w->blamed = 0;
    const struct refit_version *v = refit_find_version(r, w->held);
    w->held_content = v == NULL ? 0 : v->publication;
    w->unsaid = w->unsaid && w->held == before;
    fill_uncommitted(w, r, ev, same);
}

static void worker_fill(struct refit_worker *w, const struct refit *r, struct refit_layout *l,
                        const struct refit_event *ev)
{
    w->id = ev->attached.worker;
    w->node = ev->attached.node;
    w->rank = ev->attached.rank;
    w->layout = l;
    w->receive = ev->attached.receive;
    w->accept_automatically = ev->attached.accept_automatically;
    w->attached_ns = ev->attached.again ? 0 : ev->now_ns;
    if (l->side == REFIT_DESTINATION)
        fill_memory(w, r, ev);
}

/* Whether nothing reads a source's memory for this version any more. One that is not known may yet be
 * submitted: its Submit may have been lost with the coordinator. */
static bool release_is_past(const struct refit *r, uint64_t version)
{
    const struct refit_version *v = refit_find_version(r, version);
    return v == NULL ? version <= r->committed
                     : refit_phase_final(v->phase.state) || v->source_released;
}

/* To an earlier start: it holds up no peer that publishes the committed version once more. */
static void note_published(const struct refit *r, struct refit_worker *w, uint64_t version)
{
    if (w->published != 0 || version == 0 || version != r->committed)
        return;
    w->published = version;
    w->released = true;
}

/* What was said while the worker had no stream, or never, since the coordinator's restart ended it.
 * Whoever attaches hears of what the restart ended, as long as nothing newer is committed: a worker
 * may wait for it without having said anything about it. */
static void tell_missed(struct step *s, struct refit_worker *w)
{
    enum { MISSED_MOST = 16 };
    const struct refit *r = s->r;
    uint64_t waits_for = s->ev->attached.waits_for;
    const struct refit_version bare = {.version = waits_for};
    const struct refit_version *waited = refit_find_version(r, waits_for);
    waited = waited == NULL ? &bare : waited;
    int n = 0;
    foreach_version (v, r)
        if (v->version > r->committed && v->phase.state == REFIT_ABORTED && n < MISSED_MOST &&
            (v->ended_by_restart || v == waited)) {
            step_tell(s, w, REFIT_TELL_ABORTED, v, step_text(s, "%s", v->reason));
            n++;
        }
    /* Its shadow keeps what has been applied: nothing is left to wait for, and no engine to pause. */
    bool applied_it = w->receive == REFIT_STAGED_RECEIVE && w->applied == waits_for;
    if (waits_for != 0 && waits_for == r->committed && !applied_it)
        step_tell(s, w, REFIT_TELL_COMMITTED, waited, "");
    else if (waits_for != 0 && waited == &bare && w->layout->side == REFIT_DESTINATION &&
             (r->in_flight == NULL || r->in_flight->version != waits_for))
        step_tell(s, w, REFIT_TELL_ABORTED, waited,
                  "nothing of that number is on its way any more");
    if (w->layout->side != REFIT_SOURCE)
        return;
    note_published(r, w, s->ev->attached.published);
    if (waits_for == 0)
        return;
    if (w->published == waits_for && !w->released) {
        w->withdrawn = false; /* told again, where it is */
        return;
    }
    push_begins(w, waits_for, s->ev->attached.push, s->ev->now_ns);
    if (!release_is_past(r, waits_for)) {
        w->claimed = waits_for;
        return;
    }
    step_tell(s, w, REFIT_TELL_SOURCE_RELEASED, waited, "");
}

/* What this attempt has asked of the worker and is not answered, as far as the worker is concerned: it may have been said while
 * its stream was broken, or its node away, and is said once an attempt only. */
static void ask_once_more(struct step *s, struct refit_worker *w)
{
    const struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    if (v == NULL || v->ending != REFIT_NONE || r->committing || w->asleep)
        return;
    int phase = v->phase.state;
    bool published = w->published == v->version && !w->released;
    if (phase == REFIT_SUBMITTED && w->asked_publish && !published && r->feed_layout == NULL)
        step_tell(s, w, REFIT_TELL_PUBLISH_REQUESTED, v, "");
    else if (phase == REFIT_PREPARED && w->asked_ready && w->ready != v->version)
        step_tell(s, w, REFIT_TELL_READY_REQUESTED, v, "");
    else if (phase == REFIT_ACCEPTING && w->asked_accept && w->verdict == REFIT_WORKER_NO_VERDICT)
        step_tell(s, w, REFIT_TELL_ACCEPT_REQUESTED, v, "");
}

int workers_attached(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    struct refit_worker *w = refit_find_worker(r, ev->attached.worker);
    if (w != NULL && !w->gone) { /* resumed */
        if (ev->attached.tells_memory && w->layout->side == REFIT_DESTINATION &&
            !refit_worker_busy(r, w) && !w->asleep)
            fill_memory(w, r, ev);
        if (ev->attached.asleep)
            sleep_begin(s, w);
        reply_attached(s, w);
        tell_missed(s, w);
        ask_once_more(s, w);
        return 0;
    }
    if (w != NULL) {
        refuse(s, RS_EPRECOND, "that worker's lease is over: attach as a new one");
        return 0;
    }
    struct refit_layout *l = refit_find_layout(r, ev->attached.side, ev->attached.layout_name);
    const char *text = "";
    int rc = attach_fault(s, l, &text);
    if (rc == 0 && refit_node_get(r, ev->attached.node) == NULL) {
        rc = RS_EEXHAUSTED;
        text = "too many nodes";
    }
    if (rc != 0) {
        refuse(s, rc, text);
        return 0;
    }
    w = mem_zalloc(sizeof *w);
    if (w == NULL)
        return RS_ENOMEM;
    if (l->worker_of_rank[ev->attached.rank] != NULL)
        worker_free(r, l->worker_of_rank[ev->attached.rank]);
    worker_fill(w, r, l, ev);
    queue_push(&r->workers, &w->link);
    r->n_workers++;
    l->worker_of_rank[w->rank] = w;
    l->wanted = true;
    r->epoch_stale = true;
    if (ev->attached.asleep)
        sleep_begin(s, w);
    reply_attached(s, w);
    tell_missed(s, w);
    return 0;
}

/* A layout that all have left for good is no part of the model any more. */
void workers_unwant(struct refit *r, struct refit_layout *l)
{
    foreach_worker (w, r)
        if (w->layout == l && !w->leaving)
            return;
    l->wanted = false;
}

void workers_applying_ends(struct step *s, struct refit_worker *w, const char *text)
{
    step_answer(s, WAITER_APPLY, w->id, RS_ECANCELED, text, 0);
    w->applying = 0;
}

void workers_left(struct step *s)
{
    struct refit *r = s->r;
    struct refit_worker *w = refit_find_worker(r, s->ev->left.worker);
    if (w == NULL) {
        refuse(s, RS_ENOTFOUND, "no such worker");
        return;
    }
    bool was_gone = w->gone;
    w->gone = true;
    w->leaving |= s->ev->left.for_good;
    if (!was_gone) {
        (void)snprintf(w->gone_reason, sizeof w->gone_reason, "%s",
                       s->ev->left.reason == NULL ? "" : s->ev->left.reason);
        r->epoch_stale = true;
        workers_applying_ends(s, w, "the worker's lease is over");
        attempt_worker_lost(s, w, step_text(s, "left: %s", w->gone_reason));
        if (!s->ev->left.may_return) /* else who does not is missed at the prepare deadline */
            push_worker_left(s, w);
    }
    if (w->leaving)
        workers_unwant(r, w->layout);
    agree(s);
}

void workers_sweep(struct refit *r)
{
    for (struct queue *q = r->workers.next, *next = q->next; q != &r->workers;
         q = next, next = q->next) {
        struct refit_worker *w = worker_of(q);
        if (w->leaving && !w->taking_part)
            worker_free(r, w);
    }
}

/* --- sources --- */

int refit_publish_check(const struct refit *r, uint64_t worker, uint64_t version, struct err *e)
{
    const struct refit_worker *w = refit_find_worker(r, worker);
    const struct refit_version *v = r->in_flight;
    if (w == NULL || w->gone)
        return err_set(e, RS_ENOTFOUND, "no such worker");
    if (w->layout->side != REFIT_SOURCE)
        return err_set(e, RS_EPRECOND, "%.256s/rank %u is a destination: only sources publish",
                       w->layout->name, w->rank);
    if (w->asleep)
        return err_set(e, RS_EPRECOND, "%.256s/rank %u is asleep: wake it up, then publish",
                       w->layout->name, w->rank);
    if (version == 0 || version > REFIT_VERSION_MAX)
        return err_set(e, RS_EINVAL, "versions are 1 … 9223372036854775807");
    if (w->published == version && !w->released)
        return 1;
    if (version < r->committed)
        return err_set(e, RS_EPRECOND, "version %llu is not above %llu, which is committed",
                       ULL(version), ULL(r->committed));
    if (v != NULL && v->kind == REFIT_KIND_CATCH_UP && w->taking_part && !w->released)
        return err_set(e, RS_EUNAVAIL,
                       "version %llu is being read from this memory for a newcomer; try again",
                       ULL(v->version));
    if (v != NULL && v->kind != REFIT_KIND_CATCH_UP && !w->released &&
        w->published == v->version) /* chosen yet or not: it is promised */
        return err_set(e, RS_EPRECOND,
                       "version %llu of this memory is in flight and has not been released",
                       ULL(v->version));
    return 0;
}

void workers_published(struct step *s)
{
    const struct refit_event *ev = s->ev;
    struct err e = {0};
    int rc = refit_publish_check(s->r, ev->published.worker, ev->published.version, &e);
    struct refit_worker *w = refit_find_worker(s->r, ev->published.worker);
    if (rc < 0) {
        refuse(s, rc, step_text(s, "%s", e.text));
        return;
    }
    if (rc == 0) {
        w->published = ev->published.version;
        w->publication = ev->published.publication;
        w->published_ns = ev->now_ns;
        w->released = false;
        w->claimed = 0;
        push_begins(w, w->published, ev->published.push, ev->now_ns);
        attempt_mark_published(s, w);
    } else if (ev->published.push > w->push) {
        push_begins(w, w->published, ev->published.push, ev->now_ns);
    }
    step_reply_values(s, ev->cookie, w->published, 0, REFIT_NONE, w->publication);
}

void workers_publishing(struct step *s)
{
    const struct refit_event *ev = s->ev;
    if (refit_publish_check(s->r, ev->published.worker, ev->published.version, NULL) == 0)
        refit_find_worker(s->r, ev->published.worker)->released = true;
}

/* --- destinations --- */

/* The live destination worker, or NULL and a refusal. */
static struct refit_worker *destination(struct step *s, uint64_t worker)
{
    struct refit_worker *w = refit_find_worker(s->r, worker);
    if (w == NULL || w->gone)
        refuse(s, RS_ENOTFOUND, "no such worker");
    else if (w->layout->side != REFIT_DESTINATION)
        refuse(s, RS_EPRECOND, "that worker is a source");
    else if (w->asleep)
        refuse(s, RS_EPRECOND, "this worker is asleep: wake it up first");
    else
        return w;
    return NULL;
}

/* It is brought up to this committed version now, and has to pause for it like for any other. */
static bool catches_up(const struct refit *r, const struct refit_worker *w, uint64_t version)
{
    const struct refit_version *v = r->in_flight;
    return v != NULL && v->kind == REFIT_KIND_CATCH_UP && v->version == version && w->taking_part &&
           worker_accepts(w);
}

void workers_ready(struct step *s)
{
    const struct refit *r = s->r;
    uint64_t version = s->ev->ready.version;
    struct refit_worker *w = destination(s, s->ev->ready.worker);
    if (w == NULL)
        return;
    if (w->receive != REFIT_IN_PLACE) {
        refuse(s, RS_EPRECOND, "this worker receives staged: Ready is for in_place");
    } else if (version == 0 || version > REFIT_VERSION_MAX) {
        refuse(s, RS_EINVAL, "versions are 1 … 9223372036854775807");
    } else if (catches_up(r, w, version)) {
        w->ready = version;
        agree(s);
    } else if (version < r->committed || (version == r->committed && w->applied != version)) {
        refuse(s, RS_EPRECOND,
               step_text(s, "version %llu is not above %llu, which is committed", ULL(version),
                         ULL(r->committed)));
    } else {
        if (version > r->committed)
            w->ready = version;
        agree(s);
    }
}

/* A verdict after the commit: acceptance is late but welcome, rejection is too late. */
static void verdict_after_commit(struct step *s, struct refit_worker *w)
{
    const struct refit_event *ev = s->ev;
    if (!ev->verdict.accept) {
        refuse(s, RS_EPRECOND,
               step_text(s, "version %llu is committed; skip it with Apply",
                         ULL(ev->verdict.version)));
        return;
    }
    if (w->held != ev->verdict.version) {
        refuse(s, RS_EPRECOND,
               step_text(s, "this worker does not hold version %llu", ULL(ev->verdict.version)));
        return;
    }
    if (w->receive == REFIT_IN_PLACE)
        w->applied = w->held;
    agree(s);
}

/* Names the rank, unless the worker has done so itself. */
static const char *rejection_text(struct step *s, uint32_t rank, const char *why)
{
    char name[32];
    int n = snprintf(name, sizeof name, "rank %u: ", rank);
    return step_text(s, "%s%.200s", strncmp(why, name, (size_t)n) == 0 ? "" : name, why);
}

static void verdict_in_flight(struct step *s, struct refit_worker *w)
{
    const struct refit_event *ev = s->ev;
    int verdict = ev->verdict.accept ? REFIT_WORKER_ACCEPTED : REFIT_WORKER_REJECTED;
    if (w->verdict != REFIT_WORKER_NO_VERDICT && (int)w->verdict != verdict) {
        refuse(s, RS_EPRECOND,
               w->verdict == REFIT_WORKER_ACCEPTED ? "this worker has accepted already"
                                                   : "this worker has rejected already");
        return;
    }
    if (w->verdict == REFIT_WORKER_NO_VERDICT && s->r->committing) {
        refuse(s, RS_EABORTED, "the version is being committed; ask again when it is");
        return;
    }
    if (w->verdict == REFIT_WORKER_NO_VERDICT) {
        w->verdict = ev->verdict.accept ? REFIT_WORKER_ACCEPTED : REFIT_WORKER_REJECTED;
        const char *why = ev->verdict.reason == NULL || ev->verdict.reason[0] == '\0'
                              ? "no reason given"
                              : ev->verdict.reason;
        attempt_settled(s, w->layout, w->layout->instance_of_rank[w->rank],
                        rejection_text(s, w->rank, why));
    }
    agree(s);
}

void workers_verdict(struct step *s)
{
    const struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    const struct refit_version *v = r->in_flight;
    struct refit_worker *w = destination(s, ev->verdict.worker);
    if (w == NULL)
        return;
    if (v != NULL && v->version == ev->verdict.version && w->taking_part && worker_accepts(w) &&
        v->phase.state == REFIT_ACCEPTING &&
        (ev->verdict.attempt == 0 || ev->verdict.attempt == v->attempt)) {
        verdict_in_flight(s, w);
        return;
    }
    const struct refit_version *known = refit_find_version(r, ev->verdict.version);
    if (known == NULL)
        refuse(s, RS_ENOTFOUND,
               step_text(s, "version %llu was never submitted", ULL(ev->verdict.version)));
    else if (known->phase.state == REFIT_COMMITTED && known->version == r->committed)
        verdict_after_commit(s, w);
    else if (known == v && (ev->verdict.attempt == 0 || ev->verdict.attempt == v->attempt))
        refuse(s, RS_EPRECOND,
               step_text(s, "version %llu is %s: nothing is to be accepted here", ULL(v->version),
                         sm_name(&v->phase)));
    else
        refuse(s, RS_EABORTED,
               step_text(s, "attempt %llu at version %llu has ended; the version is %s%s%.700s",
                         ULL(ev->verdict.attempt), ULL(known->version), sm_name(&known->phase),
                         known->reason[0] == '\0' ? "" : ": ", known->reason));
}

/* --- apply --- */

/* NULL, or why this worker can't apply (or skip) that version. */
static const char *apply_fault(struct step *s, const struct refit_worker *w)
{
    const struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    uint64_t version = ev->apply.version;
    if (w->receive != REFIT_STAGED_RECEIVE)
        return "this worker receives in_place: the commit is its apply";
    if (version == 0 || version > r->committed)
        return step_text(s, "version %llu is not committed (the newest is %llu)", ULL(version),
                         ULL(r->committed));
    if (w->applying != 0 && (ev->apply.skip || w->applying != version))
        return step_text(s, "version %llu is being applied", ULL(w->applying));
    if (w->held != version)
        return w->held == 0 ? step_text(s, "the shadow does not hold version %llu", ULL(version))
                            : step_text(s, "the shadow holds version %llu, not %llu", ULL(w->held),
                                        ULL(version));
    if (!ev->apply.skip && w->skipped >= version)
        return step_text(s, "version %llu was skipped here", ULL(version));
    return NULL;
}

void workers_apply(struct step *s)
{
    const struct refit_event *ev = s->ev;
    struct refit_worker *w = destination(s, ev->apply.worker);
    if (w == NULL)
        return;
    if (ev->apply.version != 0 && !w->torn &&
        (ev->apply.skip ? w->skipped : w->applied) == ev->apply.version) {
        step_reply_values(s, ev->cookie, w->applied, 0, REFIT_NONE, w->applied);
        return;
    }
    const char *why = apply_fault(s, w);
    if (why != NULL) {
        refuse(s, RS_EPRECOND, why);
        return;
    }
    if (!ev->apply.skip && !refit_node(s->r, w->node)->up) {
        refuse(s, RS_EUNAVAIL, "the data plane is being replaced: try again");
        return;
    }
    if (ev->apply.skip) {
        w->skipped = ev->apply.version;
        step_reply_values(s, ev->cookie, w->applied, 0, REFIT_NONE, w->applied);
        return;
    }
    step_wait(s,
              &(struct refit_waiter){.kind = WAITER_APPLY, .cookie = ev->cookie, .worker = w->id});
    if (w->applying != 0)
        return;
    w->applying = ev->apply.version;
    struct refit_action *a = step_put(s, REFIT_DO_APPLY);
    a->worker = w->id;
    a->node = w->node;
    a->data_plane = refit_node(s->r, w->node)->data_plane;
    a->version = w->applying;
}

/* Live memory is written to: it is either the new version or torn. */
static void apply_ended(struct step *s, struct refit_worker *w, int code, const char *text)
{
    w->torn = code != 0;
    w->applied = code == 0 ? w->applying : 0;
    w->applying = 0;
    step_answer(s, WAITER_APPLY, w->id, code, text, w->applied);
}

void workers_applied(struct step *s)
{
    const struct refit_event *ev = s->ev;
    struct refit_worker *w = refit_find_worker(s->r, ev->applied.worker);
    if (w == NULL || w->applying == 0 || w->applying != ev->applied.version)
        return;
    int code = ev->applied.code;
    const struct refit_version *v = refit_find_version(s->r, w->applying);
    if (code == 0 && v != NULL)
        step_mark(s, v, "applied", worker_name(s, w), ev->now_ns);
    apply_ended(s, w, code,
                code == 0                  ? ""
                : ev->applied.text == NULL ? err_name(code)
                                           : step_text(s, "%s", ev->applied.text));
}

void workers_node_lost(struct step *s, uint32_t node)
{
    foreach_worker (w, s->r)
        if (w->node == node && w->applying != 0)
            apply_ended(s, w, RS_EUNAVAIL,
                        "the data plane ended while it applied: live memory is torn; apply again");
}

/* --- marks --- */

/* Those that step_mark sets: what phases are made of, and who asks how long they took shall not be told of another's. */
static bool mark_is_own(const char *name)
{
    static const char *const own[] = {
        "submitted", "begun",      "gathered",  "published",       "planned",  "prepared",
        "started",   "first_byte", "last_byte", "source_released", "verified", "accepted",
        "rejected",  "committed",  "applied",   "caught_up",       "aborted",  "superseded"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(own[i], name) == 0)
            return true;
    return false;
}

void workers_mark(struct step *s)
{
    const struct refit_event *ev = s->ev;
    if (mark_is_own(ev->mark.name)) {
        refuse(s, RS_EINVAL,
               step_text(s, "mark '%.512s' is set by reshard itself: give yours another name",
                         ev->mark.name));
        return;
    }
    const struct refit_version *v = refit_find_version(s->r, ev->mark.version);
    const struct refit_worker *w =
        ev->mark.worker == 0 ? NULL : refit_find_worker(s->r, ev->mark.worker);
    if (v == NULL || (ev->mark.worker != 0 && w == NULL)) {
        refuse(s, RS_ENOTFOUND,
               v != NULL ? "no such worker"
                         : step_text(s, "version %llu was never submitted", ULL(ev->mark.version)));
        return;
    }
    step_mark(s, v, step_text(s, "%.512s", ev->mark.name), w == NULL ? "" : worker_name(s, w),
              ev->now_ns);
    if (v->submitted_ns == 0) { /* submitted before this start: only wall time spans it */
        struct refit_action *a = &s->u->actions[s->u->n_actions - 1];
        a->since_ns =
            ev->wall_ns > v->submitted_wall_ns ? (int64_t)(ev->wall_ns - v->submitted_wall_ns) : 0;
    }
    agree(s);
}
