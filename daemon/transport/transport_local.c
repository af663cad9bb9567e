/* Device copies inside a node. What it promises stands in transport_local.h.
 *
 *   group:  WAITS ──▶ STARTED ──▶ PASSED ──▶ (over: on_done)
 *           │ the one before it   │ all its ends have met theirs,
 *           │ has passed          │ or were taken back (abort, failure)
 *
 * Threads: callers; the streams' (ends_done) and those of the transport behind (rest_done). `mutex`
 * guards all of it; it is held over calls of the transport behind and of devices, which never call back
 * from there, and let go for on_done. */
#include "transport/transport_local.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

#include "base/crash.h"
#include "base/mem.h"
#include "base/queue.h"
#include "kernels/kernels_dtype.h"

#include "base/banned.h"

enum { LOCAL_MAX_DEVICES = 1024, COPIES = 8 };

enum stage { WAITS, STARTED, PASSED };

/* One end of a message that is copied. */
struct end {
    struct queue link; /* in its channel until the other end comes */
    struct group *group;
    const struct transport_message *what; /* the caller's group has it */
    struct device_event *done;            /* sends: the copy is */
    bool posted, met;
};

struct group {
    struct queue link; /* in its port until it has passed, then in `over` */
    struct local *t;
    struct transport_group *group; /* the caller's */
    struct device_stream *stream;
    struct device_event *ready; /* its turn on the stream has come; NULL: it has no ends */
    struct transport_group rest;
    struct transport_message *others; /* rest's */
    struct err err;
    struct queue hold; /* in `held` */
    enum stage stage;
    bool is_held;
    int status;
    uint32_t device;
    uint32_t n_ends, n_unmet;
    uint32_t n_parts; /* that are not over: its own way, the rest */
    struct end ends[];
};

/* A device. */
struct port {
    struct device *device;        /* NULL: not local */
    struct device_stream *copies; /* NULL: none yet, or it is `dying` */
    struct queue groups;          /* that have not passed, in their order */
    struct transport_counters counters;
    int failed;                  /* a group of this attempt failed: later ones do too */
    struct device_stream *dying; /* settle_main waits for what is on it, and ends it */
};

struct local {
    struct transport base;
    pthread_mutex_t mutex;
    struct transport *behind;
    struct port *ports;
    struct queue *channels; /* [from * n_devices + to]: ends without the other one */
    bool *pairs;
    struct queue over; /* groups that on_done is to be called for */
    struct queue held; /* groups that are not over before settle_main is through */
    bool settling;
    int why; /* it settled for the first time; 0: it has not */
    uint64_t attempt;
    uint32_t n_devices, n_groups; /* enqueued and not over */
    bool aborted;
};

static struct local *local_of(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct local, base);
}

static bool is_pair(const struct local *t, uint32_t from, uint32_t to)
{
    return from < t->n_devices && to < t->n_devices && t->pairs[(size_t)from * t->n_devices + to];
}

static bool by_copy(const struct local *t, uint32_t device, const struct transport_message *m)
{
    return m->send ? is_pair(t, device, m->peer) : is_pair(t, m->peer, device);
}

static struct queue *channel_of(struct local *t, const struct end *x)
{
    uint32_t here = x->group->device, peer = x->what->peer;
    size_t at =
        x->what->send ? (size_t)here * t->n_devices + peer : (size_t)peer * t->n_devices + here;
    return &t->channels[at];
}

/* The first reason stays. */
static void group_fail(struct group *g, int status, const char *text)
{
    if (g->status == 0)
        g->status = err_set(&g->err, status, "device %u: %s", g->device, text);
}

/* --- copies ------------------------------------------------------------------------------------- */

struct copies {
    struct device_stream *stream;
    uint32_t n;
    struct kernel_copy list[COPIES];
};

static int copies_flush(struct copies *c)
{
    int r = c->n > 0 ? device_copy(c->stream, c->list, c->n) : 0;
    c->n = 0;
    return r;
}

static int copies_add(struct copies *c, void *to, void *from, uint64_t bytes)
{
    c->list[c->n++] = (struct kernel_copy){.size = {bytes},
                                           .from = {from, {1}},
                                           .to = {{to, {1}}},
                                           .n_targets = 1,
                                           .n_dims = 1,
                                           .from_dtype = KERNEL_UINT8,
                                           .to_dtype = KERNEL_UINT8,
                                           .streaming = 1};
    return c->n == COPIES ? copies_flush(c) : 0;
}

