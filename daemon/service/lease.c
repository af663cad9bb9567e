/* Leases: a worker's memory at the data plane, its applies, and its end. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/blame.h"
#include "service/held.h"
#include "service/lease.h"
#include "service/part.h"
#include "service/peers.h"

#include "base/banned.h"

struct lease *lease_find(struct service *s, uint64_t id)
{
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->id == id && l->life != LEASE_ATTACHING && l->life != LEASE_LEAVING)
            return l;
    }
    return NULL;
}

/* --- MAP and BIND ------------------------------------------------------------------------------- */

static void lease_unmapped(struct lease *l)
{
    if (!l->mapped)
        return;
    l->mapped = l->bound = false;
    for (uint32_t i = 0; i < l->n_segments; i++)
        segment_unmapped(l->segments[i]);
}

static void on_bind_step(struct link_request *r, int code, struct wire_packet *packet,
                         const struct err *e);

static uint32_t wire_kind(uint32_t kind)
{
    return kind == MEMORY_SEGMENT_CUDA_IPC         ? WIRE_SEGMENT_CUDA_IPC
           : kind == MEMORY_SEGMENT_CUDA_VMM       ? WIRE_SEGMENT_CUDA_VMM
           : kind == MEMORY_SEGMENT_CUDA_VMM_PARTS ? WIRE_SEGMENT_CUDA_VMM_PARTS
                                                   : WIRE_SEGMENT_MEMFD;
}

static int map_send(struct lease *l, uint32_t i, struct err *e)
{
    const struct segment *s = l->segments[i];
    const bool in_parts = s->kind == MEMORY_SEGMENT_CUDA_VMM_PARTS;
    uint64_t part_bytes[MEMORY_MAX_PARTS];
    _Static_assert((int)MEMORY_MAX_PARTS <= (int)WIRE_MAX_FDS,
                   "a MAP takes all that a client hands over");
    struct wire_map body = {
        .bytes = s->bytes, .segment = i, .device = l->device, .writable = s->writable};
    if (s->kind != MEMORY_SEGMENT_MEMFD) {
        body.kind = wire_kind(s->kind);
        body.offset = s->device.offset;
        body.allocation_bytes = s->device.allocation_bytes;
        body.generation = s->device.allocation;
        memcpy(body.handle, s->device.handle, sizeof body.handle);
        body.owner = s->owner;
        body.address = s->device.address;
    }
    struct wire_header h = {.type = WIRE_MAP, .model = l->model->id, .worker = l->id};
    for (uint32_t k = 0; in_parts && k < s->n_parts; k++)
        part_bytes[k] = s->parts[k].bytes;
    return link_submit(l->service->link, &l->bind, h, &body, sizeof body, part_bytes,
                       in_parts ? s->n_parts * sizeof *part_bytes : 0,
                       in_parts ? s->part_fds : &s->fd,
                       in_parts     ? s->n_parts
                       : s->fd >= 0 ? 1
                                    : 0,
                       l->service->config->memory_timeout_ms, e);
}

static int bind_send(struct lease *l, enum wire_memory memory, struct err *e)
{
    struct wire_bind body = {
        .device = l->device, .memory = memory, .n_tensors = l->layout->layout->n_tensors};
    struct wire_header h = {.type = WIRE_BIND, .model = l->model->id, .worker = l->id};
    int fds[2] = {l->binding_fd[memory], l->dtypes_fd};
    return link_submit(l->service->link, &l->bind, h, &body, sizeof body, NULL, 0, fds, 2,
                       l->service->config->memory_timeout_ms, e);
}

static void bind_finish(struct lease *l, int code, const struct err *e)
{
    l->bound = code == 0;
    l->after_bind(l, code, e);
}

/* Segments in order, then live, then shadow. */
static void bind_next(struct lease *l)
{
    struct err e = {0};
    unsigned step = l->step++;
    int r;
    l->bind = (struct link_request){.done = on_bind_step};
    if (step < l->n_segments)
        r = map_send(l, step, &e);
    else if (step == l->n_segments)
        r = bind_send(l, WIRE_LIVE, &e);
    else if (step == l->n_segments + 1 && l->binding_fd[WIRE_SHADOW] >= 0)
        r = bind_send(l, WIRE_SHADOW, &e);
    else {
        bind_finish(l, 0, NULL);
        return;
    }
    if (r != 0)
        bind_finish(l, r, &e);
}

static void on_bind_step(struct link_request *r, int code, struct wire_packet *packet,
                         const struct err *e)
{
    struct lease *l = container_of(r, struct lease, bind);
    (void)packet;
    if (code != 0)
        bind_finish(l, code, e);
    else
        bind_next(l);
}

