/* Calls of a worker: Publish, Ready, Accept, Reject, Apply and Skip, each tried over reconnects until its deadline (client_call). */
#include "client/api.h"
#include "client/client.h"
#include "client/cuda.h"
#include "client/worker.h"

#include "base/banned.h"

struct publish_try {
    uint64_t version;
    uint32_t push;
    const uint8_t *event;
    const struct reshard_expected *expected;
    size_t n_expected;
};

static int try_publish(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                       struct err *e)
{
    const struct publish_try *t = arg;
    return api_publish(link_channel(l), worker, t->version, t->push, t->event, t->expected,
                       t->n_expected, deadline_ns, e);
}

static int publish(struct reshard_worker *w, struct publish_try t, uint32_t timeout_ms,
                   struct err *e)
{
    pthread_mutex_lock(&w->mutex);
    t.push = worker_push(w, t.version);
    pthread_mutex_unlock(&w->mutex);
    int r = client_call(w->client, w, client_deadline(timeout_ms), try_publish, &t, e);
    if (r != 0)
        return r;
    pthread_mutex_lock(&w->mutex);
    w->live_version = w->published_version = t.version;
    pthread_mutex_unlock(&w->mutex);
    return 0;
}

int reshard_publish(struct reshard_worker *w, uint64_t version,
                    const struct reshard_expected *expected, size_t n_expected, uint32_t timeout_ms,
                    struct reshard_error *e)
{
    struct err err = {0};
    struct worker_memory *m = worker_memory_get(w);
    int r = m != NULL ? segments_synchronise(m->segments, m->n_segments, &err) : 0;
    worker_memory_put(w, m);
    if (r == 0)
        r = publish(w, (struct publish_try){version, 0, NULL, expected, n_expected}, timeout_ms,
                    &err);
    return client_give(e, r, &err);
}

int reshard_publish_after(struct reshard_worker *w, uint64_t version, void *cuda_event,
                          const struct reshard_expected *expected, size_t n_expected,
                          uint32_t timeout_ms, struct reshard_error *e)
{
    struct err err = {0};
    uint8_t event[CUDA_HANDLE_BYTES];
    int r = cuda_event_export(cuda_event, event, &err);
    if (r == 0)
        r = publish(w, (struct publish_try){version, 0, event, expected, n_expected}, timeout_ms,
                    &err);
    return client_give(e, r, &err);
}

static int try_ready(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                     struct err *e)
{
    return api_ready(link_channel(l), worker, *(const uint64_t *)arg, deadline_ns, e);
}

int reshard_ready(struct reshard_worker *w, uint64_t version, uint32_t timeout_ms,
                  struct reshard_error *e)
{
    struct err err = {0};
    pthread_mutex_lock(&w->mutex);
    uint64_t before = w->opened_version;
    w->opened_version = version; /* may be torn from here on, whatever the answer */
    pthread_mutex_unlock(&w->mutex);
    int r = client_call(w->client, w, client_deadline(timeout_ms), try_ready, &version, &err);
    if (r != 0 && err_class(r) == ERR_CALLER) { /* refused: nobody writes */
        pthread_mutex_lock(&w->mutex);
        w->opened_version = before;
        pthread_mutex_unlock(&w->mutex);
    }
    return client_give(e, r, &err);
}

struct verdict_try {
    uint64_t version, attempt;
    bool reject;
    const char *reason;
};

static int try_verdict(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                       struct err *e)
{
    const struct verdict_try *t = arg;
    return api_accept(link_channel(l), worker, t->version, t->attempt, t->reject, t->reason,
                      deadline_ns, e);
}

static int verdict(struct reshard_worker *w, struct verdict_try *t, uint32_t timeout_ms,
                   struct reshard_error *e)
{
    struct err err = {0};
    int r = client_call(w->client, w, client_deadline(timeout_ms), try_verdict, t, &err);
    return client_give(e, r, &err);
}

int reshard_accept(struct reshard_worker *w, uint64_t version, uint64_t attempt,
                   uint32_t timeout_ms, struct reshard_error *e)
{
    struct verdict_try t = {.version = version, .attempt = attempt};
    return verdict(w, &t, timeout_ms, e);
}

int reshard_reject(struct reshard_worker *w, uint64_t version, uint64_t attempt, const char *reason,
                   uint32_t timeout_ms, struct reshard_error *e)
{
    struct verdict_try t = {version, attempt, true, reason != NULL ? reason : "rejected"};
    return verdict(w, &t, timeout_ms, e);
}

struct apply_try {
    uint64_t version;
    bool skip;
    uint64_t applied, elapsed_ns;
};

static int try_apply(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                     struct err *e)
{
    struct apply_try *t = arg;
    return api_apply(link_channel(l), worker, t->version, t->skip, deadline_ns, &t->applied,
                     &t->elapsed_ns, e);
}

static int apply(struct reshard_worker *w, struct apply_try *t, uint32_t timeout_ms, struct err *e)
{
    pthread_mutex_lock(&w->mutex);
    uint64_t before = w->opened_version;
    w->opened_version = t->skip ? before : t->version;
    pthread_mutex_unlock(&w->mutex);
    int r = client_call(w->client, w, client_deadline(timeout_ms), try_apply, t, e);
    if (r != 0 && err_class(r) != ERR_CALLER)
        return r; /* it may have begun */
    pthread_mutex_lock(&w->mutex);
    w->opened_version = r == 0 && !t->skip ? 0 : before;
    if (r == 0)
        w->applied = w->live_version = t->applied;
    pthread_mutex_unlock(&w->mutex);
    return r;
}

int reshard_apply(struct reshard_worker *w, uint64_t version, uint32_t timeout_ms,
                  uint64_t *ret_elapsed_ns, struct reshard_error *e)
{
    struct err err = {0};
    struct apply_try t = {.version = version};
    int r = apply(w, &t, timeout_ms, &err);
    if (r == 0 && ret_elapsed_ns != NULL)
        *ret_elapsed_ns = t.elapsed_ns;
    return client_give(e, r, &err);
}

int reshard_skip(struct reshard_worker *w, uint64_t version, uint32_t timeout_ms,
                 struct reshard_error *e)
{
    struct err err = {0};
    struct apply_try t = {.version = version, .skip = true};
    return client_give(e, apply(w, &t, timeout_ms, &err), &err);
}
