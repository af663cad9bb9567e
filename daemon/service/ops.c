#include "service/ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/crash.h"
#include "base/mem.h"
#include "service/coordinator.h"
#include "service/lease.h"
#include "service/mix.h"

#include "base/banned.h"

/* --- layouts ------------------------------------------------------------------------------------ */

/* Checks a layout, digests it, and writes it as JSON, off the loop; then into the ledger. */
struct layout_job {
    uv_work_t work;
    struct service *service;
    struct layout *layout;
    uint8_t *ret_digest; /* the waiter's; only touched while it waits */
    uint64_t cookie;
    char *json;
    struct ledger_transaction transaction;
    struct layout_entry *entry;
    int code;
    struct err err;
};

static void layout_job_end(struct layout_job *j, int code, const char *text, bool known)
{
    struct service *s = j->service;
    struct op_reply reply = {.code = code, .text = text, .value = known};
    service_reply(s, j->cookie, &reply);
    layout_entry_unref(j->entry);
    layout_free(j->layout);
    mem_free(j->json);
    mem_free(j);
}

static void layout_work(uv_work_t *work)
{
    struct layout_job *j = work->data;
    j->code = layout_check(j->layout, &j->err);
    if (j->code == 0 && (j->code = layout_digest(j->layout)) != 0)
        (void)err_set(&j->err, j->code, "no memory for the layout's digest");
    if (j->code == 0 && (j->json = layout_to_json(j->layout)) == NULL)
        j->code = err_set(&j->err, RS_ENOMEM, "no memory for the layout");
}

static void on_layout_written(struct ledger_transaction *t, int code, const struct err *e)
{
    struct layout_job *j = container_of(t, struct layout_job, transaction);
    struct service *s = j->service;
    ledger_transaction_close(t);
    j->entry->durable = j->entry->durable || code == 0;
    s->n_writes--;
    layout_job_end(j, code, code == 0 ? "" : err_text(e, code), false);
    service_check_ledger(s, code);
    service_stop_if_idle(s);
}

static int layout_write(struct layout_job *j)
{
    struct ledger_record record = {.kind = LEDGER_LAYOUT,
                                   .layout = {.name = j->entry->layout->name, .json = j->json}};
    memcpy(record.layout.digest, j->entry->layout->digest, sizeof record.layout.digest);
    int r = ledger_transaction_init(&j->transaction, &record, 1);
    if (r != 0)
        return r;
    j->transaction.done = on_layout_written;
    j->service->n_writes++;
    ledger_submit(j->service->ledger, &j->transaction);
    return 0;
}

static void layout_store(struct layout_job *j)
{
    struct layout *layout = j->layout;
    j->layout = NULL;
    if (waiter_waits(j->service, j->cookie))
        memcpy(j->ret_digest, layout->digest, sizeof layout->digest);
    struct layout_entry *entry;
    int r = layouts_add(&j->service->layouts, layout, &entry, &j->err);
    if (r != 0) {
        layout_job_end(j, r, err_text(&j->err, r), false);
        return;
    }
    j->entry = layout_entry_ref(entry);
    if (entry->durable || j->service->coordinator == NULL)
        layout_job_end(j, 0, "", true);
    else if ((r = layout_write(j)) != 0)
        layout_job_end(j, r, "no memory to write the layout", false);
}

static void layout_work_done(uv_work_t *work, int status)
{
    struct layout_job *j = work->data;
    struct service *s = j->service;
    s->n_jobs--;
    if (status != 0 || s->stopping)
        layout_job_end(j, RS_EUNAVAIL, "the daemon is stopping", false);
    else if (j->code != 0)
        layout_job_end(j, j->code, err_text(&j->err, j->code), false);
    else
        layout_store(j);
    service_stop_if_idle(s);
}

int op_put_layout(struct service *s, struct layout *layout, uint8_t ret_digest[16],
                  struct waiter *w, struct err *e)
{
    struct layout_job *j = s->stopping ? NULL : mem_zalloc(sizeof *j);
    if (j == NULL) {
        layout_free(layout);
        return s->stopping ? err_set(e, RS_EUNAVAIL, "the daemon is stopping")
                           : err_set(e, RS_ENOMEM, "no memory for the layout");
    }
    j->work.data = j;
    j->service = s;
    j->layout = layout;
    j->ret_digest = ret_digest;
    j->cookie = waiter_add(s, w);
    rs_assert(uv_queue_work(s->loop, &j->work, layout_work, layout_work_done) == 0);
    s->n_jobs++;
    return 0;
}

/* --- workers ------------------------------------------------------------------------------------ */

/* The caller's own lease. */
static int lease_own(struct service *s, uint64_t client, uint64_t worker, struct lease **ret,
                     struct err *e)
{
    struct lease *l = lease_find(s, worker);
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (l == NULL)
        return err_set(e, RS_ENOTFOUND,
                       "worker %016" PRIx64 " is not attached here (any more); attach again",
                       worker);
    if (l->client != client)
        return err_set(e, RS_EPERM, "worker %016" PRIx64 " belongs to another client", worker);
    *ret = l;
    return 0;
}

