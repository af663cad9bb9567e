/* Versions: submitted, waiting, superseded, ended, forgotten. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

/* --- the list --- */

struct refit_version *refit_find_version(const struct refit *r, uint64_t version)
{
    /* From the newest: that is the one which is asked for. */
    for (struct queue *q = r->versions.prev; q != &r->versions; q = q->prev)
        if (version_of(q)->version == version)
            return version_of(q);
    return NULL;
}

struct refit_version *version_new(struct refit *r, uint64_t version)
{
    struct refit_version *v = mem_zalloc(sizeof *v);
    if (v == NULL)
        return NULL;
    v->version = version;
    sm_init(&v->phase, refit_phase_table, REFIT_NONE);
    queue_init(&v->requests);
    struct queue *before = r->versions.prev;
    while (before != &r->versions && version_of(before)->version > version)
        before = before->prev;
    queue_push(before->next, &v->link); /* just before the first that is greater */
    r->n_versions++;
    return v;
}

static void request_free(struct refit_version *v, struct refit_request *q)
{
    queue_remove(&q->link);
    v->n_requests--;
    mem_free(q->id);
    mem_free(q);
}

void queue_policies_free(struct refit_policy *policies, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        mem_free(policies[i].layout_name);
    mem_free(policies);
}

void version_free(struct refit *r, struct refit_version *v)
{
    queue_remove(&v->link);
    r->n_versions--;
    while (!queue_empty(&v->requests))
        request_free(v, container_of(v->requests.next, struct refit_request, link));
    queue_policies_free(v->policies, v->n_policies);
    mem_free(v->options);
    mem_free(v->words);
    mem_free(v);
}

/* The oldest that are final and not the newest committed one. */
void queue_prune(struct refit *r)
{
    for (struct queue *q = r->versions.next, *next = q->next;
         r->n_versions > r->config.max_versions && q != &r->versions; q = next, next = q->next) {
        struct refit_version *v = version_of(q);
        if (refit_phase_final(v->phase.state) && v->n_writes == 0 && v->version != r->committed)
            version_free(r, v);
    }
}

uint32_t version_min_instances(const struct refit_version *v, const struct refit_layout *l)
{
    for (uint32_t i = 0; i < v->n_policies; i++)
        if (strcmp(v->policies[i].layout_name, l->name) == 0)
            return v->policies[i].min_instances;
    return l->n_instances;
}

/* --- submit --- */

void parcel_free(struct parcel *p, uint32_t n_policies)
{
    if (p->request != NULL)
        mem_free(p->request->id);
    mem_free(p->request);
    if (p->policies != NULL)
        queue_policies_free(p->policies, n_policies);
    mem_free(p->options);
    mem_free(p->words);
}

int parcel_make(const struct refit_event *ev, struct parcel *ret)
{
    uint32_t n = ev->submit.n_policies;
    struct parcel p = {mem_zalloc(sizeof *p.request), mem_calloc(n, sizeof *p.policies),
                       mem_alloc(ev->submit.n_options_bytes),
                       mem_strdup(ev->submit.words == NULL ? "" : ev->submit.words)};
    bool ok = p.request != NULL && p.policies != NULL && p.options != NULL && p.words != NULL;
    if (ok) {
        queue_init(&p.request->link);
        p.request->id = mem_strdup(ev->submit.request_id);
        ok = p.request->id != NULL;
    }
    for (uint32_t i = 0; ok && i < n; i++) {
        p.policies[i].min_instances = ev->submit.policies[i].min_instances;
        p.policies[i].layout_name = mem_strdup(ev->submit.policies[i].layout_name);
        ok = p.policies[i].layout_name != NULL;
    }
    if (!ok) {
        parcel_free(&p, p.policies == NULL ? 0 : n);
        return RS_ENOMEM;
    }
    if (ev->submit.n_options_bytes > 0)
        memcpy(p.options, ev->submit.options, ev->submit.n_options_bytes);
    *ret = p;
    return 0;
}

static int refuse(struct step *s, int code, const char *text)
{
    step_reply(s, s->ev->cookie, code, text);
    return 0;
}

