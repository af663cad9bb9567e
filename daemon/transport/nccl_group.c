/* Groups of messages: each is one NCCL group, enqueued when its stream comes to it. */
#include "transport/nccl_inner.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "device/device_cuda.h"
#include "device/fence.h"

#include "base/banned.h"

static void group_fail(struct nccl_group *g, int status, const char *text)
{
    if (g->status != 0)
        return;
    g->status = err_set(&g->err, status, "device %u: %s", g->device, text);
    g->t->lanes[g->device].failed = status;
}

bool nccl_any_issued(const struct nccl *n)
{
    queue_foreach (q, &n->groups) {
        if (container_of(q, struct nccl_group, link)->issued)
            return true;
    }
    return false;
}

/* --- on the stream ------------------------------------------------------------------------------- */

/* Why a group can't be given to NCCL, in the group; with the mutex held. */
static bool may_issue(struct nccl *n, struct nccl_group *g, bool device_failed)
{
    struct nccl_lane *lane = &n->lanes[g->device];
    if (g->status != 0)
        return false;
    if (n->aborted)
        g->status = err_set(&g->err, RS_ECANCELED, "device %u: the attempt was aborted", g->device);
    else if (device_failed)
        g->status = RS_EDEVICE, (void)device_error(lane->device, &g->err);
    else if (lane->failed != 0)
        g->status = err_set(&g->err, lane->failed,
                            "device %u: an earlier group of the attempt failed", g->device);
    else if (!fence_holds(n->options.fence))
        group_fail(g, RS_EDEADLINE, "the lease has run out");
    else if (n->why.code != 0)
        group_fail(g, n->why.code, n->why.text);
    return g->status == 0;
}

static ncclResult_t give_messages(struct nccl *n, struct nccl_group *g, struct CUstream_st *stream)
{
    const struct nccl_library *nccl = &n->node->nccl;
    ncclComm_t comm = n->lanes[g->device].comm;
    ncclResult_t r = nccl->start();
    /* A communicator that does not block may say "in progress" to any call; the group's end tells what it came to. */
    for (uint32_t i = 0; i < g->n_messages && (r == ncclSuccess || r == ncclInProgress); i++) {
        const struct transport_message *m = &g->messages[i].what;
        int rank = n->lanes[m->peer].rank;
        nccl_buffer_count(&n->lanes[g->device], m);
        r = m->send ? nccl->send(m->data, m->bytes, ncclInt8, rank, comm, stream)
                    : nccl->receive(m->data, m->bytes, ncclInt8, rank, comm, stream);
    }
    ncclResult_t end = nccl->end();
    return r != ncclSuccess && r != ncclInProgress ? r : end;
}

/* A communicator that does not block may still be connecting; no more is enqueued until it is not. */
static ncclResult_t give_group(struct nccl *n, struct nccl_group *g, struct CUstream_st *stream)
{
    struct nccl_lane *lane = &n->lanes[g->device];
    if (lane->comm == NULL)
        return ncclSuccess; /* ended meanwhile: finish says so */
    nccl_buffer_register(n, lane);
    ncclResult_t r = give_messages(n, g, stream);
    while (r == ncclInProgress && !atomic_load(&n->leave)) {
        ncclResult_t asked = n->node->nccl.error(lane->comm, &r);
        if (asked != ncclSuccess)
            r = asked;
        if (r != ncclInProgress)
            break;
        pthread_mutex_lock(&n->mutex);
        nccl_wait_us(n, NCCL_POLL_US);
        pthread_mutex_unlock(&n->mutex);
    }
    return r == ncclInProgress ? ncclSuccess : r; /* left for an abort, which says why */
}

/* On the stream's thread. */
static void issue_group(void *arg, struct CUstream_st *stream)
{
    struct nccl_group *g = arg;
    struct nccl *n = g->t;
    struct nccl_lane *lane = &n->lanes[g->device];
    pthread_mutex_lock(&n->mutex);
    while ((n->state != NCCL_READY || n->again) && n->why.code == 0 && !n->aborted &&
           g->status == 0)
        nccl_wait_us(n, NCCL_IDLE_POLL_US);
    g->issued = may_issue(n, g, stream == NULL) && g->n_messages > 0;
    bool issued = g->issued;
    if (issued)
        transport_first_byte(&lane->counters, clock_mono_ns());
    pthread_mutex_unlock(&n->mutex);
    if (!issued)
        return;
    pthread_mutex_lock(&lane->mutex);
    ncclResult_t r = give_group(n, g, stream);
    pthread_mutex_unlock(&lane->mutex);
    if (r == ncclSuccess)
        return;
    char text[256];
    (void)snprintf(text, sizeof text,
                   "NCCL: device %u (comm rank %d of %u): a group of %u messages: %s (%s)",
                   g->device, lane->rank, n->n_ranks, g->n_messages, n->node->nccl.text(r),
                   n->node->nccl.last(NULL));
    pthread_mutex_lock(&n->mutex);
    if (!n->aborted)
        group_fail(g, nccl_code(r), text);
    nccl_end_because(n, nccl_code(r), text);
    pthread_mutex_unlock(&n->mutex);
}

