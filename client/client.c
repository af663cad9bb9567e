#include "client/client.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"

#include "base/banned.h"

enum { PAUSE_FIRST_MS = 10, PAUSE_MOST_MS = 1000, HELLO_MOST_MS = 5000, UNKNOWN_TRIES = 4 };

_Static_assert((int)RESHARD_EINVAL == (int)RS_EINVAL, "one list of codes");
_Static_assert((int)RESHARD_EUNAVAIL == (int)RS_EUNAVAIL, "one list of codes");
_Static_assert((int)RESHARD_EINTERNAL == (int)RS_EINTERNAL, "one list of codes");
_Static_assert((int)RESHARD_TEXT_BYTES >= (int)ERR_TEXT_BYTES, "a text fits");

const char *reshard_error_name(int code)
{
    return err_name(code);
}

int client_give(struct reshard_error *e, int code, const struct err *err)
{
    if (e == NULL)
        return code;
    e->code = code;
    const char *text = code == 0 ? "" : err_text(err, code);
    size_t n = strlen(text);
    memcpy(e->text, text, n + 1);
    return code;
}

uint64_t client_deadline(uint32_t timeout_ms)
{
    return deadline_after_ms(timeout_ms == 0 ? RESHARD_TIMEOUT_DEFAULT_MS : timeout_ms);
}

void client_timespec(uint64_t deadline_ns, struct timespec *ret)
{
    ret->tv_sec = (time_t)(deadline_ns / 1000000000);
    ret->tv_nsec = (long)(deadline_ns % 1000000000);
}

/* Doubling from PAUSE_FIRST_MS to PAUSE_MOST_MS, then half of it plus a random half, so that the
 * clients of a daemon that restarts do not come back all at once. */
static uint64_t pause_ns(unsigned n)
{
    uint64_t ms = PAUSE_FIRST_MS;
    while (n-- > 0 && ms < PAUSE_MOST_MS)
        ms *= 2;
    if (ms > PAUSE_MOST_MS)
        ms = PAUSE_MOST_MS;
    uint64_t half = ms * 500000;
    return half + random_id() % half;
}

bool client_pause(struct reshard_client *c, unsigned n, uint64_t deadline_ns)
{
    uint64_t until = clock_mono_ns() + pause_ns(n);
    if (until >= deadline_ns)
        return false;
    struct timespec at;
    client_timespec(until, &at);
    pthread_mutex_lock(&c->mutex);
    int r = 0;
    while (!c->closing && r == 0)
        r = pthread_cond_clockwait(&c->changed, &c->mutex, CLOCK_MONOTONIC, &at);
    bool go_on = !c->closing;
    pthread_mutex_unlock(&c->mutex);
    return go_on;
}

/* ---- the link ---- */

/* The current link if it lives, else NULL; a dead one is let go. */
static struct link *link_now(struct reshard_client *c)
{
    struct link *dead = NULL, *live = NULL;
    pthread_mutex_lock(&c->mutex);
    if (c->link != NULL && link_alive(c->link)) {
        live = link_ref(c->link);
    } else {
        dead = c->link;
        c->link = NULL;
    }
    pthread_mutex_unlock(&c->mutex);
    link_unref(dead);
    return live;
}

/* Opens one link and hands every segment over. Under the connect lock. */
static int link_make(struct reshard_client *c, uint64_t deadline_ns, struct link **ret,
                     struct err *e)
{
    uint64_t most = deadline_after_ms(HELLO_MOST_MS);
    struct link *l;
    int r = link_open(c->path, deadline_ns < most ? deadline_ns : most, &l, e);
    if (r != 0)
        return r;
    queue_foreach (q, &c->segments) {
        struct reshard_segment *s = container_of(q, struct reshard_segment, queue);
        r = segment_add(l, s, deadline_ns, e);
        if (r != 0) {
            link_unref(l);
            return err_prefix(e, r, "handing a segment of %llu bytes over again",
                              (unsigned long long)s->bytes);
        }
    }
    pthread_mutex_lock(&c->mutex);
    c->link = link_ref(l);
    c->n_links++;
    pthread_mutex_unlock(&c->mutex);
    *ret = l;
    return 0;
}

static bool link_worth_waiting(int code)
{
    return code == RS_EUNAVAIL || code == RS_EDEADLINE || code == RS_EIO || code == RS_EEXHAUSTED;
}

/* A mutex that is waited for with a deadline: made of a flag, since not every thread sanitizer knows
 * pthread_mutex_clocklock. */
int client_connect_lock(struct reshard_client *c, uint64_t deadline_ns, struct err *e)
{
    struct timespec at;
    client_timespec(deadline_ns, &at);
    int timed_out = 0;
    pthread_mutex_lock(&c->mutex);
    while (c->connecting && timed_out == 0)
        timed_out = pthread_cond_clockwait(&c->changed, &c->mutex, CLOCK_MONOTONIC, &at);
    bool mine = !c->connecting;
    if (mine)
        c->connecting = true;
    pthread_mutex_unlock(&c->mutex);
    return mine ? 0 : err_set(e, RS_EUNAVAIL, "no daemon at '%s' until the deadline", c->path);
}

