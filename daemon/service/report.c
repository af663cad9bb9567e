/* What nodes report, into the deciders; and the answers back to who asked. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/coordinator.h"
#include "service/held.h"

#include "base/banned.h"

/* --- answers ------------------------------------------------------------------------------------ */

/* A request of a node, from its report to the REPLY: the decider's cookie stands for the node's. */
struct asked {
    struct queue in; /* coordinator.asked */
    struct waiter waiter;
    struct coordinator *coordinator;
    uint32_t node;
    uint64_t cookie; /* the node's */
    struct decider *decider;
    uint64_t attaching; /* a worker that is in the roster only if the answer is yes; 0: none */
};

static void reply_send(struct coordinator *c, uint32_t node, uint64_t cookie,
                       const struct op_reply *reply)
{
    struct node_order o = {.type = NODE_ORDER_REPLY,
                           .model = "",
                           .version = reply->version,
                           .attempt = reply->attempt,
                           .cookie = cookie,
                           .value = reply->value,
                           .phase = reply->phase,
                           .code = reply->code,
                           .text = reply->text != NULL ? reply->text : ""};
    if (cookie != 0)
        (void)coordinator_order(c, node,
                                &o); /* who is away has been told that nobody will answer */
}

static void refuse(struct coordinator *c, uint32_t node, uint64_t cookie, const struct err *e)
{
    struct op_reply reply = {.code = e->code, .text = err_text(e, e->code)};
    reply_send(c, node, cookie, &reply);
}

static void asked_end(struct asked *a)
{
    waiter_forget(&a->waiter);
    queue_remove(&a->in);
    mem_free(a);
}

static void on_answer(struct waiter *w, const struct op_reply *reply)
{
    struct asked *a = container_of(w, struct asked, waiter);
    struct roster_entry *r =
        a->attaching != 0 && reply->code != 0 ? roster_find(a->decider, a->attaching) : NULL;
    if (r != NULL)
        roster_remove(r);
    if (a->attaching != 0 && reply->code == 0 && !a->decider->announced)
        coordinator_announce(a->decider);
    reply_send(a->coordinator, a->node, a->cookie, reply);
    asked_end(a);
}

void asked_forget(struct coordinator *c, uint32_t node)
{
    queue_foreach_safe (q, tmp, &c->asked) {
        struct asked *a = container_of(q, struct asked, in);
        if (a->node == node)
            asked_end(a);
    }
}

/* Gives the decider a node's event; `attaching` as in struct asked. Without a cookie nobody waits. */
static void event_give(struct decider *d, uint32_t node, struct refit_event *ev, uint64_t attaching)
{
    struct coordinator *c = d->coordinator;
    uint64_t cookie = ev->cookie;
    struct asked *a = cookie != 0 ? mem_zalloc(sizeof *a) : NULL;
    struct err e = {0};
    if (cookie == 0) {
        (void)decider_event(d, ev); /* kept and given again where there is no memory */
        return;
    }
    if (a == NULL) {
        (void)err_set(&e, RS_ENOMEM, "no memory for the request");
        refuse(c, node, cookie, &e);
        return;
    }
    *a = (struct asked){.waiter.done = on_answer,
                        .coordinator = c,
                        .node = node,
                        .cookie = cookie,
                        .decider = d,
                        .attaching = attaching};
    queue_push(&c->asked, &a->in);
    uint64_t mine = ev->cookie = waiter_add(c->service, &a->waiter);
    int r = decider_event(d, ev);
    if (r != 0)
        service_answer(c->service, mine, r,
                       r == RS_EUNAVAIL ? "the daemon is stopping" : "no memory for the request");
}

/* --- attach ------------------------------------------------------------------------------------- */

/* A source's are one; ids that no tensor names are in none, and nobody waits for them. */
static uint32_t *instances_of_ranks(const struct layout *layout, enum refit_side side)
{
    uint32_t *instance = mem_calloc(layout->n_ranks, sizeof *instance);
    if (instance == NULL)
        return NULL;
    memset(instance, 0xff, layout->n_ranks * sizeof *instance);
    for (uint32_t i = 0; i < layout->n_instances; i++)
        for (uint32_t r = 0; r < layout->instances[i].n_ranks; r++)
            instance[layout->instances[i].ranks[r]] = side == REFIT_SOURCE ? 0 : i;
    return instance;
}

