/* The invariants, checked against what the world saw. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/sim/world.h"

#define ULL(x) ((unsigned long long)(x))

void world_fail(struct world *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "sim: seed %llu step %llu crash-at %llu: ", ULL(w->seed), ULL(w->step),
            ULL(w->crash_at));
    vfprintf(stderr, format, args);
    fprintf(stderr, "\nreplay: sim --seed %llu --crash-at %llu --trace\n", ULL(w->seed),
            ULL(w->crash_at));
    va_end(args);
    exit(1);
}

/* --- the ledger's own word --- */

struct durable {
    uint64_t version;
    bool found;
    uint32_t phase;
    uint8_t content;
    uint64_t attempt;
    uint32_t n_accepted; /* instances, in the version's own attempt */
};

static int note_version(const struct ledger_record *row, void *arg)
{
    struct durable *d = arg;
    d->found = true;
    d->phase = row->version.phase;
    d->attempt = row->version.attempt;
    d->content = row->version.content[0];
    return 0;
}

static int note_acceptance(const struct ledger_record *row, void *arg)
{
    struct durable *d = arg;
    if (row->kind == LEDGER_ACCEPTANCE && row->acceptance.attempt == d->attempt)
        d->n_accepted += row->acceptance.accepted;
    return 0;
}

static struct durable durable(struct world *w, uint64_t version)
{
    struct durable d = {.version = version};
    (void)ledger_versions(w->ledger, "m", version, 0, note_version, &d, NULL);
    (void)ledger_timeline(w->ledger, "m", version, note_acceptance, &d, NULL);
    return d;
}

/* --- actions --- */

static void check_quiet(struct world *w, const struct refit_action *a)
{
    for (uint32_t i = 0; i < w->n_nodes; i++)
        if (w->nodes[i].attempt != 0 && w->nodes[i].attempt != a->attempt &&
            node_may_move(w, &w->nodes[i]))
            world_fail(w, "attempt %llu begins while node %u has not let go of attempt %llu",
                       ULL(a->attempt), i, ULL(w->nodes[i].attempt));
}

/* A layout counts once a worker of it has attached, until all have left for good (which the world may not have heard of
 * yet, where a node is drained); always where the policy names it. */
static bool required(const struct world *w, uint32_t layout)
{
    bool any = false;
    for (struct queue *q = w->refit->workers.next; q != &w->refit->workers; q = q->next) {
        const struct refit_worker *r = container_of(q, struct refit_worker, link);
        any |= !r->leaving && strcmp(r->layout->name, w->layouts[layout].name) == 0;
    }
    return w->layouts[layout].named || (any && w->layouts[layout].known);
}

static void check_plan(struct world *w, const struct refit_action *a)
{
    check_quiet(w, a);
    if (a->attempt <= w->last_planned_attempt)
        world_fail(w, "attempt id %llu comes after %llu", ULL(a->attempt),
                   ULL(w->last_planned_attempt));
    w->last_planned_attempt = a->attempt;
    for (uint32_t l = 0; l < w->n_layouts; l++)
        w->layouts[l].required = required(w, l);
}

/* An instance has accepted where every one of its workers has said so in this attempt. */
static bool instance_accepted(const struct world *w, uint32_t layout, uint32_t instance,
                              uint64_t attempt)
{
    const struct layout_truth *l = &w->layouts[layout];
    for (uint32_t rank = 0; rank < l->n_ranks; rank++) {
        bool said = false;
        if (l->instance_of_rank[rank] != instance)
            continue;
        for (uint32_t i = 0; i < w->n_workers; i++)
            said |= w->workers[i].layout == layout && w->workers[i].rank == rank &&
                    w->workers[i].accepted_attempt == attempt;
        if (!said)
            return false;
    }
    return true;
}

