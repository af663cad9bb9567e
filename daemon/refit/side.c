/* Attempts that commit nothing: a newcomer catches up with the newest committed version; a rehearsal.
 *
 * Both go through the phases of an attempt as `refit.side`, which stands in no list: the version that a
 * catch-up is about stays COMMITTED, and what is rehearsed is no version. They differ
 *   in who takes part   catch-up: the fit instances that lack the version, and who feeds them
 *   in the end          ACCEPTING → (recorded) → COMMITTED for those who caught up, or REHEARSED
 *   in what follows     nothing is tried again within the version; an instance that could not catch up
 *                       is tried again later, each time later; a newer version makes it give way. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))
enum { MOST_DOUBLINGS = 6, MS = 1000 * 1000 };

/* --- begin --- */

static void side_begin(struct step *s, enum refit_kind kind, uint64_t version)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    v->kind = kind;
    v->version = version;
    queue_init(&v->link);
    queue_init(&v->requests);
    sm_init(&v->phase, refit_phase_table, REFIT_NONE);
    queue_unexclude(r);
    r->in_flight = v;
    attempt_clear(r);
    v->attempt = ++r->attempt_high;
    v->n_attempts = 1;
    v->durable = true;
    phase_move(r, v, REFIT_SUBMITTED);
    step_record_model(s, r->committed);
    step_record_attempt(s, v, REFIT_SUBMITTED);
}

void side_free(struct refit *r)
{
    if (r->side.kind == REFIT_KIND_REHEARSAL) {
        mem_free(r->side.options);
        queue_policies_free(r->side.policies, r->side.n_policies);
    }
    r->side = (struct refit_version){0};
}

/* --- who lacks the newest committed version --- */

static bool worker_lacks(const struct refit *r, const struct refit_worker *w)
{
    bool torn = w->receive == REFIT_IN_PLACE && w->torn;
    return torn || ((w->held != r->committed || w->unsaid) && w->applied != r->committed);
}

static bool instance_lacks(const struct refit *r, const struct refit_version *v,
                           const struct refit_layout *l, uint32_t index)
{
    const struct refit_instance *instance = &l->instances[index];
    bool lacks = false;
    if (instance->n_ranks == 0 || instance_fitness(r, v, l, index) != INSTANCE_FIT)
        return false;
    for (uint32_t i = 0; i < instance->n_ranks; i++) {
        const struct refit_worker *w = l->worker_of_rank[instance->ranks[i]];
        if (w->skipped >= r->committed) /* it has rejected it */
            return false;
        lacks |= worker_lacks(r, w);
    }
    return lacks;
}

/* Whether the trainer can feed: it has published the committed version again, with that content, and
 * was not released since. */
static bool trainer_feeds(const struct refit *r, const struct refit_version *v)
{
    return v->publication != 0 && attempt_sources_ready(r, v) &&
           attempt_content(r, v->version) == v->publication;
}

/* Who feeds the instances of this layout: *ret_feed NULL is the trainer. */
static bool can_be_fed(const struct refit *r, const struct refit_version *v, struct refit_layout *l,
                       struct refit_layout **ret_feed)
{
    *ret_feed = NULL;
    return trainer_feeds(r, v) || (*ret_feed = feed_find(r, v, l)) != NULL;
}

static bool layout_due(struct step *s, const struct refit_version *v, const struct refit_layout *l)
{
    struct refit *r = s->r;
    bool due = false;
    for (uint32_t i = 0; i < l->n_instances; i++) {
        if (!instance_lacks(r, v, l, i))
            continue;
        uint64_t not_before = l->instances[i].catch_up_not_before_ns;
        if (not_before <= s->ev->now_ns)
            due = true;
        else if (not_before < r->catch_up_at_ns)
            r->catch_up_at_ns = not_before;
    }
    return due;
}

