/* One model: events into the decider, its actions out. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "service/held.h"
#include "service/state.h"

#include "base/banned.h"

enum { RETRY_MS = 20 };

/* An event that waits for the running step's end, with a copy of its text and digest. */
struct later {
    struct queue in;
    struct refit_event ev;
    uint8_t digest[16];
    char strategy[32];
    char text[];
};

struct write {
    struct ledger_transaction transaction;
    struct model *model;
    uint64_t sequence;
};

/* Where an event that may have to wait has its text; NULL: it has none. */
static const char **event_text(struct refit_event *ev)
{
    switch (ev->type) {
    case REFIT_EV_PLANNED:
        return &ev->planned.text;
    case REFIT_EV_PREPARED:
    case REFIT_EV_PROGRESS:
    case REFIT_EV_STAGED:
    case REFIT_EV_FAILED:
    case REFIT_EV_QUIESCED:
    case REFIT_EV_NODE_UP:
    case REFIT_EV_NODE_LOST:
        return &ev->node.text;
    case REFIT_EV_APPLIED:
        return &ev->applied.text;
    case REFIT_EV_LEFT:
        return &ev->left.reason;
    case REFIT_EV_DURABLE:
    case REFIT_EV_NOT_DURABLE:
        return &ev->durable.text;
    default:
        return NULL;
    }
}

static struct later *later_new(struct refit_event *ev)
{
    const char **text = event_text(ev);
    const char *from = text != NULL && *text != NULL ? *text : "";
    size_t n = strlen(from) + 1;
    struct later *l = mem_zalloc(sizeof *l + n);
    if (l == NULL)
        return NULL;
    l->ev = *ev;
    memcpy(l->text, from, n);
    if ((text = event_text(&l->ev)) != NULL)
        *text = l->text;
    if (ev->type == REFIT_EV_PLANNED && ev->planned.digest != NULL) {
        memcpy(l->digest, ev->planned.digest, sizeof l->digest);
        l->ev.planned.digest = l->digest;
    }
    if (ev->type == REFIT_EV_PLANNED && ev->planned.strategy != NULL) {
        (void)snprintf(l->strategy, sizeof l->strategy, "%s", ev->planned.strategy);
        l->ev.planned.strategy = l->strategy;
    }
    return l;
}

/* --- actions ------------------------------------------------------------------------------------ */

/* Crash points: is this the record of a version in that phase? */
static bool records_phase(const struct ledger_record *records, size_t n, enum refit_phase phase)
{
    for (size_t i = 0; i < n; i++)
        if (records[i].kind == LEDGER_VERSION && records[i].version.phase == (uint32_t)phase)
            return true;
    return false;
}

static void crash_at(const struct ledger_record *records, size_t n, enum crash_point submit,
                     enum crash_point commit)
{
    if (submit != CRASH_N_POINTS && records_phase(records, n, REFIT_SUBMITTED))
        crash_point(submit);
    if (records_phase(records, n, REFIT_COMMITTED))
        crash_point(commit);
}

