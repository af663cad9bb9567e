/* The in-memory twin: devices of one process, the receiving stream's thread copies.
 *
 * A group runs on its stream's thread. It posts its messages into the channel of each (from, to),
 * where the n-th send meets the n-th receive, and ends when all are through. The receiving side
 * copies chunk by chunk and paces itself: each port (a device's egress or ingress of one tier) is
 * reserved for a chunk's time, and the chunk lands when both of its ports have passed it. All state
 * is under one mutex; only the copying itself is outside, with the message marked busy, so that the
 * sending group can't end before the reader of its buffer has let go. */
#include "transport/transport.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#include "base/clock.h"
#include "base/crash.h"
#include "base/mem.h"
#include "base/queue.h"
#include "base/random.h"
#include "transport/pace.h"

#include "base/banned.h"

enum {
    MEM_MAX_DEVICES = 1024, /* channels are n * n */
    MEM_CHUNK_BYTES = 1 << 20
};

struct mem_group;

/* One end of a message. `link` is in its channel until it is matched. */
struct mem_message {
    struct queue link;
    struct mem_group *group;
    struct mem_message *peer;
    const struct transport_message *from; /* the group's */
    uint64_t bytes;
    uint64_t at;            /* receives: landed so far */
    uint64_t chunk_bytes;   /* receives: reserved, 0: nothing */
    uint64_t due_ns;        /* receives: when the reserved chunk is there */
    uint64_t not_before_ns; /* seeded delay */
    uint32_t peer_device, tag;
    bool send, network, posted, done, busy;
};

struct mem_group {
    struct queue link; /* in mem.running once started: lets abort wake it */
    struct transport_group *group;
    struct mem *mem;
    pthread_cond_t changed;
    struct err err;
    uint64_t attempt;
    uint32_t device;
    uint32_t n_messages, n_open;
    int status;
    struct mem_message messages[];
};

struct mem_port {
    struct transport_counters counters;
    struct pace pace;
    uint64_t random;
    uint64_t n_posted;
    int failed; /* a group of this attempt failed: later ones do too */
    bool takes_part;
};

struct mem_channel {
    struct queue sends, receives; /* waiting for the other end */
};

struct mem {
    struct transport base;
    pthread_mutex_t mutex;
    struct transport_mem_options options;
    struct mem_port *ports;
    struct mem_channel *channels; /* [from * n + to] */
    struct queue running;         /* groups that have started */
    uint64_t attempt;
    uint32_t n_devices;
    uint32_t n_groups; /* enqueued and not over */
    bool aborted;
};

static struct mem *mem_of(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct mem, base);
}

static void wait_until(struct mem *m, struct mem_group *g, uint64_t until_ns)
{
    if (until_ns == UINT64_MAX) {
        (void)pthread_cond_wait(&g->changed, &m->mutex);
        return;
    }
    struct timespec t = {.tv_sec = (time_t)(until_ns / 1000000000U),
                         .tv_nsec = (long)(until_ns % 1000000000U)};
    (void)pthread_cond_timedwait(&g->changed, &m->mutex, &t);
}

static void group_fail(struct mem_group *g, int status, const char *text, uint32_t peer)
{
    if (g->status != 0)
        return;
    g->status = err_set(&g->err, status, "device %u, peer device %u: %s", g->device, peer, text);
    g->mem->ports[g->device].failed = status;
    (void)pthread_cond_signal(&g->changed);
}

/* --- matching --------------------------------------------------------------------------------- */

static void check_match(struct mem_message *a, struct mem_message *b)
{
    if (a->bytes == b->bytes && a->network == b->network && a->tag == b->tag)
        return;
    char text[128];
    const struct mem_message *send = a->send ? a : b, *receive = a->send ? b : a;
    (void)snprintf(text, sizeof(text), "the sender's message has %llu bytes, the receiver's %llu%s",
                   (unsigned long long)send->bytes, (unsigned long long)receive->bytes,
                   a->network != b->network ? ", and their tiers differ"
                   : a->tag != b->tag       ? ", and it is another message"
                                            : "");
    group_fail(a->group, RS_EPROTO, text, b->group->device);
    group_fail(b->group, RS_EPROTO, text, a->group->device);
}

