/* PutLayout: pages of tensors into a struct layout (peer/layout_pages.h). */
#include "base/mem.h"
#include "peer/layout_pages.h"
#include "service/api_common.h"

#include "base/banned.h"

struct put_layout {
    struct api_call base; /* first: waiter's container */
    struct layout_builder builder;
    bool refused;
};

/* --- the call ----------------------------------------------------------------------------------- */

static void put_layout_done(struct waiter *w, const struct op_reply *reply)
{
    struct api_call *c = container_of(w, struct api_call, waiter);
    Reshard__V1__PutLayoutReply m = RESHARD__V1__PUT_LAYOUT_REPLY__INIT;
    if (reply->code != 0) {
        rpc_call_finish(c->call, reply->code, reply->text);
        return;
    }
    m.digest.data = c->digest;
    m.digest.len = sizeof c->digest;
    m.known = reply->value != 0;
    api_finish(c->call, &m.base);
}

void api_put_layout_open(struct rpc_call *call)
{
    struct put_layout *p = mem_zalloc(sizeof *p);
    struct err e = {0};
    if (p == NULL) {
        rpc_call_finish(call, RS_ENOMEM, "no memory for the call");
        return;
    }
    p->base.call = call;
    p->base.service = rpc_call_context(call);
    p->base.waiter.done = put_layout_done;
    rpc_call_set_arg(call, p);
    int r = api_identity(call, true, &p->base.client, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_put_layout_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct put_layout *p = rpc_call_arg(call);
    struct err e = {0};
    if (p == NULL || p->base.client == 0 || p->refused)
        return;
    int r = layout_builder_page(&p->builder, data, n_bytes, false, &e);
    p->refused = r != 0;
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_put_layout_half_close(struct rpc_call *call)
{
    struct put_layout *p = rpc_call_arg(call);
    struct layout *l = NULL;
    struct err e = {0};
    if (p == NULL || p->base.client == 0 || p->refused)
        return;
    int r = layout_builder_take(&p->builder, &l, &e);
    if (r == 0)
        r = op_put_layout(p->base.service, l, p->base.digest, &p->base.waiter, &e);
    if (r != 0)
        api_finish_error(call, r, &e);
}

void api_put_layout_end(struct rpc_call *call, int reason)
{
    struct put_layout *p = rpc_call_arg(call);
    (void)reason;
    if (p == NULL)
        return;
    waiter_forget(&p->base.waiter);
    layout_builder_close(&p->builder);
    mem_free(p);
}
