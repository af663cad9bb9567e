/* Staging rings: memory of NCCL's where it offers some, which it is told of (transport_nccl_buffer). */
#include "base/log.h"
#include "exec/plane.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

#if defined(RS_CUDA)
/* What the transports of all models know of a device's ring. */
static void tell_all(const struct plane *p, uint32_t device, uint8_t *ring, uint64_t bytes)
{
    if (p->nccl == NULL)
        return;
    queue_foreach (q, &p->models) {
        const struct model *m = container_of(q, struct model, link);
        if (m->network != NULL && m->plan_device[device] != UINT32_MAX)
            transport_nccl_buffer(m->network, m->plan_device[device], ring, bytes);
    }
}

static int ring_alloc(struct plane *p, struct plane_device *d, uint64_t bytes, void **ret,
                      struct err *e)
{
    struct err why = {0};
    d->ring_of_nccl =
        p->nccl != NULL && transport_nccl_node_alloc(p->nccl, d->device, bytes, ret, &why) == 0;
    if (p->nccl != NULL && !d->ring_of_nccl)
        log_debug("device %s: its ring is not NCCL's: %s", device_name(d->device), why.text);
    return d->ring_of_nccl ? 0 : device_alloc(d->device, bytes, ret, e);
}

static void ring_release(struct plane *p, struct plane_device *d)
{
    if (d->ring_of_nccl)
        transport_nccl_node_free(p->nccl, d->device, d->ring);
    else
        device_free(d->device, d->ring, d->ring_bytes);
}

void ring_tell(const struct plane *p, const struct model *m)
{
    for (uint32_t i = 0; p->nccl != NULL && m->network != NULL && i < p->n_devices; i++)
        if (m->plan_device[i] != UINT32_MAX && p->devices[i].ring_bytes > 0)
            transport_nccl_buffer(m->network, m->plan_device[i], p->devices[i].ring,
                                  p->devices[i].ring_bytes);
}
#else
void ring_tell(const struct plane *p, const struct model *m)
{
    (void)p, (void)m;
}

static void tell_all(const struct plane *p, uint32_t device, uint8_t *ring, uint64_t bytes)
{
    (void)p, (void)device, (void)ring, (void)bytes;
}

static int ring_alloc(struct plane *p, struct plane_device *d, uint64_t bytes, void **ret,
                      struct err *e)
{
    (void)p;
    return device_alloc(d->device, bytes, ret, e);
}

static void ring_release(struct plane *p, struct plane_device *d)
{
    (void)p;
    device_free(d->device, d->ring, d->ring_bytes);
}
#endif

void ring_free(struct plane *p, uint32_t device)
{
    struct plane_device *d = &p->devices[device];
    if (d->ring_bytes > 0)
        ring_release(p, d);
    budget_give(&d->budget, BUDGET_RING, d->ring_bytes);
    d->ring = NULL;
    d->ring_bytes = 0;
}

int ring_reserve(struct plane *p, uint32_t device, uint64_t bytes, struct err *e)
{
    struct plane_device *d = &p->devices[device];
    void *ring;
    if (bytes <= d->ring_bytes)
        return 0;
    tell_all(p, device, NULL, 0);
    ring_free(p, device);
    int r = budget_take(&d->budget, BUDGET_RING, bytes, e);
    if (r != 0)
        return r;
    r = ring_alloc(p, d, bytes, &ring, e);
    if (r != 0) {
        budget_give(&d->budget, BUDGET_RING, bytes);
        return r;
    }
    d->ring = ring;
    d->ring_bytes = bytes;
    return 0;
}
