/* Peer.GetLayout: a node that has to plan with a layout that it never saw gets it from the coordinator, which has every
 * one. A call brings at most FETCH_CALL_BYTES, since all of a call's pages wait in its queue; the member asks on. */
#include <string.h>

#include "base/mem.h"
#include "peer/layout_pages.h"
#include "peer/private.h"

#include "base/banned.h"

enum { FETCH_CALL_BYTES = 4 << 20, FETCH_TIMEOUT_MS = 30000 };

/* --- the coordinator ----------------------------------------------------------------------------- */

static int serve(const struct peer *p, struct rpc_call *call, const void *data, size_t n_bytes,
                 struct err *e)
{
    uint8_t digest[16];
    uint32_t at = 0;
    char name[33];
    int r = coordinator_identify(p, call, NULL, e);
    if (r == 0)
        r = layout_request_read(data, n_bytes, digest, &at, e);
    if (r != 0)
        return r;
    const struct layout *l = p->find_layout != NULL ? p->find_layout(p->find_arg, digest) : NULL;
    layout_digest_text(digest, name);
    if (l == NULL || at > l->n_tensors)
        return err_set(e, RS_ENOTFOUND,
                       "the coordinator has no layout %s with more than %u tensors", name, at);
    size_t sent = 0;
    for (bool first = true; r == 0 && (first || (at < l->n_tensors && sent < FETCH_CALL_BYTES));
         first = false) {
        struct buf page;
        buf_init(&page);
        r = layout_page(l, first, &at, &page, e);
        if (r == 0)
            r = rpc_call_send(call, page.data, page.n_bytes);
        sent += page.n_bytes;
        buf_close(&page);
    }
    return r;
}

void fetch_serve(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct peer *p = coordinator_of(call);
    struct err e = {0};
    if (p == NULL)
        return;
    int r = serve(p, call, data, n_bytes, &e);
    if (r == RS_EPERM)
        p->refused++;
    rpc_call_finish(call, r, r != 0 ? err_text(&e, r) : NULL);
}

/* --- a member ------------------------------------------------------------------------------------ */

struct fetch {
    struct peer *p;
    uint8_t digest[16];
    struct layout_builder builder;
    uint32_t asked_from;   /* the tensor that the call under way began with */
    struct layout *layout; /* all of it, for the check */
    uv_work_t work;
    int code;
    struct err e;
    void (*done)(void *arg, int code, const char *text, struct layout *layout);
    void *arg;
};

static void fetch_end(struct fetch *f, int code, const char *text)
{
    struct layout *l = code == 0 ? f->layout : NULL;
    if (l == NULL)
        layout_free(f->layout);
    layout_builder_close(&f->builder);
    f->done(f->arg, code, text, l);
    mem_free(f);
}

static void on_checked(uv_work_t *work, int status)
{
    struct fetch *f = work->data;
    struct peer *p = f->p;
    (void)status;
    p->n_jobs--;
    if (p->stopping)
        f->code = err_set(&f->e, RS_ECANCELED, "the daemon stops");
    fetch_end(f, f->code, f->code != 0 ? err_text(&f->e, f->code) : "");
    peer_maybe_gone(p);
}

/* On a thread of libuv's. */
static void check(uv_work_t *work)
{
    struct fetch *f = work->data;
    f->code = layout_check(f->layout, &f->e);
    if (f->code == 0 && (f->code = layout_digest(f->layout)) != 0)
        (void)err_set(&f->e, f->code, "no memory for a layout's digest");
    if (f->code == 0 && memcmp(f->layout->digest, f->digest, sizeof f->digest) != 0)
        f->code =
            err_set(&f->e, RS_EDATALOSS, "the coordinator sent another layout than was asked for");
}

static void fetch_ask(struct fetch *f);

static void on_page(struct rpc_link_call *call, void *arg, const void *data, size_t n_bytes)
{
    struct fetch *f = arg;
    if (f->code == 0)
        f->code = layout_builder_page(&f->builder, data, n_bytes, true, &f->e);
    if (f->code != 0)
        rpc_link_call_cancel(call);
}

static void on_end(struct rpc_link_call *call, void *arg, int code, const char *text,
                   const void *details, size_t n_details)
{
    struct fetch *f = arg;
    (void)call;
    (void)details;
    (void)n_details;
    if (f->code != 0) {
        fetch_end(f, f->code, err_text(&f->e, f->code));
    } else if (code != 0) {
        fetch_end(f, code, text);
    } else if (layout_builder_complete(&f->builder)) {
        (void)layout_builder_take(&f->builder, &f->layout, &f->e);
        f->work.data = f;
        f->p->n_jobs++;
        rs_assert(uv_queue_work(f->p->options.loop, &f->work, check, on_checked) == 0);
    } else if (f->builder.layout == NULL || f->builder.layout->n_tensors <= f->asked_from) {
        fetch_end(f, RS_EPROTO, "the coordinator ended a layout before its end");
    } else {
        fetch_ask(f);
    }
}

static const struct rpc_link_call_events events = {.on_message = on_page, .on_end = on_end};

static int ask(struct fetch *f, struct err *e)
{
    const struct rpc_link_call_options o = {.path = "/reshard.v1.Peer/GetLayout",
                                            .deadline_ms = FETCH_TIMEOUT_MS};
    struct rpc_link_call *call;
    struct buf request;
    f->asked_from = f->builder.layout != NULL ? f->builder.layout->n_tensors : 0;
    buf_init(&request);
    int r = layout_request(f->digest, f->asked_from, &request);
    if (r == 0)
        r = rpc_link_call_open(f->p->member->link, &o, &events, f, &call, e);
    if (r == 0) {
        if ((f->code = rpc_link_call_send(call, request.data, request.n_bytes)) != 0)
            rpc_link_call_cancel(call); /* on_end tells */
        rpc_link_call_half_close(call);
    }
    buf_close(&request);
    return r;
}

static void fetch_ask(struct fetch *f)
{
    struct err e = {0};
    int r = ask(f, &e);
    if (r != 0)
        fetch_end(f, r, err_text(&e, r));
}

/* For what fails at once: `done` never runs inside peer_fetch_layout. */
static void on_nothing(uv_work_t *work)
{
    (void)work;
}

void peer_fetch_layout(struct peer *p, const uint8_t digest[16],
                       void (*done)(void *arg, int code, const char *text, struct layout *layout),
                       void *arg)
{
    struct fetch *f = mem_zalloc(sizeof *f);
    rs_assert(p->member != NULL && !p->stopping);
    if (f == NULL) {
        done(arg, RS_ENOMEM, "no memory to fetch a layout", NULL);
        return;
    }
    f->p = p;
    memcpy(f->digest, digest, sizeof f->digest);
    f->done = done;
    f->arg = arg;
    f->code = p->member->link != NULL ? ask(f, &f->e) : RS_EUNAVAIL;
    if (f->code == 0)
        return;
    f->work.data = f;
    p->n_jobs++;
    rs_assert(uv_queue_work(p->options.loop, &f->work, on_nothing, on_checked) == 0);
}