static void on_written(struct ledger_transaction *t, int code, const struct err *e)
{
    struct write *w = container_of(t, struct write, transaction);
    struct model *m = w->model;
    struct refit_event ev = {.type = code == 0 ? REFIT_EV_DURABLE : REFIT_EV_NOT_DURABLE,
                             .durable = {.sequence = w->sequence, .code = code}};
    char text[ERR_TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", code == 0 ? "" : err_text(e, code));
    ev.durable.text = text;
    if (code == 0)
        crash_at(t->records, t->n_records, CRASH_SUBMIT_DURABLE, CRASH_COMMIT_DURABLE);
    if (code != 0)
        log_error("model %s: not written to the ledger: %s", m->name, text);
    ledger_transaction_close(t);
    mem_free(w);
    m->service->n_writes--;
    (void)model_event(m, &ev);
    service_check_ledger(m->service, code);
    service_stop_if_idle(m->service);
}

/* The rows that only the service can complete: what the committed version's memory looks like. */
static void fingerprints_fill(const struct model *m, const struct refit_action *a)
{
    struct ledger_record *records = (struct ledger_record *)(uintptr_t)a->records;
    for (size_t i = 0; i < a->n_records; i++) {
        struct ledger_record *r = &records[i];
        if (r->kind != LEDGER_VERSION || r->version.phase != REFIT_COMMITTED ||
            r->version.version != m->run.version)
            continue;
        r->version.fingerprints = m->fingerprints;
        r->version.n_fingerprints_bytes = m->n_fingerprints_bytes;
    }
}

static void do_persist(struct model *m, const struct refit_action *a)
{
    struct write *w = mem_zalloc(sizeof *w);
    fingerprints_fill(m, a);
    crash_at(a->records, a->n_records, CRASH_N_POINTS, CRASH_COMMIT_DECIDED);
    if (w == NULL || ledger_transaction_init(&w->transaction, a->records, a->n_records) != 0) {
        struct refit_event ev = {.type = REFIT_EV_NOT_DURABLE,
                                 .durable = {.sequence = a->sequence,
                                             .code = RS_ENOMEM,
                                             .text = "no memory to write it"}};
        mem_free(w);
        (void)model_event(m, &ev);
        return;
    }
    w->model = m;
    w->sequence = a->sequence;
    w->transaction.done = on_written;
    m->service->n_writes++;
    ledger_submit(m->service->ledger, &w->transaction);
    crash_at(a->records, a->n_records, CRASH_SUBMIT_RECORDED, CRASH_COMMIT_RECORDED);
}

static void do_mark(struct model *m, const struct refit_action *a)
{
    struct ledger_mark mark = {.version = a->version,
                               .attempt = a->attempt,
                               .name = a->text,
                               .who = a->who,
                               .at_ns = a->since_ns,
                               .wall_ns = a->wall_ns};
    int r = ledger_mark(m->service->ledger, m->name, &mark);
    if (r != 0)
        log_warn("model %s version %" PRIu64 ": time mark %s not kept: %s", m->name, a->version,
                 a->text, err_name(r));
}

static void on_deadline(uv_timer_t *t)
{
    struct refit_event ev = {.type = REFIT_EV_TICK};
    (void)model_event(t->data, &ev);
}

static void do_set_deadline(struct model *m, const struct refit_action *a)
{
    uint64_t now = clock_mono_ns();
    if (a->at_ns == REFIT_NEVER) {
        (void)uv_timer_stop(&m->deadline);
    } else { /* a timer counts from the loop's clock, which stands still while callbacks run */
        uv_update_time(m->service->loop);
        (void)uv_timer_start(&m->deadline, on_deadline,
                             a->at_ns > now ? (a->at_ns - now) / 1000000 + 1 : 0, 0);
    }
}

static void do_notify(struct model *m, const struct refit_action *a)
{
    bool queued = a->phase == REFIT_SUBMITTED && a->attempt == 0;
    log_info("model %s version %" PRIu64 " attempt %" PRIu64 ": %s%s%s", m->name, a->version,
             a->attempt, queued ? "queued" : refit_phase_name((int)a->phase),
             a->text != NULL && a->text[0] != '\0' ? ": " : "", a->text != NULL ? a->text : "");
    if (refit_phase_final((int)a->phase) && a->attempt != 0 && a->attempt == m->run.id) {
        if (a->phase == REFIT_COMMITTED)
            held_commit(m);
        run_end(m);
    }
    watch_refit(m, a->version);
}

static void action_do(struct model *m, const struct refit_action *a)
{
    switch (a->type) {
    case REFIT_DO_PERSIST:
        do_persist(m, a);
        break;
    case REFIT_DO_PLAN:
        run_plan(m, a);
        break;
    case REFIT_DO_PREPARE:
        run_prepare(m, a);
        break;
    case REFIT_DO_START:
        run_start(m, a);
        break;
    case REFIT_DO_ABORT:
        run_abort(m, a);
        break;
    case REFIT_DO_EXPEL:
        run_expel(m, a);
        break;
    case REFIT_DO_APPLY:
        lease_apply(m, a);
        break;
    case REFIT_DO_REPLY:
        service_reply(m->service, a);
        break;
    case REFIT_DO_NOTIFY:
        do_notify(m, a);
        break;
    case REFIT_DO_COMMITTED:
        watch_committed(m);
        break;
    case REFIT_DO_TELL:
        lease_tell(m, a);
        break;
    case REFIT_DO_MARK:
        do_mark(m, a);
        break;
    case REFIT_DO_SET_DEADLINE:
        do_set_deadline(m, a);
        break;
    }
}

/* --- events ------------------------------------------------------------------------------------- */

static int step(struct model *m, struct refit_event *ev)
{
    ev->now_ns = clock_mono_ns();
    ev->wall_ns = clock_wall_ns();
    int r = refit_step(m->refit, ev, &m->update);
    if (r != 0)
        return r;
    for (size_t i = 0; i < m->update.n_actions; i++)
        action_do(m, &m->update.actions[i]);
    return 0;
}

static void on_retry(uv_timer_t *t);

static void later_run(struct model *m)
{
    while (!queue_empty(&m->later)) {
        struct later *l = container_of(queue_pop(&m->later), struct later, in);
        if (step(m, &l->ev) != 0) {
            queue_push(m->later.next, &l->in); /* first again */
            (void)uv_timer_start(&m->retry, on_retry, RETRY_MS, 0);
            return;
        }
        mem_free(l);
    }
}

static void settle(struct model *m)
{
    later_run(m);
    m->stepping = false;
    leases_sweep(m->service);
    run_devices_free(m->service);
}

static void on_retry(uv_timer_t *t)
{
    struct model *m = t->data;
    if (m->stepping || m->service->stopping)
        return;
    m->stepping = true;
    settle(m);
}

static int later_push(struct model *m, struct refit_event *ev)
{
    struct later *l = later_new(ev);
    if (l == NULL) {
        log_error("model %s: no memory to keep an event", m->name);
        return RS_ENOMEM;
    }
    queue_push(&m->later, &l->in);
    return 0;
}

int model_event(struct model *m, struct refit_event *ev)
{
    if (m->service->stopping)
        return RS_EUNAVAIL;
    if (m->stepping)
        return later_push(m, ev);
    m->stepping = true;
    int r = step(m, ev);
    if (r != 0 && ev->cookie == 0 && later_push(m, ev) == 0) {
        (void)uv_timer_start(&m->retry, on_retry, RETRY_MS, 0);
        m->stepping = false;
        return r;
    }
    settle(m);
    return r;
}

/* --- life --------------------------------------------------------------------------------------- */

struct model *model_find(struct service *s, const char *name)
{
    queue_foreach (q, &s->models) {
        struct model *m = container_of(q, struct model, in);
        if (strcmp(m->name, name) == 0)
            return m;
    }
    return NULL;
}

static struct model *model_new(struct service *s, const char *name)
{
    const struct config *c = s->config;
    struct refit_config config;
    struct model *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return NULL;
    refit_config_default(&config);
    config.prepare_timeout_ms = c->prepare_timeout_ms;
    config.transfer_timeout_ms = c->transfer_timeout_ms;
    config.accept_timeout_ms = c->accept_timeout_ms;
    config.quiesce_timeout_ms = c->quiesce_timeout_ms;
    config.max_versions = c->max_versions;
    config.max_workers = c->max_workers;
    m->service = s;
    m->id = random_id();
    m->name = mem_strdup(name);
    m->refit = refit_new(name, &config);
    m->held = held_new();
    refit_update_init(&m->update);
    queue_init(&m->later);
    queue_init(&m->polls);
    queue_init(&m->watchers);
    if (m->name != NULL && m->refit != NULL && m->held != NULL)
        return m;
    held_free(m->held);
    refit_free(m->refit);
    mem_free(m->name);
    mem_free(m);
    return NULL;
}

/* Only a refused attach or a poll ever named it: nothing is remembered of it. */
static bool model_is_unused(const struct model *m)
{
    const struct refit *r = m->refit;
    if (m->stepping || !queue_empty(&m->polls) || !queue_empty(&m->watchers) ||
        !queue_empty(&r->layouts) || !queue_empty(&r->versions) || r->committed != 0 ||
        r->attempt_high != 0 || r->epoch != 0)
        return false;
    queue_foreach (q, &m->service->leases)
        if (container_of(q, struct lease, in)->model == m)
            return false;
    return true;
}

/* Names that came to nothing would fill max_models. */
static void models_sweep(struct service *s)
{
    queue_foreach_safe (q, tmp, &s->models) {
        struct model *m = container_of(q, struct model, in);
        if (!model_is_unused(m))
            continue;
        s->n_models--;
        model_close(m);
    }
}

int model_open(struct service *s, const char *name, struct model **ret, struct err *e)
{
    if ((*ret = model_find(s, name)) != NULL)
        return 0;
    if (s->memory != NULL) /* not while the ledger is being read: there they come piece by piece */
        models_sweep(s);
    if (s->n_models >= s->config->max_models)
        return err_set(e, RS_EEXHAUSTED, "%u models: max_models is reached", s->n_models);
    struct model *m = model_new(s, name);
    if (m == NULL)
        return err_set(e, RS_ENOMEM, "no memory for model %s", name);
    rs_assert(uv_timer_init(s->loop, &m->deadline) == 0 && uv_timer_init(s->loop, &m->retry) == 0);
    m->deadline.data = m->retry.data = m;
    s->n_handles += 2;
    s->n_models++;
    queue_push(&s->models, &m->in);
    if (s->node_up) {
        struct refit_event ev = {.type = REFIT_EV_NODE_UP, .node = {.node = NODE}};
        (void)model_event(m, &ev);
    }
    *ret = m;
    return 0;
}

static void model_free(struct model *m)
{
    while (!queue_empty(&m->later))
        mem_free(container_of(queue_pop(&m->later), struct later, in));
    held_free(m->held);
    plan_entry_unref(m->last_plan);
    mem_free(m->fingerprints);
    refit_update_close(&m->update);
    refit_free(m->refit);
    mem_free(m->name);
    mem_free(m);
}

static void on_closed(uv_handle_t *h)
{
    struct model *m = h->data;
    struct service *s = m->service;
    if (!uv_is_closing((uv_handle_t *)&m->retry)) {
        uv_close((uv_handle_t *)&m->retry, on_closed);
    } else {
        model_free(m);
    }
    service_handle_closed(s);
}

void model_close(struct model *m)
{
    queue_remove(&m->in);
    run_end(m);
    watch_close(m);
    uv_close((uv_handle_t *)&m->deadline, on_closed);
}
