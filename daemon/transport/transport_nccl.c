/* NCCL communicators under deadlines and a watchdog. What it promises stands in transport_nccl.h.
 *
 *        begin                 all ranks are there
 *   NONE ─────▶ JOINING ──────────────────────────▶ READY
 *    ▲             │ deadline, error, abort           │ error, abort with a group in flight, fence
 *    │             ▼                                  ▼
 *    └────────── ENDING (each ncclCommAbort on a thread of its own) ◀─┘
 *
 * Threads: callers; each device's stream (issue_group); the watcher, which alone changes the state;
 * one thread per communicator that is being aborted. `mutex` guards all but the communicators; a
 * lane's own mutex is held around NCCL calls on its communicator, taken after `mutex` or alone. */
#include "transport/transport_nccl.h"

#include <dlfcn.h>
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/queue.h"
#include "device/device_cuda.h"
#include "device/fence.h"

#include "base/banned.h"

enum {
    OLDEST_NCCL = 22800,
    MAX_DEVICES = 1024,
    DEFAULT_INIT_MS = 30000,
    DEFAULT_WATCHDOG_MS = 5000,
    DEFAULT_CTAS = 8,
    POLL_US = 50,        /* with groups in flight */
    IDLE_POLL_US = 20000 /* asynchronous errors between groups */
};

_Static_assert(TRANSPORT_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "an id travels whole");

/* --- the library ------------------------------------------------------------------------------- */

struct library {
    ncclResult_t (*version)(int *);
    ncclResult_t (*id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*receive)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*start)(void);
    ncclResult_t (*end)(void);
    const char *(*text)(ncclResult_t);
    const char *(*last)(ncclComm_t);
};

struct transport_nccl_node {
    struct library nccl;
    void *handle;
    int version;
    pthread_mutex_t mutex;
    uint8_t (*used)[TRANSPORT_NCCL_ID_BYTES]; /* ids: each once */
    size_t n_used, capacity;
};

static int library_open(struct transport_nccl_node *node, struct err *e)
{
    static const char *const names[] = {
        "ncclGetVersion",     "ncclGetUniqueId",       "ncclCommInitRankConfig",
        "ncclCommAbort",      "ncclCommGetAsyncError", "ncclSend",
        "ncclRecv",           "ncclGroupStart",        "ncclGroupEnd",
        "ncclGetErrorString", "ncclGetLastError"};
    void *at[sizeof names / sizeof *names];
    _Static_assert(sizeof at == sizeof node->nccl, "one name for each function");
    node->handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (node->handle == NULL)
        return err_set(e, RS_EPRECOND,
                       "NCCL: %s: install NCCL 2.28 or newer, or put it on the "
                       "library path",
                       dlerror());
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((at[i] = dlsym(node->handle, names[i])) == NULL)
            return err_set(e, RS_EPRECOND,
                           "NCCL: the library has no %s: install NCCL 2.28 or newer", names[i]);
    memcpy(&node->nccl, at, sizeof at);
    ncclResult_t r = node->nccl.version(&node->version);
    if (r != ncclSuccess || node->version < OLDEST_NCCL)
        return err_set(e, RS_EPRECOND,
                       "NCCL: version %d.%d.%d is installed, 2.28 or newer is needed",
                       node->version / 10000, node->version % 10000 / 100, node->version % 100);
    return 0;
}

int transport_nccl_node_open(struct transport_nccl_node **ret, struct err *e)
{
    struct transport_nccl_node *node = mem_zalloc(sizeof *node);
    if (node == NULL)
        return err_set(e, RS_ENOMEM, "NCCL: out of memory");
    int r = library_open(node, e);
    if (r != 0) {
        if (node->handle != NULL)
            (void)dlclose(node->handle);
        mem_free(node);
        return r;
    }
    (void)pthread_mutex_init(&node->mutex, NULL);
    *ret = node;
    return 0;
}

int transport_nccl_node_version(const struct transport_nccl_node *node)
{
    return node->version;
}

