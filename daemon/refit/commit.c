/* The good end of an attempt: acceptances, the policy, the commit's record, and what it makes of memory. */
#include <stdio.h>
#include <string.h>

#include "refit/private.h"

#include "base/banned.h"

#define ULL(x) ((unsigned long long)(x))

void attempt_settled(struct step *s, struct refit_layout *l, uint32_t index, const char *why)
{
    struct refit_instance *instance = &l->instances[index];
    if (instance->verdict != REFIT_NO_VERDICT)
        return;
    bool all = true, rejected = false;
    for (uint32_t i = 0; i < instance->n_ranks; i++) {
        const struct refit_worker *w = l->worker_of_rank[instance->ranks[i]];
        if (w == NULL)
            continue;
        all &= w->verdict == REFIT_WORKER_ACCEPTED;
        rejected |= w->verdict == REFIT_WORKER_REJECTED;
    }
    if (!all && !rejected)
        return;
    instance->verdict = rejected ? REFIT_REJECTED : REFIT_ACCEPTED;
    (void)snprintf(instance->reason, sizeof instance->reason, "%s", rejected ? why : "");
    step_mark(s, s->r->in_flight, rejected ? "rejected" : "accepted",
              step_text(s, "%s/instance %u", l->name, index), s->ev->now_ns);
}

struct tally {
    uint32_t part, accepted, rejected;
};

static struct tally tally(const struct refit_layout *l)
{
    struct tally t = {0};
    for (uint32_t i = 0; i < l->n_instances; i++) {
        t.part += l->instances[i].taking_part;
        t.accepted += l->instances[i].taking_part && l->instances[i].verdict == REFIT_ACCEPTED;
        t.rejected += l->instances[i].taking_part && l->instances[i].verdict == REFIT_REJECTED;
    }
    return t;
}

const char *attempt_rejections_text(struct step *s)
{
    char text[ERR_TEXT_BYTES] = "";
    size_t at = 0;
    foreach_layout (l, s->r)
        for (uint32_t i = 0; i < l->n_instances && at < sizeof text; i++) {
            if (!l->instances[i].taking_part || l->instances[i].verdict != REFIT_REJECTED)
                continue;
            int n = snprintf(text + at, sizeof text - at, "%s%.64s/instance %u rejected: %s",
                             at == 0 ? "" : "; ", l->name, i, l->instances[i].reason);
            at += n < 0 ? 0 : (size_t)n;
        }
    return step_text(s, "%s", text);
}

static void commit(struct step *s)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    r->committing = true;
    r->deadline_ns = REFIT_NEVER; /* the ledger answers */
    v->committed_wall_ns = s->ev->wall_ns;
    v->total_ns = since_submitted(s, v); /* so far: step_ended tells the rest */
    step_record_version(s, v, REFIT_COMMITTED);
    step_record_model(s, v->version);
    step_record_attempt(s, v, REFIT_COMMITTED);
    attempt_record_acceptances(s);
    (void)step_persist(s, WRITE_COMMIT, v);
}

void attempt_record_acceptances(struct step *s)
{
    const struct refit *r = s->r;
    const struct refit_version *v = r->in_flight;
    foreach_layout (l, r)
        for (uint32_t i = 0; i < l->n_instances; i++) {
            const struct refit_instance *instance = &l->instances[i];
            if (!instance->taking_part || instance->verdict == REFIT_NO_VERDICT)
                continue;
            step_record(s, LEDGER_ACCEPTANCE)->acceptance =
                (struct ledger_acceptance){.version = v->version,
                                           .layout_name = l->name,
                                           .instance = i,
                                           .attempt = v->attempt,
                                           .accepted = instance->verdict == REFIT_ACCEPTED,
                                           .reason = instance->reason};
        }
}

/* Commits as soon as the policy holds; aborts as soon as it can't hold any more. */
void attempt_judge(struct step *s)
{
    bool holds = true, can_hold = true;
    uint32_t accepted = 0, possible = 0;
    foreach_layout (l, s->r) {
        struct tally t = tally(l);
        if (t.part == 0)
            continue;
        uint32_t min = version_min_instances(s->r->in_flight, l);
        holds &= t.accepted >= min;
        can_hold &= t.part - t.rejected >= min;
        accepted += t.accepted;
        possible += t.part - t.rejected;
    }
    if (!can_hold || possible == 0)
        attempt_call_off(s, RS_EABORTED, attempt_rejections_text(s));
    else if (holds && accepted > 0)
        commit(s);
}

/* Whoever took no part may hold something else under this number: of a rehearsal, unknown, or by a node's word alone, which
 * no attempt has compared with the sources. */
static void memory_overtaken(struct refit_worker *w, const struct refit_version *v)
{
    bool compared = w->taking_part && v->publication != 0 && w->held_content == v->publication;
    if (w->layout->side != REFIT_DESTINATION || w->held != v->version || compared)
        return;
    worker_holds_nothing(w);
    w->torn |= w->receive == REFIT_IN_PLACE;
}

void attempt_memory_committed(struct step *s, struct refit_worker *w, const struct refit_version *v)
{
    const struct refit_instance *instance = worker_instance(w);
    if (instance->verdict == REFIT_REJECTED)
        w->skipped = v->version; /* it will not be applied there, so the next refit needn't wait */
    else if (w->receive == REFIT_IN_PLACE && instance->verdict == REFIT_ACCEPTED && !w->asleep) {
        w->applied = v->version;
        step_mark(s, v, "applied", worker_name(s, w), s->ev->now_ns);
    }
}

void attempt_commit_written(struct step *s, const struct refit_write *w, int code)
{
    struct refit *r = s->r;
    struct refit_version *v = r->in_flight;
    rs_assert(v != NULL && r->committing && v->attempt == w->attempt);
    r->committing = false;
    if (code != 0) {
        attempt_call_off(
            s, code,
            step_text(s, "the commit could not be recorded: %s",
                      s->ev->durable.text == NULL ? err_name(code) : s->ev->durable.text));
        return;
    }
    phase_move(r, v, REFIT_COMMITTED);
    v->total_ns = since_submitted(s, v);
    r->committed = v->version;
    r->committed_wall_ns = v->committed_wall_ns;
    r->committed_ns = s->ev->now_ns;
    if (r->known_committed < r->committed)
        r->known_committed = r->committed;
    r->n_committed++;
    struct refit_action *a = step_put(s, REFIT_DO_COMMITTED);
    a->version = v->version;
    a->attempt = v->attempt;
    a->wall_ns = v->committed_wall_ns;
    a->content = v->publication;
    step_mark(s, v, "committed", "", s->ev->now_ns);
    foreach_worker (worker, r) {
        if (worker->taking_part && worker_accepts(worker))
            attempt_memory_committed(s, worker, v);
        else
            memory_overtaken(worker, v);
        step_tell(s, worker, REFIT_TELL_COMMITTED, v, "");
        if (worker->ready == v->version)
            worker->ready = 0;
    }
    attempt_release_sources(s, v);
    step_ended(s, v);
    step_notify(s, v);
    step_answer(s, WAITER_ABORT, v->version, RS_EPRECOND,
                step_text(s, "version %llu is committed", ULL(v->version)), 0);
    v->bytes = refit_version_bytes(r, v);
    r->in_flight = NULL;
    attempt_clear(r);
    if (r->config.catch_up) /* those that failed are to catch up */
        queue_unexclude(r);
    queue_next(s);
}
