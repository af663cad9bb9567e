/* Communicators that are made by shrinking those of an earlier epoch, instead of by an id.
 *
 *   JOINING:  MAKING ── all children are there ─▶ PARTING ── all parents have ended ─▶ READY
 *                │ refused, an error, too late
 *                ▼
 *             FAILED ─▶ ENDING (parents and children) ─▶ NONE ─▶ JOINING by the id
 *
 * Only where nothing is in flight and no error is known: a member that dies with groups in flight
 * leaves nothing that others could agree on, and its fence is what counts then; so NCCL_SHRINK_DEFAULT
 * is all that is asked for. Who has left need not call, dead or alive. Where one member fails and
 * another does not, they meet in no communicator: the attempt ends at its deadline. */
#include "transport/nccl_inner.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "device/device_cuda.h"

#include "base/banned.h"

enum { DEFAULT_SHRINK_MS = 3000 };

/* --- taking ------------------------------------------------------------------------------------- */

/* With the parent's mutex held: why it can't be shrunk; NULL: it can. */
static const char *unfit(const struct nccl *p)
{
    return p->node->extras.shrink == NULL         ? "this NCCL can not"
           : p->state != NCCL_READY || p->again   ? "they are not ready"
           : p->why.code != 0                     ? p->why.text
           : p->n_open != 0 || nccl_any_issued(p) ? "something is in flight"
           : p->closing                           ? "they are being closed"
                                                  : NULL;
}

/* The rank that a parent's rank becomes; -1: it has left. */
static int rank_left(const struct nccl *n, int rank)
{
    int below = 0;
    for (uint32_t i = 0; i < n->n_excluded; i++) {
        if (n->excluded[i] == rank)
            return -1;
        below += n->excluded[i] < rank;
    }
    return rank - below;
}

/* Of the same device, with the rank that it will have; NULL: there is none. */
static struct nccl_lane *lane_of(struct nccl *n, const struct nccl_lane *parent)
{
    int rank = rank_left(n, parent->rank);
    for (uint32_t i = 0; rank >= 0 && i < n->n_devices; i++)
        if (n->lanes[i].rank == rank)
            return n->lanes[i].device == parent->device ? &n->lanes[i] : NULL;
    return NULL;
}

static bool same_devices(struct nccl *n, const struct nccl *p)
{
    if (n->n_ranks + n->n_excluded != p->n_ranks || n->n_local != p->n_local)
        return false;
    for (uint32_t i = 0; i < p->n_devices; i++)
        if (p->lanes[i].device != NULL && lane_of(n, &p->lanes[i]) == NULL)
            return false;
    return true;
}

static void take_lane(struct nccl *p, struct nccl_lane *from, struct nccl_lane *to)
{
    (void)pthread_mutex_lock(&from->mutex);
    (void)device_cuda_use(from->device, NULL);
    nccl_buffer_deregister(p, from);
    from->buffer.data = NULL;
    to->parent = from->comm;
    from->comm = NULL;
    (void)pthread_mutex_unlock(&from->mutex);
}

static bool take(struct nccl *n, struct nccl *p)
{
    (void)pthread_mutex_lock(&p->mutex);
    const char *why = unfit(p);
    if (why == NULL && !same_devices(n, p))
        why = "its devices are not those that are left";
    for (uint32_t i = 0; why == NULL && i < p->n_devices; i++)
        if (p->lanes[i].device != NULL)
            take_lane(p, &p->lanes[i], lane_of(n, &p->lanes[i]));
    if (why == NULL)
        p->state = NCCL_NONE;
    else
        log_debug("NCCL: the communicators of epoch %llu are not shrunk: %s",
                  (unsigned long long)p->base.epoch, why);
    (void)pthread_mutex_unlock(&p->mutex);
    return why == NULL;
}

int nccl_shrink_copy(struct nccl *n, struct err *e)
{
    const struct transport_nccl_shrink *s = &n->options.shrink;
    n->excluded = mem_calloc(s->n_excluded, sizeof *n->excluded);
    if (n->excluded == NULL)
        return err_set(e, RS_ENOMEM, "NCCL transport: out of memory");
    for (uint32_t i = 0; i < s->n_excluded; i++)
        n->excluded[i] = (int)s->excluded[i];
    n->n_excluded = s->n_excluded;
    return 0;
}

void nccl_shrink_take(struct nccl *n)
{
    (void)pthread_mutex_lock(&n->mutex);
    n->has_parents = take(n, nccl_of(n->options.shrink.parent));
    n->shrinks_failed += !n->has_parents;
    n->options.shrink = (struct transport_nccl_shrink){.ms = n->options.shrink.ms};
    (void)pthread_mutex_unlock(&n->mutex);
}