/* Both may be in pieces, cut differently. */
static int copy_range(struct copies *c, const struct transport_message *to, uint64_t to_at,
                      const struct transport_message *from, uint64_t from_at, uint64_t bytes)
{
    int r = 0;
    for (uint64_t at = 0; at < bytes && r == 0;) {
        struct iovec a, b;
        rs_assert(transport_runs(to, to_at + at, bytes - at, &a, 1) == 1);
        rs_assert(transport_runs(from, from_at + at, bytes - at, &b, 1) == 1);
        uint64_t n = a.iov_len < b.iov_len ? a.iov_len : b.iov_len;
        r = copies_add(c, a.iov_base, b.iov_base, n);
        at += n;
    }
    return r;
}

/* Where tests have it so, wrong (base/crash.h). */
static int enqueue_copies(struct device_stream *stream, const struct transport_message *to,
                          const struct transport_message *from)
{
    struct copies c = {.stream = stream};
    uint64_t bytes = from->bytes, half = bytes / 2;
    int r;
    if (damage_due(DAMAGE_LOST_CHUNK))
        return 0;
    if (damage_due(DAMAGE_WRONG_ADDRESS)) {
        r = copy_range(&c, to, bytes - half, from, 0, half);
        if (r == 0)
            r = copy_range(&c, to, 0, from, half, bytes - half);
    } else {
        r = copy_range(&c, to, 0, from, 0, bytes);
    }
    return r == 0 ? copies_flush(&c) : r;
}

/* Between the turns of both groups and what comes behind them. *ret_begun: something of it may run. */
static int copy_message(struct local *t, struct end *send, struct end *receive, bool *ret_begun)
{
    struct device_stream *copies = t->ports[send->group->device].copies;
    int r = copies == NULL ? t->why : device_event_wait(copies, send->group->ready);
    if (r == 0)
        r = device_event_wait(copies, receive->group->ready);
    if (r != 0)
        return r;
    *ret_begun = true;
    r = enqueue_copies(copies, receive->what, send->what);
    if (r == 0)
        r = device_event_record(send->done, copies);
    if (r == 0)
        r = device_event_wait(send->group->stream, send->done);
    if (r == 0)
        r = device_event_wait(receive->group->stream, send->done);
    return r;
}

/* --- ends --------------------------------------------------------------------------------------- */

static bool agree(const struct end *a, const struct end *b)
{
    return a->what->bytes == b->what->bytes && a->what->network == b->what->network &&
           a->what->tag == b->what->tag;
}

static void disagree(struct end *send, struct end *receive)
{
    struct end *ends[2] = {send, receive};
    const struct transport_message *s = send->what, *r = receive->what;
    for (int i = 0; i < 2; i++) {
        char text[192];
        (void)snprintf(
            text, sizeof text,
            "peer device %u: %s: the sender's has %llu bytes, tag %u, the receiver's %llu "
            "bytes, tag %u%s",
            ends[i]->what->peer,
            s->bytes != r->bytes ? "messages of different sizes"
                                 : "another message of the same size",
            (unsigned long long)s->bytes, s->tag, (unsigned long long)r->bytes, r->tag,
            s->network == r->network ? "" : "; their tiers differ");
        group_fail(ends[i]->group, RS_EPROTO, text);
    }
}

static void part_over(struct local *t, struct group *g);
static void unlock(struct local *t);

static void *settle_main(void *arg)
{
    struct local *t = arg;
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (t->ports[i].dying != NULL)
            device_stream_free(t->ports[i].dying); /* waits for what is on it */
    (void)pthread_mutex_lock(&t->mutex);
    t->settling = false;
    for (uint32_t i = 0; i < t->n_devices; i++)
        t->ports[i].dying = NULL;
    for (struct queue *q; (q = queue_pop(&t->held)) != NULL;)
        part_over(t, container_of(q, struct group, hold));
    unlock(t);
    return NULL;
}

static int detached(void *(*fn)(void *), void *arg)
{
    pthread_t thread;
    pthread_attr_t attr;
    sigset_t all, before;
    rs_assert(pthread_attr_init(&attr) == 0);
    rs_assert(pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED) == 0);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&thread, &attr, fn, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attr);
    return r;
}

/* Copies of the group's may be under way, and their end can't be asked for: a thread waits for all that
 * is on the copy streams. None is added to meanwhile. */