int layout_event(struct decider *d, enum refit_side side, const struct layout *layout, bool member,
                 uint64_t cookie)
{
    uint32_t *instance = instances_of_ranks(layout, side);
    if (instance == NULL)
        return RS_ENOMEM;
    struct refit_event ev = {
        .type = REFIT_EV_LAYOUT,
        .cookie = cookie,
        .layout = {.side = side,
                   .name = layout->name,
                   .digest = layout->digest,
                   .instance_of_rank = instance,
                   .n_ranks = layout->n_ranks,
                   .n_instances = side == REFIT_SOURCE ? 1 : layout->n_instances,
                   .member = member}};
    int r = decider_event(d, &ev);
    mem_free(instance);
    return r;
}

/* The decider answers LAYOUT inside the event. */
struct layout_told {
    struct waiter waiter;
    struct err err;
};

static void on_layout_told(struct waiter *w, const struct op_reply *reply)
{
    struct layout_told *t = container_of(w, struct layout_told, waiter);
    if (reply->code != 0)
        (void)err_set(&t->err, reply->code, "%s", reply->text);
}

static int layout_tell(struct decider *d, enum refit_side side, const struct layout *layout,
                       struct err *e)
{
    struct layout_told t = {.waiter.done = on_layout_told};
    int r = layout_event(d, side, layout, false, waiter_add(d->coordinator->service, &t.waiter));
    waiter_forget(&t.waiter);
    if (r != 0)
        return err_set(e, r, "no memory to attach");
    *e = t.err;
    return e->code;
}

static int layout_of_report(struct coordinator *c, const struct node_report *r,
                            struct layout_entry **ret, struct err *e)
{
    char digest[33];
    struct layout_entry *entry = *ret = layouts_find(&c->service->layouts, r->layout);
    layout_digest_text(r->layout, digest);
    if (entry == NULL)
        return err_set(e, RS_ENOTFOUND,
                       "layout %s is not stored at the coordinator; PutLayout again", digest);
    if (strcmp(entry->layout->name, r->event.attached.layout_name) != 0)
        return err_set(e, RS_EINVAL, "layout %s is named '%s', not '%s'", digest,
                       entry->layout->name, r->event.attached.layout_name);
    if (r->event.attached.rank >= entry->layout->n_ranks)
        return err_set(e, RS_EINVAL, "rank %u: layout '%s' has ranks 0 … %u",
                       r->event.attached.rank, entry->layout->name, entry->layout->n_ranks - 1);
    return 0;
}

static bool holds(const struct decider *d, const struct node_report *r, uint64_t version,
                  uint64_t fold)
{
    return version != 0 && held_is(d->held, version, r->layout, r->event.attached.rank, fold);
}

/* Live memory that is not being written has what was committed: the ledger may be an older one. For people: a worker's word
 * does not count. */
static void note_committed(struct decider *d, const struct refit_event *ev, uint64_t version)
{
    if (version <= d->refit->committed || version <= d->worker_committed)
        return;
    d->worker_committed = version;
    (void)snprintf(d->worker_committed_by, sizeof d->worker_committed_by, "%.160s/rank %u",
                   ev->attached.layout_name, ev->attached.rank);
}

/* Memory that was being written holds the new version, the old one, or neither. */
static uint64_t claim_check(const struct decider *d, const struct node_report *r, uint64_t claim,
                            uint64_t opened, uint64_t fold, const char *memory, bool *ret_torn)
{
    const struct refit_event *ev = &r->event;
    if (holds(d, r, opened, fold))
        return opened;
    if ((claim == 0 && opened == 0) || holds(d, r, claim, fold))
        return claim;
    *ret_torn = *ret_torn || opened != 0;
    if (opened != 0)
        log_warn("model %s: live memory of layout %s rank %u was being written with version "
                 "%" PRIu64 " and holds no version that is known here: torn",
                 d->model, ev->attached.layout_name, ev->attached.rank, opened);
    else
        log_warn("model %s: layout %s rank %u says that its %s memory holds version %" PRIu64
                 ": its content is another, or not known here; taken as empty",
                 d->model, ev->attached.layout_name, ev->attached.rank, memory, claim);
    return 0;
}

/* What receiving memory is, as its node saw it. */
static void fold_note(struct roster_entry *entry, const struct node_report *r,
                      const struct refit_event *ev)
{
    bool staged = ev->attached.receive == REFIT_STAGED_RECEIVE;
    uint64_t claimed = staged ? ev->attached.shadow : ev->attached.live;
    entry->fold_version = ev->attached.uncommitted != 0 ? ev->attached.uncommitted : claimed;
    entry->fold = staged ? r->shadow_fold : r->live_fold;
}

