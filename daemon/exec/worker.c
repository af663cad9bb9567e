/* MAP, BIND, UNBIND: what the data plane knows of each worker's memory. */
#include <stdint.h>
#include <string.h>

#include "base/mem.h"
#include "exec/proof.h"

#include "base/banned.h"

struct worker *worker_find(struct plane *p, uint64_t id)
{
    queue_foreach (q, &p->workers) {
        struct worker *w = container_of(q, struct worker, link);
        if (w->id == id)
            return w;
    }
    return NULL;
}

void *const *worker_bases(const struct plane *p, const struct worker *w)
{
    uint32_t n;
    return segment_table_bases(p->segments, w->id, &n);
}

static struct worker *worker_get(struct plane *p, uint64_t id, uint32_t device)
{
    struct worker *w = worker_find(p, id);
    if (w != NULL)
        return w;
    w = mem_zalloc(sizeof(*w));
    if (w == NULL)
        return NULL;
    w->id = id;
    w->device = device;
    queue_push(&p->workers, &w->link);
    return w;
}

static void drop_memory(struct worker *w, unsigned memory)
{
    binding_free(w->bindings[memory]);
    mem_free(w->dtypes[memory]);
    w->bindings[memory] = NULL;
    w->dtypes[memory] = NULL;
}

static void worker_free(struct plane *p, struct worker *w)
{
    (void)segment_table_unmap(p->segments, w->id);
    drop_memory(w, WIRE_LIVE);
    drop_memory(w, WIRE_SHADOW);
    mem_free(w->segments);
    mem_free(w->published);
    mem_free(w->cell_prints);
    queue_remove(&w->link);
    mem_free(w);
    proofs_forget(p);
}

void workers_free(struct plane *p)
{
    while (!queue_empty(&p->workers))
        worker_free(p, container_of(p->workers.next, struct worker, link));
}

