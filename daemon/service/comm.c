#include "service/comm.h"

#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/log.h"
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
    (void)snprintf(text, sizeof text, "node %s could not be asked for a communicator's id: %s",
                   coordinator_node_name(d->coordinator, node), err_name(code));
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
    if (d->comm.has && d->comm.key == c->key) {
        *c = d->comm;
        return true;
    }
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
    if (committed && d->run.comm.has)
        d->comm = d->run.comm;
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
    struct wire_comm head = {.n_devices = in->topology->n_devices};
    memcpy(head.id, o->comm_id, sizeof head.id);
    buf_put(out, &head, sizeof head);
    for (uint32_t d = 0; d < in->topology->n_devices; d++) {
        uint8_t member = 0;
        for (uint32_t i = 0; i < in->n_participants && member == 0; i++)
            member = attempt_input_device(in, &in->participants[i]) == d;
        buf_put(out, &member, 1);
    }
    return buf_error(out);
}
