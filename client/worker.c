/* A worker: its lease is an open Attach stream, kept by a thread of its own.
 *
 *                 attach ok
 *   (new) ───────────────────► ATTACHED ◄────────────┐
 *                                 │ stream broke     │ attached again, event REATTACHED
 *                                 ▼                  │
 *                              BROKEN ───────────────┘
 *        evicted, or refused for good │
 *                                 ▼
 *                               OVER
 *
 * The thread receives the stream's events, keeps the account of what the memory holds, and attaches
 * again where the stream breaks: with `resume` while the daemon still knows this client, else anew
 * with what the memory holds; a sleeper without memory (sleep.c). reshard_attach makes the first attach on the caller's thread.
 * Everything that changes is guarded by the worker's mutex; fields above it are set once. */
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "client/api.h"
#include "client/client.h"
#include "client/worker.h"
#include "layout/layout.h"

#include "base/banned.h"

enum {
    GOODBYE_MOST_MS = 1000,
    RECEIVE_MS = 250, /* how soon a link that another thread lost is noticed */
    LINK_MOST_MS = 500,
    ATTACH_MOST_MS = 30000,
    REFUSED_MOST_MS = 15000 /* an old lease of ours may take its grace time to end */
};

struct reshard_worker *worker_of_queue(struct queue *q)
{
    return container_of(q, struct reshard_worker, queue);
}

const char *reshard_event_name(enum reshard_event_type type)
{
    static const char *const names[] = {
        [RESHARD_EVENT_PUBLISH_REQUESTED] = "publish_requested",
        [RESHARD_EVENT_READY_REQUESTED] = "ready_requested",
        [RESHARD_EVENT_ACCEPT_REQUESTED] = "accept_requested",
        [RESHARD_EVENT_COMMITTED] = "committed",
        [RESHARD_EVENT_ABORTED] = "aborted",
        [RESHARD_EVENT_SOURCE_RELEASED] = "source_released",
        [RESHARD_EVENT_EVICTED] = "evicted",
        [RESHARD_EVENT_REATTACHED] = "reattached",
        [RESHARD_EVENT_WITHDRAWN] = "withdrawn",
    };
    size_t i = (size_t)type;
    return i < sizeof names / sizeof *names && names[i] != NULL ? names[i] : "unknown";
}

/* ---- events, and the account of what the memory holds; under the mutex ---- */

static void event_push(struct reshard_worker *w, enum reshard_event_type type, uint64_t version,
                       uint64_t attempt, const char *reason)
{
    if (w->n_events == EVENTS_MOST) {
        mem_free(w->events[w->first_event].reason);
        w->first_event = (w->first_event + 1) % EVENTS_MOST;
        w->n_events--;
    }
    struct worker_event *ev = &w->events[(w->first_event + w->n_events++) % EVENTS_MOST];
    *ev = (struct worker_event){.type = type, .version = version, .attempt = attempt};
    if (reason != NULL && reason[0] != '\0')
        ev->reason = mem_strdup(reason);
    pthread_cond_broadcast(&w->changed);
}

static void account_received(struct reshard_worker *w, uint64_t version)
{
    if (w->side != RESHARD_DESTINATION)
        return;
    w->held = version;
    if (w->receive == RESHARD_RECEIVE_STAGED)
        w->shadow_version = version;
    else
        w->live_version = version;
}

/* Live memory is no longer being written with `version`: it is whole. */
static void account_whole(struct reshard_worker *w, uint64_t version)
{
    if (w->receive == RESHARD_RECEIVE_IN_PLACE && w->opened_version == version)
        w->opened_version = 0;
}

/* It sleeps, and holds nothing; or has other memory by now than what comes by its old stream is about. */
static bool is_bygone(const struct reshard_worker *w)
{
    return w->memory == NULL || w->next.stream != NULL;
}

static void account(struct reshard_worker *w, const struct reshard_event *ev)
{
    switch (ev->type) {
    case RESHARD_EVENT_ACCEPT_REQUESTED:
        if (!is_bygone(w))
            account_received(w, ev->version);
        break;
    case RESHARD_EVENT_COMMITTED:
        w->committed = ev->version;
        if (is_bygone(w))
            break;
        if (w->held == ev->version || w->accept_automatically) /* else its instance was left out */
            account_whole(w, ev->version);
        account_received(w, ev->version);
        if (w->side == RESHARD_DESTINATION && w->receive == RESHARD_RECEIVE_IN_PLACE)
            w->applied = ev->version;
        break;
    case RESHARD_EVENT_SOURCE_RELEASED:
        w->live_version = 0; /* the trainer may write it from now on */
        break;
    default:
        break;
    }
}

