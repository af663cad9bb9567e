/* Attach: from the hello to a lease.
 *
 *   hello → pieces* → done → job: bindings checked and encoded → MAP, BIND → CHECK of what the memory claims to hold
 *   → ATTACHED (coordinator, who knows what committed versions look like) → live
 *
 * Whatever fails ends the stream with its reason and leaves nothing behind. A stream that breaks later has a grace
 * time in which `resume` takes the lease up again. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/wire.h"
#include "memory/memory.h"
#include "service/held.h"
#include "service/lease.h"

#include "base/banned.h"

enum { NOTICE_MS = 200 }; /* from a broken stream to the line in the log */

static void on_attached(struct waiter *w, const struct op_reply *reply);

static void attach_fail(struct lease *l, int code, const char *text)
{
    struct service *s = l->service;
    lease_end(l, true, code, text);
    leases_sweep(s);
}

/* --- hello -------------------------------------------------------------------------------------- */

static const char *side_name(enum refit_side side)
{
    return side == REFIT_SOURCE ? "source" : "destination";
}

static int hello_check(struct service *s, const struct attach_hello *h,
                       const struct layout_entry *layout, struct err *e)
{
    char digest[33];
    layout_digest_text(h->layout_digest, digest);
    if (layout == NULL)
        return err_set(e, RS_ENOTFOUND, "layout %s is not stored here; PutLayout first", digest);
    if (strcmp(layout->layout->name, h->layout_name) != 0)
        return err_set(e, RS_EINVAL, "layout %s is named '%s', not '%s'", digest,
                       layout->layout->name, h->layout_name);
    if (h->rank >= layout->layout->n_ranks)
        return err_set(e, RS_EINVAL, "rank %u: layout '%s' has ranks 0 … %u", h->rank,
                       h->layout_name, layout->layout->n_ranks - 1);
    if (h->device >= s->config->devices)
        return err_set(e, RS_EINVAL, "device %u: this node has devices 0 … %u", h->device,
                       s->config->devices - 1);
    if ((h->receive == REFIT_RECEIVE_NONE) != (h->side == REFIT_SOURCE))
        return err_set(e, RS_EINVAL,
                       "a %s %s; destinations receive STAGED or IN_PLACE, sources nothing",
                       side_name(h->side),
                       h->side == REFIT_SOURCE ? "does not receive" : "must say how it receives");
    if (h->asleep && (h->n_segments > 0 || h->live_version != 0 || h->shadow_version != 0 ||
                      h->opened_version != 0))
        return err_set(e, RS_EINVAL,
                       "a worker that is asleep has no segments and holds no version");
    if (h->n_segments > SEGMENT_MAX_PER_WORKER)
        return err_set(e, RS_EEXHAUSTED, "%zu segments: a worker has at most %d; use one per arena",
                       h->n_segments, SEGMENT_MAX_PER_WORKER);
    return 0;
}

/* Who has that rank now; NULL: nobody, but for a sleeper of this client's own (*ret_sleeper), who wakes by attaching anew. */
static struct lease *rank_owner(struct service *s, uint64_t client, const struct attach_hello *h,
                                struct lease **ret_sleeper)
{
    *ret_sleeper = NULL;
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        bool counts = l->life == LEASE_LIVE || l->life == LEASE_GRACE || l->life == LEASE_ATTACHING;
        if (!counts || l->side != h->side || l->rank != h->rank ||
            strcmp(l->model->name, h->model) != 0 ||
            strcmp(l->layout->layout->name, h->layout_name) != 0)
            continue;
        if (!l->asleep || l->life == LEASE_ATTACHING || l->client != client)
            return l;
        *ret_sleeper = l;
    }
    return NULL;
}

