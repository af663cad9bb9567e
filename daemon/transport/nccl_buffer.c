/* Buffers that are registered with communicators, and memory that NCCL can register best.
 *
 * A registration is a hint: without it NCCL copies through buffers of its own. ncclCommRegister is
 * local to a rank, so devices need not agree on it. */
#include "transport/nccl_inner.h"

#include "base/log.h"
#include "device/device_cuda.h"

#include "base/banned.h"

/* Of the many lanes and epochs that NCCL may refuse alike, the first is told. */
static void refused(struct nccl *n, struct nccl_lane *lane, const char *why)
{
    atomic_fetch_add(&lane->refusals, 1);
    if (!atomic_exchange(&n->node->told_refusal, true))
        log_debug("NCCL: device %s: a buffer of %llu bytes is not registered: %s; messages are "
                  "copied through NCCL's own",
                  device_name(lane->device), (unsigned long long)lane->buffer.bytes, why);
}

void nccl_buffer_register(struct nccl *n, struct nccl_lane *lane)
{
    const struct nccl_library *nccl = &n->node->nccl;
    struct nccl_buffer *b = &lane->buffer;
    if (b->data == NULL || b->tried || lane->comm == NULL)
        return;
    b->tried = true;
    if (n->node->extras.enlist == NULL) {
        refused(n, lane, "this NCCL offers none");
        return;
    }
    void *handle = NULL;
    ncclResult_t r = n->node->extras.enlist(lane->comm, b->data, b->bytes, &handle);
    if (r != ncclSuccess || handle == NULL) {
        refused(n, lane, r != ncclSuccess ? nccl->text(r) : "it gave no handle");
        return;
    }
    b->handle = handle;
    atomic_store(&lane->registered_bytes, b->bytes);
    atomic_fetch_add(&lane->registrations, 1);
}

void nccl_buffer_forget(struct nccl_lane *lane)
{
    lane->buffer.handle = NULL;
    lane->buffer.tried = false;
    atomic_store(&lane->registered_bytes, 0);
}

void nccl_buffer_deregister(struct nccl *n, struct nccl_lane *lane)
{
    if (lane->buffer.handle != NULL && lane->comm != NULL)
        (void)n->node->extras.delist(lane->comm, lane->buffer.handle);
    nccl_buffer_forget(lane);
}

void nccl_buffer_count(struct nccl_lane *lane, const struct transport_message *m)
{
    const struct nccl_buffer *b = &lane->buffer;
    uintptr_t from = (uintptr_t)b->data, at = (uintptr_t)m->data;
    if (b->handle == NULL || at < from || m->bytes > b->bytes || at - from > b->bytes - m->bytes)
        return;
    atomic_fetch_add(&lane->hits, 1);
    atomic_fetch_add(&lane->hit_bytes, m->bytes);
}

void transport_nccl_buffer(struct transport *t, uint32_t device, void *data, uint64_t bytes)
{
    struct nccl *n = nccl_of(t);
    rs_assert(device < n->n_devices);
    struct nccl_lane *lane = &n->lanes[device];
    if (lane->device == NULL)
        return;
    (void)pthread_mutex_lock(&lane->mutex);
    if (lane->buffer.data != data || lane->buffer.bytes != bytes) {
        (void)device_cuda_use(lane->device, NULL);
        nccl_buffer_deregister(n, lane);
        lane->buffer = (struct nccl_buffer){.data = data, .bytes = bytes};
    }
    (void)pthread_mutex_unlock(&lane->mutex);
}

int transport_nccl_node_alloc(struct transport_nccl_node *node, struct device *d, uint64_t bytes,
                              void **ret, struct err *e)
{
    void *p = NULL;
    if (node->extras.alloc == NULL || node->extras.free == NULL)
        return err_set(e, RS_EUNAVAIL, "NCCL: this version allocates no memory");
    int r = device_cuda_use(d, e);
    if (r != 0)
        return r;
    ncclResult_t said = node->extras.alloc(&p, bytes);
    if (said != ncclSuccess || p == NULL)
        return err_set(e, RS_EUNAVAIL, "NCCL: allocating %llu bytes: %s (%s)",
                       (unsigned long long)bytes, node->nccl.text(said), node->nccl.last(NULL));
    *ret = p;
    return 0;
}

void transport_nccl_node_free(struct transport_nccl_node *node, struct device *d, void *p)
{
    (void)device_cuda_use(d, NULL);
    ncclResult_t r = node->extras.free(p);
    if (r != ncclSuccess)
        log_debug("NCCL: device %s: freeing memory: %s", device_name(d), node->nccl.text(r));
}