static void settle(struct local *t, struct group *g, int why)
{
    if (g->is_held)
        return;
    g->is_held = true;
    g->n_parts++;
    queue_push(&t->held, &g->hold);
    if (t->settling)
        return;
    t->settling = true;
    t->why = t->why == 0 ? why : t->why;
    for (uint32_t i = 0; i < t->n_devices; i++) {
        t->ports[i].dying = t->ports[i].copies;
        t->ports[i].copies = NULL;
    }
    /* Without a thread those groups stay: it is not quiesced any more, and who waits for that ends the
     * process. */
    (void)detached(settle_main, t);
}

static void meet(struct local *t, struct end *send, struct end *receive)
{
    bool begun = false;
    send->met = receive->met = true;
    send->group->n_unmet--;
    receive->group->n_unmet--;
    int r = agree(send, receive) ? copy_message(t, send, receive, &begun) : RS_EPROTO;
    if (r == 0)
        return;
    if (begun) {
        settle(t, send->group, r);
        settle(t, receive->group, r);
    }
    if (r == RS_EPROTO)
        disagree(send, receive);
    group_fail(send->group, r, err_name(r));
    group_fail(receive->group, r, err_name(r));
    if (t->behind != NULL)
        transport_abort(t->behind); /* what goes on behind may be waited for in vain */
}

/* The n-th send meets the n-th receive. */
static void post(struct local *t, struct end *x)
{
    struct queue *channel = channel_of(t, x);
    struct end *first = queue_empty(channel) ? NULL : container_of(channel->next, struct end, link);
    x->posted = true;
    if (first == NULL || first->what->send == x->what->send) {
        queue_push(channel, &x->link);
        return;
    }
    queue_remove(&first->link);
    meet(t, x->what->send ? x : first, x->what->send ? first : x);
}

/* Its ends that have met none never will. */
static void take_back(struct group *g)
{
    for (uint32_t i = 0; i < g->n_ends; i++) {
        struct end *x = &g->ends[i];
        if (!x->posted || x->met)
            continue;
        queue_remove(&x->link);
        x->met = true;
        g->n_unmet--;
    }
}

/* --- the way of a group ------------------------------------------------------------------------- */

static void part_over(struct local *t, struct group *g)
{
    if (--g->n_parts > 0)
        return;
    if (g->status != 0)
        t->ports[g->device].failed = g->status;
    queue_push(&t->over, &g->link);
}

/* What a failed device has left out was left out in silence. */
static void look_at_devices(struct local *t, struct group *g)
{
    if (g->status == 0)
        g->status = device_error(t->ports[g->device].device, &g->err);
    for (uint32_t i = 0; i < g->n_ends && g->status == 0; i++)
        if (!g->ends[i].what->send)
            g->status = device_error(t->ports[g->ends[i].what->peer].device, &g->err);
}

/* Where tests have it so, wrong; only where the CPU can touch it. */
static void damage(const struct local *t, const struct group *g)
{
    if (strcmp(device_kind(t->ports[g->device].device), "host") != 0)
        return;
    for (uint32_t i = 0; i < g->n_ends; i++)
        if (!g->ends[i].what->send)
            transport_damage(g->ends[i].what, 0, g->ends[i].what->bytes);
}

static void count(struct transport_counters *c, const struct group *g)
{
    c->messages += g->n_ends;
    for (uint32_t i = 0; i < g->n_ends; i++) {
        const struct transport_message *m = g->ends[i].what;
        if (m->send)
            *(m->network ? &c->network_sent_bytes : &c->domain_sent_bytes) += m->bytes;
        else
            *(m->network ? &c->network_received_bytes : &c->domain_received_bytes) += m->bytes;
    }
}

static void group_free(struct group *g)
{
    for (uint32_t i = 0; i < g->n_ends; i++)
        if (g->ends[i].done != NULL)
            device_event_free(g->ends[i].done);
    if (g->ready != NULL)
        device_event_free(g->ready);
    mem_free(g->others);
    mem_free(g);
}

/* Lets the mutex go, and calls on_done of what is over. Nothing touches the transport afterwards. */
static void unlock(struct local *t)
{
    struct queue over;
    queue_init(&over);
    queue_move(&t->over, &over);
    queue_foreach (q, &over) {
        struct group *g = container_of(q, struct group, link);
        if (g->status == 0)
            count(&t->ports[g->device].counters, g);
        t->n_groups--;
    }
    (void)pthread_mutex_unlock(&t->mutex);
    for (struct queue *q; (q = queue_pop(&over)) != NULL;) {
        struct group *g = container_of(q, struct group, link);
        struct transport_group *group = g->group;
        struct err e = g->err;
        int status = g->status;
        group_free(g);
        group->on_done(group, status, &e);
    }
}