/* One worker per rank. The owner's own client may come again anew while its stream is broken: the old lease ends. */
static int rank_claim(struct service *s, uint64_t client, const struct attach_hello *h,
                      struct err *e)
{
    struct lease *sleeper, *owner = rank_owner(s, client, h, &sleeper);
    if (owner != NULL && owner->client == client && owner->life == LEASE_GRACE) {
        lease_end(owner, false, RS_EABORTED, "the same client attached anew");
        leases_sweep(s);
        owner = NULL;
    }
    if (owner == NULL) {
        uint32_t others = s->n_leases - (sleeper != NULL ? 1 : 0); /* which gives way to this one */
        return others < s->config->max_workers
                   ? 0
                   : err_set(e, RS_EEXHAUSTED, "%u workers: max_workers is reached", others);
    }
    return err_set(e, RS_EEXIST,
                   "rank %u of %s layout '%s' of model %s is attached by worker %016" PRIx64
                   " (pid %d); end it first, or evict it",
                   h->rank, side_name(h->side), h->layout_name, h->model, owner->id,
                   (int)owner->pid);
}

/* The worker's copies run on its own device, and what is checked there is memory of that one. */
static int segment_device_check(const struct lease *l, const struct segment *s, struct err *e)
{
    if (s->kind == MEMORY_SEGMENT_MEMFD || s->device.local == l->device)
        return 0;
    return err_set(e, RS_EINVAL,
                   "segment %" PRIu64
                   " lies on device %u (%s), and the worker attaches with device "
                   "%u (%s): attach with device %u",
                   s->id, s->device.local, link_device_name(l->service->link, s->device.local),
                   l->device, link_device_name(l->service->link, l->device), s->device.local);
}

