/* One attempt at one version: gather, plan, prepare, start, stage. Its ends are commit.c's and
 * abort.c's; who may feed whom is feed.c's; what catch-ups and rehearsals do differently is side.c's.
 *
 * Whatever happens, an attempt ends either with the commit record durable, or with every node that
 * was asked to prepare quiesced or dead. */
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

/* --- nodes --- */

static bool all_nodes(const struct refit *r, int part)
{
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].taking_part && (int)r->nodes[i].part != part)
            return false;
    return true;
}

struct refit_node *attempt_answering_node(const struct step *s)
{
    const struct refit *r = s->r;
    if (r->in_flight == NULL || s->ev->node.attempt != r->in_flight->attempt)
        return NULL;
    struct refit_node *n = refit_node(r, s->ev->node.node);
    return n != NULL && n->taking_part ? n : NULL;
}

/* --- a clean slate --- */

/* What does not outlive an attempt. */
static void node_clear(struct refit_node *n)
{
    char broken[REFIT_BROKEN_BYTES];
    memcpy(broken, n->broken, sizeof broken);
    *n = (struct refit_node){.node = n->node,
                             .up = n->up,
                             .silent = n->silent,
                             .expelled = n->expelled,
                             .draining = n->draining,
                             .joined = n->joined,
                             .data_plane = n->data_plane,
                             .n_drained = n->n_drained};
    memcpy(n->broken, broken, sizeof n->broken);
}

void attempt_clear(struct refit *r)
{
    r->begun = r->planning = r->committing = r->epoch_writing = false;
    r->gather_closed = r->expelled = r->again = false;
    r->publication = 0;
    r->feed_layout = NULL;
    r->deadline_ns = REFIT_NEVER;
    for (size_t i = 0; i < r->n_nodes; i++)
        node_clear(&r->nodes[i]);
    foreach_worker (w, r) {
        w->taking_part = w->asked_publish = w->asked_ready = w->asked_accept = false;
        w->feeding = REFIT_FEED_NONE;
        w->verdict = REFIT_WORKER_NO_VERDICT;
    }
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            l->instances[i].taking_part = false;
            l->instances[i].verdict = REFIT_NO_VERDICT;
            if (!l->instances[i].excluded)
                l->instances[i].reason[0] = '\0';
        }
}

void attempt_mark_published(struct step *s, const struct refit_worker *w)
{
    const struct refit_version *v = s->r->in_flight;
    if (v != NULL && s->r->begun && w->published == v->version && !w->released)
        step_mark(s, v, "published", worker_name(s, w), w->published_ns);
}

void attempt_begin(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    r->begun = true;
    r->deadline_ns = deadline_after(s, v->prepare_timeout_ms);
    if (v->first_attempt == 0) {
        v->first_attempt = v->attempt;
        step_mark(s, v, "submitted", "", v->submitted_ns);
    }
    step_mark(s, v, "begun", "", s->ev->now_ns);
    foreach_worker (w, r) /* mostly before it was submitted */
        if (w->layout->side == REFIT_SOURCE && !w->gone)
            attempt_mark_published(s, w);
    step_notify(s, v);
}

void attempt_begun_written(struct step *s, const struct refit_write *w, int code)
{
    struct refit_version *v = s->r->in_flight;
    if (w->side)
        side_begun_written(s, w, code);
    if (v == NULL || v->attempt != w->attempt || v->phase.state != REFIT_SUBMITTED)
        return;
    if (code == 0)
        attempt_begin(s);
    else
        attempt_call_off(s, code, "the attempt could not be recorded");
}

/* --- gather: who takes part --- */

static bool source_ready(const struct refit *r, const struct refit_version *v,
                         const struct refit_worker *w)
{
    return w != NULL && !w->gone && w->published == v->version && !w->released &&
           node_usable(r, w->node);
}

bool attempt_sources_ready(const struct refit *r, const struct refit_version *v)
{
    bool any = false;
    foreach_layout (l, r) {
        if (l->side != REFIT_SOURCE || !l->wanted)
            continue;
        for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
            if (l->instance_of_rank[rank] == UINT32_MAX)
                continue;
            if (!source_ready(r, v, l->worker_of_rank[rank]))
                return false;
            any = true;
        }
    }
    return any;
}