/* NULL, or why the event breaks a rule that needs nothing else. */
const char *queue_submit_fault(struct step *s)
{
    const struct refit_event *ev = s->ev;
    size_t id_bytes = ev->submit.request_id == NULL ? 0 : strlen(ev->submit.request_id);
    if (ev->submit.version == 0)
        return "version 0 means none: versions are 1 … 9223372036854775807";
    if (ev->submit.version > REFIT_VERSION_MAX)
        return step_text(s, "version %llu is beyond 9223372036854775807", ULL(ev->submit.version));
    if (id_bytes == 0 || id_bytes > REFIT_MAX_NAME_BYTES)
        return "request_id must have 1 … 512 bytes";
    if (ev->submit.n_policies > REFIT_MAX_POLICIES)
        return "policy names more than 64 layouts";
    for (uint32_t i = 0; i < ev->submit.n_policies; i++) {
        const struct refit_policy *p = &ev->submit.policies[i];
        const struct refit_layout *l = refit_find_layout(s->r, REFIT_DESTINATION, p->layout_name);
        if (l != NULL && p->min_instances > l->n_instances)
            return step_text(s, "policy wants %u instances of layout '%s', which has %u",
                             p->min_instances, l->name, l->n_instances);
    }
    return NULL;
}

static struct refit_request *find_request(const struct refit *r, const char *id,
                                          struct refit_version **ret_version)
{
    foreach_version (v, r) {
        queue_foreach (q, &v->requests) {
            struct refit_request *request = container_of(q, struct refit_request, link);
            if (strcmp(request->id, id) == 0) {
                *ret_version = v;
                return request;
            }
        }
    }
    return NULL;
}

/* The same request id again: the same answer, now or when it is durable. */
static int submit_repeated(struct step *s, const struct refit_version *v,
                           const struct refit_request *request)
{
    const struct refit_event *ev = s->ev;
    if (v->version != ev->submit.version || !content_same(s->r, v, ev))
        return refuse(s, RS_EEXIST,
                      step_text(s, "request id '%.128s' was used for version %llu%s", request->id,
                                ULL(v->version),
                                v->version == ev->submit.version ? " with other content" : ""));
    if (request->sequence == 0)
        step_reply_values(s, ev->cookie, v->version, request->attempt, request->phase, 0);
    else
        step_wait(s, &(struct refit_waiter){.kind = WAITER_SUBMIT,
                                            .cookie = ev->cookie,
                                            .sequence = request->sequence,
                                            .version = v->version,
                                            .attempt = request->attempt,
                                            .phase = request->phase});
    return 0;
}

/* The newest version that is on its way; NULL: none. */
const struct refit_version *queue_newest_open(const struct refit *r)
{
    for (struct queue *q = r->versions.prev; q != &r->versions; q = q->prev)
        if (!refit_phase_final(version_of(q)->phase.state))
            return version_of(q);
    return NULL;
}

/* NULL, or why this version comes too late. */
static const char *submit_too_late(struct step *s)
{
    const struct refit *r = s->r;
    uint64_t version = s->ev->submit.version;
    const struct refit_version *open = queue_newest_open(r);
    if (open != NULL && version <= open->version)
        return step_text(s, "version %llu is not above %llu, which is %s", ULL(version),
                         ULL(open->version), open == r->in_flight ? "in flight" : "queued");
    if (version <= r->committed)
        return step_text(s, "version %llu is not above %llu, which is committed", ULL(version),
                         ULL(r->committed));
    if (version <= r->known_committed)
        return step_text(s,
                         "version %llu is not above %llu, which a member knows as committed; this "
                         "coordinator's ledger is behind (newest %llu): was an old file restored?",
                         ULL(version), ULL(r->known_committed), ULL(r->committed));
    return NULL;
}

static void request_add(struct refit_version *v, struct refit_request *request)
{
    enum { MAX_REQUESTS = 1024 }; /* then the oldest answers are forgotten */
    if (v->n_requests >= MAX_REQUESTS) {
        struct refit_request *old = container_of(v->requests.next, struct refit_request, link);
        if (old->sequence == 0)
            request_free(v, old);
    }
    queue_push(&v->requests, &request->link);
    v->n_requests++;
}