/* --- their ends ---------------------------------------------------------------------------------- */

static void count(struct nccl *n, const struct nccl_group *g)
{
    struct transport_counters *c = &n->lanes[g->device].counters;
    c->messages += g->n_messages;
    for (uint32_t i = 0; i < g->n_messages; i++) {
        const struct transport_message *m = &g->messages[i].what;
        if (m->send)
            *(m->network ? &c->network_sent_bytes : &c->domain_sent_bytes) += m->bytes;
        else
            *(m->network ? &c->network_received_bytes : &c->domain_received_bytes) += m->bytes;
    }
}

/* Its event is done: nothing touches its buffers any more. A group that was in flight when its
 * communicator was ended may be whole or not: it counts as not. With the mutex held, let go for on_done. */
static void finish(struct nccl *n, struct nccl_group *g)
{
    struct nccl_lane *lane = &n->lanes[g->device];
    queue_remove(&g->link);
    for (uint32_t i = 0; i < g->n_messages; i++)
        queue_remove(&g->messages[i].link);
    bool broken = n->state != NCCL_READY || n->why.code != 0;
    if (g->status == 0 && device_error(lane->device, &g->err) != 0)
        g->status = g->err.code;
    if (g->status == 0 && broken && g->issued && n->aborted)
        g->status = err_set(&g->err, RS_ECANCELED, "device %u: the attempt was aborted", g->device);
    if (g->status == 0 && broken && g->issued)
        group_fail(g, n->why.code != 0 ? n->why.code : RS_ECANCELED, n->why.text);
    if (g->status == 0)
        count(n, g);
    else
        lane->failed = g->status;
    (void)pthread_mutex_unlock(&n->mutex);
    device_event_free(g->done);
    struct transport_group *group = g->group;
    int status = g->status;
    struct err e = g->err;
    mem_free(g);
    (void)pthread_mutex_lock(&n->mutex);
    n->n_open--;
    (void)pthread_mutex_unlock(&n->mutex);
    group->on_done(group, status, &e);
    (void)pthread_mutex_lock(&n->mutex);
}

/* Ends what is done. Not while communicators end: their groups count as over when they are. */
void nccl_poll_groups(struct nccl *n)
{
    for (struct queue *q = n->groups.next, *next; q != &n->groups && !nccl_must_end(n); q = next) {
        struct nccl_group *g = container_of(q, struct nccl_group, link);
        next = q->next;
        if (!device_event_done(g->done))
            continue;
        finish(n, g);
        next = n->groups.next; /* the mutex was let go */
    }
}

void nccl_finish_waiters(struct nccl *n)
{
    while (!queue_empty(&n->waiters) &&
           ((n->state == NCCL_READY && !n->again) || n->why.code != 0 || n->aborted)) {
        struct nccl_waiter *w = container_of(queue_pop(&n->waiters), struct nccl_waiter, link);
        struct err e = n->why;
        int status = n->aborted         ? err_set(&e, RS_ECANCELED, "the attempt was aborted")
                     : n->why.code != 0 ? n->why.code
                                        : 0;
        struct transport_connect *c = w->connect;
        mem_free(w);
        n->n_open--;
        (void)pthread_mutex_unlock(&n->mutex);
        c->on_done(c, status, &e);
        (void)pthread_mutex_lock(&n->mutex);
    }
}

/* --- enqueueing ---------------------------------------------------------------------------------- */

static bool valid(const struct nccl *n, uint32_t device, const struct transport_group *group)
{
    if (device >= n->n_devices || n->lanes[device].device == NULL)
        return false;
    for (uint32_t i = 0; i < group->n_messages; i++) {
        const struct transport_message *m = &group->messages[i];
        if (m->peer >= n->n_devices || n->lanes[m->peer].rank < 0 || m->bytes == 0 ||
            m->data == NULL)
            return false;
    }
    return true;
}