void transport_nccl_node_close(struct transport_nccl_node *node)
{
    if (node == NULL)
        return;
    /* The library stays: NCCL leaves threads behind that would run in what was unloaded. */
    (void)pthread_mutex_destroy(&node->mutex);
    mem_free(node->used);
    mem_free(node);
}

int transport_nccl_node_id(struct transport_nccl_node *node, uint8_t ret[TRANSPORT_NCCL_ID_BYTES],
                           struct err *e)
{
    ncclUniqueId id;
    ncclResult_t r = node->nccl.id(&id);
    if (r != ncclSuccess)
        return err_set(e, RS_EUNAVAIL, "NCCL: making an id: %s (%s)", node->nccl.text(r),
                       node->nccl.last(NULL));
    memcpy(ret, id.internal, TRANSPORT_NCCL_ID_BYTES);
    return 0;
}

/* An id is good for one communicator: NCCL hangs or mixes up two that share one. */
static int id_take(struct transport_nccl_node *node, const uint8_t *id, struct err *e)
{
    int r = 0;
    pthread_mutex_lock(&node->mutex);
    for (size_t i = 0; i < node->n_used && r == 0; i++)
        if (memcmp(node->used[i], id, TRANSPORT_NCCL_ID_BYTES) == 0)
            r = err_set(e, RS_EPRECOND,
                        "NCCL: this id was used for a communicator before: each "
                        "needs a new one");
    void *array = node->used;
    if (r == 0)
        r = mem_grow(&array, &node->capacity, node->n_used + 1, sizeof *node->used);
    node->used = array;
    if (r == 0)
        memcpy(node->used[node->n_used++], id, TRANSPORT_NCCL_ID_BYTES);
    pthread_mutex_unlock(&node->mutex);
    return r;
}

/* --- the transport ------------------------------------------------------------------------------ */

enum state { NONE, JOINING, READY, ENDING };

/* A local device. */
struct lane {
    struct nccl *t;
    struct device *device;
    pthread_mutex_t mutex;
    ncclComm_t comm;
    int rank;
    int failed; /* a group of this attempt failed: later ones do too */
    struct transport_counters counters;
};

struct message {
    struct queue link; /* in its channel until the other end is enqueued */
    struct group *group;
    struct transport_message what;
};

struct group {
    struct queue link; /* in nccl.groups */
    struct transport_group *group;
    struct nccl *t;
    struct device_event *done;
    struct err err;
    int status;
    uint32_t device;
    bool issued; /* NCCL has it, or is being given it */
    uint32_t n_messages;
    struct message messages[];
};

struct waiter {
    struct queue link; /* in nccl.waiters */
    struct transport_connect *connect;
};

struct nccl {
    struct transport base;
    struct transport_nccl_node *node;
    struct transport_nccl_options options;
    pthread_t watcher;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct lane *lanes; /* [n_devices]: device NULL where it is not local */
    struct queue
        *channels; /* [from * n_devices + to], both local: messages without the other end */
    struct queue groups, waiters;
    uint8_t id[TRANSPORT_NCCL_ID_BYTES];
    struct err why; /* code != 0: the communicators are to end, or have ended, because of it */
    enum state state;
    uint64_t attempt, join_until_ns, end_until_ns;
    uint32_t n_devices, n_ranks, n_local, n_open, n_ending;
    atomic_bool leave; /* NCCL calls that poll shall return: an abort wants their lane */
    bool has_id, aborted, closing, stuck;
    bool again; /* a new attempt has begun, which the communicators that stand are not for */
};

static struct nccl *nccl_of(const struct transport *t)
{
    return container_of((struct transport *)(uintptr_t)t, struct nccl, base);
}

/* With the mutex held: communicators stand, or are being made, that a new attempt may use. */
static bool usable(const struct nccl *n)
{
    return n->why.code == 0 && !n->again &&
           (n->state == READY || (n->state == JOINING && !n->aborted));
}

static bool all_local(const struct nccl *n)
{
    return n->n_local == n->n_ranks;
}