/* One transaction: the version, its request and what goes with it; answered when durable. */
static void submit_write(struct step *s, struct refit_version *v, struct refit_request *request)
{
    request->attempt = v == s->r->in_flight || refit_phase_final(v->phase.state) ? v->attempt : 0;
    request->phase = (enum refit_phase)v->phase.state;
    request_add(v, request);
    /* Once it is durable it is left alone: the commit's record may be on its way. Before that, whichever
     * of its transactions comes first makes it durable. */
    if (!v->durable)
        step_record_version(s, v, (enum refit_phase)v->phase.state);
    step_record(s, LEDGER_REQUEST)->request = (struct ledger_request){.id = request->id,
                                                                      .version = v->version,
                                                                      .attempt = request->attempt,
                                                                      .phase = request->phase};
    request->sequence = step_persist(s, WRITE_SUBMIT, v);
    step_wait(s, &(struct refit_waiter){.kind = WAITER_SUBMIT,
                                        .cookie = s->ev->cookie,
                                        .sequence = request->sequence,
                                        .version = v->version,
                                        .attempt = request->attempt,
                                        .phase = request->phase});
}

static void version_fill(struct refit_version *v, const struct refit *r, struct parcel *p,
                         const struct refit_event *ev)
{
    queue_policies_free(v->policies, v->n_policies);
    mem_free(v->options);
    mem_free(v->words);
    v->words = p->words;
    v->policies = p->policies;
    v->options = p->options;
    queue_fill(v, r, ev);
}

void queue_fill(struct refit_version *v, const struct refit *r, const struct refit_event *ev)
{
    memcpy(v->content, ev->submit.content, sizeof v->content);
    v->n_policies = ev->submit.n_policies;
    v->n_options_bytes = ev->submit.n_options_bytes;
    v->release_at = ev->submit.release_at == REFIT_RELEASE_DEFAULT ? REFIT_RELEASE_STAGED
                                                                   : ev->submit.release_at;
    const struct refit_config *c = &r->config;
    v->prepare_timeout_ms =
        ev->submit.prepare_timeout_ms != 0 ? ev->submit.prepare_timeout_ms : c->prepare_timeout_ms;
    v->transfer_timeout_ms = ev->submit.transfer_timeout_ms != 0 ? ev->submit.transfer_timeout_ms
                                                                 : c->transfer_timeout_ms;
    v->accept_timeout_ms =
        ev->submit.accept_timeout_ms != 0 ? ev->submit.accept_timeout_ms : c->accept_timeout_ms;
    v->submitted_ns = ev->now_ns;
    v->submitted_wall_ns = ev->wall_ns;
    v->total_ns = v->wire_ns = v->stall_ns = 0;
    v->first_attempt = 0;
    v->source_released = v->ended_by_restart = false;
    v->durable = false;
    v->code = 0;
    v->reason[0] = '\0';
    memset(&v->bytes, 0, sizeof v->bytes);
}

void queue_unexclude(const struct refit *r)
{
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++)
            l->instances[i].excluded = false;
}

/* A version that is new, or ABORTED or SUPERSEDED and tried again. */
static void submit_open(struct step *s, struct refit_version *v, struct parcel *p)
{
    struct refit *r = s->r;
    version_fill(v, r, p, s->ev);
    push_submitted(r, v);
    phase_move(r, v, REFIT_SUBMITTED);
    side_make_way(s);
    if (r->in_flight == NULL) {
        r->in_flight = v;
        queue_unexclude(r);
        attempt_clear(r);
        v->attempt = ++r->attempt_high;
        v->n_attempts++;
        step_record_model(s, r->committed);
        step_record_attempt(s, v, REFIT_SUBMITTED);
    }
    submit_write(s, v, p->request);
}

