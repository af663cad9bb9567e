#include "rpc/rpc_link_mem.h"

#include "base/clock.h"
#include "base/mem.h"
#include "rpc/rpc_link_call.h"

#include "base/banned.h"

struct mem_link {
    struct rpc_link base;
    struct rpc_mem *server; /* NULL: nobody is there */
    bool told;              /* the newest state */
    struct err down;        /* why it is down, once it is */
};

struct mem_call {
    struct rpc_link_call base;
    char *path;     /* owned, until it has begun */
    char *metadata; /* owned, packed */
    uint64_t deadline_ns;
    struct rpc_mem_call *peer; /* NULL: hasn't begun, or is cut off from its server */
    bool over;                 /* on_end is due, whatever comes after */
    struct err end;
};

static struct mem_link *mem_link(struct rpc_link *l)
{
    return container_of(l, struct mem_link, base);
}

static struct mem_call *mem_call(struct rpc_link_call *c)
{
    return container_of(c, struct mem_call, base);
}

/* --- carrier ---------------------------------------------------------------------------------- */

static void end_later(struct mem_call *c, int code, const char *text)
{
    if (c->over)
        return;
    c->over = true;
    (void)err_set(&c->end, code, "%s", text);
}

static void free_call(struct mem_call *c)
{
    rpc_link_call_fini(&c->base);
    mem_free(c->path);
    mem_free(c->metadata);
    mem_free(c);
}

