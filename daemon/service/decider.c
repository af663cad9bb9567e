/* One decider: events in, its actions out. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "service/comm.h"
#include "service/coordinator.h"
#include "service/held.h"
#include "service/peers.h"

#include "base/banned.h"

enum { RETRY_MS = 20 };

/* An event that waits for the running step's end, with a copy of its text and digest. */
struct later {
    struct queue in;
    struct refit_event ev;
    uint8_t digest[16];
    char strategy[32];
    uint64_t *wrong; /* FAILED; owned */
    char text[];
};

struct write {
    struct ledger_transaction transaction;
    struct decider *decider;
    uint64_t sequence;
};

/* Where an event that may have to wait has its text; NULL: it has none. LAYOUT and SUBMIT never wait: they have more than
 * one, and come from outside of any step. */
static const char **event_text(struct refit_event *ev)
{
    switch (ev->type) {
    case REFIT_EV_LAYOUT:
    case REFIT_EV_SUBMIT:
        rs_assert(false);
        return NULL;
    case REFIT_EV_ABORT:
        return &ev->abort.reason;
    case REFIT_EV_ATTACHED:
        return &ev->attached.layout_name;
    case REFIT_EV_LEFT:
        return &ev->left.reason;
    case REFIT_EV_WITHDRAW:
        return &ev->withdraw.reason;
    case REFIT_EV_VERDICT:
        return &ev->verdict.reason;
    case REFIT_EV_APPLIED:
        return &ev->applied.text;
    case REFIT_EV_MARK:
        return &ev->mark.name;
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
    case REFIT_EV_DURABLE:
    case REFIT_EV_NOT_DURABLE:
        return &ev->durable.text;
    default:
        return NULL;
    }
}

static void later_free(struct later *l)
{
    mem_free(l->wrong);
    mem_free(l);
}

