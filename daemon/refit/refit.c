/* refit_step: room first, then the handler of the event, then the deadline. */
#include "refit/refit.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "refit/private.h"

#include "base/banned.h"

enum { TEXT_ROOM = 64 * 1024, MS = 1000 * 1000 };

void refit_config_default(struct refit_config *ret)
{
    *ret = (struct refit_config){.prepare_timeout_ms = 60000,
                                 .transfer_timeout_ms = 600000,
                                 .accept_timeout_ms = 60000,
                                 .quiesce_timeout_ms = 3000,
                                 .max_versions = 1000,
                                 .max_workers = 4096,
                                 .catch_up_retry_ms = 1000};
}

struct refit *refit_new(const char *model, const struct refit_config *config)
{
    struct refit *r = mem_zalloc(sizeof *r);
    if (r == NULL)
        return NULL;
    r->model = mem_strdup(model);
    if (r->model == NULL) {
        mem_free(r);
        return NULL;
    }
    if (config != NULL)
        r->config = *config;
    else
        refit_config_default(&r->config);
    queue_init(&r->layouts);
    queue_init(&r->workers);
    queue_init(&r->versions);
    r->deadline_ns = r->deadline_told_ns = r->catch_up_at_ns = r->push_at_ns = REFIT_NEVER;
    return r;
}

void refit_free(struct refit *r)
{
    if (r == NULL)
        return;
    for (struct queue *q = queue_pop(&r->workers); q != NULL; q = queue_pop(&r->workers))
        mem_free(worker_of(q));
    for (struct queue *q = queue_pop(&r->layouts); q != NULL; q = queue_pop(&r->layouts))
        refit_layout_free(layout_of(q));
    while (!queue_empty(&r->versions))
        version_free(r, version_of(r->versions.next));
    side_free(r);
    mem_free(r->nodes);
    mem_free(r->waiters);
    mem_free(r->writes);
    mem_free(r->model);
    mem_free(r);
}

void refit_update_init(struct refit_update *u)
{
    *u = (struct refit_update){0};
}

void refit_update_close(struct refit_update *u)
{
    mem_free(u->actions);
    mem_free(u->records);
    mem_free(u->text);
    *u = (struct refit_update){0};
}

/* --- room --- */

/* The most that one step can put: every worker is told at most five things (aborted, withdrawn, released, a
 * question of the next version, its mark), every node two, every waiter one answer, every instance
 * one mark and one record; the rest is a small number. */
static int step_reserve(struct refit *r, struct refit_update *u)
{
    size_t n_instances = 0, who_bytes = 0, n_layouts = 0;
    foreach_layout (l, r) {
        n_layouts++;
        n_instances += l->n_instances;
        who_bytes +=
            (strlen(l->name) + 32) * (l->n_instances + (l->side == REFIT_SOURCE ? l->n_ranks : 0));
    }
    size_t workers = (size_t)r->n_workers + 1, nodes = r->n_nodes + 1, waiters = r->n_waiters + 1;
    size_t actions = 64 + 6 * workers + 3 * nodes + 2 * n_instances + waiters;
    size_t records = 32 + n_instances + n_layouts + r->n_versions;
    if (mem_grow((void **)&u->actions, &u->actions_capacity, actions, sizeof *u->actions) != 0 ||
        mem_grow((void **)&u->records, &u->records_capacity, records, sizeof *u->records) != 0 ||
        mem_grow((void **)&u->text, &u->text_capacity, TEXT_ROOM + who_bytes, 1) != 0 ||
        mem_grow((void **)&r->nodes, &r->nodes_capacity, nodes, sizeof *r->nodes) != 0 ||
        mem_grow((void **)&r->waiters, &r->waiters_capacity, waiters, sizeof *r->waiters) != 0)
        return RS_ENOMEM;
    return mem_grow((void **)&r->writes, &r->writes_capacity, r->n_writes + 8, sizeof *r->writes);
}

