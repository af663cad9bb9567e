/* HELLO: the devices that a data plane opens, and what it says of them. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "device/device_cuda.h"
#include "device/device_domains.h"
#include "exec/pairs.h"
#include "transport/transport_nccl.h"

#include "base/banned.h"

static int open_streams(struct plane_device *d, uint32_t n_ways, struct err *e)
{
    int r = device_stream_new(d->device, "pack", &d->pack, e);
    if (r == 0)
        r = device_stream_new(d->device, "net", &d->net, e);
    if (r == 0)
        r = device_stream_new(d->device, "unpack", &d->unpack, e);
    for (uint32_t w = 0; w < n_ways && r == 0; w++) {
        d->ways[w].device = d->device;
        r = device_stream_new(d->device, "fan-out", &d->ways[w].copy, e);
        if (r == 0)
            r = device_stream_new(d->device, "fingerprint", &d->ways[w].check, e);
    }
    return r;
}

static void stream_shut(struct device_stream *s)
{
    if (s != NULL)
        device_stream_free(s);
}

static void work_free(struct device *d, struct plane_work *w)
{
    if (w->memory != NULL)
        device_free(d, w->memory, PLANE_WORK_BYTES);
}

static void device_shut(struct plane *p, uint32_t device)
{
    struct plane_device *d = &p->devices[device];
    ring_free(p, device);
    stream_shut(d->pack);
    stream_shut(d->net);
    stream_shut(d->unpack);
    for (uint32_t w = 0; w < PLANE_MAX_WAYS; w++) {
        stream_shut(d->ways[w].copy);
        stream_shut(d->ways[w].check);
        work_free(d->device, &d->ways[w].copy_work);
        work_free(d->device, &d->ways[w].check_work);
        if (d->ways[w].bounce != NULL)
            device_free(d->device, d->ways[w].bounce, BOUNCE_BYTES);
        sample_memory_free(&d->ways[w]);
    }
    work_free(d->device, &d->pack_work);
    if (d->scratch_bytes > 0)
        device_free(d->device, d->scratch, d->scratch_bytes);
    device_close(d->device);
}

static int hello_check(const struct plane *p, const struct wire_packet *packet,
                       struct wire_hello *ret, struct err *e)
{
    if (p->ready)
        return err_set(e, RS_EPRECOND, "HELLO has been said");
    if (packet->header.body_bytes < sizeof(*ret))
        return err_set(e, RS_EPROTO, "HELLO of %u bytes", packet->header.body_bytes);
    memcpy(ret, packet->body, sizeof(*ret));
    size_t names = packet->header.body_bytes - sizeof(*ret);
    if (names != 0 && names != (uint64_t)ret->n_devices * WIRE_DEVICE_NAME_BYTES)
        return err_set(e, RS_EPROTO, "HELLO with %zu bytes of names for %u devices", names,
                       ret->n_devices);
    ret->backend[sizeof(ret->backend) - 1] = '\0';
    ret->transport[sizeof(ret->transport) - 1] = '\0';
    ret->data_address[sizeof(ret->data_address) - 1] = '\0';
    if (ret->transport[0] != '\0' && strcmp(ret->transport, "memory") != 0 &&
        strcmp(ret->transport, "tcp") != 0 && strcmp(ret->transport, "nccl") != 0)
        return err_set(e, RS_EINVAL, "transport '%s': there are 'memory', 'tcp' and 'nccl'",
                       ret->transport);
    /* The others move bytes by CPU, which can't touch a GPU's memory. */
    if ((strcmp(ret->backend, "cuda") == 0) != (strcmp(ret->transport, "nccl") == 0))
        return err_set(e, RS_EINVAL,
                       "backend '%s' with transport '%s': 'cuda' and 'nccl' go together",
                       ret->backend, ret->transport);
    if (ret->local_pairs > WIRE_LOCAL_TRANSPORT)
        return err_set(e, RS_EINVAL, "local pairs %u", ret->local_pairs);
    if (ret->n_devices == 0 || ret->n_devices > PLANE_MAX_DEVICES || ret->ring_slots == 0 ||
        ret->ring_slots > PLANE_MAX_SLOTS || ret->slot_bytes == 0 ||
        ret->slot_bytes > (UINT64_C(1) << 32))
        return err_set(e, RS_EINVAL, "%u devices with %u slots of %llu bytes", ret->n_devices,
                       ret->ring_slots, (unsigned long long)ret->slot_bytes);
    return 0;
}