static void check_policy(struct world *w, const struct refit_action *a)
{
    uint32_t total = 0;
    for (uint32_t l = 0; l < w->n_layouts; l++) {
        if (w->layouts[l].side != REFIT_DESTINATION)
            continue;
        uint32_t n = 0;
        for (uint32_t i = 0; i < w->layouts[l].n_instances; i++)
            n += instance_accepted(w, l, i, a->attempt);
        if (n < w->layouts[l].min_instances && w->layouts[l].required)
            world_fail(w, "version %llu committed with %u instances of %s, policy says %u",
                       ULL(a->version), n, w->layouts[l].name, w->layouts[l].min_instances);
        total += n;
    }
    if (total == 0)
        world_fail(w, "version %llu committed for nobody", ULL(a->version));
}

/* Whoever has accepted holds what was published, element by element. */
static void check_landed(struct world *w, const struct refit_action *a)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        struct worker *worker = &w->workers[i];
        const struct refit_worker *r = refit_find_worker(w->refit, worker->id);
        if (w->layouts[worker->layout].side != REFIT_DESTINATION || !worker->attached ||
            worker->accepted_attempt != a->attempt || worker->accepted_id != worker->id ||
            r == NULL || r->gone || worker->asleep)
            continue;
        const struct memory *m = worker_receiving(worker);
        if (m->version != a->version || !memory_is_committed(w, worker, m))
            world_fail(w, "worker %u has accepted version %llu, but does not hold it", i,
                       ULL(a->version));
    }
}

static void check_committed(struct world *w, const struct refit_action *a)
{
    struct version_truth *v = world_version(w, a->version);
    struct durable d = durable(w, a->version);
    if (!d.found || d.phase != REFIT_COMMITTED || d.n_accepted == 0)
        world_fail(w, "version %llu told as committed before it is durable", ULL(a->version));
    if (v->committed && v->committed_content != d.content)
        world_fail(w, "version %llu committed twice with two contents", ULL(a->version));
    if (a->version <= w->told_committed)
        world_fail(w, "committed goes back from %llu to %llu", ULL(w->told_committed),
                   ULL(a->version));
    v->committed = true;
    v->committed_content = d.content;
    v->n_accepted = d.n_accepted;
    w->told_committed = a->version;
    w->n_commits++;
    for (uint32_t i = 0; i < v->n_contents; i++)
        if (v->contents[i].number == a->content)
            memcpy(v->expected, v->contents[i].expected, sizeof v->expected);
    check_policy(w, a);
    check_landed(w, a);
}

static void check_released(struct world *w, const struct refit_action *a)
{
    const struct worker *worker = world_worker(w, a->worker);
    if (worker == NULL)
        return;
    const struct node *n = &w->nodes[worker->node];
    uint32_t index = (uint32_t)(worker - w->workers);
    const struct trial *t = trial_find(w, n->attempt);
    if (t != NULL && t->role[index] == REFIT_ROLE_SENDS && t->worker[index] == worker->id &&
        n->started && node_may_move(w, n) && !trial_read(w, t, worker->node))
        world_fail(w, "source %u is released while attempt %llu still reads it", index,
                   ULL(n->attempt));
}

/* Not before it is committed, where that was asked for. */
static void check_release_time(struct world *w, const struct refit_action *a)
{
    const struct refit_version *v = w->refit->in_flight;
    if (w->release_at == REFIT_RELEASE_COMMITTED && v != NULL && v->version == a->version &&
        v->kind == REFIT_KIND_REFIT &&
        (v->phase.state == REFIT_TRANSFERRING || v->phase.state == REFIT_ACCEPTING))
        world_fail(w, "sources of version %llu are released while it is %s", ULL(a->version),
                   refit_phase_name(v->phase.state));
}