/* True where the layouts that the policy names with a minimum are part of the model. */
static bool policy_known(const struct refit *r, const struct refit_version *v)
{
    for (uint32_t i = 0; i < v->n_policies; i++) {
        const struct refit_layout *l =
            refit_find_layout(r, REFIT_DESTINATION, v->policies[i].layout_name);
        if (v->policies[i].min_instances > 0 && (l == NULL || !l->wanted))
            return false;
    }
    return true;
}

/* Whether the fit instances are enough; `patient`: and none is there that only needs more time. */
static bool destinations_ready(const struct refit *r, const struct refit_version *v, bool patient)
{
    uint32_t total = 0;
    foreach_layout (l, r) {
        if (l->side != REFIT_DESTINATION || !l->wanted)
            continue;
        uint32_t fit = 0;
        for (uint32_t i = 0; i < l->n_instances; i++) {
            enum instance_fitness f = instance_fitness(r, v, l, i);
            if (f == INSTANCE_LATER && patient)
                return false;
            fit += f == INSTANCE_FIT;
        }
        if (fit < version_min_instances(v, l))
            return false;
        total += fit;
    }
    return total > 0 && policy_known(r, v);
}

static void ask_publish(struct step *s)
{
    const struct refit_version *v = s->r->in_flight;
    foreach_worker (w, s->r) {
        if (w->layout->side != REFIT_SOURCE || w->gone || w->asked_publish)
            continue;
        w->asked_publish = true;
        if (w->published != v->version || w->released)
            step_tell(s, w, REFIT_TELL_PUBLISH_REQUESTED, v, "");
    }
}

/* splitmix64's finaliser: spreads (rank, publication) so that a sum over ranks tells order. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

void attempt_take_part(struct refit *r, struct refit_worker *w)
{
    w->taking_part = true;
    refit_node(r, w->node)->taking_part = true;
}

static bool worker_counts(const struct refit_worker *w)
{
    return !w->gone && w->layout->wanted && w->layout->instance_of_rank[w->rank] != UINT32_MAX;
}

uint64_t attempt_content(const struct refit *r, uint64_t version)
{
    uint64_t sum = 0;
    foreach_worker (w, r) {
        if (w->layout->side != REFIT_SOURCE || !worker_counts(w))
            continue;
        if (w->publication == 0 || w->published != version)
            return 0;
        sum += mix(w->publication + mix(w->rank + UINT64_C(0x9E3779B97F4A7C15)));
    }
    return sum == 0 ? 1 : sum;
}

/* The destination instances that are fit, and the trainer or, where feed_layout is set, those that feed.
 */
static void choose_workers(struct refit *r, const struct refit_version *v)
{
    foreach_worker (w, r) {
        struct refit_layout *l = w->layout;
        if (!worker_counts(w) || (l->side == REFIT_SOURCE && r->feed_layout != NULL))
            continue;
        if (l->side == REFIT_SOURCE) {
            attempt_take_part(r, w);
            continue;
        }
        struct refit_instance *instance = worker_instance(w);
        if (instance->taking_part ||
            instance_fitness(r, v, l, l->instance_of_rank[w->rank]) == INSTANCE_FIT) {
            instance->taking_part = true;
            attempt_take_part(r, w);
        }
    }
    r->publication = r->feed_layout != NULL ? v->publication : attempt_content(r, v->version);
    if (r->feed_layout != NULL)
        feed_choose(r, v, r->feed_layout);
}

/* The epoch's members in words, for people who read the ledger. */
static const char *members_text(struct step *s)
{
    char text[ERR_TEXT_BYTES];
    size_t at = 0;
    text[0] = '\0';
    foreach_worker (w, s->r) {
        if (w->gone || at >= sizeof text - 1)
            continue;
        int n = snprintf(text + at, sizeof text - at, "%s%s/rank %u on node %.64s",
                         at == 0 ? "" : ", ", w->layout->name, w->rank, NODE_NAME(s->r, w->node));
        at += n < 0 ? 0 : (size_t)n;
    }
    return step_text(s, "%s", text);
}