static int roster_put(struct decider *d, uint32_t node, const struct node_report *r,
                      const struct refit_event *ev, struct layout_entry *layout, struct err *e)
{
    struct roster_entry *entry = roster_add(d, r->event.attached.worker);
    if (entry == NULL)
        return err_set(e, RS_ENOMEM, "no memory to attach");
    entry->node = node;
    entry->device = r->device;
    entry->rank = r->event.attached.rank;
    entry->pid = r->pid;
    entry->segment_bytes = r->segment_bytes;
    entry->side = r->event.attached.side;
    entry->layout = layout_entry_ref(layout);
    entry->reported = true;
    landed_drop(&d->landed, node);
    fold_note(entry, r, ev);
    return 0;
}

/* What was whole at its node and has been committed without it: the fold tells whether it is that. (Of what is not
 * committed yet, the attempt that commits it compares, and till then it feeds nobody.) */
static void uncommitted_check(struct decider *d, const struct node_report *r,
                              struct refit_event *ev)
{
    uint64_t version = ev->attached.uncommitted;
    bool staged = ev->attached.receive == REFIT_STAGED_RECEIVE;
    const struct refit_worker *w = refit_find_worker(d->refit, ev->attached.worker);
    const struct refit_version *v = refit_find_version(d->refit, version);
    if (version == 0 || v == NULL || v->phase.state != REFIT_COMMITTED ||
        (w != NULL && w->held == version && w->proven) ||
        holds(d, r, version, staged ? r->shadow_fold : r->live_fold))
        return;
    log_warn("model %s: layout %s rank %u says that its memory has got version %" PRIu64
             ", which is committed: its content is another, or not known here; taken as %s",
             d->model, ev->attached.layout_name, ev->attached.rank, version,
             staged ? "empty" : "torn");
    ev->attached.uncommitted = ev->attached.uncommitted_content = 0;
    ev->attached.torn |= !staged;
}

/* Whether its memory holds what it claims to. What the decider knows of it anyway needs no proof. */
static void claims_check(struct decider *d, const struct node_report *r, struct refit_event *ev)
{
    const struct refit_worker *w = refit_find_worker(d->refit, ev->attached.worker);
    bool *torn = &ev->attached.torn;
    if (ev->attached.side != REFIT_DESTINATION)
        return;
    if (r->opened == 0)
        note_committed(d, ev, ev->attached.live);
    if (w == NULL || w->applied != ev->attached.live)
        ev->attached.live =
            claim_check(d, r, ev->attached.live, r->opened, r->live_fold, "live", torn);
    if (w == NULL || w->held != ev->attached.shadow || !w->proven)
        ev->attached.shadow =
            claim_check(d, r, ev->attached.shadow, 0, r->shadow_fold, "shadow", torn);
    uncommitted_check(d, r, ev);
}

static int attach_new(struct decider *d, uint32_t node, const struct node_report *r,
                      struct refit_event *ev, struct err *e)
{
    struct layout_entry *layout;
    int code = layout_of_report(d->coordinator, r, &layout, e);
    if (code == 0)
        code = layout_tell(d, ev->attached.side, layout->layout, e);
    if (code == 0)
        claims_check(d, r, ev);
    return code == 0 ? roster_put(d, node, r, ev, layout, e) : code;
}

/* Its node tells of that rank by another worker, and has not told of this one since its session began: a sleeper's wake whose
 * answer was lost with the session before is over there, and the sleeper has the rank. */
static struct roster_entry *rank_given_up(const struct decider *d, uint32_t node,
                                          const struct node_report *r)
{
    queue_foreach (q, &d->roster) {
        struct roster_entry *x = container_of(q, struct roster_entry, in);
        if (x->node == node && !x->reported && x->worker != r->event.attached.worker &&
            x->side == r->event.attached.side && x->rank == r->event.attached.rank &&
            strcmp(x->layout->layout->name, r->event.attached.layout_name) == 0)
            return x;
    }
    return NULL;
}

