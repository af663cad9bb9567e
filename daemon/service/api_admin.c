/* Status, Versions, Timeline: what operators see. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "service/api_common.h"
#include "service/nodes.h"
#include "service/release.h"

#include "base/banned.h"

/* --- an arena for one reply --------------------------------------------------------------------- */

/* All that a reply points to; freed at once. A failed allocation marks it. */
struct chunk {
    struct chunk *next;
    max_align_t data[];
};

struct arena {
    struct chunk *chunks;
    bool failed;
};

static void *arena_take(struct arena *a, size_t n, size_t bytes)
{
    struct chunk *c =
        bytes != 0 && n > SIZE_MAX / 2 / bytes ? NULL : mem_zalloc(sizeof *c + n * bytes);
    if (c == NULL) {
        a->failed = true;
        return NULL;
    }
    c->next = a->chunks;
    a->chunks = c;
    return c->data;
}

static char *arena_text(struct arena *a, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = arena_take(a, n, 1);
    if (copy != NULL)
        memcpy(copy, text, n);
    return copy;
}

static void arena_close(struct arena *a)
{
    for (struct chunk *c = a->chunks, *next; c != NULL; c = next) {
        next = c->next;
        mem_free(c);
    }
}

/* A repeated field: the array of pointers and what they point to. */
static void **arena_list(struct arena *a, size_t n, size_t bytes)
{
    void **list = arena_take(a, n, sizeof(void *));
    char *items = arena_take(a, n, bytes);
    for (size_t i = 0; list != NULL && items != NULL && i < n; i++)
        list[i] = items + i * bytes;
    return items != NULL ? list : NULL;
}

static void api_finish_arena(struct rpc_call *call, struct arena *a, const ProtobufCMessage *m)
{
    if (a->failed)
        rpc_call_finish(call, RS_ENOMEM, "no memory for the answer");
    else
        api_finish(call, m);
    arena_close(a);
}

/* --- versions ----------------------------------------------------------------------------------- */

static void record_fill(Reshard__V1__VersionRecord *to, Reshard__V1__Bytes *bytes,
                        const struct decider *d, const struct refit_version *v)
{
    struct refit_bytes moved = refit_version_bytes(d->refit, v);
    reshard__v1__version_record__init(to);
    api_bytes_fill(bytes, &moved);
    to->version = v->version;
    to->phase = API_PHASE(v->phase.state);
    to->attempts = v->n_attempts;
    to->reason = (char *)(uintptr_t)v->reason;
    to->submitted_wall_ns = v->submitted_wall_ns;
    to->total_ns = v->total_ns;
    to->wire_ns = v->wire_ns;
    to->stall_ns = v->stall_ns;
    to->bytes = bytes;
    to->strategy = (char *)(uintptr_t)v->strategy;
    to->plan_digest.data = (uint8_t *)(uintptr_t)v->plan_digest;
    to->plan_digest.len = sizeof v->plan_digest;
    to->epoch = v->epoch;
}

struct versions {
    struct arena arena;
    const struct decider *decider;
    Reshard__V1__VersionRecord **records;
    size_t n, capacity;
};

/* Only the ledger has it. */
static bool config_digest_put(struct arena *a, Reshard__V1__VersionRecord *r,
                              const struct ledger_version *row)
{
    size_t n = row->n_config_digest_bytes;
    if (n != SPEED_DIGEST_BYTES)
        return true;
    r->config_digest.data = arena_take(a, n, 1);
    if (r->config_digest.data == NULL)
        return false;
    memcpy(r->config_digest.data, row->config_digest, n);
    r->config_digest.len = n;
    return true;
}