void client_connect_unlock(struct reshard_client *c)
{
    pthread_mutex_lock(&c->mutex);
    c->connecting = false;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
}

static bool client_closing(struct reshard_client *c)
{
    pthread_mutex_lock(&c->mutex);
    bool closing = c->closing;
    pthread_mutex_unlock(&c->mutex);
    return closing;
}

int client_link(struct reshard_client *c, uint64_t look_until_ns, uint64_t deadline_ns,
                struct link **ret, struct err *e)
{
    struct link *l = link_now(c);
    if (l == NULL) {
        int r = client_connect_lock(c, look_until_ns, e);
        if (r != 0)
            return r;
        l = link_now(c); /* another thread may have made it meanwhile */
        for (unsigned n = 0; l == NULL; n++) {
            r = link_make(c, deadline_ns, &l, e);
            if (r != 0 && (!link_worth_waiting(r) || !client_pause(c, n, look_until_ns)))
                break;
        }
        client_connect_unlock(c);
        if (l == NULL)
            return client_closing(c) ? err_set(e, RS_ECANCELED, "the client is being closed") : r;
    }
    *ret = l;
    return 0;
}

/* ---- calls ---- */

bool client_retry(struct link *l, int code)
{
    if (code == RS_EUNAUTH)
        link_lose(l);
    return code == RS_EUNAUTH || code == RS_EUNAVAIL || code == RS_EPEER ||
           (code == RS_ECANCELED && !link_alive(l));
}

static int call_once(struct reshard_client *c, struct reshard_worker *w, uint64_t deadline_ns,
                     client_try fn, void *arg, bool *ret_again, struct err *e)
{
    struct link *l;
    uint64_t worker = 0;
    int r = w != NULL ? worker_hold(w, deadline_ns, &l, &worker, e)
                      : client_link(c, deadline_ns, deadline_ns, &l, e);
    *ret_again = false;
    if (r != 0)
        return r;
    r = fn(l, worker, deadline_ns, arg, e);
    if (r != 0)
        *ret_again = client_retry(l, r) ||
                     (w != NULL && (r == RS_ENOTFOUND || r == RS_EPERM) && worker_moved(w, worker));
    link_unref(l);
    return r;
}

int client_call(struct reshard_client *c, struct reshard_worker *w, uint64_t deadline_ns,
                client_try fn, void *arg, struct err *e)
{
    unsigned unknown = 0;
    for (unsigned n = 0;; n++) {
        bool again;
        int r = call_once(c, w, deadline_ns, fn, arg, &again, e);
        if (r == 0 || !again)
            return r;
        if (r == RS_EUNAUTH && ++unknown == UNKNOWN_TRIES)
            return r;
        if (!client_pause(c, n, deadline_ns))
            return r;
    }
}

/* ---- life ---- */

static void client_free(struct reshard_client *c)
{
    link_unref(c->link);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->mutex);
    mem_free(c->path);
    mem_free(c);
}

static struct reshard_client *client_new(const char *path)
{
    struct reshard_client *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return NULL;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    queue_init(&c->segments);
    queue_init(&c->workers);
    c->path = mem_strdup(path);
    if (c->path != NULL)
        return c;
    client_free(c);
    return NULL;
}

static const char *default_path(void)
{
    const char *path = getenv("RESHARD_SOCKET");
    return path != NULL && path[0] != '\0' ? path : RESHARD_SOCKET_DEFAULT;
}

int reshard_connect(const char *socket_path, uint32_t timeout_ms,
                    struct reshard_client **ret_client, struct reshard_error *e)
{
    struct err err = {0};
    struct reshard_client *c = client_new(socket_path != NULL ? socket_path : default_path());
    if (c == NULL)
        return client_give(e, err_set(&err, RS_ENOMEM, "client: out of memory"), &err);
    struct link *l;
    uint64_t deadline_ns = client_deadline(timeout_ms);
    int r = client_link(c, deadline_ns, deadline_ns, &l, &err);
    if (r != 0) {
        client_free(c);
        return client_give(e, r, &err);
    }
    link_unref(l);
    *ret_client = c;
    return client_give(e, 0, &err);
}

void reshard_close(struct reshard_client *c)
{
    if (c == NULL)
        return;
    pthread_mutex_lock(&c->mutex);
    c->closing = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    while (!queue_empty(&c->workers))
        reshard_detach(worker_of_queue(c->workers.next));
    while (!queue_empty(&c->segments))
        (void)reshard_segment_free(container_of(c->segments.next, struct reshard_segment, queue), 1,
                                   NULL);
    client_free(c);
}

uint64_t reshard_incarnation(struct reshard_client *c)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t incarnation = c->link != NULL ? link_incarnation(c->link) : 0;
    pthread_mutex_unlock(&c->mutex);
    return incarnation;
}

uint64_t reshard_reconnects(struct reshard_client *c)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t n = c->n_links - 1;
    pthread_mutex_unlock(&c->mutex);
    return n;
}