static void worker_over(struct reshard_worker *w, const char *reason)
{
    w->state = WORKER_OVER;
    w->evicted = true;
    if (w->over_reason == NULL)
        w->over_reason = mem_strdup(reason);
    event_push(w, RESHARD_EVENT_EVICTED, 0, 0, reason);
}

static void take_attached(struct reshard_worker *w, struct link *l, struct rpc_stream *s,
                          const struct api_attached *a)
{
    bool anew = w->id != a->worker;
    w->link = l;
    w->stream = s;
    w->id = a->worker;
    if (anew && w->side == RESHARD_DESTINATION && a->applied != 0) { /* the daemon has looked */
        w->live_version = a->applied;
        w->opened_version = 0;
    }
    w->committed = a->committed;
    w->held = a->held;
    w->applied = a->applied;
    w->state = WORKER_ATTACHED;
    pthread_cond_broadcast(&w->changed);
}

/* ---- attaching ---- */

/* The daemon's ids of the worker's segments, as they are on `l`: RS_EUNAVAIL where the client has
 * gone on to another link meanwhile. */
static int segment_ids(struct reshard_worker *w, const struct worker_memory *m, struct link *l,
                       uint64_t deadline_ns, uint64_t *ret_ids, struct err *e)
{
    int r = client_connect_lock(w->client, deadline_ns, e);
    if (r != 0)
        return r;
    for (size_t i = 0; i < m->n_segments; i++)
        ret_ids[i] = m->segments[i]->id;
    client_connect_unlock(w->client);
    return link_alive(l) ? 0 : err_set(e, RS_EUNAVAIL, "the daemon is gone");
}

static void hello_fill(struct reshard_worker *w, const struct worker_memory *m, struct api_hello *h)
{
    pthread_mutex_lock(&w->mutex);
    h->live_version = w->live_version;
    h->shadow_version = w->shadow_version;
    h->opened_version = w->opened_version;
    h->push = w->side == RESHARD_SOURCE ? worker_push(w, w->live_version) : 0;
    h->again = w->id != 0;
    h->published_version = w->published_version;
    pthread_mutex_unlock(&w->mutex);
    h->model = w->model;
    h->layout_name = w->layout->name;
    h->side = w->side;
    h->receive = w->receive;
    h->rank = w->rank;
    h->device = w->device;
    h->accept_automatically = w->accept_automatically;
    h->n_segments = m->n_segments;
}

int worker_attach_on(struct reshard_worker *w, const struct worker_memory *m, struct link *l,
                     uint64_t resume, uint64_t deadline_ns, struct rpc_stream **ret_stream,
                     struct api_attached *ret, struct err *e)
{
    static const struct worker_memory none;
    uint8_t digest[16];
    bool asleep = m == NULL;
    m = asleep ? &none : m;
    uint64_t *ids = mem_calloc(m->n_segments + 1, sizeof *ids);
    if (ids == NULL)
        return err_set(e, RS_ENOMEM, "attach: out of memory");
    int r = segment_ids(w, m, l, deadline_ns, ids, e);
    if (r == 0)
        r = api_put_layout(link_channel(l), w->layout, deadline_ns, digest, e);
    struct api_hello hello = {
        .digest = digest, .resume = resume, .asleep = asleep, .segments = ids};
    hello_fill(w, m, &hello);
    if (asleep)
        hello.live_version = hello.shadow_version = hello.opened_version = hello.push = 0;
    if (r == 0)
        r = api_attach(link_channel(l), &hello, &m->pages, deadline_ns, ret_stream, ret, e);
    mem_free(ids);
    return r;
}

struct attach_try {
    struct reshard_worker *worker;
    uint64_t resume;
    struct link *resume_link; /* compared only: `resume` means something on this link alone */
};

