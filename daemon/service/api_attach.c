/* Attach: a worker's life as a stream. */
#include <string.h>

#include "base/mem.h"
#include "service/api_common.h"

#include "base/banned.h"

struct attach {
    struct attach_stream stream;
    struct rpc_call *call;
    struct service *service;
    uint64_t client;
    bool hello, ended;
};

static struct attach *attach_of(struct attach_stream *st)
{
    return container_of(st, struct attach, stream);
}

/* --- out ---------------------------------------------------------------------------------------- */

static void on_attached(struct attach_stream *st, const struct attached *a)
{
    struct attach *x = attach_of(st);
    Reshard__V1__Attached attached = RESHARD__V1__ATTACHED__INIT;
    Reshard__V1__AttachEvent m = RESHARD__V1__ATTACH_EVENT__INIT;
    attached.worker = a->worker;
    attached.daemon_incarnation = x->service->incarnation;
    attached.committed = a->committed;
    attached.held = a->held;
    attached.applied = a->applied;
    attached.grace_ms = x->service->config->grace_ms;
    m.event_case = RESHARD__V1__ATTACH_EVENT__EVENT_ATTACHED;
    m.attached = &attached;
    api_send(x->call, &m.base);
}

static void event_send(struct rpc_call *call, Reshard__V1__AttachEvent__EventCase event,
                       uint64_t version, uint64_t attempt, const char *reason, bool withdrawn)
{
    Reshard__V1__AttachEvent__VersionEvent v = RESHARD__V1__ATTACH_EVENT__VERSION_EVENT__INIT;
    Reshard__V1__AttachEvent m = RESHARD__V1__ATTACH_EVENT__INIT;
    v.version = version;
    v.attempt = attempt;
    v.reason = (char *)(uintptr_t)reason;
    v.withdrawn = withdrawn;
    m.event_case = event;
    m.publish_requested = &v; /* all version events share the union */
    api_send(call, &m.base);
}

static void on_tell(struct attach_stream *st, enum refit_tell tell, uint64_t version,
                    uint64_t attempt, const char *reason)
{
    static const Reshard__V1__AttachEvent__EventCase events[] = {
        [REFIT_TELL_PUBLISH_REQUESTED] = RESHARD__V1__ATTACH_EVENT__EVENT_PUBLISH_REQUESTED,
        [REFIT_TELL_READY_REQUESTED] = RESHARD__V1__ATTACH_EVENT__EVENT_READY_REQUESTED,
        [REFIT_TELL_ACCEPT_REQUESTED] = RESHARD__V1__ATTACH_EVENT__EVENT_ACCEPT_REQUESTED,
        [REFIT_TELL_COMMITTED] = RESHARD__V1__ATTACH_EVENT__EVENT_COMMITTED,
        [REFIT_TELL_ABORTED] = RESHARD__V1__ATTACH_EVENT__EVENT_ABORTED,
        [REFIT_TELL_SOURCE_RELEASED] = RESHARD__V1__ATTACH_EVENT__EVENT_SOURCE_RELEASED,
        [REFIT_TELL_WITHDRAWN] = RESHARD__V1__ATTACH_EVENT__EVENT_ABORTED,
    };
    event_send(attach_of(st)->call, events[tell], version, attempt, reason,
               tell == REFIT_TELL_WITHDRAWN);
}

static void on_lease_end(struct attach_stream *st, bool evicted, int code, const char *text)
{
    struct attach *x = attach_of(st);
    if (evicted && code != 0)
        event_send(x->call, RESHARD__V1__ATTACH_EVENT__EVENT_EVICTED, 0, 0, text, false);
    x->ended = true;
    rpc_call_finish(x->call, code, text);
}

/* --- in ----------------------------------------------------------------------------------------- */

