/* Device copies inside a node. What it promises stands in transport_local.h.
 *
 *   group:  WAITS ──▶ STARTED ──▶ PASSED ──▶ (over: on_done)
 *           │ the one before it   │ all its ends have met theirs,
 *           │ has passed          │ or were taken back (abort, failure)
 *
 * Threads: callers; the streams' (ends_done) and those of the transport behind (rest_done). `mutex`
 * guards all of it; it is held over calls of the transport behind and of devices, which never call back
 * from there, and let go for on_done. */
#include <string.h>

#include "base/mem.h"
#include "transport/transport_local_private.h"

#include "base/banned.h"

enum { LOCAL_MAX_DEVICES = 1024 };

static struct local *local_of(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct local, base);
}

static bool by_copy(const struct local *t, uint32_t device, const struct transport_message *m)
{
    return m->send ? local_is_pair(t, device, m->peer) : local_is_pair(t, m->peer, device);
}

void local_group_fail(struct group *g, int status, const char *text)
{
    if (g->status == 0)
        g->status = err_set(&g->err, status, "device %u: %s", g->device, text);
}

/* --- the way of a group ------------------------------------------------------------------------- */

void local_part_over(struct local *t, struct group *g)
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

void local_unlock(struct local *t)
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
    local_part_over(t, g);
    local_unlock(t);
}

/* Why a group can't begin, in the group. */
static bool may_start(struct local *t, struct group *g)
{
    struct port *port = &t->ports[g->device];
    if (t->aborted)
        local_group_fail(g, RS_ECANCELED, "the attempt was aborted");
    else if (port->failed != 0)
        local_group_fail(g, port->failed, "an earlier group of the attempt failed");
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
        local_post(t, &g->ends[i]);
    return 0;
}

static void pass(struct local *t, struct group *g)
{
    g->stage = PASSED;
    queue_remove(&g->link);
    if (g->n_ends == 0 && g->rest.n_messages > 0) {
        local_part_over(t, g);
        return;
    }
    int r = device_call(g->stream, ends_done, g);
    if (r == 0)
        return;
    local_group_fail(g, r, err_name(r));
    if (g->n_ends > 0)
        local_settle(t, g, r);
    local_part_over(t, g);
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
            local_group_fail(g, r, err_name(r));
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
        local_take_back(g);
        t->ports[g->device].failed = g->status;
    }
    advance(t);
    local_part_over(t, g);
    local_unlock(t);
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
    local_unlock(t);
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
        for (uint32_t i = 0; i < t->n_devices; i++) {
            t->ports[i].failed = 0;
            t->ports[i].counters.first_byte_ns = 0;
        }
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
    if (local_is_pair(t, device, peer) && local_is_pair(t, peer, device))
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
                local_group_fail(g, RS_ECANCELED, "the attempt was aborted");
            local_take_back(g);
        }
    }
    advance(t);
    if (t->behind != NULL)
        transport_abort(t->behind);
    local_unlock(t);
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
    if (own.first_byte_ns != 0 && (c.first_byte_ns == 0 || own.first_byte_ns < c.first_byte_ns))
        c.first_byte_ns = own.first_byte_ns;
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
            rs_assert(!local_is_pair(t, i, k) || (devices[i] != NULL && devices[k] != NULL));
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
