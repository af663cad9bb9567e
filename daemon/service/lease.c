/* Leases: a worker's memory at the data plane, its publications and applies, and its end. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "service/blame.h"
#include "service/compare.h"
#include "service/held.h"
#include "service/lease.h"
#include "service/mix.h"
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

void publication_unref(struct publication *p)
{
    if (p == NULL || --p->refs > 0)
        return;
    mem_free(p->fingerprints);
    mem_free(p->expected);
    mem_free(p);
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

static int map_send(struct lease *l, uint32_t i, struct err *e)
{
    const struct segment *s = l->segments[i];
    struct wire_map body = {
        .bytes = s->bytes, .segment = i, .device = l->device, .writable = s->writable};
    struct wire_header h = {.type = WIRE_MAP, .model = l->model->id, .worker = l->id};
    return link_submit(l->service->link, &l->bind, h, &body, sizeof body, NULL, 0, &s->fd, 1,
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
        l->rebinding = is_live(l);
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

/* --- publish ------------------------------------------------------------------------------------ */

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

static uint64_t publication_name(const struct lease *l, const struct publication *p)
{
    const struct layout *layout = l->layout->layout;
    if (p->fingerprints == NULL)
        return 0; /* nothing is known of the content */
    uint64_t id = mix_bytes(p->version, layout->digest, sizeof layout->digest);
    id = mix_word(id, l->rank);
    id = mix_bytes(id, p->fingerprints, p->n_tensors * sizeof *p->fingerprints);
    return id != 0 ? id : 1;
}

static struct node_report report_of(const struct lease *l, enum refit_event_type type)
{
    return (struct node_report){
        .type = NODE_REPORT_EVENT, .model = l->model->name, .event = {.type = type}};
}

/* Tensors of which this rank holds nothing have nothing to tell. */
static struct publication_print *prints_make(const struct lease *l, const struct publication *p,
                                             uint32_t *ret_n)
{
    struct box box[1];
    struct publication_print *prints = mem_calloc(p->n_tensors, sizeof *prints);
    for (uint32_t t = 0; prints != NULL && t < p->n_tensors; t++)
        if (layout_shards(l->layout->layout, t, l->rank, box, 1) > 0)
            prints[(*ret_n)++] = (struct publication_print){t, p->fingerprints[t]};
    return prints;
}

/* cookie 0: nobody waits for the answer. */
static int published_tell(struct lease *l, uint64_t cookie)
{
    const struct publication *p = l->published;
    struct node_report r = report_of(l, REFIT_EV_PUBLISHED);
    uint32_t n = 0;
    struct publication_print *prints = p->fingerprints != NULL ? prints_make(l, p, &n) : NULL;
    if (p->fingerprints != NULL && prints == NULL)
        return RS_ENOMEM;
    r.event.cookie = cookie;
    r.event.published.worker = l->id;
    r.event.published.version = p->version;
    r.event.published.publication = p->id;
    r.has_prints = prints != NULL;
    r.prints = prints;
    r.n_prints = n;
    r.expected = p->expected;
    r.n_expected = p->n_expected;
    int code = node_tell(l->service, &r);
    mem_free(prints);
    return code;
}

void lease_publish_again(struct lease *l)
{
    if (l->published != NULL && published_tell(l, 0) == RS_ENOMEM)
        log_error("model %s: no memory to report what layout %s rank %u has published",
                  l->model->name, l->layout->layout->name, l->rank);
}

static void publish_refuse(struct lease *l, int code, const char *text)
{
    struct publication *p = l->publishing;
    l->publishing = NULL;
    publication_unref(p);
    service_answer(l->service, l->publish_cookie, code, text);
}

