/* The Attach stream: hello, pages of bindings, done; attached and events back. */
#include <string.h>

#include "base/mem.h"
#include "client/api.h"
#include "client/api_pack.h"
#include "client/link.h"
#include "rpc/pb_budget.h"

#include "reshard.pb-c.h"

#include "base/banned.h"

enum { PAGE_PIECES = 512 };

/* ---- pages ---- */

struct page_build {
    Reshard__V1__BindingPiece pieces[PAGE_PIECES];
    Reshard__V1__BindingPiece *list[PAGE_PIECES];
    Reshard__V1__Box boxes[PAGE_PIECES];
};

static int put_piece(const struct reshard_piece *from, uint32_t segment,
                     Reshard__V1__BindingPiece *p, Reshard__V1__Box *box, struct err *e)
{
    reshard__v1__binding_piece__init(p);
    if (from->tensor == NULL)
        return err_set(e, RS_EINVAL, "binding: a piece without a tensor");
    if (!from->whole_shard && from->box.n_dims > RESHARD_MAX_DIMS)
        return err_set(e, RS_EINVAL, "binding of tensor '%s': a box of %u dims; at most %d",
                       from->tensor, from->box.n_dims, RESHARD_MAX_DIMS);
    if (from->whole_shard && !from->dense && from->box.n_dims > RESHARD_MAX_DIMS)
        return err_set(e, RS_EINVAL, "binding of tensor '%s': strides of %u dims; at most %d",
                       from->tensor, from->box.n_dims, RESHARD_MAX_DIMS);
    p->tensor = (char *)(uintptr_t)from->tensor;
    p->segment = segment;
    p->offset_bytes = from->offset_bytes;
    if (!from->dense) {
        p->n_stride_bytes = from->box.n_dims;
        p->stride_bytes = (int64_t *)(uintptr_t)from->stride_bytes;
    }
    if (!from->whole_shard) {
        reshard__v1__box__init(box);
        box->n_offset = box->n_size = from->box.n_dims;
        box->offset = (uint64_t *)(uintptr_t)from->box.offset;
        box->size = (uint64_t *)(uintptr_t)from->box.size;
        p->box = box;
    }
    return 0;
}

static int page_append(struct api_pages *pages, const Reshard__V1__AttachRequest *m, struct err *e)
{
    size_t capacity = pages->n_pages;
    if (mem_grow((void **)&pages->pages, &capacity, pages->n_pages + 1, sizeof *pages->pages) != 0)
        return err_set(e, RS_ENOMEM, "bindings: out of memory");
    struct api_page *page = &pages->pages[pages->n_pages];
    int r = api_pack(&m->base, &page->data, &page->n_bytes, e);
    if (r == 0)
        pages->n_pages++;
    return r;
}

static int page_add(struct api_pages *pages, bool shadow, const struct reshard_piece *pieces,
                    size_t n, uint32_t (*segment_number)(const struct reshard_segment *, void *),
                    void *arg, struct page_build *build, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        int r = put_piece(&pieces[i], segment_number(pieces[i].segment, arg), &build->pieces[i],
                          &build->boxes[i], e);
        if (r != 0)
            return r;
        build->list[i] = &build->pieces[i];
    }
    Reshard__V1__BindingPage page = RESHARD__V1__BINDING_PAGE__INIT;
    page.shadow = shadow;
    page.n_pieces = n;
    page.pieces = build->list;
    Reshard__V1__AttachRequest m = RESHARD__V1__ATTACH_REQUEST__INIT;
    m.message_case = RESHARD__V1__ATTACH_REQUEST__MESSAGE_BINDINGS;
    m.bindings = &page;
    return page_append(pages, &m, e);
}

int api_pages_add(struct api_pages *pages, bool shadow, const struct reshard_piece *pieces,
                  size_t n_pieces,
                  uint32_t (*segment_number)(const struct reshard_segment *, void *), void *arg,
                  struct err *e)
{
    struct page_build *build = mem_alloc(sizeof *build);
    int r = build == NULL ? err_set(e, RS_ENOMEM, "bindings: out of memory") : 0;
    for (size_t at = 0; r == 0 && at < n_pieces; at += PAGE_PIECES) {
        size_t n = n_pieces - at < PAGE_PIECES ? n_pieces - at : PAGE_PIECES;
        r = page_add(pages, shadow, pieces + at, n, segment_number, arg, build, e);
    }
    mem_free(build);
    return r;
}

void api_pages_close(struct api_pages *pages)
{
    for (size_t i = 0; i < pages->n_pages; i++)
        mem_free(pages->pages[i].data);
    mem_free(pages->pages);
    *pages = (struct api_pages){0};
}

/* ---- attach ---- */

static int send_hello(struct rpc_stream *s, const struct api_hello *h, uint64_t deadline_ns,
                      struct err *e)
{
    Reshard__V1__AttachHello hello = RESHARD__V1__ATTACH_HELLO__INIT;
    hello.model = (char *)(uintptr_t)h->model;
    hello.side = (Reshard__V1__Side)h->side;
    hello.layout_name = (char *)(uintptr_t)h->layout_name;
    hello.layout_digest.len = 16;
    hello.layout_digest.data = (uint8_t *)(uintptr_t)h->digest;
    hello.rank = h->rank;
    hello.asleep = h->asleep;
    hello.push = h->push;
    hello.again = h->again;
    hello.published_version = h->published_version;
    hello.device = h->device;
    hello.receive = (Reshard__V1__Receive)h->receive;
    hello.accept_automatically = h->accept_automatically;
    hello.live_version = h->live_version;
    hello.shadow_version = h->shadow_version;
    hello.opened_version = h->opened_version;
    hello.resume = h->resume;
    hello.n_segments = h->n_segments;
    hello.segments = (uint64_t *)(uintptr_t)h->segments;
    Reshard__V1__AttachRequest m = RESHARD__V1__ATTACH_REQUEST__INIT;
    m.message_case = RESHARD__V1__ATTACH_REQUEST__MESSAGE_HELLO;
    m.hello = &hello;
    return api_stream_send(s, &m.base, deadline_ns, e);
}

