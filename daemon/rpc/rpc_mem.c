#include "rpc/rpc_mem.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "rpc/rpc_call.h"
#include "rpc/rpc_services.h"

#include "base/banned.h"

/* Messages that are under way to a peer that doesn't read; a network holds some too. */
#define WINDOW 16

struct rpc_mem {
    struct rpc_server_options options;
    struct rpc_services services;
    struct queue calls; /* all that the peer has not closed, or that have not ended */
    bool stopping;
};

struct rpc_mem_call {
    struct rpc_call base;
    struct rpc_mem *server;
    struct queue inbox; /* of rpc_out: under way to the peer */
    unsigned n_inbox;
    bool half_closed;
    bool end_due; /* on_end is to run, with `reason` */
    int reason;
    bool has_status; /* the peer can see code, and text after the inbox */
    int code;
    char text[256];
    bool closed; /* the peer's end is gone */
};

static struct rpc_mem_call *mem_call(struct rpc_call *call)
{
    return container_of(call, struct rpc_mem_call, base);
}

static void set_status(struct rpc_mem_call *c, int code, const char *text)
{
    if (c->has_status)
        return;
    c->has_status = true;
    c->code = err_from_status(err_status(code)); /* what is left of it after the wire */
    (void)snprintf(c->text, sizeof c->text, "%s", text == NULL ? "" : text);
}

static void end_later(struct rpc_mem_call *c, int reason)
{
    if (c->end_due || c->base.state == RPC_CALL_ENDED)
        return;
    c->end_due = true;
    c->reason = reason;
}

static bool push_inbox(struct rpc_mem_call *c)
{
    struct queue *q = queue_pop(&c->base.out);
    if (q == NULL)
        return false;
    c->base.n_out--;
    c->base.out_bytes -= container_of(q, struct rpc_out, link)->message->n_bytes;
    queue_push(&c->inbox, q);
    c->n_inbox++;
    return true;
}

static void pump(struct rpc_call *call)
{
    struct rpc_mem_call *c = mem_call(call);
    bool finishing = call->state == RPC_CALL_FINISHING;
    if (call->method->kind == RPC_UNARY && !finishing)
        return;
    while ((finishing || c->n_inbox < WINDOW) && push_inbox(c))
        ;
    if (!finishing)
        return;
    set_status(c, call->code, call->text);
    end_later(c, 0);
}

static struct rpc_out *pop_inbox(struct rpc_mem_call *c)
{
    struct queue *q = queue_pop(&c->inbox);
    if (q == NULL)
        return NULL;
    c->n_inbox--;
    return container_of(q, struct rpc_out, link);
}

static void drop_inbox(struct rpc_mem_call *c)
{
    for (struct rpc_out *out = pop_inbox(c); out != NULL; out = pop_inbox(c)) {
        rpc_message_unref(out->message);
        mem_free(out);
    }
}

static void cut(struct rpc_call *call, int code, const char *text)
{
    struct rpc_mem_call *c = mem_call(call);
    drop_inbox(c);
    set_status(c, code, text);
    end_later(c, RS_EPEER);
}

static const struct rpc_carrier carrier = {.pump = pump, .cut = cut};

static void free_call(struct rpc_mem_call *c)
{
    drop_inbox(c);
    rpc_call_close(&c->base);
    mem_free(c);
}

/* Runs the on_end that are due; each may finish other calls. Then frees what nobody needs. */
static void settle(struct rpc_mem *m)
{
    bool again = true;
    while (again) {
        again = false;
        queue_foreach (q, &m->calls) {
            struct rpc_mem_call *c = mem_call(container_of(q, struct rpc_call, link));
            if (!c->end_due)
                continue;
            c->end_due = false;
            rpc_call_ended(&c->base, c->reason);
            again = true;
        }
    }
    queue_foreach_safe (q, tmp, &m->calls) {
        struct rpc_mem_call *c = mem_call(container_of(q, struct rpc_call, link));
        if (c->closed && c->base.state == RPC_CALL_ENDED)
            free_call(c);
    }
}

int rpc_mem_new(const struct rpc_server_options *options, const struct rpc_method *methods,
                size_t n_methods, struct rpc_mem **ret, struct err *e)
{
    struct rpc_mem *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a server");
    m->options = rpc_options_with_defaults(options);
    queue_init(&m->calls);
    int r = rpc_services_init(&m->services, &m->options, methods, n_methods, e);
    if (r != 0) {
        mem_free(m);
        return r;
    }
    *ret = m;
    return 0;
}

void rpc_mem_run(struct rpc_mem *m)
{
    settle(m);
}

void rpc_mem_stop(struct rpc_mem *m)
{
    if (m->stopping)
        return;
    m->stopping = true;
    rpc_health_stop(&m->services.health);
    queue_foreach (q, &m->calls) {
        struct rpc_call *call = container_of(q, struct rpc_call, link);
        if (call->method->kind != RPC_UNARY)
            rpc_call_finish(call, RS_EUNAVAIL, "the daemon stops");
    }
    settle(m);
}