/* From a row of the ledger, for versions that are no longer in memory. */
static Reshard__V1__VersionRecord *record_of_row(struct arena *a, const struct ledger_version *row)
{
    Reshard__V1__VersionRecord *r = arena_take(a, 1, sizeof *r);
    Reshard__V1__Bytes *bytes = arena_take(a, 1, sizeof *bytes);
    uint8_t *digest = arena_take(a, 1, sizeof row->plan_digest);
    if (r == NULL || bytes == NULL || digest == NULL)
        return NULL;
    struct refit_bytes moved = {row->landed,  row->network, row->domain,         row->device,
                                row->skipped, row->total,   row->network_minimum};
    reshard__v1__version_record__init(r);
    api_bytes_fill(bytes, &moved);
    memcpy(digest, row->plan_digest, sizeof row->plan_digest);
    r->version = row->version;
    r->phase = API_PHASE(row->phase);
    r->attempts = row->n_attempts;
    r->reason = arena_text(a, row->reason != NULL ? row->reason : "");
    r->submitted_wall_ns = row->submitted_wall_ns;
    r->total_ns = row->total_ns;
    r->wire_ns = row->wire_ns;
    r->stall_ns = row->stall_ns;
    r->bytes = bytes;
    r->strategy = arena_text(a, row->strategy != NULL ? row->strategy : "");
    r->plan_digest.data = digest;
    r->plan_digest.len = sizeof row->plan_digest;
    r->epoch = row->epoch;
    return config_digest_put(a, r, row) ? r : NULL;
}

/* What is in memory is newer than the ledger's row. */
static Reshard__V1__VersionRecord *record_make(struct arena *a, const struct decider *d,
                                               const struct ledger_version *row)
{
    const struct refit_version *v = refit_find_version(d->refit, row->version);
    if (v == NULL)
        return record_of_row(a, row);
    Reshard__V1__VersionRecord *r = arena_take(a, 1, sizeof *r);
    Reshard__V1__Bytes *bytes = arena_take(a, 1, sizeof *bytes);
    if (r == NULL || bytes == NULL)
        return NULL;
    record_fill(r, bytes, d, v);
    return config_digest_put(a, r, row) ? r : NULL;
}

static int version_row(const struct ledger_record *row, void *arg)
{
    struct versions *x = arg;
    if (row->kind != LEDGER_VERSION)
        return 0;
    void *records = x->records;
    if (mem_grow(&records, &x->capacity, x->n + 1, sizeof(void *)) != 0)
        return RS_ENOMEM;
    x->records = records;
    x->records[x->n] = record_make(&x->arena, x->decider, &row->version);
    return x->records[x->n++] == NULL ? RS_ENOMEM : 0;
}

static int decider_of(struct api_call *c, const char *name, struct decider **ret, struct err *e)
{
    struct service *s = c->service;
    int r = api_name("model", name, e);
    if (r != 0)
        return r;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, knows that",
                       s->config->coordinator);
    *ret = decider_find(s->coordinator, name);
    return *ret != NULL ? 0 : err_set(e, RS_ENOTFOUND, "no model '%s'", name);
}

static int versions(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__VersionsRequest *q = request;
    struct versions x = {0};
    struct decider *d;
    int r = decider_of(c, q->model, &d, e);
    if (r != 0)
        return r;
    x.decider = d;
    uint32_t most = c->service->config->max_versions;
    uint32_t last = q->last == 0 ? 20 : q->last < most ? q->last : most;
    r = ledger_versions(c->service->ledger, q->model, 0, last, version_row, &x, e);
    if (r == 0) {
        Reshard__V1__VersionsReply reply = RESHARD__V1__VERSIONS_REPLY__INIT;
        reply.versions = x.records;
        reply.n_versions = x.n;
        api_finish_arena(c->call, &x.arena, &reply.base);
    } else {
        arena_close(&x.arena);
    }
    mem_free(x.records);
    return r;
}

void api_versions(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__versions_request__descriptor, false, versions);
}

/* --- timeline ----------------------------------------------------------------------------------- */

struct marks {
    struct arena *arena;
    uint64_t *wall_ns; /* of each mark */
    size_t wall_capacity;
    Reshard__V1__MarkRecord **marks;
    size_t n, capacity;
};