static void publish_finish(struct lease *l, int code, const char *text)
{
    struct publication *p = l->publishing;
    uint64_t cookie = l->publish_cookie;
    if (code != 0) {
        publish_refuse(l, code, text);
        return;
    }
    l->publishing = NULL;
    p->id = publication_name(l, p);
    publication_unref(l->published);
    l->published = p;
    l->waits_for = p->version;
    code = published_tell(l, cookie);
    if (code != 0)
        service_answer(l->service, cookie, code,
                       "the coordinator could not be told; publish again");
}

static void on_published(struct link_request *r, int code, struct wire_packet *packet,
                         const struct err *e)
{
    struct lease *l = container_of(r, struct lease, publish);
    struct err mine = {0};
    if (code != 0) {
        mine = *e;
        blame_names(&mine, l->layout->layout, NULL);
        publish_finish(l, code == RS_EPEER ? RS_EUNAVAIL : code, err_text(&mine, code));
        return;
    }
    code = lease_table(l, packet, &l->publishing->fingerprints, &mine);
    publish_finish(l, code, err_text(&mine, code));
}

static int expected_copy(struct lease *l, struct publication *p, const struct op_expected *expected,
                         size_t n, struct err *e)
{
    p->expected = mem_calloc(n, sizeof *p->expected);
    if (p->expected == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    for (; p->n_expected < n; p->n_expected++) {
        int64_t t = layout_find(l->layout->layout, expected[p->n_expected].tensor);
        if (t < 0)
            return err_set(e, RS_EINVAL,
                           "expected fingerprint of tensor '%s': layout '%s' has no such tensor",
                           expected[p->n_expected].tensor, l->layout->layout->name);
        p->expected[p->n_expected].tensor = (uint32_t)t;
        p->expected[p->n_expected].fingerprint = expected[p->n_expected].fingerprint;
    }
    return 0;
}

/* This worker's place in the program that the next attempt most likely has: then its cells are fingerprinted in the
 * same pass, and PREPARE need not read the memory again. PROGRAM_NONE: none is known. */
static uint32_t place_likely(const struct lease *l)
{
    const struct plan_entry *plan = l->model->last_plan;
    for (uint32_t i = 0; plan != NULL && plan->source == l->layout && i < plan->program.n_places;
         i++)
        if (plan->program.places[i].side == PROGRAM_SOURCE &&
            plan->program.places[i].rank == l->rank)
            return i;
    return PROGRAM_NONE;
}

static int publish_send(struct lease *l, struct err *e)
{
    uint32_t place = place_likely(l);
    bool known = place != PROGRAM_NONE;
    struct wire_publish body = {.has_program = known, .place = known ? place : 0};
    struct wire_header h = {.type = WIRE_PUBLISH,
                            .model = l->model->id,
                            .worker = l->id,
                            .version = l->publishing->version};
    l->publish = (struct link_request){.done = on_published};
    return link_submit(l->service->link, &l->publish, h, &body, sizeof body, NULL, 0,
                       known ? &l->model->last_plan->program_fd : NULL, known ? 1 : 0,
                       l->service->config->memory_timeout_ms, e);
}

static void publish_begin(struct lease *l)
{
    struct err e = {0};
    if (l->service->config->verify[0] == 'o') {
        publish_finish(l, 0, "");
        return;
    }
    int r = l->bound ? publish_send(l, &e)
                     : err_set(&e, RS_EUNAVAIL, "the data plane is being replaced; try again");
    if (r != 0)
        publish_refuse(l, r, err_text(&e, r));
}

/* Of one version published twice: the second time it says of its tensors what it has not said before. */
static bool expects_otherwise(const struct publication *now, const struct publication *before)
{
    if (now->n_expected == 0 || before == NULL || before->version != now->version)
        return false;
    bool same = now->n_expected == before->n_expected;
    for (uint32_t i = 0; same && i < now->n_expected; i++)
        same = now->expected[i].tensor == before->expected[i].tensor &&
               now->expected[i].fingerprint == before->expected[i].fingerprint;
    return !same;
}

/* Whether it may publish: 1 where it has done so already. */
static void on_may_publish(struct waiter *w, const struct op_reply *reply)
{
    struct lease *l = container_of(w, struct lease, ask);
    const struct publication *before = l->published;
    if (reply->code != 0) {
        publish_refuse(l, reply->code, reply->text);
        return;
    }
    if (reply->value == 0) {
        publish_begin(l);
        return;
    }
    if (expects_otherwise(l->publishing, before)) {
        publish_refuse(l, RS_EEXIST,
                       "this version is published already, without these expected fingerprints; "
                       "they go with its first Publish");
        return;
    }
    struct op_reply done = {
        .text = "",
        .value = before != NULL && before->version == l->publishing->version ? before->id : 0};
    struct publication *p = l->publishing;
    l->publishing = NULL;
    publication_unref(p);
    service_reply(l->service, l->publish_cookie, &done);
}

static int publish_ask(struct lease *l, struct waiter *w, struct err *e)
{
    struct node_report r = {.type = NODE_REPORT_PUBLISH_ASK,
                            .model = l->model->name,
                            .worker = l->id,
                            .version = l->publishing->version};
    l->ask.done = on_may_publish;
    l->publish_cookie = waiter_add(l->service, w);
    w->asked = true; /* from now on the coordinator has the last word */
    int code = node_ask(l->service, &r, &l->ask, e);
    if (code != 0)
        waiter_forget(w);
    return code;
}

int lease_publish(struct lease *l, uint64_t version, const struct op_expected *expected,
                  size_t n_expected, struct waiter *w, struct err *e)
{
    if (l->publishing != NULL)
        return err_set(e, RS_EPRECOND,
                       "version %" PRIu64 " of this worker is being fingerprinted; wait for it",
                       l->publishing->version);
    if (n_expected > 0 && l->service->config->verify[0] == 'o')
        return err_set(e, RS_EPRECOND,
                       "expected fingerprints can't be checked: this daemon takes none ([refit] "
                       "verify = off); set it to sampled or full, or expect nothing");
    struct publication *p = mem_zalloc(sizeof *p);
    if (p == NULL)
        return err_set(e, RS_ENOMEM, "no memory to publish");
    *p = (struct publication){
        .refs = 1, .version = version, .n_tensors = l->layout->layout->n_tensors};
    l->publishing = p;
    int r = expected_copy(l, p, expected, n_expected, e);
    if (r == 0)
        r = publish_ask(l, w, e);
    if (r != 0) {
        l->publishing = NULL;
        publication_unref(p);
    }
    return r;
}

/* --- apply -------------------------------------------------------------------------------------- */

static void applied(struct lease *l, int code, const char *text)
{
    struct node_report r = report_of(l, REFIT_EV_APPLIED);
    r.event.applied.worker = l->id;
    r.event.applied.version = l->apply_version;
    r.event.applied.code = code;
    r.event.applied.text = text;
    l->torn = code != 0;
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
    if (r == 0)
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

void lease_end(struct lease *l, bool for_good, int code, const char *reason)
{
    bool attached = l->life != LEASE_ATTACHING;
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
        publish_refuse(l, RS_EABORTED, reason);
    waiter_forget(&l->waiter);
    for (uint32_t i = 0; i < l->n_segments; i++)
        segment_unuse(l->segments[i]);
    if (!l->mapped) /* the segments may be freed from here on */
        l->n_segments = 0;
    stream_end(l, attached && for_good, code, reason);
    if (l->known) {
        struct node_report r = report_of(l, REFIT_EV_LEFT);
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

void leases_sweep(struct service *s)
{
    queue_foreach_safe (q, tmp, &s->leases) {
        struct lease *l = container_of(q, struct lease, in);
        if (l->life != LEASE_LEAVING || l->job)
            continue;
        if (l->mapped && !s->stopping) {
            if (!l->waits_unbind && link_state(s->link) == LINK_READY && !lease_busy(l))
                unbind_send(l);
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
