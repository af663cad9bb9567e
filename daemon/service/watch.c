/* Long polls and streams: who waits for a committed version or follows a refit. One change reads the state once. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "service/coordinator.h"

#include "base/banned.h"

enum { JITTER_PERCENT = 20, REPLY_MARGIN_MS = 20, REPLY_MARGIN_PERCENT = 10 };

/* How old this node's knowledge may be. */
static uint64_t knowledge_age_ns(const struct service *s)
{
    return s->coordinator != NULL ? 0 : s->peer != NULL ? peer_age_ns(s->peer) : UINT64_MAX;
}

static struct committed committed_read(const struct model *m, uint64_t worker)
{
    const struct lease *l = worker != 0 ? lease_find(m->service, worker) : NULL;
    return (struct committed){.model = m->name,
                              .version = m->committed.version,
                              .committed_wall_ns = m->committed.wall_ns,
                              .age_ns = knowledge_age_ns(m->service),
                              .held = l != NULL ? l->held : 0,
                              .applied = l != NULL ? l->applied : 0};
}

/* --- committed versions ------------------------------------------------------------------------- */

static void on_timer_freed(uv_handle_t *h)
{
    struct service *s = h->data;
    mem_free(h);
    service_handle_closed(s);
}

void poll_close(struct poll *p)
{
    if (p->service == NULL)
        return;
    struct service *s = p->service;
    queue_remove(&p->in);
    p->service = NULL;
    s->n_watchers--;
    if (p->timer != NULL) {
        ((uv_handle_t *)p->timer)->data = s;
        uv_close(p->timer, on_timer_freed);
        p->timer = NULL;
    }
}

/* The end of a long poll without news: what there is, or nothing. */
static void poll_expire(struct poll *p)
{
    const struct model *m = p->model;
    struct committed c = committed_read(m, p->worker);
    poll_close(p);
    if (c.version != 0)
        p->done(p, 0, NULL, &c);
    else
        p->done(p, RS_ENOTFOUND, "no version of this model is committed", NULL);
}

static void on_poll_timer(uv_timer_t *t)
{
    poll_expire(t->data);
}

/* Ends of polls are spread, so that clients who began together do not come back together; never past the call's own
 * deadline, where the answer would be lost. */
static uint64_t poll_wait_ms(struct service *s, uint32_t wait_ms, uint64_t call_deadline_ns)
{
    uint64_t spread = (uint64_t)wait_ms * JITTER_PERCENT / 100;
    uint64_t ms = wait_ms - spread + (spread > 0 ? random_next(&s->random) % (2 * spread + 1) : 0);
    uint64_t now = clock_mono_ns();
    if (call_deadline_ns == UINT64_MAX)
        return ms;
    uint64_t left = call_deadline_ns > now ? (call_deadline_ns - now) / 1000000 : 0;
    uint64_t margin = left * REPLY_MARGIN_PERCENT / 100;
    margin = margin > REPLY_MARGIN_MS ? margin : REPLY_MARGIN_MS;
    left = left > margin ? left - margin : 0;
    return ms < left ? ms : left;
}

static int poll_add(struct model *m, struct poll *p, struct err *e)
{
    struct service *s = m->service;
    if (s->n_watchers >= s->config->max_watchers)
        return err_set(e, RS_EEXHAUSTED, "%u watchers: max_watchers is reached", s->n_watchers);
    p->service = s;
    p->model = m;
    s->n_watchers++;
    queue_push(&m->polls, &p->in);
    return 0;
}

static int poll_arm(struct poll *p, uint32_t wait_ms, struct err *e)
{
    uv_timer_t *t = mem_zalloc(sizeof *t);
    if (t == NULL)
        return err_set(e, RS_ENOMEM, "no memory to wait");
    rs_assert(uv_timer_init(p->service->loop, t) == 0);
    p->service->n_handles++;
    t->data = p;
    p->timer = t;
    (void)uv_timer_start(t, on_poll_timer, poll_wait_ms(p->service, wait_ms, p->deadline_ns), 0);
    return 0;
}

static int poll_check(struct service *s, uint64_t client, const char *model, uint64_t worker,
                      struct model **ret, struct err *e)
{
    const struct lease *l = worker != 0 ? lease_find(s, worker) : NULL;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (worker != 0 && l == NULL)
        return err_set(e, RS_ENOTFOUND,
                       "worker %016" PRIx64 " is not attached here (any more); attach again",
                       worker);
    if (worker != 0 && l->client != client)
        return err_set(e, RS_EPERM, "worker %016" PRIx64 " belongs to another client", worker);
    if (knowledge_age_ns(s) == UINT64_MAX)
        return err_set(e, RS_EUNAVAIL, "nothing was heard of the coordinator yet; try again");
    *ret = model_find(s, model);
    return *ret != NULL ? 0 : err_set(e, RS_ENOTFOUND, "no model '%s'", model);
}