static void catch_up_begin(struct step *s, const struct refit_version *of)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    *v = (struct refit_version){.publication = of->publication,
                                .options = of->options,
                                .n_options_bytes = of->n_options_bytes,
                                .release_at = REFIT_RELEASE_STAGED,
                                .prepare_timeout_ms = r->config.prepare_timeout_ms,
                                .transfer_timeout_ms = r->config.transfer_timeout_ms,
                                .accept_timeout_ms = r->config.accept_timeout_ms,
                                .submitted_ns = s->ev->now_ns,
                                .submitted_wall_ns = s->ev->wall_ns};
    memcpy(v->content, of->content, sizeof v->content);
    side_begin(s, REFIT_KIND_CATCH_UP, of->version);
    (void)step_persist(s, WRITE_BEGIN, v);
}

static bool all_published(const struct refit *r, uint64_t version)
{
    foreach_layout (l, r)
        for (uint32_t rank = 0; l->side == REFIT_SOURCE && l->wanted && rank < l->n_ranks; rank++) {
            const struct refit_worker *w = l->worker_of_rank[rank];
            if (l->instance_of_rank[rank] != UINT32_MAX &&
                (w == NULL || w->gone || w->published != version))
                return false;
        }
    return true;
}

/* A trainer has published and submitted the committed version once more, and nobody is to be fed now: its memory is its own
 * again. Where it holds other weights than were committed, it hears that before. */
static void release_again(struct step *s, const struct refit_version *v)
{
    struct refit *r = s->r;
    if (!v->submitted_again || !all_published(r, v->version))
        return;
    const char *differs = published_differs(r, v) ? published_differs_text(s, v) : NULL;
    foreach_worker (w, r) {
        if (w->layout->side != REFIT_SOURCE || w->published != v->version || w->released ||
            (w->push != 0 && !v->taken_again && differs == NULL)) /* who submits will withdraw */
            continue;
        if (differs != NULL)
            step_tell(s, w, REFIT_TELL_ABORTED, v, differs);
        w->released = true;
        w->released_ns = s->ev->now_ns;
        step_tell(s, w, REFIT_TELL_SOURCE_RELEASED, v, "");
    }
}

void side_consider(struct step *s)
{
    struct refit *r = s->r;
    struct refit_layout *feed;
    r->catch_up_at_ns = REFIT_NEVER;
    if (r->in_flight != NULL || !nodes_settled(r) || r->committed == 0 ||
        r->known_committed > r->committed || queue_newest_open(r) != NULL)
        return;
    const struct refit_version *v = refit_find_version(r, r->committed);
    if (v == NULL)
        return; /* its row is lost: nobody knows what was asked for */
    foreach_layout (l, r)
        if (r->config.catch_up && l->side == REFIT_DESTINATION && l->wanted &&
            layout_due(s, v, l) && can_be_fed(r, v, l, &feed)) {
            catch_up_begin(s, v);
            return;
        }
    release_again(s, v);
}

/* --- why it does not come --- */

struct lacking {
    const struct refit_layout *layout; /* the first instance's */
    uint32_t instance, n;
};

/* Those who lack the version. */
static struct lacking lacking_find(const struct refit *r, const struct refit_version *v)
{
    struct lacking x = {0};
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            if (l->side != REFIT_DESTINATION || !l->wanted || !instance_lacks(r, v, l, i))
                continue;
            if (x.n++ == 0) {
                x.layout = l;
                x.instance = i;
            }
        }
    return x;
}

static void lacking_text(const struct refit *r, const struct lacking *x, const char *why,
                         char *text, size_t capacity)
{
    char more[32] = "";
    if (x->n > 1)
        (void)snprintf(more, sizeof more, " and %u more", x->n - 1);
    (void)snprintf(text, capacity, "%.256s/instance %u%s: version %llu is not there, and %s",
                   x->layout->name, x->instance, more, ULL(r->committed), why);
}