/* The same content under another id, on a version that is on its way or committed. */
static int submit_known(struct step *s, struct refit_version *v)
{
    struct parcel p;
    if (parcel_make(s->ev, &p) != 0)
        return RS_ENOMEM;
    if (v->phase.state != REFIT_COMMITTED)
        push_submitted(s->r, v);
    else
        v->taken_again |= v->submitted_again;
    submit_write(s, v, p.request);
    queue_policies_free(p.policies, s->ev->submit.n_policies);
    mem_free(p.options);
    mem_free(p.words);
    return 0;
}

static bool is_published(const struct refit *r, uint64_t version)
{
    foreach_worker (w, r)
        if (!w->gone && w->layout->side == REFIT_SOURCE && w->published == version)
            return true;
    return false;
}

bool published_differs(const struct refit *r, const struct refit_version *v)
{
    uint64_t content = is_published(r, v->version) ? attempt_content(r, v->version) : 0;
    return content != 0 && v->publication != 0 && content != v->publication;
}

const char *published_differs_text(struct step *s, const struct refit_version *v)
{
    return step_text(s,
                     "version %llu is committed already, with other weights than are published "
                     "under it now; use a new version",
                     ULL(v->version));
}

static int refuse_content(struct step *s, const struct refit_version *v)
{
    bool committed = v->phase.state == REFIT_COMMITTED;
    return refuse(s, RS_EEXIST,
                  step_text(s, "version %llu %s%s, with other content (%s); use a new version",
                            ULL(v->version),
                            committed ? "is committed already" : "was submitted and is ",
                            committed ? "" : sm_name(&v->phase), content_difference(s, v)));
}

/* A trainer whose memory is promised for the committed version once more: side_consider says when it has it back. */
static void note_again(const struct refit *r, struct refit_version *v)
{
    foreach_worker (w, r)
        if (v->phase.state == REFIT_COMMITTED && v->version == r->committed && !w->gone &&
            w->layout->side == REFIT_SOURCE && w->published == v->version && !w->released)
            v->submitted_again = true;
}

int queue_submit(struct step *s)
{
    struct refit *r = s->r;
    if (s->ev->submit.rehearsal)
        return side_rehearse(s);
    const char *why = queue_submit_fault(s);
    if (why != NULL)
        return refuse(s, RS_EINVAL, why);
    if (r->in_flight != NULL && r->in_flight->kind == REFIT_KIND_REHEARSAL &&
        r->in_flight->version == s->ev->submit.version)
        return refuse(s, RS_EPRECOND,
                      step_text(s, "version %llu is being rehearsed: submit it when that has ended",
                                ULL(s->ev->submit.version)));
    struct refit_version *v = refit_find_version(r, s->ev->submit.version);
    if (content_complete(v, s->ev) != 0)
        return RS_ENOMEM;
    if (v != NULL)
        note_again(r, v);
    struct refit_request *request = find_request(r, s->ev->submit.request_id, &v);
    if (request != NULL)
        return submit_repeated(s, v, request);
    v = refit_find_version(r, s->ev->submit.version);
    if (v != NULL && !content_same(r, v, s->ev))
        return refuse_content(s, v);
    if (v != NULL && v->phase.state == REFIT_COMMITTED && published_differs(r, v))
        return refuse(s, RS_EEXIST, published_differs_text(s, v));
    bool ended = v == NULL || v->phase.state == REFIT_ABORTED || v->phase.state == REFIT_SUPERSEDED;
    if (!ended && (v->phase.state != REFIT_COMMITTED || v->version == r->committed))
        return submit_known(s, v);
    why = submit_too_late(s);
    if (why == NULL)
        why = sleep_forbids(s, s->ev->submit.policies, s->ev->submit.n_policies,
                            v != NULL && feed_find(r, v, NULL) != NULL);
    if (why != NULL)
        return refuse(s, RS_EPRECOND, why);
    struct parcel p;
    if (parcel_make(s->ev, &p) != 0)
        return RS_ENOMEM;
    if (v == NULL && (v = version_new(r, s->ev->submit.version)) == NULL) {
        parcel_free(&p, s->ev->submit.n_policies);
        return RS_ENOMEM;
    }
    submit_open(s, v, &p);
    return 0;
}

/* --- submitted --- */