static void post(struct mem *m, struct mem_message *x)
{
    uint32_t from = x->send ? x->group->device : x->peer_device;
    uint32_t to = x->send ? x->peer_device : x->group->device;
    struct mem_channel *c = &m->channels[(size_t)from * m->n_devices + to];
    x->posted = true;
    struct queue *other = queue_pop(x->send ? &c->receives : &c->sends);
    if (other == NULL) {
        queue_push(x->send ? &c->sends : &c->receives, &x->link);
        return;
    }
    struct mem_message *y = container_of(other, struct mem_message, link);
    x->peer = y;
    y->peer = x;
    check_match(x, y);
    (void)pthread_cond_signal(&y->group->changed);
}

static bool silent(const struct mem *m, uint32_t device)
{
    return m->options.kill_after != 0 && device == m->options.kill_device &&
           m->ports[device].n_posted >= m->options.kill_after;
}

static void post_all(struct mem *m, struct mem_group *g)
{
    struct mem_port *port = &m->ports[g->device];
    uint64_t now = clock_mono_ns();
    for (uint32_t i = 0; i < g->n_messages && !silent(m, g->device); i++) {
        struct mem_message *x = &g->messages[i];
        if (m->options.seed != 0 && m->options.max_delay_us != 0)
            x->not_before_ns =
                now + random_next(&port->random) % (m->options.max_delay_us + 1U) * 1000U;
        port->n_posted++;
        post(m, x);
    }
}

/* --- moving ----------------------------------------------------------------------------------- */

static double rate_of(const struct mem *m, bool network)
{
    return network ? m->options.network_bytes_per_s : m->options.domain_bytes_per_s;
}

static void reserve(struct mem *m, struct mem_message *r, uint64_t now)
{
    double rate = rate_of(m, r->network);
    struct mem_port *from = &m->ports[r->peer->group->device], *to = &m->ports[r->group->device];
    r->chunk_bytes = pace_chunk(rate, r->bytes - r->at, MEM_CHUNK_BYTES);
    uint64_t out = pace_reserve(&from->pace, PACE_EGRESS, r->network, rate, r->chunk_bytes, now);
    uint64_t in = pace_reserve(&to->pace, PACE_INGRESS, r->network, rate, r->chunk_bytes, now);
    r->due_ns = out > in ? out : in;
    transport_first_byte(&from->counters, now);
    transport_first_byte(&to->counters, now);
}

static void count(struct mem *m, const struct mem_message *r, uint64_t bytes)
{
    struct transport_counters *out = &m->ports[r->peer->group->device].counters;
    struct transport_counters *in = &m->ports[r->group->device].counters;
    *(r->network ? &out->network_sent_bytes : &out->domain_sent_bytes) += bytes;
    *(r->network ? &in->network_received_bytes : &in->domain_received_bytes) += bytes;
}

static void finish(struct mem *m, struct mem_message *x)
{
    x->done = true;
    x->group->n_open--;
    m->ports[x->group->device].counters.messages++;
    (void)pthread_cond_signal(&x->group->changed);
}

/* Both may be in pieces, cut differently. */
static void copy_range(const struct transport_message *to, uint64_t to_at,
                       const struct transport_message *from, uint64_t from_at, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes;) {
        struct iovec a, b;
        rs_assert(transport_runs(to, to_at + at, bytes - at, &a, 1) == 1);
        rs_assert(transport_runs(from, from_at + at, bytes - at, &b, 1) == 1);
        size_t n = a.iov_len < b.iov_len ? a.iov_len : b.iov_len;
        memcpy(a.iov_base, b.iov_base, n);
        at += n;
    }
}