static int open_node(struct plane *p, const struct wire_hello *h, struct err *e)
{
    if (strcmp(h->transport, "tcp") == 0)
        return transport_tcp_node_open(h->data_address[0] == '\0' ? "127.0.0.1" : h->data_address,
                                       h->data_port, &p->tcp, e);
#if defined(RS_CUDA)
    if (strcmp(h->transport, "nccl") == 0)
        return transport_nccl_node_open(&p->nccl, e);
#endif
    return 0;
}

/* As the HELLO has it; NULL: it names none. */
static const char *gpu_name(const struct wire_packet *packet, uint32_t device)
{
    const char *names = (const char *)packet->body + sizeof(struct wire_hello);
    if (packet->header.body_bytes == sizeof(struct wire_hello))
        return NULL;
    const char *name = names + (size_t)device * WIRE_DEVICE_NAME_BYTES;
    return memchr(name, '\0', WIRE_DEVICE_NAME_BYTES) == NULL ? "" : name;
}

static bool on_gpus(const struct wire_hello *h)
{
    return strcmp(h->backend, "cuda") == 0;
}

/* What each GPU needs in any case must fit before one is opened; what opening took is known after. */
static int open_budget(struct plane_device *d, const struct wire_hello *h, struct err *e)
{
    const struct budget_settings s = {.limit_bytes = h->max_gpu_memory_bytes,
                                      .n_devices = h->n_devices,
                                      .ring_slots = h->ring_slots,
                                      .slot_bytes = h->slot_bytes,
                                      .n_threads = h->n_threads,
                                      .max_ctas = h->max_ctas};
    return on_gpus(h) ? budget_open(&s, &d->budget, e) : 0;
}

static int open_device(struct plane *p, const struct wire_hello *h, uint32_t i, const char *name,
                       struct err *e)
{
    struct plane_device *d = &p->devices[i];
    struct device_host_options host = {.seed = h->host_seed,
                                       .max_delay_us = h->host_max_delay_us,
                                       .fence = &p->fence,
                                       .fail_at_item =
                                           i == h->host_fail_device ? h->host_fail_at_item : 0};
    struct device_cuda_options cuda = {
        .name = name, .seed = h->host_seed, .max_blocks = h->max_blocks, .fence = &p->fence};
    int r = open_budget(d, h, e);
    if (r == 0)
        r = device_open(h->backend, i, &host, &cuda, &d->device, e);
    if (r != 0)
        return err_prefix(e, r, "device %u", i);
    p->n_devices = i + 1;
#if defined(RS_CUDA)
    for (uint32_t k = 0; k < i && r == 0 && on_gpus(h); k++)
        r = device_cuda_connect(p->devices[k].device, d->device, e);
    if (r == 0 && on_gpus(h))
        r = budget_measured(&d->budget, BUDGET_CONTEXT, device_cuda_context_bytes(d->device), e);
#endif
    if (r != 0)
        return err_prefix(e, r, "device %u (%s)", i, device_name(d->device));
    return open_streams(d, p->n_ways, e);
}

void hello_close(struct plane *p)
{
    while (p->n_devices > 0)
        device_shut(p, --p->n_devices);
    mem_free(p->devices);
    p->devices = NULL;
}

