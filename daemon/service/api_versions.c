/* Versions, Timeline: what has become of versions, and where their time went; from the ledger, and newer from memory. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "service/api_arena.h"
#include "service/api_common.h"

#include "base/banned.h"

/* --- versions --------------------------------------------------------------------------------- */

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
    api_record_fill(r, bytes, d, v);
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

static int versions(struct api_call *c, void *request, struct err *e)
{
    const Reshard__V1__VersionsRequest *q = request;
    struct versions x = {0};
    struct decider *d;
    int r = api_decider(c, q->model, &d, e);
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
        arena_finish(c->call, &x.arena, &reply.base);
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

/* --- timeline --------------------------------------------------------------------------------- */

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
    int r = api_decider(c, q->model, &d, e);
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
        arena_finish(c->call, &x.arena, &reply.base);
    else
        arena_close(&x.arena);
    mem_free(x.records);
    return r;
}

void api_timeline(struct rpc_call *call, const void *data, size_t n_bytes)
{
    api_unary(call, data, n_bytes, &reshard__v1__timeline_request__descriptor, false, timeline);
}