static int mark_row(const struct ledger_record *row, void *arg)
{
    struct marks *x = arg;
    if (row->kind != LEDGER_MARK)
        return 0;
    void *marks = x->marks;
    Reshard__V1__MarkRecord *m = arena_take(x->arena, 1, sizeof *m);
    if (m == NULL || mem_grow(&marks, &x->capacity, x->n + 1, sizeof(void *)) != 0)
        return RS_ENOMEM;
    x->marks = marks;
    void *wall_ns = x->wall_ns;
    if (mem_grow(&wall_ns, &x->wall_capacity, x->n + 1, sizeof *x->wall_ns) != 0)
        return RS_ENOMEM;
    x->wall_ns = wall_ns;
    x->wall_ns[x->n] = row->mark.wall_ns;
    reshard__v1__mark_record__init(m);
    m->name = arena_text(x->arena, row->mark.name != NULL ? row->mark.name : "");
    m->who = arena_text(x->arena, row->mark.who != NULL ? row->mark.who : "");
    m->at_ns = row->mark.at_ns;
    m->attempt = row->mark.attempt;
    x->marks[x->n++] = m;
    return 0;
}

/* Where the newest submission of a number begins among its marks. */
struct submission {
    size_t mark;            /* "submitted" of it; SIZE_MAX: there is none yet */
    uint64_t first_attempt; /* UINT64_MAX: none has begun */
    uint64_t wall_ns;
};

/* One that gave way in the queue has an attempt's number of an earlier submission's, which may have had several. */
static bool submission_has_begun(const struct marks *x, size_t mark)
{
    for (size_t i = 0; i < x->n; i++)
        if (strcmp(x->marks[i]->name, "begun") == 0 &&
            x->marks[i]->attempt == x->marks[mark]->attempt && x->wall_ns[i] >= x->wall_ns[mark])
            return true;
    return false;
}

static struct submission submission_find(const struct marks *x, const struct refit_version *v,
                                         uint64_t wall_ns)
{
    struct submission s = {.mark = SIZE_MAX, .first_attempt = UINT64_MAX, .wall_ns = wall_ns};
    if (v != NULL && !refit_phase_final(v->phase.state) && v->first_attempt == 0)
        return s; /* it waits for its turn */
    for (size_t i = 0; i < x->n; i++)
        if (strcmp(x->marks[i]->name, "submitted") == 0 &&
            (s.mark == SIZE_MAX || x->wall_ns[i] >= x->wall_ns[s.mark]))
            s.mark = i;
    if (s.mark == SIZE_MAX)
        s.first_attempt = 0;
    else if (submission_has_begun(x, s.mark))
        s.first_attempt = x->marks[s.mark]->attempt;
    return s;
}

/* Leaves out what was marked of earlier submissions, whose times count from other begins. */
static void marks_keep(struct marks *x, const struct submission *s)
{
    size_t n = 0;
    for (size_t i = 0; i < x->n; i++) {
        bool submitted = strcmp(x->marks[i]->name, "submitted") == 0;
        if (submitted ? i == s->mark
                      : x->marks[i]->attempt >= s->first_attempt || x->wall_ns[i] >= s->wall_ns)
            x->marks[n++] = x->marks[i];
    }
    x->n = n;
}

static int timeline_one(struct api_call *c, struct arena *a, const struct decider *d,
                        Reshard__V1__VersionRecord *record, Reshard__V1__VersionTimeline *to,
                        struct err *e)
{
    struct marks x = {.arena = a};
    int r = ledger_timeline(c->service->ledger, d->model, record->version, mark_row, &x, e);
    const struct submission newest = submission_find(
        &x, refit_find_version(d->refit, record->version), record->submitted_wall_ns);
    marks_keep(&x, &newest);
    reshard__v1__version_timeline__init(to);
    to->record = record;
    to->n_marks = x.n;
    to->marks = arena_take(a, x.n, sizeof(void *));
    if (to->marks != NULL && x.n > 0)
        memcpy(to->marks, x.marks, x.n * sizeof(void *));
    mem_free(x.marks);
    mem_free(x.wall_ns);
    return r;
}