/* Settles the requests that this transaction carried: durable, or never there. */
static void requests_settle(struct refit_version *v, uint64_t sequence, int code)
{
    queue_foreach_safe (q, tmp, &v->requests) {
        struct refit_request *request = container_of(q, struct refit_request, link);
        if (request->sequence != sequence)
            continue;
        if (code == 0)
            request->sequence = 0;
        else
            request_free(v, request);
    }
}

static void supersede(struct step *s, struct refit_version *old, const struct refit_version *newer)
{
    s->r->queued = NULL;
    old->code = RS_EABORTED;
    (void)snprintf(old->reason, sizeof old->reason,
                   "version %llu was submitted while this one waited", ULL(newer->version));
    queue_end(s, old, REFIT_SUPERSEDED);
}

static void take_place(struct step *s, struct refit_version *v)
{
    struct refit *r = s->r;
    if (v == r->in_flight) {
        attempt_begin(s);
        return;
    }
    if (r->queued != NULL)
        supersede(s, r->queued, v);
    if (r->in_flight != NULL && r->in_flight->version > v->version) {
        supersede(s, v, r->in_flight); /* it was overtaken while the ledger wrote */
        return;
    }
    r->queued = v;
    step_notify(s, v);
    if (r->in_flight == NULL)
        queue_next(s);
}

/* The first word of a version could not be written, so it was never submitted. */
static void unsubmit(struct step *s, struct refit_version *v)
{
    struct refit *r = s->r;
    if (v->n_writes > 0 || v->durable || v->phase.state != REFIT_SUBMITTED || r->queued == v)
        return;
    bool was_in_flight = r->in_flight == v;
    if (was_in_flight) {
        r->in_flight = NULL;
        attempt_clear(r);
    }
    if (!v->recorded) {
        version_free(r, v);
    } else { /* a new try of an ended version: it has ended as before */
        (void)snprintf(v->reason, sizeof v->reason, "submitting it again could not be recorded");
        phase_move(r, v, REFIT_ABORTING);
        phase_move(r, v, REFIT_ABORTED);
    }
    if (was_in_flight)
        queue_next(s);
}

void queue_submit_written(struct step *s, const struct refit_write *w, int code)
{
    struct refit_version *v = refit_find_version(s->r, w->version);
    rs_assert(v != NULL); /* kept while it has writes */
    const char *text =
        code == 0 ? ""
                  : step_text(s, "version %llu was not recorded: %s", ULL(w->version),
                              s->ev->durable.text == NULL ? err_name(code) : s->ev->durable.text);
    step_answer(s, WAITER_SUBMIT, w->sequence, code, text, 0);
    requests_settle(v, w->sequence, code);
    if (code != 0) {
        unsubmit(s, v);
        return;
    }
    bool first = !v->durable;
    v->durable = true;
    v->recorded = true;
    if (first && v->phase.state == REFIT_SUBMITTED && v->ending == REFIT_NONE)
        take_place(s, v);
}

void queue_next(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->queued;
    if (v == NULL)
        return;
    r->queued = NULL;
    r->in_flight = v;
    queue_unexclude(r);
    attempt_clear(r);
    v->attempt = ++r->attempt_high;
    v->n_attempts++;
    step_record_model(s, r->committed);
    step_record_version(s, v, REFIT_SUBMITTED);
    step_record_attempt(s, v, REFIT_SUBMITTED);
    (void)step_persist(s, WRITE_BEGIN, v);
}

/* --- ends --- */

void queue_end(struct step *s, struct refit_version *v, enum refit_phase end)
{
    v->ending = end;
    v->total_ns = since_submitted(s, v); /* so far: step_ended tells the rest */
    step_record_version(s, v, end);
    if (v->attempt != 0 && v == s->r->in_flight)
        step_record_attempt(s, v, end);
    (void)step_persist(s, WRITE_END, v);
}

