/* Submitting a version, waiting for it, and hearing of committed ones. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "client/api.h"
#include "client/client.h"

#include "base/banned.h"

const char *reshard_phase_name(enum reshard_phase phase)
{
    static const char *const names[] = {
        [RESHARD_PHASE_NONE] = "none",           [RESHARD_SUBMITTED] = "submitted",
        [RESHARD_PLANNED] = "planned",           [RESHARD_PREPARED] = "prepared",
        [RESHARD_TRANSFERRING] = "transferring", [RESHARD_STAGED] = "staged",
        [RESHARD_ACCEPTING] = "accepting",       [RESHARD_COMMITTED] = "committed",
        [RESHARD_ABORTING] = "aborting",         [RESHARD_ABORTED] = "aborted",
        [RESHARD_SUPERSEDED] = "superseded",     [RESHARD_REHEARSED] = "rehearsed",
    };
    size_t i = (size_t)phase;
    return i < sizeof names / sizeof *names ? names[i] : "unknown";
}

/* ---- submit, mark ---- */

struct submit_try {
    const char *model;
    uint64_t version;
    const char *request_id;
    const struct reshard_submit *options;
    uint64_t attempt;
};

static int try_submit(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                      struct err *e)
{
    (void)worker;
    struct submit_try *t = arg;
    enum reshard_phase phase;
    return api_submit(link_channel(l), t->model, t->version, t->request_id, t->options, deadline_ns,
                      &t->attempt, &phase, e);
}

int reshard_submit(struct reshard_client *c, const char *model, uint64_t version,
                   const struct reshard_submit *options, uint32_t timeout_ms, uint64_t *ret_attempt,
                   struct reshard_error *e)
{
    struct err err = {0};
    char made[40];
    (void)snprintf(made, sizeof made, "%016llx%016llx", (unsigned long long)random_id(),
                   (unsigned long long)random_id());
    bool given = options != NULL && options->request_id != NULL;
    struct submit_try t = {model, version, given ? options->request_id : made, options, 0};
    int r = client_call(c, NULL, client_deadline(timeout_ms), try_submit, &t, &err);
    if (r == 0 && ret_attempt != NULL)
        *ret_attempt = t.attempt;
    return client_give(e, r, &err);
}

struct mark_try {
    const char *model;
    uint64_t version;
    const char *name;
};

static int try_mark(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg, struct err *e)
{
    const struct mark_try *t = arg;
    return api_mark(link_channel(l), t->model, t->version, t->name, worker, deadline_ns, e);
}

int reshard_mark(struct reshard_client *c, const char *model, uint64_t version, const char *name,
                 struct reshard_worker *worker, uint32_t timeout_ms, struct reshard_error *e)
{
    struct err err = {0};
    struct mark_try t = {model, version, name};
    int r = client_call(c, worker, client_deadline(timeout_ms), try_mark, &t, &err);
    return client_give(e, r, &err);
}

/* ---- waiting for a version ---- */

struct wait_try {
    const char *model;
    uint64_t version;
    enum reshard_until until;
    reshard_progress progress;
    void *arg;
    struct reshard_state state; /* the last seen; version 0: none yet */
};

static bool phase_final(enum reshard_phase p)
{
    return p == RESHARD_COMMITTED || p == RESHARD_ABORTED || p == RESHARD_SUPERSEDED ||
           p == RESHARD_REHEARSED;
}

/* True where this state ends the wait, then *ret_code and e are its outcome. */
static bool wait_over(const struct wait_try *t, int *ret_code, struct err *e)
{
    const struct reshard_state *s = &t->state;
    *ret_code = 0;
    if (t->until == RESHARD_UNTIL_FINAL || s->phase == RESHARD_COMMITTED)
        return phase_final(s->phase);
    if (s->phase == RESHARD_ABORTED)
        *ret_code = err_set(e, RS_EABORTED, "model '%s' version %llu aborted: %s", t->model,
                            (unsigned long long)t->version, s->reason);
    else if (s->phase == RESHARD_SUPERSEDED)
        *ret_code = err_set(e, RS_EPRECOND, "model '%s' version %llu was superseded by a newer one",
                            t->model, (unsigned long long)t->version);
    else if (s->phase == RESHARD_REHEARSED && t->until == RESHARD_UNTIL_COMMITTED)
        *ret_code =
            err_set(e, RS_EPRECOND, "model '%s' version %llu was a rehearsal: nothing is committed",
                    t->model, (unsigned long long)t->version);
    else if (s->phase == RESHARD_REHEARSED)
        return true;
    else
        return t->until == RESHARD_UNTIL_RELEASED && s->source_released;
    return true;
}

static int wait_too_long(const struct wait_try *t, struct err *e)
{
    const struct reshard_state *s = &t->state;
    if (s->version == 0)
        return err_set(e, RS_EDEADLINE,
                       "the daemon said nothing of model '%s' version %llu in time", t->model,
                       (unsigned long long)t->version);
    return err_set(e, RS_EDEADLINE, "model '%s' version %llu is still %s%s%.700s", t->model,
                   (unsigned long long)t->version, reshard_phase_name(s->phase),
                   s->waiting_for[0] != '\0' ? ", waiting for " : "", s->waiting_for);
}