/* On the stream's thread: all copies of its messages are done. */
static void ends_done(void *arg)
{
    struct group *g = arg;
    struct local *t = g->t;
    (void)pthread_mutex_lock(&t->mutex);
    look_at_devices(t, g);
    if (g->status == 0)
        damage(t, g);
    part_over(t, g);
    unlock(t);
}

/* Why a group can't begin, in the group. */
static bool may_start(struct local *t, struct group *g)
{
    struct port *port = &t->ports[g->device];
    if (t->aborted)
        group_fail(g, RS_ECANCELED, "the attempt was aborted");
    else if (port->failed != 0)
        group_fail(g, port->failed, "an earlier group of the attempt failed");
    else
        g->status = device_error(port->device, &g->err);
    return g->status == 0;
}

/* Its turn: what goes on to the transport behind is given to it, its ends may meet theirs. */
static int start(struct local *t, struct group *g)
{
    int r = 0;
    g->stage = STARTED;
    if (g->ready != NULL)
        r = device_event_record(g->ready, g->stream);
    if (r == 0 && g->rest.n_messages > 0)
        r = transport_enqueue(t->behind, g->device, g->stream, &g->rest);
    if (r != 0)
        return r;
    g->n_parts += g->rest.n_messages > 0;
    g->n_unmet = g->n_ends;
    for (uint32_t i = 0; i < g->n_ends; i++)
        post(t, &g->ends[i]);
    return 0;
}

static void pass(struct local *t, struct group *g)
{
    g->stage = PASSED;
    queue_remove(&g->link);
    if (g->n_ends == 0 && g->rest.n_messages > 0) {
        part_over(t, g);
        return;
    }
    int r = device_call(g->stream, ends_done, g);
    if (r == 0)
        return;
    group_fail(g, r, err_name(r));
    if (g->n_ends > 0)
        settle(t, g, r);
    part_over(t, g);
}

/* One of the port's first group's steps, where one can be done. */
static bool step(struct local *t, struct port *port)
{
    struct group *g =
        queue_empty(&port->groups) ? NULL : container_of(port->groups.next, struct group, link);
    if (g == NULL || (g->stage == STARTED && g->n_unmet > 0))
        return false;
    if (g->stage == STARTED) {
        pass(t, g);
        return true;
    }
    if (may_start(t, g)) {
        int r = start(t, g);
        if (r != 0)
            group_fail(g, r, err_name(r));
    } else {
        g->stage = STARTED;
    }
    return true;
}

static void advance(struct local *t)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t i = 0; i < t->n_devices; i++)
            while (t->ports[i].device != NULL && step(t, &t->ports[i]))
                moved = true;
    }
}

/* On a thread of the transport behind. Where it failed nothing else of the group is waited for. */
static void rest_done(struct transport_group *rest, int status, const struct err *e)
{
    struct group *g = container_of(rest, struct group, rest);
    struct local *t = g->t;
    (void)pthread_mutex_lock(&t->mutex);
    if (status != 0 && g->status == 0) {
        g->status = status;
        g->err = *e;
    }
    if (g->status != 0) {
        take_back(g);
        t->ports[g->device].failed = g->status;
    }
    advance(t);
    part_over(t, g);
    unlock(t);
}

/* --- enqueueing --------------------------------------------------------------------------------- */

static bool valid(const struct local *t, uint32_t device, const struct transport_group *group)
{
    if (device >= t->n_devices || t->ports[device].device == NULL)
        return false;
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *m = &group->messages[i];
        bool copied = by_copy(t, device, m);
        if (m->peer >= t->n_devices || m->bytes == 0 || (!copied && t->behind == NULL) ||
            (copied && m->data == NULL && m->n_pieces == 0))
            return false;
    }
    return true;
}

static void deal_out(struct local *t, struct group *g)
{
    for (uint32_t i = 0; i < g->group->n_messages; i++) {
        const struct transport_message *m = &g->group->messages[i];
        if (!by_copy(t, g->device, m)) {
            g->others[g->rest.n_messages++] = *m;
            continue;
        }
        struct end *x = &g->ends[g->n_ends++];
        queue_init(&x->link);
        x->group = g;
        x->what = m;
    }
}

