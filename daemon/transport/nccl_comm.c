/* The life of communicators: they join, are watched, and end. */
#include "transport/nccl_inner.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"
#include "device/device_cuda.h"
#include "device/fence.h"

#include "base/banned.h"

enum { DEFAULT_INIT_MS = 30000, DEFAULT_WATCHDOG_MS = 5000, DEFAULT_CTAS = 8 };

void nccl_wait_us(struct nccl *n, uint64_t us)
{
    uint64_t until = clock_mono_ns() + us * 1000;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000U),
                         .tv_nsec = (long)(until % 1000000000U)};
    (void)pthread_cond_timedwait(&n->changed, &n->mutex, &t);
}

int nccl_code(ncclResult_t r)
{
    return r == ncclRemoteError                                ? RS_EPEER
           : r == ncclUnhandledCudaError                       ? RS_EDEVICE
           : r == ncclInvalidArgument || r == ncclInvalidUsage ? RS_EINVAL
                                                               : RS_EPEER;
}

/* With the mutex held. The first reason stays. */
void nccl_end_because(struct nccl *n, int code, const char *text)
{
    if (n->why.code != 0)
        return;
    (void)err_set(&n->why, code, "%s", text);
    (void)pthread_cond_broadcast(&n->changed);
}

/* --- joining ------------------------------------------------------------------------------------ */

void nccl_configure(const struct nccl *n, ncclConfig_t *ret)
{
    ret->blocking = 0;
    ret->minCTAs = 1;
    ret->maxCTAs = (int)(n->options.max_ctas != 0 ? n->options.max_ctas : DEFAULT_CTAS);
}

static ncclResult_t join_lane(struct nccl *n, struct nccl_lane *lane, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    nccl_configure(n, &config);
    if (device_cuda_use(lane->device, NULL) != 0)
        return ncclUnhandledCudaError;
    return n->node->nccl.init(&lane->comm, (int)n->n_ranks, *id, lane->rank, &config);
}

/* All local ranks in one group. Called without the mutex: nobody else touches communicators now. The
 * id is the caller's copy: the next attempt may set another meanwhile. */
static ncclResult_t join_all(struct nccl *n, const ncclUniqueId *id)
{
    ncclResult_t r = n->node->nccl.start();
    for (uint32_t i = 0; i < n->n_devices && (r == ncclSuccess || r == ncclInProgress); i++)
        if (n->lanes[i].device != NULL)
            r = join_lane(n, &n->lanes[i], id);
    ncclResult_t end = n->node->nccl.end();
    return r != ncclSuccess && r != ncclInProgress ? r : end;
}

static void start_joining(struct nccl *n)
{
    uint64_t ms = n->options.init_ms != 0 ? n->options.init_ms : DEFAULT_INIT_MS;
    uint64_t until_ns = clock_mono_ns() + ms * 1000000;
    if (until_ns < n->join_until_ns) /* who waits for it may have less time */
        n->join_until_ns = until_ns;
    if (n->has_parents) {
        nccl_shrink_start(n);
        return;
    }
    ncclUniqueId id;
    memcpy(id.internal, n->id, sizeof n->id);
    n->has_id = false;
    n->state = NCCL_JOINING;
    (void)pthread_mutex_unlock(&n->mutex);
    ncclResult_t r = join_all(n, &id);
    (void)pthread_mutex_lock(&n->mutex);
    if (r != ncclSuccess && r != ncclInProgress) {
        char text[256];
        (void)snprintf(text, sizeof text, "NCCL: making communicators: %s (%s)",
                       n->node->nccl.text(r), n->node->nccl.last(NULL));
        nccl_end_because(n, nccl_code(r), text);
    }
}

/* What a lane's communicator says, with its last words; ncclSuccess where there is none. */
static ncclResult_t ask(struct nccl *n, struct nccl_lane *lane, char *ret_text, size_t text_bytes)
{
    const struct nccl_library *nccl = &n->node->nccl;
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
        struct nccl_lane *lane = &n->lanes[i];
        char said[256], text[384];
        ncclResult_t r = lane->device == NULL ? ncclSuccess : ask(n, lane, said, sizeof said);
        busy += r == ncclInProgress;
        if (r == ncclSuccess || r == ncclInProgress)
            continue;
        (void)snprintf(text, sizeof text, "NCCL: device %u (comm rank %d of %u): %s", i, lane->rank,
                       n->n_ranks, said);
        nccl_end_because(n, nccl_code(r), text);
    }
    return busy;
}

static void poll_joining(struct nccl *n)
{
    if (n->shrink != NCCL_SHRINK_NONE)
        nccl_shrink_poll(n);
    else if (poll_lanes(n) == 0 && n->why.code == 0)
        n->state = NCCL_READY, (void)pthread_cond_broadcast(&n->changed);
    if (n->state == NCCL_JOINING && clock_mono_ns() >= n->join_until_ns) {
        char text[160];
        (void)snprintf(text, sizeof text,
                       "NCCL: not all %u devices (%u are local) have joined the communicator of "
                       "epoch %llu in time",
                       n->n_ranks, n->n_local, (unsigned long long)n->base.epoch);
        nccl_end_because(n, RS_EDEADLINE, text);
    }
}

