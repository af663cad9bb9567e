/* A worker whose engine lets the memory of its weights go, and takes new memory later.
 *
 * Asleep is a worker without memory (worker.memory NULL): it keeps its stream, and where that breaks its thread attaches it
 * again as a sleeper. It wakes by a new attach, made on the caller's thread; the old stream ends then, and the worker's thread
 * goes on with the new one (worker.next). */
#include "client/worker.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

#include "base/banned.h"

/* … until its thread has got what that brought. Under the mutex. */
static bool is_being_woken(const struct reshard_worker *w)
{
    return w->waking || (w->next.stream != NULL && w->state != WORKER_OVER && !w->closing);
}

/* Gives what the worker was bound to, counted, or NULL. From here on it attaches again without memory only. A wake that is under
 * way is waited for: what it brings is what goes to sleep. */
static int sleep_begin(struct reshard_worker *w, uint64_t deadline_ns, struct worker_memory **ret,
                       struct err *e)
{
    struct timespec at;
    client_timespec(deadline_ns, &at);
    int timed_out = 0;
    pthread_mutex_lock(&w->mutex);
    while (is_being_woken(w) && timed_out == 0)
        timed_out = pthread_cond_clockwait(&w->changed, &w->mutex, CLOCK_MONOTONIC, &at);
    int r =
        is_being_woken(w) ? err_set(e, RS_EDEADLINE, "sleep: the worker is being woken still") : 0;
    if (r == 0) {
        w->sleeping++;
        *ret = w->memory;
        w->memory = NULL;
    }
    pthread_mutex_unlock(&w->mutex);
    return r;
}

static void sleep_end(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->mutex);
    w->sleeping--;
    pthread_mutex_unlock(&w->mutex);
}

static void memory_give(struct reshard_worker *w, struct worker_memory *m)
{
    pthread_mutex_lock(&w->mutex);
    w->memory = m;
    pthread_mutex_unlock(&w->mutex);
}

static void account_nothing(struct reshard_worker *w)
{
    pthread_mutex_lock(&w->mutex);
    w->published_version = 0;
    w->held = w->applied = w->live_version = w->shadow_version = w->opened_version = 0;
    pthread_mutex_unlock(&w->mutex);
}

static int try_sleep(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                     struct err *e)
{
    (void)arg;
    return api_sleep(link_channel(l), worker, deadline_ns, e);
}

int reshard_sleep(struct reshard_worker *w, uint32_t timeout_ms, struct reshard_error *e)
{
    struct err err = {0};
    struct worker_memory *m = NULL;
    uint64_t deadline = client_deadline(timeout_ms);
    int r = sleep_begin(w, deadline, &m, &err);
    if (r != 0)
        return client_give(e, r, &err);
    r = client_call(w->client, w, deadline, try_sleep, NULL, &err);
    if (r == 0) {
        account_nothing(w);
        worker_memory_put(w, m);
    } else if (m != NULL) {
        memory_give(w, m); /* it may be mapped still */
    }
    if (r == RS_EDEADLINE)
        (void)err_prefix(
            &err, r,
            "sleep: the memory may be in use still, as that of a version that is being "
            "accepted is until it is decided; ask again, and unmap nothing till then");
    sleep_end(w);
    return client_give(e, r, &err);
}

/* --- waking ------------------------------------------------------------------------------------- */

struct wake_try {
    struct reshard_worker *worker;
    const struct worker_memory *memory;
    struct worker_attached next;
};

static int try_wake(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg, struct err *e)
{
    struct wake_try *t = arg;
    (void)worker;
    int r = worker_attach_on(t->worker, t->memory, l, 0, deadline_ns, &t->next.stream,
                             &t->next.what, e);
    if (r == 0)
        t->next.link = link_ref(l);
    return r;
}

static int wake_begin(struct reshard_worker *w, struct err *e)
{
    pthread_mutex_lock(&w->mutex);
    int r = w->state == WORKER_OVER
                ? err_set(e, RS_EPRECOND, "the worker's lease is over: %s; attach anew",
                          w->over_reason != NULL ? w->over_reason : "evicted")
            : w->sleeping > 0   ? err_set(e, RS_EPRECOND, "the worker is still going to sleep")
            : w->memory != NULL ? err_set(e, RS_EPRECOND, "the worker is not asleep")
            : w->waking         ? err_set(e, RS_EPRECOND, "the worker is being woken already")
                                : 0;
    w->waking = w->waking || r == 0;
    pthread_mutex_unlock(&w->mutex);
    return r;
}

/* Hands the new stream to the worker's thread, and waits until it has it; t->next.stream NULL: there is none. */
static void wake_end(struct reshard_worker *w, struct wake_try *t, struct worker_memory *m)
{
    pthread_mutex_lock(&w->mutex);
    if (t->next.stream != NULL) {
        w->memory = m;
        w->next = t->next;
        if (w->stream != NULL)
            rpc_stream_cancel(w->stream);
    }
    w->waking = false;
    pthread_cond_broadcast(&w->changed);
    while (w->next.stream != NULL && w->state != WORKER_OVER && !w->closing)
        pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

int reshard_wake(struct reshard_worker *w, const struct reshard_piece *live, size_t n_live,
                 const struct reshard_piece *shadow, size_t n_shadow, uint32_t timeout_ms,
                 struct reshard_error *e)
{
    struct err err = {0};
    struct worker_memory *m = NULL;
    int r = n_shadow > 0 && w->receive != RESHARD_RECEIVE_STAGED
                ? err_set(&err, RS_EINVAL, "wake: only staged destinations have shadow memory")
                : wake_begin(w, &err);
    if (r != 0)
        return client_give(e, r, &err);
    struct wake_try t = {.worker = w};
    r = worker_memory_new(w->client, live, n_live, shadow, n_shadow, &m, &err);
    t.memory = m;
    if (r == 0)
        r = client_call(w->client, NULL, client_deadline(timeout_ms), try_wake, &t, &err);
    wake_end(w, &t, m);
    if (r != 0)
        worker_memory_put(w, m);
    return client_give(e, r, &err);
}