/* A port that sends by copies has a stream for them. */
static int open_stream(struct local *t, uint32_t device, const struct transport_group *group)
{
    struct port *port = &t->ports[device];
    bool sends = false;
    int r = 0;
    for (uint32_t i = 0; i < group->n_messages && !sends; i++)
        sends = group->messages[i].send && by_copy(t, device, &group->messages[i]);
    (void)pthread_mutex_lock(&t->mutex);
    if (sends && t->settling)
        r = t->why;
    else if (sends && port->copies == NULL)
        r = device_stream_new(port->device, "local", &port->copies, NULL);
    (void)pthread_mutex_unlock(&t->mutex);
    return r;
}

static int group_events(struct local *t, struct group *g)
{
    struct device *d = t->ports[g->device].device;
    int r = g->n_ends > 0 ? device_event_new(d, &g->ready) : 0;
    for (uint32_t i = 0; i < g->n_ends && r == 0; i++)
        if (g->ends[i].what->send)
            r = device_event_new(d, &g->ends[i].done);
    return r;
}

static int group_new(struct local *t, uint32_t device, struct device_stream *stream,
                     struct transport_group *group, struct group **ret)
{
    struct group *g = mem_zalloc(sizeof *g + (size_t)group->n_messages * sizeof g->ends[0]);
    if (g == NULL)
        return RS_ENOMEM;
    g->others = mem_calloc(group->n_messages + 1U, sizeof *g->others);
    if (g->others == NULL) {
        mem_free(g);
        return RS_ENOMEM;
    }
    queue_init(&g->link);
    queue_init(&g->hold);
    g->t = t;
    g->n_parts = 1;
    g->group = group;
    g->stream = stream;
    g->device = device;
    g->rest = (struct transport_group){.messages = g->others, .on_done = rest_done};
    deal_out(t, g);
    int r = group_events(t, g);
    if (r != 0)
        group_free(g);
    else
        *ret = g;
    return r;
}

/* At the end of its port; where it is the first its own start's errors are the caller's. */
static int admit(struct local *t, struct group *g)
{
    struct port *port = &t->ports[g->device];
    int r = 0;
    if (t->attempt == 0 || t->aborted)
        return t->attempt == 0 ? RS_EPRECOND : RS_ECANCELED;
    if (queue_empty(&port->groups) && may_start(t, g))
        r = start(t, g);
    if (r != 0)
        return r;
    t->n_groups++;
    queue_push(&port->groups, &g->link);
    advance(t);
    return 0;
}

static int local_enqueue(struct transport *base, uint32_t device, struct device_stream *stream,
                         struct transport_group *group)
{
    struct local *t = local_of(base);
    struct group *g;
    if (!valid(t, device, group))
        return RS_EINVAL;
    int r = open_stream(t, device, group);
    if (r == 0)
        r = group_new(t, device, stream, group, &g);
    if (r != 0)
        return r;
    (void)pthread_mutex_lock(&t->mutex);
    r = admit(t, g);
    unlock(t);
    if (r != 0)
        group_free(g);
    return r;
}

/* --- the transport ------------------------------------------------------------------------------ */

static int local_begin(struct transport *base, uint64_t attempt, struct err *e)
{
    struct local *t = local_of(base);
    int r = 0;
    (void)pthread_mutex_lock(&t->mutex);
    if (t->n_groups > 0)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not over: %u groups are left",
                    (unsigned long long)t->attempt, t->n_groups);
    else if (attempt <= t->attempt)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not above the last one, %llu",
                    (unsigned long long)attempt, (unsigned long long)t->attempt);
    if (r == 0 && t->behind != NULL)
        r = transport_begin(t->behind, attempt, e);
    if (r == 0) {
        t->attempt = attempt;
        t->aborted = false;
        for (uint32_t i = 0; i < t->n_devices; i++)
            t->ports[i].failed = 0;
    }
    (void)pthread_mutex_unlock(&t->mutex);
    return r;
}

static int local_connect(struct transport *base, struct transport_connect *c)
{
    const struct err none = {0};
    struct local *t = local_of(base);
    if (t->behind != NULL)
        return transport_connect(t->behind, c);
    c->on_done(c, 0, &none);
    return 0;
}

static bool local_takes_pieces(const struct transport *base, uint32_t device, uint32_t peer)
{
    const struct local *t = local_of(base);
    if (is_pair(t, device, peer) && is_pair(t, peer, device))
        return true;
    return t->behind != NULL && transport_takes_pieces(t->behind, device, peer);
}

