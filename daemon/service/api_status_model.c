/* A model in Status: its versions, instances and workers, as the decider has them. */
#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/api_status.h"

#include "base/banned.h"

/* --- workers and instances -------------------------------------------------------------------- */

const char *api_node_lacks(const struct refit *r, uint32_t node)
{
    for (size_t i = 0; i < r->n_nodes; i++)
        if (r->nodes[i].node == node)
            return refit_node_lacks(&r->nodes[i]);
    return "";
}

static const char *worker_doing(const struct decider *d, const struct refit_worker *w)
{
    struct service *s = d->coordinator->service;
    const struct lease *l = w->node == s->node ? lease_find(s, w->id) : NULL;
    const char *lacks = w->gone ? "" : api_node_lacks(d->refit, w->node);
    if (lacks[0] != '\0')
        return lacks;
    return l != NULL && l->publishing != NULL ? "publishing" : refit_worker_doing(d->refit, w);
}

static void worker_fill(Reshard__V1__WorkerStatus *to, const struct decider *d,
                        const struct refit_worker *w)
{
    const struct roster_entry *r = roster_find(d, w->id);
    reshard__v1__worker_status__init(to);
    to->worker = w->id;
    to->side = (Reshard__V1__Side)w->layout->side;
    to->layout_name = w->layout->name;
    to->rank = w->rank;
    to->receive = (Reshard__V1__Receive)w->receive;
    to->state = (Reshard__V1__WorkerState)refit_worker_state(d->refit, w);
    to->published = w->published;
    to->held = w->held;
    to->applied = w->applied;
    to->doing = (char *)(uintptr_t)worker_doing(d, w);
    to->node = (char *)(uintptr_t)coordinator_node_name(d->coordinator, w->node);
    if (r == NULL)
        return;
    to->device = r->device;
    to->pid = r->pid;
    to->segment_bytes = r->segment_bytes;
}

static void workers_fill(struct arena *a, Reshard__V1__ModelStatus *to, const struct decider *d)
{
    size_t n = 0;
    queue_foreach (q, &d->refit->workers)
        n++;
    to->workers = (Reshard__V1__WorkerStatus **)arena_list(a, n, sizeof **to->workers);
    if (to->workers == NULL)
        return;
    queue_foreach (q, &d->refit->workers)
        worker_fill(to->workers[to->n_workers++], d, container_of(q, struct refit_worker, link));
}

static char *verdict_text(struct arena *a, const struct refit_instance *i, bool in_flight)
{
    char text[320] = "";
    if (in_flight && i->verdict == REFIT_ACCEPTED)
        (void)snprintf(text, sizeof text, "accepted");
    else if (in_flight && i->verdict == REFIT_REJECTED)
        (void)snprintf(text, sizeof text, "rejected: %s", i->reason);
    else if (in_flight && i->excluded)
        (void)snprintf(text, sizeof text, "excluded: %s", i->reason);
    return arena_text(a, text);
}

static void instance_fill(struct arena *a, Reshard__V1__InstanceStatus *to, const struct decider *d,
                          const struct refit_layout *l, uint32_t i)
{
    uint64_t applied = 0;
    reshard__v1__instance_status__init(to);
    to->layout_name = l->name;
    to->instance = i;
    to->state = (Reshard__V1__WorkerState)refit_instance_state(d->refit, l, i, &applied);
    to->applied = applied;
    to->verdict = verdict_text(a, &l->instances[i], d->refit->in_flight != NULL);
    to->ranks = arena_take(a, l->instances[i].n_ranks, sizeof *to->ranks);
    for (uint32_t r = 0; to->ranks != NULL && r < l->n_ranks; r++)
        if (l->instance_of_rank[r] == i && to->n_ranks < l->instances[i].n_ranks)
            to->ranks[to->n_ranks++] = r;
}

static void instances_fill(struct arena *a, Reshard__V1__ModelStatus *to, const struct decider *d)
{
    size_t n = 0, n_layouts = 0;
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        n += l->side == REFIT_DESTINATION && l->wanted ? l->n_instances : 0;
        n_layouts++;
    }
    to->instances = (Reshard__V1__InstanceStatus **)arena_list(a, n, sizeof **to->instances);
    to->destination_layouts = arena_take(a, n_layouts, sizeof(char *));
    if (to->instances == NULL || to->destination_layouts == NULL)
        return;
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        if (!l->wanted)
            continue;
        if (l->side == REFIT_SOURCE) {
            to->source_layout = l->name;
            continue;
        }
        to->destination_layouts[to->n_destination_layouts++] = l->name;
        for (uint32_t i = 0; i < l->n_instances; i++)
            instance_fill(a, to->instances[to->n_instances++], d, l, i);
    }
}