static int timelines_fill(struct api_call *c, struct versions *x, Reshard__V1__TimelineReply *reply,
                          struct err *e)
{
    int r = 0;
    reply->versions =
        (Reshard__V1__VersionTimeline **)arena_list(&x->arena, x->n, sizeof **reply->versions);
    if (reply->versions == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the answer");
    for (; r == 0 && reply->n_versions < x->n; reply->n_versions++)
        r = timeline_one(c, &x->arena, x->decider, x->records[reply->n_versions],
                         reply->versions[reply->n_versions], e);
    return r;
}

static int timeline(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__TimelineRequest *q = request;
    Reshard__V1__TimelineReply reply = RESHARD__V1__TIMELINE_REPLY__INIT;
    struct versions x = {0};
    struct decider *d;
    int r = decider_of(c, q->model, &d, e);
    if (r != 0)
        return r;
    x.decider = d;
    uint32_t most = c->service->config->max_versions;
    uint32_t last = q->version != 0 || q->last == 0 ? 1 : q->last < most ? q->last : most;
    r = ledger_versions(c->service->ledger, q->model, q->version, last, version_row, &x, e);
    if (r == 0 && x.n == 0)
        r = q->version == 0 ? err_set(e, RS_ENOTFOUND, "model '%s' has no version yet", q->model)
                            : err_set(e, RS_ENOTFOUND, "model '%s' has no version %" PRIu64,
                                      q->model, q->version);
    if (r == 0)
        r = timelines_fill(c, &x, &reply, e);
    if (r == 0)
        api_finish_arena(c->call, &x.arena, &reply.base);
    else
        arena_close(&x.arena);
    mem_free(x.records);
    return r;
}

void api_timeline(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__timeline_request__descriptor, false, timeline);
}

/* --- status: workers and instances --------------------------------------------------------------- */

/* What keeps all of a node's workers from taking part; "" where nothing does. */
static const char *node_lacks(const struct refit *r, uint32_t node)
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
    const char *lacks = w->gone ? "" : node_lacks(d->refit, w->node);
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

/* --- status: models ------------------------------------------------------------------------------ */

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
    record_fill(record, bytes, d, last);
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

static void model_fill(struct arena *a, Reshard__V1__ModelStatus *to, struct decider *d)
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

static Reshard__V1__Strangers *strangers_make(struct arena *a, const struct peer_strangers *from)
{
    Reshard__V1__Strangers *x = arena_take(a, 1, sizeof *x);
    if (x == NULL)
        return NULL;
    reshard__v1__strangers__init(x);
    x->connections = from->connections;
    x->peers = from->peers;
    x->data = from->data;
    return x;
}

static void gpu_fill(Reshard__V1__GpuMemory *to, const char *name,
                     const struct wire_gpu_memory *from)
{
    reshard__v1__gpu_memory__init(to);
    to->name = (char *)(uintptr_t)name;
    to->limit_bytes = from->limit_bytes;
    to->context_bytes = from->context_bytes;
    to->communicator_bytes = from->communicator_bytes;
    to->work_bytes = from->work_bytes;
    to->ring_bytes = from->ring_bytes;
    to->scratch_bytes = from->scratch_bytes;
    to->worker_bytes = from->worker_bytes;
    to->free_bytes = from->free_bytes;
    to->total_bytes = from->total_bytes;
    to->context_measured = from->context_measured != 0;
    to->communicator_measured = from->communicator_measured != 0;
    to->peak_bytes = from->peak_bytes;
    to->registrations = from->registrations;
    to->refused_registrations = from->refused_registrations;
    to->registered_bytes = from->registered_bytes;
    to->registered_messages = from->hits;
    to->registered_message_bytes = from->hit_bytes;
}

static void gpus_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct service *s)
{
    const struct wire_gpu_memory *gpus = NULL;
    uint32_t n = s->link != NULL ? link_gpu_memory(s->link, &gpus) : 0;
    to->gpu_memory = (Reshard__V1__GpuMemory **)arena_list(a, n, sizeof **to->gpu_memory);
    for (uint32_t d = 0; to->gpu_memory != NULL && d < n; d++)
        gpu_fill(to->gpu_memory[to->n_gpu_memory++], link_device_name(s->link, d), &gpus[d]);
}