void lease_bind(struct lease *l, void (*after)(struct lease *l, int code, const struct err *e))
{
    l->after_bind = after;
    l->step = 0;
    if (!l->mapped) {
        l->mapped = true;
        for (uint32_t i = 0; i < l->n_segments; i++)
            segment_mapped(l->segments[i]);
    }
    bind_next(l);
}

/* --- a new data plane --------------------------------------------------------------------------- */

static void rebind_ended(struct lease *l)
{
    if (!l->rebinding)
        return;
    l->rebinding = false;
    if (--l->service->n_rebinding == 0 && link_state(l->service->link) == LINK_READY)
        node_up(l->service);
}

static void after_rebind(struct lease *l, int code, const struct err *e)
{
    if (code != 0 && code != RS_EPEER && code != RS_EUNAVAIL && code != RS_EDEADLINE)
        lease_end(l, true, RS_EABORTED, err_text(e, code)); /* ends the rebinding too */
    rebind_ended(l);
}

static bool is_live(const struct lease *l)
{
    return l->life == LEASE_LIVE || l->life == LEASE_GRACE;
}

/* It attaches, and the data plane has seen all of its memory: the coordinator's word alone is missing. */
static bool waits_for_answer(const struct lease *l)
{
    return l->life == LEASE_ATTACHING && l->waiter.cookie != 0;
}

bool lease_is_told(const struct lease *l)
{
    return l->known || l->waiter.cookie != 0;
}

/* One that is to be bound again and is not on its way yet; NULL: none. */
static struct lease *rebind_next(struct service *s)
{
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->rebinding && !l->mapped)
            return l;
    }
    return NULL;
}

void leases_rebind(struct service *s)
{
    s->n_rebinding = 0;
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        l->rebinding = (is_live(l) || waits_for_answer(l)) && !l->asleep;
        s->n_rebinding += l->rebinding;
    }
    if (s->n_rebinding == 0)
        node_up(s);
    for (struct lease *l; (l = rebind_next(s)) != NULL;)
        lease_bind(l, after_rebind);
    leases_sweep(s);
}

void leases_lost_data_plane(struct service *s)
{
    s->n_rebinding = 0;
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        l->rebinding = false;
        lease_unmapped(l);
    }
}

/* --- what its requests share -------------------------------------------------------------------- */

struct node_report lease_report(const struct lease *l, enum refit_event_type type)
{
    return (struct node_report){
        .type = NODE_REPORT_EVENT, .model = l->model->name, .event = {.type = type}};
}

/* Copies a table of n fingerprints out of an answer's descriptor. */
static int table_read(struct wire_packet *packet, uint32_t n, uint64_t **ret, struct err *e)
{
    const void *data;
    size_t n_bytes;
    if (packet->n_fds < 1)
        return err_set(e, RS_EPROTO, "the data plane's answer has no fingerprints");
    int r = wire_map_fd(packet->fds[0], &data, &n_bytes, e);
    if (r != 0)
        return r;
    uint64_t *table = mem_calloc(n, sizeof *table);
    if (table == NULL)
        r = err_set(e, RS_ENOMEM, "no memory for the fingerprints");
    else if (n_bytes < n * sizeof *table)
        r = err_set(e, RS_EPROTO, "%zu bytes of fingerprints for %u tensors", n_bytes, n);
    else if (n > 0)
        memcpy(table, data, n * sizeof *table);
    wire_unmap(data, n_bytes);
    if (r != 0)
        mem_free(table);
    else
        *ret = table;
    return r;
}

int lease_table(struct lease *l, struct wire_packet *packet, uint64_t **ret, struct err *e)
{
    return table_read(packet, l->layout->layout->n_tensors, ret, e);
}

const char *lease_unbound(const struct lease *l)
{
    bool rebinds = link_state(l->service->link) == LINK_READY; /* as after a new start */
    return rebinds ? "being replaced" : link_text(l->service->link);
}

/* --- apply -------------------------------------------------------------------------------------- */

static void applied(struct lease *l, int code, const char *text)
{
    struct node_report r = lease_report(l, REFIT_EV_APPLIED);
    r.event.applied.worker = l->id;
    r.event.applied.version = l->apply_version;
    r.event.applied.code = code;
    r.event.applied.text = text;
    l->torn = code != 0 && !l->asleep;
    (void)node_tell(l->service, &r); /* without a session it is told when there is one again */
    leases_sweep(l->service);
    peers_quiet(l->service->peers);
}