/* Where tests have it so, wrong (base/crash.h). */
static void copy_chunk(const struct transport_message *to, const struct transport_message *from,
                       uint64_t at, uint64_t bytes)
{
    uint64_t half = bytes / 2;
    if (damage_due(DAMAGE_LOST_CHUNK))
        return;
    if (damage_due(DAMAGE_WRONG_ADDRESS)) {
        copy_range(to, at + bytes - half, from, at, half);
        copy_range(to, at, from, at + half, bytes - half);
        return;
    }
    copy_range(to, at, from, at, bytes);
    transport_damage(to, at, bytes);
}

/* Copies the reserved chunk, the mutex let go meanwhile. */
static void move_chunk(struct mem *m, struct mem_message *r)
{
    struct mem_message *s = r->peer;
    uint64_t bytes = r->chunk_bytes;
    if (!fence_holds(m->options.fence)) {
        group_fail(r->group, RS_EDEADLINE, "the lease has run out", s->group->device);
        return;
    }
    s->busy = true;
    (void)pthread_mutex_unlock(&m->mutex);
    copy_chunk(r->from, s->from, r->at, bytes);
    (void)pthread_mutex_lock(&m->mutex);
    s->busy = false;
    r->at += bytes;
    r->chunk_bytes = 0;
    count(m, r, bytes);
    if (r->at == r->bytes) {
        finish(m, r);
        finish(m, s);
    } else {
        (void)pthread_cond_signal(&s->group->changed); /* it may be waiting to leave */
    }
}

static bool group_over(const struct mem *m, const struct mem_group *g)
{
    return g->n_open == 0 || g->status != 0 || m->aborted;
}

/* One chunk of each receive that is due. Returns when the next is; 0: something moved. */
static uint64_t step(struct mem *m, struct mem_group *g)
{
    uint64_t next = UINT64_MAX;
    bool moved = false;
    for (uint32_t i = 0; i < g->n_messages && !group_over(m, g); i++) {
        struct mem_message *r = &g->messages[i];
        if (r->send || r->done || r->peer == NULL)
            continue;
        uint64_t now = clock_mono_ns();
        uint64_t start =
            r->not_before_ns > r->peer->not_before_ns ? r->not_before_ns : r->peer->not_before_ns;
        if (r->chunk_bytes == 0 && start <= now)
            reserve(m, r, now);
        uint64_t due = r->chunk_bytes == 0 ? start : r->due_ns;
        if (due <= now) {
            move_chunk(m, r);
            moved = true;
        } else if (due < next) {
            next = due;
        }
    }
    return moved ? 0 : next;
}

/* Takes back what is not through: from here on nobody reads or writes the group's buffers. */
static void withdraw(struct mem *m, struct mem_group *g)
{
    for (uint32_t i = 0; i < g->n_messages; i++) {
        struct mem_message *x = &g->messages[i];
        while (x->busy)
            wait_until(m, g, UINT64_MAX);
        if (!x->posted || x->done)
            continue;
        if (x->peer != NULL)
            x->peer->peer = NULL;
        else
            queue_remove(&x->link);
    }
}

/* --- groups ----------------------------------------------------------------------------------- */

static bool may_start(struct mem *m, struct mem_group *g)
{
    struct mem_port *port = &m->ports[g->device];
    if (m->aborted || g->attempt != m->attempt) {
        port->counters.stale_frames += g->n_messages;
        return false;
    }
    if (port->failed != 0)
        g->status = err_set(&g->err, port->failed,
                            "device %u: an earlier group of the attempt failed", g->device);
    else if (!fence_holds(m->options.fence))
        g->status = port->failed =
            err_set(&g->err, RS_EDEADLINE, "device %u: the lease has run out", g->device);
    return g->status == 0;
}

static void run_locked(struct mem *m, struct mem_group *g)
{
    if (!may_start(m, g))
        return;
    queue_push(&m->running, &g->link);
    post_all(m, g);
    while (!group_over(m, g)) {
        uint64_t next = step(m, g);
        if (next != 0 && !group_over(m, g))
            wait_until(m, g, next);
    }
    withdraw(m, g);
    queue_remove(&g->link);
}