static void check_reply(struct world *w, const struct refit_action *a)
{
    if (a->cookie == 0 || a->cookie > w->n_requests)
        world_fail(w, "an answer to cookie %llu, which nobody has", ULL(a->cookie));
    struct request *q = &w->requests[a->cookie - 1];
    if (!q->open)
        world_fail(w, "cookie %llu is answered twice", ULL(a->cookie));
    if (q->coordinator_life != w->coordinator_life)
        world_fail(w, "cookie %llu is of an earlier coordinator", ULL(a->cookie));
    q->open = false;
    w->n_answers++;
    if (q->kind == ASK_APPLY && a->code == 0 && a->version > w->told_committed)
        world_fail(w, "version %llu applied, but %llu is committed", ULL(a->version),
                   ULL(w->told_committed));
    if (q->kind != ASK_SUBMIT || a->code != 0)
        return;
    struct version_truth *v = world_version(w, q->version);
    struct durable d = durable(w, q->version);
    if (!d.found)
        world_fail(w, "submit of version %llu answered before it is durable", ULL(q->version));
    if (v->content_known && v->content != q->content)
        world_fail(w, "version %llu taken with two contents", ULL(q->version));
    v->content_known = true;
    v->content = q->content;
}

void check_action(struct world *w, const struct refit_action *a)
{
    switch (a->type) {
    case REFIT_DO_PLAN:
        check_plan(w, a);
        break;
    case REFIT_DO_PREPARE:
    case REFIT_DO_START:
        check_quiet(w, a);
        break;
    case REFIT_DO_NOTIFY:
        if (a->phase == REFIT_PLANNED && a->attempt != w->last_planned_attempt)
            check_plan(w, a); /* nobody lacks anything: there is no plan */
        break;
    case REFIT_DO_COMMITTED:
        check_committed(w, a);
        break;
    case REFIT_DO_TELL:
        if (a->tell == REFIT_TELL_COMMITTED && a->version > w->told_committed)
            world_fail(w, "a worker is told version %llu before the pollers", ULL(a->version));
        if (a->tell == REFIT_TELL_SOURCE_RELEASED) {
            check_released(w, a);
            check_release_time(w, a);
        }
        break;
    case REFIT_DO_REPLY:
        check_reply(w, a);
        break;
    default:
        break;
    }
}

/* --- states --- */

void check_step(struct world *w)
{
    refit_check(w->refit);
    check_wrong(w);
    if (w->refit->committed < w->told_committed)
        world_fail(w, "newest committed is %llu, but %llu was told", ULL(w->refit->committed),
                   ULL(w->told_committed));
    for (uint32_t i = 0; i < w->n_workers; i++) {
        const struct worker *truth = &w->workers[i];
        const struct refit_worker *r = refit_find_worker(w->refit, truth->id);
        if (!truth->attached || r == NULL || r->gone || r->layout->side != REFIT_DESTINATION)
            continue;
        if (truth->asleep) /* which the decider may not have heard yet */
            continue;
        if (refit_worker_state(w->refit, r) == REFIT_WORKER_CURRENT &&
            r->applied <= w->told_committed &&
            (truth->live.version != w->refit->committed ||
             !memory_is_committed(w, truth, &truth->live)))
            world_fail(w, "worker %u is called current, but its memory holds %s version %llu", i,
                       memory_whole(w, truth, &truth->live) ? "" : "torn",
                       ULL(truth->live.version));
        const struct memory *m = r->receive == REFIT_IN_PLACE ? &truth->live : &truth->shadow;
        if (r->held != 0 && (!memory_whole(w, truth, m) || m->version != r->held))
            world_fail(w, "worker %u is said to hold version %llu, but it does not", i,
                       ULL(r->held));
    }
}