/* The worker that a MAP or BIND is about; one that is leaving takes nothing new. */
static int worker_for(struct plane *p, uint64_t id, uint32_t device, struct worker **ret,
                      struct err *e)
{
    if (id == 0)
        return err_set(e, RS_EINVAL, "worker 0 is none");
    if (device >= p->n_devices)
        return err_set(e, RS_EINVAL, "device %u: there are %u", device, p->n_devices);
    struct worker *w = worker_get(p, id, device);
    if (w == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    if (w->unbinding)
        return err_set(e, RS_EPRECOND, "worker %llx is being unbound", (unsigned long long)id);
    if (w->device != device)
        return err_set(e, RS_EINVAL, "worker %llx is on device %u, not %u", (unsigned long long)id,
                       w->device, device);
    *ret = w;
    return 0;
}

/* A worker that has got nothing is forgotten again. */
static void worker_tidy(struct plane *p, uint64_t id)
{
    struct worker *w = worker_find(p, id);
    if (w != NULL && w->n_segments == 0 && w->bindings[0] == NULL && w->bindings[1] == NULL)
        worker_free(p, w);
}

/* Each descriptor of a MAP with its allocation's size. */
static void parts_of(const struct wire_packet *packet, struct device_import_part *ret)
{
    const char *sizes = (const char *)packet->body + sizeof(struct wire_map);
    for (uint32_t i = 0; i < packet->n_fds; i++) {
        uint64_t bytes;
        memcpy(&bytes, sizes + i * sizeof bytes, sizeof bytes);
        ret[i] = (struct device_import_part){.fd = packet->fds[i], .bytes = bytes};
    }
}

/* Maps what the worker's descriptors or handle stand for; the descriptors are taken on success. */
static int map_memory(struct plane *p, const struct wire_packet *packet, const struct wire_map *m,
                      struct err *e)
{
    struct device *d = p->devices[m->device].device;
    struct device_import_part parts[WIRE_MAX_FDS];
    uint64_t worker = packet->header.worker;
    int fd = packet->n_fds > 0 ? packet->fds[0] : -1;
    if (m->kind == WIRE_SEGMENT_MEMFD)
        return segment_table_map(p->segments, d, worker, m->segment, fd, m->bytes, m->writable != 0,
                                 e);
    struct device_import from = {.kind = m->kind == WIRE_SEGMENT_CUDA_IPC ? DEVICE_IMPORT_IPC
                                                                          : DEVICE_IMPORT_VMM,
                                 .handle = m->handle,
                                 .generation = m->generation,
                                 .owner = &m->owner,
                                 .address = (void *)(uintptr_t)m->address,
                                 .fd = fd,
                                 .bytes = m->allocation_bytes};
    if (m->kind == WIRE_SEGMENT_CUDA_VMM_PARTS) {
        parts_of(packet, parts);
        from.parts = parts;
        from.n_parts = packet->n_fds;
    }
    return segment_table_import(p->segments, d, worker, m->segment, &from, m->offset, m->bytes, e);
}

static int map_segment(struct plane *p, struct wire_packet *packet, const struct wire_map *m,
                       struct err *e)
{
    struct worker *w;
    void *segments;
    int r = worker_for(p, packet->header.worker, m->device, &w, e);
    if (r < 0)
        return r;
    if (m->segment >= SEGMENT_MAX_PER_WORKER)
        return err_set(e, RS_EEXHAUSTED, "segment %u: a worker has %d at most", m->segment,
                       SEGMENT_MAX_PER_WORKER);
    size_t n = w->n_segments;
    segments = w->segments;
    r = mem_grow(&segments, &w->segments_capacity, m->segment + 1U, sizeof(*w->segments));
    if (r < 0)
        return err_set(e, r, "out of memory");
    w->segments = segments;
    if (m->segment >= n)
        memset(&w->segments[n], 0, (m->segment + 1U - n) * sizeof(*w->segments));
    r = map_memory(p, packet, m, e);
    if (r < 0)
        return r;
    packet->n_fds = 0; /* taken */
    w->segments[m->segment] =
        (struct worker_segment){m->bytes, true, m->writable != 0, m->kind != WIRE_SEGMENT_MEMFD};
    if (m->segment >= n)
        w->n_segments = m->segment + 1U;
    return 0;
}

/* Whether a MAP has as much of everything as its kind says. */
static bool map_is_whole(const struct wire_packet *packet, struct wire_map *ret)
{
    memset(ret, 0, sizeof *ret);
    if (packet->header.body_bytes < sizeof *ret)
        return false;
    memcpy(ret, packet->body, sizeof *ret);
    size_t table = packet->header.body_bytes - sizeof *ret;
    if (ret->kind == WIRE_SEGMENT_CUDA_VMM_PARTS)
        return packet->n_fds > 0 && table == packet->n_fds * sizeof(uint64_t);
    return table == 0 && ret->kind <= WIRE_SEGMENT_CUDA_VMM &&
           packet->n_fds == (ret->kind == WIRE_SEGMENT_CUDA_IPC ? 0U : 1U);
}

void worker_map(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    struct wire_map m;
    int r;
    if (!map_is_whole(packet, &m))
        r = err_set(&e, RS_EPROTO,
                    "MAP needs its body, and one descriptor, or one for each size, or a handle");
    else
        r = map_segment(p, packet, &m, &e);
    if (r < 0) {
        (void)err_prefix(&e, r, "map segment %u of worker %llx", m.segment,
                         (unsigned long long)packet->header.worker);
        worker_tidy(p, packet->header.worker);
    }
    plane_fail(p, &packet->header, WIRE_MAPPED, r, &e, UINT32_MAX, UINT32_MAX);
}

/* --- bindings --------------------------------------------------------------------------------- */

/* Byte behind the piece's last element; UINT64_MAX where the sum does not fit. */
static uint64_t piece_end(const struct binding_piece *x, uint32_t element_bytes)
{
    uint64_t end = element_bytes, add;
    if (box_empty(&x->box))
        return x->offset;
    if (__builtin_add_overflow(end, x->offset, &end))
        return UINT64_MAX;
    for (unsigned d = 0; d < x->box.n_dims; d++)
        if (__builtin_mul_overflow(x->box.size[d] - 1, (uint64_t)x->stride_bytes[d], &add) ||
            __builtin_add_overflow(end, add, &end))
            return UINT64_MAX;
    return end;
}

/* The control process has checked the binding against the layout; here we make sure that no piece
 * can make us touch memory that is not there. */
static int check_pieces(const struct worker *w, const struct binding *b, const uint8_t *dtypes,
                        struct err *e)
{
    for (uint32_t i = 0; i < b->n_pieces; i++) {
        const struct binding_piece piece = binding_at(b, i), *x = &piece;
        if (x->segment >= w->n_segments || !w->segments[x->segment].mapped)
            return err_set(e, RS_EPRECOND, "tensor %u lies in segment %u, which is not mapped",
                           x->tensor, x->segment);
        if (x->tensor >= b->n_tensors ||
            piece_end(x, dtype_bytes(dtypes[x->tensor])) > w->segments[x->segment].bytes)
            return err_set(e, RS_EINVAL, "tensor %u leaves its segment %u", x->tensor, x->segment);
    }
    return 0;
}

static int check_dtypes(const uint8_t *dtypes, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (dtype_bytes(dtypes[i]) == 0)
            return err_set(e, RS_EPROTO, "tensor %zu: %u is no dtype", i, dtypes[i]);
    return 0;
}

/* Decodes both memfds; *ret_binding and *ret_dtypes are the caller's. */
static int decode_binding(const struct wire_packet *packet, const struct wire_bind *m,
                          struct binding **ret_binding, uint8_t **ret_dtypes, struct err *e)
{
    const void *data, *dtypes;
    size_t n_bytes, n_dtypes;
    struct binding *b = NULL;
    uint8_t *copy = NULL;
    int r = wire_map_fd(packet->fds[0], &data, &n_bytes, e);
    if (r < 0)
        return r;
    r = wire_map_fd(packet->fds[1], &dtypes, &n_dtypes, e);
    if (r < 0)
        goto unmap_data;
    r = binding_decode(data, n_bytes, &b, e);
    if (r < 0)
        goto unmap_dtypes;
    if (b->n_tensors != m->n_tensors || n_dtypes != m->n_tensors)
        r = err_set(e, RS_EPROTO, "%u tensors, but the binding has %u and %zu dtypes came",
                    m->n_tensors, b->n_tensors, n_dtypes);
    if (r == 0 && (copy = mem_alloc(n_dtypes)) == NULL)
        r = err_set(e, RS_ENOMEM, "out of memory");
    if (r < 0) {
        binding_free(b);
        goto unmap_dtypes;
    }
    memcpy(copy, dtypes, n_dtypes);
    *ret_binding = b;
    *ret_dtypes = copy;
unmap_dtypes:
    wire_unmap(dtypes, n_dtypes);
unmap_data:
    wire_unmap(data, n_bytes);
    return r;
}

static void forget_publication(struct worker *w)
{
    mem_free(w->published);
    mem_free(w->cell_prints);
    w->published = NULL;
    w->cell_prints = NULL;
}

static int bind_memory(struct plane *p, struct wire_packet *packet, const struct wire_bind *m,
                       struct err *e)
{
    struct worker *w;
    struct binding *b = NULL;
    uint8_t *dtypes = NULL;
    if (m->memory > WIRE_SHADOW)
        return err_set(e, RS_EPROTO, "memory %u is neither live nor shadow", m->memory);
    int r = worker_for(p, packet->header.worker, m->device, &w, e);
    if (r < 0)
        return r;
    if (w->uses > 0)
        return err_set(e, RS_EPRECOND, "its memory is in use");
    r = decode_binding(packet, m, &b, &dtypes, e);
    if (r < 0)
        return r;
    r = check_dtypes(dtypes, m->n_tensors, e);
    if (r == 0)
        r = check_pieces(w, b, dtypes, e);
    if (r < 0) {
        binding_free(b);
        mem_free(dtypes);
        return r;
    }
    drop_memory(w, m->memory);
    forget_publication(w);
    w->bindings[m->memory] = b;
    w->dtypes[m->memory] = dtypes;
    w->bound[m->memory] = ++p->n_bound;
    w->n_tensors = m->n_tensors;
    unsigned other = m->memory ^ 1U;
    if (w->bindings[other] != NULL && w->bindings[other]->n_tensors != m->n_tensors)
        drop_memory(w, other); /* of a layout that no longer holds */
    return 0;
}

void worker_bind(struct plane *p, struct wire_packet *packet)
{
    struct err e = {0};
    struct wire_bind m;
    int r;
    if (packet->header.body_bytes != sizeof(m) || packet->n_fds != 2) {
        r = err_set(&e, RS_EPROTO, "BIND needs its body and two descriptors");
    } else {
        memcpy(&m, packet->body, sizeof(m));
        r = bind_memory(p, packet, &m, &e);
    }
    if (r < 0) {
        (void)err_prefix(&e, r, "bind worker %llx", (unsigned long long)packet->header.worker);
        worker_tidy(p, packet->header.worker);
    }
    plane_fail(p, &packet->header, WIRE_BOUND, r, &e, UINT32_MAX, UINT32_MAX);
}

static void finish_unbind(struct plane *p, struct worker *w)
{
    struct wire_header h = w->unbind;
    worker_free(p, w);
    plane_answer(p, &h, WIRE_UNBOUND, 0, NULL, 0, -1);
}

void worker_unbind(struct plane *p, struct wire_packet *packet)
{
    struct worker *w = worker_find(p, packet->header.worker);
    if (w == NULL || w->unbinding) {
        plane_answer(p, &packet->header, WIRE_UNBOUND, w == NULL ? 0 : RS_EPRECOND, NULL, 0, -1);
        return;
    }
    w->unbinding = true;
    w->unbind = packet->header;
    if (w->uses == 0)
        finish_unbind(p, w);
}

void worker_release(struct plane *p, struct worker *w)
{
    rs_assert(w->uses > 0);
    if (--w->uses == 0 && w->unbinding)
        finish_unbind(p, w);
}