static struct nccl_group *group_new(struct nccl *n, uint32_t device, struct transport_group *group)
{
    struct nccl_group *g =
        mem_zalloc(sizeof *g + (size_t)group->n_messages * sizeof g->messages[0]);
    if (g == NULL)
        return NULL;
    if (device_event_new(n->lanes[device].device, &g->done) != 0) {
        mem_free(g);
        return NULL;
    }
    g->group = group;
    g->t = n;
    g->device = device;
    g->n_messages = group->n_messages;
    queue_init(&g->link);
    for (uint32_t i = 0; i < g->n_messages; i++) {
        queue_init(&g->messages[i].link);
        g->messages[i].group = g;
        g->messages[i].what = group->messages[i];
    }
    return g;
}

static void compare(struct nccl *n, struct nccl_message *a, struct nccl_message *b)
{
    const struct nccl_message *send = a->what.send ? a : b, *receive = a->what.send ? b : a;
    if (a->what.bytes == b->what.bytes && a->what.network == b->what.network &&
        a->what.tag == b->what.tag)
        return;
    struct nccl_message *ends[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        char text[192];
        bool sizes = send->what.bytes != receive->what.bytes;
        (void)snprintf(text, sizeof text,
                       "peer device %u: %s: the sender's has %llu bytes, tag %u, "
                       "the receiver's %llu bytes, tag %u%s",
                       ends[i]->what.peer,
                       sizes ? "messages of different sizes" : "another message of the same size",
                       (unsigned long long)send->what.bytes, send->what.tag,
                       (unsigned long long)receive->what.bytes, receive->what.tag,
                       send->what.network == receive->what.network ? "" : "; their tiers differ");
        group_fail(ends[i]->group, RS_EPROTO, text);
    }
    nccl_end_because(n, RS_EPROTO, "NCCL: the two ends of a message disagree");
}

/* The n-th send meets the n-th receive: between local devices both ends are seen here. */
static void match(struct nccl *n, struct nccl_message *m)
{
    uint32_t here = m->group->device, peer = m->what.peer;
    if (n->lanes[peer].device == NULL)
        return;
    struct queue *c =
        &n->channels[m->what.send ? here * n->n_devices + peer : peer * n->n_devices + here];
    struct nccl_message *first =
        queue_empty(c) ? NULL : container_of(c->next, struct nccl_message, link);
    if (first == NULL || first->what.send == m->what.send) {
        queue_push(c, &m->link);
        return;
    }
    queue_remove(&first->link);
    compare(n, m, first);
}

int nccl_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                 struct transport_group *group)
{
    struct nccl *n = nccl_of(t);
    if (!valid(n, device, group))
        return RS_EINVAL;
    struct nccl_group *g = group_new(n, device, group);
    if (g == NULL)
        return RS_ENOMEM;
    pthread_mutex_lock(&n->mutex);
    int r = n->attempt == 0 ? RS_EPRECOND : n->aborted ? RS_ECANCELED : 0;
    if (r == 0)
        r = device_cuda_issue(stream, issue_group, g, g->done); /* it waits for the mutex */
    if (r == 0) {
        n->n_open++;
        queue_push(&n->groups, &g->link);
        for (uint32_t i = 0; i < g->n_messages; i++)
            match(n, &g->messages[i]);
        (void)pthread_cond_broadcast(&n->changed);
    }
    pthread_mutex_unlock(&n->mutex);
    if (r != 0) {
        device_event_free(g->done);
        mem_free(g);
    }
    return r;
}

int nccl_connect(struct transport *t, struct transport_connect *c)
{
    struct nccl *n = nccl_of(t);
    struct nccl_waiter *w = mem_zalloc(sizeof *w);
    if (w == NULL)
        return RS_ENOMEM;
    w->connect = c;
    pthread_mutex_lock(&n->mutex);
    int r = n->attempt == 0 ? RS_EPRECOND : n->aborted ? RS_ECANCELED : 0;
    if (r == 0) {
        n->n_open++;
        queue_push(&n->waiters, &w->link);
        if (!nccl_all_local(n) && (n->state == NCCL_NONE || n->state == NCCL_JOINING))
            n->join_until_ns =
                c->deadline_ns < n->join_until_ns ? c->deadline_ns : n->join_until_ns;
        (void)pthread_cond_broadcast(&n->changed);
    }
    pthread_mutex_unlock(&n->mutex);
    if (r != 0)
        mem_free(w);
    return r;
}