/* The list that a FAILED carries. RS_ENOMEM. */
static int wrong_copy(struct later *l)
{
    const struct refit_event *ev = &l->ev;
    if (ev->type != REFIT_EV_FAILED || ev->node.n_wrong == 0)
        return 0;
    l->wrong = mem_calloc(ev->node.n_wrong, sizeof *l->wrong);
    if (l->wrong == NULL)
        return RS_ENOMEM;
    memcpy(l->wrong, ev->node.wrong, ev->node.n_wrong * sizeof *l->wrong);
    l->ev.node.wrong = l->wrong;
    return 0;
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
    if (wrong_copy(l) != 0) {
        mem_free(l);
        return NULL;
    }
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
    struct decider *d = w->decider;
    struct service *s = d->coordinator->service;
    struct refit_event ev = {.type = code == 0 ? REFIT_EV_DURABLE : REFIT_EV_NOT_DURABLE,
                             .durable = {.sequence = w->sequence, .code = code}};
    char text[ERR_TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", code == 0 ? "" : err_text(e, code));
    ev.durable.text = text;
    if (code == 0)
        crash_at(t->records, t->n_records, CRASH_SUBMIT_DURABLE, CRASH_COMMIT_DURABLE);
    if (code != 0)
        log_error("model %s: not written to the ledger: %s", d->model, text);
    ledger_transaction_close(t);
    mem_free(w);
    s->n_writes--;
    (void)decider_event(d, &ev);
    service_check_ledger(s, code);
    service_stop_if_idle(s);
}

/* Of all that hold this version, as their nodes saw it, in this attempt or in an earlier one; and what was known of it. */
static void folds_collect(struct decider *d, uint64_t version)
{
    buf_close(&d->folds);
    buf_init(&d->folds);
    queue_foreach (q, &d->roster) {
        const struct roster_entry *r = container_of(q, struct roster_entry, in);
        const struct refit_worker *w = refit_find_worker(d->refit, r->worker);
        if (w != NULL && w->held == version && r->fold_version == version && r->fold != 0)
            held_put(&d->folds, r->layout->layout->digest, r->rank, r->fold);
    }
    held_merge(d->held, version, &d->folds);
}

/* The rows that only the service can complete: what the committed version's memory looks like. */
static void fingerprints_fill(struct decider *d, const struct refit_action *a)
{
    struct ledger_record *records = (struct ledger_record *)(uintptr_t)a->records;
    for (size_t i = 0; i < a->n_records; i++) {
        struct ledger_record *r = &records[i];
        if (r->kind != LEDGER_VERSION || r->version.phase != REFIT_COMMITTED)
            continue;
        folds_collect(d, r->version.version);
        if (buf_error(&d->folds) != 0) {
            log_error("model %s version %" PRIu64 ": no memory to keep what its memory looks like",
                      d->model, r->version.version);
            continue; /* workers that attach again will not be believed; the version is whole all the same */
        }
        r->version.fingerprints = d->folds.data; /* NULL: none, and what is there stays */
        r->version.n_fingerprints_bytes = d->folds.n_bytes;
    }
}

/* With which settings a version was moved. A catch-up says nothing of the version that it is about. */
static void config_fill(const struct decider *d, const struct refit_action *a)
{
    struct ledger_record *records = (struct ledger_record *)(uintptr_t)a->records;
    const struct refit_version *v = refit_attempt(d->refit, d->run.id);
    if (d->run.input == NULL || v == NULL || v->kind != REFIT_KIND_REFIT)
        return;
    for (size_t i = 0; i < a->n_records; i++) {
        if (records[i].kind != LEDGER_VERSION || records[i].version.version != d->run.version)
            continue;
        records[i].version.config_digest = d->run.config_digest;
        records[i].version.n_config_digest_bytes = sizeof d->run.config_digest;
    }
}

static void do_persist(struct decider *d, const struct refit_action *a)
{
    struct service *s = d->coordinator->service;
    struct write *w = mem_zalloc(sizeof *w);
    fingerprints_fill(d, a);
    config_fill(d, a);
    crash_at(a->records, a->n_records, CRASH_N_POINTS, CRASH_COMMIT_DECIDED);
    if (w == NULL || ledger_transaction_init(&w->transaction, a->records, a->n_records) != 0) {
        struct refit_event ev = {.type = REFIT_EV_NOT_DURABLE,
                                 .durable = {.sequence = a->sequence,
                                             .code = RS_ENOMEM,
                                             .text = "no memory to write it"}};
        mem_free(w);
        (void)decider_event(d, &ev);
        return;
    }
    w->decider = d;
    w->sequence = a->sequence;
    w->transaction.done = on_written;
    s->n_writes++;
    ledger_submit(s->ledger, &w->transaction);
    crash_at(a->records, a->n_records, CRASH_SUBMIT_RECORDED, CRASH_COMMIT_RECORDED);
}

static void do_mark(struct decider *d, const struct refit_action *a)
{
    struct ledger_mark mark = {.version = a->version,
                               .attempt = a->attempt,
                               .name = a->text,
                               .who = a->who,
                               .at_ns = a->since_ns,
                               .wall_ns = a->wall_ns};
    int r = ledger_mark(d->coordinator->service->ledger, d->model, &mark);
    if (r != 0)
        log_warn("model %s version %" PRIu64 ": time mark %s not kept: %s", d->model, a->version,
                 a->text, err_name(r));
}

static void do_ended(struct decider *d, const struct refit_action *a)
{
    struct ledger_ended ended = {.version = a->version,
                                 .attempt = a->attempt,
                                 .total_ns = a->total_ns,
                                 .stall_ns = a->stall_ns};
    int r = ledger_ended(d->coordinator->service->ledger, d->model, &ended);
    if (r != 0)
        log_warn("model %s version %" PRIu64 ": its times up to the end not kept: %s", d->model,
                 a->version, err_name(r));
}

static void on_deadline(uv_timer_t *t)
{
    struct refit_event ev = {.type = REFIT_EV_TICK};
    (void)decider_event(t->data, &ev);
}

static void do_set_deadline(struct decider *d, const struct refit_action *a)
{
    uint64_t now = clock_mono_ns();
    if (a->at_ns == REFIT_NEVER) {
        (void)uv_timer_stop(&d->deadline);
    } else { /* a timer counts from the loop's clock, which stands still while callbacks run */
        uv_update_time(d->coordinator->service->loop);
        (void)uv_timer_start(&d->deadline, on_deadline,
                             a->at_ns > now ? (a->at_ns - now) / 1000000 + 1 : 0, 0);
    }
}

/* What is carried out here is the attempt, or an earlier one after which another went without a plan. */
static bool run_is_of(const struct decider *d, const struct refit_action *a)
{
    return d->run.id != 0 && d->run.version == a->version && d->run.id <= a->attempt;
}

static void catch_ups_log(const struct decider *d)
{
    const struct refit *r = d->refit;
    log_info("model %s: catch-ups since the start: %" PRIu64 " that ended well, for %" PRIu64
             " instances; in all %" PRIu64 " bytes landed, %" PRIu64 " of them between domains",
             d->model, r->n_catch_ups, r->n_caught_up, r->catch_up_bytes.landed,
             r->catch_up_bytes.network);
}

static void do_notify(struct decider *d, const struct refit_action *a)
{
    bool queued = a->phase == REFIT_SUBMITTED && a->attempt == 0;
    log_info("model %s version %" PRIu64 " attempt %" PRIu64 ": %s%s%s%s", d->model, a->version,
             a->attempt, a->kind == REFIT_KIND_CATCH_UP ? "catch-up: " : "",
             queued ? "queued" : refit_phase_name((int)a->phase),
             a->text != NULL && a->text[0] != '\0' ? ": " : "", a->text != NULL ? a->text : "");
    if (a->phase == REFIT_COMMITTED && buf_error(&d->folds) == 0 &&
        held_load(d->held, a->version, d->folds.data, d->folds.n_bytes) != 0)
        log_error("model %s version %" PRIu64 ": no memory to keep what its memory looks like",
                  d->model, a->version);
    if (refit_phase_final((int)a->phase) && run_is_of(d, a))
        run_end(d, a->phase == REFIT_COMMITTED);
    if (a->kind != REFIT_KIND_CATCH_UP)
        watch_refit(d, a->version);
    else if (refit_phase_final((int)a->phase)) /* nothing becomes of the version */
        catch_ups_log(d);
}

/* To a worker's node; nothing where it has left meanwhile. A node that is away has lost its workers, or will have. */
static void do_worker(struct decider *d, const struct refit_action *a, enum node_order_type type)
{
    const struct roster_entry *r = roster_find(d, a->worker);
    struct node_order o = {.type = type,
                           .model = d->model,
                           .worker = a->worker,
                           .version = a->version,
                           .attempt = a->attempt,
                           .tell = a->tell,
                           .data_plane = a->data_plane,
                           .text = a->text != NULL ? a->text : ""};
    if (r != NULL)
        (void)coordinator_order(d->coordinator, r->node, &o);
}

static void do_reply(struct decider *d, const struct refit_action *a)
{
    struct op_reply reply = {.code = a->code,
                             .text = a->text != NULL ? a->text : "",
                             .version = a->version,
                             .attempt = a->attempt,
                             .value = a->value,
                             .phase = a->phase};
    service_reply(d->coordinator->service, a->cookie, &reply);
}

static void action_do(struct decider *d, const struct refit_action *a)
{
    switch (a->type) {
    case REFIT_DO_PERSIST:
        do_persist(d, a);
        break;
    case REFIT_DO_PLAN:
        run_plan(d, a);
        break;
    case REFIT_DO_PREPARE:
        run_prepare(d, a);
        break;
    case REFIT_DO_START:
        run_start(d, a);
        break;
    case REFIT_DO_ABORT:
        run_abort(d, a);
        break;
    case REFIT_DO_EXPEL:
        run_expel(d, a);
        break;
    case REFIT_DO_APPLY:
        do_worker(d, a, NODE_ORDER_APPLY);
        break;
    case REFIT_DO_REPLY:
        do_reply(d, a);
        break;
    case REFIT_DO_NOTIFY:
        do_notify(d, a);
        break;
    case REFIT_DO_COMMITTED:
        coordinator_announce(d);
        break;
    case REFIT_DO_TELL:
        do_worker(d, a, NODE_ORDER_TELL);
        break;
    case REFIT_DO_MARK:
        do_mark(d, a);
        break;
    case REFIT_DO_ENDED:
        do_ended(d, a);
        break;
    case REFIT_DO_SET_DEADLINE:
        do_set_deadline(d, a);
        break;
    }
}

/* --- events ------------------------------------------------------------------------------------- */

static int step(struct decider *d, struct refit_event *ev)
{
    ev->now_ns = clock_mono_ns();
    ev->wall_ns = clock_wall_ns();
    int r = refit_step(d->refit, ev, &d->update);
    if (r != 0)
        return r;
    if (ev->type != REFIT_EV_PROGRESS) /* it changes nobody's memory, and comes often */
        roster_tell(d);
    drain_sweep(d);
    for (size_t i = 0; i < d->update.n_actions; i++)
        action_do(d, &d->update.actions[i]);
    return 0;
}

static void on_retry(uv_timer_t *t);

static void later_run(struct decider *d)
{
    while (!queue_empty(&d->later)) {
        struct later *l = container_of(queue_pop(&d->later), struct later, in);
        if (step(d, &l->ev) != 0) {
            queue_push(d->later.next, &l->in); /* first again */
            (void)uv_timer_start(&d->retry, on_retry, RETRY_MS, 0);
            return;
        }
        later_free(l);
    }
}

static void settle(struct decider *d)
{
    later_run(d);
    d->stepping = false;
    run_devices_free(d->coordinator);
}

static void on_retry(uv_timer_t *t)
{
    struct decider *d = t->data;
    if (d->stepping || d->coordinator->service->stopping)
        return;
    d->stepping = true;
    settle(d);
}

static int later_push(struct decider *d, struct refit_event *ev)
{
    struct later *l = later_new(ev);
    if (l == NULL) {
        log_error("model %s: no memory to keep an event", d->model);
        return RS_ENOMEM;
    }
    queue_push(&d->later, &l->in);
    return 0;
}

int decider_event(struct decider *d, struct refit_event *ev)
{
    if (d->coordinator->service->stopping)
        return RS_EUNAVAIL;
    if (d->stepping)
        return later_push(d, ev);
    d->stepping = true;
    int r = step(d, ev);
    if (r != 0 && ev->cookie == 0 && later_push(d, ev) == 0) {
        (void)uv_timer_start(&d->retry, on_retry, RETRY_MS, 0);
        d->stepping = false;
        return r;
    }
    settle(d);
    return r;
}

/* --- life --------------------------------------------------------------------------------------- */

struct decider *decider_find(struct coordinator *c, const char *model)
{
    queue_foreach (q, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (strcmp(d->model, model) == 0)
            return d;
    }
    return NULL;
}

static const char *node_name(const void *coordinator, uint32_t node)
{
    return coordinator_node_name(coordinator, node);
}

static struct decider *decider_new(struct coordinator *c, const char *model)
{
    const struct config *from = c->service->config;
    struct refit_config config;
    struct decider *d = mem_zalloc(sizeof *d);
    if (d == NULL)
        return NULL;
    refit_config_default(&config);
    config.prepare_timeout_ms = from->prepare_timeout_ms;
    config.transfer_timeout_ms = from->transfer_timeout_ms;
    config.accept_timeout_ms = from->accept_timeout_ms;
    config.quiesce_timeout_ms = from->quiesce_timeout_ms;
    config.max_versions = from->max_versions;
    config.max_workers = from->max_workers;
    config.catch_up = from->catch_up;
    config.feed = from->feed;
    config.n_nodes = c->n_nodes;
    config.node_name = node_name;
    config.node_name_arg = c;
    config.settle_ms = from->lease_ms + PEERS_SLACK_MS;
    d->coordinator = c;
    d->model = mem_strdup(model);
    d->refit = refit_new(model, &config);
    d->held = held_new();
    refit_update_init(&d->update);
    queue_init(&d->later);
    queue_init(&d->roster);
    queue_init(&d->watchers);
    if (d->model != NULL && d->refit != NULL && d->held != NULL)
        return d;
    held_free(d->held);
    refit_free(d->refit);
    mem_free(d->model);
    mem_free(d);
    return NULL;
}

/* Only a refused attach ever named it: nothing is remembered of it. */
static bool decider_is_unused(const struct decider *d)
{
    const struct refit *r = d->refit;
    return !d->stepping && queue_empty(&d->roster) && queue_empty(&d->watchers) &&
           queue_empty(&r->layouts) && queue_empty(&r->versions) && r->committed == 0 &&
           r->known_committed == 0 && r->attempt_high == 0 && r->epoch == 0;
}

/* Names that came to nothing would fill max_models. */
static void deciders_sweep(struct coordinator *c)
{
    queue_foreach_safe (q, tmp, &c->deciders) {
        struct decider *d = container_of(q, struct decider, in);
        if (decider_is_unused(d))
            decider_close(d);
    }
}

static void nodes_tell(struct decider *d)
{
    const struct coordinator *c = d->coordinator;
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        struct refit_event ev = {
            .type = REFIT_EV_NODE_UP,
            .node = {.node = i, .text = "", .data_plane = c->nodes[i].data_plane}};
        if (!c->nodes[i].up && c->nodes[i].broken[0] != '\0') {
            ev.type = REFIT_EV_NODE_LOST;
            ev.node.code = RS_EDEVICE;
            ev.node.text = c->nodes[i].broken;
        }
        if (c->nodes[i].up || ev.type == REFIT_EV_NODE_LOST)
            (void)decider_event(d, &ev);
        drain_tell(d, i);
    }
}