static void write_epoch(struct step *s)
{
    struct refit *r = s->r;
    r->epoch++;
    r->epoch_stale = false;
    r->epoch_writing = true;
    step_record_model(s, r->committed);
    step_record(s, LEDGER_EPOCH)->epoch = (struct ledger_epoch){
        .epoch = r->epoch, .wall_ns = s->ev->wall_ns, .members = members_text(s)};
    foreach_layout (l, r) {
        if (l->wanted == l->wanted_durable)
            continue;
        struct ledger_member *m = &step_record(s, LEDGER_MEMBER)->member;
        *m =
            (struct ledger_member){.side = (uint32_t)l->side, .name = l->name, .active = l->wanted};
        memcpy(m->digest, l->digest, sizeof m->digest);
        l->wanted_durable = l->wanted;
    }
    (void)step_persist(s, WRITE_EPOCH, r->in_flight);
}

void attempt_epoch_written(struct step *s, const struct refit_write *w, int code)
{
    struct refit *r = s->r;
    if (code != 0) {
        r->epoch_stale = true;
        foreach_layout (l, r)
            l->wanted_durable = !l->wanted; /* not known any more: written again */
    }
    if (r->in_flight == NULL || r->in_flight->attempt != w->attempt || !r->epoch_writing)
        return;
    r->epoch_writing = false;
    if (code != 0)
        attempt_call_off(s, code, "the epoch could not be recorded");
}

/* --- the first steps of an attempt that has been chosen --- */

struct refit_action *attempt_put_node(struct step *s, enum refit_action_type type,
                                      const struct refit_node *n)
{
    const struct refit_version *v = s->r->in_flight;
    struct refit_action *a = step_put(s, type);
    a->kind = v->kind;
    a->node = n->node;
    a->content = s->r->publication;
    a->version = v->version;
    a->attempt = v->attempt;
    a->epoch = v->epoch;
    return a;
}

static void move_to_planned(struct step *s)
{
    struct refit_version *v = s->r->in_flight;
    s->r->planning = false;
    phase_move(s->r, v, REFIT_PLANNED);
    step_mark(s, v, "planned", "", s->ev->now_ns);
    step_notify(s, v);
}

/* PLANNED to PREPARED. */
static void move_to_prepared(struct step *s)
{
    struct refit_version *v = s->r->in_flight;
    phase_move(s->r, v, REFIT_PREPARED);
    step_mark(s, v, "prepared", "", s->ev->now_ns);
    step_notify(s, v);
}

/* Everybody holds the version whole and the trainer is not needed: no node has anything to do. */
static void go_without_plan(struct step *s)
{
    struct refit *r = s->r;
    for (size_t i = 0; i < r->n_nodes; i++)
        r->nodes[i].taking_part = false;
    memset(r->in_flight->plan_digest, 0, sizeof r->in_flight->plan_digest);
    r->in_flight->bytes = (struct refit_bytes){0};
    r->in_flight->strategy[0] = '\0';
    move_to_planned(s);
    move_to_prepared(s);
}

/* Everybody who has to be there is; false: not yet. Chooses who feeds. */
static bool all_there(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    if (v->kind == REFIT_KIND_CATCH_UP)
        return true; /* looked at when it was begun; what has gone since, choosing finds */
    r->feed_layout = attempt_sources_ready(r, v) ? NULL : feed_find(r, v, NULL);
    const char *sleeper = sleep_forbids(s, v->policies, v->n_policies, r->feed_layout != NULL);
    if (sleeper != NULL) { /* nobody knows when it wakes: no deadline is waited for */
        attempt_call_off(s, RS_EPRECOND, sleeper);
        return false;
    }
    if (r->feed_layout == NULL) {
        ask_publish(s);
        if (!attempt_sources_ready(r, v))
            return false;
    }
    return destinations_ready(r, v, !r->gather_closed);
}

/* False: the attempt has been called off. */
static bool choose(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    if (v->kind == REFIT_KIND_CATCH_UP && !side_choose(s)) {
        attempt_call_off(s, RS_ECANCELED, "nobody who could feed, or nobody to be fed, is left");
        return false;
    }
    if (v->kind != REFIT_KIND_CATCH_UP)
        choose_workers(r, v);
    if (v->kind != REFIT_KIND_REFIT || v->publication == 0 || r->publication == 0 ||
        v->publication == r->publication)
        return true;
    attempt_call_off(
        s, RS_EEXIST,
        step_text(s,
                  "version %llu was published with other content than in an earlier attempt "
                  "that moved bytes; use a new version",
                  ULL(v->version)));
    return false;
}