static int applied_check(struct lease *l, struct wire_packet *packet, struct err *e)
{
    uint64_t *table;
    int r = lease_table(l, packet, &table, e);
    if (r != 0)
        return r;
    const struct layout *layout = l->layout->layout;
    for (uint32_t t = 0;
         l->sums != NULL && l->sums_version == l->apply_version && t < layout->n_tensors; t++) {
        if (table[t] == l->sums[t])
            continue;
        r = err_set(e, RS_EDATALOSS,
                    "tensor '%s': layout '%s' rank %u holds fingerprint %016" PRIx64
                    " in live memory after Apply; %016" PRIx64 " was staged",
                    layout->tensors[t].name, layout->name, l->rank, table[t], l->sums[t]);
        break;
    }
    if (r == 0 && !l->asleep)
        l->content[WIRE_LIVE] =
            (struct memory_content){.version = l->apply_version,
                                    .fold = held_fold(table, layout->n_tensors),
                                    .content = l->content[WIRE_SHADOW].version == l->apply_version
                                                   ? l->content[WIRE_SHADOW].content
                                                   : 0};
    mem_free(table);
    return r;
}

static void on_applied(struct link_request *r, int code, struct wire_packet *packet,
                       const struct err *e)
{
    struct lease *l = container_of(r, struct lease, apply);
    struct err mine = {0};
    if (code == 0) {
        code = applied_check(l, packet, &mine);
    } else {
        mine = *e;
        blame_names(&mine, l->layout->layout, NULL);
        (void)err_prefix(&mine, code, "layout '%s' rank %u", l->layout->layout->name, l->rank);
    }
    applied(l, code, code == 0 ? "" : err_text(&mine, code));
}

void lease_apply(struct lease *l, uint64_t version)
{
    struct err e = {0};
    struct wire_header h = {
        .type = WIRE_APPLY, .model = l->model->id, .worker = l->id, .version = version};
    l->apply_version = version;
    l->apply = (struct link_request){.done = on_applied};
    int r = link_submit(l->service->link, &l->apply, h, NULL, 0, NULL, 0, NULL, 0,
                        l->service->config->memory_timeout_ms, &e);
    if (r != 0)
        applied(l, r, err_text(&e, r));
    else
        l->content[WIRE_LIVE] = (struct memory_content){0};
}

/* --- the end ------------------------------------------------------------------------------------ */

static void stream_end(struct lease *l, bool evicted, int code, const char *text)
{
    struct attach_stream *st = l->stream;
    if (st == NULL)
        return;
    l->stream = NULL;
    st->lease = NULL;
    st->end(st, evicted, code, text);
}

static void sleep_ended(struct lease *l, int code, const char *text)
{
    uint64_t cookie = l->sleep_cookie;
    l->sleep_cookie = 0;
    if (cookie != 0)
        service_answer(l->service, cookie, code, text);
}

void lease_end(struct lease *l, bool for_good, int code, const char *reason)
{
    bool attached = l->life != LEASE_ATTACHING, told = lease_is_told(l);
    if (l->life == LEASE_LEAVING)
        return;
    if (attached)
        log_info("model %s: lease of layout %s rank %u worker %016" PRIx64 " ended: %s",
                 l->model->name, l->layout->layout->name, l->rank, l->id, reason);
    l->life = LEASE_LEAVING;
    (void)uv_timer_stop(&l->grace);
    link_forget(l->service->link, &l->bind);
    link_forget(l->service->link, &l->publish);
    waiter_forget(&l->ask);
    if (l->publishing != NULL)
        lease_publish_refuse(l, RS_EABORTED, reason);
    waiter_forget(&l->waiter);
    sleep_ended(l, RS_EABORTED, reason);
    for (uint32_t i = 0; i < l->n_segments; i++)
        segment_unuse(l->segments[i]);
    if (!l->mapped) /* the segments may be freed from here on */
        l->n_segments = 0;
    stream_end(l, attached && for_good, code, reason);
    if (told) {
        struct node_report r = lease_report(l, REFIT_EV_LEFT);
        r.event.left.worker = l->id;
        r.event.left.for_good = for_good;
        r.event.left.reason = reason;
        (void)node_tell(l->service,
                        &r); /* without a session it is not reported when there is one again */
    }
    rebind_ended(l);
}