struct refit_action *step_put(struct step *s, enum refit_action_type type)
{
    struct refit_update *u = s->u;
    rs_assert(u->n_actions < u->actions_capacity);
    struct refit_action *a = &u->actions[u->n_actions++];
    *a = (struct refit_action){.type = type, .text = "", .who = ""};
    return a;
}

const char *step_text(struct step *s, const char *format, ...)
{
    struct refit_update *u = s->u;
    size_t room = u->text_capacity - u->n_text_bytes;
    if (room < 2)
        return "";
    if (room > ERR_TEXT_BYTES)
        room = ERR_TEXT_BYTES;
    char *text = u->text + u->n_text_bytes;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, room, format, args);
    va_end(args);
    size_t length = n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
    text[length] = '\0';
    u->n_text_bytes += length + 1;
    return text;
}

void step_reply(struct step *s, uint64_t cookie, int code, const char *text)
{
    if (cookie == 0)
        return;
    struct refit_action *a = step_put(s, REFIT_DO_REPLY);
    a->cookie = cookie;
    a->code = code;
    a->text = text;
}

void step_reply_values(struct step *s, uint64_t cookie, uint64_t version, uint64_t attempt,
                       enum refit_phase phase, uint64_t value)
{
    if (cookie == 0)
        return;
    struct refit_action *a = step_put(s, REFIT_DO_REPLY);
    a->cookie = cookie;
    a->version = version;
    a->attempt = attempt;
    a->phase = phase;
    a->value = value;
}

void step_notify(struct step *s, const struct refit_version *v)
{
    struct refit_action *a = step_put(s, REFIT_DO_NOTIFY);
    a->kind = v->kind;
    a->version = v->version;
    a->attempt = v->attempt;
    a->phase = (enum refit_phase)v->phase.state;
    a->text = v->reason[0] == '\0' ? "" : step_text(s, "%s", v->reason);
}

void step_tell(struct step *s, const struct refit_worker *w, enum refit_tell tell,
               const struct refit_version *v, const char *reason)
{
    if (w->gone)
        return;
    struct refit_action *a = step_put(s, REFIT_DO_TELL);
    a->tell = tell;
    a->worker = w->id;
    a->version = v->version;
    a->attempt = v->attempt;
    a->text = reason;
}

void step_mark(struct step *s, const struct refit_version *v, const char *name, const char *who,
               uint64_t at_ns)
{
    if (v->kind != REFIT_KIND_REFIT) /* its steps are none of the version's */
        return;
    uint64_t ago = s->ev->now_ns > at_ns ? s->ev->now_ns - at_ns : 0;
    struct refit_action *a = step_put(s, REFIT_DO_MARK);
    a->version = v->version;
    a->attempt = v->attempt;
    a->text = name;
    a->who = who;
    a->since_ns = at_ns > v->submitted_ns ? (int64_t)(at_ns - v->submitted_ns) : 0;
    a->wall_ns = s->ev->wall_ns > ago ? s->ev->wall_ns - ago : 0;
}

void step_ended(struct step *s, const struct refit_version *v)
{
    struct refit_action *a = step_put(s, REFIT_DO_ENDED);
    a->version = v->version;
    a->attempt = v->attempt;
    a->total_ns = v->total_ns;
    a->stall_ns = v->stall_ns;
}

/* --- records --- */

struct ledger_record *step_record(struct step *s, enum ledger_kind kind)
{
    struct refit_update *u = s->u;
    rs_assert(u->n_records < u->records_capacity);
    struct ledger_record *record = &u->records[u->n_records++];
    *record = (struct ledger_record){.kind = kind, .model = s->r->model};
    return record;
}

void step_record_model(struct step *s, uint64_t committed)
{
    step_record(s, LEDGER_MODEL)->as_model = (struct ledger_model){
        .committed = committed, .attempt = s->r->attempt_high, .epoch = s->r->epoch};
}

