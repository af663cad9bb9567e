/* Attempts over NCCL communicators. What it promises stands in transport_nccl.h. */
#include "transport/nccl_inner.h"

#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "device/device_cuda.h"

#include "base/banned.h"

enum { MAX_DEVICES = 1024 };

/* --- attempts ------------------------------------------------------------------------------------ */

/* With the mutex held: an id for new communicators. */
static int fresh_id(struct nccl *n, struct err *e)
{
    if (n->has_id)
        return 0;
    if (!nccl_all_local(n))
        return err_set(e, RS_EPRECOND,
                       "NCCL: the communicators of epoch %llu have ended: the next attempt needs a "
                       "new id",
                       (unsigned long long)n->base.epoch);
    int r = transport_nccl_node_id(n->node, n->id, e);
    if (r == 0)
        r = nccl_id_take(n->node, n->id, e);
    n->has_id = r == 0;
    return r;
}

static int nccl_begin(struct transport *t, uint64_t attempt, struct err *e)
{
    struct nccl *n = nccl_of(t);
    int r = 0;
    pthread_mutex_lock(&n->mutex);
    bool stands = nccl_usable(n);
    if (n->n_open > 0)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not over: %u groups are left",
                    (unsigned long long)n->attempt, n->n_open);
    else if (attempt <= n->attempt)
        r = err_set(e, RS_EPRECOND, "attempt %llu is not above the last one, %llu",
                    (unsigned long long)attempt, (unsigned long long)n->attempt);
    else if (!stands)
        r = fresh_id(n, e);
    if (r == 0) {
        n->again = !stands && (n->state == NCCL_JOINING || n->state == NCCL_READY);
        n->attempt = attempt;
        n->aborted = false;
        n->why = (struct err){0};
        n->join_until_ns = UINT64_MAX;
        for (uint32_t i = 0; i < n->n_devices; i++) {
            n->lanes[i].failed = 0;
            n->lanes[i].counters.first_byte_ns = 0;
        }
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
    if (device < n->n_devices) {
        c.registrations = atomic_load(&n->lanes[device].registrations);
        c.registered_bytes = atomic_load(&n->lanes[device].registered_bytes);
        c.hits = atomic_load(&n->lanes[device].hits);
        c.hit_bytes = atomic_load(&n->lanes[device].hit_bytes);
        c.shrunk = n->shrunk;
        c.shrinks_failed = n->shrinks_failed;
        c.refused_registrations = atomic_load(&n->lanes[device].refusals);
    }
    pthread_mutex_unlock(&n->mutex);
    return c;
}

static void nccl_free(struct nccl *n)
{
    for (uint32_t i = 0; n->lanes != NULL && i < n->n_devices; i++)
        (void)pthread_mutex_destroy(&n->lanes[i].mutex);
    (void)pthread_cond_destroy(&n->changed);
    (void)pthread_mutex_destroy(&n->mutex);
    mem_free(n->excluded);
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
        struct nccl_lane *lane = &n->lanes[i];
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
        return nccl_all_local(n) ? 0
                                 : err_set(e, RS_EINVAL, "NCCL: devices of other nodes need an id");
    r = nccl_id_take(n->node, id, e);
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
    if (r == 0 && n->options.shrink.parent != NULL)
        r = nccl_shrink_copy(n, e);
    if (r != 0)
        goto free_it;
    if (pthread_create(&n->watcher, NULL, nccl_watch, n) != 0) {
        r = err_set(e, RS_EEXHAUSTED, "NCCL transport: no thread");
        goto free_it;
    }
    if (n->options.shrink.parent != NULL)
        nccl_shrink_take(n); /* the watcher would end what is never used */
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
    int r = nccl_usable(n) || n->n_open > 0
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
    bool needs = !nccl_usable(n) && !n->has_id && !nccl_all_local(n);
    pthread_mutex_unlock(&n->mutex);
    return needs;
}