/* --- ending ------------------------------------------------------------------------------------- */

static void *abort_main(void *arg)
{
    struct nccl_lane *lane = arg;
    struct nccl *n = lane->t;
    pthread_mutex_lock(&lane->mutex);
    (void)device_cuda_use(lane->device, NULL);
    nccl_shrink_end_parent(lane); /* which ends the making of a child */
    ncclComm_t comm = lane->comm;
    /* With a group in flight it might wait for that; the abort lets go of registrations itself. */
    if (lane->idle)
        nccl_buffer_deregister(n, lane);
    if (comm != NULL)
        (void)n->node->nccl.abort(comm);
    lane->comm = NULL;
    nccl_buffer_forget(lane);
    pthread_mutex_unlock(&lane->mutex);
    nccl_thread_ends(n);
    return NULL;
}

void nccl_thread_ends(struct nccl *n)
{
    pthread_mutex_lock(&n->mutex);
    n->n_ending--;
    (void)pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->mutex);
}

void nccl_threads_start(struct nccl *n, void *(*fn)(void *lane))
{
    uint64_t ms = n->options.watchdog_ms != 0 ? n->options.watchdog_ms : DEFAULT_WATCHDOG_MS;
    n->end_until_ns = clock_mono_ns() + ms * 1000000;
    for (uint32_t i = 0; i < n->n_devices; i++) {
        if (n->lanes[i].device == NULL)
            continue;
        n->n_ending++;
        /* Without a thread the watchdog has to do: it stays counted, and on_stuck is called. */
        (void)thread_start_detached(fn, &n->lanes[i]);
    }
}

static void start_ending(struct nccl *n)
{
    bool idle = !nccl_any_issued(n);
    n->state = NCCL_ENDING;
    n->again = false;
    atomic_store(&n->leave, true);
    (void)pthread_cond_broadcast(&n->changed);
    for (uint32_t i = 0; i < n->n_devices; i++)
        n->lanes[i].idle = idle;
    nccl_threads_start(n, abort_main);
}

void nccl_watchdog(struct nccl *n)
{
    if (n->stuck || clock_mono_ns() < n->end_until_ns)
        return;
    n->stuck = true;
    (void)pthread_mutex_unlock(&n->mutex);
    if (n->options.on_stuck != NULL)
        n->options.on_stuck(n->options.arg);
    (void)pthread_mutex_lock(&n->mutex);
}

static void poll_ending(struct nccl *n)
{
    if (n->n_ending > 0) {
        nccl_watchdog(n);
        return;
    }
    n->state = NCCL_NONE;
    n->shrink = NCCL_SHRINK_NONE;
    n->has_parents = false;
    atomic_store(&n->leave, false);
}

bool nccl_must_end(struct nccl *n)
{
    if (n->state == NCCL_NONE && n->closing && n->has_parents)
        return true; /* they were taken, and never shrunk */
    if (n->state != NCCL_JOINING && n->state != NCCL_READY)
        return false;
    if (!fence_holds(n->options.fence) && nccl_any_issued(n))
        nccl_end_because(n, RS_EDEADLINE, "NCCL: the lease has run out with a group in flight");
    return n->why.code != 0 || n->closing || n->again || n->shrink == NCCL_SHRINK_FAILED ||
           (n->aborted && (n->state == NCCL_JOINING || nccl_any_issued(n)));
}

void *nccl_watch(void *arg)
{
    struct nccl *n = arg;
    (void)pthread_mutex_lock(&n->mutex);
    while (!(n->closing && n->state == NCCL_NONE && !n->has_parents)) {
        if (n->state == NCCL_NONE && !n->closing && n->has_id && n->attempt != 0 &&
            n->why.code == 0 && !n->aborted)
            start_joining(n);
        else if (n->state == NCCL_JOINING)
            poll_joining(n);
        else if (n->state == NCCL_READY)
            (void)poll_lanes(n);
        else if (n->state == NCCL_ENDING)
            poll_ending(n);
        if (nccl_must_end(n))
            start_ending(n);
        if (n->state != NCCL_ENDING)
            nccl_poll_groups(n);
        nccl_finish_waiters(n);
        if (!(n->closing && n->state == NCCL_NONE && !n->has_parents))
            nccl_wait_us(n, queue_empty(&n->groups) && n->state != NCCL_JOINING &&
                                    n->state != NCCL_ENDING
                                ? NCCL_IDLE_POLL_US
                                : NCCL_POLL_US);
    }
    (void)pthread_mutex_unlock(&n->mutex);
    return NULL;
}