/* On the stream's thread. Nothing touches the transport once it counts as over. */
static void run_group(void *arg)
{
    struct mem_group *g = arg;
    struct mem *m = g->mem;
    struct transport_group *group = g->group;
    (void)pthread_mutex_lock(&m->mutex);
    run_locked(m, g);
    if (g->status == 0 && g->n_open > 0)
        g->status = err_set(&g->err, RS_ECANCELED, "device %u: the attempt was aborted", g->device);
    int status = g->status;
    struct err e = g->err;
    m->n_groups--;
    (void)pthread_mutex_unlock(&m->mutex);
    (void)pthread_cond_destroy(&g->changed);
    mem_free(g);
    group->on_done(group, status, &e);
}

static void group_fill(struct mem_group *g, const struct transport_group *group)
{
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *from = &group->messages[i];
        struct mem_message *x = &g->messages[i];
        queue_init(&x->link);
        x->group = g;
        x->from = from;
        x->bytes = from->bytes;
        x->peer_device = from->peer;
        x->send = from->send;
        x->network = from->network;
        x->tag = from->tag;
    }
}

static int group_new(struct mem *m, uint32_t device, struct transport_group *group,
                     struct mem_group **ret)
{
    struct mem_group *g =
        mem_zalloc(sizeof(*g) + (size_t)group->n_messages * sizeof(g->messages[0]));
    if (g == NULL)
        return RS_ENOMEM;
    pthread_condattr_t attr;
    rs_assert(pthread_condattr_init(&attr) == 0);
    rs_assert(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0);
    rs_assert(pthread_cond_init(&g->changed, &attr) == 0);
    (void)pthread_condattr_destroy(&attr);
    queue_init(&g->link);
    g->group = group;
    g->mem = m;
    g->device = device;
    g->n_messages = group->n_messages;
    g->n_open = group->n_messages;
    group_fill(g, group);
    *ret = g;
    return 0;
}

/* Zero-size messages are left out by both sides; one here is a bug of the caller's cutting. */
static bool messages_valid(const struct mem *m, const struct transport_group *group)
{
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *x = &group->messages[i];
        if (x->peer >= m->n_devices || !m->ports[x->peer].takes_part || x->bytes == 0)
            return false;
    }
    return true;
}

static int admit(struct mem *m, struct mem_group *g)
{
    int r = 0;
    (void)pthread_mutex_lock(&m->mutex);
    if (m->attempt == 0)
        r = RS_EPRECOND;
    else if (m->aborted)
        r = RS_ECANCELED;
    else
        m->n_groups++;
    g->attempt = m->attempt;
    (void)pthread_mutex_unlock(&m->mutex);
    return r;
}

static int mem_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                       struct transport_group *group)
{
    struct mem *m = mem_of(t);
    struct mem_group *g;
    if (device >= m->n_devices || !m->ports[device].takes_part || !messages_valid(m, group))
        return RS_EINVAL;
    int r = group_new(m, device, group, &g);
    if (r < 0)
        return r;
    r = admit(m, g);
    if (r < 0)
        goto free_group;
    r = device_call(stream, run_group, g);
    if (r < 0)
        goto dismiss;
    return 0;
dismiss:
    (void)pthread_mutex_lock(&m->mutex);
    m->n_groups--;
    (void)pthread_mutex_unlock(&m->mutex);
free_group:
    (void)pthread_cond_destroy(&g->changed);
    mem_free(g);
    return r;
}

/* --- the transport ---------------------------------------------------------------------------- */

static int mem_begin(struct transport *t, uint64_t attempt, struct err *e)
{
    struct mem *m = mem_of(t);
    int r = 0;
    (void)pthread_mutex_lock(&m->mutex);
    if (m->n_groups > 0)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not over: %u groups are left",
                    (unsigned long long)m->attempt, m->n_groups);
    else if (attempt <= m->attempt)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not above the last one, %llu",
                    (unsigned long long)attempt, (unsigned long long)m->attempt);
    if (r == 0) {
        m->attempt = attempt;
        m->aborted = false;
        for (uint32_t i = 0; i < m->n_devices; i++) {
            m->ports[i].failed = 0;
            m->ports[i].counters.first_byte_ns = 0;
        }
    }
    (void)pthread_mutex_unlock(&m->mutex);
    return r;
}