static int wait_states(struct rpc_stream *stream, uint64_t deadline_ns, struct wait_try *t,
                       struct err *e)
{
    for (;;) {
        uint32_t left = deadline_left_ms(deadline_ns);
        int r = left == 0 ? RS_EDEADLINE : api_refit_state(stream, left, &t->state, e);
        if (r == RS_EDEADLINE)
            return wait_too_long(t, e);
        if (r == 1)
            return err_set(e, RS_EUNAVAIL, "the daemon ended the watch of version %llu in phase %s",
                           (unsigned long long)t->version, reshard_phase_name(t->state.phase));
        if (r != 0)
            return r;
        if (t->progress != NULL && t->progress(&t->state, t->arg) != 0)
            return err_set(e, RS_ECANCELED, "the wait was ended by its caller");
        if (wait_over(t, &r, e))
            return r;
    }
}

static int try_wait(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg, struct err *e)
{
    (void)worker;
    struct wait_try *t = arg;
    struct rpc_stream *stream;
    int r = api_watch_refit(link_channel(l), t->model, t->version, deadline_ns, &stream, e);
    if (r != 0)
        return r;
    r = wait_states(stream, deadline_ns, t, e);
    rpc_stream_close(stream);
    return r;
}

int reshard_wait(struct reshard_client *c, const char *model, uint64_t version,
                 enum reshard_until until, reshard_progress progress, void *arg,
                 uint32_t timeout_ms, struct reshard_state *ret_state, struct reshard_error *e)
{
    struct err err = {0};
    struct wait_try t = {model, version, until, progress, arg, {0}};
    int r = client_call(c, NULL, client_deadline(timeout_ms), try_wait, &t, &err);
    if (ret_state != NULL && t.state.version != 0)
        *ret_state = t.state;
    return client_give(e, r, &err);
}

/* ---- committed versions ---- */

struct committed_try {
    const char *model;
    uint64_t newer_than;
    uint64_t wait_until_ns;
    uint64_t timeout_ns; /* beyond the wait */
    struct reshard_committed committed;
};

static int try_committed(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                         struct err *e)
{
    struct committed_try *t = arg;
    return api_get_committed(link_channel(l), t->model, t->newer_than,
                             deadline_left_ms(t->wait_until_ns), worker, deadline_ns, &t->committed,
                             e);
}

int reshard_committed(struct reshard_client *c, const char *model, uint64_t newer_than,
                      uint32_t wait_ms, struct reshard_worker *worker, uint32_t timeout_ms,
                      struct reshard_committed *ret_committed, struct reshard_error *e)
{
    struct err err = {0};
    struct committed_try t = {
        .model = model, .newer_than = newer_than, .wait_until_ns = deadline_after_ms(wait_ms)};
    uint64_t deadline = client_deadline(timeout_ms) + (uint64_t)wait_ms * 1000000;
    int r = client_call(c, worker, deadline, try_committed, &t, &err);
    if (r == 0)
        *ret_committed = t.committed;
    return client_give(e, r, &err);
}

struct watch_try {
    const char *model;
    int (*fn)(const struct reshard_committed *committed, void *arg);
    void *arg;
    uint64_t seen;
};

static int watch_versions(struct rpc_stream *stream, uint64_t deadline_ns, struct watch_try *t,
                          struct err *e)
{
    for (;;) {
        struct reshard_committed committed;
        uint32_t left = deadline_left_ms(deadline_ns);
        int r = left == 0 ? err_set(e, RS_EDEADLINE, "the watch's time is over")
                          : api_next_committed(stream, left, &committed, e);
        if (r == 1)
            return err_set(e, RS_EUNAVAIL, "the daemon ended the watch");
        if (r != 0)
            return r;
        if (committed.version <= t->seen) /* told again after a reconnect */
            continue;
        t->seen = committed.version;
        if (t->fn(&committed, t->arg) != 0)
            return 0;
    }
}

static int try_watch(struct link *l, uint64_t worker, uint64_t deadline_ns, void *arg,
                     struct err *e)
{
    struct watch_try *t = arg;
    struct rpc_stream *stream;
    int r = api_watch_committed(link_channel(l), t->model, worker, deadline_ns, &stream, e);
    if (r != 0)
        return r;
    r = watch_versions(stream, deadline_ns, t, e);
    rpc_stream_close(stream);
    return r;
}

int reshard_watch(struct reshard_client *c, const char *model, struct reshard_worker *worker,
                  uint32_t timeout_ms,
                  int (*fn)(const struct reshard_committed *committed, void *arg), void *arg,
                  struct reshard_error *e)
{
    struct err err = {0};
    struct watch_try t = {model, fn, arg, 0};
    int r = client_call(c, worker, client_deadline(timeout_ms), try_watch, &t, &err);
    return client_give(e, r, &err);
}
