#include "rpc/rpc_link_call.h"

#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

/* --- link ------------------------------------------------------------------------------------- */

static bool is_printable(const char *text)
{
    for (const char *p = text; *p != '\0'; p++)
        if (*p < 0x20 || *p > 0x7e)
            return false;
    return true;
}

/* Lower case, and none of those that mean something to the protocol. */
static bool is_key(const char *key)
{
    size_t n = strlen(key);
    return n > 0 && strspn(key, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == n &&
           strncmp(key, "grpc-", 5) != 0 && (n < 4 || strcmp(key + n - 4, "-bin") != 0);
}

static int check_metadata(const struct rpc_metadata *pairs, size_t n, struct err *e)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        if (!is_key(pairs[i].key) || !is_printable(pairs[i].value))
            return err_set(e, RS_EINVAL, "metadata '%s' holds what no header may hold",
                           pairs[i].key);
        bytes += strlen(pairs[i].key) + strlen(pairs[i].value) + 2;
    }
    if (bytes > RPC_METADATA_MAX_BYTES)
        return err_set(e, RS_EINVAL, "metadata of %zu bytes, at most %d", bytes,
                       RPC_METADATA_MAX_BYTES);
    return 0;
}

int rpc_link_init(struct rpc_link *l, const struct rpc_link_carrier *carrier,
                  const struct rpc_link_options *options, const struct rpc_link_events *events,
                  void *arg, struct err *e)
{
    *l = (struct rpc_link){.carrier = carrier, .events = events, .arg = arg};
    l->max_queued_messages =
        options->max_queued_messages == 0 ? 1024 : options->max_queued_messages;
    l->max_queued_bytes = options->max_queued_bytes == 0 ? 16U << 20 : options->max_queued_bytes;
    queue_init(&l->calls);
    if (options->token != NULL && !is_printable(options->token))
        return err_set(e, RS_EINVAL, "token holds bytes that no header may hold");
    if (options->token != NULL && (l->token = mem_strdup(options->token)) == NULL)
        return err_set(e, RS_ENOMEM, "no memory for a link");
    return 0;
}

void rpc_link_fini(struct rpc_link *l)
{
    rs_assert(queue_empty(&l->calls));
    mem_free(l->token);
}

void rpc_link_went_up(struct rpc_link *l)
{
    if (l->closing || l->up)
        return;
    l->up = true;
    if (l->events->on_up != NULL)
        l->events->on_up(l, l->arg);
}

void rpc_link_went_down(struct rpc_link *l, const char *text)
{
    if (l->closing)
        return;
    l->up = false;
    if (l->events->on_down != NULL)
        l->events->on_down(l, l->arg, text);
}

int rpc_link_reload_tls(struct rpc_link *l, const struct rpc_link_options *options, struct err *e)
{
    if (l->closing)
        return err_set(e, RS_ECANCELED, "the link is closing");
    int r = l->carrier->reload_tls(l, options, e);
    return r == 0 ? 0 : err_prefix(e, r, "link");
}

void rpc_link_close(struct rpc_link *l)
{
    if (l->closing)
        return;
    l->closing = true;
    l->up = false;
    queue_foreach (q, &l->calls) {
        struct rpc_link_call *c = container_of(q, struct rpc_link_call, of_link);
        c->open = false;
        l->carrier->cancel(c, "the link was closed");
    }
    l->carrier->close(l);
}

bool rpc_link_is_up(const struct rpc_link *l)
{
    return l->up;
}

uint32_t rpc_link_n_calls(const struct rpc_link *l)
{
    return l->n_calls;
}

/* --- a call, from its owner's side ------------------------------------------------------------ */

int rpc_link_call_open(struct rpc_link *l, const struct rpc_link_call_options *options,
                       const struct rpc_link_call_events *events, void *arg,
                       struct rpc_link_call **ret, struct err *e)
{
    if (l->closing)
        return err_set(e, RS_ECANCELED, "%s: the link is closing", options->path);
    int r = check_metadata(options->metadata, options->n_metadata, e);
    if (r == 0)
        r = l->carrier->open(l, options, events, arg, ret, e);
    return r == 0 ? 0 : err_prefix(e, r, "%s", options->path);
}