int op_get_committed(struct service *s, uint64_t client, const char *model, uint64_t newer_than,
                     uint32_t wait_ms, uint64_t worker, struct poll *p, struct err *e)
{
    struct model *m;
    p->service = NULL;
    int r = poll_check(s, client, model, worker, &m, e);
    if (r == RS_ENOTFOUND && worker == 0 && wait_ms > 0 && client != 0)
        r = model_open(s, model, &m, e); /* it may come while we wait */
    if (r != 0)
        return r;
    p->worker = worker;
    p->newer_than = newer_than;
    p->stream = false;
    p->model = m;
    if (wait_ms == 0 || m->committed.version > newer_than) {
        poll_expire(p);
        return 0;
    }
    r = poll_add(m, p, e);
    if (r == 0 && (r = poll_arm(p, wait_ms, e)) != 0)
        poll_close(p);
    return r;
}

int op_watch_committed(struct service *s, uint64_t client, const char *model, uint64_t worker,
                       struct poll *p, struct err *e)
{
    struct model *m;
    p->service = NULL;
    int r = poll_check(s, client, model, worker, &m, e);
    if (r == RS_ENOTFOUND && worker == 0 && client != 0)
        r = model_open(s, model, &m, e);
    if (r != 0)
        return r;
    p->worker = worker;
    p->newer_than = 0;
    p->stream = true;
    r = poll_add(m, p, e);
    if (r != 0 || m->committed.version == 0)
        return r;
    struct committed c = committed_read(m, worker);
    p->done(p, 0, NULL, &c);
    return 0;
}

void watch_committed(struct model *m)
{
    struct queue all;
    struct committed everybody = committed_read(m, 0);
    queue_init(&all);
    queue_move(&m->polls, &all);
    while (!queue_empty(&all)) {
        struct poll *p = container_of(queue_pop(&all), struct poll, in);
        struct committed own = p->worker != 0 ? committed_read(m, p->worker) : everybody;
        queue_push(&m->polls, &p->in);
        if (everybody.version <= p->newer_than)
            continue;
        if (!p->stream)
            poll_close(p);
        p->done(p, 0, NULL, &own);
    }
}

/* --- refits ------------------------------------------------------------------------------------- */

/* A version, or a rehearsal that borrows or has borrowed its number. */
static bool is_known(const struct refit *r, uint64_t version)
{
    const struct refit_version *v = r->in_flight;
    return refit_find_version(r, version) != NULL ||
           (v != NULL && v->kind == REFIT_KIND_REHEARSAL && v->version == version) ||
           (r->rehearsed.phase != REFIT_NONE && r->rehearsed.version == version);
}

int op_watch_refit(struct service *s, const char *model, uint64_t version, struct watcher *w,
                   struct err *e)
{
    w->service = NULL;
    if (s->stopping)
        return err_set(e, RS_EUNAVAIL, "the daemon is stopping");
    if (s->coordinator == NULL)
        return err_set(e, RS_EUNAVAIL, "only the coordinator, node %s, follows refits",
                       s->config->coordinator);
    struct decider *d = decider_find(s->coordinator, model);
    if (d == NULL || !is_known(d->refit, version))
        return err_set(e, RS_ENOTFOUND, "version %" PRIu64 " of model '%s' was never submitted",
                       version, model);
    if (s->n_watchers >= s->config->max_watchers)
        return err_set(e, RS_EEXHAUSTED, "%u watchers: max_watchers is reached", s->n_watchers);
    w->service = s;
    w->decider = d;
    w->version = version;
    s->n_watchers++;
    queue_push(&d->watchers, &w->in);
    w->changed(w, 0, NULL);
    return 0;
}

void watcher_close(struct watcher *w)
{
    if (w->service == NULL)
        return;
    queue_remove(&w->in);
    w->service->n_watchers--;
    w->service = NULL;
}

void watch_refit(struct decider *d, uint64_t version)
{
    queue_foreach_safe (q, tmp, &d->watchers) {
        struct watcher *w = container_of(q, struct watcher, in);
        if (w->version == version)
            w->changed(w, 0, NULL);
    }
}

void polls_close(struct model *m)
{
    while (!queue_empty(&m->polls)) {
        struct poll *p = container_of(m->polls.next, struct poll, in);
        poll_close(p);
        p->done(p, RS_EUNAVAIL, "the daemon is stopping", NULL);
    }
}

void watchers_close(struct decider *d)
{
    while (!queue_empty(&d->watchers)) {
        struct watcher *w = container_of(d->watchers.next, struct watcher, in);
        watcher_close(w);
        w->changed(w, RS_EUNAVAIL, "the daemon is stopping");
    }
}
