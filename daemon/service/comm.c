#include "service/comm.h"

#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "service/attempt_input.h"
#include "service/coordinator.h"
#include "service/mix.h"
#include "service/part.h"

#include "base/banned.h"

enum { COMM_ID_TIMEOUT_MS = 10000 };

/* --- coordinator -------------------------------------------------------------------------------- */

/* What a communicator depends on. */
static uint64_t comm_key(const struct run *r)
{
    const struct attempt_input *in = r->input;
    uint64_t key = mix_word(r->epoch, in->topology->n_nodes);
    for (uint32_t i = 0; i < in->topology->n_nodes; i++)
        key = mix_word(mix_word(key, in->nodes[i]), r->nodes[i].data_plane);
    for (uint32_t i = 0; i < in->n_participants; i++)
        key = mix_word(key, attempt_input_device(in, &in->participants[i]));
    return key;
}

/* Who has which comm rank: the participants' devices in the topology's order. NULL: no memory, and it can't be
 * shrunk later. */
static struct comm_member *members_make(const struct run *r, uint32_t *ret_n)
{
    const struct attempt_input *in = r->input;
    const struct topology *t = in->topology;
    struct comm_member *m = mem_calloc(t->n_devices, sizeof *m);
    uint32_t n = 0;
    for (uint32_t d = 0; m != NULL && d < t->n_devices; d++) {
        bool member = false;
        for (uint32_t i = 0; i < in->n_participants && !member; i++)
            member = attempt_input_device(in, &in->participants[i]) == d;
        uint32_t node = t->devices[d].node;
        if (member)
            m[n++] =
                (struct comm_member){.plane = mix_word(in->nodes[node], r->nodes[node].data_plane),
                                     .device = t->devices[d].local};
    }
    *ret_n = m != NULL ? n : 0;
    return m;
}

/* The ranks of `from` that are not in `to`; false where anything else differs, or a data plane has lost some of
 * its ranks only: that one would have to end what it shrinks. */
static bool shrink_find(const struct run_comm *from, const struct run_comm *to,
                        struct node_comm_shrink *ret)
{
    struct node_comm_shrink s = {0};
    uint32_t at = 0;
    for (uint32_t i = 0; i < from->n_members; i++) {
        const struct comm_member *m = &from->members[i];
        if (at < to->n_members && m->plane == to->members[at].plane &&
            m->device == to->members[at].device) {
            at++;
            continue;
        }
        for (uint32_t k = 0; k < to->n_members; k++)
            if (to->members[k].plane == m->plane)
                return false;
        if (s.n_excluded == NODE_MAX_EXCLUDED)
            return false;
        s.excluded[s.n_excluded++] = i;
    }
    if (at < to->n_members || s.n_excluded == 0 || to->n_members < 2)
        return false;
    memcpy(s.parent, from->id, sizeof s.parent);
    *ret = s;
    return true;
}

static bool comm_needed(const struct decider *d)
{
    return d->run.input->topology->n_nodes > 1 &&
           strcmp(d->coordinator->service->config->transport, "nccl") == 0;
}

static bool all_wanted(const struct run *r)
{
    for (uint32_t i = 0; i < r->input->topology->n_nodes; i++)
        if (!r->nodes[i].wanted)
            return false;
    return true;
}

/* The first device of the first node has comm rank 0 (links.c). */
static void comm_ask(struct decider *d)
{
    const struct run *r = &d->run;
    uint32_t node = r->input->nodes[0];
    struct node_order o = {.type = NODE_ORDER_COMM_ID,
                           .model = d->model,
                           .version = r->version,
                           .attempt = r->id,
                           .data_plane = r->nodes[0].data_plane,
                           .text = ""};
    char text[160];
    int code = coordinator_order(d->coordinator, node, &o);
    if (code == 0)
        return;
    (void)snprintf(text, sizeof text, "it could not be asked for a communicator's id: %s",
                   err_name(code));
    struct refit_event ev = {.type = REFIT_EV_FAILED,
                             .node = {.node = node, .attempt = r->id, .code = code, .text = text}};
    (void)decider_event(d, &ev);
}