void step_record_version(struct step *s, const struct refit_version *v, enum refit_phase phase)
{
    struct refit_bytes b = refit_version_bytes(s->r, v);
    struct ledger_version *row = &step_record(s, LEDGER_VERSION)->version;
    *row = (struct ledger_version){
        .version = v->version,
        .phase = (uint32_t)phase,
        .attempt = v->attempt,
        .n_attempts = v->n_attempts,
        .epoch = v->epoch,
        .publication = v->publication,
        .options = v->options,
        .n_options_bytes = v->n_options_bytes,
        .reason = v->reason,
        .submitted_wall_ns = v->submitted_wall_ns,
        .committed_wall_ns = v->committed_wall_ns,
        .total_ns = v->total_ns,
        .wire_ns = v->wire_ns,
        .stall_ns = v->stall_ns,
        .landed = b.landed,
        .network = b.network,
        .domain = b.domain,
        .device = b.device,
        .skipped = b.skipped,
        .total = b.total,
        .network_minimum = b.network_minimum,
        .strategy = v->strategy,
    };
    memcpy(row->content, v->content, sizeof row->content);
    memcpy(row->plan_digest, v->plan_digest, sizeof row->plan_digest);
}

void step_record_attempt(struct step *s, const struct refit_version *v, enum refit_phase phase)
{
    step_record(s, LEDGER_ATTEMPT)->attempt = (struct ledger_attempt){
        .attempt = v->attempt,
        .version = v->version,
        .epoch = v->epoch,
        .phase = (uint32_t)phase,
        .reason = step_text(s, "%s", v->reason), /* a copy: the next attempt clears it */
        .kind = (uint32_t)v->kind,
    };
}

/* Where the records since the last PERSIST of this step begin. */
static size_t records_begin(const struct refit_update *u)
{
    size_t begin = 0;
    for (size_t i = 0; i < u->n_actions; i++)
        if (u->actions[i].type == REFIT_DO_PERSIST)
            begin += u->actions[i].n_records;
    return begin;
}

uint64_t step_persist(struct step *s, enum write_kind kind, struct refit_version *v)
{
    struct refit *r = s->r;
    size_t begin = records_begin(s->u);
    struct refit_action *a = step_put(s, REFIT_DO_PERSIST);
    a->sequence = ++r->sequence;
    a->records = s->u->records + begin;
    a->n_records = s->u->n_records - begin;
    rs_assert(r->n_writes < r->writes_capacity);
    r->writes[r->n_writes++] = (struct refit_write){.sequence = a->sequence,
                                                    .kind = kind,
                                                    .version = v == NULL ? 0 : v->version,
                                                    .attempt = v == NULL ? 0 : v->attempt,
                                                    .side = v == &r->side};
    if (v != NULL)
        v->n_writes++;
    return a->sequence;
}

/* --- waiters --- */

void step_wait(struct step *s, const struct refit_waiter *w)
{
    struct refit *r = s->r;
    if (w->cookie == 0)
        return;
    if (r->n_waiters >= REFIT_MAX_WAITERS) {
        step_reply(s, w->cookie, RS_EEXHAUSTED, "too many requests wait for an answer");
        return;
    }
    rs_assert(r->n_waiters < r->waiters_capacity);
    r->waiters[r->n_waiters++] = *w;
}

static uint64_t waiter_id(const struct refit_waiter *w)
{
    return w->kind == WAITER_SUBMIT || w->kind == WAITER_BEGIN ? w->sequence
           : w->kind == WAITER_ABORT                           ? w->version
                                                               : w->worker;
}

void step_answer(struct step *s, enum waiter_kind kind, uint64_t id, int code, const char *text,
                 uint64_t value)
{
    struct refit *r = s->r;
    size_t kept = 0;
    for (size_t i = 0; i < r->n_waiters; i++) {
        const struct refit_waiter w = r->waiters[i];
        if (w.kind != kind || waiter_id(&w) != id)
            r->waiters[kept++] = w;
        else if (code != 0)
            step_reply(s, w.cookie, code, text);
        else if (kind == WAITER_APPLY)
            step_reply_values(s, w.cookie, value, 0, REFIT_NONE, value);
        else
            step_reply_values(s, w.cookie, w.version, w.attempt, w.phase, value);
    }
    r->n_waiters = kept;
}

uint64_t deadline_after(const struct step *s, uint32_t ms)
{
    return s->ev->now_ns + (uint64_t)ms * MS;
}