static void on_attached(struct coordinator *c, uint32_t node, const struct node_report *r)
{
    struct refit_event ev = r->event;
    struct decider *d;
    struct err e = {0};
    uint64_t new_worker = 0;
    ev.attached.node = node;
    int code = decider_open(c, r->model, &d, &e);
    struct roster_entry *known = code == 0 ? roster_find(d, ev.attached.worker) : NULL;
    struct roster_entry *over = code == 0 ? rank_given_up(d, node, r) : NULL;
    if (over != NULL)
        worker_missing_leave(d, over);
    if (code == 0 && known == NULL) {
        new_worker = ev.attached.worker;
        code = attach_new(d, node, r, &ev, &e);
    } else if (code == 0 && known->node != node) {
        code = err_set(&e, RS_EEXIST, "worker %016" PRIx64 " is attached on another node",
                       ev.attached.worker);
    } else if (code == 0) {
        known->reported = true;
        if (ev.attached.tells_memory) {
            claims_check(d, r, &ev);
            fold_note(known, r, &ev);
        }
    }
    if (code != 0) {
        refuse(c, node, ev.cookie, &e);
        return;
    }
    event_give(d, node, &ev, new_worker);
}

/* --- publish ------------------------------------------------------------------------------------ */

/* A newcomer must not hold the trainer up: who asked tries again, and gets through once nothing is read any more. */
static void catch_up_call_off(struct decider *d)
{
    struct refit_event ev = {
        .type = REFIT_EV_ABORT,
        .abort = {.version = d->refit->committed, .reason = "the trainer goes on"}};
    (void)decider_event(d, &ev);
}

static void on_publish_ask(struct coordinator *c, uint32_t node, const struct node_report *r)
{
    struct err e = {0};
    struct decider *d = decider_find(c, r->model);
    int code = d == NULL ? err_set(&e, RS_ENOTFOUND, "no such worker")
                         : refit_publish_check(d->refit, r->worker, r->version, &e);
    struct op_reply reply = {.value = code == 1};
    struct refit_event ev = {.type = REFIT_EV_PUBLISHING,
                             .published = {.worker = r->worker, .version = r->version}};
    if (code == 0)
        (void)decider_event(d, &ev);
    if (code == RS_EUNAVAIL)
        catch_up_call_off(d);
    if (code < 0)
        refuse(c, node, r->cookie, &e);
    else
        reply_send(c, node, r->cookie, &reply);
}