/* --- models ----------------------------------------------------------------------------------- */

/* The version whose attempt ended last. One attempt is in flight at a time and their ids grow, so that the greatest has it; the
 * greatest number needn't: one that was aborted may be followed by a smaller one. Who never had an attempt is no refit. */
static const struct refit_version *last_ended(const struct decider *d)
{
    const struct refit_version *last = NULL;
    queue_foreach (q, &d->refit->versions) {
        const struct refit_version *v = container_of(q, struct refit_version, link);
        if (refit_phase_final(v->phase.state) && v->attempt > (last == NULL ? 0 : last->attempt))
            last = v;
    }
    return last;
}

static void versions_fill(struct arena *a, Reshard__V1__ModelStatus *to, struct decider *d)
{
    const struct refit_version *last = last_ended(d);
    if (d->refit->in_flight != NULL) {
        struct api_refit_state *s = arena_take(a, 1, sizeof *s);
        if (s == NULL)
            return;
        api_refit_state_fill(s, d, d->refit->in_flight);
        for (uint32_t i = 0; i < s->n_waiting;
             i++) { /* into the arena, so that there is one owner */
            char *copy = arena_text(a, s->waiting[i]);
            mem_free(s->waiting[i]);
            s->waiting[i] = copy;
        }
        to->in_flight = &s->state;
    }
    if (d->refit->queued != NULL && (to->queued = arena_take(a, 1, sizeof *to->queued)) != NULL)
        to->queued[to->n_queued++] = d->refit->queued->version;
    Reshard__V1__VersionRecord *record = last != NULL ? arena_take(a, 1, sizeof *record) : NULL;
    Reshard__V1__Bytes *bytes = last != NULL ? arena_take(a, 1, sizeof *bytes) : NULL;
    if (record == NULL || bytes == NULL)
        return;
    api_record_fill(record, bytes, d, last);
    to->last = record;
}

/* Attempts that committed nothing. */
static void sides_fill(struct arena *a, Reshard__V1__ModelStatus *to, const struct decider *d)
{
    const struct refit *r = d->refit;
    Reshard__V1__CatchUps *c = arena_take(a, 1, sizeof *c);
    Reshard__V1__Bytes *bytes = arena_take(a, 2, sizeof *bytes);
    Reshard__V1__RefitState *s = arena_take(a, 1, sizeof *s);
    if (c == NULL || bytes == NULL || s == NULL)
        return;
    reshard__v1__catch_ups__init(c);
    api_bytes_fill(&bytes[0], &r->catch_up_bytes);
    c->attempts = r->n_catch_ups;
    c->instances = r->n_caught_up;
    c->bytes = &bytes[0];
    to->catch_ups = c;
    if (r->rehearsed.phase == REFIT_NONE)
        return;
    reshard__v1__refit_state__init(s);
    api_bytes_fill(&bytes[1], &r->rehearsed.bytes);
    s->model = d->model;
    s->version = r->rehearsed.version;
    s->attempt = r->rehearsed.attempt;
    s->phase = API_PHASE(r->rehearsed.phase);
    s->reason = arena_text(a, r->rehearsed.reason);
    s->bytes = &bytes[1];
    to->rehearsed = s;
}

void api_model_fill(struct arena *a, Reshard__V1__ModelStatus *to, struct decider *d)
{
    const struct refit *r = d->refit;
    reshard__v1__model_status__init(to);
    to->model = d->model;
    to->committed = r->committed;
    to->committed_wall_ns = r->committed_wall_ns;
    uint64_t now = clock_wall_ns();
    if (r->committed_ns != 0)
        to->committed_age_ns = clock_mono_ns() - r->committed_ns;
    else if (r->committed != 0 &&
             now > r->committed_wall_ns) /* before this start: the best there is */
        to->committed_age_ns = now - r->committed_wall_ns;
    to->epoch = r->epoch;
    to->known_committed = refit_ledger_behind(r) ? r->known_committed : 0;
    if (d->worker_committed > r->known_committed) {
        to->worker_committed = d->worker_committed;
        to->worker_committed_by = d->worker_committed_by;
    }
    char newcomers[ERR_TEXT_BYTES];
    to->newcomers = arena_text(a, refit_newcomers_wait(r, newcomers, sizeof newcomers));
    to->superseded = r->n_superseded;
    to->aborted = r->n_aborted;
    versions_fill(a, to, d);
    sides_fill(a, to, d);
    instances_fill(a, to, d);
    workers_fill(a, to, d);
}