/* The call ends from the peer's side; the peer sees `code` where no status was under way. */
static void break_off(struct rpc_mem_call *c, int code)
{
    if (c->base.state == RPC_CALL_ENDED || c->end_due)
        return;
    drop_inbox(c);
    set_status(c, code, err_name(code));
    end_later(c, code);
}

void rpc_mem_cancel_all(struct rpc_mem *m)
{
    queue_foreach (q, &m->calls)
        break_off(mem_call(container_of(q, struct rpc_call, link)), RS_ECANCELED);
    settle(m);
}

void rpc_mem_free(struct rpc_mem *m)
{
    if (m == NULL)
        return;
    rpc_mem_stop(m);
    rpc_mem_cancel_all(m);
    queue_foreach_safe (q, tmp, &m->calls)
        free_call(mem_call(container_of(q, struct rpc_call, link)));
    rpc_services_close(&m->services);
    mem_free(m);
}

uint32_t rpc_mem_n_calls(const struct rpc_mem *m)
{
    uint32_t n = 0;
    queue_foreach (q, &m->calls)
        n += container_of(q, struct rpc_call, link)->state != RPC_CALL_ENDED;
    return n;
}

struct rpc_mem_call *rpc_mem_open_with(struct rpc_mem *m, const char *path, const char *token,
                                       uint64_t deadline_ns, char *metadata)
{
    struct rpc_mem_call *c = mem_zalloc(sizeof *c);
    if (c == NULL) {
        mem_free(metadata);
        return NULL;
    }
    const struct rpc_entry *entry = rpc_services_find(&m->services, path);
    rpc_call_init(&c->base, &carrier, entry == NULL ? &rpc_unknown : entry, &m->options);
    c->server = m;
    c->base.deadline_ns = deadline_ns;
    c->base.metadata = metadata;
    queue_init(&c->inbox);
    queue_push(&m->calls, &c->base.link);
    if (m->stopping) {
        /* A stopped server never sees the call: no callback. */
        set_status(c, RS_EUNAVAIL, "the daemon stops");
        c->base.state = RPC_CALL_ENDED;
        return c;
    }
    rpc_identify(&m->options, token, &c->base.identity);
    rpc_call_opened(&c->base);
    settle(m);
    return c;
}

struct rpc_mem_call *rpc_mem_open(struct rpc_mem *m, const char *path, const char *token,
                                  uint64_t deadline_ns)
{
    return rpc_mem_open_with(m, path, token, deadline_ns, NULL);
}

void rpc_mem_send(struct rpc_mem_call *c, const void *data, size_t n_bytes)
{
    /* What comes after an unary request is never read off the wire. */
    bool ignored = c->base.got_message && !rpc_kind_streams_in(c->base.method->kind);
    if (!c->half_closed && !ignored)
        rpc_call_received(&c->base, data, n_bytes);
    settle(c->server);
}

void rpc_mem_half_close(struct rpc_mem_call *c)
{
    if (!c->half_closed)
        rpc_call_half_closed(&c->base);
    c->half_closed = true;
    settle(c->server);
}

void rpc_mem_cancel(struct rpc_mem_call *c)
{
    break_off(c, RS_ECANCELED);
    settle(c->server);
}

void rpc_mem_expire(struct rpc_mem_call *c)
{
    break_off(c, RS_EDEADLINE);
    settle(c->server);
}

static int give_message(struct rpc_out *out, void **ret, size_t *ret_n_bytes, struct err *e)
{
    struct rpc_message *m = out->message;
    void *copy = mem_alloc(m->n_bytes);
    size_t n_bytes = m->n_bytes;
    if (copy != NULL)
        memcpy(copy, m->data, n_bytes);
    rpc_message_unref(m);
    mem_free(out);
    if (copy == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a message of %zu bytes", n_bytes);
    *ret = copy;
    *ret_n_bytes = n_bytes;
    return 0;
}

int rpc_mem_receive(struct rpc_mem_call *c, void **ret, size_t *ret_n_bytes, struct err *e)
{
    struct rpc_out *out = pop_inbox(c);
    if (out != NULL) {
        if (c->base.state == RPC_CALL_OPEN)
            pump(&c->base);
        return give_message(out, ret, ret_n_bytes, e);
    }
    if (!c->has_status)
        return err_set(e, RS_EDEADLINE, "no message yet");
    return c->code == 0 ? 1 : err_set(e, c->code, "%s", c->text);
}

bool rpc_mem_has_ended(const struct rpc_mem_call *c)
{
    return c->has_status && queue_empty(&c->inbox);
}

const void *rpc_mem_details(const struct rpc_mem_call *c, size_t *ret_n_bytes)
{
    const struct rpc_message *details = c->base.details;
    if (details == NULL || !c->has_status)
        return NULL;
    *ret_n_bytes = details->n_bytes;
    return details->data;
}

void rpc_mem_close(struct rpc_mem_call *c)
{
    if (c == NULL)
        return;
    struct rpc_mem *m = c->server;
    break_off(c, RS_ECANCELED);
    c->closed = true;
    settle(m);
}