/* --- making ------------------------------------------------------------------------------------- */

static ncclResult_t shrink_lane(struct nccl *n, struct nccl_lane *lane)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    nccl_configure(n, &config);
    if (device_cuda_use(lane->device, NULL) != 0)
        return ncclUnhandledCudaError;
    return n->node->extras.shrink(lane->parent, n->excluded, (int)n->n_excluded, &lane->comm,
                                  &config, NCCL_SHRINK_DEFAULT);
}

/* All local ranks in one group, without the mutex, as where they join by an id. */
static ncclResult_t shrink_all(struct nccl *n)
{
    ncclResult_t r = n->node->nccl.start();
    for (uint32_t i = 0; i < n->n_devices && (r == ncclSuccess || r == ncclInProgress); i++)
        if (n->lanes[i].device != NULL)
            r = shrink_lane(n, &n->lanes[i]);
    ncclResult_t end = n->node->nccl.end();
    return r != ncclSuccess && r != ncclInProgress ? r : end;
}

static void fail(struct nccl *n, const char *why)
{
    log_debug("NCCL: epoch %llu: shrinking failed, a new communicator is made: %s",
              (unsigned long long)n->base.epoch, why);
    n->shrink = NCCL_SHRINK_FAILED;
    n->shrinks_failed++;
}

void nccl_shrink_start(struct nccl *n)
{
    uint64_t ms = n->options.shrink.ms != 0 ? n->options.shrink.ms : DEFAULT_SHRINK_MS;
    n->shrink_until_ns = clock_mono_ns() + ms * 1000000;
    n->shrink = NCCL_SHRINK_MAKING;
    n->state = NCCL_JOINING;
    (void)pthread_mutex_unlock(&n->mutex);
    ncclResult_t r = shrink_all(n);
    (void)pthread_mutex_lock(&n->mutex);
    if (r != ncclSuccess && r != ncclInProgress)
        fail(n, n->node->nccl.text(r));
}

/* A parent tells until its child is there; then that tells. */
static ncclResult_t ask(struct nccl *n, struct nccl_lane *lane)
{
    const struct nccl_library *nccl = &n->node->nccl;
    ncclResult_t said = ncclSuccess;
    ncclResult_t r = nccl->error(lane->parent, &said);
    if (r != ncclSuccess || said != ncclSuccess)
        return r != ncclSuccess ? r : said;
    ncclComm_t child = __atomic_load_n(&lane->comm, __ATOMIC_ACQUIRE);
    if (child == NULL)
        return ncclInProgress;
    r = nccl->error(child, &said);
    return r != ncclSuccess ? r : said;
}

static void *part_main(void *arg)
{
    struct nccl_lane *lane = arg;
    (void)pthread_mutex_lock(&lane->mutex);
    (void)device_cuda_use(lane->device, NULL);
    nccl_shrink_end_parent(lane);
    (void)pthread_mutex_unlock(&lane->mutex);
    nccl_thread_ends(lane->t);
    return NULL;
}

void nccl_shrink_end_parent(struct nccl_lane *lane)
{
    if (lane->parent != NULL)
        (void)lane->t->node->nccl.abort(lane->parent);
    lane->parent = NULL;
}

static void poll_making(struct nccl *n)
{
    uint32_t busy = 0;
    for (uint32_t i = 0; i < n->n_devices; i++) {
        ncclResult_t r = n->lanes[i].device == NULL ? ncclSuccess : ask(n, &n->lanes[i]);
        busy += r == ncclInProgress;
        if (r != ncclSuccess && r != ncclInProgress) {
            fail(n, n->node->nccl.text(r));
            return;
        }
    }
    if (busy == 0) {
        n->shrink = NCCL_SHRINK_PARTING;
        nccl_threads_start(n, part_main);
    } else if (clock_mono_ns() >= n->shrink_until_ns) {
        fail(n, "not all who are left came in time");
    }
}

void nccl_shrink_poll(struct nccl *n)
{
    if (n->shrink == NCCL_SHRINK_MAKING) {
        poll_making(n);
    } else if (n->shrink == NCCL_SHRINK_PARTING && n->n_ending == 0) {
        n->shrink = NCCL_SHRINK_NONE;
        n->has_parents = n->has_id = false;
        n->shrunk++;
        n->state = NCCL_READY;
        (void)pthread_cond_broadcast(&n->changed);
    } else if (n->shrink == NCCL_SHRINK_PARTING) {
        nccl_watchdog(n);
    }
}