static bool same_memory(const struct segment *a, const struct segment *b)
{
    return a->memory == b->memory && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

static int segments_take(struct lease *l, const struct memory_client *client,
                         const struct attach_hello *h, struct err *e)
{
    l->segments = mem_calloc(h->n_segments, sizeof(struct segment *));
    if (l->segments == NULL)
        return err_set(e, RS_ENOMEM, "no memory to attach");
    for (size_t i = 0; i < h->n_segments; i++) {
        struct segment *s = memory_client_segment(client, h->segments[i]);
        if (s == NULL)
            return err_set(e, RS_ENOTFOUND,
                           "segment %" PRIu64 " is not of this client; hand it over first",
                           h->segments[i]);
        if (l->side == REFIT_DESTINATION && !s->writable)
            return err_set(e, RS_EINVAL,
                           "segment %" PRIu64
                           " was handed over read-only; a destination is written",
                           h->segments[i]);
        for (uint32_t k = 0; k < l->n_segments; k++)
            if (same_memory(l->segments[k], s))
                return err_set(e, RS_EINVAL,
                               "segments %" PRIu64 " and %" PRIu64
                               " are the same memory; hand it over once",
                               l->segments[k]->id, s->id);
        int r = segment_device_check(l, s, e);
        if (r != 0)
            return r;
        segment_use(s);
        l->segments[l->n_segments++] = s;
        l->segment_bytes += s->bytes;
    }
    return 0;
}

static void on_grace_over(uv_timer_t *t)
{
    struct lease *l = t->data;
    struct service *s = l->service;
    lease_end(l, false, RS_EABORTED,
              "its stream broke and it did not attach again in its grace time");
    leases_sweep(s);
}

/* The version whose end the client has not heard of, by its own account. */
static uint64_t waits_for(const struct attach_hello *h)
{
    if (h->side == REFIT_SOURCE)
        return h->live_version;
    return h->opened_version != 0 ? h->opened_version : h->shadow_version;
}

/* A client that died ends its leases before this; then its broken streams are no news. */
static void on_grace_noticed(uv_timer_t *t)
{
    struct lease *l = t->data;
    uint32_t left_ms = l->service->config->grace_ms - NOTICE_MS;
    log_info("model %s: stream of layout %s rank %u broke; its lease ends in %u ms", l->model->name,
             l->layout->layout->name, l->rank, left_ms);
    (void)uv_timer_start(&l->grace, on_grace_over, left_ms, 0);
}

static void grace_begin(struct lease *l)
{
    uint32_t grace_ms = l->service->config->grace_ms;
    bool notice = grace_ms > NOTICE_MS;
    l->life = LEASE_GRACE;
    (void)uv_timer_start(&l->grace, notice ? on_grace_noticed : on_grace_over,
                         notice ? NOTICE_MS : grace_ms, 0);
}

static struct lease *lease_new(struct service *s, struct model *m,
                               const struct memory_client *client, const struct attach_hello *h,
                               struct layout_entry *layout)
{
    struct lease *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return NULL;
    *l = (struct lease){.service = s,
                        .model = m,
                        .life = LEASE_ATTACHING,
                        .id = random_id(),
                        .client = client->id,
                        .pid = client->pid,
                        .side = h->side,
                        .layout = layout_entry_ref(layout),
                        .rank = h->rank,
                        .device = h->device,
                        .receive = h->receive,
                        .asleep = h->asleep,
                        .accept_automatically = h->accept_automatically,
                        .claims_live = h->live_version,
                        .claims_shadow = h->shadow_version,
                        .opened = h->side == REFIT_DESTINATION ? h->opened_version : 0,
                        .waits_for = waits_for(h),
                        .waits_push = h->push,
                        .again = h->again,
                        .published_before = h->published_version,
                        .binding_fd = {-1, -1},
                        .dtypes_fd = -1};
    rs_assert(uv_timer_init(s->loop, &l->grace) == 0);
    l->grace.data = l;
    s->n_handles++;
    queue_push(&s->leases, &l->in);
    s->n_leases++;
    return l;
}

/* The stream of a lease broke and comes back; or a new one overtakes one that is half dead. */
static int resume(struct service *s, uint64_t client, const struct attach_hello *h,
                  struct attach_stream *st, struct err *e)
{
    struct lease *l = lease_find(s, h->resume);
    if (l == NULL)
        return err_set(e, RS_ENOTFOUND,
                       "worker %016" PRIx64 " is not attached (any more); attach anew", h->resume);
    if (l->client != client)
        return err_set(e, RS_EPERM, "worker %016" PRIx64 " belongs to another client", h->resume);
    if (l->side != h->side || l->rank != h->rank || strcmp(l->model->name, h->model) != 0 ||
        memcmp(l->layout->layout->digest, h->layout_digest, 16) != 0)
        return err_set(e, RS_EPRECOND,
                       "worker %016" PRIx64 " is another rank, layout or model; attach anew",
                       h->resume);
    if (l->stream != NULL) {
        l->stream->lease = NULL;
        l->stream->end(l->stream, false, RS_EABORTED, "the worker was resumed on another stream");
    }
    (void)uv_timer_stop(&l->grace);
    if (l->waiter.done == on_attached)
        waiter_forget(&l->waiter); /* what the stream before waited for */
    l->life = LEASE_LIVE;
    l->resuming = true; /* its bindings stand; pages that come are not read */
    l->waits_for = waits_for(h);
    l->waits_push = h->push;
    l->stream = st;
    st->lease = l;
    return 0;
}

int op_attach_hello(struct service *s, uint64_t client_id, const struct attach_hello *h,
                    struct attach_stream *st, struct err *e)
{
    const struct memory_client *client = memory_server_client(s->memory, client_id);
    struct layout_entry *layout = layouts_find(&s->layouts, h->layout_digest);
    struct model *m;
    st->lease = NULL;
    if (s->stopping || client == NULL)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping, or the client is gone");
    if (h->resume != 0)
        return resume(s, client_id, h, st, e);
    int r = hello_check(s, h, layout, e);
    if (r == 0)
        r = rank_claim(s, client_id, h, e);
    if (r == 0)
        r = model_open(s, h->model, &m, e);
    if (r != 0)
        return r;
    struct lease *l = lease_new(s, m, client, h, layout);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "no memory to attach");
    r = segments_take(l, client, h, e);
    if (r != 0) {
        attach_fail(l, r, err_text(e, r));
        return r;
    }
    l->stream = st;
    st->lease = l;
    return 0;
}

/* --- bindings ----------------------------------------------------------------------------------- */

static void attach_tell(struct lease *l);
static void after_bind(struct lease *l, int code, const struct err *e);