bool comm_ready(struct decider *d)
{
    struct run_comm *c = &d->run.comm;
    if (c->has || !comm_needed(d))
        return true;
    if (c->asked || !all_wanted(&d->run))
        return false;
    c->key = comm_key(&d->run);
    c->members = members_make(&d->run, &c->n_members);
    if (d->comm.has && d->comm.key == c->key) {
        memcpy(c->id, d->comm.id, sizeof c->id);
        c->has = true;
        return true;
    }
    if (d->coordinator->service->config->shrink && d->comm.has &&
        shrink_find(&d->comm, c, &c->shrink))
        log_info("model %s version %llu attempt %llu: its communicator of %u ranks is shrunk: %u "
                 "have left",
                 d->model, (unsigned long long)d->run.version, (unsigned long long)d->run.id,
                 d->comm.n_members, c->shrink.n_excluded);
    c->asked = true;
    comm_ask(d);
    return false;
}

bool comm_take(struct decider *d, uint32_t node, const struct node_report *r)
{
    struct run_comm *c = &d->run.comm;
    if (r->attempt != d->run.id || !c->asked || c->has || node != d->run.input->nodes[0])
        return false; /* of an attempt that is over */
    memcpy(c->id, r->comm_id, sizeof c->id);
    c->has = true;
    return true;
}

void comm_use(struct decider *d)
{
    d->comm.has = false;
}

void comm_end(struct decider *d, bool committed)
{
    struct run_comm *c = &d->run.comm;
    if (committed && c->has) {
        mem_free(d->comm.members);
        d->comm = *c;
        c->members = NULL;
    }
    mem_free(c->members);
    *c = (struct run_comm){0};
}

void comm_close(struct decider *d)
{
    mem_free(d->comm.members);
    mem_free(d->run.comm.members);
    d->comm = d->run.comm = (struct run_comm){0};
}

/* --- node part ---------------------------------------------------------------------------------- */

static void failed(struct part *p, uint64_t attempt, int code, const char *why)
{
    struct err e;
    (void)err_set(&e, code, "a communicator's id: %s", why);
    struct node_report r = {
        .type = NODE_REPORT_EVENT,
        .model = p->model->name,
        .event = {.type = REFIT_EV_FAILED,
                  .node = {.attempt = attempt, .code = code, .text = err_text(&e, code)}}};
    (void)node_tell(p->model->service, &r);
}

static void on_made(struct link_request *x, int code, struct wire_packet *packet,
                    const struct err *e)
{
    struct part *p = container_of(x, struct part, comm);
    struct node_report r = {
        .type = NODE_REPORT_COMM_ID, .model = p->model->name, .attempt = p->comm_attempt};
    if (code == 0 && packet->header.body_bytes != sizeof(struct wire_comm_id)) {
        failed(p, p->comm_attempt, RS_EPROTO, "the data plane answered something else");
    } else if (code == 0) {
        memcpy(r.comm_id, packet->body, sizeof r.comm_id);
        (void)node_tell(p->model->service, &r);
    } else {
        failed(p, p->comm_attempt, code, err_text(e, code));
    }
}
_Static_assert((int)NODE_COMM_ID_BYTES == (int)WIRE_COMM_ID_BYTES, "an id travels whole");

void comm_id_make(struct part *p, const struct node_order *o)
{
    struct data_plane_link *link = p->model->service->link;
    struct wire_header h = {.type = WIRE_COMM_ID, .model = p->model->id};
    struct err e = {0};
    link_forget(link, &p->comm); /* of an attempt that is over */
    p->comm = (struct link_request){.done = on_made};
    p->comm_attempt = o->attempt;
    int r = o->data_plane != 0 && o->data_plane != link_child(link)
                ? err_set(&e, RS_EABORTED, "the data plane has been replaced")
                : link_submit(link, &p->comm, h, NULL, 0, NULL, 0, NULL, 0, COMM_ID_TIMEOUT_MS, &e);
    if (r != 0)
        failed(p, o->attempt, r, err_text(&e, r));
}

int comm_encode(const struct prepare *o, struct buf *out)
{
    const struct attempt_input *in = o->input;
    struct wire_comm head = {.n_devices = in->topology->n_devices,
                             .n_excluded = o->shrink.n_excluded};
    memcpy(head.id, o->comm_id, sizeof head.id);
    memcpy(head.parent, o->shrink.parent, sizeof head.parent);
    buf_put(out, &head, sizeof head);
    for (uint32_t d = 0; d < in->topology->n_devices; d++) {
        uint8_t member = 0;
        for (uint32_t i = 0; i < in->n_participants && member == 0; i++)
            member = attempt_input_device(in, &in->participants[i]) == d;
        buf_put(out, &member, 1);
    }
    buf_put(out, o->shrink.excluded, o->shrink.n_excluded * sizeof o->shrink.excluded[0]);
    return buf_error(out);
}