static int try_attach(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                      struct err *e)
{
    (void)worker;
    struct attach_try *t = arg;
    struct rpc_stream *s;
    struct api_attached a;
    uint64_t resume = l == t->resume_link ? t->resume : 0;
    struct worker_memory *m = worker_memory_get(t->worker);
    int r = worker_attach_on(t->worker, m, l, resume, deadline_ns, &s, &a, e);
    if (r == RS_ENOTFOUND && resume != 0) /* its grace time is over */
        r = worker_attach_on(t->worker, m, l, 0, deadline_ns, &s, &a, e);
    worker_memory_put(t->worker, m);
    if (r != 0)
        return r;
    pthread_mutex_lock(&t->worker->mutex);
    take_attached(t->worker, link_ref(l), s, &a);
    pthread_mutex_unlock(&t->worker->mutex);
    return 0;
}

/* ---- the thread ---- */

/* True where the stream goes on. */
static bool take_message(struct reshard_worker *w, void *data, size_t n)
{
    struct reshard_event ev;
    int r = api_event(data, n, &ev, NULL);
    mem_free(data);
    if (r != 0)
        return r == RS_EUNIMPL;
    bool go_on = ev.type != RESHARD_EVENT_EVICTED;
    pthread_mutex_lock(&w->mutex);
    if (go_on) {
        account(w, &ev);
        event_push(w, ev.type, ev.version, ev.attempt, ev.reason);
    } else {
        worker_over(w, ev.reason);
    }
    pthread_mutex_unlock(&w->mutex);
    return go_on;
}

/* Takes events until the stream, its link or the worker ends. */
static void receive_events(struct reshard_worker *w)
{
    bool go_on = true;
    while (go_on) {
        void *data;
        size_t n;
        int r = rpc_stream_receive(w->stream, RECEIVE_MS, &data, &n, NULL);
        if (r == 0)
            go_on = take_message(w, data, n);
        else
            go_on = r == RS_EDEADLINE && link_alive(w->link);
        if (r != 0 && r != RS_EDEADLINE)
            (void)client_retry(w->link, r);
    }
}

/* Lets the stream and its link go; true where another attach is due. */
static bool stream_drop(struct reshard_worker *w, struct attach_try *ret)
{
    pthread_mutex_lock(&w->mutex);
    if (w->state == WORKER_ATTACHED)
        w->state = WORKER_BROKEN;
    struct rpc_stream *s = w->stream;
    struct link *l = w->link;
    *ret = (struct attach_try){.worker = w, .resume = w->id, .resume_link = l};
    w->stream = NULL;
    w->link = NULL;
    pthread_cond_broadcast(&w->changed);
    bool again = !w->closing && w->state == WORKER_BROKEN;
    pthread_mutex_unlock(&w->mutex);
    rpc_stream_close(s);
    link_unref(l);
    return again;
}

static bool worker_closing(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->mutex);
    bool closing = w->closing;
    pthread_mutex_unlock(&w->mutex);
    return closing;
}

/* What reshard_wake has brought, where it is under way; false: nothing. */
static bool take_next(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->mutex);
    while (w->waking && !w->closing)
        pthread_cond_wait(&w->changed, &w->mutex);
    bool got = w->next.stream != NULL && !w->closing;
    if (got) {
        struct worker_attached next = w->next;
        w->next = (struct worker_attached){0};
        take_attached(w, next.link, next.stream, &next.what);
    }
    pthread_mutex_unlock(&w->mutex);
    return got;
}

/* Looks for a daemon for a moment only, so that detaching never waits long for one. */
static int attach_once(struct reshard_worker *w, struct attach_try *t, struct err *e)
{
    struct link *l;
    int r = client_link(w->client, deadline_after_ms(LINK_MOST_MS),
                        deadline_after_ms(ATTACH_MOST_MS), &l, e);
    if (r != 0)
        return r;
    r = try_attach(l, 0, deadline_after_ms(ATTACH_MOST_MS), t, e);
    if (r == 0)
        worker_withdraw_again(w, t->resume, l, deadline_after_ms(ATTACH_MOST_MS));
    if (r != 0)
        (void)client_retry(l, r);
    link_unref(l);
    return r;
}

/* Attaches again, for as long as it takes; false where the worker is over or being detached. What
 * the daemon refuses is asked for again for a while, since it may only be late to notice our end.
 */