static void local_abort(struct transport *base)
{
    struct local *t = local_of(base);
    (void)pthread_mutex_lock(&t->mutex);
    t->aborted = true;
    for (uint32_t i = 0; i < t->n_devices; i++) {
        queue_foreach (q, &t->ports[i].groups) {
            struct group *g = container_of(q, struct group, link);
            if (g->stage == STARTED && g->n_unmet > 0)
                group_fail(g, RS_ECANCELED, "the attempt was aborted");
            take_back(g);
        }
    }
    advance(t);
    if (t->behind != NULL)
        transport_abort(t->behind);
    unlock(t);
}

static bool local_quiesced(const struct transport *base)
{
    struct local *t = local_of(base);
    (void)pthread_mutex_lock(&t->mutex);
    bool quiesced = t->n_groups == 0;
    (void)pthread_mutex_unlock(&t->mutex);
    return quiesced && (t->behind == NULL || transport_quiesced(t->behind));
}

static struct transport_counters local_counters(const struct transport *base, uint32_t device)
{
    struct local *t = local_of(base);
    struct transport_counters c = {0}, own = {0};
    if (t->behind != NULL)
        c = transport_counters(t->behind, device);
    (void)pthread_mutex_lock(&t->mutex);
    if (device < t->n_devices)
        own = t->ports[device].counters;
    (void)pthread_mutex_unlock(&t->mutex);
    c.network_sent_bytes += own.network_sent_bytes;
    c.network_received_bytes += own.network_received_bytes;
    c.domain_sent_bytes += own.domain_sent_bytes;
    c.domain_received_bytes += own.domain_received_bytes;
    c.messages += own.messages;
    c.stale_frames += own.stale_frames;
    return c;
}

static void local_free(struct local *t)
{
    for (uint32_t i = 0; t->ports != NULL && i < t->n_devices; i++)
        if (t->ports[i].copies != NULL)
            device_stream_free(t->ports[i].copies);
    (void)pthread_mutex_destroy(&t->mutex);
    mem_free(t->ports);
    mem_free(t->channels);
    mem_free(t->pairs);
    mem_free(t);
}

static void local_close(struct transport *base)
{
    struct local *t = local_of(base);
    struct transport *behind = t->behind;
    rs_assert(t->n_groups == 0);
    local_free(t);
    transport_close(behind);
}

static const struct transport_ops local_ops = {
    .kind = "local",
    .takes_pieces = local_takes_pieces,
    .begin = local_begin,
    .connect = local_connect,
    .enqueue = local_enqueue,
    .abort = local_abort,
    .quiesced = local_quiesced,
    .counters = local_counters,
    .close = local_close,
};

static void init_ports(struct local *t, struct device *const *devices)
{
    for (uint32_t i = 0; i < t->n_devices; i++) {
        t->ports[i].device = devices[i];
        queue_init(&t->ports[i].groups);
        for (uint32_t k = 0; k < t->n_devices; k++) {
            queue_init(&t->channels[(size_t)i * t->n_devices + k]);
            rs_assert(!is_pair(t, i, k) || (devices[i] != NULL && devices[k] != NULL));
        }
    }
}

int transport_local_open(struct device *const *devices, const bool *pairs, uint32_t n_devices,
                         uint64_t epoch, struct transport *behind, struct transport **ret,
                         struct err *e)
{
    size_t n_pairs = (size_t)n_devices * n_devices;
    if (n_devices > LOCAL_MAX_DEVICES)
        return err_set(e, RS_EEXHAUSTED, "copies between %u devices: %d are the most", n_devices,
                       LOCAL_MAX_DEVICES);
    struct local *t = mem_zalloc(sizeof *t);
    if (t == NULL)
        return err_set(e, RS_ENOMEM, "copies between %u devices: out of memory", n_devices);
    rs_assert(pthread_mutex_init(&t->mutex, NULL) == 0);
    queue_init(&t->over);
    queue_init(&t->held);
    t->base.ops = &local_ops;
    t->base.epoch = epoch;
    t->behind = behind;
    t->n_devices = n_devices;
    t->ports = mem_calloc(n_devices, sizeof *t->ports);
    t->channels = mem_calloc(n_pairs, sizeof *t->channels);
    t->pairs = mem_calloc(n_pairs, sizeof *t->pairs);
    int r = t->ports == NULL || t->channels == NULL || t->pairs == NULL
                ? err_set(e, RS_ENOMEM, "copies between %u devices: out of memory", n_devices)
                : 0;
    if (r == 0) {
        memcpy(t->pairs, pairs, n_pairs * sizeof *t->pairs);
        init_ports(t, devices);
    }
    if (r != 0)
        local_free(t);
    else
        *ret = &t->base;
    return r;
}