static void end_in_flight(struct step *s, struct refit_version *v)
{
    struct refit *r = s->r;
    const char *reason = step_text(s, "%s", v->reason);
    foreach_worker (w, r)
        if (w->layout->side == REFIT_DESTINATION || w->published == v->version ||
            w->claimed == v->version || w->asked_publish) /* its Publish may be on its way */
            step_tell(s, w, REFIT_TELL_ABORTED, v, reason);
    foreach_worker (w, r)
        if (w->ready == v->version)
            w->ready = 0;
    attempt_release_sources(s, v);
    step_ended(s, v);
    v->bytes = refit_version_bytes(r, v);
    r->in_flight = NULL;
    attempt_clear(r);
    if (r->config.catch_up) /* that was of this version: they may lack the one that is committed */
        queue_unexclude(r);
    queue_next(s);
}

/* Also where the record could not be written: what the ledger doesn't know as committed a restart
 * aborts anyway. */
void queue_end_written(struct step *s, const struct refit_write *w)
{
    struct refit *r = s->r;
    struct refit_version *v = refit_find_version(r, w->version);
    rs_assert(v != NULL && v->ending != REFIT_NONE);
    enum refit_phase end = v->ending;
    v->ending = REFIT_NONE;
    phase_move(r, v, end);
    v->total_ns = since_submitted(s, v);
    if (end == REFIT_SUPERSEDED)
        r->n_superseded++;
    else
        r->n_aborted++;
    if (v->first_attempt == 0) /* it never had its turn */
        step_mark(s, v, "submitted", "", v->submitted_ns);
    step_mark(s, v, end == REFIT_SUPERSEDED ? "superseded" : "aborted", "", s->ev->now_ns);
    step_notify(s, v);
    step_answer(s, WAITER_ABORT, v->version, 0, "", 0);
    if (v == r->in_flight) {
        end_in_flight(s, v);
    } else {
        attempt_release_sources(s, v);
        step_ended(s, v);
    }
}

/* 0: whatever is in flight or else queued. A catch-up and a rehearsal go by their number too. */
static struct refit_version *abort_whom(const struct refit *r, uint64_t version)
{
    if (r->in_flight != NULL && (version == 0 || (r->in_flight->kind != REFIT_KIND_REFIT &&
                                                  r->in_flight->version == version)))
        return r->in_flight;
    return version != 0 ? refit_find_version(r, version) : r->queued;
}

void queue_abort(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    struct refit_version *v = abort_whom(r, ev->abort.version);
    if (v == NULL) {
        bool old = ev->abort.version != 0 && ev->abort.version <= r->committed;
        step_reply(s, ev->cookie, ev->abort.version == 0 || old ? RS_EPRECOND : RS_ENOTFOUND,
                   ev->abort.version == 0 ? "nothing is in flight"
                   : old
                       ? "that version has ended"
                       : step_text(s, "version %llu was never submitted", ULL(ev->abort.version)));
        return;
    }
    if (v->phase.state == REFIT_COMMITTED) {
        step_reply(s, ev->cookie, RS_EPRECOND,
                   step_text(s, "version %llu is committed", ULL(v->version)));
        return;
    }
    if (refit_phase_final(v->phase.state)) {
        step_reply_values(s, ev->cookie, v->version, v->attempt, (enum refit_phase)v->phase.state,
                          0);
        return;
    }
    step_wait(s, &(struct refit_waiter){.kind = WAITER_ABORT,
                                        .cookie = ev->cookie,
                                        .version = v->version,
                                        .attempt = v->attempt,
                                        .phase = REFIT_ABORTED});
    const char *why = step_text(s, "aborted by request%s%.500s",
                                ev->abort.reason == NULL || ev->abort.reason[0] == '\0' ? "" : ": ",
                                ev->abort.reason == NULL ? "" : ev->abort.reason);
    if (v->ending != REFIT_NONE)
        return; /* it ends already */
    if (v == r->in_flight) {
        if (!r->committing) /* else the ledger decides; the waiter hears of it */
            attempt_call_off(s, RS_EABORTED, why);
        return;
    }
    if (v == r->queued)
        r->queued = NULL;
    v->code = RS_EABORTED;
    (void)snprintf(v->reason, sizeof v->reason, "%s", why);
    phase_move(r, v, REFIT_ABORTING);
    step_notify(s, v);
    queue_end(s, v, REFIT_ABORTED);
}