static void gather(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    if (r->planning || r->epoch_writing)
        return;
    if (!all_there(s)) {
        const char *why = gather_in_vain(s, v);
        if (why != NULL)
            attempt_call_off(s, RS_EPEER, why);
        return;
    }
    if (!nodes_settled(r))
        return;
    if (r->epoch_stale) {
        write_epoch(s);
        return;
    }
    v->epoch = r->epoch;
    r->planning = true;
    if (!choose(s))
        return;
    step_mark(s, v, "gathered", "", s->ev->now_ns);
    if (feed_nothing(r)) {
        go_without_plan(s);
        return;
    }
    struct refit_action *a = step_put(s, REFIT_DO_PLAN);
    a->kind = v->kind;
    a->version = v->version;
    a->attempt = v->attempt;
    a->epoch = v->epoch;
}

/* --- plan, prepare, start --- */

void attempt_planned(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    const struct refit_event *ev = s->ev;
    if (v == NULL || !r->planning || ev->planned.attempt != v->attempt)
        return;
    if (ev->planned.code != 0) {
        if (ev->planned.code == RS_EPRECOND && r->feed_layout != NULL)
            r->feed_layout->feed_refused = v->version;
        attempt_call_off(
            s, ev->planned.code,
            step_text(s, "planning: %s",
                      ev->planned.text == NULL ? err_name(ev->planned.code) : ev->planned.text));
        return;
    }
    memcpy(v->plan_digest, ev->planned.digest, sizeof v->plan_digest);
    v->bytes = (struct refit_bytes){.total = ev->planned.totals.total,
                                    .network_minimum = ev->planned.totals.network_minimum};
    (void)snprintf(v->strategy, sizeof v->strategy, "%s",
                   ev->planned.strategy == NULL ? "" : ev->planned.strategy);
    move_to_planned(s);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].taking_part) {
            r->nodes[i].part = REFIT_NODE_ASKED;
            struct refit_action *a = attempt_put_node(s, REFIT_DO_PREPARE, &r->nodes[i]);
            a->at_ns = r->deadline_ns;
            a->data_plane = r->nodes[i].data_plane;
        }
}

void attempt_prepared(struct step *s)
{
    struct refit *r = s->r;
    struct refit_node *n = attempt_answering_node(s);
    if (n == NULL || n->part != REFIT_NODE_ASKED || r->in_flight->phase.state != REFIT_PLANNED)
        return;
    n->part = REFIT_NODE_PREPARED;
    if (!all_nodes(r, REFIT_NODE_PREPARED))
        return;
    move_to_prepared(s);
}

bool refit_holds_already(const struct refit *r, const struct refit_worker *w)
{
    return r->in_flight != NULL && r->in_flight->kind != REFIT_KIND_REHEARSAL &&
           w->layout->side == REFIT_DESTINATION && !(w->receive == REFIT_IN_PLACE && w->torn) &&
           w->held == r->in_flight->version && r->publication != 0 &&
           w->held_content == r->publication;
}

/* What START makes of a destination's memory until it is staged. */
static void memory_opened(const struct refit *r, struct refit_worker *w)
{
    if (refit_holds_already(r, w))
        return;
    worker_holds_nothing(w);
    if (w->receive == REFIT_IN_PLACE) {
        w->torn = true;
        w->applied = 0;
    }
}

static void all_staged(struct step *s);

static void start(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    if (r->publication != 0)
        v->publication = r->publication;
    foreach_worker (w, r)
        if (w->taking_part && worker_accepts(w))
            memory_opened(r, w);
    phase_move(r, v, REFIT_TRANSFERRING);
    r->deadline_ns = deadline_after(s, v->transfer_timeout_ms);
    step_mark(s, v, "started", "", s->ev->now_ns);
    step_notify(s, v);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].taking_part) {
            r->nodes[i].part = REFIT_NODE_STARTED;
            (void)attempt_put_node(s, REFIT_DO_START, &r->nodes[i]);
        }
    if (all_nodes(r, REFIT_NODE_STAGED)) /* none takes part: there is nothing to move */
        all_staged(s);
}

static void await_ready(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    bool all = true;
    foreach_worker (w, r) {
        if (!w->taking_part || !worker_accepts(w) || w->receive != REFIT_IN_PLACE ||
            w->ready == v->version)
            continue;
        all = false;
        if (!w->asked_ready)
            step_tell(s, w, REFIT_TELL_READY_REQUESTED, v, "");
        w->asked_ready = true;
    }
    if (all)
        start(s);
}

/* --- transfer --- */