uint64_t since_submitted(const struct step *s, const struct refit_version *v)
{
    return s->ev->now_ns > v->submitted_ns ? s->ev->now_ns - v->submitted_ns : 0;
}

/* --- dispatch --- */

/* The write that is answered: mostly the oldest, but one that the service could not even hand to the
 * ledger fails before those that are on their way. False: a repeated answer, which is nothing. */
static bool take_write(struct refit *r, uint64_t sequence, struct refit_write *ret)
{
    size_t at = 0;
    while (at < r->n_writes && r->writes[at].sequence != sequence)
        at++;
    if (at == r->n_writes)
        return false;
    *ret = r->writes[at];
    memmove(r->writes + at, r->writes + at + 1, (--r->n_writes - at) * sizeof *r->writes);
    struct refit_version *v = !ret->side ? refit_find_version(r, ret->version)
                              : r->in_flight == &r->side && r->side.attempt == ret->attempt
                                  ? &r->side
                                  : NULL; /* over already */
    if (v != NULL)
        v->n_writes--;
    return true;
}

static void on_written(struct step *s, int code)
{
    struct refit_write w;
    if (!take_write(s->r, s->ev->durable.sequence, &w))
        return;
    switch (w.kind) {
    case WRITE_SUBMIT:
        queue_submit_written(s, &w, code);
        break;
    case WRITE_BEGIN:
        attempt_begun_written(s, &w, code);
        break;
    case WRITE_EPOCH:
        attempt_epoch_written(s, &w, code);
        break;
    case WRITE_COMMIT:
        attempt_commit_written(s, &w, code);
        break;
    case WRITE_END:
        queue_end_written(s, &w);
        break;
    case WRITE_SIDE:
        side_written(s, &w, code);
        break;
    case WRITE_NOTE:
        break;
    }
}

static void on_restored(struct step *s)
{
    struct refit *r = s->r;
    nodes_restored(s);
    bool any = false;
    foreach_version (v, r) {
        if (refit_phase_final(v->phase.state))
            continue;
        any = true;
        v->code = RS_EABORTED;
        (void)snprintf(
            v->reason, sizeof v->reason,
            "the coordinator was restarted before version %llu had ended; submit it again",
            (unsigned long long)v->version);
        v->ended_by_restart = true;
        if (v->phase.state != REFIT_ABORTING)
            phase_move(r, v, REFIT_ABORTING);
        phase_move(r, v, REFIT_ABORTED);
        r->n_aborted++;
        step_record_version(s, v, REFIT_ABORTED);
    }
    if (any)
        (void)step_persist(s, WRITE_NOTE, NULL);
}

/* What is in the ledger is not known any more, so nothing that depends on it may be said or done: not that
 * a version is committed, and not that it is aborted. Everything is refused until a restart. */
static void on_ledger_failed(struct step *s)
{
    struct refit *r = s->r;
    const char *text = step_text(
        s, "the ledger failed (%.700s): how this ended is not known until the daemon is restarted",
        s->ev->durable.text == NULL ? err_name(s->ev->durable.code) : s->ev->durable.text);
    r->ledger_failed = true;
    r->deadline_ns = REFIT_NEVER;
    for (size_t i = 0; i < r->n_waiters; i++)
        step_reply(s, r->waiters[i].cookie, RS_EDISK, text);
    r->n_waiters = 0;
}

/* Of the attempt in flight; where there is none, when a newcomer may be tried again. Or when a source has waited in vain. */
static uint64_t next_deadline(const struct refit *r)
{
    if (r->ledger_failed)
        return r->deadline_ns;
    uint64_t at_ns = r->in_flight == NULL ? r->catch_up_at_ns : r->deadline_ns;
    if (r->push_at_ns < at_ns)
        at_ns = r->push_at_ns;
    return r->settle_until_ns != 0 && r->settle_until_ns < at_ns ? r->settle_until_ns : at_ns;
}