static void mem_abort(struct transport *t)
{
    struct mem *m = mem_of(t);
    (void)pthread_mutex_lock(&m->mutex);
    m->aborted = true;
    queue_foreach (q, &m->running) {
        (void)pthread_cond_signal(&container_of(q, struct mem_group, link)->changed);
    }
    (void)pthread_mutex_unlock(&m->mutex);
}

static bool mem_quiesced(const struct transport *t)
{
    struct mem *m = mem_of(t);
    (void)pthread_mutex_lock(&m->mutex);
    bool quiesced = m->n_groups == 0;
    (void)pthread_mutex_unlock(&m->mutex);
    return quiesced;
}

static struct transport_counters mem_counters(const struct transport *t, uint32_t device)
{
    struct mem *m = mem_of(t);
    struct transport_counters c = {0};
    (void)pthread_mutex_lock(&m->mutex);
    if (device < m->n_devices)
        c = m->ports[device].counters;
    (void)pthread_mutex_unlock(&m->mutex);
    return c;
}

static void mem_close(struct transport *t)
{
    struct mem *m = mem_of(t);
    rs_assert(m->n_groups == 0);
    (void)pthread_mutex_destroy(&m->mutex);
    mem_free(m->channels);
    mem_free(m->ports);
    mem_free(m);
}

/* All devices are here. */
static int mem_connect(struct transport *t, struct transport_connect *c)
{
    const struct err none = {0};
    (void)t;
    c->on_done(c, 0, &none);
    return 0;
}

static bool mem_takes_pieces(const struct transport *t, uint32_t device, uint32_t peer)
{
    (void)t, (void)device, (void)peer;
    return true;
}

static const struct transport_ops mem_ops = {
    .kind = "mem",
    .takes_pieces = mem_takes_pieces,
    .begin = mem_begin,
    .connect = mem_connect,
    .enqueue = mem_enqueue,
    .abort = mem_abort,
    .quiesced = mem_quiesced,
    .counters = mem_counters,
    .close = mem_close,
};

static void init_tables(struct mem *m, struct device *const *devices)
{
    for (uint32_t i = 0; i < m->n_devices; i++) {
        m->ports[i].takes_part = devices[i] != NULL;
        m->ports[i].random = m->options.seed ^ ((uint64_t)i << 32);
    }
    for (size_t i = 0; i < (size_t)m->n_devices * m->n_devices; i++) {
        queue_init(&m->channels[i].sends);
        queue_init(&m->channels[i].receives);
    }
    queue_init(&m->running);
}

int transport_mem_open(struct device *const *devices, uint32_t n_devices, uint64_t epoch,
                       const struct transport_mem_options *options, struct transport **ret,
                       struct err *e)
{
    if (n_devices > MEM_MAX_DEVICES)
        return err_set(e, RS_EEXHAUSTED, "in-memory transport of %u devices: %d are the most",
                       n_devices, MEM_MAX_DEVICES);
    struct mem *m = mem_zalloc(sizeof(*m));
    if (m == NULL)
        goto no_memory;
    m->ports = mem_calloc(n_devices, sizeof(*m->ports));
    if (m->ports == NULL)
        goto free_mem;
    m->channels = mem_calloc((size_t)n_devices * n_devices, sizeof(*m->channels));
    if (m->channels == NULL)
        goto free_ports;
    m->base.ops = &mem_ops;
    m->base.epoch = epoch;
    m->n_devices = n_devices;
    m->options = *options;
    init_tables(m, devices);
    rs_assert(pthread_mutex_init(&m->mutex, NULL) == 0);
    *ret = &m->base;
    return 0;
free_ports:
    mem_free(m->ports);
free_mem:
    mem_free(m);
no_memory:
    return err_set(e, RS_ENOMEM, "in-memory transport of %u devices", n_devices);
}