/* With the mutex held: until something changes, or a while has passed. */
static void wait_us(struct nccl *n, uint64_t us)
{
    uint64_t until = clock_mono_ns() + us * 1000;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000U),
                         .tv_nsec = (long)(until % 1000000000U)};
    (void)pthread_cond_timedwait(&n->changed, &n->mutex, &t);
}

static int code_of(ncclResult_t r)
{
    return r == ncclRemoteError                                ? RS_EPEER
           : r == ncclUnhandledCudaError                       ? RS_EDEVICE
           : r == ncclInvalidArgument || r == ncclInvalidUsage ? RS_EINVAL
                                                               : RS_EPEER;
}

/* With the mutex held. The first reason stays. */
static void end_because(struct nccl *n, int code, const char *text)
{
    if (n->why.code != 0)
        return;
    (void)err_set(&n->why, code, "%s", text);
    (void)pthread_cond_broadcast(&n->changed);
}

static void group_fail(struct group *g, int status, const char *text)
{
    if (g->status != 0)
        return;
    g->status = err_set(&g->err, status, "device %u: %s", g->device, text);
    g->t->lanes[g->device].failed = status;
}

/* --- joining ------------------------------------------------------------------------------------ */

static ncclResult_t join_lane(struct nccl *n, struct lane *lane, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = (int)(n->options.max_ctas != 0 ? n->options.max_ctas : DEFAULT_CTAS);
    if (device_cuda_use(lane->device, NULL) != 0)
        return ncclUnhandledCudaError;
    return n->node->nccl.init(&lane->comm, (int)n->n_ranks, *id, lane->rank, &config);
}

/* All local ranks in one group. Called without the mutex: nobody else touches communicators now. */
static ncclResult_t join_all(struct nccl *n)
{
    ncclUniqueId id;
    memcpy(id.internal, n->id, sizeof n->id);
    ncclResult_t r = n->node->nccl.start();
    for (uint32_t i = 0; i < n->n_devices && (r == ncclSuccess || r == ncclInProgress); i++)
        if (n->lanes[i].device != NULL)
            r = join_lane(n, &n->lanes[i], &id);
    ncclResult_t end = n->node->nccl.end();
    return r != ncclSuccess && r != ncclInProgress ? r : end;
}

static void start_joining(struct nccl *n)
{
    uint64_t ms = n->options.init_ms != 0 ? n->options.init_ms : DEFAULT_INIT_MS;
    uint64_t until_ns = clock_mono_ns() + ms * 1000000;
    if (until_ns < n->join_until_ns) /* who waits for it may have less time */
        n->join_until_ns = until_ns;
    n->has_id = false;
    n->state = JOINING;
    (void)pthread_mutex_unlock(&n->mutex);
    ncclResult_t r = join_all(n);
    (void)pthread_mutex_lock(&n->mutex);
    if (r != ncclSuccess && r != ncclInProgress) {
        char text[256];
        (void)snprintf(text, sizeof text, "NCCL: making communicators: %s (%s)",
                       n->node->nccl.text(r), n->node->nccl.last(NULL));
        end_because(n, code_of(r), text);
    }
}

/* What a lane's communicator says, with its last words; ncclSuccess where there is none. */
static ncclResult_t ask(struct nccl *n, struct lane *lane, char *ret_text, size_t text_bytes)
{
    const struct library *nccl = &n->node->nccl;
    ncclResult_t said = ncclSuccess;
    if (pthread_mutex_trylock(&lane->mutex) != 0)
        return ncclSuccess; /* whoever has it looks itself */
    ncclResult_t r = lane->comm == NULL ? ncclSuccess : nccl->error(lane->comm, &said);
    r = r != ncclSuccess ? r : said;
    if (r != ncclSuccess && r != ncclInProgress)
        (void)snprintf(ret_text, text_bytes, "%s (%s)", nccl->text(r), nccl->last(lane->comm));
    (void)pthread_mutex_unlock(&lane->mutex);
    return r;
}