int decider_open(struct coordinator *c, const char *model, struct decider **ret, struct err *e)
{
    const struct service *s = c->service;
    if ((*ret = decider_find(c, model)) != NULL)
        return 0;
    if (s->memory != NULL) /* not while the ledger is being read: there they come piece by piece */
        deciders_sweep(c);
    if (c->n_deciders >= s->config->max_models)
        return err_set(e, RS_EEXHAUSTED, "%u models: max_models is reached", c->n_deciders);
    struct decider *d = decider_new(c, model);
    if (d == NULL)
        return err_set(e, RS_ENOMEM, "no memory for model %s", model);
    rs_assert(uv_timer_init(s->loop, &d->deadline) == 0 && uv_timer_init(s->loop, &d->retry) == 0 &&
              uv_timer_init(s->loop, &d->progress) == 0);
    d->deadline.data = d->retry.data = d->progress.data = d;
    c->service->n_handles += 3;
    c->n_deciders++;
    queue_push(&c->deciders, &d->in);
    nodes_tell(d);
    *ret = d;
    return 0;
}

static void decider_free(struct decider *d)
{
    while (!queue_empty(&d->later))
        later_free(container_of(queue_pop(&d->later), struct later, in));
    while (!queue_empty(&d->roster))
        roster_remove(container_of(d->roster.next, struct roster_entry, in));
    held_free(d->held);
    comm_close(d);
    buf_close(&d->folds);
    landed_clear(&d->landed);
    refit_update_close(&d->update);
    refit_free(d->refit);
    mem_free(d->model);
    mem_free(d);
}

static void on_progress_closed(uv_handle_t *h)
{
    struct decider *d = h->data;
    struct service *s = d->coordinator->service;
    decider_free(d);
    service_handle_closed(s);
}

static void on_retry_closed(uv_handle_t *h)
{
    struct decider *d = h->data;
    uv_close((uv_handle_t *)&d->progress, on_progress_closed);
    service_handle_closed(d->coordinator->service);
}

static void on_deadline_closed(uv_handle_t *h)
{
    struct decider *d = h->data;
    uv_close((uv_handle_t *)&d->retry, on_retry_closed);
    service_handle_closed(d->coordinator->service);
}

void decider_close(struct decider *d)
{
    queue_remove(&d->in);
    d->coordinator->n_deciders--;
    run_end(d, false);
    watchers_close(d);
    uv_close((uv_handle_t *)&d->deadline, on_deadline_closed);
}