static bool attach_again(struct reshard_worker *w, struct attach_try *t)
{
    uint64_t refused_until = 0;
    for (unsigned n = 0; !worker_closing(w); n++) {
        struct err err = {0};
        if (take_next(w))
            return true;
        int r = attach_once(w, t, &err);
        if (r == 0) {
            pthread_mutex_lock(&w->mutex);
            w->reattached++;
            event_push(w, RESHARD_EVENT_REATTACHED, w->committed, 0, NULL);
            pthread_mutex_unlock(&w->mutex);
            return true;
        }
        bool refused = err_class(r) == ERR_CALLER && r != RS_EUNAUTH;
        if (!refused)
            refused_until = 0;
        else if (refused_until == 0)
            refused_until = deadline_after_ms(REFUSED_MOST_MS);
        if (refused && clock_mono_ns() >= refused_until) {
            (void)err_prefix(&err, r, "attaching again was refused");
            pthread_mutex_lock(&w->mutex);
            worker_over(w, err.text);
            pthread_mutex_unlock(&w->mutex);
            return false;
        }
        if (!client_pause(w->client, n, UINT64_MAX))
            return false;
    }
    return false;
}

static void *worker_run(void *arg)
{
    struct reshard_worker *w = arg;
    struct attach_try t;
    do
        receive_events(w);
    while (stream_drop(w, &t) && attach_again(w, &t));
    return NULL;
}

/* ---- what callers wait for ---- */

int worker_hold(struct reshard_worker *w, uint64_t deadline_ns, struct link **ret_link,
                uint64_t *ret_worker, struct err *e)
{
    struct timespec at;
    client_timespec(deadline_ns, &at);
    int timed_out = 0, r = 0;
    pthread_mutex_lock(&w->mutex);
    if (w->state == WORKER_ATTACHED && !link_alive(w->link)) {
        w->state = WORKER_BROKEN; /* before the thread finds out, which it does at once now */
        rpc_stream_cancel(w->stream);
    }
    while (w->state == WORKER_BROKEN && !w->closing && timed_out == 0)
        timed_out = pthread_cond_clockwait(&w->changed, &w->mutex, CLOCK_MONOTONIC, &at);
    if (w->closing)
        r = err_set(e, RS_ECANCELED, "the worker is being detached");
    else if (w->state == WORKER_OVER)
        r = err_set(e, RS_EPRECOND, "the worker's lease is over: %s; attach anew",
                    w->over_reason != NULL ? w->over_reason : "evicted");
    else if (w->state == WORKER_BROKEN)
        r = err_set(e, RS_EUNAVAIL, "no daemon to attach to until the deadline");
    if (r == 0) {
        *ret_link = link_ref(w->link);
        *ret_worker = w->id;
    }
    pthread_mutex_unlock(&w->mutex);
    return r;
}

bool worker_moved(struct reshard_worker *w, uint64_t worker)
{
    pthread_mutex_lock(&w->mutex);
    bool moved = w->state == WORKER_BROKEN || (w->state == WORKER_ATTACHED && w->id != worker);
    pthread_mutex_unlock(&w->mutex);
    return moved;
}

int reshard_next_event(struct reshard_worker *w, uint32_t timeout_ms,
                       struct reshard_event *ret_event, struct reshard_error *e)
{
    struct err err = {0};
    struct timespec at;
    client_timespec(client_deadline(timeout_ms), &at);
    int timed_out = 0, r = 0;
    pthread_mutex_lock(&w->mutex);
    while (w->n_events == 0 && w->state != WORKER_OVER && !w->closing && timed_out == 0)
        timed_out = pthread_cond_clockwait(&w->changed, &w->mutex, CLOCK_MONOTONIC, &at);
    if (w->n_events > 0) {
        struct worker_event *ev = &w->events[w->first_event];
        *ret_event = (struct reshard_event){
            .type = ev->type, .version = ev->version, .attempt = ev->attempt};
        size_t n = ev->reason != NULL ? strnlen(ev->reason, RESHARD_TEXT_BYTES - 1) : 0;
        memcpy(ret_event->reason, ev->reason != NULL ? ev->reason : "", n);
        mem_free(ev->reason);
        w->first_event = (w->first_event + 1) % EVENTS_MOST;
        w->n_events--;
    } else if (w->closing) {
        r = err_set(&err, RS_ECANCELED, "the worker is being detached");
    } else if (w->state == WORKER_OVER) {
        r = err_set(&err, RS_EPRECOND, "the worker's lease is over: %s; attach anew",
                    w->over_reason != NULL ? w->over_reason : "evicted");
    } else {
        r = err_set(&err, RS_EDEADLINE, "no event in that time");
    }
    pthread_mutex_unlock(&w->mutex);
    return client_give(e, r, &err);
}