static void daemon_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct service *s)
{
    const struct config *c = s->config;
    to->node = (char *)(uintptr_t)c->node;
    to->release = (char *)(uintptr_t)RESHARD_RELEASE;
    to->incarnation = s->incarnation;
    to->uptime_ns = clock_mono_ns() - s->start_ns;
    to->backend = (char *)(uintptr_t)c->backend;
    to->state_dir = (char *)(uintptr_t)c->state_dir;
    to->devices = c->devices;
    to->domain_of_device = arena_take(a, c->devices, sizeof *to->domain_of_device);
    for (uint32_t d = 0; to->domain_of_device != NULL && d < c->devices; d++)
        to->domain_of_device[to->n_domain_of_device++] = c->domain_of_device[d];
    to->data_plane = arena_text(a, s->link != NULL ? link_text(s->link) : "stopping");
    to->data_plane_restarts = s->link != NULL ? link_restarts(s->link) : 0;
    to->clients = s->memory != NULL ? memory_server_n_clients(s->memory) : 0;
    struct peer_strangers strangers = service_strangers(s);
    to->strangers = strangers_make(a, &strangers);
    gpus_fill(a, to, s);
    if (s->link != NULL)
        to->local_pairs = arena_text(a, link_about(s->link)->local);
}

/* --- status: nodes ------------------------------------------------------------------------------- */

static char *data_plane_text(struct arena *a, const struct coordinator *c, uint32_t i)
{
    const struct service *s = c->service;
    if (i == s->node)
        return arena_text(a, s->link != NULL ? link_text(s->link) : "stopping");
    return arena_text(a, c->nodes[i].up ? "ready" : c->nodes[i].broken);
}

static const char *node_state(const struct peer_view *v)
{
    static const char *const names[] = {
        [PEER_AWAY] = "away", [PEER_HERE] = "here", [PEER_SILENT] = "silent"};
    return names[v->state];
}

/* The deciders know of a node alike, as far as they have heard of it; ours may be none yet. */
static const char *node_lacks_any(const struct coordinator *c, uint32_t i)
{
    queue_foreach (q, &c->deciders) {
        const char *lacks = node_lacks(container_of(q, struct decider, in)->refit, i);
        if (lacks[0] != '\0')
            return lacks;
    }
    return c->nodes[i].drained_wall_ns != 0 ? "drained" : "";
}

/* Of a wall time, where it is known and past; else 0. */
static uint64_t age_ns(uint64_t wall_ns)
{
    uint64_t now = clock_wall_ns();
    return wall_ns != 0 && now > wall_ns ? now - wall_ns : 0;
}

static void node_fill(struct arena *a, Reshard__V1__NodeStatus *to, const struct coordinator *c,
                      uint32_t i)
{
    const struct service *s = c->service;
    const struct config *config = s->config;
    struct peer_view v;
    nodes_look(c, i, &v);
    reshard__v1__node_status__init(to);
    to->name = (char *)(uintptr_t)coordinator_node_name(c, i);
    to->coordinator = i == s->node;
    to->state = (char *)(uintptr_t)node_state(&v);
    to->incarnation = v.incarnation;
    to->address = config->n_nodes > 0 ? config->nodes[i].address : (char *)(uintptr_t) "";
    to->data_address = arena_text(a, v.data_address != NULL ? v.data_address : "");
    to->data_port = c->nodes[i].data_port;
    to->release = arena_text(a, v.release != NULL ? v.release : "");
    to->devices = v.n_devices;
    to->domains = (char **)arena_take(a, v.n_devices, sizeof(char *));
    for (uint32_t d = 0; to->domains != NULL && d < v.n_devices; d++)
        to->domains[to->n_domains++] =
            arena_text(a, v.domain_of_device[d][0] != '\0' ? v.domain_of_device[d] : to->name);
    to->data_plane = data_plane_text(a, c, i);
    to->lost = c->nodes[i].n_lost;
    if (v.heard_ns != 0)
        to->heard_age_ns = clock_mono_ns() - v.heard_ns;
    to->round_trip_ns = v.round_trip_ns;
    to->joins = v.joins;
    to->refused = v.refused;
    to->draining = c->nodes[i].drained_wall_ns != 0;
    to->drained_wall_ns = c->nodes[i].drained_wall_ns;
    to->drained_age_ns = age_ns(to->drained_wall_ns);
    struct peer_strangers strangers = i == s->node ? service_strangers(s) : v.strangers;
    to->strangers = strangers_make(a, &strangers);
    to->lacks = (char *)(uintptr_t)node_lacks_any(c, i);
    to->why = arena_text(a, v.state != PEER_HERE && v.why != NULL ? v.why : "");
}

