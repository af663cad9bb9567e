/* GetCommitted, WatchCommitted, WatchRefit. */
#include <string.h>

#include "base/mem.h"
#include "service/api_common.h"

#include "base/banned.h"

struct api_poll {
    struct poll poll;
    struct rpc_call *call;
    struct service *service;
};

struct api_watcher {
    struct watcher watcher;
    struct rpc_call *call;
    struct service *service;
};

/* --- committed versions ------------------------------------------------------------------------- */

static void committed_done(struct poll *p, int code, const char *text, const struct committed *c)
{
    struct api_poll *x = container_of(p, struct api_poll, poll);
    Reshard__V1__Committed m = RESHARD__V1__COMMITTED__INIT;
    if (code != 0) {
        rpc_call_finish(x->call, code, text);
        return;
    }
    m.model = (char *)(uintptr_t)c->model;
    m.version = c->version;
    m.committed_wall_ns = c->committed_wall_ns;
    m.held = c->held;
    m.applied = c->applied;
    m.age_ns = c->age_ns;
    if (p->stream)
        api_send(x->call, &m.base);
    else
        api_finish(x->call, &m.base);
}

void api_poll_open(struct rpc_call *call)
{
    struct api_poll *x = mem_zalloc(sizeof *x);
    if (x == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    x->poll.done = committed_done;
    x->poll.deadline_ns = rpc_call_deadline_ns(call);
    x->call = call;
    x->service = rpc_call_context(call);
    rpc_call_set_arg(call, x);
}

void api_poll_end(struct rpc_call *call, int reason)
{
    struct api_poll *x = rpc_call_arg(call);
    (void)reason;
    if (x == NULL)
        return;
    poll_close(&x->poll);
    mem_free(x);
}

void api_get_committed(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct api_poll *x = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    uint64_t client;
    if (x == NULL)
        return;
    int r = api_identity(call, false, &client, &e);
    if (r == 0)
        r = api_decode(&reshard__v1__get_committed_request__descriptor, data, n_bytes, &request,
                       &e);
    const Reshard__V1__GetCommittedRequest *q = request;
    if (r == 0)
        r = api_name("model", q->model, &e);
    if (r == 0)
        r = op_get_committed(x->service, client, q->model, q->newer_than, q->wait_ms, q->worker,
                             &x->poll, &e);
    pb_free(request);
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_watch_committed(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct api_poll *x = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    uint64_t client;
    if (x == NULL)
        return;
    int r = api_identity(call, false, &client, &e);
    if (r == 0)
        r = api_decode(&reshard__v1__watch_committed_request__descriptor, data, n_bytes, &request,
                       &e);
    const Reshard__V1__WatchCommittedRequest *q = request;
    if (r == 0)
        r = api_name("model", q->model, &e);
    if (r == 0)
        r = op_watch_committed(x->service, client, q->model, q->worker, &x->poll, &e);
    pb_free(request);
    if (r != 0)
        api_finish_error(call, r, &e);
}

/* --- refits ------------------------------------------------------------------------------------- */

static void watcher_changed(struct watcher *w, int code, const char *text)
{
    struct api_watcher *x = container_of(w, struct api_watcher, watcher);
    struct api_refit_state s;
    if (code != 0 || !api_refit_state_find(&s, w->decider, w->version)) {
        watcher_close(w);
        rpc_call_finish(x->call, code != 0 ? code : RS_ENOTFOUND,
                        code != 0 ? text : "the version was never durable, or is no longer kept");
        return;
    }
    bool final = refit_phase_final((int)s.state.phase);
    api_send(x->call, &s.state.base);
    api_refit_state_close(&s);
    if (!final)
        return;
    watcher_close(w);
    rpc_call_finish(x->call, 0, NULL);
}

void api_watch_refit_open(struct rpc_call *call)
{
    struct api_watcher *x = mem_zalloc(sizeof *x);
    if (x == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    x->watcher.changed = watcher_changed;
    x->call = call;
    x->service = rpc_call_context(call);
    rpc_call_set_arg(call, x);
}

void api_watch_refit(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct api_watcher *x = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    uint64_t client;
    if (x == NULL)
        return;
    int r = api_identity(call, false, &client, &e);
    if (r == 0)
        r = api_decode(&reshard__v1__watch_refit_request__descriptor, data, n_bytes, &request, &e);
    const Reshard__V1__WatchRefitRequest *q = request;
    if (r == 0)
        r = api_name("model", q->model, &e);
    if (r == 0)
        r = op_watch_refit(x->service, q->model, q->version, &x->watcher, &e);
    pb_free(request);
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_watch_refit_end(struct rpc_call *call, int reason)
{
    struct api_watcher *x = rpc_call_arg(call);
    (void)reason;
    if (x == NULL)
        return;
    watcher_close(&x->watcher);
    mem_free(x);
}