static int prints_take(struct publication *p, const struct node_report *r, struct err *e)
{
    if (!r->has_prints)
        return 0;
    p->fingerprints = mem_calloc(p->n_tensors, sizeof *p->fingerprints);
    p->expected = mem_calloc(r->n_expected, sizeof *p->expected);
    if (p->fingerprints == NULL || p->expected == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the fingerprints");
    for (uint32_t i = 0; i < r->n_prints; i++) {
        if (r->prints[i].tensor >= p->n_tensors)
            return err_set(e, RS_EPROTO, "fingerprint of tensor %u of %u", r->prints[i].tensor,
                           p->n_tensors);
        p->fingerprints[r->prints[i].tensor] = r->prints[i].fingerprint;
    }
    for (; p->n_expected < r->n_expected; p->n_expected++) {
        if (r->expected[p->n_expected].tensor >= p->n_tensors)
            return err_set(e, RS_EPROTO, "expected fingerprint of tensor %u of %u",
                           r->expected[p->n_expected].tensor, p->n_tensors);
        p->expected[p->n_expected] = r->expected[p->n_expected];
    }
    return 0;
}

static int publication_take(struct roster_entry *entry, const struct node_report *r, struct err *e)
{
    struct publication *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    *p = (struct publication){.refs = 1,
                              .version = r->event.published.version,
                              .id = r->event.published.publication,
                              .n_tensors = entry->layout->layout->n_tensors};
    int code = prints_take(p, r, e);
    if (code != 0) {
        publication_unref(p);
        return code;
    }
    publication_unref(entry->published);
    entry->published = p;
    return 0;
}

static void on_published(struct decider *d, uint32_t node, const struct node_report *r,
                         struct roster_entry *entry)
{
    struct refit_event ev = r->event;
    struct err e = {0};
    if (publication_take(entry, r, &e) != 0)
        refuse(d->coordinator, node, ev.cookie, &e);
    else
        event_give(d, node, &ev, 0);
}

/* --- all others --------------------------------------------------------------------------------- */

/* Who says something about a worker must have it. 0: the event is about none. */
static uint64_t worker_of(const struct refit_event *ev)
{
    switch (ev->type) {
    case REFIT_EV_LEFT:
    case REFIT_EV_SLEPT:
        return ev->left.worker;
    case REFIT_EV_PUBLISHED:
        return ev->published.worker;
    case REFIT_EV_WITHDRAW:
        return ev->withdraw.worker;
    case REFIT_EV_READY:
        return ev->ready.worker;
    case REFIT_EV_VERDICT:
        return ev->verdict.worker;
    case REFIT_EV_APPLY:
        return ev->apply.worker;
    case REFIT_EV_APPLIED:
        return ev->applied.worker;
    case REFIT_EV_MARK:
        return ev->mark.worker;
    default:
        return 0;
    }
}

static void on_left(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct refit_event ev = r->event;
    landed_drop(&d->landed, node);
    event_give(d, node, &ev, 0);
    struct roster_entry *entry = roster_find(d, r->event.left.worker);
    if (entry != NULL)
        roster_remove(entry);
}

static void on_attempt(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct refit_event ev = r->event;
    ev.node.node = node;
    ev.cookie = 0;
    if (ev.type == REFIT_EV_PROGRESS)
        run_sources_known(d, node, &ev);
    if (ev.type == REFIT_EV_STAGED && !run_staged(d, node, r))
        return;
    if (ev.type == REFIT_EV_FAILED)
        run_failed(d, &ev);
    if (ev.type == REFIT_EV_QUIESCED)
        run_quiesced(d, node, r);
    (void)decider_event(d, &ev);
    if (ev.type == REFIT_EV_PROGRESS)
        run_progress(d);
}

static void on_event(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct refit_event ev = r->event;
    struct err e = {0};
    uint64_t worker = worker_of(&ev);
    struct roster_entry *entry = worker != 0 ? roster_find(d, worker) : NULL;
    if (worker != 0 && (entry == NULL || entry->node != node)) {
        (void)err_set(&e, RS_ENOTFOUND, "no such worker");
        refuse(d->coordinator, node, ev.cookie, &e);
        return;
    }
    switch (ev.type) {
    case REFIT_EV_LEFT:
        on_left(d, node, r);
        break;
    case REFIT_EV_SLEPT:
        entry->segment_bytes = 0;
        landed_drop(&d->landed, node);
        event_give(d, node, &ev, 0);
        break;
    case REFIT_EV_PUBLISHED:
        on_published(d, node, r, entry);
        break;
    case REFIT_EV_WITHDRAW:
    case REFIT_EV_READY:
    case REFIT_EV_VERDICT:
    case REFIT_EV_APPLY:
    case REFIT_EV_APPLIED:
    case REFIT_EV_MARK:
        event_give(d, node, &ev, 0);
        break;
    case REFIT_EV_PREPARED:
    case REFIT_EV_PROGRESS:
    case REFIT_EV_STAGED:
    case REFIT_EV_FAILED:
    case REFIT_EV_QUIESCED:
        on_attempt(d, node, r);
        break;
    default:
        log_warn("model %s: node %s reports an event of type %d, which nodes do not have", d->model,
                 coordinator_node_name(d->coordinator, node), (int)ev.type);
        break;
    }
}

void coordinator_report(struct coordinator *c, uint32_t node, const struct node_report *r)
{
    struct decider *d;
    struct err e = {0};
    if (r->type == NODE_REPORT_PUBLISH_ASK) {
        on_publish_ask(c, node, r);
    } else if (r->type == NODE_REPORT_EVENT && r->event.type == REFIT_EV_ATTACHED) {
        on_attached(c, node, r);
    } else if (r->type == NODE_REPORT_EVENT && r->event.type == REFIT_EV_NODE_UP) {
        coordinator_node_up(c, node, r);
    } else if (r->type == NODE_REPORT_EVENT && r->event.type == REFIT_EV_NODE_LOST) {
        coordinator_node_lost(c, node, r->event.node.code, r->event.node.text);
    } else if ((d = decider_find(c, r->model)) == NULL) {
        (void)err_set(&e, RS_ENOTFOUND, "no model '%s'", r->model);
        refuse(c, node, r->type == NODE_REPORT_EVENT ? r->event.cookie : 0, &e);
    } else if (r->type == NODE_REPORT_CELLS) {
        run_cells(d, node, r);
    } else if (r->type == NODE_REPORT_CELL_SUM) {
        run_cell_sum(d, node, r);
    } else if (r->type == NODE_REPORT_COMM_ID) {
        run_comm_id(d, node, r);
    } else {
        on_event(d, node, r);
    }
}