const char *refit_newcomers_wait(const struct refit *r, char *text, size_t capacity)
{
    const struct refit_version *v = refit_find_version(r, r->committed);
    struct refit_layout *feed;
    text[0] = '\0';
    if (r->in_flight != NULL || !nodes_settled(r) || v == NULL || refit_ledger_behind(r) ||
        queue_newest_open(r) != NULL)
        return text;
    if (r->config.catch_up && can_be_fed(r, v, NULL, &feed)) /* who feeds one can feed them all */
        return text;
    struct lacking x = lacking_find(r, v);
    const char *why =
        !r->config.catch_up
            ? "newcomers are not brought up ([refit] catch_up is off): submit the next version"
        : v->publication == 0
            ? "nobody is fed what was not fingerprinted (verify was off): submit the next version"
        : !r->config.feed
            ? "its sources have been released ([refit] feed is off): publish it again with the "
              "same "
              "content, or submit the next version"
            : "nobody who could feed it holds it any more: publish it again with the same content, "
              "or submit the next version";
    if (x.n > 0)
        lacking_text(r, &x, why, text, capacity);
    return text;
}

/* --- catch-up: who takes part --- */

static bool choose_receivers(struct step *s, struct refit_layout *l)
{
    struct refit *r = s->r;
    bool any = false;
    for (uint32_t i = 0; i < l->n_instances; i++) {
        struct refit_instance *instance = &l->instances[i];
        if (!instance_lacks(r, r->in_flight, l, i) ||
            instance->catch_up_not_before_ns > s->ev->now_ns)
            continue;
        any = instance->taking_part = true;
        for (uint32_t k = 0; k < instance->n_ranks; k++)
            attempt_take_part(r, l->worker_of_rank[instance->ranks[k]]);
    }
    return any;
}

/* The trainer feeds all that lack it; destination workers those of one layout at a time, of their own
 * where they can. */
bool side_choose(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    struct refit_layout *feed = NULL;
    bool any = false;
    foreach_layout (l, r) {
        if (l->side != REFIT_DESTINATION || !l->wanted || (any && feed != NULL) ||
            !layout_due(s, v, l))
            continue;
        if (can_be_fed(r, v, l, &feed))
            any |= choose_receivers(s, l);
    }
    r->publication = v->publication;
    if (!any)
        return false;
    r->feed_layout = feed;
    if (feed != NULL) {
        r->side.source_released = true; /* the trainer has no part in it */
        feed_choose(r, v, feed);
        return true;
    }
    foreach_worker (w, r)
        if (w->layout->side == REFIT_SOURCE && w->layout->wanted && !w->gone)
            attempt_take_part(r, w);
    return true;
}

/* --- rehearsal --- */

static int refuse(struct step *s, int code, const char *text)
{
    step_reply(s, s->ev->cookie, code, text);
    return 0;
}

int side_rehearse(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_event *ev = s->ev;
    const char *why = queue_submit_fault(s);
    if (why != NULL)
        return refuse(s, RS_EINVAL, why);
    if (queue_newest_open(r) != NULL)
        return refuse(s, RS_EPRECOND,
                      step_text(s, "version %llu is on its way: rehearse when nothing is",
                                ULL(queue_newest_open(r)->version)));
    if (r->in_flight != NULL)
        return refuse(s, RS_EUNAVAIL,
                      r->in_flight->kind == REFIT_KIND_REHEARSAL
                          ? "another rehearsal is in flight"
                          : "a newcomer is being brought up: try again");
    if (ev->submit.version <= r->known_committed ||
        refit_find_version(r, ev->submit.version) != NULL)
        return refuse(
            s, RS_EPRECOND,
            step_text(s, "a rehearsal borrows a number that no version has had; %llu is taken",
                      ULL(ev->submit.version)));
    why = sleep_forbids(s, ev->submit.policies, ev->submit.n_policies, false);
    if (why != NULL)
        return refuse(s, RS_EPRECOND, why);
    struct parcel p;
    if (parcel_make(ev, &p) != 0)
        return RS_ENOMEM;
    r->side = (struct refit_version){.policies = p.policies, .options = p.options};
    p.policies = NULL;
    p.options = NULL;
    parcel_free(&p, 0);
    queue_fill(&r->side, r, ev);
    side_begin(s, REFIT_KIND_REHEARSAL, ev->submit.version);
    uint64_t sequence = step_persist(s, WRITE_BEGIN, &r->side);
    step_wait(s, &(struct refit_waiter){.kind = WAITER_BEGIN,
                                        .cookie = ev->cookie,
                                        .sequence = sequence,
                                        .version = r->side.version,
                                        .attempt = r->side.attempt,
                                        .phase = REFIT_SUBMITTED});
    return 0;
}