/* One message may always wait, however large, else it could never be sent. */
static bool queue_full(const struct rpc_link_call *c, size_t n_bytes)
{
    const struct rpc_link *l = c->link;
    return c->n_out > 0 &&
           (c->n_out >= l->max_queued_messages || c->out_bytes + n_bytes > l->max_queued_bytes);
}

int rpc_link_call_send(struct rpc_link_call *c, const void *data, size_t n_bytes)
{
    if (!c->open || c->half_close)
        return RS_ECANCELED;
    if (queue_full(c, n_bytes)) {
        c->full = true;
        return RS_EEXHAUSTED;
    }
    struct rpc_out *out = mem_alloc(sizeof *out);
    if (out == NULL)
        return RS_ENOMEM;
    out->message = rpc_message_new(data, n_bytes);
    if (out->message == NULL) {
        mem_free(out);
        return RS_ENOMEM;
    }
    queue_push(&c->out, &out->link);
    c->n_out++;
    c->out_bytes += n_bytes;
    c->link->carrier->pump(c);
    return 0;
}

void rpc_link_call_half_close(struct rpc_link_call *c)
{
    if (!c->open || c->half_close)
        return;
    c->half_close = true;
    c->link->carrier->pump(c);
}

void rpc_link_call_cancel(struct rpc_link_call *c)
{
    if (!c->open)
        return;
    c->open = false;
    c->link->carrier->cancel(c, "cancelled");
}

void rpc_link_call_hold(struct rpc_link_call *c, bool hold)
{
    bool lifted = c->held && !hold;
    c->held = hold;
    if (lifted && c->open)
        c->link->carrier->pump(c);
}

size_t rpc_link_call_queued_bytes(const struct rpc_link_call *c)
{
    return c->out_bytes;
}

/* --- a call, from its carrier's side ---------------------------------------------------------- */

void rpc_link_call_init(struct rpc_link_call *c, struct rpc_link *l,
                        const struct rpc_link_call_events *events, void *arg)
{
    *c = (struct rpc_link_call){.link = l, .events = events, .arg = arg, .open = true};
    queue_init(&c->out);
    queue_push(&l->calls, &c->of_link);
    l->n_calls++;
}

struct rpc_message *rpc_link_call_next_out(struct rpc_link_call *c)
{
    struct queue *q = queue_pop(&c->out);
    if (q == NULL)
        return NULL;
    struct rpc_out *out = container_of(q, struct rpc_out, link);
    struct rpc_message *m = out->message;
    c->n_out--;
    c->out_bytes -= m->n_bytes;
    mem_free(out);
    return m;
}

void rpc_link_call_drained(struct rpc_link_call *c)
{
    const struct rpc_link *l = c->link;
    if (!c->full || !c->open || c->half_close || c->n_out > l->max_queued_messages / 2 ||
        c->out_bytes > l->max_queued_bytes / 2)
        return;
    c->full = false;
    if (c->events->on_writable != NULL)
        c->events->on_writable(c, c->arg);
}

void rpc_link_call_received(struct rpc_link_call *c, const void *data, size_t n_bytes)
{
    if (c->open && c->events->on_message != NULL)
        c->events->on_message(c, c->arg, data, n_bytes);
}

static void drop_queue(struct rpc_link_call *c)
{
    for (struct rpc_message *m = rpc_link_call_next_out(c); m != NULL;
         m = rpc_link_call_next_out(c))
        rpc_message_unref(m);
}

void rpc_link_call_ended(struct rpc_link_call *c, int code, const char *text, const void *details,
                         size_t n_details)
{
    c->open = false;
    queue_remove(&c->of_link);
    c->link->n_calls--;
    drop_queue(c);
    if (c->events->on_end != NULL)
        c->events->on_end(c, c->arg, code, text, details, n_details);
}

void rpc_link_call_fini(struct rpc_link_call *c)
{
    drop_queue(c);
}