static void on_freed(uv_handle_t *h)
{
    struct lease *l = h->data;
    struct service *s = l->service;
    for (unsigned i = 0; i < 2; i++) {
        if (l->binding_fd[i] >= 0)
            (void)close(l->binding_fd[i]);
        mem_free(l->pieces[i]);
    }
    if (l->dtypes_fd >= 0)
        (void)close(l->dtypes_fd);
    publication_unref(l->published);
    layout_entry_unref(l->layout);
    mem_free(l->withdrawn.reason);
    mem_free(l->sums);
    mem_free(l->segments);
    mem_free(l);
    service_handle_closed(s);
}

static void on_unbound(struct link_request *r, int code, struct wire_packet *packet,
                       const struct err *e)
{
    struct lease *l = container_of(r, struct lease, unbind);
    (void)packet;
    (void)e;
    l->waits_unbind = false;
    if (code == RS_EPEER || code == RS_ECANCELED || code == RS_EDEADLINE)
        return; /* the data plane is dead or dying: its end unmaps all */
    lease_unmapped(l);
    leases_sweep(l->service);
}

static void unbind_send(struct lease *l)
{
    struct wire_header h = {.type = WIRE_UNBIND, .model = l->model->id, .worker = l->id};
    l->unbind = (struct link_request){.done = on_unbound};
    l->waits_unbind = link_submit(l->service->link, &l->unbind, h, NULL, 0, NULL, 0, NULL, 0,
                                  l->service->config->memory_timeout_ms, NULL) == 0;
}

static bool lease_busy(const struct lease *l)
{
    return link_waits(&l->apply) || part_uses(l->model->part, l);
}

/* --- sleep -------------------------------------------------------------------------------------- */

static void contents_forget(struct lease *l)
{
    l->content[WIRE_LIVE] = l->content[WIRE_SHADOW] = (struct memory_content){0};
    l->held = l->applied = l->waits_for = l->opened = 0;
    l->torn = false;
    publication_unref(l->published);
    l->published = NULL;
    mem_free(l->sums);
    l->sums = NULL;
    l->sums_version = 0;
}

static void sleep_begin(struct lease *l)
{
    log_info("model %s: layout %s rank %u goes to sleep: worker %016" PRIx64, l->model->name,
             l->layout->layout->name, l->rank, l->id);
    l->asleep = true;
    link_forget(l->service->link, &l->bind);
    link_forget(l->service->link, &l->publish);
    waiter_forget(&l->ask);
    if (l->publishing != NULL)
        lease_publish_refuse(l, RS_EABORTED, "the worker has gone to sleep");
    contents_forget(l);
    l->bound = false;
    struct node_report r = lease_report(l, REFIT_EV_SLEPT);
    r.event.left.worker = l->id;
    (void)node_tell(l->service, &r); /* without a session it is told when there is one again */
    rebind_ended(l);
}

void lease_sleep(struct lease *l, struct waiter *w)
{
    struct service *s = l->service;
    sleep_ended(l, RS_ECANCELED, "it was asked again");
    l->sleep_cookie = waiter_add(s, w);
    if (!l->asleep)
        sleep_begin(l);
    leases_sweep(s);
}

/* Nothing of it is mapped any more: its segments may be taken back. */
static void slept(struct lease *l)
{
    for (uint32_t i = 0; i < l->n_segments; i++)
        segment_unuse(l->segments[i]);
    l->n_segments = 0;
    l->segment_bytes = 0;
    sleep_ended(l, 0, "");
}

/* --- what nobody needs any more ----------------------------------------------------------------- */

void leases_sweep(struct service *s)
{
    queue_foreach_safe (q, tmp, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        bool leaving = l->life == LEASE_LEAVING;
        if ((!leaving && !l->asleep) || l->job)
            continue;
        if (l->mapped &&
            !(leaving && s->stopping)) { /* a sleeper is never told so while it is mapped */
            if (!s->stopping && !l->waits_unbind && link_state(s->link) == LINK_READY &&
                !lease_busy(l))
                unbind_send(l);
            continue;
        }
        if (!leaving) {
            slept(l);
            continue;
        }
        lease_unmapped(l);
        link_forget(s->link, &l->unbind);
        link_forget(s->link, &l->apply);
        queue_remove(&l->in);
        s->n_leases--;
        uv_close((uv_handle_t *)&l->grace, on_freed);
    }
}

static struct lease *lease_of_client(struct service *s, uint64_t client)
{
    queue_foreach (q, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->client == client && l->life != LEASE_LEAVING)
            return l;
    }
    return NULL;
}

void leases_client_ended(struct service *s, const struct memory_client *client)
{
    for (struct lease *l; (l = lease_of_client(s, client->id)) != NULL;)
        lease_end(l, false, RS_EUNAUTH, "its client's process or memory socket ended");
    leases_sweep(s);
}