void api_attach_open(struct rpc_call *call)
{
    struct attach *x = mem_zalloc(sizeof *x);
    struct err e = {0};
    if (x == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    x->stream.attached = on_attached;
    x->stream.tell = on_tell;
    x->stream.end = on_lease_end;
    x->call = call;
    x->service = rpc_call_context(call);
    rpc_call_set_arg(call, x);
    int r = api_identity(call, true, &x->client, &e);
    x->ended = r != 0;
    if (r != 0)
        api_finish_error(call, r, &e);
}

static int hello_check(const Reshard__V1__AttachHello *h, struct err *e)
{
    int r = api_name("model", h->model, e);
    if (r == 0)
        r = api_name("layout_name", h->layout_name, e);
    if (r != 0)
        return r;
    if (h->layout_digest.len != 16)
        return err_set(e, RS_EINVAL, "layout_digest has %zu bytes; use the 16 of PutLayoutReply",
                       h->layout_digest.len);
    if (h->side != RESHARD__V1__SIDE__SIDE_SOURCE && h->side != RESHARD__V1__SIDE__SIDE_DESTINATION)
        return err_set(e, RS_EINVAL, "side %d is not known; use SIDE_SOURCE or SIDE_DESTINATION",
                       (int)h->side);
    if ((unsigned)h->receive > RESHARD__V1__RECEIVE__RECEIVE_IN_PLACE)
        return err_set(e, RS_EINVAL, "receive %d is not known; use 0 … 2", (int)h->receive);
    if (h->live_version > REFIT_VERSION_MAX || h->shadow_version > REFIT_VERSION_MAX ||
        h->opened_version > REFIT_VERSION_MAX || h->published_version > REFIT_VERSION_MAX)
        return err_set(
            e, RS_EINVAL,
            "live_version, shadow_version, opened_version, published_version: versions are "
            "1 … 2^63-1, "
            "0 means none");
    return 0;
}

static int hello_take(struct attach *x, const Reshard__V1__AttachHello *h, struct err *e)
{
    if (x->hello)
        return err_set(e, RS_EINVAL, "AttachHello comes once");
    int r = hello_check(h, e);
    if (r != 0)
        return r;
    x->hello = true;
    struct attach_hello hello = {.model = h->model,
                                 .side = (enum refit_side)h->side,
                                 .layout_name = h->layout_name,
                                 .layout_digest = h->layout_digest.data,
                                 .rank = h->rank,
                                 .device = h->device,
                                 .receive = (enum refit_receive)h->receive,
                                 .accept_automatically = h->accept_automatically,
                                 .live_version = h->live_version,
                                 .shadow_version = h->shadow_version,
                                 .opened_version = h->opened_version,
                                 .asleep = h->asleep,
                                 .push = h->push,
                                 .again = h->again,
                                 .published_version = h->published_version,
                                 .resume = h->resume,
                                 .segments = h->segments,
                                 .n_segments = h->n_segments};
    return op_attach_hello(x->service, x->client, &hello, &x->stream, e);
}

static int box_read(const Reshard__V1__BindingPiece *p, struct box *ret, struct err *e)
{
    const Reshard__V1__Box *b = p->box;
    if (b->n_offset != b->n_size || b->n_size > BOX_MAX_DIMS)
        return err_set(
            e, RS_EINVAL,
            "tensor '%.128s': box with %zu offsets and %zu sizes; use as many as dims, at most %d",
            p->tensor, b->n_offset, b->n_size, BOX_MAX_DIMS);
    *ret = (struct box){.n_dims = (uint8_t)b->n_size};
    for (size_t d = 0; d < b->n_size; d++) {
        ret->offset[d] = b->offset[d];
        ret->size[d] = b->size[d];
    }
    return 0;
}

static int piece_take(struct attach *x, bool shadow, const Reshard__V1__BindingPiece *p,
                      struct err *e)
{
    struct box box;
    int r = api_name("binding.tensor", p->tensor, e);
    if (r == 0 && p->box != NULL)
        r = box_read(p, &box, e);
    if (r != 0)
        return r;
    struct attach_piece piece = {.tensor = p->tensor,
                                 .segment = p->segment,
                                 .offset_bytes = p->offset_bytes,
                                 .stride_bytes = p->stride_bytes,
                                 .n_strides = p->n_stride_bytes,
                                 .box = p->box != NULL ? &box : NULL};
    return op_attach_piece(&x->stream, shadow, &piece, e);
}

static int message_take(struct attach *x, const Reshard__V1__AttachRequest *q, struct err *e)
{
    int r = 0;
    switch (q->message_case) {
    case RESHARD__V1__ATTACH_REQUEST__MESSAGE_HELLO:
        return hello_take(x, q->hello, e);
    case RESHARD__V1__ATTACH_REQUEST__MESSAGE_BINDINGS:
        for (size_t i = 0; r == 0 && i < q->bindings->n_pieces; i++)
            r = piece_take(x, q->bindings->shadow, q->bindings->pieces[i], e);
        return r;
    case RESHARD__V1__ATTACH_REQUEST__MESSAGE_DONE:
        return op_attach_done(&x->stream, e);
    default:
        return err_set(e, RS_EINVAL, "a message of Attach is hello, bindings or done");
    }
}

void api_attach_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct attach *x = rpc_call_arg(call);
    struct err e = {0};
    void *request = NULL;
    if (x == NULL || x->ended)
        return;
    int r = api_decode(&reshard__v1__attach_request__descriptor, data, n_bytes, &request, &e);
    if (r == 0)
        r = message_take(x, request, &e);
    pb_free(request);
    if (r == 0 || x->ended)
        return;
    x->ended = true;
    op_attach_closed(&x->stream, false);
    api_finish_error(call, r, &e);
}

void api_attach_half_close(struct rpc_call *call)
{
    struct attach *x = rpc_call_arg(call);
    if (x == NULL || x->ended)
        return;
    x->ended = true;
    op_attach_closed(&x->stream, true);
    rpc_call_finish(call, 0, NULL);
}

void api_attach_end(struct rpc_call *call, int reason)
{
    struct attach *x = rpc_call_arg(call);
    (void)reason;
    if (x == NULL)
        return;
    op_attach_closed(&x->stream, false);
    mem_free(x);
}