void check_restored(struct world *w)
{
    refit_check(w->refit);
    if (w->refit->committed < w->told_committed)
        world_fail(w, "after a restart newest committed is %llu, but %llu was told",
                   ULL(w->refit->committed), ULL(w->told_committed));
    /* Committed just before the crash, durable, told to nobody: it stands. */
    if (w->refit->committed > w->told_committed) {
        struct version_truth *v = world_version(w, w->refit->committed);
        const struct refit_version *r = refit_find_version(w->refit, w->refit->committed);
        v->committed = true;
        v->committed_content = r->content[0];
        for (uint32_t i = 0; i < v->n_contents; i++)
            if (v->contents[i].number == r->publication)
                memcpy(v->expected, v->contents[i].expected, sizeof v->expected);
    }
    w->told_committed = w->refit->committed;
    if (w->refit->in_flight != NULL || w->refit->queued != NULL)
        world_fail(w, "after a restart something is in flight");
    for (struct queue *q = w->refit->versions.next; q != &w->refit->versions; q = q->next) {
        const struct refit_version *v = container_of(q, struct refit_version, link);
        const struct version_truth *truth = world_version(w, v->version);
        if (!refit_phase_final(v->phase.state))
            world_fail(w, "after a restart version %llu is %s", ULL(v->version),
                       refit_phase_name(v->phase.state));
        if (truth->committed && v->phase.state != REFIT_COMMITTED)
            world_fail(w, "version %llu was committed, a restart makes it %s", ULL(v->version),
                       refit_phase_name(v->phase.state));
    }
}

/* Of a node that is lost nothing moves: its lease is over, it is dead, or it is quiet. */
void check_lost(struct world *w, uint32_t node)
{
    const struct node *n = &w->nodes[node];
    if (n->attempt != 0 && node_may_move(w, n) && n->member.attempt == n->attempt &&
        n->session == n->view_session)
        world_fail(w, "node %u is taken for lost, but attempt %llu may move there", node,
                   ULL(n->attempt));
}

/* By itself everybody gets what is committed, unless it has said that it does not want it. */
static void check_caught_up(struct world *w)
{
    for (uint32_t i = 0; i < w->n_workers; i++) {
        const struct worker *worker = &w->workers[i];
        const struct refit_worker *r = refit_find_worker(w->refit, worker->id);
        if (w->layouts[worker->layout].side != REFIT_DESTINATION || r == NULL || r->gone)
            continue;
        if (r->held != w->refit->committed && r->applied != w->refit->committed &&
            r->skipped < w->refit->committed)
            world_fail(w, "worker %u never gets version %llu", i, ULL(w->refit->committed));
    }
}

/* Whoever is brought up to a version later takes nothing from what its commit recorded. */
static void check_acceptances(struct world *w)
{
    for (uint32_t i = 0; i < w->n_versions; i++) {
        const struct version_truth *v = &w->versions[i];
        struct durable d = durable(w, v->version);
        if (v->committed && v->n_accepted > 0 && d.n_accepted != v->n_accepted)
            world_fail(w, "version %llu was committed with %u acceptances, the ledger has %u",
                       ULL(v->version), v->n_accepted, d.n_accepted);
    }
}

/* What it has said yes to, or a newer one, is what it serves with: a catch-up of another rank of its instance asked it once more. */
static bool serves(struct world *w, const struct worker *worker)
{
    return worker->receive == REFIT_STAGED_RECEIVE && worker->live.version >= worker->awaits &&
           memory_is_committed(w, worker, &worker->live);
}

void check_end(struct world *w)
{
    if (w->refit == NULL)
        world_fail(w, "the coordinator is down in the end");
    if (w->feed && w->catch_up)
        check_caught_up(w);
    check_acceptances(w);
    for (uint32_t i = 0; i < w->n_requests; i++)
        if (w->requests[i].open && w->requests[i].coordinator_life == w->coordinator_life)
            world_fail(w, "request %u (kind %d, version %llu) is never answered", i + 1,
                       (int)w->requests[i].kind, ULL(w->requests[i].version));
    for (uint32_t i = 0; i < w->n_workers; i++)
        if (w->workers[i].attached && w->workers[i].awaits != 0 && !serves(w, &w->workers[i]))
            world_fail(w, "worker %u never hears how version %llu ended", i,
                       ULL(w->workers[i].awaits));
    if (w->refit->in_flight != NULL)
        world_fail(w, "version %llu never ends: it is %s", ULL(w->refit->in_flight->version),
                   refit_phase_name(w->refit->in_flight->phase.state));
    if (w->told_committed < w->newest_asked)
        world_fail(w, "in the calm version %llu is not committed (newest %llu)",
                   ULL(w->newest_asked), ULL(w->told_committed));
}