static void nodes_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct coordinator *c)
{
    to->nodes = (Reshard__V1__NodeStatus **)arena_list(a, c->n_nodes, sizeof **to->nodes);
    for (uint32_t i = 0; to->nodes != NULL && i < c->n_nodes; i++)
        node_fill(a, to->nodes[to->n_nodes++], c, i);
}

/* What a node that is not the coordinator knows by itself: of use when the coordinator can't be asked. */
static void own_models_fill(struct arena *a, Reshard__V1__StatusReply *to, struct service *s,
                            const char *only)
{
    to->models = (Reshard__V1__ModelStatus **)arena_list(a, s->n_models, sizeof **to->models);
    queue_foreach (q, &s->models) {
        const struct model *m = container_of(q, struct model, in);
        if (to->models == NULL)
            return;
        if (only[0] != '\0' && strcmp(only, m->name) != 0)
            continue;
        Reshard__V1__ModelStatus *x = to->models[to->n_models++];
        reshard__v1__model_status__init(x);
        x->model = m->name;
        x->committed = m->committed.version;
        x->committed_wall_ns = m->committed.wall_ns;
        x->committed_age_ns = m->committed.version != 0 ? age_ns(m->committed.wall_ns) : 0;
    }
}

static void models_fill(struct arena *a, Reshard__V1__StatusReply *to, const struct coordinator *c,
                        const struct decider *only)
{
    to->models = (Reshard__V1__ModelStatus **)arena_list(a, c->n_deciders, sizeof **to->models);
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (to->models != NULL && (only == NULL || only == d))
            model_fill(a, to->models[to->n_models++], d);
    }
}

static int status(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__StatusRequest *q = request;
    Reshard__V1__StatusReply reply = RESHARD__V1__STATUS_REPLY__INIT;
    struct service *s = c->service;
    struct arena a = {0};
    struct decider *only = NULL;
    int r = q->model[0] != '\0' ? decider_of(c, q->model, &only, e) : 0;
    if (r != 0)
        return r;
    daemon_fill(&a, &reply, s);
    if (s->coordinator != NULL) {
        nodes_fill(&a, &reply, s->coordinator);
        models_fill(&a, &reply, s->coordinator, only);
    } else {
        reply.session = arena_text(&a, s->peer != NULL ? peer_text(s->peer) : "");
        own_models_fill(&a, &reply, s, "");
    }
    api_finish_arena(c->call, &a, &reply.base);
    return 0;
}

/* What is about this daemon is its own; nodes and models are the coordinator's, as long as it answers. */
void api_status_member(struct rpc_call *call, const void *answer, size_t n_bytes, const char *model,
                       const char *why)
{
    struct service *s = rpc_call_context(call);
    Reshard__V1__StatusReply reply = RESHARD__V1__STATUS_REPLY__INIT;
    const struct pb_limits limits = {.max_repeated = 1 << 20};
    struct arena a = {0};
    struct err e = {0};
    void *theirs = NULL;
    if (answer != NULL && pb_unpack(&reshard__v1__status_reply__descriptor, answer, n_bytes,
                                    &limits, &theirs, &e) != 0)
        why = e.text;
    daemon_fill(&a, &reply, s);
    if (theirs != NULL) {
        const Reshard__V1__StatusReply *t = theirs;
        reply.nodes = t->nodes;
        reply.n_nodes = t->n_nodes;
        reply.models = t->models;
        reply.n_models = t->n_models;
        reply.session = arena_text(&a, s->peer != NULL ? peer_text(s->peer) : "");
    } else {
        reply.session = arena_text(&a, why);
        own_models_fill(&a, &reply, s, model);
    }
    api_finish_arena(call, &a, &reply.base);
    pb_free(theirs);
}

void api_status(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__status_request__descriptor, false, status);
}