static int dispatch(struct step *s)
{
    switch (s->ev->type) {
    case REFIT_EV_LAYOUT:
        return workers_layout(s);
    case REFIT_EV_SUBMIT:
        return queue_submit(s);
    case REFIT_EV_ABORT:
        queue_abort(s);
        break;
    case REFIT_EV_ATTACHED:
        return workers_attached(s);
    case REFIT_EV_LEFT:
        workers_left(s);
        break;
    case REFIT_EV_SLEPT:
        sleep_event(s);
        break;
    case REFIT_EV_PUBLISHED:
        workers_published(s);
        break;
    case REFIT_EV_PUBLISHING:
        workers_publishing(s);
        break;
    case REFIT_EV_WITHDRAW:
        push_withdraw(s);
        break;
    case REFIT_EV_READY:
        workers_ready(s);
        break;
    case REFIT_EV_VERDICT:
        workers_verdict(s);
        break;
    case REFIT_EV_APPLY:
        workers_apply(s);
        break;
    case REFIT_EV_APPLIED:
        workers_applied(s);
        break;
    case REFIT_EV_MARK:
        workers_mark(s);
        break;
    case REFIT_EV_PLANNED:
        attempt_planned(s);
        break;
    case REFIT_EV_PREPARED:
        attempt_prepared(s);
        break;
    case REFIT_EV_PROGRESS:
        attempt_progress(s);
        break;
    case REFIT_EV_STAGED:
        attempt_staged(s);
        break;
    case REFIT_EV_FAILED:
        attempt_failed(s);
        break;
    case REFIT_EV_QUIESCED:
        attempt_quiesced(s);
        break;
    case REFIT_EV_NODE_UP:
        nodes_up(s);
        break;
    case REFIT_EV_NODE_LOST:
        workers_node_lost(s, s->ev->node.node);
        nodes_lost(s);
        break;
    case REFIT_EV_NODE_SILENT:
        nodes_silent(s);
        break;
    case REFIT_EV_DRAIN:
        nodes_drain(s);
        break;
    case REFIT_EV_DURABLE:
        on_written(s, 0);
        break;
    case REFIT_EV_NOT_DURABLE:
        on_written(s, s->ev->durable.code == 0 ? RS_EDISK : s->ev->durable.code);
        break;
    case REFIT_EV_RESTORED:
        on_restored(s);
        break;
    case REFIT_EV_TICK:
        /* A timer that went off too early is used up: it is asked for again. */
        if (s->ev->now_ns < next_deadline(s->r))
            s->r->deadline_told_ns = REFIT_NEVER;
        break;
    }
    return 0;
}

static void tell_deadline(struct step *s)
{
    struct refit *r = s->r;
    uint64_t at_ns = next_deadline(r);
    if (at_ns == r->deadline_told_ns)
        return;
    step_put(s, REFIT_DO_SET_DEADLINE)->at_ns = at_ns;
    r->deadline_told_ns = at_ns;
}

int refit_step(struct refit *r, const struct refit_event *ev, struct refit_update *u)
{
    struct step s = {r, ev, u};
    u->n_actions = 0;
    u->n_records = 0;
    u->n_text_bytes = 0;
    queue_prune(r); /* here, since what the last step put into its update may point to versions */
    int rc = step_reserve(r, u);
    if (rc != 0)
        return rc;
    if (r->ledger_failed) {
        step_reply(&s, ev->cookie, RS_EDISK, "the ledger failed: the daemon must be restarted");
        return 0;
    }
    if (ev->type == REFIT_EV_NOT_DURABLE && ev->durable.code == RS_EDISK) {
        on_ledger_failed(&s);
        tell_deadline(&s);
        return 0;
    }
    rc = dispatch(&s);
    if (rc != 0) {
        rs_assert(u->n_actions == 0);
        return rc;
    }
    if (r->settle_until_ns != 0)
        nodes_settle_down(&s);
    attempt_advance(&s);
    if (ev->now_ns >= r->deadline_ns) {
        attempt_deadline(&s);
        attempt_advance(&s);
    }
    nodes_settle(&s);
    push_settle(&s);
    workers_sweep(r);
    tell_deadline(&s);
    return 0;
}