void side_begun_written(struct step *s, const struct refit_write *w, int code)
{
    step_answer(s, WAITER_BEGIN, w->sequence, code, "the rehearsal could not be recorded", 0);
}

void side_make_way(struct step *s)
{
    const struct refit *r = s->r;
    if (r->in_flight != NULL && r->in_flight->kind == REFIT_KIND_CATCH_UP && !r->committing)
        attempt_call_off(s, RS_ECANCELED,
                         step_text(s, "version %llu was submitted", ULL(s->ev->submit.version)));
}

/* --- ends --- */

static void end_well(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    bool rehearsal = v->kind == REFIT_KIND_REHEARSAL;
    const struct refit_version *of = rehearsal ? NULL : refit_find_version(r, v->version);
    r->committing = true;
    r->deadline_ns = REFIT_NEVER; /* the ledger answers */
    if (of != NULL)
        step_record_version(s, of, REFIT_COMMITTED);
    if (rehearsal)
        (void)snprintf(v->reason, sizeof v->reason, "the rehearsal has ended well");
    step_record_attempt(s, v, rehearsal ? REFIT_REHEARSED : REFIT_COMMITTED);
    if (!rehearsal)
        attempt_record_acceptances(s);
    (void)step_persist(s, WRITE_SIDE, v);
}

void side_judge(struct step *s)
{
    struct refit *r = s->r;
    uint32_t open = 0, accepted = 0, rejected = 0;
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            const struct refit_instance *instance = &l->instances[i];
            open += instance->taking_part && instance->verdict == REFIT_NO_VERDICT;
            accepted += instance->taking_part && instance->verdict == REFIT_ACCEPTED;
            rejected += instance->taking_part && instance->verdict == REFIT_REJECTED;
        }
    if (open > 0)
        return;
    if (accepted == 0 || (rejected > 0 && r->side.kind == REFIT_KIND_REHEARSAL)) {
        foreach_worker (w, r) /* what it rejected it is not given again */
            if (r->side.kind == REFIT_KIND_CATCH_UP && w->taking_part && worker_accepts(w) &&
                !w->gone)
                w->skipped = r->side.version;
        attempt_call_off(s, RS_EABORTED, attempt_rejections_text(s));
    } else {
        end_well(s);
    }
}

static void add_bytes(struct refit_bytes *to, const struct refit_bytes *b)
{
    to->landed += b->landed;
    to->network += b->network;
    to->domain += b->domain;
    to->device += b->device;
    to->skipped += b->skipped;
    to->total += b->total;
    to->network_minimum += b->network_minimum;
}

static void keep_outcome(const struct step *s, const struct refit_bytes *bytes)
{
    struct refit *r = s->r;
    const struct refit_version *v = &r->side;
    if (v->kind == REFIT_KIND_CATCH_UP) {
        add_bytes(&r->catch_up_bytes, bytes);
        return;
    }
    r->rehearsed = (struct refit_outcome){.version = v->version,
                                          .attempt = v->attempt,
                                          .phase = (enum refit_phase)v->phase.state,
                                          .bytes = *bytes,
                                          .total_ns = since_submitted(s, v)};
    (void)snprintf(r->rehearsed.reason, sizeof r->rehearsed.reason, "%s", v->reason);
}