void reshard_worker_info(struct reshard_worker *w, struct reshard_worker_info *ret_info)
{
    pthread_mutex_lock(&w->mutex);
    *ret_info = (struct reshard_worker_info){.worker = w->id,
                                             .committed = w->committed,
                                             .held = w->held,
                                             .applied = w->applied,
                                             .reattached = w->reattached,
                                             .evicted = w->evicted};
    pthread_mutex_unlock(&w->mutex);
}

/* ---- life ---- */

static uint32_t segment_number(const struct reshard_segment *s, void *arg)
{
    const struct worker_memory *m = arg;
    for (size_t i = 0; i < m->n_segments; i++)
        if (m->segments[i] == s)
            return (uint32_t)i;
    return UINT32_MAX; /* cannot be: collect_segments has seen every piece */
}

static int collect_segments(const struct reshard_client *c, struct worker_memory *m,
                            const struct reshard_piece *pieces, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        struct reshard_segment *s = pieces[i].segment;
        if (s == NULL || s->client != c)
            return err_set(e, RS_EINVAL, "binding of tensor '%s': its segment is not this client's",
                           pieces[i].tensor != NULL ? pieces[i].tensor : "");
        if (segment_number(s, m) != UINT32_MAX)
            continue;
        size_t capacity = m->n_segments;
        if (mem_grow((void **)&m->segments, &capacity, m->n_segments + 1, sizeof(void *)) != 0)
            return err_set(e, RS_ENOMEM, "attach: out of memory");
        m->segments[m->n_segments++] = s;
    }
    return 0;
}

static void memory_free(struct worker_memory *m)
{
    api_pages_close(&m->pages);
    mem_free(m->segments);
    mem_free(m);
}

static void memory_is_used(struct reshard_client *c, const struct worker_memory *m, bool used)
{
    pthread_mutex_lock(&c->mutex);
    for (size_t i = 0; i < m->n_segments; i++)
        if (used)
            m->segments[i]->n_users++;
        else
            m->segments[i]->n_users--;
    pthread_mutex_unlock(&c->mutex);
}

int worker_memory_new(struct reshard_client *c, const struct reshard_piece *live, size_t n_live,
                      const struct reshard_piece *shadow, size_t n_shadow,
                      struct worker_memory **ret, struct err *e)
{
    struct worker_memory *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return err_set(e, RS_ENOMEM, "attach: out of memory");
    m->refs = 1;
    int r = collect_segments(c, m, live, n_live, e);
    if (r == 0)
        r = collect_segments(c, m, shadow, n_shadow, e);
    if (r == 0)
        r = api_pages_add(&m->pages, false, live, n_live, segment_number, m, e);
    if (r == 0)
        r = api_pages_add(&m->pages, true, shadow, n_shadow, segment_number, m, e);
    if (r != 0) {
        memory_free(m);
        return r;
    }
    memory_is_used(c, m, true);
    *ret = m;
    return 0;
}

struct worker_memory *worker_memory_get(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->mutex);
    struct worker_memory *m = w->memory;
    if (m != NULL)
        m->refs++;
    pthread_mutex_unlock(&w->mutex);
    return m;
}

void worker_memory_put(struct reshard_worker *w, struct worker_memory *m)
{
    if (m == NULL)
        return;
    pthread_mutex_lock(&w->mutex);
    bool last = --m->refs == 0;
    pthread_mutex_unlock(&w->mutex);
    if (!last)
        return;
    memory_is_used(w->client, m, false);
    memory_free(m);
}

static int check_attach(const struct reshard_attach *a, struct err *e)
{
    if (a->model == NULL || a->layout == NULL)
        return err_set(e, RS_EINVAL, "attach: model and layout are needed");
    if (a->side != RESHARD_SOURCE && a->side != RESHARD_DESTINATION)
        return err_set(e, RS_EINVAL, "attach: side %d; use source or destination", (int)a->side);
    bool receives = a->receive != RESHARD_RECEIVE_NONE;
    if (receives != (a->side == RESHARD_DESTINATION))
        return err_set(e, RS_EINVAL,
                       "attach: destinations receive staged or in_place, sources "
                       "receive nothing");
    if (a->n_shadow > 0 && a->receive != RESHARD_RECEIVE_STAGED)
        return err_set(e, RS_EINVAL, "attach: only staged destinations have shadow memory");
    return 0;
}