/* For how long sources could not write what they had published of it. Of a publication to an earlier start or lease it is not
 * known when: it is older than the submission. */
static uint64_t stalled_ns(const struct step *s, const struct refit_version *v)
{
    uint64_t since = s->ev->now_ns;
    foreach_worker (w, s->r) {
        bool held = w->published == v->version && !w->released;
        if (w->layout->side != REFIT_SOURCE || (!held && w->claimed != v->version))
            continue;
        uint64_t at = held && w->published_ns != 0 ? w->published_ns : v->submitted_ns;
        since = at < since ? at : since;
    }
    return s->ev->now_ns - since;
}

void attempt_release_sources(struct step *s, struct refit_version *v)
{
    struct refit *r = s->r;
    if (v->source_released)
        return;
    v->source_released = true;
    v->stall_ns = stalled_ns(s, v);
    step_mark(s, v, "source_released", "", s->ev->now_ns);
    foreach_worker (w, r) {
        bool held = w->published == v->version && !w->released;
        if (w->layout->side != REFIT_SOURCE || (!held && w->claimed != v->version))
            continue;
        w->released |= held;
        w->released_ns = held ? s->ev->now_ns : w->released_ns;
        w->claimed = w->claimed == v->version ? 0 : w->claimed;
        step_tell(s, w, REFIT_TELL_SOURCE_RELEASED, v, "");
    }
}

static bool sends(const struct refit_worker *w)
{
    return w->taking_part && (w->layout->side == REFIT_SOURCE || w->feeding != REFIT_FEED_NONE);
}

static bool senders_read(const struct refit *r)
{
    foreach_worker (w, r)
        if (sends(w) && !refit_node(r, w->node)->sources_read)
            return false;
    return true;
}

/* What all that is sent in this attempt has to be is known. */
static bool senders_known(const struct refit *r)
{
    foreach_worker (w, r)
        if (sends(w) && !refit_node(r, w->node)->sources_known)
            return false;
    return true;
}

/* Whatever has landed so far was compared with it: the service would have said FAILED. */
static void memory_prove(const struct refit *r)
{
    if (!senders_known(r) || r->in_flight->kind == REFIT_KIND_REHEARSAL)
        return;
    foreach_worker (w, r)
        if (w->taking_part && worker_accepts(w) && refit_node(r, w->node)->landed &&
            w->held == r->in_flight->version && w->held_content == r->publication)
            w->proven = true;
}

static void note_known(const struct refit *r, struct refit_node *n, bool known)
{
    n->sources_known |= known;
    memory_prove(r);
}

static void note_progress(struct step *s, struct refit_node *n)
{
    const struct refit_event *ev = s->ev;
    n->bytes = ev->node.bytes;
    n->first_byte_ns = ev->node.first_byte_ns;
    n->last_byte_ns = ev->node.last_byte_ns;
    n->verified_ns = ev->node.verified_ns;
    n->sources_read_ns = ev->node.sources_read_ns;
    n->sources_read |= ev->node.sources_read_ns != 0;
    note_known(s->r, n, ev->node.sources_known);
    if (s->r->in_flight->release_at == REFIT_RELEASE_READ && senders_read(s->r) &&
        senders_known(s->r))
        attempt_release_sources(s, s->r->in_flight);
}

void attempt_progress(struct step *s)
{
    struct refit_node *n = attempt_answering_node(s);
    if (n != NULL && n->part == REFIT_NODE_ABORTING) /* said before it heard */
        note_known(s->r, n, s->ev->node.sources_known);
    if (n == NULL || n->part != REFIT_NODE_STARTED)
        return;
    bool released = s->r->in_flight->source_released;
    note_progress(s, n);
    if (s->r->in_flight->source_released != released)
        step_notify(s, s->r->in_flight);
}

static void mark_bytes(struct step *s)
{
    const struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    uint64_t first = UINT64_MAX, last = 0, verified = 0;
    for (size_t i = 0; i < r->n_nodes; i++) {
        const struct refit_node *n = &r->nodes[i];
        if (!n->taking_part)
            continue;
        first = n->first_byte_ns != 0 && n->first_byte_ns < first ? n->first_byte_ns : first;
        last = n->last_byte_ns > last ? n->last_byte_ns : last;
        verified = n->verified_ns > verified ? n->verified_ns : verified;
    }
    if (last != 0 && first <= last) {
        v->wire_ns = last - first;
        step_mark(s, v, "first_byte", "", first);
        step_mark(s, v, "last_byte", "", last);
    }
    step_mark(s, v, "verified", "", verified != 0 ? verified : s->ev->now_ns);
}