static int send_done(struct rpc_stream *s, uint64_t deadline_ns, struct err *e)
{
    Reshard__V1__AttachDone done = RESHARD__V1__ATTACH_DONE__INIT;
    Reshard__V1__AttachRequest m = RESHARD__V1__ATTACH_REQUEST__INIT;
    m.message_case = RESHARD__V1__ATTACH_REQUEST__MESSAGE_DONE;
    m.done = &done;
    return api_stream_send(s, &m.base, deadline_ns, e);
}

static int say_all(struct rpc_stream *s, const struct api_hello *h, const struct api_pages *pages,
                   uint64_t deadline_ns, struct err *e)
{
    int r = send_hello(s, h, deadline_ns, e);
    for (size_t i = 0; r == 0 && i < pages->n_pages; i++)
        r = rpc_stream_send(s, pages->pages[i].data, pages->pages[i].n_bytes,
                            deadline_left_ms(deadline_ns), e);
    if (r == 0)
        r = send_done(s, deadline_ns, e);
    return r != 0 ? api_stream_status(s, r, e) : 0;
}

static int receive_attached(struct rpc_stream *s, uint64_t deadline_ns, struct api_attached *ret,
                            struct err *e)
{
    void *message;
    int r = api_receive(s, &reshard__v1__attach_event__descriptor, deadline_left_ms(deadline_ns),
                        &message, e);
    if (r == 1)
        return err_set(e, RS_EPROTO, "the daemon ended the stream without an answer");
    if (r != 0)
        return r;
    const Reshard__V1__AttachEvent *event = message;
    if (event->event_case == RESHARD__V1__ATTACH_EVENT__EVENT_ATTACHED)
        *ret = (struct api_attached){.worker = event->attached->worker,
                                     .incarnation = event->attached->daemon_incarnation,
                                     .committed = event->attached->committed,
                                     .held = event->attached->held,
                                     .applied = event->attached->applied,
                                     .grace_ms = event->attached->grace_ms};
    else
        r = err_set(e, RS_EPROTO, "the daemon's first event is not `attached`");
    pb_free(message);
    return r;
}

int api_attach(struct rpc_channel *c, const struct api_hello *hello, const struct api_pages *pages,
               uint64_t deadline_ns, struct rpc_stream **ret_stream, struct api_attached *ret,
               struct err *e)
{
    struct rpc_stream *s;
    int r = rpc_stream_open(c, "/reshard.v1.Refit/Attach", 0, &s, e);
    if (r != 0)
        return r;
    r = say_all(s, hello, pages, deadline_ns, e);
    if (r == 0)
        r = receive_attached(s, deadline_ns, ret, e);
    if (r != 0) {
        rpc_stream_close(s);
        return err_prefix(e, r, "attach model '%s' layout '%s' rank %u", hello->model,
                          hello->layout_name, hello->rank);
    }
    *ret_stream = s;
    return 0;
}

/* ---- events ---- */

static void text_copy(char *to, const char *from)
{
    size_t n = strlen(from);
    if (n >= RESHARD_TEXT_BYTES)
        n = RESHARD_TEXT_BYTES - 1;
    memcpy(to, from, n);
    to[n] = '\0';
}

static enum reshard_event_type event_type(Reshard__V1__AttachEvent__EventCase c)
{
    switch (c) {
    case RESHARD__V1__ATTACH_EVENT__EVENT_PUBLISH_REQUESTED:
        return RESHARD_EVENT_PUBLISH_REQUESTED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_READY_REQUESTED:
        return RESHARD_EVENT_READY_REQUESTED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_ACCEPT_REQUESTED:
        return RESHARD_EVENT_ACCEPT_REQUESTED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_COMMITTED:
        return RESHARD_EVENT_COMMITTED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_ABORTED:
        return RESHARD_EVENT_ABORTED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_SOURCE_RELEASED:
        return RESHARD_EVENT_SOURCE_RELEASED;
    case RESHARD__V1__ATTACH_EVENT__EVENT_EVICTED:
        return RESHARD_EVENT_EVICTED;
    default:
        return 0;
    }
}

int api_event(const void *data, size_t n_bytes, struct reshard_event *ret, struct err *e)
{
    void *message;
    int r = pb_unpack(&reshard__v1__attach_event__descriptor, data, n_bytes, NULL, &message, e);
    if (r != 0)
        return err_prefix(e, RS_EPROTO, "an event of the daemon");
    const Reshard__V1__AttachEvent *event = message;
    enum reshard_event_type type = event_type(event->event_case);
    if (type == 0) {
        r = err_set(e, RS_EUNIMPL, "an event of kind %d", (int)event->event_case);
        pb_free(message);
        return r;
    }
    /* All but `attached` are the same message, so any name of the union will do. */
    const Reshard__V1__AttachEvent__VersionEvent *v = event->committed;
    ret->type = type == RESHARD_EVENT_ABORTED && v->withdrawn ? RESHARD_EVENT_WITHDRAWN : type;
    ret->version = v->version;
    ret->attempt = v->attempt;
    text_copy(ret->reason, v->reason);
    pb_free(message);
    return 0;
}