static void after_check(struct lease *l, int code, const struct err *e)
{
    if (code != 0)
        attach_fail(l, code, err_text(e, code));
    else
        lease_bind(l, after_bind);
}

int op_attach_done(struct attach_stream *st, struct err *e)
{
    struct lease *l = st->lease;
    if (l == NULL || (!l->resuming && (l->done || l->life != LEASE_ATTACHING)))
        return err_set(e, RS_EPRECOND, "AttachDone comes once, after AttachHello and the bindings");
    if (l->resuming) {
        l->resuming = false;
        attach_tell(l);
        return 0;
    }
    if (l->asleep && l->n_pieces[WIRE_LIVE] + l->n_pieces[WIRE_SHADOW] > 0)
        return err_set(e, RS_EINVAL, "a worker that is asleep has no bindings");
    l->done = true;
    if (l->asleep) {
        attach_tell(l);
        return 0;
    }
    int r = lease_check_bindings(l, after_check, e);
    l->done = r == 0;
    return r;
}

/* --- the coordinator ---------------------------------------------------------------------------- */

/* What it answered is what the memory holds; what was claimed beyond that is not believed. */
static void contents_settle(struct lease *l, uint64_t held, uint64_t applied)
{
    unsigned receiving = l->receive == REFIT_STAGED_RECEIVE ? WIRE_SHADOW : WIRE_LIVE;
    struct memory_content *in = &l->content[receiving], *live = &l->content[WIRE_LIVE];
    l->held = held;
    l->applied = applied;
    if (in->version != held)
        *in = (struct memory_content){.version = held};
    if (live->version != applied)
        *live = (struct memory_content){.version = applied};
    if (l->sums_version != held) {
        mem_free(l->sums);
        l->sums = NULL;
        l->sums_version = 0;
    }
}

/* Whom the attach of `l` wakes; NULL: nobody. */
static struct lease *sleeper_of(const struct lease *l)
{
    queue_foreach (q, &l->service->leases) {
        struct lease *old = container_of(q, struct lease, in);
        if (old != l && old->asleep && (old->life == LEASE_LIVE || old->life == LEASE_GRACE) &&
            old->client == l->client && old->model == l->model && old->side == l->side &&
            old->rank == l->rank && strcmp(old->layout->layout->name, l->layout->layout->name) == 0)
            return old;
    }
    return NULL;
}

/* The sleeper of this rank has woken up by the attach of `l`. */
static void sleeper_end(const struct lease *l)
{
    for (struct lease *old; (old = sleeper_of(l)) != NULL;)
        lease_end(old, false, RS_EABORTED, "it has woken up and attached anew");
    leases_sweep(l->service);
}

/* Its stream has come back while the coordinator is away: what is known of it here stands, and it is reported again in the
 * next session, as all are. */
static void resumed_alone(struct lease *l)
{
    struct attached a = {.worker = l->id,
                         .committed = l->model->committed.version,
                         .held = l->held,
                         .applied = l->applied};
    l->told_session = 0;
    if (l->stream != NULL)
        l->stream->attached(l->stream, &a);
}

static void on_attached(struct waiter *w, const struct op_reply *reply)
{
    struct lease *l = container_of(w, struct lease, waiter);
    if (reply->code == RS_EUNAVAIL && l->known && l->service->session == 0) {
        resumed_alone(l);
        return;
    }
    if (reply->code != 0) {
        attach_fail(l, reply->code, reply->text);
        return;
    }
    const char *how = l->known ? "attached again" : l->asleep ? "attached, asleep," : "attached";
    sleeper_end(l);
    if (!l->known && l->side == REFIT_DESTINATION)
        contents_settle(l, reply->attempt, reply->value);
    l->known = true;
    if (l->life == LEASE_ATTACHING) /* one that resumed is live, or its stream has broken again */
        l->life = LEASE_LIVE;
    log_info("model %s: %s layout %s rank %u %s: worker %016" PRIx64
             ", device %u, pid %d, held %" PRIu64 ", applied %" PRIu64,
             l->model->name, side_name(l->side), l->layout->layout->name, l->rank, how, l->id,
             l->device, (int)l->pid, reply->attempt, reply->value);
    struct attached a = {.worker = l->id,
                         .committed = reply->version,
                         .held = reply->attempt,
                         .applied = reply->value};
    if (l->stream != NULL)
        l->stream->attached(l->stream, &a);
}