/* The attempt is over: everybody hears, and the next may come. */
static void side_close(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    struct refit_bytes bytes = refit_version_bytes(r, v);
    bool rehearsal = v->kind == REFIT_KIND_REHEARSAL, well = v->phase.state == REFIT_COMMITTED;
    const char *reason = step_text(s, "%s", v->reason);
    foreach_worker (w, r) {
        bool concerned = rehearsal ? w->layout->side == REFIT_DESTINATION || w->asked_publish ||
                                         w->published == v->version
                                   : w->taking_part && worker_accepts(w);
        if (concerned)
            step_tell(s, w, well ? REFIT_TELL_COMMITTED : REFIT_TELL_ABORTED, v, reason);
        if (w->ready == v->version)
            w->ready = 0;
    }
    attempt_release_sources(s, v);
    step_notify(s, v);
    step_answer(s, WAITER_ABORT, v->version, v->phase.state == REFIT_ABORTED ? 0 : RS_EPRECOND,
                "it had ended already", 0);
    keep_outcome(s, &bytes);
    r->in_flight = NULL;
    attempt_clear(r);
    queue_unexclude(r); /* that was of this attempt; who failed is put off */
    side_free(r);
    queue_next(s);
}

/* What it was fed from was found to be another content. */
static bool feeder_blamed(const struct refit *r)
{
    foreach_worker (w, r)
        if (w->taking_part && w->feeding != REFIT_FEED_NONE && w->blamed != 0 &&
            w->blamed_in == r->side.attempt)
            return true;
    return false;
}

/* Who failed is tried again, later each time; a newer version that came is nobody's failure, and where a feeder was to blame
 * another one feeds at once. */
static void put_off(struct step *s)
{
    struct refit *r = s->r;
    if (r->side.code == RS_ECANCELED || feeder_blamed(r))
        return;
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            struct refit_instance *instance = &l->instances[i];
            if (!instance->taking_part && !instance->excluded)
                continue;
            uint32_t n = instance->n_catch_ups_failed;
            uint64_t ms = (uint64_t)r->config.catch_up_retry_ms << n;
            instance->n_catch_ups_failed += n < MOST_DOUBLINGS;
            instance->catch_up_not_before_ns = s->ev->now_ns + ms * MS;
        }
}

void side_aborted(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    if (v->kind == REFIT_KIND_CATCH_UP)
        put_off(s);
    step_record_attempt(s, v, REFIT_ABORTED);
    (void)step_persist(s, WRITE_NOTE, NULL);
    phase_move(r, v, REFIT_ABORTED);
    side_close(s);
}

static void caught_up(struct step *s)
{
    struct refit *r = s->r;
    const struct refit_version *of = refit_find_version(r, r->side.version);
    r->n_catch_ups++;
    foreach_worker (w, r)
        if (w->taking_part && worker_accepts(w)) {
            attempt_memory_committed(s, w, &r->side);
            w->unsaid = false;
        }
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            struct refit_instance *instance = &l->instances[i];
            if (!instance->taking_part || instance->verdict != REFIT_ACCEPTED)
                continue;
            r->n_caught_up++;
            instance->n_catch_ups_failed = 0;
            if (of != NULL)
                step_mark(s, of, "caught_up", step_text(s, "%s/instance %u", l->name, i),
                          s->ev->now_ns);
        }
}

void side_written(struct step *s, const struct refit_write *w, int code)
{
    struct refit *r = s->r;
    struct refit_version *v = &r->side;
    rs_assert(r->in_flight == v && r->committing && v->attempt == w->attempt);
    r->committing = false;
    if (code != 0) {
        attempt_call_off(
            s, code,
            step_text(s, "how it ended could not be recorded: %.700s",
                      s->ev->durable.text == NULL ? err_name(code) : s->ev->durable.text));
        return;
    }
    if (v->kind == REFIT_KIND_REHEARSAL) {
        phase_move(r, v, REFIT_REHEARSED);
    } else {
        phase_move(r, v, REFIT_COMMITTED);
        caught_up(s);
    }
    side_close(s);
}