static void ask_accept(struct step *s)
{
    struct refit *r = s->r;
    foreach_worker (w, r) {
        if (!w->taking_part || !worker_accepts(w))
            continue;
        if (w->accept_automatically)
            w->verdict = REFIT_WORKER_ACCEPTED;
        else
            step_tell(s, w, REFIT_TELL_ACCEPT_REQUESTED, r->in_flight, "");
        w->asked_accept = true;
    }
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++)
            if (l->instances[i].taking_part)
                attempt_settled(s, l, i, "");
}

static void all_staged(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    phase_move(r, v, REFIT_STAGED);
    mark_bytes(s);
    if (v->release_at != REFIT_RELEASE_COMMITTED)
        attempt_release_sources(s, v);
    step_notify(s, v);
    phase_move(r, v, REFIT_ACCEPTING);
    r->deadline_ns = deadline_after(s, v->accept_timeout_ms);
    step_notify(s, v);
    ask_accept(s);
}

/* What a node's destination workers hold now. A rehearsal leaves nothing that anybody wants; nor is
 * believed what has been blamed already. Who feeds from live memory, and takes part since another rank of its
 * instance has not said yes, has got nothing. */
static void memory_landed(const struct refit *r, uint32_t node)
{
    foreach_worker (w, r) {
        bool wrong = w->blamed != 0 && w->blamed_in == r->in_flight->attempt;
        if (!w->taking_part || w->asleep || w->node != node || !worker_accepts(w) || wrong ||
            w->feeding == REFIT_FEED_LIVE || worker_instance(w)->excluded ||
            r->in_flight->kind == REFIT_KIND_REHEARSAL)
            continue;
        if (w->held != r->in_flight->version) /* else it is known from before */
            w->unsaid = r->in_flight->kind == REFIT_KIND_CATCH_UP;
        w->held = r->in_flight->version;
        w->held_content = r->publication;
        w->blamed = 0;
        if (w->receive == REFIT_IN_PLACE)
            w->torn = false;
    }
}

void attempt_staged(struct step *s)
{
    struct refit *r = s->r;
    struct refit_node *n = attempt_answering_node(s);
    if (n == NULL || n->settled)
        return;
    if (n->part ==
        REFIT_NODE_ABORTING) { /* it was through before it heard: a retry needs not move it */
        n->settled = n->landed = true;
        memory_landed(r, n->node);
        note_known(r, n, true);
    }
    if (n->part != REFIT_NODE_STARTED)
        return;
    note_progress(s, n);
    n->settled = n->sources_read = n->landed = true;
    n->part = REFIT_NODE_STAGED;
    memory_landed(r, n->node);
    note_known(r, n, true);
    if (all_nodes(r, REFIT_NODE_STAGED))
        all_staged(s);
}

bool attempt_close_gathering(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    if (r->planning || r->gather_closed || v->kind == REFIT_KIND_CATCH_UP ||
        (!attempt_sources_ready(r, v) && feed_find(r, v, NULL) == NULL) ||
        !destinations_ready(r, v, false))
        return false;
    r->gather_closed = true; /* without those that need still longer */
    r->deadline_ns = deadline_after(s, v->prepare_timeout_ms);
    return true;
}

static void advance_once(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    if (!r->begun || r->committing || v->ending != REFIT_NONE)
        return;
    if (v->phase.state == REFIT_SUBMITTED)
        gather(s);
    else if (v->phase.state == REFIT_PREPARED)
        await_ready(s);
    else if (v->phase.state == REFIT_ACCEPTING && v->kind == REFIT_KIND_REFIT)
        attempt_judge(s);
    else if (v->phase.state == REFIT_ACCEPTING)
        side_judge(s);
}

/* Several phases at once where nothing has to be moved and nobody has to be asked. */
void attempt_advance(struct step *s)
{
    struct refit *r = s->r;
    if (r->in_flight == NULL)
        side_consider(s);
    for (int before = REFIT_NONE; r->in_flight != NULL && r->in_flight->phase.state != before;) {
        const struct refit_version *v = r->in_flight;
        before = v->phase.state;
        advance_once(s);
        if (r->in_flight != v)
            return;
    }
}