static int open_call(struct rpc_link *l, const struct rpc_link_call_options *options,
                     const struct rpc_link_call_events *events, void *arg,
                     struct rpc_link_call **ret, struct err *e)
{
    struct mem_link *link = mem_link(l);
    struct mem_call *c = mem_zalloc(sizeof *c);
    if (c == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a call");
    c->path = mem_strdup(options->path);
    if (c->path == NULL ||
        rpc_metadata_pack(options->metadata, options->n_metadata, &c->metadata) != 0) {
        mem_free(c->path);
        mem_free(c);
        return err_set(e, RS_ENOMEM, "no memory for a call");
    }
    c->deadline_ns = options->deadline_ms == 0
                         ? UINT64_MAX
                         : clock_mono_ns() + (uint64_t)options->deadline_ms * 1000000U;
    rpc_link_call_init(&c->base, l, events, arg);
    if (link->server == NULL)
        end_later(c, RS_EUNAVAIL, link->down.code == 0 ? "nobody is there" : link->down.text);
    *ret = &c->base;
    return 0;
}

static void pump(struct rpc_link_call *c)
{
    (void)c; /* all waits for rpc_link_mem_run */
}

static void cancel(struct rpc_link_call *c, const char *text)
{
    end_later(mem_call(c), RS_ECANCELED, text);
}

static void close_link(struct rpc_link *l)
{
    (void)l; /* on_closed comes with rpc_link_mem_run */
}

static int reload_tls(struct rpc_link *l, const struct rpc_link_options *options, struct err *e)
{
    (void)l;
    (void)options;
    return err_set(e, RS_EPRECOND, "this link has no TLS");
}

static const struct rpc_link_carrier carrier = {.open = open_call,
                                                .pump = pump,
                                                .cancel = cancel,
                                                .reload_tls = reload_tls,
                                                .close = close_link};

/* --- delivery --------------------------------------------------------------------------------- */

static void begin(struct mem_call *c)
{
    struct mem_link *l = mem_link(c->base.link);
    c->peer = rpc_mem_open_with(l->server, c->path, l->base.token, c->deadline_ns, c->metadata);
    c->metadata = NULL; /* given */
    mem_free(c->path);
    c->path = NULL;
    if (c->peer == NULL)
        end_later(c, RS_EEXHAUSTED, "no memory for a call");
}

static unsigned send_queued(struct mem_call *c)
{
    unsigned n = 0;
    struct rpc_message *m;
    while ((m = rpc_link_call_next_out(&c->base)) != NULL) {
        rpc_mem_send(c->peer, m->data, m->n_bytes);
        rpc_message_unref(m);
        n++;
    }
    if (c->base.half_close && !c->base.half_close_sent) {
        c->base.half_close_sent = true;
        rpc_mem_half_close(c->peer);
        n++;
    }
    rpc_link_call_drained(&c->base);
    return n;
}

/* Nothing may look at the call after it. */
static void finish(struct mem_call *c, int code, const char *text)
{
    size_t n = 0;
    const void *details = c->peer == NULL || c->over ? NULL : rpc_mem_details(c->peer, &n);
    rpc_link_call_ended(&c->base, code, text, details, n);
    rpc_mem_close(c->peer);
    free_call(c);
}

/* One thing that the peer sent, its status included. False: nothing there. */
static bool receive(struct mem_call *c)
{
    void *data = NULL;
    size_t n = 0;
    struct err e = {0};
    bool ended = rpc_mem_has_ended(c->peer);
    if (c->base.held && !ended)
        return false;
    int r = rpc_mem_receive(c->peer, &data, &n, &e);
    if (ended) {
        finish(c, r == 1 ? 0 : r, e.text);
        return true;
    }
    if (r != 0)
        return false;
    rpc_link_call_received(&c->base, data, n);
    mem_free(data);
    return true;
}

/* The call may be gone after it. */
static unsigned run_call(struct mem_call *c)
{
    unsigned n = 0;
    if (!c->over && c->peer == NULL) {
        begin(c);
        n++;
    }
    if (!c->over)
        n += send_queued(c);
    if (!c->over)
        return receive(c) ? n + 1 : n;
    finish(c, c->end.code, c->end.text);
    return n + 1;
}

/* Any call may go in any callback, so each round starts at the list's head: a call that has been
 * looked at goes to the list's end. */
static unsigned run_calls(struct rpc_link *l)
{
    unsigned n = 0;
    for (uint32_t left = l->n_calls; left > 0 && !queue_empty(&l->calls); left--) {
        struct queue *q = queue_pop(&l->calls);
        queue_push(&l->calls, q);
        n += run_call(mem_call(container_of(q, struct rpc_link_call, of_link)));
    }
    return n;
}

static unsigned tell_state(struct mem_link *l)
{
    if (l->told || l->base.closing)
        return 0;
    l->told = true;
    if (l->server != NULL)
        rpc_link_went_up(&l->base);
    else
        rpc_link_went_down(&l->base, l->down.text);
    return 1;
}

unsigned rpc_link_mem_run(struct rpc_link *base)
{
    struct mem_link *l = mem_link(base);
    unsigned n = 0, before;
    do {
        before = n;
        if (l->server != NULL)
            n += tell_state(l);
        n += run_calls(base);
        if (l->server == NULL && base->n_calls == 0)
            n += tell_state(l);
    } while (n > before);
    if (!base->closing || base->n_calls > 0)
        return n;
    const struct rpc_link_events *events = base->events;
    void *arg = base->arg;
    rpc_link_fini(base);
    mem_free(l);
    if (events->on_closed != NULL)
        events->on_closed(arg);
    return n + 1;
}

/* --- the test's hand -------------------------------------------------------------------------- */

int rpc_link_mem_open(struct rpc_mem *server, const struct rpc_link_options *options,
                      const struct rpc_link_events *events, void *arg, struct rpc_link **ret,
                      struct err *e)
{
    struct mem_link *l = mem_zalloc(sizeof *l);
    if (l == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a link");
    int r = rpc_link_init(&l->base, &carrier, options, events, arg, e);
    if (r != 0) {
        mem_free(l);
        return r;
    }
    l->server = server;
    l->told = server == NULL; /* it starts as down, which is told to nobody */
    *ret = &l->base;
    return 0;
}

void rpc_link_mem_cut(struct rpc_link *base, const char *text)
{
    struct mem_link *l = mem_link(base);
    if (l->server == NULL)
        return;
    l->server = NULL;
    l->told = false;
    (void)err_set(&l->down, RS_EUNAVAIL, "%s", text);
    queue_foreach (q, &base->calls) {
        struct mem_call *c = mem_call(container_of(q, struct rpc_link_call, of_link));
        end_later(c, RS_EUNAVAIL, text);
        rpc_mem_close(c->peer);
        c->peer = NULL;
    }
}

void rpc_link_mem_join(struct rpc_link *base, struct rpc_mem *server)
{
    struct mem_link *l = mem_link(base);
    l->server = server;
    l->told = false;
}

void rpc_link_mem_expire(struct rpc_link_call *base)
{
    struct mem_call *c = mem_call(base);
    if (c->over)
        return;
    if (c->peer != NULL)
        rpc_mem_expire(c->peer);
    end_later(c, RS_EDEADLINE, "Deadline Exceeded");
}