static struct node_report attached_report(const struct lease *l)
{
    struct node_report r = {.type = NODE_REPORT_EVENT,
                            .model = l->model->name,
                            .event = {.type = REFIT_EV_ATTACHED,
                                      .attached = {.worker = l->id,
                                                   .node = l->service->node,
                                                   .side = l->side,
                                                   .layout_name = l->layout->layout->name,
                                                   .rank = l->rank,
                                                   .receive = l->receive,
                                                   .accept_automatically = l->accept_automatically,
                                                   .torn = l->torn,
                                                   .asleep = l->asleep,
                                                   .waits_for = l->waits_for,
                                                   .push = l->waits_push,
                                                   .again = l->again,
                                                   .published = l->published_before}},
                            .device = l->device,
                            .pid = l->pid,
                            .segment_bytes = l->segment_bytes,
                            .live_fold = l->content[WIRE_LIVE].fold,
                            .shadow_fold = l->content[WIRE_SHADOW].fold};
    memcpy(r.layout, l->layout->layout->digest, sizeof r.layout);
    return r;
}

/* One answer at a time is waited for: the newest. */
static int report_ask(struct lease *l, struct node_report *r,
                      void (*done)(struct waiter *w, const struct op_reply *reply), struct err *e)
{
    waiter_forget(&l->waiter);
    l->waiter.done = done;
    return node_ask(l->service, r, &l->waiter, e);
}

/* By the client's account, with what its memory was found to look like; or a resumed one, of which all is known. */
static void attach_tell(struct lease *l)
{
    struct err e = {0};
    struct node_report r = attached_report(l);
    r.event.attached.live = l->claims_live;
    r.event.attached.shadow = l->claims_shadow;
    r.opened = l->opened;
    int code = report_ask(l, &r, on_attached, &e);
    if (code == RS_EUNAVAIL && l->known)
        resumed_alone(l);
    else if (code != 0)
        attach_fail(l, code, err_text(&e, code));
}

/* --- once more ---------------------------------------------------------------------------------- */

static void on_attached_again(struct waiter *w, const struct op_reply *reply)
{
    struct lease *l = container_of(w, struct lease, waiter);
    if (reply->code == 0) {
        if (l->side == REFIT_DESTINATION) {
            l->held = reply->attempt;
            l->applied = reply->value;
        }
        return;
    }
    if (reply->code == RS_EUNAVAIL)
        return; /* the session is over again, or it is asked again with the next one */
    lease_end(l, true, RS_EABORTED, reply->text);
    leases_sweep(l->service);
}

/* What is not known as committed here may have been committed since: the coordinator knows. */
static void memory_tell(const struct lease *l, unsigned memory, uint64_t *ret_claim,
                        struct node_report *r)
{
    const struct memory_content *c = &l->content[memory];
    if (c->version <= l->model->committed.version) {
        *ret_claim = c->version;
        return;
    }
    r->event.attached.uncommitted = c->version;
    r->event.attached.uncommitted_content = c->content;
}

static void attach_again(struct lease *l)
{
    struct err e = {0};
    struct node_report r = attached_report(l);
    bool awaited = l->waiter.cookie != 0 && l->waiter.done == on_attached; /* by its stream */
    r.event.attached.tells_memory = r.event.attached.again = true;
    memory_tell(l, WIRE_LIVE, &r.event.attached.live, &r);
    if (l->receive == REFIT_STAGED_RECEIVE)
        memory_tell(l, WIRE_SHADOW, &r.event.attached.shadow, &r);
    if (report_ask(l, &r, awaited ? on_attached : on_attached_again, &e) != 0)
        return;
    lease_publish_again(l);
    lease_withdraw_again(l);
}