/* … that has memory. */
static int lease_awake(struct service *s, uint64_t client, uint64_t worker, struct lease **ret,
                       struct err *e)
{
    int r = lease_own(s, client, worker, ret, e);
    if (r == 0 && (*ret)->asleep)
        r = err_set(e, RS_EPRECOND,
                    "worker %016" PRIx64 " is asleep: wake it up, that is, attach it anew", worker);
    return r;
}

static struct node_report report_of(const struct lease *l, enum refit_event_type type)
{
    return (struct node_report){
        .type = NODE_REPORT_EVENT, .model = l->model->name, .event = {.type = type}};
}

int op_publish(struct service *s, uint64_t client, uint64_t worker, uint64_t version, uint32_t push,
               const uint8_t *event, const struct op_expected *expected, size_t n_expected,
               struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_awake(s, client, worker, &l, e);
    if (r == 0 && (version != l->withdrawn.version || push > l->withdrawn.push))
        l->withdrawn.version = 0; /* that push is over */
    return r != 0 ? r : lease_publish(l, version, push, event, expected, n_expected, w, e);
}

static struct node_report withdrawal(const struct lease *l, bool again)
{
    struct node_report r = report_of(l, REFIT_EV_WITHDRAW);
    r.event.withdraw.worker = l->id;
    r.event.withdraw.version = l->withdrawn.version;
    r.event.withdraw.push = l->withdrawn.push;
    r.event.withdraw.again = again;
    r.event.withdraw.reason = l->withdrawn.reason;
    return r;
}

void lease_withdraw_again(struct lease *l)
{
    if (l->withdrawn.version == 0)
        return;
    struct node_report r = withdrawal(l, true);
    (void)node_tell(l->service, &r); /* where it fails, so has the session */
}

/* The coordinator may be away, or forget it by a restart: it is told again with the lease. */
int op_withdraw(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
                uint32_t push, bool again, const char *reason, struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_own(s, client, worker, &l, e);
    if (r != 0)
        return r;
    char *kept = mem_strdup(reason);
    if (kept == NULL)
        return err_set(e, RS_ENOMEM, "no memory to withdraw");
    mem_free(l->withdrawn.reason);
    l->withdrawn.version = version;
    l->withdrawn.push = push;
    l->withdrawn.reason = kept;
    struct node_report report = withdrawal(l, again);
    return node_ask(s, &report, w, e);
}

int op_ready(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
             struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_awake(s, client, worker, &l, e);
    if (r != 0)
        return r;
    struct node_report report = report_of(l, REFIT_EV_READY);
    report.event.ready.worker = worker;
    report.event.ready.version = version;
    l->waits_for = version;
    return node_ask(s, &report, w, e);
}

int op_accept(struct service *s, uint64_t client, uint64_t worker, uint64_t version,
              uint64_t attempt, bool accept, const char *reason, struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_awake(s, client, worker, &l, e);
    if (r != 0)
        return r;
    struct node_report report = report_of(l, REFIT_EV_VERDICT);
    report.event.verdict.worker = worker;
    report.event.verdict.version = version;
    report.event.verdict.attempt = attempt;
    report.event.verdict.accept = accept;
    report.event.verdict.reason = reason;
    l->waits_for = version;
    r = node_ask(s, &report, w, e);
    if (r == 0)
        crash_point(CRASH_VERDICT_PASSED);
    return r;
}

int op_apply(struct service *s, uint64_t client, uint64_t worker, uint64_t version, bool skip,
             struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_awake(s, client, worker, &l, e);
    if (r != 0)
        return r;
    if (!skip && !l->bound)
        return err_set(e, RS_EUNAVAIL, "the data plane is %s; try again", lease_unbound(l));
    struct node_report report = report_of(l, REFIT_EV_APPLY);
    report.event.apply.worker = worker;
    report.event.apply.version = version;
    report.event.apply.skip = skip;
    return node_ask(s, &report, w, e);
}

int op_sleep(struct service *s, uint64_t client, uint64_t worker, struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    int r = lease_own(s, client, worker, &l, e);
    if (r == 0)
        lease_sleep(l, w);
    return r;
}

int op_mark(struct service *s, uint64_t client, const char *model, uint64_t version,
            const char *name, uint64_t worker, struct waiter *w, struct err *e)
{
    struct lease *l = NULL;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    int r = worker != 0 ? lease_own(s, client, worker, &l, e) : 0;
    if (r != 0)
        return r;
    struct node_report report = {
        .type = NODE_REPORT_EVENT,
        .model = model,
        .event = {.type = REFIT_EV_MARK,
                  .mark = {.version = version, .name = name, .worker = worker}}};
    return node_ask(s, &report, w, e);
}

/* --- refits: the coordinator's ------------------------------------------------------------------- */