static int hello(struct plane *p, const struct wire_packet *packet, struct err *e)
{
    struct wire_hello h;
    int r = hello_check(p, packet, &h, e);
    if (r < 0)
        return r;
    p->devices = mem_calloc(h.n_devices, sizeof(*p->devices));
    if (p->devices == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    p->n_ways = budget_ways(h.n_threads, h.n_devices);
#if defined(RS_CUDA)
    if (on_gpus(&h)) /* now: devices have threads */
        r = device_cuda_environment(e);
    if (r == 0 && strcmp(h.transport, "nccl") == 0)
        r = transport_nccl_environment(h.data_address, e);
#endif
    for (uint32_t i = 0; i < h.n_devices && r == 0; i++)
        r = open_device(p, &h, i, gpu_name(packet, i), e);
    if (r == 0)
        r = open_node(p, &h, e);
    if (r == 0 && on_gpus(&h))
        r = watchdog_start(&p->watchdog, &p->fence, e);
    if (r < 0) {
        hello_close(p);
        return r;
    }
    p->hello = h;
    pairs_decide(p);
    p->ready = true;
    return 0;
}

/* READY, with what follows it. */
struct ready {
    struct wire_ready head;
    struct wire_ready_device devices[PLANE_MAX_DEVICES];
};

#if defined(RS_CUDA)
static bool reaches(void *arg, uint32_t a, uint32_t b)
{
    const struct plane *p = arg;
    return device_cuda_reaches(p->devices[a].device, p->devices[b].device);
}

static void gpus_fill(struct plane *p, struct ready *ready)
{
    const char *uuids[PLANE_MAX_DEVICES];
    struct device_domain domains[PLANE_MAX_DEVICES];
    _Static_assert((int)WIRE_FABRIC_BYTES == (int)DEVICE_FABRIC_BYTES, "a name travels whole");
    _Static_assert((int)WIRE_HOW_BYTES == (int)DEVICE_HOW_BYTES, "and how it was found");
    if (p->nccl == NULL)
        return;
    for (uint32_t i = 0; i < p->n_devices; i++)
        uuids[i] = device_cuda_uuid(p->devices[i].device);
    device_domains(uuids, p->n_devices, reaches, p, domains, ready->head.how);
    size_t n = strlen(ready->head.how);
    if (device_islands_part(p->n_devices, reaches, p, domains))
        (void)snprintf(ready->head.how + n, sizeof ready->head.how - n,
                       ", parted for want of peer access");
    ready->head.nccl_version = transport_nccl_node_version(p->nccl);
    ready->head.cuda_version = device_cuda_version();
    for (uint32_t i = 0; i < p->n_devices; i++) {
        memcpy(ready->devices[i].fabric, domains[i].fabric, sizeof domains[i].fabric);
        ready->devices[i].island = domains[i].island;
        ready->devices[i].numa_node = device_cuda_numa_node(p->devices[i].device);
    }
}

uint32_t hello_gpu_memory(const struct plane *p, struct wire_gpu_memory *ret)
{
    if (p->nccl == NULL)
        return 0;
    for (uint32_t i = 0; i < p->n_devices; i++) {
        const struct budget *b = &p->devices[i].budget;
        const struct transport_counters c = links_registered(p, i);
        ret[i] = (struct wire_gpu_memory){
            .limit_bytes = b->limit_bytes,
            .context_bytes = b->bytes[BUDGET_CONTEXT],
            .context_measured = b->measured[BUDGET_CONTEXT],
            .communicator_bytes = b->bytes[BUDGET_COMMUNICATOR],
            .communicator_measured = b->measured[BUDGET_COMMUNICATOR],
            .work_bytes = b->bytes[BUDGET_WORK],
            .ring_bytes = b->bytes[BUDGET_RING],
            .scratch_bytes = b->bytes[BUDGET_SCRATCH],
            .peak_bytes = b->peak_bytes,
            .registrations = c.registrations,
            .refused_registrations = c.refused_registrations,
            .registered_bytes = c.registered_bytes,
            .hits = c.hits,
            .hit_bytes = c.hit_bytes,
            .worker_bytes = segment_table_imported_bytes(p->segments, p->devices[i].device)};
        (void)device_cuda_memory(p->devices[i].device, &ret[i].free_bytes, &ret[i].total_bytes);
    }
    return p->n_devices;
}
#else
static void gpus_fill(struct plane *p, struct ready *ready)
{
    (void)p;
    (void)ready;
}

uint32_t hello_gpu_memory(const struct plane *p, struct wire_gpu_memory *ret)
{
    (void)p;
    (void)ret;
    return 0;
}
#endif

void hello_take(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    struct ready ready;
    memset(&ready, 0, sizeof(ready));
    if (!p->ready)
        p->incarnation = packet->header.incarnation; /* a refusal, too, is known by it */
    int r = hello(p, packet, &e);
    if (r < 0) {
        plane_fail(p, &packet->header, WIRE_FAILED, r, &e, UINT32_MAX, UINT32_MAX);
        return;
    }
    if (p->tcp != NULL)
        ready.head.data_port = transport_tcp_node_port(p->tcp);
    ready.head.n_devices = p->n_devices;
    for (uint32_t i = 0; i < p->n_devices; i++)
        (void)snprintf(ready.devices[i].name, sizeof(ready.devices[i].name), "%s",
                       device_name(p->devices[i].device));
    gpus_fill(p, &ready);
    pairs_text(p, ready.head.local, sizeof ready.head.local);
    plane_answer(p, &packet->header, WIRE_READY, 0, &ready,
                 sizeof(ready.head) + ready.head.n_devices * sizeof(ready.devices[0]), -1);
}