static struct lease *untold(struct service *s)
{
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if ((l->life == LEASE_LIVE || l->life == LEASE_GRACE) && l->told_session != s->session)
            return l;
    }
    return NULL;
}

void leases_tell(struct service *s)
{
    for (struct lease *l; (l = untold(s)) != NULL;) {
        l->told_session = s->session;
        attach_again(l);
    }
}

/* --- what the memory claims to hold -------------------------------------------------------------- */

static void check_next(struct lease *l);

/* The coordinator compares: it knows what versions look like. */
static void check_take(struct lease *l, struct wire_packet *packet)
{
    unsigned memory = l->checking == WIRE_SHADOW ? WIRE_SHADOW : WIRE_LIVE;
    bool receiving = memory == WIRE_SHADOW || l->receive == REFIT_IN_PLACE;
    uint64_t claim = memory == WIRE_SHADOW ? l->claims_shadow
                     : l->opened != 0      ? l->opened
                                           : l->claims_live;
    uint64_t *table = NULL;
    if (lease_table(l, packet, &table, NULL) != 0)
        return; /* a fold of 0 proves nothing */
    l->content[memory] = (struct memory_content){
        .version = claim, .fold = held_fold(table, l->layout->layout->n_tensors)};
    if (receiving) {
        mem_free(l->sums);
        l->sums = table;
        l->sums_version = claim;
        table = NULL;
    }
    mem_free(table);
}

static void on_checked(struct link_request *r, int code, struct wire_packet *packet,
                       const struct err *e)
{
    struct lease *l = container_of(r, struct lease, bind);
    if (code != 0) {
        attach_fail(l, code == RS_EPEER ? RS_EUNAVAIL : code, err_text(e, code));
        return;
    }
    check_take(l, packet);
    check_next(l);
}

static void check_send(struct lease *l, enum wire_memory memory)
{
    struct err e = {0};
    struct wire_check body = {.memory = memory};
    struct wire_header h = {.type = WIRE_CHECK, .model = l->model->id, .worker = l->id};
    l->checking = memory;
    l->bind = (struct link_request){.done = on_checked};
    int r = link_submit(l->service->link, &l->bind, h, &body, sizeof body, NULL, 0, NULL, 0,
                        l->service->config->memory_timeout_ms, &e);
    if (r != 0)
        attach_fail(l, r, err_text(&e, r));
}

/* Live, then shadow, as far as something is claimed; sources claim by publishing. */
static void check_next(struct lease *l)
{
    while (l->step <= WIRE_SHADOW) {
        enum wire_memory memory = (enum wire_memory)l->step++;
        if ((memory == WIRE_LIVE ? l->claims_live | l->opened : l->claims_shadow) == 0)
            continue;
        check_send(l, memory);
        return;
    }
    attach_tell(l);
}

static void after_bind(struct lease *l, int code, const struct err *e)
{
    if (code != 0) {
        attach_fail(l, code == RS_EPEER ? RS_EUNAVAIL : code, err_text(e, code));
        return;
    }
    l->step = 0;
    if (l->side == REFIT_SOURCE)
        l->claims_live = 0;
    if (l->receive != REFIT_STAGED_RECEIVE)
        l->claims_shadow = 0;
    check_next(l);
}

/* --- the stream's end ---------------------------------------------------------------------------- */

void op_attach_closed(struct attach_stream *st, bool goodbye)
{
    struct lease *l = st->lease;
    if (l == NULL)
        return;
    struct service *s = l->service;
    st->lease = NULL;
    l->stream = NULL;
    l->resuming = false;
    if (l->life != LEASE_ATTACHING && !goodbye) {
        grace_begin(l);
        return;
    }
    struct lease *sleeper = sleeper_of(l);
    bool told = lease_is_told(l);
    lease_end(l, true, 0, goodbye ? "it said goodbye" : "its stream ended before it was attached");
    if (told &&
        sleeper != NULL) /* the coordinator has heard of its waking, and that it came to nothing */
        attach_again(sleeper);
    leases_sweep(s);
}