static int decider_known(struct service *s, const char *name, struct decider **ret, struct err *e)
{
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, decides that",
                       s->config->coordinator);
    *ret = decider_find(s->coordinator, name);
    return *ret != NULL ? 0 : err_set(e, RS_ENOTFOUND, "no model '%s'", name);
}

/* Gives the event with the waiter's cookie; what the decider answers ends the waiter. */
static int event_wait(struct decider *d, struct refit_event *ev, struct waiter *w, struct err *e)
{
    struct service *s = d->coordinator->service;
    uint64_t cookie = ev->cookie = waiter_add(s, w);
    int r = decider_event(d, ev);
    if (r == 0)
        return 0;
    if (!waiter_waits(s, cookie))
        return 0; /* it was answered all the same */
    waiter_forget(w);
    return err_set(e, r, "%s",
                   r == RS_EUNAVAIL ? "the daemon is stopping" : "no memory for the request");
}

/* What a version is: the layouts of its model, by role and name, and the options. */
static void content_digest(const struct decider *d, const struct op_submit *o, uint8_t ret[16])
{
    uint64_t sum = 0;
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        uint64_t one = mix_bytes(l->side, l->name, strlen(l->name));
        if (l->wanted) /* a sum: the order of attaching does not matter */
            sum += mix_bytes(one, l->digest, sizeof l->digest);
    }
    uint64_t halves[2] = {mix_word(mix_bytes(1, o->options, o->n_options_bytes), sum),
                          mix_word(mix_bytes(2, o->options, o->n_options_bytes), sum)};
    memcpy(ret, halves, sizeof halves);
}

/* The same for people, a line each; the caller's to close. */
static void content_words(const struct decider *d, const struct op_submit *o, struct buf *ret)
{
    buf_init(ret);
    queue_foreach (q, &d->refit->layouts) {
        const struct refit_layout *l = container_of(q, struct refit_layout, link);
        char digest[33];
        layout_digest_text(l->digest, digest);
        if (l->wanted)
            buf_printf(ret, "%s layout '%s' (%.8s…)\n",
                       l->side == REFIT_SOURCE ? "source" : "destination", l->name, digest);
    }
    buf_put(ret, o->options_words, strlen(o->options_words) + 1);
}

int op_submit(struct service *s, const struct op_submit *o, struct waiter *w, struct err *e)
{
    struct decider *d;
    uint8_t content[16];
    int r = decider_known(s, o->model, &d, e);
    if (r != 0)
        return err_prefix(e, r, "nobody has attached to it");
    struct buf words;
    content_digest(d, o, content);
    content_words(d, o, &words);
    struct refit_event ev = {
        .type = REFIT_EV_SUBMIT,
        .submit = {.version = o->version,
                   .request_id = o->request_id,
                   .content = content,
                   .words = buf_error(&words) != 0 ? NULL : (const char *)words.data,
                   .options = o->options,
                   .n_options_bytes = o->n_options_bytes,
                   .release_at = o->release_at,
                   .policies = o->policies,
                   .n_policies = o->n_policies,
                   .prepare_timeout_ms = o->prepare_timeout_ms,
                   .transfer_timeout_ms = o->transfer_timeout_ms,
                   .accept_timeout_ms = o->accept_timeout_ms,
                   .rehearsal = o->rehearsal}};
    r = event_wait(d, &ev, w, e);
    buf_close(&words);
    return r;
}

int op_abort(struct service *s, const char *model, uint64_t version, const char *reason,
             struct waiter *w, struct err *e)
{
    struct decider *d;
    int r = decider_known(s, model, &d, e);
    if (r != 0)
        return r;
    struct refit_event ev = {.type = REFIT_EV_ABORT,
                             .abort = {.version = version, .reason = reason}};
    return event_wait(d, &ev, w, e);
}

int op_evict(struct service *s, uint64_t worker, const char *reason, struct waiter *w,
             struct err *e)
{
    char text[300];
    const struct roster_entry *r = NULL;
    const struct decider *d = NULL;
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, decides that",
                       s->config->coordinator);
    queue_foreach (q, &s->coordinator->deciders) {
        d = container_of(q, struct decider, in);
        if ((r = roster_find(d, worker)) != NULL)
            break;
    }
    if (r == NULL)
        return err_set(e, RS_ENOTFOUND, "no worker %016" PRIx64, worker);
    (void)snprintf(text, sizeof text, "evicted: %.256s",
                   reason[0] != '\0' ? reason : "by an operator");
    struct node_order o = {
        .type = NODE_ORDER_EVICT, .model = d->model, .worker = worker, .text = text};
    int code = coordinator_order(s->coordinator, r->node, &o);
    if (code != 0)
        return err_set(e, code, "node %s can't be told now; its workers leave with it",
                       coordinator_node_name(s->coordinator, r->node));
    struct op_reply reply = {.text = ""};
    w->done(w, &reply);
    return 0;
}