/* Asynchronous errors end the communicators; returns how many are still in progress. */
static uint32_t poll_lanes(struct nccl *n)
{
    uint32_t busy = 0;
    for (uint32_t i = 0; i < n->n_devices; i++) {
        struct lane *lane = &n->lanes[i];
        char said[256], text[384];
        ncclResult_t r = lane->device == NULL ? ncclSuccess : ask(n, lane, said, sizeof said);
        busy += r == ncclInProgress;
        if (r == ncclSuccess || r == ncclInProgress)
            continue;
        (void)snprintf(text, sizeof text, "NCCL: device %u (comm rank %d of %u): %s", i, lane->rank,
                       n->n_ranks, said);
        end_because(n, code_of(r), text);
    }
    return busy;
}

static void poll_joining(struct nccl *n)
{
    if (poll_lanes(n) == 0 && n->why.code == 0) {
        n->state = READY;
        (void)pthread_cond_broadcast(&n->changed);
    } else if (clock_mono_ns() >= n->join_until_ns) {
        char text[160];
        (void)snprintf(text, sizeof text,
                       "NCCL: not all %u devices (%u are local) have joined the communicator of "
                       "epoch %llu in time",
                       n->n_ranks, n->n_local, (unsigned long long)n->base.epoch);
        end_because(n, RS_EDEADLINE, text);
    }
}

/* --- ending ------------------------------------------------------------------------------------- */

static void *abort_main(void *arg)
{
    struct lane *lane = arg;
    struct nccl *n = lane->t;
    pthread_mutex_lock(&lane->mutex);
    (void)device_cuda_use(lane->device, NULL);
    ncclComm_t comm = lane->comm;
    if (comm != NULL)
        (void)n->node->nccl.abort(comm);
    lane->comm = NULL;
    pthread_mutex_unlock(&lane->mutex);
    pthread_mutex_lock(&n->mutex);
    n->n_ending--;
    (void)pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->mutex);
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

static void start_ending(struct nccl *n)
{
    uint64_t ms = n->options.watchdog_ms != 0 ? n->options.watchdog_ms : DEFAULT_WATCHDOG_MS;
    n->state = ENDING;
    n->again = false;
    n->end_until_ns = clock_mono_ns() + ms * 1000000;
    atomic_store(&n->leave, true);
    (void)pthread_cond_broadcast(&n->changed);
    for (uint32_t i = 0; i < n->n_devices; i++) {
        if (n->lanes[i].device == NULL)
            continue;
        n->n_ending++;
        /* Without a thread the watchdog has to do: it stays counted, and on_stuck is called. */
        (void)detached(abort_main, &n->lanes[i]);
    }
}

static void poll_ending(struct nccl *n)
{
    if (n->n_ending == 0) {
        n->state = NONE;
        atomic_store(&n->leave, false);
    } else if (!n->stuck && clock_mono_ns() >= n->end_until_ns) {
        n->stuck = true;
        (void)pthread_mutex_unlock(&n->mutex);
        if (n->options.on_stuck != NULL)
            n->options.on_stuck(n->options.arg);
        (void)pthread_mutex_lock(&n->mutex);
    }
}

static bool any_issued(const struct nccl *n)
{
    queue_foreach (q, &n->groups) {
        if (container_of(q, struct group, link)->issued)
            return true;
    }
    return false;
}

static bool must_end(struct nccl *n)
{
    if (n->state != JOINING && n->state != READY)
        return false;
    if (!fence_holds(n->options.fence) && any_issued(n))
        end_because(n, RS_EDEADLINE, "NCCL: the lease has run out with a group in flight");
    return n->why.code != 0 || n->closing || n->again ||
           (n->aborted && (n->state == JOINING || any_issued(n)));
}

/* --- groups ------------------------------------------------------------------------------------- */

