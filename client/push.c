/* Pushes of a source: which of them a publication belongs to, and giving one up for the whole side.
 *
 * The library numbers a worker's pushes of one version; the daemon sees by it whether a publication that comes after a
 * Withdraw is of the push that was withdrawn. */
#include <string.h>

#include "base/mem.h"
#include "client/worker.h"
#include "layout/layout.h"

#include "base/banned.h"

enum { REASON_MOST_BYTES = 512 };

/* What has come about this version is of an earlier push. Under the mutex. */
static void events_drop(struct reshard_worker *w, uint64_t version)
{
    size_t kept = 0;
    for (size_t i = 0; i < w->n_events; i++) {
        struct worker_event *ev = &w->events[(w->first_event + i) % EVENTS_MOST];
        bool drop = ev->version == version && ev->type != RESHARD_EVENT_EVICTED &&
                    ev->type != RESHARD_EVENT_REATTACHED;
        if (drop)
            mem_free(ev->reason);
        else
            w->events[(w->first_event + kept++) % EVENTS_MOST] = *ev;
    }
    w->n_events = kept;
}

uint32_t worker_push(const struct reshard_worker *w, uint64_t version)
{
    for (size_t i = 0; version != 0 && i < PUSHES_MOST; i++)
        if (w->pushes[i].version == version)
            return w->pushes[i].n;
    return 0;
}

/* Of a version that was pushed long ago it counts anew. */
static void push_count(struct reshard_worker *w, uint64_t version)
{
    struct worker_push now = {version, worker_push(w, version) + 1};
    size_t at = 0;
    while (at < PUSHES_MOST - 1 && w->pushes[at].version != version)
        at++;
    memmove(w->pushes + 1, w->pushes, at * sizeof *w->pushes);
    w->pushes[0] = now;
}

void reshard_push_begin(struct reshard_worker *w, uint64_t version)
{
    pthread_mutex_lock(&w->mutex);
    push_count(w, version);
    w->withdrawn_version = 0;
    events_drop(w, version);
    pthread_mutex_unlock(&w->mutex);
}

struct withdraw_try {
    uint64_t version;
    uint32_t push;
    const char *reason;
    bool again;
};

static int try_withdraw(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                        struct err *e)
{
    const struct withdraw_try *t = arg;
    return api_withdraw(link_channel(l), worker, t->version, t->push, t->reason, t->again,
                        deadline_ns, e);
}

/* How many bytes the character at s has that a daemon takes; 0: none that it does. */
static size_t printable(const char *s, size_t n)
{
    for (size_t length = 1; length <= 4 && length <= n; length++)
        if (layout_name_valid(s, length))
            return length;
    return 0;
}

/* As a daemon takes it: so many bytes of whole characters, on one line, '?' for what can't be printed. */
static void reason_clean(const char *reason, char to[REASON_MOST_BYTES + 1])
{
    size_t n = reason != NULL ? strnlen(reason, REASON_MOST_BYTES + 1) : 0;
    if (n > REASON_MOST_BYTES)
        for (n = REASON_MOST_BYTES; n > 0 && ((unsigned char)reason[n] & 0xC0) == 0x80;)
            n--;
    size_t out = 0;
    for (size_t i = 0; i < n;) {
        size_t length = printable(reason + i, n - i);
        if (length > 0) {
            memcpy(to + out, reason + i, length);
            out += length;
            i += length;
            continue;
        }
        to[out++] = (unsigned char)reason[i] < 0x20 || reason[i] == 0x7F ? ' ' : '?';
        for (i++; i < n && ((unsigned char)reason[i] & 0xC0) == 0x80;) /* the rest of it */
            i++;
    }
    to[out] = '\0';
}

/* For the daemons to come, from before the first is asked: it may end over it. */
static uint32_t withdraw_note(struct reshard_worker *w, uint64_t version, const char *reason)
{
    pthread_mutex_lock(&w->mutex);
    mem_free(w->withdrawn_reason);
    w->withdrawn_reason = mem_strdup(reason);
    w->withdrawn_version = version;
    uint32_t push = worker_push(w, version);
    pthread_mutex_unlock(&w->mutex);
    return push;
}

int reshard_withdraw(struct reshard_worker *w, uint64_t version, const char *reason,
                     uint32_t timeout_ms, struct reshard_error *e)
{
    struct err err = {0};
    char text[REASON_MOST_BYTES + 1];
    reason_clean(reason, text);
    struct withdraw_try t = {version, withdraw_note(w, version, text), text, false};
    int r = client_call(w->client, w, client_deadline(timeout_ms), try_withdraw, &t, &err);
    return client_give(e, r, &err);
}

void worker_withdraw_again(struct reshard_worker *w, uint64_t before, struct link *l,
                           uint64_t deadline_ns)
{
    pthread_mutex_lock(&w->mutex);
    struct withdraw_try t = {w->withdrawn_version, worker_push(w, w->withdrawn_version), NULL,
                             true};
    char *reason =
        t.version != 0 && w->withdrawn_reason != NULL ? mem_strdup(w->withdrawn_reason) : NULL;
    uint64_t id = w->id;
    pthread_mutex_unlock(&w->mutex);
    t.reason = reason;
    if (t.version != 0 &&
        id != before) /* where it fails, so does the link, or the daemon has nothing to say to us */
        (void)try_withdraw(l, id, deadline_ns, &t, NULL);
    mem_free(reason);
}