static void worker_free(struct reshard_worker *w)
{
    rpc_stream_close(w->stream);
    link_unref(w->link);
    if (w->next.stream != NULL)
        rpc_stream_close(w->next.stream);
    link_unref(w->next.link);
    worker_memory_put(w, w->memory);
    for (; w->events != NULL && w->n_events > 0; w->n_events--) {
        mem_free(w->events[w->first_event].reason);
        w->first_event = (w->first_event + 1) % EVENTS_MOST;
    }
    mem_free(w->events);
    mem_free(w->model);
    mem_free(w->over_reason);
    mem_free(w->withdrawn_reason);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mutex);
    mem_free(w);
}

static int worker_fill(struct reshard_worker *w, const struct reshard_attach *a, struct err *e)
{
    w->model = mem_strdup(a->model);
    w->events = mem_calloc(EVENTS_MOST, sizeof *w->events);
    if (w->model == NULL || w->events == NULL)
        return err_set(e, RS_ENOMEM, "attach: out of memory");
    return worker_memory_new(w->client, a->live, a->n_live, a->shadow, a->n_shadow, &w->memory, e);
}

static int worker_new(struct reshard_client *c, const struct reshard_attach *a,
                      struct reshard_worker **ret, struct err *e)
{
    int r = check_attach(a, e);
    if (r != 0)
        return r;
    struct reshard_worker *w = mem_zalloc(sizeof *w);
    if (w == NULL)
        return err_set(e, RS_ENOMEM, "attach: out of memory");
    queue_init(&w->queue);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
    w->client = c;
    w->layout = a->layout->layout;
    w->side = a->side;
    w->receive = a->receive;
    w->rank = a->rank;
    w->device = a->device;
    w->accept_automatically = a->accept_automatically;
    w->live_version = a->live_version;
    w->shadow_version = a->shadow_version;
    w->state = WORKER_BROKEN;
    r = worker_fill(w, a, e);
    if (r != 0) {
        worker_free(w);
        return r;
    }
    *ret = w;
    return 0;
}

static void worker_enlist(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->client->mutex);
    queue_push(&w->client->workers, &w->queue);
    pthread_mutex_unlock(&w->client->mutex);
}

static void worker_delist(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->client->mutex);
    queue_remove(&w->queue);
    pthread_mutex_unlock(&w->client->mutex);
}

int reshard_attach(struct reshard_client *c, const struct reshard_attach *attach,
                   uint32_t timeout_ms, struct reshard_worker **ret_worker, struct reshard_error *e)
{
    struct err err = {0};
    struct reshard_worker *w = NULL;
    int r = worker_new(c, attach, &w, &err);
    if (r != 0)
        return client_give(e, r, &err);
    worker_enlist(w);
    struct attach_try t = {.worker = w};
    r = client_call(c, NULL, client_deadline(timeout_ms), try_attach, &t, &err);
    if (r == 0 && pthread_create(&w->thread, NULL, worker_run, w) != 0)
        r = err_set(&err, RS_EEXHAUSTED, "attach: no thread");
    if (r != 0) {
        worker_delist(w);
        worker_free(w);
        return client_give(e, r, &err);
    }
    w->started = true;
    *ret_worker = w;
    return client_give(e, 0, &err);
}

/* Says goodbye: the end of our side of the stream ends the lease at once, where a broken stream would
 * keep the rank taken for its grace time. A daemon that does not answer is left. Under the mutex. */
static void goodbye(struct reshard_worker *w)
{
    struct timespec at;
    client_timespec(deadline_after_ms(GOODBYE_MOST_MS), &at);
    int timed_out = w->state == WORKER_ATTACHED ? rpc_stream_half_close(w->stream, NULL) : 0;
    while (w->stream != NULL && timed_out == 0)
        timed_out = pthread_cond_clockwait(&w->changed, &w->mutex, CLOCK_MONOTONIC, &at);
    if (w->stream != NULL)
        rpc_stream_cancel(w->stream);
}

void reshard_detach(struct reshard_worker *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->mutex);
    w->closing = true;
    pthread_cond_broadcast(&w->changed);
    goodbye(w);
    pthread_mutex_unlock(&w->mutex);
    if (w->started)
        pthread_join(w->thread, NULL);
    worker_delist(w);
    worker_free(w);
}