/* Why a group can't be given to NCCL, in the group; with the mutex held. */
static bool may_issue(struct nccl *n, struct group *g, bool device_failed)
{
    struct lane *lane = &n->lanes[g->device];
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

static ncclResult_t give_messages(struct nccl *n, struct group *g, struct CUstream_st *stream)
{
    const struct library *nccl = &n->node->nccl;
    ncclComm_t comm = n->lanes[g->device].comm;
    ncclResult_t r = nccl->start();
    for (uint32_t i = 0; i < g->n_messages && r == ncclSuccess; i++) {
        const struct transport_message *m = &g->messages[i].what;
        int rank = n->lanes[m->peer].rank;
        r = m->send ? nccl->send(m->data, m->bytes, ncclInt8, rank, comm, stream)
                    : nccl->receive(m->data, m->bytes, ncclInt8, rank, comm, stream);
    }
    ncclResult_t end = nccl->end();
    return r != ncclSuccess ? r : end;
}

/* A communicator that does not block may still be connecting; no more is enqueued until it is not. */
static ncclResult_t give_group(struct nccl *n, struct group *g, struct CUstream_st *stream)
{
    struct lane *lane = &n->lanes[g->device];
    if (lane->comm == NULL)
        return ncclSuccess; /* ended meanwhile: finish says so */
    ncclResult_t r = give_messages(n, g, stream);
    while (r == ncclInProgress && !atomic_load(&n->leave)) {
        ncclResult_t asked = n->node->nccl.error(lane->comm, &r);
        if (asked != ncclSuccess)
            r = asked;
        if (r != ncclInProgress)
            break;
        pthread_mutex_lock(&n->mutex);
        wait_us(n, POLL_US);
        pthread_mutex_unlock(&n->mutex);
    }
    return r == ncclInProgress ? ncclSuccess : r; /* left for an abort, which says why */
}

/* On the stream's thread. */
static void issue_group(void *arg, struct CUstream_st *stream)
{
    struct group *g = arg;
    struct nccl *n = g->t;
    struct lane *lane = &n->lanes[g->device];
    pthread_mutex_lock(&n->mutex);
    while ((n->state != READY || n->again) && n->why.code == 0 && !n->aborted && g->status == 0)
        wait_us(n, IDLE_POLL_US);
    g->issued = may_issue(n, g, stream == NULL) && g->n_messages > 0;
    bool issued = g->issued;
    pthread_mutex_unlock(&n->mutex);
    if (!issued)
        return;
    pthread_mutex_lock(&lane->mutex);
    ncclResult_t r = give_group(n, g, stream);
    pthread_mutex_unlock(&lane->mutex);
    if (r == ncclSuccess)
        return;
    char text[256];
    (void)snprintf(text, sizeof text, "NCCL: a group of %u messages: %s (%s)", g->n_messages,
                   n->node->nccl.text(r), n->node->nccl.last(NULL));
    pthread_mutex_lock(&n->mutex);
    if (!n->aborted)
        group_fail(g, code_of(r), text);
    end_because(n, code_of(r), text);
    pthread_mutex_unlock(&n->mutex);
}

static void count(struct nccl *n, const struct group *g)
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
static void finish(struct nccl *n, struct group *g)
{
    struct lane *lane = &n->lanes[g->device];
    queue_remove(&g->link);
    for (uint32_t i = 0; i < g->n_messages; i++)
        queue_remove(&g->messages[i].link);
    bool broken = n->state != READY || n->why.code != 0;
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
static void poll_groups(struct nccl *n)
{
    for (struct queue *q = n->groups.next, *next; q != &n->groups && !must_end(n); q = next) {
        struct group *g = container_of(q, struct group, link);
        next = q->next;
        if (!device_event_done(g->done))
            continue;
        finish(n, g);
        next = n->groups.next; /* the mutex was let go */
    }
}

static void finish_waiters(struct nccl *n)
{
    while (!queue_empty(&n->waiters) &&
           ((n->state == READY && !n->again) || n->why.code != 0 || n->aborted)) {
        struct waiter *w = container_of(queue_pop(&n->waiters), struct waiter, link);
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

static void *watch(void *arg)
{
    struct nccl *n = arg;
    (void)pthread_mutex_lock(&n->mutex);
    while (!(n->closing && n->state == NONE)) {
        if (n->state == NONE && n->has_id && n->attempt != 0 && n->why.code == 0 && !n->aborted)
            start_joining(n);
        else if (n->state == JOINING)
            poll_joining(n);
        else if (n->state == READY)
            (void)poll_lanes(n);
        else if (n->state == ENDING)
            poll_ending(n);
        if (must_end(n))
            start_ending(n);
        if (n->state != ENDING)
            poll_groups(n);
        finish_waiters(n);
        if (!(n->closing && n->state == NONE))
            wait_us(n, queue_empty(&n->groups) && n->state != JOINING && n->state != ENDING
                           ? IDLE_POLL_US
                           : POLL_US);
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return NULL;
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

static struct group *group_new(struct nccl *n, uint32_t device, struct transport_group *group)
{
    struct group *g = mem_zalloc(sizeof *g + (size_t)group->n_messages * sizeof g->messages[0]);
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

static void compare(struct nccl *n, struct message *a, struct message *b)
{
    const struct message *send = a->what.send ? a : b, *receive = a->what.send ? b : a;
    if (a->what.bytes == b->what.bytes && a->what.network == b->what.network &&
        a->what.tag == b->what.tag)
        return;
    struct message *ends[2] = {a, b};
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
    end_because(n, RS_EPROTO, "NCCL: the two ends of a message disagree");
}

/* The n-th send meets the n-th receive: between local devices both ends are seen here. */
static void match(struct nccl *n, struct message *m)
{
    uint32_t here = m->group->device, peer = m->what.peer;
    if (n->lanes[peer].device == NULL)
        return;
    struct queue *c =
        &n->channels[m->what.send ? here * n->n_devices + peer : peer * n->n_devices + here];
    struct message *first = queue_empty(c) ? NULL : container_of(c->next, struct message, link);
    if (first == NULL || first->what.send == m->what.send) {
        queue_push(c, &m->link);
        return;
    }
    queue_remove(&first->link);
    compare(n, m, first);
}

static int nccl_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                        struct transport_group *group)
{
    struct nccl *n = nccl_of(t);
    if (!valid(n, device, group))
        return RS_EINVAL;
    struct group *g = group_new(n, device, group);
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

static int nccl_connect(struct transport *t, struct transport_connect *c)
{
    struct nccl *n = nccl_of(t);
    struct waiter *w = mem_zalloc(sizeof *w);
    if (w == NULL)
        return RS_ENOMEM;
    w->connect = c;
    pthread_mutex_lock(&n->mutex);
    int r = n->attempt == 0 ? RS_EPRECOND : n->aborted ? RS_ECANCELED : 0;
    if (r == 0) {
        n->n_open++;
        queue_push(&n->waiters, &w->link);
        if (!all_local(n) && (n->state == NONE || n->state == JOINING))
            n->join_until_ns =
                c->deadline_ns < n->join_until_ns ? c->deadline_ns : n->join_until_ns;
        (void)pthread_cond_broadcast(&n->changed);
    }
    pthread_mutex_unlock(&n->mutex);
    if (r != 0)
        mem_free(w);
    return r;
}

/* --- attempts ------------------------------------------------------------------------------------ */

/* With the mutex held: an id for new communicators. */
static int fresh_id(struct nccl *n, struct err *e)
{
    if (n->has_id)
        return 0;
    if (!all_local(n))
        return err_set(e, RS_EPRECOND,
                       "NCCL: the communicators of epoch %llu have ended: the next attempt needs a "
                       "new id",
                       (unsigned long long)n->base.epoch);
    int r = transport_nccl_node_id(n->node, n->id, e);
    if (r == 0)
        r = id_take(n->node, n->id, e);
    n->has_id = r == 0;
    return r;
}

static int nccl_begin(struct transport *t, uint64_t attempt, struct err *e)
{
    struct nccl *n = nccl_of(t);
    int r = 0;
    pthread_mutex_lock(&n->mutex);
    bool stands = usable(n);
    if (n->n_open > 0)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not over: %u groups are left",
                    (unsigned long long)n->attempt, n->n_open);
    else if (attempt <= n->attempt)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not above the last one, %llu",
                    (unsigned long long)attempt, (unsigned long long)n->attempt);
    else if (!stands)
        r = fresh_id(n, e);
    if (r == 0) {
        n->again = !stands && (n->state == JOINING || n->state == READY);
        n->attempt = attempt;
        n->aborted = false;
        n->why = (struct err){0};
        n->join_until_ns = UINT64_MAX;
        for (uint32_t i = 0; i < n->n_devices; i++)
            n->lanes[i].failed = 0;
        for (uint32_t i = 0; i < n->n_devices * n->n_devices; i++)
            queue_init(&n->channels[i]);
        (void)pthread_cond_broadcast(&n->changed);
    }
    pthread_mutex_unlock(&n->mutex);
    return r;
}

static void nccl_abort(struct transport *t)
{
    struct nccl *n = nccl_of(t);
    pthread_mutex_lock(&n->mutex);
    n->aborted = true;
    (void)pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->mutex);
}

/* Groups in flight are over only when their communicators have ended (watch); ones that end without
 * any touch no buffer, and the next attempt waits for them by itself. */
static bool nccl_quiesced(const struct transport *t)
{
    struct nccl *n = nccl_of(t);
    pthread_mutex_lock(&n->mutex);
    bool quiesced = n->n_open == 0;
    pthread_mutex_unlock(&n->mutex);
    return quiesced;
}

static struct transport_counters nccl_counters(const struct transport *t, uint32_t device)
{
    struct nccl *n = nccl_of(t);
    struct transport_counters c = {0};
    pthread_mutex_lock(&n->mutex);
    if (device < n->n_devices)
        c = n->lanes[device].counters;
    pthread_mutex_unlock(&n->mutex);
    return c;
}

static void nccl_free(struct nccl *n)
{
    for (uint32_t i = 0; n->lanes != NULL && i < n->n_devices; i++)
        (void)pthread_mutex_destroy(&n->lanes[i].mutex);
    (void)pthread_cond_destroy(&n->changed);
    (void)pthread_mutex_destroy(&n->mutex);
    mem_free(n->channels);
    mem_free(n->lanes);
    mem_free(n);
}

static void nccl_close(struct transport *t)
{
    struct nccl *n = nccl_of(t);
    rs_assert(n->n_open == 0);
    pthread_mutex_lock(&n->mutex);
    n->closing = true;
    (void)pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->mutex);
    rs_assert(pthread_join(n->watcher, NULL) == 0);
    nccl_free(n);
}

static const struct transport_ops nccl_ops = {
    .kind = "nccl",
    .begin = nccl_begin,
    .connect = nccl_connect,
    .enqueue = nccl_enqueue,
    .abort = nccl_abort,
    .quiesced = nccl_quiesced,
    .counters = nccl_counters,
    .close = nccl_close,
};

static int check_devices(struct device *const *devices, const bool *takes_part, uint32_t n,
                         struct err *e)
{
    uint32_t n_local = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (devices[i] == NULL)
            continue;
        if (!takes_part[i] || !device_is_cuda(devices[i]))
            return err_set(e, RS_EINVAL, "NCCL: device %u %s", i,
                           takes_part[i] ? "is no CUDA device" : "is local and takes no part");
        n_local++;
        for (uint32_t k = 0; k < i; k++)
            if (devices[k] != NULL &&
                strcmp(device_cuda_uuid(devices[k]), device_cuda_uuid(devices[i])) == 0)
                return err_set(
                    e, RS_EINVAL,
                    "NCCL: devices %u and %u are one GPU, %s: a communicator can have it "
                    "once; give each worker's device once",
                    k, i, device_cuda_uuid(devices[i]));
    }
    return n_local > 0 ? 0 : err_set(e, RS_EINVAL, "NCCL: none of the devices is local");
}

static void init_lanes(struct nccl *n, struct device *const *devices, const bool *takes_part)
{
    for (uint32_t i = 0; i < n->n_devices; i++) {
        struct lane *lane = &n->lanes[i];
        lane->t = n;
        lane->device = devices[i];
        lane->rank = takes_part[i] ? (int)n->n_ranks++ : -1;
        n->n_local += devices[i] != NULL;
        (void)pthread_mutex_init(&lane->mutex, NULL);
    }
    for (uint32_t i = 0; i < n->n_devices * n->n_devices; i++)
        queue_init(&n->channels[i]);
}

static int set_id(struct nccl *n, const uint8_t *id, struct err *e)
{
    int r = 0;
    if (id == NULL)
        return all_local(n) ? 0 : err_set(e, RS_EINVAL, "NCCL: devices of other nodes need an id");
    r = id_take(n->node, id, e);
    if (r == 0) {
        memcpy(n->id, id, sizeof n->id);
        n->has_id = true;
    }
    return r;
}

int transport_nccl_open(struct transport_nccl_node *node, struct device *const *devices,
                        const bool *takes_part, uint32_t n_devices, uint64_t epoch,
                        const uint8_t *id, const struct transport_nccl_options *options,
                        struct transport **ret, struct err *e)
{
    pthread_condattr_t attr;
    if (n_devices > MAX_DEVICES)
        return err_set(e, RS_EEXHAUSTED, "NCCL transport of %u devices: %d are the most", n_devices,
                       MAX_DEVICES);
    int r = check_devices(devices, takes_part, n_devices, e);
    if (r != 0)
        return r;
    struct nccl *n = mem_zalloc(sizeof *n);
    if (n == NULL)
        return err_set(e, RS_ENOMEM, "NCCL transport: out of memory");
    rs_assert(pthread_condattr_init(&attr) == 0);
    rs_assert(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0);
    rs_assert(pthread_cond_init(&n->changed, &attr) == 0);
    (void)pthread_condattr_destroy(&attr);
    (void)pthread_mutex_init(&n->mutex, NULL);
    n->lanes = mem_calloc(n_devices, sizeof *n->lanes);
    n->channels = mem_calloc((size_t)n_devices * n_devices, sizeof *n->channels);
    if (n->lanes == NULL || n->channels == NULL) {
        r = err_set(e, RS_ENOMEM, "NCCL transport: out of memory");
        goto free_it;
    }
    n->base.ops = &nccl_ops;
    n->base.epoch = epoch;
    n->node = node;
    n->n_devices = n_devices;
    if (options != NULL)
        n->options = *options;
    queue_init(&n->groups);
    queue_init(&n->waiters);
    init_lanes(n, devices, takes_part);
    r = set_id(n, id, e);
    if (r != 0)
        goto free_it;
    if (pthread_create(&n->watcher, NULL, watch, n) != 0) {
        r = err_set(e, RS_EEXHAUSTED, "NCCL transport: no thread");
        goto free_it;
    }
    *ret = &n->base;
    return 0;
free_it:
    nccl_free(n);
    return r;
}

int transport_nccl_renew(struct transport *t, const uint8_t *id, struct err *e)
{
    struct nccl *n = nccl_of(t);
    pthread_mutex_lock(&n->mutex);
    int r = usable(n) || n->n_open > 0
                ? err_set(e, RS_EPRECOND, "NCCL: the communicators of epoch %llu are still in use",
                          (unsigned long long)n->base.epoch)
                : set_id(n, id, e);
    pthread_mutex_unlock(&n->mutex);
    return r;
}

bool transport_nccl_needs_id(const struct transport *t)
{
    struct nccl *n = nccl_of(t);
    pthread_mutex_lock(&n->mutex);
    bool needs = !usable(n) && !n->has_id && !all_local(n);
    pthread_mutex_unlock(&n->mutex);
    return needs;
}
